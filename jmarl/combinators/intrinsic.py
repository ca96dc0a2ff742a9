"""Intrinsic rewards: a bonus for what an agent could not foresee, beside what the environment pays.

    r'_t = r_t + c b_t

**ICM** learns features φ of views in which actions can be told (inverse model g) and the next ones foretold (forward
model f); its bonus is what the forward model gets wrong:

    L = mean[ (1 - β) L_I + β L_F ],   L_I = -log g(a_t | φ(o_t), φ(o_{t+1})),   L_F = ½ ‖f(φ(o_t), a_t) - φ(o_{t+1})‖²,
    b_t = η L_F.

L_I is half a squared distance for continuous actions. **RND** predicts a random function of the next view,

    L = mean[ ‖p(o_{t+1}) - q(o_{t+1})‖² / F ],   b_t = that error over the deviation of its discounted sums,

with views less their running mean, over their deviation. Where the learner within is PPO or A2C, RND's bonus is a
stream of its own, that no episode ends, with its own critic and discount; its advantage is added to the learner's.
Elsewhere it is added to the reward. Agents share one model. With replay, bonuses are those of today's model, of the
steps that were drawn.

References:
  Pathak et al., 2017, Curiosity-driven Exploration by Self-supervised Prediction, eq. 2 to 7
    (https://arxiv.org/abs/1705.05363).
  Burda et al., 2019, Exploration by Random Network Distillation, sec. 2 (https://arxiv.org/abs/1810.12894).
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from jmarl import configs, exploration, losses, masks, networks, normalize, optim
from jmarl.combinators import nesting
from jmarl.configs import config
from jmarl.learners import checks, critics, parts, ppo
from jmarl.networks.initializers import draw_at_once
from jmarl.types import Algorithm, EnvSpec, Learner, Metrics, Numeric, Params, TrainState, Trajectory, static


@config
class IntrinsicConfig(configs.OptimizerConfig):
    """Hyperparameters that all intrinsic rewards share."""

    inner: Any  # the config of the algorithm within
    bonus_start: Numeric = 1.0  # c, weight of the bonus, at the start
    bonus_end: Numeric = 0.0  # at the end of its schedule, and ever after
    bonus_steps: Numeric = 1_000_000  # environment steps (of one seed) from start to end
    bonus_schedule: configs.Schedule = static("constant")  # its course
    bonus_of: Literal["agent", "team"] = static("agent")  # each agent has its own, or all the mean of those who act
    learning_rate: Numeric = 1e-3
    hidden_sizes: tuple[int, ...] = static((64,))  # layers of each model before its output
    feature_size: int = static(32)  # width of the features, or of the random function's output
    activation: configs.Activation = static("relu")  # after each layer
    model_steps: int = static(1)  # optimiser steps on each batch


@config
class ICMConfig(IntrinsicConfig):
    """Hyperparameters of the intrinsic curiosity module."""

    eta: Numeric = 1.0  # η, scale of the bonus
    beta: Numeric = 0.2  # β, weight of the forward model's loss, against the inverse model's


@config
class RNDConfig(IntrinsicConfig):
    """Hyperparameters of random network distillation."""

    bonus_gamma: Numeric = 0.99  # discount of the bonus's own stream
    bonus_gae_lambda: Numeric = 0.95  # mixes one-step and Monte Carlo advantages there
    clip_obs: Numeric = 5.0  # normalised features beyond so many deviations are cut off


class Curiosity(NamedTuple):
    """A model whose surprise is a bonus.

    Attributes:
      init: `(key) -> TrainState`.
      bonus: `(state, batch) -> (bonus [L, M, N], state)`, with the moments that these steps have moved.
      loss: `(params, state, batch) -> (scalar, metrics)`, with the moments of `state`.
    """

    init: Callable[[Any], TrainState]
    bonus: Callable[[TrainState, Trajectory], tuple[Array, TrainState]]
    loss: Callable[[Params, TrainState, Trajectory], tuple[Array, Metrics]]


def icm(algorithm: Algorithm) -> Callable[[EnvSpec, ICMConfig], Learner]:
    """The algorithm, made curious by an intrinsic curiosity module.

    Example:
      >>> import jmarl
      >>> env = jmarl.envs.matrix_game([[1.0, 0.0], [0.0, 0.0]])
      >>> learner = icm(jmarl.ippo)(env.spec, ICMConfig(inner=jmarl.PPOConfig()))
      >>> sorted(learner.init(jax.random.key(0)).params)
      ['inner', 'intrinsic']
    """

    def combined(spec: EnvSpec, cfg: ICMConfig) -> Learner:
        _validate(cfg, ICMConfig, spec)
        net = ICM(cfg.feature_size, _action_size(spec), cfg.hidden_sizes, cfg.activation, len(spec.obs_shape) == 3)
        code = critics.action_code(spec)

        def init(key):
            view, action = jnp.zeros((1, *spec.obs_shape)), jnp.zeros((1, _action_size(spec)))
            return _fresh(draw_at_once(net.init(key, view, action, view)["params"], key), cfg)

        def parts_of(params, batch):
            return icm_losses(params, batch, net=net, code=code)

        def bonus(state, batch):
            _, forward = parts_of(state.params, batch)
            return cfg.eta * forward, state

        def loss(params, state, batch):
            acting = masks.acting(batch)
            inverse, forward = (parts.mean_loss(x, acting) for x in parts_of(params, batch))
            total = (1 - cfg.beta) * inverse + cfg.beta * forward
            return total, {"intrinsic/inverse_loss": inverse, "intrinsic/forward_loss": forward}

        return _curious(algorithm(spec, cfg.inner), cfg, Curiosity(init, bonus, loss))

    return combined


def rnd(algorithm: Algorithm) -> Callable[[EnvSpec, RNDConfig], Learner]:
    """The algorithm, drawn to what random network distillation finds new.

    Example:
      >>> import jmarl
      >>> env = jmarl.envs.matrix_game([[1.0, 0.0], [0.0, 0.0]])
      >>> learner = rnd(jmarl.mappo)(env.spec, RNDConfig(inner=jmarl.PPOConfig()))
      >>> sorted(learner.init(jax.random.key(0)).params["intrinsic"])
      ['critic', 'predictor', 'target']
    """
    targets = inspect.signature(algorithm).parameters.get("targets")
    has_stream = targets is not None and targets.default is ppo.ppo_targets

    def combined(spec: EnvSpec, cfg: RNDConfig) -> Learner:
        _validate(cfg, RNDConfig, spec)
        is_image = len(spec.obs_shape) == 3
        make = functools.partial(View, hidden_sizes=cfg.hidden_sizes, activation=cfg.activation, is_image=is_image)
        nets = {"predictor": make(cfg.feature_size), "target": make(cfg.feature_size), "critic": make(1)}

        def init(key):
            view = jnp.zeros((1, *spec.obs_shape))
            keys = jax.random.split(key, len(nets))
            params = {
                name: draw_at_once(net.init(k, view)["params"], k)
                for (name, net), k in zip(nets.items(), keys, strict=True)
            }
            moments = {"views": normalize.init_features(spec.obs_shape), "sums": normalize.init_features(())}
            return _fresh(params, cfg).replace(moments=moments)

        def see(state, views):
            return normalize.normalize_features(state.moments["views"], views, cfg.clip_obs)

        def value(params, state, views):
            out: Any = nets["critic"].apply({"params": params["critic"]}, see(state, views))
            return out[..., 0]

        def error(params, state, batch):
            views = see(state, batch.steps.next_obs.agents)
            out: Any = {name: nets[name].apply({"params": params[name]}, views) for name in ("predictor", "target")}
            return rnd_error(out["predictor"], jax.lax.stop_gradient(out["target"]))

        def bonus(state, batch):
            counts = masks.acting(batch) > 0
            views = normalize.accumulate(state.moments["views"], batch.steps.next_obs.agents, counts)
            state = state.replace(moments={**state.moments, "views": views})
            surprise = jnp.where(counts, error(state.params, state, batch), 0.0)
            sums = normalize.accumulate(state.moments["sums"], discounted_sums(surprise, cfg.bonus_gamma), counts)
            deviation = jnp.sqrt(sums.variance + 1e-8)
            return surprise / deviation, state.replace(moments={**state.moments, "sums": sums})

        def advantage_and_target(state, batch, bonus):
            now = value(state.params, state, batch.steps.obs.agents)
            # No episode ends this stream: what follows is the next one's start.
            after = jnp.concatenate([now[1:], value(state.params, state, batch.steps.next_obs.agents[-1:])])
            discount, never = jnp.full_like(bonus, cfg.bonus_gamma), jnp.zeros(bonus.shape, bool)
            advantage = losses.gae(bonus, discount, now, after, never, cfg.bonus_gae_lambda)
            return advantage, advantage + now

        def loss(params, state, batch):
            acting = masks.acting(batch)
            distillation = parts.mean_loss(error(params, state, batch), acting)
            metrics = {"intrinsic/distillation_loss": distillation}
            if "intrinsic/target" not in batch.steps.measured:
                return distillation, metrics
            off = value(params, state, batch.steps.obs.agents) - batch.steps.measured["intrinsic/target"]
            critic = parts.mean_loss(off**2, acting)
            return distillation + critic, {**metrics, "intrinsic/critic_loss": critic}

        curiosity = Curiosity(init, bonus, loss)
        if not has_stream:
            return _curious(algorithm(spec, cfg.inner), cfg, curiosity)
        inner = algorithm(spec, cfg.inner, targets=_with_stream)  # type: ignore[call-arg]
        return _curious(inner, cfg, curiosity, advantage_and_target)

    return combined


def _with_stream(params, batch, moments=None, *, nets, cfg):
    """`ppo_targets`, whose advantages are those of both streams."""
    targets, moments, metrics = ppo.ppo_targets(params, batch, moments, nets=nets, cfg=cfg)
    both: Any = targets.advantage + batch.steps.measured["intrinsic/advantage"]
    return dataclasses.replace(targets, advantage=both), moments, metrics


def icm_losses(
    params: Params, batch: Trajectory, *, net: "ICM", code: critics.ActionCode
) -> tuple[Float[Array, "L M N"], Float[Array, "L M N"]]:
    """L_I and L_F of each step, see the module.

    Args:
      params: of `net`.
      batch: sequences with `next_obs`.
      net: the models.
      code: of the environment's actions.
    """
    steps: Any = batch.steps
    action = code.encode(steps.action)
    out: Any = net.apply({"params": params}, steps.obs.agents, action, steps.next_obs.agents)
    told, foretold, found = out
    if code.is_discrete:
        is_real = jnp.asarray(code.is_real)
        inverse = -jnp.sum(action * jax.nn.log_softmax(jnp.where(is_real, told, jnp.finfo(told.dtype).min)), axis=-1)
    else:
        inverse = 0.5 * jnp.sum(jnp.where(code.is_real, told - action, 0.0) ** 2, axis=-1)
    return inverse, 0.5 * jnp.sum((foretold - found) ** 2, axis=-1)


def rnd_error(predicted: Float[Array, "*batch F"], target: Float[Array, "*batch F"]) -> Float[Array, "*batch"]:
    """‖p - q‖² / F.

    >>> float(rnd_error(jnp.array([1.0, 2.0]), jnp.array([0.0, 4.0])))
    2.5
    """
    return jnp.mean((predicted - target) ** 2, axis=-1)


def discounted_sums(x: Float[Array, "T *batch"], gamma: Numeric) -> Float[Array, "T *batch"]:
    """s_t = γ s_{t-1} + x_t, from 0 on: how large a stream's returns are.

    >>> discounted_sums(jnp.array([1.0, 1.0, 1.0]), 0.5).tolist()
    [1.0, 1.5, 1.75]
    """

    def step(sums: Array, x: Array) -> tuple[Array, Array]:
        sums = jnp.asarray(gamma * sums + x)
        return sums, sums

    return jax.lax.scan(step, jnp.zeros_like(x[0]), x)[1]


# ----------------------------------------------------------------------------------------------------- the parts


class View(nn.Module):
    """A function of an agent's view, `[.., O]` or images: `[.., size]`."""

    size: int
    hidden_sizes: tuple[int, ...]
    activation: str
    is_image: bool

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = networks.CNN(activation=self.activation)(x) if self.is_image else x
        return networks.Output(self.size, self.hidden_sizes, self.activation)(x)


