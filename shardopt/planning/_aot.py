"""`aot`: compile a training step with the real compilers for TPU and GPU, on a machine that has
neither.
"""

import math
import re
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.sharding import Mesh
from jax.stages import Compiled, Lowered

from shardopt.core import (
    PyTree,
    abstract,
    calling,
    error_text,
    is_array_like,
    type_error,
    value_error,
)
from shardopt.core._extras import version_of
from shardopt.hlo._program import Memory, argument_padding, audit, inner_product_flops, memory
from shardopt.hlo._report import Audit
from shardopt.hlo.proof import Proof
from shardopt.hlo.proof._prove import source_of
from shardopt.hlo.proof._text import text_of
from shardopt.mesh import make_mesh
from shardopt.planning._hardware import Hardware
from shardopt.planning._topologies import devices_of, parse_topology
from shardopt.step._optimizer import ShardedOptimizer


class AotReport(NamedTuple):
    """A training step compiled for a topology; `print` shows it. Bytes are per device.

    Attributes:
      topology: the topology, such as "v5p:4x4x8" or "h100:8".
      num_slices: number of slices or nodes, joined by the data-centre network.
      mesh_shape: mesh axis to size.
      memory: the memory that the compiler planned.
      audit: the collectives of the program.
      flops: flops of inner products of one device in a step, loops multiplied by their trip counts;
        None if a trip count is unknown.
      compile_seconds: seconds of lowering and compiling.
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
    def argument_padding(self) -> int:
        """The part of `memory.arguments` that is padding: shards are smaller than the chip's tiles of
        8 x 128 numbers.
        """
        return argument_padding(self.text)

    @property
    def proof(self) -> Proof:
        """Whether the compiled program computes the program that XLA was given, found out now: see
        `so.hlo.prove`.
        """
        return self.audit.prove()

    def __str__(self) -> str:
        """Return a few lines: memory compared with the chip's, flops, and bytes sent over each
        axis.
        """
        mesh = " ".join(f"{axis}={size}" for axis, size in self.mesh_shape.items() if size > 1)
        slices = f"{self.num_slices} x " if self.num_slices > 1 else ""
        padding_bytes = self.argument_padding
        padding = f", {padding_bytes / 1e9:.2f} of it padding" if padding_bytes else ""
        flops = "unknown flops" if self.flops is None else f"{self.flops / 1e12:.2f} Tflop"
        lines = [
            (
                f"{slices}{self.topology}, {mesh or 'one device'}: compiled in"
                f" {self.compile_seconds:.1f} s"
            ),
            (
                f"{self.memory.peak / 1e9:.2f} GB of {self.hbm_bytes / 1e9:.1f} GB per device"
                f" ({self.memory.arguments / 1e9:.2f} arguments{padding}, {self.memory.temporary / 1e9:.2f}"
                " temporary)"
            ),
            f"{flops} of inner products per device and step",
        ]
        for axes, traffic in self.audit.by_axis().items():
            wire = traffic.wire_bytes
            sent = (
                "unknown" if wire is None else f"{wire / 1e9:.3f} GB sent in {traffic.calls} calls"
            )
            lines.append(f"{' x '.join(axes) if axes else 'mixed axes'}: {sent}")
        return "\n".join(lines)


@calling("aot")
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
    """Compile a training step for a TPU or GPU topology with the real compiler, on a machine
    without such a device.

    Args:
      make: `make(mesh) -> ShardedOptimizer`, such as `lambda mesh: so.fsdp(tx, mesh, model)`.
      abstract_params: shapes of the parameters, from `jax.eval_shape(init, key)`.
      abstract_batch: shapes of the global batch, or arrays, whose shapes alone are read.
      topology: chip and torus, "v5p:4x4x8"; v4, v5p and tpu7x have three axes, v5e and v6e two. For
        GPUs the number behind the switch of a node, "h100:8"; a100, h100, h200, b200.
      num_slices: number of slices or nodes.
      data: size of the mesh axis, as in `so.make_mesh`.
      tensor: size of the mesh axis.
      pipeline: size of the mesh axis.
      replica: size of the mesh axis.
      context: size of the mesh axis.
      expert: size of the mesh axis.

    Returns:
      An `AotReport`: `.memory`, `.audit`, `.flops`, `.compile_seconds`.

    Raises:
      ModuleNotFoundError: if the compiler is not installed: libtpu, or jax's plugin for CUDA with
        cuDNN.
      TypeError: if `make` does not return a `ShardedOptimizer`.
      ValueError: if the topology is unknown (the message lists the known forms), or the sizes do
        not fit its chips.
      ValueError: if the step does not fit into a chip's memory.
      RuntimeError: for tpu7x, if jax is older than 0.11 and libtpu newer than the one that belongs
        to it: its jaxlib cannot read such a program back.

    Example:
      >>> import shardopt as so
      >>> so.planning.aot(lambda mesh: None, {}, {}, topology="v5p:4x4")
      Traceback (most recent call last):
      ...
      ValueError: aot: topology 'v5p:4x4' has 2 axes, v5p has 3.
      Fix: write it as v5p:4x4x4; its chips form a torus of 3 axes.

    Note:
      Nothing is allocated: parameters and batch are shapes. The mesh comes from `so.make_mesh`,
      which follows the torus and puts data (or replica) across slices. XLA:GPU normally chooses
      kernels by timing them on the GPU. Without a GPU it takes the kernels that it ranks first. So
      a program compiled on a GPU may use other kernels and other scratch memory.
    """
    chip, dims = parse_topology(topology)
    devices = devices_of(topology, num_slices)
    mesh = make_mesh(
        data, tensor, pipeline, replica=replica, context=context, expert=expert, devices=devices
    )
    opt = make(mesh)
    if not isinstance(opt, ShardedOptimizer):
        fix = "return a strategy, such as so.fsdp(tx, mesh, model)."
        raise type_error(f"make must return a ShardedOptimizer, got {type(opt).__name__}.", fix=fix)
    start = time.perf_counter()
    shapes = jax.tree.map(
        lambda leaf: abstract(leaf) if is_array_like(leaf) else leaf, abstract_batch
    )
    lowered = opt.step.lower(opt.abstract_state(abstract_params), shapes)
    compiled = _compile(lowered, topology, chip)
    seconds = time.perf_counter() - start
    text = text_of(compiled, lowered) or ""
    schedule = opt.config.schedule
    # a chip that appears as two devices gives each half of its memory
    devices_per_chip = len(devices) // (math.prod(dims) * num_slices)
    return AotReport(
        topology=topology,
        num_slices=num_slices,
        mesh_shape=dict(mesh.shape),
        memory=memory(compiled),
        audit=audit(text, mesh=dict(mesh.shape), schedule=schedule)._replace(
            source=source_of(compiled, lowered, text)
        ),
        flops=inner_product_flops(text, schedule=schedule),
        compile_seconds=seconds,
        hbm_bytes=chip.memory_bytes // devices_per_chip,
        text=text,
    )


def _compile(lowered: Lowered, topology: str, chip: Hardware) -> Compiled:
    try:
        compiled = lowered.compile()
    except Exception as error:
        text = str(error)
        if "async-update instruction should have" in text:
            # collectives on the SparseCore, the default of tpu7x, of a libtpu from 0.0.50 on
            problem = (
                f"jaxlib {version_of('jaxlib')} cannot read the program for {topology} back:"
                " async-update with several operands."
            )
            fix = (
                "install jax 0.11 or newer (Python 3.12), or the libtpu that belongs to this jax:"
                " pip install 'jax[tpu]'."
            )
            raise RuntimeError(error_text(problem, fix=fix)) from error
        internal = text.startswith("INTERNAL") or (
            "RESOURCE_EXHAUSTED" not in text and "memory" not in text.lower()
        )
        if "vmem" in text.lower() or internal:
            # the error of a kernel with too little scratch memory on a core needs no explanation
            raise
        used = re.search(r"[Uu]sed ([\d.]+[KMGT]?) of ([\d.]+[KMGT]?) (\w+)", text)
        need = (
            f" (it needs {used[1]} of {used[2]} {used[3]})" if used else f": {text.splitlines()[0]}"
        )
        raise _does_not_fit(topology, chip, need) from error
    # XLA:GPU finds out only when the program runs
    if not chip.torus_dims and (peak := memory(compiled).peak) > chip.memory_bytes:
        raise _does_not_fit(topology, chip, f" (it needs {peak:,})")
    return compiled


def _does_not_fit(topology: str, chip: Hardware, need: str) -> ValueError:
    problem = f"the step does not fit into a chip of {topology}, {chip.memory_bytes:,} bytes{need}."
    fix = (
        "shard more (fsdp, tensor, more chips), recompute (remat), or take smaller micro-batches;"
        " so.plan ranks them."
    )
    return value_error(problem, fix=fix)
