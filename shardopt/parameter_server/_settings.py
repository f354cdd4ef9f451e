"""Copy the JAX settings of one thread to another thread or process."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

import jax

_THREAD_SETTINGS = {
    "jax_enable_x64": jax.enable_x64,
    "jax_default_matmul_precision": jax.default_matmul_precision,
    "jax_numpy_dtype_promotion": jax.numpy_dtype_promotion,
    "jax_numpy_rank_promotion": jax.numpy_rank_promotion,
    "jax_default_prng_impl": jax.default_prng_impl,
    "jax_threefry_partitionable": jax.threefry_partitionable,
    "jax_debug_nans": jax.debug_nans,
}
"""The JAX settings that each thread has for itself."""


def capture_settings() -> Callable[[], AbstractContextManager[object]]:
    """Return a context manager that gives another thread the settings of this one: `with
    settings(): ...`.

    A context such as `jax.enable_x64(True)` holds only for the thread that entered it. Without this
    copy workers would compute in another precision than their caller.
    """
    values = settings_values()

    def enter() -> ExitStack:
        stack = ExitStack()
        for name, value in values.items():
            stack.enter_context(_THREAD_SETTINGS[name](value))
        return stack

    return enter


def settings_values() -> dict[str, object]:
    """Return the settings of this thread."""
    return {name: getattr(jax.config, name) for name in _THREAD_SETTINGS}


def begin_process(
    settings: dict[str, object], *, devices: int, platform: str | None = None
) -> None:
    """Set up JAX in a new process with the settings of the caller's process.

    `devices` is the number of CPU devices.
    """
    flags = [
        flag
        for flag in os.environ.get("XLA_FLAGS", "").split()
        if "host_platform_device_count" not in flag
    ]
    os.environ["XLA_FLAGS"] = " ".join(
        [*flags, f"--xla_force_host_platform_device_count={devices}"]
    )
    if platform is not None:
        jax.config.update("jax_platforms", platform)
    for name, value in settings.items():
        jax.config.update(name, value)
