"""Environment steps per second: of an algorithm, of its acting alone, and of the environment with random actions.

    python benchmarks/speed/throughput.py ippo --env MPE_simple_spread_v3 --num-envs 16 1024 --seeds 1 8
    python benchmarks/speed/throughput.py mappo --env HeuristicEnemySMAX --num-envs 128 --recurrent --out smax.json

For each number of environments and seeds, three functions are compiled: `random` (the environment alone, random legal
actions, automatic resets), `rollout` (acting and environment) and `step` (one iteration of the algorithm, the rollout
included; the update is the rest). They are timed in turn, `repeats` times, and medians are reported, with the number of
cores that other processes used meanwhile: above 0.1 the machine was not ours. Steps count those of all seeds together.
Memory is what the compiled `step` needs for arguments, results and intermediate values, as XLA states it.
"""

import dataclasses
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import jmarl
from jmarl import presets
from jmarl.cli.errors import UsageError, usage_errors
from jmarl.cli.experiment import make_loop, with_replay
from jmarl.cli.options import parse, show_key_values
from jmarl.cli.own import find_algorithm, make_env
from jmarl.types import Env, EnvSpec, Learner, TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What is measured."""

    env: str  # an environment of JaxMARL or gymnax
    env_kwargs: tuple[str, ...] = ()  # KEY=VALUE for jmarl.make, added to the preset's: map_name=2s3z
    num_envs: tuple[int, ...] = (16,)  # environments side by side, per seed
    seeds: tuple[int, ...] = (1,)  # repetitions in one vmap
    rollout_length: int = 128  # steps in each environment between two updates
    num_resets: int | None = None  # start states drawn per environment and rollout; None: one for 8 steps, if not fewer
    repeats: int = 5  # measurements of each function
    seconds: float = 2.0  # at least this long for each measurement
    out: Path | None = None  # a new JSON file


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Measures every combination, prints a table and returns the rows."""
    argv = list(sys.argv[1:] if argv is None else argv)
    with usage_errors():
        algorithm, options, config, env_kwargs, _ = parse(
            argv, _options, prog="throughput.py", does="Measures the speed of {algorithm} on {env}.", has_mode=False
        )
        if options.out is not None and options.out.exists():
            raise UsageError(f"{options.out} exists already: give another --out, or remove it.")
        try:
            env = make_env(options.env, env_kwargs)
            find_algorithm(algorithm)(env.spec, config.replace(horizon=1000))
        except (ValueError, TypeError, ImportError) as error:
            raise UsageError(str(error)) from error
    rows = []
    for num_envs in options.num_envs:
        for num_seeds in options.seeds:
            rows.append(measure(algorithm, options, config, env, num_envs, num_seeds))
            print_table(rows[-1], f"{algorithm} on {options.env}, {num_envs} environments, {num_seeds} seeds")
    if options.out is not None:
        facts = {
            "algorithm": algorithm,
            **dataclasses.asdict(options),
            "env_kwargs": env_kwargs,
            "out": None,
            "config": {field.name: getattr(config, field.name) for field in dataclasses.fields(config)},
            "system": jmarl.logging.system_facts(),
            "rows": rows,
        }
        options.out.write_text(json.dumps(facts, indent=2) + "\n")
    return rows


def _options(preset: presets.Preset) -> Options:
    options = Options(
        env=preset.env,
        env_kwargs=show_key_values(preset.env_kwargs),
        num_envs=(preset.num_envs,),
        rollout_length=preset.rollout_length,
        num_resets=preset.num_resets,
    )
    return with_replay(options, preset)


