"""Compiling before the first call: host memory is given back in between, and what would deadlock is refused."""

import functools
from collections.abc import Callable, Hashable

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh

from shardopt.audit.collective import read_collective
from shardopt.audit.hlo_text import parse
from shardopt.audit.walk import collectives_of
from shardopt.core.errors import format_error
from shardopt.core.types import PyTree
from shardopt.engine.config import StrategyConfig
from shardopt.runtime.processes import trim_malloc


class AotCompiled:
    """A jitted function that compiles before its first call, and gives host memory back before it runs.

    Called as it is, jax would compile and run in one go: what compiling took and what the step takes, one on top of
    the other, would be the most that the process ever holds. jax keeps what was compiled ahead, and runs just that.

    Args:
      jitted: the function.
      check: refuses a compiled program by its text; called once for each kind of arguments.
    """

    def __init__(self, jitted: jax.stages.Wrapped, check: Callable[[str], None] | None = None):
        self.jitted, self.lower, self.check = jitted, jitted.lower, check
        self._compiled: set[Hashable] = set()

    def __call__(self, *args: PyTree) -> PyTree:
        """Return what the jitted function returns."""
        if self.check is not None or not self._compiled:
            leaves, treedef = jax.tree.flatten(args)
            kind = (treedef, tuple((np.shape(leaf), getattr(leaf, "dtype", type(leaf))) for leaf in leaves))
            if kind not in self._compiled and not any(isinstance(leaf, Tracer) for leaf in leaves):
                compiled = compile_ahead(self.jitted, *args)
                if self.check is not None:
                    self.check(compiled.as_text() or "")
                self._compiled.add(kind)
        return self.jitted(*args)


def compile_ahead(jitted: jax.stages.Wrapped, *args: PyTree) -> jax.stages.Compiled:
    """Return a jitted function compiled for arguments, host memory given back."""
    lowered = jitted.lower(*args)
    trim_malloc()  # what initialisation took, and smaller programs
    compiled = lowered.compile()
    trim_malloc()
    return compiled


def check_no_deadlock(config: StrategyConfig, jitted: jax.stages.Wrapped) -> AotCompiled:
    """Return a jitted function that compiles ahead of its first call, and refuses to run what would deadlock.

    Inside a stage's branch, collectives over tensor have groups, so that no other stage is waited for. A permute has
    none: on CPU every device must come to it, and a stage that is idle, or at another kind of work, does not. The
    partitioner puts one into a block that shifts or cuts a dim sharded over tensor; nothing but the compiled program
    tells. Elsewhere a permute is between its pairs alone.
    """
    on_cpu = config.mesh.devices.flat[0].platform == "cpu"
    if config.schedule is None or config.mesh.shape["tensor"] == 1 or not on_cpu:
        return AotCompiled(jitted)
    return AotCompiled(jitted, functools.partial(_check_permutes, config.strategy, config.mesh))


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
