"""PPO and MAPPO against the reference values: log-probabilities, losses, gradients, updated parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference_data import assert_close, load, matching, tree

from jmarl import losses, normalize, optim
from jmarl.learners import ppo
from jmarl.types import EnvSpec, Observation, Trajectory, Transition


def spec_of(obs_size, state_size, num_agents, num_actions=None, action_size=None):
    bounds = (
        None if action_size is None else (((-1.0,) * action_size,) * num_agents, ((1.0,) * action_size,) * num_agents)
    )
    return EnvSpec(
        name="reference",
        agents=tuple(f"agent_{i}" for i in range(num_agents)),
        obs_shape=(obs_size,),
        state_shape=(state_size,),
        num_actions=num_actions,
        action_size=action_size,
        action_low=bounds and bounds[0],
        action_high=bounds and bounds[1],
        obs_sizes=(obs_size,) * num_agents,
        action_sizes=(num_actions or action_size,) * num_agents,
    )


def to_params(reference):
    """The reference's names for an actor and a critic of one hidden layer, in ours."""

    def convert(net):
        out = {"out": net["1"]}
        if "log_std" in net:
            out = {"head": out, "log_std": net["log_std"]}
        return {"torso": {"Dense_0": net["0"]}, "outputs_0": out}

    return {name: convert(net) for name, net in reference.items()}


def from_params(params):
    """The inverse of `to_params`, for gradients and updated parameters."""

    def convert(net):
        out = net["outputs_0"]
        head = out.get("head", out)
        extra = {"log_std": out["log_std"]} if "log_std" in out else {}
        return {"0": net["torso"]["Dense_0"], "1": head["out"], **extra}

    return {name: convert(net) for name, net in params.items()}


def with_ids(obs):
    """[.., N, O] -> [.., N, O + N]"""
    num_agents = obs.shape[-2]
    return np.concatenate([obs, np.broadcast_to(np.eye(num_agents), (*obs.shape[:-1], num_agents))], axis=-1)


def batch_of(obs, state, actions, mask, avail, *, log_prob, value, advantage, target):
    """A batch and its targets, one sequence step per row: arrays `[M, N, ..]` become `[1, M, N, ..]`."""
    row = lambda x: jnp.asarray(x)[None]  # noqa: E731
    observation = Observation(
        agents=row(obs),
        state=row(state),
        action_mask=None if avail is None else row(avail),
        agent_mask=row(mask),
    )
    zeros = jnp.zeros((1, len(obs)), bool)
    steps = Transition(
        obs=observation,
        first=zeros,
        action=row(actions.astype(np.int32) if actions.dtype == np.int64 else actions),
        reward=row(np.zeros(mask.shape)),
        terminated=row(np.zeros(mask.shape, bool)),
        last=zeros,
    )
    targets = ppo.PPOTargets(
        log_prob=row(log_prob), value=row(value), advantage=row(advantage), value_target=row(target)
    )
    return Trajectory(steps=steps, carry={"actor": (), "critic": ()}), targets


def evaluate(nets, params, batch):
    """log π, entropy and value of each step."""
    steps = batch.steps
    return jax.jit(nets.evaluate)(params, batch.carry, steps.obs, steps.first, steps.action)


def hidden(params):
    """Hidden widths, from the parameters."""
    return (params["actor"]["0"]["bias"].shape[0],)


MAPPO_VARIANTS = [f"value_clip={c},huber={h}" for c in (0, 1) for h in (0, 1)]


@pytest.fixture(params=MAPPO_VARIANTS)
def mappo_case(request, dtype):
    """(arrays, name of the variant, (batch, targets), nets, config, params)"""
    z, variant = load("mappo"), request.param
    clips, hubers = "value_clip=1" in variant, "huber=1" in variant
    obs, state = with_ids(z["in/obs"]), z["in/state"]
    num_agents, num_actions = z["in/avail"].shape[-2:]
    reference = tree(z, "param")
    cfg = ppo.PPOConfig(
        clip_eps=z["cfg/clip"],
        ent_coef=z["cfg/ent_coef"],
        vf_coef=z["cfg/vf_coef"],
        value_clip_eps=z["cfg/value_clip"] if clips else None,
        huber_delta=z["cfg/huber_delta"] if hubers else None,
        normalize_advantage="none",
        hidden_sizes=hidden(reference),
        activation="relu",
        critic_view="state_id",
    )
    batch = batch_of(
        obs,
        state,
        z["in/actions"],
        z["in/agent_mask"],
        z["in/avail"],
        log_prob=z["in/old_log_probs"],
        value=z["in/old_values"],
        advantage=z["in/advantages"],
        target=z["in/returns"],
    )
    nets = ppo.default_policy(spec_of(obs.shape[-1], state.shape[-1], num_agents, num_actions), cfg)
    return z, variant, batch, nets, cfg, to_params(reference)


