"""Proofs of compiled programs: small programs by hand, right and wrong, and the compiled steps of
strategies.

The programs by hand are proved twice: alone, and next to the program that XLA was given.
"""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.interpreted import interpret
from support.scripts import imported
from support.table import STRATEGIES

import shardopt as so
from shardopt.hlo import Proof, prove
from shardopt.hlo.proof._proof import WrongInstruction
from shardopt.hlo.proof._text import text_of

ROWS = "{devices=[4,1]<=[4]}"
COPIES = "{replicated}"

HEADER = """HloModule step, num_partitions=4

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

"""
GRADIENT = """ENTRY %main (x: f32[2,8], w: f32[8,16]) -> f32[8,16] {
  %x = f32[2,8]{1,0} parameter(0), sharding={devices=[4,1]<=[4]}
  %w = f32[8,16]{1,0} parameter(1), sharding={replicated}
  %y = f32[2,16]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %t = f32[2,16]{1,0} tanh(%y)
  %g = f32[8,16]{1,0} dot(%x, %t), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  %s = f32[8,16]{1,0} all-reduce(%g), replica_groups={{0,1,2,3}}, use_global_device_ids=true, channel_id=1, to_apply=%sum
  %q = f32[8,16]{1,0} multiply(%s, %s)
  ROOT %r = f32[8,16]{1,0} subtract(%w, %q)
}
"""
SHARDS = """ENTRY %main (w: f32[2,16]) -> f32[2,16] {
  %w = f32[2,16]{1,0} parameter(0), sharding={devices=[4,1]<=[4]}
  %all = f32[8,16]{1,0} all-gather(%w), replica_groups={{0,1,2,3}}, use_global_device_ids=true, channel_id=1, dimensions={0}
  %t = f32[8,16]{1,0} tanh(%all)
  %id = u32[] partition-id()
  %table = s32[4]{0} constant({0, 2, 4, 6})
  %one = s32[1]{0} dynamic-slice(%table, %id), dynamic_slice_sizes={1}
  %start = s32[] reshape(%one)
  %zero = s32[] constant(0)
  %mine = f32[2,16]{1,0} dynamic-slice(%t, %start, %zero), dynamic_slice_sizes={2,16}
  ROOT %r = f32[2,16]{1,0} add(%w, %mine)
}
"""


WRITTEN_GRADIENT = """ENTRY %main (x: f32[8,8], w: f32[8,16]) -> f32[8,16] {
  %x = f32[8,8]{1,0} parameter(0)
  %w = f32[8,16]{1,0} parameter(1)
  %y = f32[8,16]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %t = f32[8,16]{1,0} tanh(%y)
  %g = f32[8,16]{1,0} dot(%x, %t), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  %q = f32[8,16]{1,0} multiply(%g, %g)
  ROOT %r = f32[8,16]{1,0} subtract(%w, %q)
}
"""
WRITTEN_SHARDS = """ENTRY %main (w: f32[8,16]) -> f32[8,16] {
  %w = f32[8,16]{1,0} parameter(0)
  %t = f32[8,16]{1,0} tanh(%w)
  ROOT %r = f32[8,16]{1,0} add(%w, %t)
}
"""
MEAN = """ENTRY %main (x: f32[2,8]) -> f32[8] {
  %x = f32[2,8]{1,0} parameter(0), sharding={devices=[4,1]<=[4]}
  %zero = f32[] constant(0)
  %one = f32[] constant(1)
  %local = f32[8]{0} reduce(%x, %zero), dimensions={0}, to_apply=%sum
  %total = f32[8]{0} all-reduce(%local), replica_groups={{0,1,2,3}}, use_global_device_ids=true, channel_id=1, to_apply=%sum
  %count = f32[] all-reduce(%one), replica_groups={{0,1,2,3}}, use_global_device_ids=true, channel_id=2, to_apply=%sum
  %counts = f32[8]{0} broadcast(%count), dimensions={}
  ROOT %mean = f32[8]{0} divide(%total, %counts)
}
"""
WRITTEN_MEAN = """ENTRY %main (x: f32[8,8]) -> f32[8] {
  %x = f32[8,8]{1,0} parameter(0)
  %zero = f32[] constant(0)
  %total = f32[8]{0} reduce(%x, %zero), dimensions={0}, to_apply=%sum
  %four = f32[] constant(4)
  %counts = f32[8]{0} broadcast(%four), dimensions={}
  ROOT %mean = f32[8]{0} divide(%total, %counts)
}
"""
FIRST = """ENTRY %main (x: f32[2,8]) -> f32[2,8] {
  %x = f32[2,8]{1,0} parameter(0), sharding={devices=[4,1]<=[4]}
  %id = u32[] partition-id()
  %zero = u32[] constant(0)
  %is_first = pred[] compare(%id, %zero), direction=EQ
  %all = pred[2,8]{1,0} broadcast(%is_first), dimensions={}
  %nothing = f32[] constant(0)
  %zeros = f32[2,8]{1,0} broadcast(%nothing), dimensions={}
  %chosen = f32[2,8]{1,0} select(%all, %x, %zeros)
  ROOT %r = f32[2,8]{1,0} all-reduce(%chosen), replica_groups={{0,1,2,3}}, use_global_device_ids=true, channel_id=1, to_apply=%sum
}
"""
WRITTEN_FIRST = """ENTRY %main (x: f32[8,8]) -> f32[2,8] {
  %x = f32[8,8]{1,0} parameter(0)
  ROOT %r = f32[2,8]{1,0} slice(%x), slice={[0:2], [0:8]}
}
"""


def proof_of(text: str, output: str = COPIES, written: str = "") -> Proof:
    lowered = HEADER.replace(", num_partitions=4", "") + written if written else None
    return prove(HEADER + text, outputs=[output], mesh={"data": 2, "tensor": 2}, lowered=lowered)


def problem_of(text: str, output: str = COPIES, written: str = "") -> WrongInstruction:
    proof = proof_of(text, output, written)
    assert proof.verdict == "wrong"
    assert proof.problem is not None
    return proof.problem


def changed(text: str, before: str, after: str) -> str:
    assert before in text
    return text.replace(before, after)


def test_right_programs_are_derived_and_next_to_what_was_written_proved():
    assert proof_of(GRADIENT) == Proof(
        "derived", None, (), 11, "the program that XLA was given is unknown."
    )
    assert proof_of(GRADIENT, written=WRITTEN_GRADIENT) == Proof("proved", None, (), 11)
    assert proof_of(SHARDS, ROWS).verdict == "derived"
    assert proof_of(SHARDS, ROWS, WRITTEN_SHARDS).verdict == "proved"
    assert (
        str(proof_of(SHARDS, ROWS, WRITTEN_SHARDS))
        == "proved: all results of 13 instructions have their declared shardings. Results on drawn"
        " arguments are equal."
    )


