"""How a run saves itself and goes on: what is kept beside its state, and what must be the same when it is resumed."""

import dataclasses
import importlib.metadata
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float

from jmarl import checkpoint as checkpoint_module
from jmarl import configs, files, parallel, training
from jmarl.logging import Sink
from jmarl.types import Env, Loop, Metrics, RunState, TrainState

__all__: list[str] = []


class Checkpointing(NamedTuple):
    """How `run` saves itself: every `every_s` seconds, at the end, and when it is stopped.

    Attributes:
      folder: a new one, for the checkpoints alone.
      every_s: seconds between two of them, rounded up to the end of a chunk; 0: after each chunk.
      keep: how many stay.
      resume: go on from the last one in `folder`, as if the run had never been stopped or killed. Where none was
        completed yet, the run begins anew, and says so. With more iterations than before it is trained longer.
      best: the metric of the evaluation by which each seed's best learner is chosen.

    A checkpoint holds "run", the `RunState`, and, once there was an evaluation, "best", a `Best`. To read the learners:

        learner = loop.algorithm(loop.env.spec, cfg)
        like = jax.eval_shape(jax.vmap(learner.init), jax.random.split(key, num_seeds))
        learners = jmarl.checkpoint.restore(folder, like, part="best.train_state")  # or "run.train_state"
    """

    folder: str | os.PathLike[str]
    every_s: float = 60.0
    keep: int = 3
    resume: bool = False
    best: str = "eval/return_sum"


@struct.dataclass(kw_only=True)
class Best:
    """Each seed's learner that scored best in an evaluation, and its score: NaN where there was none to compare."""

    train_state: TrainState
    score: Float[Array, "*batch"]


class Progress(NamedTuple):
    """How far a run is: iterations, chunks, and seconds since its start, without those between stop and resume."""

    done: int = 0
    num_chunks: int = 0
    wall_s: float = 0.0


class Saver:
    """What `run` needs to save itself and to go on.

    Args:
      options: of the user.
      example: shapes of the state of all rows.
      measured: shapes of the metrics of an evaluation, {} if there is none.
      facts: of `facts_of`.
      placement: where rows lie.
    """

    def __init__(
        self,
        options: Checkpointing,
        example: RunState,
        measured: Metrics,
        facts: dict[str, Any],
        placement: parallel.Placement,
    ):
        if measured and options.best not in measured:
            raise ValueError(f"best={options.best!r} is not measured: choose one of {', '.join(sorted(measured))}.")
        self._options, self._facts, self._placement = options, facts, placement
        self._example: dict[str, Any] = {"run": example}
        if measured:
            self._example["best"] = Best(train_state=example.train_state, score=measured[options.best])
        self._best: Best | None = None
        self.is_begun = options.resume  # until a new run has sinks, it may be refused
        self._saved_at, self._saved_time = 0, time.monotonic()
        self._is_writing, self._is_told = False, False
        self._writer = None
        if parallel.is_first_process():
            self._writer = checkpoint_module.Writer(options.folder, keep=options.keep, resume=options.resume)
        parallel.wait_for_all("the folder of checkpoints is there")

    def restore(self) -> tuple[RunState | None, Progress]:
        """The last checkpoint, if the run does not begin here."""
        folder = self._options.folder
        if not checkpoint_module.steps(folder):
            if self._options.resume:
                parallel.say(f"{folder} holds no checkpoint yet: the run begins anew, and so do its metrics.")
            return None, Progress()
        info = checkpoint_module.describe(folder)["info"]
        _require_same(_saved_facts(info), self._facts)
        parts = {
            part: self._placement.mine(checkpoint_module.restore(folder, self._example[part], part=part))
            for part in info["parts"]
        }
        self._best = parts.get("best")
        progress = Progress(**info["progress"])
        self._saved_at = progress.done
        return parts["run"], progress

    def keep_best(self, learner: TrainState, metrics: Mapping[str, Any], is_finite: np.ndarray) -> None:
        score = np.asarray(metrics[self._options.best])
        score = np.where(is_finite & np.isfinite(score), score, np.nan).astype(score.dtype)
        new = Best(train_state=learner, score=jnp.asarray(score))
        self._best = better(self._best or new, new, is_finite)

    def is_due(self) -> bool:
        return time.monotonic() - self._saved_time >= self._options.every_s

    def save(self, state: RunState, progress: Progress, sinks: Sequence[Sink]) -> None:
        """Begins to save, unless nothing happened since the last time. A failure is told, and ends nothing."""
        self._saved_time = time.monotonic()
        if progress.done == self._saved_at:
            return
        parts = self._placement.gather({"run": state} if self._best is None else {"run": state, "best": self._best})
        info = self._facts | {"progress": progress._asdict(), "parts": list(parts)}
        self.wait()  # tells whether the save before this one has failed
        try:
            for sink in sinks:  # first, so that no row before the checkpoint is ever missing
                sink.flush()
            if self._writer is not None:
                self._writer.save(progress.done, parts, info)
        except OSError as error:
            self._tell(error)
        else:
            self._saved_at, self._is_writing = progress.done, True

    def wait(self) -> None:
        """Returns when the last save is complete, or has failed."""
        try:
            if self._writer is not None:
                self._writer.wait()
        except OSError as error:
            self._saved_at = 0
            self._tell(error)
        else:
            self._is_told = self._is_told and not self._is_writing
        self._is_writing = False

    def _tell(self, error: OSError) -> None:
        """The first failure of several in a row: others would only follow from it."""
        if not self._is_told:
            parallel.say(f"{str(error).rstrip('.')}. The run goes on, and will try again when the next save is due.")
        self._is_told = True

    def close(self) -> None:
        if self._writer is None:
            return
        try:
            self._writer.close()
        except OSError as error:
            self._tell(error)
        if not self.is_begun:  # else it would look as if the files that were in the way belonged to this run
            shutil.rmtree(self._writer.folder)


