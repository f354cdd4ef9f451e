"""What gives the batches of a run, and its state: of an iterator, or of a loader."""

import base64
import importlib
import json
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np

from shardopt.checkpoint._tree import Json, JsonObject
from shardopt.core import PyTree, format_error, plural
from shardopt.step._global_rows import END

_ITERATOR_METHODS = ("get_state", "set_state")
_LOADER_METHODS = ("state_dict", "load_state_dict")


class Source:
    """An iterator over batches, and its state.

    The state belongs to the iterator (`get_state` and `set_state`, as grain's have). Or it belongs
    to the batches (`state_dict` and `load_state_dict`, as `torchdata.stateful_dataloader` and
    `datasets` have), or to the iterator by these names. A loader reads its state when it is
    iterated over.
    """

    def __init__(self, batches: Iterable[PyTree]):
        self._batches = batches
        self._iterator: Any = None
        self._owner: Any = batches
        self._methods = _LOADER_METHODS
        # A loader with a state is not iterated over before the first draw: it reads its state then.
        if not _has(batches, _LOADER_METHODS):
            self._iterator = self._owner = iter(batches)
            if not _has(self._iterator, _LOADER_METHODS):
                self._methods = _ITERATOR_METHODS

    @property
    def has_state(self) -> bool:
        """Whether there is a state."""
        return _has(self._owner, self._methods)

    def draw(self) -> PyTree:
        """Return the next batch, or `END`."""
        if self._iterator is None:
            self._iterator = iter(self._batches)
        return next(self._iterator, END)

    def state(self) -> object:
        """Return the state, or None if there is none."""
        return getattr(self._owner, self._methods[0])() if self.has_state else None

    def set_state(self, state: object) -> None:
        """Move to a state that `state` returned."""
        getattr(self._owner, self._methods[1])(state)
        if self._owner is self._batches and self._methods is _LOADER_METHODS:
            self._iterator = iter(self._batches)

    def refusal(self, state: JsonObject, count: int) -> ValueError | None:
        """Move to a saved state; return an error if it is refused.

        Args:
          state: the state, encoded.
          count: the number of batches before it, for the message.
        """
        try:
            self.set_state(decode_state(state))
        except Exception as error:
            problem = (
                f"the batches cannot be put back to their position after {plural(count, 'batch')}:"
                f" {error}"
            )
            fix = "pass batches made as in the run that saved it."
            refusal = ValueError(format_error("fit", problem, fix=fix))
            refusal.__cause__ = error
            return refusal
        return None


def _has(value: Any, methods: tuple[str, str]) -> bool:
    return all(callable(getattr(value, method, None)) for method in methods)


def encode_state(state: object) -> JsonObject:
    """Return a state as JSON, which `decode_state` reverses.

    Raises:
      TypeError: if it has values that JSON cannot hold.
    """
    if _survives_json(state):
        return {"json": state}
    try:
        return {"tagged": _tagged(state)}
    except TypeError as error:
        problem = f"the state of the batches cannot be stored: {state!r:.200}: {error}"
        fix = (
            "let it be of dicts, lists, tuples, strings, numbers, bytes, and arrays of numpy or"
            " torch."
        )
        raise TypeError(format_error("fit", problem, fix=fix)) from error


def _survives_json(state: object) -> bool:
    try:
        # Tuples would come back as lists, and integer keys as strings.
        return json.loads(json.dumps(state)) == state
    except (TypeError, ValueError):
        return False


def decode_state(saved: JsonObject) -> Any:
    """Return the state that `encode_state` encoded."""
    return saved["json"] if "json" in saved else _untagged(saved["tagged"])


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


def _tagged(value: Any) -> Json:
    """Return a value as JSON that `_untagged` reverses: each container with the name of its kind.

    A checkpoint holds no pickle.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (list, tuple):
        return {kind.__name__: [_tagged(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[_tagged(key), _tagged(item)] for key, item in value.items()]}
    if kind is bytes:
        return {"bytes": _text(value)}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        array = np.asarray(value)
        return {"array": [array.dtype.str, list(array.shape), _text(array.tobytes())]}
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        tensor: Any = value
        return {"tensor": _tagged(tensor.detach().cpu().numpy())}
    raise TypeError(f"{kind.__name__} is neither a container nor a number")


def _untagged(saved: Json) -> Any:
    if not isinstance(saved, dict):
        return saved
    ((kind, value),) = saved.items()
    if kind == "dict":
        return {_untagged(key): _untagged(item) for key, item in value}
    if kind in ("list", "tuple"):
        items = [_untagged(item) for item in value]
        return items if kind == "list" else tuple(items)
    if kind == "bytes":
        return base64.b64decode(value)
    if kind == "tensor":
        return importlib.import_module("torch").from_numpy(_untagged(value))
    dtype, shape, values = value
    return np.frombuffer(base64.b64decode(values), dtype).reshape(shape).copy()
