"""HATD3 and HASAC: a plain loop over agents, who sees what, targets by hand, limits, who is dead, games, bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from random_batches import random_batch, require_padding_and_inactive_agents_change_nothing

import jmarl
from jmarl import HASACConfig, HATD3Config, SACConfig, TD3Config, buffers, envs, optim
from jmarl.learners import critics, ddpg
from jmarl.learners.hasac import default_nets
from jmarl.networks import actor_critic
from jmarl.types import Network

CONTINUOUS = envs.probe("continuous", num_agents=3).spec
DISCRETE = envs.matrix_game(np.zeros((3, 3))).spec
UNEQUAL = envs.matrix_game(np.arange(12.0).reshape(2, 3, 2)).spec  # agents 0 and 2 are a group
SMALL = {"hidden_sizes": (8,)}
# Adam with a large ε, so that a slope of nearly nothing is a step of nearly nothing, whatever its sign.
STEADY = SMALL | {"learning_rate": 0.3, "adam_eps": 0.1, "max_grad_norm": 0.4, "tau": 0.5}
CASES = {
    "hatd3": (jmarl.hatd3, HATD3Config(**STEADY, policy_delay=1, target_noise=None, actor_q="mean"), CONTINUOUS),
    "hatd3-stored": (
        jmarl.hatd3,
        HATD3Config(**STEADY, policy_delay=1, target_noise=None, other_actions="stored"),
        CONTINUOUS,
    ),
    "hasac": (jmarl.hasac, HASACConfig(**STEADY, alpha_per_agent=True, team_reward="mean"), CONTINUOUS),
    "hasac-groups": (jmarl.hasac, HASACConfig(**STEADY, sharing="per_group"), UNEQUAL),
}


def mlp(params, x):
    hidden = jax.nn.relu(x @ params["torso"]["Dense_0"]["kernel"] + params["torso"]["Dense_0"]["bias"])
    out = params["outputs_0"].get("head", params["outputs_0"])["out"]
    return hidden @ out["kernel"] + out["bias"]


def values(critic, action, obs):
    """Of both critics, `[2, M]`: of the actions `[M, N, A]` of those who act, and the state `[M, S]`."""
    action = jnp.where(obs.agent_mask[..., None], action, 0.0)
    x = jnp.concatenate([action.reshape(len(action), -1), obs.state], axis=-1)
    return jnp.stack([mlp(params, x)[:, 0] for params in critic])


def policy_by_hand(name, params, obs, noise, i):
    """What agent i does, coded `[M, A]`, and log π of it, or minus the entropy; and its probabilities if discrete."""
    out = mlp(params, obs.agents[:, i])
    if name.startswith("hatd3"):
        return jnp.tanh(out), None, None
    if name == "hasac":
        mean, log_std = out[:, :1], out[:, 1:]
        z = mean + jnp.exp(log_std) * noise[:, i]
        normal = -0.5 * noise[:, i] ** 2 - log_std - 0.5 * np.log(2 * np.pi)
        return jnp.tanh(z), (normal - jnp.log(1 - jnp.tanh(z) ** 2))[:, 0], None
    size = out.shape[-1]
    probs = jax.nn.softmax(out)
    entropy = -jnp.sum(probs * jnp.log(probs), axis=-1)
    chosen = jnp.argmax(out + noise[:, i, :size], axis=-1)
    return jax.nn.one_hot(chosen, 3), -entropy, jnp.pad(probs, [(0, 0), (0, 3 - size)])


def setting(name):
    """A learner, its state, and a batch of one step in which agents die and wait."""
    algorithm, cfg, spec = CASES[name]
    learner = algorithm(spec, cfg)
    state = jax.jit(learner.init)(jax.random.key(0))
    # Policies that differ, and targets unlike what is learnt.
    moved = jax.tree.map(lambda p: p + 0.3 * jnp.cos(jnp.arange(p.size)).reshape(p.shape), state.params)
    older = jax.tree.map(lambda p: p + 0.2 * jnp.sin(jnp.arange(p.size)).reshape(p.shape), moved)
    state = state.replace(params=moved, target_params={part: older[part] for part in state.target_params})
    batch = random_batch(spec, jax.random.key(1), length=1, batch_size=7)
    acts, weight = np.ones((1, 7, 3), bool), np.ones((1, 7, 3), np.float32)
    acts[0, 1, 0] = acts[0, 2] = acts[0, 3, 1:] = False  # one is dead, all wait, one acts alone
    weight[0, 1, 0] = 0
    next_acts = np.ones((1, 7, 3), bool)
    next_acts[0, 1, 0] = next_acts[0, 4, 2] = False
    ends = np.zeros((1, 7, 3), bool)
    ends[0, 5], ends[0, 6, 0] = True, True  # the team's return ends, and that of one agent alone
    obs, next_obs = batch.steps.obs, batch.steps.next_obs
    if spec.is_discrete:
        legal = jnp.broadcast_to(jnp.arange(3) < jnp.array(spec.action_sizes)[:, None], obs.action_mask.shape)
        obs, next_obs = (x.replace(action_mask=legal) for x in (obs, next_obs))
    steps = batch.steps.replace(
        obs=obs.replace(agent_mask=jnp.asarray(acts)),
        next_obs=next_obs.replace(agent_mask=jnp.asarray(next_acts)),
        terminated=jnp.asarray(ends),
        last=jnp.asarray(ends.all(-1)),
    )
    return learner, state, batch.replace(steps=steps, weight=jnp.asarray(weight))


def noises(name, key):
    """For the next actions and for the present ones, as an update draws them, `[M, N, A]`."""
    draw = jax.random.gumbel if name == "hasac-groups" else jax.random.normal
    return draw(key, (2, 1, 7, 3, 3 if name == "hasac-groups" else 1))[:, 0]


def own_parameters(actors, i, groups):
    return actors[f"group_{groups[i]}"] if "group_0" in actors else jax.tree.map(lambda x: x[i], actors)


@pytest.mark.parametrize("name", CASES)
def test_turns_match_a_plain_loop_over_agents(name):
    """Each with networks written out, an optimiser of its own, and the critic as the update has made it."""
    _, cfg, spec = CASES[name]
    learner, state, batch = setting(name)
    key = jax.random.key(4)
    new, metrics = jax.jit(learner.update)(state, batch, key)
    _, noise = noises(name, key)
    groups = actor_critic.groups(spec) if cfg.sharing == "per_group" else (0, 1, 2)
    obs = jax.tree.map(lambda x: x[0], batch.steps.obs)
    acts = np.asarray(obs.agent_mask & (batch.weight[0] > 0))
    alpha = np.broadcast_to(np.exp(state.params.get("log_alpha", 0.0)), (3,))
    critic = new.params["critic"]

    def loss(own, members, action):
        total, q_counts = jnp.zeros(7), acts[:, members].any(-1)
        joint = action
        for i in members:
            moved, log_prob, probs = policy_by_hand(name, own, obs, noise, i)
            if probs is not None:
                each = [action.at[:, i].set(jnp.eye(3)[a]) for a in range(3)]
                q = jnp.stack([values(critic, joint, obs).min(0) for joint in each], axis=-1)
                total += acts[:, i] * (alpha[i] * log_prob - jnp.sum(probs * q, axis=-1))
            else:
                joint = joint.at[:, i].set(moved)
                total += acts[:, i] * alpha[i] * (0.0 if log_prob is None else log_prob)
        if name != "hasac-groups":
            q = values(critic, joint, obs)
            total -= {"hatd3": q.mean(0), "hatd3-stored": q[0], "hasac": q.min(0)}[name]
        return jnp.sum(jnp.where(q_counts, total, 0.0)) / q_counts.sum()

    actors = state.params["actor"]
    if name == "hatd3-stored":
        action = batch.steps.action[0]
    else:
        own = [policy_by_hand(name, own_parameters(actors, i, groups), obs, noise, i)[0] for i in range(3)]
        action = jnp.stack(own, axis=1)
    order = jax.random.permutation(jax.random.fold_in(key, 1), max(groups) + 1)
    assert order.tolist() != sorted(order.tolist())
    slope = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    expected, entropy, whole = {}, np.zeros((7, 3)), []
    for player in order.tolist():
        members = tuple(i for i in range(3) if groups[i] == player)
        before = own_parameters(actors, members[0], groups)
        value, gradient = slope(before, members, action)
        optimizer = optim.optimizer(cfg.learning_rate, eps=cfg.adam_eps, max_grad_norm=cfg.max_grad_norm)
        after = optax.apply_updates(before, optimizer.update(gradient, optimizer.init(before))[0])
        whole.append(value)
        for i in members:
            _, log_prob, _ = policy_by_hand(name, before, obs, noise, i)
            entropy[:, i] = 0.0 if log_prob is None else -log_prob
            expected[i] = after
            action = action.at[:, i].set(policy_by_hand(name, after, obs, noise, i)[0])
    for i in range(3):
        ours = own_parameters(new.params["actor"], i, groups)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-5), ours, expected[i])
    np.testing.assert_allclose(metrics["loss/actor"], np.mean(whole), rtol=1e-4)
    if name.startswith("hasac"):  # each agent's entropy is that of its own turn
        sizes = np.array([2, 3, 2])
        target = 0.5 * np.log(sizes) if name == "hasac-groups" else -np.ones(3)
        errors = -np.log(alpha) * (target - entropy)
        each = [errors[acts[:, i], i].mean() for i in range(3)]
        alpha_loss = np.sum(each) if cfg.alpha_per_agent else errors[acts].mean()
        np.testing.assert_allclose(metrics["loss/alpha"], alpha_loss, rtol=1e-4)


@pytest.mark.parametrize("name", ["hatd3", "hasac", "hasac-groups"])
def test_the_team_s_critic_learns_what_its_equation_says(name):
    _, cfg, spec = CASES[name]
    learner, state, batch = setting(name)
    key = jax.random.key(4)
    _, metrics = jax.jit(learner.update)(state, batch, key)
    noise, _ = noises(name, key)
    groups = actor_critic.groups(spec) if cfg.sharing == "per_group" else (0, 1, 2)
    obs, next_obs = (jax.tree.map(lambda x: x[0], x) for x in (batch.steps.obs, batch.steps.next_obs))
    actors = (state.target_params if name == "hatd3" else state.params)["actor"]
    own = [policy_by_hand(name, own_parameters(actors, i, groups), next_obs, noise, i) for i in range(3)]
    alpha = np.broadcast_to(np.exp(state.params.get("log_alpha", 0.0)), (3,))
    value = values(state.target_params["critic"], jnp.stack([x[0] for x in own], axis=1), next_obs).min(0)
    for i in range(3):
        if name != "hatd3":
            value -= jnp.where(next_obs.agent_mask[:, i], alpha[i] * own[i][1], 0.0)
    reward = batch.steps.reward[0].mean(-1) if cfg.team_reward == "mean" else batch.steps.reward[0].sum(-1)
    y = reward + cfg.gamma * ~batch.steps.terminated[0].all(-1) * value
    taken = batch.steps.action[0]
    q = values(state.params["critic"], jax.nn.one_hot(taken, 3) if spec.is_discrete else taken, obs)
    np.testing.assert_allclose(metrics["loss/critic"], jnp.sum((q - y) ** 2) / 7, rtol=1e-4)


GOAL = np.tanh(0.1)


def known(nets, *, is_joint):
    """Networks whose actors are one number each, and whose critic is known: -(a_0 + a_1 + a_2 - goal)²."""

    def critic(params, carry, x, first):
        _, own, others = x
        everyone = own.reshape(*first.shape, 1, 3) if is_joint else actor_critic.joint_actions(own, others).joined()
        q = -((jnp.sum(everyone, axis=-1) - GOAL) ** 2) + 0 * params[0]
        return carry, jnp.broadcast_to(q, own.shape[:-1])[None]

    def actor(params, carry, obs, first):
        return carry, jnp.broadcast_to(params[:, None], (*first.shape, len(params), 1))

    nothing, zeros = lambda shape: (), lambda key: jnp.zeros(3)
    return nets._replace(actor=Network(zeros, actor, nothing), critic=Network(zeros, critic, nothing, 2))


def test_agents_that_move_at_once_overshoot_and_those_that_take_turns_do_not():
    """One step of one agent leads to where the team is best: all three at once go three times as far."""
    # A first step of Adam is η g / (|g| + ε), here 0.1 where g is 2 tanh(0.1).
    common = {"learning_rate": 0.3, "adam_eps": 4 * GOAL, "max_grad_norm": None, "policy_delay": 1}
    batch = random_batch(CONTINUOUS, jax.random.key(0), length=1)

    def after_one_step(learner):
        state = learner.init(jax.random.key(1))
        new, _ = jax.jit(learner.update)(state, batch, jax.random.key(2))
        return np.tanh(np.asarray(new.params["actor"]))

    cfg = HATD3Config(**common)
    in_turn = after_one_step(jmarl.hatd3(CONTINUOUS, cfg, known(default_nets(CONTINUOUS, cfg), is_joint=True)))
    np.testing.assert_allclose(sorted(in_turn), [0.0, 0.0, GOAL], atol=1e-5)
    cfg = TD3Config(**common, sharing="per_agent", critic_view="state", other_actions="current")
    at_once = after_one_step(jmarl.matd3(CONTINUOUS, cfg, known(ddpg.default_nets(CONTINUOUS, cfg), is_joint=False)))
    np.testing.assert_allclose(at_once, [GOAL] * 3, atol=1e-5)


def test_what_an_agent_becomes_reaches_those_after_it_and_nobody_before():
    """Each agent in turn is drawn another way by a loss of its own; whoever differs at the end has seen it."""
    cfg, key = CASES["hatd3"][1].replace(max_grad_norm=None), jax.random.key(4)
    _, state, batch = setting("hatd3")

    @jax.jit
    def after(drawn):
        def loss(params, batch, action, noise, *, nets, cfg):
            value, metrics = jmarl.hatd3_actor_loss(params, batch, action, noise, nets=nets, cfg=cfg)
            bias = jnp.sum(params["actor"]["outputs_0"]["out"]["bias"])
            return value + 5.0 * bias * jnp.sum(jnp.where(nets.is_member, drawn, 0.0)), metrics

        return jmarl.hatd3(CONTINUOUS, cfg, actor_loss=loss).update(state, batch, key)[0].params["actor"]

    order = jax.random.permutation(jax.random.fold_in(key, 1), 3).tolist()
    plain = after(jnp.zeros(3))
    for place, agent in enumerate(order):
        other = after(jax.nn.one_hot(agent, 3))
        differs = {i for i in range(3) for x, y in zip(*map(jax.tree.leaves, (plain, other)), strict=True) if
                   float(jnp.abs(x[i] - y[i]).max()) > 1e-4}  # fmt: skip
        assert differs == set(order[place:])


@pytest.mark.parametrize("sharing", ["per_agent", "per_group"])
def test_each_one_s_actor_is_its_part_of_the_whole_with_its_own_memory(sharing):
    """What actors say at their turns, of sequences that start inside an episode, with a burn-in."""
    cfg = HATD3Config(**SMALL, policy_delay=1, recurrent=True, cell_size=4, sharing=sharing, burn_in=1)
    nets = default_nets(UNEQUAL, cfg)

    def loss(params, batch, action, noise, *, nets, cfg):
        value, metrics = jmarl.hatd3_actor_loss(params, batch, action, noise, nets=nets, cfg=cfg)
        return value, {**metrics, "said": critics.read(batch, nets.nets, cfg).output(params)[..., 0]}

    learner = jmarl.hatd3(UNEQUAL, cfg, nets, actor_loss=loss)
    carry = learner.init_carry((6,))
    carry = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), carry)
    batch = random_batch(UNEQUAL, jax.random.key(1), carry=carry)
    batch = batch.replace(steps=batch.steps.replace(first=jnp.zeros((4, 6), bool)))
    state = jax.jit(learner.init)(jax.random.key(0))
    said = jax.jit(learner.update)(state, batch, jax.random.key(2))[1]["said"]
    whole = jax.jit(nets.actor.apply)(state.params["actor"], carry["actor"], batch.steps.obs, batch.steps.first)[1]
    np.testing.assert_allclose(said, whole[..., 0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "ours, theirs",
    [
        ((jmarl.hatd3, HATD3Config(**SMALL)), (jmarl.matd3, TD3Config(**SMALL, sharing="per_agent"))),
        ((jmarl.hasac, HASACConfig(**SMALL)), (jmarl.masac, SACConfig(**SMALL, sharing="per_agent"))),
    ],
)
def test_at_one_agent_they_are_td3_and_sac(ours, theirs):
    """With the same critic: alone, an agent's joint action is its own."""
    spec = envs.probe("continuous").spec
    learner, other = (algorithm(spec, cfg) for algorithm, cfg in (ours, theirs))
    state = jax.jit(other.init)(jax.random.key(0))
    own = lambda tree: {**tree, "critic": jax.tree.map(lambda x: x[0], tree["critic"])}  # noqa: E731
    start = jax.jit(learner.init)(jax.random.key(0))
    start = start.replace(params=own(state.params), target_params=own(state.target_params))
    one, two = jax.jit(learner.update), jax.jit(other.update)
    for key in jax.random.split(jax.random.key(1), 4):
        batch = random_batch(spec, key)
        (start, _), (state, _) = one(start, batch, key), two(state, batch, key)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5), start.params, own(state.params))


