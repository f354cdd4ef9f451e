"""Processes of one job: told their places, heard, ended together, started again.

Small scripts stand for them.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.paths import ROOT

from shardopt.runtime._launch import _first_failure, launch
from shardopt.runtime._stored_programs import runs_on_cpus

HEAD = "import os, sys, time, signal, pathlib\nrank = int(os.environ['JAX_PROCESS_ID'])\n"
FOREVER = "while True: time.sleep(0.05)\n"


@pytest.fixture
def job(tmp_path):
    """Return a function that launches a script, and returns the exit code, the messages and the
    folder.
    """

    def run(script, processes=3, **options):
        said = []
        attempts = []

        def command(attempt):
            attempts.append(attempt)
            return [
                sys.executable,
                "-c",
                HEAD + f"here = pathlib.Path({str(tmp_path)!r})\n" + script,
            ]

        code = launch(
            command, processes=processes, log_dir=tmp_path / "logs", say=said.append, **options
        )
        return code, said, attempts

    run.folder = tmp_path
    return run


def logs(folder):
    return {path.name: path.read_text() for path in sorted((folder / "logs").glob("*.log"))}


def test_each_is_told_its_place_and_the_first_is_shown(job, capsys):
    script = (
        "print(rank, 'of', os.environ['JAX_NUM_PROCESSES'], 'at',"
        " os.environ['JAX_COORDINATOR_ADDRESS'])\nprint('[Gloo] Rank 0 is connected');"
        " print('warned', file=sys.stderr)\n"
    )
    assert job(script) == (0, [], [0])
    texts = logs(job.folder)
    assert sorted(texts) == ["process-0.log", "process-1.log", "process-2.log"]
    places = [
        re.search(r"^(\d) of 3 at (127\.0\.0\.1:\d+)$", text, re.MULTILINE).groups()
        for text in texts.values()
    ]
    assert [rank for rank, _ in places] == ["0", "1", "2"]
    assert len({address for _, address in places}) == 1
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == (f"0 of 3 at {places[0][1]}\n", "warned\n")  # without chatter
    assert all("[Gloo]" in text and "warned" in text for text in texts.values())


@pytest.mark.parametrize("mine", [None, "glibc.malloc.tcache_count=0"])
def test_processes_keep_their_memory_in_huge_pages_unless_the_user_tunes_glibc(
    job, capsys, monkeypatch, mine
):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if mine is not None:
        monkeypatch.setenv("GLIBC_TUNABLES", mine)
    assert job("print(os.environ['GLIBC_TUNABLES'])") == (0, [], [0])
    tunables = capsys.readouterr().out.strip()
    assert tunables == mine if mine else tunables.startswith("glibc.malloc.hugetlb=1:")


@pytest.mark.parametrize(
    ("names", "platforms", "cpus"),
    [
        (["null", "nvidiactl", "vfio/vfio"], None, True),
        (["nvidia0"], None, False),
        (["dxg"], None, False),
        (["accel3"], None, False),
        (["vfio/12"], "", False),
        (["kfd"], "rocm,cpu", False),
        (["nvidia0"], "cpu", True),
    ],
)
def test_a_host_with_an_accelerator_keeps_its_own_settings_of_glibc(
    tmp_path, monkeypatch, names, platforms, cpus
):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    if platforms is not None:
        monkeypatch.setenv("JAX_PLATFORMS", platforms)
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert runs_on_cpus(tmp_path) == cpus


def test_a_thread_reuses_small_memory_and_returns_large_memory(job, capsys, monkeypatch):
    """Large memory that is kept grows: the temporaries of a step are often freed after the next
    step took its own.
    """
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    script = (
        "import resource, threading\n"
        "from pathlib import Path\n"
        "def held():\n"
        "    return int(Path('/proc/self/statm').read_text().split()[1]) * resource.getpagesize()\n"
        "def faults(size):\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    bytearray(size)\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before\n"
        "def work():\n"
        "    small = [faults(2**24) for _ in range(4)]\n"
        "    before = held()\n"
        "    faults(2**27)\n"
        "    print(held() - before, *small)\n"
        "thread = threading.Thread(target=work)\n"
        "thread.start()\n"
        "thread.join()\n"
    )
    assert job(script) == (0, [], [0])
    growth, _, *fault_counts = map(int, capsys.readouterr().out.split())
    assert max(fault_counts) < 2**24 // 2**21 // 4, (
        "each page is one fault, and huge ones have 2 MB"
    )
    assert growth < 2**22


def test_when_one_fails_the_others_are_ended_and_its_words_are_shown(job):
    script = (
        "if rank == 2:\n"
        "    while len(list(here.glob('ready-*'))) < 2: time.sleep(0.02)\n"
        "    [print('line', i) for i in range(20)]; sys.exit(3)\n"
        "(here / f'ready-{rank}').touch()\n"
    )
    code, said, _ = job(script + FOREVER)
    lines = "".join(f"  line {i}\n" for i in range(8, 20))
    assert said == [
        "launch: process 2 of 3 ended with exit code 3; the others were ended.\n"
        f"Its last lines:\n{lines}All of it: {job.folder}/logs/process-2.log"
    ]
    assert code == 3


def test_who_does_not_listen_is_killed_with_its_children(job, monkeypatch):
    monkeypatch.setattr(sys.modules["shardopt.runtime._launch"], "_GRACE", 0.2)
    script = (
        "import subprocess\nif rank == 1:\n    while not (here / 'pids').exists():"
        " time.sleep(0.02)\n    sys.exit(1)\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nchild ="
        " subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n(here /"
        " 'new').write_text(f'{os.getpid()} {child.pid}'); (here / 'new').rename(here / 'pids')\n"
    )
    code, said, _ = job(script + FOREVER, processes=2)
    assert (code, said[0].splitlines()[1]) == (1, "It said nothing.")
    deadline = time.monotonic() + 60  # a child of a child ends a little after it was killed
    for pid in map(int, (job.folder / "pids").read_text().split()):
        while runs(pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not runs(pid)


def runs(pid):
    """Whether a process runs; one that has ended but was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_one_that_was_killed_is_named_not_those_that_miss_it(job):
    script = (
        "if rank == 1:\n"
        "    while len(list(here.glob('ready-*'))) < 2: time.sleep(0.02)\n"
        "    (here / 'gone').touch(); time.sleep(0.1); os.kill(os.getpid(), signal.SIGKILL)\n"
        "(here / f'ready-{rank}').touch()\n"
        "while not (here / 'gone').exists(): time.sleep(0.01)\n"
        "sys.exit('connection closed by peer')\n"
    )
    code, said, _ = job(script)
    assert code == 128 + 9
    assert said[0].startswith(
        "launch: process 1 of 3 was killed by SIGKILL; the others were ended.\nIt said nothing."
    )


