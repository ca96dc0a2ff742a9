"""How tests compile: they compile much and compute little, and unoptimised code takes a sixth of the time to make."""

import os
import subprocess
import sys


def unoptimised() -> str:
    """XLA_FLAGS, with what this jaxlib knows: XLA dies of a flag that it does not know."""
    flags, old_emitters = "--xla_backend_optimization_level=0", "--xla_cpu_use_fusion_emitters=false"  # until jax 0.10
    ask = [sys.executable, "-c", "import jax; jax.devices()"]
    is_known = subprocess.run(ask, env=os.environ | {"XLA_FLAGS": old_emitters}, capture_output=True).returncode == 0
    return f"{flags} {old_emitters}" if is_known else flags
