"""Adapters: steps equal training A and B on one device, the base stays, and only small matrices
have gradients.
"""

import dataclasses
import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support.host import host_params
from support.reference import relative_difference

import shardopt as so
from shardopt.adapters import lora
from shardopt.adapters._quantized_weight import NF4, QuantizedWeight, quantize
from shardopt.data import next_token
from shardopt.models import gpt, moe
from shardopt.optimizers import Matrix

CONFIG = gpt.config(vocab_size=32, dim=16, num_layers=4, num_heads=2, max_length=8)
TARGETS = ["attention/(qkv|out)$", "mlp/(up|down)$"]
TX = optax.sgd(0.1, momentum=0.9)
TOKENS = np.random.default_rng(0).integers(0, 32, (16, 9), np.int32)
WEIGHTS = np.random.default_rng(1).uniform(size=(16, 8)).astype(np.float32)
BATCH = {"tokens": TOKENS, "weights": WEIGHTS}

MATRICES = (("wide", Matrix(rows=0, columns=(1, 2))),)


def adapted_gpt(base="float", **options):
    return lora(
        gpt.model(CONFIG),
        rank=2,
        alpha=6,
        targets=TARGETS,
        base=base,
        matrices=gpt.matrices,
        rules=gpt.rules,
        **options,
    )


def gpt_params(adapted):
    """Parameters whose B is not 0, so that A has a gradient in the first step."""
    params = jax.jit(adapted.init)(host_params(gpt.init, CONFIG), jax.random.key(1))
    draw = np.random.default_rng(2)

    def nonzero(path, leaf):
        return (
            0.1 * draw.normal(size=leaf.shape).astype(leaf.dtype)
            if "lora_b" in str(path[-1])
            else leaf
        )

    return jax.tree_util.tree_map_with_path(nonzero, params)


def abstract_gpt_params(adapted):
    return jax.eval_shape(adapted.init, host_params(gpt.init, CONFIG), jax.random.key(1))


def begun(adapted, params, seed):
    """Return the first parameters with adapters, by one program."""
    return jax.jit(adapted.init)(params, jax.random.key(seed))


