"""The options of strategies: each is one record with its name, type, default, meaning and check.

`ddp`, `zero`, `fsdp`, `hybrid`, their docstrings, the reference and the command line read these
records. A TypedDict is a group of options, so type checkers know the keywords of every strategy.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypedDict, get_args, get_type_hints

import jax
import jax.numpy as jnp

from shardopt.config._program_check import ProgramCheck
from shardopt.core import (
    Rules,
    check_choice,
    check_count,
    error_text,
    is_integer,
    type_error,
    value_error,
)
from shardopt.core._block_model import LossFn
from shardopt.core._reducer import Reducer, check_reducer
from shardopt.partition._rules import check_rules
from shardopt.runtime._compiler_options import CompilerOptions

View = Literal["auto", "per_device", "global", "unproved"]
"""Where a loss runs: on each device's rows, with or without a proof, on the whole batch, or where it
is exact at the least cost.
"""

OptStateLayout = Literal["within", "matrices"]
"""How sharded optimizer state is cut: within each leaf, or between whole matrices, each on an
owner.
"""

OptStatePlace = Literal[OptStateLayout, "host"]
"""How optimizer state is cut, or that it waits in host memory."""

OptState = OptStatePlace | Sequence[OptStatePlace]
"""Where optimizer state lives."""

LeafDims = int | tuple[int | None, int | None] | None
"""The dim of a batch leaf that counts rows, or a pair: that dim and the one that counts positions.

