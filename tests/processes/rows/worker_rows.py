"""One of several processes with two devices each: `python worker_rows.py RANK PORT COUNT-PART`.

The part of the cases is `some` or `all`.

It prints the result of each case, or its error, as one JSON line. See test_rows.py.
"""

import dataclasses
import functools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardopt as so
from shardopt.step._global_rows import rows_of
from shardopt.training._stream import BatchStream

sys.path.insert(0, str(Path(__file__).parents[2]))
from support.rows import first_params, loss_fn, whole

rank = int(sys.argv[1])
port = sys.argv[2]
count_text, part = sys.argv[3].split("-")
count = int(count_text)
jax.config.update("jax_num_cpu_devices", 2)
so.initialize(f"127.0.0.1:{port}", count, rank)


def own(step, rows=16):
    """Return the rows of this process, as a loader that is split over processes draws them."""
    return jax.tree.map(lambda leaf: leaf[rank::count], whole(step, rows))


def rows_of_pair(step):
    """Return the rows of two processes that share them, since tensor splits over four devices."""
    shard, num_shards = tensor_parallel().row_shard
    return jax.tree.map(lambda leaf: leaf[shard::num_shards], whole(step))


def first(batch, rows):
    return jax.tree.map(lambda leaf: leaf[:rows], batch)


def fsdp(loss=loss_fn, **options):
    return so.fsdp(optax.adam(0.05), so.make_mesh(), loss, min_shard_elements=1, **options)


@functools.cache
def shared():
    """Return one strategy for all cases that train, so that its programs are compiled once."""
    return fsdp()


def begin(opt):
    return opt.init(first_params())


def losses(opt, batches):
    state = begin(opt)
    values = []
    for batch in batches:
        values.append(float(opt.evaluate(state, batch)["loss"]))
        state, metrics = opt.step(state, batch)
        values.append(float(metrics["loss"]))
    return values


def step(batch, opt=None):
    """Return the loss of a first step: what a strategy checks before it has a program."""
    state = begin(opt or shared())
    return float((opt or fsdp()).step(state, batch)[1]["loss"])


def train(batches, **options):
    options = {"num_steps": 20, "progress": False} | options
    result = so.fit(shared(), begin(shared()), batches, **options)
    return [result.step, result.stopped]


@functools.cache
def evaluation():
    """Return one evaluation for all cases, so that its programs are compiled once."""
    return so.training.evaluation(shared(), [])


def evaluate(batches):
    return dataclasses.replace(evaluation(), batches=batches)(begin(shared()))["val_loss"]


def transposed(batch):
    return {"x": batch["x"].T, "y": batch["y"]}


def loss_of_transposed(params, batch):
    return loss_fn(params, {"x": batch["x"].T, "y": batch["y"]})


def scaled_loss(params, batch):
    return batch["scale"] * loss_fn(params, batch)


class Tensor:
    """An array of another library."""

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return self.values


def until_an_error(step, error):
    for number in range(20):
        if number == step and rank == count - 1:
            raise error
        yield own(number)


def ddp():
    return so.ddp(optax.adam(0.05), so.make_mesh(), loss_fn)


