"""What the site's pages say that the code and the committed results know, and where their links lead.

A page asks for a table in a comment on a line of its own, which GitHub does not show:

    <!-- defaults ippo mappo -->

`DIRECTIVES` has the functions behind such names, `expand` puts what they return in place of the comments. Links and
pictures in it are written from the root of the repository, as `root:benchmarks/results/x.png`. `docs/hook.py` gives
pages to mkdocs; nothing here needs mkdocs.

Files that are read on GitHub hold their tables, between `<!-- begin results -->` and `<!-- end -->`: `WRITTEN`. This
writes them anew:

    python docs/pages.py
"""

import contextlib
import dataclasses
import functools
import importlib
import inspect
import io
import json
import posixpath
import re
import tempfile
import unittest.mock
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jmarl
from jmarl import configs, presets
from jmarl.cli import campaign, own, report
from jmarl.types import EnvSpec, Trajectory, Transition, zero_observation

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
EMPTY = "-"
WRITTEN = ("README.md", "benchmarks/results/README.md")


class Family(NamedTuple):
    """A page of algorithms: its file in docs/algorithms, the module with its equation, and who is on it."""

    page: str
    title: str
    modules: tuple[str, ...]
    algorithms: tuple[str, ...]


FAMILIES = (
    Family("ppo", "PPO and A2C", ("ppo",), ("ippo", "mappo", "ia2c", "maa2c")),
    Family("happo", "HAPPO, HAA2C and HATRPO", ("happo", "hatrpo"), ("happo", "haa2c", "hatrpo")),
    Family("mat", "MAT", ("mat",), ("mat",)),
    Family("sable", "Sable", ("sable",), ("sable",)),
    Family("vdac", "VDAC", ("vdac",), ("vdac_sum", "vdac_mix")),
    Family("coma", "COMA", ("coma",), ("coma",)),
    Family("q_learning", "IQL, VDN and QMIX", ("q_learning",), ("iql", "vdn", "qmix")),
    Family("wqmix", "Weighted QMIX", ("wqmix",), ("cw_qmix", "ow_qmix")),
    Family("qplex", "QPLEX", ("qplex",), ("qplex",)),
    Family("qtran", "QTRAN", ("qtran",), ("qtran",)),
    Family("pqn", "PQN", ("pqn",), ("pqn_iql", "pqn_vdn", "pqn_qmix")),
    Family("ddpg", "DDPG and TD3", ("ddpg",), ("iddpg", "maddpg", "itd3", "matd3")),
    Family("facmac", "FACMAC", ("facmac",), ("facmac",)),
    Family("sac", "SAC", ("sac",), ("isac", "masac")),
    Family("hasac", "HATD3 and HASAC", ("hasac", "turns"), ("hatd3", "hasac")),
    Family("random", "Random and scripted players", ("baselines",), ("random",)),
)

# What is learnt by each algorithm beside its actors, by default: the value, and what it reads. A test compares the
# word "state" in it with what the update reads.
VALUES = {
    "ippo": "V of the agent's view",
    "mappo": "V of the state, one output for each agent",
    "ia2c": "V of the agent's view",
    "maa2c": "V of the state, one output for each agent",
    "happo": "V of the state",
    "haa2c": "V of the state",
    "hatrpo": "V of the state",
    "mat": "V of all views, by attention between the agents",
    "sable": "V of all views, of this step and before, by retention",
    "vdac_sum": "V_tot, the sum of each agent's V of its view",
    "vdac_mix": "V_tot, each agent's V of its view, mixed by the state",
    "coma": "Q of the state, the agent's view and the others' actions",
    "iql": "Q of the agent's view",
    "vdn": "Q_tot, the sum of each agent's Q of its view",
    "qmix": "Q_tot, each agent's Q of its view, mixed by the state",
    "cw_qmix": "Q_tot as in QMIX, and a central Q̂* of the state without restriction",
    "ow_qmix": "Q_tot as in QMIX, and a central Q̂* of the state without restriction",
    "qplex": "Q_tot, each agent's V and A of its view, mixed by the state and the joint action",
    "qtran": "Q_jt of the state, the joint action and all agents' values, and their sum",
    "pqn_iql": "Q of the agent's view",
    "pqn_vdn": "Q_tot, the sum of each agent's Q of its view",
    "pqn_qmix": "Q_tot, each agent's Q of its view, mixed by the state",
    "iddpg": "Q of the agent's view and action",
    "maddpg": "Q of the state and everyone's actions",
    "itd3": "two Qs of the agent's view and action",
    "matd3": "two Qs of the state and everyone's actions",
    "facmac": "Q_tot, each agent's Q of its view and action, mixed by the state",
    "isac": "two Qs of the agent's view and action",
    "masac": "two Qs of the state and everyone's actions",
    "hatd3": "two Qs of the team, of the state and the joint action",
    "hasac": "two Qs of the team, of the state and the joint action",
    "random": "nothing",
}

