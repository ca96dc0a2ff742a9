"""Memory by attention: against numpy, step by step against whole sequences, and what it must not see."""

import compiled
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jmarl
from jmarl.networks.initializers import draw_at_once
from jmarl.networks.window import NUM_HEADS, WindowAttention

L, R, F, E, W = 9, 3, 2, 8, 3


@pytest.fixture(scope="module")
def cell():
    """A cell whose every parameter is drawn, biases too: (params, apply)."""
    module = WindowAttention(E, W)
    zero = module.init_carry((R,), E, W)
    params = module.init(jax.random.key(0), zero, jnp.zeros((L, R, F)), jnp.zeros((L, R), bool))["params"]
    leaves, tree = jax.tree.flatten(draw_at_once(params, jax.random.key(3)))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    params = jax.tree.unflatten(tree, [jax.random.normal(k, x.shape) / 2 for k, x in zip(keys, leaves, strict=True)])
    return params, jax.jit(lambda params, *args: module.apply({"params": params}, *args)), zero


def inputs(starts):
    x = jax.random.normal(jax.random.key(2), (L, R, F))
    return x, jnp.array(starts).reshape(L, R)


def by_hand(p, x, first):
    """One row, step by step in numpy: each looks at itself and at most W steps before it in its episode."""
    sigmoid = lambda v: 1 / (1 + np.exp(-v))  # noqa: E731

    def norm(v, q):
        return (v - v.mean(-1, keepdims=True)) / np.sqrt(v.var(-1, keepdims=True) + 1e-6) * q["scale"] + q["bias"]

    dense = lambda v, q: v @ q["kernel"] + q.get("bias", 0.0)  # noqa: E731

    def gate(x, y, q):
        u = q["of_old"]["kernel"]
        w = q["of_new"]["kernel"]
        r = sigmoid(y @ w[:, :E] + x @ u[:, :E])
        z = sigmoid(y @ w[:, E : 2 * E] + x @ u[:, E:] - q["bias"])
        h = np.tanh(y @ w[:, 2 * E :] + (r * x) @ q["of_reset"]["kernel"])
        return (1 - z) * x + z * h

    e, d, begin, out = dense(x, p["input"]), E // NUM_HEADS, 0, []
    for t in range(len(x)):
        begin = t if first[t] else begin
        seen = range(max(begin, t - W), t + 1)
        normed = norm(e, p["norm"])
        q, found = dense(normed[t], p["attention"]["query"]), []
        for h in range(NUM_HEADS):
            part = slice(h * d, (h + 1) * d)
            key = [dense(normed[s], p["attention"]["key"])[part] for s in seen]
            value = np.array([dense(normed[s], p["attention"]["value"])[part] for s in seen])
            score = [q[part] @ k / np.sqrt(d) + p["bias"][h, t - s] for k, s in zip(key, seen, strict=True)]
            weight = np.exp(score) / np.exp(score).sum()
            found.append(weight @ value)
        y = gate(e[t], np.maximum(dense(np.concatenate(found), p["attention"]["out"]), 0), p["gate"])
        hidden = np.maximum(dense(norm(y, p["layer_norm"]), p["layer"]["hidden"]["Dense_0"]), 0)
        out.append(gate(y, np.maximum(dense(hidden, p["layer"]["out"]), 0), p["layer_gate"]))
    return np.array(out)


def test_it_is_the_gated_layer_of_the_paper(cell):
    params, apply, zero = cell
    x, first = inputs([t in (0, 4) for t in range(L) for _ in range(R)])
    _, out = apply(params, zero, x, first)
    expected = by_hand(jax.tree.map(np.asarray, params), np.asarray(x[:, 1]), np.asarray(first[:, 1]))
    np.testing.assert_allclose(out[:, 1], expected, atol=2e-5)


