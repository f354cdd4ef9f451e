"""Rules from the logical axes that flax models carry: names of dims, and which of them are split over tensor."""

import re
from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec

from shardopt.core.errors import complaint, plural
from shardopt.partition.paths import leaves_with_paths

Rule = tuple[str, PartitionSpec]


def rules_from_logical_axes(
    logical_specs: Any, axis_rules: Sequence[tuple[str, str | None]], *, stacked: str | None = None
) -> list[Rule]:
    """Return the tensor rules of a model whose dims have names.

    Of each leaf the dim is split whose name comes first in `axis_rules` among those that map to "tensor"; a mesh axis
    splits one dim of a leaf.

    Args:
      logical_specs: pytree of the parameters with a `PartitionSpec` of names a leaf, as `flax.linen.get_partition_spec`
        and `flax.nnx.get_partition_spec` return it.
      axis_rules: (name, "tensor") or (name, None) for every name, as flax takes them. The strategy places data,
        pipeline and replica itself.
      stacked: regex of the key paths whose first dim is that of the stacked blocks of a `BlockModel`, such as
        "^blocks/"; rules speak of one block, so that dim is left out.

    Returns:
      [(regex, PartitionSpec), ...] for `rules` of a strategy: one a leaf that is split.

    Raises:
      TypeError: if a leaf is not a `PartitionSpec`.
      ValueError: if a name is not in `axis_rules`, or one there maps to another mesh axis.

    Example:
      >>> specs = {"up": {"kernel": PartitionSpec("embed", "mlp"), "bias": PartitionSpec()}}
      >>> rules = rules_from_logical_axes(specs, [("mlp", "tensor"), ("embed", None)])
      >>> [(pattern, tuple(spec)) for pattern, spec in rules]
      [('^up/kernel$', (None, 'tensor'))]
    """
    who = "rules_from_logical_axes"
    _check_axis_rules(who, axis_rules)
    leaves = leaves_with_paths(logical_specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
    if strange := [f"{path}: {type(leaf).__name__}" for path, leaf in leaves if not isinstance(leaf, PartitionSpec)]:
        fix = "pass what flax.linen.get_partition_spec or flax.nnx.get_partition_spec returns."
        raise TypeError(complaint(who, "leaves must be PartitionSpecs of logical axes.", strange, fix))
    known = {name for name, _ in axis_rules}
    unknown = [f"{path}: {name!r}" for path, spec in leaves for name in _names(spec) if name not in known]
    if unknown:
        what = f"{plural(len(unknown), 'logical axis')} without a rule."
        raise ValueError(complaint(who, what, unknown, 'give each ("name", "tensor") or ("name", None).'))

    order = [name for name, axis in axis_rules if axis == "tensor"]
    rules = []
    for path, spec in leaves:
        entries = list(spec)[1:] if stacked is not None and re.search(stacked, path) else list(spec)
        dims = [i for name in order for i, entry in enumerate(entries) if name in _names((entry,))]
        if dims:
            split = PartitionSpec(*("tensor" if i == dims[0] else None for i in range(dims[0] + 1)))
            rules.append((f"^{re.escape(path)}$", split))
    return rules


def _names(spec: Any) -> list[str]:
    return [name for entry in spec for name in (entry if isinstance(entry, tuple) else (entry,)) if name is not None]


def _check_axis_rules(who: str, axis_rules: Sequence[tuple[str, str | None]]) -> None:
    wrong = [f"{name!r}: {axis!r}" for name, axis in axis_rules if axis not in ("tensor", None)]
    if wrong:
        what = f"{plural(len(wrong), 'rule')} for another axis than tensor."
        fix = "map these to None; the strategy places data, pipeline and replica itself."
        raise ValueError(complaint(who, what, wrong, fix))
