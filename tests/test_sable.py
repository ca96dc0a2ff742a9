"""Sable and retention: plain numpy, chunks, who sees what and when, a game of memory and of turns, bad input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import turns
from hypothesis import given, settings
from hypothesis import strategies as st

import jmarl
from jmarl import SableConfig, envs
from jmarl.learners.sable import default_policy
from jmarl.networks import retention
from jmarl.types import EnvSpec, zero_observation

SMALL = {"embed_size": 8, "num_heads": 2, "num_blocks": 2}
COMMON = {"name": "", "obs_shape": (2,), "may_wait": False}
CONTINUOUS = {
    "action_size": 2,
    "action_low": ((-1.0, -2.0), (0.0, -1.0), (-1.0, 0.0), (-3.0, -1.0)),
    "action_high": ((1.0, 2.0), (4.0, 1.0), (1.0, 1.0), (3.0, 1.0)),
    "action_sizes": (2, 2, 1, 2),
}
LENGTH, NUM_ENVS, SKIPPED = 6, 5, 2  # steps; of which the first are played before a sequence begins


def spec_of(kind, num_agents=4):
    agents = tuple(f"agent_{i}" for i in range(num_agents))
    common = {**COMMON, "agents": agents, "state_shape": (2 * num_agents,)}
    if kind == "discrete":
        return EnvSpec(**common, num_actions=3)
    return EnvSpec(**common, **{name: x if name == "action_size" else x[:num_agents] for name, x in CONTINUOUS.items()})


def random_observations(spec, seed=0):
    """Views, legal actions and who acts by chance, over time; somebody does, and everybody has a legal action."""
    rng = np.random.default_rng(seed)
    obs, shape = zero_observation(spec, (LENGTH, NUM_ENVS)), (LENGTH, NUM_ENVS, spec.num_agents)
    acts = rng.random(shape) < 0.6
    np.put_along_axis(acts, rng.integers(0, spec.num_agents, (*shape[:2], 1)), True, -1)
    acts[:, 0] = True
    obs = obs.replace(agents=jnp.asarray(rng.normal(size=obs.agents.shape), jnp.float32), agent_mask=jnp.asarray(acts))
    if not spec.is_discrete:
        return obs
    legal = rng.random((*shape, 3)) < 0.7
    np.put_along_axis(legal, rng.integers(0, 3, (*shape, 1)), True, -1)
    return obs.replace(action_mask=jnp.asarray(legal))


class Played:
    """A policy of random parameters, far from uniform; what it did, step by step, and its functions of sequences."""

    def __init__(self, kind):
        self.spec = spec_of(kind)
        self.policy = default_policy(self.spec, SableConfig(**SMALL, decay_scale=0.9))
        params = jax.jit(self.policy.init)(jax.random.key(0))
        output = params["output"] if kind == "discrete" else params["output"]["head"]
        output["out"]["kernel"] *= 100  # it starts at a hundredth, and who chose what would hardly matter
        self.params, self.obs = params, random_observations(self.spec)
        self.first = np.zeros((LENGTH, NUM_ENVS), bool)
        self.first[0] = self.first[3, 1] = self.first[3, 2] = self.first[4, 2] = self.first[2, 3] = True
        sample, self.mode = jax.jit(self.policy.sample), jax.jit(self.policy.mode)
        carry, played, self.carries = self.policy.init_carry((NUM_ENVS,)), [], []
        for t, key in enumerate(jax.random.split(jax.random.key(1), LENGTH)):
            self.carries.append(carry)
            carry, *told = sample(params, carry, self.at(t), self.first[t], key)
            played.append(told)
        self.action, self.measured = jax.tree.map(lambda *x: jnp.stack(x), *played)
        self._evaluate = jax.jit(self.policy.evaluate)

    def at(self, t):
        return jax.tree.map(lambda x: x[t], self.obs)

    def evaluate(self, obs=None, action=None):
        """Log-probabilities, entropies, values `[L, B, N]` of what follows the steps that are skipped."""
        obs, action = self.obs if obs is None else obs, self.action if action is None else action
        obs, action, first = jax.tree.map(lambda x: x[SKIPPED:], (obs, action, self.first))
        return jax.tree.map(np.asarray, self._evaluate(self.params, self.carries[SKIPPED], obs, first, action))

    def other(self, action, i):
        """Of agent i in a single step."""
        return (action[..., i] + 1) % 3 if self.spec.is_discrete else 0.5 - action[..., i, :]


play = functools.cache(Played)


@pytest.fixture(params=["discrete", "continuous"])
def played(request):
    return play(request.param)


# ------------------------------------------------------------------------------------------------------ retention


def retained(query, key, value, state, first, decay, is_causal):
    """S and what is read of it, step by step and agent by agent."""
    state, read = state.copy(), np.zeros_like(query)
    for r, h in np.ndindex(*state.shape[:2]):
        for t in range(len(query)):
            state[r, h] *= 0.0 if first[t, r] else decay[h]
            for n in range(query.shape[2]):
                state[r, h] += np.outer(key[t, r, n, h], value[t, r, n, h])
                if is_causal:
                    read[t, r, n, h] = query[t, r, n, h] @ state[r, h]
            if not is_causal:
                read[t, r, :, h] = query[t, r, :, h] @ state[r, h]
    return state, read


RETAIN = {
    (chunk, is_causal): jax.jit(functools.partial(retention.retain, is_causal=is_causal, chunk=chunk))
    for chunk in (1, 3, 6, None)
    for is_causal in (False, True)
}


@settings(max_examples=15, deadline=None)
@given(st.lists(st.booleans(), min_size=12, max_size=12), st.integers(0, 2**16), st.sampled_from([0.0, 0.5, 0.97]))
@pytest.mark.parametrize("is_causal", [False, True])
def test_retention_is_that_of_a_loop_whatever_the_chunks(is_causal, starts, seed, slowest):
    rng, first = np.random.default_rng(seed), np.array(starts).reshape(6, 2)
    query, key, value = rng.normal(size=(3, 6, 2, 3, 2, 2))
    state, decay = rng.normal(size=(2, 2, 2, 2)), np.array([0.3, slowest])
    expected = retained(query, key, value, state, first, decay, is_causal)
    arrays = (
        *[jnp.asarray(x, jnp.float32) for x in (query, key, value, state)],
        jnp.asarray(first),
        jnp.asarray(decay, jnp.float32),
    )
    for chunk in (1, 3, 6, None):
        for x, y in zip(RETAIN[chunk, is_causal](*arrays), expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_steps_are_counted_from_the_start_of_each_episode():
    first = np.array([[0, 1, 0], [0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 0]], bool)
    found = retention.positions(jnp.array([5, 7, 2]), jnp.asarray(first))
    np.testing.assert_array_equal(found, [[5, 0, 2], [6, 1, 3], [0, 2, 4], [1, 0, 5], [0, 0, 6]])


def test_heads_forget_at_the_rates_of_the_paper():
    np.testing.assert_allclose(retention.decays(1), [31 / 32], rtol=1e-6)
    np.testing.assert_allclose(retention.decays(3, 0.5), 0.5 * np.array([31 / 32, 127 / 128, 511 / 512]), rtol=1e-6)


# ------------------------------------------------------------------------------------- what was done, seen, known


def test_what_was_sampled_step_by_step_is_evaluated_in_one_pass_as_it_was_measured(played):
    log_prob, _, value = played.evaluate()
    np.testing.assert_allclose(log_prob, played.measured["log_prob"][SKIPPED:], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(value, played.measured["value"][SKIPPED:], rtol=1e-5, atol=1e-5)
    assert log_prob.std() > 0.1
    if played.spec.is_discrete:
        assert np.take_along_axis(np.asarray(played.obs.action_mask), np.asarray(played.action)[..., None], -1).all()


def test_the_mode_is_the_best_of_each_agent_after_what_was_chosen_before(played):
    at = LENGTH - 1
    carry, action = played.mode(played.params, played.carries[at], played.at(at), played.first[at])
    assert action.dtype == played.action.dtype and action.shape == played.action.shape[1:]
    assert (carry["step"] == np.where(played.first[at], 0, played.carries[at]["step"]) + 1).all()
    acts = np.asarray(played.obs.agent_mask[at])
    best = played.evaluate(action=played.action.at[at].set(action))[0][-1]
    for i in range(4):
        for other in range(3):
            change = other if played.spec.is_discrete else action[:, i] + 0.1 * (other - 1)
            worse = played.evaluate(action=played.action.at[at].set(action.at[:, i].set(change)))[0][-1]
            assert (worse <= best + 1e-4)[:, i][acts[:, i]].all()


def is_after(played, t, i):
    """Whom agent i's action of step t may reach, `[L, B, N]`: those after it in this step, and all until a start."""
    acts = np.asarray(played.obs.agent_mask)
    later = np.zeros(acts.shape, bool)
    later[t, :, i + 1 :] = True
    for s in range(t + 1, LENGTH):
        later[s] = ~played.first[t + 1 : s + 1].any(0)[:, None]
    return later & acts & acts[t, :, i][:, None]