def check_loss(z, prefix, batch, nets, cfg, params, dtype):
    """Everything under `{prefix}out/` that the loss computes, and its gradients."""
    loss = jax.jit(jax.value_and_grad(lambda p: ppo.ppo_loss(p, *batch, nets=nets, cfg=cfg), has_aux=True))
    (total, metrics), grads = loss(params)
    ours = {
        "loss": total,
        "actor_loss": metrics["loss/actor"],
        "critic_loss": metrics["loss/critic"],
        "entropy_mean": metrics["policy/entropy"],
        "approx_kl_k3": metrics["policy/approx_kl"],
        "clip_fraction": metrics["policy/clip_fraction"],
        "grad_norm": optax.global_norm(grads),
    }
    checked = 0
    for name, value in ours.items():
        if (key := prefix.format("out") + name) in z:
            assert_close(value, z[key], dtype, "gradient" if name == "grad_norm" else "loss")
            checked += 1
    assert checked >= 3
    assert_close(from_params(grads), tree(z, prefix.format("grad").removesuffix("/")), dtype, "gradient")
    return grads


def check_update(z, prefix, params, grads, dtype):
    """One clipped Adam step."""
    optimizer = optim.optimizer(z["cfg/lr"], eps=z["cfg/adam_eps"], max_grad_norm=z["cfg/max_grad_norm"])

    @jax.jit
    def updated(params, grads):
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        return optax.apply_updates(params, updates)

    assert_close(from_params(updated(params, grads)), tree(z, prefix), dtype, "clipped")


def test_mappo_loss_and_gradients(mappo_case, dtype):
    z, variant, batch, nets, cfg, params = mappo_case
    check_loss(z, f"{{}}/{variant}/", batch, nets, cfg, params, dtype)


def variants_with_updates():
    """Those of which the file holds updated parameters."""
    found = sorted({variant for (variant,), _ in matching(load("mappo"), r"after/([^/]+)/param/.*")})
    assert set(found) <= set(MAPPO_VARIANTS) and found
    return found


@pytest.mark.parametrize("mappo_case", variants_with_updates(), indirect=True)
def test_mappo_parameters_after_one_step(mappo_case, dtype):
    z, variant, batch, nets, cfg, params = mappo_case
    grads = jax.jit(jax.grad(lambda p: ppo.ppo_loss(p, *batch, nets=nets, cfg=cfg)[0]))(params)
    check_update(z, f"after/{variant}/param", params, grads, dtype)


@pytest.mark.parametrize("mappo_case", MAPPO_VARIANTS[:1], indirect=True)  # which differ in the critic's loss only
def test_mappo_elementwise_values(mappo_case, dtype):
    z, _, (batch, targets), nets, _, params = mappo_case
    log_prob, entropy, value = evaluate(nets, params, batch)
    num_actions = batch.steps.obs.action_mask.shape[-1]

    def log_prob_of(action):
        other = batch.replace(steps=batch.steps.replace(action=jnp.full_like(batch.steps.action, action)))
        return evaluate(nets, params, other)[0]

    ours = {
        "log_prob": log_prob,
        "entropy": entropy,
        "probs": jnp.exp(jnp.stack([log_prob_of(action) for action in range(num_actions)], axis=-1)),
        "ratio": jnp.exp(log_prob - targets.log_prob),
        "value": value,
    }
    for name, x in ours.items():
        assert_close(x[0], z[f"out/{MAPPO_VARIANTS[0]}/{name}"], dtype)


