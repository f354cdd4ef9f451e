"""A worker that consists of several processes on Ray: a group of `jax.distributed`.

All processes of a group run the same `run_worker` on a mesh over all of their devices. Only the
first process calls the server. It shares each answer with the other processes, with parameters in
Ray's object store, so that all do the same step.
"""

import itertools
import queue
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import ray
import ray.util
from ray.actor import ActorHandle

from shardopt.parameter_server._coordinator import CoordinatorClient


class ProcessFailure(NamedTuple):
    """The answer of a process that has failed: its error, and the traceback as text."""

    error: BaseException
    trace: str


class CoordinatorError(Exception):
    """The server's process has died.

    Or, with `failure`, its answer was an error, which ends the run.
    """

    def __init__(self, failure: ProcessFailure | None = None):
        super().__init__()
        self.failure = failure


class SharedAnswers:
    """The answers that the first process of a group shares, numbered: sent by it, and received by
    another process.

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


def leader_client(
    client: CoordinatorClient, token: str, followers: Sequence[ActorHandle], numbers: Iterator[int]
) -> CoordinatorClient:
    """Return the client of the first process of a group: it sends each answer of `client` to the
    other processes.
    """

    def and_share(call: Callable[..., Any]) -> Callable[..., Any]:
        def call_and_share(*arguments: object) -> Any:
            answer: object = CoordinatorError()
            try:
                answer = call(*arguments)
                return answer
            finally:
                # once for all: it may have all parameters
                number, shared = next(numbers), ray.put(answer)
                for process in followers:
                    process.receive.remote(token, number, shared)

        return call_and_share

    return CoordinatorClient(*map(and_share, client))


def follower_client(answers: SharedAnswers) -> CoordinatorClient:
    """Return the client of another process of a group: it gets the answers that the first process
    received.
    """

    def next_answer(*_: object) -> Any:
        answer = answers.next()
        if isinstance(answer, CoordinatorError):
            raise answer
        return answer

    return CoordinatorClient(next_answer, next_answer, next_answer)


def free_address() -> str:
    """Return an address of this host that other hosts of the Ray cluster can reach, with a port
    that is free now.
    """
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"
