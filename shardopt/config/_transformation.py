"""An optax transformation: the call of its update, and the checks of its state."""

import inspect
from collections.abc import Callable
from typing import NamedTuple

import jax
import optax

from shardopt.core._errors import format_error
from shardopt.core._types import PyTree, abstract, leaves_with_paths, states_of


class ExtraArgs(NamedTuple):
    """Values that an update may use in addition to gradients, state and parameters.

    Attributes:
      value: the loss.
      grad: the gradients.
      value_fn: the loss of this batch at other parameters, for line searches and sophia.
      grad_fn: the gradient of that loss, for sam.
    """

    value: jax.Array | jax.ShapeDtypeStruct
    grad: PyTree
    value_fn: Callable[[PyTree], jax.Array]
    grad_fn: Callable[..., PyTree]


def call_update(
    tx: optax.GradientTransformation,
    grads: PyTree,
    opt_state: PyTree,
    params: PyTree,
    extra_args: ExtraArgs,
) -> tuple[PyTree, PyTree]:
    """Return `tx.update(grads, opt_state, params)`, called with the extra arguments that it takes."""

    # optax's line searches refuse extra arguments that `value_fn` does not take, see
    # `_extract_fns_kwargs` in
    # https://github.com/google-deepmind/optax/blob/v0.2.8/optax/_src/linesearch.py. sophia takes
    # `obj_fn`, sam `grad_fn`.
    def value_fn(params: PyTree, obj_fn: object = None, grad_fn: object = None) -> jax.Array:
        del obj_fn, grad_fn
        return extra_args.value_fn(params)

    keywords = {"value": extra_args.value, "grad": extra_args.grad, "value_fn": value_fn}
    keywords |= {"obj_fn": extra_args.value_fn, "grad_fn": extra_args.grad_fn}
    return tx.update(grads, opt_state, params, **_accepted_keywords(tx.update, keywords))


def _accepted_keywords(
    update: Callable[..., tuple[PyTree, PyTree]], keywords: dict[str, PyTree]
) -> dict[str, PyTree]:
    """Return the keywords that an optax update accepts: all, some or none."""
    parameters = inspect.signature(update).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return keywords
    return {name: value for name, value in keywords.items() if name in parameters}


def refuse_lookahead(caller: str, opt_state: PyTree) -> None:
    """Refuse, by a ValueError, the state of an optimizer with `optax.lookahead` in it."""
    if states_of(optax.LookaheadState, opt_state):
        problem = "optax.lookahead steps two copies of the parameters, and there is but one here."
        fix = (
            "use so.local_sgd or so.diloco, whose outer step is that of lookahead, or the fast"
            " optimizer alone."
        )
        raise ValueError(format_error(caller, problem, fix=fix))


def check_same_form(caller: str, before: PyTree, after: PyTree) -> None:
    """Refuse, by a ValueError, an optimizer that changes the structure, shapes or dtypes of its
    state.
    """
    fix = (
        "let init make each leaf with the shape and dtype that update returns, or cast to it in"
        " update."
    )
    if jax.tree.structure(before) != jax.tree.structure(after):
        problem = "update of the optimizer returned a state of another structure than it was given."
        raise ValueError(format_error(caller, problem, fix="let init make what update returns."))

    def describe(leaf):
        return f"{leaf.dtype}{list(leaf.shape)}"

    leaves = zip(leaves_with_paths(abstract(before)), jax.tree.leaves(abstract(after)), strict=True)
    changed = [
        f"{path or 'the state'}: {describe(a)}, then {describe(b)}"
        for (path, a), b in leaves
        if describe(a) != describe(b)
    ]
    if changed:
        problem = (
            "update of the optimizer changed its state's form, which must be the same at every"
            " step."
        )
        raise ValueError(format_error(caller, problem, changed, fix))
