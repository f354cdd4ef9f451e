"""A report traces the optimizer only if matrices have owners, and then once for a layout."""

import jax
import jax.numpy as jnp
import optax
import pytest

import shardopt as so
from shardopt.config import _update_trace as update_trace

pytestmark = pytest.mark.fast

PARAMS = {"w": jax.ShapeDtypeStruct((256, 256), jnp.float32)}


def muon(mesh, opt_state):
    tx = optax.chain(optax.clip(1.0), optax.contrib.muon(0.1))
    return so.fsdp(tx, mesh, lambda params, batch: jnp.sum(params["w"]), opt_state=opt_state)


def refuse_traces(monkeypatch):
    monkeypatch.setattr(update_trace, "call_update", lambda *_: pytest.fail("it was traced"))


def test_the_second_report_of_a_layout_traces_nothing(mesh_of, monkeypatch):
    opt = muon(mesh_of(data=2), "matrices")
    report = opt.config.report(PARAMS)
    assert report.owners is not None
    refuse_traces(monkeypatch)
    assert opt.config.report(PARAMS) == report
    with pytest.raises(pytest.fail.Exception):
        opt.config.report({"v": PARAMS["w"]})


def test_a_report_without_owners_traces_nothing(mesh_of, monkeypatch):
    refuse_traces(monkeypatch)
    assert muon(mesh_of(data=2), "within").config.report(PARAMS).owners is None
