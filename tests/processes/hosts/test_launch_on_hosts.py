"""`shardopt launch --hosts`: the same command on each host makes one job, closed to other networks."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardopt.cli._commands import run
from shardopt.runtime._hosts import Hosts, read_hosts
from shardopt.runtime._launch import _AttemptResult, _failure_text

from .conftest import launch, listening, said, wait_for


def test_the_same_command_on_each_host_makes_one_job_that_outlasts_a_cut_of_its_link(
    pair, tmp_path
):
    worker = ["worker_that_meets.py", tmp_path]
    jobs = [launch(host, tmp_path, worker, "--processes", "1") for host in pair]
    first = [tmp_path / f"first-{rank}" for rank in range(2)]
    wait_for(lambda: all(path.exists() for path in first), jobs)
    # no port is open to other networks
    assert [listening(host) for host in pair] == [{"10.77.0.1"}, {"10.77.0.2"}]
    pair[1].cut()
    (tmp_path / "again").touch()
    time.sleep(0.5)
    second = [tmp_path / f"second-{rank}" for rank in range(2)]
    assert not any(path.exists() for path in second)
    pair[1].heal()
    assert [job.wait() for job in jobs] == [0, 0], said(tmp_path, pair[0])
    assert {path.read_text() for path in (*first, *second)} == {"[0, 1] place 0"}
    for rank in range(2):
        refusal = (tmp_path / f"refused-{rank}").read_text()
        assert refusal == (
            f"Checkpoints: process 1 on host1 cannot write to {tmp_path}/own-1 (FileNotFoundError:"
            f" [Errno 2] No such file or directory: '{tmp_path}/own-1/.seen-by-all/1').\nFix: save"
            " to a folder that all hosts see and can write to."
        )
    assert not (tmp_path / "own-0" / ".seen-by-all").exists()
    logs = {path.name for path in (tmp_path / "logs").iterdir()}
    assert logs == {".launch.lock", ".launch1.lock", "process-0.log", "process-1.log"}


BY_HAND = """
import sys, jax, numpy as np, shardopt as so
from jax.experimental import multihost_utils
jax.config.update("jax_num_cpu_devices", 1)
so.initialize("host0:8476", 2, int(sys.argv[1]))
print(multihost_utils.process_allgather(np.asarray([jax.process_index()])).ravel().tolist(), flush=True)
sys.stdin.read()
"""


@pytest.mark.slow  # test_initialize.py has the calls of jax
def test_without_a_launcher_jax_listens_at_the_stated_address(pair):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    jobs = [
        host.popen(
            [sys.executable, "-c", BY_HAND, str(rank)],
            env={"SHARDOPT_LISTEN_ADDRESS": host.address},
            **pipes,
        )
        for rank, host in enumerate(pair)
    ]
    lines = [next((line for line in job.stdout if line.startswith("[0")), "") for job in jobs]
    assert lines == ["[0, 1]\n"] * 2
    assert [listening(host) for host in pair] == [{"10.77.0.1"}, {"10.77.0.2"}]
    for job in jobs:
        job.communicate()


FORM = (
    "name the hosts in the same order on each, the first with a port that is free there: --hosts"
    " node0:8476,node1."
)


@pytest.mark.parametrize("text", ["", "node0", "node0,node1", "node0:x,node1", "node0:0,node1"])
@pytest.mark.parametrize("tail", ["", ","])
def test_hosts_of_another_form_are_refused(text, tail):
    with pytest.raises(ValueError, match="cannot be read") as error:
        read_hosts(text + tail)
    assert str(error.value) == f"shardopt: --hosts {text + tail} cannot be read.\nFix: {FORM}"


def test_hosts_without_this_machine_or_with_it_twice_are_refused():
    with pytest.raises(ValueError, match=r"names \S+ 0 times, not once"):
        read_hosts("198.51.100.1:8476,198.51.100.2")
    with pytest.raises(ValueError, match=r"names \S+ 2 times, not once"):
        read_hosts("127.0.0.1:8476,127.0.0.2")
    with pytest.raises(ValueError, match=r"there is no way to no\.such\.host\.invalid"):
        read_hosts("127.0.0.1:8476,no.such.host.invalid")


def test_each_attempt_of_a_job_on_several_hosts_has_a_port_of_its_own():
    hosts = Hosts(("first", "second"), 8476, 1, "10.0.0.2")
    assert [hosts.coordinator(attempt) for attempt in range(2)] == ["first:8476", "first:8477"]
    assert hosts._replace(number=0).coordinator(0) == "10.0.0.2:8476"


def test_a_host_that_lives_refuses_a_connection_and_a_dead_one_does_not(monkeypatch):
    def connect(address, timeout):
        name, _ = address
        if name == "third":
            raise TimeoutError
        raise ConnectionRefusedError

    monkeypatch.setattr("socket.create_connection", connect)
    hosts = Hosts(("first", "second", "third"), 8476, 0, "10.0.0.1")
    assert hosts.silent() == ["third"]
    result = _AttemptResult((0, 134), 0, {0: Path("no.log")})
    text = _failure_text(result, 1, hosts)
    assert text.endswith("first, second, third.\nNo answer from third: dead, or cut off.")


def test_fewer_processes_are_refused_with_hosts(capfd):
    words = ["launch", "--hosts", "127.0.0.1:8476", "--processes", "1:4", "--", "train"]
    assert run(words) == 2
    problem = "launch: with --hosts every host starts all its processes, got 1:4."
    assert f"{problem}\nFix: --processes 4." in capfd.readouterr().err
