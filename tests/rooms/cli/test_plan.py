"""The commands that need no device: `shardopt plan`, `audit` and `schedule`: tables,
pictures, and refusals.
"""

import functools
import importlib.util

import optax
import pytest
from support.paths import PROGRAMS

import shardopt as so
from shardopt.cli import _plan, main
from shardopt.cli._plan import AuditOptions, _builder_text
from shardopt.hlo import Memory
from shardopt.hlo.proof._prove import Source
from shardopt.planning import ParallelLayout
from shardopt.planning._aot import AotReport
from shardopt.planning._models import find_model

pytestmark = pytest.mark.fast

GPT2 = ["plan", "--model", "gpt2", "--hardware", "a100", "--chips", "4"]


def run(capsys, *words):
    code = main(list(words))
    out = capsys.readouterr()
    return code, out.out, out.err


def test_plan_prints_a_table_and_what_to_type(capsys):
    code, out, _ = run(capsys, *GPT2, "--top", "2")
    lines = out.splitlines()
    assert code == 0
    assert lines[0] == "gpt2 (124 million parameters) on 4 chips of a100, 8 rows per batch"
    assert lines[4].startswith("... and ")
    assert lines[5] == "MFU: flops of the model / flops that the chips could do"
    assert lines[-3] == "the first of them:"
    assert lines[-2].startswith("  mesh = so.make_mesh(data=")
    assert lines[-1].startswith("  opt = so.hybrid(tx, mesh, model, placement=")


@pytest.mark.slow  # the texts of plans above
def test_what_to_type_is_python(capsys):
    _, out, _ = run(capsys, "plan", "--model", "llama2-70b", "--chips", "32", "--batch-size", "32")
    for line in out.splitlines()[-2:]:
        compile(line.strip(), "plan", "exec")


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(pipeline=4, micro_batches=8, schedule="eager_one_f_one_b"),
        ParallelLayout(pipeline=4, micro_batches=8, schedule="interleaved", chunks=2),
        ParallelLayout(pipeline=4, micro_batches=8, schedule="zero_bubble_v", chunks=2),
        ParallelLayout(pipeline=2, micro_batches=4, schedule="zero_bubble_2"),
    ],
    ids=lambda layout: layout.schedule,
)
def test_the_schedule_to_type_is_that_of_the_layout(layout):
    schedule = eval(_builder_text(layout, layout.schedule), {"so": so, "functools": functools})(
        layout.pipeline, layout.micro_batches
    )
    assert (schedule.name, schedule.ticks) == (layout.table().name, layout.table().ticks)


def test_plan_takes_an_optimizer_and_lists_as_many_layouts_as_asked_for(capsys):
    code, out, _ = run(capsys, *GPT2, "--top", "3", "--optimizer", "sgd(momentum=0.9)")
    assert code == 0
    tx = optax.sgd(1e-3, momentum=0.9)
    plans = so.plan("gpt2", hardware="a100", chips=4, batch_size=8, tx=tx)
    assert plans.table(3) in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--top", "0"], "plan: --top must be at least 1, got 0."),
        (["--length", "0"], "plan: --length must be at least 1, got 0."),
        (["--hardware", "abacus"], "plan: unknown hardware 'abacus'."),
        (["--model", "gpt9"], "plan: unknown model 'gpt9'."),
        (["--optimizer", "adamw("], "plan: --optimizer adamw( cannot be read."),
        (
            ["--optimizer", "adamx"],
            "plan: optax has no optimizer 'adamx' that a learning rate is enough for.",
        ),
        (
            ["--model", "llama3-405b"],
            "plan: llama3-405b on 4 chips of a100 with 8 rows per batch: nothing fits into",
        ),
    ],
)
def test_plan_refuses(capsys, words, message):
    code, out, err = run(capsys, *GPT2, *words)
    assert (code, out) == (2, "")
    assert f"error: {message}" in err


PROGRAM = PROGRAMS / "v5e_fsdp.hlo"


def test_audit_prints_what_the_library_does(capsys):
    assert main(["audit", str(PROGRAM), "--mesh", "data=4,tensor=2"]) == 0
    expected = so.hlo.audit(PROGRAM.read_text(), mesh={"data": 4, "tensor": 2})
    assert capsys.readouterr().out == f"{expected}\n"


