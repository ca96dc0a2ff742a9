"""Environments and algorithms of one's own from the command line; and a run folder alone never gets code run."""

import json
import pickle
import shutil
import subprocess
import sys
from importlib import resources

import numpy as np
import pytest

from jmarl.cli import crossplay, evaluate, main, own, run_folders, search, sweeping, train

TINY = "--num-envs 2 --rollout-length 8 --total-steps 32 --log-every 1 --seeds 2 --hidden-sizes 4 --eval-episodes 2"
TINY += " --absolute-episodes 0 --no-gif"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """An empty folder with an environment and an algorithm in it; importing either leaves a mark."""
    monkeypatch.chdir(tmp_path)
    for kind in ("env", "algorithm"):
        main.main(["new", kind, f"my_{kind}"])
        with open(f"my_{kind}.py", "a") as file:
            file.write(f"\n\nopen({str(tmp_path / 'imported')!r}, 'a').write('{kind} ')\n")
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("jmarl_own_my_")]:
        del sys.modules[name]


def forget(project):
    """As if in a new process."""
    for name in [name for name in sys.modules if name.startswith("jmarl_own_my_")]:
        del sys.modules[name]
    (project / "imported").unlink(missing_ok=True)


def refused(capsys, call, words):
    with pytest.raises(SystemExit) as error:
        call(words)
    assert error.value.code == 2
    return capsys.readouterr().err


@pytest.fixture
def run(project):
    words = ["my_algorithm.py:my_algorithm", "--env", "my_env.py:my_env", "--env-kwargs", "num_steps=5"]
    train.main([*words, *TINY.split(), "--checkpoint-every", "1e-9", "--run-dir", "run"])
    forget(project)
    return project / "run"


def test_own_functions_run_like_ours(run, project, capsys):
    facts = json.loads((run / "config.json").read_text())
    assert (facts["env"], facts["algorithm"]) == ("my_env.py:my_env", "my_algorithm.py:my_algorithm")
    assert facts["env_kwargs"] == {"num_steps": 5} and facts["config"]["hidden_sizes"] == [4]
    assert np.nanmax(run_folders.load_metrics(run)[1]["eval/episode_length"]) <= 5

    named = ["--env", "my_env.py:my_env", "--algorithm", "./my_algorithm.py:my_algorithm"]
    assert evaluate.main(["run", *named, "--episodes", "2"])["eval/return_sum"].shape == (2,)
    crossplay.main(["run", *named, "--episodes", "2"])
    main.main(["report", "run", "--out", "report"])
    assert "`my_env.py:my_env(num_steps=5)`" in (project / "report" / "report.md").read_text()
    main.main(["plot", "run", "--metric", "eval/return_sum"])

    shutil.rmtree(run / "checkpoints" / "2")
    (run / "params.safetensors").unlink()
    words = ["my_algorithm.py:my_algorithm", "--resume", "run", "--env", "my_env.py:my_env"]
    train.main([*words, "--quiet"])
    assert (run / "params.safetensors").exists() and capsys.readouterr().out.endswith("run\n")


@pytest.mark.parametrize(
    ("command", "words", "way"),
    [
        ("evaluate", ["run"], "--env my_env.py:my_env"),
        ("evaluate", ["run", "--env", "my_env.py:my_env"], "--algorithm my_algorithm.py:my_algorithm"),
        (
            "evaluate",
            ["run", "--env", "my_env.py:other", "--algorithm", "my_algorithm.py:my_algorithm"],
            "--env my_env",
        ),
        ("crossplay", ["run"], "--env my_env.py:my_env"),
        ("train", ["--resume", "run"], "my_algorithm.py:my_algorithm after train"),
        ("train", ["--resume", "run", "--env", "my_env.py:my_env"], "my_algorithm.py:my_algorithm after train"),
        ("train", ["--config", "run/config.json", "--env", "my_env.py:my_env"], "the algorithm as the first word"),
        ("check", ["run"], "is not run unless you name it yourself"),
    ],
)
def test_what_a_folder_names_is_not_run(run, project, capsys, command, words, way):
    text = refused(capsys, main.main, [command, *words])
    assert "which is not run unless you name it yourself" in text and way in text
    assert not (project / "imported").exists()