# The symbol of a field in the equations of the pages.
SYMBOLS = {
    "learning_rate": "step size",
    "gamma": "γ",  # noqa: RUF001
    "gae_lambda": "λ",
    "lambda_": "λ",
    "clip_eps": "ε",
    "ent_coef": "c_H",
    "vf_coef": "c_V",
    "tau": "τ",
    "alpha": "α",  # noqa: RUF001
    "suboptimal_weight": "α",  # noqa: RUF001
    "target_entropy": "H̄",
    "epsilon_start": "ε, exploring",
    "num_critics": "how many Q",
}


# ----------------------------------------------------------------------------------------------------- Markdown


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table of Markdown."""
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    lines += ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def outside_fences(text: str, change: Callable[[str], str]) -> str:
    """`change` of a text of Markdown, but for its blocks of code."""
    parts = re.split(r"(^```.*?^```[^\n]*$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else change(part) for part in parts)


def expand(text: str) -> str:
    """A page with tables in place of the comments that ask for them."""

    def one(match: re.Match) -> str:
        name, *arguments = match[1].split()
        if name in ("begin", "end"):
            return match[0]
        return _directive(name)(*arguments)

    return outside_fences(text, lambda part: re.sub(r"^<!-- (.+?) -->$", one, part, flags=re.MULTILINE))


def with_tables(text: str, page: str) -> str:
    """A file with the tables of today between its comments `<!-- begin .. -->` and `<!-- end -->`."""

    def one(match: re.Match) -> str:
        name, *arguments = match[1].split()
        found = with_links(_directive(name)(*arguments), lambda link: _from(link, page))
        return f"<!-- begin {match[1]} -->\n\n{found}\n\n<!-- end -->"

    return re.sub(r"^<!-- begin (.+?) -->$.*?^<!-- end -->$", one, text, flags=re.MULTILINE | re.DOTALL)


def _directive(name: str) -> Callable[..., str]:
    if name not in DIRECTIVES:
        raise ValueError(f"<!-- {name} --> names no table: choose one of {', '.join(DIRECTIVES)}.")
    return DIRECTIVES[name]


def _from(link: str, page: str) -> str:
    """A link that begins at the root, from a page."""
    where = resolve(link, page)
    return link if where is None else posixpath.relpath(where, posixpath.dirname(page) or ".")


def links(text: str) -> list[str]:
    """Where the links and pictures of a page lead, fragments left out, those to other sites too."""
    found: list[str] = []
    outside_fences(text, lambda part: (found.extend(match[1] for match in _LINK.finditer(part)), part)[1])
    return found


def with_links(text: str, change: Callable[[str], str]) -> str:
    """A page whose links and pictures lead where `change` says."""
    return outside_fences(text, lambda part: _LINK.sub(lambda m: f"]({change(m[1])}{m[2] or ''})", part))


_LINK = re.compile(r"(?<=\w|\)|`|\]|\.|\?|!|\s|\[)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def resolve(link: str, page: str) -> str | None:
    """A link of a page as a path from the repository's root; None for other sites. `page` is such a path, too."""
    if link.startswith("root:"):
        return posixpath.normpath(link.removeprefix("root:"))
    if re.match(r"[a-z]+:", link):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def of_docstring(text: str) -> str:
    """A module's docstring as Markdown: indented equations are blocks of code, references a list."""
    body, _, references = inspect.cleandoc(text).partition("\nReferences:\n")
    out: list[str] = []
    for paragraph in body.strip().split("\n\n"):
        lines = paragraph.split("\n")
        if all(line.startswith("    ") for line in lines):
            out.append("```text\n" + "\n".join(line[4:] for line in lines) + "\n```")
        elif len(lines) > 1 and lines[1].startswith("  - "):
            out.append(lines[0] + "\n\n" + "\n".join(line[2:] for line in lines[1:]))
        else:
            out.append(paragraph)
    items = re.split(r"\n(?=  \S)", "\n" + references.rstrip())
    sources = [" ".join(item.split()) for item in items if item.strip()]
    if sources:
        out.append("**References**")
        out.append("\n".join(f"- {_with_url(source)}" for source in sources))
    return "\n\n".join(out)


