"""`aot`: what the real compilers for TPU and GPU make of a training step, on a machine that has neither."""

import math
import re
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.sharding import Mesh
from jax.stages import Compiled, Lowered

from shardopt.audit.collective import Collective
from shardopt.audit.program import Memory, argument_padding, audit, inner_product_flops, memory, read_program
from shardopt.audit.report import Audit
from shardopt.core.errors import format_error
from shardopt.core.types import PyTree, abstract, is_array_like
from shardopt.engine.optimizer import ShardedOptimizer
from shardopt.mesh import make_mesh
from shardopt.planning.compiled_time import StepSeconds, walk_schedule
from shardopt.planning.hardware import Hardware, hardware_of
from shardopt.planning.topologies import parse_topology, topology_devices


class AotReport(NamedTuple):
    """A training step as compiled for a topology; `print` shows it. Bytes are per device.

    Attributes:
      topology: as asked for, "v5p:4x4x8" or "h100:8".
      num_slices: how many of them, joined by the data-centre network.
      mesh_shape: mesh axis to size.
      memory: what the compiler planned.
      audit: the collectives of the program.
      flops: of the inner products of one device in a step, loops multiplied in; None where a loop does not tell how
        often it turns.
      compile_seconds: of lowering and compiling.
      hbm_bytes: memory of a device.
      text: the compiled program, as HLO text.
      step_seconds: how long a step takes by the compiler's own estimates, see `so.planning.step_seconds`; unknown on GPU,
        whose compiler writes none.
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
    step_seconds: StepSeconds

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

    def to_json(self) -> dict[str, object]:
        """Return plain numbers and words."""
        extra = {"argument_padding": self.argument_padding, "peak": self.peak_bytes, "hbm": self.hbm_bytes}
        return {
            "topology": self.topology,
            "num_slices": self.num_slices,
            "mesh": self.mesh_shape,
            "memory": self.memory._asdict() | extra,
            "flops": self.flops,
            "compile_seconds": round(self.compile_seconds, 2),
            "collectives": {kind: found._asdict() for kind, found in self.audit.by_kind().items()},
            "step_seconds": self.step_seconds.to_json(),
        }

    def __str__(self) -> str:
        """Return a few lines: memory against the chip's, flops, what is sent, and what takes how long."""
        mesh = " ".join(f"{axis}={size}" for axis, size in self.mesh_shape.items() if size > 1)
        slices = f"{self.num_slices} x " if self.num_slices > 1 else ""
        added = self.argument_padding
        padding = f", {added / 1e9:.2f} of it padding" if added else ""
        flops = "unknown flops" if self.flops is None else f"{self.flops / 1e12:.2f} Tflop"
        lines = [
            f"{slices}{self.topology}, {mesh or 'one device'}: compiled in {self.compile_seconds:.1f} s",
            f"{self.peak_bytes / 1e9:.2f} GB of {self.hbm_bytes / 1e9:.1f} GB per device "
            f"({self.argument_bytes / 1e9:.2f} arguments{padding}, {self.temp_bytes / 1e9:.2f} temporary)",
            f"{flops} of inner products per device and step",
        ]
        for axes, found in self.audit.by_axis().items():
            wire = found.wire_bytes
            sent = "unknown" if wire is None else f"{wire / 1e9:.3f} GB sent in {found.calls} calls"
            lines.append(f"{' x '.join(axes) if axes else 'mixed axes'}: {sent}")
        return "\n".join([*lines, str(self.step_seconds)])


