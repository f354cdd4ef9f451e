"""Fragments: dealt out as by diloco, which they equal without staleness; else their log; and nothing waits for the wire."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.reference import relative_difference, same_bits

import shardopt as so
from shardopt.parameter_server.coordinator import Task
from shardopt.parameter_server.fragments import Fragments
from shardopt.parameter_server.run import Compute
from shardopt.parameter_server.worker import run_worker

P, H = 2, 4
STREAMING = {"fragments": P, "delay": 1, "mix": 0.25}


def islands(loss_fn, count=2, *, make=so.ddp, **options):
    devices = jax.devices()
    meshes = [so.make_mesh(devices=devices[2 * i : 2 * i + 2]) for i in range(count)]
    return [make(optax.adamw(0.01), mesh, loss_fn, **options) for mesh in meshes]


@pytest.mark.parametrize(
    "reducer",
    [pytest.param(None, id="exact"), pytest.param(so.reducers.int8(), marks=pytest.mark.slow, id="int8")],
)
def test_without_staleness_it_is_streaming_diloco(reducer, odd, x64):
    """After the delay that follows the last push diloco has applied it too."""
    case, batches_of = odd(weighted=False, steps=9)
    replicas = so.make_mesh(replica=2, data=2, devices=jax.devices()[:4])
    inner = so.ddp(optax.adamw(0.01), replicas, case.loss_fn)
    opt = so.diloco(inner, sync_every=H, **STREAMING, reducer=reducer)
    state = opt.init(case.params)
    for batch in case.batches:
        state, _ = opt.step(state, batch)
    ours = so.async_local_sgd(
        islands(case.loss_fn), local_steps=H, max_staleness=0, **STREAMING, reducer=reducer and so.reducers.int8()
    )
    result = ours.run(case.params, batches_of(2), num_updates=4)
    # two islands quantise by themselves what diloco's all-reduce quantises in pieces
    assert relative_difference(result.params, jax.device_get(state.params)) <= (1e-12 if reducer is None else 1e-2)
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
    loss_fn = lambda p, batch: regression.loss_fn({"w": p["w"] * p["v"], "b": p["b"] + p["c"]}, batch)  # noqa: E731
    made = islands(loss_fn, make=options.pop("make", so.ddp))
    opt = so.async_local_sgd(made, outer=optax.sgd(0.5), local_steps=H, **STREAMING | options)
    availability, each = {1: [(1, 6), (9, float("inf"))]}, H // (STREAMING | options)["fragments"]
    data = waiting_for_joins(regression.batches_of(2), {1: [each, 9 * each]})
    with so.Checkpoints(tmp_path, every=5, keep=1) as checkpoints:
        result = opt.run(params, data, num_updates=15, availability=availability, checkpoints=checkpoints)
    assert result.metrics["updates"] == 15
    assert [event.kind for event in result.log if event.worker == 1].count("join") == 2
    same_bits(opt.replay(result.log, params, regression.batches_of(2)), result.params)
    with so.Checkpoints(tmp_path, every=5, keep=1) as checkpoints:
        on = opt.run(params, regression.batches_of(2), num_updates=25, checkpoints=checkpoints)
    assert on.metrics["resumed_from"] == 15
    same_bits(opt.replay(on.log, params, regression.batches_of(2)), on.params)


@pytest.mark.fast
def test_blocks_and_other_leaves_are_dealt_out_in_turn():
    fragments = Fragments(2, stacked=True, frozen=("ice",))
    params = {"blocks": {"w": np.arange(5.0)}, "ice": np.ones(2), "head": np.ones(1), "n": 3, "tail": np.zeros(1)}
    params = jax.tree.map(jnp.asarray, params)
    parts = [fragments.take(params, number) for number in range(2)]
    assert [part["blocks"]["w"].tolist() for part in parts] == [[0, 2, 4], [1, 3]]
    assert [[name for name in ("ice", "head", "n", "tail") if part[name] is not None] for part in parts] == [
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
    """A server that does not answer before the island has gone on; an island that waited for it would wait for ever."""
    said, went_on = [], threading.Event()

    class Server:
        def __init__(self):
            self.rounds = iter(range(3))

        def enter(self, worker, incarnation):
            return None if said else 0

        def pull(self, worker, incarnation, ready):
            said.append("pull")
            clock = next(self.rounds, None)
            return None if clock is None else Task(clock, clock, clock)

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

    compute = Compute(lambda *_: None, lambda worker: (), update, lambda tree: tree, ahead)
    run_worker(Server(), compute, 0)
    served = [one for one in said if one != "ahead"]
    assert served == ["pull", "push round 0", "pull", "push round 1", "pull", "push round 2", "pull"]


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
            "delay=2 must be below local_steps / fragments = 2: the next fragment is sent then.\n"
            "Fix: use a delay of at most 1, or push less often.",
        ),
        ({"mix": 1.5}, "mix must be between 0 and 1, got 1.5."),
    ],
    ids=["fragments", "delay", "mix"],
)
def test_refusals(options, message, regression, message_of):
    found = message_of(ValueError, so.async_local_sgd, islands(regression.loss_fn), local_steps=H, **options)
    assert found == f"async_local_sgd: {message}"


@pytest.mark.fast
def test_a_fragment_of_nothing_is_refused(regression, message_of):
    opt = so.async_local_sgd(islands(regression.loss_fn), local_steps=H, fragments=4)
    found = message_of(ValueError, opt.run, regression.params, regression.batches_of(2), num_updates=1)
    assert found == "async_local_sgd: fragments=4, but 2 blocks or leaves can be dealt out.\nFix: use at most 2."
