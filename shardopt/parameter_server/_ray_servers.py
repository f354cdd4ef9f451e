"""Several servers on Ray: each is a process with its shard.

The coordinator orders their updates and sends no arrays.

A push is accepted when every server has stored its range of the gradient in Ray's object store.
These objects belong to the coordinator, so they outlive the worker and the server. A server that is
killed restarts from its last snapshot and repeats the later updates: nothing is lost. Only when the
coordinator dies does the run go back to a checkpoint.
"""

import hmac
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
import ray
from ray import ObjectRef
from ray.cloudpickle import cloudpickle
from ray.exceptions import RayActorError, RayError

from shardopt.core._errors import format_error
from shardopt.core._types import PyTree, Weighted, abstract
from shardopt.parameter_server._apply import Programs, UpdateResult, metrics_of, run_arguments
from shardopt.parameter_server._mathematics import ServerArrays
from shardopt.parameter_server._settings import begin_process
from shardopt.parameter_server._sharded import ServerShards, shapes_of, shard
from shardopt.parameter_server._updates import Update, trained, untrained
from shardopt.step._inputs import copied

SNAPSHOT_EVERY = 8
"""Updates between two snapshots of a server. The object store has all pushes since the second last
snapshot.
"""
TRIES = 5
"""How often servers are restarted for one call, before its error is raised."""

Value = TypeVar("Value")


def check_token(run_token: str, call_token: str) -> None:
    """Refuse a call without the token of the run.

    Raises:
      PermissionError: if the call has another token.
    """
    if not hmac.compare_digest(run_token.encode(), str(call_token).encode()):
        problem = "a call without the token of this run was refused."
        raise PermissionError(
            format_error("parameter_server", problem, fix="start workers through opt.run only.")
        )


@dataclass(eq=False)
class StoredGradient:
    """The gradient of a push in the object store: for each server a reference to its range.

    `nbytes` of all ranges.
    """

    refs: list[ObjectRef]
    nbytes: int


@dataclass(eq=False)
class StoredParams:
    """The parameters after an update: for each server a reference to its shard, which changes if
    the server restarts.
    """

    version: int
    refs: list[ObjectRef]


class RemoteParams(NamedTuple):
    """Parameters that are on several servers.

    Attributes:
      stored: references to the trained parameters.
      abstract: all else: the other parameters, and shapes and dtypes in place of the shards of the
        trained ones.
    """

    stored: StoredParams
    abstract: ServerShards

    def fetch(self, restart_servers: Callable[[], object]) -> PyTree:
        """Return the parameters as users know them.

        After an error call `restart_servers`, which may renew `stored`.
        """
        shards = with_restarts(lambda: ray.get(self.stored.refs), restart_servers)
        return replace(self.abstract, trees=shards).full()


def with_restarts(call: Callable[[], Value], restart_servers: Callable[[], object]) -> Value:
    """Return `call()`.

    While it fails, restart the servers that have died and call it again, at most `TRIES` times.
    """
    for _ in range(TRIES):
        try:
            return call()
        except RayError:
            restart_servers()
    return call()


class JournalEntry(NamedTuple):
    """The inputs of an update, with which a restarted server repeats it.

    Attributes:
      number: the number of the update, from 1; it is the version that the update makes.
      pushed: loss, metrics and rows of each push.
      grads: the gradient of each push.
      pulled: the parameters that the push was computed from, if the rule needs them.
      delay: versions between the pull and the push.
      sums: for each server the terms that it adds to the sums over servers.
    """

    number: int
    pushed: list[tuple[Weighted, Mapping[str, Any], int]]
    grads: list[StoredGradient]
    pulled: StoredParams | None
    delay: int
    sums: list[ObjectRef]


