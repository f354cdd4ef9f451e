"""Packed rows: each document as if alone, no gradient from one to another, in whatever order and on
whatever devices.
"""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from support.host import host_params
from support.mean_of import mean_of
from support.reference import relative_difference
from support.tiers import tiered

import shardopt as so
from benchmarks import transformer
from shardopt import data
from shardopt.models import gpt
from shardopt.planning import Transformer
from shardopt.trace._jaxprs import equations

COUNTED = 12
VOCABULARY = 20
"""Token ids from COUNTED on are of documents without weight in the loss."""
DRAW = np.random.default_rng(0)
SIZES = [5, -3, -4, 3, 6, -2, -5, 2]
"""Of documents, those without weight as negative numbers; each of the four rows that they fill has
one of both.
"""
DOCUMENTS = [
    DRAW.integers(0, COUNTED, size) if size > 0 else DRAW.integers(COUNTED, VOCABULARY, -size)
    for size in SIZES
]
WEIGHTS = np.where(np.arange(VOCABULARY) < COUNTED, 0.5 + np.arange(VOCABULARY) % 3, 0.0)
"""Of the target of each token."""

GPT = gpt.config(vocab_size=VOCABULARY, dim=16, num_layers=2, num_heads=2, param_dtype=jnp.float64)
LEARNED = Transformer(
    "tiny",
    16,
    2,
    4,
    24,
    VOCABULARY,
    8,
    num_kv_heads=2,
    positions=8,
    param_dtype=jnp.float64,
    dtype=jnp.float64,
)
ROTARY = Transformer(
    "tiny", 16, 2, 4, 24, VOCABULARY, 8, param_dtype=jnp.float64, dtype=jnp.float64
)
MODELS = {
    "gpt": (gpt.model(GPT), functools.partial(gpt.init, GPT)),
    "learned": (transformer.model(LEARNED), functools.partial(transformer.init, LEARNED)),
    "rotary": (transformer.model(ROTARY), functools.partial(transformer.init, ROTARY)),
}


def packed():
    batch = next(iter(data.pack(DOCUMENTS, 8).batch(4)))
    assert (batch["segment_ids"].max(axis=1) == 2).all()
    return batch | {"weights": batch["weights"] * WEIGHTS[batch["tokens"]]}


def mean(parts):
    return sum(part.total for part in parts) / sum(part.weight for part in parts)


@functools.cache
def one_by_one(name):
    """Return parameters, and the gradient of the weighted mean over documents that have a row each,
    not packed.
    """
    model, init = MODELS[name]

    sizes = np.array([document.size for document in DOCUMENTS])
    # what fills a row behind its document is seen by none of its positions, and has no weight
    rows = np.stack([np.pad(document, (0, sizes.max() - document.size)) for document in DOCUMENTS])
    has_target = np.arange(1, sizes.max()) < sizes[:, None]
    batch = {"tokens": rows, "weights": WEIGHTS[rows[:, :-1]] * has_target}

    def loss(params):
        return mean([model.loss_fn(params, batch)])

    params = host_params(lambda _, key: init(key), None)
    return params, jax.device_get(jax.jit(jax.grad(loss))(params))


def gradient(name, batch):
    model, _ = MODELS[name]
    params, _ = one_by_one(name)
    return jax.device_get(
        jax.jit(jax.grad(lambda params: mean([model.loss_fn(params, batch)])))(params)
    )


def crossed(grads):
    """Return the largest gradient of an embedding of documents that have no weight."""
    return float(np.abs(grads["embedding"][COUNTED:]).max())


@pytest.mark.parametrize("name", tiered(MODELS, lambda name: name == "gpt"))
def test_packed_rows_give_the_gradient_of_the_documents_one_by_one(name, x64):
    _, expected = one_by_one(name)
    gradients = gradient(name, packed())
    assert relative_difference(gradients, expected) <= 1e-10
    assert crossed(gradients) == 0.0
    assert float(np.abs(gradients["embedding"][:COUNTED]).min(axis=1).max()) > 0


