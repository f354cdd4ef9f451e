"""Several servers on Ray: each a process with its part; the coordinator orders their updates and sends no arrays.

A push counts when every server holds its range of it in Ray's object store, in objects of the coordinator: these outlive the
worker, and the server too. So a server that is killed starts again from its last snapshot, does the updates after it
again, and nothing is lost; only when the coordinator dies, the run goes back to a checkpoint.
"""

import hmac
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
import numpy as np

from shardopt.core.errors import format_error
from shardopt.core.types import PyTree, Weighted
from shardopt.parameter_server.apply import Applied, Mathematics, PartPrograms, metrics_of, own
from shardopt.parameter_server.sharded import Parts, like, merged, shapes_of, shard, unshard
from shardopt.parameter_server.updates import Update, trained, untrained

if TYPE_CHECKING:
    from ray import ObjectRef

KEEP_EVERY = 8
"""Updates between two snapshots of a server; pushes since the one before the last are kept in the object store."""
TRIES = 5
"""How often servers are started again for one question, before its error is the caller's."""

Value = TypeVar("Value")


def check_token(mine: str, given: str) -> None:
    """Refuse a call without the token of the run.

    Raises:
      PermissionError: if it is another one.
    """
    if not hmac.compare_digest(mine.encode(), str(given).encode()):
        what = "a call without the token of this run was refused."
        raise PermissionError(format_error("parameter_server", what, fix="start workers through opt.run only."))


class Held:
    """The gradient of a push, for each server a reference to its range; `nbytes` of all."""

    def __init__(self, refs: "list[ObjectRef]", nbytes: int):
        self.refs, self.nbytes = refs, nbytes


class Version:
    """The parameters after an update, for each server a reference; when a server is started again it gets another."""

    def __init__(self, number: int, refs: "list[ObjectRef]"):
        self.number, self.refs = number, refs


class RemoteParams(NamedTuple):
    """Parameters that are on several servers.

    Attributes:
      version: where they are.
      rest: those that are not trained, None for the others.
      part: shapes and dtypes of one server's part.
      shapes: of the whole trained leaves.
    """

    version: Version
    rest: PyTree
    part: PyTree
    shapes: tuple[tuple[int, ...], ...]


class Entry(NamedTuple):
    """An update, as it can be done again."""

    number: int
    pushed: list[tuple[Weighted, Mapping[str, Any], int]]
    grads: list[Held]
    pulled: Version | None
    delay: int
    sums: "list[ObjectRef]"


class PartProcess:
    """One of several servers: its range of the parameters, and the optimizer state of these."""

    def __init__(self, begin_process: Callable[..., None], settings: dict[str, object], token: str, programs: bytes):
        from ray import cloudpickle

        begin_process(settings, devices=1, platform="cpu")
        self.token = token
        self.programs: PartPrograms = cloudpickle.loads(programs)()
        self.at, self.part, self.states = -1, None, (None, None)

    def begin(self, token: str, part: PyTree) -> PyTree:
        """Begin with these parameters; return them."""
        check_token(self.token, token)
        self.part = jax.device_put(part)
        self.at, self.states = 0, self.programs.begin(self.part)
        return part

    def adopt(self, token: str, kept: tuple[int, PyTree, PyTree, PyTree]) -> PyTree:
        """Go on from a snapshot; return the parameters."""
        check_token(self.token, token)
        # Copies: what Ray hands out is memory of its store, and the next update takes over that of the states.
        number, part, *states = kept
        self.at, self.part, self.states = number, jax.device_put(part), tuple(jax.tree.map(_copy, states))
        return part

    def hold(self, token: str, grads: PyTree) -> tuple[bool, PyTree]:
        """Return a gradient, which thereby belongs to the coordinator."""
        check_token(self.token, token)
        return True, grads

    def sums(self, token: str, number: int, pushed: list[Any], delay: int, pulled: PyTree, *grads: PyTree) -> list[Any]:
        """Return what this part adds to the sums over servers."""
        args = self._arguments(token, number, pushed, delay, pulled, grads)
        return jax.device_get(self.programs.sums(*args))

    def apply(
        self, token: str, number: int, pushed: list[Any], delay: int, pulled: PyTree, *grads_and_sums: Any
    ) -> PyTree:
        """Make an update; return the parameters."""
        grads, sums_of = grads_and_sums[: len(pushed)], grads_and_sums[len(pushed) :]
        args = self._arguments(token, number, pushed, delay, pulled, grads)
        found = self.programs.apply(list(sums_of), *args)
        self.part, self.states, self.at = found.params, (found.opt_state, found.rule_state), number
        return jax.device_get(found.params)

    def _arguments(
        self, token: str, number: int, pushed: list[Any], delay: int, pulled: PyTree, grads: Sequence[PyTree]
    ) -> tuple[Any, ...]:
        check_token(self.token, token)
        if number != self.at + 1:
            raise AssertionError(f"update {number} comes to a server that has made {self.at}")
        updates = [Update(g, loss, metrics, rows) for g, (loss, metrics, rows) in zip(grads, pushed, strict=True)]
        return self.part, *self.states, updates, pulled, delay

    def reached(self, token: str) -> int:
        """Return how many updates were made."""
        check_token(self.token, token)
        return self.at

    def snapshot(self, token: str) -> tuple[int, tuple[int, PyTree, PyTree, PyTree]]:
        """Return how many updates were made, and all that the server has."""
        check_token(self.token, token)
        return self.at, (self.at, *jax.device_get((self.part, *self.states)))


