"""The batches of a run: drawn one at a time, and moved to a saved position."""

import base64
import copy
import dataclasses
import json
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from shardopt.checkpoint._multihost import exchange
from shardopt.checkpoint._tree import Json
from shardopt.core._errors import format_error, plural
from shardopt.core._types import PyTree
from shardopt.step._batches import as_arrays
from shardopt.step._global_rows import END, GlobalRows, Rows, RowsOfOne, leaves_with_rows, unwrap

if TYPE_CHECKING:
    from shardopt.training._agreed_stream import AgreedStream


class BatchStream:
    """Batches, drawn one at a time and never ahead, so that the position counts exactly the used
    batches.

    An iterator with `get_state` and `set_state` (grain's) is moved by its own state. Any other
    iterator is moved by drawing as many batches from a fresh one, so it must give the same batches
    in the same order every time. The checkpoint holds a checksum of the last batch, to detect
    another order.

    If each process draws its own rows, each has an iterator state of its own, which is only valid
    for one number of processes. With another number, batches are drawn again too. The values of the
    last batch must then equal the values that the other processes drew, in any order.

    Args:
      batches: the batches of this process.
      rows: knows which processes pass which rows; None if this process is alone.

    Attributes:
      drawn: how many batches were drawn since the first one, including batches before a restored
        checkpoint.
    """

    def __init__(self, batches: Iterable[PyTree], rows: "Rows | None" = None):
        self._rows = rows
        batches, self._are_global = unwrap(batches)
        self._iterator: Any = iter(batches)
        self._last_batch: PyTree = None
        self._held_position: Callable[[], dict[str, Json]] | None = None
        self.drawn = 0

    def draw(self) -> PyTree:
        """Return the next batch, or `END`."""
        batch = next(self._iterator, END)
        if batch is END:
            return END
        if self._are_global:
            batch = GlobalRows(batch)
        self._last_batch, self.drawn = batch, self.drawn + 1
        return batch

    def leave_last(self) -> None:
        """Do not count the last batch: no step uses it."""
        self.drawn -= 1
        self._last_batch = None

    def hold_position(self) -> None:
        """Let the position stay as it is, while batches are drawn, until `release_position`."""
        state = copy.deepcopy(self._state())  # the iterator may change it
        self._held_position = self._position_now(state)

    def release_position(self) -> None:
        """Let the position be after the last batch."""
        self._held_position = None

    def position(self) -> dict[str, Json]:
        """Return the position as JSON; all processes must call it."""
        return (self._held_position or self._position_now(self._state()))()

    def _state(self) -> object:
        return self._iterator.get_state() if self._has_state() else None

    def _position_now(self, state: object) -> Callable[[], dict[str, Json]]:
        """Return a function that returns the present position, also after more batches are drawn.

        What takes time, or all processes, waits until it is called.
        """
        drawn, last_batch = self.drawn, self._last_batch
        has_state = self._has_state()

        def position() -> dict[str, Json]:
            position: dict[str, Json] = {"drawn": drawn, "state": None}
            if has_state:
                states = [json.loads(text) for text in exchange(json.dumps(_encode(state)))]
                position["state"] = states[0]
                if any(state != states[0] for state in states):
                    position["states"] = states
            elif last_batch is not None:
                position["last"] = _checksum(last_batch)
            if last_batch is not None:
                position |= {
                    "processes": self._num_parts(last_batch),
                    "values": _checksum_of_values(last_batch, self._rows),
                }
            return position

        return position

    def _num_parts(self, batch: PyTree = None) -> int:
        """Return how many processes share the rows of a batch, by default of the last one."""
        batch = self._last_batch if batch is None else batch
        is_global = self._are_global or isinstance(batch, GlobalRows)
        return 1 if is_global or self._rows is None else len(self._rows.leaders)

    def restore(self, position: Mapping[str, Json]) -> str:
        """Move to a saved position; return a text about how it was done.

        Raises:
          ValueError: if the iterator refuses the state, ends before the position, or gives other
            rows to other processes.
        """
        count = position["drawn"]
        processes_changed = position.get("processes", self._num_parts()) != self._num_parts()
        if position["state"] is not None and self._has_state() and not processes_changed:
            states = position.get("states")
            state = position["state"] if states is None else states[jax.process_index()]
            self._set_state(state, count)
            return "the data from its saved state"
        while self.drawn < count:
            if self.draw() is END:
                problem = (
                    f"the batches end after {self.drawn}, but the checkpoint was saved after"
                    f" {count}."
                )
                fix = "pass a fresh iterator over the same data."
                raise ValueError(format_error("fit", problem, fix=fix))
        # the last batch may be marked
        if position.get("processes", self._num_parts()) == self._num_parts():
            self._check_order(position)
        elif count:
            self._check_values(position)
        return f"the data by drawing {plural(count, 'batch')}"

    def _set_state(self, state: Mapping[str, Json], count: int) -> None:
        try:
            self._iterator.set_state(_decode(state))
        except Exception as error:
            problem = (
                f"the batches cannot be put back to their position after {plural(count, 'batch')}:"
                f" {error}"
            )
            fix = "pass batches made as in the run that saved it."
            raise ValueError(format_error("fit", problem, fix=fix)) from error
        self.drawn = count

    def _check_values(self, position: Mapping[str, Json]) -> None:
        """Refuse a last batch whose rows are not those that another number of processes drew."""
        if _checksum_of_values(self._last_batch, self._rows) == position["values"]:
            return
        before = plural(position["processes"], "process")
        now = plural(self._num_parts(), "process")
        problem = (
            f"{before} drew other rows in batch {self.drawn - 1} than {now}: rows would be seen"
            " twice, or never."
        )
        fix = (
            "let the rows of a global batch not depend on the number of processes: shuffle first,"
            " then let process p of n take rows p, p + n, ... of each global batch; or let every"
            " process draw the whole global batch."
        )
        raise ValueError(format_error("fit", problem, fix=fix))

    def _check_order(self, position: Mapping[str, Json]) -> None:
        """Warn if the last batch is not the one that was drawn before the save."""
        saved_checksum = position.get("last")
        if jax.process_index() or saved_checksum is None:
            return
        if _checksum(self._last_batch) not in (None, saved_checksum):
            problem = (
                "the batches do not come as in the run that saved the checkpoint: batch"
                f" {self.drawn - 1} is another."
            )
            fix = (
                "shuffle by a fixed seed, the same each time the iterator is made, or give it"
                " get_state and set_state, as grain's have; or some rows are seen twice, and others"
                " not at all."
            )
            warnings.warn(format_error("fit", problem, fix=fix), stacklevel=3)

    def _has_state(self) -> bool:
        return callable(getattr(self._iterator, "get_state", None)) and hasattr(
            self._iterator, "set_state"
        )


