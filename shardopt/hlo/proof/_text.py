"""The text of a compiled program with all of its constants."""

from typing import Any

from jax.stages import Compiled


def full_text(compiled: Compiled) -> str:
    """Return the HLO text of a compiled program, with the numbers of every constant.

    `Compiled.as_text` leaves out the numbers of constants that have more than ten, such as the table of a schedule.
    """
    text = compiled.as_text() or ""
    if "constant({...})" not in text:
        return text
    from jax._src.lib import hlo  # pyright: ignore  # jax has no public name for it

    executable: Any = compiled.runtime_executable()
    options = hlo.HloPrintOptions()
    options.print_large_constants = True
    return executable.hlo_modules()[0].to_string(options)
