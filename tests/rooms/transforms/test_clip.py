"""The norm over devices against the norm of the whole gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import shardopt as so

T = so.transforms


def close(found, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), found, expected
    )


SPLIT = {"rows": P("data"), "whole": P(), "deep": [P(None, "data"), P()]}


def split_and_whole():
    draw = np.random.default_rng(0)

    def normal(*shape):
        return np.asarray(draw.normal(size=shape))

    return {"rows": normal(8, 3), "whole": normal(5), "deep": [normal(2, 4), normal()]}


@pytest.mark.parametrize("max_norm", [0.5, 1e3])
@pytest.mark.parametrize(("split", "check_vma"), [(SPLIT, False), (SPLIT, True), (None, True)])
def test_the_norm_counts_split_and_whole_leaves_once(split, check_vma, max_norm, mesh_of, x64):
    grads = split_and_whole()
    tx = T.clip_by_global_norm(max_norm, "data", split=split)

    def run(g):
        return tx.update(g, tx.init(g))[0]

    placed = jax.shard_map(
        run, mesh=mesh_of(data=4), in_specs=(SPLIT,), out_specs=SPLIT, check_vma=check_vma
    )
    reference = optax.clip_by_global_norm(max_norm)
    close(jax.jit(placed)(grads), jax.jit(reference.update)(grads, reference.init(grads))[0])


def test_the_norm_over_two_axes(mesh_of, x64):
    grads = {"both": np.arange(8.0).reshape(4, 2), "one": np.arange(6.0), "none": np.arange(3.0)}
    split = {"both": P("replica", "data"), "one": P("data"), "none": P()}
    tx = T.clip_by_global_norm(1.0, ("replica", "data"), split=split)

    def run(g):
        return tx.update(g, tx.init(g))[0]

    mesh = mesh_of(replica=2, data=2)
    placed = jax.shard_map(run, mesh=mesh, in_specs=(split,), out_specs=split, check_vma=False)
    reference = optax.clip_by_global_norm(1.0)
    close(jax.jit(placed)(grads), jax.jit(reference.update)(grads, reference.init(grads))[0])


@pytest.mark.parametrize(
    "split",
    [
        pytest.param(True, marks=pytest.mark.slow),
        pytest.param(False, marks=pytest.mark.slow),
        {"a": P("data"), "b": False},
    ],
)
def test_the_norm_under_vmap_and_pmap(split, ways, x64):
    """Stacked [4, ...]: whole leaves are copies, split ones are not."""
    is_split = {"a": split is not False, "b": split is True}
    whole = {"a": np.arange(8.0).reshape(4, 2), "b": np.arange(4.0).reshape(4, 1) + 1}
    local = {name: x if is_split[name] else np.stack([x] * 4) for name, x in whole.items()}
    tx, reference = T.clip_by_global_norm(2.0, "data", split=split), optax.clip_by_global_norm(2.0)
    expected = reference.update(whole, reference.init(whole))[0]
    for name in ("vmap", "pmap"):
        found = ways[name](lambda g: tx.update(g, tx.init(g))[0], 4)(
            jax.tree.map(jnp.asarray, local)
        )
        close({n: x if is_split[n] else x[0] for n, x in found.items()}, expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_norm_that_is_not_finite_is_not_hidden(bad, on_devices):
    tx = T.clip_by_global_norm(1.0, "data", split=True)
    found = on_devices(lambda g: tx.update(g, ())[0], 2, jnp.array([[1.0, bad], [1.0, 2.0]]))
    assert not np.isfinite(found[0]).all()
    assert np.isnan(bad) <= np.isnan(found).all()
