"""Combinators: what the learner within is given and gives, and that everything stacks."""

import functools
import itertools

import compiled
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jmarl
from jmarl import PPOConfig, QConfig, buffers, combinators, envs
from jmarl.combinators import nesting
from jmarl.combinators.intrinsic import ICM, discounted_sums
from jmarl.learners import critics
from jmarl.types import Env, EnvSpec, Learner, Outcome, TrainState, zero_observation

SMALL = {"hidden_sizes": (8,)}
MODEL = {"hidden_sizes": (8,), "feature_size": 4}
PPO = PPOConfig(**SMALL, num_epochs=1, num_minibatches=1)
GAME = envs.matrix_game([[1.0, 0.0], [0.0, 3.0]], num_steps=3)
SPEC = EnvSpec(name="counting", agents=("red_0", "red_1", "blue_0"), obs_shape=(3,), state_shape=(2,), num_actions=4,
               obs_sizes=(2, 2, 3), action_sizes=(2, 2, 4), teams=(0, 0, 1), max_steps=4)  # fmt: skip


def counting_env() -> Env:
    """Four steps; views, state and rewards tell time, agent and action, so that whatever is mixed up is seen."""

    def observe(time):
        obs = zero_observation(SPEC)
        agents = jnp.array([[1.0, 1.0, 0.0], [2.0, 1.0, 0.0], [3.0, 1.0, 1.0]]).at[:, 1].multiply(time)
        mask = np.arange(4) < np.array(SPEC.action_sizes)[:, None]
        return obs.replace(agents=agents, state=jnp.stack([time, 10.0 * time]), action_mask=jnp.asarray(mask))

    def reset(key):
        return jnp.float32(0), observe(jnp.float32(0))

    def step(time, action, key):
        time = time + 1
        reward = jnp.array([0.0, 10.0, 20.0]) + action
        last = time == 4
        outcome = Outcome(
            reward=reward, terminated=jnp.full(3, last), last=last, shaped_reward=100 + jnp.arange(3, dtype=jnp.float32)
        )
        return time, observe(time), outcome

    return envs.check_env(Env(reset, step, SPEC))


def constant(spec, cfg, *, learns_from="rollouts"):
    """Acts as its only parameter says, which each update raises by one; what it was given to learn from is a metric."""

    def init(key):
        return TrainState(params={"action": jnp.int32(0)}, step=jnp.int32(0))

    def choose(state, carry, obs, first):
        assert obs.agents.shape[1:] == (spec.num_agents, *spec.obs_shape)
        assert obs.action_mask.shape[1:] == (spec.num_agents, spec.num_actions)
        assert obs.state.shape[1:] == spec.state_shape
        action = jnp.full(obs.agent_mask.shape, state.params["action"]) % spec.num_actions
        return action, jnp.where(first, 0, carry) + 1

    def act(state, carry, obs, first, key):
        action, carry = choose(state, carry, obs, first)
        return action, carry, {"seen": obs.agents}

    def update(state, batch, key):
        assert batch.carry.shape == batch.steps.first.shape[1:]
        told = {"reward": batch.steps.reward, "obs": batch.steps.obs.agents, "state": batch.steps.obs.state}
        told |= {"next_obs": batch.steps.next_obs.agents, "action": batch.steps.action, "carry": batch.steps.carry}
        told |= {"seen": batch.steps.measured["seen"]}
        told |= {} if batch.weight is None else {"weight": batch.weight}
        return state.replace(params={"action": state.params["action"] + 1}, step=state.step + 1), told

    return Learner(init, lambda shape: jnp.zeros(shape, jnp.int32), act, choose, update, learns_from=learns_from)


def play(env, algorithm, cfg, num_iterations=1, *, num_envs=2, length=4):
    """A run, and the metrics of each iteration."""
    loop = jmarl.on_policy(env, algorithm, num_envs=num_envs, rollout_length=length)
    return jax.jit(jmarl.make_train(loop, num_iterations))(jax.random.key(0), cfg)


# ------------------------------------------------------------------------------------------------------------- teams


@pytest.fixture(scope="module")
def two_teams():
    members = {"blue": ["blue_0"], "reds": "red_*"}
    algorithm = combinators.teams({"blue": constant, "reds": constant}, members, reads="team")
    run, told = play(counting_env(), algorithm, {"blue": PPO, "reds": PPO}, 2)
    return run, jax.tree.map(np.asarray, told)


