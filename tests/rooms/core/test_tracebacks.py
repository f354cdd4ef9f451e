"""A traceback has the user's frames and none of shardopt's, as jax leaves out its own."""

import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardopt as so
from shardopt.core._tracebacks import api_boundary

pytestmark = pytest.mark.fast

BATCH = {"x": np.ones((16, 4), np.float32)}
PARAMS = {"w": np.ones(4, np.float32)}


@pytest.fixture(autouse=True)
def _filtering():
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "auto")
    yield
    jax.config.update("jax_traceback_filtering", before)


def loss_fn(params, batch):
    return jnp.mean(batch["x"] @ params["w"])


def loss_with_a_typing_error(params, batch):
    return jnp.mean(batch["z"] @ params["w"])


def frames(call):
    """Return (file, function) of each frame of the error that a call raises, from the frame of this
    file on.
    """
    with pytest.raises(Exception) as raised:  # noqa: PT011
        call()
    return [
        (Path(frame.filename).name, frame.name)
        for frame in traceback.extract_tb(raised.value.__traceback__)
    ]


def strategy(loss=loss_fn):
    return so.fsdp(optax.sgd(0.1), so.make_mesh(data=8), loss)


def step(loss, batch):
    opt = strategy(loss)
    opt.step(opt.init(PARAMS), batch)


@pytest.mark.parametrize(
    "call",
    [
        lambda: so.make_mesh(data=3),
        lambda: so.fsdp(optax.sgd(0.1), so.make_mesh(data=8), loss_fn, micro_batch=2),
        lambda: strategy().init({"w": jax.ShapeDtypeStruct((4,), jnp.float32)}),
        lambda: so.fit(strategy(), "no state", [BATCH], num_steps=1),
        lambda: so.diloco(strategy(), sync_every=2),
    ],
    ids=["mesh", "keyword", "init", "fit", "diloco"],
)
def test_bad_input_shows_the_line_of_the_call_alone(call):
    assert frames(call) == [("test_tracebacks.py", "frames"), ("test_tracebacks.py", "<lambda>")]


def test_a_batch_that_does_not_divide_shows_the_line_of_the_step():
    assert frames(lambda: step(loss_fn, {"x": np.ones((15, 4), np.float32)}))[-1] == (
        "test_tracebacks.py",
        "step",
    )


def test_an_error_in_the_loss_shows_the_line_of_the_step_and_the_line_of_the_loss():
    shown = frames(lambda: step(loss_with_a_typing_error, BATCH))
    assert shown[-2:] == [
        ("test_tracebacks.py", "step"),
        ("test_tracebacks.py", "loss_with_a_typing_error"),
    ]


def test_all_frames_are_shown_where_jax_shows_its_own():
    jax.config.update("jax_traceback_filtering", "off")
    assert ("mesh.py", "make_mesh") in frames(lambda: so.make_mesh(data=3))


def test_of_an_error_that_nobody_foresaw_the_innermost_line_is_shown():
    source = compile(
        "def broken(): raise KeyError('internal')", f"{so.__path__[0]}/mesh.py", "exec"
    )
    space = {}
    exec(source, space)
    assert frames(api_boundary(space["broken"]))[1:] == [("mesh.py", "broken")]


def test_errors_that_it_came_from_are_short_too():
    space = {}
    code = (
        "def caused():\n    try: inner()\n    except KeyError as error: raise ValueError('refused')"
        " from error"
    )
    exec(compile(code, f"{so.__path__[0]}/mesh.py", "exec"), space)
    space["inner"] = lambda: {}["missing"]
    with pytest.raises(ValueError, match="refused") as raised:
        api_boundary(space["caused"])()
    cause = raised.value.__cause__
    assert [frame.name for frame in traceback.extract_tb(cause.__traceback__)] == ["<lambda>"]
