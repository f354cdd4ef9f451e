"""How gradients are averaged over an axis: exactly, or compressed to fewer bytes than fp32, with
error feedback.
"""

from shardopt.core._device_state import (
    ErrorFeedback,
    PerDevice,
    init_state,
    own_state,
    resize_state,
    stack_state,
    state_specs,
    stored_state,
)
from shardopt.core._reducer import Reducer
from shardopt.reducers._blockwise import int8, sign
from shardopt.reducers._compressor import Compressor, CompressorState, compressor
from shardopt.reducers._error_feedback import error_feedback, warm_up
from shardopt.reducers._mean import exact
from shardopt.reducers._power_sgd import power_sgd
from shardopt.reducers._top_k import top_k

__all__ = [
    "Compressor",
    "CompressorState",
    "ErrorFeedback",
    "PerDevice",
    "Reducer",
    "compressor",
    "error_feedback",
    "exact",
    "init_state",
    "int8",
    "own_state",
    "power_sgd",
    "resize_state",
    "sign",
    "stack_state",
    "state_specs",
    "stored_state",
    "top_k",
    "warm_up",
]
