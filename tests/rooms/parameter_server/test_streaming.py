"""Fragments: dealt out as by diloco, which they equal without staleness.

Else their log; and nothing waits for the wire.
"""

import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.reference import relative_difference, same_bits

import shardopt as so
from shardopt.core._types import TrainState
from shardopt.parameter_server import make_server, make_update, rules
from shardopt.parameter_server._coordinator import WorkerTask
from shardopt.parameter_server._fragments import FragmentPlan, FragmentTree
from shardopt.parameter_server._islands import Island, Islands, Streaming
from shardopt.parameter_server._run import WorkerCompute
from shardopt.parameter_server._worker import Streams, WorkerCompressors, run_worker

P, H = 2, 4
STREAMING = {"fragments": P, "delay": 1, "mix": 0.25}


def islands(loss_fn, count=2, *, size=2, make=so.ddp, **options):
    devices = jax.devices()
    meshes = [so.make_mesh(devices=devices[size * i : size * (i + 1)]) for i in range(count)]
    return [make(optax.adamw(0.01), mesh, loss_fn, **options) for mesh in meshes]


@pytest.mark.slow  # the rounds of an island below, and local_updates/test_reference.py
@pytest.mark.parametrize(
    "reducer",
    [
        pytest.param(None, id="exact"),
        pytest.param(so.reducers.int8(), marks=pytest.mark.slow, id="int8"),
    ],
)
def test_without_staleness_it_is_streaming_diloco(reducer, odd, x64):
    """After the delay that follows the last push diloco has applied it too."""
    case, batches_of = odd(weighted=False, steps=9)
    replicas = so.make_mesh(replica=2, data=1, devices=jax.devices()[:2])
    inner = so.ddp(optax.adamw(0.01), replicas, case.loss_fn)
    opt = so.diloco(inner, sync_every=H, **STREAMING, reducer=reducer)
    state = opt.init(case.params)
    for batch in case.batches:
        state, _ = opt.step(state, batch)
    ours = so.parameter_server.async_local_sgd(
        islands(case.loss_fn, size=1),
        local_steps=H,
        max_staleness=0,
        **STREAMING,
        reducer=reducer and so.reducers.int8(),
    )
    result = ours.run(case.params, batches_of(2), num_updates=4)
    # two islands quantise by themselves what diloco's all-reduce quantises in pieces
    assert relative_difference(result.params, jax.device_get(state.params)) <= (
        1e-12 if reducer is None else 1e-2
    )
    same_bits(ours.replay(result.log, case.params, batches_of(2)), result.params)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"rule": so.parameter_server.rules.delayed_nesterov(every=2), "max_staleness": 1},
        {"reducer": so.reducers.error_feedback(so.reducers.int8()), "make": so.fsdp},
        {"fragments": 1, "delay": 3, "mix": 0.0},
        {"fragments": 4, "delay": 0, "mix": 0.5},
    ],
    ids=["rule", "quantised", "one fragment", "no delay"],
)
def test_replay_with_deaths_and_late_joiners(options, regression, tmp_path, waiting_for_joins):
    params = {**regression.params, "v": jnp.ones(4), "c": jnp.zeros(())}

    def loss_fn(p, batch):
        return regression.loss_fn({"w": p["w"] * p["v"], "b": p["b"] + p["c"]}, batch)

    made = islands(loss_fn, make=options.pop("make", so.ddp))
    opt = so.parameter_server.async_local_sgd(
        made, outer=optax.sgd(0.5), local_steps=H, **STREAMING | options
    )
    availability, each = {1: [(1, 6), (9, float("inf"))]}, H // (STREAMING | options)["fragments"]
    data = waiting_for_joins(regression.batches_of(2), {1: [each, 9 * each]})
    with so.Checkpoints(tmp_path, every=5, keep=1) as checkpoints:
        result = opt.run(
            params, data, num_updates=15, availability=availability, checkpoints=checkpoints
        )
    assert result.metrics["updates"] == 15
    assert [event.kind for event in result.log if event.worker == 1].count("join") == 2
    same_bits(opt.replay(result.log, params, regression.batches_of(2)), result.params)
    with so.Checkpoints(tmp_path, every=5, keep=1) as checkpoints:
        on = opt.run(params, regression.batches_of(2), num_updates=25, checkpoints=checkpoints)
    assert on.metrics["resumed_from"] == 15
    same_bits(opt.replay(on.log, params, regression.batches_of(2)), on.params)


