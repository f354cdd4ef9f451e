"""Attention over a context axis is that of one device: values and gradients of query, key and value."""

import numpy as np
import pytest
from support.contexts import difference, drawn, mesh_of
from support.pairwise import all_pairs, few
from support.tiers import tiered

from shardopt.nn import flash

FACTORS = {
    "method": ["ring", "all_to_all", "all_gather"],
    "sight": ["causal", "both ways", "window", "wide window"],
    "groups": [8, 4, 2],
    "packed": [False, True],
    "order": [None, "zigzag", "striped"],
    "context": [2, 4, 8],
    "tile": [512, 3],
    "dtype": ["float64", "float32"],
}
SIGHTS = {"causal": {}, "both ways": {"causal": False}, "window": {"window": 5}, "wide window": {"window": 14}}
ROWS = all_pairs(FACTORS)
QUICK = few(ROWS)
ERRORS = {"float64": 1e-10, "float32": 2e-5}


@pytest.mark.parametrize(
    "row", tiered(ROWS, lambda row: row in QUICK, ids=lambda row: "-".join(map(str, row.values())))
)
def test_it_equals_one_device(row, x64, monkeypatch):
    monkeypatch.setattr(flash, "TILE", row["tile"])
    batch = drawn(groups=row["groups"], packed=row["packed"], dtype=np.dtype(row["dtype"]))
    mesh = mesh_of(context=row["context"])
    error = difference(mesh, batch, order=row["order"], method=row["method"], **SIGHTS[row["sight"]])
    assert error < ERRORS[row["dtype"]]