def tensor_parallel():
    rules = [("w", jax.P("tensor"))]
    return so.fsdp(optax.adam(0.05), so.make_mesh(data=count // 2, tensor=4), loss_fn, rules=rules)


def shards(devices=None, **sizes):
    """Return the part of the rows of this process on a mesh over all processes."""
    options = {"rules": [("w", jax.P("tensor"))]} if "tensor" in sizes else {}
    mesh = so.make_mesh(**sizes, devices=devices)
    return so.fsdp(optax.adam(0.05), mesh, loss_fn, **options).row_shard


def pipeline():
    model = so.BlockModel(
        embed=lambda outer, batch: batch["x"],
        block=lambda weights, x: x + x @ weights["k"],
        loss=lambda outer, x, batch: jnp.mean(x**2),
    )
    mesh = so.make_mesh(data=count // 2, pipeline=4)
    return so.hybrid(optax.adam(0.05), mesh, model, micro_batches=4)


def diloco():
    inner = so.zero(optax.adam(0.05), so.make_mesh(data=2, replica=count), loss_fn)
    return so.diloco(inner, sync_every=2)


def next_row(batch_size, mark=lambda batches: batches):
    """Draw ten batches of 16 rows, go on with another size; return how, and the next row."""
    rows = rows_of(fsdp().config, "fit")
    all_rows = np.arange(640, dtype=np.float32)
    is_global = mark is so.GlobalRows

    def stream_of(size):
        batches = all_rows.reshape(-1, size)
        return BatchStream(mark(list(batches if is_global else batches[:, rank::count])), rows)

    stream = stream_of(16)
    for _ in range(10):
        stream.draw()
    position = json.loads(json.dumps(stream.position()))
    stream = stream_of(batch_size)
    text = stream.restore(position)
    batch = stream.draw()
    return [text, float((batch.batches if is_global else batch)[0]) - (0 if is_global else rank)]


different = {"x": whole(rank)["x"], "y": whole(0)["y"]}
many_leaves = [whole(0)["x"]] * 5 + [whole(rank)["x"]]
three = range(3)
CASES = {
    # equal to one device
    "own fsdp": lambda: losses(shared(), map(own, three)),
    "global fsdp": lambda: losses(shared(), so.GlobalRows(map(whole, three))),
    "own ddp": lambda: losses(ddp(), map(own, three)),
    "own micro-batches": lambda: losses(fsdp(micro_batches=2), map(own, three)),
    "own diloco": lambda: losses(diloco(), map(own, three))[::2],
    "own rows in dim 1": lambda: losses(
        fsdp(loss_of_transposed, batch_dims=[("x", 1)]), (transposed(own(i)) for i in three)
    ),
    "same rows, tensor parallel": lambda: losses(tensor_parallel(), map(rows_of_pair, three)),
    "own jax arrays": lambda: losses(shared(), (jax.tree.map(jnp.asarray, own(i)) for i in three)),
    "own tensors": lambda: losses(shared(), (jax.tree.map(Tensor, own(i)) for i in three)),
    "own lists": lambda: losses(shared(), (jax.tree.map(np.ndarray.tolist, own(i)) for i in three)),
    "own float64": lambda: losses(shared(), (jax.tree.map(np.float64, own(i)) for i in three)),
    "parts": lambda: {
        "data": fsdp().row_shard,
        "tensor in a process": shards(tensor=2),
        "tensor over two": shards(tensor=4),
        "tensor over all": shards(tensor=2 * count, data=1),
        "context over two": shards(context=4),
        "replicas": diloco().row_shard,
        "pipeline over two": pipeline().row_shard,
        "one device of each": shards(jax.devices()[::2], tensor=2),
    },
    # another batch size after a restart
    "resized, own": lambda: next_row(32),
    "resized, global": lambda: next_row(80, so.GlobalRows),
    "resized, the same": lambda: next_row(16),
    "resized, refused": lambda: next_row(64),
    # a claim that is wrong
    "not split": lambda: step(whole(0)),
    "not split, fit": lambda: train(map(whole, range(20))),
    "split for five batches": lambda: train(own(i) if i < 5 else whole(i) for i in range(20)),
    "split for 17 batches": lambda: train(
        (own(i) if i < 17 else whole(i) for i in range(40)), num_steps=40
    ),
    "not split, evaluation": lambda: evaluate([whole(0)]),
    "not split, integers": lambda: step({"x": np.ones((16, 4), np.int32), "y": np.arange(16)}),
    "split over half of the processes": lambda: step(
        jax.tree.map(lambda leaf: leaf[rank // 2 :: 2], whole(0))
    ),
    "split, called global": lambda: step(so.GlobalRows(own(0))),
    "global, one leaf differs": lambda: step(so.GlobalRows(different)),
    "global, last rows differ": lambda: step(
        so.GlobalRows(
            {"x": np.concatenate([whole(0)["x"][:15], whole(rank)["x"][15:]]), "y": whole(0)["y"]}
        )
    ),
    "global, more rows on one": lambda: step(so.GlobalRows(whole(0, 16 + 16 * (rank == 1)))),
    "global, dtype differs": lambda: step(
        so.GlobalRows({**whole(0), "y": whole(0)["y"].astype(np.int32 if rank else np.float32)})
    ),
    "global, differs later": lambda: train(
        so.GlobalRows(whole(i if i < 7 else i + rank) for i in range(20))
    ),
    "a leaf more": lambda: step(own(0) | ({"mask": np.ones(16 // count)} if rank else {})),
    "sequences differ": lambda: step({**own(0), "x": own(0)["x"][:, : 4 - (rank == 1)]}),
    "a number differs": lambda: step({**own(0), "scale": 1.0 + rank}, fsdp(scaled_loss)),
    "own on one, global on others": lambda: step(own(0) if rank else so.GlobalRows(whole(0))),
    "tensor parallel, other rows": lambda: step(own(0), tensor_parallel()),
    # numbers that differ
    "fewer rows on one": lambda: step(first(own(0, 16 * count), 8 if rank else 8 - 2 * 2)),
    "rows that devices do not divide": lambda: step(first(own(0), 3 if rank else 2)),
    "fewer batches on the first": lambda: train(map(own, range(8 if rank else 5))),
    "fewer batches on the last": lambda: train(map(own, range(5 if rank == count - 1 else 8))),
    "no batches on one": lambda: train(map(own, range(8 if rank else 0))),
    "fewer global batches": lambda: train(so.GlobalRows(map(whole, range(8 if rank else 5)))),
    "a loader fails": lambda: train(until_an_error(3, OSError("the disk is full"))),
    "a loader fails at once": lambda: train(until_an_error(0, OSError("the disk is full"))),
    "a loader exits": lambda: train(until_an_error(2, SystemExit(3))),
    "no rows at all": lambda: step(first(own(0), 0)),
    "a key": lambda: step({**own(0), "key": jax.random.key(0)}),
    "a key for each row": lambda: step({**own(0), "key": jax.random.split(jax.random.key(0), 8)}),
    "a key on one": lambda: step({**own(0), "key": jax.random.key(0)} if rank else own(0)),
    "no rows on one": lambda: step(np.float32(1) if rank == 1 else own(0)),
    "evaluation, fewer rows": lambda: evaluate([own(0), first(own(1), 3 if rank else 2)]),
    "evaluation, fewer batches": lambda: evaluate([own(i) for i in range(1 if rank else 3)]),
    "evaluation, no batches on one": lambda: evaluate([own(0)] if rank else []),
    "evaluation, global": lambda: evaluate(so.GlobalRows([whole(0), first(whole(1), 7)])),
}


SLOW = (
    "own ddp",
    "own micro-batches",
    "own rows in dim 1",
    "own tensors",
    "own lists",
    "own float64",
)


def outcome(case):
    try:
        return case()
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"


chosen = {name: case for name, case in CASES.items() if part == "all" or name not in SLOW}
print(json.dumps({name: outcome(case) for name, case in chosen.items()}), flush=True)
