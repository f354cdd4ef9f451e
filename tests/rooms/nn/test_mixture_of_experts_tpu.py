"""A mixture of experts by the real TPU compiler: flops of the active experts alone, bytes of the
exchanges as stated.
"""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import shardopt as so
from shardopt.kernels._grouped_product import _tiles
from shardopt.models import moe
from shardopt.planning import topology_devices

pytestmark = pytest.mark.slow

LENGTH = 2048
WIDTH = 512
HIDDEN = 1024
EXPERTS = 8
TOP_K = 2
ROWS = LENGTH * TOP_K


def compiled(topology, expert, **how):
    """Compile the gradient of a mixture of bfloat16, one row on each device."""
    devices = topology_devices(topology)
    data = len(devices) // expert
    grid = so.make_mesh(data=data, tensor=expert, devices=devices).devices.reshape(data, expert)
    mesh = Mesh(grid, ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
    every = PartitionSpec(("data", "expert"))
    of_expert = PartitionSpec("expert" if expert > 1 else None)

    def loss(weights, x, router):
        y, _ = so.nn.mixture_of_experts(weights, x, router, top_k=TOP_K, **how)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    def gradients(*args):
        weights, x, router = jax.grad(loss, (0, 1, 2))(*args)
        return weights, x, router[None]

    shapes = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}

    def of(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    weights = {name: of((EXPERTS, *shape), of_expert) for name, shape in shapes.items()}
    args = weights, of((len(devices), LENGTH, WIDTH), every), of((WIDTH, EXPERTS), PartitionSpec())
    specs = of_expert, every, PartitionSpec()
    step = jax.shard_map(
        gradients, mesh=mesh, in_specs=specs, out_specs=(every, every, every), check_vma=False
    )
    return jax.jit(step).lower(*args).compile(), {"data": data, "expert": expert}


@pytest.mark.parametrize("topology", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_flops_are_those_of_the_experts_that_tokens_go_through(topology):
    program, _ = compiled(topology, 1)
    active = 3 * 3 * 2 * ROWS * WIDTH * HIDDEN  # three products, and two gradients of each
    assert 1 <= program.cost_analysis()["flops"] / active < 1.05


@pytest.mark.parametrize("topology", ["v5p:2x2x2", "v6e:2x4"])
def test_a_layer_has_four_ragged_exchanges_of_rows_and_two_of_weights(topology):
    program, mesh = compiled(topology, 4)
    exchanges = [
        collective
        for collective in so.hlo.audit(program.as_text(), mesh=mesh).collectives
        if collective.kind == "ragged-all-to-all"
    ]
    assert all(collective.axes == ("expert",) for collective in exchanges)
    buffer = 4 * min(TOP_K, EXPERTS // 4) * LENGTH  # rows that may come
    lanes = 128 * 4  # a weight travels as a row of its own
    stated = 2 * [buffer * WIDTH * 2, ROWS * WIDTH * 2] + [buffer * lanes, ROWS * lanes]
    assert sorted(collective.bytes for collective in exchanges) == sorted(stated)


def test_chunks_bound_what_is_received():
    unchunked_memory, part = (
        compiled("v6e:2x4", 4, chunk=chunk)[0].memory_analysis() for chunk in (None, LENGTH // 8)
    )
    assert part.temp_size_in_bytes < unchunked_memory.temp_size_in_bytes / 2


def test_tiles_are_no_larger_than_groups():
    def of(rows, groups):
        return _tiles(jnp.dtype(jnp.bfloat16), rows, groups, 4096, 14336)

    assert of(8192, 8) == (512, 1024, 1024)
    assert of(4096, 64)[0] == 128
    assert of(300, 2)[0] == 256  # 150 to whole lanes


def test_a_step_holds_no_cast_stack_of_blocks():
    """A step holds no stack of blocks in the dtype of gathers, and no gradient of the loss next to
    the blocks.
    """
    config = moe.config(1024, 512, 3, 4, hidden=1024, dtype=jnp.bfloat16)
    params = jax.eval_shape(lambda: moe.init(config, jax.random.key(0)))
    lowered = []

    def make(mesh):
        how = {
            "gather_dtype": jnp.bfloat16,
            "rules": moe.rules,
        }
        opt = so.fsdp(optax.sgd(0.1), mesh, moe.model(config, remat="full"), **how)
        lowered.append(opt.step.lower(opt.abstract_state(params), batch).as_text())
        return opt

    batch = {"tokens": jax.ShapeDtypeStruct((8, 513), jnp.int32)}
    report = so.planning.aot(make, params, batch, topology="v5p:2x2x2", expert=4)
    entry = report.text[report.text.index("\nENTRY") :]
    assert not re.search(r"= bf16\[3,\S+ convert\(", entry)
    # the gradient of the blocks' output waits for the scattered gradient of the head
    barriers = re.findall(r"optimization_barrier .*: (.*)", lowered[0])
    assert any(
        "tensor<128x512xf32>" in barrier and "tensor<1x512x512xbf16>" in barrier
        for barrier in barriers
    )
