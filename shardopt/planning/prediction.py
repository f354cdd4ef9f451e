"""One layout and what it is predicted to need: bytes a device, bytes on the wire, seconds a step."""

from typing import Any, NamedTuple

import optax

from shardopt.core.types import PyTree
from shardopt.planning.candidate import Candidate
from shardopt.planning.footprint import Footprint, footprint
from shardopt.planning.hardware import Hardware
from shardopt.planning.placed import abstract_opt_state, place
from shardopt.planning.step_time import StepTime, step_time
from shardopt.planning.traffic import Transfer, by_axis, traffic
from shardopt.planning.workload import Workload


class Prediction(NamedTuple):
    """A layout with its predictions.

    Attributes:
      layout: mesh sizes, placement, schedule, micro-batches.
      memory: bytes on a device at the worst moment of a step, by purpose.
      transfers: what a device sends in a step.
      time: seconds of a step, by purpose.
      mfu: model flops utilisation, from 0 to 1.
      tokens_per_second: of all chips together.
      rules: the workload's tensor rules.
    """

    layout: Candidate
    memory: Footprint
    transfers: tuple[Transfer, ...]
    time: StepTime
    mfu: float
    tokens_per_second: float
    rules: Any

    @property
    def mesh(self) -> dict[str, int]:
        """Keyword arguments of `so.make_mesh`."""
        return self.layout.sizes

    @property
    def strategy(self) -> dict[str, Any]:
        """Keyword arguments of `so.hybrid`."""
        return self.layout.strategy(self.rules)

    @property
    def wire_bytes(self) -> dict[str, float]:
        """Bytes that a device sends in a step, by mesh axis."""
        return by_axis(self.transfers, self.layout)

    def to_json(self) -> dict[str, Any]:
        """Return plain numbers and words."""
        layout = self.layout._asdict()
        layout["gather_dtype"] = None if layout["gather_dtype"] is None else str(layout["gather_dtype"])
        return {
            "layout": layout,
            "memory": self.memory._asdict() | {"total": self.memory.total},
            "wire_bytes": self.wire_bytes,
            "seconds": self.time._asdict() | {"total": self.time.total},
            "mfu": self.mfu,
            "tokens_per_second": self.tokens_per_second,
        }


def predict(
    workload: Workload,
    layout: Candidate,
    *,
    hardware: Hardware,
    batch_size: int,
    tx: optax.GradientTransformation | None = None,
    opt_state: PyTree = None,
    slices: int = 1,
) -> Prediction:
    """Return what one layout is predicted to need.

    Args:
      workload: the model.
      layout: mesh sizes, placement, schedule, micro-batches.
      hardware: the chip.
      batch_size: rows of the global batch.
      tx: the optimizer, for the bytes of its state; by default `optax.adamw`.
      opt_state: its abstract state, if it is known already.
      slices: pods that the chips are spread over evenly.

    Raises:
      ValueError: if a tensor rule does not divide the parameters, or the schedule refuses the sizes.

    Example:
      >>> from shardopt.planning import HARDWARE, Candidate, find_model
      >>> work = find_model("plan", "llama3-8b").workload()
      >>> found = predict(work, Candidate(data=64, remat=True), hardware=HARDWARE["v5p"], batch_size=128)
      >>> round(found.memory.params / 1e9, 3), 0.5 < found.mfu < 1
      (0.502, True)
    """
    if opt_state is None:
        opt_state = abstract_opt_state(workload, optax.adamw(1e-3) if tx is None else tx)
    placed = place(workload, layout, opt_state, tiled=hardware.torus_dims > 0)
    held = footprint(workload, layout, placed, batch_size=batch_size)
    sent = traffic(workload, layout, placed, batch_size=batch_size)
    time = step_time(workload, layout, placed, held, sent, hardware, batch_size=batch_size, slices=slices)
    useful = workload.model_flops * batch_size
    return Prediction(
        layout=layout,
        memory=held,
        transfers=sent,
        time=time,
        mfu=useful / (time.total * layout.num_chips * hardware.flops),
        tokens_per_second=workload.tokens * batch_size / time.total,
        rules=workload.rules,
    )