@pytest.mark.parametrize("order", [pytest.param(None, marks=pytest.mark.slow), "zigzag"])
def test_rotary_positions_act_by_distances_so_rows_need_none(order, mesh_of, x64):
    batch = packed()
    del batch["positions"]
    if order is not None:
        batch = so.nn.zigzag(batch, mesh_of(data=1, context=2), order=order)
    assert relative_difference(gradient("gpt", batch), one_by_one("gpt")[1]) <= 1e-10


@pytest.mark.parametrize("learned", [0, 128])
def test_packed_rows_in_natural_order_run_on_the_kernel_of_a_tpu(learned, mesh_of):
    """Traced for a TPU: positions within documents say nothing of the order of the row, which alone
    keeps it away.
    """
    shape = Transformer(
        "tiny", 16, 2, 4, 24, VOCABULARY, 128, num_kv_heads=2, positions=learned, dtype=jnp.float32
    )
    config = gpt.config(vocab_size=VOCABULARY, dim=16, num_layers=2, num_heads=2)
    model = transformer.model(shape)
    init = functools.partial(transformer.init, shape)
    models = (
        [(model, init)]
        if learned
        else [(model, init), (gpt.model(config), functools.partial(gpt.init, config))]
    )
    chip = AbstractDevice(device_kind="TPU v5p", num_cores=1, platform="tpu")
    batch = next(iter(data.pack(DOCUMENTS, 128).batch(1)))
    for model, init in models:
        params = jax.eval_shape(init, jax.random.key(0))
        for inputs, wanted in (
            (batch, True),
            (so.nn.zigzag(batch, mesh_of(data=1, context=2)), False),
        ):
            with use_abstract_mesh(AbstractMesh((1,), ("data",), abstract_device=chip)):
                traced = jax.make_jaxpr(model.loss_fn)(params, inputs)
            assert ("pallas_call" in {eqn.primitive.name for eqn in equations(traced)}) == wanted


def test_without_segment_ids_gradients_cross(x64):
    batch = packed()
    del batch["segment_ids"], batch["positions"]
    gradients = gradient("gpt", batch)
    assert relative_difference(gradients, one_by_one("gpt")[1]) > 1e-3
    assert crossed(gradients) > 1e-6


WAYS = {
    "fsdp": {"data": 2},
    "pipeline": {"data": 1, "pipeline": 2},
    "context": {"data": 2, "context": 2},
    "context, zigzag": {"data": 1, "context": 4},
    "context, pipeline": {"data": 1, "context": 2, "pipeline": 2},
    "context, pipeline, zigzag": {"data": 1, "context": 2, "pipeline": 2},
}


@pytest.mark.parametrize("how", tiered(WAYS, lambda how: how == "context, pipeline, zigzag"))
def test_no_gradient_crosses_in_micro_batches_stages_or_devices_of_a_row(how, mesh_of, x64):
    params, expected = one_by_one("gpt")
    mesh = mesh_of(**WAYS[how])
    model = MODELS["gpt"][0]
    make = so.hybrid if "pipeline" in how else so.fsdp
    opt = make(optax.sgd(1.0), mesh, model, micro_batches=2, min_shard_elements=8)
    batch = so.nn.zigzag(packed(), mesh) if "zigzag" in how else packed()
    stepped = opt.step(opt.init(params), batch)[0].params
    moved = jax.tree.map(lambda before, after: before - np.asarray(after), params, stepped)
    assert relative_difference(moved, expected) <= 1e-10
    assert crossed(moved) == 0.0


