"""The methods that `over_network.py` compares: how a process begins, steps and evaluates."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

HOSTS = 2
SYNC_EVERY = 20
ROWS = 8  # of a host
LENGTH = 64
LEARNING_RATE, WARM_UP_STEPS, WEIGHT_DECAY = 2e-3, 20, 1e-4
METHODS = {
    "ddp": "ddp",
    "int8": "ddp, int8",
    "top_k": "ddp, top-k 1%",
    "power_sgd": "ddp, PowerSGD rank 1",
    "local_sgd": f"local SGD, H = {SYNC_EVERY}",
    "diloco": f"DiLoCo, H = {SYNC_EVERY}",
    "streaming": f"streaming DiLoCo, H = {SYNC_EVERY}, 2 fragments, delay 5",
    "torch": "torch DDP",
    "torch_power_sgd": "torch DDP, its PowerSGD hook, rank 1",
}


class Process(NamedTuple):
    """One process of a method.

    Attributes:
      num_params: numbers in the model.
      meets_every: after how many steps the hosts meet.
      reset: go back to the first parameters.
      step: train on the tokens of this host, [ROWS, LENGTH + 1].
      wait: return when all steps are done.
      evaluate: return the loss on held-out tokens.
      slowest: return the largest of a number that each host has.
    """

    num_params: int
    meets_every: int
    reset: Callable[[], None]
    step: Callable[[np.ndarray], None]
    wait: Callable[[], None]
    evaluate: Callable[[], float]
    slowest: Callable[[float], float]


def batches(rank: int) -> tuple[Iterator[np.ndarray], np.ndarray]:
    """Return the tokens that this host trains on, and those held out, [4 * ROWS, LENGTH + 1]."""
    from shardopt import data

    windows, held_out = data.split(data.open_corpus(), LENGTH)
    stream = (batch["tokens"] for batch in data.batches(windows, ROWS, seed=rank))
    drawn = [batch["tokens"] for batch in data.spread_batches(held_out, ROWS, 4)]
    return stream, np.concatenate(drawn)


def strategy(method: str, loss_fn: Callable):
    """Return the strategy of a method, and after how many steps the hosts meet."""
    import optax

    import shardopt as so

    rate = optax.linear_schedule(0.0, LEARNING_RATE, WARM_UP_STEPS)
    tx = optax.adamw(rate, weight_decay=WEIGHT_DECAY)
    compressors = {
        "int8": so.reducers.int8,
        "top_k": lambda: so.reducers.top_k(0.01),
        "power_sgd": lambda: so.reducers.power_sgd(1),
    }
    if method in compressors:
        reducer = so.reducers.error_feedback(compressors[method]())
        return so.ddp(tx, so.make_mesh(), loss_fn, reducer=reducer), 1
    if method == "ddp":
        return so.ddp(tx, so.make_mesh(), loss_fn), 1
    inner = so.ddp(tx, so.make_mesh(replica=HOSTS), loss_fn)
    if method == "local_sgd":
        return so.local_sgd(inner, sync_every=SYNC_EVERY), SYNC_EVERY
    options = {"fragments": 2, "delay": 5} if method == "streaming" else {}
    return so.diloco(inner, sync_every=SYNC_EVERY, **options), SYNC_EVERY


def shardopt_process(
    method: str, dim: int, layers: int, rank: int, held_out: np.ndarray
) -> Process:
    """Join the other process, and compile."""
    import jax

    jax.config.update("jax_num_cpu_devices", 1)
    from jax.experimental import multihost_utils

    import shardopt as so
    from shardopt.models import gpt

    so.initialize("host0:8476", HOSTS, rank)
    config = gpt.config(dim=dim, num_layers=layers)
    opt, meets_every = strategy(method, gpt.model(config).loss_fn)
    sharding = jax.NamedSharding(opt.mesh, jax.P(opt.mesh.axis_names))

    def placed(tokens):
        return {"tokens": jax.make_array_from_process_local_data(sharding, tokens)}

    held_out = placed(held_out)
    first = gpt.init(config, jax.random.key(0))
    state, metrics = opt.init(first), None

    def reset():
        nonlocal state
        state = opt.init(first)

    def step(tokens):
        nonlocal state, metrics
        state, metrics = opt.step(state, placed(tokens))

    return Process(
        num_params=sum(leaf.size for leaf in jax.tree.leaves(first)),
        meets_every=meets_every,
        reset=reset,
        step=step,
        wait=lambda: jax.block_until_ready((state, metrics)),
        evaluate=lambda: float(opt.evaluate(state, held_out)["loss"]),
        slowest=lambda number: float(np.max(multihost_utils.process_allgather(np.float32(number)))),
    )


def torch_process(method: str, dim: int, layers: int, rank: int, held_out: np.ndarray) -> Process:
    """Join the other process, with the parameters that shardopt begins with."""
    import jax
    import torch
    import torch.distributed as dist
    from peers.contestants.torch import GPT, load
    from peers.task import Config
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    from shardopt.models import gpt

    torch.set_num_threads(1)
    params = gpt.init(gpt.config(dim=dim, num_layers=layers), jax.random.key(0))
    params = jax.tree.map(np.array, params)
    config = Config(dim, layers, 4, ROWS, LENGTH, tied="head" not in params)
    dist.init_process_group("gloo", init_method="tcp://host0:8476", world_size=HOSTS, rank=rank)
    # The hook sends from threads. With several buckets two processes order their messages otherwise,
    # and gloo ends them, so it gets one bucket.
    bucket_megabytes = 1000 if method == "torch_power_sgd" else None
    model = DistributedDataParallel(
        load(GPT(config), params), gradient_as_bucket_view=True, bucket_cap_mb=bucket_megabytes
    )
    # torch compresses from the third step on at the earliest
    compression = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2
    )
    if method == "torch_power_sgd":
        model.register_comm_hook(compression, powerSGD_hook.powerSGD_hook)
    held_out = torch.from_numpy(held_out).long()
    optimizer = schedule = None

    def reset():
        nonlocal optimizer, schedule
        load(model.module, params)
        compression.error_dict.clear()
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda done: min(done / WARM_UP_STEPS, 1.0)
        )

    def step(tokens):
        optimizer.zero_grad()
        model(torch.from_numpy(tokens).long()).backward()
        optimizer.step()
        schedule.step()

    @torch.no_grad()
    def evaluate():
        return model.module(held_out).item()

    def slowest(number):
        number = torch.tensor(number)
        dist.all_reduce(number, dist.ReduceOp.MAX)
        return number.item()

    reset()
    return Process(
        num_params=sum(parameter.numel() for parameter in model.parameters()),
        meets_every=1,
        reset=reset,
        step=step,
        wait=lambda: None,
        evaluate=evaluate,
        slowest=slowest,
    )