def test_a_sum_of_a_constant_is_settled_by_the_numbers():
    open_proof = proof_of(MEAN)
    proof = proof_of(MEAN, written=WRITTEN_MEAN)
    assert (open_proof.verdict, open_proof.sums_of_constants) == ("derived", ("count",))
    assert (proof.verdict, proof.sums_of_constants) == ("proved", ("count",))
    assert "Whether sums of constants are meant is settled by the comparison: count." in str(proof)
    # no instruction of the compiled program tells that a sum is missing
    line = next(line for line in MEAN.splitlines() if "%count =" in line)
    dropped = changed(MEAN, line, "  %count = f32[] copy(%one)")
    assert proof_of(dropped).verdict == "derived"
    problem = problem_of(dropped, written=WRITTEN_MEAN)
    assert (problem.instruction, problem.groups) == ("mean", ((0, 1, 2, 3),))
    assert (
        problem.missing
        == "it reads counts as if it were whole, and the sum of counts over these devices is not"
        " taken: result 0 differs from that of the program that XLA was given by 3.0e+00 of its"
        " largest number."
    )


def test_equal_results_that_a_rule_objects_to_are_unknown():
    proof = proof_of(FIRST, written=WRITTEN_FIRST)
    assert (proof.verdict, [unknown.instruction for unknown in proof.unknown]) == ("unknown", ["r"])
    # a rule that objects to a right program is no proof that it is wrong
    assert proof.unknown[0].reason == problem_of(FIRST).missing
    assert (
        proof_of(
            changed(FIRST, "constant(0)\n  %is", "constant(1)\n  %is"), written=WRITTEN_FIRST
        ).verdict
        == "wrong"
    )


def test_the_numbers_name_the_sum_that_is_missing():
    """A rule would name the multiplication too: here it is switched off by a value that no rule
    covers.
    """
    kernel = changed(WRITTEN_GRADIENT, "tanh(%y)", 'custom-call(%y), custom_call_target="Sharding"')
    text = changed(GRADIENT, "tanh(%y)", "reduce-precision(%y), exponent_bits=8, mantissa_bits=23")
    line = next(line for line in text.splitlines() if "all-reduce" in line)
    text = changed(text, line, "  %s = f32[8,16]{1,0} stochastic(%g)".replace("stochastic", "copy"))
    problem = problem_of(text, written=kernel)
    assert (problem.instruction, problem.axes, problem.groups) == (
        "q",
        ("data", "tensor"),
        ((0, 1, 2, 3),),
    )
    assert problem.missing.startswith(
        "it reads s as if it were whole, and the sum of s over these devices is not taken: devices"
        " that should hold copies"
    )
    assert len(problem.hlo.splitlines()) < 60


def test_what_cannot_be_interpreted_is_not_compared():
    text = changed(GRADIENT, "tanh(%y)", 'custom-call(%y), custom_call_target="kernel"')
    proof = proof_of(text, written=WRITTEN_GRADIENT)
    assert proof.verdict == "unknown"
    assert proof.not_compared.startswith("cannot interpret t = f32[2,16]{1,0} custom-call(%y)")
    assert proof.not_compared.endswith(": the custom call kernel is not interpreted.")


def test_a_large_program_is_not_compared(monkeypatch):
    assert proof_of(SHARDS, ROWS, WRITTEN_SHARDS).not_compared == ""
    monkeypatch.setattr("shardopt.hlo.proof._compare.MAX_NUMBERS", 16)
    assert proof_of(SHARDS, ROWS, WRITTEN_SHARDS).not_compared.endswith(
        "numbers, too many to interpret."
    )


def test_a_program_of_which_no_result_is_finite_is_not_compared():
    text, written = (changed(text, "constant(0)", "constant(nan)") for text in (MEAN, WRITTEN_MEAN))
    assert (
        proof_of(text, written=written).not_compared
        == "for drawn arguments, a result is not finite."
    )


def test_state_that_has_to_be_equal_is_drawn_so():
    """The pieces of a residual are the same on all devices: only then all devices hold the same
    parameters.
    """
    mesh = so.make_mesh(data=4, devices=jax.devices()[:4])
    update = jax.shard_map(
        lambda params, residual: params + residual,
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P(),
        check_vma=False,
    )
    step = jax.jit(
        lambda state: update(state["params"], state["residual"]),
        out_shardings=NamedSharding(mesh, P()),
    )
    places = {"params": (2, P()), "residual": (8, P("data"))}
    state = {
        name: jax.ShapeDtypeStruct((rows, 8), jnp.float32, sharding=NamedSharding(mesh, spec))
        for name, (rows, spec) in places.items()
    }
    proof = prove(step.lower(state))
    assert (proof.verdict, proof.assumption) == (
        "unknown",
        "pieces of the state are equal over data",
    )


GEMM = """ENTRY %main (x: f32[2,8], w: f32[8,16], b: f32[16]) -> f32[16,16] {
  %x = f32[2,8]{1,0} parameter(0), sharding={devices=[4,1]<=[4]}
  %w = f32[8,16]{1,0} parameter(1), sharding={replicated}
  %b = f32[16]{0} parameter(2), sharding={replicated}
  %call = (f32[2,16]{1,0}, s8[4194304]{0}) custom-call(%x, %w, %b), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"alpha_real":2,"beta":0,"alpha_imag":0,"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]},"epilogue":"BIAS_RELU"}}
  %y = f32[2,16]{1,0} get-tuple-element(%call), index=0
  %g = f32[16,16]{1,0} custom-call(%y, %y), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"alpha_real":1,"beta":0,"alpha_imag":0,"dot_dimension_numbers":{"lhs_contracting_dimensions":["0"],"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}
  %s = f32[16,16]{1,0} all-reduce(%g), replica_groups={{0,1,2,3}}, use_global_device_ids=true, channel_id=1, to_apply=%sum
  %ones = f32[16,16]{1,0} broadcast(%b), dimensions={0}
  ROOT %r = f32[16,16]{1,0} custom-call(%s, %s, %ones), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"alpha_real":1,"beta":1,"alpha_imag":0,"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]},"epilogue":"DEFAULT"}}
}
"""
WRITTEN_GEMM = """ENTRY %main (x: f32[8,8], w: f32[8,16], b: f32[16]) -> f32[16,16] {
  %x = f32[8,8]{1,0} parameter(0)
  %w = f32[8,16]{1,0} parameter(1)
  %b = f32[16]{0} parameter(2)
  %p = f32[8,16]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %d = f32[8,16]{1,0} add(%p, %p)
  %rows = f32[8,16]{1,0} broadcast(%b), dimensions={1}
  %e = f32[8,16]{1,0} add(%d, %rows)
  %zero = f32[] constant(0)
  %zeros = f32[8,16]{1,0} broadcast(%zero), dimensions={}
  %y = f32[8,16]{1,0} maximum(%e, %zeros)
  %g = f32[16,16]{1,0} dot(%y, %y), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  %ones = f32[16,16]{1,0} broadcast(%b), dimensions={0}
  %t = f32[16,16]{1,0} dot(%g, %g), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %r = f32[16,16]{1,0} add(%t, %ones)
}
"""