def test_each_team_sees_its_members_alone(two_teams):
    _, told = two_teams
    time = np.arange(4.0)
    np.testing.assert_array_equal(told["reds/obs"][0, :, 0, 1], np.stack([np.full(4, 2.0), time], -1))
    np.testing.assert_array_equal(told["blue/obs"][0, :, 0, 0], np.stack([np.full(4, 3.0), time, np.ones(4)], -1))
    assert told["reds/state"].shape[-1] == 4  # two views of two features: padding is no part of the state
    np.testing.assert_array_equal(told["reds/state"][0, :, 0], np.stack([np.ones(4), time, np.full(4, 2.0), time], -1))
    np.testing.assert_array_equal(told["blue/next_obs"][0, :, 0, 0, 1], time + 1)
    np.testing.assert_array_equal(told["blue/seen"], told["blue/obs"])
    np.testing.assert_array_equal(told["reds/carry"][0, :, 0], time)


def test_each_team_is_paid_for_what_its_members_did(two_teams):
    run, told = two_teams
    for iteration in range(2):  # the parameter, and so the action of everybody, is the number of updates
        np.testing.assert_array_equal(told["reds/action"][iteration], np.full((4, 2, 2), iteration))
        np.testing.assert_array_equal(told["reds/reward"][iteration, 0, 0], [iteration, 10 + iteration])
        np.testing.assert_array_equal(told["blue/reward"][iteration, 0, 0], [20 + iteration])
    assert int(combinators.part(run.train_state, "blue").params["action"]) == 2


def test_a_team_that_learns_beats_one_that_is_random():
    env = envs.probe("action", num_agents=2)
    algorithm = combinators.teams({"left": jmarl.ippo, "right": jmarl.random_policy},
                                  {"left": ["agent_0"], "right": ["agent_1"]})  # fmt: skip
    cfg = {"left": PPO.replace(learning_rate=3e-2), "right": jmarl.RandomConfig()}
    run, _ = play(env, algorithm, cfg, 40, num_envs=16)
    learner = algorithm(env.spec, cfg)
    scores = compiled.evaluate(env, learner, run.train_state, jax.random.key(1), num_episodes=8)
    assert float(scores["eval/return/agent_0"]) == 1.0


def test_teams_pad_continuous_actions():
    bounds = ((-1.0, -2.0),) * 3, ((1.0, 2.0),) * 3
    spec = SPEC._replace(num_actions=None, action_size=2, action_low=bounds[0], action_high=bounds[1],
                         action_sizes=(1, 1, 2))  # fmt: skip
    assert combinators.spec_of(spec, (0, 1)).action_low == ((-1.0,), (-1.0,))
    algorithm = combinators.teams({"red": jmarl.random_policy, "blue": jmarl.isac})
    learner = algorithm(spec, {"red": jmarl.RandomConfig(), "blue": jmarl.SACConfig(**SMALL)})
    state = compiled.init(learner, jax.random.key(0)).replace(env_steps=jnp.int32(0))
    obs = zero_observation(spec, (5,))
    action, _, _ = learner.act(state, learner.init_carry((5,)), obs, jnp.ones(5, bool), jax.random.key(1))
    assert action.shape == (5, 3, 2)
    np.testing.assert_array_equal(action[:, :2, 1], 0)


def test_a_frozen_team_acts_and_learns_no_more():
    trained, _ = play(GAME, constant, PPO, 3)
    algorithm = combinators.teams({"old": combinators.frozen(constant, trained.train_state), "new": constant},
                                  {"old": ["agent_0"], "new": ["agent_1"]})  # fmt: skip
    run, told = play(GAME, algorithm, {"old": PPO, "new": PPO}, 2)
    assert int(combinators.part(run.train_state, "old").params["action"]) == 3
    assert "old/reward" not in told


@pytest.mark.parametrize(
    "members, message",
    [
        ({"red": "red_*", "blue": "green_*"}, "Team blue has no members"),
        ({"red": "red_*", "blue": ["blue_7"]}, "blue_7 of team blue is no agent of counting"),
        ({"red": "*", "blue": "blue_*"}, "blue_0 of counting is in 2 teams"),
        ({"red": ["red_0"], "blue": "blue_*"}, "red_1 of counting is in no team"),
        ({"red": "red_*"}, "members has the teams"),
    ],
)
def test_members_are_checked(members, message):
    with pytest.raises(ValueError, match=message):
        combinators.members_of(SPEC, {"red": 0, "blue": 0}, members)


