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

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jmarl.envs.flags import in_usual_bits, usual_flags
from jmarl.envs.stacked import AgentDicts, scalars, stack, unknown
from jmarl.types import Entities, EntityLayout, Env


class RawStep(NamedTuple):
    """What a rule may look at to tell how a step of JaxMARL's ended.

    Attributes:
      previous: the environment's state before the step.
      actions: of each agent, by name.
      state: the state after the step.
      dones: by agent, and "__all__".
      info: as the environment gave it.
    """

    previous: Any
    actions: dict[str, Array]
    state: Any
    dones: dict[str, Array]
    info: dict[str, Any]

    @property
    def last(self) -> Bool[Array, ""]:
        """The episode ends after this step."""
        return self.dones["__all__"]


class _Family(NamedTuple):
    """How to read one kind of environment. Every function takes the environment first.

    Attributes:
      terminated: `(env, step) -> [N] or scalar`, time limits left out.
      max_steps: `(env) -> int`.
      alive, legal, world: as in `AgentDicts`.
      info: `(env, step) -> dict` of scalars that describe the episode at its last step.
      agents: those who act; None for all of `env.agents`.
      fixed: constructor arguments that jmarl depends on.
      extra: options beside the constructor's arguments.
      entities: `(env) -> layout of its views`, or None where they hold no lists of entities.
    """

    terminated: Callable[[Any, RawStep], Array]
    max_steps: Callable[[Any], int | None]
    alive: Callable[[Any, Any], Array] | None = None
    legal: Callable[[Any, Any], dict[str, Array]] | None = None
    world: Callable[[Any, Any, Any], Array] | None = None
    info: Callable[[Any, RawStep], dict[str, Array]] | None = None
    agents: Callable[[Any], list[str]] | None = None
    fixed: dict[str, Any] = {}  # noqa: RUF012  a NamedTuple's default, never written to
    extra: tuple[str, ...] = ()
    entities: Callable[[Any], EntityLayout | None] | None = None


def _never(env: Any, step: RawStep) -> Bool[Array, ""]:
    """Nothing but the time limit ends an episode."""
    return jnp.zeros((), bool)


# MPE compares the count *before* the step with max_steps: 26 steps for max_steps=25.
_MPE_PHYSICS = ("contact_force", "contact_margin", "damping", "mass", "u_noise", "c_noise")  # read from its **kwargs
_MPE = _Family(terminated=_never, max_steps=lambda env: env.max_steps + 1, extra=_MPE_PHYSICS)


def _spread_entities(env: Any) -> EntityLayout:
    """Own velocity and place; places of the landmarks and of the others; what the others say."""
    others, start = env.num_agents - 1, 4 + 2 * env.num_landmarks
    return EntityLayout(
        own=((0, 4),),
        kinds=(
            Entities("landmarks", env.num_landmarks, ((4, 2),)),
            Entities("agents", others, ((start, 2), (start + 2 * others, env.dim_c))),
        ),
    )


_SPREAD = _MPE._replace(entities=_spread_entities)


def _facmac_entities(env: Any) -> EntityLayout | None:
    """Own velocity and place; places of the landmarks, of the other hunters and of the prey; velocity of the last prey.

    Who is out of sight is zeros, and nothing tells these from a place right here.
    """
    if env.num_good_agents != 1:
        return None
    others, start = env.num_adversaries - 1, 4 + 2 * env.num_landmarks
    return EntityLayout(
        own=((0, 4),),
        kinds=(
            Entities("landmarks", env.num_landmarks, ((4, 2),)),
            Entities("hunters", others, ((start, 2),)),
            Entities("prey", 1, ((start + 2 * others, 2), (start + 2 * others + 2, 2))),
        ),
    )


# The prey is scripted: FACMAC's step drops the actions of env.good_agents. Only the hunters are agents here.
# They see a limited radius; the state is what everybody would see without it.
_FACMAC = _MPE._replace(
    entities=_facmac_entities,
    agents=lambda env: env.adversaries,
    world=lambda env, views, state: jnp.concatenate([env.get_world_state(state)[agent] for agent in env.agents]),
)

# A fixed number of steps; `state.done` in is_terminal is the previous step's, so it adds nothing.
_OVERCOOKED = _Family(terminated=_never, max_steps=lambda env: env.max_steps, extra=("shaped_reward",))


