"""Weight initialisers, by name. Each takes a gain and gives a flax initialiser.

Each makes weights out of standard normal numbers of their shape, and says so to `draw_at_once`, which draws those of a
whole network in one go: a draw for every matrix, with keys folded name by name, is what an initialisation takes longest
to compile.
"""

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, PRNGKeyArray

from jmarl.types import Params


@struct.dataclass
class Drawn(nn.meta.AxisMetadata):
    """A parameter that `make` made out of standard normal numbers of its shape. flax unboxes it where it is used."""

    value: Any
    make: Callable[[Array], Array] = struct.field(pytree_node=False)

    def unbox(self) -> Any:
        return self.value

    def replace_boxed(self, val: Any) -> "Drawn":
        return Drawn(val, self.make)

    def add_axis(self, index: int, params: Any) -> "Drawn":
        return self

    def remove_axis(self, index: int, params: Any) -> "Drawn":
        return self


def draw_at_once(params: Params, key: PRNGKeyArray) -> Params:
    """Parameters of a flax module with every `Drawn` made anew, out of a single draw."""
    leaves, structure = jax.tree.flatten(params, is_leaf=lambda x: isinstance(x, Drawn))
    drawn = [leaf for leaf in leaves if isinstance(leaf, Drawn)]
    sizes = [leaf.value.size for leaf in drawn]
    normals = iter(jnp.split(jax.random.normal(key, (sum(sizes),)), np.cumsum(sizes)[:-1]))

    def remake(leaf: Any) -> Any:
        if not isinstance(leaf, Drawn):
            return leaf
        return leaf.make(next(normals).reshape(leaf.value.shape)).astype(leaf.value.dtype)

    return jax.tree.unflatten(structure, [remake(leaf) for leaf in leaves])


def from_normal(make: Callable[[Array], Array]) -> Callable[..., Any]:
    """The flax initialiser that applies `make` to standard normal numbers."""

    def init(key: PRNGKeyArray, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Drawn:
        return Drawn(make(jax.random.normal(key, shape, dtype)), make)

    return init


def orthogonalize(x: Array) -> Array:
    """The polar factor of a matrix: orthonormal rows or columns, whichever are fewer. All axes but the last are rows.

    Of a Gaussian matrix it is uniform over such matrices. By Newton-Schulz iteration `X ← X (3 - XᵀX) / 2`: products
    only. The usual QR decomposition is a call into LAPACK for each matrix, which under `vmap` over seeds stalled for
    minutes on a busy CPU.

    References:
      Saxe et al., 2014, Exact Solutions to the Nonlinear Dynamics of Learning (https://arxiv.org/abs/1312.6120).
      Higham, 2008, Functions of Matrices, sec. 8.3.
    """
    shape, rows, columns = x.shape, math.prod(x.shape[:-1]), x.shape[-1]
    x = x.reshape(rows, columns) if rows >= columns else x.reshape(rows, columns).T
    # Singular values start below about 1, where the iteration converges; the smallest grow by half each time.
    x = x / (math.sqrt(rows) + math.sqrt(columns))
    x = jax.lax.fori_loop(0, 40, lambda _, x: 1.5 * x - 0.5 * x @ (x.T @ x), x)
    return (x if rows >= columns else x.T).reshape(shape)


def _fan_in(shape: tuple[int, ...]) -> int:
    return math.prod(shape[:-1])


def orthogonal(scale: float = 1.0) -> Callable[..., Any]:
    """Random matrices with orthonormal rows or columns, times `scale`. See `orthogonalize`."""
    return from_normal(lambda z: scale * orthogonalize(z))


def lecun(scale: float = 1.0) -> Callable[..., Any]:
    """Normal with standard deviation `scale / sqrt(fan-in)`."""
    return from_normal(lambda z: scale / math.sqrt(_fan_in(z.shape)) * z)


def xavier(scale: float = 1.0) -> Callable[..., Any]:
    """Normal with standard deviation `scale * sqrt(2 / (fan-in + fan-out))`; a convolution's window counts in both."""
    return from_normal(lambda z: scale * math.sqrt(2 / (_fan_in(z.shape) + math.prod(z.shape[:-2]) * z.shape[-1])) * z)


INITIALIZERS = {"orthogonal": orthogonal, "lecun": lecun, "xavier": xavier}
