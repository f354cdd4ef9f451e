"""Fixtures of the packages whose refusals are tested here."""

from support.fit import memory, new_state, opt
from support.regression import message_of
from support.replicas import model_of, new_batches, new_params, strategy_of
from support.ways import on_devices

__all__ = [
    "memory",
    "message_of",
    "model_of",
    "new_batches",
    "new_params",
    "new_state",
    "on_devices",
    "opt",
    "strategy_of",
]
