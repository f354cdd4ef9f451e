"""`aot`: what the real XLA:TPU compiler makes of a training step, on a machine without a TPU."""

import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import jax
from jax.sharding import Mesh
from jax.stages import Compiled, Lowered

from shardopt.audit.collective import Collective
from shardopt.audit.program import Memory, argument_padding, audit, inner_product_flops, memory, read_program
from shardopt.audit.report import Audit
from shardopt.core.arguments import check_count
from shardopt.core.errors import format_error, plural
from shardopt.core.extras import require
from shardopt.core.types import PyTree, abstract, is_array_like
from shardopt.engine.optimizer import ShardedOptimizer
from shardopt.mesh import make_mesh
from shardopt.planning.compiled_time import StepSeconds, walk_schedule
from shardopt.planning.hardware import HARDWARE, Devices, Hardware, hardware_of


class AotReport(NamedTuple):
    """A training step as compiled for a TPU topology; `print` shows it. Bytes are per device.

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
      step_seconds: how long a step takes by the compiler's own estimates, see `so.planning.step_seconds`.
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


_TPUS = {name: chip for name, chip in HARDWARE.items() if chip.torus_dims}


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
    """Compile a training step for a TPU topology, with the real compiler and without a TPU.

    Nothing is allocated: parameters and batch are shapes. The mesh is `so.make_mesh`'s, which respects the torus and
    puts data (or replica) across slices.

    Args:
      make: `make(mesh) -> ShardedOptimizer`, such as `lambda mesh: so.fsdp(tx, mesh, model)`.
      abstract_params: shapes of the parameters, from `jax.eval_shape(init, key)`.
      abstract_batch: shapes of the global batch; of arrays only the shapes are read.
      topology: chip and torus, "v5p:4x4x8"; v4, v5p and tpu7x have three axes, v5e and v6e two.
      num_slices: how many of them.
      data: as in `so.make_mesh`; so are tensor, pipeline, replica, context and expert.
      tensor: likewise.
      pipeline: likewise.
      replica: likewise.
      context: likewise.
      expert: likewise.

    Returns:
      An `AotReport`: `.argument_bytes`, `.temp_bytes`, `.collectives`, `.flops`, `.step_seconds`, `.compile_seconds`.

    Raises:
      ModuleNotFoundError: if libtpu, the compiler, is not installed.
      TypeError: if `make` does not return a `ShardedOptimizer`.
      ValueError: if the topology is unknown (the message lists what is known), the sizes do not fit its chips, or the
        compiler finds that the step does not fit into a chip's memory.

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


def parse_topology(topology: str) -> tuple[Hardware, tuple[int, ...]]:
    """Return the chip and the torus in a text such as "v5p:4x4x8".

    Raises:
      TypeError: if it is no string.
      ValueError: if it cannot be read, the chip is unknown, or its torus has another number of axes.
    """
    forms = ", ".join(f"{name}:{'x'.join(['4'] * chip.torus_dims)}" for name, chip in _TPUS.items())
    if not isinstance(topology, str):
        raise TypeError(format_error("aot", f"topology must be a string, got {topology!r}.", fix=f"write {forms}."))
    found = re.fullmatch(r"([a-z0-9]+):(\d+(?:x\d+)*)", topology)
    if found is None or found[1] not in _TPUS:
        what = f"unknown topology {topology!r}."
        raise ValueError(format_error("aot", what, fix=f"write chip and torus, with sizes of your own: {forms}."))
    chip, dims = _TPUS[found[1]], tuple(map(int, found[2].split("x")))
    if len(dims) != chip.torus_dims:
        right = f"{chip.name}:{'x'.join(['4'] * chip.torus_dims)}"
        what = f"topology {topology!r} has {plural(len(dims), 'axis')}, {chip.name} has {chip.torus_dims}."
        fix = f"write it as {right}; its chips form a torus of {chip.torus_dims} axes."
        raise ValueError(format_error("aot", what, fix=fix))
    return chip, dims


def topology_devices(topology: str, *, num_slices: int = 1) -> Devices:
    """Return the devices of a TPU topology, to compile for; none of them exists.

    Raises:
      ModuleNotFoundError: if libtpu is not installed.
      ValueError: if the compiler does not know the topology.
    """
    _, dims = parse_topology(topology)
    check_count("aot", "num_slices", num_slices)
    require("libtpu", extra="tpu", who="aot")
    from jax.experimental import topologies

    more: dict[str, object] = {"wrap": wraps(dims)}
    if num_slices > 1:
        more["num_slices"] = num_slices
    with _without_a_tpu():
        try:
            return topologies.get_topology_desc(topology_name=topology, platform="tpu", **more).devices
        except Exception as error:  # whatever the plugin raises for names that it does not know
            what = f"the compiler does not take topology {topology!r} x {num_slices}: {str(error).splitlines()[0]}"
            fix = "choose sizes that Google offers, such as v5p:4x4x4, v5e:4x8 or v6e:16x16."
            raise ValueError(format_error("aot", what, fix=fix)) from error


def wraps(dims: Sequence[int]) -> tuple[bool, bool, bool]:
    """Return which axes of a slice have wrap-around links, of three even where the torus has two.

    A slice of three axes has them where every size is a multiple of 4; one of two axes along a size of 16, a whole pod's.
    Without being told of them the compiler plans for a mesh without, and sends all-reduces for gathers.

    References:
      Google Cloud, "TPU v4" and "TPU v5p" (twisted and wrapped slices); MaxText, `accelerator_to_spec_map`.
    """
    if len(dims) == 3:
        torus = all(size % 4 == 0 for size in dims)
        return torus, torus, torus
    return dims[0] == 16, dims[1] == 16, False


def _compile(lowered: Lowered, topology: str, chip: Hardware) -> Compiled:
    try:
        return lowered.compile()
    except Exception as error:
        text = str(error)
        internal = text.startswith("INTERNAL") or ("RESOURCE_EXHAUSTED" not in text and "memory" not in text.lower())
        if "vmem" in text.lower() or internal:
            raise  # a kernel that needs more of a core's scratch memory than there is says so itself
        used = re.search(r"[Uu]sed ([\d.]+[KMGT]?) of ([\d.]+[KMGT]?) (\w+)", text)
        need = f" (it needs {used[1]} of {used[2]} {used[3]})" if used else f": {text.splitlines()[0]}"
        what = f"the step does not fit into a chip of {topology}, {chip.memory_bytes:,} bytes{need}."
        fix = "shard more (fsdp, tensor, more chips), recompute (remat), or take smaller micro-batches; so.plan ranks them."
        raise ValueError(format_error("aot", what, fix=fix)) from error


@contextmanager
def _without_a_tpu() -> Iterator[None]:
    """Tell libtpu, while it is loaded, to ask no server about a machine that is not there, nor to lock it."""
    told = {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5p-32",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    before = {name: os.environ.get(name) for name in told}
    os.environ.update({name: value for name, value in told.items() if before[name] is None})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
