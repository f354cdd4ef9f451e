"""Run a script on a host of `support.hosts`, in a fork of a process that has imported jax:
`enter_host.py NAMESPACE HOST VARIABLES SCRIPT ARGUMENTS`. A new interpreter takes 2.5 s of CPU.

The fork enters the host as `ip netns exec` does: its network, its name, and its /etc/hosts. A
script `-m MODULE` is a module. VARIABLES is a JSON object of environment variables.
"""

import ctypes
import json
import os
import runpy
import socket
import sys
from pathlib import Path

import jax

NETWORK, MOUNTS, NAMES = 0x40000000, 0x00020000, 0x04000000  # sched.h
BIND, RECURSIVE, SLAVE = 0x1000, 0x4000, 0x80000  # sys/mount.h
_libc = ctypes.CDLL(None, use_errno=True)


def _check(code):
    if code:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def enter(namespace, host):
    """Enter a host."""
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    _check(_libc.setns(descriptor, NETWORK))
    os.close(descriptor)
    _check(_libc.unshare(MOUNTS | NAMES))
    _check(_libc.mount(b"none", b"/", None, RECURSIVE | SLAVE, None))
    names = Path("/etc/netns", namespace, "hosts")
    _check(_libc.mount(str(names).encode(), b"/etc/hosts", None, BIND, None))
    socket.sethostname(host)


def main():
    namespace, host, variables, script, *arguments = sys.argv[1:]
    enter(namespace, host)
    os.environ.update(json.loads(variables))
    for name, value in os.environ.items():
        if name.startswith(("JAX_COMPILATION_CACHE", "JAX_PERSISTENT")):
            known = getattr(jax.config, name.lower())  # it was read when jax was imported
            jax.config.update(name.lower(), type(known)(value) if known is not None else value)
    if script == "-m":
        sys.argv[:] = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = [script, *arguments]
        sys.path.insert(0, str(Path(script).parent))
        runpy.run_path(script, run_name="__main__")


main()
