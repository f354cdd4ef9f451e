"""Snapshots of the train state in host memory, newer than the checkpoints on disk.

A snapshot has one piece per process. The piece holds the shards of the process of every leaf, with
a SHA-256. The process sends its piece over sockets, in the background, to two vaults
(`runtime.vault`): on its own host and on the next host. A step can be restored if the pieces of all
processes are undamaged, each in at least one of its two vaults. So any one host may be lost, or
several hosts that are not neighbours. With another number of processes, or on another mesh, a
process reads its shards from several pieces.
"""

import json
import logging
import math
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import jax
import numpy as np

from shardopt.checkpoint._multihost import exchange
from shardopt.checkpoint._store import describe, from_storable, place, to_storable
from shardopt.checkpoint._sums import LeafSums, check_sums
from shardopt.checkpoint._tree import JsonObject, LeafPath, leaves_by_path, show
from shardopt.core import PyTree, format_error, with_leaves
from shardopt.runtime import _vault as vault
from shardopt.runtime._launch import RESTART
from shardopt.step._optimizer import ShardedOptimizer

_LOG = logging.getLogger(__name__)
_MAX_WAIT = 30.0
"""Seconds that a snapshot waits until the previous one is sent. A host that is lost silently must
not stop the run.
"""
_LENGTH_BYTES = 8
"""Bytes that store the length of the header."""


Bounds = tuple[tuple[int, int], ...]
"""The position of a shard in its leaf: start and stop index in each dim."""


class MemorySnapshot(NamedTuple):
    """The piece of a train state that one process holds, in host memory.

    Attributes:
      step: steps taken.
      extra: JSON values that were saved with the state.
      leaves: by key path, the record of the leaf as text, and its shards.
      sums: the sum of each leaf, see `_sums`; None if the state was not verified.
    """

    step: int
    extra: JsonObject
    leaves: dict[LeafPath, tuple[str, dict[Bounds, memoryview]]]
    sums: LeafSums | None = None


class CompleteStep(NamedTuple):
    """A step for which the vaults hold the pieces of all processes.

    Attributes:
      step: steps taken.
      group: the attempt that took the snapshot and its number of processes, "attempt/count".
      holders: by rank in that attempt, the addresses of the vaults that hold the piece of the rank.
    """

    step: int
    group: str
    holders: dict[int, list[str]]


