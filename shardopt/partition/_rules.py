"""Rules: they say which dims the tensor axis splits, which leaves are frozen, and which are experts."""

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from shardopt.core import (
    LeafRole,
    PlaceLeaf,
    PyTree,
    Rules,
    calling,
    leaves_with_paths,
    plural,
    quoted,
    type_error,
    value_error,
)
from shardopt.mesh import spec_axes

KINDS = ("frozen", "experts", "if_divisible")
"""What a rule says of a leaf in words."""
CompiledRule = tuple[re.Pattern[str], LeafRole] | PlaceLeaf
"""A `Rule` with a compiled regex."""


@calling("rules_from_logical_axes")
def rules_from_logical_axes(
    logical_specs: PyTree,
    axis_rules: Sequence[tuple[str, str | None]],
    *,
    stacked: str | None = None,
) -> list[tuple[str, PartitionSpec]]:
    """Return the tensor rules of a model whose dims have names.

    A mesh axis splits only one dim of a leaf. If several dims of a leaf have names that map to
    "tensor", the name that comes first in `axis_rules` is split.

    Args:
      logical_specs: a tree like the parameters, with a `PartitionSpec` of dim names for each leaf,
        as `flax.linen.get_partition_spec` and `flax.nnx.get_partition_spec` return it.
      axis_rules: (name, "tensor") or (name, None) for every name, in the format of flax. The
        strategy places data, pipeline and replica itself.
      stacked: regex of the key paths whose first dim stacks the blocks of a `BlockModel`, such as
        "^blocks/". Rules describe one block, so that dim is left out.

    Returns:
      [(regex, PartitionSpec), ...] for the `rules` of a strategy: one rule for each leaf that is
      split.

    Raises:
      TypeError: if a leaf is not a `PartitionSpec`.
      ValueError: if a name is not in `axis_rules`, or `axis_rules` map a name to another mesh axis.

    Example:
      >>> specs = {"up": {"kernel": PartitionSpec("embed", "mlp"), "bias": PartitionSpec()}}
      >>> rules = rules_from_logical_axes(specs, [("mlp", "tensor"), ("embed", None)])
      >>> [(pattern, tuple(spec)) for pattern, spec in rules]
      [('^up/kernel$', (None, 'tensor'))]
    """
    leaves = leaves_with_paths(logical_specs)
    _check_logical_axes(leaves, axis_rules)
    names_to_split = [name for name, axis in axis_rules if axis == "tensor"]
    rules = []
    for path, spec in leaves:
        entries = list(spec)
        if stacked is not None and re.search(stacked, path):
            entries = entries[1:]
        dim = _first_named_dim(entries, names_to_split)
        if dim is not None:
            rules.append((f"^{re.escape(path)}$", PartitionSpec(*[None] * dim, "tensor")))
    return rules


def _first_named_dim(entries: Sequence[Any], names: Sequence[str]) -> int | None:
    """Return the dim that has the first of the names that a dim has; None if no dim has one."""
    for name in names:
        for dim, entry in enumerate(entries):
            if name in spec_axes((entry,)):
                return dim
    return None


def _check_logical_axes(
    leaves: Sequence[tuple[str, Any]], axis_rules: Sequence[tuple[str, str | None]]
) -> None:
    wrong_rules = [
        f"{name!r}: {axis!r}" for name, axis in axis_rules if axis not in ("tensor", None)
    ]
    if wrong_rules:
        problem = f"{plural(len(wrong_rules), 'rule')} for another axis than tensor."
        fix = "map these to None; the strategy places data, pipeline and replica itself."
        raise value_error(problem, wrong_rules, fix)
    wrong_leaves = [
        f"{path}: {type(leaf).__name__}"
        for path, leaf in leaves
        if not isinstance(leaf, PartitionSpec)
    ]
    if wrong_leaves:
        fix = "pass what flax.linen.get_partition_spec or flax.nnx.get_partition_spec returns."
        raise type_error("leaves must be PartitionSpecs of logical axes.", wrong_leaves, fix)
    known = {name for name, _ in axis_rules}
    unknown = [
        f"{path}: {name!r}"
        for path, spec in leaves
        for name in spec_axes(spec)
        if name not in known
    ]
    if unknown:
        problem = f"{plural(len(unknown), 'logical axis')} without a rule."
        raise value_error(problem, unknown, 'give each ("name", "tensor") or ("name", None).')


