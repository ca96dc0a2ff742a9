"""Networks: resets, sharing, true widths, images."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import jmarl
from jmarl import networks, types
from jmarl.learners import critics
from jmarl.networks import actor_critic, torsos
from jmarl.networks import sharing as sharing_module
from jmarl.networks.recurrent import gru_scan

L, M, N, F, H = 5, 3, 4, 6, 8


def model(size=2, **kwargs):
    return networks.Model(hidden_sizes=(7,), outputs=(networks.Output(size),), cell_size=H, **kwargs)


def compiled(net):
    """The network, whose functions are compiled, which is faster than op by op."""
    return net._replace(init=jax.jit(net.init), apply=jax.jit(net.apply))


@pytest.fixture
def inputs():
    x = jax.random.normal(jax.random.key(1), (L, M, N, F))
    first = jax.random.bernoulli(jax.random.key(2), 0.3, (L, M))
    return x, first


class Accumulator(nn.Module):
    """h' = h + x, the cell of a test with an answer that one can do in the head."""

    size: int = 1

    @nn.compact
    def __call__(self, carry, x, first):
        def step(h, inputs):
            x, start = inputs
            h = jnp.where(start[:, None], 0, h) + x
            return h, h

        return jax.lax.scan(step, carry, (x, first))


def test_carry_is_reset_before_the_first_step_of_an_episode(monkeypatch):
    # The episode ends after t = 1, so s_2 is the first of the next one. Resetting a step late gives [1, 1, 2, 3].
    monkeypatch.setitem(networks.CELLS, "accumulator", Accumulator)
    identity = networks.Model(hidden_sizes=(), outputs=(lambda x: x,), cell="accumulator", cell_size=1)
    first = jnp.array([[True], [False], [True], [False]])
    _, h = identity.apply({}, jnp.zeros((1, 1)), jnp.ones((4, 1, 1)), first)
    np.testing.assert_array_equal(h[:, 0, 0], [1, 2, 1, 2])


@pytest.mark.parametrize(("size", "window"), [((5, 5), 5), ((3, 4), 5), ((4, 3), 2), ((2, 2), 1), ((17, 17), 3)])
def test_a_convolution_is_that_of_flax(size, window):
    x = jax.random.normal(jax.random.key(0), (3, *size, 2))
    init = nn.initializers.normal(1.0)
    here, there = torsos.Convolution(4, window, init), nn.Conv(4, (window, window), kernel_init=init)
    params = here.init(jax.random.key(1), x)
    jax.tree.map(np.testing.assert_array_equal, params, there.init(jax.random.key(1), x))

    def both(net):
        return jax.jit(jax.value_and_grad(lambda params, x: jnp.mean(jnp.sin(net.apply(params, x))), (0, 1)))(params, x)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), both(here), both(there))


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_unrolling_equals_stepping(cell, inputs):
    x, first = inputs
    net = compiled(networks.shared(networks.network(model(cell=cell), (F,)), N))
    params, carry = net.init(jax.random.key(0)), net.init_carry((M,))
    last, out = net.apply(params, carry, x, first)
    for t in range(L):
        carry, step = net.apply(params, carry, x[t : t + 1], first[t : t + 1])
        np.testing.assert_allclose(step[0], out[t], atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), carry, last)


def test_reset_forgets_everything_before(inputs):
    x, _ = inputs
    net = compiled(networks.shared(networks.network(model(cell="gru"), (F,)), N))
    params = net.init(jax.random.key(0))
    first = jnp.zeros((L, M), bool).at[2].set(True)
    _, out = net.apply(params, net.init_carry((M,)), x, first)
    _, other = net.apply(params, net.init_carry((M,)), x.at[:2].add(1.0), first)
    np.testing.assert_array_equal(out[2:], other[2:])
    assert not np.allclose(out[:2], other[:2])


def test_gru_gradients_match_finite_differences():
    key = jax.random.split(jax.random.key(0), 4)
    first = jnp.zeros((L, M), bool).at[2, 1].set(True)
    args = (
        0.5 * jax.random.normal(key[0], (H, 3 * H)),
        jax.random.normal(key[1], (H,)),
        jax.random.normal(key[2], (L, M, 3 * H)),
        jax.random.normal(key[3], (M, H)),
    )
    scan = jax.jit(lambda *arrays: gru_scan(*map(jnp.asarray, arrays), first))
    check_grads(scan, args, order=1, modes=["rev"], atol=1e-2, rtol=1e-2)


