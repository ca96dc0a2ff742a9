"""IQL, VDN, QMIX, weighted QMIX and PQN: known answers, invariances, games with known solutions, bad input."""

import dataclasses
import inspect
import itertools
import warnings

import compiled
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from hypothesis import given
from hypothesis import strategies as st
from random_batches import random_batch, require_padding_and_inactive_agents_change_nothing

import jmarl
from jmarl import PQNConfig, QConfig, QMIXConfig, VDNConfig, WQMIXConfig, buffers, envs, exploration, losses
from jmarl.learners import parts, q_learning, replay, wqmix
from jmarl.networks import mixers
from jmarl.types import Network, Trajectory, Transition, zero_observation

TRUE = jnp.ones(2, bool)

# ------------------------------------------------------------------------------------------------------ known answers


def test_double_q_values_what_the_online_network_chose():
    next_q = losses.next_q(jnp.array([1.0, 3.0]), jnp.array([10.0, 2.0]), TRUE)
    assert float(1 + 0.9 * next_q) == pytest.approx(2.8)  # wrong: 10


def test_only_actions_legal_in_the_successor_count():
    q = jnp.array([5.0, 1.0, 9.0])
    assert float(1 + 0.9 * losses.next_q(q, q, jnp.array([True, True, False]))) == pytest.approx(5.5)  # wrong: 9.1


def table_network(table):
    """A network without parameters: an agent's view is the index of its row of values."""
    values = jnp.asarray(table)
    return Network(
        init=lambda key: {},
        apply=lambda params, carry, obs, first: (carry, values[obs.agents[..., 0].astype(int)]),
        init_carry=lambda batch_shape: (),
    )


def batch_of(views, next_views, action, reward, terminated, *, num_actions, num_agents=1, weight=None, first=None):
    """One sequence; all arguments are lists over time, each entry for every agent."""
    length = len(views)
    spec = envs.matrix_game(np.zeros((num_actions,) * num_agents)).spec
    wide = lambda x: np.broadcast_to(np.asarray(x)[:, None, None], (length, 1, num_agents))  # noqa: E731
    obs = jax.jit(zero_observation, static_argnums=(0, 1))(spec, (length, 1))
    terminated = wide(np.asarray(terminated, bool))
    steps = Transition(
        obs=obs.replace(agents=wide(views)[..., None].astype(float)),
        first=np.zeros((length, 1), bool) if first is None else np.asarray(first)[:, None],
        action=wide(action),
        reward=wide(np.asarray(reward, np.float32)),
        terminated=terminated,
        last=terminated.all(-1),
        next_obs=obs.replace(agents=wide(next_views)[..., None].astype(float)),
    )
    batch = Trajectory(steps=steps, weight=None if weight is None else wide(np.asarray(weight, np.float32)))
    return jax.tree.map(jnp.asarray, batch)


def targets(table, batch, **config):
    nets = q_learning.QNets(table_network(table), None)
    params = {"agent": {}, "mixer": {}}
    cfg = QConfig(**config)
    values = jax.jit(lambda batch: q_learning.values_and_targets(params, params, batch, nets=nets, cfg=cfg)[1:3])
    target, mask = values(batch)
    return target[:, 0, 0].tolist(), mask[:, 0, 0].tolist()


def test_target_across_an_episodes_end():
    batch = batch_of([0, 1, 2], [1, 2, 3], [0, 0, 0], [1.0, 10.0, 2.0], [0, 1, 0], num_actions=1)
    target, mask = targets([[0.0], [6.0], [7.0], [8.0]], batch, gamma=0.5)
    assert target == [4.0, 10.0, 6.0]  # wrong: [4, 13.5, 2]
    assert mask == [1, 1, 0]  # what follows an episode's end in a sequence belongs to another episode


def test_masks_of_padded_episodes():
    batch = batch_of(
        range(6), range(1, 7), [0] * 6, [0.0] * 6, [0, 0, 0, 1, 0, 0], num_actions=1, weight=[1, 1, 1, 1, 0, 0]
    )
    _, mask = targets(np.zeros((7, 1)), batch)
    assert mask == [1, 1, 1, 1, 0, 0]


def test_peng_and_harutyunyan_over_padded_and_unpadded_windows():
    """r = 1, gamma = lambda = 1/2, max Q of the successors 4, 4, 8."""
    q = [[0.0, 0.0], [4.0, 1.0], [4.0, 1.0], [8.0, 0.0]]
    window = batch_of([0, 1, 2], [1, 2, 3], [0, 0, 0], [1.0] * 3, [0, 0, 0], num_actions=2)
    half = {"gamma": 0.5, "lambda_": 0.5, "double_q": False}
    assert targets(q, window, returns="peng", **half)[0] == [2.8125, 3.25, 5.0]
    ended = batch_of([0, 1, 2], [1, 2, 3], [0, 0, 0], [1.0] * 3, [1, 0, 0], num_actions=2)
    assert targets(q, ended, returns="peng", **half)[0] == [1.0, 3.25, 5.0]  # wrong: [1.6875, 2.75, 3]
    padded = batch_of([0, 1, 2], [1, 2, 3], [0, 0, 0], [1.0] * 3, [0, 0, 0], num_actions=2, weight=[1, 1, 0])
    assert targets(q, padded, returns="peng", **half)[0][:2] == [2.75, 3.0]
    # Greedy actions throughout: the off-policy correction of Harutyunyan is that of Peng.
    assert targets(q, window, returns="harutyunyan", **half)[0] == [2.8125, 3.25, 5.0]
    # An action that was not greedy, worth 1 where the best is worth 4: 1 + 4/2 + (3.25 - 1)/4.
    explored = batch_of([0, 1, 2], [1, 2, 3], [0, 1, 0], [1.0] * 3, [0, 0, 0], num_actions=2)
    assert targets(q, explored, returns="harutyunyan", **half)[0] == [1 + 2 + (3.25 - 1) / 4, 3.25, 5.0]


