"""A transformer over agents: an encoder of their views, and a decoder that chooses one action after the other.

The encoder attends from each agent to all that act, and says a representation z_i and a value of each. The decoder
attends to the actions chosen so far, and asks with z_i for what agent i should do after them:

    π(a | o) = Π_i π_i(a_i | z_i, a_1, .., a_{i-1}).

An agent that does not act is attended to by itself alone, and comes after all others in the decoder: so nothing of it
reaches those that act. Its value is the mean of theirs, since all of them are the team's.

Parameters do not depend on the number of agents. There is no code of places: agents that are not alike must be told
apart by their views.

References:
  Vaswani et al., 2017, Attention Is All You Need, sec. 3 (https://arxiv.org/abs/1706.03762).
  Wen et al., 2022, Multi-Agent Reinforcement Learning is a Sequence Modeling Problem, sec. 4 and fig. 2
    (https://arxiv.org/abs/2205.14953).
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jmarl.networks import turns
from jmarl.networks.attention import Attention, EncoderBlock
from jmarl.networks.initializers import draw_at_once
from jmarl.networks.torsos import CNN, MLP, Output
from jmarl.types import EnvSpec, Observation, Policy, as_floats, zero_observation

__all__ = ["DecoderBlock", "Transformer", "autoregressive", "empty_memory"]

Memory = list[dict[str, tuple[Array, Array]]]  # keys and values [R, N, E] of each block's two attentions


class DecoderBlock(nn.Module):
    """Attention between actions, then from each agent's representation to them, then a layer; no one sees ahead."""

    size: int
    num_heads: int

    def setup(self) -> None:
        self.among, self.across = (Attention(self.size, self.num_heads) for _ in range(2))
        self.layers = Output(self.size, (self.size,), "gelu")
        self.norms = [nn.LayerNorm() for _ in range(3)]

    def __call__(
        self, memory: dict[str, tuple[Array, Array]], x: Float[Array, "R K E"], z: Float[Array, "R K E"], place: Any
    ) -> tuple[dict[str, tuple[Array, Array]], Float[Array, "R K E"]]:
        """Of the turns `place` to `place + K - 1`, after those that `memory` has noted."""

        def noted(name, new):
            put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=place, axis=1)
            return jax.tree.map(put, memory[name], new)

        num_turns = memory["among"][0].shape[1]
        is_seen = (jnp.arange(num_turns)[None, :] <= place + jnp.arange(x.shape[1])[:, None])[None]
        among = noted("among", self.among.keys_and_values(x))
        x = self.norms[0](x + self.among.attend(x, among, is_seen))
        across = noted("across", self.across.keys_and_values(x))
        x = self.norms[1](z + self.across.attend(z, across, is_seen))
        return {"among": among, "across": across}, self.norms[2](x + self.layers(x))


class Transformer(nn.Module):
    """Encoder and decoder over agents. R are rows: steps, sequences.

    Attributes:
      output: from the decoder's features to what parametrises an agent's distribution.
      num_blocks: of the encoder, and of the decoder.
      num_heads: of each attention.
      embed_size: E, width of everything.
      is_image: views are images.
    """

    output: nn.Module
    num_blocks: int = 1
    num_heads: int = 1
    embed_size: int = 64
    is_image: bool = False

    def setup(self) -> None:
        size = self.embed_size
        self.view = CNN(size=size, activation="gelu") if self.is_image else MLP((size,), "gelu")
        self.view_norm = nn.LayerNorm()
        self.encoder = [EncoderBlock(size, self.num_heads) for _ in range(self.num_blocks)]
        self.value = Output(1, (size,), "gelu")
        self.action = MLP((size,), "gelu")
        self.action_norm = nn.LayerNorm()
        self.decoder = [DecoderBlock(size, self.num_heads) for _ in range(self.num_blocks)]

    def encode(
        self, views: Float[Array, "R N ..."], is_seen: Bool[Array, "#R N N"]
    ) -> tuple[Float[Array, "R N E"], Float[Array, "R N"]]:
        """Representations and values; `is_seen[r, i, j]`: agent i attends to agent j."""
        x = self.view_norm(self.view(views))
        for block in self.encoder:
            x = block(x, is_seen)
        return x, self.value(x)[..., 0]

    def decode(
        self, memory: Memory, previous: Float[Array, "R K F"], z: Float[Array, "R K E"], place: Any
    ) -> tuple[Memory, Any]:
        """The outputs of turns `place` to `place + K - 1`.

        Args:
          memory: of the turns before.
          previous: what was done in the turn before each; the first is told by a feature of its own.
          z: the representations of those whose turns they are.
          place: of the first of them.
        """
        x, notes = self.action_norm(self.action(previous.astype(z.dtype))), []
        for block, before in zip(self.decoder, memory, strict=True):
            after, x = block(before, x, z, place)
            notes.append(after)
        return notes, self.output(x)

    def __call__(self, views: Array, is_seen: Array, previous: Array) -> tuple[Any, Array]:
        """Outputs and values of all agents, in one pass."""
        z, value = self.encode(views, is_seen)
        return self.decode(empty_memory(self, z), previous, z, 0)[1], value


