"""Self-play against old selves: one side learns, the other acts as the learner does now, or as it did before.

At the start of each episode, the opponent of each environment is drawn: with probability `latest_share` the learner as
it is, else one of a pool of its old parameters, each equally likely, or in PFSP with a probability that grows with what
it wins,

    P(k) ∝ (1 - w_k)^p,   w_k the learner's share of wins against k.

Which side learns is drawn, too. What old selves do is acted, and not learnt from: their steps have the weight 0. Every
`add_every` updates, today's parameters take the place of the oldest in the pool.

References:
  Heinrich et al., 2015, Fictitious Self-Play in Extensive-Form Games, for opponents that are a mixture of old selves.
  Vinyals et al., 2019, Grandmaster level in StarCraft II using multi-agent reinforcement learning, for PFSP.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jmarl import masks, metrics, parallel
from jmarl.combinators import nesting
from jmarl.configs import config
from jmarl.learners import checks
from jmarl.types import Algorithm, EnvSpec, Learner, Metrics, Numeric, TrainState, Trajectory, static

_LATEST = -1  # in place of a number in the pool


@config
class SelfPlayConfig:
    """Hyperparameters of self-play."""

    inner: Any  # the config of the algorithm within
    pool_size: int = static(16)  # old parameters kept; memory is so many times the parameters
    add_every: Numeric = 10  # updates between two additions to the pool
    latest_share: Numeric = 0.5  # of episodes against the learner as it is, of which both sides are learnt from
    matching: Literal["uniform", "pfsp"] = static("uniform")  # how an old self is drawn
    pfsp_power: Numeric = 2.0  # p: how much those are preferred that win
    win_memory: Numeric = 0.99  # weight of the past in shares of wins, per update


def self_play(algorithm: Algorithm, sides: Sequence[int] | None = None) -> Callable[[EnvSpec, SelfPlayConfig], Learner]:
    """The algorithm, learning against itself and its old selves, in symmetric games and in games of two teams.

    Its learner plays all agents; where the sides differ, `sharing="per_group"` or `teams` give them networks of their
    own. An episode is won by the side of the higher mean return, as far as its last rollout shows. Evaluation is the
    learner as it is, against itself: for old selves and strangers see `jmarl.tournament`.

    Args:
      algorithm: any.
      sides: 0 or 1 for each agent. By default the environment's teams, or one agent against the other.

    Example:
      >>> import jmarl
      >>> env = jmarl.envs.matrix_game([[0.0, 1.0], [-1.0, 0.0]])
      >>> learner = self_play(jmarl.ippo)(env.spec, SelfPlayConfig(inner=jmarl.PPOConfig(), pool_size=4))
      >>> jax.tree.leaves(learner.init(jax.random.key(0)).target_params["pool"])[0].shape[0]
      4
    """

    def combined(spec: EnvSpec, cfg: SelfPlayConfig) -> Learner:
        side_of = _sides_of(spec, sides)
        _validate(cfg, spec)
        learner = algorithm(spec, cfg.inner)
        if cfg.matching == "pfsp" and learner.learns_from == "replay":
            raise ValueError(
                "matching='pfsp' counts wins in rollouts, and this algorithm learns from replay, which has no whole "
                "episodes: choose matching='uniform'."
            )

        def init(key):
            inner = learner.init(key)
            pool = jax.tree.map(lambda x: jnp.broadcast_to(x, (cfg.pool_size, *x.shape)), inner.params)
            wins = {"wins": jnp.zeros(cfg.pool_size), "games": jnp.zeros(cfg.pool_size)}
            own = TrainState(params=(), target_params=pool, opt_state=wins, step=jnp.int32(0))
            return nesting.join({"inner": inner, "pool": own})

        def init_carry(batch_shape):
            return {
                "inner": learner.init_carry(batch_shape),
                "old": learner.init_carry(batch_shape),
                "opponent": jnp.full(batch_shape, _LATEST, jnp.int32),
                "side": jnp.zeros(batch_shape, jnp.int32),
            }

        def draw(own, carry, first, key):
            """The opponent and the learning side of each environment, anew where an episode starts."""
            key_latest, key_old, key_side = jax.random.split(key, 3)
            is_filled = jnp.arange(cfg.pool_size) <= own.step // cfg.add_every
            liking = is_filled * ((1 - _win_share(own)) ** cfg.pfsp_power if cfg.matching == "pfsp" else 1.0)
            old = jax.random.categorical(key_old, jnp.log(liking), shape=first.shape)
            is_latest = jax.random.uniform(key_latest, first.shape) < cfg.latest_share
            opponent = jnp.where(first, jnp.where(is_latest, _LATEST, old), carry["opponent"])
            side = jnp.where(first, jax.random.bernoulli(key_side, shape=first.shape), carry["side"])
            return opponent.astype(jnp.int32), side.astype(jnp.int32)

        def act(state, carry, obs, first, key):
            inner, own = nesting.part(state, "inner"), nesting.part(state, "pool")
            key_draw, key_new, key_old = jax.random.split(key, 3)
            opponent, side = draw(own, carry, first, key_draw)
            action, carry_new, measured = learner.act(inner, carry["inner"], obs, first, key_new)
            pool = jax.tree.map(lambda x: x[jnp.maximum(opponent, 0)], own.target_params)

            def act_as_before(params, key, of_one_env):
                carry, obs, first = jax.tree.map(lambda x: x[None], of_one_env)
                action, carry, _ = learner.act(inner.replace(params=params), carry, obs, first, key)
                return jax.tree.map(lambda x: x[0], (action, carry))

            keys = jax.random.split(key_old, len(first))
            old, carry_old = jax.vmap(act_as_before)(pool, keys, (carry["old"], obs, first))
            is_old = (opponent != _LATEST)[:, None] & (side_of != side[:, None])
            action = jnp.where(is_old.reshape(*is_old.shape, *[1] * (action.ndim - 2)), old, action)
            told = {"self_play/opponent": opponent, "self_play/side": side, "self_play/is_old": is_old}
            carry = {"inner": carry_new, "old": carry_old, "opponent": opponent, "side": side}
            return action, carry, {**measured, **told}

        def greedy(state, carry, obs, first):
            action, own = learner.greedy(nesting.part(state, "inner"), carry["inner"], obs, first)
            return action, {**carry, "inner": own}

        def update(state, batch, key):
            own = nesting.part(state, "pool")
            inner, told = learner.update(nesting.part(state, "inner"), _of_learner(batch), key)
            if learner.learns_from == "rollouts":
                wins, measured = _count_wins(own, batch, side_of, cfg)
                own, told = own.replace(opt_state=wins), {**told, **measured}
            own = own.replace(step=own.step + 1)
            own = _add_to_pool(own, inner.params, cfg)
            return nesting.join({"inner": inner, "pool": own}), told

        return learner._replace(init=init, init_carry=init_carry, act=act, greedy=greedy, update=update)

    return combined


# ----------------------------------------------------------------------------------------------------- the parts


def _of_learner(batch: Trajectory) -> Trajectory:
    """The batch as the algorithm within knows it; what old selves did counts for nothing."""
    steps = batch.steps

    def inner(carry: Any) -> Any:
        return carry["inner"] if isinstance(carry, dict) and "opponent" in carry else carry

    return batch.replace(
        steps=steps.replace(carry=inner(steps.carry)),
        carry=inner(batch.carry),
        next_carry=inner(batch.next_carry),
        weight=masks.weight(batch) * ~steps.measured["self_play/is_old"],
    )


def _add_to_pool(own: TrainState, params: Any, cfg: SelfPlayConfig) -> TrainState:
    """Today's parameters in the place of the oldest, if it is time; nothing is known of who wins against them."""
    is_time = own.step % cfg.add_every == 0
    place = (own.step // cfg.add_every).astype(jnp.int32) % cfg.pool_size

    def put(kept: Array, new: Any) -> Array:
        return kept.at[place].set(jnp.where(is_time, new, kept[place]))

    wins = {name: put(x, 0.0) for name, x in own.opt_state.items()}
    return own.replace(target_params=jax.tree.map(put, own.target_params, params), opt_state=wins)


def _win_share(own: TrainState) -> Array:
    """The learner's share of wins against each old self, one half where nothing is known."""
    return (own.opt_state["wins"] + 0.5) / (own.opt_state["games"] + 1)


def _count_wins(
    own: TrainState, batch: Trajectory, side_of: np.ndarray, cfg: SelfPlayConfig
) -> tuple[dict[str, Array], Metrics]:
    """Of the episodes that end in a rollout, by opponent; a draw is half a win."""
    steps: Any = batch.steps
    opponent, side = (steps.measured[f"self_play/{name}"] for name in ("opponent", "side"))
    is_ours = side_of == side[..., None]
    lead = jnp.mean(steps.reward, axis=-1, where=is_ours) - jnp.mean(steps.reward, axis=-1, where=~is_ours)

    def add_up(total, of_step):
        lead, last = of_step
        total = total + lead
        return jnp.where(last, 0.0, total), total

    _, lead = jax.lax.scan(add_up, jnp.zeros_like(lead[0]), (lead, steps.last))
    won = (jnp.sign(lead) + 1) / 2
    ended = steps.last & (opponent != _LATEST)
    against = jax.nn.one_hot(opponent, cfg.pool_size) * ended[..., None]
    new = parallel.summed({"wins": jnp.sum(against * won[..., None], (0, 1)), "games": jnp.sum(against, (0, 1))})
    share = metrics.mean(jnp.sum(won * ended), jnp.sum(ended))
    return {name: cfg.win_memory * own.opt_state[name] + new[name] for name in new}, {"self_play/win_share": share}


def _sides_of(spec: EnvSpec, sides: Sequence[int] | None) -> np.ndarray:
    default = spec.teams or ((0, 1) if spec.num_agents == 2 else ())
    chosen = tuple(default if sides is None else sides)
    if len(chosen) != spec.num_agents or set(chosen) != {0, 1}:
        raise ValueError(
            f"sides={sides} must say 0 or 1 for each of the {spec.num_agents} agents of {spec.name}, "
            f"{', '.join(spec.agents)}, and both must be there."
        )
    return np.asarray(chosen)


def _validate(cfg: Any, spec: EnvSpec) -> None:
    checks.validate(cfg, SelfPlayConfig, spec)
    checks.require(cfg, ("pool_size", "add_every"), lambda x: x >= 1, "be at least 1")
    checks.require(cfg, ("latest_share", "win_memory"), lambda x: 0 <= x <= 1, "lie in [0, 1]")
    checks.require(cfg, ("pfsp_power",), lambda x: x >= 0, "not be negative: choose 0 for equal chances")
