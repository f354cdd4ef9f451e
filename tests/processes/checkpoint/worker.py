"""One of two processes with two devices each: `python worker.py RANK PORT FOLDER`.

See test_multihost.py.

It prints its results as one line of JSON.
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P

import shardopt as so
from shardopt.checkpoint import _write as write
from shardopt.checkpoint._checkpoints import Checkpoints
from shardopt.checkpoint._multihost import exchange
from shardopt.checkpoint._read import restore
from shardopt.checkpoint._write import save


def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch @ params["up"]) @ params["down"]) ** 2)


def make_opt(strategy=so.fsdp, **sizes):
    rules = [("up", P(None, "tensor"))] if sizes.get("tensor", 1) > 1 else ()
    options = {} if strategy is so.ddp else {"min_shard_elements": 1}
    return strategy(optax.adamw(1e-2), so.make_mesh(**sizes), loss_fn, rules=rules, **options)


def make_params():
    up = np.random.default_rng(1).normal(size=(16, 32)).astype(np.float32)
    return {"up": up, "down": np.ones((32, 4), np.float32)}


def run(opt, state, begin, end):
    for step in range(begin, end):
        batch = np.random.default_rng(step).normal(size=(8, 16)).astype(np.float32)
        state, _ = opt.step(state, so.GlobalRows(batch))
    return state


def complaint_of(action):
    try:
        action()
    except so.errors.CheckpointError as error:
        return type(error).__name__, str(error)
    return None


def equal(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(bool(jax.jit(jnp.array_equal)(x, y)) for x, y in pairs)


class NoRoom:
    """What orbax waits for, and what does not come."""

    def result(self, timeout=None):
        raise OSError(28, "No space left on device")


def fail_while_writing(rank, folder, state):
    """Let orbax fail on one process, then on the other, while it waits for them to meet.

    Then let it fail on none.
    """
    complaints = []
    with Checkpoints(folder, every=1, keep=2) as checkpoints:
        handler = checkpoints._writer._orbax.handler
        save_arrays = handler.async_save

        async def without_room(*args, **kwargs):
            return [*await save_arrays(*args, **kwargs), NoRoom()]

        broken = [("finalize", lambda *_: NoRoom().result()), ("async_save", without_room)]
        for failing_rank, (name, action) in enumerate(broken):
            if rank == failing_rank:
                setattr(handler, name, action)
            checkpoints.save(state, step=1)
            complaints.append(complaint_of(checkpoints.wait))
            if rank == failing_rank:
                delattr(handler, name)
        start = checkpoints._writer.start
        if rank == 1:
            checkpoints._writer.start = lambda *args: (start(*args), NoRoom().result())
        checkpoints.save(state, step=1)  # is not raised here: the other is on its way
        complaints.append(complaint_of(checkpoints.wait))
        checkpoints._writer.start = start
        complaints.append(checkpoints.steps())
        checkpoints.save(state, step=2)
        checkpoints.wait()
        complaints.append(checkpoints.steps())
    return complaints


def go_on_with_another_chain(folder, state):
    """Restore onto another mesh, with clipping, a schedule and an average; take a step.

    Return whether moments and parameters are the old ones, and where the new states begin.
    """
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.linear_schedule(1e-2, 0.0, 10)),
        so.transforms.average_params(0.9),
    )
    opt = so.fsdp(
        tx,
        so.make_mesh(data=2, tensor=2),
        loss_fn,
        rules=[("up", P(None, "tensor"))],
        min_shard_elements=1,
    )
    refused = complaint_of(lambda: restore(folder, opt, step=7))
    new = restore(folder, opt, step=7, new_chain=True)
    _, (adam, _, schedule), average = new.opt_state
    old = (state.params, state.opt_state[0])
    placed = jax.device_put(old, jax.tree.map(lambda leaf: leaf.sharding, (new.params, adam)))
    same = equal((new.params, adam), placed), equal(average.average, new.params)
    counts = [int(adam.count), int(schedule.count), int(average.num_steps)]
    _, metrics = opt.step(new, so.GlobalRows(np.ones((8, 16), np.float32)))
    return [refused is not None, *same, counts, bool(np.isfinite(metrics["loss"]))]


def main(rank, folder):
    outcome = {
        "exchanged": [
            [len(text) for text in exchange("ä" * size)]
            for size in (3 + rank, 510 + rank, 4000 * rank)
        ]
    }
    opt = make_opt()
    # what one process with four devices saved, and on from there
    state = restore(folder / "alone", opt)
    state = run(opt, state, 2, 4)
    outcome["held"] = sum(shard.data.size for shard in state.params["up"].addressable_shards)
    with Checkpoints(folder / "run", every=1, keep=2, best="val") as checkpoints:
        for step in range(4, 7):
            state = run(opt, state, step, step + 1)
            checkpoints.save(state, step=step + 1, metrics={"val": step}, extra={"position": step})
        checkpoints.save(state, step=7, extra={"position": 7})  # again: the barriers' names return
        restored, extra = checkpoints.restore(opt)
        outcome["again"] = equal(restored, state), extra, checkpoints.steps()
        outcome["second writer"] = complaint_of(lambda: Checkpoints(folder / "run", 1, 1))
        if rank == 1:
            digest = write.digest
            write.digest = lambda *_, **__: (_ for _ in ()).throw(OSError(5, "Input/output error"))
        checkpoints.save(state, step=8)
        outcome["failed write"] = complaint_of(checkpoints.wait)
        if rank == 1:
            write.digest = digest
        outcome["left"] = checkpoints.steps()
    outcome["writers"] = fail_while_writing(rank, folder / "failing", state)
    other = make_opt(so.ddp, data=2, tensor=2)
    moved = restore(folder / "run", other, step=7)
    target_shardings = jax.tree.map(lambda leaf: leaf.sharding, other.abstract_state().params)
    outcome["moved"] = equal(moved.params, jax.device_put(state.params, target_shardings))
    outcome["new chain"] = go_on_with_another_chain(folder / "run", state)
    save(folder / "spoiled", state, step=1)
    save(folder / "spoiled", state, step=2)
    if rank == 0:
        for path in sorted((folder / "spoiled" / "2").rglob("*/d/*"))[:5]:
            path.write_bytes(path.read_bytes()[:-1] + b"?")
    multihost_utils.sync_global_devices("spoiled")
    outcome["spoiled"] = complaint_of(lambda: restore(folder / "spoiled", opt))
    outcome["nowhere"] = complaint_of(lambda: restore(folder / "nowhere", opt))
    print(json.dumps(outcome))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)
    so.initialize(f"127.0.0.1:{sys.argv[2]}", 2, int(sys.argv[1]))
    main(int(sys.argv[1]), Path(sys.argv[3]))