def better(old: Best, new: Best, is_finite: np.ndarray) -> Best:
    """Seed by seed: the higher score, or the newer where there was none yet. On the host: nothing is compiled.

    Args:
      old, new: to compare. What could not be measured has the score NaN, and is not better.
      is_finite: whether all parameters of `new` are finite, of each seed.
    """
    new_score, old_score = np.asarray(new.score), np.asarray(old.score)
    is_better = is_finite & ((new_score > old_score) | np.isnan(old_score))

    def pick(x, y):
        where = is_better.reshape(-1, *[1] * (x.ndim - 1))
        return jnp.where(where, x, y) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.where(where, x, y)

    return jax.tree.map(pick, new, old)


# --------------------------------------------------------------------------------------------------- what is the same

_OLD_NAMES = {
    "num_steps": "num_iterations",
    "steps_per_chunk": "iterations_per_chunk",
    "env_steps_per_step": "env_steps_per_iteration",
    "updates_per_step": "updates_per_iteration",
    "num_updates": "horizon",
}
_ARGUMENTS = (
    *("algorithm", "environment", "key", "num_iterations", "iterations_per_chunk", "num_seeds"),
    *("env_steps_per_iteration", "updates_per_iteration", "evaluation", "best"),
)


def begun(checkpoint: Checkpointing | None) -> dict[str, str]:
    """The arguments of the run that will be resumed, in words; {} if none is."""
    folder = None if checkpoint is None or not checkpoint.resume else files.absolute(checkpoint.folder)
    if folder is None or not folder.is_dir() or not checkpoint_module.steps(folder):
        return {}
    return _saved_facts(checkpoint_module.describe(folder)["info"])["arguments"]


def facts_of(
    loop: Loop,
    key: Array,
    cfg: Any,
    *,
    num_iterations: int,
    iterations_per_chunk: int,
    num_seeds: int,
    evaluation: Any,
    checkpoint: Checkpointing,
) -> dict[str, Any]:
    """What a run must have in common with the one it goes on from, in words."""
    arguments = {
        "algorithm": getattr(loop.algorithm, "__name__", ""),
        "environment": loop.env.spec.name,
        "key": jax.random.key_data(key).tolist(),
        "num_iterations": num_iterations,
        "iterations_per_chunk": iterations_per_chunk,
        "num_seeds": num_seeds,
        "env_steps_per_iteration": loop.env_steps_per_iteration,
        "updates_per_iteration": loop.updates_per_iteration,
        "evaluation": evaluation and evaluation[:2],
        "best": evaluation and checkpoint.best,
    }
    return {
        "arguments": _in_words(arguments),
        "config": _in_words(_fields(cfg)),
        "defaults": _in_words(_fields(cfg, of_class=True)),
        "loop": _in_words(getattr(loop, "settings", {})),
        "env": _in_words({**loop.env.spec._asdict(), **_options_of(loop.env)}),
        "program": {"versions": _versions(), "env": _program(loop.env)},
    }


def _saved_facts(info: dict[str, Any]) -> dict[str, Any]:
    """Those of a checkpoint, also of earlier versions: they had other names, and all of them in one table."""
    if "settings" not in info:
        return info
    table = {_OLD_NAMES.get(name, name): value for name, value in info["settings"].items()}
    arguments = {name: table.pop(name) for name in _ARGUMENTS if name in table}
    return {"arguments": arguments, "config": table, "defaults": {}, "loop": {}, "env": {}, "program": {}}


