"""Training: the loop, early stopping, loggers, and changes of parameters and hyperparameters between steps."""

from shardopt.core.early_stopping import EarlyStopping
from shardopt.training.evaluation import evaluation
from shardopt.training.fit import FitResult, fit
from shardopt.training.goodput import Goodput
from shardopt.training.hyperparams import hyperparams, with_hyperparams
from shardopt.training.loggers import jsonl, tensorboard
from shardopt.training.params import with_params
from shardopt.training.resume import DeferredInit

__all__ = [
    "DeferredInit",
    "EarlyStopping",
    "FitResult",
    "Goodput",
    "evaluation",
    "fit",
    "hyperparams",
    "jsonl",
    "tensorboard",
    "with_hyperparams",
    "with_params",
]
