"""DDPG, TD3, SAC, COMA, A2C and random: known answers, invariances, games with known solutions, bad input."""

import dataclasses
import inspect
import warnings

import compiled
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_batches import random_batch, require_padding_and_inactive_agents_change_nothing

import jmarl
from jmarl import (
    A2CConfig,
    COMAConfig,
    DDPGConfig,
    RandomConfig,
    SACConfig,
    TD3Config,
    buffers,
    envs,
    losses,
    training,
)
from jmarl.learners import critics, ddpg, ppo, sac
from jmarl.learners.coma import default_nets as coma_nets
from jmarl.networks import actor_critic
from jmarl.types import Network, zero_observation

DISCRETE = envs.matrix_game(np.zeros((3, 3))).spec
CONTINUOUS = envs.probe("continuous", num_agents=2).spec

# ------------------------------------------------------------------------------------------------------ known answers


def test_temperature_falls_while_the_entropy_is_above_its_target():
    grad = jax.grad(lambda x: losses.temperature_loss(x, jnp.array(-1.0), -2.0))(jnp.array(0.0))
    assert float(grad) == 3.0  # wrong: -1


def test_soft_value_of_discrete_actions_ignores_an_added_illegal_one():
    def value(logits, q, legal):
        policy = jmarl.networks.heads.categorical(logits, legal)
        return losses.soft_value(q, policy.logits, 0.5, policy.probs)

    logits, q = jnp.log(jnp.array([0.25, 0.75])), jnp.array([1.0, 2.0])
    assert float(value(logits, q, jnp.ones(2, bool))) == pytest.approx(2.03117, abs=1e-5)
    more = jnp.append(logits, 3.0), jnp.append(q, 100.0), jnp.array([True, True, False])
    assert float(value(*more)) == pytest.approx(2.03117, abs=1e-5)
    assert np.isfinite(jax.grad(value)(*more)).all()


def test_a_high_temperature_and_an_illegal_action_are_finite():
    """α log π of an illegal action is beyond the largest float."""

    def value(logits, alpha, legal):
        policy = jmarl.networks.heads.categorical(logits, legal)
        return losses.soft_value(jnp.array([1.0, 2.0, 9.0]), policy.logits, alpha, policy.probs)

    logits, legal = jnp.log(jnp.array([0.25, 0.75, 5.0])), jnp.array([True, True, False])
    entropy = -0.25 * np.log(0.25) - 0.75 * np.log(0.75)
    assert float(value(logits, 10.0, legal)) == pytest.approx(1.75 + 10 * entropy, rel=1e-5)
    by_logits, by_alpha = jax.jit(jax.grad(value, (0, 1)))(logits, 10.0, legal)
    # dV/dlogit = p (q - V - α (log p + H)) with V the mean of q.
    slope = np.array([0.25, 0.75]) * (np.array([1.0, 2.0]) - 1.75 - 10 * (np.log([0.25, 0.75]) + entropy))
    np.testing.assert_allclose(by_logits, [*slope, 0.0], rtol=1e-4)
    assert float(by_alpha) == pytest.approx(entropy, rel=1e-5)


def test_a_padded_action_changes_nothing_in_the_penalty_of_logits():
    def loss(logits, num_real):
        logits = jnp.asarray(logits)
        code = critics.action_code(DISCRETE._replace(num_actions=len(logits), action_sizes=(num_real,) * 2))
        nets = critics.ActorCritic(
            actor=Network(
                lambda key: 0.0,
                lambda params, carry, obs, first: (carry, jnp.broadcast_to(logits, (*first.shape, 2, len(logits)))),
                lambda shape: (),
            ),
            critic=Network(lambda key: 0.0, lambda p, carry, x, first: (carry, jnp.zeros((1, 4, 6, 2))), lambda s: ()),
            code=code,
        )

        @jax.jit
        def actor_loss(key):
            batch = random_batch(DISCRETE._replace(num_actions=len(logits)), key)
            legal = jnp.broadcast_to(jnp.arange(len(logits)) < num_real, (4, 6, 2, len(logits)))
            batch = batch.replace(steps=batch.steps.replace(obs=batch.steps.obs.replace(action_mask=legal)))
            params = {"actor": 0.0, "critic": 0.0}
            noise = jnp.zeros((4, 6, 2, len(logits)))
            return ddpg.ddpg_actor_loss(params, batch, noise, nets=nets, cfg=DDPGConfig(logit_coef=1.0))[0]

        return float(actor_loss(jax.random.key(0)))

    assert loss([1.0, 3.0], 2) == loss([1.0, 3.0, 7.0], 2) == 5.0


