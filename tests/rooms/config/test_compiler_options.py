"""Strategies compile with the options that the mesh asks for, or with the user's."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardopt as so


def loss_fn(params, batch):
    return jnp.mean((batch @ params) ** 2)


@pytest.mark.parametrize("program", ["init", "step", "evaluate"])
def test_the_users_options_reach_the_compiler(program, mesh_of):
    mesh = mesh_of(data=8)
    rows = np.ones((8, 4), np.float32)
    state = so.ddp(optax.sgd(0.1), mesh, loss_fn).init(jnp.ones(4))
    opt = so.ddp(optax.sgd(0.1), mesh, loss_fn, compiler_options={"no_such_option": True})
    args = (jnp.ones(4),) if program == "init" else (state, rows)
    with pytest.raises(Exception, match="no_such_option"):
        getattr(opt, program)(*args)


def test_options_are_a_dict(mesh_of):
    with pytest.raises(TypeError) as caught:
        so.fsdp(optax.sgd(0.1), mesh_of(data=8), loss_fn, compiler_options=["xla_something"])
    assert (
        str(caught.value)
        == "fsdp: compiler_options must be a dict of option name to value, got list.\n"
        "Fix: start from so.runtime.compiler_options(mesh)."
    )


@pytest.mark.parametrize(
    ("kind", "offloads", "vmem_mib"),
    [
        ("TPU v5", True, 48),
        ("TPU v6 lite", True, 96),
        ("TPU7x", True, None),
        ("TPU v5 lite", False, 48),
        ("cpu", False, None),
    ],
)
def test_each_chip_gets_the_options_of_its_kind(kind, offloads, vmem_mib):
    devices = np.array([types.SimpleNamespace(device_kind=kind)])
    options = so.runtime.compiler_options(
        types.SimpleNamespace(devices=devices, shape={"data": devices.size})
    )
    has_options = jax.__version_info__ >= (0, 11)
    assert any("sparse_core" in name for name in options) is (offloads and has_options)
    vmem = {name: value for name, value in options.items() if "vmem" in name}
    assert vmem == (
        {"xla_tpu_scoped_vmem_limit_kib": vmem_mib * 1024} if vmem_mib and has_options else {}
    )


@pytest.mark.parametrize(
    ("kind", "tensor", "is_told"), [("TPU v5", 4, True), ("TPU v5", 1, False), ("cpu", 4, False)]
)
def test_what_tensor_sends_stays_whole_on_tpu(kind, tensor, is_told):
    devices = np.array([types.SimpleNamespace(device_kind=kind)] * 4)
    options = so.runtime.compiler_options(
        types.SimpleNamespace(devices=devices, shape={"data": 4 // tensor, "tensor": tensor})
    )
    assert any("windowed_einsum" in name for name in options) is (
        is_told and jax.__version_info__ >= (0, 11)
    )


@pytest.mark.parametrize(("chips", "scattered"), [(2048, True), (4096, False)])
def test_what_the_compiler_dies_of_is_left_out(chips, scattered):
    """so.planning.aot of a pod of v5p:16x16x16 ended in SIGFPE."""
    devices = np.array([types.SimpleNamespace(device_kind="TPU v5")] * chips)
    options = so.runtime.compiler_options(
        types.SimpleNamespace(devices=devices, shape={"data": devices.size})
    )
    has_options = jax.__version_info__ >= (0, 11)
    assert any("nd_reduce_scatter" in name for name in options) is (scattered and has_options)
    assert any("offload_reduce_scatter" in name for name in options) is has_options