def test_team_reward_and_rewards_of_individual_agents():
    batch = batch_of([0], [0], [0], [1.0], [1], num_actions=1, num_agents=3)
    steps = batch.steps.replace(reward=jnp.array([[[1.0, 2.0, 6.0]]]))
    batch, nets = batch.replace(steps=steps), q_learning.QNets(table_network([[0.0]]), None)
    params = {"agent": {}, "mixer": {}}

    def target(nets, cfg):
        values = jax.jit(lambda batch: q_learning.values_and_targets(params, params, batch, nets=nets, cfg=cfg)[1])
        return values(batch).ravel().tolist()

    team = nets._replace(mixer=mixers.vdn())
    assert target(team, VDNConfig()) == [9.0] and target(team, VDNConfig(team_reward="mean")) == [3.0]
    assert target(nets, QConfig()) == [1.0, 2.0, 6.0] and target(nets, QConfig(team_reward="sum")) == [9.0] * 3


def test_weights_of_weighted_qmix():
    weight = losses.ow_weight(jnp.array([2.0, 2.0]), jnp.array([3.0, 1.0]), alpha=0.1)
    assert float(jnp.mean(weight * jnp.array([1.0, 1.0]))) == pytest.approx(0.55)
    one_of_two = losses.is_greedy(jnp.array([0, 1]), jnp.array([0, 0]), TRUE)
    assert not one_of_two and losses.is_greedy(jnp.array([0, 1]), jnp.array([0, 0]), jnp.array([True, False]))
    assert losses.cw_weight(one_of_two, jnp.float32(1.0), jnp.float32(2.0), 0.1) == pytest.approx(0.1)


def test_weighted_qmix_takes_lambda_returns_of_its_central_value():
    """r = 1, gamma = lambda = 1/2, and Q̂* of the successors 4, 4, 8: as Q(λ) of Peng above; without trace, 1 + Q̂*/2."""
    batch = batch_of([0, 1, 2], [1, 2, 3], [0, 0, 0], [1.0] * 3, [0, 0, 0], num_actions=2)
    values = table_network([[0.0, 0.0], [4.0, 1.0], [4.0, 1.0], [8.0, 0.0]])
    nets = wqmix.WQMIXNets(values, mixers.vdn(), values, mixers.vdn())
    params = {name: {} for name in nets._fields}

    def target(returns):
        cfg = WQMIXConfig(gamma=0.5, lambda_=0.5, returns=returns)
        weighted, _ = wqmix.weighted_values(params, params, batch, variant="ow", nets=nets, cfg=cfg)
        return weighted.target.ravel().tolist()

    assert target("td") == [3.0, 3.0, 5.0]
    assert target("peng") == target("harutyunyan") == [2.8125, 3.25, 5.0]


def weighted_setup(variant="cw", **config):
    """Agents prefer action 0 by their own values; the central value prefers 1: Q̂* = 1 and 9."""
    batch = batch_of([0], [0], [1], [0.0], [0], num_actions=2, num_agents=1)
    central = table_network([[1.0, 9.0]])
    total = mixers.vdn()
    nets = wqmix.WQMIXNets(table_network([[2.0, 1.0]]), total, central, total)
    params = {name: {} for name in nets._fields}
    cfg = WQMIXConfig(gamma=1.0, **config)
    return wqmix.weighted_values(params, params, batch, variant=variant, nets=nets, cfg=cfg)[0]


def test_the_greedy_joint_action_comes_from_the_agents_never_from_the_central_value():
    values = weighted_setup()
    assert float(values.target[0, 0, 0]) == 1.0  # wrong: 9
    assert float(values.value[0, 0, 0]) == 1.0
    assert float(values.central_value[0, 0, 0]) == 9.0  # the central loss fits the action taken
    assert float(values.importance[0, 0, 0]) == pytest.approx(0.1)  # not greedy, and y = 1 is not above its 1


@given(st.lists(st.floats(-5, 5), min_size=3, max_size=3), st.integers(0, 50))
def test_qmix_is_monotone_in_every_agent(q, seed):
    slope = _slope(jnp.array(q), jax.random.key(seed))
    assert (np.asarray(slope) >= 0).all()


@jax.jit
def _slope(q, key):
    """dQ_tot/dq of a mixer and a state that the key decides."""
    spec = envs.matrix_game(np.zeros((2, 2, 2))).spec
    mix = mixers.mixer(mixers.QMIX(embed_size=4, hypernet_sizes=(5,)), spec)
    obs = zero_observation(spec).replace(state=3 * jax.random.normal(key, spec.state_shape))
    return taken_slope(mix, mix.init(key), q, obs)


def taken_slope(mix, params, q, obs):
    """dQ_tot/dq of the only action that each agent has."""
    return jax.grad(lambda q: mix.apply(params, q[..., None], jnp.zeros(q.shape, jnp.int32), obs))(q)


def test_a_new_central_mixer_is_not_monotone():
    spec = envs.matrix_game(np.zeros((2, 2, 2))).spec
    mix = mixers.mixer(mixers.Central((8, 8, 8), 8), spec)
    obs = zero_observation(spec).replace(state=jnp.ones(spec.state_shape))
    slopes = jax.jit(jax.vmap(lambda key: taken_slope(mix, mix.init(key), jnp.ones(3), obs)))
    assert (slopes(jax.random.split(jax.random.key(0), 8)) < 0).any()


# -------------------------------------------------------------------------------------------------------- exploration


