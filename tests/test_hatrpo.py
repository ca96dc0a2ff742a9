"""HATRPO: products with the curvature, conjugate gradients, the trust region, a dead agent, games, bad input."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree
from test_happo import rollout_of

import jmarl
from jmarl import HATRPOConfig, envs
from jmarl.learners.happo import Player, default_nets
from jmarl.learners.ppo import PPOTargets
from jmarl.networks import actor_critic, heads

SMALL = {"hidden_sizes": (4,), "activation": "tanh"}
hatrpo_module = sys.modules["jmarl.learners.hatrpo"]  # `jmarl.learners.hatrpo` is the function
GAMES = {
    "discrete": envs.matrix_game(np.arange(6.0).reshape(2, 3)),
    "continuous": envs.probe("continuous", num_agents=2),
}


# --------------------------------------------------------------------------------------------------- distributions


def test_kl_of_categorical_distributions_as_by_hand():
    legal = jnp.array([[True, True, True], [True, False, True]])
    p, q = (heads.categorical(jax.random.normal(jax.random.key(k), (2, 3)), legal) for k in (0, 1))
    expected = [
        sum(float(a) * np.log(float(a) / float(b)) for a, b in zip(*row, strict=True) if a > 0)
        for row in zip(p.probs, q.probs, strict=True)
    ]
    np.testing.assert_allclose(heads.kl_divergence(p, q), expected, rtol=1e-5)
    slope = jax.grad(lambda x: heads.kl_divergence(p, heads.categorical(x, legal)).sum())(jnp.zeros((2, 3)))
    np.testing.assert_allclose(slope, jax.nn.softmax(jnp.where(legal, 0.0, -jnp.inf)) - p.probs, atol=1e-6)


@pytest.mark.parametrize("squash", [False, True])
def test_kl_of_normal_distributions_is_the_mean_of_what_samples_say(squash):
    make = functools.partial(heads.tanh_normal, low=-2.0, high=1.0) if squash else heads.gaussian
    p = make(jnp.array([0.2, -0.1]), jnp.array([0.1, -0.4]))
    q = make(jnp.array([-0.1, 0.3]), jnp.array([0.3, -0.1]))
    noise = jax.random.normal(jax.random.key(0), (200_000, 2))
    wide = lambda pi: jax.tree.map(lambda x: jnp.broadcast_to(x, noise.shape), pi)  # noqa: E731
    actions, log_prob = wide(p).from_noise(noise)
    sampled = float(jnp.mean(log_prob - wide(q).log_prob(actions)))
    assert float(heads.kl_divergence(p, q)) == pytest.approx(sampled, abs=0.01) and sampled > 0.2


def test_kl_of_other_distributions_is_refused():
    with pytest.raises(TypeError, match="knows Categorical, Gaussian and TanhNormal, and pi is object here"):
        heads.kl_divergence(object(), object())


# ---------------------------------------------------------------------------------------------------- linear algebra


@given(seed=st.integers(0, 10_000))
def test_conjugate_gradients_solve_as_numpy_does(seed):
    random = np.random.default_rng(seed)
    root = random.normal(size=(5, 5))
    matrix, b = (root @ root.T + np.eye(5)).astype(np.float32), random.normal(size=5).astype(np.float32)
    solve = jax.jit(lambda a, b: hatrpo_module.conjugate_gradient(lambda v: a @ v, b, 8))
    np.testing.assert_allclose(solve(matrix, b), np.linalg.solve(matrix, b), rtol=2e-2, atol=2e-3)


def test_conjugate_gradients_of_nothing_are_nothing():
    x = hatrpo_module.conjugate_gradient(lambda v: 0.0 * v, jnp.zeros(3), 4)
    assert x.tolist() == [0, 0, 0]
    flat = hatrpo_module.conjugate_gradient(lambda v: 0.0 * v, jnp.ones(3), 4)  # no curvature: no step, and no NaN
    assert flat.tolist() == [0, 0, 0]


@functools.cache
def setting(kind, recurrent=False):
    """A rollout of two agents, the last of whom dies in it, and the second one as a player of its own."""
    env = GAMES[kind]
    cfg = HATRPOConfig(**SMALL, recurrent=recurrent, cell_size=3)
    learner, nets = jmarl.hatrpo(env.spec, cfg), default_nets(env.spec, cfg)
    state, batch = rollout_of(env, learner, num_envs=4)

    def distribution(actor, batch):
        steps = batch.steps
        output = nets.actor.apply(actor, batch.carry["actor"], steps.obs, steps.first)[1]
        return nets.distribution(output, steps.obs.action_mask)

    def evaluate(actor, batch):
        pi = distribution(actor, batch)
        return pi.log_prob(batch.steps.action), pi.entropy()

    player = Player(evaluate, jnp.array([False, True]), distribution)
    actor = state.params["actor"]
    leaves, structure = jax.tree.flatten(actor)
    keys = jax.random.split(jax.random.key(3), len(leaves))
    noisy = [x + 0.5 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    return env, cfg, player, jax.tree.unflatten(structure, noisy), batch


@pytest.mark.parametrize(("kind", "recurrent"), [("discrete", False), ("continuous", False), ("discrete", True)])
def test_products_with_the_curvature_are_those_of_its_matrix_fishers(kind, recurrent):
    """F = mean of E_a[∇ log π ∇ log πᵀ], by forward derivatives of the distribution's parameters."""
    _, _, player, actor, batch = setting(kind, recurrent)
    flat, unravel = ravel_pytree(actor)
    old = player.distribution(actor, batch)
    kl = lambda x: hatrpo_module.mean_kl(unravel(x), old, batch, nets=player)  # noqa: E731
    v = jax.random.normal(jax.random.key(4), flat.shape)
    product = jax.jit(lambda v: hatrpo_module.curvature_product(kl, flat)(v))(v)

    counts = np.asarray(batch.steps.obs.agent_mask & player.members)

    def parameters(x):
        pi = player.distribution(unravel(x), batch)
        return pi.logits if kind == "discrete" else jnp.concatenate([pi.mean, pi.log_std], -1)

    slopes = np.asarray(jax.jit(jax.jacrev(parameters))(flat))[counts]  # [rows, K, P]
    if kind == "discrete":  # E[∇ log π ∇ log πᵀ] = Σ_a π(a) ∇ log π(a) ∇ log π(a)ᵀ
        weights = np.asarray(old.probs)[counts]
    else:  # 1/σ² for the mean, 2 for log σ
        weights = np.concatenate([np.exp(-2 * np.asarray(old.log_std)), np.full(old.log_std.shape, 2.0)], -1)[counts]
    matrix = np.einsum("rk,rkp,rkq->pq", weights, slopes, slopes) / counts.sum()
    np.testing.assert_allclose(product, matrix @ np.asarray(v), rtol=2e-3, atol=1e-5)
    assert not counts.all() and np.abs(matrix).max() > 1e-3


