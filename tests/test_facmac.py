"""FACMAC: losses by hand, the gradient of the joint action, what its mixers promise, games, bad input."""

import compiled
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_batches import random_batch, require_padding_and_inactive_agents_change_nothing

import jmarl
from jmarl import FACMACConfig, buffers, envs
from jmarl.learners import critics
from jmarl.learners.ddpg import ddpg_targets
from jmarl.learners.facmac import default_nets
from jmarl.networks import mixers

SPEC = envs.probe("continuous", num_agents=2).spec
DISCRETE = envs.matrix_game(np.zeros((3, 3))).spec
SMALL = {"hidden_sizes": (8,), "mixer_embed_size": 3, "mixer_hypernet_sizes": (), "mixer_scale": 1.0}


def dense(layer, x):
    return x @ np.asarray(layer["kernel"]) + np.asarray(layer["bias"])


def total_by_hand(params, views, actions, state, acts, mixer):
    """Q_tot of one joint action: a ReLU network for each agent's action and view, and the mixer of QMIX."""
    values = np.zeros(2)
    for i in range(2):
        action = actions[i] * (acts[i])
        hidden = np.maximum(dense(params["agents"]["torso"]["Dense_0"], np.concatenate([action, views[i]])), 0)
        values[i] = dense(params["agents"]["outputs_0"]["out"], hidden)[0] * (acts[i] or not acts.any())
    if mixer == "sum":
        return values.sum()
    made = {name: dense(params["mixer"][f"hyper_{name}"]["Dense_0"], state) for name in ("w1", "w2", "b1", "b2")}
    w1, w2 = (np.abs(made[name]) if mixer == "monotonic" else made[name] for name in ("w1", "w2"))
    hidden = values @ w1.reshape(2, 3) + made["b1"]
    bias = dense(params["mixer"]["hyper_b2"]["Dense_1"], np.maximum(made["b2"], 0))[0]
    return np.where(hidden > 0, hidden, np.exp(hidden) - 1) @ w2 + bias


def actor_by_hand(params, view):
    return np.tanh(dense(params["outputs_0"]["out"], np.maximum(dense(params["torso"]["Dense_0"], view), 0)))


@pytest.mark.parametrize("mixer", ["monotonic", "free", "sum"])
def test_losses_match_a_loop_over_steps(mixer):
    """With an agent that dies first, one that waits while the other does too, and target networks of their own."""
    cfg = FACMACConfig(**SMALL, mixer=mixer, team_reward="mean", gamma=0.9)
    learner, nets = jmarl.facmac(SPEC, cfg), default_nets(SPEC, cfg)
    state = compiled.init(learner, jax.random.key(0))
    old = jax.tree.map(lambda p: p + 0.2 * jnp.cos(jnp.arange(p.size)).reshape(p.shape), state.params)
    state = state.replace(target_params={name: old[name] for name in state.target_params})
    batch = random_batch(SPEC, jax.random.key(1), length=1, batch_size=5)
    acts, next_acts = np.ones((5, 2), bool), np.ones((5, 2), bool)
    acts[1], next_acts[1], next_acts[2], acts[3] = [False, True], [False, True], False, False
    weight, ends = np.ones((5, 2)), np.zeros((5, 2), bool)
    weight[1, 0], ends[4], ends[0, 0] = 0, True, True  # the team goes on where only agent 0's return ends
    steps = batch.steps.replace(
        obs=batch.steps.obs.replace(agent_mask=jnp.asarray(acts)[None]),
        next_obs=batch.steps.next_obs.replace(agent_mask=jnp.asarray(next_acts)[None]),
        terminated=jnp.asarray(ends)[None],
        last=jnp.asarray(ends.all(-1))[None],
    )
    batch = batch.replace(steps=steps, weight=jnp.asarray(weight, jnp.float32)[None])

    numbers = jax.tree.map(np.asarray, (state.params, state.target_params))
    (actor, critic), (old_actor, old_critic) = ((p["actor"], p["critic"][0]) for p in numbers)
    now, later = jax.tree.map(lambda x: np.asarray(x)[0], (steps.obs, steps.next_obs))
    errors, totals = [], []
    for m in range(5):
        next_action = actor_by_hand(old_actor, later.agents[m])
        next_total = total_by_hand(old_critic, later.agents[m], next_action, later.state[m], next_acts[m], mixer)
        y = float(steps.reward[0, m].mean()) + 0.9 * (not ends[m].all()) * next_total
        taken = np.asarray(steps.action[0, m])
        errors.append(total_by_hand(critic, now.agents[m], taken, now.state[m], acts[m], mixer) - y)
        if acts[m].any():
            done = actor_by_hand(actor, now.agents[m])
            totals.append(total_by_hand(critic, now.agents[m], done, now.state[m], acts[m], mixer))
    options = {"nets": nets, "cfg": cfg}
    target = ddpg_targets(state.target_params, batch, None, **options)
    loss, _ = jmarl.team_critic_loss(state.params, batch, target, **options)
    np.testing.assert_allclose(loss, np.mean(np.square(errors)), rtol=1e-4)
    loss, _ = jmarl.facmac_actor_loss(state.params, batch, None, **options)
    np.testing.assert_allclose(loss, -np.mean(totals), rtol=1e-4)


