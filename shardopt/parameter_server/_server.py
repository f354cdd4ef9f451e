"""The parameter server as a pure state machine: join, pull, push, leave."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import optax

from shardopt.config._check import check_optimizer
from shardopt.core import PyTree, calling, format_error, type_error, value_error
from shardopt.parameter_server import _clock as clocks
from shardopt.parameter_server._apply import Mathematics
from shardopt.parameter_server._clock import Clock
from shardopt.parameter_server._log import Event
from shardopt.parameter_server._updates import (
    NO_WEIGHT,
    NonFiniteUpdateError,
    Update,
    check_params,
    faults,
    trained,
)
from shardopt.parameter_server.rules import StalenessRule, plain
from shardopt.reducers import Reducer, compressor

CALLER = "parameter_server"


class ServerSettings(NamedTuple):
    """Settings of a run's server; see `make_server`."""

    max_staleness: int | None
    rule: StalenessRule | None = None
    nonfinite: str = "raise"
    reducer: Reducer | None = None

    def maker(self, tx: optax.GradientTransformation | None) -> "Callable[..., ParameterServer]":
        """Return the function that makes the server with these settings."""
        return partial(make_server, tx, **self._asdict())


class Pulled(NamedTuple):
    """The server's record of a step in flight: its version and staleness, and the parameters if the
    rule needs them.
    """

    version: int
    staleness: int
    params: PyTree


class Waiting(NamedTuple):
    """A push of the open clock, with max_staleness=0: it waits for the pushes of the other workers."""

    clock: int
    worker: int
    update: Any


class ServerState(NamedTuple):
    """The complete state of the server. It is immutable: every transition returns a new state.

    Attributes:
      params: the parameters, trained or not.
      opt_state: the state of the optax transformation (over the trained leaves).
      rule_state: the state of the staleness rule.
      version: updates applied so far.
      clock: the step of each worker.
      working: worker -> the record of its pull, for each worker with a step in flight.
      waiting: pushes of the open clock, with max_staleness=0.
      metrics: the loss and aux metrics of the last update.
    """

    params: PyTree
    opt_state: PyTree
    rule_state: PyTree
    version: int
    clock: Clock
    working: Mapping[int, Pulled] = {}
    waiting: tuple[Waiting, ...] = ()
    metrics: Mapping[str, jax.Array] = {}


