"""Predator-prey against its rules, written plainly in numpy, and the two-step game."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmarl import envs
from jmarl.cli import rendering
from jmarl.envs.predator_prey import CATCH, DOWN, LEFT, RIGHT, STAY, UP, PredatorPreyState

SIZE, VIEW, NUM_PREDATORS, NUM_PREY, MAX_STEPS = 5, 5, 4, 2, 25
OUTSIDE = SIZE * SIZE
# A step's cost that no sum of captures and misses can be mistaken for.
ENV = envs.predator_prey(
    size=SIZE, num_predators=NUM_PREDATORS, num_prey=NUM_PREY, step_cost=-0.125, max_steps=MAX_STEPS
)
MOVES = {UP: (-1, 0), DOWN: (1, 0), LEFT: (0, -1), RIGHT: (0, 1)}
step_once = jax.jit(ENV.step)
step_many = jax.jit(jax.vmap(ENV.step, (None, None, 0)))


def world(picture, time=0):
    """A state: digits are predators, letters are prey, and those that are not in the picture have left the game."""
    cells = "".join(picture.split())
    assert len(cells) == OUTSIDE
    find = lambda names: jnp.array([cells.find(c) if c in cells else OUTSIDE for c in names], jnp.int32)  # noqa: E731
    return PredatorPreyState(predators=find("0123"), prey=find("AB"), time=jnp.int32(time))


def play(picture, *action, time=0, seed=0):
    state, obs, outcome = step_once(world(picture, time), jnp.array(action), jax.random.key(seed))
    return jax.device_get((state, obs, outcome))


def team_reward(outcome):
    """Of captures and misses alone. Everybody receives the same part of it."""
    assert (outcome.reward == outcome.reward[0]).all()
    return float(outcome.reward.sum()) + 0.125


def coordinates(cell):
    return divmod(int(cell), SIZE)


def distance(a, b):
    """Steps from one cell to another; nobody is near those who have left."""
    if OUTSIDE in (a, b):
        return SIZE * SIZE
    return sum(abs(x - y) for x, y in zip(coordinates(a), coordinates(b), strict=True))


@pytest.fixture(scope="module")
def rollout():
    """64 games of random legal actions, "catch" preferred: states and obs [T + 1, B], actions and outcomes [T, B]."""

    def step(loop, key):
        state, obs = loop
        key_act, key_env = jax.random.split(key)
        luck = jax.random.uniform(key_act, obs.action_mask.shape)
        luck = luck.at[..., CATCH].multiply(8.0)
        action = jnp.argmax(jnp.where(obs.action_mask, luck, -1.0), axis=-1)
        state, obs, outcome = jax.vmap(ENV.step)(state, action, jax.random.split(key_env, 64))
        return (state, obs), (state, obs, action, outcome)

    @jax.jit
    def games(key):
        key_reset, key = jax.random.split(key)
        start = jax.vmap(ENV.reset)(jax.random.split(key_reset, 64))
        return start, jax.lax.scan(step, start, jax.random.split(key, MAX_STEPS))[1]

    (first_state, first_obs), (state, obs, action, outcome) = jax.device_get(games(jax.random.key(0)))
    join = lambda x, y: np.concatenate([x[None], y])  # noqa: E731
    return jax.tree.map(join, (first_state, first_obs), (state, obs)), action, outcome


def transitions(rollout):
    """(predators, prey, action, next predators, next prey, team's reward) of every step of every game."""
    (state, _), action, outcome = rollout
    for t, b in itertools.product(range(action.shape[0]), range(action.shape[1])):
        now = state.predators[t, b], state.prey[t, b], action[t, b]
        yield *now, state.predators[t + 1, b], state.prey[t + 1, b], float(outcome.reward[t, b].sum()) + 0.125


# --------------------------------------------------------------------------------------------------------- catching


def test_two_that_catch_a_prey_are_paid_and_leave_with_it():
    picture = """
        .....
        .0A1.
        .....
        2....
        ...3B"""
    state, obs, outcome = play(picture, CATCH, CATCH, STAY, STAY)
    assert team_reward(outcome) == 10
    assert state.predators[:2].tolist() == [OUTSIDE] * 2 and state.prey[0] == OUTSIDE
    assert state.predators[2:].tolist() == [15, 23] and state.prey[1] != OUTSIDE
    assert outcome.terminated.tolist() == [True, True, False, False] == (~obs.agent_mask).tolist()
    assert not outcome.last and outcome.info["captures"] == 1


def test_those_who_left_see_nothing_may_only_stay_and_are_paid_like_all():
    picture = """
        .....
        ..A..
        ..2..
        .....
        ...3."""
    state, obs, outcome = play(picture, RIGHT, CATCH, CATCH, STAY)
    assert not obs.agents[:2].any() and obs.agents[2:].any(axis=1).all()
    assert obs.action_mask[:2].tolist() == [[True] + [False] * 5] * 2
    assert obs.agent_mask.tolist() == [False, False, True, True] == (~outcome.terminated).tolist()
    assert state.predators[:2].tolist() == [OUTSIDE] * 2
    assert team_reward(outcome) == -2  # 2 tried alone: a catch by those who left does not count


def test_a_lone_attempt_is_punished_and_nobody_leaves():
    picture = """
        .....
        .0A1.
        .....
        2....
        ...3B"""
    state, obs, outcome = play(picture, CATCH, STAY, STAY, STAY)
    assert team_reward(outcome) == -2
    assert state.predators.tolist() == [6, 8, 15, 23] and (state.prey != OUTSIDE).all()
    assert obs.agent_mask.all() and not outcome.terminated.any()


def test_every_prey_missed_is_punished():
    picture = """
        ..3..
        .A0B.
        .....
        2....
        ....1"""
    assert team_reward(play(picture, CATCH, STAY, STAY, STAY)[2]) == -4


def test_all_who_catch_a_prey_leave():
    picture = """
        ..0..
        .1A2.
        .....
        .....
        3...B"""
    state, _, outcome = play(picture, CATCH, CATCH, CATCH, STAY)
    assert team_reward(outcome) == 10 and state.predators.tolist() == [OUTSIDE] * 3 + [20]


def test_who_caught_a_prey_does_not_help_with_the_next():
    picture = """
        .....
        0A1B2
        .....
        .....
        ....3"""
    state, _, outcome = play(picture, CATCH, CATCH, CATCH, STAY)
    assert team_reward(outcome) == 10 - 2
    assert state.predators.tolist() == [OUTSIDE, OUTSIDE, 9, 24] and state.prey[0] == OUTSIDE


def test_who_missed_a_prey_may_help_with_the_next():
    picture = """
        .....
        .A1B2
        0....
        .....
        ....3"""
    state, _, outcome = play(picture, STAY, CATCH, CATCH, STAY)
    assert team_reward(outcome) == 10 - 2
    assert state.predators.tolist() == [10, OUTSIDE, OUTSIDE, 24] and state.prey[1] == OUTSIDE


def test_catch_is_legal_only_beside_a_prey():
    picture = """
        0A1..
        .2...
        .....
        .....
        3...."""
    _, obs, _ = play(picture, STAY, STAY, STAY, STAY)  # A cannot move
    assert obs.action_mask[:, CATCH].tolist() == [True, True, True, False]


def test_catch_does_nothing_away_from_prey_or_across_a_corner():
    picture = """
        .A...
        ..1..
        .2...
        .....
        3...."""
    state, _, outcome = play(picture, STAY, CATCH, CATCH, CATCH)
    assert team_reward(outcome) == 0 and state.predators.tolist() == [OUTSIDE, 7, 11, 20]


def test_rewards_captures_and_departures_follow_the_rules(rollout):
    num_captures, num_misses = 0, 0
    for predators, prey, action, next_predators, next_prey, reward in transitions(rollout):
        hunting, captured, missed = set(np.flatnonzero(action == CATCH)), [], 0
        for p in range(NUM_PREY):
            team = {i for i in hunting if distance(predators[i], prey[p]) == 1}
            if len(team) >= 2:
                hunting -= team
                captured.append(p)
            missed += len(team) == 1
        left = [i for i in range(NUM_PREDATORS) if predators[i] == OUTSIDE or (action[i] == CATCH and i not in hunting)]
        assert np.flatnonzero(next_predators == OUTSIDE).tolist() == left
        assert [p for p in range(NUM_PREY) if prey[p] != OUTSIDE and next_prey[p] == OUTSIDE] == captured
        assert reward == pytest.approx(10 * len(captured) - 2 * missed, abs=1e-5)
        num_captures, num_misses = num_captures + len(captured), num_misses + missed
    assert num_captures > 40 and num_misses > 40


def test_rewards_are_shared_by_all_also_by_those_who_left(rollout):
    _, _, outcome = rollout
    assert (outcome.reward == outcome.reward[..., :1]).all()


def test_the_best_return_is_forty():
    env = envs.predator_prey()
    beside = np.array([[10 * row, 10 * row + 2] for row in range(4)]).reshape(-1)
    prey = np.array([*(10 * row + 1 for row in range(4)), 60, 70, 80, 90])
    start = PredatorPreyState(
        predators=jnp.asarray(beside, jnp.int32), prey=jnp.asarray(prey, jnp.int32), time=jnp.int32(0)
    )
    state, obs, outcome = jax.jit(env.step)(start, jnp.full(8, CATCH), jax.random.key(0))
    assert outcome.reward.sum() == 40 and (state.predators == 100).all() and outcome.info["captures"] == 4
    assert outcome.terminated.all() and outcome.last and not obs.agent_mask.any()


# ----------------------------------------------------------------------------------------------------------- moving


def test_no_two_animals_share_a_cell(rollout):
    (state, _), _, _ = rollout
    cells = np.concatenate([state.predators, state.prey], axis=-1).reshape(-1, NUM_PREDATORS + NUM_PREY)
    assert cells.min() >= 0 and cells.max() == OUTSIDE
    for row in cells:
        inside = row[row < OUTSIDE]
        assert len(set(inside)) == len(inside)


def test_predators_move_as_they_want_into_free_cells(rollout):
    num_rivals = 0
    for predators, prey, action, next_predators, _, _ in transitions(rollout):
        wanted = {}
        for i in np.flatnonzero(next_predators != OUTSIDE):
            row, column = np.add(coordinates(predators[i]), MOVES.get(int(action[i]), (0, 0)))
            assert 0 <= row < SIZE and 0 <= column < SIZE  # legal actions do not run into walls
            target = row * SIZE + column
            if target in predators or target in prey:  # a cell that is just being left is not free yet
                assert next_predators[i] == predators[i]
            else:
                wanted.setdefault(target, []).append(i)
        for target, rivals in wanted.items():
            assert sum(next_predators[i] == target for i in rivals) == 1
            assert sum(next_predators[i] == predators[i] for i in rivals) == len(rivals) - 1
            num_rivals += len(rivals) > 1
    assert num_rivals > 5


def test_prey_move_whenever_they_can(rollout):
    for _, prey, _, next_predators, next_prey, _ in transitions(rollout):
        present = np.flatnonzero(next_prey != OUTSIDE)
        # Who is captured in this step leaves a free cell.
        taken = {*next_predators, *prey[present]}
        for p in present:
            free = [c for c in range(OUTSIDE) if distance(c, prey[p]) == 1 and c not in taken]
            if next_prey[p] == prey[p]:
                assert not free or any(cell in next_prey for cell in free)  # another one was faster
            else:
                assert next_prey[p] in free


def test_walls_and_others_block():
    picture = """
        01...
        .A...
        .....
        .....
        2..B3"""
    state, obs, _ = play(picture, UP, LEFT, LEFT, LEFT)
    assert state.predators.tolist() == [0, 1, 20, 24]
    legal = lambda i: set(np.flatnonzero(obs.action_mask[i])) - {CATCH}  # noqa: E731
    assert [legal(i) for i in range(4)] == [
        {STAY, DOWN, RIGHT},
        {STAY, DOWN, LEFT, RIGHT},
        {STAY, UP, RIGHT},
        {STAY, UP, LEFT},
    ]


def test_nobody_follows_into_a_cell_that_is_being_left():
    picture = """
        .....
        ..01.
        .....
        .....
        A..2."""
    state, _, _ = play(picture, RIGHT, RIGHT, STAY, STAY)
    assert state.predators[:2].tolist() == [7, 9]


def test_of_two_that_want_the_same_cell_a_random_one_gets_it():
    picture = """
        A....
        .....
        .0.1.
        .....
        2...."""
    keys = jax.random.split(jax.random.key(0), 400)
    predators = step_many(world(picture), jnp.array([RIGHT, LEFT, STAY, STAY]), keys)[0].predators
    outcomes, counts = np.unique(predators[:, :2], axis=0, return_counts=True)
    assert outcomes.tolist() == [[11, 12], [12, 13]]
    assert counts.min() > 150  # of 400, half expected, standard deviation 10


def test_prey_go_anywhere_free_with_equal_chances_and_stay_if_they_must():
    picture = """
        .1...
        ..A0.
        .....
        ....2
        ...3B"""
    keys = jax.random.split(jax.random.key(0), 600)
    prey = step_many(world(picture), jnp.array([STAY, STAY, STAY, STAY]), keys)[0].prey
    cells, counts = np.unique(prey[:, 0], return_counts=True)
    assert cells.tolist() == [2, 6, 12]
    assert counts.min() > 150  # of 600, a third expected, standard deviation 12
    assert (prey[:, 1] == 24).all()


def test_a_prey_may_take_the_place_of_a_captured_one():
    picture = """
        .....
        .....
        ....0
        ...1A
        ...2B"""
    state, _, outcome = play(picture, CATCH, CATCH, STAY, STAY)
    assert team_reward(outcome) == 10 and state.prey.tolist() == [OUTSIDE, 19]


def test_animals_start_in_different_cells_with_equal_chances():
    state, obs = jax.jit(jax.vmap(ENV.reset))(jax.random.split(jax.random.key(0), 2500))
    cells = np.concatenate([state.predators, state.prey], axis=1)
    assert all(len(set(row)) == NUM_PREDATORS + NUM_PREY for row in cells.tolist())
    for slot in cells.T:
        counts = np.bincount(slot, minlength=OUTSIDE)
        assert len(counts) == OUTSIDE and counts.min() > 50 and counts.max() < 150  # 100 expected, deviation 10
    assert obs.agent_mask.all() and not state.time.any()


# ----------------------------------------------------------------------------------------------------- observations


def test_views_state_and_masks_match_numpy(rollout):
    (state, obs), _, _ = rollout
    reach = VIEW // 2
    for t, b in itertools.product(range(0, MAX_STEPS + 1, 6), range(0, 64, 3)):
        predators, prey = state.predators[t, b], state.prey[t, b]
        grid = np.zeros((SIZE, SIZE, 2))
        for channel, cells in enumerate([predators, prey]):
            for cell in cells[cells < OUTSIDE]:
                grid[*coordinates(cell), channel] = 1
        np.testing.assert_allclose(obs.state[t, b], [*grid.reshape(-1), t / MAX_STEPS], rtol=1e-6)
        for i in range(NUM_PREDATORS):
            view = np.zeros((VIEW, VIEW, 3))
            if predators[i] < OUTSIDE:
                row, column = coordinates(predators[i])
                for y, x in itertools.product(range(-reach, reach + 1), repeat=2):
                    if 0 <= row + y < SIZE and 0 <= column + x < SIZE:
                        view[y + reach, x + reach, :2] = grid[row + y, column + x]
                    else:
                        view[y + reach, x + reach, 2] = 1
                view[reach, reach, 0] = 0  # others only
            np.testing.assert_array_equal(obs.agents[t, b, i].reshape(VIEW, VIEW, 3), view)
            assert obs.agent_mask[t, b, i] == (predators[i] < OUTSIDE)
            mask = obs.action_mask[t, b, i]
            assert mask[STAY] and mask[CATCH] == any(distance(predators[i], cell) == 1 for cell in prey)
            for action, move in MOVES.items():
                row, column = np.add(coordinates(predators[i]), move)
                inside = predators[i] < OUTSIDE and 0 <= row < SIZE and 0 <= column < SIZE
                assert mask[action] == inside


def test_ids_come_first_and_change_nothing_else():
    kwargs = {"size": SIZE, "num_predators": NUM_PREDATORS, "num_prey": NUM_PREY}
    env = envs.check_env(envs.make("predator_prey", agent_ids=True, **kwargs))
    obs, plain = env.reset(jax.random.key(0))[1], ENV.reset(jax.random.key(0))[1]
    np.testing.assert_array_equal(obs.agents[:, :NUM_PREDATORS], np.eye(NUM_PREDATORS))
    np.testing.assert_array_equal(obs.agents[:, NUM_PREDATORS:], plain.agents)


# ------------------------------------------------------------------------------------------------- ends of episodes


def test_a_time_limit_truncates():
    picture = """
        .....
        .0A1.
        .....
        2....
        ...3B"""
    _, _, outcome = play(picture, STAY, STAY, STAY, STAY, time=MAX_STEPS - 2)
    assert not outcome.last
    _, obs, outcome = play(picture, CATCH, CATCH, STAY, STAY, time=MAX_STEPS - 1)
    assert outcome.last and outcome.terminated.tolist() == [True, True, False, False]
    assert obs.state[-1] == 1


def test_an_episode_terminates_when_no_prey_is_left():
    picture = """
        .....
        .0A1.
        .....
        2....
        ...3."""
    _, obs, outcome = play(picture, CATCH, CATCH, STAY, STAY)
    assert outcome.last and outcome.terminated.all()
    assert obs.agent_mask.tolist() == [False, False, True, True]


def test_an_episode_terminates_when_no_predator_is_left_and_not_before():
    picture = """
        .....
        .0A1.
        .....
        {}....
        ....B"""
    assert play(picture.format("."), CATCH, CATCH, STAY, STAY)[2].last
    _, _, outcome = play(picture.format("2"), CATCH, CATCH, STAY, STAY)  # one is left: it hunts on, in vain
    assert not outcome.last and outcome.terminated.tolist() == [True, True, False, True]


def test_episodes_end_as_they_must(rollout):
    (state, _), _, outcome = rollout
    left, captured = state.predators[1:] == OUTSIDE, state.prey[1:] == OUTSIDE
    over = left.all(axis=-1) | captured.all(axis=-1)
    np.testing.assert_array_equal(outcome.terminated, left | over[..., None])
    np.testing.assert_array_equal(outcome.last, over | (state.time[1:] >= MAX_STEPS))
    np.testing.assert_array_equal(outcome.info["captures"], captured.sum(axis=-1))
    assert over.any(axis=0).any() and not over.any(axis=0).all()


# ------------------------------------------------------------------------------------------------------ as an `Env`


def test_vmapped_games_equal_single_ones(rollout):
    (state, _), action, _ = rollout
    picked = jax.tree.map(lambda x: jnp.asarray(x[7, :6]), (state, action))
    keys = jax.random.split(jax.random.key(3), 6)
    many = jax.jit(jax.vmap(ENV.step))(*picked, keys)
    for b in range(6):
        one = step_once(*jax.tree.map(lambda x, b=b: x[b], picked), keys[b])
        jax.tree.map(lambda x, y, b=b: np.testing.assert_array_equal(x[b], y), many, one)


@pytest.mark.parametrize(
    "options",
    [{}, {"size": 3, "num_predators": 2, "num_prey": 7, "view": 3}, {"agent_ids": True, "view": 7, "max_steps": 1}],
    ids=str,
)
def test_it_is_a_well_formed_environment(options):
    env = envs.check_env(envs.predator_prey(**options))
    assert env.spec.max_steps == options.get("max_steps", 200) and env.spec.min_steps == 1
    assert env.unwrapped.size == options.get("size", 10)


MISTAKES = [
    ({"view": 4}, ValueError, "view=4 must be odd and at least 3"),
    ({"view": 1}, ValueError, "view=1 must be odd and at least 3"),
    ({"num_predators": 1}, ValueError, "num_predators=1 can capture nothing: that takes two"),
    ({"num_prey": 0}, ValueError, "num_prey=0 and max_steps=200 must be at least 1"),
    ({"max_steps": 0}, ValueError, "num_prey=8 and max_steps=0 must be at least 1"),
    ({"size": 3}, ValueError, "size=3 gives 9 cells, too few .* Try size=4"),
    ({"miss_penalty": 2.0}, ValueError, "miss_penalty=2.0 is added to the reward.* Try -2.0"),
    ({"step_cost": 0.1}, ValueError, "step_cost=0.1 is added to the reward.* Try -0.1"),
    ({"sise": 5}, TypeError, "'sise' is no option of predator_prey: did you mean 'size'?"),
    ({"time_limit": "terminal"}, ValueError, "time_limit='terminal' has no meaning for predator_prey"),
]


@pytest.mark.parametrize(("options", "error", "message"), MISTAKES, ids=[str(options) for options, _, _ in MISTAKES])
def test_make_says_what_is_wrong(options, error, message):
    with pytest.raises(error, match=message) as raised:
        envs.make("predator_prey", **options)
    assert "\n" not in str(raised.value)


def test_pictures_show_every_state(rollout):
    (state, _), _, outcome = rollout
    game = int(np.argmax(outcome.info["captures"][-1]))
    states = [jax.tree.map(lambda x, t=t: x[t, game], state) for t in range(MAX_STEPS + 1)]
    assert rendering.has_picture(ENV)
    frames, _ = rendering._draw_predator_prey(ENV.unwrapped, states, outcome.reward[:, game])
    assert len(frames) == MAX_STEPS + 1
    pale = rendering._pale(rendering.ALLY)
    leaves = np.diff(state.predators[:, game] == OUTSIDE, axis=0).any(axis=1)
    num_pixels = [{colour: num for num, colour in frame.getcolors(1 << 20)}.get(pale, 0) for frame in frames]
    assert [num > 100 for num in num_pixels] == [False, *leaves] and leaves.any()


# ---------------------------------------------------------------------------------------------------- two-step game


def test_two_step_game_pays_everybody_what_the_second_state_says():
    env = envs.check_env(envs.two_step_game())
    payoff = {0: [[7, 7], [7, 7]], 1: [[0, 1], [1, 8]]}
    key = jax.random.key(0)
    for first, ignored, a, b in itertools.product((0, 1), repeat=4):
        state, start = env.reset(key)
        state, middle, outcome = env.step(state, jnp.array([first, ignored]), key)
        assert not outcome.reward.any() and not outcome.last and not outcome.terminated.any()
        _, end, outcome = env.step(state, jnp.array([a, b]), key)
        assert outcome.reward.tolist() == [payoff[first][a][b]] * 2
        assert outcome.last and outcome.terminated.all()
        assert start.state.tolist() == [1, 0, 0] and middle.state.tolist() == np.eye(3)[1 + first].tolist()
        for obs in (start, middle, end):
            assert obs.agents.tolist() == [obs.state.tolist()] * 2 and obs.action_mask.all()
    assert env.spec.min_steps == env.spec.max_steps == 2
