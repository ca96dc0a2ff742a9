"""Mixers: one value of a team from the values of its agents' actions."""

import math
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jmarl import losses, masks
from jmarl.networks.initializers import draw_at_once, lecun
from jmarl.types import EnvSpec, Mixer, Network, Observation, as_floats


class Hypernetwork(nn.Module):
    """From the state to weights of another network: dense layers with ReLU and a linear output.

    Attributes:
      size: of the output.
      hidden_sizes: widths between; () for one linear layer.
      scale: of the output kernel's initial variance.
    """

    size: int
    hidden_sizes: Sequence[int] = ()
    scale: float = 1.0

    @nn.compact
    def __call__(self, x: Float[Array, "*batch S"]) -> Float[Array, "*batch F"]:
        for width in self.hidden_sizes:
            x = nn.relu(nn.Dense(width, kernel_init=lecun())(x))
        return nn.Dense(self.size, kernel_init=lecun(math.sqrt(self.scale)))(x)


class QMIX(nn.Module):
    """Monotonic mixing: `ELU(q |W₁(s)| + b₁(s)) |w₂(s)| + b₂(s)`, so dQ_tot/dqᵢ >= 0.

    Attributes:
      embed_size: width of the mixing layer.
      hypernet_sizes: hidden widths of the hypernetworks of W₁ and w₂; () for linear ones.
      bias_size: hidden width of b₂'s.
      scale: variance of the hypernetworks' output kernels. Small, so that Q_tot starts near 0: at 1, training is worse.
      is_monotonic: False for weights of either sign, W₁(s) and w₂(s), as in FACMAC without the constraint.

    References:
      Rashid et al., 2018, QMIX, sec. 4 and fig. 2 (https://arxiv.org/abs/1803.11485).
    """

    embed_size: int = 32
    hypernet_sizes: Sequence[int] = (64,)
    bias_size: int = 32
    scale: float = 0.01
    is_monotonic: bool = True

    @nn.compact
    def __call__(self, q: Float[Array, "*batch N"], state: Float[Array, "*batch S"]) -> Float[Array, "*batch"]:
        def weights(size, name, hidden_sizes=()):
            return Hypernetwork(size, hidden_sizes, self.scale, name=name)(state)

        signed = jnp.abs if self.is_monotonic else lambda x: x
        w1 = signed(weights(q.shape[-1] * self.embed_size, "hyper_w1", self.hypernet_sizes))
        w2 = signed(weights(self.embed_size, "hyper_w2", self.hypernet_sizes))
        b1, b2 = weights(self.embed_size, "hyper_b1"), weights(1, "hyper_b2", (self.bias_size,))
        w1 = w1.reshape(*q.shape, self.embed_size)
        # A sum of products: N is small, and a batch of tiny matrix products is slow everywhere.
        hidden = nn.elu(jnp.sum(q[..., None] * w1, axis=-2) + b1)
        return jnp.sum(hidden * w2, axis=-1) + b2[..., 0]


class Central(nn.Module):
    """Unrestricted mixing, for the central value of weighted QMIX: `f(q, s) + v(s)`, any function of the values.

    Attributes:
      hidden_sizes: widths of f.
      bias_size: hidden width of v.

    References:
      Rashid et al., 2020, Weighted QMIX (https://arxiv.org/abs/2006.10800).
    """

    hidden_sizes: Sequence[int] = (64, 64, 64)
    bias_size: int = 64

    @nn.compact
    def __call__(self, q: Float[Array, "*batch N"], state: Float[Array, "*batch S"]) -> Float[Array, "*batch"]:
        value = Hypernetwork(1, self.hidden_sizes, name="net")(jnp.concatenate([q, state], axis=-1))
        return (value + Hypernetwork(1, (self.bias_size,), name="v")(state))[..., 0]


class Joint(nn.Module):
    """Any function of the agents' features and the state: a network over all of them together.

    Attributes:
      hidden_sizes: widths of its layers.
    """

    hidden_sizes: Sequence[int] = (64, 64)

    @nn.compact
    def __call__(self, features: Float[Array, "*batch F"], state: Float[Array, "*batch S"]) -> Float[Array, "*batch"]:
        return Hypernetwork(1, self.hidden_sizes, name="net")(jnp.concatenate([features, state], axis=-1))[..., 0]


