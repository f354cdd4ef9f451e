"""Values that a function has no meaning for: an error, ignored as in torch, or NaN, and never a finite
number. docs/values.md has the table.
"""

import dataclasses
import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.mean_of import mean_of
from support.paths import ROOT
from support.tiers import tiered

import shardopt as so
from shardopt import data
from shardopt.models import _sampling, decoder, gpt, moe
from shardopt.models.decoder import DecoderConfig

V = 16
HEAD = jnp.asarray(np.random.default_rng(0).normal(size=(V, 8)), jnp.float32)
X = jnp.asarray(np.random.default_rng(1).normal(size=(1, 6, 8)), jnp.float32)
OUT_OF_RANGE = [-1, -2, -V, -99, -101, V, V + 1, 2**31 - 1, -(2**31)]
FORMS = [{}, {"chunk": 2}, {"logits_dtype": jnp.bfloat16}, {"softcap": 5.0}]
CONFIGS = {
    "gpt": (gpt, gpt.config(vocab_size=V, dim=16, num_layers=1, num_heads=2, max_length=8)),
    "moe": (moe, moe.config(vocab_size=V, dim=16, num_layers=1, num_heads=2, max_length=8)),
    "decoder": (
        decoder,
        DecoderConfig(vocab_size=V, dim=16, num_layers=1, num_heads=2, hidden=16, positions=8),
    ),
}
NAMES = tiered(CONFIGS, lambda name: name == "decoder")
TOKENS = np.random.default_rng(2).integers(0, V, (4, 9)).astype(np.int32)


def test_every_public_function_of_values_is_in_the_table():
    text = (ROOT / "docs/values.md").read_text()
    listed = set(re.findall(r"`so\.(\w+\.\w+)`", text))
    rooms = {"nn": so.nn, "losses": so.losses, "data": data}
    public = {f"{room}.{name}" for room, module in rooms.items() for name in module.__all__}
    assert public - listed == set()


@functools.cache
def compiled_cross_entropy(options):
    """Return a program of the nats of positions, and of the gradient of their sum."""

    @jax.jit
    def with_gradient(x, targets):
        nats, pull_back = jax.vjp(
            lambda x: so.nn.cross_entropy(x, HEAD, targets, **dict(options)), x
        )
        return nats, pull_back(jnp.ones_like(nats))[0]

    return with_gradient


def nats_and_gradient(targets, options, x=X):
    return jax.device_get(compiled_cross_entropy(tuple(options.items()))(x, targets))


@pytest.mark.parametrize("target", tiered(OUT_OF_RANGE, lambda target: target in (-1, V)))
@pytest.mark.parametrize("options", FORMS)
def test_a_target_that_is_no_token_is_nan_and_so_is_its_gradient(target, options):
    targets = np.array([[0, 3, 2, 1, target, 5]], np.int32)
    nats, gradient = nats_and_gradient(targets, options)
    is_nan = np.arange(6) == 4
    np.testing.assert_array_equal(np.isnan(nats[0]), is_nan)
    np.testing.assert_array_equal(np.isnan(gradient[0]).all(axis=1), is_nan)