def _require_same(saved: dict[str, Any], given: dict[str, Any]) -> None:
    """Refuses to go on with another run. More iterations are allowed, and then schedules that end elsewhere."""
    is_longer = int(given["arguments"]["num_iterations"]) > int(saved["arguments"]["num_iterations"])
    for kind in ("arguments", "loop", "env"):
        for name in (name for name in given[kind] if name in saved[kind]):  # other versions may know of more
            if is_longer and name == "num_iterations":
                continue
            _require_equal(name if kind == "arguments" else f"{kind}.{name}", saved[kind][name], given[kind][name])
    for name in [*given["config"], *(name for name in saved["config"] if name not in given["config"])]:
        if is_longer and name.rpartition(".")[2] == "horizon":
            continue
        # A field that only one of two versions has counts as its default in the other.
        old = saved["config"].get(name, given["defaults"].get(name))
        _require_equal(name, old, given["config"].get(name, saved["defaults"].get(name)))
    programs = saved["program"], given["program"]
    if saved["program"].get("versions") == given["program"]["versions"] and programs[0] != programs[1]:
        raise ValueError(
            f"The environment {given['arguments']['environment']} computes something else than when the checkpoint was "
            f"written, so its options or its code are others: {_GO_ON}."
        )


_GO_ON = (
    "a run goes on with the arguments that it began with; to train with others, start a new run from its state, "
    "run(..., initial=state)"
)


def _require_equal(name: str, saved: str | None, given: str | None) -> None:
    if saved is None and given is not None:
        raise ValueError(f"{name} is not in the checkpoint, but {given} here: {_GO_ON}.")
    if given is None and saved is not None:
        raise ValueError(f"{name} is {saved} in the checkpoint, but there is no {name} here: {_GO_ON}.")
    if not _is_same(saved, given):
        raise ValueError(f"{name} is {saved} in the checkpoint, but {given} here: {_GO_ON}.")


def _is_same(saved: str | None, given: str | None) -> bool:
    try:
        return saved == given or float(saved or "") == float(given or "")  # 1 and 1.0
    except ValueError:
        return False


def _in_words(values: Mapping[str, Any]) -> dict[str, str]:
    words = {}
    for name, value in values.items():
        if isinstance(value, jax.Array | np.ndarray):
            value = np.asarray(value).tolist()
        words[name] = re.sub(r" at 0x[0-9a-f]+", "", str(getattr(value, "__name__", value)))
    return words


