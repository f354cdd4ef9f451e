"""Threads: what ends a run ends all of it, the bound holds under stalls, and errors say who and
where.
"""

import math
import threading
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.tiers import tiered

import shardopt as so
from shardopt.parameter_server import (
    Log,
    NonFiniteUpdateError,
    SimulatedWorker,
    make_server,
    rules,
    simulate,
)
from shardopt.parameter_server import _worker as compute
from shardopt.parameter_server._coordinator import Coordinator, SavePolicy
from shardopt.parameter_server._run import AsyncRun
from shardopt.parameter_server._settings import capture_settings
from shardopt.parameter_server._threads import run_threads
from shardopt.parameter_server._worker import no_compute


@pytest.fixture(autouse=True)
def nothing_left_running():
    yield
    assert not [
        thread.name for thread in threading.enumerate() if thread.name.startswith("shardopt")
    ]


def mean(params, batch):
    return jnp.mean((batch["x"] * params["w"] - 1.0) ** 2)


def ones(worker):
    while True:
        yield {"x": np.ones(2, np.float32)}


PARAMS = {"w": np.zeros((), np.float32)}


HERE = jax.devices()[:1]
"""Workers that share a device share a program."""


def run(
    *,
    workers=3,
    batches_of=ones,
    loss_fn=mean,
    num_updates=20,
    log_path=None,
    **options,
):
    if isinstance(workers, int) and workers > 0:
        workers = HERE * workers
    opt = so.async_sgd(optax.sgd(0.01), loss_fn, workers=workers, **options)
    return opt.run(PARAMS, batches_of, num_updates=num_updates, log_path=log_path)


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 8])
def test_the_bound_is_reached_and_kept_when_one_stalls(max_staleness):
    """Worker 0 stalls at two of its steps until worker 1 has finished the last step that it may
    begin.
    """
    stalls_at = (2, 5)
    reached = {at: threading.Event() for at in stalls_at}

    def batches_of(worker):
        for step, batch in enumerate(ones(worker)):
            if worker == 0 and step in stalls_at:
                assert reached[step].wait(timeout=60)
            for at in stalls_at:
                # drawn when the step before it is pushed
                if worker == 1 and step == at + max_staleness + 1:
                    reached[at].set()
            yield batch

    result = run(
        workers=3,
        max_staleness=max_staleness,
        batches_of=batches_of,
        num_updates=12 * 3 ** (max_staleness > 0),
    )
    assert max(result.metrics["staleness"]) == max_staleness
    assert max(result.metrics["delay"]) <= 2 * (2 * max_staleness + 1) * (max_staleness > 0)
    waits = result.metrics["wait_seconds"]
    assert waits[1] > 0
    assert waits[2] > 0


@pytest.mark.slow  # test_the_bound_is_reached_and_kept_when_one_stalls, and test_clock.py
@pytest.mark.parametrize("max_staleness", tiered([0, 1, 2, 8], lambda bound: bound == 2))
def test_workers_that_only_stall_make_10_000_pushes(max_staleness):
    """Threads, coordinator and clocks as in every run.

    Server and workers without mathematics, which would take the time.
    """

    def update(worker, params, batch, clock):
        if draws[worker].random() < 0.01:
            pause.wait(draws[worker].exponential(0.002))

    draws = [np.random.default_rng(worker) for worker in range(4)]
    pause = threading.Event()
    running = AsyncRun(make_server(None, max_staleness=max_staleness), None, {}, time.perf_counter)
    updates = 10_000 if max_staleness else 10_000 // 4
    coordinator = Coordinator(
        running, updates, {worker: [(0, math.inf)] for worker in range(4)}, SavePolicy()
    )
    run_threads("test", coordinator, no_compute()._replace(update=update), lambda coordinator: None)
    metrics = running.finish(coordinator.end_reason()).metrics
    assert (metrics["stopped"], metrics["pushes"]) == ("completed", 10_000)
    assert max(metrics["staleness"]) == max_staleness
    assert max(metrics["delay"]) <= 3 * (2 * max_staleness + 1) * (max_staleness > 0)


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [0, 1, 2, 8])
def test_the_bound_holds_for_10_000_pushes_with_random_stalls(max_staleness):
    def batches_of(worker):
        draw = np.random.default_rng(worker)
        pause = threading.Event()
        for batch in ones(worker):
            if draw.random() < 0.01:
                pause.wait(draw.exponential(0.005))
            yield batch

    updates = 10_000 if max_staleness else 10_000 // 4
    result = run(workers=4, max_staleness=max_staleness, batches_of=batches_of, num_updates=updates)
    assert result.metrics["pushes"] == 10_000
    assert max(result.metrics["staleness"]) == max_staleness
    opt = so.async_sgd(optax.sgd(0.01), mean, workers=HERE * 4, max_staleness=max_staleness)
    replayed_params = opt.replay(result.log, PARAMS, batches_of)
    np.testing.assert_array_equal(replayed_params["w"], result.params["w"])


