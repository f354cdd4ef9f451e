"""What `audit` and `memory` take and refuse."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardopt as so
from shardopt.hlo import audit, memory

pytestmark = pytest.mark.fast

X = jnp.ones((8, 16))


@pytest.fixture
def program():
    mesh = so.make_mesh(data=4, tensor=2)
    return jax.jit(
        jax.shard_map(lambda x: lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
    )


def refused(kind, message):
    return pytest.raises(kind, match=f"^{re.escape(message)}$")


def test_a_mesh_is_asked_for_where_none_can_be_found(program):
    message = (
        "audit: cannot tell the mesh of this program on 8 devices, none of its inputs has one.\n"
        "Fix: pass mesh=, the mesh it was compiled for."
    )
    with refused(ValueError, message):
        audit(program.lower(X).compile().as_text())


def test_a_mesh_of_another_size_is_refused(program):
    message = (
        "audit: the mesh (data=2, tensor=2) has 4 devices, the program 8.\n"
        "Fix: pass the mesh that the program was compiled for."
    )
    with refused(ValueError, message):
        audit(program, X, mesh={"data": 2, "tensor": 2})


def test_a_mesh_in_another_order_is_refused(program):
    mesh = so.make_mesh(data=4, tensor=2)
    reversed_mesh = Mesh(mesh.devices[::-1], mesh.axis_names)
    message = (
        "audit: the mesh lists its devices as [6, 7, 4, 5, 2, 3, 0, 1], the program was compiled"
        " for the order [0, 1, 2, 3, 4, 5, 6, 7].\nFix: pass the mesh that the program was compiled"
        " for."
    )
    with refused(ValueError, message):
        audit(program, X, mesh=reversed_mesh)


def test_meshes_may_be_abstract_or_mappings(program):
    mesh = so.make_mesh(data=4, tensor=2)
    for mesh_form in (mesh, mesh.abstract_mesh, {"data": 4, "tensor": 2}):
        assert audit(program, X, mesh=mesh_form).collectives[0].axes == ("data",)


def test_abstract_arguments_without_shardings_are_refused(mesh_of):
    """jax would compile for one device, and a table without collectives would look like good news."""
    mesh = mesh_of(data=8)
    grads = jax.jit(jax.grad(lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)))
    params = {"w": jax.ShapeDtypeStruct((8, 4), jnp.float32)}
    rows = jax.ShapeDtypeStruct((16, 8), jnp.bfloat16)
    message = (
        "audit: these arguments have no shardings, so the program would be for one device, and send"
        " nothing.\n  argument 0/w: float32[8, 4]\n  argument 1: bfloat16[16, 8]\nFix: pass"
        " jax.ShapeDtypeStruct(shape, dtype, sharding=...), as in opt.abstract_state(); or"
        " jitted.lower(...), if one device is meant."
    )
    for named in (None, mesh):
        with refused(ValueError, message):
            audit(grads, params, rows, mesh=named)
    assert audit(grads.lower(params, rows)).collectives == ()
    split = NamedSharding(mesh, P("data"))
    report = audit(grads, params, jax.ShapeDtypeStruct((16, 8), jnp.bfloat16, sharding=split))
    assert {collective.axes for collective in report.collectives} == {("data",)}


def test_shardings_may_be_those_of_the_program(program):
    assert audit(program, jax.ShapeDtypeStruct((8, 16), jnp.float32)).collectives[0].axes == (
        "data",
    )


def test_strange_programs_are_refused(program):
    fix = (
        "Fix: pass a jitted function with its arguments, such as opt.step, a Lowered, a Compiled,"
        " or HLO text."
    )
    with refused(TypeError, f"audit: cannot audit a int.\n{fix}"):
        audit(3)
    with refused(TypeError, f"audit: cannot audit a function.\n{fix}"):
        audit(lambda x: x)
    with refused(TypeError, f"audit: cannot audit a tuple.\n{fix}"):
        audit((program,), X)
    fix = "Fix: pass the arguments of the function too: so.hlo.audit(opt.step, state, batch)."
    opt = so.ddp(
        optax.sgd(0.1), so.make_mesh(data=8), lambda params, batch: jnp.mean(batch @ params)
    )
    with refused(TypeError, f"audit: missing a required argument: 'state'.\n{fix}"):
        audit(opt.step)
    message = (
        "audit: arguments belong to a function, not to a Compiled, which is lowered already.\nFix:"
        " leave them out."
    )
    with refused(TypeError, message):
        audit(program.lower(X).compile(), X)
    fix = (
        "Fix: pass opt.config.schedule, or one of so.schedules made for these stages and"
        " micro-batches."
    )
    with refused(TypeError, f"audit: schedule must be a Schedule, got 'gpipe'.\n{fix}"):
        audit(program, X, schedule="gpipe")


def test_memory_counts_the_bytes_of_one_device(mesh_of):
    opt = so.ddp(
        optax.sgd(0.1), mesh_of(data=8), lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
    )
    state = opt.init({"w": jnp.ones((64, 64))})
    compiled = opt.step.lower(state, jnp.ones((16, 64))).compile()
    usage = memory(compiled)
    weights = 64 * 64 * 4
    batch = 2 * 64 * 4
    small = 64
    assert weights + batch <= usage.arguments <= weights + batch + small
    assert weights <= usage.aliased <= usage.outputs <= weights + small
    assert usage.peak == usage.arguments + usage.temporary + usage.outputs - usage.aliased