@pytest.mark.parametrize("options", [{}, {"chunk": 4}, {"logits_dtype": jnp.bfloat16}])
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.int16])
def test_a_target_of_minus_100_has_no_loss_and_no_gradient(options, dtype):
    targets = np.array([[0, 3, -100, 1, -100, 5]], dtype)
    positions = np.array([0, 1, 3, 5])
    nats, gradient = nats_and_gradient(targets, options)
    np.testing.assert_array_equal(nats[0, [2, 4]], 0)
    np.testing.assert_array_equal(gradient[0, [2, 4]], 0)
    others, _ = nats_and_gradient(targets[:, positions], options, np.asarray(X)[:, positions])
    np.testing.assert_allclose(nats.sum(), others.sum(), rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("id_dtype", [jnp.int8, jnp.int16, jnp.int32, jnp.uint8])
def test_ids_below_and_above_a_table_are_nan(dtype, id_dtype):
    limits = jnp.iinfo(id_dtype)
    ids = [0, V - 1, V, limits.max] + ([-1, -V, limits.min] if limits.min else [])
    rows = so.nn.embedding(HEAD.astype(dtype), jnp.array(ids, id_dtype))
    np.testing.assert_array_equal(np.isnan(rows).all(axis=1), [not 0 <= i < V for i in ids])


@pytest.mark.parametrize("options", [{}, {"score": "sigmoid"}, {"chunk": 2}])
def test_a_nan_token_changes_no_others_and_is_not_counted(options):
    draw = np.random.default_rng(3)
    weights = {"up": draw.normal(size=(4, 8, 8)), "down": draw.normal(size=(4, 8, 8))}
    weights = {name: jnp.asarray(weight, jnp.float32) for name, weight in weights.items()}
    router = jnp.asarray(draw.normal(size=(8, 4)), jnp.float32)
    broken = X.at[0, 0].set(jnp.nan)  # the first token, which would take the first place

    @jax.jit
    def experts(x):
        return so.nn.mixture_of_experts(weights, x, router, top_k=2, **options)

    y, statistics = experts(broken)
    np.testing.assert_array_equal(np.isnan(y[0]).all(axis=1), np.arange(6) == 0)
    assert np.isfinite(y[0, 1:]).all()
    np.testing.assert_allclose(statistics.load.sum(), 5 / 6, rtol=1e-6)
    unbroken_y, _ = experts(X)
    np.testing.assert_allclose(y[0, 1:], unbroken_y[0, 1:], rtol=1e-5)


@functools.cache
def model_of(name):
    """Return the parameters of a model, and its loss as a program."""
    module, config = CONFIGS[name]
    init = jax.jit(functools.partial(module.init, config))
    return init(jax.random.key(0)), jax.jit(module.model(config).loss_fn)


def loss_of(name, batch):
    params, loss_fn = model_of(name)
    returned = loss_fn(params, batch)
    loss = returned[0] if type(returned) is tuple else returned
    return mean_of(loss)


@pytest.mark.parametrize("name", NAMES)
def test_targets_of_minus_100_are_left_out_of_the_mean_of_a_model(name):
    ignored = np.where(np.arange(8) % 3 == 1, -100, TOKENS[:, 1:])
    weights = (ignored != -100).astype(np.float32)
    by_targets = loss_of(name, {"tokens": TOKENS[:, :-1], "targets": ignored})
    by_weights = loss_of(
        name, {"tokens": TOKENS[:, :-1], "targets": TOKENS[:, 1:], "weights": weights}
    )
    np.testing.assert_allclose(by_targets, by_weights, rtol=1e-5)
    # with weights too
    both = loss_of(name, {"tokens": TOKENS[:, :-1], "targets": ignored, "weights": np.ones((4, 8))})
    np.testing.assert_allclose(both, by_weights, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("leaf", "value"),
    [
        ("tokens", V),
        ("tokens", -1),
        ("tokens", -100),
        ("targets", -1),
        ("targets", V),
        ("last", -100),
    ],
)
def test_ids_that_a_model_does_not_have_are_nan_in_arrays_of_jax(name, leaf, value):
    batch = {"tokens": jnp.asarray(TOKENS[:, :-1]), "targets": jnp.asarray(TOKENS[:, 1:])}
    if leaf == "last":
        batch = {"tokens": jnp.asarray(TOKENS).at[1, -1].set(value)}
    else:
        batch[leaf] = batch[leaf].at[1, 2].set(value)
    assert np.isnan(loss_of(name, batch))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("leaf", "value", "line"),
    [
        ("tokens", V, f"tokens: {V}, and the model has 0 to {V - 1}"),
        ("tokens", -100, f"tokens: -100, and the model has 0 to {V - 1}"),
        ("targets", -1, f"targets: -1, and the model has 0 to {V - 1}"),
        ("targets", 99, f"targets: 99, and the model has 0 to {V - 1}"),
        ("positions", 8, "positions: 8, and the model has 0 to 7"),
    ],
)
@pytest.mark.parametrize("call", tiered(["step", "evaluate"], lambda call: call == "step"))
def test_ids_that_a_model_does_not_have_are_refused_in_numpy(name, leaf, value, line, call):
    module, config = CONFIGS[name]
    opt = so.ddp(optax.sgd(0.1), so.make_mesh(devices=jax.devices()[:1]), module.model(config))
    state = opt.init(model_of(name)[0])
    batch = {"tokens": TOKENS[:, :-1].copy(), "targets": TOKENS[:, 1:].copy()}
    if leaf == "positions":
        if name != "decoder":
            pytest.skip("it has no table of positions")
        batch[leaf] = np.broadcast_to(np.arange(8, dtype=np.int32), (4, 8)).copy()
    batch[leaf][2, 3] = value
    with pytest.raises(ValueError, match="ids of the batch") as error:
        getattr(opt, call)(state, batch)
    assert str(error.value) == (
        f"decoder: ids of the batch are not those of the model.\n  {line}\nFix: use the tokenizer of"
        " this model, and -100 for targets that are to be ignored."
    )


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
@pytest.mark.parametrize("value", [2**31, 2**32, 2**32 + 5, 2**40 - 100])
def test_integers_that_jax_would_wrap_are_refused(dtype, value):
    if dtype == np.uint64 and value < 2**32:
        pytest.skip("it fits into uint32")
    opt = so.ddp(
        optax.sgd(0.1),
        so.make_mesh(devices=jax.devices()[:1]),
        lambda p, b: (p["w"] * b["x"]).mean(),
    )
    state = opt.init({"w": np.float32(1)})
    with pytest.raises(ValueError, match="32 bits") as error:
        opt.step(state, {"x": np.array([3, value], dtype)})
    assert str(error.value) == (
        "ddp: jax stores integers in 32 bits, and the batch has larger ones.\n"
        f"  x: {np.dtype(dtype)} from 3 to {value}\n"
        "Fix: count from a smaller number, or set jax_enable_x64."
    )


