"""HAPPO and HAA2C: a plain loop over agents, monotone improvement, limits, who is dead, games, bad input."""

import itertools

import compiled
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmarl
from jmarl import HAA2CConfig, HAPPOConfig, PPOConfig, envs, optim
from jmarl.learners.happo import default_nets, happo_critic_loss
from jmarl.learners.ppo import PPOTargets
from jmarl.networks import actor_critic
from jmarl.types import Trajectory, Transition, zero_observation

SMALL = {"hidden_sizes": (8,), "learning_rate": 1e-2}
UNEQUAL = envs.matrix_game(np.arange(12.0).reshape(2, 3, 2), num_steps=2)
# Adam with a large ε, so that a slope of nearly nothing is a step of nearly nothing, whatever its sign.
STEADY = {"hidden_sizes": (8,), "learning_rate": 0.3, "adam_eps": 0.1, "max_grad_norm": 0.4}
CASES = {
    "recurrent": (
        jmarl.happo,
        HAPPOConfig(**STEADY, num_epochs=2, clip_eps=0.02, recurrent=True, cell_size=4, recurrent_length=2),
        envs.probe("memory", num_agents=3),
    ),
    "groups": (jmarl.happo, HAPPOConfig(**STEADY, num_epochs=2, sharing="per_group"), UNEQUAL),
    "haa2c": (jmarl.haa2c, HAA2CConfig(**STEADY).replace(max_grad_norm=None), envs.probe("continuous", num_agents=2)),
}


def rollout_of(env, learner, *, num_envs=3, length=4, dies=True):
    """A rollout in which the last agent is dead from the third step on, in the first environment."""
    run, batch, _ = compiled.play(env, learner, jax.random.key(0), num_envs=num_envs, length=length)
    if not dies:
        return run.train_state, batch
    acts = np.ones(batch.steps.reward.shape, bool)
    acts[2:, 0, -1] = False
    steps = batch.steps.replace(obs=batch.steps.obs.replace(agent_mask=jnp.asarray(acts)))
    return run.train_state, batch.replace(steps=steps, weight=jnp.asarray(acts))


def sequences(x, length):
    """`[T, B, ..]` to `[length, T/length * B, ..]`, piece by piece."""
    return np.concatenate([x[i : i + length] for i in range(0, len(x), length)], axis=1)


@pytest.mark.parametrize("name", CASES)
def test_turns_match_a_plain_loop_over_agents(name):
    """With the policy as a whole, its ratios of everybody, and one optimiser for each agent or group."""
    algorithm, cfg, env = CASES[name]
    learner, nets = algorithm(env.spec, cfg), default_nets(env.spec, cfg)
    state, batch = jax.device_get(rollout_of(env, learner))
    key, num_agents = jax.random.key(13), env.spec.num_agents  # of an order unlike that of the agents
    groups = actor_critic.groups(env.spec) if cfg.sharing == "per_group" else tuple(range(num_agents))
    policy = actor_critic.separate(*nets)

    # The team's advantage, step by step.
    value, acts = np.asarray(batch.steps.measured["value"]), np.asarray(batch.steps.obs.agent_mask)
    length = 4 if not cfg.recurrent else 2
    flat = lambda x: x.reshape(1, -1, *x.shape[2:])  # noqa: E731
    after = jax.tree.map(lambda x, y: np.concatenate([x[1:], y[None]]), batch.steps.carry, batch.next_carry)
    after = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), after)
    begins = np.zeros((1, value.shape[0] * value.shape[1]), bool)
    next_obs, action = jax.tree.map(flat, (batch.steps.next_obs, batch.steps.action))
    next_value = jax.jit(policy.evaluate)(state.params, after, next_obs, begins, action)[2].reshape(value.shape)
    reward = np.asarray(batch.steps.reward).sum(-1, keepdims=True)
    goes_on = 0.99 * ~np.asarray(batch.steps.terminated).all(-1, keepdims=True)
    advantage, trace = np.zeros_like(value), np.zeros_like(value[0])
    for t in reversed(range(4)):
        trace = np.where(np.asarray(batch.steps.last[t])[:, None], 0.0, trace)
        trace = reward[t] + goes_on[t] * next_value[t] - value[t] + goes_on[t] * 0.95 * trace
        advantage[t] = trace
    if cfg.normalize_advantage == "all":
        advantage = (advantage - advantage[acts].mean()) / advantage[acts].std()

    cut = lambda x: sequences(x, length)  # noqa: E731
    old, advantage, acts = cut(batch.steps.measured["log_prob"]), cut(advantage), cut(acts)
    obs, first, action = jax.tree.map(cut, (batch.steps.obs, batch.steps.first, batch.steps.action))
    carry = jax.tree.map(lambda x: np.concatenate([x[i] for i in range(0, 4, length)]), batch.steps.carry)

    carry, obs, first, action = jax.device_put((carry, obs, first, action))

    @jax.jit
    def log_probs(actor):
        log_prob, entropy, _ = policy.evaluate({**state.params, "actor": actor}, carry, obs, first, action)
        return log_prob, entropy

    @jax.jit
    @jax.grad
    def slope(actor, counts, gain):
        log_prob, entropy = log_probs(actor)
        ratio = jnp.exp(log_prob - old)
        surrogate = jnp.minimum(ratio * gain, jnp.clip(ratio, 1 - cfg.clip_eps, 1 + cfg.clip_eps) * gain)
        return -jnp.sum(jnp.where(counts, surrogate + cfg.ent_coef * entropy, 0.0)) / counts.sum()

    optimizer = optim.optimizer(cfg.learning_rate, eps=cfg.adam_eps, max_grad_norm=cfg.max_grad_norm)
    begin, step = jax.jit(optimizer.init), jax.jit(optimizer.update)
    actor, joint_ratio = state.params["actor"], np.ones(first.shape)
    for player in np.asarray(jax.random.permutation(jax.random.split(key, 3)[1], max(groups) + 1)):
        members = np.asarray(groups) == player
        counts = acts & members

        gain = joint_ratio[..., None] * advantage

        def own(tree, player=player):
            if cfg.sharing == "per_group":
                return tree[f"group_{player}"]
            return jax.tree.map(lambda x: x[player], tree)

        opt_state = begin(own(actor))
        for _ in range(cfg.num_epochs):
            updates, opt_state = jax.device_get(step(own(jax.device_get(slope(actor, counts, gain))), opt_state))
            new = jax.tree.map(np.add, own(actor), updates)
            if cfg.sharing == "per_group":
                actor = {**actor, f"group_{player}": new}
            else:
                is_own = np.arange(num_agents) == player
                actor = jax.tree.map(lambda x, y, m=is_own: np.where(m.reshape(-1, *[1] * y.ndim), y, x), actor, new)
        moved = np.where(counts, np.asarray(log_probs(actor)[0]) - old, 0.0)
        joint_ratio = joint_ratio * np.exp(moved.sum(-1))

    new, metrics = jax.jit(learner.update)(state, batch, key)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-6), new.params["actor"], actor)
    np.testing.assert_allclose(metrics["policy/joint_ratio"], joint_ratio[acts.any(-1)].mean(), rtol=1e-4)
    assert abs(float(metrics["policy/joint_ratio"]) - 1) > 1e-4


