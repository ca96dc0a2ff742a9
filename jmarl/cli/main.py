"""The command `jmarl`: its sub-commands, and what it says where the extra `cli` is not installed."""

import hashlib
import importlib
import importlib.util
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jmarl
from jmarl.cli.errors import UsageError, nearest, usage_errors

# Module of each, and what it does.
COMMANDS = {
    "train": ("train", "train an algorithm on an environment, sweep over settings, go on with a run"),
    "evaluate": ("evaluate", "play the policies of a run: numbers, a GIF, a policy to hand on"),
    "plot": ("plotting", "draw learning curves of runs into one figure"),
    "report": ("report", "compare runs: tables with intervals, curves, profiles"),
    "search": ("search", 'search for hyperparameters (needs pip install "jmarl[search]")'),
    "tournament": ("tournament", "let the players of runs meet, on both sides of a game: shares and ratings"),
    "crossplay": ("crossplay", "let the seeds of a run play with each other"),
    "campaign": ("campaign", "train all runs that a file names, and put them into a table"),
    "check": ("check", "train a committed result again: does it still come out?"),
    "envs": ("lists", "names of environments, or facts about one"),
    "algorithms": ("lists", "names of algorithms, or the hyperparameters of one"),
    "presets": ("lists", "hyperparameters known to work for an algorithm on an environment"),
    "new": ("new", "write a skeleton of your own environment or algorithm, and its test"),
}
CACHE_BYTES = 2 * 2**30
NEEDED = ("filelock", "matplotlib", "PIL", "rich", "scipy", "tyro", "safetensors", "flatbuffers")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. Exits with 2 on what the user can put right."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(_help())
        return 0
    if argv[0] == "--version":
        print(f"jmarl {jmarl.__version__}")
        return 0
    os.environ["MPLBACKEND"] = "Agg"  # pictures go into files; what a notebook hands down may not be installed here
    with usage_errors():
        if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
            raise UsageError(f'the command jmarl needs {missing[0]}: pip install "jmarl[cli]".')
        if argv[0] in ("--tyro-print-completion", "--tyro-write-completion"):
            importlib.import_module("jmarl.cli.completion").main(argv)
            return 0
        if argv[0] not in COMMANDS:
            raise UsageError(f"{argv[0]!r} is no command: {nearest(argv[0], COMMANDS)}")
        keep_compiled()
        module = importlib.import_module(f"jmarl.cli.{COMMANDS[argv[0]][0]}")
        result = module.main(argv[1:], prog=f"jmarl {argv[0]}")
    return result if isinstance(result, int) else 0


def keep_compiled() -> None:
    """Has jax keep compiled programs on disk, so that the second run of one begins at once.

    They are in ~/.cache/jmarl, or below $XDG_CACHE_HOME, at most `CACHE_BYTES`, in a folder for each kind of processor:
    a home directory may be shared by machines that do not understand each other's programs. What the user has told jax,
    JAX_COMPILATION_CACHE_DIR or JAX_ENABLE_COMPILATION_CACHE=0, comes first.
    """
    import jax

    config: Any = jax.config
    if config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache:
        return
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    try:
        facts = Path("/proc/cpuinfo").read_text(errors="replace").partition("\n\n")[0]
    except OSError:
        facts = ""
    known = [line for line in facts.splitlines() if line.startswith(("model name", "flags", "Features"))]
    kind = hashlib.sha256("\n".join([platform.machine(), platform.processor(), *known]).encode()).hexdigest()[:12]
    jax.config.update("jax_compilation_cache_dir", str(home / "jmarl" / kind))
    jax.config.update("jax_compilation_cache_max_size", CACHE_BYTES)


def run() -> None:
    """What the installed command calls."""
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # who reads has seen enough, as in `jmarl envs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + 13  # as if SIGPIPE had ended it
    sys.exit(code)


def _help() -> str:
    commands = "\n".join(f"  {name:12s}{does}" for name, (_, does) in COMMANDS.items())
    return f"""usage: jmarl COMMAND ...

Multi-agent reinforcement learning as pure JAX functions.

{commands}

jmarl COMMAND --help says more, jmarl train mappo --help everything that can be chosen.
jmarl --version; completion: jmarl --tyro-print-completion {{bash,zsh,tcsh}}

  jmarl train vdn --preset quick
  jmarl train mappo --env MPE_simple_spread_v3 --seeds 8 --learning-rate 1e-3"""
