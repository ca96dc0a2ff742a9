"""Recurrent cells and the recurrent agent against the reference values, from PyTorch and flax."""

import jax
import jax.numpy as jnp
import numpy as np
from reference_data import assert_close, load, tree

from jmarl import networks
from jmarl.networks.recurrent import GRU, LSTM


def gru_params(cell):
    """flax's gates, side by side: r, z, n."""
    side_by_side = lambda *names: jnp.concatenate([cell[n]["kernel"] for n in names], axis=-1)  # noqa: E731
    return {
        "input_kernel": side_by_side("ir", "iz", "in"),
        "input_bias": jnp.concatenate([cell[n]["bias"] for n in ("ir", "iz", "in")]),
        "hidden_kernel": side_by_side("hr", "hz", "hn"),
        "candidate_bias": cell["hn"]["bias"],
    }


def lstm_params(cell):
    gates = "ifgo"
    return {
        "input_kernel": jnp.concatenate([cell[f"i{g}"]["kernel"] for g in gates], axis=-1),
        "hidden_kernel": jnp.concatenate([cell[f"h{g}"]["kernel"] for g in gates], axis=-1),
        "bias": jnp.concatenate([cell[f"h{g}"]["bias"] for g in gates]),
    }


def test_gru_states_with_resets(dtype, maybe_jit):
    z = load("rnn_cells")
    params, h0, x = gru_params(tree(z, "param/gru")), jnp.asarray(z["in/h0"]), jnp.asarray(z["in/x"])
    apply = maybe_jit(GRU(h0.shape[-1]).apply)
    carry, h = apply({"params": params}, h0, x, jnp.asarray(z["in/reset"]))
    assert_close(h, z["out/gru/h"], dtype)
    assert_close(carry, z["out/gru/h"][-1], dtype)


def test_gru_gradients_of_the_fused_backward_pass(dtype, maybe_jit):
    z = load("rnn_cells")
    params, h0, x = gru_params(tree(z, "param/gru")), jnp.asarray(z["in/h0"]), jnp.asarray(z["in/x"])
    reset, cotangent = jnp.asarray(z["in/reset"]), jnp.asarray(z["in/cotangent"])

    def objective(params, x):
        return jnp.sum(GRU(h0.shape[-1]).apply({"params": params}, h0, x, reset)[1] * cotangent)

    grads, grad_x = maybe_jit(jax.grad(objective, argnums=(0, 1)))(params, x)
    assert_close(grads, gru_params(tree(z, "grad/gru/gru")), dtype, "gradient")
    assert_close(grad_x, z["grad/gru_x"], dtype, "gradient")


def test_gru_weights_of_torch(dtype):
    """PyTorch stacks the gates r, z, n in rows, and has a recurrent bias for r and z too."""
    z = load("rnn_cells")
    torch = {name: jnp.asarray(x) for name, x in tree(z, "torch_param/gru").items()}
    size = torch["weight_hh"].shape[-1]
    params = {
        "input_kernel": torch["weight_ih"].T,
        "input_bias": torch["bias_ih"] + torch["bias_hh"].at[2 * size :].set(0),
        "hidden_kernel": torch["weight_hh"].T,
        "candidate_bias": torch["bias_hh"][2 * size :],
    }
    h0, x, reset = (jnp.asarray(z[f"in/{name}"]) for name in ("h0", "x", "reset"))
    assert_close(GRU(size).apply({"params": params}, h0, x, reset)[1], z["out/gru/h"], dtype)


def test_lstm_states_with_resets(dtype, maybe_jit):
    z = load("rnn_cells")
    h0, c0, x, reset = (jnp.asarray(z[f"in/{name}"]) for name in ("h0", "c0", "x", "reset"))
    apply = maybe_jit(LSTM(h0.shape[-1]).apply)
    (c, h), out = apply({"params": lstm_params(tree(z, "param/lstm"))}, (c0, h0), x, reset)
    assert_close(out, z["out/lstm/h"], dtype)
    assert_close(h, z["out/lstm/h"][-1], dtype)
    assert_close(c, z["out/lstm/c"][-1], dtype)


def test_recurrent_agent_of_qmix(dtype):
    """The agent network of the value-based learners: dense, ReLU, GRU, dense, unrolled over whole episodes."""
    z = load("qmix_rnn")
    agent = tree(z, "param/agent")
    obs = np.moveaxis(z["in/obs"], 0, 1)
    num_agents = obs.shape[2]
    x = jnp.asarray(np.concatenate([obs, np.broadcast_to(np.eye(num_agents), (*obs.shape[:-1], num_agents))], -1))
    size, num_actions = agent["fc2"]["kernel"].shape
    model = networks.Model(
        hidden_sizes=(agent["fc1"]["bias"].shape[0],),
        outputs=(networks.Output(num_actions),),
        cell="gru",
        cell_size=size,
        activation="relu",
    )
    net = networks.shared(networks.network(model, x.shape[-1:]), num_agents)
    params = {"torso": {"Dense_0": agent["fc1"]}, "gru": gru_params(agent["gru"]), "outputs_0": {"out": agent["fc2"]}}
    batch = x.shape[1]
    _, q = net.apply(params, net.init_carry((batch,)), x, jnp.zeros(x.shape[:2], bool).at[0].set(True))
    assert_close(jnp.moveaxis(q, 0, 1), z["out/double_q=1,agent_mask=none/q_values"], dtype)
