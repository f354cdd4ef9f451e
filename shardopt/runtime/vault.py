"""A vault: snapshots in host memory, in a program that outlives the training processes; one on each host.

`python vault.py NUMBER` reads the run's token from its input, says its port, and ends when its input does. It keeps the two
newest steps of each rank, and only what arrived with the checksum that was sent with it. Only the standard library is
imported here.
"""

import contextlib
import hashlib
import json
import secrets
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":  # as a program it is not to wait until shardopt is imported
    sys.path.insert(0, str(Path(__file__).parent))
    from messages import Server, connect  # pyright: ignore[reportMissingImports]
else:
    from shardopt.runtime.messages import Server, connect

ADDRESSES, TOKEN = "SHARDOPT_VAULTS", "SHARDOPT_VAULT_TOKEN"
"""Names in the environment: the vaults of all hosts, "host:port,host:port,...", and the run's token."""

GENERATIONS = 2
"""How many snapshots of a rank are kept: where one host died while it sent, all still have the one before."""


class Blobs:
    """What a vault keeps: bytes by rank and step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[int, dict[int, tuple[str, bytes]]] = {}

    def serve(self, connection: Connection) -> None:
        """Answer what one connection asks for."""
        while True:
            asked = json.loads(connection.recv_bytes(4096))
            what, rank = asked["what"], int(asked["rank"])
            if what == "put":
                data = connection.recv_bytes()
                answer = {"kept": self.put(rank, int(asked["step"]), str(asked["digest"]), data)}
                connection.send_bytes(json.dumps(answer).encode())
            elif what == "steps":
                with self._lock:
                    connection.send_bytes(json.dumps(sorted(self._kept.get(rank, {}))).encode())
            else:
                with self._lock:
                    found, data = self._kept.get(rank, {}).get(int(asked["step"]), ("", b""))
                connection.send_bytes(found.encode())
                connection.send_bytes(data)

    def put(self, rank: int, step: int, found: str, data: bytes) -> bool:
        """Keep a snapshot if it is whole. Later steps go: the run was wound back, and two histories do not mix."""
        if digest(data) != found:
            return False
        with self._lock:
            steps = {old: one for old, one in self._kept.get(rank, {}).items() if old < step} | {step: (found, data)}
            self._kept[rank] = dict(sorted(steps.items())[-GENERATIONS:])
        return True


class Vault(NamedTuple):
    """A vault that this process started.

    Attributes:
      address: "host:port".
      process: the program.
    """

    address: str
    process: subprocess.Popen[str]


def start_vault(number: int, token: str) -> Vault:
    """Start a vault on this host, which ends when this process does."""
    command = [sys.executable, "-I", "-S", __file__, str(number)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    process = subprocess.Popen(command, **pipes)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{token}\n")
    process.stdin.flush()
    return Vault(f"127.0.0.1:{int(process.stdout.readline())}", process)


def stop_vault(vault: Vault) -> None:
    """End a vault; what it keeps is gone."""
    vault.process.kill()
    vault.process.wait()
    for pipe in (vault.process.stdin, vault.process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


class Vaults:
    """The vaults of all hosts, which the processes of one machine stand for here: one for each, until `close`."""

    def __init__(self, count: int):
        self._token = secrets.token_hex(16)
        self._all = [start_vault(number, self._token) for number in range(count)]

    def environment(self) -> dict[str, str]:
        """Return what tells a process where the vaults are, after starting those again that have died; they are empty."""
        for number, one in enumerate(self._all):
            if one.process.poll() is not None:
                stop_vault(one)
                self._all[number] = start_vault(number, self._token)
        return {ADDRESSES: ",".join(one.address for one in self._all), TOKEN: self._token}

    def close(self) -> None:
        """End all."""
        for one in self._all:
            stop_vault(one)


def put(address: str, token: str, rank: int, step: int, data: bytes | bytearray, found: str) -> None:
    """Give a vault a snapshot of a rank.

    Raises:
      OSError: if it did not arrive whole, or nobody listens there.
    """
    with connect(address, token) as connection:
        connection.send_bytes(json.dumps({"what": "put", "rank": rank, "step": step, "digest": found}).encode())
        connection.send_bytes(data)
        if not json.loads(connection.recv_bytes(4096))["kept"]:
            raise OSError("it did not arrive whole")


def steps(address: str, token: str, rank: int) -> list[int]:
    """Return the steps that a vault has of a rank; none where nobody listens."""
    with contextlib.suppress(OSError, EOFError), connect(address, token) as connection:
        connection.send_bytes(json.dumps({"what": "steps", "rank": rank}).encode())
        return [int(step) for step in json.loads(connection.recv_bytes(4096))]
    return []


def get(address: str, token: str, rank: int, step: int) -> bytes | None:
    """Return a snapshot of a rank, or None where the vault does not have it whole."""
    with contextlib.suppress(OSError, EOFError), connect(address, token) as connection:
        connection.send_bytes(json.dumps({"what": "get", "rank": rank, "step": step}).encode())
        found, data = connection.recv_bytes(4096).decode(), connection.recv_bytes()
        return data if found and digest(data) == found else None
    return None


def digest(data: bytes | bytearray) -> str:
    """Return the SHA-256 of a snapshot."""
    return hashlib.sha256(data).hexdigest()


def main(words: Sequence[str]) -> None:
    """Keep snapshots until the input ends."""
    assert len(words) == 1  # its number, for who looks at the processes
    token = sys.stdin.readline().strip()
    server = Server(Blobs().serve, token)
    print(server.port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1:])
