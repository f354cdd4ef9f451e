"""What `so.schedules.search` is told for a layout: the predicted times of its passes, and the activations that fit."""

from shardopt.core.errors import format_error
from shardopt.planning.costs import footprint, pass_seconds, traffic
from shardopt.planning.hardware import Hardware
from shardopt.planning.layout import Layout, PlacedModel, Searched


def fill_in(given: PlacedModel, *, hardware: Hardware, batch_size: int, limit: float, slices: int = 1) -> Layout:
    """Return the layout with what its schedule, "search", is found for.

    Args:
      given: the model under a layout with a pipeline.
      hardware: the chip.
      batch_size: rows of the global batch.
      limit: bytes of a chip's memory that may be used.
      slices: pods that the chips are spread over evenly.

    Raises:
      ValueError: if not one activation fits.
    """
    # all that stays the same whatever the schedule, and keeps as many activations as stages
    layout = given.layout
    placed = given._replace(layout=layout._replace(schedule="zero_bubble", searched=None))
    sent = traffic(placed, batch_size=batch_size)
    passes = pass_seconds(placed, sent, hardware, batch_size=batch_size, slices=slices)
    stages, count = layout.pipeline, layout.micro_batches
    fits = _activations_that_fit(placed, batch_size, limit)
    if fits < 1:
        what = "not one activation fits beside the weights, so there is no schedule to search."
        raise ValueError(format_error("plan", what))
    backward = [*[passes.backward] * (stages - 1), passes.backward + passes.ends]
    searched = Searched(
        forward=(_short(passes.forward),) * stages,
        backward=tuple(map(_short, backward)),
        weight=(_short(passes.weight),) * stages,
        communication=_short(passes.communication),
        memory=min(fits, count, 2 * stages),
    )
    return layout._replace(searched=searched)


def _activations_that_fit(placed: PlacedModel, batch_size: int, limit: float) -> int:
    """Return how many: from one more to one less a footprint changes by what each takes."""
    table = placed.layout.table()
    assert table is not None
    total = footprint(placed, batch_size=batch_size).total
    each = footprint(placed, batch_size=batch_size, more_slots=1).total - total
    return table.num_slots + int((limit - total) // each)


def _short(seconds: float) -> float:
    """Return it with three digits, which can be read, and typed."""
    return float(f"{seconds:.3g}")
