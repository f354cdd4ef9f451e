"""Packing: nothing is lost, doubled or out of order, documents stay apart, and a run goes on from
where it was.
"""

import itertools
import json
import re

import grain
import numpy as np
import optax
import pytest
from hypothesis import strategies as st
from support.fuzz import fuzz

import shardopt as so
from shardopt import data
from shardopt.step._global_rows import RowsOfOne

pytestmark = pytest.mark.fast

LENGTHS = st.integers(1, 12)
OPEN_ROWS = st.integers(1, 5)
COUNTS = [30, pytest.param(100, marks=pytest.mark.slow)]


@st.composite
def document_lists(draw):
    """Documents of 0 to 30 tokens, all of them different."""
    sizes = draw(st.lists(st.integers(0, 30), max_size=25))
    return np.split(np.arange(1, sum(sizes) + 1), np.cumsum(sizes)[:-1]) if sizes else []


def segments(row):
    """Return the places of each segment of a row."""
    return [np.flatnonzero(row["segment_ids"] == i) for i in range(1, row["segment_ids"].max() + 1)]


def assert_same_rows(ours, expected_rows):
    assert len(ours) == len(expected_rows)
    for row, other in zip(ours, expected_rows, strict=True):
        for name in row:
            np.testing.assert_array_equal(row[name], other[name], err_msg=name)


@pytest.mark.parametrize("count", [30, pytest.param(100, marks=pytest.mark.slow)])
def test_every_token_is_in_one_row_once_and_in_order(count):
    def prop(documents, length, open_rows):
        rows = list(data.pack(documents, length, open_rows=open_rows))
        packed_pieces = {}  # first token of a piece -> the piece
        for row in rows:
            assert {name: (x.shape, str(x.dtype)) for name, x in row.items()} == {
                name: ((length,), "float32" if name == "weights" else "int32") for name in row
            }
            used = row["segment_ids"] > 0
            assert (np.diff(used.astype(int)) <= 0).all()  # padding is at the end
            for at in segments(row):
                assert (np.diff(at) == 1).all()
                np.testing.assert_array_equal(row["positions"][at], np.arange(len(at)))
                packed_pieces[row["tokens"][at[0]]] = row["tokens"][at]
            for name, values in row.items():
                assert not values[~used].any(), name
        wanted = [
            document[i : i + length]
            for document in documents
            for i in range(0, len(document), length)
        ]
        assert sum(len(segments(row)) for row in rows) == len(packed_pieces) == len(wanted)
        for piece in wanted:
            np.testing.assert_array_equal(packed_pieces[piece[0]], piece)

    fuzz(prop, document_lists(), LENGTHS, OPEN_ROWS, count=count)


@pytest.mark.parametrize("count", COUNTS)
def test_pairs_of_token_and_target_are_those_of_the_documents(count):
    def prop(documents, length, open_rows):
        rows = list(data.pack(documents, length, open_rows=open_rows))
        pairs = [
            pair
            for row in rows
            for pair in zip(row["tokens"], row["targets"], row["weights"], strict=True)
        ]
        packed = sorted((token, target) for token, target, weight in pairs if weight == 1)
        assert packed == sorted(
            pair for document in documents for pair in itertools.pairwise(document)
        )
        assert all(target == weight == 0 for _, target, weight in pairs if weight != 1)

    fuzz(prop, document_lists(), LENGTHS, OPEN_ROWS, count=count)


@pytest.mark.parametrize("count", COUNTS)
def test_rows_are_filled_first_fit(count):
    def prop(documents, length, open_rows):
        expected, rows = [], []  # rows as lists of pieces
        for piece in (d[i : i + length] for d in documents for i in range(0, len(d), length)):
            place = next((row for row in rows if sum(map(len, row)) + len(piece) <= length), None)
            if place is None and len(rows) == open_rows:
                expected = expected + rows
                rows = []
            if place is None:
                rows.append(place := [])
            place.append(piece)
        packed = list(data.pack(documents, length, open_rows=open_rows))
        assert [[row["tokens"][at].tolist() for at in segments(row)] for row in packed] == [
            [piece.tolist() for piece in row] for row in expected + rows
        ]
        # as the docstring says, of rows filled together
        for first, second in itertools.pairwise(packed):
            if open_rows >= len(packed):
                assert (first["segment_ids"] > 0).sum() + (second["segment_ids"] > 0).sum() > length

    fuzz(prop, document_lists(), LENGTHS, OPEN_ROWS, count=count)


