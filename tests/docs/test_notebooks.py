"""The notebooks: each is its script with outputs, and runs to its end in a kernel of this Python."""

import os
import re
import runpy

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError
from support.paths import ROOT

FOLDER = ROOT / "notebooks"
SCRIPTS = sorted(FOLDER.glob("[0-9]_*.py"))


@pytest.fixture(scope="module")
def tool():
    return runpy.run_path(str(FOLDER / "execute.py"))


def committed(script):
    return nbformat.read(script.with_suffix(".ipynb"), as_version=4)


def sources(notebook):
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def shown(notebook):
    """Return the kinds of output of each cell: "stream", or the richest form of a result. An image
    is richer than html, and html than text.
    """
    cell_kinds = []
    for cell in notebook.cells:
        outputs = [
            output
            for output in cell.get("outputs", ())
            if output.output_type != "stream" or output.name == "stdout"
        ]
        kinds = [min(output.data) if "data" in output else output.output_type for output in outputs]
        # the output of a cell may arrive in pieces
        cell_kinds.append(
            [
                kind
                for i, kind in enumerate(kinds)
                if kind != "stream" or kinds[i - 1 : i] != ["stream"]
            ]
        )
    return cell_kinds


def test_there_are_eight_and_each_is_a_pair():
    assert [script.stem[0] for script in SCRIPTS] == list("12345678")
    assert [book.stem for book in sorted(FOLDER.glob("*.ipynb"))] == [
        script.stem for script in SCRIPTS
    ]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_notebook_is_its_script_with_outputs(script, tool):
    notebook = committed(script)
    nbformat.validate(notebook)
    assert sources(notebook) == sources(tool["read"](script)), "run python notebooks/execute.py"
    assert notebook.metadata.jupytext.formats == "ipynb,py:percent"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    kinds = [kind for cell in shown(notebook) for kind in cell]
    assert "error" not in kinds
    assert kinds.count("image/png") >= 2
    assert "stderr" not in [output.get("name") for cell in code for output in cell.outputs]


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_notebook_runs_and_shows_what_the_committed_one_shows(script, tool):
    # a notebook asks for devices itself
    flags = os.environ["XLA_FLAGS"].replace("--xla_force_host_platform_device_count=8", "")
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    notebook = tool["execute"](script, environment=environment)
    assert shown(notebook) == shown(committed(script))


def test_a_cell_that_raises_fails(tool, tmp_path):
    script = tmp_path / "0_broken.py"
    script.write_text(
        "# %%\nprint('so far')\n\n# %%\nassert 1 == 2, 'a number that the text states'\n"
    )
    with pytest.raises(CellExecutionError, match="a number that the text states"):
        tool["execute"](script)


def test_links_between_notebooks_lead_somewhere():
    targets = [
        target
        for script in SCRIPTS
        for target in re.findall(r"\]\(([^)#]+\.ipynb)\)", script.read_text())
    ]
    assert targets == [f"{script.stem}.ipynb" for script in SCRIPTS[1:]]
