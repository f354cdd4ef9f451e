"""`find_nan` names the operation, line, leaf, row and device of a value that is not finite."""

import inspect
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.table import STRATEGIES

import shardopt as so


def log_of_rows(params, batch):
    logs = jnp.log(batch["x"] @ params["w"])
    return jnp.mean(jnp.where(batch["mask"], logs, 0.0) * params["scale"])


def rows_with(**bad):
    batch = {"x": np.ones((16, 4), np.float32), "mask": np.ones(16, bool)}
    for name, (row, value) in bad.items():
        batch[name][row] = value
    return batch


PARAMS = {"w": np.ones(4, np.float32), "scale": np.ones((), np.float32)}


def line_of(function, text):
    lines, first = inspect.getsourcelines(function)
    number = first + next(i for i, line in enumerate(lines) if text in line)
    return f"{__file__}:{number} ({function.__name__})"


@pytest.mark.parametrize(
    ("strategy", "mesh", "options"),
    [
        pytest.param("fsdp", {"data": 8}, {}, marks=pytest.mark.fast),
        pytest.param("ddp", {"data": 4}, {"micro_batches": 2}, marks=pytest.mark.slow),
        ("zero1", {"replica": 2, "data": 2}, {"view": "global"}),
    ],
)
def test_a_nan_of_the_forward_pass_is_found_with_its_row_and_device(
    strategy, mesh, options, mesh_of
):
    """A row whose NaN is masked is no finding.

    The row with the other NaN is, with the device that holds it.
    """
    opt = STRATEGIES[strategy](optax.sgd(0.1), mesh_of(**mesh), log_of_rows, **options)
    state = opt.init(PARAMS)
    batch = rows_with()
    assert so.find_nan(opt, state, batch) is None
    batch["x"][[3, 11]], batch["mask"][3] = -1, False
    finding = so.find_nan(opt, state, batch)
    assert (finding.kind, finding.direction, finding.operation, finding.leaf) == (
        "NaN",
        "forward",
        "log",
        "w",
    )
    assert finding.line == line_of(log_of_rows, "jnp.log")
    assert (finding.rows, finding.gradients, finding.turns) == ((11,), (), ())
    devices = opt.mesh.devices.flatten()  # row 11 of 16 is with the device at 11/16 of them
    held = devices[11 * len(devices) // 16 :][:1]
    assert set(finding.devices) == set(held)
    assert finding.micro_batch == (1 if "micro_batches" in options else 0)


# a trace holds arrays of numpy as constants, and arrays of jnp as operations
CONSTANTS = np.array([[1, 2, 3]], np.float32)
MASK = np.tri(3, dtype=bool)


def root(params, batch):
    norms = jnp.sqrt(jnp.sum((batch * CONSTANTS * params["w"][None]) ** 2, -1))
    return jnp.mean(norms) + 0 * params["other"]


def test_an_infinity_of_the_backward_pass_is_found_with_its_line(mesh_of):
    opt = so.ddp(optax.sgd(0.1), mesh_of(data=4), root)
    batch = np.ones((8, 3), np.float32)
    batch[6] = 0
    finding = so.find_nan(opt, opt.init({"w": np.ones(3, np.float32), "other": np.ones(())}), batch)
    assert (finding.kind, finding.direction, finding.operation) == ("infinite", "backward", "div")
    assert finding.line == line_of(root, "sqrt")
    assert finding.became_nan.startswith("mul, ")
    assert (finding.gradients, finding.rows, finding.devices) == (
        ("w",),
        (6,),
        (opt.mesh.devices.flat[3],),
    )


def weighted(params, batch):
    return so.losses.Weighted(jnp.sum(batch * params["w"][None]), jnp.sum(batch))


def test_a_loss_that_only_the_whole_batch_makes_nan_is_found(mesh_of):
    """No piece is bad: their weights are 0, and the step divides by the weight of all of them."""
    opt = so.ddp(optax.sgd(0.1), mesh_of(data=2), weighted)
    state = opt.init({"w": np.ones(3, np.float32)})
    batch = np.zeros((4, 3), np.float32)
    assert np.isnan(opt.evaluate(state, batch)["loss"])
    finding = so.find_nan(opt, state, batch)
    assert (finding.kind, finding.direction, finding.operation, finding.rows) == (
        "NaN",
        "forward",
        "div",
        (0, 1, 2, 3),
    )
    batch[3] = 1
    assert so.find_nan(opt, state, batch) is None


def attend(w, x):
    scores = jnp.where(MASK, x[:, :, None] * x[:, None, :], -jnp.inf)
    return x + jax.nn.softmax(scores, -1)[:, 0] * jnp.exp(w["rate"])


MODEL = so.BlockModel(
    embed=lambda outer, batch: batch * outer["in"],
    block=attend,
    loss=lambda outer, x, batch: jnp.mean(x),
    remat="full",
)


def test_a_block_is_a_turn_and_a_mask_of_infinities_is_no_finding(mesh_of):
    params = {
        "blocks": {"rate": np.array([0, 0, 1000, 0], np.float32)},
        "in": np.ones((), np.float32),
    }
    opt = so.hybrid(optax.sgd(0.1), mesh_of(data=2, pipeline=2), MODEL, micro_batches=2)
    finding = so.find_nan(opt, opt.init(params), np.ones((4, 3), np.float32))
    assert (finding.kind, finding.operation, finding.leaf, finding.turns) == (
        "infinite",
        "exp",
        "blocks/rate",
        ((2, 4),),
    )
    assert finding.line == line_of(attend, "jnp.exp")
    assert finding.rows == (0, 1, 2, 3)
    assert "every row (of 4)" in str(finding)


def dropped(params, batch, rng=None):
    keep = jax.random.bernoulli(rng, 0.5, batch.shape)
    return jnp.mean(jnp.where(keep, batch + params["w"], 0))


@pytest.mark.slow  # contract/test_features.py
def test_a_key_is_that_of_the_step(mesh_of):
    """Dropout hides a NaN in some steps: the finding agrees with the loss of the step."""
    opt = so.ddp(optax.sgd(0.0), mesh_of(data=2), dropped, micro_batches=2)
    batch = np.ones(8, np.float32)
    agreed = set()
    batch[5] = np.nan
    for seed in range(6):
        if agreed == {True, False}:
            break
        state = opt.init({"w": np.ones((), np.float32)}, jax.random.key(seed))
        finding = so.find_nan(opt, state, batch)
        _, metrics = opt.step(state, batch)
        bad = not np.isfinite(metrics["loss"])
        assert (finding is not None) == bad
        agreed.add(bad)
        assert not bad or (finding.operation, finding.leaf, finding.rows) == (
            "argument",
            "batch",
            (5,),
        )
    assert agreed == {True, False}


def while_loss(params, batch):
    halved = jax.lax.while_loop(
        lambda x: x[1] < 3, lambda x: (jnp.log(x[0]), x[1] + 1), (params["w"], 0)
    )[0]
    return jnp.mean(batch) * jax.lax.cond(halved > 9, lambda x: x, lambda x: x + 1, halved)


def test_a_while_loop_counts_its_turns(mesh_of):
    opt = so.ddp(
        optax.sgd(0.1),
        mesh_of(data=2),
        lambda p, b: while_loss(jax.lax.stop_gradient(p), b) + p["w"],
    )
    finding = so.find_nan(opt, opt.init({"w": np.array(2.0, np.float32)}), np.ones(4, np.float32))
    assert (finding.kind, finding.operation, finding.turns) == ("NaN", "log", ((2, 0),))


@pytest.mark.slow
def test_jax_debug_nans_raises_at_the_line_of_the_loss(mesh_of):
    """As the docstring says, a result that is NaN raises, in the per-device view too. A masked NaN
    does not.
    """
    opt = so.fsdp(optax.sgd(0.1), mesh_of(data=2), log_of_rows)
    masked = rows_with(x=(3, -1), mask=(3, False))
    with jax.debug_nans(True):
        assert np.isfinite(opt.evaluate(opt.init(PARAMS), masked)["loss"])
        state = opt.init(PARAMS)
        with pytest.raises(FloatingPointError) as error:
            opt.step(state, rows_with(x=(3, -1)))
        assert "log_of_rows" in [
            frame.name for frame in traceback.extract_tb(error.value.__traceback__)
        ]
        assert so.find_nan(opt, opt.init(PARAMS), rows_with(x=(3, -1))).operation == "log"


def test_replicas_that_train_apart_are_refused(mesh_of):
    opt = so.local_sgd(so.ddp(optax.sgd(0.1), mesh_of(replica=2), root), sync_every=2)
    state = opt.init({"w": np.ones(3, np.float32), "other": np.ones(())})
    with pytest.raises(ValueError, match="replicas of this strategy train apart") as error:
        so.find_nan(opt, state, np.ones((8, 3), np.float32))
    assert str(error.value).startswith("find_nan: ")


@pytest.mark.parametrize("rng", [None, "a key"])
def test_rows_that_weigh_nothing_are_a_finding(rng, mesh_of):
    """Each piece of the batch may weigh nothing, and the loss is finite; all pieces may not."""

    def weighted(params, batch, rng=None):
        return so.losses.Weighted(
            jnp.sum(batch["x"] * params["w"] * batch["weight"]), jnp.sum(batch["weight"])
        )

    loss_fn = weighted if rng else lambda params, batch: weighted(params, batch)
    opt = so.ddp(optax.sgd(0.1), mesh_of(data=2), loss_fn)
    state = opt.init({"w": np.ones((), np.float32)})
    batch = {"x": np.ones(4), "weight": np.array([0, 0, 0, 1.0])}
    assert so.find_nan(opt, state, batch) is None
    finding = so.find_nan(opt, state, batch | {"weight": np.zeros(4)})
    assert (finding.kind, finding.direction, finding.operation) == ("NaN", "forward", "div")
    assert "  operation: div, so.losses.Weighted: the total of all rows / their weight\n" in str(
        finding
    )


def row_mean(params, batch):
    x = batch * params["w"]
    return jnp.mean(jnp.sqrt(jax.lax.pmean(x.mean(), "data") + x))


def test_a_loss_may_name_an_axis(mesh_of):
    """The mean over devices is the mean of the whole batch: no device alone has this NaN."""
    opt = so.ddp(optax.sgd(0.1), mesh_of(data=2), row_mean, view="per_device")
    state = opt.init({"w": np.ones((), np.float32)})
    batch = np.array([9, 9, 1, -2], np.float32)
    assert so.find_nan(opt, state, batch) is None
    assert so.find_nan(opt, state, np.array([9, 9, 9, -9], np.float32)).operation == "sqrt"


def root_of_mean(params, batch, rng=None):
    return jnp.mean(batch * params["w"]) * jnp.sqrt(so.losses.batch_mean(batch))


@pytest.mark.parametrize("reads", ["batch_mean", "pmean"])
def test_a_key_and_the_rows_of_other_devices_are_refused(reads, mesh_of):
    """The rows of the second device alone give NaN, and the step does not."""
    loss_fn = (
        root_of_mean
        if reads == "batch_mean"
        else lambda params, batch, rng=None: row_mean(params, batch)
    )
    mesh = mesh_of(data=2)
    batch = np.array([9, 9, -1, -2], np.float32)
    opt = so.ddp(optax.sgd(0.1), mesh, loss_fn, view="per_device")
    state = opt.init({"w": np.ones((), np.float32)})
    with pytest.raises(ValueError, match="find_nan runs the rows of each device apart"):
        so.find_nan(opt, state, batch)
    if reads == "batch_mean":
        assert (
            so.find_nan(so.ddp(optax.sgd(0.1), mesh, loss_fn, view="global"), state, batch) is None
        )


def test_micro_batches_that_the_step_does_not_cut_are_not_cut(mesh_of):
    """This loss is no mean over rows, so the step runs it at once.

    A half of the rows would give NaN.
    """

    def loss_fn(params, batch, rng=None):
        return jnp.sqrt(jnp.mean(batch) * params["w"])

    opt = so.ddp(optax.sgd(0.1), mesh_of(data=2), loss_fn, view="global", micro_batches=2)
    state = opt.init({"w": np.ones((), np.float32)})
    assert so.find_nan(opt, state, np.array([9, -1, 9, -1], np.float32)) is None