def test_every_parameter_has_a_gradient(inputs):
    x, first = inputs
    net = compiled(networks.shared(networks.network(model(cell="gru", layer_norm=True), (F,)), N))
    params = net.init(jax.random.key(0))
    grads = jax.jit(jax.grad(lambda p: jnp.sum(net.apply(p, net.init_carry((M,)), x, first)[1] ** 2)))(params)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        assert np.abs(grad).max() > 0, path


@pytest.mark.parametrize("cell", [None, "gru"])
def test_per_agent_equals_a_python_loop_over_agents(cell, inputs):
    x, first = inputs
    single = networks.network(model(cell=cell), (F,))
    single, net = compiled(single), compiled(networks.per_agent(single, N))
    params = net.init(jax.random.key(0))
    carry, out = net.apply(params, net.init_carry((M,)), x, first)
    for i in range(N):
        own = jax.tree.map(lambda p, i=i: p[i], params)
        own_carry, own_out = single.apply(own, single.init_carry((M,)), x[:, :, i], first)
        np.testing.assert_allclose(out[:, :, i], own_out, atol=1e-6)
        jax.tree.map(lambda c, o, i=i: np.testing.assert_allclose(c[:, i], o, atol=1e-6), carry, own_carry)


@pytest.mark.parametrize("cell", [None, "gru"])
def test_groups_see_their_true_width_and_keep_the_agents_order(cell, inputs):
    x, first = inputs
    groups, sizes = (0, 1, 0, 1), (F, 4)
    nets = [networks.network(model(size, cell=cell), (width,)) for size, width in zip((3, 2), sizes, strict=True)]
    net = compiled(networks.per_group(nets, groups, sizes))
    params = net.init(jax.random.key(0))
    _, out = net.apply(params, net.init_carry((M,)), x, first)
    assert out.shape == (L, M, N, 3)
    for i, g in enumerate(groups):
        member = compiled(networks.shared(nets[g], 1))
        _, own = member.apply(params[f"group_{g}"], member.init_carry((M,)), x[:, :, i : i + 1, : sizes[g]], first)
        np.testing.assert_allclose(out[:, :, i, : own.shape[-1]], own[:, :, 0], atol=1e-6)
    np.testing.assert_array_equal(out[:, :, 1, 2], 0)  # padded output of the narrower group


