"""`make demo`: four MAPPO teams learn MPE simple_spread side by side, in one vmap. A short call of `jmarl train`."""

from jmarl.cli import main

if __name__ == "__main__":
    print("Four teams of three learn to cover three landmarks. Ctrl-C stops early and keeps what was learnt.")
    main.main(["train", "mappo", "--env", "MPE_simple_spread_v3", "--seeds", "4", "--total-steps", "3e5"])
