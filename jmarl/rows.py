"""What `jmarl.run` compiles, over rows: one for each seed of each setting, side by side or one after the other.

Rows that do not fit a device together are cut into pieces that take turns.
"""

import concurrent.futures
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array

from jmarl import configs, evaluation, parallel, saving
from jmarl import metrics as metrics_module
from jmarl.types import Env, Loop, Metrics, RunState, static

__all__ = ["Batch", "Functions", "compiler_options"]


class Functions:
    """Compiled over rows: `init(keys, swept) -> state`, `chunk(state, num, swept) -> (state, means)` and
    `evaluate(learners, keys, swept) -> metrics`, where `swept` holds the hyperparameters that differ from row to row.

    Args:
      loop, cfg, seed_axis: as for `jmarl.run`.
      placement: where rows lie.
      eval_env: where to evaluate.
      num_episodes: of each row's evaluation.
      keys: of all rows, those of `init`.
      swept: of all rows.

    Attributes:
      example: shapes of the state of all rows.
    """

    def __init__(
        self,
        loop: Loop,
        cfg: Any,
        seed_axis: str | None,
        placement: parallel.Placement,
        eval_env: Env,
        num_episodes: int,
        keys: Array,
        swept: Mapping[str, Array],
    ):
        def config(swept):
            return configs.replace(cfg, dict(swept))

        def init(key, swept):
            return loop.init(key, config(swept))

        def play(state, key, swept):
            learner = loop.algorithm(loop.env.spec, config(swept))
            return evaluation.evaluate(eval_env, learner, state, key, num_episodes=num_episodes)

        def chunk(state, num, swept):
            return _make_chunk(loop, config(swept))(state, num)

        row = jax.eval_shape(init, keys[0], _row(swept, 0))
        num_envs = len(row.first)
        placement.require_shareable(num_envs)
        self.example = jax.tree.map(lambda x: jax.ShapeDtypeStruct((len(keys), *x.shape), x.dtype), row)
        axis = seed_axis or _seed_axis(placement, len(keys), num_envs * loop.env.spec.num_agents)
        if axis == "map":
            init, chunk, play = _one_by_one(init), _in_place(chunk), _one_by_one(play)
        else:
            init, chunk, play = jax.vmap(init), jax.vmap(chunk, in_axes=(0, None, 0)), jax.vmap(play)
        state, rows, everywhere = placement.state, placement.rows, placement.everywhere
        self.init = placement.jit(init, (rows, rows), state)
        # `num` is traced, so a last, shorter chunk needs no second compilation.
        self.chunk = placement.jit(chunk, (state, everywhere, rows), (state, rows), donate_argnums=0)
        self.evaluate = placement.jit(play, (rows, rows, rows), rows, compiler_options=compiler_options(1))


def _seed_axis(placement: parallel.Placement, num_rows: int, num_agents: int) -> str:
    """The faster way for so many agents in all environments of a seed, as benchmarks/speed/seeds_on_a_cpu.py shows."""
    if jax.default_backend() != "cpu":
        return "vmap"
    rows_at_once = len(placement.devices) if placement.shard == "seeds" else 1
    is_alone = num_rows == rows_at_once * placement.num_processes_of_rows  # an axis of length 1 costs, too
    return "map" if is_alone or num_agents >= 16 else "vmap"


def _row(tree: Any, i: Any) -> Any:
    return jax.tree.map(lambda x: x[i], tree)


def _rows_of(row: Any) -> Any:
    """One row as all there are."""
    return jax.tree.map(lambda x: x[None], row)


def _one_by_one(function: Callable) -> Callable:
    """`jax.vmap(function)`, row after row."""

    def rows(*args):
        if len(jax.tree.leaves(args)[0]) == 1:
            return _rows_of(function(*_row(args, 0)))
        return jax.lax.map(lambda row: function(*row), args)

    return rows


def _in_place(chunk: Callable) -> Callable:
    """`jax.vmap(chunk, in_axes=(0, None, 0))`, row after row: each state is written where the one before it was."""

    def rows(state, num, swept):
        if len(state.first) == 1:  # neither cut out nor put back, which is much to compile
            return _rows_of(chunk(_row(state, 0), num, _row(swept, 0)))

        def step(state, i):
            row, metrics = chunk(_row(state, i), num, _row(swept, i))
            return jax.tree.map(lambda x, y: x.at[i].set(y), state, row), metrics

        return jax.lax.scan(step, state, jnp.arange(len(state.first)))

    return rows


