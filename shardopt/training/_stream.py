"""The batches of a run: drawn one at a time, and moved to a saved position."""

import copy
import dataclasses
import json
import warnings
import zlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from shardopt.checkpoint._multihost import exchange
from shardopt.checkpoint._tree import JsonObject
from shardopt.core import PyTree, format_error, is_key, plural
from shardopt.losses._batch_dims import row_counts
from shardopt.step._batches import as_arrays
from shardopt.step._global_rows import END, GlobalRows, Rows, RowsOfOne, leaves_with_rows, unwrap
from shardopt.training._source import Source, decode_state, encode_state

if TYPE_CHECKING:
    from shardopt.training._agreed_stream import AgreedStream

_FIRST_ROWS = slice(8)
"""The rows by which batches are told apart."""


class RowCounts(NamedTuple):
    """How many rows were drawn; None where leaves of a batch do not agree.

    Attributes:
      total: the rows of all batches.
      first: the rows of the first batch.
      last: the rows of the last batch.
    """

    total: int = 0
    first: int | None = None
    last: int | None = None

    def with_batch(self, num_rows: int | None) -> "RowCounts":
        """Return the counts with a further batch."""
        # `total` is 0 before the first batch.
        first = self.first if self.total else num_rows
        return RowCounts(self.total + (num_rows or 0), first, num_rows)

    def followed_by(self, later: "RowCounts") -> "RowCounts":
        """Return the counts of these batches and later ones."""
        if self.total == 0:
            return later
        last = self.last if later.total == 0 else later.last
        return RowCounts(self.total + later.total, self.first, last)

    def of_all(self, rows: Rows, *, is_global: bool) -> "RowCounts":
        """Return the counts of all processes; all must call it.

        Args:
          rows: knows which processes pass which rows.
          is_global: whether each process passes the rows of all.
        """
        messages = exchange(json.dumps(self))
        ranks = [0] if is_global else rows.leaders
        counts = [json.loads(messages[rank]) for rank in ranks]
        total, first, last = (
            None if None in column else sum(column) for column in zip(*counts, strict=True)
        )
        return RowCounts(total or 0, first, last)


