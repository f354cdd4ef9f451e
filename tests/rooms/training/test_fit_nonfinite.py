"""A loss or state that is not finite stops the run in time, and says where."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.tiers import tiered

import shardopt as so
from shardopt.core import NonFiniteLossError
from shardopt.training._fit import fit


def spoiled(batches, at, value=np.nan):
    """Return the batches, one of them with a label that is no number."""
    batch = batches[at] | {"y": batches[at]["y"].copy()}
    batch["y"][3] = value
    return [*batches[:at], batch, *batches[at + 1 :]]


@pytest.mark.parametrize(
    ("log_every", "at"),
    tiered(
        itertools.product([1, 5, 100], [0, 4, 5, 9, 10, 14]),
        lambda row: row[0] == 5 or row[1] in (4, 14),
    ),
)
def test_it_stops_with_step_and_position(opt, new_state, batches, memory, at, log_every):
    checkpoints = memory(5)
    logged = []
    drawn = []
    stream = (drawn.append(True) or batch for batch in spoiled(batches, at))
    with pytest.raises(NonFiniteLossError, match="nan") as caught:
        fit(
            opt,
            new_state(),
            stream,
            num_steps=15,
            checkpoints=checkpoints,
            log=lambda step, metrics: logged.append(metrics["loss"]),
            log_every=log_every,
            progress=False,
        )
    saved = at // 5 * 5
    checkpoint_note = "last checkpoint: " + (f"step {saved}" if saved else "none yet")
    assert (
        str(caught.value)
        == f"fit: the loss became nan at step {at} (batch {at}, both counted from 0).\n  {checkpoint_note},"
        " in /runs/a\nFix: lower the learning rate, clip the gradients"
        " (optax.clip_by_global_norm), or look at the batch:"
        f" next(itertools.islice(iter(batches), {at}, None)), with batches from their beginning."
    )
    assert (caught.value.step, caught.value.position) == (at, at)
    assert sorted(checkpoints.disk) == list(range(5, at + 1, 5))
    assert np.isfinite(logged).all()
    assert len(drawn) <= at + 2  # one step late at the most


def test_infinite_counts_too(opt, new_state, batches):
    with pytest.raises(
        NonFiniteLossError,
        match=r"^fit: the loss became inf at step 3 .*\n  checkpoints: none were asked",
    ):
        fit(opt, new_state(), spoiled(batches, 3, np.inf), num_steps=15, progress=False)


def test_position_counts_what_was_drawn_before_resuming(opt, new_state, batches, memory):
    checkpoints = memory(5)
    fit(opt, new_state(), batches, num_steps=10, checkpoints=checkpoints, progress=False)
    resumed_checkpoints = memory(5, disk=checkpoints.disk, resume=True)
    with pytest.raises(NonFiniteLossError) as caught:
        fit(
            opt,
            new_state(),
            spoiled(batches, 12),
            num_steps=15,
            checkpoints=resumed_checkpoints,
            progress=False,
        )
    assert (caught.value.step, caught.value.position) == (12, 12)
    # A state given without a position starts at batch 0.
    state = opt.init(jax.tree.map(jnp.array, new_state().params))._replace(step=jnp.int32(20))
    with pytest.raises(NonFiniteLossError) as caught:
        fit(opt, state, spoiled(batches, 4), num_steps=40, progress=False)
    assert (caught.value.step, caught.value.position) == (24, 4)


def exploding(tx, mesh, at):
    """A loss that is finite everywhere, with a gradient that is not where the batch says so."""

    @jax.custom_vjp
    def poison(w, bad):
        return w

    poison.defvjp(lambda w, bad: (w, bad), lambda bad, g: (jnp.full_like(g, 1) * bad, None))

    def loss_fn(params, batch):
        return (batch["x"] * poison(params["w"], batch["bad"][0])).mean()

    batches = [{"x": np.ones(4, np.float32), "bad": np.ones(4, np.float32)} for _ in range(20)]
    batches[at]["bad"][:] = np.inf
    # one row decides for all, so the gradient is no mean
    opt = so.ddp(tx, mesh, loss_fn, view="unproved")
    return opt, batches


@pytest.mark.parametrize("tx", [optax.sgd(0.1), optax.adam(0.1)], ids=["sgd", "adam"])
def test_a_state_spoiled_behind_a_finite_loss_is_not_saved(mesh_of, memory, tx):
    """The loss of a step knows nothing of its update: the state itself is looked at before it is
    saved.
    """
    opt, batches = exploding(tx, mesh_of(data=2), at=9)
    checkpoints = memory(5)
    with pytest.raises(NonFiniteLossError, match="the update made") as caught:
        fit(
            opt,
            opt.init({"w": jnp.zeros(())}),
            batches,
            num_steps=20,
            checkpoints=checkpoints,
            progress=False,
        )
    kind = "infinite" if tx.init({}) == optax.sgd(0.1).init({}) else "NaN"
    said = (
        f"fit: the update made parameters or optimizer state {kind} (its gradient norm was inf) at"
        " step 9 (batch 9,"
    )
    assert str(caught.value).startswith(said)
    assert sorted(checkpoints.disk) == [5]


def test_a_state_spoiled_by_the_last_step_is_not_returned(mesh_of):
    opt, batches = exploding(optax.adam(0.1), mesh_of(data=2), at=6)
    with pytest.raises(NonFiniteLossError, match=r"NaN .* at step 6"):
        fit(opt, opt.init({"w": jnp.zeros(())}), batches, num_steps=7, progress=False)


def test_skipped_gradients_and_infinite_masks_may_be_meant(mesh_of, memory):
    tx = optax.apply_if_finite(optax.sgd(0.1), 3)
    opt, batches = exploding(tx, mesh_of(data=2), at=9)
    checkpoints = memory(5)
    state = opt.init({"w": jnp.zeros(())})
    result = fit(opt, state, batches, num_steps=20, checkpoints=checkpoints, progress=False)
    assert result.stopped == "completed"

    def masked_loss(params, batch):
        return (batch["x"] * params["w"] * (params["mask"] == 0).sum()).mean()

    opt = so.ddp(optax.sgd(0.1), mesh_of(data=2), masked_loss)
    state = opt.init({"w": jnp.zeros(()), "mask": jnp.array([0.0, -jnp.inf])})
    result = fit(opt, state, batches, num_steps=10, checkpoints=memory(5), progress=False)
    assert result.stopped == "completed"
    assert result.state.params["mask"].tolist() == [0, -np.inf]


TOLERANT = {
    "ddp": lambda tx, mesh_of: so.ddp(tx, mesh_of(data=2), plain_loss),
    "fsdp": lambda tx, mesh_of: so.fsdp(tx, mesh_of(data=2), plain_loss, min_shard_elements=1),
    "local_sgd": lambda tx, mesh_of: so.local_sgd(
        so.ddp(tx, mesh_of(replica=2), plain_loss), sync_every=5
    ),
}


def plain_loss(params, batch):
    return ((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2).mean()


@pytest.mark.parametrize(
    ("strategy", "log_every"),
    tiered(
        itertools.product(TOLERANT, [1, 100]), lambda row: row in (("fsdp", 100), ("local_sgd", 1))
    ),
)
def test_apply_if_finite_decides_how_many_losses_in_a_row_may_be_no_numbers(
    strategy, log_every, batches, memory, mesh_of
):
    tx = optax.chain(optax.clip(1.0), optax.apply_if_finite(optax.adam(0.05), 2))
    opt = TOLERANT[strategy](tx, mesh_of)

    def first():
        return opt.init({"w": jnp.zeros(4), "b": jnp.zeros(())})

    data = batches
    for at in (0, 4, 5, 8, 9):  # two in a row are skipped, also where a checkpoint is saved
        data = spoiled(data, at)
    checkpoints = memory(5)
    options = {"log_every": log_every, "progress": False}
    result = fit(opt, first(), data, num_steps=15, checkpoints=checkpoints, **options)
    assert result.stopped == "completed"
    assert sorted(checkpoints.disk) == [5, 10, 15]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(result.state.params))
    if log_every == 1:
        assert [
            step_metrics["step"]
            for step_metrics in result.history
            if np.isnan(step_metrics["loss"])
        ] == [1, 5, 6, 9, 10]
    with pytest.raises(
        NonFiniteLossError, match=r"^fit: the loss became nan at step 10 \(batch 10"
    ) as caught:
        fit(opt, first(), spoiled(data, 10), num_steps=15, checkpoints=memory(5), **options)
    assert (caught.value.step, caught.value.position) == (10, 10)


def test_a_loss_that_is_no_number_with_a_gradient_that_is_ends_the_run(mesh_of):
    """The update was applied: apply_if_finite looks at gradients."""

    def loss_fn(params, batch):
        return (batch["x"] * params["w"]).mean() + jax.lax.stop_gradient(batch["bad"]).mean()

    opt = so.ddp(optax.apply_if_finite(optax.sgd(0.1), 3), mesh_of(data=2), loss_fn)
    batches = [{"x": np.ones(4, np.float32), "bad": np.zeros(4, np.float32)} for _ in range(9)]
    batches[3]["bad"][:] = np.nan
    with pytest.raises(NonFiniteLossError, match="the loss became nan at step 3"):
        fit(opt, opt.init({"w": jnp.zeros(())}), batches, num_steps=9, progress=False)


def test_the_device_is_never_waited_for_between_reports(opt, new_state, batches):
    """A step's loss is looked at only once the next step is dispatched, also where metrics are
    logged.
    """
    for log_every in (1, 100):
        drawn = []
        stream = (drawn.append(True) or batch for batch in spoiled(batches, 6))
        with pytest.raises(NonFiniteLossError):
            fit(opt, new_state(), stream, num_steps=15, log_every=log_every, progress=False)
        assert len(drawn) == 6 + 2


def test_the_last_loss_is_checked(opt, new_state, batches):
    with pytest.raises(
        NonFiniteLossError, match=re.escape("at step 6 (batch 6, both counted from 0)")
    ):
        fit(opt, new_state(), spoiled(batches, 6), num_steps=7, log_every=100, progress=False)


def skipping(mesh, max_in_a_row=10):
    """Return a strategy whose optimizer skips spikes."""

    def loss_fn(params, batch):
        return ((batch["x"] * params["w"] - batch["y"]) ** 2).mean()

    return so.ddp(
        so.transforms.skip_anomalies(optax.sgd(0.01), window=4, max_in_a_row=max_in_a_row),
        mesh,
        loss_fn,
    )


def rows(factors):
    return [
        {"x": np.ones(4, np.float32), "y": np.full(4, factor, np.float32)} for factor in factors
    ]


def test_a_skipped_spike_is_logged_with_its_batch_and_the_run_goes_on(mesh_of, memory, capfd):
    opt = skipping(mesh_of(data=2))
    logged = {}
    checkpoints = memory(4)
    batches = rows([1, 1, 1, 1, 1, 100, 1, np.nan, 1, 1])
    result = fit(
        opt,
        opt.init({"w": jnp.zeros(())}),
        batches,
        num_steps=10,
        checkpoints=checkpoints,
        log=lambda step, metrics: logged.setdefault(step, metrics),
        log_every=100,
        progress=False,
    )
    assert result.stopped == "completed"
    assert result.state.opt_state.num_skipped == 2
    assert sorted(checkpoints.disk) == [4, 8, 10]
    skipped = {
        step: metrics["skipped_batch"]
        for step, metrics in logged.items()
        if "skipped_batch" in metrics
    }
    assert skipped == {6: 5, 8: 7}
    assert logged[6]["loss"] > 9000
    text = capfd.readouterr().err
    assert (
        "The optimizer skipped step 5 (batch 5, both counted from 0): loss 9981, grad_norm 199.8."
        in text
    )
    assert (
        "The optimizer skipped step 7 (batch 7, both counted from 0): loss nan, grad_norm nan."
        in text
    )


def test_steps_that_stay_not_finite_end_the_run_although_the_optimizer_skips_them(mesh_of):
    opt = skipping(mesh_of(data=2), max_in_a_row=3)
    with pytest.raises(NonFiniteLossError, match="the loss became nan at step 8") as caught:
        fit(
            opt,
            opt.init({"w": jnp.zeros(())}),
            rows([1] * 5 + [np.nan] * 9),
            num_steps=14,
            progress=False,
        )
    assert caught.value.position == 8


def test_a_step_that_adds_up_gradients_after_a_skipped_update_is_not_skipped(mesh_of):
    """In optax.MultiSteps the flag of the skipped update stays for the steps up to the next update."""

    def loss_fn(params, batch):
        loss = ((batch["x"] * params["w"] - batch["y"]) ** 2).mean()
        return loss, {"stats": so.losses.Updated({"count": params["count"] + 1})}

    tx = optax.MultiSteps(so.transforms.skip_anomalies(optax.sgd(0.01), window=2), 3)
    opt = so.ddp(tx, mesh_of(data=2), loss_fn, rules=[("count", "frozen")])
    logged = {}
    result = fit(
        opt,
        opt.init({"w": jnp.zeros(()), "count": jnp.zeros(())}),
        rows([1, 1, 1, 1, 1, 1000, 1, 1, 1]),
        num_steps=9,
        log=lambda step, metrics: logged.setdefault(step, metrics),
        progress=False,
    )
    assert [
        metrics["skipped_batch"] for metrics in logged.values() if "skipped_batch" in metrics
    ] == [5]
    assert result.state.params["count"] == 8
