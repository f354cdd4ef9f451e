"""The same on Ray, with processes that are really killed."""

import os
import signal
import threading
import time

import jax
import numpy as np
import optax
import pytest
from support.reference import OPTIMIZERS, relative_difference, same_bits

import shardopt as so
from shardopt.parameter_server import ServerLostError, WorkersLostError

# Ray, and processes that are killed
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_process_left")]


@pytest.mark.parametrize(
    ("optimizer", "weighted", "workers"), [("momentum", False, 2), ("adamw", True, [2, 2])]
)
def test_without_staleness_it_is_ddp(optimizer, weighted, workers, odd, x64):
    case, batches_of = odd(weighted)
    tx = OPTIMIZERS[optimizer]()
    opt = so.async_sgd(tx, case.loss_fn, workers=workers, backend="ray")
    result = opt.run(case.params, batches_of(2), num_updates=len(case.batches))
    data = sum(workers) if isinstance(workers, list) else workers
    alone = so.ddp(tx, so.make_mesh(data=data, devices=jax.devices()[:data]), case.loss_fn)
    state = alone.init(case.params)
    for batch in case.batches:
        state, _ = alone.step(state, batch)
    assert relative_difference(result.params, jax.device_get(state.params)) <= 1e-12
    assert result.metrics["staleness"] == {0: 2 * len(case.batches)}
    assert (result.metrics["killed"], result.metrics["lost_updates"]) == ([], 0)
    same_bits(opt.replay(result.log, case.params, batches_of(2)), result.params)


def killed_at(batches_of, folder, schedule):
    """The same batches.

    Process w kills itself at step n of its data, `schedule = {w: {n, ...}}`, once each.
    """

    def doomed(worker):
        for step, batch in enumerate(batches_of(worker)):
            mark = folder / f"{worker}-{step}"
            if step in schedule.get(worker, ()) and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch

    return doomed


def killed_soon(batches_of, folder, schedule):
    """The same batches.

    Process w is killed so many seconds after step n, wherever it is then, `{w: {n: seconds}}`.
    """

    def doomed(worker):
        for step, batch in enumerate(batches_of(worker)):
            mark = folder / f"{worker}-{step}"
            if step in schedule.get(worker, ()) and not mark.exists():
                mark.touch()
                threading.Timer(
                    schedule[worker][step], os.kill, (os.getpid(), signal.SIGKILL)
                ).start()
            yield batch

    return doomed


def slowed(batches_of, seconds):
    def slow(worker):
        for batch in batches_of(worker):
            time.sleep(seconds)
            yield batch

    return slow


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_killed_worker_is_forgotten_and_comes_back(max_staleness, regression, tmp_path):
    reducer = so.reducers.error_feedback(so.reducers.int8()) if max_staleness else None
    opt = so.async_sgd(
        optax.adam(0.05),
        regression.loss_fn,
        workers=2,
        max_staleness=max_staleness,
        reducer=reducer,
        backend="ray",
        max_restarts=1,
    )
    doomed = killed_at(regression.batches_of(2), tmp_path, {1: {3}})
    restart_mark = tmp_path / "again"

    def batches_of(worker):
        if worker == 1 and (tmp_path / "1-3").exists():
            restart_mark.touch()
        for step, batch in enumerate(doomed(worker)):
            while worker == 0 and step == 20 and not restart_mark.exists():  # alone by then
                time.sleep(0.01)
            yield batch

    path = tmp_path / "log.jsonl"
    total = 30 * (1 + (max_staleness > 0))
    result = opt.run(regression.params, batches_of, num_updates=total, log_path=path)
    metrics = result.metrics
    events = [event for event in result.log if event.worker == 1]
    assert (metrics["stopped"], metrics["updates"], metrics["killed"]) == ("completed", total, [1])
    assert [event.kind for event in events if event.kind in ("join", "leave")] == [
        "join",
        "leave",
        "join",
    ]
    assert max(metrics["staleness"]) <= max_staleness
    joined = [index for index, event in enumerate(events) if event.kind == "join"][1]
    assert events[joined].clock > 3  # where the slowest was by then
    assert len(events) > joined + 3  # and it works
    if reducer is not None:
        assert metrics["push_bytes"] == metrics["pushes"] * so.reducers.compressor(reducer).nbytes(
            regression.params
        )
        assert [
            len(values) for worker, values in metrics["lost_memory"].items() if worker == 1
        ] == [1]
    log = so.parameter_server.Log.load(path)
    same_bits(opt.replay(log, regression.params, regression.batches_of(2)), result.params)