def test_the_one_that_failed_first_is_named_though_its_end_is_seen_last(job):
    """The kernel closes connections before it reports an end."""
    script = (
        "from shardopt.runtime._processes import _follow_launcher; _follow_launcher()\nclass"
        " Slow(Exception):\n    def __str__(self): (here / 'gone').touch(); time.sleep(0.3); return"
        " 'the disk is full'\nif rank == 1:\n    while not (here / 'ready-0').exists():"
        " time.sleep(0.02)\n    raise Slow\n(here / f'ready-{rank}').touch()\nwhile not (here /"
        " 'gone').exists(): time.sleep(0.01)\nraise RuntimeError('connection closed by peer')\n"
    )
    code, said, _ = job(script, processes=2)
    assert code == 1
    assert said[0].startswith(
        "launch: process 1 of 2 ended with exit code 1; the others were ended.\n"
    )
    assert "Slow: the disk is full" in said[0]


@pytest.mark.parametrize(
    ("codes", "said", "first"),
    [
        ({0: 1, 1: 3}, [], 0),
        ({0: 1, 1: 3}, [1, 0], 1),
        # a process that ends by itself says nothing: the end that was seen first counts
        ({0: 3, 1: 1}, [1], 0),
        ({0: 1, 1: 3}, [2, 0], 0),  # who said it has not ended
        ({0: 1, 2: -9}, [1, 0], 2),
        ({0: 1, 2: -9, 1: 117}, [1, 0], 1),  # its device computes wrong
        ({0: 2, 2: -6}, [], 0),  # jax aborts who misses another
        ({2: -6, 0: 2}, [], 2),
        ({}, [], None),
    ],
)
def test_the_process_that_failed_first_is_found(codes, said, first):
    assert _first_failure(codes, said) == (None if first is None else (first, codes[first]))


