"""What cannot be used is refused before anything runs, in whole messages."""

import jax.numpy as jnp
import pytest

import shardopt as so
from shardopt.optimizers import Matrix

PARAMS = {"qkv": jnp.ones((2, 4, 3, 2, 2)), "b": jnp.ones(3)}
MAKE = {
    "soap": lambda rules: so.optimizers.soap(0.1, matrices=rules).init(PARAMS),
    "muon_dimension_numbers": lambda rules: so.optimizers.muon_dimension_numbers(rules)(PARAMS),
}
FIX = "Fix: name each dim once, as it stands in the whole leaf, counting that of stacked blocks."
WRONG = [
    (
        [("qkv", Matrix(1, (3, 5))), ("b", Matrix(0, ()))],
        "{}: matrices= does not fit 2 leaves.\n"
        "  b: shape (3,), Matrix(rows=0, columns=()) has no columns\n"
        "  qkv: shape (2, 4, 3, 2, 2), Matrix(rows=1, columns=(3, 5)) names dim 5, there are 5\n"
        + FIX,
    ),
    (
        [("qkv", Matrix((1, 3), (3, 4)))],
        "{}: matrices= does not fit 1 leaf.\n"
        "  qkv: shape (2, 4, 3, 2, 2), Matrix(rows=(1, 3), columns=(3, 4)) names a dim twice\n"
        + FIX,
    ),
    (
        [("kqv", Matrix(1, (3, 4)))],
        (
            "{}: 1 rule of matrices= matched no parameter.\n  'kqv'\nFix: match a key path, such"
            " as: b, qkv."
        ),
    ),
    (
        [("(", Matrix())],
        (
            "{}: matrices: '(' is not a regular expression: missing ), unterminated subpattern at"
            " position 0.\nFix: give a regex that is searched in key paths."
        ),
    ),
    (
        {"qkv": Matrix()},
        "{}: matrices must be [(regex, so.optimizers.Matrix or None), ...], got dict.",
    ),
    (
        [("qkv", (1, 2))],
        (
            "{}: matrices must be [(regex, so.optimizers.Matrix or None), ...]; got the rule"
            " ('qkv', (1, 2))."
        ),
    ),
]


@pytest.mark.parametrize("maker", MAKE)
@pytest.mark.parametrize(
    ("rules", "message"), WRONG, ids=lambda value: "" if not isinstance(value, str) else value[4:30]
)
def test_rules_that_do_not_fit(maker, rules, message):
    with pytest.raises((TypeError, ValueError)) as caught:
        MAKE[maker](rules)
    assert str(caught.value) == message.format(maker)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"b1": 1.0}, "b1 must be finite, at least 0 and below 1; got 1.0."),
        ({"ridge": 0.0}, "ridge must be finite, above 0; got 0.0."),
        ({"interval": 0}, "interval must be at least 1, got 0."),
        ({"max_dim": 2.0}, "max_dim must be an integer, got 2.0 (float)."),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_numbers_out_of_range_are_refused(options, message):
    with pytest.raises((TypeError, ValueError)) as caught:
        so.optimizers.soap(0.1, **options)
    assert str(caught.value) == f"soap: {message}"


def test_leaves_that_are_masked_or_frozen_may_have_rules():
    rules = [("qkv", Matrix(1, (3, 4))), ("frozen", Matrix())]
    params = PARAMS | {"frozen": None}
    state = so.optimizers.soap(0.1, matrices=rules).init(params)
    assert state.inner_states["matrices"].inner_state[0].mu["frozen"] is None
    numbers = so.optimizers.muon_dimension_numbers(rules)(params)
    assert numbers["frozen"] is None
    assert numbers["qkv"].output_axis == (3, 4)
