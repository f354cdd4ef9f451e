"""The text of a program with all of its constants: the compiled program, and the program that XLA
was given.
"""

import tempfile
from pathlib import Path
from typing import Any

import jax
from jax.stages import Compiled, Lowered

from shardopt.runtime._stored_programs import without_stored_programs


def text_of(compiled: Compiled, lowered: Lowered | None) -> str | None:
    """Return the HLO text of a compiled program; None if the backend has none.

    jaxlib cannot read some instructions of a libtpu that is newer, and then has no text of the
    program. In this case it is compiled again, and the compiler writes the text.
    """
    try:
        return compiled.as_text()
    except jax.errors.JaxRuntimeError:
        if lowered is None:
            raise
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_large_constants": True}
        with without_stored_programs():  # the compiler writes no text of a program that is stored
            lowered.compile(compiler_options=options)
        (path,) = Path(folder).glob("*after_optimizations.txt")
        return path.read_text()


def full_text(compiled: Compiled, text: str | None = None) -> str:
    """Return the HLO text of a compiled program, with the numbers of every constant.

    `text` may leave some out.

    `Compiled.as_text` leaves out the numbers of constants that have more than ten, such as the
    table of a schedule.
    """
    text = text or compiled.as_text() or ""
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
