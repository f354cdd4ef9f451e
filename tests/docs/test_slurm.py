"""The script for SLURM runs with stubs of `srun`, `scancel` and `scontrol`."""

import os
import re
import signal
import subprocess
import time

import pytest
from support.paths import ROOT

pytestmark = pytest.mark.fast

PAGE = (ROOT / "docs/howto/preemption.md").read_text()
SCRIPT = re.search(r"^```bash\n(#!/bin/bash\n.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[1]

SRUN = """#!/bin/bash
ls -d logs >> calls
echo "srun $*" >> calls
trap 'echo "tasks got TERM" >> calls; exit 143' TERM
[ "$STUB" = deaf ] && trap '' TERM
echo $$ > tasks
[ "$STUB" = completes ] && exit 0
[ "$STUB" = fails ] && exit 7
while true; do command sleep 0.05; done
"""
SCANCEL = """#!/bin/bash
echo "scancel $*" >> calls
kill -TERM "$(cat tasks)"
"""
SCONTROL = """#!/bin/bash
echo "scontrol $*" >> calls
kill -0 "$(cat tasks)" && echo "tasks run" >> calls
kill -KILL "$(cat tasks)"
"""


@pytest.fixture
def job(tmp_path):
    """Return a function that runs the script; it returns the exit code and the calls of stubs."""
    stubs = tmp_path / "bin"
    stubs.mkdir()
    sleep = "#!/bin/bash\ncommand -p sleep 0.02\n"
    texts = {"srun": SRUN, "scancel": SCANCEL, "scontrol": SCONTROL, "sleep": sleep}
    for name, text in texts.items():
        (stubs / name).write_text(text.replace("command sleep", "/bin/sleep"))
        (stubs / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{stubs}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "4711",
        "SLURM_CPUS_PER_TASK": "12",
    }
    (tmp_path / "train.sbatch").write_text(SCRIPT)

    def run(behaviour, *, number=None):
        process = subprocess.Popen(
            ["bash", "train.sbatch"],
            cwd=tmp_path,
            env=environment | {"STUB": behaviour},
            stderr=subprocess.DEVNULL,
        )
        if number is not None:
            deadline = time.monotonic() + 60
            while not (tmp_path / "tasks").exists() and time.monotonic() < deadline:
                time.sleep(0.02)
            process.send_signal(number)
        code = process.wait(120)
        return code, (tmp_path / "calls").read_text().splitlines()[2:]

    return run


def test_the_job_starts_again_after_its_tasks_have_saved_at_the_time_limit(job):
    code, calls = job("runs", number=signal.SIGUSR1)
    assert code == 143
    assert calls == ["scancel --signal=TERM 4711", "tasks got TERM", "scontrol requeue 4711"]


def test_the_job_starts_again_if_its_tasks_do_not_end(job):
    code, calls = job("deaf", number=signal.SIGUSR1)
    assert code == 143
    assert calls == ["scancel --signal=TERM 4711", "scontrol requeue 4711", "tasks run"]


@pytest.mark.parametrize(("behaviour", "code"), [("completes", 0), ("fails", 7)])
def test_a_job_that_ends_by_itself_does_not_start_again(job, behaviour, code):
    assert job(behaviour) == (code, [])


def test_the_script_asks_for_what_the_restart_needs():
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", SCRIPT, re.MULTILINE))
    assert options["signal"] == "B:USR1@120"
    assert "requeue" in options
    assert {"time", "cpus-per-task", "open-mode"} <= options.keys()
    assert SCRIPT.index("mkdir -p logs") < SCRIPT.index("srun")


@pytest.mark.parametrize("page", ["docs/howto/preemption.md", "docs/clusters.md"])
def test_no_page_says_that_requeue_starts_a_job_again_at_its_time_limit(page):
    text = " ".join((ROOT / page).read_text().split())
    assert "`--requeue` starts the job again" not in text
    assert "`--requeue` and `so.Checkpoints` continue from it" not in text
    assert "also not with `--requeue`" in text