class MemoryWriter:
    """Sends the snapshots of this process to its two vaults, one at a time, on a thread."""

    def __init__(self, caller: str):
        """Read the addresses of the vaults from the environment variables that `shardopt launch`
        sets.

        With several processes all must call it.

        Args:
          caller: the function that the user called, for messages.

        Raises:
          ValueError: if there are no vaults.
        """
        addresses = os.environ.get(vault.ADDRESSES, "")
        if not addresses:
            problem = (
                "memory_every needs a process on each host that outlives training and keeps"
                " snapshots; there is none."
            )
            fix = (
                "start the job with shardopt launch --max-restarts 3; of several hosts, shardopt"
                f" vault on each and its environment with {vault.ADDRESSES}; or leave memory_every"
                " out."
            )
            raise ValueError(format_error(caller, problem, fix=fix))
        self._caller = caller
        self._vaults = addresses.split(",")
        self._token = os.environ[vault.TOKEN]
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="snapshots")
        self._pending: Future[None] | None = None
        self._unreachable: set[str] = set()
        self._attempt = os.environ.get(RESTART, "0")
        if "SHARDOPT_LAUNCHED" not in os.environ:  # no launcher counts the attempts
            self._attempt = exchange(str(time.time_ns()))[0]

    def save(
        self, state: PyTree, step: int, extra: JsonObject, sums: LeafSums | None = None
    ) -> None:
        """Copy this process's shards to the host and send them in the background.

        The state may be donated when this returns. It first waits a limited time for the previous
        snapshot. A vault that cannot be reached causes a warning; the run continues.
        """
        if self._pending is not None and wait([self._pending], _MAX_WAIT).not_done:
            text = (
                "%s: the snapshot of step %d is left out: for %.0f s the one before could not be"
                " sent."
            )
            _LOG.warning(text, self._caller, step, _MAX_WAIT)
            return
        self._pending = self._thread.submit(self._send, pack(state, step, extra, sums), step)

    def newest(
        self, opt: ShardedOptimizer, later_than: int, before: int | None
    ) -> MemorySnapshot | None:
        """Return this process's shards of the newest step that all processes can restore, or None.

        All must call it.

        Args:
          opt: the optimizer whose abstract state says which shards this process needs.
          later_than: this step and earlier ones are left out.
          before: this step and later ones are left out; None for no limit.
        """
        abstract_state = opt.abstract_state()
        vault_pieces = self._vault_pieces() if jax.process_index() == 0 else []
        # Process 0 alone asks the vaults: a vault that is lost meanwhile must not give two answers.
        received = [json.loads(text) for text in exchange(json.dumps([vault_pieces, later_than]))]
        # The processes may not all see the newest checkpoint in the shared folder yet.
        newest_checkpoint = max(step for _, step in received)
        for candidate in complete_steps(received[0][0], later_than=newest_checkpoint):
            if before is not None and candidate.step >= before:
                continue
            pieces = self._read_pieces(candidate)
            snapshot, problem = assemble(pieces, abstract_state)
            if snapshot is None:
                text = "%s: the snapshot of step %d is not restored: %s."
                _LOG.warning(text, self._caller, candidate.step, problem)
            # All processes restore one step. If one of them cannot, all go on to the next older
            # one.
            if all(map(json.loads, exchange(json.dumps(snapshot is not None)))):
                assert snapshot is not None
                return snapshot._replace(extra=json.loads(exchange(json.dumps(snapshot.extra))[0]))
        return None

    def close(self) -> None:
        """Wait until the last snapshot is sent or has failed."""
        self._thread.shutdown()

    def _own_vaults(self) -> list[str]:
        count = len(self._vaults)
        # Processes are numbered host by host, so this is the host of the process.
        host = jax.process_index() * count // jax.process_count()
        return list(dict.fromkeys((self._vaults[host], self._vaults[(host + 1) % count])))

    def _send(self, data: bytearray, step: int) -> None:
        digest = vault.digest(data)
        rank = jax.process_index()
        group = f"{self._attempt}/{jax.process_count()}"
        text = (
            "%s: the snapshot of step %d did not reach the host at %s (%s: %s); another holds it."
        )
        for address in self._own_vaults():
            try:
                vault.put(address, self._token, rank, step, group, data, digest)
                self._unreachable.discard(address)
            except (OSError, EOFError) as error:
                # warn once: the next snapshots will probably fail too
                if address not in self._unreachable:
                    _LOG.warning(text, self._caller, step, address, type(error).__name__, error)
                self._unreachable.add(address)

    def _vault_pieces(self) -> list[tuple[str, int, int, str]]:
        return [
            (address, *piece)
            for address in self._vaults
            for piece in vault.list_pieces(address, self._token)
        ]

    def _read_pieces(self, complete_step: CompleteStep) -> Iterator[MemorySnapshot]:
        """Read the pieces of a step one by one, first the piece of this rank.

        On the same mesh the first piece is enough.
        """
        near_vaults, (step, group, holders) = self._own_vaults(), complete_step
        for rank in sorted(holders, key=lambda rank: rank != jax.process_index()):
            for address in sorted(holders[rank], key=lambda address: address not in near_vaults):
                data = vault.get(address, self._token, rank, step, group)
                if data is not None:
                    yield unpack(data)
                    break


def complete_steps(
    held: Iterable[tuple[str, int, int, str]], *, later_than: int
) -> list[CompleteStep]:
    """Return the steps for which the vaults hold the pieces of all processes, the newest first.

    Args:
      held: vault, rank, step and group of each piece.
      later_than: this step and earlier ones are left out.

    Example:
      >>> held = [("a", 0, 5, "0/2"), ("b", 0, 5, "0/2"), ("b", 1, 5, "0/2"), ("a", 0, 10, "0/2")]
      >>> complete_steps(held, later_than=0)
      [CompleteStep(step=5, group='0/2', holders={0: ['a', 'b'], 1: ['b']})]
    """
    holders: dict[tuple[int, str], dict[int, list[str]]] = {}
    for address, rank, step, group in held:
        if step > later_than:
            # By attempt too: pieces of one step from two attempts may belong to different
            # histories.
            holders.setdefault((step, group), {}).setdefault(rank, []).append(address)
    complete = [
        CompleteStep(step, group, ranks)
        for (step, group), ranks in holders.items()
        if len(ranks) == int(group.partition("/")[2])
    ]
    # of two attempts that took the step, the later one first
    complete.sort(key=lambda step: (step.step, int(step.group.partition("/")[0])), reverse=True)
    return complete


