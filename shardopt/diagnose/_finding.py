"""The result of `find_nan`, in words."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax._src import source_info_util
from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding, PartitionSpec

from shardopt.config._config import StrategyConfig
from shardopt.diagnose._origin import Origin
from shardopt.losses._metrics import value_of

MOST_ROWS = 8
"""The search for rows ends after this many."""

QUOTIENT = "so.losses.Weighted: the total of all rows / their weight"
"""The line of an operation that stands in no file of the user."""


class NonFinite(NamedTuple):
    """The result of `find_nan`; printed, it has one line for each fact.

    Attributes:
      kind: "NaN" or "infinite".
      direction: "forward" or "backward".
      operation: the name of the first operation whose result is not finite. It is "argument" if the
        leaf itself is not finite. It is "" if the values are finite operation by operation, and
        only the compiled program has others.
      line: its source line, `file:line (function)`; "" for an argument.
      became_nan: operation and line where an infinity became NaN; "" if `operation` made NaN
        itself.
      turns: (turn, number of turns) of each loop around the operation, the outermost first: the
        number of a block is a turn. The number is 0 for a `while` loop.
      leaf: the key path of the parameter that was read last before the operation, or of the
        argument.
      gradients: key paths of the leaves whose gradients are not finite; in the forward pass none.
      rows: up to eight rows of the batch whose loss or gradient is not finite without the other
        rows; empty if no row alone is.
      num_rows: the number of rows of the batch.
      devices: the devices that hold the first of these rows.
      micro_batch: the micro-batch of this row.
    """

    kind: str
    direction: str
    operation: str
    line: str
    became_nan: str
    turns: tuple[tuple[int, int], ...]
    leaf: str
    gradients: tuple[str, ...]
    rows: tuple[int, ...]
    num_rows: int
    devices: tuple[Any, ...]
    micro_batch: int

    def __str__(self) -> str:
        at = f"{self.operation}, {self.line}" if self.line else self.operation
        all_rows = self.num_rows <= len(self.rows)
        row_text = "every row" if all_rows else ", ".join(map(str, self.rows)) or "no row alone"
        devices = ", ".join(map(str, self.devices[:MOST_ROWS])) or "all"
        facts = {
            "operation": at or "none: only the compiled program has such values",
            "became NaN in": self.became_nan,
            "loops": ", ".join(
                f"turn {turn}" + f" of {total}" * bool(total) for turn, total in self.turns
            ),
            "leaf": self.leaf,
            "gradients": ", ".join(self.gradients[:MOST_ROWS]),
            "rows": f"{row_text} (of {self.num_rows})",
            "device": devices + f", micro-batch {self.micro_batch}" * bool(self.rows),
        }
        lines = [f"  {name}: {text}" for name, text in facts.items() if text]
        return "\n".join([f"{self.kind} in the {self.direction} pass", *lines])


def finding_of(
    config: StrategyConfig,
    origin: Origin | None,
    paths: Sequence[str],
    direction: str,
    gradients: tuple[str, ...],
    rows: tuple[int, ...],
    num_rows: int,
) -> NonFinite:
    """Return an origin in words, with the devices of the first row.

    Args:
      config: of the strategy.
      origin: of the value that is not finite; None if only the compiled program has it.
      paths: the key paths of the arguments.
      direction: "forward" or "backward".
      gradients: key paths of the leaves whose gradients are not finite.
      rows: rows that are not finite alone.
      num_rows: the number of rows of the batch.
    """
    first = origin if origin is None or origin.cause is None else origin.cause
    became_nan = ""
    if origin is not None and first is not origin and origin.eqn is not None:
        became_nan = f"{origin.eqn.primitive.name}, {_line_of(origin.eqn)}"
    operation, line, leaf = _place_of(first)
    rows_of_share = max(1, num_rows // config.axes.num_row_shares)
    place = rows[0] % rows_of_share if rows else 0
    return NonFinite(
        kind="NaN" if first is not None and first.is_nan else "infinite",
        direction=direction,
        operation=operation,
        line=line,
        became_nan=became_nan,
        turns=() if first is None else first.turns,
        leaf="" if leaf is None else paths[leaf],
        gradients=gradients,
        rows=rows,
        num_rows=num_rows,
        devices=_devices_of(config, rows[0], num_rows) if rows else (),
        micro_batch=place * config.loss.micro_batches // rows_of_share,
    )


def _place_of(origin: Origin | None) -> tuple[str, str, int | None]:
    """Return the operation that made a value, its line, and the index of the leaf read before it."""
    if origin is None:
        return "", "", None
    if origin.eqn is not None:
        return origin.eqn.primitive.name, _line_of(origin.eqn), origin.leaf
    if origin.argument is not None:
        return "argument", "", origin.argument
    return "constant", "", origin.leaf


def _devices_of(config: StrategyConfig, row: int, num_rows: int) -> tuple[Any, ...]:
    """Return the devices that hold a row; all if the devices do not divide the rows."""
    if num_rows % config.axes.num_row_shares:
        return tuple(config.mesh.devices.flat)
    sharding = NamedSharding(config.mesh, PartitionSpec(config.axes.rows))
    bounds = {
        device: index[0].indices(num_rows)
        for device, index in sharding.devices_indices_map((num_rows,)).items()
    }
    return tuple(device for device, (start, stop, _) in bounds.items() if start <= row < stop)


_LIBRARIES = (str(Path(jax.__file__).parent), str(Path(__file__).parents[1]))


def _line_of(eqn: JaxprEqn) -> str:
    """Return the user's line that an operation comes from: `file:line (function)`."""
    for frame in source_info_util.user_frames(eqn.source_info.traceback):
        in_models = "/shardopt/models/" in frame.file_name
        if in_models or not frame.file_name.startswith(_LIBRARIES):
            return f"{frame.file_name}:{frame.start_line} ({frame.function_name})"
    line = source_info_util.summarize(eqn.source_info)
    return QUOTIENT if line.endswith(f"({value_of.__name__})") else line
