"""Snapshots of the train state in host memory: of each process on its own host and on the next, newer than the disk's.

A snapshot of a process is its shards of every leaf, in one piece, with a SHA-256; it goes to the vault of its own host and to
that of the next one (`runtime.vault`), over sockets, in the background. A step can be restored when each process finds its
own piece of it, whole, in one of the two: so any one host may be lost, or several that are not neighbours.
"""

import json
import logging
import os
from concurrent.futures import Future, ThreadPoolExecutor, wait
from multiprocessing import AuthenticationError
from typing import NamedTuple

import jax
import numpy as np

from shardopt.checkpoint.multihost import exchange
from shardopt.checkpoint.store import describe, place, plain, unplain
from shardopt.checkpoint.tree import Json, LeafPath, leaves_by_path, show
from shardopt.core.errors import format_error
from shardopt.core.types import PyTree
from shardopt.engine.optimizer import ShardedOptimizer
from shardopt.runtime import vault

_LOG = logging.getLogger(__name__)
_PATIENCE = 30.0
"""Seconds that a snapshot waits for the one before: a host that is lost without a word must not hold up the run."""
_HEAD = 8
"""Bytes of the length of the header."""


Bounds = tuple[tuple[int, int], ...]
"""Where a shard lies in its leaf: first and one past the last, in each dim."""


class Snapshot(NamedTuple):
    """The piece of a train state that belongs to this process, in host memory.

    Attributes:
      step: steps taken.
      extra: what was kept beside the state.
      leaves: by key path the leaf's record as text, and its shards.
    """

    step: int
    extra: dict[str, Json]
    leaves: dict[LeafPath, tuple[str, dict[Bounds, memoryview]]]


class MemoryWriter:
    """Sends snapshots of this process to its two vaults, one at a time, on a thread."""

    def __init__(self, who: str):
        """Find the vaults in the environment, where `shardopt launch` puts them.

        Raises:
          ValueError: if there are none.
        """
        addresses = os.environ.get(vault.ADDRESSES, "")
        if not addresses:
            what = (
                "memory_every needs a process on each host that outlives training and keeps snapshots; there is none."
            )
            fix = "start the job with shardopt launch --max-restarts 3, or leave memory_every out."
            raise ValueError(format_error(who, what, fix=fix))
        self._who, self._vaults, self._token = who, addresses.split(","), os.environ[vault.TOKEN]
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="snapshots")
        self._pending: Future[None] | None = None

    def save(self, state: PyTree, step: int, extra: dict[str, Json]) -> None:
        """Copy this process's shards to the host and send them in the background; wait for the one before, for a while.

        The state may be donated when this returns. A vault that cannot be reached costs a warning, not the run.
        """
        if self._pending is not None and wait([self._pending], _PATIENCE).not_done:
            text = "%s: the snapshot of step %d is left out: for %.0f s the one before could not be sent."
            _LOG.warning(text, self._who, step, _PATIENCE)
            return
        self._pending = self._thread.submit(self._send, pack(state, step, extra), step)

    def newest(self, opt: ShardedOptimizer, later_than: int) -> Snapshot | None:
        """Return this process's piece of the newest step of which every process finds its own; all must call it."""
        rank, like = jax.process_index(), opt.abstract_state()
        held = {step for address in self._mine() for step in vault.steps(address, self._token, rank)}
        told = [json.loads(one) for one in exchange(json.dumps([sorted(held), later_than]))]
        common = set.intersection(*(set(steps) for steps, _ in told))
        least = max(later for _, later in told)  # of folders that not all see alike, yet
        for step in sorted((step for step in common if step > least), reverse=True):
            found = self._read(rank, step, like)
            if all(json.loads(one) for one in exchange(json.dumps(found is not None))):
                assert found is not None
                return found._replace(extra=json.loads(exchange(json.dumps(found.extra))[0]))
        return None

    def close(self) -> None:
        """Wait until the last snapshot was sent, or could not be."""
        self._thread.shutdown()

    def _mine(self) -> list[str]:
        count = len(self._vaults)
        host = jax.process_index() * count // jax.process_count()
        return list(dict.fromkeys((self._vaults[host], self._vaults[(host + 1) % count])))

    def _send(self, data: bytearray, step: int) -> None:
        digest = vault.digest(data)
        for address in self._mine():
            try:
                vault.put(address, self._token, jax.process_index(), step, data, digest)
            except (OSError, EOFError, AuthenticationError) as error:
                text = "%s: the snapshot of step %d did not reach the host at %s (%s: %s); another holds it."
                _LOG.warning(text, self._who, step, address, type(error).__name__, error)

    def _read(self, rank: int, step: int, like: PyTree) -> Snapshot | None:
        for address in self._mine():
            data = vault.get(address, self._token, rank, step)
            if data is not None:
                found = unpack(data)
                if problem := mismatch(found, like):
                    _LOG.warning("%s: the snapshot of step %d is not restored: %s.", self._who, step, problem)
                    return None
                return found
        return None


