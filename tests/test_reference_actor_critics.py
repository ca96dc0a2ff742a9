"""DDPG, MADDPG, MATD3, SAC, MASAC and COMA against the reference values: losses, gradients, parameters after updates.

Not compared: `source/*` and `grad/source`, `after/source`, `out/source` of masac_source, values that the reference
itself calls defects (a mask that covers half of the actors' loss).
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference_data import assert_close, load, matching, tree
from test_reference_ppo import spec_of, with_ids

from jmarl.learners import critics, ddpg, sac
from jmarl.learners.coma import COMAConfig, COMATargets, coma_loss, coma_targets, values
from jmarl.learners.coma import default_nets as coma_nets
from jmarl.networks import heads
from jmarl.types import Observation, Trajectory, Transition

# --------------------------------------------------------------------------------- the reference's names, in ours


def network_params(layers, sizes):
    """An MLP of the reference. Its critics read `sizes`, (view, actions), then ids; ours read actions first."""
    layers = dict(layers)
    log_std = layers.pop("log_std", None)
    count = len(layers)
    hidden = {f"Dense_{i}": layers[str(i)] for i in range(count - 1)}
    if sizes is not None:
        order = np.arange(hidden["Dense_0"]["kernel"].shape[0])
        view, actions = sizes
        order = np.concatenate([order[view : view + actions], order[:view], order[view + actions :]])
        hidden["Dense_0"] = {**hidden["Dense_0"], "kernel": hidden["Dense_0"]["kernel"][order]}
    out = {"out": layers[str(count - 1)]}
    if log_std is not None:
        out = {"head": out, "log_std": log_std}
    return {"torso": hidden, "outputs_0": out}


def to_params(reference, sizes, normal_actor=False):
    """{"actor", "critic" or "critic1", "critic2"} in our form; `sizes` are the critics' view and actions."""
    critics = [reference[name] for name in sorted(reference) if name.startswith("critic")]
    params = {"critic": tuple(network_params(net, sizes) for net in critics)} if critics else {}
    if "actor" in reference:
        actor = network_params(reference["actor"], None)
        if normal_actor:
            actor["outputs_0"] = {"head": actor["outputs_0"]}
        params["actor"] = actor
    return params


def config_of(z, layers, config_class, **changes):
    """A config whose sizes are those of the reference's parameters."""
    hidden = tuple(layers[str(i)]["bias"].shape[0] for i in range(len([k for k in layers if k.isdigit()]) - 1))
    cfg = config_class(
        learning_rate=z["cfg/lr_actor"],
        critic_learning_rate=z["cfg/lr_critic"],
        adam_eps=z["cfg/adam_eps"],
        max_grad_norm=z.get("cfg/max_grad_norm"),
        gamma=z["cfg/gamma"],
        tau=z["cfg/tau"],
        hidden_sizes=hidden,
        mask_actions=False,
    )
    return dataclasses.replace(cfg, **changes)


def load_agents(name):
    """A file with an agent axis and a leading axis of updates in all its inputs."""
    z = load(name)
    single = "in/agent_mask" not in z
    for key in [key for key in z if key.startswith("in/")]:
        if single:
            z[key] = np.expand_dims(z[key], -1 if key in ("in/rewards", "in/terminals") else -2)
        if z[key].ndim == (2 if key in ("in/rewards", "in/terminals", "in/agent_mask") else 3):
            z[key] = z[key][None]
    z.setdefault("in/agent_mask", np.ones(z["in/rewards"].shape, bool))
    return z