def _hanabi_max_steps(env: Any) -> int:
    """No game has more moves than this.

    Each play and each discard draws a card while there is one, so at most `num_left` moves are plays or discards before
    the deck is empty; from the move that draws the last card on, everybody has one more. The other moves are hints. A
    hint costs a token, and no more tokens are there to spend than those of the start and one for each card: discarding
    it, or completing a colour with it, returns one. (With no card left after the deal, the first move counts as the one
    that empties the deck.)
    """
    num_left = max(int(env.deck_size) - env.num_agents * env.hand_size, 1)
    num_hints = env.max_info_tokens + num_left
    return num_left + num_hints + env.num_agents


# Lives, deck or fireworks end a game; there is no time limit.
_HANABI = _Family(
    terminated=lambda env, step: step.last,
    max_steps=_hanabi_max_steps,
    legal=lambda env, state: env.get_legal_moves(state),
)

# A fixed number of games of fixed length, and nothing in a game ends it. step_env starts the next game by itself, so
# the observation after the last step is already a new game's: what an agent that went on would see.
_COIN_GAME = _Family(terminated=_never, max_steps=lambda env: env.num_inner_steps * env.num_outer_steps)


def _riddle_told(env: Any, step: RawStep) -> Bool[Array, ""]:
    """The prisoner in the room spoke, right or wrong. Otherwise the day limit ended it."""
    actions = jnp.stack([step.actions[agent] for agent in env.agents])
    return actions[step.previous.agent_in_room] == env.game_actions["TELL"]


_SWITCH_RIDDLE = _Family(terminated=_riddle_told, max_steps=lambda env: env.max_steps)


def _jaxnav_terminated(env: Any, step: RawStep) -> Bool[Array, "N"]:
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
    info=lambda env, step: {} if env.evaporating else {"arrived": step.state.goal_reached.mean()},
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


def _smax_terminated(env: Any, step: RawStep) -> Bool[Array, "N"]:
    """A unit's return ends when it dies or when the battle does; `done` also holds the time limit."""
    allies, enemies = _units(env, step.state)
    return ~_smax_alive(env, step.state) | ~allies.any() | ~enemies.any()


def _smax_info(env: Any, step: RawStep) -> dict[str, Array]:
    allies, enemies = _units(env, step.state)
    return {"won": allies.any() & ~enemies.any()}  # both teams dead is a draw, as in SMAX's own win bonus


def _smax_entities(env: Any) -> EntityLayout | None:
    """The other units of one's own side, those of the other side, then oneself; an attack for each of the latter.

    Units that are dead or out of sight are zeros; others have health. Both sides list their own units first, so one
    layout serves two sides of equal numbers. "conic" views list whoever is in a direction, without telling sides.
    """
    acting_sides_differ = len(env.agents) > env.num_allies and env.num_allies != env.num_enemies
    if env.observation_type != "unit_list" or acting_sides_differ:
        return None
    width, others = len(env.unit_features), env.num_allies - 1
    is_discrete = env.action_type == "discrete"
    enemies = Entities(
        "enemies",
        env.num_enemies,
        ((width * others, width),),
        present=env.unit_features.index("health"),
        first_action=env.num_movement_actions if is_discrete else None,
    )
    allies = Entities("allies", others, ((0, width),), present=enemies.present)
    own = (width * (others + env.num_enemies), len(env.own_features))
    return EntityLayout(own=(own,), kinds=(allies, enemies))


_SMAX = _Family(
    terminated=_smax_terminated,
    max_steps=lambda env: env.max_steps + 1,  # it, too, compares the count before the step
    alive=_smax_alive,
    legal=lambda env, state: env.get_avail_actions(state),
    world=lambda env, views, state: views["world_state"],
    info=_smax_info,
    extra=("map_name",),
    entities=_smax_entities,
)

