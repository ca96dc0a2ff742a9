"""VDAC: the team's value and everyone's advantage by hand, values of a team that waits, games, bad input."""

import compiled
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_batches import random_batch, with_true_successors
from turns import GAMMA, VALUES, turns

import jmarl
from jmarl import VDACConfig, VDACMixConfig, envs
from jmarl.learners.vdac import default_policy

SMALL = {"hidden_sizes": (8,), "gamma": GAMMA}
MIX = {"mixer_embed_size": 3, "mixer_hypernet_sizes": ()}
CASES = {
    "vdac_sum": (jmarl.vdac_sum, VDACConfig(**SMALL)),
    "vdac_mix": (jmarl.vdac_mix, VDACMixConfig(**SMALL, **MIX, sharing="per_agent")),
    "shared_torso": (jmarl.vdac_mix, VDACMixConfig(**SMALL, **MIX, shared_torso=True, recurrent=True, cell_size=4)),
}


def by_hand(params, view, state, acts):
    """V_tot of one step: a layer of tanh for each agent, and the mixer of QMIX without hidden layers."""
    dense = lambda layer, x: x @ np.asarray(layer["kernel"]) + np.asarray(layer["bias"])  # noqa: E731
    values = np.zeros(len(view))
    for i, x in enumerate(view):
        own = jax.tree.map(lambda leaf, i=i: leaf[i], params["agents"])
        values[i] = dense(own["outputs_0"]["out"], np.tanh(dense(own["torso"]["Dense_0"], x)))[0]
    values = values * (acts if acts.any() else 1.0)
    w1, b1 = (dense(params["mixer"][f"hyper_{name}"]["Dense_0"], state) for name in ("w1", "b1"))
    w2 = dense(params["mixer"]["hyper_w2"]["Dense_0"], state)
    b2 = params["mixer"]["hyper_b2"]
    b2 = dense(b2["Dense_1"], np.maximum(dense(b2["Dense_0"], state), 0))[0]
    hidden = values @ np.abs(w1).reshape(len(view), -1) + b1
    return np.where(hidden > 0, hidden, np.exp(hidden) - 1) @ np.abs(w2) + b2


