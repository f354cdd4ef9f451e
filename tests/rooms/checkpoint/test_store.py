"""Restoring takes memory for the shards of a process, however large the array and however it was
saved.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rooms.checkpoint import measure
from support.processes import run_processes

import shardopt as so
from shardopt.checkpoint._write import save


def test_an_array_saved_whole_lies_in_chunks(tmp_path):
    """A reader of one shard would have to take in all of one chunk."""
    save(tmp_path, {"w": jnp.ones((3000, 4000))}, step=0)  # 48 MB
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as reader:
        leaf = reader.metadata(tmp_path / "0" / "state").item_metadata.tree["w"]
    assert leaf.shape == (3000, 4000)
    assert 2**20 < np.prod(leaf.storage.chunk_shape) * 4 <= 16 * 2**20


def test_orbax_is_asked_for_shards(tmp_path, trained, make_opt, monkeypatch):
    import orbax.checkpoint as ocp

    from shardopt.checkpoint._read import restore

    requests = []

    class Spy(ocp.ArrayRestoreArgs):
        def __post_init__(self):
            super().__post_init__()
            requests.append(self)

    _, state = trained
    save(tmp_path, state())
    monkeypatch.setattr(ocp, "ArrayRestoreArgs", Spy)
    opt = make_opt(so.zero, data=4)
    restored = restore(tmp_path, opt)
    wanted = [(str(leaf.sharding), leaf.shape) for leaf in jax.tree.leaves(opt.abstract_state())]
    assert {(str(request.sharding), request.global_shape) for request in requests} == set(wanted)
    assert all(arguments.strict for arguments in requests)
    assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(
        lambda x: x.sharding, opt.abstract_state()
    )
    held = {
        shard.data.shape for shard in restored.opt_state[0].mu["layer.0"]["up/w"].addressable_shards
    }
    assert held == {(16, 8)}


@pytest.mark.slow
def test_each_process_takes_memory_for_its_half(tmp_path):
    rows = np.random.default_rng(0).normal(size=measure.SHAPE).astype(np.float32)
    opt = so.ddp(
        optax.sgd(0.1),
        so.make_mesh(devices=jax.devices()[:1]),
        lambda params, batch: jnp.mean(batch @ params["w"]),
    )
    save(tmp_path / "small", opt.init({"w": rows[:64, :64]}))
    save(tmp_path / "large", opt.init({"w": rows}))
    for said in run_processes(measure.__file__, 2, tmp_path):
        peak, held = map(int, said.last.split())
        assert held == rows.nbytes / 2
        # Each shard is there twice while it moves from the host's buffer to the device's buffer.
        # The device is the host here, and some chunks are on their way. We measured 2.3, and 3.9
        # with the array in one chunk.
        assert peak < 2.8 * held
