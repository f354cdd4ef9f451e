"""The check of a compiled pipeline on CPU: stages do not wait for each other at a permute."""

import re
from collections.abc import Mapping

import numpy as np

from shardopt.core import value_error

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_CALLEES = re.compile(
    r"\b(?:calls|to_apply|body|condition|branch_computations|true_computation|false_computation)="
    r"(\{[^}]*\}|[^,\s]+)"
)
_PERMUTE = re.compile(r" collective-permute(?:-start)?\(.*?source_target_pairs=\{([{}\d,]*)\}")
_OP_NAME = re.compile(r'op_name="(?:[^"]*closed_call/)?([^"]+)"')


def check_permutes(text: str, sizes: Mapping[str, int]) -> None:
    """Refuse a program on CPU that would deadlock.

    In the branch of a stage, collectives over tensor have groups, so that no other stage is waited
    for. A permute has no groups: on CPU every device must reach it, and an idle stage, or a stage
    with another kind of work, does not. The partitioner puts a permute into a block that shifts or
    cuts a dim sharded over tensor; only the compiled program shows it. On other platforms a permute
    involves its pairs alone.

    Args:
      text: the compiled program.
      sizes: mesh axis -> size.

    Raises:
      ValueError: if a permute in a branch moves data over tensor.
    """
    # Permutes over pipeline are ours, in branches that all stages take together (a line search has
    # them).
    places = {
        _place(line)
        for line in _lines_in_branches(text)
        if (permute := _PERMUTE.search(line)) and _moves_over_tensor(permute[1], sizes)
    }
    if not places:
        return
    problem = (
        "the partitioner moves data over tensor by permutes inside of stages, which other stages"
        " never come to."
    )
    fix = (
        "do not shift, cut or join a dim that a rule splits over tensor: give gate and value, or"
        " halves, a dim or a weight of their own (as shardopt/nn/_memory_layout.py does), or change"
        " the rule."
    )
    raise value_error(problem, sorted(places), fix)


def _lines_in_branches(text: str) -> list[str]:
    """Return the instructions that the branches of all conditionals reach."""
    bodies = dict(_COMPUTATION.findall(text))
    conditionals = [line for line in text.splitlines() if " conditional(" in line]
    # From the branches on, through all calls: a permute may be in a loop inside of a branch.
    unvisited = _callees("\n".join(conditionals))
    reached: set[str] = set()
    while unvisited:
        name = unvisited.pop()
        if name not in reached:
            reached.add(name)
            unvisited += _callees(bodies[name])
    return [line for name in reached for line in bodies[name].splitlines()]


def _callees(lines: str) -> list[str]:
    """Return the computations that instructions call."""
    return [name for names in _CALLEES.findall(lines) for name in re.findall(r"[\w.\-]+", names)]


def _moves_over_tensor(pairs: str, sizes: Mapping[str, int]) -> bool:
    """Return whether a (source, target) pair of `{0,1},{1,0}` differs along tensor."""
    devices = np.array(re.findall(r"\d+", pairs), int)
    coordinates = np.unravel_index(devices, tuple(sizes.values()))
    sources, targets = coordinates[list(sizes).index("tensor")].reshape(-1, 2).T
    return bool((sources != targets).any())


def _place(line: str) -> str:
    op_name = _OP_NAME.search(line)
    return op_name[1] if op_name else "a collective-permute without a name"