@dataclass(frozen=True)
class ParameterServer:
    """A state machine: its methods take a `ServerState` and return a new one; see `make_server`.

    Attributes:
      mathematics: how updates change the state; None if the server only counts updates and clocks.
      max_staleness: the bound in clocks; None for no bound.
      rule: the staleness rule.
      nonfinite: "raise" or "skip".
      reducer: the name of the reducer that encodes pushes; None without a reducer.
    """

    mathematics: Mathematics | None
    max_staleness: int | None
    rule: StalenessRule
    nonfinite: str
    reducer: str | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that a log records, as JSON."""
        rule = {"name": self.rule.name, "config": dict(self.rule.config)}
        settings = {"max_staleness": self.max_staleness, "rule": rule, "nonfinite": self.nonfinite}
        return json.loads(json.dumps(settings))

    @calling(CALLER)
    def init(self, params: PyTree) -> ServerState:
        """Return the first state, with a copy of the parameters."""
        clock = clocks.make_clock(self.max_staleness)
        if self.mathematics is None:
            return ServerState(None, None, None, 0, clock)
        check_params(params)
        return ServerState(*self.mathematics.begin(params), 0, clock)

    def join(self, state: ServerState, worker: int) -> tuple[ServerState, Event]:
        """Add a worker, at the clock of the slowest."""
        clock = clocks.join(state.clock, worker)
        event = Event("join", worker, clock.steps[worker], state.version, state.version)
        return state._replace(clock=clock), event

    def may_pull(self, state: ServerState, worker: int) -> bool:
        """Return whether the worker may start its next step."""
        return clocks.may_start(state.clock, worker) and worker not in state.working

    @calling(CALLER)
    def pull(self, state: ServerState, worker: int) -> tuple[ServerState, Event]:
        """Start the worker's next step.

        Its parameters are `state.params`, their version is `event.version`.
        """
        step = clocks.clock_of(state.clock, worker)
        staleness = clocks.staleness(state.clock, worker)
        if worker in state.working:
            problem = f"worker {worker} cannot pull: it has not pushed its step {step} yet."
            raise value_error(problem, fix="push first, or let it leave and join again.")
        if not clocks.may_start(state.clock, worker):
            problem = (
                f"worker {worker} cannot start step {step}: the slowest is at {state.clock.slowest}"
            )
            fix = "ask may_pull first."
            raise value_error(f"{problem}, and max_staleness={self.max_staleness}.", fix=fix)
        # With max_staleness=0 the parameters do not change between pull and push.
        is_needed = (
            self.rule.uses_pulled and self.max_staleness != 0 and self.mathematics is not None
        )
        pulled = Pulled(state.version, staleness, state.params if is_needed else None)
        event = Event("pull", worker, step, state.version, state.version, staleness)
        return state._replace(working={**state.working, worker: pulled}), event

    @calling(CALLER)
    def push(
        self, state: ServerState, worker: int, update: Update | None, pulled_version: int
    ) -> tuple[ServerState, Event]:
        """End the worker's step with its update, computed from the parameters of `pulled_version`."""
        step = clocks.clock_of(state.clock, worker)
        pulled = state.working.get(worker)
        if pulled is None or pulled.version != pulled_version:
            pulled_text = "nothing" if pulled is None else f"version {pulled.version}"
            problem = (
                f"worker {worker} pushes for version {pulled_version} at its step {step}, but has"
                f" pulled {pulled_text}."
            )
            fix = "push once for each pull, with the version of its event."
            raise value_error(problem, fix=fix)
        # First, since it may raise: the state must then be as before the push.
        refused = self._is_refused(state, worker, step, update)
        working = _without(state.working, worker)
        # A refused push ends a step as well. Otherwise its worker would fall behind and hold back
        # others.
        state = state._replace(working=working, clock=clocks.tick(state.clock, worker))
        if not refused and self.max_staleness == 0:
            state = state._replace(waiting=(*state.waiting, Waiting(step, worker, update)))
        elif not refused:
            state = self._apply(state, [update], pulled.params, state.version - pulled.version)
        state = self._close_clock(state)
        kind = "refuse" if refused else "push"
        return state, Event(kind, worker, step, state.version, pulled.version, pulled.staleness)

    def leave(self, state: ServerState, worker: int) -> tuple[ServerState, Event]:
        """Remove a worker. Its step in flight is lost, its pushes stay."""
        step = clocks.clock_of(state.clock, worker)
        clock = clocks.leave(state.clock, worker)
        # The leaver may be the last one that a clock waited for.
        state = self._close_clock(
            state._replace(clock=clock, working=_without(state.working, worker))
        )
        return state, Event("leave", worker, step, state.version, state.version)

    def resume(self, state: ServerState, worker: int) -> tuple[ServerState, Event]:
        """Start a worker again. Its step in flight is lost, its clock stays."""
        step = clocks.clock_of(state.clock, worker)
        state = state._replace(working=_without(state.working, worker))
        return state, Event("resume", worker, step, state.version, state.version)

    def _is_refused(
        self, state: ServerState, worker: int, step: int, update: Update | None
    ) -> bool:
        if self.mathematics is not None:
            self.mathematics.check(update, state.params, worker)
        reasons = self._faults(state, update)
        # a push of weight 0 adds nothing to the mean of the clock, and is no error
        if self.max_staleness == 0:
            reasons = [reason for reason in reasons if reason != NO_WEIGHT]
        return self._refuse_or_raise(worker, step, reasons)

    def _faults(self, state: ServerState, update: Any) -> list[str]:
        if self.mathematics is None:
            return []
        return faults(update, trained(state.params))

    def _refuse_or_raise(self, worker: int, step: int, reasons: list[str]) -> bool:
        """Return whether there is a reason to refuse a push; raise with nonfinite="raise"."""
        if reasons and self.nonfinite == "raise":
            problem = f"the push of worker {worker} at its step {step} was refused:"
            fix = (
                'look at the data and the learning rate, or drop such pushes with nonfinite="skip".'
            )
            raise NonFiniteUpdateError(
                format_error(CALLER, problem, reasons, fix), worker=worker, clock=step
            )
        return bool(reasons)

    # max_staleness = 0 and three workers; F is the number of the clock that a push ends:
    #
    # worker 0   F0 . . . F1          waiting  (F0)
    # worker 1   . . F0 . . F1                 (F0 F0)
    # worker 2   . . . F0 . . F1               (F0 F0 F0) -> one update, and all may pull
    def _close_clock(self, state: ServerState) -> ServerState:
        """With max_staleness=0, apply the mean of the open clock once all present workers have
        pushed.
        """
        # Open until the slowest worker has passed this clock. Without workers nobody will push to
        # it.
        is_open = (
            state.waiting and state.clock.steps and state.clock.slowest <= state.waiting[0].clock
        )
        if not state.waiting or is_open:
            return state
        # By worker and not by arrival: the order of the sum must not depend on who was faster.
        ordered = sorted(state.waiting, key=lambda waiting: waiting.worker)
        updates = [waiting.update for waiting in ordered]
        state = state._replace(waiting=())
        weightless = all(NO_WEIGHT in self._faults(state, update) for update in updates)
        if weightless and self._refuse_or_raise(ordered[-1].worker, ordered[-1].clock, [NO_WEIGHT]):
            return state
        return self._apply(state, updates, None, 0)

    def _apply(
        self, state: ServerState, updates: Sequence[Update | None], pulled: PyTree, delay: int
    ) -> ServerState:
        state = state._replace(version=state.version + 1)
        if self.mathematics is None:
            return state
        return state._replace(**self.mathematics.apply(state[:3], updates, pulled, delay)._asdict())


