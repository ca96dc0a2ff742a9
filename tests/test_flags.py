"""Each family of algorithms trains where jax has 64 bits, or is strict about promotion, or looks for NaN."""

import contextlib

import jax
import pytest
from test_env_flags import all_flags

import jmarl
from jmarl import envs

DISCRETE = envs.probe("delayed", num_agents=2, num_steps=3)
CONTINUOUS = envs.probe("continuous", num_agents=2)
SMALL = {"hidden_sizes": (4,)}
MEMORY = {"recurrent": True, "cell_size": 4}
CASES = {
    "ippo": jmarl.PPOConfig(**SMALL),
    "mappo": jmarl.PPOConfig(**SMALL, **MEMORY, normalize_value=True, learning_rate_schedule="linear"),
    "happo": jmarl.HAPPOConfig(**SMALL, **MEMORY, normalize_value=True),
    "mat": jmarl.MATConfig(embed_size=4, order="random"),
    "sable": jmarl.SableConfig(embed_size=4, num_heads=2, num_minibatches=2),
    "vdac_mix": jmarl.VDACMixConfig(**SMALL),
    "coma": jmarl.COMAConfig(**SMALL, critic_sizes=(4,)),
    "pqn_vdn": jmarl.PQNConfig(**SMALL, **MEMORY, cell="lstm", num_minibatches=2),
    "iql": jmarl.QConfig(**SMALL),
    "qmix": jmarl.QMIXConfig(**SMALL, **MEMORY, standardize_return=True),
    "qplex": jmarl.QPLEXConfig(**SMALL, **MEMORY, dueling=True),
    "ow_qmix": jmarl.WQMIXConfig(**SMALL),
    "maddpg": jmarl.DDPGConfig(**SMALL),
    "facmac": jmarl.FACMACConfig(**SMALL),
    "masac": jmarl.SACConfig(**SMALL),
    "matd3": jmarl.TD3Config(**SMALL),
    "isac": jmarl.SACConfig(**SMALL),
    "random_policy": jmarl.RandomConfig(),
}


def loop_of(name):
    algorithm = getattr(jmarl, name)
    env = CONTINUOUS if name in ("matd3", "isac", "facmac") else DISCRETE
    if name in ("ippo", "mappo", "happo", "mat", "sable", "vdac_mix", "coma", "pqn_vdn", "random_policy"):
        return jmarl.on_policy(env, algorithm, num_envs=4, rollout_length=4)
    replay = jmarl.buffers.prioritized(32, 4, 3 if name in ("qmix", "qplex") else 1)
    return jmarl.off_policy(env, algorithm, buffer=replay, num_envs=4, rollout_length=4, warmup_steps=16)


@pytest.mark.parametrize("name", CASES)
def test_every_family_is_traced_under_all_flags(name):
    """Tracing finds all of these faults: memories and counts whose dtypes drift, and promotions that are refused."""
    with all_flags():
        loop, cfg = loop_of(name), CASES[name]
        key = jax.random.key(0)
        _, metrics = jax.eval_shape(jmarl.make_train(loop, 2), key, cfg)
        assert metrics["train/return_sum"].shape == (2,)
        state = jax.eval_shape(loop.init, key, jmarl.training.with_horizon(loop, cfg, 2)).train_state
        learner = getattr(jmarl, name)(loop.env.spec, cfg)
        jax.eval_shape(lambda state: jmarl.evaluate(loop.env, learner, state, key, num_episodes=2), state)


def test_a_healthy_run_trains_where_jax_looks_for_nan():
    with contextlib.ExitStack() as at_the_end:
        at_the_end.callback(jax.config.update, "jax_debug_nans", jax.config.jax_debug_nans)
        jax.config.update("jax_debug_nans", True)
        env = envs.probe("delayed", num_steps=9)  # longer than a rollout: no episode finishes in the first one
        loop, cfg = jmarl.on_policy(env, jmarl.ippo, num_envs=4, rollout_length=4), jmarl.PPOConfig(**SMALL)
        history = jmarl.logging.memory()
        jmarl.run(loop, jax.random.key(0), cfg, num_iterations=3, iterations_per_chunk=1, sinks=[history])
        jax.jit(jmarl.make_train(loop, 2))(jax.random.key(0), cfg)
    returns = history.metrics["train/return_sum"][:, 0]
    assert (returns != returns).tolist() == [True, True, False]  # NaN where nothing was measured
