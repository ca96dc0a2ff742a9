"""Normalised observations: an algorithm that sees views and states less their mean, over their deviation.

    o' = clip((o - μ) / √(σ² + ε), -c, c),

with the moments of each feature over all that the agents who act have seen. A rollout is learnt from as it was acted
on: moments move behind the update. They are among the parameters, so that they are saved and exported with the policy.

References:
  Andrychowicz et al., 2021, What Matters for On-Policy Deep Actor-Critic Methods? A Large-Scale Study, C64 and C65
    (https://openreview.net/forum?id=nIAxjsniDzg).
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jmarl import masks, normalize
from jmarl.combinators import nesting
from jmarl.configs import config
from jmarl.learners import checks
from jmarl.networks import entities
from jmarl.types import Algorithm, EnvSpec, Learner, Numeric, Observation, TrainState


@config
class NormalizedConfig:
    """Hyperparameters of `normalized`."""

    inner: Any  # the config of the algorithm within
    clip_obs: Numeric = 10.0  # features beyond so many deviations are cut off


def normalized(algorithm: Algorithm) -> Callable[[EnvSpec, NormalizedConfig], Learner]:
    """The algorithm, seeing normalised views and states. With replay, moments are of what is drawn to be learnt from.

    Features that say which entities are seen (`EnvSpec.entities`) stay as they are.

    Example:
      >>> import jax
      >>> import jmarl
      >>> env = jmarl.envs.matrix_game([[1.0, 0.0], [0.0, 0.0]])
      >>> learner = normalized(jmarl.ippo)(env.spec, NormalizedConfig(inner=jmarl.PPOConfig()))
      >>> sorted(learner.init(jax.random.key(0)).params)
      ['inner', 'moments']
    """

    def combined(spec: EnvSpec, cfg: NormalizedConfig) -> Learner:
        checks.validate(cfg, NormalizedConfig, spec)
        checks.require(cfg, ("clip_obs",), lambda x: x > 0, "be positive")
        learner = algorithm(spec._replace(obs_dtype="float32"), cfg.inner)
        kept = jnp.asarray(entities.present_features(spec.entities) if spec.entities else (), int)

        def see(state: TrainState, obs: Observation) -> Observation:
            moments = state.params["moments"]
            agents = normalize.normalize_features(moments["agents"], obs.agents, cfg.clip_obs)
            agents = agents.at[..., kept].set(obs.agents[..., kept])
            return obs.replace(
                agents=agents, state=normalize.normalize_features(moments["state"], obs.state, cfg.clip_obs)
            )

        def init(key):
            shapes = {"agents": spec.obs_shape, "state": spec.state_shape}
            fresh = {name: normalize.init_features(shape) for name, shape in shapes.items()}
            own = TrainState(params=fresh, step=jnp.int32(0))
            return nesting.join({"inner": learner.init(key), "moments": own})

        def act(state, carry, obs, first, key):
            return learner.act(nesting.part(state, "inner"), carry, see(state, obs), first, key)

        def greedy(state, carry, obs, first):
            return learner.greedy(nesting.part(state, "inner"), carry, see(state, obs), first)

        def update(state, batch, key):
            batch = masks.readable_batch(batch)
            steps = batch.steps
            next_obs = None if steps.next_obs is None else see(state, steps.next_obs)
            seen = batch.replace(steps=steps.replace(obs=see(state, steps.obs), next_obs=next_obs))
            inner, metrics = learner.update(nesting.part(state, "inner"), seen, key)
            own = nesting.part(state, "moments")
            acts = steps.obs.agent_mask & (masks.weight(batch) > 0)
            moments = {
                "agents": normalize.accumulate(own.params["agents"], steps.obs.agents, acts),
                "state": normalize.accumulate(own.params["state"], steps.obs.state, acts.any(-1)),
            }
            return nesting.join({"inner": inner, "moments": own.replace(params=moments)}), metrics

        return learner._replace(init=init, act=act, greedy=greedy, update=update)

    return combined
