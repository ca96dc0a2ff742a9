"""The committed scripts start, and what they measure can be built: they are run seldom, and the library moves on."""

import runpy
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
NO_OPTIONS = "demo.py", "in_turn.py"  # which `make demo` runs, and which is a module
SCRIPTS = sorted(path for path in BENCHMARKS.glob("**/*.py") if path.name not in NO_OPTIONS)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_script_starts(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.syspath_prepend(script.parent)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert not ended.value.code
    assert "usage" in capsys.readouterr().out


def test_all_that_is_measured_beside_others_can_be_built(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS / "speed")
    for name, make in runpy.run_path(str(BENCHMARKS / "speed" / "whole_run.py"))["SETTINGS"].items():
        loop, config, num_iterations = make()
        assert loop.algorithm(loop.env.spec, config).act is not None, name
        assert num_iterations > 0
