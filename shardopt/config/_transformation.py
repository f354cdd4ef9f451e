"""An optax transformation: the call of its update, and the checks of its state."""

import inspect
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from shardopt.core import PyTree, abstract, format_error, leaves_with_paths, plural, states_of


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

    keywords = {**extra_args._asdict(), "value_fn": value_fn, "obj_fn": extra_args.value_fn}
    try:
        returned = tx.update(grads, opt_state, params, **_accepted_keywords(tx.update, keywords))
    except NameError as error:  # of jax, for an axis that is not bound
        error.add_note("Gradients are those of the global batch already: sum over no mesh axis.")
        raise
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise TypeError(
            f"update of the optimizer must return (updates, state), got {type(returned).__name__}."
        )
    return returned


def _accepted_keywords(
    update: Callable[..., tuple[PyTree, PyTree]], keywords: dict[str, PyTree]
) -> dict[str, PyTree]:
    """Return the keywords that an optax update accepts: all, some or none."""
    parameters = inspect.signature(update).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return keywords
    return {name: value for name, value in keywords.items() if name in parameters}


class Unsupported(NamedTuple):
    """A transformation that needs more than the mean gradient and one copy of the parameters.

    Attributes:
      state: the type of its state.
      problem: a sentence with its name in optax, and the values that it would need.
      fix: what to use instead.
    """

    state: type
    problem: str
    fix: str


UNSUPPORTED = (
    Unsupported(
        optax.LookaheadState,
        "optax.lookahead steps two copies of the parameters, and there is but one here.",
        "use so.local_sgd or so.diloco, whose outer step is that of lookahead.",
    ),
    Unsupported(
        optax.contrib.DifferentiallyPrivateAggregateState,
        "optax.contrib.dpsgd clips the gradient of each example, and a strategy has their mean.",
        "use jax.vmap(jax.grad(loss_of_one_row), in_axes=(None, 0)) in your own loop.",
    ),
)


def refuse_unsupported(caller: str, opt_state: PyTree) -> None:
    """Refuse, by a ValueError, the state of an optimizer with one of `UNSUPPORTED` in it."""
    for state, problem, fix in UNSUPPORTED:
        if states_of(state, opt_state):
            raise ValueError(format_error(caller, problem, fix=fix))


def check_updates(caller: str, params: PyTree, updates: PyTree) -> None:
    """Refuse updates that are not of the parameters: `optax.apply_updates` would broadcast them.

    An update of another real dtype is cast to the parameter's.

    Raises:
      ValueError: if updates have another structure than the parameters, or a leaf has another shape.
        If a leaf is complex and its parameter is real.
    """
    fix = (
        "let update return what it was given: one update for each gradient, of its shape. A"
        " transformation that sees several gradients at once, or changes their number, needs a loop"
        " of your own."
    )
    if jax.tree.structure(params) != jax.tree.structure(updates):
        paths, update_paths = (
            {path for path, _ in leaves_with_paths(tree)} for tree in (params, updates)
        )
        lines = [f"{path}: a parameter without update" for path in sorted(paths - update_paths)]
        lines += [f"{path}: an update without parameter" for path in sorted(update_paths - paths)]
        problem = "update of the optimizer returned updates of another structure than parameters."
        raise ValueError(format_error(caller, problem, lines, fix))
    wrong_updates = []
    pairs = zip(leaves_with_paths(params), jax.tree.leaves(updates), strict=True)
    for (path, param), update in pairs:
        shape = jnp.shape(update)
        if shape != param.shape:
            difference = f"has shape {shape}, the parameter {param.shape}"
        elif jnp.iscomplexobj(update) and not jnp.iscomplexobj(param):
            difference = f"is complex, the parameter {param.dtype}"
        else:
            continue
        wrong_updates.append(f"{path or 'the parameter'}: the update {difference}")
    if wrong_updates:
        problem = (
            f"update of the optimizer returned {plural(len(wrong_updates), 'leaf')} that"
            " cannot be added to the parameters."
        )
        raise ValueError(format_error(caller, problem, wrong_updates, fix))


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
