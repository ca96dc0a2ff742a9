"""What a trained policy is handed on as: parameters in safetensors, or a `jax.export` artefact that acts by itself.

The artefact is one file: the greedy policy of one seed with its parameters, compiled for CPU, GPU or TPU where it is
used. Plain jax runs it, without jmarl, for any number of environments side by side:

    policy = jax.export.deserialize(open("policy.jax", "rb").read())
    (carry, obs, first), _ = jax.tree.unflatten(policy.in_tree, policy.in_avals)  # what it wants: shapes and dtypes
    action, carry = policy.call(carry, obs, first)

`obs` is a dict of those arrays of an `Observation` that the policy reads: "agents" and, where some actions may be
illegal, "action_mask"; what only critics read is not among them. `carry` is what the policy remembers, a dict of arrays
too, and zeros serve where an episode begins: `first` resets them. `load_policy` is the same with more convenience.

jax promises to read an artefact for six months after the version that wrote it; parameters last for ever.
"""

import contextlib
import functools
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export as jax_export

from jmarl import checkpoint, files
from jmarl.training import where_last
from jmarl.types import Action, Carry, EnvSpec, Learner, RunState, zero_observation

__all__ = ["Policy", "export_policy", "load_parameters", "load_policy", "save_parameters"]

_PLATFORMS = ("cpu", "cuda", "tpu")
_CHECKSUM = "jmarl.crc32"
# Behind the artefact, where jax does not look: these bytes, and the checksum of all before them.
_FOOTER = b"jmarl.crc32:"
_NAME = "jmarl_policy"  # of the function in an artefact that has a footer
_INSTALL = 'pip install "jmarl[export]"'


# ---------------------------------------------------------------------------------------------------- parameters


def save_parameters(params: Any, path: str | os.PathLike[str]) -> None:
    """Writes one array per parameter, named after its place in the tree, such as `actor/Dense_0/kernel`.

    Args:
      params: a tree of arrays; seeds come first where there are several.
      path: the file; one that exists is replaced.
    """
    leaves = _by_name(params)
    arrays = {name: np.asarray(leaf, order="C") for name, leaf in leaves.items()}
    data = _safetensors().save(arrays, {_CHECKSUM: _checksum(arrays)})
    files.replace(files.absolute(path), [data])


def load_parameters(path: str | os.PathLike[str], like: Any) -> Any:
    """Reads what `save_parameters` wrote, after every leaf was found to have the shape and dtype of `like`.

    Args:
      path: the file.
      like: a tree of arrays or of `jax.ShapeDtypeStruct`, such as `jax.eval_shape(learner.init, key).params`.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "params.safetensors"
    >>> save_parameters({"actor": {"bias": jnp.arange(3.0)}}, path)
    >>> load_parameters(path, {"actor": {"bias": jnp.zeros(3)}})
    {'actor': {'bias': Array([0., 1., 2.], dtype=float32)}}
    >>> load_parameters(path, {"actor": {"bias": jnp.zeros(4)}})
    Traceback (most recent call last):
    ValueError: actor/bias is float32 [3] in params.safetensors, but float32 [4] is expected here.
    """
    path, wanted = Path(path), _by_name(like)
    data, safetensors = path.read_bytes(), _safetensors()
    try:
        arrays = safetensors.load_file(path)  # its load does not know bfloat16
        # A length, then a header in JSON.
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        checksum = header.get("__metadata__", {}).get(_CHECKSUM)
    except Exception as error:  # its own type, and others for headers and dtypes that it does not know
        raise ValueError(f"{path.name} is damaged, or no file of safetensors: {error}.") from error
    if checksum is not None and checksum != _checksum(arrays):  # files of earlier versions have none
        raise ValueError(f"{path.name} is damaged: its parameters are not those that were saved.")
    for name in [*wanted, *arrays]:
        if name not in arrays:
            raise ValueError(f"{name} is expected here, but is not in {path.name}: it is of another network.")
        if name not in wanted:
            raise ValueError(f"{name} is in {path.name}, but not expected here: it is of another network.")
        if _kind(arrays[name]) != _kind(wanted[name]):
            raise ValueError(
                f"{name} is {_kind(arrays[name])} in {path.name}, but {_kind(wanted[name])} is expected here."
            )
    return jax.tree.unflatten(jax.tree.structure(like), [jnp.asarray(arrays[name]) for name in wanted])


def _safetensors() -> Any:
    try:
        from safetensors import numpy
    except ImportError as error:
        raise ImportError(f"Files of parameters need safetensors: {_INSTALL}.") from error
    return numpy


