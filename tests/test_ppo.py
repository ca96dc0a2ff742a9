"""PPO: what acting recorded, masks, schedules, stops, optimisers; and that it solves games with known answers."""

import dataclasses

import compiled
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmarl
from jmarl import envs, evaluation, training
from jmarl.learners import ppo
from jmarl.networks import actor_critic
from jmarl.types import EnvSpec, Moments, Observation, Trajectory

SMALL = jmarl.PPOConfig(hidden_sizes=(16,), cell_size=8, num_epochs=2, num_minibatches=2, learning_rate=1e-2)
PAYOFF = [[8.0, -12.0, -12.0], [-12.0, 0.0, 0.0], [-12.0, 0.0, 6.0]]


def collect(env, cfg, *, num_envs=4, length=8, algorithm=jmarl.ippo, seed=0):
    learner = algorithm(env.spec, cfg)

    def first_rollout(key):
        run = training.start(env, learner, key, num_envs=num_envs)
        return training.rollout(env, learner, run, length=length)

    run, batch, _ = jax.jit(first_rollout)(jax.random.key(seed))
    return learner._replace(update=jax.jit(learner.update)), run, batch


def rng_observation(spec, key, batch_shape, alive=None):
    keys = jax.random.split(key, 2)
    n = spec.num_agents
    return Observation(
        agents=jax.random.normal(keys[0], (*batch_shape, n, *spec.obs_shape)),
        state=jax.random.normal(keys[1], (*batch_shape, *spec.state_shape)),
        action_mask=jnp.ones((*batch_shape, n, spec.num_actions), bool) if spec.is_discrete else None,
        agent_mask=jnp.ones((*batch_shape, n), bool) if alive is None else alive,
    )


SPECS = {
    "discrete": EnvSpec("d", ("a", "b"), (5,), (7,), num_actions=3, obs_sizes=(5, 4), action_sizes=(3, 2)),
    "continuous": EnvSpec(
        "c",
        ("a", "b"),
        (5,),
        (7,),
        action_size=2,
        action_low=((0.0, -1.0),) * 2,
        action_high=((1.0, 3.0),) * 2,
        obs_sizes=(5, 5),
        action_sizes=(2, 1),
    ),
}


def made_up_targets(learner, spec, key, length=3, batch=6):
    """A state, and a `Trajectory` and targets for `ppo_loss`, with random contents and one agent dead in some rows."""
    keys = jax.random.split(key, 6)
    shape = (length, batch, spec.num_agents)
    alive = jax.random.bernoulli(keys[0], 0.7, shape)
    obs = rng_observation(spec, keys[1], (length, batch), alive)
    state = learner.init(keys[2])
    rows = lambda x: x.reshape(-1, *x.shape[2:])  # noqa: E731
    flat = jax.tree.map(rows, obs)
    carry = learner.init_carry((length * batch,))
    action, _, measured = learner.act(state, carry, flat, jnp.zeros(length * batch, bool), keys[3])
    unflat = lambda x: x.reshape(length, batch, *x.shape[1:])  # noqa: E731
    targets = jmarl.PPOTargets(
        log_prob=unflat(measured["log_prob"]) + 0.1 * jax.random.normal(keys[4], shape),
        value=unflat(measured["value"]),
        advantage=jax.random.normal(keys[4], shape),
        value_target=jax.random.normal(keys[5], shape),
    )
    steps = jmarl.types.Transition(
        obs=obs,
        first=jnp.zeros((length, batch), bool),
        action=unflat(action),
        reward=jnp.zeros(shape),
        terminated=jnp.zeros(shape, bool),
        last=jnp.zeros((length, batch), bool),
    )
    return state, Trajectory(steps=steps, carry=learner.init_carry((batch,))), targets


