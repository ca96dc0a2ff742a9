"""IQL, VDN, QMIX and weighted QMIX against the reference values: values, targets, losses, gradients, updates."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference_data import assert_close, load, matching, tree
from test_reference_ppo import spec_of, with_ids
from test_reference_rnn import gru_params

from jmarl import losses
from jmarl.learners import q_learning, wqmix
from jmarl.networks import mixers
from jmarl.types import Observation, Trajectory, Transition

# --------------------------------------------------------------------------------- the reference's names, in ours


def dense_layers(layers):
    return {f"Dense_{i}": layer for i, layer in layers.items()}


def agent_params(agent):
    if "gru" in agent:
        torso, out = agent["fc1"], agent["fc2"]
        return {"torso": {"Dense_0": torso}, "gru": gru_params(agent["gru"]), "outputs_0": {"out": out}}
    return {"torso": {"Dense_0": agent["0"]}, "outputs_0": {"out": agent["1"]}}


def to_params(reference):
    def convert(name, net):
        if name.endswith("agent"):
            return agent_params(net)
        return {part: dense_layers(layers) for part, layers in net.items()}

    return {"mixer": {}} | {name: convert(name, net) for name, net in reference.items()}


def config_of(z, variant, config_class):
    """A config whose sizes are those of the reference's parameters."""
    agent = tree(z, "param/agent")
    first, recurrent = agent.get("fc1", agent.get("0")), "gru" in agent
    cfg = config_class(
        gamma=z["cfg/gamma"],
        double_q="double_q=0" not in variant,
        recurrent=recurrent,
        hidden_sizes=(first["bias"].shape[0],),
        cell_size=agent["fc2"]["kernel"].shape[0] if recurrent else 1,
    )
    if config_class is not q_learning.QConfig:
        weighs_now = re.search(r"agent_mask=mask_t$", variant)
        cfg = cfg.replace(team_reward="mean", next_agent_mask="current" if weighs_now else "next")
    if "param/mixer/hyper_w2/0/kernel" in z:
        embed, hidden = z["param/mixer/hyper_w2/1/kernel"].shape[1], z["param/mixer/hyper_w2/0/kernel"].shape[1]
        cfg = cfg.replace(mixer_embed_size=embed, mixer_hypernet_sizes=(hidden,))
    if config_class is wqmix.WQMIXConfig:
        widths = [z[f"param/central_mixer/net/{i}/bias"].shape[0] for i in range(3)]
        cfg = cfg.replace(suboptimal_weight=z["cfg/alpha"], central_sizes=tuple(widths))
        cfg = cfg.replace(condition="target" if "target_cond" in variant else "online")
    return cfg


def spec(z):
    num_agents, obs_size = z["in/obs"].shape[-2:]
    return spec_of(obs_size + num_agents, z["in/state"].shape[-1], num_agents, z["in/avail"].shape[-1])


def batch_of(z, *, agents_masked, actions_masked=True, of_team=True):
    """The file's transitions, or its padded episodes, as a batch with time first: a team's step counts for everyone."""
    obs = with_ids(z["in/obs"])
    mask = z["in/agent_mask"] if agents_masked else np.ones_like(z["in/agent_mask"])
    avail = z["in/avail"] if actions_masked else np.ones_like(z["in/avail"])
    if "in/filled" in z:
        time_first = lambda x: np.moveaxis(x, 0, 1)  # noqa: E731
        views = [time_first(x) for x in (obs, z["in/state"], avail, mask)]
        now, then = [x[:-1] for x in views], [x[1:] for x in views]
        filled, action, reward = map(time_first, (z["in/filled"], z["in/actions"], z["in/rewards"]))
        terminated = np.broadcast_to(time_first(z["in/terminated"])[..., None], reward.shape)
        carry = jnp.zeros((len(obs), obs.shape[2], z["param/agent/fc2/kernel"].shape[0]))
    else:
        avail_next = z["in/avail_next"] if actions_masked else np.ones_like(avail)
        now = [x[None] for x in (obs, z["in/state"], avail, mask)]
        # The reference weighs both steps of a transition by the same activity.
        then = [x[None] for x in (with_ids(z["in/obs_next"]), z["in/state_next"], avail_next, mask)]
        action, reward, terminated = (z[f"in/{name}"][None] for name in ("actions", "rewards", "terminals"))
        filled, carry = np.ones(action.shape[:2], bool), ()

    def observation(views):
        agents, state, avail, mask = map(jnp.asarray, views)
        return Observation(agents=agents, state=state, action_mask=avail, agent_mask=mask)

    first = np.zeros(filled.shape, bool)
    first[0] = True
    steps = Transition(
        obs=observation(now),
        first=jnp.asarray(first),
        action=jnp.asarray(action.astype(np.int32)),
        reward=jnp.asarray(reward),
        terminated=jnp.asarray(terminated),
        last=jnp.asarray(terminated.all(-1)),
        next_obs=observation(then),
    )
    counts = np.ones_like(steps.obs.agent_mask) if of_team else steps.obs.agent_mask
    return Trajectory(steps=steps, carry=carry, weight=jnp.asarray(filled[..., None] * counts, float))