def test_the_joint_surrogate_never_falls():
    """Over random games of three agents, exactly: every joint action once, each as likely as the other at first."""
    joint = np.array(list(itertools.product(range(2), repeat=3)))
    env = envs.matrix_game(np.zeros((2, 2, 2)))
    cfg = HAPPOConfig(hidden_sizes=(), learning_rate=0.3, clip_eps=0.9, ent_coef=0.0, num_epochs=8, max_grad_norm=None)
    nets = default_nets(env.spec, cfg)
    policy = actor_critic.separate(*nets)
    obs = zero_observation(env.spec, (1, 8)).replace(agents=jnp.ones((1, 8, 3, 1)))
    no, nothing = jnp.zeros((1, 8), bool), policy.init_carry((8,))
    action = jnp.asarray(joint)[None]

    def gain(key):
        key_game, key_init, key = jax.random.split(key, 3)
        payoff = jax.random.normal(key_game, (1, 8))
        advantage = jnp.broadcast_to((payoff - payoff.mean())[..., None], (1, 8, 3))

        def given(params, batch, moments=None, *, nets, cfg):
            log_prob = batch.steps.measured["log_prob"]
            return PPOTargets(log_prob=log_prob, value=log_prob, advantage=advantage, value_target=log_prob), {}, {}

        learner = jmarl.happo(env.spec, cfg.replace(normalize_advantage="none"), targets=given)
        state = learner.init(key_init)
        flat = jax.tree.map(jnp.zeros_like, state.params["actor"])  # a uniform policy
        state = state.replace(params={**state.params, "actor": flat})
        log_prob = policy.evaluate(state.params, nothing, obs, no, action)[0]
        zeros = jnp.zeros((1, 8, 3))
        steps = Transition(
            obs=obs, carry=nothing, first=no, action=action, reward=zeros, terminated=zeros > 1, last=no,
            next_obs=obs, measured={"log_prob": log_prob, "value": zeros},
        )  # fmt: skip
        new, _ = learner.update(state, Trajectory(steps=steps, carry=nothing, next_carry=nothing), key)
        moved = policy.evaluate(new.params, nothing, obs, no, action)[0] - log_prob
        return jnp.mean(jnp.exp(moved.sum(-1)) * advantage[..., 0])

    gains = np.asarray(jax.jit(jax.vmap(gain))(jax.random.split(jax.random.key(0), 200)))
    assert gains.min() > -1e-6 and (gains > 0.01).mean() > 0.9


