"""Steps like an earlier one: the state that the last step returned, and a batch of a known form.

Structure, shapes, dtypes and placements are the same as in the earlier step, which checked them. So
the arguments go straight to the compiled program, through the dispatch of jax in C++. It places
numpy arrays too. What can differ is checked at every step: values of the host, the counter of steps,
and arrays that may share memory with the donated state.
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Sharding

from shardopt.config._config import StrategyConfig
from shardopt.core import PyTree, TrainState, TreeDef
from shardopt.runtime._turn import take_back_turn
from shardopt.step._aliases import DonatedState
from shardopt.step._cache import LayoutCache
from shardopt.step._check_programs import checks_numbers
from shardopt.step._compile import AotCompiled
from shardopt.step._global_rows import Rows, RowsOfOne, unwrap
from shardopt.step._inputs import check_values, has_checked_values, is_deleted
from shardopt.step._programs import CompiledStep, Program
from shardopt.step._step_counter import StepCounter

_NUMBERS = (bool, int, float, complex)


class KnownForm(NamedTuple):
    """The programs and facts that a step needs for a batch of a form that an earlier step had.

    Attributes:
      programs: the programs of the parameters of that step.
      call: the program of the step, from leaves to leaves.
      results: the structure of its results.
      donated: gives each leaf of its state its own buffer.
      has_checked_values: whether values of numpy arrays in the batch are checked.
      arrays: the indices of leaves that are jax arrays.
      moved: index -> where a leaf is moved, for jax arrays that are committed elsewhere.
    """

    programs: CompiledStep
    call: Callable[[list[Any], list[Any]], list[Any]]
    results: TreeDef
    donated: DonatedState
    has_checked_values: bool
    arrays: tuple[int, ...]
    moved: dict[int, Sharding]


class Repeats:
    """Takes steps like earlier ones.

    Args:
      config: of the strategy.
      cache: the programs by parameters, which remembers the last ones.
      counter: refuses a step whose number would wrap.
      rows: of the strategy; steps of several processes are never taken here.
    """

    def __init__(
        self,
        config: StrategyConfig,
        cache: LayoutCache[CompiledStep],
        counter: StepCounter,
        rows: Rows,
    ):
        self._config = config
        self._cache = cache
        self._counter = counter
        self._is_alone = isinstance(rows, RowsOfOne) and jax.process_count() == 1
        # Batches may alternate between a few forms (lengths of buckets), so all forms are kept.
        self._forms: dict[Hashable, KnownForm] = {}

    def take(self, state: TrainState, batch: PyTree) -> PyTree | None:
        """Return the result of a step, or None if it is not like an earlier one."""
        if not self._forms or _has_debug_options():
            return None
        batch = unwrap(batch)[0]
        leaves, structure = jax.tree.flatten(batch)
        form = self._forms.get((structure, tuple(map(_form_of, leaves))))
        state_leaves = None if form is None else form.donated.returned_leaves(state)
        if form is None or state_leaves is None or state.step.is_deleted():
            return None
        arrays = [leaves[index] for index in form.arrays]
        if any(map(is_deleted, arrays)):
            return None
        if form.has_checked_values:
            check_values(self._config, batch)
        self._counter.check(state)
        self._cache.use(form.programs)
        donated_leaves = form.donated.apart(state_leaves, arrays)
        for index, sharding in form.moved.items():
            leaves[index] = jax.device_put(leaves[index], sharding)
        take_back_turn()
        results = form.call(donated_leaves, leaves)
        form.donated.remember_leaves(results[: len(state_leaves)])
        return form.results.unflatten(results)

    def learn(self, batch: PyTree, program: Program, placed: PyTree) -> None:
        """Remember the form of a batch with which a step was taken.

        Args:
          batch: the batch as the user passed it.
          program: the program of the step.
          placed: the batch as the program got it.
        """
        if not self._is_alone or not isinstance(program, AotCompiled) or _has_debug_options():
            return
        batch = unwrap(batch)[0]
        leaves, structure = jax.tree.flatten(batch)
        forms = tuple(map(_form_of, leaves))
        placed_leaves, arguments_structure = jax.tree.flatten((placed,))
        compiled = program.compiled_for(placed_leaves, arguments_structure)
        if None in forms or compiled is None or program.donated is None:
            return
        has_host_values = any(isinstance(leaf, np.ndarray) for leaf in leaves)
        arrays = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
        self._forms[structure, forms] = KnownForm(
            programs=cast(CompiledStep, self._cache.last()),
            call=_of_leaves(compiled, len(leaves)),
            results=compiled.out_tree,
            donated=program.donated,
            has_checked_values=has_host_values and has_checked_values(self._config, batch),
            arrays=tuple(arrays),
            moved={
                i: placed_leaves[i].sharding
                for i in arrays
                if leaves[i].committed
                and not leaves[i].sharding.is_equivalent_to(
                    placed_leaves[i].sharding, leaves[i].ndim
                )
            },
        )


def _of_leaves(
    compiled: jax.stages.Compiled, num_batch_leaves: int
) -> Callable[[list[Any], list[Any]], list[Any]]:
    """Return a program of a state and a batch as a function of their leaves, which returns leaves.

    The leaves of the state are compared before and after each step in any case. So jax need not
    flatten and build the trees once more.
    """
    program: Any = compiled  # type checkers do not know its attributes
    num_state_leaves = compiled.in_tree.num_leaves - num_batch_leaves
    arguments = [0] * num_state_leaves, [0] * num_batch_leaves
    params = program._params._replace(
        in_tree=jax.tree.structure((arguments, {})),
        out_tree=jax.tree.structure([0] * compiled.out_tree.num_leaves),
    )
    call = program._executable.create_cpp_call(params)
    if call is None:  # a callback to the host
        return lambda *leaves: program.call(params, *leaves)[0]
    return call


def _has_debug_options() -> bool:
    """Return whether an option of jax is set that a compiled program would pass over."""
    jax_options: Any = jax.config  # type checkers do not know its attributes
    return (
        jax_options.jax_disable_jit
        or checks_numbers()
        or jax_options.jax_transfer_guard_host_to_device not in (None, "allow")
    )


def _form_of(leaf: Any) -> Hashable:
    """Return the facts that a program knows of a leaf of a batch; None for a leaf of another kind."""
    kind = type(leaf)
    if kind is np.ndarray:
        return leaf.shape, leaf.dtype
    if _is_device_array(kind):
        return leaf.shape, leaf.dtype, leaf.sharding, leaf.committed
    return kind if kind in _NUMBERS else None


@functools.cache
def _is_device_array(kind: type) -> bool:
    return issubclass(kind, jax.Array) and not issubclass(kind, Tracer)
