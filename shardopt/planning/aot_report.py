"""What `aot` returns: a compiled step in numbers."""

from typing import Any, NamedTuple

from shardopt.hlo.collective import Collective
from shardopt.hlo.memory import Memory, argument_padding
from shardopt.hlo.report import Audit


class AotReport(NamedTuple):
    """A training step as compiled for a TPU topology; `print` shows it. Bytes are those of one device.

    Attributes:
      topology: as asked for, "v5p:4x4x8".
      num_slices: how many of them, joined by the data-centre network.
      mesh_shape: mesh axis to size.
      memory: what the compiler planned.
      audit: the collectives of the program.
      flops: of the inner products of one device in a step, loops multiplied in; None where a loop does not tell how
        often it turns.
      compile_seconds: of lowering and compiling.
      hbm_bytes: memory of a device.
      text: the compiled program, as HLO text.
    """

    topology: str
    num_slices: int
    mesh_shape: dict[str, int]
    memory: Memory
    audit: Audit
    flops: float | None
    compile_seconds: float
    hbm_bytes: int
    text: str

    @property
    def argument_bytes(self) -> int:
        """Parameters, optimizer state and batch, as they are stored."""
        return self.memory.arguments

    @property
    def argument_padding(self) -> int:
        """The part of `argument_bytes` that holds nothing: shards too thin for the chip's tiles of 8 x 128 numbers."""
        return argument_padding(self.text)

    @property
    def temp_bytes(self) -> int:
        """Everything in between, at its peak."""
        return self.memory.temporary

    @property
    def peak_bytes(self) -> int:
        """All that the step needs."""
        return self.memory.peak

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """The collectives, as `so.audit` gives them."""
        return self.audit.collectives

    def to_json(self) -> dict[str, Any]:
        """Return plain numbers and words."""
        kinds = {kind: found._asdict() for kind, found in self.audit.by_kind().items()}
        return {
            "topology": self.topology,
            "num_slices": self.num_slices,
            "mesh": self.mesh_shape,
            "memory": self.memory._asdict()
            | {"argument_padding": self.argument_padding, "peak": self.peak_bytes, "hbm": self.hbm_bytes},
            "flops": self.flops,
            "compile_seconds": round(self.compile_seconds, 2),
            "collectives": kinds,
        }

    def __str__(self) -> str:
        """Return a few lines: memory against the chip's, flops, what is sent."""
        mesh = " ".join(f"{axis}={size}" for axis, size in self.mesh_shape.items() if size > 1)
        slices = f"{self.num_slices} x " if self.num_slices > 1 else ""
        sent = [
            f"{' x '.join(axes) if axes else 'mixed axes'}: "
            + (
                "unknown"
                if found.wire_bytes is None
                else f"{found.wire_bytes / 1e9:.3f} GB sent in {found.calls} calls"
            )
            for axes, found in self.audit.by_axis().items()
        ]
        added = self.argument_padding
        padding = f", {added / 1e9:.2f} of it padding" if added else ""
        flops = "unknown flops" if self.flops is None else f"{self.flops / 1e12:.2f} Tflop"
        return "\n".join(
            [
                f"{slices}{self.topology}, {mesh or 'one device'}: compiled in {self.compile_seconds:.1f} s",
                f"{self.peak_bytes / 1e9:.2f} GB of {self.hbm_bytes / 1e9:.1f} GB a device "
                f"({self.argument_bytes / 1e9:.2f} arguments{padding}, {self.temp_bytes / 1e9:.2f} temporary)",
                f"{flops} of inner products a device and step",
                *sent,
            ]
        )
