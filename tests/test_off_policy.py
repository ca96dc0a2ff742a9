"""The off-policy loop, and games that the value-based learners must solve with it."""

import compiled
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmarl
from jmarl import PQNConfig, QConfig, QMIXConfig, VDNConfig, WQMIXConfig, buffers, envs, networks, training
from jmarl.learners import pqn, q_learning, wqmix
from jmarl.types import Env, EnvSpec, Outcome, zero_observation

CLIMBING = envs.matrix_game([[8.0, -12.0, -12.0], [-12.0, 0.0, 0.0], [-12.0, 0.0, 0.0]])
SMALL = VDNConfig(hidden_sizes=(8,), learning_rate=1e-3)


def small_loop(algorithm=jmarl.vdn, env=CLIMBING, buffer=None, **options):
    options = {"num_envs": 4, "rollout_length": 2, "warmup_steps": 20, "num_updates": 2} | options
    return jmarl.off_policy(env, algorithm, buffer=buffer or buffers.uniform(64, 8), **options)


# ------------------------------------------------------------------------------------------------------------ the loop


def test_warm_up_is_collected_before_the_first_update():
    run = jax.jit(small_loop().init)(jax.random.key(0), SMALL)
    assert int(run.env_steps) == 24  # three rounds of eight: the first that reach 20
    assert int(run.train_state.step) == 0 and int(run.buffer.count) == 24


def test_each_iteration_collects_once_and_learns_as_often_as_asked():
    loop = small_loop()
    run, metrics = jax.jit(jmarl.make_train(loop, 3))(jax.random.key(0), SMALL)
    assert int(run.env_steps) == 24 + 3 * 8 and int(run.train_state.step) == 3 * 2
    assert int(run.buffer.count) == 48 and all(x.shape == (3,) for x in metrics.values())
    assert loop.env_steps_per_iteration == 8 and loop.updates_per_iteration == 2


def test_schedules_end_with_the_run():
    cfg = SMALL.replace(learning_rate_schedule="linear", learning_rate_end=0.5)
    _, metrics = jax.jit(jmarl.make_train(small_loop(), 4))(jax.random.key(0), cfg)
    assert float(metrics["learning_rate"][-1]) == pytest.approx(1e-3 * (1 - 0.5 * 7.5 / 8))  # the mean of the last two


def test_step_traces_once():
    loop, cfg = small_loop(jmarl.qmix), QMIXConfig(hidden_sizes=(8,))
    run = jax.jit(loop.init)(jax.random.key(0), cfg)
    traces = []

    @jax.jit
    def step(run):
        traces.append(1)
        return loop.step(run, cfg)[0]

    for _ in range(4):
        run = step(run)
    assert len(traces) == 1
    before, after = jax.eval_shape(lambda run: run, run), jax.eval_shape(step, run)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), before) == jax.tree.map(lambda x: (x.shape, x.dtype), after)


def test_seeds_side_by_side_equal_seeds_alone_and_differ():
    train = jmarl.make_train(small_loop(), 3)
    keys = jax.random.split(jax.random.key(0), 2)
    together, _ = jax.jit(jax.vmap(train, (0, None)))(keys, SMALL)
    alone, _ = jax.jit(train)(keys[1], SMALL)
    for x, y in zip(
        jax.tree.leaves(together.train_state.params), jax.tree.leaves(alone.train_state.params), strict=True
    ):
        np.testing.assert_allclose(x[1], y, rtol=1e-5, atol=1e-6)
    assert (together.buffer.steps.action[0] != together.buffer.steps.action[1]).any()


def primitives_over(shape, jaxpr):
    """Names of all primitives that put out an array of this shape, inner jaxprs included."""
    for equation in jaxpr.eqns:
        if any(getattr(out.aval, "shape", None) == shape for out in equation.outvars):
            yield equation.primitive.name
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from primitives_over(shape, inner)


@pytest.mark.parametrize("make_buffer", [buffers.uniform, buffers.prioritized])
def test_no_select_over_the_buffer_under_vmap(make_buffer):
    loop = small_loop(buffer=make_buffer(61, 8))
    keys = jax.random.split(jax.random.key(0), 3)
    runs = jax.eval_shape(jax.vmap(lambda key: loop.init(key, SMALL)), keys)
    jaxpr = jax.make_jaxpr(jax.vmap(lambda run: loop.step(run, SMALL)))(runs).jaxpr
    found = set(primitives_over((3, 61, 1, 2), jaxpr))  # actions of every sequence
    assert "scatter" in found and not found & {"select_n", "cond", "copy"}, found


