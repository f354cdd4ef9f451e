"""`so.nn.quantized_einsum`: its numbers by numpy, what it refuses, and that many devices quantise
as one.
"""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from support.host import host_params
from support.reference import relative_difference, train
from support.tiers import tiered

import shardopt as so
from shardopt.core._rounding import Precision, Rounding
from shardopt.kernels import _norm
from shardopt.low_precision import _einsum
from shardopt.low_precision import _product_kernels as kernels
from shardopt.low_precision._einsum import Normed, gated_mlp
from shardopt.low_precision._numbers import check_precision
from shardopt.low_precision._weight import RoundedWeight, form_of, joined
from shardopt.models import _decoder_block as decoder_block
from shardopt.models import _transformer as transformer
from shardopt.models import gpt
from shardopt.models._decoder_block import BlockStream
from shardopt.models._decoder_config import DecoderConfig
from shardopt.nn._norm import rms_norm
from shardopt.planning import Transformer
from shardopt.planning._models import RULES
from shardopt.trace._jaxprs import equations

KERNELS = ("forward", "gradient_of_tokens", "gradient_of_weight")
SUBSCRIPTS = "btd,dcf->cbtf"
MAX = {np.int8: 127, ml_dtypes.float8_e4m3fn: 448, ml_dtypes.float8_e5m2: 57344}


def rounded(a, axes, dtype):
    """Round each row to 8 bits; in numpy."""
    scale = np.abs(a).max(axes, keepdims=True) / MAX[dtype]
    scaled = a / np.where(scale == 0, 1, scale)
    return scale * (np.round(scaled) if dtype is np.int8 else scaled.astype(dtype).astype(a.dtype))


@pytest.mark.fast
@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_numbers_are_those_of_the_formula(precision, x64):
    rng = np.random.default_rng(0)
    x, w, g = (
        rng.normal(size=(2, 5, 16)),
        rng.normal(size=(16, 2, 3)),
        rng.normal(size=(2, 2, 5, 3)),
    )
    x[0, 1] = 0
    y, pull = jax.vjp(
        lambda x, w: so.nn.quantized_einsum(SUBSCRIPTS, x, w, precision=precision), x, w
    )
    # jax.checkpoint cannot keep it
    assert all(kept.dtype != jnp.float8_e4m3fn for kept in jax.tree.leaves(pull))
    dx, dw = pull(jnp.asarray(g))
    own = (
        (np.int8,) * 2 if precision == "int8" else (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
    )
    qx, qw = rounded(x, (2,), own[0]), rounded(w, (0,), own[0])
    expected = np.einsum(SUBSCRIPTS, qx, qw)
    np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-12)
    # the scales of the weight, and of x, are in the gradient before it is rounded
    weight_scale = (np.abs(w).max(0) / MAX[own[0]])[:, None, None]
    expected = np.einsum(
        "cbtf,dcf->btd", rounded(g * weight_scale, (0, 3), own[1]), qw / weight_scale[:, 0, 0]
    )
    np.testing.assert_allclose(dx, expected, rtol=1e-12, atol=1e-12)
    x_scale = np.abs(x).max(2, keepdims=True) / MAX[own[0]]
    numbers = np.divide(qx, x_scale, out=np.zeros_like(qx), where=x_scale != 0)
    expected = np.einsum("btd,cbtf->dcf", numbers, rounded(g * x_scale, (2,), own[1]))
    np.testing.assert_allclose(dw, expected, rtol=1e-12, atol=1e-12)
    # and near what they stand for
    error = relative_difference(y, np.einsum(SUBSCRIPTS, x, w))
    assert 1e-4 < error < {"int8": 0.02, "fp8": 0.06}[precision]


