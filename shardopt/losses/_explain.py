"""Replaces jax's errors about a loss that was written for the other view with errors that name the
remedy.
"""

import contextlib
import re
from collections.abc import Iterator

from shardopt.config._config import StrategyConfig
from shardopt.core import format_error

_UNBOUND = re.compile(r"unbound axis name:? \W*(\w+)")
_MANUAL = re.compile(r"can only refer to Auto axes|contains a manual axes|is not found in mesh")
_EXPLICIT = re.compile(r"can only refer to Auto axes|that are of type Auto")


@contextlib.contextmanager
def explained(config: StrategyConfig, rows: int | None = None) -> Iterator[None]:
    """Trace a loss inside this context, which explains errors about mesh axes that the view of the
    loss does not have.

    If the loss gets a part of the batch, any other error gets a note about it.

    Args:
      config: the config of the step, with the view of this trace.
      rows: the number of rows that the loss gets; None for all rows of the batch.

    Raises:
      ValueError: if a collective of the loss names an axis that the view does not have; and as
        `lowering_explained`.
    """
    try:
        with lowering_explained(config):
            yield
    except NameError as error:
        axis = _UNBOUND.search(str(error))
        if axis is None:
            raise
        problem, fix = _no_such_axis(config, axis[1])
        raise ValueError(format_error(config.strategy, problem, fix=fix)) from error
    except Exception as error:
        _add_note(config, rows, error)
        raise


@contextlib.contextmanager
def lowering_explained(config: StrategyConfig) -> Iterator[None]:
    """Trace or lower inside this context, which explains errors about the shardings that a loss
    constrains, and about derivatives of gathered parameters.

    Raises:
      ValueError: if a constraint is over an axis of the rows, in the per-device view. Or, in the
        global view, over an axis that the user's mesh has as an Explicit one. Or if an optimizer
        differentiates the loss of gathered parameters forwards.
    """
    try:
        yield
    except TypeError as error:
        if not config.gathers or "forward-mode autodiff" not in str(error):
            raise
        problem = (
            "the loss is differentiated forwards (jax.jvp), and gathered parameters have a"
            " derivative backwards alone."
        )
        fix = "use so.ddp or so.zero, whose devices hold all parameters; or jax.vjp."
        raise ValueError(format_error(config.strategy, problem, fix=fix)) from error
    except ValueError as error:
        if config.loss.view == "global":
            kind = _EXPLICIT
            problem = "the loss asks for Explicit axes of the mesh, and it runs with Auto ones."
            fix = "call jax.lax.with_sharding_constraint(x, PartitionSpec(...)), without a mesh."
        else:
            kind = _MANUAL
            problem = (
                "the loss constrains a sharding, but with view='per_device' every device runs it on"
                " its own rows."
            )
            fix = (
                "use view='global', in which with_sharding_constraint and flax's logical axes hold"
                " as they are, or leave out all axes but tensor (in logical_axis_rules map them to"
                " None)."
            )
        if "\nFix: " in str(error) or not kind.search(str(error)):
            raise
        constraint = str(error).partition(" and mesh=")[0]
        raise ValueError(format_error(config.strategy, problem, [constraint], fix)) from error


def _no_such_axis(config: StrategyConfig, axis: str) -> tuple[str, str]:
    """Return the problem and the fix for a collective over an axis that the view does not have."""
    if config.loss.view == "global":
        problem = (
            f"the loss calls a collective over {axis!r}, but with view='global' it runs once, on"
            " the whole batch."
        )
        return problem, (
            "take the collective out (a mean is jnp.mean; flax's BatchNorm has axis_name=None),"
            " use so.losses.batch_mean, right in both views, or view='per_device'."
        )
    names = " and ".join(map(repr, config.axes.summed))
    problem = (
        f"the loss calls a collective over {axis!r}, and devices that share the rows are along"
        f" {names} here."
    )
    return problem, (
        f"call it over {names} (flax's BatchNorm: axis_name={config.axes.summed!r}), or use"
        " so.losses.batch_mean; or take it out and use view='global', in which a mean over rows is"
        " jnp.mean (flax's BatchNorm: axis_name=None)."
    )


def _add_note(config: StrategyConfig, rows: int | None, error: Exception) -> None:
    if (
        rows is not None
        and "\nFix: " not in str(error)
        and config.loss.view == "per_device"
        and config.num_pieces > 1
    ):
        rows_seen = f"{rows} of the {rows * config.num_row_pieces} rows"
        error.add_note(
            f"{config.strategy}: each device runs the loss on its own rows: it sees {rows_seen} of"
            " the batch."
        )