def _with_url(source: str) -> str:
    return re.sub(r"\((https?://[^)]+)\)", lambda m: f"([{m[1].removeprefix('https://')}]({m[1]}))", source)


# --------------------------------------------------------------------------------------------------- algorithms


def config_class(name: str) -> Any:
    """The class whose defaults an algorithm has: its own, where its annotation names one that this extends."""
    return type(presets.for_environment(name, "MPE_simple_spread_v3").config)


def _fields(cls: Any) -> dict[str, dataclasses.Field]:
    """The fields of a config by name; what is the same for all of a class is none of them."""
    return {field.name: field for field in dataclasses.fields(cls)}


def docstring(module: str) -> str:
    """What a module of jmarl says of itself."""
    return of_docstring(importlib.import_module(f"jmarl.{module}").__doc__ or "")


def defaults(*names: str) -> str:
    """Every hyperparameter of some algorithms, with a column for each class of config."""
    classes = list(dict.fromkeys(config_class(name) for name in names))
    users = {cls: [name for name in names if config_class(name) is cls] for cls in classes}
    meanings: dict[str, str] = {}
    for cls in classes:
        for field, text in configs.explain(cls).items():
            meanings.setdefault(field, text)
    rows = []
    for field in sorted(meanings, key=lambda field: _place(field, classes)):
        values = [_default(cls, field) for cls in classes]
        is_static = any(
            not _fields(cls)[field].metadata.get("pytree_node", True) for cls in classes if field in _fields(cls)
        )
        kind = "static" if is_static else "swept"
        rows.append([f"`{field}`", SYMBOLS.get(field, ""), *values, kind, meanings[field]])
    titles = [f"`{cls.__name__}` ({', '.join(users[cls])})" for cls in classes]
    about = (
        "Fields marked *swept* are numbers that may vary inside one compilation; *static* ones set a shape or a branch."
    )
    return f"{about}\n\n" + table(["field", "symbol", *titles, "kind", "meaning"], rows)


def _place(field: str, classes: Sequence[type]) -> tuple[int, str]:
    """The algorithm's own fields first, then exploration, optimiser and networks."""
    order = ["algorithm", "exploration", "optimiser", "networks"]
    for cls in classes:
        if field in _fields(cls):
            return order.index(configs.subjects(cls)[field]), ""
    raise ValueError(field)


def _default(cls: Any, field: str) -> str:
    if field not in _fields(cls):
        return ""
    value = _fields(cls)[field].default
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


class Facts(NamedTuple):
    """What the code says of an algorithm with its defaults.

    Attributes:
      actions: the kinds that it takes.
      learns_from: "rollouts", "replay" or "any".
      has_memory: its networks may be recurrent.
      reward: "own", or how the team's is made.
      sharing: of parameters.
      config: the class of its config.
    """

    actions: tuple[str, ...]
    learns_from: str
    has_memory: bool
    reward: str
    sharing: str
    config: str


_AGENTS: dict[str, Any] = {"name": "probe", "agents": ("a", "b"), "obs_shape": (3,), "state_shape": (5,)}
_SPECS = {
    "discrete": EnvSpec(**_AGENTS, num_actions=2),
    "continuous": EnvSpec(**_AGENTS, action_size=1, action_low=((-1.0,), (-1.0,)), action_high=((1.0,), (1.0,))),
}


def _learners(name: str) -> dict[str, Any]:
    """The learners of an algorithm, for each kind of actions that it takes."""
    learners = {}
    for kind, spec in _SPECS.items():
        try:
            learners[kind] = own.find_algorithm(name)(spec, config_class(name)())
        except (ValueError, TypeError):
            continue
    return learners


@functools.cache
def facts(name: str) -> Facts:
    """What the code says of an algorithm."""
    cfg, learners = config_class(name)(), _learners(name)
    reward = getattr(cfg, "team_reward", "individual")
    return Facts(
        actions=tuple(learners),
        learns_from=next(iter(learners.values())).learns_from,
        has_memory="recurrent" in _fields(type(cfg)),
        reward="each agent's own" if reward == "individual" else f"{reward} of all",
        sharing=getattr(cfg, "sharing", "shared" if dataclasses.fields(cfg) else EMPTY),
        config=type(cfg).__name__,
    )


