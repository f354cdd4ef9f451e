"""How this process finds the others of its job: where its launcher says that, or jax can read it."""

import functools
import importlib.util
import os
import socket
import sys
import warnings
from typing import Any, NamedTuple

from shardopt.core import check_flag, value_error
from shardopt.core._place import (
    ProcessPlace,
    is_ray_worker,
    joined_address,
    slurm_tasks,
    stated_place,
)
from shardopt.runtime._progress import LISTEN_ADDRESS

_DETECTED_BY_JAX = (
    "OMPI_MCA_orte_hnp_uri",
    "JAX_COORDINATOR_ADDRESS",
    "JOB_COMPLETION_INDEX",
    "TPU_WORKER_HOSTNAMES",
    "MEGASCALE_COORDINATOR_ADDRESS",
    "CLOUD_TPU_TASK_ID",
)
_SLURM_STEP = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_LOCALID")
"""What jax reads of a task of SLURM, beside its rank."""


class Connection(NamedTuple):
    """The first arguments of `jax.distributed.initialize`; jax detects values that are None.

    Attributes:
      address: "host:port" of the first process.
      size: the number of processes.
      rank: the number of this process.
      options: further arguments, name -> value.
    """

    address: str | None = None
    size: int | None = None
    rank: int | None = None
    options: dict[str, Any] | None = None


def passed_connection(
    address: str | None, count: int | None, rank: int | None, alone: bool
) -> Connection | None:
    """Return the connection that the user passed, or None.

    Raises:
      TypeError: if `alone` is not a flag.
      ValueError: if a part is missing, or it contradicts `alone`.
    """
    check_flag("alone", alone)
    missing = [address, count, rank].count(None)
    if missing in (1, 2):
        problem = (
            "coordinator_address, num_processes and process_id go together, got"
            f" {address!r}, {count!r}, {rank!r}."
        )
        fix = (
            "give all three, or none where SLURM, torchrun, Ray Train, Open MPI, Kubernetes or Cloud"
            " TPU started the job."
        )
        raise value_error(problem, fix=fix)
    if missing:
        return None
    if alone:
        problem = f"alone=True means no other process, got process {rank} of {count}."
        raise value_error(problem, fix="leave alone out, or the other arguments.")
    return Connection(address, count, rank)


def stated_connection() -> Connection | None:
    """Return how this process joins the others, or None if it is the only one.

    Raises:
      ValueError: if a launcher states several processes, but not where they are.
    """
    place = stated_place()
    if place is None:
        return _without_place()
    if place.launcher == "jax":
        if place.address is None or place.rank is None:
            return Connection()
        return Connection(place.address, place.size, place.rank)
    if place.size == 1:
        return None
    return _CONNECT[place.launcher](place)


def at_listen_address(connection: Connection) -> Connection:
    """Let jax listen at the address that the environment states; return the connection for that.

    By itself gloo takes the address that belongs to the name of the host. On Debian it is 127.0.1.1,
    where no other host reaches it; elsewhere strangers may reach it. Process 0 listens at all
    addresses. It does so too where jax detects the address (MPI).
    """
    address = os.environ.get(LISTEN_ADDRESS)
    if address is None:
        return connection
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    make_collectives = _jax.make_gloo_tcp_collectives
    _jax.make_gloo_tcp_collectives = functools.partial(make_collectives, hostname=address)
    if connection.address is None:
        return connection
    bind_address = f"{address}:{connection.address.rpartition(':')[2]}"
    options = (connection.options or {}) | {"coordinator_bind_address": bind_address}
    # process 0 may know the name of its host as 127.0.1.1, and does not listen there
    target = connection.address if connection.rank else bind_address
    return connection._replace(address=target, options=options)


def _without_place() -> Connection | None:
    if is_ray_worker():
        return None
    if any(name in os.environ for name in _DETECTED_BY_JAX):
        return Connection()
    tasks = slurm_tasks() or 1
    if tasks > 1:
        problem = f"SLURM has {tasks} tasks for this job, and srun did not start this process."
        fix = "start the program by srun, or call so.initialize(alone=True)."
        warnings.warn(
            f"initialize: {problem} It trains alone.\nFix: {fix}", UserWarning, stacklevel=4
        )
    return None


def _by_ray_train(place: ProcessPlace) -> Connection:
    """Let the first worker choose an address, and tell it to the others."""
    ray = sys.modules["ray"]
    try:
        from ray.train import collective  # this process is a worker of Ray Train
    except ImportError:
        problem = "the workers of Ray Train cannot agree on an address: it is version 1."
        raise value_error(problem, fix="set RAY_TRAIN_V2_ENABLED=1 in the driver.") from None
    address = None
    if place.rank == 0:
        host = ray.util.get_node_ip_address()
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, 0))
            address = joined_address(host, probe.getsockname()[1])
    address = collective.broadcast_from_rank_zero(address)
    # Ray has chosen the GPUs, and the variables of SLURM may belong to another job
    return Connection(address, place.size, place.rank, {"cluster_detection_method": "deactivate"})


def _by_torchrun(place: ProcessPlace) -> Connection:
    if place.rank is None or place.address is None:
        names = ("RANK", "MASTER_ADDR", "MASTER_PORT")
        raise _incomplete(place, [name for name in names if not os.environ.get(name)])
    options: dict[str, Any] = {"cluster_detection_method": "deactivate"}
    local_rank = os.environ.get("LOCAL_RANK", "")
    if local_rank.isdecimal() and not _has_chosen_devices():
        options["local_device_ids"] = [int(local_rank)]
    return Connection(place.address, place.size, place.rank, options)


def _has_chosen_devices() -> bool:
    """Return whether this process uses all devices that it can see."""
    visible_gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    sees_one_gpu = visible_gpus != "" and "," not in visible_gpus
    is_only_one = os.environ.get("LOCAL_WORLD_SIZE") == "1"
    return sees_one_gpu or is_only_one or "JAX_LOCAL_DEVICE_IDS" in os.environ


def _by_mpi(place: ProcessPlace) -> Connection:
    if "OMPI_MCA_orte_hnp_uri" in os.environ:
        return Connection()
    if importlib.util.find_spec("mpi4py") is None:
        problem = f"{place.source} states several processes, and jax asks mpi4py where they are."
        fix = "pip install mpi4py, or pass coordinator_address, num_processes and process_id."
        raise value_error(problem, fix=fix)
    return Connection(options={"cluster_detection_method": "mpi4py"})


def _by_slurm(place: ProcessPlace) -> Connection:
    missing = [name for name in _SLURM_STEP if name not in os.environ]
    if missing or place.rank is None:
        raise _incomplete(place, missing or ["SLURM_PROCID"])
    from jax._src.clusters import SlurmCluster

    # jax would detect it too, but then nothing here could listen or wait at this address
    address = SlurmCluster.get_coordinator_address(None, os.environ.get("JAX_COORDINATOR_PORT"))
    return Connection(address, place.size, place.rank)


_CONNECT = {
    "Ray Train": _by_ray_train,
    "torchrun": _by_torchrun,
    "MPI": _by_mpi,
    "SLURM": _by_slurm,
}
"""Launcher -> how a process that it started joins the others."""


def _incomplete(place: ProcessPlace, missing: list[str]) -> ValueError:
    problem = f"{place.source} states several processes, and {', '.join(missing)} is not set."
    fix = (
        "set it, pass coordinator_address, num_processes and process_id, or, if each process shall"
        " train alone, alone=True."
    )
    return value_error(problem, fix=fix)
