"""A Ray to run on: one that is there, one at an address, or a local one that starts and ends with the run."""

import contextlib
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardopt.core.errors import complaint

_SECONDS = 5.0
"""How long an address may take to answer; Ray itself would try for minutes."""


@contextmanager
def cluster(who: str, address: str | None, num_workers: int) -> Iterator[Any]:
    """Return the module `ray`, connected.

    Raises:
      ImportError: if Ray is not installed.
      ConnectionError: if nothing answers at the address.
      ValueError: if this process is connected to another Ray than the address says.
    """
    try:
        import ray
    except ImportError as error:
        fix = "pip install 'shardopt[ray]', or use backend=\"threads\"."
        raise ImportError(complaint(who, "backend 'ray' needs Ray, which is not installed.", fix=fix)) from error
    if ray.is_initialized():
        here = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", here):
            what = f"this process is connected to the Ray at {here} already, not to {address}."
            raise ValueError(complaint(who, what, fix="call ray.shutdown() first, or leave address out."))
        yield ray
        return
    if address is None:
        with warnings.catch_warnings():
            # jax warns of forks; what Ray forks becomes another program at once.
            warnings.filterwarnings("ignore", message="os.fork", category=RuntimeWarning)
            ray.init(
                num_cpus=num_workers + 1, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1"
            )
    else:
        _join(who, ray, address)
    try:
        yield ray
    finally:
        ray.shutdown()


def check_capacity(who: str, ray: Any, num_workers: int) -> None:
    """Refuse a cluster on which the processes would wait for ever to be started.

    Raises:
      ValueError: if it has fewer CPUs than server and workers ask for, one each.
    """
    there = ray.cluster_resources().get("CPU", 0)
    if there < num_workers + 1:
        what = f"{num_workers} workers and a server need {num_workers + 1} CPUs, and the Ray cluster has {there:g}."
        raise ValueError(complaint(who, what, fix="start it with more (ray.init(num_cpus=...)), or use fewer workers."))


def _join(who: str, ray: Any, address: str) -> None:
    fix = "start Ray there (ray start --head), correct the address, or leave it out for a local Ray."
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if host and port.isdecimal():
            with contextlib.closing(socket.create_connection((host, int(port)), timeout=_SECONDS)):
                pass
        ray.init(address=address, log_to_driver=False)
    except (OSError, ConnectionError, ValueError, RuntimeError) as error:
        what = f"no Ray answers at {address!r} ({type(error).__name__}: {str(error).splitlines()[0]})."
        raise ConnectionError(complaint(who, what, fix=fix)) from error
