"""Jobs on several hosts, and the addresses at which they listen."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.hosts import need_hosts, network

HOSTS = "host0:8476,host1"


@pytest.fixture
def pair():
    need_hosts()
    with network(2) as hosts:
        yield hosts


def launch(host, folder, worker, *options, hosts=HOSTS):
    """Start `shardopt launch` on a host, with its output in FOLDER/said-HOST."""
    command = [sys.executable, "-m", "shardopt.cli", "launch", "--hosts", hosts, *options]
    command += ["--log-dir", folder / "logs", "--", Path(__file__).with_name(worker[0])]
    with (folder / f"said-{host.name}").open("w") as said:
        return host.popen([*command, *worker[1:]], stdout=said, stderr=subprocess.STDOUT)


def said(folder, host):
    """Return the output of the launcher of a host."""
    return (folder / f"said-{host.name}").read_text()


def wait_for(condition, jobs, seconds=240):
    """Wait until a condition holds; fail if a job ends before, or time runs out."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert all(job.poll() is None for job in jobs), "a job has ended"
        assert time.monotonic() < deadline
        time.sleep(0.05)


def listening(host):
    """Return the addresses at which programs of a host listen."""
    lines = host.run(["ss", "--no-header", "--listening", "--tcp", "--numeric"]).splitlines()
    addresses = {line.split()[3].rpartition(":")[0] for line in lines}
    return {re.sub(r"[\[\]]|::ffff:", "", address) for address in addresses}
