"""Temporary memory and program size of the compiled step against the number of micro-batches."""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.paths import ROOT
from support.pipelines import SCHEDULES

import shardopt as so
from shardopt.hlo import inner_product_flops

STAGES, BLOCKS, WIDTH, ROWS = 4, 8, 64, 8  # rows of a micro-batch
MODEL = so.BlockModel(
    embed=lambda outer, batch: batch @ outer["in"],
    block=lambda w, x: x + jnp.tanh(x @ w["up"]) @ w["down"],
    loss=lambda outer, x, batch: jnp.mean((x @ outer["in"].T) ** 2),
)
SHAPES = {
    "blocks": {"up": (BLOCKS, WIDTH, 2 * WIDTH), "down": (BLOCKS, 2 * WIDTH, WIDTH)},
    "in": (4, WIDTH),
}
PARAMS = jax.tree.map(
    lambda s: jax.ShapeDtypeStruct(s, jnp.float32), SHAPES, is_leaf=lambda x: isinstance(x, tuple)
)


CHECKED = ("eager_one_f_one_b", "interleaved", "zero_bubble", "gpipe")
GROW = ("gpipe", "looped_breadth_first", "v_shaped")
"""Schedules that keep something of every micro-batch."""
OTHERS = [name for name in SCHEDULES if name not in (*CHECKED, *GROW)]


def lowered(schedule, micro_batches, mesh, remat=False):
    opt = so.hybrid(
        optax.sgd(0.1),
        mesh,
        MODEL,
        schedule=SCHEDULES[schedule],
        micro_batches=micro_batches,
        placement="ddp",
        remat=remat,
    )
    batch = jax.ShapeDtypeStruct((micro_batches * ROWS, 4), jnp.float32)
    return opt.step.lower(opt.abstract_state(PARAMS), batch), opt.config.schedule


def compiled(*how, **options):
    program, table = lowered(*how, **options)
    return program.compile(), table


def slot_bytes(remat):
    """Return the bytes that one slot of one chunk of a whole stage keeps: each block's input and
    its first product.

    With `remat` it keeps the chunk's input only.
    """
    per_block = ROWS * WIDTH * 4 * (1 + 2)
    return ROWS * WIDTH * 4 if remat else BLOCKS // STAGES * per_block


def row_bytes(table):
    """Return the bytes of a row of the table on a stage: 4 a column, and 8 for where a pass reads
    its input.
    """
    columns = table.table().values()
    return 4 * sum(1 if column.ndim == 2 else column.shape[-1] for column in columns) + 8


@pytest.mark.parametrize(
    ("schedule", "remat"),
    [
        pytest.param("eager_one_f_one_b", False, marks=pytest.mark.slow),
        ("eager_one_f_one_b", True),
        pytest.param("interleaved", False, marks=pytest.mark.slow),
        pytest.param("zero_bubble", False, marks=pytest.mark.slow),
        pytest.param("gpipe", True, marks=pytest.mark.slow),
        *(pytest.param(name, False, marks=pytest.mark.slow) for name in OTHERS),
    ],
)
def test_memory_and_program_do_not_grow_with_the_micro_batches(schedule, remat, mesh_of):
    mesh = mesh_of(data=1, pipeline=STAGES)
    counts = (8, 16, 32, 64) if schedule == "gpipe" else (8, 64)
    programs = {count: compiled(schedule, count, mesh, remat=remat) for count in counts}
    # the table itself has a row a tick
    temporary = {
        count: program.memory_analysis().temp_size_in_bytes - row_bytes(table) * table.num_ticks
        for count, (program, table) in programs.items()
    }
    slots = {count: table.num_slots for count, (_, table) in programs.items()}
    if schedule == "gpipe":  # an input a micro-batch, small next to all other buffers
        growth = [(temporary[2 * m] - temporary[m]) / m for m in (8, 16, 32)]
        np.testing.assert_allclose(growth, slot_bytes(remat=True), rtol=0.2)
    else:
        assert slots[8] == slots[64]
        flat = [temporary[count] for count in (8, 64)]
        assert max(flat) <= 1.05 * min(flat), temporary
    texts = {count: len(program.as_text()) for count, (program, _) in programs.items()}
    assert texts[64] <= 1.15 * texts[8], texts


