"""`benchmarks/kernel_schedules.py` without a compiler: branches of a schedule, and the counts that
the package has.
"""

import json

import pytest
from support.paths import ROOT
from support.scripts import imported

with imported("step_times") as step_times:
    SCHEDULED = step_times._attention_kernels.SCHEDULED

pytestmark = pytest.mark.fast

# A loop goes from bundle 2 to 12. The last steps skip 4 to 11, the branches in it skip 5 to 6 and 8
# to 10.
SCHEDULE = """
     0   :  { %s1 = sld [smem:[#allocation0]] }
   0x1   :  { %2 = sbr.rel (%p0) target = $region4 }
   0x2 LB: > { %s3 = smov 0 }
   0x3   : > { %4 = sbr.rel (%p1) target = $region8 }
   0x4   : > { %5 = sbr.rel (%p2) target = $region12 }
   0x5   : > { %v6 = vadd.f32 %v5, %v5 }
   0x6   : > { %v7 = vadd.f32 %v5, %v5 }
   0x7 PF: > { %8 = sbr.rel (%p3) target = $region16 }
   0x8   : > { %v9 = vadd.f32 %v5, %v5 }
0x9   : > { %v10 = vadd.f32 %v5, %v5 }
   0xa PF: > { %v11 = vadd.f32 %v5, %v5 }
   0xb PF: > { %v12 = vadd.f32 %v5, %v5 }
   0xc   : > { %13 = sbr.rel (!%p4) target = $region20 }
   0xd   :  { %14 = vsyncpa [#allocation3], 1 }
"""


@pytest.fixture
def script():
    with imported("kernel_schedules") as module:
        yield module


def test_a_loop_has_its_branches_as_parts(script):
    loop = script.loop_of(SCHEDULE)
    (body,) = loop.parts
    assert (loop.start, loop.end, loop.own) == (2, 13, 4)
    assert [(part.start, part.end) for part in body.parts] == [(5, 7), (8, 10)]
    assert body.own == 3


def test_counts_follow_the_branches_of_a_kernel(script, monkeypatch):
    monkeypatch.setitem(script.KERNELS, "fwd", (script.ROW, script.TILE))
    assert script.counts_of(SCHEDULE, "fwd", 512) == (7, 2, 2)
    monkeypatch.setitem(script.KERNELS, "fwd", (script.ROW, script.TILE, script.ROW))
    with pytest.raises(ValueError, match=r"^fwd: 2 branches, expected \('row', 'tile', 'row'\)"):
        script.counts_of(SCHEDULE, "fwd", 512)
    with pytest.raises(ValueError, match="no loop over grid steps"):
        script.loop_of(SCHEDULE.replace("LB", "  "))


# A loop goes from 2 to 20. Bundles 3 and 4 start copies, and 6 to 13 are skipped if the loop over
# tiles in it has no steps.
NESTED = """
   0x2 LB: > { %s3 = smov 0 }
   0x3   : > { %4 = sbr.rel (!%p1) target = $region8 }
   0x4   : > { %v5 = vadd.f32 %v5, %v5 }
   0x5 PF: > { %5 = sbr.rel (%p2) target = $region12 }
   0x6   : > { %v6 = vadd.f32 %v5, %v5 }
   0x7   :  {}
   0x8 LB: >> { %v7 = vadd.f32 %v5, %v5 }
   0x9   : >> { %v7 = vadd.f32 %v5, %v5 }
   0xa   : >> { %8 = sbr.rel (!%p3) target = $region16 }
   0xb   :  {}
   0xc   : >> { %v7 = vadd.f32 %v5, %v5 }
   0xe PF: > { %v9 = vadd.f32 %v5, %v5 }
   0xf   : > { %v9 = vadd.f32 %v5, %v5 }
  0x14   :  { %13 = sbr.rel (!%p4) target = $region20 }
  0x15   : > { %v9 = vadd.f32 %v5, %v5 }
  0x19   :  { %14 = vsyncpa [#allocation3], 1 }
"""


def test_a_loop_over_tiles_in_a_step_counts_for_each_tile(script):
    loop = script.loop_of(NESTED)
    assert (loop.start, loop.end) == (2, 21)
    assert [(part.start, part.end) for part in loop.parts] == [(4, 5), (6, 14)]
    # a step has 19 bundles. A tile has 8 of them, and the other 11 have the first tile of a row.
    assert script.counts_of(NESTED, "splash_forward", 512) == (8, 0, 3)
    assert script.counts_of(NESTED, "splash_forward", 512, 2) == (4, 0, 1.5)


def test_the_package_has_the_counts_of_the_results():
    record = json.loads((ROOT / "benchmarks" / "results" / "kernel_schedules.json").read_text())
    assert record["versions"]["libtpu"] == "0.0.52"
    stored = {}
    for chip, kernels in record["results"].items():
        for name, counts in kernels.items():
            kernel, _, block = name.partition(" ")
            kernel = kernel.replace("dkv", "fused") if block == "1024" else kernel
            stored[chip, kernel, int(block or 512), 128] = tuple(counts.values())
    assert {key: tuple(bundles) for key, bundles in SCHEDULED.items()} == stored


def test_the_note_has_the_table_of_the_results(script):
    results = json.loads((ROOT / "benchmarks" / "results" / "kernel_schedules.json").read_text())[
        "results"
    ]
    text = (ROOT / "docs" / "notes" / "kernels.md").read_text()
    assert script.table(results) in text
    milliseconds = {
        line.split(" | ")[1]: float(line.split(" | ")[5])
        for line in text.splitlines()
        if "| v5p | jax" in line
    }
    assert f"{milliseconds['jax, dq'] + milliseconds['jax, dkv']:.2f} ms on v5p" in text


def test_the_note_has_the_seconds_in_which_kernels_are_generated(script):
    seconds = json.loads((ROOT / "benchmarks" / "results" / "kernel_generation.json").read_text())[
        "results"
    ]
    assert set(seconds) == set(script.TOPOLOGIES)
    assert all(
        by_program[name] < 20
        for by_program in seconds.values()
        for name in by_program
        if "shardopt" in name
    )
    assert script.generation_table(seconds) in (ROOT / "docs" / "notes" / "kernels.md").read_text()