def test_products_of_cublas_are_dots():
    assert proof_of(GEMM, written=WRITTEN_GEMM) == Proof("proved", None, (), 12)
    line = next(line for line in GEMM.splitlines() if "all-reduce" in line)
    problem = problem_of(
        changed(GEMM, line, "  %s = f32[16,16]{1,0} copy(%g)"), written=WRITTEN_GEMM
    )
    assert (problem.instruction, problem.groups) == ("r", ((0, 1, 2, 3),))
    for before, after in (
        ('"alpha_real":2', '"alpha_real":1'),
        ('"beta":1', '"beta":2'),
        ("BIAS_RELU", "BIAS"),
    ):
        assert proof_of(changed(GEMM, before, after), written=WRITTEN_GEMM).verdict == "wrong"
    proof = proof_of(changed(GEMM, "BIAS_RELU", "BIAS_GELU_AUX"), written=WRITTEN_GEMM)
    assert (proof.verdict, proof.unknown[0].instruction) == ("unknown", "call")
    assert proof.not_compared.endswith(
        "a product of cuBLAS with epilogue BIAS_GELU_AUX is not read."
    )


SCALED = """ENTRY %main (x: bf16[2,8]) -> bf16[2,8] {
  %x = bf16[2,8]{1,0} parameter(0), sharding={devices=[4,1]<=[4]}
  %c = bf16[] constant(0.03564)
  %cs = bf16[2,8]{1,0} broadcast(%c), dimensions={}
  ROOT %r = bf16[2,8]{1,0} multiply(%x, %cs)
}
"""
WRITTEN_SCALED = """ENTRY %main (x: bf16[8,8]) -> bf16[8,8] {
  %x = bf16[8,8]{1,0} parameter(0)
  %a = bf16[] constant(0.04468)
  %b = bf16[] constant(0.7969)
  %c = bf16[] multiply(%a, %b)
  %cs = bf16[8,8]{1,0} broadcast(%c), dimensions={}
  ROOT %r = bf16[8,8]{1,0} multiply(%x, %cs)
}
"""


def test_a_product_of_short_constants_may_be_rounded():
    assert proof_of(SCALED, ROWS, WRITTEN_SCALED).verdict == "proved"
    assert proof_of(changed(SCALED, "0.03564", "0.03613"), ROWS, WRITTEN_SCALED).verdict == "wrong"
    as_written = changed(
        WRITTEN_SCALED, "%c = bf16[] multiply(%a, %b)", "%c = bf16[] constant(0.03564)"
    )
    assert proof_of(changed(SCALED, "multiply(%x", "add(%x"), ROWS, as_written).verdict == "wrong"
    long, written = (text.replace("bf16", "f32") for text in (SCALED, WRITTEN_SCALED))
    assert proof_of(long, ROWS, written).verdict == "wrong"


SCATTER = """ENTRY %main (ids: s32[2,1], rows: f32[2,6]) -> f32[4,6] {
  %ids = s32[2,1]{1,0} parameter(0), sharding={devices=[4,1]<=[4]}
  %rows = f32[2,6]{1,0} parameter(1), sharding={devices=[4,1]<=[4]}
  %nothing = f32[] constant(0)
  %zeros = f32[16,6]{1,0} broadcast(%nothing), dimensions={}
  %terms = f32[16,6]{1,0} scatter(%zeros, %ids, %rows), update_window_dims={1}, inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=%sum
  %sums = f32[16,6]{1,0} all-reduce(%terms), replica_groups={{0,1,2,3}}, use_global_device_ids=true, channel_id=1, to_apply=%sum
  %id = u32[] partition-id()
  %starts = s32[4]{0} constant({0, 4, 8, 12})
  %one = s32[1]{0} dynamic-slice(%starts, %id), dynamic_slice_sizes={1}
  %start = s32[] reshape(%one)
  %zero = s32[] constant(0)
  ROOT %r = f32[4,6]{1,0} dynamic-slice(%sums, %start, %zero), dynamic_slice_sizes={4,6}
}
"""
WRITTEN_SCATTER = """ENTRY %main (ids: s32[8,1], rows: f32[8,6]) -> f32[16,6] {
  %ids = s32[8,1]{1,0} parameter(0)
  %rows = f32[8,6]{1,0} parameter(1)
  %nothing = f32[] constant(0)
  %zeros = f32[16,6]{1,0} broadcast(%nothing), dimensions={}
  ROOT %r = f32[16,6]{1,0} scatter(%zeros, %ids, %rows), update_window_dims={1}, inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=%sum
}
"""


def test_a_slice_before_the_sum_of_a_scatter_is_found():
    """The order of collectives that openxla/xla 42481 reports: rows of different devices are added."""
    assert proof_of(SCATTER, ROWS, WRITTEN_SCATTER).verdict == "proved"
    lines = SCATTER.splitlines()
    total, sliced = (
        next(i for i, line in enumerate(lines) if word in line) for word in ("%sums =", "ROOT")
    )
    reduction = (
        lines[total]
        .replace("%sums", "ROOT %r")
        .replace("f32[16,6]", "f32[4,6]")
        .replace("(%terms)", "(%part)")
    )
    lines[sliced] = lines[sliced].replace("ROOT %r", "%part").replace("%sums", "%terms")
    text = "\n".join([*lines[:total], *lines[total + 1 : sliced + 1], reduction, "}", ""])
    problem = problem_of(text, ROWS)  # by the rules alone
    assert (problem.instruction, "different" in problem.missing) == ("r", True)
    assert problem_of(text, ROWS, WRITTEN_SCATTER).groups == ((0, 1, 2, 3),)


ADDED_TO_ROWS = """ENTRY %main (table: f32[4,6], ids: s32[8,1], x: f32[8,6]) -> f32[4,6] {
  %table = f32[4,6]{1,0} parameter(0), sharding={devices=[4,1]<=[4]}
  %ids = s32[8,1]{1,0} parameter(1), sharding={replicated}
  %x = f32[8,6]{1,0} parameter(2), sharding={replicated}
  %id = u32[] partition-id()
  %starts = s32[4]{0} constant({0, 4, 8, 12})
  %one = s32[1]{0} dynamic-slice(%starts, %id), dynamic_slice_sizes={1}
  %start = s32[] reshape(%one)
  %all = s32[8,1]{1,0} broadcast(%start), dimensions={}
  %places = s32[8,1]{1,0} abs(%ids)
  %own = s32[8,1]{1,0} subtract(%places, %all)
  %rows = f32[8,6]{1,0} tanh(%x)
  ROOT %r = f32[4,6]{1,0} scatter(%table, %own, %rows), update_window_dims={1}, inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=%sum
}
"""
WRITTEN_ADDED = """ENTRY %main (table: f32[16,6], ids: s32[8,1], x: f32[8,6]) -> f32[16,6] {
  %table = f32[16,6]{1,0} parameter(0)
  %ids = s32[8,1]{1,0} parameter(1)
  %x = f32[8,6]{1,0} parameter(2)
  %rows = f32[8,6]{1,0} tanh(%x)
  ROOT %r = f32[16,6]{1,0} scatter(%table, %ids, %rows), update_window_dims={1}, inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=%sum
}
"""


