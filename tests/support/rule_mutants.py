"""Mutants of the rules of the proof: one condition, number, mark or argument of a rule is changed.

`mutants` lists the changes of a file by `ast`, and `row_mutants` lists changes of the table and of
the sets of primitives. `planted` puts one into the running code of this process. `Bench` holds
cases of all rules. `benchmarks/rule_mutants.py` runs a sample of them.
"""

import ast
import collections
import contextlib
import functools
import itertools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardopt.separability import _table
from shardopt.separability._relations import Extreme, Known, Relation, Same, Split, Total, Unrelated
from shardopt.trace._jaxprs import equations
from support import dependence, lattice
from support import relation_meaning as meaning
from support.piecewise import as_users_have_it
from support.rule_cases import CASES

FOLDER = Path(_table.__file__).parent
FILES = tuple(sorted(path.stem for path in FOLDER.glob("_*.py") if path.stem != "__init__"))
"""All files with rules."""
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
BUILTINS = {"all": "any", "any": "all", "min": "max", "max": "min"}
MARKED = ("Split", "Same", "Total", "Shifted", "Extreme", "scaled")
"""Functions whose arguments are marks and ratios."""
CHUNK = 25
FEW = 16
MANY = 400
MOST_CASES = 3000
MOST_CHECKS = 30
DRAWS = 4
"""The number of cases that run before their answers are checked. The number of seeds of the cases
that show which rules a mutant belongs to, and the number of seeds of these rules, as in the slow
tests. The number of cases that run, the number of answers that are compared with concrete results,
and the number of draws of each.
"""


class Mutant(NamedTuple):
    """A change of a file.

    Attributes:
      name: "file:line function: what changed".
      file: the name of the file.
      function: the function that has the change, as in `co_qualname`; "" for a change of a set or a row
        of the table.
      number: the number of the change in this function, or in `row_mutants`.
    """

    name: str
    file: str
    function: str
    number: int


# --- changes of functions -------------------------------------------------------------------------

Place = tuple[int, str, Callable[[], None]]


def mutants(file: str) -> Iterator[Mutant]:
    """Yield every mutant of the functions of a file of `shardopt/separability`.

    Several equal changes of a function are numbered.
    """
    for function, places in _places(_tree(file)):
        counts: collections.Counter[str] = collections.Counter()
        for number, (line, change, _) in enumerate(places):
            counts[change] += 1
            nth = f" ({counts[change]})" if counts[change] > 1 else ""
            yield Mutant(f"{file}.py:{line} {function}: {change}{nth}", file, function, number)


def _tree(file: str) -> ast.Module:
    return ast.parse((FOLDER / f"{file}.py").read_text())


def _places(tree: ast.Module) -> list[tuple[str, list[Place]]]:
    """Return the changes of each function and method of a file."""
    functions = [(node.name, node) for node in tree.body if isinstance(node, ast.FunctionDef)]
    functions += [
        (f"{node.name}.{method.name}", method)
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        for method in node.body
        if isinstance(method, ast.FunctionDef)
    ]
    return [
        (name, [place for node in ast.walk(function) for place in _changes(node)])
        for name, function in functions
    ]


def _changes(node: ast.AST) -> Iterator[Place]:
    if isinstance(node, ast.BoolOp):
        yield from _dropped_conditions(node)
    if isinstance(node, ast.If | ast.IfExp):
        yield from _other_branches(node)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        other = SWAPS[type(node.ops[0])]()
        yield _place(node, type(other).__name__, lambda: node.ops.__setitem__(0, other))
    if isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
        other = SWAPS[type(node.op)]()
        yield _place(node, type(other).__name__, lambda: setattr(node, "op", other))
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        index = node.slice
        if index.value in (0, 1):
            yield _place(node, "the other", lambda: setattr(index, "value", 1 - index.value))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        yield from _other_calls(node, node.func)
    if isinstance(node, ast.Return) and isinstance(node.value, ast.Constant):
        value = node.value
        if isinstance(value.value, bool):
            yield _place(node, "not", lambda: setattr(value, "value", not value.value))
    yield from _replaced_children(node)


def _place(node: ast.AST, change: str, apply: Callable[[], None]) -> Place:
    return getattr(node, "lineno", 0), f"{change} in `{ast.unparse(node)[:70]}`", apply


