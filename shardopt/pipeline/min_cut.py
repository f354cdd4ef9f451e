"""What to keep of a computation so that the rest follows from it cheaply, in the fewest bytes: a minimum cut."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax.extend.core as jex
import numpy as np

# Elementwise and moving primitives: compilers fuse them into whatever reads them. Whatever is not named here is kept.
_CHEAP = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh broadcast_in_dim cbrt ceil clamp concatenate
    convert_element_type copy cos cosh div eq erf erf_inv erfc exp exp2 expand_dims expm1 floor ge gt imag integer_pow iota
    is_finite le lgamma log log1p log2 logistic lt max min mul name ne neg not one_minus_square or pad polynomial pow real
    reduce_precision rem reshape rev round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh slice split sqrt square
    squeeze stop_gradient sub tan tanh transpose xor""".split()  # noqa: SIM905
)
_MOST = 2**30


def fewest_bytes(equations: Sequence[Any], start: Iterable[Any], free: set[Any], wanted: Iterable[Any]) -> list[Any]:
    """Return the variables to keep, so that `wanted` can be computed from them by cheap equations alone.

    Every value that is dear to compute is a source, every wanted one a sink; a cheap equation passes from each input to
    each output whatever is not kept. A set of variables that stops all flow is what has to be kept, and the one of
    fewest bytes is a minimum vertex cut. Of several the one nearest to `wanted` is taken, which leaves the least to
    compute again.

    Args:
      equations: those that may be run, in order.
      start: variables that are there at first, and have to be kept if they are to be used.
      free: variables that are there in any case.
      wanted: variables computed by these equations, or among `start`.

    References:
      Ford and Fulkerson, 1956, for the cut; the same is done for rematerialisation by PyTorch's AOTAutograd (Horace He
      and Shangdi Yu, "Min-cut optimal recomputation", 2022).
    """
    wanted = [var for var in dict.fromkeys(wanted) if var not in free]
    if not wanted:
        return []
    variables = list(dict.fromkeys([*start, *(v for eqn in equations for v in eqn.outvars if v not in free)]))
    number = {var: i for i, var in enumerate(variables)}
    count = len(variables)
    source, sink = 2 * count, 2 * count + 1
    weights = [_bytes(var) for var in variables]
    unit = max(sum(weights) / (_MOST // 2), 1.0)
    edges: dict[tuple[int, int], int] = {}
    for i, weight in enumerate(weights):  # a variable is an edge from its own entry to its own exit
        edges[i, count + i] = max(math.ceil(weight / unit), 1)
    for var in start:
        edges[source, number[var]] = _MOST
    for eqn in equations:
        inputs = [number[v] for v in eqn.invars if not isinstance(v, jex.Literal) and v in number]
        dear = eqn.primitive.name not in _CHEAP or bool(eqn.effects)
        for var in eqn.outvars:
            if var in number:
                edges |= {(source, number[var]): _MOST} if dear else {(count + i, number[var]): _MOST for i in inputs}
    for var in wanted:
        edges[count + number[var], sink] = _MOST
    kept = _cut(edges, 2 * count + 2, source, sink)
    return [variables[i] for i in sorted(i for i, exit_ in kept if i < count and exit_ == count + i)]


def _cut(edges: dict[tuple[int, int], int], size: int, source: int, sink: int) -> list[tuple[int, int]]:
    """Return the edges of the minimum cut nearest to the sink."""
    from scipy.sparse import csr_array  # 20 MB and a fifth of a second, for zero-bubble schedules alone
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    ends = np.array(list(edges), np.int32)
    capacity = csr_array((np.array(list(edges.values()), np.int32), (ends[:, 0], ends[:, 1])), shape=(size, size))
    left = capacity - maximum_flow(capacity, source, sink).flow
    left.eliminate_zeros()
    reaches_sink = set(breadth_first_order(left.T.tocsr(), sink, return_predecessors=False).tolist())
    return [(a, b) for a, b in edges if a not in reaches_sink and b in reaches_sink]


def _bytes(var: Any) -> int:
    return math.prod(var.aval.shape) * var.aval.dtype.itemsize