def test_positions_of_rows_in_natural_order_are_shown_to_be_those_of_the_row(
    mesh_of, monkeypatch, x64
):
    """Nothing is compiled: the check of the loss refuses positions that count from the device's own
    first one.
    """
    model, init = MODELS["gpt"]
    batch = data.next_token({"tokens": DRAW.integers(0, VOCABULARY, (2, 9))})

    def lowered():
        opt = so.ddp(optax.sgd(1.0), mesh_of(data=1, context=4), model, view="per_device")
        return opt.step.lower(opt.abstract_state(jax.eval_shape(init, jax.random.key(0))), batch)

    assert "context" in lowered().as_text()
    monkeypatch.setattr(so.nn, "positions", jnp.arange)
    with pytest.raises(so.errors.NotSeparableError, match="its index on its device"):
        lowered()


@pytest.mark.slow  # the test above, and test_order.py of nn for the positions themselves
@pytest.mark.parametrize("name", tiered(["gpt", "learned"], lambda name: name == "learned"))
def test_rows_in_natural_order_know_their_positions_on_a_context_axis(name, mesh_of, x64):
    model, init = MODELS[name]
    params = jax.jit(init)(jax.random.key(0))
    batch = data.next_token({"tokens": DRAW.integers(0, VOCABULARY, (2, 9))})
    expected = jax.jit(jax.grad(lambda p, b: mean_of(model.loss_fn(p, b))))(params, batch)
    opt = so.ddp(optax.sgd(1.0), mesh_of(data=1, context=4), model)
    stepped = opt.step(opt.init(params), batch)[0].params
    moved = jax.tree.map(lambda before, after: before - np.asarray(after), params, stepped)
    assert relative_difference(moved, expected) <= 1e-10


@pytest.mark.slow
def test_marks_that_are_dropped_on_the_way_are_noticed(monkeypatch, mesh_of, x64):
    attention = so.nn.attention
    expected = one_by_one("gpt")[1]
    zigzagged = so.nn.zigzag(packed(), mesh_of(context=2))
    with monkeypatch.context() as patch:
        patch.setattr(
            so.nn, "attention", lambda *args, segment_ids, **keywords: attention(*args, **keywords)
        )
        gradients = gradient("gpt", packed())
        assert crossed(gradients) > 1e-6
        assert relative_difference(gradients, expected) > 1e-3
    with monkeypatch.context() as patch:
        patch.setattr(
            so.nn, "attention", lambda *args, positions, **keywords: attention(*args, **keywords)
        )
        assert relative_difference(gradient("gpt", zigzagged), expected) > 1e-3
    for name, leaf in (("gpt", "order"), ("learned", "order"), ("learned", "positions")):
        without = {key: value for key, value in zigzagged.items() if key != leaf}
        assert relative_difference(gradient(name, without), one_by_one(name)[1]) > 1e-3
    with monkeypatch.context() as patch:
        patch.setattr(so.nn, "positions", jnp.arange)
        with pytest.raises(
            UserWarning, match="its index on its device, which is not that in the sequence"
        ):
            test_rows_in_natural_order_know_their_positions_on_a_context_axis("gpt", mesh_of, None)


@pytest.mark.slow
def test_a_packed_run_learns_as_one_of_the_same_documents_a_row_each(mesh_of):
    text = data.open_corpus().read(0, 300_000).tobytes()
    documents = [
        np.frombuffer(document[:128], np.uint8) for document in text.split(b"\n\n") if document
    ]
    rows = [*itertools.islice(data.pack(documents, 128).batch(8, drop_remainder=True), 150)]
    max_documents = max(sum(row.max() for row in batch["segment_ids"]) for batch in rows)
    alone = [one_a_row(batch, max_documents + max_documents % 2) for batch in rows]

    def padding(batches):
        return np.mean([batch["segment_ids"] == 0 for batch in batches])

    assert padding(rows) < 0.1 < padding(alone)
    config = gpt.config(dim=64, num_layers=2)

    def losses(batches):
        opt = so.fsdp(optax.adam(3e-3), mesh_of(data=2), gpt.model(config))
        state = opt.init(host_params(gpt.init, config))
        for batch in batches[:-10]:
            state, _ = opt.step(state, batch)
        return [float(opt.evaluate(state, batch)["loss"]) for batch in alone[-10:]]

    packed_losses = losses(rows)
    expected = losses(alone)
    assert np.mean(expected) < 3
    np.testing.assert_allclose(np.mean(packed_losses), np.mean(expected), rtol=5e-3)