def batch_of(z, k, *, ids=True):
    """Update k's transitions, sequences of one step."""
    row = lambda name: jnp.asarray(z[f"in/{name}"][k])[None]  # noqa: E731

    def observation(name):
        views = z[f"in/{name}"][k][None]
        state = views.reshape(*views.shape[:2], -1)
        views = with_ids(views) if views.shape[-2] > 1 and ids else views
        return Observation(
            agents=jnp.asarray(views), state=jnp.asarray(state), action_mask=None, agent_mask=row("agent_mask")
        )

    false = jnp.zeros(row("rewards").shape[:2], bool)
    steps = Transition(
        obs=observation("obs"),
        first=false,
        action=row("actions"),
        reward=row("rewards"),
        terminated=row("terminals"),
        last=false,
        next_obs=observation("obs_next"),
    )
    return Trajectory(steps=steps)


def noise_of(z, name, k):
    return jnp.asarray(z[f"in/{name}"][k])[None]


def spec(z, ids=True):
    num_agents, obs_size = z["in/obs"].shape[-2:]
    width = obs_size + num_agents if num_agents > 1 and ids else obs_size
    return spec_of(width, num_agents * obs_size, num_agents, action_size=z["in/actions"].shape[-1])


def critic_sizes(env_spec, z):
    """Features of the critics' view, and of the actions they read."""
    return env_spec.num_agents * z["in/obs"].shape[-1], env_spec.num_agents * env_spec.action_size


def start(init, params, target_params, dtype):
    """A fresh state with the reference's parameters, in the precision of the moment."""
    state = jax.jit(init)(jax.random.key(0))
    state = dataclasses.replace(state, params={**state.params, **params}, target_params=target_params)
    return jax.tree.map(lambda x: x.astype(dtype) if x.dtype.kind == "f" else x, state)


def slopes(targets, actor_loss, nets, cfg):
    """Compiled gradients of both losses with respect to all parameters."""
    options = {"nets": nets, "cfg": cfg}

    def critic_loss(params, target_params, batch, noise):
        target = targets(params, target_params, batch, noise, **options)
        return critics.critic_loss(params, batch, target, **options)[0]

    return jax.jit(jax.grad(critic_loss)), jax.jit(jax.grad(lambda *x: actor_loss(*x, **options)[0]))


def squeeze(x, like):
    """`[1, M, N]` as the file has it: without the agent axis where there is one agent."""
    return np.asarray(x)[0].reshape(like.shape)


# ------------------------------------------------------------------------------------------------ DDPG, MADDPG, TD3


def check_ddpg(z, variant, reference, target_reference, cfg, dtype, *, env_spec, noise=None, clipped=False):
    nets = ddpg.default_nets(env_spec, cfg)
    init, update = ddpg.training(nets, cfg)
    sizes = critic_sizes(env_spec, z)
    state = start(init, to_params(reference, sizes), to_params(target_reference, sizes), dtype)
    update = jax.jit(update)
    targets = lambda params, *args, **options: ddpg.ddpg_targets(*args, **options)  # noqa: E731
    critic_slope, actor_slope = slopes(targets, ddpg.ddpg_actor_loss, nets, cfg)
    prefix = f"{variant}/" if variant else ""
    for k in range(len(z["in/obs"])):
        batch, smoothing = batch_of(z, k), None if noise is None else noise_of(z, noise, k)
        before = state
        state, metrics = update(state, batch, smoothing, None)
        out, kind = f"out/{prefix}step{k}", "clipped" if clipped else "parameter"
        loose = later(k, dtype, kind)
        assert_close(metrics["loss/critic"], z[f"{out}/loss_critic"], dtype, loose)
        target_name = f"{out}/q_target"
        mask = np.asarray(batch.steps.obs.agent_mask)[0]
        assert_close(metrics["value/target"], mean(z[target_name], mask), dtype, loose)
        if f"{out}/loss_actor" in z:
            assert_close(metrics["loss/actor"], z[f"{out}/loss_actor"], dtype, later(k + 1, dtype, kind))
        if f"{out}/grad_norm_critic" in z:
            assert_close(metrics["loss/critic_grad_norm"], z[f"{out}/grad_norm_critic"], dtype, loose)
        if f"{out}/grad_norm_actor" in z:
            assert_close(metrics["loss/actor_grad_norm"], z[f"{out}/grad_norm_actor"], dtype, later(k + 1, dtype, kind))
        new_critic = {**before.params, "critic": state.params["critic"]}
        critic = lambda s=before, b=batch, n=smoothing: critic_slope(s.params, s.target_params, b, n)  # noqa: E731
        actor = lambda p=new_critic, b=batch: actor_slope(p, b, None)  # noqa: E731
        check_gradients(z, f"grad/{prefix}step{k}", sizes, dtype, critic, actor)
        check_after(z, f"after/{prefix}step{k}", state, sizes, dtype, kind)
    return state


