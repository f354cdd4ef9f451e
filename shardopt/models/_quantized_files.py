"""Tensors of files in 4 or 8 bits, turned into floats as they are read: mxfp4 (GPT-OSS) and blocks
of fp8 (DeepSeek-V3).

Codes are stored in rows of inputs. Scales belong to groups of neighbouring codes of a row (mxfp4),
or to blocks of rows and columns (fp8). A part of a tensor is read in the rows that it touches.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from shardopt.core._errors import error_text
from shardopt.models._fields import Fields
from shardopt.models._tensor_files import Tensor

_GROUP = 32
"""Numbers of mxfp4 that share a scale."""

_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_PAIRS = np.stack(
    np.meshgrid(np.concatenate([_FP4, -_FP4]), np.concatenate([_FP4, -_FP4])), axis=-1
).reshape(256, 2)
"""The two numbers of each byte of mxfp4: the lower four bits come first."""

_MOST_NUMBERS = 2**24
"""Numbers that are floats at a time."""


class Quantized(NamedTuple):
    """A tensor as codes and scales.

    Attributes:
      codes: mxfp4: [..., outputs, groups, 16] bytes; fp8: [outputs, inputs].
      scales: mxfp4: [..., outputs, groups], exponents plus 127; fp8: one for each block.
      block: fp8: rows and columns of a block; mxfp4: None.
    """

    codes: Tensor
    scales: Tensor
    block: tuple[int, int] | None

    @property
    def path(self) -> Path:
        """The file of the codes."""
        return self.codes.path

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the numbers that are read, if nobody asks for another."""
        return np.dtype(jnp.bfloat16)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape with inputs last, in the order of the file."""
        if self.block:
            return self.codes.shape
        *dims, groups, num_bytes = self.codes.shape
        return (*dims, groups * num_bytes * 2)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor that the codes stand for: mxfp4 stores experts [inputs, outputs]
        in the other order.
        """
        *dims, outputs, inputs = self.stored_shape
        return (*dims, outputs, inputs) if self.block else (*dims, inputs, outputs)

    def view(self) -> np.ndarray:
        """Return an array of this shape with a byte for each number.

        Its bytes mean nothing: its addresses are places.
        """
        places = np.empty(self.stored_shape, np.uint8)  # memory that nobody touches
        return places if self.block else places.swapaxes(-1, -2)

    def read(self, view: np.ndarray, start: int) -> np.ndarray:
        """Return the numbers of a part, a view of `view()`.

        `start` is the address of its first byte.
        """
        numbers = np.empty(view.shape, np.float32 if self.block else self.dtype)
        self._read_into(numbers, view, start)
        return numbers

    def _read_into(self, numbers: np.ndarray, view: np.ndarray, start: int) -> None:
        width = self.stored_shape[-1]
        first = view.__array_interface__["data"][0] - start
        last = first + sum(
            (size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True)
        )
        begin, end = first // width, last // width + 1
        outer = int(
            np.argmax(
                [stride * (size > 1) for size, stride in zip(view.shape, view.strides, strict=True)]
            )
        )
        if (end - begin) * width > _MOST_NUMBERS and end - begin > 1 and view.shape[outer] > 1:
            middle = view.shape[outer] // 2
            for part in (slice(0, middle), slice(middle, None)):
                index = (*[slice(None)] * outer, part)
                self._read_into(numbers[index], view[index], start)
            return
        rows = (self._fp8_rows if self.block else self._mxfp4_rows)(begin, end).reshape(-1)[
            first - begin * width :
        ]
        strides = [stride * rows.itemsize for stride in view.strides]
        numbers[...] = np.lib.stride_tricks.as_strided(rows, view.shape, strides)

    def _mxfp4_rows(self, begin: int, end: int) -> np.ndarray:
        groups, num_bytes = self.codes.shape[-2:]
        codes = _read(
            self.codes, np.uint8, begin * groups * num_bytes, (end - begin, groups, num_bytes)
        )
        exponents = (
            _read(self.scales, np.uint8, begin * groups, (end - begin, groups)).astype(np.int32)
            - 127
        )
        numbers = np.ldexp(_PAIRS[codes], exponents[..., None, None])
        return numbers.astype(self.dtype)  # exact: a number has two bits and an exponent

    def _fp8_rows(self, begin: int, end: int) -> np.ndarray:
        assert self.block
        (num_rows, num_columns), width = self.block, self.codes.shape[1]
        codes = _read(self.codes, self.codes.dtype, begin * width, (end - begin, width)).astype(
            np.float32
        )
        first, last = begin // num_rows, (end - 1) // num_rows + 1
        columns = self.scales.shape[1]
        scales = _read(
            self.scales, self.scales.dtype, first * columns, (last - first, columns)
        ).astype(np.float32)
        row_blocks, column_blocks = (
            np.arange(begin, end) // num_rows - first,
            np.arange(width) // num_columns,
        )
        return codes * scales[row_blocks][:, column_blocks]


