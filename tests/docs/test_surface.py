"""The surface stays within the limits of CONTRIBUTING.md, and a name or argument too many is
noticed.
"""

import pytest
from support.scripts import imported

import shardopt as so

with imported("surface", ".ci") as surface, imported("limits", ".ci") as ci_limits:
    pass
LIMITS = ci_limits.limits_of("The surface")


@pytest.fixture(scope="module")
def numbers():
    return surface.counts()


def test_nothing_is_above_its_limit(numbers):
    assert ci_limits.above_limit(numbers, LIMITS) == []
    assert numbers.keys() == LIMITS.keys()
    assert min(numbers.values()) > 0


def test_a_name_too_many_is_noticed(numbers):
    for name in numbers:
        assert ci_limits.above_limit(numbers, LIMITS | {name: numbers[name] - 1}) == [name]
    assert ci_limits.above_limit({"arguments of `new`": 1}, LIMITS) == ["arguments of `new`"]


def test_a_new_name_of_a_public_module_counts(numbers, monkeypatch):
    monkeypatch.setattr(so.losses, "__all__", [*so.losses.__all__, "wide_dtype"])
    monkeypatch.setattr(so.losses, "wide_dtype", int, raising=False)
    monkeypatch.setattr(surface, "shown_options", list)
    name = "public names in all"
    assert surface.counts()[name] == numbers[name] + 1


def test_a_new_argument_counts(numbers, monkeypatch):
    def ddp(tx, mesh, loss_fn, *, new=None):
        """Take one argument more than three."""

    monkeypatch.setattr(so, "ddp", ddp)
    monkeypatch.setattr(surface, "shown_options", list)
    assert surface.counts()["arguments of `ddp`"] == 4
