"""The model of a shape: sequence parallelism is the same step, and shards what blocks hand on."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.host import host_params
from support.layouts import SHAPE
from support.reference import relative_difference, train

import shardopt as so
from benchmarks import transformer
from shardopt.data import next_token
from shardopt.hlo import audit, inner_product_flops
from shardopt.models import decoder
from shardopt.models._decoder_config import BlockKind, DecoderConfig
from shardopt.nn import _mlp, _projections, _sequence_parallel
from shardopt.nn._mlp import mlp
from shardopt.nn._parted_products import Parts, products_with_parts
from shardopt.nn._projections import query_key_value
from shardopt.planning._models import RULES

TX = optax.sgd(0.1, momentum=0.9)
SMALL = dataclasses.replace(
    SHAPE, num_layers=2, length=8, dtype=jnp.float64, param_dtype=jnp.float64
)


def model(**options):
    return transformer.model(SMALL, remat="full", **options)


def batches(steps):
    rng = np.random.default_rng(0)
    return [
        {"tokens": rng.integers(0, SMALL.vocab_size, (4, SMALL.length + 1)).astype(np.int32)}
        for _ in range(steps)
    ]


def test_sequence_parallel_steps_are_those_of_one_device(mesh_of, x64):
    params = host_params(transformer.init, SMALL)
    opt = so.fsdp(
        TX,
        mesh_of(data=2, tensor=2),
        model(sequence_parallel=True),
        rules=RULES,
        min_shard_elements=8,
    )
    state = opt.init(params)
    step = opt.step.lower(state, batches(1)[0]).compile()
    for batch in batches(3):
        state, _ = step(state, batch)
    _, final = train(TX, model().loss_fn, params, batches(3))
    assert relative_difference(state.params, final) <= 1e-10
    collectives = audit(step).collectives
    # blocks gather the positions of their input: twice forwards, and again to differentiate
    gathers = sum(
        collective.calls
        for collective in collectives
        if collective.kind == "all-gather" and collective.axes == ("tensor",)
    )
    assert gathers >= 4 * SMALL.num_layers


@pytest.mark.parametrize(
    ("rows", "view"),
    [
        (8, None),
        pytest.param(6, None, marks=pytest.mark.slow),
        pytest.param(8, "global", marks=pytest.mark.slow),
    ],
    ids=["halves", "three rows a device", "XLA partitions rows"],
)
def test_halves_of_the_rows_take_turns_on_tpu(rows, view, monkeypatch, mesh_of, x64):
    """Rows are packed and have weights. Messages of one half do not wait for the other half."""
    rng = np.random.default_rng(0)
    shape = rows, SMALL.length
    packed = {name: rng.integers(0, SMALL.vocab_size, shape) for name in ("tokens", "targets")}
    packed |= {
        "weights": rng.uniform(size=shape),
        "segment_ids": np.sort(rng.integers(0, 3, shape)),
    }
    packed |= {"positions": rng.integers(0, SMALL.length, shape)}
    params = host_params(transformer.init, SMALL)
    steps = [packed, {**packed, "weights": packed["weights"] ** 2}]

    def mean(params, batch):
        loss = model().loss_fn(params, batch)
        return loss.total / loss.weight

    expected = train(TX, mean, params, steps)[1]
    for name, value in (("device_kind_or_default", lambda: "TPU v5"), ("_TOKENS_OF_HALF", 1)):
        monkeypatch.setattr(_sequence_parallel, name, value)
    options = {"rules": RULES, "min_shard_elements": 8} | ({"view": view} if view else {})
    opt = so.fsdp(TX, mesh_of(data=2, tensor=2), model(sequence_parallel=True), **options)
    state = opt.init(params)
    step = opt.step.lower(state, steps[0]).compile()
    for batch in steps:
        state, _ = step(state, batch)
    assert relative_difference(state.params, expected) <= 1e-10
    half = f"f64[2,{SMALL.length},{SMALL.dim}]"
    gathers = [
        collective
        for collective in audit(step).collectives
        if collective.kind == "all-gather" and collective.axes == ("tensor",)
    ]
    of_halves = sum(collective.calls * collective.shapes.count(half) for collective in gathers)
    assert (of_halves >= 8 * SMALL.num_layers) if rows == 8 and view is None else not of_halves


def test_positions_that_tensor_does_not_divide_are_refused(mesh_of):
    odd = dataclasses.replace(SHAPE, num_layers=2, length=7)
    opt = so.fsdp(
        TX, mesh_of(data=2, tensor=2), transformer.model(odd, sequence_parallel=True), rules=RULES
    )
    message = (
        "decoder: sequence_parallel shards 7 positions over tensor=2, which does not divide them.\n"
        "Fix: choose a length that 2 divides, or leave sequence_parallel out."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        opt.step.lower(
            opt.abstract_state(odd.abstract_params()), transformer.abstract_batch(odd, 4)
        )


@pytest.mark.parametrize(
    ("hidden", "shape"), [(4, "6,8"), (8, "6,1,8")], ids=["one matrix", "parts"]
)
def test_gate_and_up_are_the_same_product_on_tpu(monkeypatch, hidden, shape):
    """On TPU the two parts do not stand in the middle: XLA would copy the gathered weights of each
    block.
    """
    rng = np.random.default_rng(0)
    up, bias, down = (rng.normal(size=size) for size in ((6, 2, hidden), (2, hidden), (hidden, 6)))
    weights = {"up": up, "up_bias": bias, "down": down}
    weights, x = jax.tree.map(jnp.asarray, (weights, rng.normal(size=(2, 3, 6))))

    def results(weights, x):
        out, pull = jax.vjp(
            lambda weights, x: mlp(x, weights, jax.nn.silu, recompute=False), weights, x
        )
        return out, *pull(jnp.ones_like(out))

    on_cpu = jax.jit(results)(weights, x)
    monkeypatch.setattr(_mlp, "device_kind_or_default", lambda: "TPU v5")
    text = str(jax.make_jaxpr(lambda x: mlp(x, weights, jax.nn.silu, recompute=False))(x))
    assert f"f32[{shape}]" in text
    # another function, or jax would take the program of the CPU
    on_tpu = jax.jit(lambda weights, x: results(weights, x))(weights, x)
    assert relative_difference(on_tpu, on_cpu) <= 1e-6


@pytest.mark.parametrize(
    ("parts", "shape"),
    [
        (Parts("btd,df->btf", "btd,df->btf", "f", 2), (4, 10)),
        (Parts("btd,df->btf", "btd,dcf->cbtf", "c", 2), (4, 2, 5)),
    ],
    ids=["columns of a matrix", "indices of a dim"],
)
@pytest.mark.parametrize(
    ("x_dtype", "dtype"), [(jnp.float32, jnp.bfloat16), (jnp.bfloat16, jnp.float32)]
)
def test_gradients_of_products_with_parts_have_the_dtypes_of_what_they_are_of(
    parts, shape, x_dtype, dtype
):
    x = jnp.ones((2, 3, 4), x_dtype)
    weight = jnp.ones(shape, dtype)

    def loss(x, weight):
        return jnp.sum(products_with_parts(parts, x, weight)[0])

    grads = jax.eval_shape(jax.grad(loss, (0, 1)), x, weight)
    assert [grad.dtype for grad in grads] == [x_dtype, dtype]


def test_keys_and_values_are_the_halves_of_one_product_on_tpu(monkeypatch):
    """XLA would copy a kept product to part it, in both passes."""
    rng = np.random.default_rng(0)
    weights = {"q": (6, 4, 4), "kv": (6, 2, 8)}
    weights = {name: jnp.asarray(rng.normal(size=size)) for name, size in weights.items()}
    x = jnp.asarray(rng.normal(size=(2, 5, 6)))

    def results(weights, x):
        qkv, pull = jax.vjp(lambda weights, x: query_key_value(x, weights, None), weights, x)
        return qkv, pull(jax.tree.map(jnp.cos, qkv))

    on_cpu = jax.jit(results)(weights, x)
    monkeypatch.setattr(_projections, "device_kind_or_default", lambda: "TPU v5")
    assert "split" in str(jax.make_jaxpr(lambda x: query_key_value(x, weights, None))(x))
    # another function, or jax would take the program of the CPU
    on_tpu = jax.jit(lambda weights, x: results(weights, x))(weights, x)
    assert relative_difference(on_tpu, on_cpu) <= 1e-6


def windowed(*windows):
    kinds = tuple(BlockKind(window=window) for window in windows)
    return DecoderConfig(
        dim=16, num_layers=2, num_heads=2, hidden=16, vocab_size=32, kinds=kinds, pattern=(0, 1)
    )


def test_a_window_as_long_as_the_row_is_none_and_blocks_choose_no_kernel():
    params = jax.jit(lambda key: decoder.init(windowed(None, None), key))(jax.random.key(0))
    tokens = np.arange(18).reshape(2, 9)
    traced = {}
    for window in 7, 8, 20:
        loss_fn = decoder.model(windowed(window, None)).loss_fn
        traced[window] = (
            jax.jit(loss_fn)(params, {"tokens": tokens}),
            "cond" in str(jax.make_jaxpr(loss_fn)(params, {"tokens": tokens})),
        )
    full_loss = jax.jit(decoder.model(windowed(None, None)).loss_fn)(params, {"tokens": tokens})
    assert traced[8] == traced[20] == (full_loss, False)
    assert traced[7][1]
    assert traced[7][0] != full_loss


def mean_loss(config):
    def loss_fn(params, batch):
        loss = decoder.model(config).loss_fn(params, batch)
        return loss.total / loss.weight

    return loss_fn


@pytest.mark.slow
def test_a_row_is_that_of_all_devices_of_the_context_axis(mesh_of, x64):
    """Each has four positions of eight, and a window of six hides keys."""
    config = dataclasses.replace(windowed(6, None), param_dtype=jnp.float64)
    params = decoder.init(config, jax.random.key(0))
    tx = optax.sgd(0.1, momentum=0.9)
    tokens = np.random.default_rng(0).integers(0, 32, (2, 3, 9)).astype(np.int32)
    batches = [next_token({"tokens": rows}) for rows in tokens]
    opt = so.ddp(tx, mesh_of(context=2), decoder.model(config))
    state = opt.init(params)
    for batch in batches:
        state, _ = opt.step(state, batch)
    _, final = train(tx, mean_loss(config), params, batches)
    assert relative_difference(state.params, final) <= 1e-10
    _, seen = train(tx, mean_loss(windowed(None, None)), params, batches)
    assert relative_difference(seen, final) > 1e-3


@pytest.mark.slow
def test_no_kept_product_is_computed_again_for_a_norm():
    """The gradient of a norm reads its input, so products are kept before it."""
    tokens = {"tokens": jnp.arange(18).reshape(2, 9)}

    def flops(extra_names="", **options):
        config = dataclasses.replace(windowed(None, None), **options)
        model = decoder.model(
            config, remat="save:qkv,attention,attention_out,mlp_hidden" + extra_names
        )
        params = decoder.init(config, jax.random.key(0))
        return inner_product_flops(jax.jit(jax.grad(model.loss_fn)).lower(params, tokens).compile())

    without = flops()
    assert [flops(qk_norm=norm) - without for norm in ("head", "all")] == [0, 0]
    assert flops(",mlp_out", post_norms=True) == without
    down = 2 * 16 * 16 * 16 * 2  # tokens, width, hidden units, of each block
    assert flops(post_norms=True) == without + down
