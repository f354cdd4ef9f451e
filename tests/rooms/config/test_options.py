"""Every option has one record, and every strategy that takes it names, types, explains and checks
it.
"""

import inspect
import pydoc
import re
from typing import Unpack, get_args, get_type_hints
from unittest.mock import Mock

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import shardopt as so
from shardopt.config._config import PLACEMENTS, RECORD_OF, PlacementName, StrategyConfig, configure
from shardopt.config._options import (
    ARGUMENTS,
    OPTIONS,
    DdpOptions,
    FsdpOptions,
    HybridOptions,
    SharedOptions,
    ZeroOptions,
    records,
)
from shardopt.strategies._keywords import with_options

GROUPS = {so.ddp: DdpOptions, so.zero: ZeroOptions, so.fsdp: FsdpOptions, so.hybrid: HybridOptions}
BY_NAME = [
    pytest.param(strategy, group, id=strategy.__name__) for strategy, group in GROUPS.items()
]

OF_PLATFORM = ("min_shard_elements",)
"""Options whose default depends on the platform: None, until the config has a number."""

MESSAGES = {
    "a misspelt option": (
        lambda: so.fsdp(optax.sgd(0.1), so.make_mesh(), jnp.sum, batch_dim=[("a", 1)]),
        "fsdp: unexpected keyword argument 'batch_dim'.\nFix: write batch_dims.",
    ),
    "two misspelt options": (
        lambda: so.zero(optax.sgd(0.1), so.make_mesh(), jnp.sum, stages=2, microbatches=2),
        (
            "zero: unexpected keyword argument 'stages', 'microbatches'.\nFix: write stage,"
            " micro_batches."
        ),
    ),
    "an option that nothing resembles": (
        lambda: with_options(shared)("mesh", xyz=1),
        (
            "shared: unexpected keyword argument 'xyz'.\nFix: use some of mesh,"
            f" {', '.join(records(SharedOptions))}."
        ),
    ),
    "a loss that is missing": (
        lambda: so.ddp(optax.sgd(0.1), so.make_mesh()),
        "ddp() missing 1 required positional argument: 'loss_fn'",
    ),
    "micro-batches that are missing": (
        lambda: so.hybrid(optax.sgd(0.1), so.make_mesh(), jnp.sum),
        "hybrid() missing 1 required keyword-only argument: 'micro_batches'",
    ),
}


def record_of_field(field):
    """Return the class of the record that has a field of the config."""
    if field not in RECORD_OF:
        return StrategyConfig
    return type_of(StrategyConfig, RECORD_OF[field])


def type_of(record, field):
    """Return the type of a field of a record."""
    return get_type_hints(record, localns={"Schedule": so.schedules.Schedule})[field]


def default_of_field(field):
    """Return the default of a field of the config."""
    return record_of_field(field)._field_defaults[field]


def shared(mesh, **options: Unpack[SharedOptions]):
    """Return the options."""
    return options


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_has_a_meaning_a_type_a_default_and_a_field(name):
    option = OPTIONS[name]
    types = {}
    for group in GROUPS.values():
        types |= get_type_hints(group)
    assert re.fullmatch(r"\S.{30,}\.", option.meaning)
    fields = option.read(name, option.default)
    if name in fields:
        expected = type_of(record_of_field(name), name)
        assert types[name] == (expected | None if name in OF_PLATFORM else expected)
    assert {field: default_of_field(field) for field in fields if name not in OF_PLATFORM} == {
        field: value for field, value in fields.items() if name not in OF_PLATFORM
    }
    taking = [strategy for strategy, group in GROUPS.items() if name in records(group)]
    assert taking
    for strategy in taking:
        parameter = inspect.signature(strategy).parameters[name]
        assert (parameter.annotation, parameter.kind) == (
            types[name],
            inspect.Parameter.KEYWORD_ONLY,
        )
        assert parameter.default == option.default
    assert option.check(name, option.default) == option.default


@pytest.mark.parametrize(("strategy", "group"), BY_NAME)
def test_help_explains_every_keyword_in_full(strategy, group):
    text = pydoc.render_doc(strategy, renderer=pydoc.plaintext)
    heading = next(line for line in text.splitlines() if line.startswith(f"{strategy.__name__}("))
    arguments = text.partition("Args:\n")[2].partition("Returns:\n")[0]
    assert "see `" not in arguments.replace("(see `Sum`)", "")
    meanings = ARGUMENTS | {name: option.meaning for name, option in OPTIONS.items()}
    parameters = inspect.signature(strategy).parameters
    assert set(records(group)) < set(parameters)
    for name in parameters:
        assert re.search(rf"[( ]{name}: ", heading)
        entry = re.search(
            rf"^      {name}: (.*?)\n(?=      \S|\s*\Z)", arguments, re.DOTALL | re.MULTILINE
        )
        assert entry is not None
        if name in meanings:
            assert entry[1].split() == meanings[name].split()


def test_a_strategy_gets_the_defaults_of_the_options_that_nobody_passed():
    options = with_options(shared)("mesh", view="global")
    assert options == {name: option.default for name, option in records(SharedOptions).items()} | {
        "view": "global"
    }


@pytest.mark.parametrize("case", MESSAGES)
def test_unknown_and_missing_keywords_are_refused_by_name(case):
    call, message = MESSAGES[case]
    with pytest.raises(TypeError) as raised:
        call()
    assert str(raised.value) == message


def test_the_command_line_and_hybrid_name_the_same_placements():
    assert list(get_args(PlacementName)) == list(PLACEMENTS)


@pytest.mark.parametrize(("platform", "elements"), [("tpu", 2**14), ("gpu", 2**10), ("cpu", 2**10)])
def test_small_leaves_stay_whole_up_to_a_size_of_the_platform(platform, elements):
    mesh = Mock(spec=Mesh, devices=np.array([Mock(platform=platform)]))

    def size(value):
        options = {"min_shard_elements": value}
        return configure(
            "fsdp", optax.sgd(0.1), mesh, lambda params, batch: 0.0, PLACEMENTS["fsdp"], options
        ).layout

    assert size(None).min_shard_elements == elements
    assert size(7).min_shard_elements == 7
