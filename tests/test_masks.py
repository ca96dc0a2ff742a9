"""Who acts, who waits, whose return has ended: what rollouts say of each step, and that no NaN passes."""

import jax
import jax.numpy as jnp
import numpy as np

import jmarl
from jmarl import envs, masks, training
from jmarl.types import Env, EnvSpec, Outcome, zero_observation

SMALL = jmarl.PPOConfig(hidden_sizes=(4,), num_minibatches=1, num_epochs=1)


def schedule_env(acts, ends, rewards=None, views=None):
    """An environment in which agent i acts at t where `acts[t][i]`, and its return ends at t where `ends[t][i]`."""
    acts, ends = np.asarray(acts, bool), np.asarray(ends, bool)
    length, num_agents = acts.shape
    paid = np.ones((length, num_agents), np.float32) if rewards is None else np.asarray(rewards, np.float32)
    seen = np.ones((length + 1, num_agents), np.float32) if views is None else np.asarray(views, np.float32)
    spec = EnvSpec(
        name="schedule",
        agents=tuple("abcdefgh"[:num_agents]),
        obs_shape=(1,),
        state_shape=(num_agents,),
        num_actions=2,
        max_steps=length,
        min_steps=length,
    )

    def observe(t):
        view = jnp.asarray(seen)[t]
        acting = jnp.asarray(np.concatenate([acts, acts[:1]]))[t]
        return zero_observation(spec).replace(agents=view[:, None], state=view, agent_mask=acting)

    def step(t, action, key):
        outcome = Outcome(reward=jnp.asarray(paid)[t], terminated=jnp.asarray(ends)[t], last=t == length - 1)
        return t + 1, observe(t + 1), outcome

    return Env(lambda key: (jnp.int32(0), observe(jnp.int32(0))), step, spec)


def roll(env, length, cfg=SMALL):
    learner = jmarl.ippo(env.spec, cfg)

    @jax.jit
    def first_rollout(key):
        return jmarl.rollout(env, learner, training.start(env, learner, key, num_envs=1), length=length)

    return learner, *first_rollout(jax.random.key(0))


def test_waiting_steps_count_and_those_after_the_end_do_not():
    #            waits at 0 and 2, acts to the end; dies at 1 and is gone; dies at 0, is back at 2
    acts = [[0, 1, 1], [1, 1, 0], [0, 0, 1], [1, 0, 1]]
    ends = [[0, 0, 1], [0, 1, 0], [0, 0, 0], [1, 0, 1]]
    counts = [[1, 1, 1], [1, 1, 0], [1, 0, 1], [1, 0, 1]]
    _, run, batch, _ = roll(schedule_env(acts, ends), 8)
    np.testing.assert_array_equal(batch.weight[:, 0], counts * 2)  # and a new episode knows nothing of the old one
    np.testing.assert_array_equal(masks.acting(batch)[:, 0], np.array(acts * 2))
    assert not run.episodes.is_over.any()


def test_who_is_gone_is_remembered_from_rollout_to_rollout():
    env = schedule_env([[1, 1], [1, 0], [1, 0], [1, 0]], [[0, 1], [0, 0], [0, 0], [1, 0]])
    learner, run, _, _ = roll(env, 2)
    assert run.episodes.is_over.tolist() == [[False, True]]
    _, batch, _ = jax.jit(lambda run: jmarl.rollout(env, learner, run, length=2))(run)
    np.testing.assert_array_equal(batch.weight[:, 0], [[1, 0], [1, 0]])


def test_what_is_no_number_in_an_absent_agents_view_is_read_as_zero():
    env = schedule_env(
        [[1, 1], [1, 0], [1, 0]], [[0, 1], [0, 0], [1, 0]], views=[[1, 1], [1, np.nan], [1, np.inf], [1, 1]]
    )
    _, _, batch, metrics = roll(env, 6)
    assert np.isfinite(batch.steps.obs.agents).all() and np.isfinite(batch.steps.next_obs.state).all()
    assert metrics["env/nonfinite_views"] == 0


def test_faults_of_the_environment_are_counted_and_left_as_they_are():
    env = schedule_env(np.ones((3, 2)), [[0, 0], [0, 0], [1, 1]], rewards=[[1, np.nan], [1, 1], [-np.inf, 1]])
    _, _, batch, metrics = roll(env, 3)
    assert metrics["env/nonfinite_rewards"] == 2 and np.isnan(batch.steps.reward[0, 0, 1])
    env = schedule_env(np.ones((3, 2)), [[0, 0], [0, 0], [1, 1]], views=[[1, 1], [1, np.nan], [1, 1], [1, 1]])
    assert roll(env, 3)[3]["env/nonfinite_views"] == 1


def test_a_reward_after_the_end_that_is_no_number_counts_for_nothing():
    env = schedule_env([[1, 1], [1, 0], [1, 0]], [[0, 1], [0, 0], [1, 0]], rewards=[[1, 1], [1, np.nan], [1, np.nan]])
    learner, run, batch, metrics = roll(env, 3)
    assert np.isfinite(batch.steps.reward).all() and metrics["env/nonfinite_rewards"] == 0
    assert metrics["train/return_sum"] == 4
    state, _ = jax.jit(learner.update)(run.train_state, batch, jax.random.key(0))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))


def test_nothing_that_is_masked_reaches_a_gradient():
    """On a batch of one's own, too, where no rollout has cleaned up."""
    env = schedule_env([[1, 1], [1, 0], [1, 0]], [[0, 1], [0, 0], [1, 0]])
    learner, run, batch, _ = roll(env, 3)
    update = jax.jit(learner.update)
    clean, _ = update(run.train_state, batch, jax.random.key(0))
    gone = ~np.asarray(batch.steps.obs.agent_mask)
    views = jnp.where(gone[..., None], jnp.nan, batch.steps.obs.agents)
    steps = batch.steps.replace(
        obs=batch.steps.obs.replace(agents=views), reward=jnp.where(gone, jnp.nan, batch.steps.reward)
    )
    spoilt, _ = update(run.train_state, batch.replace(steps=steps), jax.random.key(0))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(spoilt.params))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=1e-3), clean.params["critic"], spoilt.params["critic"]
    )


def test_an_episodes_return_ends_with_it():
    """A reward that is huge, infinite or no number is gone with its episode."""
    env = schedule_env(np.ones((2, 1)), [[0], [1]])
    learner = jmarl.ippo(env.spec, SMALL)
    start = jax.jit(lambda key: training.start(env, learner, key, num_envs=1))(jax.random.key(0))
    rollout = jax.jit(lambda run: jmarl.rollout(env, learner, run, length=3))
    for first in (1.0, -1e8, -np.inf, np.nan):
        run = start.replace(episodes=start.episodes.replace(returns=jnp.full((1, 1), first)))
        shown = []
        for _ in range(4):
            run, _, metrics = rollout(run)
            shown.append(float(metrics["train/return_sum"]))
        np.testing.assert_array_equal(shown[1:], 2.0)
        np.testing.assert_equal(np.isfinite(shown[0]), np.isfinite(first))


def test_names_of_info_never_replace_what_is_measured():
    env = envs.probe("delayed")

    def step(state, action, key):
        state, obs, outcome = env.step(state, action, key)
        return state, obs, outcome.replace(info={"return_sum": jnp.float32(-99), "won": jnp.float32(1)})

    metrics = roll(env._replace(step=step), 4)[3]
    assert metrics["train/return_sum"] == 1 and metrics["train/info/return_sum"] == -99 and metrics["train/won"] == 1
