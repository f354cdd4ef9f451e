"""A tiny text, `shardopt train` in a process of its own, and the name that a command has in errors."""

import pytest
from support.commands import shardopt, start, tiny

from shardopt.core._errors import calling

__all__ = ["shardopt", "start", "tiny"]


@pytest.fixture(autouse=True)
def in_train():
    """Errors of functions that a test calls itself begin with "train", as under the command."""
    with calling("train"):
        yield
