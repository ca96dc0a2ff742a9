"""Speed and compile time of a whole compiled run in the settings of JaxMARL's own scripts, to be run beside them.

    python benchmarks/whole_run.py ippo_ff

One line of JSON per call: environment steps per second of each repeat, trace and compile seconds, versions.
"""

import dataclasses
import json
import sys
import time

import jax

import jmarl

# Networks, environments, rollout and epochs of JaxMARL 0.2's scripts for MPE_simple_spread_v3.
_RECURRENT = jmarl.PPOConfig(
    recurrent=True, hidden_sizes=(128,), cell_size=128, head_sizes=(128,), activation="relu", learning_rate=2e-3
)
SETTINGS = {
    "ippo_ff": (jmarl.ippo, jmarl.PPOConfig(learning_rate=2.5e-4), 100),
    "ippo_rnn": (
        jmarl.ippo,
        dataclasses.replace(
            _RECURRENT, shared_torso=True, num_minibatches=2, learning_rate=5e-4, clip_eps=0.3, vf_coef=1.0
        ),
        10,
    ),
    "mappo_rnn": (jmarl.mappo, _RECURRENT, 10),
}


def measure(name: str, repeats: int = 2) -> dict:
    """Compiles a run of 16 environments x 128 steps per iteration once, and times it."""
    algorithm, config, num_steps = SETTINGS[name]
    config = config.replace(learning_rate_schedule="linear")
    loop = jmarl.on_policy(jmarl.make("MPE_simple_spread_v3"), algorithm, num_envs=16, rollout_length=128)
    start = time.perf_counter()
    lowered = jax.jit(jmarl.make_train(loop, num_steps)).lower(jax.random.key(0), config)
    traced = time.perf_counter()
    train = lowered.compile()
    compiled = time.perf_counter()
    rates = []
    for i in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(train(jax.random.key(i), config))
        rates.append(num_steps * loop.env_steps_per_step / (time.perf_counter() - begin))
    return {
        "name": name,
        "steps_per_second": rates,
        "trace_s": traced - start,
        "compile_s": compiled - traced,
        "system": jmarl.logging.system_facts(),
    }


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in SETTINGS:
        sys.exit(f"usage: whole_run.py {{{','.join(SETTINGS)}}}")
    print(json.dumps(measure(sys.argv[1])))