@pytest.mark.fast
@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_what_is_not_finite_stays_so(precision):
    # large: XLA:CPU drops NaN in such maxima
    x = jnp.ones((64, 256)).at[1, 2].set(jnp.nan).at[2, 0].set(jnp.inf)
    w = jnp.ones((256, 2))

    def product(x, w):
        return so.nn.quantized_einsum("td,df->tf", x, w, precision=precision)

    assert np.argwhere(~np.isfinite(product(x, w))).tolist() == [[1, 0], [1, 1], [2, 0], [2, 1]]
    for broken in (jnp.nan, jnp.inf):
        assert (
            np.isfinite(product(jnp.ones((64, 256)), w.at[7, 1].set(broken))).tolist()
            == [[True, False]] * 64
        )
        given = rounded_weight(w.at[7, 1].set(broken), 0, Rounding(precision))
        assert np.isfinite(product(jnp.ones((64, 256)), given)).tolist() == [[True, False]] * 64


@pytest.mark.fast
def test_a_single_dim_of_tokens_keeps_the_gradient_of_the_weight(x64):
    """Such a dim may be the batch, which devices share: they would have scales of their own rows."""
    rng = np.random.default_rng(1)
    x, w, g = (jnp.asarray(rng.normal(size=shape)) for shape in ((6, 4), (4, 3), (6, 3)))
    _, pull = jax.vjp(lambda w: so.nn.quantized_einsum("td,df->tf", x, w, precision="int8"), w)
    np.testing.assert_allclose(pull(g)[0], x.T @ g, rtol=1e-12)


def kernels_of(monkeypatch, precision="int8"):
    """Let `quantized_einsum` use its kernels for TPU.

    They run interpreted, since jax's devices are not TPUs.
    """
    kind = {"int8": "TPU v6 lite", "fp8": "TPU7x"}[precision]
    monkeypatch.setattr(_einsum, "device_kind_or_default", lambda: kind)


def rounded_weight(w, dim, rounding):
    """Return a weight as a block gets it that gathered its shards of a dim in 8 bits."""
    form = form_of(w.shape, dim, rounding)
    assert form is not None
    numbers, scale = form.round_rows(form.matrix(w), lambda maximum: maximum)
    return RoundedWeight.of(numbers, scale, w.dtype, form)


PRODUCTS = {
    "two parts, by channel": (
        "btd,dcf->cbtf",
        ((2, 256, 128), (128, 2, 128)),
        2,
        Rounding("int8", parts=2),
    ),
    "two parts": ("btd,dcf->cbtf", ((1, 128, 256), (256, 2, 128)), 0, Rounding("int8", parts=2)),
    "heads": ("btd,dhk->bthk", ((2, 128, 128), (128, 2, 128)), 0, Rounding("int8")),
    "narrow heads": ("btd,dhk->bthk", ((2, 128, 256), (256, 2, 64)), 0, Rounding("int8")),
    "of heads, by channel": (
        "bthk,hkd->btd",
        ((1, 256, 2, 128), (2, 128, 256)),
        2,
        Rounding("int8", summed=2),
    ),
    "wide heads, by summed": (
        "bthk,hkd->btd",
        ((1, 128, 2, 256), (2, 256, 128)),
        0,
        Rounding("int8", summed=2),
    ),
}


PRECISIONS = ["int8", "fp8"]


