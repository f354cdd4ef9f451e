"""The parameter server as a pure state machine: join, pull, push, leave."""

import functools
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shardopt.core.errors import format_error
from shardopt.core.types import Metric, PyTree, Weighted, wide_dtype
from shardopt.engine.config import check_optimizer
from shardopt.engine.metrics import combined, of_rows, value_of
from shardopt.parameter_server import clock as clocks
from shardopt.parameter_server.clock import Clock, PersistentMap
from shardopt.parameter_server.log import Event
from shardopt.parameter_server.rules import Rule, plain
from shardopt.parameter_server.sparse import is_rows, on_rows, on_union
from shardopt.parameter_server.updates import (
    NO_WEIGHT,
    NonFiniteUpdateError,
    Update,
    check_params,
    check_update,
    faults,
    merge,
    trained,
)
from shardopt.reducers import Compressor, Reducer, compressor

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


def make_server(
    tx: optax.GradientTransformation | None,
    *,
    max_staleness: int | None = 0,
    rule: Rule | None = None,
    nonfinite: str = "raise",
    donate: bool = False,
    reducer: Reducer | None = None,
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

    **Placement**: one copy of parameters and optimizer state, where `init` finds the parameters.

    Args:
      tx: any optax transformation that asks for no more than gradient, parameters, `value` and `grad`. None for a
        server that counts and keeps time only, whose parameters and updates are None.
      max_staleness: in clocks; None for no bound.
      rule: what to do about late gradients, from `parameter_server.rules`; None for nothing.
      nonfinite: what to do about a push that is not finite. "raise" `NonFiniteUpdateError`; or "skip" it, which
        counts as a step of the worker, and is a "refuse" in the log.
      reducer: what pushes are encoded by: `update.grads` is the message of its `so.reducers.compressor`.
      donate: let each update take over the memory of the optimizer state before it; the old state then is dead.

    Returns:
      A `Server`.

    Raises:
      TypeError: if an argument is of the wrong kind.
      ValueError: if `max_staleness` is negative or `nonfinite` unknown.

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
    codec = None if reducer is None else compressor(reducer)
    mathematics = None if tx is None else make_apply(tx, rule, donate=donate, codec=codec)
    expected: dict[Hashable, PyTree] = {}  # the message for parameters of these shapes

    def init(params: PyTree) -> ServerState:
        if tx is None:
            return ServerState(None, None, None, 0, empty)
        check_params(WHO, params)
        params = jax.tree.map(_own, params)
        part, begin = trained(params), tx.init
        opt_state = jax.jit(lambda part: jax.tree.map(jnp.copy, begin(part)))(part)
        return ServerState(params, opt_state, jax.jit(rule.init)(part), 0, empty)

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
        kept = trained(state.params) if rule.uses_pulled and max_staleness != 0 and tx is not None else None
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
        part, message = trained(state.params), None
        if codec is not None:
            key = jax.tree.structure(part), tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(part))
            message = expected.get(key) or expected.setdefault(key, codec.message(part))
        found = faults(check_update(update, state.params, worker, message), part)
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
            NO_WEIGHT in faults(update, trained(state.params)) for update in updates
        )
        if weightless and _judge(ordered[-1].worker, ordered[-1].clock, [NO_WEIGHT]):
            return state
        return _apply(state, updates, None, 0)

    def _apply(state: ServerState, updates: Sequence[Update | None], pulled: PyTree, delay: int) -> ServerState:
        if mathematics is None:
            return state._replace(version=state.version + 1)
        part = trained(state.params)
        new = mathematics(part, state.opt_state, state.rule_state, updates, pulled, delay)
        return state._replace(
            params=merge(state.params, new.params),
            opt_state=new.opt_state,
            rule_state=new.rule_state,
            version=state.version + 1,
            metrics=new.metrics,
        )

    return Server(
        init, join, may_pull, pull, push, leave, resume, empty.max_staleness, rule, nonfinite, codec and codec.name
    )


