"""Sable's network: an encoder and a decoder over agents and time, of retention in the place of MAT's attention.

The encoder reads what all agents see, in this step and before, and says a representation z_i and a value of each. The
decoder reads the actions chosen so far, in this step and before, and asks with z_i for what agent i should do:

    π(a_t | o_{≤t}, a_{<t}) = Π_i π_i(a_{t,i} | z_{t,i}, a_{t,1}, .., a_{t,i-1}, a_{<t}).

What is remembered is the team's: a matrix of each head of each retention, and the number of the step, which retention
reads as a code. Nothing of an agent that does not act is remembered or read by others; it comes after all others in the
decoder. Its value is the mean of theirs.

Parameters do not depend on the number of agents, nor does the memory. There is no code of agents: those that are not
alike must be told apart by their views.

References:
  Mahjoub et al., 2024, Sable: a Performant, Efficient and Scalable Sequence Model for MARL, sec. 3 and fig. 2
    (https://arxiv.org/abs/2410.01706).
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jmarl.networks import retention, turns
from jmarl.networks.initializers import draw_at_once
from jmarl.networks.retention import Retention, Steps
from jmarl.networks.torsos import CNN, MLP, Output
from jmarl.types import Carry, EnvSpec, Policy, as_floats, zero_observation

__all__ = ["DecoderBlock", "EncoderBlock", "RetentiveNetwork", "autoregressive"]

Memory = dict[str, Array]  # "encoder", "among" and "across": [R, blocks, H, D, D] of each block's retention


class EncoderBlock(nn.Module):
    """Retention between all agents of a step and those before, then a layer; both are added, and normalised."""

    size: int
    num_heads: int

    def setup(self) -> None:
        self.retention = Retention(self.size, self.num_heads)
        self.layers = Output(self.size, (self.size,), "gelu")
        self.norms = [nn.RMSNorm() for _ in range(2)]

    def __call__(self, state: Array, x: Float[Array, "rows E"], steps: Steps) -> tuple[Array, Float[Array, "rows E"]]:
        state, read = self.retention(state, x, x, steps, is_causal=False)
        x = self.norms[0](x + read)
        return state, self.norms[1](x + self.layers(x))


class DecoderBlock(nn.Module):
    """Retention between actions, then from each agent's representation to them, then a layer; no one sees ahead."""

    size: int
    num_heads: int

    def setup(self) -> None:
        self.among, self.across = (Retention(self.size, self.num_heads) for _ in range(2))
        self.layers = Output(self.size, (self.size,), "gelu")
        self.norms = [nn.RMSNorm() for _ in range(3)]

    def __call__(
        self, among: Array, across: Array, x: Float[Array, "rows E"], z: Float[Array, "rows E"], steps: Steps
    ) -> tuple[Array, Array, Float[Array, "rows E"]]:
        among, read = self.among(among, x, x, steps, is_causal=True)
        x = self.norms[0](x + read)
        across, read = self.across(across, z, x, steps, is_causal=True)
        x = self.norms[1](z + read)
        return among, across, self.norms[2](x + self.layers(x))


