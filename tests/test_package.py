"""The package: what importing it needs, what it exports, what its wheel holds."""

import doctest
import importlib
import os
import pkgutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import jaxmarl  # noqa: F401, whose import disturbs the first doctest in which it happens
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


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory):
    """The wheel, installed into a folder of its own."""
    path = tmp_path_factory.mktemp("installed") / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(path)]
    subprocess.run([*install, str(wheel)], check=True, timeout=300)
    return path


def alone(site):
    """An environment in which nothing but the installed wheel is jmarl."""
    kept = {name: os.environ[name] for name in ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR") if name in os.environ}
    return {"PYTHONPATH": str(site), "PATH": "", "JAX_PLATFORMS": "cpu", **kept}


def test_wheel_works_outside_the_checkout(site, tmp_path):
    result = run_python(
        """
        import jax, jmarl
        env = jmarl.envs.matrix_game([[1.0, 0.0], [0.0, 0.0]])
        learner = jmarl.ippo(env.spec, jmarl.PPOConfig(hidden_sizes=(4,)))
        print(jmarl.__file__, jax.eval_shape(learner.init, jax.random.key(0)).step.dtype)
        """,
        cwd=tmp_path,
        env=alone(site),
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [str(site / "jmarl" / "__init__.py"), "int32"]


def test_the_installed_command_does_everything_in_an_empty_folder(site, tmp_path):
    """Trains, evaluates, plots, reports, resumes, and writes a skeleton: nothing of the checkout is needed."""
    result = run_python(
        """
        from jmarl.cli.main import main

        words = "--env CartPole-v1 --num-envs 2 --rollout-length 4 --total-steps 16 --seeds 2 --hidden-sizes 8"
        words += " --num-epochs 1 --num-minibatches 1 --eval-episodes 2 --absolute-episodes 0 --run-dir run"
        main(["train", "ippo", *words.split(), "--log-every", "1"])
        main(["evaluate", "run", "--episodes", "2"])
        main(["plot", "run", "--metric", "eval/return_sum"])
        main(["report", "run"])
        main(["train", "--resume", "run", "--total-steps", "24"])
        main(["new", "algorithm", "mine"])
        """,
        cwd=tmp_path,
        env=alone(site),
    )
    assert result.returncode == 0, result.stderr
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"run", "curves.png", "report", "mine.py", "test_mine.py"}
    assert (tmp_path / "report" / "report.md").exists() and (tmp_path / "run" / "evaluation.json").exists()
    assert (tmp_path / "run" / "metrics.csv").read_text().splitlines()[-1].startswith("24,")


def test_the_wheel_installs_a_command(site, tmp_path):
    command = [sys.executable, str(site / "bin" / "jmarl"), "--version"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, env=alone(site))
    assert (result.returncode, result.stdout) == (0, f"jmarl {jmarl.__version__}\n"), result.stderr
