"""Attention over the entities of a view: networks for any number of allies and enemies.

A view is the agent's own features and lists of entities, as `EnvSpec.entities` says. A layer for each kind embeds them,
and blocks of a transformer's encoder let the agent and its entities attend to each other:

    x_0 = relu(W_own o_own),   x_i = relu(W_kind(i) o_i),   z = blocks(x_0, .., x_n),   seen entities attended to.

What follows reads z_0. An action that is done to an entity, such as an attack, is scored by that entity's own z_i and
what follows of the agent, all others by the agent's alone. So no parameter depends on the number of entities, no order
in which they are listed changes what the agent does, and an entity that is not seen is as if it were not listed.

Embedding by kind and masked self-attention over entities are those of Baker et al., who pool over entities where this
reads the agent's own row, as Iqbal et al. do; scores of actions by the entities that they are done to are the action
groups of Hu et al. Neither the imagined groups of Iqbal et al. nor a memory among the rows, as Hu et al. have it, are
here: memory is that of `recurrent=True`, behind the attention.

References:
  Vaswani et al., 2017, Attention Is All You Need, sec. 3 (https://arxiv.org/abs/1706.03762).
  Baker et al., 2020, Emergent Tool Use From Multi-Agent Autocurricula (https://arxiv.org/abs/1909.07528).
  Hu et al., 2021, UPDeT: Universal Multi-Agent RL via Policy Decoupling with Transformers
    (https://arxiv.org/abs/2101.08001).
  Iqbal et al., 2021, Randomized Entity-wise Factorization for Multi-Agent RL (https://arxiv.org/abs/2006.04222).
"""

from collections.abc import Sequence

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jmarl.networks.attention import EncoderBlock
from jmarl.networks.torsos import MLP, Attended, Output
from jmarl.types import Entities, EntityLayout, EnvSpec

__all__ = ["EntityOutput", "EntityTorso", "entities_of", "layout_of", "present_features", "target_actions"]


def entities_of(
    view: Float[Array, "*batch F"], kind: Entities
) -> tuple[Float[Array, "*batch K D"], Bool[Array, "*batch K"]]:
    """The features of each entity of a kind, 0 where it is not seen, and which are seen.

    >>> enemies = Entities("enemies", num=2, blocks=((1, 2),), present=0)
    >>> features, is_seen = entities_of(jnp.array([9.0, 1.0, 2.0, 0.0, 7.0]), enemies)
    >>> features, is_seen
    (Array([[1., 2.],
           [0., 0.]], dtype=float32), Array([ True, False], dtype=bool))
    """
    rows = [
        view[..., start : start + kind.num * width].reshape(*view.shape[:-1], kind.num, width)
        for start, width in kind.blocks
    ]
    features = jnp.concatenate(rows, axis=-1)
    if kind.present is None:
        return features, jnp.ones(features.shape[:-1], bool)
    is_seen = features[..., kind.present] > 0
    # Chosen, not multiplied: whatever stands in an empty place, NaN too, reaches neither value nor gradient.
    return jnp.where(is_seen[..., None], features, 0.0), is_seen


def target_actions(layout: EntityLayout) -> tuple[int, ...]:
    """The actions that are done to entities, in the order of the entities.

    >>> target_actions(EntityLayout(own=((0, 1),), kinds=(Entities("enemies", 2, ((1, 2),), first_action=5),)))
    (5, 6)
    """
    kinds = [(kind.first_action, kind.num) for kind in layout.kinds if kind.first_action is not None]
    return tuple(action + i for action, num in kinds for i in range(num))


def present_features(layout: EntityLayout) -> tuple[int, ...]:
    """The features that say which entities are seen: whatever changes views must leave them above 0, or not.

    >>> present_features(EntityLayout(own=((0, 1),), kinds=(Entities("enemies", 2, ((1, 2), (5, 1)), present=2),)))
    (5, 6)
    """
    found = []
    for kind in layout.kinds:
        before = 0
        for start, width in kind.blocks:
            if kind.present is not None and before <= kind.present < before + width:
                found += [start + i * width + kind.present - before for i in range(kind.num)]
            before += width
    return tuple(found)


