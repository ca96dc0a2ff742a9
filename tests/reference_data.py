"""Reference values: arrays that other code computed, and how closely we must match them.

Names of arrays: `in/*` inputs, `param/*` initial parameters, `cfg/*` settings, `out/<variant>/*` expected results.
Files are read from `JMARL_REFERENCE_DIR` where it is set. Everything is stored in float64; `tree` and `jnp.asarray`
give the default precision of the moment, so one test serves both. Sizes and settings come from the files, never from a
test.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

FOLDER = Path(os.environ.get("JMARL_REFERENCE_DIR", Path(__file__).parent / "reference"))


def load(name: str) -> dict[str, np.ndarray]:
    """All arrays of one file, by name."""
    with np.load(FOLDER / f"{name}.npz") as file:
        return dict(file)


def tree(arrays: Mapping[str, np.ndarray], prefix: str) -> dict:
    """The arrays below a prefix as nested dicts: "param/actor/0/bias" is `tree(z, "param")["actor"]["0"]["bias"]`."""
    nested: dict = {}
    for name, value in arrays.items():
        if name.startswith(prefix + "/"):
            *folders, leaf = name.removeprefix(prefix + "/").split("/")
            node = nested
            for folder in folders:
                node = node.setdefault(folder, {})
            node[leaf] = jnp.asarray(value)
    if not nested:
        raise KeyError(f"No array below {prefix!r}.")
    return nested


def matching(arrays: Mapping[str, np.ndarray], pattern: str) -> Iterator[tuple[tuple[str, ...], np.ndarray]]:
    """(groups, array) of each name that matches a regular expression; there must be one."""
    found = [(match.groups(), value) for name, value in arrays.items() if (match := re.fullmatch(pattern, name))]
    if not found:
        raise KeyError(f"No array matches {pattern!r}.")
    yield from found


def assert_close(actual, desired, dtype: str, kind: str = "loss", largest: float | None = None) -> None:
    """Compare an array, or nested dicts of arrays.

    Args:
      actual, desired: equal structure, equal shapes.
      dtype: "float32" or "float64", the precision `actual` was computed in.
      kind: what is compared: "loss" (also targets and probabilities), "gradient", "parameter" after a few optimiser
        steps, "clipped": parameters whose gradients were clipped (PyTorch adds 1e-6 to their norm, optax does not), or
        "after": losses of such parameters.
      largest: what errors of single precision are relative to; by default the largest entry of `desired`, over all its
        leaves: a small leaf of a gradient is a sum of large terms.
    """
    if largest is None:
        largest = max(np.abs(np.asarray(leaf, float)).max(initial=0) for leaf in jax.tree.leaves(desired))
    if isinstance(desired, Mapping):
        assert set(actual) == set(desired), f"{sorted(actual)} != {sorted(desired)}"
        for name in desired:
            assert_close(actual[name], desired[name], dtype, kind, largest)
        return
    actual, desired = np.asarray(actual), np.asarray(desired)
    assert actual.shape == desired.shape, f"{actual.shape} != {desired.shape}"
    if np.issubdtype(desired.dtype, np.floating):
        assert actual.dtype == dtype, f"computed in {actual.dtype}, expected {dtype}"
    rtol, atol = {
        ("loss", "float64"): (1e-9, 1e-9),
        ("gradient", "float64"): (1e-9, 1e-9),
        ("parameter", "float64"): (1e-9, 1e-9),
        ("clipped", "float64"): (1e-9, 1e-6),
        ("after", "float64"): (1e-9, 1e-6),
        ("loss", "float32"): (1e-5, 1e-6 * max(largest, 1)),
        ("gradient", "float32"): (0, 1e-5 * max(largest, 1e-3)),
        ("after", "float32"): (1e-5, 1e-4),
        ("parameter", "float32"): (0, 1e-4),
        ("clipped", "float32"): (0, 1e-4),
    }[kind, dtype]
    np.testing.assert_allclose(actual, desired, rtol=rtol, atol=atol)
