"""Adapters in peft's files: which tensors hold A and B of each weight of an open model.

peft has one A and one B for a tensor. A tensor that joins queries, keys and values has an A and a B
for each in `lora`. If all have the same A, that is peft's A, and its B has theirs one after the
other. Otherwise the rank of the module is the sum of theirs: A has theirs one after the other, and
B is block-diagonal.
"""

import re
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardopt.core import plural, value_error
from shardopt.models._places import Place, tensor_shape
from shardopt.models._pretrained import Pretrained
from shardopt.nn._low_rank import FACTORS

Factors = dict[str, np.ndarray]
PREFIX = "base_model.model."
_ALLOWED = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # others change the weights of the base
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
"""Settings of an adapter_config.json that may have these values alone."""
_NEUTRAL = frozenset(
    [
        *(
            "auto_mapping",
            "base_model_name_or_path",
            "inference_mode",
            "peft_version",
            "revision",
            "task_type",
        ),
        *(
            "fan_in_fan_out",
            "lora_dropout",
            "megatron_core",
            "qalora_group_size",
            "eva_config",
            "ensure_weight_tying",
        ),
        # the tensors of the file say which modules have adapters
        *("target_modules", "exclude_modules"),
        *("rank_pattern", "alpha_pattern"),
    ]
)
"""Settings that do not change the mathematics, or that have a check of their own; all others must
be off.
"""


class PeftModule(NamedTuple):
    """A module of peft with an adapter.

    Attributes:
      name: its name in the model of transformers, such as "model.layers.0.self_attn.q_proj".
      places: where its weight lies in the decoder: one place, or several if the weight joins
        leaves.
    """

    name: str
    places: list[Place]

    @property
    def names(self) -> tuple[str, str]:
        """The names of A and B in a file."""
        return f"{PREFIX}{self.name}.lora_A.weight", f"{PREFIX}{self.name}.lora_B.weight"

    def shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of A and B in a file. There the module has this rank."""
        shape = tensor_shape(self.places)
        outputs, inputs = shape if self.places[0].transposed else shape[::-1]
        return dict(zip(self.names, ((rank, inputs), (outputs, rank)), strict=True))

    def in_file(self, factors: Factors) -> dict[str, np.ndarray]:
        """Return A [rank, inputs] and B [outputs, rank] as peft stores them."""
        matrices = [lora_a for _, lora_a, _ in self._adapters(factors)]
        is_shared = all(np.array_equal(matrices[0], lora_a) for lora_a in matrices)
        rank = self.ranks(factors)[0 if is_shared else 1]
        tensors = {
            name: np.zeros(shape, matrices[0].dtype) for name, shape in self.shapes(rank).items()
        }
        for factor, part in self._parts(factors, tensors):
            part[...] = factor
        return tensors

    def write_into(self, factors: Factors, tensors: Factors) -> bool:
        """Write A and B of a file into the factors of all blocks.

        Return whether they have all of the module's B.
        """
        tensors = {name: tensors[name].copy() for name in self.names}
        parts = self._parts(factors, tensors)
        for factor, part in parts:
            factor[...] = part
        for _, part in parts:
            part[...] = 0
        return not tensors[self.names[1]].any()

    def ranks(self, factors: Factors) -> tuple[int, int]:
        """Return the ranks that the module can have in a file: with one A for all leaves, and with
        an A for each.
        """
        adapters = self._adapters(factors)
        rank = adapters[0][1].shape[-1]
        return rank, rank * len(adapters)

    def _adapters(self, factors: Factors) -> list[tuple[Place, np.ndarray, np.ndarray]]:
        """Return (place, A, B) of this block, for each leaf that has an adapter."""
        return [
            (place, *(factors[f"{place.leaf}/{name}"][place.numbers] for name in FACTORS))
            for place in self.places
            if f"{place.leaf}/{FACTORS[0]}" in factors
        ]

    def _parts(self, factors: Factors, tensors: Factors) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return each factor of this block, and the view of the file's tensor that it is."""
        file_a, file_b = (tensors[name] for name in self.names)
        parts = []
        for number, (place, lora_a, lora_b) in enumerate(self._adapters(factors)):
            rank = lora_a.shape[-1]
            start = 0 if len(file_a) == rank else number * rank
            rows = slice(start, start + rank)
            parts += [
                (lora_a, file_a[rows].T.reshape(lora_a.shape)),
                (lora_b, place.of_outputs(file_b[:, rows])),
            ]
        return parts


def linear_weights(model: Pretrained) -> list[str]:
    """Return the leaves of blocks that peft has a form for, without routers and experts."""
    leaves = {place.leaf for places in model.places.values() for place in places}
    problems = {
        place.leaf
        for tensor, places in model.places.items()
        if _problem(tensor, places)
        for place in places
    }
    return sorted(
        leaf for leaf in leaves - problems if "blocks/" in leaf and "/router/" not in leaf
    )


