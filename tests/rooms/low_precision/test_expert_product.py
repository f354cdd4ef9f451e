"""Products of experts in 8 bits: their numbers by numpy, of rounded weights too, and on any number
of devices.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from support.host import host_params
from support.reference import relative_difference
from support.rounded import rounded_weight

import shardopt as so
from shardopt.core._rounding import Rounding
from shardopt.low_precision._expert_product import LOCAL, expert_products
from shardopt.low_precision._weight import RoundedForm
from shardopt.models import moe

SIZES = np.array([5, 0, 7, 2])  # one of the experts has no rows
M, K, N = 16, 12, 6  # the last two rows are of no expert
EXPERT_OF_ROW = np.repeat(np.arange(4), SIZES)
LARGEST = {np.int8: 127, ml_dtypes.float8_e4m3fn: 448, ml_dtypes.float8_e5m2: 57344}


def rounded(a, dim, dtype=np.int8):
    """Return numbers in 8 bits and their scales, in numpy."""
    scale = np.abs(a).max(dim, keepdims=True) / LARGEST[dtype]
    scaled = a / np.where(scale == 0, 1, scale)
    return np.round(scaled) if dtype is np.int8 else scaled.astype(dtype).astype(a.dtype), scale


def draw(*shapes, dtype=np.float64):
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


@pytest.mark.fast
@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_numbers_are_those_of_the_formula(precision, x64):
    x, w, g = draw((M, K), (4, K, N), (M, N))

    def product(x, w):
        return expert_products(x, [w], jnp.asarray(SIZES), precision, LOCAL)[0]

    y, pull = jax.vjp(product, x, w)
    # jax.checkpoint cannot keep it
    assert all(kept.dtype != jnp.float8_e4m3fn for kept in jax.tree.leaves(pull))
    dx, dw = pull(jnp.asarray(g))
    own = (
        (np.int8,) * 2 if precision == "int8" else (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
    )
    (qx, sx), (qw, sw) = rounded(x, 1, own[0]), rounded(w, 1, own[0])
    rows, has_expert = EXPERT_OF_ROW, np.arange(M) < len(EXPERT_OF_ROW)
    expected = np.zeros((M, N))
    expected[has_expert] = np.einsum("mk,mkn->mn", (qx * sx)[has_expert], (qw * sw)[rows])
    np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-12)
    expected = np.zeros((M, K))
    # the scales of channels are in the gradient before
    qg, sg = rounded(g[has_expert] * sw[rows, 0], 1, own[1])
    expected[has_expert] = np.einsum("mn,mkn->mk", qg * sg, qw[rows])
    np.testing.assert_allclose(dx, expected, rtol=1e-12, atol=1e-12)
    expected = [x[has_expert][rows == e].T @ g[has_expert][rows == e] for e in range(4)]
    np.testing.assert_allclose(dw, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.fast
def test_rows_of_no_expert_give_zero_whatever_they_are():
    """A buffer for rows of other devices holds what was there before."""
    x, w = draw((M, K), (4, K, N), dtype=np.float32)
    x[len(EXPERT_OF_ROW) :] = np.nan
    (y,) = expert_products(jnp.asarray(x), [jnp.asarray(w)], jnp.asarray(SIZES), "fp8", LOCAL)
    assert np.isfinite(y[: len(EXPERT_OF_ROW)]).all()
    assert not np.any(y[len(EXPERT_OF_ROW) :])


@pytest.mark.fast
@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_what_is_not_finite_stays_so(precision):
    x, w = draw((64, 256), (2, 256, 8), dtype=np.float32)

    def product(x, w):
        return np.isfinite(expert_products(x, [w], jnp.asarray([40, 24]), precision, LOCAL)[0])

    for broken in (np.nan, np.inf):
        assert np.argwhere(~product(jnp.asarray(x).at[50, 3].set(broken), w)).tolist() == [
            [50, n] for n in range(8)
        ]
        found = np.argwhere(~product(x, jnp.asarray(w).at[1, 3, 5].set(broken)))
        assert found.tolist() == [[row, 5] for row in range(40, 64)]


@pytest.mark.fast
@pytest.mark.parametrize("precision", ["int8", "fp8"])
@pytest.mark.parametrize("dim", [1, 2])
def test_a_weight_that_is_rounded_already_gives_the_same_numbers(precision, dim):
    x, w, g = draw((M, K), (4, K, N), (M, N), dtype=np.float32)

    def results(w):
        def product(x, w):
            return expert_products(x, [w], jnp.asarray(SIZES), precision, LOCAL)[0]

        y, pull = jax.vjp(product, jnp.asarray(x), w)
        assert all(kept.dtype != jnp.float8_e4m3fn for kept in jax.tree.leaves(pull))
        return y, *pull(jnp.asarray(g))

    expected = results(jnp.asarray(w))
    form = RoundedForm(Rounding(precision, experts=True), dim)
    y, dx, dw = results(rounded_weight(jnp.asarray(w), form))
    for a, b in zip((y, dx, dw.zeros), expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.fast
@pytest.mark.parametrize("rounding", [Rounding("fp8", experts=True), Rounding("int8")])
def test_a_weight_that_is_rounded_for_another_product_is_refused(rounding):
    weight = rounded_weight(jnp.ones((4, 128, 128)), RoundedForm(rounding, 1))
    message = re.escape(
        "describe it as so.nn.Rounding('int8', experts=True) in BlockModel.rounded, or take it out."
    )
    with pytest.raises(ValueError, match=message):
        expert_products(jnp.zeros((8, 128)), [weight], jnp.zeros(4, jnp.int32), "int8", LOCAL)


@pytest.mark.fast
def test_weights_of_experts_are_refused_where_they_cannot_be():
    form = RoundedForm(Rounding("int8", experts=True), 1)
    weight = rounded_weight(jnp.ones((4, 128, 128)), form)
    with pytest.raises(ValueError, match="is used in 'bte,edf->btdf'"):
        so.nn.quantized_einsum("bte,edf->btdf", jnp.zeros((2, 8, 4)), weight, precision="int8")
    cast = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), weight)
    with pytest.raises(
        TypeError, match=r"^mixture_of_experts: the arrays within a weight .* were cast"
    ):
        expert_products(jnp.zeros((8, 128)), [cast], jnp.zeros(4, jnp.int32), "int8", LOCAL)


CONFIG = moe.config(
    vocab_size=32,
    dim=16,
    num_layers=2,
    num_heads=4,
    num_experts=4,
    hidden=8,
    shared_hidden=4,
    precision="int8",
)


@pytest.mark.parametrize(
    "sizes",
    [
        {"expert": 2, "data": 2},
        pytest.param({"data": 2, "tensor": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_many_devices_round_as_one(sizes, mesh_of, x64):
    config = dataclasses.replace(CONFIG, param_dtype=jnp.float64)
    tokens, leaves = (
        np.random.default_rng(1).integers(0, 32, (4, 9)).astype(np.int32),
        {"rules": moe.rules},
    )
    tx, found = optax.sgd(0.3, momentum=0.9), []
    one = so.ddp(
        tx, so.make_mesh(devices=jax.devices()[:1]), moe.model(config), view="global", **leaves
    )
    many = so.fsdp(tx, mesh_of(**sizes), moe.model(config), min_shard_elements=8, **leaves)
    for opt in (many, one):
        state = opt.init(host_params(moe.init, config))
        for _ in range(2):
            state, metrics = opt.step(state, {"tokens": tokens})
        found.append((state.params, metrics["loss"]))
    assert relative_difference(found[0][0], found[1][0]) <= 1e-10
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-10)
    if "expert" in sizes:
        text = many.step.lower(state, {"tokens": tokens}).compile().as_text()
        # gate, up and down of the experts here
        assert len(re.findall(r"= \(?s8\[\S* all-gather\(", text)) >= 3
