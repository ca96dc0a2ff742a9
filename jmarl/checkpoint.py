"""Save and resume: the checkpoints of a run, written by orbax in the background.

A folder holds one sub-folder per checkpoint, named after its step. Each appears whole, by a rename, so a process may be
killed at any moment. What is read is compared with what is expected, leaf by leaf, before it is used: orbax would cast
another dtype in silence. `jmarl.run(..., checkpoint=jmarl.Checkpointing(folder))` writes them; any other tree of arrays
can be kept in the same way:

>>> import tempfile
>>> folder = Path(tempfile.mkdtemp()) / "checkpoints"
>>> tree = {"params": jnp.arange(3.0), "key": jax.random.key(0)}
>>> with Writer(folder) as writer:
...     writer.save(10, tree)
>>> restore(folder, tree)["params"]
Array([0., 1., 2.], dtype=float32)
>>> restore(folder, {"params": jnp.zeros(4), "key": jax.random.key(0)})
Traceback (most recent call last):
ValueError: params is float32 [3] in the checkpoint, but float32 [4] is expected here.
"""

import contextlib
import functools
import json
import logging
import os
import re
import secrets
import shutil
import sys
import threading
import weakref
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmarl import files

__all__ = ["Writer", "describe", "restore", "steps", "take_seed"]

_MARKER = "jmarl.json"  # tells our folders from others
_FORMAT = 1


class _Leaf(NamedTuple):
    """What a checkpoint says about an array. The dtype of a typed key is such as "key<fry>"."""

    dtype: str
    shape: tuple[int, ...]
    crc32: int = 0
    key_impl: str | None = None

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class _Copy(np.ndarray):
    """An array that orbax takes as it is: a plain one it would copy once more."""

    def __deepcopy__(self, memo: Any) -> "_Copy":
        return self