@pytest.mark.default
@pytest.mark.parametrize("count", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_an_iterator_goes_on_from_any_state_and_packing_twice_is_the_same(count):
    def prop(documents, length, open_rows, batch_size):
        dataset = data.pack(documents, length, open_rows=open_rows).batch(batch_size)
        iterator = iter(dataset)
        unbroken = []
        states = []
        for batch in iterator:
            unbroken.append(batch)
            states.append(json.loads(json.dumps(iterator.get_state())))
        assert_same_rows(
            list(data.pack(documents, length, open_rows=open_rows).batch(batch_size)), unbroken
        )
        for position, state in enumerate(states, 1):
            fresh = iter(data.pack(documents, length, open_rows=open_rows).batch(batch_size))
            fresh.set_state(state)
            assert_same_rows(list(fresh), unbroken[position:])

    fuzz(prop, document_lists(), LENGTHS, OPEN_ROWS, st.integers(1, 3), count=count)


def test_an_iterator_of_shuffled_epochs_goes_back_and_forth():
    documents = [np.full(size, size) for size in range(1, 12)]

    def rows():
        return data.pack(
            grain.MapDataset.source(documents).shuffle(seed=3).repeat(), 16, open_rows=2
        )

    iterator = iter(rows())
    drawn = []
    states = []
    for _ in range(20):  # two epochs or more
        states.append(iterator.get_state())
        drawn.append(next(iterator))
    assert (np.concatenate([row["tokens"] for row in drawn]) == 11).sum() > 11
    for position in (13, 2, 0, 19):
        iterator.set_state(states[position])
        assert_same_rows([next(iterator)], drawn[position : position + 1])


def test_the_files_of_a_corpus_and_any_iterable_are_documents(tmp_path):
    for i in range(5):
        (tmp_path / f"{i}.txt").write_bytes(bytes([65 + i]) * (i + 1))
    corpus = data.open_corpus(tmp_path)
    documents = data.Documents(corpus)
    assert [
        data.decode(document) for document in (documents[i] for i in range(len(documents)))
    ] == [
        "A",
        "BB",
        "CCC",
        "DDDD",
        "EEEEE",
    ]
    with pytest.raises(IndexError, match=r"^document 5 of 5$"):
        documents[5]
    expected = list(data.pack([documents[i] for i in range(5)], 6))
    assert data.decode(expected[0]["tokens"]) == "ABBCCC"
    for same in (
        corpus,
        documents,
        (documents[i].tolist() for i in range(5)),
        grain.MapDataset.source(documents),
    ):
        assert_same_rows(list(data.pack(same, 6)), expected)
    assert_same_rows(
        list(data.pack(grain.MapDataset.source(documents).to_iter_dataset(), 6)), expected
    )


@pytest.mark.parametrize(
    ("document", "kind", "message"),
    [
        ([0.5, 1.5], TypeError, "data.pack: a document must hold integer token ids, got float64."),
        (
            [[1, 2]],
            ValueError,
            "data.pack: a document must be 1-D, of token ids from 0 on; got shape (1, 2).",
        ),
        (
            [1, -1],
            ValueError,
            "data.pack: a document must be 1-D, of token ids from 0 on; got token -1.",
        ),
    ],
)
def test_documents_of_no_tokens_are_refused(document, kind, message):
    # grain adds a note
    with pytest.raises(kind, match=f"^{re.escape(message)}(\n-+\nFor simplicity, Grain|$)"):
        next(iter(data.pack([document], 4)))


def test_numbers_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r"^data\.pack: length must be at least 1, got 0\.$"):
        data.pack([[1]], 0)
    with pytest.raises(ValueError, match=r"^data\.pack: open_rows must be at least 1, got -1\.$"):
        data.pack([[1]], 4, open_rows=-1)


def test_windows_become_inputs_and_targets(tmp_path):
    (tmp_path / "text").write_bytes(b"to be or not to be")
    windows = data.Windows(data.open_corpus(tmp_path / "text"), 0, 18, 4)
    batch = next(iter(data.batches(windows, 2)))
    split_batch = next(iter(data.batches(windows, 2).map(data.next_token)))
    np.testing.assert_array_equal(split_batch["tokens"], batch["tokens"][:, :-1])
    np.testing.assert_array_equal(split_batch["targets"], batch["tokens"][:, 1:])
    assert data.next_token(batch | {"weights": 3})["weights"] == 3
    for wrong, shapes in [
        (split_batch, "tokens [2, 4], targets [2, 4]"),
        ({"tokens": np.zeros((2, 1), int)}, "tokens [2, 1]"),
        ({"inputs": np.zeros((2, 3), int)}, "inputs [2, 3]"),
        ({}, "nothing"),
    ]:
        message = (
            "data.next_token: a batch must have tokens [..., T + 1], T at least 1, and no targets; it"
            f" has {shapes}."
        )
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            data.next_token(wrong)


def test_the_position_of_a_run_in_packed_rows_is_saved_by_fit():
    rows = RowsOfOne(so.ddp(optax.sgd(0.1), so.make_mesh(), lambda params, batch: 0.0).config)
    batches = data.pack([np.arange(1, 8)] * 9, 8, open_rows=3).batch(2)
    stream = so.training._stream.BatchStream(batches, rows)
    stream.draw()
    position = json.loads(json.dumps(stream.position()))
    expected = stream.draw()
    batches = data.pack([np.arange(1, 8)] * 9, 8, open_rows=3).batch(2)
    fresh = so.training._stream.BatchStream(batches, rows)
    assert fresh.restore(position) == "the data from its saved state"
    assert_same_rows([fresh.draw()], [expected])