None if there is no such dim.
"""

BatchDims = Sequence[tuple[str, LeafDims]]
"""(regex of key paths of the batch, dims); the first match counts."""


def _unchanged(name: str, value: Any) -> Any:
    return value


class Option(NamedTuple):
    """All that is known of an option, except its name and type.

    Attributes:
      meaning: its entry in the `Args:` of a strategy.
      default: its value if the user does not pass it.
      check: `check(name, value)` returns the value in the form that the step uses, or refuses it. A
        check that needs the mesh, the placement or another option is in `check_config`.
      fields: `fields(value)` returns the fields of `StrategyConfig` that a checked value sets, name
        -> value; by default the field with the name of the option.
    """

    meaning: str
    default: Any = None
    check: Callable[[str, Any], Any] = _unchanged
    fields: Callable[[Any], dict[str, Any]] | None = None

    def read(self, name: str, value: Any) -> dict[str, Any]:
        """Return the fields of `StrategyConfig` that a value sets, or refuse the value."""
        checked = self.check(name, value)
        return {name: checked} if self.fields is None else self.fields(checked)


ARGUMENTS = {
    "tx": (
        "the optax transformation, such as `optax.adamw(1e-3)`; any but lookahead and dpsgd. A transformation"
        " that takes extra arguments gets `value` (the loss) and `grad`. It also gets the loss of"
        " this batch as a function of parameters: `value_fn` (for line searches) and `obj_fn` (for"
        " sophia). The gradient of that loss is `grad_fn` (for sam with `opaque_mode=True`)."
    ),
    "mesh": (
        "the devices: a mesh from `so.make_mesh`, or your own mesh with the names of its axes,"
        ' `so.Axes(mesh, data=("dp", "fsdp"), tensor="tp")`. A replica axis acts as a second data'
        " axis. State and metrics live on your mesh, with Auto or Explicit axes, whatever"
        " `jax.set_mesh` says. Rules, and a loss in the global view, use your names. A loss in the"
        " per-device view uses the names data, tensor, replica, pipeline, context and expert."
    ),
    "loss_fn": (
        "the loss: a function `loss_fn(params, batch)`, or a `BlockModel`. The function returns a"
        " scalar (the mean over the rows that it gets), or a `Weighted`, or a pair of either and a"
        " dict of metrics (see `Sum`). If it has a keyword `rng`, it gets a new random key for each"
        " step, device and micro-batch. You pass batch leaves [global batch, ...]; in the"
        " per-device view the function gets [rows of this device, ...]."
    ),
}
"""Positional argument of every strategy -> its meaning."""


def _integer(name: str, value: int) -> int:
    check_count(name, value, minimum=1)
    return value


def _optional_integer(name: str, value: int | None) -> int | None:
    return None if value is None else _integer(name, value)


def _rules(name: str, rules: Any) -> Any:
    del name
    return check_rules(rules, axes=None)


def _check_patterns(name: str, patterns: Sequence[str]) -> None:
    invalid_patterns = []
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            invalid_patterns.append(f"{pattern!r}: {error}")
    if invalid_patterns:
        fix = "escape what is meant literally, with re.escape."
        raise value_error(f"{name} must be regular expressions.", invalid_patterns, fix)


def check_batch_dims(name: str, dims: Any) -> BatchDims:
    """Return `batch_dims` as a tuple of rules; refuse any other value."""
    rules = None if isinstance(dims, str) or not isinstance(dims, Iterable) else tuple(dims)
    if rules is None or not all(map(_is_dims_rule, rules)):
        problem = (
            f"{name} must be a sequence of (regex of key paths, row dim), or of (regex, (row dim,"
            f" position dim)), got {dims!r}."
        )
        fix = f"write {name}=[('^frames$', 1), ('^table$', None), ('^image$', (0, 2))]."
        raise type_error(problem, fix=fix)
    _check_patterns(name, [pattern for pattern, _ in rules])
    return rules


def _is_dims_rule(rule: Any) -> bool:
    if not isinstance(rule, tuple) or len(rule) != 2 or not isinstance(rule[0], str):
        return False
    dims = rule[1] if isinstance(rule[1], tuple) else (rule[1], None)
    return len(dims) == 2 and all(dim is None or is_integer(dim) for dim in dims)


def _dtype(name: str, dtype: jax.typing.DTypeLike | None) -> jnp.dtype | None:
    if dtype is None:
        return None
    try:
        as_dtype = jnp.dtype(dtype)
    except TypeError:
        as_dtype = None
    if as_dtype is None or not jnp.issubdtype(as_dtype, jnp.floating):
        problem = f"{name} must be a floating dtype, got {as_dtype or dtype}."
        error = TypeError if as_dtype is None and not isinstance(dtype, str) else ValueError
        fix = "use jnp.bfloat16, or None to gather what is stored."
        raise error(error_text(problem, fix=fix))
    return as_dtype


def _choice(choices: Any, fix: str) -> Callable[[str, Any], str]:
    def check(name: str, value: Any) -> str:
        check_choice(name, value, get_args(choices), fix)
        return value

    return check


def _compiler_options(name: str, options: CompilerOptions | None) -> CompilerOptions | None:
    if options is not None and not isinstance(options, Mapping):
        problem = f"{name} must be a dict of option name to value, got {type(options).__name__}."
        raise type_error(problem, fix="start from so.runtime.compiler_options(mesh).")
    return options


def _program_check(name: str, check: ProgramCheck | None) -> ProgramCheck | None:
    if check is not None and not callable(check):
        problem = f"{name} must be a function (compiled, lowered) -> None, got {check!r}."
        raise type_error(problem, fix="pass so.hlo.check_proved, or leave it out.")
    return check


def _view_fields(view: View) -> dict[str, Any]:
    if view == "unproved":
        return {"view": "per_device", "separable": True}
    return {"view": view, "separable": False}


def _opt_state(name: str, opt_state: Any) -> Any:
    fix = (
        "use 'within' (shards of every leaf), 'matrices' (whole matrices on owners), 'host' (in host"
        " memory between steps) or ('matrices', 'host')."
    )
    is_sequence = isinstance(opt_state, Iterable) and not isinstance(opt_state, str)
    places: tuple[Any, ...] = tuple(opt_state) if is_sequence else (opt_state,)
    for place in places:
        check_choice(name, place, get_args(OptStatePlace), fix)
    if {"within", "matrices"} <= set(places):
        raise value_error(f"{name} is both 'within' and 'matrices'.", fix=fix)
    return places if is_sequence else opt_state


def _opt_state_fields(opt_state: OptState) -> dict[str, Any]:
    places = (opt_state,) if isinstance(opt_state, str) else opt_state
    return {
        "opt_state_layout": "matrices" if "matrices" in places else "within",
        "offload": ("opt_state",) if "host" in places else (),
    }


def _reducer(name: str, reducer: Reducer | None) -> Reducer | None:
    if reducer is not None:
        check_reducer(reducer)
    return reducer


class SharedOptions(TypedDict, total=False):
    """Options of every strategy."""

    rules: Annotated[
        Rules,
        Option(
            "what holds of the leaves whose key path, such as"
            ' "blocks/attention/qkv", a regex is found in: `[(regex, PartitionSpec), (regex,'
            ' "frozen"), (regex, "experts"), (regex, "if_divisible"), ...]`. A `PartitionSpec` says'
            ' which dims the tensor axis splits; the first one that matches wins. "frozen" leaves are not trained: they'
            " have no gradient and no optimizer state. Leaves that are not floating are always"
            " frozen. `loss_fn` may give frozen leaves new values with `Updated`. Strategies that"
            ' shard parameters shard frozen leaves as well. Dim 0 of leaves of "experts" counts'
            " experts, and the expert axis splits it. Without an expert axis they are treated like"
            ' all others. Leaves of "if_divisible" stay whole where tensor does not divide them, and the'
            ' report says so. For leaves of a BlockModel\'s "blocks" specs and dims are those of one'
            " block. A rule may also be a function `(path, shape) -> PartitionSpec | None`.",
            default=(),
            check=_rules,
        ),
    ]
    evaluate_fn: Annotated[
        LossFn | None,
        Option(
            "the loss that `opt.evaluate` and `so.training.evaluation` run, on the parameters where"
            " they are placed; by default the loss of training. It has the form of `loss_fn`, and"
            " gets no random key. In a pipeline it must be a `BlockModel`.",
        ),
    ]
    batch_dims: Annotated[
        BatchDims,
        Option(
            "which dims of a batch leaf count rows, and positions: `[(regex, row dim), (regex, (row"
            " dim, position dim)), ...]`. A regex is searched in the key paths of the batch, and"
            " the first match wins. By default dim 0 counts rows, and the first other dim counts"
            ' positions, which matter only to a context axis. `("^frames$", 1)` is for frames [T,'
            ' B, ...], and `("^labels$", (0, None))` for labels of whole rows. The row dim None is'
            " for a leaf that all rows share, such as a table: every device and micro-batch gets"
            ' all of it. With `view="global"` leaves may have different numbers of rows, such as'
            " the nodes and edges of a graph. Each leaf is then split on the first dim that the"
            " number of devices divides; the dim of the rows is tried first. A leaf without such a"
            " dim is replicated.",
            default=(),
            check=check_batch_dims,
        ),
    ]
    compiler_options: Annotated[
        CompilerOptions | None,
        Option(
            "the options that XLA compiles a step with, name -> value; by default"
            " `so.runtime.compiler_options(mesh)`.",
            check=_compiler_options,
        ),
    ]
    check: Annotated[
        ProgramCheck | None,
        Option(
            "a function that is called with each program when it is compiled, as `check(compiled,"
            " lowered)`, before the program runs. It returns nothing or raises an error."
            " `so.hlo.check_proved` proves that every sum over devices is complete once, and that a"
            " small program computes the numbers that were written.",
            check=_program_check,
        ),
    ]
    reducer: Annotated[
        Reducer | None,
        Option(
            "how gradients are sent, from `so.reducers`; by default they are averaged exactly, in"
            " the dtype of the parameters, whatever `gather_dtype` is. Each reducer documents its"
            " effect on the equivalence and on the bytes. Its state is part of the train state; a"
            " state that differs between devices is stacked, with one entry per device. Placements"
            " that shard gradients (zero with stage 2, fsdp) only take `so.reducers.exact(dtype)`."
            " Placements that shard optimizer state cast gradients of sharded leaves to its dtype,"
            " then reduce-scatter them.",
            check=_reducer,
        ),
    ]
    view: Annotated[
        View,
        Option(
            'where the loss runs. By default, "auto", it runs on each device\'s own rows, if that'
            " is proved to be exact. Otherwise it runs once on the whole batch, and a warning says"
            ' why. "per_device" runs it on each device\'s own rows, or raises an error if that is'
            ' not proved. "unproved" states that the loss is a (weighted) mean over rows, and skips'
            ' the proof; `so.check` compares such a loss with one device. "global" runs it once on'
            " the whole batch, without a proof or a warning."
            " `opt.config.report()` shows the choice and the reason. A pipeline has no global view,"
            " and refuses a loss that is not proved.",
            default="auto",
            check=_choice(
                View,
                "use view='auto' (chosen by a proof), 'per_device' (each device runs the loss on"
                " its rows), 'unproved' (the same without a proof) or 'global' (one loss of the"
                " whole batch).",
            ),
            fields=_view_fields,
        ),
    ]


class MicroBatchOptions(TypedDict, total=False):
    """The number of micro-batches, which `hybrid` requires and others have a default for."""

    micro_batches: Annotated[
        int,
        Option(
            "the number of pieces that each device cuts its rows into. A device computes the"
            " gradient of one piece at a time, which needs less memory for activations.",
            default=1,
            check=_integer,
        ),
    ]


class ShardingOptions(TypedDict, total=False):
    """Options of strategies that shard over data."""

    min_shard_elements: Annotated[
        int | None,
        Option(
            "leaves with fewer elements than this stay replicated over data. For stacked blocks the"
            " elements of one block count. `opt.config.report()` lists these leaves. By default it"
            " is 16,384 on TPU, where gathers of norms would wait for those of matrices, and 1,024"
            " elsewhere.",
            check=_optional_integer,
        ),
    ]
    opt_state: Annotated[
        OptState,
        Option(
            'where optimizer state lives. By default, "within", each leaf is sharded on one of its'
            ' dims. "matrices" assigns each matrix to one device, its owner, for optimizers of'
            " matrices (Muon, SOAP): work on a matrix then needs no collectives. The notes of"
            ' `so.fsdp` on matrices say what is sent. In `hybrid` it is not for placement "ddp".'
            ' "host" keeps the state in host memory between steps, 8/N bytes per parameter with'
            " fp32 Adam. The numbers are the same. A step copies the state to the device and back."
            " It copies the state of a `BlockModel` block by block if the optimizer treats blocks"
            " separately and does not ask for the loss. Otherwise, in pipelines and with"
            ' `("matrices", "host")`, it copies all of the state at once.',
            default="within",
            check=_opt_state,
            fields=_opt_state_fields,
        ),
    ]


class GatherOptions(TypedDict, total=False):
    """Options of strategies that gather parameters."""

    gather_dtype: Annotated[
        jax.typing.DTypeLike | None,
        Option(
            "the dtype that trained floating parameters are cast to before they are gathered and"
            " used; by default their own. Frozen parameters keep their dtype. In `hybrid` it is"
            ' only for placements "fsdp" and "fsdp_once".',
            check=_dtype,
        ),
    ]


class DdpOptions(MicroBatchOptions, SharedOptions, total=False):
    """Options of `ddp`."""


class ZeroOptions(MicroBatchOptions, ShardingOptions, SharedOptions, total=False):
    """Options of `zero`."""


class FsdpOptions(MicroBatchOptions, GatherOptions, ShardingOptions, SharedOptions, total=False):
    """Options of `fsdp`."""


class HybridOptions(GatherOptions, ShardingOptions, SharedOptions, total=False):
    """Options of `hybrid`."""


def records(group: type) -> dict[str, Option]:
    """Return name -> record of the options in a TypedDict."""
    hints = get_type_hints(group, include_extras=True)
    return {
        name: next(part for part in hint.__metadata__ if isinstance(part, Option))
        for name, hint in hints.items()
    }


OPTIONS: dict[str, Option] = {
    name: option
    for group in (DdpOptions, FsdpOptions, HybridOptions)
    for name, option in records(group).items()
}
"""Name -> record of every option that more than one strategy takes."""