def test_prioritized_replay_learns_and_remembers_errors():
    loop = small_loop(buffer=buffers.prioritized(64, 8))
    run, metrics = jax.jit(jmarl.make_train(loop, 5))(jax.random.key(0), SMALL)
    priority = run.buffer.priority.shares[: int(run.buffer.count)]
    assert len(np.unique(priority)) > 3 and (priority > 0).all() and np.isfinite(metrics["loss/td"]).all()
    assert "priority" not in metrics


def test_a_sweep_over_learning_rates_is_one_trace_and_equals_single_runs():
    train = jmarl.make_train(small_loop(), 2)
    traces = []

    def counted(key, cfg):
        traces.append(1)
        return train(key, cfg)[0].train_state.params

    cfgs, axes = jmarl.sweep(SMALL, learning_rate=[1e-3, 1e-2])
    swept = jax.jit(jax.vmap(counted, (None, axes)))(jax.random.key(0), cfgs)
    alone = jax.jit(train)(jax.random.key(0), SMALL.replace(learning_rate=1e-2))[0].train_state.params
    assert len(traces) == 1
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x[1], y, rtol=1e-5, atol=1e-6), swept, alone)


def test_run_says_what_the_replay_takes_and_refuses_what_does_not_fit(capsys):
    loop = small_loop()
    jmarl.run(loop, jax.random.key(0), SMALL, num_iterations=1, num_seeds=2)
    assert "Replay takes" in capsys.readouterr().out
    huge = small_loop(buffer=buffers.uniform(2**29, 8))
    with pytest.raises(ValueError, match=r"Replay of 2 seeds takes .* GiB, .* has .*: lower the buffer's capacity"):
        jmarl.run(huge, jax.random.key(0), SMALL, num_iterations=1, num_seeds=2)


def test_environment_steps_are_counted_up_to_the_largest_number():
    """Beyond it they would be negative, and exploration would begin anew."""
    env = envs.probe("action")
    learner = jmarl.pqn_vdn(env.spec, PQNConfig(hidden_sizes=(4,)))
    run = compiled.start(env, learner, jax.random.key(0), num_envs=4)
    rollout = jax.jit(lambda run: training.rollout(env, learner, run, length=2)[0].env_steps)
    for before, after in ((2**31 - 4, 2**31 - 1), (2**31 - 1, 2**31 - 1), (100, 108)):
        there = run.replace(train_state=run.train_state.replace(env_steps=jnp.int32(before)))
        assert int(rollout(there)) == after


def test_loops_refuse_learners_of_the_other_kind():
    with pytest.raises(ValueError, match="vdn learns from replay: run it with off_policy and a buffer"):
        jmarl.on_policy(CLIMBING, jmarl.vdn, num_envs=2, rollout_length=2).init(jax.random.key(0), SMALL)
    with pytest.raises(ValueError, match="ippo learns from rollouts that it has just made: run it with on_policy"):
        small_loop(jmarl.ippo).init(jax.random.key(0), jmarl.PPOConfig())


def test_bad_loops():
    with pytest.raises(ValueError, match="num_resets=0 must be at least 1"):
        jax.eval_shape(small_loop(num_resets=0).init, jax.random.key(0), SMALL)
    with pytest.raises(ValueError, match=r"learning_rate=0\.001 is one value, and a sweep is over several"):
        jmarl.sweep(SMALL, learning_rate=1e-3)
    with pytest.raises(ValueError, match="num_updates=0 must be at least 1"):
        small_loop(num_updates=0)
    with pytest.raises(ValueError, match="warmup_steps=-1 must not be negative"):
        small_loop(warmup_steps=-1)
    with pytest.raises(ValueError, match="capacity=6 is smaller than one addition"):
        jax.eval_shape(small_loop(buffer=buffers.uniform(6, 2)).init, jax.random.key(0), SMALL)


# ---------------------------------------------------------------------------------------- games of known solution


