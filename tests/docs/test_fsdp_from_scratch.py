"""FSDP from scratch sends what `so.fsdp` sends, and takes the same steps."""

import collections
import importlib
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.paths import ROOT

import shardopt as so

PAGE = ROOT / "docs" / "fsdp_from_scratch.md"


@pytest.fixture(scope="module")
def example():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        return importlib.import_module("fsdp_from_scratch")


@pytest.fixture(scope="module")
def mesh():
    return jax.sharding.Mesh(jax.devices(), ("data",))


def library(example):
    """Return `so.fsdp` of the model and the AdamW of the example."""
    model = so.BlockModel(
        example.embed,
        example.block,
        lambda outer, x, batch: so.losses.Weighted(*example.loss(outer, x, batch)),
    )
    return so.fsdp(optax.adamw(3e-3), so.make_mesh(data=8), model, view="unproved")


def audits(example, mesh, config):
    """Return the collectives of one step: of the example, and of the library."""
    shapes = jax.eval_shape(lambda key: example.init_state(config, key), jax.random.key(0))
    batch = next(example.batches(config))
    opt = library(example)
    by_library = so.hlo.audit(opt.step, opt.abstract_state(shapes.params), batch)
    return (
        so.hlo.audit(
            example.make_step(mesh),
            example.make_init(config, mesh).eval_shape(jax.random.key(0)),
            batch,
            mesh=mesh,
        ),
        by_library,
    )


def counted(audit):
    """Return (kind, axes, bytes, trip counts of loops) -> number of collectives."""
    return collections.Counter(
        (each.kind, each.axes, each.bytes, each.loops) for each in audit.collectives
    )


@pytest.mark.slow  # test_each_device_holds_an_eighth
def test_its_program_has_the_collectives_of_the_library(example, mesh):
    """The leaves are wide here: on CPU the library joins leaves that are 2 MiB together."""
    by_example, by_library = audits(
        example, mesh, example.Config(vocab=1024, dim=512, num_blocks=3)
    )
    assert counted(by_example) == counted(by_library), f"{by_example}\n{by_library}"
    block = {4 * 512 * 512 * width for width in (1, 3, 4)}
    in_loop = by_example.of(in_loop=True)
    assert {each.bytes for each in in_loop.collectives} == block
    # forward and backward, 3 blocks of 4 weights
    assert in_loop.of(kind="all-gather").total.calls == 2 * 3 * 4
    assert in_loop.of(kind="reduce-scatter").total.calls == 3 * 4


@pytest.mark.slow  # the test of its collectives
def test_bytes_of_small_leaves_are_equal_and_the_library_joins_the_leaves(example, mesh):
    by_example, by_library = audits(example, mesh, example.Config())
    for kind, in_loop in itertools.product(
        ("all-gather", "reduce-scatter", "all-reduce"), (True, False)
    ):
        expected = by_library.of(kind, in_loop=in_loop)
        sent = by_example.of(kind, in_loop=in_loop)
        assert sent.total.bytes == expected.total.bytes, (kind, in_loop)
        assert sent.by_axis().keys() == expected.by_axis().keys()
    assert by_library.total.calls == 16
    assert by_example.total.calls == 56
    assert "16 calls instead of 56" in PAGE.read_text()
    traffic = [
        rows_of_page("all-gather"),
        rows_of_page("reduce-scatter"),
        rows_of_page("all-reduce"),
    ]
    assert [(sum(sizes), sum(calls)) for sizes, calls in traffic] == [
        (sent.bytes, sent.calls)
        for sent in map(by_example.by_kind().get, ("all-gather", "reduce-scatter", "all-reduce"))
    ]


def rows_of_page(name):
    """Return the two columns of numbers of the page's table rows that begin with a name."""
    rows = re.findall(
        rf"^\| {name} .*\| ([\d,]+|-) \| ([\d,]+) \|$", PAGE.read_text(), re.MULTILINE
    )
    return tuple(
        zip(
            *[[int(cell.replace(",", "").replace("-", "0")) for cell in row] for row in rows],
            strict=True,
        )
    )


@pytest.mark.slow
def test_its_losses_and_weights_are_those_of_the_library_and_of_one_device(example, mesh, x64):
    config = example.Config(num_blocks=2)
    sharded = example.make_init(config, mesh)(jax.random.key(0))
    unsharded = jax.device_get(sharded)
    opt = library(example)
    step = example.make_step(mesh)
    state = opt.init(unsharded.params)
    for batch in itertools.islice(example.batches(config), 4):
        # devices have different numbers of targets
        assert np.ptp(batch["mask"].reshape(8, -1).sum(1)) > 0
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


def test_each_device_holds_an_eighth(example, mesh):
    state = example.make_init(example.Config(), mesh)(jax.random.key(0))
    for leaf in jax.tree.leaves((state.params, state.mu, state.nu)):
        assert leaf.addressable_shards[0].data.nbytes * 8 == leaf.nbytes
    all_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state.params))
    blocks = sum(leaf.nbytes for leaf in jax.tree.leaves(state.params["blocks"]))
    for name, size in (
        ("weights", all_bytes),
        ("moments", 2 * all_bytes),
        ("gradients", all_bytes),
    ):
        column, of_device = rows_of_page(name)
        assert (column[0], of_device[0]) == (size, size // 8)
    assert rows_of_page("weights")[1][1:] == (all_bytes - blocks, blocks // 4)
    assert state.step == jnp.int32(0)
