"""Parse and apply `BlockModel.remat`: which values of a block are kept, and which the backward pass
computes again.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.core import ShapedArray
from jax.extend.core import Primitive

from shardopt.core._errors import calling, format_error, plural, value_error
from shardopt.trace._marks import BLOCK_INPUT, named_values, value_name

T = TypeVar("T")
Policy = Callable[..., Any]
Remat = str | Policy | None
"""None, "full", "save:NAME,...", "offload:NAME,...", "offload" or a `jax.checkpoint` policy; see
`BlockModel`.
"""


class Named(NamedTuple):
    """Keep the values with these names (given by `jax.ad_checkpoint.checkpoint_name`).

    All others are computed again.

    Attributes:
      names: the names of the values.
      offload: whether the values are kept in host memory.
    """

    names: tuple[str, ...]
    offload: bool


def read_remat(remat: Remat) -> Named | Policy | Literal["full"] | None:
    """Return a `BlockModel.remat` in parsed form.

    Raises:
      ValueError: if it has none of the six forms.
    """
    if remat is None or callable(remat):
        return remat
    if remat == "full":
        return "full"
    if remat == "offload":
        return Named((BLOCK_INPUT,), offload=True)
    kind, _, names = remat.partition(":") if isinstance(remat, str) else ("", "", "")
    value_names = tuple(name.strip() for name in names.split(","))
    if kind in ("save", "offload") and all(value_names):
        return Named(tuple(dict.fromkeys(value_names)), offload=kind == "offload")
    forms = (
        "None, 'full', 'save:NAME,...', 'offload', 'offload:NAME,...' or a jax.checkpoint policy"
    )
    fix = "write such as remat='save:qkv,attention'; policies are in jax.checkpoint_policies."
    raise value_error(f"BlockModel.remat must be {forms}, got {remat!r}.", fix=fix)


@calling("BlockModel")
def checkpointed(remat: Remat, f: Callable[..., T]) -> Callable[..., T]:
    """Return `f` with a backward pass that follows `remat`.

    The last argument of `f` is the input of a block.

    Raises:
      ValueError: by a call, if `remat` names a value that `f` does not have.
    """
    parsed_remat = read_remat(remat)
    if parsed_remat is None:
        return f
    # prevent_cse inserts a barrier that waits for all gathered weights. Blocks do not need it: they
    # run in a scan, where XLA cannot merge recomputed values with the forward pass.
    checkpoint = functools.partial(jax.checkpoint, prevent_cse=False)
    if not isinstance(parsed_remat, Named):
        return checkpoint(f, policy=None if parsed_remat == "full" else parsed_remat)

    def named(*args: Any) -> T:
        return f(*args[:-1], jax.tree.map(_as_input, args[-1]))

    f_named = named if BLOCK_INPUT in parsed_remat.names else f

    def run(*args: Any) -> T:
        values = named_values(jax.make_jaxpr(f_named)(*args))
        _check_names(parsed_remat, values)
        return checkpoint(f_named, policy=_policy(parsed_remat, values))(*args)

    return run


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

    # XLA:TPU fails to offload the small second result of a kernel (one number per row), so it stays
    # on the device.
    def policy(primitive: Primitive, *avals: ShapedArray, **params: Any) -> Any:
        name = value_name(primitive, params)
        small = name is not None and 8 * _nbytes(avals[0]) < largest.get(name, 0)
        return small or offload(primitive, *avals, **params)

    return policy


def _as_input(x: jax.Array) -> jax.Array:
    return checkpoint_name(x, BLOCK_INPUT) if jnp.issubdtype(jnp.result_type(x), jnp.inexact) else x


def _nbytes(value: ShapedArray) -> int:
    return value.size * value.dtype.itemsize


def _check_names(named: Named, known: Mapping[str, Sequence[ShapedArray]]) -> None:
    unknown = [name for name in named.names if name not in known]
    if unknown:
        problem = f"remat names {plural(len(unknown), 'value')} that the blocks do not have."
        fix = (
            "name what is to be kept, x = jax.ad_checkpoint.checkpoint_name(x, 'attention'), or use"
            " remat='full'."
        )
        if known:
            fix = f"use some of {', '.join(known)}; jax.ad_checkpoint.checkpoint_name names others."
        raise ValueError(format_error("BlockModel", problem, unknown, fix))
