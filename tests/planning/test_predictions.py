"""Predictions against what is compiled: bytes held, bytes sent, flops."""

import pytest
from support.layouts import LAYOUTS, SHAPE, compiled, predicted

import shardopt as so
from shardopt.planning import inner_product_flops, memory

QUICK = ("fsdp, tensor, remat", "zero bubble, zero1, tensor")


def marked():
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow, id=name) for name in LAYOUTS]


@pytest.mark.parametrize("name", marked())
def test_predictions_are_what_is_compiled(name):
    layout, batch_size = LAYOUTS[name]
    work, placed, held, sent = predicted(layout, batch_size)
    program = compiled(layout, batch_size)
    found = memory(program)

    rows = batch_size // layout.data // layout.replica
    batch = rows * (SHAPE.length + 1) * 4
    assert found.arguments - 64 <= placed.params + placed.opt_state + batch <= found.arguments
    assert held.total == pytest.approx(found.peak, rel=0.10)

    table = layout.table()
    traffic = so.audit(program, mesh=layout.sizes if layout.replica > 1 else inner(layout), schedule=table)
    for axis, wire in sent.items():
        # what goes over several axes at once counts for the first of them: nothing else but sums of the loss does
        mine = [one for one in traffic.collectives if one.axes is not None and one.axes[0] == axis]
        found_wire = sum(one.wire_bytes * (one.calls or 0) for one in mine)
        assert found_wire == pytest.approx(wire, rel=0.15 if axis == "tensor" else 0.05), axis

    flops = inner_product_flops(program)
    assert flops is not None
    if layout.pipeline == 1:
        again = work.again_flops if layout.remat else 0
        total = batch_size * (work.num_blocks * (3 * work.block_flops + again) + 3 * work.ends_flops)
        assert flops == pytest.approx(total / layout.num_chips, rel=0.05)


def inner(layout):
    return {axis: size for axis, size in layout.sizes.items() if axis != "replica"}