CONFIGS = {
    "mlp": {},
    "gru": {"recurrent": True},
    "lstm": {"recurrent": True, "cell": "lstm"},
    "per_agent": {"sharing": "per_agent"},
    "per_group": {"sharing": "per_group", "recurrent": True},
    "state": {"critic_view": "state"},
    "state_id": {"critic_view": "state_id", "sharing": "per_agent"},
    "state_obs": {"critic_view": "state_obs"},
    "torso": {"shared_torso": True, "recurrent": True, "head_sizes": (8,)},
}


@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("kind", SPECS)
def test_every_parameter_has_a_gradient_and_dead_agents_have_no_say(kind, options):
    spec, cfg = SPECS[kind], SMALL.replace(**options)
    learner, nets = jmarl.ippo(spec, cfg), ppo.default_policy(spec, cfg)
    state, batch, targets = jax.jit(lambda key: made_up_targets(learner, spec, key))(jax.random.key(0))
    # Perturbed, since policies start almost uniform: the output layer's kernel is close to zero.
    params = jax.tree.map(lambda p: p + 0.1 * jnp.cos(jnp.arange(p.size, dtype=p.dtype)).reshape(p.shape), state.params)
    grad = jax.jit(jax.value_and_grad(lambda p, b, t: ppo.ppo_loss(p, b, t, nets=nets, cfg=cfg)[0]))
    loss, grads = grad(params, batch, targets)
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        assert np.all(np.isfinite(leaf)) and np.abs(leaf).max() > 0, jax.tree_util.keystr(path)

    # Whatever a dead agent saw, did or was promised changes nothing. A shared state is what others see, too.
    dead = ~batch.steps.obs.agent_mask
    spoil = lambda x: jnp.where(dead.reshape(dead.shape + (1,) * (x.ndim - 3)), x * 3 + 1, x)  # noqa: E731
    steps = batch.steps
    obs = steps.obs
    if not cfg.recurrent:  # a memory is of one's own: after death it is as spoilt as what it was made of
        obs = obs.replace(agents=spoil(obs.agents))
    action = jnp.where(dead, 0, steps.action) if spec.is_discrete else spoil(steps.action)
    other = batch.replace(steps=steps.replace(obs=obs, action=action))
    other_loss, other_grads = grad(params, other, jax.tree.map(spoil, targets))
    np.testing.assert_allclose(loss, other_loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), grads, other_grads)


def test_nobody_alive_gives_no_loss_and_no_gradient():
    spec, cfg = SPECS["discrete"], SMALL
    learner, nets = jmarl.ippo(spec, cfg), ppo.default_policy(spec, cfg)

    @jax.jit
    def loss_and_grads(key):
        state, batch, targets = made_up_targets(learner, spec, key)
        obs = batch.steps.obs.replace(agent_mask=jnp.zeros_like(batch.steps.obs.agent_mask))
        batch = batch.replace(steps=batch.steps.replace(obs=obs))
        return jax.value_and_grad(lambda p: ppo.ppo_loss(p, batch, targets, nets=nets, cfg=cfg)[0])(state.params)

    loss, grads = loss_and_grads(jax.random.key(0))
    assert loss == 0
    assert all(np.all(np.asarray(g) == 0) for g in jax.tree.leaves(grads))


def test_padded_action_dimensions_do_not_matter():
    spec = SPECS["continuous"]  # the second agent has one dimension, padded to two
    _, distribution = actor_critic.policy_output(spec, actor_critic.from_config(SMALL)[1], "gaussian")
    shape = (2, 2)
    one, other = ((jnp.full(shape, x), jnp.full(shape, y)) for x, y in ((0.3, 0.1), (0.7, 0.4)))
    mixed = jax.tree.map(lambda a, b: a.at[1, 1].set(b[1, 1]), one, other)
    action = jnp.array([[0.5, 0.5], [0.5, 2.0]])
    for f in (lambda pi: pi.log_prob(action), lambda pi: pi.entropy(), lambda pi: pi.mode()):
        np.testing.assert_array_equal(f(distribution(one, None)), f(distribution(mixed, None)))


