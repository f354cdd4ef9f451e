"""Faults of the network under synchronous training on several hosts: what each run ends with.

    python faults_on_hosts.py --seeds 30 --long-cuts 5 --jobs 3

Needs root and iproute2: hosts are network namespaces (`tests/support/hosts.py`). A seed draws, for
each kind of fault: 2 or 4 hosts, the way to launch, the host that the fault meets, and the moment.
A small net trains for 60 steps under fsdp, with one process a host and a hang timeout of 15 s.

Claim: each run ends with the parameters of an undisturbed one, bit for bit. Or all processes that
can have ended within `STOP_SECONDS`, a message names the host and the phase, and the same command
then goes on to these parameters. A row of another outcome is a fault, and its folder is left. Rows
are written as they come, and a later call runs only the seeds that are missing.
"""

import argparse
import concurrent.futures
import contextlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

from common import write_json

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests"))

import numpy as np
from support.hosts import network, obstacle
from support.processes import Fork, saved_arrays

WORKER = ROOT / "tests" / "processes" / "hosts" / "worker_on_hosts.py"
ENTER = ROOT / "tests" / "support" / "enter_host.py"
RESULTS = Path(__file__).parent / "results" / "faults_on_hosts.json"
STEPS = 60
PAUSE = 0.1
HANG_TIMEOUT = 15
KINDS = ("dies", "cut for 5 s", "cut for 30 s", "another address", "slow", "cut for 120 s")
WAYS = ("launch", "SLURM", "by hand")
STOP_SECONDS = 150
"""Within so many seconds after a fault all processes that can have ended, once a step was taken."""
JOIN_STOP_SECONDS = 345
"""The same for a fault while processes join, from the moment at which all others do: jax waits 300 s
for a process that does not come.
"""
PREFETCHED = 4
"""So many steps a process may be ahead of another: batches are drawn before their step."""
NAMED = (
    r"process (?:\d+|\d+(?: and \d+)+) of \d+ hangs?: .*, last on {host} at step \d+ in '(\w+)'",
    r"(initialize): nothing has listened at {host}:\d+",
    r"(RegisterTask)[\s\S]*No answer from [^:]*\b{host}\b",  # of jax, while processes join
    r"at step \d+ in phase '(\w+)': nothing was heard for \d+ s from (?:{host}|{address})\b",
)
"""The messages that name a host and the phase."""

forks = threading.Lock()
"""All runs share the process that forks."""