def later(k, dtype, parameters):
    """Losses and norms after k updates are those of parameters that agree within their own tolerance."""
    return "after" if k > 0 and (dtype == "float32" or parameters == "clipped") else "loss"


def mean(x, mask):
    x = np.asarray(x).reshape(mask.shape)
    return np.sum(x * mask) / np.sum(mask)


def check_gradients(z, prefix, sizes, dtype, critic, actor, normal_actor=False):
    if not any(name.startswith(f"{prefix}/critic") for name in z):
        return
    reference = to_params(tree(z, prefix), sizes, normal_actor)
    assert_close(as_dict(critic()["critic"]), as_dict(reference["critic"]), dtype, "gradient")
    if "actor" in reference:
        assert_close(actor()["actor"], reference["actor"], dtype, "gradient")


def check_after(z, prefix, state, sizes, dtype, kind, normal_actor=False):
    for name, ours in (("param", state.params), ("target_param", state.target_params)):
        if not any(key.startswith(f"{prefix}/{name}/") for key in z):
            continue
        reference = to_params(tree(z, f"{prefix}/{name}"), sizes, normal_actor)
        for part, value in reference.items():
            if part in ours:
                assert_close(as_dict(ours[part]), as_dict(value), dtype, kind)


def as_dict(nets):
    """Ensembles as dicts, for `assert_close`."""
    return {str(i): net for i, net in enumerate(nets)} if isinstance(nets, tuple) else nets


def test_ddpg_is_iddpg_with_one_agent(dtype):
    z = load_agents("ddpg")
    reference, target = tree(z, "param"), tree(z, "target_param")
    cfg = config_of(z, reference["actor"], ddpg.DDPGConfig)
    check_ddpg(z, "", reference, target, cfg, dtype, env_spec=spec(z))


@pytest.mark.parametrize("variant", ["shared_own_action", "shared_joint_actions"])
def test_maddpg(variant, dtype):
    z = load_agents("maddpg")
    reference, target = tree(z, "param/shared"), tree(z, "target_param/shared")
    others = {"shared_own_action": "stored", "shared_joint_actions": "joint"}[variant]
    cfg = config_of(z, reference["actor"], ddpg.DDPGConfig, other_actions=others, critic_view="state")
    check_ddpg(z, variant, reference, target, cfg, dtype, env_spec=spec(z), clipped=True)


def test_maddpg_of_one_network_for_each_agent(dtype):
    """Losses, optimisers and norms of their own: each agent learns as if alone."""
    z = load_agents("maddpg")
    env_spec = spec(z, ids=False)
    sizes, agents = critic_sizes(env_spec, z), range(env_spec.num_agents)

    def stacked(prefix):
        nets = tree(z, prefix)
        each = [to_params({"actor": nets[f"actor_{i}"], "critic": nets[f"critic_{i}"]}, sizes) for i in agents]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)

    cfg = config_of(z, tree(z, "param/independent/actor_0"), ddpg.DDPGConfig, sharing="per_agent", critic_view="state")
    nets = ddpg.default_nets(env_spec, cfg)
    init, update = ddpg.training(nets, cfg)
    state = start(init, stacked("param/independent"), stacked("target_param/independent"), dtype)
    update = jax.jit(update)
    for k in range(len(z["in/obs"])):
        state, metrics = update(state, batch_of(z, k, ids=False), None, None)
        for name in ("critic", "actor"):
            expected = z[f"out/independent/step{k}/loss_{name}"].sum()
            assert_close(metrics[f"loss/{name}"], expected, dtype, later(k + (name == "actor"), dtype, "clipped"))