def test_an_action_matters_to_those_after_it_alone(played):
    log_prob, _, value = played.evaluate()
    acts, moved_after = np.asarray(played.obs.agent_mask), []
    for t in (SKIPPED, SKIPPED + 1):
        for i in range(4):
            action = played.action.at[t, :, i].set(played.other(played.action[t], i))
            other = played.evaluate(action=action)
            np.testing.assert_array_equal(other[2], value)
            moved, after = np.abs(other[0] - log_prob) > 1e-5, is_after(played, t, i)[SKIPPED:]
            is_other = acts[SKIPPED:].copy()
            is_other[t - SKIPPED, :, i] = False
            assert not moved[is_other & ~after].any()
            moved_after.append(moved[after])
    assert np.concatenate(moved_after).mean() > 0.6  # but where a single action is legal


def test_a_view_matters_to_all_that_act_in_its_step_and_to_later_ones(played):
    before, t, i = played.evaluate(), SKIPPED + 1, 2
    after = played.evaluate(obs=played.obs.replace(agents=played.obs.agents.at[t, :, i].add(1.0)))
    acts = np.asarray(played.obs.agent_mask)
    reached = is_after(played, t, i)
    reached[t] = acts[t] & acts[t, :, [i]].T
    moved = np.abs(after[2] - before[2]) > 1e-6
    assert moved[reached[SKIPPED:]].mean() > 0.9
    assert not moved[acts[SKIPPED:] & ~reached[SKIPPED:]].any()


