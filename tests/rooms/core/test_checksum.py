"""Sums of bits: the same on any mesh, and another one for each change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.tiers import tiered

from shardopt.core._checksum import checksum, from_limbs, joined, to_limbs

SHAPE = (8, 6)
sum_of = jax.jit(checksum)
sum_of_shard = jax.jit(lambda shard, starts: checksum(shard, starts, SHAPE))


def values(dtype):
    draws = np.random.default_rng(0).normal(size=SHAPE) * 10
    return jnp.asarray(draws).astype(dtype)


@pytest.mark.parametrize(
    "dtype",
    tiered(
        ["float32", "bfloat16", "int8", "bool", "complex64", "uint32", "float8_e4m3fn"],
        lambda dtype: dtype in ("float32", "bool", "float8_e4m3fn"),
    ),
)
def test_each_changed_element_changes_both_numbers(dtype):
    x = values(dtype)
    changed = np.array(x)  # on the host, where no program is compiled
    changed[5, 3] = ~changed[5, 3] if dtype == "bool" else changed[5, 3] + changed.dtype.type(1)
    first = np.asarray(sum_of(x))
    second = np.asarray(sum_of(changed))
    assert (first != second).all()
    assert np.array_equal(np.asarray(sum_of(x)), first)


BITS = {
    "float16": 16,
    "bfloat16": 16,
    "float8_e5m2": 8,
    "uint8": 8,
    "int16": 16,
    "int32": 32,
    "complex64": 64,
}


@pytest.mark.parametrize(
    "dtype", tiered(BITS, lambda dtype: dtype in ("bfloat16", "uint8", "int32", "complex64"))
)
def test_each_flipped_bit_changes_both_numbers(dtype):
    """Every bit of an element, each in an element of its own."""
    x = np.asarray(values(dtype))
    raw = np.repeat(x.reshape(1, -1).view(np.uint8), BITS[dtype], axis=0)
    for bit in range(BITS[dtype]):
        raw[bit, bit % x.size * x.itemsize + bit // 8] ^= np.uint8(1 << bit % 8)
    flipped = raw.view(x.dtype).reshape(-1, *SHAPE)
    sums = np.asarray(jax.jit(jax.vmap(checksum))(jnp.concatenate([x[None], flipped])))
    assert (sums[1:] != sums[0]).all()
    assert all(len(set(column)) == 1 + BITS[dtype] for column in sums.T.tolist())


@pytest.mark.fast
def test_every_bit_counts_and_so_does_the_place():
    """-0.0 and NaNs with other payloads differ, and so do exchanged elements."""
    x = np.asarray(values("float32"))
    original = tuple(np.asarray(sum_of(x)))
    sums = {original}
    for bit in range(32):
        bits = x.view(np.uint32).copy()
        bits[7, 5] ^= np.uint32(1 << bit)
        sums.add(tuple(np.asarray(sum_of(bits.view(np.float32)))))
    sums.add(tuple(np.asarray(sum_of(x[::-1]))))
    signs = x.copy()
    signs[:4] *= -1  # an even number of sign bits
    sums.add(tuple(np.asarray(sum_of(signs))))
    swapped = x.copy()
    swapped[0, 0], swapped[0, 1] = x[0, 1], x[0, 0]
    sums.add(tuple(np.asarray(sum_of(swapped))))
    assert len(sums) == 36
    assert len({first for first, _ in sums}) == len({second for _, second in sums}) == 36


def test_sums_see_all_bits_of_64_and_of_keys(x64):
    x = values("float64")
    assert (np.asarray(checksum(x)) != np.asarray(checksum(x.at[0, 0].multiply(1 + 1e-15)))).all()
    keys = jax.random.split(jax.random.key(0), 4)
    assert (np.asarray(checksum(keys)) != np.asarray(checksum(keys[::-1]))).all()


SPECS = [P("data", "tensor"), P("tensor"), P(("data", "tensor")), P(None, "tensor")]


@pytest.mark.parametrize("spec", tiered(SPECS, lambda spec: spec == SPECS[0], ids=str))
def test_sums_of_shards_add_up_on_any_mesh(spec, mesh_of):
    x = values("float32")
    mesh = mesh_of(data=4, tensor=2)
    expected = np.asarray(sum_of(x))
    placed = jax.device_put(x, NamedSharding(mesh, spec))
    assert np.array_equal(np.asarray(sum_of(placed)), expected)  # the partitioner adds them up
    by_start = {
        tuple(s.start or 0 for s in shard.index): shard.data for shard in placed.addressable_shards
    }
    parts = [
        np.asarray(sum_of_shard(np.asarray(shard), start)) for start, shard in by_start.items()
    ]
    assert np.array_equal(np.sum(parts, axis=0, dtype=np.uint32), expected)


@pytest.mark.fast
def test_limbs_are_added_without_an_error():
    totals = np.random.default_rng(0).integers(0, 2**32, (1000, 2), dtype=np.uint32)
    limbs = jnp.sum(jax.vmap(to_limbs)(totals), axis=0)
    assert np.array_equal(np.asarray(from_limbs(limbs)), np.sum(totals, axis=0, dtype=np.uint32))
    first_total = jnp.asarray(totals[0])
    other = jnp.asarray(totals[1])
    assert (
        np.asarray(joined([first_total, other])) != np.asarray(joined([other, first_total]))
    ).all()
    assert checksum(jnp.zeros((0, 3))).tolist() == [0, 0]
