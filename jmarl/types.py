"""The data that flows through jmarl, and the bundles of functions that make and consume it.

Axes are always `[T, B, N, ...]`: time, environments, agents, features. Data are immutable pytrees of arrays; bundles
are NamedTuples of pure functions. Nothing in this module computes.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, Shaped

from jmarl.deprecation import renamed_attribute

Params = Any  # a pytree of arrays
Carry = Any  # what a recurrent network remembers; () for feed-forward ones
Action = Array  # [.., N] int32, or [.., N, A] float32
Measured = dict[str, Array]  # what acting measured, by name: "log_prob", "value"
Metrics = dict[str, Array]
Config = Any  # of an algorithm: a frozen dataclass that is a pytree, see `jmarl.configs`, or a dict of them by name
Numeric = float | int | Array | np.ndarray | np.number  # a number, or a tracer that stands for one


def static(default: Any) -> Any:
    """A config field that sets a shape or a branch: part of the tree's structure, so changing it recompiles."""
    return struct.field(pytree_node=False, default=default)


class Replaceable:
    """What `flax.struct.dataclass` adds, said to type checkers."""

    if TYPE_CHECKING:

        def replace(self, **updates: Any) -> Self: ...


# ---------------------------------------------------------------------------------------------------------- data


@struct.dataclass(kw_only=True)
class Observation(Replaceable):
    """What is known at one time step.

    Attributes:
      agents: each agent's own view, zero-padded to the widest: `[.., N, O]`, or images `[.., N, H, W, C]`. Bytes where
        `EnvSpec.obs_dtype` says so, which networks read as the same numbers; else float32.
      state: global state: the environment's own, or all views concatenated: `[.., S]` or `[.., H, W, C]`, of the same
        type.
      action_mask: legal actions, False also for padding; None for continuous actions.
      agent_mask: the agent acts now: it is there, alive, and it is its turn. Whether its step counts in a loss is said
        by `Trajectory.weight`: that of an agent that waits does, that of one whose return has ended does not.
    """

    agents: Shaped[Array, "..."]
    state: Shaped[Array, "..."]
    action_mask: Bool[Array, "*batch N A"] | None
    agent_mask: Bool[Array, "*batch N"]

    def as_floats(self) -> "Observation":
        """The same, with views and state in float32: differences of bytes would begin anew below 0."""
        return self.replace(agents=as_floats(self.agents), state=as_floats(self.state))


@struct.dataclass(kw_only=True)
class Outcome(Replaceable):
    """What an environment answers to an action, beside the next observation.

    Attributes:
      reward: r_{t+1} of each agent, float32.
      terminated: the agent's return ends here, so nothing is bootstrapped: the task ended, or the agent died.
      last: the episode ends after this step, by termination or by a time limit.
      shaped_reward: what an environment would pay besides, as an aid to learning: `combinators.shaped` reads it. No
        part of `reward`, nor of a return. None where there is none.
      info: scalars that describe an episode when read at its last step, such as {"won": 1.0}.
    """

    reward: Float[Array, "*batch N"]
    terminated: Bool[Array, "*batch N"]
    last: Bool[Array, "*batch"]
    shaped_reward: Float[Array, "*batch N"] | None = None
    info: dict[str, Array] = struct.field(default_factory=dict)


@struct.dataclass(kw_only=True)
class Transition(Replaceable):
    """One step of interaction. `truncated` is `last & ~terminated`; a single `done` flag is never stored.

    Attributes:
      obs: o_t.
      carry: what the policy remembered before it read o_t; () for feed-forward ones. `rollout` records it.
      first: s_t starts an episode, so recurrent carries are reset *before* it is read.
      action: a_t.
      reward, terminated, last, shaped_reward: see `Outcome`.
      next_obs: the true o_{t+1}, before any reset. None where a learner does not need it.
      measured: what `Learner.act` measured as it chose a_t, such as its log-probability.
    """

    obs: Observation
    carry: Carry = ()
    first: Bool[Array, "*batch"]
    action: Array
    reward: Float[Array, "*batch N"]
    terminated: Bool[Array, "*batch N"]
    last: Bool[Array, "*batch"]
    shaped_reward: Float[Array, "*batch N"] | None = None
    next_obs: Observation | None = None
    measured: Measured = struct.field(default_factory=dict)