def returns_after(loop, cfg, num_iterations, num_seeds=3):
    """Greedy return of each seed, averaged over agents."""

    def train(key):
        run, _ = jmarl.make_train(loop, num_iterations)(key, cfg)
        learner = loop.algorithm(loop.env.spec, cfg)
        return jmarl.evaluate(loop.env, learner, run.train_state, key, num_episodes=8)["eval/return_mean"]

    return np.asarray(jax.jit(jax.vmap(train))(jax.random.split(jax.random.key(0), num_seeds)))


@pytest.mark.parametrize("name", ["vdn", "qmix", "cw_qmix", "ow_qmix"])
def test_climbing_game(name):
    """With random actions VDN settles on the safe payoff 0, QMIX may; weighted QMIX finds the 8 behind the -12."""
    config_class = WQMIXConfig if name in ("cw_qmix", "ow_qmix") else {"vdn": VDNConfig, "qmix": QMIXConfig}[name]
    cfg = config_class(
        learning_rate=3e-3,
        hidden_sizes=(16,),
        target_update_interval=50,
        epsilon_end=1.0,
        team_reward="mean",
        **({} if name == "vdn" else {"mixer_embed_size": 4, "mixer_hypernet_sizes": (4,)}),
        **({"central_sizes": (16,)} if config_class is WQMIXConfig else {}),
    )
    loop = small_loop(getattr(jmarl, name), num_envs=16, rollout_length=1, buffer=buffers.uniform(500, 64))
    returns = returns_after(loop, cfg, 700)
    if name == "qmix":  # the best monotonic fit takes the 8 too, but not every seed finds that fit
        assert set(returns.tolist()) <= {0.0, 8.0} and returns.min() == 0.0
    else:
        assert (returns == (0.0 if name == "vdn" else 8.0)).all()


@pytest.mark.parametrize("name, payoff", [("vdn", 7.0), ("qmix", 8.0)])
def test_two_step_game(name, payoff):
    """No sum of the agents' values fits the payoffs behind the 8, so VDN goes for the 7."""
    common = {"learning_rate": 3e-3, "hidden_sizes": (32,), "target_update_interval": 50, "epsilon_end": 1.0}
    cfg = {
        "vdn": VDNConfig(**common, team_reward="mean"),
        "qmix": QMIXConfig(**common, team_reward="mean", mixer_embed_size=8, mixer_hypernet_sizes=()),
    }[name]
    loop = small_loop(getattr(jmarl, name), envs.two_step_game(), buffers.uniform(2000, 64), num_envs=16, num_updates=1)
    assert returns_after(loop, cfg, 1500).tolist() == [payoff] * 3


def test_memory_probe_needs_and_gets_memory():
    """The cue is seen on the first of four steps and asked for on the last."""
    env = envs.probe("memory", num_agents=2)
    cfg = QConfig(
        learning_rate=5e-3,
        hidden_sizes=(16,),
        recurrent=True,
        cell_size=16,
        epsilon_steps=2000,
        target_update_interval=20,
    )
    loop = small_loop(jmarl.iql, env, buffers.uniform(500, 32, 4), num_envs=8, rollout_length=4, num_updates=1)
    assert (returns_after(loop, cfg, 300) == 1.0).all()


def test_a_time_limit_bootstraps():
    """Reward 1 on each of 10 steps, then truncated: V = 1 / (1 - γ), also at the end."""
    env = envs.probe("time_limit")
    cfg = QConfig(learning_rate=1e-2, hidden_sizes=(8,), gamma=0.9, target_update_interval=10)
    loop = small_loop(jmarl.iql, env, buffers.uniform(200, 32))
    _, metrics = jax.jit(jmarl.make_train(loop, 400))(jax.random.key(0), cfg)
    assert float(metrics["value/q_taken"][-1]) == pytest.approx(10.0, rel=0.05)


# Who acts at each step. Both are trained on side by side; what follows an episode's end has the last step's mask.
TAKING_TURNS = [[True, False], [False, True], [True, False], [False, True]]
PAUSING = [[True, True], [False, False], [False, True], [False, False], [True, False]]
SCHEDULES = np.array([[*TAKING_TURNS, TAKING_TURNS[-1]], PAUSING]), np.array([len(TAKING_TURNS), len(PAUSING)])