def _dropped_conditions(node: ast.BoolOp) -> Iterator[Place]:
    neutral = ast.Constant(value=isinstance(node.op, ast.And))
    for i, value in enumerate(node.values):
        change = f"without `{ast.unparse(value)[:60]}`"
        yield _place(node, change, lambda i=i: node.values.__setitem__(i, neutral))


def _other_branches(node: ast.If | ast.IfExp) -> Iterator[Place]:
    for value in (False, True):
        constant = ast.Constant(value=value)
        test = f"{'always' if value else 'never'} `{ast.unparse(node.test)[:60]}`"
        yield node.lineno, test, lambda constant=constant: setattr(node, "test", constant)


def _other_calls(node: ast.Call, name: ast.Name) -> Iterator[Place]:
    if name.id in BUILTINS:
        other = BUILTINS[name.id]
        yield _place(node, other, lambda: setattr(name, "id", other))
    if name.id in MARKED:
        if len(node.args) > 1 and name.id == "Split":
            yield _place(node, "fewer arguments", lambda: node.args.pop())
        for i, keyword in enumerate(node.keywords):
            yield _place(node, f"no {keyword.arg}", lambda i=i: node.keywords.pop(i))
    if name.id == "isinstance" and isinstance(node.args[1], ast.BinOp):
        kinds = node.args[1]
        for side in (kinds.left, kinds.right):
            change = f"only {ast.unparse(side)}"
            yield _place(node, change, lambda side=side: node.args.__setitem__(1, side))


def _replaced_children(parent: ast.AST) -> Iterator[Place]:
    """Yield the changes that put another node in place of a child: shifted dims, lost marks, other
    constants.
    """
    for name, value in ast.iter_fields(parent):
        children = value if isinstance(value, list) else [value]
        for i, child in enumerate(children):
            if isinstance(parent, ast.Subscript | ast.Return) or not isinstance(child, ast.expr):
                continue
            for change, other in _replacements(child):

                def apply(i: int = i, name: str = name, other: ast.expr = other) -> None:
                    target = getattr(parent, name)
                    if isinstance(target, list):
                        target[i] = other
                    else:
                        setattr(parent, name, other)

                yield _place(child, change, apply)