@struct.dataclass(kw_only=True)
class Trajectory(Replaceable):
    """The only batch type: `M` sequences of `L` steps, and what the networks remembered before the first of them.

    Attributes:
      steps: transitions with leading axes `[L, M]`.
      carry: the recurrent carry before `steps[0]`, leading axis `[M]`; () for feed-forward networks.
      next_carry: the one after the last step of a rollout; () where nobody goes on from it.
      weight: whose step counts in a loss, and how much. 0 for padding and for an agent whose return has ended, an
        importance weight elsewhere. Losses of policies count only those who act, too. None: whoever acts counts 1.
      index: where a replay buffer keeps each sequence; None for a rollout.
    """

    steps: Transition
    carry: Carry = ()
    next_carry: Carry = ()
    weight: Float[Array, "L M N"] | Bool[Array, "L M N"] | None = None
    index: Int[Array, "M"] | None = None


@struct.dataclass(kw_only=True)
class Moments(Replaceable):
    """Exponential moving moments of what was seen, see `jmarl.normalize`.

    Attributes:
      mean: average of x.
      variance: average squared distance from it.
      weight: what the weights of the averages sum to: 0 before the first update, towards 1 after many.
    """

    mean: Float[Array, "*batch"]
    variance: Float[Array, "*batch"]
    weight: Float[Array, "*batch"]


@struct.dataclass(kw_only=True)
class TrainState(Replaceable):
    """Everything an algorithm learns. Arrays only: it can be vmapped, donated, saved and compared leaf by leaf.

    Attributes:
      params: online parameters.
      target_params: slowly moving copies; () where an algorithm has none.
      opt_state: optimiser state.
      step: optimiser steps taken, int32. Learning-rate schedules read it.
      env_steps: environment steps taken in all environments together, int32, counted by `rollout` up to 2^31 - 1.
        Schedules of exploration read it. None where nobody counts: `start` begins to, and so does a loop of your own
        with `state.replace(env_steps=jnp.int32(0))`.
      moments: running moments by name, such as those of a value normaliser.
    """

    params: Params
    target_params: Params = ()
    opt_state: Any = ()
    step: Int[Array, "*batch"]
    env_steps: Int[Array, "*batch"] | None = None
    moments: dict[str, Moments] = struct.field(default_factory=dict)


@struct.dataclass(kw_only=True)
class EpisodeStats(Replaceable):
    """The episodes that are under way in `B` environments.

    Attributes:
      returns: of each agent so far.
      length: steps so far.
      is_over: the agent's return has ended, and it has not acted since.
    """

    returns: Float[Array, "*batch B N"]
    length: Int[Array, "*batch B"]
    is_over: Bool[Array, "*batch B N"]


@struct.dataclass(kw_only=True)
class RunState(Replaceable):
    """A whole run between two iterations: enough to go on as if nothing had happened.

    Attributes:
      train_state: what was learnt.
      env_state, obs, first, carry: the environments and what the policy remembers of them, leading axis `[B]`.
      buffer: replay, () for on-policy algorithms.
      episodes: statistics of the episodes under way.
      key: the source of all randomness to come.
    """

    train_state: TrainState
    env_state: Any
    obs: Observation
    first: Bool[Array, "*batch B"]
    carry: Carry
    buffer: Any = ()
    episodes: EpisodeStats
    key: PRNGKeyArray

    @property
    def env_steps(self) -> Int[Array, "*batch"] | None:
        """Environment steps taken in all environments together."""
        return self.train_state.env_steps

    @property
    def learner(self) -> TrainState:
        """The old name of `train_state`."""
        return renamed_attribute(self, "learner", "train_state")


# ------------------------------------------------------------------------------------------------------- bundles


