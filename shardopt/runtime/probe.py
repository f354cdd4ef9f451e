"""How fast the devices of this process are, measured by themselves: a device that is slow makes all steps equally long."""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from shardopt.runtime import progress

_TIMES = 5
"""How often the products are timed; the median counts."""
_PRODUCTS = 8


def probe_devices() -> list[float]:
    """Time fixed products on each device of this process, and report them to `shardopt launch --hang-timeout` or `so.watchdog`.

    In lockstep all processes wait for the slowest device, so that steps are equally long everywhere. These products wait for
    nobody: the process that needs half as long again as the others, twice in a row, is named. `fit` does this at every tenth
    `agree_every`, when it is watched. A loop of your own calls it now and then, on every process, when no step is under way.

    It tells cores that are shared or slow, and clocks that are throttled; not slow links, and not slow memory.

    Returns:
      Seconds for each local device: the median of five runs of eight products, of 256 x 256 in float32 on CPU and of
      4096 x 4096 in bfloat16 elsewhere.

    Example:
      >>> import jax, shardopt as so
      >>> len(so.probe_devices()) == jax.local_device_count()
      True
    """
    found = [_median_seconds(device) for device in jax.local_devices()]
    progress.report_devices(found)
    return found


def _median_seconds(device: Any) -> float:
    run, matrix = _products(device)
    found = []
    for _ in range(_TIMES):
        began = time.perf_counter()
        run(matrix).block_until_ready()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


@functools.cache
def _products(device: Any) -> tuple[Callable[[jax.Array], jax.Array], jax.Array]:
    size, dtype = (256, jnp.float32) if device.platform == "cpu" else (4096, jnp.bfloat16)
    matrix = jax.device_put(jnp.full((size, size), 1 / size, dtype), device)

    @jax.jit
    def run(matrix: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, _PRODUCTS, lambda _, product: product @ matrix, matrix)

    run(matrix).block_until_ready()  # compiled
    return run, matrix
