"""Faults of the network under asynchronous training on Ray with a node on each host.

    python ray_on_hosts.py --seeds 1

Needs root, iproute2 and Ray: hosts are network namespaces (`tests/support/hosts.py`). host0 has the
head and the driver, three others a node with two CPUs each, for a server and two workers. Where the
head dies, one node is enough. A seed draws the moment, and how long a cut lasts.

Claim: the run ends with all its updates, or with an error that says what was lost. No push is
applied twice, updates that are lost are counted, and the log replays bit for bit. Rows are written
as they come, and a later call runs only what is missing, also a run whose cluster did not start.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import write_json

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests"))

from support.hosts import network, obstacle

JOB = ROOT / "tests" / "processes" / "hosts" / "ray_job.py"
RESULTS = Path(__file__).parent / "results" / "ray_on_hosts.json"
KINDS = ("worker cut", "server cut", "node dies", "head dies")
UPDATES = 300
START_RAY = """
import pathlib, time, types
from ray._private import node
from ray.scripts.scripts import main
# Ray gives a node 30 s to start, and its agents 15 s to write that they have no ports (-1): too few
# on a machine with load
node.time = types.SimpleNamespace(**vars(time))
node.time.monotonic = lambda: time.monotonic() / 6
begin = node.Node.start_ray_processes
def begin_with_files(self):
    for name in ("metrics_agent", "metrics_export", "dashboard_agent_listen"):
        pathlib.Path(self._session_dir, f"{name}_port_{self._node_id}").write_text("-1")
    begin(self)