def turns(acts, length):
    """Agent i acts at t where `acts[t][i]`, and waits elsewhere; both are paid 1 on the last step, whatever they do."""
    names = {"name": "turns", "agents": ("a", "b"), "num_actions": 2}
    spec = EnvSpec(**names, obs_shape=(5,), state_shape=(5,), max_steps=5, min_steps=4)

    def observe(t):
        view = jax.nn.one_hot(t, 5, dtype=jnp.float32)
        mask = acts[jnp.minimum(t, length - 1)]
        return zero_observation(spec).replace(agents=jnp.stack([view, view]), state=view, agent_mask=mask)

    def step(t, action, key):
        end = t == length - 1
        outcome = Outcome(reward=jnp.full(2, end, jnp.float32), terminated=jnp.full(2, end), last=end)
        return t + 1, observe(t + 1), outcome

    return Env(lambda key: (jnp.int32(0), observe(jnp.int32(0))), step, spec), jax.vmap(observe)(jnp.arange(5))


TABLE = {"gamma": 0.9, "hidden_sizes": (), "learning_rate": 3e-2, "max_grad_norm": None, "epsilon_schedule": "constant"}


def swept_values(loop_of, default_nets, cfg, num_iterations, lambdas):
    """Of each schedule what is right, who acts, and values and team values with each lambda, `[lambda, T, ..]`."""

    def values(key, cfg, acts, length):
        env, obs = turns(acts, length)
        nets = default_nets(env.spec, cfg)
        params = jmarl.make_train(loop_of(env), num_iterations)(key, cfg)[0].train_state.params
        views = jax.tree.map(lambda x: x[None], obs)
        q = nets.agent.apply(params["agent"], (), views, jnp.ones((1, len(obs.agents)), bool))[1]
        team = q[..., 0] if nets.mixer is None else nets.mixer.apply(params["mixer"], q, jnp.argmax(q, -1), views)
        return q[0], team[0]

    cfgs, axes = jmarl.sweep(cfg, lambda_=lambdas)
    learn = jax.vmap(jax.vmap(values, (None, axes, None, None)), (None, None, 0, 0))
    q, team = jax.tree.map(np.asarray, jax.jit(learn)(jax.random.key(0), cfgs, *SCHEDULES))
    for i, (acts, length) in enumerate(zip(*SCHEDULES, strict=True)):
        yield 0.9 ** np.arange(length)[::-1], acts[:length], q[i, :, :length], team[i, :, :length]


@pytest.mark.parametrize(
    "returns, length, lambdas", [("td", 1, [0.8]), ("peng", 5, [0.0, 0.5, 1.0]), ("harutyunyan", 5, [0.0, 0.5, 1.0])]
)
def test_waiting_ends_no_return_of_independent_learners(returns, length, lambdas):
    cfg = QConfig(**TABLE, sharing="per_agent", returns=returns, target_update_interval=10)
    loop_of = lambda env: small_loop(jmarl.iql, env, buffers.uniform(256, 32, length), num_updates=4)  # noqa: E731
    for right, _, q, _ in swept_values(loop_of, q_learning.default_nets, cfg, 150, lambdas):
        assert np.abs(q - right[:, None, None]).max() < 0.02  # for those who wait, too


@pytest.mark.parametrize("name", ["vdn", "qmix", "ow_qmix"])
def test_waiting_ends_no_return_of_a_team(name):
    """Q_tot is that of who acts; where nobody does, of all whose return goes on."""
    small = {"target_update_interval": 10, "returns": "peng"}
    mixer = {"mixer_embed_size": 4, "mixer_hypernet_sizes": ()}
    default_nets, cfg = {
        "vdn": (q_learning.default_nets, VDNConfig(**TABLE, **small)),
        "qmix": (q_learning.default_nets, QMIXConfig(**TABLE, **small, **mixer)),
        "ow_qmix": (wqmix.default_nets, WQMIXConfig(**TABLE, **small, **mixer, central_sizes=(8,))),
    }[name]
    algorithm, buffer = getattr(jmarl, name), buffers.uniform(256, 32, 5)
    loop_of = lambda env: small_loop(algorithm, env, buffer, num_updates=4)  # noqa: E731
    for right, acts, _, team in swept_values(loop_of, default_nets, cfg, 200, [0.0, 0.5, 1.0]):
        assert np.abs(team - 2 * right)[:, acts.any(-1)].max() < 0.05