def test_rows_are_added_to_an_array_that_is_split_in_the_same_way():
    text = ADDED_TO_ROWS
    assert proof_of(text, ROWS).verdict == "derived"
    assert proof_of(text, ROWS, WRITTEN_ADDED).verdict == "proved"
    for before, after in (
        ("{0, 4, 8, 12}", "{4, 0, 8, 12}"),  # the rows of another device
        ("{0, 4, 8, 12}", "{0, 4, 8, 13}"),
        ("f32[4,6]{1,0} parameter(0), sharding={devices=[4,1]<=[4]}", SWAPPED),
        ("subtract(%places, %all)", "subtract(%all, %places)"),
        ("(%table, %own", "(%table, %ids"),
    ):
        wrong = changed(text, before, after)
        assert proof_of(wrong, ROWS).verdict in ("unknown", "wrong")
        assert proof_of(wrong, ROWS, WRITTEN_ADDED).verdict == "wrong"
    # terms of a sum are added to rows that are whole
    terms = changed(text, "%rows = f32[8,6]{1,0} tanh(%x)", TERMS_OF_ROWS)
    assert proof_of(terms, ROWS).verdict in ("unknown", "wrong")


ON_ONE_DEVICE = """ENTRY %main (w: f32[8,16], x: f32[2,8], y: f32[2,16]) -> f32[8,16] {
  %w = f32[8,16]{1,0} parameter(0), sharding={replicated}
  %x = f32[2,8]{1,0} parameter(1), sharding={devices=[4,1]<=[4]}
  %y = f32[2,16]{1,0} parameter(2), sharding={devices=[4,1]<=[4]}
  %id = u32[] partition-id()
  %device = u32[] constant(0)
  %is_first = pred[] compare(%id, %device), direction=EQ
  %all = pred[8,16]{1,0} broadcast(%is_first), dimensions={}
  %nothing = f32[] constant(0)
  %zeros = f32[8,16]{1,0} broadcast(%nothing), dimensions={}
  %chosen = f32[8,16]{1,0} select(%all, %w, %zeros)
  %g = f32[8,16]{1,0} dot(%x, %y), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  %terms = f32[8,16]{1,0} add(%chosen, %g)
  ROOT %r = f32[8,16]{1,0} all-reduce(%terms), replica_groups={{0,1,2,3}}, use_global_device_ids=true, channel_id=1, to_apply=%sum
}
"""
WRITTEN_ON_ONE_DEVICE = """ENTRY %main (w: f32[8,16], x: f32[8,8], y: f32[8,16]) -> f32[8,16] {
  %w = f32[8,16]{1,0} parameter(0)
  %x = f32[8,8]{1,0} parameter(1)
  %y = f32[8,16]{1,0} parameter(2)
  %g = f32[8,16]{1,0} dot(%x, %y), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  ROOT %r = f32[8,16]{1,0} add(%w, %g)
}
"""


def test_an_earlier_sum_that_one_device_adds_is_a_term():
    """The right form of openxla/xla 49143."""
    text = ON_ONE_DEVICE
    assert proof_of(text).verdict == "derived"
    assert proof_of(text, written=WRITTEN_ON_ONE_DEVICE).verdict == "proved"
    for before, after in (
        ("direction=EQ", "direction=NE"),  # three devices add it
        ("constant(0)\n  %is", "constant(4)\n  %is"),  # none
        ("{{0,1,2,3}}", "{{0,1},{2,3}}"),
        ("add(%chosen, %g)", "add(%w, %g)"),
    ):
        wrong = changed(text, before, after)
        assert proof_of(wrong).verdict in ("unknown", "wrong"), after
        assert proof_of(wrong, written=WRITTEN_ON_ONE_DEVICE).verdict == "wrong", after


SWAPPED = "f32[4,6]{1,0} parameter(0), sharding={devices=[4,1]1,0,2,3}"
TERMS_OF_ROWS = """%squares = f32[6,6]{1,0} dot(%table, %table), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  %rows = f32[8,6]{1,0} dot(%x, %squares), lhs_contracting_dims={1}, rhs_contracting_dims={0}"""
LARGEST_START = """
%largest (a: s32[], b: s32[]) -> s32[] {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %c = s32[] maximum(%a, %b)
}

""" + SHARDS.replace(
    """  %table = s32[4]{0} constant({0, 2, 4, 6})
  %one = s32[1]{0} dynamic-slice(%table, %id), dynamic_slice_sizes={1}
""",
    """  %table = s32[4,2]{1,0} constant({ { 0, 0 }, { 1, 2 }, { 4, 3 }, { 5, 6 } })
  %first = s32[] constant(0)
  %two = s32[1,2]{1,0} dynamic-slice(%table, %id, %first), dynamic_slice_sizes={1,2}
  %one = s32[1]{0} reduce(%two, %first), dimensions={1}, to_apply=%largest
""",
)


def test_a_reduction_of_known_numbers_is_known():
    assert proof_of(LARGEST_START, ROWS).verdict == "derived"
    assert proof_of(LARGEST_START, ROWS, WRITTEN_SHARDS).verdict == "proved"
    for before, after in (
        ("maximum(%a, %b)", "add(%a, %b)"),
        ("constant(0)\n  %two", "constant(1)\n  %two"),
        ("{ 1, 2 }", "{ 1, 3 }"),
    ):
        wrong = changed(LARGEST_START, before, after)
        assert proof_of(wrong, ROWS).verdict == "wrong"
        assert proof_of(wrong, ROWS, WRITTEN_SHARDS).verdict == "wrong"


TOKENS = """ENTRY %main (x: s32[1,6]) -> s32[4,5] {
  %x = s32[1,6]{1,0} parameter(0), sharding={devices=[4,1]<=[4]}
  %ids = s32[1,5]{1,0} slice(%x), slice={[0:1], [1:6]}
  %all = s32[1,20]{1,0} all-gather(%ids), replica_groups={{0,1,2,3}}, use_global_device_ids=true, channel_id=1, dimensions={1}
  ROOT %r = s32[4,5]{1,0} reshape(%all)
}
"""


def test_rows_of_one_element_that_are_joined_behind_each_other_are_a_dim():
    assert proof_of(TOKENS).verdict == "derived"
    columns = changed(
        changed(TOKENS, "s32[1,6]{1,0} parameter", "s32[6,1]{1,0} parameter"), "[4,1]<=", "[1,4]<="
    )
    columns = changed(
        changed(columns, "s32[1,5]{1,0} slice", "s32[5,1]{1,0} slice"),
        "[0:1], [1:6]",
        "[1:6], [0:1]",
    )
    columns = changed(
        changed(columns, "s32[1,20]", "s32[20,1]"), "dimensions={1}", "dimensions={0}"
    )
    (unknown,) = proof_of(columns).unknown  # the columns are not in the order of the array
    assert (unknown.instruction, "whether along that dim is unknown" in unknown.reason) == (
        "all",
        True,
    )


