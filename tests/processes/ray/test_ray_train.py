"""The loop of a worker of Ray Train is `fit`: examples/ray_train.py, with workers that are killed."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
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
    unbroken_run = example.train(tmp_path, name="whole", **options)
    loop = killed_once(example.worker, source)
    killed = example.train(tmp_path, name="killed", loop=loop, **options)
    assert (tmp_path / "killed" / "was_killed").exists()
    assert unbroken_run.metrics["stopped"] == killed.metrics["stopped"] == "completed"
    assert unbroken_run.metrics["step"] == killed.metrics["step"] == 25
    for leaf, same in zip(
        last_state(example, unbroken_run), last_state(example, killed), strict=True
    ):
        np.testing.assert_array_equal(leaf, same)
    losses = {report["step"]: report["loss"] for report in reports(tmp_path, "whole")}
    reported = reports(tmp_path, "killed")
    # Ray may lose the report that a worker made just before it was killed, which is step 10.
    assert {5, 15, 20, 25} <= {report["step"] for report in reported} <= losses.keys()
    assert {report["workers"] for report in reported} == {2}
    for report in reported:
        assert report["loss"] == losses[report["step"]]


def test_workers_that_did_not_join_are_refused(local_ray, example, tmp_path):
    def loop():
        import jax
        import ray.train

        try:
            so.make_mesh()
        except ValueError as error:
            refusal = str(error)
        so.initialize()
        rank = ray.train.get_context().get_world_rank()
        sizes = [rank, jax.process_index(), jax.process_count(), so.make_mesh().size]
        (tmp_path / f"{rank}.json").write_text(json.dumps([refusal, sizes]))

    from ray.train import RunConfig, ScalingConfig
    from ray.train.v2.jax import JaxTrainer

    environment = {"env_vars": {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}}
    JaxTrainer(
        loop,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path), worker_runtime_env=environment),
    ).fit()
    for rank in range(2):
        refusal, sizes = json.loads((tmp_path / f"{rank}.json").read_text())
        assert refusal.startswith("make_mesh: Ray Train's world size of 2 states 2 processes")
        assert "Fix: call so.initialize()" in refusal
        assert sizes == [rank, rank, 2, 2]


def test_other_processes_of_ray_are_alone_though_srun_started_it(local_ray, example, tmp_path):
    import ray
    from ray import tune

    def mesh_size(config=None):
        so.initialize()
        return {"size": so.make_mesh().size, "tasks": os.environ["SLURM_STEP_NUM_TASKS"]}

    class Actor:
        def mesh_size(self):
            return mesh_size()

    step = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}
    options = {"runtime_env": {"env_vars": {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", **step}}}
    task = ray.remote(mesh_size).options(**options).remote()
    actor = ray.remote(Actor).options(**options).remote()
    assert ray.get([task, actor.mesh_size.remote()]) == [{"size": 1, "tasks": "4"}] * 2

    def trial(config):
        os.environ.update(options["runtime_env"]["env_vars"])
        tune.report(mesh_size())

    results = tune.Tuner(trial, run_config=tune.RunConfig(storage_path=str(tmp_path))).fit()
    assert results[0].metrics["size"] == 1


def test_the_number_of_workers_follows_the_cluster(example, tmp_path):
    """A host leaves and another one comes: both times `fit` goes on with the same global batches."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory(dir="/tmp") as sockets:  # their paths must be short
        environment = {"PYTHONPATH": path, "RAY_TMPDIR": sockets, "XLA_FLAGS": ""}
        job = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("elastic_job.py")), str(tmp_path)],
            env={name: text for name, text in os.environ.items() if name != "RAY_ADDRESS"}
            | environment,
            capture_output=True,
            text=True,
            timeout=1200,
            check=False,
        )
    assert job.returncode == 0, job.stderr[-3000:]
    history = reports(tmp_path, "run")
    workers = [report["workers"] for report in history]
    assert list(dict.fromkeys(workers)) == [2, 1]
    assert workers[-1] == 2
    assert history[-1]["step"] == 200
    reference = loss_of_each_step(example, 200)
    for report in history[:-1]:
        assert report["loss"] == pytest.approx(reference[report["step"]], rel=1e-2, abs=1e-4)


def loss_of_each_step(example, num_steps):
    """Return step -> loss of a run on one device."""
    import optax

    mesh = so.make_mesh(devices=jax.devices()[:1])
    opt = so.ddp(optax.adam(0.01), mesh, example.loss_fn)
    state = opt.init(example.init, jax.random.key(0))
    result = so.fit(
        opt,
        state,
        example.rows_in_order(16, 0, 1),
        num_steps=num_steps,
        log_every=10,
        progress=False,
    )
    return {report["step"]: report["loss"] for report in result.history}
