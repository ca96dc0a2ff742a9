"""Optimisers, schedules and soft updates against PyTorch's."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference_data import assert_close, load, matching, tree

from jmarl import optim
from jmarl.learners import replay

Z = load("optim")
VARIANTS = sorted({groups[0] for groups, _ in matching(Z, r"out/((?:adam|rmsprop|sgd).*)/step\d+/.*")})


def settings(variant):
    """Read from the name: "adam_eps1e-8", "adam_l2_1e-2", "adamw_1e-2", "rmsprop_a0.99_eps1e-5", "sgd"; ",clip=0.5"."""
    method, clip = variant.split(",clip=")
    name = method.split("_")[0]
    found = {"name": name, "max_grad_norm": None if clip == "None" else float(clip)}
    for key, pattern in {
        "eps": r"_eps([\d.e-]+)",
        "weight_decay": r"_(?:l2_)?(\d[\d.e-]*)",
        "decay": r"_a([\d.e-]+)",
    }.items():
        if match := re.search(pattern, method):
            found[key] = float(match[1])
    return {"eps": 1e-8} | found  # PyTorch's default


def learning_rate():
    """Not stored: the ratio of sgd's first step to its gradient."""
    ratios = [
        (np.asarray(Z[f"param/{leaf}"]) - after) / Z[f"in/grad0/{leaf}"]
        for (leaf,), after in matching(Z, r"out/sgd,clip=None/step0/(.*)")
    ]
    return float(np.median(np.concatenate([r.ravel() for r in ratios])).round(9))


@pytest.mark.parametrize("variant", VARIANTS)
def test_optimisers(variant, dtype):
    gradients = [tree(Z, f"in/grad{i}") for i in sorted({int(g[0]) for g, _ in matching(Z, r"in/grad(\d+)/.*")})]
    expected = {int(g[0]): tree(Z, f"out/{variant}/step{g[0]}") for g, _ in matching(Z, rf"out/{variant}/step(\d+)/.*")}
    opt = optim.optimizer(learning_rate(), **settings(variant))

    @jax.jit
    def step(params, state, gradient):
        updates, state = opt.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    params = tree(Z, "param")
    state = opt.init(params)
    for i, gradient in enumerate(gradients):
        params, state = step(params, state, gradient)
        if i in expected:
            kind = "parameter" if settings(variant)["max_grad_norm"] is None else "clipped"
            assert_close(params, expected[i], dtype, kind)


def test_linear_schedule(dtype):
    number = r"([\d.e-]+)"
    pattern = rf"out/linear_lr_start{number}_end{number}_iters{number}_lr{number}"
    for groups, expected in matching(Z, pattern):
        start, end, total_steps, base = map(float, groups)
        rate = jax.jit(optim.schedule("linear", start * base, end * base, total_steps))
        assert_close(jnp.stack([rate(count) for count in range(len(expected))]), expected, dtype)


def test_soft_updates_of_target_networks(dtype):
    for (tau,), expected in matching(Z, r"out/soft_update_tau=(.*)"):
        online, target = {"w": jnp.asarray(Z["param/w"])}, {"w": jnp.asarray(Z["in/target_w"])}
        for step, after in ((2, {"w": expected}), (3, target)):  # at every second step
            moved = jax.jit(replay.update_target, static_argnums=3)(target, online, step, 2, float(tau))
            assert_close(moved, after, dtype, "parameter")


def test_clipping_by_global_norm(dtype):
    (limit,) = {settings(variant)["max_grad_norm"] for variant in VARIANTS} - {None}
    opt = optim.optimizer(1.0, name="sgd", max_grad_norm=limit)
    for (i,), norm in matching(Z, r"out/clip/step(\d+)/norm"):
        gradient, params = tree(Z, f"in/grad{i}"), tree(Z, "param")
        assert_close(optax.global_norm(gradient), norm, dtype)
        clipped = jax.jit(lambda g, p: jax.tree.map(jnp.negative, opt.update(g, opt.init(p), p)[0]))(gradient, params)
        expected = tree(Z, f"out/clip/step{i}")
        del expected["norm"]
        assert_close(clipped, expected, dtype, "clipped")
