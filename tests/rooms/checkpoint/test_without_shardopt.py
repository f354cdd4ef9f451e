"""The page says how to read a checkpoint without shardopt: exactly that code, in processes that
cannot import it.
"""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.paths import ROOT

import shardopt as so
from shardopt.checkpoint._tree import leaves_by_path

PAGE = ROOT / "docs" / "checkpoints.md"


def documented(start):
    """Return the block of the section that begins so."""
    section = (
        PAGE.read_text().partition("## Reading one without shardopt\n")[2].partition("\n## ")[0]
    )
    matches = [
        block
        for block in re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
        if start in block
    ]
    assert len(matches) == 1
    return matches[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of step 15 on eight devices, and its arrays by their paths as the record has
    them.
    """

    def loss_fn(params, batch):
        return jnp.mean((batch @ params["w"]) ** 2) + 0 * params["layer.0"]["b/c"].sum().astype(
            jnp.float32
        )

    params = {
        "w": np.arange(64, dtype=np.float32).reshape(8, 8),
        "layer.0": {"b/c": jnp.arange(8, dtype=jnp.bfloat16), "": np.ones(3, np.float32)},
        "key": jax.random.key(3),
        "nothing": np.zeros((0, 4), np.float32),
    }
    opt = so.fsdp(
        optax.adam(0.1),
        so.make_mesh(data=8),
        loss_fn,
        rules=[("key", "frozen")],
        min_shard_elements=1,
    )
    state, _ = opt.step(opt.init(params), np.ones((8, 8), np.float32))
    folder = tmp_path_factory.mktemp("run")
    so.save(folder, state, step=15)
    plain = state._replace(params={**state.params, "key": jax.random.key_data(state.params["key"])})
    arrays = {"/".join(path): np.asarray(leaf) for path, leaf in leaves_by_path(plain).items()}
    return folder, {path: array for path, array in arrays.items() if array.size}


def read_apart(folder, code, forbidden, result):
    """Run code in a process that cannot import the forbidden modules.

    Return the arrays that `result` names, by path.
    """
    script = (
        f"import sys\nsys.modules.update(dict.fromkeys({forbidden!r}))\nfolder ="
        f" {str(folder)!r}\n{code}\n"
        f"import numpy\nfound = {result}\n"
        # numpy files know no bfloat16
        "found = {path: array.astype('float32') if array.dtype.kind == 'V' else array for path,"
        " array in found.items()}\n"
        "kinds = {path: type(array).__module__ for path, array in found.items()}\nassert"
        " set(kinds.values()) == {'numpy'}\n"
        "numpy.savez(folder + '/found.npz', **{path.replace('/', '|'): array for path, array in"
        " found.items()})\n"
    )
    environment = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    subprocess.run(
        [sys.executable, "-W", "error", "-c", script], check=True, env=environment, timeout=300
    )
    with np.load(folder / "found.npz") as file:
        return {path.replace("|", "/"): file[path] for path in file}


def assert_same(arrays, wanted):
    assert arrays.keys() == wanted.keys()
    for path, array in wanted.items():
        np.testing.assert_array_equal(
            arrays[path], array.astype(np.float32) if array.dtype == jnp.bfloat16 else array
        )


@pytest.mark.slow  # test_read.py
def test_orbax_alone_reads_every_array(saved):
    folder, wanted = saved
    by_path = (
        "{'/'.join(key.key for key in path): leaf for path, leaf in"
        " jax.tree_util.tree_leaves_with_path(state)}"
    )
    assert_same(read_apart(folder, documented("orbax"), ["shardopt"], by_path), wanted)


def test_tensorstore_alone_reads_every_array(saved):
    folder, wanted = saved
    arrays = read_apart(
        folder,
        documented("tensorstore"),
        ["shardopt", "jax", "orbax", "orbax.checkpoint"],
        "arrays",
    )
    assert_same(arrays, wanted)


def test_the_files_are_those_of_the_table(saved):
    section = (
        PAGE.read_text().partition("## Reading one without shardopt\n")[2].partition("\n## ")[0]
    )
    listed = set(
        re.findall(r"`([\w./]+)`", "\n".join(re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)))
    )
    file_names = {path.name + "/" * path.is_dir() for path in (saved[0] / "15").iterdir()}
    assert file_names == listed
