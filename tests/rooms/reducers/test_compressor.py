"""The message of one sender equals its message in a mean over itself alone.

Nothing is lost, and no NaN is hidden.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiers import tiered

import shardopt as so
from shardopt import reducers

PLAIN = {
    "exact": lambda: reducers.exact(),
    "bf16": lambda: reducers.exact(jnp.bfloat16),
    "int8": lambda: reducers.int8(block_size=32),
    "sign": lambda: reducers.sign(block_size=16),
    "top_k": lambda: reducers.top_k(density=0.1),
    "power_sgd": lambda: reducers.power_sgd(rank=2),
}
ALL = PLAIN | {
    f"{name}, feedback": lambda make=make: reducers.error_feedback(make())
    for name, make in PLAIN.items()
}


def gradients(seed, dtype=np.float32):
    draw = np.random.default_rng(seed)
    shapes = {"w": (24, 20), "b": (7,), "blocks": {"v": (2, 16, 16)}, "empty": (0, 3), "one": ()}
    leaves, treedef = jax.tree.flatten(shapes, is_leaf=lambda node: isinstance(node, tuple))
    return treedef.unflatten([np.asarray(draw.normal(size=shape), dtype) for shape in leaves])


def assert_close(a, b, **tolerance):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(
            np.asarray(x, np.float64), np.asarray(y, np.float64), **tolerance
        )


@pytest.mark.parametrize(
    "name",
    tiered(
        ["exact", "int8", *(name for name in ALL if "feedback" in name)],
        lambda name: name.startswith(("int8, ", "sign, ", "top_k, ", "power_sgd, ")),
    ),
)
def test_a_message_says_what_a_mean_over_one_device_does(name, x64):
    """Several messages lose nothing: the values read and the values kept add up to the given
    values.
    """
    reducer = ALL[name]()
    like = gradients(0, np.float64)
    code = reducers.compressor(reducer)

    @jax.jit
    def both(grads, memory, state):
        message, memory = code.encode(grads, memory)
        stacked_args = jax.tree.map(lambda leaf: leaf[None], (grads, state))
        result = jax.vmap(lambda g, s: reducer.reduce(g, s, "data"), axis_name="data")(
            *stacked_args
        )
        wanted, state = jax.tree.map(lambda leaf: leaf[0], result)
        return code.decode(message, grads), memory, wanted, state

    memory = code.init(like)
    state = reducer.init(like)
    total_grads = read = jax.tree.map(np.zeros_like, like)
    for seed in range(3):
        grads = gradients(seed, np.float64)
        result, memory, wanted, state = both(grads, memory, state)
        assert_close(result, wanted, rtol=1e-9, atol=1e-9)
        total_grads = jax.tree.map(np.add, total_grads, grads)
        read = jax.tree.map(np.add, read, result)
    if "feedback" in name:
        assert_close(jax.tree.map(np.add, read, memory.unsent), total_grads, rtol=0, atol=1e-12)
        lossy = not name.startswith("exact")
        assert (
            any(np.abs(leaf).max(initial=0) > 1e-3 for leaf in jax.tree.leaves(memory.unsent))
            == lossy
        )


BYTES = {  # of the leaves above: 480, 7, 512, 0 and 1 numbers, 1000 in all
    "exact": 4 * 1000,
    "bf16": 2 * 1000,
    "int8": 1024 + 4 * 32,
    "sign": (1008 + 8 * 0) // 8 + 4 * 63,
    "top_k": 8 * (48 + 1 + 52 + 1),
    "power_sgd": 4 * (2 * (24 + 20) + 2 * 2 * (16 + 16) + 7 + 1),
}


@pytest.mark.parametrize("name", ALL)
def test_a_message_has_the_bytes_of_its_formula(name):
    assert reducers.compressor(ALL[name]()).nbytes(gradients(0)) == BYTES[name.split(", feed")[0]]


@pytest.mark.parametrize(
    "name",
    tiered(
        [
            "bf16, feedback",
            "int8, feedback",
            "sign, feedback",
            "top_k, feedback",
            "power_sgd, feedback",
        ],
        lambda name: name.startswith(("int8", "top_k", "power_sgd")),
    ),
)
def test_what_is_not_finite_is_not_hidden_and_not_remembered(name):
    code = reducers.compressor(ALL[name]())
    good = gradients(0)

    @jax.jit
    def send(grads, memory):
        message, memory = code.encode(grads, memory)
        assert sum(leaf.nbytes for leaf in jax.tree.leaves(message)) == code.nbytes(grads)
        return code.decode(message, grads), memory

    _, memory = send(good, code.init(good))
    for bad in (np.nan, np.inf):
        spoiled = good["w"].copy()
        spoiled[3, 4] = bad
        read, after = send({**good, "w": spoiled}, memory)
        assert not np.isfinite(read["w"]).all()
        assert_close(after, memory, rtol=0, atol=0)


@pytest.mark.parametrize(
    "name",
    tiered(["bf16", "int8", "top_k", "power_sgd"], lambda name: name in ("int8", "power_sgd")),
)
def test_half_precision_and_complex_leaves(name):
    grads = {
        "h": jnp.linspace(-1, 1, 64, dtype=jnp.bfloat16).reshape(8, 8),
        "c": jnp.full(4, 1 + 2j, jnp.complex64),
    }
    code = reducers.compressor(reducers.error_feedback(PLAIN[name]()))
    message, memory = jax.jit(code.encode)(grads, code.init(grads))
    decoded_grads, memory = jax.device_get((jax.jit(code.decode)(message, grads), memory))
    assert [leaf.dtype for leaf in jax.tree.leaves(decoded_grads)] == [jnp.complex64, jnp.bfloat16]
    assert [leaf.dtype for leaf in jax.tree.leaves(memory.unsent)] == [jnp.complex64, jnp.float32]
    total_grads = jax.tree.map(
        lambda read, unsent: read.astype(unsent.dtype) + unsent, decoded_grads, memory.unsent
    )
    np.testing.assert_allclose(total_grads["h"], grads["h"].astype(np.float32), atol=1e-6)
    np.testing.assert_allclose(total_grads["c"], grads["c"], atol=1e-6)


def test_bad_input_is_refused():
    with pytest.raises(TypeError) as caught:
        reducers.compressor(reducers.int8)
    assert (
        str(caught.value)
        == "compressor: reducer must be a Reducer, got int8.\nFix: pass one such as"
        " so.reducers.int8(), called."
    )
    fix = (
        "Fix: use exact, int8, sign, top_k or power_sgd, alone or in error_feedback, without a"
        " warm-up."
    )
    late = reducers.warm_up(reducers.power_sgd(rank=2), 5)
    for reducer, name in (
        (late, "warm_up(power_sgd(rank=2), steps=5)"),
        (reducers.error_feedback(late), "error_feedback(warm_up(power_sgd(rank=2), steps=5))"),
    ):
        with pytest.raises(ValueError, match="single sender") as caught:
            so.reducers.compressor(reducer)
        assert (
            str(caught.value)
            == f"compressor: {name} has no form that a single sender can write.\n{fix}"
        )


def in_blocks(values, size):
    """Return values as blocks [blocks, size], padded with zeros."""
    width = min(int(size), values.size)
    return np.pad(values, (0, -values.size % width)).reshape(-1, width)


def int8_formula(values, block_size):
    blocks = in_blocks(values, block_size)
    scales = np.max(np.abs(blocks), axis=1, keepdims=True) / 127
    scales = np.where(scales == 0, 1, scales).astype(values.dtype)
    return (np.round(blocks / scales) * scales).reshape(-1)[: values.size]


def sign_formula(values, block_size):
    blocks = in_blocks(values, block_size)
    counts = np.sum(in_blocks(np.ones_like(values), block_size), axis=1, keepdims=True)
    scales = np.sum(np.abs(blocks), axis=1, keepdims=True) / counts
    return (np.where(blocks >= 0, scales, -scales)).reshape(-1)[: values.size]


def top_k_formula(values, density):
    count = min(values.size, max(1, math.ceil(density * values.size - 1e-9 * values.size)))
    sent = np.argsort(-np.abs(values), kind="stable")[:count]
    entries = np.zeros_like(values)
    entries[sent] = values[sent]
    return entries


def of_rank_one(shape):
    """Return an array of rank 1 in any two of its dims."""
    product = np.full((), 3.0)
    for dim in shape:
        product = product[..., None] * np.linspace(-0.5, 1, dim)
    return product


FORMULAS = {
    "int8": (reducers.int8(block_size=32), int8_formula, 32),
    "sign": (reducers.sign(block_size=16), sign_formula, 16),
    "top_k": (reducers.top_k(density=0.1), top_k_formula, 0.1),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_message_is_what_its_formula_says(name, x64):
    reducer, formula, number = FORMULAS[name]
    code = reducers.compressor(reducer)
    leaves = [leaf for leaf in jax.tree.leaves(gradients(0, np.float64)) if leaf.size]

    @jax.jit
    def read(leaves):
        messages = [code.encode(leaf, code.init(leaf))[0] for leaf in leaves]
        return [code.decode(*pair) for pair in zip(messages, leaves, strict=True)]

    expected = [formula(leaf.reshape(-1), number).reshape(leaf.shape) for leaf in leaves]
    assert_close(read(leaves), expected, rtol=1e-12, atol=1e-12)


def test_a_message_of_power_sgd_is_all_of_a_matrix_of_its_rank(x64):
    code = reducers.compressor(reducers.power_sgd(rank=1))
    grads = {"w": of_rank_one((24, 20)), "blocks": {"v": of_rank_one((2, 16, 16))}}
    read = jax.jit(lambda grads: code.decode(code.encode(grads, code.init(grads))[0], grads))
    assert_close(read(grads), grads, rtol=1e-10, atol=1e-12)
