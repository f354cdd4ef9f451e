"""`audit` of programs compiled here: kinds, axes, bytes and calls against numbers worked out by
hand.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support.tiers import tiered
from support.traffic import Expected, check_traffic

import shardopt as so
from shardopt.hlo import audit

pytestmark = pytest.mark.fast

SHAPES = [{"data": 8}, {"data": 4, "tensor": 2}, {"data": 2, "pipeline": 2, "tensor": 2}]
ORDERS = [None, (3, 1, 7, 0, 2, 6, 5, 4)]
X = jnp.ones((64, 16))  # 4096 bytes
SIZE = 4096


def make_mesh(sizes, order=None):
    devices = np.array(jax.devices())[: math.prod(sizes.values())]
    devices = devices if order is None else devices[list(order)]
    return Mesh(
        devices.reshape(tuple(sizes.values())),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
    )


def mapped(function, mesh):
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))


def rows(function, mesh, x=X):
    return [
        (
            collective.kind,
            collective.axes,
            collective.bytes,
            collective.wire_bytes,
            collective.calls,
        )
        for collective in look(function, mesh, x).collectives
    ]


def look(function, mesh, x=X):
    return audit(mapped(function, mesh), x, mesh=mesh)


def subsets(sizes):
    return [
        axes for count in range(1, len(sizes) + 1) for axes in itertools.combinations(sizes, count)
    ]


@pytest.mark.parametrize(
    ("sizes", "axes", "order"),
    tiered(
        [(sizes, axes, order) for sizes in SHAPES for axes in subsets(sizes) for order in ORDERS],
        lambda row: (
            (row[2] is not None and len(row[0]) != 2) or row == (SHAPES[1], ("tensor",), None)
        ),
        ids=str,
    ),
)
def test_every_collective_is_read_over_every_set_of_axes(sizes, axes, order):
    mesh = make_mesh(sizes, order)
    n = math.prod(sizes[axis] for axis in axes)
    shift = [(i, (i + 1) % n) for i in range(n)]

    def program(x):
        gathered = lax.all_gather(lax.psum(jnp.sin(x), axes), axes, tiled=True)
        part = lax.psum_scatter(jnp.cos(gathered), axes, tiled=True)
        part = lax.all_to_all(jnp.tanh(part), axes, 0, 0, tiled=True)
        return lax.ppermute(jnp.exp(part), axes, shift)

    assert rows(program, mesh) == [
        ("all-reduce", axes, SIZE, 2 * SIZE * (n - 1) // n, 1),
        ("all-gather", axes, n * SIZE, (n - 1) * SIZE, 1),
        ("reduce-scatter", axes, n * SIZE, (n - 1) * SIZE, 1),
        ("all-to-all", axes, SIZE, SIZE * (n - 1) // n, 1),
        ("collective-permute", axes, SIZE, SIZE, 1),
    ]


def test_axes_come_in_mesh_order_however_they_are_named():
    mesh = make_mesh(SHAPES[2])
    assert rows(lambda x: lax.psum(x, ("tensor", "data")), mesh)[0][:2] == (
        "all-reduce",
        ("data", "tensor"),
    )


def test_axes_of_size_one_neither_appear_nor_count():
    mesh = make_mesh({"data": 4, "pipeline": 1, "tensor": 2})

    def program(x):
        return lax.psum(jnp.sin(lax.psum(x, ("data", "pipeline"))), "pipeline")

    assert rows(program, mesh) == [("all-reduce", ("data",), SIZE, 2 * SIZE * 3 // 4, 1)]


def test_a_single_device_sends_nothing():
    report = audit(jax.jit(lambda x: x @ x.T), X)
    assert (report.collectives, report.total, report.by_axis()) == ((), (0, 0, 0), {})
    assert str(report) == "jit__lambda: 0 collectives on one device"


def test_what_travels_together_is_summed():
    mesh = make_mesh({"data": 8})
    report = look(lambda x: lax.psum((jnp.sin(x), x.astype(jnp.int32), x.sum()), "data"), mesh)
    assert sum(collective.bytes for collective in report.collectives) == 2 * SIZE + 4
    assert sorted(shape for collective in report.collectives for shape in collective.shapes) == [
        "f32[64,16]",
        "f32[]",
        "s32[64,16]",
    ]


# XLA:CPU widens bfloat16 and float8 before a collective, so they are in test_hlo_text.py only
@pytest.mark.parametrize("dtype", ["bool", "int8", "int32", "uint32", "float16", "float32"])
def test_bytes_follow_the_dtype(dtype):
    mesh = make_mesh({"data": 8})
    table_rows = rows(lambda x: lax.all_gather(x, "data", tiled=True), mesh, X.astype(dtype))
    size = jnp.dtype(dtype).itemsize * 64 * 16 * 8
    assert table_rows == [("all-gather", ("data",), size, size * 7 // 8, 1)]


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        (((0, 1, 2, 3), (4, 5, 6, 7)), ("data",)),
        (((0, 2, 4, 6), (1, 3, 5, 7)), ("data",)),
        (((0, 1, 2, 4), (3, 5, 6, 7)), None),
    ],
)
def test_half_an_axis_is_a_part_of_it_and_no_axis(groups, axes):
    mesh = make_mesh({"data": 8})
    audit = look(
        lambda x: lax.psum(x, "data", axis_index_groups=[list(group) for group in groups]), mesh
    )
    collective = audit.collectives[0]
    assert (collective.axes, collective.part, collective.groups, collective.group_size) == (
        axes,
        axes is not None,
        groups,
        4,
    )
    assert (collective.bytes, collective.wire_bytes) == (SIZE, 2 * SIZE * 3 // 4)
    assert audit.by_axis() == {axes: (1, SIZE, 2 * SIZE * 3 // 4)}
    over = (
        "mixed groups outside of loops" if axes is None else "data outside of loops in steps of 4"
    )
    with pytest.raises(AssertionError) as caught:  # as many bytes, but not over the axis
        check_traffic(audit, [Expected("all-reduce", "data", SIZE, calls=1)])
    assert str(caught.value).startswith(
        "audit: the compiled program does not send what it was meant to (2 differences).\n"
        f"  all-reduce over data: expected {SIZE:,} bytes in 1 call, found none\n"
        f"  all-reduce over {over}: not expected, found {SIZE:,} bytes in 1 call\n"
    )


def test_a_permute_that_only_stays_is_nothing():
    mesh = make_mesh({"data": 8})
    assert rows(lambda x: lax.ppermute(x, "data", [(i, i) for i in range(8)]), mesh) == []


def nested(x):
    def inner(carry, _):
        return lax.psum(jnp.tanh(carry), "tensor"), None

    def outer(carry, _):
        carry, _ = lax.scan(inner, carry, None, length=3)
        return lax.psum(jnp.sin(carry), "data"), None

    return lax.psum(lax.scan(outer, x, None, length=5)[0], ("data", "tensor"))


def test_loops_multiply():
    report = look(nested, make_mesh(SHAPES[1]))
    assert [
        (collective.axes, collective.loops, collective.calls, collective.in_loop)
        for collective in report.collectives
    ] == [
        (("tensor",), (5, 3), 15, True),
        (("data",), (5,), 5, True),
        (("data", "tensor"), (), 1, False),
    ]
    assert report.total.bytes == 21 * SIZE
    assert report.by_axis()[("tensor",)] == (15, 15 * SIZE, 15 * SIZE)
    assert [collective.axes for collective in report.of(in_loop=False).collectives] == [
        ("data", "tensor")
    ]
    assert len(report.of(axis="data").collectives) == 2
    assert report.of("all-gather").collectives == ()


def test_a_loop_of_unknown_length_is_said_to_be_unknown():
    mesh = make_mesh({"data": 8})

    def program(x):
        def go(state):
            return state[0] < state[1].sum()

        return lax.while_loop(
            go, lambda state: (state[0] + 1, lax.psum(state[1], "data")), (0.0, x)
        )[1]

    report = look(program, mesh)
    assert [
        (collective.loops, collective.calls, collective.bytes) for collective in report.collectives
    ] == [((None,), None, SIZE)]
    assert report.total == (None, None, None)
    assert report.total_wire_bytes is None
    assert "data: ? bytes sent per device in ? calls" in str(report)
    assert str(report).endswith("?: in a loop whose trip count the program does not tell")


def test_a_loop_of_runtime_length_is_unknown():
    mesh = make_mesh({"data": 8})

    def program(x, n):
        return lax.fori_loop(0, n, lambda i, x: lax.psum(x, "data"), x)

    shards = jax.shard_map(program, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    assert audit(jax.jit(shards), X, jnp.int32(3), mesh=mesh).collectives[0].calls is None


def test_branches_count_as_taken_and_say_so():
    mesh = make_mesh({"data": 8})

    def program(x):
        x = lax.cond(x[0, 0] > 0, lambda v: lax.psum(v, "data"), lambda v: v * 2, x)
        return lax.pmax(x, "data")

    collectives = look(program, mesh).collectives
    assert [
        (collective.kind, collective.conditional, collective.calls) for collective in collectives
    ] == [
        ("all-reduce", True, 1),
        ("all-reduce", False, 1),
    ]


def test_branches_in_the_loop_over_ticks_count_as_often_as_the_schedule_takes_them():
    mesh = make_mesh({"data": 8})
    schedule = so.schedules.interleaved(2, 4, num_chunks=2)

    def twice(v):
        return lax.scan(lambda v, _: (lax.psum(jnp.sin(v), "data"), None), v, None, length=3)[0]

    def tick(x, row):
        x = lax.cond(row > 3, lambda v: lax.cond(row > 5, twice, jnp.cos, v), jnp.sin, x)
        return lax.pmax(jnp.tanh(x), "data"), None

    rows = jnp.arange(schedule.num_ticks)
    program = mapped(lambda x: lax.scan(tick, x, rows)[0], mesh)
    ticks = schedule.num_ticks
    report = audit(program, X, mesh=mesh, schedule=schedule)
    assert [(collective.conditional, collective.loops) for collective in report.collectives] == [
        (True, (8, 3)),
        (False, (ticks,)),
    ]
    assert [collective.loops for collective in audit(program, X, mesh=mesh).collectives] == [
        (ticks, 3),
        (ticks,),
    ]


def test_branches_elsewhere_than_in_the_loop_over_ticks_are_taken_each_time():
    mesh = make_mesh({"data": 8})
    schedule = so.schedules.eager_one_f_one_b(2, 4)
    ticks = schedule.num_ticks
    taken = schedule.num_micro_batches
    assert ticks != taken

    def send(v):
        return lax.psum(jnp.sin(v), "data")

    def branching(v, row):
        return lax.cond(row > 3, send, jnp.cos, v), None

    def turn(v, length):
        return lax.scan(branching, v, jnp.arange(length))[0]

    def over_ticks(tick):
        return lambda v: lax.scan(lambda v, row: (tick(v, row), None), v, jnp.arange(ticks))[0]

    def loops(function):
        (collective,) = audit(mapped(function, mesh), X, mesh=mesh, schedule=schedule).collectives
        assert collective.conditional
        return collective.loops

    passes = over_ticks(lambda v, row: lax.cond(row > 3, send, jnp.cos, v))
    assert loops(passes) == (taken,)
    assert loops(lambda x: lax.cond(x[0, 0] > 0, passes, jnp.cos, x)) == (
        taken,
    )  # within a branch, the loop counts as before
    assert loops(lambda x: lax.scan(lambda v, _: (passes(v), None), x, None, length=5)[0]) == (
        5,
        taken,
    )
    assert loops(over_ticks(lambda v, row: turn(v, 5))) == (ticks, 5)
    # a loop in it that happens to be as long is another
    assert loops(over_ticks(lambda v, row: turn(v, ticks))) == (ticks, ticks)
    assert loops(
        over_ticks(lambda v, row: lax.cond(row > 3, lambda v: turn(v, ticks), jnp.cos, v))
    ) == (taken, ticks)


def test_a_schedule_that_is_not_the_programs_is_refused():
    mesh = make_mesh({"data": 8})
    other = so.schedules.eager_one_f_one_b(2, 16)
    fix = (
        "Fix: pass the schedule that the program was made with, such as opt.config.schedule, or"
        " none."
    )
    problem = (
        f"audit: the schedule has {other.num_ticks} ticks, and no loop of the program turns so"
        " often: "
    )

    def turn(x, length):
        return lax.scan(lambda v, _: (lax.psum(jnp.sin(v), "data"), None), x, None, length=length)[
            0
        ]

    def unknown(x):
        return lax.while_loop(lambda v: v.sum() > 0, jnp.sin, x)

    for function, loops_message in (
        (lambda x: lax.psum(x, "data"), "it has no loop."),
        (lambda x: turn(turn(x, 3), 7), "its loops turn 3, 7 times."),
        (lambda x: unknown(turn(x, 3)), "its loops turn 3, unknown times."),
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            audit(mapped(function, mesh), X, mesh=mesh, schedule=other)
        assert str(caught.value) == f"{problem}{loops_message}\n{fix}"
    # one that turns once is no loop, and each pass is run once
    once = so.schedules.eager_one_f_one_b(1, 1)
    assert once.num_ticks == 1
    assert [
        collective.loops
        for collective in audit(
            mapped(lambda x: turn(x, 3), mesh), X, mesh=mesh, schedule=once
        ).collectives
    ] == [(3,)]


def test_the_partitioners_collectives_are_found_on_the_programs_own_mesh():
    mesh = make_mesh({"data": 2, "tensor": 4}, ORDERS[1])

    def sharding(*spec):
        return NamedSharding(mesh, P(*spec))

    two_layers = jax.jit(
        lambda x, up, down: jnp.tanh(x @ up) @ down,
        in_shardings=(sharding("data"), sharding(None, "tensor"), sharding("tensor")),
        out_shardings=sharding("data"),
    )
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 16), (16, 32), (32, 16))]
    compiled = two_layers.lower(*shapes).compile()
    for report in (
        audit(two_layers, *shapes),
        audit(two_layers.lower(*shapes)),
        audit(compiled),
        audit(compiled, mesh=mesh),
    ):
        assert report.mesh_shape == {"data": 2, "tensor": 4}
        assert [
            (collective.kind, collective.axes, collective.bytes)
            for collective in report.collectives
        ] == [("all-reduce", ("tensor",), 4 * 16 * 4)]


def test_the_mesh_is_taken_from_the_arguments_too():
    mesh = make_mesh({"data": 8})
    program = mapped(lambda x: lax.psum(x, "data"), mesh)
    x = jax.device_put(X, NamedSharding(mesh, P()))
    assert audit(program, x).collectives[0].axes == ("data",)


def test_pmap_is_a_mesh_of_one_axis():
    program = jax.pmap(lambda x: lax.psum(x, "i"), axis_name="i")
    collectives = audit(program, jnp.ones((8, 16)), mesh={"i": 8}).collectives
    assert [(collective.kind, collective.axes, collective.bytes) for collective in collectives] == [
        ("all-reduce", ("i",), 64)
    ]


def test_the_table_has_a_row_for_each_collective():
    report = look(nested, make_mesh(SHAPES[1]))
    lines = str(report).splitlines()
    assert lines[0] == "jit_nested: 3 collectives on data=4, tensor=2"
    assert lines[1].split() == [
        "kind",
        "axes",
        "bytes",
        "a",
        "call",
        "calls",
        "wire",
        "bytes",
        "loops",
        "notes",
        "where",
    ]
    assert lines[2].split()[:6] == ["all-reduce", "tensor", "4,096", "15", "61,440", "5x3"]
    assert lines[4].split()[:7] == ["all-reduce", "data", "x", "tensor", "4,096", "1", "7,168"]
    assert lines[5] == "tensor: 61,440 bytes sent per device in 15 calls"
    assert lines[7] == "data x tensor: 7,168 bytes sent per device in 1 call"