class Entities(NamedTuple):
    """Entities of one kind, such as enemies, in an agent's view.

    Attributes:
      name: of the kind.
      num: how many the view has room for.
      blocks: where their features stand, `(start, width)` each: a block is `num` rows of `width` features, one row for
        each entity. An entity's features are its rows of all blocks, one after the other.
      present: number of that feature of an entity which is above 0 where the agent sees it; None where it sees all.
      first_action: action `first_action + i` is done to entity i, such as an attack; None where no action is.
    """

    name: str
    num: int
    blocks: tuple[tuple[int, int], ...]
    present: int | None = None
    first_action: int | None = None


class EntityLayout(NamedTuple):
    """How an agent's view, a vector, falls into what it says of the agent itself and into lists of entities.

    Attributes:
      own: blocks `(start, width)` of features of the agent itself.
      kinds: lists of entities.
    """

    own: tuple[tuple[int, int], ...]
    kinds: tuple[Entities, ...]


class EnvSpec(NamedTuple):
    """Static facts about an environment: all that a learner knows of it.

    Attributes:
      name: as given to `jmarl.make`.
      agents: names, in the order of the agent axis.
      obs_shape: of one agent's view, padding and id included: `(O,)` or `(H, W, C)`.
      state_shape: of the global state: `(S,)` or `(H, W, C)`.
      num_actions: width of the discrete action axis, padding included; None for continuous actions.
      action_size: dimensions of a continuous action, padding included; None for discrete ones.
      action_low, action_high: bounds of a continuous action, one tuple of `action_size` numbers per agent.
      obs_sizes: each agent's true number of observation features (id included), before padding; () if none is padded.
      action_sizes: each agent's true number of actions, or of action dimensions; () if none is padded.
      max_steps: the longest possible episode in steps; None if unbounded or unknown.
      min_steps: the shortest possible one; `rollout` draws no more start states than episodes of so many steps need.
      may_wait: an agent may not act although its return goes on, as where agents take turns. Where nobody does,
        rollouts need not say whose step counts: those of who acts.
      always_act: every agent acts at every step, so `obs.agent_mask` is taken to be True and masking costs nothing.
      has_ids: views hold a one-hot id, by which a network that agents share can tell them apart.
      teams: the team of each agent, as a number, where teams oppose each other; () if all are of one.
      state_is_views: `obs.state` is what the agents see, one after the other, without ids and padding, and all of them
        always act: replay need not keep it.
      entities: where every agent's view holds lists of entities, for `torso="entities"`; None where that is not known.
      obs_dtype: "float32", or "uint8" for views and states of bytes, such as images and maps of what is where: rollouts
        and replay then hold a quarter as much.
    """

    name: str
    agents: tuple[str, ...]
    obs_shape: tuple[int, ...]
    state_shape: tuple[int, ...]
    num_actions: int | None = None
    action_size: int | None = None
    action_low: tuple[tuple[float, ...], ...] | None = None
    action_high: tuple[tuple[float, ...], ...] | None = None
    obs_sizes: tuple[int, ...] = ()
    action_sizes: tuple[int, ...] = ()
    max_steps: int | None = None
    min_steps: int = 1
    may_wait: bool = True
    always_act: bool = False
    has_ids: bool = False
    teams: tuple[int, ...] = ()
    entities: EntityLayout | None = None
    state_is_views: bool = False
    obs_dtype: str = "float32"

    @property
    def num_agents(self) -> int:
        return len(self.agents)

    @property
    def is_discrete(self) -> bool:
        return self.num_actions is not None