def test_waiting_ends_no_return_of_pqn():
    cfg = PQNConfig(**TABLE, num_minibatches=1)
    loop_of = lambda env: jmarl.on_policy(env, jmarl.pqn_vdn, num_envs=8, rollout_length=5)  # noqa: E731
    for right, acts, _, team in swept_values(loop_of, pqn.default_nets, cfg, 150, [0.0, 0.5, 1.0]):
        assert np.abs(team - 2 * right)[:, acts.any(-1)].max() < 0.05


@pytest.mark.parametrize("recurrent", [False, True])
def test_pqn_solves_the_action_observation_probe(recurrent):
    env = envs.probe("action_observation", num_agents=2)
    cfg = PQNConfig(
        learning_rate=3e-3, hidden_sizes=(16,), num_minibatches=2, epsilon_steps=500, recurrent=recurrent, cell_size=8
    )
    loop = jmarl.on_policy(env, jmarl.pqn_vdn, num_envs=16, rollout_length=4)
    assert (returns_after(loop, cfg, 80) == 1.0).all()


@pytest.mark.parametrize("recurrent", [False, True])
def test_pqn_targets_match_a_loop_over_steps(recurrent):
    """With a memory, episodes cut off on the way, and an agent that is dead while the other goes on."""
    env = envs.probe("time_limit", num_agents=2, num_steps=3)
    cfg = PQNConfig(hidden_sizes=(8,), num_epochs=1, num_minibatches=1, recurrent=recurrent, cell_size=8, lambda_=0.8)
    learner, agent = jmarl.pqn_vdn(env.spec, cfg), q_learning.agent_network(env.spec, cfg)
    run = compiled.start(env, learner, jax.random.key(0), num_envs=4)
    run, batch, _ = compiled.rollout(env, learner, run, length=8)
    alive = np.ones((8, 4, 2), bool)
    alive[2:, :2, 1] = False
    next_obs = batch.steps.next_obs.replace(agent_mask=jnp.asarray(alive))
    terminated = batch.steps.terminated.at[4, :, 0].set(True).at[5, 2].set(True)
    steps = batch.steps.replace(next_obs=next_obs, terminated=terminated, last=batch.steps.last.at[5, 2].set(True))
    after, targets = np.zeros(4), np.zeros((8, 4))
    for t in reversed(range(8)):
        now = jax.tree.map(lambda x, t=t: x[t], steps)
        carry = batch.next_carry if t == 7 else jax.tree.map(lambda x, t=t: x[t + 1], batch.steps.carry)
        q = networks.one_step(agent)(run.train_state.params["agent"], carry, now.next_obs, jnp.zeros(4, bool))[1]
        best = (np.max(q, axis=-1) * alive[t]).sum(-1)
        cut = np.asarray(now.last) | (t == 7)
        after = np.where(cut, best, 0.2 * best + 0.8 * after)
        after = np.asarray(now.reward).sum(-1) + 0.9 * ~np.asarray(now.terminated).all(-1) * after
        targets[t] = after
    assert steps.last[:-1].any() and terminated.all(-1).any() and not terminated.all()
    _, metrics = jax.jit(learner.update)(run.train_state, batch.replace(steps=steps), jax.random.key(0))
    np.testing.assert_allclose(metrics["value/target"], targets.mean(), rtol=1e-5)


def test_pqn_returns_are_q_lambda_with_the_true_successor():
    """A time limit bootstraps from the true successor: V = 1 / (1 - γ)."""
    cfg = PQNConfig(learning_rate=1e-2, hidden_sizes=(8,), layer_norm=False, num_minibatches=2, lambda_=0.8)
    loop = jmarl.on_policy(envs.probe("time_limit"), jmarl.pqn_vdn, num_envs=4, rollout_length=8)
    _, metrics = jax.jit(jmarl.make_train(loop, 150))(jax.random.key(0), cfg)
    assert float(metrics["value/q_taken"][-1]) == pytest.approx(10.0, rel=0.05)
