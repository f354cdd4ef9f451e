"""MaxText as a contestant: its own model, optimizer and train step, given the task's parameters and
batches.

Run by the Python of another environment, in which MaxText is installed: python -m benchmarks.peers
--maxtext /path/to/python. Or the step is exported there, and run by a Python with jax alone
(`peers.exported`).

Its decoder block "qwen2" without biases is the GPT of the others: rotary positions by halves, RMS
norms, SwiGLU, and queries scaled by a factor, which "llama2" would fold into its parameters, so
that Adam learns at another rate.
"""

import contextlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..task import B1, B2, EPS, LEARNING_RATE, WEIGHT_DECAY, Config, Task

# it is not installed where benchmarks.peers counts the lines of this file
if importlib.util.find_spec("maxtext"):
    os.environ["JAX_PLATFORMS"] = "cpu"  # or libtpu, which comes with MaxText, looks for TPUs

    import jax
    import maxtext
    from flax import nnx
    from flax.core.spmd import logical_axis_rules
    from maxtext.trainers.pre_train import train as trainer
    from maxtext.utils import sharding, train_utils


def options(config: Config, devices: int) -> dict[str, Any]:
    """What a user gives MaxText on its command line, beside the strategy."""
    return {
        "decoder_block": "qwen2",
        "base_emb_dim": config.dim,
        "base_num_decoder_layers": config.num_layers,
        "base_num_query_heads": config.num_heads,
        "base_num_kv_heads": config.num_heads,
        "head_dim": config.dim // config.num_heads,
        "base_mlp_dim": config.mlp_multiple * config.dim,
        "vocab_size": config.vocab_size,
        "logits_via_embedding": config.tied,
        "normalization_layer_epsilon": 1e-6,
        "max_target_length": config.length,
        "per_device_batch_size": config.batch // devices,
        "dtype": config.dtype,
        "weight_dtype": "float32",
        # MaxText 0.2.5 computes blocks again all the same; "minimal_with_context" took as long
        "remat_policy": "none",
        "attention": "dot_product",
        "learning_rate": LEARNING_RATE,
        "learning_rate_final_fraction": 1,
        "warmup_steps_fraction": 0,
        "adam_b1": B1,
        "adam_b2": B2,
        "adam_eps": EPS,
        "adam_weight_decay": WEIGHT_DECAY,
        "gradient_clipping_threshold": 0,
        "steps": 1_000_000,
        "hardware": "cpu",
        "dataset_type": "synthetic",
        "enable_checkpointing": False,
        "skip_jax_distributed_system": True,
    }


def start() -> int:
    """Join the other process, where there is one, as MaxText would on its own clusters.

    Return how many devices there are.
    """
    if "JAX_COORDINATOR_ADDRESS" in os.environ:
        place = [
            os.environ[f"JAX_{name}"]
            for name in ("COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID")
        ]
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(place[0], int(place[1]), int(place[2]))
    return jax.device_count()


