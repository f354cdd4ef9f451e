"""The corpus reads the right files and leaks nothing. Its order is the same on every machine and
after a resume.
"""

import dataclasses
import itertools
import os
import re
from pathlib import Path

import numpy as np
import pytest

from shardopt import data

pytestmark = pytest.mark.fast


def text(path):
    corpus = data.open_corpus(path)
    return corpus.read(0, corpus.num_bytes).tobytes()


def digits(path, count):
    path.write_bytes(np.random.default_rng(0).integers(48, 58, count, np.uint8).tobytes())
    return data.open_corpus(path)


def rows(batches, count):
    return [batch["tokens"] for batch in itertools.islice(batches, count)]


def test_a_folder_is_read_in_the_order_of_paths_without_what_is_no_text(tmp_path):
    for name, content in {
        "b.txt": b"<b>",
        "a/z.txt": b"<a/z>",
        "a.txt": b"<a.txt>",
        "a/é.txt": "<é>".encode(),
        "empty.txt": b"",
        ".hidden": b"<hidden>",
        ".git/config": b"<git>",
        "__pycache__/x.py": b"<cache>",
        "image.png": b"\x89PNG\0<image>",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    assert text(tmp_path).decode() == "<a/z><é><a.txt><b>"
    # a file named outright is read whatever it holds
    assert text(tmp_path / "image.png") == b"\x89PNG\0<image>"


def test_any_range_is_read_across_files(tmp_path):
    for i in range(5):
        (tmp_path / f"{i}.txt").write_bytes(bytes([65 + i]) * (i + 1))
    contents = text(tmp_path)
    corpus = data.open_corpus(tmp_path)
    assert contents == b"ABBCCCDDDDEEEEE"
    for begin, end in itertools.combinations(range(16), 2):
        assert corpus.read(begin, end).tobytes() == contents[begin:end]


def test_the_default_is_the_standard_library_alone():
    corpus = data.open_corpus()
    names = [path.relative_to(Path(os.__file__).parent).as_posix() for path in corpus.paths]
    assert {"os.py", "json/decoder.py", "asyncio/events.py"} <= set(names)
    assert not [
        name
        for name in names
        if re.search(r"site-packages|(^|/)tests?/|pydoc_data|encodings/|\.pyc$", name)
    ]
    assert 5e6 < corpus.num_bytes < 60e6
    assert corpus == data.open_corpus()


@pytest.mark.parametrize("count", range(1000, 1010))
def test_windows_make_each_byte_but_the_first_a_target_once(tmp_path, count):
    corpus = digits(tmp_path / "text", count)
    contents = corpus.read(0, count)
    for windows in data.split(corpus, 7, validation=0.3):
        targets = np.concatenate([windows[i]["tokens"][1:] for i in range(len(windows))])
        np.testing.assert_array_equal(
            targets, contents[windows.begin + 1 : windows.begin + 1 + len(targets)]
        )
        assert 0 <= windows.end - windows.begin - 1 - len(targets) < 7
        inputs = np.concatenate([windows[i]["tokens"][:-1] for i in range(len(windows))])
        np.testing.assert_array_equal(inputs[1:], targets[:-1])
        assert windows[0]["tokens"].dtype == np.int32


@pytest.mark.parametrize("sizes", [(1000,), (500, 400, 60, 40), (10, 990), (100,) * 10, (960, 40)])
def test_no_byte_is_on_both_sides_and_files_stay_whole_where_they_can(tmp_path, sizes):
    for i, size in enumerate(sizes):
        (tmp_path / f"{i}.txt").write_bytes(b"x" * size)
    corpus = data.open_corpus(tmp_path)
    training, validation = data.split(corpus, 4, validation=0.05)
    assert (training.begin, training.end, validation.end) == (0, validation.begin, 1000)
    assert 25 <= 1000 - validation.begin <= 75
    if any(25 <= 1000 - start <= 75 for start in corpus.starts):
        assert validation.begin in corpus.starts


def test_an_epoch_holds_every_window_once_and_the_next_one_in_another_order(tmp_path):
    windows, _ = data.split(digits(tmp_path / "text", 4000), 16, validation=0.2)
    count = len(windows) // 3 * 3
    drawn = np.concatenate(
        rows(data.batches(dataclasses.replace(windows, end=count * 16 + 1), 3), 2 * count // 3)
    )
    epochs = drawn[:count], drawn[count:]
    everything = sorted(windows[i]["tokens"].tobytes() for i in range(count))
    for epoch in epochs:
        assert sorted(row.tobytes() for row in epoch) == everything
    assert (epochs[0] != epochs[1]).any()
    assert (epochs[0] != np.stack([windows[i]["tokens"] for i in range(count)])).any()


def test_the_seed_decides_the_order(tmp_path):
    windows, _ = data.split(digits(tmp_path / "text", 4000), 16)
    first, repeated_rows, other = (
        rows(data.batches(windows, 4, seed=seed), 5) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, repeated_rows)
    assert (np.stack(first) != np.stack(other)).any()


@pytest.mark.parametrize("position", [0, 1, 7, 40])
def test_an_iterator_goes_on_from_its_state_within_an_epoch_and_beyond(tmp_path, position):
    windows, _ = data.split(digits(tmp_path / "text", 1600), 16)
    iterator = iter(data.batches(windows, 4))
    unbroken = rows(data.batches(windows, 4), position + 5)
    rows(iterator, position)
    state = iterator.get_state()
    fresh = iter(data.batches(windows, 4))
    fresh.set_state(state)
    np.testing.assert_array_equal(rows(fresh, 5), unbroken[position:])


def test_validation_batches_lie_evenly_over_the_range_and_stay_the_same(tmp_path):
    windows = data.Windows(digits(tmp_path / "text", 1601), 0, 1601, 16)
    assert len(windows) == 100
    batches = data.spread_batches(windows, 4, 5)
    expected = np.stack([windows[5 * i]["tokens"] for i in range(20)]).reshape(5, 4, 17)
    np.testing.assert_array_equal([batch["tokens"] for batch in batches], expected)
    few = data.spread_batches(dataclasses.replace(windows, end=49), 4, 2)
    repeated = [windows[i]["tokens"] for i in (0, 0, 0, 1, 1, 1, 2, 2)]
    np.testing.assert_array_equal(np.concatenate([batch["tokens"] for batch in few]), repeated)
    with pytest.raises(ValueError, match="spread_batches: batch_size must be at least 1, got 0"):
        data.spread_batches(windows, 0, 2)
    with pytest.raises(ValueError, match="spread_batches: num_batches must be at least 1, got 0"):
        data.spread_batches(windows, 4, 0)


def test_bytes_and_text_go_to_and_fro():
    assert data.decode(data.encode("def f(): pass  # é")) == "def f(): pass  # é"
    assert data.decode(data.encode("é")[:1]) == "\ufffd"


def test_what_is_missing_or_empty_is_refused(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.txt").touch()
    for path, kind, problem, fix in [
        (
            tmp_path / "none.txt",
            FileNotFoundError,
            f"there is no file or folder '{tmp_path}/none.txt'.",
            "check the path; without one, Python's own source is read.",
        ),
        (
            tmp_path / "empty.txt",
            ValueError,
            f"'{tmp_path}/empty.txt' is empty.",
            "name a text file, or a folder that holds some.",
        ),
        (
            tmp_path / "folder",
            ValueError,
            f"there is no text in the folder '{tmp_path}/folder'.",
            "name a text file, or a folder that holds some.",
        ),
    ]:
        with pytest.raises(
            kind, match=f"^{re.escape(f'data.open_corpus: {problem}')}\nFix: {re.escape(fix)}$"
        ):
            data.open_corpus(path)


def test_text_too_short_for_its_windows_is_refused(tmp_path):
    corpus = digits(tmp_path / "text", 1000)
    message = (
        "data.split: 1000 bytes of text, 950 to train on and 50 to validate, are too few for windows of"
        " 65 bytes on both sides.\nFix: give more text, or choose shorter windows."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        data.split(corpus, 64)
    assert len(data.split(corpus, 49)[1]) == 1


def test_numbers_out_of_range_are_refused(tmp_path):
    corpus = digits(tmp_path / "text", 1000)
    with pytest.raises(ValueError, match=r"^data\.split: length must be at least 1, got 0\.$"):
        data.split(corpus, 0)
    with pytest.raises(
        ValueError, match=r"^data\.split: validation must be between 0 and 1, got 1\.0\.$"
    ):
        data.split(corpus, 4, validation=1.0)
    with pytest.raises(
        ValueError, match=r"^data\.batches: batch_size must be at least 1, got 0\.$"
    ):
        data.batches(data.split(corpus, 4)[0], 0)


def test_a_text_that_shrank_is_noticed(tmp_path):
    windows, _ = data.split(digits(tmp_path / "text", 1000), 9)
    (tmp_path / "text").write_bytes(b"short")
    message = (
        f"data.Corpus: '{tmp_path}/text' is shorter than when the corpus was opened: 5 bytes and no"
        " more.\nFix: leave the text alone while a model trains on it."
    )
    with pytest.raises(OSError, match=f"^{re.escape(message)}$"):
        windows[0]
