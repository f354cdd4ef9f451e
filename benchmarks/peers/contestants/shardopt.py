"""shardopt as a contestant: what a user writes, a function a strategy, with the GPT that comes with
it.
"""

import optax

import shardopt as so
from shardopt.models import gpt

from ..task import (
    B1,
    B2,
    EPS,
    LEARNING_RATE,
    MUON_MOMENTUM,
    MUON_RATE,
    WEIGHT_DECAY,
    Task,
    gpt_config,
)


def ddp(task: Task):
    so.initialize()
    model = gpt.model(gpt_config(task.config))
    tx = optax.adamw(LEARNING_RATE, b1=B1, b2=B2, eps=EPS, weight_decay=WEIGHT_DECAY)
    opt = so.ddp(tx, so.make_mesh(), model)
    state = opt.init(task.params())
    for tokens in task.batches():
        state, metrics = opt.step(state, so.GlobalRows({"tokens": tokens}))
        yield float(metrics["loss"]), float(metrics["grad_norm"])


def zero1(task: Task):
    so.initialize()
    model = gpt.model(gpt_config(task.config))
    tx = optax.adamw(LEARNING_RATE, b1=B1, b2=B2, eps=EPS, weight_decay=WEIGHT_DECAY)
    opt = so.zero(tx, so.make_mesh(), model, stage=1)
    state = opt.init(task.params())
    for tokens in task.batches():
        state, metrics = opt.step(state, so.GlobalRows({"tokens": tokens}))
        yield float(metrics["loss"]), float(metrics["grad_norm"])


def fsdp(task: Task):
    so.initialize()
    model = gpt.model(gpt_config(task.config))
    tx = optax.adamw(LEARNING_RATE, b1=B1, b2=B2, eps=EPS, weight_decay=WEIGHT_DECAY)
    opt = so.fsdp(tx, so.make_mesh(), model)
    state = opt.init(task.params())
    for tokens in task.batches():
        state, metrics = opt.step(state, so.GlobalRows({"tokens": tokens}))
        yield float(metrics["loss"]), float(metrics["grad_norm"])


WHOLE = (
    ("^blocks/attention/qkv$", so.optimizers.Matrix(rows=1, columns=(2, 3, 4))),
    ("^blocks/attention/out$", so.optimizers.Matrix(rows=(1, 2), columns=3)),
    ("^blocks/mlp/up$", so.optimizers.Matrix(rows=1, columns=(2, 3))),
    ("^blocks/mlp/down$", so.optimizers.Matrix(rows=1, columns=2)),
)
"""The matrices of torch's GPT: queries, keys and values are one there."""


def muon(task: Task, layout: str = "matrices"):
    so.initialize()
    model = gpt.model(gpt_config(task.config))
    tx = optax.contrib.muon(
        MUON_RATE,
        beta=MUON_MOMENTUM,
        weight_decay=WEIGHT_DECAY,
        nesterov=False,
        eps=EPS,
        adam_learning_rate=LEARNING_RATE,
        adam_b1=B1,
        adam_b2=B2,
        adam_weight_decay=WEIGHT_DECAY,
        muon_weight_dimension_numbers=so.optimizers.muon_dimension_numbers(WHOLE),
    )
    opt = so.fsdp(tx, so.make_mesh(), model, opt_state=layout)
    state = opt.init(task.params())
    for tokens in task.batches():
        state, metrics = opt.step(state, so.GlobalRows({"tokens": tokens}))
        yield float(metrics["loss"]), float(metrics["grad_norm"])


def muon_within(task: Task):
    yield from muon(task, layout="within")


LINES = {"ddp": (ddp,), "zero1": (zero1,), "fsdp": (fsdp,)}
"""What is counted as written by the user, beside the model."""
