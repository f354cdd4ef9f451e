"""Checks of a strategy's arguments; each runs once, before anything compiles."""

from collections.abc import Iterator

import optax

from shardopt.config._config import StrategyConfig
from shardopt.config._user_mesh import read_mesh
from shardopt.core import calling, type_error, value_error
from shardopt.core._block_model import as_block_model
from shardopt.core._block_remat import Named, Remat, read_remat
from shardopt.core._place import check_joined
from shardopt.partition._rules import check_rules
from shardopt.trace._marks import BLOCK_INPUT


def check_config(config: StrategyConfig) -> StrategyConfig:
    """Return the config with arguments in the form that the step uses and a mesh with Auto axes, or
    refuse it.

    Raises:
      TypeError: if the optimizer, mesh, loss, rules, or a number is of the wrong kind.
      ValueError: if a number is out of range, the mesh lacks data or has an idle axis, or a rule
        cannot be used.
    """
    with calling(config.strategy):
        return _check_config(config)


def _check_config(config: StrategyConfig) -> StrategyConfig:
    check_optimizer(config.update.tx)
    mesh = config.mesh
    user_mesh = config.user_mesh
    if user_mesh is None:  # a combinator passes a config that is checked already
        mesh, user_mesh = read_mesh(mesh, config.axis_names, pipelined=config.schedule is not None)
        check_joined(mesh.devices.flat[0])
    model = as_block_model(config.loss.loss_fn)
    if model is None and not callable(config.loss.loss_fn):
        problem = "loss_fn must be a function (params, batch) -> loss, or a BlockModel"
        raise type_error(f"{problem}, got {type(config.loss.loss_fn).__name__}.")
    check_evaluate_fn(config)
    config = config.replace(
        mesh=mesh, user_mesh=user_mesh, rules=user_mesh.rules(config.layout.rules)
    )
    check_rules(config.layout.rules)
    for problem, fix in _conflicts(config):
        raise value_error(problem, fix=fix)
    if model is not None:
        _check_remat(config, model.remat)
    return config


def check_optimizer(tx: optax.GradientTransformation) -> None:
    """Refuse an object that is not an optax gradient transformation.

    Raises:
      TypeError: if `tx` has no callable `init` and `update`.
    """
    if isinstance(sharded := getattr(tx, "config", None), StrategyConfig):
        problem = (
            "tx must be an optax.GradientTransformation, but it is sharded already, by"
            f" so.{sharded.strategy}."
        )
        raise type_error(problem, fix="pass the optax optimizer itself, opt.wrapped.")
    if isinstance(tx, type) or not (
        callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))
    ):
        problem = f"tx must be an optax.GradientTransformation, got {type(tx).__name__}."
        fix = "pass an optimizer such as optax.adamw(1e-3), called, not the function itself."
        raise type_error(problem, fix=fix)


def check_evaluate_fn(config: StrategyConfig) -> None:
    """Refuse a loss of evaluation that cannot run on the parameters where they are placed.

    Raises:
      TypeError: if it is not a function or `BlockModel`. If stages of a pipeline run a
        `BlockModel`, and it is not one. If it is a `BlockModel`, and the loss of training is not.
    """
    loss_fn = config.loss.loss_fn
    evaluate_fn = config.loss.evaluate_fn
    if evaluate_fn is None:
        return
    trains_blocks, has_blocks = (as_block_model(fn) is not None for fn in (loss_fn, evaluate_fn))
    if not has_blocks and not callable(evaluate_fn):
        problem = (
            "evaluate_fn must be a function (params, batch) -> loss, or a BlockModel, got"
            f" {evaluate_fn!r:.80}."
        )
        raise type_error(problem, fix="pass evaluate_fn=loss, or leave it out to evaluate loss_fn.")
    if config.schedule is not None and not has_blocks:
        problem = (
            "evaluate_fn must be a BlockModel, because the stages of the pipeline hold its blocks."
        )
        raise type_error(problem, fix="pass model._replace(loss=...), or so.BlockModel(...).")
    if has_blocks and not trains_blocks:
        fix = (
            "train on the BlockModel too, or pass lambda params, batch: model.loss_fn(params,"
            " batch)."
        )
        raise type_error("evaluate_fn is a BlockModel, but loss_fn is not.", fix=fix)


def _conflicts(config: StrategyConfig) -> Iterator[tuple[str, str]]:
    """Yield (problem, remedy) of arguments that exclude each other."""
    placement = config.placement
    view = config.loss.view
    wire = config.wire
    if view == "global" and config.schedule is not None:
        problem = (
            "a pipeline computes the loss one micro-batch after another, and view='global' that of"
            " the whole batch."
        )
        yield problem, "make the mesh with pipeline=1, or use view='per_device'."
    if config.layout.opt_state_layout == "matrices" and not placement.opt_state:
        problem = (
            "opt_state='matrices' says how optimizer state is sharded, and this placement replicates"
            " it."
        )
        yield problem, "use a placement that shards it (zero, fsdp), or leave it out."
    if config.update.offload and config.per_replica:
        problem = (
            "replicas that train apart keep their parameters in the optimizer state, which every"
            " step needs."
        )
        yield problem, "leave 'host' out of opt_state of the strategy inside."
    if (wire.reducer is not None or wire.scatter_dtype is not None) and view == "global":
        problem = (
            "a reducer takes each device's own gradient, and with view='global' there is only that"
            " of the whole batch."
        )
        yield problem, "leave reducer out, or use view='per_device'."
    if wire.reducer is not None and config.mesh.shape.get("expert", 1) > 1:
        problem = (
            "a reducer takes the mean of all leaves over the same devices, and those of experts"
            " differ along expert."
        )
        yield problem, "leave reducer out, or make the mesh with expert=1."
    if wire.reducer is not None and placement.grads:
        problem = (
            f"{wire.reducer.name} takes the mean of unsharded gradients, and this placement shards"
            " them."
        )
        yield (
            problem,
            "use so.reducers.exact(jnp.bfloat16), ddp or zero1 (so.zero(stage=1)), or leave reducer"
            " out.",
        )


def _check_remat(config: StrategyConfig, remat: Remat) -> None:
    parsed_remat = read_remat(remat)
    if config.schedule is not None and isinstance(parsed_remat, Named) and parsed_remat.offload:
        problem = (
            f"BlockModel.remat={remat!r} keeps values in host memory, and a pipeline keeps them in"
            " buffers of the device."
        )
        remedy = (
            "'full'"
            if BLOCK_INPUT in parsed_remat.names
            else f"'save:{','.join(parsed_remat.names)}' or 'full'"
        )
        raise value_error(problem, fix=f"use {remedy}, or a mesh with pipeline=1.")