HALO = """ENTRY %main (x: f32[2,8], w: f32[2,16]) -> f32[2,16] {
  %x = f32[2,8]{1,0} parameter(0), sharding={devices=[4,1]<=[4]}
  %w = f32[2,16]{1,0} parameter(1), sharding={devices=[4,1]<=[4]}
  %y = f32[2,16]{1,0} tanh(%w)
  %g = f32[8,16]{1,0} dot(%x, %y), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  %nothing = f32[] constant(0)
  %padded = f32[16,16]{1,0} pad(%g, %nothing), padding=0_8x0_0
  %tiles = f32[4,16]{1,0} reduce-scatter(%padded), replica_groups={{0,1,2,3}}, use_global_device_ids=true, channel_id=1, dimensions={0}, to_apply=%sum
  %end = f32[2,16]{1,0} slice(%tiles), slice={[2:4], [0:16]}
  %second = f32[2,16]{1,0} collective-permute(%end), channel_id=2, source_target_pairs={{0,2},{1,3}}
  %start = (f32[4,16]{1,0}, f32[4,16]{1,0}) collective-permute-start(%tiles), channel_id=3, source_target_pairs={{0,1},{1,2},{2,3}}
  %first = f32[4,16]{1,0} collective-permute-done(%start)
  %joined = f32[10,16]{1,0} concatenate(%second, %first, %tiles), dimensions={0}
  %id = u32[] partition-id()
  %step = u32[] constant(2)
  %shift = u32[] multiply(%id, %step)
  %six = u32[] constant(6)
  %place = u32[] subtract(%six, %shift)
  %zero = u32[] constant(0)
  %mine = f32[2,16]{1,0} dynamic-slice(%joined, %place, %zero), dynamic_slice_sizes={2,16}
  ROOT %r = f32[2,16]{1,0} add(%w, %mine)
}
"""
START = "%start = (f32[4,16]{1,0}, f32[4,16]{1,0}) collective-permute-start(%tiles)"
WRITTEN_HALO = """ENTRY %main (x: f32[8,8], w: f32[8,16]) -> f32[8,16] {
  %x = f32[8,8]{1,0} parameter(0)
  %w = f32[8,16]{1,0} parameter(1)
  %y = f32[8,16]{1,0} tanh(%w)
  %g = f32[8,16]{1,0} dot(%x, %y), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  ROOT %r = f32[8,16]{1,0} add(%w, %g)
}
"""


def test_a_block_of_what_neighbours_join_is_derived():
    assert proof_of(HALO, ROWS).verdict == "derived"
    assert proof_of(HALO, ROWS, WRITTEN_HALO).verdict == "proved"
    columns = re.sub(r"f32\[(\d+),16\]", r"f32[16,\1]", HALO)  # the same along the last dim
    for before, after in [
        ("parameter(1), sharding={devices=[4,1]", "parameter(1), sharding={devices=[1,4]"),
        ("dot(%x, %y), lhs_contracting_dims={0}", "dot(%y, %x), lhs_contracting_dims={1}"),
        ("padding=0_8x0_0", "padding=0_0x0_8"),
        (", dimensions={0}", ", dimensions={1}"),
        ("[2:4], [0:16]", "[0:16], [2:4]"),
        (
            "%place, %zero), dynamic_slice_sizes={2,16}",
            "%zero, %place), dynamic_slice_sizes={16,2}",
        ),
    ]:
        columns = changed(columns, before, after)
    assert proof_of(columns, "{devices=[1,4]<=[4]}").verdict == "derived"
    assert (
        proof_of(changed(columns, "constant(6)", "constant(5)"), "{devices=[1,4]<=[4]}").verdict
        == "unknown"
    )


@pytest.mark.parametrize(
    ("before", "after", "instruction"),
    [
        ("{{0,2},{1,3}}", "{{0,2},{2,3}}", "joined"),  # another sender
        ("{{0,2},{1,3}}", "{{0,2}}", "joined"),  # a device gets zeros
        ("{{0,1},{1,2},{2,3}}", "{{1,0},{2,1},{3,2}}", "joined"),
        ("[2:4]", "[1:3]", "joined"),
        ("(%second, %first, %tiles)", "(%first, %second, %tiles)", "joined"),
        ("(%second, %first, %tiles)", "(%second, %tiles, %first)", "joined"),
        (
            START,
            "%other = f32[4,16]{1,0} negate(%tiles)\n  " + START.replace("(%tiles)", "(%other)"),
            "joined",
        ),
        ("constant(6)", "constant(5)", "mine"),
        ("constant(6)", "constant(8)", "mine"),
        ("constant(2)", "constant(1)", "mine"),
        ("subtract(%six, %shift)", "subtract(%shift, %six)", "mine"),
    ],
)
def test_a_block_of_pieces_that_are_no_neighbours_is_not_derived(before, after, instruction):
    text = changed(HALO, before, after)
    proof = proof_of(text, ROWS)
    assert (proof.verdict, [unknown.instruction for unknown in proof.unknown]) == (
        "unknown",
        [instruction],
    )
    assert proof_of(text, ROWS, WRITTEN_HALO).verdict == "wrong"


EXCHANGE = """ENTRY %main (x: f32[1,4,16], w: f32[16,16]) -> f32[4,4,4] {
  %x = f32[1,4,16]{2,1,0} parameter(0), sharding={devices=[4,1,1]<=[4]}
  %w = f32[16,16]{1,0} parameter(1), sharding={replicated}
  %y = f32[1,4,16]{2,1,0} dot(%x, %w), lhs_contracting_dims={2}, rhs_contracting_dims={0}
  %columns = f32[4,4,4]{2,1,0} reshape(%y)
  %sent = f32[4,4,4]{2,1,0} transpose(%columns), dimensions={1,2,0}
  %received = f32[4,4,4]{2,1,0} all-to-all(%sent), replica_groups={{0,1,2,3}}, channel_id=1, dimensions={0}
  ROOT %r = f32[4,4,4]{2,1,0} transpose(%received), dimensions={0,2,1}
}
"""
IN_MEMORY = """ENTRY %main (x: f32[1,4,16], w: f32[16,16]) -> f32[4,4,4] {
  %x = f32[1,4,16]{2,1,0} parameter(0), sharding={devices=[4,1,1]<=[4]}
  %w = f32[16,16]{1,0} parameter(1), sharding={replicated}
  %y = f32[1,4,16]{2,1,0} dot(%x, %w), lhs_contracting_dims={2}, rhs_contracting_dims={0}
  %moved = f32[1,4,16]{1,2,0} copy(%y)
  %sent = f32[4,4,4]{0,2,1} bitcast(%moved)
  %received = f32[4,4,4]{0,2,1} all-to-all(%sent), replica_groups={{0,1,2,3}}, channel_id=1, dimensions={1}
  ROOT %r = f32[4,4,4]{1,2,0} bitcast(%received)
}
"""
WRITTEN_EXCHANGE = """ENTRY %main (x: f32[4,4,16], w: f32[16,16]) -> f32[4,4,16] {
  %x = f32[4,4,16]{2,1,0} parameter(0)
  %w = f32[16,16]{1,0} parameter(1)
  ROOT %y = f32[4,4,16]{2,1,0} dot(%x, %w), lhs_contracting_dims={2}, rhs_contracting_dims={0}
}
"""


