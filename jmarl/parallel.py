"""Where a run is computed: its rows (one for each seed of each setting) over devices, in pieces, by several processes.

Rows have nothing to say to each other, so each device computes its own without communication, and each process those of
its own devices. Results are those of one device to float rounding: with fewer rows on a device, XLA may add in another
order.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from jmarl.types import Mixer, Network, Policy, RunState

__all__ = ["averaged", "common", "gather", "summed", "use_cores"]


def use_cores(num: int | None = None) -> int:
    """Makes each core of a CPU a device, so that `run` spreads its seeds over them. Before anything else uses jax.

    Args:
      num: how many; by default the cores that this process may use.

    Returns:
      How many there are now.
    """
    if num is None:
        num = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if num < 1:
        raise ValueError(f"num={num} must be at least 1.")
    with contextlib.suppress(RuntimeError):  # jax has started; maybe with this very number
        jax.config.update("jax_num_cpu_devices", num)
    if len(jax.local_devices(backend="cpu")) != num:
        raise RuntimeError(
            f"use_cores must come before the first use of jax in a process: it has "
            f"{len(jax.local_devices(backend='cpu'))} CPU devices already, not {num}."
        )
    return num


def gather(tree: Any) -> Any:
    """Joins the rows of all processes, in their order: every process gets them all. A lone process has them already."""
    if jax.process_count() == 1:
        return tree

    def join(x):
        if isinstance(x, jax.Array) and not x.is_fully_addressable:  # its rows are those of all processes
            return _whole(x)
        mine = np.asarray(x)
        if not mine.size:
            return np.zeros((mine.shape[0] * jax.process_count(), *mine.shape[1:]), mine.dtype)
        return np.concatenate(multihost_utils.process_allgather(mine))

    # Leaf by leaf: no device has to hold more than one of them.
    return jax.tree.map(lambda x: _with_key_data(join, x), tree)


def _with_key_data(function: Callable, x: Any) -> Any:
    """`function(x)`; of keys, the keys whose data it makes of theirs."""
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return function(x)
    return jax.random.wrap_key_data(jnp.asarray(function(jax.random.key_data(x))), impl=jax.random.key_impl(x))


def _whole(x: Any) -> Any:
    """On this process, of an array without keys that several have together."""
    is_here = not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated
    return np.asarray(x) if is_here else np.asarray(multihost_utils.process_allgather(x, tiled=True))


def _spread(x: Any, sharding: NamedSharding) -> Any:
    """Over devices of all processes, each of which has it as a whole; `jax.device_put` knows no others' devices."""
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return x
    whole = np.asarray(x)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def is_first_process() -> bool:
    """The one that writes files."""
    return jax.process_index() == 0


def say(sentence: str) -> None:
    """Once, not once for each process."""
    if is_first_process():
        print(sentence)