def modules_of(model: Pretrained, targets: set[str]) -> list[PeftModule]:
    """Return the modules whose weights are in these leaves.

    Raises:
      ValueError: if a leaf is no weight of a linear module.
    """
    modules = []
    problems = []
    seen = set()
    for tensor, places in model.places.items():
        leaves = {place.leaf for place in places}
        if leaves & targets:
            seen |= leaves
            problem = _problem(tensor, places)
            if problem:
                problems.append(f"{tensor}: {problem}")
            else:
                modules.append(PeftModule(tensor.removesuffix(".weight"), places))
    problems += [f"{leaf}: is no leaf of the model" for leaf in sorted(targets - seen)]
    if problems:
        fix = "leave them out of targets, or save without model=, in shardopt's own form."
        raise value_error(f"peft has no form for {plural(len(problems), 'weight')}.", problems, fix)
    return modules


def _problem(tensor: str, places: list[Place]) -> str:
    """Return why peft has no form for a tensor; "" if it has one."""
    if not places[0].outputs or len(places[0].numbers) != 1 or not tensor.endswith(".weight"):
        return "is not the weight of a linear module"
    return ""


def peft_config(
    rank: int,
    alpha: float,
    dropout: float,
    tensors: Factors,
    modules: list[PeftModule],
    model: Pretrained,
) -> dict[str, object]:
    """Return the adapter_config.json that peft reads, for A and B as `PeftModule.in_file` returns them."""
    ranks = {module.name: len(tensors[module.names[0]]) for module in modules}
    other_modules = {tensor.removesuffix(".weight") for tensor in model.places} - ranks.keys()
    rank_pattern: dict[str, int] = {}
    for module_rank in sorted(set(ranks.values()) - {rank}):
        names = {name for name, number in ranks.items() if number == module_rank}
        rank_pattern |= dict.fromkeys(
            _short_names(names, other_modules | ranks.keys() - names), module_rank
        )
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model.folder),
        "r": rank,
        "lora_alpha": _whole(alpha),
        "lora_dropout": dropout,
        "target_modules": _short_names(ranks.keys(), other_modules),
        "rank_pattern": rank_pattern,
        "alpha_pattern": {
            name: _whole(alpha * number / rank) for name, number in rank_pattern.items()
        },
        "bias": "none",
        "inference_mode": True,
        "fan_in_fan_out": any(not module.places[0].transposed for module in modules),
    }


def _whole(number: float) -> float:
    return int(number) if number == int(number) else number


def _short_names(modules: Set[str], other_modules: Set[str]) -> list[str]:
    """Return the last words of modules, by which peft knows them.

    Their full names if another module ends in the same word.
    """
    words = {name.rpartition(".")[2] for name in modules}
    return sorted(
        modules if any(name.rpartition(".")[2] in words for name in other_modules) else words
    )


def check_peft_config(
    path: Path,
    config: Mapping[str, Any],
    rank: int,
    alpha: float,
    modules: list[PeftModule],
    factors: Factors,
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of A and B in a folder of peft, by name.

    Raises:
      ValueError: if a setting is none that `lora` computes, or asks for another rank or alpha.
    """
    allowed_values = _ALLOWED | {"r": (rank,), "lora_alpha": (alpha,)}
    problems = [
        f"{name}: {value!r} in the folder, {type(value)()!r} here"
        for name, value in config.items()
        if value and name not in _NEUTRAL | allowed_values.keys()
    ]
    problems += [
        f"{name}: {config[name]!r} in the folder, {values[0]!r} here"
        for name, values in allowed_values.items()
        if name in config and config[name] not in values
    ]
    shapes = {}
    for module in modules:
        module_rank, module_alpha = (
            _pattern_value(config.get(f"{name}_pattern"), module.name, default)
            for name, default in (("rank", rank), ("alpha", alpha))
        )
        allowed_ranks = module.ranks(factors)
        if module_rank not in allowed_ranks:
            ranks = " or ".join(map(str, dict.fromkeys(allowed_ranks)))
            problems.append(f"rank_pattern: {module_rank} for {module.name}, {ranks} here")
        elif module_alpha * rank != alpha * module_rank:
            problems.append(
                f"alpha_pattern: {module_alpha} for {module.name},"
                f" {_whole(alpha * module_rank / rank)} here"
            )
        shapes |= module.shapes(module_rank)
    if problems:
        fix = (
            "make the adapters with the rank and alpha of the folder; other settings of peft are"
            " not supported."
        )
        raise value_error(f"{path} has settings that do not fit.", problems, fix)
    return shapes


def _pattern_value(pattern: Mapping[str, Any] | None, name: str, default: float) -> Any:
    """Return a number of "rank_pattern" or "alpha_pattern": the first expression that the end of
    the name matches.
    """
    return next(
        (value for key, value in (pattern or {}).items() if re.match(rf"(.*\.)?({key})$", name)),
        default,
    )