def test_epsilon_greedy_draws_legal_actions_evenly():
    q, legal = jnp.array([1.0, 2.0, 0.0, 9.0]), jnp.array([True, True, True, False])
    q, legal = (jnp.broadcast_to(x, (4000, 4)) for x in (q, legal))
    act = jax.jit(exploration.epsilon_greedy)
    share = lambda eps: np.bincount(act(jax.random.key(1), q, legal, eps), minlength=4) / 4000  # noqa: E731
    np.testing.assert_allclose(share(1.0), [1 / 3, 1 / 3, 1 / 3, 0], atol=0.03)
    np.testing.assert_allclose(share(0.3), [0.1, 0.8, 0.1, 0], atol=0.03)
    assert share(0.0).tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("kind, half_way", [("linear", 0.55), ("exponential", 0.1**0.5), ("constant", 1.0)])
def test_epsilon_decays_in_environment_steps(kind, half_way):
    env = envs.matrix_game(np.eye(2))
    cfg = QConfig(hidden_sizes=(4,), epsilon_end=0.1, epsilon_steps=1000, epsilon_schedule=kind)
    learner = jmarl.iql(env.spec, cfg)
    state = compiled.init(learner, jax.random.key(0))
    update = jax.jit(learner.update)
    batch = batch_of([0], [0], [0], [0.0], [1], num_actions=2, num_agents=2)
    epsilons = [
        float(update(dataclasses.replace(state, env_steps=jnp.int32(n)), batch, jax.random.key(0))[1]["epsilon"])
        for n in (0, 500, 1000, 5000)
    ]
    end = 1.0 if kind == "constant" else 0.1
    np.testing.assert_allclose(epsilons, [1.0, half_way, end, end], rtol=1e-5)


# -------------------------------------------------------------------------------------------------------- invariances

SMALL = {"hidden_sizes": (8,)}
SMALL_MIXER = {**SMALL, "mixer_embed_size": 4, "mixer_hypernet_sizes": (4,)}
LEARNERS = {
    "iql": (jmarl.iql, QConfig(**SMALL)),
    "vdn": (jmarl.vdn, VDNConfig(**SMALL)),
    "qmix": (jmarl.qmix, QMIXConfig(**SMALL_MIXER)),
    "cw_qmix": (jmarl.cw_qmix, WQMIXConfig(**SMALL_MIXER, central_sizes=(8, 8, 8))),
    "ow_qmix": (jmarl.ow_qmix, WQMIXConfig(**SMALL_MIXER, central_sizes=(8, 8, 8))),
}


@pytest.mark.parametrize(
    "name, recurrent", [("iql", False), ("vdn", True), ("qmix", False), ("cw_qmix", False), ("ow_qmix", True)]
)
def test_padding_and_inactive_agents_change_nothing_and_every_parameter_learns(name, recurrent):
    algorithm, cfg = LEARNERS[name]
    spec = envs.matrix_game(np.zeros((3, 3))).spec
    learner = algorithm(spec, cfg.replace(recurrent=recurrent, cell_size=4))
    require_padding_and_inactive_agents_change_nothing(learner, spec, learner.init_carry((6,)))


def test_an_empty_batch_gives_zero_loss_and_gradient():
    spec = envs.matrix_game(np.zeros((3, 3))).spec
    cfg = LEARNERS["qmix"][1]
    nets = q_learning.default_nets(spec, cfg)
    params = compiled.init(jmarl.qmix(spec, cfg, nets), jax.random.key(0)).params
    batch = random_batch(spec, jax.random.key(1))
    batch = batch.replace(weight=jnp.zeros_like(batch.weight))
    loss = jax.jit(jax.value_and_grad(lambda p: jmarl.q_loss(p, params, batch, nets=nets, cfg=cfg)[0]))
    value, grads = loss(params)
    assert float(value) == 0 and all((x == 0).all() for x in jax.tree.leaves(grads))


def test_importance_weights_scale_errors_and_not_the_count():
    batch = batch_of([0, 0], [0, 0], [0, 0], [2.0, 4.0], [0, 0], num_actions=1, weight=[0.5, 0.25])
    nets, params = q_learning.QNets(table_network([[0.0]]), None), {"agent": {}, "mixer": {}}
    loss, (metrics, _) = jax.jit(lambda b: jmarl.q_loss(params, params, b, nets=nets, cfg=QConfig()))(batch)
    assert float(loss) == (0.5 * 4 + 0.25 * 16) / 2
    assert metrics["priority"].tolist() == [3.0]


def test_burn_in_warms_the_state_up_without_gradient():
    """In sequences that start inside an episode; those that start one have nothing to warm up."""
    spec = envs.matrix_game(np.zeros((3, 3))).spec
    cfg = LEARNERS["vdn"][1].replace(recurrent=True, cell_size=4, burn_in=2)
    agent = q_learning.agent_network(spec, cfg)
    params, carry = compiled.init(agent, jax.random.key(0)), agent.init_carry((6,)) + 0.5
    batch = random_batch(spec, jax.random.key(1), carry=carry)
    # Inside an episode a step's successor is the next step.
    views = jnp.concatenate([batch.steps.obs.agents[1:], batch.steps.next_obs.agents[-1:]])
    starts = batch.steps.first.at[0, 3:].set(False)
    next_obs = batch.steps.next_obs.replace(agents=views)
    batch = batch.replace(steps=batch.steps.replace(next_obs=next_obs, first=starts))

    def value(params, batch, burn_in):
        q, _ = q_learning.unroll(agent, params, batch, burn_in)
        return jnp.sum(q**2 * replay.weights(batch, burn_in)[..., None]), q

    def rows(part, time=slice(None)):
        steps, weight = jax.tree.map(lambda x: x[time, part], (batch.steps, batch.weight))
        return batch.replace(steps=steps, weight=weight, carry=carry[part])

    @jax.jit
    def slopes(params):
        slope = jax.grad(value, has_aux=True)
        begun, inside = rows(slice(3)), rows(slice(3, 6), slice(2, None))
        carried = agent.apply(params, carry[3:], *jax.tree.map(lambda x: x[:2, 3:], (batch.steps.obs, starts)))[0]
        return slope(params, batch, 2), slope(params, begun, 0), slope(params, inside.replace(carry=carried), 0)

    (grad, q), (grad_begun, q_begun), (grad_inside, q_inside) = slopes(params)
    np.testing.assert_allclose(q[:, :3], q_begun, rtol=1e-5)
    np.testing.assert_allclose(q[2:, 3:], q_inside, rtol=1e-5)
    expected = jax.tree.map(jnp.add, grad_begun, grad_inside)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), grad, expected)


