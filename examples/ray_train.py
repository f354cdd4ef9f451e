"""Ray Train starts the processes, and `so.fit` is the loop of each.

Usage: python examples/ray_train.py

Two workers share the CPUs of this machine. With `use_gpu=True` or `use_tpu=True` in the
`ScalingConfig`, the loop of the workers stays as it is.
"""

import argparse
import json
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import ray
import ray.data
import ray.train
from ray.train.v2.jax import JaxTrainer

import shardopt as so

FEATURES, WIDTH, EXAMPLES = 8, 16, 256


def examples():
    """Return rows that a small network can learn."""
    x = np.random.default_rng(0).normal(size=(EXAMPLES, FEATURES)).astype(np.float32)
    return {"x": x, "y": np.sin(x.sum(axis=1))}


def init(key):
    """Return random parameters."""
    first, second = jax.random.split(key)
    return {
        "hidden": jax.random.normal(first, (FEATURES, WIDTH)) / FEATURES**0.5,
        "out": jax.random.normal(second, (WIDTH,)) / WIDTH**0.5,
    }


def loss_fn(params, batch):
    """Return the mean squared error."""
    return jnp.mean((jnp.tanh(batch["x"] @ params["hidden"]) @ params["out"] - batch["y"]) ** 2)


def rows_in_order(rows, rank, size):
    """Yield this worker's rows of each global batch: the same batches for any number of workers."""
    data, epoch = examples(), 0
    while True:
        order = np.random.default_rng(epoch).permutation(EXAMPLES)
        for numbers in order.reshape(-1, rows):
            yield {name: values[numbers[rank::size]] for name, values in data.items()}
        epoch += 1


def rows_of_ray_data(rows, size):
    """Yield the rows that Ray Data gives to this worker, epoch after epoch."""
    shard = ray.train.get_dataset_shard("train")
    while True:
        yield from shard.iter_batches(batch_size=rows // size, drop_last=True)


def report(step, metrics):
    """Report metrics to Ray Train, which waits until every worker has reported."""
    ray.train.report({"step": step, **metrics})


report.every_process = True  # `fit` would call it on the first process only


def worker(config):
    """Train on one of the workers; every worker runs the same program."""
    so.initialize()  # joins the workers, where Ray has not done it
    context = ray.train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    opt = so.fsdp(optax.adam(0.01), so.make_mesh(), loss_fn, min_shard_elements=1)
    if config.get("ray_data"):
        batches = rows_of_ray_data(config["rows"], size)
    else:
        batches = rows_in_order(config["rows"], rank, size)
    start = so.training.DeferredInit(init, jax.random.key(0))
    with so.Checkpoints(config["folder"], every=config["every"], keep=2) as checkpoints:
        result = so.fit(
            opt,
            start,
            batches,
            num_steps=config["num_steps"],
            checkpoints=checkpoints,
            log=report,
            log_every=config["every"],
            progress=False,
        )
    newest = Path(config["folder"]) / str(result.step)
    # nothing was left to do if a worker died after the last step
    last_metrics = result.history[-1] if result.history else {"step": result.step}
    ray.train.report(
        {"stopped": result.stopped, **last_metrics},
        checkpoint=ray.train.Checkpoint.from_directory(newest),
        checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,  # it is in the storage
    )


class MetricsFile(ray.train.UserCallback):
    """Append every report to a file: Ray itself keeps the metrics that come with a checkpoint."""

    def __init__(self, path):
        self.path = Path(path)

    def after_report(self, run_context, metrics, checkpoint):
        """Append the metrics of the first worker, and the number of workers."""
        with self.path.open("a") as file:  # metrics has a dictionary for each worker
            file.write(json.dumps({"workers": len(metrics), **metrics[0]}) + "\n")


def train(storage, *, name="run", workers=2, loop=worker, datasets=None, **config):
    """Train with Ray Train, and return its result.

    `storage` is a folder that all hosts see, and `workers` a number, or the least and the most.
    """
    folder = Path(storage) / name
    folder.mkdir(parents=True, exist_ok=True)
    defaults = {"rows": 16, "num_steps": 40, "every": 5, "folder": str(folder / "checkpoints")}
    # a worker that starts again draws the rows of Ray Data in the same order
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    trainer = JaxTrainer(
        loop,
        train_loop_config={**defaults, "ray_data": datasets is not None, **config},
        scaling_config=ray.train.ScalingConfig(
            num_workers=workers, elastic_resize_monitor_interval_s=5
        ),
        run_config=ray.train.RunConfig(
            name=name,
            storage_path=str(storage),
            callbacks=[MetricsFile(folder / "metrics.jsonl")],
            failure_config=ray.train.FailureConfig(max_failures=3),
            worker_runtime_env={"env_vars": {"JAX_PLATFORMS": "cpu"}},  # "cuda" or "tpu" elsewhere
        ),
        datasets=datasets,
    )
    return trainer.fit()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--storage", default=None, help="a folder that all hosts see")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    ray.init(num_cpus=options.workers + 1, include_dashboard=False)
    print(train(options.storage or tempfile.mkdtemp(), workers=options.workers))
