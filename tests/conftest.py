"""Eight fake CPU devices, strict jax, shapes checked by beartype: set before anything imports jax."""

import importlib.metadata
import os
import shutil
import sys

# Many containers tell python not to store bytecode. Then each process that a test starts would
# compile the package for several seconds, and each worker would compile all tests for ten.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

from support.flags import QUICK_TO_COMPILE

FLAGS = ["--xla_force_host_platform_device_count=8", *QUICK_TO_COMPILE]
if importlib.metadata.version("jaxlib").startswith("0.10."):
    # With the other order of operations, a stored program of jaxlib 0.10.2 mixes up collectives
    # that may run at the same time: docs/notes/compiler_errors.md
    FLAGS.append("--xla_cpu_enable_concurrency_optimized_scheduler=false")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS]).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import support.shapes  # noqa: F401  the hook finds it by its name
from jaxtyping import install_import_hook

# These packages annotate shapes. Elsewhere bad input must meet shardopt's own checks, as it does
# for users.
install_import_hook(
    ["shardopt.collectives", "shardopt.models", "shardopt.data"], "support.shapes.check_outer"
)

import jax
import pytest
from support.memory import collect_seldom, keep_freed_memory
from support.tiers import has_fast, is_slow

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_traceback_filtering", "off")  # a test that fails shows every frame

keep_freed_memory()
collect_seldom()

GIGABYTE = 2**30
FAST = "fast and not slow and not default"


def pytest_configure(config):
    """Store compiled programs in .pytest_cache.

    With -m fast, leave out tests that fast files mark as slow or default.
    """
    if config.option.markexpr == "fast":
        config.option.markexpr = FAST
    if hasattr(config, "cache"):  # not with -p no:cacheprovider
        # The workers of a run share programs, and the next run finds the programs that did not
        # change. The key is the program with all flags, so code that is broken on purpose is
        # compiled.
        folder = config.cache.mkdir("xla")
        if (
            not hasattr(config, "workerinput")
            and sum(path.stat().st_size for path in folder.iterdir()) > GIGABYTE
        ):
            shutil.rmtree(folder)
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_ignore_collect(collection_path, config):
    """With -m fast, import only files that have fast tests, and by default no file of slow tests:
    importing all takes as long as a tenth of the fast tier.
    """
    has_no_tests = {FAST: lambda path: not has_fast(path), "not slow": is_slow}
    decide = has_no_tests.get(config.option.markexpr)
    if decide is None or not collection_path.name.startswith("test_"):
        return None
    return True if decide(collection_path) else None


def pytest_xdist_auto_num_workers(config):
    """-n auto: a process a core that this one may use; each takes a gigabyte or two."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return min(8, cores)


@pytest.fixture
def x64():
    """Run the test in double precision."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session")
def mesh_of():
    """Return a function from axis sizes to a mesh over the first devices that they need."""
    import math

    import shardopt as so

    def make(**sizes):
        return so.make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())])

    return make
