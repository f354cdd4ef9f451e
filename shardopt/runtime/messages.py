"""Messages between the processes of a run: bytes, from connections that have proved that they know the run's token.

The proof is an HMAC of a challenge, both ways (`multiprocessing.connection`); nothing is ever unpickled. Only the standard
library is imported here.
"""

import contextlib
import socket
import threading
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge

MALFORMED = (ValueError, KeyError, TypeError, AttributeError, IndexError)
"""What reading a message of another form raises; its connection is closed."""


_PATIENCE = 5.0
"""Seconds that another host has to answer."""


class Server:
    """Hands each connection that knows the token to `handle`, on a thread of its own, until `close`.

    Attributes:
      port: where it listens.
    """

    def __init__(self, handle: Callable[[Connection], None], token: str, *, host: str = "127.0.0.1", port: int = 0):
        self._handle, self._token, self._closed = handle, token.encode(), False
        self._listener = Listener((host, port), backlog=1024)
        self.port = int(self._listener.address[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Listen no more."""
        self._closed = True
        with contextlib.suppress(OSError):  # who accepts wakes up
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
    """Connect to a `Server` at "host:port".

    Raises:
      OSError: if nobody listens there.
      multiprocessing.AuthenticationError: if the token is not the server's.
    """
    host, _, port = address.rpartition(":")
    if host != "127.0.0.1":  # a host that is gone does not say so; the system would wait for minutes
        socket.create_connection((host, int(port)), timeout=_PATIENCE).close()
    return Client((host, int(port)), authkey=token.encode())
