"""QTRAN-base: its three losses in numpy, what learns from which, the game that it is for, bad input."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_batches import random_batch, require_padding_and_inactive_agents_change_nothing

import jmarl
from jmarl import QTRANConfig, buffers, envs
from jmarl.learners.qtran import default_nets

SPEC = envs.matrix_game(np.zeros((3, 3))).spec
SMALL = {"hidden_sizes": (8,), "joint_sizes": (6,)}
JOINT = np.array(list(itertools.product(range(3), repeat=2)))


def layers(params, x, names):
    """Dense layers with ReLU between them."""
    for k, name in enumerate(names):
        layer = params
        for part in name.split("/"):
            layer = layer[part]
        x = (x if k == 0 else np.maximum(x, 0)) @ np.asarray(layer["kernel"]) + np.asarray(layer["bias"])
    return x


def q_by_hand(params, view):
    return layers(params, view, ["torso/Dense_0", "outputs_0/out"])


def joint_by_hand(params, q, one_hot, acts, state):
    """Of the agents' values and what they do, those of who acts; without `one_hot` it is V."""
    features = [q * acts[:, None], *([] if one_hot is None else [one_hot * acts[:, None]])]
    x = np.concatenate([np.concatenate(features, axis=-1).ravel(), state])
    return layers(params, x, ["net/Dense_0", "net/Dense_1"])[0]


@pytest.mark.parametrize("double_q", [True, False])
def test_losses_match_a_loop_over_steps(double_q):
    """With an agent that dies first, illegal actions, an end of the team, and target networks of their own."""
    cfg = QTRANConfig(**SMALL, gamma=0.9, team_reward="mean", opt_loss_coef=0.7, nopt_loss_coef=0.3, double_q=double_q)
    nets = default_nets(SPEC, cfg)
    state = jmarl.qtran(SPEC, cfg).init(jax.random.key(0))
    moved = lambda params, by: jax.tree.map(  # noqa: E731
        lambda p: p + by * jnp.cos(jnp.arange(p.size)).reshape(p.shape), params
    )
    params, old = moved(state.params, 0.3), moved(state.params, -0.4)
    batch = random_batch(SPEC, jax.random.key(1), length=1, batch_size=6)
    rng = np.random.default_rng(0)
    legal, next_legal = rng.random((2, 6, 2, 3)) < 0.6
    taken = np.asarray(batch.steps.action[0])
    for m, i in itertools.product(range(6), range(2)):
        legal[m, i, taken[m, i]] = next_legal[m, i, 0] = True
    acts, next_acts = np.ones((6, 2), bool), np.ones((6, 2), bool)
    acts[1], next_acts[1], next_acts[2] = [False, True], [False, True], [True, False]
    ends = np.zeros((6, 2), bool)
    ends[4], ends[0, 0], ends[2, 1] = True, True, True
    weight = np.ones((6, 2), np.float32)
    weight[1, 0] = 0
    obs = batch.steps.obs.replace(agent_mask=jnp.asarray(acts)[None], action_mask=jnp.asarray(legal)[None])
    next_obs = batch.steps.next_obs.replace(
        agent_mask=jnp.asarray(next_acts)[None], action_mask=jnp.asarray(next_legal)[None]
    )
    steps = batch.steps.replace(
        obs=obs, next_obs=next_obs, terminated=jnp.asarray(ends)[None], last=jnp.asarray(ends.all(-1))[None]
    )
    batch = batch.replace(steps=steps, weight=jnp.asarray(weight)[None])

    now, later = jax.tree.map(lambda x: np.asarray(x)[0], (obs, next_obs))
    td, opt, nopt = [], [], []
    for m in range(6):
        q = q_by_hand(params["agent"], now.agents[m])
        joint_q = q_by_hand(params["joint_agent"], now.agents[m])
        chooser = params if double_q else old
        next_q = np.where(next_legal[m], q_by_hand(chooser["agent"], later.agents[m]), -np.inf)
        next_one_hot = np.eye(3)[next_q.argmax(-1)]
        old_joint_q = q_by_hand(old["joint_agent"], later.agents[m])
        next_value = joint_by_hand(old["joint"], old_joint_q, next_one_hot, next_acts[m], later.state[m])
        y = float(steps.reward[0, m].mean()) + 0.9 * (not ends[m].all()) * next_value
        v = joint_by_hand(params["value"], joint_q, None, acts[m], now.state[m])
        best = np.where(legal[m], q, -np.inf).argmax(-1)
        error = {}
        for kind, action in {"taken": taken[m], "best": best}.items():
            joint = joint_by_hand(params["joint"], joint_q, np.eye(3)[action], acts[m], now.state[m])
            error[kind] = (q[np.arange(2), action] * acts[m]).sum() - joint + v
            if kind == "taken":
                td.append(joint - y)
        opt.append(error["best"])
        nopt.append(min(error["taken"], 0.0))
    assert min(nopt) < 0 < np.sum(np.array(nopt) == 0)  # both sides of the bound
    td, opt, nopt = (np.mean(np.square(x)) for x in (td, opt, nopt))
    loss, (metrics, _) = jax.jit(lambda *args: jmarl.qtran_loss(*args, nets=nets, cfg=cfg))(params, old, batch)
    for name, expected in {"td": td, "opt": opt, "nopt": nopt}.items():
        np.testing.assert_allclose(metrics[f"loss/{name}"], expected, rtol=1e-4, err_msg=name)
    np.testing.assert_allclose(loss, td + 0.7 * opt + 0.3 * nopt, rtol=1e-4)


