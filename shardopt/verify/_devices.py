"""Rows about the devices themselves: the same bits on all of them, and the speed of collectives
between them.
"""

import functools
import os
import statistics
import time
import zlib
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardopt.collectives._shards import all_to_all, psum_scatter
from shardopt.verify._rows import Devices, Measurement, NotRun, Row, agree, device_names

Computation = Callable[[jax.Array], jax.Array]

_AXIS = "devices"
_KIB = 1024
_CALLS = 5


def _random_numbers(x: jax.Array) -> jax.Array:
    return jax.random.normal(jax.random.wrap_key_data(x[0, :2].astype(jnp.uint32)), x.shape)


SCATTERED = "scattered sums"
_ORDER_FLAG = "--xla_gpu_deterministic_ops=true"

COMPUTATIONS: dict[str, Computation] = {
    "product in float32": lambda x: jnp.matmul(x, x.T, precision="highest"),
    "product in bfloat16": lambda x: x.astype(jnp.bfloat16) @ x.T.astype(jnp.bfloat16),
    "sums": lambda x: jnp.stack(
        [jnp.sum(x, axis=0), jnp.cumsum(x, axis=0)[-1], jnp.mean(x * x, axis=0)]
    ),
    "transcendental functions": lambda x: jnp.stack(
        [jnp.exp(x), jnp.tanh(x), jnp.sin(x), jax.lax.erf(x)]
    ),
    "division and roots": lambda x: jnp.stack(
        [1 / (jnp.abs(x) + 1), jnp.sqrt(jnp.abs(x)), jax.lax.rsqrt(1 + x * x)]
    ),
    "random numbers": _random_numbers,
}


def device_mesh(devices: Devices) -> Mesh:
    """Return a mesh with one axis over all devices."""
    return Mesh(np.array(devices), (_AXIS,), axis_types=(AxisType.Auto,))


def same_bits_rows() -> list[Row]:
    """Return one row for each computation."""
    rows = [
        Row("same bits", name, functools.partial(measure_same_bits, computation))
        for name, computation in COMPUTATIONS.items()
    ]
    return [*rows, Row("same bits", SCATTERED, _measure_scattered)]


def check_order(devices: Devices) -> None:
    """Raise `NotRun` on GPUs that add in any order."""
    if devices[0].platform == "gpu" and _ORDER_FLAG not in os.environ.get("XLA_FLAGS", ""):
        reason = f"GPUs add scattered numbers in any order without XLA_FLAGS={_ORDER_FLAG}"
        raise NotRun("not on this platform", reason)


def _measure_scattered(devices: Devices) -> Measurement:
    check_order(devices)
    return measure_same_bits(_scattered_sums, devices)


def _scattered_sums(x: jax.Array) -> jax.Array:
    return jnp.zeros(64).at[jnp.arange(x.size) % 61].add(x.ravel())


def measure_same_bits(computation: Computation, devices: Devices) -> Measurement:
    """Run one program twice on every device, and name the devices whose bits differ from the bits
    of most devices.
    """
    mesh = device_mesh(devices)
    numbers = np.random.default_rng(13).normal(size=(256, 256)).astype(np.float32) * 3
    replicated = jax.make_array_from_callback(
        numbers.shape, NamedSharding(mesh, P()), lambda index: numbers[index]
    )

    def body(x):
        return computation(x)[None]

    program = jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(_AXIS), check_vma=False)
    )
    checksums = agree(np.stack([_checksums(program(replicated), devices) for _ in range(2)]))
    common, _ = Counter(checksums.ravel().tolist()).most_common(1)[0]
    differing = [devices[i] for i in np.flatnonzero((checksums != common).any(axis=0)).tolist()]
    detail = f"{len(devices) - len(differing)} of {len(devices)} devices agree"
    if differing:
        detail += f"; different: {device_names(differing)}"
    return Measurement(not differing, detail, {"different": [device.id for device in differing]})


def _checksums(stacked: jax.Array, devices: Devices) -> np.ndarray:
    """Return a checksum of the bits of each device, at its position.

    0 for devices of other processes.
    """
    checksums = np.zeros(len(devices), np.uint32)
    for shard in stacked.addressable_shards:
        position = devices.index(shard.device)
        checksums[position] = zlib.crc32(np.asarray(shard.data).tobytes()) | 1
    return checksums


