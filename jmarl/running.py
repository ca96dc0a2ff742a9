"""Training with Python between compiled chunks: progress, files, evaluation, checkpoints, devices and processes."""

import contextlib
import dataclasses
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, PRNGKeyArray

from jmarl import buffers, parallel, rows, training
from jmarl import checkpoint as checkpoint_module
from jmarl.logging import Sink
from jmarl.types import Env, Loop, Metrics, RunState, TrainState

__all__ = ["Best", "Checkpointing", "Evaluation", "run"]


class Evaluation(NamedTuple):
    """How `run` evaluates: `num_episodes` greedy episodes per seed, every `every` chunks and at the end.

    `env` is where, if not in the environment of training: without shaped rewards, say.
    """

    num_episodes: int = 32
    every: int = 10
    env: Env | None = None


class Checkpointing(NamedTuple):
    """How `run` saves itself: every `every_s` seconds, at the end, and when it is stopped.

    Attributes:
      folder: a new one, for the checkpoints alone.
      every_s: seconds between two of them, rounded up to the end of a chunk; 0: after each chunk.
      keep: how many stay.
      resume: go on from the last one in `folder`, as if the run had never been stopped or killed. Where none was
        completed yet, the run begins anew, and says so.
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


def run(
    loop: Loop,
    key: PRNGKeyArray,
    cfg: Any,
    *,
    num_iterations: int,
    iterations_per_chunk: int | None = None,
    num_seeds: int = 1,
    sweep_axes: Any = None,
    devices: int | Sequence[jax.Device] | None = None,
    shard: str = "seeds",
    seed_axis: str | None = None,
    memory_limit: int | None = None,
    sinks: Sequence[Sink] = (),
    evaluation: Evaluation | None = None,
    checkpoint: Checkpointing | None = None,
    callback: Callable[[int, Mapping[str, np.ndarray], RunState], bool | None] | None = None,
) -> RunState:
    """Trains with Python between compiled chunks: progress, files, evaluation, checkpoints.

    Ctrl-C and SIGTERM end it after the chunk under way, with what it has. To go on with a run that was stopped, or
    killed, call it with the same arguments and `Checkpointing(..., resume=True)`; the devices may be others.

    Where `jax.distributed` joins several processes, all of them call `run` with the same arguments. Each trains its
    share of the seeds. The first one alone has sinks and writes checkpoints, for all seeds and where all can read them.

    Args:
      loop: what to run.
      key: split into one key for each seed.
      cfg: the algorithm's config; with `sweep_axes` those of several settings, both from `jmarl.sweep`.
      num_iterations: iterations of the loop.
      iterations_per_chunk: iterations between two rows of metrics (means over them); by default a hundredth of the run.
      num_seeds: independent runs.
      sweep_axes: which fields of `cfg` hold a value for each setting. Every setting is trained with the same seeds, and
        `[num_seeds]` is `[num_settings * num_seeds]` here, the seeds of a setting side by side.
      devices: of this process, how many or which. By default as many as can share the seeds, or environments, equally.
      shard: what they share: "seeds", or the "envs" of each seed for one large run, whose learner each device has.
      seed_axis: how a device computes its seeds: side by side ("vmap") or one after the other ("map"). By default side
        by side, except on a CPU where all environments together have 16 agents or more: there the arrays of one seed
        are large enough to be worth an operation, and small enough to stay in the cache.
      memory_limit: bytes of each device for this run; by default nine tenths of what it has. Seeds that do not fit
        together take turns: those that wait are kept in the host's memory.
      sinks: where metrics go, as arrays `[num_seeds]`.
      evaluation: greedy evaluation on the way, in the metrics "eval/..".
      checkpoint: where and how often to save; None: never.
      callback: `(env_steps, metrics, state) -> stop`, called after each chunk with what the sinks get and the state.
        The run stops if it returns True. The next chunk takes the state's memory: copy what you keep.

    Returns:
      The last state, with a leading axis `[num_seeds]`: of this process's seeds, if there are several processes.
    """
    iterations_per_chunk = max(1, num_iterations // 100) if iterations_per_chunk is None else iterations_per_chunk
    training.require_positive(
        num_iterations=num_iterations, iterations_per_chunk=iterations_per_chunk, num_seeds=num_seeds
    )
    if seed_axis not in (None, "vmap", "map"):
        raise ValueError(f"seed_axis={seed_axis!r} is not known: choose 'vmap' or 'map'.")
    if evaluation is not None:
        counts = {"evaluation.every": evaluation.every, "evaluation.num_episodes": evaluation.num_episodes}
        training.require_positive(**counts)
    if checkpoint is not None and not checkpoint.every_s >= 0:  # NaN is not, either
        raise ValueError(f"checkpoint.every_s={checkpoint.every_s} must be 0 seconds or more.")
    cfg = training.with_horizon(loop, cfg, num_iterations)
    begin = time.perf_counter()

    swept = training.swept_values(cfg, sweep_axes)
    num_settings = len(next(iter(swept.values()), "1"))
    num_rows = num_settings * num_seeds
    key_init, key_eval = jax.random.split(key)

    def num_envs():
        one = cfg.replace(**{name: x[0] for name, x in swept.items()}) if swept else cfg
        return len(jax.eval_shape(loop.init, key_init, one).first)

    placement = parallel.Placement(parallel.choose_devices(devices, num_rows, shard, num_envs), shard)

    def keys_of_rows(key):
        return jnp.concatenate([jax.random.split(key, num_seeds)] * num_settings)

    keys_init = keys_of_rows(key_init)
    values = {name: jnp.repeat(x, num_seeds, axis=0) for name, x in swept.items()}
    played = evaluation or Evaluation()
    functions = rows.Functions(
        loop, cfg, seed_axis, placement, played.env or loop.env, played.num_episodes, keys_init, values
    )
    example = functions.example
    _report_replay(example.buffer, num_rows)
    # Everything is traced before anything is opened: what cannot run is refused here.
    batch = rows.Batch(functions, placement, parallel.mine(values), memory_limit)
    saver = None
    if checkpoint is not None:
        measured = (
            {} if evaluation is None else jax.eval_shape(functions.evaluate, example.train_state, keys_init, values)
        )
        settings = _settings(loop, key, cfg, num_iterations, iterations_per_chunk, num_seeds, evaluation, checkpoint)
        saver = _Saver(checkpoint, example, measured, settings)

    with contextlib.ExitStack() as at_the_end:
        state, progress = None, _Progress()
        if saver is not None:
            at_the_end.callback(saver.close)
            state, progress = saver.restore()
        begin -= progress.wall_s
        info = {
            "num_seeds": num_rows,
            "num_iterations": num_iterations,
            "env_steps_per_iteration": loop.env_steps_per_iteration,
            "total_env_steps": num_iterations * loop.env_steps_per_iteration,
            "resumed_at": progress.done * loop.env_steps_per_iteration if checkpoint and checkpoint.resume else None,
        }
        sinks = sinks if parallel.is_first_process() else ()
        for sink in sinks:
            sink.start(info)
            at_the_end.callback(sink.close)
        if saver is not None:
            saver.is_begun = True
        if state is not None and progress.done == num_iterations:
            return state
        batch.start(parallel.mine(keys_init), state)
        del state  # the first chunk takes its memory
        with _first_signal() as stopped:
            is_stopped, is_reported = False, False
            while progress.done < num_iterations and not is_stopped:
                num = min(iterations_per_chunk, num_iterations - progress.done)
                done, num_chunks = progress.done + num, progress.num_chunks + 1
                is_evaluated = evaluation is not None and (num_chunks % evaluation.every == 0 or done == num_iterations)
                keys = parallel.mine(keys_of_rows(jax.random.fold_in(key_eval, num_chunks))) if is_evaluated else None
                metrics = batch.advance(num, keys)
                if saver is not None and is_evaluated:
                    saver.keep_best(batch.join([piece.train_state for piece in batch.pieces]), metrics)
                metrics = parallel.gather(metrics)
                is_reported = is_reported or _report_divergence(done * loop.env_steps_per_iteration, metrics)
                progress = _Progress(done, num_chunks, time.perf_counter() - begin)
                for sink in sinks:
                    sink.write(done * loop.env_steps_per_iteration, progress.wall_s, metrics)
                if callback is not None and callback(done * loop.env_steps_per_iteration, metrics, batch.state()):
                    stopped.set()
                is_stopped, is_due = parallel.agree(stopped.is_set(), saver is not None and saver.is_due())
                if saver is not None and is_due:
                    saver.save(batch.state(), progress, sinks)
            if saver is not None:
                saver.save(batch.state(), progress, sinks)
                saver.wait()
    if progress.done < num_iterations:
        parallel.say(
            f"Stopped after {progress.done} of {num_iterations} iterations; what was learnt until then is kept."
        )
    return batch.state()


def _report_replay(buffer: Any, num_seeds: int) -> None:
    """Says what replay takes, and refuses what the device has no room for."""
    needed, device = buffers.memory(buffer), jax.local_devices()[0]
    if not needed:
        return
    # Seeds may take turns on an accelerator; in the end all of them must be somewhere.
    at_once = num_seeds if device.platform == "cpu" else 1
    available = parallel.memory_of([device])
    if (least := needed * at_once / num_seeds) > available:
        raise ValueError(
            f"Replay of {at_once} seeds takes {least / 2**30:.1f} GiB, but {device.device_kind} has "
            f"{available / 2**30:.1f} GiB: lower the buffer's capacity or the number of seeds."
        )
    parallel.say(f"Replay takes {needed / 2**20:,.1f} MiB for {num_seeds} seed{'s' if num_seeds > 1 else ''}.")


def _report_divergence(env_steps: int, metrics: Mapping[str, np.ndarray]) -> bool:
    """Says that a loss is no number any more, and whether it is so."""
    for name, values in metrics.items():
        lost = np.flatnonzero(~np.isfinite(values)).tolist() if name.startswith("loss/") else []
        if lost:
            parallel.say(
                f"{name} is {values[lost[0]]} after {env_steps:,} steps, for seeds {', '.join(map(str, lost))} of "
                f"{len(values)}: they may never recover; try a lower learning rate."
            )
            return True
    return False


@contextlib.contextmanager
def _first_signal() -> Iterator[threading.Event]:
    """An event that Ctrl-C or SIGTERM sets, so that the chunk under way ends whole; a second one interrupts at once."""
    event = threading.Event()

    def handler(signum, frame):
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    if threading.current_thread() is not threading.main_thread():  # signals belong to the main thread
        yield event
        return
    previous = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield event
    finally:
        for number, handler_before in previous.items():
            signal.signal(number, handler_before)


# ---------------------------------------------------------------------------------------------------- saved runs


class _Progress(NamedTuple):
    """How far a run is: iterations, chunks, and seconds since its start, without those between stop and resume."""

    done: int = 0
    num_chunks: int = 0
    wall_s: float = 0.0


class _Saver:
    """What `run` needs to save itself and to go on."""

    def __init__(self, options: Checkpointing, example: RunState, measured: Metrics, settings: dict[str, str]):
        if measured and options.best not in measured:
            raise ValueError(f"best={options.best!r} is not measured: choose one of {', '.join(sorted(measured))}.")
        self._options, self._settings = options, settings
        self._example: dict[str, Any] = {"run": example}
        if measured:
            self._example["best"] = Best(train_state=example.train_state, score=measured[options.best])
        self._best: Best | None = None
        self.is_begun = options.resume  # until a new run has sinks, it may be refused
        self._saved_at, self._saved_time = 0, time.monotonic()
        self._writer = None
        if parallel.is_first_process():
            self._writer = checkpoint_module.Writer(options.folder, keep=options.keep, resume=options.resume)
        parallel.wait_for_all("the folder of checkpoints is there")

    def restore(self) -> tuple[RunState | None, _Progress]:
        """The last checkpoint, if the run does not begin here."""
        folder = self._options.folder
        if not checkpoint_module.steps(folder):
            if self._options.resume:
                parallel.say(f"{folder} holds no checkpoint yet: the run begins anew, and so do its metrics.")
            return None, _Progress()
        info = checkpoint_module.describe(folder)["info"]
        _require_same(info["settings"], self._settings)
        parts = {
            part: parallel.mine(checkpoint_module.restore(folder, self._example[part], part=part))
            for part in info["parts"]
        }
        self._best = parts.get("best")
        progress = _Progress(**info["progress"])
        self._saved_at = progress.done
        return parts["run"], progress

    def keep_best(self, learner: TrainState, metrics: Mapping[str, Any]) -> None:
        new = Best(train_state=learner, score=metrics[self._options.best])
        self._best = _better(self._best or new, new)

    def is_due(self) -> bool:
        return time.monotonic() - self._saved_time >= self._options.every_s

    def save(self, state: RunState, progress: _Progress, sinks: Sequence[Sink]) -> None:
        """Begins to save, unless nothing happened since the last time."""
        if progress.done == self._saved_at:
            return
        for sink in sinks:  # first, so that no row before the checkpoint is ever missing
            sink.flush()
        parts = parallel.gather({"run": state} if self._best is None else {"run": state, "best": self._best})
        info = {"settings": self._settings, "progress": progress._asdict(), "parts": list(parts)}
        if self._writer is not None:
            self._writer.save(progress.done, parts, info)
        self._saved_at, self._saved_time = progress.done, time.monotonic()

    def wait(self) -> None:
        if self._writer is not None:
            self._writer.wait()

    def close(self) -> None:
        if self._writer is None:
            return
        self._writer.close()
        if not self.is_begun:  # else it would look as if the files that were in the way belonged to this run
            shutil.rmtree(self._writer.folder)


def _better(old: Best, new: Best) -> Best:
    """Seed by seed; what could not be measured is not better. On the host, where nothing has to be compiled."""
    new_score, old_score = np.asarray(new.score), np.asarray(old.score)
    is_better = (new_score > old_score) | np.isnan(old_score)

    def pick(x, y):
        where = is_better.reshape(-1, *[1] * (x.ndim - 1))
        return jnp.where(where, x, y) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.where(where, x, y)

    return jax.tree.map(pick, new, old)


def _settings(
    loop, key, cfg, num_iterations, iterations_per_chunk, num_seeds, evaluation, checkpoint
) -> dict[str, str]:
    """What a run must have in common with the one it goes on from, in words."""
    settings = {
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
    fields = dataclasses.fields(cfg) if dataclasses.is_dataclass(cfg) else ()
    settings |= {field.name: getattr(cfg, field.name) for field in fields}
    settings |= {name: np.asarray(value).tolist() for name, value in settings.items() if isinstance(value, jax.Array)}
    return {name: str(getattr(value, "__name__", value)) for name, value in settings.items()}


def _require_same(saved: dict[str, str], given: dict[str, str]) -> None:
    is_longer = int(given["num_iterations"]) > int(saved["num_iterations"])
    may_differ = ("num_iterations", "horizon") if is_longer else ()
    for name in [*given, *saved]:
        if saved.get(name) != given.get(name) and name not in may_differ:
            raise ValueError(
                f"{name} is {saved.get(name)} in the checkpoint, but {given.get(name)} here: a run goes on with the "
                "arguments that it began with."
            )
