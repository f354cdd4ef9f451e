"""Pushes that are encoded: fewer bytes, the same log and replay, and no memory that is lost without
a word.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.reference import same_bits

import shardopt as so
from shardopt.parameter_server import (
    NonFiniteUpdateError,
    SimulatedWorker,
    make_server,
    make_update,
    simulate,
)
from shardopt.parameter_server import _worker as worker_side

R = so.reducers
INT8 = R.error_feedback(R.int8(block_size=4))


def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["w"] @ params["v"] - batch["y"]) ** 2)


def start():
    draw = np.random.default_rng(0)
    return {
        name: draw.normal(size=size).astype(np.float32) / 4
        for name, size in (("w", (12, 8)), ("v", 8))
    }


def batches_of(worker):
    draw = np.random.default_rng([1, worker])
    truth = np.random.default_rng(2).normal(size=12)
    for _ in range(500):
        x = draw.normal(size=(16, 12))
        yield {"x": x.astype(np.float32), "y": (x @ truth).astype(np.float32)}


def train(
    reducer,
    *,
    max_staleness=1,
    workers=2,
    num_updates=12,
    data=batches_of,
    nonfinite="raise",
    **options,
):
    devices = jax.devices()[:1] * workers  # one program for all
    tx = optax.sgd(0.02)
    opt = so.async_sgd(
        tx,
        loss_fn,
        workers=devices,
        max_staleness=max_staleness,
        reducer=reducer,
        nonfinite=nonfinite,
    )
    return opt, opt.run(start(), data, num_updates=num_updates, **options)


@pytest.mark.parametrize(
    "make",
    [
        lambda: INT8,
        pytest.param(lambda: R.error_feedback(R.top_k(density=0.1)), marks=pytest.mark.slow),
        pytest.param(lambda: R.error_feedback(R.power_sgd(rank=1)), marks=pytest.mark.slow),
    ],
)
def test_runs_with_reducers_replay_and_count_their_bytes(make):
    reducer = make()
    opt, result = train(reducer)
    pushed = result.metrics["pushes"] * R.compressor(reducer).nbytes(start())
    assert result.metrics["push_bytes"] == pushed < result.metrics["pushes"] * 0.6 * 4 * (96 + 8)
    assert result.log.header["reducer"] == reducer.name
    assert all(value > 0 for value in result.metrics["unsent"].values())
    assert set(result.metrics["unsent"]) == {0, 1}
    assert result.metrics["lost_memory"] == {}
    same_bits(opt.replay(result.log, start(), batches_of), result.params)


def test_without_rounding_it_is_the_plain_run():
    _, encoded = train(R.exact(), max_staleness=0)
    _, plain = train(None, max_staleness=0)
    same_bits(encoded.params, plain.params)
    assert encoded.metrics["push_bytes"] == plain.metrics["push_bytes"]
    assert "unsent" not in plain.metrics


def test_what_is_remembered_is_sent_later():
    """One entry of four travels. It is always the largest one, unless the reducer remembers unsent
    values.
    """
    few = R.top_k(density=0.25)
    slope = np.array([4.0, 3.0, 2.0, 1.0], np.float32)

    def fall(reducer):
        opt = so.async_sgd(
            optax.sgd(1.0), lambda p, b: jnp.mean(b["x"] @ p["w"]), workers=1, reducer=reducer
        )
        return -opt.run(
            {"w": np.zeros(4, np.float32)}, lambda w: [{"x": slope[None]}] * 16, num_updates=16
        ).params["w"]

    np.testing.assert_array_equal(fall(few), [64, 0, 0, 0])
    sent = fall(R.error_feedback(few))
    assert (sent > 0).all()
    assert (np.abs(sent - 16 * slope) <= 16).all()


def leaving(times):
    """Return a simulated run whose worker 1 works in some periods."""
    workers = [SimulatedWorker(), SimulatedWorker(availability=times)]
    return simulate(
        workers,
        max_staleness=1,
        reducer=INT8,
        num_updates=26,
        tx=optax.sgd(0.02),
        loss_fn=loss_fn,
        params=start(),
        batches_of=batches_of,
    )


def test_a_memory_that_is_lost_is_said_and_replayed():
    result = leaving(((0, 3.5), (5.5, 8.5), (9.5, np.inf)))
    lost = result.metrics["lost_memory"]
    assert {worker: len(values) for worker, values in lost.items()} == {1: 2}
    assert all(0 < value < 1 for value in lost[1])
    opt, _ = train(INT8, num_updates=0)
    same_bits(opt.replay(result.log, start(), batches_of), result.params)


@pytest.mark.slow  # shows that the replay above can fail
def test_a_memory_that_outlives_its_worker_would_be_noticed(monkeypatch):
    """The replay above can fail: it begins without memory at each join."""
    with monkeypatch.context() as patch:
        patch.setattr(worker_side.WorkerCompressors, "begin", lambda self, worker: None)
        result = leaving(((0, 3.5), (5.5, np.inf)))
    opt, _ = train(INT8, num_updates=0)
    with pytest.raises(ValueError, match="the parameters at the end are not those of the run"):
        opt.replay(result.log, start(), batches_of)


def test_a_resumed_run_says_what_it_lost(tmp_path):
    for total in (8, 16):
        with so.Checkpoints(tmp_path, every=4, keep=1) as checkpoints:
            opt, result = train(INT8, num_updates=total, checkpoints=checkpoints)
    assert {worker: len(values) for worker, values in result.metrics["lost_memory"].items()} == {
        0: 1,
        1: 1,
    }
    same_bits(opt.replay(result.log, start(), batches_of), result.params)
    with (
        so.Checkpoints(tmp_path, every=4, keep=1) as checkpoints,
        pytest.raises(ValueError, match="other settings") as caught,
    ):
        train(None, num_updates=20, checkpoints=checkpoints)
    assert (
        str(caught.value) == "async_sgd: the checkpoint is of a run with other settings.\n"
        f"  reducer: {INT8.name} in the checkpoint, None now\n"
        "Fix: use the settings of the checkpoint."
    )


def test_what_is_not_finite_is_not_hidden():
    def spoilt(worker):
        for step, batch in enumerate(batches_of(worker)):
            yield {**batch, "y": batch["y"] * np.float32("nan" if (worker, step) == (1, 2) else 1)}

    with pytest.raises(NonFiniteUpdateError) as caught:
        train(INT8, data=spoilt, num_updates=100)
    assert (
        str(caught.value) == "parameter_server: the push of worker 1 at its step 2 was refused:\n"
        "  loss: not finite\n  v: not finite\n  w: not finite\n"
        'Fix: look at the data and the learning rate, or drop such pushes with nonfinite="skip".'
    )
    opt, result = train(INT8, data=spoilt, nonfinite="skip")
    assert result.metrics["refused"] == 1
    assert np.isfinite(result.metrics["unsent"][1])
    same_bits(opt.replay(result.log, start(), spoilt), result.params)


def test_what_is_too_large_for_the_wire_is_named():
    def large(worker):
        return ({**batch, "y": batch["y"] * np.float32(1e5)} for batch in batches_of(worker))

    with pytest.raises(NonFiniteUpdateError, match="refused:\n  v: not finite\n  w: not finite\n"):
        train(R.exact(jnp.float16), data=large)


# test_streaming.py has islands with a reducer, test_runs_with_reducers_replay_and_count_their_bytes the same codec
@pytest.mark.slow
def test_islands_with_a_reducer_are_replayed():
    def make(devices):
        return so.ddp(optax.adam(0.01), so.make_mesh(devices=devices), loss_fn)

    islands = [make(jax.devices()[2 * i : 2 * i + 2]) for i in range(2)]
    opt = so.parameter_server.async_local_sgd(
        islands, outer=optax.sgd(0.5), local_steps=2, max_staleness=1, reducer=INT8
    )
    result = opt.run(start(), batches_of, num_updates=9)
    assert result.metrics["push_bytes"] == result.metrics["pushes"] * R.compressor(INT8).nbytes(
        start()
    )
    same_bits(opt.replay(result.log, start(), batches_of), result.params)


def test_bad_input_is_refused(message_of):
    late = R.warm_up(R.power_sgd(), 1)
    for do in (
        lambda: so.async_sgd(optax.sgd(1), loss_fn, workers=1, reducer=late),
        lambda: so.parameter_server.async_local_sgd(
            [so.ddp(optax.sgd(1), so.make_mesh(), loss_fn)], local_steps=1, reducer=late
        ),
        lambda: make_server(optax.sgd(1), reducer=late),
    ):
        assert (
            message_of(ValueError, do)
            == "compressor: warm_up(power_sgd(rank=4), steps=1) has no form that a single sender"
            " can write.\nFix: use exact, int8, sign, top_k or power_sgd, alone or in"
            " error_feedback, without a warm-up."
        )
    server = make_server(optax.sgd(1), max_staleness=1, reducer=INT8)
    state, _ = server.join(server.init(start()), 0)
    state, pulled = server.pull(state, 0)
    assert (
        message_of(ValueError, server.push, state, 0, make_update(start()), pulled.version)
        == "parameter_server: the push of worker 0 is not encoded as the server reads it.\n"
        "Fix: push what the compressor of the same reducer writes."
    )


def test_the_simulator_sends_messages_of_that_size():
    worker = so.parameter_server.SimulatedWorker(step_seconds=1.0, latency=0.25, bandwidth=16.0)
    options = {
        "tx": optax.sgd(0.02),
        "loss_fn": loss_fn,
        "params": start(),
        "batches_of": batches_of,
    }
    simulation = so.parameter_server.simulate(
        [worker], max_staleness=1, num_updates=3, reducer=INT8, **options
    )
    pull = 4 * (96 + 8)
    push = R.compressor(INT8).nbytes(start())
    assert simulation.metrics["seconds"] == pytest.approx(
        3 * (1.0 + 2 * 0.25 + (pull + push) / 16.0)
    )
    assert simulation.metrics["push_bytes"] == 3 * push
    opt = so.async_sgd(optax.sgd(0.02), loss_fn, workers=1, max_staleness=1, reducer=INT8)
    same_bits(opt.replay(simulation.log, start(), batches_of), simulation.params)