def test_it_is_started_anew_as_often_as_it_may_be(job):
    script = "print('try'); sys.exit(5 if rank == 1 else 0)"
    code, said, attempts = job(script, max_restarts=2, processes=2)
    assert (code, attempts) == (5, [0, 1, 2])
    assert [line for line in said if line.startswith("launch: starting again")] == [
        "launch: starting again with 2 processes, restart 1 of 2.",
        "launch: starting again with 2 processes, restart 2 of 2.",
    ]
    names = [
        f"process-{rank}{attempt}.log"
        for rank in (0, 1)
        for attempt in ("", ".restart-1", ".restart-2")
    ]
    assert sorted(logs(job.folder)) == sorted(names)


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        pytest.param({}, [4, 4], marks=pytest.mark.slow),
        ({"fewer": (2, 3)}, [4, 3]),
        ({"fewer": (1, 2)}, [4, 2]),
        pytest.param({"fewer": (1,)}, [4, 1], marks=pytest.mark.slow),
    ],
)
def test_those_that_were_killed_are_left_out_where_fewer_will_do(job, options, counts):
    script = (
        "print(os.environ['JAX_NUM_PROCESSES'], flush=True)\n"
        "if rank == 1 and not (here / 'killed').exists():\n"
        "    (here / 'killed').touch(); os.kill(os.getpid(), signal.SIGKILL)\n"
        "while not (here / 'killed').exists(): time.sleep(0.01)\n"
    )
    code, _, _ = job(script, processes=4, max_restarts=1, **options)
    texts = logs(job.folder)
    assert code == 0
    assert [int(texts[f"process-0{attempt}.log"]) for attempt in ("", ".restart-1")] == counts
    assert sum("restart" in name for name in texts) == counts[1]


@pytest.mark.parametrize(
    ("options", "places"),
    [
        ({"fewer": (2,)}, ["0", "2"]),
        ({}, None),
    ],
)
def test_the_place_of_a_wrong_device_is_not_used_again(job, options, places):
    """Process 1 finds out, as all do; the others end first, with another code."""
    script = (
        "print(os.environ['SHARDOPT_PLACE'], flush=True)\n"
        "if 'SHARDOPT_RESTART' in os.environ: sys.exit(0)\n"
        "if rank == 2: (here / 'ended').touch()\n"
        "while not (here / 'ended').exists(): time.sleep(0.01)\n"
        "sys.exit(117 if rank == 1 else 1)\n"
    )
    code, said, attempts = job(script, max_restarts=1, **options)
    texts = {name: text.strip() for name, text in logs(job.folder).items()}
    assert [texts[f"process-{rank}.log"] for rank in range(3)] == ["0", "1", "2"]
    assert said[0].startswith(
        "launch: process 1 of 3 ended with exit code 117; the others were ended.\n"
    )
    if places is None:
        assert (code, attempts, said[1:]) == (
            117,
            [0],
            ["launch: the job cannot go on without 1 process of 3."],
        )
        return
    assert (code, attempts) == (0, [0, 1])
    assert said[1:] == [
        f"launch: starting again with {len(places)} processes without place 1, restart 1 of 1."
    ]
    assert [texts[f"process-{rank}.restart-1.log"] for rank in range(len(places))] == places


