"""Whether an optimizer looks beyond single elements: one that does means something else on a shard."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shardopt.core.errors import format_error
from shardopt.core.types import PyTree, abstract
from shardopt.reducers.axis import tracks_varying

# What becomes of single elements in a traced function: which results are made of several, and who completes them.


Label = frozenset[str] | None
"""None: the same on all shards, whatever the elements are. Empty: each element made of elements at its place. Names
of primitives: made of several elements of a leaf, of which a shard holds but a part, by these."""

ELEMENTS: Label = frozenset()

MIXES = frozenset(
    [
        "reduce_sum",
        "reduce_max",
        "reduce_min",
        "reduce_prod",
        "reduce_and",
        "reduce_or",
        "reduce_xor",
        "argmax",
        "argmin",
        "dot_general",
        "conv_general_dilated",
        "sort",
        "top_k",
        "cumsum",
        "cumprod",
        "cummax",
        "cummin",
        "cumlogsumexp",
        "qr",
        "geqrf",
        "householder_product",
        "svd",
        "eig",
        "eigh",
        "cholesky",
        "lu",
        "triangular_solve",
        "fft",
        "reduce",
        "reduce_window",
        "reduce_window_sum",
        "reduce_window_max",
    ]
)
"""Primitives whose results depend on several elements of an operand."""
_MOVES = frozenset(
    ["convert_element_type", "reshape", "squeeze", "broadcast_in_dim", "concatenate", "stack", "copy", "pvary"]
)
_SUMS = frozenset(["reduce_sum", "dot_general", "reduce_and", "reduce_or"])
_LARGEST = frozenset(["reduce_max", "reduce_or"])
_LEAST = frozenset(["reduce_min", "reduce_and"])
CARRIES = (
    (_SUMS, _MOVES | frozenset(["add", "add_any", "sub", "neg", "mul", "div", "reduce_sum"])),
    (_LARGEST, _MOVES | frozenset(["max", "or", "reduce_max", "reduce_or"])),
    (_LEAST, _MOVES | frozenset(["min", "and", "reduce_min", "reduce_and"])),
)
"""Partial results of one kind, and the primitives after which they still are."""
COMPLETES = {
    **dict.fromkeys(["psum", "psum2", "psum_invariant", "reduce_scatter"], _SUMS),
    "pmax": _LARGEST,
    "pmin": _LEAST,
}
"""Collectives, and the partial results that each makes whole."""
COLLECTS = frozenset(["all_gather", "all_gather_invariant", "all_to_all"])
"""Collectives that hand over what all shards have, as it is."""
STORES = frozenset(["concatenate", "stack", "pad", "gather", "dynamic_update_slice"])
"""Primitives whose result is larger than an operand although each element stays itself; scatters are, too."""
DRAWS = frozenset(["random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform", "random_gamma"])
"""Primitives that make random numbers."""


class Findings(NamedTuple):
    """Names of primitives: those that mix elements and are not completed, and those that draw."""

    mixing: set[str]
    drawing: set[str]


def join(labels: Sequence[Label]) -> Label:
    """Return the label of what depends on all of these."""
    known = [label for label in labels if label is not None]
    return frozenset().union(*known) if known else None


def follow(jaxpr: Any, labels: Sequence[Label], found: Findings) -> list[Label]:
    """Return the labels of a jaxpr's results, given those of its arguments, adding to the findings."""
    known: dict[Any, Label] = dict(zip(jaxpr.invars, labels, strict=True))

    def label_of(operand):
        return None if hasattr(operand, "val") else known.get(operand)  # literals are not hashable

    for equation in jaxpr.eqns:
        results = _results(equation, [label_of(operand) for operand in equation.invars], found)
        known.update(zip(equation.outvars, results, strict=True))
    return [label_of(result) for result in jaxpr.outvars]


