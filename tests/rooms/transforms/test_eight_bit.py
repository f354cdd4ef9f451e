"""`eight_bit`: moments in codes of 8 bits.

The map is the paper's, blocks lie within shards, and bad input is refused.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support.problems import problem
from support.reference import jitted, relative_difference, same_bits, train
from support.table import STRATEGIES
from support.tiers import tiered

import shardopt as so
from shardopt.transforms._dynamic_map import decode, encode
from shardopt.transforms._eight_bit import tile_of


def dynamic_map(*, signed):
    """The 256 numbers, from the words of the paper: centres of equal cells in each decade, and 0
    and 1.
    """
    numbers = [0.0, 1.0]
    for i in range(7):
        edges = np.linspace(0.1, 1, 2 ** (i + (not signed)) + 1)
        numbers += list(10.0 ** (i - 6) * (edges[1:] + edges[:-1]) / 2)
    if signed:
        numbers += [-x for x in numbers if 0 < x < 1]
    return np.array(sorted(numbers))


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_the_nearest_of_the_map(signed, x64):
    table = dynamic_map(signed=signed)
    draw = np.random.default_rng(0)
    assert len(table) == 256
    decoded = jax.jit(lambda codes: decode(codes, jnp.dtype(float), signed=signed))(
        np.arange(256, dtype=np.uint8)
    )
    np.testing.assert_allclose(decoded, table)
    x = np.concatenate(
        [draw.uniform(-1, 1, 5000), draw.choice([-1, 1], 5000) * 10 ** draw.uniform(-9, 0, 5000)]
    )
    x = x if signed else np.abs(x)
    encoded = jax.jit(lambda x: encode(x, signed=signed))
    rounded_values = table[np.asarray(encoded(x))]
    nearest = table[np.abs(table - x[:, None]).argmin(1)]
    if not signed:
        assert (nearest == 0).any()
        nearest = np.maximum(nearest, table[1])  # numbers above zero stay so
    np.testing.assert_allclose(np.abs(rounded_values - x), np.abs(nearest - x), atol=1e-15)
    assert encoded(np.zeros(1))[0] == (127 if signed else 0)


@pytest.mark.parametrize(
    ("shape", "tile"),
    [
        ((4096, 14336), (64, 1)),
        ((14336, 4096), (1, 64)),
        ((4096, 4096), (1, 64)),
        ((80, 8192), (1, 64)),  # dim 0 may count blocks
        ((32, 4096, 3, 32, 128), (1, 1, 1, 1, 64)),
        ((32, 32, 128, 4096), (1, 1, 64, 1)),
        ((32, 4096, 2, 14336), (1, 32, 2, 1)),
        ((50257, 768), (1, 64)),
        ((12, 40, 48), (1, 8, 8)),
        ((2**20,), (64,)),
        ((7, 13), (1, 1)),
        ((), ()),
    ],
)
def test_blocks_avoid_the_dims_that_are_sharded(shape, tile):
    assert tile_of(shape, 64) == tile


@pytest.mark.fast
def test_a_moment_is_within_half_a_cell_of_what_it_was(x64):
    draw = np.random.default_rng(1)
    grads = {"w": jnp.asarray(draw.normal(size=(64, 96)) * 10 ** draw.uniform(-4, 4, (64, 1)))}
    tx = jitted(so.transforms.eight_bit(optax.adam(0.1), min_elements=1024))
    plain = jitted(optax.adam(0.1))
    params = jax.tree.map(jnp.zeros_like, grads)
    updates, state = tx.update(grads, tx.init(params), params)
    expected, exact = plain.update(grads, plain.init(params), params)
    np.testing.assert_allclose(updates["w"], expected["w"], rtol=1e-12)  # rounded after it was used
    for name, signed in (("mu", True), ("nu", False)):
        codes, scales = (getattr(part[0], name)["w"] for part in state)
        assert (codes.dtype, codes.shape, scales.shape) == (jnp.uint8, (64, 96), (64, 3))
        decoded = jax.jit(
            lambda codes, signed=signed: decode(codes, jnp.dtype(float), signed=signed)
        )(codes)
        scales = np.asarray(scales)
        decoded_moment = np.asarray(decoded).reshape(64, 3, 32) * scales[:, :, None]
        moment = np.asarray(getattr(exact[0], name)["w"]).reshape(64, 3, 32)
        block = np.abs(moment).max(2)
        np.testing.assert_allclose(scales, block)
        assert (np.abs(decoded_moment - moment) <= 0.0071 * block[:, :, None]).all()


def test_only_moments_of_large_leaves_are_rounded():
    params = {"w": jnp.ones((64, 64)), "nu": jnp.ones((8, 8)), "odd": jnp.ones((67, 67))}
    tx = optax.chain(optax.trace(0.9), optax.contrib.schedule_free_adamw(0.1))
    state = jax.eval_shape(so.transforms.eight_bit(tx, min_elements=4096).init, params)
    flat = {
        jax.tree_util.keystr(path): x.dtype
        for path, x in jax.tree_util.tree_leaves_with_path(state.state)
    }
    rounded = {path for path, dtype in flat.items() if dtype == jnp.uint8}
    assert rounded == {"[0].trace['w']", "[1].base_optimizer_state[0].nu['w']"}
    assert all(x.shape in ((64, 1), (1, 64)) for x in jax.tree.leaves(state.scales))


def test_what_is_not_finite_stays_so():
    tx = jitted(so.transforms.eight_bit(optax.sgd(0.1, momentum=0.9), min_elements=64))
    params = np.ones((4, 64), np.float32)
    grads = params.copy()
    grads[1, 3] = np.nan
    _, state = tx.update(grads, tx.init(params), params)
    updates, _ = tx.update(params, state, params)
    updates = np.asarray(updates)
    assert np.isnan(updates[1]).all()
    assert np.isfinite(updates[[0, 2, 3]]).all()


def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch @ params["up"]) @ params["down"] + params["b"][None, :]) ** 2)


SHAPES = {"up": (256, 512), "down": (512, 256), "b": (256,)}


PLACES = [("zero1", {"data": 8}), ("fsdp", {"data": 4, "tensor": 2})]
PLACES += [("fsdp", {"data": 8}), ("zero1", {"data": 4, "tensor": 2})]


@pytest.mark.parametrize(
    ("strategy", "sizes"), tiered(PLACES, lambda row: row == PLACES[0], ids=str)
)
def test_blocks_within_shards_need_no_collective_and_bytes_follow_the_formula(
    strategy, sizes, mesh_of
):
    rules = [("up", P(None, "tensor")), ("down", P("tensor"))] if "tensor" in sizes else ()
    batch = np.ones((32, 256), np.float32)
    reports = []
    for tx in (optax.adam(1e-3), so.transforms.eight_bit(optax.adam(1e-3), min_elements=1024)):
        opt = STRATEGIES[strategy](tx, mesh_of(**sizes), loss_fn, rules=rules)
        state = opt.init({name: jnp.ones(shape) for name, shape in SHAPES.items()})
        reports.append((so.hlo.audit(opt.step, state, batch), opt.config.report().opt_state_bytes))
    (adam, bytes_of_adam), (rounded, nbytes) = reports
    assert rounded.by_kind() == adam.by_kind()
    np.testing.assert_allclose(nbytes, (2 + 8 / 64) / 8 * bytes_of_adam, rtol=0.02)


ROWS = [("fsdp", 4, 2, "nnx"), ("zero1", 8, 1, "nnx"), ("ddp", 2, 4, "gpt"), ("zero2", 4, 2, "gpt")]


@pytest.mark.slow  # test_blocks_within_shards_need_no_collective_and_bytes_follow_the_formula
@pytest.mark.parametrize(
    ("strategy", "data", "tensor", "model"), tiered(ROWS, lambda row: row == ROWS[0])
)
def test_equals_one_device_with_the_same_codes(strategy, data, tensor, model, mesh_of, x64):
    case = problem(model, weighted=True, steps=4)
    tx = so.transforms.eight_bit(optax.adamw(1e-2, eps=1e-4), block_size=16, min_elements=32)
    rules = case.rules if tensor > 1 else ()
    opt = STRATEGIES[strategy](tx, mesh_of(data=data, tensor=tensor), case.loss_fn, rules=rules)
    _, final = train(tx, case.reference, case.params, case.batches)
    state = opt.init(case.params)
    for batch in case.batches:
        state, metrics = opt.step(state, batch)
        jax.block_until_ready(metrics)
    assert relative_difference(state.params, final) <= 1e-10
    assert any(x.dtype == jnp.uint8 for x in jax.tree.leaves(state.opt_state))


@pytest.mark.slow  # rooms/checkpoint restores any state; test_blocks_within_shards is of its places
def test_codes_are_saved_and_restored_onto_another_mesh(mesh_of, tmp_path):
    params = {name: jnp.ones(shape) for name, shape in SHAPES.items()}
    tx = so.transforms.eight_bit(optax.adam(1e-3), min_elements=1024)
    batch = np.ones((32, 256), np.float32)
    opt = so.fsdp(tx, mesh_of(data=8), loss_fn)
    state, _ = opt.step(opt.init(params), batch)
    so.save(tmp_path / "one", state)
    restored_state = so.restore(
        tmp_path / "one", so.zero(tx, mesh_of(data=2), loss_fn, stage=1), abstract_params=params
    )
    same_bits(restored_state.opt_state, state.opt_state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 48}, "block_size must be a power of two, got 48."),
        ({"block_size": 8}, "block_size must be at least 16, got 8."),
        ({"min_elements": 0}, "min_elements must be at least 1, got 0."),
        ({"signed": "mu"}, "signed must be a sequence of names, got 'mu'."),
    ],
    ids=str,
)
def test_options_that_cannot_be_used_are_refused(options, message):
    with pytest.raises((TypeError, ValueError)) as caught:
        so.transforms.eight_bit(optax.adam(0.1), **options)
    assert str(caught.value) == f"eight_bit: {message}"


def test_nothing_to_round_is_refused():
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        so.transforms.eight_bit(optax.adam(0.1)).init({"w": jnp.ones((8, 8))})
    assert (
        str(caught.value)
        == "eight_bit: nothing in the state of inner= is rounded to 8 bits: no leaf of 65536"
        " numbers or more.\nFix: lower min_elements, or name what to round in signed= or"
        " unsigned= (now 'mu', 'trace', 'nu', 'nu_max', 'sum_of_squares')."
    )