@given(st.lists(st.booleans(), min_size=L * R, max_size=L * R), st.integers(1, L - 1))
def test_step_by_step_and_in_pieces_it_is_the_same(cell, starts, cut):
    params, apply, zero = cell
    x, first = inputs(starts)
    carry, out = apply(params, zero, x, first)
    one, some = zero, []
    for t in range(L):
        one, y = apply(params, one, x[t : t + 1], first[t : t + 1])
        some.append(y[0])
    np.testing.assert_allclose(jnp.stack(some), out, atol=1e-5)
    np.testing.assert_allclose(one, carry, atol=1e-5)
    half, begin = apply(params, zero, x[:cut], first[:cut])
    half, end = apply(params, half, x[cut:], first[cut:])
    np.testing.assert_allclose(jnp.concatenate([begin, end]), out, atol=1e-5)
    np.testing.assert_allclose(half, carry, atol=1e-5)


def test_it_sees_its_window_and_its_episode_alone(cell):
    params, apply, zero = cell
    x, first = inputs([t == 5 for t in range(L) for _ in range(R)])
    jacobian = jax.jacobian(lambda x: apply(params, zero, x, first)[1][:, 0].sum(-1))(x)[:, :, 0]
    reaches = np.abs(jacobian).sum(-1) > 1e-9  # [L, L], of each output from each input
    t, s = np.indices((L, L))
    np.testing.assert_array_equal(reaches, (s <= t) & (t - s <= W) & ((s >= 5) == (t >= 5)))


def test_others_rows_are_their_own(cell):
    params, apply, zero = cell
    x, first = inputs([t == 0 for t in range(L) for _ in range(R)])
    other = x.at[:, 1].add(1.0)
    changes = jax.tree.map(lambda a, b: a != b, apply(params, zero, x, first), apply(params, zero, other, first))
    assert not changes[1][:, [0, 2]].any() and not changes[0][jnp.array([0, 2])].any() and changes[1][:, 1].all()


LEARNERS = {
    "mappo": (jmarl.mappo, jmarl.PPOConfig(num_epochs=2, num_minibatches=2, ent_coef=0.01)),
    "pqn_vdn": (jmarl.pqn_vdn, jmarl.PQNConfig(num_epochs=2, num_minibatches=2, epsilon_steps=2000)),
}


@pytest.mark.parametrize("name", LEARNERS)
def test_it_remembers_what_was_seen(name):
    """The cue is shown at the first step, and paid for at the last: without memory half of the reward is chance."""
    algorithm, cfg = LEARNERS[name]
    env = jmarl.envs.probe("memory", num_agents=2)
    cfg = cfg.replace(
        learning_rate=3e-3, recurrent=True, cell="attention", cell_size=16, cell_window=4, hidden_sizes=(16,)
    )
    loop = jmarl.on_policy(env, algorithm, num_envs=32, rollout_length=8)
    run, _ = jax.jit(jmarl.make_train(loop, 120))(jax.random.key(0), cfg)
    metrics = compiled.evaluate(env, algorithm(env.spec, cfg), run.train_state, jax.random.key(1), num_episodes=64)
    assert float(metrics["eval/return_mean"]) > 0.95, metrics


def test_replay_keeps_what_it_remembers():
    env = jmarl.envs.probe("memory", num_agents=2)
    cfg = jmarl.VDNConfig(
        learning_rate=3e-3, recurrent=True, cell="attention", cell_size=8, cell_window=2, hidden_sizes=(8,)
    )
    loop = jmarl.off_policy(
        env, jmarl.vdn, num_envs=4, rollout_length=4, warmup_steps=16,
        buffer=jmarl.buffers.uniform(64, 8, sequence_length=2),
    )  # fmt: skip
    run, metrics = jax.jit(jmarl.make_train(loop, 4))(jax.random.key(0), cfg)
    assert np.isfinite(metrics["loss/td"][-1]) and run.buffer.carry.shape == (64, 2, 2 * 9)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [({"cell_size": 10}, "cell_size=10 must be a multiple of 4.* choose 12"), ({"cell_window": 0}, "cell_window=0")],
)
def test_what_cannot_be_is_refused(settings, sentence):
    cfg = jmarl.PPOConfig(recurrent=True, cell="attention", **settings)
    with pytest.raises(ValueError, match=sentence):
        jmarl.ippo(jmarl.envs.probe("memory").spec, cfg)
