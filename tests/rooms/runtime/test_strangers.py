"""Who does not know the token of a run cannot read, change or stop what its ports serve; and who does
know it, but speaks another language, is put off.
"""

import contextlib
import hashlib
import hmac
import json
import random
import socket
import struct
import subprocess
import sys
import threading
from multiprocessing.connection import Client
from pathlib import Path

import pytest
from support.tiers import tiered

from shardopt.runtime import _messages as messages
from shardopt.runtime import _progress as progress
from shardopt.runtime import _vault as vault
from shardopt.runtime._messages import MessageServer
from shardopt.runtime._vault import PieceStore
from shardopt.runtime._watch import Watch

TOKEN = "of the run"
PIECE = b"the train state"
ADDRESS = "127.0.0.1:{}"

COUNTS = tiered([300, 100_000], lambda count: count == 300)


@pytest.fixture
def server():
    """A vault in this process, with one piece."""
    store = MessageServer(PieceStore().serve, TOKEN)
    address = ADDRESS.format(store.port)
    vault.put(address, TOKEN, 0, 5, "0/1", PIECE, vault.digest(PIECE))
    yield store
    store.close()


def is_whole(port):
    address = ADDRESS.format(port)
    pieces = vault.list_pieces(address, TOKEN)
    return pieces == [[0, 5, "0/1"]] or pieces == [(0, 5, "0/1")]


def framed(text):
    return struct.pack("!i", len(text)) + text


def overheard(port):
    """Return the proof of a process that knows the token, as a stranger hears it."""
    heard = []
    with socket.create_server(("127.0.0.1", 0)) as relay, contextlib.ExitStack() as stack:

        def run():
            client, _ = relay.accept()
            vault_side = socket.create_connection(("127.0.0.1", port))
            with client, vault_side:
                for _ in range(2):
                    client.sendall(vault_side.recv(4096))
                    heard.append(client.recv(4096))
                    vault_side.sendall(heard[-1])

        thread = threading.Thread(target=run)
        thread.start()
        stack.callback(thread.join)
        with contextlib.suppress(OSError):
            messages.connect(ADDRESS.format(relay.getsockname()[1]), TOKEN).close()
    return b"".join(heard)


def attempts(rng, port):
    """Yield messages of a stranger: garbage, wrong lengths, wrong proofs, proofs of others."""
    proof = overheard(port)
    requests = [{"what": "list"}, {"what": "get", "rank": 0, "step": 5, "group": "0/1"}]
    requests.append({"what": "put", "rank": 0, "step": 9, "group": "0/1", "digest": "x"})
    while True:
        request = framed(json.dumps(rng.choice(requests)).encode())
        guess = hmac.new(b"guess", rng.randbytes(20), rng.choice(["md5", "sha256"])).digest()
        welcome = framed(b"#WELCOME#")
        challenge = framed(b"#CHALLENGE#" + rng.randbytes(20))
        yield rng.choice(
            [
                rng.randbytes(rng.randrange(200)),
                framed(rng.randbytes(rng.randrange(300))),
                struct.pack("!i", rng.choice([-1, -2, 2**31 - 1, 257])) + rng.randbytes(9),
                struct.pack("!iQ", -1, 2**63) + rng.randbytes(9),
                request,
                framed(guess) + challenge + welcome + request,
                framed(b"{sha256}" + guess) + welcome + challenge + request,
                proof + request,
                proof[: rng.randrange(len(proof))],
            ]
        )


@pytest.mark.parametrize("count", COUNTS)
def test_nothing_that_a_stranger_sends_reads_changes_or_stops_a_vault(server, count):
    rng = random.Random(count)
    for number, attempt in zip(range(count), attempts(rng, server.port), strict=False):
        stranger = socket.create_connection(("127.0.0.1", server.port))
        received = b""
        with stranger, contextlib.suppress(OSError):
            stranger.sendall(attempt)
            stranger.shutdown(socket.SHUT_WR)
            while rng.random() < 0.7 and (part := stranger.recv(4096)):
                received += part
        # a challenge, and that the answer was wrong
        assert len(received) < 100, attempt
        assert PIECE not in received
        if number % 1000 == 0:
            assert is_whole(server.port)
    assert is_whole(server.port)
    assert vault.get(ADDRESS.format(server.port), TOKEN, 0, 5, "0/1") == PIECE