class Batch:
    """This process's rows on their way: in one piece that stays on the devices, or in several that take turns there.

    Attributes:
      example: shapes of their state.
      pieces: states.
    """

    def __init__(self, functions: Functions, placement: parallel.Placement, swept: Any, memory_limit: int | None):
        self._functions, self._placement, self._swept = functions, placement, swept
        self.example = _resized(functions.example, len(functions.example.first) // placement.num_processes_of_rows)
        self._lowered = functions.chunk.lower(self.example, 1, swept)
        self._limit = memory_limit or 0.9 * parallel.memory_of(placement.devices)
        self.pieces: list[RunState] = []

    def start(self, keys: Array, state: RunState | None, initial: Any = None) -> None:
        """Compiles, and begins with `state`, or anew, with what `initial` has learnt."""
        # Compiling is most of the time to a first result on a CPU. Initialisation runs once, so it is not optimised at
        # all, and beside the rest, which is about as fast with level 1 as with 3.
        with concurrent.futures.ThreadPoolExecutor() as threads:
            if state is None:
                whole = threads.submit(self._functions.init.lower(keys, self._swept).compile, compiler_options(0))
            self._chunk, num = self._compile_what_fits()
        put = self._placement.put
        self._tables = [put(table, self._placement.rows) for table in self._cut(self._swept, num)]
        if state is not None:
            pieces = self._cut(state, num)
            self.pieces = [put(pieces[0], self._placement.state)] if num == 1 else parallel.to_host(pieces)
            return
        init = whole.result() if num == 1 else None
        for piece, table in zip(self._cut(keys, num), self._tables, strict=True):
            piece = put(piece, self._placement.rows)
            init = init or self._functions.init.lower(piece, table).compile(compiler_options(0))
            self.pieces.append(self._let_wait(init(piece, table)))
        if initial is not None:
            begun = self._cut(saving.warm_start(self.state(), initial), num)
            self.pieces = [put(begun[0], self._placement.state)] if num == 1 else parallel.to_host(begun)

    def advance(self, num: int, keys: Array | None) -> dict[str, np.ndarray]:
        """`num` iterations of every row, and an evaluation if there are keys for it."""
        measured = []
        for i, (piece, table) in enumerate(zip(self.pieces, self._tables, strict=True)):
            piece = self._placement.put(piece, self._placement.state) if len(self._tables) > 1 else piece
            piece, means = self._chunk(piece, num, table)
            metrics = means.on_host()
            if keys is not None:
                key = self._placement.put(self._cut(keys, len(self._tables))[i], self._placement.rows)
                played = self._functions.evaluate(piece.train_state, key, table)
                metrics |= {name: np.where(metrics_module.is_missing(x), np.nan, x) for name, x in played.items()}
            measured.append(metrics)
            self.pieces[i] = self._let_wait(piece)
        return jax.tree.map(lambda *x: np.concatenate(x), *measured)

    def state(self) -> RunState:
        """All rows of this process."""
        return self.join(self.pieces)

    def join(self, pieces: Sequence[Any]) -> Any:
        """One tree out of those of the pieces."""
        return pieces[0] if len(pieces) == 1 else jax.tree.map(lambda *x: jnp.concatenate(x), *pieces)

    def _cut(self, tree: Any, num: int) -> list[Any]:
        """`num` trees of equally many rows."""
        size = len(self.example.first) // num
        parts = [slice(i * size, (i + 1) * size) for i in range(num)]
        return [tree] if num == 1 else [jax.tree.map(lambda x, part=part: x[part], tree) for part in parts]

    def _let_wait(self, piece: RunState) -> RunState:
        return parallel.to_host(piece) if len(self._tables) > 1 else piece

    def _compile_what_fits(self) -> tuple[Any, int]:
        """The chunk of the smallest number of pieces of which each fits, and that number."""
        placement, num_rows = self._placement, len(self.example.first)
        num_devices = len(placement.devices)
        largest_cut = num_rows // (num_devices if placement.shard == "seeds" else 1)
        needed_whole = 0.0
        for num in (num for num in range(1, largest_cut + 1) if largest_cut % num == 0):
            if needed_whole / num > self._limit:
                continue  # memory falls no faster than rows: this is not worth compiling
            lowered = self._lowered
            if num > 1:
                one = _resized(self.example, num_rows // num), 1, self._cut(self._swept, num)[0]
                lowered = self._functions.chunk.lower(*one)
            compiled = lowered.compile(compiler_options(1))
            needed = parallel.memory_needed(compiled)
            needed_whole = max(needed_whole, needed * num)
            # The host of a CPU is the device: those that wait are in the way.
            waiting = (num - 1) * _bytes(self.example) / num / num_devices if jax.default_backend() == "cpu" else 0
            if needed + waiting <= self._limit:
                if num > 1:
                    parallel.say(
                        f"{num_rows} seeds need {needed_whole / 2**20:,.1f} MiB of a device, which has "
                        f"{self._limit / 2**20:,.1f} for them: they take turns, {num_rows // num} at a time."
                    )
                return compiled, num
        raise ValueError(
            f"A single seed needs {needed_whole / largest_cut / 2**20:,.1f} MiB of a device or more, which has "
            f"{self._limit / 2**20:,.1f} for this run: lower num_envs, rollout_length or the buffer's capacity."
        )


def _resized(example: RunState, num_rows: int) -> RunState:
    """The shapes for another number of rows."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((num_rows, *x.shape[1:]), x.dtype), example)


def _bytes(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


@struct.dataclass(kw_only=True)
class Means:
    """Metrics in one array `[.., K]`: to add up and return each by itself would be a tenth of all there is to compile.

    They are sums and counts until they are read: a mean over nothing is NaN, which jax may be told to look for.

    Attributes:
      total: over the iterations in which a metric was measured, as a return is not where no episode ended. A loss is
        always measured: one that is NaN makes its mean NaN.
      count: how many these were.
      names: of the metrics.
    """

    total: Array
    count: Array
    names: tuple[str, ...] = static(())

    @staticmethod
    def of(metrics: Metrics) -> "Means":
        """Of one iteration, from numbers by name."""
        for name, x in metrics.items():
            if x.shape:
                raise ValueError(f"The metric {name!r} has shape {x.shape}, but a metric is one number: reduce it.")
        names = tuple(sorted(metrics))
        dtype = jnp.float64 if any(x.dtype == jnp.float64 for x in metrics.values()) else jnp.float32
        values = jnp.stack([metrics[name].astype(dtype) for name in names])
        is_measured = metrics_module.is_measured(names, values)
        return Means(total=jnp.where(is_measured, values, 0), count=is_measured.astype(jnp.int32), names=names)

    def on_host(self) -> dict[str, np.ndarray]:
        """Each metric by name, NaN where nothing was measured."""
        total, count = np.asarray(self.total), np.asarray(self.count)
        means = np.where(count > 0, total / np.maximum(count, 1).astype(total.dtype), np.nan).astype(total.dtype)
        return {name: means[..., i] for i, name in enumerate(self.names)}


def _make_chunk(loop: Loop, cfg: Any):
    """`chunk(state, num)`: `num` iterations, and the means of their metrics."""

    @jax.jit  # so that it is traced once only
    def iteration(state):
        state, metrics = loop.step(state, cfg)
        return state, Means.of(metrics)

    def chunk(state, num):
        def step(_, carry):
            state, means = carry
            state, new = iteration(state)
            return state, jax.tree.map(jnp.add, means, new)

        means = jax.eval_shape(iteration, state)[1]
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), means)
        return jax.lax.fori_loop(0, num, step, (state, zeros))

    return chunk


def compiler_options(level: int) -> dict[str, Any]:
    """Compiler options for a CPU, where XLA_FLAGS do not say it already."""
    is_said = "xla_backend_optimization_level" in os.environ.get("XLA_FLAGS", "")
    return {} if is_said or jax.default_backend() != "cpu" else {"xla_backend_optimization_level": level}
