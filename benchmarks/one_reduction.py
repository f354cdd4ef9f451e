"""How often gradients are reduced in a step with micro-batches: by jit and shardings, by
optax.MultiSteps, and by shardopt.

    python benchmarks/one_reduction.py

A model of eight blocks, M micro-batches, eight simulated devices on `data`. The rows:

- `jax.jit`, parameters copied, and a scan over micro-batches, the layout of MaxText's engine before
  pull request 5099;
- `optax.MultiSteps`, whose step is one micro-batch;
- strategies of shardopt.

Nothing runs; collectives are counted in the compiled program, loops multiplied in. Gradients are
all leaves above 1 kB.
"""

from common import fake_devices, write_json

fake_devices(8)

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardopt as so

DIM = 64
BLOCKS = 8
ROWS = 64
MICRO_BATCHES = 8
TX = optax.adam(1e-2)


def block(w, x):
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


MODEL = so.BlockModel(
    embed=lambda outer, batch: batch, block=block, loss=lambda outer, x, batch: jnp.mean(x**2)
)
PARAMS = {
    "blocks": {
        "up": jax.ShapeDtypeStruct((BLOCKS, DIM, DIM), jnp.float32),
        "down": jax.ShapeDtypeStruct((BLOCKS, DIM, DIM), jnp.float32),
    }
}


def loss_fn(params, batch):
    x, _ = jax.lax.scan(lambda x, w: (block(w, x), None), batch, params["blocks"])
    return jnp.mean(x**2)


def of_gradients(report) -> dict:
    """Return how often gradients are reduced, and the bytes of all collectives."""
    kinds = ("all-reduce", "reduce-scatter", "all-to-all")
    reductions = [each for each in report.of(min_bytes=1024).collectives if each.kind in kinds]
    gathers = [each for each in report.of(min_bytes=1024).collectives if each.kind == "all-gather"]
    return {
        "bytes": report.total_wire_bytes,
        "reduced": sum(each.wire_bytes * each.calls for each in reductions),
        "gathered": sum(each.wire_bytes * each.calls for each in gathers),
    }


def of_jit(step, batch, *trees) -> dict:
    mesh = so.make_mesh(data=8)
    copied = NamedSharding(mesh, P())
    rows = NamedSharding(mesh, P("data"))
    place = lambda tree: jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=copied), tree
    )
    batch = jax.ShapeDtypeStruct(batch, jnp.float32, sharding=rows)
    return of_gradients(
        so.hlo.audit(jax.jit(step, out_shardings=copied), *map(place, trees), batch, mesh=mesh)
    )


def scan_by_jit() -> dict:
    """Return the collectives of a scan over micro-batches, partitioned by XLA."""

    def step(params, state, batch):
        parts = jnp.moveaxis(batch.reshape(ROWS // MICRO_BATCHES, MICRO_BATCHES, DIM), 1, 0)

        def add(total, part):
            return jax.tree.map(jnp.add, total, jax.grad(loss_fn)(params, part)), None

        grads, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)
        updates, state = TX.update(jax.tree.map(lambda g: g / MICRO_BATCHES, grads), state, params)
        return optax.apply_updates(params, updates), state

    return of_jit(step, (ROWS, DIM), PARAMS, jax.eval_shape(TX.init, PARAMS))


def multi_steps() -> dict:
    """Return the collectives of a step with optax.MultiSteps: as many calls as micro-batches."""
    tx = optax.MultiSteps(TX, MICRO_BATCHES)

    def step(params, state, batch):
        updates, state = tx.update(jax.grad(loss_fn)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    once = of_jit(step, (ROWS // MICRO_BATCHES, DIM), PARAMS, jax.eval_shape(tx.init, PARAMS))
    return {name: MICRO_BATCHES * value for name, value in once.items()}


def strategy(make, **options) -> dict:
    """Return the collectives of a strategy's step."""
    opt = make(TX, so.make_mesh(data=8), MODEL, micro_batches=MICRO_BATCHES, **options)
    return of_gradients(
        so.hlo.audit(
            opt.step, opt.abstract_state(PARAMS), jax.ShapeDtypeStruct((ROWS, DIM), jnp.float32)
        )
    )


def run() -> dict:
    """Return bytes reduced and gathered of each row, and the bytes reduced over the least possible."""
    size = 4 * sum(leaf.size for leaf in jax.tree.leaves(PARAMS))
    rows = {
        "jit, scan over micro-batches": scan_by_jit(),
        "jit, optax.MultiSteps": multi_steps(),
        "so.ddp": strategy(so.ddp),
        "so.zero(stage=1)": strategy(so.zero, stage=1),
        "so.zero(stage=2)": strategy(so.zero, stage=2),
        "so.fsdp": strategy(so.fsdp),
    }
    scatter = 7 / 8 * size
    return {name: row | {"reductions": row["reduced"] / scatter} for name, row in rows.items()}


def table(results: dict) -> str:
    """Return the rows as docs/notes/one_reduction.md has them."""
    lines = [
        (
            "| step of 8 micro-batches | reduced, kB | gathered, kB | in reduce-scatters of all"
            " gradients |"
        ),
        "|---|---:|---:|---:|",
    ]
    for name, row in results.items():
        lines.append(
            f"| {name} | {row['reduced'] / 1e3:.0f} | {row['gathered'] / 1e3:.0f} |"
            f" {row['reductions']:.1f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    _results = run()
    print(table(_results))
    print("written to", write_json(__file__, _results))
