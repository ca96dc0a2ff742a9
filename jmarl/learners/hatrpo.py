"""HATRPO: agents learn one after the other, each by a step of its natural gradient within a trust region.

As `jmarl.learners.happo`, with another step. In its turn, agent m goes from θ_m to

    θ_m + α^j β x,   (F + λ I) x = g,   β = √(2 δ / xᵀ F x),

with g the gradient of its surrogate J(θ) = mean[ρ_m M] + c_H H, M the advantage weighted by those who moved before, and
F the curvature of the mean KL from its old policy. x is found by conjugate gradients, which need products F v alone. j
is the smallest at which the surrogate has risen and the mean KL is at most δ; where there is none, the agent stays. So
what the joint policy gains is bounded from below turn by turn, which HAPPO's clipping only approximates.

References:
  Kuba et al., 2022, Trust Region Policy Optimisation in Multi-Agent Reinforcement Learning, sec. 4.1 and alg. 2
    (https://arxiv.org/abs/2109.11251).
  Schulman et al., 2015, Trust Region Policy Optimization, app. C (https://arxiv.org/abs/1502.05477).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from jmarl import masks, parallel
from jmarl.configs import config
from jmarl.learners import checks, parts, ppo
from jmarl.learners.happo import HANets, HAPPOConfig, Player, happo_critic_loss, in_turns
from jmarl.learners.ppo import PPOTargets, ppo_targets
from jmarl.networks import heads
from jmarl.types import EnvSpec, Learner, Metrics, Numeric, Params, Trajectory, static


@config
class HATRPOConfig(HAPPOConfig):
    """Hyperparameters of HATRPO. Rates, epochs and minibatches are the critic's; `clip_eps` changes nothing."""

    ent_coef: Numeric = 0.0
    max_kl: Numeric = 0.01  # δ, of an agent's new policy from its old one, on average
    cg_iterations: int = static(10)  # of conjugate gradients
    cg_damping: Numeric = 0.1  # λ, added to the curvature while the step is sought
    line_search_steps: int = static(10)  # lengths of the step that are tried
    line_search_shrink: Numeric = 0.5  # α, from one length to the next


def hatrpo_surrogate(
    params: Params, batch: Trajectory, targets: PPOTargets, *, nets: Player, cfg: HATRPOConfig
) -> tuple[Array, Metrics]:
    """J, what one player wants to rise: the mean of ρ M where its members act, and their entropy.

    Args:
      params: of the player alone.
      batch: sequences.
      targets: of the same steps; the advantage is M, weighted by those who moved before.
      nets: the player.
      cfg: its leaves may be tracers.

    Returns:
      A scalar and its parts.
    """
    acting = jnp.where(nets.members, masks.acting(batch), 0.0)
    log_prob, entropy = nets.evaluate(params, batch)
    # What is none of this player's has no slope: it may not even be a number.
    log_ratio = jnp.where(acting > 0, log_prob - targets.log_prob, 0.0)
    gain = parts.mean_loss(jnp.exp(log_ratio) * targets.advantage, acting)
    mean_entropy = parts.mean_loss(jnp.where(nets.members, entropy, 0.0), acting)
    return gain + cfg.ent_coef * mean_entropy, {"loss/actor": -gain, "policy/entropy": mean_entropy}


def mean_kl(params: Params, old: Any, batch: Trajectory, *, nets: Player) -> Array:
    """KL from the distributions `old` to the player's, averaged over where its members act."""
    acting = jnp.where(nets.members, masks.acting(batch), 0.0)
    divergence = heads.kl_divergence(old, nets.distribution(params, batch))
    return parts.mean_loss(jnp.where(acting > 0, divergence, 0.0), acting)


