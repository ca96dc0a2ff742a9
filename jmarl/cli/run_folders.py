"""Run folders: the one place that writes and reads them, also those of earlier versions.

| file | what |
|---|---|
| config.json | command, every setting, versions and device |
| metrics.csv, metrics.json | rows of metrics, as they come and as one series per seed |
| checkpoints | from which a run goes on |
| params.safetensors | what was learnt |

A run folder may come from anybody: what it holds is read as numbers and words, and never run or unpickled.
"""

import dataclasses
import json
import math
import os
import shlex
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import flax.errors
import jax
import jax.numpy as jnp
import numpy as np

import jmarl
from jmarl import configs
from jmarl.cli import composed, own
from jmarl.cli.errors import UsageError
from jmarl.types import Env, Learner, TrainState, zero_observation

FORMAT = 2  # of config.json; those of before have none
_COUNTS = ("seeds", "seed", "total_steps", "num_envs", "rollout_length", "eval_episodes", "warmup_steps")
_CENTRAL = ("mappo", "maa2c", "maddpg", "matd3", "masac")
_TEAMS = ("vdn", "qmix", "cw_qmix", "ow_qmix")

# ------------------------------------------------------------------------------------------------------- writing


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """A file that is there as a whole or not at all, whenever the process is killed."""
    temporary = path.with_name(path.name + ".tmp")
    write(temporary)
    os.replace(temporary, path)


def write_json(path: Path, content: Any) -> None:
    """JSON, as a whole or not at all."""
    write_whole(path, lambda path: path.write_text(json.dumps(content, indent=2) + "\n"))


def facts_of(
    algorithm: str, options: Any, config: Any, env_kwargs: dict[str, Any], folder: Path, command: str
) -> dict[str, Any]:
    """What config.json says."""
    return {
        "format": FORMAT,
        "command": command,
        "algorithm": algorithm,
        **dataclasses.asdict(options),
        "env_kwargs": env_kwargs,
        "run_dir": str(folder),
        "config": composed.as_dict(config),
        "system": jmarl.logging.system_facts(),
    }


# ------------------------------------------------------------------------------------------------------- config.json


def read_config(folder: Path) -> dict[str, Any]:
    """A run's config.json, in today's words."""
    path = folder if folder.suffix == ".json" else folder / "config.json"
    facts = _read_json(path, f"{folder} is no run folder of jmarl train: it has no config.json that can be read.")
    for name, kind in {"algorithm": str, "env": str, "env_kwargs": dict, "config": dict}.items():
        if name not in facts:
            raise UsageError(f"{path} was not written by jmarl train: it has no {name}.")
        if not isinstance(facts[name], kind):
            raise UsageError(f"{path} is damaged: {name} is {_show(facts[name])}.")
    if not isinstance(facts.get("preset", ""), str):
        raise UsageError(f"{path} is damaged: preset is {_show(facts['preset'])}.")
    for name in _COUNTS:
        value = facts.get(name, 0)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise UsageError(f"{path} is damaged: {name} is {_show(value)}.")
    own.require_no_pickle(facts["env_kwargs"])
    return facts if facts.get("format") == FORMAT else _migrated(facts)


def _read_json(path: Path, missing: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except OSError:
        raise UsageError(missing) from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is damaged: {error}.") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path} is damaged: it holds {_show(content)} in place of names and values.")
    return content


def _migrated(facts: dict[str, Any]) -> dict[str, Any]:
    """What a version before config.json had a format meant."""
    facts, config = dict(facts), dict(facts["config"])
    for old, new in {"num_updates_per_step": "num_updates", "split": "shard"}.items():
        if old in facts:
            facts[new] = facts.pop(old)
    if "num_updates" in config:
        config["horizon"] = config.pop("num_updates")
    algorithm = facts["algorithm"]
    if algorithm in _CENTRAL and config.get("critic_view") == "obs":
        config["critic_view"] = "state"
    if "team_reward" in config and config["team_reward"] is None:
        config["team_reward"] = "sum" if algorithm in _TEAMS else "individual"
    if not own.is_own(algorithm):
        fields = {field.name: field for field in dataclasses.fields(own.config_class(algorithm))}
        if "suboptimal_weight" in fields and "alpha" in config:
            config["suboptimal_weight"] = config.pop("alpha")
        default = getattr(fields.get("normalize_advantage"), "default", None)
        if isinstance(default, str) and isinstance(config.get("normalize_advantage"), bool):
            config["normalize_advantage"] = "all" if config["normalize_advantage"] else "none"
        config = {name: value for name, value in config.items() if name in fields}
    return {**facts, "format": FORMAT, "config": config, "command": _migrated_command(facts.get("command"), algorithm)}