@pytest.mark.parametrize(
    ("number", "exit_code", "code"),
    [
        pytest.param(signal.SIGTERM, 0, 0, marks=pytest.mark.slow),
        (signal.SIGTERM, 143, 143),
        pytest.param(signal.SIGINT, 143, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, None, 143, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 3, 3, marks=pytest.mark.slow),
    ],
)
def test_a_signal_reaches_all_and_nothing_is_started_anew(tmp_path, number, exit_code, code):
    answer = f"signal.signal(signal.SIGTERM, lambda *_: sys.exit({exit_code}))\n"
    if exit_code is None:
        answer = ""
    script = HEAD + answer + "print('up', flush=True)\n" + FOREVER
    program = (
        "import pathlib, sys\nfrom shardopt.runtime._launch import launch\ncommand ="
        f" [sys.executable, '-c', {script!r}]\nsys.exit(launch(lambda attempt: command,"
        f" processes=2, max_restarts=3, log_dir=pathlib.Path({str(tmp_path)!r})))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    log = tmp_path / "process-1.log"
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as launcher:
        try:
            assert launcher.stdout.readline() == "up\n"
            while not log.exists() or log.read_text() != "up\n":
                assert launcher.poll() is None
                time.sleep(0.01)
            launcher.send_signal(number)
            _, said = launcher.communicate(timeout=60)
        finally:
            launcher.kill()  # the end of the block waits for it
    assert launcher.returncode == code
    assert said.startswith("launch: process ") == (exit_code == 3)
    names = {path.name for path in tmp_path.iterdir()} - {"compiled"}  # programs for a restart
    assert names == {".launch.lock", "process-0.log", "process-1.log"}


@pytest.mark.slow
def test_when_the_launcher_is_killed_its_processes_die(tmp_path):
    script = (
        "from shardopt.runtime._processes import _follow_launcher; import os, time\n"
        "_follow_launcher(); print(os.getpid(), flush=True)\n" + FOREVER
    )
    program = (
        "import pathlib, sys\nfrom shardopt.runtime._launch import launch\n"
        f"command = [sys.executable, '-c', {script!r}]\n"
        f"launch(lambda attempt: command, processes=1, log_dir=pathlib.Path({str(tmp_path)!r}))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        pid = int(process.stdout.readline())
        assert runs(pid)
        process.kill()
        process.wait()
        wait_for_the_end_of(pid)


LAUNCHER = """
import pathlib, sys
from shardopt.runtime._launch import launch
sys.exit(launch(lambda attempt: sys.argv[2:], processes=2, log_dir=pathlib.Path(sys.argv[1])))
"""


def launcher(folder, *command):
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    words = [sys.executable, "-c", LAUNCHER, str(folder), *command]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(words, env=os.environ | {"PYTHONPATH": path}, **pipes)


def test_when_the_launcher_is_killed_a_command_that_knows_nothing_of_it_dies_too(tmp_path):
    with launcher(tmp_path, "sh", "-c", "echo $$; exec sleep 600") as process:
        try:
            pid = int(process.stdout.readline())
            assert runs(pid)
        finally:
            process.kill()
    wait_for_the_end_of(pid)


def wait_for_the_end_of(pid):
    latest = time.monotonic() + 60
    while runs(pid):
        assert time.monotonic() < latest, "it lives on"
        time.sleep(0.01)


@pytest.mark.slow
def test_what_outlives_a_killed_launcher_keeps_its_logs(tmp_path):
    """Each command starts a process that nobody kills, and that may write to the log."""
    script = (
        "sleep 600 & echo $! > pid-$JAX_PROCESS_ID.new; mv pid-$JAX_PROCESS_ID.new"
        " pid-$JAX_PROCESS_ID; wait"
    )
    pids = [tmp_path / f"pid-{rank}" for rank in range(2)]
    first_launcher = launcher(tmp_path / "logs", "sh", "-c", f"cd {tmp_path}; {script}")
    try:
        while not all(path.exists() for path in pids):
            assert first_launcher.poll() is None
            time.sleep(0.01)
    finally:
        first_launcher.kill()
        first_launcher.wait()
        first_launcher.stdout.close()
        first_launcher.stderr.close()
    survivors = [int(path.read_text()) for path in pids]
    try:
        for pid in survivors:
            assert runs(pid)
            with launcher(tmp_path / "logs", "true") as other:
                _, said = other.communicate(timeout=60)
            refused, fix = said.splitlines()[-2:]
            assert re.fullmatch(
                rf"shardopt\.errors\.CheckpointInUseError: launch: {tmp_path}/logs is already being"
                r" written to by process "
                rf"{first_launcher.pid} on .*, since .*\. It cannot be seen from here: it runs in another"
                r" container, or it has ended "
                r"and what it started still runs\.",
                refused,
            )
            assert (
                fix == f"Fix: stop what has {tmp_path}/logs/.launch.lock open (fuser names it), or"
                " choose another --log-dir (of train, another --run-dir)."
            )
            os.kill(pid, signal.SIGKILL)
            wait_for_the_end_of(pid)
    finally:
        for pid in filter(runs, survivors):
            os.kill(pid, signal.SIGKILL)
    with launcher(tmp_path / "logs", "true") as other:
        assert other.communicate(timeout=60) == ("", "")
    assert other.returncode == 0


def test_what_a_job_left_behind_that_ended_by_itself_is_no_obstacle(job):
    """A service in a session of its own is not ended with the job."""
    script = (
        "import subprocess\nlinks = {name: os.path.realpath(f'/proc/self/fd/{name}') for name in"
        " os.listdir('/proc/self/fd')}\n(held,) = [int(name) for name, path in links.items() if"
        " path.endswith('.launch.lock')]\ncommand = [sys.executable, '-c', 'import time;"
        " time.sleep(600)']\nquiet = dict.fromkeys(('stdout', 'stderr'), subprocess.DEVNULL)\nchild"
        " = subprocess.Popen(command, start_new_session=True, pass_fds=(held,), **quiet)\n(here /"
        " 'pid').write_text(str(child.pid))\n"
    )
    try:
        assert job(script, processes=1) == (0, [], [0])
        assert runs(int((job.folder / "pid").read_text()))
        assert job("", processes=1) == (0, [], [0])
    finally:
        os.kill(int((job.folder / "pid").read_text()), signal.SIGKILL)


def ignored(status):
    """Return the signals that a process ignores, as /proc/PID/status says."""
    mask = int(re.search(r"^SigIgn:\s*([0-9a-f]+)$", status, re.MULTILINE)[1], 16)
    return {number for number in signal.Signals if mask & 1 << number - 1}


def test_a_command_ignores_no_signals_that_python_does(job):
    """One that inherits a deaf ear for broken pipes never ends when nobody reads it."""
    assert ignored(Path("/proc/self/status").read_text()) >= {signal.SIGPIPE, signal.SIGXFSZ}
    folder = job.folder / "logs"
    assert launch(lambda attempt: ["cat", "/proc/self/status"], processes=2, log_dir=folder) == 0
    assert [
        ignored(log) & {signal.SIGPIPE, signal.SIGXFSZ} for log in logs(job.folder).values()
    ] == [set(), set()]


def test_a_file_that_is_no_program_is_named(tmp_path):
    program = tmp_path / "program"
    said = []
    program.write_text("neither a script nor a program")
    options = {"processes": 1, "log_dir": tmp_path / "logs"}
    with pytest.raises(PermissionError, match="program"):
        launch(lambda attempt: [str(program)], **options)
    program.chmod(0o755)
    assert launch(lambda attempt: [str(program)], **options, say=said.append) == 1
    assert (
        f"  launch: {str(program)!r} cannot be started (OSError: Exec format error).\n" in said[0]
    )


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"processes": 0}, "--processes must be at least 1, got 0."),
        ({"processes": 2, "fewer": (0, 1)}, "--processes must be at least 1, got 0."),
        ({"processes": 2, "max_restarts": -1}, "--max-restarts must be at least 0, got -1."),
    ],
)
def test_numbers_that_cannot_be_are_refused(tmp_path, options, problem):
    with pytest.raises(ValueError, match=rf"^launch: {re.escape(problem)}"):
        launch(lambda attempt: [sys.executable], log_dir=tmp_path / "logs", **options)
    assert not (tmp_path / "logs").exists()