def empty_memory(model: Transformer, z: Float[Array, "R N E"]) -> Memory:
    """Of a decoder before its first turn, with a place for each turn."""
    empty = jnp.zeros_like(z)
    return [{"among": (empty, empty), "across": (empty, empty)} for _ in range(model.num_blocks)]


def autoregressive(
    spec: EnvSpec, model: Transformer, distribution: Callable[[Any, Any], Any], *, order: str = "fixed"
) -> Policy:
    """The policy of a transformer: agents choose one after the other, each knowing what those before it chose.

    Acting is one scan over turns. What was done is evaluated in one pass, with every action known beforehand.

    Args:
      spec: of the environment.
      model: the network.
      distribution: `(model's output, action_mask) -> distribution` over actions, such as `policy_output` returns.
      order: of turns: "fixed" for that of the agent axis, "random" for one that is drawn at every step while
        exploring. It is part of the carry, which is then numbers `[B, N]` by which agents are sorted.
    """
    is_random, num_agents = order == "random", spec.num_agents

    def apply(params, *args, method=None):
        return model.apply({"params": params}, *args, method=method)

    def init(key):
        obs = zero_observation(spec, (1,))
        action = jnp.zeros((1, num_agents) if spec.is_discrete else (1, num_agents, spec.action_size))
        previous = turns.previous(turns.features(spec, action.astype(jnp.int32) if spec.is_discrete else action))
        return draw_at_once(model.init(key, as_floats(obs.agents), _is_seen(spec, obs), previous)["params"], key)

    def init_carry(batch_shape):
        return jnp.zeros((*batch_shape, num_agents), jnp.float32) if is_random else ()

    def encode(params, obs):
        z, value = apply(params, as_floats(obs.agents), _is_seen(spec, obs), method="encode")
        return z, turns.values(spec, obs.agent_mask, value)

    def order_of(obs, carry):
        """None if that is the order of the axis."""
        if spec.always_act and not is_random:
            return None
        return turns.order_of(obs.agent_mask, carry if is_random else None)

    def play(params, obs, order, choose):
        """One action after the other; `choose` takes one from a distribution. Actions, outputs, values of agents."""
        z, value = encode(params, obs)
        decode = functools.partial(apply, params, method="decode")
        _, action, output = turns.play(spec, decode, empty_memory(model, z), z, obs, order, distribution, choose)
        return action, output, value

    def sample(params, carry, obs, first, key):
        key_noise, key_order = jax.random.split(key)
        choose = turns.exploring(spec, len(first), key_noise)
        action, output, value = play(params, obs, order_of(obs, carry), choose)
        # Of the action as it is stored, in the same way as in the update: so that finds a ratio of 1 at first.
        log_prob = distribution(output, obs.action_mask).log_prob(action)
        carry = jax.random.uniform(key_order, carry.shape, jnp.float32) if is_random else carry
        return carry, action, {"log_prob": log_prob, "value": value}

    def mode(params, carry, obs, first):
        rank = jnp.zeros_like(carry) if is_random else carry
        action, _, _ = play(params, obs, order_of(obs, rank), lambda pi: pi.mode())
        return carry, action

    def evaluate(params, carry, obs, first, action):
        if is_random and len(first) > 1:
            raise ValueError(
                f"order='random' is known for single steps, and these are sequences of {len(first)}: learn from steps, "
                f"or choose order='fixed'."
            )
        rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), obs)
        done = turns.features(spec, action.reshape(-1, *action.shape[2:]))
        order = order_of(rows, carry)
        z, value = encode(params, rows)
        previous, memory = turns.previous(turns.in_turn(done, order)), empty_memory(model, z)
        _, output = apply(params, memory, previous, turns.in_turn(z, order), 0, method="decode")
        output = jax.tree.map(lambda y: turns.by_agent(y, order).reshape(*first.shape, num_agents, -1), output)
        pi = distribution(output, obs.action_mask)
        return pi.log_prob(action), pi.entropy(), value.reshape(*first.shape, num_agents)

    return Policy(init, init_carry, sample, mode, evaluate)


def _is_seen(spec: EnvSpec, obs: Observation) -> Bool[Array, "R N N"]:
    """Who attends to whom: all to those that act, and each to itself."""
    itself = jnp.eye(spec.num_agents, dtype=bool)[None]
    return jnp.ones_like(itself) if spec.always_act else obs.agent_mask[:, None, :] | itself
