"""The same audit of what XLA:GPU and XLA:TPU make of a program: real compiles (programs/make.py)
and single lines.
"""

import math

import pytest
from support.paths import PROGRAMS
from support.traffic import Expected, check_traffic

from shardopt.hlo import audit

pytestmark = pytest.mark.fast

CUBE = {"data": 2, "pipeline": 2, "tensor": 2}
SIZE = 512 * 256 * 4


def read(name, mesh):
    return audit((PROGRAMS / f"{name}.hlo").read_text(), mesh=mesh)


@pytest.mark.parametrize("platform", ["h100", "v5e"])
def test_every_collective_of_an_accelerator_is_read(platform):
    report = read(f"{platform}_collectives", CUBE)
    assert [
        (
            collective.kind,
            collective.axes,
            collective.bytes,
            collective.calls,
            collective.conditional,
        )
        for collective in report.collectives
    ] == [
        ("all-reduce", ("tensor",), SIZE, 15, False),
        ("all-gather", ("data",), 2 * SIZE, 5, False),
        ("reduce-scatter", ("data",), 2 * SIZE, 5, False),
        ("all-to-all", ("pipeline",), SIZE, 1, False),
        ("collective-permute", ("tensor",), SIZE, 1, False),
        ("all-reduce", ("data",), SIZE, 1, True),
        ("all-reduce", ("data", "pipeline", "tensor"), SIZE, 1, False),
    ]


@pytest.mark.parametrize(("platform", "itemsize"), [("h100", 4), ("v5e", 2)])
def test_fsdp_on_an_accelerator_sends_the_stated_bytes(platform, itemsize):
    # four blocks, two micro-batches: gathered forward and backward, scattered once; tensor halves
    # every leaf. The TPU multiplies in bfloat16 by default, and its compiler gathers in it.
    leaf = 1024 * 4096 // 2
    report = read(f"{platform}_fsdp", {"data": 4, "tensor": 2})
    large = report.of(axis="data", min_bytes=1024)
    assert {kind: traffic.bytes for kind, traffic in large.by_kind().items()} == {
        "all-gather": 2 * 4 * 2 * 2 * leaf * itemsize,
        "reduce-scatter": 2 * 4 * 2 * leaf * 4,
    }
    assert all(collective.in_loop for collective in large.collectives)
    activations = report.of(axis="tensor", min_bytes=1024).by_axis()
    assert activations == {("tensor",): (16, 16 * 8 * 1024 * 4, 16 * 8 * 1024 * 4)}
    assert any(collective.asynchronous for collective in report.collectives)
    assert not all(collective.asynchronous for collective in report.collectives)


LIBTPUS = ("0.0.42", "0.0.50.1", "0.0.52")