def test_targets_and_loss_match_a_loop_over_steps():
    """With an agent that dies first, one that waits, a time limit on the way, and a mixer made from the state."""
    spec = envs.matrix_game(np.zeros((3, 3))).spec
    cfg = CASES["vdac_mix"][1].replace(team_reward="mean", gae_lambda=0.8, ent_coef=0.0, vf_coef=0.5)
    learner, nets = jmarl.vdac_mix(spec, cfg), default_policy(spec, cfg)
    state = compiled.init(learner, jax.random.key(0))
    nothing = learner.init_carry((2,))
    batch = random_batch(spec, jax.random.key(1), length=5, batch_size=2, carry=nothing).replace(next_carry=nothing)
    acts, weight = np.ones((5, 2, 2), bool), np.ones((5, 2, 2))
    acts[2:, 0, 1], weight[2:, 0, 1] = False, 0  # agent 1 dies with step 1
    acts[3, 1] = False  # both wait
    terminated = np.zeros((5, 2, 2), bool)
    terminated[1, 0, 1] = terminated[4, 0, 0] = True
    last = np.zeros((5, 2), bool)
    last[2, 1] = last[4, 0] = True
    obs = batch.steps.obs.replace(agent_mask=jnp.asarray(acts))
    terminal = {"terminated": jnp.asarray(terminated), "last": jnp.asarray(last)}
    steps = with_true_successors(batch.steps.replace(obs=obs, carry=nothing, **terminal))
    log_prob, _, value = jax.jit(nets.evaluate)(state.params, nothing, obs, steps.first, steps.action)
    steps = steps.replace(measured={"log_prob": log_prob, "value": value})

    critic, now, later = jax.tree.map(np.asarray, (state.params["critic"], steps.obs, steps.next_obs))
    v, next_v = (
        np.array(
            [[by_hand(critic, x.agents[t, m], x.state[t, m], x.agent_mask[t, m]) for m in (0, 1)] for t in range(5)]
        )
        for x in (now, later)
    )
    np.testing.assert_allclose(value, np.stack([v, v], -1), rtol=1e-5, atol=1e-6)
    reward = np.where(weight > 0, np.asarray(steps.reward), 0.0).mean(-1)
    advantage, trace = np.zeros((5, 2)), np.zeros(2)
    for t in reversed(range(5)):
        goes_on = GAMMA * ~terminated[t].all(-1)
        trace = np.where(last[t], 0.0, trace)
        trace = reward[t] + goes_on * next_v[t] - v[t] + goes_on * 0.8 * trace
        advantage[t] = trace
    batch = batch.replace(steps=steps.replace(reward=jnp.where(weight > 0, steps.reward, jnp.nan)), weight=weight)
    _, metrics = jax.jit(learner.update)(state, batch, jax.random.key(0))
    np.testing.assert_allclose(metrics["loss/critic"], np.mean(advantage**2), rtol=1e-4)
    np.testing.assert_allclose(metrics["loss/actor"], -(advantage[..., None] * acts).sum() / acts.sum(), rtol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_learns_and_the_value_is_the_teams(name):
    algorithm, cfg = CASES[name]
    env = envs.probe("memory", num_agents=2)
    learner = algorithm(env.spec, cfg)
    run, batch, _ = compiled.play(env, learner, jax.random.key(0), num_envs=4, length=4)
    value = batch.steps.measured["value"]
    np.testing.assert_array_equal(value[..., 0], value[..., 1])
    new, _ = jax.jit(learner.update)(run.train_state, batch, run.key)
    moved = jax.tree.map(lambda x, y: not np.array_equal(x, y), run.train_state.params, new.params)
    assert all(jax.tree.leaves(moved)), moved


@pytest.mark.parametrize("name", ["vdac_sum", "vdac_mix"])
def test_a_team_that_takes_turns_knows_what_a_turn_is_worth(name):
    algorithm, cfg = CASES[name]
    env = turns()
    cfg = cfg.replace(learning_rate=1e-2, team_reward="mean", sharing="per_agent", num_epochs=4)
    loop = jmarl.on_policy(env, algorithm, num_envs=4, rollout_length=8)
    run, _ = jax.jit(jmarl.make_train(loop, 300))(jax.random.key(0), cfg)
    learner = algorithm(env.spec, cfg)
    run, batch, _ = compiled.rollout(env, learner, run, length=4)
    np.testing.assert_allclose(batch.steps.measured["value"][:, 0], np.stack([VALUES, VALUES], -1), atol=0.02)


def test_they_coordinate_for_the_teams_reward():
    """Agent 0 is paid for what agent 1 does, and the other way round: each must learn from the team's reward."""
    env = envs.probe("action_observation", num_agents=2)

    def step(state, action, key):
        state, obs, outcome = env.step(state, action, key)
        return state, obs, outcome.replace(reward=outcome.reward[::-1])

    crossed = env._replace(step=step)
    for name in ("vdac_sum", "vdac_mix"):
        algorithm, cfg = CASES[name]
        loop = jmarl.on_policy(crossed, algorithm, num_envs=16, rollout_length=4)
        cfg = cfg.replace(learning_rate=2e-2)
        run, _ = jax.jit(jmarl.make_train(loop, 150))(jax.random.key(0), cfg)
        learner = algorithm(env.spec, cfg)
        metrics = compiled.evaluate(crossed, learner, run.train_state, jax.random.key(1), num_episodes=16)
        assert float(metrics["eval/return_sum"]) == 2.0


def test_bad_configs():
    spec = envs.matrix_game(np.eye(2)).spec
    with pytest.raises(ValueError, match="team_reward='individual' is unknown here: choose one of sum, mean"):
        jmarl.vdac_sum(spec, VDACConfig(team_reward="individual"))
    with pytest.raises(ValueError, match="mixer_scale=0 must be positive"):
        jmarl.vdac_mix(spec, VDACMixConfig(mixer_scale=0))
    with pytest.raises(ValueError, match=r"QMIX mixes with the global state, but matrix_game has state_shape=\(0,\)"):
        jmarl.vdac_mix(spec._replace(state_shape=(0,)), VDACMixConfig())
