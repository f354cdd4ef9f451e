"""Some rows of `benchmarks/faults_on_hosts.py` on four hosts, one for each way to launch."""

import importlib
import sys

import pytest
from support.hosts import need_hosts
from support.paths import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def script():
    need_hosts()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("faults_on_hosts")
    for name in ("common", "faults_on_hosts"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def expected(script, tmp_path_factory):
    """Return the parameters of an undisturbed run on four hosts."""
    return script.undisturbed(4, tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize(
    ("kind", "seed", "way", "outcome"),
    [
        ("cut for 5 s", 6, "by hand", "right"),
        ("dies", 2, "SLURM", "stopped"),
        ("cut for 30 s", 2, "launch", "stopped"),
    ],
)
def test_a_fault_on_four_hosts_ends_well(script, expected, tmp_path, kind, seed, way, outcome):
    draw = script.draw_of(kind, seed)
    assert (draw["hosts"], draw["way"]) == (4, way)
    row = script.run(draw, tmp_path, expected)
    assert row["outcome"] == outcome, row
