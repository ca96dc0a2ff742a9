"""JaxMARL's environments, without the reset that its `step` does: what ends an episode, and who is alive.

JaxMARL merges time limits into `done`. Each family's rule below tells termination (nothing is to come, so nothing is
bootstrapped) from truncation, after reading its step code.
"""

import contextlib
import inspect
import io
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool

from jmarl.envs.stacked import AgentDicts


class _Family(NamedTuple):
    """How to read the state of one kind of environment. `state` is the one after the step.

    Attributes:
      terminated: `(env, previous_state, actions, state, last) -> [N] or scalar`, time limits left out.
      max_steps: `(env) -> int`.
      alive, legal, world, info: see `AgentDicts`; each takes the environment first.
    """

    terminated: Callable[..., Any]
    max_steps: Callable[[Any], int | None]
    alive: Callable[[Any, Any], Array] | None = None
    legal: Callable[[Any, Any], dict[str, Array]] | None = None
    world: Callable[[Any, Any, Any], Array] | None = None
    info: Callable[[Any, Any], dict[str, Array]] | None = None


def _never(env: Any, previous: Any, actions: Any, state: Any, last: Array) -> Array:
    """Nothing but the time limit ends an episode."""
    return jnp.zeros((), bool)


def _always(env: Any, previous: Any, actions: Any, state: Any, last: Array) -> Array:
    """There is no time limit: every end is the game's own."""
    return last


# MPE says done when the step *before* this one was number max_steps: 26 steps for max_steps=25.
_MPE = _Family(terminated=_never, max_steps=lambda env: env.max_steps + 1)

_OVERCOOKED = _Family(terminated=_never, max_steps=lambda env: env.max_steps)


def _units(env: Any, state: Any) -> tuple[Array, Array]:
    """Which allies and which enemies live, of SMAX and of its single-team variants."""
    alive = getattr(state, "state", state).unit_alive
    return alive[: env.num_allies], alive[env.num_allies :]


def _smax_alive(env: Any, state: Any) -> Bool[Array, "N"]:
    return getattr(state, "state", state).unit_alive[: len(env.agents)]


def _smax_terminated(env: Any, previous: Any, actions: Any, state: Any, last: Array) -> Bool[Array, "N"]:
    """A unit's return ends when it dies or when the battle does; `done` also holds the time limit."""
    allies, enemies = _units(env, state)
    return ~_smax_alive(env, state) | ~allies.any() | ~enemies.any()


def _smax_info(env: Any, state: Any) -> dict[str, Array]:
    allies, enemies = _units(env, state)
    return {"won": allies.any() & ~enemies.any()}  # both teams dead is a draw, as in SMAX's own win bonus


_SMAX = _Family(
    terminated=_smax_terminated,
    max_steps=lambda env: env.max_steps,
    alive=_smax_alive,
    legal=lambda env, state: env.get_avail_actions(state),
    world=lambda env, views, state: views["world_state"],
    info=_smax_info,
)

_ENVIRONMENTS: dict[str, tuple[str, _Family]] = {
    "MPE_simple_v3": ("SimpleMPE", _MPE),
    "MPE_simple_tag_v3": ("SimpleTagMPE", _MPE),
    "MPE_simple_world_comm_v3": ("SimpleWorldCommMPE", _MPE),
    "MPE_simple_spread_v3": ("SimpleSpreadMPE", _MPE),
    "MPE_simple_crypto_v3": ("SimpleCryptoMPE", _MPE),
    "MPE_simple_speaker_listener_v4": ("SimpleSpeakerListenerMPE", _MPE),
    "MPE_simple_push_v3": ("SimplePushMPE", _MPE),
    "MPE_simple_adversary_v3": ("SimpleAdversaryMPE", _MPE),
    "MPE_simple_reference_v3": ("SimpleReferenceMPE", _MPE),
    "SMAX": ("SMAX", _SMAX),
    "HeuristicEnemySMAX": ("HeuristicEnemySMAX", _SMAX),
    "LearnedPolicyEnemySMAX": ("LearnedPolicyEnemySMAX", _SMAX),
    "overcooked": ("Overcooked", _OVERCOOKED),
    "overcooked_v2": ("OvercookedV2", _OVERCOOKED),
}


def names() -> list[str]:
    """Every environment of JaxMARL that jmarl adapts."""
    return list(_ENVIRONMENTS)


def agent_dicts(name: str, options: dict[str, Any]) -> AgentDicts:
    """JaxMARL's environment `name`."""
    with contextlib.redirect_stdout(io.StringIO()):  # it announces its submodules
        from jaxmarl import environments

    class_name, family = _ENVIRONMENTS[name]
    options = dict(options)
    shaped_reward = options.pop("shaped_reward", 0.0)
    if "map_name" in options:
        from jaxmarl.environments.smax import map_name_to_scenario

        options["scenario"] = map_name_to_scenario(options.pop("map_name"))
    if name == "overcooked" and isinstance(options.get("layout"), str):
        from jaxmarl.environments.overcooked import overcooked_layouts

        options["layout"] = overcooked_layouts[options["layout"]]
    env = getattr(environments, class_name)(**options)
    agents = tuple(env.agents)

    def step(key: Array, state: Any, actions: dict[str, Array]) -> Any:
        previous = state
        views, state, rewards, dones, info = env.step_env(key, state, actions)
        if shaped_reward:
            rewards = {a: rewards[a] + shaped_reward * info["shaped_reward"][a] for a in agents}
        last = dones["__all__"]
        terminated = family.terminated(env, previous, actions, state, last)
        return views, state, rewards, terminated, last, {} if family.info is None else family.info(env, state)

    def bound(function: Callable[..., Any] | None) -> Callable[..., Any] | None:
        return None if function is None else lambda *args: function(env, *args)

    return AgentDicts(
        agents=agents,
        action_spaces={agent: env.action_space(agent) for agent in agents},
        reset=env.reset,
        step=step,
        alive=bound(family.alive),
        legal=bound(family.legal),
        world=bound(family.world),
        max_steps=family.max_steps(env),
        unwrapped=env,
    )