def reads(name: str) -> set[str]:
    """Which arrays of a batch an update of the parameters depends on, and "act.NAME", on which acting does.

    The traced computation is asked, so this is what the code does. `state`, `agents` and `action_mask` are of `obs`.
    """
    from jax.interpreters import partial_eval

    kind, learner = next(iter(_learners(name).items()))
    num_envs, length = 16, 2
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(learner.init, key).replace(env_steps=jax.ShapeDtypeStruct((), jnp.int32))
    carry = jax.eval_shape(lambda: learner.init_carry((num_envs,)))
    obs = jax.eval_shape(lambda: zero_observation(_SPECS[kind], (num_envs,)))
    first = jax.ShapeDtypeStruct((num_envs,), bool)
    action, _, measured = jax.eval_shape(learner.act, state, carry, obs, first, key)

    def sequence(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((length, *x.shape), x.dtype), tree)

    def each(dtype: Any) -> Any:
        return jax.ShapeDtypeStruct((length, num_envs, 2), dtype)

    steps = Transition(
        obs=sequence(obs),
        first=sequence(first),
        action=sequence(action),
        reward=each(jnp.float32),
        terminated=each(bool),
        last=sequence(first),
        next_obs=sequence(obs),
        measured=sequence(measured),
        carry=sequence(carry),
    )
    batch = Trajectory(steps=steps, carry=carry, next_carry=carry, weight=each(jnp.float32))

    def used_by_loop(used_outputs: list[bool], loop: Any) -> Any:
        """What a while loop reads: jax takes it to be all that it is given."""
        num = loop.params["body_nconsts"]
        body = loop.params["body_jaxpr"].jaxpr
        _, is_read = partial_eval.dce_jaxpr(body, [True] * len(body.outvars))
        of_condition = [True] * loop.params["cond_nconsts"]
        return [*of_condition, *is_read[:num], *[True] * (len(is_read) - num)], loop

    def used(function: Callable[..., Any], *arguments: Any) -> set[str]:
        jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
        # Here alone: the rule leaves the loop as it is, so no program could be made of what is left.
        with unittest.mock.patch.dict(partial_eval.dce_rules, {jax.lax.while_p: used_by_loop}):
            _, is_used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
        leaves = jax.tree_util.tree_flatten_with_path(arguments)[0]
        return {jax.tree_util.keystr(path) for (path, _), use in zip(leaves, is_used, strict=True) if use}

    learnt = used(lambda state, batch, key: learner.update(state, batch, key)[0].params, state, batch, key)
    acted = used(
        lambda obs, state, carry, first, key: learner.act(state, carry, obs, first, key)[0],
        obs,
        state,
        carry,
        first,
        key,
    )
    return {path.rpartition(".")[2] for path in learnt if path.startswith("[1].steps")} | {
        f"act.{path.rpartition('.')[2]}" for path in acted if path.startswith("[0].")
    }


def family_of(name: str) -> Family:
    """Whose page an algorithm is on."""
    return next(family for family in FAMILIES if name in family.algorithms)


def _link(name: str) -> str:
    return f"[{name}](root:docs/algorithms/{family_of(name).page}.md)"


def who_sees_what(*names: str) -> str:
    """What each algorithm's actor and critic read, whose reward it learns from and who counts."""
    rows = []
    for name in names or tuple(own.ALGORITHMS):
        known = facts(name)
        is_team = known.reward != "each agent's own" or name.startswith("vdac")
        counts = (
            "the team's steps that count" if is_team and _is_mixed(name) else "steps of agents whose return goes on"
        )
        if name == "random":
            counts = EMPTY
        actor = "all views, and actions chosen before its own" if name in ("mat", "sable") else "the agent's view"
        if name == "random":
            actor = "nothing but the mask"
        rows.append([_link(name), actor, VALUES[name], known.reward, counts])
    return table(
        ["algorithm", "the actor reads", "the critic or value", "reward, by default", "who counts in it"], rows
    )


def _is_mixed(name: str) -> bool:
    return "_tot" in VALUES[name]


