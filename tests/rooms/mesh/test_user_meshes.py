"""Meshes as users have them: other names, several axes a role, Explicit axes, whatever
`jax.set_mesh` says.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from support.compilations import compilations
from support.reference import relative_difference, train
from support.tiers import tiered

import shardopt as so

pytestmark = pytest.mark.fast

X = np.random.default_rng(0).normal(size=(3, 16, 4)).astype(np.float32)
PARAMS = {
    "up": jnp.asarray(X[0, :8].reshape(4, 8)),
    "down": jnp.asarray(X[1, :8].reshape(8, 4)),
    "bias": jnp.ones((4,)),
}
RULES = [("up", P(None, "tp")), ("down", P("tp"))]
NAMED = {"data": "dp", "tensor": "tp"}


def loss_fn(params, batch):
    x = jnp.tanh(batch @ params["up"]) @ params["down"] + params["bias"][None, :]
    return jnp.mean((x - batch) ** 2)


def mesh_of_kind(kind=AxisType.Auto, **sizes):
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


EXPLICIT = mesh_of_kind(AxisType.Explicit, dp=4, tp=2)
MERGED = mesh_of_kind(dp=2, fsdp=4)
ROWS = {  # mesh, axes, rules, set_mesh, the spec of up
    "explicit": (EXPLICIT, NAMED, RULES, None, P("dp", "tp")),
    "explicit, set": (EXPLICIT, NAMED, RULES, EXPLICIT, P("dp", "tp")),
    "explicit, another set": (EXPLICIT, NAMED, RULES, MERGED, P("dp", "tp")),
    "merged": (MERGED, {"data": ("dp", "fsdp")}, (), None, P(None, ("dp", "fsdp"))),
    "merged, another set": (
        MERGED,
        {"data": ["fsdp", "dp"]},
        (),
        EXPLICIT,
        P(None, ("dp", "fsdp")),
    ),
    "HSDP": (MERGED, {"replica": "dp", "data": "fsdp"}, (), MERGED, P(None, "fsdp")),
    "tensor outermost": (
        mesh_of_kind(AxisType.Explicit, tp=2, dp=4),
        NAMED,
        RULES,
        None,
        P("dp", "tp"),
    ),
    "size 1": (
        mesh_of_kind(AxisType.Explicit, dp=8, tp=1, x=1),
        NAMED,
        [("up", P("tp"))],
        None,
        P(None, "dp"),
    ),
    "our names, explicit": (
        mesh_of_kind(AxisType.Explicit, data=8),
        None,
        (),
        None,
        P(None, "data"),
    ),
    "our names": (so.make_mesh(), None, (), EXPLICIT, P(None, "data")),
}
QUICK = ("explicit, another set",)


def under(mesh):
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


@pytest.mark.parametrize("name", tiered(ROWS, quick=QUICK.__contains__))
def test_what_comes_back_lives_on_the_users_mesh(name):
    mesh, axes, rules, context, spec = ROWS[name]
    with under(context):
        opt = so.fsdp(
            optax.sgd(0.1, momentum=0.9),
            mesh if axes is None else so.Axes(mesh, **axes),
            loss_fn,
            rules=rules,
            min_shard_elements=8,
        )
        first = state = opt.init(PARAMS)
        history = []
        state, metrics = opt.step(state, X[0])
        history.append(float(metrics["loss"]))
        with compilations() as compiled:
            for batch in X[1:]:
                state, metrics = opt.step(state, batch)
                history.append(float(metrics["loss"]))
        assert compiled == []
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves((first.params, first.opt_state)))
        expected, params = train(optax.sgd(0.1, momentum=0.9), loss_fn, PARAMS, X)
        np.testing.assert_allclose(history, [loss for loss, _ in expected], rtol=1e-5)
        assert relative_difference(state.params, params) < 1e-5
        assert float(opt.evaluate(state, X[0])["loss"]) == pytest.approx(
            float(loss_fn(params, X[0])), rel=1e-5
        )

    assert opt.mesh is mesh
    assert opt.specs(PARAMS).params["up"] == state.params["up"].sharding.spec == spec
    for leaf, promised in zip(
        jax.tree.leaves(state), jax.tree.leaves(opt.abstract_state()), strict=True
    ):
        assert leaf.sharding == promised.sharding
    for leaf in jax.tree.leaves((state, metrics)):
        assert leaf.sharding.mesh == mesh
    with jax.set_mesh(mesh):
        norm = jax.jit(optax.tree.norm)(state.params)
        next_batch = jax.jit(lambda step: step + 1)(state.step)
    np.testing.assert_allclose(norm, optax.tree.norm(params), rtol=1e-5)
    assert int(next_batch) == 4


def test_a_state_moves_between_a_users_mesh_and_ours(tmp_path):
    tx = optax.sgd(0.1, momentum=0.9)
    user_opt = so.fsdp(tx, so.Axes(EXPLICIT, **NAMED), loss_fn, rules=RULES, min_shard_elements=8)
    ours = so.zero(tx, so.make_mesh(), loss_fn, stage=1, min_shard_elements=8)
    state, _ = user_opt.step(user_opt.init(PARAMS), X[0])
    so.save(tmp_path / "theirs", state)
    state, _ = ours.step(so.restore(tmp_path / "theirs", ours, abstract_params=PARAMS), X[1])
    so.save(tmp_path / "ours", state)
    with jax.set_mesh(MERGED):
        state, _ = user_opt.step(so.restore(tmp_path / "ours", user_opt), X[2])
    _, params = train(tx, loss_fn, PARAMS, X)
    assert relative_difference(state.params, params) < 1e-5
    assert {leaf.sharding.mesh for leaf in jax.tree.leaves(state)} == {EXPLICIT}


MODEL = so.BlockModel(
    embed=lambda outer, batch: jax.lax.with_sharding_constraint(batch @ outer["in"], P("dp", None)),
    block=lambda w, x: jax.lax.with_sharding_constraint(jnp.tanh(x @ w["kernel"]), P("dp", "tp")),
    loss=lambda outer, x, batch: jnp.mean((x @ outer["in"].T - batch) ** 2),
)
BLOCKS = {"blocks": {"kernel": jnp.ones((2, 8, 8)) / 8}, "in": jnp.eye(4, 8)}


def test_a_model_places_arrays_by_the_names_of_the_users_mesh():
    options = {"rules": [("kernel", P(None, "tp"))], "min_shard_elements": 8}
    opt = so.fsdp(optax.sgd(0.1), so.Axes(EXPLICIT, **NAMED), MODEL, view="global", **options)
    state, metrics = opt.step(opt.init(BLOCKS), X[0])
    with jax.set_mesh(mesh_of_kind(dp=4, tp=2)):
        assert float(metrics["loss"]) == pytest.approx(
            float(jax.jit(MODEL.loss_fn)(BLOCKS, X[0])), rel=1e-6
        )
    assert state.params["blocks"]["kernel"].sharding.spec == P(None, "dp", "tp")


@pytest.mark.slow
def test_replicas_that_train_apart_on_a_users_mesh():
    mesh = mesh_of_kind(AxisType.Explicit, islands=2, chips=4)

    def run(mesh, axes):
        base = so.zero(
            optax.sgd(0.1), so.Axes(mesh, **axes), loss_fn, stage=1, min_shard_elements=8
        )
        opt = so.local_sgd(base, sync_every=2)
        state = opt.init(PARAMS)
        for batch in X:
            state, metrics = opt.step(state, batch)
        return opt.synchronize(state), metrics

    with jax.set_mesh(mesh):
        state, metrics = run(mesh, {"replica": "islands", "data": "chips"})
    expected, same = run(so.make_mesh(replica=2), {})
    assert relative_difference(state.params, jax.device_get(expected.params)) < 1e-6
    assert float(metrics["loss"]) == pytest.approx(float(same["loss"]), rel=1e-6)
    assert state.opt_state.params.value["up"].sharding.spec == P("islands", None, None)


def strategy(mesh, axes):
    return so.ddp(optax.sgd(0.1), so.Axes(mesh, **axes), loss_fn)


def traced():
    opt = strategy(EXPLICIT, {"tensor": (), "data": ("dp", "tp")})
    jax.jit(opt.step)(opt.init(PARAMS), X[0])


REFUSED = [
    (
        lambda: strategy(EXPLICIT, {"data": 4}),
        TypeError,
        (
            "ddp: data of so.Axes must name mesh axes, got 4.\n"
            'Fix: write so.Axes(mesh, data="dp", tensor="tp"); several axes of one role as a tuple.'
        ),
    ),
    (
        lambda: strategy(EXPLICIT, {"data": "dp", "tensor": "mp"}),
        ValueError,
        (
            "ddp: tensor of so.Axes names 'mp', but the mesh has axes ('dp', 'tp').\nFix: name axes of"
            " the mesh."
        ),
    ),
    (
        lambda: strategy(EXPLICIT, {"data": ("dp", "tp"), "tensor": "tp"}),
        ValueError,
        (
            "ddp: mesh axis 'tp' has two roles: (('dp', 'tp'), 'tp', 'replica', 'pipeline',"
            " 'context', 'expert').\nFix: give each axis one role."
        ),
    ),
    (
        lambda: strategy(mesh_of_kind(a=2, tensor=2, b=2), {"data": ("a", "b")}),
        ValueError,
        (
            "ddp: the axes of data are not next to each other in the mesh {'a': 2, 'tensor': 2,"
            " 'b': 2}.\nFix: make the mesh with the axes of one role side by side."
        ),
    ),
    (
        traced,
        TypeError,
        (
            "ddp: this program cannot be traced into another one with arrays with Explicit axes.\n"
            "Fix: call it outside jit, where it is compiled already; or use a mesh with Auto axes "
            "('data', 'pipeline', 'tensor')."
        ),
    ),
]


@pytest.mark.parametrize("name", ["ï", "日", "a\\b", "a\nb"])
def test_a_name_that_ends_the_process_in_xla_is_refused(name):
    mesh = Mesh(np.array(jax.devices()), (name,))
    with pytest.raises(ValueError, match=r"^ddp: XLA cannot read these names of mesh axes: \["):
        so.ddp(optax.sgd(0.1), so.Axes(mesh, data=name), loss_fn)


@pytest.mark.parametrize(("call", "kind", "message"), REFUSED)
def test_bad_input_is_refused(call, kind, message):
    with pytest.raises(kind) as error:
        call()
    assert str(error.value) == message