@pytest.mark.parametrize(("text", "dim"), [(EXCHANGE, 0), (IN_MEMORY, 1)])
def test_an_all_to_all_behind_a_transpose_is_derived_along_one_dim(text, dim):
    split = "{devices=[1,1,4]<=[4]}"
    assert proof_of(text, split).verdict == "derived"
    assert proof_of(text, split, WRITTEN_EXCHANGE).verdict == "proved"
    for other in {0, 1, 2} - {dim}:
        wrong = changed(
            text, f"channel_id=1, dimensions={{{dim}}}", f"channel_id=1, dimensions={{{other}}}"
        )
        (unknown,) = proof_of(wrong, split).unknown
        assert (unknown.instruction, "whether along that dim is unknown" in unknown.reason) == (
            "received",
            True,
        )
        assert proof_of(wrong, split, WRITTEN_EXCHANGE).verdict == "wrong"
    assert problem_of(changed(text, "{{0,1,2,3}}", "{{1,0,2,3}}"), split).instruction == "received"


def bits_of_buckets(bits: str = "u32[2,8]", gathered: str = "u32[8,8]") -> str:
    """Return a program that gathers rows as bits, in one bucket with copies."""
    return f"""ENTRY %main (x: f32[2,4], w: f32[2,4]) -> f32[8,4] {{
  %x = f32[2,4]{{1,0}} parameter(0), sharding={{devices=[4,1]<=[4]}}
  %w = f32[2,4]{{1,0}} parameter(1), sharding={{replicated}}
  %bucket = f32[2,8]{{1,0}} concatenate(%x, %w), dimensions={{1}}
  %bits = {bits} bitcast-convert(%bucket)
  %all = {gathered} all-gather(%bits), replica_groups={{{{0,1,2,3}}}}, use_global_device_ids=true, channel_id=1, dimensions={{0}}
  %numbers = f32[8,8]{{1,0}} bitcast-convert(%all)
  ROOT %r = f32[8,4]{{1,0}} slice(%numbers), slice={{[0:8], [0:4]}}
}}
"""


WRITTEN_ROWS = """ENTRY %main (x: f32[8,4], w: f32[2,4]) -> f32[8,4] {
  %x = f32[8,4]{1,0} parameter(0)
  %w = f32[2,4]{1,0} parameter(1)
  ROOT %r = f32[8,4]{1,0} copy(%x)
}
"""
SUM_OF_BITS = """ENTRY %main (x: f32[2,4], w: f32[4]) -> f32[4] {
  %x = f32[2,4]{1,0} parameter(0), sharding={devices=[4,1]<=[4]}
  %w = f32[4]{0} parameter(1), sharding={replicated}
  %zero = f32[] constant(0)
  %local = f32[4]{0} reduce(%x, %zero), dimensions={0}, to_apply=%sum
  %bucket = f32[8]{0} concatenate(%local, %w), dimensions={0}
  %bits = u32[8]{0} bitcast-convert(%bucket)
  %total = u32[8]{0} all-reduce(%bits), replica_groups={{0,1,2,3}}, use_global_device_ids=true, channel_id=1, to_apply=%sum
  %numbers = f32[8]{0} bitcast-convert(%total)
  ROOT %r = f32[4]{0} slice(%numbers), slice={[0:4]}
}
"""


def test_bits_of_a_bucket_are_rows_and_no_sums():
    text = bits_of_buckets()
    assert proof_of(text).verdict == "derived"
    assert proof_of(text, COPIES, WRITTEN_ROWS).verdict == "proved"
    assert problem_of(changed(text, "{{0,1,2,3}}", "{{1,0,2,3}}")).instruction == "all"
    # two numbers for one: the bits are no elements of the bucket
    (unknown,) = proof_of(bits_of_buckets("u16[2,8,2]", "u16[8,8,2]")).unknown
    assert unknown.instruction == "bits"
    # the bits of terms are no terms
    (unknown,) = proof_of(SUM_OF_BITS).unknown
    assert unknown.instruction == "total"


EXCHANGED_BUCKETS = """ENTRY %main (x: f32[2,8], y: f32[8,4]) -> (f32[8,2], f32[2,16]) {
  %x = f32[2,8]{1,0} parameter(0), sharding={devices=[4,1]<=[4]}
  %y = f32[8,4]{1,0} parameter(1), sharding={devices=[1,4]<=[4]}
  %x0 = f32[2,2]{1,0} slice(%x), slice={[0:2], [0:2]}
  %y0 = f32[2,4]{1,0} slice(%y), slice={[0:2], [0:4]}
  %b0 = f32[2,6]{1,0} concatenate(%x0, %y0), dimensions={1}
  %x1 = f32[2,2]{1,0} slice(%x), slice={[0:2], [2:4]}
  %y1 = f32[2,4]{1,0} slice(%y), slice={[2:4], [0:4]}
  %b1 = f32[2,6]{1,0} concatenate(%x1, %y1), dimensions={1}
  %x2 = f32[2,2]{1,0} slice(%x), slice={[0:2], [4:6]}
  %y2 = f32[2,4]{1,0} slice(%y), slice={[4:6], [0:4]}
  %b2 = f32[2,6]{1,0} concatenate(%x2, %y2), dimensions={1}
  %x3 = f32[2,2]{1,0} slice(%x), slice={[0:2], [6:8]}
  %y3 = f32[2,4]{1,0} slice(%y), slice={[6:8], [0:4]}
  %b3 = f32[2,6]{1,0} concatenate(%x3, %y3), dimensions={1}
  %sent = (f32[2,6]{1,0}, f32[2,6]{1,0}, f32[2,6]{1,0}, f32[2,6]{1,0}) all-to-all(%b0, %b1, %b2, %b3), channel_id=1, replica_groups={{0,1,2,3}}
  %r0 = f32[2,6]{1,0} get-tuple-element(%sent), index=0
  %p0 = f32[2,2]{1,0} slice(%r0), slice={[0:2], [0:2]}
  %q0 = f32[2,4]{1,0} slice(%r0), slice={[0:2], [2:6]}
  %r1 = f32[2,6]{1,0} get-tuple-element(%sent), index=1
  %p1 = f32[2,2]{1,0} slice(%r1), slice={[0:2], [0:2]}
  %q1 = f32[2,4]{1,0} slice(%r1), slice={[0:2], [2:6]}
  %r2 = f32[2,6]{1,0} get-tuple-element(%sent), index=2
  %p2 = f32[2,2]{1,0} slice(%r2), slice={[0:2], [0:2]}
  %q2 = f32[2,4]{1,0} slice(%r2), slice={[0:2], [2:6]}
  %r3 = f32[2,6]{1,0} get-tuple-element(%sent), index=3
  %p3 = f32[2,2]{1,0} slice(%r3), slice={[0:2], [0:2]}
  %q3 = f32[2,4]{1,0} slice(%r3), slice={[0:2], [2:6]}
  %columns = f32[8,2]{1,0} concatenate(%p0, %p1, %p2, %p3), dimensions={0}
  %rows = f32[2,16]{1,0} concatenate(%q0, %q1, %q2, %q3), dimensions={1}
  ROOT %r = (f32[8,2]{1,0}, f32[2,16]{1,0}) tuple(%columns, %rows)
}
"""
WRITTEN_BUCKETS = """ENTRY %main (x: f32[8,8], y: f32[8,16]) -> (f32[8,8], f32[8,16]) {
  %x = f32[8,8]{1,0} parameter(0)
  %y = f32[8,16]{1,0} parameter(1)
  ROOT %r = (f32[8,8]{1,0}, f32[8,16]{1,0}) tuple(%x, %y)
}
"""


