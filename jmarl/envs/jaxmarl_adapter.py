"""JaxMARL's environments, without the reset that its `step` does: what ends an episode, who is alive, what is legal.

JaxMARL merges time limits into `done`. Each family's rule below tells termination (nothing is to come, so nothing is
bootstrapped) from truncation; each was written after reading that family's step code.
"""

import contextlib
import inspect
import io
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool

from jmarl.envs.stacked import AgentDicts, unknown


class _Step(NamedTuple):
    """What a rule may look at to tell how a step ended."""

    previous: Any  # the state before the step
    actions: dict[str, Array]
    state: Any  # the state after it
    last: Bool[Array, ""]


class _Family(NamedTuple):
    """How to read one kind of environment. Every function takes the environment first.

    Attributes:
      terminated: `(env, step) -> [N] or scalar`, time limits left out.
      max_steps: `(env) -> int`.
      alive, legal, world: as in `AgentDicts`.
      info: `(env, state) -> dict` of scalars that describe the episode at its last step.
      agents: those who act; None for all of `env.agents`.
      fixed: constructor arguments that jmarl depends on.
      extra: options beside the constructor's arguments.
    """

    terminated: Callable[[Any, _Step], Array]
    max_steps: Callable[[Any], int | None]
    alive: Callable[[Any, Any], Array] | None = None
    legal: Callable[[Any, Any], dict[str, Array]] | None = None
    world: Callable[[Any, Any, Any], Array] | None = None
    info: Callable[[Any, Any], dict[str, Array]] | None = None
    agents: Callable[[Any], list[str]] | None = None
    fixed: dict[str, Any] = {}  # noqa: RUF012  a NamedTuple's default, never written to
    extra: tuple[str, ...] = ()


def _never(env: Any, step: _Step) -> Bool[Array, ""]:
    """Nothing but the time limit ends an episode."""
    return jnp.zeros((), bool)


# MPE compares the count *before* the step with max_steps: 26 steps for max_steps=25.
_MPE_PHYSICS = ("contact_force", "contact_margin", "damping", "mass", "u_noise", "c_noise")  # read from its **kwargs
_MPE = _Family(terminated=_never, max_steps=lambda env: env.max_steps + 1, extra=_MPE_PHYSICS)

# The prey is scripted: FACMAC's step drops the actions of env.good_agents. Only the hunters are agents here.
# They see a limited radius; the state is what everybody would see without it.
_FACMAC = _MPE._replace(
    agents=lambda env: env.adversaries,
    world=lambda env, views, state: jnp.concatenate([env.get_world_state(state)[agent] for agent in env.agents]),
)

# A fixed number of steps; `state.done` in is_terminal is the previous step's, so it adds nothing.
_OVERCOOKED = _Family(terminated=_never, max_steps=lambda env: env.max_steps, extra=("shaped_reward",))

# Lives, deck or fireworks end a game; there is no time limit.
_HANABI = _Family(
    terminated=lambda env, step: step.last,
    max_steps=lambda env: None,
    legal=lambda env, state: env.get_legal_moves(state),
)

# A fixed number of games of fixed length, and nothing in a game ends it. step_env starts the next game by itself, so
# the observation after the last step is already a new game's: what an agent that went on would see.
_COIN_GAME = _Family(terminated=_never, max_steps=lambda env: env.num_inner_steps * env.num_outer_steps)


def _riddle_told(env: Any, step: _Step) -> Bool[Array, ""]:
    """The prisoner in the room spoke, right or wrong. Otherwise the day limit ended it."""
    actions = jnp.stack([step.actions[agent] for agent in env.agents])
    return actions[step.previous.agent_in_room] == env.game_actions["TELL"]


_SWITCH_RIDDLE = _Family(terminated=_riddle_told, max_steps=lambda env: env.max_steps)


def _jaxnav_terminated(env: Any, step: _Step) -> Bool[Array, "N"]:
    """A crash ends an agent's return; the task ends once all have crashed or arrived."""
    state = step.state
    if env.evaporating:  # the agent leaves the map where it arrives; the flags then hold this step's events only
        return step.previous.done | state.move_term | state.goal_reached
    return state.move_term | jnp.all(state.move_term | state.goal_reached)


