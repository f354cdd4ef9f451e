"""Copy the JAX settings of one thread to another thread or process."""

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
    """Return a context manager that gives another thread the settings of this one: `with settings(): ...`.

    A context such as `jax.enable_x64(True)` holds only for the thread that entered it. Without this copy workers would
    compute in another precision than their caller.
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


def use_settings(values: dict[str, object]) -> None:
    """Set the settings of this process."""
    for name, value in values.items():
        jax.config.update(name, value)
