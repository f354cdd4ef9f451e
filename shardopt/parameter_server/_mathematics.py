"""The mathematics of a server: how a push changes parameters and states."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from shardopt.core._types import PyTree
from shardopt.parameter_server._apply import Programs, UpdateResult, run_arguments
from shardopt.parameter_server._sparse import gather_union_rows, has_rows
from shardopt.parameter_server._updates import check_update, replace_trained, trained
from shardopt.step._inputs import copied

ServerArrays = tuple[PyTree, PyTree, PyTree]
"""`(params, opt_state, rule_state)`, as a `ServerState` has them."""


def copy_states(arrays: ServerArrays) -> ServerArrays:
    """Return the same parameters and copies of the states, because the next update takes over the
    states' memory.
    """
    return arrays[0], *jax.tree.map(jnp.copy, arrays[1:])


@dataclass(frozen=True)
class Mathematics:
    """The parameters and states of a server, and the programs that update them.

    Attributes:
      programs: the programs of an update.
      messages: shapes and dtypes of trained parameters -> shapes of their message.
    """

    programs: Programs
    messages: dict[Hashable, PyTree] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def begin(self, params: PyTree) -> ServerArrays:
        """Return copies of the parameters, and the initial states."""
        params = copied(params)
        return params, *self.programs.begin(trained(params))

    def check(self, update: Any, params: PyTree, worker: int) -> None:
        """Refuse an update that does not match the parameters, or their message."""
        old = trained(params)
        check_update(update, old, worker, self._message(old))

    def apply(
        self, arrays: ServerArrays, updates: Sequence[Any], pulled: PyTree, delay: int
    ) -> UpdateResult:
        """Apply the mean of the updates to the parameters and states."""
        params, *states = arrays
        old, row_indices = trained(params), None
        pulled = None if pulled is None else trained(pulled)
        if has_rows(updates[0].grads):
            grads, row_indices = gather_union_rows([update.grads for update in updates], old)
            updates = [update._replace(grads=g) for g, update in zip(grads, updates, strict=True)]
        arguments = run_arguments((old, *states), updates, pulled, delay)
        result = self.programs.update(arguments, row_indices)
        return result._replace(params=replace_trained(params, result.params))

    def _message(self, trained_params: PyTree) -> PyTree:
        """Return the shapes of the message of a push; None if pushes are not encoded."""
        if self.programs.codec is None:
            return None
        leaf_types = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(trained_params))
        key = jax.tree.structure(trained_params), leaf_types
        if key not in self.messages:
            self.messages[key] = self.programs.codec.message(trained_params)
        return self.messages[key]