def algorithms(*names: str) -> str:
    """What each algorithm takes, learns from and remembers."""
    rows = []
    for name in names or tuple(own.ALGORITHMS):
        known = facts(name)
        summary = (own.ALGORITHMS[name].__doc__ or "").strip().splitlines()[0]
        source = {"rollouts": "its last rollout", "replay": "replay", "any": EMPTY}[known.learns_from]
        memory = "yes" if known.has_memory else "no"
        rows.append([_link(name), " and ".join(known.actions), source, memory, known.sharing, summary])
    header = ["algorithm", "actions", "learns from", "memory (`recurrent`)", "parameters, by default", "what it is"]
    return table(header, rows)


# ------------------------------------------------------------------------------------------------------ results


class Run(NamedTuple):
    """A committed run: its folder's name, what it was, and the last evaluation of each seed."""

    name: str
    facts: dict[str, Any]
    metrics: dict[str, Any]
    env_steps: list[int]
    wall_s: list[float]

    @property
    def algorithm(self) -> str:
        return self.facts["algorithm"]

    @property
    def title(self) -> str:
        """The algorithm, its memory, and what else its name has to tell it from its like."""
        config = self.facts["config"]
        memory = [config.get("cell", "gru")] if config.get("recurrent") else []
        words = self.name.partition(self.facts["env"])[2].split("-")
        told = ["", *memory, *re.split(r"\W", self.task), "discrete"]
        more = [word.replace("_", " ") for word in words if word not in told and not re.match(r"\d.*[ex]\d|v\d", word)]
        return ", ".join([*self.algorithm.split(","), *memory, *more])

    @property
    def metric(self) -> str:
        """Games won in SMAX and football, the return of one agent where all have the same, else the sum."""
        env = self.facts["env"]
        for won in ("eval/won", "eval/scored"):
            if won in self.metrics:
                return won
        is_common = env == "overcooked" or env == "hanabi" or re.match("ant_|half|hopper_|humanoid_|walker", env)
        return "eval/return_mean" if is_common else "eval/return_sum"

    @property
    def task(self) -> str:
        """The environment with what it was made with, where that says which task it is."""
        kwargs = self.facts["env_kwargs"]
        said = [f"{name}={kwargs[name]}" for name in kwargs if name not in ("agent_ids", "flatten", "shaped_reward")]
        return " ".join([self.facts["env"], *said])

    def last(self, metric: str) -> np.ndarray | None:
        """The last value that each seed has of a metric; None if none has any."""
        series = np.asarray(self.metrics.get(metric, ()), float)
        finite = [x[np.isfinite(x)] for x in series]
        return np.asarray([x[-1] for x in finite]) if finite and all(map(len, finite)) else None

    def score(self, when: str) -> str:
        """Mean (lowest to highest seed) of "eval", "absolute" or "train"."""
        last = self.last(self.metric.replace("eval", when))
        if last is None:
            return EMPTY
        largest = np.abs(last).max()
        digits = 2 if largest <= 1 else 1 if largest < 100 else 0
        return f"{last.mean():.{digits}f} ({last.min():.{digits}f} to {last.max():.{digits}f})"


@functools.cache
def runs() -> tuple[Run, ...]:
    """All that are committed."""
    found = []
    for path in sorted(RESULTS.glob("*/config.json")):
        data = json.loads(path.with_name("metrics.json").read_text())
        found.append(
            Run(path.parent.name, json.loads(path.read_text()), data["metrics"], data["env_steps"], data["wall_s"])
        )
    return tuple(found)


def _device(run: Run) -> str:
    system = run.facts["system"]
    if system["device"] != "cpu":
        return system["device"]
    return "CPU"


def _rows_of_runs(chosen: Iterable[Run]) -> list[list[str]]:
    return [
        [
            f"[{run.title}](root:benchmarks/results/{run.name}/config.json)",
            run.task,
            run.metric.removeprefix("eval/"),
            str(len(run.metrics[run.metric])),
            f"{run.env_steps[-1]:.1e}".replace("e+0", "e"),
            *(run.score(when) for when in ("eval", "absolute", "train")),
            _device(run),
            f"{run.wall_s[-1]:.0f} s",
        ]
        for run in chosen
    ]


_RUN_HEADER = [
    "run of",
    "task",
    "metric",
    "seeds",
    "env steps per seed",
    "greedy at the end",
    "greedy, best parameters",
    "while exploring",
    "device",
    "wall time, all seeds",
]


