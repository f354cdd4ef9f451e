"""The parameter server as a pure state machine: join, pull, push, leave."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax

from shardopt.core.arguments import check_count
from shardopt.core.errors import format_error
from shardopt.core.types import PyTree
from shardopt.engine.config import check_optimizer
from shardopt.parameter_server import clock as clocks
from shardopt.parameter_server.apply import Mathematics, PartPrograms, copied, on_one_server
from shardopt.parameter_server.clock import Clock, PersistentMap
from shardopt.parameter_server.fragments import Fragments, on_fragments
from shardopt.parameter_server.log import Event
from shardopt.parameter_server.rules import Rule, plain
from shardopt.parameter_server.sharded import Devices, on_servers
from shardopt.parameter_server.updates import (
    NO_WEIGHT,
    NonFiniteUpdateError,
    Update,
    check_params,
    faults,
    trained,
)
from shardopt.reducers import Reducer, compressor

WHO = "parameter_server"


class Pulled(NamedTuple):
    """What the server knows of a step in flight: its version and staleness, and the parameters if the rule asks."""

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
      params: the parameters, trained or not; with several servers `sharded.Parts`.
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
    rule_state: PyTree
    version: int
    clock: Clock
    working: PersistentMap[Pulled] = PersistentMap()
    waiting: tuple[Waiting, ...] = ()
    metrics: Mapping[str, jax.Array] = {}


class Server(NamedTuple):
    """A bundle of pure functions over a `ServerState`; see `make_server`.

    Attributes:
      init: `init(params) -> state`; copies the parameters.
      join: `join(state, worker) -> (state, event)`. The newcomer gets the clock of the slowest.
      may_pull: `may_pull(state, worker) -> bool`: may it start its next step?
      pull: `pull(state, worker) -> (state, event)`; the parameters are `state.params`, their version `event.version`.
      push: `push(state, worker, update, pulled_version) -> (state, event)`.
      leave: `leave(state, worker) -> (state, event)`. What it was computing is forgotten, what it pushed stays.
      resume: `resume(state, worker) -> (state, event)`. What it was computing is forgotten, its clock stays.
      max_staleness: the bound in clocks, None without.
      rule: the staleness rule.
      nonfinite: "raise" or "skip".
      reducer: the name of the reducer that pushes are encoded by, None for none.
      servers: how many servers the parameters are sharded over.
      whole: `whole(state.params)`: the parameters as users know them, also where several servers have them.
      adopt: `adopt(state) -> state`, from a checkpoint: every part where it belongs.
      copy: `copy(state) -> (params, opt_state, rule_state)` for a checkpoint, which the next update leaves alone.
      programs: what one of several servers does.
      fragments: how parameters are dealt out, where they are pushed and pulled in fragments.
    """

    init: Callable[[PyTree], ServerState]
    join: Callable[[ServerState, int], tuple[ServerState, Event]]
    may_pull: Callable[[ServerState, int], bool]
    pull: Callable[[ServerState, int], tuple[ServerState, Event]]
    push: Callable[[ServerState, int, Update | None, int], tuple[ServerState, Event]]
    leave: Callable[[ServerState, int], tuple[ServerState, Event]]
    resume: Callable[[ServerState, int], tuple[ServerState, Event]]
    max_staleness: int | None
    rule: Rule
    nonfinite: str
    reducer: str | None = None
    servers: int = 1
    whole: Callable[[PyTree], PyTree] = lambda params: params
    adopt: Callable[[ServerState], ServerState] = lambda state: state
    copy: Callable[[ServerState], tuple[PyTree, PyTree, PyTree]] = lambda state: copied(*state[:3])
    programs: PartPrograms | None = None
    fragments: Fragments | None = None


def make_server(
    tx: optax.GradientTransformation | None,
    *,
    max_staleness: int | None = 0,
    rule: Rule | None = None,
    nonfinite: str = "raise",
    donate: bool = False,
    reducer: Reducer | None = None,
    servers: int = 1,
    devices: Devices = (),
    mathematics: Mathematics | None = None,
    fragments: Fragments | None = None,
) -> Server:
    """Make a parameter server: a state machine without threads, clocks of the wall, or chance.

    With max_staleness = 0 the pushes of one clock are averaged in the order of the workers' numbers, and applied once,
    when all workers that are there have pushed. Otherwise each push is applied when it arrives:
    w <- w + tx.update(rule(g)).

    **Equivalence**: the same events in the same order give the same bits. With max_staleness=0, equal to `ddp` on the
    union batch.

    **Staleness**, in two measures. In *clocks*: a worker begins step c only while the slowest has finished at least
    c - max_staleness steps; each event records c less that clock, so 0 <= staleness <= max_staleness. In *versions*:
    `event.delay`, the tau that rules take, counts the updates between pull and push; see `Event.delay` for its bound.

    **Placement**: one copy of parameters and optimizer state, where `init` finds the parameters. With several servers
    each has an equal range of every leaf: server i of n the elements i ceil(size / n) to (i + 1) ceil(size / n), padded
    with zeros, and the optimizer state of these.

    Args:
      tx: any optax transformation that asks for no more than gradient, parameters, `value` and `grad`. None for a
        server that counts and keeps time only, whose parameters and updates are None.
      max_staleness: in clocks; None for no bound.
      rule: what to do about late gradients, from `parameter_server.rules`; None for nothing.
      nonfinite: what to do about a push that is not finite. "raise" `NonFiniteUpdateError`; or "skip" it, which
        counts as a step of the worker, and is a "refuse" in the log.
      reducer: what pushes are encoded by: `update.grads` is the message of its `so.reducers.compressor`.
      donate: let each update take over the memory of the optimizer state before it; the old state then is dead.
      servers: n, over how many servers leaves are sharded; see `so.async_sgd`.
      devices: where the servers are, in turn; by default where `init` finds the parameters.
      mathematics: servers that are elsewhere, in other processes.
      fragments: what one push updates, of one server; by default all parameters.

    Returns:
      A `Server`.

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if `max_staleness` is negative, `nonfinite` unknown, or a reducer comes with several servers; in `init`,
        if the optimizer or the rule cannot be shown to act element by element, which several servers need.

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

    References:
      Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", 2013; Li et al.,
      "Scaling Distributed Machine Learning with the Parameter Server", 2014.
    """
    if tx is not None:
        check_optimizer(WHO, tx)
    empty = clocks.make_clock(max_staleness)
    rule = plain() if rule is None else rule
    if not isinstance(rule, Rule):
        what = f"rule must be a Rule or None, got {type(rule).__name__}."
        raise TypeError(format_error(WHO, what, fix="call one of parameter_server.rules, such as rules.dc_asgd()."))
    try:
        json.dumps(dict(rule.config))
    except TypeError:
        what = f"the config of rule {rule.name!r} cannot be written to a log: {dict(rule.config)}."
        raise TypeError(format_error(WHO, what, fix="keep plain numbers and strings in it.")) from None
    if nonfinite not in ("raise", "skip"):
        raise ValueError(f"{WHO}: nonfinite must be 'raise' or 'skip', got {nonfinite!r}.")
    check_count(WHO, "servers", servers, least=1)
    codec = None if reducer is None else compressor(reducer)
    if codec is not None and servers > 1:
        what = f"reducer={codec.name} writes all leaves as one message, which {servers} servers cannot share."
        raise ValueError(format_error(WHO, what, fix="leave out servers or reducer."))
    if mathematics is None and tx is not None:
        mathematics = (
            on_one_server(tx, rule, donate=donate, codec=codec)
            if servers == 1
            else on_servers(tx, rule, servers, donate=donate, devices=devices)
        )
        mathematics = mathematics if fragments is None else on_fragments(mathematics, fragments)

    def init(params: PyTree) -> ServerState:
        if mathematics is None:
            return ServerState(None, None, None, 0, empty)
        check_params(WHO, params)
        return ServerState(*mathematics.begin(params), 0, empty)

    def join(state: ServerState, worker: int) -> tuple[ServerState, Event]:
        clock = clocks.join(state.clock, worker)
        event = Event("join", worker, clock.steps[worker], state.version, state.version)
        return state._replace(clock=clock), event

    def may_pull(state: ServerState, worker: int) -> bool:
        return clocks.may_start(state.clock, worker) and worker not in state.working

    def pull(state: ServerState, worker: int) -> tuple[ServerState, Event]:
        at, behind = clocks.clock_of(state.clock, worker), clocks.staleness(state.clock, worker)
        if worker in state.working:
            what = f"worker {worker} cannot pull: it has not pushed its step {at} yet."
            raise ValueError(format_error(WHO, what, fix="push first, or let it leave and join again."))
        if not clocks.may_start(state.clock, worker):
            what = f"worker {worker} cannot start step {at}: the slowest is at {state.clock.slowest}"
            raise ValueError(
                format_error(WHO, f"{what}, and max_staleness={max_staleness}.", fix="ask may_pull first.")
            )
        kept = state.params if rule.uses_pulled and max_staleness != 0 and tx is not None else None
        working = state.working.put(worker, Pulled(state.version, behind, kept))
        return state._replace(working=working), Event("pull", worker, at, state.version, state.version, behind)

    def push(state: ServerState, worker: int, update: Update | None, pulled_version: int) -> tuple[ServerState, Event]:
        at = clocks.clock_of(state.clock, worker)
        pulled = state.working.get(worker)
        if pulled is None or pulled.version != pulled_version:
            has = "nothing" if pulled is None else f"version {pulled.version}"
            what = f"worker {worker} pushes for version {pulled_version} at its step {at}, but has pulled {has}."
            raise ValueError(format_error(WHO, what, fix="push once for each pull, with the version of its event."))
        refused = mathematics is not None and _refused(state, worker, at, update)
        state = state._replace(working=state.working.drop(worker), clock=clocks.tick(state.clock, worker))
        if not refused and max_staleness == 0:
            state = state._replace(waiting=(*state.waiting, Waiting(at, worker, update)))
        elif not refused:
            state = _apply(state, [update], pulled.params, state.version - pulled.version)
        state = _close(state)
        kind = "refuse" if refused else "push"
        return state, Event(kind, worker, at, state.version, pulled.version, pulled.staleness)

    def leave(state: ServerState, worker: int) -> tuple[ServerState, Event]:
        at = clocks.clock_of(state.clock, worker)
        clock = clocks.leave(state.clock, worker)
        state = _close(state._replace(clock=clock, working=state.working.drop(worker)))
        return state, Event("leave", worker, at, state.version, state.version)

    def resume(state: ServerState, worker: int) -> tuple[ServerState, Event]:
        at = clocks.clock_of(state.clock, worker)
        state = state._replace(working=state.working.drop(worker))
        return state, Event("resume", worker, at, state.version, state.version)

    def _refused(state: ServerState, worker: int, at: int, update: Update | None) -> bool:
        assert mathematics is not None
        checked = mathematics.check(update, state.params, worker)
        found = faults(checked, trained(mathematics.part(checked, mathematics.like(state.params))))
        if max_staleness == 0:  # rows of weight 0 count for nothing beside others
            found = [fault for fault in found if fault != NO_WEIGHT]
        return _judge(worker, at, found)

    def _judge(worker: int, at: int, found: list[str]) -> bool:
        if found and nonfinite == "raise":
            what = f"the push of worker {worker} at its step {at} was refused:"
            fix = 'look at the data and the learning rate, or drop such pushes with nonfinite="skip".'
            raise NonFiniteUpdateError(format_error(WHO, what, found, fix), worker=worker, clock=at)
        return bool(found)

    def _close(state: ServerState) -> ServerState:
        """With max_staleness=0, apply the mean of a clock once everyone who is there has pushed."""
        open_ = state.waiting and state.clock.steps and state.clock.slowest <= state.waiting[0].clock
        if not state.waiting or open_:
            return state
        ordered = sorted(state.waiting, key=lambda one: one.worker)
        updates, state = [one.update for one in ordered], state._replace(waiting=())
        weightless = mathematics is not None and all(
            NO_WEIGHT in faults(update, trained(mathematics.part(update, mathematics.like(state.params))))
            for update in updates
        )
        if weightless and _judge(ordered[-1].worker, ordered[-1].clock, [NO_WEIGHT]):
            return state
        return _apply(state, updates, None, 0)

    def _apply(state: ServerState, updates: Sequence[Update | None], pulled: PyTree, delay: int) -> ServerState:
        if mathematics is None:
            return state._replace(version=state.version + 1)
        new = mathematics.apply(state.params, state.opt_state, state.rule_state, updates, pulled, delay)
        return state._replace(
            params=new.params,
            opt_state=new.opt_state,
            rule_state=new.rule_state,
            version=state.version + 1,
            metrics=new.metrics,
        )

    def whole(params: PyTree) -> PyTree:
        return params if mathematics is None else mathematics.whole(params)

    def adopt(state: ServerState) -> ServerState:
        if mathematics is None:
            return state
        params, opt_state, rule_state = mathematics.adopt(state.params, state.opt_state, state.rule_state)
        return state._replace(params=params, opt_state=opt_state, rule_state=rule_state)

    def copy(state: ServerState) -> tuple[PyTree, PyTree, PyTree]:
        copy_of = copied if mathematics is None else mathematics.copy
        return copy_of(state.params, state.opt_state, state.rule_state)

    return Server(
        init,
        join,
        may_pull,
        pull,
        push,
        leave,
        resume,
        empty.max_staleness,
        rule,
        nonfinite,
        codec and codec.name,
        int(servers),
        whole,
        adopt,
        copy,
        mathematics and mathematics.programs,
        fragments,
    )
