"""Predators that must catch prey in pairs, and pay for trying alone: the grid world of Weighted QMIX.

A cell is the number `row * size + column`; `size * size` is the one cell outside, beyond every border, where the
animals that have left the game are.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int

from jmarl.envs.flags import usual_flags
from jmarl.envs.views import with_agent_ids
from jmarl.types import Env, EnvSpec, Observation, Outcome

STAY, UP, DOWN, LEFT, RIGHT, CATCH = range(6)
NUM_ACTIONS = 6


class PredatorPrey(NamedTuple):
    """The rules of one game: `Env.unwrapped`, by which pictures recognise it. See `predator_prey`."""

    size: int
    num_predators: int
    num_prey: int
    view: int
    capture_reward: float
    miss_penalty: float
    step_cost: float
    max_steps: int


@struct.dataclass(kw_only=True)
class PredatorPreyState:
    """Where everybody is.

    Attributes:
      predators: cell of each predator; `size * size` for those that have left.
      prey: cell of each prey; `size * size` for those that were captured.
      time: steps taken.
    """

    predators: Int[Array, "*batch N"]
    prey: Int[Array, "*batch P"]
    time: Int[Array, "*batch"]


def predator_prey(
    *,
    size: int = 10,
    num_predators: int = 8,
    num_prey: int = 8,
    view: int = 5,
    capture_reward: float = 10.0,
    miss_penalty: float = -2.0,
    step_cost: float = 0.0,
    max_steps: int = 200,
    agent_ids: bool = False,
) -> Env:
    """Predators on a grid with walls: two that catch the same prey are paid, one that tries alone is punished.

    While the others explore, "catch" looks bad to each predator: in the paper QMIX learns to leave the prey alone, and
    weighted QMIX learns to hunt. At most one animal is in a cell; all start at random. In each step, in this order:

    1. Predators that "catch" (legal only beside a prey: above, below, left or right) try for every prey beside them,
       one prey after the other. If two or more try for it, it is captured: it and *all* of these leave the game. If
       exactly one does, that is a miss, and the predator stays; it may still share in the next prey's capture.
    2. The other predators move, all at once. One moves only into a cell that was free before the step; of several that
       want the same, a random one gets it. Moves towards a wall are illegal, and do nothing.
    3. Each prey moves to a random neighbouring cell that is free then, and stays if there is none. Of several that
       want the same, a random one gets it.

    The team is paid `capture_reward` per capture and `miss_penalty` per miss, and `step_cost` on every step. Each agent
    receives the N-th part of that, those that have left too: the *sum* of the agents' rewards, `team_reward="sum"` of
    a learner and "return_sum" among the metrics, are the paper's numbers. Eight predators gain at most 4 x 10 = 40.

    A view holds, for each of the `view` x `view` cells around the agent, row by row: another predator is there, a prey
    is there, the cell is beyond a wall. `obs.state` holds the first two for each cell of the grid, then the share of
    `max_steps` that is over. Agents that have left see zeros and may only stay; they are `terminated` from the step on
    which they left, and False in `agent_mask` from the next observation on. The episode terminates when no predator or
    no prey is left (a last predator hunts on, in vain), and is truncated after `max_steps`. "captures" is in its info.

    Differences from the paper's code: there, animals move one after the other in random order, so that one can follow
    into a cell just left; the agent itself is in its view and walls are not; the state has no time.

    Args:
      size: cells on a side.
      num_predators: agents.
      num_prey: prey.
      view: cells on the side of what an agent sees, odd: it stands in the middle.
      capture_reward: of the team, for each captured prey.
      miss_penalty: added to the team's reward for each prey that exactly one predator tries to catch: 0 or less.
      step_cost: added to the team's reward on every step: 0 or less.
      max_steps: time limit.
      agent_ids: put a one-hot id before each view.

    References:
      Rashid et al., 2020, Weighted QMIX (https://arxiv.org/abs/2006.10800).
      Böhmer et al., 2020, Deep Coordination Graphs (https://arxiv.org/abs/1910.00091).

    Example:
      >>> env = predator_prey(size=5, num_predators=2, num_prey=1)
      >>> env.spec.obs_shape, env.spec.state_shape, env.spec.num_actions
      ((75,), (51,), 6)
    """
    _check(size, num_predators, num_prey, view, miss_penalty, step_cost, max_steps)
    outside, reach = size * size, view // 2
    destinations = _destinations(size)
    walls = np.pad(np.zeros((size, size, 1), np.float32), ((reach, reach), (reach, reach), (0, 0)), constant_values=1)
    oneself = np.zeros((view, view, 3), np.float32)
    oneself[reach, reach, 0] = 1
    spec = EnvSpec(
        name="predator_prey",
        agents=tuple(f"predator_{i}" for i in range(num_predators)),
        obs_shape=(3 * view**2,),
        state_shape=(2 * size**2 + 1,),
        num_actions=NUM_ACTIONS,
        max_steps=max_steps,
        may_wait=False,
    )

    def around(cell: Array) -> Array:
        """The four neighbours of each cell, [.., 4]."""
        return jnp.asarray(destinations).at[cell, UP : RIGHT + 1].get(mode="promise_in_bounds")

    def is_beside(state: PredatorPreyState) -> Array:
        """Who could catch whom, [N, P]."""
        return (around(state.predators)[:, :, None] == state.prey).any(axis=1) & (state.prey != outside)

    def observe(state: PredatorPreyState) -> Observation:
        cells = jnp.arange(outside)
        animals = [(cell[:, None] == cells).any(axis=0) for cell in (state.predators, state.prey)]
        grid = jnp.stack(animals, axis=-1).astype(jnp.float32).reshape(size, size, 2)
        margin = (reach, reach)
        world = jnp.concatenate([jnp.pad(grid, (margin, margin, (0, 0))), walls], axis=-1)
        look = lambda cell: jax.lax.dynamic_slice(world, (cell // size, cell % size, 0), oneself.shape)  # noqa: E731
        is_here = state.predators != outside
        views = (jax.vmap(look)(state.predators) - oneself).reshape(num_predators, -1) * is_here[:, None]
        legal = [
            jnp.ones((num_predators, 1), bool),
            around(state.predators) != outside,
            is_beside(state).any(axis=1, keepdims=True),
        ]
        return Observation(
            agents=views,
            state=jnp.append(grid.reshape(-1), state.time.astype(jnp.float32) / max_steps),
            action_mask=jnp.concatenate(legal, axis=-1),
            agent_mask=is_here,
        )

    @usual_flags
    def reset(key: Array) -> tuple[PredatorPreyState, Observation]:
        cell = _distinct(key, num_predators + num_prey, outside)
        state = PredatorPreyState(predators=cell[:num_predators], prey=cell[num_predators:], time=jnp.int32(0))
        return state, observe(state)

    @usual_flags
    def step(state: PredatorPreyState, action: Array, key: Array) -> tuple[PredatorPreyState, Observation, Outcome]:
        action = jnp.asarray(action, jnp.int32)
        luck = jax.random.uniform(key, (num_predators + 4 * num_prey,))
        is_captured, is_missed, leaves = _catch(is_beside(state) & (action == CATCH)[:, None])

        wanted = jnp.asarray(destinations).at[state.predators, action].get(mode="clip")
        is_free = (wanted != outside) & ~_is_in(wanted, state.predators) & ~_is_in(wanted, state.prey)
        predators = _move(state.predators, wanted, is_free, luck[:num_predators])
        predators = jnp.where(leaves, outside, predators)

        prey = jnp.where(is_captured, outside, state.prey)
        options = around(prey)
        is_free = (options != outside) & ~_is_in(options, predators) & ~_is_in(options, prey)
        luck_prey = jnp.where(is_free, luck[num_predators:].reshape(num_prey, 4), -1.0)
        choice = jnp.argmax(luck_prey, axis=1, keepdims=True)
        wanted = jnp.take_along_axis(options, choice, axis=1)[:, 0]
        prey = _move(prey, wanted, is_free.any(axis=1), luck_prey.max(axis=1))

        state = PredatorPreyState(predators=predators, prey=prey, time=state.time + 1)
        reward = capture_reward * jnp.sum(is_captured) + miss_penalty * jnp.sum(is_missed) + step_cost
        has_left, is_gone = predators == outside, prey == outside
        is_over = has_left.all() | is_gone.all()
        outcome = Outcome(
            reward=jnp.full(num_predators, reward / num_predators, jnp.float32),
            terminated=has_left | is_over,
            last=is_over | (state.time >= max_steps),
            info={"captures": jnp.sum(is_gone).astype(jnp.float32)},
        )
        return state, observe(state), outcome

    rules = PredatorPrey(size, num_predators, num_prey, view, capture_reward, miss_penalty, step_cost, max_steps)
    env = Env(reset, step, spec, rules)
    return with_agent_ids(env) if agent_ids else env


def _distinct(key: Array, num: int, below: int) -> Array:
    """`num` different integers, in random order: drawn without a sort, which would take most of a reset's time."""
    index = jnp.arange(num, dtype=jnp.int32)
    # The i-th number is one of those that the numbers before it have left over, and at first counts only these. From
    # the last to the first, each is then counted in by those after it.
    left_over = jnp.floor(jax.random.uniform(key, (num,)) * (below - index)).astype(jnp.int32)

    def count_in(drawn: Array, i: Array) -> tuple[Array, None]:
        return drawn + ((index > i) & (drawn >= drawn[i])), None

    return jax.lax.scan(count_in, left_over, index[::-1])[0]


def _catch(catches: Bool[Array, "N P"]) -> tuple[Bool[Array, "P"], Bool[Array, "P"], Bool[Array, "N"]]:
    """Who is captured, who is missed and which predators leave, of those that try to `catch` a prey beside them."""

    def one_prey(is_hunting: Array, catches: Array) -> tuple[Array, tuple[Array, Array]]:
        team = is_hunting & catches
        is_captured = jnp.sum(team) >= 2
        return is_hunting & ~(team & is_captured), (is_captured, team.any() & ~is_captured)

    start = jnp.ones(catches.shape[0], bool)
    is_hunting, (is_captured, is_missed) = jax.lax.scan(one_prey, start, catches.T)
    return is_captured, is_missed, ~is_hunting


def _move(cell: Array, wanted: Array, is_free: Array, priority: Array) -> Array:
    """Cells after a move of all at once: of those that want the same free cell, the one of highest priority gets it."""
    # In a tie of priorities nobody moves: two animals must not meet.
    is_rival = (wanted[:, None] == wanted) & is_free & (priority >= priority[:, None]) & ~np.eye(len(cell), dtype=bool)
    return jnp.where(is_free & ~is_rival.any(axis=1), wanted, cell)


def _is_in(cell: Array, animals: Array) -> Array:
    return (cell[..., None] == animals).any(axis=-1)


def _destinations(size: int) -> np.ndarray:
    """Where an action leads, by cell and action; from outside nothing leads back."""
    outside = size * size
    row, column = np.divmod(np.arange(outside)[:, None], size)
    row, column = row + np.array([0, -1, 1, 0, 0, 0]), column + np.array([0, 0, 0, -1, 1, 0])
    is_inside = (np.minimum(row, column) >= 0) & (np.maximum(row, column) < size)
    table = np.where(is_inside, row * size + column, outside)
    return np.concatenate([table, np.full((1, NUM_ACTIONS), outside)]).astype(np.int32)


def _check(
    size: int,
    num_predators: int,
    num_prey: int,
    view: int,
    miss_penalty: float,
    step_cost: float,
    max_steps: int,
) -> None:
    if num_predators < 2:
        raise ValueError(f"num_predators={num_predators} can capture nothing: that takes two. Try num_predators=2.")
    if num_prey < 1 or max_steps < 1:
        raise ValueError(f"num_prey={num_prey} and max_steps={max_steps} must be at least 1.")
    if view < 3 or view % 2 == 0:
        raise ValueError(f"view={view} must be odd and at least 3: the agent stands in the middle. Try view=5.")
    if num_predators + num_prey > size**2:
        raise ValueError(
            f"size={size} gives {size**2} cells, too few for num_predators={num_predators} and num_prey={num_prey}, "
            f"each in a cell of its own. Try size={int(np.ceil(np.sqrt(num_predators + num_prey)))}."
        )
    for name, value in {"miss_penalty": miss_penalty, "step_cost": step_cost}.items():
        if value > 0:
            raise ValueError(f"{name}={value} is added to the reward, so it must not be positive. Try {-value}.")
