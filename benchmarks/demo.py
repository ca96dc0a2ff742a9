"""`make demo`: four MAPPO teams learn MPE simple_spread side by side. What train.py does, for two minutes."""

import train

SECONDS_NEED = "Trains 4 seeds in one vmap; Ctrl-C stops early and keeps what was learnt."

if __name__ == "__main__":
    print(SECONDS_NEED)
    train.main(["mappo", "--env", "MPE_simple_spread_v3", "--seeds", "4", "--total-steps", "5e5"])
