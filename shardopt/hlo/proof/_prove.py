"""`prove`: the derivation for a whole program."""

from collections.abc import Mapping, Sequence

from jax.sharding import Mesh, Sharding
from jax.stages import Compiled

from shardopt.hlo.proof._proof import Proof


def prove(
    program: Compiled | str,
    *,
    inputs: Sequence[Sharding | str] | None = None,
    outputs: Sequence[Sharding | str] | None = None,
    mesh: Mesh | Mapping[str, int] | None = None,
) -> Proof:
    """Derive for every value of a partitioned program what each device holds.

    Args:
      program: a compiled program, or the text of an optimised, partitioned HLO module.
      inputs: one sharding per parameter of the entry computation, flat: a jax sharding, or the text of an HLO sharding
        such as `{devices=[8,1]<=[8]}` or `{replicated}`. By default those of the `Compiled`, or of the text's parameters.
      outputs: one sharding per array of the result, flat. By default those of the `Compiled`.
      mesh: names of the axes, for the report.
    """
    raise NotImplementedError
