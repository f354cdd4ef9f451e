"""jax by hand as a contestant: the same GPT, and what a user writes around it with jax and optax
alone.
"""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ..task import B1, B2, EPS, LEARNING_RATE, WEIGHT_DECAY, Config, Task


def rms_norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def rotate(x, table):
    (cos, sin), (first, second) = table, jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


def attend(query, key, value):
    hidden = jnp.where(jnp.tril(jnp.ones((query.shape[1],) * 2, bool)), 0.0, -1e30)
    scores = jnp.einsum("bthk,bshk->bhts", query, key) * query.shape[-1] ** -0.5 + hidden
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    mixed = jnp.einsum("bhts,bshk->bthk", weights, value)
    return mixed / jnp.einsum("bhts->bth", weights)[..., None]


@jax.checkpoint
def gated(gate, up):
    return jax.nn.silu(gate) * up


def block_of(x, weights, table):
    attention, mlp = weights["attention"], weights["mlp"]
    qkv = jnp.einsum("btd,dchk->btchk", rms_norm(x, attention["norm"]), attention["qkv"])
    query, key, value = (part.squeeze(2) for part in jnp.split(qkv, 3, axis=2))
    mixed = attend(rotate(query, table), rotate(key, table), value)
    x = x + jnp.einsum("bthk,hkd->btd", mixed, attention["out"])
    both = jnp.einsum("btd,dcf->btcf", rms_norm(x, mlp["norm"]), mlp["up"])
    gate, up = (part.squeeze(2) for part in jnp.split(both, 2, axis=2))
    return x + gated(gate, up) @ mlp["down"]


def product(x, weight, *dims):
    """The product of x [B, T, ...] with a weight, as one of two matrices; `dims` are its last."""
    batch, length = x.shape[:2]
    rows = x.reshape(batch * length, -1)
    return (rows @ weight.reshape(rows.shape[1], -1)).reshape(batch, length, *dims)


def block_of_matrices(x, weights, table):
    attention, mlp = weights["attention"], weights["mlp"]
    qkv = product(rms_norm(x, attention["norm"]), attention["qkv"], *attention["qkv"].shape[1:])
    query, key, value = (part.squeeze(2) for part in jnp.split(qkv, 3, axis=2))
    mixed = attend(rotate(query, table), rotate(key, table), value)
    x = x + product(mixed, attention["out"], x.shape[-1])
    gate, up = jnp.split(product(rms_norm(x, mlp["norm"]), mlp["up"], 2 * len(mlp["down"])), 2, -1)
    return x + product(gated(gate, up), mlp["down"], x.shape[-1])


def loss_of(config: Config, outer, blocks, tokens, block=block_of, unroll=1):
    """The mean loss in nats of tokens [B, T + 1]; `blocks` are stacked, and `outer` is all else."""
    half = config.dim // config.num_heads // 2
    angles = jnp.arange(config.length)[:, None] * 10_000.0 ** (-jnp.arange(half) / half)
    table = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    x = outer["embedding"][tokens[:, :-1]]
    run = lambda x, weights: (block(x, weights, table), None)
    x, _ = jax.lax.scan(run, x, blocks, unroll=unroll)
    logits = rms_norm(x, outer["norm"]) @ outer["embedding" if config.tied else "head"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def start():
    """Join the other process, where there is one; return the mesh."""
    if "JAX_COORDINATOR_ADDRESS" in os.environ:
        place = [
            os.environ[f"JAX_{name}"]
            for name in ("COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID")
        ]
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(place[0], int(place[1]), int(place[2]))
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


def ddp(task: Task, **how):
    mesh = start()
    tx = optax.adamw(LEARNING_RATE, b1=B1, b2=B2, eps=EPS, weight_decay=WEIGHT_DECAY)
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))

    def local(params, tokens):
        loss = lambda params: loss_of(task.config, params, params["blocks"], tokens, **how)
        return jax.lax.pmean(jax.value_and_grad(loss)(params), "data")

    mean = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False
    )

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, tokens):
        loss, grads = mean(params, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss, optax.tree.norm(grads)

    params = jax.device_put(task.params(), whole)
    state = jax.jit(tx.init, out_shardings=whole)(params)
    for tokens in task.local_batches():
        tokens = jax.make_array_from_process_local_data(rows, tokens)
        params, state, loss, norm = step(params, state, tokens)
        yield float(loss), float(norm)


def unrolled(task: Task):
    """As ddp, by two-dimensional products and without a loop over blocks: the fastest on CPU."""
    yield from ddp(task, block=block_of_matrices, unroll=task.config.num_layers)


def dims_of(params, size):
    """The largest dim of each leaf that splits evenly, -1 for small leaves.

    A block's first dim is its number.
    """

    def dim_of(path, leaf):
        skip = int(path[0].key == "blocks")
        fits = [d for d in range(skip, leaf.ndim) if leaf.shape[d] % size == 0]
        small = np.prod(leaf.shape[skip:]) < 1024
        return -1 if small or not fits else max(fits, key=lambda d: leaf.shape[d])

    return jax.tree.map_with_path(dim_of, params)


def placed(mesh, params, dims, tx):
    """Specs and shardings of leaves split on those dims, and shardings of the optimizer's state."""
    specs = jax.tree.map(
        lambda x, d: P(*("data" if i == d else None for i in range(x.ndim))), params, dims
    )
    on = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    other = lambda leaf: NamedSharding(mesh, P())
    on_state = optax.tree_utils.tree_map_params(
        tx, lambda _, s: s, jax.eval_shape(tx.init, params), on, transform_non_params=other
    )
    return specs, on, on_state


def zero1(task: Task):
    mesh = start()
    tx = optax.adamw(LEARNING_RATE, b1=B1, b2=B2, eps=EPS, weight_decay=WEIGHT_DECAY)
    params = task.params()
    dims = dims_of(params, mesh.size)
    specs, on, on_state = placed(mesh, params, dims, tx)
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))

    def scatter(grad, d):
        if d < 0:
            return jax.lax.pmean(grad, "data")
        return jax.lax.psum_scatter(grad, "data", scatter_dimension=d, tiled=True) / mesh.size

    def local(params, tokens):
        loss = lambda params: loss_of(task.config, params, params["blocks"], tokens)
        loss, grads = jax.value_and_grad(loss)(params)
        return jax.lax.pmean(loss, "data"), jax.tree.map(scatter, grads, dims)

    mean = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), specs), check_vma=False
    )

    @functools.partial(
        jax.jit, donate_argnums=(0, 1), out_shardings=(whole, on_state, whole, whole)
    )
    def step(params, state, tokens):
        loss, grads = mean(params, tokens)
        shards = jax.lax.with_sharding_constraint(params, on)
        updates, state = tx.update(grads, state, shards)
        shards = jax.lax.with_sharding_constraint(optax.apply_updates(shards, updates), on)
        return shards, state, loss, optax.tree.norm(grads)

    params = jax.device_put(params, whole)
    state = jax.jit(tx.init, out_shardings=on_state)(params)
    for tokens in task.local_batches():
        tokens = jax.make_array_from_process_local_data(rows, tokens)
        params, state, loss, norm = step(params, state, tokens)
        yield float(loss), float(norm)