class BatchStream:
    """Batches, drawn one at a time and never ahead, so that the position counts exactly the used
    batches.

    Batches with a state (see `Source`) are moved by it. Others are moved by drawing as many batches
    from a fresh iterator, so it must give the same batches in the same order every time. The
    checkpoint holds a checksum of the last batch, to detect another order.

    If batches have another number of rows than before, their state counts other batches. Then as
    many rows are drawn as before the save.

    If each process draws its own rows, each has an iterator state of its own, which is only valid
    for one number of processes. With another number, batches are drawn again too. The values of the
    last batch must then equal the values that the other processes drew, in any order.

    Args:
      batches: the batches of this process.
      rows: knows which processes pass which rows.
      while_drawing: returns a context for the code of the user that makes a batch.

    Attributes:
      drawn: how many batches were drawn since the first one, including batches before a restored
        checkpoint.
    """

    def __init__(
        self,
        batches: Iterable[PyTree],
        rows: Rows,
        while_drawing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        self._rows = rows
        self._while_drawing = while_drawing
        batches, self._are_global = unwrap(batches)
        self._source = Source(batches)
        self._last_batch: PyTree = None
        self._held_position: Callable[[], JsonObject] | None = None
        # of all processes before a restore; of this process since
        self._restored = RowCounts()
        self._counts = RowCounts()
        # after a restore: the batch drawn to look at its size, and the state before it
        self._next: tuple[PyTree, object] | None = None
        self.drawn = 0

    def draw(self) -> PyTree:
        """Return the next batch, or `END`."""
        with self._while_drawing():
            batch = self._look_ahead()
            self._next = None
        if batch is END:
            return END
        self._counts = self._counts.with_batch(self._num_rows(batch))
        self._last_batch = batch
        self.drawn = self.drawn + 1
        return batch

    def _look_ahead(self) -> PyTree:
        if self._next is not None:
            return self._next[0]
        batch = self._source.draw()
        return GlobalRows(batch) if self._are_global and batch is not END else batch

    def leave_last(self) -> None:
        """Do not count the last batch: no step uses it."""
        self.drawn -= 1
        counts = self._counts
        self._counts = counts._replace(total=counts.total - (counts.last or 0))
        self._last_batch = None

    def hold_position(self) -> None:
        """Let the position stay as it is, while batches are drawn, until `release_position`."""
        state = copy.deepcopy(self._state())  # the iterator may change it
        self._held_position = self._position_now(state)

    def release_position(self) -> None:
        """Let the position be after the last batch."""
        self._held_position = None

    def position(self) -> JsonObject:
        """Return the position as JSON; all processes must call it."""
        return (self._held_position or self._position_now(self._state()))()

    def _state(self) -> object:
        return self._source.state() if self._next is None else self._next[1]

    def _position_now(self, state: object) -> Callable[[], JsonObject]:
        """Return a function that returns the present position, also after more batches are drawn.

        What takes time, or all processes, waits until it is called.
        """
        drawn = self.drawn
        last_batch = self._last_batch
        restored = self._restored
        counts = self._counts

        def position() -> JsonObject:
            position: JsonObject = {"drawn": drawn, "state": None}
            if self._source.has_state:
                states = [json.loads(text) for text in exchange(json.dumps(encode_state(state)))]
                position["state"] = states[0]
                # One state if all are equal, which also fits another number of processes.
                if any(state != states[0] for state in states):
                    position["states"] = states
            elif last_batch is not None:
                position["last"] = _checksum(last_batch)
            if last_batch is not None:
                position |= {
                    "processes": self._num_parts(last_batch),
                    "values": _checksum_of_values(last_batch, self._rows),
                    "last_row": _checksum(last_batch, slice(-1, None)),
                }
            position["rows"] = list(self._of_all(restored, counts, last_batch))
            return position

        return position

    def _num_parts(self, batch: PyTree = None) -> int:
        """Return how many processes share the rows of a batch, by default of the last one."""
        batch = self._last_batch if batch is None else batch
        is_global = self._are_global or isinstance(batch, GlobalRows)
        return 1 if is_global else len(self._rows.leaders)

    def _num_rows(self, batch: PyTree) -> int | None:
        """Return the rows of a batch of this process; None if its leaves do not agree."""
        counts = row_counts(self._rows.config, unwrap(batch)[0])
        return next(iter(counts)) if len(counts) == 1 else None

    def restore(self, position: JsonObject) -> str:
        """Move to a saved position; return a text about how it was done.

        Raises:
          ValueError: if the iterator refuses the state, ends before the position, gives other rows
            to other processes, or no batch begins at the row.
        """
        count = position["drawn"]
        counts = RowCounts(*position.get("rows") or ())
        if (
            position["state"] is not None
            and self._source.has_state
            and not self._processes_changed(position)
        ):
            states = position.get("states")
            state = position["state"] if states is None else states[jax.process_index()]
            if self._restore_state(state, count, counts):
                return "the data from its saved state"
        elif count:
            self._draw_before(count)
        # Batches of another size: count rows, not batches.
        if self._drawn_rows().first != counts.first and counts.first is not None:
            return self._draw_rows(position, counts)
        while self.drawn < count:
            self._draw_before(count)
        # the last batch may be marked
        if not self._processes_changed(position):
            self._check_order(position)
        elif count:
            self._check_values(position, _checksum_of_values(self._last_batch, self._rows))
        return f"the data by drawing {plural(count, 'batch')}"

    def _processes_changed(self, position: JsonObject) -> bool:
        """Return whether another number of processes passed the rows of the last batch before."""
        return position.get("processes") not in (None, self._num_parts())

    def _restore_state(self, state: JsonObject, count: int, counts: RowCounts) -> bool:
        """Move to a saved state; return False if batches have another size than before it.

        Then the first batch is drawn.
        """
        first_state = self._source.state()
        refusal = self._source.refusal(state, count)
        if counts.first is None and refusal is not None:
            raise refusal
        if counts.first is not None and (refusal or not self._goes_on(state, counts)):
            # sizes may vary, and the state may be the last: do batches begin as before?
            self._next = None
            self._source.set_state(first_state)
            self.draw()
            if self._drawn_rows().first != counts.first:
                return False
            if refusal is not None:
                raise refusal
            self._source.set_state(decode_state(state))
        self.drawn = count
        self._last_batch = None
        self._restored = counts
        self._counts = RowCounts()
        return True

    def _goes_on(self, state: JsonObject, counts: RowCounts) -> bool:
        """Draw the next batch without counting it; return whether it has the rows of the last."""
        batch = self._look_ahead()
        self._next = batch, decode_state(state)
        num_rows = None if batch is END else self._num_rows(batch)
        size = RowCounts().with_batch(num_rows)
        return size.of_all(self._rows, is_global=self._holds_all(batch)).last == counts.last

    def _drawn_rows(self) -> RowCounts:
        """Return the counts of all processes; all must call it."""
        return self._of_all(self._restored, self._counts, self._last_batch)

    def _of_all(self, restored: RowCounts, counts: RowCounts, batch: PyTree) -> RowCounts:
        """Return the counts of all processes, with batches like this one; all must call it."""
        return restored.followed_by(counts.of_all(self._rows, is_global=self._holds_all(batch)))

    def _holds_all(self, batch: PyTree) -> bool:
        """Return whether each process passes the rows of all."""
        batch, is_marked = unwrap(batch)
        return (
            self._are_global
            or is_marked
            or any(
                isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
                for leaf in jax.tree.leaves(batch)
            )
        )

    def _draw_before(self, count: int) -> None:
        """Draw one of the batches before a position."""
        if self.draw() is END:
            problem = (
                f"the batches end after {self.drawn}, but the checkpoint was saved after {count}."
            )
            fix = "pass a fresh iterator over the same data."
            raise ValueError(format_error("fit", problem, fix=fix))

    def _draw_rows(self, position: JsonObject, counts: RowCounts) -> str:
        """Draw as many rows as before the save, in batches of another size.

        If another number of processes drew them, the last batch before the save is compared, where
        a batch of now begins with it.
        """
        begin_of_last = counts.total - (counts.last or 0)
        checksum = None  # of the rows from there on, where a batch begins there
        begin = 0
        drawn_rows = self._drawn_rows()
        while True:
            if begin == begin_of_last and self._processes_changed(position):
                checksum = 0
            if checksum is not None:
                checksum += _checksum_of_values(self._last_batch, self._rows)
            if drawn_rows.total >= counts.total:
                break
            begin = drawn_rows.total
            self._draw_before(position["drawn"])
            drawn_rows = self._drawn_rows()
        if drawn_rows.total != counts.total:
            problem = (
                f"the checkpoint was saved after {plural(counts.total, 'row')}, in batches of"
                f" {counts.first}. Batches of {drawn_rows.first} do not end there:"
                f" {drawn_rows.total - counts.total} of the next rows would never be seen."
            )
            fix = (
                f"choose a batch size that divides {counts.total}, or train with batches of"
                f" {counts.first} rows to a checkpoint after a multiple of {drawn_rows.first}."
            )
            raise ValueError(format_error("fit", problem, fix=fix))
        description = (
            f"the data by drawing {plural(counts.total, 'row')}: batches have"
            f" {drawn_rows.first}, they had {counts.first}"
        )
        if checksum is not None:
            self._check_values(position, checksum % 2**64)
        elif self._processes_changed(position):
            description += (
                "; no batch begins with the last one before, so nothing shows that other processes"
                " drew the same rows"
            )
        else:
            self._check_order({"last": position.get("last_row")}, slice(-1, None))
        return description

    def _check_values(self, position: JsonObject, checksum: int) -> None:
        """Refuse rows that have other values than the last batch before the save, which another
        number of processes drew.
        """
        if checksum == position["values"]:
            return
        before = plural(position["processes"], "process")
        now = plural(self._num_parts(), "process")
        problem = (
            f"{before} drew other rows in the last batch than {now}: rows would be seen twice, or"
            " never."
        )
        fix = (
            "let the rows of a global batch not depend on the number of processes: shuffle first,"
            " then let process p of n take rows p, p + n, ... of each global batch; or let every"
            " process draw the whole global batch."
        )
        raise ValueError(format_error("fit", problem, fix=fix))

    def _check_order(self, position: JsonObject, rows: slice = _FIRST_ROWS) -> None:
        """Warn if the last batch is not the one that was drawn before the save."""
        saved_checksum = position.get("last")
        if jax.process_index() or saved_checksum is None:
            return
        if _checksum(self._last_batch, rows) not in (None, saved_checksum):
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
    stream: BatchStream, rows: Rows, say: Callable[[str], None]
) -> "OwnBatches | AgreedStream":
    """Return what draws the global batches of the processes of a mesh.

    Args:
      stream: the batches of this process.
      rows: joins them with the batches of the other processes.
      say: prints a message.
    """
    if isinstance(rows, RowsOfOne):
        return OwnBatches(stream, rows)
    # only several processes load it
    from shardopt.training._agreed_stream import AgreedStream

    return AgreedStream(stream, rows, say)