def pack(state: PyTree, step: int, extra: JsonObject, sums: LeafSums | None = None) -> bytearray:
    """Return the shards of this process as bytes: the length of a header, the header as JSON, the
    values.

    A shard that several devices of this process hold is packed once.
    """
    leaf_entries = []
    shards = []
    num_bytes = 0
    for path, leaf in leaves_by_path(state).items():
        shard_entries = []
        for bounds, shard in _local_shards(to_storable(leaf)).items():
            shard.copy_to_host_async()
            shards.append(shard)
            shard_entries.append([bounds, num_bytes, shard.nbytes])
            num_bytes += shard.nbytes
        leaf_entries.append([path, str(describe(leaf)), shard_entries])
    sum_entries = None if sums is None else list(sums.values())  # in the order of the leaves
    header = json.dumps(
        {"step": step, "extra": extra, "leaves": leaf_entries, "sums": sum_entries}
    ).encode()
    # one copy only: a large state leaves little host memory
    position = _LENGTH_BYTES + len(header)
    packed = bytearray(position + num_bytes)
    packed[:position] = len(header).to_bytes(_LENGTH_BYTES, "little") + header
    for shard in shards:
        values = np.ascontiguousarray(np.asarray(shard)).reshape(-1).view(np.uint8)
        packed[position : position + shard.nbytes] = values.data
        position += shard.nbytes
    return packed


def unpack(packed: bytes) -> MemorySnapshot:
    """Return the snapshot that `pack` packed; its values are views of `packed`."""
    start = _LENGTH_BYTES + int.from_bytes(packed[:_LENGTH_BYTES], "little")
    header = json.loads(packed[_LENGTH_BYTES:start])
    values = memoryview(packed)[start:]
    leaves = {}
    for path, leaf_record, shard_entries in header["leaves"]:
        shards = {
            tuple(map(tuple, bounds)): values[offset : offset + size]
            for bounds, offset, size in shard_entries
        }
        leaves[tuple(path)] = (leaf_record, shards)
    sums = None if header["sums"] is None else dict(zip(leaves, header["sums"], strict=True))
    return MemorySnapshot(int(header["step"]), header["extra"], leaves, sums)


def assemble(
    pieces: Iterable[MemorySnapshot], abstract_state: PyTree
) -> tuple[MemorySnapshot | None, str]:
    """Return a snapshot with the shards that the devices of this process need, or None and the
    reason.

    It reads as few pieces as hold these shards. Their values are copied, and each piece is released
    before the next is read, so memory holds the shards of this process and one piece.

    Args:
      pieces: the pieces of the processes that took the snapshot, on any mesh.
      abstract_state: pytree of `jax.ShapeDtypeStruct` with shardings.
    """
    abstract_leaves = leaves_by_path(abstract_state)
    sizes = {
        path: np.dtype(to_storable(leaf).dtype).itemsize for path, leaf in abstract_leaves.items()
    }
    shards = {
        path: {
            bounds: memoryview(bytearray(_num_elements(bounds) * sizes[path]))
            for bounds in local_bounds(to_storable(leaf))
        }
        for path, leaf in abstract_leaves.items()
    }
    # Each element that is copied is counted off. At 0 no further piece is read.
    num_missing = sum(_num_elements(bounds) for needed in shards.values() for bounds in needed)
    copied: set[tuple[LeafPath, Bounds]] = set()
    first_piece = None
    for piece in pieces:
        first_piece = first_piece or piece._replace(leaves={})
        misfit = _misfit(piece, abstract_leaves)
        if misfit:
            return None, misfit
        for path, (_, piece_shards) in piece.leaves.items():
            for piece_bounds, values in piece_shards.items():
                # Several pieces hold a shard that was copied over devices. Counted twice, it would
                # hide a gap.
                if (path, piece_bounds) not in copied:
                    copied.add((path, piece_bounds))
                    num_missing -= sum(
                        _copy_overlap(values, piece_bounds, shard, bounds, sizes[path])
                        for bounds, shard in shards[path].items()
                    )
        if num_missing == 0:
            leaves = {path: (record, shards[path]) for path, (record, _) in piece.leaves.items()}
            return first_piece._replace(leaves=leaves), ""
    return None, "a piece of it is lost or damaged"


