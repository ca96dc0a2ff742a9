"""Several parts of a run that learn one thing: what all of them saw, learnt from at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_checkpoint import COMPOSED, case

import jmarl
from jmarl import envs
from jmarl.cli import own

MEMORY = envs.probe("memory", num_agents=2, num_steps=3)
SMALL = {"hidden_sizes": (8,), "learning_rate": 1e-2}


FAMILIES = {type(own.default_config(name)): name for name in own.ALGORITHMS}  # those of a family share their update


@pytest.mark.parametrize("name", [*FAMILIES.values(), *COMPOSED])
def test_parts_agree_on_what_every_family_learns(name):
    """Tracing shows it: state on which they did not agree would be a state of each part."""
    loop, cfg = case(name)
    parallel, cfg = jmarl.data_parallel(loop, 2), jmarl.training.with_horizon(loop, cfg, 1)
    run = jax.eval_shape(lambda key: parallel.init(key, cfg), jax.random.key(0))
    after, _ = jax.eval_shape(lambda run: parallel.step(run, cfg), run)
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, run)
    assert after.train_state.env_steps.shape == ()


def parts_of(loop, run, num):
    """The runs that each part goes on with."""
    keys = jax.random.split(jax.random.split(run.key)[1], num)

    def of_part(x, i):
        return x[i * (len(x) // num) : (i + 1) * (len(x) // num)]

    for i, key in enumerate(keys):
        names = "env_state", "obs", "first", "carry", "episodes"
        own = {name: jax.tree.map(lambda x, i=i: of_part(x, i), getattr(run, name)) for name in names}
        yield run.replace(**own, key=key)


@pytest.mark.parametrize("options", [{}, {"normalize_value": True}, {"recurrent": True}, {"target_kl": 1e-4}], ids=str)
def test_what_parts_learn_is_what_one_learns_from_all_they_saw(options):
    """Whole rollouts in one minibatch: then the mean of two gradients is the gradient of the mean."""
    cfg = jmarl.PPOConfig(**SMALL, **options, num_epochs=3, num_minibatches=1, max_grad_norm=0.1)
    loop = jmarl.on_policy(MEMORY, jmarl.mappo, num_envs=3, rollout_length=6)
    parallel = jmarl.data_parallel(loop, 2)
    run = jax.jit(lambda: parallel.init(jax.random.key(0), cfg))()
    learner = jmarl.mappo(MEMORY.spec, cfg)

    @jax.jit
    def by_hand(run):
        batches = []
        for part in parts_of(loop, run, 2):
            _, batch, _ = jmarl.rollout(MEMORY, learner, part, length=6)
            batches.append(batch)
        axes = jax.tree.map(lambda _: 1, batches[0]).replace(carry=jax.tree.map(lambda _: 0, batches[0].carry))
        axes = axes.replace(next_carry=jax.tree.map(lambda _: 0, batches[0].next_carry))
        batch = jax.tree.map(lambda axis, *x: jnp.concatenate(x, axis), axes, *batches)
        return learner.update(run.train_state, batch, jax.random.key(1))[0]

    after, metrics = jax.jit(lambda run: parallel.step(run, cfg))(run)
    expected = by_hand(run)
    for one, other in zip(
        jax.tree.leaves(after.train_state), jax.tree.leaves(expected.replace(env_steps=36)), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)
    assert np.isfinite(metrics["loss/actor"])


def test_one_part_is_the_loop_itself():
    loop, cfg = case("qmix")
    parallel = jmarl.data_parallel(loop, 1)
    run = jax.jit(lambda: parallel.init(jax.random.key(0), cfg))()
    (part,) = parts_of(loop, run, 1)
    part = part.replace(buffer=jax.tree.map(lambda x: x[0], run.buffer))
    alone, alone_metrics = jax.jit(lambda run: loop.step(run, cfg))(part)
    after, metrics = jax.jit(lambda run: parallel.step(run, cfg))(run)
    for one, other in zip(jax.tree.leaves(after.train_state), jax.tree.leaves(alone.train_state), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)
    assert metrics.keys() == alone_metrics.keys()
    for name, x in metrics.items():
        np.testing.assert_allclose(x, alone_metrics[name], rtol=1e-6, err_msg=name)


def test_parts_see_different_things_and_draw_alike_what_all_must_know():
    loop, cfg = case("ippo")
    run = jax.jit(lambda: jmarl.data_parallel(loop, 2).init(jax.random.key(0), cfg))()
    assert (run.obs.agents[:4] != run.obs.agents[4:]).any()

    def drawn(key):
        shared = jmarl.parallel.common(key)
        return jax.random.key_data(shared), jmarl.parallel.summed(1), jmarl.parallel.averaged({"x": jnp.float32(3)})

    keys = jax.random.split(jax.random.key(1), 3)
    shared, num, mean = jmarl.parallel.side_by_side(drawn, out_axes=None)(keys)
    np.testing.assert_array_equal(shared, jax.random.key_data(keys[0]))
    assert num == 3 and mean["x"] == 3


def test_metrics_are_means_over_the_parts_that_measured_them():
    measured = {"train/return_sum": jnp.array([1.0, jnp.nan]), "loss/actor": jnp.array([1.0, jnp.nan])}
    means = jmarl.training._mean_of_parts(measured)
    assert means["train/return_sum"] == 1 and np.isnan(means["loss/actor"])


def test_what_cannot_be_shared_is_refused():
    loop, cfg = case("ippo")

    def careless(spec, cfg):
        learner = jmarl.ippo(spec, cfg)

        def update(state, batch, key):
            state, metrics = learner.update(state, batch, key)
            return state.replace(step=state.step + batch.steps.action.sum(dtype=jnp.int32)), metrics

        return learner._replace(update=update)

    own = jmarl.data_parallel(jmarl.on_policy(MEMORY, careless, num_envs=2, rollout_length=4), 2)
    with pytest.raises(ValueError, match=r"careless learns something on which parts do not agree.*averaged"):
        jax.eval_shape(jmarl.make_train(own, 1), jax.random.key(0), cfg)
    with pytest.raises(ValueError, match="num_parts=0 must be at least 1"):
        jmarl.data_parallel(loop, 0)
    hosted = loop._replace(env=MEMORY._replace(restart=lambda state: state))
    with pytest.raises(ValueError, match="memory steps outside of jax, on one device: leave data_parallel, or"):
        jmarl.data_parallel(hosted, 2)
    with pytest.raises(ValueError, match="shard='parts' needs a loop that has some"):
        jmarl.run(loop, jax.random.key(0), cfg, num_iterations=1, shard="parts")
