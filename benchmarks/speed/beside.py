"""Speed beside another library: a run of `whole_run.py` and a command of theirs, in turn, and the ratio of the medians.

    python benchmarks/speed/beside.py qmix_rnn --rounds 3 --out results/throughput/qmix_rnn.json -- COMMAND OF THE OTHER

The command's last line of output is one JSON object with "steps_per_second" (a number, a list, or a dict with a
"median") and, if it compiles, "trace_s" and "compile_s".
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys

_HERE = pathlib.Path(__file__).parent


def _busy_seconds() -> float:
    """CPU seconds that the whole machine has used."""
    fields = [int(x) for x in pathlib.Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
    return (sum(fields[:3]) + sum(fields[5:8])) / os.sysconf("SC_CLK_TCK")


def _children_seconds() -> float:
    used = os.times()
    return used.children_user + used.children_system


def _measure(command: list[str], **variables: str) -> dict:
    machine, own = _busy_seconds(), _children_seconds()
    environ = os.environ | variables
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=environ).stdout
    result = json.loads(output.strip().splitlines()[-1])
    rate = result["steps_per_second"]
    if isinstance(rate, dict):
        rate = rate["median"]
    return {
        "steps_per_second": statistics.median(rate) if isinstance(rate, list) else rate,
        "trace_and_compile_s": result.get("trace_s", 0.0) + result.get("compile_s", 0.0),
        "cpu_seconds_of_others": round(_busy_seconds() - machine - (_children_seconds() - own), 1),
    }


def beside(name: str, command: list[str], rounds: int, devices: int) -> dict:
    """Measures both `rounds` times in turn, ours also on several devices."""
    run = [sys.executable, str(_HERE / "whole_run.py"), name]
    theirs, ours, shared = [], [], []
    for _ in range(rounds):
        theirs.append(_measure(command))
        ours.append(_measure(run))
        print(f"theirs {theirs[-1]}\nours   {ours[-1]}", file=sys.stderr, flush=True)
        if devices > 1:
            shared.append(_measure(run, JAX_NUM_CPU_DEVICES=str(devices)))
            print(f"shared {shared[-1]}", file=sys.stderr, flush=True)

    def ratio(key, ours):
        other = statistics.median(x[key] for x in theirs)
        return statistics.median(x[key] for x in ours) / other if other else None

    import jmarl

    return {
        "name": name,
        "speed_ratio": ratio("steps_per_second", ours),
        "compile_ratio": ratio("trace_and_compile_s", ours),
        "theirs": theirs,
        "ours": ours,
        **(
            {
                "num_devices": devices,
                "speed_ratio_shared": ratio("steps_per_second", shared),
                "compile_ratio_shared": ratio("trace_and_compile_s", shared),
                "shared": shared,
            }
            if shared
            else {}
        ),
        "system": jmarl.logging.system_facts(),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="a setting of whole_run.py")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--devices", type=int, default=1, help="CPU cores that share our environments, as a third way")
    parser.add_argument("--out", type=pathlib.Path, help="a JSON file to write")
    parser.add_argument("command", nargs="+", help="the other library's command, after --")
    args = parser.parse_args()
    text = json.dumps(beside(args.name, args.command, args.rounds, args.devices), indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
