"""PQN of independent agents and with a monotonic mixer: targets by hand, games, bad input; and dueling networks."""

import inspect

import compiled
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_batches import random_batch
from turns import GAMMA, VALUES, turns

import jmarl
from jmarl import PQNConfig, PQNIQLConfig, PQNQMIXConfig, QConfig, envs, networks
from jmarl.learners import pqn, q_learning
from jmarl.networks import mixers

SMALL = {"hidden_sizes": (8,), "num_epochs": 1, "num_minibatches": 1}
MIX = {"mixer_embed_size": 4, "mixer_hypernet_sizes": ()}


@pytest.mark.parametrize("team_reward", ["individual", "mean"])
@pytest.mark.parametrize("recurrent", [False, True])
def test_targets_of_independent_agents_match_a_loop_over_steps(recurrent, team_reward):
    """With a memory, episodes cut off on the way, and an agent that is dead while the other goes on."""
    env = envs.probe("time_limit", num_agents=2, num_steps=3)
    own = {"sharing": "per_agent", "team_reward": team_reward}
    cfg = PQNIQLConfig(**SMALL, **own, recurrent=recurrent, cell_size=8, lambda_=0.8)
    learner, agent = jmarl.pqn_iql(env.spec, cfg), q_learning.agent_network(env.spec, cfg)
    run, batch, _ = compiled.play(env, learner, jax.random.key(0), num_envs=4, length=8)
    alive, weight = np.ones((8, 4, 2), bool), np.ones((8, 4, 2))
    alive[2:, :2, 1], weight[3:, :2, 1] = False, 0
    terminated = batch.steps.terminated.at[2, :2, 1].set(True).at[5, 2].set(True)
    steps = batch.steps.replace(
        obs=batch.steps.obs.replace(agent_mask=jnp.asarray(weight > 0)),
        next_obs=batch.steps.next_obs.replace(agent_mask=jnp.asarray(alive)),
        terminated=terminated,
        last=batch.steps.last.at[5, 2].set(True),
        reward=jnp.where(weight > 0, batch.steps.reward * jnp.array([1.0, 3.0]), jnp.nan),
    )
    ends = np.asarray(terminated)
    reward = np.where(weight > 0, np.asarray(batch.steps.reward) * [1.0, 3.0], 0.0)
    if team_reward == "mean":
        reward = np.broadcast_to(reward.mean(-1, keepdims=True), reward.shape)
        ends = np.broadcast_to(ends.all(-1, keepdims=True), ends.shape)
    after, targets = np.zeros((4, 2)), np.zeros((8, 4, 2))
    next_q = jax.jit(networks.one_step(agent))
    for t in reversed(range(8)):
        now = jax.tree.map(lambda x, t=t: x[t], steps)
        carry = batch.next_carry if t == 7 else jax.tree.map(lambda x, t=t: x[t + 1], batch.steps.carry)
        q = next_q(run.train_state.params["agent"], carry, now.next_obs, np.zeros(4, bool))[1]
        best = np.max(q, axis=-1)
        if team_reward == "mean":  # one that is gone goes on with the value of the other
            best = np.where(alive[t], best, best[:, ::-1])
        cut = (np.asarray(now.last) | (t == 7))[:, None]
        after = reward[t] + 0.9 * ~ends[t] * np.where(cut, best, 0.2 * best + 0.8 * after)
        targets[t] = after
    batch = batch.replace(steps=steps, weight=jnp.asarray(weight, jnp.float32))
    _, metrics = jax.jit(learner.update)(run.train_state, batch, jax.random.key(0))
    np.testing.assert_allclose(metrics["value/target"], targets[weight > 0].mean(), rtol=1e-5)