def gradients_of_padding(tied, tokens, targets):
    """Return the gradients of ours, and of torch: it leaves out the row `padding_idx` where the
    embedding reads it. A tied head adds its own gradient.
    """
    config = DecoderConfig(vocab_size=V, dim=16, num_layers=1, num_heads=2, hidden=16, tied=tied)
    untied_config = dataclasses.replace(config, tied=False)
    params = jax.jit(functools.partial(decoder.init, config))(jax.random.key(0))
    batch = {"tokens": tokens, "targets": targets}

    def gradients(config, params):
        def loss(params):
            parts = decoder.model(config).loss_fn(params, batch)
            return parts.total / parts.weight

        return jax.jit(jax.grad(loss))(params)

    parts = gradients(untied_config, {"head": params["embedding"], **params})
    embedding = parts["embedding"].at[PADDING].set(0)
    if tied:
        embedding += parts.pop("head")
    return gradients(config, params), {**parts, "embedding": embedding}


PADDING = 0


@pytest.mark.parametrize("tied", tiered([False, True], lambda tied: tied))
def test_padding_at_the_end_of_rows_has_the_gradient_of_torch(tied):
    is_padding = np.arange(8) >= np.array([[8], [5], [3], [6]])
    tokens = np.where(is_padding, PADDING, 1 + TOKENS[:, :-1] % (V - 1))
    targets = np.where(is_padding, -100, TOKENS[:, 1:])
    ours, of_torch = gradients_of_padding(tied, tokens, targets)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), ours, of_torch)


@pytest.mark.parametrize("tied", tiered([False, True], lambda tied: tied))
def test_padding_that_is_a_real_token_differs_from_torch_in_its_row_as_the_page_says(tied):
    tokens = TOKENS[:, :-1].copy()
    tokens[:, 2] = PADDING
    ours, of_torch = gradients_of_padding(tied, tokens, TOKENS[:, 1:])
    assert np.abs(ours["embedding"] - of_torch["embedding"])[PADDING].max() > 1e-4
    zeroed = {**ours, "embedding": ours["embedding"].at[PADDING].set(0)}
    difference = np.abs(zeroed["embedding"] - of_torch["embedding"]).max()
    assert (difference > 1e-4) if tied else (difference < 1e-6)


def test_rows_longer_than_a_table_of_positions_are_refused_when_traced():
    _, config = CONFIGS["decoder"]
    params = jax.eval_shape(lambda: decoder.init(config, jax.random.key(0)))
    tokens = jax.ShapeDtypeStruct((2, 10), jnp.int32)
    with pytest.raises(ValueError, match="table of positions") as error:
        jax.eval_shape(decoder.model(config).loss_fn, params, {"tokens": tokens})
    assert str(error.value) == (
        "decoder: rows have 9 positions, and the model's table of positions has 8.\n"
        "Fix: cut the rows, or give the batch positions within each document, as so.data.pack does."
    )


