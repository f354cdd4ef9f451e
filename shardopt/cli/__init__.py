"""The command line: `shardopt train`, `tune`, `merge`, `export`, `generate`, `launch`, `vault`,
`plan`, `audit` and `verify`.
"""

import platform
import sys
import warnings
from collections.abc import Sequence

from shardopt.core import calling
from shardopt.core._extras import require, version_of

__all__ = ["main"]


@calling("shardopt")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run `shardopt` and return its exit code: 0, 2 for an error in the request, 130 after Ctrl-C.

    `shardopt train` and `shardopt tune` return 143 after SIGTERM, as `FitResult.exit_code`.

    `shardopt verify` also returns 1 and 3. It needs no extra, and neither does `--version`.
    """
    if arguments is None:
        warnings.formatwarning = _without_source  # the process runs this command alone
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words == ["--version"]:
        versions = [f"{package} {version_of(package)}" for package in ("shardopt", "jax", "jaxlib")]
        print(", ".join([*versions, f"Python {platform.python_version()}"]))
        return 0
    try:
        for module in ("tyro", "rich"):
            require(module, extra="cli")
    except ModuleNotFoundError as error:
        if words[:1] == ["verify"]:
            from shardopt.cli._verify import run_without_extras

            return run_without_extras(words[1:])
        print(f"error: {error}", file=sys.stderr)
        return 2
    from shardopt.cli._commands import run

    return run(words)


def _without_source(message: Warning | str, *_source: object, **_line: object) -> str:
    """Return a warning as a line for somebody who has called no Python."""
    return f"warning: {message}\n"