@pytest.mark.parametrize("options", [{}, {"recurrent": True}, {"shared_torso": True, "recurrent": True}], ids=str)
def test_unrolling_the_rollout_gives_what_acting_recorded(options):
    """PPO's ratio is 1 before the first update, with episode ends inside the rollout."""
    env, cfg = envs.matrix_game(PAYOFF, num_steps=3), SMALL.replace(**options)
    _, run, batch = collect(env, cfg)
    assert batch.steps.last[:-1].any()
    nets, steps = ppo.default_policy(env.spec, cfg), batch.steps
    log_prob, _, value = nets.evaluate(run.train_state.params, batch.carry, steps.obs, steps.first, steps.action)
    np.testing.assert_allclose(log_prob, steps.measured["log_prob"], atol=1e-5)
    np.testing.assert_allclose(value, steps.measured["value"], atol=1e-5)
    assert jax.tree.structure(batch.next_carry) == jax.tree.structure(steps.carry)
    jax.tree.map(np.testing.assert_array_equal, batch.next_carry, run.carry)


def test_first_minibatch_of_sequences_has_ratio_one():
    """Sequences cut out of the middle of a rollout start from the carry that acting had there."""
    env = envs.matrix_game(PAYOFF, num_steps=3)
    cfg = SMALL.replace(recurrent=True, recurrent_length=4, num_epochs=1, num_minibatches=1, gae_lambda=0.9)
    learner, run, batch = collect(env, cfg)
    _, metrics = learner.update(run.train_state, batch, jax.random.key(1))
    assert abs(metrics["policy/approx_kl"]) < 1e-6
    assert metrics["policy/clip_fraction"] == 0


def test_time_limits_bootstrap_and_terminations_do_not():
    """A constant reward 1, cut after k steps: with bootstrap V = 1 / (1 - γ), as a termination it is a finite sum."""
    gamma, k = 0.5, 2
    values = {}
    for time_limit in ("truncated", "terminal"):
        env = envs.probe("time_limit", num_steps=k)
        if time_limit == "terminal":
            env = env._replace(step=terminal(env.step))
        cfg = SMALL.replace(gamma=gamma, normalize_advantage="none", learning_rate=5e-2)
        loop = jmarl.on_policy(env, jmarl.ippo, num_envs=4, rollout_length=4)
        learner = jmarl.ippo(env.spec, cfg)

        @jax.jit
        def learnt(key, loop=loop, cfg=cfg, learner=learner):
            run, _ = jmarl.make_train(loop, 60)(key, cfg)
            _, _, measured = learner.act(run.train_state, run.carry, run.obs, run.first, key)
            return measured["value"].mean()

        values[time_limit] = float(learnt(jax.random.key(0)))
    assert values["truncated"] == pytest.approx(1 / (1 - gamma), abs=0.05)
    assert 1 < values["terminal"] < 1.6  # between 1 (last step) and 1 + γ (first)


def terminal(step):
    """Counts time limits as terminations."""

    def changed(state, action, key):
        state, obs, outcome = step(state, action, key)
        return state, obs, outcome.replace(terminated=jnp.broadcast_to(outcome.last, outcome.terminated.shape))

    return changed


@pytest.mark.parametrize("algorithm", [jmarl.ippo, jmarl.mappo])
def test_finds_the_best_joint_action_of_a_coordination_game(algorithm):
    env, cfg = envs.matrix_game([[1.0, 0.0], [0.0, 2.0]]), SMALL
    loop = jmarl.on_policy(env, algorithm, num_envs=16, rollout_length=8)
    run, _ = jax.jit(jmarl.make_train(loop, 40))(jax.random.key(0), cfg)
    metrics = compiled.evaluate(env, algorithm(env.spec, cfg), run.train_state, jax.random.key(1), num_episodes=4)
    assert metrics["eval/return_mean"] == 2.0