@pytest.mark.parametrize(
    ("precision", "name", "is_rounded"),
    tiered(
        itertools.product(PRECISIONS, PRODUCTS, [False, True]),
        # the rows that are left have parts and rows of channels; heads only change blocks
        lambda row: row[1] == "two parts, by channel" and (row[2] or row[0] == "int8"),
    ),
)
def test_kernels_compute_the_same_numbers(precision, name, is_rounded, monkeypatch):
    subscripts, shapes, dim, rounding = PRODUCTS[name]
    rounding = rounding._replace(precision=precision)
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.float32).at[:, 1].set(0) for shape in shapes)

    def product(x, w):
        return so.nn.quantized_einsum(subscripts, x, w, precision=precision)

    g = jnp.asarray(rng.normal(size=jax.eval_shape(product, x, w).shape), jnp.float32)

    def traced(w):
        def run(x, w, g):
            y, pull = jax.vjp(product, x, w)
            assert all(kept.dtype != jnp.float8_e4m3fn for kept in jax.tree.leaves(pull))
            return y, *pull(g)

        return jax.jit(run).trace(x, w, g)

    expected = traced(w).lower().compile()(x, w, g)
    given = rounded_weight(w, dim, rounding) if is_rounded else w
    kernels_of(monkeypatch, precision)
    by_kernels = traced(given)
    jaxpr = str(by_kernels.jaxpr)
    for kernel in ("round_rows", "round_columns", *(f"{precision}_{kernel}" for kernel in KERNELS)):
        assert kernel in jaxpr
    y, dx, dw = by_kernels.lower().compile()(x, given, g)
    dw = given.form.weight(joined(dw.zeros)) if is_rounded else dw
    for a, b in zip((y, dx, dw), expected, strict=True):
        assert relative_difference(a, b) < 1e-5  # of a step of the 8 bits, 1e-2


@pytest.mark.parametrize(
    ("precision", "is_rounded"),
    # the weights' forms differ alone
    tiered(itertools.product(PRECISIONS, [False, True]), lambda row: row[1]),
)
def test_kernels_compute_the_activation_of_an_mlp(precision, is_rounded, monkeypatch):
    rng = np.random.default_rng(0)
    shapes = (2, 256, 128), (128, 2, 128), (128, 128)
    x, up, down = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    dy = jnp.asarray(rng.normal(size=x.shape), jnp.float32)

    def by_products(x, up, down):
        gate, hidden = so.nn.quantized_einsum(SUBSCRIPTS, x, up, precision=precision)
        return so.nn.quantized_einsum(
            "btf,fd->btd", jax.nn.silu(gate) * hidden, down, precision=precision
        )

    def run(function, *operands):
        y, pull = jax.vjp(function, *operands)
        assert all(kept.dtype != jnp.float8_e4m3fn for kept in jax.tree.leaves(pull))
        return y, *pull(dy)

    mlp = functools.partial(gated_mlp, activation=jax.nn.silu, precision=precision)
    assert mlp(x, up, down) is None
    expected = jax.jit(functools.partial(run, by_products))(x, up, down)
    kernels_of(monkeypatch, precision)
    weights = [up, down]
    if is_rounded:
        weights = [
            rounded_weight(up, 2, Rounding(precision, parts=2)),
            rounded_weight(down, 0, Rounding(precision)),
        ]
    y, dx, *weight_gradients = jax.jit(functools.partial(run, mlp))(x, *weights)
    if is_rounded:
        weight_gradients = [grad.form.weight(joined(grad.zeros)) for grad in weight_gradients]
    for a, b in zip((y, dx, *weight_gradients), expected, strict=True):
        assert relative_difference(a, b) < 1e-4  # a number at a rounding boundary moves by one step


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_a_kernel_norms_and_rounds_the_same_numbers(dtype):
    rng = np.random.default_rng(0)
    x, scale = (jnp.asarray(rng.normal(size=size), dtype) for size in ((2, 64, 256), 256))
    x = x.at[1, 3].set(0)
    normed, found = rms_norm(x, scale, 1e-5), kernels.norm_and_round(x, scale, 1e-5, jnp.int8)
    expected = kernels.round_rows([normed[:, None]], jnp.int8)
    np.testing.assert_allclose(
        found.scale, expected.scale, rtol=1e-6 if dtype == jnp.float32 else 2**-8
    )
    steps = np.abs(found.numbers.astype(int) - expected.numbers.astype(int))
    assert steps.max() <= 1
    assert np.count_nonzero(steps) < 1e-3 * steps.size
    assert not np.any(found.numbers[1, 3])


