"""The executor follows the table: idle slots hand nothing on and do no work, every pass runs as
often as listed.
"""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support.pipelines import IN_GROUPS, SCHEDULES, block_problem
from support.tiers import tiered

import shardopt as so
from shardopt.pipeline._executor import execute
from shardopt.step import _pipelined as pipelined


def train(schedule, mesh, case, micro_batches, **options):
    opt = so.hybrid(
        optax.sgd(0.05, momentum=0.9),
        mesh,
        case.loss_fn,
        schedule=schedule,
        micro_batches=micro_batches,
        min_shard_elements=8,
        **options,
    )
    state = opt.init(case.params)
    for batch in case.batches:
        state, metrics = opt.step(state, batch)
    return jax.device_get((state.params, metrics))


IDLE = [(name, i % 2 == 0, 4 if name in IN_GROUPS else 3) for i, name in enumerate(SCHEDULES)]


@pytest.mark.slow  # contract/test_hybrid_exact.py
@pytest.mark.parametrize(
    ("name", "remat", "micro_batches"),
    tiered(IDLE, lambda row: row[0] == "zero_bubble"),
)
def test_what_idle_slots_and_empty_buffers_hold_is_read_by_nobody(
    name, remat, micro_batches, mesh_of, monkeypatch, x64
):
    case = block_problem("pytree", weighted=True, num_blocks=8, rows=12, steps=2)
    run = functools.partial(
        train, SCHEDULES[name], mesh_of(data=1, pipeline=4), case, micro_batches, remat=remat
    )
    expected = run()
    calls = []

    def full_of_nan(*args, **options):
        calls.append(name)
        return execute(*args, **options, idle=np.nan)

    monkeypatch.setattr(pipelined, "execute", full_of_nan)
    poisoned_result = run()
    assert calls
    for a, b in zip(jax.tree.leaves(poisoned_result), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def counting(seen):
    """Return functions that count on the host: an identity that counts forwards and backwards, one
    for a weight.
    """

    def tell(kind, x):
        def count(stage, value):
            seen[kind, int(stage)] += 1
            return np.zeros((), value.dtype)

        def call(stage, value):
            return jax.pure_callback(count, jax.ShapeDtypeStruct((), value.dtype), stage, value)

        # A callback wants every axis manual; the value is what makes it wait, and run where it is
        # computed.
        wrapped = jax.shard_map(
            call, in_specs=(P(), P()), out_specs=P(), axis_names={"tensor"}, check_vma=False
        )
        return x + wrapped(jax.lax.axis_index("pipeline"), x.reshape(-1)[0])

    def make(forward, backward):
        f = jax.custom_vjp(lambda x: tell(forward, x) if forward else x)
        f.defvjp(lambda x: (f(x), None), lambda _, dy: (tell(backward, dy),))
        return f

    return make("forward", "backward"), make(None, "weight")


@pytest.mark.parametrize(
    ("name", "remat"),
    tiered(
        [(name, remat) for name in SCHEDULES for remat in (False, True)],
        quick=lambda row: False,
        fast=lambda row: row in (("one_f_one_b", True), ("zero_bubble", False)),
    ),
)
def test_every_pass_runs_as_often_as_the_table_lists_it(name, remat, mesh_of):
    stages = 4
    micro_batches = 4
    k = 2
    schedule = SCHEDULES[name](stages, micro_batches)
    seen = Counter()
    travelling, weight = counting(seen)
    model = so.BlockModel(
        embed=lambda outer, batch: batch @ outer["in"],
        block=lambda w, x: x + jnp.tanh(travelling(x) @ weight(w["kernel"])),
        loss=lambda outer, x, batch: jnp.mean(x**2),
    )
    num_blocks = stages * schedule.num_chunks * k
    params = {"blocks": {"kernel": jnp.ones((num_blocks, 4, 4)) / 9}, "in": jnp.ones((3, 4))}
    opt = so.hybrid(
        optax.sgd(0.1),
        mesh_of(data=1, pipeline=stages),
        model,
        schedule=schedule,
        micro_batches=micro_batches,
        placement="ddp",
        remat=remat,
        view="unproved",  # it counts passes, by a number that no trace can tell
    )
    state, _ = opt.step(opt.init(params), np.ones((8, 3), np.float32))
    jax.block_until_ready(state)
    table = schedule.table()
    listed = {kind: (table[f"{kind}_micro_batch"] >= 0).sum(0) for kind in ("forward", "backward")}
    assert all(
        listed[kind].tolist() == [micro_batches * schedule.num_chunks] * stages for kind in listed
    )
    expected = {
        (kind, s): int(count) * k
        for kind, counts in listed.items()
        for s, count in enumerate(counts)
    }
    expected |= {("weight", s): expected["backward", s] for s in range(stages)}
    # the forward runs again in the backward pass, which is all that there is of it for the last
    # chunk
    if remat:
        last = schedule.ticks.stage_of[-1]
        expected |= {("forward", s): 2 * expected["forward", s] for s in range(stages)}
        expected["forward", last] -= micro_batches * k
    assert dict(seen) == expected


def test_evaluation_runs_forwards_alone(mesh_of):
    seen = Counter()
    travelling, _ = counting(seen)
    model = so.BlockModel(
        embed=lambda outer, batch: batch @ outer["in"],
        block=lambda w, x: x + jnp.tanh(travelling(x) @ w["kernel"]),
        loss=lambda outer, x, batch: jnp.mean(x**2),
    )
    params = {"blocks": {"kernel": jnp.ones((8, 4, 4)) / 9}, "in": jnp.ones((3, 4))}
    opt = so.hybrid(
        optax.sgd(0.1),
        mesh_of(data=1, pipeline=4),
        model,
        micro_batches=6,
        placement="ddp",
        view="unproved",
    )
    opt.evaluate(opt.init(params), np.ones((6, 3), np.float32))["loss"].block_until_ready()
    assert dict(seen) == {("forward", s): 6 * 2 for s in range(4)}
