"""`lora`: train a small product of two matrices on top of frozen weights."""

import dataclasses
import os
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from shardopt.adapters._files import (
    CONFIG,
    check_settings,
    factors_of,
    read_adapters,
    read_settings,
    save_adapters,
    with_factors,
)
from shardopt.adapters._peft import check_peft_config, modules_of, peft_config
from shardopt.adapters._quantized_weight import Base, QuantizedWeight, quantize
from shardopt.checkpoint._hashed import compile_patterns
from shardopt.core import (
    PyTree,
    Rule,
    Rules,
    TrainState,
    calling,
    check_choice,
    check_count,
    check_number,
    is_floating,
    leaves_with_paths,
    plural,
    type_error,
    value_error,
)
from shardopt.core._block_model import BLOCKS, BlockModel, LossFn, as_block_model, takes_rng
from shardopt.models._pretrained import Pretrained, sharding_of_weight
from shardopt.nn._low_rank import FACTORS, LowRank, low_rank_shapes
from shardopt.optimizers import Matrix
from shardopt.optimizers._matrices import Matrices, check_matrices
from shardopt.partition._rules import CompiledRule, check_rules, first_spec, patterns_of
from shardopt.runtime._processes import gather_to_host
from shardopt.step._optimizer import ShardedOptimizer


