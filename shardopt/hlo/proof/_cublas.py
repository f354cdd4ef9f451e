"""Matrix products of cuBLAS: custom calls whose configuration states the dims, the factors and what
follows the product.
"""

import json
from collections.abc import Mapping
from typing import NamedTuple

TARGETS = ("__cublas$gemm", "__cublas$lt$matmul")
EPILOGUES = ("DEFAULT", "BIAS", "RELU", "BIAS_RELU", "GELU", "BIAS_GELU")

Pairs = list[tuple[int, int]]


class Gemm(NamedTuple):
    """The product `alpha * left @ right + beta * other`, then a bias along the last dim, and a
    function.

    Attributes:
      batch: pairs of batch dims of both operands.
      contracting: pairs of contracted dims.
      alpha: the factor of the product.
      beta: the factor of a third operand; 0 if there is none.
      bias: whether the last operand is a bias.
      function: "RELU", "GELU" or "".
    """

    batch: Pairs
    contracting: Pairs
    alpha: float
    beta: float
    bias: bool
    function: str


def read_gemm(attributes: Mapping[str, str]) -> Gemm | None:
    """Return the computation of a custom call of cuBLAS; None for another custom call.

    Raises:
      ValueError: if it computes more than the product and what `EPILOGUES` lists.
    """
    if attributes.get("custom_call_target", "").strip('"') not in TARGETS:
        return None
    config = json.loads(attributes["backend_config"])["gemm_backend_config"]
    dims = config["dot_dimension_numbers"]
    epilogue = config.get("epilogue", "DEFAULT")
    if epilogue not in EPILOGUES or config.get("alpha_imag", 0) or config.get("scale_mode", 0):
        raise ValueError(f"a product of cuBLAS with epilogue {epilogue} is not read")
    batch, contracting = (
        [(int(i), int(j)) for i, j in zip(dims[f"lhs_{key}"], dims[f"rhs_{key}"], strict=True)]
        for key in ("batch_dimensions", "contracting_dimensions")
    )
    function = epilogue.removeprefix("BIAS").strip("_").replace("DEFAULT", "")
    return Gemm(
        batch,
        contracting,
        config.get("alpha_real", 1),
        config.get("beta", 0),
        "BIAS" in epilogue,
        function,
    )
