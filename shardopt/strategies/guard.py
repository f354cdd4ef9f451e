"""A compiled step that is looked through before it runs, where running it could never end."""

from typing import Any

import jax
from jax.core import Tracer

from shardopt.core.errors import complaint
from shardopt.hlo.text import parse
from shardopt.hlo.walk import collectives_of
from shardopt.strategies.recipe import Recipe


def guarded(recipe: Recipe, jitted: Any) -> Any:
    """Return a jitted function that refuses to run what would wait for ever, and is the same elsewhere.

    Inside a stage's branch, collectives over tensor have groups, so that no other stage is waited for. A permute has
    none: on CPU every device must come to it, and a stage that is idle, or at another kind of work, does not. The
    partitioner puts one into a block that shifts or cuts a dim split over tensor; nothing but the compiled program
    tells. Elsewhere a permute is between its pairs alone.
    """
    on_cpu = recipe.mesh.devices.flat[0].platform == "cpu"
    if recipe.schedule is None or recipe.mesh.shape["tensor"] == 1 or not on_cpu:
        return jitted
    return _Guarded(recipe.who, jitted)


class _Guarded:
    """Compiles once for each kind of arguments, and keeps what passed."""

    def __init__(self, who: str, jitted: Any):
        self.who, self.jitted, self.lower = who, jitted, jitted.lower
        self._passed: dict[Any, Any] = {}

    def __call__(self, *args: Any) -> Any:
        leaves, treedef = jax.tree.flatten(args)
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            return self.jitted(*args)
        key = (treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        if key not in self._passed:
            compiled = self.jitted.lower(*args).compile()
            _check(self.who, compiled.as_text())
            self._passed[key] = compiled
        return self._passed[key](*args)


def _check(who: str, text: str) -> None:
    found = [one for one in collectives_of(parse(text)) if one.conditional and one.kind == "collective-permute"]
    if not found:
        return
    places = sorted({_place(one.instruction.rest) for one in found})
    what = "the partitioner moves data over tensor by permutes inside of stages, which other stages never come to."
    fix = (
        "do not shift, cut or join a dim that a rule splits over tensor: give gate and value, or halves, a dim or a "
        "weight of their own (as shardopt/models/layers.py does), or change the rule."
    )
    raise ValueError(complaint(who, what, places, fix))


def _place(line: str) -> str:
    name = line.partition('op_name="')[2].partition('"')[0]
    return name.rpartition("closed_call/")[2] or "a collective-permute without a name"
