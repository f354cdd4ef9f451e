"""What a ring-1 strategy was asked for, checked before anything else happens."""

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh

from shardopt.core.arguments import check_count
from shardopt.core.block_model import as_block_model
from shardopt.core.errors import format_error
from shardopt.core.types import LossFn, Rules
from shardopt.engine.optimizer import check_optimizer
from shardopt.mesh import AXES, data_axes
from shardopt.partition.rules import check_rules
from shardopt.pipeline import Schedule
from shardopt.reducers import Reducer
from shardopt.reducers.reducer import check_reducer

# The placement table: what each strategy splits over the data axis.


class Placement(NamedTuple):
    """Whether parameters, gradients and optimizer state are split over data (True) or whole (False).

    Everything that a ring-1 strategy does follows from these three switches:

    - `params`: they are gathered inside the differentiated function, so the backward pass reduce-scatters.
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

PLACEMENTS = {"ddp": DDP, "zero1": ZERO_1, "zero2": ZERO_2, "zero3": ZERO_3, "fsdp": ZERO_3}
"""By the names that `hybrid` takes."""


class StrategyConfig(NamedTuple):
    """The checked arguments of a strategy; see `fsdp` and `hybrid` for what each means.

    Without a schedule micro-batches run one after another on every device. With `apart` nothing is averaged over the
    replica axis: parameters and optimizer state have a first dim, one row a replica. With `warm` as well gradients are,
    and the rows stay equal.
    """

    who: str
    tx: optax.GradientTransformation
    mesh: Mesh
    loss_fn: LossFn
    placement: Placement
    micro_batches: int = 1
    rules: Rules = ()
    min_shard_elements: int = 1
    gather_dtype: Any = None
    frozen: Sequence[str] = ()
    schedule: Schedule | None = None
    remat: bool = False
    reducer: Reducer | None = None
    apart: bool = False
    warm: bool = False

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that gradients are averaged over: data, and replica unless replicas train apart."""
        return ("data",) if self.apart and not self.warm else data_axes(self.mesh)

    @property
    def rows(self) -> tuple[str, ...]:
        """What comes first in the specs of values of which each replica has its own: ("replica",), or nothing."""
        return ("replica",) if self.apart else ()


def check_config(recipe: StrategyConfig) -> StrategyConfig:
    """Return the recipe, its mesh with Auto axes, or refuse it.

    Raises:
      TypeError: if the optimizer, mesh, loss, rules, or a number is of the wrong kind.
      ValueError: if a number is out of range, the mesh lacks data or has an idle axis, or a rule cannot be used.
    """
    who = recipe.who
    check_optimizer(who, recipe.tx)
    mesh = check_mesh(who, recipe.mesh, pipelined=recipe.schedule is not None)
    if as_block_model(recipe.loss_fn) is None and not callable(recipe.loss_fn):
        what = "loss_fn must be a function (params, batch) -> loss, or a BlockModel"
        raise TypeError(f"{who}: {what}, got {type(recipe.loss_fn).__name__}.")
    check_count(who, "micro_batches", recipe.micro_batches, least=1)
    check_count(who, "min_shard_elements", recipe.min_shard_elements, least=1)
    # Stored as checked: an iterator would be empty by the time it is used.
    if recipe.reducer is not None:
        _check_reducer(who, recipe)
    rules = recipe.rules if callable(recipe.rules) else _as_tuple(recipe.rules)
    check_rules(rules, who=who)
    frozen = _check_frozen(who, recipe.frozen)
    _check_gather_dtype(who, recipe.gather_dtype)
    model = as_block_model(recipe.loss_fn)
    if model is not None and not (model.remat in (None, "full") or callable(model.remat)):
        what = f"BlockModel.remat must be None, 'full' or a jax.checkpoint policy, got {model.remat!r}."
        raise ValueError(format_error(who, what, fix="policies are in jax.checkpoint_policies."))
    return recipe._replace(mesh=mesh, rules=rules, frozen=frozen)


def _check_reducer(who: str, recipe: StrategyConfig) -> None:
    check_reducer(who, recipe.reducer)
    if recipe.placement.grads:
        what = "a reducer takes the mean of whole gradients, and this placement splits them."
        raise ValueError(format_error(who, what, fix="use placement='ddp' or 'zero1', or leave reducer out."))


def _as_tuple(rules: Any) -> Any:
    return rules if isinstance(rules, str | dict) or not isinstance(rules, Iterable) else tuple(rules)


def _check_frozen(who: str, frozen: Any) -> tuple[str, ...]:
    patterns = None if isinstance(frozen, str) or not isinstance(frozen, Iterable) else tuple(frozen)
    if patterns is None or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"{who}: frozen must be a sequence of regular expressions, got {frozen!r}.")
    problems = []
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            problems.append(f"{pattern!r}: {error}")
    if problems:
        fix = "escape what is meant literally, with re.escape."
        raise ValueError(format_error(who, "frozen must be regular expressions.", problems, fix))
    return patterns


def _check_gather_dtype(who: str, dtype: Any) -> None:
    if dtype is None:
        return
    try:
        floating = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        floating = False
    if not floating:
        what = f"gather_dtype must be a floating dtype, got {dtype if isinstance(dtype, str) else jnp.dtype(dtype)}."
        raise ValueError(format_error(who, what, fix="use jnp.bfloat16, or None to gather what is stored."))


def check_mesh(who: str, mesh: Any, *, pipelined: bool) -> Mesh:
    """Return the mesh with every axis that strategies name, and Auto ones, or refuse it."""
    if not isinstance(mesh, Mesh):
        raise TypeError(f"{who}: mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}. Fix: use so.make_mesh().")
    for axis in ("data", "pipeline") if pipelined else ("data",):
        if axis not in mesh.axis_names:
            what = f"the mesh has axes {mesh.axis_names}, none of them {axis!r}."
            raise ValueError(format_error(who, what, fix=f"make the mesh with so.make_mesh({axis}=...)."))
    known = {"replica", "data", "tensor"} | ({"pipeline"} if pipelined else set())
    for axis, size in mesh.shape.items():
        if size > 1 and axis not in known:
            what = f"mesh axis {axis!r} (size {size}) is above 1, but nothing is split over it."
            fix = (
                "use so.hybrid, or make the mesh with pipeline=1."
                if axis in AXES
                else "use the axes data, tensor, pipeline, replica."
            )
            raise ValueError(format_error(who, what, fix=fix))
    # The same devices with every axis there, and Auto: jax.make_mesh makes Explicit axes, and the partitioner can
    # only be left the tensor axis if it is Auto.
    names = mesh.axis_names + tuple(axis for axis in ("pipeline", "tensor") if axis not in mesh.axis_names)
    grid = mesh.devices.reshape(mesh.devices.shape + (1,) * (len(names) - mesh.devices.ndim))
    return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))
