"""A restart with another batch size goes on at the next row, whatever the batches' state counts."""

import copy
import json
import re

import grain
import jax
import numpy as np
import optax
import pytest

import shardopt as so
from shardopt.step._global_rows import RowsOfOne
from shardopt.training._stream import END, BatchStream

NUM_ROWS = 640
BEFORE = 160


class Counting:
    """Batches whose state counts batches, as in the documentation."""

    def __init__(self, batch_size):
        self.batch_size = batch_size
        self.position = 0

    def __iter__(self):
        return self

    def __next__(self):
        start = self.position * self.batch_size
        if start + self.batch_size > NUM_ROWS:
            raise StopIteration
        self.position += 1
        return np.arange(start, start + self.batch_size, dtype=np.float32)

    def get_state(self):
        return {"position": self.position}

    def set_state(self, state):
        self.position = state["position"]


class CountingRows(Counting):
    """Batches whose state counts rows."""

    def get_state(self):
        return self.position * self.batch_size

    def set_state(self, state):
        self.position = state // self.batch_size


class Loader:
    """A loader as torchdata's: its state moves the next iterator, and has arrays and tuples."""

    def __init__(self, batch_size):
        self.batch_size = batch_size
        self.current = None
        self.next_state = None

    def __iter__(self):
        self.current = self._batches(self.next_state)
        self.next_state = None
        return self.current

    def _batches(self, state):
        self.yielded = 0 if state is None else int(state["yielded"][0])
        for start in range(self.yielded * self.batch_size, NUM_ROWS, self.batch_size):
            self.yielded += 1
            yield np.arange(start, start + self.batch_size, dtype=np.float32)

    def state_dict(self):
        if self.current is None:
            iter(self)
            self.yielded = 0
        return {"yielded": (np.int64(self.yielded),), 0: np.arange(3, dtype=np.uint8), "s": b"x"}

    def load_state_dict(self, state):
        assert (state["s"], type(state["yielded"])) == (b"x", tuple)
        np.testing.assert_array_equal(state[0], np.arange(3, dtype=np.uint8))
        self.current = None
        self.next_state = state


class Dataset:
    """An iterable as that of `datasets`: no state before it is iterated over."""

    def __init__(self, batch_size):
        self.batch_size = batch_size
        self.starting = None
        self.state = None

    def __iter__(self):
        self.state = copy.deepcopy(self.starting) or {"examples": 0, "shard": None}
        while self.state["examples"] + self.batch_size <= NUM_ROWS:
            start = self.state["examples"]
            self.state["examples"] += self.batch_size
            yield np.arange(start, start + self.batch_size, dtype=np.float32)

    def state_dict(self):
        return copy.deepcopy(self.state)

    def load_state_dict(self, state):
        self.starting = state


class Node:
    """Batches whose iterator has `state_dict`."""

    def __init__(self, batch_size):
        self.batch_size = batch_size

    def __iter__(self):
        inner = Counting(self.batch_size)
        inner.state_dict = inner.get_state
        inner.load_state_dict = inner.set_state
        return inner


def of_grain(batch_size):
    source = grain.MapDataset.source(np.arange(NUM_ROWS, dtype=np.float32))
    return source.batch(batch_size).to_iter_dataset()


def of_grain_loader(batch_size):
    return grain.DataLoader(
        data_source=np.arange(NUM_ROWS, dtype=np.float32),
        sampler=grain.samplers.IndexSampler(
            NUM_ROWS, grain.sharding.NoSharding(), shuffle=False, num_epochs=1, seed=1
        ),
        operations=[grain.transforms.Batch(batch_size)],
        worker_count=0,
    )


SOURCES = {
    "batches counted": Counting,
    "rows counted": CountingRows,
    "a loader": Loader,
    "a dataset": Dataset,
    "a node": Node,
    "grain": of_grain,
    "grain's loader": of_grain_loader,
    "no state": lambda batch_size: list(Counting(batch_size)),
    "a generator": lambda batch_size: (batch for batch in Counting(batch_size)),
}


@pytest.fixture(scope="module")
def rows():
    mesh = so.make_mesh(data=2, devices=jax.devices()[:2])
    opt = so.ddp(optax.sgd(0.1), mesh, lambda params, batch: ((batch - params) ** 2).mean())
    return RowsOfOne(opt.config)