def test_teams_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"Team red learns from rollouts .* team blue from replay"):
        algorithm = combinators.teams({"red": jmarl.ippo, "blue": jmarl.iql})
        algorithm(SPEC, {"red": PPO, "blue": QConfig()})
    with pytest.raises(ValueError, match="config of teams is a dict"):
        combinators.teams({"red": jmarl.ippo, "blue": jmarl.ippo})(SPEC, {"red": PPO})
    with pytest.raises(ValueError, match="learning_rate=-1"):
        combinators.teams({"red": jmarl.ippo, "blue": jmarl.ippo})(
            SPEC, {"red": PPO, "blue": PPOConfig(learning_rate=-1)}
        )


# ------------------------------------------------------------------------------------------------------------ shaped


@given(phi=st.lists(st.floats(-5, 5, width=32), min_size=5, max_size=5), gamma=st.floats(0.5, 1, width=32))
def test_a_potential_adds_the_same_to_every_policy(phi, gamma):
    """Σ γ^t F_t = -Φ(s_0), whatever was done: no policy gains on another."""
    potential = lambda obs: jnp.array(phi)[obs.state[..., :1].astype(int)] * jnp.ones(3)  # noqa: E731
    told = _shaped_rewards()(potential=potential, gamma=gamma)
    gained = np.sum(gamma ** np.arange(4)[:, None, None] * (told - RAW), axis=0)
    np.testing.assert_allclose(gained, -phi[0], atol=1e-4)


RAW = np.broadcast_to(np.array([0.0, 10.0, 20.0]), (4, 2, 3))


@functools.cache
def _shaped_rewards():
    """`(potential, gamma) -> rewards [T, B, N]` that the learner within is given, of one rollout of `counting`."""
    env = counting_env()
    learner = constant(SPEC, PPO)
    run, batch, _ = compiled.play(env, learner, jax.random.key(0), num_envs=2, length=4)

    def of(potential, gamma):
        cfg = combinators.ShapedConfig(inner=PPO.replace(gamma=gamma), shaping_schedule="constant")
        shaped = combinators.shaped(constant, potential=potential)(SPEC, cfg)
        return jax.jit(shaped.update)(run.train_state, batch, jax.random.key(1))[1]["reward"]

    return of


def test_the_environments_shaped_reward_fades_and_returns_never_see_it():
    cfg = combinators.ShapedConfig(inner=PPO, shaping_start=1.0, shaping_end=0.0, shaping_steps=32)
    _, told = play(counting_env(), combinators.shaped(constant), cfg, 5)
    np.testing.assert_allclose(told["shaping/weight"], [0.75, 0.5, 0.25, 0.0, 0.0])  # 8 steps each
    for i, weight in enumerate(told["shaping/weight"]):
        expected = RAW[0, 0] + i % 4 + weight * np.array([100.0, 101.0, 102.0])
        np.testing.assert_allclose(told["reward"][i, 0, 0], expected)
    np.testing.assert_allclose(told["train/return_mean"][:4], 4 * (10 + np.arange(4.0)))
    np.testing.assert_allclose(told["train/return/blue_0"][:4], 4 * (20 + np.arange(4.0)))
    np.testing.assert_allclose(told["shaping/reward"], 101.0)


def test_a_function_of_the_transition_shapes():
    cfg = combinators.ShapedConfig(inner=PPO, shaping_start=2.0, shaping_schedule="constant")
    reward = lambda steps: steps.action + steps.obs.state[..., :1]  # noqa: E731
    _, told = play(counting_env(), combinators.shaped(constant, reward=reward), cfg, 2)
    np.testing.assert_allclose(told["reward"][1, :, 0, 0], 1 + 2 * (1 + np.arange(4.0)))


def test_overcooked_tells_its_shaped_reward_apart():
    env = jmarl.make("overcooked", flatten=True)
    outcome = jax.eval_shape(
        lambda key: env.step(env.reset(key)[0], jnp.zeros(2, jnp.int32), key)[2], jax.random.key(0)
    )
    assert outcome.shaped_reward.shape == (2,)


