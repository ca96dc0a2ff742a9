"""From a flax module to a `Network`, and how agents share one: `shared`, `per_agent`, `per_group`.

Learners never branch on sharing: they see one `Network` whose input and output have an agent axis.
"""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jmarl.networks.initializers import draw_at_once
from jmarl.networks.recurrent import CELLS
from jmarl.networks.torsos import Joined
from jmarl.types import Network

SHARING = ("shared", "per_agent", "per_group")


def network(model: nn.Module, input_shape: tuple[int, ...]) -> Network:
    """A `Network` of one flax module `(carry, x, first) -> (carry, out)`, for inputs `[L, M, .., *input_shape]`.

    >>> from jmarl import networks
    >>> model = networks.Model(hidden_sizes=(8,), outputs=(networks.Output(2),), cell="gru", cell_size=4)
    >>> net = networks.network(model, (3,))
    >>> params = net.init(jax.random.key(0))
    >>> x, first = jnp.ones((5, 7, 3)), jnp.zeros((5, 7), bool)
    >>> carry, out = net.apply(params, net.init_carry((7,)), x, first)
    >>> carry.shape, out.shape
    ((7, 4), (5, 7, 2))
    """

    def init_carry(batch_shape):
        cell = getattr(model, "cell", None)
        return (
            ()
            if cell is None
            else CELLS[cell].init_carry(batch_shape, model.cell_size, **getattr(model, "cell_options", {}))
        )

    def init(key):
        x = jnp.zeros((1, 1, *input_shape))
        return draw_at_once(model.init(key, init_carry((1,)), x, jnp.ones((1, 1), bool))["params"], key)

    def apply(params, carry, x, first):
        return model.apply({"params": params}, carry, x, first)

    return Network(init, apply, init_carry)


def one_step(net: Network):
    """`(params, carry, x, first) -> (carry, out)` of single time steps: `net.apply` without the time axis."""

    def apply(params, carry, x, first):
        sequence, starts = jax.tree.map(lambda leaf: leaf[None], (x, first))
        carry, out = net.apply(params, carry, sequence, starts)
        return carry, jax.tree.map(lambda leaf: leaf[0], out)

    return apply


def shared(net: Network, num_agents: int) -> Network:
    """All agents use the same parameters; the agent axis is batch: `x [L, M, N, F]`, carry `[M, N, ..]`."""
    return net._replace(init_carry=lambda batch_shape: net.init_carry((*batch_shape, num_agents)))


def per_agent(net: Network, num_agents: int) -> Network:
    """Each agent has its own parameters, stacked along a leading axis N; one `vmap` over the agent axis."""
    mapped = jax.vmap(net.apply, in_axes=(0, 1, 2, None), out_axes=(1, 2))

    def apply(params, carry, x, first):
        return mapped(params, carry, x.joined(num_agents) if isinstance(x, Joined) else x, first)

    return Network(
        init=lambda key: jax.vmap(net.init)(jax.random.split(key, num_agents)),
        apply=apply,
        init_carry=shared(net, num_agents).init_carry,
    )


def per_group(nets: Sequence[Network], groups: Sequence[int], input_sizes: Sequence[int]) -> Network:
    """Agents of one group share parameters; each group sees its true width.

    Args:
      nets: one network for each group.
      groups: the group of each agent, e.g. (0, 0, 0, 1).
      input_sizes: features that each group's network reads; the padding beyond them is cut off.

    Returns:
      A network over all agents. Outputs are padded with zeros to the widest group's.
    """
    if sorted(set(groups)) != list(range(len(nets))):
        raise ValueError(f"groups={tuple(groups)} must name each of the {len(nets)} networks, from 0 on.")
    members = [np.flatnonzero(np.asarray(groups) == g) for g in range(len(nets))]
    # Concatenating the groups and reading back in agent order is one gather of a static index.
    order = np.argsort(np.concatenate(members))
    nets = [shared(net, len(index)) for net, index in zip(nets, members, strict=True)]

    def init(key):
        keys = jax.random.split(key, len(nets))
        return {f"group_{g}": net.init(k) for g, (net, k) in enumerate(zip(nets, keys, strict=True))}

    def apply(params, carry, x, first):
        carries, outs = [], []
        for g, (net, index, size) in enumerate(zip(nets, members, input_sizes, strict=True)):
            read = x.of_agents(index) if isinstance(x, Joined) else x[:, :, index, ..., :size]
            group_carry, out = net.apply(params[f"group_{g}"], carry[g], read, first)
            carries.append(group_carry)
            outs.append(out)
        return tuple(carries), jax.tree.map(lambda *leaves: _join(leaves, order), *outs)

    def init_carry(batch_shape):
        return tuple(net.init_carry(batch_shape) for net in nets)

    return Network(init, apply, init_carry)


def _join(leaves, order):
    width = max(leaf.shape[-1] for leaf in leaves)
    pad = lambda leaf: jnp.pad(leaf, [(0, 0)] * (leaf.ndim - 1) + [(0, width - leaf.shape[-1])])  # noqa: E731
    return jnp.concatenate([pad(leaf) for leaf in leaves], axis=2)[:, :, order]


def ensemble(net: Network, num: int) -> Network:
    """`num` networks of the same form, each with parameters and memory of its own; outputs gain a leading axis."""

    def apply(params, carry, x, first):
        # Not a `vmap`: products in batches are slow on a CPU, and there are two critics, seldom more.
        carry, out = zip(*[net.apply(p, c, x, first) for p, c in zip(params, carry, strict=True)], strict=True)
        return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *out)

    return Network(
        init=lambda key: tuple(net.init(k) for k in jax.random.split(key, num)),
        apply=apply,
        init_carry=lambda batch_shape: (net.init_carry(batch_shape),) * num,
        batch_axis=net.batch_axis + 1,
    )


def share(
    sharing: str,
    build,
    *,
    input_shapes: Sequence[tuple[int, ...]],
    output_sizes: Sequence[int],
    kinds: Sequence[Any] | None = None,
) -> Network:
    """The network that a config's `sharing` asks for.

    Args:
      sharing: one of `SHARING`.
      build: `(output_size) -> Model`.
      input_shapes: of each agent, before padding.
      output_sizes: of each agent, before padding.
      kinds: agents of one kind are a group; by default those of equal input and output sizes.
    """
    num_agents, sizes = len(input_shapes), list(zip(input_shapes, output_sizes, strict=True))
    widest = (*input_shapes[0][:-1], max(shape[-1] for shape in input_shapes))
    if sharing == "shared":
        return shared(network(build(max(output_sizes)), widest), num_agents)
    if sharing == "per_agent":
        return per_agent(network(build(max(output_sizes)), widest), num_agents)
    groups = groups_of(sizes if kinds is None else kinds)
    firsts = [groups.index(g) for g in range(max(groups) + 1)]  # the first agent of each group
    nets = [network(build(output_sizes[i]), input_shapes[i]) for i in firsts]
    return per_group(nets, groups, [input_shapes[i][-1] for i in firsts])


def groups_of(kinds: Sequence[Any]) -> tuple[int, ...]:
    """The group of each agent: those of one kind are one, in the order in which kinds appear.

    >>> groups_of(["cat", "dog", "cat"])
    (0, 1, 0)
    """
    known = list(dict.fromkeys(kinds))
    return tuple(known.index(kind) for kind in kinds)