def test_the_critic_learns_from_who_counts():
    """(V - R)^2, on the mean over agents that are there."""
    cfg = HAPPOConfig(**SMALL)
    learner, nets = jmarl.happo(UNEQUAL.spec, cfg), default_nets(UNEQUAL.spec, cfg)
    state, batch = rollout_of(UNEQUAL, learner)
    value, counts = np.asarray(batch.steps.measured["value"]), np.asarray(batch.weight)
    returns = np.random.default_rng(0).normal(size=value.shape).astype(np.float32)
    targets = PPOTargets(
        value_target=jnp.asarray(returns),
        advantage=jnp.zeros(value.shape),
        log_prob=jnp.zeros(value.shape),
        value=jnp.asarray(value),
    )
    loss, _ = jax.jit(lambda params: happo_critic_loss(params, batch, targets, nets=nets, cfg=cfg))(
        state.params["critic"]
    )
    np.testing.assert_allclose(loss, np.mean(((value - returns) ** 2)[counts]), rtol=1e-5)
    assert 0 < (~counts).sum() < counts.size


def test_at_one_agent_it_is_ppo():
    env = envs.probe("action_observation")
    common = {**SMALL, "num_epochs": 3, "num_minibatches": 1, "critic_view": "state"}
    ours = jmarl.happo(env.spec, HAPPOConfig(**common))
    ppo = jmarl.mappo(env.spec, PPOConfig(**common, vf_coef=1.0, clip_separately=True))
    state, batch = rollout_of(env, ours, dies=False)
    other = jax.jit(ppo.init)(jax.random.key(0))
    params = {**state.params, "actor": jax.tree.map(lambda x: np.asarray(x)[0], state.params["actor"])}
    other = other.replace(params=params, env_steps=state.env_steps)

    def twice(learner, state):
        for key in jax.random.split(jax.random.key(1)):
            state, _ = learner.update(state, batch, key)
        return state

    new, same = jax.jit(twice, static_argnums=0)(ours, state), jax.jit(twice, static_argnums=0)(ppo, other)
    actor = jax.tree.map(lambda x: np.asarray(x)[0], new.params["actor"])
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), {**new.params, "actor": actor}, same.params
    )
    assert int(new.step) == int(same.step) == 6


@pytest.mark.parametrize("name", ["recurrent", "groups"])
def test_what_a_dead_agent_sees_and_does_changes_nothing(name):
    algorithm, cfg, env = CASES[name]
    learner = algorithm(env.spec, cfg)
    state, batch = rollout_of(env, learner)
    steps, update = jax.device_get(batch.steps), jax.jit(learner.update)

    def of_the_dead(x, value):
        x = x.copy()
        x[2:, 0, -1] = value
        return x

    obs = steps.obs.replace(agents=of_the_dead(steps.obs.agents, 9.0))
    spoilt = steps.replace(obs=obs, action=of_the_dead(steps.action, 0), reward=of_the_dead(steps.reward, np.nan))
    clean = steps.replace(reward=of_the_dead(steps.reward, 0.0))
    one, two = (update(state, batch.replace(steps=x), jax.random.key(3))[0] for x in (clean, spoilt))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7), one.params, two.params)
    moved = jax.tree.map(lambda x, y: not np.array_equal(x, y), state.params, one.params)
    assert all(jax.tree.leaves(moved)), moved


@pytest.mark.parametrize("algorithm, config", [(jmarl.happo, HAPPOConfig), (jmarl.haa2c, HAA2CConfig)])
def test_they_learn_for_the_team_in_one_trace_for_all_settings(algorithm, config):
    """Agent 0 is paid for what agent 1 does, and the other way round: each must learn from the team's reward."""
    env = envs.probe("action_observation", num_agents=2)

    def step(state, action, key):
        state, obs, outcome = env.step(state, action, key)
        return state, obs, outcome.replace(reward=outcome.reward[::-1])

    loop = jmarl.on_policy(env._replace(step=step), algorithm, num_envs=16, rollout_length=4)
    cfgs, axes = jmarl.sweep(config(hidden_sizes=(8,)), learning_rate=[0.02, 0.03], clip_eps=[0.1, 0.3])
    train = jax.jit(jax.vmap(jmarl.make_train(loop, 80), (None, axes)))
    _, metrics = train(jax.random.key(0), cfgs)
    assert (np.asarray(metrics["train/return_sum"])[:, -10:].mean(-1) > 1.8).all()


def test_bad_input():
    spec = envs.matrix_game(np.eye(2)).spec
    with pytest.raises(ValueError, match="sharing='shared' leaves nobody to learn after another: choose 'per_agent'"):
        jmarl.happo(spec, HAPPOConfig(sharing="shared"))
    with pytest.raises(ValueError, match="Advantage actor-critic takes one step on each rollout, but num_epochs=2"):
        jmarl.haa2c(spec, HAA2CConfig(num_epochs=2))
    with pytest.raises(ValueError, match="critic_view='obs' is unknown here: choose one of auto, state, state_id"):
        jmarl.happo(spec, HAPPOConfig(critic_view="obs"))
    with pytest.raises(ValueError, match=r"Centralised critics read the global state, but matrix_game has state_shape"):
        jmarl.happo(spec._replace(state_shape=(0,)), HAPPOConfig())
