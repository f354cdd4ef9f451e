"""The drawn arguments reach what differs: a program that is wrong in a place that few numbers reach
is not proved.

Each row is a program, and a wrong version of it, which is compiled in its place.
"""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.tiers import tiered

import shardopt as so
from shardopt.hlo import prove

FLOATS = jax.ShapeDtypeStruct((16, 4), jnp.float32)
TABLE = jax.ShapeDtypeStruct((64, 4), jnp.float32)
IDS = jax.ShapeDtypeStruct((32,), jnp.int32)
COUNT = jax.ShapeDtypeStruct((), jnp.int32)


def looked_up(wrong):
    def run(params, batch):
        return params[jnp.where(batch >= 40, batch - 8, batch) if wrong else batch]

    return run, (TABLE, IDS)


def summed_into(wrong):
    def run(params, batch):
        return params.at[jnp.minimum(batch, 50) if wrong else batch].add(1.0)

    return run, (TABLE, IDS)


def one_hot(wrong):
    def run(params, batch):
        return jax.nn.one_hot(batch % 60 if wrong else batch, 64) @ params

    return run, (TABLE, IDS)


def sliced(wrong):
    def run(params, batch):
        return jax.lax.dynamic_slice_in_dim(params, batch[0] // 2 * 2 if wrong else batch[0], 4)

    return run, (TABLE, IDS)


def scheduled(boundary, factor):
    def make(wrong):
        def run(params, opt_state):
            rate = jnp.where(opt_state >= boundary, factor if wrong else 1.0, 0.5)
            return params * rate

        return run, (FLOATS, COUNT)

    return make


def accumulated(wrong):
    tx = optax.MultiSteps(optax.sgd(0.1), 4)

    def run(params, opt_state, batch):
        updates, state = tx.update(batch, opt_state, params)
        emits = state.mini_step == 0
        sign = jnp.where(emits, -1.0 if wrong else 1.0, 1.0)
        return params + sign * updates, state

    return run, (FLOATS, jax.eval_shape(tx.init, FLOATS), FLOATS)


def clipped(limit, wrong_scale):
    def make(wrong):
        def run(batch):
            norm = jnp.sqrt(jnp.sum(batch**2))
            scale = jnp.where(norm > limit, limit / norm * (wrong_scale if wrong else 1.0), 1.0)
            return batch * scale

        return run, (FLOATS,)

    return make


def branch(wrong):
    def run(batch):
        is_large = jnp.abs(batch).max() > 3
        return jax.lax.cond(is_large, lambda x: x * (2.1 if wrong else 2.0), jnp.negative, batch)

    return run, (FLOATS,)


def in_a_branch(inner, limit=1):
    """The numbers reach what differs in branches."""

    def make(wrong):
        function, arguments = inner(wrong)

        def run(params, opt_state):
            is_large = jnp.abs(params).max() > limit
            return jax.lax.cond(is_large, function, lambda *xs: -function(*xs), params, opt_state)

        return run, arguments

    return make


def in_one_of_three(inner):
    """They reach it in the last branch of a switch, in a branch of a branch."""

    def make(wrong):
        function, arguments = inner(wrong)
        plain, _ = inner(False)

        def run(params, opt_state):
            size = jnp.abs(params).max()
            index = (size > 0.1).astype(int) + (size > 1)
            nested, _ = in_a_branch(lambda _: (function, arguments), limit=100)(wrong)
            return jax.lax.switch(index, [plain, plain, nested], params, opt_state)

        return run, arguments

    return make


def after_a_branch(inner):
    """A branch returns them in a tuple, and what differs comes after it."""

    def make(wrong):
        function, arguments = inner(wrong)

        def run(params, opt_state):
            is_large = jnp.abs(params).max() > 1
            opt_state, scale = jax.lax.cond(
                is_large, lambda x: (x, 2.0), lambda x: (jnp.abs(x), 3.0), opt_state
            )
            return function(params, opt_state) * scale

        return run, arguments

    return make


def updated(rate):
    def make(wrong):
        def run(params, batch):
            return params - (0.0 if wrong else rate) * batch

        return run, (FLOATS, FLOATS)

    return make


def outside(function, wrong_function):
    def make(wrong):
        def run(batch):
            return wrong_function(batch) if wrong else function(batch)

        return run, (FLOATS,)

    return make


def cast(wrong):
    def run(batch):
        return batch.astype(jnp.float16).astype(jnp.float32) if wrong else batch * 1.0

    return run, (FLOATS,)


def cast_sum(wrong):
    def run(batch):
        total = jnp.sum(batch**2)
        return total.astype(jnp.float16).astype(jnp.float32) if wrong else total

    return run, (FLOATS,)


def kept(wrong):
    """A state that is kept if what comes is not finite."""

    def run(batch, opt_state):
        old = opt_state * 1.1 if wrong else opt_state
        return jnp.where(jnp.isfinite(batch).all(), 0.9 * opt_state + batch, old)

    return run, (FLOATS, FLOATS)


def never_kept(wrong):
    def run(batch, opt_state):
        new = 0.9 * opt_state + batch
        return new if wrong else jnp.where(jnp.isfinite(batch).all(), new, opt_state)

    return run, (FLOATS, FLOATS)


ROWS = {
    "what is kept of a state": kept,
    "nothing is kept of a state": never_kept,
    "index of a gather": looked_up,
    "index of a scatter": summed_into,
    "one-hot": one_hot,
    "index of a slice": sliced,
    "schedule from step 4": scheduled(4, 0.9),
    "schedule from step 1000": scheduled(1000, 1.1),
    "schedule that ends at 10000": scheduled(10_000, 0.0),
    "MultiSteps of the other sign": accumulated,
    "clipping at 1": clipped(1.0, 1.01),
    "clipping at 100": clipped(100.0, 0.5),
    "clipping at 0.001": clipped(1e-3, 2.0),
    "a branch": branch,
    "index in a branch": in_a_branch(looked_up),
    "index of a scatter in a branch": in_a_branch(summed_into),
    "schedule in a branch": in_a_branch(scheduled(4, 0.9)),
    "index of a slice in one branch of three": in_one_of_three(sliced),
    "index after a branch": after_a_branch(looked_up),
    "schedule after a branch": after_a_branch(scheduled(1000, 1.1)),
    "no update of 1e-4": updated(1e-4),
    "no update of 1e-8": updated(1e-8),
    "no update of 1e-10": updated(1e-10),
    "above 1": outside(lambda x: x, lambda x: jnp.minimum(x, 1.5)),
    "below -2": outside(jnp.tanh, lambda x: jnp.tanh(jnp.maximum(x, -2))),
    "a step at 3": outside(jnp.abs, lambda x: jnp.abs(x) + (x > 3)),
    "float16": cast,
    "a sum in float16": cast_sum,
}
QUICK = [
    "nothing is kept of a state",
    "index of a gather",
    "MultiSteps of the other sign",
    "no update of 1e-8",
]
QUICK += ["index of a slice in one branch of three", "schedule after a branch"]


def proof_of(make, *, wrong):
    right, arguments = make(False)
    compiled, _ = make(wrong)
    mesh = so.make_mesh(data=2, devices=jax.devices()[:2])
    copies = NamedSharding(mesh, P())
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=copies), arguments
    )
    lowered, other = (
        jax.jit(run, out_shardings=copies).lower(*placed) for run in (right, compiled)
    )
    return prove(other.compile(), lowered=lowered)