def test_gradients_flow_through_the_first_steps_of_an_episode_and_not_into_a_burn_in():
    """A memory that adds up 1 θ at each step: how many θ of each output are differentiated."""

    def add_up(theta, carry, x, first):
        def step(memory, inputs):
            memory = jnp.where(inputs[1], 0.0, memory) + theta * inputs[0]
            return memory, memory

        return jax.lax.scan(step, carry, (x, first))

    net = Network(lambda key: 1.0, add_up, jnp.zeros)
    x, first = jnp.ones((4, 2)), jnp.zeros((4, 2), bool).at[0, 0].set(True)
    outputs = lambda theta: replay.unroll(net, theta, jnp.full(2, 10.0), x, first, burn_in=2)  # noqa: E731
    assert outputs(1.0).T.tolist() == [[1, 2, 3, 4], [11, 12, 13, 14]]
    assert jax.jacobian(outputs)(1.0).T.tolist() == [[1, 2, 3, 4], [1, 2, 1, 2]]


@pytest.mark.parametrize(
    "num_steps, weights", [(4, {(1, 1, 1, 1)}), (7, {(1, 1, 1, 1), (0, 0, 1, 0)})], ids=["4 steps", "7 steps"]
)
def test_every_step_of_an_episode_is_learnt_but_a_burn_in_inside_it(num_steps, weights):
    env = envs.probe("memory", num_agents=2, num_steps=num_steps)
    cfg = LEARNERS["iql"][1].replace(recurrent=True, cell_size=4, burn_in=2)
    learner, buffer = jmarl.iql(env.spec, cfg), buffers.uniform(32, 32, sequence_length=4)
    nets = q_learning.default_nets(env.spec, cfg)

    @jax.jit
    def weights_of_values(key):
        run = jmarl.training.start(env, learner, key, num_envs=2)
        _, rollout, _ = jmarl.rollout(env, learner, run, length=2 * num_steps)
        batch = buffer.sample(buffer.add(buffer.init(rollout), rollout), key)
        params = run.train_state.params
        return q_learning.values_and_targets(params, params, batch, nets=nets, cfg=cfg)[2]

    mask = weights_of_values(jax.random.key(0))
    assert {tuple(row) for row in mask[..., 0].T.tolist()} == weights


@pytest.mark.parametrize("name", ["iql", "cw_qmix"])
def test_a_recurrent_learner_starts_with_a_blank_memory_where_a_batch_has_none(name):
    algorithm, cfg = LEARNERS[name]
    spec = envs.matrix_game(np.zeros((3, 3))).spec
    learner = algorithm(spec, cfg.replace(recurrent=True, cell_size=4))
    state, update = jax.jit(learner.init)(jax.random.key(0)), jax.jit(learner.update)
    batch = random_batch(spec, jax.random.key(1))
    batch = batch.replace(steps=batch.steps.replace(first=jnp.zeros_like(batch.steps.first)))
    blank = batch.replace(carry=learner.init_carry((6,)))
    one, two = (update(state, b, jax.random.key(2))[1]["loss/td"] for b in (batch, blank))
    assert batch.carry == () and float(one) == float(two)


def test_recurrent_learners_refuse_single_transitions():
    spec = envs.matrix_game(np.zeros((3, 3))).spec
    learner = jmarl.iql(spec, LEARNERS["iql"][1].replace(recurrent=True, cell_size=4))
    state = jax.eval_shape(learner.init, jax.random.key(0))
    batch = random_batch(spec, jax.random.key(1), length=1, carry=learner.init_carry((6,)))
    with pytest.raises(ValueError, match="recurrent=True learns from sequences, and these are of one step"):
        jax.eval_shape(learner.update, state, batch, jax.random.key(2))


def test_a_burn_in_as_long_as_the_sequences_is_refused():
    spec = envs.matrix_game(np.zeros((3, 3))).spec
    learner = jmarl.iql(spec, LEARNERS["iql"][1].replace(recurrent=True, cell_size=4, burn_in=4))
    state = jax.eval_shape(learner.init, jax.random.key(0))
    with pytest.raises(ValueError, match="burn_in=4 leaves nothing to learn from in sequences of 4 steps: lower it"):
        jax.eval_shape(learner.update, state, random_batch(spec, jax.random.key(1)), jax.random.key(2))


def test_independent_learners_with_parameters_of_their_own_learn_as_if_alone():
    spec = envs.matrix_game(np.zeros((3, 3))).spec
    learner = jmarl.iql(spec, LEARNERS["iql"][1].replace(sharing="per_agent", max_grad_norm=0.1))
    state, update = jax.jit(learner.init)(jax.random.key(0)), jax.jit(learner.update)
    batch = random_batch(spec, jax.random.key(1))
    scaled = batch.replace(steps=batch.steps.replace(reward=batch.steps.reward * jnp.array([1.0, 1000.0])))
    one, two = (update(state, b, jax.random.key(2))[0].params for b in (batch, scaled))
    same = lambda i: [bool((x[i] == y[i]).all()) for x, y in zip(*map(jax.tree.leaves, (one, two)), strict=True)]  # noqa: E731
    assert all(same(0)) and not any(same(1))