def results(*words: str) -> str:
    """Runs of these algorithms (or within combinators), or on environments whose name begins like one of the words."""
    chosen = [run for run in runs() if not words or _is_of(run, words)]
    if not chosen:
        return "There is no committed run yet."
    chosen.sort(key=lambda run: (run.task, run.metric, -run.last(run.metric).mean()))
    about = "Means over seeds (lowest to highest seed), from the `metrics.json` of each run."
    return f"{about}\n\n" + table(_RUN_HEADER, _rows_of_runs(chosen))


def shortlist(*names: str) -> str:
    """Runs of these names, in their order, with what matters most."""
    by_name = {run.name: run for run in runs()}
    rows = [[row[1], row[2], row[0], *row[3:6]] for row in _rows_of_runs(by_name[name] for name in names)]
    return table(["task", "metric", "run of", *_RUN_HEADER[3:6]], rows)


def _is_of(run: Run, words: Sequence[str]) -> bool:
    return bool(set(words) & set(re.split(r"\W+", run.algorithm))) or any(
        run.facts["env"].startswith(word) for word in words
    )


def curves(*words: str) -> str:
    """Learning curves of the same runs, with the command that made each."""
    out = []
    for run in runs():
        if not words or _is_of(run, words):
            title = f"### {run.name}" if not words else f"**{run.name}**"
            picture = f"![learning curve of {run.name}](root:benchmarks/results/{run.name}/learning_curve.png)"
            out.append(f"{title}\n\n{picture}\n\n```\n{run.facts['command']}\n```")
    return "\n\n".join(out) or "There is no committed curve yet."


def published() -> str:
    """Runs of the campaign for whose task a number is known, beside it."""
    entries = campaign.read(ROOT / "benchmarks" / "evidence" / "campaign.toml")
    rows = campaign.table([entry for entry in entries if entry.published is not None], RESULTS)
    return re.sub(
        r"^\| ([^|]*-[^|]*\w) \|", r"| [\1](root:benchmarks/results/\1/config.json) |", rows, flags=re.MULTILINE
    )


def reported(*words: str) -> str:
    """The tables of `jmarl report` for committed runs: patterns of their names, then options."""
    options = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    folders = [str(path.parent) for word in words[:options] for path in sorted(RESULTS.glob(f"{word}/config.json"))]
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as out, contextlib.redirect_stdout(said):
        report.main([*folders, "--out", f"{out}/report", *words[options:]])
    _, *sections = said.getvalue().partition("\nFigures, report.md")[0].split("\n\n")
    kept = [section for section in sections if not section.startswith("![")]
    return "\n\n".join(re.sub(r"^## (.*)", r"**\1**", section) for section in kept)


def speed(folder: str, other: str) -> str:
    """Environment steps per second beside another library, medians of the rounds that were measured in turn."""
    rows = []
    for path in sorted((RESULTS / "throughput" / folder).glob("*.json")):
        data = json.loads(path.read_text())
        theirs, ours = (_median(data[who], "steps_per_second") for who in ("theirs", "ours"))
        row = [data["name"], f"{theirs:,.0f}", f"{ours:,.0f}", f"{data['speed_ratio']:.2f}"]
        if data["compile_ratio"] is not None:
            row += [f"{_median(data[who], 'trace_and_compile_s'):.1f} s" for who in ("theirs", "ours")]
        rows.append(row)
    header = ["settings", other, "jmarl", "ratio"]
    if len(rows[0]) > len(header):
        header += [f"compilation: {other}", "jmarl"]
    system = data["system"]
    versions = ", ".join(f"{name} {system['versions'][name]}" for name in ("jax", "jaxmarl"))
    return f"{table(header, rows)}\n\nOn a CPU of {system['num_cores']} cores, {versions}."


def rates(name: str, other: str) -> str:
    """Environment steps per second of what a script measured in turn, medians, beside those of `other` among them."""
    data = json.loads((RESULTS / "throughput" / f"{name}.json").read_text())
    medians, system = data["medians"], data["system"]
    rows = [[way.replace("_", " "), f"{x:,.0f}", f"{x / medians[other]:.1f}"] for way, x in medians.items()]
    return f"{table(['who, and the environment', 'steps/s', 'ratio'], rows)}\n\n{_on(system)}"


def costs(name: str) -> str:
    """How long an iteration of each algorithm takes beside one of another, medians of rounds in turn."""
    data = json.loads((RESULTS / "throughput" / f"{name}.json").read_text())
    rows = []
    for x in data["rows"]:
        taken = sorted(x["milliseconds"])
        times = f"{taken[0]:,.0f} to {taken[-1]:,.0f} ms"
        rows.append([x["way"], x["beside"], f"{x['ratio']:.2f}", times, f"{x['env_steps_per_s']:,}"])
    header = ["algorithm", "beside", "ratio of time", "an iteration, by round", "steps/s"]
    return f"{table(header, rows)}\n\n{_on(data['system'])}"


