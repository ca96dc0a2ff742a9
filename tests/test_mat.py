"""MAT: plain numpy, who sees what, turns in any order, games with a known answer, bad input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import turns

import jmarl
from jmarl import MATConfig, envs
from jmarl.learners.mat import default_policy
from jmarl.types import EnvSpec, zero_observation

SMALL = {"embed_size": 8, "num_heads": 2, "num_blocks": 2}
COMMON = {"name": "", "obs_shape": (2,), "may_wait": False}
CONTINUOUS = {
    "action_size": 2,
    "action_low": ((-1.0, -2.0), (0.0, -1.0), (-1.0, 0.0), (-3.0, -1.0)),
    "action_high": ((1.0, 2.0), (4.0, 1.0), (1.0, 1.0), (3.0, 1.0)),
    "action_sizes": (2, 2, 1, 2),
}


def spec_of(kind, num_agents=4):
    agents = tuple(f"agent_{i}" for i in range(num_agents))
    common = {**COMMON, "agents": agents, "state_shape": (2 * num_agents,)}
    if kind == "discrete":
        return EnvSpec(**common, num_actions=3)
    return EnvSpec(**common, **{name: x if name == "action_size" else x[:num_agents] for name, x in CONTINUOUS.items()})


def random_observation(spec, num_rows=16, seed=0):
    """Views, legal actions and who acts by chance; somebody does, and everybody has a legal action."""
    rng = np.random.default_rng(seed)
    obs, shape = zero_observation(spec, (num_rows,)), (num_rows, spec.num_agents)
    acts = rng.random(shape) < 0.6
    acts[np.arange(num_rows), rng.integers(0, spec.num_agents, num_rows)] = True
    acts[0] = True
    obs = obs.replace(agents=jnp.asarray(rng.normal(size=obs.agents.shape), jnp.float32), agent_mask=jnp.asarray(acts))
    if not spec.is_discrete:
        return obs
    legal = rng.random((*shape, 3)) < 0.6
    np.put_along_axis(legal, rng.integers(0, 3, (*shape, 1)), True, -1)
    return obs.replace(action_mask=jnp.asarray(legal))


def in_time(x):
    """One step as a sequence of one."""
    return jax.tree.map(lambda y: y[None], x)


class Played:
    """A policy of random parameters, far from uniform; what it did in random observations, and its functions."""

    def __init__(self, kind, order):
        self.spec = spec_of(kind)
        self.policy = default_policy(self.spec, MATConfig(**SMALL, order=order))
        params = jax.jit(self.policy.init)(jax.random.key(0))
        output = params["output"] if kind == "discrete" else params["output"]["head"]
        output["out"]["kernel"] *= 100  # it starts at a hundredth, and who chose what would hardly matter
        self.params, self.obs = params, random_observation(self.spec)
        self.first = jnp.zeros(16, bool)
        keys, sample = jax.random.split(jax.random.key(1)), jax.jit(self.policy.sample)
        carry, _, _ = sample(params, self.policy.init_carry((16,)), self.obs, self.first, keys[0])
        self.carry = carry
        _, self.action, self.measured = sample(params, carry, self.obs, self.first, keys[1])
        self._evaluate = jax.jit(self.policy.evaluate)

    def evaluate(self, obs=None, action=None):
        """Log-probabilities, entropies, values `[B, N]`."""
        obs, action = self.obs if obs is None else obs, self.action if action is None else action
        out = self._evaluate(self.params, self.carry, in_time(obs), self.first[None], in_time(action))
        return tuple(np.asarray(x[0]) for x in out)


KINDS = [("discrete", "fixed"), ("continuous", "fixed"), ("discrete", "random"), ("continuous", "random")]


play = functools.cache(Played)


@pytest.fixture(params=KINDS, ids="-".join)
def played(request):
    return play(*request.param)


def ranks(played):
    """The turn of each agent, `[B, N]`."""
    rank = np.arange(4.0) / 4 + np.zeros((16, 4)) if isinstance(played.carry, tuple) else np.asarray(played.carry)
    return np.argsort(np.argsort(np.where(played.obs.agent_mask, rank, 2 + np.arange(4)), axis=-1), axis=-1)


def test_what_was_sampled_is_evaluated_as_it_was_measured(played):
    log_prob, _, value = played.evaluate()
    np.testing.assert_allclose(log_prob, played.measured["log_prob"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(value, played.measured["value"], rtol=1e-5, atol=1e-5)
    assert log_prob.std() > 0.1
    if played.spec.is_discrete:
        assert np.take_along_axis(np.asarray(played.obs.action_mask), np.asarray(played.action)[..., None], -1).all()


def test_the_mode_is_the_best_of_each_agent_after_what_was_chosen_before(played):
    _, action = jax.jit(played.policy.mode)(played.params, played.carry, played.obs, played.first)
    assert action.dtype == played.action.dtype and action.shape == played.action.shape
    carry, acts = played.carry, np.asarray(played.obs.agent_mask)
    played.carry = jax.tree.map(jnp.zeros_like, carry)  # greedily in the order of the axis
    best = played.evaluate(action=action)[0]
    for i in range(4):
        for other in range(3):
            change = other if played.spec.is_discrete else action[:, i] + 0.1 * (other - 1)
            worse = played.evaluate(action=action.at[:, i].set(change))[0]
            assert (worse <= best + 1e-5)[:, i][acts[:, i]].all()
    played.carry = carry


def test_an_action_matters_to_those_after_it_alone(played):
    log_prob, _, value = played.evaluate()
    acts, rank = np.asarray(played.obs.agent_mask), ranks(played)
    moved_after = []
    for i in range(4):
        change = (played.action[:, i] + 1) % 3 if played.spec.is_discrete else 0.5 - played.action[:, i]
        other = played.evaluate(action=played.action.at[:, i].set(change))
        np.testing.assert_array_equal(other[2], value)
        comes_after = acts & acts[:, [i]] & (rank > rank[:, [i]])
        is_other = acts & (np.arange(4) != i)
        moved = np.abs(other[0] - log_prob) > 1e-6
        assert not moved[is_other & ~comes_after].any()
        moved_after.append(moved[comes_after])
    assert np.concatenate(moved_after).mean() > 0.6  # but where a single action is legal


def test_what_a_dead_agent_sees_reaches_nobody(played):
    acts = np.asarray(played.obs.agent_mask)
    spoilt = jnp.where(acts[..., None], played.obs.agents, 7.0)
    before, after = played.evaluate(), played.evaluate(obs=played.obs.replace(agents=spoilt))
    for x, y in zip(before[:2], after[:2], strict=True):
        np.testing.assert_array_equal(x[acts], y[acts])
    np.testing.assert_array_equal(before[2], after[2])
    mean = (before[2] * acts).sum(-1, keepdims=True) / acts.sum(-1, keepdims=True)
    np.testing.assert_allclose(before[2][~acts], np.broadcast_to(mean, acts.shape)[~acts], rtol=1e-5)


# ------------------------------------------------------------------------------------------------------ by hand


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def norm(params, x):
    return (x - x.mean()) / np.sqrt(x.var() + 1e-6) * params["scale"] + params["bias"]


def dense(params, x):
    return x @ params["kernel"] + params["bias"]


def layers(params, x):
    return dense(params["out"], gelu(dense(params["hidden"]["Dense_0"], x)))


def attention(params, x, sources, num_heads=2):
    """Of one vector to a list of others, head by head."""
    parts = []
    for columns in np.split(np.arange(len(x)), num_heads):
        query = dense(params["query"], x)[columns]
        scores = np.array([query @ dense(params["key"], y)[columns] for y in sources]) / np.sqrt(len(columns))
        weights = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
        parts.append(sum(w * dense(params["value"], y)[columns] for w, y in zip(weights, sources, strict=True)))
    return dense(params["out"], np.concatenate(parts))


def by_hand(params, views, previous):
    """Outputs and values of agents that all act, in this order."""
    xs = [norm(params["view_norm"], gelu(dense(params["view"]["Dense_0"], view))) for view in views]
    for block in ("encoder_0", "encoder_1"):
        p = params[block]
        xs = [norm(p["norms_0"], x + attention(p["attention"], x, xs)) for x in xs]
        xs = [norm(p["norms_1"], x + layers(p["layers"], x)) for x in xs]
    values, zs = [layers(params["value"], x)[0] for x in xs], xs
    xs = [norm(params["action_norm"], gelu(dense(params["action"]["Dense_0"], x))) for x in previous]
    for block in ("decoder_0", "decoder_1"):
        p = params[block]
        xs = [norm(p["norms_0"], x + attention(p["among"], x, xs[: i + 1])) for i, x in enumerate(xs)]
        xs = [norm(p["norms_1"], z + attention(p["across"], z, xs[: i + 1])) for i, z in enumerate(zs)]
        xs = [norm(p["norms_2"], x + layers(p["layers"], x)) for x in xs]
    return xs, values


def test_it_is_the_transformer_of_the_paper_over_those_who_act(played):
    """In plain numpy, agent by agent and head by head; those that do not act are not there."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), played.params)
    log_prob, entropy, value = played.evaluate()
    obs, rank, spec = played.obs, ranks(played), played.spec
    for row in range(8):
        who = [i for i in np.argsort(rank[row]) if obs.agent_mask[row, i]]
        previous = [np.array([1.0] + [0.0] * (3 if spec.is_discrete else 2))]
        for i in who[:-1]:
            if spec.is_discrete:
                done = np.eye(3)[played.action[row, i]]
            else:
                low, high = np.asarray(spec.action_low[i]), np.asarray(spec.action_high[i])
                done = 2 * (np.asarray(played.action[row, i]) - low) / (high - low) - 1
                done[spec.action_sizes[i] :] = 0
            previous.append(np.concatenate([[0.0], done]))
        xs, values = by_hand(params, [np.asarray(obs.agents[row, i], np.float64) for i in who], previous)
        for i, x, v in zip(who, xs, values, strict=True):
            np.testing.assert_allclose(value[row, i], v, rtol=1e-4, atol=1e-5)
            if spec.is_discrete:
                logits = np.where(obs.action_mask[row, i], layers(params["output"], x), -np.inf)
                p = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
                expected = np.log(p[played.action[row, i]]), -(p[p > 0] * np.log(p[p > 0])).sum()
            else:
                mean, num = layers(params["output"]["head"], x), spec.action_sizes[i]
                low, high = np.asarray(spec.action_low[i]), np.asarray(spec.action_high[i])
                half = (high - low) / 2  # one standard deviation, at first
                mean = (low + high) / 2 + half * np.where(np.arange(2) < num, mean, 0.0)
                noise = (np.asarray(played.action[row, i]) - mean) / half
                constant = 0.5 * np.log(2 * np.pi) + np.log(half)
                expected = -(0.5 * noise**2 + constant).sum(), (0.5 + constant).sum()
            np.testing.assert_allclose((log_prob[row, i], entropy[row, i]), expected, rtol=1e-4, atol=1e-4)