class ICM(nn.Module):
    """Features, inverse and forward model: `(view, action, next view) -> (action told, features foretold, found)`."""

    feature_size: int
    action_size: int
    hidden_sizes: tuple[int, ...]
    activation: str
    is_image: bool

    @nn.compact
    def __call__(self, view: Array, action: Array, next_view: Array) -> tuple[Array, Array, Array]:
        features = View(self.feature_size, self.hidden_sizes, self.activation, self.is_image, name="features")
        model = functools.partial(networks.Output, hidden_sizes=self.hidden_sizes, activation=self.activation)
        before, after = features(view), features(next_view)
        told = model(self.action_size, name="inverse")(jnp.concatenate([before, after], axis=-1))
        foretold = model(self.feature_size, name="forward")(jnp.concatenate([before, action], axis=-1))
        return told, foretold, after


def _action_size(spec: EnvSpec) -> int:
    return spec.num_actions or spec.action_size or 0


def _optimizer(cfg: IntrinsicConfig) -> optax.GradientTransformation:
    rate = optim.learning_rate(cfg, steps_per_update=cfg.model_steps)
    return optim.optimizer(rate, eps=cfg.adam_eps, max_grad_norm=cfg.max_grad_norm)


def _fresh(params: Params, cfg: IntrinsicConfig) -> TrainState:
    return TrainState(params=params, opt_state=_optimizer(cfg).init(params), step=jnp.int32(0))