@pytest.mark.slow
@pytest.mark.parametrize("name", GROW[:2])
def test_memory_grows_by_what_the_table_keeps_of_a_micro_batch(name, mesh_of):
    mesh = mesh_of(data=1, pipeline=STAGES)
    message = ROWS * WIDTH * 4

    def kept(table):
        """Return the bytes of the residuals of chunks, of their outputs for the loss, and of
        waiting messages.
        """
        waiting = table.num_input_slots + table.num_cotangent_slots
        return (
            table.num_slots * (slot_bytes(remat=False) / table.num_chunks + message)
            + waiting * message
        )

    programs = [compiled(name, count, mesh) for count in (8, 16, 32)]
    temporary = [program.memory_analysis().temp_size_in_bytes for program, _ in programs]
    expected = [kept(table) for _, table in programs]
    np.testing.assert_allclose(np.diff(temporary), np.diff(expected), rtol=0.1)


def test_the_loop_carries_the_slots_of_the_table(mesh_of):
    """Before XLA has it: each residual and each message that waits once.

    The slow tier measures what XLA makes of it.
    """
    carried = []
    expected = []
    for name in ("eager_one_f_one_b", "one_f_one_b", "interleaved"):
        program, table = lowered(name, 16, mesh_of(data=1, pipeline=STAGES))
        # the loop over ticks comes first
        (types,) = re.findall(r"stablehlo\.while.*?\) : (.*)", program.as_text())[:1]
        buffers = re.findall(rf"tensor<(\d+)x{ROWS}x({WIDTH}|{2 * WIDTH})xf32>", types)
        carried.append(sum(4 * ROWS * int(count) * int(width) for count, width in buffers))
        # the other schedules take the loss of the output that they have just computed
        outputs = table.num_slots if name == "one_f_one_b" else 0
        waiting = table.num_input_slots + table.num_cotangent_slots + outputs
        expected.append(
            table.num_slots * slot_bytes(remat=False) // table.num_chunks
            + waiting * 4 * ROWS * WIDTH
        )
    assert carried == expected


def temporary_bytes():
    """Print the temporary memory of two schedules, and their numbers of slots, in the order of
    operations that users have.
    """
    mesh = so.make_mesh(data=1, pipeline=STAGES, devices=jax.devices()[:STAGES])
    for name in ("eager_one_f_one_b", "one_f_one_b"):
        print(compiled(name, 16, mesh)[0].memory_analysis().temp_size_in_bytes)


@pytest.mark.slow
def test_memory_follows_the_slots_of_the_table():
    """`one_f_one_b` keeps S where the eager one keeps 2 S - 1.

    The table states the difference.
    """
    flags = os.environ["XLA_FLAGS"].replace(
        "--xla_cpu_enable_concurrency_optimized_scheduler=false", ""
    )
    environment = os.environ | {
        "XLA_FLAGS": flags,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
    }
    output = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, check=True
    ).stdout
    eager, textbook = map(int, output.split())
    saved = eager - textbook
    eager_table, textbook_table = (
        SCHEDULES[name](STAGES, 16) for name in ("eager_one_f_one_b", "one_f_one_b")
    )
    fewer = eager_table.num_slots - textbook_table.num_slots
    assert fewer == STAGES - 1
    # inputs and cotangents wait, and outputs as well
    waiting = (
        textbook_table.num_input_slots
        + textbook_table.num_cotangent_slots
        + textbook_table.num_slots
    )
    message = ROWS * WIDTH * 4
    np.testing.assert_allclose(
        saved, fewer * slot_bytes(remat=False) - waiting * message, rtol=0.25
    )


def test_the_loop_over_one_block_stays_and_tells_how_often_it_turns(mesh_of):
    """XLA dissolves a loop that is known to turn once, and then copies ring buffers on TPU.

    The program tells its reader how often the loop turns.
    """
    program, schedule = compiled("interleaved", 4, mesh_of(data=1, pipeline=STAGES))
    loops = [
        line
        for line in program.as_text().splitlines()
        if " while(" in line and "known_trip_count" not in line
    ]
    assert len(loops) == 2  # of the forward, and of the backward
    products = inner_product_flops(program, schedule=schedule)
    assert products is not None
    rows, block = schedule.num_micro_batches * ROWS, 2 * 2 * WIDTH * 2 * WIDTH  # of a row, forward
    # 2 blocks a stage, whose backward is twice their forward; the rest are the ends of the model
    assert products / (3 * BLOCKS / STAGES * rows * block) == pytest.approx(1, rel=0.1)


if __name__ == "__main__":
    temporary_bytes()