class QPLEX(nn.Module):
    """Duplex dueling: `Q_tot = Σᵢ wᵢ(s) Vᵢ + bᵢ(s) + λᵢ(s, u) wᵢ(s) Aᵢ`, with `Vᵢ = max qᵢ` and `Aᵢ = qᵢ - Vᵢ <= 0`.

    w and λ are positive, so a joint action is the best where each agent's own is, and any value function with that
    property can be represented: λ reads what everyone does. It is attention with several heads,
    `λᵢ(s, u) = Σ_k σ(λᵢₖ(s, u)) σ(φᵢₖ(s)) |υ_k(s)|`.

    Attributes:
      num_heads: of the attention.
      hypernet_sizes: hidden widths of the networks of w and b; () for linear ones.
      attention_sizes: hidden widths of the networks of λ, φ and υ; () for linear ones.
      scale: variance of all their output kernels.
      advantage_gradient: λ - 1 passes gradients on to the advantages. The paper stops them, which steadies the maximum.

    References:
      Wang et al., 2021, QPLEX: Duplex Dueling Multi-Agent Q-Learning, eq. 8 to 14 (https://arxiv.org/abs/2008.01062).
    """

    num_heads: int = 10
    hypernet_sizes: Sequence[int] = (64,)
    attention_sizes: Sequence[int] = (64, 64)
    scale: float = 1.0
    advantage_gradient: bool = False

    @nn.compact
    def __call__(
        self,
        value: Float[Array, "*batch N"],
        advantage: Float[Array, "*batch N"],
        action: Float[Array, "*batch F"],
        state: Float[Array, "*batch S"],
    ) -> Float[Array, "*batch"]:
        num_agents = value.shape[-1]

        def weights(size, name, sizes, x=state):
            return Hypernetwork(size, sizes, self.scale, name=name)(x)

        def heads(name, x):
            size = self.num_heads * num_agents
            return jax.nn.sigmoid(weights(size, name, self.attention_sizes, x)).reshape(*value.shape, self.num_heads)

        # Never exactly 0: where an agent's own maximum is the only one, so is the team's.
        w = jnp.abs(weights(num_agents, "hyper_w", self.hypernet_sizes)) + 1e-10
        b = weights(num_agents, "hyper_b", self.hypernet_sizes)
        key = jnp.abs(weights(self.num_heads, "hyper_key", self.attention_sizes)) + 1e-10
        of_action = heads("hyper_action", jnp.concatenate([state, action], axis=-1))
        importance = jnp.sum(of_action * heads("hyper_agent", state) * key[..., None, :], axis=-1)
        value, advantage = w * value + b, w * advantage
        rest = advantage if self.advantage_gradient else jax.lax.stop_gradient(advantage)
        return jnp.sum(value + advantage + (importance - 1) * rest, axis=-1)


def vdn() -> Mixer:
    """The sum over those who act, without parameters.

    References:
      Sunehag et al., 2018, Value-Decomposition Networks (https://arxiv.org/abs/1706.05296).
    """
    return Mixer(lambda key: {}, lambda params, q, action, obs: jnp.sum(_taken(q, action, obs), axis=-1))


def mixer(module: nn.Module, spec: EnvSpec) -> Mixer:
    """A flax module of the taken actions' values and the state, `(q [.., N], state [.., S]) -> [..]`, as a mixer.

    Who does not act has the value 0; images are read as vectors.

    >>> import jax
    >>> from jmarl import envs
    >>> from jmarl.types import zero_observation
    >>> spec = envs.matrix_game([[8.0, -12.0], [-12.0, 0.0]]).spec
    >>> mix, obs = mixer(QMIX(embed_size=4), spec), zero_observation(spec, (5, 7))
    >>> mix.apply(mix.init(jax.random.key(0)), jnp.ones((5, 7, 2, 2)), jnp.zeros((5, 7, 2), int), obs).shape
    (5, 7)
    """
    state_size = _state_size(module, spec)

    def init(key):
        params = module.init(key, jnp.zeros((1, spec.num_agents)), jnp.zeros((1, state_size)))["params"]
        return draw_at_once(params, key)

    def apply(params, q, action, obs):
        taken = _taken(q, action, obs)
        # One batch axis: a module over [L, M, ..] may take four times as long on a CPU.
        flat = taken.reshape(-1, spec.num_agents), as_floats(obs.state).reshape(-1, state_size)
        value: Any = module.apply({"params": params}, *flat)
        return value.reshape(taken.shape[:-1])

    return Mixer(init, apply)


