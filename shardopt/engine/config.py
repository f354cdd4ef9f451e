"""The checked arguments of a strategy: the whole engine is driven by one config."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from shardopt.core.block_model import LossFn, as_block_model
from shardopt.core.block_remat import INPUT, Named, Remat, read_remat
from shardopt.core.errors import format_error
from shardopt.core.types import PyTree, Rules
from shardopt.engine.axes import AxisTable, axes_of
from shardopt.engine.compiler_options import CompilerOptions, compiler_options
from shardopt.engine.options import OPTIONS, BatchDims, OptStateLayout, SequenceDims, View
from shardopt.engine.transformation import closed_over, functions_within
from shardopt.engine.user_mesh import Axes, UserMesh, read_mesh
from shardopt.partition import Report
from shardopt.partition.rules import check_rules
from shardopt.pipeline import Schedule
from shardopt.reducers import Reducer


class ReportFn(Protocol):
    """`report(abstract_params=None)`."""

    def __call__(self, abstract_params: PyTree = None) -> Report:
        """Return the placement of every leaf, by default for the last parameters."""
        ...


class Placement(NamedTuple):
    """The placement table: whether parameters, gradients and optimizer state are sharded over data, or replicated.

    The collectives of a strategy follow from these three switches:

    - `params`: parameters are gathered inside the differentiated function, so the backward pass reduce-scatters.
    - `grads` but not `params`: each micro-batch's gradient is reduce-scattered.
    - `opt_state` but not `grads`: the accumulated gradient is reduce-scattered once; after the update the
      parameters are gathered.
    - none of them: the accumulated gradient is all-reduced once.

    A replica axis holds copies; gradients (or their shards) are summed over it once a step.
    """

    params: bool
    grads: bool
    opt_state: bool


DDP = Placement(params=False, grads=False, opt_state=False)
ZERO_1 = Placement(params=False, grads=False, opt_state=True)
ZERO_2 = Placement(params=False, grads=True, opt_state=True)
ZERO_3 = Placement(params=True, grads=True, opt_state=True)
"""Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020."""

STAGES = {1: ZERO_1, 2: ZERO_2, 3: ZERO_3}

PlacementName = Literal["ddp", "zero1", "zero2", "zero3", "fsdp"]

PLACEMENTS: dict[str, Placement] = {
    "ddp": DDP,
    "zero1": ZERO_1,
    "zero2": ZERO_2,
    "zero3": ZERO_3,
    "fsdp": ZERO_3,
}
"""Placement names of `hybrid` -> placement."""


class SyncConfig(NamedTuple):
    """How replicas that train by themselves synchronize; see `diloco` for the meaning of each field.

    Attributes:
      outer: the outer optimizer.
      sync_every: H, the steps between two synchronizations of the same fragment.
      warmup_steps: for so many first steps, gradients are averaged over replicas.
      fragments: P, the number of parts of the model that are synchronized at different steps.
      delay: steps between sending a fragment and applying it.
      mix: the share of its own parameters that a replica keeps, from 0 to 1.
      reducer: how outer gradients cross the wire; None for an exact mean.
    """

    outer: optax.GradientTransformation
    sync_every: int
    warmup_steps: int = 0
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0
    reducer: Reducer | None = None

    @property
    def stride(self) -> int:
        """The number of steps between the synchronizations of two consecutive fragments."""
        return self.sync_every // self.fragments


def _no_report(abstract_params: PyTree = None) -> Report:
    raise NotImplementedError("the report is that of a built strategy: opt.config.report().")


class StrategyConfig(NamedTuple):
    """The checked arguments of a strategy.

    A field that is not listed here is the option of the same name, which `shardopt.engine.options` describes.

    Attributes:
      strategy: the function that the user called, for messages.
      tx: the optax transformation.
      mesh: the user's mesh. After the check: the same devices with our axis names, all Auto; `user_mesh` is the user's.
      loss_fn: the loss, or a `BlockModel`.
      placement: which of parameters, gradients and optimizer state are sharded over data.
      schedule: of a pipeline; None if every device runs its micro-batches one after another.
      blocks_per_stage: [V], the number of blocks of each virtual stage of a pipeline; None to divide them evenly.
      remat: whether a pipeline keeps only the input of each chunk.
      regather: whether a pipeline gathers a block's weights in every pass, rather than once a step.
      local_updates: how replicas that train by themselves synchronize; None in a synchronous strategy. Each replica then
        has its own parameters and optimizer state, stacked along a first dim.
      sync_gradients: whether gradients are averaged over replicas that have their own parameters, as in a warm-up.
      axis_names: the option `axes`.
      user_mesh: where state, batch and metrics live; None until checked.
      report: `report(abstract_params=None)`, the placement of every leaf, by default for the last parameters.
    """

    strategy: str
    tx: optax.GradientTransformation
    mesh: Mesh
    loss_fn: LossFn
    placement: Placement
    micro_batches: int = 1
    rules: Rules = ()
    min_shard_elements: int = 1
    gather_dtype: jax.typing.DTypeLike | None = None
    scatter_dtype: jax.typing.DTypeLike | None = None
    frozen: Sequence[str] = ()
    schedule: Schedule | None = None
    blocks_per_stage: tuple[int, ...] | None = None
    remat: bool = False
    regather: bool = True
    reducer: Reducer | None = None
    local_updates: SyncConfig | None = None
    sync_gradients: bool = False
    evaluate_fn: LossFn | None = None
    compiler_options: CompilerOptions | None = None
    view: View = "auto"
    separable: bool | None = None
    axis_names: Axes | None = None
    batch_dims: BatchDims = ()
    sequence_dims: SequenceDims = ()
    expert_leaves: Sequence[str] = ()
    opt_state_layout: OptStateLayout = "within"
    offload: Sequence[str] = ()
    user_mesh: UserMesh | None = None
    report: ReportFn = _no_report

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
    def has_global_view(self) -> bool:
        """Whether the loss may run on the whole batch: a pipeline, a reducer and `scatter_dtype` need each device's gradient."""
        is_possible = self.schedule is None and self.reducer is None and self.scatter_dtype is None
        return is_possible and self.view != "per_device"

    @property
    def gathers_once(self) -> bool:
        """Whether a pipeline gathers the weights of its blocks, and scatters their gradients, once a step."""
        return self.placement.params and not self.regather

    @property
    def per_replica(self) -> bool:
        """Whether each replica has its own parameters."""
        return self.local_updates is not None

    @property
    def of_evaluation(self) -> "StrategyConfig":
        """The config of evaluation: with `evaluate_fn` as its loss, and with parameters that all replicas share."""
        loss_fn = self.loss_fn if self.evaluate_fn is None else self.evaluate_fn
        return self._replace(loss_fn=loss_fn, local_updates=None)

    @property
    def axes(self) -> AxisTable:
        """The axis table of this mesh: the axes of rows and positions, and the axes that gradients are summed over."""
        return axes_of(
            self.mesh,
            pipelined=self.schedule is not None,
            per_replica=self.per_replica,
            sync_gradients=self.sync_gradients,
        )

    def wire_dtype(self, dtype: np.dtype) -> jax.typing.DTypeLike | None:
        """Return the dtype that the gradient of a leaf is cast to before it is reduce-scattered; None for no cast."""
        return self.scatter_dtype if jnp.issubdtype(dtype, jnp.floating) else None

    @property
    def num_pieces(self) -> int:
        """The number of pieces of the batch of one gradient: the devices that share the batch times micro-batches."""
        return self.axes.num_shares * self.micro_batches

    @property
    def num_row_pieces(self) -> int:
        """The number of pieces of its rows: the devices along the axes of rows times micro-batches."""
        return self.axes.num_row_shares * self.micro_batches


