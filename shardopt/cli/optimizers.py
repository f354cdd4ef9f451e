"""Optimizers by name: any of optax that takes a learning rate, with arguments if wanted."""

import difflib
import inspect
from collections.abc import Callable
from typing import Any

import optax

from shardopt.cli.calls import read_call
from shardopt.core.errors import complaint

_NOT_ENOUGH = frozenset({"contrib.sophia"})
"""Optimizers that must be given the loss function of each batch when they are made."""


def make_optimizer(text: str, *, learning_rate: float, steps: int, clip: float) -> optax.GradientTransformation:
    """Return an optimizer whose learning rate warms up for a tenth of the steps and falls as a cosine to a tenth.

    Args:
      text: a name in optax, such as "adamw" or "contrib.muon", or a call of it with keyword arguments, such as
        "adamw(b2=0.99)".
      learning_rate: the peak.
      steps: of the whole run.
      clip: the largest global norm of the gradient; 0 for none.

    Raises:
      ValueError: if there is no such optimizer or argument, or a number is out of range.
    """
    _check("--learning-rate", learning_rate > 0, "above 0", learning_rate)
    _check("--steps", steps >= 1, "at least 1", steps)
    _check("--clip", clip >= 0, "at least 0", clip)
    name, arguments = parse_optimizer(text)
    factory = optimizer_named(name, arguments)
    # Injected, so that optimizers that know nothing of schedules follow it too, and the rate is in the state.
    fixed = [parameter for parameter in inspect.signature(factory).parameters if parameter != "learning_rate"]
    tx = optax.inject_hyperparams(factory, static_args=fixed)(make_schedule(learning_rate, steps), **arguments)
    return optax.chain(optax.clip_by_global_norm(clip), tx) if clip else tx


def make_schedule(peak: float, steps: int) -> optax.Schedule:
    """Return the learning rate as a function of the step: up in a line, down as a cosine."""
    warmup = max(1, steps // 10)
    # From peak / warmup rather than 0, so that the first step counts.
    return optax.warmup_cosine_decay_schedule(peak / warmup, peak, warmup, max(steps, warmup + 1), peak / 10)


def parse_optimizer(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments in "adamw" or "adamw(b2=0.99, nesterov=True)".

    Raises:
      ValueError: if it is neither a name nor a call with literal keyword arguments.

    Example:
      >>> parse_optimizer("contrib.muon(beta=0.9)")
      ('contrib.muon', {'beta': 0.9})
    """
    try:
        name, arguments = read_call(text)
    except ValueError:
        fix = "write a name in optax, such as adamw, or a call with keywords, such as 'adamw(b2=0.99)'."
        raise ValueError(complaint("train", f"--optimizer {text} cannot be read.", fix=fix)) from None
    return name.removeprefix("optax."), arguments


def optimizer_named(name: str, arguments: dict[str, Any]) -> Callable[..., optax.GradientTransformation]:
    """Return the function of optax with that name.

    Raises:
      ValueError: if there is none that takes a learning rate, or it has no such arguments.
    """
    known = optimizers()
    if name not in known:
        same = [other for other in known if other.split(".")[-1] == name.split(".")[-1]]
        close = same or difflib.get_close_matches(name, known, n=4)
        fix = f"did you mean {' or '.join(close)}?" if close else f"choose one of {', '.join(known)}."
        what = f"optax has no optimizer {name!r} that a learning rate is enough for."
        raise ValueError(complaint("train", what, fix=fix))
    taken = [parameter for parameter in inspect.signature(known[name]).parameters if parameter != "learning_rate"]
    if wrong := sorted(set(arguments) - set(taken)):
        what = f"--optimizer {name} has no argument {' or '.join(map(repr, wrong))}."
        raise ValueError(complaint("train", what, fix=f"it takes {', '.join(taken)}."))
    return known[name]


def optimizers() -> dict[str, Callable[..., optax.GradientTransformation]]:
    """Return the optimizers of optax, by name, for which a learning rate is enough.

    Example:
      >>> {"adamw", "lion", "contrib.muon"} <= set(optimizers())
      True
    """
    found = {}
    for prefix, module in (("", optax), ("contrib.", optax.contrib)):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if prefix + name in _NOT_ENOUGH or name.startswith(("_", "scale_by_")):
                continue
            if _needs_only_a_learning_rate(function):
                found[prefix + name] = function
    return found


def _needs_only_a_learning_rate(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters
    others = [parameter for name, parameter in parameters.items() if name != "learning_rate"]
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return "learning_rate" in parameters and all(
        parameter.default is not parameter.empty or parameter.kind in kinds for parameter in others
    )


def _check(option: str, good: bool, wanted: str, value: float) -> None:
    if not good:
        raise ValueError(f"train: {option} must be {wanted}, got {value}.")
