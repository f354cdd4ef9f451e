"""`muon_dimension_numbers`: the matrix dims of fused, stacked and convolution leaves, for optax's
Muon.
"""

from collections.abc import Callable

import jax
import optax

from shardopt.core import PyTree, calling
from shardopt.optimizers._matrices import Matrices, check_matrices, match_matrices


@calling("muon_dimension_numbers")
def muon_dimension_numbers(matrices: Matrices) -> Callable[[PyTree], PyTree]:
    """Return dimension numbers for `optax.contrib.muon`, from the same rules as `soap`.

    Muon orthogonalises each matrix of a leaf separately. Leaves without a rule go to AdamW, as
    usual in optax.

    Args:
      matrices: rules `[(regex, so.optimizers.Matrix), ...]`. The regex is searched in key paths,
        and the first match wins; None instead of a `Matrix` for leaves that are not matrices.
        `matrices=None` takes the leaves of two dims.

    Returns:
      A function for the argument `muon_weight_dimension_numbers` of `optax.contrib.muon`.

    Raises:
      TypeError: if `matrices` has another form.
      ValueError: if a regex does not compile; in `init`, if a rule matches nothing or does not fit
        its leaf.

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
    check_matrices(matrices)

    @calling("muon_dimension_numbers")
    def numbers(params: PyTree) -> PyTree:
        leaves, treedef = jax.tree.flatten(params)
        dimension_numbers = []
        for leaf, matrix in zip(leaves, match_matrices(matrices, params), strict=True):
            if matrix is None:
                dimension_numbers.append(None)
            else:
                _, rows, columns = matrix.order(leaf.ndim)
                dimension_numbers.append(optax.contrib.MuonDimensionNumbers(rows, columns))
        return treedef.unflatten(dimension_numbers)

    return numbers
