"""Where a run is in its data: batches drawn one by one, and a position that a checkpoint can keep."""

import base64
import json
from collections.abc import Iterable, Mapping
from typing import Any

from shardopt.core.errors import complaint, plural

END = object()
"""What `Stream.draw` returns when there are no more batches."""


class Stream:
    """Batches, drawn one at a time and never ahead, so that the position is that after the batches used.

    An iterator with `get_state` and `set_state` (grain's) is put back by its own state. Any other is put back by
    drawing as many batches from a fresh one: it must give the same batches in the same order every time.

    Attributes:
      drawn: how many batches were drawn since the data began, those before a restored checkpoint included.
    """

    def __init__(self, batches: Iterable[Any]):
        self._iterator: Any = iter(batches)
        self.drawn = 0

    def draw(self) -> Any:
        """Return the next batch, or `END`."""
        batch = next(self._iterator, END)
        self.drawn += batch is not END
        return batch

    def position(self) -> dict[str, Any]:
        """Return the position in a form that survives JSON.

        Raises:
          TypeError: if the state of the iterator does not survive it.
        """
        return {"drawn": self.drawn, "state": _encode(self._iterator.get_state()) if self._keeps_state() else None}

    def restore(self, position: Mapping[str, Any]) -> str:
        """Go to a saved position, and return in words how.

        Raises:
          ValueError: if the iterator refuses the state, or ends before the position.
        """
        count = position["drawn"]
        if position["state"] is not None and self._keeps_state():
            try:
                self._iterator.set_state(_decode(position["state"]))
            except Exception as error:
                what = f"the batches cannot be put back to their position after {plural(count, 'batch')}: {error}"
                raise ValueError(
                    complaint("fit", what, fix="pass batches made as in the run that saved it.")
                ) from error
            self.drawn = count
            return "the data from its saved state"
        while self.drawn < count:
            if self.draw() is END:
                what = f"the batches end after {self.drawn}, but the checkpoint was saved after {count}."
                raise ValueError(complaint("fit", what, fix="pass a fresh iterator over the same data."))
        return f"the data by drawing {plural(count, 'batch')}"

    def _keeps_state(self) -> bool:
        return callable(getattr(self._iterator, "get_state", None)) and hasattr(self._iterator, "set_state")


def _encode(state: Any) -> dict[str, Any]:
    if isinstance(state, bytes):  # grain's DataLoader
        return {"base64": base64.b64encode(state).decode("ascii")}
    try:
        faithful = json.loads(json.dumps(state)) == state
    except TypeError:
        faithful = False
    if not faithful:
        what = f"the state of the batch iterator does not survive JSON: {state!r:.200}"
        raise TypeError(complaint("fit", what, fix="let get_state return bytes, or dicts, lists, strings and numbers."))
    return {"json": state}


def _decode(saved: Mapping[str, Any]) -> Any:
    return base64.b64decode(saved["base64"]) if "base64" in saved else saved["json"]
