"""The loop of a worker of Ray Train is `fit`: examples/ray_train.py, with workers that are killed."""

import importlib.util
import json
import os
import signal
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from support.paths import ROOT

import shardopt as so

pytestmark = [
    pytest.mark.slow,
    # ray.data warns about its own options
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
pytest.importorskip("ray")
pytest.importorskip("pandas", reason="of ray[train]")

KILLED_AT = 13
"""The batch at which the second worker is killed: three steps after a checkpoint."""


@pytest.fixture(scope="module")
def example():
    import ray

    spec = importlib.util.spec_from_file_location("ray_train", ROOT / "examples" / "ray_train.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "ray_train", module)
        spec.loader.exec_module(module)
        ray.cloudpickle.register_pickle_by_value(module)  # the workers cannot import it
        yield module


def killed_once(worker, source):
    """Return the worker's loop with a kill of the second worker in its first attempt."""

    def loop(config):
        import ray.train

        draw = worker.__globals__[source]
        marker = Path(config["folder"]).parent / "was_killed"

        def rows(*arguments):
            for number, batch in enumerate(draw(*arguments)):
                is_second = ray.train.get_context().get_world_rank() == 1
                if number == KILLED_AT and is_second and not marker.exists():
                    marker.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                yield batch

        worker.__globals__[source] = rows
        worker(config)

    return loop


def reports(storage, name):
    return [*map(json.loads, (storage / name / "metrics.jsonl").read_text().splitlines())]


def last_state(example, result):
    """Return the leaves of the last checkpoint that Ray knows."""
    import optax

    mesh = so.make_mesh(devices=jax.devices()[:2])
    opt = so.fsdp(optax.adam(0.01), mesh, example.loss_fn, min_shard_elements=1)
    with so.Checkpoints(Path(result.checkpoint.path).parent, 1, None) as checkpoints:
        state, _ = checkpoints.restore(opt)
    return jax.tree.map(np.asarray, jax.tree.leaves((state.params, state.opt_state)))


@pytest.mark.parametrize("source", ["rows_in_order", "rows_of_ray_data"])
def test_a_run_with_a_killed_worker_ends_at_the_same_bits(local_ray, example, tmp_path, source):
    import ray.data

    datasets = None
    if source == "rows_of_ray_data":
        data = example.examples()
        rows = [{"x": x, "y": y} for x, y in zip(data["x"], data["y"], strict=True)]
        datasets = {"train": ray.data.from_items(rows)}
    options = {"num_steps": 25, "datasets": datasets}
    whole = example.train(tmp_path, name="whole", **options)
    loop = killed_once(example.worker, source)
    killed = example.train(tmp_path, name="killed", loop=loop, **options)
    assert (tmp_path / "killed" / "was_killed").exists()
    assert whole.metrics["stopped"] == killed.metrics["stopped"] == "completed"
    assert whole.metrics["step"] == killed.metrics["step"] == 25
    for leaf, same in zip(last_state(example, whole), last_state(example, killed), strict=True):
        np.testing.assert_array_equal(leaf, same)
    steps = [report["step"] for report in reports(tmp_path, "killed")]
    assert steps == [5, 10, 15, 20, 25, 25]
    assert {report["workers"] for report in reports(tmp_path, "killed")} == {2}
    assert [report["loss"] for report in reports(tmp_path, "whole")] == [
        report["loss"] for report in reports(tmp_path, "killed")
    ]
