"""How tests run: on the CPU unless told otherwise, type-checked, with compilations kept between runs."""

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import jax
import jaxtyping
import pytest
from hypothesis import settings

# Before anything imports jmarl: shapes and dtypes of every annotated function are checked while tests run.
jaxtyping.install_import_hook("jmarl", "typecheck.typecheck")

# Compiling takes longer than hypothesis' deadline, and each fixture of ours is safe to share between examples.
settings.register_profile("jmarl", deadline=None, max_examples=20)
settings.load_profile("jmarl")


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    """Run a test in single precision, then in double: floats made inside it have this dtype by default."""
    enable_x64 = getattr(jax, "enable_x64", None)
    if enable_x64 is None:  # jax < 0.8
        from jax.experimental import enable_x64
    with enable_x64(request.param == "float64"):
        yield request.param


@pytest.fixture(params=["jit", "eager"])
def maybe_jit(request):
    """Run a test with `maybe_jit(f)` compiled, then op by op."""
    if request.param == "jit":
        yield jax.jit
    else:
        with jax.disable_jit():
            yield lambda f, **_: f