def mixed(net: Network, mixer: Mixer) -> Network:
    """A network of agents' values, as that of the team's value which a mixer makes of them, the same for each agent.

    Where nobody acts, the values of all are mixed: the team waits, and its return goes on.

    Args:
      net: from observations, or a tuple that begins with them, to values, or a tuple that ends with them.
      mixer: reads them as those of one action each.

    Returns:
      The network. Its parameters are {"agents": of `net`, "mixer": of `mixer`}.
    """

    def init(key):
        return {"agents": net.init(key), "mixer": mixer.init(jax.random.fold_in(key, 1))}

    def apply(params, carry, x, first):
        carry, out = net.apply(params["agents"], carry, x, first)
        *rest, value = out if isinstance(out, tuple) else (out,)
        obs = x[0] if isinstance(x, tuple) else x
        obs = masks.speaking(obs, jnp.ones_like(obs.agent_mask))
        q, only = value.reshape(*obs.agent_mask.shape, 1), jnp.zeros(obs.agent_mask.shape, jnp.int32)
        total = mixer.apply(params["mixer"], q, only, obs)[..., None]
        total = jnp.broadcast_to(total, only.shape).reshape(value.shape)
        return carry, (*rest, total) if rest else total

    return net._replace(init=init, apply=apply)


def duplex(module: QPLEX, spec: EnvSpec) -> Mixer:
    """QPLEX as a mixer, which reads the best legal action of each agent beside the one taken.

    Who does not act has the value 0 and no action.

    >>> import jax
    >>> from jmarl import envs
    >>> from jmarl.types import zero_observation
    >>> spec = envs.matrix_game([[8.0, -12.0], [-12.0, 0.0]]).spec
    >>> mix, obs = duplex(QPLEX(num_heads=2), spec), zero_observation(spec, (5, 7))
    >>> mix.apply(mix.init(jax.random.key(0)), jnp.ones((5, 7, 2, 2)), jnp.zeros((5, 7, 2), int), obs).shape
    (5, 7)
    """
    state_size, num_agents, num_actions = _state_size(module, spec), spec.num_agents, spec.num_actions or 0

    def init(key):
        own, action, state = (jnp.zeros((1, size)) for size in (num_agents, num_agents * num_actions, state_size))
        return draw_at_once(module.init(key, own, own, action, state)["params"], key)

    def apply(params, q, action, obs):
        value = losses.select(q, losses.masked_argmax(q, obs.action_mask)) * obs.agent_mask
        taken = jax.nn.one_hot(action, num_actions, dtype=q.dtype) * obs.agent_mask[..., None]
        own = [x.reshape(-1, num_agents) for x in (value, _taken(q, action, obs) - value)]
        rest = taken.reshape(-1, num_agents * num_actions), as_floats(obs.state).reshape(-1, state_size)
        total: Any = module.apply({"params": params}, *own, *rest)
        return total.reshape(value.shape[:-1])

    return Mixer(init, apply)


def joint(module: Joint, spec: EnvSpec, *, reads_actions: bool = True) -> Mixer:
    """A value of the joint action, or with `reads_actions=False` of the state alone, beside all values of each agent.

    Who does not act has the values 0 and no action.

    >>> import jax
    >>> from jmarl import envs
    >>> from jmarl.types import zero_observation
    >>> spec = envs.matrix_game([[8.0, -12.0], [-12.0, 0.0]]).spec
    >>> mix, obs = joint(Joint((8,)), spec), zero_observation(spec, (5, 7))
    >>> mix.apply(mix.init(jax.random.key(0)), jnp.ones((5, 7, 2, 2)), jnp.zeros((5, 7, 2), int), obs).shape
    (5, 7)
    """
    state_size, num_agents, num_actions = _state_size(module, spec), spec.num_agents, spec.num_actions or 0
    size = (1 + reads_actions) * num_agents * num_actions

    def init(key):
        return draw_at_once(module.init(key, jnp.zeros((1, size)), jnp.zeros((1, state_size)))["params"], key)

    def apply(params, q, action, obs):
        read = [q, jax.nn.one_hot(action, num_actions, dtype=q.dtype)] if reads_actions else [q]
        features = jnp.concatenate(read, axis=-1) * obs.agent_mask[..., None]
        flat = features.reshape(-1, size), as_floats(obs.state).reshape(-1, state_size)
        value: Any = module.apply({"params": params}, *flat)
        return value.reshape(q.shape[:-2])

    return Mixer(init, apply)


def _state_size(module: nn.Module, spec: EnvSpec) -> int:
    size = math.prod(spec.state_shape)
    if size == 0:
        raise ValueError(
            f"{type(module).__name__} mixes with the global state, but {spec.name} has state_shape={spec.state_shape}: "
            f"give it a state, such as all views concatenated, or use vdn."
        )
    return size


def _taken(q: Array, action: Array, obs: Observation) -> Array:
    """The value of what each agent does, 0 for those who do not act."""
    return losses.select(q, action) * obs.agent_mask
