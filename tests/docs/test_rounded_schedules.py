"""`benchmarks/rounded_schedules.py` without a compiler: loops and branches of a schedule, and the
tables of the note.
"""

import json
import types

import pytest
from support.paths import ROOT
from support.scripts import imported

pytestmark = pytest.mark.fast

# A loop from bundle 0x1 to 0x2f. Its body is 0x8 to 0x28. In it a loop of 2 turns from 0xa to 0x18
# has two branches, of 2 bundles and of 1, and a loop of 2 turns follows it directly, from 0x18 to
# 0x20. The branch at 0x20 starts copies.
SCHEDULE = """
     0   :  { %s1 = sld [smem:[#allocation0]] }
   0x1 LB: > { %s2 = smov 0 }
   0x3   : > { %3 = sbr.rel (%p1_p0) target = $region8 }
   0x8   : > { %s4 = smov 0 }
   0xa LB: >> { %v5 = vld [vmem:[%s4]] }
   0xb   : >> { %6 = sbr.rel (%p2_p0) target = $region12,  ;;  %p3_p1 = scmp.ge.s32.totalorder %s4, 2 /* loop exit test */ }
  0x10   : >> { %7 = vst [vmem:[%s4]] %v5
size: 512 */ }
  0x11   : >> { %8 = sbr.rel (%p3_p0) target = $region13 }
  0x12 PF: >> { %s9 = smov 1 } /* Start/End empty region 12 :: Start region 4 */
  0x13   : >> { %10 = sbr.rel (!%p3_p1) target = $region5 }
  0x16   : >> { %11 = vst [vmem:[%s4]] %v5 }
  0x17 PF: >> { %s12 = smov 1 } /* Start/End empty region 13 */
  0x18 LB: >> { %p4_p1 = scmp.ge.s32.totalorder %s4, 2 /* loop exit test */ }
  0x1b   : >> { %13 = sbr.rel (!%p4_p1) target = $region6 }
  0x20   : > { %14 = sbr.rel (%p5_p0) target = $region14 }
  0x25   : > { %15 = dma.hbm_to_vmem }
  0x27 PF: > { %s16 = smov 1 } /* Start/End empty region 14 */
  0x28 PF: > { %p6_p1 = scmp.ge.s32.totalorder %s16, 6 /* loop exit test */ } /* Start/End empty region 8 */
  0x2a   : > { %17 = sbr.rel (!%p6_p1) target = $region7 }
  0x2f   :  { %18 = vsyncpa [#allocation3], 1 }
"""


@pytest.fixture
def script():
    with imported("rounded_schedules") as module:
        yield module


def stored():
    return json.loads((ROOT / "benchmarks" / "results" / "rounded_schedules.json").read_text())[
        "results"
    ]


def test_the_loops_and_branches_of_a_schedule(script):
    loop = script.loop_of(SCHEDULE)
    assert (loop.start, loop.end, loop.turns) == (0x1, 0x2F, 6)
    (body,) = loop.parts
    assert (body.start, body.end, body.turns) == (0x8, 0x28, None)
    assert [(part.start, part.end, part.turns) for part in body.parts] == [
        (0xA, 0x18, 2),
        (0x18, 0x20, 2),
    ]
    assert [(part.start, part.end) for part in body.parts[0].parts] == [(0x10, 0x12), (0x16, 0x17)]
    with pytest.raises(ValueError, match="bundle 3 has a branch of an unknown form"):
        script.loop_of(SCHEDULE.replace("sbr.rel (%p1_p0)", "sbr.abs (%p1_p0)"))
    with pytest.raises(ValueError, match="bundle 19 has no target, and is not the end of a loop"):
        script.loop_of(
            SCHEDULE.replace("0x18 LB:", "0x18   :")
            .replace("0xa LB:", "0xa   :")
            .replace("0x1 LB:", "0x1   :")
        )
    end = script.loop_of(
        SCHEDULE.replace("  0x2f   :  {", "  0x2e   : > { %s18 = smov 0 }\n  0x2f   : > {"), delay=2
    ).end
    assert end == 0x30  # the marks of the loop go on


