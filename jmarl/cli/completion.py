"""Completion of the command `jmarl` in a shell, written by tyro: `jmarl --tyro-print-completion bash`."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Union

import tyro

from jmarl.cli import check, crossplay, evaluate, experiment, lists, new, options, own, plotting, report, tournament


def main(argv: Sequence[str]) -> None:
    """Prints or writes the script of a shell: it knows every option of every command, and every algorithm."""
    commands: dict[str, Callable[..., Any]] = {
        "evaluate": evaluate.evaluate_run,
        "plot": plotting.plot,
        "report": report.report,
        "tournament": tournament.tournament,
        "crossplay": crossplay.crossplay,
        "check": check.check,
        "envs": lists.list_envs,
        "algorithms": lists.list_algorithms,
        "presets": lists.list_presets,
        "new": new.new,
    }
    kinds = []
    for name in own.ALGORITHMS:
        preset = options.preset_of(name, "MPE_simple_spread_v3")
        arguments = options.side_by_side(experiment.options_of(preset), preset.config)
        about = tyro.conf.subcommand(name, default=arguments, prefix_name=False)
        kinds.append(Annotated[type(arguments), about])

    def train(arguments: Any) -> None:
        """Trains an algorithm on an environment."""

    train.__annotations__["arguments"] = Union[tuple(kinds)]  # noqa: UP007  (of as many as there are)
    with options.numbers():
        tyro.extras.subcommand_cli_from_dict(
            {"train": train, **commands}, prog="jmarl", args=list(argv), config=(tyro.conf.OmitArgPrefixes,)
        )
