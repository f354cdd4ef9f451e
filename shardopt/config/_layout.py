"""The placement of every leaf of a train state, computed once per parameter structure."""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar, get_args

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardopt.config._config import StrategyConfig
from shardopt.config._slots import Reduce
from shardopt.config._transformation import refuse_unsupported
from shardopt.config._update_trace import trace_of_update
from shardopt.core import (
    PyTree,
    TrainState,
    TreeDef,
    calling,
    is_integer,
    leaves_with_paths,
    plural,
    type_error,
    value_error,
)
from shardopt.core._block_model import BLOCKS, as_block_model
from shardopt.core._rounding import Precision, Rounding
from shardopt.partition import (
    COLUMNS,
    LeafPlan,
    LeafPlanOptions,
    owned_by_blocks,
    plan_leaves,
    shard_axes,
    state_specs,
)
from shardopt.partition._counts import Counts, is_even
from shardopt.partition._rules import matches
from shardopt.trace._matrix_work import MIN_ELEMENTS, leaves_of_matrix_work

_Leaf = TypeVar("_Leaf")


class Layout(NamedTuple):
    """The placement of one parameter structure.

    Attributes:
      treedef: the structure of the parameters.
      plans: the `LeafPlan` of each leaf, in the order of the structure.
      abstract: the train state as shapes and dtypes.
      specs: the train state as `PartitionSpec`.
      reduce: the filling of the slot `reduce` for these leaves.
      tables: key paths of the leaves that are sharded by columns for `so.nn.embedding`, and not
        gathered.
      counts: [V], the number of blocks of each virtual stage of a pipeline; () without a pipeline.
    """

    treedef: TreeDef
    plans: tuple[LeafPlan, ...]
    abstract: TrainState
    specs: TrainState
    reduce: Reduce
    tables: frozenset[str] = frozenset()
    counts: Counts = ()

    @property
    def trained(self) -> tuple[LeafPlan, ...]:
        """The plans of the trainable leaves."""
        return tuple(plan for plan in self.plans if plan.trainable)

    def trainable(self, params: PyTree) -> PyTree:
        """Return the parameters with None in place of the frozen leaves."""
        return _trainable(self.treedef, self.plans, params)

    def trained_leaves(self, leaves: Sequence[_Leaf]) -> list[_Leaf]:
        """Return the trainable ones of a list of all leaves."""
        return [leaf for leaf, plan in zip(leaves, self.plans, strict=True) if plan.trainable]

    def merge(self, leaves: Sequence[_Leaf | None], trained: Sequence[_Leaf]) -> PyTree:
        """Return `leaves` as a parameter tree, with `trained` in place of the trainable leaves."""
        next_trained = iter(trained)
        merged = [
            next(next_trained) if plan.trainable else leaf
            for leaf, plan in zip(leaves, self.plans, strict=True)
        ]
        return self.treedef.unflatten(merged)


def make_layout(config: StrategyConfig, abstract_params: PyTree) -> Layout:
    """Place a parameter structure by the config; touch no device."""
    with calling(config.strategy):
        is_block_model = as_block_model(config.loss.loss_fn) is not None
        if is_block_model:
            _check_blocks(abstract_params)
            _check_rounded(config, abstract_params)
        counts = config.slots.counts(config, abstract_params)
        if counts:
            _check_counts(config, counts)
        tables = _tables(config, abstract_params)
        options = LeafPlanOptions(
            rules=config.layout.rules,
            stacked=is_block_model,
            min_shard_elements=config.layout.min_shard_elements,
            is_trainable=lambda path: not matches(config.layout.frozen, path),
            pipelined=config.schedule is not None,
            even=not counts or is_even(counts),
            tables=tables,
        )
        plans = plan_leaves(abstract_params, config.mesh, options)
        treedef = jax.tree.structure(abstract_params)
        flat = tuple(jax.tree.leaves(plans))
        _check_trainable(flat)
    trainable = _trainable(treedef, flat, abstract_params)
    opt_state = jax.eval_shape(config.update.tx.init, trainable)
    refuse_unsupported(config.strategy, opt_state)
    if config.layout.opt_state_layout == "matrices":
        flat = _owned_by_matrices(config, flat, trainable)
    trained_paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(trainable)]
    trained_plans = [plan for plan in flat if plan.trainable]
    opt_specs = state_specs(
        opt_state,
        list(zip(trained_paths, trained_plans, strict=True)),
        sharded=config.placement.opt_state,
        axes=shard_axes(config.mesh.shape),
        sizes=config.mesh_shape,
        min_shard_elements=config.layout.min_shard_elements,
    )
    key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    step = jax.ShapeDtypeStruct((), jnp.int32)
    param_specs = treedef.unflatten([plan.spec(sharded=config.placement.params) for plan in flat])
    reduce = config.slots.reduce(config, trained_plans)
    opt_state = reduce.join(opt_state, jax.eval_shape(reduce.init))
    opt_specs = reduce.join(opt_specs, reduce.specs())
    return Layout(
        treedef,
        flat,
        abstract=TrainState(step, abstract_params, opt_state, key),
        specs=TrainState(PartitionSpec(), param_specs, opt_specs, PartitionSpec()),
        reduce=reduce,
        tables=frozenset(plan.path for plan in flat if plan.path in tables and plan.dim == COLUMNS),
        counts=counts,
    )


