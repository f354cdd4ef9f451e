"""A 1F1B pipeline from scratch: train a small language model on 4 devices that each hold a quarter
of its blocks.

Run: python examples/one_f_one_b_from_scratch.py

Read examples/fsdp_from_scratch.py first: this file takes its model, its AdamW and its batches. FSDP
sends weights to the devices that hold the rows. A pipeline keeps the weights in place, and sends
the activations of the rows from device to device. Device s is stage s of S: it holds consecutive
blocks and their part of the optimizer state.

A stage waits until the previous stage has finished. So the batch is cut into M micro-batches, and
the stages work on different micro-batches at the same time. 1F1B (one forward, one backward) is an
order of the passes. A backward pass runs as soon as it can, since it frees the activations that its
forward pass has stored. With S = 3 and M = 4:

    tick     0   1   2     3     4     5     6   7
    stage 0  F0  F1  F2    F3    B0    B1    B2  B3
    stage 1  .   F0  F1    F2B0  F3B1  B2    B3  .
    stage 2  .   .   F0B0  F1B1  F2B2  F3B3  .   .

Forward m goes down the stages, one a tick. The last stage computes the loss, and runs backward m on
the same tick. Then backward m goes up the stages. So stage s runs forward m on tick m + s and
backward m on tick m + 2 (S - 1) - s.
"""

import jax
import jax.numpy as jnp
import numpy as np
from fsdp_from_scratch import (
    Config,
    State,
    adamw,
    batches,
    block,
    embed,
    init_state,
    loss,
    one_device_step,
)

# Blocks are split on dim 0, which counts blocks. Each stage has a copy of the weights outside of
# blocks: the first stage reads the embedding, the last stage the head.
PARAM_SPECS = {
    "embedding": jax.P(),
    "positions": jax.P(),
    "head": jax.P(),
    "blocks": jax.P("pipeline"),
}
STATE_SPECS = State(PARAM_SPECS, mu=PARAM_SPECS, nu=PARAM_SPECS, step=jax.P())


def make_init(config, mesh):
    """Return `init(key) -> state`. Each device computes its own blocks."""
    shardings = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), STATE_SPECS)
    return jax.jit(lambda key: init_state(config, key), out_shardings=shardings)


def run_stage(blocks, x):
    """Run the blocks of one stage."""
    return jax.lax.scan(lambda x, weights: (block(weights, x), None), x, blocks)[0]


def add(sums, terms):
    """Add two pytrees."""
    return jax.tree.map(jnp.add, sums, terms)


