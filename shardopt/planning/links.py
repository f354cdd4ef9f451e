"""How long a transfer takes on the links of a machine."""

import math

from shardopt.planning.candidate import Candidate
from shardopt.planning.hardware import Hardware
from shardopt.planning.traffic import Transfer


def seconds(transfer: Transfer, candidate: Candidate, hardware: Hardware, *, slices: int = 1) -> float:
    """Return the time of a transfer, a step, in rings at full bandwidth; the time to start one is not counted.

    Devices are laid out as `so.make_mesh` does it: tensor neighbours adjacent, pipeline next, data outside it, replica
    outermost. A group within one pod or node uses its links; a group spread over several first works within each, on
    k members, then across them, each member its k-th of the buffer over the network. On a torus a mesh axis of n of C
    chips has about D log n / log C of the D torus axes to itself, at least one.

    Args:
      transfer: what travels.
      candidate: the mesh.
      hardware: the chip.
      slices: pods that the chips are spread over evenly.
    """
    sizes = candidate.sizes
    domain = max(min(hardware.pod_chips, candidate.num_chips // slices), 1)
    axes = list(sizes)
    inner = math.prod(sizes[axis] for axis in axes[axes.index(transfer.axis) + 1 :])
    n = sizes[transfer.axis]
    near = min(n, max(domain // inner, 1))
    far = -(-n // near)
    link = hardware.link_bandwidth * rings(near, domain, hardware)
    total = transfer.bytes * transfer.calls
    if transfer.kind == "collective-permute":
        return total / (hardware.network_bandwidth if far > 1 else link)
    rounds = 2 if transfer.kind == "all-reduce" else 1
    within = rounds * (near - 1) / near * total / link
    return within + rounds * (far - 1) / far * total / near / hardware.network_bandwidth


def rings(size: int, chips: int, hardware: Hardware) -> int:
    """Return how many torus axes a mesh axis of a slice of `chips` chips has to itself; 1 on a switch."""
    if hardware.torus_dims == 0 or size == 1 or chips == 1:
        return 1
    return max(1, round(hardware.torus_dims * math.log(size) / math.log(chips)))
