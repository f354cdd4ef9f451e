"""`opt.step.with_norms`: the norms of every leaf and layer equal one device, and cost one
all-reduce of their own.
"""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support.mean_of import mean_of
from support.reference import relative_difference
from support.table import STRATEGIES
from support.tiers import tiered

import shardopt as so

LAYERS = 4
WIDTH = 8
ROWS = 16
RULES = [("up", P(None, "tensor")), ("down", P("tensor"))]


def weighted(outer, x, batch):
    error = jnp.mean((x @ outer["out"] * outer["scale"] - batch["y"]) ** 2, -1)
    return so.losses.Weighted((error * batch["weights"]).sum(), batch["weights"].sum())


MODEL = so.BlockModel(
    embed=lambda outer, batch: batch["x"] @ outer["in"],
    block=lambda w, x: x + jnp.tanh(x @ w["up"]) @ w["down"] + w["bias"][None, :],
    loss=weighted,
)


def mixing(params, batch):
    """A loss that is no mean over rows; "blocks" is a list, so its leaves are not stacked."""
    x = jnp.tanh(batch["x"] @ params["in"])
    for w in params["blocks"]:
        x = x + jnp.tanh(x @ w["up"]) @ w["down"]
    x = (x - x.mean(0)[None, :]) / (1 + x.var(0))[None, :]
    return jnp.mean((x @ params["out"] * params["scale"] - batch["y"]) ** 2)


def parameters(model):
    draw = np.random.default_rng(0)
    blocks = {"up": (LAYERS, WIDTH, 16), "down": (LAYERS, 16, WIDTH), "bias": (LAYERS, WIDTH)}
    shapes = {"blocks": blocks, "in": (6, WIDTH), "out": (WIDTH, 3), "scale": ()}
    params = jax.tree.map(
        lambda shape: draw.normal(size=shape) * 0.3, shapes, is_leaf=lambda x: isinstance(x, tuple)
    )
    if model is mixing:
        params["blocks"] = [jax.tree.map(lambda x: x[i], params["blocks"]) for i in range(LAYERS)]  # noqa: B023
    return jax.tree.map(np.asarray, params)


def batches():
    draw = np.random.default_rng(1)
    scale = np.linspace(0.2, 2, ROWS)[:, None]
    for _ in range(2):
        rows = {"x": scale * draw.normal(size=(ROWS, 6)), "y": draw.normal(size=(ROWS, 3))}
        yield jax.tree.map(np.asarray, rows | {"weights": np.linspace(0, 2, ROWS)})


def adam():
    return optax.chain(optax.clip_by_global_norm(0.3), optax.adamw(1e-2, eps=1e-4))


def muon():
    dims = optax.contrib.MuonDimensionNumbers((1,), (2,))

    def is_matrix(params):
        return jax.tree.map(lambda x: dims if x.ndim == 3 else None, params)

    return optax.contrib.muon(1e-2, muon_weight_dimension_numbers=is_matrix)


PIPELINE = {"data": 2, "tensor": 2, "pipeline": 2}
HYBRID = {"micro_batches": 2, "min_shard_elements": 8}
CASES = {
    "ddp": ("ddp", {"data": 4, "replica": 2}, adam, {"micro_batches": 2}),
    "zero1 and a frozen leaf": ("zero1", {"data": 8}, adam, {"rules": [("^in$", "frozen")]}),
    "zero2 and tensor": (
        "zero2",
        {"data": 4, "tensor": 2},
        adam,
        {"micro_batches": 2, "rules": RULES},
    ),
    "fsdp of matrices": ("fsdp", {"data": 4}, muon, {"opt_state": "matrices"}),
    "fsdp in the global view": ("fsdp", {"data": 8}, adam, {"view": "global"}),
    "pipeline": ("hybrid", PIPELINE, adam, HYBRID | {"placement": "fsdp", "rules": RULES}),
    "pipeline of matrices": (
        "hybrid",
        {"data": 2, "pipeline": 2},
        muon,
        HYBRID | {"opt_state": "matrices"},
    ),
    "uneven pipeline": (
        "hybrid",
        {"data": 2, "pipeline": 2},
        adam,
        HYBRID | {"blocks_per_stage": [3, 1]},
    ),
}