def _results(equation: Any, labels: list[Label], found: Findings) -> list[Label]:
    name, count = equation.primitive.name, len(equation.outvars)
    if name in DRAWS:
        found.drawing.add(name)
    if name in COMPLETES or name in COLLECTS:
        _complete(equation, labels, found)
        return [None] * count
    if name in ("cond", "while", "scan"):
        return {"cond": _cond, "while": _while, "scan": _scan}[name](equation, labels, found)
    bodies = [] if name in MIXES or name.startswith("scatter") else list(_bodies(equation))
    if bodies:
        return _call(bodies, labels, count, found)
    label = join(labels)
    if label is None:
        return [None] * count
    if label and not _carries(name, label, labels):
        found.mixing.update(label)
        labels = [None if one else one for one in labels]  # each is found once, not in all that follows from it
        label = join(labels)
        if label is None:
            return [None] * count
    if name in MIXES and _has_large(equation, labels):
        label = label | {name}
    if not label and _spreads(equation, labels):
        label = frozenset([name])
    return [label] * count


def _complete(equation: Any, labels: list[Label], found: Findings) -> None:
    name = equation.primitive.name
    if name in COLLECTS:
        return
    for operand, label in zip(equation.invars, labels, strict=True):
        if label == ELEMENTS and _size(operand) > 1:
            found.mixing.add(name)  # it adds up elements that only share a place in their shards
        elif label and not label <= COMPLETES[name]:
            found.mixing.update(label)


def _carries(name: str, label: frozenset[str], labels: list[Label]) -> bool:
    if (name == "div" and labels[1]) or (name == "mul" and all(labels)):
        return False
    return any(label <= partial and name in carriers for partial, carriers in CARRIES)


def _has_large(equation: Any, labels: list[Label]) -> bool:
    return any(label is not None and _size(x) > 1 for x, label in zip(equation.invars, labels, strict=True))


def _spreads(equation: Any, labels: list[Label]) -> bool:
    """Return whether a leaf of one element reaches others: only one shard has that element."""
    name = equation.primitive.name
    if name in STORES or name.startswith("scatter") or max(map(_size, equation.outvars), default=0) <= 1:
        return False
    return any(label is not None and _size(x) == 1 for x, label in zip(equation.invars, labels, strict=True))


def _cond(equation: Any, labels: list[Label], found: Findings) -> list[Label]:
    outs = [follow(_opened(branch), labels[1:], found) for branch in equation.params["branches"]]
    _decide(equation, labels[0], found)
    return [join([None if labels[0] else labels[0], *out]) for out in zip(*outs, strict=True)]


def _while(equation: Any, labels: list[Label], found: Findings) -> list[Label]:
    given = equation.params
    first, second = given["cond_nconsts"], given["cond_nconsts"] + given["body_nconsts"]
    carry = _settle(_opened(given["body_jaxpr"]), labels[first:second], labels[second:], [], found)[0]
    decision = follow(_opened(given["cond_jaxpr"]), [*labels[:first], *carry], found)[0]
    _decide(equation, decision, found)
    return carry


def _scan(equation: Any, labels: list[Label], found: Findings) -> list[Label]:
    body = _opened(equation.params["jaxpr"])
    second, num_carry = _num_whole(equation.invars, body.invars), _num_whole(equation.outvars, body.outvars)
    first = second - num_carry
    carry, stacked = _settle(body, labels[:first], labels[first:second], labels[second:], found)
    is_fed = any(x is not None and _size(v) > 1 for v, x in zip(equation.invars[second:], labels[second:], strict=True))
    if is_fed and join(carry) is not None:  # what is carried from element to element
        return [None if label is None else label | {"scan"} for label in [*carry, *stacked]]
    return [*carry, *stacked]