def configure(
    strategy: str,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    loss_fn: LossFn,
    placement: Placement,
    options: Mapping[str, Any],
) -> StrategyConfig:
    """Return the config of a strategy from the options that its user passed."""
    fields = {OPTIONS[name].field or name: value for name, value in options.items()}
    return StrategyConfig(strategy, tx, mesh, loss_fn, placement, **fields)


def check_config(config: StrategyConfig) -> StrategyConfig:
    """Return the config with arguments in the form that the engine uses and a mesh with Auto axes, or refuse it.

    Raises:
      TypeError: if the optimizer, mesh, loss, rules, or a number is of the wrong kind.
      ValueError: if a number is out of range, the mesh lacks data or has an idle axis, or a rule cannot be used.
    """
    caller = config.strategy
    check_optimizer(caller, config.tx)
    mesh, user_mesh = config.mesh, config.user_mesh
    if user_mesh is None:  # a combinator passes a config that is checked already
        mesh, user_mesh = read_mesh(caller, mesh, config.axis_names, pipelined=config.schedule is not None)
    model = as_block_model(config.loss_fn)
    if model is None and not callable(config.loss_fn):
        problem = "loss_fn must be a function (params, batch) -> loss, or a BlockModel"
        raise TypeError(f"{caller}: {problem}, got {type(config.loss_fn).__name__}.")
    check_evaluate_fn(caller, config)
    for name, option in OPTIONS.items():
        field = option.field or name
        config = config._replace(**{field: option.check(caller, name, getattr(config, field))})
    config = config._replace(mesh=mesh, user_mesh=user_mesh, rules=user_mesh.rules(config.rules))
    if config.compiler_options is None:
        config = config._replace(compiler_options=compiler_options(mesh))
    check_rules(config.rules, caller=caller)
    _check_view(caller, config)
    _check_opt_state_layout(caller, config)
    _check_offload(caller, config)
    _check_reducer(caller, config)
    _check_scatter_dtype(caller, config)
    if model is not None:
        _check_remat(caller, config, model.remat)
    return config


