"""A state as bytes: round trips onto other strategies, and two hundred corruptions refused."""

import hashlib
import json
import struct

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.tiers import tiered

import shardopt as so
from shardopt.checkpoint import from_bytes, to_bytes
from shardopt.checkpoint._read import restore
from shardopt.checkpoint._write import save

COPY = "Fix: read the data again from where it came from, or use another copy."


@pytest.fixture(scope="module")
def packed(trained):
    opt, state = trained
    return to_bytes(opt, state())


@pytest.mark.parametrize(
    ("strategy", "sizes"),
    tiered(
        [
            (so.fsdp, {"data": 8}),
            (so.fsdp, {"data": 2, "tensor": 4}),
            (so.zero, {"data": 4}),
            (so.ddp, {"data": 1}),
        ],
        lambda row: row[1] in ({"data": 2, "tensor": 4}, {"data": 1}),
        ids=lambda row: f"{row[0].__name__}-{row[1]}",
    ),
)
def test_any_strategy_takes_it(strategy, sizes, packed, trained, make_opt, steps_on, same):
    opt, state = make_opt(strategy, **sizes), trained[1]()
    found = from_bytes(opt, packed)
    assert same(found, state)
    assert jax.tree.map(lambda x: x.sharding, found) == jax.tree.map(
        lambda x: x.sharding, opt.abstract_state()
    )
    if sizes == {"data": 8}:
        assert same(steps_on(opt, found, 3, 5), steps_on(trained[0], state, 3, 5))


def test_the_same_state_gives_the_same_bytes(packed, trained):
    opt, state = trained
    assert to_bytes(opt, state()) == packed
    assert to_bytes(opt, from_bytes(opt, bytearray(packed))) == packed


def test_it_describes_itself(packed):
    magic, version, _, length, total = struct.unpack("<8sIIQQ", packed[:32])
    assert (magic, version, total) == (b"shardopt", 1, len(packed))
    header = json.loads(packed[32 : 32 + length])
    assert header["strategy"] == "fsdp"
    assert header["state"]["mesh_shape"] == {"data": 8, "pipeline": 1, "tensor": 1}
    assert header["state"]["step"] == 3
    assert packed[-32:] == hashlib.sha256(packed[:-32]).digest()
    names = list(header["state"]["leaves"])
    offset, size = header["spans"][names.index("params/layer/0")]
    values = np.frombuffer(packed[32 + length + offset :][:size], "<f4")
    np.testing.assert_allclose(values, np.ones(15), rtol=1e-3)  # AdamW's decay has been at them


def test_all_dtypes_keys_and_empty_arrays(make_opt, same):
    dtypes = [
        "bfloat16",
        "float16",
        "float8_e4m3fn",
        "float8_e5m2",
        "int4",
        "uint8",
        "int32",
        "bool",
        "complex64",
    ]
    opt = make_opt(so.ddp, data=8)
    sharded, replicated = NamedSharding(opt.mesh, P("data")), NamedSharding(opt.mesh, P())
    tree = {name: jax.device_put(jnp.arange(16).astype(name), sharded) for name in dtypes}
    tree |= {"empty": jnp.zeros((0, 3), jnp.bfloat16), "host": np.arange(3, dtype=np.int16)}
    tree |= {"step": jnp.int32(4), "key": jax.random.split(jax.random.key(4, impl="rbg"), 3)}
    state = so.TrainState(
        jnp.int32(4),
        tree,
        optax.adam(0.1).init(tree["bfloat16"]),
        jax.random.key_data(jax.random.key(0)),
    )
    wanted = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), state
    )
    found = from_bytes(wanted, to_bytes(opt, state))
    assert found.params["key"].dtype == tree["key"].dtype
    assert np.array_equal(
        jax.random.key_data(found.params.pop("key")), jax.random.key_data(tree.pop("key"))
    )
    assert same(found, state)


def test_what_was_packed_is_nobodys_memory(trained, packed, steps_on, same):
    opt, state = trained
    data = bytearray(packed)
    found = from_bytes(opt, data)
    data[:] = bytes(len(data))
    assert same(found, state())
    again = bytes(packed)
    steps_on(opt, from_bytes(opt, again), 3, 4)
    assert again == packed


def test_two_hundred_corruptions_are_refused(packed, trained):
    opt, draw, seen = trained[0], np.random.default_rng(5), set()
    for number in range(200):
        kind = ("flip", "cut", "extend", "swap")[number % 4]
        data = bytearray(packed)
        at, other = (int(draw.integers(len(data))) for _ in range(2))
        if number % 8 < 4:
            at %= 2048  # half of them near the front, where the header is
        match kind:
            case "flip":
                data[at] ^= 1 << int(draw.integers(8))
            case "cut":
                del data[at:]
            case "extend":
                data += draw.bytes(1 + at % 100)
            case "swap":
                length = 1 + other % 64
                first, second = data[at : at + length], data[other : other + length]
                data[at : at + length], data[other : other + length] = second, first
        assert data != packed
        with pytest.raises(so.errors.CheckpointError, match=r"^from_bytes: "):
            from_bytes(opt, bytes(data))
        seen.add(kind)
    assert seen == {"flip", "cut", "extend", "swap"}