def _curious(
    learner: Learner,
    cfg: IntrinsicConfig,
    curiosity: Curiosity,
    advantage_and_target: Callable[[TrainState, Trajectory, Array], tuple[Array, Array]] | None = None,
) -> Learner:
    """A learner beside a model whose surprise it learns from, in its rewards or as a stream of its own."""
    optimizer = _optimizer(cfg)
    weight = exploration.over_env_steps(cfg, "bonus")

    def init(key):
        key_inner, key_own = jax.random.split(key)
        return nesting.join({"inner": learner.init(key_inner), "intrinsic": curiosity.init(key_own)})

    def act(state, carry, obs, first, key):
        return learner.act(nesting.part(state, "inner"), carry, obs, first, key)

    def greedy(state, carry, obs, first):
        return learner.greedy(nesting.part(state, "inner"), carry, obs, first)

    def learn(own, batch):
        def step(own, _):
            params, opt_state, metrics, _ = parts.improve(
                optimizer, lambda params: curiosity.loss(params, own, batch), own.params, own.opt_state
            )
            return own.replace(params=params, opt_state=opt_state, step=own.step + 1), metrics

        own, metrics = jax.lax.scan(step, own, length=cfg.model_steps)
        return own, jax.tree.map(jnp.mean, metrics)

    def update(state, batch, key):
        batch = masks.readable_batch(batch)
        counts, now = masks.acting(batch) > 0, weight(state)
        bonus, own = curiosity.bonus(nesting.part(state, "intrinsic"), batch)
        if cfg.bonus_of == "team":
            bonus = jnp.broadcast_to(losses.masked_mean(bonus, counts, axis=-1)[..., None], bonus.shape)
        bonus = jax.lax.stop_gradient(jnp.where(counts, bonus, 0.0))
        steps = batch.steps
        if advantage_and_target is None:
            steps = steps.replace(reward=steps.reward + now * bonus)
        else:
            advantage, target = advantage_and_target(own, batch, bonus)
            told = {"intrinsic/advantage": now * advantage, "intrinsic/target": target}
            steps = steps.replace(measured={**steps.measured, **jax.lax.stop_gradient(told)})
        inner, metrics = learner.update(nesting.part(state, "inner"), batch.replace(steps=steps), key)
        own, learnt = learn(own, batch.replace(steps=steps))
        changes = jnp.any(
            steps.next_obs.agents != steps.obs.agents, axis=tuple(range(counts.ndim, steps.obs.agents.ndim))
        )
        measured = {
            "intrinsic/weight": now,
            "intrinsic/bonus": losses.masked_mean(bonus, counts),
            "intrinsic/changing_views": losses.masked_mean(changes.astype(bonus.dtype), counts),
        }
        return nesting.join({"inner": inner, "intrinsic": own}), {**metrics, **learnt, **measured}

    return learner._replace(init=init, act=act, greedy=greedy, update=update)


def _validate(cfg: Any, cls: type, spec: EnvSpec) -> None:
    checks.validate(cfg, cls, spec)
    checks.require(cfg, ("feature_size", "model_steps"), lambda x: x >= 1, "be at least 1")
    checks.require(cfg, ("beta", "bonus_gamma", "bonus_gae_lambda"), lambda x: 0 <= x <= 1, "lie in [0, 1]")
    checks.require(cfg, ("clip_obs",), lambda x: x > 0, "be positive")