def test_a_norm_within_the_kernel_has_the_gradient_of_the_norm(monkeypatch):
    """Both products and the mlp read one `Normed`."""
    rng = np.random.default_rng(0)
    shapes = (2, 256, 128), (128,), (128, 2, 128), (128, 2, 128), (128, 128)
    operands = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    cotangents = tuple(
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((2, 256, 2, 128), (2, 256, 128))
    )

    def run(is_normed, x, scale, q, up, down):
        normed = rms_norm(x, scale, 1e-5)
        given = Normed(normed, x, scale, 1e-5) if is_normed else normed
        query = so.nn.quantized_einsum("btd,dhk->bthk", given, q, precision="int8")
        return query, gated_mlp(given, up, down, activation=jax.nn.silu, precision="int8")

    def gradients(is_normed):
        out, pull = jax.vjp(functools.partial(run, is_normed), *operands)
        return *out, *pull(cotangents)

    kernels_of(monkeypatch)
    plain, jaxpr = (
        jax.jit(gradients, static_argnums=0)(False),
        jax.make_jaxpr(gradients, static_argnums=0)(True),
    )
    assert "norm_and_round" in str(jaxpr)
    for a, b in zip(jax.jit(gradients, static_argnums=0)(True), plain, strict=True):
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert error < 2e-3  # a number at a rounding boundary moves by one step


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
def test_what_is_added_is_rounded_to_its_own_dtype(dtype, monkeypatch):
    kernels_of(monkeypatch)
    rng = np.random.default_rng(0)
    x, w, added = (jnp.asarray(rng.normal(size=(1, 128, 128)), jnp.bfloat16) for _ in range(3))

    def run(added):
        return so.nn.quantized_einsum("btd,df->btf", x, w[0], precision="int8", added=added)

    found, pull = jax.vjp(run, added.astype(dtype))
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, run(None) + added.astype(dtype))
    np.testing.assert_array_equal(pull(found)[0], found)


@pytest.mark.parametrize("fused", ["kv", "qkv"])
def test_kernels_of_a_block_add_its_stream(fused, monkeypatch):
    """The last product of a branch adds it, and so does the gradient of a norm."""
    config = DecoderConfig(
        32,
        128,
        1,
        1,
        hidden=256,
        activation="silu",
        gated=True,
        norm="rms",
        precision="int8",
        fused=fused,
    )
    rng = np.random.default_rng(0)
    weights = jax.tree.map(
        lambda size: jnp.asarray(rng.normal(size=size) / 12, jnp.float32),
        decoder_block.block_shapes(config, dense=True),
        is_leaf=lambda size: isinstance(size, tuple),
    )
    x, grad = (jnp.asarray(rng.normal(size=(2, 128, 128)), jnp.float32) for _ in range(2))

    def results(weights, x):
        def run(weights, x):
            return decoder_block.apply_block(
                config, weights, BlockStream(x, None, None, None, None)
            ).x

        out, pull = jax.vjp(run, weights, x)
        return out, *pull(grad)

    plain = jax.jit(lambda *args: results(*args))(weights, x)
    kernels_of(monkeypatch)
    monkeypatch.setattr(_norm, "device_kind_or_default", lambda: "TPU v6 lite")
    jaxpr = jax.make_jaxpr(lambda *args: results(*args))(weights, x)
    assert str(jaxpr).count("name=gradient_of_norm") == 2
    sums = [
        eqn
        for eqn in equations(jaxpr)
        if eqn.primitive.name in ("add", "add_any") and eqn.outvars[0].aval.shape == x.shape
    ]
    assert len(sums) == 2  # the zeros of two norms
    for a, b in zip(
        jax.tree.leaves(jax.jit(lambda *args: results(*args))(weights, x)),
        jax.tree.leaves(plain),
        strict=True,
    ):
        # a number at a rounding boundary moves by one step
        assert np.linalg.norm(a - b) < 2e-3 * np.linalg.norm(b)