@pytest.mark.parametrize("mappo_case", MAPPO_VARIANTS[:1], indirect=True)
def test_mappo_normalised_advantages(mappo_case, dtype):
    z, _, batch, nets, cfg, params = mappo_case
    cfg = cfg.replace(normalize_advantage="all")
    _, metrics = jax.jit(lambda p: ppo.ppo_loss(p, *batch, nets=nets, cfg=cfg))(params)
    assert_close(metrics["loss/actor"], z["out/adv_norm/actor_loss"], dtype)


def test_mappo_value_normaliser(dtype):
    z = load("mappo")
    stats = normalize.init()
    for i, x in enumerate(jnp.asarray(z["in/value_norm_x"])):
        stats = normalize.update(stats, x, jnp.ones(x.shape, bool), z["cfg/value_norm_beta"])
        assert_close(normalize.normalize(stats, x), z[f"out/value_norm/step{i}/normalized"], dtype)
        assert_close(normalize.denormalize(stats, jnp.zeros(())), z[f"out/value_norm/step{i}/mean"], dtype)


@pytest.mark.parametrize("kind", ["discrete", "gaussian"])
def test_single_agent_ppo(kind, dtype):
    z = load("ppo")
    z = {name.removeprefix(f"{kind}/"): x for name, x in z.items() if name.startswith((f"{kind}/", "cfg/"))}
    reference, obs, actions = tree(z, "param"), z["in/obs"], z["in/actions"]
    width = reference["actor"]["1"]["bias"].shape[0]
    spec = spec_of(obs.shape[-1], obs.shape[-1], 1, **{"num_actions" if kind == "discrete" else "action_size": width})
    cfg = ppo.PPOConfig(
        clip_eps=z["cfg/clip"],
        ent_coef=z["cfg/ent_coef"],
        vf_coef=z["cfg/vf_coef"],
        normalize_advantage="none",
        hidden_sizes=hidden(reference),
        activation="relu",
    )
    one = lambda name: z[f"in/{name}"][:, None]  # one agent  # noqa: E731
    batch = batch_of(
        obs[:, None],
        obs,
        actions[:, None],
        np.ones((len(obs), 1), bool),
        None if kind == "gaussian" else np.ones((len(obs), 1, width), bool),
        log_prob=one("old_log_probs"),
        value=one("returns"),
        advantage=one("advantages"),
        target=one("returns"),
    )
    nets, params = ppo.default_policy(spec, cfg), to_params(reference)
    log_prob, entropy, value = evaluate(nets, params, batch[0])
    for name, x in {
        "log_prob": log_prob,
        "entropy": entropy,
        "ratio": jnp.exp(log_prob - batch[1].log_prob),
        "value": value,
    }.items():
        assert_close(x[0, :, 0], z[f"out/{name}"], dtype)
    grads = check_loss(z, "{}/", batch, nets, cfg, params, dtype)
    check_update(z, "after/param", params, grads, dtype)


def test_epymarl_variant_with_n_step_targets(dtype):
    """EPyMARL's learner: targets of a target critic, advantages that are errors of the critic, padded episodes."""
    z = load("mappo_epymarl")
    steps_and_agents = z["in/actions"].shape[1:]
    for (variant,), targets in matching(z, r"out/(add_value_last_step=\d)/targets"):
        filled = np.broadcast_to(z["in/filled"][..., None], targets.shape)
        obs, state = with_ids(z["in/obs"])[:, :-1], z["in/state"][:, :-1]
        reference = tree(z, "param")
        cfg = ppo.PPOConfig(
            clip_eps=z["cfg/clip"],
            ent_coef=z["cfg/ent_coef"],
            vf_coef=1.0,
            normalize_advantage="none",
            hidden_sizes=hidden(reference),
            activation="relu",
            critic_view="state_id",
        )
        num_actions = reference["actor"]["1"]["bias"].shape[0]
        nets = ppo.default_policy(spec_of(obs.shape[-1], state.shape[-1], steps_and_agents[-1], num_actions), cfg)
        params = to_params(reference)
        old_params = to_params({**reference, **tree(z, "old_param")})
        rows = lambda x: x.reshape(-1, *x.shape[2:])  # noqa: E731
        args = rows(obs), rows(state), rows(z["in/actions"]), rows(filled)
        avail = np.ones((len(args[0]), steps_and_agents[-1], num_actions), bool)
        advantage = z[f"out/{variant}/advantages"]
        extras = {"value": rows(targets), "advantage": rows(advantage), "target": rows(targets)}
        batch, made = batch_of(*args, avail, log_prob=np.zeros(rows(targets).shape), **extras)
        batch = batch, made.replace(log_prob=evaluate(nets, old_params, batch)[0])
        loss = jax.value_and_grad(
            lambda p, batch=batch, nets=nets, cfg=cfg: ppo.ppo_loss(p, *batch, nets=nets, cfg=cfg), has_aux=True
        )
        (_, metrics), grads = jax.jit(loss)(params)
        assert_close(metrics["loss/critic"], z[f"out/{variant}/critic_loss"], dtype)
        # Their policy loss holds the entropy bonus.
        actor_loss = metrics["loss/actor"] - cfg.ent_coef * metrics["policy/entropy"]
        assert_close(actor_loss, z[f"out/{variant}/actor_loss"], dtype)
        assert_close(from_params(grads), tree(z, f"grad/{variant}"), dtype, "gradient")


