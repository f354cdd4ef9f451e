"""What a step of shardopt costs beyond the same step written by hand in plain jax: ddp and fsdp of
a GPT.

Run: python benchmarks/overhead.py [--rounds 30]

Control: a step written with jax.shard_map, optax and nothing else. Test: `so.ddp` and `so.fsdp`.
Same model, parameters, batches and optimizer (AdamW), same outputs (state, loss, gradient norm),
numpy batches handed in, interleaved in one run. Claim: the median ratio of times is at most 1.03.
"""

import argparse

from common import fake_devices, interleave, median_ratio, write_json

fake_devices(8)

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardopt as so
from shardopt.models import gpt

CONFIG = gpt.config(dim=128, num_layers=4, num_heads=4)
BATCH = 16
LENGTH = 128
TX = optax.adamw(1e-3)


def ddp_by_hand(mesh, params):
    """Everything whole; one all-reduce."""
    loss_fn = gpt.model(CONFIG).loss_fn

    def local(params, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return jax.lax.pmean(loss, "data"), jax.lax.pmean(grads, "data")

    mean = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False
    )

    def step(params, opt_state, batch):
        loss, grads = mean(params, batch)
        updates, opt_state = TX.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, optax.tree.norm(grads)

    whole = NamedSharding(mesh, P())
    return (
        jax.jit(step, donate_argnums=(0, 1)),
        jax.device_put(params, whole),
        jax.device_put(TX.init(params), whole),
    )


def fsdp_by_hand(mesh, params):
    """Every matrix split on its largest dim.

    Each block gathered in the scan, forward and backward.
    """
    size = mesh.shape["data"]
    model = gpt.model(CONFIG)

    def dim_of(leaf, skip):
        fits = [d for d in range(skip, leaf.ndim) if leaf.shape[d] % size == 0]
        return (
            max(fits, key=lambda d: leaf.shape[d])
            if fits and leaf.size // leaf.shape[0] ** skip >= 1024
            else -1
        )

    dims = {
        name: jax.tree.map(lambda leaf, skip=int(name == "blocks"): dim_of(leaf, skip), tree)
        for name, tree in params.items()
    }
    specs = jax.tree.map(
        lambda leaf, d: P(*("data" if i == d else None for i in range(leaf.ndim))), params, dims
    )

    def gather(tree, dims, skip):
        return jax.tree.map(
            lambda x, d: x if d < 0 else jax.lax.all_gather(x, "data", axis=d - skip, tiled=True),
            tree,
            dims,
        )

    def loss_fn(params, batch):
        outer = {name: tree for name, tree in params.items() if name != "blocks"}
        outer = gather(outer, {name: dims[name] for name in outer}, 0)

        def body(x, block):
            return model.block(gather(block, dims["blocks"], 1), x), None

        keep = lambda prim, *_, **__: prim.name != "all_gather"
        x, _ = jax.lax.scan(
            jax.checkpoint(body, policy=keep), model.embed(outer, batch), params["blocks"]
        )
        return model.loss(outer, x, batch)

    def local(params, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        # the others are already summed
        whole = lambda g, d: jax.lax.psum(g, "data") if d < 0 else g
        grads = jax.tree.map(lambda g, d: whole(g, d) / size, grads, dims)
        return jax.lax.pmean(loss, "data"), grads

    mean = jax.shard_map(
        local, mesh=mesh, in_specs=(specs, P("data")), out_specs=(P(), specs), check_vma=False
    )
    on = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    opt_state = TX.init(params)
    on_state = optax.tree_utils.tree_map_params(
        TX, lambda _, s: s, opt_state, on, transform_non_params=lambda _: NamedSharding(mesh, P())
    )

    def step(params, opt_state, batch):
        loss, grads = mean(params, batch)
        updates, opt_state = TX.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, optax.tree.norm(grads)

    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=(on, on_state, None, None))
    return jitted, jax.device_put(params, on), jax.device_put(opt_state, on_state)


def compare(name, by_hand, strategy, rounds):
    """Time one strategy against its hand-written twin; check first that they compute the same."""
    mesh = so.make_mesh()
    params = jax.device_get(gpt.init(CONFIG, jax.random.key(0)))
    draw = np.random.default_rng(0)
    batches = [
        {"tokens": draw.integers(0, 256, size=(BATCH, LENGTH + 1), dtype=np.int32)}
        for _ in range(8)
    ]
    rows = NamedSharding(mesh, P("data"))
    hand_step, hand_params, hand_state = by_hand(mesh, params)
    opt = strategy(TX, mesh, gpt.model(CONFIG))
    ours = {"state": opt.init(params), "turn": 0}
    hand = {"state": (hand_params, hand_state), "turn": 0}

    def run_ours():
        ours["state"], ours["metrics"] = opt.step(ours["state"], batches[ours["turn"] % 8])
        ours["turn"] += 1
        return ours["metrics"], ours["state"]

    def run_hand():
        batch = jax.device_put(batches[hand["turn"] % 8], rows)
        *state, hand["loss"], hand["norm"] = hand_step(*hand["state"], batch)
        hand["state"], hand["turn"] = tuple(state), hand["turn"] + 1
        return hand["loss"], hand["state"]

    run_ours(), run_hand()
    np.testing.assert_allclose(ours["metrics"]["loss"], hand["loss"], rtol=1e-5)
    np.testing.assert_allclose(ours["metrics"]["grad_norm"], hand["norm"], rtol=1e-4)
    times = interleave({"shardopt": run_ours, "by hand": run_hand}, rounds=rounds)
    ratio = median_ratio(times["shardopt"], times["by hand"])
    medians = {who: float(np.median(seconds)) for who, seconds in times.items()}
    print(
        f"{name:6} shardopt {medians['shardopt'] * 1e3:8.1f} ms   by hand"
        f" {medians['by hand'] * 1e3:8.1f} ms   median ratio {ratio:.3f}"
    )
    return {"median_ratio": ratio, "median_seconds": medians, "rounds": rounds}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    print(
        f"GPT of {gpt.num_parameters(CONFIG):,} parameters, batch {BATCH} x {LENGTH},"
        f" {jax.device_count()} devices"
    )
    results = {
        "ddp": compare("ddp", ddp_by_hand, so.ddp, rounds),
        "fsdp": compare("fsdp", fsdp_by_hand, so.fsdp, rounds),
    }
    print("wrote", write_json(__file__, results))


if __name__ == "__main__":
    main()
