"""Did a change make anything slower? Two commits in turn, row by row: time, compilation, kernels and memory.

    python benchmarks/speed/commits.py 4db22b3 HEAD --rounds 3 --out commits.json
    python benchmarks/speed/commits.py HEAD~1 HEAD --rows ippo qmix --agents 24

A row is one iteration of an algorithm on MPE simple_spread: of 16 environments x 64 steps, or with replay x 16 steps
and 8 batches of 64 transitions. Each commit is checked out for itself and lives in a process of its own; the two take
turns, a fraction of a second each, so that a machine that slows down slows both. A ratio is the later commit's over
the earlier one's: the median of the ratios of neighbours in time, with an interval of 95 % that order statistics give,
or the largest and smallest where there are fewer than six. Of compilation, which uses several threads, the processor's
time counts. Kernels and memory are the compiler's own counts, and need no quiet.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import typing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROWS = ("ippo", "mappo", "ippo_recurrent", "coma", "pqn_vdn", "vdn", "qmix", "maddpg", "masac")
MEASURED = ("milliseconds", "compile_cpu_s", "compile_s", "kernels", "memory_mib")
CONTINUOUS = ("ddpg", "td3", "sac")


def serve(name: str, num_agents: int) -> None:
    """One row, of the jmarl that is imported here: answers "compile" and "run SECONDS", line by line."""
    import jax

    import jmarl

    base = name.removesuffix("_recurrent")
    algorithm = getattr(jmarl, base)
    options: dict[str, Any] = {"num_agents": num_agents, "num_landmarks": num_agents}
    if base.endswith(CONTINUOUS):
        options["action_type"] = "Continuous"
    env = jmarl.make("MPE_simple_spread_v3", **options)
    config = typing.get_type_hints(algorithm)["cfg"]
    config = (typing.get_args(config) or (config,))[0]  # its own, where it takes others as well
    cfg = config(**({"recurrent": True} if name != base else {}))
    if algorithm(env.spec, cfg).learns_from == "rollouts":
        loop = jmarl.on_policy(env, algorithm, num_envs=16, rollout_length=64)
    else:
        buffer = jmarl.buffers.uniform(5_000, 64)
        loop = jmarl.off_policy(
            env, algorithm, buffer=buffer, num_envs=16, rollout_length=16, num_updates=8, warmup_steps=512
        )
    cfg = jmarl.training.with_horizon(loop, cfg, 1_000)
    run = jax.block_until_ready(jax.jit(loop.init)(jax.random.key(0), cfg))
    step: Any = None
    for line in sys.stdin:
        if line.startswith("compile"):
            jax.clear_caches()
            begin, begin_cpu = time.perf_counter(), time.process_time()
            step = jax.jit(loop.step, donate_argnums=0).lower(run, cfg).compile()
            taken, cpu = time.perf_counter() - begin, time.process_time() - begin_cpu
            memory: Any = step.memory_analysis()
            answer = {
                "compile_s": taken,
                "compile_cpu_s": cpu,
                "kernels": len(re.findall(r"calls=%|to_apply=%", step.as_text())),
                "memory_mib": (memory.temp_size_in_bytes + memory.argument_size_in_bytes) / 2**20,
            }
            for _ in range(5):
                run, _ = jax.block_until_ready(step(run, cfg))
        else:
            each: list[float] = []
            while sum(each) < float(line.split()[1]):
                begin = time.perf_counter()
                run, _ = jax.block_until_ready(step(run, cfg))
                each.append(time.perf_counter() - begin)
            answer = {"milliseconds": 1e3 * statistics.median(each)}
        print(json.dumps(answer), flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a line for each row, and writes all that was measured."""
    import in_turn

    options = in_turn.parser(__doc__, ROWS, 0.3)
    options.add_argument("commits", nargs=2, help="earlier and later: any name that git knows")
    options.add_argument("--rows", nargs="+", default=list(ROWS), help="algorithms, with _recurrent for such networks")
    options.add_argument("--agents", type=int, default=3, help="and landmarks")
    options.add_argument("--turns", type=int, default=20, help="measurements of time in each round")
    options.add_argument("--also", default="", help="a folder of packages that the earlier commit needs as well")
    chosen = options.parse_args(argv)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        places = [checked_out(commit, Path(folder) / str(i)) for i, commit in enumerate(chosen.commits)]
        try:
            for name in chosen.rows:
                how = name, chosen.agents, chosen.also
                with served(places[0], *how) as before, served(places[1], *how) as after:
                    pairs = in_pairs(before, after, chosen.rounds, chosen.turns, chosen.seconds)
                rows.append({"row": name, **{what: compared(pairs[what]) for what in MEASURED}, "pairs": pairs})
                print(name, "  ".join(f"{what} {show(rows[-1][what])}" for what in MEASURED), flush=True)
        finally:
            for place in places:
                subprocess.run(["git", "worktree", "remove", "--force", str(place)], check=True)
    commits = [subprocess.check_output(["git", "rev-parse", c], text=True).strip() for c in chosen.commits]
    in_turn.write([{"commits": commits, "agents": chosen.agents}, *rows], chosen.out)


