"""Agreement on the host: each process says a value, and every process gets all of them.

The values travel through the key-value store of jax's coordination service. So no device waits, no
program is compiled, and Python can handle a signal while a process waits for the others. Process 0
collects the values. If they are equal, its answer is one character.
"""

import atexit
import contextlib
import dataclasses
import functools
import json
import os
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from shardopt.core import error_text
from shardopt.runtime._progress import waiting

_ANSWER_MILLISECONDS = 500
"""How long a process waits for the answer before Python can handle signals."""
_FIRST_PAUSE = 1e-4
_LONGEST_PAUSE = 5e-3
"""Seconds between two looks of the collecting process."""
_NOTICE_SECONDS = 30.0
"""Seconds until the collecting process names the processes that it waits for."""
_ALL_EQUAL = "="
_ENDED = "shardopt/ended/"
"""The folder in which processes that end say why."""
_LOOK_SECONDS = 0.5
"""Seconds between two looks of the collecting process at the processes that have ended."""


def processes_of(mesh: Mesh) -> tuple[int, ...]:
    """Return the processes that have devices of a mesh, in order."""
    return tuple(sorted({device.process_index for device in mesh.devices.flat}))


def agree(place: str, value: Any, processes: Sequence[int]) -> list[Any]:
    """Return the values of all processes, in the order of `processes`.

    All of them must call it, in the same order. It takes about a millisecond on one
    machine that does nothing else (`benchmarks/agreement.py`).

    Args:
      place: the activity of the process, for messages.
      value: a JSON value.
      processes: the processes that take part, from `processes_of`.

    Raises:
      RuntimeError: if a process is at another place, or has ended.
    """
    if len(processes) == 1:
        return [value]
    with waiting("agree"):
        channel = _channel(coordination_client(), tuple(processes))
        texts = channel.exchange(place, json.dumps([place, value]))
    messages = [json.loads(text) for text in texts]
    places = [message[0] for message in messages]
    if len(set(places)) > 1:
        by_place = groups(places, processes)
        problem = "the processes do different things: their code is not the same."
        listed = [f"{who}: {name}" for name, who in by_place.items()]
        fix = "let all processes call the same functions in the same order, as often."
        raise RuntimeError(error_text(problem, listed, fix))
    return [message[1] for message in messages]


def groups(values: Sequence[Any], processes: Sequence[int]) -> dict[Any, str]:
    """Return value -> the processes that have it, as text such as "processes 0 and 2"."""
    members: dict[Any, list[int]] = {}
    for process, value in zip(processes, values, strict=True):
        members.setdefault(value, []).append(process)
    return {value: process_text(who) for value, who in members.items()}


def differing(
    values: Sequence[Mapping[str, str]], processes: Sequence[int]
) -> Iterator[tuple[str, dict[str | None, str]]]:
    """Yield each name whose value differs between processes, with the processes of each value."""
    for name in dict.fromkeys(name for of_process in values for name in of_process):
        by_value = groups([of_process.get(name) for of_process in values], processes)
        if len(by_value) > 1:
            yield name, by_value


def process_text(processes: Sequence[int]) -> str:
    """Return `process 1`, `processes 0 and 2` or `processes 0, 1, 2 and 5 others`."""
    names = [str(process) for process in processes]
    if len(names) == 1:
        return f"process {names[0]}"
    if len(names) > 4:
        return f"processes {', '.join(names[:3])} and {len(names) - 3} others"
    return f"processes {', '.join(names[:-1])} and {names[-1]}"


