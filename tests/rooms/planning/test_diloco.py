"""Utilisation of replicas that train apart, against cases that can be worked out by hand."""

import functools
import math
import re

import pytest

from shardopt.planning import Replicas

replicas = functools.partial(Replicas, num_parameters=1e9, step_seconds=0.1)


def test_data_parallel_waits_for_every_step():
    found = replicas().utilisation(bandwidth=4e9)
    assert found == pytest.approx((0.1, 1.0, 1.0, 0.1 / 1.1))


def test_what_is_sent_falls_with_the_steps_between_and_with_the_bits():
    found = replicas(sync_every=10).utilisation(bandwidth=4e9)
    assert found == pytest.approx((1.0, 1.0, 1.0, 0.5))
    found = replicas(sync_every=10, bits=4).utilisation(bandwidth=4e9)
    assert found.send == pytest.approx(0.125)
    found = replicas(sync_every=10, replicas=4).utilisation(bandwidth=4e9)
    assert found.send == pytest.approx(1.5)


def test_a_delay_hides_its_share_of_every_fragment():
    found = replicas(sync_every=20, fragments=4, delay=2).utilisation(bandwidth=4e9)
    assert found.waiting == pytest.approx(4 * (0.25 - 0.2))
    found = replicas(sync_every=20, fragments=4, delay=3).utilisation(bandwidth=4e9)
    assert found.utilisation == 1.0


def test_what_the_backward_pass_hides_is_a_share_of_a_step_for_every_fragment():
    found = replicas(overlap=0.5).utilisation(bandwidth=40e9)
    assert found == pytest.approx((0.1, 0.1, 0.05, 0.1 / 0.15))
    streaming = replicas(sync_every=20, fragments=4, delay=2, overlap=0.25)
    assert streaming.utilisation(bandwidth=4e9).waiting == pytest.approx(4 * (0.25 - 0.225))


WAYS = [
    {},
    {"overlap": 2 / 3},
    {"sync_every": 50},
    {"sync_every": 100, "fragments": 4, "delay": 5, "overlap": 0.5, "bits": 4},
    {"sync_every": 100, "fragments": 2, "delay": 5, "latency": 0.01},
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("target", [0.5, 0.9, 0.99])
def test_the_bandwidth_for_a_target_reaches_it(way, target):
    job = replicas(**way)
    found = job.utilisation(bandwidth=job.bandwidth_for(target))
    assert found.utilisation == pytest.approx(target)


def test_no_bandwidth_makes_up_for_a_long_latency():
    assert replicas(latency=1.0).bandwidth_for(0.5) == math.inf


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"replicas": 0}, "Replicas: replicas must be at least 1, got 0."),
        ({"delay": -1}, "Replicas: delay must be finite, at least 0; got -1."),
        ({"bits": 0}, "Replicas: bits must be finite, above 0; got 0."),
        ({"overlap": 2}, "Replicas: overlap must be from 0 to 1, got 2.\n"),
        (
            {"sync_every": 10, "fragments": 4},
            "Replicas: sync_every=10 is not divisible by fragments=4.\n",
        ),
        (
            {"sync_every": 10, "fragments": 2, "delay": 5},
            "Replicas: delay=5 must be below sync_every / fragments = 5.\n",
        ),
    ],
)
def test_numbers_that_cannot_be_are_refused(numbers, message):
    fix = "Fix: choose numbers as so.diloco takes them." if message.endswith("\n") else ""
    with pytest.raises(ValueError, match=f"^{re.escape(message + fix)}$"):
        replicas(**numbers)


def test_a_bandwidth_and_a_target_out_of_range_are_refused():
    message = r"^utilisation: bandwidth must be finite, above 0; got 0\."
    with pytest.raises(ValueError, match=message):
        replicas().utilisation(bandwidth=0)
    message = r"^bandwidth_for: target must be above 0 and below 1, got 1\.$"
    with pytest.raises(ValueError, match=message):
        replicas().bandwidth_for(1)