@pytest.mark.parametrize("name", tiered(ROWS, lambda name: name in QUICK))
def test_a_program_that_is_wrong_where_few_numbers_reach_is_not_proved(name):
    # optax's MultiSteps chooses by a constant whether it skips a step
    expected = "agrees" if name.startswith("MultiSteps") else "proved"
    assert proof_of(ROWS[name], wrong=False).verdict == expected
    assert proof_of(ROWS[name], wrong=True).verdict in ("wrong", "unknown", "agrees")


def test_a_choice_that_no_draw_makes_both_ways_is_not_proved():
    proof = proof_of(clipped(1e30, 1.0), wrong=False)
    assert (proof.verdict, len(proof.one_sided)) == ("agrees", 1)
    assert f"Only one side was taken of: {proof.one_sided[0]}." in str(proof)


@pytest.mark.parametrize(
    ("limit", "function"), [(1e30, jnp.negative), (100, lambda x: jnp.exp(x**2))]
)
def test_a_choice_is_not_seen_in_a_run_whose_results_are_not_finite(limit, function):
    """One makes the other choice for NaN alone, one for numbers that overflow."""

    def run(batch):
        scale = jnp.where(jnp.sqrt(jnp.sum(batch**2)) < limit, 1.0, 2.0)
        return function(batch) * scale

    proof = proof_of(lambda wrong: (run, (FLOATS,)), wrong=False)
    assert (proof.verdict, len(proof.one_sided)) == ("agrees", 1)