class Job:
    """The processes of a job, one on each host."""

    def __init__(self, hosts, folder, way):
        self.hosts = hosts
        self.folder = folder
        self.began = time.monotonic()
        self.processes = []
        for rank, host in enumerate(hosts):
            command, variables = self._command(way, rank)
            variables |= {
                "JAX_COMPILATION_CACHE_DIR": str(folder.parent / f"programs-{len(hosts)}"),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                "PYTHONUNBUFFERED": "1",
            }
            words = [host.namespace, host.name, json.dumps(variables), *command]
            said = self.said_path(rank)
            with forks:
                self.processes.append(Fork(ENTER, words, said, said))

    def _command(self, way, rank):
        count = len(self.hosts)
        worker = [str(WORKER), str(self.folder), str(STEPS), str(PAUSE)]
        variables = {
            "SHARDOPT_HANG_TIMEOUT": str(HANG_TIMEOUT),
            "SHARDOPT_LISTEN_ADDRESS": self.hosts[rank].address,
        }
        if way == "launch":
            names = ",".join(["host0:8476", *(host.name for host in self.hosts[1:])])
            options = ["--hosts", names, "--processes", "1", "--hang-timeout", str(HANG_TIMEOUT)]
            options += ["--log-dir", str(self.folder / "logs"), "--"]
            return ["-m", "shardopt.cli", "launch", *options, *worker], {}
        if way == "by hand":
            return [*worker, "host0:8476", str(count), str(rank)], variables
        variables |= {
            "SLURM_JOB_ID": "66",
            "SLURM_STEP_NODELIST": f"host[0-{count - 1}]",
            "SLURM_NTASKS": str(count),
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": "0",
            "SLURM_STEP_NUM_NODES": str(count),
        }
        return worker, variables

    def said_path(self, rank):
        """Return the file with the output of a process."""
        return self.folder / f"said-{self.hosts[rank].name}"

    def said(self):
        """Return the output of all processes."""
        return "\n".join(self.said_path(rank).read_text() for rank in range(len(self.hosts)))

    def steps(self):
        """Return the step that each process has reached; -1 before its first."""
        paths = [self.folder / f"step-{rank}" for rank in range(len(self.hosts))]
        return [int((path.read_text() if path.exists() else "") or -1) for path in paths]

    def wait_for_begin(self, ranks):
        """Wait until the processes of some hosts join: under load imports take long."""
        paths = [self.folder / f"begins-{self.hosts[rank].name}" for rank in ranks]
        deadline = time.monotonic() + 120
        while not all(path.exists() for path in paths) and time.monotonic() < deadline:
            time.sleep(0.1)

    def wait_for_step(self, step):
        """Wait until all processes are at a step."""
        deadline = time.monotonic() + 300
        while min(self.steps()) < step:
            if self.codes() != [None] * len(self.hosts):
                raise RuntimeError(f"a process has ended before step {step}:\n{self.said()}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"step {step} was not reached:\n{self.said()}")
            time.sleep(0.1)

    def codes(self):
        """Return the exit code of each process, None of one that runs."""
        with forks:
            return [process.poll() for process in self.processes]

    def wait(self, ranks, seconds):
        """Wait for the processes of some hosts; return their exit codes, None of one that hangs."""
        deadline = time.monotonic() + seconds
        while None in (codes := [self.codes()[rank] for rank in ranks]):
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        return codes

    def end(self):
        """Kill all processes of the hosts."""
        for host in self.hosts:
            for pid in host.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        while None in self.codes():
            time.sleep(0.1)


def draw_of(kind, seed):
    """Return what a seed draws for a kind of fault."""
    rng = random.Random(f"{kind} {seed}")
    count = rng.choice([2, 4])
    # one of six faults comes while the processes join
    moment = f"{rng.uniform(0.5, 8.0):.1f} s" if rng.random() < 1 / 6 else rng.randrange(1, 45)
    return {
        "kind": kind,
        "seed": seed,
        "hosts": count,
        "way": rng.choice(WAYS),
        "victim": rng.randrange(count),
        "moment": moment,
        "variant": rng.randrange(2),
    }


def strike(draw, victim):
    """Let the fault happen. Return the thread that goes on with it, or None."""
    kind = draw["kind"]
    if kind == "dies":
        victim.kill()
    elif kind.startswith("cut"):
        victim.cut()
        time.sleep(float(kind.split()[2]))
        victim.heal()
    elif kind == "another address" and draw["variant"]:
        victim.kill()  # and comes back when the job is given again
    elif kind == "another address":
        victim.cut()
        time.sleep(1.0)
        victim.restart("10.77.0.9")
    elif draw["variant"]:
        victim.limit(0.1)
    else:
        pulses = threading.Thread(target=_pulse, args=(victim,), daemon=True)
        pulses.start()
        return pulses
    return None


def _pulse(victim):
    """Let the processes of a host run a quarter of the time, for 20 s."""
    end = time.monotonic() + 20.0
    while time.monotonic() < end:
        pids = victim.pids()
        for number, seconds in ((signal.SIGSTOP, 0.75), (signal.SIGCONT, 0.25)):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(seconds)


def is_right(folder, expected):
    """Return whether the parameters are those of an undisturbed run, bit for bit."""
    params = saved_arrays(folder / "params.npz")
    return all(np.array_equal(params[name], expected[name]) for name in expected)


def run(draw, folder, expected):
    """Run a draw; return its row."""
    with network(draw["hosts"]) as hosts:
        job = Job(hosts, folder, draw["way"])
        try:
            return draw | _outcome(draw, job, hosts, expected)
        except RuntimeError as error:
            return draw | {"outcome": "fault", "why": str(error)[-1500:]}
        finally:
            job.end()


def _outcome(draw, job, hosts, expected):
    victim = hosts[draw["victim"]]
    joins = isinstance(draw["moment"], str)
    if joins:
        time.sleep(float(draw["moment"].split()[0]))
    else:
        job.wait_for_step(draw["moment"])
    began = time.monotonic()
    pulses = strike(draw, victim)
    died = victim if draw["kind"] == "dies" or _reboots(draw) else None
    ranks = [rank for rank, host in enumerate(hosts) if host is not died]
    # an undisturbed end takes some time too
    limit = STOP_SECONDS - (time.monotonic() - began)
    if joins:
        job.wait_for_begin(ranks)
        limit = JOIN_STOP_SECONDS
    limit += 60 if draw["kind"] == "slow" else 0
    codes = job.wait(ranks, limit)
    row = {"seconds": round(time.monotonic() - began, 1), "codes": codes, "steps": job.steps()}
    row["load"] = round(os.getloadavg()[0], 1)
    if pulses is not None:
        pulses.join()
    if None in codes:
        return row | {"outcome": "fault", "why": f"hangs after {limit:.0f} s"}
    finished = (job.folder / "params.npz").exists()
    if not any(codes) and died is None:
        right = finished and is_right(job.folder, expected)
        return row | ({"outcome": "right"} if right else {"outcome": "fault", "why": "other bits"})
    if finished or not all(codes):
        return row | {"outcome": "fault", "why": "some ended as if complete"}
    if max(row["steps"]) - min(row["steps"]) > PREFETCHED:
        return row | {"outcome": "fault", "why": "one half went on"}
    row |= _named(job, victim, died)
    return row | _goes_on(draw, job, hosts, died, expected, row)


def _reboots(draw):
    return draw["kind"] == "another address" and draw["variant"]


def _named(job, victim, died):
    """Return the message that names the host and the phase, from a host that lives."""
    found = {}
    for rank, host in enumerate(job.hosts):
        if host is died:
            continue
        text = job.said_path(rank).read_text()
        for pattern in NAMED:
            pattern = pattern.format(host=victim.name, address=re.escape(victim.address))
            if match := re.search(pattern, text):
                found[host.name] = match[0]
    return {"message": next(iter(found.values()), "")[-200:] or None, "named_by": sorted(found)}


def _goes_on(draw, job, hosts, died, expected, row):
    """Give the same command again, on all hosts; return the outcome."""
    job.end()
    if died is not None:
        died.restart("10.77.0.9" if draw["kind"] == "another address" else died.address)
    before = len(job.said_path(0).read_text())
    again = Job(hosts, job.folder, draw["way"])
    try:
        codes = again.wait(range(len(hosts)), 300)
    finally:
        again.end()
    if any(codes) or None in codes:
        return {"outcome": "fault", "why": f"the restart ended with {codes}"}
    if not is_right(job.folder, expected):
        return {"outcome": "fault", "why": "the restart has other bits"}
    if row["message"] is None:
        return {"outcome": "fault", "why": "no message names host and phase"}
    first = re.search(r"step (\d+)/", job.said_path(0).read_text()[before:])
    return {"first_log_after": int(first[1]) if first else None, "outcome": "stopped"}


def undisturbed(count, folder):
    """Return the parameters of a run without a fault."""
    with network(count) as hosts:
        job = Job(hosts, folder, "by hand")
        try:
            codes = job.wait(range(count), 300)
        finally:
            job.end()
    assert codes == [0] * count, job.said()
    return saved_arrays(folder / "params.npz")


def summary(rows):
    """Return by kind how often each outcome came."""
    counts = {}
    for row in rows:
        outcomes = counts.setdefault(row["kind"], {})
        outcomes[row["outcome"]] = outcomes.get(row["outcome"], 0) + 1
    return counts


def table(rows):
    """Return the table of the page."""
    lines = [
        "| fault | runs | same parameters | stopped, named, and went on | seconds to the stop |"
    ]
    lines.append("|---|---:|---:|---:|---:|")
    for kind in KINDS:
        own = [row for row in rows if row["kind"] == kind]
        counts = [sum(row["outcome"] == outcome for row in own) for outcome in ("right", "stopped")]
        seconds = [row["seconds"] for row in own if row["outcome"] == "stopped"]
        span = f"{min(seconds):.0f} to {max(seconds):.0f}" if seconds else ""
        lines.append(f"| {kind} | {len(own)} | {counts[0]} | {counts[1]} | {span} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--long-cuts", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--only", default="", help="KIND:SEED of one run, which is not stored")
    options = parser.parse_args()
    if reason := obstacle():
        raise SystemExit(reason)
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    draws = [
        draw_of(kind, seed)
        for seed in range(options.seeds)
        for kind in KINDS
        if kind != "cut for 120 s" or seed < options.long_cuts
    ]
    if options.only:
        kind, seed = options.only.split(":")
        draws = [draw_of(kind, int(seed))]
    rows = []
    repeated = []  # rows that say in `why_repeated` what was wrong with the run itself
    if RESULTS.exists() and not options.only:
        results = json.loads(RESULTS.read_text())["results"]
        rows = results["rows"]
        repeated = results["repeated"]
    known = {(row["kind"], row["seed"]) for row in rows}
    draws = [draw for draw in draws if (draw["kind"], draw["seed"]) not in known]
    expected = {}
    for count in sorted({draw["hosts"] for draw in draws}):
        (folder / f"undisturbed-{count}").mkdir()
        expected[count] = undisturbed(count, folder / f"undisturbed-{count}")
        print(f"{count} hosts without a fault", flush=True)
    lock = threading.Lock()

    def work(draw):
        own = folder / f"{draw['kind']}-{draw['seed']}".replace(" ", "-")
        own.mkdir()
        row = run(draw, own, expected[draw["hosts"]])
        with lock:
            rows.append(row)
            print(json.dumps(row), flush=True)
            if row["outcome"] != "fault":
                shutil.rmtree(own)
            if not options.only:
                results = {"summary": summary(rows), "rows": rows, "repeated": repeated}
                write_json(__file__, results)

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(work, draws))
    print(table(rows))


if __name__ == "__main__":
    main()
