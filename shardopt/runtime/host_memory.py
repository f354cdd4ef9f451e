"""Host memory: what the allocator keeps of what was freed, handed back to the operating system."""

import contextlib
import ctypes
import functools
from collections.abc import Callable


def trim_malloc() -> None:
    """Hand freed memory back to the operating system, where the C library can (glibc); nothing is lost by it.

    XLA's compiler takes hundreds of megabytes for the step of a small model, and gigabytes for that of a large one.
    glibc keeps them for the process after they are freed, beside all that training allocates from then on.

    References:
      malloc_trim(3), Linux man-pages.
    """
    _trim()(0)


@functools.cache
def _trim() -> Callable[[int], int]:
    with contextlib.suppress(OSError, AttributeError, TypeError):  # no C library of that name, or without the function
        return ctypes.CDLL(None).malloc_trim
    return lambda _: 0
