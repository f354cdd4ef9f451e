"""What a staleness rule is: a change of the gradient before the optimizer, and of the step after it."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from shardopt.core.types import PyTree


def _no_state(params: PyTree) -> Any:
    return ()


def _same_gradient(grads: PyTree, state: Any, *, params: PyTree, pulled: PyTree, delay: Any) -> tuple[PyTree, Any]:
    return grads, state


class Rule(NamedTuple):
    """How the server treats a gradient that is late. Pure functions, traced by jit; make your own from them.

    With g the pushed gradient, w the server's parameters, w_pulled those it was computed from, and tau the versions
    that have passed since (`delay`), the server does

        g', state = gradient(g, state, params=w, pulled=w_pulled, delay=tau)
        w <- w + scale(tau) * tx.update(g')

    Attributes:
      name: what the log calls it.
      config: its numbers, as the log keeps them in JSON.
      init: `init(params) -> state`.
      gradient: what becomes of the gradient before `tx`, as above.
      scale: `scale(delay) -> factor` of the update that `tx` returns; None for 1.
      uses_pulled: whether `gradient` reads `pulled`. If not, the server keeps no old parameters.
    """

    name: str
    config: Mapping[str, Any]
    init: Callable[[PyTree], Any] = _no_state
    gradient: Callable[..., tuple[PyTree, Any]] = _same_gradient
    scale: Callable[[Any], Any] | None = None
    uses_pulled: bool = False
