"""Speed and compile time of a whole run in the settings of JaxMARL's own scripts, to be run beside them.

    python benchmarks/speed/whole_run.py ippo_ff
    JAX_NUM_CPU_DEVICES=2 python benchmarks/speed/whole_run.py ippo_ff

Measured is what `jmarl.run` compiles; where there are several devices, they share the environments. One line of JSON:
environment steps per second of each repeat, trace and compile seconds, versions.
"""

import argparse
import concurrent.futures
import json
import time

import jax

import jmarl
from jmarl import parallel, rows

# Networks, environments, rollouts and updates of JaxMARL 0.2's scripts, for MPE_simple_spread_v3 unless one is named;
# names with _16 have those of XuanCe 1.4: 16 environments, and for learners from replay one update of batch 256 in 400
# steps.
_PPO = jmarl.PPOConfig(learning_rate=2.5e-4, learning_rate_schedule="linear")
_RECURRENT = _PPO.replace(
    recurrent=True, hidden_sizes=(128,), cell_size=128, head_sizes=(128,), activation="relu", learning_rate=2e-3
)
_Q = {
    "recurrent": True,
    "hidden_sizes": (64,),
    "cell_size": 64,
    "learning_rate": 5e-3,
    "learning_rate_schedule": "linear",
    "gamma": 0.9,
    "max_grad_norm": 25.0,
}
_PQN = jmarl.PQNConfig(hidden_sizes=(256, 256))
_XUANCE = {"hidden_sizes": (64, 64)}
_MAPPO_16 = jmarl.PPOConfig(**_XUANCE, num_epochs=1, num_minibatches=1, normalize_value=True, huber_delta=10.0)
_MIXER = {"mixer_embed_size": 128, "mixer_hypernet_sizes": (128,), "sharing": "per_agent"}


def _sparse(algorithm, env):
    replay = jmarl.buffers.uniform(capacity=100_000, batch_size=256)
    return jmarl.off_policy(env, algorithm, buffer=replay, num_envs=16, rollout_length=25, warmup_steps=1000)


def _spread(**kwargs):
    return jmarl.make("MPE_simple_spread_v3", **kwargs)


def _continuous():
    return _spread(action_type="Continuous")


def _smax_3m():
    return jmarl.make("HeuristicEnemySMAX", map_name="3m", attack_mode="closest", see_enemy_actions=True)


def _on_policy(algorithm, num_envs=16, rollout_length=128, env=None):
    return jmarl.on_policy(env or _spread(), algorithm, num_envs=num_envs, rollout_length=rollout_length)


def _off_policy(algorithm):
    replay = jmarl.buffers.uniform(capacity=5000, batch_size=32, sequence_length=26)
    return jmarl.off_policy(_spread(), algorithm, buffer=replay, num_envs=8, rollout_length=26, warmup_steps=1000)


