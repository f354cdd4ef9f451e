"""Memory of processes that compile many programs."""

import contextlib
import ctypes
import gc

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # mallopt(3)


def keep_freed_memory():
    """Let malloc keep freed pages: the next program would fault each of them in again.

    This takes 5% off the time to lower and compile a step.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library
        libc = ctypes.CDLL(None)
        for parameter, size in (
            (M_TRIM_THRESHOLD, 2**30),
            (M_TOP_PAD, 2**26),
            (M_MMAP_THRESHOLD, 2**25),
        ):
            libc.mallopt(parameter, size)


def collect_seldom():
    """Let the collector of Python look at objects that live on less often.

    Tracing makes millions of small objects that live on. With the default thresholds, the collector
    walks them all again and again: 5 to 7% of the time of a test.
    """
    gc.set_threshold(50_000, 50, 100)