def _owned_by_matrices(
    config: StrategyConfig, plans: tuple[LeafPlan, ...], trainable: PyTree
) -> tuple[LeafPlan, ...]:
    """Return the plans, with whole matrices of stacked leaves at owners where the optimizer
    multiplies or decomposes them.
    """
    trace = trace_of_update(config.update.tx, trainable, jax.ShapeDtypeStruct((), jnp.float32))
    trained = [i for i, plan in enumerate(plans) if plan.trainable]
    has_work = leaves_of_matrix_work(
        trace, len(trained), max(MIN_ELEMENTS, config.layout.min_shard_elements)
    )
    owned = {i for i, works in zip(trained, has_work, strict=True) if works}
    scattered = not config.placement.params
    return tuple(
        owned_by_blocks(plan, config.mesh_shape, scattered=scattered) if i in owned else plan
        for i, plan in enumerate(plans)
    )


def shardings(mesh: Mesh, specs: PyTree) -> PyTree:
    """Return a tree of `NamedSharding` from one of `PartitionSpec`."""
    sharding_of = functools.cache(functools.partial(NamedSharding, mesh))
    return jax.tree.map(sharding_of, specs)


def _trainable(treedef: TreeDef, plans: Sequence[LeafPlan], params: PyTree) -> PyTree:
    leaves = zip(treedef.flatten_up_to(params), plans, strict=True)
    return treedef.unflatten([leaf if plan.trainable else None for leaf, plan in leaves])


def _check_blocks(params: PyTree) -> None:
    fix = (
        'pass {"blocks": leaves stacked [L, ...], **outer}; jax.tree.map(lambda *x: jnp.stack(x),'
        " *blocks) stacks."
    )
    if not isinstance(params, Mapping) or BLOCKS not in params:
        raise value_error("the parameters of a BlockModel must be a dict with 'blocks'.", fix=fix)
    leaves = leaves_with_paths(params[BLOCKS])
    counts = {leaf.shape[:1] for _, leaf in leaves}
    if len(counts) != 1 or counts == {()} or isinstance(params[BLOCKS], list | tuple):
        problem = "the leaves of 'blocks' must be stacked along a first dim of one length."
        shapes = [f"blocks/{path}: shape {leaf.shape}" for path, leaf in leaves]
        raise value_error(problem, shapes, fix)


def _check_rounded(config: StrategyConfig, params: PyTree) -> None:
    """Refuse a `BlockModel.rounded` that does not fit the blocks.

    Raises:
      TypeError: if it is not a mapping.
      ValueError: if a name is not a leaf of the blocks, or its rounding does not fit the leaf.
    """
    leaves = dict(leaves_with_paths(params[BLOCKS]))
    loss_fns = (config.loss.loss_fn, config.loss.evaluate_fn)
    for model in filter(None, map(as_block_model, loss_fns)):
        if not isinstance(model.rounded, Mapping):
            problem = (
                "BlockModel.rounded must be a dict of key path -> so.nn.Rounding, got"
                f" {model.rounded!r:.80}."
            )
            raise type_error(problem, fix="leave it out, or name the weights.")
        problems = [
            f"{path}: {problem}"
            for path, rounding in model.rounded.items()
            if (problem := _rounding_problem(leaves.get(path), rounding))
        ]
        if problems:
            fix = (
                f"the leaves of a block are {', '.join(list(leaves)[:8])}; describe the product"
                " that reads each of them."
            )
            raise value_error("BlockModel.rounded does not fit the blocks.", problems, fix)


def _rounding_problem(leaf: jax.ShapeDtypeStruct | None, rounding: object) -> str:
    """Return why a stacked leaf cannot be rounded so; empty if it can."""
    if leaf is None:
        return "not a leaf of a block"
    if not isinstance(rounding, Rounding):
        return f"{rounding!r} is not a so.nn.Rounding"
    shape = leaf.shape[1:]
    summed = rounding.summed
    if rounding.precision not in get_args(Precision):
        return f"unknown precision {rounding.precision!r}"
    for dtype in (leaf.dtype, rounding.dtype):
        if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
            return f"{jnp.dtype(dtype)} is not floating"
    if not is_integer(summed) or not 0 < summed < len(shape):
        return f"shape {shape} has no product that sums over its first {summed!r} dims"
    return ""


def _tables(config: StrategyConfig, params: PyTree) -> tuple[str, ...]:
    """Return the leaves that this strategy leaves sharded by columns.

    Raises:
      ValueError: if `BlockModel.tables` names a leaf that is not an outer parameter [V, D].
    """
    model = as_block_model(config.loss.loss_fn)
    if model is None or not model.tables:
        return ()
    matrix_paths = [
        path
        for path, leaf in leaves_with_paths(params)
        if path.split("/")[0] != BLOCKS and len(leaf.shape) == 2
    ]
    wrong = [repr(path) for path in model.tables if path not in matrix_paths]
    if wrong:
        fix = (
            f"name some of {', '.join(matrix_paths[:8])}." if matrix_paths else "leave tables out."
        )
        raise value_error("BlockModel.tables must name outer parameters [V, D].", wrong, fix)
    can_shard = (
        config.placement.params and config.loss.view == "per_device" and config.schedule is None
    )
    return model.tables if can_shard and shard_axes(config.mesh.shape).size > 1 else ()


def _check_counts(config: StrategyConfig, counts: Counts) -> None:
    """Refuse unequal stages if matrices live on owners."""
    if config.layout.opt_state_layout == "matrices" and not is_even(counts):
        problem = (
            "opt_state='matrices' takes stages of equally many blocks, and these have"
            f" {', '.join(map(str, counts))}."
        )
        size = len(counts)
        fix = f"use a multiple of {size} blocks in equal parts, or opt_state='within'."
        raise value_error(problem, fix=fix)


def _check_trainable(plans: tuple[LeafPlan, ...]) -> None:
    if not any(plan.trainable for plan in plans):
        problem = f"nothing is trainable among {plural(len(plans), 'parameter leaf')}."
        raise value_error(problem, fix="pass floating leaves that no rule freezes.")
