"""How the cost of shardopt grows next to plain jax with the same shardings: the first step, trace
and lowering, reports, the first state, restoring. `small_steps.py` has the calls of steps.

Run: python benchmarks/growth.py [--parts first lower lower_5000 report init restore] [--rounds 5]

Control: `jax.jit` of value_and_grad, optax and the norm of the gradient, with the placements of the
strategy; orbax alone for `restore`. Seconds are of `time.process_time`, so they count work and not
waits. The smallest of the rounds counts, and contestants take turns. Claims: trace and lowering at
most 1.3 times plain, the first step 1.2 times; a report 1 s; restoring 1.2 times orbax, digests
included.
"""

import argparse
import shutil
import tempfile
import time
from typing import Any, NamedTuple

from common import fake_devices, write_json

fake_devices(8)

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardopt as so
from shardopt.models import gpt

TX = optax.adamw(0.1)
LEAVES = (100, 1000)


def loss_fn(params, batch):
    x = batch["x"]
    for w in params.values():
        x = jnp.tanh(x @ w)
    return jnp.mean((x - batch["y"]) ** 2)


def shapes(count, width=16):
    return {f"w{i}": jax.ShapeDtypeStruct((width, width), jnp.float32) for i in range(count)}


def plain_step(shardings, mesh, loss_fn=loss_fn, tx=TX):
    """The step in plain jax, with the placements of a strategy."""

    def step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
        return (optax.apply_updates(params, updates), opt_state), metrics

    state = shardings.params, shardings.opt_state
    rows = NamedSharding(mesh, P("data"))
    return jax.jit(step, in_shardings=(state, rows), out_shardings=(state, None), donate_argnums=0)


def smallest(rounds, contestants, clock):
    """Return the smallest seconds of each contestant, which take turns."""
    seconds = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            start = clock()
            run()
            seconds[name].append(clock() - start)
    return {name: min(values) for name, values in seconds.items()}


def batch_of(rows, width):
    return {name: np.ones((rows, width), np.float32) for name in "xy"}


class Loss(NamedTuple):
    """A loss with the shapes of what it is taken of."""

    loss_fn: Any
    params: Any
    batch: Any


def of_leaves(count):
    batch = {name: jax.ShapeDtypeStruct((16, 16), jnp.float32) for name in "xy"}
    return Loss(loss_fn, shapes(count), batch)


def of_layers(count, dim=64, heads=4):
    """Layers of a transformer one after the other, without a scan."""

    def layer(weights, x):
        rows, positions, _ = x.shape
        split = rows, positions, heads, dim // heads
        query, key, value = (
            (x @ weights[name]).reshape(split) for name in ("query", "key", "value")
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key)
        attended = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)
        x = x + attended.reshape(x.shape) @ weights["out"]
        return x + jax.nn.gelu(x @ weights["up"]) @ weights["down"]

    def loss_fn(params, batch):
        x = batch["x"]
        for weights in params:
            x = layer(weights, x)
        return jnp.mean((x - batch["y"]) ** 2)

    square = dict.fromkeys(("query", "key", "value", "out"), (dim, dim))
    sizes = square | {"up": (dim, 4 * dim), "down": (4 * dim, dim)}
    of_one = {name: jax.ShapeDtypeStruct(size, jnp.float32) for name, size in sizes.items()}
    batch = {name: jax.ShapeDtypeStruct((16, 8, dim), jnp.float32) for name in "xy"}
    return Loss(loss_fn, [of_one for _ in range(count)], batch)


def lower(rounds):
    """Trace and lowering of the first step."""
    losses = {f"{count} leaves": of_leaves(count) for count in (32, *LEAVES)}
    losses |= {f"{count} layers": of_layers(count) for count in (8, 32)}
    return lower_losses(losses, min(rounds, 3))


def lower_losses(losses, rounds):
    results = {}
    mesh = so.make_mesh(data=8)
    for name, loss in losses.items():
        for strategy in (so.ddp, so.fsdp):
            state = strategy(TX, mesh, loss.loss_fn).abstract_state(loss.params)
            shardings = jax.tree.map(lambda leaf: leaf.sharding, state)

            def ours(strategy=strategy, loss=loss):
                opt = strategy(TX, mesh, lambda params, batch: loss.loss_fn(params, batch))
                opt.step.lower(opt.abstract_state(loss.params), loss.batch)

            def plain(state=state, shardings=shardings, loss=loss):
                step = plain_step(shardings, mesh, lambda *args: loss.loss_fn(*args))
                step.lower((state.params, state.opt_state), loss.batch)

            contestants = {"plain": plain, "shardopt": ours}
            seconds = smallest(rounds, contestants, time.process_time)
            ratio = seconds["shardopt"] / seconds["plain"]
            results[f"{strategy.__name__}, {name}"] = seconds | {"ratio": ratio}
            print(
                f"trace and lowering, {strategy.__name__}, {name}: {ratio:.2f} of plain", flush=True
            )
    return results


