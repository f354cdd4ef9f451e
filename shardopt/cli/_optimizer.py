"""Optimizers of optax by name, and texts such as "adamw(b2=0.99)"."""

import ast
import difflib
import inspect
from collections.abc import Callable
from typing import Any

import jax
import optax

from shardopt.core import value_error

_NEEDS_MORE = frozenset({"contrib.sophia"})
"""Optimizers whose constructor also needs the loss function of each batch."""


def make_optimizer(
    text: str, *, learning_rate: float, steps: int, clip: float
) -> optax.GradientTransformation:
    """Return an optimizer whose learning rate rises for a tenth of the steps and then falls as a
    cosine to a tenth.

    Args:
      text: a name in optax, such as "adamw" or "contrib.muon", or a call of it with keyword
        arguments, such as "adamw(b2=0.99)".
      learning_rate: the peak.
      steps: total steps of the run.
      clip: the largest global norm of the gradient; 0 for none.
    """
    factory, arguments = find_optimizer(text)
    # inject_hyperparams makes optimizers without schedules follow one too, and puts the rate into
    # the state.
    tx = optax.inject_hyperparams(factory, static_args=list(_other_parameters(factory)))(
        make_schedule(learning_rate, steps), **arguments
    )
    return optax.chain(optax.clip_by_global_norm(clip), tx) if clip else tx


def _check_arguments(
    text: str, factory: Callable[..., optax.GradientTransformation], arguments: dict[str, Any]
) -> None:
    """Refuse arguments with which an optimizer cannot update one matrix."""

    def update(params):
        tx = optax.with_extra_args_support(factory(1e-3, **arguments))
        # optimizers with a line search evaluate the loss themselves
        of_the_loss = {"value": 0.0, "grad": params, "value_fn": optax.tree.sum}
        return tx.update(params, tx.init(params), params, **of_the_loss)

    try:
        jax.eval_shape(update, {"kernel": jax.ShapeDtypeStruct((4, 4), "float32")})
    except Exception as error:  # optax checks few arguments, so Python and jax raise any class
        problem = f"--optimizer {text} cannot run: {type(error).__name__}: {error}"
        raise value_error(problem, fix="correct its arguments.") from error


def make_schedule(peak: float, steps: int) -> optax.Schedule:
    """Return the learning rate as a function of the step: a linear rise, then a cosine."""
    warmup = max(1, steps // 10)
    # It starts at peak / warmup rather than 0, so that the first step has an effect.
    return optax.warmup_cosine_decay_schedule(
        peak / warmup, peak, warmup, max(steps, warmup + 1), peak / 10
    )


def find_optimizer(text: str) -> tuple[Callable[..., optax.GradientTransformation], dict[str, Any]]:
    """Return the optax function and the arguments in a text such as "adamw" or
    "contrib.muon(beta=0.9)".
    """
    name, arguments = read_call(text)
    functions = optimizers()
    name = name.removeprefix("optax.")
    if name not in functions:
        same_name = [
            candidate for candidate in functions if candidate.split(".")[-1] == name.split(".")[-1]
        ]
        suggestions = same_name or difflib.get_close_matches(name, functions, n=4)
        fix = (
            f"did you mean {' or '.join(suggestions)}?"
            if suggestions
            else f"choose one of {', '.join(functions)}."
        )
        problem = f"optax has no optimizer {name!r} that a learning rate is enough for."
        raise value_error(problem, fix=fix)
    keywords = _other_parameters(functions[name])
    unknown_names = sorted(arguments.keys() - keywords.keys())
    if unknown_names:
        problem = f"--optimizer {name} has no argument {' or '.join(map(repr, unknown_names))}."
        raise value_error(problem, fix=f"it takes {', '.join(keywords) or 'none'}.")
    _check_arguments(text, functions[name], arguments)
    return functions[name], arguments


def optimizers() -> dict[str, Callable[..., optax.GradientTransformation]]:
    """Return, by name, the optimizers of optax that need no argument except a learning rate.

    Example:
      >>> {"adamw", "lion", "contrib.muon"} <= set(optimizers())
      True
    """
    functions = {}
    for prefix, module in (("", optax), ("contrib.", optax.contrib)):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if prefix + name in _NEEDS_MORE or name.startswith(("_", "scale_by_")):
                continue
            if _needs_only_a_learning_rate(function):
                functions[prefix + name] = function
    return functions


def _needs_only_a_learning_rate(function: Callable[..., object]) -> bool:
    variadic_kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return "learning_rate" in inspect.signature(function).parameters and all(
        parameter.default is not parameter.empty or parameter.kind in variadic_kinds
        for parameter in _other_parameters(function).values()
    )


def _other_parameters(function: Callable[..., object]) -> dict[str, inspect.Parameter]:
    """Return the parameters of an optimizer except its learning rate."""
    parameters = dict(inspect.signature(function).parameters)
    parameters.pop("learning_rate", None)
    return parameters


def read_call(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments of an --optimizer such as "adamw" or "adamw(b2=0.99,
    nesterov=True)".

    Example:
      >>> read_call("lion(b1=0.95)")
      ('lion', {'b1': 0.95})
    """
    try:
        node = ast.parse(text.strip(), mode="eval").body
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        if call.args or not all(keyword.arg for keyword in call.keywords):
            raise ValueError
        arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError):
        fix = "write a name such as adamw, or a call with keywords, such as 'adamw(b2=0.99)'."
        raise value_error(f"--optimizer {text} cannot be read.", fix=fix) from None
    return ast.unparse(call.func), arguments
