"""What do newer algorithms cost? Each beside the one that it extends, in turn, in one process.

    python benchmarks/speed/algorithms.py --out benchmarks/results/throughput/algorithms.json

One iteration on simple_spread with the preset of `jmarl train`, one seed. Compilation comes before. An iteration is a
rollout and all that is learnt from it: the presets of a pair share environments, steps, passes over the data, and
batches, but for HAPPO and HATRPO, which have one minibatch for each pass where MAPPO has four.
"""

import in_turn
from jmarl.cli import experiment, options

CONTINUOUS = "--env-kwargs action_type=Continuous"
# The words of `jmarl train`, and whom each is compared with.
WAYS = {
    "mappo": ("mappo", ""),
    "maa2c": ("maa2c", ""),
    "happo": ("happo", "mappo"),
    "hatrpo": ("hatrpo", "mappo"),
    "mat": ("mat", "mappo"),
    "sable": ("sable", "mappo"),
    "haa2c": ("haa2c", "maa2c"),
    "vdac_sum": ("vdac_sum", "maa2c"),
    "vdac_mix": ("vdac_mix", "maa2c"),
    "mappo, GRU": ("mappo --recurrent", "mappo"),
    "mappo, attention over time": ("mappo --recurrent --cell attention", "mappo, GRU"),
    "mappo, attention over entities": ("mappo --torso entities", "mappo"),
    "qmix": ("qmix", ""),
    "qplex": ("qplex", "qmix"),
    "qtran": ("qtran", "qmix"),
    "maddpg": (f"maddpg {CONTINUOUS}", ""),
    "facmac": (f"facmac {CONTINUOUS}", "maddpg"),
    "matd3": (f"matd3 {CONTINUOUS}", ""),
    "hatd3": (f"hatd3 {CONTINUOUS}", "matd3"),
    "masac": (f"masac {CONTINUOUS}", ""),
    "hasac": (f"hasac {CONTINUOUS}", "masac"),
    "pqn_vdn": ("pqn_vdn", ""),
    "pqn_iql": ("pqn_iql", "pqn_vdn"),
    "pqn_qmix": ("pqn_qmix", "pqn_vdn"),
}


def loop_of(words: str):
    """What `jmarl train` would train, and its config."""
    words = [*words.split(), "--env", "MPE_simple_spread_v3"]
    arguments = options.parse(words, experiment.options_of, prog="jmarl train", does="")
    built = experiment.build(*arguments[:4])
    return built.loop, built.config


def main() -> None:
    """Prints and writes milliseconds of an iteration and their ratio to those of the other's."""
    arguments = in_turn.parser(__doc__, (), 2.0).parse_args()
    loops = {name: loop_of(words) for name, (words, _) in WAYS.items()}
    beside = {name: other for name, (_, other) in WAYS.items() if other}
    in_turn.write(in_turn.iterations_beside(loops, beside, arguments), arguments.out)


if __name__ == "__main__":
    main()
