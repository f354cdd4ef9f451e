"""`planning.compare` reads a profile that was recorded here, and one as a TPU writes it.

What has no match is listed.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardopt as so
from shardopt.hlo._program import Memory
from shardopt.planning import HARDWARE, ParallelLayout, compare, predict, trace
from shardopt.planning._aot import AotReport
from shardopt.planning._compiled_time import CompiledOperation, StepSeconds
from shardopt.planning._profile import read_profile

MODEL = so.BlockModel(
    embed=lambda outer, batch: batch @ outer["in"],
    block=lambda w, x: x + jnp.tanh(x @ w["up"]) @ w["down"],
    loss=lambda outer, x, batch: jnp.mean(x**2),
)
RULES = [("up", P(None, "tensor")), ("down", P("tensor"))]
SHAPES = {"blocks": {"up": (2, 64, 64), "down": (2, 64, 64)}, "in": (4, 64)}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A step, its arguments, and the profile of three runs of it and of another program."""
    opt = so.fsdp(optax.sgd(0.1), so.make_mesh(data=4, tensor=2), MODEL, rules=RULES)
    params = jax.tree.map(
        lambda shape: np.ones(shape, np.float32), SHAPES, is_leaf=lambda x: isinstance(x, tuple)
    )
    state, batch, folder = (
        opt.init(params),
        np.ones((8, 4), np.float32),
        tmp_path_factory.mktemp("profile"),
    )
    other = jax.jit(lambda x: jnp.sin(x) @ x)
    state, _ = jax.block_until_ready((opt.step(state, batch), other(np.ones((8, 8)))))[0]
    with jax.profiler.trace(str(folder)):
        for _ in range(3):
            state, _ = opt.step(state, batch)
        jax.block_until_ready((state, other(np.ones((8, 8)))))
    return folder, opt, state, batch


def test_a_recorded_profile_beside_a_plan(recorded):
    folder, opt, state, batch = recorded
    workload = trace(MODEL, jax.eval_shape(lambda: state.params), batch, rules=RULES)
    prediction = predict(
        workload, ParallelLayout(data=4, tensor=2), hardware=HARDWARE["h100"], batch_size=8
    )
    compared = compare(folder, prediction, opt.step, state, batch)
    audited = so.hlo.audit(opt.step, state, batch).collectives
    calls = {
        (x.kind, x.axes): sum(y.calls for y in audited if (y.kind, y.axes) == (x.kind, x.axes))
        for x in audited
    }
    assert {
        (x.kind, x.axes): x.calls for x in compared.collectives if x.measured is not None
    } == calls
    predicted = {
        x.kind: x.axes for x in compared.collectives if x.predicted and x.axes != ("tensor",)
    }
    assert predicted == dict.fromkeys(("all-gather", "all-reduce", "reduce-scatter"), ("data",))
    assert ("all-reduce", ("tensor",)) in calls
    assert all(x.measured > x.predicted for x in compared.collectives if x.predicted and x.measured)
    names = [x.name for x in compared.operations]
    assert len(names) == 10
    assert not any(name.startswith("while") for name in names)
    times = [x.measured for x in compared.operations]
    assert times == sorted(times, reverse=True)
    assert sum(times) <= compared.measured * 1.001
    assert next(text for text in compared.unmatched if "another program" in text).startswith(
        "jit__lambda"
    )
    assert not [text for text in compared.unmatched if "not in the p" in text]
    assert str(compared).startswith("jit_step: operations of ")
    assert "all-gather      data" in str(compared)