@pytest.mark.fast
def test_kernels_take_whole_rows_in_multiples_of_128(monkeypatch):
    kernels_of(monkeypatch)

    def uses_kernels(subscripts, *shapes, precision: Precision = "int8"):
        operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]

        def product(x, w):
            return so.nn.quantized_einsum(subscripts, x, w, precision=precision)

        return "int8_forward" in str(jax.make_jaxpr(product)(*operands))

    assert uses_kernels("btd,df->btf", (2, 128, 256), (256, 384))
    assert not uses_kernels("btd,df->btf", (2, 128, 256), (256, 384), precision="fp8")
    assert not uses_kernels("btd,df->btf", (2, 64, 256), (256, 384))
    assert not uses_kernels("btd,df->btf", (2, 128, 64), (64, 384))
    assert not uses_kernels("btd,df->btf", (2, 128, 256), (256, 64))
    assert not uses_kernels("td,df->tf", (128, 256), (256, 384))
    assert not uses_kernels("btd,df->tbf", (2, 128, 256), (256, 384))
    assert uses_kernels("btd,dcf->cbtf", (2, 128, 256), (256, 2, 384))


@pytest.mark.fast
def test_without_a_precision_it_is_einsum():
    x, w = jnp.ones((2, 3, 4), jnp.bfloat16), jnp.ones((4, 5), jnp.bfloat16)
    plain = str(jax.make_jaxpr(lambda x, w: jnp.einsum("btd,df->btf", x, w))(x, w))

    def given(x, w):
        return so.nn.quantized_einsum("btd,df->btf", x, w, precision=None)

    assert str(jax.make_jaxpr(given)(x, w)) == plain