@pytest.mark.parametrize("token", [-1, V, -100])
@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_that_the_model_cannot_read_is_refused(name, token):
    _, config = CONFIGS[name]
    params, _ = model_of(name)
    with pytest.raises(ValueError, match=f"sample: ids .*\n  tokens: {token}, and the model has"):
        so.models.sample(params, config, np.array([[1, token]]), jax.random.key(0), num_tokens=1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: list(data.pack([[1, 2**31]], 4)),
            "data.pack: a token must fit into int32; got 2147483648.",
        ),
        (
            lambda: list(data.pack([[1, -2]], 4)),
            "data.pack: a document must be 1-D, of token ids from 0 on; got token -2.",
        ),
        (
            lambda: list(data.pack([{"tokens": [1, 2], "weights": [1, np.nan]}], 4)),
            "data.pack: a document has weights that are negative, infinite or NaN.",
        ),
        (
            lambda: list(data.pack([{"tokens": [1, 2], "weights": [1, -1.0]}], 4)),
            "data.pack: a document has weights that are negative, infinite or NaN.",
        ),
        (
            lambda: list(data.pack([{"tokens": [1, 2], "weights": [np.inf, 1]}], 4)),
            "data.pack: a document has weights that are negative, infinite or NaN.",
        ),
        (lambda: data.decode([72, 256]), "data.decode: tokens must be bytes, got 72 to 256."),
        (lambda: data.decode([-1]), "data.decode: tokens must be bytes, got -1 to -1."),
        (
            lambda: data.next_token({"tokens": np.array([1, -100])}),
            "data.next_token: tokens must be ids from 0 on, got -100.",
        ),
        (lambda: data.decode([72.5]), "data.decode: tokens must be bytes, got 72.5 to 72.5."),
        (
            lambda: data.next_token({"tokens": jnp.ones((1, 3))}),
            "data.next_token: tokens must be integers, got float32.",
        ),
        (
            lambda: list(data.pack([{"tokens": [1, 2, 3], "weights": [1, 1e39, 1]}], 4)),
            "data.pack: a document has weights that are negative, infinite or NaN.",
        ),
        (
            lambda: list(data.pack([{"tokens": [1, 2], "weights": [1j, 1]}], 4)),
            "data.pack: weights must be real numbers, got complex128.",
        ),
        (
            lambda: list(data.pack([{"tokens": [1, 2], "weights": ["1", "1"]}], 4)),
            "data.pack: weights must be real numbers, got <U1.",
        ),
        (
            lambda: list(data.pack([{"tokens": [1, 2], "labels": [1, 2]}], 4)),
            "data.pack: a document has \"tokens\" and \"weights\" alone; got ['labels', 'tokens'].",
        ),
    ],
)
def test_data_refuses_what_no_model_reads(call, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        call()


def test_attention_refuses_a_factor_of_scores_that_is_no_number():
    x = X.reshape(1, 6, 1, 8)
    with pytest.raises(TypeError, match="attention: scale must be"):
        so.nn.attention(x, x, x, scale="0.5")


@pytest.mark.parametrize("name", ["positions", "segment_ids"])
def test_attention_refuses_places_that_are_not_integers(name):
    x = X.reshape(1, 6, 1, 8)
    with pytest.raises(TypeError, match=f"attention: {name} must be integers"):
        so.nn.attention(x, x, x, **{name: jnp.ones((1, 6))})


@pytest.mark.parametrize("leaf", ["attention_mask", "labels", "mask", "token_type_ids"])
@pytest.mark.parametrize("call", tiered(["step", "evaluate"], lambda call: call == "step"))
def test_leaves_that_a_model_does_not_read_are_refused(leaf, call):
    module, config = CONFIGS["decoder"]
    opt = so.fsdp(optax.sgd(0.1), so.make_mesh(), module.model(config))
    state = opt.init(module.init(config, jax.random.key(0)))
    tokens = np.concatenate([TOKENS, TOKENS])
    message = rf"^decoder: the model does not read all leaves of the batch\.\n  {leaf}\nFix: "
    with pytest.raises(ValueError, match=message):
        getattr(opt, call)(state, {"tokens": tokens, leaf: np.ones_like(tokens)})


WRAPPED = [np.uint32(2**32 - 100), np.int64(2**32 - 100), np.uint64(2**64 - 100), np.int64(2**32)]


@pytest.mark.parametrize("target", WRAPPED)
@pytest.mark.parametrize("options", tiered(FORMS, lambda form: form == {}))
def test_a_target_that_would_wrap_to_an_id_or_to_minus_100_is_nan(target, options):
    targets = np.full((1, 6), target)
    assert np.isnan(so.nn.cross_entropy(X, HEAD, targets, **options)).all()


@pytest.mark.parametrize("number", [np.uint32(2**32 - 1), np.int64(2**32 + 1), np.int64(-(2**32))])
def test_an_id_that_would_wrap_into_a_table_is_nan(number):
    assert np.isnan(so.nn.embedding(HEAD, np.array([number]))).all()


@pytest.mark.parametrize("dtype", [np.float32, bool, np.complex64])
def test_cross_entropy_refuses_targets_that_are_not_integers(dtype):
    with pytest.raises(TypeError, match=r"^cross_entropy: targets must be integers, got "):
        so.nn.cross_entropy(X, HEAD, np.ones((1, 6), dtype))


@pytest.mark.parametrize("shape", [(6,), (1, 5), (6, 1), (1, 6, 1)])
def test_values_of_another_shape_than_their_positions_are_refused(shape):
    ids = np.ones(shape, np.int32)
    with pytest.raises(ValueError, match=r"^cross_entropy: targets have shape .*\nFix: "):
        so.nn.cross_entropy(X, HEAD, ids)
    query = jnp.ones((1, 6, 2, 4))
    with pytest.raises(ValueError, match=r"^attention: segment_ids have shape .*\nFix: "):
        so.nn.attention(query, query, query, segment_ids=ids)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ((1, 6, 2, 4), (1, 6, 1, 4)),  # one head of values for two of keys
        ((1, 6, 2, 1), (1, 6, 2, 1)),
        ((1, 1, 2, 4), (1, 1, 2, 4)),
        ((1, 3, 2, 4), (1, 3, 2, 4)),
        ((2, 6, 2, 4), (2, 6, 2, 4)),
        ((6, 2, 4), (6, 2, 4)),
    ],
)
def test_attention_refuses_arrays_that_einsum_would_broadcast(key, value):
    with pytest.raises(ValueError, match=r"^attention: query has shape .*\nFix: give "):
        so.nn.attention(jnp.ones((1, 6, 2, 4)), jnp.ones(key), jnp.ones(value))


