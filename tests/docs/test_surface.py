"""The surface stays within the limits of CONTRIBUTING.md, and a name or argument too many is
noticed.
"""

import importlib.util

import pytest
from support.paths import ROOT

import shardopt as so

SPEC = importlib.util.spec_from_file_location("surface", ROOT / ".ci" / "surface.py")
surface = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(surface)
LIMITS = surface.limits_of((ROOT / "CONTRIBUTING.md").read_text())


@pytest.fixture(scope="module")
def numbers():
    return surface.counts()


def test_nothing_is_above_its_limit(numbers):
    assert surface.grown(numbers, LIMITS) == []
    assert numbers.keys() == LIMITS.keys()


def test_a_name_too_many_is_noticed(numbers):
    for name in numbers:
        assert surface.grown(numbers, LIMITS | {name: numbers[name] - 1}) == [name]
    assert surface.grown({"arguments of `new`": 1}, LIMITS) == ["arguments of `new`"]


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