def _checksum(arrays: Mapping[str, np.ndarray]) -> str:
    """Of names, kinds and contents."""
    crc32 = 0
    for name in sorted(arrays):
        x = arrays[name]
        crc32 = zlib.crc32(f"{name} {_kind(x)} ".encode(), crc32)
        crc32 = zlib.crc32(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data, crc32) if x.size else crc32
    return f"{crc32:08x}"


def _by_name(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    by_name = {jax.tree_util.keystr(place, simple=True, separator="/") or "array": leaf for place, leaf in leaves}
    if len(by_name) < len(leaves):
        raise ValueError("Two parameters have the same name: no key of the tree may hold a /.")
    return by_name


def _kind(x: Any) -> str:
    return f"{x.dtype} {list(x.shape)}"


# ------------------------------------------------------------------------------------------------------ policies


class Policy(NamedTuple):
    """A policy from a file.

    Attributes:
      greedy: `(carry, obs, first) -> (action, carry)`, with leading axis `[B]`. `obs` is an `Observation`, or a mapping
        with at least those of its arrays that are in `reads`. It may be jitted, scanned and vmapped.
      init_carry: `(batch_shape) -> carry`, as that of a `Learner`.
      reads: names of the arrays of an observation on which actions depend.
      batch_size: B if the policy is for a fixed one; None for any.
    """

    greedy: Callable[[Carry, Any, Any], tuple[Action, Carry]]
    init_carry: Callable[[tuple[int, ...]], Carry]
    reads: tuple[str, ...]
    batch_size: int | None


def export_policy(
    learner: Learner,
    state: Any,
    spec: EnvSpec,
    path: str | os.PathLike[str],
    batch_size: int | None = None,
    *,
    seed: int | None = None,
) -> None:
    """Writes the greedy policy of one seed into a file that needs neither the learner nor jmarl: see this module.

    Only what actions depend on becomes part of it: critics, and the global state where nobody but a critic reads it,
    are left out.

    Args:
      learner: whose `greedy` is meant.
      state: what was learnt, a `TrainState`, or the `RunState` that `run` returns.
      spec: the environment's, for the shapes of its observations.
      path: the file; one that exists is replaced.
      batch_size: environments side by side; None: any number, if the networks leave that open. Those of jmarl do.
      seed: which one, where `state` has several.

    >>> import tempfile
    >>> from jmarl import PPOConfig, envs, mappo
    >>> env = envs.matrix_game([[8.0, -12.0], [-12.0, 0.0]])
    >>> learner = mappo(env.spec, PPOConfig(hidden_sizes=(8,), recurrent=True, cell_size=4))
    >>> state, path = learner.init(jax.random.key(0)), Path(tempfile.mkdtemp()) / "policy.jax"
    >>> export_policy(learner, state, env.spec, path)
    >>> policy = load_policy(path)
    >>> obs = {"agents": jnp.ones((5, 2, 1)), "action_mask": jnp.ones((5, 2, 2), bool)}
    >>> action, carry = policy.greedy(policy.init_carry((5,)), obs, jnp.ones(5, bool))
    >>> policy.reads, action.shape
    (('action_mask', 'agents'), (5, 2))
    """
    _require_flatbuffers()
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1, or None for any number of environments.")
    state = _one_seed(learner, state.train_state if isinstance(state, RunState) else state, seed)
    examples = state, learner.init_carry((1,)), zero_observation(spec, (1,))
    arrays, carry, obs = (_by_name(example) for example in examples)
    keys = {name: x for name, x in arrays.items() if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)}

    def policy(arrays, carry, obs, first, remembered):
        """Arrays of the state, of the carry and of the observation by name; those that are not given are zeros."""
        num = first.shape[0]
        start = jax.tree.map(lambda x: jnp.broadcast_to(x, (num, *x.shape[1:])), examples[1])
        old = where_last(first, start, _completed(start, carry, num))
        seen = _completed(examples[2], obs, num)
        action, new = learner.greedy(_completed(state, keys | arrays), old, seen, first)
        return action, {name: x for name, x in _by_name(new).items() if name in remembered}

    def shapes(tree, num):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((num, *x.shape[1:]), x.dtype), tree)

    # What actions depend on, then what that depends on, and so on. With a batch size, since jax looks at no other case.
    probe = {name: x for name, x in arrays.items() if name not in keys}, *shapes((carry, obs, jnp.ones(1, bool)), 2)
    remembered: set[str] | None = None
    reads: list[set[str]] = [set()] * 3
    while reads[1] != remembered:
        remembered = reads[1]
        reads = _reads(jax_export.export(jax.jit(functools.partial(policy, remembered=remembered)))(*probe))
    arrays, carry, obs = (
        {name: x for name, x in tree.items() if name in read}
        for tree, read in zip((arrays, carry, obs), reads, strict=True)
    )
    num = jax_export.symbolic_shape("batch")[0] if batch_size is None else batch_size
    baked = functools.partial(policy, arrays, remembered=remembered)
    baked.__name__ = _NAME  # type: ignore[attr-defined]
    try:
        with _without_paths():
            exported = jax_export.export(jax.jit(baked), platforms=_PLATFORMS)(
                *shapes((carry, obs, jnp.ones(1, bool)), num)
            )
    except Exception as error:  # jax raises many kinds where a number is asked for
        if batch_size is not None:
            raise
        raise ValueError("These networks want to know the number of environments: give a batch_size.") from error
    data = bytes(exported.serialize()) + _FOOTER
    files.replace(files.absolute(path), [data, zlib.crc32(data).to_bytes(4, "little")])


