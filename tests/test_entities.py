"""Attention over entities: its arithmetic, what orders and absent entities change, layouts, policies that move on."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import evaluate, rollout, start

import jmarl
from jmarl import combinators, envs
from jmarl.cli import evaluate as evaluate_run
from jmarl.cli import run_folders, train
from jmarl.cli.errors import UsageError
from jmarl.learners import ppo
from jmarl.networks import actor_critic
from jmarl.networks.entities import EntityOutput, EntityTorso, entities_of, present_features, target_actions
from jmarl.types import Entities, EntityLayout, Env, EnvSpec, Observation, Outcome, zero_observation

# A view of 2 own features behind 2 allies of (seen, x) and 3 enemies: x in one block, (seen, y) in another.
LAYOUT = EntityLayout(
    own=((13, 1), (14, 1)),
    kinds=(
        Entities("allies", 2, ((0, 2),), present=0),
        Entities("enemies", 3, ((4, 1), (7, 2)), present=1, first_action=1),
    ),
)
NUM_FEATURES, NUM_ACTIONS, ROWS = 15, 5, 4
TORSO = EntityTorso(LAYOUT, size=4, num_heads=2, num_blocks=1)
OUTPUT = EntityOutput(NUM_ACTIONS, target_actions(LAYOUT), NUM_ACTIONS, scale=1.0)


def random_views(key=0, allies=(1, 1), enemies=(1, 1, 1)):
    view = np.array(jax.random.normal(jax.random.key(key), (ROWS, NUM_FEATURES)))
    view[:, [0, 2]], view[:, [7, 9, 11]] = allies, enemies
    return view


def logits_of(params, view, torso=TORSO):
    attended = torso.apply({"params": params["torso"]}, view)
    return attended, OUTPUT.apply({"params": params["output"]}, attended)


@pytest.fixture(scope="module")
def params():
    return random_params(TORSO)


def random_params(torso):
    def init(key):
        attended, made = torso.init_with_output(key, jnp.zeros((1, NUM_FEATURES)))
        return {"torso": made["params"], "output": OUTPUT.init(key, attended)["params"]}

    made = jax.tree.map(lambda x: x.value if hasattr(x, "value") else x, jax.jit(init)(jax.random.key(1)),
                        is_leaf=lambda x: hasattr(x, "unbox"))  # fmt: skip
    # Biases and scales that are none would hide where they are missing.
    leaves, structure = jax.tree.flatten(made)
    keys = jax.random.split(jax.random.key(2), len(leaves))
    noisy = [x + 0.3 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(structure, noisy)


# ------------------------------------------------------------------------------------------------------ arithmetic


def dense(params, x):
    return x @ np.asarray(params["kernel"]) + np.asarray(params["bias"])


def layer_norm(params, x):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * params["scale"] + params["bias"]


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def by_hand(params, view):
    """One row at a time, one head at a time, over a list of those that are seen alone."""
    torso = params["torso"]

    def embedded(name, x):
        return np.maximum(dense(torso[f"embed_{name}"]["Dense_0"], x), 0)

    tokens = [embedded("own", view[[13, 14]])]
    tokens += [embedded("allies", view[[2 * i, 2 * i + 1]]) for i in range(2) if view[2 * i] > 0]
    is_seen = [view[7 + 2 * i] > 0 for i in range(3)]
    enemies = [np.array([view[4 + i], view[7 + 2 * i], view[8 + 2 * i]]) for i in range(3)]
    tokens += [embedded("enemies", x) for x, seen in zip(enemies, is_seen, strict=True) if seen]
    x = np.stack(tokens)
    for block in [torso[name] for name in ("block_0", "block_1") if name in torso]:
        query, key, value = (dense(block["attention"][name], x) for name in ("query", "key", "value"))
        joined = np.zeros_like(x)
        for head in (slice(0, 2), slice(2, 4)):
            for i in range(len(x)):
                scores = np.array([query[i, head] @ key[j, head] / np.sqrt(2) for j in range(len(x))])
                weights = np.exp(scores) / np.exp(scores).sum()
                joined[i, head] = sum(w * v for w, v in zip(weights, value[:, head], strict=True))
        x = layer_norm(block["norms_0"], x + dense(block["attention"]["out"], joined))
        hidden = gelu(dense(block["layers"]["hidden"]["Dense_0"], x))
        x = layer_norm(block["norms_1"], x + dense(block["layers"]["out"], hidden))
    own, seen_enemies = x[0], x[len(x) - sum(is_seen) :]
    output = params["output"]
    logits = list(dense(output["own"]["out"], own))
    for enemy in seen_enemies:
        hidden = np.tanh(dense(output["targets"]["hidden"]["Dense_0"], np.concatenate([enemy, own])))
        logits += list(dense(output["targets"]["out"], hidden))
    return own, logits, [0, 4, *(1 + np.flatnonzero(is_seen))]


@pytest.mark.parametrize("num_blocks", [0, 1, 2])
@pytest.mark.parametrize(("allies", "enemies"), [((1, 1), (1, 1, 1)), ((1, 0), (0, 1, 1)), ((0, 0), (0, 0, 0))])
def test_attention_over_those_who_are_seen_as_by_hand(num_blocks, allies, enemies):
    view = random_views(allies=allies, enemies=enemies)
    torso = TORSO.clone(num_blocks=num_blocks)
    params = random_params(torso)
    attended, logits = jax.jit(functools.partial(logits_of, torso=torso))(params, view)
    for row in range(ROWS):
        own, expected, actions = by_hand(params, view[row])
        np.testing.assert_allclose(attended.own[row], own, rtol=2e-4, atol=2e-5)
        np.testing.assert_allclose(np.asarray(logits[row])[actions], expected, rtol=2e-4, atol=2e-5)


def test_an_order_of_enemies_permutes_attacks_and_changes_nothing_else(params):
    view, order = random_views(enemies=(1, 0, 1)), np.array([2, 0, 1])
    other = view.copy()
    other[:, 4:7] = view[:, 4 + order]
    other[:, 7:13] = view[:, 7:13].reshape(ROWS, 3, 2)[:, order].reshape(ROWS, 6)
    other[:, :4] = view[:, [2, 3, 0, 1]]  # and the allies
    (attended, logits), (as_other, others) = (jax.jit(logits_of)(params, x) for x in (view, other))
    np.testing.assert_allclose(as_other.own, attended.own, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(others[:, [0, 4]], logits[:, [0, 4]], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(others[:, 1:4], logits[:, 1 + order], rtol=1e-5, atol=1e-6)
    assert np.ptp(np.asarray(logits[:, [1, 3]]), axis=1).min() > 1e-3  # which differ


@pytest.mark.parametrize("garbage", [np.nan, 1e30])
def test_what_stands_in_an_empty_place_reaches_neither_outputs_nor_gradients(params, garbage):
    view = random_views(allies=(0, 1), enemies=(1, 0, 1))
    filled = view.copy()
    filled[:, 1], filled[:, [5, 10]] = garbage, garbage  # all but the flags
    flagged = filled.copy()
    flagged[:, 9] = np.nan if np.isnan(garbage) else -garbage  # which say "not seen" where they are not above 0

    @jax.jit
    def loss(params, view):
        attended, logits = logits_of(params, view)
        return jnp.sum(jnp.sin(logits)) + jnp.sum(attended.own * jnp.arange(4)), logits

    grads = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
    (expected, slope), logits = grads(params, jnp.asarray(view))
    for other in (filled, flagged):
        (actual, other_slope), other_logits = grads(params, jnp.asarray(other))
        np.testing.assert_array_equal(other_logits, logits)
        jax.tree.map(np.testing.assert_array_equal, actual, expected)
        np.testing.assert_array_equal(other_slope, slope)
    assert not np.asarray(slope)[:, [0, 1, 5, 9, 10]].any() and np.asarray(slope)[:, [3, 4, 13]].all()


# ----------------------------------------------------------------------------------------- layouts of environments


@functools.cache
def battle(name, agent_ids=False, **options):
    env = envs.make(name, map_name="3m", agent_ids=agent_ids, **options)
    return env, *jax.jit(env.reset)(jax.random.key(0))


def seen_by(env, view):
    return {kind.name: entities_of(view, kind) for kind in env.spec.entities.kinds}


def own_part(env, view):
    return np.concatenate([view[..., start : start + width] for start, width in env.spec.entities.own], -1)


@pytest.mark.parametrize("name", ["HeuristicEnemySMAX", "SMAX"])
@pytest.mark.parametrize("agent_ids", [False, True])
def test_layout_of_smax_says_where_a_unit_is_seen_and_which_action_attacks_it(name, agent_ids):
    env, state, _ = battle(name, agent_ids)
    raw = env.unwrapped
    inner = state.state if name == "HeuristicEnemySMAX" else state

    @jax.jit
    def look(places, alive):
        battle = inner.replace(unit_positions=places, unit_alive=alive, unit_health=jnp.where(alive, 45.0, 0.0))
        battle = state.replace(state=battle) if name == "HeuristicEnemySMAX" else battle
        views = raw.get_obs(battle)
        views = jnp.stack([views[agent] for agent in env.spec.agents])
        legal = raw.get_avail_actions(battle)
        legal = jnp.stack([legal[agent] for agent in env.spec.agents]).astype(bool)
        obs = Observation(agents=views, state=jnp.zeros(1), action_mask=legal, agent_mask=jnp.ones(len(views), bool))
        return envs.views.identified(obs) if agent_ids else obs

    far = jnp.array([[4.0 * i, 20.0 * (i >= 3)] for i in range(6)])  # only one's own side is in sight
    everyone = jnp.ones(6, bool)
    for me in range(len(env.spec.agents)):
        mine = [i for i in range(6) if (i < 3) == (me < 3) and i != me]
        theirs = [i for i in range(6) if (i < 3) != (me < 3)]
        if me >= 3:  # the second side counts from the end
            mine, theirs = mine[::-1], theirs[::-1]
        for kind, units in {"allies": mine, "enemies": theirs}.items():
            for place, unit in enumerate(units):
                # All others are dead, and this one is two steps to the right.
                places = far.at[unit].set(far[me] + jnp.array([1.8, 0.9]))
                view = look(places, everyone & jnp.isin(jnp.arange(6), jnp.array([me, unit]))).agents[me]
                seen = seen_by(env, view)
                expected = np.arange(len(units)) == place
                np.testing.assert_array_equal(seen[kind][1], expected)
                np.testing.assert_allclose(seen[kind][0][place][1:3], [0.2, 0.1], rtol=1e-5)  # of a sight of 9
                other = "enemies" if kind == "allies" else "allies"
                assert not seen[other][1].any()
                np.testing.assert_allclose(own_part(env, view)[-10:-7], [1, *np.asarray(far[me]) / 32], rtol=1e-5)
        legal = look(far.at[theirs[1]].set(far[me] + 1.0), everyone).action_mask[me]
        enemies = env.spec.entities.kinds[1]
        assert np.flatnonzero(legal[enemies.first_action :]).tolist() == [1]
        assert target_actions(env.spec.entities) == tuple(range(5, env.spec.num_actions))


def test_layout_of_spread_is_that_of_its_views():
    env = envs.make("MPE_simple_spread_v3", num_agents=4, num_landmarks=2)
    state, _ = jax.jit(env.reset)(jax.random.key(0))
    places = jnp.arange(12.0).reshape(6, 2) ** 2
    state = state.replace(p_pos=places, p_vel=-jnp.arange(8.0).reshape(4, 2), c=100.0 + jnp.arange(8.0).reshape(4, 2))
    views = env.unwrapped.get_obs(state)
    for me, agent in enumerate(env.spec.agents):
        others = [i for i in range(4) if i != me]
        seen = seen_by(env, views[agent])
        np.testing.assert_array_equal(own_part(env, views[agent]), np.r_[state.p_vel[me], places[me]])
        np.testing.assert_array_equal(seen["landmarks"][0], places[4:] - places[me])
        expected = np.concatenate([places[np.array(others)] - places[me], state.c[np.array(others)]], -1)
        np.testing.assert_array_equal(seen["agents"][0], expected)
    width = sum(w for _, w in env.spec.entities.own) + 2 * 2 + 3 * 4
    assert width == env.spec.obs_shape[0]  # nothing is left out, and nothing read twice


def test_layout_of_facmacs_hunt_is_that_of_its_views():
    env = envs.make("MPE_simple_facmac_3a_v1")
    state, _ = jax.jit(env.reset)(jax.random.key(0))
    num_landmarks = env.unwrapped.num_landmarks
    places = 0.01 * jnp.arange(2.0 * (4 + num_landmarks)).reshape(-1, 2)
    state = state.replace(p_pos=places, p_vel=0.1 * jnp.arange(8.0).reshape(4, 2))
    views = env.unwrapped.get_obs(state)
    for me, agent in enumerate(env.spec.agents):
        seen, others = seen_by(env, views[agent]), np.array([i for i in range(3) if i != me])
        np.testing.assert_allclose(seen["landmarks"][0], places[4:] - places[me], atol=1e-6)
        np.testing.assert_allclose(seen["hunters"][0], places[others] - places[me], atol=1e-6)
        np.testing.assert_allclose(seen["prey"][0][0], np.r_[places[3] - places[me], state.p_vel[3]], atol=1e-6)


def test_views_of_which_nothing_is_known_have_no_layout():
    assert envs.make("HeuristicEnemySMAX", map_name="3m", observation_type="conic").spec.entities is None
    assert envs.make("SMAX", map_name="5m_vs_6m").spec.entities is None  # two sides, two layouts
    assert envs.make("MPE_simple_tag_v3").spec.entities is None


# ------------------------------------------------------------------------------------------------------- learning


def find_the_marked(num):
    """Each of two agents sees `num` boxes, some of them gone, of which one is marked; paid for action 1 + that box."""
    layout = EntityLayout(own=((0, 1),), kinds=(Entities("boxes", num, ((1, 4),), present=0, first_action=1),))
    spec = EnvSpec(
        name="find_the_marked",
        agents=("ann", "bob"),
        obs_shape=(1 + 4 * num,),
        state_shape=(1,),
        num_actions=1 + num,
        max_steps=1,
        may_wait=False,
        always_act=True,
        entities=layout,
    )

    def observe(state):
        is_there, marked, colours = state
        mark = jax.nn.one_hot(marked, num)
        boxes = jnp.concatenate([is_there[..., None], mark[..., None], colours], axis=-1) * is_there[..., None]
        views = jnp.concatenate([jnp.ones((2, 1)), boxes.reshape(2, -1)], axis=-1)
        legal = jnp.concatenate([jnp.ones((2, 1), bool), is_there > 0], axis=-1)
        return Observation(agents=views, state=jnp.ones(1), action_mask=legal, agent_mask=jnp.ones(2, bool))

    def reset(key):
        key_there, key_mark, key_colour = jax.random.split(key, 3)
        marked = jax.random.randint(key_mark, (2,), 0, num)
        is_there = jnp.maximum(jax.random.bernoulli(key_there, 0.7, (2, num)), jax.nn.one_hot(marked, num))
        state = is_there.astype(jnp.float32), marked, jax.random.normal(key_colour, (2, num, 2))
        return state, observe(state)

    def step(state, action, key):
        reward = (action == 1 + state[1]).astype(jnp.float32)
        return state, observe(state), Outcome(reward=reward, terminated=jnp.ones(2, bool), last=jnp.bool_(True))

    return Env(reset, step, spec)


def test_normalised_views_still_say_who_is_seen():
    env = find_the_marked(3)

    def spy(spec, cfg):
        learner = jmarl.ippo(spec, cfg)

        def act(state, carry, obs, first, key):
            action, carry, measured = learner.act(state, carry, obs, first, key)
            return action, carry, {**measured, "views": obs.agents}

        return learner._replace(act=act)

    cfg = combinators.NormalizedConfig(inner=jmarl.PPOConfig(hidden_sizes=(4,), num_epochs=1, num_minibatches=1))
    learner = combinators.normalized(spy)(env.spec, cfg)
    run, batch, _ = rollout(env, learner, start(env, learner, jax.random.key(0), num_envs=16), length=4)
    state, _ = jax.jit(learner.update)(run.train_state, batch, jax.random.key(1))
    _, batch, _ = rollout(env, learner, run.replace(train_state=state), length=4)
    told, views = np.asarray(batch.steps.measured["views"]), np.asarray(batch.steps.obs.agents)
    assert present_features(LAYOUT) == (0, 2, 7, 9, 11) and present_features(env.spec.entities) == (1, 5, 9)
    np.testing.assert_array_equal(told[..., [1, 5, 9]], views[..., [1, 5, 9]])
    assert np.abs(told - views).max(axis=(0, 1, 2))[[2, 3, 6, 10]].min() > 0.01


SMALL = {"torso": "entities", "entity_size": 16, "entity_heads": 2, "hidden_sizes": (16,)}
LEARNERS = {
    "ippo": (jmarl.ippo, jmarl.PPOConfig(**SMALL, learning_rate=1e-2, ent_coef=0.001), 30),
    "vdn": (jmarl.vdn, jmarl.VDNConfig(**SMALL, learning_rate=3e-3, dueling=True, epsilon_steps=1500), 400),
}


@pytest.mark.parametrize("name", list(LEARNERS))
def test_what_was_learnt_with_three_entities_plays_with_seven(name):
    algorithm, cfg, num_iterations = LEARNERS[name]
    if name == "ippo":
        loop = jmarl.on_policy(find_the_marked(3), algorithm, num_envs=64, rollout_length=2)
    else:
        options = {"buffer": jmarl.buffers.uniform(4000, 64), "num_envs": 16, "rollout_length": 1, "warmup_steps": 256}
        loop = jmarl.off_policy(find_the_marked(3), algorithm, **options)
    run, metrics = jax.jit(jmarl.make_train(loop, num_iterations))(jax.random.key(0), cfg)
    assert metrics["train/return_mean"][-5:].mean() > 0.9  # less what is done by chance; by chance alone below 0.4
    env = find_the_marked(7)
    result = evaluate(env, algorithm(env.spec, cfg), run.train_state, jax.random.key(1), num_episodes=200)
    assert result["eval/return_mean"] > 0.95


def test_a_memory_behind_the_attention_tells_entities_apart():
    cfg = jmarl.PPOConfig(**SMALL, recurrent=True, cell_size=8)
    spec = find_the_marked(3).spec
    net = ppo.default_policy(spec, cfg)
    params, obs = jax.jit(net.init)(jax.random.key(0)), zero_observation(spec, (1,))
    boxes = jnp.array([[1.0, 0.0, 1.0, 0.0], [1.0, 0.0, 0.0, 1.0], [1.0, 0.0, -1.0, 0.0]])
    obs = obs.replace(agents=jnp.broadcast_to(jnp.append(1.0, boxes.reshape(-1)), obs.agents.shape))

    @jax.jit
    def preferences(carry):
        """How much likelier each box is than the first."""
        actions = jnp.broadcast_to(jnp.arange(4)[:, None, None, None], (4, 1, 1, 2)).astype(jnp.int32)
        no, sequence = jnp.zeros((1, 1), bool), jax.tree.map(lambda x: x[None], obs)
        log_prob = jax.vmap(lambda action: net.evaluate(params, carry, sequence, no, action)[0])(actions)[:, 0, 0, 0]
        return log_prob[2:] - log_prob[1]

    blank = net.init_carry((1,))
    other = jax.tree.map(lambda x: x + jax.random.normal(jax.random.key(1), x.shape), blank)
    # Scores of the boxes' own features beside a sum over what is remembered would differ by as much as before.
    assert (jnp.abs(preferences(other) - preferences(blank)) > 1e-5).all()


def test_parameters_are_the_same_for_any_map_and_a_critic_of_the_state_has_layers():
    def shapes(map_name, algorithm):
        env = envs.make("HeuristicEnemySMAX", map_name=map_name)
        learner = algorithm(env.spec, jmarl.PPOConfig(**SMALL))
        params = jax.eval_shape(learner.init, jax.random.key(0)).params
        return params["actor"], params["critic"]

    assert shapes("3m", jmarl.ippo) == shapes("5m_vs_6m", jmarl.ippo)
    actors, critics = zip(*[shapes(name, jmarl.mappo) for name in ("3m", "5m_vs_6m")], strict=True)
    assert actors[0] == actors[1] and "entities" not in critics[0] and critics[0] != critics[1]


# ------------------------------------------------------------------------------------------------------- bad input


def test_what_cannot_be_read_as_entities_is_refused():
    cfg = jmarl.PPOConfig(torso="entities")
    with pytest.raises(ValueError, match=r"torso='entities' .* memory .* spec.entities is None; leave torso out"):
        jmarl.ippo(envs.probe("memory").spec, cfg)
    spec = find_the_marked(3).spec
    with pytest.raises(ValueError, match="entity_heads=3 must divide entity_size=64"):
        jmarl.ippo(spec, jmarl.PPOConfig(torso="entities", entity_heads=3))
    with pytest.raises(ValueError, match="entity_blocks=0 must be at least 1"):
        jmarl.ippo(spec, jmarl.PPOConfig(torso="entities", entity_blocks=0))
    with pytest.raises(ValueError, match="torso='attention' is unknown here: choose one of layers, entities"):
        jmarl.ippo(spec, jmarl.PPOConfig(torso="attention"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num": 4}, r"names features up to 17, and views have the shape \(13,\)"),
        ({"present": 4}, r"present=4 of boxes, and they have 4 features"),
        ({"first_action": 2}, r"actions \[2, 3, 4\] are done to entities: these must be different ones of the 4"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(change, message):
    spec = find_the_marked(3).spec
    kinds = (spec.entities.kinds[0]._replace(**change),)
    with pytest.raises(ValueError, match=message):
        actor_critic.from_config(jmarl.PPOConfig(torso="entities"), spec._replace(entities=LAYOUT._replace(
            own=((0, 1),), kinds=kinds)))  # fmt: skip


# ------------------------------------------------------------------------------------------------- the command line


def test_a_run_plays_with_other_numbers_on_the_command_line(tmp_path, capsys):
    run = tmp_path / "run"
    words = ["vdn", "--env", "MPE_simple_spread_v3", "--torso", "entities", "--entity-size", "4", "--entity-heads", "1"]
    words += ["--num-envs", "2", "--rollout-length", "26", "--warmup-steps", "52", "--num-updates", "1", "--no-gif"]
    words += ["--buffer-size", "104", "--batch-size", "4", "--hidden-sizes", "4", "--seeds", "1", "--total-steps", "52"]
    train.main([*words, "--eval-episodes", "0", "--absolute-episodes", "0", "--run-dir", str(run)])
    changes = ["--env-kwargs", "num_agents=2", "num_landmarks=4"]
    out = tmp_path / "two.json"
    film = ["--render", str(tmp_path / "two.gif")]
    metrics = evaluate_run.main([str(run), "--episodes", "2", "--out", str(out), *film, *changes])
    told = capsys.readouterr().out.partition("episode 1:")[2]
    assert "agent_1" in told and "agent_2" not in told and (tmp_path / "two.gif").exists()
    assert {"eval/return/agent_0", "eval/return/agent_1"} == {
        name for name in metrics if name.startswith("eval/return/")
    }
    assert json.loads(out.read_text())["env_kwargs"] == {"num_agents": 2, "num_landmarks": 4}


def test_a_run_whose_parameters_do_not_fit_elsewhere_is_refused():
    three, two = (envs.make("MPE_simple_spread_v3", num_agents=n) for n in (3, 2))
    learners = [jmarl.vdn(env.spec, jmarl.VDNConfig(hidden_sizes=(4,))) for env in (three, two)]
    with pytest.raises(UsageError, match=r"What runs/vdn learnt does not fit .* train with torso='entities'"):
        run_folders._elsewhere(Path("runs/vdn"), *learners, two)
