"""Several processes must begin with the same parameters, seed, options and code: each difference is
named before anything is trained.
"""

import hashlib
import importlib.metadata
import json
import platform
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from shardopt.config._config import StrategyConfig
from shardopt.core import PyTree, format_error, is_array_like, is_key, leaves_with_paths
from shardopt.runtime._agreement import agree, differing, groups, processes_of
from shardopt.step._host_batch import digest_of

_PACKAGES = ("jax", "jaxlib", "optax", "shardopt")
_NO_OPTIONS = ("mesh", "user_mesh", "filled", "report", "check", "strategy")
"""Fields of a config that hold no option, or that are functions."""
_CHUNK = 256
"""Lines of a program that are compared together to find the first line that differs."""
_SHOWN = 160
"""Characters of a line of a program that a message shows."""

_CAUSES = {
    "parameters": (
        "processes begin with different parameters",
        "draw them from one seed on all processes, without jax.process_index(), and load them from"
        " the same files; or let opt.init(init_fn, rng) compute them.",
    ),
    "seed": (
        "processes have different random keys",
        "pass the same key on all processes: jax.random.key(seed) with one seed. The rows of a"
        " device draw their own numbers.",
    ),
    "options": (
        "processes have different options",
        "start the same script with the same arguments and environment on all processes.",
    ),
    "versions": (
        "processes have different versions of packages",
        "install the same versions on all hosts.",
    ),
}
"""What differs -> the problem, and the remedy of its usual cause."""


def check_same_start(config: StrategyConfig, params: PyTree, key: jax.Array) -> None:
    """Refuse a start that differs between the processes of a mesh.

    All of them must call it. Each computes a digest of each leaf that is on its host: 0.9 ms for a
    megabyte. The processes compare one digest of all; only if it differs, they compare each leaf.

    Args:
      config: of the strategy.
      params: the parameters as the user passed them, arrays or shapes.
      key: the key that seeds the steps.

    Raises:
      ValueError: if parameters, key, options or versions differ.
    """
    processes = processes_of(config.mesh)
    start = {
        "versions": _versions(),
        "options": dict(_options(config)),
        "seed": {"rng": digest_of(np.asarray(jax.random.key_data(key)))},
        "parameters": {path: _value(leaf) for path, leaf in leaves_with_paths(params)},
    }
    check_same(config.strategy, start, processes)


def check_same(
    caller: str, start: Mapping[str, Mapping[str, str]], processes: Sequence[int]
) -> None:
    """Refuse, by a ValueError, values that differ between processes.

    Args:
      caller: the function that the user called.
      start: kind, a key of `_CAUSES` -> name -> value.
      processes: the processes.
    """
    digest = hashlib.sha256(json.dumps(start).encode()).hexdigest()
    place = f"{caller}, comparing the start"
    # Two exchanges: a short digest every time, and all values only for an error message.
    if len(set(agree(place, digest, processes))) == 1:
        return
    starts = agree(place, start, processes)
    for kind, (problem, fix) in _CAUSES.items():
        listed = _differences([other.get(kind, {}) for other in starts], processes, kind)
        if listed:
            raise ValueError(format_error(caller, f"{problem}.", listed, fix))


def check_same_program(config: StrategyConfig, lowered: jax.stages.Lowered) -> None:
    """Refuse, by a ValueError, a program that differs between the processes of a mesh.

    All of them must call it, before the program is compiled. It costs the text of the program.
    """
    processes = processes_of(config.mesh)
    lines = [_without_addresses(line) for line in lowered.as_text().splitlines()]
    place = f"{config.strategy}, compiling"
    if len(set(agree(place, _digest(lines), processes))) == 1:
        return
    # Programs have megabytes of text. Digests of chunks find the place, and one chunk is sent.
    chunks = [lines[first : first + _CHUNK] for first in range(0, len(lines), _CHUNK)]
    digests = agree(place, list(map(_digest, chunks)), processes)
    first = _first_difference(digests)
    texts = agree(place, chunks[first], processes)
    line = _first_difference(texts)
    by_text = groups([text[line].strip()[:_SHOWN] for text in texts], processes)
    listed = [f"{who}: {text}" for text, who in by_text.items()]
    problem = (
        "processes compile different programs, so their code, their optimizer or their data differ."
        f" They differ first at line {first * _CHUNK + line + 1}:"
    )
    fix = (
        "start the same script with the same arguments on all processes; a loss, a schedule or a"
        " learning rate must not depend on jax.process_index(), the host or the environment."
    )
    raise ValueError(format_error(config.strategy, problem, listed, fix))


def _first_difference(lists: Sequence[Sequence[str]]) -> int:
    """Return the first index at which lists differ, the last common one if none does."""
    common = min(map(len, lists))
    differs = (i for i in range(common) if len({entries[i] for entries in lists}) > 1)
    return next(differs, common - 1)


def _differences(
    values: Sequence[Mapping[str, str]], processes: Sequence[int], kind: str
) -> list[str]:
    """Return a line for each name whose value differs."""
    listed = []
    for name, by_value in differing(values, processes):
        label = f"params{name}" if kind == "parameters" and name.startswith("[") else name
        forms = {value: _form(kind, value) for value in by_value}
        if len(set(forms.values())) == 1:
            listed.append(f"{label}: differs between {' and '.join(by_value.values())}")
        else:
            texts = [f"{forms[value]} on {who}" for value, who in by_value.items()]
            listed.append(f"{label}: {', '.join(texts)}")
    return listed


def _form(kind: str, value: str | None) -> str:
    """Return the part of a value that a message shows: no digests."""
    if value is None:
        return "nothing"
    if kind == "seed":
        return ""
    return value.partition(" ")[0] if kind == "parameters" else value


def _value(leaf: Any) -> str:
    """Return dtype and shape of a parameter, and a digest if it is on this host."""
    if isinstance(leaf, int | float):
        return f"{type(leaf).__name__} {leaf!r}"
    if not is_array_like(leaf):
        return type(leaf).__name__
    form = f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
    is_on_host = isinstance(leaf, np.ndarray) or (
        isinstance(leaf, jax.Array) and leaf.is_fully_addressable
    )
    if not is_on_host:
        return form
    if is_key(leaf):
        leaf = jax.random.key_data(leaf)
    return f"{form} {digest_of(np.asarray(leaf))}"


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def _options(config: StrategyConfig) -> list[tuple[str, str]]:
    """Return name and text of each option that has a value, without functions."""
    listed = [("strategy", config.strategy), ("mesh", str(dict(config.mesh.shape)))]
    for field in config._fields:
        value = getattr(config, field)
        if field in _NO_OPTIONS:
            continue
        if hasattr(value, "_asdict"):
            listed += [(name, _text(entry)) for name, entry in value._asdict().items()]
        else:
            listed.append((field, _text(value)))
    return listed


def _text(value: Any) -> str:
    """Return a text of an option that is the same on all processes if the option is."""
    if isinstance(value, re.Pattern):
        return repr(value.pattern)
    if isinstance(value, Mapping):
        entries = [f"{name}: {_text(entry)}" for name, entry in sorted(value.items())]
        return "{" + ", ".join(entries) + "}"
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return "(" + ", ".join(map(_text, value)) + ")"
    if value is None or isinstance(value, str | bool | int | float | np.dtype | jax.P):
        return str(value)
    name = getattr(value, "name", None) or getattr(value, "__qualname__", None)
    return name if isinstance(name, str) else type(value).__name__


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _without_addresses(line: str) -> str:
    """Return a line of a program without the addresses of functions of the host."""
    return re.sub(r"\d+", "", line) if "callback" in line else line
