"""Bytes per device of a compiled program, and which of its inputs it overwrites."""

import re
from typing import Any, NamedTuple

from shardopt.audit.hlo_text import nbytes, tiled_nbytes
from shardopt.core.errors import format_error


class Memory(NamedTuple):
    """What one device needs to run a program, in bytes.

    Attributes:
      arguments: its inputs.
      outputs: its results, those included that are written into inputs.
      temporary: everything in between, at its peak.
      aliased: the part of the outputs that is written into donated inputs.
    """

    arguments: int
    outputs: int
    temporary: int
    aliased: int

    @property
    def peak(self) -> int:
        """Inputs, temporaries, and the outputs that have buffers of their own."""
        return self.arguments + self.temporary + self.outputs - self.aliased


def memory(compiled: Any) -> Memory:
    """Return the bytes per device of a `jax.stages.Compiled`, as its compiler planned them.

    Raises:
      ValueError: if the backend does not tell.
    """
    analysis = compiled.memory_analysis()
    if analysis is None:
        what = "this backend does not tell how much memory a compiled program needs."
        raise ValueError(format_error("memory", what, fix="compile for cpu, gpu or tpu."))
    return Memory(
        arguments=analysis.argument_size_in_bytes,
        outputs=analysis.output_size_in_bytes,
        temporary=analysis.temp_size_in_bytes,
        aliased=analysis.alias_size_in_bytes,
    )


def argument_padding(program: Any) -> int:
    """Return by how many bytes the inputs of a program grow on a device because their layouts are tiled.

    XLA:TPU stores the last two dims of an array in tiles, of 8 x 128 numbers for fp32: shards that are thin in both pay.
    Elsewhere it is 0.

    Args:
      program: a `jax.stages.Compiled`, or HLO text.
    """
    inputs = _INDEX.sub("", _header(program).partition("entry_computation_layout={")[2].partition("->")[0])
    return tiled_nbytes(inputs) - nbytes(inputs) if inputs.startswith("(") else 0


def donated(program: Any) -> dict[int, int]:
    """Return which inputs are overwritten by which outputs: flat input position to flat output position.

    Positions count the leaves of the compiled program's inputs; jax drops arguments that it does not use.

    Args:
      program: a `jax.stages.Compiled`, or HLO text.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> step = jax.jit(lambda state, batch: state + batch, donate_argnums=0)
      >>> donated(step.lower(jnp.ones(4), jnp.ones(4)).compile())
      {0: 0}
    """
    aliases = _header(program).partition("input_output_alias={")[2].partition(" }")[0]
    return {int(source): int(output or 0) for output, source in _ALIAS.findall(aliases)}


def _header(program: Any) -> str:
    """Return the line that tells of the whole module; programs are long, so no other is looked at."""
    found = _HEADER.search(program if isinstance(program, str) else program.as_text())
    return found[0] if found else ""


_HEADER = re.compile(r"^HloModule.*", re.MULTILINE)
_INDEX = re.compile(r"/\*index=\d+\*/")
_ALIAS = re.compile(r"\{(\d*)[\d,\s]*\}: \((\d+),")
