"""Eight fake CPU devices, strict jax, shapes checked by beartype: set before anything imports jax."""

import importlib.metadata
import os

# Most of the suite's time is that of compiling programs that run once, so code generation need not optimise. Collectives,
# shardings and donated buffers are decided before it, and stay as users have them.
FLAGS = [
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",  # a worker has one core
]
if importlib.metadata.version("jaxlib").startswith("0.10."):  # later ones have no other emitters
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")  # a third of the time to compile
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS]).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jaxtyping import install_import_hook

# Where shapes are annotated. Elsewhere bad input must meet shardopt's own checks, as it does for users.
install_import_hook(["shardopt.collectives", "shardopt.models", "shardopt.data"], "beartype.beartype")

import jax
import pytest
from support.tiers import has_fast, is_fast

jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_ignore_collect(collection_path, config):
    """With -m fast, import only files that have fast tests: importing all takes as long as a tenth of the tier."""
    if config.option.markexpr != "fast" or not collection_path.name.startswith("test_"):
        return None
    return None if has_fast(collection_path) else True


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items):
    slow, fast = (lambda item: item.get_closest_marker("slow")), (lambda item: item.get_closest_marker("fast"))
    for item in items:
        if is_fast(item.path, item.name) and not slow(item) and not fast(item):
            item.add_marker(pytest.mark.fast)


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
