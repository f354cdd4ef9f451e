"""A strategy in another process: cloudpickle sends the call that made it, and the mesh is made of
the devices there.
"""

import copy
import functools
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.paths import ROOT
from support.table import MESHES, STRATEGIES

import shardopt as so
from shardopt.config import _recipe
from shardopt.config._config import ZERO_3, configure
from shardopt.step._build import build
from shardopt.strategies._slots import own_slots

RULES = [("w", jax.P(None, "tensor"))]


def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch @ params["w"]).sum(-1) - 1.0) ** 2)


def block_model():
    return so.BlockModel(
        embed=lambda outer, batch: batch @ outer["w"],
        block=lambda weights, x: x + x @ weights["k"],
        loss=lambda outer, x, batch: jnp.mean(x**2),
    )


def constrained(mesh):
    """Return a loss that closes over a mesh, for a sharding constraint."""

    def loss_on_mesh(params, batch):
        hidden = jnp.tanh(batch @ params["w"])
        sharding = jax.sharding.NamedSharding(mesh, jax.P(None, "tensor"))
        hidden = jax.lax.with_sharding_constraint(hidden, sharding)
        return jnp.mean((hidden.sum(-1) - 1.0) ** 2)

    return loss_on_mesh


class LossWithDevice:
    """A loss that is an object, with a device and a sharding."""

    def __init__(self, mesh):
        self.device = mesh.devices.flat[0]
        self.sharding = jax.sharding.NamedSharding(mesh, jax.P("data"))

    def __call__(self, params, batch):
        return loss_fn(params, batch)


def sent(opt):
    return cloudpickle.loads(cloudpickle.dumps(opt))


def params_of(opt):
    w = np.linspace(-1, 1, 256, dtype=np.float32).reshape(16, 16)
    is_pipeline = opt.config.strategy == "hybrid"
    return {"w": w, "blocks": {"k": np.zeros((4, 16, 16), np.float32)}} if is_pipeline else {"w": w}


@pytest.mark.fast
@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_that_was_sent_places_all_leaves_as_before(mesh_of, name, sizes):
    rules = RULES if sizes.get("tensor", 1) > 1 else []
    opt = STRATEGIES[name](optax.adamw(0.1), mesh_of(**sizes), loss_fn, rules=rules)
    received_opt = sent(opt)
    assert received_opt is not opt
    assert received_opt.mesh == opt.mesh
    abstract = {"w": jax.ShapeDtypeStruct((16, 16), jnp.float32)}
    assert received_opt.specs(abstract) == opt.specs(abstract)


@pytest.mark.fast
@pytest.mark.parametrize("holder", ["closure", "partial", "object", "optimizer"])
def test_a_mesh_that_a_loss_or_an_optimizer_holds_is_sent_too(mesh_of, holder):
    mesh = mesh_of(data=4, tensor=2)
    tx = optax.adam(0.1)
    loss = constrained(mesh)
    if holder == "partial":
        loss = functools.partial(lambda params, batch, mesh: loss_fn(params, batch), mesh=mesh)
    if holder == "object":
        loss = LossWithDevice(mesh)
    if holder == "optimizer":
        tx = so.transforms.zero(tx, "data", mesh)
    received_opt = sent(so.fsdp(tx, mesh, loss, rules=RULES))
    assert received_opt.mesh == mesh
    if holder == "object":
        assert received_opt.config.loss.loss_fn.device is mesh.devices.flat[0]
        assert received_opt.config.loss.loss_fn.sharding.mesh == mesh


@pytest.mark.fast
def test_a_device_that_is_not_there_is_named(mesh_of, devices_there):
    text = cloudpickle.dumps(
        so.ddp(optax.adam(0.1), mesh_of(data=2), LossWithDevice(mesh_of(data=8)))
    )
    devices_there(jax.devices()[1:])
    with pytest.raises(ValueError, match="holds device cpu:0, which this job has not"):
        cloudpickle.loads(text)


