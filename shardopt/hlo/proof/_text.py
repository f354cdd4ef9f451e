"""The text of a program with all of its constants: the compiled program, and the program that XLA was given."""

from typing import Any

from jax.stages import Compiled, Lowered


def full_text(compiled: Compiled) -> str:
    """Return the HLO text of a compiled program, with the numbers of every constant.

    `Compiled.as_text` leaves out the numbers of constants that have more than ten, such as the table of a schedule.
    """
    text = compiled.as_text() or ""
    if "constant({...})" not in text:
        return text
    executable: Any = compiled.runtime_executable()
    return _with_constants(executable.hlo_modules()[0])


def lowered_text(lowered: Lowered) -> str:
    """Return the HLO text that XLA is given, before it partitions and optimises."""
    computation: Any = lowered.compiler_ir("hlo")
    return _with_constants(computation.get_hlo_module())


def _with_constants(module: Any) -> str:
    from jax._src.lib import hlo  # pyright: ignore  # jax has no public name for it

    options = hlo.HloPrintOptions()
    options.print_large_constants = True
    return module.to_string(options)
