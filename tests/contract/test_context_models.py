"""Models with attention over a context axis equal one device: methods, orders, packed rows,
strategies, pipelines.
"""

import functools
import itertools

import jax
import numpy as np
import optax
import pytest
from support.pairwise import all_pairs
from support.reference import relative_difference, train
from support.sequences import RULES, sequences
from support.table import STRATEGIES
from support.tiers import tiered

import shardopt as so

TX = optax.sgd(0.05, momentum=0.9)
HYBRID = {
    "gpipe": so.schedules.gpipe,
    "eager_one_f_one_b": so.schedules.eager_one_f_one_b,
    "zero_bubble": so.schedules.zero_bubble,
}
FACTORS = {
    "strategy": ["ddp", "zero1", "zero2", "fsdp", *HYBRID],
    "mesh": [
        {"data": 2, "context": 2},
        {"data": 2, "context": 4},
        {"data": 1, "context": 8},
        {"data": 2, "context": 2, "tensor": 2},
        {"data": 1, "context": 2, "replica": 2},
    ],
    "method": [None, "ring", "all_to_all", "all_gather"],
    "order": [None, "zigzag", "striped"],
    "packed": [False, True],
    "window": [None, 5],
    "micro_batches": [1, 2],
    "remat": [None, "full"],
    "view": ["per_device", "global"],
}


def allowed(row):
    """Stages take devices and micro-batches of their own; they have no global view."""
    if row["strategy"] in HYBRID:
        stages = np.prod(list(row["mesh"].values())) <= 4 and row["view"] == "per_device"
        return bool(stages and row["micro_batches"] == 2)
    # one partitioner's program less to compile
    return not (row["view"] == "global" and row["remat"] == "full")


ROWS = all_pairs(FACTORS, allowed)
QUICK = [
    next(row for row in ROWS if all(row[name] == value for name, value in wanted.items()))
    for wanted in [
        {"strategy": "fsdp", "method": "ring", "order": "zigzag"},
    ]
]


def row_id(row):
    sizes = ",".join(f"{axis}{size}" for axis, size in row["mesh"].items())
    return "-".join(["-".join(str(value) for name, value in row.items() if name != "mesh"), sizes])


@pytest.mark.parametrize("row", tiered(ROWS, lambda row: row in QUICK, ids=row_id))
def test_equals_one_device_on_the_union_batch(row, mesh_of, x64):
    pipelined = row["strategy"] in HYBRID
    mesh = mesh_of(**row["mesh"], **({"pipeline": 2} if pipelined else {}))
    order = (
        None
        if row["order"] is None
        else functools.partial(so.nn.zigzag, mesh=mesh, order=row["order"])
    )
    case = sequences(row["method"], packed=row["packed"], window=row["window"], order=order)
    model = case.model._replace(remat=row["remat"])
    options = {
        "micro_batches": row["micro_batches"],
        "rules": RULES if "tensor" in row["mesh"] else (),
    }
    if pipelined:
        opt = so.hybrid(
            TX, mesh, model, schedule=HYBRID[row["strategy"]], min_shard_elements=8, **options
        )
    else:
        opt = STRATEGIES[row["strategy"]](TX, mesh, model, view=row["view"], **options)
    expected, final = train(TX, case.reference, case.params, case.batches)
    state = opt.init(case.params)
    losses_and_norms = []
    for batch in case.batches:
        state, metrics = opt.step(state, batch)
        losses_and_norms.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    assert relative_difference(state.params, final) <= 1e-10
    np.testing.assert_allclose(losses_and_norms, expected, rtol=1e-10)


def test_the_rows_cover_every_pair_that_is_allowed():
    for a, b in itertools.combinations(FACTORS, 2):
        seen = {(str(row[a]), str(row[b])) for row in ROWS}
        wanted = {
            (str(x), str(y))
            for x in FACTORS[a]
            for y in FACTORS[b]
            if any(allowed(row | {a: x, b: y}) for row in ROWS)
        }
        assert wanted <= seen


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["order", "segments"])
def test_a_model_that_forgets_them_is_another(broken, mesh_of, x64):
    """The batches can tell: permuted tokens without their order, packed ones without segments."""
    mesh = mesh_of(data=1, context=4)
    case = sequences("ring", packed=True, order=functools.partial(so.nn.zigzag, mesh=mesh))
    drop = {"order": "order", "segments": "segment_ids"}[broken]
    _, final = train(TX, case.reference, case.params, case.batches)
    opt = so.fsdp(TX, mesh, case.model, min_shard_elements=8)
    state = opt.init(case.params)
    for batch in case.batches:
        state, _ = opt.step(state, {name: leaf for name, leaf in batch.items() if name != drop})
    assert relative_difference(state.params, final) > 1e-6


@pytest.mark.slow
def test_a_state_moves_between_context_sizes(mesh_of, tmp_path, x64):
    """A state is saved with context=4, and restored with context=2 and without. The trajectory is
    the same.
    """
    case = sequences("ring", steps=3)
    first = so.fsdp(TX, mesh_of(data=2, context=4), case.model, min_shard_elements=8)
    state, _ = first.step(first.init(case.params), case.batches[0])
    so.save(tmp_path / "state", state)
    _, final = train(TX, case.reference, case.params, case.batches)
    for opt in (
        so.fsdp(TX, mesh_of(data=2, context=2), case.model, min_shard_elements=8),
        so.zero(TX, mesh_of(data=2), case.model, stage=1, min_shard_elements=8),
    ):
        moved = so.restore(
            tmp_path / "state", opt, abstract_params=jax.eval_shape(lambda: case.params)
        )
        for batch in case.batches[1:]:
            moved, _ = opt.step(moved, batch)
        assert relative_difference(moved.params, final) <= 1e-10
