"""Trains an algorithm on an environment with many seeds; leaves curves, numbers, checkpoints and a GIF in a run folder.

    jmarl train mappo --env MPE_simple_spread_v3 --seeds 8 --total-steps 2e6 --learning-rate 1e-3
    jmarl train ippo --env HeuristicEnemySMAX --env-kwargs map_name=2s3z --no-recurrent
    jmarl train mappo --env overcooked --help
    jmarl train mappo --sweep learning-rate=1e-4,1e-3 gamma=0.9,0.95 --seeds 8
    jmarl train mappo --env my_env.py:make --env-kwargs size=5
    jmarl train --config runs/one/config.json --seeds 16
    jmarl train --resume runs/mappo-MPE_simple_spread_v3-20260101-120000

Every field of the algorithm's config is an option. Defaults come from `jmarl.presets`, for the environment given.
A run that was stopped or killed goes on with --resume as if nothing had happened; its config.json says all the rest.
"""

import dataclasses
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import tyro

from jmarl.cli import experiment, own, run_folders, sweeping
from jmarl.cli.errors import UsageError, usage_errors
from jmarl.cli.options import Arguments, Mode, canonical, parse, preset_of, require_sensible_numbers

DOES = "Trains {algorithm} on {env} and leaves the results in a folder; --resume FOLDER goes on with a run."


def main(argv: Sequence[str] | None = None, prog: str = "jmarl train") -> Path:
    """Parses the command line, trains, and returns the run folder. Exits with 2 on what the user can put right."""
    argv = list(sys.argv[1:] if argv is None else argv)
    with usage_errors():
        given = {canonical(word) for word in argv}
        if "--resume" in given:
            return _resume(argv, prog)
        if "--sweep" in given:
            return sweeping.sweep(argv)
        arguments = parse(argv, experiment.options_of, prog=prog, does=DOES)
        if arguments.mode.dry_run:
            experiment.describe(*arguments[:4])
            return Path()
        command = shlex.join(["jmarl", "train", *argv])
        return experiment.train(*arguments[:4], command=command, is_quiet=arguments.mode.quiet)


def _resume(argv: Sequence[str], prog: str) -> Path:
    """Goes on with a run: `--resume FOLDER`, and what may be said with it."""

    def resume(
        algorithm: tyro.conf.Positional[str] = "",
        *,
        resume: Path,
        env: str | None = None,
        total_steps: float | None = None,
        quiet: bool = False,
    ) -> Path:
        """Goes on with a run or a sweep. All other options are read from its folder.

        Args:
          algorithm: of a run whose algorithm is a function of your own: its name once more.
          resume: the folder.
          env: of a run whose environment is a function of your own: its name once more.
          total_steps: train a run longer, until so many environment steps of each seed.
          quiet: print nothing but the run folder.
        """
        typed = [name for name in (algorithm, env) if name]
        if (resume / sweeping.STATUS).exists():
            if total_steps is not None:
                raise UsageError("--total-steps does not go with --resume of a sweep: resume one of its runs.")
            return sweeping.resume(resume, typed)
        return resume_run(resume, typed, total_steps, is_quiet=quiet)

    for option in filter(None, map(canonical, argv)):
        if option not in ("--resume", "--env", "--total-steps", "--quiet", "--help"):
            raise UsageError(f"{option} does not go with --resume: all but --total-steps is read from the run folder.")
    return tyro.cli(resume, prog=prog, args=list(argv))


def resume_run(folder: Path, typed: Sequence[str], total_steps: float | None = None, *, is_quiet: bool = False) -> Path:
    """Goes on with the run of a folder, to more steps than it was begun with if they are given."""
    begun = read_arguments(folder, typed)
    options, config = begun.options, begun.config
    if not options.checkpoint_every:
        raise UsageError(f"{folder} has no checkpoints, because of --checkpoint-every 0: start a new run.")
    run_folders.require_checkpoints(folder, folder / "checkpoints")
    if total_steps is not None:
        if not options.total_steps <= total_steps < 2**63:
            raise UsageError(f"--total-steps {total_steps:g} must be at least the {options.total_steps} of the run.")
        num_iterations = max(1, round(options.total_steps / (options.num_envs * options.rollout_length)))
        rows_as_before = options.log_every or max(1, num_iterations // 100)
        options = dataclasses.replace(options, total_steps=int(total_steps), log_every=rows_as_before)
        if run_folders.is_filled_in(run_folders.read_config(folder)):
            config = run_folders.without_horizon(config)  # schedules reach to the new end
    return experiment.train(begun.algorithm, options, config, begun.env_kwargs, is_resumed=True, is_quiet=is_quiet)


def read_arguments(folder: Path, typed: Sequence[str]) -> Arguments:
    """The arguments of the run in a folder; `typed` are the functions of their own that the user has named."""
    try:
        facts = run_folders.read_config(folder)
        algorithm = own.require_named(facts["algorithm"], typed, f"{facts['algorithm']} after train")
        for name in typed:
            if not own.runs_code(name) and name not in (facts["algorithm"], facts["env"]):
                raise UsageError(f"it is of {facts['algorithm']} on {facts['env']}, not of {name}.")
        env = own.require_named(facts["env"], typed, f"--env {facts['env']}")
        preset = preset_of(algorithm, env, facts.get("preset", "default"))
        options = run_folders.restore(experiment.options_of(preset), facts)
        config = run_folders.restore_config(preset.config, facts)
        require_sensible_numbers(options, config)
    except UsageError as error:
        raise UsageError(f"{folder} holds no run to go on with: {error}") from error
    options = dataclasses.replace(options, env=env, run_dir=folder)
    return Arguments(algorithm, options, config, facts["env_kwargs"], Mode())


if __name__ == "__main__":
    main()
