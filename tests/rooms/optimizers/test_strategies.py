"""Optimizers of matrices under strategies: equal to one device, and no collective where matrices
are not cut.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support.host import host_params
from support.problems import problem
from support.reference import relative_difference, train
from support.table import MESHES, STRATEGIES
from support.tiers import tiered

import shardopt as so
from shardopt.models import gpt
from shardopt.planning import topology_devices

# eps well above the rounding of gradients near zero, as for Adam in support/reference.py.
OPTIMIZERS = {
    "soap": lambda rules: so.optimizers.soap(
        1e-2, eps=1e-4, ridge=1e-3, weight_decay=1e-2, interval=3, matrices=rules
    ),
    "muon": lambda rules: optax.contrib.muon(
        1e-2, muon_weight_dimension_numbers=so.optimizers.muon_dimension_numbers(rules)
    ),
}
QUICK = [("soap", "zero1", 3, "odd")]
ROWS = QUICK + [
    (optimizer, strategy, i % 4, ("gpt", "odd", "nnx")[(i + j) % 3])
    for j, optimizer in enumerate(OPTIMIZERS)
    for i, strategy in enumerate(STRATEGIES)
]


@pytest.mark.parametrize(
    ("optimizer", "strategy", "mesh", "model"),
    tiered(dict.fromkeys(ROWS), lambda row: row in QUICK, ids=None),
)
def test_equals_one_device(optimizer, strategy, mesh, model, mesh_of, x64):
    case = problem(model, weighted=True, steps=8)
    tx = OPTIMIZERS[optimizer](gpt.matrices if model == "gpt" else None)
    rules = case.rules if MESHES[mesh].get("tensor", 1) > 1 else ()
    opt = STRATEGIES[strategy](tx, mesh_of(**MESHES[mesh]), case.loss_fn, rules=rules)
    _, final = train(tx, case.reference, case.params, case.batches)
    state = opt.init(case.params)
    for batch in case.batches:
        state, metrics = opt.step(state, batch)
        # queues of programs with collectives deadlock on fake devices
        jax.block_until_ready(metrics)
    assert relative_difference(state.params, final) <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "zero1"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_owners_work_on_whole_matrices_for_few_bytes(optimizer, strategy, mesh_of, x64):
    config = gpt.config(vocab_size=32, dim=16, num_layers=8, num_heads=2, max_length=16)
    params = jax.tree.map(lambda x: 2 * x.astype(float), host_params(gpt.init, config))
    batches = [{"tokens": np.random.default_rng(i).integers(0, 32, (16, 9))} for i in range(4)]
    tx = OPTIMIZERS[optimizer](gpt.matrices)
    model = gpt.model(config)
    opt = STRATEGIES[strategy](tx, mesh_of(data=8), model, opt_state="matrices")
    state = opt.init(params)
    adam = STRATEGIES[strategy](optax.adam(1e-2), mesh_of(data=8), model)
    sent, adam_bytes = (
        so.hlo.audit(candidate.step, candidate.init(params), batches[0]).total_wire_bytes
        for candidate in (opt, adam)
    )
    assert sent <= 1.15 * adam_bytes
    for batch in batches:
        state, metrics = opt.step(state, batch)
        jax.block_until_ready(metrics)
    _, final = train(tx, model.loss_fn, params, batches)
    assert relative_difference(state.params, final) <= 1e-10


def collectives_of_update(name, devices, shape, matrix):
    """Return the collectives of an update whose leaf and state are sharded over their first dim."""
    tx = OPTIMIZERS[name]([("w", matrix)])
    mesh = so.make_mesh(data=len(devices), devices=devices)
    params = {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}

    def place(x):
        return NamedSharding(mesh, PartitionSpec("data") if x.ndim > 2 else PartitionSpec())

    args = (params, jax.eval_shape(tx.init, params), params)
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place(x)), args)
    out = jax.tree.map(place, jax.eval_shape(tx.update, *args))
    compiled = jax.jit(tx.update, out_shardings=out).lower(*placed).compile()
    return so.hlo.audit(compiled, mesh=mesh).collectives


FUSED = ((8, 16, 3, 2, 8), so.optimizers.Matrix(rows=1, columns=(3, 4)))
STACKED = ((16, 24, 16), so.optimizers.Matrix())


@pytest.mark.parametrize(
    ("name", "leaf"),
    [
        ("soap", FUSED),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in [
                ("soap", STACKED),
                ("muon", STACKED),
                ("muon", FUSED),
            ]
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "fused" if value == FUSED else "stacked",
)
def test_whole_matrices_need_no_collective(name, leaf):
    assert collectives_of_update(name, jax.devices(), *leaf) == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("topology", ["v5e:2x4", "v5p:2x2x2"])
def test_nor_do_they_on_tpu(name, topology):
    shape = (8, 256, 3, 4, 64)
    matrix = FUSED[1]
    assert collectives_of_update(name, topology_devices(topology), shape, matrix) == ()
