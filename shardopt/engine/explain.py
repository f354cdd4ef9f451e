"""What jax says of a loss that was written for the other view, said with the remedy."""

import contextlib
import re
from collections.abc import Iterator

from shardopt.core.errors import format_error
from shardopt.engine.config import StrategyConfig

_UNBOUND = re.compile(r"unbound axis name:? \W*(\w+)")
_MANUAL = re.compile(r"can only refer to Auto axes|contains a manual axes")


@contextlib.contextmanager
def explained(config: StrategyConfig, rows: int | None = None) -> Iterator[None]:
    """Trace a loss; what it asks of an axis that its view does not have is an error of ours.

    Any other error of a loss that sees a part of the batch gets a note that says so.

    Args:
      config: of the step, with the view in which the loss is traced.
      rows: how many rows of the batch the loss is given, if not all.

    Raises:
      ValueError: if it names an axis in a collective that its view does not have, or constrains what is sharded over an axis of
        the rows in the per-device view.
    """
    try:
        yield
    except NameError as error:
        axis = _UNBOUND.search(str(error))
        if axis is None:
            raise
        raise ValueError(format_error(config.strategy, *_no_such_axis(config, axis[1]))) from error
    except ValueError as error:
        if config.view != "per_device" or not _MANUAL.search(str(error)):
            _add_note(config, rows, error)
            raise
        what = "the loss constrains a sharding, but with view='per_device' every device runs it on its own rows."
        fix = (
            "use view='global', in which with_sharding_constraint and flax's logical axes hold as they are, or leave "
            "out all axes but tensor (in logical_axis_rules map them to None)."
        )
        raise ValueError(format_error(config.strategy, what, [str(error).partition(" and mesh=")[0]], fix)) from error
    except Exception as error:
        _add_note(config, rows, error)
        raise


def _no_such_axis(config: StrategyConfig, axis: str) -> tuple[str, tuple[str, ...], str]:
    """Return what is wrong with a collective over an axis, and the remedy."""
    if config.view == "global":
        what = f"the loss calls a collective over {axis!r}, but with view='global' it runs once, on the whole batch."
        return (
            what,
            (),
            (
                "take the collective out (a mean is jnp.mean; flax's BatchNorm has axis_name=None), use so.batch_mean, right in both "
                "views, or view='per_device'."
            ),
        )
    names = " and ".join(repr(name) for name in config.axes.summed)
    what = f"the loss calls a collective over {axis!r}, and devices that share the rows are along {names} here."
    return (
        what,
        (),
        (
            f"call it over {names} (flax's BatchNorm: axis_name={config.axes.summed!r}), or use so.batch_mean; or take it out and use "
            "view='global', in which a mean over rows is jnp.mean (flax's BatchNorm: axis_name=None)."
        ),
    )


def _add_note(config: StrategyConfig, rows: int | None, error: Exception) -> None:
    if rows is not None and "\nFix: " not in str(error) and config.view == "per_device" and config.num_pieces > 1:
        seen = f"{rows} of the {rows * config.num_row_pieces} rows"
        error.add_note(f"{config.strategy}: each device runs the loss on its own rows: it sees {seen} of the batch.")
