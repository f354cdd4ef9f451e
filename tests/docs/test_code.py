"""Every python block in the pages runs as it stands. The blocks of a page run one after another in
one namespace.
"""

import ast
import importlib.util
import inspect
import os
import re
import subprocess
import sys

import jax
import pytest
from support.paths import ROOT
from support.tiers import tiered

PAGES = sorted(page for page in (ROOT / "docs").rglob("*.md") if page != ROOT / "docs" / "index.md")


QUICK = ["any_loss", "checkpoints", "data_parallel", "howto/own_loop"]
"""Pages that take at most two seconds of CPU. The other pages run in the slow tier."""
PLAIN_FLAGS = ["howto/fine_tune"]
"""Pages with programs that mix up their collectives under the flags of the tests, with jaxlib
0.10.2 (docs/notes/compiler_errors.md). They run in a process with a user's flags.
"""


def name_of(page):
    return page.relative_to(ROOT / "docs").with_suffix("").as_posix()


def blocks(text):
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def without_devices(block):
    """Return a block without the line that asks for eight devices: tests have them already."""
    return re.sub(
        r"^jax\.config\.update\(.jax_num_cpu_devices., 8\).*\n", "\n", block, flags=re.MULTILINE
    )


OPTIONAL = ("torch", "datasets")
"""Packages of examples that are left out where they are not installed."""


def can_run(block):
    return all(
        importlib.util.find_spec(name) is not None
        for name in OPTIONAL
        if re.search(rf"^(?:import|from) {name}\b", block, re.MULTILINE)
    )


@pytest.mark.parametrize(
    "page",
    tiered(
        [page for page in PAGES if blocks(page.read_text()) and name_of(page) not in PLAIN_FLAGS],
        lambda page: name_of(page) in QUICK,
        ids=name_of,
    ),
)
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    space = {"__name__": "docs"}
    with jax.numpy_rank_promotion("allow"):  # as users have it
        for block in filter(can_run, blocks(page.read_text())):
            exec(compile(without_devices(block), str(page), "exec"), space)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAIN_FLAGS)
def test_a_page_runs_in_a_process_with_plain_flags(name, tmp_path):
    code = "".join(blocks((ROOT / "docs" / f"{name}.md").read_text()))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, "-c", code]
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
    )
    assert ended.returncode == 0, ended.stderr[-3000:]


def missing_names(block):
    """Return the names of shardopt that a block uses and that do not exist: a page in the slow tier
    shows a rename too.
    """
    tree = ast.parse(block)
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {
                alias.asname or alias.name.partition(".")[0]: (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
                for alias in node.names
            }
        elif isinstance(node, ast.ImportFrom):
            modules |= {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }
    chains = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used = {
        modules[first] + dot + attributes
        for first, dot, attributes in (c.partition(".") for c in chains)
        if first in modules
    }
    used |= set(modules.values())
    return sorted(
        name for name in used if re.fullmatch(r"shardopt[\w.]*", name) and not exists(name)
    )


def exists(name):
    """Return whether a dotted name is a module, or a chain of attributes of a module.

    The chain ends at a value that is no module and no class: the result of a call is not known
    here."""
    value = importlib.import_module("shardopt")
    for part in name.split(".")[1:]:
        if not hasattr(value, part):
            if (
                not inspect.ismodule(value)
                or importlib.util.find_spec(f"{value.__name__}.{part}") is None
            ):
                return not (inspect.ismodule(value) or inspect.isclass(value))
            importlib.import_module(f"{value.__name__}.{part}")
        value = getattr(value, part)
    return True


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page.read_text())], ids=name_of)
def test_every_name_of_a_page_exists(page):
    assert missing_names("\n".join(blocks(page.read_text()))) == []


def test_a_name_that_does_not_exist_is_noticed():
    block = (
        "import shardopt as so\nfrom shardopt.models import gpt\nso.ddp(gpt.model,"
        " so.reducers.int9())\nso.fsdb.x"
    )
    assert missing_names(block) == ["shardopt.fsdb", "shardopt.fsdb.x", "shardopt.reducers.int9"]


def test_the_example_of_the_first_page_is_that_of_the_readme_which_runs():
    first, readme = ((ROOT / name).read_text() for name in ("docs/index.md", "README.md"))
    assert blocks(first) == blocks(readme)[:1]


def test_code_and_commands_fit_beside_the_list_of_pages():
    """122 columns are in sight at 1280 pixels, by docs/extra.css; it breaks longer lines of output."""
    code = re.compile(r"^```(?:python|bash)\n(.*?)^```", re.DOTALL | re.MULTILINE)
    assert not [
        (name_of(page), line)
        for page in PAGES
        for block in code.findall(page.read_text())
        for line in block.splitlines()
        if len(line) > 122
    ]


def test_no_python_hides_in_a_block_of_another_name():
    for page in PAGES:
        for language, block in re.findall(
            r"^```(\w*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE
        ):
            assert language in ("python", "bash", "yaml", "text"), page
            if language == "text":
                assert "import " not in block, page