def test_the_monotonic_mixer_makes_values_and_targets():
    """One step of a team: the loss is (f(q) - r - γ f(q'))², f the mixer with the state's weights."""
    spec = envs.matrix_game(np.zeros((3, 3))).spec
    cfg = PQNQMIXConfig(**SMALL, **MIX)
    learner, nets = jmarl.pqn_qmix(spec, cfg), pqn.default_nets(spec, cfg)
    state = compiled.init(learner, jax.random.key(0))
    batch = random_batch(spec, jax.random.key(1), length=1, batch_size=4)
    steps, params = batch.steps, state.params["mixer"]
    values = jax.jit(nets.agent.apply)
    q = values(state.params["agent"], (), steps.obs, steps.first)[1]
    next_q = np.asarray(values(state.params["agent"], (), steps.next_obs, steps.first)[1])
    steps, params = jax.device_get((steps, params))

    def mixed(values, s):
        dense = lambda name: s @ params[name]["Dense_0"]["kernel"] + params[name]["Dense_0"]["bias"]  # noqa: E731
        hidden = values @ np.abs(dense("hyper_w1")).reshape(2, 4) + dense("hyper_b1")
        bias = params["hyper_b2"]
        late = np.maximum(dense("hyper_b2"), 0) @ bias["Dense_1"]["kernel"] + bias["Dense_1"]["bias"]
        return np.where(hidden > 0, hidden, np.exp(hidden) - 1) @ np.abs(dense("hyper_w2")) + late[0]

    errors = []
    for m in range(4):
        taken = np.take_along_axis(np.asarray(q[0, m]), np.asarray(steps.action[0, m])[:, None], -1)[:, 0]
        best = np.asarray(next_q[0, m]).max(-1)
        target = float(steps.reward[0, m].sum()) + 0.9 * mixed(best, np.asarray(steps.next_obs.state[0, m]))
        errors.append(mixed(taken, np.asarray(steps.obs.state[0, m])) - target)
    batch = batch.replace(steps=steps.replace(measured={"q": q}))
    new, metrics = jax.jit(learner.update)(state, batch, jax.random.key(0))
    np.testing.assert_allclose(metrics["loss/td"], np.mean(np.square(errors)), rtol=1e-4)
    moved = jax.tree.map(lambda x, y: not np.array_equal(x, y), state.params, new.params)
    assert all(jax.tree.leaves(moved)), moved


def test_independent_agents_with_parameters_of_their_own_learn_as_if_alone():
    spec = envs.matrix_game(np.zeros((3, 3))).spec
    cfg = PQNIQLConfig(**SMALL, sharing="per_agent", max_grad_norm=0.1)
    learner, nets = jmarl.pqn_iql(spec, cfg), pqn.default_nets(spec, cfg)
    state, update = jax.jit(learner.init)(jax.random.key(0)), jax.jit(learner.update)
    batch = random_batch(spec, jax.random.key(1))
    q = jax.jit(nets.agent.apply)(state.params["agent"], (), batch.steps.obs, batch.steps.first)[1]
    batch = batch.replace(steps=batch.steps.replace(measured={"q": q}))
    scaled = batch.replace(steps=batch.steps.replace(reward=batch.steps.reward * jnp.array([1.0, 1000.0])))
    one, two = (update(state, b, jax.random.key(2))[0].params for b in (batch, scaled))
    same = lambda i: [bool((x[i] == y[i]).all()) for x, y in zip(*map(jax.tree.leaves, (one, two)), strict=True)]  # noqa: E731
    assert all(same(0)) and not any(same(1))
    alone = [batch.replace(weight=batch.weight.at[:, :, i].set(0.0)) for i in (0, 1)]
    both, *each = (float(update(state, b, jax.random.key(2))[1]["loss/td"]) for b in (batch, *alone))
    assert both == pytest.approx(sum(each), rel=1e-5)  # a sum of means, each of one agent's steps


@pytest.mark.parametrize("algorithm, cls", [(jmarl.pqn_iql, PQNIQLConfig), (jmarl.pqn_qmix, PQNQMIXConfig)])
def test_what_a_turn_is_worth(algorithm, cls):
    """Agents take turns; with "mean" everyone's return is the team's."""
    env = turns()
    cfg = cls(
        gamma=GAMMA, hidden_sizes=(16,), num_minibatches=1, learning_rate=1e-2, team_reward="mean", layer_norm=False
    )
    loop = jmarl.on_policy(env, algorithm, num_envs=8, rollout_length=8)
    run, _ = jax.jit(jmarl.make_train(loop, 150))(jax.random.key(0), cfg.replace(epsilon_end=1.0))
    nets = pqn.default_nets(env.spec, cfg)
    _, batch, _ = compiled.rollout(env, algorithm(env.spec, cfg), run, length=4)
    obs, params = batch.steps.obs, run.train_state.params
    q = jax.jit(nets.agent.apply)(params["agent"], (), obs, batch.steps.first)[1]
    if nets.mixer is not None:
        value = jax.jit(nets.mixer.apply)(params["mixer"], q, batch.steps.action, obs)[:, 0]
    else:
        value = q[np.arange(4), 0, np.arange(4) % 2, 0]  # of the one that acts
    np.testing.assert_allclose(value, VALUES, atol=0.05)


