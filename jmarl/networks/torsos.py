"""Feed-forward torsos as flax modules, and the one module that every actor, critic and Q-network is made of."""

import math
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from flax.core import FrozenDict
from jaxtyping import Array, Float, Shaped

from jmarl.networks.initializers import INITIALIZERS
from jmarl.networks.recurrent import CELLS
from jmarl.types import Carry, Replaceable, as_floats

ACTIVATIONS = {"tanh": jnp.tanh, "relu": nn.relu, "elu": nn.elu, "gelu": nn.gelu, "silu": nn.silu}


# Larger images leave no memory for patches, which hold each place as often as a window has places.
MOST_PLACES = 256

# With fewer agents several small products take longer than a wide one: COMA's iteration 1.25 times as long with three.
MANY_AGENTS = 6


@struct.dataclass
class Joined:
    """Features of agents in parts, which a first layer multiplies apart: what all agents read, once for all of them.

    Attributes:
      parts: `[L, M, N, F_i]` each, or with axes of 1 where they do not differ. A network reads them side by side.
      own: None, or `[L, M, N, A]`: the first part is of blocks of A features, and each agent reads this in the place of
        its own block.
      blocks: the block of each agent.
    """

    parts: tuple[Array, ...]
    own: Array | None = None
    blocks: tuple[int, ...] = struct.field(pytree_node=False, default=())

    @property
    def leading(self) -> tuple[int, ...]:
        """L, M, N."""
        return np.broadcast_shapes(*(x.shape[:-1] for x in (*self.parts, *([] if self.own is None else [self.own]))))

    def of_agents(self, index: np.ndarray) -> "Joined":
        """What some of the agents read."""
        pick = lambda x: x if x.shape[2] == 1 else x[:, :, index]  # noqa: E731
        return jax.tree.map(pick, self).replace(blocks=tuple(np.array(self.blocks, int)[index]) if self.blocks else ())

    def joined(self, num_agents: int | None = None) -> Shaped[Array, "L M N F"]:
        """Side by side; of so many agents, where no part says how many there are."""
        length, size, num = self.leading
        leading = length, size, num_agents or num
        first, *rest = (jnp.broadcast_to(x, (*leading, x.shape[-1])) for x in self.parts)
        if self.own is not None:
            size = self.own.shape[-1]
            is_own = np.asarray(self.blocks)[:, None] == np.arange(first.shape[-1]) // size
            first = jnp.where(is_own, jnp.tile(self.own, first.shape[-1] // size), first)
        return jnp.concatenate([first, *rest], axis=-1)


@struct.dataclass
class Attended(Replaceable):
    """What outputs read where a view was read as entities.

    Attributes:
      own: features of the agent itself.
      targets: features of each entity that actions are done to, in the order of these actions.
    """

    own: Float[Array, "R H"]
    targets: Float[Array, "R K E"]


class DenseOfJoined(nn.Module):
    """`nn.Dense`, with the same parameters, of `Joined` features: `[L M N, features]`, equal to rounding."""

    features: int
    kernel_init: Any

    @nn.compact
    def __call__(self, x: Joined) -> Float[Array, "R H"]:
        widths = [part.shape[-1] for part in x.parts]
        kernel = self.param("kernel", self.kernel_init, (sum(widths), self.features))
        bias = self.param("bias", nn.initializers.zeros_init(), (self.features,))
        kernels = jnp.split(kernel, np.cumsum(widths)[:-1])
        parts = [
            (part.reshape(-1, part.shape[-1]) @ some).reshape(*part.shape[:-1], self.features)
            for part, some in zip(x.parts, kernels, strict=True)
        ]
        if x.own is not None:
            index, size = np.asarray(x.blocks), x.own.shape[-1]
            there = x.parts[0].reshape(*x.parts[0].shape[:2], -1, size)[:, :, index]
            blocks = kernels[0].reshape(-1, size, self.features)[index]
            parts.append(jnp.einsum("lmna,nah->lmnh", x.own - there, blocks))
        return jnp.broadcast_to(sum(parts, bias), (*x.leading, self.features)).reshape(-1, self.features)


class MLP(nn.Module):
    """Dense layers, each followed by an activation: `[.., F] -> [.., sizes[-1]]`, or `Joined -> [L M N, sizes[-1]]`.

    Attributes:
      sizes: widths; an empty sequence is the identity.
      activation: a key of `ACTIVATIONS`.
      layer_norm: normalise before each activation.
      kernel_init: a key of `INITIALIZERS`, scaled by √2.
    """

    sizes: Sequence[int]
    activation: str = "tanh"
    layer_norm: bool = False
    kernel_init: str = "orthogonal"

    @nn.compact
    def __call__(self, x: Shaped[Array, "*batch F"] | Joined) -> Shaped[Array, "*batch H"]:
        rows: Any = x
        for i, size in enumerate(self.sizes):
            dense: Any = DenseOfJoined if isinstance(rows, Joined) else nn.Dense
            rows = dense(size, kernel_init=INITIALIZERS[self.kernel_init](math.sqrt(2)), name=f"Dense_{i}")(rows)
            rows = ACTIVATIONS[self.activation](nn.LayerNorm()(rows) if self.layer_norm else rows)
        return rows


class Convolution(nn.Module):
    """`nn.Conv` of stride 1, with the same parameters: `[R, H, W, C] -> [R, H, W, features]`, equal to rounding.

    On a CPU one product of patches: within a scan, where updates are, the gradient of a convolution takes 11 times as
    long, of two seeds side by side 14 times.

    Attributes:
      features: output channels.
      window: its square window's width.
      kernel_init: of the kernel `[window, window, C, features]`.
    """

    features: int
    window: int
    kernel_init: Any

    @nn.compact
    def __call__(self, x: Float[Array, "R H W C"]) -> Float[Array, "R H W F"]:
        kernel = self.param("kernel", self.kernel_init, (self.window, self.window, x.shape[-1], self.features))
        bias = self.param("bias", nn.initializers.zeros_init(), (self.features,))
        num_rows, height, width, _ = x.shape
        if jax.default_backend() != "cpu" or height * width > MOST_PLACES:
            layout = ("NHWC", "HWIO", "NHWC")
            return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=layout) + bias
        around = (self.window - 1) // 2, self.window // 2
        x = jnp.pad(x, ((0, 0), around, around, (0, 0)))
        places = [(i, j) for i in range(self.window) for j in range(self.window)]
        patches = jnp.concatenate([x[:, i : i + height, j : j + width] for i, j in places], axis=-1)
        rows = patches.reshape(-1, patches.shape[-1]) @ kernel.reshape(-1, self.features)
        return rows.reshape(num_rows, height, width, -1) + bias


class CNN(nn.Module):
    """Three convolutions with stride 1 and a dense layer: `[.., H, W, C] -> [.., size]`, for grids and small images.

    Attributes:
      channels: output channels of each convolution.
      kernels: their square windows.
      size: width of the dense layer at the end.
      activation: a key of `ACTIVATIONS`.
      layer_norm: normalise before each activation.
      kernel_init: a key of `INITIALIZERS`, scaled by √2.
    """

    channels: Sequence[int] = (32, 32, 32)
    kernels: Sequence[int] = (5, 3, 3)
    size: int = 64
    activation: str = "relu"
    layer_norm: bool = False
    kernel_init: str = "orthogonal"

    @nn.compact
    def __call__(self, x: Shaped[Array, "*batch H W C"]) -> Float[Array, "*batch F"]:
        batch_shape, init = x.shape[:-3], INITIALIZERS[self.kernel_init](math.sqrt(2))
        x = as_floats(x).reshape(-1, *x.shape[-3:])  # convolutions take one batch axis
        for i, (channels, window) in enumerate(zip(self.channels, self.kernels, strict=True)):
            x = Convolution(channels, window, init, name=f"Conv_{i}")(x)
            x = ACTIVATIONS[self.activation](nn.LayerNorm()(x) if self.layer_norm else x)
        x = nn.Dense(self.size, kernel_init=init)(x.reshape(*batch_shape, -1))
        return ACTIVATIONS[self.activation](nn.LayerNorm()(x) if self.layer_norm else x)


class Output(nn.Module):
    """Hidden layers and a linear output: `[.., F] -> [.., size]`. `scale` is the output kernel's orthogonal gain."""

    size: int
    hidden_sizes: Sequence[int] = ()
    activation: str = "tanh"
    layer_norm: bool = False
    kernel_init: str = "orthogonal"
    scale: float = 1.0

    @nn.compact
    def __call__(self, x: Shaped[Array, "*batch F"]) -> Float[Array, "*batch A"]:
        x = MLP(self.hidden_sizes, self.activation, self.layer_norm, self.kernel_init, name="hidden")(x)
        return nn.Dense(self.size, kernel_init=INITIALIZERS[self.kernel_init](self.scale), name="out")(x)


class Dueling(nn.Module):
    """Values of actions as `V + A - mean A`: `[.., F] -> [.., A]`; of `Attended`, if its layers read that.

    Attributes:
      value: output layer of one number, V.
      advantage: output layer of a number for each action, A.

    References:
      Wang et al., 2016, Dueling Network Architectures for Deep Reinforcement Learning, eq. 9
      (https://arxiv.org/abs/1511.06581).
    """

    value: nn.Module
    advantage: nn.Module

    @nn.compact
    def __call__(self, x: Float[Array, "*batch F"] | Attended) -> Float[Array, "*batch A"]:
        advantage = self.advantage(x)
        return self.value(x) + advantage - jnp.mean(advantage, axis=-1, keepdims=True)


class Model(nn.Module):
    """Torso, optional recurrent cell, and one or more outputs that share them.

    `(carry, x [L, M, .., F], first [L, M]) -> (carry, outputs)`: a tuple with one entry for each of `outputs`, or the
    entry itself if there is one. Any axes between M and the features are batch; `x` may be `Joined`. Images are
    recognised by `is_image`.

    Attributes:
      hidden_sizes: dense layers before the cell; after a CNN if `is_image`.
      outputs: what follows the torso.
      cell: None, or one of `networks.CELLS`: "gru", "lstm" or "attention".
      cell_size: width of what leaves the cell.
      cell_options: what else the cell is made with, such as the `window` of attention.
      entities: None, or what reads vectors as entities before the dense layers, `[R, F] -> Attended`, such as
        `networks.entities.EntityTorso`. Outputs read `Attended` then, with the agent's own part as it leaves the cell.
      num_late: the first so many features pass by torso and cell and join what the outputs read: actions, in critics
        whose memory is of observations only.
    """

    hidden_sizes: Sequence[int]
    outputs: Sequence[nn.Module]
    cell: str | None = None
    cell_size: int = 128
    cell_options: Any = FrozenDict()
    activation: str = "tanh"
    layer_norm: bool = False
    kernel_init: str = "orthogonal"
    is_image: bool = False
    num_late: int = 0
    entities: nn.Module | None = None

    @nn.compact
    def __call__(self, carry: Carry, x: Array | Joined, first: Array) -> tuple[Carry, Any]:
        torso = MLP(self.hidden_sizes, self.activation, self.layer_norm, self.kernel_init, name="torso")
        if isinstance(x, Joined) and x.leading[2] >= MANY_AGENTS and self.hidden_sizes and not self.num_late:
            leading, late, rows = x.leading, None, torso(x)
        else:
            # One row for each step, sequence and agent: on a CPU the gradient of a product is twice as fast with one
            # batch axis as with three.
            rows = as_floats(x.joined() if isinstance(x, Joined) else x)
            num_features = 3 if self.is_image else 1
            leading, features = rows.shape[: rows.ndim - num_features], rows.shape[rows.ndim - num_features :]
            rows = rows.reshape(-1, *features)
            late, rows = rows[..., : self.num_late], rows[..., self.num_late :]  # nothing and all, for most models
            if self.is_image:
                rows = CNN(activation=self.activation, layer_norm=self.layer_norm, kernel_init=self.kernel_init)(rows)
            if self.entities is not None:
                attended = self.entities(rows)
                rows = attended.own
            rows = torso(rows)
        if self.cell is not None:
            carry, rows = self._unroll(carry, rows, first, leading)
        rows = jnp.concatenate([late, rows], axis=-1) if late is not None and self.num_late else rows
        read = rows if self.entities is None else attended.replace(own=rows)
        outputs = tuple(jax.tree.map(lambda y: y.reshape(*leading, -1), output(read)) for output in self.outputs)
        return carry, outputs if len(outputs) > 1 else outputs[0]

    def _unroll(self, carry, x, first, leading):
        length, *batch_shape = leading
        first = jnp.broadcast_to(first.reshape(first.shape + (1,) * (len(leading) - 2)), leading)
        rows = jax.tree.map(lambda c: c.reshape(-1, c.shape[-1]), carry)
        cell = CELLS[str(self.cell)](self.cell_size, **self.cell_options, name=self.cell)
        rows, x = cell(rows, x.reshape(length, -1, x.shape[-1]), first.reshape(length, -1))
        carry = jax.tree.map(lambda c: c.reshape(*batch_shape, c.shape[-1]), rows)
        return carry, x.reshape(-1, x.shape[-1])