def test_shapes_that_do_not_fit_are_refused():
    cfg = combinators.ShapedConfig(inner=PPO)
    shapes = {"reward": lambda steps: steps.reward[..., 0], "potential": lambda obs: obs.state}
    for name, shape in shapes.items():
        with pytest.raises(ValueError, match=f"{name} gave the shape"):
            play(counting_env(), combinators.shaped(constant, **{name: shape}), cfg)
    with pytest.raises(ValueError, match="has no shaped reward of its own"):
        play(GAME, combinators.shaped(constant), cfg)
    with pytest.raises(ValueError, match="give one of them"):
        combinators.shaped(constant, **shapes)
    with pytest.raises(ValueError, match="gamma is wanted of the inner config"):
        combinators.shaped(jmarl.random_policy, potential=shapes["potential"])(
            SPEC, combinators.ShapedConfig(inner=jmarl.RandomConfig())
        )


# -------------------------------------------------------------------------------------------------------- normalized


def test_moments_are_those_of_all_that_was_seen_and_move_behind_the_update():
    cfg = combinators.NormalizedConfig(inner=PPO)
    run, told = play(counting_env(), combinators.normalized(constant), cfg, 3)
    np.testing.assert_array_equal(told["seen"], told["obs"])  # learnt from as it was acted on
    time = np.arange(4.0)
    np.testing.assert_allclose(told["obs"][0, :, 0, 2, 1], time)  # nothing seen, nothing changed
    views = np.stack([np.stack([np.full(4, agent), time, np.full(4, agent == 3.0)], -1) for agent in (1.0, 2.0, 3.0)])
    mean, std = views.mean((0, 1)), views.std((0, 1))
    np.testing.assert_allclose(told["obs"][2, :, 0, 2], (views[2] - mean) / std, rtol=1e-5)
    moments = run.train_state.params["moments"]
    np.testing.assert_allclose(moments["agents"].mean, mean, rtol=1e-6)
    np.testing.assert_allclose(moments["agents"].variance, std**2, rtol=1e-5)
    np.testing.assert_allclose(moments["state"].mean, [1.5, 15.0], rtol=1e-6)
    assert float(moments["agents"].weight) == 3 * 4 * 2 * 3


def test_who_does_not_act_moves_no_moments():
    x = jnp.array([[1.0, jnp.nan], [3.0, 7.0]])
    stats = jmarl.normalize.accumulate(jmarl.normalize.init_features(()), x, jnp.array([[True, False], [True, False]]))
    assert (float(stats.mean), float(stats.variance), float(stats.weight)) == (2.0, 1.0, 2.0)


# --------------------------------------------------------------------------------------------------------- intrinsic


def _batch(spec, *, continuous=False):
    """Five steps of two environments, all of them random numbers."""
    random = np.random.default_rng(0)
    learner, env = jmarl.random_policy(GAME.spec, jmarl.RandomConfig()), GAME
    _, batch, _ = compiled.play(env, learner, jax.random.key(0), num_envs=2, length=5)
    view = lambda obs: obs.replace(agents=jnp.asarray(random.normal(size=(5, 2, 2, 3)), jnp.float32))  # noqa: E731
    steps = batch.steps
    action = jnp.asarray(random.uniform(-2, 2, (5, 2, 2, 2)), jnp.float32) if continuous else steps.action
    return batch.replace(steps=steps.replace(obs=view(steps.obs), next_obs=view(steps.next_obs), action=action))


