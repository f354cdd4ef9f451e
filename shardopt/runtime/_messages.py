"""Messages between the processes of a run: bytes over connections whose peers know the run's token.

Both sides prove it with an HMAC of a challenge (`multiprocessing.connection`). No message is ever
unpickled. This file imports only the standard library.
"""

import contextlib
import socket
import threading
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Client,
    Connection,
    Listener,
    answer_challenge,
    deliver_challenge,
)

MALFORMED = (ValueError, KeyError, TypeError, AttributeError, IndexError)
"""The errors of reading a malformed message; its connection is then closed."""


_CONNECT_SECONDS = 5.0
"""Seconds within which another host must answer."""


class MessageServer:
    """Passes each connection that knows the token to `handle`, on a thread per connection, until
    `close`.

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
        self._token = token.encode()
        self._closed = False
        self._listener = Listener((host, port), backlog=1024)
        self.port = int(self._listener.address[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._closed = True
        with contextlib.suppress(OSError):  # wakes up the thread that accepts
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            with contextlib.suppress(OSError, EOFError):
                connection = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with contextlib.suppress(OSError, EOFError, AuthenticationError, *MALFORMED), connection:
            deliver_challenge(connection, self._token)
            answer_challenge(connection, self._token)
            self._handle(connection)


def connect(address: str, token: str) -> Connection:
    """Connect to a `MessageServer` at "host:port".

    Raises:
      OSError: if no server listens there.
      multiprocessing.AuthenticationError: if the server has another token.
    """
    host, _, port = address.rpartition(":")
    if host != "127.0.0.1":  # without a timeout, the system would wait minutes for a lost host
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    return Client((host, int(port)), authkey=token.encode())
