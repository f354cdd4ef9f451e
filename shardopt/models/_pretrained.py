"""Open weights as a decoder: read by each process for its own shards, and written by each process
for its own part.
"""

import dataclasses
import functools
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jax.typing import DTypeLike

from shardopt.checkpoint._memory import Bounds, bounds_of, local_bounds, shape_of
from shardopt.checkpoint._store import barrier
from shardopt.core import (
    PyTree,
    Rule,
    TrainState,
    calling,
    error_text,
    leaves_with_paths,
    plural,
    value_error,
    with_leaves,
)
from shardopt.core._block_model import BlockModel
from shardopt.core._block_remat import Remat
from shardopt.models import decoder
from shardopt.models._decoder_config import DecoderConfig
from shardopt.models._families import FAMILIES, UNFIT
from shardopt.models._fields import Fields, check_fields
from shardopt.models._places import (
    Place,
    Places,
    check_tensors,
    is_ignored,
    places_of,
    tensor_shape,
)
from shardopt.models._tensor_files import Part, Tensor, header_of, read_header
from shardopt.optimizers import Matrix
from shardopt.partition._plan import Shape
from shardopt.step._optimizer import ShardedOptimizer
from shardopt.training._loggers import show_progress

_CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_COPIED = (
    "tokenizer*",
    "*token*.json",
    "vocab.*",
    "merges.txt",
    "*.jinja",
    "generation_config.json",
)
_UNFINISHED = ".unfinished"


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A folder of open weights. Only its config.json and the headers of its files were read.

    Attributes:
      folder: the folder.
      config: the decoder that config.json describes.
      model: the decoder as a `BlockModel`.
      family: the model_type in `config.json`, or the family that the caller named.
      hf_config: the content of config.json.
      tensors: the tensors of the files, by name.
    """

    folder: Path
    config: DecoderConfig
    model: BlockModel
    family: str
    hf_config: Mapping[str, Any] = dataclasses.field(repr=False)
    tensors: Mapping[str, Tensor] = dataclasses.field(repr=False)
    param_dtype: DTypeLike | None = None

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules of a strategy, `decoder.rules(config)`."""
        return decoder.rules(self.config)

    @property
    def matrices(self) -> tuple[tuple[str, Matrix], ...]:
        """The leaves that are matrices, `decoder.matrices(config)`."""
        return decoder.matrices(self.config)

    @functools.cached_property
    def places(self) -> Places:
        """Tensor name -> where the tensor lies in the decoder."""
        return places_of(self.config, FAMILIES[self.family])

    @functools.cached_property
    def abstract_params(self) -> PyTree:
        """The parameters as `jax.ShapeDtypeStruct`.

        Without a `param_dtype` they have the dtypes of the files.
        """
        dtypes: dict[str, np.dtype] = {}
        for name, places in self.places.items():
            for place in places:
                dtype = (
                    self.tensors[name].dtype
                    if self.param_dtype is None
                    else np.dtype(self.param_dtype)
                )
                dtypes[place.leaf] = np.promote_types(dtypes.get(place.leaf, dtype), dtype)
        tree = jax.tree.structure(decoder.shapes_of(self.config), is_leaf=decoder.is_shape)
        shapes = decoder.leaf_shapes(self.config)
        leaves = [jax.ShapeDtypeStruct(shape, dtypes[leaf]) for leaf, shape in shapes.items()]
        return jax.tree.unflatten(tree, leaves)

    @calling("from_pretrained.load")
    def load(
        self, opt: ShardedOptimizer, rng: jax.Array | None = None, *, progress: bool = True
    ) -> TrainState:
        """Return the first train state of a strategy, with the weights of the folder.

        Args:
          opt: the strategy, made with `model`, and `rules` if its mesh has a tensor axis.
          rng: the random key of the steps, as in `opt.init`.
          progress: whether the first process shows a bar.

        Raises:
          OSError: if a file cannot be read.

        Each process reads the bytes of its own shards, one leaf at a time.
        """
        shardings = jax.tree.map(
            lambda spec, leaf: sharding_of_weight(opt, spec, leaf),
            opt.specs(self.abstract_params).params,
            self.abstract_params,
        )
        return opt.init(self.load_params(shardings, progress=progress), rng)

    @calling("from_pretrained.load_params")
    def load_params(self, shardings: PyTree = None, *, progress: bool = True) -> PyTree:
        """Return the parameters as arrays.

        Args:
          shardings: a tree of shardings; None puts all on the first device.
          progress: whether the first process shows a bar.

        Raises:
          OSError: if a file cannot be read.
        """
        if shardings is None:
            device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
            shardings = jax.tree.map(lambda _: device, self.abstract_params)
        sources = _by_leaf(self.places, self.tensors)
        paths_and_leaves = leaves_with_paths(self.abstract_params)
        num_bytes = 0
        arrays = []
        with show_progress(
            len(paths_and_leaves), shown=progress, work="reading weights"
        ) as display:
            for (path, leaf), sharding in zip(
                paths_and_leaves, jax.tree.leaves(shardings), strict=True
            ):
                arrays.append(_load_leaf(leaf, sharding, sources[path]))
                num_bytes += sum(shard.data.nbytes for shard in arrays[-1].addressable_shards)
                display.advance(len(arrays))
                display.report(len(arrays), {"GB": num_bytes / 1e9})
        return with_leaves(self.abstract_params, arrays)

    @calling("from_pretrained.save")
    def save(
        self,
        folder: str | os.PathLike[str],
        params: PyTree,
        *,
        dtype: DTypeLike | None = None,
        max_file_bytes: int = 5 * 10**9,
        progress: bool = True,
    ) -> Path:
        """Write parameters as a folder that transformers and `from_pretrained` read.

        Args:
          folder: a new or empty folder, which all processes can write to.
          params: the parameters, as `load` gave them to the strategy; all processes pass their
            shards.
          dtype: the dtype in the files; None keeps the dtypes of the parameters.
          max_file_bytes: the most bytes of a file with more than one tensor.
          progress: whether the first process shows a bar.

        Returns:
          The folder.

        Raises:
          FileExistsError: if the folder has weights already.
          ValueError: if the parameters have other leaves or shapes than the model.

        Each process writes its own shards into files with unfinished names. When all have written,
        the first process renames the files, and writes the index last. transformers reads no folder
        without the index, or without the only file.
        """
        leaves = dict(leaves_with_paths(params))
        shapes = {path: tuple(leaf.shape) for path, leaf in leaves.items()}
        expected = decoder.leaf_shapes(self.config)
        problems = [
            f"{path}: {shapes.get(path)}, must be {expected.get(path)}"
            for path in sorted(shapes.keys() | expected.keys())
            if shapes.get(path) != expected.get(path)
        ]
        if problems:
            raise value_error("the parameters are not those of the model.", problems)
        hf_config = dict(self.hf_config)
        if dtype is not None:
            hf_config.pop("torch_dtype", None)
            hf_config["dtype"] = np.dtype(dtype).name
        return write_weights(
            folder,
            params,
            self.places,
            hf_config,
            source=self.folder,
            dtype=dtype,
            max_file_bytes=max_file_bytes,
            progress=progress,
        )