def test_what_a_dead_agent_sees_and_does_reaches_nobody(played):
    acts = np.asarray(played.obs.agent_mask)
    before = played.evaluate()
    for seen in (7.0, jnp.nan):
        spoilt = jnp.where(acts[..., None], played.obs.agents, seen)
        done = played.action
        for i in range(4):
            done = done.at[:, :, i].set(played.other(done, i))
        is_acting = acts if played.spec.is_discrete else acts[..., None]
        after = played.evaluate(played.obs.replace(agents=spoilt), jnp.where(is_acting, played.action, done))
        for x, y in zip(before[:2], after[:2], strict=True):
            np.testing.assert_array_equal(x[acts[SKIPPED:]], y[acts[SKIPPED:]])
        np.testing.assert_array_equal(before[2], after[2])
    acts = acts[SKIPPED:]
    mean = (before[2] * acts).sum(-1, keepdims=True) / acts.sum(-1, keepdims=True)
    np.testing.assert_allclose(before[2][~acts], np.broadcast_to(mean, acts.shape)[~acts], rtol=1e-5)


def test_without_memory_each_step_is_alone():
    large = play("discrete")
    policy = default_policy(large.spec, SableConfig(**SMALL, recurrent=False))
    assert policy.init_carry((NUM_ENVS,)) == ()
    evaluate = jax.jit(policy.evaluate)
    out = evaluate(large.params, (), large.obs, large.first, large.action)
    turned = jax.tree.map(lambda x: x[::-1], (large.obs, jnp.asarray(large.first), large.action))
    for x, y in zip(out, evaluate(large.params, (), *turned), strict=True):
        np.testing.assert_allclose(x, y[::-1], rtol=1e-5, atol=1e-5)
    log_prob, _, value = large.evaluate()
    np.testing.assert_allclose(out[0][3, 1:3], log_prob[3 - SKIPPED, 1:3], rtol=1e-4, atol=1e-4)  # an episode's start
    assert not np.allclose(out[2][4, 1], value[4 - SKIPPED, 1], atol=1e-3)


