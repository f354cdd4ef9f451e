"""`offload=("opt_state",)`: the state waits in host memory, and values are the same, bit for bit."""

import jax
import jax.numpy as jnp
import optax
import pytest
from support.problems import problem
from support.reference import same_bits
from support.table import STRATEGIES

import shardopt as so

CASE = problem("odd", weighted=True, steps=3, dtype=jnp.float32)


def kinds(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.ndim}


@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_state_waits_on_the_host_and_values_are_the_same(strategy, mesh_of, tmp_path):
    tx, mesh = optax.adamw(1e-2), mesh_of(data=8)
    plain, offloaded = (
        STRATEGIES[strategy](tx, mesh, CASE.loss_fn, offload=offload) for offload in ((), ("opt_state",))
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
    again = so.restore(tmp_path / "again", plain)
    assert kinds(again.opt_state) == {"device"}
    same_bits(again, plain.step(states[0], CASE.batches[0])[0])


def test_what_cannot_wait_there_is_refused(mesh_of):
    fix = r"\nFix: use offload=\('opt_state',\), or leave it out\.$"
    with pytest.raises(ValueError, match=r"^fsdp: offload names what cannot wait in host memory\.\n  'params'" + fix):
        so.fsdp(optax.sgd(0.1), mesh_of(data=8), CASE.loss_fn, offload=("params",))
    with pytest.raises(TypeError, match=r"^fsdp: offload must be a sequence of names, got 'opt_state'\." + fix):
        so.fsdp(optax.sgd(0.1), mesh_of(data=8), CASE.loss_fn, offload="opt_state")
    inner = so.fsdp(optax.sgd(0.1), mesh_of(replica=2, data=4), CASE.loss_fn, offload=("opt_state",))
    with pytest.raises(ValueError, match=r"^local_sgd: replicas that train apart keep their parameters in"):
        so.local_sgd(inner, sync_every=2)