def test_what_a_sweep_names_is_not_run(project, capsys):
    words = ["my_algorithm.py:my_algorithm", "--env", "my_env.py:my_env", *TINY.split(), "--sweep", "gamma=0.9,0.5"]
    folder = train.main([*words, "--run-dir", "sweep"])
    assert sorted(path.name for path in folder.glob("[!.]*")) == ["gamma=0.5", "gamma=0.9"]
    sweeping._write_status(folder, words, is_complete=False)
    forget(project)
    assert "is not run unless" in refused(capsys, train.main, ["--resume", "sweep"])
    only_env = ["--resume", "sweep", "--env", "my_env.py:my_env"]
    assert "is not run unless" in refused(capsys, train.main, only_env)
    assert not (project / "imported").exists()


def test_a_search_with_own_functions(project):
    words = ["my_algorithm.py:my_algorithm", "--env", "my_env.py:my_env", *TINY.split()]
    words += ["--space", "gamma=0.5:0.9", "--trials", "1", "--run-dir", "search", "--no-halving"]
    words.remove("--no-gif")
    study = search.main(words)
    assert study.trials[0].state.name == "COMPLETE" and np.isfinite(study.best_value)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_folder_that_asks_for_pickles_is_refused(tmp_path, capsys, depth):
    options = {"dir_path": "elsewhere"}
    facts = {"algorithm": "ippo", "env": "jaxnav", "seeds": 1, "config": {}}
    facts["env_kwargs"] = {"map_id": "Grid-Buffer", "map_params": options} if depth else options
    (tmp_path / "config.json").write_text(json.dumps(facts))
    for command, words in [("evaluate", [str(tmp_path)]), ("train", ["--resume", str(tmp_path)])]:
        assert "dir_path, from which JaxNav loads files of pickle, is refused" in refused(
            capsys, main.main, [command, *words]
        )


def test_an_algorithm_must_say_what_its_config_is(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bare.py").write_text("def bare(spec, cfg):\n    pass\n")
    assert "annotate its second parameter" in refused(capsys, train.main, ["bare.py:bare"])
    source = "from flax import struct\n\n\n@struct.dataclass\nclass C:\n    seed: int = 0\n\n\ndef odd(spec, cfg: C):\n"
    (tmp_path / "odd.py").write_text(source + "    raise ValueError('never')\n")
    assert "never" in refused(capsys, train.main, ["odd.py:odd"])


@pytest.mark.parametrize("kind", ["env", "algorithm"])
def test_a_skeleton_passes_its_own_test(project, kind):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"test_my_{kind}.py"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_skeleton_replaces_nothing_and_wants_a_name(project, capsys):
    before = (project / "my_env.py").read_text()
    assert "exists already" in refused(capsys, main.main, ["new", "env", "my_env"])
    assert "cannot be the name of a function" in refused(capsys, main.main, ["new", "env", "my-env"])
    assert (project / "my_env.py").read_text() == before
    assert {path.name for path in (resources.files("jmarl.cli") / "templates").iterdir() if path.is_file()} == {
        *("env.py", "test_env.py", "algorithm.py", "test_algorithm.py")
    }


def test_a_file_reaches_workers_that_cannot_import_it(tmp_path, monkeypatch):
    import cloudpickle

    (tmp_path / "five.py").write_text("FIVE = 5\n\n\ndef make():\n    return FIVE\n")
    made = cloudpickle.dumps(own._load_file(tmp_path / "five.py").make)
    monkeypatch.delitem(sys.modules, "jmarl_own_five")
    assert pickle.loads(made)() == 5


def test_names_without_a_colon_are_ours():
    assert not own.is_own("humanoid_9|8") and own.is_own("own.py:make") and own.is_own("package.module:make")
