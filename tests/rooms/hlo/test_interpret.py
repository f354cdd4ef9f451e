"""The interpreter of compiled programs equals XLA:CPU, refuses operations that it does not know,
and tells mutants apart.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support.interpreted import compare, interpret
from support.paths import PROGRAMS
from support.scripts import imported

from shardopt.hlo._hlo_text import parse
from shardopt.hlo.proof import _interpret as interpreter
from shardopt.hlo.proof import prove
from shardopt.hlo.proof._interpret import CannotInterpretError, Interpreter
from shardopt.hlo.proof._interpret_shards import error_between
from shardopt.hlo.proof._reference import ReferenceInterpreter
from shardopt.hlo.proof._text import full_text, lowered_text

pytestmark = pytest.mark.fast

SUM = """HloModule sum, num_partitions=2

add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT s = f32[] add(a, b)
}

ENTRY main {
  x = f32[2]{0} parameter(0), sharding={devices=[2]<=[2]}
  ROOT y = f32[2]{0} all-reduce(x), channel_id=1, replica_groups={{0,1}}, use_global_device_ids=true, to_apply=add
}
"""


@pytest.fixture
def mutants():
    """The script of mutants."""
    with imported("mutants") as script:
        yield script


def per_device(x, ids):
    """Use each collective, and the operations on arrays that have rules of their own."""
    rank = lax.axis_index("d")
    gathered = lax.all_gather(x, "d", tiled=True)
    moved = lax.ppermute(jnp.sin(x), "d", [(i, i + 1) for i in range(3)])
    exchanged = lax.all_to_all(x, "d", split_axis=1, concat_axis=0, tiled=True)
    scattered = lax.psum_scatter(gathered @ x.T, "d", scatter_dimension=0, tiled=True)
    looked_up = jnp.zeros((6, 8)).at[ids].add(x[:2] * 2)[ids[::-1]]
    largest, places = lax.top_k(x, 3)
    ordered = jnp.sort(x, axis=0) + lax.cumsum(x, axis=1)
    chosen = lax.cond(rank % 2 == 0, lambda v: jnp.exp(v), lambda v: v * 3, x)
    count, total = lax.while_loop(
        lambda s: s[0] < 2 + rank, lambda s: (s[0] + 1, s[1] * 1.5), (0, lax.psum(x, "d"))
    )
    window = lax.dynamic_slice(gathered, (rank * 2, 1), (2, 5))
    return (
        moved,
        exchanged,
        scattered,
        looked_up,
        largest,
        places,
        ordered,
        chosen,
        count[None],
        total,
        window,
    )


def cut_in_four(value):
    """Return the sharding of the first dim over four devices."""
    return f"{{devices=[{','.join(['4'] + ['1'] * (value.ndim - 1))}]<=[4]}}"


def test_equals_xla_on_four_devices_and_one_result_is_wrong_by_another_group():
    mesh = Mesh(np.array(jax.devices()[:4]), ("d",), axis_types=(AxisType.Auto,))
    f = jax.jit(
        jax.shard_map(
            per_device, mesh=mesh, in_specs=(P("d"), P("d")), out_specs=P("d"), check_vma=False
        )
    )
    draw = np.random.default_rng(0)
    inputs = [
        draw.normal(size=(16, 8)).astype(np.float32),
        draw.permutation(6)[[0, 1] * 4].astype(np.int32),
    ]
    placed = [jax.device_put(value, NamedSharding(mesh, P("d"))) for value in inputs]
    lowered = f.lower(*placed)
    compiled = lowered.compile()
    expected = [np.asarray(value) for value in compiled(*placed)]
    outputs = [cut_in_four(value) for value in expected]
    shardings = [cut_in_four(value) for value in inputs]  # the text of jax 0.12 does not state them
    text = full_text(compiled)
    assert max(compare(text, inputs, expected, outputs, input_shardings=shardings)) <= 1e-6
    written = ReferenceInterpreter(parse(lowered_text(lowered)))
    assert max(map(error_between, written.run(inputs), expected)) <= 1e-6
    assert not written.uneven
    groups = r"\{\{0,1,2,3\}\}|\[1,4\]<=\[4\]|mesh\['d'=4\] \{'d'\}"
    order = re.sub(rf"(all-gather\(.*replica_groups=)({groups})", r"\1{{1,0,2,3}}", text)
    assert order != text
    assert max(compare(order, inputs, expected, outputs, input_shardings=shardings)) > 0.1


def test_a_text_without_shardings_is_refused_by_both_witnesses():
    text = SUM.replace(", sharding={devices=[2]<=[2]}", "")
    message = (
        r"^prove: the text does not contain the shardings of all parameters\.\nFix: pass inputs="
    )
    with pytest.raises(ValueError, match=message):
        compare(text, [np.ones(4, np.float32)], [np.ones(2)], ["{replicated}"])
    with pytest.raises(ValueError, match=message):
        prove(text, outputs=["{replicated}"])


RAGGED = """HloModule ragged, num_partitions=2