class Env(NamedTuple):
    """One environment, unbatched: `vmap` makes many. It never resets itself; `rollout` and `evaluate` do.

    Attributes:
      reset: `(key) -> (env_state, obs)`.
      step: `(env_state, action, key) -> (env_state, obs, outcome)`; `obs` is the true successor, also at an episode's
        end. `action` is `[N]` int32 or `[N, A]` float32.
      spec: static facts.
      unwrapped: the environment underneath, for rendering; None where there is none.
      restart: `(env_state) -> (env_state, obs)`, the next episode after one that has ended, of environments that begin
        it by themselves; None: `reset` begins it. See `jmarl.envs.host`.
      release: `(env_state) -> None`, tells that nobody goes on with this episode; None where that frees nothing.
    """

    reset: Callable[[PRNGKeyArray], tuple[Any, Observation]]
    step: Callable[[Any, Action, PRNGKeyArray], tuple[Any, Observation, Outcome]]
    spec: EnvSpec
    unwrapped: Any = None
    restart: Callable[[Any], tuple[Any, Observation]] | None = None
    release: Callable[[Any], None] | None = None


class Network(NamedTuple):
    """A network with memory; a feed-forward one has the carry ().

    Attributes:
      init: `(key) -> params`.
      apply: `(params, carry, x, first) -> (carry, out)` with `x` `[L, M, ..]` and `first` `[L, M]` bool. Where
        `first[t]`, the carry is reset before `x[t]` is read.
      init_carry: `(batch_shape) -> carry`, all zeros, with these leading axes.
      batch_axis: where M is in the outputs, behind time: 1, and 2 where an ensemble's members come first.
    """

    init: Callable[[PRNGKeyArray], Params]
    apply: Callable[[Params, Carry, Any, Array], tuple[Carry, Any]]
    init_carry: Callable[[tuple[int, ...]], Carry]
    batch_axis: int = 1


class Policy(NamedTuple):
    """What acts and is learnt by gradients of its log-probabilities, and a value beside it.

    Discrete, continuous, or one agent after the other: a learner asks for no more than this.

    Attributes:
      init: `(key) -> params`.
      init_carry: `(batch_shape) -> carry`.
      sample: `(params, carry, obs, first, key) -> (carry, action, measured)`, exploring, for one step: leading axis
        `[B]`. `measured` has "log_prob" `[B, N]` and "value" `[B, N]`.
      mode: `(params, carry, obs, first) -> (carry, action)`, greedily, for one step. It reads the actor alone, and
        leaves a critic's part of the carry as it was.
      evaluate: `(params, carry, obs, first, action) -> (log_prob, entropy, value)`, each `[L, M, N]`, of sequences
        `[L, M, ..]`.
    """

    init: Callable[[PRNGKeyArray], Params]
    init_carry: Callable[[tuple[int, ...]], Carry]
    sample: Callable[[Params, Carry, Observation, Array, PRNGKeyArray], tuple[Carry, Action, Measured]]
    mode: Callable[[Params, Carry, Observation, Array], tuple[Carry, Action]]
    evaluate: Callable[[Params, Carry, Observation, Array, Action], tuple[Array, Array, Array]]


class Mixer(NamedTuple):
    """One value of a team from its agents' values.

    Attributes:
      init: `(key) -> params`.
      apply: `(params, q [.., N, A], action [.., N], obs) -> [..]`: the team's value of a joint action. A mixer sees the
        values of all actions: it selects those of `action`, and counts those of `obs.agent_mask` alone.
    """

    init: Callable[[PRNGKeyArray], Params]
    apply: Callable[[Params, Array, Action, Observation], Array]


class Buffer(NamedTuple):
    """Replay. `jmarl.buffers` has some; any bundle of these functions serves.

    Attributes:
      init: `(rollout) -> state`, empty. Only shapes and dtypes of the rollout `[T, B, ..]` are read.
      add: `(state, rollout) -> state`, the oldest is overwritten. Rollouts follow each other: where a step is not
        `first`, its view is that of the successor of its environment's step before.
      sample: `(state, key) -> batch`, with `next_obs` and `weight`; its `carry` is the one before each sequence.
      set_priority: `(state, index [M], priority [M]) -> state`; None where sampling is uniform.
      settings: what it was made with, by name: a run is resumed only with the same.
      for_env: `(spec) -> buffer`, the same for an environment of which something is known, so that it may keep less;
        None where that makes no difference.
    """

    init: Callable[[Trajectory], Any]
    add: Callable[[Any, Trajectory], Any]
    sample: Callable[[Any, PRNGKeyArray], Trajectory]
    set_priority: Callable[[Any, Array, Array], Any] | None = None
    settings: dict[str, Any] = {}  # noqa: RUF012  a NamedTuple's default, never written to
    for_env: Callable[[EnvSpec], "Buffer"] | None = None


