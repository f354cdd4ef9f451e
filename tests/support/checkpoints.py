"""Ways to compare states, and to read the message of a failure."""

import jax
import numpy as np
import pytest

import shardopt as so


@pytest.fixture(scope="session")
def same():
    """Return a function that says whether two states are equal in structure, and bit for bit in
    values.
    """

    def compare(a, b):
        assert jax.tree.structure(a) == jax.tree.structure(b)
        pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        return all(
            x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()
            for x, y in pairs
        )

    return compare


@pytest.fixture(scope="session")
def complaint_of():
    """Return a function that calls an action that must fail, and returns its whole message."""

    def call(action, kind=so.errors.CheckpointError):
        with pytest.raises(kind) as caught:
            action()
        assert type(caught.value) is kind
        return str(caught.value)

    return call
