"""A mixture of experts by the real TPU compiler: flops of the active experts alone, bytes of the exchanges as stated."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import shardopt as so
from shardopt.planning import topology_devices

pytestmark = pytest.mark.slow

LENGTH, WIDTH, HIDDEN, EXPERTS, TOP_K = 2048, 512, 1024, 8, 2
ROWS = LENGTH * TOP_K


def compiled(topology, expert, **how):
    """Compile the gradient of a mixture of bfloat16, one row on each device."""
    devices = topology_devices(topology)
    data = len(devices) // expert
    grid = so.make_mesh(data=data, tensor=expert, devices=devices).devices.reshape(data, expert)
    mesh = Mesh(grid, ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
    every, of_expert = PartitionSpec(("data", "expert")), PartitionSpec("expert" if expert > 1 else None)

    def loss(weights, x, router):
        y, _ = so.nn.mixture_of_experts(weights, x, router, top_k=TOP_K, **how)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    def gradients(*args):
        weights, x, router = jax.grad(loss, (0, 1, 2))(*args)
        return weights, x, router[None]

    shapes = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    of = lambda shape, spec: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))  # noqa: E731
    weights = {name: of((EXPERTS, *shape), of_expert) for name, shape in shapes.items()}
    args = weights, of((len(devices), LENGTH, WIDTH), every), of((WIDTH, EXPERTS), PartitionSpec())
    specs = of_expert, every, PartitionSpec()
    step = jax.shard_map(gradients, mesh=mesh, in_specs=specs, out_specs=(every, every, every), check_vma=False)
    return jax.jit(step).lower(*args).compile(), {"data": data, "expert": expert}


@pytest.mark.parametrize("topology", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_flops_are_those_of_the_experts_that_tokens_go_through(topology):
    program, _ = compiled(topology, 1)
    active = 3 * 3 * 2 * ROWS * WIDTH * HIDDEN  # three products, and two gradients of each
    assert 1 <= program.cost_analysis()["flops"] / active < 1.05


@pytest.mark.parametrize("topology", ["v5p:2x2x2", "v6e:2x4"])
def test_four_ragged_exchanges_of_rows_and_two_of_weights(topology):
    program, mesh = compiled(topology, 4)
    found = [one for one in so.audit(program.as_text(), mesh=mesh).collectives if one.kind == "ragged-all-to-all"]
    assert all(one.axes == ("expert",) for one in found)
    buffer = 4 * min(TOP_K, EXPERTS // 4) * LENGTH  # rows that may come
    lanes = 128 * 4  # a weight travels as a row of its own
    stated = 2 * [buffer * WIDTH * 2, ROWS * WIDTH * 2] + [buffer * lanes, ROWS * lanes]
    assert sorted(one.bytes for one in found) == sorted(stated)


def test_chunks_bound_what_is_received():
    whole, part = (compiled("v6e:2x4", 4, chunk=chunk)[0].memory_analysis() for chunk in (None, LENGTH // 8))
    assert part.temp_size_in_bytes < whole.temp_size_in_bytes / 2