def test_two_agents_play_as_they_would_among_dead_ones():
    """The same parameters serve any number of agents, wherever those that act stand in the axis."""
    large = play("discrete", "fixed")
    spec = spec_of("discrete", 2)
    small = default_policy(spec, MATConfig(**SMALL))
    obs = random_observation(spec, seed=1).replace(agent_mask=jnp.ones((16, 2), bool))
    action = jnp.argmax(obs.action_mask, axis=-1).astype(jnp.int32)
    expected = jax.jit(small.evaluate)(large.params, (), in_time(obs), large.first[None], in_time(action))
    assert np.std(expected[0]) > 0.1
    for places in ([0, 1], [1, 3], [2, 3]):
        among = large.obs.replace(
            agents=large.obs.agents.at[:, jnp.array(places)].set(obs.agents),
            action_mask=large.obs.action_mask.at[:, jnp.array(places)].set(obs.action_mask),
            agent_mask=jnp.zeros((16, 4), bool).at[:, jnp.array(places)].set(True),
        )
        found = large.evaluate(among, large.action.at[:, jnp.array(places)].set(action))
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x[:, places], y[0], rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------------- learning


def test_what_a_dead_agent_sees_and_does_changes_no_parameter():
    env = envs.probe("action_observation", num_agents=3)
    env = env._replace(spec=env.spec._replace(always_act=False))
    learner = jmarl.mat(env.spec, MATConfig(embed_size=8, learning_rate=0.1, adam_eps=0.1, num_minibatches=2))
    turns.assert_the_dead_teach_nothing(env, learner)


