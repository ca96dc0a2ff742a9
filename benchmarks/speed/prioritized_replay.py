"""Does prioritised replay stay as fast as uniform replay, however much it holds?

    python benchmarks/speed/prioritized_replay.py --out benchmarks/results/throughput/prioritized_replay.json

Double DQN on CartPole-v1, 16 environments x 32 steps and 8 batches of 64 transitions in an iteration; environment steps
per second with each kind of replay, in turn, at several capacities. Beside it microseconds of one addition, one draw
and one change of priorities, of ours and of flashbax's prioritised buffer, of the same transitions.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import flashbax
import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import in_turn
import jmarl

CAPACITIES = (1_000, 100_000, 1_000_000, 4_000_000)
BATCH_SIZE, NUM_ENVS, LENGTH, NUM_UPDATES = 64, 16, 32, 8
ENV = jmarl.make("CartPole-v1")
CFG = jmarl.QConfig(hidden_sizes=(64, 64))
KINDS = {"uniform": jmarl.buffers.uniform, "prioritized": jmarl.buffers.prioritized}


def training(kind: str, capacity: int) -> Callable[[float], float]:
    """A function that trains for so many seconds more, and says how many steps a second that were."""
    buffer = KINDS[kind](capacity, BATCH_SIZE)
    loop = jmarl.off_policy(
        ENV, jmarl.iql, buffer=buffer, num_envs=NUM_ENVS, rollout_length=LENGTH, num_updates=NUM_UPDATES
    )
    cfg = jmarl.training.with_horizon(loop, CFG, 10_000)
    step = jax.jit(lambda run: loop.step(run, cfg)[0], donate_argnums=0)
    run = jax.block_until_ready(step(jax.jit(loop.init)(jax.random.key(0), cfg)))

    def go_on(seconds: float) -> float:
        nonlocal run
        begin, count = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds:
            run, count = jax.block_until_ready(step(run)), count + 1
        return count * loop.env_steps_per_iteration / (time.perf_counter() - begin)

    return go_on


def operations(capacity: int) -> dict[str, dict[str, Callable[[], Any]]]:
    """An addition, a draw and a change of priorities of both buffers: functions to be called again and again."""
    learner = jmarl.iql(ENV.spec, CFG)
    run = jmarl.training.start(ENV, learner, jax.random.key(0), num_envs=NUM_ENVS)
    rollout = jax.jit(lambda run: jmarl.rollout(ENV, learner, run, length=LENGTH)[1])(run)
    items = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rollout.steps.replace(carry=()))
    ours = jmarl.buffers.prioritized(capacity, BATCH_SIZE)
    key, new = jax.random.key(1), jnp.linspace(0.1, 1.0, BATCH_SIZE)

    def of(buffer_state, add, sample, set_priority):
        state = [buffer_state]
        add, set_priority = jax.jit(add, donate_argnums=0), jax.jit(set_priority, donate_argnums=0)
        sample = jax.jit(sample)
        state[0] = add(state[0])
        index = sample(state[0])[1]

        def change(name):
            state[0] = add(state[0]) if name == "add" else set_priority(state[0], index)
            return state[0]

        return {
            "add": lambda: change("add"),
            "draw": lambda: sample(state[0]),
            "new priorities": lambda: change("priority"),
        }

    def draw(state):
        batch = ours.sample(state, key)
        return batch, batch.index

    mine = of(
        jax.jit(ours.init)(rollout),
        lambda state: ours.add(state, rollout),
        draw,
        lambda state, index: ours.set_priority(state, index, new),
    )
    theirs = flashbax.make_prioritised_item_buffer(capacity, 1, BATCH_SIZE, add_sequences=True)

    def their_draw(state):
        sample = theirs.sample(state, key)
        return sample.experience, sample.indices

    other = of(
        theirs.init(jax.tree.map(lambda x: x[0], items)),
        lambda state: theirs.add(state, items),
        their_draw,
        lambda state, index: theirs.set_priorities(state, index, new),
    )
    return {"jmarl": mine, "flashbax": other}


def microseconds(call: Callable[[], Any], repeats: int = 100) -> float:
    """Of one call, on the mean."""
    begin = time.perf_counter()
    for _ in range(repeats):
        out = call()
    jax.block_until_ready(out)
    return (time.perf_counter() - begin) / repeats * 1e6


def main() -> None:
    """Prints and writes medians over rounds."""
    options = in_turn.parser(__doc__, (), 3.0).parse_args()
    rows = []
    for capacity in CAPACITIES:
        runs = {kind: training(kind, capacity) for kind in KINDS}
        speeds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(options.rounds):
            for kind, go_on in runs.items():
                speeds[kind].append(go_on(options.seconds))
        ratio = statistics.median(p / u for p, u in zip(speeds["prioritized"], speeds["uniform"], strict=True))
        del runs
        calls = operations(capacity)
        taken: dict[str, list[float]] = {f"{who}, {what}": [] for who, whats in calls.items() for what in whats}
        for _ in range(options.rounds):
            for who, whats in calls.items():
                for what, call in whats.items():
                    taken[f"{who}, {what}"].append(microseconds(call))
        row = {kind: round(statistics.median(x)) for kind, x in speeds.items()} | {"ratio": round(ratio, 3)}
        rows.append({"capacity": capacity, **row, **{k: round(statistics.median(x), 1) for k, x in taken.items()}})
        print(rows[-1], flush=True)
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{x:,}" for x in row.values()))
    Console().print(table)
    in_turn.write(rows, options.out)


if __name__ == "__main__":
    main()