def _replacements(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    loads = isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
    if isinstance(node, ast.Attribute) and loads and node.attr in ("dim", "blocks", "ratio"):
        incremented = ast.BinOp(left=node, op=ast.Add(), right=ast.Constant(value=1))
        yield f"1 more than `{ast.unparse(node)}`", incremented
    if isinstance(node, ast.Name) and loads and node.id == "as_drawn":
        yield "a mark lost", ast.parse("lambda relation: relation", mode="eval").body
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield f"{node.value + 1}", ast.Constant(value=node.value + 1)
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "is_drawn":
        yield "a mark lost", ast.Constant(value=False)


# --- changes of sets and of the table -------------------------------------------------------------

SETS = {
    "_elementwise": {"LINEAR": ("+square", "+abs", "+max"), "ADDITIVE": ("+mul", "+max", "+div")},
    "_table": {
        "WRAPPING": ("-mul", "-neg", "-sub", "-cumsum", "-reduce_window_sum", "-dot_general"),
        "LINEAR_IN_ONE": ("+exp", "+max", "+rem", "+concatenate"),
        "PLACEMENT_PARAMS": ("+dimension", "+index_dtype"),
    },
    "_loops": {"ADDING": ("+mul", "+max")},
    "_draws": {
        "DISTINCT": ("+split", "+any"),
        "KEEPS_KEYS": ("+slice", "+random_split"),
        "DRAWS": ("-random_bits", "-random_split"),
    },
}


def _params_of(primitive: str) -> frozenset[str]:
    """Return the names of the parameters of a primitive in its cases."""
    with as_users_have_it():
        return frozenset(
            param
            for draw in CASES.get(primitive, ())
            for eqn in equations(meaning.traces(draw(np.random.default_rng(0)))[0])
            if eqn.primitive.name == primitive
            for param in eqn.params
        )


@functools.cache
def row_mutants() -> list[tuple[Mutant, Any, Any]]:
    """Return the mutants of sets of primitives and of the rows of the table. Each has the value to
    change and its new value: (mutant, name or (file, name), value).
    """
    changes: list[tuple[str, str, Any, Any]] = []
    for file, sets in SETS.items():
        for name, edits in sets.items():
            value = getattr(sys.modules[f"shardopt.separability.{file}"], name)
            for edit in edits:
                word = {edit[1:]}
                changed = value | word if edit[0] == "+" else value - word
                changes.append((file, f"{name} {edit}", (file, name), changed))
    for name, rule in _table.TABLE.items():
        refused_kinds = [kind for kind in (Split, Same, Total, Extreme) if kind not in rule.accepts]
        if refused_kinds and not rule.raw:
            accepts = rule._replace(accepts=(*rule.accepts, *refused_kinds))
            changes.append(("_table", f"{name} accepts more", name, accepts))
        changes.append(("_table", f"{name} draws", name, rule._replace(draws=not rule.draws)))
        params = rule._replace(size_params=_params_of(name))
        changes.append(("_table", f"{name} any params", name, params))
    return [
        (Mutant(f"{file}.py row: {change}", file, "", number), key, value)
        for number, (file, change, key, value) in enumerate(changes)
    ]


# --- running a mutant -----------------------------------------------------------------------------


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _functions() -> list[types.FunctionType]:
    """Return all functions of the rules, with methods and those in closures."""
    pending = [value for file in FILES for value in vars(_module(file)).values()]
    pending += [rule.results for rule in _table.TABLE.values()]
    functions: dict[int, types.FunctionType] = {}
    classes: set[type] = set()
    while pending:
        value = pending.pop()
        if isinstance(value, type) and value.__module__.startswith("shardopt.separability"):
            if value not in classes:
                classes.add(value)
                pending += vars(value).values()
        elif isinstance(value, property):
            pending.append(value.fget)
        elif isinstance(value, types.FunctionType) and id(value) not in functions:
            if value.__module__.startswith("shardopt.separability"):
                functions[id(value)] = value
                pending += [cell.cell_contents for cell in value.__closure__ or ()]
        elif isinstance(value, dict):
            pending += value.values()
    return list(functions.values())


def _module(file: str) -> types.ModuleType:
    return sys.modules[f"shardopt.separability.{file}"]


@contextlib.contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """Run with a mutant in place of a function, a row of the table or a set."""
    if mutant.function:
        with _other_function(mutant):
            yield
        return
    _, key, value = row_mutants()[mutant.number]
    if isinstance(key, str):
        before = _table.TABLE[key]
        _table.TABLE[key] = value
        try:
            yield
        finally:
            _table.TABLE[key] = before
        return
    before = getattr(_module(key[0]), key[1])
    modules = [_module(file) for file in FILES if getattr(_module(file), key[1], None) is before]
    for module in modules:
        setattr(module, key[1], value)
    try:
        yield
    finally:
        for module in modules:
            setattr(module, key[1], before)


@contextlib.contextmanager
def _other_function(mutant: Mutant) -> Iterator[None]:
    path = _module(mutant.file).__file__
    tree = _tree(mutant.file)
    for function, places in _places(tree):
        if function == mutant.function:
            places[mutant.number][2]()
    changed = {
        (code.co_qualname, code.co_firstlineno): code
        for code in _codes(compile(ast.fix_missing_locations(tree), str(path), "exec"))
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
    """A traced case, with the rule's answer without a mutant.

    Attributes:
      primitive: the name of the rule.
      seed: the seed of the case.
      case: the case.
      jaxprs: its traces.
      relations: the answer of the rule.
      functions: the names of the functions that ran.
      primitives: the names of the primitives in the trace on the whole batch.
    """

    primitive: str
    seed: int
    case: meaning.RuleCase
    jaxprs: Sequence[Any]
    relations: list[Relation]
    functions: frozenset[str]
    primitives: frozenset[str]


class Bench:
    """Cases of all rules: the first ones, and those that mutants asked for.

    Args:
      names: the rules; by default all.
    """

    def __init__(self, names: Sequence[str] = ()):
        self.cases = {
            (name, seed): _traced(name, seed)
            for seed in range(FEW)
            for name in names or sorted(CASES)
        }

    def _cases_of(self, mutant: Mutant) -> Iterator[BenchCase]:
        """Yield the first cases that use what a mutant changes, then cases of the same rules."""
        first = [case for case in self.cases.values() if case.seed < FEW]
        first = [case for case in first if self._uses(case, mutant)]
        yield from first
        names = sorted(
            {case.primitive for case in first} or {case.primitive for case in self.cases.values()}
        )
        for seed in range(FEW, MANY):
            for name in names:
                if (name, seed) not in self.cases:
                    self.cases[name, seed] = _traced(name, seed)
                if self._uses(self.cases[name, seed], mutant):
                    yield self.cases[name, seed]

    def fate(self, mutant: Mutant) -> str:
        """Return the fate of a mutant: "unsound", "error", "refuses", "differs", "unused" or
        "survives".

        "unsound" and "error" die by a property test. "refuses" knows fewer results than the rule,
        and "differs" answers another relation that is right too.
        """
        if mutant.file == "_dependence":
            return _fate_of_dependence(mutant)
        if mutant.function in lattice.CHECKS and _breaks_lattice(mutant):
            return "unsound"
        cases = itertools.islice(self._cases_of(mutant), MOST_CASES)
        fates = ["unused"]
        while chunk := list(itertools.islice(cases, CHUNK)):
            answers: list[Sequence[Relation]] = []
            with planted(mutant):
                for case in chunk:
                    try:
                        answers.append(_answered(case))
                    except Exception:
                        return "error"
            for case, relations in zip(chunk, answers, strict=True):
                fate = _judged(case, relations)
                if fate in ("unsound", "error"):
                    return fate
                fates.append(fate)
            if fates.count("differs") >= MOST_CHECKS:
                break
        return next(fate for fate in ("refuses", "differs", "survives", "unused") if fate in fates)

    @staticmethod
    def _uses(case: BenchCase, mutant: Mutant) -> bool:
        if mutant.function:
            return mutant.function in case.functions
        key = row_mutants()[mutant.number][1]
        if isinstance(key, str):
            return case.primitive == key
        return mutant.name[mutant.name.rindex(" ") + 2 :] in case.primitives


def _traced(name: str, seed: int) -> BenchCase:
    case = CASES[name][seed % len(CASES[name])](np.random.default_rng(seed))
    called: set[str] = set()

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call" and "separability" in frame.f_code.co_filename:
            called.add(frame.f_code.co_qualname.partition(".<locals>")[0])

    with as_users_have_it(), np.errstate(all="ignore"):
        jaxprs = meaning.traces(case)
        sys.setprofile(profile)
        relations = meaning.relations_of(case, jaxprs)
        sys.setprofile(None)
    primitives = frozenset(eqn.primitive.name for eqn in equations(jaxprs[0]))
    return BenchCase(name, seed, case, jaxprs, relations, frozenset(called), primitives)


def _answered(case: BenchCase) -> list[Relation]:
    with as_users_have_it(), np.errstate(all="ignore"):
        return meaning.relations_of(case.case, case.jaxprs)


def _judged(case: BenchCase, relations: Sequence[Relation]) -> str:
    """Return the verdict on a mutant's answer to a case."""
    if len(relations) != len(case.relations):
        return "error"
    pairs = list(zip(relations, case.relations, strict=True))
    if all(_alike(*pair) for pair in pairs):
        return "survives"
    if all(isinstance(relation, Unrelated) or _alike(relation, old) for relation, old in pairs):
        return "refuses"
    try:
        with as_users_have_it(), np.errstate(all="ignore"):
            rng = np.random.default_rng(1)
            meaning.check_answer(case.case, case.jaxprs, relations, rng, DRAWS)
    except AssertionError:
        return "unsound"
    except Exception:  # the relation is malformed, or of other dims
        return "error"
    return "differs"


def _alike(a: Relation, b: Relation) -> bool:
    """Return whether relations are equal.

    How the keys of a result are made does not count: other draws of a case show it. Neither does
    the reason why nothing is known.
    """
    if isinstance(a, Unrelated) and isinstance(b, Unrelated):
        return True
    if isinstance(a, Same) and isinstance(b, Same):
        return (a.ratio, a.drawn) == (b.ratio, b.drawn)
    return a.equals(b) if isinstance(a, Known) and isinstance(b, Known) else a == b


def _breaks_lattice(mutant: Mutant) -> bool:
    try:
        with planted(mutant):
            return bool(lattice.problems(mutant.function))
    except Exception:
        return True


def _fate_of_dependence(mutant: Mutant) -> str:
    try:
        with planted(mutant):
            answers = dependence.answers()
    except Exception:
        return "error"
    if any(dependence.problems(answers)):
        return "unsound"
    return "survives" if answers == dependence.answers() else "differs"
