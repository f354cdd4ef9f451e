"""Restore into another optax chain: read the stored leaves that fit, start the other ones."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike

from shardopt.checkpoint._listing import listing, tell
from shardopt.checkpoint._match import OPT_STATE, Match, NewChain, match_leaves, without_common_end
from shardopt.checkpoint._record import Meta
from shardopt.checkpoint._replicas import as_stored, fits, to_wanted
from shardopt.checkpoint._store import StoredLeaves, describe, dtype_of
from shardopt.checkpoint._tree import LeafPath, leaves_by_path, nest, show, unescape
from shardopt.core import MAX_LISTED, CheckpointError, PyTree, error_text, plural, with_leaves
from shardopt.step._inputs import put

Read = Callable[[PyTree], PyTree]
"""A function that returns an abstract state with the stored values."""


class Chain(NamedTuple):
    """A chain that may be another one than the stored one.

    Attributes:
      new_chain: the argument of `restore`.
      init: returns the first state of the optimizer, for a state with the restored parameters.
      params: parameters with the leaves that the checkpoint does not have; or None.
    """

    new_chain: NewChain
    init: Callable[[PyTree], PyTree]
    params: PyTree = None

    def is_new(self, meta: Meta, wanted_state: PyTree) -> bool:
        """Return whether leaves are matched other than each with its own path."""
        paths = leaves_by_path(wanted_state)
        has_names = isinstance(self.new_chain, Mapping) and bool(self.new_chain)
        if has_names or meta.leaves.keys() != paths.keys():
            return True
        fits_leaf = fits(meta.leaves, wanted_state)
        return not all(fits_leaf(path, path) for path in paths)

    def new_params(self, meta: Meta, wanted_state: PyTree) -> set[LeafPath] | None:
        """Return the paths of parameters that `params` has, and the checkpoint not in this shape.

        None if the parameters must be the stored ones: without `params`, or if the checkpoint has
        none of them, since it is the checkpoint of another model.
        """
        if self.params is None:
            return None
        paths = {
            path: leaf for path, leaf in leaves_by_path(wanted_state).items() if is_param(path)
        }
        new = {
            path
            for path, leaf in paths.items()
            if path not in meta.leaves or meta.leaves[path].shape != tuple(leaf.shape)
        }
        return new if len(new) < len(paths) else None


def is_param(path: LeafPath) -> bool:
    """Return whether a leaf of a train state is a parameter."""
    return path[0] == "params"


def without_params(
    meta: Meta, wanted_state: PyTree, new_params: set[LeafPath] | None
) -> tuple[StoredLeaves, PyTree]:
    """Return the stored leaves and the wanted state that must be equal: without the optimizer
    state, without new parameters and without the stored ones that they replace.
    """
    wanted = wanted_state._replace(opt_state=())
    leaves = leaves_by_path(wanted)
    stored = {
        path: leaf
        for path, leaf in meta.leaves.items()
        if path[0] != OPT_STATE and not _is_replaced(path, leaves, new_params)
    }
    equal_leaves = [None if path in (new_params or ()) else leaf for path, leaf in leaves.items()]
    return stored, with_leaves(wanted, equal_leaves)


def _is_replaced(
    path: LeafPath, wanted: Collection[LeafPath], new_params: set[LeafPath] | None
) -> bool:
    """Return whether a stored leaf is a parameter that the model has no more, or in another shape."""
    if new_params is None or not is_param(path):
        return False
    return path not in wanted or path in new_params


def fill_new_chain(
    source: str,
    meta: Meta,
    wanted_state: PyTree,
    read: Read,
    chain: Chain,
    new_params: set[LeafPath] | None,
) -> PyTree:
    """Return a state with the stored leaves that fit, and the first values of the others.

    Args:
      source: the name of the stored state, for messages.
      meta: its record; parameters, step and random key are known to fit.
      wanted_state: the abstract state.
      read: returns the stored values for an abstract state whose shapes are the stored ones.
      chain: the new chain.
      new_params: the paths of the parameters that come from `chain.params`.
    """
    wanted = leaves_by_path(wanted_state)
    replaced = {path for path in meta.leaves if _is_replaced(path, wanted, new_params)}
    match = match_leaves(
        meta.leaves,
        wanted,
        fits(meta.leaves, wanted_state, cast=True),
        chain.new_chain,
        {path[1:] for path in replaced},
    )
    new_params = new_params or set()
    _tell_match(source, meta, wanted_state, match, new_params)
    stored = {path: meta.leaves[origin] for path, origin in match.sources.items()}
    readable, changes = as_stored(source, stored, wanted_state, "opt")
    abstract_leaves = leaves_by_path(readable)
    for path, leaf in stored.items():  # in the stored dtype: sums are of the stored bits
        abstract_leaves[path] = abstract_leaves[path].update(dtype=dtype_of(leaf))
    leaves = _read(match.sources, abstract_leaves, read)
    _check_equal(source, match, leaves, abstract_leaves, read)
    leaves = {path: _cast(leaf, wanted[path].dtype) for path, leaf in leaves.items()}
    values = leaves_by_path({"params": chain.params}) if new_params else {}
    leaves |= {path: _placed(values[path], wanted[path].sharding) for path in new_params}
    if match.started:
        # From the restored parameters: the first values of some states depend on them
        # (schedule-free).
        leaves |= _started(chain, wanted_state, leaves, match.started)
    return to_wanted(with_leaves(wanted_state, [leaves[path] for path in wanted]), changes)


def _placed(leaf: jax.Array | np.ndarray, sharding: Sharding) -> jax.Array:
    """Return a copy of a leaf: a step donates it, and the leaf belongs to the user."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        leaf = put(leaf, sharding)
    return jax.jit(jnp.copy, out_shardings=sharding)(leaf)


