"""Adapters in peft's files: which tensors hold A and B of each weight of an open model."""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shardopt.core._errors import error_text, plural
from shardopt.models._places import Place
from shardopt.models._pretrained import Pretrained
from shardopt.nn._low_rank import FACTORS

Factors = dict[str, np.ndarray]
_PREFIX = "base_model.model."
_NO_EFFECT = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "use_rslora": (False,),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": (None, []),
    "layers_to_transform": (None, []),
    "target_parameters": (None, []),
}
"""Settings of an adapter_config.json that would change the mathematics, with the values that `lora` computes."""


class Module(NamedTuple):
    """A module of peft with an adapter.

    Attributes:
      name: its name in the model of transformers, such as "model.layers.0.self_attn.q_proj".
      place: where its weight lies in the decoder.
    """

    name: str
    place: Place

    @property
    def names(self) -> tuple[str, str]:
        """The names of A and B in a file."""
        return f"{_PREFIX}{self.name}.lora_A.weight", f"{_PREFIX}{self.name}.lora_B.weight"

    def in_file(self, factors: Factors) -> dict[str, np.ndarray]:
        """Return the A and B of this module as peft stores them: [rank, inputs] and [outputs, rank]."""
        lora_a, lora_b = (factors[f"{self.place.leaf}/{name}"][self.place.numbers] for name in FACTORS)
        matrices = lora_a.reshape(-1, lora_a.shape[-1]).T, lora_b.reshape(lora_b.shape[0], -1).T
        return dict(zip(self.names, map(np.ascontiguousarray, matrices), strict=True))

    def write_into(self, factors: Factors, tensors: Factors) -> None:
        """Write the tensors of this module into A and B of all blocks."""
        for leaf_name, tensor_name in zip(FACTORS, self.names, strict=True):
            block = factors[f"{self.place.leaf}/{leaf_name}"][self.place.numbers]
            block[...] = tensors[tensor_name].T.reshape(block.shape)


def linear_weights(model: Pretrained) -> list[str]:
    """Return the leaves of blocks that peft has a form for, without routers and experts."""
    leaves = {place.leaf for places in model.places.values() for place in places}
    problems = {place.leaf for tensor, places in model.places.items() if _problem(tensor, places) for place in places}
    return sorted(leaf for leaf in leaves - problems if "blocks/" in leaf and "/router/" not in leaf)


def modules_of(model: Pretrained, targets: set[str]) -> list[Module]:
    """Return the modules whose weights are in these leaves.

    Raises:
      ValueError: if a leaf is no weight of a linear module, or a module joins several leaves.
    """
    modules, problems, seen = [], [], set()
    for tensor, places in model.places.items():
        leaves = {place.leaf for place in places}
        if leaves & targets:
            seen |= leaves
            if problem := _problem(tensor, places):
                problems.append(f"{tensor}: {problem}")
            else:
                modules.append(Module(tensor.removesuffix(".weight"), places[0]))
    problems += [f"{leaf}: is no leaf of the model" for leaf in sorted(targets - seen)]
    if problems:
        fix = "leave them out of targets, or save without model=, in shardopt's own form."
        raise ValueError(error_text(f"peft has no form for {plural(len(problems), 'weight')}.", problems, fix))
    return modules


def _problem(tensor: str, places: list[Place]) -> str:
    """Return why peft has no form for a tensor; "" if it has one."""
    if len(places) > 1:
        return f"joins {', '.join(place.leaf for place in places)}, which have an A each"
    if not places[0].outputs or len(places[0].numbers) != 1 or not tensor.endswith(".weight"):
        return "is not the weight of a linear module"
    return ""


def peft_config(rank: int, alpha: float, dropout: float, modules: list[Module], model: Pretrained) -> dict[str, object]:
    """Return the adapter_config.json that peft reads."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model.folder),
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": dropout,
        "target_modules": sorted({module.name.rpartition(".")[2] for module in modules}),
        "bias": "none",
        "inference_mode": True,
        "fan_in_fan_out": any(not module.place.transposed for module in modules),
    }


def check_peft_config(path: Path, rank: int, alpha: float) -> None:
    """Refuse settings of peft that `lora` does not compute, and another rank or alpha.

    Raises:
      ValueError: if a setting differs.
    """
    config = json.loads(path.read_text())
    allowed_values = _NO_EFFECT | {"r": (rank,), "lora_alpha": (alpha,)}
    problems = [
        f"{name}: {config[name]!r} in the folder, {values[0]!r} here"
        for name, values in allowed_values.items()
        if name in config and config[name] not in values
    ]
    if problems:
        fix = "make the adapters with the rank and alpha of the folder; other settings of peft are not supported."
        raise ValueError(error_text(f"{path} has settings that do not fit.", problems, fix))