@pytest.mark.parametrize("continuous", [False, True])
def test_icm_losses_match_numpy(continuous):
    bounds = {"action_size": 2, "action_low": ((-2.0, -2.0),) * 2, "action_high": ((2.0, 2.0),) * 2,
              "action_sizes": (2, 1)} if continuous else {"num_actions": 2}  # fmt: skip
    spec = EnvSpec(name="", agents=("a", "b"), obs_shape=(3,), state_shape=(6,), **bounds)
    batch, net = _batch(spec, continuous=continuous), ICM(4, 2, (8,), "relu", False)
    learner = combinators.icm(constant)(spec, combinators.ICMConfig(inner=PPO, **MODEL))
    params = compiled.init(learner, jax.random.key(1)).params["intrinsic"]
    code = critics.action_code(spec)
    losses = jax.jit(functools.partial(combinators.icm_losses, net=net, code=code))
    inverse, forward = losses(params, batch)

    p = jax.tree.map(np.asarray, params)

    def mlp(p, x):
        (hidden,) = p["hidden"].values()
        return np.maximum(x @ hidden["kernel"] + hidden["bias"], 0) @ p["out"]["kernel"] + p["out"]["bias"]

    (features,) = p["features"].values()
    before, after = (mlp(features, np.asarray(o.agents)) for o in (batch.steps.obs, batch.steps.next_obs))
    action = np.asarray(batch.steps.action)
    read = action / 2 if continuous else np.eye(2)[action]  # in units of half the range, or one-hot
    if continuous:
        read = read * np.array([[1, 1], [1, 0]])  # the second agent's second dimension is padding
    told = mlp(p["inverse"], np.concatenate([before, after], -1))
    foretold = mlp(p["forward"], np.concatenate([before, read], -1))
    if continuous:
        expected = 0.5 * ((told - read) ** 2 * np.array([[1, 1], [1, 0]])).sum(-1)
    else:
        expected = np.log(np.exp(told).sum(-1)) - np.take_along_axis(told, action[..., None], -1)[..., 0]
    np.testing.assert_allclose(inverse, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(forward, 0.5 * ((foretold - after) ** 2).sum(-1), rtol=1e-4)


def test_icm_adds_its_bonus_and_learns():
    cfg = combinators.ICMConfig(inner=PPO, **MODEL, eta=3.0, bonus_start=0.5, model_steps=10, learning_rate=1e-2)
    env, learner = counting_env(), combinators.icm(constant)(SPEC, cfg)
    run, batch, _ = compiled.play(env, learner, jax.random.key(0), num_envs=2, length=4)
    state, update, told = run.train_state, jax.jit(learner.update), []
    for _ in range(5):
        state, metrics = update(state, batch, jax.random.key(1))
        told.append(metrics)
    total = [0.8 * m["intrinsic/inverse_loss"] + 0.2 * m["intrinsic/forward_loss"] for m in told]
    assert total[-1] < 0.2 * total[0]
    np.testing.assert_allclose(jnp.mean(told[0]["reward"] - RAW), 0.5 * told[0]["intrinsic/bonus"], rtol=1e-4)
    assert told[0]["intrinsic/bonus"] > 0 and told[0]["intrinsic/weight"] == 0.5


def test_rnd_divides_by_the_deviation_of_discounted_sums():
    cfg = combinators.RNDConfig(inner=PPO, **MODEL, bonus_of="team", bonus_gamma=0.9)
    learner = combinators.rnd(constant)(SPEC, cfg)
    env = counting_env()
    run, batch, _ = compiled.play(env, learner, jax.random.key(0), num_envs=2, length=4)
    state, told = jax.jit(learner.update)(run.train_state, batch, jax.random.key(1))

    p = jax.tree.map(np.asarray, run.train_state.params["intrinsic"])
    views = np.asarray(batch.steps.next_obs.agents)
    seen = np.clip((views - views.mean((0, 1, 2))) / np.sqrt(views.var((0, 1, 2)) + 1e-8), -5, 5)

    def mlp(p):
        (net,) = p.values()
        (hidden,) = net["hidden"].values()
        return np.maximum(seen @ hidden["kernel"] + hidden["bias"], 0) @ net["out"]["kernel"] + net["out"]["bias"]

    error = ((mlp(p["predictor"]) - mlp(p["target"])) ** 2).mean(-1)
    sums = np.zeros_like(error)
    for t in range(4):
        sums[t] = error[t] + 0.9 * (sums[t - 1] if t else 0)
    bonus = (error / sums.std()).mean(-1, keepdims=True)
    np.testing.assert_allclose(told["reward"] - RAW, np.broadcast_to(bonus, RAW.shape), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(discounted_sums(jnp.asarray(error), 0.9), sums, rtol=1e-6)
    _, again = jax.jit(learner.update)(state, batch, jax.random.key(1))
    assert float(again["intrinsic/distillation_loss"]) < float(told["intrinsic/distillation_loss"])
    frozen = jax.tree.map(
        np.array_equal, state.params["intrinsic"]["target"], run.train_state.params["intrinsic"]["target"]
    )
    assert all(jax.tree.leaves(frozen))


def test_rnd_has_a_stream_of_its_own_beside_ppo():
    """The critic's targets are the environment's alone; the advantage is that of both streams."""

    def loss(params, batch, targets, *, nets, cfg):
        value, metrics = jmarl.ppo_loss(params, batch, targets, nets=nets, cfg=cfg)
        return value, {**metrics, "advantage": jnp.mean(targets.advantage), "target": jnp.mean(targets.value_target)}

    env, cfg = counting_env(), combinators.RNDConfig(inner=PPO, **MODEL)
    learner = combinators.rnd(functools.partial(jmarl.ippo, loss=loss))(SPEC, cfg)

    @jax.jit
    def learn(weight):
        learner = combinators.rnd(functools.partial(jmarl.ippo, loss=loss))(SPEC, cfg.replace(bonus_start=weight))
        return learner.update(run.train_state, batch, jax.random.key(1))[1]

    run, batch, _ = compiled.play(env, learner, jax.random.key(0), num_envs=2, length=4)
    without, once, twice = (learn(weight) for weight in (0.0, 1.0, 2.0))
    assert without["target"] == once["target"] and np.isfinite(once["intrinsic/critic_loss"])
    gained = once["advantage"] - without["advantage"]
    assert abs(gained) > 1e-3
    np.testing.assert_allclose(twice["advantage"] - without["advantage"], 2 * gained, rtol=1e-3)


def test_views_that_never_change_are_told(capsys):
    cfg = combinators.RNDConfig(inner=PPO, **MODEL)
    _, told = play(GAME, combinators.rnd(constant), cfg)
    assert told["intrinsic/bonus"] == told["intrinsic/changing_views"] == 0
    loop = jmarl.on_policy(GAME, combinators.rnd(constant_without_arrays), num_envs=2, rollout_length=3)
    jmarl.run(loop, jax.random.key(0), cfg, num_iterations=1)
    assert "never changed in 6 steps, so nothing in them can be new" in capsys.readouterr().out


def constant_without_arrays(spec, cfg):
    learner = constant(spec, cfg)
    return learner._replace(update=lambda state, batch, key: (learner.update(state, batch, key)[0], {}))


# --------------------------------------------------------------------------------------------------------- self-play


def _played(num_iterations=6, **settings):
    cfg = combinators.SelfPlayConfig(inner=PPO, pool_size=3, add_every=2, **settings)
    run, told = play(counting_env(), combinators.self_play(constant), cfg, num_iterations, num_envs=16, length=8)
    return run, jax.tree.map(np.asarray, told)


@pytest.fixture(scope="module")
def against_old():
    return _played(latest_share=0.25)


def test_old_selves_act_as_they_did_and_are_not_learnt_from(against_old):
    run, told = against_old
    for i in range(6):
        # After i updates today's parameter is i, and the pool has had 0, 2, 4 ..
        kept = {0: (0,), 1: (0,), 2: (0, 2), 3: (0, 2), 4: (0, 2, 4), 5: (0, 2, 4)}[i]
        action, weight = told["action"][i], told["weight"][i]
        assert np.all(action[weight == 1] == i % 4)
        old = action[weight == 0]
        assert set(old.tolist()) <= {k % 4 for k in kept}
        reds, blue = weight[..., :2], weight[..., 2]
        assert np.all(reds[..., 0] == reds[..., 1]) and np.all((reds[..., 0] + blue) >= 1)
    assert 0.4 < np.mean(told["weight"].min(-1) == 0) < 1  # three in four environments, but for draws
    np.testing.assert_array_equal(run.train_state.target_params["pool"]["action"], [6, 2, 4])


def test_an_opponent_stays_for_an_episode(against_old):
    _, told = against_old
    weight = told["weight"].reshape(6, 2, 4, 16, 3)  # episodes of four steps
    assert np.all(weight == weight[:, :, :1])
    assert len(np.unique(told["weight"][:, ::4].reshape(-1, 3), axis=0)) == 3


def test_against_itself_everything_is_learnt_from():
    _, told = _played(2, latest_share=1.0)
    assert np.all(told["weight"] == 1)
    assert np.isnan(told["self_play/win_share"]).all()


def test_pfsp_prefers_those_that_win():
    """Blue always wins: shares of wins follow from which side learns, and no old self is drawn that never wins."""
    run, told = _played(6, latest_share=0.0, matching="pfsp", pfsp_power=50.0)
    own = nesting.part(run.train_state, "pool").opt_state
    assert np.all(own["wins"] <= own["games"]) and own["games"].sum() > 100
    assert 0.2 < np.nanmean(told["self_play/win_share"]) < 0.8


def test_self_play_that_cannot_be_is_refused():
    make = lambda **settings: combinators.SelfPlayConfig(inner=PPO, **settings)  # noqa: E731
    for settings, message in (({"pool_size": 0}, "pool_size=0 must be at least 1"),
                              ({"latest_share": 1.5}, "latest_share=1.5 must lie in"),
                              ({"matching": "elo"}, "matching='elo' is unknown")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            combinators.self_play(constant)(SPEC, make(**settings))
    with pytest.raises(ValueError, match="must say 0 or 1 for each of the 3 agents"):
        combinators.self_play(constant, sides=(0, 1))(SPEC, make())
    with pytest.raises(ValueError, match="choose matching='uniform'"):
        combinators.self_play(jmarl.iql)(SPEC, make(matching="pfsp").replace(inner=QConfig()))


# ---------------------------------------------------------------------------------------------------------- stacking

COMBINE = {
    "teams": lambda algorithm, cfg: (
        combinators.teams({"a": algorithm, "b": algorithm}, {"a": ["agent_0"], "b": ["agent_1"]}), {"a": cfg, "b": cfg}
    ),
    "self_play": lambda algorithm, cfg: (
        combinators.self_play(algorithm, sides=(0, 1)), combinators.SelfPlayConfig(inner=cfg, pool_size=2)
    ),
    "icm": lambda algorithm, cfg: (combinators.icm(algorithm), combinators.ICMConfig(inner=cfg, **MODEL)),
    "rnd": lambda algorithm, cfg: (combinators.rnd(algorithm), combinators.RNDConfig(inner=cfg, **MODEL)),
    "shaped": lambda algorithm, cfg: (
        combinators.shaped(algorithm, reward=lambda steps: steps.reward), combinators.ShapedConfig(inner=cfg)
    ),
    "normalized": lambda algorithm, cfg: (
        combinators.normalized(algorithm), combinators.NormalizedConfig(inner=cfg)
    ),
}  # fmt: skip
PAIRS = [pair for pair in itertools.product(COMBINE, COMBINE) if pair not in {("self_play", "self_play")}]
PAIRS.remove(("teams", "self_play"))  # a team has no two sides
PAIRS.remove(("teams", "teams"))


@pytest.mark.parametrize("outer, inner", PAIRS)
def test_all_pairs_stack_on_rollouts_and_on_replay(outer, inner):
    """Traced, not compiled: a step gives what it takes."""
    for learns_from in ("rollouts", "replay"):
        algorithm = functools.partial(constant, learns_from=learns_from)
        combined, config = COMBINE[outer](*COMBINE[inner](algorithm, PPO))
        if learns_from == "rollouts":
            loop = jmarl.on_policy(GAME, combined, num_envs=2, rollout_length=3)
        else:
            loop = jmarl.off_policy(GAME, combined, buffer=buffers.uniform(8, 2), num_envs=2, rollout_length=3)
        run = jax.eval_shape(loop.init, jax.random.key(0), config)
        after, _ = jax.eval_shape(loop.step, run, config)
        assert jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), run) == jax.tree.map(
            lambda x: (x.shape, x.dtype, x.weak_type), after
        )


def test_configs_within_configs_are_swept_and_given_their_horizon():
    combined, cfg = COMBINE["teams"](*COMBINE["icm"](jmarl.ippo, PPO.replace(learning_rate_schedule="linear")))
    cfgs, axes = jmarl.sweep(cfg, **{"b.inner.learning_rate": [1e-3, 1e-4]})
    assert axes["b"].inner.learning_rate == 0 and axes["a"].inner.learning_rate is None
    assert cfgs["b"].inner.learning_rate.shape == (2,)
    loop = jmarl.on_policy(GAME, combined, num_envs=2, rollout_length=3)
    filled = jmarl.training.with_horizon(loop, cfg, 7)
    assert filled["a"].inner.horizon == filled["b"].horizon == 7


def test_the_state_of_a_combination_is_taken_apart():
    combined, cfg = COMBINE["teams"](*COMBINE["rnd"](jmarl.ippo, PPO.replace(normalize_value=True)))
    state = combined(GAME.spec, cfg).init(jax.random.key(0))
    inner = combinators.part(combinators.part(state, "a"), "inner")
    assert sorted(inner.moments) == ["value"] and sorted(inner.params) == ["actor", "critic"]