def test_a_loop_counts_with_its_turns_and_a_branch_as_often_as_it_runs(script, monkeypatch):
    call = script.Call("kernel", (2, 2), (), 0, 0)
    first, second = script.Part(0.25), script.Part(0.75)
    loops = (script.Part(2, is_loop=True, parts=(first, second)), script.Part(2, is_loop=True))
    monkeypatch.setattr(script, "form_of", lambda call: loops)
    bundles, steps = script.bundles_of(SCHEDULE, call)
    assert steps == 4  # two turns more skip the body
    first_loop = 2 * (11 + 0.25 * 2 + 0.75 * 1)
    assert bundles == 6 * (46 - 32) + 4 * (32 - 14 - 8 + first_loop + 2 * 8)
    monkeypatch.setattr(script, "form_of", lambda call: loops[:1])
    with pytest.raises(ValueError, match=r"^kernel: loops and branches \[2, 2\] are not those"):
        script.bundles_of(SCHEDULE, call)
    with pytest.raises(ValueError, match=r"^kernel: 6 turns of 1 bodies, for the grid \(5, 2\)"):
        script.bundles_of(SCHEDULE, call._replace(grid=(5, 2)))
    monkeypatch.setattr(script, "form_of", lambda call: loops)
    # the other core has three steps
    assert script.bundles_of(SCHEDULE, call._replace(grid=(7,))) == (bundles, 4)


def test_the_turns_of_a_loop_may_be_data(script, monkeypatch):
    schedule = SCHEDULE.replace(
        "%p4_p1 = scmp.ge.s32.totalorder %s4, 2 /* loop exit test */",
        "%p4_p1 = scmp.ge.s32 %s4, %s5",
    )
    (body,) = script.loop_of(schedule).parts
    assert [part.turns for part in body.parts] == [2, 0]
    call = script.Call("kernel", (4,), (), 0, 0)
    counted = script.Part(2, is_loop=True, parts=(script.Part(1), script.Part(1)))
    for turns in 2, 5:
        data = script.Part(turns, is_loop=True, is_counted=False)
        monkeypatch.setattr(script, "form_of", lambda call, data=data: (counted, data))
        bundles, _ = script.bundles_of(schedule, call)
        assert bundles == 6 * (46 - 32) + 4 * (32 - 14 - 8 + 2 * 14 + turns * 8)
    monkeypatch.setattr(script, "form_of", lambda call: (counted, script.Part(2, is_loop=True)))
    with pytest.raises(ValueError, match=r"loops and branches \[2, 0\] are not those"):
        script.bundles_of(schedule, call)


def test_a_block_is_copied_when_its_index_changes(script):
    def spec(shape, index):
        return types.SimpleNamespace(block_shape=shape, index_map=index)

    numbers = types.SimpleNamespace(itemsize=2)
    rows, columns = spec((None, 8, 256), lambda i, j: (i, 0)), spec((4, 1), lambda i, j: (0, j))
    assert script.moved_bytes((2, 3), [rows], [numbers]) == 2 * 8 * 256 * 2
    assert (
        script.moved_bytes((2, 3), [rows, columns], [numbers] * 2)
        == 2 * 8 * 256 * 2 + 6 * 4 * 128 * 2
    )


def test_the_note_has_the_numbers_of_the_results(script):
    text = (ROOT / "docs" / "notes" / "low_precision.md").read_text()
    results = stored()
    assert script.short_table(results, "v6e") in text
    for chip in "v6e", "tpu7x":
        assert script.short_table(results, chip, tuple(script.EXPERT_WEIGHTS)) in text
    rows = text[text.index("| bfloat16, XLA |") :].splitlines()[2:7]
    assert [row.strip("| ").split(" | ")[-1] for row in rows] == script.gate_column(results, "v6e")