@dataclasses.dataclass(frozen=True)
class OwnBatches:
    """Draws the batches of a mesh of one process; as `AgreedStream`, without others.

    Attributes:
      stream: the batches.
      rows: makes arrays of them.
    """

    stream: BatchStream
    rows: RowsOfOne

    def draw(self, received_signal: Callable[[], str | None]) -> tuple[PyTree, str | None]:
        """Return the next batch, or `END`, and why the run ends, or None."""
        batch = self.stream.draw()
        return (END, "exhausted") if batch is END else (self.rows.join(batch), None)


def global_batches(
    stream: BatchStream, rows: "Rows", say: Callable[[str], None]
) -> "OwnBatches | AgreedStream":
    """Return what draws the global batches of the processes of a mesh.

    Args:
      stream: the batches of this process.
      rows: joins them with those of the other processes.
      say: prints a message.
    """
    if isinstance(rows, RowsOfOne):
        return OwnBatches(stream, rows)
    # only several processes load it
    from shardopt.training._agreed_stream import AgreedStream

    return AgreedStream(stream, rows, say)


def _checksum(batch: PyTree) -> int | None:
    """Return a number that distinguishes batches by their first rows.

    None if some rows lie on another process.
    """
    checksum = 0
    for leaf in jax.tree.leaves(as_arrays("fit", unwrap(batch)[0])):
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return None
        if not (isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)):
            checksum = zlib.crc32(
                np.asarray(leaf[:8] if np.ndim(leaf) else leaf).tobytes(), checksum
            )
    return checksum


def _checksum_of_values(batch: PyTree, rows: "Rows | None") -> int:
    """Return a number that distinguishes global batches by their values, in any order.

    All processes must call it.

    Args:
      batch: the batch of this process.
      rows: knows which processes pass which rows; None if this process is alone.
    """
    batch, is_global = unwrap(batch)
    batch = as_arrays("fit", batch)
    is_counted = is_global or rows is None or jax.process_index() in rows.leaders
    local_checksum = 0
    for leaf in jax.tree.leaves(batch) if rows is None else leaves_with_rows(rows.config, batch):
        for values in _own_values(leaf, is_counted=is_counted):
            unsigned = np.ascontiguousarray(values).reshape(-1).view(_unsigned(values.dtype))
            mixed = unsigned.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1)
            local_checksum += int(np.sum(mixed ^ (mixed >> np.uint64(29)), dtype=np.uint64))
    checksums = [int(text) for text in exchange(str(local_checksum))]
    return checksums[0] if is_global else sum(checksums) % 2**64


def _own_values(leaf: Any, *, is_counted: bool) -> list[np.ndarray]:
    """Return the parts of a leaf that this process passes, in the dtype of the device.

    Arrays of the host are left out unless `is_counted`.
    """
    if isinstance(leaf, np.ndarray):
        is_counted = is_counted and leaf.ndim > 0
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        return [np.asarray(leaf, dtype)] if is_counted else []
    if not isinstance(leaf, jax.Array) or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return []
    return [np.asarray(shard.data) for shard in leaf.addressable_shards if shard.replica_id == 0]


def _unsigned(dtype: np.dtype) -> str:
    """Return the unsigned integers of the same size; bytes for sizes that numpy has none of."""
    return f"u{dtype.itemsize}" if dtype.itemsize <= 8 else "u1"


def _encode(state: object) -> dict[str, Json]:
    if isinstance(state, bytes):  # grain's DataLoader
        return {"base64": base64.b64encode(state).decode("ascii")}
    try:
        survives_json = json.loads(json.dumps(state)) == state
    except TypeError:
        survives_json = False
    if not survives_json:
        problem = f"the state of the batch iterator does not survive JSON: {state!r:.200}"
        fix = "let get_state return bytes, or dicts, lists, strings and numbers."
        raise TypeError(format_error("fit", problem, fix=fix))
    return {"json": state}


def _decode(saved: Mapping[str, Json]) -> Json:
    return base64.b64decode(saved["base64"]) if "base64" in saved else saved["json"]
