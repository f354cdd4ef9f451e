"""`skip_anomalies` skips the steps that a loop on one device would leave out, in every strategy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.problems import problem
from support.reference import jitted, relative_difference, same_bits
from support.table import STRATEGIES

import shardopt as so

WINDOW = 6
Z = 3.0
INNER = {
    "momentum": lambda: optax.sgd(0.05, momentum=0.9),
    "clip_adamw": lambda: optax.chain(optax.clip_by_global_norm(0.3), optax.adamw(1e-2, eps=1e-4)),
    "muon": lambda: optax.contrib.muon(1e-2),
}
SPIKES = {4: 30.0, 5: 60.0, 8: np.nan, 10: np.inf}
"""Step -> the factor of the targets of its batch."""


def case_with_spikes():
    """Return the odd problem in float64: its batches 4, 5, 8 and 10 are anomalies."""
    case = problem("odd", weighted=True, steps=12, dtype=jnp.float64)
    batches = [
        {**batch, "y": batch["y"] * SPIKES.get(i, 1.0)} for i, batch in enumerate(case.batches)
    ]
    return case._replace(batches=batches)


def train_without(case, tx, window=WINDOW, norm_z=Z):
    """Return the steps that a plain loop leaves out, and the parameters at its end."""

    def is_trained(x):
        return jnp.issubdtype(x.dtype, jnp.inexact)

    params = case.params
    tx = jitted(tx)
    trained = jax.tree.map(lambda x: x if is_trained(x) else None, params)
    opt_state = tx.init(trained)

    def merge(trained):
        return jax.tree.map(
            lambda a, b: b if a is None else a, trained, params, is_leaf=lambda x: x is None
        )

    grad = jax.jit(jax.value_and_grad(lambda trained, batch: case.reference(merge(trained), batch)))
    losses = []
    norms = []
    skipped = []
    for step, batch in enumerate(case.batches):
        loss, grads = grad(trained, batch)
        norm = optax.tree.norm(grads)
        enough = 2 * len(losses) >= window
        spikes = [
            enough
            and x
            > np.mean(past[-window:])
            + z * max(np.std(past[-window:]), np.mean(past[-window:]) / 100)
            for x, past, z in ((loss, losses, Z), (norm, norms, norm_z))
        ]
        if any(spikes) or not np.isfinite(loss) or not np.isfinite(norm):
            skipped.append(step)
            continue
        losses.append(loss)
        norms.append(norm)
        updates, opt_state = tx.update(grads, opt_state, trained)
        trained = optax.apply_updates(trained, updates)
    return skipped, merge(trained)


def run(opt, case):
    """Return the steps that a strategy skips, and its last state.

    Leaves that a skipped step must not change are compared by bits.
    """
    state = opt.init(case.params)
    skipped = []
    for step, batch in enumerate(case.batches):
        before = jax.device_get((state.params, state.opt_state.inner))
        state, _ = opt.step(state, batch)
        if state.opt_state.skipped:
            skipped.append(step)
            same_bits((state.params, state.opt_state.inner), before)
    assert state.opt_state.num_skipped == len(skipped)
    return skipped, state


ROWS = [
    pytest.param("fsdp", {"data": 8}, "clip_adamw", {}, marks=pytest.mark.fast),
    pytest.param("ddp", {"data": 8}, "momentum", {}, marks=pytest.mark.slow),
    pytest.param("ddp", {"data": 8}, "momentum", {"view": "global"}, marks=pytest.mark.slow),
    pytest.param("zero1", {"data": 8}, "momentum", {"micro_batches": 4}, marks=pytest.mark.slow),
    pytest.param("zero2", {"replica": 2, "data": 4}, "clip_adamw", {}, marks=pytest.mark.slow),
    pytest.param("fsdp", {"data": 8}, "muon", {"opt_state": "matrices"}, marks=pytest.mark.slow),
    pytest.param("fsdp", {"data": 8}, "clip_adamw", {"opt_state": "host"}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("outside", "final"), [(True, -2.0), (False, 0.0)])
def test_around_accumulation_a_bad_gradient_does_not_enter_the_sum(outside, final):
    def skip(tx):
        return so.transforms.skip_anomalies(tx, loss_z=None)

    def accumulate(tx):
        return optax.MultiSteps(tx, 2)

    tx = skip(accumulate(optax.sgd(1.0))) if outside else accumulate(skip(optax.sgd(1.0)))
    params = jnp.zeros(())
    state = tx.init(params)
    update = jax.jit(tx.update)
    for gradient in (1.0, np.nan, 3.0):
        updates, state = update(jnp.array(gradient), state, params)
        params = optax.apply_updates(params, updates)
    assert params == final


@pytest.mark.parametrize(("strategy", "mesh", "inner", "options"), ROWS)
def test_steps_are_skipped_as_in_a_loop_on_one_device(strategy, mesh, inner, options, mesh_of):
    with jax.enable_x64(True):
        case = case_with_spikes()
        expected, final = train_without(case, INNER[inner]())
        assert set(SPIKES) <= set(expected)
        assert len(expected) < 8
        tx = so.transforms.skip_anomalies(INNER[inner](), Z, Z, WINDOW)
        skipped, state = run(
            STRATEGIES[strategy](tx, mesh_of(**mesh), case.loss_fn, **options), case
        )
        assert skipped == expected
        assert relative_difference(state.params, final) <= 1e-10


@pytest.mark.slow
def test_a_pipeline_skips_as_one_device(mesh_of):
    with jax.enable_x64(True):
        case = problem("gpt", weighted=False, steps=8, dtype=jnp.float64)
        inner = optax.sgd(0.9, momentum=0.9)
        expected, final = train_without(case, inner, window=4, norm_z=1.5)
        assert expected == [3, 5, 7]
        tx = so.transforms.skip_anomalies(inner, Z, 1.5, 4)
        skipped, state = run(
            so.hybrid(tx, mesh_of(data=2, pipeline=2), case.loss_fn, micro_batches=2), case
        )
        assert skipped == expected
        assert relative_difference(state.params, final) <= 1e-10


def test_each_replica_of_local_sgd_decides_by_itself(mesh_of):
    """A spike in the rows of one replica stops that replica alone.

    One of all replicas stops them all.
    """
    params = {"w": jnp.ones(3)}
    rows = np.random.default_rng(0).normal(size=(7, 8, 3)).astype(np.float32)
    rows[4, :4] *= 100
    rows[5] *= 100
    inner = so.ddp(
        so.transforms.skip_anomalies(optax.sgd(0.01, momentum=0.9), 20, 20, 4),
        mesh_of(replica=2, data=2),
        lambda params, batch: jnp.mean((batch @ params["w"]) ** 2),
    )
    opt = so.local_sgd(inner, sync_every=7)
    state = opt.init(params)
    skipped = []
    for batch in rows:
        state, _ = opt.step(state, batch)
        skips = [
            x
            for path, x in jax.tree_util.tree_leaves_with_path(state.opt_state)
            if "skipped" in str(path[-1])
        ]
        skipped.append(next(x for x in skips if x.dtype == bool).tolist())
    assert skipped == [[False, False]] * 4 + [[True, False], [True, True], [False, False]]


def counting_loss(params, batch):
    """A loss whose statistics, as of batch normalization, change in every step."""
    return jnp.mean((batch @ params["w"]) ** 2), {
        "stats": so.losses.Updated({"mean": jnp.mean(batch)})
    }


@pytest.mark.parametrize(
    "combine",
    [
        lambda opt: opt,
        pytest.param(lambda opt: so.local_sgd(opt, sync_every=2), marks=pytest.mark.slow),
    ],
    ids=["ddp", "local"],
)
def test_statistics_of_a_skipped_step_stay(combine, mesh_of):
    tx = so.transforms.skip_anomalies(optax.sgd(0.01))
    opt = combine(so.ddp(tx, mesh_of(replica=2, data=2), counting_loss, rules=[("mean", "frozen")]))
    rows = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    state, _ = opt.step(opt.init({"w": jnp.ones(3), "mean": jnp.zeros(())}), rows)
    before = jax.device_get(opt.synchronize(state).params)
    assert before["mean"] != 0
    state, _ = opt.step(state, rows * np.float32(np.nan))
    same_bits(opt.synchronize(state).params, before)


def test_a_loss_at_another_level_is_taken_after_ten_skipped_steps():
    tx = jitted(so.transforms.skip_anomalies(optax.sgd(1.0), window=4, max_in_a_row=3))
    losses = [1.0, 1.1, 1.0, 1.1, 5.0, 5.1, 5.2, 5.1, 5.0, np.nan, 5.1]
    state = tx.init(jnp.zeros(()))
    skipped = []
    for loss in losses:
        _, state = tx.update(jnp.ones(()), state, value=jnp.array(loss))
        skipped.append(bool(state.skipped))
    assert skipped == [False] * 4 + [True] * 3 + [False] * 2 + [True] + [False]


def test_a_value_that_is_not_finite_is_never_taken():
    tx = jitted(
        so.transforms.skip_anomalies(optax.sgd(1.0, momentum=0.9), None, None, max_in_a_row=1)
    )
    params = {"a": jnp.array([-0.0, 1.0]), "b": jnp.array(0.0, jnp.bfloat16)}
    state = tx.init(params)
    for bad in (np.nan, np.inf, -np.inf):
        grads = {"a": jnp.array([bad, 1.0]), "b": jnp.array(1.0, jnp.bfloat16)}
        updates, state = tx.update(grads, state, params)
        same_bits(optax.apply_updates(params, updates), params)
        same_bits(state.inner, tx.init(params).inner)
    assert state.skipped_in_a_row == state.num_skipped == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_z": -1.0}, "skip_anomalies: loss_z must be finite, above 0; got -1.0."),
        ({"norm_z": "6"}, "skip_anomalies: norm_z must be a number, got '6' (str)."),
        ({"window": 1}, "skip_anomalies: window must be at least 2, got 1."),
        ({"max_in_a_row": 0}, "skip_anomalies: max_in_a_row must be at least 1, got 0."),
    ],
)
def test_a_wrong_argument_is_refused(options, message):
    with pytest.raises((TypeError, ValueError)) as error:
        so.transforms.skip_anomalies(optax.sgd(1.0), **options)
    assert str(error.value) == message


def test_an_update_without_the_loss_is_refused():
    tx = so.transforms.skip_anomalies(optax.sgd(1.0))
    with pytest.raises(TypeError) as error:
        tx.update(jnp.ones(()), tx.init(jnp.ones(())))
    assert (
        str(error.value)
        == "skip_anomalies: update needs the loss.\nFix: use loss_z=None, which judges the norm alone;"
        " or call update(grads, state, params, value=loss)."
    )
