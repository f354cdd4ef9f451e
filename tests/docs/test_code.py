"""Every python block in the pages runs as it stands, those of a page one after another in one namespace."""

import re

import jax
import pytest
from support.paths import ROOT
from support.tiers import tiered

PAGES = sorted(page for page in (ROOT / "docs").rglob("*.md") if page != ROOT / "docs" / "index.md")


SLOW = [f"howto/{name}" for name in ("batch_norm", "dpo", "extend", "fine_tune", "grpo", "plan_a_pod")]
"""Pages that take more than five seconds."""


def name_of(page):
    return page.relative_to(ROOT / "docs").with_suffix("").as_posix()


def blocks(text):
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def without_devices(block):
    """Return a block without the line that asks for eight devices: tests have them already."""
    return re.sub(r"^jax\.config\.update\(.jax_num_cpu_devices., 8\).*\n", "\n", block, flags=re.MULTILINE)


@pytest.mark.parametrize(
    "page",
    tiered([page for page in PAGES if blocks(page.read_text())], lambda page: name_of(page) not in SLOW, ids=name_of),
)
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    space = {"__name__": "docs"}
    with jax.numpy_rank_promotion("allow"):  # as users have it
        for block in blocks(page.read_text()):
            exec(compile(without_devices(block), str(page), "exec"), space)


def test_the_example_of_the_first_page_is_that_of_the_readme_which_runs():
    first, readme = ((ROOT / name).read_text() for name in ("docs/index.md", "README.md"))
    assert blocks(first) == blocks(readme)[:1]


def test_no_python_hides_in_a_block_of_another_name():
    for page in PAGES:
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            assert language in ("python", "bash", "yaml", "text"), page
            if language == "text":
                assert "import " not in block, page