def _copy(leaf: np.ndarray) -> jax.Array:
    return jax.numpy.array(leaf, copy=True)


class RayServers:
    """The servers as the coordinator sees them. Every call takes their lock.

    Args:
      begin_process: sets up jax in a new process.
      settings: its argument.
      token: of the run.
      programs: `programs() -> PartPrograms`, pickled.
      servers: how many.
      has_sums: `has_sums(part)`, of these programs.
    """

    def __init__(
        self,
        begin_process: Callable[..., None],
        settings: dict[str, object],
        token: str,
        programs: bytes,
        servers: int,
        has_sums: Callable[[PyTree], bool],
    ):
        self.begin_process, self.settings, self.token, self.programs = begin_process, settings, token, programs
        self.servers, self.has_sums, self.sums_needed = servers, has_sums, False
        self.lock = threading.RLock()
        self.journal: list[Entry] = []
        self.versions: weakref.WeakValueDictionary[int, Version] = weakref.WeakValueDictionary()
        self.killed: list[int] = []
        self.kept: list[tuple[int, str, ObjectRef]] = []  # (updates made, what reads it, where it is)
        self.keeping: list[tuple[ObjectRef, ObjectRef]] = []
        self.number, self.nbytes = 0, 0
        self.parts: list[Any] = [self._start() for _ in range(servers)]

    def mathematics(self) -> Mathematics:
        """Return what `make_server` needs to know of them."""
        return Mathematics(self.begin, self.adopt, self.like, self.whole, self.check, self.apply, self.copy)

    def begin(self, params: PyTree) -> tuple[RemoteParams, PyTree, PyTree]:
        """Give each server its part."""
        import ray

        params = jax.device_get(jax.tree.map(own, params))
        trees = shard(trained(params), self.servers)
        shape = jax.eval_shape(lambda part: part, trees[0])
        return self._begin(0, "begin", [ray.put(tree) for tree in trees], shape, params, shapes_of(trained(params)))

    def adopt(self, params: Parts, opt_state: PyTree, rule_state: PyTree) -> tuple[RemoteParams, PyTree, PyTree]:
        """Give each server its part of a checkpoint, which counts as update 0 from here on."""
        import ray

        params, opt_state, rule_state = jax.device_get((params, opt_state, rule_state))
        kept = [ray.put((0, *one)) for one in zip(params.trees, opt_state, rule_state, strict=True)]
        shape = jax.eval_shape(lambda part: part, params.trees[0])
        return self._begin(0, "adopt", kept, shape, params.rest, params.shapes)

    def _begin(
        self, number: int, how: str, given: "list[ObjectRef]", part: PyTree, rest: PyTree, shapes: Any
    ) -> tuple[RemoteParams, PyTree, PyTree]:
        with self.lock:
            self.number, self.journal, self.keeping = number, [], []
            self.kept = [(number, how, ref) for ref in given]
            self.sums_needed = self.has_sums(part)
            self.nbytes = self.servers * sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(part))
            refs = [getattr(one, how).remote(self.token, ref) for one, ref in zip(self.parts, given, strict=True)]
            version = self.versions[number] = Version(number, refs)
        return RemoteParams(version, untrained(rest), part, shapes), (), ()

    def like(self, params: RemoteParams) -> PyTree:
        """Return shapes and dtypes."""
        return like(Parts((params.part,), params.rest, params.shapes))

    def whole(self, params: RemoteParams) -> PyTree:
        """Return the parameters, from all servers."""
        return merged(unshard(self.fetch(params.version), params.shapes), params.rest)

    def check(self, update: Update | None, params: RemoteParams, worker: int) -> Update:
        """Refuse what is not held by every server."""
        if not isinstance(update, Update) or not isinstance(update.grads, Held) or update.is_finite is None:
            what = f"worker {worker} must push an Update that the servers hold, got {type(update).__name__}."
            raise TypeError(format_error("parameter_server", what))
        return update

    def apply(
        self,
        params: RemoteParams,
        opt_state: PyTree,
        rule_state: PyTree,
        updates: Sequence[Update],
        pulled: RemoteParams | None,
        delay: int,
    ) -> Applied:
        """Let all servers make an update, in order; nobody waits for it."""
        with self.lock:
            pushed = jax.device_get([(one.loss, dict(one.metrics), one.rows) for one in updates])
            old = None if pulled is None else pulled.version
            self.number += 1
            entry = Entry(self.number, pushed, [one.grads for one in updates], old, delay, [])
            self.journal.append(entry)
            everywhere = range(self.servers)
            if self.sums_needed:
                entry.sums.extend(self._sums(entry, i) for i in everywhere)
            version = Version(self.number, [self._apply(entry, i) for i in everywhere])
            self.versions[self.number] = version
            if self.number % KEEP_EVERY == 0:
                self._keep()
        return Applied(params._replace(version=version), (), (), metrics_of(updates))

    def copy(self, params: RemoteParams, opt_state: PyTree, rule_state: PyTree) -> tuple[Parts, PyTree, PyTree]:
        """Return all that the servers have, after the last update."""
        import ray
        from ray.exceptions import RayError

        def snapshots() -> list[Any]:
            found = ray.get([one.snapshot.remote(self.token) for one in self.parts])
            if any(number != self.number for number, _ in found):
                raise RayError("a server has not made all updates")
            return found

        with self.lock:
            found = self._asked(snapshots)
        parts, opt_states, rule_states = zip(*(kept[1:] for _, kept in found), strict=True)
        return Parts(tuple(parts), params.rest, params.shapes), opt_states, rule_states

    def hold(self, grads: "Sequence[ObjectRef]") -> Held:
        """Take a gradient over from its worker, which may die now; wait until every server has its range."""
        import ray

        def held() -> Held:
            pairs = zip(self.parts, grads, strict=True)
            there = [one.hold.options(num_returns=2).remote(self.token, part) for one, part in pairs]
            ray.get([done for done, _ in there])  # the gradients themselves stay where they are
            return Held([ref for _, ref in there], self.nbytes)

        return self._asked(held)

    def fetch(self, version: Version) -> list[PyTree]:
        """Return the parts of a version."""
        import ray

        return self._asked(lambda: ray.get(version.refs))

    def _asked(self, ask: Callable[[], Value]) -> Value:
        """Ask the servers; those that are gone are started again, but not for ever."""
        from ray.exceptions import RayError

        for _ in range(TRIES):
            try:
                return ask()
            except RayError:
                self.revive()
        return ask()

    def revive(self) -> None:
        """Start servers that are gone again from their snapshots, and let all do what they have not done."""
        import ray
        from ray.exceptions import RayActorError

        with self.lock:
            at = []
            for i in range(self.servers):
                try:
                    at.append(ray.get(self.parts[i].reached.remote(self.token)))
                except RayActorError:
                    number, how, ref = self.kept[i]
                    self.killed.append(i)
                    self.parts[i] = self._start()
                    again = getattr(self.parts[i], how).remote(self.token, ref)
                    if number in self.versions:
                        self.versions[number].refs[i] = again
                    at.append(number)
            self.keeping = []
            for entry in self.journal:
                behind = [i for i in range(self.servers) if at[i] < entry.number]
                for i in behind:
                    if self.sums_needed and _failed(entry.sums[i]):
                        entry.sums[i] = self._sums(entry, i)
                for i in behind:
                    again = self._apply(entry, i)
                    if entry.number in self.versions:
                        self.versions[entry.number].refs[i] = again

    def _start(self) -> Any:
        import ray

        process = ray.remote(PartProcess).options(num_cpus=1)
        return process.remote(self.begin_process, self.settings, self.token, self.programs)

    def _sums(self, entry: Entry, i: int) -> "ObjectRef":
        return self.parts[i].sums.remote(*self._arguments(entry, i))

    def _apply(self, entry: Entry, i: int) -> "ObjectRef":
        return self.parts[i].apply.remote(*self._arguments(entry, i), *entry.sums)

    def _arguments(self, entry: Entry, i: int) -> list[Any]:
        pulled = None if entry.pulled is None else entry.pulled.refs[i]
        grads = [one.refs[i] for one in entry.grads]
        return [self.token, entry.number, entry.pushed, entry.delay, pulled, *grads]

    def _keep(self) -> None:
        """Begin new snapshots; the last ones count once they are there, and what came before them is forgotten."""
        import ray
        from ray.exceptions import RayError

        if self.keeping:
            try:
                numbers = ray.get([number for number, _ in self.keeping])
                pairs = zip(numbers, self.keeping, strict=True)
                self.kept = [(number, "adopt", kept) for number, (_, kept) in pairs]
                self.journal = [entry for entry in self.journal if entry.number > min(numbers)]
            except RayError:
                self.revive()
        self.keeping = [one.snapshot.options(num_returns=2).remote(self.token) for one in self.parts]


def _failed(ref: "ObjectRef") -> bool:
    import ray
    from ray.exceptions import RayError

    try:
        ray.get(ref)
        return False
    except RayError:
        return True
