"""Goodput with failures: closed forms against hand calculations and against the simulation of
single events.
"""

import math
import re

import pytest
from support.scripts import imported

from benchmarks.recovery_plan import Failures, best_period, plan_recovery

pytestmark = pytest.mark.fast

HOUR = 3600.0


@pytest.fixture(scope="module")
def simulate_failures():
    with imported("failure_simulation") as script:
        yield script.simulate_failures


def test_the_best_period_is_that_of_young_and_daly():
    for cost, mean in ((5.0, 10_000.0), (60.0, 10_000.0), (200.0, 10_000.0)):
        young = math.sqrt(2 * cost * mean)
        ratio = math.sqrt(cost / (2 * mean))
        daly = young * (1 + ratio / 3 + ratio**2 / 9) - cost
        assert best_period(cost, 1 / mean) == pytest.approx(daly, rel=1e-4)
    assert best_period(1e-3, 1e-7) == pytest.approx(math.sqrt(2e4), rel=1e-4)


def test_one_level_of_copies_has_the_goodput_worked_out_by_hand():
    failures = Failures(mtbf=1000 * HOUR, restart=200, detect=100, save=30)
    recovery = plan_recovery(failures, chips=500, save_every=900)
    mean = 1000 * HOUR / 500
    failed = math.exp(930 / mean) - 1
    total = (mean + 300) * failed
    assert recovery.goodput == pytest.approx(900 / total)
    assert recovery.interval == pytest.approx(mean + 300)
    assert recovery.lost == {
        "checkpoint": pytest.approx(mean * (math.exp(30 / mean) - 1) / total),
        "redone": pytest.approx((mean * failed - 900 - mean * (math.exp(30 / mean) - 1)) / total),
        "detect": pytest.approx(100 * failed / total),
        "restart": pytest.approx(200 * failed / total),
    }


def test_the_chosen_period_is_the_best():
    failures = Failures(mtbf=1000 * HOUR, restart=300, save=60, snapshot=2.0, wide=0.2)
    best = plan_recovery(failures, chips=512)
    for factor in (0.7, 1.4):
        for name in ("save_every", "snapshot_every"):
            other = plan_recovery(failures, chips=512, **{name: factor * getattr(best, name)})
            assert other.goodput < best.goodput


