"""Q-learning for many agents: IQL, VDN and QMIX, which are one loss and three mixers.

    L(θ) = mean( (Q(s, u) - y)² ),   y = r + γ Q⁻(s', argmax_u' Q(s', u')),

with Q⁻ the target network. IQL has a value and a reward for each agent; VDN and QMIX mix the agents' values into the
value Q_tot of the team: by their sum, or monotonically with weights made from the state. Either way each agent's own
greedy actions form the greedy joint action. With one agent, IQL is double DQN.

References:
  van Hasselt et al., 2016, Deep Reinforcement Learning with Double Q-learning (https://arxiv.org/abs/1509.06461).
  Tan, 1993, Multi-Agent Reinforcement Learning: Independent vs. Cooperative Agents.
  Sunehag et al., 2018, Value-Decomposition Networks (https://arxiv.org/abs/1706.05296).
  Rashid et al., 2018, QMIX (https://arxiv.org/abs/1803.11485).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array

from jmarl import exploration, losses, networks, normalize, optim, parallel
from jmarl.learners import checks, replayed
from jmarl.networks import actor_critic, mixers
from jmarl.networks.mixers import Mixer
from jmarl.types import EnvSpec, Learner, Metrics, Network, Numeric, Params, TrainState, Trajectory, static


@struct.dataclass(kw_only=True)
class QConfig:
    """Hyperparameters of IQL, VDN and QMIX."""

    learning_rate: Numeric = 5e-4  # Adam step size
    learning_rate_end: Numeric = 0.0  # of schedules, as a fraction of learning_rate
    learning_rate_schedule: str = static("constant")  # constant, linear or exponential, in optimiser steps
    horizon: Numeric | None = None  # calls of update until schedules end; None: make_train and run fill it in
    adam_eps: Numeric = 1e-5  # added to Adam's denominator
    max_grad_norm: Numeric | None = 10.0  # global norm to which gradients are clipped; None: never
    gamma: Numeric = 0.99  # discount
    returns: str = static("td")  # targets: td (one step), or over sequences peng or harutyunyan, both Q(lambda)
    lambda_: Numeric = 0.8  # of peng and harutyunyan; 0 is td
    double_q: bool = static(True)  # the online network chooses the next action, the target network values it
    target_update_interval: int = static(200)  # optimiser steps between two updates of the target network
    tau: Numeric = 1.0  # share of the online network in such an update: 1 copies it
    huber_delta: Numeric | None = None  # where the loss turns linear; None: squared error
    team_reward: str | None = static(None)  # sum, mean or individual (IQL only); None: sum, for IQL individual
    epsilon_start: Numeric = 1.0  # share of random actions at the start
    epsilon_end: Numeric = 0.05  # at the end of the decay, and ever after
    epsilon_steps: Numeric = 50_000  # environment steps (of one seed) from start to end
    epsilon_schedule: str = static("linear")  # linear, exponential or constant
    standardize_reward: bool = static(False)  # rewards less their running mean, over their deviation
    standardize_return: bool = static(False)  # networks predict standardised returns
    standardize_beta: Numeric = 0.99  # weight of the past in those running moments
    burn_in: int = static(0)  # first steps that only warm up the memory, of sequences that start inside an episode
    recurrent: bool = static(False)  # recurrent agents, trained on sequences
    cell: str = static("gru")  # gru or lstm
    cell_size: int = static(64)  # width of the recurrent state
    hidden_sizes: tuple[int, ...] = static((64, 64))  # layers before the output; before the cell if recurrent
    head_sizes: tuple[int, ...] = static(())  # layers between cell (or torso) and output
    activation: str = static("relu")  # tanh, relu, elu, gelu or silu
    layer_norm: bool = static(False)  # before each activation
    kernel_init: str = static("orthogonal")  # orthogonal, lecun or xavier
    sharing: str = static("shared")  # parameters: shared, per_agent or per_group (agents of equal sizes)
    mixer_embed_size: int = static(32)  # QMIX: width of the mixing layer
    mixer_hypernet_sizes: tuple[int, ...] = static((64,))  # QMIX: hidden layers of its hypernetworks
    mixer_scale: float = static(0.01)  # QMIX: variance of the hypernetworks' initial output, small to start near 0
    next_agent_mask: str = static("next")  # whose activity weighs q(s') in the mixer: next (s') or current (s)


class QNets(NamedTuple):
    """What `q_loss` needs to know of the networks.

    Attributes:
      agent: a network over observations `[L, M, ..]` whose output is a value of each action, `[L, M, N, A]`.
      mixer: from the agents' values to the team's; None for independent learners.
    """

    agent: Network
    mixer: Mixer | None


def q_loss(
    params: Params, target_params: Params, batch: Trajectory, *, nets: QNets, cfg: QConfig
) -> tuple[Array, Metrics]:
    """TD error of Q_tot, or of each agent's Q, averaged over what is neither padding nor inactive.

    Args:
      params: {"agent": of `nets.agent`, "mixer": of `nets.mixer`}.
      target_params: the same of the target network.
      batch: sequences with `next_obs`; none crosses an episode's end.
      nets: networks.
      cfg: its leaves may be tracers.

    Returns:
      A scalar and its parts; "priority" is the mean absolute error of each sequence.
    """
    loss, (metrics, _) = _q_loss(params, target_params, batch, None, nets=nets, cfg=cfg)
    return loss, metrics


def _q_loss(params, target_params, batch, stats, *, nets, cfg):
    """`q_loss` with the running moments of returns, None or updated."""
    value, target, mask, stats = values_and_targets(params, target_params, batch, stats, nets=nets, cfg=cfg)
    error = losses.value_loss(value, target, huber_delta=cfg.huber_delta)
    # An importance weight scales the error, not the count.
    loss = replayed.mean_loss(error, mask, cfg.sharing if nets.mixer is None else "shared")
    metrics = {
        "loss/td": loss,
        "value/q_taken": losses.masked_mean(value, mask > 0),
        "value/target": losses.masked_mean(target, mask > 0),
        "priority": replayed.priority(value - target, mask),
    }
    return loss, (metrics, stats)


def values_and_targets(
    params: Params,
    target_params: Params,
    batch: Trajectory,
    stats: normalize.ValueNorm | None = None,
    *,
    nets: QNets,
    cfg: QConfig,
) -> tuple[Array, Array, Array, normalize.ValueNorm | None]:
    """Q of what was done, its target y and the weight of both, `[L, M, K]`, for K = 1 team or N agents.

    Args:
      params, target_params, batch, nets, cfg: as for `q_loss`.
      stats: running moments of returns, by which values are standardised; returned updated. None: they are not.
    """
    steps: Any = batch.steps
    weight = replayed.weights(batch, cfg.burn_in)
    q, next_q = unroll(nets.agent, params["agent"], batch, cfg.burn_in)
    target_q, target_next_q = unroll(nets.agent, target_params["agent"], batch, cfg.burn_in)
    value = losses.select(q, steps.action)
    old_value = losses.select(target_q, steps.action)
    next_value = losses.next_q(next_q if cfg.double_q else target_next_q, target_next_q, steps.next_obs.action_mask)

    if nets.mixer is None:
        old_value = replayed.values_of_all(old_value, steps.obs.agent_mask, cfg.team_reward)
        next_value = replayed.values_of_all(next_value, steps.next_obs.agent_mask, cfg.team_reward)
        reward, terminated = replayed.rewards_and_ends(steps, cfg.team_reward)
        mask = weight[..., None] * steps.obs.agent_mask
    else:
        mixer = nets.mixer
        reward, terminated, mask = team(steps, weight, cfg.team_reward or "sum")

        def mix(params, q, obs, agent_mask):
            return mixer.apply(params["mixer"], q * agent_mask, obs.state)[..., None]

        value = mix(params, value, steps.obs, steps.obs.agent_mask)
        old_value = mix(target_params, old_value, steps.obs, steps.obs.agent_mask)
        next_value = mix(target_params, next_value, steps.next_obs, next_mask(steps, cfg))

    if stats is not None:
        old_value, next_value = normalize.denormalize(stats, old_value), normalize.denormalize(stats, next_value)
    target = _targets(reward, terminated, steps.last, weight, next_value, old_value, cfg)
    if stats is not None:
        stats = normalize.update(stats, target, mask > 0, cfg.standardize_beta)
        target = normalize.normalize(stats, target)
    return value, jax.lax.stop_gradient(target), mask, stats


def iql(spec: EnvSpec, cfg: QConfig, nets: QNets | None = None) -> Learner:
    """Independent Q-learning: each agent learns the value of its own actions. At one agent this is double DQN.

    Args:
      spec: of the environment.
      cfg: hyperparameters.
      nets: your own networks; by default those that `cfg` describes.
    """
    validate(spec, cfg)
    return _learner(spec, cfg, QNets(q_network(spec, cfg), None) if nets is None else nets)


def vdn(spec: EnvSpec, cfg: QConfig, nets: QNets | None = None) -> Learner:
    """Value-decomposition networks: the team's value is the sum of the agents' values. Arguments as for `iql`.

    >>> from jmarl import envs
    >>> env = envs.matrix_game([[8.0, -12.0], [-12.0, 0.0]])
    >>> sorted(vdn(env.spec, QConfig(hidden_sizes=(8,))).init(jax.random.key(0)).params)
    ['agent', 'mixer']
    """
    validate(spec, cfg, is_team=True)
    return _learner(spec, cfg, QNets(q_network(spec, cfg), mixers.vdn()) if nets is None else nets)


def qmix(spec: EnvSpec, cfg: QConfig, nets: QNets | None = None) -> Learner:
    """QMIX: the team's value grows with each agent's, by weights made from the state. Arguments as for `iql`."""
    validate(spec, cfg, is_team=True)
    return _learner(spec, cfg, QNets(q_network(spec, cfg), monotonic_mixer(spec, cfg)) if nets is None else nets)


def _learner(spec: EnvSpec, cfg: QConfig, nets: QNets) -> Learner:
    def init(key):
        key_agent, key_mixer = jax.random.split(key)
        mixer = {} if nets.mixer is None else nets.mixer.init(key_mixer)
        return {"agent": nets.agent.init(key_agent), "mixer": mixer}

    loss = functools.partial(_q_loss, nets=nets)
    return learner(cfg, nets.agent, init, loss, is_independent=nets.mixer is None)


# --------------------------------------------------------------------------- what value-decomposition learners share


def learner(cfg: Any, agent: Network, init_params: Any, loss: Any, *, is_independent: bool = False) -> Learner:
    """A Q-learner with a target network.

    Args:
      cfg: a `QConfig`.
      agent: acts epsilon-greedily with `params["agent"]`.
      init_params: `(key) -> params`.
      loss: `(params, target_params, batch, stats, *, cfg) -> (loss, (metrics, stats))`, see `_q_loss`.
      is_independent: agents with parameters of their own have optimisers of their own, as nothing mixes their values.
    """
    epsilon = optim.schedule(cfg.epsilon_schedule, cfg.epsilon_start, cfg.epsilon_end, cfg.epsilon_steps)
    learning_rate = optim.learning_rate(cfg)
    if is_independent:
        optimizer = replayed.optimizer(cfg, learning_rate)
    else:
        optimizer = optim.optimizer(learning_rate, eps=cfg.adam_eps, max_grad_norm=cfg.max_grad_norm)
    act, greedy = acting(agent, epsilon)

    def init(key):
        params = init_params(key)
        return TrainState(
            params=params,
            target_params=jax.tree.map(jnp.copy, params),  # or a donated run would be given the same buffer twice
            opt_state=optimizer.init(params),
            step=jnp.int32(0),
            env_steps=jnp.int32(0),
            extras={
                "reward": normalize.init() if cfg.standardize_reward else None,
                "return": normalize.init() if cfg.standardize_return else None,
            },
        )

    def update(state, batch, key):
        del key
        extras = state.extras
        if cfg.standardize_reward:
            steps, reward_stats = batch.steps, extras["reward"]
            mask = (replayed.weights(batch) > 0)[..., None] & steps.obs.agent_mask
            reward_stats = normalize.update(reward_stats, steps.reward, mask, cfg.standardize_beta)
            batch = batch.replace(steps=steps.replace(reward=normalize.normalize(reward_stats, steps.reward)))
            extras = {**extras, "reward": reward_stats}
        grads, (metrics, return_stats) = jax.grad(loss, has_aux=True)(
            state.params, state.target_params, batch, extras["return"], cfg=cfg
        )
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        step = state.step + 1
        metrics = {
            **metrics,
            "loss/grad_norm": optax.global_norm(grads),
            "epsilon": jnp.asarray(epsilon(state.env_steps), jnp.float32),
            "learning_rate": jnp.asarray(learning_rate(step), jnp.float32),
        }
        target_params = replayed.update_target(state.target_params, params, step, cfg.target_update_interval, cfg.tau)
        extras = {**extras, "return": return_stats}
        return state.replace(
            params=params, target_params=target_params, opt_state=opt_state, step=step, extras=extras
        ), metrics

    return Learner(init, agent.init_carry, act, greedy, update, learns_from="replay")


def acting(agent: Network, epsilon: optim.Schedule):
    """`Learner.act`, epsilon-greedy, whose extras are the carry before the step, and `Learner.greedy`."""

    step = networks.one_step(agent)

    def act(state, carry, obs, first, key):
        next_carry, q = step(state.params["agent"], carry, obs, first)
        return exploration.epsilon_greedy(key, q, obs.action_mask, epsilon(state.env_steps)), next_carry, carry

    def greedy(state, carry, obs, first):
        carry, q = step(state.params["agent"], carry, obs, first)
        return losses.masked_argmax(q, obs.action_mask), carry

    return act, greedy


def unroll(agent: Network, params: Params, batch: Trajectory, burn_in: int) -> tuple[Array, Array]:
    """Values of each step and of its true successor, `[L, M, N, A]`."""
    steps: Any = batch.steps
    carry = replayed.blank_or_recorded(agent, batch)
    if not jax.tree.leaves(carry):  # without memory, successors need no gradient
        _, q = agent.apply(params, carry, steps.obs, steps.first)
        _, next_q = agent.apply(jax.lax.stop_gradient(params), carry, steps.next_obs, steps.first)
        return q, next_q
    sequence, starts = replayed.with_successors(steps.obs, steps.next_obs, steps.first)
    q = replayed.unroll(agent, params, carry, sequence, starts, burn_in=burn_in)
    return q[:-1], q[1:]


def team(steps: Any, weight: Array, kind: str) -> tuple[Array, Array, Array]:
    """Reward, termination and weight of the team, `[L, M, 1]`: it goes on while any agent does."""
    reward = losses.team_reward(steps.reward, kind)
    return jax.tree.map(lambda x: x[..., None], (reward, jnp.all(steps.terminated, axis=-1), weight))


def next_mask(steps: Any, cfg: Any) -> Array:
    """Whose activity weighs the successors' values, `[L, M, N]`."""
    return steps.next_obs.agent_mask if cfg.next_agent_mask == "next" else steps.obs.agent_mask