def aot(
    make: Callable[[Mesh], ShardedOptimizer],
    abstract_params: PyTree,
    abstract_batch: PyTree,
    *,
    topology: str,
    num_slices: int = 1,
    data: int = -1,
    tensor: int = 1,
    pipeline: int = 1,
    replica: int = 1,
    context: int = 1,
    expert: int = 1,
) -> AotReport:
    """Compile a training step for a TPU or GPU topology, with the real compiler, where there is no such device.

    Nothing is allocated: parameters and batch are shapes. The mesh is `so.make_mesh`'s, which respects the torus and
    puts data (or replica) across slices. XLA:GPU chooses among kernels by timing them on the GPU that it compiles for;
    here it takes those that it ranks first, so that a program compiled on the GPU may use others, and other scratch memory.

    Args:
      make: `make(mesh) -> ShardedOptimizer`, such as `lambda mesh: so.fsdp(tx, mesh, model)`.
      abstract_params: shapes of the parameters, from `jax.eval_shape(init, key)`.
      abstract_batch: shapes of the global batch; of arrays only the shapes are read.
      topology: chip and torus, "v5p:4x4x8"; v4, v5p and tpu7x have three axes, v5e and v6e two. Of GPUs how many a node
        has behind its switch, "h100:8"; a100, h100, h200, b200.
      num_slices: how many of them: slices, or nodes.
      data: as in `so.make_mesh`; so are tensor, pipeline, replica, context and expert.
      tensor: likewise.
      pipeline: likewise.
      replica: likewise.
      context: likewise.
      expert: likewise.

    Returns:
      An `AotReport`: `.argument_bytes`, `.temp_bytes`, `.collectives`, `.flops`, `.step_seconds`, `.compile_seconds`.

    Raises:
      ModuleNotFoundError: if the compiler is not installed: libtpu, or jax's plugin for CUDA with cuDNN.
      TypeError: if `make` does not return a `ShardedOptimizer`.
      ValueError: if the topology is unknown (the message lists what is known), the sizes do not fit its chips, or the
        step does not fit into a chip's memory.

    Example:
      >>> import shardopt as so
      >>> so.aot(lambda mesh: None, {}, {}, topology="v5p:4x4")
      Traceback (most recent call last):
      ...
      ValueError: aot: topology 'v5p:4x4' has 2 axes, v5p has 3.
      Fix: write it as v5p:4x4x4; its chips form a torus of 3 axes.
    """
    chip, dims = parse_topology(topology)
    devices = topology_devices(topology, num_slices=num_slices)
    mesh = make_mesh(data, tensor, pipeline, replica=replica, context=context, expert=expert, devices=devices)
    opt = make(mesh)
    if not isinstance(opt, ShardedOptimizer):
        fix = "return a strategy, such as so.fsdp(tx, mesh, model)."
        raise TypeError(format_error("aot", f"make must return a ShardedOptimizer, got {type(opt).__name__}.", fix=fix))
    start = time.perf_counter()
    shapes = jax.tree.map(lambda leaf: abstract(leaf) if is_array_like(leaf) else leaf, abstract_batch)
    compiled = _compile(opt.step.lower(opt.abstract_state(abstract_params), shapes), topology, chip)
    seconds = time.perf_counter() - start
    text = compiled.as_text() or ""
    # where a chip shows up as two devices, each has half of its memory
    schedule = opt.config.schedule
    share = len(devices) // (math.prod(dims) * num_slices)
    return AotReport(
        topology=topology,
        num_slices=num_slices,
        mesh_shape=dict(mesh.shape),
        memory=memory(compiled),
        audit=audit(text, mesh=dict(mesh.shape), schedule=schedule),
        flops=inner_product_flops(text, schedule=schedule),
        compile_seconds=seconds,
        hbm_bytes=chip.memory_bytes // share,
        text=text,
        step_seconds=walk_schedule(read_program("aot", text, (), mesh=mesh), hardware_of(devices), schedule),
    )


def _compile(lowered: Lowered, topology: str, chip: Hardware) -> Compiled:
    try:
        compiled = lowered.compile()
    except Exception as error:
        text = str(error)
        internal = text.startswith("INTERNAL") or ("RESOURCE_EXHAUSTED" not in text and "memory" not in text.lower())
        if "vmem" in text.lower() or internal:
            raise  # a kernel that needs more of a core's scratch memory than there is says so itself
        used = re.search(r"[Uu]sed ([\d.]+[KMGT]?) of ([\d.]+[KMGT]?) (\w+)", text)
        need = f" (it needs {used[1]} of {used[2]} {used[3]})" if used else f": {text.splitlines()[0]}"
        raise _does_not_fit(topology, chip, need) from error
    if (
        not chip.torus_dims and (peak := memory(compiled).peak) > chip.memory_bytes
    ):  # XLA:GPU only finds out when it runs
        raise _does_not_fit(topology, chip, f" (it needs {peak:,})")
    return compiled


def _does_not_fit(topology: str, chip: Hardware, need: str) -> ValueError:
    what = f"the step does not fit into a chip of {topology}, {chip.memory_bytes:,} bytes{need}."
    fix = "shard more (fsdp, tensor, more chips), recompute (remat), or take smaller micro-batches; so.plan ranks them."
    return ValueError(format_error("aot", what, fix=fix))
