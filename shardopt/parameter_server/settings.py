"""The settings of jax that hold for one thread, taken to another thread or process."""

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
"""The settings of jax that hold for one thread only."""


def settings_here() -> Callable[[], AbstractContextManager[object]]:
    """Return what sets up another thread as this one is now: `with settings(): ...`.

    A context such as `jax.enable_x64(True)` holds for the thread that entered it; workers would compute in another
    precision than their caller.
    """
    values = settings_values()

    def enter() -> ExitStack:
        stack = ExitStack()
        for name, value in values.items():
            stack.enter_context(_THREAD_SETTINGS[name](value))
        return stack

    return enter


def settings_values() -> dict[str, object]:
    """Return the settings as they are here."""
    return {name: getattr(jax.config, name) for name in _THREAD_SETTINGS}


def use_settings(values: dict[str, object]) -> None:
    """Make settings those of this process."""
    for name, value in values.items():
        jax.config.update(name, value)
