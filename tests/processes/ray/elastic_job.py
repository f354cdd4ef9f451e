"""A cluster of Ray that loses a node and gets one: `python elastic_job.py FOLDER`.

Two hosts of one CPU each train by examples/ray_train.py. See test_ray_train.py.
"""

import json
import sys
import threading
import time
from pathlib import Path

import ray
import ray_train as example  # of examples/, on the path
from ray.cluster_utils import Cluster

NUM_STEPS = 200
storage = Path(sys.argv[1])
may_end = storage / "may_end"


def slow_worker(config):
    """Train slowly until the cluster has changed twice."""
    draw = example.rows_in_order

    def rows(*arguments):
        for batch in draw(*arguments):
            if not may_end.exists():
                time.sleep(0.5)
            yield batch

    example.worker.__globals__["rows_in_order"] = rows
    example.worker(config)


def reports():
    """Return the reports of all workers."""
    path = storage / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [*map(json.loads, lines)]


def wait_for_step(workers, after):
    """Wait for a report of so many workers after a step, and return its step."""
    while True:
        steps = [report["step"] for report in reports() if report["workers"] == workers]
        steps = [step for step in steps if step > after]
        if steps:
            return steps[0]
        if not training.is_alive():
            sys.exit(f"no step with {workers} workers after {after}: {reports()}")
        time.sleep(0.5)


if __name__ == "__main__":
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    second = cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address)
    training = threading.Thread(
        target=example.train,
        args=(storage,),
        kwargs={"workers": (1, 2), "loop": slow_worker, "num_steps": NUM_STEPS, "every": 10},
    )
    training.start()
    step = wait_for_step(2, after=0)
    cluster.remove_node(second, allow_graceful=False)
    step = wait_for_step(1, after=step)
    cluster.add_node(num_cpus=1)
    wait_for_step(2, after=step)
    may_end.touch()
    training.join()
    ray.shutdown()
    cluster.shutdown()
