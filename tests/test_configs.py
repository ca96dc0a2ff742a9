"""Configs: what they say of themselves, dotted names, and that bad values are refused in a sentence."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmarl
from jmarl import configs, envs
from jmarl.configs import config
from jmarl.learners import checks
from jmarl.types import Numeric, static

SPEC = envs.probe("delayed").spec
ALL = [getattr(jmarl.learners, name) for name in jmarl.learners.__all__ if name.endswith("Config")]


@config
class Inner:
    """What is held."""

    learning_rate: Numeric = 1e-3  # of the inner one
    horizon: Numeric | None = None  # until schedules end
    sizes: tuple[int, ...] = static((4,))  # widths


@config
class Outer:
    """What holds it."""

    inner: Inner = Inner()
    coef: Numeric = 0.5  # a weight


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_every_field_is_explained_where_help_finds_it(cls):
    texts = configs.explain(cls)
    assert all(texts.values()), [name for name, text in texts.items() if not text]
    for name, text in texts.items():
        assert f"{name}: {text}" in cls.__doc__


def test_a_new_default_keeps_the_inherited_words():
    assert configs.explain(jmarl.PPOConfig)["cell_size"] == configs.explain(configs.NetworkConfig)["cell_size"]


def test_fields_are_about_something():
    about = configs.subjects(jmarl.PPOConfig)
    assert (about["learning_rate"], about["cell"], about["gamma"]) == ("optimiser", "networks", "algorithm")


def test_a_config_within_a_config_has_dotted_names():
    cfg = configs.replace(Outer(), {"inner.learning_rate": 1.0, "coef": 2.0})
    assert (cfg.inner.learning_rate, cfg.coef, cfg.inner.sizes) == (1.0, 2.0, (4,))
    assert set(configs.leaves(cfg)) == {"inner.learning_rate", "inner.horizon", "coef"}
    assert configs.get(cfg, "inner.sizes") == (4,)


def test_dotted_names_are_swept_and_horizons_filled_in():
    swept, axes = jmarl.sweep(Outer(), **{"inner.learning_rate": [1.0, 2.0]})
    assert swept.inner.learning_rate.shape == (2,) and axes.inner.learning_rate == 0 and axes.coef is None
    rates = jax.vmap(lambda cfg: cfg.inner.learning_rate * cfg.coef, (axes,))(swept)
    np.testing.assert_array_equal(rates, [0.5, 1.0])
    loop = jmarl.on_policy(envs.probe("delayed"), jmarl.ippo, num_envs=2, rollout_length=2)
    assert jmarl.training.with_horizon(loop, Outer(), 7).inner.horizon == 7
    with pytest.raises(ValueError, match="sizes is not a numeric hyperparameter of Outer"):
        jmarl.sweep(Outer(), sizes=[1, 2])


BAD = {
    "recurrent='False' must be True or False": {"recurrent": "False"},
    "normalize_value=1 must be True or False": {"normalize_value": 1},
    "learning_rate='1e-3' must be a number": {"learning_rate": "1e-3"},
    "learning_rate=nan must be a finite number": {"learning_rate": float("nan")},
    "ent_coef=inf must be a finite number": {"ent_coef": float("inf")},
    "ent_coef=-0.1 must not be negative": {"ent_coef": -0.1},
    "target_kl=-1.0 must not be negative": {"target_kl": -1.0},
    "max_grad_norm=0.0 must be positive: choose None": {"max_grad_norm": 0.0},
    "horizon=0 must be at least 1": {"horizon": 0},
    "gamma=True must be a number": {"gamma": True},
    "num_epochs=2.0 must be a whole number": {"num_epochs": 2.0},
    "num_epochs='2' must be a whole number": {"num_epochs": "2"},
    f"num_epochs={2**31} must be a whole number below": {"num_epochs": 2**31},
    "hidden_sizes='64' must hold one width": {"hidden_sizes": "64"},
    "hidden_sizes=64 must hold one width for each layer: write hidden_sizes=": {"hidden_sizes": 64},
    "hidden_sizes=\\('64',\\) must hold whole numbers": {"hidden_sizes": ("64",)},
    "activation=None has no meaning: leave it out for 'tanh'": {"activation": None},
    "sharing='each' is unknown here: choose one of shared, per_agent, per_group": {"sharing": "each"},
    "gamma has the shape \\(2,\\), and a run has one number": {"gamma": np.array([0.9, 0.99])},
}


@pytest.mark.parametrize("message", BAD)
def test_what_cannot_be_meant_is_refused_by_name(message):
    with pytest.raises(ValueError, match=message):
        jmarl.ippo(SPEC, jmarl.PPOConfig(**BAD[message]))


def test_every_value_of_a_sweep_is_checked():
    with pytest.raises(ValueError, match=r"gamma=2.* must lie in \[0, 1\]"):
        jmarl.sweep(jmarl.PPOConfig(), gamma=[0.9, 2.0])
    with pytest.raises(ValueError, match=r"learning_rate=-1.* must not be negative"):
        jmarl.sweep(jmarl.PPOConfig(), learning_rate=jnp.array([1e-3, -1.0]))


def test_what_an_algorithm_is_given_is_checked():
    validate = inspect.unwrap(checks.validate)  # what users call, without the type checker of these tests
    with pytest.raises(TypeError, match=r"takes the spec of an environment: write env\.spec"):
        validate(jmarl.PPOConfig(), jmarl.PPOConfig, envs.probe("delayed"))
    with pytest.raises(TypeError, match="cfg is Inner here, and this algorithm takes PPOConfig"):
        validate(Inner(), jmarl.PPOConfig, SPEC)


def test_tracers_pass():
    jax.eval_shape(lambda x: jmarl.ippo(SPEC, jmarl.PPOConfig(gamma=x)).init(jax.random.key(0)), 0.9)


def test_old_names_work_and_warn():
    with pytest.warns(DeprecationWarning, match="num_updates is called horizon now"):
        assert jmarl.PPOConfig(num_updates=3).horizon == 3
    with pytest.raises(TypeError, match="horizon is given twice, also by its old name num_updates"):
        jmarl.PPOConfig(num_updates=3, horizon=4)
    loop = jmarl.on_policy(envs.probe("delayed"), jmarl.ippo, num_envs=2, rollout_length=2)
    with pytest.warns(DeprecationWarning, match="env_steps_per_step is called env_steps_per_iteration now"):
        assert loop.env_steps_per_step == 4
    run = jmarl.training.start(loop.env, jmarl.ippo(SPEC, jmarl.PPOConfig()), jax.random.key(0), num_envs=2)
    with pytest.warns(DeprecationWarning, match="learner is called train_state now"):
        assert run.learner is run.train_state
