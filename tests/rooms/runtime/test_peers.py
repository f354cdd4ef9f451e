"""Threads of several processes agree on a step: all hear the same answer, whoever comes late."""

import threading
import time

import jax
import pytest

from shardopt.runtime import _peers
from shardopt.runtime._peers import Peers

pytestmark = pytest.mark.fast


class Store:
    """The key-value store of the coordination service, in memory."""

    def __init__(self):
        self.texts = {}
        self.lock = threading.Lock()

    def key_value_set(self, key, text):
        with self.lock:
            if key in self.texts:
                raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: {key}")
            self.texts[key] = text

    def key_value_try_get(self, key):
        if key not in self.texts:
            raise jax.errors.JaxRuntimeError(f"NOT_FOUND: {key}")
        return self.texts[key]

    def key_value_dir_get(self, folder):
        with self.lock:
            return [(key, text) for key, text in self.texts.items() if key.startswith(folder)]


@pytest.fixture
def peers(monkeypatch):
    """Three processes of a run."""
    store = Store()
    monkeypatch.setattr(_peers, "coordination_client", lambda: store)
    monkeypatch.setattr(_peers, "_run_numbers", iter([7, 7, 7]))
    monkeypatch.setattr("jax.process_count", lambda: 3)
    processes = []
    for rank in range(3):
        monkeypatch.setattr("jax.process_index", lambda rank=rank: rank)
        processes.append(Peers())
    return processes


def answers(peers, steps, round_number=0, delays=(0, 0, 0)):
    """Return the answer of each process; None for a step means that the process does not come."""
    heard = {}

    def ask(rank):
        time.sleep(delays[rank])
        heard[rank] = peers[rank].all_are_at(steps[rank], round_number)

    ranks = [rank for rank, step in enumerate(steps) if step is not None]
    threads = [threading.Thread(target=ask, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [heard[rank] for rank in ranks]


def test_all_at_one_step_hear_yes(peers):
    assert answers(peers, [5, 5, 5]) == [True] * 3


@pytest.mark.parametrize("steps", [[5, 5, 6], [6, 5, 5], [5, 6, 7]])
def test_all_hear_no_if_one_is_at_another_step_and_yes_once_it_has_come(peers, steps):
    assert answers(peers, steps) == [False] * 3
    assert answers(peers, [7, 7, 7], round_number=1) == [True] * 3


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_all_hear_no_if_one_does_not_come_and_so_does_that_one_when_it_comes(
    peers, missing, monkeypatch
):
    monkeypatch.setattr(_peers, "_ROUND_SECONDS", 0.05)
    steps = [None if rank == missing else 5 for rank in range(3)]
    assert answers(peers, steps) == [False] * 2
    late = [5 if rank == missing else None for rank in range(3)]
    assert answers(peers, late) == [False]


@pytest.mark.parametrize("late", [0, 1, 2])
def test_one_that_comes_at_the_last_moment_hears_what_the_others_hear(peers, late, monkeypatch):
    monkeypatch.setattr(_peers, "_ROUND_SECONDS", 0.1)
    delays = [0.1 if rank == late else 0 for rank in range(3)]
    assert len(set(answers(peers, [5, 5, 5], delays=delays))) == 1


def test_the_first_verdict_counts_for_all(peers):
    assert [process.verdict() for process in peers] == [None] * 3
    peers[1].tell("interrupted")
    peers[2].tell("sigterm")
    assert [process.verdict() for process in peers] == ["interrupted"] * 3