@pytest.mark.parametrize("name", ["positions", "segment_ids"])
@pytest.mark.parametrize("value", [2**31, 2**32, -(2**32), 2**40])
def test_attention_refuses_places_of_the_host_beyond_32_bits(name, value):
    x = jnp.ones((1, 6, 2, 4))
    ids = np.arange(6)[None] + np.where(np.arange(6) < 3, 0, value)
    with pytest.raises(ValueError, match=f"^attention: {name} must fit into int32, got "):
        so.nn.attention(x, x, x, **{name: ids})


def attend(query, key, value, sinks):
    return so.nn.attention(query, key, value, sinks=sinks)


def mix_experts(x, router, bias):
    weights = {"up": jnp.ones((4, 8, 8), x.dtype), "down": jnp.ones((4, 8, 8), x.dtype)}
    return so.nn.mixture_of_experts(weights, x, router, top_k=2, bias=bias)


ARRAYS = {
    "attention": (
        attend,
        dict.fromkeys(("query", "key", "value"), (1, 6, 2, 4)) | {"sinks": 2},
    ),
    "cross_entropy": (
        lambda x, head: so.nn.cross_entropy(x, head, np.ones((1, 6), np.int32)),
        {"x": (1, 6, 8), "head": (V, 8)},
    ),
    "mixture_of_experts": (mix_experts, {"x": (1, 6, 8), "router": (8, 4), "bias": 4}),
}


@pytest.mark.parametrize("dtype", [np.complex64, np.int32])
@pytest.mark.parametrize(
    ("caller", "name"),
    [(caller, name) for caller, (_, shapes) in ARRAYS.items() for name in shapes],
)
def test_arrays_that_are_not_real_floating_numbers_are_refused(caller, name, dtype):
    """An imaginary part would be left out, and a fraction of the result."""
    call, shapes = ARRAYS[caller]
    arrays = {key: jnp.ones(shape, dtype if key == name else None) for key, shape in shapes.items()}
    problem = f"{caller}: arrays must hold real floating numbers.\n  {name}: {dtype.__name__}\n"
    with pytest.raises(TypeError, match=f"^{problem}Fix: cast them"):
        call(**arrays)


