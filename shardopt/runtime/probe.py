"""How fast the devices of this process are, measured by themselves: a device that is slow makes all steps equally long."""

import functools
import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from shardopt.runtime import progress

_TIMES = 5
"""How often the products are timed; the median counts."""
_LOG = logging.getLogger(__name__)


def probe_devices() -> list[float]:
    """Time fixed products on each device of this process, and report them to `shardopt launch --hang-timeout` or `so.watchdog`.

    In lockstep all processes wait for the slowest device, so that steps are equally long everywhere. These products wait for
    nobody: the process that needs half as long again as the others, twice in a row, is named. `fit` does this at every tenth
    `agree_every`, when it is watched. A loop of your own calls it now and then, on every process, when no step is under way.

    It tells cores that are shared or slow, and clocks that are throttled; not slow links, and not slow memory.

    Returns:
      Seconds for each local device: the median of five runs, on CPU of 8 products of 256 x 256 in float32, elsewhere of 64
      of 2048 x 2048 in bfloat16, which take 25 MB.

    Example:
      >>> import jax, shardopt as so
      >>> len(so.probe_devices()) == jax.local_device_count()
      True
    """
    found = [_median_seconds(device) for device in jax.local_devices()]
    progress.report_devices(found)
    return found


def probe_or_warn() -> None:
    """Probe the devices in the midst of training: where they have no memory left for it, that is said, and training goes on."""
    try:
        probe_devices()
    except jax.errors.JaxRuntimeError as error:
        _LOG.warning("fit: the devices could not be probed, so that a slow one is not named: %s", error)


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
    size, dtype, products = (256, jnp.float32, 8) if device.platform == "cpu" else (2048, jnp.bfloat16, 64)
    matrix = jax.device_put(jnp.full((size, size), 1 / size, dtype), device)

    @jax.jit
    def run(matrix: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, products, lambda _, product: product @ matrix, matrix)

    run(matrix).block_until_ready()  # compiled
    return run, matrix