class ShardProcess:
    """One of several servers: its shard of the parameters, and the optimizer state of this shard."""

    def __init__(self, settings: dict[str, object], token: str, programs: bytes):
        begin_process(settings, devices=1, platform="cpu")
        self.token = token
        self.programs: Programs = cloudpickle.loads(programs)()
        self.version, self.shard, self.states = -1, None, (None, None)

    def begin(self, token: str, shard: PyTree) -> PyTree:
        """Begin with this shard of the parameters; return it."""
        check_token(self.token, token)
        self.shard = jax.device_put(shard)
        self.version, self.states = 0, self.programs.begin(self.shard)
        return shard

    def adopt(self, token: str, snapshot: tuple[int, PyTree, PyTree, PyTree]) -> PyTree:
        """Continue from a snapshot; return its shard of the parameters."""
        check_token(self.token, token)
        # The states are copied: arrays from Ray are memory of its object store, which the next
        # update would take over.
        version, shard, *states = snapshot
        self.version, self.shard, self.states = (
            version,
            jax.device_put(shard),
            tuple(jax.tree.map(_copy, states)),
        )
        return shard

    def hold(self, token: str, grads: PyTree) -> tuple[bool, PyTree]:
        """Return a gradient: as the result of a call it belongs to the coordinator, which made the
        call.
        """
        check_token(self.token, token)
        return True, grads

    def sums(
        self, token: str, number: int, pushed: list[Any], delay: int, pulled: PyTree, *grads: PyTree
    ) -> list[Any]:
        """Return the terms that this shard adds to the sums over servers."""
        return jax.device_get(
            self.programs.sums(self._arguments(token, number, pushed, delay, pulled, grads))
        )

    def apply(
        self,
        token: str,
        number: int,
        pushed: list[Any],
        delay: int,
        pulled: PyTree,
        *grads_and_sums: Any,
    ) -> PyTree:
        """Make an update; return the new shard of the parameters."""
        grads, server_sums = grads_and_sums[: len(pushed)], grads_and_sums[len(pushed) :]
        args = self._arguments(token, number, pushed, delay, pulled, grads)
        result = self.programs.finish(list(server_sums), args)
        self.shard, self.states, self.version = (
            result.params,
            (result.opt_state, result.rule_state),
            number,
        )
        return jax.device_get(result.params)

    def _arguments(
        self,
        token: str,
        number: int,
        pushed: list[Any],
        delay: int,
        pulled: PyTree,
        grads: Sequence[PyTree],
    ) -> tuple[Any, ...]:
        check_token(self.token, token)
        if number != self.version + 1:
            raise AssertionError(f"update {number} comes to a server that has made {self.version}")
        updates = [
            Update(g, loss, metrics, rows)
            for g, (loss, metrics, rows) in zip(grads, pushed, strict=True)
        ]
        return run_arguments((self.shard, *self.states), updates, pulled, delay)

    def current_version(self, token: str) -> int:
        """Return the number of updates that were made."""
        check_token(self.token, token)
        return self.version

    def snapshot(self, token: str) -> tuple[int, tuple[int, PyTree, PyTree, PyTree]]:
        """Return the number of updates that were made, and all that `adopt` needs."""
        check_token(self.token, token)
        return self.version, (self.version, *jax.device_get((self.shard, *self.states)))


def _copy(leaf: np.ndarray) -> jax.Array:
    return jax.numpy.array(leaf, copy=True)


