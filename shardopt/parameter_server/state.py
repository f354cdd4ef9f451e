"""All that the server knows, as a value."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from shardopt.core.types import PyTree
from shardopt.parameter_server.clock import Clock, PersistentMap


class Pulled(NamedTuple):
    """What the server knows of a step under way: its version and staleness, and the parameters if the rule asks."""

    version: int
    staleness: int
    params: PyTree


class Waiting(NamedTuple):
    """A push of the open clock, with max_staleness=0: it waits for the others."""

    clock: int
    worker: int
    update: Any


class ServerState(NamedTuple):
    """All that the server knows. A value: every transition returns a new one.

    Attributes:
      params: the parameters, trained or not.
      opt_state: the state of the optax transformation (over the trained leaves).
      rule_state: the state of the staleness rule.
      version: updates applied so far.
      clock: who is at which step.
      working: worker -> what it has pulled, for those who compute right now.
      waiting: pushes of the open clock, with max_staleness=0.
      metrics: the loss and aux metrics of the last update.
    """

    params: PyTree
    opt_state: PyTree
    rule_state: Any
    version: int
    clock: Clock
    working: PersistentMap[Pulled] = PersistentMap()
    waiting: tuple[Waiting, ...] = ()
    metrics: Mapping[str, Any] = {}