@pytest.mark.parametrize("kind, reward, ends", [("individual", [1, 5], [1, 0]), ("sum", [6, 6], [0, 0])])
def test_a_teams_return_goes_on_while_any_agent_does(kind, reward, ends):
    """Agent 0 dies; agent 1 goes on."""
    batch = batch_of([0], [0], [0], [0.0], [0], num_actions=1, num_agents=2)
    steps = batch.steps.replace(reward=jnp.array([[[1.0, 5.0]]]), terminated=jnp.array([[[True, False]]]))
    rewards, terminated = parts.rewards_and_ends(steps, kind)
    assert rewards.tolist() == [[reward]] and terminated.tolist() == [[ends]]
    both = steps.replace(terminated=jnp.ones((1, 1, 2), bool))
    assert parts.rewards_and_ends(both, kind)[1].all()
    value, alive = jnp.array([[[7.0, 3.0, 5.0]]]), jnp.array([[[False, True, True]]])
    went_on = [[[7.0, 3.0, 5.0]]] if kind == "individual" else [[[4.0, 3.0, 5.0]]]
    assert parts.values_of_all(value, alive, kind).tolist() == went_on


def test_target_network_is_copied_every_few_steps_or_follows_slowly():
    params, target = {"w": jnp.ones(2)}, {"w": jnp.zeros(2)}
    move = lambda step, interval, tau: replay.update_target(  # noqa: E731
        target, params, jnp.int32(step), interval, tau
    )["w"].tolist()
    assert move(3, 4, 1.0) == [0, 0] and move(4, 4, 1.0) == [1, 1] and move(1, 1, 0.25) == [0.25, 0.25]


def test_learning_rate_ends_at_its_end_value():
    spec = envs.matrix_game(np.zeros((3, 3))).spec
    cfg = LEARNERS["vdn"][1].replace(
        learning_rate=1e-3, learning_rate_schedule="linear", learning_rate_end=0.1, horizon=4
    )
    learner = jmarl.vdn(spec, cfg)
    state, update = compiled.init(learner, jax.random.key(0)), jax.jit(learner.update)
    rates = []
    for _ in range(4):
        state, metrics = update(state, random_batch(spec, jax.random.key(1)), jax.random.key(2))
        rates.append(float(metrics["learning_rate"]))
    np.testing.assert_allclose(rates, [7.75e-4, 5.5e-4, 3.25e-4, 1e-4], rtol=1e-5)


def test_standardised_rewards_and_returns_are_undone_before_they_mix():
    """A constant reward of 10 and one step: y = 10, whatever the network's scale."""
    env = envs.matrix_game(np.full((2, 2), 5.0))
    cfg = LEARNERS["vdn"][1].replace(standardize_return=True, standardize_beta=0.0)
    learner = jmarl.vdn(env.spec, cfg)
    state, update = compiled.init(learner, jax.random.key(0)), jax.jit(learner.update)
    batch = batch_of([0, 0], [0, 0], [0, 1], [5.0, 5.0], [0, 1], num_actions=2, num_agents=2)
    batch = batch.replace(steps=batch.steps.replace(terminated=jnp.ones((2, 1, 2), bool)))
    state, metrics = update(state, batch, jax.random.key(0))
    assert float(state.moments["return"].mean) == 10.0 and float(metrics["value/target"]) == 0.0
    learner = jmarl.vdn(env.spec, cfg.replace(standardize_return=False, standardize_reward=True))
    state, metrics = jax.jit(learner.update)(compiled.init(learner, jax.random.key(0)), batch, jax.random.key(0))
    assert float(metrics["value/target"]) == 0.0  # a constant reward less its mean


# ------------------------------------------------------------------------------------- losses and networks of one's own


@pytest.mark.parametrize("name", list(LEARNERS))
def test_a_loss_of_ones_own_adds_a_term_and_a_metric(name):
    algorithm, cfg = LEARNERS[name]
    usual = jmarl.wqmix_loss if isinstance(cfg, WQMIXConfig) else jmarl.q_loss

    def loss(params, *args, **options):
        value, (metrics, moments) = usual(params, *args, **options)
        size = sum(jnp.sum(x**2) for x in jax.tree.leaves(params))
        return value + 100.0 * size, ({**metrics, "loss/size": size}, moments)

    spec = envs.matrix_game(np.zeros((3, 3))).spec
    learner = algorithm(spec, cfg, loss=loss)
    state = compiled.init(learner, jax.random.key(0))
    new, metrics = jax.jit(learner.update)(state, random_batch(spec, jax.random.key(1)), jax.random.key(2))
    size = lambda params: sum(float(jnp.sum(x**2)) for x in jax.tree.leaves(params))  # noqa: E731
    assert float(metrics["loss/size"]) == pytest.approx(size(state.params), rel=1e-5)
    assert size(new.params) < size(state.params)


def test_the_target_of_ones_own_reaches_pqn():
    env = envs.matrix_game(np.zeros((2, 2)))
    cfg = PQNConfig(hidden_sizes=(4,), num_minibatches=1, num_epochs=1)
    learner = jmarl.pqn_vdn(env.spec, cfg, targets=lambda *args, **nets: jmarl.pqn_targets(*args, **nets) + 7.0)
    run = compiled.start(env, learner, jax.random.key(0), num_envs=2)
    run, batch, _ = compiled.rollout(env, learner, run, length=4)
    update = jax.jit(learner.update)
    _, metrics = update(run.train_state, batch, jax.random.key(0))
    assert float(metrics["value/target"]) == 7.0  # every step ends an episode, without reward
    assert float(metrics["epsilon"]) < 1.0
    _, metrics = update(run.train_state.replace(env_steps=None), batch, jax.random.key(0))
    assert "epsilon" not in metrics  # which depends on what nobody counts


