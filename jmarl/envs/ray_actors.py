"""Workers that are actors of Ray: on this machine, or on all machines of a cluster."""

import collections
import contextlib
import logging
import os
import pickle
import signal
import socket
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jmarl.envs.workers import Lost, Serving

INSTALL = 'pip install "jmarl[ray]"'
_CONNECT_S = 10.0


class Cluster:
    """The cluster of Ray that this process belongs to: makes workers on its machines.

    It is the one that `ray.init` was told of, or that of the environment variable RAY_ADDRESS, or the one that runs on
    this machine. If there is none, Ray begins on this machine, and ends with this process. An address is no option of
    an environment: it says where a run is computed, and someone else's run must not say whom this machine listens to.
    """

    def __init__(self) -> None:
        _connect()
        self._load: collections.Counter[str] = collections.Counter()  # of each machine: workers begun, and lost

    def start(self, make: bytes) -> "Actor":
        """A worker on the machine with the fewest for its CPUs; on none that offers no CPU, while others do."""
        import ray

        alive = [node for node in ray.nodes() if node["Alive"]]
        offering = [node for node in alive if node["Resources"].get("CPU")] or alive
        place = min(offering, key=lambda node: (self._load[node["NodeID"]] + 1) / node["Resources"].get("CPU", 1.0))
        self._load[place["NodeID"]] += 1
        return Actor(make, place["NodeID"], place["NodeManagerAddress"], self._load)


def _connect() -> None:
    try:
        import ray
    except ImportError as error:
        raise ImportError(f"on='ray' needs Ray: {INSTALL}.") from error
    if ray.is_initialized():
        return
    given = os.environ.get("RAY_ADDRESS")
    try:
        if given and given not in ("auto", "local"):
            _require_answer(given)
        address = None if given else "auto" if _runs_here() else "local"
        with _sigterm_kept(), warnings.catch_warnings():
            # Jax warns of forks, and these here begin programs that know nothing of jax.
            warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
            # Its words are for those who look after the cluster. A worker's traceback is shown by jmarl, once.
            ray.init(address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        where = f"at RAY_ADDRESS={given}" if given else "here"
        raise ValueError(
            f"on='ray': Ray finds no cluster {where} that this machine belongs to. `ray start --head` begins one and "
            f"tells its address, HOST:PORT; `ray start --address=HOST:PORT` joins it."
        ) from error
    _silence(ray)


def _runs_here() -> bool:
    """The cluster to which this machine was joined last is still there: Ray would wait for it some minutes, too."""
    try:
        _require_answer(Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster").read_text().strip())
    except (OSError, ValueError):
        return False
    return True


def _require_answer(address: str) -> None:
    """Raises where nobody listens, for which Ray would wait some minutes."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()


class PickledServing(Serving):
    """`Serving` in bytes: of many small arrays Ray makes a buffer each, which takes twice as long as all the rest."""

    def reply(self, question: bytes) -> bytes:
        """See `Serving.answer`."""
        return pickle.dumps(self.answer(*pickle.loads(question)))


class Actor:
    """An actor with `PickledServing`: a `workers.Worker`.

    Args:
      make: makes an environment, pickled.
      node: the id that Ray has for the machine.
      host: its address.
      load: of machines by id, to which it adds when it dies, so that others come first.
    """

    def __init__(self, make: bytes, node: str, host: str, load: collections.Counter[str]):
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # No CPU is set aside: those of training and of evaluation take turns, and some may have to move together.
        options = {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}
        self._actor: Any = ray.remote(PickledServing).options(**options).remote(make)
        self._node, self._host, self._load = node, host, load
        self._answer: Any = None

    def send(self, question: tuple[Any, ...]) -> None:
        self._answer = self._actor.reply.remote(pickle.dumps(question))

    def receive(self, timeout_s: float) -> tuple[bool, Any]:
        import ray

        try:
            return pickle.loads(ray.get(self._answer, timeout=timeout_s))
        except ray.exceptions.GetTimeoutError:
            raise Lost(f"on {self._host} has not answered for {timeout_s:g} seconds") from None
        except ray.exceptions.RayError:
            self._load[self._node] += 1
            raise Lost(f"on {self._host} has died") from None

    def end(self) -> None:
        import ray

        if ray.is_initialized():  # or else it is gone, and `kill` would begin a cluster
            ray.kill(self._actor)


@contextlib.contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Ray has SIGTERM handled in place of one that handles it already, and prints a stack where nobody does."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if is_main:
            is_handled = callable(before)
            signal.signal(signal.SIGTERM, before if is_handled else signal.getsignal(signal.SIGTERM))


def _silence(ray: Any) -> None:
    """Ray prints a paragraph about each worker that dies, whatever `log_to_driver` says; jmarl says it in a line."""
    if hasattr(ray._private.worker, "print_to_stdstream"):
        ray._private.worker.print_to_stdstream = lambda *_, **__: None
