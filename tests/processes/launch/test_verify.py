"""`shardopt verify` as two processes of one job: every device is compared, process 0 writes, all
end with one code.
"""

import json
import subprocess

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture
def verify(shardopt, tmp_path):
    """Return a function that launches the command as two processes with two devices each: exit
    code, text, JSON.
    """

    def run(*words):
        command = ["launch", "--processes", 2, "--", "verify", "--devices", 4, *words]
        job = shardopt(*command, stderr=subprocess.STDOUT, cwd=tmp_path)
        text, _ = job.communicate(timeout=500)
        return job.returncode, text, json.loads((tmp_path / "verify.json").read_text())

    return run


@pytest.mark.parametrize("only", ["same bits", "collectives", "fsdp replica=2, gpt, adamw"])
def test_two_processes_pass(verify, only):
    code, text, report = verify("--only", only)
    assert code == 0, text
    assert "4 x cpu, 2 processes, jax " in text
    assert text.count("exit code 0") == 1
    assert report["devices"] == {"platform": "cpu", "kinds": ["cpu"], "count": 4, "processes": 2}
    assert {row["status"] for row in report["rows"]} == {"passed"}


def test_a_tiny_limit_ends_both(verify):
    code, text, report = verify("--only", "same bits", "--minutes", "1e-9")
    assert code == 3, text
    assert len(report["not_run"]) == len(report["rows"])