def _on(system: dict[str, Any]) -> str:
    return f"On a CPU of {system['num_cores']} cores, jax {system['versions']['jax']}."


def _median(rounds: Sequence[dict[str, float]], name: str) -> float:
    return float(np.median([x[name] for x in rounds]))


# ------------------------------------------------------------------------------------------------- environments


# By page: the name of an environment and what it is made with.
ENVIRONMENTS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "mpe": [(name, {}) for name in jmarl.envs.jaxmarl_adapter.names() if name.startswith("MPE_")]
    if hasattr(jmarl.envs, "jaxmarl_adapter")
    else [],
    "smax": [("HeuristicEnemySMAX", {"map_name": name}) for name in ("3m", "2s3z", "3s5z", "5m_vs_6m", "10m_vs_11m")],
    "overcooked": [
        ("overcooked", {"layout": name, "flatten": True})
        for name in ("cramped_room", "asymm_advantages", "coord_ring", "forced_coord", "counter_circuit")
    ],
    "hanabi": [("hanabi", {"num_agents": number}) for number in (2, 3, 4, 5)],
    "mabrax": [(name, {}) for name in ("ant_4x2", "halfcheetah_6x1", "hopper_3x1", "humanoid_9|8", "walker2d_2x3")],
    "jaxmarl_others": [("coin_game", {}), ("switch_riddle", {}), ("jaxnav", {})],
    "gymnax": [
        (name, {}) for name in ("CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCar-v0", "Breakout-MinAtar")
    ],
    "jumanji": [
        (name, {})
        for name in ("rware tiny-2ag", "rware tiny-4ag", "lbf 8x8-2p-2f-coop", "con 5x5x3a", "clean 10x10x10a")
    ],
    "python": [
        ("gymnasium:CartPole-v1", {}),
        ("envpool:CartPole-v1", {}),
        ("pettingzoo:mpe2.simple_spread_v3", {}),
        ("football:academy_3_vs_1_with_keeper", {}),
    ],
    "pgx": [(f"pgx:{name}", {}) for name in ("tic_tac_toe", "connect_four", "kuhn_poker", "go_9x9")],
    "own": [("predator_prey", {})],
}


def specs(page: str) -> str:
    """What `jmarl.make(..).spec` says of the environments of a page."""
    rows = []
    for name, kwargs in ENVIRONMENTS[page]:
        said = " ".join([f"`{name}`", *(f"`{key}={value}`" for key, value in kwargs.items())])
        try:
            with warnings.catch_warnings():  # of other libraries about their own environments
                warnings.simplefilter("ignore")
                rows.append([said, *_spec_cells(jmarl.make(name, **kwargs).spec)])
        except ImportError as error:
            rows.append([said, str(error), *[""] * (len(_SPEC_HEADER) - 2)])
    if page == "own":
        games = jmarl.envs
        for said, env in (
            ("`matrix_game([[..], [..]])`, 2 x 2", games.matrix_game([[1.0, 0.0], [0.0, 1.0]])),
            ("`zero_sum_game(..)`, 3 x 3", games.zero_sum_game(np.zeros((3, 3)))),
            ("`two_step_game()`", games.two_step_game()),
            ("`key_door()`", games.key_door()),
        ):
            rows.append([said, *_spec_cells(env.spec)])
    return table(_SPEC_HEADER, rows)


_SPEC_HEADER = ["environment", "agents", "view", "state", "actions", "longest episode", "teams", "may wait"]


def _spec_cells(spec: EnvSpec) -> list[str]:
    size = spec.num_actions if spec.is_discrete else spec.action_size
    widths = spec.action_sizes if len(set(spec.action_sizes)) > 1 else ()
    actions = f"{size} {'discrete' if spec.is_discrete else 'continuous'}"
    if widths:
        actions += f" (own: {', '.join(map(str, widths))})"
    view = " x ".join(map(str, spec.obs_shape))
    if len(set(spec.obs_sizes)) > 1:
        view += f" (own: {', '.join(map(str, spec.obs_sizes))})"
    shown = spec.agents if spec.num_agents <= 4 else (*spec.agents[:2], "..", spec.agents[-1])
    return [
        f"{spec.num_agents}: {', '.join(shown)}",
        view,
        " x ".join(map(str, spec.state_shape)),
        actions,
        EMPTY if spec.max_steps is None else f"{spec.max_steps} steps",
        ", ".join(map(str, spec.teams)) or EMPTY,
        "yes" if spec.may_wait else "no",
    ]


