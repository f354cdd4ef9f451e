"""The arguments of `so.schedules.search` for a layout: predicted times of its passes, and the
activations that fit.
"""

from shardopt.core._errors import format_error
from shardopt.planning._costs import footprint, pass_seconds, traffic
from shardopt.planning._hardware import Hardware
from shardopt.planning._layout import ParallelLayout, PlacedModel, SearchArguments


def with_search_arguments(
    base: PlacedModel, *, hardware: Hardware, batch_size: int, limit: float, slices: int = 1
) -> ParallelLayout:
    """Return the layout with the times and the memory for its schedule "search".

    Args:
      base: the model under a layout with a pipeline.
      hardware: the chip.
      batch_size: rows of the global batch.
      limit: bytes of a chip's memory that may be used.
      slices: pods that the chips are spread over evenly.

    Raises:
      ValueError: if not one activation fits.
    """
    # times and memory without activations do not depend on the schedule; this one holds one
    # activation per stage
    layout = base.layout
    placed = base._replace(layout=layout._replace(schedule="zero_bubble", searched=None))
    transfers = traffic(placed, batch_size=batch_size)
    passes = pass_seconds(placed, transfers, hardware, batch_size=batch_size, slices=slices)
    stages, micro_batches = layout.pipeline, layout.micro_batches
    max_activations = _activations_that_fit(placed, batch_size, limit)
    if max_activations < 1:
        problem = "not one activation fits beside the weights, so there is no schedule to search."
        raise ValueError(format_error("plan", problem))
    backward = [*[passes.backward] * (stages - 1), passes.backward + passes.ends]
    searched = SearchArguments(
        forward=(_rounded(passes.forward),) * stages,
        backward=tuple(map(_rounded, backward)),
        weight=(_rounded(passes.weight),) * stages,
        communication=_rounded(passes.communication),
        memory=min(max_activations, micro_batches, 2 * stages),
    )
    return layout._replace(searched=searched)


def _activations_that_fit(placed: PlacedModel, batch_size: int, limit: float) -> int:
    """Return how many activations fit: the footprint grows by the same bytes for each one."""
    table = placed.layout.table()
    assert table is not None
    total = footprint(placed, batch_size=batch_size).total
    activation_bytes = footprint(placed, batch_size=batch_size, extra_slots=1).total - total
    return table.num_slots + int((limit - total) // activation_bytes)


def _rounded(seconds: float) -> float:
    """Return the time with three digits, which are easy to read and to type."""
    return float(f"{seconds:.3g}")
