"""Teams that learn: each group of agents by an algorithm of its own, with its own config, networks and memory.

A team's learner sees an environment of its members alone: their views, actions and rewards, and the state. What the
others do is the world to it. So MAPPO hunters meet IPPO prey, QMIX learns within one team of a mixed game, and a team
that is random, scripted or frozen costs no update.

References:
  Lowe et al., 2017, Multi-Agent Actor-Critic for Mixed Cooperative-Competitive Environments, sec. 5
    (https://arxiv.org/abs/1706.02275).
"""

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jmarl.combinators import nesting
from jmarl.types import Algorithm, Config, EnvSpec, Learner, Measured, Metrics, Observation, TrainState, Trajectory

Members = Mapping[str, str | Sequence[str]]
Reads = Literal["state", "team"]


def teams(
    algorithms: Mapping[str, Algorithm], members: Members | None = None, *, reads: Reads = "state"
) -> Callable[[EnvSpec, dict[str, Any]], Learner]:
    """An algorithm of several, one for each team, whose config is a dict of theirs by team.

    Learners from rollouts go together, and learners from replay do; those that learn from anything, such as
    `random_policy` and `frozen`, go with both. Metrics are those of the learners, below the names of the teams.

    Args:
      algorithms: one for each team, by a name of your choice.
      members: the agents of each team, or a pattern of their names, such as "adversary_*"; every agent once. By default
        the agents whose names begin with the team's.
      reads: what centralised critics and mixers read: the whole "state", or the views of their own "team" alone.

    Example:
      >>> import jmarl
      >>> env = jmarl.make("MPE_simple_tag_v3")
      >>> hunt = teams({"adversary": jmarl.mappo, "agent": jmarl.ippo})
      >>> learner = hunt(env.spec, {"adversary": jmarl.PPOConfig(), "agent": jmarl.PPOConfig(gamma=0.95)})
      >>> sorted(learner.init(jax.random.key(0)).params)
      ['adversary', 'agent']
    """

    def algorithm(spec: EnvSpec, cfg: dict[str, Any]) -> Learner:
        _require_configs(cfg, algorithms)
        index = members_of(spec, algorithms, members)
        views = {name: _view_of(spec, index[name], reads) for name in index}
        specs = {name: spec_of(spec, index[name], reads) for name in index}
        learners = {name: algorithms[name](specs[name], cfg[name]) for name in index}
        order = np.argsort(np.concatenate(list(index.values())))  # back to the order of the agents

        def joint(actions):
            padded = [a if spec.is_discrete else _pad(a, spec.action_size or 0) for a in actions]
            return jnp.concatenate(padded, axis=1)[:, order]

        def init(key):
            keys = jax.random.split(key, len(learners))
            return nesting.join({name: learners[name].init(k) for name, k in zip(learners, keys, strict=True)})

        def init_carry(batch_shape):
            return {name: learner.init_carry(batch_shape) for name, learner in learners.items()}

        def act(state, carry, obs, first, key):
            actions, carries = [], {}
            measured: Measured = {}
            for (name, learner), k in zip(learners.items(), jax.random.split(key, len(learners)), strict=True):
                own = nesting.part(state, name)
                action, carries[name], told = learner.act(own, carry[name], views[name](obs), first, k)
                actions.append(action)
                measured |= {f"{name}/{what}": x for what, x in told.items()}
            return joint(actions), carries, measured

        def greedy(state, carry, obs, first):
            actions, carries = [], {}
            for name, learner in learners.items():
                own = nesting.part(state, name)
                action, carries[name] = learner.greedy(own, carry[name], views[name](obs), first)
                actions.append(action)
            return joint(actions), carries

        def update(state, batch, key):
            new: dict[str, TrainState] = {}
            metrics: Metrics = {}
            priorities: list[Array] = []
            for (name, learner), k in zip(learners.items(), jax.random.split(key, len(learners)), strict=True):
                of_team = _batch_of(batch, name, index[name], views[name], specs[name].action_size)
                new[name], told = learner.update(nesting.part(state, name), of_team, k)
                priorities += [told.pop("priority")] if "priority" in told else []
                metrics |= {f"{name}/{what}": x for what, x in told.items()}
            shared = {"priority": sum(priorities) / len(priorities)} if priorities else {}
            return nesting.join(new), {**metrics, **shared}

        return Learner(init, init_carry, act, greedy, update, learns_from=_learns_from(learners))

    return algorithm


def frozen(algorithm: Algorithm, state: TrainState) -> Algorithm:
    """The algorithm of a team that goes on acting, and exploring, as it has learnt to elsewhere, and learns no more.

    Args:
      algorithm: which learnt.
      state: of the team's own learner, such as `nesting.part(run.train_state, "prey")` of an earlier run of `teams`.
    """

    def of_team(spec: EnvSpec, cfg: Config) -> Learner:
        learner = algorithm(spec, cfg)

        def init(key):
            return state.replace(opt_state=(), env_steps=None)

        def update(state, batch, key):
            return state, {}

        return learner._replace(init=init, update=update, learns_from="any")

    return of_team


