"""Replay beside flashbax: microseconds of one addition and one sample, in turn, with donated state.

    python benchmarks/speed/replay_beside_flashbax.py [--out replay.json]

Items are transitions of MPE_simple_spread_v3: what 32 environments x 26 steps of VDN leave behind is added, 128 are
drawn, at two capacities. flashbax's item buffer keeps each successor whole; ours keeps it beside its step. flashbax
comes with the dev extra.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import flashbax
import jax
import jax.numpy as jnp

import jmarl
from jmarl.types import Buffer, Trajectory

BATCH_SIZE = 128


def flashbax_buffer(capacity: int, batch_size: int) -> Buffer:
    """flashbax's item buffer behind the same three functions."""
    theirs = flashbax.make_item_buffer(
        max_length=capacity, min_length=1, sample_batch_size=batch_size, add_sequences=True, add_batches=False
    )

    def items(rollout: Trajectory) -> Any:
        steps: Any = rollout.steps
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), steps.replace(carry=()))

    def init(rollout: Trajectory) -> Any:
        return theirs.init(jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), jax.eval_shape(items, rollout)))

    def sample(state: Any, key: jax.Array) -> Trajectory:
        return Trajectory(steps=jax.tree.map(lambda x: x[None], theirs.sample(state, key).experience))

    return Buffer(init, lambda state, rollout: theirs.add(state, items(rollout)), sample)


def measure(buffer: Buffer, rollout: Trajectory) -> tuple[Callable[[], dict[str, float]], float]:
    """A function that times both operations once more, and the MiB of the state."""
    state = jax.jit(buffer.init)(rollout)
    mebibytes = jmarl.buffers.memory(state) / 2**20
    add, sample = jax.jit(buffer.add, donate_argnums=0), jax.jit(buffer.sample)

    def once(repeats: int = 200) -> dict[str, float]:
        nonlocal state
        microseconds = {}
        begin = time.perf_counter()
        for _ in range(repeats):
            state = add(state, rollout)
        jax.block_until_ready(state)
        microseconds["add_us"] = (time.perf_counter() - begin) / repeats * 1e6
        begin = time.perf_counter()
        for i in range(repeats):
            batch = sample(state, KEYS[i])
        jax.block_until_ready(batch)
        microseconds["sample_us"] = (time.perf_counter() - begin) / repeats * 1e6
        return microseconds

    once(2)
    return once, mebibytes


KEYS = jax.random.split(jax.random.key(0), 200)


def main() -> None:
    """Prints one line for each buffer and capacity."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a new JSON file")
    out = parser.parse_args().out
    env = jmarl.make("MPE_simple_spread_v3")
    learner = jmarl.vdn(env.spec, jmarl.VDNConfig())
    run = jmarl.training.start(env, learner, jax.random.key(0), num_envs=32)
    rollout = jax.jit(lambda run: jmarl.rollout(env, learner, run, length=26)[1])(run)
    rows = []
    for capacity in (10_000, 100_000):
        kinds = {
            "jmarl uniform": jmarl.buffers.uniform,
            "jmarl prioritized": jmarl.buffers.prioritized,
            "flashbax item": flashbax_buffer,
        }
        measured = {name: measure(make(capacity, BATCH_SIZE), rollout) for name, make in kinds.items()}
        times: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
        for _ in range(5):
            for name, (once, _) in measured.items():
                times[name].append(once())
        for name, (_, mebibytes) in measured.items():
            median = {k: statistics.median(t[k] for t in times[name]) for k in ("add_us", "sample_us")}
            rows.append({"buffer": name, "capacity": capacity, "mib": round(mebibytes, 1), **median})
            shown = "  ".join(f"{k} {v:7.1f}" for k, v in median.items())
            print(f"{name:18} {capacity:7,} items {mebibytes:6.1f} MiB  {shown}")
    if out is not None:
        facts = {"system": jmarl.logging.system_facts(), "flashbax": version("flashbax"), "rows": rows}
        with out.open("x") as file:  # never overwritten
            json.dump(facts, file, indent=2)


if __name__ == "__main__":
    main()
