"""Training: the loop, early stopping, loggers, and the hyperparameters between steps."""

from shardopt.core._early_stopping import EarlyStopping
from shardopt.training._evaluation import evaluation
from shardopt.training._hyperparams import hyperparams
from shardopt.training._loggers import jsonl
from shardopt.training._resume import DeferredInit

__all__ = [
    "DeferredInit",
    "EarlyStopping",
    "evaluation",
    "hyperparams",
    "jsonl",
]