def test_it_stops_at_exactly_so_many_updates():
    for max_staleness in (0, 3, None):
        result = run(max_staleness=max_staleness, num_updates=17)
        assert result.metrics["updates"] == 17
        assert result.metrics["pushes"] == (17 if max_staleness != 0 else 51)
        assert result.metrics["history"]["loss"].shape == (17,)
    assert run(num_updates=0).metrics["updates"] == 0


def test_the_history_has_every_update_in_order():
    """More than twice as many as may be in flight, so old ones were fetched before the end."""

    def loss_fn(params, batch):
        return (0.0 * params["w"] + batch["x"].mean(), {"twice": 2 * batch["x"].mean()})

    def batches_of(worker):
        return ({"x": np.full(2, step, np.float32)} for step in range(1000))

    history = run(loss_fn=loss_fn, batches_of=batches_of, workers=2, num_updates=300).metrics[
        "history"
    ]
    np.testing.assert_array_equal(history["loss"], np.arange(300))
    np.testing.assert_array_equal(history["twice"], 2 * np.arange(300))


def test_a_log_that_cannot_be_written_is_noticed_before_the_work(tmp_path):
    (tmp_path / "file").write_text("")
    seen = []
    with pytest.raises((FileExistsError, NotADirectoryError)):
        run(
            log_path=tmp_path / "file" / "log.jsonl",
            batches_of=lambda worker: seen.append(worker) or ones(worker),
        )
    assert not seen


def test_a_loss_that_raises_in_one_worker_ends_the_run_with_its_traceback(tmp_path):
    class BrokenDataError(Exception):
        pass

    def batches_of(worker):
        for step, batch in enumerate(ones(worker)):
            if (worker, step) == (1, 3):
                raise BrokenDataError("row 7 is not a number")
            yield batch

    path = tmp_path / "log.jsonl"
    with pytest.raises(BrokenDataError, match="row 7 is not a number") as caught:
        run(batches_of=batches_of, max_staleness=2, num_updates=1000, log_path=path)
    assert caught.value.__notes__ == ["This happened in worker 1 of async_sgd at its step 3."]
    assert "in batches_of" in "".join(traceback.format_exception(caught.value))
    log = Log.load(path)
    assert log.header["final"] is None
    assert [event.clock for event in log if (event.kind, event.worker) == ("push", 1)] == [0, 1, 2]


def test_a_loss_that_cannot_be_traced_too():
    def loss_fn(params, batch):
        raise KeyError("no such column")

    with pytest.raises(KeyError, match="no such column") as caught:
        run(loss_fn=loss_fn)
    assert "in loss_fn" in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_what_is_not_finite_ends_the_run(max_staleness):
    def batches_of(worker):
        for step, batch in enumerate(ones(worker)):
            yield {"x": batch["x"] * np.float32("inf" if (worker, step) == (2, 1) else 1.0)}

    with pytest.raises(NonFiniteUpdateError) as caught:
        run(batches_of=batches_of, max_staleness=max_staleness)
    assert str(caught.value).startswith(
        "parameter_server: the push of worker 2 at its step 1 was refused:\n"
    )
    assert (caught.value.worker, caught.value.clock) == (2, 1)


def test_whoever_waits_when_the_run_fails_does_not_wait_for_ever():
    """Workers 1 and 2 wait at the bound for worker 0, which fails only when they do."""
    ahead = [threading.Event() for _ in range(3)]

    def batches_of(worker):
        for step, batch in enumerate(ones(worker)):
            if worker == 0 and step == 1:
                assert all(ahead[other].wait(timeout=60) for other in (1, 2))
                raise RuntimeError("gone")
            if step == 2:
                ahead[worker].set()
            yield batch

    with pytest.raises(RuntimeError, match="gone"):
        run(batches_of=batches_of, max_staleness=0, num_updates=1000)


