"""The processes of a run, for threads that save the same step on all of them.

The main threads may be anywhere, so nothing here waits for a device or for a main thread: texts
travel through the key-value store of jax's coordination service.
"""

import time
from itertools import count

import jax

from shardopt.runtime._agreement import Channel, coordination_client

_POLL_SECONDS = 0.2
"""Seconds between two looks for the signal of another process, with up to 200 processes."""
_ROUND_SECONDS = 0.5
_LOOK_SECONDS = 0.01
"""Seconds that a process waits for the others in a round, and between two looks."""

_run_numbers = count()


class Peers:
    """The processes of a run; all of them make it at the same place.

    Attributes:
      poll_seconds: seconds between two calls of `verdict`.
      exchange: returns the texts of all processes, which all must call. It is for one thread.
    """

    def __init__(self) -> None:
        processes = tuple(range(jax.process_count()))
        self._folder = f"shardopt/stop/{next(_run_numbers)}"
        self._client = coordination_client()
        self._processes = processes
        self._rank = jax.process_index()
        self.poll_seconds = _POLL_SECONDS * max(1.0, len(processes) / 200)
        channel = Channel(self._client, processes, f"{self._folder}/exchange")
        self.exchange = lambda text: channel.exchange("fit", text)

    def tell(self, verdict: str) -> None:
        """Tell all processes that a signal has come."""
        self._set("verdict", verdict)

    def verdict(self) -> str | None:
        """Return the verdict of the first process, or None."""
        return self._get("verdict")

    def all_are_at(self, step: int, round_number: int) -> bool:
        """Return whether all processes call this for the same step in a round.

        The answer is the same on all processes. Process 0 says yes or no when all have come. A
        process that waits too long says no. The first answer counts.
        """
        folder = f"round-{round_number}"
        self._set(f"{folder}/steps/{self._rank}", str(step))
        deadline = time.monotonic() + _ROUND_SECONDS
        while (answer := self._get(f"{folder}/answer")) is None:
            steps = [
                text
                for _, text in self._client.key_value_dir_get(f"{self._folder}/{folder}/steps/")
            ]
            if self._rank == 0 and len(steps) == len(self._processes):
                self._set(f"{folder}/answer", "yes" if len(set(steps)) == 1 else "no")
            elif time.monotonic() > deadline:
                self._set(f"{folder}/answer", "no")
            time.sleep(_LOOK_SECONDS)
        return answer == "yes"

    def _set(self, key: str, text: str) -> None:
        """Set a text that nobody has set yet."""
        try:
            self._client.key_value_set(f"{self._folder}/{key}", text)
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise

    def _get(self, key: str) -> str | None:
        try:
            return self._client.key_value_try_get(f"{self._folder}/{key}")
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" not in str(error):
                raise
            return None
