"""A training state as one string of bytes with its own description and checksum.

Layout, with integers little-endian:

- 8 bytes magic, u32 format version, u32 zero, u64 length of the header, u64 length of the string;
- the header in JSON: strategy, record of the state (see `record.Meta`), offset and length of each
  leaf;
- the values of the leaves, little-endian; each leaf starts at a multiple of 64 bytes;
- the SHA-256 of all bytes before it, 32 bytes.
"""

import hashlib
import json
import struct
import sys

import jax
import numpy as np

from shardopt.checkpoint._read import check_target, fill
from shardopt.checkpoint._record import Meta, describe_state, from_json, to_json
from shardopt.checkpoint._store import Leaf, describe, dtype_of, from_storable, place, to_storable
from shardopt.checkpoint._tree import leaves_by_path
from shardopt.core._errors import (
    CheckpointError,
    DamagedCheckpointError,
    calling,
    error_text,
    format_error,
)
from shardopt.core._types import PyTree
from shardopt.runtime._processes import gather_to_host
from shardopt.step._optimizer import ShardedOptimizer

_MAGIC, _VERSION = b"shardopt", 1
_PRELUDE = struct.Struct("<8sIIQQ")
_ALIGN, _DIGEST = 64, hashlib.sha256().digest_size


@calling("to_bytes")
def to_bytes(opt: ShardedOptimizer, state: PyTree) -> bytes:
    """Return a training state as bytes: strategy, mesh, tree, all values, and a checksum over
    everything.

    The whole state is gathered to the host, leaf by leaf; if it does not fit there, use `save`.
    With several processes all must call it, and all get the same bytes. The bytes hold no pickle,
    so reading them runs no code.

    Args:
      opt: the optimizer that the state belongs to.
      state: pytree of arrays.

    Raises:
      TypeError: if a leaf is not an array.
      ValueError: if `state` was donated to a later step.

    Example:
      >>> import jax.numpy as jnp, optax, shardopt as so
      >>> opt = so.fsdp(optax.adam(0.1), so.make_mesh(), lambda params, batch: jnp.mean((batch @ params["w"]) ** 2))
      >>> data = so.checkpoint.to_bytes(opt, opt.init({"w": jnp.ones((64, 32))}))
      >>> so.checkpoint.from_bytes(opt, data).params["w"].shape
      (64, 32)
    """
    meta = describe_state(state)
    leaf_bytes = [
        _raw(gather_to_host(to_storable(leaf))) for leaf in leaves_by_path(state).values()
    ]
    spans, values_length = _spans([len(values) for values in leaf_bytes])
    description = {"strategy": opt.config.strategy, "spans": spans, "state": to_json(meta)}
    header = json.dumps(description).encode()
    header += b" " * (-(_PRELUDE.size + len(header)) % _ALIGN)
    total_length = _PRELUDE.size + len(header) + values_length + _DIGEST
    pieces = [_PRELUDE.pack(_MAGIC, _VERSION, 0, len(header), total_length), header]
    for values in leaf_bytes:
        pieces += [values, bytes(-len(values) % _ALIGN)]
    checksum = hashlib.sha256()
    for piece in pieces:
        checksum.update(piece)
    return b"".join([*pieces, checksum.digest()])


