"""Several servers as processes: one that is killed comes back with its part only, and strangers are
refused.
"""

import os
import signal
import time
from pathlib import Path

import optax
import pytest
import ray
from support.reference import same_bits

import shardopt as so
from shardopt.parameter_server._ray import ServerProcess
from shardopt.parameter_server._ray_servers import SNAPSHOT_EVERY, ShardProcess

# Ray, and processes that are killed
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_process_left")]


def as_if_by_one(log):
    one = so.parameter_server.Log.from_columns(log.header, log.columns())
    del one.header["servers"]
    return one


def is_server(pid):
    """Not the coordinator, nor this process."""
    path = Path(f"/proc/{pid}/cmdline")
    return path.exists() and "ShardProcess" in path.read_text()


def spy(folder):
    """A rule that leaves the number of every process where it begins, and changes nothing."""

    def init(params):
        (folder / str(os.getpid())).touch()
        return ()

    return so.parameter_server.rules.Rule("spy", {}, init=init)


CLIP = so.transforms.clip_by_global_norm(0.5, "servers", split=True)


@pytest.mark.parametrize(
    ("tx", "max_staleness"),
    [(optax.adamw(0.05), 0), (optax.adamw(0.05), 2), (optax.chain(CLIP, optax.sgd(0.1)), 2)],
    ids=["synchronous", "stale", "clipped"],
)
def test_killed_servers_come_back_with_their_part_and_nothing_is_lost(
    tx, max_staleness, regression, tmp_path
):
    """Each of two servers is killed once, at some update.

    Without staleness one server in threads ends with the same bits.
    """
    killed, batches_of = [], regression.batches_of(2)

    def kill_a_server(params):
        others = sorted(
            int(one.name)
            for one in tmp_path.iterdir()
            if is_server(one.name) and int(one.name) not in killed
        )
        if others and len(killed) < 2:
            killed.append(others[0])
            os.kill(others[0], signal.SIGKILL)
        return {}

    def slow(worker):
        for batch in batches_of(worker):
            time.sleep(0.01)
            yield batch

    options = {"workers": 2, "max_staleness": max_staleness, "rule": spy(tmp_path)}
    opt = so.async_sgd(tx, regression.loss_fn, servers=2, backend="ray", **options)
    result = opt.run(
        regression.params,
        slow,
        num_updates=5 * SNAPSHOT_EVERY,
        evaluate=kill_a_server,
        evaluate_every=2 * SNAPSHOT_EVERY - 3,
    )
    metrics = result.metrics
    assert (metrics["stopped"], metrics["updates"], metrics["lost_updates"]) == (
        "completed",
        5 * SNAPSHOT_EVERY,
        0,
    )
    assert sorted(metrics["killed_servers"]) == [0, 1]
    assert len(killed) == 2
    assert {one.kind for one in result.log} == {"join", "pull", "push"}  # no step was given up
    assert metrics["history"]["loss"].shape == (5 * SNAPSHOT_EVERY,)
    same_bits(opt.replay(result.log, regression.params, batches_of), result.params)
    if max_staleness == 0:
        one = so.async_sgd(tx, regression.loss_fn, **options)
        same_bits(
            one.run(regression.params, batches_of, num_updates=5 * SNAPSHOT_EVERY).params,
            result.params,
        )


def test_compensation_for_delay_and_a_checkpoint(regression, tmp_path):
    """Parameters that workers pulled stay where they are.

    A checkpoint of processes goes on in threads.
    """
    rule, batches_of = so.parameter_server.rules.dc_asgd_adaptive(), regression.batches_of(2)
    options = {"workers": 2, "servers": 2, "max_staleness": 2, "rule": rule}
    opt = so.async_sgd(optax.adam(0.05), regression.loss_fn, backend="ray", **options)
    with so.Checkpoints(tmp_path, every=10, keep=1) as checkpoints:
        result = opt.run(regression.params, batches_of, num_updates=25, checkpoints=checkpoints)
        same_bits(opt.replay(result.log, regression.params, batches_of), result.params)
        replayed = so.parameter_server.replay(
            as_if_by_one(result.log),
            optax.adam(0.05),
            regression.loss_fn,
            regression.params,
            batches_of,
        )
        same_bits(replayed, result.params)
        threads = so.async_sgd(optax.adam(0.05), regression.loss_fn, **options)
        more = threads.run(regression.params, batches_of, num_updates=30, checkpoints=checkpoints)
        again = opt.run(regression.params, batches_of, num_updates=35, checkpoints=checkpoints)
    assert (more.metrics["resumed_from"], again.metrics["resumed_from"]) == (25, 30)
    same_bits(opt.replay(again.log, regression.params, batches_of), again.params)


def test_a_call_without_the_token_is_refused():
    part = (
        ray.remote(ShardProcess)
        .options(num_cpus=1)
        .remote({}, "secret", ray.cloudpickle.dumps(lambda: None))
    )
    message = "parameter_server: a call without the token of this run was refused."
    for name, arguments in {
        "begin": [None],
        "adopt": [None],
        "hold": [None],
        "current_version": [],
        "snapshot": [],
    }.items():
        with pytest.raises(PermissionError, match=message):
            ray.get(getattr(part, name).remote("guess", *arguments))
    assert ray.get(part.current_version.remote("secret")) == -1
    ray.kill(part)
    server = object.__new__(ServerProcess)
    server.token = "secret"
    for call in (
        lambda: server.enter("guess", 0, 0),
        lambda: server.pull("", 0, 0, True),
        lambda: server.push("guess", 0, 0, None, 0),
    ):
        with pytest.raises(PermissionError, match=message):
            call()