def _migrated_command(command: Any, algorithm: str) -> str:
    """The words of `python benchmarks/train.py` as those of `jmarl train`."""
    renamed = {"--num-updates-per-step": "--num-updates", "--num-updates": "--horizon", "--split": "--shard"}
    if algorithm in ("cw_qmix", "ow_qmix") and hasattr(own.config_class(algorithm)(), "suboptimal_weight"):
        renamed["--alpha"] = "--suboptimal-weight"
    words = shlex.split(command) if isinstance(command, str) else []
    begin = next((i + 1 for i, word in enumerate(words) if word.endswith(("train.py", "train"))), len(words))
    new = [word.partition("=") for word in words[begin:]]
    return shlex.join(["jmarl", "train", *(renamed.get(name, name) + equals + value for name, equals, value in new)])


def restore(default: Any, values: Mapping[str, Any]) -> Any:
    """A dataclass like `default`, with the fields that `values` has, of which each must be of the field's type."""
    if isinstance(default, dict):
        return {name: restore(inner, values[name]) if name in values else inner for name, inner in default.items()}
    hints = typing.get_type_hints(type(default))
    changed = {}
    for field in dataclasses.fields(default):
        if field.name not in values:
            continue  # of a later version: as by default
        value, inner = values[field.name], getattr(default, field.name)
        if configs.is_config(inner) and isinstance(value, Mapping):
            changed[field.name] = restore(inner, value)
            continue
        value = _as_tuple(value)
        if field.name == "env_kwargs" and isinstance(value, Mapping):
            continue  # whoever reads it does so as a dict
        if hints[field.name] in (Path | None, Path) and isinstance(value, str):
            value = Path(value)
        if not _is_a(value, hints[field.name]):
            raise UsageError(f"config.json is damaged: {field.name} is {_show(value)}.")
        changed[field.name] = value
    return dataclasses.replace(default, **changed)


def restore_config(default: Any, facts: Mapping[str, Any]) -> Any:
    """The config of a run."""
    known = {name for name, _ in configs.fields(default)}
    if unknown := set(_leaves(facts["config"])) - known:
        raise UsageError(f"config.json has {min(unknown)} in its config, which {facts['algorithm']} does not know.")
    return restore(default, facts["config"])


def is_filled_in(facts: Mapping[str, Any]) -> bool:
    """Whether the horizon of a run's schedules is its own end, as where nobody gave another."""
    try:
        per_iteration = facts["num_envs"] * facts["rollout_length"]
        num_iterations = max(1, round(facts["total_steps"] / per_iteration))
        horizons = [value for name, value in _leaves(facts["config"]).items() if name.split(".")[-1] == "horizon"]
        return bool(horizons) and horizons == [num_iterations * facts.get("num_updates", 1)] * len(horizons)
    except (KeyError, TypeError, ValueError, ArithmeticError):
        return False


def without_horizon(config: Any) -> Any:
    """The config, whose schedules end with whatever run it is of."""
    names = [name for name, _ in configs.fields(config) if name.split(".")[-1] == "horizon"]
    return configs.replace(config, dict.fromkeys(names))