@dataclass
class RayServers:
    """The coordinator's handle of several servers: the `Mathematics` of their updates.

    Every call takes its lock.

    Attributes:
      settings: the settings that `begin_process` takes.
      token: the token of the run.
      programs: `programs() -> Programs`, pickled.
      servers: the number of servers.
      has_sums: `has_sums(shard)` of these programs.
    """

    settings: dict[str, object]
    token: str
    programs: bytes
    servers: int
    has_sums: Callable[[PyTree], bool]

    def __post_init__(self):
        self.sums_needed = False
        self.lock = threading.RLock()
        self.journal: list[JournalEntry] = []
        self.versions: weakref.WeakValueDictionary[int, StoredParams] = (
            weakref.WeakValueDictionary()
        )
        self.killed: list[int] = []
        # For each server its version, the name of the `ShardProcess` method that reads the
        # snapshot, and the snapshot.
        self.snapshots: list[tuple[int, str, ObjectRef]] = []
        self.pending_snapshots: list[tuple[ObjectRef, ObjectRef]] = []
        self.version, self.nbytes = 0, 0
        self.processes: list[Any] = [self._start() for _ in range(self.servers)]

    def begin(self, params: PyTree) -> ServerArrays:
        """Send each server its shard."""
        params = jax.device_get(copied(params))
        shards = shard(trained(params), self.servers)
        return self._begin(
            "begin", shards, ServerShards(shards, untrained(params), shapes_of(trained(params)))
        )

    def adopt(self, arrays: ServerArrays) -> ServerArrays:
        """Send each server its shard of a checkpoint, which counts as update 0 from then on."""
        params, opt_state, rule_state = jax.device_get(arrays)
        return self._begin(
            "adopt",
            [(0, *arrays) for arrays in zip(params.trees, opt_state, rule_state, strict=True)],
            params,
        )

    def _begin(
        self, method: str, snapshots: Sequence[PyTree], params: ServerShards
    ) -> ServerArrays:
        snapshot_refs = [ray.put(snapshot) for snapshot in snapshots]
        params = replace(params, trees=abstract(params.trees))
        with self.lock:
            self.version, self.journal, self.pending_snapshots = 0, [], []
            self.snapshots = [(0, method, ref) for ref in snapshot_refs]
            self.sums_needed = self.has_sums(params.trees[0])
            self.nbytes = sum(
                leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params.trees)
            )
            pairs = zip(self.processes, snapshot_refs, strict=True)
            refs = [getattr(process, method).remote(self.token, ref) for process, ref in pairs]
            stored = self.versions[0] = StoredParams(0, refs)
        return RemoteParams(stored, params), (), ()

    def changed_by(self, update: Update, params: RemoteParams) -> PyTree:
        """Return shapes and dtypes of the trained parameters: an update changes all."""
        return params.abstract.trained_types()

    def full_params(self, params: RemoteParams) -> PyTree:
        """Return the unsharded parameters, from all servers."""
        return params.fetch(self.restart_lost_servers)

    def check(self, update: Update | None, params: RemoteParams, worker: int) -> Update:
        """Refuse an update whose gradient is not stored with every server."""
        if (
            not isinstance(update, Update)
            or not isinstance(update.grads, StoredGradient)
            or update.is_finite is None
        ):
            problem = (
                f"worker {worker} must push an Update that the servers hold, got"
                f" {type(update).__name__}."
            )
            raise TypeError(format_error("parameter_server", problem))
        return update

    def apply(
        self,
        arrays: ServerArrays,
        updates: Sequence[Update],
        pulled: RemoteParams | None,
        delay: int,
    ) -> UpdateResult:
        """Start an update on all servers, in order, without waiting for its end."""
        with self.lock:
            pushed = jax.device_get(
                [(update.loss, dict(update.metrics), update.rows) for update in updates]
            )
            pulled_params = None if pulled is None else pulled.stored
            self.version += 1
            grads = [update.grads for update in updates]
            entry = JournalEntry(self.version, pushed, grads, pulled_params, delay, [])
            self.journal.append(entry)
            all_servers = range(self.servers)
            if self.sums_needed:
                entry.sums.extend(self._sums(entry, i) for i in all_servers)
            stored = StoredParams(self.version, [self._apply(entry, i) for i in all_servers])
            self.versions[self.version] = stored
            if self.version % SNAPSHOT_EVERY == 0:
                self._renew_snapshots()
        return UpdateResult(arrays[0]._replace(stored=stored), (), (), metrics_of(updates))

    def copy(self, arrays: ServerArrays) -> ServerArrays:
        """Return the parameters and states of all servers, after the last update."""

        def read_snapshots() -> list[Any]:
            snapshots = ray.get([process.snapshot.remote(self.token) for process in self.processes])
            if any(version != self.version for version, _ in snapshots):
                raise RayError("a server has not made all updates")
            return snapshots

        with self.lock:
            snapshots = with_restarts(read_snapshots, self.restart_lost_servers)
        shards, opt_states, rule_states = zip(
            *(snapshot[1:] for _, snapshot in snapshots), strict=True
        )
        params: RemoteParams = arrays[0]
        return replace(params.abstract, trees=shards), opt_states, rule_states

    def hold(self, grads: Sequence[ObjectRef]) -> StoredGradient:
        """Take a gradient over from its worker, which may die then.

        Wait until every server has stored its range.
        """

        def store() -> StoredGradient:
            pairs = zip(self.processes, grads, strict=True)
            answers = [
                process.hold.options(num_returns=2).remote(self.token, grad)
                for process, grad in pairs
            ]
            # the gradients themselves stay in the object store
            ray.get([is_stored for is_stored, _ in answers])
            return StoredGradient([ref for _, ref in answers], self.nbytes)

        return with_restarts(store, self.restart_lost_servers)

    def restart_lost_servers(self) -> None:
        """Restart the servers that have died from their snapshots, and repeat the updates that a
        server has not made.
        """
        with self.lock:
            versions = []
            for i in range(self.servers):
                try:
                    versions.append(ray.get(self.processes[i].current_version.remote(self.token)))
                except RayActorError:
                    version, method, snapshot = self.snapshots[i]
                    self.killed.append(i)
                    self.processes[i] = self._start()
                    shard_ref = getattr(self.processes[i], method).remote(self.token, snapshot)
                    if version in self.versions:
                        self.versions[version].refs[i] = shard_ref
                    versions.append(version)
            self.pending_snapshots = []
            for entry in self.journal:
                behind = [i for i in range(self.servers) if versions[i] < entry.number]
                for i in behind:
                    if self.sums_needed and _failed(entry.sums[i]):
                        entry.sums[i] = self._sums(entry, i)
                for i in behind:
                    shard_ref = self._apply(entry, i)
                    if entry.number in self.versions:
                        self.versions[entry.number].refs[i] = shard_ref

    def _start(self) -> Any:
        process = ray.remote(ShardProcess).options(num_cpus=1)
        return process.remote(self.settings, self.token, self.programs)

    def _sums(self, entry: JournalEntry, i: int) -> ObjectRef:
        return self.processes[i].sums.remote(*self._arguments(entry, i))

    def _apply(self, entry: JournalEntry, i: int) -> ObjectRef:
        return self.processes[i].apply.remote(*self._arguments(entry, i), *entry.sums)

    def _arguments(self, entry: JournalEntry, i: int) -> list[Any]:
        pulled = None if entry.pulled is None else entry.pulled.refs[i]
        grads = [gradient.refs[i] for gradient in entry.grads]
        return [self.token, entry.number, entry.pushed, entry.delay, pulled, *grads]

    def _renew_snapshots(self) -> None:
        """Use the pending snapshots, forget the updates before them, and begin new snapshots."""
        if self.pending_snapshots:
            try:
                versions = ray.get([version for version, _ in self.pending_snapshots])
                pairs = zip(versions, self.pending_snapshots, strict=True)
                self.snapshots = [(version, "adopt", snapshot) for version, (_, snapshot) in pairs]
                self.journal = [entry for entry in self.journal if entry.number > min(versions)]
            except RayError:
                self.restart_lost_servers()
        self.pending_snapshots = [
            process.snapshot.options(num_returns=2).remote(self.token) for process in self.processes
        ]


def _failed(ref: ObjectRef) -> bool:
    """Wait for an object, and return whether its computation has failed."""
    try:
        ray.get(ref)
        return False
    except RayError:
        return True
