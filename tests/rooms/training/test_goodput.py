"""Goodput: every second belongs to one cause, and restarts are part of the account."""

import json

import pytest

from shardopt.runtime import _progress as progress
from shardopt.training import _goodput as goodput
from shardopt.training._fit import fit
from shardopt.training._goodput import FILE, Goodput, Ledger


@pytest.fixture
def clock(monkeypatch):
    """A clock that is turned by hand, and processes that begin when the account does."""

    class Clock:
        now = 1000.0

        def pass_(self, seconds):
            self.now += seconds

    clock = Clock()
    for name in ("time", "monotonic"):
        monkeypatch.setattr(goodput.time, name, lambda: clock.now)
    monkeypatch.setattr(goodput, "_WRITE_SECONDS", 0.0)
    monkeypatch.delenv("SHARDOPT_BEGAN", raising=False)
    monkeypatch.setattr(progress, "_lanes", {})
    return clock


def train(ledger, clock, steps, *, begin=2.0, compile=5.0, every=3):
    ledger.enter("begin", 0)
    clock.pass_(begin)
    for number, step in enumerate(steps):
        ledger.enter("data", step)
        clock.pass_(0.25)
        ledger.enter("step")
        clock.pass_(0.25 if number else compile)
        ledger.enter("wait")
        clock.pass_(0.5)
        if (step + 1) % every == 0:
            ledger.enter("checkpoint")
            clock.pass_(1.0)
        ledger.enter("agree")


@pytest.mark.fast
def test_every_second_has_a_cause_across_a_hang_and_a_death(clock, tmp_path, monkeypatch):
    first = Ledger(tmp_path)
    train(first, clock, range(5))
    assert first.total() == Goodput(
        4.75 / 12.75, 4.75, 12.75, {"start": 2.0, "compile": 5.0, "checkpoint": 1.0}, restarts=0
    )
    clock.pass_(30)  # it hangs for twenty of these
    monkeypatch.setenv("SHARDOPT_HUNG_SECONDS", "20")
    second = Ledger(tmp_path)
    train(second, clock, range(3, 7), begin=1.0)
    account = second.total()
    assert account.restarts == 1
    assert account.lost == {
        "start": 2.0,
        "compile": 10.0,
        "checkpoint": 2.0,
        "redone": 0.75 + 1.0,  # steps 3 and 4
        "restart": 11.0,
        "hang": 20.0,
    }
    assert account.useful == 4.75 + 2.0
    assert account.seconds == clock.now - 1000 == account.useful + sum(account.lost.values())
    second.write(ended_well=True)
    monkeypatch.delenv("SHARDOPT_HUNG_SECONDS")
    clock.pass_(3600)  # nobody wanted it to run
    third = Ledger(tmp_path)
    train(third, clock, range(7, 9))
    assert third.total().seconds == pytest.approx(account.seconds + 9.75)
    assert third.total().restarts == 2


@pytest.mark.fast
def test_goodput_prints_its_share_and_its_losses():
    report = Goodput(0.5, 50.0, 100.0, {"compile": 40.0, "hang": 1.0}, 0)
    assert str(report) == (
        "goodput 50% of 100 s, in steps taken for the first time; lost to compile 40%, hang 1.0%"
    )


@pytest.mark.fast
@pytest.mark.parametrize("text", ["", "[]", '{"attempts": [{"began": 1}]}', '{"attempts": 3}'])
def test_a_damaged_account_begins_again(clock, tmp_path, text):
    (tmp_path / FILE).write_text(text)
    assert Ledger(tmp_path).total().restarts == 0


def test_fit_keeps_the_account_beside_the_checkpoints(opt, new_state, batches, memory, tmp_path):
    checkpoints = memory(every=10, resume=True)
    checkpoints.directory = tmp_path
    result = fit(opt, new_state(), batches, num_steps=25, checkpoints=checkpoints, progress=False)
    (attempt,) = json.loads((tmp_path / FILE).read_text())["attempts"]
    assert attempt["ended_well"]
    assert attempt["step"] == 25
    assert set(attempt["seconds"]) == {"start", "compile", "useful", "checkpoint"}
    assert 0 < result.goodput.useful < result.goodput.seconds
    assert sum(attempt["seconds"].values()) == pytest.approx(result.goodput.seconds, rel=1e-3)
    assert 0 < result.history[0]["goodput"] < 1
    second_run = fit(
        opt, result.state, iter([]), num_steps=25, checkpoints=checkpoints, progress=False
    )
    assert second_run.goodput.restarts == 1
    assert second_run.goodput.seconds >= result.goodput.seconds