def test_the_joint_value_learns_from_rewards_alone_and_the_agents_from_it_alone():
    cfg = QTRANConfig(**SMALL)
    nets, batch = default_nets(SPEC, cfg), random_batch(SPEC, jax.random.key(1), length=1)
    params = jax.jit(jmarl.qtran(SPEC, cfg).init)(jax.random.key(0)).params

    @jax.jit
    def slopes(coefs):
        weights = {"opt_loss_coef": coefs[0], "nopt_loss_coef": coefs[1]}
        loss = lambda p: jmarl.qtran_loss(p, params, batch, nets=nets, cfg=cfg.replace(**weights))[0]  # noqa: E731
        return jax.tree.map(lambda x: jnp.abs(x).max(), jax.grad(loss)(params))

    none, each = slopes((0.0, 0.0)), [slopes((1.0, 0.0)), slopes((0.0, 1.0))]
    assert max(jax.tree.leaves((none["agent"], none["value"]))) == 0
    for some in each:
        assert min(jax.tree.leaves(some["agent"]["outputs_0"])) > 0 and max(jax.tree.leaves(some["value"])) > 0
        for name in ("joint", "joint_agent"):
            for x, y in zip(jax.tree.leaves(none[name]), jax.tree.leaves(some[name]), strict=True):
                assert float(x) == pytest.approx(float(y), rel=1e-5)


@pytest.mark.parametrize("recurrent", [False, True])
def test_padding_and_inactive_agents_change_nothing_and_every_parameter_learns(recurrent):
    learner = jmarl.qtran(SPEC, QTRANConfig(**SMALL, recurrent=recurrent, cell_size=4))
    require_padding_and_inactive_agents_change_nothing(learner, SPEC, learner.init_carry((6,)))


def test_finds_the_best_joint_action_that_no_monotonic_mixer_is_sure_to_find():
    """Of random play in the game of Son et al., 2019: so do all of eight seeds, and QMIX settles on 0 with all of them.

    Then the sum of the agents' values and V is the joint value where all do their best, and nowhere below it.
    """
    payoffs = np.array([[8.0, -12.0, -12.0], [-12.0, 0.0, 0.0], [-12.0, 0.0, 0.0]])
    env = envs.matrix_game(payoffs)
    training = {"learning_rate": 3e-3, "learning_rate_schedule": "linear", "target_update_interval": 50}
    cfg = QTRANConfig(**training, hidden_sizes=(16,), epsilon_end=1.0, team_reward="mean")
    options = {"num_envs": 16, "rollout_length": 1, "warmup_steps": 100, "num_updates": 8}
    loop = jmarl.off_policy(env, jmarl.qtran, buffer=buffers.uniform(500, 64), **options)
    nets = default_nets(env.spec, cfg)

    def train(key):
        run, metrics = jmarl.make_train(loop, 300)(key, cfg)
        learner, params = jmarl.qtran(env.spec, cfg), run.train_state.params
        returns = jmarl.evaluate(env, learner, run.train_state, key, num_episodes=1)["eval/return_mean"]
        obs = jax.tree.map(lambda x: jnp.broadcast_to(x[:1], (9, *x.shape[1:])), run.obs)
        q, joint_q = (
            nets.agent.apply(params[name], (), jax.tree.map(lambda x: x[None], obs), jnp.zeros((1, 9), bool))[1][0]
            for name in ("agent", "joint_agent")
        )
        joint = nets.joint.apply(params["joint"], joint_q, JOINT, obs)
        value = nets.value.apply(params["value"], joint_q, JOINT, obs)
        own = jnp.take_along_axis(q, JOINT[..., None], axis=-1)[..., 0].sum(-1)
        return returns, joint, own + value, q[0], metrics

    returns, joint, transformed, q, _ = jax.jit(jax.vmap(train))(jax.random.split(jax.random.key(0), 2))
    assert returns.tolist() == [8.0] * 2
    np.testing.assert_allclose(joint, np.broadcast_to(payoffs.ravel(), (2, 9)), atol=0.5)
    assert (q.argmax(-1) == 0).all() and (joint.argmax(-1) == 0).all()  # each one's best, and the team's
    np.testing.assert_allclose(transformed[:, 0], joint[:, 0], atol=0.3)
    assert (transformed > joint - 0.7).all()


@pytest.mark.parametrize(
    "config, message",
    [
        ({"joint_sizes": ()}, r"joint_sizes=\(\) must hold at least one width: the joint value is a network"),
        ({"opt_loss_coef": -1.0}, "opt_loss_coef=-1.0 must not be negative"),
        ({"nopt_loss_coef": -1.0}, "nopt_loss_coef=-1.0 must not be negative"),
        ({"team_reward": "individual"}, "team_reward='individual' is unknown here"),
    ],
)
def test_bad_configs(config, message):
    with pytest.raises(ValueError, match=message):
        jmarl.qtran(SPEC, QTRANConfig(**config))


def test_what_it_cannot_read_is_refused():
    with pytest.raises(ValueError, match=r"Joint mixes with the global state, but matrix_game has state_shape=\(0,\)"):
        jmarl.qtran(SPEC._replace(state_shape=(0,)), QTRANConfig())
    with pytest.raises(ValueError, match="those of continuous are continuous: use another algorithm"):
        jmarl.qtran(envs.probe("continuous").spec, QTRANConfig())