COUNTED = """HloModule m, num_partitions=2

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0), sharding={devices=[2]<=[2]}
  ROOT %r = f32[8]{0} all-reduce(%p), replica_groups={{0,1}}, use_global_device_ids=true, channel_id=1, to_apply=%sum
}
"""
WRITTEN = """HloModule m

ENTRY %main (p: f32[16]) -> f32[8] {
  %p = f32[16]{0} parameter(0)
  %a = f32[8]{0} slice(%p), slice={[0:8]}
  %b = f32[8]{0} slice(%p), slice={[8:16]}
  ROOT %r = f32[8]{0} add(%a, %b)
}
"""


@pytest.mark.parametrize(
    ("written", "verdict"),
    [(WRITTEN, "unknown"), (WRITTEN.replace("add", "subtract"), "wrong"), (None, "wrong")],
)
def test_audit_proves_what_it_compiled(capsys, monkeypatch, written, verdict):
    source = Source(COUNTED, outputs=("{replicated}",), lowered=written)
    audit = so.hlo.audit(COUNTED, mesh={"data": 2})._replace(source=source)
    report = AotReport(
        "v5p:2x1x1", 1, {"data": 2}, Memory(8, 8, 8, 8), audit, 1.0, 1.0, 100, COUNTED
    )
    monkeypatch.setattr(_plan, "compile_model", lambda options: report)
    words = ["audit", "--topology", "v5p:2x1x1", "--model", "gpt2", "--prove"]
    assert main(words) == 0
    assert capsys.readouterr().out == f"{report}\n\n{audit}\n\n{report.proof}\n"
    assert report.proof.verdict == verdict


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "audit: there is nothing to audit."),
        (
            [str(PROGRAM), "--prove"],
            "audit: --prove needs to know where results live, which a file does not tell.",
        ),
        (
            [str(PROGRAM), "--topology", "v5e:4x4"],
            "audit: a file and --topology exclude each other.",
        ),
        ([str(PROGRAM), "--mesh", "depth=8"], "audit: --mesh depth=8 cannot be read."),
        (
            [str(PROGRAM), "--mesh", "data=4"],
            "audit: the mesh (data=4) has 4 devices, the program 8.",
        ),
        (
            [str(PROGRAM)],
            "audit: cannot tell the mesh of this program on 8 devices, none of its inputs has one.",
        ),
        ([__file__], "audit: this is not the text of an HLO module: it has no HloModule line."),
        (["--topology", "v9:2"], "audit: unknown topology 'v9:2'."),
        (["--topology", "v5e:2x4", "--model", "gpt9"], "audit: unknown model 'gpt9'."),
        (["--topology", "v5e:2x4", "--rows", "0"], "audit: --rows must be at least 1, got 0."),
    ],
)
def test_audit_refuses(capsys, words, message):
    assert main(["audit", *words]) == 2
    out = capsys.readouterr()
    assert out.out == ""
    assert f"error: {message}" in out.err


def test_a_missing_file_and_a_missing_compiler_are_named(capsys, monkeypatch):
    assert main(["audit", "nowhere.hlo"]) == 2
    assert "audit: nowhere.hlo: No such file or directory.\nFix: " in capsys.readouterr().err
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "libtpu" else find(name)
    )
    assert main(["audit", "--topology", "v5e:2x4", "--model", "gpt2"]) == 2
    assert "Fix: pip install 'shardopt[tpu]'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_is_compiled_for_chips_that_are_not_there(capsys):
    """The test fails, rather than skips, if libtpu is not installed: pip install 'shardopt[tpu]'."""
    options = AuditOptions(
        model="gpt2", length=128, topology="v5e:2x4", mesh="replica=2", strategy="zero1"
    )
    report = _plan.compile_model(options)
    assert report.mesh_shape == {"replica": 2, "data": 4, "pipeline": 1, "tensor": 1}
    # parameters whole, their moments split over data, and a row of tokens
    formula = (4 + 8 / 4) * find_model("gpt2").num_parameters + 129 * 4
    assert report.memory.arguments - report.argument_padding == pytest.approx(formula, rel=0.01)
    assert 0 < report.memory.peak < report.hbm_bytes
    assert report.flops > 0
    assert any("replica" in axes for axes in report.audit.by_axis())