def _leaves(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """What a config of a JSON file says, by dotted name."""
    leaves: dict[str, Any] = {}
    for name, value in config.items():
        leaves |= _leaves(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return leaves


def _is_a(value: Any, hint: Any) -> bool:
    """Whether a value of a JSON file is one of a field's type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return value in arguments
    if origin in (typing.Union, types.UnionType):
        return any(_is_a(value, argument) for argument in arguments)
    if origin is tuple:
        kinds = arguments[:1] * len(value) if isinstance(value, tuple) else ()
        return isinstance(value, tuple) and all(map(_is_a, value, kinds))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return hint is Any or (isinstance(hint, type) and isinstance(value, hint))


def _as_tuple(value: Any) -> Any:
    """Lists of a JSON file are tuples in a dataclass."""
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _show(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) < 60 else f"{text[:50]}.."


# ------------------------------------------------------------------------------------------------------- metrics


def read_metrics(folder: str | Path) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """A run's metrics.json: environment steps `[t]`, seconds `[t]`, metrics by name `[seed, t]`, NaN for none."""
    path = Path(folder) / "metrics.json"
    content = _read_json(path, f"{folder} is no run folder of jmarl train: its metrics.json cannot be read.")
    try:
        env_steps, wall_s = np.array(content["env_steps"], int), np.array(content["wall_s"], float)
        metrics = {name: np.array(values, float) for name, values in content["metrics"].items()}
    except KeyError as error:
        raise UsageError(f"{path} is damaged: it has no {error}.") from error
    except (AttributeError, ValueError, TypeError, OverflowError) as error:
        raise UsageError(f"{path} is damaged: {error}.") from error
    for name, values in {"env_steps": env_steps[None], "wall_s": wall_s[None], **metrics}.items():
        if values.ndim != 2 or values.shape[1] != len(env_steps):
            raise UsageError(f"{path} is damaged: {name} is not as long as the others.")
    return env_steps, wall_s, metrics


def load_metrics(folder: str | Path) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Environment steps `[t]` and metrics by name `[seed, t]`, NaN where nothing was measured."""
    env_steps, _, metrics = read_metrics(folder)
    return env_steps, metrics


def latest(series: np.ndarray) -> np.ndarray:
    """The last measured value of each seed, `[seed, t]` to `[seed]`; NaN where there is none."""
    return np.array([[np.nan, *row[np.isfinite(row)]][-1] for row in series])


def is_complete(folder: Path, total_env_steps: int) -> bool:
    """Whether metrics reach the end. The learner's own count would not say so: it has the warm-up, too."""
    return bool(load_metrics(folder)[0].max(initial=0) >= total_env_steps)


def diverged(params: Any, folder: Path) -> dict[int, int]:
    """Seeds whose parameters are not finite any more, and after how many steps a loss was not, or the last step."""
    leaves = [np.asarray(x) for x in jax.tree.leaves(params)]
    leaves = [x for x in leaves if np.issubdtype(x.dtype, np.floating)]
    lost = [
        seed for seed in range(len(leaves[0]) if leaves else 0) if not all(np.isfinite(x[seed]).all() for x in leaves)
    ]
    env_steps, metrics = load_metrics(folder)
    when = {}
    for seed in lost:
        losses = [values[seed] for name, values in metrics.items() if "loss/" in name]
        missing = ~np.isfinite(losses).all(0) if losses else np.zeros(len(env_steps), bool)
        when[seed] = int(env_steps[np.argmax(missing) if missing.any() else -1])
    return when


# ------------------------------------------------------------------------------------------------------- learners


def load_run(
    folder: Path,
    *,
    best: bool = False,
    env: str | None = None,
    algorithm: str | None = None,
    max_eval_steps: int | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
) -> tuple[Env, Learner, TrainState]:
    """The environment of evaluation, the learner and what it learnt, seeds first.

    That is the last checkpoint. A run without checkpoints has parameters only: its optimiser and statistics are fresh,
    so the state is for playing.

    Args:
      folder: of a run.
      best: each seed as it was when it scored best in an evaluation, rather than as it is at the end.
      env, algorithm: functions of the user's own, which a run folder alone does not get run.
      max_eval_steps: of an episode, where the environment has no limit; by default the run's own.
      env_kwargs: what is other in the environment of evaluation than in training, such as the number of agents;
        None leaves an argument out.
    """
    facts = read_config(folder)
    name = own.require_named(facts["env"], [env] if env else [], f"--env {facts['env']}")
    algorithm = own.require_named(
        facts["algorithm"], [algorithm] if algorithm else [], f"--algorithm {facts['algorithm']}"
    )
    num_seeds = facts.get("seeds", 0)
    if not num_seeds:
        raise UsageError(f"{folder}/config.json is damaged: it does not say how many seeds there are.")
    try:
        config = restore_config(own.default_config(algorithm), facts)
        most_steps = max_eval_steps or facts.get("max_eval_steps")
        plays_in = plain_env(name, facts["env_kwargs"], most_steps)
        learner = own.find_algorithm(algorithm)(plays_in.spec, config)
    except (ImportError, KeyError, TypeError, ValueError, UsageError) as error:
        raise UsageError(f"{folder}/config.json does not fit this version of jmarl: {error}") from error

    player = learner
    if env_kwargs:
        plays_in = plain_env(name, changed_kwargs(facts["env_kwargs"], env_kwargs), most_steps)
        player = _elsewhere(folder, learner, own.find_algorithm(algorithm)(plays_in.spec, config), plays_in)
    init = jax.jit(jax.vmap(learner.init))
    keys = jax.random.split(jax.random.key(0), num_seeds)
    checkpoints = folder / "checkpoints"
    try:
        if checkpoints.is_dir() and jmarl.checkpoint.steps(checkpoints):
            if best and "best" not in jmarl.checkpoint.describe(checkpoints)["info"]["parts"]:
                raise UsageError(f"{folder} has no best learner: it was never evaluated.")
            part = "best.train_state" if best else "run.train_state"
            counted = jax.ShapeDtypeStruct((num_seeds,), jnp.int32)
            like = jax.eval_shape(init, keys).replace(env_steps=counted)
            return plays_in, player, jmarl.checkpoint.restore(checkpoints, like, part=part)
        if best:
            raise UsageError(f"{folder} has no best learner: checkpoints hold it, and there are none.")
        state = init(keys)
        params = jmarl.export.load_parameters(folder / "params.safetensors", state.params)
    except FileNotFoundError:
        raise UsageError(f"{folder} holds nothing learnt: neither checkpoints nor params.safetensors.") from None
    except (ImportError, OSError, ValueError) as error:
        raise UsageError(f"{folder}: {error}") from error
    env_steps = jnp.full(num_seeds, min(_env_steps(folder, facts), 2**31 - 1), jnp.int32)
    return plays_in, player, state.replace(params=params, env_steps=env_steps)


def changed_kwargs(env_kwargs: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of an environment with others in their place; None leaves one out.

    >>> changed_kwargs({"map_name": "3m", "max_steps": 50}, {"map_name": None, "num_allies": 5})
    {'max_steps': 50, 'num_allies': 5}
    """
    return {name: value for name, value in {**env_kwargs, **changes}.items() if changes.get(name, 0) is not None}


def _elsewhere(folder: Path, trained: Learner, player: Learner, env: Env) -> Learner:
    """The learner of another environment, refused where what was learnt does not fit what it plays with."""

    def one_step(key: Any) -> Any:
        obs = zero_observation(env.spec, (1,))
        return player.greedy(trained.init(key), player.init_carry((1,)), obs, jnp.ones(1, bool))

    try:
        jax.eval_shape(one_step, jax.random.key(0))
    except (flax.errors.FlaxError, TypeError, ValueError) as error:
        raise UsageError(
            f"What {folder} learnt does not fit {env.spec.name} with these --env-kwargs, whose views or actions are "
            f"of other sizes: train with torso='entities', or leave --env-kwargs out."
        ) from error
    return player


def plain_env(name: str, env_kwargs: Mapping[str, Any], max_eval_steps: int | None = None) -> Env:
    """The environment of evaluation. Shaped rewards are for training; what counts is the return without them."""
    is_own = own.is_own(name)
    env = own.make_env(name, {k: v for k, v in env_kwargs.items() if is_own or k != "shaped_reward"})
    return env if max_eval_steps is None else env._replace(spec=env.spec._replace(max_steps=max_eval_steps))


def _env_steps(folder: Path, facts: dict[str, Any]) -> int:
    """How long a run has trained, its warm-up included, on which exploration depends; 0 where it does not say."""
    try:
        env_steps = int(load_metrics(folder)[0][-1])
        per_round = facts["num_envs"] * facts["rollout_length"]
        return env_steps + math.ceil(facts.get("warmup_steps", 0) / per_round) * per_round
    except (UsageError, KeyError, IndexError, TypeError, ZeroDivisionError):
        return 0


def require_checkpoints(folder: Path, checkpoints: Path) -> None:
    """Refuses a run whose checkpoints are gone: it would begin anew, and so would its metrics."""
    # Their folder is made before metrics are written, and the first of them before the parameters.
    is_there = checkpoints.is_dir()
    is_saved = is_there and bool(jmarl.checkpoint.steps(checkpoints))
    has_metrics, has_parameters = ((folder / name).exists() for name in ("metrics.csv", "params.safetensors"))
    if (has_metrics and not is_there) or (has_parameters and not is_saved):
        raise UsageError(f"{folder} holds metrics, but no checkpoint to go on from: start a new run.")