TWO = envs.probe("continuous", num_agents=2).spec
MASKED = {
    "hatd3-recurrent": (jmarl.hatd3, HATD3Config(**SMALL, policy_delay=1, recurrent=True, cell_size=4), TWO),
    "hatd3-discrete": (jmarl.hatd3, HATD3Config(**SMALL, policy_delay=1, sharing="per_group"), DISCRETE),
    "hasac-recurrent": (jmarl.hasac, HASACConfig(**SMALL, recurrent=True, cell_size=4, burn_in=1), TWO),
    "hasac-discrete": (jmarl.hasac, HASACConfig(**SMALL), DISCRETE),
}


@pytest.mark.parametrize("name", MASKED)
def test_padding_and_inactive_agents_change_nothing_and_every_parameter_learns(name):
    algorithm, cfg, spec = MASKED[name]
    learner = algorithm(spec, cfg)
    require_padding_and_inactive_agents_change_nothing(learner, spec, learner.init_carry((6,)))


def greedy_return(env, algorithm, cfg, num_iterations):
    options = {"num_envs": 8, "rollout_length": 4, "num_updates": 4, "warmup_steps": 64}
    loop = jmarl.off_policy(env, algorithm, buffer=buffers.uniform(2000, 64), **options)

    def train(key):
        run, _ = jmarl.make_train(loop, num_iterations)(key, cfg)
        learner = algorithm(env.spec, cfg)
        return jmarl.evaluate(env, learner, run.train_state, key, num_episodes=32)["eval/return_sum"]

    return np.asarray(jax.jit(jax.vmap(train))(jax.random.split(jax.random.key(0), 2)))


