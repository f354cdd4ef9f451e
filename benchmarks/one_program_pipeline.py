"""Memory of a pipeline in one jax program over micro-batches: autodiff through a shift register,
and 1F1B as a table.

    python benchmarks/one_program_pipeline.py

Eight blocks in four stages, four simulated devices. The rows:

- a shift register of the stages' activations under `jit`: a scan over ticks with `vmap` over
  stages, differentiated by jax. MaxText and praxis build pipelines so. With `jax.checkpoint` around
  a stage, and without;
- `so.hybrid` with its schedules, blocks recomputed or not.

Nothing runs; the memory is the temporary memory that XLA:CPU plans for a device.
"""

from common import fake_devices, write_json

fake_devices(4)

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardopt as so

STAGES = 4
BLOCKS = 8
DIM = 64
ROWS = 64
COUNTS = (4, 8, 16, 32)
TX = optax.sgd(1e-2)


def block(w, x):
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def abstract_params(*lead):
    """Return the leaves of all blocks, with these leading dims."""
    shape = jax.ShapeDtypeStruct((*lead, DIM, DIM), jnp.float32)
    return {"up": shape, "down": shape}


def run_blocks(weights, x):
    return jax.lax.scan(lambda x, w: (block(w, x), None), x, weights)[0]


def shift_register(count: int, *, recompute: bool) -> int:
    """Return the temporary bytes of a step whose pipeline is differentiated by jax."""
    mesh = so.make_mesh(pipeline=STAGES)
    stage = jax.checkpoint(run_blocks) if recompute else run_blocks
    placed = lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("pipeline")))

    def loss_fn(params, batch):
        def tick(held, number):
            first = batch[jnp.minimum(number, count - 1)]
            inputs = placed(jnp.roll(held, 1, axis=0).at[0].set(first))
            outputs = placed(jax.vmap(stage)(params, inputs))
            return outputs, outputs[-1]

        _, outputs = jax.lax.scan(
            tick, jnp.zeros((STAGES, ROWS, DIM)), jnp.arange(count + STAGES - 1)
        )
        return jnp.mean(outputs[STAGES - 1 :] ** 2)

    def step(params, batch):
        grads = jax.grad(loss_fn)(params, batch)
        return jax.tree.map(lambda p, g: p - 1e-2 * g, params, grads)

    by_stage = NamedSharding(mesh, P("pipeline"))
    params = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=by_stage),
        abstract_params(STAGES, BLOCKS // STAGES),
    )
    batch = jax.ShapeDtypeStruct((count, ROWS, DIM), jnp.float32, sharding=NamedSharding(mesh, P()))
    return (
        jax.jit(step, out_shardings=by_stage)
        .lower(params, batch)
        .compile()
        .memory_analysis()
        .temp_size_in_bytes
    )


def scheduled(count: int, schedule, *, recompute: bool) -> int:
    """Return the temporary bytes of a step of `so.hybrid`."""
    model = so.BlockModel(
        embed=lambda outer, batch: batch,
        block=block,
        loss=lambda outer, x, batch: jnp.mean(x**2),
        remat="full" if recompute else None,
    )
    opt = so.hybrid(
        TX,
        so.make_mesh(pipeline=STAGES),
        model,
        schedule=schedule,
        micro_batches=count,
        placement="ddp",
    )
    state = opt.abstract_state({"blocks": abstract_params(BLOCKS)})
    batch = jax.ShapeDtypeStruct((count * ROWS, DIM), jnp.float32)
    return opt.step.lower(state, batch).compile().memory_analysis().temp_size_in_bytes


def run() -> dict:
    """Return the temporary bytes of each row at each number of micro-batches."""
    rows = {
        "shift register": lambda count: shift_register(count, recompute=False),
        "shift register, recomputed": lambda count: shift_register(count, recompute=True),
        "so.hybrid, gpipe": lambda count: scheduled(count, so.schedules.gpipe, recompute=False),
        "so.hybrid, one_f_one_b": lambda count: scheduled(
            count, so.schedules.one_f_one_b, recompute=False
        ),
        "so.hybrid, eager_one_f_one_b": lambda count: scheduled(
            count, so.schedules.eager_one_f_one_b, recompute=False
        ),
        "so.hybrid, eager_one_f_one_b, recomputed": lambda count: scheduled(
            count, so.schedules.eager_one_f_one_b, recompute=True
        ),
    }
    return {
        name: {str(count): temporary(count) for count in COUNTS} for name, temporary in rows.items()
    }


def table(results: dict) -> str:
    """Return the rows as docs/notes/one_program_pipeline.md has them."""
    lines = [
        f"| temporary kB of a device, M = | {' | '.join(map(str, COUNTS))} |",
        "|---|" + "---:|" * len(COUNTS),
    ]
    for name, row in results.items():
        lines.append(
            f"| {name} | {' | '.join(f'{row[str(count)] / 1e3:,.0f}' for count in COUNTS)} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    _results = run()
    print(table(_results))
    print("written to", write_json(__file__, _results))
