"""The pages in docs: their Python runs, in order."""

import re
from pathlib import Path

import compiled
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmarl

DOCS = Path(__file__).parents[1] / "docs"


def run_page(name):
    """The names that a page's blocks of Python define."""
    names = {}
    exec("\n".join(re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), re.DOTALL)), names)
    return names


def test_add_an_environment():
    names = run_page("add_an_environment.md")
    cfg = jmarl.PPOConfig(hidden_sizes=(4,))
    _, metrics = jax.eval_shape(jmarl.make_train(names["loop"], 2), jax.random.key(0), cfg)
    assert metrics["train/return_sum"].shape == (2,)
    learner = jmarl.random_policy(names["spec"], jmarl.RandomConfig())
    state = compiled.init(learner, jax.random.key(0))
    scores = jmarl.evaluate(names["env"], learner, state, jax.random.key(1), num_episodes=8)
    np.testing.assert_allclose(scores["eval/left/steps"], 20 - scores["eval/episode_length"], rtol=1e-6)
    assert names["pair"].spec.obs_shape == (14 + 2,) and names["short"].spec.max_steps == 50
    assert jmarl.envs.flatten_views(names["views"])[0].tolist() == [0.0] * 16 + [1.0] * 3

    def ends_on_the_last_step(env, action):
        step = jax.jit(env.step)
        state, _ = env.reset(jax.random.key(0))
        for t in range(20):
            state, _, outcome = step(state, jnp.full(2, action if t == 19 else 0), jax.random.key(0))
        return bool(outcome.last), outcome.terminated.tolist()

    assert ends_on_the_last_step(names["adapted"], 2) == (True, [False, False])
    assert ends_on_the_last_step(names["exact"], 2) == (True, [True, True])
    assert ends_on_the_last_step(names["exact"], 0) == (True, [False, False])


def test_add_an_algorithm():
    run_page("add_an_algorithm.md")  # with the tests that it shows


# index.md runs smaller in test_examples.py; scaling.md has a block for several machines, which are not here.
APART = ("add_an_environment.md", "add_an_algorithm.md", "design.md", "index.md", "scaling.md")


def pages_with_python():
    """All other pages whose blocks of Python stand for themselves."""
    names = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
    return [name for name in names if name not in APART and "```python" in (DOCS / name).read_text(encoding="utf-8")]


@pytest.mark.parametrize("name", pages_with_python())
def test_page_runs(name, monkeypatch):
    monkeypatch.chdir(DOCS.parent)
    run_page(name)


def test_design():
    run_page("design.md")
