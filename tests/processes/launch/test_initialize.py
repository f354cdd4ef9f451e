"""`initialize`: where a process finds its place in the job, and when it ends."""

import os
import re
import socket
import subprocess
import sys

import jax
import pytest
from jax._src.lib import _jax

import shardopt as so
from shardopt.runtime import _connection
from shardopt.runtime import _processes as processes


def test_initialize_wants_all_or_nothing():
    with pytest.raises(ValueError, match=re.escape("go together, got 'localhost:1', 2, None.")):
        so.initialize("localhost:1", 2)


def test_initialize_does_nothing_outside_a_launcher(monkeypatch):
    for name in _connection._DETECTED_BY_JAX:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_: pytest.fail("must not be called"))
    so.initialize()


def test_initialize_reads_the_place_of_the_process_where_all_of_it_is_said(monkeypatch):
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *place: calls.append(place))
    monkeypatch.setattr(processes, "_wait_for_address", lambda address: calls.append(address))
    monkeypatch.setattr(jax.config, "update", lambda name, value: calls.append((name, value)))
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "10.0.0.1:1234")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "4")
    so.initialize()  # jax finds the other values, or names the missing one
    monkeypatch.setenv("JAX_PROCESS_ID", "3")
    so.initialize()
    so.initialize("10.0.0.2:1", 2, 0)
    gloo = ("jax_cpu_collectives_implementation", "gloo")
    assert calls == [
        gloo,
        (None, None, None),
        gloo,
        "10.0.0.1:1234",
        ("10.0.0.1:1234", 4, 3),
        gloo,
        ("10.0.0.2:1", 2, 0),
    ]


@pytest.mark.parametrize(("rank", "target"), [(0, "10.0.0.9:1"), (1, "host0:1")])
def test_jax_listens_at_the_stated_address_however_a_job_is_launched(monkeypatch, rank, target):
    """Process 0 does not meet itself at the name of its host, which may mean 127.0.1.1 there."""
    calls = []
    monkeypatch.setattr(
        jax.distributed, "initialize", lambda *place, **options: calls.append((place, options))
    )
    monkeypatch.setattr(processes, "_wait_for_address", lambda address: None)
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)
    monkeypatch.setattr(_jax, "make_gloo_tcp_collectives", lambda **options: options)
    monkeypatch.setenv("SHARDOPT_LISTEN_ADDRESS", "10.0.0.9")
    so.initialize("host0:1", 2, rank)
    assert calls == [((target, 2, rank), {"coordinator_bind_address": "10.0.0.9:1"})]
    assert _jax.make_gloo_tcp_collectives() == {"hostname": "10.0.0.9"}


def test_a_process_says_where_it_finds_no_first_one(monkeypatch, capsys):
    """jax itself is silent for five minutes."""
    monkeypatch.setattr(processes, "_CONNECT_SECONDS", 0.05)
    processes._wait_for_address("127.0.0.1:1")
    assert capsys.readouterr().err == (
        "initialize: nothing has listened at 127.0.0.1:1, the address of process 0, for 0.05 s; jax"
        " tries for 300 s more.\n"
    )


def test_a_process_asks_the_first_one_once_it_listens(monkeypatch):
    """gRPC would try again a second later only."""
    seen = []
    with socket.socket() as first:
        first.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{first.getsockname()[1]}"
        monkeypatch.setattr(
            processes.time, "sleep", lambda _: (seen.append("tried"), first.listen())
        )
        processes._wait_for_address(address)
    assert seen == ["tried"]


def test_initialize_ends_a_process_whose_launcher_died_before(monkeypatch):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    monkeypatch.setattr(sys, "platform", "elsewhere")  # this process shall not follow anybody
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setenv("SHARDOPT_LAUNCHED", str(gone.pid))
    with pytest.raises(SystemExit, match=r"^initialize: the launcher of this process has died\.$"):
        processes._follow_launcher()
    monkeypatch.setenv("SHARDOPT_LAUNCHED", str(os.getpid()))
    processes._follow_launcher()
