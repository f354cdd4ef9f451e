"""`so.planning.aot`: refusals before a compiler is needed, and (slow) the results of the real TPU
compiler.
"""

import importlib.metadata
import importlib.util
import os
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.scripts import imported

import shardopt as so
from benchmarks import transformer
from shardopt.core import calling
from shardopt.core._extras import is_installed
from shardopt.hlo import Audit, Memory
from shardopt.planning import HARDWARE, ParallelLayout, Transformer, predict, topology_devices
from shardopt.planning._aot import AotReport, _compile
from shardopt.planning._layout import stored_bytes
from shardopt.planning._models import RULES
from shardopt.planning._topologies import _without_a_tpu, parse_topology

with imported("step_times") as step_times:
    pass

pytestmark = pytest.mark.fast

SHAPE = Transformer("t", 256, 2, 8, 512, 1024, 64, num_kv_heads=4)
SMALL = Transformer("t", 32, 2, 4, 64, 64, 16, num_kv_heads=2)
FORMS = "a100:8, h100:8, h200:8, b200:8, v4:4x4x4, v5e:4x4, v5p:4x4x4, v6e:4x4, tpu7x:4x4x4"


def refused(kind, message):
    return pytest.raises(kind, match=f"^{re.escape(message)}$")


def compiled(make=None, batch=None, **sizes):
    make = make or (
        lambda mesh: so.fsdp(
            optax.adamw(1e-3), mesh, transformer.model(SHAPE), rules=rules_of(mesh)
        )
    )
    return so.planning.aot(
        make, SHAPE.abstract_params(), batch or transformer.abstract_batch(SHAPE, 32), **sizes
    )


def rules_of(mesh):
    return RULES if mesh.shape["tensor"] > 1 else ()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "v9:4x4",
            (
                "unknown topology 'v9:4x4'.\nFix: write chip and torus, with sizes of your own:"
                f" {FORMS}."
            ),
        ),
        (
            "v5p",
            f"unknown topology 'v5p'.\nFix: write chip and torus, with sizes of your own: {FORMS}.",
        ),
        (
            "v6e:4x4x4",
            (
                "topology 'v6e:4x4x4' has 3 axes, v6e has 2.\nFix: write it as v6e:4x4; its chips"
                " form a torus of 2 axes."
            ),
        ),
        (
            "h100:2x4",
            (
                "topology 'h100:2x4' has 2 axes, h100 has 1.\nFix: write it as h100:8; the GPUs of"
                " a node share a switch."
            ),
        ),
        (
            "h100:16",
            (
                "topology 'h100:16' has 16 GPUs, a node of h100 has 1 to 8.\n"
                "Fix: write h100:8, and how many nodes as num_slices."
            ),
        ),
    ],
)
def test_unknown_topologies_list_the_known_ones(name, message):
    with refused(ValueError, f"aot: {message}"):
        compiled(topology=name)


def test_a_topology_of_another_kind_is_refused():
    with refused(TypeError, f"aot: topology must be a string, got 512.\nFix: write {FORMS}."):
        compiled(topology=512)
    with refused(ValueError, "aot: num_slices must be at least 1, got 0."):
        compiled(topology="v5p:4x4x4", num_slices=0)


def test_a_topology_is_a_chip_and_a_torus():
    chip, dims = parse_topology("v5p:4x4x8")
    assert (chip.name, dims) == ("v5p", (4, 4, 8))


def test_without_the_compiler_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    message = "aot: libtpu is needed, which is not installed.\nFix: pip install 'shardopt[tpu]'"
    with refused(ModuleNotFoundError, message):
        compiled(topology="v5p:4x4x4")
    message = (
        "aot: jax_cuda12_plugin is needed, which is not installed.\nFix: pip install"
        " 'shardopt[gpu]'"
    )
    with refused(ModuleNotFoundError, message):
        compiled(topology="h100:8")


def test_the_environment_is_left_as_it_was(monkeypatch):
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "mine")
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    before = dict(os.environ)
    with _without_a_tpu():
        assert os.environ["TPU_SKIP_MDS_QUERY"] == "1"
        assert os.environ["TPU_ACCELERATOR_TYPE"] == "mine"
    assert dict(os.environ) == before


def test_a_step_that_does_not_fit_says_so():
    class Lowered:
        def compile(self):
            raise RuntimeError(
                "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 40.5G of 31.25G"
                " hbm."
            )

    chip, _ = parse_topology("v6e:4x4")
    message = (
        "aot: the step does not fit into a chip of v6e:4x4, 34,359,738,368 bytes (it needs 40.5G of"
        " 31.25G hbm).\nFix: shard more (fsdp, tensor, more chips), recompute (remat), or take"
        " smaller micro-batches; so.plan ranks them."
    )
    with refused(ValueError, message), calling("aot"):
        _compile(Lowered(), "v6e:4x4", chip)