def pipelined_gradients(params, batch, num_micro_batches):
    """Return (total loss, number of targets) and gradients, on one stage.

    All stages call it at the same time.
    """
    stage, num_stages = jax.lax.axis_index("pipeline"), jax.lax.axis_size("pipeline")
    is_first, is_last = stage == 0, stage == num_stages - 1
    blocks, outer = (
        params["blocks"],
        {name: leaf for name, leaf in params.items() if name != "blocks"},
    )
    micro_batches = jax.tree.map(lambda x: x.reshape(num_micro_batches, -1, *x.shape[1:]), batch)
    # stage 0 stores most: that many forward passes run before the first backward pass
    num_slots = 2 * num_stages - 1

    def micro_batch(m):
        return jax.tree.map(lambda x: x[m], micro_batches)

    no_message = jnp.zeros_like(embed(outer, micro_batch(0)))
    no_loss = jnp.zeros((), no_message.dtype), jnp.zeros((), batch["mask"].dtype)
    no_grads = jax.tree.map(jnp.zeros_like, params)

    def forward(m, arrived, stored):
        """Run the forward pass of micro-batch m.

        Store its input, from which the backward pass runs the stage again.
        """
        x = jax.lax.cond(is_first, lambda: embed(outer, micro_batch(m)), lambda: arrived)
        return run_stage(blocks, x), stored.at[m % num_slots].set(x)

    def backward(m, arrived, stored, sums):
        """Run the backward pass of micro-batch m, and add its gradients to the sums."""
        y, transpose = jax.vjp(run_stage, blocks, stored[m % num_slots])

        def gradient_of_loss():
            (total, count), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(
                outer, y, micro_batch(m)
            )
            return (total, count), *grads

        def gradient_from_next_stage():
            return no_loss, jax.tree.map(jnp.zeros_like, outer), arrived

        parts, outer_grads, dy = jax.lax.cond(is_last, gradient_of_loss, gradient_from_next_stage)
        block_grads, dx = transpose(dy)

        def gradient_of_embedding():
            return jax.vjp(lambda outer: embed(outer, micro_batch(m)), outer)[1](dx)[0]

        embed_grads = jax.lax.cond(
            is_first, gradient_of_embedding, lambda: jax.tree.map(jnp.zeros_like, outer)
        )
        return dx, add(sums, (parts, {**add(outer_grads, embed_grads), "blocks": block_grads}))

    def tick(carry, t):
        """Run a forward and a backward pass, unless this stage has none on tick t.

        Then send both results.
        """
        # two messages, inputs that wait for their backward pass, sums
        activation, cotangent, stored, sums = carry
        m = t - stage
        is_busy = (m >= 0) & (m < num_micro_batches)
        y, stored = jax.lax.cond(
            is_busy, forward, lambda m, x, stored: (x, stored), m, activation, stored
        )
        m = t - 2 * (num_stages - 1) + stage
        is_busy = (m >= 0) & (m < num_micro_batches)

        def skip(m, dy, stored, sums):
            return (dy, sums)

        dx, sums = jax.lax.cond(is_busy, backward, skip, m, cotangent, stored, sums)
        # Each pair is (source, target). All stages take part in each permute, so it is outside of
        # the branches.
        activation = jax.lax.ppermute(y, "pipeline", [(s, s + 1) for s in range(num_stages - 1)])
        cotangent = jax.lax.ppermute(dx, "pipeline", [(s + 1, s) for s in range(num_stages - 1)])
        return (activation, cotangent, stored, sums), None

    stored = jnp.zeros((num_slots, *no_message.shape), no_message.dtype)
    carry = no_message, no_message, stored, (no_loss, no_grads)
    (_, _, _, sums), _ = jax.lax.scan(
        tick, carry, jnp.arange(num_micro_batches + 2 * (num_stages - 1))
    )
    return sums


def make_step(mesh, num_micro_batches):
    """Return `step(state, batch) -> (state, metrics)`, one program for all stages."""

    def step(state, batch):
        parts, grads = pipelined_gradients(state.params, batch, num_micro_batches)
        blocks = grads.pop("blocks")
        # Each stage has the gradients of its blocks. The other weights have gradients on the first
        # and the last stage. The loss is on the last stage. Elsewhere these arrays are zero.
        grads, total, count = jax.lax.psum((grads, *parts), "pipeline")
        outer_squares = sum(jnp.sum((grad / count) ** 2) for grad in jax.tree.leaves(grads))
        squares = sum(jnp.sum((grad / count) ** 2) for grad in jax.tree.leaves(blocks))
        grads = jax.tree.map(lambda grad: grad / count, {**grads, "blocks": blocks})
        grad_norm = jnp.sqrt(outer_squares + jax.lax.psum(squares, "pipeline"))
        return adamw(state, grads), {"loss": total / count, "grad_norm": grad_norm}

    # check_vma=False: the gradients of copies stay local, and `psum` above adds them up once.
    step = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(STATE_SPECS, jax.P()),
        out_specs=(STATE_SPECS, jax.P()),
        check_vma=False,
    )
    return jax.jit(step, donate_argnums=0)


def main():
    """Train the same model on one device and in a pipeline of 4 stages.

    Print the bytes of the state and the losses.
    """
    config, mesh = Config(num_blocks=8), jax.sharding.Mesh(jax.devices()[:4], ("pipeline",))
    unsharded, sharded = (
        init_state(config, jax.random.key(0)),
        make_init(config, mesh)(jax.random.key(0)),
    )
    for name, state in (("one device", unsharded), (f"each of {mesh.size}", sharded)):
        nbytes = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
        print(f"{name}: {nbytes:,} bytes of parameters and moments")
    step = make_step(mesh, num_micro_batches=8)
    for i, batch in zip(range(60), batches(config), strict=False):
        unsharded, expected = one_device_step(unsharded, batch)
        sharded, metrics = step(sharded, batch)
        np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-2)
        if i % 10 == 9:
            print(f"step {i + 1}: loss {metrics['loss']:.4f}, on one device {expected:.4f}")


if __name__ == "__main__":
    # simulated devices, used where there is no accelerator
    jax.config.update("jax_num_cpu_devices", 4)
    main()