def reference_form(z, array):
    """`[L, M, ..]` as the file has it: batch first, no time axis for transitions."""
    return np.moveaxis(np.asarray(array), 0, 1) if "in/filled" in z else np.asarray(array)[0]


# ------------------------------------------------------------------------------------------------ QMIX, VDN and IQL


def cases(names):
    """Every variant of every file, with the files' own names, in double precision; the first in single, too."""
    for name in names:
        variants = sorted({groups[0] for groups, _ in matching(load(name), r"out/([^/]*)/loss")})
        for variant, dtype in [(variants[0], "float32"), *((variant, "float64") for variant in variants)]:
            yield pytest.param(name, variant, dtype, id=f"{name}-{variant}-{dtype}")


CONFIGS = {"iql": q_learning.QConfig, "vdn": q_learning.VDNConfig, "qmix": q_learning.QMIXConfig}


def q_setup(name, variant):
    z = load(name)
    family = name.split("_")[0]
    cfg = config_of(z, variant, CONFIGS[family])
    no_mask = "no_agent_mask" in variant or "agent_mask=none" in variant
    batch = batch_of(z, agents_masked=not no_mask, actions_masked="no_avail" not in variant, of_team=family != "iql")
    nets = q_learning.default_nets(spec(z), cfg)
    return z, cfg, nets, batch, to_params(tree(z, "param")), to_params(tree(z, "target_param"))


@pytest.mark.parametrize(
    "name, variant, dtype",
    cases(["qmix_ff", "vdn_ff", "iql_ff", "qmix_rnn", "vdn_rnn", "iql_rnn"]),
    indirect=["dtype"],
)
def test_values_targets_loss_and_gradient(name, variant, dtype):
    z, cfg, nets, batch, params, target_params = q_setup(name, variant)

    @jax.jit
    def everything(params):
        loss = lambda params: q_learning.q_loss(params, target_params, batch, nets=nets, cfg=cfg)  # noqa: E731
        (value, _), grads = jax.value_and_grad(loss, has_aux=True)(params)
        q, next_q = q_learning.unroll(nets.agent, params["agent"], batch, 0)
        _, target_next_q = q_learning.unroll(nets.agent, target_params["agent"], batch, 0)
        chooser = next_q if cfg.double_q else target_next_q
        legal = batch.steps.next_obs.action_mask
        q_tot, target, _, _ = q_learning.values_and_targets(params, target_params, batch, nets=nets, cfg=cfg)
        parts = {
            "q_taken": losses.select(q, batch.steps.action),
            "next_action": losses.masked_argmax(chooser, legal),
            "q_next": losses.next_q(chooser, target_next_q, legal),
            "target": target if nets.mixer is None else target[..., 0],
            **({} if nets.mixer is None else {"q_tot": q_tot[..., 0]}),
        }
        return value, grads, parts

    loss, grads, parts = everything(params)
    assert_close(loss, z[f"out/{variant}/loss"], dtype)
    compared = [part for part in parts if f"out/{variant}/{part}" in z]
    assert "target" in compared
    for part in compared:
        assert_close(reference_form(z, parts[part]), z[f"out/{variant}/{part}"], dtype)

    target, weight = our_form(z, z[f"out/{variant}/target"], batch), batch.weight
    if nets.mixer is not None:
        target, weight = target[..., None], weight[..., :1]

    def given_target(params):
        """The loss, of a target that the file gives: no gradient can flow into it."""
        value = losses.select(q_values(nets.agent, params["agent"], batch), batch.steps.action)
        if nets.mixer is not None:
            q = q_values(nets.agent, params["agent"], batch)
            value = nets.mixer.apply(params["mixer"], q, batch.steps.action, batch.steps.obs)[..., None]
        return jnp.sum(weight * (value - target) ** 2) / jnp.sum(weight)

    require_gradients(z, variant, grads, jax.jit(jax.grad(given_target))(params), dtype)


