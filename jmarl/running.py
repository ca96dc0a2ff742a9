"""Training with Python between compiled chunks: progress, files, evaluation, checkpoints, devices and processes."""

import contextlib
import operator
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from jmarl import buffers, configs, deprecation, files, parallel, rows, saving, training
from jmarl import keys as keys_module
from jmarl.envs import host
from jmarl.logging import Sink
from jmarl.saving import Best, Checkpointing, Progress
from jmarl.types import Config, Env, Loop, RunState, TrainState

__all__ = ["Best", "Checkpointing", "Evaluation", "run"]


_MOST = 2**31 - 1  # iterations that a compiled chunk can count


class Evaluation(NamedTuple):
    """How `run` evaluates: `num_episodes` greedy episodes per seed, every `every` chunks and at the end.

    `env` is where, if not in the environment of training: without shaped rewards, say.
    """

    num_episodes: int = 32
    every: int = 10
    env: Env | None = None


@deprecation.renamed_arguments(num_steps="num_iterations", steps_per_chunk="iterations_per_chunk", split="shard")
def run(
    loop: Loop,
    key: PRNGKeyArray,
    cfg: Config,
    *,
    num_iterations: int,
    initial: RunState | TrainState | Any = None,
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
    killed, call it with the same arguments and `Checkpointing(..., resume=True)`; the devices may be others. With a
    larger `num_iterations` a run is trained longer: a `horizon` that was left open stays that of the first time, so
    schedules stay where they ended; one in the config stretches them.

    An exception of a sink or a callback goes on after the state was saved; it has it as its `run_state`, too.

    Where `jax.distributed` joins several processes, all of them call `run` with the same arguments. Each trains its
    share of the seeds, or of the parts. The first one alone has sinks and writes checkpoints, for all of them and where
    all can read them.

    Args:
      loop: what to run.
      key: split into one key for each seed.
      cfg: the algorithm's config; with `sweep_axes` those of several settings, both from `jmarl.sweep`.
      num_iterations: iterations of the loop.
      initial: begins with what was learnt elsewhere. A `RunState` goes on as it is; a `TrainState` meets new
        environments, and its optimiser and schedules go on; parameters alone get new ones of these. Of one seed, for
        all seeds, or with an axis `[num_seeds]`. A run that goes on from a checkpoint does not need it any more.
      iterations_per_chunk: iterations between two rows of metrics (means over them); by default a hundredth of the run.
      num_seeds: independent runs.
      sweep_axes: which fields of `cfg` hold a value for each setting. Every setting is trained with the same seeds, and
        `[num_seeds]` is `[num_settings * num_seeds]` here, the seeds of a setting side by side.
      devices: of this process, how many or which. By default as many as can share these equally.
      shard: what they share: "seeds"; or, for one large run whose learner each device has, the "envs" of each seed,
        with the numbers of one device, or the "parts" of `jmarl.data_parallel`, which share replay and learning, too.
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
      The last state, with a leading axis `[num_seeds]`: of this process's seeds, if there are several processes. With
      shard="parts" it is one that all of them hold together, and `jmarl.parallel.gather` makes whole.
    """
    _require_types(loop=loop, sinks=sinks, evaluation=evaluation, checkpoint=checkpoint, callback=callback)
    if checkpoint is not None:
        checkpoint = checkpoint._replace(folder=files.absolute(checkpoint.folder))
    resumed = saving.begun(checkpoint)
    if iterations_per_chunk is None:
        by_default = min(max(1, (_whole(num_iterations) or 0) // 100), _MOST)
        iterations_per_chunk = int(resumed.get("iterations_per_chunk", by_default))
    counts = {"num_iterations": num_iterations, "iterations_per_chunk": iterations_per_chunk, "num_seeds": num_seeds}
    if evaluation is not None:
        counts |= {"evaluation.every": evaluation.every, "evaluation.num_episodes": evaluation.num_episodes}
    _require_counts(**counts)
    if iterations_per_chunk > _MOST:
        raise ValueError(f"iterations_per_chunk={iterations_per_chunk} must be at most {_MOST}.")
    if seed_axis not in (None, "vmap", "map"):
        raise ValueError(f"seed_axis={seed_axis!r} is not known: choose 'vmap' or 'map'.")
    if checkpoint is not None and not checkpoint.every_s >= 0:  # NaN is not, either
        raise ValueError(f"checkpoint.every_s={checkpoint.every_s} must be 0 seconds or more.")
    key = keys_module.as_key(key)
    cfg = saving.original_horizon(loop, cfg, resumed, num_iterations)
    begin = time.perf_counter()

    swept = training.swept_values(cfg, sweep_axes)
    num_settings = len(next(iter(swept.values()), "1"))
    num_rows = num_settings * num_seeds
    key_init, key_eval = jax.random.split(key)

    def num_envs():
        one = configs.replace(cfg, {name: x[0] for name, x in swept.items()})
        return len(jax.eval_shape(loop.init, key_init, one).first)

    num_parts = loop.settings.get("num_parts")
    chosen = parallel.choose_devices(devices, num_rows, shard, num_envs, num_parts)
    placement = parallel.Placement(chosen, shard)

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
    batch = rows.Batch(functions, placement, placement.mine(values), memory_limit)
    if initial is not None:
        jax.eval_shape(saving.warm_start, batch.example, initial)
    saver = None
    if checkpoint is not None:
        measured = (
            {} if evaluation is None else jax.eval_shape(functions.evaluate, example.train_state, keys_init, values)
        )
        facts = saving.facts_of(
            loop,
            key,
            cfg,
            num_iterations=num_iterations,
            iterations_per_chunk=iterations_per_chunk,
            num_seeds=num_seeds,
            evaluation=evaluation,
            checkpoint=checkpoint,
        )
        saver = saving.Saver(checkpoint, example, measured, facts, placement)

    with contextlib.ExitStack() as at_the_end:
        state, progress = None, Progress()
        if saver is not None:
            at_the_end.callback(saver.close)
            state, progress = saver.restore()
        at_the_end.enter_context(host.failures_named(loop.env, played.env or loop.env))
        if state is not None and loop.env.restart is not None and progress.done < num_iterations:
            state = jax.vmap(lambda row, swept: training.begin_anew(loop, row, configs.replace(cfg, dict(swept))))(
                state, placement.mine(values)
            )
            parallel.say(f"{loop.env.spec.name} is not in the checkpoint: the episodes that were under way begin anew.")
        begin -= progress.wall_s
        info = {
            "num_seeds": num_rows,
            "num_iterations": num_iterations,
            "env_steps_per_iteration": loop.env_steps_per_iteration,
            "total_env_steps": num_iterations * loop.env_steps_per_iteration,
            "resumed_at": progress.done * loop.env_steps_per_iteration if checkpoint and checkpoint.resume else None,
            "rows_until_then": progress.num_chunks,
        }
        sinks = list(sinks) if parallel.is_first_process() else []
        for sink in sinks:
            sink.start(info)
            at_the_end.callback(sink.close)
        if saver is not None:
            saver.is_begun = True
        if state is not None and progress.done == num_iterations:
            return state
        batch.start(placement.mine(keys_init), state, initial)
        del state  # the first chunk takes its memory
        watch = _Watch()
        with _first_signal() as stopped:
            is_stopped = False
            while progress.done < num_iterations and not is_stopped:
                num = min(iterations_per_chunk, num_iterations - progress.done)
                done, num_chunks = progress.done + num, progress.num_chunks + 1
                env_steps = done * loop.env_steps_per_iteration
                is_evaluated = evaluation is not None and (num_chunks % evaluation.every == 0 or done == num_iterations)
                keys = placement.mine(keys_of_rows(jax.random.fold_in(key_eval, num_chunks))) if is_evaluated else None
                metrics = batch.advance(num, keys)
                if is_evaluated:
                    learner = batch.join([piece.train_state for piece in batch.pieces])
                    is_finite = _has_finite_parameters(learner)
                    watch.parameters(env_steps, placement.gather(is_finite))
                    if saver is not None:
                        saver.keep_best(learner, metrics, is_finite)
                metrics = watch.metrics(env_steps, placement.gather(metrics))
                progress = Progress(done, num_chunks, time.perf_counter() - begin)
                with _kept_if_it_fails(batch, saver, progress, sinks):
                    _write(sinks, env_steps, progress.wall_s, metrics)
                    if callback is not None and callback(env_steps, metrics, batch.state()):
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


def _require_types(**arguments: Any) -> None:
    """One sentence for what would fail far from here."""
    kinds = {"loop": Loop, "evaluation": Evaluation, "checkpoint": Checkpointing}
    for name, kind in kinds.items():
        value = arguments[name]
        if not isinstance(value, kind) and not (value is None and name != "loop"):
            raise TypeError(f"{name}={value!r} must be a jmarl.{kind.__name__}{'' if name == 'loop' else ' or None'}.")
    sinks = arguments["sinks"]
    if isinstance(sinks, Sink) or not isinstance(sinks, Sequence) or not all(isinstance(x, Sink) for x in sinks):
        raise TypeError("sinks must be a list of sinks, also for one: sinks=[jmarl.logging.terminal()].")
    if arguments["callback"] is not None and not callable(arguments["callback"]):
        raise TypeError(f"callback={arguments['callback']!r} must be a function of (env_steps, metrics, state).")
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        raise ValueError(
            "run compiles whole chunks, which jax.disable_jit() forbids: to look into an iteration, call "
            "loop.step(state, cfg) under it, with the state that run returns."
        )


def _require_counts(**values: Any) -> None:
    for name, value in values.items():
        if _whole(value) is None:
            raise TypeError(f"{name}={value!r} must be a whole number, such as {name}=10.")
    training.require_positive(**values)


def _whole(value: Any) -> int | None:
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def _write(sinks: list[Sink], env_steps: int, wall_s: float, metrics: Mapping[str, np.ndarray]) -> None:
    """A row for every sink; a display that fails is no reason to end a run, and is dropped."""
    for sink in list(sinks):
        try:
            sink.write(env_steps, wall_s, metrics)
        except Exception as error:
            if not sink.is_display:
                raise
            sinks.remove(sink)
            warnings.warn(f"A display has failed and is left out from here on: {error!r}", RuntimeWarning, stacklevel=3)


@contextlib.contextmanager
def _kept_if_it_fails(
    batch: rows.Batch, saver: saving.Saver | None, progress: Progress, sinks: list[Sink]
) -> Iterator[None]:
    """Saves the state before an exception of the user's code goes on, and hands it on with the exception."""
    try:
        yield
    except KeyboardInterrupt:  # the second Ctrl-C: at once
        raise
    except BaseException as error:
        with contextlib.suppress(AttributeError):  # some exceptions take none
            error.run_state = batch.state()  # type: ignore[attr-defined]
        error.add_note(f"The state after {progress.done} iterations is this exception's `run_state`.")
        if saver is not None and jax.process_count() == 1:  # others are elsewhere: they would wait for each other
            saver.save(batch.state(), progress, sinks)
            saver.wait()
        raise


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


def _has_finite_parameters(learner: TrainState) -> np.ndarray:
    """Of each seed. On the host, where nothing has to be compiled."""
    leaves = [np.asarray(x) for x in jax.tree.leaves(learner.params) if jnp.issubdtype(x.dtype, jnp.inexact)]
    each = [np.isfinite(x.astype(np.float32)).reshape(len(x), -1).all(axis=1) for x in leaves]
    return np.logical_and.reduce([np.ones(len(learner.step), bool), *each])


class _Watch:
    """Says, once for each seed, that its numbers are no numbers any more, and where that came from."""

    def __init__(self) -> None:
        self._told: dict[str, set[int]] = {"reward": set(), "view": set(), "curiosity": set(), "learning": set()}

    def metrics(self, env_steps: int, metrics: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The metrics, without the counts of what is not finite where there is nothing to count."""
        for kind in ("reward", "view"):
            name = f"env/nonfinite_{kind}s"
            if name not in metrics:
                continue
            if seeds := self._new(kind, metrics[name] > 0):
                parallel.say(
                    f"The {kind} of {seeds} was not finite after {env_steps:,} steps: the environment returned it."
                )
            if not np.any(metrics[name] > 0):
                metrics = {other: values for other, values in metrics.items() if other != name}
        for name, values in metrics.items():
            if name.endswith("intrinsic/changing_views") and (seeds := self._new("curiosity", values == 0)):
                parallel.say(
                    f"The views of {seeds} never changed in {env_steps:,} steps, so nothing in them can be new: "
                    f"{name.removesuffix('changing_views')}bonus says nothing."
                )
            if "loss/" in name:
                self._learning(env_steps, name, ~np.isfinite(values))
        return metrics

    def parameters(self, env_steps: int, is_finite: np.ndarray) -> None:
        self._learning(env_steps, "A parameter", ~is_finite)

    def _learning(self, env_steps: int, name: str, is_lost: np.ndarray) -> None:
        misled = np.isin(np.arange(len(is_lost)), list(self._told["reward"] | self._told["view"]))
        advice = {True: "they learnt from what the environment returned", False: "try a lower learning rate"}
        for is_misled in (True, False):
            if seeds := self._new("learning", is_lost & (misled == is_misled)):
                parallel.say(
                    f"{name} is not finite after {env_steps:,} steps, for {seeds} of {len(is_lost)}: they may never "
                    f"recover; {advice[is_misled]}."
                )

    def _new(self, kind: str, is_so: np.ndarray) -> str:
        """The seeds of which it was not told yet, in words."""
        new = [seed for seed in np.flatnonzero(is_so).tolist() if seed not in self._told[kind]]
        self._told[kind].update(new)
        return f"seed{'s' if len(new) > 1 else ''} {', '.join(map(str, new))}" if new else ""


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