@contextlib.contextmanager
def _without_paths() -> Iterator[None]:
    """Programs do not say where their source is: that is of no use elsewhere, and nobody's business."""
    limit = jax.config.jax_traceback_in_locations_limit  # type: ignore[attr-defined]
    jax.config.update("jax_traceback_in_locations_limit", 0)
    try:
        yield
    finally:
        jax.config.update("jax_traceback_in_locations_limit", limit)


def load_policy(path: str | os.PathLike[str]) -> Policy:
    """Reads what `export_policy` wrote. Example there."""
    _require_flatbuffers()
    data = Path(path).read_bytes()
    has_footer = data[:-4].endswith(_FOOTER)
    is_whole = (
        zlib.crc32(data[:-4]) == int.from_bytes(data[-4:], "little") if has_footer else _NAME.encode() not in data
    )
    if not is_whole:  # before jax reads it, which damaged ones may end
        raise ValueError(f"{path} is damaged: it is not what was exported.")
    try:
        exported = jax_export.deserialize(bytearray(data))
        (carry, obs, first), _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
        reads, num = tuple(obs), first.shape[0]
    except OSError:
        raise
    except Exception as error:  # flatbuffers and jax raise many kinds
        raise ValueError(f"{path} is damaged, or no policy that this version of jax can read.") from error

    def greedy(carry, obs, first):
        given = obs if isinstance(obs, Mapping) else vars(obs)
        return exported.call(carry, {name: given[name] for name in reads}, first)

    def init_carry(batch_shape):
        return jax.tree.map(lambda x: jnp.zeros((*batch_shape, *x.shape[1:]), x.dtype), carry)

    return Policy(greedy, init_carry, reads, num if isinstance(num, int) else None)


def _reads(exported: Any) -> list[set[str]]:
    """For each of its dicts of arrays, the names of those that its results depend on."""
    places, _ = jax.tree.unflatten(exported.in_tree, range(len(exported.in_avals)))
    kept = set(exported.module_kept_var_idx)
    return [{name for name, place in names.items() if place in kept} for names in places if isinstance(names, dict)]


def _completed(tree: Any, arrays: Mapping[str, Any], num: Any = None) -> Any:
    """The tree with these arrays, and zeros for those that are missing; `num` is the length of their first axis."""
    leaves = []
    for name, x in _by_name(tree).items():
        shape = x.shape if num is None else (num, *x.shape[1:])
        leaves.append(arrays[name] if name in arrays else jnp.zeros(shape, x.dtype))
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def _one_seed(learner: Learner, state: Any, seed: int | None) -> Any:
    """The state of one seed, after every leaf was found to be as the learner makes it."""
    example = jax.eval_shape(learner.init, jax.random.key(0))
    if getattr(state, "env_steps", None) is not None:  # somebody counted since
        example = example.replace(env_steps=jax.ShapeDtypeStruct((), jnp.int32))
    wanted = _by_name(example)
    num_seeds = {len(x) for name, x in _by_name(state).items() if name in wanted and x.ndim == wanted[name].ndim + 1}
    if len(num_seeds) == 1:
        num = num_seeds.pop()
        if seed is None and num > 1:
            raise ValueError(f"The state is of {num} seeds, and a policy of one: give a seed, 0 to {num - 1}.")
        state = checkpoint.take_seed(state, seed or 0)
    elif seed not in (None, 0):
        raise ValueError(f"seed={seed}, but the state is of one seed: leave it out.")
    has = _by_name(state)
    for name in [*wanted, *has]:
        if name not in has or name not in wanted or _kind(has[name]) != _kind(wanted[name]):
            kinds = [_kind(leaves[name]) if name in leaves else "nothing" for leaves in (has, wanted)]
            raise ValueError(f"{name} is {kinds[0]} in the state, but the learner makes {kinds[1]}: it is of another.")
    return state


def _require_flatbuffers() -> None:
    try:
        import flatbuffers  # noqa: F401
    except ImportError as error:
        raise ImportError(f"Files of policies need flatbuffers: {_INSTALL}.") from error
