"""In the per-device view a loss that is no (weighted) mean over rows is refused before anything compiles, and only such."""

import re

import jax
import numpy as np
import optax
import pytest
from support.losses import LOSSES, cast
from support.separable_losses import BATCH, SEPARABLE

import shardopt as so
from shardopt.core.block_model import takes_rng
from shardopt.core.types import abstract
from shardopt.engine.separable import find_mixing

KEY = jax.eval_shape(lambda: jax.random.key(0))


@pytest.fixture
def no_compile(monkeypatch):
    monkeypatch.setattr(jax._src.compiler, "compile_or_get_cached", lambda *_, **__: pytest.fail("compiled"))


def abstract_state(opt, params):
    opt.specs(abstract(params))
    return opt.abstract_state()


@pytest.mark.parametrize("cut", ["devices", "micro_batches"])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_that_mixes_rows_is_refused(name, cut, no_compile):
    loss = LOSSES[name]
    params, (batch,) = cast(loss.params, np.float32), loss.batches(1, np.float32)
    mesh, sizes = (
        (so.make_mesh(data=8), {})
        if cut == "devices"
        else (so.make_mesh(devices=jax.devices()[:1]), {"micro_batches": 2})
    )
    opt = so.ddp(optax.sgd(0.1), mesh, loss.loss_fn, **sizes)
    state = abstract_state(opt, params)
    with pytest.raises(so.NotSeparableError, match="is not a \\(weighted\\) mean over rows") as caught:
        opt.step.lower(state, abstract(batch))
    assert re.search(r"tests/support/losses.py:\d+ \(", caught.value.operation)
    assert "separable=True" in str(caught.value)
    with pytest.raises(so.NotSeparableError):
        opt.evaluate.lower(state, abstract(batch))
    trusted = so.ddp(optax.sgd(0.1), mesh, loss.loss_fn, separable=True, **sizes)
    trusted.evaluate.lower(state, abstract(batch))


@pytest.mark.parametrize("rows", [4, 1])
@pytest.mark.parametrize("name", SEPARABLE)
def test_mean_over_rows_is_shown_to_be_one(name, rows):
    params, loss_fn = SEPARABLE[name]()
    batch = abstract(jax.tree.map(lambda x: x[:rows], BATCH))
    for key in (KEY, None) if takes_rng(loss_fn) else (None,):
        assert find_mixing(loss_fn, abstract(params), batch, key=key) is None