def q_values(agent, params, batch):
    """Of each step, `[L, M, N, A]`."""
    return agent.apply(params, batch.carry, batch.steps.obs, batch.steps.first)[1]


def our_form(z, array, batch):
    """The inverse of `reference_form`, of arrays without features: zeros where the file has none, in padding."""
    array = np.moveaxis(array, 0, 1) if "in/filled" in z else array[None]
    real = batch.weight > 0 if array.ndim == 3 else batch.weight[..., 0] > 0
    return jnp.where(real, jnp.asarray(array), 0.0)


def require_gradients(z, variant, grads, of_given_target, dtype):
    """Those of the file, where it has some, and of the loss whose targets are the file's."""
    if any(key.startswith(f"grad/{variant}/") for key in z):
        assert_close(grads, to_params(tree(z, f"grad/{variant}")), dtype, "gradient")
    # Where a target is of single precision, so are the errors that the two gradients are made of.
    assert_close(grads, jax.tree.map(np.asarray, of_given_target), dtype, "gradient")


def test_source_selects_unavailable_actions_and_we_do_not():
    """The source's double Q reads the mask of the wrong step; with it, what we choose and lose is the source's."""
    z, cfg, nets, batch, params, target_params = q_setup("qmix_ff", "double_q=1")
    steps, legal_next = batch.steps, batch.steps.next_obs.action_mask

    @jax.jit
    def everything(params):
        q, next_q = q_learning.unroll(nets.agent, params["agent"], batch, 0)
        old_next_q = q_learning.unroll(nets.agent, target_params["agent"], batch, 0)[1]
        action = losses.masked_argmax(next_q, steps.obs.action_mask)
        # What it values so is -1e10 there, which the mixer's ELU hides.
        old_next_q = jnp.where(legal_next, old_next_q, -1e10)
        next_value = nets.mixer.apply(target_params["mixer"], old_next_q, action, steps.next_obs)
        target = jnp.mean(steps.reward, -1) + cfg.gamma * ~steps.terminated.all(-1) * next_value
        value = nets.mixer.apply(params["mixer"], q, steps.action, steps.obs)
        loss, _ = q_learning.q_loss(params, target_params, batch, nets=nets, cfg=cfg)
        return action[0], jnp.mean((value - target) ** 2), loss

    action, of_source, ours = everything(params)
    np.testing.assert_array_equal(action, z["source/double_q=1/next_action"])
    is_legal = np.take_along_axis(z["in/avail_next"], np.asarray(action)[..., None], -1) > 0
    assert np.sum(~is_legal) == z["source/double_q=1/n_unavailable_next_actions"] > 0
    assert_close(of_source, z["source/double_q=1/loss"], "float32")
    assert_close(ours, z["out/double_q=1/loss"], "float32")


# ------------------------------------------------------------------------------------------------------ weighted QMIX