@pytest.mark.parametrize("shape", [(V, 1), (V, 4), (8,), (V, 8, 1)])
def test_cross_entropy_refuses_a_head_of_another_width(shape):
    with pytest.raises(
        ValueError, match=r"^cross_entropy: x has shape .*\nFix: give x \[B, T, D\]"
    ):
        so.nn.cross_entropy(X, jnp.ones(shape), np.ones((1, 6), np.int32))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softcap": 0.0}, "softcap must be finite, above 0; got 0.0."),
        ({"softcap": -5.0}, "softcap must be finite, above 0; got -5.0."),
        ({"softcap": float("nan")}, "softcap must be finite, above 0; got nan."),
        ({"logits_dtype": jnp.int8}, "logits_dtype must be floating, got "),
        ({"logits_dtype": jnp.complex64}, "logits_dtype must be floating, got "),
        ({"logits_dtype": bool}, "logits_dtype must be floating, got "),
    ],
)
def test_cross_entropy_refuses_options_without_a_meaning(options, message):
    with pytest.raises((TypeError, ValueError), match=f"^cross_entropy: {message}"):
        so.nn.cross_entropy(X, HEAD, np.ones((1, 6), np.int32), **options)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.int8, jnp.uint8, bool])
def test_a_table_that_has_no_nan_is_refused(dtype):
    with pytest.raises(TypeError, match=r"^embedding: the table must hold floating numbers, got "):
        so.nn.embedding(jnp.ones((V, 2), dtype), np.array([1, V]))


@pytest.mark.parametrize("shape", [(1,), (4, 1), (2, 4)])
def test_loads_of_another_shape_than_their_biases_are_refused(shape):
    with pytest.raises(ValueError, match=r"^update_router_bias: bias has shape \(4,\), load "):
        so.nn.update_router_bias(jnp.zeros(4), jnp.ones(shape), 0.1)


def test_weights_that_are_complex_are_refused():
    batch = {"tokens": TOKENS[:, :-1], "weights": np.ones((4, 7), np.complex64)}
    with pytest.raises(TypeError, match=r"^decoder: weights of the batch must be real, got "):
        loss_of("decoder", batch)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (np.array([[1.7, 2.2]]), {}, "tokens of the prompt must be integers, got float64"),
        (jnp.ones((1, 2)), {}, "tokens of the prompt must be integers, got float32"),
        (np.ones((1, 2), bool), {}, "tokens of the prompt must be integers, got bool"),
        (np.array([1, 2]), {}, r"the prompt must be \[B, T\], got shape \(2,\)"),
        (TOKENS[None], {}, r"the prompt must be \[B, T\], got shape \(1, 4, 9\)"),
        (TOKENS[:, :2], {"temperature": float("nan")}, ".*\n  temperature must not be negative"),
        (TOKENS[:, :2], {"temperature": "1"}, "temperature must be a number"),
        (TOKENS[:, :2], {"top_k": 2.5}, "top_k must be an integer"),
        (TOKENS[:, :2], {"num_tokens": 2.0}, "num_tokens must be an integer"),
        (TOKENS[:, :2], {"num_tokens": 7}, r".*\n  2 \+ 7 tokens are more than max_length=8"),
    ],
)
def test_a_prompt_or_a_number_without_a_meaning_is_refused(prompt, options, message, monkeypatch):
    _, config = CONFIGS["decoder"]
    # without the type checks of these tests
    monkeypatch.setattr(_sampling, "check_sampling", inspect.unwrap(_sampling.check_sampling))
    sample = inspect.unwrap(so.models.sample)
    with pytest.raises((TypeError, ValueError), match=f"^sample: {message}"):
        sample({}, config, prompt, jax.random.key(0), **{"num_tokens": 1, **options})


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"top_k": 3}])
def test_no_token_follows_logits_that_are_nan(options):
    logits = jnp.ones((3, V)).at[1, 4].set(jnp.nan)
    options = {"temperature": 1.0, "top_k": None, **options}
    tokens = _sampling.draw(logits, jax.random.key(0), **options)
    np.testing.assert_array_equal(tokens == -1, [False, True, False])