def factors(params):
    """Return key path -> A or B, on the host."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in leaves
        if re.search("lora_[ab]$", str(path[-1]))
    }


@functools.cache
def expected_factors(base):
    """Return A and B after three steps of plain optax on one device, and the last loss."""
    adapted = adapted_gpt()
    params = gpt_params(adapted_gpt(base))
    weights = adapted.without_adapters(params)
    blocks = params["blocks"]
    trained = {
        (part, name): {"a": blocks[part][name].lora_a, "b": blocks[part][name].lora_b}
        for part, names in {"attention": ("qkv", "out"), "mlp": ("up", "down")}.items()
        for name in names
    }
    # written out for each weight: L blocks, D width, C parts, H heads, K width of a head, F hidden,
    # r rank
    products = {
        ("attention", "qkv"): "lcdr,lcrhk->ldchk",
        ("attention", "out"): "lhkr,lrd->lhkd",
        ("mlp", "up"): "lcdr,lcrf->ldcf",
        ("mlp", "down"): "lfr,lrd->lfd",
    }

    def loss_fn(trained):
        merged = jax.tree.map(lambda x: x, weights)
        for (part, name), pair in trained.items():
            update = 3.0 * jnp.einsum(products[part, name], pair["a"], pair["b"])
            merged["blocks"][part][name] = weights["blocks"][part][name] + update
        loss = gpt.model(CONFIG).loss_fn(merged, BATCH)
        return loss.total / loss.weight

    @jax.jit
    def step(trained, opt_state):
        loss, grads = jax.value_and_grad(loss_fn)(trained)
        updates, opt_state = TX.update(grads, opt_state)
        return optax.apply_updates(trained, updates), opt_state, loss

    opt_state = jax.tree.map(np.zeros_like, TX.init(trained))
    for _ in range(3):
        trained, opt_state, loss = step(trained, opt_state)
    return trained, float(loss)


MESHES = {
    "fsdp": (so.fsdp, {"data": 8}),
    "fsdp, tensor": (so.fsdp, {"data": 4, "tensor": 2}),
    "ddp, tensor": (so.ddp, {"data": 2, "tensor": 2}),
    "pipeline": (so.hybrid, {"data": 2, "tensor": 2, "pipeline": 2}),
}
MORE_MESHES = {
    "zero": (so.zero, {"data": 8}),
    "fsdp, replica": (so.fsdp, {"replica": 2, "data": 4}),
    "fsdp, context": (so.fsdp, {"data": 4, "context": 2}),
    "fsdp, context and tensor": (so.fsdp, {"data": 2, "context": 2, "tensor": 2}),
    "zero, tensor": (so.zero, {"data": 4, "tensor": 2}),
    "ddp, context": (so.ddp, {"data": 2, "context": 4}),
    "four stages": (so.hybrid, {"data": 2, "pipeline": 4}),
    "pipeline, context": (so.hybrid, {"data": 2, "context": 2, "pipeline": 2}),
}
"""With `MESHES`, a dozen."""


# test_peft.py steps with A and B of peft on such a mesh, test_other_libraries.py as plain jax
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "base", "low_rank_products"),
    [
        *(
            (mesh, base, products)
            for mesh in MESHES
            for base in ("float", "int8", "nf4")
            for products in (False, True)
        ),
        *((mesh, "float", True) for mesh in MORE_MESHES),
    ],
)
def test_steps_equal_one_device(mesh, base, low_rank_products, mesh_of):
    strategy, sizes = (MESHES | MORE_MESHES)[mesh]
    batch = next_token(BATCH) if "context" in sizes else BATCH
    options = (
        {"micro_batches": 2}
        if strategy is so.hybrid
        else {"micro_batches": 2, "min_shard_elements": 1}
    )
    options = {
        name: value
        for name, value in options.items()
        if strategy is not so.ddp or name == "micro_batches"
    }
    adapted = adapted_gpt(base, low_rank_products=low_rank_products)
    opt = strategy(TX, mesh_of(**sizes), adapted.model, rules=adapted.rules, **options)
    start = gpt_params(adapted)
    state = opt.init(start)
    for _ in range(3):
        state, metrics = opt.step(state, batch)
    trained, loss = expected_factors(base)
    assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-5)
    for (part, name), pair in trained.items():
        node = state.params["blocks"][part][name]
        assert np.abs(pair["b"] - start["blocks"][part][name].lora_b).max() > 1e-3
        np.testing.assert_allclose(node.lora_a, pair["a"], rtol=0, atol=1e-6)
        np.testing.assert_allclose(node.lora_b, pair["b"], rtol=0, atol=1e-6)

    def frozen(params):
        return jax.tree.leaves(adapted.without_adapters(params))

    for before, after in zip(frozen(start), frozen(state.params), strict=True):
        np.testing.assert_array_equal(before, after)


def test_adapters_are_placed_as_their_weights(mesh_of):
    adapted = adapted_gpt("nf4")
    opt = so.hybrid(
        TX,
        mesh_of(data=2, tensor=2, pipeline=2),
        adapted.model,
        rules=adapted.rules,
        micro_batches=2,
    )
    specs = opt.specs(abstract_gpt_params(adapted)).params["blocks"]
    up = specs["mlp"]["up"]
    out = specs["attention"]["out"]
    assert up.base.codes == P("pipeline", None, None, "tensor")
    assert (up.lora_a, up.lora_b) == (
        P("pipeline", None, None, None),
        P("pipeline", None, None, "tensor"),
    )
    # the rows of "out" are heads, which tensor splits: its input
    assert (out.lora_a, out.lora_b) == (
        P("pipeline", "tensor", None, None),
        P("pipeline", None, None),
    )


@pytest.mark.slow
def test_the_order_of_devices_does_not_matter():
    adapted = adapted_gpt(low_rank_products=True)
    results = []
    for order in (range(8), (3, 1, 7, 5, 0, 2, 6, 4)):
        mesh = so.make_mesh(data=4, tensor=2, devices=[jax.devices()[i] for i in order])
        opt = so.fsdp(
            TX,
            mesh,
            adapted.model,
            rules=adapted.rules,
            min_shard_elements=1,
            view="unproved",
        )
        state = opt.init(gpt_params(adapted))
        state, _ = opt.step(state, BATCH)
        results.append(factors(state.params))
    for path, leaf in results[0].items():
        np.testing.assert_allclose(results[1][path], leaf, rtol=1e-5, atol=1e-7, err_msg=path)


def test_the_base_travels_in_its_bits_and_only_adapters_are_reduced(mesh_of):
    adapted = adapted_gpt("nf4", low_rank_products=True)
    params = abstract_gpt_params(adapted)
    opt = so.fsdp(
        TX,
        mesh_of(data=4),
        adapted.model,
        rules=adapted.rules,
        min_shard_elements=1,
        view="unproved",
    )
    program = so.hlo.audit(opt.step, opt.abstract_state(params), {"tokens": TOKENS})
    nodes = [
        params["blocks"][part][name] for part, name in (("attention", "qkv"), ("attention", "out"))
    ]
    nodes += [params["blocks"]["mlp"]["up"], params["blocks"]["mlp"]["down"]]

    def bytes_of(leaves):
        return sum(leaf.size * leaf.dtype.itemsize // CONFIG.num_layers for leaf in leaves)

    in_blocks = [collective for collective in program.collectives if collective.in_loop]
    gathered = {collective.bytes for collective in in_blocks if collective.kind == "all-gather"}
    scattered = {
        collective.bytes for collective in in_blocks if collective.kind == "reduce-scatter"
    }
    assert bytes_of([node.base.codes for node in nodes]) in gathered
    assert scattered == {bytes_of([leaf for node in nodes for leaf in (node.lora_a, node.lora_b)])}


@pytest.mark.slow  # test_the_base_travels_in_its_bits_and_only_adapters_are_reduced
@pytest.mark.parametrize("low_rank_products", [True, False], ids=["low rank", "merged"])
def test_weights_of_products_in_8_bits_are_still_gathered_in_8_bits(low_rank_products, mesh_of):
    """Targets of products of low rank have a base that is.

    A merged weight changes before it is rounded.
    """
    config = dataclasses.replace(CONFIG, precision="int8", dtype=jnp.bfloat16)
    adapted = lora(
        gpt.model(config),
        rank=2,
        targets=["attention/(qkv|out)$"],
        low_rank_products=low_rank_products,
        matrices=gpt.matrices,
    )
    bases = {"attention/qkv/base", "attention/out/base"} if low_rank_products else set()
    assert set(adapted.model.rounded) == {"mlp/up", "mlp/down"} | bases
    params = jax.device_get(gpt_params(adapted))
    trained = []
    for devices in 1, 4:
        options = {"rules": adapted.rules, "min_shard_elements": 8}
        opt = so.fsdp(TX, mesh_of(data=devices), adapted.model, **options)
        state = opt.init(params)
        program = so.hlo.audit(opt.step, state, BATCH)
        for _ in range(2):
            state, _ = opt.step(state, BATCH)
        trained.append(jax.device_get(state.params))
    gathered = sum(
        collective.bytes
        for collective in program.collectives
        if collective.kind == "all-gather" and collective.in_loop
    )
    numbers = (
        sum(leaf.size for leaf in jax.tree.leaves(host_params(gpt.init, CONFIG)["blocks"]))
        / CONFIG.num_layers
    )
    # forwards and backwards, with scales and adapters
    assert low_rank_products == (gathered < 2 * 1.5 * numbers)
    assert relative_difference(*map(factors, trained)) < 1e-3
    assert relative_difference(factors(trained[0]), factors(params)) > 1e-3


def test_low_rank_products_leave_out_the_gradients_of_weights(mesh_of):
    flops = {}
    params = jax.eval_shape(lambda: host_params(gpt.init, CONFIG))
    models = {"full": (gpt.model(CONFIG), {}, params)}
    for products in (False, True):
        adapted = adapted_gpt(low_rank_products=products)
        models[products] = adapted.model, {"rules": adapted.rules}, abstract_gpt_params(adapted)
    for name, (model, options, model_params) in models.items():
        opt = so.ddp(TX, mesh_of(data=1), model, view="unproved", **options)
        lowered = opt.step.lower(opt.abstract_state(model_params), {"tokens": TOKENS})
        flops[name] = so.hlo.inner_product_flops(lowered.compile())
    assert flops[True] < 0.9 * flops["full"] < flops[False]


def test_init_changes_nothing_and_merge_adds_the_product():
    adapted = adapted_gpt()
    params = host_params(gpt.init, CONFIG)
    start = begun(adapted, params, 1)
    for merged, leaf in zip(
        jax.tree.leaves(jax.jit(adapted.merge)(start)), jax.tree.leaves(params), strict=True
    ):
        np.testing.assert_array_equal(merged, leaf)
    node = start["blocks"]["mlp"]["down"]
    assert node.lora_a.shape == (4, 48, 2)
    assert 0.9 / 48**0.5 < np.abs(node.lora_a).max() <= 1 / 48**0.5
    moved = dataclasses.replace(node, lora_b=np.ones((4, 2, 16), np.float32))
    merged = jax.device_get(jax.jit(adapted.merge)({"w": moved})["w"])
    update = merged - params["blocks"]["mlp"]["down"]
    np.testing.assert_allclose(
        update,
        3.0 * np.sum(jax.device_get(node.lora_a), axis=2, keepdims=True) * np.ones((1, 1, 16)),
        rtol=1e-4,
    )


def test_dropout_scales_what_it_keeps_and_evaluation_drops_nothing(mesh_of):
    with_dropout = adapted_gpt(low_rank_products=True, dropout=0.5)
    plain = adapted_gpt(low_rank_products=True)
    params = gpt_params(with_dropout)
    opt = so.ddp(optax.sgd(0.0), mesh_of(data=1), with_dropout.model, rules=with_dropout.rules)
    state = opt.init(params, jax.random.key(3))
    losses = []
    for _ in range(2):
        state, metrics = opt.step(state, BATCH)
        losses.append(float(metrics["loss"]))
    expected = jax.jit(plain.model.loss_fn)(gpt_params(plain), BATCH)
    assert len({*losses, float(expected.total / expected.weight)}) == 3
    assert float(opt.evaluate(state, BATCH)["loss"]) == pytest.approx(
        float(expected.total / expected.weight), rel=1e-6
    )


def scores(params, batch):
    return jnp.mean(batch["tokens"][:, :4].astype(jnp.float32) @ params["w"])


def small_experts():
    config = moe.config(vocab_size=32, dim=16, num_layers=1, num_heads=2, num_experts=4, hidden=8)
    return moe.model(config), host_params(moe.init, config)


MERGED = {
    "without low_rank_products": (
        lambda: (gpt.model(CONFIG), host_params(gpt.init, CONFIG)), ["mlp/down$"], False,
    ),
    "a loss": (lambda: (scores, {"w": np.ones((4, 4), np.float32)}), ["w"], True),
    "the embedding": (
        lambda: (gpt.model(CONFIG), host_params(gpt.init, CONFIG)), ["embedding$"], True,
    ),
    "experts": (small_experts, ["experts/"], True),
}  # fmt: skip


@pytest.mark.parametrize("name", MERGED)
def test_dropout_on_a_weight_that_is_merged_is_refused_in_training_alone(name, mesh_of):
    """It would drop nothing."""
    make, targets, low_rank_products = MERGED[name]
    model, params = make()
    adapted = lora(
        model,
        rank=2,
        targets=targets,
        dropout=0.5,
        matrices=[("experts/", Matrix())],
        low_rank_products=low_rank_products,
    )
    opt = so.fsdp(optax.sgd(0.1), mesh_of(data=2), adapted.model, rules=adapted.rules)
    state = opt.abstract_state(jax.eval_shape(adapted.init, params, jax.random.key(0)))
    with pytest.raises(ValueError, match="lora: dropout acts on"):
        opt.step.lower(state, BATCH)
    opt.evaluate.lower(state, BATCH)


def small(base="float", size=4):
    adapted = lora(
        lambda params, batch: jnp.mean(batch @ params["w"]), rank=2, targets=["w"], base=base
    )
    return adapted, {"w": jnp.linspace(-1, 1, 8 * size).reshape(8, size), "key": jax.random.key(3)}


@pytest.mark.fast
@pytest.mark.parametrize("base", ["float", "nf4"])
def test_adapters_are_loaded_as_they_were_saved_on_any_mesh(base, tmp_path, mesh_of):
    adapted, params = small(base)
    trained = begun(adapted, params, 0)
    trained["w"] = dataclasses.replace(trained["w"], lora_b=jnp.arange(8.0).reshape(2, 4))
    adapted.save(tmp_path, trained)
    start = begun(adapted, params, 1)

    def on_mesh(leaf, spec):
        return jax.device_put(leaf, jax.sharding.NamedSharding(mesh_of(data=2), spec))

    start["w"] = dataclasses.replace(
        start["w"],
        base=jax.tree.map(lambda leaf: on_mesh(leaf, P("data")), start["w"].base),
        lora_a=on_mesh(start["w"].lora_a, P("data")),
    )
    loaded = adapted.load(tmp_path, start)
    np.testing.assert_array_equal(loaded["w"].lora_a, trained["w"].lora_a)
    np.testing.assert_array_equal(loaded["w"].lora_b, trained["w"].lora_b)
    assert loaded["w"].lora_a.sharding == start["w"].lora_a.sharding


@pytest.mark.fast
def test_adapters_of_another_base_or_other_settings_are_refused(tmp_path):
    adapted, params = small()
    adapted.save(tmp_path, begun(adapted, params, 0))
    swapped = {
        **params,
        "w": params["w"].at[0, 0].set(params["w"][0, 1]).at[0, 1].set(params["w"][0, 0]),
    }
    with pytest.raises(
        ValueError,
        match=r"^lora.load: the adapters were trained on another base: its hash was \w{32}",
    ):
        adapted.load(tmp_path, begun(adapted, swapped, 0))
    other = dataclasses.replace(adapted, rank=3)
    message = (
        "lora.load: the adapters were trained with other settings.\n  rank: 2 in the folder, 3"
        " here\nFix: use their settings."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        other.load(tmp_path, begun(other, params, 0))
    with pytest.raises(
        FileNotFoundError, match=r"has no adapter_config[.]json, so it holds no adapters"
    ):
        adapted.load(tmp_path / "none", begun(adapted, params, 0))


class TwoLayers(eqx.Module):
    wide: jax.Array
    down: jax.Array
    bias: jax.Array

    def __call__(self, x):
        return (
            jnp.tanh(jnp.einsum("bd,dhk->bhk", x, self.wide)).reshape(len(x), -1) @ self.down
            + self.bias[None]
        )


@pytest.mark.slow  # test_other_libraries.py
def test_an_equinox_module_has_adapters(mesh_of):
    draw = np.random.default_rng(2)

    def normal(*shape):
        return jnp.asarray(draw.normal(size=shape), jnp.float32)

    model = TwoLayers(normal(6, 2, 4), normal(8, 3), jnp.zeros(3))
    batch = {"x": normal(16, 6), "y": normal(16, 3)}

    def loss_fn(model, batch):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    adapted = lora(loss_fn, rank=2, targets=["wide", "down"], matrices=MATRICES)
    params = adapted.init(model, jax.random.key(0))
    results = []
    for size in (1, 4):
        opt = so.fsdp(
            TX, mesh_of(data=size), adapted.model, rules=adapted.rules, min_shard_elements=1
        )
        state = opt.init(params)
        for _ in range(2):
            state, _ = opt.step(state, batch)
        results.append(jax.device_get(adapted.merge(state.params)))
    assert isinstance(results[0], TwoLayers)
    assert np.abs(results[0].wide - model.wide).max() > 1e-3
    for first, second in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(first, second, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_experts_have_adapters_on_every_mesh(mesh_of):
    config = moe.config(
        vocab_size=32,
        dim=16,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
        num_experts=4,
        hidden=8,
        balance=None,
    )
    params = host_params(moe.init, config)
    results = []
    adapted = lora(
        moe.model(config),
        rank=2,
        targets=["^blocks/experts/"],
        matrices=[("experts/", Matrix())],
        rules=moe.rules,
        low_rank_products=True,
    )
    for sizes in ({"data": 1}, {"data": 2, "expert": 2}, {"data": 2, "expert": 2, "tensor": 2}):
        opt = so.fsdp(
            TX,
            mesh_of(**sizes),
            adapted.model,
            rules=adapted.rules,
            min_shard_elements=1,
            view="per_device",
        )
        state = opt.init(begun(adapted, params, 1))
        for _ in range(3):
            state, _ = opt.step(state, {"tokens": TOKENS})
        results.append(factors(state.params))
    for other in results[1:]:
        for path, leaf in results[0].items():
            np.testing.assert_allclose(other[path], leaf, rtol=1e-3, atol=1e-5, err_msg=path)


@pytest.mark.fast
def test_nf4_rounds_to_the_nearest_of_its_16_values():
    weight = np.random.default_rng(0).normal(size=(3, 128)).astype(np.float32)
    stored = jax.jit(quantize, static_argnums=1)(weight, "nf4")
    assert isinstance(stored, QuantizedWeight)
    assert (stored.codes.shape, stored.codes.dtype, stored.scales.shape) == (
        (3, 64),
        jnp.uint8,
        (3, 2),
    )
    groups = weight.reshape(3, 2, 64)
    largest = np.abs(groups).max(-1, keepdims=True)
    nearest = NF4[np.abs(groups[..., None] / largest[..., None] - NF4).argmin(-1)] * largest
    dequantized = jax.jit(lambda weight: quantize(weight, "nf4").dequantized())
    np.testing.assert_allclose(dequantized(weight), nearest.reshape(3, 128), rtol=1e-6)
    np.testing.assert_array_equal(dequantized(np.zeros((2, 6), np.float32)), np.zeros((2, 6)))


@pytest.mark.fast
def test_int8_rounds_to_half_a_step():
    weight = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    stored = jax.jit(quantize, static_argnums=1)(np.asarray(weight, jnp.bfloat16), "int8")
    assert (stored.codes.dtype, stored.scales.shape, stored.dequantized().dtype) == (
        jnp.int8,
        (3, 1),
        jnp.bfloat16,
    )
    exact = np.asarray(stored.codes) * np.asarray(stored.scales)
    steps = np.abs(weight).max(1, keepdims=True) / 127
    assert (
        np.abs(exact - np.asarray(jnp.asarray(weight, jnp.bfloat16), np.float32)) <= 0.51 * steps
    ).all()


@pytest.mark.fast
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rank": 0}, ValueError, "lora: rank must be at least 1, got 0."),
        (
            {"targets": "w"},
            TypeError,
            "lora: targets must be a list of regexes, got 'w'.\nFix: name weights by their key"
            " paths.",
        ),
        (
            {"base": "int4"},
            ValueError,
            "lora: unknown base 'int4'.\nFix: choose 'float', 'int8' or 'nf4'.",
        ),
        (
            {"rules": print},
            TypeError,
            "lora: rules must be [(regex, PartitionSpec), ...], got a function.",
        ),
    ],
)
def test_wrong_options_are_refused(options, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        lora(lambda params, batch: 0.0, **{"rank": 2, "targets": ["w"], **options})


@pytest.mark.fast
def test_targets_that_do_not_fit_are_refused_at_once():
    adapted = lora(
        lambda params, batch: 0.0,
        rank=2,
        targets=["w", "no"],
        base="nf4",
        rules=[("gone", P("tensor"))],
    )
    params = {"w": {"a": jnp.ones(3), "b": jnp.ones((2, 2), int), "c": jnp.ones((2, 3))}}
    message = (
        "lora: 5 problems with the targets.\n  w/a: shape (3,) has no Matrix that says which dims"
        " are rows\n  w/b: dtype int32 is not floating\n  w/c: shape (2, 3), base='nf4' stores"
        " pairs along the last dim, which is odd\n  target 'no' matches no parameter, such as: w/a,"
        " w/b, w/c\n  rule 'gone' matches no parameter, such as: w/a, w/b, w/c\nFix: match weights"
        " with targets, leave vectors out, and describe other weights with matrices=."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        begun(adapted, params, 0)
