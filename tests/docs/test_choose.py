"""The table of what to use says what strategies do, and names that exist."""

import re

import jax.numpy as jnp
import optax
import pytest
from support.paths import ROOT

import shardopt as so


def rows(path, column):
    """Return {name: cells} of the rows with a call in this column."""
    cells_by_name = {}
    for line in (ROOT / path).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or len(cells) <= column:
            continue
        name = re.fullmatch(r"`(so\.\w+(?:\(stage=\d\))?)`", cells[column].split(",")[0])
        if name:
            cells_by_name.setdefault(name[1], cells)
    return cells_by_name


@pytest.mark.parametrize("name", ["so.ddp", "so.zero(stage=1)", "so.zero(stage=2)", "so.fsdp"])
def test_the_table_tells_the_bytes_a_parameter(name, mesh_of):
    expected_bytes = eval(rows("docs/choose.md", 2)[name][3].split(",")[0], {"N": 8})
    options = {"stage": int(name[-2])} if "stage" in name else {}
    make = getattr(so, name.removeprefix("so.").split("(")[0])
    opt = make(
        optax.adam(0.1),
        mesh_of(data=8),
        lambda params, batch: jnp.mean(batch @ params["w"]),
        **options,
    )
    params = {"w": jnp.zeros((1024, 64))}
    report = opt.config.report(params)
    gradient_bytes = 4 / (8 if opt.config.placement.grads else 1)
    bytes_of_each = (report.params_bytes + report.opt_state_bytes) / params["w"].size
    assert bytes_of_each + gradient_bytes == pytest.approx(expected_bytes, rel=1e-3)


def test_every_name_in_the_tables_exists():
    text = (ROOT / "docs" / "choose.md").read_text()
    names = re.findall(r"\bso\.([\w.]+)", text)
    assert len(names) > 20
    for name in names:
        attribute = so
        for part in name.split("."):
            attribute = getattr(attribute, part)


def test_nothing_that_trains_is_left_out():
    text = (ROOT / "docs" / "choose.md").read_text()
    for name in (
        "ddp",
        "zero",
        "fsdp",
        "hybrid",
        "local_sgd",
        "diloco",
        "async_sgd",
        "parameter_server.async_local_sgd",
    ):
        assert f"`so.{name}" in text