def resealed(data: bytes) -> bytes:
    """Return the data with a checksum that fits again."""
    return data[:-32] + hashlib.sha256(data[:-32]).digest()


def rewritten(data: bytes, change) -> bytes:
    """Return the data with a changed header, and everything that vouches for it renewed."""
    length = struct.unpack("<Q", data[16:24])[0]
    header = json.loads(data[32 : 32 + length])
    change(header)
    text = json.dumps(header).encode().ljust(length)
    body = text + data[32 + length : -32]
    return resealed(
        struct.pack("<8sIIQQ", b"shardopt", 1, 0, len(text), 64 + len(body)) + body + bytes(32)
    )


def test_rewriting_alone_changes_nothing(packed):
    assert rewritten(packed, lambda header: None) == packed


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda data: b"",
            "from_bytes: data is 0 bytes long, the least that to_bytes returns is 64.",
        ),
        (lambda data: data[:70], "from_bytes: data is 70 bytes long, {} were written."),
        (
            lambda data: b"pickle!!" + data[8:],
            "from_bytes: data does not begin with b'shardopt' but with b'pickle!!'.",
        ),
        (lambda data: data + b"x", "from_bytes: data is {1} bytes long, {0} were written."),
        (
            lambda data: data[:-40] + b"\1" + data[-39:],
            "from_bytes: the bytes are not those that were written (their SHA-256 differs).",
        ),
        (
            lambda data: rewritten(data, lambda header: header["spans"].pop()),
            "from_bytes: the header does not fit the data.",
        ),
        (
            lambda data: rewritten(data, lambda header: header["spans"][1].__setitem__(0, 10**12)),
            "from_bytes: the header does not fit the data.",
        ),
        (
            lambda data: rewritten(data, lambda header: header["spans"][1].__setitem__(0, -64)),
            "from_bytes: the header does not fit the data.",
        ),
        (
            lambda data: rewritten(data, lambda header: header.pop("state")),
            "from_bytes: the header does not make sense (KeyError: 'state').",
        ),
        (
            lambda data: resealed(data[:32] + b"]" + data[33:]),
            (
                "from_bytes: the header does not make sense (JSONDecodeError: Expecting value: line"
                " 1 column 1 (char 0))."
            ),
        ),
    ],
)
def test_what_is_not_a_blob(spoil, message, packed, trained, complaint_of):
    expected = message.format(len(packed), len(packed) + 1)
    said = complaint_of(
        lambda: from_bytes(trained[0], spoil(packed)), so.errors.DamagedCheckpointError
    )
    assert said == f"{expected}\n{COPY}"


def test_another_version(packed, trained, complaint_of):
    data = resealed(packed[:8] + struct.pack("<I", 2) + packed[12:])
    assert (
        complaint_of(lambda: from_bytes(trained[0], data))
        == "from_bytes: data has format version 2, this version of shardopt reads 1.\n"
        "Fix: use the version of shardopt that wrote it, or a newer one."
    )


@pytest.mark.parametrize("dtype", ["object", "U3", "nonsense", "V4"])
def test_dtypes_that_are_none_are_refused(dtype, packed, trained, complaint_of):
    def change(header):
        header["state"]["leaves"]["params/layer/0"]["dtype"] = dtype

    message = complaint_of(
        lambda: from_bytes(trained[0], rewritten(packed, change)), so.errors.DamagedCheckpointError
    )
    assert message.startswith(
        "from_bytes: the header is not a record of a checkpoint (ValueError: "
    )


def test_another_model_is_named(packed, make_opt, complaint_of):
    assert complaint_of(lambda: from_bytes(make_opt(tx=optax.sgd(0.1)), packed)).startswith(
        "from_bytes: the state of step 3 does not fit opt: 0 leaves missing, 9 left over, 0"
        " different.\n  opt_state/0/count: int32[], left over in the checkpoint\n"
    )


def test_wrong_kinds(trained, complaint_of):
    opt, state = trained
    assert (
        complaint_of(lambda: from_bytes(opt, "text"), TypeError)
        == "from_bytes: data must be bytes, got str."
    )
    assert (
        complaint_of(lambda: to_bytes(opt, state()._replace(rng="x")), TypeError)
        == "to_bytes: the state must be a pytree of arrays.\n  rng: str\n"
        "Fix: make them arrays (jnp.asarray), or keep them out of the state."
    )


def test_bytes_and_folders_agree(tmp_path, packed, trained, make_opt, same):
    save(tmp_path, trained[1]())
    opt = make_opt(so.ddp, data=2)
    assert same(restore(tmp_path, opt), from_bytes(opt, packed))