class Learner(NamedTuple):
    """An algorithm, bound to an environment's spec and a config. Built inside the trace, so a config may hold tracers.

    Attributes:
      init: `(key) -> TrainState`, whose `env_steps` nobody counts yet.
      init_carry: `(batch_shape) -> Carry`, e.g. `init_carry((num_envs,))`.
      act: `(state, carry, obs, first, key) -> (action, carry, measured)`, exploring. `obs` has leading axis `[B]`.
      greedy: `(state, carry, obs, first) -> (action, carry)`, for evaluation.
      update: `(state, batch, key) -> (TrainState, Metrics)`, one learning iteration on a `Trajectory`. Metrics are
        scalars, but for "priority" `[M]`, which a prioritised buffer reads.
      learns_from: "rollouts" that it has just made, "replay", or "any": loops refuse a learner of the other kind.
    """

    init: Callable[[PRNGKeyArray], TrainState]
    init_carry: Callable[[tuple[int, ...]], Carry]
    act: Callable[[TrainState, Carry, Observation, Array, PRNGKeyArray], tuple[Action, Carry, Measured]]
    greedy: Callable[[TrainState, Carry, Observation, Array], tuple[Action, Carry]]
    update: Callable[[TrainState, Trajectory, PRNGKeyArray], tuple[TrainState, Metrics]]
    learns_from: Literal["rollouts", "replay", "any"] = "any"


class Loop(NamedTuple):
    """A training loop: `init(key, cfg) -> RunState` and `step(run, cfg) -> (RunState, Metrics)`, one iteration.

    `env_steps_per_iteration` is how many environment steps one call of `step` takes, over all environments, and
    `updates_per_iteration` how many calls of `Learner.update`. `settings` is what the loop was made with, by name: a
    run is resumed only with the same.
    """

    init: Callable[[PRNGKeyArray, Config], RunState]
    step: Callable[[RunState, Config], tuple[RunState, Metrics]]
    env: Env
    algorithm: Callable[[EnvSpec, Config], Learner]
    env_steps_per_iteration: int
    updates_per_iteration: int = 1
    settings: dict[str, Any] = {}  # noqa: RUF012  a NamedTuple's default, never written to

    @property
    def env_steps_per_step(self) -> int:
        """The old name of `env_steps_per_iteration`."""
        return renamed_attribute(self, "env_steps_per_step", "env_steps_per_iteration")

    @property
    def updates_per_step(self) -> int:
        """The old name of `updates_per_iteration`."""
        return renamed_attribute(self, "updates_per_step", "updates_per_iteration")


Algorithm = Callable[[EnvSpec, Config], Learner]


def zero_observation(spec: EnvSpec, batch_shape: tuple[int, ...] = ()) -> Observation:
    """An observation of zeros with everything legal and everyone alive: for shapes and for `Network.init`."""
    n = spec.num_agents
    dtype = jnp.uint8 if spec.obs_dtype == "uint8" else float  # in 64 bits where jax computes in them
    return Observation(
        agents=jnp.zeros((*batch_shape, n, *spec.obs_shape), dtype),
        state=jnp.zeros((*batch_shape, *spec.state_shape), dtype),
        action_mask=jnp.ones((*batch_shape, n, spec.num_actions), bool) if spec.is_discrete else None,
        agent_mask=jnp.ones((*batch_shape, n), bool),
    )


def as_floats(x: Shaped[Array, "..."]) -> Float[Array, "..."]:
    """Views or a state as networks read them: bytes as the same numbers in float32, all else as it is."""
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.float32)
