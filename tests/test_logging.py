"""Sinks: what a run writes reads back, also when it is cut off."""

import csv
import json
import os
import sys
import types

import numpy as np
import pytest

from jmarl import logging

INFO = {"num_seeds": 2, "num_iterations": 4, "env_steps_per_iteration": 100, "total_env_steps": 400}


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def strict_json(path):
    """JSON that any other language reads, too: Python alone would accept NaN."""
    return json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def write_three_times(sink):
    sink.start(INFO)
    sink.write(100, 1.0, {"train/return_sum": np.array([np.nan, -2.5], np.float32)})
    sink.write(200, 2.0, {"train/return_sum": np.array([-1.0, -2.0]), "eval/return_sum": np.array([7.0, 8.0])})
    sink.write(300, 3.0, {"train/return_sum": np.array([-0.5, -1.5])})


def test_csv_of_a_killed_run_reads_back(tmp_path):
    write_three_times(logging.csv_file(tmp_path / "metrics.csv"))  # never closed
    table = rows(tmp_path / "metrics.csv")
    assert [(r["env_steps"], r["seed"]) for r in table] == [(s, i) for s in ("100", "200", "300") for i in "01"]
    assert [r["train/return_sum"] for r in table] == ["", "-2.5", "-1.0", "-2.0", "-0.5", "-1.5"]


def test_csv_keeps_metrics_that_appear_late(tmp_path):
    write_three_times(logging.csv_file(tmp_path / "metrics.csv"))
    assert [r["eval/return_sum"] for r in rows(tmp_path / "metrics.csv")] == ["", "", "7.0", "8.0", "", ""]


def test_json_has_one_series_per_seed(tmp_path):
    sink = logging.json_file(tmp_path / "metrics.json")
    write_three_times(sink)
    sink.close()
    assert strict_json(tmp_path / "metrics.json") == {
        "env_steps": [100, 200, 300],
        "wall_s": [1.0, 2.0, 3.0],
        "metrics": {
            "train/return_sum": [[None, -1.0, -0.5], [-2.5, -2.0, -1.5]],
            "eval/return_sum": [[None, 7.0, None], [None, 8.0, None]],
        },
    }


def test_json_of_a_killed_run_is_complete(tmp_path):
    write_three_times(logging.json_file(tmp_path / "metrics.json", every_s=0.0))  # never closed
    assert strict_json(tmp_path / "metrics.json")["env_steps"] == [100, 200, 300]


def test_json_that_takes_long_to_write_is_written_less_often(tmp_path, monkeypatch):
    now, saved_at, replace = 0.0, [], logging.files.replace

    def slowly(*file):
        nonlocal now
        saved_at.append(now)
        now += 2.0
        replace(*file)

    monkeypatch.setattr(logging.files, "replace", slowly)
    monkeypatch.setattr(logging, "time", types.SimpleNamespace(monotonic=lambda: now))
    sink = logging.json_file(tmp_path / "metrics.json", every_s=5.0)
    sink.start(INFO)
    for i in range(100):
        sink.write(i, now, {"x": np.array([1.0])})
        now += 1.0
    assert saved_at == [0.0, 42.0, 84.0]  # twenty times as long between them as they took


def test_json_killed_while_writing_keeps_the_file_before(tmp_path, monkeypatch):
    sink = logging.json_file(tmp_path / "metrics.json", every_s=0.0)
    sink.start(INFO)
    sink.write(100, 1.0, {"x": np.array([1.0, 2.0])})

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        sink.write(200, 2.0, {"x": np.array([3.0, 4.0])})
    assert strict_json(tmp_path / "metrics.json")["env_steps"] == [100]


def test_infinite_losses_stay_valid_json(tmp_path):
    sink = logging.json_file(tmp_path / "metrics.json", every_s=0.0)
    sink.start(INFO)
    sink.write(100, 1.0, {"loss/total": np.array([np.inf, 1.0])})
    assert strict_json(tmp_path / "metrics.json")["metrics"]["loss/total"] == [[None], [1.0]]


def test_a_resumed_csv_has_no_row_twice_and_none_torn(tmp_path):
    path = tmp_path / "metrics.csv"
    write_three_times(logging.csv_file(path))
    with path.open("ab") as file:
        file.write(b"1000,4.0,0,-0.")  # killed here: 1000 may become 10
    sink = logging.csv_file(path)
    sink.start(INFO | {"resumed_at": 200})
    assert [r["env_steps"] for r in rows(path)] == ["100"] * 2 + ["200"] * 2
    sink.write(300, 3.0, {"train/return_sum": np.array([-0.5, -1.5])})
    write_three_times(logging.csv_file(tmp_path / "whole.csv"))
    assert path.read_bytes() == (tmp_path / "whole.csv").read_bytes()