@pytest.mark.parametrize("variant", ["paper", "xuance"])
def test_matd3(variant, dtype):
    z = load_agents("matd3")
    reference, target = tree(z, "param"), tree(z, "target_param")
    cfg = config_of(
        z,
        reference["actor"],
        ddpg.TD3Config,
        critic_view="state",
        policy_delay=int(z["cfg/actor_delay"]),
        target_noise=z["cfg/policy_noise"] if variant == "paper" else None,
        target_noise_clip=z["cfg/noise_clip"],
        other_actions="stored" if variant == "paper" else "joint",
        actor_q="first" if variant == "paper" else "mean",
    )
    check_ddpg(z, variant, reference, target, cfg, dtype, env_spec=spec(z), noise="target_noise", clipped=True)


# ------------------------------------------------------------------------------------------------------ SAC, MASAC


def check_sac(z, variant, cfg, dtype, *, normal_actor=True, kind="parameter"):
    env_spec = spec(z)
    sizes = critic_sizes(env_spec, z)
    nets = sac.default_nets(env_spec, cfg)
    init, update = sac.training(env_spec, nets, cfg)
    update = jax.jit(update)
    params, targets = (to_params(tree(z, p), sizes, normal_actor) for p in ("param", "target_param"))
    targets = {name: targets[name] for name in (("actor", "critic") if cfg.target_actor else ("critic",))}
    state = start(init, params, targets, dtype)
    critic_slope, actor_slope = slopes(sac.sac_targets, sac.sac_actor_loss, nets, cfg)
    has_steps = any(name.startswith(f"out/{variant}/step0/") for name in z)
    for k in range(len(z["in/obs"])):
        batch, next_noise, noise = batch_of(z, k), noise_of(z, "eps_next", k), noise_of(z, "eps", k)
        before = state
        state, metrics = update(state, batch, next_noise, noise)
        at = f"{variant}/step{k}" if has_steps else variant
        if f"out/{at}/alpha" in z:
            assert_close(jnp.exp(before.params["log_alpha"]), z[f"out/{at}/alpha"], dtype)
        mask = np.asarray(batch.steps.obs.agent_mask)[0]
        loose = later(k, dtype, kind)
        for name, ours in {"critic": "loss/critic", "actor": "loss/actor", "alpha": "loss/alpha"}.items():
            if f"out/{at}/loss_{name}" in z:
                assert_close(metrics[ours], z[f"out/{at}/loss_{name}"], dtype, loose)
        if f"out/{at}/q_target" in z:
            assert_close(metrics["value/target"], mean(z[f"out/{at}/q_target"], mask), dtype, loose)
        if f"out/{at}/log_pi" in z:
            assert_close(-metrics["policy/entropy"], mean(z[f"out/{at}/log_pi"], mask), dtype, loose)
        for name in ("actor", "critic"):
            if f"out/{at}/grad_norm_{name}" in z:
                assert_close(metrics[f"loss/{name}_grad_norm"], z[f"out/{at}/grad_norm_{name}"], dtype, loose)
        if f"out/{at}/log_alpha_after" in z:
            assert_close(state.params["log_alpha"][None], z[f"out/{at}/log_alpha_after"], dtype, "parameter")
        if k == 0:
            check_policy(z, at, nets, before, batch, noise, dtype)
            at_actor = dict(before.params)
            if cfg.update_order == "critic_first":
                at_actor["critic"] = state.params["critic"]
            critic = lambda s=before, b=batch, n=next_noise: critic_slope(s.params, s.target_params, b, n)  # noqa: E731
            actor = lambda p=at_actor, b=batch, n=noise: actor_slope(p, b, n)  # noqa: E731
            check_gradients(z, f"grad/{at}", sizes, dtype, critic, actor, normal_actor)
        check_after(z, f"after/{at}", state, sizes, dtype, kind, normal_actor)


