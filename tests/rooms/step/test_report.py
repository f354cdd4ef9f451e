"""A report traces the optimizer once for a layout, and knows its work on matrices."""

import jax
import jax.numpy as jnp
import optax
import pytest

import shardopt as so
from shardopt.config import _update_trace as update_trace

pytestmark = pytest.mark.fast

PARAMS = {"w": jax.ShapeDtypeStruct((256, 256), jnp.float32)}
OPTIMIZERS = {
    "adam": (optax.adam(0.1), False),
    "muon": (optax.contrib.muon(0.1), True),
    "muon in a chain": (optax.chain(optax.clip(1.0), optax.contrib.muon(0.1)), True),
    "lion": (optax.lion(0.1), False),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_second_report_of_a_layout_traces_nothing(mesh_of, monkeypatch, name):
    tx, works_on_matrices = OPTIMIZERS[name]
    opt = so.fsdp(tx, mesh_of(data=2), lambda params, batch: jnp.sum(params["w"]))
    report = opt.config.report(PARAMS)
    assert (report.layouts is not None) == works_on_matrices
    monkeypatch.setattr(update_trace, "call_update", lambda *_: pytest.fail("it was traced"))
    assert opt.config.report(PARAMS) == report
    with pytest.raises(pytest.fail.Exception):
        opt.config.report({"v": PARAMS["w"]})
