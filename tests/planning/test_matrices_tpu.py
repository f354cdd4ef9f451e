"""Optimizers of matrices as XLA:TPU compiles them: what is sent (all slow)."""

import jax
import jax.numpy as jnp
import optax
import pytest

import shardopt as so

pytestmark = pytest.mark.slow
WIDTH, ROWS = 1024, 1024
MUON = optax.contrib.muon(1e-2, muon_weight_dimension_numbers=lambda params: jax.tree.map(_dims, params))
ADAM = optax.adamw(1e-2)


def _dims(leaf):
    """Blocks, and matrices that are not stacked."""
    return optax.contrib.MuonDimensionNumbers((leaf.ndim - 2,), (leaf.ndim - 1,)) if leaf.ndim > 1 else None


def stacked(blocks):
    shapes = {"up": (blocks, WIDTH, 4 * WIDTH), "down": (blocks, 4 * WIDTH, WIDTH)}
    model = so.BlockModel(
        embed=lambda outer, batch: batch * outer["scale"],
        block=lambda w, x: x + jnp.tanh(x @ w["up"]) @ w["down"],
        loss=lambda outer, x, batch: jnp.mean((x - batch) ** 2),
    )
    return model, {"blocks": as_shapes(shapes), "scale": jax.ShapeDtypeStruct((), jnp.float32)}


def squares(count):
    def loss_fn(params, batch):
        x = batch
        for i in range(count):
            x = x + jnp.tanh(x @ params[f"w{i}"])
        return jnp.mean((x - batch) ** 2)

    return loss_fn, as_shapes({f"w{i}": (WIDTH, WIDTH) for i in range(count)})


def as_shapes(shapes):
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def compiled(topology, make, problem):
    loss_fn, params = problem
    batch = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    return so.aot(lambda mesh: make(mesh, loss_fn), params, batch, topology=topology)


STRATEGIES = {
    "fsdp": so.fsdp,
    "zero1": lambda *args, **options: so.zero(*args, stage=1, **options),
}
PROBLEMS = {
    ("v5e:2x4", "stacked"): lambda: stacked(8),
    ("v5e:2x4", "uneven"): lambda: stacked(6),
    ("v5e:2x4", "squares"): lambda: squares(8),
    ("v5p:4x4x4", "stacked"): lambda: stacked(64),
    ("v5p:4x4x4", "uneven"): lambda: stacked(32),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("topology", "kind"), PROBLEMS, ids=str)
def test_muon_sends_at_most_an_eighth_more_than_adam(topology, kind, strategy):
    def step(tx, layout):
        make = lambda mesh, loss_fn: STRATEGIES[strategy](tx, mesh, loss_fn, opt_state_layout=layout)  # noqa: E731
        return compiled(topology, make, PROBLEMS[topology, kind]())

    adam, muon = step(ADAM, "within"), step(MUON, "matrices")
    print(
        topology,
        kind,
        strategy,
        "adam",
        adam.audit.total_wire_bytes,
        "muon",
        muon.audit.total_wire_bytes,
        muon.audit.total_wire_bytes / adam.audit.total_wire_bytes,
        "flops",
        adam.flops,
        muon.flops,
    )
    assert muon.audit.total_wire_bytes < 1.15 * adam.audit.total_wire_bytes
