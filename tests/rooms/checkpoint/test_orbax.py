"""Folders that orbax wrote by itself: called so, and read by an abstract tree."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardopt as so

TREE = {"params": {"w": jnp.arange(32.0).reshape(8, 4)}, "moments": [jnp.ones(8), (jnp.int32(3),)]}


@pytest.fixture(scope="module", params=["step", "item", "plain"])
def written(request, tmp_path_factory):
    """Return the folder to pass, and that of the arrays."""
    folder = tmp_path_factory.mktemp("orbax") / "run"
    if request.param == "plain":
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder, TREE)
        return folder, folder
    args = ocp.args.StandardSave(TREE)
    with ocp.CheckpointManager(folder) as manager:
        manager.save(3, args=args if request.param == "step" else ocp.args.Composite(model=args))
    return folder, folder / "3" / ("default" if request.param == "step" else "model")


def test_it_is_called_what_it_is(written):
    directory, arrays = written
    opt = so.ddp(optax.sgd(0.1), so.make_mesh(), lambda params, batch: (batch @ params["w"]).mean())
    message = (
        f"restore: {arrays} was written by orbax, not by shardopt: it has no record of what a train"
        " state is.\nFix: "
    )
    with pytest.raises(so.errors.CheckpointError, match=f"^{re.escape(message)}"):
        so.restore(directory, opt)


def test_its_arrays_are_read(written):
    """All of them, or some, sharded as asked for."""
    sharding = NamedSharding(so.make_mesh(), P("data"))
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=sharding if x.ndim else NamedSharding(sharding.mesh, P())
        ),
        TREE,
    )
    for wanted in (abstract, {"params": abstract["params"]}):
        found = so.restore(written[0], wanted)
        jax.tree.map(np.testing.assert_array_equal, found, {name: TREE[name] for name in wanted})
        assert found["params"]["w"].sharding == sharding
    wrong = {"params": {"w": jax.ShapeDtypeStruct((8, 5), jnp.float32, sharding=sharding)}}
    with pytest.raises(
        so.errors.CheckpointError,
        match=(
            r"^restore: .*, written by orbax, does not fit the abstract tree: params/w is \(8, 4\),"
            r" not \(8, 5\)\nFix: "
        ),
    ):
        so.restore(written[0], wrong)


def test_a_random_key_is_read(tmp_path):
    """Orbax writes two integers for it, and how to read them into a file of its own."""
    tree = {"key": jax.random.key(3), "w": jnp.ones(2)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", tree)
    everywhere = NamedSharding(so.make_mesh(), P())
    found = so.restore(
        tmp_path / "run",
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), tree),
    )
    np.testing.assert_array_equal(
        jax.random.key_data(found["key"]), jax.random.key_data(tree["key"])
    )
