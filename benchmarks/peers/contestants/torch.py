"""torch as a contestant: the same GPT as modules, and what a user writes around it, a function a
strategy.
"""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from ..task import B1, B2, EPS, LEARNING_RATE, MUON_MOMENTUM, MUON_RATE, WEIGHT_DECAY, Config, Task

ADAMW = {
    "lr": LEARNING_RATE,
    "betas": (B1, B2),
    "eps": EPS,
    "weight_decay": WEIGHT_DECAY,
    "fused": True,
}


def rotary(length: int, width: int, base: float = 10_000.0) -> torch.Tensor:
    """The angles' cosines and sines, [2, T, 1, K/2]."""
    half = width // 2
    angles = torch.arange(length)[:, None] * base ** (-torch.arange(half) / half)[None]
    return torch.stack([angles.cos(), angles.sin()])[:, :, None]


def rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    (cos, sin), (first, second) = table, x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(x.dtype)


class Block(nn.Module):
    """Attention, then SwiGLU, each behind an RMS norm."""

    def __init__(self, config: Config):
        super().__init__()
        dim, hidden = config.dim, config.mlp_multiple * config.dim
        self.heads = config.num_heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dim, eps=1e-6), nn.RMSNorm(dim, eps=1e-6)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = (
            nn.Linear(dim, 2 * hidden, bias=False),
            nn.Linear(hidden, dim, bias=False),
        )

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Add both branches to x [B, T, D]."""
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = qkv.unbind(2)
        query, key = rotate(query, table), rotate(key, table)
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        gate, up = self.up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(nn.functional.silu(gate) * up)


class GPT(nn.Module):
    """The model; its forward takes tokens [B, T + 1] and returns the mean loss in nats."""

    def __init__(self, config: Config, device: str = "cpu"):
        super().__init__()
        with torch.device(device):
            self.embedding = nn.Embedding(config.vocab_size, config.dim)
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
            self.norm = nn.RMSNorm(config.dim, eps=1e-6)
            self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
            self.register_buffer(
                "table", rotary(config.length, config.dim // config.num_heads), persistent=False
            )
        if config.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of the next token."""
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x, self.table)
        logits = self.head(self.norm(x)).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def load(model: GPT, params: dict) -> GPT:
    """Copy the parameters of shardopt's GPT: a product there is x @ w, here x @ w.T."""

    def fill(parameter: torch.Tensor, value: np.ndarray) -> None:
        parameter.copy_(torch.from_numpy(value).reshape(parameter.shape))

    def flipped(value: np.ndarray, fan_in: int) -> np.ndarray:
        return np.ascontiguousarray(value.reshape(fan_in, -1).T)

    fill(model.embedding.weight, params["embedding"])
    fill(model.norm.weight, params["norm"])
    if "head" in params:
        fill(model.head.weight, params["head"])
    attention, mlp = params["blocks"]["attention"], params["blocks"]["mlp"]
    for i, block in enumerate(model.blocks):
        dim, hidden = block.down.weight.shape
        fill(block.attention_norm.weight, attention["norm"][i])
        fill(block.qkv.weight, flipped(attention["qkv"][i], dim))
        fill(block.out.weight, flipped(attention["out"][i], dim))
        fill(block.mlp_norm.weight, mlp["norm"][i])
        fill(block.up.weight, flipped(mlp["up"][i], dim))
        fill(block.down.weight, flipped(mlp["down"][i], hidden))
    return model


def ddp(task: Task):
    dist.init_process_group("gloo")
    model = DistributedDataParallel(
        load(GPT(task.config), task.params()), gradient_as_bucket_view=True
    )
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for tokens in task.local_batches():
        optimizer.zero_grad()
        loss = model(torch.from_numpy(tokens).long())
        loss.backward()
        norm = get_total_norm([parameter.grad for parameter in model.parameters()])
        optimizer.step()
        loss = loss.detach() / task.processes
        dist.all_reduce(loss)
        yield loss.item(), norm.item()


