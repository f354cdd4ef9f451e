"""Rules: which dims of which leaves are split over the tensor axis."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from shardopt.core.errors import complaint, plural


def match_rules(
    rules: Any,
    paths_and_shapes: Sequence[tuple[str, tuple[int, ...]]],
    *,
    who: str,
    axes: Iterable[str] = ("tensor",),
) -> list[PartitionSpec]:
    """Give each leaf the spec of the first rule that matches its key path.

    Args:
      rules: `[(regex, PartitionSpec), ...]`, searched in the key path, first match wins; or a callable
        `(path, shape) -> PartitionSpec | None`.
      paths_and_shapes: the key path ("blocks/attention/qkv") and shape of each leaf.
      who: the function that the user called, for messages.
      axes: mesh axes that a rule may name.

    Returns:
      A `PartitionSpec` a leaf, one entry a dim; leaves that no rule matches get one without axes.

    Raises:
      TypeError: if `rules` is neither of the two forms.
      ValueError: if a regex does not compile or matches no leaf, a spec names an axis outside `axes` or one
        twice, or has more entries than the leaf has dims.

    Example:
      >>> rules = [("qkv$", PartitionSpec(None, "tensor"))]
      >>> [tuple(spec) for spec in match_rules(rules, [("a/qkv", (4, 8)), ("b", (3,))], who="fsdp")]
      [(None, 'tensor'), (None,)]
    """
    choose = rules if callable(rules) else _first_match(check_rules(rules, who=who, axes=axes), paths_and_shapes, who)
    specs, problems = [], []
    for path, shape in paths_and_shapes:
        spec = choose(path, shape)
        spec = PartitionSpec() if spec is None else spec
        if not isinstance(spec, PartitionSpec):
            raise TypeError(f"{who}: rules({path!r}, {shape}) must return a PartitionSpec or None, got {spec!r}.")
        if len(spec) > len(shape):
            problems.append(f"{path}: shape {shape} has {plural(len(shape), 'dim')}, its spec {spec} has {len(spec)}")
        problems += [f"{path}: {problem}" for problem in _axis_problems(spec, axes)]
        specs.append(PartitionSpec(*spec, *[None] * (len(shape) - len(spec))))
    if problems:
        fix = "give a spec one entry a dim of the leaf; for leaves of 'blocks' it speaks of one block."
        raise ValueError(complaint(who, f"rules do not fit {plural(len(problems), 'leaf')}.", problems, fix))
    return specs


def check_rules(rules: Any, *, who: str, axes: Iterable[str] = ("tensor",)) -> Any:
    """Check what can be checked of rules before any parameter is known; return them.

    Raises:
      TypeError: if `rules` is not a callable or a sequence of (regex, PartitionSpec) pairs.
      ValueError: if a regex does not compile, or a spec names an axis outside `axes` or one twice.
    """
    if callable(rules):
        return rules
    form = "rules must be [(regex, PartitionSpec), ...] or a callable (path, shape) -> PartitionSpec"
    if isinstance(rules, str | dict) or not isinstance(rules, Iterable):
        raise TypeError(f"{who}: {form}, got {type(rules).__name__}.")
    checked, problems = [], []
    for rule in rules:
        if not (_is_rule(rule)):
            raise TypeError(f"{who}: {form}; got the rule {rule!r}.")
        pattern, spec = rule
        try:
            checked.append((re.compile(pattern), spec))
        except (re.error, TypeError, OverflowError, RecursionError) as error:
            problems.append(f"{pattern!r}: not a regular expression: {error}")
        problems += [f"{pattern!r}: {problem}" for problem in _axis_problems(spec, axes)]
    if problems:
        fix = f"name only {', '.join(map(repr, axes))} in rules, each once; the strategy places the other axes."
        raise ValueError(complaint(who, f"{plural(len(problems), 'rule')} cannot be used.", problems, fix))
    return tuple(checked)


def _first_match(rules: Any, paths_and_shapes: Sequence[tuple[str, Any]], who: str) -> Callable[..., Any]:
    paths = [path for path, _ in paths_and_shapes]
    idle = [repr(pattern.pattern) for pattern, _ in rules if not any(pattern.search(path) for path in paths)]
    if idle:
        known = ", ".join(paths[:8]) + (", ..." if len(paths) > 8 else "")
        what = f"{plural(len(idle), 'rule')} matched no parameter."
        raise ValueError(complaint(who, what, idle, f"match a key path, such as: {known}."))
    return lambda path, shape: next((spec for pattern, spec in rules if pattern.search(path)), None)


def _is_rule(rule: Any) -> bool:
    pair = isinstance(rule, tuple | list) and len(rule) == 2
    if not pair or not isinstance(rule[1], PartitionSpec):
        return False
    return isinstance(rule[0], str) or (isinstance(rule[0], re.Pattern) and isinstance(rule[0].pattern, str))


def _axis_problems(spec: PartitionSpec, axes: Iterable[str]) -> list[str]:
    named = [axis for entry in spec for axis in (entry if isinstance(entry, tuple) else (entry,)) if axis is not None]
    problems = [f"{spec} names axis {axis!r}" for axis in named if axis not in axes]
    problems += [
        f"{spec} has None among the axes of a dim" for entry in spec if isinstance(entry, tuple) and None in entry
    ]
    return problems + [f"{spec} names axis {axis!r} twice" for axis in set(named) if named.count(axis) > 1]