def _fields(cfg: Any, *, of_class: bool = False) -> dict[str, Any]:
    """Of a config, and of the configs in it by dotted names: their values, or the defaults of their classes."""
    values: dict[str, Any] = {}
    for name, field in configs.fields(cfg) if configs.is_config(cfg) else ():
        if not of_class:
            values[name] = configs.get(cfg, name)
        elif field.default is not dataclasses.MISSING:
            values[name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            values[name] = field.default_factory()
    return values


def _options_of(env: Env) -> dict[str, Any]:
    """Numbers and words that the environment underneath was made with, as far as it shows them."""
    inner = env.unwrapped
    values = inner._asdict() if hasattr(inner, "_asdict") else getattr(inner, "__dict__", {})
    return {f"unwrapped.{name}": x for name, x in values.items() if isinstance(x, bool | int | float | str)}


def _versions() -> str:
    """Of whatever may compute an environment in another way."""
    names = {"jmarl", "jax", "jaxmarl", "gymnax"}
    found = {dist.name: dist.version for dist in map(_distribution, sorted(names)) if dist is not None}
    return ", ".join(f"{name} {version}" for name, version in found.items())


def _distribution(name: str) -> Any:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _program(env: Env) -> int:
    """A checksum of what an environment computes: its operations, their shapes and constants, in any order."""
    pieces: list[int] = []

    def note(*piece):
        pieces.append(zlib.crc32(repr(piece).encode()))

    def constant(x):
        x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        x = np.asarray(x)
        note("constant", x.shape, str(x.dtype), zlib.crc32(x.tobytes()))

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            note(eqn.primitive.name, [str(var.aval) for var in (*eqn.invars, *eqn.outvars)])
            for var in eqn.invars:
                if hasattr(var, "val"):  # written into the program
                    constant(np.asarray(var.val))
            inner = jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns"))
            for value in inner:
                closed(value)

    def closed(value):
        for x in getattr(value, "consts", ()):
            constant(x)
        if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
            walk(getattr(value, "jaxpr", value))

    key = jax.eval_shape(lambda: jax.random.key(0))
    state, obs = jax.eval_shape(env.reset, key)
    closed(jax.make_jaxpr(env.reset)(key))
    action = _example_action(env, obs)
    closed(jax.make_jaxpr(env.step)(state, action, key))
    return zlib.crc32(repr(sorted(pieces)).encode())


def _example_action(env: Env, obs: Any) -> jax.ShapeDtypeStruct:
    shape: Callable[..., tuple] = lambda *more: (env.spec.num_agents, *more)  # noqa: E731
    if env.spec.is_discrete:
        return jax.ShapeDtypeStruct(shape(), jnp.int32)
    return jax.ShapeDtypeStruct(shape(env.spec.action_size), jnp.float32)


# ------------------------------------------------------------------------------------------------------ warm starts


def warm_start(fresh: RunState, initial: Any) -> RunState:
    """A run of several rows that begins with what another has learnt.

    Args:
      fresh: how the run would begin without.
      initial: a `RunState`, a `TrainState` or parameters, of one seed for all rows or with one for each.

    Returns:
      The run, in new memory: the first chunk takes it.
    """
    num_rows = len(fresh.first)
    if isinstance(initial, RunState):
        # Its own key where each row has one: rows of the same state must not repeat each other.
        is_one = initial.first.ndim < fresh.first.ndim
        state = _of_rows(fresh, initial, num_rows)
        return dataclasses.replace(state, key=_copied(fresh.key)) if is_one else state
    learner = fresh.train_state
    if not isinstance(initial, TrainState):
        params = _of_rows(learner.params, initial, num_rows)
        targets = _as_targets(learner.target_params, params)
        learner = dataclasses.replace(learner, params=params, target_params=targets)
    else:
        if initial.env_steps is None:  # not counted yet
            env_steps = _copied(learner.env_steps)
            one = initial.step.ndim < learner.step.ndim
            initial = dataclasses.replace(initial, env_steps=env_steps[0] if one else env_steps)
        learner = _of_rows(learner, initial, num_rows)
    return dataclasses.replace(jax.tree.map(_copied, fresh), train_state=learner)


def _of_rows(like: Any, tree: Any, num_rows: int) -> Any:
    """`tree` with the leading axis of `like`, after every leaf was found to fit."""
    wanted, given = checkpoint_module.by_name(like), checkpoint_module.by_name(tree)
    if wanted.keys() != given.keys():
        name = min(wanted.keys() ^ given.keys())
        has = "has" if name in given else "lacks"
        raise ValueError(f"initial {has} {name}, unlike what is trained here: it is of another algorithm or network.")
    is_one = all(x.ndim + 1 == wanted[name].ndim for name, x in given.items())
    for name, x in given.items():
        shape = wanted[name].shape[1:] if is_one else wanted[name].shape
        if x.shape != shape or x.dtype != wanted[name].dtype:
            raise ValueError(
                f"initial has {name} as {x.dtype} {list(x.shape)}, but {wanted[name].dtype} {list(shape)} is trained "
                f"here: give the state of one seed, or of all {num_rows}, of the same networks."
            )
    pick = (lambda x: jnp.broadcast_to(x, (num_rows, *x.shape))) if is_one else (lambda x: x)
    leaves = [_copied(pick(given[name])) for name in wanted]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _as_targets(targets: Any, params: Any) -> Any:
    """Target networks that are copies of parameters, or of the branches that have their names."""
    if isinstance(targets, Mapping) and isinstance(params, Mapping) and targets.keys() <= params.keys():
        return {name: _as_targets(targets[name], params[name]) for name in targets}
    is_copy = checkpoint_module.by_name(targets).keys() == checkpoint_module.by_name(params).keys()
    return jax.tree.map(_copied, params if is_copy else targets)


def _copied(x: Any) -> jax.Array:
    return jnp.array(x, copy=True)


def original_horizon(loop: Loop, cfg: Any, resumed: Mapping[str, str], num_iterations: int) -> Any:
    """The config with its horizon filled in: that of the run's first `num_iterations`, if it is trained longer."""
    before = int(resumed.get("num_iterations", num_iterations))
    if num_iterations > before:
        filled = training.with_horizon(loop, cfg, before)
        has_schedules = _in_words(_fields(filled)) != _in_words(_fields(cfg))
        how = " Schedules stay where they ended, since the config has no horizon of its own." if has_schedules else ""
        parallel.say(f"A run of {before} iterations is trained longer, to {num_iterations}.{how}")
        return filled
    return training.with_horizon(loop, cfg, num_iterations)