def one_a_row(batch, count):
    """Return a batch with each segment in a row of its own, and empty rows up to `count`."""
    padded_rows = {
        name: np.zeros((count, leaf.shape[1]), leaf.dtype) for name, leaf in batch.items()
    }
    places = [
        (row, i) for row, ids in enumerate(batch["segment_ids"]) for i in range(1, ids.max() + 1)
    ]
    for new, (row, i) in enumerate(places):
        at = batch["segment_ids"][row] == i
        for name, leaf in batch.items():
            padded_rows[name][new, : at.sum()] = leaf[row, at]
    return padded_rows


@pytest.mark.parametrize(
    ("name", "order"),
    tiered(
        [("gpt", "zigzag"), ("gpt", "striped"), ("learned", "zigzag")],
        lambda row: row == ("gpt", "striped"),
    ),
)
def test_the_order_of_positions_changes_no_gradient(name, order, x64):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(1, 4), ("data", "context"))
    moved = so.nn.zigzag(packed(), mesh, order=order)
    assert (moved["segment_ids"] != packed()["segment_ids"]).any()
    assert relative_difference(gradient(name, moved), one_by_one(name)[1]) <= 1e-10


@pytest.mark.parametrize("name", tiered(["gpt", "learned"], lambda name: name == "gpt"))
def test_inputs_and_targets_apart_say_the_same_as_one_more_token(name, x64):
    batch = {"tokens": DRAW.integers(0, VOCABULARY, (2, 9))}
    model, _ = MODELS[name]
    grad = jax.jit(jax.value_and_grad(lambda params, batch: mean_of(model.loss_fn(params, batch))))
    params, _ = one_by_one(name)
    together = grad(params, batch)
    split_gradients = grad(params, data.next_token(batch))
    assert relative_difference(split_gradients, together) <= 1e-12
    for inputs in (batch, data.next_token(batch)):
        # blocks hand on one array
        assert len(jax.tree.leaves(jax.eval_shape(model.embed, params, inputs))) == 1


def test_shapes_of_a_batch_are_those_that_data_gives():
    shapes = functools.partial(transformer.abstract_batch, ROTARY, 4)
    window = {"tokens": np.zeros((4, 9), np.int32)}
    batches_by_form = {
        "tokens": window,
        "targets": data.next_token(window),
        "packed": next(iter(data.pack(DOCUMENTS, 8).batch(4))),
    }
    for form, batch in batches_by_form.items():
        described = {name: (leaf.shape, leaf.dtype) for name, leaf in shapes(form=form).items()}
        assert described == {name: (leaf.shape, leaf.dtype) for name, leaf in batch.items()}
    assert shapes() == shapes(form="tokens")


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        (
            {"targets": np.zeros((4, 7), int), "positions": np.zeros((4, 1), int)},
            ValueError,
            (
                "a leaf of the batch is not of shape [B, T] = (4, 8).\n  targets: shape (4, 7)\n "
                " positions: shape (4, 1)"
            ),
        ),
        (
            {"segment_ids": np.zeros((4, 8))},
            TypeError,
            "a leaf of the batch does not hold integers.\n  segment_ids: float64",
        ),
    ],
)
@pytest.mark.parametrize("name", ["gpt", "rotary"])
def test_leaves_that_do_not_fit_are_refused(name, wrong, kind, message):
    with pytest.raises(kind, match=f"^{re.escape(f'decoder: {message}')}$"):
        MODELS[name][0].embed({}, packed() | wrong)
