"""Every strategy on a mesh of the user's own, with other axis names, in each view of the loss.

A step there equals a step on the mesh of `so.make_mesh` with the same devices, which other contract
tests compare with one device. A row is slow unless it has a value of a factor that no other has.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec
from support.pairwise import all_pairs, few
from support.reference import relative_difference
from support.table import STRATEGIES
from support.tiers import tiered

import shardopt as so


def explicit(**sizes):
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes))


def automatic(**sizes):
    grid = np.array(jax.devices()[:8]).reshape(tuple(sizes.values()))
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


MESHES = {  # the user's mesh and the roles of its axes, and the mesh of our names
    "one axis": (lambda: so.Axes(explicit(dp=8), data="dp"), {"data": 8}),
    "one Auto axis": (lambda: so.Axes(automatic(batch=8), data="batch"), {"data": 8}),
    "tensor": (
        lambda: so.Axes(explicit(dp=4, mp=2), data="dp", tensor="mp"),
        {"data": 4, "tensor": 2},
    ),
    "two axes of data": (lambda: so.Axes(explicit(a=2, b=4), data=("a", "b")), {"data": 8}),
    "replica": (
        lambda: so.Axes(automatic(hosts=2, chips=4), replica="hosts", data="chips"),
        {"replica": 2, "data": 4},
    ),
}
RANDOM = np.random.default_rng(0)
PARAMS = {
    "w": RANDOM.normal(size=(16, 8)).astype(np.float32),
    "b": np.zeros(8, np.float32),
    "mean": np.zeros(8, np.float32),
    "key": jax.random.key(3),
}
BATCH = {
    "x": RANDOM.normal(size=(32, 16)).astype(np.float32),
    "y": RANDOM.normal(size=(32, 8)).astype(np.float32),
}


def squares(params, batch, rng):
    x = batch["x"]
    if rng is not None:
        x = jnp.where(jax.random.bernoulli(rng, 0.7, x.shape), x, 0)
    return (x @ params["w"] + params["b"][None] - batch["y"]) ** 2


def dropout(params, batch, rng=None):
    return squares(params, batch, rng).mean()


def running_mean(params, batch, rng=None):
    """A mean over rows, and statistics as of a BatchNorm that is not applied."""
    x = batch["x"] @ params["w"]
    statistics = {"mean": 0.9 * params["mean"] + 0.1 * x.mean(0)}
    return squares(params, batch, rng).mean(), {"statistics": so.losses.Updated(statistics)}


def next_key(params, batch, rng=None):
    """Its random numbers come from a key among the parameters, which the loss replaces."""
    key, subkey = jax.random.split(params["key"])
    noise = jax.random.normal(subkey, (8,))
    return squares(params, batch, rng).mean() + (noise * params["b"]).mean(), {
        "keys": so.losses.Updated({"key": key})
    }


def two_terms(params, batch, rng=None):
    errors = squares(params, batch, rng).mean(1)
    weights = jnp.abs(batch["y"][:, 0])
    rows = jnp.float32(len(errors))
    return so.losses.Weighted(((errors * weights).sum(), errors.sum()), (weights.sum(), rows))


LOSSES = {loss.__name__: loss for loss in (dropout, running_mean, next_key, two_terms)}
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(0.01),
    "line search": lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(max_backtracking_steps=3)
    ),
}
FACTORS = {
    "mesh": list(MESHES),
    "view": ["auto", "global"],
    "strategy": list(STRATEGIES),
    "loss": list(LOSSES),
    "micro_batches": [1, 2],
    "optimizer": list(OPTIMIZERS),
}
ROWS = all_pairs(FACTORS)
DEFAULT = few(sorted(ROWS, key=lambda row: row["optimizer"] == "line search"))
"""One of them searches a line, where a step compiles the loss three times."""


def row_id(row):
    return "-".join(str(value).replace(" ", "_") for value in row.values())


def trained(row, mesh, tensor, *, evaluates=True):
    rules = [("^mean$", "frozen"), ("^key$", "frozen")]
    if row["mesh"] == "tensor":
        rules.append(("^w$", PartitionSpec(None, tensor)))
    opt = STRATEGIES[row["strategy"]](
        OPTIMIZERS[row["optimizer"]](),
        mesh,
        LOSSES[row["loss"]],
        view=row["view"],
        micro_batches=row["micro_batches"],
        rules=rules,
    )
    state = opt.init(PARAMS, jax.random.key(1))
    for _ in range(2):
        state, metrics = opt.step(state, BATCH)
    evaluated = opt.evaluate(state, BATCH) if evaluates else {}
    params = {**state.params, "key": jax.random.key_data(state.params["key"])}
    return jax.device_get((params, metrics, evaluated))


# random numbers of whole rows are not proved to be cut, so that micro-batches run at once
@pytest.mark.filterwarnings("ignore:.*the whole batch runs at once")
@pytest.mark.filterwarnings("ignore:.*runs in the global view")
@pytest.mark.parametrize("row", tiered(ROWS, lambda row: row in DEFAULT, ids=row_id))
def test_a_step_on_an_own_mesh_equals_the_step_on_ours(row, mesh_of):
    own_axes, ours = MESHES[row["mesh"]]
    params, metrics, evaluated = trained(row, own_axes(), "mp")
    our_params, our_metrics, our_evaluated = trained(row, mesh_of(**ours), "tensor")
    assert relative_difference(params, our_params) < 1e-6
    np.testing.assert_allclose(metrics["loss"], our_metrics["loss"], rtol=1e-6)
    np.testing.assert_allclose(
        jax.tree.leaves(evaluated), jax.tree.leaves(our_evaluated), rtol=1e-6
    )


OF_THE_PROGRAM = {
    "explicit": explicit(other=8),
    "automatic": automatic(a=2, b=4),
    "one device": jax.make_mesh((1,), ("x",), devices=jax.devices()[:1]),
}


@functools.cache
def trained_by_fsdp(sizes, loss, view):
    """Return parameters that were trained where no mesh is set."""
    return trained_on_some_devices(sizes, loss, view)


def trained_on_some_devices(sizes, loss, view):
    row = {"mesh": "", "strategy": "fsdp", "loss": loss, "view": view, "micro_batches": 1}
    row["optimizer"] = "adamw"
    mesh = so.make_mesh(**dict(sizes), devices=jax.devices()[:4])
    params, *_ = trained(row, mesh, "tensor", evaluates=False)
    return params


# Each view meets a mesh of Explicit axes; a mesh of Auto axes, or of one device, one view.
@pytest.mark.parametrize(
    ("set_for_the_program", "loss", "view"),
    [
        ("explicit", "dropout", "auto"),
        ("one device", "dropout", "auto"),
        ("explicit", "next_key", "global"),
        ("automatic", "next_key", "global"),
    ],
)
def test_a_step_on_some_devices_works_where_a_mesh_of_others_is_set(
    set_for_the_program, loss, view
):
    sizes = (("replica", 2), ("data", 2)) if view == "auto" else (("data", 4),)
    expected = trained_by_fsdp(sizes, loss, view)
    with jax.set_mesh(OF_THE_PROGRAM[set_for_the_program]):
        params = trained_on_some_devices(sizes, loss, view)
    assert relative_difference(params, expected) < 1e-6
