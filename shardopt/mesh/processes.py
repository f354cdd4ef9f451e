"""Start of a program that runs on several hosts."""

import os

import jax

_LAUNCHER_VARIABLES = (
    "SLURM_JOB_ID",
    "OMPI_MCA_orte_hnp_uri",
    "OMPI_COMM_WORLD_SIZE",
    "JAX_COORDINATOR_ADDRESS",
    "KUBERNETES_SERVICE_HOST",
    "TPU_WORKER_HOSTNAMES",
    "MEGASCALE_COORDINATOR_ADDRESS",
    "CLOUD_TPU_TASK_ID",
)


def initialize(
    coordinator_address: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
    """Join this process to the others of the job; call it before anything touches a device.

    With no arguments the cluster is detected from the environment (SLURM, Open MPI, Kubernetes, Cloud TPU).
    On a single machine outside any launcher it does nothing. On CPU, collectives between processes use gloo.

    Args:
      coordinator_address: `"host:port"` of process 0.
      num_processes: how many processes the job has.
      process_id: this process's number, from 0.

    Raises:
      ValueError: if only some of the three arguments are given.
      RuntimeError: if devices were already used in this process.
    """
    given = (coordinator_address, num_processes, process_id)
    if any(value is not None for value in given) and any(value is None for value in given):
        raise ValueError(
            "initialize: coordinator_address, num_processes and process_id go together, got "
            f"{coordinator_address!r}, {num_processes!r}, {process_id!r}.\n"
            "Fix: give all three, or none where SLURM, Open MPI, Kubernetes or Cloud TPU started the job."
        )
    if coordinator_address is None and not any(name in os.environ for name in _LAUNCHER_VARIABLES):
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator_address, num_processes, process_id)