def test_two_agents_play_as_they_would_among_dead_ones():
    """The same parameters serve any number of agents, wherever those that act stand in the axis."""
    large = play("discrete")
    spec = spec_of("discrete", 2)
    small = default_policy(spec, SableConfig(**SMALL, decay_scale=0.9))
    obs = random_observations(spec, seed=1)
    obs = obs.replace(agent_mask=jnp.ones_like(obs.agent_mask))
    action = jnp.argmax(obs.action_mask, axis=-1).astype(jnp.int32)
    x = jax.tree.map(lambda x: x[SKIPPED:], (obs, large.first, action))
    expected = jax.jit(small.evaluate)(large.params, large.carries[SKIPPED], *x)
    assert np.std(expected[0]) > 0.1
    for places in ([0, 1], [1, 3], [2, 3]):
        index = jnp.array(places)
        among = large.obs.replace(
            agents=large.obs.agents.at[:, :, index].set(obs.agents),
            action_mask=large.obs.action_mask.at[:, :, index].set(obs.action_mask),
            agent_mask=jnp.zeros_like(large.obs.agent_mask).at[:, :, index].set(True),
        )
        found = large.evaluate(among, large.action.at[:, :, index].set(action))
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x[:, :, places], y, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------------------------ by hand


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def norm(params, x):
    return x / np.sqrt((x**2).mean() + 1e-6) * params["scale"]


def dense(params, x):
    return x @ params["kernel"] + params.get("bias", 0.0)


def layers(params, x):
    return dense(params["out"], gelu(dense(params["hidden"]["Dense_0"], x)))


def code(t, size=8):
    angle = t / 10_000.0 ** (np.arange(0, size, 2) / size)
    return np.concatenate([np.sin(angle), np.cos(angle)])


class Head:
    """A retention of two heads as it is in the paper: one agent after the other."""

    def __init__(self, params):
        self.params, self.state = params, np.zeros((2, 4, 4))

    def begin_step(self, is_first):
        self.state *= 0.0 if is_first else 0.9 * np.array([31 / 32, 511 / 512]).reshape(2, 1, 1)

    def write(self, source, t):
        key, value = (dense(self.params[name], source + code(t)).reshape(2, 4) for name in ("key", "value"))
        self.state += key[:, :, None] * value[:, None] / np.sqrt(4)

    def read(self, x, source, t):
        query = dense(self.params["query"], x + code(t)).reshape(2, 4)
        read = np.einsum("hd,hde->he", query, self.state)
        read = (read - read.mean(-1, keepdims=True)) / np.sqrt(read.var(-1, keepdims=True) + 1e-6)
        read = read.ravel() * self.params["norm"]["scale"] + self.params["norm"]["bias"]
        gate = dense(self.params["gate"], source + code(t))
        return dense(self.params["out"], gate / (1 + np.exp(-gate)) * read)


class ByHand:
    """A team that remembers: outputs and values of those who act, step by step."""

    def __init__(self, params):
        self.params, self.time = params, 0
        blocks = {0, 1}
        self.encoder = [Head(params[f"encoder_{i}"]["retention"]) for i in blocks]
        self.among = [Head(params[f"decoder_{i}"]["among"]) for i in blocks]
        self.across = [Head(params[f"decoder_{i}"]["across"]) for i in blocks]

    def step(self, is_first, views, previous):
        params, self.time = self.params, 0 if is_first else self.time
        for head in (*self.encoder, *self.among, *self.across):
            head.begin_step(is_first)
        xs = [norm(params["view_norm"], gelu(dense(params["view"]["Dense_0"], view))) for view in views]
        for i, head in enumerate(self.encoder):
            p = params[f"encoder_{i}"]
            for x in xs:
                head.write(x, self.time)
            xs = [norm(p["norms_0"], x + head.read(x, x, self.time)) for x in xs]
            xs = [norm(p["norms_1"], x + layers(p["layers"], x)) for x in xs]
        values, outputs = [layers(params["value"], x)[0] for x in xs], []
        for z, done in zip(xs, previous, strict=True):
            x = norm(params["action_norm"], gelu(dense(params["action"]["Dense_0"], done)))
            for i, (among, across) in enumerate(zip(self.among, self.across, strict=True)):
                p = params[f"decoder_{i}"]
                among.write(x, self.time)
                x = norm(p["norms_0"], x + among.read(x, x, self.time))
                across.write(x, self.time)
                x = norm(p["norms_1"], z + across.read(z, x, self.time))
                x = norm(p["norms_2"], x + layers(p["layers"], x))
            outputs.append(x)
        self.time += 1
        return outputs, values


