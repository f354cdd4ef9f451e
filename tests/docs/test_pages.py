"""The examples from scratch are short and plain jax, and their pages quote them."""

import ast
import re

import pytest
from support.paths import ROOT

LINES = {"fsdp_from_scratch": 250, "one_f_one_b_from_scratch": 250}


@pytest.mark.parametrize("name", LINES)
def test_it_is_short_and_plain_jax(name):
    text = (ROOT / "examples" / f"{name}.py").read_text()
    assert len(text.splitlines()) <= LINES[name]
    imports = [
        node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    modules = {
        alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names
    }
    modules |= {node.module for node in imports if isinstance(node, ast.ImportFrom)}
    assert modules <= {"jax", "jax.numpy", "numpy", "typing", "fsdp_from_scratch"}


@pytest.mark.parametrize("name", LINES)
def test_the_page_quotes_the_file(name):
    text = (ROOT / "examples" / f"{name}.py").read_text()
    page = (ROOT / "docs" / f"{name}.md").read_text()
    quotes = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    excerpts = [quote for quote in quotes if "import " not in quote]
    assert len(excerpts) == len(quotes) - 2  # the imports, and the same in shardopt
    for excerpt in excerpts:
        assert f"\n{excerpt}" in text, excerpt
    assert f"in {len(text.splitlines())} lines of plain jax" in page


def test_the_page_about_ray_train_quotes_its_example():
    text = (ROOT / "examples" / "ray_train.py").read_text()
    page = (ROOT / "docs" / "howto" / "ray_train.md").read_text()
    excerpts = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(excerpts) == 4
    for excerpt in excerpts:
        assert f"\n{excerpt}" in text, excerpt