def test_buckets_that_devices_exchange_are_exchanged_by_pieces():
    def verdict(text, written=""):
        lowered = HEADER.replace(", num_partitions=4", "") + written if written else None
        outputs = ["{devices=[1,4]<=[4]}", ROWS]
        return prove(HEADER + text, outputs=outputs, mesh={"data": 4}, lowered=lowered).verdict

    text = EXCHANGED_BUCKETS
    assert verdict(text) == "derived"
    assert verdict(text, WRITTEN_BUCKETS) == "proved"
    assert verdict(changed(text, "{{0,1,2,3}}", "{{1,0,2,3}}")) == "wrong"
    # a piece of another place, which has the same layout: the numbers tell
    other = changed(text, "concatenate(%x1, %y1)", "concatenate(%x1, %y0)")
    assert verdict(other) == "derived"
    assert verdict(other, WRITTEN_BUCKETS) == "wrong"
    # a bucket of other pieces, in as many elements
    other = changed(text, "concatenate(%x1, %y1)", "concatenate(%y1, %x1)")
    assert verdict(other) == "unknown"
    assert verdict(other, WRITTEN_BUCKETS) == "wrong"
    # an exchange of sums that are not complete does not complete them
    other = changed(changed(text, "%y = ", "%unused = "), "  %x0", TERMS + "  %x0")
    assert verdict(other) == "unknown"


TERMS = """  %g = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  %y = f32[8,4]{1,0} slice(%g), slice={[0:8], [0:4]}
"""


def test_a_kernel_without_communication_is_a_function_of_whole_dims():
    kernel = 'custom-call(%ids), custom_call_target="tpu_custom_call"'
    text = changed(TOKENS, "slice(%x), slice={[0:1], [1:6]}", kernel.replace("%ids", "%x"))
    assert (
        proof_of(
            text.replace("s32[1,5]", "s32[1,6]")
            .replace("s32[1,20]", "s32[1,24]")
            .replace("s32[4,5]", "s32[4,6]")
        )
        .unknown[0]
        .instruction
        == "all"
    )
    rows = SHARDS.replace("tanh(%all)", 'custom-call(%all), custom_call_target="tpu_custom_call"')
    assert proof_of(rows, ROWS).verdict == "derived"
    for before, after in (
        ("(%all), custom", '(%all), backend_config={"has_communication":true}, custom'),
        (
            "{{0,1,2,3}}, use_global_device_ids=true, channel_id=1, dimensions={0}",
            "{{0},{1},{2},{3}}, use_global_device_ids=true, channel_id=1, dimensions={0}",
        ),
    ):
        assert proof_of(changed(rows, before, after), ROWS).verdict == "unknown"
    summed = GRADIENT.replace(
        "multiply(%s, %s)", 'custom-call(%g), custom_call_target="tpu_custom_call"'
    )
    assert "never taken" in problem_of(summed).missing


