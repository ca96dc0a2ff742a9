"""Small games with known solutions, for tests and demonstrations.

But for `two_step_game`, every agent has a cue of its own (-1 or 1, drawn at the reset); a game says what is seen and
what is paid.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jmarl.envs.flags import usual_flags
from jmarl.types import Env, EnvSpec, Observation, Outcome

PROBES = ("constant", "observation", "delayed", "action", "action_observation", "memory", "time_limit", "continuous")

_State = tuple[Array, Array]  # cues [N], steps taken


def matrix_game(payoff: Float[Any, "..."] | list, *, num_steps: int = 1) -> Env:
    """A cooperative game in normal form: everybody sees a constant and receives `payoff[a_0, a_1, ...]`.

    Args:
      payoff: one axis per agent, as long as its number of actions.
      num_steps: rounds; the episode terminates after the last one.

    Example:
      >>> env = matrix_game([[8.0, -12.0, -12.0], [-12.0, 0.0, 0.0], [-12.0, 0.0, 0.0]])  # Son et al., 2019
      >>> env.spec.num_agents, env.spec.num_actions
      (2, 3)
    """
    table = np.asarray(payoff, np.float32)
    return _game(
        "matrix_game",
        observe=lambda cue, time: jnp.ones((table.ndim, 1)),
        reward=lambda cue, time, action: jnp.full(table.ndim, jnp.asarray(table)[tuple(action)]),
        actions=table.shape,
        num_steps=num_steps,
    )


def zero_sum_game(payoff: Float[Any, "A0 A1"] | list, *, num_steps: int = 1) -> Env:
    """A game of two in normal form: agent 0 receives `payoff[a_0, a_1]`, agent 1 as much less than nothing.

    Args:
      payoff: of agent 0.
      num_steps: rounds; the episode terminates after the last one.

    Example:
      >>> rock_paper_scissors = zero_sum_game([[0.0, -1.0, 1.0], [1.0, 0.0, -1.0], [-1.0, 1.0, 0.0]])
      >>> state, _ = rock_paper_scissors.reset(jax.random.key(0))
      >>> rock_paper_scissors.step(state, jnp.array([1, 0]), jax.random.key(1))[2].reward.tolist()
      [1.0, -1.0]
    """
    table = np.asarray(payoff, np.float32)
    if table.ndim != 2:
        raise ValueError(f"payoff has {table.ndim} axes, and this is a game of two: give it one axis for each.")
    env = _game(
        "zero_sum_game",
        observe=lambda cue, time: jnp.ones((2, 1)),
        reward=lambda cue, time, action: jnp.asarray(table)[tuple(action)] * jnp.array([1.0, -1.0]),
        actions=table.shape,
        num_steps=num_steps,
    )
    return env._replace(spec=env.spec._replace(teams=(0, 1)))


def key_door(size: int = 8, *, num_steps: int | None = None) -> Env:
    """One agent on a square grid, paid 1 as it comes to the door with the key, and nothing before.

    It starts in the middle; the key lies in one corner, the door is in the opposite one. The episode terminates at the
    open door; `num_steps` truncate it. The best return is 1, after `steps_to_door(size)` steps. By chance it is rare.

    Args:
      size: of each side.
      num_steps: until the time is up; by default twice the shortest way.

    Example:
      >>> env = key_door(size=4)
      >>> env.spec.max_steps, env.spec.num_actions
      (20, 5)
    """
    if size < 2:
        raise ValueError(f"size={size} leaves no room for key and door: choose 2 or more.")
    limit = 2 * steps_to_door(size) if num_steps is None else num_steps
    moves = np.array([[0, 0], [1, 0], [-1, 0], [0, 1], [0, -1]], np.int32)
    spec = EnvSpec(
        name="key_door",
        agents=("agent_0",),
        obs_shape=(2 * size + 1,),
        state_shape=(2 * size + 1,),
        num_actions=5,
        max_steps=limit,
        min_steps=min(steps_to_door(size), limit),
        always_act=True,
    )

    def observe(place: Array, has_key: Array) -> Observation:
        view = jnp.concatenate([jax.nn.one_hot(place, size).reshape(-1), has_key[None]]).astype(jnp.float32)
        return Observation(
            agents=view[None], state=view, action_mask=jnp.ones((1, 5), bool), agent_mask=jnp.ones(1, bool)
        )

    def reset(key: Array) -> tuple[tuple[Array, Array, Array], Observation]:
        place, has_key = jnp.full(2, size // 2, jnp.int32), jnp.bool_(False)
        return (place, has_key, jnp.int32(0)), observe(place, has_key)

    def step(state: tuple[Array, Array, Array], action: Array, key: Array):
        place, has_key, time = state
        place = jnp.clip(place + jnp.asarray(moves)[action[0]], 0, size - 1)
        has_key = has_key | jnp.all(place == 0)
        is_open = has_key & jnp.all(place == size - 1)
        outcome = Outcome(
            reward=is_open[None].astype(jnp.float32), terminated=is_open[None], last=is_open | (time + 1 >= limit)
        )
        return (place, has_key, time + 1), observe(place, has_key), outcome

    return Env(reset, step, spec)


def steps_to_door(size: int) -> int:
    """The shortest way in `key_door`: from the middle to the key, and from there to the door."""
    return 2 * (size // 2) + 2 * (size - 1)


def two_step_game() -> Env:
    """The game that separates VDN from QMIX: two agents, two actions, two steps, and everybody sees where they are.

    In the first state agent 0 alone decides: its action 0 leads to state 2A, its action 1 to 2B, and nothing is paid.
    In the second everybody receives the entry of the joint action, and the episode terminates:

        2A: [[7, 7], [7, 7]]        2B: [[0, 1], [1, 8]]

    No sum of the agents' values fits 2B: VDN goes for the 7, QMIX for the 8. As in `matrix_game`, each agent receives
    the whole payoff, so the *mean* of the agents' rewards, a learner's `team_reward="mean"`, is the paper's number.
    Views and `obs.state` are the one-hot of the state: first, 2A, 2B.

    References:
      Rashid et al., 2018, QMIX, sec. 5 (https://arxiv.org/abs/1803.11485).

    Example:
      >>> env = two_step_game()
      >>> state, obs = env.reset(jax.random.key(0))
      >>> state, obs, outcome = env.step(state, jnp.array([1, 0]), jax.random.key(1))
      >>> obs.state.tolist(), env.step(state, jnp.array([1, 1]), jax.random.key(2))[2].reward.tolist()
      ([0.0, 0.0, 1.0], [8.0, 8.0])
    """
    payoff = np.array([[[0, 0], [0, 0]], [[7, 7], [7, 7]], [[0, 1], [1, 8]]], np.float32)
    spec = EnvSpec(
        name="two_step_game",
        agents=("agent_0", "agent_1"),
        obs_shape=(3,),
        state_shape=(3,),
        num_actions=2,
        max_steps=2,
        always_act=True,
        min_steps=2,
    )

    def observe(place: Array) -> Observation:
        view = jax.nn.one_hot(place, 3, dtype=jnp.float32)
        return Observation(
            agents=jnp.stack([view, view]),
            state=view,
            action_mask=jnp.ones((2, 2), bool),
            agent_mask=jnp.ones(2, bool),
        )

    def reset(key: Array) -> tuple[Array, Observation]:
        return jnp.int32(0), observe(jnp.int32(0))

    def step(place: Array, action: Array, key: Array) -> tuple[Array, Observation, Outcome]:
        last = place > 0
        reward = jnp.asarray(payoff)[place, action[0], action[1]]
        place = jnp.where(last, place, 1 + action[0].astype(jnp.int32))
        outcome = Outcome(reward=jnp.full(2, reward), terminated=jnp.full(2, last), last=last)
        return place, observe(place), outcome

    return Env(reset, step, spec)


def probe(kind: str, *, num_agents: int = 1, num_steps: int | None = None) -> Env:
    """A game that isolates one thing a learner must get right. Each agent plays its own copy, with its own reward.

    | kind                 | reward                                        | solution                                  |
    |----------------------|-----------------------------------------------|-------------------------------------------|
    | "constant"           | 1; one action                                 | V = 1                                     |
    | "observation"        | the observed cue; one action                  | V(o) = o                                  |
    | "delayed"            | 1 on the last of 2 steps; one action          | V(first) = γ, V(second) = 1               |
    | "action"             | 1 for action 1, else 0                        | Q = [0, 1]                                |
    | "action_observation" | 1 if the action is (cue > 0), else -1         | V = 1                                     |
    | "memory"             | the same, on the last of 4 steps; the cue is  | V(first) = γ³ with memory, 0 without      |
    |                      | seen on the first only                        |                                           |
    | "time_limit"         | 1 on each of 10 steps, then truncated         | V = 1 / (1 - γ) if truncation bootstraps, |
    |                      |                                               | at most (1 - γ¹⁰) / (1 - γ) if not        |
    | "continuous"         | -(action - cue / 2)², bounds -1 and 1         | action = cue / 2, V = 0                   |

    Args:
      kind: one of `PROBES`.
      num_agents: copies.
      num_steps: another episode length than the table's, for "delayed", "memory" and "time_limit".

    Example:
      >>> env = probe("action", num_agents=2)
      >>> state, obs = env.reset(jax.random.key(0))
      >>> env.step(state, jnp.array([0, 1]), jax.random.key(1))[2].reward.tolist()
      [0.0, 1.0]
    """
    lengths = {"delayed": 2, "memory": 4, "time_limit": 10}
    if kind not in PROBES:
        raise ValueError(f"kind={kind!r} is not one of {PROBES}.")
    if num_steps is not None and kind not in lengths:
        raise ValueError(f"num_steps={num_steps} has no meaning for the one-step probe {kind!r}: leave it out.")
    length = lengths.get(kind, 1) if num_steps is None else num_steps

    def observe(cue: Array, time: Array) -> Array:
        constant = jnp.ones((num_agents, 1))
        if kind in ("constant", "action", "time_limit"):
            return constant
        if kind == "delayed":
            return jnp.tile(jax.nn.one_hot(time, length), (num_agents, 1))
        if kind == "memory":  # the cue, and whether to answer now
            is_asked = jnp.full(num_agents, time == length - 1, cue.dtype)
            return jnp.stack([jnp.where(time == 0, cue, 0), is_asked], axis=-1)
        return cue[:, None]

    def reward(cue: Array, time: Array, action: Array) -> Array:
        if kind in ("constant", "time_limit"):
            return jnp.ones(num_agents)
        if kind == "delayed":
            return jnp.full(num_agents, time == length - 1)
        if kind == "observation":
            return cue
        if kind == "action":
            return action
        if kind == "continuous":
            return -((action[:, 0] - cue / 2) ** 2)
        is_right = (action == 1) == (cue > 0)
        return jnp.where(time == length - 1, jnp.where(is_right, 1.0, -1.0), 0.0)

    num_actions = 1 if kind in ("constant", "observation", "delayed", "time_limit") else 2
    return _game(
        kind,
        observe=observe,
        reward=reward,
        actions=None if kind == "continuous" else (num_actions,) * num_agents,
        num_agents=num_agents,
        num_steps=length,
        terminates=kind != "time_limit",
    )


def _game(
    name: str,
    *,
    observe: Callable[[Array, Array], Array],  # cues [N] and time -> [N, O]
    reward: Callable[[Array, Array, Array], Array],  # cues, time, action -> [N]
    actions: tuple[int, ...] | None,  # numbers of actions; None for one continuous dimension in [-1, 1]
    num_steps: int,
    num_agents: int | None = None,
    terminates: bool = True,
) -> Env:
    if num_steps < 1:
        raise ValueError(f"num_steps={num_steps} must be at least 1: every episode has a step.")
    num_agents = num_agents or len(actions or ())
    obs_size = jax.eval_shape(observe, jnp.zeros(num_agents), jnp.int32(0)).shape[1]
    spec = EnvSpec(
        name=name,
        agents=tuple(f"agent_{i}" for i in range(num_agents)),
        obs_shape=(obs_size,),
        state_shape=(num_agents * obs_size,),
        num_actions=max(actions) if actions else None,
        action_size=None if actions else 1,
        action_low=None if actions else ((-1.0,),) * num_agents,
        action_high=None if actions else ((1.0,),) * num_agents,
        obs_sizes=(obs_size,) * num_agents,
        action_sizes=actions or (1,) * num_agents,
        max_steps=num_steps,
        always_act=True,
        min_steps=num_steps,
        state_is_views=True,
    )
    mask = None if actions is None else np.arange(max(actions)) < np.array(actions)[:, None]

    def observation(state: _State) -> Observation:
        views = observe(*state).astype(jnp.float32)
        return Observation(
            agents=views,
            state=views.reshape(-1),
            action_mask=None if mask is None else jnp.asarray(mask),
            agent_mask=jnp.ones(num_agents, bool),
        )

    @usual_flags  # in 64 bits jax would draw other cues
    def reset(key: Array) -> tuple[_State, Observation]:
        state = jax.random.rademacher(key, (num_agents,), jnp.float32), jnp.int32(0)
        return state, observation(state)

    def step(state: _State, action: Array, key: Array) -> tuple[_State, Observation, Outcome]:
        cue, time = state
        last = time + 1 >= num_steps
        outcome = Outcome(
            reward=reward(cue, time, action).astype(jnp.float32),
            terminated=jnp.full(num_agents, last & terminates),
            last=last,
        )
        return (cue, time + 1), observation((cue, time + 1)), outcome

    return Env(reset, step, spec)
