"""One verdict for all processes, so that they stop at the same step."""

import jax
import numpy as np
from jax.experimental import multihost_utils

VERDICTS = ("exhausted", "early", "interrupted", "sigterm")
"""How a run can end before its time; where verdicts differ, the later in this list wins."""


def agree(*verdicts: str | None, due: bool) -> str | None:
    """Return the weightiest verdict of all processes, or None if none has one.

    With one process there is nobody to ask. With several, each call where `due` is true gathers one integer a
    process, which waits for the steps under way; where it is false the answer is None, and who has a verdict
    brings it again next time.

    Args:
      *verdicts: what this process wants: names from `VERDICTS`, or None.
      due: whether to ask at this step; the same on all processes.
    """
    code = max((VERDICTS.index(verdict) for verdict in verdicts if verdict is not None), default=-1)
    if jax.process_count() > 1:
        if not due:
            return None
        code = int(np.max(multihost_utils.process_allgather(np.int32(code))))
    return None if code < 0 else VERDICTS[code]