@pytest.mark.parametrize("how", ["stopped", "busy"])
def test_a_worker_that_hangs_is_named_killed_and_started_again(how, regression, tmp_path, caplog):
    batches_of = regression.batches_of(2)
    mark = tmp_path / "hangs"

    def stuck(worker):
        for step, batch in enumerate(batches_of(worker)):
            if (worker, step) == (1, 3) and not mark.exists():
                mark.touch()
                if how == "stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                while how == "busy":
                    pass
            yield batch

    options = {"max_staleness": 0, "backend": "ray", "max_restarts": 1, "hang_timeout": 10}
    opt = so.async_sgd(optax.sgd(0.05), regression.loss_fn, workers=2, **options)
    result = opt.run(regression.params, stuck, num_updates=12)
    assert (result.metrics["hung"], result.metrics["killed"], result.metrics["updates"]) == (
        [1],
        [1],
        12,
    )
    assert "async_sgd: worker 1 hangs: it loads without progress for " in caplog.text
    same_bits(opt.replay(result.log, regression.params, batches_of), result.params)


def test_without_workers_there_is_an_error_and_a_checkpoint(regression, tmp_path):
    opt = so.async_sgd(
        optax.sgd(0.05), regression.loss_fn, workers=2, max_staleness=1, backend="ray"
    )
    batches_of = killed_at(regression.batches_of(2), tmp_path / "marks", {0: {6}, 1: {4}})
    (tmp_path / "marks").mkdir()
    with so.Checkpoints(tmp_path / "run", every=100, keep=1) as checkpoints:
        with pytest.raises(WorkersLostError) as caught:
            opt.run(regression.params, batches_of, num_updates=400, checkpoints=checkpoints)
        version = checkpoints.latest()
        assert (
            str(caught.value)
            == f"async_sgd: all 2 workers were killed, the last one at version {version} of"
            " 400.\nFix: pass max_restarts so that they are started again, or checkpoints to go"
            " on from here."
        )
        assert version == 10
        result = opt.run(regression.params, batches_of, num_updates=20, checkpoints=checkpoints)
    assert (result.metrics["resumed_from"], result.metrics["updates"]) == (10, 20)
    same_bits(opt.replay(result.log, regression.params, regression.batches_of(2)), result.params)


def test_islands_of_two_devices_each_equal_diloco_without_staleness(regression, capsys):
    """Each a process with a mesh of its own; without staleness they are DiLoCo."""
    loss_fn = regression.loss_fn

    def make(devices):
        return so.fsdp(optax.adamw(0.01), so.make_mesh(devices=devices), loss_fn)

    opt = so.parameter_server.async_local_sgd(
        [make, make], local_steps=2, max_staleness=0, backend="ray", devices=2
    )
    result = opt.run(regression.params, regression.batches_of(2), num_updates=4, progress=True)
    assert "async_local_sgd: update 4/4  " in capsys.readouterr().err
    devices = jax.devices()
    strategies = [make(devices[0:2]), make(devices[2:4])]
    threads = so.parameter_server.async_local_sgd(strategies, local_steps=2, max_staleness=0)
    same_bits(
        threads.run(regression.params, regression.batches_of(2), num_updates=4).params,
        result.params,
    )
    same_bits(opt.replay(result.log, regression.params, regression.batches_of(2)), result.params)


def server_pids(folder):
    """A rule that leaves the number of every process that it is begun in, and changes nothing."""

    def init(params):
        (folder / str(os.getpid())).touch()
        return ()

    return so.parameter_server.rules.StalenessRule("spy", {}, init=init)


def test_a_killed_server_comes_back_from_its_checkpoint(regression, tmp_path):
    marks = tmp_path / "servers"
    killed = []
    marks.mkdir()

    def kill_the_server(params):
        living_pids = [
            int(item.name)
            for item in marks.iterdir()
            if int(item.name) not in (os.getpid(), *killed)
        ]
        if len(killed) < 2:
            killed.append(*living_pids)
            os.kill(killed[-1], signal.SIGKILL)
        return {}

    rule = server_pids(marks)
    opt = so.async_sgd(
        optax.adam(0.05), regression.loss_fn, workers=2, max_staleness=1, rule=rule, backend="ray"
    )
    with so.Checkpoints(tmp_path / "run", every=5, keep=2) as checkpoints:
        result = opt.run(
            regression.params,
            slowed(regression.batches_of(2), 0.02),
            num_updates=60,
            checkpoints=checkpoints,
            evaluate=kill_the_server,
            evaluate_every=13,
        )
    metrics = result.metrics
    assert len(killed) == 2
    # the last milestone is not missed
    assert [item["step"] for item in metrics["evaluations"]][-1] == 52
    assert (metrics["stopped"], metrics["updates"], metrics["killed"]) == ("completed", 60, [])
    # 2 if both times it was the same checkpoint
    assert [item.kind for item in result.log].count("resume") in (2, 4)
    assert 2 <= metrics["lost_updates"] <= 40
    assert metrics["history"]["loss"].shape == (60,)
    same_bits(opt.replay(result.log, regression.params, regression.batches_of(2)), result.params)


def test_a_killed_server_without_checkpoints_is_an_error(regression, tmp_path):
    def kill_the_server(params):
        (pid,) = [int(mark.name) for mark in tmp_path.iterdir() if int(mark.name) != os.getpid()]
        os.kill(pid, signal.SIGKILL)
        return {}

    opt = so.async_sgd(
        optax.sgd(0.05), regression.loss_fn, workers=1, rule=server_pids(tmp_path), backend="ray"
    )
    with pytest.raises(
        ServerLostError,
        match=r"async_sgd: the process of the server was killed, at version \d+ or later",
    ):
        opt.run(
            regression.params,
            slowed(regression.batches_of(1), 0.05),
            num_updates=10**6,
            evaluate=kill_the_server,
            evaluate_every=3,
        )


