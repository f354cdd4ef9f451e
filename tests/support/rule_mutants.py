"""Mutants of the rules of the proof: one condition, number or argument of a rule is changed.

`PYTHONPATH=tests python tests/support/rule_mutants.py [mutants] [cases of a rule]` prints which of them survive.

`mutants` lists the changes of a file by `ast`. `planted` puts one into the functions that run, in
this process. `Bench` holds cases of all rules with their concrete results, which follow from no rule,
so a mutant only needs the walk over the traces again.
"""

import ast
import collections
import contextlib
import random
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from shardopt.separability import _table
from shardopt.separability._proof import DifferentTracesError, ProofSettings
from shardopt.separability._relations import Known, Relation, Unrelated
from shardopt.separability._walk import relate_jaxprs
from support import relation_meaning as meaning
from support.piecewise import as_users_have_it
from support.rule_cases import CASES

FILES = (
    "_derivatives",
    "_draws",
    "_elementwise",
    "_lookups",
    "_loops",
    "_moves",
    "_numbers",
    "_reductions",
    "_single_rows",
    "_table",
    "_walk",
)
SWAPS = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.Gt: ast.GtE,
    ast.LtE: ast.Lt,
    ast.GtE: ast.Gt,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
}
MARKED = ("Split", "Same", "Total", "Shifted", "scaled")


class Mutant(NamedTuple):
    """A change of a file.

    Attributes:
      name: "file:line function: what changed".
      file: the name of the file.
      function: the name of the function that has the change.
      number: the number of the change in this function.
    """

    name: str
    file: str
    function: str
    number: int

    def tree(self) -> ast.Module:
        """Return the changed file."""
        changed = ast.parse(_path(self.file).read_text())
        for function, places in _places(changed, self.function):
            if function == self.function:
                places[self.number][2]()
        return ast.fix_missing_locations(changed)


def _path(file: str) -> Path:
    return Path(_table.__file__).with_name(f"{file}.py")


def mutants(file: str) -> Iterator[Mutant]:
    """Yield every mutant of a file of `shardopt/separability`."""
    for function, places in _places(ast.parse(_path(file).read_text())):
        for number, (line, change, _) in enumerate(places):
            yield Mutant(f"{file}.py:{line} {function}: {change}", file, function, number)


Place = tuple[int, str, Callable[[], None]]


def _places(tree: ast.Module, only: str | None = None) -> list[tuple[str, list[Place]]]:
    """Return the changes of each function of a file, or of one function."""
    return [
        (node.name, [place for part in ast.walk(node) for place in _changes(part)])
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and only in (None, node.name)
    ]


def _changes(node: ast.AST) -> Iterator[Place]:
    line, text = getattr(node, "lineno", 0), ""
    with contextlib.suppress(Exception):
        text = ast.unparse(node)[:60]
    if isinstance(node, ast.BoolOp):
        neutral = ast.Constant(value=isinstance(node.op, ast.And))
        for i, value in enumerate(node.values):
            yield (
                line,
                f"without `{ast.unparse(value)[:60]}`",
                lambda i=i: node.values.__setitem__(i, neutral),
            )
    if isinstance(node, ast.If):
        never = ast.Constant(value=False)
        yield line, f"never `{ast.unparse(node.test)[:60]}`", lambda: setattr(node, "test", never)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        other = SWAPS[type(node.ops[0])]()
        yield line, f"{type(other).__name__} in `{text}`", lambda: node.ops.__setitem__(0, other)
    if isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
        other = SWAPS[type(node.op)]()
        yield line, f"{type(other).__name__} in `{text}`", lambda: setattr(node, "op", other)
    if (
        isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Constant)
        and node.slice.value in (0, 1)
    ):
        index = node.slice
        yield line, f"the other of `{text}`", lambda: setattr(index, "value", 1 - index.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in MARKED:
        if len(node.args) > 1 and node.func.id == "Split":
            yield line, f"fewer arguments of `{text}`", lambda: node.args.pop()
        for i, keyword in enumerate(node.keywords):
            yield line, f"no {keyword.arg} of `{text}`", lambda i=i: node.keywords.pop(i)
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("all", "any")
    ):
        other_name = "any" if node.func.id == "all" else "all"
        yield line, f"{other_name} for `{text}`", lambda: setattr(node.func, "id", other_name)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _functions() -> list[types.FunctionType]:
    """Return all functions of the rules, with those in closures."""
    modules = [sys.modules[f"shardopt.separability.{file}"] for file in FILES]
    pending = [value for module in modules for value in vars(module).values()]
    pending += [rule.results for rule in _table.TABLE.values()]
    functions: dict[int, types.FunctionType] = {}
    while pending:
        value = pending.pop()
        if isinstance(value, types.FunctionType) and id(value) not in functions:
            if not value.__module__.startswith("shardopt.separability"):
                continue
            functions[id(value)] = value
            pending += [cell.cell_contents for cell in value.__closure__ or ()]
        if isinstance(value, dict):
            pending += value.values()
    return list(functions.values())


@contextlib.contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """Run with a mutant in place of a function."""
    path = next(
        f.__code__.co_filename
        for f in _functions()
        if mutant.name.startswith(Path(f.__code__.co_filename).name)
    )
    changed = {
        (code.co_qualname, code.co_firstlineno): code
        for code in _codes(compile(mutant.tree(), path, "exec"))
    }
    before = []
    for function in _functions():
        code = function.__code__
        new = changed.get((code.co_qualname, code.co_firstlineno))
        if code.co_filename == path and new is not None and new.co_freevars == code.co_freevars:
            before.append((function, code))
            function.__code__ = new
    try:
        yield
    finally:
        for function, code in before:
            function.__code__ = code


