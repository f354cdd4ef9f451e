"""Eight fake CPU devices, strict jax, shapes checked by beartype: set before anything imports jax."""

import os

# Most of the suite's time is LLVM's, for programs that run once: it need not optimise. What XLA makes of a program, its
# collectives and buffers, is decided before, and stays as users have it.
FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jaxtyping import install_import_hook

# Where shapes are annotated. Elsewhere bad input must meet shardopt's own checks, as it does for users.
install_import_hook(["shardopt.collectives", "shardopt.models", "shardopt.data"], "beartype.beartype")

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_xdist_auto_num_workers(config):
    """-n auto: a process a core that this one may use; each takes a gigabyte or two."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(8, cores)


@pytest.fixture
def x64():
    """Run the test in double precision."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def mesh_of():
    """Return a function from axis sizes to a mesh over the first devices that they need."""
    import math

    import shardopt as so

    def make(**sizes):
        return so.make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())])

    return make