def conjugate_gradient(
    product: Callable[[Array], Array], b: Float[Array, "P"], num_iterations: int
) -> Float[Array, "P"]:
    """An approximate solution of A x = b, with A symmetric and positive, given as `product(v)`, A v.

    References:
      Hestenes & Stiefel, 1952, Methods of Conjugate Gradients for Solving Linear Systems, sec. 3.

    >>> conjugate_gradient(lambda v: jnp.array([2.0, 4.0]) * v, jnp.array([2.0, 2.0]), 2).round(5)
    Array([1. , 0.5], dtype=float32)
    """

    def iteration(_: Any, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        x, residual, direction = state
        image, squared = product(direction), jnp.vdot(residual, residual)
        curvature = jnp.vdot(direction, image)
        # Solved, or no direction is left: 0 / 0 would follow.
        length = jnp.where(curvature > 0, squared / jnp.where(curvature > 0, curvature, 1.0), 0.0)
        x, residual = x + length * direction, residual - length * image
        ratio = jnp.vdot(residual, residual) / jnp.where(squared > 0, squared, 1.0)
        return x, residual, residual + ratio * direction

    return jax.lax.fori_loop(0, num_iterations, iteration, (jnp.zeros_like(b), b, b))[0]


def curvature_product(kl: Callable[[Array], Array], params: Float[Array, "P"]) -> Callable[[Array], Array]:
    """`v -> F v`, with F the second derivatives of `kl` at `params`: where it is least, Fisher's information matrix.

    By two backward passes, since the GRU's own backward pass has no forward derivative.
    """

    def product(v: Array) -> Array:
        return jax.grad(lambda x: jnp.vdot(jax.grad(kl)(x), v))(params)

    return product


def trust_region_step(
    surrogate: Callable[[Array], Array], kl: Callable[[Array], Array], params: Float[Array, "P"], cfg: HATRPOConfig
) -> tuple[Float[Array, "P"], Metrics]:
    """One step up the surrogate, as the module says; `kl` is from the policy of `params`."""
    start, gradient = parallel.averaged(jax.value_and_grad(surrogate)(params))
    curvature = curvature_product(kl, params)

    def product(v: Array) -> Array:
        return parallel.averaged(curvature(v))

    direction = conjugate_gradient(lambda v: product(v) + cfg.cg_damping * v, gradient, cfg.cg_iterations)
    squared = jnp.vdot(direction, product(direction))
    longest = jnp.where(squared > 0, jnp.sqrt(2 * cfg.max_kl / jnp.where(squared > 0, squared, 1.0)), 0.0)

    def is_searching(state: tuple[Array, Array, Array, Array]) -> Array:
        tried, _, _, is_accepted = state
        return (tried < cfg.line_search_steps) & ~is_accepted

    def shorter(state: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        tried, _, _, _ = state
        candidate = params + longest * cfg.line_search_shrink**tried * direction
        raised, divergence = parallel.averaged((surrogate(candidate), kl(candidate)))
        is_accepted = (raised > start) & (divergence <= cfg.max_kl)  # False for what is not a number
        return tried + 1, candidate, divergence, is_accepted

    begin = jnp.int32(0), params, jnp.zeros_like(start), jnp.bool_(False)
    tried, candidate, divergence, is_accepted = jax.lax.while_loop(is_searching, shorter, begin)
    return jnp.where(is_accepted, candidate, params), {
        "policy/kl": jnp.where(is_accepted, divergence, 0.0),
        "policy/accepted": is_accepted.astype(start.dtype),
        "policy/lengths_tried": tried.astype(start.dtype),
        "loss/grad_norm": jnp.linalg.norm(gradient),
    }


def hatrpo(
    spec: EnvSpec,
    cfg: HATRPOConfig,
    nets: HANets | None = None,
    *,
    targets=ppo_targets,
    surrogate=hatrpo_surrogate,
    critic_loss=happo_critic_loss,
) -> Learner:
    """HATRPO: `happo` whose agents move within a trust region. Arguments as for `happo`, with `surrogate` to be raised.

    >>> from jmarl import envs
    >>> env = envs.matrix_game([[8.0, -12.0], [-12.0, 0.0]])
    >>> sorted(hatrpo(env.spec, HATRPOConfig(hidden_sizes=(8,))).init(jax.random.key(0)).params)
    ['actor', 'critic']
    """
    checks.validate(cfg, HATRPOConfig, spec)
    checks.require(cfg, ("cg_iterations", "line_search_steps"), lambda x: x >= 1, "be at least 1")
    checks.require(cfg, ("max_kl",), lambda x: x > 0, "be positive: within 0 nobody moves")
    checks.require(cfg, ("cg_damping",), lambda x: x >= 0, "not be negative")
    checks.require(cfg, ("line_search_shrink",), lambda x: 0 < x < 1, "lie between 0 and 1")
    ent_coef = ppo.schedules(cfg)[1]

    def improve(optimizer, player, params, opt_state, batch, target, step, key):
        del optimizer, key
        current = cfg.replace(ent_coef=ent_coef(step))
        flat, unravel = ravel_pytree(params)
        old = jax.lax.stop_gradient(player.distribution(params, batch))
        flat, metrics = trust_region_step(
            lambda x: surrogate(unravel(x), batch, target, nets=player, cfg=current)[0],
            lambda x: mean_kl(unravel(x), old, batch, nets=player),
            flat,
            current,
        )
        params = unravel(flat)
        _, told = surrogate(params, batch, target, nets=player, cfg=current)
        return params, opt_state, {**metrics, **told}

    return in_turns(spec, cfg, nets, improve, optax.identity(), targets=targets, critic_loss=critic_loss)
