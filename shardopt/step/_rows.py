"""The batches of several processes become global batches: the one place that joins their rows."""

import dataclasses
import functools
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec

from shardopt.config._config import StrategyConfig
from shardopt.core import (
    PyTree,
    abstract,
    calling,
    format_error,
    path_text,
    type_error,
    value_error,
)
from shardopt.losses._batch_dims import map_rows, placed_specs, resized, row_dim
from shardopt.runtime._agreement import agree, groups, processes_of
from shardopt.step._batches import as_arrays
from shardopt.step._check_rows import (
    check_claims,
    check_forms,
    check_global,
    check_own_rows,
    check_shares,
    uneven_rows_error,
)
from shardopt.step._global_rows import END, unwrap
from shardopt.step._host_batch import HostBatch, from_text, is_on_host, read_batch, to_text
from shardopt.step._inputs import check_batch, check_values, place_batch

UNKNOWN = "unknown"
"""The message of a process whose batch cannot be told as text."""

CHECK_EVERY = 1000
"""The rows of batches 1, 2, 4, 8 and so on are compared between processes, and of each 1000th."""


class Message(NamedTuple):
    """The message of a process about its next batch.

    Attributes:
      claim: whose rows the batch has; "end" if there is no batch.
      form: a digest of its form.
      rows: the number of its rows on this host.
      sample: a digest of the first row of a global batch, which is compared at every step.
      digests: digests of the values by leaf; None if they are not due.
      note: the caller's message to the other processes.
      error: the error of this process, or None.
    """

    claim: str = "end"
    form: str = ""
    rows: int = 0
    sample: str = ""
    digests: dict[str, str] | None = None
    note: Any = None
    error: str | None = None