def test_the_mixer_makes_the_difference_in_the_two_step_game():
    """The game of the QMIX paper: behind the 8 lies what no sum of the agents' values fits."""
    env = envs.two_step_game()
    common = {"learning_rate": 3e-3, "hidden_sizes": (32,), "epsilon_end": 1.0, "gamma": 0.99, "team_reward": "mean"}
    common |= {"num_minibatches": 4, "lambda_": 0.0}
    payoffs = []
    for algorithm, cfg in [
        (jmarl.pqn_vdn, PQNConfig(**common)),
        (jmarl.pqn_qmix, PQNQMIXConfig(**common, mixer_embed_size=8, mixer_hypernet_sizes=())),
    ]:
        loop = jmarl.on_policy(env, algorithm, num_envs=32, rollout_length=4)
        run, _ = jax.jit(jmarl.make_train(loop, 150))(jax.random.key(0), cfg)
        learner = algorithm(env.spec, cfg)
        metrics = compiled.evaluate(env, learner, run.train_state, jax.random.key(1), num_episodes=1)
        payoffs.append(float(metrics["eval/return_mean"]))
    assert payoffs == [7.0, 8.0]


# ------------------------------------------------------------------------------------------------------------ dueling


@pytest.mark.parametrize("sharing", ["shared", "per_agent"])
def test_dueling_outputs_are_a_value_and_advantages_of_mean_zero(sharing):
    spec = envs.matrix_game(np.zeros((3, 3))).spec
    agent = q_learning.agent_network(spec, QConfig(hidden_sizes=(8,), dueling=True, sharing=sharing))
    params = agent.init(jax.random.key(0))
    obs = random_batch(spec, jax.random.key(1)).steps.obs
    q = np.asarray(jax.jit(agent.apply)(params, (), obs, jnp.zeros((4, 6), bool))[1])
    dense = lambda layer, x: x @ layer["kernel"] + layer["bias"]  # noqa: E731
    for i in range(2):
        own = jax.tree.map(lambda x, i=i: np.asarray(x[i]), params) if sharing == "per_agent" else params
        x = np.maximum(dense(own["torso"]["Dense_0"], np.asarray(obs.agents[:, :, i])), 0)
        value, advantage = (dense(own["outputs_0"][name]["out"], x) for name in ("value", "advantage"))
        assert value.shape == (4, 6, 1) and np.std(value) > 0
        np.testing.assert_allclose(q[:, :, i], value + advantage - advantage.mean(-1, keepdims=True), rtol=1e-4)


# ---------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "algorithm, cfg, takes",
    [
        (jmarl.pqn_iql, PQNConfig(), "PQNIQLConfig"),  # its reward is a team's
        (jmarl.pqn_vdn, PQNQMIXConfig(), "PQNConfig"),
        (jmarl.pqn_qmix, PQNConfig(), "PQNQMIXConfig"),
    ],
)
def test_configs_of_other_members_of_the_family_are_refused(algorithm, cfg, takes):
    with pytest.raises(TypeError) as error:
        inspect.unwrap(algorithm)(envs.matrix_game(np.eye(2)).spec, cfg)
    assert str(error.value) == f"cfg is {type(cfg).__name__} here, and this algorithm takes {takes}: {takes}()."


def test_bad_input():
    spec = envs.matrix_game(np.eye(2)).spec
    with pytest.raises(ValueError, match="team_reward='individual' is unknown here: choose one of sum, mean"):
        jmarl.pqn_qmix(spec, PQNQMIXConfig(team_reward="individual"))
    with pytest.raises(ValueError, match="dueling=1 must be True or False"):
        jmarl.pqn_iql(spec, PQNIQLConfig(dueling=1))
    own = pqn.default_nets(spec, PQNIQLConfig())
    with pytest.raises(ValueError, match=r"nets\.mixer is None here: pqn_iql has none, pqn_vdn and pqn_qmix have one"):
        jmarl.pqn_vdn(spec, PQNConfig(), own)
    with pytest.raises(ValueError, match=r"nets\.mixer is given here: pqn_iql has none"):
        jmarl.pqn_iql(spec, PQNIQLConfig(), own._replace(mixer=mixers.vdn()))