def joined_inputs(whose, num=N, length=L, size=M):
    """State, ids and views; everyone's actions before them, each agent's own replaced or not."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=(length, size, *shape)), jnp.float32)  # noqa: E731
    others, own = draw(num, 2), None if whose == "same" else draw(num, 2)
    actions = actor_critic.joint_actions(own, others)
    return actions.replace(parts=(*actions.parts, draw(1, 3), jnp.eye(num)[None, None], draw(num, 2)))


@pytest.mark.parametrize("whose", ["same", "own"])
@pytest.mark.parametrize("cell", [None, "gru"])
@pytest.mark.parametrize("sharing", networks.SHARING)
def test_features_in_parts_are_read_as_if_they_stood_side_by_side(sharing, cell, whose, inputs, monkeypatch):
    monkeypatch.setattr(torsos, "MANY_AGENTS", 1)
    x = joined_inputs(whose)
    width = 2 * N + 3 + N + 2
    kinds = [0, 1, 1, 0]
    net = sharing_module.share(
        sharing, lambda out: model(out, cell=cell), input_shapes=[(width,)] * N, output_sizes=(2,) * N, kinds=kinds
    )
    net = compiled(net)
    params, carry = net.init(jax.random.key(0)), net.init_carry((M,))
    side_by_side = x.joined()
    assert side_by_side.shape == (L, M, N, width)
    if whose == "own":
        for i in range(N):
            np.testing.assert_array_equal(side_by_side[:, :, i, 2 * i : 2 * i + 2], x.own[:, :, i])
    found = net.apply(params, carry, x, inputs[1])
    expected = net.apply(params, carry, side_by_side, inputs[1])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)

    def loss(own, others, is_joined=False):
        read = x.replace(own=own, parts=(others, *x.parts[1:]))
        return jnp.sum(net.apply(params, carry, read.joined() if is_joined else read, inputs[1])[1] ** 2)

    if whose == "own":
        gradients = jax.grad(loss, (0, 1))(x.own, x.parts[0])
        slow = jax.grad(lambda *actions: loss(*actions, is_joined=True), (0, 1))(x.own, x.parts[0])
        for a, b in zip(gradients, slow, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("view", ["state", "state_obs"])
def test_the_state_is_multiplied_once_for_all_agents(view):
    """Operations of a centralised critic grow with the number of agents, not with its square, if views do not."""

    def operations(num):
        spec = types.EnvSpec(
            name="wide",
            agents=tuple(f"agent_{i}" for i in range(num)),
            obs_shape=(2,),
            state_shape=(2048,),
            num_actions=2,
        )
        cfg = jmarl.DDPGConfig(hidden_sizes=(16,), critic_view=view)
        critic = critics.network(spec, cfg)
        obs = types.Observation(
            agents=jnp.zeros((1, 8, num, 2)),
            state=jnp.zeros((1, 8, 2048)),
            agent_mask=jnp.ones((1, 8, num), bool),
            action_mask=None,
        )
        params = jax.eval_shape(critic.init, jax.random.key(0))
        action, first = jnp.zeros((1, 8, num, 2)), jnp.zeros((1, 8), bool)
        apply = jax.jit(lambda params: critic.apply(params, (), (obs, action, action), first)[1])
        return apply.lower(params).compile().cost_analysis()["flops"]

    assert operations(24) < 2 * operations(6)  # the state alone: as many; and something for each agent


def test_groups_must_name_every_network():
    nets = [networks.network(model(), (F,))] * 2
    with pytest.raises(ValueError, match=r"groups=\(0, 2\) must name each of the 2 networks"):
        networks.per_group(nets, (0, 2), (F, F))


def test_image_torsos_are_built_as_they_are_told():
    images = jax.random.normal(jax.random.key(0), (1, 2, 5, 6, 3))

    def out(**options):
        build = networks.Model(hidden_sizes=(), outputs=(networks.Output(2),), is_image=True, **options)
        net = compiled(networks.network(build, (5, 6, 3)))
        params = net.init(jax.random.key(1))
        return params, net.apply(params, (), images, jnp.zeros((1, 2), bool))[1]

    plain = out(activation="relu")
    for options in ({"activation": "tanh"}, {"activation": "relu", "kernel_init": "lecun"}):
        assert not np.allclose(plain[1], out(**options)[1])
    normalised, _ = out(activation="relu", layer_norm=True)
    assert len(jax.tree.leaves(normalised)) == len(jax.tree.leaves(plain[0])) + 2 * 4  # after each of four layers


def test_image_torso_keeps_leading_axes():
    build = networks.Model(hidden_sizes=(7,), outputs=(networks.Output(2),), is_image=True)
    net = compiled(networks.network(build, (5, 6, 3)))
    images = jax.random.normal(jax.random.key(0), (L, M, N, 5, 6, 3))
    params = net.init(jax.random.key(1))
    _, out = net.apply(params, (), images, jnp.zeros((L, M), bool))
    assert out.shape == (L, M, N, 2)
    _, one = net.apply(params, (), images[:1, :1, :1], jnp.zeros((1, 1), bool))
    np.testing.assert_allclose(out[0, 0, 0], one[0, 0, 0], atol=1e-5)


@pytest.mark.parametrize("shape", [(64, 64), (5, 16), (48, 3), (3, 3, 2, 8)], ids=str)
def test_orthogonal_matrices_are_orthogonal_and_differ_by_key(shape):
    init = jax.jit(lambda key: networks.orthogonal(2.0)(key, shape).unbox())
    x, other = (np.asarray(init(jax.random.key(i))).reshape(-1, shape[-1]) for i in range(2))
    x = x if len(x) >= x.shape[1] else x.T
    np.testing.assert_allclose(x.T @ x, 4 * np.eye(x.shape[1]), atol=1e-4)
    assert not np.allclose(x.ravel(), other.ravel() if x.shape == other.shape else other.T.ravel())
