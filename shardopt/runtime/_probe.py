"""Measure how fast the devices of this process are.

One slow device makes every step slow on all devices.
"""

import functools
import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from shardopt.runtime import _progress as progress

_REPETITIONS = 5
"""How often the products are timed; the result is the median."""
_LOG = logging.getLogger(__name__)


def probe_devices() -> list[float]:
    """Time fixed matrix products on each device of this process, and report the times to the watch
    of the job.

    The watch is `shardopt launch --hang-timeout` or `so.runtime.watchdog`. In training all
    processes wait for the slowest device, so step times are equal everywhere. These products wait
    for no other process. A process is named if its products take 1.5 times as long as the others'
    products, twice in a row.

    `fit` calls this at every tenth `log_every` if it is watched. Your own loop can call it now
    and then, on every process, when no step is in progress. It finds shared or slow cores and
    throttled clocks, but not slow links or slow memory.

    Returns:
      Seconds for each local device, the median of five runs. On CPU a run is 8 products of 256 x
      256 in float32; elsewhere 64 products of 2048 x 2048 in bfloat16, which take 25 MB.

    Example:
      >>> import jax, shardopt as so
      >>> len(so.runtime.probe_devices()) == jax.local_device_count()
      True
    """
    seconds = [_median_seconds(device) for device in jax.local_devices()]
    progress.report_devices(seconds)
    return seconds


def probe_or_warn() -> None:
    """Probe the devices during training.

    If a device has no free memory, log a warning and continue.
    """
    try:
        probe_devices()
    except jax.errors.JaxRuntimeError as error:
        _LOG.warning(
            "fit: the devices could not be probed, so that a slow one is not named: %s", error
        )


def _median_seconds(device: Any) -> float:
    multiply, matrix = _products(device)
    seconds = []
    for _ in range(_REPETITIONS):
        start = time.perf_counter()
        multiply(matrix).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


@functools.cache
def _products(device: Any) -> tuple[Callable[[jax.Array], jax.Array], jax.Array]:
    size, dtype, num_products = (
        (256, jnp.float32, 8) if device.platform == "cpu" else (2048, jnp.bfloat16, 64)
    )
    matrix = jax.device_put(jnp.full((size, size), 1 / size, dtype), device)

    @jax.jit
    def multiply(matrix: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, num_products, lambda _, product: product @ matrix, matrix)

    multiply(matrix).block_until_ready()  # compile now
    return multiply, matrix