@calling("from_bytes")
def from_bytes(
    target: ShardedOptimizer | PyTree,
    data: bytes | bytearray | memoryview,
    *,
    abstract_params: PyTree = None,
) -> PyTree:
    """Return the training state that `to_bytes` packed, placed as `target` places it.

    Everything is checked before a leaf is placed: length, magic, version, checksum, header, and the
    key path, shape and dtype of every leaf.

    Args:
      target: an optimizer of any strategy on any mesh, or an abstract state or a part of one; see
        `restore`.
      data: the bytes that `to_bytes` returned.
      abstract_params: the abstract parameters, if the optimizer has not seen parameters yet; see
        `restore`.

    Raises:
      TypeError: if `data` is not contiguous bytes, or `target` is neither an optimizer nor an
        abstract state.
      DamagedCheckpointError: if `data` is damaged, or does not come from `to_bytes`.
      CheckpointError: if `data` has another format or belongs to another model. It is a ValueError.

    Example:
      >>> import jax.numpy as jnp, optax, shardopt as so
      >>> loss_fn = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
      >>> opt = so.ddp(optax.adam(0.1), so.make_mesh(), loss_fn)
      >>> data = so.checkpoint.to_bytes(opt, opt.init({"w": jnp.ones((64, 32))}))
      >>> sharded = so.fsdp(optax.adam(0.1), so.make_mesh(), loss_fn)
      >>> so.checkpoint.from_bytes(sharded, data).params["w"].addressable_shards[0].data.shape
      (8, 32)
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(error_text(f"data must be bytes, got {type(data).__name__}."))
    view = memoryview(data)
    if not view.c_contiguous:
        raise TypeError(error_text("data must be contiguous bytes.", fix="pass bytes(data)."))
    check_target(target, abstract_params)
    meta, leaf_bytes = _unpack(view.cast("B") if view.nbytes else memoryview(b""))
    bytes_by_path = dict(zip(meta.leaves, leaf_bytes, strict=True))

    def read(abstract_state: PyTree) -> PyTree:
        leaves = []
        for path, leaf in leaves_by_path(abstract_state).items():
            stored_leaf = to_storable(leaf)
            host_array = _array(bytes_by_path[path], stored_leaf.shape, stored_leaf.dtype)
            leaves.append(from_storable(place(stored_leaf, host_array.__getitem__), describe(leaf)))
        return jax.tree.unflatten(jax.tree.structure(abstract_state), leaves)

    return fill(f"the state of step {meta.step}", meta, target, abstract_params, read)


def _spans(sizes: list[int]) -> tuple[list[list[int]], int]:
    """Return the offset and length of each leaf among the values, and the length of all values."""
    spans, offset = [], 0
    for size in sizes:
        spans.append([offset, size])
        offset += size + -size % _ALIGN
    return spans, offset


def _raw(array: np.ndarray) -> bytes:
    return (array.byteswap() if sys.byteorder == "big" else array).tobytes()


def _array(raw: memoryview, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    array = np.frombuffer(raw, np.dtype(dtype)).reshape(shape)
    return array.byteswap() if sys.byteorder == "big" else array


def _unpack(data: memoryview) -> tuple[Meta, list[memoryview]]:
    """Check the bytes, outer parts first; return the record and the bytes of each leaf."""
    min_length = _PRELUDE.size + _DIGEST
    if len(data) < min_length:
        raise _damaged(
            f"data is {len(data)} bytes long, the least that to_bytes returns is {min_length}."
        )
    magic, version, reserved, header_length, total_length = _PRELUDE.unpack(data[: _PRELUDE.size])
    if magic != _MAGIC:
        raise _damaged(f"data does not begin with {_MAGIC!r} but with {bytes(magic)!r}.")
    if version != _VERSION:
        problem = f"data has format version {version}, this version of shardopt reads {_VERSION}."
        fix = "use the version of shardopt that wrote it, or a newer one."
        raise CheckpointError(format_error("from_bytes", problem, fix=fix))
    if total_length != len(data):
        raise _damaged(f"data is {len(data)} bytes long, {total_length} were written.")
    if hashlib.sha256(data[:-_DIGEST]).digest() != data[-_DIGEST:]:
        raise _damaged("the bytes are not those that were written (their SHA-256 differs).")
    body = data[_PRELUDE.size : -_DIGEST]
    try:
        header = json.loads(bytes(body[:header_length]))
        meta = from_json("the header", header["state"])
        spans, values_length = _spans([_size(leaf) for leaf in meta.leaves.values()])
        fits = header["spans"] == spans and header_length + values_length == len(body)
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(
            f"the header does not make sense ({type(error).__name__}: {error})."
        ) from error
    if reserved or not fits:
        raise _damaged("the header does not fit the data.")
    return meta, [body[header_length + offset :][:size] for offset, size in spans]


def _size(leaf: Leaf) -> int:
    stored = to_storable(jax.ShapeDtypeStruct(leaf.shape, dtype_of(leaf)))
    return stored.size * np.dtype(stored.dtype).itemsize


def _damaged(problem: str) -> DamagedCheckpointError:
    fix = "read the data again from where it came from, or use another copy."
    return DamagedCheckpointError(format_error("from_bytes", problem, fix=fix))