def _num_whole(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    """Return how many operands of a scan its body sees as they are: releases of jax name them differently."""
    return sum(len(x.aval.shape) == len(y.aval.shape) for x, y in zip(outside, inside, strict=True))


def _settle(
    body: Any, consts: list[Label], carry: list[Label], rest: list[Label], found: Findings
) -> tuple[list[Label], list[Label]]:
    """Return the labels of what a loop carries, and of its other results, once another round changes nothing."""
    while True:
        outs = follow(body, [*consts, *carry, *rest], found)
        merged = [join(pair) for pair in zip(carry, outs[: len(carry)], strict=True)]
        if merged == carry:
            return carry, outs[len(carry) :]
        carry = merged


def _decide(equation: Any, label: Label, found: Findings) -> None:
    """Shards must not go different ways."""
    if label:
        found.mixing.update(label)
    elif label == ELEMENTS and max(map(_size, equation.outvars), default=0) > 1:
        found.mixing.add(equation.primitive.name)


def _call(bodies: list[Any], labels: list[Label], count: int, found: Findings) -> list[Label]:
    outs = []
    for body in bodies:
        if len(body.invars) == len(labels) and len(body.outvars) == count:
            outs.append(follow(body, labels, found))
        else:
            outs.append([join(follow(body, [join(labels)] * len(body.invars), found))] * count)
    return [join(out) for out in zip(*outs, strict=True)]


def _bodies(equation: Any) -> Iterator[Any]:
    for value in equation.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            inner = _opened(one)
            if hasattr(inner, "eqns"):
                yield inner


def _opened(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _size(operand: Any) -> int:
    return getattr(operand.aval, "size", 1)


def check_elementwise(
    who: str,
    tx: optax.GradientTransformationExtraArgs,
    names: tuple[str, ...],
    grads: PyTree,
    params: PyTree,
    extra_args: dict[str, Any],
) -> None:
    """Refuse a transformation that mixes elements, or draws random numbers.

    What it reduces over a leaf is let through if a collective makes it whole before it is used otherwise. Nothing is
    computed: `init` and `update` are traced for whole leaves.

    Raises:
      ValueError: if it does.
    """
    found = _findings(tx, names, grads, params, extra_args)
    if found.mixing:
        mixing = ", ".join(sorted(found.mixing))
        what = f"inner mixes elements of a leaf ({mixing}), which means something else on a shard of it."
        fix = (
            "use so.zero, which runs any optimizer; or one that works element by element, with "
            "so.transforms.clip_by_global_norm(..., split=True) inside of it for clipping."
        )
        raise ValueError(format_error(who, what, fix=fix))
    if found.drawing:
        drawing = ", ".join(sorted(found.drawing))
        what = f"inner draws random numbers ({drawing}), which would be the same on each shard."
        fix = (
            "draw them before it: optax.chain(so.transforms.average_gradients(...), what draws, "
            "so.transforms.shard_updates(...))."
        )
        raise ValueError(format_error(who, what, fix=fix))


def _findings(
    tx: optax.GradientTransformationExtraArgs,
    names: tuple[str, ...],
    grads: PyTree,
    params: PyTree,
    extra_args: dict[str, Any],
) -> Findings:
    def update(grads, state, params):
        return tx.update(grads, state, params, **extra_args)

    found = Findings(set(), set())
    whole = _as_split(params if params is not None else grads, names)
    state = jax.eval_shape(tx.init, whole)
    labels = follow(jax.make_jaxpr(tx.init)(whole).jaxpr, [ELEMENTS] * len(jax.tree.leaves(whole)), found)
    given = None if params is None else whole
    jaxpr = jax.make_jaxpr(update)(_as_split(grads, names), state, given).jaxpr
    num_grads = len(jax.tree.leaves(grads))
    others = [ELEMENTS] * (len(jaxpr.invars) - num_grads - len(labels))
    while True:  # what the state is made of, once elements have reached all of it that they can
        outs = follow(jaxpr, [*[ELEMENTS] * num_grads, *labels, *others], found)
        merged = [join(pair) for pair in zip(labels, outs[-len(labels) :] if labels else (), strict=True)]
        found.mixing.update(*(label for label in [*outs, *merged] if label))
        merged = [label and ELEMENTS for label in merged]
        if merged == labels:
            return found
        labels = merged


def _as_split(tree: PyTree, names: tuple[str, ...]) -> PyTree:
    """Return abstract whole leaves; where types track what varies, of such as shards have."""
    shapes = abstract(tree)
    if not tracks_varying(names):
        return shapes

    def make():
        return jax.tree.map(lambda x: jax.lax.pcast(jnp.zeros(x.shape, x.dtype), names, to="varying"), shapes)

    return jax.eval_shape(make)
