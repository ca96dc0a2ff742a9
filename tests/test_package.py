"""The package: what importing it needs, what it exports, what its wheel holds."""

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import jax
import pytest

import jmarl

ROOT = Path(__file__).parents[1]


def run_python(code, **kwargs):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300, **kwargs
    )


def test_import_needs_no_extra():
    # Not rich: flax depends on it. matplotlib comes with jaxmarl, which jmarl imports when an environment is made.
    result = run_python("""
        import sys

        refused = {"wandb", "tensorboard", "tensorboardX", "optuna", "brax", "matplotlib", "tyro"}
        class Refuse:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in refused:
                    raise ModuleNotFoundError(f"refused: {name}")

        sys.meta_path.insert(0, Refuse())
        import jmarl
    """)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", jmarl.__all__)
def test_every_public_name_exists(name):
    assert hasattr(jmarl, name)


def test_public_names_are_sorted_and_unique():
    assert list(jmarl.__all__) == sorted(set(jmarl.__all__))


MODULES = [name for _, name, _ in pkgutil.walk_packages(jmarl.__path__, "jmarl.")]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_readme_examples_run(tmp_path, monkeypatch):
    """The README's Python, in order, on an environment that compiles in no time and with fewer iterations."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 5
    code = "\n".join(blocks)
    for there, here in {
        'jmarl.make("MPE_simple_spread_v3")': "jmarl.envs.matrix_game([[1.0, 0.0], [0.0, 0.5]])",
        "make_train(loop, 200)": "make_train(loop, 2)",
        "make_train(q_loop, 100)": "make_train(q_loop, 2)",
        "num_steps=1000": "num_steps=2",
    }.items():
        assert there in code
        code = code.replace(there, here)
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(code, names)
    assert names["metrics"]["train/return_sum"].shape == (5, 8, 2)
    assert (tmp_path / "metrics.csv").exists()
    # An environment of one's own trains, though its spec says no more than it must.
    own = jax.eval_shape(jmarl.make_train(names["own_loop"], 2), jax.random.key(0), names["cfg"])
    assert own[1]["train/return_sum"].shape == (2,)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    return next(out.glob("*.whl"))


def test_wheel_holds_types_and_licence_and_nothing_else_of_the_checkout(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert "jmarl/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0] for name in names} == {"jmarl", f"jmarl-{jmarl.__version__}.dist-info"}


def test_wheel_works_outside_the_checkout(wheel, tmp_path):
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path / "site")]
    subprocess.run([*install, str(wheel)], check=True, timeout=300)
    result = run_python(
        """
        import jax, jmarl
        env = jmarl.envs.matrix_game([[1.0, 0.0], [0.0, 0.0]])
        learner = jmarl.ippo(env.spec, jmarl.PPOConfig(hidden_sizes=(4,)))
        print(jmarl.__file__, jax.eval_shape(learner.init, jax.random.key(0)).step.dtype)
        """,
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site"), "PATH": "", "JAX_PLATFORMS": "cpu"},
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [str(tmp_path / "site" / "jmarl" / "__init__.py"), "int32"]