def _read(tensor: Tensor, dtype: Any, first: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return numbers that lie side by side in a file, from number `first` on."""
    numbers = np.empty(shape, dtype)
    offset, data = tensor.offset + first * numbers.itemsize, numbers.reshape(-1).view(np.uint8).data
    with tensor.path.open("rb", buffering=0) as file:
        done = 0
        while done < len(data):
            count = os.preadv(file.fileno(), [data[done:]], offset + done)
            if not count:
                raise OSError(error_text(f"{tensor.path} ended while it was read."))
            done += count
    return numbers


def _join_mxfp4(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors with one `Quantized` for each pair of "..._blocks" and "..._scales"."""
    joined: dict[str, Any] = dict(tensors)
    for name in tensors:
        plain, scales = name.removesuffix("_blocks"), name.removesuffix("_blocks") + "_scales"
        if plain != name and scales in tensors:
            quantized = Quantized(joined.pop(name), joined.pop(scales), None)
            *dims, _, num_bytes = quantized.codes.shape
            if (
                num_bytes * 2 != _GROUP
                or quantized.scales.shape != quantized.codes.shape[:-1]
                or not dims
            ):
                problem = (
                    f"{name} has shape {quantized.codes.shape}, and {scales}"
                    f" {quantized.scales.shape}."
                )
                raise ValueError(
                    error_text(problem, fix="groups of mxfp4 have 16 bytes and one scale.")
                )
            joined[plain] = quantized
    return joined


def _join_fp8(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors with one `Quantized` for each pair of a weight and its "..._scale_inv"."""
    joined: dict[str, Any] = dict(tensors)
    num_rows, num_columns = settings["weight_block_size"]
    for name in tensors:
        scales = f"{name}_scale_inv"
        if scales in tensors:
            quantized = Quantized(joined[name], joined.pop(scales), (num_rows, num_columns))
            shape = quantized.codes.shape
            expected = tuple(
                -(-size // block)
                for size, block in zip(shape, (num_rows, num_columns), strict=False)
            )
            if len(shape) != 2 or quantized.scales.shape != expected:
                problem = (
                    f"{name} has shape {shape}, and {scales} {quantized.scales.shape}, must be"
                    f" {expected}."
                )
                raise ValueError(
                    error_text(problem, fix="a scale belongs to each block of weight_block_size.")
                )
            joined[name] = quantized
    return joined


_FORMS = {"mxfp4": _join_mxfp4, "fp8": _join_fp8}
_REQUIRED = {"fmt": "e4m3", "activation_scheme": "dynamic"}
_WITHOUT_EFFECT = frozenset(
    ("modules_to_not_convert", "dequantize", "quant_method", "weight_block_size", "scale_fmt")
)


def read_quantization(fields: Fields) -> Mapping[str, Any]:
    """Return the "quantization_config" of a config.json.

    Note what cannot be read as a problem of the fields.
    """
    settings = fields["quantization_config"] or {}
    if not settings:
        return {}
    method = settings.get("quant_method")
    if method not in _FORMS:
        fields.problems.append(
            f"quantization_config.quant_method is {method!r}, must be"
            f" {' or '.join(map(repr, _FORMS))}"
        )
        return {}
    for name, value in settings.items():
        if name not in _WITHOUT_EFFECT and value is not None and value != _REQUIRED.get(name):
            must = f"must be {_REQUIRED[name]!r}" if name in _REQUIRED else "which is not known"
            fields.problems.append(f"quantization_config.{name} is {value!r}, {must}")
    block = settings.get("weight_block_size")
    if method == "fp8" and not (
        isinstance(block, list) and len(block) == 2 and all(isinstance(x, int) for x in block)
    ):
        fields.problems.append(
            f"quantization_config.weight_block_size is {block!r}, must be [rows, columns]"
        )
    return settings


def join_quantized(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of a folder, with codes and scales as one tensor each.

    Raises:
      ValueError: if codes and scales do not fit together.
    """
    return _FORMS[settings["quant_method"]](tensors, settings) if settings else dict(tensors)
