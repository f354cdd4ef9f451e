"""States of replicas and of reducers saved and restored: bit for bit in place, elsewhere by the
mean over replicas.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.tiers import tiered

import shardopt as so

R = so.reducers
INT8 = R.error_feedback(R.int8(4))


def same(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(
        x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs
    )


@pytest.fixture
def trip(tmp_path, steps_on, new_params, new_batches):
    """Return a function: train `source`, save, restore into `target`, return both states."""

    def run(source, target, steps):
        state, _ = steps_on(source, source.init(new_params()), new_batches(steps, rows=16))
        values = jax.device_get(state)
        so.save(tmp_path / "run", state)
        return values, so.restore(tmp_path / "run", target)

    return run


def combined(strategy_of, kind, **sizes):
    if kind == "local_sgd":
        return so.local_sgd(strategy_of("fsdp", **sizes), sync_every=3)
    if kind == "inner reducer":
        return so.local_sgd(strategy_of("ddp", options={"reducer": INT8}, **sizes), sync_every=3)
    return so.diloco(
        strategy_of("fsdp", **sizes), sync_every=4, fragments=2, delay=1, mix=0.5, reducer=INT8
    )


@pytest.mark.slow  # test_fit.py saves too
@pytest.mark.parametrize(
    "kind",
    tiered(["local_sgd", "inner reducer", "streaming"], lambda kind: kind == "streaming"),
)
def test_in_place_training_goes_on_bit_for_bit(
    kind, strategy_of, trip, steps_on, new_params, new_batches
):
    """The run stops in the middle of a round, with a fragment on its way (sent after step 2, mixed
    in after step 3).
    """
    opt = combined(strategy_of, kind)
    fresh = combined(strategy_of, kind)
    saved, restored = trip(opt, fresh, 3)  # the target has seen no parameters
    assert same(restored, saved)
    assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(
        lambda x: x.sharding, fresh.abstract_state()
    )
    later_batches = new_batches(5, rows=16)[3:]
    placed_state = jax.device_put(saved, jax.tree.map(lambda x: x.sharding, restored))
    resumed_state, wanted = (
        jax.device_get(steps_on(fresh, state, later_batches)[0])
        for state in (restored, placed_state)
    )
    assert same(resumed_state, wanted)


@pytest.mark.slow
def test_another_data_and_tensor_split_holds_the_same_values(
    strategy_of, trip, steps_on, new_batches, max_difference, x64
):
    source = so.diloco(strategy_of("fsdp", data=4), sync_every=4, fragments=2, delay=1)
    target = so.diloco(strategy_of("zero1", data=2, tensor=2), sync_every=4, fragments=2, delay=1)
    saved, restored = trip(source, target, 3)
    assert same(restored, saved)
    later_batches = new_batches(6, rows=16)[3:]
    placed = jax.tree.map(lambda x: x.sharding, source.abstract_state())
    wanted, _ = steps_on(source, jax.device_put(saved, placed), later_batches)
    resumed_state, _ = steps_on(target, restored, later_batches)
    assert max_difference(resumed_state.params, jax.device_get(wanted.params)) < 1e-10


@pytest.mark.parametrize(("old", "new"), tiered([(2, 4), (4, 2)], lambda row: False))
def test_another_number_of_replicas_takes_the_mean(
    old, new, strategy_of, trip, steps_on, new_batches
):
    def make(replica):
        return so.diloco(
            strategy_of("fsdp", replica=replica), sync_every=4, fragments=2, delay=1, reducer=INT8
        )

    saved, restored = trip(make(old), make(new), 3)
    assert same(restored.params, saved.params)
    assert same(restored.opt_state.outer, saved.opt_state.outer)
    assert same(restored.opt_state.pending, saved.opt_state.pending)
    rows = (saved.opt_state.params, saved.opt_state.optimizer, saved.opt_state.reducer)
    restored_parts = (
        restored.opt_state.params,
        restored.opt_state.optimizer,
        restored.opt_state.reducer,
    )
    differ = 0
    for a, b in zip(jax.tree.leaves(rows), jax.tree.leaves(restored_parts), strict=True):
        assert b.shape == (new, *a.shape[1:])
        np.testing.assert_allclose(b, np.broadcast_to(a.mean(0), b.shape), rtol=1e-6, atol=1e-7)
        differ += np.abs(a[0] - a[1]).max() > 0
    assert differ > 10  # the replicas really were apart
    assert np.asarray(restored.opt_state.optimizer.value[0].count).tolist() == [3] * new
    state, metrics = steps_on(make(new), restored, new_batches(2, rows=16))
    assert int(state.step) == 5
    assert np.isfinite(metrics["loss"])


def test_integers_take_the_maximum_and_keys_the_first(strategy_of, trip):
    def make(replica):
        tx = optax.chain(
            optax.apply_if_finite(optax.add_noise(0.1, 0.5, jax.random.key(3)), 3), optax.sgd(0.1)
        )
        return so.local_sgd(strategy_of("ddp", tx, replica=replica), sync_every=9)

    saved, restored = trip(make(2), make(4), 2)
    old = saved.opt_state.optimizer.value[0]
    new = restored.opt_state.optimizer.value[0]
    assert np.asarray(new.inner_state.count).tolist() == [2] * 4
    assert np.asarray(new.last_finite).tolist() == [True] * 4
    keys = jax.random.key_data(new.inner_state.rng_key)
    assert np.array_equal(
        keys, np.broadcast_to(jax.random.key_data(old.inner_state.rng_key)[0], keys.shape)
    )


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new"), [(4, 2), (1, 3)])
def test_error_memory_on_another_data_axis_keeps_its_mean(
    old, new, mesh_of, model_of, new_params, tmp_path
):
    def make(data):
        return so.ddp(
            optax.adam(1e-2), mesh_of(data=data), model_of(), reducer=R.error_feedback(R.top_k(0.2))
        )

    draw = np.random.default_rng(1)
    batch = {"x": draw.normal(size=(12, 3)), "y": draw.normal(size=(12, 2)), "weights": np.ones(12)}
    source = make(old)
    target = make(new)
    state, _ = source.step(source.init(new_params()), batch)
    saved = jax.device_get(state)
    so.save(tmp_path, state)
    restored = so.restore(tmp_path, target)
    assert same(
        (restored.params, restored.opt_state.optimizer), (saved.params, saved.opt_state.optimizer)
    )
    memory = saved.opt_state.reducer[0].memory
    restored_reducer = restored.opt_state.reducer[0].memory
    for a, b in zip(
        jax.tree.leaves(
            so.transforms.on_mesh(optax.identity(), mesh_of(data=new), "data").resized(memory)
        ),
        jax.tree.leaves(restored_reducer),
        strict=True,
    ):
        assert b.shape[0] == new
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert any(np.any(leaf) for leaf in jax.tree.leaves(memory))
    target.step(restored, batch)


@pytest.mark.slow
def test_a_warm_start_goes_along(mesh_of, model_of, trip):
    power = R.error_feedback(R.power_sgd(1, min_ratio=0))

    def make(**sizes):
        return so.ddp(optax.sgd(0.1), mesh_of(**sizes), model_of(), reducer=power)

    saved, restored = trip(make(replica=2, data=2), make(replica=1, data=2), 2)
    assert same(restored.opt_state.reducer[0].inner, saved.opt_state.reducer[0].inner)
    assert any(np.any(leaf) for leaf in jax.tree.leaves(saved.opt_state.reducer[0].inner))


def test_state_that_belongs_to_its_device_is_refused(mesh_of, model_of, new_params, tmp_path):
    exact = R.exact()
    tied = exact._replace(
        init=lambda params: R.PerDevice(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), params)),
        transmit=lambda grads, memory, state, axis: (
            *exact.transmit(grads, memory, (), axis)[:2],
            state,
        ),
    )

    def make(data):
        return so.ddp(optax.sgd(0.1), mesh_of(data=data), model_of(), reducer=tied)

    so.save(tmp_path, make(2).init(new_params()))
    with pytest.raises(so.errors.CheckpointError) as caught:
        so.restore(tmp_path, make(4))
    lines = str(caught.value).splitlines()
    assert (
        lines[0]
        == f"restore: step 0 in {tmp_path} has state that belongs to its device, which cannot be"
        " carried to another number of devices."
    )
    assert (
        lines[1]
        == "  opt_state/reducer/0/value/blocks/down: the checkpoint holds float32[2, 1, 1, 4, 8,"
        " 4], "
        "opt wants float32[4, 1, 1, 4, 8, 4]"
    )
    assert len(lines) == 7
    assert (
        lines[-1]
        == "Fix: restore on as many devices as it was saved from; or start the optimizer again on"
        " its parameters: new_opt.init(restore(directory, old_opt).params)."
    )
    assert same(so.restore(tmp_path, make(2)), make(2).init(new_params()))


def test_whatever_else_differs_is_named(strategy_of, new_params, tmp_path):
    """The error names another model, another number of fragments, and another split of the
    reducer's memory.
    """
    source = so.diloco(strategy_of("fsdp"), sync_every=4, reducer=INT8)
    so.save(tmp_path / "run", source.init(new_params()))
    target = so.diloco(strategy_of("fsdp", replica=2, data=4), sync_every=4, reducer=INT8)
    with pytest.raises(so.errors.CheckpointError) as caught:
        so.restore(tmp_path / "run", target)
    lines = str(caught.value).splitlines()
    assert "does not fit opt: 0 leaves missing, 0 left over, 4 different." in lines[0]
    assert (
        lines[1]
        == "  opt_state/reducer/0/0/memory/value/blocks/down: the checkpoint holds float32[2, 2, 1,"
        " 1, 4, 4, 4], opt wants float32[2, 4, 1, 1, 4, 2, 4]"
    )
    other = so.diloco(strategy_of("fsdp", replica=4), sync_every=4, reducer=INT8)
    with pytest.raises(so.errors.CheckpointError, match="different") as caught:
        so.restore(tmp_path / "run", other, abstract_params=jax.eval_shape(lambda: new_params(8)))
    assert (
        "params/blocks/up: the checkpoint holds float32[4, 4, 8], opt wants float32[8, 4, 8]"
        in str(caught.value)
    )
    with pytest.raises(so.errors.CheckpointError, match="missing"):
        so.restore(
            tmp_path / "run",
            so.diloco(strategy_of("fsdp", replica=4), sync_every=4, fragments=2, reducer=INT8),
        )


@pytest.mark.slow  # test_integers_take_the_maximum_and_keys_the_first, by the same restore
def test_rolling_checkpoints_restore_onto_more_replicas_too(
    strategy_of, new_params, new_batches, steps_on, tmp_path
):
    source, target = (so.local_sgd(strategy_of("fsdp", replica=n), sync_every=4) for n in (2, 4))
    with so.Checkpoints(tmp_path / "run", every=1, keep=2) as checkpoints:
        state, _ = steps_on(source, source.init(new_params()), new_batches(2, rows=16))
        checkpoints.save(state, step=2, extra={"note": 1})
        checkpoints.wait()
        restored, extra = checkpoints.restore(target)
    assert json.dumps(extra) == '{"note": 1}'
    assert jax.tree.leaves(restored.opt_state.params)[0].shape[0] == 4


@pytest.mark.slow
def test_fit_resumes_in_the_middle_of_a_round(strategy_of, new_params, new_batches, tmp_path):
    def run(folder, steps, resume=False):
        opt = so.diloco(strategy_of("fsdp"), sync_every=6, fragments=2, delay=1)
        batches = new_batches(12, rows=16)
        options = {"progress": False, "log_every": 1}
        with so.Checkpoints(folder, every=2, keep=1, resume=resume) as checkpoints:
            return so.fit(
                opt,
                opt.init(new_params()),
                batches,
                num_steps=steps,
                checkpoints=checkpoints,
                **options,
            )

    full_run = run(tmp_path / "whole", 10)
    run(tmp_path / "parts", 4)  # fragment 0 was sent with step 4
    second = run(tmp_path / "parts", 10, resume=True)
    assert second.step == 10
    assert same(jax.device_get(second.state), jax.device_get(full_run.state))
    losses = {record["step"]: record["loss"] for record in full_run.history}
    assert {record["step"]: record["loss"] for record in second.history} == {
        step: losses[step] for step in range(5, 11)
    }


@pytest.mark.slow  # test_fit.py evaluates, rooms/training stops early
def test_fit_stops_early_on_the_shared_parameters(strategy_of, new_params, new_batches):
    opt = so.local_sgd(strategy_of("ddp", optax.sgd(0.0)), sync_every=2)
    (held_out,) = new_batches(1)
    result = so.fit(
        opt,
        opt.init(new_params()),
        new_batches(20),
        num_steps=20,
        evaluate=(lambda state: {"held_out": float(opt.evaluate(state, held_out)["loss"])}, 2),
        early_stopping=so.training.EarlyStopping("held_out", patience=2),
        progress=False,
    )
    assert (result.stopped, result.step) == ("early", 6)
    assert result.best["step"] == 2
    assert jnp.isfinite(result.best["held_out"])
