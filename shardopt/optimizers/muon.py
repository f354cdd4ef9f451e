"""`muon_dimension_numbers`: which dims of fused, stacked and convolution leaves optax's Muon takes for a matrix."""

from collections.abc import Callable

import jax
import optax

from shardopt.core.types import PyTree
from shardopt.optimizers.matrices import Matrices, check_matrices, match_matrices


def muon_dimension_numbers(matrices: Matrices) -> Callable[[PyTree], PyTree]:
    """Say to `optax.contrib.muon` which dims are rows and columns, in the form of `soap` and `shampoo`.

    Every matrix of a leaf is orthogonalised by itself; leaves without a rule go to AdamW, as optax has it.

    Args:
      matrices: `[(regex, so.optimizers.Matrix), ...]`, searched in key paths, first match wins, None for leaves that are no
        matrices; None takes the leaves of two dims.

    Returns:
      What `muon_weight_dimension_numbers` of `optax.contrib.muon` takes.

    Raises:
      TypeError: if `matrices` is of another form.
      ValueError: if a regex does not compile; in `init`, if a rule matches nothing or does not fit its leaf.

    Example:
      >>> import jax.numpy as jnp, optax, shardopt as so
      >>> rules = [("qkv$", so.optimizers.Matrix(rows=1, columns=(3, 4)))]  # [L, D, 3, H, K]
      >>> numbers = so.optimizers.muon_dimension_numbers(rules)
      >>> tx = optax.contrib.muon(0.02, muon_weight_dimension_numbers=numbers)
      >>> params = {"qkv": jnp.ones((2, 8, 3, 2, 4)), "norm": jnp.ones((2, 8))}
      >>> state = tx.init(params)
      >>> numbers(params)
      {'norm': None, 'qkv': MuonDimensionNumbers(reduction_axis=(1,), output_axis=(3, 4))}

    References:
      Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.
    """
    who = "muon_dimension_numbers"
    check_matrices(who, matrices)

    def numbers(params: PyTree) -> PyTree:
        leaves, treedef = jax.tree.flatten(params)
        found = []
        for leaf, matrix in zip(leaves, match_matrices(who, matrices, params), strict=True):
            if matrix is None:
                found.append(None)
            else:
                _, rows, columns = matrix.order(leaf.ndim)
                found.append(optax.contrib.MuonDimensionNumbers(rows, columns))
        return treedef.unflatten(found)

    return numbers