def fsdp(task: Task):
    mesh = start()
    tx = optax.adamw(LEARNING_RATE, b1=B1, b2=B2, eps=EPS, weight_decay=WEIGHT_DECAY)
    params = task.params()
    dims = dims_of(params, mesh.size)
    specs, on, on_state = placed(mesh, params, dims, tx)
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))

    def gather(tree, dims, skip=0):
        one = lambda x, d: x if d < 0 else jax.lax.all_gather(x, "data", axis=d - skip, tiled=True)
        return jax.tree.map(one, tree, dims)

    @functools.partial(jax.checkpoint, policy=lambda prim, *_, **__: prim.name != "all_gather")
    def block(x, weights, table):
        return block_of(x, gather(weights, dims["blocks"], 1), table)

    def gathered_loss(params, tokens):
        outer = {name: params[name] for name in params if name != "blocks"}
        outer = gather(outer, {name: dims[name] for name in outer})
        return loss_of(task.config, outer, params["blocks"], tokens, block)

    def local(params, tokens):
        loss, grads = jax.value_and_grad(gathered_loss)(params, tokens)
        # the others are summed already
        total = lambda grad, d: jax.lax.psum(grad, "data") if d < 0 else grad
        return jax.lax.pmean(loss, "data"), jax.tree.map(
            lambda g, d: total(g, d) / mesh.size, grads, dims
        )

    mean = jax.shard_map(
        local, mesh=mesh, in_specs=(specs, P("data")), out_specs=(P(), specs), check_vma=False
    )

    @functools.partial(jax.jit, donate_argnums=(0, 1), out_shardings=(on, on_state, whole, whole))
    def step(params, state, tokens):
        loss, grads = mean(params, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss, optax.tree.norm(grads)

    params = jax.device_put(params, on)
    state = jax.jit(tx.init, out_shardings=on_state)(params)
    for tokens in task.local_batches():
        tokens = jax.make_array_from_process_local_data(rows, tokens)
        params, state, loss, norm = step(params, state, tokens)
        yield float(loss), float(norm)


def jit(task: Task):
    mesh = start()
    tx = optax.adamw(LEARNING_RATE, b1=B1, b2=B2, eps=EPS, weight_decay=WEIGHT_DECAY)
    params = task.params()
    _, on, on_state = placed(mesh, params, dims_of(params, mesh.size), tx)
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))

    @functools.partial(jax.jit, donate_argnums=(0, 1), out_shardings=(on, on_state, whole, whole))
    def step(params, state, tokens):
        loss = lambda params: loss_of(task.config, params, params["blocks"], tokens)
        loss, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss, optax.tree.norm(grads)

    params = jax.device_put(params, on)
    state = jax.jit(tx.init, out_shardings=on_state)(params)
    for tokens in task.local_batches():
        tokens = jax.make_array_from_process_local_data(rows, tokens)
        params, state, loss, norm = step(params, state, tokens)
        yield float(loss), float(norm)


LINES = {
    "ddp": (start, ddp),
    "unrolled": (start, ddp),
    "zero1": (start, dims_of, placed, zero1),
    "fsdp": (start, dims_of, placed, fsdp),
    "jit": (start, dims_of, placed, jit),
}
"""What is counted as written by the user, beside the model."""