def first(rounds):
    """The first state and the first step, with empty caches of jax: what is traced, compiled, run."""
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, 256, (16, 129), np.int32)
    config = gpt.config(dim=128, num_layers=4, max_length=128)
    losses = {
        "README": Loss(
            lambda params, batch: jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2),
            {"w": np.ones((64, 32), np.float32)},
            {"x": np.eye(64, dtype=np.float32), "y": np.ones((64, 32), np.float32)},
        ),
        "GPT 128 x 4": Loss(
            gpt.model(config),
            jax.device_get(gpt.init(config, jax.random.key(0))),
            {"tokens": tokens},
        ),
    }
    results = {}
    mesh = so.make_mesh(data=8)
    for name, loss in losses.items():
        for strategy in (so.ddp, so.fsdp):
            state = strategy(TX, mesh, loss.loss_fn).abstract_state(
                jax.eval_shape(lambda params=loss.params: params)
            )
            shardings = jax.tree.map(lambda leaf: leaf.sharding, state)

            def ours(strategy=strategy, loss=loss):
                jax.clear_caches()
                opt = strategy(TX, mesh, loss.loss_fn)
                jax.block_until_ready(opt.step(opt.init(loss.params), loss.batch))

            def plain(shardings=shardings, loss=loss):
                jax.clear_caches()
                placed = shardings.params, shardings.opt_state
                start = jax.jit(lambda params: (params, TX.init(params)), out_shardings=placed)
                step = plain_step(shardings, mesh, getattr(loss.loss_fn, "loss_fn", loss.loss_fn))
                jax.block_until_ready(step(start(loss.params), loss.batch))

            seconds = smallest(
                min(rounds, 3), {"plain": plain, "shardopt": ours}, time.process_time
            )
            ratio = seconds["shardopt"] / seconds["plain"]
            results[f"{strategy.__name__}, {name}"] = seconds | {"ratio": ratio}
            print(f"first step, {strategy.__name__}, {name}: {ratio:.2f} of plain", flush=True)
    return results


def report(rounds):
    """The first and the second report of a layout."""
    results = {}
    mesh = so.make_mesh(data=8)
    for count in (*LEAVES, 5000):
        opt = so.fsdp(TX, mesh, loss_fn)
        opt.specs(shapes(count))
        reports = [smallest(1, {"report": opt.config.report}, time.process_time) for _ in range(2)]
        results[count] = [seconds["report"] for seconds in reports]
        first, second = results[count]
        print(f"report of {count} leaves: {first:.2f} s, then {second:.2f}")
    return results


def init(rounds):
    """The first state, next to a jitted initialisation with the same placements."""
    results = {}
    mesh = so.make_mesh(data=8)
    for count in LEAVES:

        def first(rng, count=count):
            return {f"w{i}": jnp.full((16, 16), rng[0] * 1e-9) for i in range(count)}

        opt = so.fsdp(TX, mesh, loss_fn)
        state = opt.abstract_state(shapes(count))
        shardings = jax.tree.map(lambda leaf: leaf.sharding, (state.params, state.opt_state))

        def plain(first=first, shardings=shardings):
            def start(rng):
                params = first(rng)
                return params, TX.init(params)

            key = jax.random.key_data(jax.random.key(0))
            jax.block_until_ready(jax.jit(start, out_shardings=shardings)(key))

        def ours(first=first):
            opt = so.fsdp(TX, mesh, loss_fn)
            state = opt.init(lambda rng: first(jax.random.key_data(rng)), jax.random.key(0))
            jax.block_until_ready(state)

        seconds = smallest(min(rounds, 3), {"plain": plain, "shardopt": ours}, time.process_time)
        results[count] = seconds | {"ratio": seconds["shardopt"] / seconds["plain"]}
        print(f"first state, {count} leaves: {results[count]['ratio']:.2f} of plain jit")
    return results


def restore(rounds):
    """Restoring 600 MB with all digests, next to orbax; seconds of the wall, and of the processor."""
    mesh = so.make_mesh(data=8)
    opt = so.fsdp(TX, mesh, loss_fn)
    draw = np.random.default_rng(0)

    def drawn(leaf):
        values = draw.normal(size=leaf.shape).astype(leaf.dtype)
        return jax.device_put(values if leaf.ndim else leaf, leaf.sharding)

    state = opt.init({f"w{i}": np.zeros((2048, 2048), np.float32) for i in range(12)})
    # moments too: zeros would be compressed to nothing
    state = state._replace(
        params=jax.tree.map(drawn, state.params), opt_state=jax.tree.map(drawn, state.opt_state)
    )
    ours_folder = tempfile.mkdtemp()
    orbax_folder = f"{tempfile.mkdtemp()}/state"
    so.save(ours_folder, state)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as writer:
        writer.save(orbax_folder, state._asdict())
    target = opt.abstract_state()._asdict()

    def orbax():
        def arguments_of(leaf):
            return ocp.ArrayRestoreArgs(
                sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype
            )

        arguments = ocp.args.PyTreeRestore(
            item=target, restore_args=jax.tree.map(arguments_of, target)
        )
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            jax.block_until_ready(reader.restore(orbax_folder, arguments))

    def ours():
        jax.block_until_ready(so.restore(ours_folder, opt))

    results = {}
    for name, clock in (("wall", time.perf_counter), ("processor", time.process_time)):
        seconds = smallest(rounds, {"orbax": orbax, "shardopt": ours}, clock)
        results[name] = seconds | {"ratio": seconds["shardopt"] / seconds["orbax"]}
        print(f"restoring, {name}: {results[name]['ratio']:.2f} of orbax, digests included")
    for folder in (ours_folder, orbax_folder):
        shutil.rmtree(folder)
    return results


def lower_5000(rounds):
    """Trace and lowering with 5,000 leaves, once: it takes minutes."""
    del rounds
    return lower_losses({"5000 leaves": of_leaves(5000)}, 1)


PARTS = {part.__name__: part for part in (first, lower, lower_5000, report, init, restore)}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    results = {name: PARTS[name](arguments.rounds) for name in arguments.parts}
    print("wrote", write_json(__file__, results))


if __name__ == "__main__":
    main()
