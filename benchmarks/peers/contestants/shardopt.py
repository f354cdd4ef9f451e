"""shardopt as a contestant: what a user writes, a function a strategy, with the GPT that comes with it."""

import optax

import shardopt as so
from shardopt.models import gpt

from ..task import B1, B2, EPS, LEARNING_RATE, WEIGHT_DECAY, Task, gpt_config


def ddp(task: Task):
    so.initialize()
    model = gpt.model(gpt_config(task.config))
    tx = optax.adamw(LEARNING_RATE, b1=B1, b2=B2, eps=EPS, weight_decay=WEIGHT_DECAY)
    opt = so.ddp(tx, so.make_mesh(), model)
    state = opt.init(task.params())
    for tokens in task.batches():
        state, metrics = opt.step(state, {"tokens": tokens})
        yield float(metrics["loss"]), float(metrics["grad_norm"])


def zero1(task: Task):
    so.initialize()
    model = gpt.model(gpt_config(task.config))
    tx = optax.adamw(LEARNING_RATE, b1=B1, b2=B2, eps=EPS, weight_decay=WEIGHT_DECAY)
    opt = so.zero(tx, so.make_mesh(), model, stage=1)
    state = opt.init(task.params())
    for tokens in task.batches():
        state, metrics = opt.step(state, {"tokens": tokens})
        yield float(metrics["loss"]), float(metrics["grad_norm"])


def fsdp(task: Task):
    so.initialize()
    model = gpt.model(gpt_config(task.config))
    tx = optax.adamw(LEARNING_RATE, b1=B1, b2=B2, eps=EPS, weight_decay=WEIGHT_DECAY)
    opt = so.fsdp(tx, so.make_mesh(), model)
    state = opt.init(task.params())
    for tokens in task.batches():
        state, metrics = opt.step(state, {"tokens": tokens})
        yield float(metrics["loss"]), float(metrics["grad_norm"])


LINES = {"ddp": (ddp,), "zero1": (zero1,), "fsdp": (fsdp,)}
"""What is counted as written by the user, beside the model."""
