"""Rules for late gradients, one paper a file; each is a `Rule`, a bundle of pure functions."""

from collections.abc import Mapping
from typing import Any

from shardopt.parameter_server.rules.dc_asgd import dc_asgd, dc_asgd_adaptive
from shardopt.parameter_server.rules.delayed_nesterov import delayed_nesterov
from shardopt.parameter_server.rules.dynamic_local_steps import dynamic_local_steps
from shardopt.parameter_server.rules.plain import plain
from shardopt.parameter_server.rules.rule import Rule
from shardopt.parameter_server.rules.staleness_learning_rate import staleness_learning_rate

__all__ = [
    "Rule",
    "dc_asgd",
    "dc_asgd_adaptive",
    "delayed_nesterov",
    "dynamic_local_steps",
    "from_config",
    "plain",
    "staleness_learning_rate",
]

_KNOWN = {
    "plain": plain,
    "staleness_learning_rate": staleness_learning_rate,
    "dc_asgd": dc_asgd,
    "dc_asgd_adaptive": dc_asgd_adaptive,
    "delayed_nesterov": delayed_nesterov,
}


def from_config(name: str, config: Mapping[str, Any]) -> Rule | None:
    """Return the rule of this name and these numbers, as a log keeps them; None for one that is not ours."""
    return _KNOWN[name](**config) if name in _KNOWN else None