# ---------------------------------------------------------------------------------------------------- the trust region


@functools.cache
def compiled_step(kind):
    _, cfg, player, actor, batch = setting(kind)
    flat, unravel = ravel_pytree(actor)
    old = player.distribution(actor, batch)

    @jax.jit
    def step(advantage, max_kl):
        log_prob, _ = player.evaluate(actor, batch)
        targets = PPOTargets(log_prob=log_prob, value=log_prob, advantage=advantage, value_target=log_prob)
        current = cfg.replace(max_kl=max_kl)
        gain = lambda x: jmarl.hatrpo_surrogate(unravel(x), batch, targets, nets=player, cfg=current)[0]  # noqa: E731
        kl = lambda x: hatrpo_module.mean_kl(unravel(x), old, batch, nets=player)  # noqa: E731
        new, metrics = hatrpo_module.trust_region_step(gain, kl, flat, current)
        return gain(flat), gain(new), kl(new), jnp.abs(new - flat).max(), metrics

    return step, batch.steps.reward.shape


@given(seed=st.integers(0, 10_000), max_kl=st.sampled_from([1e-4, 1e-2, 1.0]))
def test_a_step_stays_in_its_region_and_the_surrogate_rises(seed, max_kl):
    for kind in GAMES:
        step, shape = compiled_step(kind)
        advantage = jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))
        before, after, kl, moved, metrics = step(advantage, max_kl)
        assert kl <= max_kl * (1 + 1e-3) + 1e-7
        assert metrics["policy/kl"] == pytest.approx(float(kl), rel=1e-3, abs=1e-7)
        if metrics["policy/accepted"]:
            assert after > before and moved > 0
            assert kl > 0.01 * max_kl or metrics["policy/lengths_tried"] > 1  # a step that uses its region
        else:
            assert moved == 0


