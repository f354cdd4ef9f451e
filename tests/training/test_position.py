import json
import re

import grain
import pytest

from shardopt.training.resume import END, Stream


def draw(stream, count):
    return [stream.draw() for _ in range(count)]


def put_back(batches, position):
    """Return a stream at the position, which went through JSON, and how it got there."""
    stream = Stream(batches)
    how = stream.restore(json.loads(json.dumps(position)))
    return stream, how


SOURCES = {
    "list": lambda: list(range(20)),
    "iterator": lambda: iter(range(20)),
    "map_dataset": lambda: grain.MapDataset.source(range(20)).shuffle(seed=1),
    "prefetched": lambda: grain.MapDataset.source(range(20)).shuffle(seed=1).to_iter_dataset(),
    "batched": lambda: grain.MapDataset.source(range(40)).shuffle(seed=1).to_iter_dataset().map(lambda x: x + 1),
    "loader": lambda: grain.DataLoader(
        data_source=range(20),
        sampler=grain.samplers.IndexSampler(20, grain.sharding.NoSharding(), shuffle=True, num_epochs=1, seed=1),
        worker_count=0,
    ),
}


@pytest.mark.parametrize("count", [0, 1, 7, 19, 20])
@pytest.mark.parametrize("source", SOURCES)
def test_round_trip(source, count):
    make = SOURCES[source]
    stream = Stream(make())
    draw(stream, count)
    restored, how = put_back(make(), stream.position())
    assert restored.drawn == stream.drawn == count
    assert draw(restored, 20 - count) == draw(stream, 20 - count)
    assert how == (
        f"the data by drawing {count} {'batch' if count == 1 else 'batches'}"
        if source in ("list", "iterator")
        else "the data from its saved state"
    )


def test_the_end():
    stream = Stream([1, 2])
    assert draw(stream, 4) == [1, 2, END, END]
    assert stream.drawn == 2
    restored, _ = put_back([1, 2], stream.position())
    assert restored.draw() is END


def test_too_few_batches():
    stream = Stream(range(9))
    draw(stream, 5)
    message = (
        "fit: the batches end after 3, but the checkpoint was saved after 5.\n"
        "Fix: pass a fresh iterator over the same data."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        put_back(range(3), stream.position())


class Stateful:
    def __init__(self, state):
        self.state = state

    def __iter__(self):
        return self

    def __next__(self):
        return 0

    def get_state(self):
        return self.state

    def set_state(self, state):
        if state != self.state:
            raise KeyError("epoch")


@pytest.mark.parametrize("state", [{"a": [1, {"b": None}], "c": 1.5}, b"\x00\xff", "text", 3])
def test_states_that_survive(state):
    assert put_back(Stateful(state), Stream(Stateful(state)).position())[1] == "the data from its saved state"


@pytest.mark.parametrize("state", [{1: 2}, {"a": (1, 2)}, object(), {"a": b"x"}])
def test_states_that_do_not(state):
    with pytest.raises(TypeError) as caught:
        Stream(Stateful(state)).position()
    assert str(caught.value) == (
        f"fit: the state of the batch iterator does not survive JSON: {state!r}\n"
        "Fix: let get_state return bytes, or dicts, lists, strings and numbers."
    )


def test_a_state_that_is_refused():
    message = (
        "fit: the batches cannot be put back to their position after 0 batches: 'epoch'\n"
        "Fix: pass batches made as in the run that saved it."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        put_back(Stateful("other"), Stream(Stateful("one")).position())
