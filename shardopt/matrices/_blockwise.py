"""Whether an optimizer update does the same to every block of the model, so that blocks can be
updated one by one.

The proof compares two traces: the update of L blocks and the update of one block. They must have
the same equations. A dim that is k L long in the first trace and k long in the second counts
blocks, and no equation may mix along it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.extend.core as jex
import numpy as np
from jax.typing import ArrayLike

from shardopt.trace._jaxprs import called_jaxprs, shape_of
from shardopt.trace._matrix_work import is_opaque
from shardopt.trace._parts import Atom, variables_of
from shardopt.trace._primitives import DECOMPOSITIONS, ELEMENTWISE

_MIXED_DIM = {
    "sort": "dimension",
    "cumsum": "axis",
    "cumprod": "axis",
    "cummax": "axis",
    "cummin": "axis",
    "iota": "dimension",
}
"""Primitives that mix values along one dim -> the parameter that names this dim."""
_NEVER_MIXING = ELEMENTWISE | {"broadcast_in_dim", "transpose", "slice", "pad"}
_REDUCTION_PREFIXES = ("reduce_", "arg")
"""Reductions; if the result still has a dim of blocks, they reduce other dims."""


def match_variables(full: jex.Jaxpr, single: jex.Jaxpr) -> dict[jex.Var, jex.Var] | None:
    """Return variable of the full trace -> same variable of the single-block trace.

    None if the equations differ.

    Constants are matched where they are first read. The inputs of an equation that evaluates the
    loss are not compared.
    """
    if len(full.eqns) != len(single.eqns) or len(full.invars) != len(single.invars):
        return None
    matches = dict(zip(full.invars, single.invars, strict=True))
    unmatched_constants = set(full.constvars), set(single.constvars)

    def atoms_match(full_atom: Atom, single_atom: Atom) -> bool:
        if isinstance(full_atom, jex.Literal):
            return isinstance(single_atom, jex.Literal) and _same_bits(
                full_atom.val, single_atom.val
            )
        if full_atom in unmatched_constants[0] and single_atom in unmatched_constants[1]:
            matches.setdefault(full_atom, single_atom)
        return matches.get(full_atom) is single_atom and len(shape_of(full_atom)) == len(
            shape_of(single_atom)
        )

    def inputs_match(full_atoms: Sequence[Atom], single_atoms: Sequence[Atom]) -> bool:
        return len(full_atoms) == len(single_atoms) and all(
            map(atoms_match, full_atoms, single_atoms)
        )

    for full_eqn, single_eqn in zip(full.eqns, single.eqns, strict=True):
        evaluates_loss = is_opaque(full_eqn) and is_opaque(single_eqn)
        same_inputs = evaluates_loss or inputs_match(full_eqn.invars, single_eqn.invars)
        if full_eqn.primitive is not single_eqn.primitive or not same_inputs:
            return None
        matches |= dict(zip(full_eqn.outvars, single_eqn.outvars, strict=True))
    return matches if inputs_match(full.outvars, single.outvars) else None


def _same_bits(a: ArrayLike, b: ArrayLike) -> bool:
    """Return whether two constants have the same shape, dtype and bits; a NaN equals itself."""
    a = np.asarray(a)
    b = np.asarray(b)
    return (a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes())


def is_blockwise(
    full: Sequence[jex.JaxprEqn],
    single: Sequence[jex.JaxprEqn],
    matches: Mapping[jex.Var, jex.Var],
    blocks: int,
) -> bool:
    """Return whether every equation does the same to each block and never mixes blocks.

    Args:
      full: equations of the update of L blocks.
      single: the same equations of the update of one block.
      matches: the result of `match_variables`.
      blocks: L.
    """
    pairs = zip(full, single, strict=True)
    return all(
        _keeps_blocks_apart(full_eqn, single_eqn, matches, blocks) for full_eqn, single_eqn in pairs
    )


def block_dim(var: jex.Var, matches: Mapping[jex.Var, jex.Var], blocks: int) -> int | None:
    """Return the dim of a variable that counts blocks.

    None if no dim does; -1 if the two shapes differ in another way.
    """
    full_shape = shape_of(var)
    single_shape = shape_of(matches[var])
    different_dims = [
        dim for dim, (a, b) in enumerate(zip(full_shape, single_shape, strict=True)) if a != b
    ]
    # Blocks are found by comparing shapes: a dim that is as long in both traces counts no blocks.
    if not different_dims:
        return None
    dim, *more_dims = different_dims
    return dim if not more_dims and full_shape[dim] == blocks * single_shape[dim] else -1


def _keeps_blocks_apart(
    eqn: jex.JaxprEqn, single: jex.JaxprEqn, matches: Mapping[jex.Var, jex.Var], blocks: int
) -> bool:
    input_dims = [
        None if isinstance(var, jex.Literal) else block_dim(var, matches, blocks)
        for var in eqn.invars
    ]
    output_dims = [block_dim(var, matches, blocks) for var in eqn.outvars]
    dims = {*input_dims, *output_dims}
    if dims <= {None}:
        return True
    if -1 in dims:
        return False
    inner_jaxprs = called_jaxprs(eqn)
    if inner_jaxprs:
        if eqn.params.get("length") != single.params.get("length"):
            return False  # a loop over blocks
        return all(
            _is_blockwise_inside(a, b, blocks)
            for a, b in zip(inner_jaxprs, called_jaxprs(single), strict=True)
        )
    # Inputs have a dim of blocks here, and a result has none.
    if None in output_dims:
        return False  # blocks were added up, or one block was selected
    return _primitive_keeps_blocks_apart(eqn, input_dims, output_dims)


def _primitive_keeps_blocks_apart(
    eqn: jex.JaxprEqn, input_dims: Sequence[int | None], output_dims: Sequence[int | None]
) -> bool:
    """Return whether a primitive never mixes along the dims that count blocks.

    All outputs have such a dim.
    """
    name = eqn.primitive.name
    if name in ("reshape", "squeeze", "expand_dims"):
        (input_dim,), (output_dim,) = input_dims, output_dims
        if input_dim is None:
            return False
        old_shape = shape_of(eqn.invars[0])
        new_shape = shape_of(eqn.outvars[0])
        # otherwise blocks would be interleaved
        return math.prod(old_shape[:input_dim]) == math.prod(new_shape[:output_dim])
    if name in _MIXED_DIM:
        return eqn.params[_MIXED_DIM[name]] not in output_dims
    if name == "concatenate":
        return None not in input_dims and output_dims[0] != eqn.params["dimension"]
    if name == "dot_general":
        return _product_keeps_blocks_apart(input_dims, eqn.params["dimension_numbers"])
    if name in DECOMPOSITIONS:
        rank = max(len(shape_of(var)) for var in variables_of(eqn.invars))
        # reflectors have one dim less than their matrix
        return all(dim is None or dim < rank - 2 for dim in input_dims)
    return name in _NEVER_MIXING or name.startswith(_REDUCTION_PREFIXES)


def _product_keeps_blocks_apart(input_dims: Sequence[int | None], dimension_numbers: Any) -> bool:
    """Return whether blocks are a batch dim of both factors, or a free dim of one factor of a
    product.
    """
    sum_dims, batch_dims = dimension_numbers
    lhs_dim, rhs_dim = input_dims
    if lhs_dim is not None and rhs_dim is not None:
        in_both = lhs_dim in batch_dims[0] and rhs_dim in batch_dims[1]
        return in_both and batch_dims[0].index(lhs_dim) == batch_dims[1].index(rhs_dim)
    return all(
        dim not in (*sum_dims[side], *batch_dims[side])
        for side, dim in enumerate(input_dims)
        if dim is not None
    )


def _is_blockwise_inside(full: jex.Jaxpr, single: jex.Jaxpr, blocks: int) -> bool:
    matches = match_variables(full, single)
    return matches is not None and is_blockwise(full.eqns, single.eqns, matches, blocks)