@pytest.mark.parametrize(
    "name, variant, dtype",
    cases([f"wqmix_{v}_{k}" for v in ("cw", "ow") for k in ("ff", "rnn")]),
    indirect=["dtype"],
)
def test_weighted_qmix(name, variant, dtype):
    z = load(name)
    cfg = config_of(z, variant, wqmix.WQMIXConfig)
    # Feed-forward variants mask inactive agents unless they say otherwise, recurrent ones if they say so.
    masked = "no_agent_mask" not in variant if name.endswith("ff") else "agent_mask" in variant
    batch = batch_of(z, agents_masked=masked, actions_masked="no_avail" not in variant)
    central = mixers.mixer(mixers.Central(cfg.central_sizes, z["param/central_mixer/v/0/bias"].shape[0]), spec(z))
    nets = wqmix.default_nets(spec(z), cfg)._replace(central_mixer=central)
    params, target_params = to_params(tree(z, "param")), to_params(tree(z, "target_param"))
    arguments = {"variant": name.split("_")[1], "nets": nets, "cfg": cfg}

    @jax.jit
    def everything(params):
        loss = lambda params: wqmix.wqmix_loss(params, target_params, batch, **arguments)  # noqa: E731
        (value, (metrics, _)), grads = jax.value_and_grad(loss, has_aux=True)(params)
        values, _ = wqmix.weighted_values(params, target_params, batch, **arguments)
        parts = {
            "q_tot": values.value,
            "q_central_taken": values.central_value,
            "target": values.target,
            "w": values.importance,
        }
        return value, metrics, grads, jax.tree.map(lambda x: x[..., 0], parts)

    loss, metrics, grads, parts = everything(params)
    assert_close(loss, z[f"out/{variant}/loss"], dtype)
    assert_close(metrics["loss/td"], z[f"out/{variant}/loss_qmix"], dtype)
    assert_close(metrics["loss/central"], z[f"out/{variant}/loss_central"], dtype)
    filled = z.get("in/filled", True)  # in padding the weights mean nothing
    compared = [part for part in parts if f"out/{variant}/{part}" in z]
    assert {"target", "w"} <= set(compared)
    for part in compared:
        assert_close(reference_form(z, parts[part]) * filled, z[f"out/{variant}/{part}"] * filled, dtype)

    target, w = (our_form(z, z[f"out/{variant}/{part}"], batch) for part in ("target", "w"))
    weight, steps = batch.weight[..., 0], batch.steps

    def given_target(params):
        """Both losses, of a target and weights that the file gives: no gradient can flow into them."""
        q, central_q = (q_values(agent, params[name], batch) for agent, name in zip(agents, agent_names, strict=True))
        value = nets.mixer.apply(params["mixer"], q, steps.action, steps.obs)
        central_value = nets.central_mixer.apply(params["central_mixer"], central_q, steps.action, steps.obs)
        errors = w * (value - target) ** 2 + (central_value - target) ** 2
        return jnp.sum(weight * errors) / jnp.sum(weight)

    agent_names, agents = ("agent", "central_agent"), (nets.agent, nets.central_agent)
    require_gradients(z, variant, grads, jax.jit(jax.grad(given_target))(params), dtype)


# ------------------------------------------------------------------------------------------------------------- mixers


@pytest.mark.parametrize("kind", ["two_layer_hyper", "one_layer_hyper", "central_ff", "vdn"])
def test_mixers(kind, dtype):
    z = load("mixers")
    q, state = jnp.asarray(z["in/q"]), jnp.asarray(z["in/state"])
    if kind == "vdn":
        mix, params = mixers.vdn(), {}
    else:
        name = "central_mixer" if kind == "central_ff" else "mixer"
        layers = tree(z, f"param/{kind}/{name}")
        params = {part: dense_layers(of_part) for part, of_part in layers.items()}
        if kind == "central_ff":
            widths = [layers["net"][i]["bias"].shape[0] for i in "012"]
            module = mixers.Central(widths, layers["v"]["0"]["bias"].shape[0])
        else:
            hidden = (layers["hyper_w2"]["0"]["bias"].shape[0],) if "1" in layers["hyper_w2"] else ()
            bias_size = layers["hyper_b2"]["0"]["bias"].shape[0]
            module = mixers.QMIX(layers["hyper_b1"]["0"]["bias"].shape[0], hidden, bias_size)
        mix = mixers.mixer(module, spec_of(1, state.shape[-1], q.shape[-1], 2))
    obs = Observation(agents=q[..., None], state=state, action_mask=None, agent_mask=jnp.ones(q.shape, bool))

    def total(params, q):
        """Of agents that have one action."""
        return mix.apply(params, q[..., None], jnp.zeros(q.shape, jnp.int32), obs)

    assert_close(jax.jit(total)(params, q), z[f"out/{kind}/q_tot"], dtype)
    if f"out/{kind}/dqtot_dq" in z:
        slope = jax.jit(jax.grad(lambda q: jnp.sum(total(params, q))))(q)
        assert_close(slope, z[f"out/{kind}/dqtot_dq"], dtype, "gradient")
    if any(key.startswith(f"grad/{kind}/") for key in z):
        grads = jax.jit(jax.grad(lambda p: jnp.mean(total(p, q) ** 2)))(params)
        reference = tree(z, f"grad/{kind}")
        reference = reference.get("mixer", reference.get("central_mixer"))
        assert_close(grads, {part: dense_layers(x) for part, x in reference.items()}, dtype, "gradient")