def test_a_resumed_json_has_no_row_twice(tmp_path):
    path, whole = tmp_path / "metrics.json", tmp_path / "whole.json"
    for sink in (logging.json_file(path, every_s=0.0), logging.json_file(whole, every_s=0.0)):
        write_three_times(sink)
    sink = logging.json_file(path)
    sink.start(INFO | {"resumed_at": 100})
    assert strict_json(path)["metrics"]["train/return_sum"] == [[None], [-2.5]]
    sink.write(200, 2.0, {"train/return_sum": np.array([-1.0, -2.0]), "eval/return_sum": np.array([7.0, 8.0])})
    sink.write(300, 3.0, {"train/return_sum": np.array([-0.5, -1.5])})
    sink.flush()  # before each checkpoint
    assert path.read_bytes() == whole.read_bytes()


def lose_rows(path, *places):
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(line for i, line in enumerate(lines) if i not in places))


DAMAGES = {
    "first rows of the CSV": ("csv", lambda path: lose_rows(path, 1, 2)),
    "half a step of the CSV": ("csv", lambda path: lose_rows(path, 4)),
    "last rows of the CSV": ("csv", lambda path: lose_rows(path, 5, 6)),
    "zeros at the end of the CSV": ("csv", lambda path: path.write_bytes(path.read_bytes()[:-30] + bytes(30))),
    "zeros in the CSV": ("csv", lambda path: path.write_bytes(path.read_bytes()[:60] + bytes(20) + b"\n1,2")),
    "no head of the CSV": ("csv", lambda path: lose_rows(path, 0)),
    "no text in the CSV": ("csv", lambda path: path.write_bytes(b"\xff" * 200)),
    "no CSV": ("csv", lambda path: path.unlink()),
    "unreadable JSON": ("json", lambda path: path.write_bytes(path.read_bytes()[:-9])),
    "no series in the JSON": ("json", lambda path: path.write_text("[1]")),
    "series of two lengths in the JSON": ("json", lambda path: path.write_text(path.read_text().replace(", -0.5", ""))),
    "steps of the JSON in disorder": ("json", lambda path: path.write_text(path.read_text().replace("200", "20"))),
    "no JSON": ("json", lambda path: path.unlink()),
}
ROWS = {
    100: {"a": np.array([0.1, np.nan], np.float32)},
    200: {"a": np.array([np.inf, 1e-7], np.float32), "b": np.array([1 / 3, 1e300])},
    300: {"a": np.array([-2.5, -0.5], np.float32)},
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_either_file_is_made_again_from_the_other(tmp_path, capsys, damage):
    paths = tmp_path / "metrics.csv", tmp_path / "metrics.json"
    sinks = [logging.csv_file(paths[0]), logging.json_file(paths[1])]
    for sink in sinks:
        sink.start(INFO)
        for env_steps, row in ROWS.items():
            sink.write(env_steps, env_steps / 7, row)
        sink.close()
    whole = [path.read_bytes() for path in paths]
    which, spoil = DAMAGES[damage]
    damaged, other = paths if which == "csv" else paths[::-1]
    spoil(damaged)
    for make, path in zip((logging.csv_file, logging.json_file), paths, strict=True):
        sink = make(path)
        sink.start(INFO | {"resumed_at": 300, "rows_until_then": 3})
        sink.close()
    if which == "csv":  # what is infinite is null in JSON
        whole[0] = whole[0].replace(b"inf", b"")
    assert [path.read_bytes() for path in paths] == whole
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{damaged} has ") and line.endswith(f" of 3 rows: it is made anew from {other.name}.")


def test_rows_that_no_file_has_are_named_and_the_run_goes_on(tmp_path, capsys):
    path = tmp_path / "metrics.csv"
    write_three_times(logging.csv_file(path))
    lose_rows(path, 3, 4)
    sink = logging.csv_file(path)
    sink.start(INFO | {"resumed_at": 300, "rows_until_then": 3})
    sink.write(400, 4.0, {"train/return_sum": np.array([0.0, 0.0])})
    assert capsys.readouterr().out == f"{path} has 2 of 3 rows: the others are lost.\n"
    assert [row["env_steps"] for row in rows(path)] == ["100"] * 2 + ["300"] * 2 + ["400"] * 2


def test_json_does_not_keep_the_series_in_memory(tmp_path):
    """Ten thousand rows of ten metrics are 3 MB as floats of Python."""
    import tracemalloc

    sink = logging.json_file(tmp_path / "metrics.json", every_s=0.05)
    sink.start(INFO)
    row = {f"metric {i}": np.array([0.1, 0.2]) for i in range(10)}
    sink.write(0, 0.0, row)
    sink.flush()
    tracemalloc.start()
    for i in range(1, 10_001):
        sink.write(i, 0.0, row)
        if i % 500 == 0:
            sink.flush()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    sink.close()
    content = strict_json(tmp_path / "metrics.json")
    assert kept < 300_000 and content["env_steps"] == list(range(10_001))
    assert content["metrics"]["metric 9"] == [[0.1] * 10_001, [0.2] * 10_001]


def test_a_json_file_that_something_else_has_changed_is_not_written_over(tmp_path, capsys):
    path = tmp_path / "metrics.json"
    sink = logging.json_file(path, every_s=0.0)
    write_three_times(sink)
    path.write_text("notes\n")
    sink.write(400, 4.0, {"train/return_sum": np.array([0.0, 0.0])})
    assert path.read_text() == "notes\n" and f"Could not write {path}: it was changed" in capsys.readouterr().out


def test_links_to_files_stay(tmp_path):
    (tmp_path / "real").mkdir()
    for make, name in ((logging.csv_file, "metrics.csv"), (logging.json_file, "metrics.json")):
        (tmp_path / name).symlink_to(tmp_path / "real" / name)
        sink = make(tmp_path / name)
        write_three_times(sink)
        sink.close()
        assert (tmp_path / name).is_symlink() and (tmp_path / "real" / name).stat().st_size > 100


@pytest.mark.parametrize("make", [logging.csv_file, logging.json_file])
def test_a_file_that_exists_is_refused(tmp_path, make):
    (tmp_path / "metrics").write_text("precious")
    with pytest.raises(FileExistsError, match="exists already: give another path"):
        make(tmp_path / "metrics").start(INFO)
    assert (tmp_path / "metrics").read_text() == "precious"


def test_a_run_folder_that_exists_is_refused(tmp_path):
    folder = logging.run_folder(tmp_path / "runs" / "first")
    assert folder.is_dir()
    with pytest.raises(FileExistsError, match="first exists already: give the run another folder"):
        logging.run_folder(folder)


def test_terminal_prints_plain_lines_into_a_pipe(capsys):
    sink = logging.terminal(every_s=0.0)
    sink.start(INFO)
    sink.write(100, 9.0, {"train/return_sum": np.array([np.nan, np.nan])})
    sink.write(200, 10.0, {"train/return_sum": np.array([np.nan, -2.0])})
    sink.write(400, 11.0, {"train/return_sum": np.array([np.nan, np.nan])})
    sink.close()
    start, first, second, last = capsys.readouterr().out.splitlines()
    assert start == "training 2 seeds for 400 environment steps each; compiling"
    assert first == " 25 %  100 steps  0:00:09 gone"  # most of it is compilation: no speed yet, and no episode ended
    assert second == " 50 %  200 steps  200 steps/s  return_sum -2.00  0:00:10 gone  0:00:02 left"
    assert last == "100 %  400 steps  300 steps/s  return_sum -2.00  0:00:11 gone  0:00:00 left"


def test_terminal_draws_a_bar_on_a_screen(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    sink = logging.terminal()
    write_three_times(sink)
    sink.close()
    assert "return_sum -1.00" in capsys.readouterr().out


def test_terminal_without_rich_names_the_way_out(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(ImportError, match=r'pip install "jmarl\[bench\]"'):
        logging.terminal()


def test_system_facts_are_json_and_name_versions():
    facts = json.loads(json.dumps(logging.system_facts()))
    assert set(facts["versions"]) >= {"jmarl", "jax", "jaxmarl", "flax", "optax"} and all(facts["versions"].values())
    assert facts["git_commit"] is None or len(facts["git_commit"].removesuffix("-dirty")) == 40
    assert facts["platform"] in ("cpu", "gpu", "tpu") and facts["num_cores"] >= 1


def test_a_flush_writes_nothing_twice(tmp_path, monkeypatch):
    """Or a full disk would take rows that it has."""
    sinks = [logging.csv_file(tmp_path / "metrics.csv"), logging.json_file(tmp_path / "metrics.json")]
    for sink in sinks:
        write_three_times(sink)
        sink.flush()
    before = [path.read_bytes() for path in tmp_path.iterdir()]

    def full(path, *_):
        raise OSError(f"Could not write {path}: No space left on device.")

    monkeypatch.setattr(logging.files, "append", full)
    monkeypatch.setattr(logging.files, "replace", full)
    for sink in sinks:
        sink.flush()
        sink.close()
    assert [path.read_bytes() for path in tmp_path.iterdir()] == before


def test_more_of_a_row_that_could_not_be_written_is_not_lost(tmp_path, monkeypatch, capsys):
    path = tmp_path / "metrics.csv"
    sink = logging.csv_file(path)
    sink.start(INFO)
    sink.write(100, 1.0, {"a": np.array([1.0, 2.0])})
    with monkeypatch.context() as patched:
        patched.setattr(logging.files, "append", lambda path, *_: (_ for _ in ()).throw(OSError(f"{path} is full.")))
        sink.write(200, 2.0, {"a": np.array([3.0, 4.0])})
        sink.write(300, 3.0, {"a": np.array([5.0, 6.0])})
        with pytest.raises(OSError, match="is full"):
            sink.flush()
    sink.write(300, 3.0, {"b": np.array([7.0, 8.0])})
    sink.write(400, 4.0, {"a": np.array([9.0, 9.0])})
    table = rows(path)
    assert [row["a"] for row in table] == ["1.0", "2.0", "3.0", "4.0", "5.0", "6.0", "9.0", "9.0"]
    assert [row["b"] for row in table] == [""] * 4 + ["7.0", "8.0"] + [""] * 2
    assert capsys.readouterr().out == f"{path} is full. Its rows wait in memory until there is room.\n"