@pytest.mark.parametrize(
    "kind, target", [("individual", [1.0, 5.0 + 9.0]), ("sum", [15.0, 15.0]), ("mean", [12.0, 12.0])]
)
def test_with_team_rewards_a_dead_agents_return_goes_on_as_long_as_the_teams(kind, target):
    """γ = 0.9 and Q = 10 everywhere; agent 0 dies, agent 1 goes on."""
    nets = ddpg.default_nets(CONTINUOUS, DDPGConfig(**SMALL))
    tens = Network(lambda key: 0.0, lambda p, carry, x, first: (carry, jnp.full((1, 1, 6, 2), 10.0)), lambda shape: ())
    batch = random_batch(CONTINUOUS, jax.random.key(0), length=1)
    wide = lambda x: jnp.broadcast_to(jnp.array(x), (1, 6, 2))  # noqa: E731
    batch = batch.replace(steps=batch.steps.replace(reward=wide([1.0, 5.0]), terminated=wide([True, False])))
    params = {"actor": compiled.init(nets.actor, jax.random.key(1)), "critic": 0.0}
    cfg = DDPGConfig(gamma=0.9, team_reward=kind)
    options = {"nets": nets._replace(critic=tens), "cfg": cfg}

    @jax.jit
    def targets_and_metrics(params, batch):
        ours = ddpg.ddpg_targets(params, batch, None, **options)
        return ours, critics.critic_loss(params, batch, ours, **options)[1]

    ours, metrics = targets_and_metrics(params, batch)
    np.testing.assert_allclose(ours, np.broadcast_to(target, (1, 6, 2)), rtol=1e-6)
    assert float(metrics["value/target"]) == pytest.approx(np.mean(target))
    np.testing.assert_allclose(metrics["priority"], np.mean(np.abs(10 - np.array(target))), rtol=1e-5)


@pytest.mark.parametrize("name", ["maddpg", "masac"])
def test_a_burn_in_inside_an_episode_is_not_learnt_and_the_start_of_one_is(name):
    """Actions are read by critics at each step, but what they were worth in a burn-in is not fitted."""
    algorithm, config = {"maddpg": (jmarl.maddpg, DDPGConfig), "masac": (jmarl.masac, SACConfig)}[name]
    learner = algorithm(DISCRETE, config(**SMALL, recurrent=True, burn_in=2))
    state, update = jax.jit(learner.init)(jax.random.key(0)), jax.jit(learner.update)
    batch = random_batch(DISCRETE, jax.random.key(1), carry=learner.init_carry((6,)))
    batch = batch.replace(steps=batch.steps.replace(first=batch.steps.first.at[0, 3:].set(False)))
    richer = batch.replace(steps=batch.steps.replace(reward=batch.steps.reward.at[:2].add(100.0)))
    one, two = (update(state, b, jax.random.key(2))[1]["priority"] for b in (batch, richer))
    assert (two[:3] > one[:3] + 10).all() and (two[3:] == one[3:]).all()


def test_a_counterfactual_advantage_and_a_policy_gradient():
    advantage = losses.counterfactual_advantage(jnp.array([1.0, 2.0]), jnp.array([0.2, 0.8]), jnp.array(0))
    assert float(advantage) == pytest.approx(-0.8)
    loss = losses.policy_gradient_loss(jnp.array([1.0, 2.0, 3.0]), jnp.array([1.0, 0.0, -1.0]))
    assert float(loss.mean()) == pytest.approx(2 / 3)  # minus the -2/3 of the sum of A log π


def test_losses_refuse_shapes_that_would_broadcast():
    """Without the type checker of the tests, which users do not have."""
    for loss in (losses.soft_value, losses.temperature_loss):
        with pytest.raises(AssertionError, match=r"arrays have different shapes|assert_equal_shape"):
            inspect.unwrap(loss)(jnp.zeros((4, 3)), jnp.zeros((4, 3, 1)), 0.1)
    with pytest.raises(AssertionError, match=r"arrays have different shapes|assert_equal_shape"):
        inspect.unwrap(losses.policy_gradient_loss)(jnp.zeros(3), jnp.zeros((3, 1)))


def test_the_soft_target_of_each_agent_is_its_own():
    """r = 1, γ = .9, min Q = 10, α = .2, log π = -1: y = 10.18 for agent 0; agent 1 has another Q."""
    spec = CONTINUOUS
    values = jnp.array([10.0, 20.0])
    nets = sac.default_nets(spec, SACConfig())

    def critic(params, carry, x, first):
        return carry, jnp.broadcast_to(values, (2, *x[0].agent_mask.shape)) + 0 * params

    class Policy:  # every action is 0 and has the log-probability -1
        def from_noise(self, noise):
            return jnp.zeros_like(noise), -jnp.ones(noise.shape[:-1])

    nets = nets._replace(
        critic=Network(lambda key: 0.0, critic, lambda shape: ()), distribution=lambda output, mask: Policy()
    )
    params = {"actor": compiled.init(nets.actor, jax.random.key(0)), "critic": jnp.zeros(()), "log_alpha": jnp.log(0.2)}
    cfg = SACConfig(gamma=0.9)
    batch = random_batch(spec, jax.random.key(1), length=1, batch_size=5)
    batch = batch.replace(steps=batch.steps.replace(reward=jnp.ones((1, 5, 2))))

    def target_of(batch):
        return sac.sac_targets(params, params, batch, jnp.zeros((1, 5, 2, 1)), nets=nets, cfg=cfg)

    target = jax.jit(target_of)(batch)
    np.testing.assert_allclose(target, np.broadcast_to([10.18, 19.18], (1, 5, 2)), rtol=1e-5)
    _, metrics = jax.jit(lambda *args: critics.critic_loss(*args, nets=nets, cfg=cfg))(params, batch, target)
    np.testing.assert_allclose(metrics["priority"], (0.18 + 0.82) / 2, rtol=1e-4)
    # Who waits has no choice, so its entropy is no part of its value.
    waiting = batch.steps.next_obs.replace(agent_mask=jnp.zeros((1, 5, 2), bool))
    target = jax.jit(target_of)(batch.replace(steps=batch.steps.replace(next_obs=waiting)))
    np.testing.assert_allclose(target, np.broadcast_to([10.0, 19.0], (1, 5, 2)), rtol=1e-5)


