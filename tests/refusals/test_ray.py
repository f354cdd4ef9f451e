"""What cannot run on Ray is refused at once, and nothing is started; and who is taken to hang."""

import socket
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import ray

import shardopt as so
from shardopt.parameter_server._ray import RayDriver
from shardopt.parameter_server._views import WorkerStatus

pytestmark = pytest.mark.fast


def mean(params, batch):
    return jnp.mean((batch["x"] * params["w"] - 1.0) ** 2)


def run(**options):
    opt = so.async_sgd(optax.sgd(0.01), mean, backend="ray", **{"workers": 2, **options})
    return opt.run(
        {"w": np.zeros((), np.float32)},
        lambda worker: [{"x": np.ones(2, np.float32)}],
        num_updates=2,
    )


def test_an_address_where_nothing_answers_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ConnectionError) as caught:
        run(address=f"127.0.0.1:{port}")
    assert (
        str(caught.value)
        == f"async_sgd: no Ray answers at '127.0.0.1:{port}' (ConnectionRefusedError: [Errno 111]"
        " Connection refused).\nFix: start Ray there (ray start --head), correct the address,"
        " or leave it out for a local Ray."
    )
    assert not ray.is_initialized()


KINDS = "Fix: pass workers=4, or workers=[2, 2] for two devices each."
REFUSED = {
    "no workers": ({"workers": 0}, ValueError, "async_sgd: workers must be at least 1, got 0."),
    "an empty list": (
        {"workers": []},
        ValueError,
        (
            "async_sgd: workers must be at least 1, got"
            f" none.\n{KINDS.replace(', or workers=[2, 2] for two devices each', '')}"
        ),
    ),
    "half a worker": (
        {"workers": 1.5},
        TypeError,
        (
            "async_sgd: on Ray workers must be an integer or for each its number of devices, got"
            f" 1.5.\n{KINDS}"
        ),
    ),
    "no devices": (
        {"workers": [1, 0]},
        ValueError,
        "async_sgd: workers[1] must be at least 1, got 0.",
    ),
    "an address of another kind": (
        {"address": 6379},
        TypeError,
        "async_sgd: address must be a string or None, got int.",
    ),
    "negative restarts": (
        {"max_restarts": -1},
        ValueError,
        "async_sgd: max_restarts must be at least 0, got -1.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused(name):
    options, error, message = REFUSED[name]
    with pytest.raises(error) as caught:
        run(**options)
    assert str(caught.value) == message
    assert not ray.is_initialized()


def test_strategies_cannot_cross(message_of):
    strategy = so.ddp(optax.sgd(0.1), so.make_mesh(), mean)
    fix = (
        "Fix: pass [lambda devices: so.fsdp(tx, so.make_mesh(devices=devices), loss_fn)] * 4, for"
        " four islands."
    )
    assert (
        message_of(
            TypeError, so.parameter_server.async_local_sgd, [strategy], local_steps=1, backend="ray"
        )
        == "async_local_sgd: on Ray strategies must be functions, got ShardedOptimizer: devices"
        f" cannot cross.\n{fix}"
    )
    assert (
        message_of(
            TypeError, so.parameter_server.async_local_sgd, strategy, local_steps=1, backend="ray"
        )
        == "async_local_sgd: on Ray strategies must be a sequence of functions, got"
        f" ShardedOptimizer.\n{fix}"
    )


def test_only_workers_that_compute_or_load_too_long_are_killed(monkeypatch):
    """A worker that waits, that compiles or whose process has ended does not hang. While the caller
    evaluates no worker hangs, and each one is named once.
    """
    now = [0.0]
    monkeypatch.setattr("shardopt.parameter_server._ray.time.monotonic", lambda: now[0])
    workers = [
        WorkerStatus(worker, doing, 3, 3, is_new)
        for worker, (doing, is_new) in enumerate(
            [
                ("computes", False),
                ("loads", False),
                ("waits", False),
                ("gone", False),
                ("computes", True),
                ("loads", False),
            ]
        )
    ]
    driver = SimpleNamespace(
        spec=SimpleNamespace(caller="test", hang_timeout=10.0),
        status=lambda: SimpleNamespace(workers=workers),
        incarnations=dict.fromkeys(range(6), 0),
        running={worker: worker for worker in range(5)},
        last_progress={},
        hung=[],
        callback_seconds=0.0,
    )

    def died(worker):
        del driver.running[worker]

    driver.handle_dead_worker = died
    for moment, waited, progress, hung in [
        (0, 0, None, []),
        (9, 0, None, []),
        (19, 10, 1, []),  # an evaluation of 10 s; worker 1 goes on
        (21, 10, None, [0]),
        (30, 10, None, [0, 1]),
        (105, 10, None, [0, 1]),
        (111, 10, None, [0, 1, 4]),
    ]:
        now[0], driver.callback_seconds = float(moment), float(waited)
        if progress is not None:
            workers[progress] = workers[progress]._replace(clock=4)
        RayDriver.kill_hung_workers(driver)
        assert driver.hung == hung, moment
