"""Compiling before the first call: host memory is given back in between, and what would deadlock is refused."""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh

from shardopt.audit.collective import read_collective
from shardopt.audit.hlo_text import parse
from shardopt.audit.walk import collectives_of
from shardopt.core.errors import format_error
from shardopt.core.types import PyTree, abstract, is_array_like
from shardopt.engine.aliases import DonatedState
from shardopt.engine.config import StrategyConfig
from shardopt.engine.user_mesh import on_auto_axes
from shardopt.mesh import on_mesh
from shardopt.runtime.processes import trim_malloc


class AotCompiled:
    """A jitted function that compiles before its first call, and gives host memory back before it runs.

    Called as it is, jax would compile and run in one go: what compiling took and what the step takes, one on top of
    the other, would be the most that the process ever holds. And it would trace arguments with the types of the user's
    mesh, and under what `jax.set_mesh` says. What is compiled ahead takes any arrays that lie where it wants them.

    Args:
      config: of the strategy.
      jitted: the function, whose `in_shardings` are on the mesh of our names. The first argument is of one kind always.
      check: refuses a compiled program by its text; called once for each kind of arguments.
      donated: keeps the buffers of the first argument distinct, where it is a state that is donated.
    """

    def __init__(
        self,
        config: StrategyConfig,
        jitted: jax.stages.Wrapped,
        check: Callable[[str], None] | None = None,
        donated: DonatedState | None = None,
    ):
        self.config, self.jitted, self.check, self.donated = config, jitted, check, donated
        self._compiled: dict[Hashable, jax.stages.Compiled] = {}

    def __call__(self, *args: PyTree) -> PyTree:
        """Return what the jitted function returns."""
        leaves, treedef = jax.tree.flatten(args[1:])
        first = jax.tree.leaves(args[0])
        traced = [leaf for leaf in [*first, *leaves] if isinstance(leaf, Tracer)]
        if traced:
            _check_traced(self.config, traced)
            return self.jitted(*args)
        _check_jit(self.config.strategy)
        kind = (treedef, tuple(map(_kind, leaves)))
        if kind not in self._compiled:
            compiled = self._compile(*args)
            if self.check is not None:
                self.check(compiled.as_text() or "")
            self._compiled[kind] = compiled
        if self.donated is not None:
            args = (self.donated.distinct(args[0], first, leaves), *args[1:])
        if jax.debug_nans.value or jax.debug_infs.value:  # jit finds the place
            with jax.set_mesh(None):
                return self.jitted(*jax.tree.map(_put_on_auto_axes, args))
        result = self._compiled[kind](*args)
        if self.donated is not None:
            self.donated.remember(result[0])
        return result

    def lower(self, *args: PyTree) -> jax.stages.Lowered:
        """Return the lowered program, also for abstract arguments."""
        with jax.set_mesh(None):
            return self.jitted.lower(abstract(args[0]), *jax.tree.map(_abstract_on_auto_axes, args[1:]))

    def _compile(self, *args: PyTree) -> jax.stages.Compiled:
        lowered = self.lower(*args)
        trim_malloc()  # what initialisation took, and smaller programs
        compiled = lowered.compile()
        trim_malloc()
        return compiled


def _check_jit(who: str) -> None:
    """Refuse, by a ValueError, to run op by op: no operation alone has a mesh that is sharded over."""
    switches: Any = jax.config  # whose attributes type checkers do not know
    if switches.jax_disable_jit:
        what = "jax_disable_jit is set, and what runs on a mesh must be compiled."
        fix = (
            "call it under jax.disable_jit(False), with jax.debug.print or jax.debug.breakpoint in the loss; or call "
            "loss_fn(params, batch) by itself, which runs op by op."
        )
        raise ValueError(format_error(who, what, fix=fix))


