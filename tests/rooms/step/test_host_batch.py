"""A batch without rows travels as text to a process that has none, and nothing is unpickled."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardopt as so
from shardopt.models import gpt
from shardopt.step._host_batch import from_text, to_text
from shardopt.step._rows import AgreedRows

pytestmark = pytest.mark.fast


class Pair(NamedTuple):
    first: np.ndarray


TREES = {
    "dict": {"x": np.zeros((0, 3), np.float32), "y": np.zeros((0,), np.int64)},
    "shared leaf": {"x": np.zeros((0, 3)), "table": np.arange(6.0).reshape(2, 3)},
    "bfloat16": [np.zeros((0, 2), jnp.bfloat16), np.ones((), bool)],
    "nested": ({"a": [np.zeros((0,), np.uint8)]}, None, (3, 2.5, True)),
    "array": np.zeros((4, 0, 2), np.complex64),
}


@pytest.mark.parametrize("name", TREES)
def test_a_batch_comes_back_with_its_structure_shapes_dtypes_and_shared_values(name):
    tree = TREES[name]
    copy = from_text(to_text(tree))
    assert jax.tree.structure(copy) == jax.tree.structure(tree)
    for leaf, expected in zip(jax.tree.leaves(copy), jax.tree.leaves(tree), strict=True):
        assert np.asarray(leaf).dtype == np.asarray(expected).dtype
        np.testing.assert_array_equal(leaf, expected)


@pytest.mark.parametrize(
    "tree",
    [Pair(np.zeros(0)), {"x": [Pair(np.zeros(0))]}, {"key": object()}],
    ids=["named tuple", "named tuple within", "object"],
)
def test_a_batch_that_text_cannot_hold_gives_none(tree):
    assert to_text(tree) is None


TOKENS = np.ones((2, 8), np.int64)
BAD = {
    "beyond the vocabulary": ({"tokens": np.full((2, 9), 32)}, "tokens: 32, and the model has 0"),
    "negative": ({"tokens": np.full((2, 9), -100)}, "tokens: -100, and the model has 0"),
    "target": ({"tokens": TOKENS, "targets": 40 * TOKENS}, "targets: 40, and the model has 0"),
    "64 bits": ({"tokens": np.full((2, 9), 2**40)}, "jax stores integers in 32 bits"),
    "global": (so.GlobalRows({"tokens": np.full((2, 9), 32)}), "tokens: 32, and the model has 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_rows_of_a_process_are_looked_at_before_they_are_joined(name):
    config = gpt.config(vocab_size=32, dim=16, num_layers=1, num_heads=2)
    opt = so.ddp(optax.sgd(0.1), so.make_mesh(), gpt.model(config))
    batch, problem = BAD[name]
    with pytest.raises(ValueError, match=problem):
        AgreedRows(opt.config, "step").join(batch)
