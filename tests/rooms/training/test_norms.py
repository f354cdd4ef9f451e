"""`fit(norms_every=...)` logs norms of leaves and layers at its steps."""

import json
import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardopt as so
from shardopt.step._norms import Norms
from shardopt.training._fit import fit

pytestmark = pytest.mark.fast
KINDS = ("gradient_norm", "update_norm", "param_norm")


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_norms_are_logged_at_their_steps_and_a_resumed_run_logs_each_once(
    opt, new_state, batches, tmp_path, memory
):
    path = tmp_path / "metrics.jsonl"
    disk = {}
    for num_steps in (6, 9):  # the first run is cut off after its checkpoint of step 4
        options = {
            "checkpoints": memory(4, disk=disk, resume=True),
            "log": so.training.jsonl(path),
            "progress": False,
        }
        result = fit(
            opt, new_state(), batches, num_steps=num_steps, log_every=2, norms_every=3, **options
        )
        disk.pop(6, None)
    norms = [line for line in lines_of(path) if "gradient_norm/w" in line]
    assert [line["step"] for line in norms] == [3, 6, 9]
    assert set(norms[0]) == {"step"} | {f"{kind}/{leaf}" for kind in KINDS for leaf in ("w", "b")}
    state = new_state()
    for i, batch in enumerate(batches[:9]):
        before = state.params
        w, b = (np.linalg.norm(before[name]) for name in ("w", "b"))
        state, metrics = opt.step(state, batch)
        line = {line["step"]: line for line in norms}.get(i + 1)
        if line is not None:
            np.testing.assert_allclose(
                math.hypot(line["gradient_norm/w"], line["gradient_norm/b"]),
                metrics["grad_norm"],
                rtol=1e-5,
            )
            np.testing.assert_allclose(
                [line["param_norm/w"], line["param_norm/b"]], [w, b], rtol=1e-5, atol=1e-7
            )
            assert line["update_norm/w"] > 0
    np.testing.assert_allclose(result.state.params["w"], state.params["w"], rtol=1e-5)
    assert not any(name.startswith(KINDS) for record in result.history for name in record)


@pytest.mark.slow  # the other tests of this file
def test_norms_that_are_due_in_a_verified_step_are_those_of_the_next(new_state, batches, tmp_path):
    path = tmp_path / "metrics.jsonl"
    options = {
        "log": so.training.jsonl(path),
        "progress": False,
        "norms_every": 2,
        "cross_check_every": 4,
    }
    fit(OPT, STATE, [BATCH] * 7, num_steps=7, **options)
    assert [line["step"] for line in lines_of(path) if "gradient_norm/w" in line] == [2, 5, 6]


def test_the_norms_of_a_step_that_ends_the_run_are_logged(opt, new_state, batches):
    """They show where the NaN is."""
    logged = []
    bad = [*batches[:3], {"x": batches[3]["x"], "y": np.full(8, np.nan, np.float32)}, *batches[4:]]
    options = {
        "num_steps": 8,
        "log": lambda step, metrics: logged.append((step, metrics)),
        "progress": False,
    }
    with pytest.raises(so.errors.NonFiniteLossError):
        fit(opt, new_state(), bad, norms_every=2, **options)
    step, metrics = logged[-1]
    assert step == 4
    assert math.isnan(metrics["gradient_norm/w"])
    assert math.isfinite(metrics["param_norm/w"])


def test_layers_have_numbers_of_their_own():
    """A leaf in a list ends in a number too, and is no layer."""
    values = jnp.array([[3.0, 0, 4, 1], [0, 0, 0, 0], [1, 2, 3, 4]])
    norms = Norms(values, (("out/0", None), ("blocks/w", 2), ("head", None)))
    metrics = norms.metrics()
    assert metrics["gradient_norm/blocks/w/layer_1"] == 4
    assert (metrics["gradient_norm/out/0"], metrics["param_norm/head"]) == (3, 4)
    assert norms.params["blocks/w"].tolist() == [2, 3]
    assert len(metrics) == 12


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: fit(OPT, STATE, [BATCH], num_steps=1, norms_every=0),
            "fit: norms_every must be at least 1, got 0.",
        ),
        (
            lambda: fit(
                so.local_sgd(OPT, sync_every=1), STATE, [BATCH], num_steps=1, norms_every=5
            ),
            (
                "fit: norms_every takes norms of one gradient, and the replicas of local_sgd"
                " train apart.\nFix: leave norms_every out."
            ),
        ),
        (
            lambda: fit(OPT, STATE, [BATCH], num_steps=1, norms_every=5, cross_check_every=1),
            (
                "fit: norms_every takes norms in steps that are not verified, and cross_check_every=1"
                " verifies each step.\nFix: take cross_check_every=2 or more, or leave norms_every"
                " out."
            ),
        ),
    ],
)
def test_a_wrong_argument_is_refused(call, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        call()
    assert str(error.value) == message


OPT = so.ddp(
    optax.sgd(0.1),
    so.make_mesh(replica=2, data=4),
    lambda params, batch: jnp.mean(batch * params["w"]),
)
STATE = so.training.DeferredInit({"w": np.ones((), np.float32)})
BATCH = np.ones(8, np.float32)
