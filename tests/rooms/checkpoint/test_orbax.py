"""A folder that orbax wrote by itself is refused by name; docs/checkpoints.md reads one."""

import re

import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest

import shardopt as so

TREE = {"params": {"w": jnp.arange(32.0).reshape(8, 4)}, "moments": [jnp.ones(8), (jnp.int32(3),)]}


@pytest.mark.parametrize("item", [None, "model"])
@pytest.mark.parametrize("is_abstract", [False, True])
def test_a_step_that_shardopt_did_not_write_is_refused_by_name(item, is_abstract, tmp_path):
    args = ocp.args.StandardSave(TREE)
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(3, args=args if item is None else ocp.args.Composite(**{item: args}))
    opt = so.ddp(optax.sgd(0.1), so.make_mesh(), lambda params, batch: (batch @ params["w"]).mean())
    target = opt.abstract_state(TREE["params"]) if is_abstract else opt
    message = (
        f"restore: {tmp_path / 'run' / '3'} was not written by shardopt: it has no record of what a"
        " train state is.\nFix: if orbax wrote it, read its arrays with orbax; then so.replace("
    )
    with pytest.raises(so.errors.CheckpointError, match=f"^{re.escape(message)}"):
        so.restore(tmp_path / "run", target)


def test_a_folder_without_steps_holds_no_checkpoint(tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", TREE)
    opt = so.ddp(optax.sgd(0.1), so.make_mesh(), lambda params, batch: (batch @ params["w"]).mean())
    with pytest.raises(so.errors.StepNotFoundError, match="restore: there is no checkpoint in "):
        so.restore(tmp_path / "run", opt)
