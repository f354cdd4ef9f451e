"""Checks that gradients reach their mean as `jax.grad` made them, as far as a trace shows it.

The mean of clipped gradients is not the clipped mean. Operations that are linear in the gradients
change nothing.
"""

from collections.abc import Sequence
from typing import Any

from shardopt.core import PyTree, leaves_with_paths, value_error
from shardopt.core._axis import AxisName, axis_names
from shardopt.trace._jaxprs import SUMS, jaxpr_params, nested_equations
from shardopt.trace._primitives import words
from shardopt.trace._walk import Equations, Walk

OTHER, GRADIENT, CHANGED = range(3)
"""What a value is: computed without gradients, linear in them, or not linear in them. Of several
operands the largest counts.
"""

BACKWARD = "transpose("
OF_DEVICE = "gradients_of_device"
"""In the name stack of an equation: jax writes it in a backward pass; `on_mesh` where it takes in
gradients of another trace.
"""

LINEAR = words(
    "add add_any all_gather all_gather_invariant broadcast_in_dim complex concatenate conj"
    " convert_element_type copy copy_p cumsum device_put dynamic_slice dynamic_update_slice"
    " expand_dims fft gather imag layout_constraint name neg optimization_barrier pad ppermute"
    " pvary real reduce_precision reduce_scatter reduce_sum reshape reshard rev select_n"
    " sharding_constraint slice split squeeze stop_gradient sub transpose"
)
"""Primitives that are linear in all their operands together. A `select_n` is, unless gradients
decide.
"""


def check_not_changed(updates: PyTree, axis_name: AxisName) -> None:
    """Refuse gradients that were clipped, or averaged, before, where a trace shows it.

    A trace of `jit` or `pmap` has the operations that made a value. jax names the operations of a
    backward pass, and all that follow them must be linear.
    """
    leaves = leaves_with_paths(updates)
    kinds = _kinds([leaf for _, leaf in leaves], set(axis_names(axis_name)))
    changed = [path for path, leaf in leaves if kinds[id(_maker(leaf))] == CHANGED]
    if changed:
        problem = (
            "gradients are clipped, averaged, or changed otherwise, before their mean: the mean of"
            " clipped gradients is not the clipped mean."
        )
        fix = (
            "put average_gradients in the place of jax.lax.pmean, and a clip after it,"
            " optax.chain(average_gradients, clip, ...). What each device shall do by itself belongs"
            " into the jitted function that differentiates."
        )
        raise value_error(problem, changed, fix)


def _maker(value: Any) -> Any:
    """Return the equation that made a value; None for an input, and where there is no trace."""
    return getattr(value, "parent", None)


def _kinds(leaves: Sequence[Any], axes: set[str]) -> dict[int, int]:
    """Return the kind of value that each equation behind the leaves makes: id of equation -> kind."""

    def of_results(walk: Walk[int], eqns: Equations, operands: list[int]) -> list[int]:
        kind = max(operands, default=OTHER)
        num_results = len(eqns[0].outvars)
        if kind == GRADIENT and jaxpr_params(eqns[0]):
            return walk.call(eqns, operands) or [CHANGED] * num_results
        if kind == GRADIENT and not _is_linear(eqns[0], operands, axes):
            kind = CHANGED
        return [kind] * num_results

    walk = Walk(of_results, lambda _: OTHER, lambda _: OTHER, CHANGED, max)
    kinds = {id(None): OTHER}
    stack = list(map(_maker, leaves))
    while stack:
        eqn = stack.pop()
        if id(eqn) in kinds:
            continue
        makers = list(map(_maker, eqn.in_tracers))
        missing = [maker for maker in makers if id(maker) not in kinds]
        if _differentiates(eqn):
            kinds[id(eqn)] = GRADIENT
        elif missing:
            stack += [eqn, *missing]
        else:
            kinds[id(eqn)] = max(of_results(walk, (eqn,), [kinds[id(maker)] for maker in makers]))
    return kinds


def _differentiates(eqn: Any) -> bool:
    stacks = (str(inner.source_info.name_stack) for inner in nested_equations(eqn))
    return any(BACKWARD in stack or OF_DEVICE in stack for stack in stacks)


def _is_linear(eqn: Any, operands: list[int], axes: set[str]) -> bool:
    name = eqn.primitive.name
    if name in SUMS:  # over the axis, it is a mean already
        return not axes & set(eqn.params["axes"])
    if name in ("mul", "dot_general"):
        return OTHER in operands
    if name == "div":
        return operands[1] == OTHER
    return name in LINEAR and not (name == "select_n" and operands[0] != OTHER)