def test_data_that_ends_ends_the_run():
    metrics = run(
        batches_of=lambda worker: list(zip_some(worker + 2)), max_staleness=None, num_updates=100
    ).metrics
    assert (metrics["stopped"], metrics["updates"]) == ("exhausted", 2 + 3 + 4)
    metrics = run(
        batches_of=lambda worker: list(zip_some(worker + 2)), max_staleness=0, num_updates=100
    ).metrics
    assert (metrics["stopped"], metrics["updates"], metrics["pushes"]) == ("exhausted", 4, 9)


@pytest.mark.fast
def test_each_example_is_used_once_however_often_a_worker_dies():
    """The parameters count the examples.

    Worker 1 dies twice, each time with a step in flight.
    """

    def examples(worker):
        return list(np.eye(24, dtype=np.float32)[12 * worker : 12 * worker + 12, None])

    def loss_fn(counts, batch):
        return -jnp.mean(batch @ counts)

    tx = optax.sgd(1.0)
    counts = np.zeros(24, np.float32)
    periods = ((0, 3.5), (4.5, 7.5), (8.5, math.inf))
    workers = [SimulatedWorker(), SimulatedWorker(availability=periods)]
    result = simulate(
        workers,
        max_staleness=1,
        num_updates=100,
        tx=tx,
        loss_fn=loss_fn,
        params=counts,
        batches_of=examples,
    )
    assert [event.kind for event in result.log if event.worker == 1].count("join") == 3
    assert result.metrics["stopped"] == "exhausted"
    np.testing.assert_array_equal(result.params, np.ones(24))
    opt = so.async_sgd(tx, loss_fn, workers=HERE * 2, max_staleness=1)
    np.testing.assert_array_equal(opt.replay(result.log, counts, examples), result.params)


def zip_some(count):
    return (batch for batch, _ in zip(ones(0), range(count), strict=False))


def test_workers_compute_on_their_own_devices_in_the_precision_of_the_caller(x64, monkeypatch):
    seen = set()
    moved = compute.to_device

    def watch(update, device):
        gradient = update.grads["w"]
        seen.add((gradient.dtype, *(holder.id for holder in gradient.devices())))
        return moved(update, device)

    monkeypatch.setattr(compute, "to_device", watch)
    devices = jax.devices()[2:5]
    opt = so.async_sgd(optax.sgd(0.01), mean, workers=devices)
    result = opt.run({"w": np.zeros(())}, ones, num_updates=3)
    assert seen == {(np.dtype(np.float64), device.id) for device in devices}
    assert result.params["w"].devices() == {devices[0]}


def test_settings_of_a_thread_are_carried_into_another():
    def in_thread(settings):
        observations = []

        def work():
            with settings():
                observations.append((jnp.ones(()).dtype, jax.config.jax_numpy_rank_promotion))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return observations[0]

    with jax.enable_x64(True), jax.numpy_rank_promotion("warn"):
        settings = capture_settings()
    assert in_thread(settings) == (np.dtype(np.float64), "warn")
    assert in_thread(capture_settings()) == (
        np.dtype(np.float32),
        jax.config.jax_numpy_rank_promotion,
    )


def test_more_workers_than_devices_share_them():
    opt = so.async_sgd(optax.sgd(0.01), mean, workers=jax.device_count() + 1)
    assert [mesh.devices.flat[0].id for mesh in opt.workers] == [*range(jax.device_count()), 0]


def test_optimizers_that_watch_the_loss_get_it():
    tx = optax.chain(
        optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1, factor=0.5, cooldown=0)
    )
    result = so.async_sgd(tx, lambda p, b: jnp.mean(b["x"]) + 0.0 * p["w"], workers=HERE * 2).run(
        PARAMS, ones, num_updates=4
    )
    assert result.metrics["updates"] == 4