@pytest.mark.parametrize("others, slope", [("stored", 3.0), ("current", 5.0), ("joint", 5.0)])
def test_slope_of_an_agents_action_in_a_product(others, slope):
    """Q = a1 a2 with a2 = 3 stored and 5 current; agent 2 learns from agent 1's loss only if it is told to."""
    current, stored = (jnp.broadcast_to(jnp.array([[2.0], [x]]), (1, 6, 2, 1)) for x in (5.0, 3.0))

    def product(params, carry, x, first):
        _, own, others = x
        return carry, jnp.prod(actor_critic.joint_actions(own, others).joined(), axis=-1)[None]

    critic = Network(lambda key: (), product, lambda shape: ())
    cfg = DDPGConfig(other_actions=others, critic_view="state", **SMALL)
    nets = ddpg.default_nets(CONTINUOUS, cfg)._replace(critic=critic)
    batch = random_batch(CONTINUOUS, jax.random.key(0), length=1)
    batch = batch.replace(steps=batch.steps.replace(action=nets.code.decode(stored)))

    def loss_of_agent_1(current):
        q = critics.read(batch, nets, cfg).values({"critic": ()}, current)[0]
        return losses.deterministic_policy_loss(q)[0, 0, 0]

    grad = -jax.jit(jax.grad(loss_of_agent_1))(current)[0, 0, :, 0]
    np.testing.assert_allclose(grad, [slope, 2.0 if others == "joint" else 0.0], rtol=1e-6)


@pytest.mark.parametrize(
    "module, cfg",
    [
        (ddpg, DDPGConfig(critic_view="state")),
        (sac, SACConfig(critic_view="state")),
        (sac, SACConfig(critic_view="state", own_action="input")),
        (None, COMAConfig()),
        (None, COMAConfig(own_action="input")),
    ],
)
@pytest.mark.parametrize("spec", [DISCRETE, CONTINUOUS], ids=["discrete", "continuous"])
def test_a_central_critic_sees_what_the_others_do_if_they_act(module, cfg, spec):
    if module is None and spec is CONTINUOUS:
        spec = DISCRETE._replace(num_actions=4)  # another size: COMA has discrete actions only
    nets = (module.default_nets if module else coma_nets)(spec, cfg.replace(hidden_sizes=(8,)))
    batch, code = random_batch(spec, jax.random.key(0), length=1), critics.action_code(spec)
    params, obs = compiled.init(nets.critic, jax.random.key(1)), batch.steps.obs

    @jax.jit
    def q(action, obs):
        coded = code.encode(action)
        values = nets.critic.apply(params, nets.critic.init_carry((6,)), (obs, coded, coded), batch.steps.first)[1]
        return values if module else values[None]

    action = batch.steps.action
    other = action.at[:, :, 1].set(1 - action[:, :, 1])
    assert (q(action, obs)[:, :, :, 0] != q(other, obs)[:, :, :, 0]).any()
    waits = obs.replace(agent_mask=obs.agent_mask.at[:, :, 1].set(False))
    np.testing.assert_array_equal(q(action, waits), q(other, waits))


def asked_for_each(net):
    """A critic with a value for each own action, of one that reads the own action."""

    def apply(params, carry, x, first):
        obs, _, others = x
        own = [jnp.broadcast_to(jax.nn.one_hot(action, 3), others.shape) for action in range(3)]
        carries, values = zip(*[net.apply(params, carry, (obs, action, others), first) for action in own], strict=True)
        return carries[0], jnp.stack(values, axis=-1)

    return net._replace(apply=apply)