def check_policy(z, at, nets, state, batch, noise, dtype):
    """Actions and log-probabilities of the first update, before anything is learnt."""
    _, output = nets.actor.apply(state.params["actor"], (), batch.steps.obs, batch.steps.first)
    action, log_prob = nets.distribution(output, None).from_noise(noise)
    assert_close(squeeze(action, z[f"out/{at}/action"]), z[f"out/{at}/action"], dtype)
    assert_close(squeeze(log_prob, z[f"out/{at}/log_pi"]), z[f"out/{at}/log_pi"], dtype)
    if f"out/{at}/mean" in z:
        assert_close(squeeze(output[0], z[f"out/{at}/mean"]), z[f"out/{at}/mean"], dtype)
        assert_close(squeeze(output[1], z[f"out/{at}/log_std"]), z[f"out/{at}/log_std"], dtype)


@pytest.mark.parametrize("variant", ["recommended", "mask_all"])
def test_masac_with_the_sources_gaussian_actors_and_single_critic(variant, dtype):
    z = load_agents("masac_source")
    cfg = config_of(
        z,
        tree(z, "param/actor"),
        sac.SACConfig,
        alpha=z["cfg/alpha"],
        learn_alpha=False,
        num_critics=1,
        action_distribution="gaussian",
        target_actor=variant == "mask_all",
        update_order="simultaneous",
        other_actions="joint",
        critic_view="state",
    )
    check_sac(z, variant, cfg, dtype, normal_actor=False, kind="clipped")


@pytest.mark.parametrize("variant", ["fixed_alpha", "auto_alpha"])
def test_masac_with_twin_critics(variant, dtype):
    z = load_agents("masac_twin")
    cfg = config_of(
        z,
        tree(z, "param/actor"),
        sac.SACConfig,
        alpha=z["cfg/alpha"] if variant == "fixed_alpha" else z[f"out/{variant}/step0/alpha"],
        learn_alpha=variant == "auto_alpha",
        alpha_learning_rate=z["cfg/lr_alpha"],
        target_entropy=z["cfg/target_entropy"],
        log_std_min=z["cfg/log_std_min"],
        log_std_max=z["cfg/log_std_max"],
        other_actions="joint",
        critic_view="state",
    )
    check_sac(z, variant, cfg, dtype, kind="clipped")


def test_temperature_of_an_unmasked_loss(dtype):
    """XuanCe's, which counts inactive agents too: ours where every agent is active."""
    z = load_agents("masac_twin")
    env_spec = spec(z)
    cfg = config_of(
        z, tree(z, "param/actor"), sac.SACConfig, target_entropy=z["cfg/target_entropy"], critic_view="state"
    )
    nets = sac.default_nets(env_spec, cfg)
    batch = batch_of(z, 0)
    everyone = batch.steps.obs.replace(agent_mask=jnp.ones_like(batch.steps.obs.agent_mask))
    batch = batch.replace(steps=batch.steps.replace(obs=everyone))
    log_prob = jnp.asarray(z["out/auto_alpha/step0/log_pi"])[None]
    log_alpha = jnp.log(jnp.asarray(z["out/auto_alpha_unmasked/step0/alpha"]))
    loss, grad = jax.value_and_grad(lambda x: sac.sac_alpha_loss(x, log_prob, batch, nets=nets, cfg=cfg)[0])(log_alpha)
    assert_close(loss, z["out/auto_alpha_unmasked/step0/loss_alpha"], dtype)
    optimizer = optax.adam(float(z["cfg/lr_alpha"]), eps=float(z["cfg/adam_eps_alpha"]))
    after = log_alpha + optimizer.update(grad, optimizer.init(log_alpha))[0]
    assert_close(after[None], z["out/auto_alpha_unmasked/step0/log_alpha_after"], dtype, "parameter")


