"""Levanter as a contestant: its Llama, trainer and loop, given the task's parameters and batches.

Run by the Python of another environment, in which Levanter is installed: python -m benchmarks.peers
--levanter /path/to/python. It has no strategy between data parallel and FSDP.
"""

import importlib.util
import os
from typing import Any

import numpy as np

from ..task import B1, B2, EPS, LEARNING_RATE, WEIGHT_DECAY, Config, Task

# it is not installed where benchmarks.peers counts the lines of this file
if importlib.util.find_spec("levanter"):
    import equinox as eqx
    import haliax as hax
    import jax
    import jax.numpy as jnp
    import optax
    from levanter.distributed import DistributedConfig, RayConfig
    from levanter.layers.attention import AttentionBackend, AttentionMask
    from levanter.models.llama import LlamaConfig, LlamaLMHeadModel
    from levanter.tracker import NoopConfig
    from levanter.trainer import Trainer, TrainerConfig


def model_config(config: Config) -> Any:
    return LlamaConfig(
        seq_len=config.length,
        hidden_dim=config.dim,
        intermediate_dim=config.mlp_multiple * config.dim,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_heads,
        layer_norm_epsilon=1e-6,
        tie_word_embeddings=config.tied,
        gradient_checkpointing=False,  # the others keep what the backward pass needs too
        attn_backend=AttentionBackend.VANILLA,  # as fast here as its own default for CPUs
    )


def start(task: Task) -> Any:
    """What it takes to join the other process, where there is one: Levanter knows SLURM, and else
    is told.
    """
    if task.processes == 1:
        return DistributedConfig(initialize_jax_distributed=False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    return DistributedConfig(os.environ["JAX_COORDINATOR_ADDRESS"], task.processes, task.rank)


def loss_of(model: Any, example: tuple[Any, Any], key: Any = None) -> Any:
    """The mean loss of the next token.

    Levanter's own leaves out the last position, whose target the batches have.
    """
    inputs, targets = example
    mixed = model.activations(inputs, AttentionMask.causal(), key=key)
    logits = hax.dot(mixed, model.get_lm_head(), axis=model.Embed)
    return hax.nn.cross_entropy_loss(
        logits, model.Vocab, hax.nn.one_hot(targets, model.Vocab)
    ).mean()


def keep_norm() -> Any:
    """Keep the global norm of the gradient as state of the optimizer: the trainer gives no other
    way to read it each step.
    """
    return optax.GradientTransformation(
        lambda params: jnp.zeros(()),
        lambda grads, state, params=None: (grads, optax.tree.norm(grads)),
    )


def train(task: Task, fsdp_axis: str | None):
    options = TrainerConfig(
        train_batch_size=task.config.batch,
        fsdp_axis=fsdp_axis,
        num_train_steps=1_000_000,
        distributed=start(task),
        require_accelerator=False,
        load_checkpoint=False,
        tracker=NoopConfig(),
        ray=RayConfig(auto_start_cluster=False),
        log_jaxprs=False,
        log_xla_hlo=False,
    )
    options.initialize()
    adamw = optax.adamw(LEARNING_RATE, b1=B1, b2=B2, eps=EPS, weight_decay=WEIGHT_DECAY)
    with Trainer(
        options, optax.chain(keep_norm(), adamw), loss_of, add_default_hooks=False
    ) as trainer:
        state = trainer.initial_state(jax.random.key(0), model_init=lambda: model_of(task))
        for step in trainer.training_steps(state, batches(task, trainer)):
            yield float(step.loss), float(step.state.opt_state[0])


def batches(task: Task, trainer: Any):
    """Inputs and targets as named arrays: the trainer's loader takes datasets on disk only."""
    axes = (trainer.config.TrainBatch, hax.Axis("position", task.config.length))
    place = hax.partitioning.sharding_for_axis(
        axes, trainer.compute_axis_mapping, trainer.device_mesh
    )
    for tokens in task.local_batches():
        sides = (
            jax.make_array_from_process_local_data(place, side)
            for side in (tokens[:, :-1], tokens[:, 1:])
        )
        yield tuple(hax.named(side, axes) for side in sides)


def leaves_of(params: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return shardopt's parameters by Levanter's names, in the order of dims in which it keeps
    them: what comes out first.
    """
    attention, mlp = params["blocks"]["attention"], params["blocks"]["mlp"]
    query, key, value = np.moveaxis(attention["qkv"], (2, 1), (0, -1))
    gate, up = np.moveaxis(mlp["up"], (2, 1), (0, -1))
    stacked = {
        "input_layernorm": attention["norm"],
        "self_attn.q_proj": query[:, :, None],  # a group of queries for each key
        "self_attn.k_proj": key,
        "self_attn.v_proj": value,
        "self_attn.o_proj": np.moveaxis(attention["out"], -1, 1),
        "post_attention_layernorm": mlp["norm"],
        "mlp.gate_proj": gate,
        "mlp.up_proj": up,
        "mlp.down_proj": np.moveaxis(mlp["down"], -1, 1),
    }
    outer = {"embeddings.token_embeddings": params["embedding"], "transformer.norm": params["norm"]}
    if "head" in params:
        outer["lm_head"] = params["head"]
    leaves = outer | {f"transformer.layers.stacked.{name}": leaf for name, leaf in stacked.items()}
    return {f"{name}.weight": np.ascontiguousarray(leaf) for name, leaf in leaves.items()}


def model_of(task: Task) -> Any:
    """Return the model with the task's parameters.

    Raises:
      ValueError: if names or shapes differ: it would not be the same model.
    """
    vocabulary = hax.Axis("vocab", task.config.vocab_size)
    empty = eqx.filter_eval_shape(
        LlamaLMHeadModel.init, vocabulary, model_config(task.config), key=jax.random.key(0)
    )
    leaves, is_named = leaves_of(task.params()), lambda leaf: isinstance(leaf, hax.NamedArray)
    places, tree = jax.tree_util.tree_flatten_with_path(empty, is_leaf=is_named)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in places}
    wanted, found = (
        {name: leaf.shape for name, leaf in leaves.items()},
        {n: leaf.array.shape for n, leaf in named.items()},
    )
    if wanted != found:
        raise ValueError(
            f"peers: levanter: not the same model: {sorted(wanted.items() ^ found.items())}"
        )
    return jax.tree.unflatten(
        tree, [hax.named(jnp.asarray(leaves[n]), leaf.axes) for n, leaf in named.items()]
    )


def ddp(task: Task):
    return train(task, None)


def fsdp(task: Task):
    return train(task, "embed")


LINES = {
    "ddp": (model_config, start, loss_of, train, ddp),
    "fsdp": (model_config, start, loss_of, train, fsdp),
}
"""What is counted as written by the user: without its loader, and without how parameters get in."""