def test_it_is_the_network_of_the_paper_over_those_who_act(played):
    """In plain numpy, step by step, agent by agent and head by head; those that do not act are not there."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), played.params)
    log_prob, entropy, value = played.evaluate()
    obs, spec = played.obs, played.spec
    for row in range(4):
        team = ByHand(params)
        for t in range(LENGTH):
            who = [i for i in range(4) if obs.agent_mask[t, row, i]]
            previous = [np.array([1.0] + [0.0] * (3 if spec.is_discrete else 2))]
            for i in who[:-1]:
                if spec.is_discrete:
                    done = np.eye(3)[played.action[t, row, i]]
                else:
                    low, high = np.asarray(spec.action_low[i]), np.asarray(spec.action_high[i])
                    done = 2 * (np.asarray(played.action[t, row, i]) - low) / (high - low) - 1
                    done[spec.action_sizes[i] :] = 0
                previous.append(np.concatenate([[0.0], done]))
            views = [np.asarray(obs.agents[t, row, i], np.float64) for i in who]
            xs, values = team.step(played.first[t, row], views, previous)
            if t < SKIPPED:
                continue
            for i, x, v in zip(who, xs, values, strict=True):
                at = t - SKIPPED, row, i
                np.testing.assert_allclose(value[at], v, rtol=1e-4, atol=1e-4)
                if spec.is_discrete:
                    logits = np.where(obs.action_mask[t, row, i], layers(params["output"], x), -np.inf)
                    p = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
                    expected = np.log(p[played.action[t, row, i]]), -(p[p > 0] * np.log(p[p > 0])).sum()
                else:
                    mean, num = layers(params["output"]["head"], x), spec.action_sizes[i]
                    low, high = np.asarray(spec.action_low[i]), np.asarray(spec.action_high[i])
                    half = (high - low) / 2  # one standard deviation, at first
                    mean = (low + high) / 2 + half * np.where(np.arange(2) < num, mean, 0.0)
                    noise = (np.asarray(played.action[t, row, i]) - mean) / half
                    constant = 0.5 * np.log(2 * np.pi) + np.log(half)
                    expected = -(0.5 * noise**2 + constant).sum(), (0.5 + constant).sum()
                np.testing.assert_allclose((log_prob[at], entropy[at]), expected, rtol=1e-3, atol=1e-3)


# ------------------------------------------------------------------------------------------------------- learning


def test_what_a_dead_agent_sees_and_does_changes_no_parameter():
    env = envs.probe("action_observation", num_agents=3)
    env = env._replace(spec=env.spec._replace(always_act=False))
    cfg = SableConfig(embed_size=8, num_heads=2, learning_rate=0.1, adam_eps=0.1, num_minibatches=1, num_epochs=1)
    learner = jmarl.sable(env.spec, cfg)
    turns.assert_the_dead_teach_nothing(env, learner)


def test_the_second_agent_answers_to_a_cue_of_long_ago_and_to_what_the_first_drew():
    """Paid at the end for being alike, or for not being, as a cue has said at the start."""
    env = envs.probe("memory", num_agents=2, num_steps=3)

    def step(state, action, key):
        (cue, time), (state, obs, outcome) = state, env.step(state, action, key)
        is_right = (action[0] == action[1]) == (cue[0] > 0)
        reward = jnp.where(time == 2, jnp.where(is_right, 1.0, -1.0), 0.0)
        return state, obs, outcome.replace(reward=jnp.full(2, reward))

    cfg = SableConfig(
        embed_size=16,
        num_heads=2,
        learning_rate=3e-3,
        learning_rate_schedule="linear",
        ent_coef=0.03,
        normalize_advantage="none",
        num_minibatches=2,
    )
    loop = jmarl.on_policy(env._replace(step=step), jmarl.sable, num_envs=32, rollout_length=6)
    keys = jax.random.split(jax.random.key(0), 2)
    _, metrics = jax.jit(jax.vmap(jmarl.make_train(loop, 150), (0, None)))(keys, cfg)
    paid = np.asarray(metrics["train/return_mean"])[:, -5:].mean(-1)
    assert (paid > 0.8).all(), paid  # 0 without memory, and less where the second does not know what the first drew
    assert (np.asarray(metrics["policy/entropy"])[:, -1] > 0.2).all()  # the first is mixed


def test_bad_input():
    spec = envs.matrix_game(np.eye(2)).spec
    with pytest.raises(ValueError, match="num_heads=3 must divide embed_size=64"):
        jmarl.sable(spec, SableConfig(num_heads=3))
    with pytest.raises(ValueError, match="num_heads=8 leaves each head 1 of embed_size=8 features"):
        jmarl.sable(spec, SableConfig(num_heads=8, embed_size=8))
    with pytest.raises(ValueError, match=r"decay_scale=1.5 must lie in \[0, 1\]"):
        jmarl.sable(spec, SableConfig(decay_scale=1.5))
