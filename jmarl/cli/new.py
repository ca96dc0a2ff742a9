"""`jmarl new env NAME`, `jmarl new algorithm NAME`: a skeleton that works, and its test, to be changed bit by bit."""

import keyword
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Literal

import tyro

from jmarl.cli.errors import UsageError, require_free_file, usage_errors


def main(argv: Sequence[str] | None = None, prog: str = "jmarl new") -> None:
    """The command line."""
    with usage_errors():
        tyro.cli(new, prog=prog, args=argv)


def new(
    kind: tyro.conf.Positional[Literal["env", "algorithm"]],
    name: tyro.conf.Positional[str],
    folder: Path = Path(),
    overwrite: bool = False,
) -> None:
    """Writes NAME.py and test_NAME.py: an environment or an algorithm that can be trained at once.

    Args:
      kind: what is written.
      name: of the function, and of the file.
      folder: where.
      overwrite: replace files that are there.
    """
    if not name.isidentifier() or keyword.iskeyword(name) or not name.islower():
        raise UsageError(f"{name!r} cannot be the name of a function: write it in small letters, as in my_algorithm.")
    paths = {kind: folder / f"{name}.py", f"test_{kind}": folder / f"test_{name}.py"}
    for path in paths.values():
        require_free_file(path, overwrite, "name")
    for template, path in paths.items():
        text = (resources.files("jmarl.cli") / "templates" / f"{template}.py").read_text()
        capitals = "".join(part.capitalize() for part in name.split("_"))
        for old, written in {f"own_{kind}": name, f"Own{kind.capitalize()}": capitals}.items():
            text = text.replace(old, written)
        path.write_text(text)
    words = f"train mappo --env {paths[kind]}:{name}" if kind == "env" else f"train {paths[kind]}:{name}"
    print(f"{' and '.join(map(str, paths.values()))} are written. Now: pytest {paths[f'test_{kind}']}; jmarl {words}")


if __name__ == "__main__":
    main()
