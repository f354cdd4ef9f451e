"""Predictions against what is compiled: bytes held, bytes sent, flops."""

import pytest
from support.layouts import LAYOUTS, disagreements

QUICK = ("fsdp, tensor, remat", "zero bubble, zero1, tensor")


def marked():
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow, id=name) for name in LAYOUTS]


@pytest.mark.parametrize("name", marked())
def test_predictions_are_what_is_compiled(name):
    assert disagreements(*LAYOUTS[name]) == []
