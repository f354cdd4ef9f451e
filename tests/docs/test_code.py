"""Every python block in the pages runs as it stands, those of a page one after another in one namespace."""

import re
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(page for page in (ROOT / "docs").glob("*.md") if page.stem != "index")


def blocks(text):
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page.read_text())], ids=lambda page: page.stem)
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    space = {"__name__": "docs"}
    with jax.numpy_rank_promotion("allow"):  # as users have it
        for block in blocks(page.read_text()):
            exec(compile(block, str(page), "exec"), space)


def test_the_example_of_the_first_page_is_that_of_the_readme_which_runs():
    first, readme = ((ROOT / name).read_text() for name in ("docs/index.md", "README.md"))
    assert blocks(first) == blocks(readme)[:1]


def test_no_python_hides_in_a_block_of_another_name():
    for page in PAGES:
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            assert language in ("python", "bash", "yaml", "text"), page
            if language == "text":
                assert "import " not in block, page