def test_a_gpu_step_that_does_not_fit_says_so():
    """XLA:GPU compiles it all the same."""

    class Compiled:
        def memory_analysis(self):
            sizes = {"argument": 60, "output": 50, "temp": 30, "alias": 50}
            return types.SimpleNamespace(
                **{f"{name}_size_in_bytes": gb * 10**9 for name, gb in sizes.items()}
            )

    class Lowered:
        def compile(self):
            return Compiled()

    chip, _ = parse_topology("h100:8")
    message_start = (
        "aot: the step does not fit into a chip of h100:8, 80,000,000,000 bytes (it needs"
        " 90,000,000,000).\nFix: shard"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message_start)}"), calling("aot"):
        _compile(Lowered(), "h100:8", chip)
    assert _compile(Lowered(), "h200:8", parse_topology("h200:8")[0]).memory_analysis()


def test_other_errors_of_the_compiler_are_its_own():
    class Lowered:
        def compile(self):
            raise RuntimeError("INTERNAL: something else")

    with pytest.raises(RuntimeError, match=r"^INTERNAL: something else$"):
        _compile(Lowered(), "v6e:4x4", parse_topology("v6e:4x4")[0])


def test_a_program_that_jaxlib_cannot_read_back_says_so():
    class Lowered:
        def compile(self):
            raise RuntimeError(
                "INTERNAL: RET_CHECK failure async-update instruction should have 1 operands but"
                " sees 2"
            )

    expected = r"^aot: jaxlib [\d.]+ cannot read the program for v5p:2x2x1 back: async-update"
    with pytest.raises(RuntimeError, match=expected), calling("aot"):
        _compile(Lowered(), "v5p:2x2x1", HARDWARE["v5p"])


def test_a_report_reads_as_a_few_lines():
    audit = Audit((), {"data": 16, "tensor": 1}, "m")
    memory = Memory(arguments=2 * 10**9, outputs=10**9, temporary=3 * 10**9, aliased=10**9)
    report = AotReport(
        "v6e:4x4", 1, {"data": 16, "tensor": 1}, memory, audit, 5e12, 7.0, 34 * 10**9, ""
    )
    assert str(report).splitlines() == [
        "v6e:4x4, data=16: compiled in 7.0 s",
        "5.00 GB of 34.0 GB per device (2.00 arguments, 3.00 temporary)",
        "5.00 Tflop of inner products per device and step",
    ]
    assert (report.memory.arguments, report.memory.temporary, report.memory.peak) == (
        2 * 10**9,
        3 * 10**9,
        5 * 10**9,
    )
    assert "unknown flops" in str(report._replace(flops=None))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{}, {"tensor": 2}, {"replica": 2}], ids=str)
