"""A checkpoint for another optax chain: which stored leaf fills which leaf of the new state.

A leaf is matched by its role (`mu`, `trace`, `count`) and by its parameter. Its place in the chain
is no evidence: in chain(clip, trace, trace) and chain(trace, trace) another trace is second.

The leaves of one transformation are a record, such as (count, mu, nu) of Adam. A record is filled
completely or not at all, since `count` corrects the bias of both moments. Only a running maximum
may start when the others go on.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from shardopt.checkpoint._tree import LeafPath, show
from shardopt.core import CheckpointError, error_text, value_error

NewChain = bool | Mapping[str, str | None]
"""Whether the chain may be another one; or where states of the new chain lie in the stored one."""

OPT_STATE = "opt_state"
_CHAIN_FIELDS = ("optimizer", "value")
"""The fields of `ReplicaStates` and `CompressedOptState` that hold the state of the optax chain."""

_RUNNING_MAXIMA = {"nu_max"}
"""Moments that may start when others go on: no `count` corrects their bias."""

_Fits = Callable[[LeafPath, LeafPath], bool]
_Sources = dict[LeafPath, LeafPath]
"""Leaf -> the stored leaf that fills it."""
_Equal = dict[LeafPath, list[LeafPath]]
"""Leaf -> further stored leaves, which must be equal to the one that fills it."""


class Match(NamedTuple):
    """The stored leaves for a state.

    Attributes:
      sources: the path of the stored leaf, by the path of the leaf that it fills.
      equal: further stored leaves that must hold the same number, by the path of the leaf.
      started: the paths of leaves that no stored leaf fills.
      dropped: the paths of stored leaves that fill none.
    """

    sources: _Sources
    equal: _Equal
    started: list[LeafPath]
    dropped: list[LeafPath]


class Record(NamedTuple):
    """The leaves of one transformation.

    Attributes:
      node: the path of its state.
      moments: for each field with a leaf for each parameter, the paths by parameter.
      numbers: the paths of other leaves, by field.
      containers: the fields with states of other transformations.
    """

    node: LeafPath
    moments: dict[str, dict[LeafPath, LeafPath]]
    numbers: dict[str, LeafPath]
    containers: set[str]

    @property
    def fields(self) -> set[str]:
        """The fields with leaves."""
        return {*self.moments, *self.numbers}

    @property
    def params(self) -> list[LeafPath | None]:
        """The parameters with all moments; None stands for a record that has only numbers."""
        if not self.moments:
            return [None]
        first, *others = self.moments.values()
        return [param for param in first if all(param in paths for paths in others)]


_Fillers = list[tuple[Record, list[Record]]]
"""Records, each with the stored records that may fill it."""


def match_leaves(
    stored: Iterable[LeafPath],
    wanted: Iterable[LeafPath],
    fits: _Fits,
    new_chain: NewChain,
    replaced: Collection[LeafPath],
) -> Match:
    """Return which stored leaf of an optimizer state fills which leaf of another chain.

    Args:
      stored: the paths of the stored train state.
      wanted: the paths of the new train state.
      fits: returns whether a wanted leaf has the shape and dtype of a stored leaf.
      new_chain: where states of the new chain lie in the stored one; or True.
      replaced: the stored parameters that fill nothing, and neither do their moments.

    Raises:
      CheckpointError: if several stored leaves fit, or fit several leaves.
      ValueError: if `new_chain` names a state that is not there.
    """
    stored = list(stored)
    wanted = list(wanted)
    params = {path[1:] for path in (*stored, *wanted) if path[0] == "params"}
    roots = _chain_root(stored), _chain_root(wanted)
    usable = [path for path in stored if _param_of(path, roots[0], params) not in replaced]
    sources, named = _named_sources(new_chain, usable, wanted)
    # A number may fill several leaves: the count of a new schedule goes on from the count of Adam.
    moments = {
        origin
        for origin in sources.values()
        if _split(origin, len(roots[0]), params)[2] is not None
    }
    free = _without(usable, moments), _without(wanted, named)
    filled, equal = _filled_records(free, roots, params, fits)
    sources |= filled | _other_sources(*free, *roots, params, fits)
    used = {*sources.values(), *(path for paths in equal.values() for path in paths)}
    return Match(
        sources,
        equal,
        [path for path in _without(wanted, sources) if path[0] == OPT_STATE],
        _without(stored, used),
    )


def _without(paths: list[LeafPath], removed: Collection[LeafPath]) -> list[LeafPath]:
    return [path for path in paths if path not in removed]


def _param_of(path: LeafPath, root: LeafPath, params: set[LeafPath]) -> LeafPath | None:
    """Return the parameter of a leaf, which may be one of its moments; None if it has none."""
    return path[1:] if path[0] == "params" else _split(path, len(root), params)[2]


def _filled_records(
    free: tuple[list[LeafPath], list[LeafPath]],
    roots: tuple[LeafPath, LeafPath],
    params: set[LeafPath],
    fits: _Fits,
) -> tuple[_Sources, _Equal]:
    """Return the sources of leaves in the chain, and further leaves that must be equal to them.

    A record is filled by a record with the same fields, else by one with more fields. Else it is
    filled by one without its running maxima.
    """
    old_records, new_records = (
        _records(paths, root, params) for paths, root in zip(free, roots, strict=True)
    )
    sources: _Sources = {}
    equal: _Equal = {}
    # The strictest rule first. A record that it fills is taken, and a weaker rule cannot steal it.
    for rule in (_equal_fields, _fewer_fields, _more_maxima):
        _fill(new_records, old_records, rule, fits, sources, equal)
    return sources, equal


def _named_sources(
    new_chain: NewChain, stored: list[LeafPath], wanted: list[LeafPath]
) -> tuple[_Sources, set[LeafPath]]:
    """Return the stored leaves that the user named, and the leaves that they named them for."""
    if isinstance(new_chain, bool):
        return {}, set()
    stored_names = {show(path): path for path in stored}
    sources = {}
    named = set()
    unknown = []
    for state, source in new_chain.items():
        inside = {
            path: show(path).removeprefix(state)
            for path in wanted
            if f"{show(path)}/".startswith(f"{state}/")
        }
        named |= inside.keys()
        if source is not None:
            sources |= {
                path: stored_names[f"{source}{end}"]
                for path, end in inside.items()
                if f"{source}{end}" in stored_names
            }
        if not inside:
            unknown.append(f"{state}: not in the state of opt")
        elif source is not None and not inside.keys() & sources.keys():
            unknown.append(f"{source}: not in the checkpoint, for {state}")
    if unknown:
        fix = 'name states by their paths: {"opt_state/1/trace": "opt_state/0/trace"}.'
        raise value_error("new_chain names states that are not there.", unknown, fix=fix)
    return sources, named


def _chain_root(paths: Iterable[LeafPath]) -> LeafPath:
    """Return where the state of the optax chain lies: replicas and reducers have states next to
    it.
    """
    prefixes = {path[:length] for path in paths for length in (2, 3)}
    root: LeafPath = (OPT_STATE,)
    for field in _CHAIN_FIELDS:
        if (*root, field) in prefixes:
            root = (*root, field)
    return root


def _records(
    paths: list[LeafPath],
    root: LeafPath,
    params: set[LeafPath],
) -> list[Record]:
    records: dict[LeafPath, Record] = {}
    chain_paths = [path for path in paths if path[: len(root)] == root]
    for path in chain_paths:
        node, field, param = _split(path, len(root), params)
        record = records.setdefault(node, Record(node, {}, {}, set()))
        if param is None:
            record.numbers[field] = path
        else:
            record.moments.setdefault(field, {})[param] = path
    for node, record in records.items():
        inner = {path[len(node)] for path in chain_paths if path[: len(node)] == node}
        record.containers.update(name for name in inner - record.fields if not name.isdecimal())
    return list(records.values())


def _split(
    path: LeafPath, start: int, params: set[LeafPath]
) -> tuple[LeafPath, str, LeafPath | None]:
    """Return the state that a leaf belongs to, its field, and its parameter or None."""
    for place in range(start, len(path)):
        # The longest end of the path that names a parameter. A number before it is a place in a
        # chain and no field.
        if path[place + 1 :] in params and not path[place].isdecimal():
            return path[:place], path[place], path[place + 1 :]
    return path[:-1], path[-1], None


def _equal_fields(new: Record, old: Record) -> bool:
    hold_alike = new.containers & old.containers or not (new.containers or old.containers)
    if not new.moments and not hold_alike:
        return False  # the count of a schedule is another than that of inject_hyperparams
    return new.moments.keys() == old.moments.keys() and new.numbers.keys() == old.numbers.keys()


def _fewer_fields(new: Record, old: Record) -> bool:
    if not new.moments:
        return False  # the count of a schedule is not that of Adam
    return new.moments.keys() <= old.moments.keys() and new.numbers.keys() <= old.numbers.keys()


def _more_maxima(new: Record, old: Record) -> bool:
    """Return whether only running maxima are new, as from Adam to AMSGrad."""
    lasting = new.moments.keys() - _RUNNING_MAXIMA
    return (
        bool(lasting) and old.moments.keys() == lasting and new.numbers.keys() == old.numbers.keys()
    )


def _fill(
    new_records: list[Record],
    old_records: list[Record],
    rule: Callable[[Record, Record], bool],
    fits: _Fits,
    sources: _Sources,
    equal: _Equal,
) -> None:
    """Fill the records that are still open from stored records that are still free, by a rule."""
    used = set(sources.values())
    open_records = [record for record in new_records if not _paths(record) & sources.keys()]
    free_records = [record for record in old_records if not _paths(record) & used]
    groups: dict[tuple[frozenset[str], bool], list[Record]] = {}
    for record in open_records:
        group = frozenset(record.fields), bool(record.containers)
        groups.setdefault(group, []).append(record)
    for records in groups.values():
        fillers = [
            (new, [old for old in free_records if rule(new, old) and _fits_record(new, old, fits)])
            for new in records
        ]
        for new, olds in _pair([pair for pair in fillers if pair[1]]):
            _take(new, olds, sources, equal)


def _paths(record: Record) -> set[LeafPath]:
    return {
        *record.numbers.values(),
        *(path for paths in record.moments.values() for path in paths.values()),
    }


def _fits_record(new: Record, old: Record, fits: _Fits) -> bool:
    """Return whether records have parameters in common, and their leaves the same shapes."""
    common = [param for param in new.params if param in old.params]
    pairs = [(path, old.numbers[field]) for field, path in new.numbers.items()]
    for field, of_field in old.moments.items():
        paths = new.moments.get(field)
        if paths:
            pairs += [(paths[param], of_field[param]) for param in common if param is not None]
    return bool(common) and all(fits(*pair) for pair in pairs)


def _pair(fillers: _Fillers) -> _Fillers:
    """Return which stored records fill which records.

    Args:
      fillers: records with the same fields, each with the stored records that fit.

    Raises:
      CheckpointError: if that is open.
    """
    # Without an overlap each parameter of a record has one source, even if several records share
    # them.
    if not fillers or not _overlap(fillers):
        return fillers
    # Two Adams in one chain, for example: alike in fields, and told apart by their places.
    pairs = _pairs_by_place(fillers)
    if pairs is not None:
        return pairs
    new_records = [new for new, _ in fillers]
    if len(new_records) == 1 and not new_records[0].moments:
        return fillers  # the numbers are compared when they are read
    raise _open_pairs(fillers)


def _overlap(fillers: _Fillers) -> bool:
    """Return whether a stored record fits several records, or several fit one, for a parameter."""
    claims = [
        (new.node, old.node, param)
        for new, olds in fillers
        for old in olds
        for param in new.params
        if param in old.params
    ]
    num_filled = len({(node, param) for node, _, param in claims})
    num_used = len({(node, param) for _, node, param in claims})
    return not num_filled == num_used == len(claims)


def _pairs_by_place(
    fillers: _Fillers,
) -> _Fillers | None:
    """Return records with the stored records at the same places; None if their places differ."""
    new_records = _by_place([new for new, _ in fillers])
    old_records = _by_place([old for _, olds in fillers for old in olds])
    if new_records.keys() != old_records.keys():
        return None
    return [(new, [old_records[place]]) for place, new in new_records.items()]


def _open_pairs(fillers: _Fillers) -> CheckpointError:
    lines = [
        f"{show(new.node)} ({', '.join(sorted(new.fields))}):"
        f" {' or '.join(show(old.node) for old in olds)}"
        for new, olds in fillers
    ]
    example = {show(fillers[0][0].node): show(fillers[0][1][0].node)}
    problem = "the checkpoint does not say which stored state belongs to which state of opt."
    fix = (
        f"name them all, as in new_chain={example}, or in resume= of Checkpoints; None starts a"
        " state again."
    )
    return CheckpointError(error_text(problem, lines, fix=fix))


def _by_place(records: list[Record]) -> dict[LeafPath, Record]:
    """Return records by their places below the deepest node that holds all of them."""
    first = records[0].node
    depth = min(_common_length(first, record.node) for record in records)
    return {record.node[depth:]: record for record in records}


def _common_length(path: LeafPath, other: LeafPath) -> int:
    """Return the number of names at the start of both paths."""
    pairs = zip(path, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def without_common_end(path: LeafPath, other: LeafPath) -> tuple[LeafPath, LeafPath]:
    """Return two paths without the names at the end of both."""
    length = _common_length(path[::-1], other[::-1])
    return path[: len(path) - length], other[: len(other) - length]


def _take(
    new: Record,
    olds: list[Record],
    sources: _Sources,
    equal: _Equal,
) -> None:
    """Fill a record from stored records that hold its parameters."""
    for old in olds:
        for field, of_field in old.moments.items():
            paths = new.moments.get(field, {})
            sources.update(
                {path: of_field[param] for param, path in paths.items() if param in old.params}
            )
    first, *equal_olds = olds
    for field, path in new.numbers.items():
        sources[path] = first.numbers[field]
        equal[path] = [old.numbers[field] for old in equal_olds]


def _other_sources(
    stored: list[LeafPath],
    wanted: list[LeafPath],
    old_root: LeafPath,
    new_root: LeafPath,
    params: set[LeafPath],
    fits: _Fits,
) -> _Sources:
    """Return the sources of leaves outside of the chain, each under its own path.

    Moments of an outer optimizer are numbered, without the names of parameters. So they are taken
    only if all of them are there.
    """
    old_paths = {path for path in stored if path[: len(old_root)] != old_root}
    new_paths = [path for path in wanted if path[: len(new_root)] != new_root]
    numbered = {
        path
        for path in {*old_paths, *new_paths}
        if path[0] == OPT_STATE and _split(path, 1, params)[2] is None
    }
    restored = {
        path
        for path in old_paths.intersection(new_paths)
        if path[0] != OPT_STATE or fits(path, path)
    }
    if not numbered <= restored:
        restored -= numbered
    return {path: path for path in new_paths if path in restored}