def _checksum(batch: PyTree, rows: slice = _FIRST_ROWS) -> int | None:
    """Return a number that distinguishes batches by some of their rows.

    None if some rows lie on another process.
    """
    checksum = 0
    for leaf in jax.tree.leaves(as_arrays("fit", unwrap(batch)[0])):
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return None
        if not is_key(leaf):
            checksum = zlib.crc32(
                np.asarray(leaf[rows] if np.ndim(leaf) else leaf).tobytes(), checksum
            )
    return checksum


def _checksum_of_values(batch: PyTree, rows: Rows) -> int:
    """Return a number that distinguishes global batches by their values, in any order.

    All processes must call it.

    Args:
      batch: the batch of this process.
      rows: knows which processes pass which rows.
    """
    batch, is_global = unwrap(batch)
    batch = as_arrays("fit", batch)
    is_counted = is_global or jax.process_index() in rows.leaders
    local_checksum = 0
    for leaf, _ in leaves_with_rows(rows.config, batch):
        for values in _own_values(leaf, is_counted=is_counted):
            unsigned = np.ascontiguousarray(values).reshape(-1).view(_unsigned(values.dtype))
            mixed = unsigned.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1)
            local_checksum += int(np.sum(mixed ^ (mixed >> np.uint64(29)), dtype=np.uint64))
    checksums = [int(text) for text in exchange(str(local_checksum))]
    return (checksums[0] if is_global else sum(checksums)) % 2**64


def _own_values(leaf: Any, *, is_counted: bool) -> list[np.ndarray]:
    """Return the parts of a leaf that this process passes, in the dtype of the device.

    Arrays of the host are left out unless `is_counted`.
    """
    if isinstance(leaf, np.ndarray):
        is_counted = is_counted and leaf.ndim > 0
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        return [np.asarray(leaf, dtype)] if is_counted else []
    if not isinstance(leaf, jax.Array) or is_key(leaf):
        return []
    return [np.asarray(shard.data) for shard in leaf.addressable_shards if shard.replica_id == 0]


def _unsigned(dtype: np.dtype) -> str:
    """Return the unsigned integers of the same size; bytes for sizes that numpy has none of."""
    return f"u{dtype.itemsize}" if dtype.itemsize <= 8 else "u1"