class Writer:
    """Writes checkpoints into a folder, in the background, and keeps the last `keep`.

    Args:
      folder: a new one, or an empty one; with `resume` one that a `Writer` has made.
      keep: how many checkpoints stay. An old one goes after the new one is complete.
      resume: go on in a folder that has checkpoints, or in which no checkpoint was completed yet.

    Only one writer may be open for a folder: a second one, in this process or another, is refused.
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int = 3, resume: bool = False):
        if keep < 1:
            raise ValueError(f"keep={keep} must be at least 1.")
        self.folder, self.keep = files.absolute(folder), keep
        if not resume:
            _make(self.folder)
        self._identity = _identity(self.folder)
        self._lock = _lock(self.folder)
        for path in self.folder.iterdir():
            if re.fullmatch(r"\d+\.(old|orbax-checkpoint-tmp.*)", path.name):  # left by a process that was killed
                shutil.rmtree(path)
        self._ocp = ocp = _orbax()
        self._memory: dict[str, np.ndarray] = {}
        self._checkpointer = ocp.AsyncCheckpointer(_handler(ocp), multiprocessing_options=_alone(ocp))
        _OPEN.add(self)

    def save(self, step: int, tree: Any, info: Any = None) -> None:
        """Copies a tree of arrays and returns: the arrays may be donated, and are written in the background.

        Args:
          step: names the checkpoint; a step that was saved before is refused.
          tree: arrays and typed keys.
          info: anything that JSON can hold; `describe` returns it.
        """
        self.wait()
        if step in steps(self.folder):
            raise FileExistsError(f"{self.folder} holds a checkpoint {step} already.")
        leaves = by_name(tree)
        with ThreadPoolExecutor() as threads:  # training waits for it, so that all cores are free
            arrays = dict(zip(leaves, threads.map(self._copy, leaves, leaves.values()), strict=True))
            checksums = dict(zip(leaves, threads.map(_checksum, arrays.values()), strict=True))
        facts = {
            "format": _FORMAT,
            "identity": self._identity,
            "step": step,
            "leaves": {name: _leaf(x)._replace(crc32=checksums[name]) for name, x in leaves.items()},
            "info": info,
        }
        facts = json.loads(json.dumps(facts))  # as it will be read
        facts["crc32"] = _checksum_of_facts(facts)
        args = self._ocp.args
        items = {
            # Orbax refuses arrays of no elements; their shape says it all.
            "arrays": args.PyTreeSave({name: x for name, x in arrays.items() if x.size}),
            "facts": args.JsonSave(facts),
        }
        try:
            self._checkpointer.save(self.folder / str(step), args.Composite(**items))
        except OSError as error:
            raise self._failed(error) from error

    def _copy(self, name: str, x: Any) -> np.ndarray:
        """Into memory that the next save uses again: fresh memory takes longer than the copy.

        A copy, since on a CPU NumPy gets a view of a buffer that the next iteration may overwrite; device by device,
        since JAX would first put the parts together in fresh memory.
        """
        x = jax.random.key_data(x) if _is_key(x) else x
        memory = self._memory.get(name)
        if memory is None or (memory.shape, memory.dtype) != (x.shape, x.dtype):
            memory = self._memory[name] = np.empty(x.shape, x.dtype).view(_Copy)
        for shard in jnp.asarray(x).addressable_shards:
            memory[shard.index] = np.asarray(shard.data)
        return memory

    def wait(self) -> None:
        """Returns when the last save is complete, and removes old checkpoints."""
        try:
            self._checkpointer.wait_until_finished()
            for step in steps(self.folder)[: -self.keep]:
                # Renamed first, so that half a checkpoint is never taken for a whole one.
                shutil.rmtree((self.folder / str(step)).rename(self.folder / f"{step}.old"))
        except Exception as error:  # whatever went wrong in another thread
            raise self._failed(error) from error

    def close(self) -> None:
        """Completes the last save."""
        try:
            self.wait()
        finally:
            _OPEN.discard(self)
            self._checkpointer.close()
            os.close(self._lock)

    def _failed(self, error: Exception) -> OSError:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if code := re.search(r"os_error_code='(\d+)'", reason):  # at the end of a long story
            reason = os.strerror(int(code[1]))
        kept = ", ".join(map(str, steps(self.folder) if self.folder.is_dir() else ())) or "none"
        return OSError(f"Could not write a checkpoint to {self.folder} (earlier ones are intact: {kept}): {reason}")

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


_OPEN: weakref.WeakSet[Writer] = weakref.WeakSet()


def _complete_saves() -> None:
    """Of writers that nobody closed when the interpreter ends: orbax would wait for its own threads, five minutes."""
    for writer in list(_OPEN):
        with contextlib.suppress(OSError):
            writer.wait()


# Before executors end, which `atexit` is too late for. They register themselves in the same way as they are imported.
threading._register_atexit(_complete_saves)  # type: ignore[attr-defined]


def steps(folder: str | os.PathLike[str]) -> list[int]:
    """The steps of the checkpoints in a folder, in rising order."""
    return sorted(int(path.name) for path in Path(folder).iterdir() if re.fullmatch(r"0|[1-9][0-9]*", path.name))


def restore(folder: str | os.PathLike[str], like: Any, *, step: int | None = None, part: str = "") -> Any:
    """Reads a checkpoint into the structure of `like`, after every leaf was found to have its shape and dtype.

    Args:
      folder: of a `Writer`.
      like: a tree of arrays or of `jax.ShapeDtypeStruct`, such as `jax.eval_shape` gives.
      step: which checkpoint; the last one by default.
      part: name of the branch of the saved tree to read, such as "run.train_state"; the whole tree by default.
    """
    folder, step = _find(folder, step)
    prefix = f"{part}." if part else ""
    leaves, _ = _facts(folder, step)
    saved = {_current(name): name for name in leaves}
    known = {name.removeprefix(prefix): leaves[saved[name]] for name in saved if name.startswith(prefix)}
    wanted = {name: _leaf(x) for name, x in by_name(jax.eval_shape(lambda x: x, like)).items()}
    _require_equal(known, wanted)
    arrays = _read(folder, step, {saved[f"{prefix}{name}"]: leaf for name, leaf in known.items()})
    return jax.tree.unflatten(
        jax.tree.structure(like), [_to_jax(arrays[saved[f"{prefix}{name}"]], known[name]) for name in wanted]
    )


def describe(folder: str | os.PathLike[str], step: int | None = None) -> dict[str, Any]:
    """What a checkpoint holds: its "step", the "info" given to `Writer.save`, and the "leaves" by name.

    Each leaf is `[dtype, shape, checksum, key implementation]`. Nothing but these facts is read.
    """
    folder, step = _find(folder, step)
    leaves, info = _facts(folder, step)
    return {"step": step, "info": info, "leaves": {name: list(leaf) for name, leaf in leaves.items()}}


def take_seed(tree: Any, seed: int) -> Any:
    """One seed's state out of a tree with a leading seed axis.

    >>> take_seed({"x": jnp.array([[1, 2], [3, 4]])}, 1)
    {'x': Array([3, 4], dtype=int32)}
    """
    num_seeds = min(len(x) for x in jax.tree.leaves(tree))
    if not 0 <= seed < num_seeds:
        raise ValueError(f"seed={seed} is none of the {num_seeds} seeds: choose 0 to {num_seeds - 1}.")
    return jax.tree.map(lambda x: x[seed], tree)


# ------------------------------------------------------------------------------------------------------- folders


def _make(folder: Path) -> None:
    """A folder of ours, from one moment to the next."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    temporary.mkdir()
    marker = {"what": "checkpoints of jmarl", "format": _FORMAT, "identity": secrets.token_hex(8)}
    (temporary / _MARKER).write_text(json.dumps(marker) + "\n")
    try:
        os.rename(temporary, folder)  # refused unless there is nothing, or an empty folder
    except OSError as error:
        shutil.rmtree(temporary)
        if not folder.is_dir() or [path.name for path in folder.iterdir()] != [_MARKER]:  # one of ours, never used
            sentence = f"{folder} exists already: resume the run that it belongs to, or give another folder."
            raise FileExistsError(sentence) from error