node.Node.start_ray_processes = begin_with_files
main()
"""
VARIABLES = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_enable_metrics_collection": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}


def start_node(host, head, folder, cpus):
    """Start Ray on a host; the head, without CPUs, on the first one."""
    words = [sys.executable, "-c", START_RAY, "start", f"--node-ip-address={host.address}"]
    words += ["--disable-usage-stats", "--object-store-memory=100000000"]
    words += ["--runtime-env-agent-port=7004"]
    if host is head:
        words += ["--head", "--port=6379", "--num-cpus=0", "--include-dashboard=false"]
        words += [f"--temp-dir={folder}"]
    else:
        words += [f"--address={head.address}:6379", f"--num-cpus={cpus}"]
    process = host.popen(words, env=VARIABLES, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    if process.wait(timeout=600):
        raise RuntimeError(f"ray start on {host.name} ended with {process.returncode}")


def processes(host, name):
    """Return the processes of a host whose command has a name in it."""
    found = []
    for pid in host.pids():
        with contextlib.suppress(OSError):
            if name in Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace"):
                found.append(pid)
    return found


def wait_for(condition, job, seconds, said):
    deadline = time.monotonic() + seconds
    while not condition():
        if job.poll() is not None:
            raise RuntimeError(f"the driver has ended: {said.read_text()[-2000:]}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"nothing after {seconds} s: {said.read_text()[-2000:]}")
        time.sleep(0.2)


class Cluster:
    """Ray on hosts, with a driver on the first."""

    def __init__(self, hosts, folder, ray_folder):
        self.hosts = hosts
        self.folder = folder
        self.said = folder / "said"
        for host in hosts:
            start_node(host, hosts[0], ray_folder, cpus=2 if len(hosts) > 2 else 3)

    def start_driver(self):
        """Start the driver on the first host."""
        words = [sys.executable, JOB, f"{self.hosts[0].address}:6379", self.folder, str(UPDATES)]
        with self.said.open("a") as said:
            return self.hosts[0].popen(words, stdout=said, stderr=said, env=VARIABLES)

    def versions(self):
        """Return the checkpoints in the folder."""
        names = [path.name for path in (self.folder / "run").glob("*")]
        return [int("".join(filter(str.isdigit, name))) for name in names if name[-1:].isdigit()]

    def host_with(self, name):
        """Return a host that has an actor of a kind, or None."""
        return next((host for host in self.hosts[1:] if processes(host, name)), None)


def run(kind, seed, folder, ray_folder):
    """Run a fault; return its row."""
    rng = random.Random(f"{kind} {seed}")
    version = rng.randrange(20, 120)
    seconds = rng.choice([5, 60])
    row = {"kind": kind, "seed": seed, "at_version": version}
    with network(2 if kind == "head dies" else 4) as hosts:
        try:
            cluster = Cluster(hosts, folder, ray_folder)
            job = cluster.start_driver()
            reached = lambda: max(cluster.versions(), default=0) >= version // 10 * 10
            wait_for(reached, job, 900, cluster.said)
            if kind == "worker cut":
                victim = cluster.host_with("WorkerProcess")
            elif kind == "server cut":
                victim = cluster.host_with("ServerProcess")
            elif kind == "node dies":
                victim = cluster.host_with(rng.choice(["WorkerProcess", "ServerProcess"]))
            else:
                victim = hosts[0]
            row["server_on"] = getattr(cluster.host_with("ServerProcess"), "name", None)
            row["victim"] = victim.name
            began = time.monotonic()
            if kind.endswith("cut"):
                row["cut_seconds"] = seconds
                victim.cut()
                time.sleep(seconds)
                victim.heal()
            else:
                victim.kill()
            if kind == "head dies":
                for host in hosts:
                    host.kill()
                    host.restart(host.address)
                shutil.rmtree(ray_folder, ignore_errors=True)
                row["checkpoints"] = sorted(cluster.versions())
                cluster = Cluster(hosts, folder, ray_folder)
                job = cluster.start_driver()
            try:
                job.wait(timeout=900)
            except subprocess.TimeoutExpired:
                return row | {"outcome": "fault", "why": "hangs", "said": _tail(cluster.said)}
            row["seconds"] = round(time.monotonic() - began, 1)
            row["load"] = round(os.getloadavg()[0], 1)
            if not (folder / "result.json").exists():
                error = json.loads((folder / "error.json").read_text())
                return row | {"outcome": "stopped", **error}
            result = json.loads((folder / "result.json").read_text())
            good = result["replay_same_bits"] and result["each_once"]
            good &= result["pushes"] == result["pushes_in_log"] and result["updates"] == UPDATES
            return row | result | {"outcome": "right" if good else "fault"}
        except (RuntimeError, AssertionError, OSError, subprocess.SubprocessError) as error:
            return row | {"outcome": "not run", "why": str(error)[-1500:]}


def _tail(path):
    return path.read_text()[-2000:]


def table(rows):
    """Return the table of the page."""
    lines = ["| fault | server on | fault on | workers that began again | updates lost, counted |"]
    lines.append("|---|---|---|---:|---:|")
    for row in rows:
        name = row["kind"]
        if "cut_seconds" in row:
            name += f" for {row['cut_seconds']} s"
        joins = row["joins"] + row["resumes"] - 2
        lost = row["lost_updates"]
        if row["kind"] == "head dies":
            lost = "those after the checkpoint"
        lines.append(f"| {name} | {row['server_on']} | {row['victim']} | {joins} | {lost} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", default="", help="KIND:SEED of one run, which is not stored")
    options = parser.parse_args()
    if reason := obstacle():
        raise SystemExit(reason)
    draws = [(kind, seed) for seed in range(options.seeds) for kind in KINDS]
    if options.only:
        kind, seed = options.only.split(":")
        draws = [(kind, int(seed))]
    rows = []
    if RESULTS.exists() and not options.only:
        rows = json.loads(RESULTS.read_text())["results"]["rows"]
    known = {(row["kind"], row["seed"]) for row in rows}
    for kind, seed in draws:
        if (kind, seed) in known:
            continue
        # the path of a Unix socket is short
        folder, ray_folder = (Path(tempfile.mkdtemp(prefix=name)) for name in ("rj-", "r-"))
        row = run(kind, seed, folder, ray_folder)
        print(json.dumps(row), folder, flush=True)
        if row["outcome"] != "not run":
            rows.append(row)
        if not options.only:
            shutil.rmtree(ray_folder, ignore_errors=True)
            write_json(__file__, {"rows": rows})


if __name__ == "__main__":
    main()
