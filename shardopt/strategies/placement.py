"""The placement table: what each strategy splits over the data axis."""

from typing import NamedTuple


class Placement(NamedTuple):
    """Whether parameters, gradients and optimizer state are split over data (True) or whole (False).

    Everything that a ring-1 strategy does follows from these three switches:

    - `params`: they are gathered inside the differentiated function, so the backward pass reduce-scatters.
    - `grads` but not `params`: each micro-batch's gradient is reduce-scattered.
    - `opt_state` but not `grads`: the accumulated gradient is reduce-scattered once; after the update the
      parameters are gathered.
    - none of them: the accumulated gradient is all-reduced once.

    A replica axis holds copies; gradients (or their shards) are summed over it once a step.
    """

    params: bool
    grads: bool
    opt_state: bool


DDP = Placement(params=False, grads=False, opt_state=False)
ZERO_1 = Placement(params=False, grads=False, opt_state=True)
ZERO_2 = Placement(params=False, grads=True, opt_state=True)
ZERO_3 = Placement(params=True, grads=True, opt_state=True)
"""Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020."""

STAGES = {1: ZERO_1, 2: ZERO_2, 3: ZERO_3}

PLACEMENTS = {"ddp": DDP, "zero1": ZERO_1, "zero2": ZERO_2, "zero3": ZERO_3, "fsdp": ZERO_3}
"""By the names that `hybrid` takes."""
