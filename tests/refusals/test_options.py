"""Each strategy refuses a wrong kind and a wrong value of each of its options.

The rows are made from the records.

A new option needs no row if `WRONG` has its type. An option without bad input here fails the first
test."""

import re
from collections.abc import Sequence
from typing import get_type_hints

import jax
import jax.numpy as jnp
import optax
import pytest

import shardopt as so
from shardopt.config._options import (
    BatchDims,
    DdpOptions,
    FsdpOptions,
    HybridOptions,
    OptState,
    View,
    ZeroOptions,
)
from shardopt.config._program_check import ProgramCheck
from shardopt.core._block_model import LossFn
from shardopt.core._types import Rules
from shardopt.reducers import Reducer
from shardopt.runtime._compiler_options import CompilerOptions

pytestmark = pytest.mark.fast

GROUPS = {so.ddp: DdpOptions, so.zero: ZeroOptions, so.fsdp: FsdpOptions, so.hybrid: HybridOptions}
MODEL = so.BlockModel(
    embed=lambda outer, batch: batch @ outer["in"],
    block=lambda w, x: x + jnp.tanh(x @ w),
    loss=lambda outer, x, batch: jnp.mean(x**2),
)
CHOICE = [
    (1, TypeError, "{name} must be a string, got 1.\nFix: use ..."),
    ("none", ValueError, "unknown {name} 'none'.\nFix: use ..."),
]
WRONG = {
    int: [
        (1.5, TypeError, "{name} must be an integer, got 1.5 (float)."),
        (True, TypeError, "{name} must be an integer, got True (bool)."),
        (0, ValueError, "{name} must be at least 1, got 0."),
        (-4, ValueError, "{name} must be at least 1, got -4."),
    ],
    Sequence[str]: [
        ("w", TypeError, "{name} must be a sequence of regular expressions, got 'w'."),
        ([1], TypeError, "{name} must be a sequence of regular expressions, got [1]."),
        (
            ["(", "w", "["],
            ValueError,
            (
                "{name} must be regular expressions.\n  '(': missing ), unterminated subpattern at"
                " position 0\n  '[': unterminated character set at position 0\nFix: escape what is"
                " meant literally, with re.escape."
            ),
        ),
    ],
    BatchDims: [
        (
            "w",
            TypeError,
            (
                "{name} must be a sequence of (regex of key paths, row dim), or of (regex, (row"
                " dim, position dim)), got 'w'.\nFix: write {name}=[...]."
            ),
        ),
        (
            [("w", 1.5)],
            TypeError,
            (
                "{name} must be a sequence of (regex of key paths, row dim), or of (regex, (row"
                " dim, position dim)), got [('w', 1.5)].\nFix: write {name}=[...]."
            ),
        ),
        (
            [("w", (0, 1.5))],
            TypeError,
            (
                "{name} must be a sequence of (regex of key paths, row dim), or of (regex, (row"
                " dim, position dim)), got [('w', (0, 1.5))].\nFix: write {name}=[...]."
            ),
        ),
        (
            [("(", 0)],
            ValueError,
            (
                "{name} must be regular expressions.\n  '(': missing ), unterminated subpattern at"
                " position 0\nFix: escape what is meant literally, with re.escape."
            ),
        ),
    ],
    View: CHOICE,
    OptState: [*CHOICE, (["host", "none"], ValueError, "unknown {name} 'none'.\nFix: use ...")],
    jax.typing.DTypeLike | None: [
        (
            1.5,
            TypeError,
            "{name} must be a floating dtype, got 1.5.\nFix: use jnp.bfloat16, or None to ...",
        ),
        (
            "float7",
            ValueError,
            "{name} must be a floating dtype, got float7.\nFix: use jnp.bfloat16, or None to ...",
        ),
        (
            jnp.int8,
            ValueError,
            "{name} must be a floating dtype, got int8.\nFix: use jnp.bfloat16, or None to ...",
        ),
    ],
    Rules: [
        (
            1,
            TypeError,
            (
                "{name} must be [(regex, PartitionSpec, 'frozen', 'experts' or 'if_divisible'), ...] or a callable"
                " (path, shape) -> PartitionSpec, got int."
            ),
        ),
        (
            ["w"],
            TypeError,
            (
                "{name} must be [(regex, PartitionSpec, 'frozen', 'experts' or 'if_divisible'), ...] or a callable"
                " (path, shape) -> PartitionSpec; got the rule 'w'."
            ),
        ),
        (
            [("w", "expert")],
            TypeError,
            (
                "{name} must be [(regex, PartitionSpec, 'frozen', 'experts' or 'if_divisible'), ...] or a callable"
                " (path, shape) -> PartitionSpec; got the rule ('w', 'expert')."
            ),
        ),
        (
            [("(", "frozen")],
            ValueError,
            (
                "1 rule cannot be used.\n  '(': not a regular expression: missing ), unterminated"
                " subpattern at position 0\nFix: escape what is meant literally, with re.escape."
            ),
        ),
    ],
    LossFn | None: [
        (
            1,
            TypeError,
            (
                "{name} must be a function (params, batch) -> loss, or a BlockModel, got 1.\n"
                "Fix: pass {name}=loss, or leave it out to evaluate loss_fn."
            ),
        )
    ],
    CompilerOptions | None: [
        (
            "fast",
            TypeError,
            (
                "{name} must be a dict of option name to value, got str.\nFix: start from"
                " so.runtime.compiler_options(mesh)."
            ),
        )
    ],
    ProgramCheck | None: [
        (
            True,
            TypeError,
            (
                "{name} must be a function (compiled, lowered) -> None, got True.\nFix: pass"
                " so.hlo.check_proved, or leave it out."
            ),
        )
    ],
    Reducer | None: [
        (
            "int8",
            TypeError,
            "{name} must be a Reducer, got str.\nFix: pass one such as so.reducers.int8(), called.",
        )
    ],
}
"""Type of an option -> (bad input, error, message); ... stands for any text."""

WRONG[int | None] = WRONG[int]

OPTIONS = [
    (strategy, name, kind)
    for strategy, group in GROUPS.items()
    for name, kind in get_type_hints(group).items()
]
ROWS = [
    pytest.param(strategy, name, *row, id=f"{strategy.__name__}-{name}-{row[0]}")
    for strategy, name, kind in OPTIONS
    for row in WRONG.get(kind, [])
]


def test_every_option_has_bad_input():
    assert {name for _, name, kind in OPTIONS if kind not in WRONG} == set()


@pytest.mark.parametrize(("strategy", "name", "value", "error", "message"), ROWS)
def test_bad_input_of_an_option_is_refused(strategy, name, value, error, message, monkeypatch):
    monkeypatch.setattr(
        jax._src.compiler, "compile_or_get_cached", lambda *_, **__: pytest.fail("compiled")
    )
    options = {"micro_batches": 4} if strategy is so.hybrid else {}
    mesh = so.make_mesh(data=2, pipeline=4) if strategy is so.hybrid else so.make_mesh()
    with pytest.raises(error) as caught:
        strategy(optax.sgd(0.1), mesh, MODEL, **options | {name: value})
    assert type(caught.value) is error
    expected = f"{strategy.__name__}: {message.format(name=name)}"
    assert re.fullmatch(re.escape(expected).replace(r"\.\.\.", ".*"), str(caught.value)), str(
        caught.value
    )
