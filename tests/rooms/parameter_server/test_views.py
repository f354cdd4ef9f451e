"""A person sees a line of a run: the workers that compute, wait and are gone."""

import threading

import numpy as np
import optax
import pytest

import shardopt as so
from shardopt.parameter_server import SimulatedWorker, simulate
from shardopt.parameter_server import _views as views
from shardopt.parameter_server._log import Event
from shardopt.parameter_server._views import Status, WorkerStats, WorkerStatus

pytestmark = pytest.mark.fast


def shown(statuses, capsys):
    show = views.make_show("async_sgd", shown=True)
    for last, status in enumerate(statuses, start=1 - len(statuses)):
        show(lambda status=status: status, last=last == 0)
    return capsys.readouterr().err


WORKERS = (
    WorkerStatus(0, "computes", clock=7, pushes=7),
    WorkerStatus(1, "waits", clock=8, pushes=8),
    WorkerStatus(12, "gone", clock=3, pushes=3),
)
STATUS = Status(10.0, 18, 100, WORKERS)


def test_progress_prints_a_line_now_and_then(capsys):
    line = (
        "async_sgd: update 18/100  1.8 pushes/s  workers: 1 computes, 1 waits, 1 gone (12), slowest"
        " 0 (1 step behind)\n"
    )
    assert shown([STATUS], capsys) == line
    end = STATUS._replace(
        updates=100,
        workers=tuple(worker._replace(doing="computes", clock=8) for worker in WORKERS),
    )
    assert shown([STATUS, STATUS, STATUS, end], capsys) == (
        line + "async_sgd: update 100/100  1.8 pushes/s  workers: 3 compute\n"
    )


@pytest.mark.parametrize(
    ("workers", "text"),
    [
        (
            [WorkerStatus(4, "computes", 9, 9), WorkerStatus(7, "loads", 9, 9)],
            "1 computes, 1 loads",
        ),
        (
            [WorkerStatus(4, "computes", 9, 9), WorkerStatus(7, "computes", 3, 3)],
            "2 compute, slowest 7 (6 steps behind)",
        ),
        (
            [WorkerStatus(4, "computes", 5, 9), WorkerStatus(7, "computes", 5, 3, is_new=True)],
            "1 computes, 1 restarts (7)",
        ),
        ([WorkerStatus(4, "computes", is_new=True)], "1 computes"),
        (
            [WorkerStatus(number, "gone", number) for number in range(10)],
            "10 gone (0, 1, 2, 3, 4, 5, 6, 7)",
        ),
        ([], ""),
    ],
)
def test_a_line_names_the_workers_that_are_slow_restarted_or_gone(workers, text):
    line = views.progress_line("async_sgd", Status(10.0, 18, 100, tuple(workers)))
    assert line.endswith(f"workers: {text}")


def test_status_is_asked_for_only_when_it_is_shown():
    calls = []
    views.make_show("x", shown=False)(lambda: calls.append(1), last=True)
    assert not calls


def test_stats_follow_the_events_of_a_log():
    """The stats equal the summary of a whole run, and follow each event."""
    result = simulate([SimulatedWorker(1.0), SimulatedWorker(3.0)], max_staleness=1, num_updates=20)
    stats = WorkerStats(result.log)
    workers = stats.workers(waits=lambda worker: True)
    assert sum(worker_stats.pushes for worker_stats in workers) == 20
    doing = []
    for kind in ("join", "pull", "push", "pull", "refuse", "pull", "resume", "leave"):
        stats.record(Event(kind, 5, 4, 0, 0, time=50.0))
        doing.append(
            (
                stats.workers(waits=lambda worker: True)[2].doing,
                stats.workers(bool)[2].clock,
            )
        )
    assert doing == [
        ("waits", 4),
        ("computes", 4),
        ("waits", 5),
        ("computes", 4),
        ("waits", 5),
        ("computes", 4),
        ("waits", 4),
        ("gone", 4),
    ]
    assert stats.workers(waits=lambda worker: False)[1].doing in ("loads", "computes")


def test_a_run_is_shown_while_it_goes_on(capsys, regression, monkeypatch):
    monkeypatch.setattr(views, "_LINE_SECONDS", 0.0)
    seen = threading.Event()
    stats = WorkerStats.workers

    def watched(*arguments, **options):
        seen.set()
        return stats(*arguments, **options)

    monkeypatch.setattr(WorkerStats, "workers", watched)

    def batches_of(worker):
        for step, batch in enumerate(regression.batches_of(2)(worker)):
            assert step != 3 or seen.wait(timeout=60)  # somebody looks before the end
            yield batch

    opt = so.async_sgd(optax.sgd(np.float32(0.01)), regression.loss_fn, workers=2, max_staleness=2)
    opt.run(regression.params, batches_of, num_updates=20, progress=True)
    lines = [
        line
        for line in capsys.readouterr().err.splitlines()
        if line.startswith("async_sgd: update ")
    ]
    assert len(lines) >= 2
    assert lines[-1].startswith("async_sgd: update 20/20  ")


def test_progress_of_another_type_is_refused(regression, message_of):
    opt = so.async_sgd(optax.sgd(0.01), regression.loss_fn, workers=1)

    def run():
        return opt.run(regression.params, regression.batches_of(1), num_updates=1, progress="yes")

    assert message_of(TypeError, run) == "async_sgd: progress must be True or False, got 'yes'."