_JAXNAV = _Family(
    terminated=_jaxnav_terminated,
    max_steps=lambda env: env.max_steps,
    alive=lambda env, state: ~(state.done if env.evaporating else state.move_term),
    # get_world_state is [N, own id + shared + own view]: the middle is the same for all, and all there is to know.
    world=lambda env, views, state: env.get_world_state(state)[0, env.num_agents : -views[env.agents[0]].shape[0]],
    info=lambda env, state: {} if env.evaporating else {"arrived": state.goal_reached.mean()},
)

# brax's EpisodeWrapper marks time limits. Its automatic reset would overwrite the last observation.
_MABRAX = _Family(
    terminated=lambda env, step: step.last & (step.state.info["truncation"] == 0),
    max_steps=lambda env: math.ceil(env.episode_length / env.action_repeat),
    world=lambda env, views, state: state.obs,
    fixed={"auto_reset": False},
)


def _units(env: Any, state: Any) -> tuple[Array, Array]:
    """Which allies and which enemies live, of SMAX and of its single-team variants."""
    alive = getattr(state, "state", state).unit_alive
    return alive[: env.num_allies], alive[env.num_allies :]


def _smax_alive(env: Any, state: Any) -> Bool[Array, "N"]:
    return getattr(state, "state", state).unit_alive[: len(env.agents)]


def _smax_terminated(env: Any, step: _Step) -> Bool[Array, "N"]:
    """A unit's return ends when it dies or when the battle does; `done` also holds the time limit."""
    allies, enemies = _units(env, step.state)
    return ~_smax_alive(env, step.state) | ~allies.any() | ~enemies.any()


def _smax_info(env: Any, state: Any) -> dict[str, Array]:
    allies, enemies = _units(env, state)
    return {"won": allies.any() & ~enemies.any()}  # both teams dead is a draw, as in SMAX's own win bonus


_SMAX = _Family(
    terminated=_smax_terminated,
    max_steps=lambda env: env.max_steps + 1,  # it, too, compares the count before the step
    alive=_smax_alive,
    legal=lambda env, state: env.get_avail_actions(state),
    world=lambda env, views, state: views["world_state"],
    info=_smax_info,
    extra=("map_name",),
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
    "MPE_simple_facmac_v1": ("SimpleFacmacMPE", _FACMAC),
    "MPE_simple_facmac_3a_v1": ("SimpleFacmacMPE3a", _FACMAC._replace(extra=())),
    "MPE_simple_facmac_6a_v1": ("SimpleFacmacMPE6a", _FACMAC._replace(extra=())),
    "MPE_simple_facmac_9a_v1": ("SimpleFacmacMPE9a", _FACMAC._replace(extra=())),
    "SMAX": ("SMAX", _SMAX),
    "HeuristicEnemySMAX": ("HeuristicEnemySMAX", _SMAX),
    "LearnedPolicyEnemySMAX": ("LearnedPolicyEnemySMAX", _SMAX),
    "overcooked": ("Overcooked", _OVERCOOKED),
    "overcooked_v2": ("OvercookedV2", _OVERCOOKED),
    "hanabi": ("Hanabi", _HANABI),
    "coin_game": ("CoinGame", _COIN_GAME),
    "switch_riddle": ("SwitchRiddle", _SWITCH_RIDDLE),
    "jaxnav": ("JaxNav", _JAXNAV),
    "ant_4x2": ("Ant", _MABRAX),
    "halfcheetah_6x1": ("HalfCheetah", _MABRAX),
    "hopper_3x1": ("Hopper", _MABRAX),
    "humanoid_9|8": ("Humanoid", _MABRAX),
    "walker2d_2x3": ("Walker2d", _MABRAX),
}


def names() -> list[str]:
    """Every environment of JaxMARL that jmarl adapts."""
    return list(_ENVIRONMENTS)


def refusal(name: str) -> str | None:
    """Why jmarl does not adapt an environment that JaxMARL registers; None if it does."""
    if name in ("storm", "storm_2p", "storm_np"):
        return f"{name} has an interface of its own (arrays in place of dicts of agents), which jmarl does not adapt."
    if name.startswith("JaxRobotarium"):
        return f"{name} needs JaxRobotarium, a git submodule that JaxMARL's wheel does not contain."
    return None


