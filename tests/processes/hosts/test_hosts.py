"""The harness: hosts of a network reach each other over links that can be limited, cut and healed."""

import subprocess
import sys

import pytest
from support.hosts import need_hosts, network, remove_stale
from support.paths import TESTS


@pytest.fixture
def pair():
    need_hosts()
    with network(2) as hosts:
        yield hosts


LISTEN = """
import socket
server = socket.create_server(("", 5000))
print("ready", flush=True)
while True:
    connection, _ = server.accept()
    with connection:
        connection.sendall(connection.recv(9)[::-1])
"""
ASK = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000), timeout=0.5) as connection:
    connection.sendall(sys.argv[2].encode())
    print(connection.recv(9).decode())
"""


def ask(host, target, text):
    return host.run([sys.executable, "-c", ASK, target, text]).strip()


def listen(host):
    server = host.popen([sys.executable, "-u", "-c", LISTEN], stdout=subprocess.PIPE, text=True)
    assert server.stdout.readline() == "ready\n"
    return server


def test_a_link_that_is_cut_loses_all_and_one_that_heals_nothing(pair):
    first, second = pair
    with listen(second):
        assert ask(first, "host1", "abc") == "cba"
        second.cut()
        with pytest.raises(AssertionError, match=r"timed out|unreachable|No route"):
            ask(first, "host1", "abc")
        second.heal()
        second.limit(100)
        assert ask(first, "host1", "abc") == "cba"
        second.kill()
        assert second.pids() == []
        second.restart("10.77.0.9")
        with listen(second):
            assert ask(first, "host1", "abd") == "dba"
            assert ask(first, "10.77.0.9", "abd") == "dba"
            second.kill()


def test_two_networks_do_not_meet_and_nothing_reaches_the_machine(pair):
    with network(2) as second_pair, listen(second_pair[1]):
        assert ask(second_pair[0], "host1", "abc") == "cba"
        with pytest.raises(AssertionError, match="refused"):
            ask(pair[0], "host1", "abc")
        with pytest.raises(subprocess.CalledProcessError):
            subprocess.run([sys.executable, "-c", ASK, "10.77.0.2", "abc"], check=True, stderr=-3)
        second_pair[1].kill()


CRASH = """
import os, signal
from support.hosts import network
with network(1) as [host]:
    host.popen(["sleep", "1000"])
    print(host.namespace, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_hosts_of_a_process_that_was_killed_are_removed(pair):
    command = [sys.executable, "-c", CRASH]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=TESTS) as crashed:
        assert crashed.stdout is not None
        namespace = crashed.stdout.readline().split()[0]
    assert namespace in subprocess.getoutput("ip netns list")
    remove_stale()
    remaining = subprocess.getoutput("ip netns list")
    assert namespace not in remaining
    assert pair[0].namespace in remaining  # of a process that lives
