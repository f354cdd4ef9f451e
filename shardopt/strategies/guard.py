"""A compiled step that is looked through before it runs, where running it could never end."""

from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import Mesh

from shardopt.core.errors import complaint
from shardopt.hlo.collective import read_collective
from shardopt.hlo.text import parse
from shardopt.hlo.walk import collectives_of
from shardopt.strategies.ahead import Ahead, compile_ahead
from shardopt.strategies.recipe import Recipe


def guarded(recipe: Recipe, jitted: Any) -> Any:
    """Return a jitted function that compiles ahead of its first call, and refuses to run what would wait for ever.

    Inside a stage's branch, collectives over tensor have groups, so that no other stage is waited for. A permute has
    none: on CPU every device must come to it, and a stage that is idle, or at another kind of work, does not. The
    partitioner puts one into a block that shifts or cuts a dim split over tensor; nothing but the compiled program
    tells. Elsewhere a permute is between its pairs alone.
    """
    on_cpu = recipe.mesh.devices.flat[0].platform == "cpu"
    if recipe.schedule is None or recipe.mesh.shape["tensor"] == 1 or not on_cpu:
        return Ahead(jitted)
    return _Guarded(recipe.who, recipe.mesh, jitted)


class _Guarded:
    """Compiles once for each kind of arguments, and keeps what passed."""

    def __init__(self, who: str, mesh: Mesh, jitted: Any):
        self.who, self.mesh, self.jitted, self.lower = who, mesh, jitted, jitted.lower
        self._passed: dict[Any, Any] = {}

    def __call__(self, *args: Any) -> Any:
        leaves, treedef = jax.tree.flatten(args)
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            return self.jitted(*args)
        key = (treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        if key not in self._passed:
            compiled = compile_ahead(self.jitted, *args)
            _check(self.who, self.mesh, compiled.as_text())
            self._passed[key] = compiled
        return self._passed[key](*args)


def _check(who: str, mesh: Mesh, text: str) -> None:
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
    raise ValueError(complaint(who, what, sorted(places), fix))


def _place(op_name: str) -> str:
    return op_name.rpartition("closed_call/")[2] or "a collective-permute without a name"
