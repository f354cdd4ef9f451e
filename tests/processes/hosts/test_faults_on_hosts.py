"""Synchronous training on two hosts whose network fails: the run ends with the parameters of an
undisturbed one, or stops in time, says where, and goes on from its checkpoint.
"""

import random
import re
import time

import numpy as np
import pytest
from support.hosts import need_hosts, network
from support.processes import saved_arrays

from .conftest import launch, said, wait_for

pytestmark = pytest.mark.slow

STEPS = 60
STOP_SECONDS = 150
"""Within so many seconds after a fault all launchers that can have ended. Without a watchdog, which
dies with the first host, jax needs 70."""


def start(hosts, folder):
    worker = ["worker_on_hosts.py", folder, STEPS, 0.1]
    options = ["--processes", "1", "--hang-timeout", "15"]
    return [launch(host, folder, worker, *options) for host in hosts]


def params(folder):
    return saved_arrays(folder / "params.npz")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    need_hosts()
    folder = tmp_path_factory.mktemp("undisturbed")
    with network(2) as hosts:
        jobs = start(hosts, folder)
        assert [job.wait() for job in jobs] == [0, 0], said(folder, hosts[0])
    return params(folder)


def reach(folder, jobs, step):
    """Wait until both processes are at a step."""
    paths = [folder / f"step-{rank}" for rank in range(2)]

    def is_reached():
        texts = [path.read_text() if path.exists() else "" for path in paths]
        return all(text and int(text) >= step for text in texts)

    wait_for(is_reached, jobs)


@pytest.mark.parametrize("draw", range(2))
@pytest.mark.parametrize("fault", ["cut", "slow"])
def test_a_run_outlasts_a_short_cut_and_a_slow_host(undisturbed, pair, tmp_path, fault, draw):
    rng = random.Random(f"{fault} {draw}")
    victim = rng.choice(pair)
    jobs = start(pair, tmp_path)
    reach(tmp_path, jobs, rng.randrange(5, 40))
    if fault == "cut":
        victim.cut()
        time.sleep(5.0)
        victim.heal()
    else:
        victim.limit(0.1)
    assert [job.wait(timeout=300) for job in jobs] == [0, 0], said(tmp_path, pair[0])
    for name, values in params(tmp_path).items():
        np.testing.assert_array_equal(values, undisturbed[name])


@pytest.mark.parametrize("draw", range(2))
@pytest.mark.parametrize("fault", ["cut for 30 s", "first dies", "second dies"])
def test_a_run_stops_in_time_and_goes_on_from_its_checkpoint(
    undisturbed, pair, tmp_path, fault, draw
):
    rng = random.Random(f"{fault} {draw}")
    first, second = pair
    jobs = start(pair, tmp_path)
    reach(tmp_path, jobs, rng.randrange(15, 40))
    began = time.monotonic()
    victim = first if fault == "first dies" else second
    if fault == "cut for 30 s":
        victim.cut()
        time.sleep(30.0)
        victim.heal()
    else:
        victim.kill()
    codes = [job.wait(timeout=STOP_SECONDS) for job in jobs]
    assert time.monotonic() - began < STOP_SECONDS
    assert not (tmp_path / "params.npz").exists()
    assert all(codes), codes
    survivor = second if fault == "first dies" else first
    text = said(tmp_path, survivor)
    if survivor is first:
        named = r"watchdog: process 1 of 2 hangs: not heard of for \d+ s, last on host1 at step \d+"
        assert re.search(named, text), text
    else:  # the watchdog was on the first host, where jax's coordinator is too
        named = (
            r"watchdog: process 1 is no longer watched, at step \d+ in phase '\w+': nothing was"
            r" heard for 15 s from host0, the host of process 0"
        )
        assert re.search(named, text), text
        assert "CoordinationService" in text
    if fault != "cut for 30 s":
        victim.restart("10.77.0.9")
    jobs = start(pair, tmp_path)
    assert [job.wait(timeout=300) for job in jobs] == [0, 0], said(tmp_path, first)
    assert f"step 5/{STEPS}" not in said(tmp_path, first)  # it goes on from step 10 or later
    for name, values in params(tmp_path).items():
        np.testing.assert_array_equal(values, undisturbed[name])