def _own(leaf: jax.Array | np.ndarray | float) -> jax.Array:
    """Copy a leaf, without the weak type that would make the second update another program than the first."""
    leaf = jnp.asarray(leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return jnp.copy(leaf)
    return jnp.array(leaf, dtype=leaf.dtype, copy=True)


class Applied(NamedTuple):
    """What one update leaves behind.

    Attributes:
      params: the trained parameters, None for other leaves.
      opt_state: the state of the optax transformation.
      rule_state: the state of the rule.
      metrics: the loss and aux metrics of the rows that the update came from.
    """

    params: PyTree
    opt_state: PyTree
    rule_state: PyTree
    metrics: dict[str, jax.Array]


def make_apply(
    tx: optax.GradientTransformation, rule: Rule, *, donate: bool, codec: Compressor | None = None
) -> Callable[..., Applied]:
    """Return the jitted `apply(params, opt_state, rule_state, updates, pulled, delay) -> Applied`.

    The updates are summed in the order given, so that the same updates give the same bits. With `donate`, the memory
    of the optimizer's and the rule's state is taken over; the parameters, which workers may still hold, never are.
    """
    update = optax.with_extra_args_support(tx).update

    def run(params, opt_state, rule_state, pushed, rows, pulled, delay) -> Applied:
        if codec is not None:
            pushed = [(codec.decode(message, params), loss, aux) for message, loss, aux in pushed]
        grads, metrics = _average(pushed, rows)
        pulled = params if pulled is None else pulled
        grads, rule_state = rule.gradient(grads, rule_state, params=params, pulled=pulled, delay=delay)
        step, opt_state = update(grads, opt_state, params, value=metrics["loss"], grad=grads)
        if rule.scale is not None:
            factor = rule.scale(delay)
            step = jax.tree.map(lambda one: one * factor.astype(one.dtype), step)
        return Applied(optax.apply_updates(params, step), opt_state, rule_state, metrics)

    jitted = jax.jit(run, donate_argnums=(1, 2) if donate else ())
    jitted_on_rows = jax.jit(on_rows(tx, run), donate_argnums=(2, 3) if donate else ())

    def apply(
        params: PyTree, opt_state: PyTree, rule_state: PyTree, updates: Sequence[Update], pulled: PyTree, delay: int
    ) -> Applied:
        rows = np.asarray([one.rows for one in updates], np.float32)
        if any(is_rows(leaf) for leaf in jax.tree.leaves(updates[0].grads, is_leaf=is_rows)):
            grads, where = on_union([one.grads for one in updates], params)
            pushed = [(g, one.loss, dict(one.metrics)) for g, one in zip(grads, updates, strict=True)]
            return jitted_on_rows(where, params, opt_state, rule_state, pushed, rows, pulled, np.int32(delay))
        pushed = [(one.grads, one.loss, dict(one.metrics)) for one in updates]
        return jitted(params, opt_state, rule_state, pushed, rows, pulled, np.int32(delay))

    return apply


def _average(
    pushed: Sequence[tuple[PyTree, Weighted, dict[str, Metric]]], rows: jax.Array
) -> tuple[PyTree, dict[str, jax.Array]]:
    """Return the gradient and metrics of the union of the rows."""
    losses = [loss for _, loss, _ in pushed]
    counts = [rows[i].astype(loss.weight.dtype) for i, loss in enumerate(losses)]
    weight = sum(n * loss.weight for n, loss in zip(counts, losses, strict=True))
    loss = sum(n * loss.total for n, loss in zip(counts, losses, strict=True)) / weight
    factors = [n / weight for n in counts]

    def mean(*leaves):
        wide = wide_dtype(leaves[0].dtype)
        scaled = [leaf.astype(wide) * factor.astype(wide) for leaf, factor in zip(leaves, factors, strict=True)]
        return sum(scaled[1:], start=scaled[0]).astype(leaves[0].dtype)

    grads = jax.tree.map(mean, *[one for one, _, _ in pushed])

    means = {}
    for name in pushed[0][2]:
        parts = [of_rows(metrics[name], n) for (_, _, metrics), n in zip(pushed, counts, strict=True)]
        together = functools.reduce(lambda a, b: combined(a, jnp.add, jnp.maximum, jnp.minimum, b), parts)
        means[name] = jnp.asarray(value_of(together))
    return grads, {"loss": jnp.asarray(loss), **means}