@pytest.mark.fast
def test_what_is_refused():
    x = jnp.ones((2, 3))
    for subscripts in ("td,dt->t", "td,df", "td,ef->tdef", "td,df->t", "td->dt", "t.,.f->tf"):
        message = (
            f"quantized_einsum: subscripts {subscripts!r} are not a sum over the dims that two"
            " operands share.\nFix: write them like 'btd,dhk->bthk'; for others use jnp.einsum."
        )
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            so.nn.quantized_einsum(subscripts, x, x, precision="int8")
    with pytest.raises(
        ValueError,
        match=r"^quantized_einsum: `added` has shape \(5, 3\), and the product \(3, 5\)\.",
    ):
        so.nn.quantized_einsum(
            "td,df->tf", np.ones((3, 4)), np.ones((4, 5)), precision=None, added=np.ones((5, 3))
        )
    for wrong in (
        np.ones((2, 3, 4), np.float32),
        np.ones((3, 4), np.complex64),
        np.ones((3, 4), int),
    ):
        message = re.escape(f"an operand of 'td,df->tf' is {wrong.dtype}{list(wrong.shape)}.")
        with pytest.raises(
            ValueError, match=rf"{message}\nFix: give it a floating dtype, and the 2 dims of 'td'\."
        ):
            so.nn.quantized_einsum(
                "td,df->tf", wrong, np.ones((4, 5), np.float32), precision="int8"
            )
    message = (
        "GPTConfig: unknown precision 'int4'.\nFix: use 'int8', 'fp8', or None for that of the"
        " dtype."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_precision("GPTConfig", "int4")


@pytest.mark.fast
@pytest.mark.parametrize("precision", [pytest.param("int8", marks=pytest.mark.slow), "fp8"])
def test_the_gradient_of_a_product_is_not_differentiated(precision):
    """jax would differentiate roundings and scales, and the weight would have a wrong gradient, or
    none.
    """
    x, w, router = jnp.ones((1, 4, 8)), jnp.ones((2, 8, 8)), jnp.ones((8, 2))

    def experts(w, x):
        return so.nn.mixture_of_experts(
            {"up": w, "down": w}, x, router, top_k=1, precision=precision
        )[0]

    def product(w, x):
        return so.nn.quantized_einsum("btd,edf->btef", x, w, precision=precision)

    def looped(w, x):
        return jax.lax.scan(lambda x, w: (product(w[None], x)[:, :, 0], None), x, w)[0]

    for run in product, experts, jax.jit(product), jax.checkpoint(product), looped:

        def force(w, x, run=run):
            return jax.grad(lambda x: jnp.sum(jnp.cos(run(w, x))))(x)

        assert force(w, x).shape == x.shape

        def penalty(w, force=force):
            return jnp.sum(force(w, x) ** 2)

        with pytest.raises(
            TypeError,
            match=r"^quantized_einsum: the gradient of a product in 8 bits was differentiated",
        ):
            jax.grad(penalty)(w)

    def block(w, x):
        return x - jax.grad(lambda x: jnp.sum(jnp.cos(product(w["w"][None], x))))(x)

    model = so.BlockModel(lambda _, x: x, block, lambda _, x, __: jnp.mean(x**2), rounded={})
    with pytest.raises(TypeError, match="was differentiated"):
        jax.grad(model.loss_fn)({"blocks": {"w": w}}, x)


@jax.custom_vjp
def in_8_bits(x, w):
    """A user's own product: jax.checkpoint makes NaN of numbers of float8_e4m3fn above 240."""
    return own_forward(x, w)[0]


def own_forward(x, w):
    qx, qw = (
        (448 * a / jnp.abs(a).max(dim, keepdims=True)).astype(jnp.float8_e4m3fn)
        for a, dim in ((x, -1), (w, 0))
    )
    return jnp.einsum("btd,df->btf", qx.astype(x.dtype), qw.astype(x.dtype)) / 448**2, (qx, qw)


def own_backward(kept, g):
    qx, qw = (numbers.astype(g.dtype) for numbers in kept)
    return jnp.einsum("btf,df->btd", g, qw), jnp.einsum("btd,btf->df", qx, g)


in_8_bits.defvjp(own_forward, own_backward)


@pytest.mark.fast
@pytest.mark.parametrize("view", ["per_device", "global"])
def test_a_loss_that_is_not_of_blocks_keeps_its_numbers_of_8_bits(view, mesh_of, x64):
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=(8, 8)) for name in ("a", "b")}
    batches = [{"x": rng.normal(size=(4, 3, 8))} for _ in range(3)]

    def loss(params, batch):
        x = so.nn.quantized_einsum("btd,df->btf", batch["x"], params["a"], precision="fp8")
        return jnp.mean((x + in_8_bits(jnp.sin(x), params["b"])) ** 2)

    tx = optax.sgd(0.1, momentum=0.9)
    opt = so.fsdp(tx, mesh_of(data=2), loss, min_shard_elements=1, view=view)
    state = opt.init(params)
    for batch in batches:
        state, _ = opt.step(state, batch)
    assert relative_difference(state.params, train(tx, loss, params, batches)[1]) < 1e-10


@pytest.mark.fast
def test_blocks_may_save_everything(mesh_of, x64):
    rng = np.random.default_rng(0)
    params = {"blocks": {"w": rng.normal(size=(2, 8, 8))}}
    batches = [{"x": rng.normal(size=(4, 3, 8))} for _ in range(3)]
    model = so.BlockModel(
        lambda outer, batch: batch["x"],
        lambda w, x: x + so.nn.quantized_einsum("btd,df->btf", x, w["w"], precision="fp8"),
        lambda outer, x, batch: jnp.mean(x**2),
        remat=jax.checkpoint_policies.everything_saveable,
        rounded={"w": Rounding("fp8")},
    )
    tx = optax.sgd(1e-3, momentum=0.9)
    opt = so.fsdp(tx, mesh_of(data=2), model, min_shard_elements=1)
    state = opt.init(params)
    for batch in batches:
        state, _ = opt.step(state, batch)
    model = model._replace(remat=None, rounded={})
    assert relative_difference(state.params, train(tx, model.loss_fn, params, batches)[1]) < 1e-10