def test_the_actors_gradient_is_of_the_joint_action():
    """A critic that values the product of both actions: each actor's slope is the other's action at μ."""
    nets = default_nets(SPEC, FACMACConfig(**SMALL))

    def product(params, carry, x, first):
        own = x[1][..., 0]
        return carry, jnp.broadcast_to(jnp.prod(own, axis=-1, keepdims=True), own.shape)[None]

    nets = nets._replace(
        actor=nets.actor._replace(
            apply=lambda params, carry, obs, first: (carry, jnp.broadcast_to(params, (1, 6, 2, 1)))
        ),
        critic=nets.critic._replace(apply=product),
    )
    batch, theta = random_batch(SPEC, jax.random.key(1), length=1), jnp.array([[0.3], [-0.8]])

    def loss(theta):
        params = {"actor": theta, "critic": ()}
        return jmarl.facmac_actor_loss(params, batch, None, nets=nets, cfg=FACMACConfig(**SMALL))[0]

    a = np.tanh(np.asarray(theta))
    np.testing.assert_allclose(jax.grad(loss)(theta), -a[::-1] * (1 - a**2), rtol=1e-5)


@pytest.mark.parametrize("mixer, is_monotone", [("monotonic", True), ("free", False)])
def test_only_the_constrained_mixer_is_monotone(mixer, is_monotone):
    critic = default_nets(SPEC, FACMACConfig(**SMALL, mixer=mixer)).critic
    obs = random_batch(SPEC, jax.random.key(0)).steps.obs
    module = mixers.QMIX(3, (), 3, 1.0, is_monotonic=is_monotone)
    mix = mixers.mixer(module, SPEC)

    def slopes(key):
        q, only = jax.random.normal(key, (4, 6, 2)), jnp.zeros((4, 6, 2), jnp.int32)
        params = critic.init(key)[0]["mixer"]
        return jax.grad(lambda q: mix.apply(params, q[..., None], only, obs).sum())(q)

    slopes = jax.jit(jax.vmap(slopes))(jax.random.split(jax.random.key(1), 20))
    assert bool((slopes >= 0).all()) == is_monotone and bool((slopes > 0).any())


CASES = {
    "continuous": (SPEC, FACMACConfig(**SMALL)),
    "per_agent": (SPEC, FACMACConfig(**SMALL, sharing="per_agent", recurrent=True, cell_size=4)),
    "discrete": (DISCRETE, FACMACConfig(**SMALL, mixer="free", num_critics=2, target_noise=0.1)),
}


@pytest.mark.parametrize("name", CASES)
def test_padding_and_inactive_agents_change_nothing_and_every_parameter_learns(name):
    spec, cfg = CASES[name]
    learner = jmarl.facmac(spec, cfg)
    require_padding_and_inactive_agents_change_nothing(learner, spec, learner.init_carry((6,)))


def test_actors_climb_the_value_of_the_team():
    """Agent 0 is paid for what agent 1 does, and the other way round: each must climb the team's value."""
    env = envs.probe("continuous", num_agents=2)

    def step(state, action, key):
        state, obs, outcome = env.step(state, action, key)
        return state, obs, outcome.replace(reward=outcome.reward[::-1])

    crossed = env._replace(step=step)
    cfg = FACMACConfig(learning_rate=1e-2, hidden_sizes=(16,), mixer_embed_size=4, mixer_hypernet_sizes=())
    cfg = cfg.replace(noise_start=0.5, noise_end=0.5, max_grad_norm=None)
    options = {"num_envs": 8, "rollout_length": 4, "num_updates": 4, "warmup_steps": 64}
    loop = jmarl.off_policy(crossed, jmarl.facmac, buffer=buffers.uniform(2000, 64), **options)
    run, _ = jax.jit(jmarl.make_train(loop, 200))(jax.random.key(0), cfg)
    learner = jmarl.facmac(env.spec, cfg)
    metrics = compiled.evaluate(crossed, learner, run.train_state, jax.random.key(1), num_episodes=32)
    assert float(metrics["eval/return_sum"]) > -0.02


def test_bad_input():
    with pytest.raises(ValueError, match="mixer='qmix' is unknown here: choose one of monotonic, free, sum"):
        jmarl.facmac(SPEC, FACMACConfig(mixer="qmix"))
    with pytest.raises(ValueError, match="team_reward='individual' is unknown here"):
        jmarl.facmac(SPEC, FACMACConfig(team_reward="individual"))
    with pytest.raises(ValueError, match=r"QMIX mixes with the global state, but continuous has state_shape=\(0,\)"):
        jmarl.facmac(SPEC._replace(state_shape=(0,)), FACMACConfig())
    assert isinstance(default_nets(SPEC._replace(state_shape=(0,)), FACMACConfig(mixer="sum")), critics.ActorCritic)