def values(rng, depth=0):
    """Return a random JSON value."""
    leaves = [None, True, -1, 2**70, 1.5, float("inf"), float("nan"), "", "list", "0/1", "\ud800"]
    kind = rng.randrange(4 if depth < 3 else 2)
    if kind == 2:
        return [values(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 3:
        words = ["what", "rank", "step", "group", "digest", "lanes", "pid", "host", "stacks", "bye"]
        return {name: values(rng, depth + 1) for name in rng.sample(words, rng.randrange(6))}
    return rng.choice(leaves)


def of_another_version(rng):
    """Return a message of a process that knows the token and speaks another language."""
    request = values(rng)
    if isinstance(request, dict) and rng.random() < 0.7:
        request |= {"what": rng.choice(["get", "list", "steal", None])}
    return rng.choice(
        [json.dumps(request).encode(), rng.randbytes(rng.randrange(99)), b"[" * 4000, b'{"what":']
    )


@pytest.mark.parametrize("count", COUNTS)
def test_messages_of_another_version_change_nothing_in_a_vault(server, count):
    rng = random.Random(count)
    connection = None
    for number in range(count):
        if connection is None:
            connection = messages.connect(ADDRESS.format(server.port), TOKEN)
        try:
            connection.send_bytes(of_another_version(rng))
            while connection.poll(0):
                connection.recv_bytes()
        except (OSError, EOFError):  # it was put off
            connection.close()
            connection = None
        if number % 1000 == 0:
            assert is_whole(server.port)
    if connection is not None:
        connection.close()
    assert is_whole(server.port)


@pytest.mark.parametrize("rank", [True, 1.5, "1"])
def test_a_farewell_of_no_rank_makes_a_watch_forget_nobody(rank):
    with contextlib.closing(Watch(2, 60, say=print)) as watch:
        host, _, port = watch.environment[progress.ADDRESS].rpartition(":")
        token = watch.environment[progress.TOKEN].encode()
        with Client((host, int(port)), authkey=token) as client:
            client.send_bytes(json.dumps({"rank": rank, "bye": True}).encode())
            was_put_off = client.poll(10)  # the end of the connection arrives
        assert was_put_off
        assert list(watch.reports()) == [0, 1]


@pytest.mark.parametrize("count", COUNTS)
def test_reports_of_another_version_do_not_stop_a_watch(count):
    rng = random.Random(count)
    watch = Watch(2, 60, say=print)
    host, _, port = watch.environment[progress.ADDRESS].rpartition(":")
    token = watch.environment[progress.TOKEN].encode()
    report = json.dumps({"rank": 1, **progress.current()}).encode()
    try:
        connection = None
        for _ in range(count):
            connection = connection or Client((host, int(port)), authkey=token)
            try:
                connection.send_bytes(of_another_version(rng))
            except (OSError, EOFError):  # it was put off
                connection.close()
                connection = None
        with Client((host, int(port)), authkey=token) as good:
            good.send_bytes(report)
            while watch.reports()[1] is None:
                pass
        assert watch.check() is None
    finally:
        watch.close()


VAULT = """
import importlib, resource, sys, types
resource.setrlimit(resource.RLIMIT_NOFILE, 2 * (int(sys.argv[3]),))
folder = types.ModuleType("shardopt.runtime")
folder.__path__ = [sys.argv[1]]
sys.modules["shardopt.runtime"] = folder
messages = importlib.import_module("shardopt.runtime._messages")
messages._STRANGER_SECONDS = float(sys.argv[2])
importlib.import_module("shardopt.runtime._vault").main("0")
"""


@pytest.mark.parametrize(
    ("strangers", "seconds", "descriptors"),
    tiered([(30, 2.0, 64), (100, 2.0, 64), (1000, 5.0, 512)], lambda row: row[0] < 1000),
)
def test_silent_connections_shut_nobody_out_of_a_vault(strangers, seconds, descriptors):
    folder = str(Path(vault.__file__).parent)
    command = [sys.executable, "-I", "-S", "-c", VAULT, folder, str(seconds)]
    command.append(str(descriptors))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as program, contextlib.ExitStack() as stack:
        stack.callback(program.kill)
        assert program.stdin is not None
        assert program.stdout is not None
        program.stdin.write(f"{TOKEN}\n")
        program.stdin.flush()
        port = int(program.stdout.readline())
        address = ADDRESS.format(port)
        vault.put(address, TOKEN, 0, 5, "0/1", PIECE, vault.digest(PIECE))
        for _ in range(strangers):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        # where strangers hold every descriptor, they are let go first; a peer that is accepted
        # needs no second descriptor
        assert vault.get(address, TOKEN, 0, 5, "0/1") == PIECE


@pytest.mark.parametrize("says", [None, b"HTTP/1.1 400 Bad Request\r\n", framed(b"#WELCOME#"), b""])
def test_a_stranger_at_the_port_of_a_vault_is_no_vault(monkeypatch, says):
    monkeypatch.setattr(messages, "_PROOF_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as stranger, contextlib.ExitStack() as stack:

        def run():
            peer, _ = stranger.accept()
            stack.callback(peer.close)
            if says is not None:
                peer.sendall(says)
            if says == b"":
                peer.close()

        thread = threading.Thread(target=run)
        thread.start()
        stack.callback(thread.join)
        address = ADDRESS.format(stranger.getsockname()[1])
        with pytest.raises(ConnectionRefusedError, match="it does not know the token of this run"):
            vault.put(address, TOKEN, 0, 5, "0/1", PIECE, hashlib.sha256(PIECE).hexdigest())