# --------------------------------------------------------------------------------------------------------- double DQN


@pytest.mark.parametrize("kind", ["double", "single"])
def test_double_dqn_is_iql_with_one_agent(kind, dtype):
    z = load("ddqn")
    layers = tree(z, "param/q")
    obs_size, num_actions = layers["0"]["kernel"].shape[0], layers["1"]["bias"].shape[0]
    env_spec = spec_of(obs_size, obs_size, 1, num_actions)
    cfg = q_learning.QConfig(
        learning_rate=z["cfg/lr"],
        adam_eps=z["cfg/adam_eps"],
        max_grad_norm=None,
        gamma=z["cfg/gamma"],
        double_q=kind == "double",
        target_update_interval=int(z["cfg/sync_every"]),
        hidden_sizes=(layers["0"]["bias"].shape[0],),
    )
    learner = q_learning.iql(env_spec, cfg)
    nets = q_learning.default_nets(env_spec, cfg)
    state = jax.jit(learner.init)(jax.random.key(0))
    params, target_params = ({"agent": agent_params(tree(z, f"{p}/q")), "mixer": {}} for p in ("param", "target_param"))
    state = dataclasses.replace(state, params=params, target_params=target_params)
    state = jax.tree.map(lambda x: x.astype(dtype) if x.dtype.kind == "f" else x, state)

    @jax.jit
    def update(state, batch):
        parts = q_learning.values_and_targets(state.params, state.target_params, batch, nets=nets, cfg=cfg)
        grads = jax.grad(lambda p: q_learning.q_loss(p, state.target_params, batch, nets=nets, cfg=cfg)[0])(
            state.params
        )
        return *learner.update(state, batch, jax.random.key(0)), parts, grads

    for k in range(len(z["in/obs"])):
        row = lambda name, k=k: jnp.asarray(z[f"in/{name}"][k])[None, :, None]  # noqa: E731

        def observation(agents):
            ones = jnp.ones(agents.shape[:-1], bool)
            legal = jnp.ones((*ones.shape, num_actions), bool)
            return Observation(agents=agents, state=agents[..., 0, :], action_mask=legal, agent_mask=ones)

        false = jnp.zeros(row("terminals").shape[:2], bool)
        steps = Transition(
            obs=observation(row("obs")),
            first=false,
            action=row("actions").astype(jnp.int32),
            reward=row("rewards"),
            terminated=row("terminals"),
            last=false,
            next_obs=observation(row("obs_next")),
        )
        state, metrics, (q_taken, target, _, _), grads = update(state, Trajectory(steps=steps))
        assert_close(metrics["loss/td"], z[f"out/{kind}/step{k}/loss"], dtype)
        assert_close(q_taken[0, :, 0], z[f"out/{kind}/step{k}/q_taken"], dtype)
        assert_close(target[0, :, 0], z[f"out/{kind}/step{k}/target"], dtype)
        if k == 0:
            assert_close(grads["agent"], agent_params(tree(z, f"grad/{kind}/step0/q")), dtype, "gradient")
    for name, ours in (("param", state.params), ("target_param", state.target_params)):
        reference = agent_params(tree(z, f"after/{kind}/step{k}/{name}/q"))
        assert_close(ours["agent"], reference, dtype, "parameter")