class TimedCollective(NamedTuple):
    """A collective of n devices. Each device holds equally many numbers.

    Attributes:
      run: maps the numbers of a device to its result.
      result: `result(base, i, n)`, the result of device i if device j holds base + j.
      share: `share(n)`, the bytes that a device sends in a ring, in units of its own buffer.
    """

    run: Computation
    result: Callable[[np.ndarray, int, int], np.ndarray]
    share: Callable[[int], float]


def _shift(x: jax.Array) -> jax.Array:
    size = jax.lax.axis_size(_AXIS)
    return jax.lax.ppermute(x, _AXIS, [(i, (i + 1) % size) for i in range(size)])


def _total(base: np.ndarray, n: int) -> np.ndarray:
    return n * base + n * (n - 1) // 2


COLLECTIVES = {
    "all-reduce": TimedCollective(
        lambda x: jax.lax.psum(x, _AXIS),
        lambda base, i, n: _total(base, n),
        lambda n: 2 * (n - 1) / n,
    ),
    "all-gather": TimedCollective(
        lambda x: jax.lax.all_gather(x, _AXIS, tiled=True),
        lambda base, i, n: (base[None, :] + np.arange(n)[:, None]).ravel(),
        lambda n: n - 1,
    ),
    "reduce-scatter": TimedCollective(
        lambda x: psum_scatter(x, _AXIS, 0),
        lambda base, i, n: np.split(_total(base, n), n)[i],
        lambda n: (n - 1) / n,
    ),
    "permute": TimedCollective(_shift, lambda base, i, n: base + (i - 1) % n, lambda n: 1),
    "all-to-all": TimedCollective(
        lambda x: all_to_all(x, _AXIS, 0, 0),
        lambda base, i, n: (np.split(base, n)[i][None, :] + np.arange(n)[:, None]).ravel(),
        lambda n: (n - 1) / n,
    ),
}


def collective_rows(devices: Devices) -> list[Row]:
    """Return a row for each collective and buffer: 64 KiB and 4 MiB, and 64 MiB on accelerators."""
    sizes = {"64 KiB": 64 * _KIB, "4 MiB": 4 * _KIB**2}
    if devices[0].platform != "cpu":
        sizes["64 MiB"] = 64 * _KIB**2
    return [
        Row("collectives", f"{name}, {text}", functools.partial(measure_collective, run, size))
        for text, size in sizes.items()
        for name, run in COLLECTIVES.items()
    ]


def measure_collective(collective: TimedCollective, nbytes: int, devices: Devices) -> Measurement:
    """Compare the results of a collective with sums of small integers, which are exact, and time
    it.
    """
    n = len(devices)
    mesh = device_mesh(devices)
    if n == 1:
        raise NotRun("did not fit", "it needs at least 2 devices, and there is 1")
    base = np.arange(nbytes // 4 // n * n, dtype=np.float32) % 251
    sharding = NamedSharding(mesh, P(_AXIS))
    offsets = np.arange(n, dtype=np.float32)[:, None]
    held = jax.make_array_from_callback(
        (n, len(base)), sharding, lambda index: base[None, :] + offsets[index]
    )

    def body(x):
        return collective.run(x[0])[None]

    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(_AXIS), out_specs=P(_AXIS)))
    result = program(held)
    wrong = np.zeros(n, np.int32)
    for shard in result.addressable_shards:
        i = devices.index(shard.device)
        wrong[i] = not np.array_equal(np.asarray(shard.data)[0], collective.result(base, i, n))
    seconds = []
    for _ in range(_CALLS):
        begin = time.perf_counter()
        jax.block_until_ready(program(held))
        seconds.append(time.perf_counter() - begin)
    wrong_devices = [devices[i] for i in np.flatnonzero(agree(wrong)).tolist()]
    median_seconds = statistics.median(seconds)
    rate = collective.share(n) * base.nbytes / median_seconds / 1e9
    detail = f"{rate:.3g} GB/s"
    if wrong_devices:
        detail += f"; wrong on {device_names(wrong_devices)}"
    numbers = {"bytes": base.nbytes, "seconds": median_seconds, "gb_per_second": rate}
    return Measurement(not wrong_devices, detail, numbers)