def sharding_of_weight(
    opt: ShardedOptimizer, spec: PartitionSpec, leaf: jax.ShapeDtypeStruct
) -> NamedSharding:
    """Return how a strategy shards a weight, without the dim of replicas that its spec may have in
    front.
    """
    return NamedSharding(opt.mesh, PartitionSpec(*spec[-leaf.ndim :]))


def write_weights(
    folder: str | os.PathLike[str],
    params: PyTree,
    places: Places,
    hf_config: Mapping[str, Any],
    *,
    source: Path | None = None,
    dtype: DTypeLike | None = None,
    max_file_bytes: int = 5 * 10**9,
    progress: bool = False,
) -> Path:
    """Write parameters of the decoder as a folder, as `Pretrained.save` does.

    Args:
      folder: a new or empty folder.
      params: the parameters of the decoder.
      places: tensor name -> places of the tensor.
      hf_config: the content of config.json.
      source: the folder whose tokenizer is copied.
      dtype: the dtype in the files.
      max_file_bytes: the most bytes of a file with more than one tensor.
      progress: whether the first process shows a bar.

    Raises:
      FileExistsError: if the folder has weights already.
    """
    leaves = dict(leaves_with_paths(params))
    target = Path(folder)
    if (target / _INDEX).exists() or (target / _WEIGHTS).exists():
        raise FileExistsError(
            error_text(f"{target} has weights already.", fix="choose a new folder.")
        )
    plan = _plan_files(target, places, leaves, dtype, max_file_bytes)
    is_first = jax.process_index() == 0
    if is_first:
        target.mkdir(parents=True, exist_ok=True)
        for file in plan.values():
            file.create()
    _wait_for_all(f"{target}.created")
    by_leaf = _by_leaf(
        places, {name: tensor for file in plan.values() for name, tensor in file.tensors.items()}
    )
    with show_progress(len(leaves), shown=progress, work="writing weights") as display:
        for done, (path, leaf) in enumerate(leaves.items(), 1):
            _save_leaf(leaf, by_leaf[path])
            display.advance(done)
    for file in plan.values():
        file.sync()
    _wait_for_all(f"{target}.written")
    if is_first:
        _commit(source, target, plan, hf_config)
    _wait_for_all(f"{target}.committed")
    return target