def _identity(folder: Path) -> str | None:
    """Tells a folder of ours from all others, wherever it is moved; None in one of an earlier version."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} does not exist, so there are no checkpoints to read.")
    try:
        marker = json.loads((folder / _MARKER).read_text())
        is_known, identity = marker["format"] == _FORMAT, marker.get("identity")
    except (OSError, ValueError, TypeError, KeyError):
        raise ValueError(f"{folder} is not a folder of jmarl's checkpoints: its {_MARKER} is no such file.") from None
    if not is_known:
        raise ValueError(f"{folder} has format {marker['format']}, but this version of jmarl reads format {_FORMAT}.")
    return identity


def _lock(folder: Path) -> int:
    """Keeps a second writer out. The system takes the lock back when a process ends, however it ends."""
    descriptor = os.open(folder / _MARKER, os.O_RDONLY)
    try:
        import fcntl  # not on every system

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise FileExistsError(f"{folder} is being written by another run: stop that one first.") from None
    except (ImportError, OSError):  # nor on every file system
        pass
    return descriptor


def _find(folder: str | os.PathLike[str], step: int | None) -> tuple[Path, int]:
    path = files.absolute(folder)
    _identity(path)
    there = steps(path)
    if not there:
        raise FileNotFoundError(f"{path} holds no checkpoint: none was completed yet.")
    if step is not None and step not in there:
        raise FileNotFoundError(f"{path} holds no checkpoint {step}: choose one of {', '.join(map(str, there))}.")
    return path, there[-1] if step is None else step


# -------------------------------------------------------------------------------------------------------- leaves


def by_name(tree: Any) -> dict[str, Any]:
    """Leaves by their place in the tree, such as `learner.params.actor.Dense_0.kernel`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    by_name = {jax.tree_util.keystr(place, simple=True, separator="."): leaf for place, leaf in leaves}
    if len(by_name) < len(leaves):
        raise ValueError("Two arrays have the same name: let no key of the tree hold a dot.")
    return by_name


def _current(name: str) -> str:
    """The name that a leaf has now: what a run has learnt was its `learner` before 0.1."""
    return re.sub(r"^(run|best)\.learner\.", r"\1.train_state.", name)


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _leaf(x: Any) -> _Leaf:
    is_concrete_key = _is_key(x) and isinstance(x, jax.Array)
    return _Leaf(str(x.dtype), tuple(x.shape), key_impl=str(jax.random.key_impl(x)) if is_concrete_key else None)


def _checksum(x: np.ndarray) -> int:
    return zlib.crc32(x.reshape(-1).view(np.uint8).data) if x.size else 0


def _checksum_of_facts(facts: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(facts, sort_keys=True).encode())


def _to_jax(x: np.ndarray, leaf: _Leaf) -> jax.Array:
    return jnp.asarray(x) if leaf.key_impl is None else jax.random.wrap_key_data(jnp.asarray(x), impl=leaf.key_impl)