def wait_for_all(name: str) -> None:
    """Returns once every process is here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def choose_devices(
    devices: int | Sequence[jax.Device] | None,
    num_rows: int,
    shard: str,
    num_envs: Callable[[], int],
    num_parts: int | None = None,
) -> list[jax.Device]:
    """This process's devices for `num_rows` rows of all processes; see `jmarl.run`.

    `num_envs` is called only where it matters: to know it, an environment has to be traced.
    """
    if shard not in ("seeds", "envs", "parts"):
        raise ValueError(f"shard={shard!r} is not known: choose 'seeds', 'envs' or 'parts'.")
    if shard == "parts" and num_parts is None:
        raise ValueError("shard='parts' needs a loop that has some: jmarl.data_parallel(loop, num_parts), or --parts.")
    num_processes, local = jax.process_count(), jax.local_devices()
    if isinstance(devices, int) and not 1 <= devices <= len(local):
        raise ValueError(f"devices={devices}, but there are {len(local)}: choose 1 to {len(local)}.")
    if not isinstance(devices, int | None) and not devices:
        raise ValueError("devices=[] names no device: name at least one, or None for all that can share the work.")
    if shard == "parts":
        return _devices_for_parts(devices, num_parts or 1)
    if num_rows % num_processes:
        raise ValueError(f"{num_rows} seeds cannot be shared equally by {num_processes} processes: choose a multiple.")
    rows = num_rows // num_processes
    if devices is None:
        num_shared = num_envs() if shard == "envs" and len(local) > 1 else rows
        return local[: max(n for n in range(1, len(local) + 1) if num_shared % n == 0)]
    chosen = local[:devices] if isinstance(devices, int) else list(devices)
    if shard == "seeds" and rows % len(chosen):
        raise ValueError(
            f"{rows} seeds cannot be shared equally by {len(chosen)} devices: choose a multiple, or fewer devices."
        )
    return chosen


def _devices_for_parts(devices: int | Sequence[jax.Device] | None, num_parts: int) -> list[jax.Device]:
    """Of all processes, equally many of each."""
    num_processes = jax.process_count()
    if num_parts % num_processes:
        raise ValueError(f"{num_parts} parts cannot be shared equally by {num_processes} processes: choose a multiple.")
    if devices is None:
        numbers = range(1, jax.local_device_count() + 1)
        devices = max(n for n in numbers if num_parts % (n * num_processes) == 0)
    if isinstance(devices, int):
        everywhere = [[x for x in jax.devices() if x.process_index == i] for i in range(num_processes)]
        devices = [x for of_process in everywhere for x in of_process[:devices]]
    if num_parts % (num := len(devices)):
        raise ValueError(f"{num_parts} parts cannot be shared equally by {num} devices: choose a multiple, or fewer.")
    return list(devices)


class Placement:
    """What lies on which device. `shard` names the axis that is cut: of seeds, of environments, or of a run's parts."""

    def __init__(self, devices: Sequence[jax.Device], shard: str = "seeds"):
        self.devices, self.shard = devices, shard
        self.mesh = jax.sharding.Mesh(np.array(devices), (shard,))  # automatic axes: jitted environments need them
        everywhere, rows = PartitionSpec(), PartitionSpec(shard)
        if shard == "seeds":
            self.everywhere, self.rows, self.state = everywhere, rows, rows  # type: Any, Any, Any
        else:  # the learner is on every device
            envs: Any = PartitionSpec(None, shard)
            self.everywhere, self.rows = everywhere, everywhere
            self.state = RunState(
                train_state=everywhere,  # type: ignore[arg-type]
                env_state=envs,
                obs=envs,
                first=envs,
                carry=envs,
                buffer=everywhere if shard == "envs" else envs,
                episodes=envs,
                key=everywhere,  # type: ignore[arg-type]
            )

    @property
    def num_processes_of_rows(self) -> int:
        """How many processes share the rows: of one row they share the parts."""
        return 1 if self.shard == "parts" else jax.process_count()

    def mine(self, tree: Any) -> Any:
        """This process's rows out of those of all processes."""
        num, i = self.num_processes_of_rows, jax.process_index()
        return tree if num == 1 else jax.tree.map(lambda x: x[i * len(x) // num : (i + 1) * len(x) // num], tree)

    def gather(self, tree: Any) -> Any:
        """The inverse: on every process, all rows as a whole."""
        if self.shard == "parts" and jax.process_count() > 1:
            return jax.tree.map(lambda x: _with_key_data(_whole, x), tree)
        return gather(tree)

    def require_shareable(self, num_envs: int) -> None:
        """Refuses environments that the devices cannot share equally."""
        if self.shard == "envs" and num_envs % len(self.devices):
            raise ValueError(
                f"num_envs={num_envs} cannot be shared equally by {len(self.devices)} devices: choose a multiple."
            )

    def jit(self, function: Callable, in_specs: tuple, out_specs: Any, **options: Any) -> Any:
        """A batched function with every argument and result in its place."""
        if self.shard != "envs" and len(self.devices) > 1:
            function = jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        elif len(self.devices) > 1:
            function = _in_sight_of(self.mesh, function)
        shardings = self._shardings((in_specs, out_specs))
        return jax.jit(function, in_shardings=shardings[0], out_shardings=shardings[1], **options)

    def put(self, tree: Any, specs: Any) -> Any:
        """Onto the devices."""
        shardings = self._shardings(specs)
        if self.shard == "parts" and jax.process_count() > 1:

            def place(sharding, part):
                return jax.tree.map(lambda x: _with_key_data(lambda data: _spread(data, sharding), x), part)

            return jax.tree.map(place, shardings, tree)
        return jax.device_put(tree, shardings)

    def _shardings(self, specs: Any) -> Any:
        is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=is_spec)


# ---------------------------------------------------------------------------------- one learner, several parts
#
# The parts of a run (`jmarl.data_parallel`) act, remember and learn by themselves, side by side on a device and on
# several. What they learn is the same: here are the few numbers on which they agree. Elsewhere all this does nothing.

_PARTS, _PARTS_OF_A_DEVICE = "parts", "parts_of_a_device"


def _axes_of_parts() -> tuple[str, ...]:
    return tuple(name for name in (_PARTS, _PARTS_OF_A_DEVICE) if _axis_size(name) is not None)


def side_by_side(function: Callable, out_axes: Any) -> Callable:
    """`function`, of each part on this device: arguments have an axis of parts in front, and results where said.

    A result without that axis is one on which the parts agree, or tracing fails.
    """
    return jax.vmap(function, out_axes=out_axes, axis_name=_PARTS_OF_A_DEVICE)


def of_device(tree: Any) -> Any:
    """Of rows for all parts, those for the parts on this device."""
    num = _axis_size(_PARTS)
    if num is None:
        return tree
    i = jax.lax.axis_index(_PARTS)

    def rows(x):
        return jax.lax.dynamic_slice_in_dim(x, i * (len(x) // num), len(x) // num)

    return jax.tree.map(rows, tree)


def summed(tree: Any) -> Any:
    """The sum over a run's parts."""
    axes = _axes_of_parts()
    return jax.lax.psum(tree, axes) if axes else tree


def averaged(tree: Any) -> Any:
    """The mean over a run's parts, of all arrays in one go."""
    axes = _axes_of_parts()
    if not axes:
        return tree
    flat, unravel = ravel_pytree(tree)
    return unravel(jax.lax.pmean(flat, axes))


def common(key: Array) -> Array:
    """A key that all of a run's parts have: the first one's."""
    axes = _axes_of_parts()
    if not axes:
        return key
    is_first = sum(jax.lax.axis_index(name) for name in axes) == 0
    return _with_key_data(lambda data: jax.lax.psum(jnp.where(is_first, data, 0), axes), key)


# ------------------------------------------------------------------------------- one learner on several devices
#
# Devices that share the environments of a run have its learner, and what it learns from, each as a whole. What costs
# time, the networks, they compute `together`: each a part of the batch. Nothing else changes, so the numbers are those
# of one device for every algorithm. Collectives take long to meet, not to talk: all arrays of a kind go in one.

_ENVS = "envs"


def _in_sight_of(mesh: jax.sharding.Mesh, function: Callable) -> Callable:
    """`function`, in which `together` finds the mesh."""

    def traced(*args):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*args)

    return traced


def together(function: Callable, in_axes: Sequence[Any]) -> Callable:
    """`function`, in which devices that share environments may `split_batch`.

    Args:
      function: of arrays that are whole on every device; so are its results.
      in_axes: where the environments are in each argument, as for `jax.vmap`: these parts are joined first.
    """

    def computed(*args):
        if _ENVS not in jax.sharding.get_abstract_mesh().axis_names:
            return function(*args)
        whole = PartitionSpec()
        specs = jax.tree.map(
            lambda axis: whole if axis is None else PartitionSpec(*[None] * axis, _ENVS), in_axes, is_leaf=_is_none
        )
        return jax.shard_map(
            lambda *args: function(*_joined(args, in_axes)), in_specs=specs, out_specs=whole, check_vma=False
        )(*args)

    return computed


def split_batch(function: Callable, in_axes: Sequence[Any], out_axes: Any) -> Callable:
    """`function(params, *args)`, whose batch devices that compute `together` share; elsewhere `function` itself.

    Args:
      function: independent along the batch.
      in_axes: where that is in each of `args`, as for `jax.vmap`.
      out_axes: where it is in the result.
    """

    def computed(params, *args):
        num = _num_together()
        if num == 1 or jax.tree.leaves(args[-1])[0].shape[in_axes[-1]] % num:
            return function(params, *args)
        flat, unravel = ravel_pytree(params)  # for one sum over devices, of all gradients

        def forward(flat, args):
            mine = _parts(args, in_axes)
            out, pullback = jax.vjp(lambda flat, mine: function(unravel(flat), *mine), flat, mine)
            return _joined(out, out_axes), pullback

        def backward(pullback, gradient):
            flat, mine = pullback(_parts(gradient, out_axes))
            return jax.lax.psum(flat, _ENVS), _joined(mine, in_axes)

        shared = jax.custom_vjp(lambda flat, args: forward(flat, args)[0])
        shared.defvjp(forward, backward)
        return shared(flat, args)

    return computed


def split_networks(nets: Any) -> Any:
    """A bundle of networks whose batches are shared by devices that compute `together`.

    This is the one place where networks meet devices: learners pass all of theirs through it, a user's own as well.

    Args:
      nets: a `Network`, `Policy` or `Mixer`, or a NamedTuple of such.
    """
    if isinstance(nets, Network):
        return nets._replace(apply=split_batch(nets.apply, (0, 1, 1), (0, nets.batch_axis)))
    if isinstance(nets, Policy):
        return nets._replace(evaluate=split_batch(nets.evaluate, (0, 1, 1, 1), (1, 1, 1)))
    if isinstance(nets, Mixer):
        return nets._replace(apply=split_batch(nets.apply, (1, 1, 1), 1))
    if isinstance(nets, tuple) and hasattr(nets, "_fields"):
        return type(nets)(*map(split_networks, nets))
    return nets


def _num_together() -> int:
    return _axis_size(_ENVS) or 1


def _axis_size(name: str) -> int | None:
    try:
        return jax.lax.axis_size(name)
    except NameError:  # nothing is computed along it here
        return None


def _parts(tree: Any, axes: Any) -> Any:
    """This device's part of each array along its axis."""
    num, i = _num_together(), jax.lax.axis_index(_ENVS)

    def part(x, axis):
        size = x.shape[axis] // num
        return jax.lax.dynamic_slice_in_dim(x, i * size, size, axis)

    return jax.tree.map(lambda axis, x: jax.tree.map(lambda leaf: part(leaf, axis), x), axes, tree)


def _joined(tree: Any, axes: Any) -> Any:
    """The inverse of `_parts`, on every device; what has the axis None is whole already."""
    leaves, treedef = jax.tree.flatten(tree)
    axes = jax.tree.map(lambda axis, x: [axis] * len(jax.tree.leaves(x)), axes, tree, is_leaf=_is_none)
    axes = jax.tree.leaves(axes, is_leaf=_is_none)
    kinds: dict[Any, list[int]] = {}
    for i, x in enumerate(leaves):
        if axes[i] is not None:
            kinds.setdefault(x.dtype, []).append(i)
    for kind, places in kinds.items():
        parts = [leaves[i] for i in places]
        if kind == jax.dtypes.float0:  # gradients of integers: nothing to say
            stacked: list[Any] = [np.zeros((_num_together(), *x.shape), kind) for x in parts]
        else:
            flat = jax.lax.all_gather(jnp.concatenate([x.ravel() for x in parts]), _ENVS)
            ends = np.cumsum([x.size for x in parts])[:-1]
            stacked = [x.reshape(-1, *part.shape) for x, part in zip(jnp.split(flat, ends, axis=1), parts, strict=True)]
        for i, x in zip(places, stacked, strict=True):
            module: Any = np if kind == jax.dtypes.float0 else jnp
            x = module.moveaxis(x, 0, axes[i])
            leaves[i] = x.reshape(*x.shape[: axes[i]], -1, *x.shape[axes[i] + 2 :])
    return jax.tree.unflatten(treedef, leaves)


def _is_none(x: Any) -> bool:
    return x is None


def to_host(tree: Any) -> Any:
    """Into the host's memory, where rows wait for their turn."""
    return jax.device_put(tree, jax.local_devices(backend="cpu")[0])


def memory_of(devices: Sequence[jax.Device]) -> float:
    """Bytes that each of these has; infinite where it is not known. CPU devices share the machine's."""
    here = [device for device in devices if device.process_index == jax.process_index()]
    stats = here[0].memory_stats() or {}  # None on a CPU
    return float(stats["bytes_limit"]) if "bytes_limit" in stats else memory_of_machine() / len(here)


def memory_of_machine(root: Path = Path("/")) -> float:
    """Bytes that this process may use: the machine's, or less in a container; infinite where the system does not say.

    Args:
      root: of the file system, where Linux keeps the limits of a container's groups.
    """
    try:
        machine = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):  # not on every system
        machine = float("inf")
    return min([machine, *_limits_of_groups(root)])


def _limits_of_groups(root: Path) -> Iterator[float]:
    """Bytes that each of this process's control groups allows; a group is limited by those around it, too."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    # "0::/a/b" in version 2, "4:cpu,memory:/a/b" in version 1; in a container both may be seen from within as "/".
    groups = {"": PurePosixPath("/"), "memory": PurePosixPath("/")}
    groups |= {
        kind: PurePosixPath(path) for _, kinds, path in (x.split(":", 2) for x in lines) for kind in kinds.split(",")
    }
    versions = (("", "sys/fs/cgroup", "memory.max"), ("memory", "sys/fs/cgroup/memory", "memory.limit_in_bytes"))
    for kind, mounted, file in versions:
        for group in (groups[kind], *groups[kind].parents):
            with contextlib.suppress(OSError, ValueError):  # no such group, or "max"
                yield float(int((root / mounted / str(group).lstrip("/") / file).read_text()))


def memory_needed(compiled: Any) -> int:
    """Bytes on each device for the arguments, results and intermediate values of a compiled function."""
    memory = compiled.memory_analysis()
    if memory is None:
        return 0
    used = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return used - memory.alias_size_in_bytes


def agree(*flags: bool) -> list[bool]:
    """Each flag, or whether any process has it."""
    if jax.process_count() == 1:
        return list(flags)
    return [bool(x) for x in np.any(multihost_utils.process_allgather(np.array(flags)).reshape(-1, len(flags)), axis=0)]