@calling("from_pretrained")
def from_pretrained(
    folder: str | os.PathLike[str],
    *,
    family: str | None = None,
    param_dtype: DTypeLike | None = None,
    dtype: DTypeLike | None = None,
    remat: Remat = None,
    loss_chunk: int | None = None,
) -> Pretrained:
    """Read the config.json and the headers of a folder of open weights.

    No code of the folder is run.

    Args:
      folder: a folder of Hugging Face, with `config.json` and safetensors.
      family: the family whose mathematics the model has, if its model_type is another; by default
        its model_type.
      param_dtype: the dtype of the parameters; None keeps the dtypes of the files.
      dtype: dtype of activations and products, as in `decoder.DecoderConfig`.
      remat: the values that the backward pass recomputes, as in `BlockModel`.
      loss_chunk: positions whose logits are held at a time, as in `decoder.DecoderConfig`.

    Returns:
      A `Pretrained` with `model`, `config`, `rules`, `load` and `save`.

    Raises:
      FileNotFoundError: if a file is missing.
      ValueError: if config.json has a field that the decoder does not know, or asks for something
        that the decoder cannot do; if a tensor is missing, unexpected or of another shape. The
        message names all of them.

    Example:
      >>> import jax, optax, tempfile, shardopt as so
      >>> from shardopt import models
      >>> from shardopt.models import gpt
      >>> config = gpt.config(dim=32, num_layers=2)
      >>> folder = models.export_safetensors(tempfile.mkdtemp(), gpt.init(config, jax.random.key(0)), config)
      >>> llama = models.from_pretrained(folder)
      >>> opt = so.fsdp(optax.adamw(1e-5), so.make_mesh(data=len(jax.devices())), llama.model, rules=llama.rules)
      >>> state = llama.load(opt, progress=False)
      >>> state.params["blocks"]["attention"]["q"].shape
      (2, 32, 4, 8)

    An unknown model_type is refused, although a known family may have the same fields and
    tensors: the order of rotary pairs, for example, is in the code of a model alone. Name the
    `family` if you know that the mathematics is the same.
    """
    folder = Path(folder)
    hf_config = _read_object(folder / _CONFIG)
    name = hf_config.get("model_type") if family is None else family
    if name not in FAMILIES:
        problem = f"{folder} has model_type {name!r}, which is none of {', '.join(FAMILIES)}."
        fix = "pass family=... if the mathematics of the model is that of a known family."
        if name in UNFIT:
            problem = (
                f"{folder} has model_type {name!r}, which the decoder cannot be: {UNFIT[name]}."
            )
            fix = "take a model of a family that docs/howto/open_weights.md lists."
        raise value_error(problem, fix=fix)
    fields = Fields(hf_config, FAMILIES[name].defaults)
    if family is None:
        fields.require(
            "architectures",
            None,
            *([architecture] for architecture in FAMILIES[name].architectures),
        )
    config_fields = FAMILIES[name].read(fields)
    check_fields(folder, fields)
    config = DecoderConfig(**config_fields)
    tensors: dict[str, Tensor] = {}
    for path in _weight_files(folder):
        tensors |= read_header(path)
    tensors = {
        tensor: entry
        for tensor, entry in tensors.items()
        if not is_ignored(tensor, config, FAMILIES[name])
    }
    places = places_of(config, FAMILIES[name])
    if not any(tensor.startswith(FAMILIES[name].optional) for tensor in tensors):
        tensors = {FAMILIES[name].optional + tensor: entry for tensor, entry in tensors.items()}
    check_tensors(folder, {tensor: entry.shape for tensor, entry in tensors.items()}, places)
    # other numbers than floats are refused here
    dtypes = {tensor: tensors[tensor].dtype for tensor in places}
    stored = dtypes[next(iter(places))] if param_dtype is None else param_dtype
    config = dataclasses.replace(config, param_dtype=stored, dtype=dtype, loss_chunk=loss_chunk)
    return Pretrained(
        folder, config, decoder.model(config, remat=remat), name, hf_config, tensors, param_dtype
    )


