"""Snapshots of the train state in host memory: of each process on its own host and on the next, newer than the disk's.

A snapshot of a process is its shards of every leaf, in one piece, with a SHA-256; it goes to the vault of its own host and to
that of the next one (`runtime.vault`), over sockets, in the background. A step can be restored when the pieces of all
processes that took it are there, whole, each in one of its two vaults: so any one host may be lost, or several that are not
neighbours. Another number of processes, or another mesh, takes what it needs from several pieces.
"""

import json
import logging
import math
import os
import time
from collections.abc import Iterable, Iterator
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
from shardopt.runtime.launch import RESTART

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


class Whole(NamedTuple):
    """A step of which the pieces of all processes are there.

    Attributes:
      step: steps taken.
      group: the attempt that took it and its number of processes, "attempt/count".
      holders: by rank of that attempt, the addresses of the vaults that have its piece.
    """

    step: int
    group: str
    holders: dict[int, list[str]]


class MemoryWriter:
    """Sends snapshots of this process to its two vaults, one at a time, on a thread."""

    def __init__(self, who: str):
        """Find the vaults in the environment, where `shardopt launch` puts them. With several processes all must call it.

        Raises:
          ValueError: if there are none.
        """
        addresses = os.environ.get(vault.ADDRESSES, "")
        if not addresses:
            what = (
                "memory_every needs a process on each host that outlives training and keeps snapshots; there is none."
            )
            fix = (
                "start the job with shardopt launch --max-restarts 3; of several hosts, shardopt vault on each and its "
                f"environment with {vault.ADDRESSES}; or leave memory_every out."
            )
            raise ValueError(format_error(who, what, fix=fix))
        self._who, self._vaults, self._token = who, addresses.split(","), os.environ[vault.TOKEN]
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="snapshots")
        self._pending: Future[None] | None = None
        self._lost: set[str] = set()
        self._attempt = os.environ.get(RESTART, "0")
        if "SHARDOPT_LAUNCHED" not in os.environ:  # nobody counts attempts
            self._attempt = exchange(str(time.time_ns()))[0]

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
        """Return what this process needs of the newest step of which all find what they need; all must call it."""
        like = opt.abstract_state()
        held = self._held() if jax.process_index() == 0 else []
        told = [json.loads(one) for one in exchange(json.dumps([held, later_than]))]
        least = max(later for _, later in told)  # of folders that not all see alike, yet
        for one in whole_steps(told[0][0], later_than=least):
            pieces = self._pieces(one)
            found, problem = assemble(pieces, like)
            if found is None:
                _LOG.warning("%s: the snapshot of step %d is not restored: %s.", self._who, one.step, problem)
            if all(json.loads(good) for good in exchange(json.dumps(found is not None))):
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
        digest, rank = vault.digest(data), jax.process_index()
        group = f"{self._attempt}/{jax.process_count()}"
        for address in self._mine():
            try:
                vault.put(address, self._token, rank, step, group, data, digest)
                self._lost.discard(address)
            except (OSError, EOFError, AuthenticationError) as error:
                text = "%s: the snapshot of step %d did not reach the host at %s (%s: %s); another holds it."
                if address not in self._lost:  # once; the next ones will not either
                    _LOG.warning(text, self._who, step, address, type(error).__name__, error)
                self._lost.add(address)

    def _held(self) -> list[tuple[str, int, int, str]]:
        return [(address, *one) for address in self._vaults for one in vault.held(address, self._token)]

    def _pieces(self, one: Whole) -> Iterator[Snapshot]:
        """Read the pieces of a step, that of this rank first: on the same mesh it is all that is needed."""
        near = self._mine()
        for rank in sorted(one.holders, key=lambda rank: rank != jax.process_index()):
            for address in sorted(one.holders[rank], key=lambda address: address not in near):
                data = vault.get(address, self._token, rank, one.step, one.group)
                if data is not None:
                    yield unpack(data)
                    break