@pytest.mark.parametrize("libtpu", LIBTPUS)
def test_collectives_on_the_sparse_core_are_read_for_every_libtpu(libtpu):
    report = read(f"v6e_sparse_core_{libtpu}", {"data": 16})
    size = 4096 * 1024 * 2
    assert [
        (
            collective.kind,
            collective.bytes,
            collective.wire_bytes,
            collective.loops,
            collective.asynchronous,
        )
        for collective in report.collectives
    ] == [
        ("all-gather", size, size * 15 // 16, (3,), True),
        ("reduce-scatter", size, size * 15 // 16, (3,), True),
        ("all-reduce", 2, 4, (), False),
    ]
    assert report.unread == ()


@pytest.mark.parametrize("libtpu", LIBTPUS)
def test_a_sparse_core_start_without_a_collective_is_reported(libtpu):
    text = (PROGRAMS / f"v6e_sparse_core_{libtpu}.hlo").read_text()
    hidden = text.replace("to_apply=%called_computation", "another_key=%called_computation")
    hidden = hidden.replace("called_computations={", "another_key={")
    report = audit(hidden, mesh={"data": 16})
    assert [collective.kind for collective in report.collectives] == ["all-reduce"]
    assert [name.partition(".")[0] for name in report.unread] == ["all-gather", "reduce-scatter"]
    line = f"{report.unread[0]}: starts work on the SparseCore in which no collective was found"
    assert line in str(report)
    with pytest.raises(
        AssertionError, match=r"does not send what it was meant to \(2 differences\)"
    ):
        check_traffic(report, [Expected("all-reduce", "data", 2)])


def program(*lines, computations="", partitions=8):
    return (
        f"HloModule m, is_scheduled=true, num_partitions={partitions}\n\n%add (a: f32[], b: f32[])"
        " -> f32[] {\n  %a = f32[] parameter(0)\n  %b = f32[] parameter(1)\n  ROOT %sum = f32[]"
        f" add(%a, %b)\n}}\n{computations}\n"
        "ENTRY %main (p: f32[16]) -> f32[16] {\n  %p = f32[16]{0} parameter(0)\n"
        + "".join(f"  {line}\n" for line in lines)
        + "  ROOT %out = f32[16]{0} copy(%p)\n}\n"
    )


ALL = "channel_id=1, replica_groups=[1,8]<=[8], use_global_device_ids=true"
PAIRS = "channel_id=1, source_target_pairs={{0,1},{1,2},{2,3},{3,0}}"
SYNC = ', backend_config={"collective_backend_config":{"is_sync":true,"is_pipelined":false}}'
STARTS = [
    # a start holds operands and results: the results count, and done not at all
    (f"%s = f32[16]{{0}} all-reduce-start(%p), {ALL}, to_apply=%add", "all-reduce", 64, True),
    (
        f"%s = (f32[16]{{0}}, f32[4]{{0}}) all-reduce-start(%p, %q), {ALL}, to_apply=%add",
        "all-reduce",
        80,
        True,
    ),
    (
        f"%s = (f32[16]{{0}}, f32[128]{{0}}) all-gather-start(%p), {ALL}, dimensions={{0}}",
        "all-gather",
        512,
        True,
    ),
    (
        f"%s = (f32[16]{{0}}, f32[128]{{0}}) all-gather-start(%p), {ALL}, dimensions={{0}}{SYNC}",
        "all-gather",
        512,
        False,
    ),
    (
        (
            "%s = ((f32[16]{0}, bf16[2]{0}), (f32[128]{0}, bf16[16]{0}))"
            f" all-gather-start(%p, %q), {ALL}"
        ),
        "all-gather",
        544,
        True,
    ),
    (
        f"%s = ((f32[16]{{0}}), f32[2]{{0}}) reduce-scatter-start(%p), {ALL}, to_apply=%add",
        "reduce-scatter",
        64,
        True,
    ),
    (
        "%s = ((f32[16]{0}), f32[16]{0}) all-to-all-start(%p), channel_id=1, replica_groups={}",
        "all-to-all",
        64,
        True,
    ),
    (
        f"%s = (f32[16]{{0}}, f32[16]{{0}}, u32[], u32[]) collective-permute-start(%p), {PAIRS}",
        "collective-permute",
        64,
        True,
    ),
    (
        f"%s = (f32[16]{{0}}, f32[16]{{0}}) collective-permute-start(%p), {PAIRS}",
        "collective-permute",
        64,
        True,
    ),
]


@pytest.mark.parametrize(("line", "kind", "size", "asynchronous"), STARTS)
def test_a_start_and_its_done_count_once(line, kind, size, asynchronous):
    opcode = line.split("(%p")[0].split()[-1]
    done = f"%d = f32[16]{{0}} {opcode.replace('-start', '-done')}(%s)"
    collectives = audit(program(line, done), mesh={"data": 8}).collectives
    assert [
        (collective.kind, collective.bytes, collective.calls, collective.asynchronous)
        for collective in collectives
    ] == [(kind, size, 1, asynchronous)]


def test_a_wrapped_collective_counts_once():
    wrapped = (
        "%wrapped (q: f32[16]) -> f32[2] {\n  %q = f32[16]{0} parameter(0)\n"
        f"  ROOT %rs = f32[2]{{0}} reduce-scatter(%q), {ALL}, dimensions={{0}}, to_apply=%add\n}}\n"
    )
    lines = (
        "%s = ((f32[16]{0}), f32[2]{0}, u32[]) async-start(%p), calls=%wrapped",
        "%u = ((f32[16]{0}), f32[2]{0}, u32[]) async-update(%s), calls=%wrapped",
        "%d = f32[2]{0} async-done(%u), calls=%wrapped",
    )
    collectives = audit(program(*lines, computations=wrapped), mesh={"data": 8}).collectives
    assert [
        (collective.kind, collective.bytes, collective.asynchronous) for collective in collectives
    ] == [("reduce-scatter", 64, True)]


def test_a_computation_that_is_called_twice_counts_twice():
    called = (
        "%called (q: f32[16]) -> f32[16] {\n  %q = f32[16]{0} parameter(0)\n"
        f"  ROOT %ar = f32[16]{{0}} all-reduce(%q), {ALL}, to_apply=%add\n}}\n"
    )
    lines = (
        "%x = f32[16]{0} call(%p), to_apply=%called",
        "%y = f32[16]{0} call(%x), to_apply=%called",
    )
    assert audit(program(*lines, computations=called), mesh={"data": 8}).total.calls == 2
    branches = (
        "%x = f32[16]{0} conditional(%go, %p, %p), true_computation=%called,"
        " false_computation=%called"
    )
    collectives = audit(program(branches, computations=called), mesh={"data": 8}).collectives
    assert [collective.conditional for collective in collectives] == [True, True]


def test_computations_that_nobody_calls_do_not_count():
    dead = (
        "%dead (q: f32[16]) -> f32[16] {\n  %q = f32[16]{0} parameter(0)\n"
        f"  ROOT %ar = f32[16]{{0}} all-reduce(%q), {ALL}, to_apply=%add\n}}\n"
    )
    assert audit(program(computations=dead), mesh={"data": 8}).collectives == ()


def test_the_tpus_fusion_of_all_reduce_and_slice_is_a_reduce_scatter():
    # padded from 16 to 32 so that each of 8 takes an aligned piece: the padded buffer is what
    # travels
    fused = (
        "%all-reduce-scatter (input: f32[16]) -> f32[4] {\n  %input = f32[16]{0:T(128)}"
        " parameter(0)\n  %zero = f32[] constant(0)\n  %pad = f32[32]{0:T(128)} pad(%input,"
        f" %zero), padding=0_16\n  %ar = f32[32]{{0:T(128)}} all-reduce(%pad), {ALL},"
        " to_apply=%add\n  %at = s32[] partition-id()\n  ROOT %mine = f32[4]{0:T(128)}"
        " dynamic-slice(%ar, %at), dynamic_slice_sizes={4}\n}\n"
    )
    line = "%s = f32[4]{0:T(128)} fusion(%p), kind=kCustom, calls=%all-reduce-scatter"
    collectives = audit(program(line, computations=fused), mesh={"data": 8}).collectives
    assert [
        (collective.kind, collective.bytes, collective.wire_bytes) for collective in collectives
    ] == [("reduce-scatter", 128, 112)]


@pytest.mark.parametrize(
    "form", ["{{0,1,2,3},{4,5,6,7}}", "[2,4]<=[8]", "mesh['axis_0'=2,'axis_1'=4] {'axis_1'}"]
)
@pytest.mark.parametrize(
    "mesh", [{"data": 2, "tensor": 4}, {"data": 2, "pipeline": 2, "tensor": 2}], ids=str
)
def test_the_names_are_the_meshes_not_the_texts(form, mesh):
    line = (
        f"%s = f32[16]{{0}} all-reduce(%p), channel_id=1, replica_groups={form},"
        " use_global_device_ids=true, to_apply=%add"
    )
    collective = audit(program(line), mesh=mesh).collectives[0]
    assert collective.axes == tuple(axis for axis in mesh if axis != "data")
    assert collective.group_size == math.prod(mesh.values()) // 2


def test_broadcasts_and_ragged_exchanges_are_counted():
    lines = (
        (
            "%b = f32[16]{0} collective-broadcast(%p), channel_id=1,"
            " replica_groups={{0,1,2,3,4,5,6,7}}"
        ),
        (
            "%r = f32[32]{0} ragged-all-to-all(%p, %o, %a, %b, %c, %d), channel_id=2,"
            " replica_groups={{0,1,2,3,4,5,6,7}}"
        ),
    )
    collectives = audit(program(*lines), mesh={"data": 8}).collectives
    assert [
        (collective.kind, collective.bytes, collective.wire_bytes) for collective in collectives
    ] == [
        ("collective-broadcast", 64, 64),
        ("ragged-all-to-all", 128, 112),
    ]


def test_what_crosses_slices_is_a_collective_over_the_outermost_axis():
    """XLA:TPU compiles one program a slice, and sends what crosses slices to the runtime that
    connects them.
    """
    report = read("v5e_two_slices", {"replica": 2, "data": 8, "pipeline": 1, "tensor": 1})
    weight = 512 * 128
    large = [
        (collective.kind, collective.axes, collective.bytes, collective.wire_bytes)
        for collective in report.of(min_bytes=1024).collectives
    ]
    assert sorted(large) == [
        ("all-gather", ("data",), 2 * weight, 2 * weight * 7 // 8),
        ("all-reduce", ("replica",), 4 * weight // 8, 4 * weight // 8),
        ("reduce-scatter", ("data",), 4 * weight, 4 * weight * 7 // 8),
    ]
    assert [
        collective.asynchronous
        for collective in report.collectives
        if collective.axes == ("replica",)
    ] == [
        True,
        True,
    ]
    with pytest.raises(
        ValueError, match=r"^audit: the program runs on 8 devices of each of several slices"
    ) as caught:
        read("v5e_two_slices", {"data": 8})
    assert str(caught.value).endswith(
        "Fix: pass the mesh of all slices, whose outermost axis spans them."
    )
