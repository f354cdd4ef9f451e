"""The hosts of a job of `shardopt launch`. Each runs the same command, and finds itself among them."""

import contextlib
import socket
from collections.abc import Sequence
from typing import NamedTuple

from shardopt.core import value_error

_FIX = (
    "name the hosts in the same order on each, the first with a port that is free there: --hosts"
    " node0:8476,node1."
)
_DISCARD = 9  # a port (RFC 863) at which nearly nobody listens
_ANSWER_SECONDS = 2.0


class Hosts(NamedTuple):
    """The hosts of a job.

    Attributes:
      names: their names or addresses, in the order of their processes.
      port: the port of process 0 on the first host; 0 for any free port.
      number: the number of this host.
      address: its address in the network of the others.
    """

    names: Sequence[str]
    port: int
    number: int
    address: str

    @property
    def are_one(self) -> bool:
        """Whether there is no other host."""
        return len(self.names) == 1

    def silent(self) -> list[str]:
        """Return the hosts that do not answer. One that lives refuses a connection at once."""
        silent_hosts = []
        for name in self.names:
            try:
                socket.create_connection((name, _DISCARD), timeout=_ANSWER_SECONDS).close()
            except ConnectionRefusedError:
                continue
            except OSError:
                silent_hosts.append(name)
        return silent_hosts

    def coordinator(self, attempt: int) -> str:
        """Return where the processes of an attempt meet.

        No two attempts share a port, so a process of the last attempt cannot join the next one.
        """
        # The first host may know its own name as 127.0.1.1, and process 0 does not listen there.
        host = self.names[0] if self.number else self.address
        if self.port:
            return f"{host}:{self.port + attempt}"
        with socket.create_server((host, 0)) as probe:
            return f"{host}:{probe.getsockname()[1]}"


ALONE = Hosts(("127.0.0.1",), 0, 0, "127.0.0.1")
"""This machine without others: process 0 gets any free port."""


def read_hosts(text: str) -> Hosts:
    """Return the hosts that --hosts names.

    Raises:
      ValueError: if the text has another form, does not name this machine once, or names a host
        that is not known.
    """
    first, *others = text.split(",")
    name, _, port = first.rpartition(":")
    names = [name, *others]
    if not (all(names) and port.isdecimal() and 0 < int(port) < 2**16):
        raise value_error(f"--hosts {text} cannot be read.", fix=_FIX)
    numbers = [number for number, host in enumerate(names) if _is_own(host)]
    if len(numbers) != 1:
        problem = f"--hosts {text} names {socket.gethostname()} {len(numbers)} times, not once."
        raise value_error(problem, fix=_FIX)
    other = names[0 if numbers[0] else -1]
    try:
        with socket.socket(type=socket.SOCK_DGRAM) as route:  # nothing is sent
            route.connect((other, int(port)))
            return Hosts(names, int(port), numbers[0], route.getsockname()[0])
    except OSError as error:
        raise value_error(f"--hosts: there is no way to {other} ({error}).", fix=_FIX) from error


def _is_own(host: str) -> bool:
    """Return whether a name or address belongs to this machine: then a program can listen there."""
    with contextlib.suppress(OSError), socket.create_server((host, 0)):
        return True
    return False