@pytest.mark.parametrize("recurrent", [True, False])
def test_only_a_recurrent_policy_remembers_the_cue(recurrent):
    env = envs.probe("memory", num_agents=2, num_steps=3)
    cfg = SMALL.replace(recurrent=recurrent, num_minibatches=1, num_epochs=4, learning_rate=2e-2)
    loop = jmarl.on_policy(env, jmarl.ippo, num_envs=32, rollout_length=12)
    run, _ = jax.jit(jmarl.make_train(loop, 40))(jax.random.key(0), cfg)
    metrics = compiled.evaluate(env, jmarl.ippo(env.spec, cfg), run.train_state, jax.random.key(1), num_episodes=64)
    if recurrent:
        assert metrics["eval/return_mean"] == 1.0
    else:
        assert abs(metrics["eval/return_mean"]) < 0.5  # a guess


@pytest.mark.parametrize("name", ["gaussian", "tanh_normal"])
def test_continuous_policy_finds_the_target(name):
    env = envs.probe("continuous", num_agents=2)
    cfg = SMALL.replace(action_distribution=name, ent_coef=0.0, learning_rate=1e-2)
    loop = jmarl.on_policy(env, jmarl.ippo, num_envs=64, rollout_length=4)
    run, _ = jax.jit(jmarl.make_train(loop, 60))(jax.random.key(0), cfg)
    metrics = compiled.evaluate(env, jmarl.ippo(env.spec, cfg), run.train_state, jax.random.key(1), num_episodes=16)
    assert metrics["eval/return_mean"] > -0.01


def test_schedules_end_with_the_run():
    env = envs.matrix_game(PAYOFF)
    loop = jmarl.on_policy(env, jmarl.ippo, num_envs=4, rollout_length=4)
    cfg = SMALL.replace(learning_rate_schedule="linear", learning_rate_end=0.5)
    _, metrics = jax.jit(jmarl.make_train(loop, 4))(jax.random.key(0), cfg)
    rate = np.asarray(metrics["learning_rate"]) / 1e-2
    np.testing.assert_allclose(rate, [0.875, 0.75, 0.625, 0.5], rtol=1e-6)


def test_target_kl_stops_the_iteration():
    env = envs.matrix_game(PAYOFF)
    learner, run, batch = collect(env, SMALL.replace(target_kl=jnp.array(-1.0)))  # exceeded before the first step
    state, _ = learner.update(run.train_state, batch, jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, state.params, run.train_state.params)

    def unfused(cfg):  # two programs: where operations are fused, they round in two ways
        update = jax.jit(jmarl.ippo(env.spec, cfg).update).lower(run.train_state, batch, jax.random.key(0))
        return update.compile(compiler_options={"xla_disable_hlo_passes": "fusion"})

    state, never = (
        unfused(SMALL.replace(target_kl=target_kl))(run.train_state, batch, jax.random.key(0))[0]
        for target_kl in (1e9, None)
    )
    jax.tree.map(np.testing.assert_array_equal, state.params, never.params)


def test_schedules_go_on_where_target_kl_stopped_an_iteration():
    env = envs.matrix_game(PAYOFF)
    cfg = SMALL.replace(target_kl=jnp.array(-1.0), learning_rate_schedule="linear", horizon=2)
    learner, run, batch = collect(env, cfg)
    state, metrics = learner.update(run.train_state, batch, jax.random.key(0))
    assert int(state.step) == 4 and float(metrics["learning_rate"]) == pytest.approx(cfg.learning_rate / 2)
    counts = {str(path): int(x) for path, x in jax.tree_util.tree_leaves_with_path(state.opt_state) if x.ndim == 0}
    assert sorted(counts.values()) == [0, 4]  # Adam's, which has seen nothing, and the schedule's


@pytest.mark.parametrize("clip_separately", [False, True])
def test_the_critic_can_have_a_rate_of_its_own(clip_separately):
    env = envs.matrix_game(PAYOFF)
    cfg = SMALL.replace(critic_learning_rate=0.0, clip_separately=clip_separately)
    learner, run, batch = collect(env, cfg)
    state, _ = learner.update(run.train_state, batch, jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, state.params["critic"], run.train_state.params["critic"])
    assert any(
        not np.array_equal(a, b)
        for a, b in zip(*map(jax.tree.leaves, (state.params["actor"], run.train_state.params["actor"])), strict=True)
    )


