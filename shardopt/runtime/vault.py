"""A vault: snapshots in host memory, in a program that outlives the training processes; one on each host.

`python vault.py NUMBER` reads the run's token from its input, says its port, and ends when its input does. It keeps the two
newest steps of each rank, and only what arrived with the checksum that was sent with it. A snapshot belongs to a group, the
attempt and the number of processes that took it: pieces of two groups are never put together. Only the standard library is
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


class _Kept(NamedTuple):
    """A snapshot of a rank."""

    group: str
    digest: str
    data: bytes


class Blobs:
    """What a vault keeps: bytes by rank and step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[int, dict[int, _Kept]] = {}

    def serve(self, connection: Connection) -> None:
        """Answer what one connection asks for."""
        while True:
            asked = json.loads(connection.recv_bytes(4096))
            if asked["what"] == "put":
                one = _Kept(str(asked["group"]), str(asked["digest"]), connection.recv_bytes())
                kept = self.put(int(asked["rank"]), int(asked["step"]), one)
                connection.send_bytes(json.dumps({"kept": kept}).encode())
            elif asked["what"] == "list":
                connection.send_bytes(json.dumps(self.held()).encode())
            else:
                found = self.get(int(asked["rank"]), int(asked["step"]), str(asked["group"]))
                connection.send_bytes(found.digest.encode())
                connection.send_bytes(found.data)

    def put(self, rank: int, step: int, one: _Kept) -> bool:
        """Keep a snapshot if it is whole. Later steps go: the run was wound back, and two histories do not mix."""
        if digest(one.data) != one.digest:
            return False
        with self._lock:
            steps = {old: kept for old, kept in self._kept.get(rank, {}).items() if old < step} | {step: one}
            self._kept[rank] = dict(sorted(steps.items())[-GENERATIONS:])
            if [kept.group for kept in self._kept[rank].values()] == [one.group] * GENERATIONS:
                # All of an earlier attempt can go by now, also that of ranks that there are no more.
                self._kept = {
                    other: {at: kept for at, kept in steps.items() if kept.group == one.group}
                    for other, steps in self._kept.items()
                }
        return True

    def held(self) -> list[tuple[int, int, str]]:
        """Return the rank, step and group of all that is kept."""
        with self._lock:
            return [(rank, step, one.group) for rank, steps in self._kept.items() for step, one in steps.items()]

    def get(self, rank: int, step: int, group: str) -> _Kept:
        """Return a snapshot; empty where it is not kept."""
        with self._lock:
            found = self._kept.get(rank, {}).get(step)
        return found if found is not None and found.group == group else _Kept(group, "", b"")


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


def keep_snapshots(port: int, token: str) -> None:
    """Keep snapshots of a job of several hosts until this process is ended: `shardopt vault`, once on each host.

    Raises:
      OSError: if the port is taken.
    """
    server = Server(Blobs().serve, token, host="0.0.0.0", port=port)
    print(f"vault: keeps snapshots on port {server.port}.", flush=True)
    threading.Event().wait()


def put(address: str, token: str, rank: int, step: int, group: str, data: bytes | bytearray, found: str) -> None:
    """Give a vault a snapshot of a rank.

    Raises:
      OSError: if it did not arrive whole, or nobody listens there.
    """
    what = {"what": "put", "rank": rank, "step": step, "group": group, "digest": found}
    with connect(address, token) as connection:
        connection.send_bytes(json.dumps(what).encode())
        connection.send_bytes(data)
        if not json.loads(connection.recv_bytes(4096))["kept"]:
            raise OSError("it did not arrive whole")


def held(address: str, token: str) -> list[tuple[int, int, str]]:
    """Return the rank, step and group of all that a vault has; nothing where nobody listens."""
    with contextlib.suppress(OSError, EOFError), connect(address, token) as connection:
        connection.send_bytes(json.dumps({"what": "list"}).encode())
        return [(int(rank), int(step), str(group)) for rank, step, group in json.loads(connection.recv_bytes())]
    return []


def get(address: str, token: str, rank: int, step: int, group: str) -> bytes | None:
    """Return a snapshot of a rank, or None where the vault does not have it whole."""
    with contextlib.suppress(OSError, EOFError), connect(address, token) as connection:
        what = {"what": "get", "rank": rank, "step": step, "group": group}
        connection.send_bytes(json.dumps(what).encode())
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
