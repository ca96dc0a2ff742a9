"""Agents that wait, are dead, or are not there yet: their values are right, and what they see reaches no gradient."""

import functools
import inspect
import typing

import compiled
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from turns import GAMMA, VALUES, turns

import jmarl
from jmarl import buffers, training
from jmarl.learners import ddpg, sac
from jmarl.learners.coma import default_nets as coma_nets
from jmarl.learners.coma import values
from jmarl.types import Env, EnvSpec, Outcome, zero_observation

QUICK = {"gamma": GAMMA, "hidden_sizes": (16,), "sharing": "per_agent", "max_grad_norm": None}


@functools.cache
def steps_of(env):
    """Views of the four steps of `turns`, one sequence each: `[1, 4, ..]`."""
    seen = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 1))
    obs = [seen[1]]
    state = seen[0]
    shape = (1, 2) if env.spec.is_discrete else (1, 2, 1)
    for _ in range(3):
        state, now, _ = jax.vmap(env.step)(state, jnp.zeros(shape, jnp.int32), jax.random.split(jax.random.key(0), 1))
        obs.append(now)
    return jax.tree.map(lambda *x: jnp.stack(x, axis=1), *obs)


def acting(value):
    """Of the agent that acts at each step: values `[4, N]`."""
    return np.asarray(value)[np.arange(4), np.arange(4) % 2]


def trained(loop, cfg, num_iterations):
    return jax.jit(training.make_train(loop, num_iterations))(jax.random.key(0), cfg)[0].train_state


@pytest.mark.parametrize("gae_lambda", [0.0, 0.5, 1.0])
def test_ppo_knows_what_a_turn_is_worth(gae_lambda):
    env = turns()
    cfg = jmarl.PPOConfig(**QUICK, gae_lambda=gae_lambda, learning_rate=1e-2, num_minibatches=1)
    state = trained(jmarl.on_policy(env, jmarl.ippo, num_envs=4, rollout_length=8), cfg, 200)
    learner, obs = jmarl.ippo(env.spec, cfg), jax.tree.map(lambda x: x[0], steps_of(env))
    _, _, measured = learner.act(state, learner.init_carry((4,)), obs, jnp.ones(4, bool), jax.random.key(1))
    np.testing.assert_allclose(acting(measured["value"]), VALUES, atol=0.02)


@pytest.mark.parametrize(
    "options",
    [{"lambda_": 0.0}, {"lambda_": 0.5}, {"lambda_": 1.0}, {"returns": "n_step"}],
    ids=["0", "half", "1", "n_step"],
)
@pytest.mark.parametrize("team_reward", ["individual", "mean"])
def test_coma_knows_what_a_turn_is_worth(options, team_reward):
    env = turns()
    cfg = jmarl.COMAConfig(
        **QUICK, **options, team_reward=team_reward, critic_sizes=(16,), learning_rate=2e-2, num_epochs=4, tau=0.2
    )
    state = trained(jmarl.on_policy(env, jmarl.coma, num_envs=4, rollout_length=8), cfg, 100)
    obs = steps_of(env)
    for action in (0, 1):
        actions = jnp.full((1, 4, 2), action)
        _, taken = values(state.params, obs, actions, nets=coma_nets(env.spec, cfg), cfg=cfg)
        np.testing.assert_allclose(acting(taken[0]), VALUES, atol=0.04)


@pytest.mark.parametrize("continuous", [False, True], ids=["discrete", "continuous"])
@pytest.mark.parametrize(
    "module, algorithm, config, options",
    [
        (ddpg, jmarl.iddpg, jmarl.DDPGConfig, {}),
        (sac, jmarl.isac, jmarl.SACConfig, {"alpha": 1e-4, "learn_alpha": False}),
        (sac, jmarl.masac, jmarl.SACConfig, {"critic_view": "state", "alpha": 1e-4, "learn_alpha": False}),
    ],
    ids=["iddpg", "isac", "masac"],
)
def test_critics_of_actions_know_what_a_turn_is_worth(module, algorithm, config, options, continuous):
    env = turns(continuous=continuous)
    cfg = config(**QUICK, **options, learning_rate=1e-2, tau=0.1, random_steps=10**6)  # each action is tried
    loop = jmarl.off_policy(
        env, algorithm, buffer=buffers.uniform(400, 32), num_envs=8, rollout_length=4, num_updates=4, warmup_steps=64
    )
    state = trained(loop, cfg, 200)
    nets, obs = module.default_nets(env.spec, cfg), steps_of(env)
    code = jnp.zeros((1, 4, 2, 1)) if continuous else jax.nn.one_hot(jnp.zeros((1, 4, 2), int), 2)
    carry = nets.critic.init_carry((4,))
    q = nets.critic.apply(state.params["critic"], carry, (obs, code, code), jnp.ones((1, 4), bool))[1][0, 0]
    np.testing.assert_allclose(acting(q if q.ndim == 2 else q[..., 0]), VALUES, atol=0.05)


# ------------------------------------------------------------------------------------------- what is not there is NaN


