"""Islands of several processes: the same numbers as in one, also where one of their processes is
killed.
"""

import itertools
import os
import random
import signal
import time

import jax
import numpy as np
import optax
import pytest
from support.reference import same_bits

import shardopt as so

# Ray, and processes that are killed
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_process_left")]


def make_island(loss_fn, rate=0.01):
    def make(devices):
        assert len(devices) == 2
        return so.fsdp(
            optax.adamw(rate), so.make_mesh(devices=devices), loss_fn, min_shard_elements=1
        )

    return make


def islands(regression, count=2, rate=0.01, **options):
    makers = [make_island(regression.loss_fn, rate)] * count
    options = {"local_steps": 2, "backend": "ray", "hosts_per_island": 2} | options
    return so.parameter_server.async_local_sgd(makers, outer=optax.sgd(0.5), **options)


def of_all_processes(batches_of):
    """Return batches that each process of an island draws whole."""
    return lambda worker: so.GlobalRows(batches_of(worker))


def test_islands_of_two_processes_are_those_of_one_with_two_devices(regression):
    opt = islands(regression, max_staleness=0)
    batches_of = of_all_processes(regression.batches_of(2))
    result = opt.run(regression.params, batches_of, num_updates=4)
    whole = islands(regression, max_staleness=0, hosts_per_island=1, devices=2)
    same_bits(whole.run(regression.params, batches_of, num_updates=4).params, result.params)
    same_bits(opt.replay(result.log, regression.params, batches_of), result.params)


QUANTISED = {"local_steps": 4, "reducer": so.reducers.error_feedback(so.reducers.int8())}


def test_quantised_pushes_of_islands_of_two_processes_are_those_of_threads(regression):
    opt = islands(regression, max_staleness=0, **QUANTISED)
    batches_of = of_all_processes(regression.batches_of(2))
    result = opt.run(regression.params, batches_of, num_updates=6)
    meshes = [so.make_mesh(devices=jax.devices()[2 * i : 2 * i + 2]) for i in range(2)]
    made = [
        so.fsdp(optax.adamw(0.01), mesh, regression.loss_fn, min_shard_elements=1)
        for mesh in meshes
    ]
    threads = so.parameter_server.async_local_sgd(
        made, outer=optax.sgd(0.5), max_staleness=0, **QUANTISED
    )
    same_bits(
        threads.run(regression.params, batches_of, num_updates=6).params,
        result.params,
    )
    same_bits(opt.replay(result.log, regression.params, batches_of), result.params)
    assert not np.array_equal(result.params["w"], regression.params["w"])


@pytest.mark.parametrize("options", [{}, QUANTISED], ids=["exact", "quantised"])
@pytest.mark.parametrize(
    ("rank", "max_restarts"), [(0, 1), (1, 1), (1, 0)], ids=["first", "second", "for good"]
)
def test_an_island_that_loses_a_process_is_started_again_or_leaves(
    rank, max_restarts, options, regression, tmp_path
):
    """In a process that is not the first the server knows nothing of it.

    The island goes on where it was in its data.
    """
    mark, batches_of = tmp_path / "killed", of_all_processes(regression.batches_of(2))

    def doomed(worker):
        for step, batch in enumerate(batches_of(worker)):
            if worker == 1 and step == 5 and not mark.exists() and process_index() == rank:
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch

    opt = islands(regression, max_restarts=max_restarts, **options)
    result = opt.run(regression.params, doomed, num_updates=12)
    assert mark.exists()
    assert (result.metrics["updates"], result.metrics["killed"]) == (12, [1])
    kinds = [event.kind for event in result.log if event.worker == 1]
    assert kinds.count("leave") >= 1
    if not max_restarts:
        assert (kinds.count("join"), kinds[-1]) == (1, "leave")
    same_bits(opt.replay(result.log, regression.params, batches_of), result.params)


def test_an_island_of_which_a_process_stops_is_ended_as_a_whole_and_started_again(
    regression, tmp_path
):
    """The server hears of the first process only, which waits for the other in a collective."""
    mark, batches_of = tmp_path / "stopped", of_all_processes(regression.batches_of(2))

    def stops(worker):
        for step, batch in enumerate(batches_of(worker)):
            if worker == 1 and step == 5 and not mark.exists() and process_index() == 1:
                mark.touch()
                os.kill(os.getpid(), signal.SIGSTOP)
            yield batch

    opt = islands(regression, max_staleness=0, max_restarts=1, hang_timeout=10)
    result = opt.run(regression.params, stops, num_updates=8)
    assert (result.metrics["hung"], result.metrics["killed"], result.metrics["updates"]) == (
        [1],
        [1],
        8,
    )
    same_bits(opt.replay(result.log, regression.params, batches_of), result.params)


