"""Is a file that was damaged ever taken for a whole one?

    python benchmarks/evidence/damages.py --damages 200 --out benchmarks/results/attacks/damages.json

One small run is saved. Then each kind of file is damaged again and again: a bit flipped, cut, 64 bytes set to zero, or
a line lost. Reading must refuse it in one sentence, or give what was saved; metrics must be what was saved after the
run is resumed, from the other file. What else comes out is counted: "wrong" is another content without a word, "error"
anything but a ValueError or OSError, "crash" the end of the process.
"""

import argparse
import collections
import json
import multiprocessing
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jmarl
from jmarl import checkpoint, export

ENV = jmarl.envs.matrix_game([[1.0, 0.0], [0.0, 3.0]], num_steps=3)
LOOP = jmarl.on_policy(ENV, jmarl.mappo, num_envs=4, rollout_length=4)
CFG = jmarl.PPOConfig(hidden_sizes=(16,), num_epochs=1, num_minibatches=1)


def main(argv: Sequence[str] | None = None) -> dict[str, dict[str, int]]:
    """Prints and returns how often what came out, for each kind of file."""
    parser = argparse.ArgumentParser(description="Damages every kind of file, and reads it.", allow_abbrev=False)
    parser.add_argument("--damages", type=int, default=200, help="of each kind of file")
    parser.add_argument("--seed", type=int, default=0, help="decides where")
    parser.add_argument("--out", type=Path, help="where to write the counts, as JSON")
    options = parser.parse_args(argv)
    counts = {}
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole"
        train(whole)
        learner = LOOP.algorithm(ENV.spec, CFG)
        seeds = jax.random.split(jax.random.key(0), 2)
        learners = checkpoint.restore(
            whole / "checkpoints", jax.eval_shape(jax.vmap(learner.init), seeds), part="run.train_state"
        )
        export.save_parameters(learners.params, whole / "params.safetensors")
        export.export_policy(learner, learners, ENV.spec, whole / "policy.jax", seed=0)
        for kind, (pattern, read) in KINDS.items():
            # In a process of its own, for the case that one ends it.
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                job = pool.apply_async(attack, (whole, pattern, read, options.damages, options.seed))
                try:
                    counts[kind] = job.get(timeout=1800)
                except multiprocessing.TimeoutError:
                    counts[kind] = {"crash": 1}
            print(f"{kind}: {', '.join(f'{num} {outcome}' for outcome, num in counts[kind].items())}", flush=True)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        facts = {"damages": options.damages, "outcomes": counts, "system": jmarl.logging.system_facts()}
        options.out.write_text(json.dumps(facts, indent=2) + "\n")
    return counts


def train(folder: Path, *, resume: bool = False) -> None:
    """A run of four rows; a resumed one is complete, and only looks after its files."""
    files = [jmarl.logging.csv_file(folder / "metrics.csv"), jmarl.logging.json_file(folder / "metrics.json")]
    jmarl.run(
        LOOP,
        jax.random.key(0),
        CFG,
        num_iterations=4,
        iterations_per_chunk=1,
        num_seeds=2,
        sinks=files,
        evaluation=jmarl.Evaluation(num_episodes=2, every=2),
        checkpoint=jmarl.Checkpointing(folder / "checkpoints", every_s=0, keep=1, resume=resume),
    )


# What is read of each kind of file: compared with what a whole one gives.


def parameters(folder: Path) -> Any:
    """Of the file alone."""
    like = jax.eval_shape(jax.vmap(LOOP.algorithm(ENV.spec, CFG).init), jax.random.split(jax.random.key(0), 2)).params
    return export.load_parameters(folder / "params.safetensors", like)


def policy(folder: Path) -> Any:
    """What it does."""
    loaded = export.load_policy(folder / "policy.jax")
    obs = {"agents": jnp.ones((3, 2, 1)), "action_mask": jnp.ones((3, 2, 2), bool)}
    return loaded.greedy(loaded.init_carry((3,)), obs, jnp.ones(3, bool))


def arrays(folder: Path) -> Any:
    """All of the last checkpoint."""
    state = jax.eval_shape(lambda key: LOOP.init(key, CFG), jax.random.key(0))
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), state)
    return jax.tree.map(_plain, checkpoint.restore(folder / "checkpoints", like, part="run"))


def facts(folder: Path) -> Any:
    """Of the last checkpoint."""
    return checkpoint.describe(folder / "checkpoints")


def metrics(folder: Path) -> Any:
    """Both files after the run was resumed."""
    train(folder, resume=True)
    return [(folder / f"metrics.{kind}").read_text() for kind in ("csv", "json")]


KINDS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "parameters": ("params.safetensors", parameters),
    "policy": ("policy.jax", policy),
    "arrays of a checkpoint": ("checkpoints/4/arrays/**/*", arrays),
    "facts of a checkpoint": ("checkpoints/4/facts/metadata", facts),
    "other files of a checkpoint": ("checkpoints/**/*", arrays),
    "lines of metrics.csv": ("metrics.csv", metrics),
    "metrics.json": ("metrics.json", metrics),
}


def attack(whole: Path, pattern: str, read: Callable[[Path], Any], num: int, seed: int) -> dict[str, int]:
    """How often what came out."""
    expected, rng = read(whole), random.Random(seed)
    num = num // 10 if read is metrics else num  # each of these compiles a run
    counts = collections.Counter[str]()
    for _ in range(num):
        copy = Path(shutil.copytree(whole, whole.with_name("copy"), dirs_exist_ok=False))
        path = rng.choice(sorted(path for path in copy.glob(pattern) if path.is_file() and path.stat().st_size))
        before = path.read_bytes()
        path.write_bytes(damaged(before, rng, by_line=path.suffix == ".csv"))
        try:
            outcome = "whole" if _is_equal(read(copy), expected) else "wrong"
        except (ValueError, OSError) as error:
            outcome = "refused" if "\n" not in str(error).strip() else "refused at length"
        except Exception as error:
            outcome = f"error {type(error).__name__}"
        counts[outcome] += 1
        if outcome not in ("whole", "refused"):
            print(f"  {path.relative_to(copy)}: {outcome}", flush=True)
        shutil.rmtree(copy)
    return dict(counts)


def damaged(data: bytes, rng: random.Random, *, by_line: bool) -> bytes:
    """A table loses lines, or its end becomes zeros: a digit that is another one is for nobody to see."""
    place = rng.randrange(len(data))
    if by_line:
        lines = data.splitlines(keepends=True)
        first = rng.randrange(len(lines))
        without = b"".join([*lines[:first], *lines[first + rng.randint(1, 3) :]])
        return rng.choice([without, data[:place] + bytes(len(data) - place)])
    if data[:1] == b"{" and b'"env_steps"' in data[:20]:
        return rng.choice([data[:place], data[:place] + bytes(len(data) - place)])
    flipped = bytearray(data)
    flipped[place] ^= 1 << rng.randrange(8)
    return rng.choice([bytes(flipped), data[:place], data[:place] + bytes(64) + data[place + 64 :]])


def _plain(x: jax.Array) -> Any:
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def _is_equal(one: Any, other: Any) -> bool:
    pairs = zip(*(jax.tree.leaves(tree) for tree in (one, other)), strict=True)
    return all(np.array_equal(x, y) for x, y in pairs)


if __name__ == "__main__":
    main()