def test_what_a_worker_raises_reaches_the_caller(regression):
    batches_of = regression.batches_of(2)

    def broken(worker):
        for step, batch in enumerate(batches_of(worker)):
            if (worker, step) == (1, 2):
                raise LookupError("row 7 is not a number")
            yield batch

    opt = so.async_sgd(
        optax.sgd(0.05), regression.loss_fn, workers=2, max_staleness=1, backend="ray"
    )
    with pytest.raises(LookupError, match="row 7 is not a number") as caught:
        opt.run(regression.params, broken, num_updates=10**6)
    assert (
        caught.value.__notes__[0]
        == "This happened in worker 1 of async_sgd at its step 2, a process of its own:"
    )
    assert "in broken" in caught.value.__notes__[1]


def test_what_is_not_finite_is_refused(regression):
    batches_of = regression.batches_of(2)

    def spoilt(worker):
        for step, batch in enumerate(batches_of(worker)):
            yield {**batch, "y": batch["y"] * np.float32("nan" if (worker, step) == (1, 2) else 1)}

    opt = so.async_sgd(
        optax.sgd(0.05), regression.loss_fn, workers=2, max_staleness=1, backend="ray"
    )
    with pytest.raises(so.parameter_server.NonFiniteUpdateError) as caught:
        opt.run(regression.params, spoilt, num_updates=10**6)
    assert str(caught.value).startswith(
        "parameter_server: the push of worker 1 at its step 2 was refused:\n  loss"
    )
    assert (caught.value.worker, caught.value.clock) == (1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [0, 1, 2, 8])
def test_the_bound_holds_for_10_000_pushes_with_random_stalls(max_staleness, regression):
    batches_of = regression.batches_of(3)

    def stalling(worker):
        draw = np.random.default_rng(worker)
        for batch in batches_of(worker):
            if draw.random() < 0.01:
                time.sleep(draw.exponential(0.05))
            yield batch

    opt = so.async_sgd(
        optax.sgd(1e-3), regression.loss_fn, workers=3, max_staleness=max_staleness, backend="ray"
    )
    updates = 10_000 if max_staleness else 10_000 // 3
    metrics = opt.run(regression.params, stalling, num_updates=updates).metrics
    assert (metrics["stopped"], metrics["pushes"]) == (
        "completed",
        updates * (1 if max_staleness else 3),
    )
    assert max(metrics["staleness"]) == max_staleness


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_runs_with_random_kills_end_and_are_replayed(seed, regression, tmp_path):
    """Workers and server die at random moments.

    The run ends with so many updates, and the log explains every bit.
    """
    draw = np.random.default_rng(seed)
    marks = tmp_path / "servers"
    killed = []
    marks.mkdir()
    schedule = {
        worker: {
            int(step): float(draw.uniform(0, 0.05))
            for step in draw.choice(40, size=2, replace=False)
        }
        for worker in range(3)
    }
    max_staleness = [0, 1, 4, None][seed % 4]
    total = 60 if max_staleness == 0 else 180
    at = draw.integers(total // 4, total // 2)
    delay = draw.uniform(0, 0.1)

    def kill_the_server(params):
        seen.append(seen[-1] + 5)
        pids = [int(item.name) for item in marks.iterdir() if int(item.name) != os.getpid()]
        if seen[-1] >= at and not killed:
            killed.append(max(pids, key=lambda pid: (marks / str(pid)).stat().st_mtime))
            threading.Timer(delay, os.kill, (killed[0], signal.SIGKILL)).start()
        return {}

    seen = [0]
    reducer = [None, so.reducers.error_feedback(so.reducers.int8())][seed % 2]
    opt = so.async_sgd(
        optax.sgd(0.02, momentum=0.9),
        regression.loss_fn,
        workers=3,
        max_staleness=max_staleness,
        rule=server_pids(marks),
        reducer=reducer,
        backend="ray",
        max_restarts=2,
    )
    batches_of = slowed(killed_soon(regression.batches_of(3), tmp_path, schedule), 0.01)
    with so.Checkpoints(tmp_path / "run", every=5, keep=2) as checkpoints:
        result = opt.run(
            regression.params,
            batches_of,
            num_updates=total,
            checkpoints=checkpoints,
            evaluate=kill_the_server,
            evaluate_every=5,
        )
    metrics = result.metrics
    assert (metrics["stopped"], metrics["updates"]) == ("completed", total)
    assert metrics["killed"]
    assert killed
    assert 0 <= metrics["lost_updates"] < total // 2
    assert [item.kind for item in result.log].count("push") == metrics["pushes"]
    same_bits(opt.replay(result.log, regression.params, regression.batches_of(3)), result.params)