def _cast(leaf: jax.Array, dtype: DTypeLike) -> jax.Array:
    if leaf.dtype == dtype:
        return leaf
    return jax.jit(lambda leaf: leaf.astype(dtype), out_shardings=leaf.sharding)(leaf)


def _read(
    sources: Mapping[LeafPath, LeafPath],
    abstract_leaves: Mapping[LeafPath, jax.ShapeDtypeStruct],
    read: Read,
) -> dict[LeafPath, jax.Array]:
    """Return the leaves by path, read from their sources.

    A source of several leaves is read for each of them: a step donates all leaves, so none may
    share memory.
    """
    leaves: dict[LeafPath, jax.Array] = {}
    # Each turn reads every source once, into the first leaf that still wants it.
    while open_paths := [path for path in sources if path not in leaves]:
        paths = {sources[path]: path for path in open_paths}
        tree = nest(
            {tuple(map(unescape, origin)): abstract_leaves[path] for origin, path in paths.items()}
        )
        restored = leaves_by_path(read(tree))
        leaves |= {path: restored[origin] for origin, path in paths.items()}
    return leaves


def _check_equal(
    source: str,
    match: Match,
    leaves: Mapping[LeafPath, jax.Array],
    abstract_leaves: Mapping[LeafPath, jax.ShapeDtypeStruct],
    read: Read,
) -> None:
    """Refuse stored numbers that fill the same leaf, and are not equal."""
    lines = []
    for path, others in match.equal.items():
        for other in others:
            value = _read({path: other}, abstract_leaves, read)[path]
            if not jax.jit(jnp.array_equal)(value, leaves[path]):
                lines.append(f"{show(path)}: {show(match.sources[path])} or {show(other)}")
    if lines:
        problem = f"{source} has different numbers for the same leaf of opt."
        fix = "say which by new_chain={leaf of opt: leaf of the checkpoint}, or None to start it."
        raise CheckpointError(error_text(problem, lines, fix=fix))


def _started(
    chain: Chain,
    wanted_state: PyTree,
    leaves: Mapping[LeafPath, jax.Array],
    started: list[LeafPath],
) -> dict[LeafPath, jax.Array]:
    """Return the first values of leaves; the memory of other first values is freed."""
    params = wanted_state._replace(opt_state=())
    params = with_leaves(params, [leaves[path] for path in leaves_by_path(params)])
    first_leaves = leaves_by_path(chain.init(params))
    for path, leaf in first_leaves.items():
        if path not in started:
            leaf.delete()
    return {path: first_leaves[path] for path in started}


def _tell_match(
    source: str, meta: Meta, wanted_state: PyTree, match: Match, new_params: set[LeafPath]
) -> None:
    """Print which states were matched, started and dropped."""
    wanted = {path: describe(leaf) for path, leaf in leaves_by_path(wanted_state).items()}
    lines = []
    moved = Counter(
        without_common_end(path, origin)
        for path, origin in match.sources.items()
        if path[0] == OPT_STATE
    )
    for (path, origin), count in moved.items():
        text = f"{show(path)} from {show(origin)}" if path != origin else "under the same paths"
        lines.append(f"{plural(count, 'leaf')} matched: {text}")
    cast = [
        path
        for path, origin in match.sources.items()
        if wanted[path].dtype != meta.leaves[origin].dtype
    ]
    lines += _listed(wanted, cast, "cast")
    lines += _listed(wanted, [path for path in wanted if path in new_params], "taken from params")
    lines += _listed(wanted, match.started, "started")
    lines += _listed(meta.leaves, match.dropped, "dropped")
    tell("\n  ".join([f"{source} has the state of another chain than opt.", *lines]))


def _listed(leaves: StoredLeaves, paths: Iterable[LeafPath], verdict: str) -> list[str]:
    """Return lines with the verdict on some leaves of a state."""
    listed_leaves = {path: leaves[path] for path in paths}
    other_leaves = {path: leaf for path, leaf in leaves.items() if path not in listed_leaves}
    return listing(listed_leaves, other_leaves, verdict, MAX_LISTED)