CASES = {
    "checkpoints": Failures(mtbf=1000 * HOUR, restart=300, save=60, detect=60),
    "a failure in most periods": Failures(mtbf=100 * HOUR, restart=600, save=300),
    "spares": Failures(mtbf=1000 * HOUR, restart=300, save=60, replace=2 * HOUR),
    "snapshots": Failures(
        mtbf=200 * HOUR, restart=300, save=60, snapshot=2.0, wide=0.1, replace=600
    ),
    "only snapshots": Failures(mtbf=200 * HOUR, restart=300, save=60, snapshot=2.0),
    "islands that wait": Failures(mtbf=200 * HOUR, restart=600, save=60, islands=(3,), stall=180),
    "islands that do not wait": Failures(
        mtbf=400 * HOUR, restart=3000, save=60, islands=(8,), exchange=300
    ),
    "islands and wide failures": Failures(
        mtbf=400 * HOUR,
        restart=300,
        save=60,
        islands=(4,),
        exchange=100,
        stall=30,
        wide=0.2,
        replace=900,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_closed_form_equals_the_simulation(name, simulate_failures):
    failures = CASES[name]
    predicted = plan_recovery(failures, chips=480)
    simulated = simulate_failures(failures, predicted, num_failures=500, seed=1)
    assert predicted.goodput + sum(predicted.lost.values()) == pytest.approx(1)
    assert simulated.goodput + sum(simulated.lost.values()) == pytest.approx(1)
    assert simulated.goodput == pytest.approx(predicted.goodput, abs=0.012)
    assert simulated.interval == pytest.approx(predicted.interval, rel=0.08)
    for cause in predicted.lost | simulated.lost:
        assert simulated.lost.get(cause, 0) == pytest.approx(
            predicted.lost.get(cause, 0), abs=0.01
        ), cause
    assert simulate_failures(failures, predicted, num_failures=500, seed=1) == simulated


def test_spares_are_as_many_as_pay():
    failures = Failures(mtbf=1000 * HOUR, restart=300, save=60, replace=HOUR)
    best = plan_recovery(failures, chips=4096)
    assert best.spares > 1
    for spares in (best.spares - 1, best.spares + 1):
        assert plan_recovery(failures, chips=4096, spares=spares).goodput < best.goodput
    assert best.training_share == pytest.approx(best.goodput * (4096 + 8 * best.spares) / 4096)
    assert plan_recovery(Failures(mtbf=1000 * HOUR, restart=300, save=60), chips=4096).spares == 0


def test_islands_are_chosen_by_goodput():
    failures = Failures(
        mtbf=100 * HOUR, restart=900, save=60, islands=(1, 2, 16), exchange=60, stall=20
    )
    best = plan_recovery(failures, chips=512)
    goodput = {
        count: plan_recovery(failures, chips=512, islands=count).goodput for count in (1, 2, 16)
    }
    assert best.goodput == max(goodput.values())
    assert goodput[best.islands] == best.goodput
    assert best.islands == 16


def test_periods_are_whole_steps():
    failures = Failures(mtbf=1000 * HOUR, restart=300, save=5, snapshot=0.01, wide=0.1)
    recovery = plan_recovery(failures, chips=512, step_seconds=20.0)
    assert recovery.save_steps == recovery.save_every / 20
    assert recovery.snapshot_steps == 1
    assert plan_recovery(failures, chips=512).save_steps is None
    text = str(recovery)
    assert text.startswith("512 chips, 0 spare hosts: a failure every 2.0")
    assert f"checkpoint every {recovery.save_steps} steps" in text
    assert "snapshot every 1 step (20 s)" in text
    assert f"goodput      {recovery.goodput:.2%}" in text


def test_no_failure_needs_a_checkpoint_if_copies_in_memory_survive_all():
    failures = Failures(mtbf=1000 * HOUR, restart=300, save=5, snapshot=1.0)
    recovery = plan_recovery(failures, chips=512)
    assert recovery.save_every is None
    assert "checkpoint" not in recovery.lost


BASE = {"mtbf": 1e6, "restart": 1.0, "save": 1.0}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"mtbf": 0}, ValueError, "Failures: mtbf must be finite, above 0; got 0."),
        ({"restart": -1}, ValueError, "Failures: restart must be finite, at least 0; got -1."),
        ({"save": "5"}, TypeError, "Failures: save must be a number, got '5' (str)."),
        ({"snapshot": 0.0}, ValueError, "Failures: snapshot must be finite, above 0; got 0.0."),
        ({"wide": 1.5}, ValueError, "Failures: wide must be at most 1, got 1.5."),
        ({"host_chips": 0}, ValueError, "Failures: host_chips must be at least 1, got 0."),
        (
            {"islands": 4},
            TypeError,
            (
                "Failures: islands must be a tuple of integers, got 4.\nFix: pass for example"
                " islands=(1, 2, 4)."
            ),
        ),
        ({"islands": (0,)}, ValueError, "Failures: islands must be at least 1, got 0."),
    ],
)
def test_failures_refuse(change, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        Failures(**BASE | change)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"chips": 0}, "plan_recovery: chips must be at least 1, got 0."),
        (
            {"chips": 10, "islands": 4},
            (
                "plan_recovery: 10 chips cannot be spread evenly over 4 islands.\n"
                "Fix: choose chips divisible by 4, or another number of islands."
            ),
        ),
        ({"chips": 8, "spares": -1}, "plan_recovery: spares must be at least 0, got -1."),
        (
            {"chips": 8, "step_seconds": 0},
            "plan_recovery: step_seconds must be finite, above 0; got 0.",
        ),
        (
            {"chips": 8, "snapshot_every": 5.0},
            (
                "plan_recovery: snapshot_every is given, but not what a snapshot costs.\n"
                "Fix: pass Failures(snapshot=...), the seconds that training waits for a snapshot."
            ),
        ),
    ],
)
def test_plan_recovery_refuses(arguments, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        plan_recovery(Failures(**BASE), **arguments)
