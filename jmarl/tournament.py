"""Tournaments: every player against every other, on either side, from the same start states; shares and ratings.

Players are whatever has a `Learner` and a state: seeds of a run, its checkpoints, scripted and random ones. Each pair
plays twice, once on either side, and each player meets itself. A rating is one number for each player, so it hides
cycles, as in rock, paper, scissors, where all are equal: look at the matrix, too (Balduzzi et al., 2018, Re-evaluating
Evaluation, https://arxiv.org/abs/1806.02643).

>>> import jmarl
>>> game = jmarl.envs.matrix_game([[0.0, -1.0, 1.0], [1.0, 0.0, -1.0], [-1.0, 1.0, 0.0]])  # what agent 0 is paid
>>> def step(state, action, key):
...     state, obs, outcome = game.step(state, action, key)
...     return state, obs, outcome.replace(reward=outcome.reward * jnp.array([1.0, -1.0]))
>>> env = game._replace(step=step, spec=game.spec._replace(teams=(0, 1)))
>>> hands = [jmarl.scripted(lambda obs, i=i: jnp.full(obs.agent_mask.shape, i)) for i in range(3)]
>>> names = ["rock", "paper", "scissors"]
>>> players = [Player(name, hand, hand.init(jax.random.key(0))) for name, hand in zip(names, hands)]
>>> table = standings(play(env, players, jax.random.key(1), num_episodes=8))
>>> table.win.tolist()  # rock beats scissors
[[0.0, 0.0, 1.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
>>> np.abs(table.rating.value).round().tolist()
[0.0, 0.0, 0.0]
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PRNGKeyArray

from jmarl import evaluation, keys, rows
from jmarl.evaluation import Episodes
from jmarl.types import Env, EnvSpec, Learner, Numeric, TrainState

__all__ = [
    "Estimate",
    "Matches",
    "Player",
    "Standings",
    "bradley_terry",
    "group_means",
    "play",
    "points",
    "returns",
    "role_ratings",
    "sides_of",
    "standings",
    "wilson",
]

Sides = Sequence[Sequence[int]]

_Z = 1.959963984540054  # the normal quantile of a 95 % interval
_ELO = 400 / np.log(10)  # rating points in a unit of log odds


class Player(NamedTuple):
    """Who takes part.

    Attributes:
      name: in tables.
      learner: plays with its `greedy` policy. Players with the same one are compiled together.
      state: what it has learnt. A `TrainState` with a leading axis, as of seeds, is as many players: NAME/0, NAME/1.
    """

    name: str
    learner: Learner
    state: Any


class Matches(NamedTuple):
    """All episodes of a tournament of `P` players, as NumPy arrays.

    Attributes:
      players: their names.
      sides: the agents of side 0, and those of side 1.
      episodes: leading axes `[P, P, E]`: `[i, j]` is player i on side 0 with player j on side 1. Episode e of every
        pair has the same start state.
    """

    players: tuple[str, ...]
    sides: tuple[tuple[int, ...], tuple[int, ...]]
    episodes: Episodes


class Estimate(NamedTuple):
    """A number, and the ends of its 95 % interval; arrays of one shape."""

    value: np.ndarray
    low: np.ndarray
    high: np.ndarray


class Standings(NamedTuple):
    """How a tournament ended. In matrices the row is the player on side 0, the column the one on side 1.

    Attributes:
      win, draw, loss: shares of side 0, `[P, P]`.
      score: win + draw / 2 `[P, P]`, with the interval of `wilson`.
      rating: of each player on both sides together, `[P]`, see `bradley_terry`.
      advantage: rating points that side 0 is worth.
      role_rating: of each player on side 0 and on side 1, `[2, P]`, see `role_ratings`.
    """

    win: np.ndarray
    draw: np.ndarray
    loss: np.ndarray
    score: Estimate
    rating: Estimate
    advantage: Estimate
    role_rating: Estimate


# -------------------------------------------------------------------------------------------------------- playing


def sides_of(spec: EnvSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The agents of the two teams that oppose each other: side 0 is the team of the lower number.

    >>> from jmarl import envs
    >>> sides_of(envs.make("MPE_simple_tag_v3").spec)
    ((3,), (0, 1, 2))
    """
    numbers = sorted(set(spec.teams))
    if len(numbers) != 2:
        raise ValueError(
            f"{spec.name} has {len(numbers) or 'no'} teams that oppose each other, and a tournament has two sides: "
            "give members, such as [[0], [1, 2]]."
        )
    first, second = (tuple(i for i, team in enumerate(spec.teams) if team == number) for number in numbers)
    return first, second


