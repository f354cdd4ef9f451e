"""A vault: a program with snapshots in host memory that outlives the training processes.

One on each host.

`_program.py _vault NUMBER` reads the run's token from its input, prints its port, and ends when its
input does. A snapshot consists of one piece per rank. The vault keeps the pieces of the newest two
steps of each rank, and only pieces that arrive with a matching checksum. A piece belongs to a
group: the attempt and the number of processes that took the snapshot. Pieces of two groups are
never combined. This file imports only the standard library.
"""

import contextlib
import hashlib
import json
import secrets
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from shardopt.runtime._messages import MessageServer, connect
from shardopt.runtime._program import start

ADDRESSES = "SHARDOPT_VAULTS"
TOKEN = "SHARDOPT_VAULT_TOKEN"
"""Environment variables: the vaults of all hosts, "host:port,host:port,...", and the run's token.
"""

NUM_KEPT = 2
"""How many snapshots of a rank are kept. If a host died while sending, the previous snapshot is
still complete.
"""


class _StoredPiece(NamedTuple):
    """The piece of one rank of a snapshot.

    Attributes:
      group: the attempt and the number of processes that took the snapshot.
      digest: the SHA-256 of the bytes, in hexadecimal.
      data: the bytes.
    """

    group: str
    digest: str
    data: bytes


class PieceStore:
    """The pieces in a vault, by rank and step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pieces: dict[int, dict[int, _StoredPiece]] = {}

    def serve(self, connection: Connection) -> None:
        """Answer the requests of one connection."""
        while True:
            request = json.loads(connection.recv_bytes(4096))
            if request["what"] == "put":
                piece = _StoredPiece(
                    str(request["group"]), str(request["digest"]), connection.recv_bytes()
                )
                is_stored = self.put(int(request["rank"]), int(request["step"]), piece)
                connection.send_bytes(json.dumps({"kept": is_stored}).encode())
            elif request["what"] == "list":
                connection.send_bytes(json.dumps(self.list_pieces()).encode())
            else:
                piece = self.get(int(request["rank"]), int(request["step"]), str(request["group"]))
                connection.send_bytes(piece.digest.encode())
                connection.send_bytes(piece.data)

    def put(self, rank: int, step: int, piece: _StoredPiece) -> bool:
        """Store a piece; return False if its checksum does not match.

        Pieces of later steps are deleted: the run was resumed from an earlier step, and two
        histories must not mix.
        """
        if digest(piece.data) != piece.digest:
            return False
        with self._lock:
            steps = {
                earlier_step: stored
                for earlier_step, stored in self._pieces.get(rank, {}).items()
                if earlier_step < step
            } | {step: piece}
            self._pieces[rank] = dict(sorted(steps.items())[-NUM_KEPT:])
            if [stored.group for stored in self._pieces[rank].values()] == [piece.group] * NUM_KEPT:
                # All pieces of earlier attempts can be deleted now, even pieces of ranks that no
                # longer exist.
                self._pieces = {
                    other_rank: {
                        stored_step: stored
                        for stored_step, stored in steps.items()
                        if stored.group == piece.group
                    }
                    for other_rank, steps in self._pieces.items()
                }
        return True

    def list_pieces(self) -> list[tuple[int, int, str]]:
        """Return the rank, step and group of all pieces."""
        with self._lock:
            return [
                (rank, step, piece.group)
                for rank, steps in self._pieces.items()
                for step, piece in steps.items()
            ]

    def get(self, rank: int, step: int, group: str) -> _StoredPiece:
        """Return a piece; an empty one if it is not in the store."""
        with self._lock:
            piece = self._pieces.get(rank, {}).get(step)
        return piece if piece is not None and piece.group == group else _StoredPiece(group, "", b"")


class Vault(NamedTuple):
    """A vault that this process started.

    Attributes:
      address: "host:port".
      process: the program.
    """

    address: str
    process: subprocess.Popen[str]


def start_vault(number: int, token: str) -> Vault:
    """Start a vault on this host; it ends when this process does."""
    process = start("_vault", number)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{token}\n")
    process.stdin.flush()
    return Vault(f"127.0.0.1:{int(process.stdout.readline())}", process)


def end_program(process: subprocess.Popen[Any]) -> None:
    """Kill a program that this process started, and close its pipes."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