_ENVIRONMENTS: dict[str, tuple[str, _Family]] = {
    "MPE_simple_v3": ("SimpleMPE", _MPE),
    "MPE_simple_tag_v3": ("SimpleTagMPE", _MPE),
    "MPE_simple_world_comm_v3": ("SimpleWorldCommMPE", _MPE),
    "MPE_simple_spread_v3": ("SimpleSpreadMPE", _SPREAD),
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


@usual_flags
def make(name: str, options: dict[str, Any], **views: Any) -> Env:
    """JaxMARL's environment `name`; `views` are arguments of `stack`."""
    _refuse_pickles(name, options)
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
    return stack(name, _agent_dicts(constructor(**options), family, float(shaped_reward)), **views)


@usual_flags
def from_jaxmarl(
    env: object,
    *,
    terminated: Callable[[RawStep], Array] | None = None,
    alive: Callable[[Any], Array] | None = None,
    legal: Callable[[Any], dict[str, Array]] | None = None,
    world: Callable[[dict[str, Array], Any], Array] | None = None,
    info: Callable[[RawStep], dict[str, Array]] | None = None,
    max_steps: int | None = None,
    shaped_reward: float = 0.0,
    agent_ids: bool = False,
    time_limit: str = "truncated",
    flatten: bool = False,
) -> Env:
    """Any object with JaxMARL's interface: `agents`, `reset`, `step_env` and `action_space`.

    Objects of JaxMARL's own classes, and of classes derived from them, are read as `jmarl.make` reads them by name.
    For all others the rules are those below; each can be replaced by a function, which is traced like the environment.

    Args:
      env: the environment itself, without JaxMARL's wrappers: jmarl resets and counts by itself.
      terminated: `(step) -> [N] or scalar`: whose return ends with this step, time limits left out; `step` is a
        `RawStep`. By default everybody whose `dones` entry is True, and everybody when "__all__" is, but for an
        episode that ends on step `max_steps` or later: that is a time limit, and truncates. Without `max_steps` every
        end is a termination.
      alive: `(state) -> [N]` bool: who acts now. By default all but those that the step before has terminated.
      legal: `(state) -> dict of masks [A]`. By default `env.get_avail_actions` where a class defines it, or everything.
      world: `(views, state) -> [S]`, the global state. By default `views["world_state"]`, or all views concatenated.
      info: `(step) -> dict` of scalars that describe an episode at its last step. By default those in JaxMARL's `info`.
      max_steps: length of the longest episode; by default `env.max_steps`, or unknown.
      shaped_reward: this multiple of `info["shaped_reward"][agent]` is added to each reward.
      agent_ids, time_limit, flatten: see `jmarl.make`.

    Example:
      >>> from jaxmarl.environments import SimpleSpreadMPE
      >>> from_jaxmarl(SimpleSpreadMPE(num_agents=2), agent_ids=True).spec.max_steps
      26
    """
    _require_interface(env)
    env = in_usual_bits(env)
    name, family = _family_of(env)
    given = {"terminated": terminated, "alive": alive, "legal": legal, "world": world, "info": info}
    rules: dict[str, Any] = {name: _with_env(rule) for name, rule in given.items() if rule is not None}
    if max_steps is not None:
        rules["max_steps"] = lambda env: max_steps
    dicts = _agent_dicts(env, (family or _by_convention(env))._replace(**rules), float(shaped_reward))
    if family is None and (terminated is None or alive is None):
        dicts = _remembering(dicts, is_limited=terminated is None, is_alive=alive)
    # The families' own rules are known to end the return of whoever does not act.
    dicts = dicts._replace(may_wait=family is None or terminated is not None or alive is not None)
    return stack(name, dicts, agent_ids=agent_ids, time_limit=time_limit, flatten=flatten)


def _with_env(rule: Callable[..., Any]) -> Callable[..., Any]:
    return lambda env, *args: rule(*args)


def _agent_dicts(env: Any, family: _Family, shaped_reward: float) -> AgentDicts:
    agents = tuple(env.agents if family.agents is None else family.agents(env))
    # Scripted agents still have to be in the dict of actions.
    idle = {a: jnp.zeros(env.action_space(a).shape) for a in env.agents if a not in agents}

    def step(key: Array, state: Any, actions: dict[str, Array]) -> Any:
        views, next_state, rewards, dones, info = env.step_env(key, state, {**actions, **idle})
        shaped = info.get("shaped_reward")
        if shaped_reward:
            rewards = {a: rewards[a] + shaped_reward * shaped[a] for a in agents}
        raw = RawStep(state, actions, next_state, dones, info)
        episode = {} if family.info is None else family.info(env, raw)
        return views, next_state, rewards, shaped, family.terminated(env, raw), raw.last, episode

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
        entities=None if family.entities is None else family.entities(env),
    )


# --------------------------------------------------------------------------------- objects of classes not known here


class _Memory(NamedTuple):
    state: Any
    steps: Int[Array, ""]
    is_alive: Bool[Array, "N"]


def _by_convention(env: Any) -> _Family:
    """What JaxMARL's interface says of an environment that has no family."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    views, _ = jax.eval_shape(env.reset, key)
    has_views = isinstance(views, dict) and all(agent in views for agent in env.agents)
    if not has_views:
        raise TypeError(
            f"{type(env).__name__}.reset must return (views, state) with a dict of views by agent, which has no such "
            f"form here: jmarl adapts environments whose agents are the keys of dicts."
        )
    return _Family(
        terminated=lambda env, step: jnp.stack([step.dones.get(a, step.last) | step.last for a in env.agents]),
        max_steps=lambda env: getattr(env, "max_steps", None),
        legal=(lambda env, state: env.get_avail_actions(state)) if _says_what_is_legal(env) else None,
        world=(lambda env, views, state: views["world_state"]) if "world_state" in views else None,
        info=lambda env, step: scalars(step.info),
    )


def _says_what_is_legal(env: Any) -> bool:
    """Not by JaxMARL's base class, whose method only raises."""
    owners = [cls for cls in type(env).__mro__ if "get_avail_actions" in vars(cls)]
    return bool(owners) and owners[0].__name__ != "MultiAgentEnv"


