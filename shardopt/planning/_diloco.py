"""The cost of slow links for local updates: utilisation by bandwidth and synchronisation interval."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from shardopt.core._arguments import check_count, check_number
from shardopt.core._errors import calling, error_text


class Utilisation(NamedTuple):
    """The utilisation of replicas: computation time as a share of all time.

    Attributes:
      compute: seconds of computation between two synchronisations.
      send: seconds that the transfers of one synchronisation keep the link busy, all fragments
        together.
      waiting: the part of `send` that does not overlap with computation.
      utilisation: compute / (compute + waiting), from 0 to 1.
    """

    compute: float
    send: float
    waiting: float
    utilisation: float


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """Replicas that train apart, such as by `so.diloco`, and wait for a slow link, in closed form.

    Attributes:
      num_parameters: N, parameters of the model.
      step_seconds: t, seconds of one step without communication between replicas.
      replicas: R, number of replicas.
      sync_every: H, steps between two synchronisations.
      fragments: P, fragments of the model, which are synchronised at different steps.
      delay: steps after which a fragment must have arrived.
      overlap: share of a step, from 0 to 1, that overlaps with the transfer: 2/3 if gradients are
        sent as soon as the backward pass has computed them. `so.diloco` has 0.
      bits: b, bits per parameter on the wire: 32, or 16 for bfloat16, 4 for four-bit outer
        gradients.
      latency: seconds to start a transfer.

    Raises:
      ValueError: if a number is out of range, or the delay is not below the H / P steps between two
        fragments.

    Example:
      >>> replicas = Replicas(num_parameters=1e9, step_seconds=0.1, sync_every=100)
      >>> round(replicas.utilisation(bandwidth=1e9).utilisation, 3), replicas.bandwidth_for(0.5) / 1e9
      (0.714, 0.4)

    Note:
      Every H steps each of P fragments is all-reduced in a ring over R replicas. That takes T = 2
      (R-1)/R x N b / 8 / W seconds per round, and P times the latency. The transfer of a fragment
      may start during the last step before it, for a share `overlap` of that step. It may then take
      `delay` more steps. So up to (delay + overlap) t of each fragment overlaps with computation:
      waiting = max(0, T/P - (delay + overlap) t) P. H = 1, P = 1, delay = 0 is data parallelism.

    References:
      Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023;
      Douillard et al., "Streaming DiLoCo with Overlapping Communication", 2025, section 2 for
      fragments and delay.
    """

    num_parameters: float
    step_seconds: float
    replicas: int = 2
    sync_every: int = 1
    fragments: int = 1
    delay: int = 0
    overlap: float = 0.0
    bits: float = 32
    latency: float = 0.0

    @calling("Replicas")
    def __post_init__(self) -> None:
        for name in ("num_parameters", "step_seconds", "bits"):
            check_number(name, getattr(self, name), positive=True)
        for name in ("replicas", "sync_every", "fragments"):
            check_count(name, getattr(self, name))
        for name in ("delay", "latency", "overlap"):
            check_number(name, getattr(self, name))
        stride = self.sync_every / self.fragments
        problem = ""
        if self.overlap > 1:
            problem = f"overlap must be from 0 to 1, got {self.overlap}"
        elif self.sync_every % self.fragments:
            problem = f"sync_every={self.sync_every} is not divisible by fragments={self.fragments}"
        elif self.delay and self.delay >= stride:
            problem = f"delay={self.delay} must be below sync_every / fragments = {stride:g}"
        if problem:
            raise ValueError(
                error_text(f"{problem}.", fix="choose numbers as so.diloco takes them.")
            )

    @calling("utilisation")
    def utilisation(self, *, bandwidth: float) -> Utilisation:
        """Return the computation time of a replica as a share of all time.

        Args:
          bandwidth: W, bytes per second that a replica sends.

        Raises:
          ValueError: if the bandwidth is not above 0.
        """
        check_number("bandwidth", bandwidth, positive=True)
        send = self._wire_bytes / bandwidth + self.fragments * self.latency
        waiting = max(send - self._hidden, 0.0)
        compute = self.sync_every * self.step_seconds
        return Utilisation(compute, send, waiting, compute / (compute + waiting))

    @calling("bandwidth_for")
    def bandwidth_for(self, target: float) -> float:
        """Return the bandwidth, in bytes per second, at which replicas compute for a share `target`
        of the time.

        This is `utilisation` solved for W. It is infinite if the latency alone takes too long.

        Args:
          target: share of the time, above 0 and below 1.

        Raises:
          ValueError: if the target is not between 0 and 1.
        """
        if not 0 < target < 1:
            raise ValueError(error_text(f"target must be above 0 and below 1, got {target}."))
        waiting = self.sync_every * self.step_seconds * (1 / target - 1)
        allowed = waiting + self._hidden - self.fragments * self.latency
        return self._wire_bytes / allowed if allowed > 0 else math.inf

    @property
    def _hidden(self) -> float:
        """Seconds of the transfers of a round that can overlap with computation."""
        return self.fragments * (self.delay + self.overlap) * self.step_seconds

    @property
    def _wire_bytes(self) -> float:
        return 2 * (self.replicas - 1) / self.replicas * self.num_parameters * self.bits / 8