def match_rules(
    rules: Rules,
    paths_and_shapes: Sequence[tuple[str, tuple[int, ...]]],
    *,
    axes: Iterable[str] = ("tensor",),
) -> list[PartitionSpec]:
    """Return for each leaf the spec of the first rule that gives it one.

    Args:
      rules: `[(regex, PartitionSpec), ...]`, searched in the key path, or functions `(path, shape)
        -> PartitionSpec | None`; see `Rules`.
      paths_and_shapes: the key path ("blocks/attention/qkv") and shape of each leaf.
      axes: mesh axes that a rule may name.

    Returns:
      One `PartitionSpec` for each leaf, with one entry per dim; a leaf that no rule matches gets a
      spec without axes.

    Raises:
      TypeError: if `rules` do not have the form of `Rules`.
      ValueError: if a regex does not compile or matches no leaf, a spec names an axis outside
        `axes` or one twice, or has more entries than the leaf has dims.

    Example:
      >>> rules = [("qkv$", PartitionSpec(None, "tensor"))]
      >>> [tuple(spec) for spec in match_rules(rules, [("a/qkv", (4, 8)), ("b", (3,))])]
      [(None, 'tensor'), (None,)]
    """
    checked = check_rules(rules, axes=axes)
    _check_matched(checked, [path for path, _ in paths_and_shapes])
    specs = []
    problems = []
    for path, shape in paths_and_shapes:
        spec = first_spec(checked, path, shape) or PartitionSpec()
        if len(spec) > len(shape):
            problems.append(
                f"{path}: shape {shape} has {plural(len(shape), 'dim')}, its spec {spec} has"
                f" {len(spec)}"
            )
        problems += [f"{path}: {problem}" for problem in _axis_problems(spec, axes)]
        specs.append(PartitionSpec(*spec, *[None] * (len(shape) - len(spec))))
    if problems:
        fix = (
            "give a spec one entry a dim of the leaf; for leaves of 'blocks' it speaks of one"
            " block."
        )
        raise value_error(f"rules do not fit {plural(len(problems), 'leaf')}.", problems, fix)
    return specs


def patterns_of(rules: Rules, kind: str) -> tuple[str | re.Pattern[str], ...]:
    """Return the regexes of the rules of a kind: "frozen", "experts" or "if_divisible".

    Example:
      >>> patterns_of([("qkv$", PartitionSpec("tensor")), ("^base/", "frozen")], "frozen")
      ('^base/',)
    """
    pairs = () if callable(rules) else [rule for rule in rules if not callable(rule)]
    return tuple(pattern for pattern, what in pairs if what == kind)


def matches(patterns: Iterable[str | re.Pattern[str]], path: str) -> bool:
    """Return whether one of the regexes is found in a key path."""
    return any(re.search(pattern, path) for pattern in patterns)