@pytest.mark.parametrize("algorithm", ["isac", "masac", "masac-recurrent", "coma"])
def test_a_critic_that_reads_the_own_action_is_as_good_as_one_with_a_value_for_each(algorithm):
    name, _, recurrent = algorithm.partition("-")
    config, nets_of = (COMAConfig, coma_nets) if name == "coma" else (SACConfig, sac.default_nets)
    view = "obs" if name == "isac" else "state_obs"
    cfg = config(hidden_sizes=(8,), cell_size=4, critic_view=view, own_action="input", recurrent=bool(recurrent))
    nets = nets_of(DISCRETE, cfg)
    learners = {
        "input": getattr(jmarl, name)(DISCRETE, cfg, nets),
        "output": getattr(jmarl, name)(
            DISCRETE, cfg.replace(own_action="output"), nets._replace(critic=asked_for_each(nets.critic))
        ),
    }
    state, after = compiled.init(learners["input"], jax.random.key(0)), {}
    batch = random_batch(DISCRETE, jax.random.key(1))
    if name == "coma":
        size = batch.steps.first.shape
        batch = batch.replace(steps=batch.steps.replace(measured={"epsilon": jnp.full(size, 0.1)}))
    for kind, learner in learners.items():
        after[kind] = jax.jit(learner.update)(state, batch, jax.random.key(2))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-6), after["input"], after["output"])
    assert float(after["input"][1]["loss/critic_grad_norm" if name != "coma" else "loss/grad_norm"]) > 0


# -------------------------------------------------------------------------------------------------------- invariances


SMALL = {"hidden_sizes": (8,), "cell_size": 4, "max_grad_norm": None}
LEARNERS = {
    "matd3-continuous": (jmarl.matd3, TD3Config(**SMALL, policy_delay=1, actor_q="min"), CONTINUOUS),
    "maddpg-discrete-recurrent": (jmarl.maddpg, DDPGConfig(**SMALL, recurrent=True), DISCRETE),
    "isac-discrete": (jmarl.isac, SACConfig(**SMALL), DISCRETE),
    "masac-discrete": (jmarl.masac, SACConfig(**SMALL), DISCRETE),
    "masac-discrete-input": (jmarl.masac, SACConfig(**SMALL, own_action="input", recurrent=True), DISCRETE),
    "masac-continuous": (jmarl.masac, SACConfig(**SMALL, alpha_per_agent=True, other_actions="current"), CONTINUOUS),
}


@pytest.mark.parametrize("name", LEARNERS)
def test_padding_and_inactive_agents_change_nothing_and_every_parameter_learns(name):
    algorithm, cfg, spec = LEARNERS[name]
    learner = algorithm(spec, cfg)
    require_padding_and_inactive_agents_change_nothing(learner, spec, learner.init_carry((6,)))


@pytest.mark.parametrize("name", ["maddpg-discrete-recurrent", "masac-continuous"])
def test_an_empty_batch_moves_nothing(name):
    algorithm, cfg, spec = LEARNERS[name]
    learner = algorithm(spec, cfg)
    state = jax.jit(learner.init)(jax.random.key(0))
    batch = random_batch(spec, jax.random.key(1), carry=learner.init_carry((6,)))
    batch = batch.replace(weight=jnp.zeros_like(batch.weight))
    new, metrics = jax.jit(learner.update)(state, batch, jax.random.key(2))
    assert float(metrics["loss/critic"]) == float(metrics["loss/actor"]) == 0.0
    for x, y in zip(jax.tree.leaves(state.params), jax.tree.leaves(new.params), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    "algorithm, cfg, base, sharing, recurrent",
    [
        (jmarl.matd3, TD3Config(**SMALL), CONTINUOUS, "per_group", False),
        (jmarl.maddpg, DDPGConfig(**SMALL), DISCRETE, "per_agent", False),
        (jmarl.masac, SACConfig(**SMALL), CONTINUOUS, "per_agent", False),
        (jmarl.isac, SACConfig(**SMALL), DISCRETE, "per_group", False),
        (jmarl.masac, SACConfig(**SMALL, own_action="input"), DISCRETE, "per_group", True),
    ],
)
def test_agents_of_different_sizes_act_within_their_own(algorithm, cfg, base, sharing, recurrent):
    """simple_tag's kind of agents: the second has two of three actions, or one of two dimensions."""
    spec = base._replace(obs_sizes=(1, 1), action_sizes=(3, 2) if base.is_discrete else (2, 1))
    if not base.is_discrete:
        spec = spec._replace(action_size=2, action_low=((-1.0, 0.0),) * 2, action_high=((1.0, 4.0),) * 2)
    learner = algorithm(spec, cfg.replace(sharing=sharing, recurrent=recurrent))
    carry, obs = learner.init_carry((50,)), zero_observation(spec, (50,))
    if base.is_discrete:
        obs = obs.replace(action_mask=obs.action_mask.at[:, 1, 2].set(False))
    batch = random_batch(spec, jax.random.key(2), carry=learner.init_carry((6,)))

    @jax.jit
    def act_and_learn(key):
        state = training.init_state(learner, key)
        return *learner.act(state, carry, obs, jnp.ones(50, bool), key), learner.update(state, batch, key)[1]

    action, new, measured, metrics = act_and_learn(jax.random.key(0))
    assert jax.tree.structure(new) == jax.tree.structure(carry) and measured == {}
    assert np.isfinite(metrics["loss/critic"]) and np.isfinite(metrics["loss/actor"])
    if base.is_discrete:
        assert action.dtype == jnp.int32 and (action[:, 1] < 2).all() and (action[:, 0] == 2).any()
    else:
        low, high = np.array(spec.action_low), np.array(spec.action_high)
        assert ((action >= low) & (action <= high)).all() and float(action[:, :, 1].max()) > 2.0