SAC_VARIANTS = sorted({groups[0] for groups, _ in matching(load("sac"), r"out/([^/]*)/step0/loss_critic")})


@pytest.mark.parametrize("variant", SAC_VARIANTS)
def test_sac_is_isac_with_one_agent(variant, dtype):
    z = load_agents("sac")
    order, automatic = re.fullmatch(r"(\w+),auto_alpha=(\d)", variant).groups()
    cfg = config_of(
        z,
        tree(z, "param/actor"),
        sac.SACConfig,
        alpha=z[f"out/{variant}/step0/alpha"],
        learn_alpha=automatic == "1",
        alpha_learning_rate=z["cfg/lr_alpha"],
        target_entropy=z["cfg/target_entropy"],
        update_order=order,
    )
    check_sac(z, variant, cfg, dtype)


# ------------------------------------------------------------------------------------------------------------ COMA


def coma_setup(z):
    num_agents, num_actions = z["in/avail"].shape[-2:]
    obs_size, state_size = z["in/obs"].shape[-1], z["in/state"].shape[-1]
    env_spec = spec_of(obs_size + num_agents, state_size, num_agents, num_actions)
    critic = tree(z, "param/critic")
    cfg = COMAConfig(
        gamma=z["cfg/gamma"],
        lambda_=z["cfg/td_lambda"],
        ent_coef=z["cfg/ent_coef"],
        n_step=int(z["cfg/n_step"]),
        hidden_sizes=(z["param/actor/0/bias"].shape[0],),
        critic_sizes=tuple(critic[str(i)]["bias"].shape[0] for i in range(len(critic) - 1)),
        team_reward="mean",
        mask_actions=False,
    )
    time_first = lambda x: np.moveaxis(x, 0, 1)  # noqa: E731
    views = [time_first(x) for x in (with_ids(z["in/obs"]), z["in/state"], z["in/avail"])]
    filled, reward, terminated = map(time_first, (z["in/filled"], z["in/reward_team"], z["in/terminated"]))

    def observation(agents, state, avail):
        ones = jnp.ones(agents.shape[:-1], bool)
        return Observation(
            agents=jnp.asarray(agents), state=jnp.asarray(state), action_mask=jnp.asarray(avail), agent_mask=ones
        )

    actions = jnp.asarray(time_first(z["in/actions"]).astype(np.int32))
    wide = lambda x: jnp.broadcast_to(jnp.asarray(x)[..., None], actions[:-1].shape)  # noqa: E731
    steps = Transition(
        obs=observation(*[x[:-1] for x in views]),
        first=jnp.zeros(filled.shape, bool),
        action=actions[:-1],
        reward=wide(reward),
        terminated=wide(terminated),
        # Traces end before padding, too.
        last=jnp.asarray(terminated | np.append(filled[:-1] & ~filled[1:], filled[-1:], axis=0)),
        next_obs=observation(*[x[1:] for x in views]),
        measured={"epsilon": jnp.zeros(filled.shape)},
    )
    batch = Trajectory(steps=steps, weight=wide(filled.astype(float)))
    order = critic_order(num_agents, num_actions, state_size, obs_size)
    return cfg, coma_nets(env_spec, cfg), batch, actions, order


def critic_order(num_agents, num_actions, state_size, obs_size):
    """Rows of the reference's critic [state, obs, actions, id] in our order [actions, state, id, obs with id].

    -1 stands for the second id, which the reference's does not have.
    """
    state, rest = np.arange(state_size), state_size
    obs, rest = rest + np.arange(obs_size), rest + obs_size
    actions, rest = rest + np.arange(num_agents * num_actions), rest + num_agents * num_actions
    ids = rest + np.arange(num_agents)
    return np.concatenate([actions, state, ids, obs, np.full(num_agents, -1)])


