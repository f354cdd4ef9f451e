"""Rules give specs, or are refused with everything that is wrong with them."""

import pytest
from jax.sharding import PartitionSpec as P

from shardopt.core._errors import calling
from shardopt.models import decoder
from shardopt.partition import match_rules

pytestmark = pytest.mark.fast

LEAVES = [("blocks/attention/qkv", (8, 4)), ("blocks/mlp/up", (8, 16)), ("norm", (8,))]

MAKES_RULES = "\nFix: call a function that makes rules, as in rules=decoder.rules(config)."


@calling("fsdp")
def match(rules):
    return match_rules(rules, LEAVES)


def test_the_first_rule_that_matches_wins():
    rules = [("qkv$", P(None, "tensor")), ("blocks", P("tensor")), (".*", P())]
    assert match(rules) == [P(None, "tensor"), P("tensor", None), P(None)]


def test_rules_can_be_a_function_of_path_and_shape():
    assert match(
        lambda path, shape: P(*[None] * (len(shape) - 1), "tensor") if shape[-1] == 16 else None
    ) == [
        P(None, None),
        P(None, "tensor"),
        P(None),
    ]


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        (
            [("kernel", P("tensor")), ("bias$", P())],
            ValueError,
            (
                "fsdp: 2 rules matched no parameter.\n  'kernel'\n  'bias$'\n"
                "Fix: match a key path, such as: blocks/attention/qkv, blocks/mlp/up, norm."
            ),
        ),
        (
            [("qkv", P("model")), ("(", P()), ("up", P("tensor", "tensor"))],
            ValueError,
            (
                "fsdp: 3 rules cannot be used.\n  'qkv': PartitionSpec('model',) names axis"
                " 'model'\n  '(': not a regular expression: missing ), unterminated subpattern at"
                " position 0\n  'up': PartitionSpec('tensor', 'tensor') names axis 'tensor'"
                " twice\nFix: name only 'tensor' in rules, each once; the strategy places the other"
                " axes."
            ),
        ),
        (
            [("norm", P(None, "tensor"))],
            ValueError,
            (
                "fsdp: rules do not fit 1 leaf.\n  norm: shape (8,) has 1 dim, its spec"
                " PartitionSpec(None, 'tensor') has 2\nFix: give a spec one entry a dim of the"
                " leaf; for leaves of 'blocks' it speaks of one block."
            ),
        ),
        (
            decoder.rules,
            TypeError,
            (
                "fsdp: rules are called with (path, shape), and rules cannot be: too many positional arguments."
                + MAKES_RULES
            ),
        ),
        (
            [lambda path: P(), ("norm", P())],
            TypeError,
            (
                "fsdp: rules are called with (path, shape), and <lambda> cannot be: too many positional arguments."
                + MAKES_RULES
            ),
        ),
        (
            lambda path, shape, *, config: P(),
            TypeError,
            (
                "fsdp: rules are called with (path, shape), and <lambda> cannot be: missing a required argument: 'config'."
                + MAKES_RULES
            ),
        ),
        (
            {"norm": P()},
            TypeError,
            (
                "fsdp: rules must be [(regex, PartitionSpec, 'frozen', 'experts' or 'if_divisible'), ...] or a callable (path, shape) ->"
                " PartitionSpec, got dict."
            ),
        ),
        (
            [("norm", None)],
            TypeError,
            (
                "fsdp: rules must be [(regex, PartitionSpec, 'frozen', 'experts' or 'if_divisible'), ...] or a callable (path, shape) ->"
                " PartitionSpec; got the rule ('norm', None)."
            ),
        ),
        (
            lambda path, shape: "tensor",
            TypeError,
            (
                "fsdp: rules('blocks/attention/qkv', (8, 4)) must return a PartitionSpec or None,"
                " got 'tensor'."
            ),
        ),
    ],
)
def test_bad_input_is_refused(rules, error, message):
    with pytest.raises(error) as caught:
        match(rules)
    # from Python 3.12 on, inspect says which kind of argument is missing
    assert str(caught.value).replace("keyword-only ", "") == message.replace(
        "PartitionSpec('", f"{_NAME}('"
    ).replace("PartitionSpec(None", f"{_NAME}(None")


_NAME = str(P("x")).split("(")[0]  # "PartitionSpec" or "P", as the jax version prints it
