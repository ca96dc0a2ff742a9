"""Did a change make anything slower? Two commits in turn, row by row: time, compilation, kernels and memory.

    python benchmarks/speed/commits.py 4db22b3 HEAD --rounds 3 --out commits.json
    python benchmarks/speed/commits.py HEAD~1 HEAD --rows ippo qmix

A row is one iteration of an algorithm on MPE simple_spread: of 16 environments x 64 steps, or with replay x 16 steps
and 8 batches of 64 transitions. Each commit is checked out for itself and measured in a process of its own, first and
second by turns. A ratio is the later commit's over the earlier one's; it has moved where all rounds of one lie beyond
all rounds of the other. Kernels and memory are the compiler's own counts, and need no quiet.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROWS = ("ippo", "mappo", "ippo_recurrent", "coma", "pqn_vdn", "vdn", "qmix", "maddpg", "masac")
MEASURED = ("milliseconds", "trace_and_compile_s", "kernels", "memory_mib")
CONTINUOUS = ("ddpg", "td3", "sac")


def measure(name: str, seconds: float) -> dict[str, float]:
    """One row, of the jmarl that is imported here."""
    import jax

    import jmarl

    base = name.removesuffix("_recurrent")
    algorithm = getattr(jmarl, base)
    options = {"action_type": "Continuous"} if base.endswith(CONTINUOUS) else {}
    env = jmarl.make("MPE_simple_spread_v3", **options)
    cfg = typing.get_type_hints(algorithm)["cfg"](**({"recurrent": True} if name != base else {}))
    if algorithm(env.spec, cfg).learns_from == "rollouts":
        loop = jmarl.on_policy(env, algorithm, num_envs=16, rollout_length=64)
    else:
        buffer = jmarl.buffers.uniform(5_000, 64)
        loop = jmarl.off_policy(
            env, algorithm, buffer=buffer, num_envs=16, rollout_length=16, num_updates=8, warmup_steps=512
        )
    cfg = jmarl.training.with_horizon(loop, cfg, 1_000)
    run = jax.block_until_ready(jax.jit(loop.init)(jax.random.key(0), cfg))
    begin = time.perf_counter()
    step = jax.jit(loop.step, donate_argnums=0).lower(run, cfg).compile()
    compiled = time.perf_counter() - begin
    memory: Any = step.memory_analysis()
    taken: list[float] = []
    for _ in range(5):
        run, _ = step(run, cfg)
    while sum(taken) < seconds:
        begin = time.perf_counter()
        run, _ = jax.block_until_ready(step(run, cfg))
        taken.append(time.perf_counter() - begin)
    return {
        "milliseconds": 1e3 * statistics.median(taken),
        "trace_and_compile_s": compiled,
        "kernels": len(re.findall(r"calls=%|to_apply=%", step.as_text())),
        "memory_mib": (memory.temp_size_in_bytes + memory.argument_size_in_bytes) / 2**20,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a line for each row, and writes all rounds."""
    import in_turn

    options = in_turn.parser(__doc__, ROWS, 5.0)
    options.add_argument("commits", nargs=2, help="earlier and later: any name that git knows")
    options.add_argument("--rows", nargs="+", default=list(ROWS), help="algorithms, with _recurrent for such networks")
    options.add_argument("--also", default="", help="a folder of packages that the earlier commit needs as well")
    chosen = options.parse_args(argv)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        places = [checked_out(commit, Path(folder) / str(i)) for i, commit in enumerate(chosen.commits)]
        try:
            for name in chosen.rows:
                rounds: list[list[dict[str, float]]] = [[], []]
                for i in range(chosen.rounds):
                    for which in ((0, 1), (1, 0))[i % 2]:
                        rounds[which].append(measured_in(places[which], name, chosen.seconds, chosen.also))
                rows.append({"row": name, **compared(*rounds), "rounds": rounds})
                print(name, "  ".join(f"{what} {show(rows[-1][what])}" for what in MEASURED), flush=True)
        finally:
            for place in places:
                subprocess.run(["git", "worktree", "remove", "--force", str(place)], check=True)
    commits = [subprocess.check_output(["git", "rev-parse", c], text=True).strip() for c in chosen.commits]
    in_turn.write([{"commits": commits}, *rows], chosen.out)


def checked_out(commit: str, place: Path) -> Path:
    """A worktree of a commit."""
    subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(place), commit], check=True)
    return place


def measured_in(place: Path, name: str, seconds: float, also: str) -> dict[str, float]:
    """A row, of the jmarl in a folder, in a process of its own."""
    path = os.pathsep.join(filter(None, [str(place), also]))
    words = [sys.executable, "-P", __file__, "--child", name, "--seconds", str(seconds)]
    output = subprocess.check_output(words, env={**os.environ, "PYTHONPATH": path}, cwd=place, text=True)
    return json.loads(output.splitlines()[-1])


def compared(before: list[dict[str, float]], after: list[dict[str, float]]) -> dict[str, dict[str, Any]]:
    """Ratios of medians, and whether the rounds lie apart.

    >>> quick, slow = [{name: x for name in MEASURED} for x in (1.0, 2.0)]
    >>> compared([quick, quick], [slow, slow])["kernels"]
    {'ratio': 2.0, 'moved': True}
    """
    found = {}
    for what in MEASURED:
        old, new = [x[what] for x in before], [x[what] for x in after]
        is_apart = max(old) < min(new) or max(new) < min(old)
        found[what] = {"ratio": round(statistics.median(new) / statistics.median(old), 3), "moved": is_apart}
    return found


def show(result: dict[str, Any]) -> str:
    """A ratio, with a mark where it has moved."""
    return f"{result['ratio']:.3f}{'*' if result['moved'] else ' '}"


if __name__ == "__main__":
    if "--child" in sys.argv:
        print(json.dumps(measure(sys.argv[sys.argv.index("--child") + 1], float(sys.argv[-1]))))
    else:
        main()