class BenchCase(NamedTuple):
    """A traced case, with what it answers without a mutant.

    Attributes:
      label: the rule and the seed.
      case: the case.
      jaxprs: its traces.
      relations: what the rule answers.
      functions: the names of the functions that ran.
    """

    label: str
    case: meaning.RuleCase
    jaxprs: tuple[Any, Any]
    relations: list[Relation]
    functions: frozenset[str]


class Bench:
    """Cases of rules, with concrete results that are computed once.

    Args:
      names: the primitives.
      seeds: how many cases each has.
    """

    def __init__(self, names: Sequence[str], seeds: int):
        self.cases = [
            case
            for name in names
            for seed in range(seeds)
            if (case := self._traced(name, seed)) is not None
        ]
        self._worlds: dict[str, list[tuple[bool, Any, Any]]] = {}

    def _traced(self, name: str, seed: int) -> BenchCase | None:
        rng = np.random.default_rng(seed)
        case = CASES[name][seed % len(CASES[name])](rng)
        if case.axis or case.other_axis:
            return None
        with as_users_have_it():
            shapes = [
                [jax.ShapeDtypeStruct(x.shapes[i], x.dtype) for x in case.operands] for i in (0, 1)
            ]
            jaxprs = tuple(
                jax.make_jaxpr(function)(*args)
                for function, args in zip(case.functions, shapes, strict=True)
            )
        called: set[str] = set()

        def profile(frame: Any, event: str, _: Any) -> None:
            if event == "call":
                called.add(frame.f_code.co_name)

        sys.setprofile(profile)
        try:
            relations = self._related(case, jaxprs)
        except DifferentTracesError:
            return None
        finally:
            sys.setprofile(None)
        return BenchCase(f"{name} {seed}", case, jaxprs, relations, frozenset(called))

    @staticmethod
    def _related(case: meaning.RuleCase, jaxprs: Any) -> list[Relation]:
        proof = ProofSettings(relate_jaxprs, case.num_pieces, **case.settings)
        with as_users_have_it(), np.errstate(all="ignore"):
            return relate_jaxprs(proof, *jaxprs, [operand.relation for operand in case.operands])

    def _world(self, case: BenchCase) -> list[tuple[bool, Any, Any]]:
        """Return concrete results, with equal draws and with other draws."""
        if case.label not in self._worlds:
            rng, worlds = np.random.default_rng(1), []
            has_draws = any(meaning.is_drawn(operand.relation) for operand in case.case.operands)
            with as_users_have_it(), np.errstate(all="ignore"):
                runs = [jax.jit(jax.extend.core.jaxpr_as_fun(jaxpr)) for jaxpr in case.jaxprs]
                for equal_draws in [True, True] + [False] * has_draws:
                    pairs = [
                        meaning._draw_operand(rng, operand, case.case.num_pieces, equal_draws)
                        for operand in case.case.operands
                    ]
                    whole_values = list(map(np.asarray, runs[0](*[pair[0] for pair in pairs])))
                    pieces = [
                        list(map(np.asarray, runs[1](*[pair[1][i] for pair in pairs])))
                        for i in range(case.case.num_pieces)
                    ]
                    worlds.append((equal_draws, whole_values, pieces))
            self._worlds[case.label] = worlds
        return self._worlds[case.label]

    def fate(self, mutant: Mutant) -> str:
        """Return what a mutant comes to: "unsound", "error", "refuses", "differs", "unused" or
        "survives".

        "unsound" and "error" die by a property test. "refuses" knows fewer results than the rule,
        and "differs" answers another relation that is right too.
        """
        fates = {"survives"}
        used = [case for case in self.cases if mutant.function in case.functions]
        if not used:
            return "unused"
        with planted(mutant):
            for case in used:
                try:
                    relations = self._related(case.case, case.jaxprs)
                except DifferentTracesError:
                    relations = case.relations
                except Exception:
                    return "error"
                if _alike(relations, case.relations):
                    continue
                for equal_draws, whole_values, pieces in self._world(case):
                    for k, relation in enumerate(relations):
                        if not equal_draws and meaning.is_drawn(relation):
                            continue
                        try:
                            parts = [piece[k] for piece in pieces]
                            check = case.case.violation or meaning.violation
                            problem = check(relation, whole_values[k], parts)
                        except Exception:  # the relation is malformed, or of other dims
                            return "error"
                        if problem:
                            return "unsound"
                if case.case.settings.get("training"):
                    try:
                        meaning.check_rule(case.case, np.random.default_rng(1))
                    except AssertionError:  # a gradient
                        return "unsound"
                unknown = [isinstance(relation, Unrelated) for relation in relations]
                before = [isinstance(relation, Unrelated) for relation in case.relations]
                fates.add("refuses" if sum(unknown) > sum(before) else "differs")
        return next(fate for fate in ("refuses", "differs", "survives") if fate in fates)


def _alike(relations: Sequence[Relation], other_relations: Sequence[Relation]) -> bool:
    return len(relations) == len(other_relations) and all(
        a.equals(b) if isinstance(a, Known) and isinstance(b, Known) else a == b
        for a, b in zip(relations, other_relations, strict=True)
    )


def main(count: int = 200, seeds: int = 20) -> None:
    bench = Bench(sorted(CASES), seeds)
    candidates = [mutant for file in FILES for mutant in mutants(file)]
    random.Random(61).shuffle(candidates)
    fates: collections.Counter[str] = collections.Counter()
    for mutant in candidates[:count]:
        fate = bench.fate(mutant)
        fates[fate] += 1
        if fate in ("survives", "unused", "differs"):
            print(fate, mutant.name, flush=True)
    print(dict(fates))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
