"""The processes of these tests train a small net under fsdp, with one device a process, on batches
drawn by their step.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardopt as so


def begin(*place):
    """Join the job, at a place (address, count, rank) or where the launcher says."""
    jax.config.update("jax_num_cpu_devices", 1)
    so.initialize(*place)


def loss_fn(params, batch):
    hidden = jnp.tanh(batch[:, :8] @ params["up"])
    return jnp.mean((hidden @ params["down"] - batch[:, 8]) ** 2)


def batch_of(step, rows=16):
    return np.random.default_rng(step).normal(size=(rows, 9)).astype(np.float32)


def strategy_and_params(width=32):
    opt = so.fsdp(optax.adam(0.01), so.make_mesh(), loss_fn, min_shard_elements=1)
    return opt, {"up": np.eye(8, width, dtype=np.float32), "down": np.ones(width, np.float32)}


def strategy_and_state(width=32):
    opt, params = strategy_and_params(width)
    return opt, opt.init(params)


def leave_params(folder: Path, opt, result):
    """Have process 0 leave the parameters of a run that is complete in the folder."""
    replicated_params = jax.jit(
        lambda params: params, out_shardings=jax.NamedSharding(opt.mesh, jax.P())
    )(result.state.params)
    if jax.process_index() == 0 and result.stopped == "completed":
        np.savez(
            folder / "params.npz",
            **{
                name: np.asarray(leaf.addressable_data(0))
                for name, leaf in replicated_params.items()
            },
        )
