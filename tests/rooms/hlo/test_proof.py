"""Proofs of compiled programs: small programs by hand, right and wrong, and the compiled steps of strategies."""

import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.table import STRATEGIES

import shardopt as so
from shardopt.hlo import Problem, Proof, prove
from shardopt.step import _check_proof

ROWS, COPIES = "{devices=[4,1]<=[4]}", "{replicated}"

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


def proof_of(text: str, output: str = COPIES) -> Proof:
    return prove(HEADER + text, outputs=[output], mesh={"data": 2, "tensor": 2})


def problem_of(text: str, output: str = COPIES) -> Problem:
    proof = proof_of(text, output)
    assert proof.verdict == "wrong"
    assert proof.problem is not None
    return proof.problem


def changed(text: str, before: str, after: str) -> str:
    assert before in text
    return text.replace(before, after)


def test_right_programs_are_proved():
    assert proof_of(GRADIENT) == Proof("proved", None, (), 11)
    assert proof_of(SHARDS, ROWS).verdict == "proved"


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
        ("multiply(%s, %s)", "add(%s, %d)", "d", "it sums 4 copies of a sum that is complete already"),
    ],
)
def test_a_missing_cut_or_doubled_reduction_is_found(before, after, instruction, missing):
    text = changed(GRADIENT, before, after)
    if "%d" in after:
        line = next(line for line in GRADIENT.splitlines() if "all-reduce" in line)
        text = changed(text, line, line + "\n" + line.replace("%s =", "%d =").replace("(%g)", "(%s)"))
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


def test_a_wrong_number_of_shardings_is_refused():
    with pytest.raises(
        ValueError, match=r"^prove: the program has 1 results, and none shardings were passed\.\nFix: pass outputs="
    ):
        prove(HEADER + GRADIENT)


def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["up"] + params["bias"][None, :]) @ params["down"] - batch["y"]) ** 2)


SHAPES = {"up": (16, 32), "bias": (32,), "down": (32, 16)}
BATCH = {"x": jax.ShapeDtypeStruct((32, 16), jnp.float32), "y": jax.ShapeDtypeStruct((32, 16), jnp.float32)}
RULES = [("up", P(None, "tensor")), ("bias", P("tensor")), ("down", P("tensor"))]


def step_of(name: str):
    mesh = so.make_mesh(data=4, tensor=2)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    opt = STRATEGIES[name](tx, mesh, loss_fn, rules=RULES)
    params = {key: jax.ShapeDtypeStruct(shape, jnp.float32) for key, shape in SHAPES.items()}
    return opt.step, opt.abstract_state(params)


@pytest.mark.parametrize(
    "name", ["zero1", *(pytest.param(name, marks=pytest.mark.slow) for name in STRATEGIES if name != "zero1")]
)
def test_the_step_of_every_strategy_is_proved(name):
    step, state = step_of(name)
    proof = so.audit(step, state, BATCH).prove()
    assert (proof.verdict, proof.unknown) == ("proved", ())
    assert (
        str(proof) == f"proved: all results of {proof.num_instructions:,} instructions have their declared shardings."
    )


WRONG = Proof(
    "wrong", Problem("g", "dot", "model.py:7", ("data",), ((0, 1),), "a sum is missing.", "main:\n> g"), (), 3
)


@pytest.fixture
def verified():
    """A function jitted as a program of a strategy that verifies."""
    mesh = so.make_mesh(data=8)
    opt = so.ddp(optax.sgd(0.1), mesh, lambda w, batch: jnp.mean((batch * w) ** 2), verify=True)
    batch = jax.device_put(jnp.ones(16), NamedSharding(mesh, P("data")))
    return lambda: opt.step(opt.init(jnp.ones(())), batch)


def test_verify_refuses_a_wrong_program(verified, monkeypatch):
    monkeypatch.setattr(_check_proof, "prove", lambda *_, **__: WRONG)
    with pytest.raises(RuntimeError) as error:
        verified()
    assert str(error.value) == (
        "ddp: XLA compiled a wrong program.\n"
        "  g (dot) over data, devices (0, 1): a sum is missing.\n"
        "Fix: report the instructions to XLA, and disable the pass that made them (compiler_options=); or leave out verify.\n"
        "  from model.py:7\nmain:\n> g"
    )


def test_verify_is_silent_about_a_proved_program(verified):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verified()