def _remembering(dicts: AgentDicts, *, is_limited: bool, is_alive: Callable[[Any], Array] | None) -> AgentDicts:
    """The same with a state that remembers what `done` does not say: the steps taken, and who was terminated."""

    def reset(key: Array) -> Any:
        views, state = dicts.reset(key)
        return views, _Memory(state, jnp.int32(0), jnp.ones(len(dicts.agents), bool))

    def step(key: Array, memory: _Memory, actions: dict[str, Array]) -> Any:
        views, state, rewards, shaped, terminated, last, info = dicts.step(key, memory.state, actions)
        steps = memory.steps + 1
        terminated = jnp.broadcast_to(terminated, memory.is_alive.shape)
        if is_limited and dicts.max_steps is not None:
            # `done` is True for everybody then: only those who were terminated before are.
            terminated = jnp.where(last & (steps >= dicts.max_steps), ~memory.is_alive, terminated)
        return views, _Memory(state, steps, ~terminated), rewards, shaped, terminated, last, info

    of_state = lambda rule: None if rule is None else lambda memory: rule(memory.state)  # noqa: E731
    world = dicts.world
    return dicts._replace(
        reset=reset,
        step=step,
        alive=(lambda memory: memory.is_alive) if is_alive is None else of_state(is_alive),
        legal=of_state(dicts.legal),
        world=None if world is None else lambda views, memory: world(views, memory.state),
    )


def _family_of(env: Any) -> tuple[str, _Family | None]:
    """A name for the spec, and the family of an object whose class, or one that it derives from, is JaxMARL's."""
    environments = _import_environments()
    known = {getattr(environments, class_name, None): family for class_name, family in _ENVIRONMENTS.values()}
    name = str(getattr(env, "name", type(env).__name__))
    for cls in type(env).__mro__:
        if cls in known:
            for argument, value in known[cls].fixed.items():
                if getattr(env, argument, value) != value:
                    raise ValueError(f"{name} was made with another {argument} than {value}, which jmarl needs.")
            return name, known[cls]
    return name, None


def _require_interface(env: Any) -> None:
    name = type(env).__name__
    if any(cls.__name__ == "JaxMARLWrapper" for cls in type(env).__mro__):
        raise TypeError(f"{name} is a wrapper of JaxMARL's: give the environment in it, as jmarl counts by itself.")
    for attribute in ("agents", "reset", "step_env", "action_space"):
        if not hasattr(env, attribute):
            raise TypeError(
                f"{name} has no {attribute}: jmarl.make takes a name, an object with JaxMARL's agents, reset, step_env "
                f"and action_space, or gymnax's (env, params)."
            )


# ------------------------------------------------------------------------------------------------ options by name


def _refuse_pickles(name: str, options: dict[str, Any]) -> None:
    """JaxNav's map buffers are pickles, and options may come from a file that somebody else wrote."""
    map_params = options.get("map_params")
    names_files = "dir_path" in options or (isinstance(map_params, dict) and "dir_path" in map_params)
    if options.get("map_id") == "Grid-Buffer" or names_files:
        raise ValueError(
            f"{name} with map_id='Grid-Buffer' or a dir_path reads pickles, which can run any code: if you trust the "
            f"files, make the object in your own code, jaxmarl.environments.JaxNav(...), and give it to jmarl.make."
        )


def _resolve_names(name: str, options: dict[str, Any]) -> None:
    """Maps and layouts given by name, in place."""
    kinds = ["Discrete", "Continuous"]  # SMAX writes them in lower case, and says so itself
    if name.startswith("MPE") and options.get("action_type", "Discrete") not in kinds:
        raise unknown(f"action_type of {name}", options["action_type"], kinds, ValueError)
    if "map_name" in options or "scenario" in options:
        from jaxmarl.environments.smax.smax_env import MAP_NAME_TO_SCENARIO

        if "map_name" in options and "scenario" in options:
            raise TypeError(f"{name} takes map_name or scenario, not both.")
        given = options.pop("map_name") if "map_name" in options else options["scenario"]
        options["scenario"] = _look_up("map of SMAX", given, MAP_NAME_TO_SCENARIO)
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


@usual_flags
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