def test_padded_action_dimensions_do_not_matter():
    spec = CONTINUOUS._replace(
        action_size=2, action_sizes=(2, 1), action_low=((-1.0,) * 2,) * 2, action_high=((1.0,) * 2,) * 2
    )
    learner = jmarl.masac(spec, SACConfig(**SMALL))
    state, update = jax.jit(learner.init)(jax.random.key(0)), jax.jit(learner.update)
    batch = random_batch(spec, jax.random.key(1))
    spoilt = batch.replace(steps=batch.steps.replace(action=batch.steps.action.at[:, :, 1, 1].set(0.77)))
    new, same = (update(state, b, jax.random.key(2))[0] for b in (batch, spoilt))
    for x, y in zip(jax.tree.leaves(new.params), jax.tree.leaves(same.params), strict=True):
        np.testing.assert_array_equal(x, y)


def test_td3_moves_actors_and_targets_at_every_second_update():
    learner = jmarl.matd3(CONTINUOUS, TD3Config(**SMALL, tau=0.5))
    states, update = [jax.jit(learner.init)(jax.random.key(0))], jax.jit(learner.update)
    for k in range(3):
        states.append(update(states[-1], random_batch(CONTINUOUS, jax.random.key(k)), jax.random.key(k))[0])

    def moved(k, part):
        pairs = zip(jax.tree.leaves(part(states[k])), jax.tree.leaves(part(states[k + 1])), strict=True)
        return any((x != y).any() for x, y in pairs)

    assert [moved(k, lambda s: s.params["critic"]) for k in range(3)] == [True] * 3
    assert [moved(k, lambda s: s.params["actor"]) for k in range(3)] == [False, True, False]
    assert [moved(k, lambda s: s.target_params) for k in range(3)] == [False, True, False]
    assert [moved(k, lambda s: s.opt_state["actor"]) for k in range(3)] == [False, True, False]


def test_recurrent_critics_remember_observations_and_what_acting_recorded_is_where_sequences_start():
    env = envs.probe("memory", num_agents=2)
    learner = jmarl.masac(env.spec, SACConfig(**SMALL, recurrent=True))
    run = compiled.start(env, learner, jax.random.key(0), num_envs=3)
    _, trajectory, _ = compiled.rollout(env, learner, run, length=6)
    nets = sac.default_nets(env.spec, SACConfig(**SMALL, recurrent=True, critic_view="state"))
    steps, recorded = trajectory.steps, trajectory.steps.carry
    code = nets.code.encode(steps.action)
    inputs = {"actor": steps.obs, "critic": (steps.obs, code, code)}
    for name, net in {"actor": nets.actor, "critic": nets.critic}.items():
        carry, _ = net.apply(
            run.train_state.params[name],
            trajectory.carry[name],
            jax.tree.map(lambda x: x[:3], inputs[name]),
            steps.first[:3],
        )
        for x, y in zip(jax.tree.leaves(carry), jax.tree.leaves(recorded[name]), strict=True):
            np.testing.assert_allclose(x, y[3], rtol=1e-5, atol=1e-6)


def test_ornstein_uhlenbeck_noise_starts_anew_with_the_episode_and_has_a_memory():
    cfg = DDPGConfig(**SMALL, noise="ornstein_uhlenbeck", noise_start=0.1, noise_schedule="constant")
    learner = jmarl.iddpg(CONTINUOUS, cfg)

    @jax.jit
    def noise_after(key):
        state, carry = training.init_state(learner, key), learner.init_carry((1000,))
        carry = {**carry, "noise": jnp.ones_like(carry["noise"])}
        obs, first = zero_observation(CONTINUOUS, (1000,)), jnp.arange(1000) < 500
        return learner.act(state, carry, obs, first, key)[1]["noise"]

    noise = np.asarray(noise_after(jax.random.key(0)))
    assert noise[:500].mean() == pytest.approx(0.0, abs=0.02) and noise[500:].mean() == pytest.approx(0.85, abs=0.02)
    assert noise.std(axis=0)[0] > 0


def test_random_steps_are_random_and_noise_decays():
    cfg = DDPGConfig(**SMALL, noise_start=0.0, noise_end=0.0, random_steps=100)
    learner = jmarl.iddpg(CONTINUOUS, cfg)
    state, obs = compiled.init(learner, jax.random.key(0)), zero_observation(CONTINUOUS, (4000,))
    carry, first = learner.init_carry((4000,)), jnp.ones(4000, bool)

    @jax.jit
    def act(env_steps):
        return learner.act(dataclasses.replace(state, env_steps=env_steps), carry, obs, first, jax.random.key(1))[0]

    early, late = act(jnp.int32(99)), act(jnp.int32(100))
    assert float(early.std()) == pytest.approx(3**-0.5, rel=0.05) and float(late.std(axis=0).max()) == 0.0