def _misfit(piece: MemorySnapshot, abstract_leaves: dict[LeafPath, jax.ShapeDtypeStruct]) -> str:
    """Return why a piece does not fit a state, or ""."""
    if piece.leaves.keys() != abstract_leaves.keys():
        return "it holds other leaves"
    for path, leaf in abstract_leaves.items():
        leaf_record = piece.leaves[path][0]
        wanted = str(describe(leaf))
        if leaf_record != wanted:
            return f"{show(path)} is {leaf_record}, not {wanted}"
    return ""


def local_bounds(leaf: jax.ShapeDtypeStruct) -> list[Bounds]:
    """Return the bounds of the shards of this process."""
    assert leaf.sharding is not None
    indices = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
    bounds = (bounds_of(index, leaf.shape) for index in indices if index is not None)
    return list(dict.fromkeys(bounds))


def shape_of(bounds: Bounds) -> list[int]:
    """Return the shape of a shard."""
    return [stop - start for start, stop in bounds]


def _num_elements(bounds: Bounds) -> int:
    return math.prod(shape_of(bounds))


def _copy_overlap(
    source: memoryview, source_bounds: Bounds, target: memoryview, target_bounds: Bounds, size: int
) -> int:
    """Copy the elements that two shards of a leaf share; return how many.

    Args:
      source: the bytes of the shard to read.
      source_bounds: its position in the leaf.
      target: the bytes of the shard to write.
      target_bounds: its position in the leaf.
      size: bytes of one element.
    """
    overlap = tuple(
        (max(a, c), min(b, d)) for (a, b), (c, d) in zip(source_bounds, target_bounds, strict=True)
    )
    if any(start >= stop for start, stop in overlap):
        return 0

    def overlap_of(shard_bytes: memoryview, bounds: Bounds) -> np.ndarray:
        shard = np.ndarray(shape_of(bounds), f"V{size}", shard_bytes)
        starts = (start for start, _ in bounds)
        slices = (
            slice(a - start, b - start) for (a, b), start in zip(overlap, starts, strict=True)
        )
        return shard[..., *slices]

    overlap_of(target, target_bounds)[...] = overlap_of(source, source_bounds)
    return _num_elements(overlap)


def place_snapshot(snapshot: MemorySnapshot, abstract_state: PyTree) -> PyTree:
    """Return the state of a snapshot, placed on the devices of this process.

    With several processes all must call it.

    Args:
      snapshot: the snapshot that `assemble` put together for these devices.
      abstract_state: pytree of `jax.ShapeDtypeStruct` with shardings.

    Raises:
      DamagedCheckpointError: if a leaf does not have its sum.
    """
    leaves = []
    for path, leaf in leaves_by_path(abstract_state).items():
        _, shards = snapshot.leaves[path]
        stored = to_storable(leaf)

        def read(index: tuple[slice, ...], stored=stored, shards=shards) -> np.ndarray:
            bounds = bounds_of(index, stored.shape)
            return np.ndarray(shape_of(bounds), stored.dtype, shards[bounds])

        leaves.append(from_storable(place(stored, read), describe(leaf)))
    state = with_leaves(abstract_state, leaves)
    check_sums(f"the snapshot of step {snapshot.step}", state, snapshot.sums)
    return state


def _local_shards(leaf: jax.Array | np.ndarray) -> dict[Bounds, jax.Array]:
    shards: dict[Bounds, jax.Array] = {}
    for shard in jax.numpy.asarray(leaf).addressable_shards:
        shards.setdefault(bounds_of(shard.index, leaf.shape), shard.data)
    return shards


def bounds_of(index: Any, shape: tuple[int, ...]) -> Bounds:
    """Return the first index of a shard in each dim, and the one after its last."""
    return tuple(dim_slice.indices(size)[:2] for dim_slice, size in zip(index, shape, strict=True))