def _check_traced(config: StrategyConfig, leaves: Sequence[jax.Array]) -> None:
    """Refuse to be part of a user's jitted function under another mesh than ours.

    Raises:
      TypeError: if axes are Explicit, or `jax.set_mesh` was given other axes.
    """
    context, ours = jax.sharding.get_abstract_mesh(), config.mesh.axis_names
    explicit = any(AxisType.Explicit in jax.typeof(leaf).sharding.mesh.axis_types for leaf in leaves)
    if explicit or not (context.empty or set(context.axis_names) >= set(ours)):
        where = "arrays with Explicit axes" if explicit else f"jax.set_mesh of axes {context.axis_names}"
        what = f"this program cannot be traced into another one with {where}."
        fix = f"call it outside jit, where it is compiled already; or use a mesh with Auto axes {ours}."
        raise TypeError(format_error(config.strategy, what, fix=fix))


def _kind(leaf: Any) -> Hashable:
    return np.shape(leaf), getattr(leaf, "dtype", type(leaf)), getattr(leaf, "sharding", None)


def _abstract_on_auto_axes(leaf: Any) -> Any:
    """Return a leaf as its shape, dtype and sharding; a number as it is, which has a weak type."""
    if not is_array_like(leaf):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=on_auto_axes(getattr(leaf, "sharding", None)))


def _put_on_auto_axes(leaf: Any) -> Any:
    at = getattr(leaf, "sharding", None)
    return leaf if on_auto_axes(at) is at else jax.device_put(leaf, on_auto_axes(at))


def make_program(
    config: StrategyConfig,
    run: Callable[..., PyTree],
    in_shardings: PyTree,
    out_shardings: PyTree,
    *,
    donated: DonatedState | None = None,
    keep_unused: bool = False,
) -> AotCompiled:
    """Return a function as a program of a strategy: on its mesh, by its compiler options, compiled ahead of its first call.

    What would deadlock is refused. Inside a stage's branch, collectives over tensor have groups, so that no other stage is
    waited for. A permute has none: on CPU every device must come to it, and a stage that is idle, or at another kind of
    work, does not. The partitioner puts one into a block that shifts or cuts a dim sharded over tensor; nothing but the
    compiled program tells. Elsewhere a permute is between its pairs alone.

    Args:
      config: of the strategy.
      run: the function, traced on `config.mesh`.
      in_shardings: of its arguments, on the mesh of our names; None: where they lie.
      out_shardings: of its results, on the user's mesh.
      donated: given where the first argument is a state that gives its memory to the first result, the next state.
      keep_unused: whether arguments that are not read count as well.
    """
    jitted = jax.jit(
        on_mesh(config.mesh, run),
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        donate_argnums=() if donated is None else (0,),
        keep_unused=keep_unused,
        compiler_options=dict(config.compiler_options or {}),
    )
    on_cpu = config.mesh.devices.flat[0].platform == "cpu"
    if config.schedule is None or config.mesh.shape["tensor"] == 1 or not on_cpu:
        return AotCompiled(config, jitted, donated=donated)
    return AotCompiled(config, jitted, functools.partial(_check_permutes, config.strategy, config.mesh), donated)


def _check_permutes(who: str, mesh: Mesh, text: str) -> None:
    permutes = [one for one in collectives_of(parse(text)) if one.conditional and one.kind == "collective-permute"]
    read = [read_collective(one, mesh.shape, replicas=1, partitions=mesh.size) for one in permutes]
    # Those over pipeline are our own, in branches that all stages take together (a line search has such).
    places = {_place(one.op_name) for one in read if one is not None and (one.axes is None or "tensor" in one.axes)}
    if not places:
        return
    what = "the partitioner moves data over tensor by permutes inside of stages, which other stages never come to."
    fix = (
        "do not shift, cut or join a dim that a rule splits over tensor: give gate and value, or halves, a dim or a "
        "weight of their own (as shardopt/models/layers.py does), or change the rule."
    )
    raise ValueError(format_error(who, what, sorted(places), fix))


def _place(op_name: str) -> str:
    return op_name.rpartition("closed_call/")[2] or "a collective-permute without a name"