def _without(working: Mapping[int, Pulled], worker: int) -> dict[int, Pulled]:
    """Return the steps in flight without the one of a worker, if it has one."""
    others = dict(working)
    others.pop(worker, None)
    return others


@calling(CALLER)
def make_server(
    tx: optax.GradientTransformation | None,
    *,
    max_staleness: int | None = 0,
    rule: StalenessRule | None = None,
    nonfinite: str = "raise",
    donate: bool = False,
    reducer: Reducer | None = None,
) -> ParameterServer:
    """Return a parameter server: a state machine without threads, wall-clock time or randomness.

    With max_staleness = 0 the pushes of one clock are averaged in the order of the workers'
    numbers. The mean is applied once, when all present workers have pushed. Otherwise each push is
    applied when it arrives: w <- w + tx.update(rule(g)).

    Args:
      tx: any optax transformation that needs no more than gradient, parameters, `value` and `grad`.
        With None the server only counts updates and clocks, and its parameters and updates are
        None.
      max_staleness: the bound in clocks; None for no bound.
      rule: the treatment of late gradients, from `parameter_server.rules`; None for none.
      nonfinite: the treatment of a push that is not finite. The choice "raise" raises
        `NonFiniteUpdateError`. The choice "skip" drops the push, which still counts as a step of
        the worker, and is a "refuse" in the log.
      reducer: the reducer that encodes pushes: `update.grads` is the message of its
        `so.reducers.compressor`.
      donate: let each update take over the memory of the previous optimizer state, which must not
        be used afterwards.

    Returns:
      A `ParameterServer`.

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if `max_staleness` is negative, `nonfinite` is unknown, or one sender cannot
        encode the reducer.

    Example:
      >>> import jax.numpy as jnp, optax, shardopt as so
      >>> server = so.parameter_server.make_server(optax.sgd(0.5), max_staleness=1)
      >>> state = server.init({"w": jnp.array(1.0)})
      >>> state, _ = server.join(state, 0)
      >>> state, pulled = server.pull(state, 0)
      >>> gradient = so.parameter_server.make_update({"w": 2 * state.params["w"]})
      >>> state, pushed = server.push(state, 0, gradient, pulled.version)
      >>> float(state.params["w"]), pushed.version, pushed.staleness, pushed.delay
      (0.0, 1, 0, 0)

    **Equivalence**: the same events in the same order give the same bits. With max_staleness=0,
    equal to `ddp` on the union batch.

    **Staleness** has two measures:

    - In *clocks*: a worker begins step c only while the slowest worker has finished at least c -
      max_staleness steps. Each event records c minus the clock of the slowest, so 0 <= staleness <=
      max_staleness.
    - In *versions*: `event.delay`, the tau of the rules, counts the updates between pull and push.
      See `Event.delay` for its bound.

    **Placement**: one copy of parameters and optimizer state, on the device on which `init` finds
    the parameters.

    References:
      Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server",
      2013; Li et al., "Scaling Distributed Machine Learning with the Parameter Server", 2014.
    """
    if tx is not None:
        check_optimizer(tx)
    max_staleness = clocks.make_clock(max_staleness).max_staleness  # checked, and an int
    rule = plain() if rule is None else rule
    if not isinstance(rule, StalenessRule):
        problem = f"rule must be a StalenessRule or None, got {type(rule).__name__}."
        fix = "call one of parameter_server.rules, such as rules.dc_asgd()."
        raise type_error(problem, fix=fix)
    try:
        json.dumps(dict(rule.config))
    except TypeError:
        problem = (
            f"the config of rule {rule.name!r} cannot be written to a log: {dict(rule.config)}."
        )
        raise type_error(problem, fix="keep plain numbers and strings in it.") from None
    if nonfinite not in ("raise", "skip"):
        raise value_error(f"nonfinite must be 'raise' or 'skip', got {nonfinite!r}.")
    codec = None if reducer is None else compressor(reducer)
    mathematics = None if tx is None else Mathematics(tx, rule, donate, codec)
    return ParameterServer(mathematics, max_staleness, rule, nonfinite, codec and codec.name)