CONFIG = gpt.GPTConfig(vocab_size=32, dim=16, num_layers=2, num_heads=2, param_dtype=jnp.float64)
SHAPE = Transformer("t", 16, 2, 4, 32, 32, 8, num_kv_heads=2, dtype=jnp.float64)
# tensor does not shard attention
RULES_OF_MLP = [rule for rule in RULES if re.search("up|down", str(rule[0]))]
ROWS = [
    ("int8", "gpt", {"data": 4}, {"micro_batches": 2}),
    ("fp8", "transformer", {"data": 2, "tensor": 2}, {"rules": RULES}),
    ("fp8", "gpt", {"data": 4}, {"micro_batches": 2}),
    ("int8", "gpt", {"data": 2, "tensor": 2}, {"rules": gpt.rules}),
    ("int8", "gpt", {"data": 2, "pipeline": 2}, {"micro_batches": 4}),
    ("int8", "gpt", {"data": 2, "context": 2}, {}),
    ("int8", "transformer", {"replica": 2, "data": 2}, {}),
    ("int8", "transformer", {"data": 2, "tensor": 2}, {"rules": RULES_OF_MLP}),
]


# a scale that is not of a row or a column alone fails test_numbers_are_those_of_the_formula
@pytest.mark.slow
@pytest.mark.parametrize(("precision", "name", "sizes", "options"), ROWS, ids=str)
def test_many_devices_quantise_as_one(precision, name, sizes, options, mesh_of, x64):
    rng = np.random.default_rng(0)
    batches = [
        {"tokens": rng.integers(0, 32, (16, 8)), "targets": rng.integers(0, 32, (16, 8))}
        for _ in range(2)
    ]
    tx = optax.sgd(0.5, momentum=0.9)

    def trained(precision, opt=None):
        config = gpt.GPTConfig(**{**vars(CONFIG), "precision": precision})
        model = (
            gpt.model(config) if name == "gpt" else transformer.model(SHAPE, precision=precision)
        )
        params = (
            host_params(gpt.init, config) if name == "gpt" else host_params(transformer.init, SHAPE)
        )
        params = jax.tree.map(lambda leaf: leaf.astype(np.float64), params)
        if opt is None:
            return train(tx, model.loss_fn, params, batches)[1]
        strategy = opt(model)
        state = strategy.init(params)
        for batch in batches:
            state, _ = strategy.step(state, batch)
        return state.params

    make = so.hybrid if "pipeline" in sizes else so.fsdp
    found = trained(precision, lambda model: make(tx, mesh_of(**sizes), model, **options))
    assert relative_difference(found, trained(precision)) < 1e-10
    assert relative_difference(found, trained(None)) > 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "topology"), [("int8", "v5e:2x4"), ("fp8", "tpu7x:2x2x1")])
def test_on_tpu_the_products_are_in_eight_bits(precision, topology):
    """With their gradients. Fails where libtpu is not installed."""
    shape = Transformer("t", 256, 2, 4, 512, 1024, 128, num_kv_heads=2)
    report = so.planning.aot(
        lambda mesh: so.fsdp(optax.sgd(0.1), mesh, transformer.model(shape, precision=precision)),
        shape.abstract_params(),
        transformer.abstract_batch(shape, 16),
        topology=topology,
    )
    names = re.findall(rf"%{precision}_([a-z_]+)[.\w]* = .*tpu_custom_call", report.text)
    counts = 6, 5, 6  # gate and up are two products, whose gradients of tokens are one
    assert {name: names.count(name) for name in names} == dict(zip(KERNELS, counts, strict=True))
    # the activation is computed where it is rounded, and weights are gathered in 8 bits
    assert "round_rows_of" in report.text
    assert "round_columns_of" in report.text
    assert re.findall(
        rf" {'s8' if precision == 'int8' else 'f8e4m3fn'}\[\S+ all-gather\(", report.text
    )
