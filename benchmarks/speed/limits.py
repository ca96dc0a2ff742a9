"""Where the time of a run goes, and what it could be at best: environments, acting, update, and products alone.

    python benchmarks/speed/limits.py ippo_ff qmix_rnn --out results/throughput/limits.json

The settings are those of whole_run.py, one seed. Milliseconds per iteration:

- environments: random legal actions, and nothing recorded that is not needed;
- acting: the rollout, less that: the learner's actions, and what it records;
- update: the rest of the iteration, replay included;
- products: all matrix products of the iteration, each shape by itself, many times in a row.

Environments and products together are about the least that an iteration can take on this machine, however it is
written; about, since a product that is measured alone may be slower than one in its place.
"""

import argparse
import collections
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import jmarl
from in_turn import write
from throughput import Repeated, random_learner
from whole_run import SETTINGS

Product = tuple[int, int, int, int]  # batch, rows, contracted, columns


def products_of(function: Callable, *args: Any) -> collections.Counter[Product]:
    """How often a traced function computes a matrix product of each shape; loops count each turn."""
    counts: collections.Counter[Product] = collections.Counter()

    def walk(jaxpr, times):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "dot_general":
                ((lhs_k, rhs_k), (lhs_b, rhs_b)) = eqn.params["dimension_numbers"]
                lhs, rhs = (var.aval.shape for var in eqn.invars)
                batch, depth = math.prod(lhs[i] for i in lhs_b), math.prod(lhs[i] for i in lhs_k)
                rows = math.prod(n for i, n in enumerate(lhs) if i not in (*lhs_b, *lhs_k))
                columns = math.prod(n for i, n in enumerate(rhs) if i not in (*rhs_b, *rhs_k))
                counts[batch, rows, depth, columns] += times
            inner = times * eqn.params.get("length", 1) if eqn.primitive.name == "scan" else times
            for value in jax.tree.leaves(tuple(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
                if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                    walk(getattr(value, "jaxpr", value), inner)

    walk(jax.make_jaxpr(function)(*args).jaxpr, 1)
    return counts


def milliseconds(function: Callable, run: Any, seconds: float = 1.0) -> float:
    """Of one call of a function of a `RunState`, compiled, which is donated: the median of five times many."""
    call = Repeated(jax.jit(function, donate_argnums=0).lower(run).compile(), jax.tree.map(jnp.copy, run))
    num = max(1, round(seconds / call(1)))
    return 1e3 * statistics.median(call(num) / num for _ in range(5))


def milliseconds_of(product: Product) -> float:
    """Of one product of this shape, among many."""
    batch, rows, depth, columns = product
    num = max(1, min(1000, int(1e9 / (batch * rows * depth * columns))))
    lhs, rhs = jnp.ones((num, batch, rows, depth)), jnp.ones((batch, depth, columns))
    compiled = jax.jit(lambda lhs, rhs: jax.lax.map(lambda x: jnp.max(x @ rhs), lhs)).lower(lhs, rhs).compile()
    times = []
    for _ in range(6):
        begin = time.perf_counter()
        jax.block_until_ready(compiled(lhs, rhs))
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times[1:]) / num


def measure(name: str) -> dict[str, Any]:
    """One row of the table."""
    loop, config, num_iterations = SETTINGS[name]()
    config = jmarl.training.with_horizon(loop, config, num_iterations)
    learner = loop.algorithm(loop.env.spec, config)
    run = jax.jit(loop.init)(jax.random.key(0), config)
    length = loop.env_steps_per_iteration // len(run.first)
    idle = random_learner(loop.env.spec)
    random = milliseconds(lambda run: jmarl.rollout(loop.env, idle, run, length=length)[0], run)
    rollout = milliseconds(lambda run: jmarl.rollout(loop.env, learner, run, length=length)[:2], run)
    step = milliseconds(lambda run: loop.step(run, config)[0], run)
    counts = products_of(lambda run: loop.step(run, config), run)
    products = sum(times * milliseconds_of(product) for product, times in counts.items())
    flops = sum(2 * math.prod(product) * times for product, times in counts.items())
    return {
        "name": name,
        "environments_ms": random,
        "acting_ms": rollout - random,
        "update_ms": step - rollout,
        "products_ms": products,
        "products_gflop": flops / 1e9,
        "products_gflop_per_s": flops / products / 1e6,
        "iteration_gflop_per_s": flops / step / 1e6,
        "steps_per_s": 1e3 * loop.env_steps_per_iteration / step,
        "steps_per_s_at_best": 1e3 * loop.env_steps_per_iteration / (random + products),
    }


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=SETTINGS, metavar="NAME", help="settings of whole_run.py")
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    args = parser.parse_args()
    rows = [measure(name) for name in args.names]
    table = Table()
    for key in rows[0]:
        table.add_column(key.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(value if isinstance(value, str) else f"{value:,.2f}" for value in row.values()))
    Console().print(table)
    write(rows, args.out)


if __name__ == "__main__":
    main()
