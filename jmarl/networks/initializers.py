"""Weight initialisers, by name. Each takes a gain and gives a flax initialiser."""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array


def orthogonal(scale: float = 1.0) -> nn.initializers.Initializer:
    """Random matrices with orthonormal rows or columns, whichever are fewer, times `scale`.

    As the polar factor of a Gaussian matrix, which is uniform over such matrices, by Newton-Schulz iteration
    `X ← X (3 - XᵀX) / 2`: products only. The usual QR decomposition is a call into LAPACK for each matrix, which under
    `vmap` over seeds stalled for minutes on a busy CPU.

    References:
      Saxe et al., 2014, Exact Solutions to the Nonlinear Dynamics of Learning (https://arxiv.org/abs/1312.6120).
      Higham, 2008, Functions of Matrices, sec. 8.3.
    """

    def init(key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
        rows, columns = math.prod(shape[:-1]), shape[-1]
        few, many = sorted((rows, columns))
        x = jax.random.normal(key, (many, few), dtype)
        # Singular values start below about 1, where the iteration converges; the smallest grow by half each time.
        x = x / (math.sqrt(many) + math.sqrt(few))
        x = jax.lax.fori_loop(0, 40, lambda _, x: 1.5 * x - 0.5 * x @ (x.T @ x), x)
        return scale * (x if rows >= columns else x.T).reshape(shape)

    return init


INITIALIZERS = {
    "orthogonal": orthogonal,
    "lecun": lambda scale: nn.initializers.variance_scaling(scale**2, "fan_in", "truncated_normal"),
    "xavier": lambda scale: nn.initializers.variance_scaling(scale**2, "fan_avg", "uniform"),
}
