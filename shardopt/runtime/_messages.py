"""Messages between the processes of a run: bytes over connections whose peers know the run's token.

Both sides prove it with an HMAC of a challenge (`multiprocessing.connection`). No message is ever
unpickled. This file imports only the standard library.
"""

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

MALFORMED = (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError)
"""The errors of reading a malformed message; its connection is then closed."""


_CONNECT_SECONDS = 5.0
"""Seconds within which another host must answer."""
_PROOF_SECONDS = 20.0
"""Seconds within which a server must prove that it knows the token. They are more than a stranger
has: when strangers have used up its descriptors, a peer waits until they are gone.
"""
_STRANGER_SECONDS = 5.0
"""Seconds within which a peer must prove to a server that it knows the token."""
_LOST_SECONDS = 30
"""Seconds without an answer after which another host is lost. An idle connection is asked then."""
_ACCEPT_PAUSE = 0.05
"""Seconds until the server looks again whether it can accept a connection."""


class MessageServer:
    """Passes each connection that knows the token to `handle`, on a thread per connection, until
    `close`.

    A stranger who does not prove that it knows the token is disconnected after a few seconds. So
    strangers cannot use up descriptors and threads for longer.

    Args:
      handle: serves one connection.
      token: the token of the run.
      host: the address to listen on.
      port: the port to listen on; 0 for any free port.

    Attributes:
      port: the port on which it listens.
    """

    def __init__(
        self,
        handle: Callable[[Connection], None],
        token: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
    ):
        self._handle = handle
        self._token = token
        self._closed = False
        self._listener = socket.create_server((host, port), backlog=1024)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._closed = True
        with contextlib.suppress(OSError):  # wakes up the thread that accepts
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        self._listener.close()

    def _accept(self) -> None:
        peer = None
        while not self._closed:
            try:
                if peer is None:  # one that was accepted waits for a free thread
                    peer, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(peer,), daemon=True).start()
                peer = None
            except (OSError, RuntimeError):  # no free descriptor, or no free thread
                time.sleep(_ACCEPT_PAUSE)

    def _serve(self, peer: socket.socket) -> None:
        with (
            contextlib.suppress(OSError, EOFError, RuntimeError, *MALFORMED),
            _proved(
                peer, self._token, _STRANGER_SECONDS, deliver_challenge, answer_challenge
            ) as connection,
        ):
            self._handle(connection)


def connect(address: str, token: str) -> Connection:
    """Connect to a `MessageServer` at "host:port".

    Raises:
      OSError: if no server listens there, or it has another token.
    """
    host, _, port = address.rpartition(":")
    peer = socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS)
    return _proved(peer, token, _PROOF_SECONDS, answer_challenge, deliver_challenge)


def _proved(
    peer: socket.socket, token: str, seconds: float, *steps: Callable[[Connection, bytes], None]
) -> Connection:
    """Return the connection of a socket, after both sides have proved that they know the token.

    Args:
      peer: the socket; the connection takes over its descriptor.
      token: the token of the run.
      seconds: how long the proof may take.
      steps: the two steps of the proof.

    Raises:
      OSError: if the peer does not prove it in time.
    """
    with peer:
        peer.settimeout(None)
        # a host that dies closes no connection
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _LOST_SECONDS)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _LOST_SECONDS)
        # not a second descriptor: where none is free, a peer that knows the token was turned away
        connection = Connection(peer.fileno())
        deadline = threading.Timer(seconds, peer.shutdown, [socket.SHUT_RDWR])
        deadline.start()
        proved = False
        try:
            for step in steps:
                step(connection, token.encode())
            proved = True
        except (AuthenticationError, AssertionError, EOFError, OSError) as error:
            raise ConnectionRefusedError("it does not know the token of this run") from error
        finally:
            deadline.cancel()
            peer.detach()
            if not proved:
                connection.close()
    return connection
