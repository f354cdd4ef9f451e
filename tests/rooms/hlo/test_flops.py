"""Flops read off compiled programs, against numbers worked out by hand."""

import jax
import jax.numpy as jnp
import pytest
from support.paths import PROGRAMS

from shardopt.hlo._program import inner_product_flops
from shardopt.pipeline import schedules

pytestmark = pytest.mark.fast


def program(line, operands="f32[2,3], f32[3,4]", computations=""):
    shapes = operands.split(", f")
    lhs = shapes[0]
    rhs = f"f{shapes[1]}"
    return (
        f"HloModule m\n\n{computations}ENTRY %main (a: {lhs}, b: {rhs}) -> f32[2] {{\n"
        f"  %a = {lhs} parameter(0)\n  %b = {rhs} parameter(1)\n  ROOT {line}\n}}\n"
    )


def test_products_in_nested_loops_count_as_often_as_loops_turn():
    def step(x, _):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ x), None), x, None, length=3)[0], None

    run = jax.jit(lambda x: jax.lax.scan(step, x @ x, None, length=4)[0])
    assert inner_product_flops(run.lower(jnp.ones((32, 32))).compile()) == 13 * 2 * 32**3


def test_batched_products_count_each_batch():
    run = jax.jit(lambda x, y: jnp.einsum("btd,bsd->bts", x, y))
    compiled = run.lower(jnp.ones((2, 8, 16)), jnp.ones((2, 4, 16))).compile()
    assert inner_product_flops(compiled) == 2 * 2 * 8 * 4 * 16


def test_the_branch_with_most_flops_counts():
    run = jax.jit(lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x))
    assert inner_product_flops(run.lower(jnp.ones((16, 16))).compile()) == 2 * 2 * 16**3


def test_passes_of_a_pipeline_count_as_often_as_its_schedule_runs_them():
    def tick(x, busy):
        x = x @ x  # outside of branches: at every tick
        return (
            jax.lax.cond(
                busy,
                lambda x: jax.lax.scan(lambda x, _: (x @ x, None), x, None, length=2)[0],
                jnp.sin,
                x,
            ),
            0,
        )

    schedule = schedules.eager_one_f_one_b(4, 8)
    busy = jnp.arange(schedule.num_ticks) < 8
    compiled = (
        jax.jit(lambda x, busy: jax.lax.scan(tick, x, busy)[0])
        .lower(jnp.ones((16, 16)), busy)
        .compile()
    )
    assert inner_product_flops(compiled) == 3 * schedule.num_ticks * 2 * 16**3
    assert (
        inner_product_flops(compiled, schedule=schedule) == (schedule.num_ticks + 2 * 8) * 2 * 16**3
    )
    other = schedules.eager_one_f_one_b(4, 16)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        inner_product_flops(compiled, schedule=other)
    assert (
        str(caught.value)
        == f"inner_product_flops: the schedule has {other.num_ticks} ticks, and no loop of the"
        f" program turns so often: its loops turn 2, {schedule.num_ticks} times.\nFix: pass the"
        " schedule that the program was made with, such as opt.config.schedule, or none."
    )


def test_a_loop_in_a_pass_that_is_as_long_as_the_schedule_is_another():
    schedule = schedules.eager_one_f_one_b(2, 4)
    ticks = schedule.num_ticks
    product = 2 * 16**3

    def branching(x, busy):
        return jax.lax.cond(busy, lambda x: x @ x, jnp.sin, x), None

    def tick(x, busy):
        return (
            jax.lax.cond(
                busy, lambda x: jax.lax.scan(branching, x, jnp.arange(ticks) < 3)[0], jnp.sin, x
            ),
            None,
        )

    def tick_without(x, _):
        return jax.lax.scan(branching, x, jnp.arange(ticks) < 3)[0], None

    for loop_body, count in (
        (tick, schedule.num_micro_batches * ticks),
        (tick_without, ticks * ticks),
    ):
        run = jax.jit(lambda x, busy, loop_body=loop_body: jax.lax.scan(loop_body, x, busy)[0])
        compiled = run.lower(jnp.ones((16, 16)), jnp.arange(ticks) < 4).compile()
        assert inner_product_flops(compiled, schedule=schedule) == count * product


def test_a_loop_of_unknown_length_is_not_guessed():
    run = jax.jit(lambda x: jax.lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ x, x))
    assert inner_product_flops(run.lower(jnp.ones((16, 16))).compile()) is None


@pytest.mark.parametrize(
    ("line", "operands", "flops"),
    [
        # an inner product as XLA:TPU writes it
        (
            "%c = f32[2,4] convolution(%a, %b), dim_labels=bf_io->bf",
            "f32[2,3], f32[3,4]",
            2 * 2 * 4 * 3,
        ),
        # two dims contracted, as a window over all of one of them
        (
            "%c = f32[5,7,1] convolution(%a, %b), window={size=8}, dim_labels=bf0_io0->bf0",
            "f32[5,3,8], f32[3,7,8]",
            2 * 5 * 7 * 3 * 8,
        ),
        # a batch dim as a window that is dilated so that each position meets one
        (
            (
                "%c = f32[8,5,7] convolution(%a, %b), window={size=8 stride=7 lhs_dilate=8},"
                " dim_labels=0bf_0io->0bf"
            ),
            "f32[8,5,3], f32[8,3,7]",
            2 * 8 * 5 * 7 * 3,
        ),
        # a free dim of the kernel as a window over padding
        (
            (
                "%c = f32[2,5,7] convolution(%a, %b), window={size=2 pad=1_1 rhs_reversal=1},"
                " dim_labels=0bf_0io->0bf"
            ),
            "f32[1,5,3], f32[2,3,7]",
            2 * 2 * 5 * 7 * 3,
        ),
        (
            (
                '%c = (f32[2,4], s8[64]) custom-call(%a, %b), custom_call_target="__cublas$gemm", '
                'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
            ),
            "f32[2,3], f32[3,4]",
            2 * 2 * 4 * 3,
        ),
    ],
)
def test_each_instruction_has_its_flops(line, operands, flops):
    assert inner_product_flops(program(line, operands)) == flops


def test_a_step_for_a_tpu_has_the_flops_of_its_products():
    # four blocks of two matrices 1024 x 4096, halved over tensor; 8 rows a device in two
    # micro-batches
    rows = (8 * 8) // 4 // 2
    weights = 2 * 1024 * 4096 // 2
    batches = 2
    forward = 4 * 2 * rows * weights * batches
    assert inner_product_flops((PROGRAMS / "v5e_fsdp.hlo").read_text()) == pytest.approx(
        3 * forward, rel=0.02
    )
