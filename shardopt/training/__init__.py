"""Training: the loop, early stopping, loggers, and changes of parameters and hyperparameters
between steps.
"""

from shardopt.core._early_stopping import EarlyStopping
from shardopt.step._norms import Norms
from shardopt.training._evaluation import evaluation
from shardopt.training._fit import FitResult
from shardopt.training._goodput import Goodput
from shardopt.training._hyperparams import hyperparams
from shardopt.training._loggers import jsonl, tensorboard
from shardopt.training._plot_norms import plot_norms
from shardopt.training._resume import DeferredInit
from shardopt.training._trackers import mlflow, trackio, wandb

__all__ = [
    "DeferredInit",
    "EarlyStopping",
    "FitResult",
    "Goodput",
    "Norms",
    "evaluation",
    "hyperparams",
    "jsonl",
    "mlflow",
    "plot_norms",
    "tensorboard",
    "trackio",
    "wandb",
]
