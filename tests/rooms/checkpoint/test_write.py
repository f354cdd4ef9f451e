"""`save` writes the step of the state, overwrites nothing, and refuses bad input."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardopt.checkpoint import _record as meta
from shardopt.checkpoint._read import restore
from shardopt.checkpoint._write import save


def test_the_step_is_that_of_the_state_or_the_one_given(tmp_path, trained):
    _, state = trained
    assert save(tmp_path, state()) == tmp_path / "3"
    assert (
        save(str(tmp_path / "new" / "folder"), state(), step=np.int64(12))
        == tmp_path / "new" / "folder" / "12"
    )
    assert sorted(path.name for path in (tmp_path / "3").iterdir()) == [
        "MANIFEST.json",
        "_CHECKPOINT_METADATA",
        "commit_success.txt",
        "shardopt.json",
        "state",
    ]
    # Processes would wait for this folder, for ten minutes if somebody deletes it.
    assert not (tmp_path / "3" / "state" / "array_metadatas").exists()


def test_nothing_is_overwritten(tmp_path, trained, complaint_of, same):
    opt, state = trained
    save(tmp_path, state())
    before = {
        path: path.read_bytes()
        for path in tmp_path.rglob("*")
        if path.is_file() and path.name != ".lock"
    }
    assert (
        complaint_of(lambda: save(tmp_path, opt.init(state().params), step=3))
        == f"save: {tmp_path} already holds step 3, and nothing is overwritten.\n"
        "Fix: pass another step= or directory, or delete that folder first."
    )
    assert {path: path.read_bytes() for path in before} == before


def test_the_state_stays_usable(tmp_path, trained, steps_on, same):
    opt, make = trained
    state = make()
    save(tmp_path, state)
    assert same(restore(tmp_path, opt), state)
    assert same(steps_on(opt, state, 3, 4), steps_on(opt, make(), 3, 4))


def test_donated_states_are_refused(tmp_path, trained, steps_on, complaint_of):
    opt, make = trained
    state = make()
    steps_on(opt, state, 3, 4)
    message = complaint_of(lambda: save(tmp_path, state, step=3), ValueError)
    assert (
        message == "save: these arrays of the state were deleted, probably donated.\n  step\n "
        " params/down/0\n  params/layer/0\n  params/layer.0/b\n  params/layer.0/up/w\n "
        " opt_state/0/count\n  opt_state/0/mu/down/0\n  opt_state/0/mu/layer/0\n  ... and 7"
        " more\nFix: use the state that the last step returned: a step takes over the buffers of"
        " the state it is given."
    )
    assert not (tmp_path / "3").exists()


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (
            {"state": {"a": jnp.ones(2), "b": 3, "c": "x"}, "step": 0},
            TypeError,
            (
                "save: the state must be a pytree of arrays.\n  b: int\n  c: str\n"
                "Fix: make them arrays (jnp.asarray; so.replace sets hyperparameters and the step of a"
                " train state), or keep them out of the state."
            ),
        ),
        (
            {"state": {"a": jnp.ones(2)}},
            TypeError,
            "save: step must be given, because the state (dict) has none.\nFix: pass step=.",
        ),
        (
            {"state": {"a": jnp.ones(2)}, "step": 1.0},
            TypeError,
            "save: step must be an integer, got 1.0 (float).",
        ),
        (
            {"state": {"a": jnp.ones(2)}, "step": True},
            TypeError,
            "save: step must be an integer, got True (bool).",
        ),
        (
            {"state": {"a": jnp.ones(2)}, "step": -1},
            ValueError,
            "save: step must not be negative, got -1.\nFix: count steps from 0.",
        ),
        (
            {"state": {"a": jnp.ones(2)}, "step": 1, "directory": 3},
            TypeError,
            "save: directory must be a path, got int.\nFix: pass a path.",
        ),
        (
            {"state": {"a": jnp.ones(2)}, "step": 1, "directory": "gs://bucket/run"},
            ValueError,
            (
                "save: directory must be a path in a file system, got 'gs://bucket/run'.\n"
                "Fix: mount the bucket (for instance with gcsfuse) and pass the path of the mount."
            ),
        ),
    ],
)
def test_bad_arguments_are_refused(arguments, kind, message, tmp_path, complaint_of):
    arguments = {"directory": tmp_path} | arguments
    assert complaint_of(lambda: save(**arguments), kind) == message


def test_a_file_where_the_folder_should_be_is_refused(tmp_path, complaint_of):
    (tmp_path / "run").write_text("I am a file")
    assert (
        complaint_of(lambda: save(tmp_path / "run", {"a": jnp.ones(2)}, step=1))
        == f"save: {tmp_path}/run cannot be written to (FileExistsError: File exists).\n"
        "Fix: choose a folder that you may write to."
    )


@pytest.mark.slow  # docs/test_import.py and docs/test_package.py have it of the whole package
def test_no_backend_and_no_orbax_at_import():
    import subprocess
    import sys

    code = (
        "import sys, shardopt.checkpoint, jax._src.xla_bridge as bridge;"
        "assert 'orbax' not in sys.modules and 'tensorstore' not in sys.modules;"
        "assert not bridge._backends"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_states_without_parameters_come_back(tmp_path):
    state = {"opt": optax.adam(0.1).init(jnp.ones(3))}
    save(tmp_path, state, step=0)
    wanted = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    restored = restore(tmp_path, wanted)
    assert jax.tree.structure(restored) == jax.tree.structure(state)


@jax.tree_util.register_pytree_node_class
class Summed:
    """A state whose `params` is no field of it."""

    def __init__(self, weights, step):
        self.weights = weights
        self.step = step

    params = property(lambda self: {"twice": 2 * self.weights})

    def tree_flatten(self):
        return (self.weights, self.step), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_parameters_that_are_no_field_of_the_state_are_not_taken_for_one():
    record = json.loads(
        json.dumps(meta.to_json(meta.describe_state(Summed(jnp.ones(2), jnp.int32(3)))))
    )
    assert meta.from_json("shardopt.json", record).params is None
