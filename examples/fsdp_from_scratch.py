"""Fully sharded data parallel (FSDP) from scratch: train a small language model on 8 devices, in
plain jax.

Run: python examples/fsdp_from_scratch.py

Read it from top to bottom. You need to know jax on one device. In plain data parallel every device
holds the whole model: 16 bytes per fp32 parameter (weight, gradient, two moments of Adam). In FSDP
each of N devices holds 1/N of all four. The devices all-gather the weights of a block just before
it runs. They reduce-scatter its gradient just after its backward pass. So only one block at a time
is whole, and the steps are the steps of one device.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


# ---- 1. A model for one device -------------------------------------------------------------------
class Config(NamedTuple):
    """The sizes of the model.

    The number of devices divides `vocab`, `length` and `dim`, and 16 divides `dim`.
    """

    vocab: int = 64
    length: int = 32
    dim: int = 64
    num_blocks: int = 4


def init_params(config, key):
    """Return random weights.

    Blocks are stacked: dim 0 of a leaf in "blocks" counts blocks, as `jax.lax.scan` wants.
    """
    vocab, length, dim, num_blocks = config
    block_shapes = {
        "qkv": (dim, 3, dim // 16, 16),
        "out": (dim, dim),
        "up": (dim, 4 * dim),
        "down": (4 * dim, dim),
    }
    shapes = {"embedding": (vocab, dim), "positions": (length, dim), "head": (dim, vocab)}
    shapes["blocks"] = {name: (num_blocks, *shape) for name, shape in block_shapes.items()}
    leaves, treedef = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(key, len(leaves))
    return treedef.unflatten(
        [0.05 * jax.random.normal(key, shape) for key, shape in zip(keys, leaves, strict=True)]
    )


def norm(x):
    """Scale each vector to mean square 1."""
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def embed(outer, batch):
    """Return a vector for each token. `outer` holds the weights outside of blocks."""
    return outer["embedding"][batch["tokens"]] + outer["positions"][None]


def block(weights, x):
    """Run one transformer block: causal attention, then an MLP."""
    # heads h of 16 numbers k
    query, key, value = jnp.einsum("btd,dchk->cbthk", norm(x), weights["qkv"])
    attention = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    x = x + attention.reshape(x.shape) @ weights["out"]
    return x + jax.nn.gelu(norm(x) @ weights["up"]) @ weights["down"]


def loss(outer, x, batch):
    """Return the sum of cross-entropies over the targets, and the number of targets.

    Padding is no target.
    """
    log_probs = jax.nn.log_softmax(norm(x) @ outer["head"])
    entropies = -jnp.take_along_axis(log_probs, batch["targets"][..., None], axis=-1)[..., 0]
    return jnp.sum(entropies * batch["mask"]), jnp.sum(batch["mask"])


def run_model(params, batch, gather=lambda weights: weights):
    """Return the loss of a batch: its sum and its number of targets.

    On one device `gather` has nothing to do.

    The scan gathers one block at a time. Autodiff would keep the gathered weights of all blocks for
    the backward pass, and so the whole model. `jax.checkpoint` keeps only the shards of a block and
    its input x. The backward pass then gathers the weights and runs the block a second time.
    """
    outer = gather({name: leaf for name, leaf in params.items() if name != "blocks"})

    @jax.checkpoint
    def run_block(x, shards):
        return block(gather(shards), x), None

    x, _ = jax.lax.scan(run_block, embed(outer, batch), params["blocks"])
    return loss(outer, x, batch)


# ---- 2. AdamW: it treats each element by itself, so it updates shards as it updates whole weights
class State(NamedTuple):
    """The parameters, the two moments of Adam, and the number of steps."""

    params: dict
    mu: dict
    nu: dict
    step: jax.Array


def init_state(config, key):
    """Return the state before the first step."""
    params = init_params(config, key)
    zeros = jax.tree.map(jnp.zeros_like, params)
    return State(params, zeros, zeros, jnp.int32(0))


def adamw(state, grads, learning_rate=3e-3, b1=0.9, b2=0.999, eps=1e-8, weight_decay=1e-4):
    """Return the state after one step of AdamW."""
    step = state.step + 1
    mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, grads)
    nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g**2, state.nu, grads)

    def update(p, m, v):
        direction = m / (1 - b1**step) / (jnp.sqrt(v / (1 - b2**step)) + eps)
        return p - learning_rate * (direction + weight_decay * p)

    return State(jax.tree.map(update, state.params, mu, nu), mu, nu, step)


@jax.jit
def one_device_step(state, batch):
    """Train one step on one device, to compare with."""
    (total, count), grads = jax.value_and_grad(run_model, has_aux=True)(state.params, batch)
    return adamw(state, jax.tree.map(lambda grad: grad / count, grads)), total / count


# ---- 3. FSDP -------------------------------------------------------------------------------------
# A mesh is an array of devices whose axes have names. This mesh has one axis, "data". A
# PartitionSpec, jax.P, names for each dim of an array the axis that splits it. Device i of 8 holds
# the i-th eighth of dim 0 of each weight. Dim 0 of stacked blocks counts blocks, so their dim 1 is
# split, and each device has a shard of every block.
PARAM_SPECS = {
    "embedding": jax.P("data"),
    "positions": jax.P("data"),
    "head": jax.P("data"),
    "blocks": jax.P(None, "data"),
}
# jax.P(): each device has a copy
STATE_SPECS = State(PARAM_SPECS, mu=PARAM_SPECS, nu=PARAM_SPECS, step=jax.P())


def make_init(config, mesh):
    """Return `init(key) -> state`.

    Each device computes its own shards, so no device ever holds the whole state.
    """
    shardings = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), STATE_SPECS)
    return jax.jit(lambda key: init_state(config, key), out_shardings=shardings)


def gather(shards):
    """All-gather: each device sends its shards to all others, and joins the received shards to
    whole weights.

    Autodiff adds the other half of FSDP. The transpose of an all-gather is a reduce-scatter: it
    sums the gradients of all devices, and each device keeps only its own shard of the sum.
    """
    return jax.tree.map(lambda shard: jax.lax.all_gather(shard, "data", axis=0, tiled=True), shards)


def make_step(mesh):
    """Return `step(state, batch) -> (state, metrics)`, one program for all devices of the mesh."""

    # runs on each device, and sees only the shards and the rows of this device
    def step(state, batch):
        (total, count), grads = jax.value_and_grad(run_model, has_aux=True)(
            state.params, batch, gather
        )
        # The transpose of `gather` has summed the gradients over devices. The number of targets may
        # differ between devices, so a mean of their means would be wrong. The exact mean divides
        # once, by the number of all targets.
        count = jax.lax.psum(count, "data")
        grads = jax.tree.map(lambda grad: grad / count, grads)
        squares = sum(jnp.sum(grad**2) for grad in jax.tree.leaves(grads))
        metrics = {
            "loss": jax.lax.psum(total, "data") / count,
            "grad_norm": jnp.sqrt(jax.lax.psum(squares, "data")),
        }
        return adamw(state, grads), metrics  # each device updates its own shards

    # shard_map runs `step` on each device. The specs say which part of a global array a device gets
    # and returns. These are its shards of the state and its rows of the batch. Metrics are equal on
    # all devices.
    step = jax.shard_map(
        step, mesh=mesh, in_specs=(STATE_SPECS, jax.P("data")), out_specs=(STATE_SPECS, jax.P())
    )
    return jax.jit(step, donate_argnums=0)  # the new state takes the memory of the old state


# ---- 4. Train ------------------------------------------------------------------------------------
def batches(config, rows=32, seed=0):
    """Yield batches without end.

    A row counts up by a stride that the model must infer; rows have different lengths.
    """
    rng = np.random.default_rng(seed)
    while True:
        start, stride = (
            rng.integers(config.vocab, size=(rows, 1)),
            rng.integers(1, 5, size=(rows, 1)),
        )
        tokens = ((start + stride * np.arange(config.length + 1)) % config.vocab).astype(np.int32)
        mask = np.arange(config.length) < rng.integers(4, config.length + 1, size=(rows, 1))
        yield {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "mask": mask.astype(np.float32)}


def main():
    """Train the same model on one device and on all devices.

    Print the bytes of the state, and the losses.
    """
    config, mesh = Config(), jax.sharding.Mesh(jax.devices(), ("data",))
    unsharded, sharded = (
        init_state(config, jax.random.key(0)),
        make_init(config, mesh)(jax.random.key(0)),
    )
    for name, state in (("one device", unsharded), (f"each of {mesh.size}", sharded)):
        nbytes = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
        print(f"{name}: {nbytes:,} bytes of parameters and moments")
    step = make_step(mesh)
    for i, batch in zip(range(60), batches(config), strict=False):
        unsharded, expected = one_device_step(unsharded, batch)
        sharded, metrics = step(sharded, batch)
        np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-2)
        if i % 10 == 9:
            print(f"step {i + 1}: loss {metrics['loss']:.4f}, on one device {expected:.4f}")


if __name__ == "__main__":
    # simulated devices, used where there is no accelerator
    jax.config.update("jax_num_cpu_devices", 8)
    main()