def pack(state: PyTree, step: int, extra: dict[str, Json]) -> bytearray:
    """Return the shards of this process in one piece: the length of a header, the header as JSON, the numbers.

    Shards that several devices of this process hold alike are in it once.
    """
    by_path = leaves_by_path(state)
    pieces = {path: _pieces(plain(leaf)) for path, leaf in by_path.items()}
    leaves, offset = [], 0
    for path, leaf in by_path.items():
        where = []
        for bounds, shard in pieces[path].items():
            shard.copy_to_host_async()
            where.append([list(map(list, bounds)), offset, shard.nbytes])
            offset += shard.nbytes
        leaves.append([list(path), str(describe(leaf)), where])
    header = json.dumps({"step": step, "extra": extra, "leaves": leaves}).encode()
    data = bytearray(_HEAD + len(header) + offset)  # host memory is what a large state is short of: one copy
    data[:_HEAD] = len(header).to_bytes(_HEAD, "little")
    at = _HEAD + len(header)
    data[_HEAD:at] = header
    for shard in (shard for shards in pieces.values() for shard in shards.values()):
        data[at : at + shard.nbytes] = np.ascontiguousarray(np.asarray(shard)).reshape(-1).view(np.uint8).data
        at += shard.nbytes
    return data


def unpack(data: bytes) -> Snapshot:
    """Return what `pack` packed; the numbers stay where they are."""
    length = int.from_bytes(data[:_HEAD], "little")
    header, numbers = json.loads(data[_HEAD : _HEAD + length]), memoryview(data)[_HEAD + length :]
    leaves = {}
    for path, kind, where in header["leaves"]:
        shards = {tuple((a, b) for a, b in bounds): numbers[at : at + size] for bounds, at, size in where}
        leaves[tuple(path)] = (kind, shards)
    return Snapshot(int(header["step"]), header["extra"], leaves)


def mismatch(found: Snapshot, like: PyTree) -> str:
    """Return why a snapshot cannot become such a state on these devices; "" where it can.

    Args:
      found: the piece of this process.
      like: pytree of `jax.ShapeDtypeStruct` with shardings.
    """
    wanted = leaves_by_path(like)
    if found.leaves.keys() != wanted.keys():
        return "it holds other leaves"
    for path, leaf in wanted.items():
        kind, shards = found.leaves[path]
        if kind != str(describe(leaf)):
            return f"{show(path)} is {kind}, not {describe(leaf)}"
        flat = plain(leaf)
        here = flat.sharding.addressable_devices_indices_map(flat.shape).values()
        if not {_bounds(index, flat.shape) for index in here} <= shards.keys():
            return f"this process held other shards of {show(path)}"
    return ""


def place_snapshot(found: Snapshot, like: PyTree) -> PyTree:
    """Return the state of a snapshot that fits, on the devices."""
    leaves = []
    for path, leaf in leaves_by_path(like).items():
        _, shards = found.leaves[path]
        flat = plain(leaf)

        def read(index: tuple[slice, ...], flat=flat, shards=shards) -> np.ndarray:
            bounds = _bounds(index, flat.shape)
            return np.frombuffer(shards[bounds], flat.dtype).reshape([stop - start for start, stop in bounds])

        leaves.append(unplain(place(flat, read), describe(leaf)))
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _pieces(leaf: jax.Array | np.ndarray) -> dict[Bounds, jax.Array]:
    found: dict[Bounds, jax.Array] = {}
    for shard in jax.numpy.asarray(leaf).addressable_shards:
        found.setdefault(_bounds(shard.index, leaf.shape), shard.data)
    return found


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
    return tuple(one.indices(size)[:2] for one, size in zip(index, shape, strict=True))