def test_the_second_agent_answers_to_what_the_first_drew():
    """Paid for being alike, and mixed: independent agents whose first is mixed like that are paid little over half."""
    env = envs.matrix_game(np.eye(2))
    cfg = MATConfig(
        embed_size=8,
        ent_coef=0.3,
        learning_rate=0.005,
        normalize_advantage="none",
        max_grad_norm=10.0,
        num_minibatches=1,
    )
    loop = jmarl.on_policy(env, jmarl.mat, num_envs=16, rollout_length=4)
    keys = jax.random.split(jax.random.key(0), 3)
    run, _ = jax.jit(jax.vmap(jmarl.make_train(loop, 60), (0, None)))(keys, cfg)

    policy = default_policy(env.spec, cfg)
    action = jnp.array([[[0, 0], [0, 1], [1, 0], [1, 1]]])
    obs = zero_observation(env.spec, (1, 4)).replace(agents=jnp.ones((1, 4, 2, 1)))
    log_prob = jax.vmap(lambda params: policy.evaluate(params, (), obs, jnp.zeros((1, 4), bool), action)[0])
    joint = np.exp(np.asarray(log_prob(run.train_state.params)).sum(-1))[:, 0]  # [seeds, joint actions]
    np.testing.assert_allclose(joint.sum(-1), 1.0, rtol=1e-5)
    assert (joint[:, [0, 3]].sum(-1) > 0.9).all() and (joint[:, [0, 3]].min(-1) > 0.3).all(), joint