@pytest.mark.fast
def test_blocks_and_other_leaves_are_dealt_out_in_turn():
    fragments = FragmentPlan(2, stacked=True, frozen=("ice",))
    params = {
        "blocks": {"w": np.arange(5.0)},
        "ice": np.ones(2),
        "head": np.ones(1),
        "n": 3,
        "tail": np.zeros(1),
    }
    params = jax.tree.map(jnp.asarray, params)
    parts = [fragments.take(params, number) for number in range(2)]
    assert [part["blocks"]["w"].tolist() for part in parts] == [[0, 2, 4], [1, 3]]
    assert [
        [name for name in ("ice", "head", "n", "tail") if part[name] is not None] for part in parts
    ] == [
        ["head"],
        ["tail"],
    ]
    assert list(fragments.untrained(params)) == ["ice", "n"]
    other = jax.tree.map(lambda leaf: leaf + 10, params)
    put = fragments.put(params, 1, fragments.take(other, 1))
    assert put["blocks"]["w"].tolist() == [0, 11, 2, 13, 4]
    assert (put["head"].item(), put["tail"].item()) == (1, 10)


@pytest.mark.fast
def test_steps_are_taken_while_a_push_and_its_answer_travel():
    """A server that does not answer before the island has gone on.

    An island that waited for it would wait for ever.
    """
    said, went_on = [], threading.Event()

    class ParameterServer:
        def __init__(self):
            self.rounds = iter(range(3))

        def enter(self, worker, incarnation):
            return None if said else 0

        def pull(self, worker, incarnation, ready):
            said.append("pull")
            clock = next(self.rounds, None)
            return None if clock is None else WorkerTask(clock, clock, clock)

        def push(self, worker, incarnation, update, version):
            assert went_on.wait(60)
            said.append(f"push {update}")
            return True

    def ahead(worker, batch):
        said.append("ahead")
        went_on.set()

    def update(worker, params, batch, clock):
        went_on.clear()
        return f"round {clock}"

    compute = WorkerCompute(lambda *_: None, lambda worker: (), update, lambda tree: tree, ahead)
    run_worker(ParameterServer(), compute, 0)
    served = [one for one in said if one != "ahead"]
    assert served == [
        "pull",
        "push round 0",
        "pull",
        "push round 1",
        "pull",
        "push round 2",
        "pull",
    ]


