"""COMA's targets, step by step."""

import compiled
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmarl
from jmarl import envs, networks
from jmarl.learners.coma import default_nets, values
from jmarl.networks import heads


@pytest.mark.parametrize("team_reward", ["mean", "individual"])
@pytest.mark.parametrize("recurrent", [False, True])
def test_targets_match_a_loop_over_steps(recurrent, team_reward):
    """With episodes cut off on the way, an agent that dies first, and a target critic unlike the one that learns."""
    env = envs.matrix_game([[8.0, -12.0], [-12.0, 3.0]], num_steps=3)
    cfg = jmarl.COMAConfig(
        hidden_sizes=(8,), critic_sizes=(8,), cell_size=8, recurrent=recurrent, team_reward=team_reward, gamma=0.9
    )
    learner, nets, key = jmarl.coma(env.spec, cfg), default_nets(env.spec, cfg), jax.random.key(1)
    run = compiled.start(env, learner, jax.random.key(0), num_envs=4)
    target_params = jax.tree.map(
        lambda p: p + 0.3 * jnp.cos(jnp.arange(p.size)).reshape(p.shape), run.train_state.params
    )
    state = run.train_state.replace(target_params={"critic": target_params["critic"]})
    _, batch, _ = compiled.rollout(env, learner, run, length=8)
    terminated = jnp.zeros((8, 4, 2), bool).at[3, :, 0].set(True).at[5, 1].set(True)
    reward = batch.steps.reward + jnp.array([0.0, 1.0])
    alive = np.ones((8, 4, 2), bool)
    alive[3:5, :, 0] = False
    weight = np.ones((8, 4, 2))
    weight[4:6, :, 0] = 0
    obs = batch.steps.obs.replace(agent_mask=jnp.asarray(weight > 0))
    next_obs = batch.steps.next_obs.replace(agent_mask=jnp.asarray(alive))
    steps = batch.steps.replace(reward=reward, terminated=terminated, obs=obs, next_obs=next_obs)
    assert batch.steps.last[:-1].any()

    # What would be done next where an episode or the rollout ends: drawn from the policy that acted, one step on, for
    # four steps at a time.
    rows = lambda x: np.asarray(x).reshape(-1, *x.shape[2:])  # noqa: E731
    after = jax.tree.map(lambda x, y: jnp.concatenate([x[1:], y[None]]), steps.carry, batch.next_carry)
    flat = jax.tree.map(rows, (after, steps.measured["epsilon"], steps.next_obs))
    ends = np.asarray(steps.last).copy()
    ends[-1] = True
    ends = np.flatnonzero(ends & ~np.asarray(terminated).all(-1))
    drawn = np.full((32, 2), -1)

    @jax.jit
    def draw(params, key, carry, epsilon, next_obs):
        logits = networks.one_step(nets.actor)(params, carry, next_obs, jnp.zeros(4, bool))[1]
        return heads.categorical(logits, next_obs.action_mask, epsilon=epsilon[:, None, None]).sample(seed=key)

    for four in np.array_split(ends, range(4, len(ends), 4)):
        at = np.resize(four, 4)
        some = draw(
            state.params["actor"],
            jax.random.fold_in(jax.random.split(key)[0], four[0]),
            *jax.tree.map(lambda x, at=at: x[at], flat),
        )
        drawn[four] = np.asarray(some)[: len(four)]
    drawn = drawn.reshape(8, 4, 2)
    values_of = jax.jit(lambda params, obs, action: values(params, obs, action, nets=nets, cfg=cfg)[1])

    after, targets = np.zeros((4, 2)), np.zeros((8, 4, 2))
    for t in reversed(range(8)):
        cut = np.asarray(steps.last[t]) | (t == 7)
        done = steps.action[t + 1] if t < 7 else drawn[t]
        action = jnp.asarray(np.where(cut[:, None], drawn[t], done))
        obs = jax.tree.map(lambda x, t=t: np.asarray(x)[t][None], steps.next_obs)
        value = np.asarray(values_of(state.target_params, obs, action[None])[0])
        ends, now = np.asarray(terminated[t]), np.asarray(reward[t])
        if team_reward == "mean":  # the team goes on while anybody does, with the values of those who do
            value = np.where(alive[t], value, value[:, ::-1])
            ends, now = ends.all(-1, keepdims=True), now.mean(-1, keepdims=True)
        after = now + 0.9 * ~ends * np.where(cut[:, None], value, 0.2 * value + 0.8 * after)
        targets[t] = after

    batch = batch.replace(steps=steps, weight=jnp.asarray(weight))
    _, metrics = jax.jit(learner.update)(state, batch, key)
    taken = np.asarray(values_of(state.params, steps.obs, steps.action))
    np.testing.assert_allclose(metrics["loss/critic"], np.average((taken - targets) ** 2, weights=weight), rtol=1e-4)