def agent_dicts(name: str, options: dict[str, Any]) -> AgentDicts:
    """JaxMARL's environment `name`."""
    environments = _import_environments()
    class_name, family = _ENVIRONMENTS[name]
    if family is _MABRAX and not environments.MABRAX_AVAILABLE:
        raise ImportError(f'{name} needs brax, which is not installed: pip install "jmarl[mabrax]".')
    constructor = getattr(environments, class_name)
    known = [*_arguments(constructor, environments), *family.extra]
    for option in options:
        if option not in known or option in family.fixed:
            raise unknown(f"option of {name}", option, [o for o in known if o not in family.fixed], TypeError)
    options, shaped_reward = {**options, **family.fixed}, options.get("shaped_reward", 0.0)
    options.pop("shaped_reward", None)
    _resolve_names(name, options)
    env = constructor(**options)
    agents = tuple(env.agents if family.agents is None else family.agents(env))
    # Scripted agents still have to be in the dict of actions.
    idle = {a: jnp.zeros(env.action_space(a).shape) for a in env.agents if a not in agents}

    def step(key: Array, state: Any, actions: dict[str, Array]) -> Any:
        views, next_state, rewards, dones, info = env.step_env(key, state, {**actions, **idle})
        if shaped_reward:
            rewards = {a: rewards[a] + shaped_reward * info["shaped_reward"][a] for a in agents}
        terminated = family.terminated(env, _Step(state, actions, next_state, dones["__all__"]))
        episode = {} if family.info is None else family.info(env, next_state)
        return views, next_state, rewards, terminated, dones["__all__"], episode

    def bound(function: Callable[..., Any] | None) -> Callable[..., Any] | None:
        return None if function is None else lambda *args: function(env, *args)

    return AgentDicts(
        agents=agents,
        action_spaces={agent: env.action_space(agent) for agent in agents},
        reset=env.reset,
        step=step,
        alive=bound(family.alive),
        legal=bound(family.legal) if hasattr(env.action_space(agents[0]), "n") else None,
        world=bound(family.world),
        max_steps=family.max_steps(env),
        is_fixed_length=family.terminated is _never,
        unwrapped=env,
    )


def _resolve_names(name: str, options: dict[str, Any]) -> None:
    """Maps and layouts given by name, in place."""
    kinds = ["Discrete", "Continuous"]  # SMAX writes them in lower case, and says so itself
    if name.startswith("MPE") and options.get("action_type", "Discrete") not in kinds:
        raise unknown(f"action_type of {name}", options["action_type"], kinds, ValueError)
    if "map_name" in options:
        from jaxmarl.environments.smax.smax_env import MAP_NAME_TO_SCENARIO

        if "scenario" in options:
            raise TypeError(f"{name} takes map_name or scenario, not both.")
        options["scenario"] = _look_up("map of SMAX", options.pop("map_name"), MAP_NAME_TO_SCENARIO)
    if "layout" in options:
        from jaxmarl.environments import overcooked_layouts, overcooked_v2_layouts

        layouts = overcooked_layouts if name == "overcooked" else overcooked_v2_layouts
        options["layout"] = _look_up(f"layout of {name}", options["layout"], layouts)


def _look_up(what: str, key: Any, table: dict[str, Any]) -> Any:
    if not isinstance(key, str):
        return key  # the object itself
    if key not in table:
        raise unknown(what, key, list(table), ValueError)
    return table[key]


def _arguments(constructor: Any, environments: Any) -> list[str]:
    """Names of a constructor's arguments and of those that its **kwargs pass on; MPE ignores others in silence."""
    classes = inspect.getmro(constructor) if inspect.isclass(constructor) else [constructor]
    if environments.SMAX not in classes and any(c.__name__ == "EnemySMAX" for c in classes):
        classes = [*classes, environments.SMAX]
    found = []
    for cls in classes:
        if cls in (object, environments.MultiAgentEnv):
            continue
        parameters = inspect.signature(cls).parameters.values()
        found += [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
        if cls is not environments.SMAX and not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return found


def _import_environments() -> Any:
    """`jaxmarl.environments`, imported in silence: it takes seconds and prints about its submodules."""
    with _silence():
        from jaxmarl import environments
    return environments


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    # redirect_stdout is not enough: jaxmarl sets sys.stdout and sys.stderr to sys.__stdout__ and sys.__stderr__ while
    # it is imported, which would also cut off a notebook's or pytest's own streams for good.
    names = ("stdout", "stderr", "__stdout__", "__stderr__")
    streams = {name: getattr(sys, name) for name in names}
    for name in names:
        setattr(sys, name, io.StringIO())
    try:
        yield
    finally:
        for name, stream in streams.items():
            setattr(sys, name, stream)