@dataclasses.dataclass
class Channel:
    """The agreements of some processes, one after another.

    Attributes:
      client: the client of jax's coordination service.
      processes: the processes; the first one collects.
      folder: the prefix of the keys, which no other channel has.
      count: how many agreements there were.
    """

    client: Any
    processes: tuple[int, ...]
    folder: str
    count: int = 0

    def exchange(self, place: str, text: str) -> list[str]:
        """Return the texts of all processes."""
        folder = self.folder
        current = f"{folder}/{self.count}/"
        process = jax.process_index()
        self.client.key_value_set(f"{current}{process}", text)
        if process == self.processes[0]:
            texts = self._collect(place, current)
            answer = _ALL_EQUAL if len(set(texts)) == 1 else json.dumps(texts)
            self.client.key_value_set(f"{folder}/answer/{self.count}", answer)
            if self.count:
                # all have read it, because all have said something since
                self.client.key_value_delete(f"{folder}/{self.count - 1}/")
                self.client.key_value_delete(f"{folder}/answer/{self.count - 1}")
        else:
            answer = self._answer(f"{folder}/answer/{self.count}")
            texts = [text] * len(self.processes) if answer == _ALL_EQUAL else json.loads(answer)
        self.count += 1
        return texts

    def _collect(self, place: str, folder: str) -> list[str]:
        """Return the texts of all processes, when the last one has come."""
        began = time.monotonic()
        pause = _FIRST_PAUSE
        notice = _NOTICE_SECONDS
        next_look = _LOOK_SECONDS
        ended: dict[int, str] = {}
        while True:
            seconds = time.monotonic() - began
            if seconds > next_look:
                next_look = seconds + _LOOK_SECONDS
                ended = self._ended()  # before the texts, which a process says before it ends
            entries = self.client.key_value_dir_get(folder)
            texts = {int(key.rpartition("/")[2]): text for key, text in entries}
            missing = [process for process in self.processes if process not in texts]
            if not missing:
                return [texts[process] for process in self.processes]
            if ended.keys() & set(missing):
                raise _ended_error(ended)
            if seconds > notice:
                notice *= 2
                print(
                    f"{place}: waiting for {process_text(missing)}, for {seconds:.0f} s.",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _answer(self, key: str) -> str:
        """Return the answer of the process that collects."""
        ended: dict[int, str] = {}
        while True:
            try:
                return self.client.blocking_key_value_get(key, _ANSWER_MILLISECONDS)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            if ended:  # and the answer has not come since
                raise _ended_error(ended)
            ended = self._ended()

    def _ended(self) -> dict[int, str]:
        """Return process -> why it has ended, for the processes of this channel that have."""
        entries = self.client.key_value_dir_get(_ENDED)
        reasons = {int(key.removeprefix(_ENDED)): reason for key, reason in entries}
        return {process: reasons[process] for process in self.processes if process in reasons}


def _ended_error(ended: dict[int, str]) -> RuntimeError:
    problem = "another process has ended, and this one waits for it."
    listed = [f"process {process}: {reason}" for process, reason in ended.items()]
    fix = "an error is mended there. Else let all processes take the same steps to the end."
    return RuntimeError(error_text(problem, listed, fix))


@functools.cache
def _channel(client: Any, processes: tuple[int, ...]) -> Channel:
    tell_end()
    number = zlib.crc32(repr(processes).encode())
    return Channel(client, processes, f"shardopt/agree/{number}")


@functools.cache
def tell_end() -> None:
    """Let the processes that wait for this one know when and why it ends.

    At exit, jax waits for all processes, so that they would wait for each other.
    """

    def tell(pid: int) -> None:
        if os.getpid() != pid:  # a fork, whose end is its own
            return
        error = getattr(sys, "last_value", None)  # which was not caught
        reason = "its program ended without an error, or called sys.exit"
        if error is not None:
            reason = f"{type(error).__name__}: {error}"
        # process 0 has ended, or jax has left the job
        with contextlib.suppress(RuntimeError):
            coordination_client().key_value_set(f"{_ENDED}{jax.process_index()}", reason)

    atexit.register(tell, os.getpid())


def coordination_client() -> Any:
    """Return the client of jax's coordination service."""
    from jax._src.distributed import global_state  # jax has no public name for it

    if global_state.client is None:
        problem = "this process knows no other process, but the mesh has devices of several."
        raise RuntimeError(error_text(problem, fix="call so.initialize() first of all."))
    return global_state.client