def coma_params(reference, order, exists=True):
    params = {name: network_params(net, None) for name, net in reference.items()}
    if "critic" in params and exists:
        first = params["critic"]["torso"]["Dense_0"]
        kernel = jnp.where((order >= 0)[:, None], first["kernel"][order], 0.0)
        params["critic"]["torso"]["Dense_0"] = {**first, "kernel": kernel}
    return params


@pytest.mark.parametrize("kind", ["td_lambda", "nstep"])
def test_coma(kind, dtype):
    z = load("coma")
    cfg, nets, batch, actions, order = coma_setup(z)
    cfg = cfg.replace(returns="n_step" if kind == "nstep" else "td_lambda")
    params, target_params = (coma_params(tree(z, p), order) for p in ("param", "target_param"))
    batch_first = lambda x: np.moveaxis(np.asarray(x), 0, 1)  # noqa: E731
    targets = jax.jit(lambda p: coma_targets(p, batch, actions[1:], nets=nets, cfg=cfg))(target_params)
    assert_close(batch_first(targets.value * batch.weight), z[f"out/{kind}_targets"], dtype)

    steps = batch.steps
    q, _ = jax.jit(lambda p: values(p, steps.obs, steps.action, nets=nets, cfg=cfg))(params)
    assert_close(batch_first(q), z["out/q_values"][:, :-1], dtype)
    loss = lambda p: coma_loss(p, batch, targets, nets=nets, cfg=cfg)  # noqa: E731
    grads, metrics = jax.jit(jax.grad(loss, has_aux=True))(params)
    assert_close(metrics["loss/actor"], z["out/actor_loss"], dtype)
    assert_close(metrics["policy/entropy"], z["out/entropy"], dtype)
    assert_close(metrics["loss/critic"], z[f"out/critic_loss_{kind}"], dtype)
    actor = network_params(tree(z, "grad/actor_loss_minus_entropy/actor"), None)
    assert_close(grads["actor"], actor, dtype, "gradient")
    if kind == "td_lambda":
        reference = network_params(tree(z, "grad/critic_loss_td_lambda/critic"), None)
        ours = grads["critic"]
        kernel = np.asarray(ours["torso"]["Dense_0"]["kernel"])[order >= 0]
        expected = np.asarray(reference["torso"]["Dense_0"]["kernel"])[order[order >= 0]]
        assert_close(kernel, expected, dtype, "gradient")
        for tree_ in (ours, reference):
            tree_["torso"] = {**tree_["torso"], "Dense_0": {"bias": tree_["torso"]["Dense_0"]["bias"]}}
        assert_close(ours, reference, dtype, "gradient")
    _, logits = nets.actor.apply(params["actor"], (), steps.obs, steps.first)
    policy = heads.categorical(logits, steps.obs.action_mask)
    assert_close(batch_first(policy.probs), z["out/pi"], dtype)
    assert_close(batch_first(jnp.sum(policy.probs * q, -1)), z["out/baseline"], dtype)


def test_coma_of_single_steps_with_inactive_agents(dtype):
    z = load("coma")
    cfg, nets, batch, _, order = coma_setup(z)
    steps = jax.tree.map(lambda x: x[:1], batch.steps)
    target, mask = jnp.asarray(z["in/xuance_returns_t0"])[None], jnp.asarray(z["in/xuance_agent_mask_t0"])[None]
    targets = COMATargets(value=target, epsilon=jnp.zeros(target.shape[:2]))
    batch = Trajectory(steps=steps.replace(obs=steps.obs.replace(agent_mask=mask)))
    params = coma_params(tree(z, "param"), order)
    _, metrics = jax.jit(lambda p: coma_loss(p, batch, targets, nets=nets, cfg=cfg))(params)
    assert_close(metrics["loss/actor"], z["out/xuance_t0/actor_loss"], dtype)
    assert_close(metrics["loss/critic"], z["out/xuance_t0/critic_loss"], dtype)