def test_arguments_are_those_of_the_placement_formula(sizes):
    """The test fails, rather than skips, if libtpu is not installed: pip install 'shardopt[tpu]'."""
    report = compiled(topology="v5e:2x4", **sizes)
    shards = 8 // sizes.get("replica", 1)
    formula = 12 * SHAPE.num_parameters / shards + 32 / 8 * sizes.get("tensor", 1) * 65 * 4
    assert report.memory.arguments - report.argument_padding == pytest.approx(formula, rel=0.01)
    layout = ParallelLayout(data=shards // sizes.get("tensor", 1), **sizes)
    predicted_memory = predict(
        SHAPE.workload(), layout, hardware=HARDWARE["v5e"], batch_size=32
    ).memory
    rows = stored_bytes((32 // 8 * sizes.get("tensor", 1), 65), 4)
    # and a few scalars
    assert predicted_memory.params + predicted_memory.opt_state + rows == pytest.approx(
        report.memory.arguments, abs=4096
    )
    assert report.mesh_shape["tensor"] == sizes.get("tensor", 1)
    assert "data" in {
        axis for collective in report.audit.collectives for axis in collective.axes or ()
    }
    assert 0 < report.memory.peak < report.hbm_bytes


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{}, {"tensor": 2}, {"pipeline": 2}], ids=str)
def test_a_step_for_a_tpu_is_proved(sizes):
    def make(mesh):
        return so.hybrid(
            optax.adamw(1e-3),
            mesh,
            transformer.model(SMALL),
            rules=rules_of(mesh),
            placement="fsdp",
            micro_batches=2,
        )

    report = so.planning.aot(
        make,
        SMALL.abstract_params(),
        transformer.abstract_batch(SMALL, 16),
        topology="v5p:2x2x1",
        **sizes,
    )
    proof = report.proof
    assert (proof.verdict in ("proved", "agrees"), proof.not_compared) == (True, ""), proof


@pytest.mark.slow
def test_of_a_batch_only_the_shapes_are_read():
    batch = {
        name: np.zeros(leaf.shape, leaf.dtype)
        for name, leaf in transformer.abstract_batch(SHAPE, 32).items()
    }
    # one line calls for both, as the text of a program holds the lines of its calls
    audits = [compiled(batch=case, topology="v5e:4x4").audit for case in (batch, None)]
    sources = [case.source for case in audits]
    # a topology has new devices in each call, which the text of a sharding leaves out
    arrays, shapes = (
        (audit._replace(source=""), source.text, str(source.inputs), str(source.outputs))
        for audit, source in zip(audits, sources, strict=True)
    )
    assert arrays == shapes


@pytest.mark.slow
def test_make_must_return_a_strategy():
    with refused(TypeError, "aot: make must return a ShardedOptimizer, got Mesh.\n"
        "Fix: return a strategy, such as so.fsdp(tx, mesh, model)."):  # fmt: skip
        compiled(lambda mesh: mesh, topology="v5e:2x4")


@pytest.mark.slow
def test_a_gather_stays_one_on_a_torus_whole_or_half():
    """The compiler's own choice: without the links that wrap around, over the whole torus it is an
    all-reduce.
    """
    from jax.sharding import AxisType, Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    devices = topology_devices("v5p:4x4x4")
    for replica in (1, 2):
        grid = so.make_mesh(replica=replica, devices=devices).devices.reshape(replica, -1)
        mesh = Mesh(grid, ("replica", "data"), axis_types=(AxisType.Auto,) * 2)
        gather = jax.shard_map(
            lambda x, y: y @ jax.lax.all_gather(x, "data", tiled=True),
            mesh=mesh,
            in_specs=(P("data"), P(("replica", "data"))),
            out_specs=P(("replica", "data")),
            check_vma=False,
        )
        shapes = [
            jax.ShapeDtypeStruct(
                (8192, 8192), jnp.bfloat16, sharding=NamedSharding(mesh, P("data"))
            ),
            jax.ShapeDtypeStruct(
                (64 * 128, 8192), jnp.bfloat16, sharding=NamedSharding(mesh, P(("replica", "data")))
            ),
        ]
        text = jax.jit(gather).lower(*shapes).compile().as_text()
        assert set(so.hlo.audit(text, mesh=dict(mesh.shape)).by_kind()) == {"all-gather"}


@pytest.mark.slow
def test_the_step_time_of_a_real_compile_grows_with_layers():
    """Twice the layers take twice the time in the loop over them, and less exposed than all that is
    sent takes.
    """
    report = compiled(topology="v5e:2x4")
    step = step_times.of_report(report)
    assert step.total == pytest.approx(step.compute + step.exposed)
    # not faster than the products at their peak, nor ten times slower: the model is small
    assert (
        report.flops / HARDWARE["v5e"].flops
        < step.compute
        < 100 * report.flops / HARDWARE["v5e"].flops
    )
    assert step.exposed > 0
    assert step.exposed + step.hidden == pytest.approx(sum(step.collectives.values()))
    assert max(span.end for span in step.spans) == pytest.approx(step.total)
    assert len(step.operations) == 10
    assert {operation.calls for operation in step.operations} <= {
        1,
        SHAPE.num_layers,
        SHAPE.num_layers - 1,
    }
    assert all(operation.source for operation in step.operations if not operation.waits)
    assert re.search(r"^[\d.]+ ms per step, estimated \(.*\): [\d.]+ compute", str(step))


@pytest.mark.slow
@pytest.mark.skipif(
    not is_installed("jax_cuda12_plugin"), reason="needs pip install 'shardopt[gpu]', 3 GB"
)
@pytest.mark.parametrize("name", ["a100", "h100", "h200", "b200"])
def test_a_step_for_gpus_agrees_with_the_formulas(name):
    """Bytes, traffic and flops equal the formulas; attention is cuDNN's."""

    def make(mesh):
        return so.fsdp(
            optax.adamw(1e-3),
            mesh,
            transformer.model(SHAPE),
            rules=RULES,
            gather_dtype=jnp.bfloat16,
        )

    report = compiled(make, topology=f"{name}:4", num_slices=2, tensor=2)
    layout = ParallelLayout(data=4, tensor=2, gather_dtype=jnp.bfloat16)
    prediction = predict(SHAPE.workload(), layout, hardware=HARDWARE[name], batch_size=32)
    assert report.memory.arguments == pytest.approx(
        prediction.memory.params + prediction.memory.opt_state + 32 / 4 * 65 * 4, abs=4096
    )
    sent = sum(group.wire_bytes for group in report.audit.of(axis="data").by_kind().values())
    assert sent == pytest.approx(prediction.wire_bytes["data"], rel=0.05)
    # the embedding is read by rows
    in_products = SHAPE.num_parameters - SHAPE.vocab_size * SHAPE.dim
    assert report.flops == pytest.approx(6 * in_products * 32 * SHAPE.length / 8, rel=0.05)
    assert "__cudnn$fmha" in report.text
    assert report.memory.peak < report.hbm_bytes == HARDWARE[name].memory_bytes