def play(
    env: Env,
    players: Sequence[Player],
    key: PRNGKeyArray,
    *,
    members: Sides | None = None,
    num_episodes: int = 128,
    max_steps: int | None = None,
    pairs_at_once: int = 64,
) -> Matches:
    """Every player on side 0 with every player on side 1, itself included. Not to be jitted: it compiles by itself.

    Args:
      env: the environment.
      players: of this environment.
      key: source of start states and of the environment's chance, the same for every pair.
      members: the agents of either side; by default `sides_of` the spec. In a cooperative game [[0], [1, 2]] lets
        agent 0 play with strangers.
      num_episodes: of each ordered pair.
      max_steps: of an episode; by default `env.spec.max_steps`.
      pairs_at_once: pairs that play side by side, of those whose learners are the same. Memory is that of so many
        times `num_episodes` environments.
    """
    sides = tuple(tuple(side) for side in (sides_of(env.spec) if members is None else members))
    if len(sides) != 2:
        raise ValueError(f"members={members} must be of two sides, such as [[0], [1, 2]].")
    if pairs_at_once < 1:
        raise ValueError(f"pairs_at_once={pairs_at_once} must be at least 1.")
    names, groups = _grouped(players)
    key = keys.as_key(key)

    def play_group(first: _Group, second: _Group) -> Episodes:
        match = evaluation.teams([first.learner, second.learner], sides)

        def play_pair(pair, firsts, seconds):
            state = jax.tree.map(lambda x: x[pair[0]], firsts), jax.tree.map(lambda x: x[pair[1]], seconds)
            return evaluation.play_episodes(env, match, state, key, num_episodes=num_episodes, max_steps=max_steps)

        # As in `run`: compiling takes far longer than playing.
        play_some = jax.jit(jax.vmap(play_pair, (0, None, None)), compiler_options=rows.compiler_options(1))
        shape = len(first.numbers), len(second.numbers)
        pairs = np.indices(shape).reshape(2, -1).T
        chunks = np.array_split(pairs, -(-len(pairs) // pairs_at_once))  # the first ones are the longest

        def play_chunk(chunk: np.ndarray) -> Episodes:
            filled = np.resize(chunk, chunks[0].shape)  # of one length, for one compilation
            played = play_some(filled, first.states, second.states)
            return jax.tree.map(lambda x: np.asarray(x)[: len(chunk)], played)

        played = [play_chunk(chunk) for chunk in chunks]
        return jax.tree.map(lambda *x: np.concatenate(x).reshape(*shape, *x[0].shape[1:]), *played)

    by_rows = [
        jax.tree.map(lambda *x: np.concatenate(x, 1), *(play_group(first, second) for second in groups))
        for first in groups
    ]
    order = np.argsort(np.concatenate([group.numbers for group in groups]))
    episodes = jax.tree.map(lambda *x: np.concatenate(x)[order][:, order], *by_rows)
    return Matches(names, (sides[0], sides[1]), episodes)


class _Group(NamedTuple):
    """Players who are compiled together: their numbers among all, and their states, stacked."""

    learner: Learner
    numbers: np.ndarray
    states: Any


def _grouped(players: Sequence[Player]) -> tuple[tuple[str, ...], list[_Group]]:
    """The names of all players, and who is compiled together."""
    names: list[str] = []
    kinds: dict[Any, list[tuple[range, Learner, Any]]] = {}
    for player in players:
        state = player.state
        if isinstance(state, TrainState) and state.step.ndim == 1:
            new = [f"{player.name}/{i}" for i in range(len(state.step))]
        else:
            state, new = jax.tree.map(lambda x: jnp.asarray(x)[None], state), [player.name]
        shapes = tuple((x.shape[1:], x.dtype) for x in jax.tree.leaves(state))
        kind = player.learner, jax.tree.structure(state), shapes
        kinds.setdefault(kind, []).append((range(len(names), len(names) + len(new)), player.learner, state))
        names += new
    if len(names) < 2:
        raise ValueError(f"players={names}: a tournament needs two at least.")
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ValueError(f"{twice[0]} is the name of two players: give each a name of its own.")
    groups = []
    for some in kinds.values():
        numbers, learners, states = zip(*some, strict=True)
        group = _Group(learners[0], np.concatenate(numbers), jax.tree.map(lambda *x: jnp.concatenate(x), *states))
        is_finite = np.asarray(jax.vmap(evaluation.all_finite, axis_size=len(group.numbers))(group.states))
        if not is_finite.all():
            lost = names[group.numbers[np.argmin(is_finite)]]
            raise ValueError(f"The parameters of {lost} are not finite, so it cannot play: leave it out.")
        groups.append(group)
    return tuple(names), groups


# -------------------------------------------------------------------------------------------------------- results


def points(matches: Matches, wins: str = "return") -> np.ndarray:
    """What side 0 made of each episode, `[P, P, E]`: 1 won, ½ drawn, 0 lost.

    Args:
      matches: of `play`.
      wins: "return": the side wins whose members earned more, on average. Or an entry of the environment's info, such
        as "won" or "foe/beaten", that tells what side 0 made of an episode, from 0 to 1; where it is not known, since
        the episode was cut off, it counts as drawn. Or "duplicate", for sides that are paid unlike: as in duplicate
        bridge, a side wins if it did better than the median of all pairs from the same start state.
    """
    if wins in ("return", "duplicate"):
        first, second = _side_returns(matches)
        margin = first - second
        return (1 + np.sign(margin - (np.median(margin, axis=(0, 1)) if wins == "duplicate" else 0.0))) / 2
    told = evaluation.flat_info(matches.episodes.info)
    if wins not in told:
        known = ", ".join(["return", "duplicate", *sorted(told)])
        raise ValueError(f"wins={wins!r} is nothing that the environment tells: choose one of {known}.")
    won = np.asarray(told[wins], float)
    won = np.where(matches.episodes.has_ended & np.isfinite(won), won, 0.5)
    if won.min() < 0 or won.max() > 1:
        raise ValueError(
            f"wins={wins!r} is between {won.min():g} and {won.max():g}: it must be 1 where side 0 won, 0 where it lost."
        )
    return won


def returns(matches: Matches) -> Estimate:
    """Mean return of an episode, averaged over the members of a side, `[2, P, P]` for the two sides.

    The interval is the normal one over episodes; NaN where there is one episode.
    """
    of_sides = _side_returns(matches)
    num = of_sides.shape[-1]
    mean = of_sides.mean(-1)
    half_width = _Z * of_sides.std(-1, ddof=1) / np.sqrt(num) if num > 1 else np.full(mean.shape, np.nan)
    return Estimate(mean, mean - half_width, mean + half_width)


def _side_returns(matches: Matches) -> np.ndarray:
    """`[2, P, P, E]`, in double precision: the mean of equal numbers is that number."""
    of_agents = np.asarray(matches.episodes.returns, float)
    return np.stack([of_agents[..., list(side)].mean(-1) for side in matches.sides])


def group_means(values: Float[np.ndarray, "*any P P"], groups: Sequence[Sequence[int]]) -> Estimate:
    """Means over the pairs of two groups of players, as over the seeds of two algorithms, `[.., G, G]`.

    The interval is of the players, not of their episodes: percentiles of 2,000 means, for each of which the players of
    each side are drawn again (Efron and Tibshirani, 1993, An Introduction to the Bootstrap). Of few players it is too
    narrow; of one there is none, and its ends are the value.

    Args:
      values: of each player on side 0 against each on side 1, such as `returns(matches).value`.
      groups: numbers of the players in each group.

    >>> values = np.array([[1.0, 3.0, 5.0], [1.0, 3.0, 5.0], [0.0, 0.0, 0.0]])
    >>> group_means(values, [[0, 1], [2]]).value.tolist()
    [[2.0, 5.0], [0.0, 0.0]]
    """
    rng = np.random.default_rng(0)
    members = [np.asarray(group) for group in groups]
    draws = [[group[rng.integers(len(group), size=(2000, len(group)))] for group in members] for _ in range(2)]
    mean = np.stack([np.stack([values[..., i[:, None], j].mean((-2, -1)) for j in members], -1) for i in members], -2)
    ends = np.empty((2, *mean.shape))
    for row, i in enumerate(draws[0]):
        for column, j in enumerate(draws[1]):
            again = values[..., i[:, :, None], j[:, None, :]].mean((-2, -1))
            ends[..., row, column] = np.quantile(again, [0.025, 0.975], axis=-1)
    return Estimate(mean, *ends)


def standings(matches: Matches, wins: str = "return", *, prior: float = 1.0) -> Standings:
    """Shares of won, drawn and lost episodes, and ratings.

    Args:
      matches: of `play`.
      wins: who wins an episode, see `points`.
      prior: drawn games that each player is given, see `bradley_terry`.
    """
    won = points(matches, wins)
    num = won.shape[-1]
    total, games = won.sum(-1), np.full(won.shape[:2], num)
    rating, advantage = bradley_terry(total, games, prior=prior)
    return Standings(
        win=(won > 0.5).mean(-1),
        draw=(won == 0.5).mean(-1),
        loss=(won < 0.5).mean(-1),
        score=wilson(total, games),
        rating=rating,
        advantage=advantage,
        role_rating=role_ratings(total, games, prior=prior),
    )


def wilson(points: np.ndarray, games: np.ndarray) -> Estimate:
    """A share of games that were won, and Wilson's interval, which is not empty where all or none were.

    A draw is half a point. Half points vary less than wins and losses of the same mean, so the interval is then too
    wide rather than too narrow.

    References:
      Wilson, 1927, Probable Inference, the Law of Succession, and Statistical Inference.

    >>> [round(float(x), 3) for x in wilson(np.array(10.0), np.array(10))]
    [1.0, 0.722, 1.0]
    """
    share, z = points / games, _Z**2 / games
    centre = (share + z / 2) / (1 + z)
    half_width = np.sqrt(share * (1 - share) * z + z**2 / 4) / (1 + z)
    return Estimate(share, np.maximum(centre - half_width, 0.0), np.minimum(centre + half_width, 1.0))


def bradley_terry(points: Float[np.ndarray, "P P"], games: Numeric, *, prior: float = 1.0) -> tuple[Estimate, Estimate]:
    """Ratings R that best explain who beat whom, and what side 0 is worth, A.

    The model of Bradley and Terry, in the units of Elo:

        P(i on side 0 beats j on side 1) = 1 / (1 + 10^((R_j - R_i - A) / 400)).

    Args:
      points: what player i on side 0 made against j on side 1: a won game is 1 point, a drawn one ½.
      games: how many they played, of the same shape, or one number for all.
      prior: a player is taken to have drawn so many further games with one of average rating, and so is side 0 with
        side 1. It keeps the ratings of those finite who won or lost everything.

    Returns:
      Ratings `[P]`, whose mean is 0, and the advantage. They maximise the posterior; intervals are the normal ones of
      its curvature, for which games are independent.

    References:
      Bradley and Terry, 1952, Rank Analysis of Incomplete Block Designs.
      Elo, 1978, The Rating of Chessplayers, Past and Present.
      Hunter, 2004, MM Algorithms for Generalized Bradley-Terry Models, for the advantage.
      Caron and Doucet, 2012, Efficient Bayesian Inference for Generalized Bradley-Terry Models, for priors
      (https://arxiv.org/abs/1011.1761).

    >>> rating, _ = bradley_terry(np.array([[55.0, 100.0], [10.0, 55.0]]), 110, prior=1e-6)  # odds of 10 to 1
    >>> rating.value.round().tolist()
    [200.0, -200.0]
    """
    num = len(points)
    first, second = _pairs(num)
    fit = _fit(np.hstack([first - second, np.ones((num**2, 1))]), points, games, prior)
    centred = np.hstack([np.eye(num) - 1 / num, np.zeros((num, 1))])
    return _in_rating_points(centred, *fit), _in_rating_points(np.eye(num + 1)[-1], *fit)


def role_ratings(points: Float[np.ndarray, "P P"], games: Numeric, *, prior: float = 1.0) -> Estimate:
    """Ratings `[2, P]` of each player on side 0 and on side 1, as if it were two players: for games with unlike sides.

    The model is that of `bradley_terry`, with R of side 0 for i, R of side 1 for j, and no advantage: it is in the
    ratings, whose mean over all 2 P is 0. Arguments are the same, too.
    """
    num = len(points)
    first, second = _pairs(num)
    fit = _fit(np.hstack([first, -second]), points, games, prior)
    together = _in_rating_points(np.eye(2 * num) - 1 / (2 * num), *fit)
    return Estimate(*(x.reshape(2, num) for x in together))


def _pairs(num: int) -> tuple[np.ndarray, np.ndarray]:
    """Who plays in each row of a flat matrix of pairs: one-hot, on side 0 and on side 1."""
    return np.repeat(np.eye(num), num, axis=0), np.tile(np.eye(num), (num, 1))


def _fit(design: np.ndarray, points: np.ndarray, games: Numeric, prior: float) -> tuple[np.ndarray, np.ndarray]:
    """Logistic regression of points on a design `[M, K]`: coefficients, and the inverse of the curvature.

    A drawn game with a player of rating 0 is one more row for each coefficient.
    """
    if prior <= 0:
        raise ValueError(f"prior={prior} must be positive: without one, whoever won everything has no finite rating.")
    num = design.shape[1]
    design = np.vstack([design, np.eye(num)])
    games = np.concatenate([np.broadcast_to(games, points.shape).ravel(), np.full(num, prior)])
    points = np.concatenate([points.ravel(), np.full(num, prior / 2)])
    coefficients = np.zeros(num)
    for _ in range(200):
        expected = 1 / (1 + np.exp(-design @ coefficients))
        curvature = (design * (games * expected * (1 - expected))[:, None]).T @ design
        step = np.linalg.solve(curvature, design.T @ (points - games * expected))
        coefficients = coefficients + step / max(1.0, np.abs(step).max() / 4)  # Newton's may be far too long
        if np.abs(step).max() < 1e-10:
            break
    return coefficients, np.linalg.inv(curvature)


def _in_rating_points(contrast: np.ndarray, coefficients: np.ndarray, covariance: np.ndarray) -> Estimate:
    """Sums of coefficients `[.., K]`, and their intervals."""
    value = _ELO * contrast @ coefficients
    half_width = _Z * _ELO * np.sqrt(np.sum(contrast @ covariance * contrast, axis=-1))
    return Estimate(value, value - half_width, value + half_width)