ENTRY main {
  x = f32[3]{0} parameter(0), sharding={devices=[2]<=[2]}
  y = f32[4]{0} parameter(1), sharding={devices=[2]<=[2]}
  starts = s32[2]{0} parameter(2), sharding={devices=[2]<=[2]}
  sizes = s32[2]{0} parameter(3), sharding={devices=[2]<=[2]}
  targets = s32[2]{0} parameter(4), sharding={devices=[2]<=[2]}
  received = s32[2]{0} parameter(5), sharding={devices=[2]<=[2]}
  ROOT z = f32[4]{0} ragged-all-to-all(x, y, starts, sizes, targets, received), channel_id=1, replica_groups={{0,1}}
}
"""


def test_ragged_pieces_go_where_their_sender_says():
    """Device 0 keeps one number and sends two, device 1 sends three."""
    columns = [[[0, 1], [0, 3]], [[1, 2], [3, 0]], [[0, 1], [1, 3]], [[1, 3], [2, 0]]]
    inputs = [np.array([[1, 2, 3], [4, 5, 6]], np.float32), np.full((2, 4), 9, np.float32)]
    (result,) = interpret(RAGGED, [*inputs, *(np.array(column, np.int32) for column in columns)])
    assert result.tolist() == [[1, 4, 5, 6], [9, 2, 3, 9]]


def test_all_turns_of_a_loop_count():
    loop = jax.jit(lambda x: lax.fori_loop(0, 50, lambda _, y: y + x, x))
    text = loop.lower(jnp.ones(1000)).compile().as_text()
    module = parse(text)
    inputs = [np.ones((1, 1000), np.float32)]
    interpreter = Interpreter(module)
    assert interpreter.run(inputs)[0].sum() == 51_000
    assert 50_000 < interpreter.computed < 60_000
    with pytest.raises(
        CannotInterpretError, match=r"until then 4\d,\d+ numbers are computed, too many\.$"
    ):
        Interpreter(module, limit=interpreter.computed - 10_000).run(inputs)


def test_a_sum_has_equal_copies_and_other_copies_are_refused():
    shards = np.array([[1, 2], [3, 4]], np.float32)
    (total,) = interpret(SUM, [shards])
    np.testing.assert_array_equal(total, [[4, 6], [4, 6]])
    with pytest.raises(
        ValueError,
        match=re.escape("devices 0 and 1 should hold copies, and hold different numbers."),
    ):
        compare(
            SUM.replace("{{0,1}}", "{{0},{1}}"), [shards.ravel()], [shards[0]], ["{replicated}"]
        )


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (
            "all-reduce(x)",
            "rng-bit-generator(x)",
            "the opcode rng-bit-generator is not interpreted.",
        ),
        ("{{0,1}}", "{{0}}", "its groups ((0,),) do not hold each device once."),
        (
            "all-reduce(x)",
            'custom-call(x), custom_call_target="kernel"',
            "the custom call kernel is not interpreted.",
        ),
    ],
)
def test_refuses_with_the_instruction_and_the_reason(old, new, reason):
    with pytest.raises(CannotInterpretError, match=f"cannot interpret y = .*{re.escape(reason)}$"):
        interpret(SUM.replace(old, new), [np.ones((2, 2), np.float32)])


@pytest.mark.parametrize("target", ["AssumeGatherIndicesInBound", "LayoutConstraint"])
def test_what_is_said_to_the_compiler_changes_no_value(target):
    shards = np.array([[1, 2], [3, 4]], np.float32)
    (same,) = interpret(
        SUM.replace("all-reduce(x)", f'custom-call(x), custom_call_target="{target}"'), [shards]
    )
    np.testing.assert_array_equal(same, shards)


def test_constants_that_the_text_leaves_out_are_refused():
    text = SUM.replace(
        "x = f32[2]{0} parameter(0)", "z = f32[99]{0} constant({...})\n  x = f32[2]{0} parameter(0)"
    )
    with pytest.raises(CannotInterpretError, match="print the module with `print_large_constants`"):
        interpret(text, [np.ones((2, 2), np.float32)])


def test_an_endless_loop_is_refused(monkeypatch):
    monkeypatch.setattr(interpreter, "MAX_ITERATIONS", 3)
    text = """HloModule m, num_partitions=1

body {
  ROOT s = (pred[]) parameter(0)
}

condition {
  c = (pred[]) parameter(0)
  ROOT p = pred[] get-tuple-element(c), index=0
}

