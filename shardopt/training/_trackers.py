"""Loggers for wandb, mlflow and trackio; each continues the tracker's run of the same name."""

import itertools
import re
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from shardopt.core._errors import calling
from shardopt.core._extras import require
from shardopt.training._loggers import Log, OpenedLog, ReopenedLog

_NOT_IN_MLFLOW = re.compile(r"[^\w\-. :/]")
"""MLflow refuses other characters in the name of a metric."""
_MLFLOW_BATCH = 1000
"""A server of MLflow takes this many metrics in one request."""


@calling("wandb")
def wandb(project: str, run: str, **options: Any) -> Log:
    """Return a logger that sends metrics to Weights & Biases.

    A resumed run, and a run that goes back from a spike, continue the run of the same id. All
    metrics are drawn over "step", so steps that are taken again are not dropped. Offline, each
    start writes a folder of its own with the same id; `wandb sync` joins them in the order of their
    starts.

    Args:
      project: the project.
      run: the id and name of the run.
      **options: further arguments of `wandb.init`, such as `entity` or `mode="offline"`.

    Raises:
      ModuleNotFoundError: if wandb, of the extra "wandb", is not installed.
    """
    require("wandb", extra="wandb")

    def start(_: int) -> OpenedLog:
        started = import_module("wandb").init(
            project=project, id=run, name=run, resume="allow", **options
        )
        started.define_metric("*", step_metric="step")
        return lambda step, metrics: started.log({"step": step, **metrics}), started.finish

    return ReopenedLog(start)


@calling("mlflow")
def mlflow(experiment: str, run: str) -> Log:
    """Return a logger that sends metrics to MLflow.

    The environment variable MLFLOW_TRACKING_URI says where to.

    A resumed run, and a run that goes back from a spike, continue the newest run of the same name.
    MLflow allows few characters in the names of metrics; others become "_".

    Args:
      experiment: the name of the experiment; it is made if needed.
      run: the name of the run, without quotes.

    Raises:
      ModuleNotFoundError: if mlflow, of the extra "mlflow", is not installed.
    """
    require("mlflow", extra="mlflow")

    def start(_: int) -> OpenedLog:
        package = import_module("mlflow")
        client = package.MlflowClient()
        known = client.get_experiment_by_name(experiment)
        experiment_id = (
            client.create_experiment(experiment) if known is None else known.experiment_id
        )
        runs = client.search_runs(
            [experiment_id], filter_string=f"attributes.run_name = '{run}'", max_results=1
        )
        run_id = (runs[0] if runs else client.create_run(experiment_id, run_name=run)).info.run_id

        def log(step: int, metrics: Mapping[str, float]) -> None:
            values = {_NOT_IN_MLFLOW.sub("_", name): value for name, value in metrics.items()}
            for start in range(0, len(values), _MLFLOW_BATCH):
                batch = dict(itertools.islice(values.items(), start, start + _MLFLOW_BATCH))
                package.log_metrics(batch, step=step, run_id=run_id)

        return log, lambda: client.set_terminated(run_id)

    return ReopenedLog(start)


@calling("trackio")
def trackio(project: str, run: str, **options: Any) -> Log:
    """Return a logger that sends metrics to trackio: to a local file, or to a Space of Hugging
    Face.

    A resumed run, and a run that goes back from a spike, continue the run of the same name.

    Args:
      project: the project.
      run: the name of the run.
      **options: further arguments of `trackio.init`, such as `space_id`.

    Raises:
      ModuleNotFoundError: if trackio, of the extra "trackio", is not installed.
    """
    require("trackio", extra="trackio")

    def start(_: int) -> OpenedLog:
        started = import_module("trackio").init(
            project=project, name=run, resume="allow", **options
        )
        return lambda step, metrics: started.log(dict(metrics), step=step), started.finish

    return ReopenedLog(start)
