"""The checked arguments of a strategy: one config drives the whole step."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import optax
from jax.sharding import Mesh

from shardopt.config._axes import AxisTable, axes_of
from shardopt.config._options import OPTIONS, BatchDims, OptStateLayout, View
from shardopt.config._program_check import ProgramCheck
from shardopt.config._slots import Differentiate, StepSlots
from shardopt.config._sync import SyncConfig
from shardopt.config._user_mesh import Axes, UserMesh
from shardopt.core import PyTree, Rules, calling
from shardopt.core._block_model import LossFn
from shardopt.core._reducer import Reducer
from shardopt.partition import Report
from shardopt.partition._rules import patterns_of
from shardopt.runtime._compiler_options import CompilerOptions

if TYPE_CHECKING:
    from shardopt.pipeline import Schedule


class Placement(NamedTuple):
    """The placement table: whether parameters, gradients and optimizer state are sharded over data,
    or replicated.

    The collectives of a strategy follow from these three switches:

    - `params`: parameters are gathered inside the differentiated function, so the backward pass
      reduce-scatters.
    - `grads` but not `params`: each micro-batch's gradient is reduce-scattered.
    - `opt_state` but not `grads`: the accumulated gradient is reduce-scattered once; after the
      update the parameters are gathered.
    - none of them: the accumulated gradient is all-reduced once.

    A replica axis holds copies; gradients (or their shards) are summed over it once a step.
    """

    params: bool
    grads: bool
    opt_state: bool


# Two data devices and one parameter of two halves A and B. Gradients: as they are accumulated.
#
#          parameters   gradients   optimizer state
#   ddp    AB   AB      AB   AB     AB   AB
#   zero1  AB   AB      AB   AB     A    B
#   zero2  AB   AB      A    B      A    B
#   fsdp   A    B       A    B      A    B
DDP = Placement(params=False, grads=False, opt_state=False)
ZERO_1 = Placement(params=False, grads=False, opt_state=True)
ZERO_2 = Placement(params=False, grads=True, opt_state=True)
ZERO_3 = Placement(params=True, grads=True, opt_state=True)
"""Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.
"""

STAGES = {1: ZERO_1, 2: ZERO_2}

PlacementName = Literal["ddp", "zero1", "zero2", "fsdp"]

PLACEMENTS: dict[str, Placement] = {
    "ddp": DDP,
    "zero1": ZERO_1,
    "zero2": ZERO_2,
    "fsdp": ZERO_3,
}
"""Name of a placement -> placement."""


def _no_report(abstract_params: PyTree = None) -> Report:
    raise NotImplementedError("the report is that of a built strategy: opt.config.report().")


class LayoutOptions(NamedTuple):
    """Options that say where every leaf of the train state lives."""

    rules: Rules = ()
    min_shard_elements: int = 1
    opt_state_layout: OptStateLayout = "within"

    @property
    def frozen(self) -> tuple[str | re.Pattern[str], ...]:
        """Regexes of the key paths of parameters that are not trained."""
        return patterns_of(self.rules, "frozen")

    @property
    def expert_leaves(self) -> tuple[str | re.Pattern[str], ...]:
        """Regexes of the key paths of expert weights."""
        return patterns_of(self.rules, "experts")


class LossOptions(NamedTuple):
    """Options that say how the loss runs.

    Attributes:
      loss_fn: the loss, or a `BlockModel`.
      separable: whether the user states that the loss is a mean over rows, so nothing is proved.
      tile_rows: the rows of a tile of `so.reducers.exact(tile_rows=...)`; None without tiles.
    """

    loss_fn: LossFn
    evaluate_fn: LossFn | None = None
    micro_batches: int = 1
    view: View = "auto"
    separable: bool = False
    tile_rows: int | None = None


class WireOptions(NamedTuple):
    """Options that say how parameters and gradients travel between devices.

    Attributes:
      scatter_dtype: the dtype of an exact `reducer`, for placements that reduce-scatter gradients.
    """

    gather_dtype: jax.typing.DTypeLike | None = None
    scatter_dtype: jax.typing.DTypeLike | None = None
    reducer: Reducer | None = None


class UpdateOptions(NamedTuple):
    """Options that say how an update runs.

    Attributes:
      tx: the optax transformation.
    """

    tx: optax.GradientTransformation
    offload: Sequence[str] = ()


RECORDS = {
    "layout": LayoutOptions,
    "loss": LossOptions,
    "wire": WireOptions,
    "update": UpdateOptions,
}
RECORD_OF = {field: name for name, record in RECORDS.items() for field in record._fields}
"""Field of a record of options -> the name of the record in `StrategyConfig`."""


class StrategyConfig(NamedTuple):
    """The checked arguments of a strategy. A function takes the records that it reads.

    A field that is not described is the option of the same name, which `shardopt.config._options`
    describes.

    Attributes:
      strategy: the function that the user called, for messages.
      mesh: the user's mesh. After the check: the same devices with our axis names, all Auto;
        `user_mesh` is the user's.
      placement: which of parameters, gradients and optimizer state are sharded over data.
      loss: how the loss runs.
      update: how an update runs.
      layout: where every leaf lives.
      wire: how parameters and gradients travel.
      schedule: of a pipeline; None if every device runs its micro-batches one after another.
      local_updates: how replicas that train by themselves synchronize; None in a synchronous
        strategy. Each replica then has its own parameters and optimizer state, stacked along a
        first dim.
      sync_gradients: whether gradients are averaged over replicas that have their own parameters,
        as in a warm-up.
      axis_names: the names of the axes of the user's mesh; None for the names of `so.make_mesh`.
      user_mesh: where state, batch and metrics live; None until checked.
      sums: whether the gradients of a step come with the sums of each device's own gradient, see
        `diagnose._verified`.
      filled: what fills the slots of the step; None until `build`.
      report: `report(abstract_params=None)`, the placement of every leaf, by default for the last
        parameters.
    """

    strategy: str
    mesh: Mesh
    placement: Placement
    loss: LossOptions
    update: UpdateOptions
    layout: LayoutOptions = LayoutOptions()
    wire: WireOptions = WireOptions()
    schedule: Schedule | None = None
    local_updates: SyncConfig | None = None
    sync_gradients: bool = False
    batch_dims: BatchDims = ()
    compiler_options: CompilerOptions | None = None
    check: ProgramCheck | None = None
    axis_names: Axes | None = None
    user_mesh: UserMesh | None = None
    sums: bool = False
    filled: StepSlots | None = None
    report: Callable[..., Report] = _no_report

    def replace(self, **fields: Any) -> StrategyConfig:
        """Return the config with new values of fields, each in the record that has it."""
        config = self
        for field, value in fields.items():
            record = RECORD_OF.get(field)
            changed = (
                {field: value}
                if record is None
                else {record: getattr(config, record)._replace(**{field: value})}
            )
            config = config._replace(**changed)
        return config

    @property
    def mesh_shape(self) -> dict[str, int]:
        """Mesh axis name -> size."""
        return dict(self.mesh.shape)

    @property
    def home(self) -> UserMesh:
        """The user's mesh, on which state, batch and metrics live."""
        assert self.user_mesh is not None
        return self.user_mesh

    @property
    def slots(self) -> StepSlots:
        """What fills the slots of the step."""
        assert self.filled is not None
        return self.filled

    @property
    def differentiate(self) -> Differentiate:
        """The filling of the first slot in the view of the loss."""
        return self.slots.differentiate[self.loss.view]

    @property
    def has_global_view(self) -> bool:
        """Whether the loss may run on the whole batch: a pipeline and a reducer need each device's
        gradient.
        """
        wire = self.wire
        needs = self.schedule, wire.reducer, wire.scatter_dtype, self.loss.tile_rows
        is_possible = all(option is None for option in needs)
        return is_possible and self.loss.view != "per_device"

    @property
    def gathers(self) -> bool:
        """Whether the differentiated function gathers parameters: if they are sharded, or cast
        before the wire.
        """
        return self.placement.params or self.wire.gather_dtype is not None

    @property
    def per_replica(self) -> bool:
        """Whether each replica has its own parameters."""
        return self.local_updates is not None

    @property
    def of_evaluation(self) -> StrategyConfig:
        """The config of evaluation: with `evaluate_fn` as its loss, and with parameters that all
        replicas share.
        """
        loss_fn = self.loss.loss_fn if self.loss.evaluate_fn is None else self.loss.evaluate_fn
        return self.replace(loss_fn=loss_fn, local_updates=None)

    @property
    def axes(self) -> AxisTable:
        """The axis table of this mesh: the axes of rows and positions, and the axes that gradients
        are summed over.
        """
        return axes_of(
            self.mesh,
            pipelined=self.schedule is not None,
            per_replica=self.per_replica,
            sync_gradients=self.sync_gradients,
        )

    @property
    def num_pieces(self) -> int:
        """The number of pieces of the batch of one gradient: the devices that share the batch times
        micro-batches.
        """
        return self.axes.num_shares * self.loss.micro_batches

    @property
    def num_row_pieces(self) -> int:
        """The number of pieces of its rows: the devices along the axes of rows times micro-batches."""
        return self.axes.num_row_shares * self.loss.micro_batches

    def pieces_of(self, rows: int) -> tuple[int, int]:
        """Return the number of equal pieces that rows are cut into, and the rows of a piece.

        Fewer rows than a piece has may be left.
        """
        if self.loss.tile_rows is not None:
            return rows // self.loss.tile_rows, self.loss.tile_rows
        return self.num_row_pieces, rows // self.num_row_pieces