def expected_norms(tx, model, frozen):
    """Return for each step the norms of plain jax and optax on the whole batch, and the last
    parameters.
    """

    def loss_fn(params, batch):
        loss = (
            model.loss_fn(params, batch)
            if isinstance(model, so.BlockModel)
            else model(params, batch)
        )
        return mean_of(loss)

    def norms(tree):
        def is_stacked(path):
            return isinstance(model, so.BlockModel) and path[0].key == "blocks"

        def norm(path, x):
            return jnp.sqrt(jnp.sum(x**2, tuple(range(is_stacked(path), x.ndim))))

        return jax.tree_util.tree_map_with_path(norm, tree)

    @jax.jit
    def step(params, opt_state, batch):
        trained = {name: None if name in frozen else leaf for name, leaf in params.items()}
        fixed = {name: params[name] for name in frozen}
        gradients = jax.grad(lambda trained: loss_fn(trained | fixed, batch))(trained)
        updates, opt_state = tx.update(gradients, opt_state, trained)
        new_params = optax.apply_updates(trained, updates) | fixed
        return new_params, opt_state, [norms(tree) for tree in (gradients, updates, trained)]

    params = parameters(model)
    results = []
    opt_state = tx.init({name: None if name in frozen else leaf for name, leaf in params.items()})
    for batch in batches():
        params, opt_state, of_step = step(params, opt_state, batch)
        results.append(
            [
                {_path(path): x for path, x in jax.tree_util.tree_leaves_with_path(t)}
                for t in of_step
            ]
        )
    return results, params


def _path(path):
    return jax.tree_util.keystr(path, simple=True, separator="/")


def make(case, mesh_of):
    strategy, mesh, tx, options = CASES[case]
    model = mixing if "global" in case else MODEL
    strategy = so.hybrid if strategy == "hybrid" else STRATEGIES[strategy]
    return strategy(tx(), mesh_of(**mesh), model, **options), model


QUICK = ("ddp",)


@pytest.mark.parametrize(
    "case", tiered(CASES, lambda case: case in QUICK, fast=lambda case: case == "ddp")
)
def test_norms_equal_one_device(case, mesh_of, x64):
    opt, model = make(case, mesh_of)
    frozen = ["in"] if "frozen" in case else []
    results, params = expected_norms(opt.wrapped, model, frozen)
    state = opt.init(parameters(model))
    for batch, expected in zip(batches(), results, strict=True):
        state, metrics, norms = opt.step.with_norms(state, batch)
        for measured, of_one in zip(
            (norms.gradients, norms.updates, norms.params), expected, strict=True
        ):
            assert measured.keys() == of_one.keys()
            for path in measured:
                assert measured[path].shape == of_one[path].shape
                np.testing.assert_allclose(
                    measured[path], of_one[path], rtol=1e-9, atol=1e-13, err_msg=path
                )
        squares = sum(float((norm**2).sum()) for norm in norms.gradients.values())
        np.testing.assert_allclose(metrics["grad_norm"], squares**0.5, rtol=1e-9)
    assert relative_difference(state.params, params) <= 1e-9


@pytest.mark.parametrize(
    "case", tiered(["fsdp of matrices", "pipeline", "ddp"], lambda case: case == "ddp")
)
def test_norms_travel_in_one_all_reduce(case, mesh_of, x64):
    """One all-reduce sends a further number for each leaf, layer and norm.

    XLA may join it with the one of the loss.
    """
    opt, model = make(case, mesh_of)
    state = opt.abstract_state(jax.eval_shape(lambda: parameters(model)))
    batch = next(batches())

    def arrays(step):
        """Return the arrays of all collectives, and of the all-reduces over the whole mesh how many
        there are.
        """
        collectives = so.hlo.audit(step, state, batch).collectives
        shapes = Counter(
            (collective.kind, collective.axes or (), shape)
            for collective in collectives
            for shape in collective.shapes
        )
        return shapes, sum(
            collective.kind == "all-reduce" and collective.group_size == opt.mesh.size
            for collective in collectives
        )

    (with_norms, count), (without, count_without) = arrays(opt.step.with_norms), arrays(opt.step)
    axes = tuple(axis for axis, size in opt.mesh.shape.items() if size > 1)
    assert with_norms - without == Counter([("all-reduce", axes, f"f64[{3 * (3 * LAYERS + 3)}]")])
    assert not without - with_norms
    assert count - count_without <= 1


def test_replicas_that_train_apart_are_refused(mesh_of):
    opt = so.local_sgd(so.ddp(optax.sgd(0.1), mesh_of(replica=2), MODEL), sync_every=2)
    state = opt.init(parameters(MODEL))
    with pytest.raises(ValueError, match="train apart") as error:
        opt.step.with_norms(state, next(batches()))
    assert (
        str(error.value)
        == "local_sgd: the replicas train apart, each with gradients of its own, so there are no"
        " norms of all of them.\nFix: use step, or the norms of the strategy inside."
    )