def test_continuous_actions_are_learnt_for_the_team_in_any_order():
    """Each is paid for what the other does: -(a - cue / 2)²."""
    env = envs.probe("continuous", num_agents=2)

    def step(state, action, key):
        state, obs, outcome = env.step(state, action, key)
        return state, obs, outcome.replace(reward=outcome.reward[::-1])

    loop = jmarl.on_policy(env._replace(step=step), jmarl.mat, num_envs=16, rollout_length=4)
    cfg = MATConfig(embed_size=8, learning_rate=1e-2, ent_coef=0.0, order="random", num_minibatches=2)
    run, _ = jax.jit(jmarl.make_train(loop, 40))(jax.random.key(0), cfg)
    learner = jmarl.mat(env.spec, cfg)
    played = jax.jit(lambda state: jmarl.evaluate(loop.env, learner, state, jax.random.key(1), num_episodes=32))
    assert played(run.train_state)["eval/return_sum"] > -0.05  # -0.5 for zeros


def test_bad_input():
    spec = envs.matrix_game(np.eye(2)).spec
    with pytest.raises(ValueError, match="num_heads=3 must divide embed_size=64"):
        jmarl.mat(spec, MATConfig(num_heads=3))
    with pytest.raises(ValueError, match="num_blocks=0 must be at least 1"):
        jmarl.mat(spec, MATConfig(num_blocks=0))
    with pytest.raises(ValueError, match="order='sorted' is unknown here: choose one of fixed, random"):
        jmarl.mat(spec, MATConfig(order="sorted"))
    with pytest.raises(TypeError, match="unexpected keyword argument 'recurrent'"):
        MATConfig(recurrent=True)
    policy = default_policy(spec, MATConfig(embed_size=8, order="random"))
    obs = zero_observation(spec, (2, 3))
    with pytest.raises(ValueError, match="order='random' is known for single steps, and these are sequences of 2"):
        policy.evaluate({}, policy.init_carry((3,)), obs, jnp.zeros((2, 3), bool), jnp.zeros((2, 3, 2), jnp.int32))