def test_what_cannot_be_started_is_an_error_and_leaves_nothing_running(tmp_path):
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        launch(lambda attempt: ["/no-such-program"], processes=2, log_dir=tmp_path)


def test_a_second_job_does_not_write_over_the_logs_of_the_first(job):
    script = (
        "(here / f'ready-{rank}').touch(); print('mine', flush=True)\n"
        "while not (here / 'end').exists(): time.sleep(0.02)\n"
    )
    outcome = []
    first = threading.Thread(target=lambda: outcome.append(job(script, processes=2)))
    first.start()
    try:
        while not (job.folder / "ready-1").exists():
            assert first.is_alive()
            time.sleep(0.02)
        with pytest.raises(ValueError, match=r"^launch: ") as caught:
            job("print('not mine')")
        assert re.fullmatch(
            rf"launch: {job.folder}/logs is already being written to by this very process, since"
            r" [\d: -]+\.\n"
            r"Fix: .*, or choose another --log-dir \(of train, another --run-dir\)\.",
            str(caught.value),
        )
    finally:
        (job.folder / "end").touch()
        first.join()
    assert outcome == [(0, [], [0])]
    assert logs(job.folder) == {"process-0.log": "mine\n", "process-1.log": "mine\n"}
    assert job("print('free again')", processes=1) == (0, [], [0])


@pytest.mark.slow  # test_sigterm_reaches_all_and_nothing_is_started_anew
def test_sigterm_ends_a_process_that_does_not_train_yet(job, monkeypatch):
    """jax would take it for a notice to itself, and the job would go on to its end."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    script = (
        "import shardopt as so; so.initialize(); os.kill(os.getpid(), signal.SIGTERM);"
        " time.sleep(5); print('goes on')"
    )
    code, said, _ = job(script, processes=1)
    assert code == 128 + signal.SIGTERM
    assert said[0].startswith(
        "launch: process 0 of 1 was killed by SIGTERM; the others were ended."
    )
    assert "goes on" not in logs(job.folder)["process-0.log"]


@pytest.mark.slow  # the other jobs of this file
def test_a_job_may_have_its_checkpoints_beside_its_logs(job):
    script = (
        "from shardopt.runtime import _files as files\nif rank == 0:"
        " files.acquire_lock('Checkpoints', here / 'logs')\n"
    )
    assert job(script, processes=2)[:2] == (0, [])
