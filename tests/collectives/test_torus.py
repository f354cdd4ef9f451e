"""A gather over a whole torus goes in two steps: the same result, and (slow) what XLA:TPU makes of it."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardopt as so
from shardopt.collectives import all_gather, per_device, reduce_scatter
from shardopt.models import transformer
from shardopt.planning import Transformer

steps = importlib.import_module("shardopt.collectives.shards")  # as an attribute, the function of that name


@pytest.mark.parametrize(
    ("kind", "size", "devices", "whole"),
    [
        ("TPU v5", 64, 64, True),
        ("TPU v4", 128, 128, True),
        ("TPU7x", 512, 512, True),
        ("TPU v5", 32, 32, False),  # seen to be gathered over
        ("TPU v5", 64, 128, False),  # half of the chips
        ("TPU v5 lite", 256, 256, False),  # a torus of two axes
        ("cpu", 64, 64, False),
    ],
)
def test_which_axes_are_a_whole_torus(kind, size, devices, whole):
    assert steps.is_whole_torus(kind, size, devices) is whole
    assert not steps.is_whole_torus(None, size, devices)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32])
def test_two_steps_are_one_gather_and_one_scatter(dim, dtype, mesh_of, monkeypatch):
    mesh = mesh_of(data=8)
    spec = P("data") if dim == 0 else P(None, "data")
    x = jnp.arange(16.0 * 32).reshape(16, 32).astype(dtype)

    def both(x):
        whole = all_gather([x], [dim], [P()], axis="data")[0]
        rank = jax.lax.axis_index("data").astype(dtype)
        return whole, reduce_scatter([whole * rank], [dim], [P()], axis="data")[0]

    def run():
        split = per_device(both, mesh, in_specs=(spec,), out_specs=(P(), spec))
        lowered = jax.jit(so.mesh.on_mesh(mesh, split)).lower(x)
        audit = so.audit(lowered, mesh=mesh)
        return lowered.compile()(x), audit.by_kind(), audit

    (whole, part), one, _ = run()
    np.testing.assert_array_equal(whole, x)
    np.testing.assert_array_equal(part, x * sum(range(8)))
    monkeypatch.setattr(steps, "is_whole_torus", lambda *args: True)
    (again, piece), two, audit = run()
    np.testing.assert_array_equal(again, whole)
    # each step rounds its sums to the dtype that it was given
    rtol = 0.01 if dtype == jnp.bfloat16 else 0.0
    np.testing.assert_allclose(np.asarray(piece, np.float64), np.asarray(part, np.float64), rtol=rtol)
    for kind in ("all-gather", "reduce-scatter"):
        assert (one[kind].calls, two[kind].calls) == (1, 2)
        assert two[kind].wire_bytes == one[kind].wire_bytes
    assert [(found.axes, found.group_size, found.part) for found in audit.collectives] == [
        (("data",), size, True) for size in (2, 4, 4, 2)
    ]
    assert str(audit).count("  a step of 2 along it  ") == str(audit).count("  a step of 4 along it  ") == 2
    assert "mixed" not in str(audit)


def test_a_step_of_training_is_the_same_in_two_steps(mesh_of, monkeypatch):
    mesh = mesh_of(data=8)
    loss_fn = lambda params, batch: jnp.mean((jnp.tanh(batch @ params["a"]) @ params["b"]) ** 2)  # noqa: E731

    def train():
        opt = so.fsdp(optax.sgd(0.1, momentum=0.9), mesh, loss_fn, min_shard_elements=1)
        state = opt.init({"a": jnp.ones((16, 32)) / 8, "b": jnp.linspace(-1, 1, 32 * 8).reshape(32, 8)})
        for seed in range(3):
            batch = np.random.default_rng(seed).normal(size=(16, 16)).astype(np.float32)
            state, _ = opt.step(state, batch)
        gathers = [one for one in so.audit(opt.step, state, batch).collectives if one.kind == "all-gather"]
        return state.params, len(gathers)

    expected, once = train()
    monkeypatch.setattr(steps, "is_whole_torus", lambda *args: True)
    found, twice = train()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)
    assert twice == 2 * once > 0


@pytest.mark.slow
def test_the_compiler_makes_gathers_and_scatters_of_it():
    """Fails, rather than skips, where libtpu is not installed: pip install 'shardopt[tpu]'."""
    shape = Transformer("t", 1024, 2, 8, 4096, 8192, 128, num_kv_heads=8)
    report = so.aot(
        lambda mesh: so.fsdp(
            optax.adamw(1e-3), mesh, transformer.model(shape, remat="full"), gather_dtype=jnp.bfloat16
        ),
        shape.abstract_params(),
        transformer.abstract_batch(shape, 64),
        topology="v5p:4x4x4",
    )
    blocks = shape.num_parameters - 2 * 8192 * 1024 - 1024
    found = report.audit
    assert {one.axes for one in found.collectives if one.part} == {("data",)}
    assert {one.group_size for one in found.collectives if one.part and one.kind == "all-gather"} == {2, 32}
    # gathered twice in bfloat16, blocks in a loop; once the embedding and the head
    gathered = 2 * blocks + 2 * 8192 * 1024
    assert found.of("all-gather").total.wire_bytes == pytest.approx(2 * gathered * 63 / 64, rel=0.05)
