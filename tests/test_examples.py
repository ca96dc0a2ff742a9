"""The examples run, show what they say, and are short."""

import ast
import importlib.util
import json
import re
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest

import jmarl

PATH = Path(__file__).parents[1] / "examples" / "composing.py"
NOTEBOOK = PATH.with_name("quickstart.ipynb")
HUNTERS = PATH.with_name("hunters_and_prey.ipynb")
README = PATH.parents[1] / "README.md"


@pytest.fixture(scope="module")
def composing():
    spec = importlib.util.spec_from_file_location("composing", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_is_shorter_than_25_lines():
    functions = [node for node in ast.parse(PATH.read_text()).body if isinstance(node, ast.FunctionDef)]
    source = PATH.read_text().splitlines()
    for function in functions:
        lines = [line for line in source[function.lineno - 1 : function.end_lineno] if line.strip()]
        assert len(lines) < 25, function.name
    assert len(functions) == 5


def test_one_loss_alone(composing):
    np.testing.assert_allclose(composing.one_loss_alone(), 0.9 ** np.arange(4, -1, -1), atol=1e-2)


def test_one_update_on_a_batch(composing):
    errors = composing.one_update_on_a_batch()
    assert errors[-1] < 0.5 * errors[0]


def test_an_advantage_and_a_loss_of_your_own(composing):
    returns = composing.an_advantage_and_a_loss_of_your_own()
    assert returns[0] < 1.2 and returns[-1] > 1.8


def test_a_network_of_your_own(composing):
    errors = composing.a_network_of_your_own()
    assert errors[0] > 1.0 and errors[-1] < 0.01


def test_an_environment_of_your_own(composing):
    returns = composing.an_environment_of_your_own()
    assert returns[-1] > 0.5 * returns[0]  # both negative: less than half as far apart


SCRIPTS = {
    "sweep": {"num_iterations": 1, "num_seeds": 2, "num_envs": 2, "rates": (1e-3,)},
    "long_run": {"num_iterations": 10, "num_seeds": 1, "num_envs": 32, "folder": "long_run"},
    "curiosity": {"num_iterations": 1, "num_seeds": 1, "num_envs": 2, "size": 5},
    "export_policy": {"num_iterations": 1, "num_envs": 2},
    "teams_and_tournament": {"num_iterations": 1, "num_envs": 2, "num_episodes": 2},
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_run(name, tmp_path, monkeypatch, capsys):
    """With few iterations."""
    monkeypatch.chdir(tmp_path)
    code = PATH.with_name(f"{name}.py").read_text()
    assert len(code.splitlines()) < 60
    names = {"__name__": name}
    exec(compile(code, name, "exec"), names)
    found = names["main"](**SCRIPTS[name])
    shown = capsys.readouterr().out
    if name == "long_run":
        assert (found / "metrics.csv").exists()
        names["main"](**{**SCRIPTS[name], "num_iterations": 20})
        rows = (found / "metrics.csv").read_text().splitlines()[1:]
        assert len({row.split(",")[0] for row in rows}) == 2  # the second call went on where the first one ended
        return
    for value in jax.tree.leaves(found):
        assert np.isfinite(value).all()
    assert shown


def test_every_script_is_tested_and_named_in_the_readme():
    scripts = {path.stem for path in PATH.parent.glob("*.py")}
    assert scripts == {*SCRIPTS, "composing"}
    assert all(f"examples/{name}.py" in README.read_text() for name in scripts)


def run_smaller(code, changes):
    """Runs code with some of its words changed, each of which must be there, and returns its names."""
    for there, here in changes.items():
        assert there in code
        code = code.replace(there, here)
    names = {}
    exec(code, names)
    return names


def code_of(notebook, monkeypatch, num_figures):
    """The cells of code, with figures that are not shown; outputs say that it was run before it was committed."""
    import matplotlib.pyplot as plt

    plt.switch_backend("agg")
    monkeypatch.setattr(plt, "show", plt.close)
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    shown = [output["output_type"] for cell in cells for output in cell["outputs"]]
    assert shown.count("display_data") == num_figures and "error" not in shown
    return "\n".join("".join(cell["source"]) for cell in cells)


def test_the_notebook_runs(monkeypatch):
    """Its cells in order, with fewer iterations, seeds and environments."""
    code = code_of(NOTEBOOK, monkeypatch, 4)
    changes = {
        "NUM_ITERATIONS = 150": "NUM_ITERATIONS = 2",
        "NUM_SHORT = 30": "NUM_SHORT = 2",
        "jax.random.key(0), 4)": "jax.random.key(0), 2)",
        "num_envs=64": "num_envs=4",
        "num_episodes=128": "num_episodes=4",
    }
    names = run_smaller(code, changes)
    assert names["scores"].shape == (2,)
    assert names["sweep"]["train/return_sum"].shape == (3, 2, 2)
    assert names["moves"].shape == (3, 2, 2)


def test_losses_targets_and_curiosity_are_composed(monkeypatch):
    code = code_of(PATH.with_name("compose.ipynb"), monkeypatch, 3)
    changes = {
        "NUM_ITERATIONS = 60": "NUM_ITERATIONS = 1",
        "NUM_LONGER = 150": "NUM_LONGER = 10",
        "jax.random.key(0), 8)": "jax.random.key(0), 2)",
        "num_envs=16, rollout_length=16": "num_envs=2, rollout_length=16",
        # The last of each: own advantages alone, and the penalty with curiosity.
        "in ALGORITHMS.items()": "in list(ALGORITHMS.items())[3:]",
        "in COMBINED.items()": "in list(COMBINED.items())[2:]",
    }
    names = run_smaller(code, changes)
    assert names["final"].shape == (3, 2) and set(names["curious"]) == {"KL penalty, curious"}
    assert np.isfinite(names["learnt"]["own advantage"]["loss/total"]).all()


def test_runs_are_analysed(monkeypatch, tmp_path):
    """The report is of the committed runs; the rest learns a little."""
    monkeypatch.chdir(tmp_path)
    display = types.SimpleNamespace(Image=lambda path: path.read_bytes(), Markdown=str)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    results = PATH.parents[1] / "benchmarks" / "results"
    code = code_of(PATH.with_name("analyse.ipynb"), monkeypatch, 3)
    changes = {
        'Path("../benchmarks/results")': f"Path({str(results)!r})",
        "NUM_SEEDS = 8": "NUM_SEEDS = 3",
        "make_train(loop, 60)": "make_train(loop, 2)",
        "num_episodes=256": "num_episodes=8",
        '["mappo", "ippo", "qmix", "vdn", "pqn_vdn", "iql"]': '["mappo", "ippo"]',
    }
    names = run_smaller(code, changes)
    assert names["table"].count("\n") == 2 + 2
    assert names["alike"].shape == (3, 3) and names["standings"].rating.value.shape == (5,)


def test_hunters_meet_all_prey(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(Image=str))
    code = code_of(HUNTERS, monkeypatch, 2)
    changes = {
        "NUM_ITERATIONS = 120": "NUM_ITERATIONS = 1",
        "NUM_EPISODES = 64": "NUM_EPISODES = 2",
        "num_envs=64": "num_envs=2",
        # The last pair alone: a script of `test_scripts_run` trains two teams that learn.
        "in PAIRS.items()": "in list(PAIRS.items())[2:]",
        "for name in PAIRS]": "for name in runs]",
    }
    names = run_smaller(code, changes)
    assert len(names["PAIRS"]) == 3 and names["earned"].shape == (3, 3) and (tmp_path / "hunt.gif").exists()


def test_readme_examples_run(tmp_path, monkeypatch):
    """The README's Python, in order, on an environment that compiles in no time and with fewer iterations."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 5
    changes = {
        'jmarl.make("MPE_simple_spread_v3")': "jmarl.envs.matrix_game([[1.0, 0.0], [0.0, 0.5]])",
        "make_train(loop, 200)": "make_train(loop, 2)",
        "make_train(q_loop, 100)": "make_train(q_loop, 2)",
        "num_iterations=200": "num_iterations=2",
        "every=10": "every=1",
    }
    monkeypatch.chdir(tmp_path)
    # A cell of a notebook is run again and again: the second time nothing may be in its way.
    names = run_smaller("\n".join([*blocks[:2], *blocks[1:]]), changes)
    assert names["metrics"]["train/return_sum"].shape == (3, 2, 2)
    assert names["history"].metrics["eval/return_sum"].shape[1] == 4 and not list(tmp_path.iterdir())
    # An environment of one's own trains, though its spec says no more than it must.
    own = jax.eval_shape(jmarl.make_train(names["own_loop"], 2), jax.random.key(0), names["cfg"])
    assert own[1]["train/return_sum"].shape == (2,)


def test_the_home_page_runs():
    """Its twelve lines, in an environment that compiles in no time and with fewer iterations."""
    page = README.parent / "docs" / "index.md"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert len([line for line in block.splitlines() if line.strip()]) <= 12
    changes = {
        'jmarl.make("MPE_simple_spread_v3")': "jmarl.envs.matrix_game([[1.0, 0.0], [0.0, 0.5]])",
        "make_train(loop, 200)": "make_train(loop, 2)",
    }
    names = run_smaller(block, changes)
    assert names["metrics"]["train/return_sum"].shape == (4, 2)
