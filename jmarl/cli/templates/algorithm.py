"""OwnAlgorithm: say in a sentence what it does, and after which paper. As it stands, it is REINFORCE for each agent:

    L(θ) = mean( -(G - mean G) log π_θ(a|o) ),   G_t = r_t + γ G_{t+1}.

jmarl train own_algorithm.py:own_algorithm --env MPE_simple_spread_v3
"""

import jax.numpy as jnp
from jax import Array

from jmarl import configs, losses, masks, networks, optim
from jmarl.learners import checks, parts
from jmarl.networks import actor_critic, heads
from jmarl.types import EnvSpec, Learner, Metrics, Network, Numeric, Params, TrainState, Trajectory


@configs.config
class OwnAlgorithmConfig(configs.OptimizerConfig, configs.NetworkConfig):
    """Hyperparameters. Each is an option of `jmarl train`, with the comment behind it as its help."""

    learning_rate: Numeric = 1e-2
    gamma: Numeric = 0.99  # discount of future rewards


def own_targets(batch: Trajectory, *, cfg: OwnAlgorithmConfig) -> Array:
    """Returns G of each agent `[T, B, N]`, within an episode and as far as the rollout goes."""
    steps = batch.steps
    last = jnp.broadcast_to(steps.last[..., None], steps.reward.shape)
    discount = jnp.asarray(cfg.gamma * (1.0 - steps.terminated))
    return losses.lambda_returns(steps.reward, discount, jnp.zeros_like(steps.reward), last, 1.0)


def own_loss(
    params: Params, batch: Trajectory, targets: Array, *, nets: Network, cfg: OwnAlgorithmConfig
) -> tuple[Array, Metrics]:
    """The policy gradient, averaged over the agents that act."""
    steps, acting = batch.steps, masks.acting(batch)
    _, logits = nets.apply(params, batch.carry, steps.obs, steps.first)
    policy = heads.categorical(logits, steps.obs.action_mask)
    advantage = losses.masked_normalize(targets, acting > 0)
    loss = parts.mean_loss(losses.policy_gradient_loss(policy.log_prob(steps.action), advantage), acting, cfg.sharing)
    return loss, {"loss/policy": loss, "policy/entropy": parts.mean_loss(policy.entropy(), acting)}


def own_algorithm(spec: EnvSpec, cfg: OwnAlgorithmConfig, nets: Network | None = None, *, loss=own_loss) -> Learner:
    """A learner of this environment: five pure functions, built inside the trace, so that `cfg` may hold tracers."""
    checks.validate(cfg, OwnAlgorithmConfig, spec)
    checks.require_discrete(spec, "own_algorithm chooses among finitely many actions")
    nets = parts.choose_nets(nets, default_nets, spec, cfg)
    step, learning_rate = networks.one_step(nets), optim.learning_rate(cfg)
    optimizer = parts.optimizer(cfg, learning_rate)

    def init(key):
        params = nets.init(key)
        return TrainState(params=params, opt_state=optimizer.init(params), step=jnp.int32(0))

    def act(state, carry, obs, first, key):
        carry, logits = step(state.params, carry, obs, first)
        return heads.categorical(logits, obs.action_mask).sample(seed=key), carry, {}

    def greedy(state, carry, obs, first):
        carry, logits = step(state.params, carry, obs, first)
        return heads.categorical(logits, obs.action_mask).mode(), carry

    def update(state, batch, key):
        batch = masks.readable_batch(batch)
        targets = own_targets(batch, cfg=cfg)
        params, opt_state, metrics, norm = parts.improve(
            optimizer, lambda params: loss(params, batch, targets, nets=nets, cfg=cfg), state.params, state.opt_state
        )
        metrics = {**metrics, "loss/grad_norm": norm, "learning_rate": parts.as_metric(learning_rate(state.step + 1))}
        return state.replace(params=params, opt_state=opt_state, step=state.step + 1), metrics

    return Learner(init, nets.init_carry, act, greedy, update, learns_from="rollouts")


def default_nets(spec: EnvSpec, cfg: OwnAlgorithmConfig) -> Network:
    """The policy that `cfg` describes: from each agent's view to logits."""
    model, head = actor_critic.from_config(cfg, spec)
    return actor_critic.of_own_view(spec, lambda size: (head(size, scale=0.01),), model, cfg.sharing)
