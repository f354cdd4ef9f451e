"""A reducer states the bytes of the compiled program, and the promised ratios hold."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from support.tiers import tiered

import shardopt as so
from shardopt.models import gpt
from shardopt.reducers import _mean as mean

R = so.reducers
REDUCERS = [
    R.exact(),
    R.exact(jnp.bfloat16),
    R.int8(),
    R.int8(7),
    R.sign(),
    R.sign(16),
    R.top_k(0.01),
    R.power_sgd(4),
    R.power_sgd(2, min_ratio=0),
]
ODD = {
    "matrix": jnp.ones((37, 53)),
    "vector": jnp.ones(11),
    "scalar": jnp.ones(()),
    "half": jnp.ones((5, 5), jnp.bfloat16),
    "complex": jnp.ones(3, jnp.complex64),
    "empty": jnp.ones((0, 3)),
}


def program_of(reducer, mesh, axis="data"):
    def f(grads, state):
        return reducer.reduce(grads, state, axis)

    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))


def audited(reducer, mesh, grads, axis="data"):
    state = jax.eval_shape(reducer.init, grads)
    return so.hlo.audit(program_of(reducer, mesh, axis), grads, state, mesh=mesh)


AGAIN = ("exact()", "int8(block_size=7)", "sign(block_size=1024)", "power_sgd(rank=2)")


@pytest.mark.parametrize(
    ("reducer", "size"),
    tiered(
        [(tested_reducer, size) for tested_reducer in REDUCERS for size in (3, 8)],
        lambda row: row[0].name not in AGAIN and row[1] == 3,
        ids=lambda row: f"{row[0].name}-{row[1]}",
    ),
)
def test_the_compiled_program_sends_what_was_stated(reducer, size, mesh_of):
    """On three devices, which divide nothing, with error feedback; on eight without."""
    tested_reducer = R.error_feedback(reducer) if size == 3 else reducer
    audit = audited(tested_reducer, mesh_of(data=size), ODD)
    assert audit.total_wire_bytes == tested_reducer.wire_bytes(ODD, size), f"{audit}"
    assert {collective.axes for collective in audit.collectives} == {("data",)}


@pytest.mark.parametrize(
    "reducer",
    tiered(
        [R.int8(), R.exact(), R.top_k(0.1)],
        lambda scheme: "int8" in scheme.name,
        ids=lambda scheme: scheme.name,
    ),
)
def test_two_axes_send_what_one_of_their_size_does(reducer, mesh_of):
    audit = audited(reducer, mesh_of(replica=2, data=2), ODD, ("replica", "data"))
    assert audit.total_wire_bytes == reducer.wire_bytes(ODD, 4)
    assert {collective.axes for collective in audit.collectives} == {("replica", "data")}


def test_nothing_is_sent_to_nobody(mesh_of):
    assert [reducer.wire_bytes(ODD, 1) for reducer in REDUCERS] == [0] * len(REDUCERS)
    assert audited(R.int8(), mesh_of(data=1), ODD).collectives == ()


@pytest.mark.parametrize(
    ("reducer", "kinds"),
    [
        (R.int8(), {"s8", "f32"}),
        (R.sign(), {"u8", "f32"}),
        (R.top_k(0.01), {"u32", "f32"}),
        (R.exact(jnp.bfloat16), {"u16"}),
    ],
    ids=["int8", "sign", "top_k", "bfloat16"],
)
def test_what_crosses_is_compact(reducer, kinds, mesh_of):
    """Whatever is fp32 is small: scales, or the chosen values."""
    grads = {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}
    audit = audited(reducer, mesh_of(data=4), grads)
    assert {
        shape.split("[")[0] for collective in audit.collectives for shape in collective.shapes
    } == kinds
    floats = [
        collective.bytes
        for collective in audit.collectives
        if collective.shapes[0].startswith("f32")
    ]
    assert all(size <= 0.05 * 4 * (64 * 64 + 64) for size in floats)


@pytest.fixture(scope="module")
def gpt_params():
    config = gpt.config()
    return jax.eval_shape(lambda: gpt.init(config, jax.random.key(0)))


@pytest.mark.parametrize("size", [2, 4, 8, 64])
def test_reducers_have_the_promised_ratios_to_fp32_ddp(gpt_params, size):
    full = R.exact().wire_bytes(gpt_params, size)
    elements = sum(leaf.size for leaf in jax.tree.leaves(gpt_params))
    assert full == pytest.approx(2 * (size - 1) / size * 4 * elements, rel=1e-4)

    def ratio(reducer):
        return R.error_feedback(reducer).wire_bytes(gpt_params, size) / full

    assert ratio(R.exact(jnp.bfloat16)) == pytest.approx(0.5, rel=1e-3)
    assert 0.25 < ratio(R.int8()) <= 0.27
    assert 1 / 32 < ratio(R.sign()) <= 0.04
    assert ratio(R.top_k(0.01)) <= 0.03 * size


def test_power_sgd_on_the_gpt_is_its_formula(gpt_params):
    """Rank times (rows + columns) of each matrix of each block, and the vectors as they are."""
    size = 4
    rank = 4
    numbers = [0, 0]
    # dims that are rows
    views = {"embedding": 1, "head": 1, "qkv": 1, "out": 2, "up": 2, "down": 1}
    for path, leaf in jax.tree_util.tree_leaves_with_path(gpt_params):
        name = path[-1].key
        shape = leaf.shape
        layers, dims = (shape[0], shape[1:]) if path[0].key == "blocks" else (1, shape)
        if name == "norm":
            numbers[0] += leaf.size
            continue
        rows = 1
        for length in dims[: views[name]]:
            rows *= length
        numbers[0] += rank * layers * rows
        numbers[1] += rank * leaf.size // rows
    padded = sum(-(-count // size) * size for count in numbers)
    assert R.power_sgd(rank).wire_bytes(gpt_params, size) == 2 * (size - 1) * padded * 4 // size


def test_the_gpt_compiles_to_those_bytes(gpt_params, mesh_of):
    audit = audited(R.int8(), mesh_of(data=4), gpt_params)
    assert audit.total_wire_bytes == R.int8().wire_bytes(gpt_params, 4)


def test_leaves_travel_in_buckets(mesh_of, monkeypatch):
    many = {f"leaf{i}": jnp.ones((30, 10)) for i in range(7)}
    audit = audited(R.int8(), mesh_of(data=4), many)
    assert [collective.kind for collective in audit.collectives] == ["all-to-all"] * 2 + [
        "all-gather"
    ] * 2, "codes and scales"
    monkeypatch.setattr(mean, "BUCKET_ELEMENTS", 1000)
    assert [bucket.size for bucket in mean.buckets_of([300] * 7, ["fp32"] * 7)] == [900, 900, 300]
    assert R.int8().wire_bytes(many, 4) == audited(R.int8(), mesh_of(data=4), many).total_wire_bytes
