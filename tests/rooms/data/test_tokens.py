"""Documents of tokens: each line is read as written, and every line that cannot be used is named."""

import numpy as np
import pytest

from shardopt import data

pytestmark = pytest.mark.fast

GOOD = '{"tokens": [5, 6, 7], "weights": [0, 0.5, 1]}'


def test_lines_are_documents_that_pack_takes(tmp_path):
    path = tmp_path / "tokens.jsonl"
    path.write_text(f"\ufeff{GOOD}\n\n{GOOD}")
    documents = data.read_tokens(path, vocab_size=8)
    assert len(documents) == 2
    np.testing.assert_array_equal(documents[1]["tokens"], [5, 6, 7])
    (row,) = data.pack(documents, 6)
    np.testing.assert_array_equal(row["weights"], [0.5, 1, 0, 0.5, 1, 0])
    path.write_text(f'{{"tokens": [5, 6], "weights": [1, {10**30}]}}')  # beyond an integer of numpy
    assert data.read_tokens(path, vocab_size=8)[0]["weights"][1] == np.float32(1e30)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{'tokens': 1}", "Expecting property name enclosed in double quotes"),
        ("[" * 100_000, "maximum recursion depth exceeded"),
        ("[1]", "must be an object with 'tokens' and 'weights' alone"),
        ('{"tokens": [1, 2]}', "must be an object with 'tokens' and 'weights' alone"),
        ('{"tokens": [], "weights": []}', "'tokens' must be a list of numbers"),
        ('{"tokens": "ab", "weights": [1, 1]}', "'tokens' must be a list of numbers"),
        ('{"tokens": [1, 2], "weights": [0, true]}', "'weights' must be a list of numbers"),
        ('{"tokens": [1, 8], "weights": [0, 1]}', "'tokens' must be integers from 0 to 7"),
        ('{"tokens": [-1, 2], "weights": [0, 1]}', "'tokens' must be integers from 0 to 7"),
        ('{"tokens": [1.5, 2], "weights": [0, 1]}', "'tokens' must be integers from 0 to 7"),
        ('{"tokens": [1, 2], "weights": [1]}', "has 2 tokens and 1 weight"),
        ('{"tokens": [1, 2], "weights": [1, 0]}', "'weights' must be from 0 on, and some after"),
        ('{"tokens": [1, 2], "weights": [0, NaN]}', "'weights' must be from 0 on, and some after"),
        ('{"tokens": [1, 2], "weights": [1, 1e39]}', "'weights' must be from 0 on, and some after"),
        (
            '{"tokens": [1, 2], "weights": [1, 1e-99]}',
            "'weights' must be from 0 on, and some after",
        ),
        (f'{{"tokens": [1, 2], "weights": [1, {10**400}]}}', "int too large to convert to float"),
        ('{"tokens": [1, 2], "weights": [-1, 1]}', "'weights' must be from 0 on, and some after"),
    ],
)
def test_a_line_of_another_form_is_named(line, problem, tmp_path):
    path = tmp_path / "tokens.jsonl"
    path.write_text(f"{GOOD}\n{line}\n{GOOD}")
    with pytest.raises(ValueError, match=r"data\.read_tokens: 1 line of ") as error:
        data.read_tokens(path, vocab_size=8)
    assert f"line 2: {problem}" in str(error.value)


def test_a_file_without_documents_is_refused(tmp_path):
    path = tmp_path / "tokens.jsonl"
    path.write_text("")
    with pytest.raises(ValueError, match="has no documents"):
        data.read_tokens(path, vocab_size=8)
