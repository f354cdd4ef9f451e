"""Several hosts in one machine: network namespaces, joined by a switch in a namespace of its own.

No packet leaves the namespaces, so networks of parallel tests do not meet, although all have the
same addresses. The namespaces are named after this process. A network whose process has died is
removed when the next one is made.
"""

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from support.flags import QUICK_TO_COMPILE
from support.paths import ROOT

REQUIRED = "SHARDOPT_TESTS_NEED_HOSTS"
"""The environment variable with which `.ci/run` says that this machine can have hosts. Then a test
that finds none fails.
"""

_PREFIX = "shardopt"
_FILES = Path("/etc/netns")
"""`ip netns exec` puts the files of a namespace's folder here over those in /etc."""
_numbers = itertools.count()


def obstacle() -> str:
    """Return why this machine cannot have hosts, or ""."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "hosts are network namespaces of Linux, which need root"
    if not (shutil.which("ip") and shutil.which("tc")):
        return "hosts are made by ip and tc of iproute2, which is not installed"
    probe = f"{_PREFIX}-{os.getpid()}-probe"
    try:
        _ip("netns", "add", probe)
        _ip("netns", "delete", probe)
    except subprocess.CalledProcessError as error:
        return f"hosts are network namespaces, which are not allowed here: {error.stderr.strip()}"
    return ""


def need_hosts() -> None:
    """Skip the test on a machine that cannot have hosts, or fail where it must have them."""
    reason = obstacle()
    if reason and os.environ.get(REQUIRED):
        pytest.fail(f"{REQUIRED} is set, but {reason}")
    if reason:
        pytest.skip(reason)


@contextlib.contextmanager
def network(count: int) -> Iterator[list["Host"]]:
    """Make hosts that reach each other, and remove them with all their processes at the end."""
    remove_stale()
    name = f"{_PREFIX}-{os.getpid()}-{next(_numbers)}"
    switch = f"{name}-switch"
    hosts = [Host(f"{name}-{number}", switch, number) for number in range(count)]
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for host in hosts:
            host.plug_in(hosts)
        yield hosts
    finally:
        for namespace in (*(host.namespace for host in hosts), switch):
            _remove(namespace)


def remove_stale() -> None:
    """Remove the namespaces of processes that have died."""
    for namespace in re.findall(rf"^{_PREFIX}-\d+-\S+", _ip("netns", "list"), re.M):
        if not Path(f"/proc/{namespace.split('-')[1]}").exists():
            _remove(namespace)


class Host:
    """A host of a `network`.

    Attributes:
      name: its name, which all hosts of the network know.
      address: its address.
      namespace: its network namespace.
    """

    def __init__(self, namespace: str, switch: str, number: int):
        self.name = f"host{number}"
        self.address = f"10.77.0.{number + 1}"
        self.namespace = namespace
        self._switch = switch
        self._port = f"port{number}"
        self._hosts: list[Host] = []
        self._started: list[subprocess.Popen] = []

    def plug_in(self, hosts: list["Host"]) -> None:
        """Make the namespace, and a cable from it to the switch."""
        self._hosts = hosts
        (_FILES / self.namespace).mkdir(parents=True)
        _ip("netns", "add", self.namespace)
        cable = ("type", "veth", "peer", "name", "eth0", "netns", self.namespace)
        _ip("-n", self._switch, "link", "add", self._port, *cable)
        _ip("-n", self._switch, "link", "set", self._port, "master", "switch")
        _ip("-n", self.namespace, "link", "set", "lo", "up")
        _ip("-n", self.namespace, "link", "set", "eth0", "up")
        self._take_address(self.address)
        self.heal()

    def popen(self, command: Sequence[str], **options) -> subprocess.Popen:
        """Start a program on this host, with the host's name and files.

        jax runs on the CPU in it, and compiled programs are not shared with the tests.
        """
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        flags = " ".join(QUICK_TO_COMPILE)
        environment = os.environ | {"PYTHONPATH": path, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
        options["env"] = environment | options.get("env", {})
        named = 'hostname "$0" && exec "$@"'
        enter = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", named]
        process = subprocess.Popen([*enter, self.name, *map(str, command)], **options)
        self._started.append(process)
        return process

    def run(self, command: Sequence[str], **options) -> str:
        """Run a program on this host to its end, and return its output."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = self.popen(command, **pipes, **options)
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 0, said
        return said

    def limit(self, megabits: float) -> None:
        """Limit the link in both directions, to megabits per second."""
        shape = ["root", "tbf", "rate", f"{megabits}mbit", "burst", "64kb", "latency", "400ms"]
        _tc("-n", self._switch, "qdisc", "replace", "dev", self._port, *shape)
        _tc("-n", self.namespace, "qdisc", "replace", "dev", "eth0", *shape)

    def cut(self) -> None:
        """Cut the link: no packet comes or goes, and no connection is closed."""
        _ip("-n", self._switch, "link", "set", self._port, "down")

    def heal(self) -> None:
        """Make the link whole again."""
        _ip("-n", self._switch, "link", "set", self._port, "up")

    def pids(self) -> list[int]:
        """Return the processes of this host."""
        return _pids(self.namespace)

    def kill(self) -> None:
        """Let the host die: the network goes first, so no connection is closed in an orderly way."""
        self.cut()
        _kill(self.namespace)
        for process in self._started:
            process.wait()

    def restart(self, address: str) -> None:
        """Let a host that was killed come back with another address; its name stays."""
        _ip("-n", self.namespace, "addr", "delete", f"{self.address}/24", "dev", "eth0")
        self._take_address(address)
        self.heal()

    def _take_address(self, address: str) -> None:
        self.address = address
        _ip("-n", self.namespace, "addr", "add", f"{address}/24", "dev", "eth0")
        for host in self._hosts:
            # As on Debian, a host knows its own name as an address that no other host reaches.
            names = {known.name: known.address for known in self._hosts}
            names |= {host.name: "127.0.1.1", "localhost": "127.0.0.1"}
            lines = [f"{address} {name}\n" for name, address in names.items()]
            # written in place: programs that run have this file mounted
            folder = _FILES / host.namespace
            if folder.is_dir():
                (folder / "hosts").write_text("".join(lines))


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def _tc(*words: str) -> None:
    subprocess.run(["tc", *words], check=True, capture_output=True, text=True)


def _pids(namespace: str) -> list[int]:
    return [int(pid) for pid in _ip("netns", "pids", namespace).split()]


def _kill(namespace: str) -> None:
    """Kill the processes of a namespace, until it has none."""
    while pids := _pids(namespace):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _remove(namespace: str) -> None:
    """Remove a namespace with its processes and files, as far as it exists."""
    with contextlib.suppress(subprocess.CalledProcessError):
        _kill(namespace)
        _ip("netns", "delete", namespace)
    shutil.rmtree(_FILES / namespace, ignore_errors=True)
