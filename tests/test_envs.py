"""Every environment: random rollouts over episode ends, against the environment underneath."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmarl import envs
from jmarl.envs import gymnax_adapter
from jmarl.networks import heads

NUM_ENVS = 3

# name, options, steps, exact episode length (None: it varies), how episodes may end.
TIME_LIMIT, GOAL, EITHER = {"truncated"}, {"terminated"}, {"truncated", "terminated"}
SHORT = {"max_steps": 3}  # 4 steps in MPE
CASES = [
    ("MPE_simple_v3", SHORT, 9, 4, TIME_LIMIT),
    ("MPE_simple_tag_v3", SHORT, 9, 4, TIME_LIMIT),
    ("MPE_simple_world_comm_v3", SHORT, 9, 4, TIME_LIMIT),
    ("MPE_simple_world_comm_v3", SHORT | {"action_type": "Discrete"}, 9, 4, TIME_LIMIT),
    ("MPE_simple_spread_v3", {}, 53, 26, TIME_LIMIT),
    ("MPE_simple_spread_v3", SHORT | {"action_type": "Continuous"}, 9, 4, TIME_LIMIT),
    ("MPE_simple_spread_v3", SHORT | {"num_agents": 11}, 9, 4, TIME_LIMIT),
    ("MPE_simple_crypto_v3", SHORT, 9, 4, TIME_LIMIT),
    ("MPE_simple_crypto_v3", SHORT | {"action_type": "Continuous"}, 9, 4, TIME_LIMIT),
    ("MPE_simple_speaker_listener_v4", SHORT, 9, 4, TIME_LIMIT),
    ("MPE_simple_speaker_listener_v4", SHORT | {"action_type": "Continuous"}, 9, 4, TIME_LIMIT),
    ("MPE_simple_push_v3", SHORT, 9, 4, TIME_LIMIT),
    ("MPE_simple_adversary_v3", SHORT, 9, 4, TIME_LIMIT),
    ("MPE_simple_reference_v3", SHORT, 9, 4, TIME_LIMIT),
    ("MPE_simple_reference_v3", SHORT | {"action_type": "Continuous"}, 9, 4, TIME_LIMIT),
    ("MPE_simple_facmac_v1", SHORT, 9, 4, TIME_LIMIT),
    ("MPE_simple_facmac_3a_v1", {}, 27, 26, TIME_LIMIT),
    ("SMAX", {"map_name": "3s_vs_5z", "max_steps": 5}, 13, 6, TIME_LIMIT),
    ("SMAX", {"map_name": "3m", "action_type": "continuous", "max_steps": 5}, 13, 6, TIME_LIMIT),
    ("HeuristicEnemySMAX", {"map_name": "3m", "max_steps": 16}, 60, None, EITHER),
    ("overcooked", {"layout": "cramped_room", "max_steps": 5}, 11, 5, TIME_LIMIT),
    ("overcooked_v2", {"layout": "cramped_room", "max_steps": 5}, 11, 5, TIME_LIMIT),
    ("hanabi", {}, 60, None, GOAL),
    ("coin_game", {"num_inner_steps": 3, "num_outer_steps": 2}, 13, 6, TIME_LIMIT),
    ("switch_riddle", {}, 40, None, EITHER),
    ("jaxnav", {"max_steps": 5, "lidar_num_beams": 10}, 11, None, EITHER),
    ("CartPole-v1", {"max_steps_in_episode": 20}, 60, None, EITHER),
    ("Pendulum-v1", {"max_steps_in_episode": 5}, 11, 5, TIME_LIMIT),
    ("Catch-bsuite", {}, 19, 9, GOAL),
    ("Breakout-MinAtar", {"max_steps_in_episode": 8}, 30, None, EITHER),
]


def _case_id(case):
    return "-".join([case[0], *(str(value) for value in case[1].values())])


# Compiling is what these tests spend their time on, and plain threefry is most of what there is to compile.
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
KEY = jax.random.key(1, impl="unsafe_rbg")
JAXNAV_KEY = jax.random.key(1)  # its rejection sampling never ends with unsafe_rbg, which vmap feeds one key for all


def fast_jit(function):
    return jax.jit(function, compiler_options=FAST)


def random_rollout(env, num_steps, spy=lambda: None, key=KEY):
    """Random legal actions; resets after each last step, as training does. Everything is `[T, B, ...]`."""
    spec = env.spec

    def draw(key):
        if spec.is_discrete:
            return jax.random.uniform(key, (num_steps, spec.num_agents, spec.num_actions))
        # A third beyond the bounds on either side: the adapter clips.
        low, high = np.array(spec.action_low), np.array(spec.action_high)
        margin = (high - low) / 3
        return jax.random.uniform(key, (num_steps, *low.shape), minval=low - margin, maxval=high + margin)

    def one_step(carry, x):
        (state_and_obs, first), (key, drawn) = carry, x
        key_step, key_reset = jax.random.split(key)
        state, obs = jax.tree.map(lambda new, old: jnp.where(first, new, old), env.reset(key_reset), state_and_obs)
        action = jnp.argmax(drawn * obs.action_mask, axis=-1) if spec.is_discrete else drawn
        next_state, next_obs, outcome = env.step(state, action, key_step)
        return ((next_state, next_obs), outcome.last), (obs, action, outcome, next_obs, spy())

    def rollout(key):
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(env.reset, key))
        key, key_act = jax.random.split(key)
        # Drawn before the scan: inside, XLA may compute an action in two places, and round it in two ways.
        drawn = draw(key_act)
        return jax.lax.scan(one_step, (nothing, jnp.array(True)), (jax.random.split(key, num_steps), drawn))[1]

    compiled = fast_jit(jax.vmap(rollout, out_axes=1))
    return jax.tree.map(np.asarray, compiled(jax.random.split(key, NUM_ENVS)))


def spy_on_step_env(raw):
    """What the environment underneath was given and what it answered in the latest trace of its step_env."""
    step_env, latest = raw.step_env, {}

    def spied(key, state, actions, *params):
        # What is looked at twice is computed once, and so rounded in one way.
        latest["call"] = actions, jax.lax.optimization_barrier(step_env(key, state, actions, *params))
        return latest["call"][1]

    raw.step_env = spied
    return lambda: latest["call"]


@functools.cache
def spied_rollout(case_id):
    """The environment of a case and its rollout, compiled once for all tests that look at it."""
    name, options, num_steps, _, _ = next(case for case in CASES if _case_id(case) == case_id)
    env = envs.make(name, **options)
    key = JAXNAV_KEY if name == "jaxnav" else KEY
    return env, random_rollout(env, num_steps, spy_on_step_env(env.unwrapped), key)


@pytest.mark.parametrize("case", CASES, ids=_case_id)
def test_random_rollout_over_episode_ends(case):
    name, _, num_steps, length, ends = case
    env, (obs, action, outcome, next_obs, (given, answer)) = spied_rollout(_case_id(case))
    spec = envs.check_env(env).spec

    # Shapes and dtypes are the spec's.
    batch = (num_steps, NUM_ENVS)
    for o in (obs, next_obs):
        assert o.agents.shape == (*batch, spec.num_agents, *spec.obs_shape) and o.agents.dtype == spec.obs_dtype
        assert o.state.shape == (*batch, *spec.state_shape) and o.state.dtype == spec.obs_dtype
        assert np.isfinite(o.agents).all() and np.isfinite(o.state).all()
    assert outcome.reward.shape == (*batch, spec.num_agents) and outcome.reward.dtype == np.float32
    assert np.isfinite(outcome.reward).all()

    # What the environment underneath says, agent by agent: the true successor, also where an episode ended.
    views, _, rewards, done, _ = answer
    if name in gymnax_adapter.names():
        views, rewards, given = {"agent_0": views}, {"agent_0": rewards}, {"agent_0": given}
    else:
        np.testing.assert_array_equal(outcome.last, done["__all__"])
    for i, agent in enumerate(spec.agents):
        view = views[agent].reshape(*batch, *spec.obs_shape[:-1], -1)
        np.testing.assert_array_equal(next_obs.agents[:, :, i][..., : view.shape[-1]], view)
        assert not next_obs.agents[:, :, i][..., view.shape[-1] :].any()
        np.testing.assert_array_equal(outcome.reward[..., i], rewards[agent].reshape(batch))
        if spec.is_discrete:
            np.testing.assert_array_equal(given[agent], action[..., i])
        else:
            within = np.clip(action[:, :, i], spec.action_low[i], spec.action_high[i])[..., : spec.action_sizes[i]]
            np.testing.assert_allclose(given[agent], within, atol=1e-7)

    # Legal actions only, and padding is never legal.
    if spec.is_discrete:
        assert np.take_along_axis(obs.action_mask, action[..., None], axis=-1).all()
        for i, size in enumerate(spec.action_sizes):
            assert not obs.action_mask[:, :, i, size:].any()

    # Where and how episodes end.
    ended = outcome.last & outcome.terminated.all(-1)
    truncated = outcome.last & ~outcome.terminated.all(-1)
    seen = {kind for kind, where in (("terminated", ended), ("truncated", truncated)) if where.any()}
    assert seen and seen <= ends
    for b in range(NUM_ENVS):
        lengths = np.diff(np.flatnonzero(outcome.last[:, b]), prepend=-1)
        if length is not None:
            assert (lengths == length).all()
        assert spec.max_steps is None or (lengths <= spec.max_steps).all()
        if "truncated" in ends:
            at_limit = np.flatnonzero(truncated[:, b])
            ends_at = np.flatnonzero(outcome.last[:, b])
            assert all(n == spec.max_steps for t, n in zip(ends_at, lengths, strict=True) if t in at_limit)

    # After a reset everybody lives; the next step's observation is the successor unless the episode ended.
    assert obs.agent_mask[0].all() and obs.agent_mask[1:][outcome.last[:-1]].all()
    goes_on = ~outcome.last[:-1]
    np.testing.assert_allclose(obs.agents[1:][goes_on], next_obs.agents[:-1][goes_on], atol=1e-6)


# JaxMARL's own words for who is done, alive and legal, and what jmarl makes of them.


@pytest.fixture(scope="module")
def battles():
    """Random play against the heuristic team: it loses, or the time limit of 16 + 1 steps comes first."""
    return spied_rollout("HeuristicEnemySMAX-3m-16")[1]


def test_smax_unit_that_dies_terminates_on_that_step_and_is_masked_from_the_next(battles):
    obs, action, outcome, next_obs, _ = battles
    died = obs.agent_mask & ~next_obs.agent_mask
    assert died.any() and (died & ~outcome.last[..., None]).any()  # some die while the battle goes on
    assert outcome.terminated[died].all()
    dead = ~obs.agent_mask
    assert outcome.terminated[dead].all() and not obs.agents[dead].any()
    assert (obs.action_mask[dead].sum(-1) == 1).all() and obs.action_mask[dead][:, 4].all()  # it can only stop
    assert (action[dead] == 4).all()


def test_smax_time_limit_truncates_the_living_only(battles):
    _, _, outcome, next_obs, _ = battles
    lost = outcome.last & ~next_obs.agent_mask.any(-1)
    over_time = outcome.last & next_obs.agent_mask.any(-1)
    assert lost.any() and over_time.any()
    assert outcome.terminated[lost].all()
    np.testing.assert_array_equal(outcome.terminated[over_time], ~next_obs.agent_mask[over_time])
    assert set(outcome.info) == {"won"} and outcome.info["won"].dtype == np.float32 and not outcome.info["won"].any()
    # The reward is the team's: everybody's number is the same, the dead included.
    assert (outcome.reward == outcome.reward[..., :1]).all()


def test_smax_won_means_all_enemies_dead_and_somebody_left_and_step_traces_once():
    env = envs.make("HeuristicEnemySMAX", map_name="3m")
    chex.clear_trace_counter()
    step = fast_jit(chex.assert_max_traces(env.step, n=1))
    state, _ = fast_jit(env.reset)(KEY)
    state, _, _ = step(state, jnp.full(3, 4), KEY)

    def outcome_with(alive):
        health = jnp.asarray(np.where(alive, 45, 0), jnp.float32)
        battle = state.state.replace(unit_alive=jnp.array(alive), unit_health=health)
        return step(state.replace(state=battle), jnp.full(3, 4), KEY)[2]

    won = outcome_with([True, True, False, False, False, False])
    assert won.info["won"] == 1 and won.last and won.terminated.all()
    lost = outcome_with([False, False, False, True, False, False])
    assert lost.info["won"] == 0 and lost.last and lost.terminated.all()
    draw = outcome_with([False] * 6)
    assert draw.info["won"] == 0 and draw.last and draw.terminated.all()
    going_on = outcome_with([True, False, True, True, True, True])
    assert not going_on.last and going_on.terminated.tolist() == [False, True, False]


def test_time_limit_terminal_counts_time_limits_as_termination():
    env = envs.make("coin_game", num_inner_steps=3, num_outer_steps=1, time_limit="terminal")
    outcome = random_rollout(env, 7)[2]
    assert outcome.last.any()
    np.testing.assert_array_equal(outcome.terminated, np.repeat(outcome.last[..., None], 2, axis=-1))


def test_switch_riddle_terminates_when_somebody_tells_and_truncates_otherwise():
    env = envs.make("switch_riddle")
    step = fast_jit(env.step)

    def play(action):
        state, _ = fast_jit(env.reset)(KEY)
        for _ in range(env.spec.max_steps):
            state, _, outcome = step(state, jnp.full(3, action), KEY)
            if outcome.last:
                return outcome
        return None

    assert play(2).terminated.all()
    assert not play(0).terminated.any()


TWO_COLORS = {"num_colors": 2, "num_ranks": 2, "num_cards_of_rank": np.array([2, 1])}


@pytest.mark.parametrize(
    ("options", "bound", "least"),
    [({}, 90, 87), (TWO_COLORS | {"max_info_tokens": 1, "hand_size": 1, "num_agents": 3}, 10, 5)],
    ids=["2 players", "3 players, few cards"],
)
def test_no_game_of_hanabi_is_longer_than_its_bound(options, bound, least):
    env = envs.make("hanabi", **options)
    raw, spec = env.unwrapped, env.spec
    assert spec.max_steps == bound
    index = np.arange(spec.num_actions)
    is_hint = (index >= 2 * raw.hand_size) & (index < spec.num_actions - 1)
    # At random, the first legal move, and hints where there is a token, else discards: the longest games.
    wishes = np.array([0.0 * index, -index, 4.0 * is_hint + 2.0 * (index < raw.hand_size)])

    def step(loop, keys):
        (state, obs), length, over = loop
        key, wish = keys
        wish = wish + jax.random.uniform(key, obs.action_mask.shape)
        action = jnp.argmax(jnp.where(obs.action_mask, wish, -jnp.inf), axis=-1)
        state, obs, outcome = env.step(state, action, key)
        return ((state, obs), length + ~over, over | outcome.last), None

    def play(key, wish):
        start = env.reset(key), jnp.int32(0), jnp.bool_(False)
        keys = jax.random.split(key, bound + 5), jnp.tile(wish, (bound + 5, 1))
        return jax.lax.scan(step, start, keys)[0][1:]

    games = jax.vmap(jax.vmap(play, (0, None)), (None, 0))
    length, over = fast_jit(games)(jax.random.split(jax.random.key(0), 32), wishes)
    assert over.all() and length.max() <= bound and length[2].max() >= least


def test_agents_keep_the_environments_order_not_that_of_sorted_keys():
    env = envs.make("MPE_simple_spread_v3", num_agents=11)
    assert env.spec.agents == tuple(f"agent_{i}" for i in range(11))
    state, obs = fast_jit(env.reset)(KEY)
    np.testing.assert_array_equal(obs.agents[:, 2:4], state.p_pos[:11])  # own position
    assert envs.make("MPE_simple_speaker_listener_v4").spec.agents == ("speaker_0", "listener_0")


def test_agents_of_different_widths_are_padded_and_padded_actions_do_no_harm():
    env = envs.make("MPE_simple_speaker_listener_v4")
    spec = env.spec
    assert spec.obs_sizes == (3, 11) and spec.action_sizes == (3, 5)
    assert (spec.obs_shape, spec.state_shape, spec.num_actions) == ((11,), (14,), 5)
    state, obs = fast_jit(env.reset)(KEY)
    assert obs.action_mask.tolist() == [[True] * 3 + [False] * 2, [True] * 5]
    np.testing.assert_array_equal(obs.state, np.concatenate([obs.agents[0, :3], obs.agents[1]]))
    step = fast_jit(env.step)
    padded, last = (step(state, jnp.array([a, 1]), KEY)[1] for a in (4, 2))
    chex.assert_trees_all_equal(padded, last)


def test_ids_come_before_an_agents_own_features():
    plain, with_ids = (envs.make("MPE_simple_speaker_listener_v4", agent_ids=ids) for ids in (False, True))
    assert with_ids.spec.obs_sizes == (5, 13) and with_ids.spec.state_shape == plain.spec.state_shape
    views, rows = (fast_jit(env.reset)(KEY)[1].agents for env in (plain, with_ids))
    np.testing.assert_array_equal(rows[:, :2], np.eye(2))
    np.testing.assert_array_equal(rows[:, 2:], views)


def test_images_keep_their_shape_and_take_ids_as_channels():
    env = envs.make("overcooked", agent_ids=True)
    assert env.spec.obs_shape == (4, 5, 2 + 26) and env.spec.state_shape == (4, 5, 2 * 26)
    obs = fast_jit(env.reset)(KEY)[1]
    assert (obs.agents[0, :, :, 0] == 1).all() and (obs.agents[0, :, :, 1] == 0).all()
    np.testing.assert_array_equal(obs.state, np.concatenate([obs.agents[0, :, :, 2:], obs.agents[1, :, :, 2:]], -1))
    assert envs.make("overcooked", flatten=True).spec.obs_shape == (4 * 5 * 26,)


def test_shaped_reward_is_added_on_request():
    env = envs.make("overcooked", shaped_reward=0.5)
    state, _ = fast_jit(env.reset)(KEY)
    # Agent 0 stands before an empty pot with an onion in hand and puts it in.
    x, y = (int(v) for v in state.pot_pos[0])
    state = state.replace(
        agent_pos=state.agent_pos.at[0].set(jnp.array([x, y + 1], jnp.uint32)),
        agent_dir=state.agent_dir.at[0].set(jnp.array([0, -1], state.agent_dir.dtype)),
        agent_dir_idx=state.agent_dir_idx.at[0].set(0),
        agent_inv=state.agent_inv.at[0].set(3),
    )
    interact, stay = 5, 4
    reward = fast_jit(env.step)(state, jnp.array([interact, stay]), KEY)[2].reward
    assert reward.tolist() == [0.5 * 3, 0]  # 3 is PLACEMENT_IN_POT_REW; the sparse reward is 0


@pytest.mark.parametrize("num_hunters", [3, 6, 9])
def test_facmac_prey_is_scripted_and_no_agent(num_hunters):
    spec = envs.make(f"MPE_simple_facmac_{num_hunters}a_v1").spec
    assert spec.agents == tuple(f"adversary_{i}" for i in range(num_hunters))


@pytest.mark.parametrize(
    "make",
    [
        lambda: envs.make("MPE_simple_spread_v3"),
        lambda: envs.make("CartPole-v1"),
        lambda: envs.probe("memory"),
    ],
    ids=["spread", "cartpole", "probe"],
)
def test_step_traces_once_in_four_calls(make):
    env = make()
    chex.clear_trace_counter()  # it counts by the code's place, which all adapted environments share
    step = fast_jit(chex.assert_max_traces(env.step, n=1))
    state, _ = fast_jit(env.reset)(KEY)
    for _ in range(4):
        state, _, _ = step(state, jnp.zeros(env.spec.num_agents, jnp.int32), KEY)


# Shapes only, without compiling.

SMAX_MAPS = ("3m", "2s3z", "25m", "3s5z", "8m", "5m_vs_6m", "10m_vs_11m", "27m_vs_30m", "3s5z_vs_3s6z", "3s_vs_5z")
SMAX_MAPS += ("6h_vs_8z", "smacv2_5_units", "smacv2_10_units", "smacv2_20_units")


def test_every_smax_map_is_tested():
    from jaxmarl.environments.smax.smax_env import MAP_NAME_TO_SCENARIO

    assert set(SMAX_MAPS) == set(MAP_NAME_TO_SCENARIO)


@pytest.mark.parametrize("map_name", SMAX_MAPS)
def test_every_smax_map_has_its_units(map_name):
    env = envs.make("HeuristicEnemySMAX", map_name=map_name)
    raw = env.unwrapped
    assert env.spec.agents == tuple(f"ally_{i}" for i in range(raw.num_allies))
    assert env.spec.num_actions == 5 + raw.num_enemies and env.spec.max_steps == 101


def test_smax_takes_a_scenario_object():
    from jaxmarl.environments.smax import map_name_to_scenario

    assert envs.make("SMAX", scenario=map_name_to_scenario("3s_vs_5z")).spec.action_sizes == (10,) * 3 + (8,) * 5


def test_smax_against_a_learned_policy():
    class Uniform:
        def apply(self, params, obs):
            return heads.categorical(jnp.zeros((obs.shape[0], 8)) + params), None

    env = envs.check_env(envs.make("LearnedPolicyEnemySMAX", map_name="3m", policy=Uniform(), params=jnp.zeros(())))
    assert env.spec.num_agents == 3


@pytest.mark.parametrize("name", [n for n in gymnax_adapter.names() if n != "MNISTBandit-bsuite"])  # it downloads
def test_every_gymnax_environment_is_well_formed(name):
    spec = envs.check_env(envs.make(name)).spec
    assert spec.agents == ("agent_0",) and spec.state_shape == spec.obs_shape