def zero1(task: Task):
    dist.init_process_group("gloo")
    model = DistributedDataParallel(
        load(GPT(task.config), task.params()), gradient_as_bucket_view=True
    )
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **ADAMW)
    for tokens in task.local_batches():
        optimizer.zero_grad()
        loss = model(torch.from_numpy(tokens).long())
        loss.backward()
        norm = get_total_norm([parameter.grad for parameter in model.parameters()])
        optimizer.step()
        loss = loss.detach() / task.processes
        dist.all_reduce(loss)
        yield loss.item(), norm.item()


def fsdp(task: Task):
    dist.init_process_group("gloo")
    model = load(GPT(task.config), task.params())
    mesh = dist.init_device_mesh("cpu", (task.processes,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for tokens in task.local_batches():
        optimizer.zero_grad()
        loss = model(torch.from_numpy(tokens).long())
        loss.backward()
        norm = get_total_norm([parameter.grad for parameter in model.parameters()]).full_tensor()
        optimizer.step()
        loss = loss.detach() / task.processes
        dist.all_reduce(loss)
        yield loss.item(), norm.item()


def muon(task: Task):
    dist.init_process_group("gloo")
    model = load(GPT(task.config), task.params())
    mesh = dist.init_device_mesh("cpu", (task.processes,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    parameters = dict(model.named_parameters())
    matrices = {
        name for name, one in parameters.items() if name.startswith("blocks.") and one.ndim == 2
    }
    chosen, others = (
        [parameters[name] for name in parameters if (name in matrices) is one]
        for one in (True, False)
    )
    options = {
        "lr": MUON_RATE,
        "momentum": MUON_MOMENTUM,
        "weight_decay": WEIGHT_DECAY,
        "nesterov": False,
    }
    optimizers = torch.optim.Muon(chosen, **options), torch.optim.AdamW(others, **ADAMW)
    for tokens in task.local_batches():
        model.zero_grad()
        loss = model(torch.from_numpy(tokens).long())
        loss.backward()
        norm = get_total_norm([parameter.grad for parameter in model.parameters()]).full_tensor()
        for optimizer in optimizers:
            optimizer.step()
        loss = loss.detach() / task.processes
        dist.all_reduce(loss)
        yield loss.item(), norm.item()


def muon_fp32(task: Task):
    """The same, its Newton-Schulz in fp32 as optax's is, where torch's is always in bf16."""
    from torch.optim import _muon

    def newton_schulz(
        grad: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
    ):
        a, b, c = coefficients
        x = grad.T if grad.size(0) > grad.size(1) else grad
        x = x / x.norm().clamp(min=eps)
        for _ in range(steps):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x.T if grad.size(0) > grad.size(1) else x

    _muon._zeropower_via_newtonschulz = newton_schulz
    yield from muon(task)


def alone(task: Task):
    model = load(GPT(task.config), task.params())
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for tokens in task.batches():
        optimizer.zero_grad()
        loss = model(torch.from_numpy(tokens).long())
        loss.backward()
        norm = get_total_norm([parameter.grad for parameter in model.parameters()])
        optimizer.step()
        yield loss.item(), norm.item()


def autotuned(task: Task):
    """The same, with products and fusions chosen by timing them, as XLA chooses its own."""
    return compiled(task, mode="max-autotune-no-cudagraphs")


def compiled(task: Task, mode: str | None = None):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    model = load(GPT(task.config, device), task.params())
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    loss_of = torch.compile(model, mode=mode)
    for tokens in task.batches():
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = loss_of(torch.from_numpy(tokens).long().to(device))
        loss.backward()
        norm = get_total_norm([parameter.grad for parameter in model.parameters()])
        optimizer.step()
        yield loss.item(), norm.item()


LINES = {
    "ddp": (ddp,),
    "zero1": (zero1,),
    "fsdp": (fsdp,),
    "alone": (alone,),
    "compiled": (compiled,),
    "autotuned": (compiled,),
}
"""What is counted as written by the user, beside the model."""
