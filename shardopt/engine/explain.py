"""What jax says of a loss that was written for the other view, said with the remedy."""

import contextlib
import re
from collections.abc import Iterator

from shardopt.core.errors import format_error
from shardopt.engine.config import StrategyConfig

_UNBOUND = re.compile(r"unbound axis name: (\w+)")
_MANUAL = re.compile(r"can only refer to Auto axes|contains a manual axes")


@contextlib.contextmanager
def explained(config: StrategyConfig) -> Iterator[None]:
    """Trace a loss; what it asks of an axis that its view does not have is an error of ours.

    Raises:
      ValueError: if it names an axis in a collective in the global view, or constrains what is sharded over an axis of the
        rows in the per-device view.
    """
    try:
        yield
    except NameError as error:
        axis = _UNBOUND.search(str(error))
        if config.view != "global" or axis is None or axis[1] not in config.mesh.axis_names:
            raise
        what = f"the loss calls a collective over {axis[1]!r}, but with view='global' it runs once, on the whole batch."
        fix = "take the collective out (a mean is jnp.mean), use so.batch_mean, right in both views, or view='per_device'."
        raise ValueError(format_error(config.strategy, what, fix=fix)) from error
    except ValueError as error:
        if config.view != "per_device" or not _MANUAL.search(str(error)):
            raise
        what = "the loss constrains a sharding, but with view='per_device' every device runs it on its own rows."
        fix = (
            "use view='global', in which with_sharding_constraint and flax's logical axes hold as they are, or leave "
            "out all axes but tensor (in logical_axis_rules map them to None)."
        )
        raise ValueError(format_error(config.strategy, what, [str(error).partition(" and mesh=")[0]], fix)) from error