def layout_of(spec: EnvSpec) -> EntityLayout:
    """`spec.entities`, refused where there is none, or where it names features or actions that are not there."""
    layout = spec.entities
    if layout is None:
        raise ValueError(
            f"torso='entities' reads lists of entities, and {spec.name} does not say where its views hold them: its "
            f"spec.entities is None; leave torso out, or give the spec a jmarl.types.EntityLayout."
        )
    room = min(spec.obs_sizes or spec.obs_shape[-1:])
    ends = [start + width for start, width in layout.own]
    ends += [start + kind.num * width for kind in layout.kinds for start, width in kind.blocks]
    if len(spec.obs_shape) != 1 or max(ends, default=0) > room:
        raise ValueError(
            f"{spec.name}: spec.entities names features up to {max(ends, default=0)}, and views have the shape "
            f"{spec.obs_shape}, the narrowest with {room} features: each block (start, width) must lie in all of them."
        )
    for kind in layout.kinds:
        width = sum(width for _, width in kind.blocks)
        if kind.present is not None and not 0 <= kind.present < width:
            raise ValueError(
                f"{spec.name}: spec.entities says present={kind.present} of {kind.name}, and they have {width} "
                f"features: name one of them by its number, or None where all are always seen."
            )
    targets, num_actions = target_actions(layout), min(spec.action_sizes or (spec.num_actions or 0,))
    if len(set(targets)) < len(targets) or any(not 0 <= action < num_actions for action in targets):
        raise ValueError(
            f"{spec.name}: spec.entities says that the actions {list(targets)} are done to entities: these must be "
            f"different ones of the {num_actions} discrete actions that every agent has; first_action=None for none."
        )
    return layout


class EntityTorso(nn.Module):
    """A view read as entities: `[R, F] -> Attended`.

    Attributes:
      layout: of the views.
      size: E, width of what attends.
      num_heads: of each attention.
      num_blocks: of attention; none leaves each with what it is alone.
      kernel_init: a key of `INITIALIZERS`, for the embeddings.
    """

    layout: EntityLayout
    size: int = 64
    num_heads: int = 4
    num_blocks: int = 1
    kernel_init: str = "orthogonal"

    @nn.compact
    def __call__(self, view: Float[Array, "R F"]) -> Attended:
        own = jnp.concatenate([view[:, start : start + width] for start, width in self.layout.own], axis=-1)
        rows, seen, places = [self._embedding("own")(own)[:, None]], [jnp.ones((len(view), 1), bool)], {}
        for kind in self.layout.kinds:
            features, is_seen = entities_of(view, kind)
            places[kind.name] = sum(x.shape[1] for x in rows)
            rows.append(self._embedding(kind.name)(features))
            seen.append(is_seen)
        x, is_seen = jnp.concatenate(rows, axis=1), jnp.concatenate(seen, axis=1)
        targets = [(places[kind.name], kind.num) for kind in self.layout.kinds if kind.first_action is not None]

        def read(x: Array) -> Array:
            """The agent, and whom its actions are done to."""
            return jnp.concatenate([x[:, :1], *[x[:, start : start + num] for start, num in targets]], axis=1)

        for i in range(self.num_blocks):
            source = x
            if i == self.num_blocks - 1:
                x = read(x)  # nobody looks at the others any more
            block = EncoderBlock(self.size, self.num_heads, name=f"block_{i}")
            x = block(x, jnp.broadcast_to(is_seen[:, None], (*x.shape[:2], source.shape[1])), source)
        if not self.num_blocks:
            x = read(x)
        return Attended(own=x[:, 0], targets=x[:, 1:])

    def _embedding(self, name: str) -> nn.Module:
        return MLP((self.size,), "relu", kernel_init=self.kernel_init, name=f"embed_{name}")


class EntityOutput(nn.Module):
    """`networks.Output` of what `EntityTorso` attended to: `Attended -> [R, size]`.

    As many outputs as there are actions are those of the actions: one that is done to an entity reads the entity, and
    the agent beside it, in a layer at least. All other outputs read the agent alone.

    Attributes:
      size: number of outputs.
      targets: the actions that are done to entities, in the order of `Attended.targets`.
      num_actions: of the environment; None for continuous ones.
      hidden_sizes, activation, layer_norm, kernel_init, scale: as of `Output`.
    """

    size: int
    targets: Sequence[int]
    num_actions: int | None
    hidden_sizes: Sequence[int] = ()
    activation: str = "tanh"
    layer_norm: bool = False
    kernel_init: str = "orthogonal"
    scale: float = 1.0

    @nn.compact
    def __call__(self, x: Attended) -> Float[Array, "R A"]:
        if self.size != self.num_actions or not self.targets:
            return self._output("own", self.size, self.hidden_sizes)(x.own)
        num_own = self.size - len(self.targets)
        own = jnp.broadcast_to(x.own[:, None], (*x.targets.shape[:2], x.own.shape[-1]))
        pairs = jnp.concatenate([x.targets, own], axis=-1)
        # With no layer in between, what the agent remembers could not tell one entity from another.
        scores = self._output("targets", 1, self.hidden_sizes or (x.targets.shape[-1],))(pairs)[..., 0]
        rest = [self._output("own", num_own, self.hidden_sizes)(x.own)] if num_own else []
        others = [action for action in range(self.size) if action not in self.targets]
        return jnp.concatenate([*rest, scores], axis=-1)[:, np.argsort([*others, *self.targets])]

    def _output(self, name: str, size: int, hidden_sizes: Sequence[int]) -> Output:
        return Output(size, hidden_sizes, self.activation, self.layer_norm, self.kernel_init, self.scale, name=name)