SEEN = Moments(mean=jnp.float32(3.0), variance=jnp.float32(4.0), weight=jnp.float32(1.0))
ONE_STEP = SMALL.replace(num_epochs=1, num_minibatches=1)


def test_value_normalisation_leaves_advantages_in_units_of_reward():
    """Scaling rewards by 100 changes neither the policy gradient nor what a normalised critic learns."""
    cfg = SMALL.replace(normalize_value=True, value_norm_beta=0.5)
    learner, run, batch = collect(envs.probe("time_limit", num_steps=3), cfg)
    large = batch.replace(steps=batch.steps.replace(reward=100 * batch.steps.reward))
    seen_large = SEEN.replace(mean=100 * SEEN.mean, variance=1e4 * SEEN.variance)
    state, _ = learner.update(run.train_state.replace(moments={"value": SEEN}), batch, jax.random.key(0))
    scaled, _ = learner.update(run.train_state.replace(moments={"value": seen_large}), large, jax.random.key(0))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5), state.params, scaled.params)


def test_the_first_step_finds_nothing_to_clip():
    """Values and log-probabilities are compared with what was recorded: equal before anything is learnt."""
    env = envs.probe("time_limit", num_steps=3)
    learner, run, batch = collect(env, ONE_STEP.replace(normalize_value=True, value_norm_beta=0.1))
    clipped, *_ = collect(env, ONE_STEP.replace(normalize_value=True, value_norm_beta=0.1, value_clip_eps=0.01))
    batch = batch.replace(steps=batch.steps.replace(reward=50 * batch.steps.reward))  # moves the statistics far
    state, _ = learner.update(run.train_state, batch, jax.random.key(0))
    same, _ = clipped.update(run.train_state, batch, jax.random.key(0))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7), state.params, same.params)


@pytest.mark.parametrize("distribution", ["gaussian", "tanh_normal"])
def test_the_first_ratio_is_one_where_actions_are_at_their_bounds(distribution):
    env = envs.probe("continuous")
    learner = jmarl.ippo(env.spec, ONE_STEP.replace(action_distribution=distribution))
    run = compiled.start(env, learner, jax.random.key(0), num_envs=32)
    far = jax.tree.map(lambda p: p + 10.0 * (p.ndim == 1), run.train_state.params["actor"])  # biases
    run = run.replace(train_state=run.train_state.replace(params={**run.train_state.params, "actor": far}))
    run, batch, _ = compiled.rollout(env, learner, run, length=2)
    _, metrics = jax.jit(learner.update)(run.train_state, batch, jax.random.key(0))
    assert metrics["policy/clip_fraction"] == 0 and abs(metrics["policy/approx_kl"]) < 1e-6