ENTRY main {
  x = pred[] parameter(0)
  t = (pred[]) tuple(x)
  ROOT w = (pred[]) while(t), condition=condition, body=body
}
"""
    with pytest.raises(CannotInterpretError, match="the loop turns more than 3 times"):
        interpret(text, [np.ones(1, bool)])


def test_mutants_are_wrong_or_equivalent(mutants):
    judge = mutants.Judge(SUM, ["{devices=[2]<=[2]}"])
    changes = {mutant.kind: judge.change(mutant.text) for mutant in mutants.mutants(SUM, 20, 0)}
    wrong = {kind for kind, change in changes.items() if change > mutants.CHANGED}
    assert wrong == {"cut the group", "drop", "double", "another reduction"}
    assert changes.keys() - wrong == {"another order"}
    assert Interpreter(parse(SUM)).partitions == 2


def nested(x, w):
    """A `shard_map` over one axis inside of one over another, in a branch that half of the devices
    take.
    """
    specs = {"in_specs": (P(None, "b"), P("b")), "out_specs": P(), "axis_names": {"b"}}
    product = jax.shard_map(lambda x, w: lax.psum(x @ w, "b"), **specs, check_vma=False)
    chosen = lax.cond(lax.axis_index("a") == 0, lambda x: product(x, w), lambda x: x * 0.5, x)
    return chosen + lax.psum(x, "a"), lax.all_gather(chosen, "a")


def test_bodies_inside_of_bodies_run_on_their_devices():
    mesh = Mesh(
        np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2
    )
    f = jax.shard_map(
        nested,
        mesh=mesh,
        in_specs=(P("a"), P()),
        out_specs=(P("a"), P()),
        axis_names={"a"},
        check_vma=False,
    )
    draw = np.random.default_rng(0)
    x = draw.normal(size=(4, 6)).astype(np.float32)
    w = draw.normal(size=(6, 6)).astype(np.float32)
    written = ReferenceInterpreter(parse(lowered_text(jax.jit(f).lower(x, w))))
    chosen = np.concatenate([x[:2] @ w, x[2:] * 0.5])
    expected = chosen + np.tile(x[:2] + x[2:], (2, 1)), chosen.reshape(2, 2, 6)
    assert max(map(error_between, written.run([x, w]), expected)) <= 1e-6


@pytest.mark.parametrize(("name", "is_right"), [("wrong", False), ("right", True)])
def test_finds_the_sum_that_libtpu_0_0_48_moved_out_of_a_loop(name, is_right):
    """openxla/xla 49143 on v5p:2x2x1: with the pass `while-loop-all-reduce-code-motion`, and
    without it.
    """
    text = (PROGRAMS / f"v5p_xla_49143_{name}.hlo").read_text()
    draw = np.random.default_rng(0)
    ids = draw.integers(0, 16, (2, 8, 8)).astype(np.int32)
    values = draw.normal(size=(2, 8, 8, 4, 8)).astype(np.float32)
    expected = np.zeros((16, 4, 8), np.float32)
    np.add.at(expected, ids.ravel(), values.reshape(-1, 4, 8))
    inputs = ("{devices=[1,4,1]<=[4]}", "{devices=[1,4,1,1,1]<=[4]}")
    (error,) = compare(text, [ids, values], [expected], ["{replicated}"], input_shardings=inputs)
    assert (error <= 1e-6) if is_right else (error > 0.5)
    proof = prove(text, inputs=inputs, outputs=["{replicated}"], mesh={"d": 4})
    assert proof.verdict == ("derived" if is_right else "unknown")
    # next to the program that XLA was given
    written = (PROGRAMS / "v5p_xla_49143_lowered.hlo").read_text()
    proof = prove(text, inputs=inputs, outputs=["{replicated}"], mesh={"d": 4}, lowered=written)
    assert proof.verdict == ("proved" if is_right else "wrong")
    if proof.problem is not None:
        assert (proof.problem.opcode, proof.problem.source) == ("while", "k.py:12")
        assert len(proof.problem.hlo.splitlines()) < 60


def test_finds_the_sum_that_xla_for_gpus_moved_out_of_a_loop():
    """openxla/xla 49143, reduced to 41 lines, compiled by jaxlib 0.10.2 for two H100."""
    text, written = (
        (PROGRAMS / f"{name}.hlo").read_text()
        for name in ("h100_xla_49143_wrong", "xla_49143_reduced")
    )
    inputs = ("{devices=[2,1]<=[2]}", "{devices=[2]<=[2]}")
    proof = prove(text, inputs=inputs, outputs=["{replicated}"], mesh={"d": 2}, lowered=written)
    assert proof.verdict == "wrong"
    assert proof.problem is not None
    assert proof.problem.opcode == "while"
