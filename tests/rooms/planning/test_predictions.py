"""Predictions against what is compiled: bytes held, bytes sent, flops.

Weights in 8 bits are compared with float32.
"""

import jax
import jax.numpy as jnp
import optax
import pytest
from support.layouts import LAYOUTS, disagreements, predicted
from support.tiers import tiered

from shardopt.models import moe
from shardopt.planning import ParallelLayout, trace
from shardopt.planning._costs import _gathered_bytes, traffic
from shardopt.planning._layout import abstract_opt_state, place

QUICK = ("fsdp, tensor, remat",)


@pytest.mark.parametrize("name", tiered(LAYOUTS, lambda name: name in QUICK))
def test_predictions_are_what_is_compiled(name):
    assert disagreements(*LAYOUTS[name]) == []


def test_a_block_in_8_bits_takes_a_quarter_of_its_float32():
    """XLA:CPU multiplies int8 in wider types, so a program compiled here says nothing about this
    memory.
    """
    layout = ParallelLayout(data=8, remat=True)
    placed, held, sent = predicted(layout, 16)
    _, held_rounded, sent_rounded = predicted(layout, 16, precision="int8")

    block = placed.elements.sharded_blocks / placed.num_blocks
    assert held.gathered - held_rounded.gathered == 3 * block
    passes, share = 2, 7 / 8  # forward and backward; a device sends 7 of 8 shards in a ring
    assert sent["data"] - sent_rounded["data"] == passes * placed.num_blocks * share * 3 * block


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [ParallelLayout(data=8), ParallelLayout(data=4, expert=2)], ids=["data", "expert"]
)
def test_experts_in_8_bits_take_a_quarter_of_their_float32(layout):
    def weight_bytes(precision):
        config = moe.config(
            dim=64, num_layers=2, num_heads=4, num_experts=4, max_length=32, precision=precision
        )
        params = jax.eval_shape(lambda: moe.init(config, jax.random.key(0)))
        batch = {"tokens": jax.ShapeDtypeStruct((1, 33), jnp.int32)}
        work = trace(moe.model(config), params, batch, rules=moe.rules)
        placed = place(work, layout, abstract_opt_state(work, optax.adam(1e-3)))
        gathers = [each for each in traffic(placed, batch_size=8) if each.what == "weights"]
        _, held_at_a_block, _ = _gathered_bytes(placed, 1)
        return [each.bytes for each in gathers], held_at_a_block

    (sent, held), (sent_rounded, held_rounded) = weight_bytes(None), weight_bytes("int8")
    assert sent_rounded == [each / 4 for each in sent]
    assert held - held_rounded == 3 / 4 * sum(sent)