def checked_out(commit: str, place: Path) -> Path:
    """A worktree of a commit."""
    subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(place), commit], check=True)
    return place


@contextmanager
def served(place: Path, name: str, num_agents: int, also: str) -> Iterator[subprocess.Popen[str]]:
    """A process that answers for one row of the jmarl in a folder."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(place), also]))}
    env["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    words = [sys.executable, "-P", __file__, "--child", name, "--agents", str(num_agents)]
    with subprocess.Popen(words, env=env, cwd=place, text=True, stdin=-1, stdout=-1) as process:
        try:
            yield process
        finally:
            process.kill()


def ask(process: subprocess.Popen[str], question: str) -> dict[str, float]:
    """The answer to one line."""
    assert process.stdin and process.stdout
    print(question, file=process.stdin, flush=True)
    if not (line := process.stdout.readline()):
        raise SystemExit(f"a row ended while it was asked to {question}: its own message is above")
    return json.loads(line)


def in_pairs(
    before: subprocess.Popen[str], after: subprocess.Popen[str], rounds: int, turns: int, seconds: float
) -> dict[str, list[tuple[float, float]]]:
    """What two processes say, asked in turn, the first and the second first by turns."""
    pairs: dict[str, list[tuple[float, float]]] = {what: [] for what in MEASURED}
    for question, times in [("compile", 1), (f"run {seconds}", turns)] * rounds:
        for i in range(times):
            asked = (before, after) if (i + len(pairs["compile_s"])) % 2 else (after, before)
            answers = {process: ask(process, question) for process in asked}
            for what in answers[before]:
                pairs[what].append((answers[before][what], answers[after][what]))
    return pairs


def compared(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """The median of the ratios, and an interval.

    >>> compared([(2.0, 1.0), (2.0, 1.0), (1.0, 1.0)])
    {'ratio': 0.5, 'low': 0.5, 'high': 1.0}
    """
    from scipy.stats import binom

    ratios = sorted(new / old for old, new in pairs)
    out = max(0, int(binom.ppf(0.025, len(ratios), 0.5)) - 1) if len(ratios) >= 6 else 0
    ends = ratios[out], ratios[-1 - out]
    return {"ratio": round(statistics.median(ratios), 3), "low": round(ends[0], 3), "high": round(ends[1], 3)}


def show(result: dict[str, float]) -> str:
    """A ratio and its interval, with a mark where 1 is outside.

    >>> show({"ratio": 0.5, "low": 0.5, "high": 1.0}), show({"ratio": 1.0, "low": 1.0, "high": 1.0})
    ('0.500 (0.500 to 1.000)', '1.000')
    """
    if result["low"] == result["high"]:
        return f"{result['ratio']:.3f}"
    mark = "" if result["low"] <= 1 <= result["high"] else "*"
    return f"{result['ratio']:.3f}{mark} ({result['low']:.3f} to {result['high']:.3f})"


if __name__ == "__main__":
    if "--child" in sys.argv:
        serve(sys.argv[sys.argv.index("--child") + 1], int(sys.argv[-1]))
    else:
        main()
