"""The decoder with experts: the same on any mesh, balanced in each of three ways.

Its loads and biases.
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
from support.host import host_params
from support.layouts import active_parameters
from support.reference import relative_difference

import shardopt as so
from shardopt.models import _decoder_block, decoder, moe, sample
from shardopt.planning._models import find_model

SIZES = {
    "vocab_size": 32,
    "dim": 16,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "num_experts": 4,
    "hidden": 8,
    "shared_hidden": 4,
    "balance_rate": 0.01,
    "param_dtype": jnp.float64,
}
SMALL = moe.config(**SIZES)
TX = optax.sgd(0.3, momentum=0.9)
LEAVES = {"rules": moe.rules}


def config_of(**changes):
    return moe.config(**SIZES | changes)


def batches(steps=2, *, weights=False):
    rng = np.random.default_rng(0)
    token_batches = []
    for _ in range(steps):
        tokens = rng.integers(0, 32, (8, 9)).astype(np.int32)
        token_batches.append({"tokens": tokens[:, :-1], "targets": tokens[:, 1:]})
        if weights:
            token_batches[-1]["weights"] = rng.integers(0, 2, (8, 8)).astype(np.float32)
    return token_batches


def params_of(config):
    return host_params(moe.init, config)


def trained(opt, config, training_batches):
    """Return the metrics of each step and the parameters after the last."""
    state = opt.init(params_of(config))
    history = []
    for batch in training_batches:
        state, metrics = opt.step(state, batch)
        history.append({name: float(value) for name, value in metrics.items()})
    return history, state.params


def on_one_device(config, training_batches):
    opt = so.ddp(
        TX, so.make_mesh(devices=jax.devices()[:1]), moe.model(config), view="global", **LEAVES
    )
    return trained(opt, config, training_batches)


TABLE = [
    ("ddp", {"expert": 2, "data": 2}, {}, {}),
    ("fsdp", {"expert": 2, "data": 2}, {"loss_chunk": 3}, {"micro_batches": 2}),
    ("fsdp", {"expert": 4, "data": 2}, {"balance": "loss", "z_loss": 1e-3}, {}),
    ("fsdp", {"expert": 2, "context": 2}, {"z_loss": 1e-3}, {}),
    (
        "zero2",
        {"expert": 2, "data": 2, "tensor": 2},
        {"score": "sigmoid", "groups": (2, 1)},
        {"micro_batches": 2},
    ),
    ("ddp", {"expert": 2, "data": 2, "replica": 2}, {"chunk": 5}, {}),
    (
        "hybrid",
        {"expert": 2, "data": 1, "pipeline": 2},
        {"chunk": 7},
        {"micro_batches": 2},
    ),
    (
        "hybrid",
        {"expert": 2, "pipeline": 2, "tensor": 2},
        {"balance": "sequence_loss"},
        {"micro_batches": 4},
    ),
    ("global", {"expert": 2, "data": 2, "tensor": 2}, {"balance": "loss"}, {}),
    ("zero1", {"data": 4}, {"balance": None}, {}),
]


def row_id(row):
    name, sizes, changes, options = row
    parts = [
        name,
        *(f"{axis}{size}" for axis, size in sizes.items()),
        *map(str, changes),
        *map(str, options),
    ]
    return "-".join(parts)


LATENT = decoder.LatentConfig(query=6, key=5, nope=4, rope=2, value=3)
TABLE += [
    # the remedy that the refusal names
    ("global", {"expert": 2, "context": 2}, {"balance": "loss"}, {}),
    ("fsdp", {"expert": 2, "context": 2}, {"latent": LATENT, "num_kv_heads": None}, {}),
    (
        "zero1",
        {"expert": 2, "data": 2, "tensor": 2},
        {"latent": LATENT, "num_kv_heads": None},
        {"micro_batches": 2},
    ),
    (
        "hybrid",
        {"expert": 2, "pipeline": 2},
        {"latent": LATENT, "num_kv_heads": None},
        {"micro_batches": 2},
    ),
    ("fsdp", {"expert": 2, "context": 2}, {"precision": "int8", "chunk": 5}, {"micro_batches": 2}),
    ("zero2", {"expert": 2, "data": 2, "tensor": 2}, {"precision": "fp8"}, {}),
    ("hybrid", {"expert": 2, "pipeline": 2}, {"precision": "int8"}, {"micro_batches": 2}),
    ("global", {"expert": 2, "data": 2, "tensor": 2}, {"precision": "int8"}, {}),
]


def strategy(name, mesh, config, **options):
    how = {**LEAVES, **options}
    if name == "ddp":
        return so.ddp(TX, mesh, moe.model(config), **how)
    if name.startswith("zero"):
        return so.zero(
            TX, mesh, moe.model(config), stage=int(name[4:]), min_shard_elements=8, **how
        )
    if name == "global":
        how["view"] = "global"
    make = so.hybrid if name == "hybrid" else so.fsdp
    return make(TX, mesh, moe.model(config), min_shard_elements=8, **how)


@pytest.mark.slow  # test_biases_follow_the_loads_of_the_step_before
@pytest.mark.parametrize(
    ("name", "sizes", "changes", "options"), [pytest.param(*row, id=row_id(row)) for row in TABLE]
)
def test_trains_as_on_one_device(name, sizes, changes, options, mesh_of, x64):
    config = config_of(**changes)
    history, params = trained(
        strategy(name, mesh_of(**sizes), config, **options), config, batches()
    )
    wanted, final = on_one_device(dataclasses.replace(config, loss_chunk=None), batches())
    assert relative_difference(params, final) <= 1e-10
    for a, b in zip(history, wanted, strict=True):
        assert a.keys() == b.keys()
        np.testing.assert_allclose(list(a.values()), list(b.values()), rtol=1e-10)
    assert np.allclose(params["router_load"].sum(axis=1), 1)


def tied(params):
    """Every score is the same, so ties decide all."""
    params["blocks"]["router"]["kernel"] *= 0
    return params


def without_tokens(params):
    """Nobody goes to one of the experts."""
    params["router_bias"][:, 5] = -100
    return params


PAIRS = [  # 8 experts, float32; each pair of mesh and special case comes once
    ("fsdp", {"expert": 8}, {"top_k": 1, "shared_hidden": 0}, {}, tied),
    ("fsdp", {"expert": 8}, {"top_k": 2}, {}, without_tokens),
    ("zero1", {"expert": 4}, {"top_k": 3, "shared_hidden": 0}, {"micro_batches": 2}, tied),
    ("fsdp", {"expert": 4, "data": 2}, {"top_k": 1, "score": "sigmoid"}, {}, without_tokens),
    (
        "ddp",
        {"expert": 2, "data": 2, "tensor": 2},
        {"top_k": 2, "score": "sigmoid"},
        {"micro_batches": 2},
        tied,
    ),
    (
        "zero2",
        {"expert": 2, "data": 2, "tensor": 2},
        {"top_k": 3, "shared_hidden": 0},
        {},
        without_tokens,
    ),
    (
        "hybrid",
        {"expert": 4, "pipeline": 2},
        {"top_k": 2, "score": "sigmoid"},
        {"micro_batches": 2},
        tied,
    ),
    (
        "hybrid",
        {"expert": 2, "data": 2, "pipeline": 2},
        {"top_k": 1},
        {"micro_batches": 2},
        without_tokens,
    ),
    ("fsdp", {"expert": 4, "context": 2}, {"top_k": 2, "normalize": False}, {}, without_tokens),
    ("fsdp", {"expert": 8}, {"top_k": 3, "balance": "loss", "score": "sigmoid"}, {}, tied),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "changes", "options", "start"),
    [pytest.param(*row, id=f"{row_id(row[:4])}-{row[4].__name__}") for row in PAIRS],
)
def test_trains_as_on_one_device_in_float32(name, sizes, changes, options, start, mesh_of):
    config = config_of(num_experts=8, param_dtype=jnp.float32, **changes)
    params = []
    training_batches = batches()
    reference_opt = so.ddp(TX, so.make_mesh(devices=jax.devices()[:1]), moe.model(config), **LEAVES)
    for opt in (strategy(name, mesh_of(**sizes), config, **options), reference_opt):
        state = opt.init(start(params_of(config)))
        for batch in training_batches:
            state, _ = opt.step(state, batch)
        params.append(state.params)
        load = state.params["router_load"]
        assert start is tied or not np.any(load[:, 5])
    assert relative_difference(*params) <= 2e-5


@pytest.mark.slow
def test_a_weighted_loss_has_the_terms_for_balance_beside_it(mesh_of, x64):
    config = config_of(balance="sequence_loss", z_loss=1e-3)
    training_batches = batches(weights=True)
    history, params = trained(
        strategy("fsdp", mesh_of(expert=2, data=2), config), config, training_batches
    )
    wanted, final = on_one_device(config, training_batches)
    assert relative_difference(params, final) <= 1e-10
    assert np.isclose(history[0]["loss"], wanted[0]["loss"], rtol=1e-10)
    assert history[0]["loss"] > history[0]["cross_entropy"] + 1e-4


def test_the_loss_for_balance_over_the_batch_is_refused_with_micro_batches(mesh_of):
    config = config_of(balance="loss", param_dtype=jnp.float32)
    opt = strategy("fsdp", mesh_of(data=2), config, micro_batches=2, view="per_device")
    message = (
        "batch_mean: with micro_batches=2 the loss sees one micro-batch at a time, never the rows"
        " of the whole batch.\nFix: use micro_batches=1, or view='global', or balance='bias', which"
        " needs no other rows."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        opt.step(opt.init(params_of(config)), batches()[0])


@pytest.mark.slow
def test_biases_follow_the_loads_of_the_step_before(mesh_of, x64):
    """Devices share out rows and experts. Losses, gradients and loads equal one device."""
    opt = strategy("ddp", mesh_of(expert=2, data=2), SMALL)
    states = []

    def mean_loss(params, batch):
        loss, aux = moe.model(SMALL).loss_fn(params, batch)
        return loss.total / loss.weight, aux

    of_one_device = jax.jit(jax.value_and_grad(mean_loss, has_aux=True))
    state = opt.init(params_of(SMALL))
    params = params_of(SMALL)
    momentum = jax.tree.map(np.zeros_like, params)
    for batch in batches():
        state, metrics = opt.step(state, batch)
        (loss, aux), grads = jax.device_get(of_one_device(params, batch))
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-10)
        momentum = jax.tree.map(lambda total, grad: 0.9 * total + grad, momentum, grads)
        expected = jax.tree.map(lambda leaf, total: leaf - 0.3 * total, params, momentum)
        params = jax.device_get(state.params)
        updated = {name: params[name] for name in ("router_load", "router_bias")}
        assert relative_difference(params, expected | updated) <= 1e-10
        np.testing.assert_allclose(
            params["router_load"], aux["routers"].values["router_load"], rtol=1e-10
        )
        states.append(params)
    assert not np.any(states[0]["router_bias"])
    load = states[0]["router_load"]
    np.testing.assert_allclose(states[1]["router_bias"], 0.01 * np.sign(0.25 - load), atol=1e-12)


@pytest.mark.slow
def test_loads_are_balanced_by_biases_and_by_the_loss():
    tokens = np.random.default_rng(0).integers(0, 32, (16, 17)).astype(np.int32)
    imbalance = {}
    for balance, rate in ((None, 0.0), ("bias", 0.01), ("loss", 0.1)):
        changes = {
            "num_layers": 1,
            "num_experts": 8,
            "shared_hidden": 0,
            "param_dtype": jnp.float32,
        }
        config = config_of(balance=balance, balance_rate=rate, **changes)
        params = params_of(config)
        params["embedding"] += 0.02  # what all tokens share is what two experts like
        params["blocks"]["router"]["kernel"][:, :, :2] += 0.3
        opt = so.ddp(
            optax.sgd(0.1), so.make_mesh(devices=jax.devices()[:1]), moe.model(config), **LEAVES
        )
        state = opt.init(params)
        imbalances = []
        for _ in range(40):
            state, metrics = opt.step(state, {"tokens": tokens})
            imbalances.append(float(metrics["load_imbalance"]))
        assert imbalances[1] == 4
        # biases move by a fixed rate, so that loads swing around their mean
        imbalance[balance] = np.mean(imbalances[-10:])
    assert max(imbalance["bias"], imbalance["loss"]) < 2 < 2.4 < imbalance[None]


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["full", "save:router,dispatched,experts", "save:attention"])
def test_remat_changes_nothing(remat, mesh_of, x64):
    opt = so.fsdp(
        TX, mesh_of(expert=2, data=2), moe.model(SMALL, remat=remat), min_shard_elements=8, **LEAVES
    )
    _, params = trained(opt, SMALL, batches())
    assert relative_difference(params, on_one_device(SMALL, batches())[1]) <= 1e-10


@pytest.mark.slow
def test_replicas_that_train_apart_have_experts_of_their_own(mesh_of, x64):
    opt = so.local_sgd(strategy("fsdp", mesh_of(replica=2, expert=2), SMALL), sync_every=1)
    _, params = trained(opt, SMALL, batches(1))
    alone = so.local_sgd(strategy("fsdp", mesh_of(replica=2), SMALL), sync_every=1)
    assert relative_difference(params, trained(alone, SMALL, batches(1))[1]) <= 1e-10


def by_heads(weights, x, latent, base):
    """Return latent attention in numpy, one head and position after another."""

    def norm(x, scale):
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale

    def turned(x):
        angles = np.arange(len(x))[:, None] * base ** (
            -np.arange(latent.rope // 2) / (latent.rope // 2)
        )
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate(
            [
                first * np.cos(angles) - second * np.sin(angles),
                first * np.sin(angles) + second * np.cos(angles),
            ],
            axis=-1,
        )

    w = {name: np.asarray(leaf) for name, leaf in weights.items()}
    out = np.zeros(x.shape)
    for row, y in zip(x, out, strict=True):
        queries = norm(row @ w["q_down"], w["q_norm"])
        narrow = norm((row @ w["kv_down"])[:, : latent.key], w["kv_norm"])
        shared = turned((row @ w["kv_down"])[:, latent.key :])
        for head in range(w["out"].shape[0]):
            query = queries @ w["q"][:, head]
            both = narrow @ w["kv"][:, head]
            query = np.concatenate(
                [query[:, : latent.nope], turned(query[:, latent.nope :])], axis=1
            )
            key = np.concatenate([both[:, : latent.nope], shared], axis=1)
            value = both[:, latent.nope :]
            for t in range(len(row)):
                weight = np.exp(key[: t + 1] @ query[t] / np.sqrt(latent.nope + latent.rope))
                y[t] += (weight / weight.sum()) @ value[: t + 1] @ w["out"][head]
    return out


@pytest.mark.parametrize("implementation", ["xla", "positions", "splash"])
def test_latent_attention_is_that_of_each_head_by_itself(implementation, x64, monkeypatch):
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(size=shape) for name, shape in LATENT.shapes(8, 3).items()}
    x = rng.normal(size=(2, 7, 8))
    order = None
    wanted = by_heads(weights, x, LATENT, 100.0)
    if implementation == "positions":
        order = jnp.arange(7)[None].repeat(2, 0)
    if implementation == "splash":
        weights, x = jax.tree.map(np.float32, (weights, x))
        attention = inspect.unwrap(so.nn.attention)
        defaults = attention.__kwdefaults__ | {"implementation": "splash"}
        monkeypatch.setattr(attention, "__kwdefaults__", defaults)
    kinds = (decoder.BlockKind(rope=decoder.Rope(base=100.0)),)
    config = decoder.DecoderConfig(dim=8, num_heads=3, latent=LATENT, kinds=kinds)
    stream = _decoder_block.BlockStream(x, None, None, None, order)
    run = functools.partial(_decoder_block._attention, config, stream=stream, cache=None, start=0)
    np.testing.assert_allclose(
        jax.jit(run)(weights, x)[0],
        wanted,
        rtol=1e-10 if x.dtype == np.float64 else 1e-4,
        atol=1e-4 * (x.dtype != np.float64),
    )


def test_the_shape_of_deepseek_v3_is_that_of_the_planner():
    shape = find_model("deepseek-v3")
    query, key, rope = shape.latent
    config = moe.config(
        vocab_size=shape.vocab_size, dim=shape.dim, num_layers=shape.num_layers, num_heads=shape.num_heads,
        num_experts=shape.num_experts, top_k=shape.top_k, hidden=shape.hidden, shared_hidden=shape.hidden,
        latent=decoder.LatentConfig(query, key, shape.width, rope, shape.width),
    )  # fmt: skip
    assert moe.num_parameters(config) == shape.num_parameters
    assert moe.num_parameters(config, active=True) == active_parameters(shape)
    leaves = jax.tree.leaves(jax.eval_shape(lambda: moe.init(config, jax.random.key(0))))
    # loads and biases
    assert sum(leaf.size for leaf in leaves) == shape.num_parameters + 2 * 58 * 256


@pytest.mark.slow
def test_samples_are_those_of_the_logits():
    config = config_of(param_dtype=jnp.float32)
    params = params_of(config)
    prompt = np.array([[3, 1, 4]])
    tokens = sample(params, config, prompt, jax.random.key(0), num_tokens=4, temperature=0.0)
    logits = jax.jit(functools.partial(moe.logits_of, config))(params, tokens)
    assert tokens[:, :3].tolist() == prompt.tolist()
    assert tokens[:, 3:].tolist() == jnp.argmax(logits[:, 2:-1], axis=-1).tolist()
    with pytest.raises(ValueError, match="prompt must hold at least one token a row"):
        sample(params, config, prompt[:, :0], jax.random.key(0), num_tokens=4)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads=3 does not divide num_heads=4"),
        ({"dim": 12}, "the dims that rotate must be even and the same in all kinds, got [3]"),
        ({"dim": 18}, "dim=18 cannot be cut into num_heads=4, so give head_dim"),
        ({"top_k": 5}, "experts.top_k=5, but a token can go to 4 experts only"),
        ({"hidden": 0}, "hidden must be positive, got 0"),
        (
            {"latent": LATENT},
            "num_kv_heads, qk_norm and qkv_bias are for attention that is not latent",
        ),
        (
            {"latent": LATENT._replace(value=7), "num_kv_heads": None},
            "latent.value=7 is wider than queries and keys, which have 6 dims",
        ),
        (
            {"latent": LATENT._replace(query=0), "num_kv_heads": None},
            "the sizes of latent must be positive, got"
            " LatentConfig(query=0, key=5, nope=4, rope=2, value=3)",
        ),
    ],
    ids=str,
)
def test_sizes_that_cannot_be_are_refused(change, line):
    with pytest.raises(
        ValueError,
        match=f"^{re.escape(f'DecoderConfig: 1 field cannot be used.{chr(10)}  {line}')}$",
    ):
        config_of(**change)
