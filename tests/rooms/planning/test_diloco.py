"""Utilisation of replicas that train apart, against cases that can be worked out by hand."""

import re

import pytest

from shardopt.planning import bandwidth_for, diloco_utilisation

BASE = {"num_parameters": 1e9, "step_seconds": 0.1}


def test_data_parallel_waits_for_every_step():
    found = diloco_utilisation(**BASE, bandwidth=4e9)
    assert found == pytest.approx((0.1, 1.0, 1.0, 0.1 / 1.1))


def test_what_is_sent_falls_with_the_steps_between_and_with_the_bits():
    found = diloco_utilisation(**BASE, bandwidth=4e9, sync_every=10)
    assert found == pytest.approx((1.0, 1.0, 1.0, 0.5))
    assert diloco_utilisation(**BASE, bandwidth=4e9, sync_every=10, bits=4).send == pytest.approx(
        0.125
    )
    assert diloco_utilisation(
        **BASE, bandwidth=4e9, sync_every=10, replicas=4
    ).send == pytest.approx(1.5)


def test_a_delay_hides_its_share_of_every_fragment():
    found = diloco_utilisation(**BASE, bandwidth=4e9, sync_every=20, fragments=4, delay=2)
    assert found.waiting == pytest.approx(4 * (0.25 - 0.2))
    assert (
        diloco_utilisation(**BASE, bandwidth=4e9, sync_every=20, fragments=4, delay=3).utilisation
        == 1.0
    )


def test_what_the_backward_pass_hides_is_a_share_of_a_step_for_every_fragment():
    found = diloco_utilisation(**BASE, bandwidth=40e9, overlap=0.5)
    assert found == pytest.approx((0.1, 0.1, 0.05, 0.1 / 0.15))
    found = diloco_utilisation(
        **BASE, bandwidth=4e9, sync_every=20, fragments=4, delay=2, overlap=0.25
    )
    assert found.waiting == pytest.approx(4 * (0.25 - 0.225))


WAYS = [
    {},
    {"overlap": 2 / 3},
    {"sync_every": 50},
    {"sync_every": 100, "fragments": 4, "delay": 5, "overlap": 0.5, "bits": 4},
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("target", [0.5, 0.9, 0.99])
def test_the_bandwidth_for_a_target_reaches_it(way, target):
    need = bandwidth_for(target, **BASE, **way)
    assert diloco_utilisation(**BASE, bandwidth=need, **way).utilisation == pytest.approx(target)


def test_refusals():
    message = (
        "diloco_utilisation: these numbers cannot be used.\n  bandwidth must be above 0, got 0\n "
        " replicas must be at least 1, got 0\n  delay must be at least 0, got -1\n  overlap must be"
        " from 0 to 1, got 2\nFix: choose numbers as so.diloco takes them."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        diloco_utilisation(**BASE, bandwidth=0, replicas=0, delay=-1, overlap=2)
    with pytest.raises(ValueError, match="sync_every=10 is not divisible by fragments=4"):
        diloco_utilisation(**BASE, bandwidth=1, sync_every=10, fragments=4)
    with pytest.raises(ValueError, match=r"delay=5 must be below sync_every / fragments = 5"):
        diloco_utilisation(**BASE, bandwidth=1, sync_every=10, fragments=2, delay=5)
    with pytest.raises(
        ValueError, match=r"^bandwidth_for: target must be above 0 and below 1, got 1\.$"
    ):
        bandwidth_for(1, **BASE)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"overlap": 5}, "overlap must be from 0 to 1, got 5"),
        ({"bits": 0}, "bits must be above 0, got 0"),
    ],
)
def test_a_bandwidth_is_asked_for_in_numbers_that_can_be(how, said):
    with pytest.raises(
        ValueError, match=r"^bandwidth_for: these numbers cannot be used\."
    ) as caught:
        bandwidth_for(0.5, **BASE, **how)
    assert said in str(caught.value)
