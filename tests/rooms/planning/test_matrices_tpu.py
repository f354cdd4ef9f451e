"""Optimizers of matrices as XLA:TPU compiles them: bytes sent, flops, and bytes held on the host
(all slow).
"""

import math

import jax
import jax.numpy as jnp
import optax
import pytest

import shardopt as so
from shardopt.planning import topology_devices

pytestmark = pytest.mark.slow
WIDTH = 256
ROWS = 256
MUON = optax.contrib.muon(
    1e-2, muon_weight_dimension_numbers=lambda params: jax.tree.map(_dims, params)
)
ADAM = optax.adamw(1e-2)


def _dims(leaf):
    """Blocks, and matrices that are not stacked."""
    return (
        optax.contrib.MuonDimensionNumbers((leaf.ndim - 2,), (leaf.ndim - 1,))
        if leaf.ndim > 1
        else None
    )


def mlp(w, x):
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def transformer(w, x):
    """The weights of a block of a transformer."""
    first, second, third = jnp.split(x @ w["qkv"], 3, axis=-1)
    return mlp(w, x + (first * second * third) @ w["out"])


def stacked(blocks, block=mlp, **remat):
    shapes = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    shapes |= {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH)} if block is transformer else {}
    model = so.BlockModel(
        embed=lambda outer, batch: batch * outer["scale"],
        block=block,
        loss=lambda outer, x, batch: jnp.mean((x - batch) ** 2),
        **remat,
    )
    weights = as_shapes({name: (blocks, *shape) for name, shape in shapes.items()})
    return model, {"blocks": weights, "scale": jax.ShapeDtypeStruct((), jnp.float32)}


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
    return so.planning.aot(lambda mesh: make(mesh, loss_fn), params, batch, topology=topology)


STRATEGIES = {
    "fsdp": so.fsdp,
    "zero1": lambda *args, **options: so.zero(*args, stage=1, **options),
}
PROBLEMS = {
    ("v5e:2x4", "stacked"): lambda: stacked(8),
    # 24 matrices of three sizes: nine units of bytes an owner
    ("v5e:2x4", "uneven"): lambda: stacked(6, transformer),
    ("v5e:2x4", "squares"): lambda: squares(8),
    ("v5p:4x4x4", "stacked"): lambda: stacked(64),
    ("v5p:4x4x4", "uneven"): lambda: stacked(32, transformer),
}


def by_decomposition(learning_rate):
    """A transformation that a user might bring: (G G^T)^(-1/2) G, by eigenvectors."""

    def one(g):
        if g.ndim < 2:
            return g
        values, vectors = jnp.linalg.eigh(jnp.einsum("...ij,...kj->...ik", g, g))
        return -learning_rate * jnp.einsum(
            "...ij,...j,...kj,...kl->...il", vectors, 1 / jnp.sqrt(values + 1e-6), vectors, g
        )

    return optax.stateless(lambda grads, params: jax.tree.map(one, grads))


OPTIMIZERS = {
    "muon": MUON,
    "soap": so.optimizers.soap(1e-2, matrices=[("up|down", so.optimizers.Matrix())]),
    "eigh": by_decomposition(1e-2),
}
ROWS_OF_TABLE = [(*problem, "muon") for problem in PROBLEMS] + [
    (topology, "stacked", name)
    for topology in ("v5e:2x4", "v5p:4x4x4")
    for name in ("soap", "eigh")
]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("topology", "kind", "name"), ROWS_OF_TABLE, ids=str)
def test_at_most_an_eighth_more_than_adam_is_sent(topology, kind, name, strategy):
    def step(tx, layout):
        def make(mesh, loss_fn):
            return STRATEGIES[strategy](tx, mesh, loss_fn, opt_state=layout)

        return compiled(topology, make, PROBLEMS[topology, kind]())

    adam = step(ADAM, "within")
    other = step(OPTIMIZERS[name], "matrices")
    assert other.audit.total_wire_bytes <= 1.15 * adam.audit.total_wire_bytes
    if (kind, name) == ("stacked", "muon"):
        # five times X X^T, its square, and their product with X, once in the whole job
        devices = math.prod(map(int, topology.partition(":")[2].split("x")))
        blocks = {8: 8, 64: 64}[devices]
        assert other.flops - adam.flops == pytest.approx(
            5 * 2 * blocks * (4 + 1 + 4) * 2 * WIDTH**3 / devices, rel=0.02
        )


def memory_of(problem, rows, **options):
    loss_fn, params = problem
    opt = so.fsdp(ADAM, so.make_mesh(devices=topology_devices("v5e:2x2")), loss_fn, **options)
    batch = jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)
    return opt.step.lower(opt.abstract_state(params), batch).compile().memory_analysis()


def test_state_is_on_the_host_and_comes_block_by_block():
    plain, offloaded = (memory_of(stacked(8), 16, opt_state=place) for place in ("within", "host"))
    # two moments of eight blocks of eight W x W, over four chips
    state = 2 * 8 * 8 * WIDTH**2 * 4 // 4
    assert plain.host_argument_size_in_bytes == plain.host_temp_size_in_bytes == 0
    assert offloaded.host_argument_size_in_bytes == offloaded.host_output_size_in_bytes == state
    assert (offloaded.host_alias_size_in_bytes, offloaded.host_temp_size_in_bytes) == (state, 0)
    assert plain.argument_size_in_bytes - offloaded.argument_size_in_bytes == state
    on_chip = [
        memory.argument_size_in_bytes + memory.temp_size_in_bytes for memory in (plain, offloaded)
    ]
    assert (
        on_chip[0] - on_chip[1] > state / 2
    )  # in place of it all: gradients that no longer go block by block, and two blocks


ROWS_OF_INPUTS = 2**17
"""More than fits into the 128 MB beside a core."""


def test_inputs_of_blocks_are_on_the_host():
    full, offloaded = (
        memory_of(stacked(8, remat=remat), ROWS_OF_INPUTS) for remat in ("full", "offload")
    )
    inputs = 8 * ROWS_OF_INPUTS // 4 * WIDTH * 4
    assert (full.host_temp_size_in_bytes, offloaded.host_temp_size_in_bytes) == (0, inputs)
    assert full.temp_size_in_bytes - offloaded.temp_size_in_bytes > inputs / 5