def leaves_of(params: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return shardopt's parameters as MaxText lays them out: blocks stacked along dim 1, the parts
    of a product apart.
    """
    attention, mlp = params["blocks"]["attention"], params["blocks"]["mlp"]
    query, key, value = np.moveaxis(attention["qkv"], 2, 0)
    gate, up = np.moveaxis(mlp["up"], 2, 0)
    stacked = {
        "pre_self_attention_layer_norm.scale": attention["norm"],
        "self_attention.query.kernel": query,
        "self_attention.key.kernel": key,
        "self_attention.value.kernel": value,
        "self_attention.out.kernel": attention["out"],
        "post_self_attention_layer_norm.scale": mlp["norm"],
        "mlp.wi_0.kernel": gate,
        "mlp.wi_1.kernel": up,
        "mlp.wo.kernel": mlp["down"],
    }
    outer = {
        "token_embedder.embedding": params["embedding"],
        "decoder.decoder_norm.scale": params["norm"],
    }
    if "head" in params:
        outer["decoder.logits_dense.kernel"] = params["head"].T
    return outer | {
        f"decoder.layers.{name}": np.swapaxes(leaf, 0, 1) for name, leaf in stacked.items()
    }


def with_unstacked_blocks(leaves: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the same for `scan_layers=False`: each block has leaves of its own."""
    mark = "decoder.layers."
    blocks = {
        name.replace(mark, f"decoder.layers_{i}."): block
        for name, leaf in leaves.items()
        if name.startswith(mark)
        for i, block in enumerate(np.moveaxis(leaf, 1, 0))
    }
    return blocks | {name: leaf for name, leaf in leaves.items() if not name.startswith(mark)}


def places_of(model: Any) -> dict[str, Any]:
    """Return the parameters of MaxText's model by name, such as "decoder.layers.mlp.wo.kernel"."""
    return {
        ".".join(map(str, path)): leaf
        for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }


def fill(model: Any, leaves: dict[str, np.ndarray]) -> None:
    """Put leaves in the place of a model's parameters.

    Raises:
      ValueError: if names or shapes differ: it would not be the same model.
    """
    places = places_of(model)
    wanted, found = (
        {name: tuple(leaf.shape) for name, leaf in tree.items()} for tree in (leaves, places)
    )
    if wanted != found:
        raise ValueError(
            f"peers: maxtext: not the same model: {sorted(wanted.items() ^ found.items())}"
        )
    for name, place in places.items():
        put = lambda index, leaf=leaves[name]: leaf[index]
        place[...] = jax.make_array_from_callback(place.shape, place[...].sharding, put)


class Training(NamedTuple):
    """MaxText's jitted step, the state that it begins with, the sharding of a batch, and the
    context of a call.
    """

    step: Any
    state: Any
    rows: Any
    context: Callable[[], contextlib.AbstractContextManager]


def prepare(task: Task, **chosen: Any) -> Training:
    """Set MaxText up as its train_loop does, with the task's parameters.

    Args:
      task: the model, its first parameters, and a folder for MaxText's files.
      chosen: MaxText's options beside those of the model, such as the strategy.
    """
    base = str(Path(maxtext.__file__).parent / "configs" / "base.yml")
    given = (
        {"run_name": "peers", "base_output_directory": str(task.folder)}
        | options(task.config, start())
        | chosen
    )
    words = [
        f"{name}={str(value).lower() if isinstance(value, bool) else value}"
        for name, value in given.items()
    ]
    config, recorder = trainer.initialize(["", base, *words])
    _, _, places, _, mesh, *_, state = train_utils.setup_train_loop(config, recorder)
    leaves = leaves_of(task.params())
    fill(state.model, leaves if config.scan_layers else with_unstacked_blocks(leaves))
    graph, state = nnx.split(state)
    of_params, places = sharding.maybe_update_params_sharding_with_opt(config, places)
    step, _ = train_utils.jit_train_and_eval_step(
        config, graph, mesh, state, places, trainer.train_step, params_shardings=of_params
    )

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
            yield

    with context():
        # train_loop does this by device_put, which two processes on CPUs cannot
        if config.shard_optimizer_over_data:
            state = jax.jit(lambda leaves: leaves, out_shardings=places)(state)
        rows = sharding.get_input_data_sharding(config, mesh)
    return Training(step, state, rows, context)


def batch_of(tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Return a batch of tokens [B, T + 1] in MaxText's form."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    positions = np.broadcast_to(np.arange(inputs.shape[1], dtype=np.int32), inputs.shape)
    fields = {"inputs": inputs, "targets": targets}
    for side in ("inputs", "targets"):
        fields |= {f"{side}_position": positions, f"{side}_segmentation": np.ones_like(positions)}
    return fields


def figures(metrics: dict[str, Any]) -> tuple[Any, Any]:
    """Return the loss and the gradient norm of a step."""
    return metrics["scalar"]["learning/loss"], metrics["scalar"]["learning/grad_norm"]


def train(task: Task, **strategy: Any):
    """Take MaxText's own steps, as its train_loop does with a loader's batches."""
    step, state, rows, context = prepare(task, **strategy)
    for tokens in task.local_batches():
        fields = batch_of(tokens)
        batch = {
            name: jax.make_array_from_process_local_data(rows, field)
            for name, field in fields.items()
        }
        with context():
            state, metrics = step(state, batch)
        loss, norm = figures(metrics)
        yield float(loss), float(norm)


def exported(task: Task, form: str):
    """Take the steps of a program that `peers.exported` wrote; it needs jax alone."""
    import jax

    written = np.load(exported_file(Path(os.environ["PEERS_MAXTEXT"]), task.config, form))
    program = jax.export.deserialize(bytearray(written["program"].tobytes()))
    step = jax.jit(program.call, donate_argnums=0)
    blocks = leaves_of(task.params())
    params, leaves = blocks | with_unstacked_blocks(blocks), []
    for i, (begin, shape, dtype) in enumerate(json.loads(str(written["leaves"]))):
        if begin == "zeros":
            leaves.append(np.zeros(shape, dtype))
        else:
            leaves.append(written[f"leaf{i}"] if begin == "stored" else params[begin])
    leaves = jax.device_put(leaves)
    for tokens in task.batches():
        leaves, loss, norm = step(leaves, batch_of(tokens))
        yield float(loss), float(norm)


def exported_file(folder: Path, config: Config, form: str) -> Path:
    """Return where the program of a model lies, "stacked" or "unstacked"."""
    return folder / f"{config.dim}x{config.num_layers}_{form}.npz"


def stacked(task: Task):
    """Blocks in a loop, as MaxText has them by default."""
    return exported(task, "stacked")


def unstacked(task: Task):
    """Blocks one after another, `scan_layers=false`."""
    return exported(task, "unstacked")


def ddp(task: Task):
    return train(task, ici_data_parallelism=-1, ici_fsdp_parallelism=1)


def zero1(task: Task):
    return train(
        task, ici_data_parallelism=-1, ici_fsdp_parallelism=1, shard_optimizer_over_data=True
    )


def fsdp(task: Task):
    return train(task, ici_fsdp_parallelism=-1)


LINES = {
    "ddp": (options, ddp),
    "zero1": (options, zero1),
    "fsdp": (options, fsdp),
    "stacked": (options, ddp),
    "unstacked": (options, ddp),
}
"""What is counted as written by the user: the options of a run, there are no others."""
