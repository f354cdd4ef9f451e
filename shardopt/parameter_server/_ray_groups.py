"""A worker that consists of several processes on Ray: a group of `jax.distributed`.

All processes of a group run the same `run_worker` on a mesh over all of their devices. Only the first process calls the
server. It shares each answer with the other processes, with parameters in Ray's object store, so that all do the same step.
"""

import itertools
import queue
import socket
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from shardopt.core._types import PyTree
from shardopt.parameter_server._coordinator import WorkerTask
from shardopt.parameter_server._updates import Update

if TYPE_CHECKING:
    from ray.actor import ActorHandle

Answer = TypeVar("Answer")


class ProcessFailure(NamedTuple):
    """The answer of a process that has failed: its error, and the traceback as text."""

    error: BaseException
    trace: str


class CoordinatorError(Exception):
    """The server's process has died; or, with `failure`, its answer was an error, which ends the run."""

    def __init__(self, failure: ProcessFailure | None = None):
        super().__init__()
        self.failure = failure


class CoordinatorClient(Protocol):
    """The calls that `run_worker` makes; see `Coordinator`."""

    def enter(self, worker: int, incarnation: int) -> int | None:
        """Wait until the worker's period begins."""
        ...

    def pull(self, worker: int, incarnation: int, ready: bool) -> WorkerTask | None:
        """Begin a step."""
        ...

    def push(self, worker: int, incarnation: int, update: Update | None, version: int) -> bool:
        """Send the result of a step."""
        ...


class SharedAnswers:
    """The answers that the first process of a group shares, numbered: sent by it, and received by another process.

    The threads of a Ray actor may receive two answers in another order than they were sent.

    Example:
      >>> answers = SharedAnswers()
      >>> answers.put(1, "second")
      >>> answers.put(0, "first")
      >>> answers.next(), answers.next()
      ('first', 'second')
    """

    def __init__(self):
        self.numbers = itertools.count()
        self._received: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._early: dict[int, Any] = {}

    def put(self, number: int, answer: object) -> None:
        """Receive an answer."""
        self._received.put((number, answer))

    def next(self) -> Any:
        """Wait for the next answer in the order of the numbers, and return it."""
        number = next(self.numbers)
        while number not in self._early:
            self._early.update([self._received.get()])
        return self._early.pop(number)


class Leader:
    """The client of the first process of a group: it calls the coordinator, and sends the answers to the other processes."""

    def __init__(
        self,
        coordinator: CoordinatorClient,
        token: str,
        followers: "tuple[ActorHandle, ...]",
        numbers: Iterator[int],
    ):
        self._coordinator, self._token, self._followers, self._numbers = coordinator, token, followers, numbers

    def enter(self, worker: int, incarnation: int) -> int | None:
        """See `Coordinator.enter`."""
        return self._call_and_share(lambda: self._coordinator.enter(worker, incarnation))

    def pull(self, worker: int, incarnation: int, ready: bool) -> WorkerTask | None:
        """See `Coordinator.pull`."""
        return self._call_and_share(lambda: self._coordinator.pull(worker, incarnation, ready))

    def push(self, worker: int, incarnation: int, update: Update | None, version: int) -> bool:
        """See `Coordinator.push`."""
        return self._call_and_share(lambda: self._coordinator.push(worker, incarnation, update, version))

    def _call_and_share(self, call: Callable[[], Answer]) -> Answer:
        import ray

        answer: Answer | CoordinatorError = CoordinatorError()
        try:
            answer = call()
            return answer
        finally:
            number, shared = next(self._numbers), ray.put(answer)  # once for all: it may have all parameters
            for process in self._followers:
                process.receive.remote(self._token, number, shared)


class Follower:
    """The client of another process of a group: it gets the answers that the first process received."""

    def __init__(self, answers: SharedAnswers):
        self._answers, self.version = answers, 0  # only the first process knows the version

    def enter(self, worker: int, incarnation: int) -> int | None:
        """See `Coordinator.enter`."""
        return self._next()

    def pull(self, worker: int, incarnation: int, ready: bool) -> WorkerTask | None:
        """See `Coordinator.pull`."""
        return self._next()

    def push(self, worker: int, incarnation: int, update: Update | None, version: int) -> bool:
        """See `Coordinator.push`; the first process pushes the update."""
        return self._next()

    def _next(self) -> Any:
        answer = self._answers.next()
        if isinstance(answer, CoordinatorError):
            raise answer
        return answer


def free_address() -> str:
    """Return an address of this host that other hosts of the Ray cluster can reach, with a port that is free now."""
    import ray

    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"


def gather_to_local_device(tree: PyTree) -> PyTree:
    """Return arrays of a mesh over several processes as full arrays, each on a device of this process."""
    import jax

    leaves = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable]
    if not leaves:
        return tree
    replicated = jax.NamedSharding(leaves[0].sharding.mesh, jax.P())  # pyright: ignore[reportAttributeAccessIssue]
    full_leaves = iter(jax.jit(lambda leaves: leaves, out_shardings=replicated)(leaves))

    def gather_leaf(leaf: Any) -> Any:
        remote = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
        return next(full_leaves).addressable_data(0) if remote else leaf

    return jax.tree.map(gather_leaf, tree)