def process_index():
    return jax.process_index()


def test_a_drawn_schedule_of_kills_stops_and_joins(regression, tmp_path):
    """Four islands of two processes, 15 kills and 15 stops and joins: each example once, and as
    good in the end.

    Noise in what is to be learnt keeps the loss away from 0, so that one per cent of it is one.
    """
    noise = np.random.default_rng(7)
    noisy = [
        {**batch, "y": batch["y"] + noise.normal(size=24).astype(np.float32)}
        for batch in regression.batches
    ]
    rng, islands_many, updates = random.Random(0), 4, 240

    def batches_of(worker):
        for batch in itertools.islice(itertools.cycle(noisy), 8000):
            yield so.GlobalRows(
                {name: rows[6 * worker : 6 * worker + 6] for name, rows in batch.items()}
            )

    kills = {
        worker: rng.sample(range(1, 9), 4 if worker < 3 else 3) for worker in range(islands_many)
    }
    ranks = {(worker, at): rng.randrange(2) for worker, some in kills.items() for at in some}
    assert len(ranks) == 15
    availability = {}
    for worker in range(1, islands_many):  # one island is there throughout
        times = sorted(rng.sample(range(2, 70), 5))
        availability[worker] = [
            (times[0], times[1]),
            (times[2], times[3]),
            (times[4], float("inf")),
        ]

    def doomed(worker):
        for step, batch in enumerate(batches_of(worker)):
            mark = tmp_path / f"{worker}-{step}"
            if process_index() == ranks.get((worker, step)) and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch

    opt = islands(
        regression, islands_many, rate=0.05, local_steps=1, max_restarts=15, max_staleness=3
    )
    result = opt.run(regression.params, doomed, num_updates=updates, availability=availability)
    assert result.metrics["updates"] == updates
    assert len(result.metrics["killed"]) == len(list(tmp_path.iterdir())) >= 12
    same_bits(opt.replay(result.log, regression.params, batches_of), result.params)
    undisturbed = opt.run(regression.params, batches_of, num_updates=updates)
    whole = {name: np.concatenate([batch[name] for batch in noisy]) for name in ("x", "y")}
    start, found, wanted = (
        float(regression.loss_fn(one, whole))
        for one in (regression.params, result.params, undisturbed.params)
    )
    assert abs(found - wanted) <= 0.01 * wanted
    assert wanted < 0.6 * start


def test_a_killed_server_comes_back_and_no_process_waits_for_it(regression, tmp_path):
    """The first process tells the others that the server is gone; all go on from its checkpoint."""
    marks, killed = tmp_path / "servers", []
    marks.mkdir()

    def note_process(params):
        (marks / str(os.getpid())).touch()
        return ()

    def kill_the_server(params):
        if not killed:
            killed.extend(int(one.name) for one in marks.iterdir() if int(one.name) != os.getpid())
            os.kill(killed[0], signal.SIGKILL)
        return {}

    batches_of = of_all_processes(regression.batches_of(2))

    def slow(worker):
        for batch in batches_of(worker):
            time.sleep(0.02)
            yield batch

    opt = islands(
        regression, rule=so.parameter_server.rules.StalenessRule("spy", {}, init=note_process)
    )
    with so.Checkpoints(tmp_path / "run", every=5, keep=2) as checkpoints:
        result = opt.run(
            regression.params,
            slow,
            num_updates=30,
            checkpoints=checkpoints,
            evaluate=kill_the_server,
            evaluate_every=11,
        )
    assert len(killed) == 1
    assert (result.metrics["stopped"], result.metrics["updates"], result.metrics["killed"]) == (
        "completed",
        30,
        [],
    )
    same_bits(opt.replay(result.log, regression.params, batches_of), result.params)


def test_an_error_in_a_process_that_is_not_the_first_ends_the_run(regression):
    batches_of = of_all_processes(regression.batches_of(2))

    def broken(worker):
        for step, batch in enumerate(batches_of(worker)):
            if step == 3 and process_index() == 1:
                raise OSError("no data left")
            yield batch

    with pytest.raises(OSError, match="no data left"):
        islands(regression).run(regression.params, broken, num_updates=12)


def test_processes_need_ray(regression):
    with pytest.raises(
        ValueError, match="hosts_per_island=2 needs processes, and backend='threads' has one"
    ):
        so.parameter_server.async_local_sgd(
            [make_island(regression.loss_fn)], local_steps=1, hosts_per_island=2
        )
