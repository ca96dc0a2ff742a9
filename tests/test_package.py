"""The package: what importing it needs, what it exports, what its wheel holds."""

import doctest
import importlib
import pkgutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

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