GATHER = next(line for line in SHARDS.splitlines() if "all-gather" in line)
CALLED = """%gather (p: f32[2,16]) -> f32[8,16] {
  %p = f32[2,16]{1,0} parameter(0)
  ROOT %g = f32[8,16]{1,0} all-gather(%p), replica_groups={{0,1,2,3}}, use_global_device_ids=true, channel_id=1, dimensions={0}
}

"""
STARTS = {
    "all-gather": (
        "all-gather-start(%w), replica_groups={{0,1,2,3}}, use_global_device_ids=true,"
        " channel_id=1, dimensions={0}"
    ),
    "async": "async-start(%w), calls=%gather",
    "call": "call-start(%w), to_apply=%gather",
    "custom-call": (
        'custom-call-start(%w), async_execution_thread="sparsecore", custom_call_target="?", '
        "called_computations={%gather}"
    ),
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", STARTS)
def test_asynchronous_instructions_are_opened_by_any_name(kind, late):
    """libtpu passes the operands to the start or to the update."""
    lines = [
        (
            "  %s = ((f32[2,16]{1,0:T(8,128)}), f32[8,16]{1,0}, s32[2]{0:T(128)S(2)})"
            f" {STARTS[kind]}"
        ),
        f"  %u = ((f32[2,16]{{1,0}}), f32[8,16]{{1,0}}, s32[2]{{0}}) {kind}-update(%s)",
        f"  %all = f32[8,16]{{1,0}} {kind}-done(%u)",
    ]
    if late:
        lines = [
            lines[0].replace("start(%w)", "start()"),
            lines[1].replace("update(%s)", "update(%s, %w)"),
            lines[2],
        ]
    text = changed(CALLED + SHARDS, GATHER, "\n".join(lines))
    proof = proof_of(text, ROWS, WRITTEN_SHARDS)
    assert (proof.verdict, proof.unknown, proof.not_compared) == ("proved", (), "")
    problem = problem_of(text.replace("{{0,1,2,3}}", "{{1,0,2,3}}"), ROWS, WRITTEN_SHARDS)
    assert problem.instruction in ("g", "u" if late else "s")  # written as in the program
    assert problem.opcode in ("all-gather", f"{kind}-update" if late else f"{kind}-start")


@pytest.mark.parametrize(
    ("before", "after", "instruction", "missing"),
    [
        ("multiply(%s, %s)", "multiply(%g, %g)", "q", "never taken"),
        (
            "subtract(%w, %q)",
            "add(%g, %g)",
            "g",
            "result 0 is a partial add: the reduction over these devices is missing.",
        ),
        ("{{0,1,2,3}}", "{{0,1},{2,3}}", "q", "never taken"),
        (
            "multiply(%s, %s)",
            "add(%s, %d)",
            "d",
            "it sums 4 copies of a sum that is complete already",
        ),
    ],
)
def test_a_missing_cut_or_doubled_reduction_is_found(before, after, instruction, missing):
    text = changed(GRADIENT, before, after)
    if "%d" in after:
        line = next(line for line in GRADIENT.splitlines() if "all-reduce" in line)
        text = changed(
            text, line, line + "\n" + line.replace("%s =", "%d =").replace("(%g)", "(%s)")
        )
    problem = problem_of(text)
    assert (problem.instruction, missing in problem.missing) == (instruction, True)
    assert f"> {instruction} = " in problem.hlo
    assert len(problem.hlo.splitlines()) < 60


def test_the_report_names_the_axes_of_a_reduction_that_is_half_done():
    problem = problem_of(changed(GRADIENT, "{{0,1,2,3}}", "{{0,1},{2,3}}"))
    assert (problem.axes, problem.groups) == (("data",), ((0, 2), (1, 3)))


@pytest.mark.parametrize(
    ("before", "after", "instruction"),
    [
        ("constant({0, 2, 4, 6})", "constant({2, 0, 4, 6})", "r"),
        ("{{0,1,2,3}}", "{{1,0,2,3}}", "all"),
    ],
)
def test_a_slice_of_another_device_or_another_order_is_found(before, after, instruction):
    assert problem_of(changed(SHARDS, before, after), ROWS).instruction == instruction


def test_a_result_with_another_sharding_is_found():
    assert proof_of(SHARDS, COPIES).verdict == "wrong"


def test_what_no_rule_covers_is_unknown_and_names_the_instruction():
    text = changed(GRADIENT, "tanh(%y)", 'custom-call(%y), custom_call_target="kernel"')
    (unknown,) = proof_of(text).unknown
    assert unknown == ("t", "custom-call", "no rule covers the custom call kernel.")


class Unreadable:
    """A compiled program whose text jaxlib cannot read, like some programs of a newer libtpu."""

    def as_text(self):
        raise jax.errors.JaxRuntimeError(
            "INTERNAL: async-update instruction should have 1 operands but sees 3"
        )


def test_a_text_that_jaxlib_cannot_read_is_written_by_the_compiler():
    table = jnp.arange(64.0) ** 3 / 7
    lowered = jax.jit(lambda x: x * table).lower(jnp.ones(64))
    text = text_of(Unreadable(), lowered)
    assert "constant({...})" not in text
    np.testing.assert_allclose(
        interpret(text, [np.ones((1, 64), np.float32)])[0][0], table, rtol=1e-5
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match="sees 3"):
        text_of(Unreadable(), None)


def test_a_wrong_number_of_shardings_is_refused():
    with pytest.raises(
        ValueError,
        match=(
            r"^prove: the program has 1 results, and none shardings were passed\.\nFix: pass"
            r" outputs="
        ),
    ):
        prove(HEADER + GRADIENT)


def loss_fn(params, batch):
    return jnp.mean(
        (
            jnp.tanh(batch["x"] @ params["up"] + params["bias"][None, :]) @ params["down"]
            - batch["y"]
        )
        ** 2
    )


SHAPES = {"up": (16, 32), "bias": (32,), "down": (32, 16)}
BATCH = {
    "x": jax.ShapeDtypeStruct((32, 16), jnp.float32),
    "y": jax.ShapeDtypeStruct((32, 16), jnp.float32),
}
RULES = [("up", P(None, "tensor")), ("bias", P("tensor")), ("down", P("tensor"))]


def step_of(name: str):
    mesh = so.make_mesh(data=4, tensor=2)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    opt = STRATEGIES[name](tx, mesh, loss_fn, rules=RULES)
    params = {key: jax.ShapeDtypeStruct(shape, jnp.float32) for key, shape in SHAPES.items()}
    return opt.step, opt.abstract_state(params)


@pytest.fixture
def corpus():
    """The script that compiles the strategy table."""
    with imported("compiled_corpus") as script:
        yield script


TABLE = ("ddp", "zero1", "zero2", "fsdp", "hybrid", "local_sgd", "diloco", "gpt", "moe")


@pytest.mark.slow
@pytest.mark.parametrize("start", TABLE)
def test_every_row_of_the_strategy_table_is_proved_or_agrees(start, corpus):
    rows = list(corpus.corpus_rows())
    assert all(row.name.startswith((*TABLE, corpus.PATTERN)) for row in rows)
    verdicts = {}
    for row in rows:
        for program, _ in corpus.compiled_programs(row) if row.name.startswith(start) else ():
            text = program.text
            written = program.lowered
            proof = prove(
                text,
                inputs=program.inputs,
                outputs=program.outputs,
                mesh=program.mesh,
                lowered=written,
            )
            verdicts[program.name] = proof.verdict
    assert len(verdicts) >= 5
    assert {
        name: verdict for name, verdict in verdicts.items() if verdict not in ("proved", "agrees")
    } == {}


@pytest.mark.parametrize(
    "name",
    [
        "zero1",
        *(pytest.param(name, marks=pytest.mark.slow) for name in STRATEGIES if name != "zero1"),
    ],
)
def test_the_step_of_every_strategy_is_proved(name):
    step, state = step_of(name)
    proof = so.hlo.audit(step, state, BATCH).prove()
    assert (proof.verdict, proof.unknown, proof.assumption) == ("proved", (), "")
    assert str(proof).startswith(
        f"proved: all results of {proof.num_instructions:,} instructions have their declared"
        " shardings. Results on drawn arguments are equal."
    )


WRONG = Proof(
    "wrong",
    WrongInstruction(
        "g", "dot", "model.py:7", ("data",), ((0, 1),), "a sum is missing.", "main:\n> g"
    ),
    (),
    3,
)


@pytest.fixture
def run_proved():
    """A function that runs a step of a strategy whose programs are proved."""
    mesh = so.make_mesh(data=8)

    def loss(w, batch):
        return jnp.mean((batch * w) ** 2)

    opt = so.ddp(optax.sgd(0.1), mesh, loss, check=so.hlo.check_proved)
    batch = jax.device_put(jnp.ones(16), NamedSharding(mesh, P("data")))
    return lambda: opt.step(opt.init(jnp.ones(())), batch)


def test_check_proved_refuses_a_wrong_program(run_proved, monkeypatch):
    monkeypatch.setattr("shardopt.hlo._check_proved.prove", lambda *_, **__: WRONG)
    with pytest.raises(so.errors.WrongProgramError) as error:
        run_proved()
    assert (
        str(error.value)
        == "ddp: XLA compiled a wrong program.\n  g (dot) over data, devices (0, 1): a sum is"
        " missing.\nFix: report the instructions to XLA, and disable the pass that made them"
        " (compiler_options=); or leave out check.\n  from model.py:7\nmain:\n> g"
    )


def test_check_proved_is_silent_about_a_proved_program(run_proved):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_proved()