def default_min_shard_elements(platform: str) -> int:
    """Return the default of `min_shard_elements`.

    On TPU a norm of 4096 to 8192 numbers stays replicated. Its gather waits for the links that the
    gathers of matrices fill: docs/notes/maxtext.md has the figures.
    """
    return 2**14 if platform == "tpu" else 2**10


def configure(
    strategy: str,
    tx: optax.GradientTransformation,
    mesh: Mesh | Axes,
    loss_fn: LossFn,
    placement: Placement,
    options: Mapping[str, Any],
) -> StrategyConfig:
    """Return the config of a strategy from the options that its user passed.

    Raises:
      TypeError: if an option is of the wrong kind.
      ValueError: if an option has a wrong value.
    """
    fields: dict[str, Any] = {}
    if isinstance(mesh, Axes):
        fields["axis_names"] = mesh
        mesh = mesh.mesh
    with calling(strategy):
        for name, value in options.items():
            fields |= OPTIONS[name].read(name, value)
    if "min_shard_elements" in fields and fields["min_shard_elements"] is None:
        # no Mesh is refused below
        platform = mesh.devices.flat[0].platform if isinstance(mesh, Mesh) else ""
        fields["min_shard_elements"] = default_min_shard_elements(platform)
    reducer = fields.get("reducer")
    if reducer is not None and reducer.tile_rows is not None:
        # a tile is a micro-batch
        tile_rows = reducer.tile_rows
        fields |= {"reducer": None, "tile_rows": tile_rows, "micro_batches": tile_rows}
    elif reducer is not None and reducer.is_exact and placement.opt_state:
        fields |= {"reducer": None, "scatter_dtype": reducer.dtype}
    return StrategyConfig(
        strategy, mesh, placement, LossOptions(loss_fn), UpdateOptions(tx)
    ).replace(**fields)