def test_qmix_mixes_alike_wherever_its_mixer_is_made():
    """The scale of its first outputs is what training depends on most."""
    spec = envs.matrix_game(np.zeros((3, 3))).spec
    ours, default = q_learning.default_nets(spec, QMIXConfig()).mixer, mixers.mixer(mixers.QMIX(), spec)
    key = jax.random.key(0)
    params = compiled.init(ours, key)
    jax.tree.map(np.testing.assert_array_equal, params, compiled.init(default, key))
    kernel = params["hyper_w1"]["Dense_1"]["kernel"]
    assert float(jnp.std(kernel) * np.sqrt(kernel.shape[0])) == pytest.approx(0.1, rel=0.2)  # of variance 0.01


def test_an_agent_of_ones_own_leaves_the_mixer_as_it_was():
    spec, cfg = envs.matrix_game(np.zeros((3, 3))).spec, LEARNERS["qmix"][1]
    wider = q_learning.default_nets(spec, cfg)._replace(
        agent=q_learning.agent_network(spec, QConfig(hidden_sizes=(9,)))
    )
    usual, other = (compiled.init(jmarl.qmix(spec, cfg, nets), jax.random.key(0)).params for nets in (None, wider))
    jax.tree.map(np.testing.assert_array_equal, usual["mixer"], other["mixer"])
    assert jax.tree.map(jnp.shape, usual["agent"]) != jax.tree.map(jnp.shape, other["agent"])


def test_a_team_learner_without_a_mixer_is_refused():
    spec = envs.matrix_game(np.zeros((3, 3))).spec
    independent = q_learning.default_nets(spec, QConfig())
    with pytest.raises(ValueError, match=r"nets\.mixer is None here: iql has none, vdn and qmix have one"):
        jmarl.vdn(spec, VDNConfig(), independent)
    with pytest.raises(ValueError, match=r"nets\.mixer is given here: iql has none"):
        jmarl.iql(spec, QConfig(), independent._replace(mixer=mixers.vdn()))


TEAM_LEARNERS = {**LEARNERS, "pqn_vdn": (jmarl.pqn_vdn, PQNConfig()), "iql": (jmarl.iql, QConfig(team_reward="sum"))}


@pytest.mark.parametrize("name", list(TEAM_LEARNERS))
def test_one_reward_for_opposed_teams_is_warned_of_once(name):
    algorithm, cfg = TEAM_LEARNERS[name]
    spec = envs.matrix_game(np.zeros((3, 3))).spec._replace(name=f"tag_{name}", teams=(0, 1))
    with pytest.warns(
        UserWarning, match=f"tag_{name} has 2 teams that oppose each other, and .*Config learns from one"
    ):
        algorithm(spec, cfg)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        algorithm(spec, cfg)
        algorithm(spec._replace(name="together", teams=(0, 0)), cfg)
        jmarl.iql(spec._replace(name="each for itself"), QConfig())


# ------------------------------------------------------------------------------------------- games of known solution


def best_monotone_fit(payoff, weight):
    """Greedy joint action of the best monotone fit: least squares for every order of the agents' values."""
    num_actions = len(payoff)
    # Monotone tables are a constant plus a non-negative sum of steps at up-closed sets.
    rows = itertools.product(range(num_actions + 1), repeat=num_actions)
    steps = [np.arange(num_actions) >= np.array(cuts)[:, None] for cuts in rows if sorted(cuts)[::-1] == list(cuts)]
    basis = np.stack([step.ravel() for step in steps] + [-np.ones(num_actions**2)], axis=1)
    fits = []
    for order in itertools.product(itertools.permutations(range(num_actions)), repeat=2):
        y, root = payoff[np.ix_(*order)].ravel(), np.sqrt(weight[np.ix_(*order)].ravel())
        fits.append((scipy.optimize.nnls(basis * root[:, None], y * root)[1], (order[0][-1], order[1][-1])))
    return min(fits)[1]


def test_a_uniform_fit_provably_picks_wrong_where_central_weighting_picks_right():
    payoff = np.array([[6.0, -12.0, -12.0], [-12.0, 0.0, 0.0], [-12.0, 0.0, 0.0]])
    assert best_monotone_fit(payoff, np.ones((3, 3))) == (1, 1)
    joint = jnp.stack(jnp.meshgrid(jnp.arange(3), jnp.arange(3), indexing="ij"), axis=-1)
    for alpha in (0.1, 0.5):
        best = jnp.zeros_like(joint)
        match = losses.is_greedy(joint, best, jnp.ones_like(joint, bool))
        weight = losses.cw_weight(match, jnp.asarray(payoff), jnp.full((3, 3), payoff[0, 0]), alpha)
        assert best_monotone_fit(payoff, np.asarray(weight)) == (0, 0)


# ------------------------------------------------------------------------------------------------------------ sharing


@pytest.mark.parametrize("sharing", ["shared", "per_agent", "per_group"])
@pytest.mark.parametrize("recurrent", [False, True])
def test_agents_of_different_sizes_share_as_they_are_told(sharing, recurrent):
    spec = envs.matrix_game(np.zeros((2, 3))).spec._replace(obs_sizes=(1, 1))
    cfg = VDNConfig(hidden_sizes=(8,), cell_size=4, sharing=sharing, recurrent=recurrent)
    learner = jmarl.vdn(spec, cfg)
    state, carry = compiled.init(learner, jax.random.key(0)), learner.init_carry((5,))
    obs = zero_observation(spec, (5,)).replace(action_mask=jnp.ones((5, 2, 3), bool).at[:, 0, 2].set(False))
    state = state.replace(env_steps=jnp.int32(0))
    action, new_carry, measured = jax.jit(learner.act)(state, carry, obs, jnp.ones(5, bool), jax.random.key(1))
    assert action.shape == (5, 2) and action.dtype == jnp.int32 and (action[:, 0] < 2).all() and measured == {}
    assert jax.tree.structure(new_carry) == jax.tree.structure(carry)


