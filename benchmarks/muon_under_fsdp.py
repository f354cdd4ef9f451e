"""Bytes that Muon sends under FSDP, next to Adam's: in a layout of marin 6493, and with an owner
for each matrix.

    python benchmarks/muon_under_fsdp.py

A mixture of experts as stacked leaves [E, D, I], and dense blocks [L, D, F], scaled down. Eight
simulated devices. The rows:

- marin's layout, by `jit` and shardings: experts P("expert", ("replica", "data")) in gradients,
  parameters and state. The partitioner places the collectives of optax's Muon;
- `so.fsdp(opt_state="within")`, which leaves the update to the partitioner too;
- `so.fsdp(opt_state="matrices")`.

Only the update is counted in the first, in which Adam sends nothing, and a whole step in the
others. So compare the bytes that Muon sends in addition. Nothing runs; bytes are counted in the
compiled program.
"""

from common import fake_devices, write_json

fake_devices(8)

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardopt as so

EXPERTS = 16
DIM = 64
HIDDEN = 128
BLOCKS = 8
ROWS = 16


def muon(params_of_matrices):
    """Return optax's Muon for stacked matrices: all dims but the first."""
    numbers = jax.tree.map(
        lambda _: optax.contrib.MuonDimensionNumbers((1,), (2,)), params_of_matrices
    )
    return optax.contrib.muon(1e-2, muon_weight_dimension_numbers=numbers)


def expert_leaves():
    """Return the abstract leaves of the experts of a layer."""
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    inner = shape(EXPERTS, DIM, HIDDEN)
    outer = shape(EXPERTS, HIDDEN, DIM)
    return {"gate": inner, "up": inner, "down": outer}


def of_experts(params, batch):
    """Return the loss of a layer of experts."""
    y, _ = so.nn.mixture_of_experts(params["experts"], batch[:, None], params["router"], top_k=2)
    return jnp.mean((y - batch[:, None]) ** 2)


def muon_of_experts():
    """Return optax's Muon for the experts, and Adam for the router."""
    numbers = jax.tree.map(
        lambda _: optax.contrib.MuonDimensionNumbers((1,), (2,)), expert_leaves()
    )
    return optax.contrib.muon(
        1e-2, muon_weight_dimension_numbers={"experts": numbers, "router": None}
    )


def bytes_of_their_update(tx, data: int) -> int:
    """Return the bytes of an update in marin's layout: experts over 2 devices, each matrix over the
    others.
    """
    mesh = jax.make_mesh(
        (8 // data // 2, data, 2),
        ("replica", "data", "expert"),
        axis_types=(jax.sharding.AxisType.Auto,) * 3,
    )
    params = expert_leaves()
    state = jax.eval_shape(tx.init, params)
    inner = {leaf.shape for leaf in jax.tree.leaves(params)}
    placed = NamedSharding(mesh, P("expert", ("replica", "data"), None))
    whole = NamedSharding(mesh, P())

    def with_sharding(tree):
        place = lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=placed if leaf.shape in inner else whole
        )
        return jax.tree.map(place, tree)

    params = with_sharding(params)
    state = with_sharding(state)

    def update(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    shardings = jax.tree.map(lambda leaf: leaf.sharding, (params, state))
    return so.hlo.audit(
        jax.jit(update, out_shardings=shardings), params, state, params, mesh=mesh
    ).total_wire_bytes


def bytes_of_a_step(tx, layout: str, params, loss, **options) -> int:
    """Return the bytes of a step of `so.fsdp` on eight devices."""
    mesh = options.pop("mesh", None) or so.make_mesh(data=8)
    opt = so.fsdp(tx, mesh, loss, opt_state=layout, min_shard_elements=8, **options)
    batch = jax.ShapeDtypeStruct((ROWS, DIM), jnp.float32)
    return so.hlo.audit(opt.step, opt.abstract_state(params), batch).total_wire_bytes


def dense():
    """Return abstract parameters and the loss of a model of equal blocks."""
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    params = {"blocks": {"up": shape(BLOCKS, DIM, HIDDEN), "down": shape(BLOCKS, HIDDEN, DIM)}}
    model = so.BlockModel(
        embed=lambda outer, batch: batch,
        block=lambda w, x: x + jnp.tanh(x @ w["up"]) @ w["down"],
        loss=lambda outer, x, batch: jnp.mean(x**2),
    )
    return params, model


def separate():
    """Return abstract parameters and the loss of eight square matrices, which are no stack."""
    params = {f"w{i}": jax.ShapeDtypeStruct((DIM, DIM), jnp.float32) for i in range(8)}

    def loss(params, batch):
        return jnp.mean(sum(jnp.tanh(batch @ w) for w in params.values()) ** 2)

    return params, loss


def run() -> dict:
    """Return Muon's bytes and Adam's bytes in each layout."""
    adam = optax.adam(1e-2)
    results = {}
    for data in (1, 2):
        both = [bytes_of_their_update(tx, data) for tx in (muon(expert_leaves()), adam)]
        results[f"experts, marin's layout with data={data}, update alone"] = both
    experts = {
        "experts": expert_leaves(),
        "router": jax.ShapeDtypeStruct((DIM, EXPERTS), jnp.float32),
    }
    options = {"mesh": so.make_mesh(data=4, expert=2), "rules": [("^experts/", "experts")]}
    for layout in ("within", "matrices"):
        both = [
            bytes_of_a_step(tx, layout, experts, of_experts, **options)
            for tx in (muon_of_experts(), adam)
        ]
        results[f"experts, so.fsdp, {layout}"] = both
    for name, (params, loss), tx in (
        ("stacked blocks", dense(), muon(dense()[0])),
        ("separate matrices", separate(), optax.contrib.muon(1e-2)),
    ):
        for layout in ("within", "matrices"):
            both = [
                bytes_of_a_step(tx, layout, params, loss),
                bytes_of_a_step(adam, "within", params, loss),
            ]
            results[f"{name}, so.fsdp, {layout}"] = both
    return {
        name: {"muon": both[0], "adam": both[1], "more": both[0] - both[1]}
        for name, both in results.items()
    }


def table(results: dict) -> str:
    """Return the rows as docs/notes/muon_under_fsdp.md has them."""
    lines = ["| layout | Adam, kB | Muon, kB | more, kB | ratio |", "|---|---:|---:|---:|---:|"]
    for name, row in results.items():
        ratio = f"{row['muon'] / row['adam']:.2f}" if row["adam"] else "-"
        cells = [f"{row[key] / 1e3:,.0f}" for key in ("adam", "muon", "more")]
        lines.append(f"| {name} | {' | '.join(cells)} | {ratio} |")
    return "\n".join(lines)


if __name__ == "__main__":
    _results = run()
    print(table(_results))
    print("written to", write_json(__file__, _results))