def test_advantage_actor_critic_follows_the_plain_policy_gradient():
    """One step at a ratio of 1: the gradient is that of -A log π."""
    env = envs.probe("action_observation", num_agents=2)
    cfg = A2CConfig(hidden_sizes=(8,), ent_coef=0.0, vf_coef=0.0)
    nets = ppo.default_policy(env.spec, cfg)
    learner = jmarl.ia2c(env.spec, cfg)
    run = compiled.start(env, learner, jax.random.key(0), num_envs=4)
    _, batch, _ = compiled.rollout(env, learner, run, length=3)
    steps = batch.steps
    value = steps.measured["value"]
    advantage = jax.random.normal(jax.random.key(1), value.shape)
    old = ppo.PPOTargets(log_prob=steps.measured["log_prob"], value=value, advantage=advantage, value_target=value)

    def policy_gradient(params):
        log_prob = nets.evaluate(params, batch.carry, steps.obs, steps.first, steps.action)[0]
        return jnp.mean(losses.policy_gradient_loss(log_prob, advantage))

    ours = jax.jit(jax.grad(lambda p: jmarl.ppo_loss(p, batch, old, nets=nets, cfg=cfg)[0]))(run.train_state.params)
    expected = jax.jit(jax.grad(policy_gradient))(run.train_state.params)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["action", "continuous"])
def test_random_actions_are_legal_even_and_new_at_each_step(kind):
    env = envs.probe(kind, num_agents=2)
    learner = jmarl.random_policy(env.spec, RandomConfig())
    state, obs = learner.init(jax.random.key(0)), zero_observation(env.spec, (2000,))
    carry, first = learner.init_carry((2000,)), jnp.ones(2000, bool)
    greedy = jax.jit(learner.greedy)
    one, carry = greedy(state, carry, obs, first)
    two, _ = greedy(state, carry, obs, first)
    assert (one != two).any()
    assert float(jnp.mean(one.astype(float))) == pytest.approx(0.5 if kind == "action" else 0.0, abs=0.05)
    metrics = compiled.evaluate(env, learner, state, jax.random.key(1), num_episodes=1000)
    # The mean of -(a - c / 2)² with a even on [-1, 1] and c = ±1.
    assert float(metrics["eval/return_mean"]) == pytest.approx(0.5 if kind == "action" else -7 / 12, abs=0.05)


# ---------------------------------------------------------------------------------------------- games of known solution


def greedy_returns(loop, cfg, num_iterations, num_seeds=2):
    """Greedy return of each seed, averaged over agents."""

    def train(key):
        run, _ = jmarl.make_train(loop, num_iterations)(key, cfg)
        learner = loop.algorithm(loop.env.spec, cfg)
        return jmarl.evaluate(loop.env, learner, run.train_state, key, num_episodes=16)["eval/return_mean"]

    return np.asarray(jax.jit(jax.vmap(train))(jax.random.split(jax.random.key(0), num_seeds)))


def off_policy(env, algorithm, length=1, **options):
    options = {"num_envs": 8, "rollout_length": length, "warmup_steps": 64, "num_updates": 2} | options
    return jmarl.off_policy(env, algorithm, buffer=buffers.uniform(2000, 32, length), **options)


QUICK = {"learning_rate": 3e-3, "hidden_sizes": (16,), "tau": 0.05}
COMA = COMAConfig(
    learning_rate=1e-2,
    hidden_sizes=(16,),
    critic_sizes=(16,),
    cell_size=16,
    tau=0.1,
    epsilon_steps=4000,
    normalize_advantage="all",
)


@pytest.mark.parametrize(
    "algorithm, cfg",
    [
        (jmarl.maddpg, DDPGConfig(**QUICK)),
        (jmarl.isac, SACConfig(**QUICK, target_entropy=-3.0)),
    ],
)
def test_continuous_actors_find_the_target(algorithm, cfg):
    env = envs.probe("continuous", num_agents=2)
    assert (greedy_returns(off_policy(env, algorithm), cfg, 400) > -0.02).all()


@pytest.mark.parametrize(
    "algorithm, cfg",
    [
        (jmarl.maddpg, DDPGConfig(**QUICK, random_steps=1000)),
        (jmarl.masac, SACConfig(**QUICK, alpha=0.5, learn_alpha=False)),
        (jmarl.masac, SACConfig(**QUICK, alpha=0.5, learn_alpha=False, own_action="input")),
    ],
)
def test_discrete_actors_with_central_critics_coordinate(algorithm, cfg):
    env = envs.matrix_game([[1.0, 0.0], [0.0, 2.0]])
    assert (greedy_returns(off_policy(env, algorithm), cfg, 300) == 2.0).all()


def test_recurrent_actors_remember_the_cue():
    """Seen on the first of three steps, asked for on the last; critics must read action and memory together."""
    cfg = DDPGConfig(**QUICK).replace(recurrent=True, cell_size=8, gamma=0.95, learning_rate=1e-2)
    loop = off_policy(envs.probe("memory", num_agents=2, num_steps=3), jmarl.maddpg, length=3, num_updates=1)
    assert (greedy_returns(loop, cfg, 300, num_seeds=1) == 1.0).all()


