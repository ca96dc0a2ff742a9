"""Pgx's games, by name: board and card games in which players take turns, compiled.

The player whose turn it is acts and has the legal moves; the others wait, see everything that they may see, and have a
value. What a game pays it pays at its end, to all of its players in one step. Who begins is drawn.
"""

import warnings
from typing import Any

import jax.numpy as jnp

from jmarl.envs.flags import usual_flags
from jmarl.envs.stacked import AgentDicts, stack, unknown
from jmarl.types import Env

INSTALL = 'pip install "jmarl[pgx]"'
# The shortest and the longest game in moves, where the rules say so; no cell is taken twice, or Pgx stops the game.
LENGTHS: dict[str, tuple[int, int]] = {
    "tic_tac_toe": (5, 9),
    "connect_four": (7, 42),
    "animal_shogi": (1, 256),
    "gardner_chess": (1, 256),
    "chess": (1, 512),
    "shogi": (1, 512),
    "go_9x9": (1, 162),
    "go_19x19": (1, 722),
    "hex": (1, 122),
    "kuhn_poker": (2, 3),
}


def names() -> list[str]:
    """All of Pgx's games, those of one player included; [] without it."""
    try:
        pgx = _import("")
    except ImportError:
        return []
    return [f"pgx:{name}" for name in pgx.available_envs()]


def make(name: str, options: dict[str, Any], *, agent_ids: bool, time_limit: str, flatten: bool) -> Env:
    """Pgx's game `name`, which takes no options."""
    pgx = _import(name)
    if name not in (known := list(pgx.available_envs())):
        raise unknown("game of Pgx", name, known, ValueError)
    if options:
        raise unknown(f"option of pgx:{name}", min(options), [], TypeError)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of versions of games, which nobody can choose
        game = usual_flags(pgx.make)(name)
    env = stack(f"pgx:{name}", _agent_dicts(name, game), agent_ids=agent_ids, time_limit=time_limit, flatten=flatten)
    num = len(env.spec.agents)
    least = LENGTHS.get(name, (1, None))[0]
    spec = env.spec._replace(min_steps=least, teams=tuple(range(num)) if num > 1 else (), always_act=num == 1)
    return env._replace(spec=spec)


def _agent_dicts(name: str, game: Any) -> AgentDicts:
    agents = tuple(f"player_{i}" for i in range(game.num_players))
    numbers = jnp.arange(len(agents))

    def views(state: Any) -> dict[str, Any]:
        with warnings.catch_warnings():  # Pgx would rather be asked for the view of who is to move alone
            warnings.simplefilter("ignore")
            return {agent: game.observe(state, jnp.int32(i)) for i, agent in enumerate(agents)}

    def reset(key: Any) -> tuple[Any, Any]:
        state = game.init(key)
        return views(state), state

    def step(key: Any, state: Any, actions: dict[str, Any]) -> Any:
        chosen = jnp.stack([actions[agent] for agent in agents])
        state = game.step(state, chosen[state.current_player], key)
        rewards = {agent: state.rewards[i] for i, agent in enumerate(agents)}
        last = state.terminated | state.truncated
        return views(state), state, rewards, None, state.terminated, last, {}

    def legal(state: Any) -> dict[str, Any]:
        # Those who wait choose nothing. Something must be legal, or their policies would be no numbers.
        return {agent: state.legal_action_mask | (state.current_player != i) for i, agent in enumerate(agents)}

    return AgentDicts(
        agents=agents,
        action_spaces={agent: _Moves(game.num_actions) for agent in agents},
        reset=reset,
        step=step,
        alive=(lambda state: numbers == state.current_player) if len(agents) > 1 else None,
        legal=legal,
        max_steps=LENGTHS.get(name, (1, None))[1],
        may_wait=len(agents) > 1,
        unwrapped=game,
    )


class _Moves:
    def __init__(self, n: int):
        self.n = n


@usual_flags
def _import(name: str) -> Any:
    try:
        import pgx
    except ImportError as error:
        raise ImportError(f"pgx:{name} needs Pgx: {INSTALL}.") from error
    return pgx
