"""Environments as stacked arrays `[N, ...]` that never reset themselves.

`make` adapts those of JaxMARL, gymnax and Jumanji. An environment of your own is three things in an `Env`:

>>> import jax
>>> import jax.numpy as jnp
>>> from jmarl.envs import check_env
>>> from jmarl.types import Env, EnvSpec, Outcome, zero_observation
>>> spec = EnvSpec(name="meet", agents=("ann", "bob"), obs_shape=(2,), state_shape=(2,), num_actions=3, max_steps=20)
>>> def observe(position):  # a zero_observation has every action legal and everybody alive
...     return zero_observation(spec).replace(agents=jnp.stack([position, position[::-1]]), state=position)
>>> def reset(key):
...     position = jax.random.uniform(key, (2,), minval=-1.0)
...     return (position, jnp.int32(0)), observe(position)
>>> def step(state, action, key):  # action [N]: left, stay, right
...     position, time = state[0] + 0.1 * (action - 1), state[1] + 1
...     distance = jnp.abs(position[0] - position[1])
...     met = distance < 0.1
...     outcome = Outcome(reward=jnp.full(2, -distance), terminated=jnp.full(2, met), last=met | (time == 20))
...     return (position, time), observe(position), outcome
>>> env = check_env(Env(reset, step, spec))
>>> state, obs = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 4))
>>> obs.agents.shape
(4, 2, 2)
"""

import inspect
from typing import Any

from jmarl.envs import (
    envpool_adapter,
    football_adapter,
    gymnasium_adapter,
    gymnax_adapter,
    jaxmarl_adapter,
    jumanji_adapter,
    pettingzoo_adapter,
    pgx_adapter,
)
from jmarl.envs.checks import check_env
from jmarl.envs.games import PROBES, key_door, matrix_game, probe, two_step_game, zero_sum_game
from jmarl.envs.gymnasium_adapter import from_gymnasium_vector
from jmarl.envs.gymnax_adapter import from_gymnax
from jmarl.envs.host import from_host
from jmarl.envs.jaxmarl_adapter import RawStep, from_jaxmarl
from jmarl.envs.jumanji_adapter import from_jumanji
from jmarl.envs.pettingzoo_adapter import from_pettingzoo
from jmarl.envs.predator_prey import predator_prey
from jmarl.envs.slots import HostEnv, HostStep, Seen
from jmarl.envs.stacked import unknown
from jmarl.envs.views import flatten_views, with_agent_ids
from jmarl.types import Env

__all__ = [
    "PROBES",
    "HostEnv",
    "HostStep",
    "RawStep",
    "Seen",
    "check_env",
    "flatten_views",
    "from_gymnasium_vector",
    "from_gymnax",
    "from_host",
    "from_jaxmarl",
    "from_jumanji",
    "from_pettingzoo",
    "key_door",
    "make",
    "matrix_game",
    "predator_prey",
    "probe",
    "two_step_game",
    "with_agent_ids",
    "zero_sum_game",
]


def make(
    env: object,
    *,
    agent_ids: bool = False,
    time_limit: str = "truncated",
    flatten: bool = False,
    **options: Any,
) -> Env:
    """An environment of JaxMARL, gymnax or Jumanji, by its name there, or an object, or "predator_prey".

    Views and action masks are zero-padded to the widest agent's. Continuous actions are clipped into the bounds of
    `spec` before they reach the environment, and their padding is dropped; an illegal padded discrete action becomes
    the agent's last one. `obs.state` is the environment's own global state (SMAX, FACMAC, JaxNav, MABrax) or all views
    concatenated, without padding and ids. An agent that died is False in `agent_mask` from the next observation on,
    and `terminated` from the step on which it died. A single-agent environment has N = 1.

    Args:
      env: a name, such as "MPE_simple_spread_v3", "HeuristicEnemySMAX", "overcooked", "CartPole-v1", "rware tiny-4ag",
        "lbf 8x8-2p-2f-coop"; or an object with JaxMARL's interface, see `from_jaxmarl`; or gymnax's `(env, params)`,
        see `from_gymnax`. For Jumanji's objects see `from_jumanji`. "gymnasium:CartPole-v1" is Gymnasium's,
        "envpool:CartPole-v1" EnvPool's, "pettingzoo:mpe2.simple_spread_v3" what a module of PettingZoo's makes,
        "football:academy_3_vs_1_with_keeper" Google Research Football's; these are Python or C++, see `from_host`.
        "pgx:tic_tac_toe" is Pgx's: compiled games in which players take turns.
      agent_ids: put a one-hot id before each agent's features, or N constant channels before an image's.
      time_limit: "truncated" lets learners bootstrap from the last observation; "terminal" counts time limits as the
        end of the return, as in the numbers that JaxMARL publishes.
      flatten: images as vectors.
      **options: for an object, the rules of `from_jaxmarl`; for a name, the environment's own options, such as
        `action_type="Continuous"`, gymnax's parameters or the arguments of `predator_prey`, and
        `map_name`: of SMAX, such as "3m" (or `scenario`, the same or an object).
        `layout`: of Overcooked, a name or an object.
        `shaped_reward`: this multiple of Overcooked's shaped reward is added to the sparse one; 0 by default.
        `reward`: of Jumanji, "individual", as it gives it, or "team": everybody gets the sum.
        `max_steps`: of Jumanji, its `time_limit`.
        `vector`: of Gymnasium, "sync" or "async": a vector of its own steps all, in one process or one for each.

    Example:
      >>> env = make("MPE_simple_spread_v3", num_agents=4)
      >>> env.spec.obs_shape, env.spec.num_actions, env.spec.max_steps
      ((22,), 5, 26)
    """
    views: dict[str, Any] = {"agent_ids": agent_ids, "time_limit": time_limit, "flatten": flatten}
    if isinstance(env, tuple) and len(env) == 2:
        raw, params = env
        return from_gymnax(raw, params, **views, **options)
    if not isinstance(env, str):
        return from_jaxmarl(env, **views, **options)
    if env == "predator_prey":
        return _make_predator_prey(time_limit, agent_ids=agent_ids, **options)
    package, _, name = env.partition(":")
    if package in PACKAGES and name:
        return PACKAGES[package](name, options, **views)
    if refusal := jaxmarl_adapter.refusal(env):
        raise ValueError(refusal)
    if env in jaxmarl_adapter.names():
        return jaxmarl_adapter.make(env, options, **views)
    if jumanji_adapter.is_name(env):
        return jumanji_adapter.make(env, options, **views)
    if env in (gymnax_names := gymnax_adapter.names()):
        return gymnax_adapter.make(env, options, **views)
    known = [*jaxmarl_adapter.names(), *gymnax_names, *jumanji_adapter.names(), "predator_prey"]
    raise unknown("environment of JaxMARL, gymnax or Jumanji", env, known, ValueError)


# What comes before the colon of a name.
PACKAGES = {
    "envpool": envpool_adapter.make,
    "football": football_adapter.make,
    "gymnasium": gymnasium_adapter.make,
    "pettingzoo": pettingzoo_adapter.make,
    "pgx": pgx_adapter.make,
}


def _make_predator_prey(time_limit: str, **options: Any) -> Env:
    if time_limit != "truncated":
        raise ValueError(f"time_limit={time_limit!r} has no meaning for predator_prey, which truncates: leave it out.")
    for option in options:
        if option not in (known := list(inspect.signature(predator_prey).parameters)):
            raise unknown("option of predator_prey", option, known, TypeError)
    return predator_prey(**options)