@pytest.mark.parametrize("recurrent", [False, True])
def test_targets_match_a_loop_over_steps(recurrent):
    """With statistics that have seen much, episodes that are cut off on the way, and a memory of it."""
    env = envs.probe("time_limit", num_steps=3)
    cfg = ONE_STEP.replace(normalize_value=True, value_norm_beta=0.5, recurrent=recurrent, gamma=0.9, gae_lambda=0.8)
    learner, run, batch = collect(env, cfg)
    steps, nets = batch.steps, ppo.default_policy(env.spec, cfg)
    carries = jax.tree.map(lambda x, y: jnp.concatenate([x, y[None]]), steps.carry, batch.next_carry)
    state = run.train_state.replace(moments={"value": SEEN})
    value, reward, advantage = (np.zeros((8, 4, 1)) for _ in range(3))
    after = np.zeros((4, 1))
    for t in reversed(range(8)):
        now, carry = jax.tree.map(lambda x, t=t: x[t], steps), jax.tree.map(lambda x, t=t: x[t + 1], carries)
        *_, next_measured = nets.sample(state.params, carry, now.next_obs, jnp.zeros(4, bool), jax.random.key(0))
        value[t], next_value = (3.0 + 2.0 * np.asarray(x["value"], float) for x in (now.measured, next_measured))
        reward[t], last = now.reward, np.asarray(now.last)[:, None]
        error = reward[t] + 0.9 * (1.0 - np.asarray(now.terminated)) * next_value - value[t]
        after = error + 0.9 * 0.8 * (1.0 - last) * after
        advantage[t] = after
    assert np.asarray(steps.last[:-1]).any() and not np.asarray(steps.terminated).all()
    target = advantage + value
    mean = (3.0 + target.mean()) / 2
    variance = (4.0 + 3.0**2 + (target**2).mean()) / 2 - mean**2
    state, metrics = learner.update(state, batch, jax.random.key(0))
    np.testing.assert_allclose(state.moments["value"].mean, mean, rtol=1e-5)
    np.testing.assert_allclose(state.moments["value"].variance, variance, rtol=1e-4)
    loss = np.mean((np.asarray(steps.measured["value"]) - (target - mean) / np.sqrt(variance)) ** 2)
    np.testing.assert_allclose(metrics["loss/critic"], loss, rtol=1e-4)
    np.testing.assert_allclose(
        metrics["value/explained_variance"], 1 - np.var(target - value) / np.var(target), rtol=1e-3, atol=1e-5
    )


def test_advantages_can_be_normalised_for_each_agent():
    spec, cfg = SPECS["discrete"], SMALL.replace(normalize_advantage="agent")
    learner, nets = jmarl.ippo(spec, cfg), ppo.default_policy(spec, cfg)
    state, batch, targets = made_up_targets(learner, spec, jax.random.key(0))
    alive = np.asarray(batch.steps.obs.agent_mask)
    scaled = np.asarray(targets.advantage) * [1.0, 1000.0] + [0.0, 5.0]
    by_hand = np.stack([(x - x[m].mean()) / x[m].std() for x, m in zip(scaled.T, alive.T, strict=True)]).T

    def loss(advantage, kind):
        given = targets.replace(advantage=jnp.asarray(advantage, jnp.float32))
        return ppo.ppo_loss(state.params, batch, given, nets=nets, cfg=cfg.replace(normalize_advantage=kind))[0]

    np.testing.assert_allclose(loss(scaled, "agent"), loss(by_hand, "none"), rtol=1e-4)


