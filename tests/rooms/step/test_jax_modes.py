"""Switches of jax that people debug with: leaked tracers, transfers that nobody asked for, no jit."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.tiers import tiered

import shardopt as so

X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
PARAMS = {"w": np.full((8, 8), 0.5, np.float32)}
STACKED = {"blocks": {"w": np.stack([np.eye(8, dtype=np.float32)] * 2)}}
SGD = optax.sgd(0.1)


def square(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


BLOCKS = so.BlockModel(
    embed=lambda outer, batch: batch,
    block=lambda weights, x: jnp.tanh(x @ weights["w"]),
    loss=lambda outer, x, batch: jnp.mean(x**2),
)
FORMS = {
    "ddp": lambda mesh_of: (so.ddp(SGD, mesh_of(data=2), square), PARAMS),
    "global": lambda mesh_of: (so.ddp(SGD, mesh_of(data=2), square, view="global"), PARAMS),
    "blocks": lambda mesh_of: (
        so.fsdp(SGD, mesh_of(data=2), BLOCKS, min_shard_elements=8),
        STACKED,
    ),
    "pipeline": lambda mesh_of: (
        so.hybrid(SGD, mesh_of(data=2, pipeline=2), BLOCKS, micro_batches=2),
        STACKED,
    ),
    "local_sgd": lambda mesh_of: (
        so.local_sgd(so.ddp(SGD, mesh_of(replica=2), square), sync_every=2),
        PARAMS,
    ),
}
MODES = {
    "leaks": lambda: jax.check_tracer_leaks(True),
    "guard": lambda: jax.transfer_guard("disallow"),
}
QUICK = [("leaks", "ddp"), ("guard", "global"), ("guard", "blocks")]


# If jax suspects a leak, as in a custom derivative, it walks over all objects of the process. Late
# in a run this takes up to a minute.
@pytest.mark.parametrize(
    ("mode", "form"), tiered(itertools.product(MODES, FORMS), lambda row: row in QUICK)
)
def test_init_step_and_evaluate_run_under(mode, form, mesh_of):
    opt, params = FORMS[form](mesh_of)
    evaluate = so.training.evaluation(opt, [X, X[:3]])
    with MODES[mode]():
        state = opt.init(params)
        for _ in range(2):
            state, metrics = opt.step(state, X)
        before = opt.evaluate(state, X)
        after = evaluate(state)
    assert np.isfinite([metrics["loss"], before["loss"], after["val_loss"]]).all()


@pytest.mark.slow
def test_what_a_loss_leaks_is_found_still(mesh_of):
    """The check is off while the loss is analysed, and on while the step is traced."""
    leaked = []

    def leaking(params, batch):
        leaked.append(batch @ params["w"])
        return jnp.mean(leaked[-1] ** 2)

    opt = so.ddp(SGD, mesh_of(data=2), leaking)
    with jax.check_tracer_leaks(True):
        state = opt.init(PARAMS)
        with pytest.raises(Exception, match="Leaked trace"):
            opt.step(state, X)


def test_a_state_made_elsewhere_is_adopted_under_a_guard(mesh_of):
    opt = so.ddp(optax.adam(0.1), mesh_of(data=2), square)
    opt_state = optax.adam(0.1).init(PARAMS)
    with jax.transfer_guard("disallow"):
        state = so.replace(opt.init(PARAMS), opt_state=opt_state, step=3)
    assert int(state.step) == 3


@pytest.mark.parametrize("call", ["init", "step", "evaluate"])
def test_without_jit_nothing_runs_on_a_mesh(call, mesh_of):
    opt = so.ddp(SGD, mesh_of(data=2), square)
    state = opt.init(PARAMS)
    args = (PARAMS,) if call == "init" else (state, X)
    wanted = (
        "ddp: jax_disable_jit is set, and what runs on a mesh must be compiled.\nFix: call it under"
        " jax.disable_jit(False), with jax.debug.print or jax.debug.breakpoint in the loss; or call"
        " loss_fn(params, batch) by itself, which runs op by op."
    )
    with jax.disable_jit(), pytest.raises(ValueError, match=f"^{re.escape(wanted)}$"):
        getattr(opt, call)(*args)
    with jax.disable_jit(False):
        getattr(opt, call)(*args)