def check_optimizer(caller: str, tx: optax.GradientTransformation) -> None:
    """Refuse an object that is not an optax gradient transformation.

    Raises:
      TypeError: if `tx` has no callable `init` and `update`.
    """
    if isinstance(sharded := getattr(tx, "config", None), StrategyConfig):
        problem = f"tx must be an optax.GradientTransformation, but it is sharded already, by so.{sharded.strategy}."
        raise TypeError(format_error(caller, problem, fix="pass the optax optimizer itself, opt.wrapped."))
    if isinstance(tx, type) or not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        raise TypeError(
            f"{caller}: tx must be an optax.GradientTransformation, got {type(tx).__name__}.\n"
            "Fix: pass an optimizer such as optax.adamw(1e-3), called, not the function itself."
        )
    functions = functions_within(tx)
    for f in functions:
        in_optax = f.__module__.startswith("optax.")
        configs = [getattr(value, "config", None) for value in closed_over(f)] if in_optax else []
        if sharded := next((config for config in configs if isinstance(config, StrategyConfig)), None):
            problem = f"inside of tx is an optimizer that is sharded already, by so.{sharded.strategy}."
            raise TypeError(format_error(caller, problem, fix="put the optax optimizer itself there, opt.wrapped."))
    if any(f.__module__ == "optax._src.lookahead" for f in functions):
        problem = "optax.lookahead steps two copies of the parameters, and there is but one here."
        fix = "use so.local_sgd or so.diloco, whose outer step is that of lookahead, or the fast optimizer alone."
        raise ValueError(format_error(caller, problem, fix=fix))


def check_evaluate_fn(caller: str, config: StrategyConfig) -> None:
    """Refuse a loss of evaluation that cannot run on the parameters where they are placed.

    Raises:
      TypeError: if it is not a function or `BlockModel`. If stages of a pipeline run a `BlockModel`, and it is not one. If it
        is a `BlockModel`, and the loss of training is not.
    """
    if config.evaluate_fn is None:
        return
    trains_blocks, has_blocks = (as_block_model(fn) is not None for fn in (config.loss_fn, config.evaluate_fn))
    if not has_blocks and not callable(config.evaluate_fn):
        problem = (
            f"evaluate_fn must be a function (params, batch) -> loss, or a BlockModel, got {config.evaluate_fn!r:.80}."
        )
        raise TypeError(
            format_error(caller, problem, fix="pass evaluate_fn=loss, or leave it out to evaluate loss_fn.")
        )
    if config.schedule is not None and not has_blocks:
        problem = "evaluate_fn must be a BlockModel, because the stages of the pipeline hold its blocks."
        raise TypeError(format_error(caller, problem, fix="pass model._replace(loss=...), or so.BlockModel(...)."))
    if has_blocks and not trains_blocks:
        problem = "evaluate_fn is a BlockModel, but loss_fn is not."
        fix = "train on the BlockModel too, or pass lambda params, batch: model.loss_fn(params, batch)."
        raise TypeError(format_error(caller, problem, fix=fix))