def _require_equal(known: dict[str, _Leaf], wanted: dict[str, _Leaf]) -> None:
    for name in [*wanted, *known]:
        if name not in known:
            raise ValueError(f"{name} is expected here, but is not in the checkpoint: it is of another kind of run.")
        if name not in wanted:
            raise ValueError(f"{name} is in the checkpoint, but not expected here: it is of another kind of run.")
        if known[name][:2] != wanted[name][:2]:
            raise ValueError(f"{name} is {known[name]} in the checkpoint, but {wanted[name]} is expected here.")


# ------------------------------------------------------------------------------------------------------- reading


@functools.cache
def _orbax() -> Any:
    """Imported here: it would be a large part of the time that `import jmarl` takes.

    What goes wrong is raised here, in a sentence. Orbax logs its traceback as well, from each of its threads, and those
    of tensorstore complain that orbax does not listen any more.
    """
    import orbax.checkpoint as ocp

    logging.getLogger("absl").addFilter(lambda record: "orbax" not in Path(record.pathname).parts)
    hook = sys.unraisablehook
    sys.unraisablehook = lambda args: None if str(args.exc_value) == "Event loop is closed" else hook(args)
    return ocp


def _handler(ocp: Any) -> Any:
    # Uncompressed: compressing a replay buffer takes the cores that training needs.
    arrays = ocp.PyTreeCheckpointHandler(use_compression=False, multiprocessing_options=_alone(ocp))
    facts = ocp.JsonCheckpointHandler(multiprocessing_options=_alone(ocp))
    options = ocp.CompositeOptions(multiprocessing_options=_alone(ocp))
    return ocp.CompositeCheckpointHandler(composite_options=options, arrays=arrays, facts=facts)


def _alone(ocp: Any) -> Any:
    """This process reads and writes by itself, and waits for no other, where there are several."""
    process = jax.process_index()
    if jax.process_count() == 1:
        return ocp.options.MultiprocessingOptions()
    name = f"process-{process}"
    return ocp.options.MultiprocessingOptions(process, active_processes={process}, barrier_sync_key_prefix=name)


def _facts(folder: Path, step: int) -> tuple[dict[str, _Leaf], Any]:
    """Leaves by name, and the info."""
    ocp = _orbax()
    try:
        with ocp.Checkpointer(_handler(ocp), multiprocessing_options=_alone(ocp)) as checkpointer:
            facts = checkpointer.restore(folder / str(step), ocp.args.Composite(facts=ocp.args.JsonRestore()))["facts"]
        leaves = {name: _Leaf(d, tuple(s), *more) for name, (d, s, *more) in facts["leaves"].items()}
        info, crc32 = facts["info"], facts.pop("crc32", None)
    except Exception as error:  # orbax and tensorstore raise many kinds
        raise _damaged(folder, step, "its facts cannot be read") from error
    if crc32 is None:  # of an earlier version
        return leaves, info
    if crc32 != _checksum_of_facts(facts):
        raise _damaged(folder, step, "its facts are not what was saved")
    if (facts["identity"], facts["step"]) != (_identity(folder), step):
        raise _damaged(folder, step, f"it is checkpoint {facts['step']}, or of another run")
    return leaves, info


def _read(folder: Path, step: int, leaves: dict[str, _Leaf]) -> dict[str, np.ndarray]:
    """Arrays by name, compared with their checksums."""
    ocp = _orbax()
    empty = {name: leaf for name, leaf in leaves.items() if 0 in leaf.shape}
    names = leaves.keys() - empty.keys()
    args = ocp.args.PyTreeRestore(
        {name: 0 for name in names},
        restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names},
        partial_restore=True,
    )
    try:
        with ocp.Checkpointer(_handler(ocp), multiprocessing_options=_alone(ocp)) as checkpointer:
            arrays = checkpointer.restore(folder / str(step), ocp.args.Composite(arrays=args))["arrays"]
    except Exception as error:
        raise _damaged(folder, step, "its arrays cannot be read") from error
    for name, x in arrays.items():
        if _checksum(np.ascontiguousarray(x)) != leaves[name].crc32:
            raise _damaged(folder, step, f"{name} is not what was saved")
    return arrays | {name: np.zeros(leaf.shape, jnp.dtype(leaf.dtype)) for name, leaf in empty.items()}


def _damaged(folder: Path, step: int, reason: str) -> ValueError:
    others = ", ".join(str(other) for other in steps(folder) if other != step)
    way_out = f"remove it to go on from another ({others})" if others else "it is the only one"
    return ValueError(f"Checkpoint {folder / str(step)} is damaged, {reason}: {way_out}.")