def members_of(spec: EnvSpec, teams: Mapping[str, Any], members: Members | None = None) -> dict[str, tuple[int, ...]]:
    """The numbers of each team's agents.

    >>> from jmarl import envs
    >>> members_of(envs.matrix_game([[1.0, 0.0], [0.0, 1.0]]).spec, {"one": 0, "two": 0}, {"one": "*_0", "two": "*_1"})
    {'one': (0,), 'two': (1,)}
    """
    members = {name: f"{name}*" for name in teams} if members is None else members
    if set(members) != set(teams):
        raise ValueError(f"members has the teams {sorted(members)}, but algorithms has {sorted(teams)}: name the same.")
    agents = ", ".join(spec.agents)
    index = {}
    for name in teams:
        whom = members[name]
        names = fnmatch.filter(spec.agents, whom) if isinstance(whom, str) else list(whom)
        if not names:
            raise ValueError(f"Team {name} has no members: no agent's name is like {whom!r} among {agents}.")
        if strangers := [agent for agent in names if agent not in spec.agents]:
            raise ValueError(f"{strangers[0]} of team {name} is no agent of {spec.name}, which has {agents}.")
        index[name] = tuple(spec.agents.index(agent) for agent in names)
    everyone = [i for group in index.values() for i in group]
    for i, agent in enumerate(spec.agents):
        if (count := everyone.count(i)) != 1:
            where = "in no team" if not count else f"in {count} teams"
            raise ValueError(f"{agent} of {spec.name} is {where}: members must name every agent once.")
    return index


def spec_of(spec: EnvSpec, index: Sequence[int], reads: Reads = "state") -> EnvSpec:
    """The environment's facts as the members of one team see it, whose padding goes no further than its widest."""

    def of_members(x: tuple) -> tuple:
        return tuple(x[i] for i in index) if x else x

    def bounds(rows: tuple[tuple[float, ...], ...] | None) -> tuple[tuple[float, ...], ...] | None:
        return None if rows is None else tuple(rows[i][:size] for i in index)

    size = max(of_members(spec.action_sizes) or (spec.num_actions or spec.action_size or 0,))
    obs_shape = (max(_widths(spec, index)),) if len(spec.obs_shape) == 1 else spec.obs_shape
    if reads == "team" and len(spec.obs_shape) != 1:
        raise ValueError(f"reads='team' joins views, and those of {spec.name} are images: choose reads='state'.")
    return spec._replace(
        agents=of_members(spec.agents),
        obs_shape=obs_shape,
        state_shape=(sum(_widths(spec, index)),) if reads == "team" else spec.state_shape,
        num_actions=size if spec.is_discrete else None,
        action_size=None if spec.is_discrete else size,
        action_low=bounds(spec.action_low),
        action_high=bounds(spec.action_high),
        obs_sizes=of_members(spec.obs_sizes),
        action_sizes=of_members(spec.action_sizes),
        teams=(),
        state_is_views=False,
    )


def _widths(spec: EnvSpec, index: Sequence[int]) -> list[int]:
    return [(spec.obs_sizes or spec.obs_shape * spec.num_agents)[i] for i in index]


def _view_of(spec: EnvSpec, index: Sequence[int], reads: Reads) -> Callable[[Observation], Observation]:
    """What one team sees of an observation."""
    members, team = np.asarray(index), spec_of(spec, index, reads)
    widths = _widths(spec, index) if reads == "team" else []

    def view(obs: Observation) -> Observation:
        agents = jnp.take(obs.agents, members, axis=-1 - len(spec.obs_shape))[..., : team.obs_shape[-1]]
        seen = [agents[..., i, :width] for i, width in enumerate(widths)]
        return Observation(
            agents=agents,
            state=jnp.concatenate(seen, axis=-1) if reads == "team" else obs.state,
            action_mask=None if obs.action_mask is None else obs.action_mask[..., members, : team.num_actions],
            agent_mask=obs.agent_mask[..., members],
        )

    return view


def _pad(action: Array, size: int) -> Array:
    return jnp.pad(action, [(0, 0)] * (action.ndim - 1) + [(0, size - action.shape[-1])])


def _batch_of(
    batch: Trajectory,
    name: str,
    index: Sequence[int],
    view: Callable[[Observation], Observation],
    action_size: int | None,
) -> Trajectory:
    """What one team did, saw and was paid; `action_size` is of continuous actions."""
    steps, members = batch.steps, np.asarray(index)

    def of_members(x: Array | None) -> Any:
        return None if x is None else x[:, :, members]

    def of_team(carry: Any) -> Any:
        return carry[name] if isinstance(carry, dict) else carry

    return batch.replace(
        steps=steps.replace(
            obs=view(steps.obs),
            carry=of_team(steps.carry),
            action=of_members(steps.action)[..., :action_size] if action_size else of_members(steps.action),
            reward=of_members(steps.reward),
            terminated=of_members(steps.terminated),
            shaped_reward=of_members(steps.shaped_reward),
            next_obs=None if steps.next_obs is None else view(steps.next_obs),
            measured={w.removeprefix(f"{name}/"): x for w, x in steps.measured.items() if w.startswith(f"{name}/")},
        ),
        carry=of_team(batch.carry),
        next_carry=of_team(batch.next_carry),
        weight=of_members(batch.weight),
    )


def _require_configs(cfg: Config, algorithms: Mapping[str, Algorithm]) -> None:
    if not isinstance(cfg, dict) or set(cfg) != set(algorithms):
        shown = sorted(cfg) if isinstance(cfg, dict) else type(cfg).__name__
        raise ValueError(f"The config of teams is a dict with one of each, of {sorted(algorithms)}, but it is {shown}.")


def _learns_from(learners: Mapping[str, Learner]) -> Literal["rollouts", "replay", "any"]:
    kinds = {learner.learns_from: name for name, learner in learners.items()}
    if {"rollouts", "replay"} <= kinds.keys():
        raise ValueError(
            f"Team {kinds['rollouts']} learns from rollouts that it has just made, and team {kinds['replay']} from "
            f"replay: give both an algorithm of one kind, such as ippo and mappo, or iql and qmix."
        )
    return "rollouts" if "rollouts" in kinds else "replay" if "replay" in kinds else "any"
