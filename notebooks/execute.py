"""Run the notebooks and save them with their outputs: `python notebooks/execute.py [2_placements ...]`.

The scripts are the source: edit `N_name.py`, run this file, commit both. Needs `pip install 'shardopt[notebooks]'`.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
SCRIPTS = sorted(FOLDER.glob("[0-9]_*.py"))
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}


def read(script: Path) -> nbformat.NotebookNode:
    """Return a script as a notebook without outputs, the same bytes each time."""
    notebook = jupytext.read(script)
    for number, cell in enumerate(notebook.cells):
        cell.id = f"{script.stem.split('_')[0]}-{number}"  # jupytext draws random ids
    notebook.metadata = {"jupytext": {"formats": "ipynb,py:percent"}, "kernelspec": KERNEL}
    return notebook


def execute(
    script: Path, *, environment: Mapping[str, str] = os.environ, timeout: int = 300
) -> nbformat.NotebookNode:
    """Run a notebook with a kernel of this Python, and return it with outputs; `timeout` is in seconds per cell.

    Raises:
      nbclient.exceptions.CellExecutionError: if a cell raises an error; it contains the traceback.
    """
    notebook = read(script)
    quiet = ["--IPKernelApp.log_level=ERROR"]
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name=KERNEL["name"],
        record_timing=False,
        extra_arguments=quiet,
    )
    client.execute(cwd=str(script.parent), env=dict(environment))
    notebook.metadata.pop(
        "language_info", None
    )  # it would record the Python version of this machine
    return notebook


def main(names: list[str]) -> None:
    """Run the named notebooks, or all."""
    for script in SCRIPTS:
        if not names or script.stem in names:
            print(script.stem, flush=True)
            nbformat.write(execute(script), script.with_suffix(".ipynb"))


if __name__ == "__main__":
    main(
        [
            name.removesuffix(".py").removesuffix(".ipynb")
            for name in map(os.path.basename, sys.argv[1:])
        ]
    )
