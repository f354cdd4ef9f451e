"""The mathematics of a server: how a push changes parameters and states."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from shardopt.core._errors import format_error
from shardopt.core._types import PyTree
from shardopt.parameter_server._apply import Programs, UpdateResult, run_arguments
from shardopt.parameter_server._fragments import (
    FragmentPlan,
    FragmentTree,
    put_fragment,
    take_fragment,
)
from shardopt.parameter_server._sparse import gather_union_rows, has_rows
from shardopt.parameter_server._updates import Update, check_update, replace_trained, trained
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
      plan: the assignment of parameters to fragments, each with its own states; None if a push
        changes all parameters.
      messages: shapes and dtypes of trained parameters -> shapes of their message.
    """

    programs: Programs
    plan: FragmentPlan | None = None
    messages: dict[Hashable, PyTree] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def begin(self, params: PyTree) -> ServerArrays:
        """Return copies of the parameters, and the initial states.

        With fragments a tuple of them.
        """
        params, plan = copied(params), self.plan
        if plan is None:
            return params, *self.programs.begin(trained(params))
        states = [
            self.programs.begin(plan.take(params, number)) for number in range(plan.num_fragments)
        ]
        return params, *map(tuple, zip(*states, strict=True))

    def changed_by(self, update: Update, params: PyTree) -> PyTree:
        """Return the trained parameters that an update changes, with None for all others."""
        return (
            trained(params)
            if self.plan is None
            else take_fragment(self.plan, params, update.grads.number)
        )

    def check(self, update: Any, params: PyTree, worker: int) -> None:
        """Refuse an update that does not match the parameters, or their message."""
        if self.plan is not None and not (
            isinstance(update, Update) and isinstance(update.grads, FragmentTree)
        ):
            problem = (
                f"worker {worker} must push an Update of a fragment, got {type(update).__name__}."
            )
            raise TypeError(format_error("parameter_server", problem))
        changed_params = self.changed_by(update, params)
        check_update(
            _without_fragment(update), changed_params, worker, self._message(changed_params)
        )

    def apply(
        self, arrays: ServerArrays, updates: Sequence[Any], pulled: PyTree, delay: int
    ) -> UpdateResult:
        """Apply the mean of the updates to the parameters and states that they change."""
        (params, *states), number = arrays, None if self.plan is None else updates[0].grads.number
        old = self.changed_by(updates[0], params)
        pulled = None if pulled is None else self.changed_by(updates[0], pulled)
        old_states = (
            states if number is None else [fragment_states[number] for fragment_states in states]
        )
        row_indices, updates = None, [_without_fragment(update) for update in updates]
        if has_rows(updates[0].grads):
            grads, row_indices = gather_union_rows([update.grads for update in updates], old)
            updates = [update._replace(grads=g) for g, update in zip(grads, updates, strict=True)]
        result = self.programs.update(
            run_arguments((old, *old_states), updates, pulled, delay), row_indices
        )
        if self.plan is None or number is None:
            return result._replace(params=replace_trained(params, result.params))
        opt_state, rule_state = (
            (*fragment_states[:number], new_state, *fragment_states[number + 1 :])
            for fragment_states, new_state in zip(
                states, (result.opt_state, result.rule_state), strict=True
            )
        )
        new_params = put_fragment(self.plan, params, number, result.params)
        return UpdateResult(new_params, opt_state, rule_state, result.metrics)

    def _message(self, trained_params: PyTree) -> PyTree:
        """Return the shapes of the message of a push; None if pushes are not encoded."""
        if self.programs.codec is None:
            return None
        leaf_types = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(trained_params))
        key = jax.tree.structure(trained_params), leaf_types
        if key not in self.messages:
            self.messages[key] = self.programs.codec.message(trained_params)
        return self.messages[key]


def _without_fragment(update: Any) -> Any:
    """Return the update with the tree of its fragment as gradient."""
    is_fragment = isinstance(update, Update) and isinstance(update.grads, FragmentTree)
    return update._replace(grads=update.grads.tree) if is_fragment else update
