"""jmarl's parts used by hand: a loss, an update, targets, a network and an environment of one's own.

    python examples/composing.py

Each function stands alone and can be pasted into a notebook.
"""

import functools

import jax
import jax.numpy as jnp
import optax

import jmarl
from jmarl import losses
from jmarl.types import Env, EnvSpec, Network, Observation, Outcome


def one_loss_alone():
    """Temporal-difference learning of a table: λ-returns, the masked loss, any optimiser."""
    value = jnp.zeros(5)  # V of five states in a row; the last step is rewarded
    reward, state = jnp.array([0.0, 0.0, 0.0, 0.0, 1.0])[:, None], jnp.arange(5)[:, None]
    last = (state == 4).reshape(5, 1)

    def loss(value):
        next_value = jax.lax.stop_gradient(jnp.append(value[1:], 0.0))[:, None]
        target = losses.lambda_returns(reward, 0.9 * ~last, next_value, last, 0.8)
        return losses.masked_mean(losses.value_loss(value[state], target), jnp.ones_like(last))

    optimizer, slope = optax.sgd(1.0), jax.jit(jax.grad(loss))
    opt_state = optimizer.init(value)
    for _ in range(100):
        updates, opt_state = optimizer.update(slope(value), opt_state)
        value = optax.apply_updates(value, updates)
    return value  # 0.9 ** [4, 3, 2, 1, 0]


def one_update_on_a_batch():
    """A learner knows no environment: `update` takes any batch, here one that random actions have left."""
    env = jmarl.make("MPE_simple_spread_v3", action_type="Continuous")
    random = jmarl.random_policy(env.spec, jmarl.RandomConfig())

    @jax.jit  # op by op, starting takes seconds
    def play(key):
        run = jmarl.training.start(env, random, key, num_envs=8)
        return jmarl.rollout(env, random, run, length=16)[1]

    batch = play(jax.random.key(0)).replace(carry=())  # feed-forward networks remember nothing

    learner = jmarl.maddpg(env.spec, jmarl.DDPGConfig(learning_rate=1e-3))
    state, update = jax.jit(learner.init)(jax.random.key(1)), jax.jit(learner.update)
    errors = []
    for key in jax.random.split(jax.random.key(2), 50):
        state, metrics = update(state, batch, key)
        errors.append(float(metrics["loss/critic"]))
    return errors  # falling


def an_advantage_and_a_loss_of_your_own():
    """Between targets and loss there is room: another advantage, and a penalty for leaving the old policy."""

    def bandit_targets(params, batch, moments=None, *, nets, cfg):
        targets, moments, metrics = jmarl.ppo_targets(params, batch, moments, nets=nets, cfg=cfg)
        return targets.replace(advantage=batch.steps.reward - batch.steps.reward.mean()), moments, metrics

    def cautious_loss(params, batch, targets, *, nets, cfg):
        loss, metrics = jmarl.ppo_loss(params, batch, targets, nets=nets, cfg=cfg)
        return loss + 0.1 * metrics["policy/approx_kl"], {**metrics, "loss/cautious": loss}

    cautious = functools.partial(jmarl.ippo, targets=bandit_targets, loss=cautious_loss)
    loop = jmarl.on_policy(jmarl.envs.matrix_game([[1.0, 0.0], [0.0, 2.0]]), cautious, num_envs=16, rollout_length=8)
    _, metrics = jax.jit(jmarl.make_train(loop, 40))(jax.random.key(0), jmarl.PPOConfig(learning_rate=1e-2))
    return metrics["train/return_mean"]  # rising to 2


def a_network_of_your_own():
    """Any `init`, `apply`, `init_carry` is a network: here one linear layer for the values of actions."""
    env = jmarl.envs.matrix_game([[2.0, 1.0], [1.0, 0.0]])  # a sum of what each agent does
    spec = env.spec

    def linear(params, carry, obs, first):
        return carry, obs.agents @ params["weights"] + params["bias"]

    def init(key):
        weights = 0.1 * jax.random.normal(key, (*spec.obs_shape, spec.num_actions))
        return {"weights": weights, "bias": jnp.zeros(spec.num_actions)}

    agent = Network(init=init, apply=linear, init_carry=lambda batch_shape: ())

    def vdn(spec, cfg):
        return jmarl.vdn(spec, cfg, jmarl.learners.q_learning.QNets(agent, jmarl.networks.mixers.vdn()))

    replay = jmarl.buffers.uniform(capacity=500, batch_size=32)
    loop = jmarl.off_policy(env, vdn, buffer=replay, num_envs=8, rollout_length=1, warmup_steps=64)
    _, metrics = jax.jit(jmarl.make_train(loop, 200))(jax.random.key(0), jmarl.QConfig(learning_rate=1e-2))
    return metrics["loss/td"]  # falling to 0


def an_environment_of_your_own():
    """Two agents on a line are paid for meeting; `reset`, `step` and a spec make an environment."""
    spec = EnvSpec("meeting", ("left", "right"), obs_shape=(2,), state_shape=(2,), num_actions=3, max_steps=10)

    def observe(place):
        views = jnp.stack([place, place[::-1]], axis=-1)  # one's own place first
        return Observation(agents=views, state=place, action_mask=jnp.ones((2, 3), bool), agent_mask=jnp.ones(2, bool))

    def reset(key):
        place = jax.random.uniform(key, (2,), minval=-1.0, maxval=1.0)
        return (place, jnp.int32(0)), observe(place)

    def step(state, action, key):
        place, time = state[0] + 0.2 * (action - 1.0), state[1] + 1
        reward = jnp.full(2, -jnp.abs(place[0] - place[1]))
        outcome = Outcome(reward=reward, terminated=jnp.zeros(2, bool), last=time >= 10)
        return (place, time), observe(place), outcome

    env = Env(reset, step, spec)
    loop = jmarl.on_policy(env, jmarl.mappo, num_envs=32, rollout_length=20)
    _, metrics = jax.jit(jmarl.make_train(loop, 60))(jax.random.key(0), jmarl.PPOConfig(learning_rate=3e-3))
    return metrics["train/return_mean"]  # rising


if __name__ == "__main__":
    print("values of five states in a row:", one_loss_alone().round(2))
    errors = one_update_on_a_batch()
    print(f"critic's error on a batch: {errors[0]:.3f} at first, {errors[-1]:.3f} after 50 updates")
    returns = an_advantage_and_a_loss_of_your_own()
    print(f"return in a game of two: {returns[0]:.2f} at first, {returns[-1]:.2f} at last")
    errors = a_network_of_your_own()
    print(f"error of a linear VDN: {errors[0]:.3f} at first, {errors[-1]:.3f} at last")
    returns = an_environment_of_your_own()
    print(f"return of agents who should meet: {returns[0]:.2f} at first, {returns[-1]:.2f} at last")