def test_actors_climb_the_value_of_the_team():
    """Agent 0 is paid for what agent 1 does, and the other way round: each must climb the team's value."""
    env = envs.probe("continuous", num_agents=2)

    def step(state, action, key):
        state, obs, outcome = env.step(state, action, key)
        return state, obs, outcome.replace(reward=outcome.reward[::-1])

    cfg = HATD3Config(learning_rate=1e-2, hidden_sizes=(16,), max_grad_norm=None, tau=0.05)
    assert (greedy_return(env._replace(step=step), jmarl.hatd3, cfg, 150) > -0.05).all()


@pytest.mark.parametrize("algorithm, config", [(jmarl.hatd3, HATD3Config), (jmarl.hasac, HASACConfig)])
def test_discrete_agents_agree_on_the_better_of_two_conventions(algorithm, config):
    env = envs.matrix_game([[1.0, 0.0, 0.0], [0.0, 3.0, 0.0], [0.0, 0.0, 2.0]])
    cfg = config(learning_rate=1e-2, hidden_sizes=(16,), tau=0.05, team_reward="mean")
    assert greedy_return(env, algorithm, cfg, 150).tolist() == [6.0, 6.0]


def test_bad_input():
    for algorithm, config, instead in [(jmarl.hatd3, HATD3Config, "matd3"), (jmarl.hasac, HASACConfig, "masac")]:
        with pytest.raises(ValueError, match=f"sharing='shared' leaves nobody to learn after another.* use {instead}"):
            algorithm(TWO, config(sharing="shared"))
        with pytest.raises(ValueError, match="team_reward='individual' is unknown here: choose one of sum, mean"):
            algorithm(TWO, config(team_reward="individual"))
        with pytest.raises(ValueError, match="critic_view='obs' is unknown here: choose one of auto, state"):
            algorithm(TWO, config(critic_view="obs"))
        with pytest.raises(ValueError, match="other_actions='joint' is unknown here: choose one of current, stored"):
            algorithm(TWO, config(other_actions="joint"))
        with pytest.raises(ValueError, match=r"Centralised critics read the global state, but continuous has state_sh"):
            algorithm(TWO._replace(state_shape=(0,)), config())
