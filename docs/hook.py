"""Gives mkdocs the pages of the site: docs/, what it links to elsewhere in the repository, the API, the notebooks.

Links between files of the repository stay what they are on GitHub; here they are led to the page that shows the file.
"""

import importlib.util
import logging
import posixpath
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

logging.getLogger("jax").setLevel(logging.ERROR)
HERE = Path(__file__).parent


def _load(name: str) -> Any:
    spec: Any = importlib.util.spec_from_file_location(f"jmarl_docs_{name}", HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


pages = _load("pages")
make_api = _load("make_api")

# Pages that are elsewhere in the repository, and where the site has them.
INCLUDED = {
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "benchmarks/README.md": "project/benchmarks.md",
    "benchmarks/results/README.md": "results/committed.md",
    "tests/reference/README.md": "project/reference_values.md",
    "examples/quickstart.ipynb": "notebooks/quickstart.md",
    "examples/compose.ipynb": "notebooks/compose.md",
    "examples/analyse.ipynb": "notebooks/analyse.md",
    "examples/hunters_and_prey.ipynb": "notebooks/hunters_and_prey.md",
}
PLACES = {**INCLUDED, "README.md": "index.md", "docs": "index.md"}
PICTURES = (".png", ".gif", ".svg", ".jpg")
_texts: dict[str, str] = {}


def on_files(files: Files, config: Any) -> Files:
    """Adds what is generated, and what is linked to."""
    sources = {file.src_uri: f"docs/{file.src_uri}" for file in files.documentation_pages()}
    raw = {uri: (pages.ROOT / path).read_text(encoding="utf-8") for uri, path in sources.items()}
    for path, uri in INCLUDED.items():
        sources[uri] = path
        if path.endswith(".ipynb"):
            raw[uri], pictures = pages.notebook(pages.ROOT / path)
            for name, content in pictures.items():
                files.append(File.generated(config, f"notebooks/{name}", content=content))
        else:
            raw[uri] = (pages.ROOT / path).read_text(encoding="utf-8")
    _texts.clear()
    added: dict[str, str] = {}
    for uri, text in raw.items():
        _texts[uri] = _led(pages.expand(text), uri, sources[uri], added)
    for module, text in pages.api_pages(make_api).items():
        _texts[f"api/{module}.md"] = text
    _texts["api.md"] = _with_api_links(_texts["api.md"])
    for uri, text in _texts.items():
        if files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, content=text))
    for path, uri in added.items():
        if uri.endswith(".md"):
            files.append(File.generated(config, uri, content=_shown(path)))
        else:
            files.append(File.generated(config, uri, abs_src_path=str(pages.ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The text that `on_files` made of it."""
    return _texts.get(page.file.src_uri, markdown)


def _led(text: str, uri: str, path: str, added: dict[str, str]) -> str:
    """A page whose links lead to pages of the site; files that the site has to show for it are put into `added`."""

    def lead(link: str) -> str:
        target = pages.resolve(link, path)
        if target is None or (path.endswith(".ipynb") and link.endswith(PICTURES)):
            return link
        return posixpath.relpath(_place(target, added), posixpath.dirname(uri) or ".")

    return pages.with_links(text, lead)


def _place(target: str, added: dict[str, str]) -> str:
    """Where the site has a file of the repository."""
    if target in PLACES:
        return PLACES[target]
    file = pages.ROOT / target
    if not file.exists():
        raise FileNotFoundError(f"a page links to {target}, which is not in the repository.")
    if target.startswith("docs/") and file.suffix != ".py":
        return target.removeprefix("docs/")
    if file.is_dir():
        return "results/committed.md" if target.startswith("benchmarks/results") else "project/benchmarks.md"
    added[target] = f"files/{target}" if file.suffix in PICTURES else f"files/{target}.md"
    return added[target]


def _shown(path: str) -> str:
    """A page with a file of code."""
    language = {".py": "python", ".toml": "toml", ".json": "json", ".sbatch": "bash"}.get(Path(path).suffix, "text")
    return f"# {path}\n\n```{language}\n{(pages.ROOT / path).read_text(encoding='utf-8')}\n```\n"


def _with_api_links(text: str) -> str:
    """docs/api.md, whose headings lead to the modules' own pages."""
    import re

    text = re.sub(r"\[Its names\.\]\(#\w+\)", "", text)
    return re.sub(r"^## `([\w.]+)`$", r"## [\1](api/\1.md)", text, flags=re.MULTILINE)