def preset(*words: str) -> str:
    """What the presets of an environment set, for each algorithm: differences from defaults. Names may have spaces."""
    env = " ".join(words)
    rows = []
    for name in own.ALGORITHMS:
        if name == "random":
            continue
        chosen = presets.for_environment(name, env)
        cls: Any = type(chosen.config)
        changed = [
            f"{field}={_short(getattr(chosen.config, field))}"
            for field, known in _fields(cls).items()
            if getattr(chosen.config, field) != known.default
        ]
        replay = "" if chosen.replay is None else f", batch {chosen.replay.batch_size} x {chosen.replay.num_updates}"
        size = f"{chosen.num_envs} x {chosen.rollout_length}{replay}"
        total = f"{chosen.total_steps:.0e}".replace("e+0", "e").replace("e+", "e")
        rows.append([_link(name), total, size, ", ".join(f"`{text}`" for text in changed)])
    header = ["algorithm", "env steps per seed", "environments x steps of a rollout", "other than the defaults"]
    return table(header, rows)


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# ---------------------------------------------------------------------------------------------------- API pages


def api_pages(make_api: Any) -> dict[str, str]:
    """A page for each public module, by name, with mkdocstrings' directive for each public name.

    A name that several modules export is described on the page of the one below, and the others lead there.
    """
    modules = list(make_api.public_modules(jmarl))
    home: dict[str, str] = {}
    for module in modules:  # from the top down
        for name in make_api.public_names(module):
            home[canonical(module, name)] = module.__name__
    pages = {}
    for module in modules:
        here, elsewhere = [], []
        for name in make_api.public_names(module):
            value, path = getattr(module, name), canonical(module, name)
            about = make_api.describe(module, name)
            if inspect.ismodule(value):
                elsewhere.append(f"- [`{name}`]({value.__name__}.md): {make_api.first_sentence(value.__doc__ or '')}")
            elif home[path] != module.__name__:
                elsewhere.append(f"- [`{name}`]({home[path]}.md#{path}): {about}")
            elif not callable(value):
                here += [f"## {name}", "", about, ""]
            else:
                here += [f"::: {path}", ""]
        about = make_api.first_sentence(module.__doc__ or "")
        pages[module.__name__] = "\n".join([f"# {module.__name__}", "", about, "", *elsewhere, "", *here])
    return pages


def canonical(module: Any, name: str) -> str:
    """Where a public name is defined, so that a function is not taken for the module of the same name."""
    value = getattr(module, name)
    where, known = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if where and known and getattr(importlib.import_module(where), known, None) is value:
        return f"{where}.{known}"
    return f"{module.__name__}.{name}"


def notebook(path: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown with its committed outputs, and its pictures by name."""
    import base64

    data, out, pictures = json.loads(path.read_text(encoding="utf-8")), [], {}
    for cell in data["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            out.append(source)
            continue
        out.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            content = output.get("data", {})
            kind = next((kind for kind in ("image/png", "image/gif") if kind in content), None)
            if kind:
                name = f"{path.stem}_{len(pictures)}.{kind.partition('/')[2]}"
                pictures[name] = base64.b64decode("".join(content[kind]))
                out.append(f"![output]({name})")
            elif "text/markdown" in content:
                out.append("".join(content["text/markdown"]))
            elif text := "".join(output.get("text", content.get("text/plain", ""))).strip():
                out.append(f"```text\n{text}\n```")
    return "\n\n".join(out) + "\n", pictures


DIRECTIVES: dict[str, Callable[..., str]] = {
    "algorithms": algorithms,
    "costs": costs,
    "curves": curves,
    "defaults": defaults,
    "docstring": docstring,
    "preset": preset,
    "published": published,
    "results": results,
    "specs": specs,
    "rates": rates,
    "report": reported,
    "shortlist": shortlist,
    "speed": speed,
    "who-sees-what": who_sees_what,
}


if __name__ == "__main__":
    for path in WRITTEN:
        file = ROOT / path
        file.write_text(with_tables(file.read_text(encoding="utf-8"), path), encoding="utf-8")