def test_without_an_advantage_nobody_moves():
    step, shape = compiled_step("discrete")
    before, after, kl, moved, metrics = step(jnp.zeros(shape), 0.01)
    assert moved == 0 and kl == 0 and before == after and metrics["policy/accepted"] == 0


# ----------------------------------------------------------------------------------------------------- the algorithm


def test_each_agents_policy_stays_within_its_region_of_the_old_one():
    env, max_kl = GAMES["discrete"], 0.02
    cfg = HATRPOConfig(**SMALL, max_kl=max_kl)
    learner, nets = jmarl.hatrpo(env.spec, cfg), default_nets(env.spec, cfg)
    state, batch = rollout_of(env, learner, num_envs=16, dies=False)
    new, metrics = jax.jit(learner.update)(state, batch, jax.random.key(1))

    def distribution(params):
        steps = batch.steps
        output = nets.actor.apply(params["actor"], batch.carry["actor"], steps.obs, steps.first)[1]
        return nets.distribution(output, steps.obs.action_mask)

    kl = heads.kl_divergence(distribution(state.params), distribution(new.params)).mean((0, 1))
    assert (kl > 0.1 * max_kl).all() and (kl <= max_kl * 1.001).all()  # both have moved
    assert metrics["policy/kl"] == pytest.approx(float(kl.mean()), rel=1e-3)
    assert int(new.step) == cfg.num_epochs


def test_it_finds_the_best_of_a_matrix_game_in_one_trace_for_all_settings():
    env = envs.matrix_game([[2.0, 1.0], [1.0, 0.0]], num_steps=2)
    loop = jmarl.on_policy(env, jmarl.hatrpo, num_envs=16, rollout_length=4)
    cfg = HATRPOConfig(hidden_sizes=(8,), learning_rate=1e-2)
    cfgs, axes = jmarl.sweep(cfg, max_kl=[0.01, 0.05])
    train = jax.jit(jax.vmap(jmarl.make_train(loop, 60), (None, axes)))
    _, metrics = train(jax.random.key(0), cfgs)
    assert (metrics["train/return_mean"][:, -5:].mean(-1) > 3.8).all()  # 2 in each of two rounds


def test_groups_of_unlike_agents_move_within_their_regions_too():
    env = envs.matrix_game(np.arange(12.0).reshape(2, 3, 2))
    cfg = HATRPOConfig(**SMALL, sharing="per_group")
    learner = jmarl.hatrpo(env.spec, cfg)
    state, batch = rollout_of(env, learner)
    new, metrics = jax.jit(learner.update)(state, batch, jax.random.key(0))
    assert 0 < metrics["policy/kl"] <= cfg.max_kl * 1.001
    for name in ("group_0", "group_1"):
        gaps = jax.tree.map(lambda x, y: float(jnp.abs(x - y).max()), *(s.params["actor"][name] for s in (state, new)))
        assert max(jax.tree.leaves(gaps)) > 1e-4
    assert actor_critic.groups(env.spec) == (0, 1, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_kl": 0.0}, "max_kl=0.0 must be positive: within 0 nobody moves"),
        ({"cg_iterations": 0}, "cg_iterations=0 must be at least 1"),
        ({"line_search_shrink": 1.0}, "line_search_shrink=1.0 must lie between 0 and 1"),
        ({"cg_damping": -1.0}, "cg_damping=-1.0 must not be negative"),
        ({"sharing": "shared"}, "sharing='shared' leaves nobody to learn after another"),
    ],
)
def test_bad_input_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        jmarl.hatrpo(GAMES["discrete"].spec, HATRPOConfig(**options))