# ---------------------------------------------------------------------------------------------------------- bad input


CONFIGS = {jmarl.iql: QConfig, jmarl.vdn: VDNConfig, jmarl.qmix: QMIXConfig}


@pytest.mark.parametrize(
    "algorithm, config, message",
    [
        (
            jmarl.qmix,
            {"team_reward": "individual"},
            "team_reward='individual' is unknown here: choose one of sum",
        ),
        (jmarl.iql, {"returns": "lambda"}, "returns='lambda' is unknown here: choose one of td, peng, harutyunyan"),
        (jmarl.vdn, {"epsilon_end": 1.5}, r"epsilon_end=1.5 must lie in \[0, 1\]"),
        (jmarl.vdn, {"epsilon_start": -0.1}, r"epsilon_start=-0.1 must lie in \[0, 1\]"),
        (jmarl.vdn, {"epsilon_end": 0.0, "epsilon_schedule": "exponential"}, "epsilon_end=0.0 must be positive for an"),
        (jmarl.vdn, {"epsilon_start": 0, "epsilon_schedule": "exponential"}, "epsilon_start=0 must be positive for an"),
        (
            jmarl.vdn,
            {"epsilon_schedule": "cosine"},
            "epsilon_schedule='cosine' is unknown here: choose one of constant",
        ),
        (jmarl.iql, {"gamma": 1.01}, r"gamma=1.01 must lie in \[0, 1\]"),
        (jmarl.iql, {"tau": -1}, r"tau=-1 must lie in \[0, 1\]"),
        (jmarl.iql, {"lambda_": 2.0}, r"lambda_=2.0 must lie in \[0, 1\]"),
        (jmarl.qmix, {"mixer_scale": 0.0}, "mixer_scale=0.0 must be positive: weights that start at 0"),
        (jmarl.iql, {"sharing": None}, "sharing=None has no meaning: leave it out for 'shared'"),
        (jmarl.iql, {"activation": None}, "activation=None has no meaning"),
        (jmarl.iql, {"returns": None}, "returns=None has no meaning"),
        (
            jmarl.vdn,
            {"hidden_sizes": 64},
            r"hidden_sizes=64 must hold one width for each layer: write hidden_sizes=\(64,\)",
        ),
        (jmarl.vdn, {"target_update_interval": 0}, "target_update_interval=0 must be at least 1"),
        (jmarl.vdn, {"hidden_sizes": (0,)}, r"hidden_sizes=\(0,\) must hold positive widths"),
        (jmarl.vdn, {"burn_in": 2}, "burn_in=2 warms up recurrent networks: set recurrent=True"),
        (jmarl.qmix, {"next_agent_mask": "none"}, "next_agent_mask='none' is unknown here"),
    ],
)
def test_bad_configs(algorithm, config, message):
    with pytest.raises(ValueError, match=message):
        algorithm(envs.matrix_game(np.eye(2)).spec, CONFIGS[algorithm](**config))


@pytest.mark.parametrize(
    "config, message",
    [
        ({"condition": "both"}, "condition='both' is unknown here: choose one of online, target"),
        ({"condition": None}, "condition=None has no meaning"),
        ({"suboptimal_weight": 0.0}, r"suboptimal_weight=0.0 must lie in \(0, 1\]"),
        ({"suboptimal_weight": 1.5}, r"suboptimal_weight=1.5 must lie in \(0, 1\]"),
        ({"gamma": -0.5}, r"gamma=-0.5 must lie in \[0, 1\]"),
        ({"central_sizes": ()}, r"central_sizes=\(\) must hold at least one width"),
    ],
)
def test_bad_configs_of_weighted_qmix(config, message):
    with pytest.raises(ValueError, match=message):
        jmarl.cw_qmix(envs.matrix_game(np.eye(2)).spec, WQMIXConfig(**config))


@pytest.mark.parametrize(
    "algorithm, cfg, takes",
    [
        (jmarl.iql, VDNConfig(), "QConfig"),  # its reward is a team's
        (jmarl.vdn, QMIXConfig(), "VDNConfig"),
        (jmarl.ow_qmix, jmarl.PPOConfig(), "WQMIXConfig"),
        (jmarl.pqn_vdn, VDNConfig(), "PQNConfig"),
    ],
)
def test_configs_of_other_algorithms_are_refused(algorithm, cfg, takes):
    """In tests, the checker of types would be first to speak: it knows annotations, not a subclass too many."""
    algorithm = inspect.unwrap(algorithm)
    validate = inspect.unwrap(q_learning._checked)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(TypeError) as error:
        patch.setattr(q_learning, "_checked", validate)
        patch.setattr(wqmix, "_learner", inspect.unwrap(wqmix._learner))
        algorithm(envs.matrix_game(np.eye(2)).spec, cfg)
    assert str(error.value) == f"cfg is {type(cfg).__name__} here, and this algorithm takes {takes}: {takes}()."


