"""Predictions against what is compiled: bytes held, bytes sent, flops."""

import pytest
from support.layouts import LAYOUTS, disagreements
from support.tiers import tiered

QUICK = ("fsdp, tensor, remat",)


@pytest.mark.parametrize("name", tiered(LAYOUTS, lambda name: name in QUICK))
def test_predictions_are_what_is_compiled(name):
    assert disagreements(*LAYOUTS[name]) == []