def test_source_with_one_actor_per_agent_and_a_joint_critic(dtype):
    """Its own recursion loses the bootstrap and skips steps (see `source/*`); these are the values it should give."""
    z = load("mappo_source003")
    batch_size, length, num_agents, obs_size = z["in/obs"].shape
    actors, critic = tree(z, "param"), tree(z, "param/critic")
    actors = [actors[f"actor_{i}"] for i in range(num_agents)]
    stack = lambda *leaves: jnp.stack(leaves)  # noqa: E731
    joint = {"0": critic["0"], "1": jax.tree.map(lambda x: jnp.repeat(x, num_agents, axis=-1), critic["1"])}
    params = to_params({"actor": jax.tree.map(stack, *actors), "critic": joint})
    num_actions = actors[0]["1"]["bias"].shape[0]
    spec = spec_of(obs_size, num_agents * obs_size, num_agents, num_actions)
    cfg = ppo.PPOConfig(
        clip_eps=z["cfg/clip"],
        ent_coef=z["cfg/ent_coef"],
        normalize_advantage="none",
        hidden_sizes=(actors[0]["0"]["bias"].shape[0],),
        activation="relu",
        sharing="per_agent",
        critic_view="state",
    )
    nets = ppo.default_policy(spec, cfg)

    obs = np.moveaxis(z["in/obs"], 0, 1)  # time first
    time_first = lambda name: jnp.asarray(np.moveaxis(z[f"in/{name}"], 0, 1))  # noqa: E731
    done = time_first("dones")
    batch, targets = batch_of(
        obs.reshape(-1, num_agents, obs_size),
        obs.reshape(-1, num_agents * obs_size),
        np.moveaxis(z["in/actions"], 0, 1).reshape(-1, num_agents),
        np.ones((length * batch_size, num_agents), bool),
        None,
        log_prob=np.moveaxis(z["in/old_log_probs"], 0, 1).reshape(-1, num_agents),
        **dict.fromkeys(("value", "advantage", "target"), np.zeros((length * batch_size, num_agents))),
    )
    log_prob, entropy, value = evaluate(nets, params, batch)
    value = value[0].reshape(length, batch_size, num_agents)[..., 0]
    next_value = jnp.concatenate([value[1:], jnp.zeros_like(value[:1])])  # every sequence ends by termination
    assert bool(done[-1].all())
    discount = z["cfg/gamma"] * (1.0 - done)
    advantage = jax.jit(losses.gae)(time_first("rewards"), discount, value, next_value, done, z["cfg/lam"])
    assert_close(advantage.T, z["out/gae_advantages"], dtype)
    assert_close((advantage + value).T, z["out/gae_returns"], dtype)
    critic_loss = jnp.mean(losses.value_loss(value, advantage + value))
    assert_close(critic_loss, z["out/critic_loss"], dtype)

    log_prob, entropy = log_prob[0], entropy[0]
    everyone = jnp.broadcast_to(advantage.reshape(-1, 1), log_prob.shape)
    surrogate = losses.clipped_surrogate(log_prob, targets.log_prob[0], everyone, cfg.clip_eps)
    assert_close(jnp.mean(surrogate - cfg.ent_coef * entropy, axis=0), z["out/actor_losses"], dtype)