def all_kinds(make_mesh):
    """Yield (name, strategy) of every kind of strategy, on meshes of all devices."""
    adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))
    yield "fsdp", so.fsdp(adam, make_mesh(), loss_fn, min_shard_elements=1)
    yield (
        "tensor and keywords",
        so.zero(tx=adam, mesh=make_mesh(tensor=2), loss_fn=loss_fn, rules=RULES),
    )
    yield (
        "reducer",
        so.ddp(adam, make_mesh(), loss_fn, reducer=so.reducers.error_feedback(so.reducers.int8())),
    )
    mesh = make_mesh(tensor=2)
    yield "a loss with a mesh", so.fsdp(adam, mesh, constrained(mesh), rules=RULES)
    yield "diloco", so.diloco(so.ddp(adam, make_mesh(replica=2), loss_fn), sync_every=2)
    yield "hybrid", so.hybrid(adam, make_mesh(pipeline=2), block_model(), micro_batches=2)
    shape = (jax.device_count() // 2, 2)
    own_mesh = jax.make_mesh(shape, ("dp", "tp"))
    rules = [("w", jax.P(None, "tp"))]
    yield "own mesh", so.fsdp(adam, so.Axes(own_mesh, data="dp", tensor="tp"), loss_fn, rules=rules)


@pytest.mark.parametrize(
    "num_devices",
    [pytest.param(count, marks=pytest.mark.slow) for count in (4, 8, 16)],
)
def test_a_process_with_other_devices_trains_what_it_was_sent(tmp_path, num_devices):
    batch = np.linspace(0, 1, 32 * 16, dtype=np.float32).reshape(32, 16)
    kinds = dict(all_kinds(so.make_mesh))
    states = {name: opt.init(params_of(opt)) for name, opt in kinds.items()}
    # a reducer rounds the gradient of each device
    names = [name for name in kinds if num_devices == 8 or name != "reducer"]
    rows = [(name, kinds[name], params_of(kinds[name]), batch) for name in names]
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as a script's __main__ is
    (tmp_path / "sent").write_bytes(cloudpickle.dumps(rows))
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    worker = Path(__file__).with_name("worker_unpickles.py")
    command = [sys.executable, worker, str(num_devices), tmp_path / "sent", tmp_path / "result"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    finished = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    results = json.loads((tmp_path / "result").read_text())
    for name in names:
        sizes, losses, is_placed = results[name]
        state = states[name]
        expected = []
        for _ in range(3):
            state, metrics = kinds[name].step(state, batch)
            expected.append(float(metrics["loss"]))
        np.testing.assert_allclose(losses, expected, rtol=1e-4, err_msg=name)
        data_axis = "dp" if name == "own mesh" else "data"
        factor = num_devices / 8
        wanted = {
            axis: size * factor if axis == data_axis else size
            for axis, size in kinds[name].mesh.shape.items()
        }
        assert (sizes, is_placed) == (wanted, "True")


@pytest.mark.fast
def test_copies_are_the_strategy_itself(mesh_of):
    opt = so.fsdp(optax.adam(0.1), mesh_of(data=2), loss_fn)
    assert copy.copy(opt) is opt
    assert copy.deepcopy(opt) is opt
    assert copy.deepcopy({"runs": [opt]})["runs"][0] is opt


@pytest.mark.fast
@pytest.mark.parametrize("name", ["fsdp", "diloco"])
def test_pickle_refuses_with_the_remedy(mesh_of, name):
    opt = so.fsdp(optax.adam(0.1), mesh_of(replica=2, data=2), loss_fn)
    if name == "diloco":
        opt = so.diloco(opt)
    remedy = (
        f"so.{name}: pickle cannot send the functions of an optax optimizer. Fix: use"
        r" cloudpickle.dumps\(opt\), or make the strategy in the other process"
    )
    with pytest.raises(pickle.PicklingError, match=remedy):
        pickle.dumps(opt)


@pytest.mark.fast
@pytest.mark.parametrize(
    "function", ["init", "step", "step.with_norms", "evaluate", "specs", "config.report"]
)
def test_a_function_of_a_strategy_is_refused_with_the_remedy(mesh_of, function):
    opt = so.fsdp(optax.adam(0.1), mesh_of(data=2), loss_fn)
    value = opt
    for part in function.split("."):
        value = getattr(value, part)
    with pytest.raises(TypeError, match=r"Fix: send the strategy, opt, and call its function"):
        cloudpickle.dumps(value)


@pytest.mark.fast
def test_a_strategy_of_an_unknown_call_is_refused(mesh_of):
    config = configure("mine", optax.sgd(0.1), mesh_of(data=2), loss_fn, ZERO_3, {})
    with pytest.raises(TypeError) as refused:
        cloudpickle.dumps(build(config, own_slots))
    assert str(refused.value) == (
        "mine: it is unknown how this strategy was made, so another process cannot make it.\nFix:"
        " send the optimizer and the loss, and make the strategy there."
    )


@pytest.fixture
def devices_there(monkeypatch):
    """Return a function that sets the devices of the process that unpickles."""

    def set_devices(devices):
        monkeypatch.setattr(_recipe.jax, "devices", lambda platform=None: list(devices))

    return set_devices


@pytest.mark.fast
@pytest.mark.parametrize(
    ("sizes", "num_here", "num_there", "wanted"),
    [
        ({"data": 8}, 8, 3, {"data": 3}),
        ({"data": 4, "tensor": 2}, 8, 6, {"data": 3, "tensor": 2}),
        ({"data": 4, "tensor": 2}, 8, 3, None),  # an odd number of devices
        ({"data": 2, "tensor": 4}, 8, 2, None),  # fewer than tensor
        ({"data": 2}, 8, 4, {"data": 2}),  # a part of the devices stays a part
        ({"data": 4}, 8, 2, None),
        ({"replica": 2, "data": 2}, 4, 8, {"replica": 2, "data": 4}),  # replicas are the algorithm
    ],
    ids=str,
)
def test_the_mesh_of_other_devices_has_the_wanted_axes_or_is_refused(
    mesh_of, devices_there, sizes, num_here, num_there, wanted
):
    all_devices = jax.devices()
    devices_there(all_devices[:num_here])
    mesh_here = mesh_of(**sizes)
    shape = _recipe._mesh_shape(mesh_here, ["data"])
    devices_there(all_devices[8 - num_there :])
    if wanted is None:
        with pytest.raises(ValueError, match=f"and this process has {num_there}"):
            shape.build()
        return
    mesh = shape.build()
    assert {axis: size for axis, size in mesh.shape.items() if size > 1} == wanted
    assert mesh.axis_names == mesh_here.axis_names


@pytest.mark.fast
def test_the_same_devices_keep_their_places_and_the_types_of_axes(mesh_of):
    devices = np.array(jax.devices())[[3, 1, 0, 2]].reshape(2, 2)
    types = (jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto)
    mesh = jax.sharding.Mesh(devices, ("data", "tensor"), axis_types=types)
    assert _recipe._mesh_shape(mesh, ["data"]).build() == mesh


@pytest.mark.fast
def test_devices_of_another_kind_are_arranged_anew(devices_there, mesh_of):
    shape = _recipe._mesh_shape(mesh_of(data=4, tensor=2), ["data"])
    fields = {"platform": "gpu", "device_kind": "H200", "process_index": 0}
    foreign_devices = [SimpleNamespace(id=7 - i, **fields) for i in range(8)]
    devices_there(foreign_devices)
    seen_grids = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_recipe, "Mesh", lambda grid, *_, **__: seen_grids.append(grid))
        shape.build()
    assert [device.id for device in seen_grids[0].flat] == list(range(8))
