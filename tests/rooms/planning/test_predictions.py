"""Predictions against the compiled step: bytes held, bytes sent, flops.

Weights in 8 bits are compared with float32.
"""

import pytest
from support.layouts import LAYOUTS, disagreements, predicted
from support.tiers import tiered

from shardopt.planning import ParallelLayout

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
