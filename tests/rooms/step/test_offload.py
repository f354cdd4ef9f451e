"""`opt_state="host"`: the state waits in host memory, and values are the same, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.problems import problem
from support.reference import relative_difference, same_bits
from support.table import STRATEGIES
from support.tiers import tiered

import shardopt as so
from shardopt.matrices import _streamed_update as streamed_update

CASE = problem("odd", weighted=True, steps=3, dtype=jnp.float32)


def kinds(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.ndim}


@pytest.mark.slow  # test_blocks_are_streamed_and_values_are_the_same
@pytest.mark.parametrize(
    "strategy",
    [pytest.param("zero1", marks=pytest.mark.slow), pytest.param("fsdp", marks=pytest.mark.fast)],
)
def test_state_waits_on_the_host_and_values_are_the_same(strategy, mesh_of, tmp_path):
    tx = optax.adamw(1e-2)
    mesh = mesh_of(data=8)
    plain, offloaded = (
        STRATEGIES[strategy](tx, mesh, CASE.loss_fn, opt_state=place)
        for place in ("within", "host")
    )
    states = plain.init(CASE.params), offloaded.init(CASE.params)
    for batch in CASE.batches:
        assert kinds(states[1].opt_state) == {"pinned_host"}
        states = plain.step(states[0], batch)[0], offloaded.step(states[1], batch)[0]
    same_bits(*states)
    assert kinds(states[1].params) == {"device"}
    assert kinds(states[0].opt_state) == {"device"}
    assert states[1].opt_state[0].count.sharding.memory_kind == "device"

    so.save(tmp_path / "state", states[0])
    restored = so.restore(tmp_path / "state", offloaded)
    assert kinds(restored.opt_state) == {"pinned_host"}
    same_bits(restored, states[0])
    so.save(tmp_path / "again", offloaded.step(restored, CASE.batches[0])[0])
    resumed_state = so.restore(tmp_path / "again", plain)
    assert kinds(resumed_state.opt_state) == {"device"}
    same_bits(resumed_state, plain.step(states[0], CASE.batches[0])[0])


BLOCKS = so.BlockModel(
    embed=lambda outer, batch: batch @ outer["in"],
    block=lambda w, x: x + jnp.tanh(x @ w["kernel"] + w["bias"][None]),
    loss=lambda outer, x, batch: jnp.mean(x**2),
)


def clipped():
    return optax.chain(
        optax.clip_by_global_norm(0.1),
        optax.adamw(optax.linear_schedule(0.1, 0.01, 3), weight_decay=0.1),
    )


KERNELS = so.optimizers.muon_dimension_numbers([("kernel", so.optimizers.Matrix())])
# whether blocks are updated apart: what does that, and what takes a norm of all blocks after its
# moments
STREAMS = {
    "clipped": (clipped, True),
    "8 bits": (lambda: so.transforms.eight_bit(clipped(), block_size=16, min_elements=512), True),
    "muon": (lambda: optax.contrib.muon(1e-2, muon_weight_dimension_numbers=KERNELS), True),
    "lamb": (lambda: optax.lamb(1e-2), False),
}


@pytest.mark.parametrize(
    ("strategy", "name"),
    tiered(
        [(placement, name) for placement in ("fsdp", "zero1") for name in STREAMS],
        lambda row: row == ("fsdp", "clipped"),
    ),
)
def test_blocks_are_streamed_and_values_are_the_same(strategy, name, mesh_of, monkeypatch):
    draw, (make, streams) = np.random.default_rng(0), STREAMS[name]
    shapes = {"blocks": {"kernel": (3, 32, 32), "bias": (3, 32)}, "in": (8, 32)}
    params = jax.tree.map(
        lambda shape: jnp.asarray(0.3 * draw.normal(size=shape), jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    plain, offloaded = (
        STRATEGIES[strategy](make(), mesh_of(data=8), BLOCKS, opt_state=place)
        for place in ("within", "host")
    )
    looped = []
    loop = streamed_update._loop
    monkeypatch.setattr(
        streamed_update, "_loop", lambda *args: looped.append(args[0].blocks) or loop(*args)
    )
    states = plain.init(params), offloaded.init(params)
    for _ in range(3):
        batch = draw.normal(size=(16, 8)).astype(np.float32)
        states = plain.step(states[0], batch)[0], offloaded.step(states[1], batch)[0]
    if name == "muon":  # its products are of a block, not of all at once
        assert relative_difference(*states) < 1e-5
    else:
        same_bits(*states)
    assert looped == [3] * streams


def test_state_that_cannot_wait_on_the_host_is_refused(mesh_of):
    fix = r"\nFix: use 'within' .* or \('matrices', 'host'\)\.$"
    with pytest.raises(ValueError, match=r"^fsdp: unknown opt_state 'params'\." + fix):
        so.fsdp(optax.sgd(0.1), mesh_of(data=8), CASE.loss_fn, opt_state=("params",))
    with pytest.raises(
        ValueError, match=r"^fsdp: opt_state is both 'within' and 'matrices'\." + fix
    ):
        so.fsdp(optax.sgd(0.1), mesh_of(data=8), CASE.loss_fn, opt_state=("matrices", "within"))
    inner = so.fsdp(optax.sgd(0.1), mesh_of(replica=2, data=4), CASE.loss_fn, opt_state="host")
    with pytest.raises(
        ValueError, match=r"^local_sgd: replicas that train apart keep their parameters in"
    ):
        so.local_sgd(inner, sync_every=2)