SETTINGS = {  # name: what makes (loop, config, iterations)
    "ippo_ff": lambda: (_on_policy(jmarl.ippo), _PPO, 100),
    "ippo_rnn": lambda: (
        _on_policy(jmarl.ippo),
        _RECURRENT.replace(shared_torso=True, num_minibatches=2, learning_rate=5e-4, clip_eps=0.3, vf_coef=1.0),
        10,
    ),
    "mappo_rnn": lambda: (_on_policy(jmarl.mappo), _RECURRENT, 10),
    "qmix_rnn": lambda: (_off_policy(jmarl.qmix), jmarl.QMIXConfig(**_Q, mixer_hypernet_sizes=(128,)), 500),
    "vdn_rnn": lambda: (_off_policy(jmarl.vdn), jmarl.VDNConfig(**_Q), 500),
    "iql_rnn": lambda: (_off_policy(jmarl.iql), jmarl.QConfig(**_Q), 500),
    "pqn_vdn_ff": lambda: (_on_policy(jmarl.pqn_vdn, 256, 16), _PQN, 25),
    "pqn_vdn_rnn": lambda: (_on_policy(jmarl.pqn_vdn, 256, 16), _PQN.replace(recurrent=True, cell_size=256), 5),
    "ippo_rnn_smax_3m": lambda: (
        _on_policy(jmarl.ippo, 128, 128, _smax_3m()),
        _RECURRENT.replace(shared_torso=True, learning_rate=4e-3, clip_eps=0.05, max_grad_norm=0.25),
        2,
    ),
    "mappo_rnn_smax_3m": lambda: (
        _on_policy(jmarl.mappo, 128, 128, _smax_3m()),
        _RECURRENT.replace(critic_view="state_id", ent_coef=0.0, max_grad_norm=0.25),
        2,
    ),
    "ippo_ff_overcooked": lambda: (
        _on_policy(jmarl.ippo, env=jmarl.make("overcooked", flatten=True, shaped_reward=1.0)),
        _PPO,
        50,
    ),
    # 64 environments, where the script has 1024.
    "ippo_ff_hanabi": lambda: (
        _on_policy(jmarl.ippo, 64, 128, jmarl.make("hanabi")),
        jmarl.PPOConfig(shared_torso=True, hidden_sizes=(512,), head_sizes=(512,), activation="relu"),
        2,
    ),
    "masac_16": lambda: (_sparse(jmarl.masac, _continuous()), jmarl.SACConfig(**_XUANCE), 500),
    "maddpg_16": lambda: (_sparse(jmarl.maddpg, _continuous()), jmarl.DDPGConfig(**_XUANCE), 500),
    "qmix_16": lambda: (_sparse(jmarl.qmix, _spread()), jmarl.QMIXConfig(**_XUANCE, **_MIXER), 500),
    "ow_qmix_16": lambda: (_sparse(jmarl.ow_qmix, _spread()), jmarl.WQMIXConfig(**_XUANCE, **_MIXER), 500),
    # One epoch of one minibatch; then the same, with MPE2's environment in Python.
    "mappo_16": lambda: (_on_policy(jmarl.mappo, 16, 25, _continuous()), _MAPPO_16, 500),
    "mappo_16_pettingzoo": lambda: (
        _on_policy(jmarl.mappo, 16, 25, jmarl.make("pettingzoo:mpe2.simple_spread_v3", continuous_actions=True)),
        _MAPPO_16,
        25,
    ),
}


def measure(name: str, repeats: int = 2) -> dict:
    """Compiles a run once, and times it."""
    loop, config, num_iterations = SETTINGS[name]()
    start = time.perf_counter()
    config = jmarl.training.with_horizon(loop, config, num_iterations)
    placement = parallel.Placement(jax.devices(), "envs")
    keys = jax.random.split(jax.random.key(0), 1)
    functions = rows.Functions(loop, config, None, placement, loop.env, 1, keys, {})
    lowered = functions.init.lower(keys, {}), functions.chunk.lower(functions.example, num_iterations, {})
    traced = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor() as threads:
        init, chunk = threads.map(lambda each, level: each.compile(rows.compiler_options(level)), lowered, (0, 1))
    compiled = time.perf_counter()
    rates = []
    for i in range(repeats):
        keys = placement.put(jax.random.split(jax.random.key(i), 1), placement.rows)
        begin = time.perf_counter()
        jax.block_until_ready(chunk(init(keys, {}), num_iterations, {}))
        rates.append(num_iterations * loop.env_steps_per_iteration / (time.perf_counter() - begin))
    return {
        "name": name,
        "steps_per_second": rates,
        "updates_per_second": [rate / loop.env_steps_per_iteration * loop.updates_per_iteration for rate in rates],
        "trace_s": traced - start,
        "compile_s": compiled - traced,
        "system": jmarl.logging.system_facts(),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=SETTINGS)
    print(json.dumps(measure(parser.parse_args().name)))