class RetentiveNetwork(nn.Module):
    """Encoder and decoder over steps and agents. R are sequences.

    Attributes:
      output: from the decoder's features to what parametrises an agent's distribution.
      num_blocks: of the encoder, and of the decoder.
      num_heads: of each retention.
      embed_size: E, width of everything.
      is_image: views are images.
    """

    output: nn.Module
    num_blocks: int = 1
    num_heads: int = 4
    embed_size: int = 64
    is_image: bool = False

    def setup(self) -> None:
        size = self.embed_size
        self.view = CNN(size=size, activation="gelu") if self.is_image else MLP((size,), "gelu")
        self.view_norm = nn.RMSNorm()
        self.encoder = [EncoderBlock(size, self.num_heads) for _ in range(self.num_blocks)]
        self.value = Output(1, (size,), "gelu")
        self.action = MLP((size,), "gelu")
        self.action_norm = nn.RMSNorm()
        self.decoder = [DecoderBlock(size, self.num_heads) for _ in range(self.num_blocks)]

    def encode(
        self, memory: Memory, views: Float[Array, "L R N ..."], steps: Steps
    ) -> tuple[Memory, Float[Array, "L R N E"], Float[Array, "L R N"]]:
        """The encoder's memory after the last step, representations and values."""
        leading, states = steps.acts.shape, []
        x = self.view_norm(self.view(views.reshape(-1, *views.shape[3:])))
        for i, block in enumerate(self.encoder):
            state, x = block(memory["encoder"][:, i], x, steps)
            states.append(state)
        return {"encoder": jnp.stack(states, axis=1)}, x.reshape(*leading, -1), self.value(x).reshape(leading)

    def decode(
        self, memory: Memory, previous: Float[Array, "L R N F"], z: Float[Array, "L R N E"], steps: Steps
    ) -> tuple[Memory, Any]:
        """The decoder's memory after the last step, and outputs; agents stand in the order of their turns.

        One turn is a step of one agent, of which what was remembered has faded before.

        Args:
          memory: before the first step.
          previous: what was done in the turn before each; the first of a step is told by a feature of its own.
          z: the representations of those whose turns they are.
          steps: when.
        """
        leading, states = steps.acts.shape, []
        rows = z.reshape(-1, self.embed_size)
        x = self.action_norm(self.action(previous.reshape(-1, previous.shape[-1]).astype(z.dtype)))
        for i, block in enumerate(self.decoder):
            *state, x = block(memory["among"][:, i], memory["across"][:, i], x, rows, steps)
            states.append(state)
        among, across = (jnp.stack(x, axis=1) for x in zip(*states, strict=True))
        output = jax.tree.map(lambda y: y.reshape(*leading, -1), self.output(x))
        return {"among": among, "across": across}, output

    def __call__(self, memory: Memory, views: Array, previous: Array, steps: Steps) -> tuple[Any, Array]:
        """Outputs and values of all agents, in one pass, in the order of their turns."""
        _, z, value = self.encode(memory, views, steps)
        return self.decode(memory, previous, z, steps)[1], value


def empty_memory(model: RetentiveNetwork, batch_shape: tuple[int, ...]) -> Memory:
    """Of a team that has seen nothing yet."""
    size = model.embed_size // model.num_heads
    shape = (*batch_shape, model.num_blocks, model.num_heads, size, size)
    return {name: jnp.zeros(shape) for name in ("encoder", "among", "across")}


