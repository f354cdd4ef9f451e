"""`from_bytes` of anything: a state, or an error that says what is wrong.

The checksum is made to fit where it matters.
"""

import hashlib
import json
import struct
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st
from support.fuzz import COUNTS, fuzz, outcome

import shardopt as so
from shardopt.checkpoint import from_bytes, to_bytes

PRELUDE = struct.Struct("<8sIIQQ")

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-1, 0, 1, 2**31, 2**63, 10**30, 10**4000])
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(
        [
            "*",
            "float32",
            "key<x>",
            "key<rbg>",
            "f4,f4",
            "(2,)f4",
            "V999999999999",
            "O",
            "list",
            "params/w",
        ]
    )
)
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def opts():
    """An optimizer that has seen the parameters, and one that has not."""

    def loss_fn(params, batch):
        return jnp.mean((batch @ params["layers"][0]["w"]) ** 2) + params["b"]

    made = [
        so.ddp(optax.sgd(0.1, momentum=0.9), so.make_mesh(devices=jax.devices()[:1]), loss_fn)
        for _ in range(2)
    ]
    return made, made[0].init({"layers": [{"w": np.ones((4, 3), np.float32)}], "b": np.float32(1)})


@pytest.fixture(scope="module")
def packed(opts):
    return to_bytes(opts[0][0], opts[1])


def sealed(body):
    return body + hashlib.sha256(body).digest()


def in_form(header, rest):
    """Return a blob whose lengths and checksum fit, whatever its header says."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return sealed(
        PRELUDE.pack(b"shardopt", 1, 0, len(text), PRELUDE.size + len(text) + len(rest) + 32)
        + text
        + rest
    )


def places(tree, path=()):
    """Yield the path of every node below the root."""
    for key in (
        tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    ):
        yield (*path, key)
        yield from places(tree[key], (*path, key))


@st.composite
def blobs(draw, packed):
    """Random bytes.

    A whole blob with bytes changed; one with bytes changed that fits together; one with JSON
    changed.
    """
    length = struct.unpack("<Q", packed[16:24])[0]
    header, rest = packed[32 : 32 + length], packed[32 + length : -32]
    kind = draw(
        st.sampled_from(
            ["random", "damaged", "resealed", "prelude", "text", "json", "json", "json"]
        )
    )
    if kind == "random":
        start = draw(st.sampled_from([b"", packed[:8], packed[:12], packed[:32]]))
        return start + draw(st.binary(max_size=200))
    if kind == "prelude":
        numbers = [
            draw(st.integers(0, 2**bits - 1) | st.just(now))
            for bits, now in ((32, 1), (32, 0), (64, length))
        ]
        total = draw(st.just(len(packed)) | st.integers(0, 2**64 - 1))
        return sealed(PRELUDE.pack(b"shardopt", *numbers, total) + packed[32:-32])
    if kind == "json":
        tree = json.loads(header)
        for _ in range(draw(st.integers(1, 3))):
            *path, last = draw(st.sampled_from(list(places(tree)) or [("state",)]))
            node = tree
            for key in path:
                node = node[key]
            if draw(st.booleans()) and isinstance(node, dict | list) and node:
                del node[last]
            else:
                node[last] = draw(trees)
        return in_form(tree, rest)
    if kind == "text" and draw(st.booleans()):
        return in_form(
            draw(
                st.sampled_from(
                    [b"[" * 100_000, b'{"state":' * 50_000, b"9" * 5000, b"\xff\xfe", b"nan"]
                )
            ),
            rest,
        )
    data = bytearray(header if kind == "text" else packed)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data) - 1))
        piece = draw(
            st.binary(max_size=6)
            | st.sampled_from([b'"', b"[", b"}", b"-", b"1e999", b"null", b"\\u0000"])
        )
        data[at : at + draw(st.integers(0, 6))] = piece
    if kind == "text":
        return in_form(bytes(data), rest)
    return bytes(data) if kind == "damaged" else sealed(bytes(data[:-32]))


@pytest.mark.parametrize("count", COUNTS)
def test_from_bytes_takes_anything(opts, packed, count):
    (seen, unseen), state = opts
    said, peaks = {"": 0}, []
    unseen = unseen._replace(abstract_state=forgetful(unseen))

    def prop(data):
        for opt in (seen, unseen):
            # not around the draws, which take many times as long when they are traced
            tracemalloc.start()
            found, message = outcome(
                lambda opt=opt: from_bytes(opt, data), "from_bytes", "fsdp", "ddp"
            )
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
            if message is None:
                shapes = [leaf.shape for leaf in jax.tree.leaves(found)]
                assert sum(np.prod(shape, dtype=int) for shape in shapes) <= len(data)
            key = "" if message is None else message.split("\n")[0][:40]
            said[key] = said.get(key, 0) + 1

    fuzz(prop, blobs(packed), count=count)
    assert said[""] > 0  # some are whole: those whose changes do not matter
    assert len(said) > 8  # and the others fail in many ways
    assert 0 < max(peaks) < 500e6  # numpy's included
    restored = from_bytes(seen, packed)
    assert jax.tree.all(jax.tree.map(np.array_equal, restored, state))


def forgetful(opt):
    """An optimizer that has seen no parameters stays so, whatever it was asked before."""
    original = opt.abstract_state

    def abstract_state(abstract_params=None):
        if abstract_params is None:
            raise ValueError("no parameters seen")
        return original(abstract_params)

    return abstract_state


@pytest.mark.parametrize(
    "data", [memoryview(b"shardopt" * 20)[::2], memoryview(np.zeros((9, 9)).T)]
)
def test_bytes_that_are_not_one_after_another_are_refused(opts, data):
    assert (
        outcome(lambda: from_bytes(opts[0][0], data), "from_bytes")[1]
        == "from_bytes: data must be contiguous bytes.\nFix: pass bytes(data)."
    )
