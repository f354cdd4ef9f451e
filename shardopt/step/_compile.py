"""Compile before the first call: free host memory before the program runs, and check the program."""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src.core import trace_state_clean
from jax.core import Tracer

from shardopt.config._config import StrategyConfig
from shardopt.config._user_mesh import abstract_on_auto_axes, put_on_auto_axes
from shardopt.core import PyTree, TreeDef, abstract, calling
from shardopt.losses._explain import lowering_explained
from shardopt.mesh import under_mesh, without_mesh
from shardopt.runtime._agreement import processes_of
from shardopt.runtime._compiler_options import compiler_options
from shardopt.runtime._processes import trim_malloc
from shardopt.runtime._turn import take_back_turn
from shardopt.step._aliases import DonatedState
from shardopt.step._check_programs import check_jit, check_traced, checks_numbers


class AotCompiled:
    """A jitted function that compiles before its first call, and frees host memory before it runs.

    A plain call of the jitted function would compile and run at once. The memory of the compiler
    and the memory of the step would then add up to the peak of the process. A plain call would also
    trace arguments with the types of the user's mesh, and under `jax.set_mesh`. A program that is
    compiled ahead takes any arrays with the right placement.

    Args:
      config: of the strategy.
      jit: returns the function jitted, with the arguments for `jax.jit` that it is given. Its
        `in_shardings` are on the mesh of our names. Its first argument always has the same shapes.
      donated: keeps the buffers of the first argument distinct, if that is a donated state.
    """

    def __init__(
        self,
        config: StrategyConfig,
        jit: Callable[..., jax.stages.Wrapped],
        donated: DonatedState | None = None,
    ):
        self.config = config
        self.jit = jit
        self.donated = donated
        self._compiled: dict[Hashable, jax.stages.Compiled] = {}

    @functools.cached_property
    def jitted(self) -> jax.stages.Wrapped:
        """The jitted function: jit reads all shardings, and few programs of a strategy run."""
        return self.jit(donate_argnums=() if self.donated is None else (0,))

    @functools.cached_property
    def keeping(self) -> jax.stages.Wrapped:
        """The same without donation, for transformations: a gradient reads the arguments once more."""
        return self.jit()

    def __call__(self, *args: PyTree) -> PyTree:
        """Return the result of the jitted function."""
        leaves, treedef = jax.tree.flatten(args[1:])
        state_leaves = jax.tree.leaves(args[0])
        traced = [leaf for leaf in [*state_leaves, *leaves] if isinstance(leaf, Tracer)]
        if traced or not trace_state_clean():  # the loss may close over a tracer
            check_traced(self.config, traced)
            return self.keeping(*args)
        check_jit(self.config.strategy)
        signature = _signature(leaves, treedef)
        if signature not in self._compiled:
            lowered = self.lower(*args)
            if len(processes_of(self.config.mesh)) > 1:  # only several processes load it
                from shardopt.step._same_start import check_same_program

                check_same_program(self.config, lowered)
            trim_malloc()  # free the memory of initialisation and of smaller programs
            compiled = lowered.compile()
            trim_malloc()
            if self.config.check is not None:
                with calling(self.config.strategy):
                    self.config.check(compiled, lowered)
            self._compiled[signature] = compiled
        if self.donated is not None:
            take_back_turn()  # the program takes the memory of the state: no thread may save it now
            args = (self.donated.distinct(args[0], state_leaves, leaves), *args[1:])
        # jit can locate the NaN, a compiled program cannot
        if checks_numbers():
            with without_mesh():
                return self.jitted(*jax.tree.map(put_on_auto_axes, args))
        result = self._compiled[signature](*args)
        if self.donated is not None:
            self.donated.remember(result[0])
        return result

    def compiled_for(self, leaves: Sequence[Any], treedef: TreeDef) -> jax.stages.Compiled | None:
        """Return the compiled program for the leaves of all arguments but the first.

        None if it was not called with such leaves. `treedef` is of these arguments as a tuple.
        """
        return self._compiled.get(_signature(leaves, treedef))

    def lower(self, *args: PyTree) -> jax.stages.Lowered:
        """Return the lowered program, also for abstract arguments."""
        with without_mesh(), lowering_explained(self.config):
            return self.jitted.lower(
                abstract(args[0]), *jax.tree.map(abstract_on_auto_axes, args[1:])
            )


def _signature(leaves: Sequence[Any], treedef: TreeDef) -> Hashable:
    facts = (
        (np.shape(leaf), getattr(leaf, "dtype", type(leaf)), getattr(leaf, "sharding", None))
        for leaf in leaves
    )
    return treedef, tuple(facts)


def make_program(
    config: StrategyConfig,
    run: Callable[..., PyTree],
    in_shardings: PyTree,
    out_shardings: PyTree,
    *,
    donated: DonatedState | None = None,
    keep_unused: bool = False,
) -> AotCompiled:
    """Return a function as a program of a strategy: on its mesh, with its compiler options,
    compiled before its first call.

    Args:
      config: of the strategy.
      run: the function, traced on `config.mesh`.
      in_shardings: of its arguments, on the mesh of our names; None: where the arguments are.
      out_shardings: of its results, on the user's mesh.
      donated: passed if the first argument is a state whose memory the first result, the next
        state, takes over.
      keep_unused: whether the program takes arguments that it does not read.
    """

    @functools.wraps(run)
    def run_on_mesh(*args: PyTree) -> PyTree:
        with under_mesh(config.mesh):
            return run(*args)

    options = (
        compiler_options(config.mesh)
        if config.compiler_options is None
        else config.compiler_options
    )
    jit = functools.partial(
        jax.jit,
        run_on_mesh,
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        keep_unused=keep_unused,
        compiler_options=dict(options),
    )
    return AotCompiled(config, jit, donated)