def check_rules(
    rules: Rules, *, axes: Iterable[str] | None = ("tensor",)
) -> tuple[CompiledRule, ...]:
    """Check rules before any parameter is known, and return them with compiled regexes.

    Args:
      rules: the rules.
      axes: mesh axes that a rule may name; None for any.

    Raises:
      TypeError: if `rules` do not have the form of `Rules`.
      ValueError: if a regex does not compile, or a spec names an axis outside `axes` or one twice.
    """
    if callable(rules):
        rules = (rules,)
    form = (
        "rules must be [(regex, PartitionSpec, 'frozen', 'experts' or 'if_divisible'), ...] or a"
        " callable (path, shape) -> PartitionSpec"
    )
    if isinstance(rules, str | dict) or not isinstance(rules, Iterable):
        raise type_error(f"{form}, got {type(rules).__name__}.")
    checked: list[CompiledRule] = []
    problems = []
    for rule in rules:
        if callable(rule):
            _check_takes_leaf(rule)
            checked.append(rule)
            continue
        if not _is_rule(rule):
            raise type_error(f"{form}; got the rule {rule!r}.")
        pattern, what = rule
        name = repr(pattern.pattern if isinstance(pattern, re.Pattern) else pattern)
        try:
            checked.append((re.compile(pattern), what))
        except (re.error, TypeError, OverflowError, RecursionError) as error:
            problems.append(f"{name}: not a regular expression: {error}")
        if axes is not None and isinstance(what, PartitionSpec):
            problems += [f"{name}: {problem}" for problem in _axis_problems(what, axes)]
    if problems:
        fix = "escape what is meant literally, with re.escape."
        if axes is not None:
            fix = (
                f"name only {quoted(axes)} in rules, each once; the strategy places the other axes."
            )
        raise value_error(f"{plural(len(problems), 'rule')} cannot be used.", problems, fix)
    return tuple(checked)


def _check_matched(rules: Sequence[CompiledRule], paths: Sequence[str]) -> None:
    """Refuse, by a ValueError, a regex that is found in none of the key paths."""
    # A regex with a typo would leave its parameters unsplit, or train them, without a word.
    unmatched = [
        repr(rule[0].pattern)
        for rule in rules
        if not callable(rule) and not any(rule[0].search(path) for path in paths)
    ]
    if unmatched:
        known = ", ".join(paths[:8]) + (", ..." if len(paths) > 8 else "")
        problem = f"{plural(len(unmatched), 'rule')} matched no parameter."
        raise value_error(problem, unmatched, f"match a key path, such as: {known}.")


def first_spec(
    rules: Sequence[CompiledRule], path: str, shape: tuple[int, ...]
) -> PartitionSpec | None:
    """Return the spec of the first rule that gives a leaf one; None if no rule does."""
    for rule in rules:
        if not callable(rule):
            pattern, what = rule
            if isinstance(what, PartitionSpec) and pattern.search(path):
                return what
            continue
        spec = rule(path, shape)
        if isinstance(spec, PartitionSpec):
            return spec
        if spec is not None:
            raise type_error(
                f"rules({path!r}, {shape}) must return a PartitionSpec or None, got {spec!r}."
            )
    return None


def _check_takes_leaf(rule: Callable[..., object]) -> None:
    try:
        inspect.signature(rule).bind("path", (1,))
    except ValueError:  # some functions of C have no signature
        pass
    except TypeError as error:
        name = getattr(rule, "__name__", repr(rule))
        problem = f"rules are called with (path, shape), and {name} cannot be: {error}."
        fix = "call a function that makes rules, as in rules=decoder.rules(config)."
        raise type_error(problem, fix=fix) from None


def _is_rule(rule: object) -> bool:
    if not isinstance(rule, tuple | list) or len(rule) != 2:
        return False
    pattern, what = rule
    is_regex = isinstance(pattern, str) or (
        isinstance(pattern, re.Pattern) and isinstance(pattern.pattern, str)
    )
    return is_regex and (isinstance(what, PartitionSpec) or what in KINDS)


def _axis_problems(spec: PartitionSpec, axes: Iterable[str]) -> list[str]:
    named = spec_axes(spec)
    problems = [f"{spec} names axis {axis!r}" for axis in named if axis not in axes]
    problems += [
        f"{spec} has None among the axes of a dim"
        for entry in spec
        if isinstance(entry, tuple) and None in entry
    ]
    return problems + [
        f"{spec} names axis {axis!r} twice" for axis in set(named) if named.count(axis) > 1
    ]
