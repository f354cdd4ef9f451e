"""The place of this process in its job, as a launcher states it: how many processes there are, and
which of them this is.

A launcher that is called inside another one knows better, so the first reader that finds a place
wins: the variables of jax, then Ray Train, torchrun, MPI and SLURM. Variables of torchrun, MPI and
SLURM that state one process do not hide a launcher of several.
"""

import os
import sys
from typing import Any, NamedTuple

import jax

from shardopt.core._errors import value_error

_SETTLED = "SHARDOPT_SETTLED"
"""The environment variable with the place that this process, or a process that started it, has
taken in the job. A helper of a process inherits its place, and is no further process of the job."""
_MPI_VARIABLES = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
)
"""Number of processes and rank: Open MPI, MVAPICH, jsrun, and MPICH, Intel MPI, Cray MPI."""

_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Steps of SLURM from this number on are a batch script, or the shell of an interactive job."""


class ProcessPlace(NamedTuple):
    """The place of a process in its job.

    Attributes:
      launcher: what started the processes: "jax", "Ray Train", "torchrun", "MPI" or "SLURM".
      source: where the number of processes stands, such as "WORLD_SIZE=4".
      size: the number of processes.
      rank: the number of this process, or None if it is not stated.
      address: "host:port" of the first process, or None if it is not stated.
    """

    launcher: str
    source: str
    size: int
    rank: int | None = None
    address: str | None = None


def stated_place() -> ProcessPlace | None:
    """Return the place of this process, or None if no launcher states one. It starts no backend."""
    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    place = _of_variables("jax", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", address)
    place = place or _ray_train_place()
    if place is not None:
        return place
    place = _torchrun_place()
    if is_ray_worker() or (place is not None and "TORCHELASTIC_RUN_ID" in os.environ):
        # Ray's processes inherit the environment that `ray start` had, of another job.
        return place
    # some launchers state the number of processes, and no rank
    sized_world = _of_variables("torchrun", "WORLD_SIZE", "RANK")
    candidates = (place, _mpi_place(), _slurm_place(), sized_world)
    places = [candidate for candidate in candidates if candidate is not None]
    # images and shells leave variables of one process, inside of a launcher of several
    return max(places, key=lambda candidate: candidate.size > 1, default=None)


def check_joined(device: Any = None) -> None:
    """Refuse to go on if the environment states several processes, and jax has one.

    Args:
      device: one that shall train, or None. A device that is only compiled for is no reason.

    Raises:
      ValueError: if so, unless `initialize` was told that being alone is meant.
    """
    place = stated_place()
    if place is None or place.size == 1 or os.environ.get(_SETTLED) == _text(place):
        return
    if device is not None and not _is_live(device):
        return
    if not _is_joined():
        problem = (
            f"{place.source} states {place.size} processes, and jax knows of this one alone. Each"
            " would train by itself, and write the same files."
        )
        fix = (
            "call so.initialize() in each process, before any code uses a device. If each shall"
            " train alone, call so.initialize(alone=True)."
        )
        raise value_error(problem, fix=fix)
    settle()


def settle() -> None:
    """Note that this process has taken its place, for itself and the helpers that it starts."""
    place = stated_place()
    if place is not None:
        os.environ[_SETTLED] = _text(place)


def joined_address(host: str, port: int) -> str:
    """Return "host:port", with brackets around an address of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_ray_worker() -> bool:
    """Return whether Ray started this process: then its parent is Ray's own process of the host."""
    return os.environ.get("RAY_RAYLET_PID") == str(os.getppid())


def slurm_tasks() -> int | None:
    """Return the number of tasks of the SLURM job; None outside of a job.

    A batch script and the shell of an interactive job are one process each, whatever the number is.
    """
    return _number("SLURM_NTASKS") if "SLURM_JOB_ID" in os.environ else None


def _is_joined() -> bool:
    from jax._src import xla_bridge  # jax.process_count() would start a backend

    if jax.distributed.is_initialized():
        return True
    return xla_bridge.backends_are_initialized() and jax.process_count() > 1


def _is_live(device: Any) -> bool:
    """Return whether a backend of this process has the device."""
    from jax._src import xla_bridge

    if not xla_bridge.backends_are_initialized():
        return False
    return any(backend is device.client for backend in xla_bridge.backends().values())


def _text(place: ProcessPlace) -> str:
    return f"{place.source} {place.rank} {place.address}"


def _number(name: str) -> int | None:
    """Return the positive number, or 0, that an environment variable holds, or None."""
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else None


def _of_variables(
    launcher: str, count_name: str, rank_name: str, address: str | None = None
) -> ProcessPlace | None:
    """Return the place of two variables, or None if the first is not set."""
    count = _number(count_name)
    if not count:
        return None
    return ProcessPlace(launcher, f"{count_name}={count}", count, _number(rank_name), address)


def _ray_train_place() -> ProcessPlace | None:
    """Return the place of a worker of Ray Train."""
    train = sys.modules.get("ray.train")
    if train is None or not is_ray_worker():
        return None
    try:
        context = train.get_context()
        count = context.get_world_size()
        rank = context.get_world_rank()
    except (RuntimeError, DeprecationWarning):  # a task or an actor, or a trial of Ray Tune
        return None
    return (
        ProcessPlace("Ray Train", f"Ray Train's world size of {count}", count, rank)
        if count
        else None
    )


def _torchrun_place() -> ProcessPlace | None:
    host = os.environ.get("MASTER_ADDR")
    port = _number("MASTER_PORT")
    address = None
    if host and port:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            port += 1  # torchrun itself listens on the port
        address = joined_address(host, port)
    place = _of_variables("torchrun", "WORLD_SIZE", "RANK", address)
    return None if place is None or place.rank is None else place


def _mpi_place() -> ProcessPlace | None:
    for count_name, rank_name in _MPI_VARIABLES:
        place = _of_variables("MPI", count_name, rank_name)
        if place is not None:
            slurm = _slurm_place()
            # srun with PMI sets the variables of both, and jax can join the tasks of srun
            is_srun = slurm is not None and slurm[2:4] == place[2:4]
            return slurm if is_srun else place
    return None


def _slurm_place() -> ProcessPlace | None:
    """Return the place of a task that srun started.

    SLURM_NTASKS is set in a batch script and in the shell of an interactive job, too. These are one
    process each, with rank 0 or none, and without a step.
    """
    place = _of_variables("SLURM", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
    if place is not None:
        return place
    step = _number("SLURM_STEP_ID")
    has_step = step is not None and step < _FIRST_SPECIAL_STEP
    is_task = has_step or "SLURM_STEP_NODELIST" in os.environ
    rank = _number("SLURM_PROCID")
    # sbatch and salloc set the folder, and srun passes it on
    is_script = rank is None or (rank == 0 and "SLURM_SUBMIT_DIR" in os.environ)
    if is_script and not is_task and "SLURM_JOB_ID" in os.environ:
        return None
    return _of_variables("SLURM", "SLURM_NTASKS", "SLURM_PROCID")
