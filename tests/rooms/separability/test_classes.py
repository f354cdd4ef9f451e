"""The proof refuses every class of losses that a proof of separability can get wrong.

It accepts the losses that it must accept.
"""

import jax
import jax.numpy as jnp
import pytest
from support.piecewise import as_users_have_it, compare, proved
from support.row_classes import ACCEPTED, CLASSES, PARAMS, batch_of
from support.row_deceptions import DECEPTIONS, looked_up
from support.tiers import tiered

CLASSES = CLASSES | DECEPTIONS
ROWS = [(name, row) for name, losses in CLASSES.items() for row in losses]
QUICK = {(name, row) for name, losses in CLASSES.items() for row in list(losses)[::96]}
OFTEN = {(name, row) for name, losses in CLASSES.items() for row in list(losses)[::2]}
MEANS = [
    row
    for row in ACCEPTED
    if ":" not in row and row not in ("linen", "nnx", "equinox", "buffer in scan")
][::12]
"""Some that take little time to initialise."""


@pytest.mark.fast
@pytest.mark.parametrize(
    ("name", "row"),
    tiered(
        [pair for pair in ROWS if not CLASSES[pair[0]][pair[1]].separable],
        lambda pair: pair in OFTEN,
    ),
)
def test_what_is_no_mean_is_not_accepted(name, row):
    case = CLASSES[name][row]
    assert not proved(case.loss_fn, PARAMS, batch_of(case.rows), case.pieces)


@pytest.mark.fast
def test_row_numbers_that_were_floats_are_not_accepted():
    """Floats of 32 bits do not hold the numbers of more than 2^24 rows."""
    assert proved(looked_up(jnp.int32, jnp.uint32), PARAMS, batch_of(8), 2)
    assert not proved(looked_up(jnp.float32, jnp.int32), PARAMS, batch_of(8), 2)


@pytest.mark.parametrize("row", tiered(ACCEPTED, lambda row: True, fast=lambda row: ":" not in row))
def test_what_must_be_accepted(row):
    case = ACCEPTED[row]
    assert proved(case.loss_fn, PARAMS, batch_of(case.rows), case.pieces)


@pytest.mark.parametrize(("name", "row"), tiered(ROWS, lambda pair: pair in QUICK))
def test_labels_are_those_of_the_oracle(name, row):
    agrees(CLASSES[name][row])


@pytest.mark.parametrize("row", tiered(ACCEPTED, lambda row: row in MEANS))
def test_what_must_be_accepted_is_a_mean(row):
    agrees(ACCEPTED[row])


def agrees(case):
    comparison = compare(case.loss_fn, PARAMS, batch_of(case.rows), case.pieces)
    assert comparison.separable == case.separable, comparison


def test_the_oracle_sees_what_only_the_gradient_shows():
    rule = CLASSES["custom_jvp rules"]["over the count"]
    differences = compare(rule.loss_fn, PARAMS, batch_of(rule.rows), rule.pieces).differences
    assert differences["loss"] < 1e-12
    assert differences["gradient"] > 0.1


def test_the_oracle_sees_behind_zeros():
    row = CLASSES["degrees"]["hidden behind zeros"]
    batch = batch_of(row.rows)
    whole_batch, half = (jax.tree.map(lambda x, rows=rows: x[:rows], batch) for rows in (8, 4))
    other = jax.tree.map(lambda x: x[4:], batch)
    with as_users_have_it():
        value = row.loss_fn(PARAMS, whole_batch)
        parts = [row.loss_fn(PARAMS, piece) for piece in (half, other)]
    assert (
        abs(float(value) - sum(float(part) for part in parts) / 2) < 1e-12
    )  # at the given numbers it looks like a mean
    assert not compare(row.loss_fn, PARAMS, batch, row.pieces).separable