def measure(algorithm: str, options: Options, config: Any, env: Env, num_envs: int, num_seeds: int) -> dict[str, Any]:
    """One row: speeds, compile seconds and memory for one number of environments and seeds."""
    length, resets = options.rollout_length, options.num_resets
    config = config.replace(horizon=1000) if config.horizon is None else config
    loop = make_loop(algorithm, env, options, num_envs=num_envs)
    learner = loop.algorithm(env.spec, config)

    functions = {
        "random": lambda run: jmarl.rollout(env, random_learner(env.spec), run, length=length, num_resets=resets)[0],
        "rollout": lambda run: jmarl.rollout(env, learner, run, length=length, num_resets=resets)[:2],
        "step": lambda run: loop.step(run, config),
    }
    keys = jax.random.split(jax.random.key(0), num_seeds)
    start = jax.jit(jax.vmap(lambda key: loop.init(key, config)))
    row: dict[str, Any] = {"num_envs": num_envs, "num_seeds": num_seeds}
    calls = {}
    for name, function in functions.items():
        run = start(keys)
        begin = time.perf_counter()
        lowered = jax.jit(jax.vmap(function), donate_argnums=0).lower(run)
        traced = time.perf_counter()
        compiled = lowered.compile()
        row[name] = {"trace_s": traced - begin, "compile_s": time.perf_counter() - traced}
        calls[name] = Repeated(compiled, run)
        if name == "step":
            row["memory_mib"] = _memory_mib(compiled)

    counts = {name: max(1, round(options.seconds / call(1))) for name, call in calls.items()}
    walls: dict[str, list[float]] = {name: [] for name in calls}
    machine, begin = cpu_seconds(), time.perf_counter()
    for _ in range(options.repeats):
        for name, call in calls.items():
            walls[name].append(call(counts[name]) / counts[name])
    used, wall = cpu_seconds(), time.perf_counter() - begin

    steps = num_envs * length * num_seeds
    for name, seconds in walls.items():
        speeds = sorted(steps / s for s in seconds)
        row[name] |= {"steps_per_s": statistics.median(speeds), "lowest": speeds[0], "highest": speeds[-1]}
    seconds_per_step = {name: statistics.median(seconds) for name, seconds in walls.items()}
    row["share"] = {
        "environment": seconds_per_step["random"] / seconds_per_step["step"],
        "acting": (seconds_per_step["rollout"] - seconds_per_step["random"]) / seconds_per_step["step"],
        "update": 1 - seconds_per_step["rollout"] / seconds_per_step["step"],
    }
    row["other_processes_cores"] = None if used is None else ((used[0] - used[1]) - (machine[0] - machine[1])) / wall
    row["process_peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # of everything until now
    return row


class Repeated:
    """Calls a compiled function again and again on the run that it returns. Returns the seconds taken."""

    def __init__(self, compiled: Callable[..., Any], run: Any):
        self._compiled, self._run = compiled, run
        self._call()  # the first call is slower: memory is allocated

    def _call(self) -> Any:
        out = self._compiled(self._run)
        self._run = out if isinstance(out, jmarl.types.RunState) else out[0]
        return out

    def __call__(self, times: int) -> float:
        begin = time.perf_counter()
        for _ in range(times):
            out = self._call()
        jax.block_until_ready(out)
        return time.perf_counter() - begin


def random_learner(spec: EnvSpec) -> Learner:
    """Acts at random among the legal actions, or uniformly between the bounds; learns nothing."""

    def act(state, carry, obs, first, key):
        if not spec.is_discrete:
            shape = (*first.shape, spec.num_agents, spec.action_size)
            low, high = jnp.array(spec.action_low), jnp.array(spec.action_high)
            return jax.random.uniform(key, shape, minval=low, maxval=high), carry, ()
        # The k-th legal action: a few additions where `categorical` would draw a number for each action.
        legal = obs.action_mask
        num_legal = legal.sum(-1)
        k = (jax.random.uniform(key, num_legal.shape) * num_legal).astype(jnp.int32)
        return jnp.argmax(jnp.cumsum(legal, -1) > k[..., None], axis=-1).astype(jnp.int32), carry, ()

    def init(key):
        return TrainState(params=(), step=jnp.int32(0), env_steps=jnp.int32(0))

    return Learner(init, lambda batch_shape: (), act, lambda *_: None, lambda *_: None)


def cpu_seconds() -> tuple[float, float] | None:
    """CPU seconds used so far by the whole machine and by this process; None where the system does not say."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    user, nice, system, _idle, _iowait, *interrupts = map(int, stat.read_text().split("\n")[0].split()[1:9])
    own = os.times()
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK"), own.user + own.system


def _memory_mib(compiled: Any) -> float | None:
    memory = compiled.memory_analysis()
    if memory is None:
        return None
    used = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return (used - memory.alias_size_in_bytes) / 2**20


def print_table(row: dict[str, Any], title: str) -> None:
    """Speeds of the parts, where the time goes, and whether the machine was ours."""
    table = Table(title=title, title_justify="left", title_style="")
    for heading in ("", "steps/s", "lowest", "highest", "trace s", "compile s"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name, label in {"random": "environment", "rollout": "rollout", "step": "whole iteration"}.items():
        part = row[name]
        speeds = (f"{part[k]:,.0f}" for k in ("steps_per_s", "lowest", "highest"))
        table.add_row(label, *speeds, f"{part['trace_s']:.1f}", f"{part['compile_s']:.1f}")
    Console().print(table)
    share, others = row["share"], row["other_processes_cores"]
    memory = "unknown" if row["memory_mib"] is None else f"{row['memory_mib']:,.0f} MiB"
    print(
        "time: " + ", ".join(f"{part} {value:.0%}" for part, value in share.items()) + "; "
        f"memory {memory}; other processes used {'?' if others is None else format(others, '.2f')} cores"
    )


if __name__ == "__main__":
    main()