BAD = {
    "normalize_advantage='some' is unknown": {"normalize_advantage": "some"},
    "activation='tahn' is unknown": {"activation": "tahn"},
    "sharing='each' is unknown": {"sharing": "each"},
    "critic_view='all' is unknown": {"critic_view": "all"},
    "num_epochs=0 must be at least 1": {"num_epochs": 0},
    "num_minibatches=-1 must be at least 1": {"num_minibatches": -1},
    "hidden_sizes=\\(0,\\) must hold positive widths": {"hidden_sizes": (0,)},
    "shared_torso=True needs critic_view='obs'": {"shared_torso": True, "critic_view": "state"},
    "shared_torso=True has one optimiser": {"shared_torso": True, "clip_separately": True},
    "action_distribution='gaussian' does not fit the discrete actions": {"action_distribution": "gaussian"},
    "learning_rate_end=0.0 must be positive": {"learning_rate_schedule": "exponential"},
    "ent_coef=0.0 must be positive": {"ent_coef": 0.0, "ent_coef_end": 0.1, "ent_coef_schedule": "exponential"},
    "learning_rate_schedule='linaer' is unknown here: choose one of constant": {"learning_rate_schedule": "linaer"},
    "gamma=99 must lie in": {"gamma": 99},
    "clip_eps=-1.0 must not be negative": {"clip_eps": -1.0},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_configs_are_refused_in_one_sentence(message):
    with pytest.raises(ValueError, match=message):
        jmarl.ippo(SPECS["discrete"], dataclasses.replace(SMALL, **BAD[message]))


def test_what_the_critic_reads_is_never_another_thing_than_asked_for():
    spec = SPECS["discrete"]
    shapes = lambda learner: jax.tree.map(jnp.shape, learner.init(jax.random.key(0)).params)  # noqa: E731
    assert shapes(jmarl.mappo(spec, SMALL)) == shapes(jmarl.ippo(spec, SMALL.replace(critic_view="state")))
    assert shapes(jmarl.ippo(spec, SMALL)) == shapes(jmarl.ippo(spec, SMALL.replace(critic_view="obs")))
    with pytest.raises(ValueError, match="critic_view='obs' makes ippo of mappo"):
        jmarl.mappo(spec, SMALL.replace(critic_view="obs"))
    with pytest.raises(ValueError, match="critic_view='obs' makes ia2c of maa2c"):
        jmarl.maa2c(spec, jmarl.A2CConfig(critic_view="obs"))


def test_a_schedule_without_an_end_serves_to_act_but_not_to_learn():
    env = envs.matrix_game(PAYOFF)
    learner, run, batch = collect(env, SMALL.replace(learning_rate_schedule="linear"))
    evaluation.evaluate(env, learner, run.train_state, jax.random.key(0), num_episodes=2)
    with pytest.raises(ValueError, match="learning_rate_schedule='linear' needs horizon"):
        learner.update(run.train_state, batch, jax.random.key(0))


def test_what_an_update_cannot_use_is_refused():
    env = envs.matrix_game(PAYOFF)
    _, run, batch = collect(env, SMALL)
    with pytest.raises(ValueError, match="recurrent_length=4 is of recurrent networks: set recurrent=True"):
        jmarl.ippo(env.spec, SMALL.replace(recurrent_length=4)).update(run.train_state, batch, jax.random.key(0))


def test_sequences_that_do_not_divide_are_refused():
    env = envs.matrix_game(PAYOFF)
    with pytest.raises(ValueError, match=r"recurrent_length=3 must divide the rollout of 8 steps.*\[1, 2, 4, 8\]"):
        learner, run, batch = collect(env, SMALL.replace(recurrent=True, recurrent_length=3))
        learner.update(run.train_state, batch, jax.random.key(0))
    with pytest.raises(ValueError, match="num_minibatches=3 must divide the 4 sequences"):
        learner, run, batch = collect(env, SMALL.replace(recurrent=True, num_minibatches=3))
        learner.update(run.train_state, batch, jax.random.key(0))


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"action_low": ((-np.inf,) * 2,) * 2}, {}, "c has no finite action bounds, but .*: give some to its spec"),
        ({"action_low": None}, {}, "c has no finite action bounds, but None to"),
        ({"state_shape": (0,)}, {"critic_view": "state_id"}, r"c has state_shape=\(0,\): use independent ones"),
        (
            {"obs_shape": (4, 4, 2), "obs_sizes": ()},
            {"critic_view": "state_obs"},
            "read vectors here, but c has images",
        ),
    ],
)
def test_specs_that_networks_cannot_read_are_refused(changes, options, message):
    with pytest.raises(ValueError, match=message):
        jmarl.ippo(SPECS["continuous"]._replace(**changes), SMALL.replace(**options))


# --------------------------------------------------------------------------------------------------------- V-trace


def vtrace_by_hand(ratio, reward, discount, value, next_value, last, lambda_, max_rho, max_c):
    """Espeholt et al., 2018, eq. 1 as a sum over what follows, and r + γ v' - V without a weight."""
    length = len(reward)
    target, advantage = np.zeros_like(reward), np.zeros_like(reward)
    for s in range(length):
        total, weight = 0.0, np.ones_like(reward[0])
        for t in range(s, length):
            rho = np.minimum(max_rho, ratio[t])
            total = total + weight * rho * (reward[t] + discount[t] * next_value[t] - value[t])
            weight = weight * discount[t] * lambda_ * np.minimum(max_c, ratio[t]) * ~last[t]
        target[s] = value[s] + total
    for s in range(length):
        goes_on = ~last[s] if s + 1 < length else np.zeros_like(last[s])
        following = np.where(goes_on, target[min(s + 1, length - 1)], next_value[s])
        advantage[s] = reward[s] + discount[s] * following - value[s]
    return target, advantage