@dataclasses.dataclass(frozen=True)
class Lora:
    """A model with adapters. `lora` makes it; the attributes are arguments of a strategy.

    Attributes:
      model: the `BlockModel` or loss function of parameters with adapters.
      targets: regexes of the weights that have adapters.
      rank: the rank of A B.
      alpha: the factor of A B is alpha / rank.
      dropout: the probability with which a component of the input of A is 0 in training.
      base: the form of frozen weights that have adapters.
      matrices: (regex, `Matrix` or None) for weights with more than two dims.
      base_rules: the rules of the model without adapters.
    """

    model: LossFn
    targets: tuple[re.Pattern[str], ...]
    rank: int
    alpha: float
    dropout: float
    base: Base
    matrices: Sequence[tuple[re.Pattern[str], Matrix | None]]
    base_rules: Sequence[CompiledRule]

    @property
    def frozen(self) -> tuple[str, ...]:
        """Regexes of the leaves that are not trained, all but A and B: for `hash_only` of
        `so.Checkpoints`.
        """
        return (rf"^(?!(?:.*/)?(?:{'|'.join(FACTORS)})$)",)

    @property
    def rules(self) -> Rules:
        """Rules for `rules=` of a strategy: all leaves but A and B are frozen. Base weights are
        split as without adapters, A as the input of its weight, B as its output.
        """
        expert_patterns = patterns_of(self.base_rules, "experts")
        experts: list[Rule] = [(pattern, "experts") for pattern in expert_patterns]
        frozen: list[Rule] = [(pattern, "frozen") for pattern in self.frozen]
        divisible: list[Rule] = (
            [("", "if_divisible")] if patterns_of(self.base_rules, "if_divisible") else []
        )
        return [self._spec_of_leaf, *experts, *frozen, *divisible]

    @calling("lora")
    def init(self, params: PyTree, rng: jax.Array, *, dtype: DTypeLike = jnp.float32) -> PyTree:
        """Return parameters with adapters.

        A is random and B is 0, so the model computes the same as before.

        It can run under `jax.jit` and `jax.eval_shape`.

        Args:
          params: the parameters of the model. No leaf is copied, but targets are quantised if
            `base` says so.
          rng: a random key. A depends on it and on the key path of its weight alone.
          dtype: the dtype of A and B.

        Returns:
          The same tree, with a `LowRank` in the place of each target. Its leaves end in "/base",
          "/lora_a" and "/lora_b".

        Raises:
          ValueError: if a target matches no weight, or a weight that is not floating or has no
            `Matrix`. If a rule matches no leaf. If base is "nf4" and the last dim of a weight is
            odd.
        """
        paths_and_leaves = leaves_with_paths(params)
        matrix_of_path = self._check_targets(paths_and_leaves)

        def adapted(path: str, leaf: Any) -> Any:
            if path not in matrix_of_path:
                return leaf
            matrix = _counted_from_the_end(matrix_of_path[path], leaf.ndim)
            a_shape, b_shape = low_rank_shapes(leaf.shape, matrix, self.rank)
            # as torch's kaiming_uniform_(a=sqrt(5)), which peft uses
            bound = matrix.shape_in(leaf.shape)[-2] ** -0.5
            key = jax.random.fold_in(rng, zlib.crc32(path.encode()))
            lora_a = jax.random.uniform(key, a_shape, dtype, -bound, bound)
            return LowRank(
                quantize(leaf, self.base),
                lora_a,
                jnp.zeros(b_shape, dtype),
                matrix=matrix,
                scale=self.alpha / self.rank,
                dropout=self.dropout,
            )

        return jax.tree.structure(params).unflatten(
            [adapted(path, leaf) for path, leaf in paths_and_leaves]
        )

    @calling("lora.start")
    def start(
        self, model: Pretrained, opt: ShardedOptimizer, rng: jax.Array, *, progress: bool = True
    ) -> TrainState:
        """Return the first train state of a strategy: the weights of an open model, with new
        adapters.

        Args:
          model: the open model; `lora` got its `model` and `rules`.
          opt: the strategy, made with `model` and `rules` of this object.
          rng: a random key, of A and of the steps.
          progress: whether the first process shows a bar.

        Raises:
          OSError: if a file cannot be read.

        Each process reads the bytes of its own shards. With `base` in 8 or 4 bits the shards are
        quantised on the devices.
        """
        adapter_key, step_key = jax.random.split(rng)
        specs = opt.specs(jax.eval_shape(self.init, model.abstract_params, adapter_key)).params

        def sharding_of_base(spec: Any, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
            spec = spec.base if _is_low_rank(spec) else spec
            spec = spec.codes if isinstance(spec, QuantizedWeight) else spec
            return sharding_of_weight(opt, spec, leaf)

        shardings = jax.tree.map(
            sharding_of_base, specs, model.abstract_params, is_leaf=_is_low_rank
        )
        weights = model.load_params(shardings, progress=progress)
        return opt.init(jax.jit(self.init)(weights, adapter_key), step_key)

    def merge(self, params: PyTree) -> PyTree:
        """Return parameters without adapters: each weight is W + alpha / rank A B, in the dtype of
        W.

        Sharded parameters stay sharded: run it under `jax.jit`.
        """
        return _merged_view(params, None)

    def without_adapters(self, params: PyTree) -> PyTree:
        """Return the parameters of the base model, as floats.

        For DPO this is the reference model.
        """
        return _map_nodes(lambda node: _with_float_base(node).base, params)

    @calling("lora.save")
    def save(
        self, folder: str | os.PathLike[str], params: PyTree, *, model: Pretrained | None = None
    ) -> None:
        """Write A and B, the settings, and a hash of the base.

        On several processes all call it, and the first one writes.

        Args:
          folder: it is created if it does not exist. An interrupted save leaves nothing that `load`
            accepts.
          params: parameters with adapters, on one device or sharded.
          model: the open model that has the adapters. The files then have the form of peft, which
            loads them. None: tensors have the key paths of A and B.

        Raises:
          ModuleNotFoundError: if safetensors is not installed.
          ValueError: if peft has no form for a weight, such as the weight of an expert.

        A tensor that joins queries, keys and values has one A and one B in peft, and an A and a B
        for each here. If the A are not equal, the module has the sum of their ranks in the files.
        """
        factors = {
            path: np.ascontiguousarray(gather_to_host(leaf))
            for path, leaf in factors_of(params).items()
        }
        if model is None:
            return save_adapters(Path(folder), factors, self._settings(), params)
        modules = modules_of(model, _weights_of(factors))
        tensors = {
            name: tensor for module in modules for name, tensor in module.in_file(factors).items()
        }
        settings = peft_config(self.rank, self.alpha, self.dropout, tensors, modules, model)
        return save_adapters(Path(folder), tensors, settings, params)

    @calling("lora.load")
    def load(
        self, folder: str | os.PathLike[str], params: PyTree, *, model: Pretrained | None = None
    ) -> PyTree:
        """Return parameters with A and B of a folder, placed as A and B of `params`.

        Args:
          folder: a folder that `save` or peft wrote, on any mesh.
          params: parameters with adapters, as `init` returns them, or as a state holds them.
          model: the open model that has the adapters, for files of peft.

        Raises:
          ModuleNotFoundError: if safetensors is not installed.
          FileNotFoundError: if the folder holds no adapters.
          ValueError: if the adapters were trained with other settings, on another base or on other
            weights. Files that peft wrote have no hash of their base.

        Each of the weights that a tensor joins gets a copy of peft's A. In training the copies
        change apart.
        """
        folder = Path(folder)
        config = read_settings(folder)
        factors = factors_of(params)
        if model is None:
            check_settings(config, self._settings())
            return with_factors(
                params,
                read_adapters(folder, {path: x.shape for path, x in factors.items()}, params),
            )
        modules = modules_of(model, _weights_of(factors))
        buffers = {path: np.zeros(leaf.shape, leaf.dtype) for path, leaf in factors.items()}
        shapes = check_peft_config(folder / CONFIG, config, self.rank, self.alpha, modules, buffers)
        tensors = read_adapters(folder, shapes, params)
        problems = [module.name for module in modules if not module.write_into(buffers, tensors)]
        if problems:
            problem = (
                f"B of {plural(len(problems), 'module')} in {folder} changes more than the weights"
                " that have adapters here."
            )
            fix = (
                "name all weights that the modules join in targets; with an A for each, B must be"
                " block-diagonal."
            )
            raise value_error(problem, problems, fix)
        return with_factors(params, buffers)

    def _settings(self) -> dict[str, object]:
        return {"rank": self.rank, "alpha": self.alpha, "base": self.base}

    def _check_targets(self, paths_and_leaves: list[tuple[str, Any]]) -> dict[str, Matrix]:
        matrix_of_path = {}
        problems = []
        for path, leaf in paths_and_leaves:
            if any(target.search(path) for target in self.targets):
                default = Matrix() if leaf.ndim == 2 + self._is_stacked(path) else None
                matrix = self._matrix_of(path, default)
                problem = self._problem_of(leaf, matrix)
                if problem:
                    problems.append(f"{path}: {problem}")
                elif matrix is not None:
                    matrix_of_path[path] = matrix
        paths = [path for path, _ in paths_and_leaves]
        known = ", ".join(paths[:8]) + (", ..." if len(paths) > 8 else "")
        patterns = [("target", target) for target in self.targets]
        patterns += [("rule", rule[0]) for rule in self.base_rules if not callable(rule)]
        problems += [
            f"{name} {pattern.pattern!r} matches no parameter, such as: {known}"
            for name, pattern in patterns
            if not any(map(pattern.search, paths))
        ]
        if problems:
            fix = (
                "match weights with targets, leave vectors out, and describe other weights with"
                " matrices=."
            )
            problem = f"{plural(len(problems), 'problem')} with the targets."
            raise value_error(problem, problems, fix)
        return matrix_of_path

    def _problem_of(self, leaf: Any, matrix: Matrix | None) -> str:
        """Return why a target cannot have an adapter, or ""."""
        if not is_floating(leaf):
            return f"dtype {leaf.dtype} is not floating"
        if matrix is None:
            return f"shape {leaf.shape} has no Matrix that says which dims are rows"
        if self.base == "nf4" and leaf.shape[-1] % 2:
            return f"shape {leaf.shape}, base='nf4' stores pairs along the last dim, which is odd"
        return ""

    def _spec_of_leaf(self, path: str, shape: tuple[int, ...]) -> PartitionSpec | None:
        """Return the spec of a leaf of one block; see `Rules`."""
        weight_path, leaf_name = _split_path(path)
        spec = first_spec(self.base_rules, weight_path, shape)
        if spec is None or leaf_name in ("", "base", "base/codes"):
            return spec
        if leaf_name == "base/scales":  # the groups of the last dim need not divide over tensor
            return PartitionSpec(*tuple(spec)[: len(shape) - 1])
        matrix = self._matrix_of(weight_path, None) or Matrix()
        num_rows, num_columns = (1 if isinstance(dims, int) else len(dims) for dims in matrix)
        ndim = len(shape) - 1 + (num_columns if leaf_name == "lora_a" else num_rows)
        matrix = _counted_from_the_end(matrix, ndim + self._is_stacked(weight_path))
        entries = (*spec, *[None] * (ndim - len(spec)))
        counting, rows, columns = ([entries[dim] for dim in dims] for dims in matrix.order(ndim))
        return (
            PartitionSpec(*counting, *rows, None)
            if leaf_name == "lora_a"
            else PartitionSpec(*counting, None, *columns)
        )

    def _matrix_of(self, path: str, default: Matrix | None) -> Matrix | None:
        """Return the `Matrix` that the first matching rule gives a weight, or the default."""
        return next((matrix for pattern, matrix in self.matrices if pattern.search(path)), default)

    def _is_stacked(self, path: str) -> bool:
        return as_block_model(self.model) is not None and path.startswith(f"{BLOCKS}/")


@calling("lora")
def lora(
    model: LossFn,
    *,
    rank: int,
    targets: Sequence[str | re.Pattern[str]],
    alpha: float | None = None,
    dropout: float = 0.0,
    base: Base = "float",
    matrices: Matrices = None,
    rules: Sequence[Rule] = (),
    low_rank_products: bool = False,
) -> Lora:
    """Add adapters to a model: each target W becomes W + alpha / rank A B, and only A and B are
    trained.

    Args:
      model: a `BlockModel`, or a loss function `(params, batch) -> loss` of any pytree.
      rank: the number of columns of A and of rows of B.
      targets: regexes that are searched in the key paths of the parameters. Each leaf that matches
        has an adapter.
      alpha: the factor of A B is alpha / rank; None is `rank`, so that the factor is 1.
      dropout: the probability with which a component of the input of A is 0 in training. It needs
        `low_rank_products`, and targets in blocks that are not experts.
      base: how targets are stored and gathered. "float" leaves them as they are. "int8" and "nf4"
        take 8 and 4 bits for each number and 32 bits for each scale. They are turned into floats
        where a block uses them.
      matrices: `[(regex, so.optimizers.Matrix), ...]` for targets with more dims than a matrix,
        such as `gpt.matrices`.
      rules: the rules of the model without adapters, such as `gpt.rules`.
      low_rank_products: whether the model multiplies its stacked targets by
        `so.nn.quantized_einsum` alone, as the models of `shardopt.models` do. A step then computes
        x W + alpha / rank (x A) B, and never the gradient of W. Otherwise it computes W + alpha /
        rank A B first, for each block, which is exact for every model.

    Returns:
      A `Lora`.

    Raises:
      TypeError: if rank is not an integer, or rules are not a list.
      ValueError: if a number is out of range, a regex does not compile, or `base` is unknown.
        From a step, if dropout is asked for a weight that is merged: without `low_rank_products`
        or blocks, in the embedding, and in experts.

    Example:
      >>> import jax, jax.numpy as jnp, optax, shardopt as so
      >>> from shardopt.adapters import lora
      >>> loss_fn = lambda params, batch: jnp.mean((batch["x"] @ params["up"] @ params["down"] - batch["y"]) ** 2)
      >>> adapted = lora(loss_fn, rank=2, targets=["up", "down"])
      >>> params = adapted.init({"up": jnp.ones((4, 8)), "down": jnp.ones((8, 1))}, jax.random.key(0))
      >>> mesh = so.make_mesh(data=1, devices=jax.devices()[:1])
      >>> opt = so.fsdp(optax.adam(1e-2), mesh, adapted.model, rules=adapted.rules)
      >>> state, metrics = opt.step(opt.init(params), {"x": jnp.ones((2, 4)), "y": jnp.ones((2, 1))})
      >>> adapted.merge(state.params)["up"].shape
      (4, 8)

    **Equivalence**: the step equals training A and B on one device with the same `base`, for every
    strategy and mesh, up to summation order. With dropout, each device draws its own mask from the
    random key of the step.

    **Placement**: A is sharded over tensor as the input of its weight, and B as its output. Over
    data all leaves are placed as other leaves. Frozen leaves have no gradient and no optimizer
    state.

    **Communication**: frozen weights are gathered block by block, in the bytes of `base`. Only
    gradients of A and B are reduced.

    References:
      Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021. Dettmers, Pagnoni,
      Holtzman and Zettlemoyer, "QLoRA: Efficient Finetuning of Quantized LLMs", 2023 (nf4 in blocks
      of 64; scales are not quantised here).
    """
    check_count("rank", rank)
    alpha = float(rank) if alpha is None else alpha
    check_number("alpha", alpha, positive=True)
    check_number("dropout", dropout, below=1)
    check_choice("base", base, get_args(Base), "choose 'float', 'int8' or 'nf4'.")
    if not targets:
        raise value_error("targets must name weights, got none.")
    if callable(rules) or any(map(callable, rules)):
        raise type_error("rules must be [(regex, PartitionSpec), ...], got a function.")
    adapted = Lora(
        model,
        compile_patterns("targets", targets, "name weights by their key paths."),
        rank,
        alpha,
        dropout,
        base,
        check_matrices(matrices) or (),
        check_rules(rules),
    )
    return dataclasses.replace(
        adapted, model=_adapted_model(model, adapted.targets, base, low_rank_products)
    )


def _adapted_model(
    model: LossFn, targets: tuple[re.Pattern[str], ...], base: Base, low_rank_products: bool
) -> LossFn:
    block_model = as_block_model(model)
    if block_model is None:
        return _on_view(cast(Callable[..., Any], model), _merged_view)
    block_view = _low_rank_view if low_rank_products else _merged_view

    def is_target(path):
        return any(target.search(path) for target in targets)

    rounded = {
        name: rounding
        for name, rounding in block_model.rounded.items()
        if not is_target(f"blocks/{name}")
    }
    if low_rank_products and base == "float":  # a merged weight is rounded after it was merged
        rounded |= {
            f"{name}/base": block_model.rounded[name]
            for name in block_model.rounded
            if name not in rounded
        }
    return BlockModel(
        embed=_on_view(block_model.embed, _merged_view),
        block=_on_view(block_model.block, block_view),
        loss=_on_view(block_model.loss, _merged_view),
        remat=block_model.remat,
        tables=tuple(table for table in block_model.tables if not is_target(table)),
        rounded=rounded,
        check_batch=block_model.check_batch,
    )


def _on_view(function: Callable[..., Any], view: Callable[..., PyTree]) -> Callable[..., Any]:
    """Return the function of parameters with adapters.

    It calls `function` with `view(params, rng)`. A view needs the key for dropout.
    """

    def call_with_key(params: PyTree, *args: PyTree, rng: jax.Array | None = None) -> Any:
        keys = {"rng": rng} if takes_rng(function) and rng is not None else {}
        return function(view(params, rng), *args, **keys)

    return call_with_key


def _merged_view(params: PyTree, rng: jax.Array | None) -> PyTree:
    def merge(node: LowRank) -> jax.Array:
        return dataclasses.replace(_with_float_base(node), key=rng).merged()

    return _map_nodes(merge, params)


def _low_rank_view(params: PyTree, rng: jax.Array | None) -> PyTree:
    """Return parameters whose targets are `LowRank` with a base of floats, and with a key of their
    own for dropout.
    """
    nodes = [leaf for leaf in jax.tree.leaves(params, is_leaf=_is_low_rank) if _is_low_rank(leaf)]
    if rng is None or not any(node.dropout for node in nodes):
        return _map_nodes(_with_float_base, params)
    keys = iter(jax.random.split(jax.random.fold_in(rng, _SALT), len(nodes)))
    return _map_nodes(
        lambda node: dataclasses.replace(_with_float_base(node), key=next(keys)), params
    )


_SALT = zlib.crc32(b"lora")


def _is_low_rank(leaf: object) -> bool:
    return isinstance(leaf, LowRank)


def _map_nodes(function: Callable[[LowRank], Any], params: PyTree) -> PyTree:
    return jax.tree.map(
        lambda leaf: function(leaf) if _is_low_rank(leaf) else leaf, params, is_leaf=_is_low_rank
    )


def _with_float_base(node: LowRank) -> LowRank:
    if not isinstance(node.base, QuantizedWeight):
        return node
    return dataclasses.replace(node, base=node.base.dequantized())


def _split_path(path: str) -> tuple[str, str]:
    """Return the key path of a weight, and the rest of the path: "", "base", "base/codes", "lora_a"
    or another.
    """
    match = re.fullmatch(r"(?:(.*?)/)?(base|base/codes|base/scales|lora_a|lora_b)", path)
    return (match[1] or "", match[2]) if match else (path, "")


def _weights_of(factors: Iterable[str]) -> set[str]:
    """Return the key paths of the weights that have these A and B."""
    return {path.rpartition("/")[0] for path in factors}


def _counted_from_the_end(matrix: Matrix, ndim: int) -> Matrix:
    """Return the same matrices with negative dims."""
    _, rows, columns = matrix.order(ndim)
    return Matrix(tuple(dim - ndim for dim in rows), tuple(dim - ndim for dim in columns))
