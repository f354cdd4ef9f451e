"""What the backward pass keeps of a block and what it computes again: `BlockModel.remat`, read and applied."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive

from shardopt.core.errors import format_error, plural
from shardopt.core.jaxprs import equations

T = TypeVar("T")
Policy = Callable[..., Any]
Remat = str | Policy | None
"""None, "full", "save:NAME,...", "offload:NAME,...", "offload" or a `jax.checkpoint` policy; see `BlockModel`."""
INPUT = "shardopt_block_input"
"""The name of what a block is given."""


class Named(NamedTuple):
    """Values that are kept by the name that `jax.ad_checkpoint.checkpoint_name` gave them; all else is computed again.

    Attributes:
      names: of the values.
      offload: whether they wait in host memory.
    """

    names: tuple[str, ...]
    offload: bool


def read_remat(who: str, remat: Remat) -> Named | Policy | Literal["full"] | None:
    """Return what a `BlockModel.remat` says.

    Raises:
      ValueError: if it is none of the six.
    """
    if remat is None or callable(remat):
        return remat
    if remat == "full":
        return "full"
    if remat == "offload":
        return Named((INPUT,), offload=True)
    what, _, names = remat.partition(":") if isinstance(remat, str) else ("", "", "")
    read = tuple(name.strip() for name in names.split(","))
    if what in ("save", "offload") and all(read):
        return Named(tuple(dict.fromkeys(read)), offload=what == "offload")
    wanted = "None, 'full', 'save:NAME,...', 'offload', 'offload:NAME,...' or a jax.checkpoint policy"
    fix = "write such as remat='save:qkv,attention'; policies are in jax.checkpoint_policies."
    raise ValueError(format_error(who, f"BlockModel.remat must be {wanted}, got {remat!r}.", fix=fix))


def checkpointed(remat: Remat, f: Callable[..., T]) -> Callable[..., T]:
    """Return `f`, whose backward pass computes again what `remat` says; its last argument is the input of a block.

    Raises:
      ValueError: when it is called, if `remat` names a value that `f` does not have.
    """
    read = read_remat("BlockModel", remat)
    if read is None:
        return f
    # Blocks run in a scan, where nothing can be merged with the forward pass; the barrier against it would wait for all
    # that is gathered.
    checkpoint = functools.partial(jax.checkpoint, prevent_cse=False)
    if not isinstance(read, Named):
        return checkpoint(f, policy=None if read == "full" else read)

    def named(*args: Any) -> T:
        return f(*args[:-1], jax.tree.map(_as_input, args[-1]))

    f_named = named if INPUT in read.names else f

    def run(*args: Any) -> T:
        values = named_values(jax.make_jaxpr(f_named)(*args))
        _check_names(read, values)
        return checkpoint(f_named, policy=_policy(read, values))(*args)

    return run


def named_values(jaxpr: ClosedJaxpr | Jaxpr) -> dict[str, list[ShapedArray]]:
    """Return the values that have a name, by name in the order of the trace, also those of what is called in it."""
    found: dict[str, list[ShapedArray]] = {}
    for eqn in equations(jaxpr):
        if eqn.primitive.name == "name":
            found.setdefault(eqn.params["name"], []).append(cast(ShapedArray, eqn.outvars[0].aval))
    return found


def _policy(named: Named, values: Mapping[str, Sequence[ShapedArray]]) -> Policy:
    if not named.offload:
        return jax.checkpoint_policies.save_only_these_names(*named.names)
    offload = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=list(named.names),
        offload_src="device",
        offload_dst="pinned_host",
    )
    largest = {name: max(map(_nbytes, values[name])) for name in named.names}

    # What a kernel keeps beside its result, a number a row, stays where it is: XLA:TPU fails to offload it.
    def policy(primitive: Primitive, *avals: ShapedArray, **params: Any) -> Any:
        small = primitive.name == "name" and 8 * _nbytes(avals[0]) < largest.get(params["name"], 0)
        return small or offload(primitive, *avals, **params)

    return policy


def _as_input(x: jax.Array) -> jax.Array:
    return checkpoint_name(x, INPUT) if jnp.issubdtype(jnp.result_type(x), jnp.inexact) else x


def _nbytes(value: ShapedArray) -> int:
    return value.size * value.dtype.itemsize


def _check_names(named: Named, known: Mapping[str, Sequence[ShapedArray]]) -> None:
    if unknown := [name for name in named.names if name not in known]:
        what = f"remat names {plural(len(unknown), 'value')} that the blocks do not have."
        fix = "name what is to be kept, x = jax.ad_checkpoint.checkpoint_name(x, 'attention'), or use remat='full'."
        if known:
            fix = f"use some of {', '.join(known)}; jax.ad_checkpoint.checkpoint_name names others."
        raise ValueError(format_error("BlockModel", what, unknown, fix))