def absent(*, continuous=False) -> Env:
    """The second agent dies at the second of four steps; from then on its view is NaN, and so is its reward."""
    kind = {"action_size": 1, "action_low": ((-1.0,),) * 2, "action_high": ((1.0,),) * 2}
    spec = EnvSpec(
        "absent", ("a", "b"), (1,), (1,), max_steps=4, min_steps=4, **(kind if continuous else {"num_actions": 2})
    )

    def observe(t):
        here = jnp.stack([jnp.bool_(True), t < 2])
        views = jnp.where(here, 1.0, jnp.nan).astype(jnp.float32)[:, None]
        return zero_observation(spec).replace(agents=views, agent_mask=here, state=jnp.where(t < 2, 1.0, jnp.nan)[None])

    def step(t, action, key):
        last = t == 3
        reward = jnp.where(observe(t).agent_mask, 1.0, jnp.nan)
        return t + 1, observe(t + 1), Outcome(reward=reward, terminated=jnp.stack([last, t >= 1]), last=last)

    return Env(lambda key: (jnp.int32(0), observe(jnp.int32(0))), step, spec)


def algorithms():
    """Every algorithm there is, by name: what takes a spec and a config."""
    not_algorithms = ("_loss", "_targets", "_surrogate", "Config", "Targets", "scripted", "random_policy")
    return [name for name in jmarl.learners.__all__ if name[0].islower() and not name.endswith(not_algorithms)]


def config_of(algorithm):
    """The config class that an algorithm's signature names, with small networks."""
    cls = inspect.signature(algorithm).parameters["cfg"].annotation
    cls = next(iter(typing.get_args(cls)), cls)  # the first, where several will do
    return cls(**({"hidden_sizes": (4,)} if hasattr(cls(), "hidden_sizes") else {"embed_size": 8}))


def every_batch_has_nan(env, learner, num_envs=4):
    """A rollout as an environment in another process would give it: without what our own rollout cleans."""
    run = training.start(env, learner, jax.random.key(0), num_envs=num_envs)
    run, batch, _ = training.rollout(env, learner, run, length=4)
    gone = jnp.broadcast_to(jnp.arange(4)[:, None] >= 2, (4, num_envs))
    is_dead = jnp.stack([jnp.zeros_like(gone), gone], axis=-1)
    is_dead_next = jnp.stack([jnp.zeros_like(gone), jnp.broadcast_to(jnp.arange(4)[:, None] >= 1, gone.shape)], axis=-1)

    def spoil(obs, dead):
        return obs.replace(
            agents=jnp.where(dead[..., None], jnp.nan, obs.agents),
            state=jnp.where(dead.any(-1)[..., None], jnp.nan, obs.state),
        )

    steps = batch.steps.replace(
        obs=spoil(batch.steps.obs, is_dead),
        next_obs=spoil(batch.steps.next_obs, is_dead_next),
        reward=jnp.where(is_dead, jnp.nan, batch.steps.reward),
    )
    return run.train_state, batch.replace(steps=steps, weight=~is_dead)


@pytest.mark.parametrize("name", algorithms())
def test_nan_in_the_views_of_the_dead_reaches_no_parameter(name):
    algorithm = getattr(jmarl, name)
    env, cfg = absent(), config_of(algorithm)
    learner = algorithm(env.spec, cfg)

    @jax.jit
    def learnt(key):
        state, batch = every_batch_has_nan(env, learner)
        return learner.update(state, batch, key)

    state, metrics = learnt(jax.random.key(1))
    for path, leaf in jax.tree_util.tree_leaves_with_path((state.params, state.opt_state, metrics)):
        assert np.isfinite(leaf).all(), jax.tree_util.keystr(path)


@pytest.mark.parametrize("name", ["iddpg", "matd3", "isac", "masac"])
def test_nan_in_the_views_of_the_dead_reaches_no_parameter_of_continuous_actors(name):
    algorithm = getattr(jmarl, name)
    env = absent(continuous=True)
    learner = algorithm(env.spec, config_of(algorithm))

    @jax.jit
    def learnt(key):
        state, batch = every_batch_has_nan(env, learner)
        return learner.update(state, batch, key)

    state, metrics = learnt(jax.random.key(1))
    for path, leaf in jax.tree_util.tree_leaves_with_path((state.params, state.opt_state, metrics)):
        assert np.isfinite(leaf).all(), jax.tree_util.keystr(path)


# ------------------------------------------------------------------------------------------------------- more agents


@pytest.mark.parametrize("name", ["ippo", "mappo", "coma", "iddpg", "maddpg", "matd3", "isac", "masac"])
def test_a_policy_of_two_agents_plays_with_four(name):
    """The actor is all that playing reads: critics of two agents know nothing of four."""
    algorithm = getattr(jmarl, name)
    make = lambda n: jmarl.make("predator_prey", size=6, num_predators=n, num_prey=2, max_steps=4)  # noqa: E731
    small, big, cfg = make(2), make(4), config_of(algorithm)
    state = jax.jit(algorithm(small.spec, cfg).init)(jax.random.key(0))
    metrics = compiled.evaluate(big, algorithm(big.spec, cfg), state, jax.random.key(0), num_episodes=2)
    assert float(metrics["eval/episode_length"]) == 4
    metrics = compiled.evaluate(big, algorithm(small.spec, cfg), state, jax.random.key(0), num_episodes=2)
    assert float(metrics["eval/episode_length"]) == 4