def test_a_time_limit_bootstraps():
    """Reward 1 on each of 10 steps, then truncated: V = 1 / (1 - γ), also at the end."""
    cfg = SACConfig(**QUICK).replace(gamma=0.8, hidden_sizes=(8,), learning_rate=1e-2, alpha=1e-3, learn_alpha=False)
    loop = off_policy(envs.probe("time_limit"), jmarl.isac)
    _, metrics = jax.jit(jmarl.make_train(loop, 300))(jax.random.key(0), cfg)
    assert float(metrics["value/q_taken"][-1]) == pytest.approx(5.0, rel=0.05)


@pytest.mark.parametrize("returns", ["td_lambda", "n_step"])
def test_coma_coordinates(returns):
    loop = jmarl.on_policy(envs.matrix_game([[1.0, 0.0], [0.0, 2.0]]), jmarl.coma, num_envs=32, rollout_length=4)
    assert (greedy_returns(loop, COMA.replace(returns=returns), 300) == 2.0).all()


def test_coma_coordinates_with_a_critic_that_reads_the_own_action():
    """An entropy bonus keeps actors from being of one mind before the critic tells the actions apart."""
    loop = jmarl.on_policy(envs.matrix_game([[1.0, 0.0], [0.0, 2.0]]), jmarl.coma, num_envs=32, rollout_length=4)
    cfg = COMA.replace(own_action="input", normalize_advantage="none", ent_coef=0.3)
    assert (greedy_returns(loop, cfg, 300) == 2.0).all()


def test_coma_with_recurrent_actors_remembers_the_cue():
    """Its critic has no memory, so the state must tell it what the actors saw."""
    env = envs.probe("memory", num_agents=2)
    env_reset, env_step = env.reset, env.step

    def with_state(env_state, obs):
        return env_state, obs.replace(state=env_state[0])

    def step(env_state, action, key):
        *seen, outcome = env_step(env_state, action, key)
        return *with_state(*seen), outcome

    env = env._replace(reset=lambda key: with_state(*env_reset(key)), step=step)
    env = env._replace(spec=env.spec._replace(state_shape=(2,)))
    loop = jmarl.on_policy(env, jmarl.coma, num_envs=32, rollout_length=4)
    assert (greedy_returns(loop, COMA.replace(recurrent=True, team_reward="individual"), 300) == 1.0).all()


def test_maa2c_coordinates():
    loop = jmarl.on_policy(envs.matrix_game([[1.0, 0.0], [0.0, 2.0]]), jmarl.maa2c, num_envs=32, rollout_length=4)
    cfg = A2CConfig(learning_rate=1e-2, hidden_sizes=(16,))
    assert (greedy_returns(loop, cfg, 200) == 2.0).all()


# ---------------------------------------------------------------------------------------------------------- bad input


def test_infinite_bounds_are_refused():
    spec = CONTINUOUS._replace(action_high=((np.inf,), (1.0,)))
    with pytest.raises(ValueError, match="continuous has no finite action bounds, but"):
        jmarl.maddpg(spec, DDPGConfig())