VTRACE = {"advantage": "vtrace", "gae_lambda": 0.9, "gamma": 0.8, "normalize_advantage": "none"}


def moved(params):
    """Parameters of a policy that has learnt something since."""
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(7), len(leaves))
    noisy = [x + 0.3 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(structure, noisy)


def test_vtrace_targets_of_a_policy_that_has_moved_as_by_hand():
    env = envs.matrix_game(PAYOFF, num_steps=3)
    cfg = SMALL.replace(**VTRACE, max_rho=0.9, max_c=0.7)
    _, run, batch = collect(env, cfg)
    nets, steps = ppo.default_policy(env.spec, cfg), batch.steps
    params = moved(run.train_state.params)
    evaluate = jax.jit(nets.evaluate)
    log_prob, _, value = evaluate(params, batch.carry, steps.obs, steps.first, steps.action)
    _, _, next_value = evaluate(params, batch.carry, steps.next_obs, steps.first, steps.action)
    ratio = np.exp(np.asarray(log_prob - steps.measured["log_prob"]))
    assert (ratio > 0.9).any() and (ratio < 0.7).any() and np.asarray(steps.last)[:-1].any()
    last = np.broadcast_to(np.asarray(steps.last)[..., None], ratio.shape)
    arrays = [np.asarray(x) for x in (steps.reward, 0.8 * (1.0 - steps.terminated), value, next_value)]
    target, advantage = vtrace_by_hand(ratio, *arrays, last, 0.9, 0.9, 0.7)
    made, _, _ = jax.jit(lambda params: jmarl.ppo_targets(params, batch, nets=nets, cfg=cfg))(params)
    np.testing.assert_allclose(made.value_target, target, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(made.advantage, advantage, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(made.log_prob, steps.measured["log_prob"])  # the surrogate's ratio is to what acted
    np.testing.assert_allclose(made.value, value, rtol=1e-5)


def updated(env, cfg, times=1, seed=1):
    learner, run, batch = collect(env, cfg)
    state, update = run.train_state, jax.jit(learner.update)
    for _ in range(times):
        state, _ = update(state, batch, jax.random.key(seed))
    return state


def test_vtrace_without_lambda_is_gae_until_the_policy_moves_and_is_made_anew_for_each_pass():
    env = envs.matrix_game(PAYOFF, num_steps=3)
    steady = {"learning_rate": 0.3, "adam_eps": 0.1}
    once = SMALL.replace(**{**VTRACE, **steady, "gae_lambda": 1.0, "num_epochs": 1, "num_minibatches": 1})
    vtrace, gae = updated(env, once), updated(env, once.replace(advantage="gae"))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), vtrace.params, gae.params)
    # Two passes are two updates of one, since nothing but the parameters is carried from one to the other.
    twice, in_turn = updated(env, once.replace(num_epochs=2)), updated(env, once, times=2)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), twice.params, in_turn.params)
    assert int(twice.step) == 2
    kept = updated(env, once.replace(num_epochs=2, advantage="gae"))
    gaps = jax.tree.map(lambda x, y: float(jnp.abs(x - y).max()), twice.params, kept.params)
    assert max(jax.tree.leaves(gaps)) > 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"advantage": "retrace"}, "advantage='retrace' is unknown here: choose one of gae, vtrace"),
        ({"advantage": "vtrace", "max_rho": 0.0}, "max_rho=0.0 must be positive"),
    ],
)
def test_unknown_advantages_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        jmarl.ippo(SPECS["discrete"], SMALL.replace(**options))
