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

_AXIS = "devices"
_KIB = 1024
_CALLS = 5


def _random_numbers(x: jax.Array) -> jax.Array:
    return jax.random.normal(jax.random.wrap_key_data(x[0, :2].astype(jnp.uint32)), x.shape)


SCATTERED = "scattered sums"
_ORDER_FLAG = "--xla_gpu_deterministic_ops=true"

COMPUTATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
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
    SCATTERED: lambda x: jnp.zeros(64).at[jnp.arange(x.size) % 61].add(x.ravel()),
}


def device_mesh(devices: Devices) -> Mesh:
    """Return a mesh with one axis over all devices."""
    return Mesh(np.array(devices), (_AXIS,), axis_types=(AxisType.Auto,))


def same_bits_rows() -> list[Row]:
    """Return one row for each computation."""
    return [
        Row("same bits", name, functools.partial(_measure_if_ordered, name, computation))
        for name, computation in COMPUTATIONS.items()
    ]


def _measure_if_ordered(
    name: str, computation: Callable[[jax.Array], jax.Array], devices: Devices
) -> Measurement:
    if (
        name == SCATTERED
        and devices[0].platform == "gpu"
        and _ORDER_FLAG not in os.environ.get("XLA_FLAGS", "")
    ):
        raise NotRun(
            "not on this platform",
            f"GPUs add scattered numbers in any order without XLA_FLAGS={_ORDER_FLAG}",
        )
    return measure_same_bits(computation, devices)


def measure_same_bits(
    computation: Callable[[jax.Array], jax.Array], devices: Devices
) -> Measurement:
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
    differing = [
        device
        for device, column in zip(devices, checksums.T, strict=True)
        if np.any(column != common)
    ]
    detail = f"{len(devices) - len(differing)} of {len(devices)} devices agree"
    detail += f"; different: {device_names(differing)}" if differing else ""
    return Measurement(not differing, detail, {"different": [device.id for device in differing]})


def _checksums(stacked: jax.Array, devices: Devices) -> np.ndarray:
    """Return a checksum of the bits of each device, at its position.

    0 for devices of other processes.
    """
    checksums, positions = (
        np.zeros(len(devices), np.uint32),
        {device: i for i, device in enumerate(devices)},
    )
    for shard in stacked.addressable_shards:
        checksums[positions[shard.device]] = zlib.crc32(np.asarray(shard.data).tobytes()) | 1
    return checksums


class Collective(NamedTuple):
    """A collective of n devices. Each device holds equally many numbers.

    Attributes:
      run: maps the numbers of a device to its result.
      result: `result(base, i, n)`, the result of device i if device j holds base + j.
      share: `share(n)`, the bytes that a device sends in a ring, in units of its own buffer.
    """

    run: Callable[[jax.Array], jax.Array]
    result: Callable[[np.ndarray, int, int], np.ndarray]
    share: Callable[[int], float]


def _shift(x: jax.Array) -> jax.Array:
    size = jax.lax.axis_size(_AXIS)
    return jax.lax.ppermute(x, _AXIS, [(i, (i + 1) % size) for i in range(size)])


def _total(base: np.ndarray, n: int) -> np.ndarray:
    return n * base + n * (n - 1) // 2


COLLECTIVES = {
    "all-reduce": Collective(
        lambda x: jax.lax.psum(x, _AXIS),
        lambda base, i, n: _total(base, n),
        lambda n: 2 * (n - 1) / n,
    ),
    "all-gather": Collective(
        lambda x: jax.lax.all_gather(x, _AXIS, tiled=True),
        lambda base, i, n: (base[None, :] + np.arange(n)[:, None]).ravel(),
        lambda n: n - 1,
    ),
    "reduce-scatter": Collective(
        lambda x: psum_scatter(x, _AXIS, 0),
        lambda base, i, n: np.split(_total(base, n), n)[i],
        lambda n: (n - 1) / n,
    ),
    "permute": Collective(_shift, lambda base, i, n: base + (i - 1) % n, lambda n: 1),
    "all-to-all": Collective(
        lambda x: all_to_all(x, _AXIS, 0, 0),
        lambda base, i, n: (np.split(base, n)[i][None, :] + np.arange(n)[:, None]).ravel(),
        lambda n: (n - 1) / n,
    ),
}


def collective_rows(devices: Devices) -> list[Row]:
    """Return a row for each collective and buffer: 64 KiB and 4 MiB, and 64 MiB on accelerators."""
    sizes = [64 * _KIB, 4 * _KIB**2] + ([64 * _KIB**2] if devices[0].platform != "cpu" else [])
    return [
        Row(
            "collectives",
            f"{name}, {_size_text(size)}",
            functools.partial(measure_collective, collective, size),
        )
        for size in sizes
        for name, collective in COLLECTIVES.items()
    ]


def _size_text(size: int) -> str:
    return f"{size // _KIB} KiB" if size < _KIB**2 else f"{size // _KIB**2} MiB"


def measure_collective(collective: Collective, nbytes: int, devices: Devices) -> Measurement:
    """Compare the results of a collective with sums of small integers, which are exact, and time
    it.
    """
    n, mesh = len(devices), device_mesh(devices)
    if n == 1:
        raise NotRun("did not fit", "it needs at least 2 devices, and there is 1")
    base = np.arange(nbytes // 4 // n * n, dtype=np.float32) % 251
    positions = {device: i for i, device in enumerate(devices)}
    sharding = NamedSharding(mesh, P(_AXIS))
    offsets = np.arange(n, dtype=np.float32)[:, None]
    held = jax.make_array_from_callback(
        (n, len(base)), sharding, lambda index: base[None, :] + offsets[index]
    )

    def body(x):
        return collective.run(x[0])[None]

    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(_AXIS), out_specs=P(_AXIS)))
    result, wrong = program(held), np.zeros(n, np.int32)
    for shard in result.addressable_shards:
        i = positions[shard.device]
        wrong[i] = not np.array_equal(np.asarray(shard.data)[0], collective.result(base, i, n))
    seconds = []
    for _ in range(_CALLS):
        begin = time.perf_counter()
        jax.block_until_ready(program(held))
        seconds.append(time.perf_counter() - begin)
    wrong_devices = [
        device for device, is_wrong in zip(devices, agree(wrong), strict=True) if is_wrong
    ]
    rate = collective.share(n) * base.nbytes / statistics.median(seconds) / 1e9
    detail = f"{rate:.3g} GB/s" + (
        f"; wrong on {device_names(wrong_devices)}" if wrong_devices else ""
    )
    numbers = {"bytes": base.nbytes, "seconds": statistics.median(seconds), "gb_per_second": rate}
    return Measurement(not wrong_devices, detail, numbers)