def test_an_unusual_sign_of_the_target_entropy_is_warned_of():
    with pytest.warns(UserWarning, match="target_entropy=2.0 has an unusual sign"):
        jmarl.isac(CONTINUOUS, SACConfig(target_entropy=2.0))
    with pytest.warns(UserWarning, match="of discrete actions are aimed at positive values"):
        jmarl.isac(DISCRETE, SACConfig(target_entropy=-1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jmarl.isac(CONTINUOUS, SACConfig(target_entropy=-2.0))


BAD = [
    (jmarl.coma, CONTINUOUS, COMAConfig(), "COMA's critic has a value for each of finitely many actions"),
    (jmarl.maddpg, DISCRETE, DDPGConfig(other_actions="old"), "other_actions='old' is unknown here: choose one"),
    (jmarl.maddpg, DISCRETE, DDPGConfig(noise="pink"), "noise='pink' is unknown here: choose one of gaussian"),
    (jmarl.maddpg, DISCRETE, DDPGConfig(tau=2.0), r"tau=2.0 must lie in \[0, 1\]"),
    (jmarl.iddpg, CONTINUOUS, DDPGConfig(noise_start=-1.0), "noise_start=-1.0 must not be negative"),
    (jmarl.matd3, DISCRETE, TD3Config(policy_delay=0), "policy_delay=0 must be at least 1"),
    (jmarl.isac, DISCRETE, SACConfig(alpha=0.0), "alpha=0.0 must be positive"),
    (jmarl.isac, DISCRETE, SACConfig(log_std_min=2.0), "log_std_max=2.0 must lie above log_std_min=2.0"),
    (jmarl.isac, DISCRETE, SACConfig(gamma=1.5), r"gamma=1.5 must lie in \[0, 1\]"),
    (jmarl.isac, DISCRETE, SACConfig(cell=None), "cell=None has no meaning: leave it out for 'gru'"),
    (jmarl.isac, DISCRETE, SACConfig(head_sizes=8), r"head_sizes=8 must hold one width for each layer"),
    (jmarl.iddpg, DISCRETE, DDPGConfig(gumbel_temperature=0.0), "gumbel_temperature=0.0 must be positive"),
    (jmarl.iddpg, CONTINUOUS, DDPGConfig(noise_schedule="cosine"), "noise_schedule='cosine' is unknown here"),
    (jmarl.iddpg, CONTINUOUS, DDPGConfig(noise_schedule="exponential", noise_end=0), "noise_end=0 must be positive"),
    (jmarl.itd3, CONTINUOUS, TD3Config(target_noise=-0.1), "target_noise=-0.1 must not be negative"),
    (jmarl.isac, DISCRETE, SACConfig(burn_in=2), "burn_in=2 warms up recurrent networks"),
    (jmarl.isac, DISCRETE, SACConfig(update_order="both"), "update_order='both' is unknown here"),
    (jmarl.masac, DISCRETE, SACConfig(own_action="both"), "own_action='both' is unknown here: choose one of output"),
    (jmarl.hasac, DISCRETE, jmarl.HASACConfig(own_action="output"), "own_action='output' is unknown here: choose"),
    (jmarl.masac, DISCRETE._replace(state_shape=(0,)), SACConfig(), "global state, but matrix_game has state_shape"),
    (jmarl.iddpg, DISCRETE._replace(obs_shape=(5, 5, 3)), DDPGConfig(), "has images: make it with flatten=True"),
    (jmarl.ia2c, DISCRETE, A2CConfig(num_epochs=4), "takes one step on each rollout, but num_epochs=4"),
    (jmarl.maddpg, DISCRETE, DDPGConfig(critic_view="obs"), "critic_view='obs' makes iddpg of maddpg"),
    (jmarl.matd3, DISCRETE, TD3Config(critic_view="obs"), "critic_view='obs' makes itd3 of matd3"),
    (jmarl.masac, DISCRETE, SACConfig(critic_view="obs"), "critic_view='obs' makes isac of masac"),
    (jmarl.coma, DISCRETE, COMAConfig(critic_view="obs"), "critic_view='obs' is unknown here: choose one of state"),
]  # fmt: skip


@pytest.mark.parametrize("algorithm, spec, cfg, message", BAD)
def test_bad_configs(algorithm, spec, cfg, message):
    with pytest.raises(ValueError, match=message):
        algorithm(spec, cfg)


@pytest.mark.parametrize(
    "algorithm, name, cfg",
    [
        (jmarl.itd3, "TD3Config", DDPGConfig()),
        (jmarl.iddpg, "DDPGConfig", SACConfig()),
        (jmarl.isac, "SACConfig", DDPGConfig()),
        (jmarl.coma, "COMAConfig", A2CConfig()),
    ],
)
def test_every_algorithm_takes_its_own_config(algorithm, name, cfg):
    """Said by ourselves: without the type checker of the tests, which users do not have."""
    with pytest.raises(TypeError, match=rf"cfg is {type(cfg).__name__} here, and this algorithm takes {name}: {name}"):
        inspect.unwrap(algorithm)(DISCRETE, cfg)


# ---------------------------------------------------------------------------------------------------------- opponents


def test_teams_play_each_with_its_own_policy_state_and_memory():
    env = envs.matrix_game([[0.0, 5.0, 1.0], [2.0, 3.0, 4.0], [0.0, 0.0, 0.0]])
    always = [jmarl.scripted(lambda obs, a=a: jnp.full(obs.agent_mask.shape, a)) for a in (1, 2)]
    learner = jmarl.isac(env.spec, SACConfig(**SMALL, recurrent=True))
    match = jmarl.evaluation.teams(always, [[1], [0]])  # agent 1 plays 1, agent 0 plays 2
    metrics = compiled.evaluate(env, match, match.init(jax.random.key(0)), jax.random.key(1), num_episodes=3)
    assert float(metrics["eval/return_mean"]) == 0.0
    swapped = jmarl.evaluation.teams(always, [[0], [1]])
    metrics = compiled.evaluate(env, swapped, swapped.init(jax.random.key(0)), jax.random.key(1), num_episodes=3)
    assert float(metrics["eval/return_mean"]) == 4.0
    mixed = jmarl.evaluation.teams([learner, always[0]], [[0], [1]])
    state, carry = compiled.init(mixed, jax.random.key(0)), mixed.init_carry((5,))
    obs = zero_observation(env.spec, (5,))
    action, new = jax.jit(mixed.greedy)(state, carry, obs, jnp.ones(5, bool))
    assert (action[:, 1] == 1).all() and jax.tree.structure(new) == jax.tree.structure(carry)
    with pytest.raises(TypeError, match="teams play and do not learn"):
        mixed.update(state, None, jax.random.key(2))


def test_teams_without_an_agent_are_refused():
    learner = jmarl.random_policy(DISCRETE, RandomConfig())
    with pytest.raises(ValueError, match=r"members=\[\[0\], \[0\]\] must name every agent once"):
        jmarl.evaluation.teams([learner, learner], [[0], [0]])
