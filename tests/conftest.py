"""How tests run: on the CPU unless told otherwise, type-checked, with compilations kept between runs."""

import gc
import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# Tests compile much and compute little: XLA's older emitters, without optimisation, take about a fifth of the time.
# Workers keep all cores busy: splitting one program among threads only adds work.
os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters "
    "--xla_cpu_parallel_codegen_split_count=1 " + os.environ.get("XLA_FLAGS", "")
)

import jax
import pytest
import typecheck
from hypothesis import settings

# Before anything imports jmarl: shapes and dtypes of every annotated function are checked while tests run.
typecheck.install()

jax.devices()  # jax starts here, with one device: scripts that tests call would make one of each core

# Compiling takes longer than hypothesis' deadline, and each fixture of ours is safe to share between examples.
settings.register_profile("jmarl", deadline=None, max_examples=20)
settings.load_profile("jmarl")


def pytest_collection_finish():
    """Garbage is looked for less often, and not among imported modules: compiled programs make many lasting objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def pytest_generate_tests(metafunc):
    """`dtype`: single precision, then double. `maybe_jit`: compiled, then op by op, where one precision is enough.

    A test may choose its own.
    """
    chosen = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    is_ours = lambda name: name in metafunc.fixturenames and not any(name in names for names in chosen)  # noqa: E731
    arguments = [name for name in ("dtype", "maybe_jit") if is_ours(name)]
    if arguments:
        cases = [{"dtype": "float32", "maybe_jit": "jit"}]
        cases += [{"dtype": "float64", "maybe_jit": "jit"}] if "dtype" in arguments else []
        cases += [{"dtype": "float64", "maybe_jit": "eager"}] if "maybe_jit" in arguments else []
        metafunc.parametrize(arguments, [[case[name] for name in arguments] for case in cases], indirect=True)


@pytest.fixture
def dtype(request):
    """The test runs in this precision: floats made inside it have this dtype by default."""
    enable_x64 = getattr(jax, "enable_x64", None)
    if enable_x64 is None:  # before jax 0.8
        from jax.experimental import enable_x64
    with enable_x64(request.param == "float64"):
        yield request.param


@pytest.fixture
def maybe_jit(request):
    """`maybe_jit(f)` is `jax.jit(f)`, or f itself in a test that runs op by op."""
    if request.param == "jit":
        yield jax.jit
    else:
        with jax.disable_jit():
            yield lambda f, **_: f