def _read_object(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file."""
    if not path.exists():
        fix = "give a folder of Hugging Face, with config.json and safetensors."
        raise FileNotFoundError(error_text(f"{path.parent} has no {path.name}.", fix=fix))
    try:
        content = json.loads(path.read_text())
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise value_error(f"{path} holds no JSON object.", fix="download the file again.")
    return content


def _weight_files(folder: Path) -> list[Path]:
    names = [_WEIGHTS]
    if (folder / _INDEX).exists():
        names = sorted(set((_read_object(folder / _INDEX).get("weight_map") or {}).values()))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise value_error(f"{folder / _INDEX} names files outside of the folder.", outside)
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        fix = "download the folder again, with its safetensors."
        raise FileNotFoundError(
            error_text(f"{folder} lacks {plural(len(missing), 'file')} of weights.", missing, fix)
        )
    return [folder / name for name in names]


def _load_leaf(
    leaf: jax.ShapeDtypeStruct, sharding: Sharding, sources: list[tuple[Tensor, Place]]
) -> jax.Array:
    """Return a leaf whose shards on this process were read from the files."""
    shards = {
        bounds: np.empty(shape_of(bounds), leaf.dtype)
        for bounds in local_bounds(leaf.update(sharding=sharding))
    }
    for tensor, place in sources:
        for part, numbers in _parts(tensor, place, shards.items()):
            numbers[...] = part.read()
    return jax.make_array_from_callback(
        leaf.shape, sharding, lambda index: shards[bounds_of(index, leaf.shape)]
    )


def _save_leaf(leaf: Any, targets: list[tuple[Tensor, Place]]) -> None:
    """Write the shards of a leaf that no other process writes."""
    if isinstance(leaf, jax.Array):
        shards = [
            (shard.index, shard.data) for shard in leaf.addressable_shards if shard.replica_id == 0
        ]
    else:
        shards = [((slice(None),) * leaf.ndim, leaf)] if jax.process_index() == 0 else []
    for index, data in shards:
        bounds = bounds_of(index, leaf.shape)
        numbers = np.asarray(data)
        for tensor, place in targets:
            for part, part_numbers in _parts(tensor, place, [(bounds, numbers)]):
                part.write(part_numbers)


def _parts(
    tensor: Tensor, place: Place, shards: Iterable[tuple[Bounds, np.ndarray]]
) -> Iterator[tuple[Part, np.ndarray]]:
    """Yield the part of a tensor that each shard has, and where its numbers lie in the shard. A
    shard may have other blocks, and no part.
    """
    view = tensor.view()
    start = view.__array_interface__["data"][0]
    depth = len(place.numbers)
    for bounds, shard in shards:
        numbers = [i - first for i, (first, _) in zip(place.numbers, bounds, strict=False)]
        if all(0 <= i < size for i, size in zip(numbers, shard.shape, strict=False)):
            inner = tuple(slice(first, stop) for first, stop in bounds[depth:])
            yield Part(tensor, place.of(view)[inner], start), shard[tuple(numbers)]


def _by_leaf(
    places: Places, tensors: Mapping[str, Tensor]
) -> dict[str, list[tuple[Tensor, Place]]]:
    """Return leaf -> the tensors that it lies in, each with its place."""
    by_leaf: dict[str, list[tuple[Tensor, Place]]] = {}
    for name, tensor_places in places.items():
        for place in tensor_places:
            by_leaf.setdefault(place.leaf, []).append((tensors[name], place))
    return by_leaf


@dataclasses.dataclass(frozen=True)
class _File:
    """A file that is being written.

    Attributes:
      path: its unfinished name.
      header: its first bytes.
      num_bytes: its size.
      tensors: its tensors by name.
    """

    path: Path
    header: bytes
    num_bytes: int
    tensors: Mapping[str, Tensor]

    def create(self) -> None:
        with self.path.open("wb") as file:
            file.write(self.header)
            file.truncate(self.num_bytes)

    def sync(self) -> None:
        with self.path.open("rb") as file:
            os.fsync(file.fileno())


def _plan_files(
    folder: Path,
    places: Places,
    leaves: Mapping[str, Any],
    dtype: DTypeLike | None,
    max_file_bytes: int,
) -> dict[str, _File]:
    """Return name -> file, each with the tensors that fit into `max_file_bytes`."""
    groups: list[dict[str, tuple[np.dtype, Shape]]] = [{}]
    num_bytes = 0
    for name, tensor_places in places.items():
        stored = (
            np.dtype(dtype)
            if dtype is not None
            else np.result_type(*(leaves[p.leaf].dtype for p in tensor_places))
        )
        shape = tensor_shape(tensor_places)
        size = math.prod(shape) * stored.itemsize
        if groups[-1] and num_bytes + size > max_file_bytes:
            groups.append({})
            num_bytes = 0
        groups[-1][name] = stored, shape
        num_bytes += size
    files = {}
    for i, group in enumerate(groups, 1):
        name = f"model-{i:05}-of-{len(groups):05}.safetensors" if len(groups) > 1 else _WEIGHTS
        header, offsets, size = header_of(group)
        path = folder / (name + _UNFINISHED)
        tensors = {tensor: Tensor.of(path, *group[tensor], offsets[tensor]) for tensor in group}
        files[name] = _File(path, header, size, tensors)
    return files


def _commit(
    source: Path | None, folder: Path, plan: Mapping[str, _File], hf_config: Mapping[str, Any]
) -> None:
    """Write config.json, and give the files their names.

    The only file comes last, or else the index.
    """
    _write(folder / _CONFIG, hf_config)
    for path in [path for pattern in _COPIED for path in source.glob(pattern)] if source else []:
        if path.is_file() and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)
    for name, file in plan.items():
        file.path.rename(folder / name)
    if len(plan) > 1:
        weight_map = {tensor: name for name, file in plan.items() for tensor in file.tensors}
        num_bytes = sum(file.num_bytes - len(file.header) for file in plan.values())
        _write(folder / _INDEX, {"metadata": {"total_size": num_bytes}, "weight_map": weight_map})


def _write(path: Path, content: Mapping[str, Any]) -> None:
    unfinished = path.with_name(path.name + _UNFINISHED)
    with unfinished.open("w") as file:
        file.write(json.dumps(content, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)


def _wait_for_all(name: str) -> None:
    if jax.process_count() > 1:
        barrier(name)