def sum_of_rows():
    mesh = so.make_mesh(data=4, devices=jax.devices()[:4])
    rows = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    total = jax.jit(lambda x: x.sum(0), out_shardings=NamedSharding(mesh, P()))
    lowered = total.lower(rows)
    return lowered, lowered.compile()


def proved(text, compiled, lowered):
    shardings = (jax.tree.leaves(s) for s in (compiled.input_shardings, compiled.output_shardings))
    inputs, outputs = shardings
    return prove(text, inputs=inputs, outputs=outputs, lowered=lowered).verdict


@pytest.mark.parametrize("operand", [0, 1])
def test_a_reducer_that_reads_one_operand_twice_is_not_a_sum(operand):
    lowered, compiled = sum_of_rows()
    text = compiled.as_text()
    assert proved(text, compiled, lowered) == "proved"
    name = re.search(r"all-reduce\(.*to_apply=%([\w.\-]+)", text)[1]
    body = text[text.index(f"%{name} (") :].partition("\n}")[0]
    adds = re.search(r"add\(([^,]*), ([^)]*)\)", body)
    twice = body.replace(adds[0], f"add({adds[1 + operand]}, {adds[1 + operand]})")
    assert proved(text.replace(body, twice), compiled, lowered) != "proved"


@pytest.mark.parametrize("error", tiered([1e-7, 1e-9, 1e-12], lambda error: error == 1e-9))
def test_copies_that_differ_by_a_bit_are_no_copies(error):
    mesh = so.make_mesh(data=4, devices=jax.devices()[:4])

    def step(factor):
        def run(x):
            return x.sum() * (1 + factor * jax.lax.axis_index("data"))

        return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))

    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, P()))
    with jax.enable_x64(True):
        right, wrong = (step(factor).lower(x) for factor in (0.0, error))
        assert prove(wrong.compile(), lowered=right).verdict in ("wrong", "unknown")


HEADER = (
    "HloModule m, is_scheduled=true, input_output_alias={{ {{0}}: ({0}, {{}}, may-alias), {{1}}:"
    " ({1}, {{}}, may-alias) }}, entry_computation_layout={{}}\n"
)
BODY = """
ENTRY %main (a: f32[4], b: f32[{size}]) -> (f32[4], f32[4]) {{
  %a = f32[4]{{0}} parameter(0), sharding={{replicated}}
  %b = f32[{size}]{{0}} parameter(1), sharding={{replicated}}
  %x = f32[4]{{0}} add(%a, {other})
  %y = f32[4]{{0}} multiply(%a, {other})
  ROOT %t = (f32[4]{{0}}, f32[4]{{0}}) tuple({results})
}}
"""


def aliased(first, second, *, size=4, results="%y, %x"):
    other = "%b" if size == 4 else "%a"
    text = HEADER.format(first, second) + BODY.format(size=size, other=other, results=results)
    return prove(text, inputs=["{replicated}"] * 2, outputs=["{replicated}"] * 2).verdict


def test_a_donated_argument_is_not_overwritten_before_it_is_read():
    # x is computed first, and y reads a and b once more
    assert aliased(0, 2) == "wrong"  # there is no argument 2
    assert aliased(0, 0) == "wrong"  # twice
    assert aliased(0, 1) == "wrong"  # x overwrites b, which y reads
    assert aliased(1, 0) == "wrong"  # x overwrites a
    assert aliased(0, 1, size=8) == "wrong"  # another shape
    assert aliased(0, 1, results="%y, %y") == "derived"  # both are written last


def test_a_text_that_is_no_module_is_refused():
    _, compiled = sum_of_rows()
    text = compiled.as_text()
    inputs = ["{devices=[4,1]<=[4]}"]
    outputs = ["{replicated}"]
    end = text.rstrip().rstrip("}")
    for broken, reason in [(end, "it ends within"), (text + text, "two HloModule lines")]:
        with pytest.raises(ValueError, match=reason):
            prove(broken, inputs=inputs, outputs=outputs)
    with pytest.raises(ValueError, match="for 4 devices"):
        prove(text, inputs=["{devices=[8,1]<=[8]}"], outputs=outputs)