def test_of_a_plan_the_layout_with_the_mesh_is_taken(recorded):
    folder, opt, state, batch = recorded
    workload = trace(MODEL, jax.eval_shape(lambda: state.params), batch, rules=RULES)
    plans = so.plan(
        workload, hardware="v5e", chips=8, batch_size=8, placements=["fsdp"], schedules=["gpipe"]
    )
    compared = compare(folder, plans, opt.step, state, batch)
    chosen = next(p for p in plans.ranked if (p.mesh["data"], p.mesh["tensor"]) == (4, 2))
    assert compared.predicted == chosen.time.total
    with pytest.raises(ValueError, match="no layout of the plan has the mesh") as error:
        compare(folder, plans._replace(ranked=plans.ranked[:0]), opt.step, state, batch)
    assert "{'data': 4, 'tensor': 2}" in str(error.value)


HLO = """HloModule jit_step, is_scheduled=true, num_partitions=4

ENTRY %main (x: f32[8]) -> f32[32] {
  %x = f32[8]{0} parameter(0)
  %fusion.1 = f32[8]{0} negate(%x), metadata={op_name="jit(step)/neg"}
  %all-gather-start.2 = (f32[8]{0}, f32[32]{0}) all-gather-start(%fusion.1), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}, use_global_device_ids=true
  %all-gather-done.2 = f32[32]{0} all-gather-done(%all-gather-start.2)
  ROOT %all-reduce.3 = f32[32]{0} all-reduce(%all-gather-done.2), channel_id=2, replica_groups=[1,4]<=[4], use_global_device_ids=true, to_apply=%add
}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""
EVENTS = [
    ("fusion.1", 10, 3),
    ("all-gather-start.2", 14, 1),
    ("all-gather-done.2", 15, 4),
    ("gone.9", 20, 2),
]


def tpu_profile(folder):
    """Write the profile of two devices, whose second step takes twice as long, and of a program of
    another name.
    """
    planes = []
    for device in range(2):
        modules = [("jit_step(7)", 0, 100), ("jit_step(7)", 100, 100), ("jit_other(8)", 200, 100)]
        operations = [
            (f"%{name} = f32[8] op(...)", start, length) for name, start, length in EVENTS
        ]
        operations += [(name, 100 + start, 2 * length) for name, start, length in operations[:4]]
        operations += [("%fusion.1 = f32[2] op(...)", 210, 5)]
        names = sorted({name for name, *_ in modules + operations})
        metadata = "".join(
            f'event_metadata {{ key: {i} value {{ id: {i} name: "{n}" }} }}'
            for i, n in enumerate(names, 1)
        )

        def event(name, start, length):
            return f"events {{ metadata_id: {names.index(name) + 1} offset_ps: {start}000000 duration_ps: {length}000000 }}"  # noqa: B023

        lines = "".join(
            f'lines {{ id: {i} name: "{title}" {" ".join(event(*one) for one in events)} }}'
            for i, (title, events) in enumerate((("XLA Modules", modules), ("XLA Ops", operations)))
        )
        planes.append(f'planes {{ id: {device} name: "/device:TPU:{device}" {lines} {metadata} }}')
    data = jax.profiler.ProfileData.text_proto_to_serialized_xspace("\n".join(planes))
    for session in ("2026_01_01", "2026_01_02"):  # the newer one counts
        path = folder / "plugins" / "profile" / session / "host.xplane.pb"
        path.parent.mkdir(parents=True)
        path.write_bytes(data if session.endswith("2") else b"")


def aot_report():
    operations = tuple(
        CompiledOperation(name, s, 1, False, "", "")
        for name, s in (("fusion.1", 2e-6), ("all-gather all-gather-done.2", 1e-6))
    )
    collectives = {("all-gather", ("data",)): 5e-6, ("collective-permute", ("data",)): 1e-6}
    step = StepSeconds(1e-5, 5e-6, 5e-6, 0.0, all_operations=operations, collectives=collectives)
    mesh = {"data": 4, "pipeline": 1, "tensor": 1}
    audited = so.hlo.audit(HLO, mesh=mesh)
    return AotReport("v5e:2x2", 1, mesh, Memory(0, 0, 0, 0), audited, 0.0, 1.0, 1, HLO, step)


def test_a_profile_of_a_tpu_beside_a_compiled_plan(tmp_path):
    tpu_profile(tmp_path)
    compared = compare(tmp_path, aot_report())

    def micro(seconds):
        return None if seconds is None else round(seconds * 1e6, 3)

    assert [
        (x.name, micro(x.predicted), micro(x.measured), x.calls) for x in compared.operations
    ] == [
        ("all-gather-done.2", 1.0, 6.0, 1),
        ("fusion.1", 2.0, 4.5, 1),
        ("gone.9", None, 3.0, 1),
        ("all-gather-start.2", None, 1.5, 1),
    ]
    assert [
        (x.kind, x.axes, micro(x.predicted), micro(x.measured)) for x in compared.collectives
    ] == [
        ("all-gather", ("data",), 5.0, 7.5),
        ("collective-permute", ("data",), 1.0, None),
    ]
    assert compared.unmatched == (
        "gone.9: 0.003 ms, not in the program",
        "all-reduce.3: all-reduce of the program, not in the profile",
        "jit_other: 0.005 ms a run, another program",
    )
    assert (compared.predicted, micro(compared.measured)) == (1e-5, 15.0)


def test_without_numbered_runs_annotated_steps_count(tmp_path):
    """XLA:GPU numbers no runs in its events: the steps are counted by the annotations of `fit`."""
    path = tmp_path / "a.xplane.pb"
    stats = (
        '{ metadata_id: 1 str_value: "jit_step" } stats { metadata_id: 2 str_value: "fusion.1" }'
    )
    kernel = f"events {{ metadata_id: 1 duration_ps: 4000000 stats {stats} }}"
    names = 'event_metadata { key: 1 value { id: 1 name: "kernel" } } ' + " ".join(
        f'stat_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }}'
        for i, name in ((1, "hlo_module"), (2, "hlo_op"), (3, "step_num"))
    )
    steps = "".join(
        f"events {{ metadata_id: 1 stats {{ metadata_id: 3 int64_value: {i} }} }}" for i in (5, 6)
    )

    def write(annotations):
        planes = [
            f'planes {{ name: "/device:GPU:{i}" lines {{ name: "Stream" {kernel * 4} }} {names} }}'
            for i in range(2)
        ]
        planes.append(
            f'planes {{ name: "/host:CPU" lines {{ name: "python" {annotations} }} {names} }}'
        )
        path.write_bytes(
            jax.profiler.ProfileData.text_proto_to_serialized_xspace("\n".join(planes))
        )

    write(steps)
    (program,) = read_profile(path).values()
    assert program.operations == {"fusion.1": (8e-6, 2.0)}
    write("")
    with pytest.raises(ValueError, match="numbers no steps"):
        read_profile(path)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda folder: compare(folder, 3), TypeError, "plan must be a plan, got int."),
        (
            lambda folder: compare(
                folder,
                predict(work(), ParallelLayout(data=4), hardware=HARDWARE["v5e"], batch_size=8),
            ),
            ValueError,
            "without the program, operations of the profile cannot be told apart.",
        ),
        (
            lambda folder: compare(folder / "none", aot_report()),
            ValueError,
            "there is no profile (*.xplane.pb) in ",
        ),
        (
            lambda folder: compare(
                folder, aot_report()._replace(text=HLO.replace("jit_step", "jit_run"))
            ),
            ValueError,
            "the profile has no run of jit_run. It has: jit_other, jit_step.",
        ),
    ],
)
def test_wrong_arguments_are_refused(call, kind, message, tmp_path):
    tpu_profile(tmp_path)
    with pytest.raises(kind) as error:
        call(tmp_path)
    assert str(error.value).startswith(f"compare: {message}")


def work():
    shapes = jax.tree.map(
        lambda shape: jnp.zeros(shape), SHAPES, is_leaf=lambda x: isinstance(x, tuple)
    )
    return trace(MODEL, shapes, jnp.zeros((8, 4)), rules=RULES)
