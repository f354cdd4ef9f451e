"""A local Ray for all tests of a file, and the regression that its workers train."""

import sys
import time
import warnings

import pytest
from support.regression import odd, regression

__all__ = ["local_ray", "no_process_left", "odd", "regression"]

CPUS = 9
"""Of the Ray of a file of tests: four islands of two processes and a server."""


@pytest.fixture(scope="module")
def local_ray(request):
    """One Ray for all tests of a file: starting one takes as long as a test."""
    import ray

    # Data and losses of these tests are in modules that workers cannot import.
    shared = [
        loaded_module
        for loaded_module in sys.modules.values()
        if loaded_module.__name__.split(".")[-1] in ("problems", "regression")
    ]
    for module in [*shared, request.module]:
        ray.cloudpickle.register_pickle_by_value(module)
    with warnings.catch_warnings():
        # its forks run another program
        warnings.filterwarnings("ignore", message="os.fork", category=RuntimeWarning)
        ray.init(
            num_cpus=CPUS,
            include_dashboard=False,
            log_to_driver=False,
            _node_ip_address="127.0.0.1",
        )
    yield
    ray.shutdown()


@pytest.fixture
def no_process_left(local_ray):
    """After a test all processes of its run are gone."""
    import ray

    yield
    deadline = time.monotonic() + 60
    while ray.is_initialized() and ray.available_resources().get("CPU") != CPUS:
        assert time.monotonic() < deadline, "a process of the run still holds its CPU"
        time.sleep(0.1)
