"""`so.nn.quantized_einsum` has the numbers of numpy and refuses bad input. Many devices quantise as
one.
"""

import dataclasses
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
from support.rounded import rounded_weight

import shardopt as so
from benchmarks import transformer
from shardopt.core._rounding import Rounding
from shardopt.low_precision._numbers import check_precision
from shardopt.low_precision._weight import RoundedForm
from shardopt.models import gpt
from shardopt.planning import Transformer
from shardopt.planning._models import RULES

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
    x = rng.normal(size=(2, 5, 16))
    w = rng.normal(size=(16, 2, 3))
    g = rng.normal(size=(2, 2, 5, 3))
    x[0, 1] = 0
    y, pull = jax.vjp(
        lambda x, w: so.nn.quantized_einsum(SUBSCRIPTS, x, w, precision=precision), x, w
    )
    # jax.checkpoint cannot keep it
    assert all(residual.dtype != jnp.float8_e4m3fn for residual in jax.tree.leaves(pull))
    dx, dw = pull(jnp.asarray(g))
    storage_dtypes = (
        (np.int8,) * 2 if precision == "int8" else (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
    )
    qx = rounded(x, (2,), storage_dtypes[0])
    qw = rounded(w, (0,), storage_dtypes[0])
    expected = np.einsum(SUBSCRIPTS, qx, qw)
    np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-12)
    # the scales of the weight, and of x, are in the gradient before it is rounded
    weight_scale = (np.abs(w).max(0) / MAX[storage_dtypes[0]])[:, None, None]
    expected = np.einsum(
        "cbtf,dcf->btd",
        rounded(g * weight_scale, (0, 3), storage_dtypes[1]),
        qw / weight_scale[:, 0, 0],
    )
    np.testing.assert_allclose(dx, expected, rtol=1e-12, atol=1e-12)
    x_scale = np.abs(x).max(2, keepdims=True) / MAX[storage_dtypes[0]]
    numbers = np.divide(qx, x_scale, out=np.zeros_like(qx), where=x_scale != 0)
    expected = np.einsum("btd,cbtf->dcf", numbers, rounded(g * x_scale, (2,), storage_dtypes[1]))
    np.testing.assert_allclose(dw, expected, rtol=1e-12, atol=1e-12)
    # and near the exact products
    error = relative_difference(y, np.einsum(SUBSCRIPTS, x, w))
    assert 1e-4 < error < {"int8": 0.02, "fp8": 0.06}[precision]


@pytest.mark.fast
@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_what_is_not_finite_stays_so(precision):
    # large: XLA:CPU drops NaN in such maxima
    x = jnp.ones((64, 256)).at[1, 2].set(jnp.nan).at[2, 0].set(jnp.inf)
    w = jnp.ones((256, 2))

    @jax.jit
    def product(x, w):
        return so.nn.quantized_einsum("td,df->tf", x, w, precision=precision)

    assert np.argwhere(~np.isfinite(product(x, w))).tolist() == [[1, 0], [1, 1], [2, 0], [2, 1]]
    for broken in (jnp.nan, jnp.inf):
        assert (
            np.isfinite(product(jnp.ones((64, 256)), w.at[7, 1].set(broken))).tolist()
            == [[True, False]] * 64
        )
        weight = rounded_weight(w.at[7, 1].set(broken), RoundedForm(Rounding(precision), 0))
        assert np.isfinite(product(jnp.ones((64, 256)), weight)).tolist() == [[True, False]] * 64


@pytest.mark.fast
def test_a_single_dim_of_tokens_keeps_the_gradient_of_the_weight(x64):
    """Such a dim may be the batch, which devices share: they would have scales of their own rows."""
    rng = np.random.default_rng(1)
    x, w, g = (jnp.asarray(rng.normal(size=shape)) for shape in ((6, 4), (4, 3), (6, 3)))
    _, pull = jax.vjp(lambda w: so.nn.quantized_einsum("td,df->tf", x, w, precision="int8"), w)
    np.testing.assert_allclose(pull(g)[0], x.T @ g, rtol=1e-12)


PRODUCTS = {
    "a matrix": ("btd,df->btf", ((2, 3, 4), (4, 6)), 1),
    "two parts": ("btd,dcf->cbtf", ((2, 3, 4), (4, 2, 6)), 1),
    "heads": ("btd,dhk->bthk", ((2, 3, 4), (4, 2, 6)), 1),
    "of heads": ("bthk,hkd->btd", ((2, 3, 2, 4), (2, 4, 6)), 2),
}


