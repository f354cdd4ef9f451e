"""How the compiler shards arrays of a program, told while the program is compiled."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import Sharding

from shardopt.core import Arrays


def may_watch() -> bool:
    """Return whether the text of a program may hold the address of a function.

    It may not where processes compare their programs, or a cache stores them.
    """
    return jax.process_count() == 1 and not jax.config.values["jax_compilation_cache_dir"]


Place = tuple[tuple[int, ...], Sharding]
"""The shape of an array of a program, and its sharding. Under `vmap` the shape has a dim more."""


def watch_shardings(arrays: Arrays, callback: Callable[[list[Place]], None]) -> Arrays:
    """Return the arrays; the callback gets their places when the program is compiled.

    Outside of `jit` it gets them at once. A program that is lowered for `jax.export` has no
    callback: it could not be stored.
    """
    places: dict[int, Place] = {}

    def notice(index: int) -> Callable[..., None]:
        def collect(*place: Any) -> None:
            places[index] = place
            if len(places) == len(arrays):
                callback([places[i] for i in range(len(arrays))])
                places.clear()

        return collect

    return [_watch_p.bind(array, callback=notice(i)) for i, array in enumerate(arrays)]


_watch_p = Primitive("watch_sharding")
"""The identity. An effect in its place would keep a program from being exported."""


def _watch_now(array: jax.Array, *, callback: Callable[..., None]) -> jax.Array:
    callback(array.shape, array.sharding)
    return array


def _lower(ctx: mlir.LoweringRuleContext, value, *, callback: Callable[..., None]):
    module = ctx.module_context
    if module.lowering_parameters.for_export:
        return [value]
    axes = module.axis_context
    if isinstance(axes, mlir.ShardingContext) and axes.device_assignment is None:
        # jax names the devices to its own primitive alone; which ones they are does not matter
        devices = tuple(jax.devices()[: axes.num_devices])
        if len(devices) < axes.num_devices:  # a program for another machine
            return [value]
        axes = dataclasses.replace(axes, device_assignment=devices)
        ctx = ctx.replace(module_context=module.replace(axis_context=axes))

    def inspect(array: jax.Array) -> Arrays:
        jax.debug.inspect_array_sharding(array, callback=functools.partial(callback, array.shape))
        return [array]

    return mlir.lower_fun(inspect)(ctx, value)


_watch_p.def_impl(_watch_now)
_watch_p.def_abstract_eval(lambda array, **_: array)
mlir.register_lowering(_watch_p, _lower)
batching.primitive_batchers[_watch_p] = lambda arrays, dims, **params: (
    _watch_p.bind(*arrays, **params),
    dims[0],
)
ad.primitive_jvps[_watch_p] = lambda primals, tangents, **params: (
    _watch_p.bind(*primals, **params),
    tangents[0],
)
