"""Blocks reach the stage that runs them, whatever it is, and their gradients the stage that stores
them.
"""

import math
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from support.tiers import tiered

import shardopt as so
from shardopt.collectives import per_device
from shardopt.pipeline import _messages as messages

PLACES = {
    "ring": lambda stages, chunks: [*range(stages)] * chunks,
    "v": lambda stages, chunks: [
        s for c in range(chunks) for s in (range(stages) if c % 2 == 0 else range(stages)[::-1])
    ],
    "backwards": lambda stages, chunks: [*range(stages)[::-1]] * chunks,
    "in a row": lambda stages, chunks: [s for s in range(stages) for _ in range(chunks)],
    "shuffled": lambda stages, chunks: (
        np.random.default_rng(5).permutation([*range(stages)] * chunks).tolist()
    ),
}


def placed(stage_of):
    """A schedule of one micro-batch with virtual stages where they are wanted."""
    count = len(stage_of)
    forward = np.arange(count)[:, None]
    return so.schedules.from_ticks(
        1 + max(stage_of), forward, 2 * count - 1 - forward, stage_of=stage_of
    )


def run(schedule, move, leaves, specs, mesh):
    stage_specs = [P("pipeline")] * len(leaves)
    f = per_device(
        lambda *xs: move(schedule, list(xs), specs),
        mesh,
        in_specs=tuple(stage_specs),
        out_specs=stage_specs,
    )
    return jax.jit(f)


SIZES = [(2, 2), (4, 2), (4, 3), (4, 1)]


@pytest.mark.parametrize(
    ("place", "stages", "chunks"),
    tiered(
        [(place, *sizes) for sizes in SIZES for place in PLACES],
        lambda row: row in [("v", 4, 2), ("shuffled", 4, 3)],
    ),
)
def test_every_block_reaches_the_stage_that_runs_it_and_returns(place, stages, chunks, mesh_of):
    schedule = placed(PLACES[place](stages, chunks))
    mesh = mesh_of(data=1, tensor=2, pipeline=stages)
    k = 2
    numbers = jnp.arange(stages * chunks * k)
    leaves = [
        numbers,
        numbers[:, None] * jnp.array([[1.0, 10.0]]),
        numbers % 2 == 0,
        numbers.astype(jnp.bfloat16),
    ]
    specs = [P(), P(None, "tensor"), P(), P()]
    scheduled_leaves = run(schedule, messages.to_schedule, leaves, specs, mesh)(*leaves)
    wanted = np.array(schedule.virtual_stages).reshape(-1, 1) * k + np.arange(k)
    for leaf, moved_leaf in zip(leaves, scheduled_leaves, strict=True):
        assert moved_leaf.dtype == leaf.dtype
        np.testing.assert_array_equal(moved_leaf, np.asarray(leaf)[wanted.reshape(-1)])
    back = run(schedule, messages.to_model, leaves, specs, mesh)(*scheduled_leaves)
    for leaf, moved_leaf in zip(leaves, back, strict=True):
        np.testing.assert_array_equal(moved_leaf, leaf)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("stages", "chunks"), [(4, 2), (4, 1)])
def test_one_permute_a_chunk_and_none_where_nothing_moves(place, stages, chunks, mesh_of):
    schedule = placed(PLACES[place](stages, chunks))
    x = jnp.zeros((stages * chunks, 3))
    text = str(
        jax.make_jaxpr(
            run(schedule, messages.to_schedule, [x], [P()], mesh_of(data=1, pipeline=stages))
        )(x)
    )
    stays = PLACES[place](stages, chunks) == [s for s in range(stages) for _ in range(chunks)]
    assert text.count("ppermute") == (0 if stays else chunks)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(stages=st.integers(1, 9), chunks=st.integers(1, 5), draw=st.randoms(use_true_random=False))
def test_rounds_are_permutations_and_hold_every_move_once(stages, chunks, draw):
    homes = [*range(stages)] * chunks
    draw.shuffle(homes)
    moves = messages._moves(placed(homes))
    rounds = messages._rounds(stages, moves)
    assert len(rounds) == chunks
    assert sorted(move for round_moves in rounds for move in round_moves) == sorted(moves)
    for round_moves in rounds:
        assert (
            sorted(move[0] for move in round_moves)
            == sorted(move[2] for move in round_moves)
            == [*range(stages)]
        )


@pytest.mark.slow
def test_optimised_python_finds_the_rounds_too():
    """`python -O` runs no assertions, so no result may depend on them."""
    code = (
        "from shardopt.pipeline import _messages as r; print(len(r._rounds(2,"
        " [(0,0,0,0),(0,1,1,0),(1,0,0,1),(1,1,1,1)])))"
    )
    ran = subprocess.run(
        [sys.executable, "-O", "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout == "2\n"


@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((2, 16, 256), (0, 1, 2)),
        ((16, 2, 256), (1, 0, 2)),
        ((256, 4, 128), (1, 0, 2)),
        ((8, 8, 128), (0, 1, 2)),
        ((128, 128), (0, 1)),
        ((16, 64), None),
        ((4, 128), None),
        ((128,), None),
    ],
)
def test_what_fills_the_tiles_of_a_tpu_lies_in_them(shape, order):
    leaves = [jax.ShapeDtypeStruct(shape, jnp.bfloat16)]
    traced = jax.jit(messages.in_tiles).trace(leaves)
    on = {
        platform: traced.lower(lowering_platforms=(platform,)).as_text()
        for platform in ("tpu", "cpu")
    }
    layouts = re.findall(r"result_layouts = \[dense<\[(.*?)\]>", on["tpu"])
    assert layouts == ([] if order is None else [", ".join(map(str, order[::-1]))])
    assert "LayoutConstraint" not in on["cpu"]


@pytest.mark.fast
def test_leaves_that_fill_no_tiles_leave_the_layouts_of_others():
    """The mutation: no leaf is constrained unless all leaves fill tiles."""
    leaves = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        for shape in [(16, 64), (256, 4, 128), (7,), (128, 128)]
    ]
    lowered = jax.jit(messages.in_tiles).trace(leaves).lower(lowering_platforms=("tpu",)).as_text()
    assert re.findall(r"result_layouts = \[dense<\[(.*?)\]>", lowered) == ["2, 0, 1", "1, 0"]


def test_a_slot_is_added_to_where_it_lies():
    """Else every weight gradient would be copied once more.

    Only the product takes memory.
    """
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(3, 16, 32), (16, 8), (8, 32)]]
    added = jax.jit(
        lambda sums, a, b, slot: messages.add_to_slot([sums], slot, [a @ b])[0], donate_argnums=0
    )
    compiled = added.lower(*shapes, jnp.int32(1)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * 4 * 16 * 32
    sums, a, b = (
        jnp.arange(math.prod(struct.shape), dtype=struct.dtype).reshape(struct.shape)
        for struct in shapes
    )
    np.testing.assert_array_equal(added(sums + 0, a, b, 1), sums.at[1].add(a @ b))
