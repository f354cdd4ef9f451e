"""The cost of slow links for local updates: utilisation by bandwidth and synchronisation interval."""

from typing import NamedTuple

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


@calling("diloco_utilisation")
def diloco_utilisation(
    *,
    num_parameters: float,
    step_seconds: float,
    bandwidth: float,
    replicas: int = 2,
    sync_every: int = 1,
    fragments: int = 1,
    delay: int = 0,
    overlap: float = 0.0,
    bits: float = 32,
    latency: float = 0.0,
) -> Utilisation:
    """Return the utilisation of replicas in closed form: their computation time as a share of all
    time.

    Args:
      num_parameters: N, parameters of the model.
      step_seconds: t, seconds of one step without communication between replicas.
      bandwidth: W, bytes per second that a replica sends.
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
      >>> often = diloco_utilisation(num_parameters=1e9, step_seconds=0.1, bandwidth=1e9)
      >>> rarely = diloco_utilisation(num_parameters=1e9, step_seconds=0.1, bandwidth=1e9, sync_every=100)
      >>> f"{often.utilisation:.3f} {rarely.utilisation:.3f}"
      '0.024 0.714'

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
    numbers = {
        "num_parameters": num_parameters,
        "step_seconds": step_seconds,
        "bandwidth": bandwidth,
        "bits": bits,
    }
    _check(numbers, replicas, sync_every, fragments, delay, overlap, latency)
    send = _wire_bytes(num_parameters, bits, replicas) / bandwidth + fragments * latency
    waiting = max(send / fragments - (delay + overlap) * step_seconds, 0.0) * fragments
    compute = sync_every * step_seconds
    return Utilisation(compute, send, waiting, compute / (compute + waiting))


@calling("bandwidth_for")
def bandwidth_for(
    target: float,
    *,
    num_parameters: float,
    step_seconds: float,
    replicas: int = 2,
    sync_every: int = 1,
    fragments: int = 1,
    delay: int = 0,
    overlap: float = 0.0,
    bits: float = 32,
) -> float:
    """Return the bandwidth, in bytes per second, at which replicas compute for a share `target` of
    the time.

    This is `diloco_utilisation` solved for W without latency. The transfer may take as long as the
    waiting that the target allows, plus the time that delay and overlap hide.

    Args:
      target: share of the time, above 0 and below 1.
      num_parameters: N; this and the other arguments are the same as in `diloco_utilisation`.
      step_seconds: t.
      replicas: R.
      sync_every: H.
      fragments: P.
      delay: steps.
      overlap: share of a step.
      bits: b.

    Raises:
      ValueError: if the target is not between 0 and 1, or another number is out of range.

    Example:
      >>> need = bandwidth_for(0.5, num_parameters=1e9, step_seconds=0.1)
      >>> need / 1e9, round(diloco_utilisation(num_parameters=1e9, step_seconds=0.1, bandwidth=need).utilisation, 6)
      (40.0, 0.5)
    """
    if not 0 < target < 1:
        raise ValueError(f"bandwidth_for: target must be above 0 and below 1, got {target}.")
    numbers = {"num_parameters": num_parameters, "step_seconds": step_seconds, "bits": bits}
    _check(numbers, replicas, sync_every, fragments, delay, overlap)
    allowed = (
        sync_every * step_seconds * (1 / target - 1) + fragments * (delay + overlap) * step_seconds
    )
    return _wire_bytes(num_parameters, bits, replicas) / allowed


def _wire_bytes(num_parameters: float, bits: float, replicas: int) -> float:
    return 2 * (replicas - 1) / replicas * num_parameters * bits / 8


def _check(
    positive: dict[str, float],
    replicas: int,
    sync_every: int,
    fragments: int,
    delay: int,
    overlap: float,
    latency: float = 0.0,
) -> None:
    counts = {"replicas": replicas, "sync_every": sync_every, "fragments": fragments}
    errors = [
        f"{name} must be above 0, got {value}" for name, value in positive.items() if not value > 0
    ]
    errors += [
        f"{name} must be at least 1, got {value}" for name, value in counts.items() if value < 1
    ]
    errors += [
        f"{name} must be at least 0, got {value}"
        for name, value in (("delay", delay), ("latency", latency))
        if value < 0
    ]
    errors += [] if 0 <= overlap <= 1 else [f"overlap must be from 0 to 1, got {overlap}"]
    if not errors and sync_every % fragments:
        errors = [f"sync_every={sync_every} is not divisible by fragments={fragments}"]
    if not errors and delay and delay >= sync_every // fragments:
        errors = [f"delay={delay} must be below sync_every / fragments = {sync_every // fragments}"]
    if errors:
        fix = "choose numbers as so.diloco takes them."
        raise ValueError(error_text("these numbers cannot be used.", errors, fix))