@pytest.mark.fast
@pytest.mark.parametrize(
    ("name", "precision"),
    [*itertools.product(PRODUCTS, ["int8"]), ("two parts", "fp8"), ("of heads", "fp8")],
)
def test_a_weight_that_is_rounded_already_gives_the_same_numbers(name, precision):
    """Whichever dim of it devices share: a summed one, or one of its channels."""
    subscripts, shapes, summed = PRODUCTS[name]
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    x[:, 1] = 0
    w[:, 1] = 0

    def product(x, w):
        return so.nn.quantized_einsum(subscripts, x, w, precision=precision)

    def with_gradients(x, w):
        y, pull = jax.vjp(product, x, w)
        assert all(residual.dtype != jnp.float8_e4m3fn for residual in jax.tree.leaves(pull))
        return y, *pull(jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))

    @jax.jit
    def of_all_dims(x, w):
        forms = [
            RoundedForm(Rounding(precision, summed=summed), dim)
            for dim in sorted({0, 1, w.ndim - 1})
        ]
        by_rounded = [with_gradients(x, rounded_weight(w, form)) for form in forms]
        return with_gradients(x, w), [(y, dx, dw.zeros) for y, dx, dw in by_rounded]

    expected, by_rounded = of_all_dims(x, w)
    for results in by_rounded:
        for a, b in zip(results, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.fast
def test_without_a_precision_it_is_einsum():
    x = jnp.ones((2, 3, 4), jnp.bfloat16)
    w = jnp.ones((4, 5), jnp.bfloat16)
    plain = str(jax.make_jaxpr(lambda x, w: jnp.einsum("btd,df->btf", x, w))(x, w))

    def given(x, w):
        return so.nn.quantized_einsum("btd,df->btf", x, w, precision=None)

    assert str(jax.make_jaxpr(given)(x, w)) == plain


@pytest.mark.fast
def test_bad_input_is_refused():
    x = jnp.ones((2, 3))
    for subscripts in ("td,dt->t", "td,df", "td,ef->tdef", "td,df->t", "td->dt", "t.,.f->tf"):
        message = (
            f"quantized_einsum: subscripts {subscripts!r} are not a sum over the dims that two"
            " operands share.\nFix: write them like 'btd,dhk->bthk'; for others use jnp.einsum."
        )
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            so.nn.quantized_einsum(subscripts, x, x, precision="int8")
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
        "DecoderConfig: unknown precision 'int4'.\nFix: use 'int8', 'fp8', or None for that of the"
        " dtype."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_precision("DecoderConfig", "int4")


@pytest.mark.fast
@pytest.mark.parametrize("precision", [pytest.param("int8", marks=pytest.mark.slow), "fp8"])
def test_the_gradient_of_a_product_is_not_differentiated(precision):
    """jax would differentiate roundings and scales, and the weight would have a wrong gradient, or
    none.
    """
    x = jnp.ones((1, 4, 8))
    w = jnp.ones((2, 8, 8))

    def product(w, x):
        return so.nn.quantized_einsum("btd,edf->btef", x, w, precision=precision)

    def looped(w, x):
        return jax.lax.scan(lambda x, w: (product(w[None], x)[:, :, 0], None), x, w)[0]

    for run in product, jax.jit(product), jax.checkpoint(product), looped:

        def force(w, x, run=run):
            return jax.grad(lambda x: jnp.sum(jnp.cos(run(w, x))))(x)

        assert jax.eval_shape(force, w, x).shape == x.shape

        def penalty(w, force=force):
            return jnp.sum(force(w, x) ** 2)

        with pytest.raises(
            TypeError,
            match=r"^quantized_einsum: the gradient of a product in 8 bits was differentiated",
        ):
            jax.eval_shape(jax.grad(penalty), w)

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


def own_backward(residuals, g):
    qx, qw = (numbers.astype(g.dtype) for numbers in residuals)
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


CONFIG = gpt.config(vocab_size=32, dim=16, num_layers=2, num_heads=2, param_dtype=jnp.float64)
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
        config = dataclasses.replace(CONFIG, precision=precision)
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
    final_params = trained(precision, lambda model: make(tx, mesh_of(**sizes), model, **options))
    assert relative_difference(final_params, trained(precision)) < 1e-10
    assert relative_difference(final_params, trained(None)) > 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "topology"), [("int8", "v5e:2x4"), ("fp8", "tpu7x:2x2x1")])
def test_on_tpu_weights_are_gathered_in_eight_bits(precision, topology):
    """Fails where libtpu is not installed."""
    shape = Transformer("t", 256, 2, 4, 512, 1024, 128, num_kv_heads=2)
    report = so.planning.aot(
        lambda mesh: so.fsdp(optax.sgd(0.1), mesh, transformer.model(shape, precision=precision)),
        shape.abstract_params(),
        transformer.abstract_batch(shape, 16),
        topology=topology,
    )
    narrow = "s8" if precision == "int8" else "f8e4m3fn"
    assert re.findall(rf" {narrow}\[\S+ all-gather\(", report.text)
