"""Our models on a tensor axis that does not divide the vocabulary or the heads of keys. These
leaves stay whole, and the report says so with sizes that would divide. Steps equal one device.
"""

import numpy as np
import optax
import pytest
from support.host import host_params
from support.reference import relative_difference, train
from support.tiers import tiered

import shardopt as so
from shardopt.models import decoder, gpt, moe
from shardopt.models.decoder import DecoderConfig

V = 33
SIZES = {"vocab_size": V, "dim": 24, "num_layers": 2}
CASES = {  # model, parameters, rules, and the leaves that stay whole
    "gpt": lambda: (gpt, gpt.config(**SIZES, num_heads=2, max_length=8), gpt.rules, {"embedding": 0, "head": 0}),
    "moe": lambda: (moe, moe.config(**SIZES, num_heads=6, num_kv_heads=3, max_length=8), moe.rules, {"embedding": 0, "head": 0, "blocks/attention/kv": 1}),
    "tied": lambda: of_decoder(DecoderConfig(**SIZES, num_heads=2, hidden=32, tied=True), {"embedding": 0}),
    "three heads of keys": lambda: of_decoder(DecoderConfig(**{**SIZES, "vocab_size": 32}, num_heads=6, num_kv_heads=3, hidden=32), {"blocks/attention/k": 1, "blocks/attention/v": 1}),
}  # fmt: skip


def of_decoder(config, replicated_leaves):
    return decoder, config, decoder.rules(config), replicated_leaves


def case(name):
    module, config, rules, replicated_leaves = CASES[name]()
    return module.model(config), host_params(module.init, config), rules, replicated_leaves


@pytest.mark.parametrize("name", CASES)
def test_what_tensor_does_not_divide_stays_whole_and_the_report_says_so(name, mesh_of):
    model, params, rules, replicated_leaves = case(name)
    opt = so.fsdp(optax.sgd(0.1), mesh_of(data=4, tensor=2), model, rules=rules)
    opt.specs(params)
    lines = opt.config.report().whole
    assert {line.split(" ")[0] for line in lines} <= set(replicated_leaves) | {"head"}
    for line in lines:
        length = V if "33" in line else 3
        assert f"which tensor=2 does not divide; it divides {length - 1} or {length + 1}" in line
        assert line in str(opt.config.report())
    assert {line.split(" ")[0] for line in lines} & set(replicated_leaves)


@pytest.mark.parametrize("name", tiered(CASES, lambda name: name == "three heads of keys"))
def test_steps_are_those_of_one_device(name, mesh_of):
    model, params, rules, _ = case(name)
    tokens = np.random.default_rng(0).integers(0, 32, (2, 8, 9)).astype(np.int32)
    batches = [{"tokens": rows} for rows in tokens]

    tx = optax.sgd(0.1, momentum=0.9)
    opt = so.fsdp(tx, mesh_of(data=2, tensor=2), model, rules=rules)
    state = opt.init(params)
    for batch in batches:
        state, _ = opt.step(state, batch)
    _, expected = train(tx, model.loss_fn, params, batches)
    assert relative_difference(state.params, expected) < 1e-4


def test_a_users_own_rule_is_refused_as_before(mesh_of):
    params = {"w": np.ones((33, 8), np.float32)}
    from jax.sharding import PartitionSpec as P

    opt = so.fsdp(optax.sgd(0.1), mesh_of(data=4, tensor=2), lambda p, b: (b @ p["w"]).mean(), rules=[("w", P("tensor"))])  # fmt: skip
    with pytest.raises(ValueError, match="cannot be split over mesh axis 'tensor'"):
        opt.specs(params)