def whole_steps(held: Iterable[tuple[str, int, int, str]], *, later_than: int) -> list[Whole]:
    """Return the steps of which the pieces of all processes are somewhere, the newest first.

    Args:
      held: vault, rank, step and group of each piece.
      later_than: earlier steps, and this one, are left out.

    Example:
      >>> held = [("a", 0, 5, "0/2"), ("b", 0, 5, "0/2"), ("b", 1, 5, "0/2"), ("a", 0, 10, "0/2")]
      >>> whole_steps(held, later_than=0)
      [Whole(step=5, group='0/2', holders={0: ['a', 'b'], 1: ['b']})]
    """
    found: dict[tuple[int, str], dict[int, list[str]]] = {}
    for address, rank, step, group in held:
        if step > later_than:
            found.setdefault((step, group), {}).setdefault(rank, []).append(address)
    whole = [Whole(*key, ranks) for key, ranks in found.items() if len(ranks) == int(key[1].partition("/")[2])]
    return sorted(whole, key=lambda one: (one.step, int(one.group.partition("/")[0])), reverse=True)


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


def assemble(pieces: Iterable[Snapshot], like: PyTree) -> tuple[Snapshot | None, str]:
    """Return what the devices of this process need of a state, from as few of the first pieces as hold it; or why it cannot.

    A piece is let go before the next is read: beside the shards of this process there is one in memory.

    Args:
      pieces: of the processes that took the snapshot, whatever their mesh was.
      like: pytree of `jax.ShapeDtypeStruct` with shardings.
    """
    wanted = leaves_by_path(like)
    needed = {path: _needed(leaf) for path, leaf in wanted.items()}
    shards: dict[LeafPath, dict[Bounds, memoryview]] = {path: {} for path in wanted}
    missing = {(path, mine): _volume(mine) for path, bounds in needed.items() for mine in bounds}
    copied: set[tuple[LeafPath, Bounds]] = set()
    first = None
    for piece in pieces:
        first = first or piece._replace(leaves={})
        if piece.leaves.keys() != wanted.keys():
            return None, "it holds other leaves"
        for path, leaf in wanted.items():
            kind, held = piece.leaves[path]
            if kind != str(describe(leaf)):
                return None, f"{show(path)} is {kind}, not {describe(leaf)}"
            size = np.dtype(plain(leaf).dtype).itemsize
            for mine in needed[path]:
                if mine in held and missing[path, mine]:
                    shards[path][mine], missing[path, mine] = held[mine], 0
                for theirs in held if missing[path, mine] else ():
                    if (path, theirs) not in copied:
                        into = shards[path].setdefault(mine, memoryview(bytearray(_volume(mine) * size)))
                        missing[path, mine] -= _copy_overlap(held[theirs], theirs, into, mine, size)
            copied |= {(path, theirs) for theirs in held}
        if not any(missing.values()):
            leaves = {path: (str(describe(leaf)), shards[path]) for path, leaf in wanted.items()}
            return first._replace(leaves=leaves), ""
    return None, "a piece of it is lost or damaged"


def _needed(leaf: jax.ShapeDtypeStruct) -> list[Bounds]:
    """Return where the shards of this process lie."""
    flat = plain(leaf)
    assert flat.sharding is not None
    here = flat.sharding.addressable_devices_indices_map(flat.shape).values()
    return list(dict.fromkeys(_bounds(index, flat.shape) for index in here if index is not None))


def _volume(bounds: Bounds) -> int:
    return math.prod(stop - start for start, stop in bounds)


def _copy_overlap(source: memoryview, theirs: Bounds, target: memoryview, mine: Bounds, size: int) -> int:
    """Copy what two shards of a leaf have in common, elements of `size` bytes; return how many elements that were."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(theirs, mine, strict=True))
    if any(start >= stop for start, stop in common):
        return 0

    def within(data: memoryview, bounds: Bounds) -> np.ndarray:
        whole = np.frombuffer(data, f"V{size}").reshape([stop - start for start, stop in bounds])
        return whole[tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(common, bounds, strict=True))]

    within(target, mine)[...] = within(source, theirs)
    return _volume(common)


def place_snapshot(found: Snapshot, like: PyTree) -> PyTree:
    """Return the state of a snapshot that `assemble` put together for these devices, on them."""
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
