"""Workers that are actors of Ray: on this machine, or on all machines of a cluster."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

from jmarl.envs.workers import Lost, Serving

INSTALL = 'pip install "jmarl[ray]"'


def connect(address: str | None) -> None:
    """Connects this process to a cluster, once.

    Args:
      address: "HOST:PORT" as `ray start --head` tells it. None: of the environment variable RAY_ADDRESS, or else of the
        cluster that runs on this machine, or else Ray is started here, and ends with this process.
    """
    try:
        import ray
    except ImportError as error:
        raise ImportError(f"on='ray' needs Ray: {INSTALL}.") from error
    if not ray.is_initialized():
        try:
            with _handler_kept():
                # Its words are for those who look after the cluster. A worker's traceback is shown by jmarl, once.
                ray.init(address, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError) as error:
            where = "on='ray'" if address is None else f"on='ray:{address}'"
            raise ConnectionError(
                f"{where}: Ray finds no cluster there that this machine belongs to. `ray start --head` begins one and "
                f"tells its address, `ray start --address=ADDRESS` joins it."
            ) from error
        _silence(ray)
    elif address not in (None, known := ray.get_runtime_context().gcs_address):
        raise ValueError(f"on='ray:{address}', but this process belongs to the cluster at {known} already.")
    if not ray.cluster_resources().get("CPU"):
        raise ValueError("on='ray': no machine of the cluster offers CPUs: add one with `ray start --address=ADDRESS`.")


class Actor:
    """An actor with `Serving`: a `workers.Worker`. Ray begins them on one machine after the other."""

    def __init__(self, make: bytes):
        import ray

        # An actor of which nothing is said needs an idle CPU to begin, and none afterwards: so others begin in place
        # of those of a machine that is gone, and those of training and of evaluation, which take turns, share CPUs.
        self._actor = ray.remote(Serving).options(scheduling_strategy="SPREAD").remote(make)
        self._answer: Any = None

    def send(self, question: tuple[Any, ...]) -> None:
        self._answer = self._actor.answer.remote(*question)

    def receive(self, timeout_s: float) -> tuple[bool, Any]:
        import ray

        try:
            return ray.get(self._answer, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise Lost(f"has not answered for {timeout_s:g} seconds") from None
        except ray.exceptions.RayError:
            raise Lost("has died") from None

    def end(self) -> None:
        import ray

        if ray.is_initialized():  # or else it is gone, and `kill` would begin a cluster
            ray.kill(self._actor)


@contextlib.contextmanager
def _handler_kept() -> Iterator[None]:
    """Ray puts a handler of SIGTERM in place of one that is there."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if is_main and before not in (signal.SIG_DFL, None):
            signal.signal(signal.SIGTERM, before)


def _silence(ray: Any) -> None:
    """Ray prints a paragraph about each worker that dies, whatever `log_to_driver` says; jmarl says it in a line."""
    if hasattr(ray._private.worker, "print_to_stdstream"):
        ray._private.worker.print_to_stdstream = lambda *_, **__: None