@dataclasses.dataclass(eq=False)
class AgreedRows:
    """Joins the batches of all processes of a mesh, one after another.

    Before each batch the processes exchange a message on the host, while the devices still compute
    the step before it. The message has the form of the batch and its number of rows, and a digest
    of the first row of a global batch. For batches 1, 2, 4, 8 and so on, and for each 1000th, it
    has digests of all values too.

    Attributes:
      config: of the strategy; its mesh and `batch_dims` say which rows a process holds.
      caller: the function that the user called, for messages.
      counts: how many batches were joined, by claim.
    """

    config: StrategyConfig
    caller: str
    counts: Counter[str] = dataclasses.field(default_factory=Counter)

    @functools.cached_property
    def processes(self) -> tuple[int, ...]:
        """The processes that have devices of the mesh."""
        return processes_of(self.config.mesh)

    @functools.cached_property
    def shares(self) -> dict[int, tuple[int, ...]]:
        """Process -> the shares of the rows that its devices hold, in order."""
        axes = self.config.axes
        sharding = self.config.home.shardings(PartitionSpec(axes.rows))
        held: dict[int, set[int]] = {process: set() for process in self.processes}
        for device, (rows,) in sharding.devices_indices_map((axes.num_all_row_shares,)).items():
            held[device.process_index].add(rows.start or 0)
        shares = {process: tuple(sorted(held[process])) for process in self.processes}
        with calling(self.caller):
            check_shares(shares)
        return shares

    def join(self, batch: PyTree) -> PyTree:
        """Return the global batch of the batches of all processes.

        Batches that are on the devices of all processes already, and shapes, are returned at once.

        Raises:
          ValueError: if the batches of the processes do not fit together.
        """
        if _is_abstract(batch):
            return as_arrays(self.config.strategy, unwrap(batch)[0])
        batch, error = self.read(batch)
        if isinstance(batch, HostBatch) and batch.claim == "placed":
            return batch.leaves
        return self.joined(batch, self.exchange(batch, error=error), whole=True)

    def join_all(self, batches: Iterable[PyTree]) -> Iterator[PyTree]:
        """Yield global batches until the batches of all processes have ended.

        A process without a next batch passes no rows.
        """
        iterator = iter(batches)
        while True:
            batch, error = self.draw(lambda: next(iterator, END))
            messages = self.exchange(batch, error=error)
            if all(message.claim == "end" for message in messages):
                return
            yield self.joined(batch, messages)

    def draw(
        self, next_batch: Callable[[], PyTree]
    ) -> tuple[HostBatch | None, BaseException | None]:
        """Return the next batch, None at `END`; or the error of the loader."""
        try:
            batch = next_batch()
        except (Exception, SystemExit) as error:
            return None, error
        return (None, None) if batch is END else self.read(batch)

    def read(self, batch: PyTree) -> tuple[HostBatch | None, Exception | None]:
        """Return a batch, or the error that it causes."""
        try:
            # before they are joined on the devices, where no value can be looked at
            check_values(self.config, unwrap(batch)[0])
            return read_batch(self.config, batch), None
        except (TypeError, ValueError) as error:
            return None, error

    def exchange(
        self, batch: HostBatch | None, *, note: Any = None, error: BaseException | None = None
    ) -> list[Message]:
        """Return the messages of all processes; `note` and the batch are of this one.

        Raises:
          RuntimeError: if another process has an error.
          BaseException: the error of this process.
        """
        message = Message(note=note)
        if error is not None:
            message = message._replace(error=f"{type(error).__name__}: {error}")
        elif batch is not None:
            self.counts[batch.claim] += 1
            count = self.counts[batch.claim]
            is_power_of_two = count & (count - 1) == 0
            is_due = is_power_of_two or count % CHECK_EVERY == 0
            message = message._replace(
                claim=batch.claim,
                form=hashlib.blake2b(
                    json.dumps(batch.form(self.config)).encode(), digest_size=8
                ).hexdigest(),
                rows=batch.rows,
                sample=batch.sample(self.config) if batch.claim == "global" else "",
                digests=batch.digests(self.config) if is_due else None,
            )
        # Errors are raised after the exchange. A process that raised before it would leave the
        # others waiting for its message.
        messages = [Message(*values) for values in agree(self.caller, message, self.processes)]
        if error is not None:
            raise error
        listed = [
            f"process {process}: {other.error}"
            for process, other in zip(self.processes, messages, strict=True)
            if other.error is not None
        ]
        if listed:
            problem = "another process has no next batch, because of an error."
            raise RuntimeError(format_error(self.caller, problem, listed))
        return messages

    def placed(self, batch: HostBatch | None, messages: Sequence[Message]) -> PyTree:
        """Return the global batch of a step, checked and on the devices."""
        global_batch = self.joined(batch, messages, whole=True)
        check_batch(self.config, global_batch)
        return place_batch(self.config, global_batch)

    def joined(
        self, batch: HostBatch | None, messages: Sequence[Message], *, whole: bool = False
    ) -> PyTree:
        """Return the global batch; on the hosts, unless each process has as many rows as it takes.

        Args:
          batch: the batch of this process, or None.
          messages: the messages of all processes about their batches; one of them has a batch.
          whole: whether the devices and micro-batches must divide the rows.

        Raises:
          ValueError: if the batches do not fit together.
        """
        with calling(self.caller):
            present = {
                process: message
                for process, message in zip(self.processes, messages, strict=True)
                if message.claim != "end"
            }
            claims = {message.claim for message in present.values()}
            has_ended = len(present) < len(messages)
            if claims != {"process"} or (whole and has_ended):
                check_claims([message.claim for message in messages], self.processes)
            if len({message.form for message in present.values()}) > 1:
                # All processes have the same messages, so all of them come here, and none waits
                # alone.
                forms = agree(
                    self.caller, None if batch is None else batch.form(self.config), self.processes
                )
                check_forms(
                    [form for form in forms if form is not None],
                    list(present),
                    is_global=claims == {"global"},
                )
            if claims == {"process"}:
                self._check_own(present)
                return self._join_rows(batch, messages, whole)
            assert batch is not None
            if claims == {"global"}:
                self._check_global(batch, messages)
            return batch.leaves

    def _check_own(self, present: dict[int, Message]) -> None:
        """Refuse, by a ValueError, rows of processes that do not add up, if it is time to look."""
        digests = [message.digests for message in present.values() if message.digests is not None]
        if digests:
            check_own_rows(digests, list(present), self.shares)

    def _check_global(self, batch: HostBatch, messages: Sequence[Message]) -> None:
        """Refuse, by a ValueError, a global batch that differs between processes."""
        digests = [message.digests for message in messages if message.digests is not None]
        if len({message.sample for message in messages}) > 1:
            digests = agree(self.caller, batch.digests(self.config), self.processes)
        if digests:
            check_global(digests, self.processes)

    def _join_rows(
        self, batch: HostBatch | None, messages: Sequence[Message], whole: bool
    ) -> PyTree:
        """Return the global batch of rows of the processes: on the devices if each process has as
        many rows as its devices take, else on each host.
        """
        rows = dict(zip(self.processes, (message.rows for message in messages), strict=True))
        pieces = self.config.axes.num_all_row_shares * self.config.loss.micro_batches
        leaders = self.leaders
        total = sum(rows[process] for process in leaders)
        is_whole_view = self.config.loss.view == "global" and not self.config.per_replica
        if whole and (total == 0 or (total % pieces and not is_whole_view)):
            raise uneven_rows_error({process: rows[process] for process in leaders}, pieces)
        per_share = {count / len(self.shares[process]) for process, count in rows.items()}
        if len(per_share) == 1 and total and total % pieces == 0:
            assert batch is not None
            return self._place(batch, int(per_share.pop()))
        return self._gather(batch, rows, leaders)

    @functools.cached_property
    def leaders(self) -> list[int]:
        """One process for each part of the rows, in the order of the parts."""
        # Reversed, so that the first process of each part is the one that stays in the dict.
        by_shares = {self.shares[process]: process for process in reversed(self.processes)}
        return [by_shares[shares] for shares in sorted(by_shares)]

    @property
    def row_shard(self) -> tuple[int, int]:
        """The part of the rows that this process holds, and the number of parts."""
        parts = sorted(set(self.shares.values()))
        own_shares = self.shares.get(jax.process_index())
        if own_shares is None:
            problem = (
                f"process {jax.process_index()} has no device of the mesh, so it loads no rows."
            )
            raise ValueError(format_error(self.caller, problem))
        return parts.index(own_shares), len(parts)

    def _place(self, batch: HostBatch, rows_per_share: int) -> PyTree:
        """Return a batch on the devices; each process gives them its own rows."""
        config = self.config
        total = rows_per_share * config.axes.num_all_row_shares
        own_shares = self.shares[jax.process_index()]
        specs = placed_specs(config, resized(config, abstract(batch.leaves), rows=total))

        def place(path: jax.tree_util.KeyPath, leaf: Any, spec: PartitionSpec) -> Any:
            dim = row_dim(config, path_text(path), np.ndim(leaf)) if is_on_host(leaf) else None
            if dim is None:
                return leaf
            shape = (*leaf.shape[:dim], total, *leaf.shape[dim + 1 :])

            # jax asks for rows by their numbers in the global array. The array of this process has
            # only its own shares, one after another.
            def rows_of(index: Any) -> np.ndarray:
                share = (index[dim].start or 0) // rows_per_share
                first = own_shares.index(share) * rows_per_share
                own_index = (*index[:dim], slice(first, first + rows_per_share), *index[dim + 1 :])
                return leaf[own_index]

            return jax.make_array_from_callback(shape, config.home.shardings(spec), rows_of)

        return jax.tree_util.tree_map_with_path(place, batch.leaves, specs)

    def _gather(
        self, batch: HostBatch | None, rows: dict[int, int], leaders: Sequence[int]
    ) -> PyTree:
        """Return the rows of all processes on each host, where their numbers differ."""
        from jax.experimental import multihost_utils

        if len(self.processes) != jax.process_count():
            problem = (
                "processes passed different numbers of rows, and the mesh has not all processes."
            )
            fix = "pass as many rows on each, or the global batch: so.GlobalRows(batch)."
            raise value_error(problem, fix=fix)
        longest = max(rows.values())

        def gather(leaf: Any, dim: int) -> Any:
            if not is_on_host(leaf):
                return leaf
            # An all-gather needs equal shapes, so shorter batches are padded and cut again.
            padding = [(0, 0)] * leaf.ndim
            padding[dim] = (0, longest - leaf.shape[dim])
            of_all = multihost_utils.process_allgather(np.pad(leaf, padding))
            return np.concatenate(
                [np.take(of_all[p], np.arange(rows[p]), axis=dim) for p in leaders], axis=dim
            )

        return map_rows(self.config, gather, self._own_or_empty(batch))

    def _own_or_empty(self, batch: HostBatch | None) -> PyTree:
        """Return the batch of this process; if it has none, the batch of another with 0 rows."""
        own_text = "" if batch is None else to_text(batch.without_rows(self.config)) or UNKNOWN
        texts = agree(self.caller, own_text, self.processes)
        if UNKNOWN in texts:
            problem = "a process has no batch, and cannot be told what the batches of others are."
            fix = "pass batches of dicts, lists, tuples and arrays; or as many batches on each."
            raise type_error(problem, fix=fix)
        if batch is not None:
            return batch.leaves
        return from_text(next(filter(None, texts)))


def ended_text(processes: Sequence[int], messages: Sequence[Message], drawn: int) -> str:
    """Return a text about the processes whose batches ended before the others; "" if all ended."""
    states = ["ended" if message.claim == "end" else "went on" for message in messages]
    by_state = groups(states, processes)
    if len(by_state) == 1:
        return ""
    return (
        f"The batches of {by_state['ended']} ended after {drawn}; {by_state['went on']} had more,"
        " which are not used."
    )


def _is_abstract(batch: Any) -> bool:
    """Return whether a batch has only shapes, or is under a trace."""
    leaves = jax.tree.leaves(unwrap(batch)[0])
    return any(isinstance(leaf, jax.ShapeDtypeStruct | Tracer) for leaf in leaves)
