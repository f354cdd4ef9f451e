"""1F1B from scratch sends what `so.hybrid` sends, and takes the same steps."""

import collections
import importlib
import itertools
import re

import jax
import numpy as np
import optax
import pytest
from support.paths import ROOT

import shardopt as so

STAGES = 4
MICRO_BATCHES = 8


@pytest.fixture(scope="module")
def example():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        return importlib.import_module("one_f_one_b_from_scratch")


def mesh_of_stages():
    return jax.sharding.Mesh(jax.devices()[:STAGES], ("pipeline",))


def library(example):
    """Return `so.hybrid` of the model, the AdamW and the schedule of the example."""
    return so.hybrid(
        optax.adamw(3e-3),
        so.make_mesh(pipeline=STAGES, devices=jax.devices()[:STAGES]),
        so.BlockModel(
            example.embed,
            example.block,
            lambda outer, x, batch: so.losses.Weighted(*example.loss(outer, x, batch)),
            remat="full",
        ),
        schedule=so.schedules.eager_one_f_one_b(STAGES, MICRO_BATCHES),
        micro_batches=MICRO_BATCHES,
        view="unproved",
    )


@pytest.mark.slow
def test_its_losses_and_weights_are_those_of_the_library_and_of_one_device(example, x64):
    config = example.Config(num_blocks=8)
    mesh = mesh_of_stages()
    sharded = example.make_init(config, mesh)(jax.random.key(0))
    for leaf in jax.tree.leaves(sharded.params["blocks"]):
        assert leaf.addressable_shards[0].data.nbytes * STAGES == leaf.nbytes
    unsharded = jax.device_get(sharded)
    opt = library(example)
    step = example.make_step(mesh, MICRO_BATCHES)
    state = opt.init(unsharded.params)
    for batch in itertools.islice(example.batches(config), 3):
        unsharded, expected = example.one_device_step(unsharded, batch)
        sharded, metrics = step(sharded, batch)
        state, of_library = opt.step(state, batch)
        # Sums are taken in another order; the attention of jax.nn takes its softmax in float32.
        np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-7)
        for name in ("loss", "grad_norm"):
            np.testing.assert_allclose(metrics[name], of_library[name], rtol=1e-7)
    for params in (unsharded.params, state.params):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), sharded.params, params
        )


@pytest.mark.slow  # a page and its example, which users change seldom
def test_its_program_has_the_collectives_of_the_library_and_the_page_their_bytes(example):
    config = example.Config(num_blocks=8)
    mesh = mesh_of_stages()
    opt = library(example)
    shapes = example.make_init(config, mesh).eval_shape(jax.random.key(0))
    batch = next(example.batches(config))
    audit = so.hlo.audit(example.make_step(mesh, MICRO_BATCHES), shapes, batch, mesh=mesh)
    by_library = so.hlo.audit(opt.step, opt.abstract_state(shapes.params), batch)
    counts = [
        collections.Counter(
            (each.kind, each.axes, each.bytes, each.loops) for each in program.collectives
        )
        for program in (audit, by_library)
    ]
    assert counts[0] == counts[1], f"{audit}\n{by_library}"
    permutes = audit.of("collective-permute", in_loop=True).total
    # an activation and a cotangent on every tick
    assert permutes.calls == 2 * (MICRO_BATCHES + 2 * (STAGES - 1))

    page = (ROOT / "docs" / "one_f_one_b_from_scratch.md").read_text()
    for kind, traffic in audit.by_kind().items():
        rows = re.findall(rf"^\| {kind} .*\| ([\d,]+) \| (\d+) \|$", page, re.MULTILINE)
        assert sum(int(size.replace(",", "")) for size, _ in rows) == traffic.bytes, kind
        assert sum(int(calls) for _, calls in rows) == traffic.calls, kind
    blocks = sum(leaf.size * 4 for leaf in jax.tree.leaves(shapes.params["blocks"]))
    outer = sum(leaf.size * 4 for leaf in jax.tree.leaves(shapes.params)) - blocks
    slots = (2 * STAGES - 1) * 32 // MICRO_BATCHES * config.length * config.dim * 4
    for name, one_device, of_stage in (
        ("blocks, with moments and gradients", 4 * blocks, blocks),
        ("other weights, with moments and gradients", 4 * outer, 4 * outer),
        ("inputs of forward passes that wait for their backward pass", None, slots),
    ):
        cells = "-" if one_device is None else f"{one_device:,}"
        assert f"| {name} | {cells} | {of_stage:,} |" in page
    assert str(so.schedules.eager_one_f_one_b(3, 4)).partition("\n\n")[2] in page