def alone(delay, mix, codec=None):
    """Return (compute, island) of one island without a strategy: each step takes the batch off its
    parameters.
    """
    mesh = so.make_mesh(devices=jax.devices()[:1])
    everywhere = jax.NamedSharding(mesh, jax.P())

    def step(state, batch):
        return state._replace(params=jax.tree.map(jnp.subtract, state.params, batch)), {
            "loss": jnp.zeros(())
        }

    def first_state(worker, params, clock):
        return TrainState(0, jax.device_put(params, everywhere), (), None)

    streaming = Streaming(FragmentPlan(P, stacked=False, frozen=("ice",)), delay, mix)
    config = SimpleNamespace(layout=SimpleNamespace(frozen=("ice",)))
    opt = SimpleNamespace(mesh=mesh, step=SimpleNamespace(with_kinds=step), config=config)
    island = Island(opt, streaming)
    streams = Streams("test", lambda worker: [], [H // P])
    return (
        Islands({0: island}, streaming, first_state, streams, WorkerCompressors(codec)).compute(),
        island,
    )


def floats(**leaves):
    return {name: None if value is None else jnp.float32(value) for name, value in leaves.items()}


@pytest.mark.fast
@pytest.mark.parametrize("ahead", [True, False], ids=["run", "replay"])
def test_the_rounds_of_an_island(ahead, message_of):
    """Two steps a round.

    The server's fragment is taken after the first of them, at which a run is before it is pulled.
    """
    compute, island = alone(**{name: STREAMING[name] for name in ("delay", "mix")})
    batches = [floats(a=1, b=10, ice=0)] * 2

    def pushed(params, clock):
        if ahead:
            compute.ahead(0, batches)
        went_on = None if island.state is None else float(island.state.params["a"])
        update = compute.update(0, params, batches, clock)
        assert update.rows == 1  # each island counts alike
        return went_on, update.grads.number, update.grads.tree

    compute.begin(0, 0)
    assert pushed(floats(a=0, b=0, ice=8), 0) == (None, 0, floats(a=2, b=None, ice=None))
    assert pushed(floats(a=5, b=50, ice=8), 1) == (-2 - ahead, 1, floats(a=None, b=40, ice=None))
    assert island.state.params == floats(a=(0.75 * 5 + 0.25 * -3) - 1, b=-40, ice=8)
    fragment = FragmentTree(floats(a=None, b=200, ice=None), 1)  # on Ray nothing else is pulled
    assert pushed(fragment, 2) == (2 - ahead, 0, floats(a=5, b=None, ice=None))
    assert island.state.params == floats(a=0, b=(0.75 * 200 + 0.25 * -50) - 10, ice=8)
    compute.ahead(0, batches)
    compute.begin(0, 0)  # it died, and joins again
    assert pushed(floats(a=1, b=2, ice=8), 5) == (None, 1, floats(a=None, b=20, ice=None))
    batches = [floats(a=1, b=1, ice=1)] * 2
    assert (
        message_of(ValueError, pushed, fragment, 6)
        == "async_local_sgd: loss_fn returns so.losses.Updated, for which islands have no common value.\n"
        "  ice\nFix: train such leaves with ddp, zero, fsdp or diloco."
    )


@pytest.mark.fast
def test_what_a_push_leaves_out_is_in_later_ones_of_its_fragment():
    """One entry of four travels, always the largest unless what was not sent is remembered.

    Who joins remembers nothing.
    """
    codec = so.reducers.compressor(so.reducers.error_feedback(so.reducers.top_k(density=0.25)))
    compute, _ = alone(delay=0, mix=0.0, codec=codec)
    zeros = {name: jnp.zeros(4) for name in "ab"}
    batches = [{name: jnp.array([4.0, 3.0, 2.0, 1.0]) for name in "ab"}] * 2

    def sent():
        compute.begin(0, 0)
        parts = [compute.update(0, zeros, batches, clock).grads for clock in range(8 * P)]
        return [
            codec.decode(one.tree, {"ab"[one.number]: zeros["a"]})["ab"[one.number]]
            for one in parts
        ]

    first, again = sent(), sent()
    for number in range(P):
        assert (sum(first[number::P]) > 0).all()
    same_bits(first, again)


@pytest.mark.fast
def test_each_fragment_has_states_of_its_own_and_the_dead_do_not_count():
    """The rule multiplies the change of a fragment by how many there have been."""

    def multiply(grads, count, **_):
        return jax.tree.map(lambda one: one * count, grads), count + 1

    rule = rules.StalenessRule("multiply", {}, init=lambda params: jnp.ones(()), gradient=multiply)
    fragments = FragmentPlan(P, stacked=False, frozen=())
    server = make_server(optax.sgd(1.0), max_staleness=0, rule=rule, fragments=fragments)
    state = server.init(floats(a=0, b=0))
    for worker in range(3):
        state, _ = server.join(state, worker)

    def push(state, number, changes):
        for worker, change in enumerate(changes):
            state, pulled = server.pull(state, worker)
            tree = floats(a=None, b=None) | floats(**{"ab"[number]: change})
            state, _ = server.push(
                state, worker, make_update(FragmentTree(tree, number)), pulled.version
            )
        return state

    state = push(state, 0, [1, 3, 2])
    assert state.params == floats(a=-2, b=0)
    state, _ = server.leave(push(state, 1, [2, 4]), 2)
    assert state.params == floats(a=-2, b=-3)
    assert push(state, 0, [3, 5]).params == floats(a=-2 - 2 * 4, b=-3)


@pytest.mark.fast
def test_a_rule_compares_a_fragment_with_what_was_pulled_of_it():
    def drift(grads, state, *, params, pulled, **_):
        return jax.tree.map(lambda new, old: 10 * (new - old), params, pulled), state

    rule, fragments = (
        rules.StalenessRule("drift", {}, gradient=drift, uses_pulled=True),
        FragmentPlan(P, stacked=False, frozen=()),
    )
    server = make_server(optax.sgd(1.0), max_staleness=1, rule=rule, fragments=fragments)
    state, _ = server.join(server.init(floats(a=0, b=0)), 0)
    state, pulled = server.pull(state, 0)
    state = state._replace(params=floats(a=5, b=7))
    state, _ = server.push(
        state, 0, make_update(FragmentTree(floats(a=None, b=0), 1)), pulled.version
    )
    assert state.params == floats(a=5, b=7 - 10 * 7)


@pytest.mark.fast
def test_a_run_with_other_fragments_does_not_go_on(regression):
    """What the log and a checkpoint keep is compared when a run goes on."""
    header = so.parameter_server.async_local_sgd(
        islands(regression.loss_fn), local_steps=H, **STREAMING
    ).spec.header
    assert {name: header[name] for name in STREAMING} == STREAMING


@pytest.mark.fast
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"fragments": 3},
            "local_steps=4 is not divisible by fragments=3, remainder 1.\nFix: use local_steps=6.",
        ),
        (
            {"fragments": 2, "delay": 2},
            (
                "delay=2 must be below local_steps / fragments = 2: the next fragment is sent"
                " then.\nFix: use a delay of at most 1, or push less often."
            ),
        ),
        ({"mix": 1.5}, "mix must be between 0 and 1, got 1.5."),
    ],
    ids=["fragments", "delay", "mix"],
)
def test_refusals(options, message, regression, message_of):
    found = message_of(
        ValueError,
        so.parameter_server.async_local_sgd,
        islands(regression.loss_fn),
        local_steps=H,
        **options,
    )
    assert found == f"async_local_sgd: {message}"


@pytest.mark.fast
def test_a_fragment_of_nothing_is_refused(regression, message_of):
    opt = so.parameter_server.async_local_sgd(
        islands(regression.loss_fn), local_steps=H, fragments=4
    )
    found = message_of(
        ValueError, opt.run, regression.params, regression.batches_of(2), num_updates=1
    )
    assert (
        found
        == "async_local_sgd: fragments=4, but 2 blocks or leaves can be dealt out.\nFix: use at"
        " most 2."
    )