def _check_view(caller: str, config: StrategyConfig) -> None:
    if config.view == "global" and config.schedule is not None:
        problem = (
            "a pipeline computes the loss one micro-batch after another, and view='global' that of the whole batch."
        )
        fix = "make the mesh with pipeline=1, or use view='per_device'."
        raise ValueError(format_error(caller, problem, fix=fix))
    if config.view == "global" and config.reducer is not None:
        problem = (
            "a reducer takes each device's own gradient, and with view='global' there is only that of the whole batch."
        )
        raise ValueError(format_error(caller, problem, fix="leave reducer out, or use view='per_device'."))


def _check_opt_state_layout(caller: str, config: StrategyConfig) -> None:
    if config.opt_state_layout == "matrices" and not config.placement.opt_state:
        problem = "opt_state_layout='matrices' says how optimizer state is sharded, and this placement replicates it."
        raise ValueError(
            format_error(caller, problem, fix="use a placement that shards it (zero, fsdp), or leave it out.")
        )


def _check_offload(caller: str, config: StrategyConfig) -> None:
    if config.offload and config.per_replica:
        problem = "replicas that train apart keep their parameters in the optimizer state, which every step needs."
        raise ValueError(format_error(caller, problem, fix="leave offload out of the strategy inside."))


def _check_reducer(caller: str, config: StrategyConfig) -> None:
    if config.reducer is None:
        return
    if config.mesh.shape.get("expert", 1) > 1:
        problem = (
            "a reducer takes the mean of all leaves over the same devices, and those of experts differ along expert."
        )
        raise ValueError(format_error(caller, problem, fix="leave reducer out, or make the mesh with expert=1."))
    if config.placement.grads:
        problem = "a reducer takes the mean of unsharded gradients, and this placement shards them."
        raise ValueError(format_error(caller, problem, fix="use placement='ddp' or 'zero1', or leave reducer out."))


def _check_remat(caller: str, config: StrategyConfig, remat: Remat) -> None:
    parsed_remat = read_remat(caller, remat)
    if config.schedule is not None and isinstance(parsed_remat, Named) and parsed_remat.offload:
        problem = f"BlockModel.remat={remat!r} keeps values in host memory, and a pipeline keeps them in buffers of the device."
        remedy = "'full'" if INPUT in parsed_remat.names else f"'save:{','.join(parsed_remat.names)}' or 'full'"
        fix = f"use {remedy}, or a mesh with pipeline=1."
        raise ValueError(format_error(caller, problem, fix=fix))


def _check_scatter_dtype(caller: str, config: StrategyConfig) -> None:
    if config.scatter_dtype is None:
        return
    if not config.placement.opt_state:
        problem = "scatter_dtype is for placements that reduce-scatter gradients, and this one all-reduces them."
        fix = f"use reducer=so.reducers.exact(jnp.{jnp.dtype(config.scatter_dtype).name}), or a placement that shards."
        raise ValueError(format_error(caller, problem, fix=fix))
    if config.reducer is not None:
        problem = "scatter_dtype and reducer both say how gradients cross the wire."
        raise ValueError(format_error(caller, problem, fix="leave one of them out."))
    if config.view == "global":
        problem = "with view='global' the partitioner sums gradients, in the dtype of the products that make them."
        raise ValueError(format_error(caller, problem, fix="leave scatter_dtype out, or use view='per_device'."))
