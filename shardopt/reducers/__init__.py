"""How gradients are averaged over an axis: exactly, or compressed to fewer bytes than fp32, with
error feedback.
"""

from shardopt.core._device_state import ErrorFeedback, PerDevice
from shardopt.core._reducer import Reducer
from shardopt.reducers._blockwise import int8, sign
from shardopt.reducers._compressor import compressor
from shardopt.reducers._error_feedback import error_feedback, warm_up
from shardopt.reducers._mean import exact
from shardopt.reducers._power_sgd import power_sgd
from shardopt.reducers._top_k import top_k

__all__ = [
    "ErrorFeedback",
    "PerDevice",
    "Reducer",
    "compressor",
    "error_feedback",
    "exact",
    "int8",
    "power_sgd",
    "sign",
    "top_k",
    "warm_up",
]
