"""A worker of several processes on Ray: a group of `jax.distributed`, of which the first process alone asks the server.

All processes of a group run the same `run_worker` on a mesh over all of their devices. What the server answers to the first
one it tells the others, parameters through Ray's object store, so that all do the same step.
"""

import queue
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from shardopt.core.types import PyTree
from shardopt.parameter_server.coordinator import Task
from shardopt.parameter_server.updates import Update

if TYPE_CHECKING:
    from ray.actor import ActorHandle

Answer = TypeVar("Answer")


class Failed(NamedTuple):
    """What a process says instead of a result: the error, and its traceback as text."""

    error: BaseException
    trace: str


class Gone(Exception):  # noqa: N818
    """The server is gone; or, with `failed`, its answer was an error, which ends the run."""

    def __init__(self, failed: Failed | None = None):
        super().__init__()
        self.failed = failed


class Asks(Protocol):
    """What `run_worker` asks; see `Coordinator`."""

    def enter(self, worker: int, incarnation: int) -> int | None:
        """Wait until the worker is there."""
        ...

    def pull(self, worker: int, incarnation: int, ready: bool) -> Task | None:
        """Begin a step."""
        ...

    def push(self, worker: int, incarnation: int, update: Update | None, version: int) -> bool:
        """Hand over the result of a step."""
        ...


class Leader:
    """The coordinator as the first process of a group sees it: it asks, and tells the others."""

    def __init__(self, coordinator: Asks, token: str, others: "tuple[ActorHandle, ...]"):
        self._coordinator, self._token, self._others = coordinator, token, others

    def enter(self, worker: int, incarnation: int) -> int | None:
        """See `Coordinator.enter`."""
        return self._tell(lambda: self._coordinator.enter(worker, incarnation))

    def pull(self, worker: int, incarnation: int, ready: bool) -> Task | None:
        """See `Coordinator.pull`."""
        return self._tell(lambda: self._coordinator.pull(worker, incarnation, ready))

    def push(self, worker: int, incarnation: int, update: Update | None, version: int) -> bool:
        """See `Coordinator.push`."""
        return self._tell(lambda: self._coordinator.push(worker, incarnation, update, version))

    def _tell(self, ask: Callable[[], Answer]) -> Answer:
        import ray

        said: Answer | Gone = Gone()
        try:
            said = ask()
            return said
        finally:
            shared = ray.put(said)  # once, whatever it weighs
            for other in self._others:
                other.hear.remote(self._token, shared)


class Follower:
    """The coordinator as another process of a group sees it: it hears what the first one is told."""

    def __init__(self, heard: "queue.SimpleQueue[Any]"):
        self._heard, self.version = heard, 0  # the first process knows it

    def enter(self, worker: int, incarnation: int) -> int | None:
        """See `Coordinator.enter`."""
        return self._next()

    def pull(self, worker: int, incarnation: int, ready: bool) -> Task | None:
        """See `Coordinator.pull`."""
        return self._next()

    def push(self, worker: int, incarnation: int, update: Update | None, version: int) -> bool:
        """See `Coordinator.push`; the update is that of the first process, which pushes it."""
        return self._next()

    def _next(self) -> Any:
        answer = self._heard.get()
        if isinstance(answer, Gone):
            raise answer
        return answer


def free_address() -> str:
    """Return an address of this host, where the other hosts of a Ray cluster reach it, with a port that is free now."""
    import ray

    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"


def on_this_process(tree: PyTree) -> PyTree:
    """Return arrays of a mesh over several processes whole, on a device of this one."""
    import jax

    leaves = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable]
    if not leaves:
        return tree
    everywhere = jax.NamedSharding(leaves[0].sharding.mesh, jax.P())  # pyright: ignore[reportAttributeAccessIssue]
    whole = iter(jax.jit(lambda some: some, out_shardings=everywhere)(leaves))

    def one(leaf: Any) -> Any:
        remote = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
        return next(whole).addressable_data(0) if remote else leaf

    return jax.tree.map(one, tree)