def _targets(reward, terminated, last, weight, next_value, old_value, cfg):
    """y of each step, `[L, M, K]`; traces end with the episode and before padding."""
    discount = cfg.gamma * (1.0 - terminated)
    if cfg.returns == "td":
        return reward + discount * next_value
    before_padding = jnp.concatenate([(weight[:-1] > 0) & (weight[1:] == 0), jnp.ones_like(last[:1])])
    cut = jnp.broadcast_to((last | before_padding)[..., None], reward.shape)
    if cfg.returns == "peng":
        return losses.lambda_returns(reward, discount, next_value, cut, cfg.lambda_)
    return old_value + losses.gae(reward, discount, old_value, next_value, cut, cfg.lambda_)


def q_network(spec: EnvSpec, cfg: Any) -> Network:
    """The agents' network that `cfg` describes: from each one's view to a value of each action."""
    model, output = actor_critic.from_config(cfg)
    net = actor_critic.of_own_view(spec, lambda num_actions: (output(num_actions),), model, cfg.sharing)
    return parallel.split_network(net)


def monotonic_mixer(spec: EnvSpec, cfg: Any) -> Mixer:
    """The QMIX mixer that `cfg` describes."""
    module = mixers.QMIX(cfg.mixer_embed_size, cfg.mixer_hypernet_sizes, cfg.mixer_embed_size, cfg.mixer_scale)
    return mixers.mixer(module, spec)


def validate(spec: EnvSpec, cfg: Any, is_team: bool = False, **options: tuple[str, ...]) -> None:
    """Static facts, and numbers that are not tracers; `options` are those of a learner's own fields."""
    if not spec.is_discrete:
        raise ValueError(
            f"Q-learning takes the best of finitely many actions, but those of {spec.name} are continuous: use another "
            f"algorithm, or a discrete version of the environment."
        )
    shared = {
        "returns": ("td", "peng", "harutyunyan"),
        "team_reward": ("sum", "mean") if is_team else ("individual", "sum", "mean"),
        "next_agent_mask": ("next", "current"),
    }
    checks.validate(cfg, {**shared, **options})
