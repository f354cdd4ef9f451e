"""How the cost of shardopt grows next to plain jax with the same shardings: trace and lowering,
reports, the first state, restoring. `small_steps.py` has the calls of steps.

Run: python benchmarks/growth.py [--parts lower report init restore] [--rounds 5]

Control: `jax.jit` of value_and_grad, optax and the norm of the gradient, with the placements of the
strategy; orbax alone for `restore`. Seconds are of `time.process_time`, so they count work and not
waits. The smallest of the rounds counts, and contestants take turns. Claims: trace and lowering at
most 1.3 times plain; a report 1 s; restoring 1.2 times orbax, digests included.
"""

import argparse
import shutil
import tempfile
import time

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


def lower(rounds):
    """Trace and lowering of the first step."""
    results = {}
    mesh = so.make_mesh(data=8)
    for count in (32, *LEAVES):
        for strategy in (so.ddp, so.fsdp):

            def ours(strategy=strategy, count=count):
                opt = strategy(TX, mesh, lambda params, batch: loss_fn(params, batch))
                state = opt.abstract_state(shapes(count))
                opt.step.lower(state, jax.tree.map(jnp.asarray, batch_of(16, 16)))

            opt = strategy(TX, mesh, loss_fn)
            state = opt.abstract_state(shapes(count))
            shardings = jax.tree.map(lambda leaf: leaf.sharding, state)

            def plain(state=state, shardings=shardings):
                batch = {name: jax.ShapeDtypeStruct((16, 16), jnp.float32) for name in "xy"}
                plain_step(shardings, mesh).lower((state.params, state.opt_state), batch)

            seconds = smallest(
                min(rounds, 3), {"shardopt": ours, "plain": plain}, time.process_time
            )
            ratio = seconds["shardopt"] / seconds["plain"]
            results[f"{strategy.__name__} {count}"] = seconds | {"ratio": ratio}
            print(f"trace and lowering, {strategy.__name__}, {count} leaves: {ratio:.2f} of plain")
    return results


def report(rounds):
    """The first and the second report of a layout."""
    results = {}
    mesh = so.make_mesh(data=8)
    for count in LEAVES:
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

        seconds = smallest(1, {"shardopt": ours, "plain": plain}, time.process_time)
        results[count] = seconds | {"ratio": seconds["shardopt"] / seconds["plain"]}
        print(f"first state, {count} leaves: {results[count]['ratio']:.2f} of plain jit")
    return results


def restore(rounds):
    """Restoring 200 MB with all digests, next to orbax; seconds of the wall."""
    mesh = so.make_mesh(data=8)
    opt = so.fsdp(TX, mesh, loss_fn)
    draw = np.random.default_rng(0)
    state = opt.init({f"w{i}": draw.normal(size=(2048, 2048)).astype(np.float32) for i in range(4)})
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

    seconds = smallest(rounds, {"orbax": orbax, "shardopt": ours}, time.perf_counter)
    for folder in (ours_folder, orbax_folder):
        shutil.rmtree(folder)
    ratio = seconds["shardopt"] / seconds["orbax"]
    print(f"restoring: {ratio:.2f} of orbax, digests included")
    return seconds | {"ratio": ratio}


PARTS = {part.__name__: part for part in (lower, report, init, restore)}


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