class Vaults:
    """Vaults on one machine, one per process, in place of one vault per host; until `close`."""

    def __init__(self, count: int):
        self._token = secrets.token_hex(16)
        self._all = [start_vault(number, self._token) for number in range(count)]

    def environment(self) -> dict[str, str]:
        """Return the environment variables with the addresses of the vaults; none without vaults.

        Vaults that have died are started again first; these are empty.
        """
        for number, vault in enumerate(self._all):
            if vault.process.poll() is not None:
                end_program(vault.process)
                self._all[number] = start_vault(number, self._token)
        if not self._all:
            return {}
        return {ADDRESSES: ",".join(vault.address for vault in self._all), TOKEN: self._token}

    def close(self) -> None:
        """End all vaults."""
        for vault in self._all:
            end_program(vault.process)


def keep_snapshots(port: int, token: str, host: str) -> None:
    """Run a vault for a job of several hosts until this process ends: `shardopt vault`, once on
    each host.

    Args:
      port: the port to listen on.
      token: the token of the run.
      host: the address to listen on.

    Raises:
      OSError: if the port is in use, or the address belongs to another host.
    """
    server = MessageServer(PieceStore().serve, token, host=host, port=port)
    print(f"vault: keeps snapshots on port {server.port}.", flush=True)
    threading.Event().wait()


def put(
    address: str,
    token: str,
    rank: int,
    step: int,
    group: str,
    data: bytes | bytearray,
    checksum: str,
) -> None:
    """Send the piece of a rank to a vault.

    Args:
      address: "host:port" of the vault.
      token: the token of the run.
      rank: the rank that the piece belongs to.
      step: steps taken.
      group: the attempt and its number of processes, "attempt/count".
      data: the bytes of the piece.
      checksum: their `digest`.

    Raises:
      OSError: if the piece arrived damaged, or no vault listens there.
    """
    request = {"what": "put", "rank": rank, "step": step, "group": group, "digest": checksum}
    with connect(address, token) as connection:
        connection.send_bytes(json.dumps(request).encode())
        connection.send_bytes(data)
        if not json.loads(connection.recv_bytes(4096))["kept"]:
            raise OSError("it did not arrive whole")


def list_pieces(address: str, token: str) -> list[tuple[int, int, str]]:
    """Return the rank, step and group of all pieces in a vault; [] if no vault listens there."""
    with contextlib.suppress(OSError, EOFError), connect(address, token) as connection:
        connection.send_bytes(json.dumps({"what": "list"}).encode())
        return [
            (int(rank), int(step), str(group))
            for rank, step, group in json.loads(connection.recv_bytes())
        ]
    return []


def get(address: str, token: str, rank: int, step: int, group: str) -> bytes | None:
    """Return the bytes of a piece, or None if the vault does not have them undamaged."""
    with contextlib.suppress(OSError, EOFError), connect(address, token) as connection:
        request = {"what": "get", "rank": rank, "step": step, "group": group}
        connection.send_bytes(json.dumps(request).encode())
        checksum = connection.recv_bytes(4096).decode()
        data = connection.recv_bytes()
        return data if checksum and digest(data) == checksum else None
    return None


def digest(data: bytes | bytearray) -> str:
    """Return the SHA-256 of a piece, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def main(number: str) -> None:
    """Run a vault until the input of this program ends.

    Its number is for listings of processes.
    """
    token = sys.stdin.readline().strip()
    server = MessageServer(PieceStore().serve, token)
    print(server.port, flush=True)
    sys.stdin.read()