REFUSED = {
    "no workers": (
        {"workers": 0},
        ValueError,
        "async_sgd: workers must be at least 1, got 0.",
    ),
    "an empty list": (
        {"workers": []},
        ValueError,
        (
            "async_sgd: workers must be at least 1, got none.\n"
            "Fix: pass how many, or for each worker a device, a list of devices or a mesh."
        ),
    ),
    "half a worker": (
        {"workers": 1.5},
        TypeError,
        (
            "async_sgd: workers must be an integer or a sequence, got float.\n"
            "Fix: pass how many, or for each worker a device, a list of devices or a mesh."
        ),
    ),
    "strange workers": (
        {"workers": [None]},
        TypeError,
        (
            "async_sgd: worker 0 must be a device, a sequence of devices or a mesh, got None.\n"
            "Fix: pass how many, or for each worker a device, a list of devices or a mesh."
        ),
    ),
    "tensor workers": (
        {"workers": ["mesh"]},
        ValueError,
        (
            "async_sgd: the mesh of worker 0 has axes that nothing is split over: tensor (size"
            " 2).\nFix: an async_sgd worker splits its batch: use so.make_mesh(data=...)."
        ),
    ),
    "devices shared": (
        {"workers": ["shared"]},
        ValueError,
        (
            "async_sgd: a worker with several devices must have them for itself.\n"
            "  cpu:1: workers 0, 1\n"
            "Fix: give each its own, or one device to several workers."
        ),
    ),
    "negative staleness": (
        {"max_staleness": -1},
        ValueError,
        (
            "async_sgd: max_staleness must be at least 0, got -1.\n"
            "Fix: 0 waits at every step, s lets the fastest run s steps ahead, None never waits."
        ),
    ),
    "a reducer": (
        {"reducer": rules},
        TypeError,
        (
            "async_sgd: reducer must be a Reducer, got shardopt.parameter_server.rules.\n"
            "Fix: pass one such as so.reducers.int8(), called."
        ),
    ),
    "an unknown backend": (
        {"backend": "mpi"},
        ValueError,
        (
            "async_sgd: backend must be 'threads' or 'ray', got 'mpi'.\n"
            'Fix: use backend="threads" for workers in this process.'
        ),
    ),
    "an address for threads": (
        {"address": "10.0.0.1:6379"},
        ValueError,
        (
            "async_sgd: address, max_restarts and hang_timeout are for backend='ray', got"
            " backend='threads'.\nFix: use backend=\"ray\", or leave them out."
        ),
    ),
    "no loss": (
        {"loss_fn": 3},
        TypeError,
        "async_sgd: loss_fn must be a function (params, batch) -> loss, or a BlockModel, got int.",
    ),
    "no iterator": (
        {"batches_of": lambda worker: None, "workers": 1},
        TypeError,
        "async_sgd: batches_of(0) must return an iterable of batches, got NoneType.",
    ),
    "no function": (
        {"batches_of": []},
        TypeError,
        (
            "async_sgd: batches_of must be a function (worker) -> iterable of batches, got list.\n"
            "Fix: to share out one stream: lambda w: itertools.islice(stream(), w, None, n)."
        ),
    ),
    "negative updates": (
        {"num_updates": -1},
        ValueError,
        "async_sgd: num_updates must be at least 0, got -1.",
    ),
    "updated leaves": (
        {
            "loss_fn": lambda p, b: (mean(p, b), {"x": so.losses.Updated({"w": p["w"]})}),
            "workers": 1,
        },
        ValueError,
        (
            "async_sgd: loss_fn returns so.losses.Updated, for which asynchronous workers have no common"
            " value.\n  w\nFix: train such leaves with ddp, zero or fsdp."
        ),
    ),
    "a batch without rows": (
        {"batches_of": lambda worker: [{"x": np.float32(1.0)}], "workers": 1},
        ValueError,
        (
            "async_sgd: no batch leaf has rows.\n  x: shape (); no rows\nFix: give leaves the shape"
            " [global batch, ...]."
        ),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused(name):
    options, error, message = REFUSED[name]
    if options.get("workers") == ["mesh"]:
        options = {"workers": [so.make_mesh(data=1, tensor=2, devices=jax.devices()[:2])]}
    if options.get("workers") == ["shared"]:
        options = {"workers": [jax.devices()[:2], jax.devices()[1:3]]}
    with pytest.raises(error) as caught:
        run(**options)
    assert str(caught.value) == message


def test_ctrl_c_stops_every_thread(monkeypatch):
    started = threading.Event()

    def batches_of(worker):
        for batch in ones(worker):
            started.set()
            yield batch

    def interrupt(ended):
        started.wait()
        raise KeyboardInterrupt

    monkeypatch.setattr("shardopt.parameter_server._threads.wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(batches_of=batches_of, num_updates=10**9, max_staleness=None)
