"""The place of each tensor of a family's files in the decoder, as a view of the tensor with the
dims of a block's leaf.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from shardopt.core import value_error
from shardopt.models import decoder
from shardopt.models._decoder_config import DecoderConfig
from shardopt.models._family import Family
from shardopt.partition._plan import Shape

_PRODUCTS = frozenset(
    ("q", "k", "v", "kv", "q_down", "kv_down", "gate", "up", "down", "out", "kernel", "shared_gate")
)


class Place(NamedTuple):
    """A tensor of a file, or a part of it, in the decoder.

    Attributes:
      leaf: key path of the leaf.
      numbers: the tensor is in `leaf[numbers]`: the number of the block, and of the expert.
      shape: the shape of `leaf[numbers]`.
      start: the first output of the tensor that belongs to the leaf, if it joins several leaves.
      outputs: how many outputs belong to the leaf; 0 if the leaf is no weight of a product.
      transposed: whether the tensor is [outputs, inputs].
    """

    leaf: str
    numbers: Shape
    shape: Shape
    start: int
    outputs: int
    transposed: bool

    def of(self, tensor: np.ndarray) -> np.ndarray:
        """Return the view of a tensor that has the dims of `leaf[numbers]`."""
        if not self.outputs:
            size = math.prod(self.shape)
            part = tensor if tensor.size == size else tensor[self.start : self.start + size]
            return part.reshape(self.shape)
        num_inputs = _num_inputs(self.leaf)
        inputs = self.shape[:num_inputs]
        outputs = self.shape[num_inputs:]
        last = self.start + self.outputs
        if not self.transposed:
            return tensor[:, self.start : last].reshape(*inputs, *outputs)
        view = tensor[self.start : last].reshape(*outputs, *inputs)
        return view.transpose(*range(len(outputs), view.ndim), *range(len(outputs)))

    def of_outputs(self, matrix: np.ndarray) -> np.ndarray:
        """Return the view [columns, *outputs of the leaf] of a matrix [outputs of the tensor,
        columns].
        """
        shape = (matrix.shape[1], *self.shape[_num_inputs(self.leaf) :])
        return self._replace(leaf="", shape=shape, transposed=True).of(matrix)


Places = Mapping[str, list[Place]]
"""Tensor name -> its places; it has several if the tensor joins leaves."""


def places_of(config: DecoderConfig, family: Family) -> Places:
    """Return the places of the tensors of a family."""
    shapes = decoder.leaf_shapes(config)
    places = {
        name: _join([leaf], (), shapes, family)
        for name, leaf in family.outer.items()
        if leaf in shapes
    }
    for i in range(config.num_layers):
        is_first = i < config.num_first
        group, row = ("first_blocks", i) if is_first else ("blocks", i - config.num_first)
        for name, leaves in family.block.items():
            paths = [f"{group}/{leaf}" for leaf in leaves]
            if paths[0] not in shapes:
                continue
            tensor = family.prefix.format(i=i) + name
            if "{e}" in name:
                for e in range(shapes[paths[0]][1]):
                    places[tensor.replace("{e}", str(e))] = _join(paths, (row, e), shapes, family)
            else:
                places[tensor] = _join(paths, (row,), shapes, family)
    covered = {place.leaf for tensor_places in places.values() for place in tensor_places}
    assert covered == set(shapes), sorted(set(shapes) - covered)
    return places


def tensor_shape(places: Iterable[Place]) -> Shape:
    """Return the shape of the tensor that has these places."""
    places = list(places)
    first = places[0]
    if not first.outputs:
        size = sum(math.prod(place.shape) for place in places)
        return (
            first.shape if not first.numbers or _is_packed(first.leaf, first.numbers) else (size,)
        )
    outputs = sum(place.outputs for place in places)
    inputs = math.prod(first.shape) // first.outputs
    return (outputs, inputs) if first.transposed else (inputs, outputs)


def check_tensors(folder: object, shapes: Mapping[str, Shape], places: Places) -> None:
    """Refuse files that have other tensors than the decoder.

    Raises:
      ValueError: if a tensor is missing, unexpected or of another shape.
    """
    problems = [f"{name}: missing" for name in places if name not in shapes]
    problems += [f"{name}: not part of the decoder" for name in shapes if name not in places]
    problems += [
        f"{name}: shape {shapes[name]}, must be {tensor_shape(tensor_places)}"
        for name, tensor_places in places.items()
        if name in shapes and shapes[name] != tensor_shape(tensor_places)
    ]
    if problems:
        raise value_error(f"the tensors in {folder} do not fit its config.json.", problems)


def is_ignored(name: str, config: DecoderConfig, family: Family) -> bool:
    """Return whether a tensor of a file is no weight of the decoder.

    It is a buffer, a copy of the tied embedding, or of a block after the last one, which predicts
    further tokens.
    """
    is_tied_copy = config.tied and family.outer.get(name) == "head"
    before, _, after = family.prefix.partition("{i}")
    block = (
        re.match(rf"{re.escape(before)}(\d+){re.escape(after)}", name)
        if family.has_predictors
        else None
    )
    if block is not None and int(block[1]) >= config.num_layers:
        return True
    return is_tied_copy or any(re.search(pattern, name) for pattern in family.ignored)


def _join(
    leaves: list[str],
    numbers: Shape,
    shapes: Mapping[str, Shape],
    family: Family,
) -> list[Place]:
    places = []
    start = 0
    for leaf in leaves:
        shape = shapes[leaf][len(numbers) :]
        is_product = leaf.rpartition("/")[2] in _PRODUCTS and not _is_packed(leaf, numbers)
        outputs = math.prod(shape[_num_inputs(leaf) :]) if is_product else 0
        places.append(Place(leaf, numbers, shape, start, outputs, family.transposed))
        start += outputs or math.prod(shape)
    return places


def _is_packed(leaf: str, numbers: Shape) -> bool:
    """Return whether a tensor has all experts of a block, in the dims of the leaf."""
    return "/experts/" in leaf and len(numbers) == 1


def _num_inputs(leaf: str) -> int:
    """Return how many dims of a block's weight are inputs of its product."""
    return 2 if leaf.endswith("/out") else 1