def position_after(source, batch_size, num_rows, rows):
    stream = BatchStream(source(batch_size), rows)
    for _ in range(num_rows // batch_size):
        stream.draw()
    return json.loads(json.dumps(stream.position()))


def rest_of(stream):
    batches = []
    while (batch := stream.draw()) is not END:
        batches.append(batch)
    return np.concatenate(batches)


@pytest.mark.parametrize("batch_size", [16, 80, 160, 1])
@pytest.mark.parametrize("source", SOURCES)
def test_the_next_row_is_the_first_that_was_not_drawn(source, batch_size, rows):
    position = position_after(SOURCES[source], 16, BEFORE, rows)
    stream = BatchStream(SOURCES[source](batch_size), rows)
    text = stream.restore(position)
    saved_position = json.loads(json.dumps(stream.position()))
    np.testing.assert_array_equal(rest_of(stream), np.arange(BEFORE, NUM_ROWS))
    has_state = source not in ("no state", "a generator")
    if batch_size != 16:
        assert text == (f"the data by drawing 160 rows: batches have {batch_size}, they had 16")
    elif has_state:
        assert text == "the data from its saved state"
    # a position that was restored and saved again is the same row
    last = BatchStream(SOURCES[source](40), rows)
    last.restore(saved_position)
    np.testing.assert_array_equal(rest_of(last), np.arange(BEFORE, NUM_ROWS))


@pytest.mark.parametrize("batch_size", [64, 320, 12, 128])
@pytest.mark.parametrize("source", ["batches counted", "a loader", "grain", "no state"])
def test_a_batch_size_that_does_not_end_at_the_row_is_refused(source, batch_size, rows):
    position = position_after(SOURCES[source], 16, BEFORE, rows)
    stream = BatchStream(SOURCES[source](batch_size), rows)
    unseen = -BEFORE % batch_size
    message = (
        "fit: the checkpoint was saved after 160 rows, in batches of 16. Batches of"
        f" {batch_size} do not end there: {unseen} of the next rows would never be seen.\n"
        f"Fix: choose a batch size that divides 160, or train with batches of 16 rows to a"
        f" checkpoint after a multiple of {batch_size}."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        stream.restore(position)


class Varying(Counting):
    """Batches of varying sizes, and a state that counts rows: the sizes did not change."""

    def __next__(self):
        start = self.position
        if start >= NUM_ROWS:
            raise StopIteration
        self.position += 16 if start % 3 else 8
        return np.arange(start, self.position, dtype=np.float32)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_batches_of_varying_sizes_go_on_by_their_state(count, rows):
    stream = BatchStream(Varying(0), rows)
    for _ in range(count):
        stream.draw()
    position = json.loads(json.dumps(stream.position()))
    fresh = BatchStream(Varying(0), rows)
    assert fresh.restore(position) == "the data from its saved state"
    assert position.items() >= fresh.position().items()
    np.testing.assert_array_equal(rest_of(fresh), rest_of(stream))


def test_another_order_is_noticed_with_another_batch_size(rows):
    position = position_after(SOURCES["no state"], 16, BEFORE, rows)
    shuffled = np.random.default_rng(0).permutation(NUM_ROWS).astype(np.float32)
    stream = BatchStream(list(shuffled.reshape(-1, 32)), rows)
    with pytest.warns(UserWarning, match="the batches do not come as in the run that saved"):
        stream.restore(position)


def test_a_batch_that_was_drawn_to_look_at_its_size_is_not_counted(rows):
    position = position_after(Counting, 16, BEFORE, rows)
    stream = BatchStream(Counting(16), rows)
    stream.restore(position)
    assert stream.position()["state"] == position["state"]
    assert stream.drawn == 10
    np.testing.assert_array_equal(stream.draw(), np.arange(160, 176))
    assert stream.position()["rows"] == [176, 16, 16]


def test_fit_trains_on_each_row_once(tmp_path):
    mesh = so.make_mesh(data=2, devices=jax.devices()[:2])
    opt = so.ddp(optax.sgd(0.01), mesh, lambda params, batch: ((batch / 100 - params) ** 2).mean())

    def fit(batch_size, num_steps):
        with so.Checkpoints(tmp_path, every=100, keep=1) as checkpoints:
            return so.fit(
                opt,
                opt.init(np.zeros((), np.float32)),
                Counting(batch_size),
                num_steps=num_steps,
                checkpoints=checkpoints,
                progress=False,
            )

    fit(16, 10)
    state = fit(32, 25).state
    params = opt.init(np.zeros((), np.float32))
    for batch in (
        *np.arange(160, dtype=np.float32).reshape(10, 16),
        *np.arange(160, 640, dtype=np.float32).reshape(15, 32),
    ):
        params, _ = opt.step(params, batch)
    np.testing.assert_array_equal(state.params, params.params)