def autoregressive(
    spec: EnvSpec,
    model: RetentiveNetwork,
    distribution: Callable[[Any, Any], Any],
    decay: Float[Array, "H"],
    *,
    recurrent: bool = True,
) -> Policy:
    """The policy of a retentive network: agents choose one after the other, and the team remembers its episode.

    Acting is one scan over turns. What was done is evaluated in one pass over all steps and agents of the sequences,
    with every action known beforehand. The carry is the memory, and "step", the number of the next step.

    Args:
      spec: of the environment.
      model: the network.
      distribution: `(model's output, action_mask) -> distribution` over actions, such as `policy_output` returns.
      decay: κ of each head, see `retention.decays`.
      recurrent: False for a team that remembers nothing from step to step; its carry is ().
    """
    num_agents = spec.num_agents

    def apply(params, *args, method):
        return model.apply({"params": params}, *args, method=method)

    def init(key):
        obs = zero_observation(spec, (1, 1))
        steps = steps_of(jnp.zeros(1, jnp.int32), obs, jnp.ones((1, 1), bool))[0]
        previous = jnp.zeros((1, 1, num_agents, turns.num_features(spec) + 1))
        params = model.init(key, empty_memory(model, (1,)), as_floats(obs.agents), previous, steps)["params"]
        return draw_at_once(params, key)

    def init_carry(batch_shape) -> Carry:
        if not recurrent:
            return ()
        return {**empty_memory(model, batch_shape), "step": jnp.zeros(batch_shape, jnp.int32)}

    def remembered(carry, num_rows):
        """The memory, and the number of the next step."""
        if not recurrent:
            return empty_memory(model, (num_rows,)), jnp.zeros(num_rows, jnp.int32)
        return {name: x for name, x in carry.items() if name != "step"}, carry["step"]

    def steps_of(step, obs, first):
        position = retention.positions(step, first)
        acts = jnp.ones_like(obs.agent_mask) if spec.always_act else obs.agent_mask
        code = retention.position_code(position, model.embed_size)
        return Steps(acts=acts, first=first, code=code, decay=decay), position[-1] + 1

    def encode(params, memory, obs, steps):
        views = as_floats(obs.agents)
        if not spec.always_act:
            speaks = turns.speaks(obs.agent_mask)
            views = jnp.where(speaks.reshape(*speaks.shape, *[1] * len(spec.obs_shape)), views, 0.0)
        memory, z, value = apply(params, memory, views, steps, method="encode")
        return memory, z, turns.values(spec, obs.agent_mask, value)

    def order_of(agent_mask):
        """None if that is the order of the axis."""
        return None if spec.always_act else turns.order_of(agent_mask)

    def play(params, carry, obs, first, choose):
        """One action after the other; `choose` takes one from a distribution. Carry, actions, outputs, values."""
        memory, step = remembered(carry, len(first))
        seen = jax.tree.map(lambda x: x[None], obs)
        steps, step = steps_of(step, seen, first[None])
        encoder, z, value = encode(params, memory, seen, steps)
        order = order_of(obs.agent_mask)
        acts = turns.in_turn(steps.acts[0], order)
        # What was remembered fades once before a step, and from turn to turn no more.
        kept = jnp.where(first[:, None], 0.0, decay[None])[:, None, :, None, None]
        before = {name: (kept * memory[name]).astype(memory[name].dtype) for name in ("among", "across")}
        within = steps.replace(first=jnp.zeros_like(steps.first), decay=jnp.ones_like(decay))

        def decode(memory, previous, z, place):
            own = within.replace(acts=jax.lax.dynamic_slice_in_dim(acts, place, 1, axis=1)[None])
            memory, output = apply(params, memory, previous[None], z[None], own, method="decode")
            return memory, jax.tree.map(lambda y: y[0], output)

        decoder, action, output = turns.play(spec, decode, before, z[0], obs, order, distribution, choose)
        carry = {**encoder, **decoder, "step": step} if recurrent else ()
        return carry, action, output, value[0]

    def sample(params, carry, obs, first, key):
        choose = turns.exploring(spec, len(first), key)
        carry, action, output, value = play(params, carry, obs, first, choose)
        # Of the action as it is stored, in the same way as in the update: so that finds a ratio near 1 at first.
        log_prob = distribution(output, obs.action_mask).log_prob(action)
        return carry, action, {"log_prob": log_prob, "value": value}

    def mode(params, carry, obs, first):
        carry, action, _, _ = play(params, carry, obs, first, lambda pi: pi.mode())
        return carry, action

    def evaluate(params, carry, obs, first, action):
        shape, num_steps = first.shape, first.size
        read, done = obs, turns.features(spec, action)
        if not recurrent:  # all steps are sequences of one
            read, done = jax.tree.map(lambda x: x.reshape(1, num_steps, *x.shape[2:]), (obs, done))
            first = jnp.ones((1, num_steps), bool)
        leading = first.shape
        order = order_of(read.agent_mask.reshape(num_steps, num_agents))

        def in_turn(x):
            return turns.in_turn(x.reshape(num_steps, *x.shape[2:]), order)

        def in_time(x):
            return x.reshape(*leading, *x.shape[1:])

        memory, step = remembered(carry, leading[1])
        steps, _ = steps_of(step, read, first)
        _, z, value = encode(params, memory, read, steps)
        previous, own = in_time(turns.previous(in_turn(done))), steps.replace(acts=in_time(in_turn(steps.acts)))
        _, output = apply(params, memory, previous, in_time(in_turn(z)), own, method="decode")
        rows = jax.tree.map(lambda y: turns.by_agent(y.reshape(num_steps, *y.shape[2:]), order), output)
        pi = distribution(jax.tree.map(lambda y: y.reshape(*shape, *y.shape[1:]), rows), obs.action_mask)
        return pi.log_prob(action), pi.entropy(), value.reshape(*shape, num_agents)

    return Policy(init, init_carry, sample, mode, evaluate)