@pytest.mark.parametrize(
    "algorithm, own", [(jmarl.vdn, VDNConfig), (jmarl.qmix, QMIXConfig), (jmarl.ow_qmix, WQMIXConfig)]
)
def test_a_config_that_the_own_one_extends_serves_with_the_own_defaults(algorithm, own):
    spec = envs.matrix_game(np.eye(2)).spec
    batch = random_batch(spec, jax.random.key(1))
    results = []
    for cls in (QConfig, own):
        learner = algorithm(spec, cls(hidden_sizes=(4,), gamma=0.5))
        state, metrics = jax.jit(learner.update)(compiled.init(learner, jax.random.key(0)), batch, jax.random.key(0))
        results.append((state.params, metrics))
    jax.tree.map(np.testing.assert_array_equal, *results)


# ------------------------------------------------------------------------------------------------------- schedules


def test_a_schedule_without_its_end_is_refused():
    spec = envs.matrix_game(np.eye(2)).spec
    learner = jmarl.vdn(spec, VDNConfig(hidden_sizes=(4,), learning_rate_schedule="linear"))
    state = jax.eval_shape(learner.init, jax.random.key(0))
    with pytest.raises(ValueError, match="learning_rate_schedule='linear' needs horizon"):
        jax.eval_shape(learner.update, state, random_batch(spec, jax.random.key(1)), jax.random.key(2))


def test_tracers_are_not_validated():
    spec = envs.matrix_game(np.eye(2)).spec
    jax.eval_shape(
        lambda x: jmarl.cw_qmix(spec, WQMIXConfig(gamma=x, suboptimal_weight=x, epsilon_end=x)).init(jax.random.key(0)),
        0.0,
    )


@pytest.mark.parametrize("algorithm, config", [(jmarl.iql, QConfig()), (jmarl.pqn_vdn, PQNConfig())])
def test_continuous_actions_are_refused(algorithm, config):
    with pytest.raises(ValueError, match="those of continuous are continuous: use another algorithm"):
        algorithm(envs.probe("continuous").spec, config)


def test_qmix_without_a_state_is_refused():
    spec = envs.matrix_game(np.eye(2)).spec._replace(state_shape=(0,))
    with pytest.raises(ValueError, match=r"QMIX mixes with the global state, but matrix_game has state_shape=\(0,\)"):
        jmarl.qmix(spec, QMIXConfig())
    with pytest.raises(ValueError, match="Central mixes with the global state"):
        mixers.mixer(mixers.Central(), spec)


# --------------------------------------------------------------------------------------------------------- Retrace


def test_retrace_goes_on_from_actions_that_were_greedy_alone():
    """r = 1, gamma = lambda = 1/2, max Q of the successors 4, 4, 8."""
    q = [[0.0, 0.0], [4.0, 1.0], [4.0, 1.0], [8.0, 0.0]]
    half = {"gamma": 0.5, "lambda_": 0.5, "double_q": False, "returns": "retrace"}

    def of_actions(*actions, **config):
        window = batch_of([0, 1, 2], [1, 2, 3], actions, [1.0] * 3, [0, 0, 0], num_actions=2)
        return targets(q, window, **{**half, **config})[0]

    assert of_actions(0, 0, 0) == [2.8125, 3.25, 5.0]  # Peng's
    assert of_actions(0, 1, 0) == [3.0, 3.25, 5.0]  # one step from s_0: wrong: 3.5625, Harutyunyan's
    assert of_actions(0, 0, 1) == [3 + (3.0 - 4) / 4, 3.0, 5.0]
    assert of_actions(1, 0, 0) == [2.8125, 3.25, 5.0]  # what is valued is this action, greedy or not
    assert of_actions(0, 0, 0, lambda_=0.0) == [3.0, 3.0, 5.0]


def test_retrace_asks_the_network_that_chooses_what_is_greedy():
    """The online network prefers action 1 in s_1, the target network 0."""
    agent = Network(
        init=lambda key: {},
        apply=lambda params, carry, obs, first: (carry, params[obs.agents[..., 0].astype(int)]),
        init_carry=lambda batch_shape: (),
    )
    old = jnp.array([[0.0, 0.0], [4.0, 1.0], [8.0, 0.0]])
    online, nets = old.at[1].set(jnp.array([1.0, 4.0])), q_learning.QNets(agent, None)
    batch = batch_of([0, 1], [1, 2], [0, 0], [1.0] * 2, [0, 0], num_actions=2)

    def first_target(double_q):
        cfg = QConfig(gamma=0.5, lambda_=0.5, returns="retrace", double_q=double_q)
        of = lambda table: {"agent": table, "mixer": {}}  # noqa: E731
        return q_learning.values_and_targets(of(online), of(old), batch, nets=nets, cfg=cfg)[1][0, 0, 0]

    assert first_target(False) == 1 + 4 / 2 + (5 - 4) / 4  # s_1 is left greedily: y_1 = 1 + 8/2 = 5
    assert first_target(True) == 1 + 1 / 2  # it is not; the action that is chosen there has the old value 1


def test_a_team_was_greedy_if_all_who_acted_were():
    batch = batch_of([0] * 4, [0] * 4, [0] * 4, [0.0] * 4, [0] * 4, num_actions=2, num_agents=2)
    action = jnp.array([[0, 0], [0, 1], [1, 1], [0, 1]])[:, None]
    mask = jnp.array([[1, 1], [1, 1], [1, 1], [1, 0]], bool)[:, None]  # the last one's second agent is gone
    steps = batch.steps.replace(action=action, obs=batch.steps.obs.replace(agent_mask=mask))
    batch, q = batch.replace(steps=steps), jnp.broadcast_to(jnp.array([1.0, 0.0]), (4, 1, 2, 2))
    assert q_learning.follows(batch, q, of_team=True).ravel().tolist() == [True, False, False, True]
    own = q_learning.follows(batch, q, of_team=False)[:, 0].tolist()
    assert own == [[True, True], [True, False], [False, False], [True, True]]
