"""What every contestant is given: sizes, first parameters and batches, read from one folder."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

LEARNING_RATE, B1, B2, EPS, WEIGHT_DECAY = 1e-3, 0.9, 0.95, 1e-8, 0.1
"""AdamW, the same for all, on every leaf."""

MUON_RATE, MUON_MOMENTUM = 1e-2, 0.95
"""Muon, the same for all, on the products of blocks; the rest goes to AdamW."""


class Config(NamedTuple):
    """The shape of the GPT, of the global batch [batch, length + 1], and how it is computed.

    `simulated` is how many devices a single process of jax makes of its cores.
    """

    dim: int
    num_layers: int
    num_heads: int
    batch: int
    length: int
    vocab_size: int = 256
    mlp_multiple: int = 3
    tied: bool = False
    dtype: str = "float32"
    simulated: int = 2

    @property
    def name(self) -> str:
        """How results call it."""
        return f"{self.dim}x{self.num_layers}, {self.batch} x {self.length}"


SIZES = {
    "128x4": Config(dim=128, num_layers=4, num_heads=4, batch=16, length=128),
    "256x4": Config(dim=256, num_layers=4, num_heads=4, batch=16, length=128),
    "256x6": Config(dim=256, num_layers=6, num_heads=8, batch=8, length=256),
    "512x4": Config(dim=512, num_layers=4, num_heads=8, batch=8, length=128),
}


class Task(NamedTuple):
    """A place in the job, and where the data lies."""

    config: Config
    folder: Path
    rank: int
    processes: int

    def params(self) -> dict[str, Any]:
        """Read the first parameters, as `shardopt.models.gpt.init` nests them.

        A new copy every time.
        """
        tree: dict[str, Any] = {}
        with np.load(self.folder / "params.npz") as leaves:
            for path in leaves.files:
                *nodes, name = path.split("/")
                at = tree
                for node in nodes:
                    at = at.setdefault(node, {})
                at[name] = leaves[path]
        return tree

    def batches(self) -> Iterator[np.ndarray]:
        """Yield global batches of tokens, int32 [batch, length + 1], again and again."""
        stored = np.load(self.folder / "tokens.npy", mmap_mode="r")
        while True:
            yield from (np.array(batch) for batch in stored)

    def local_batches(self) -> Iterator[np.ndarray]:
        """Yield the rows of this process."""
        rows = self.config.batch // self.processes
        for batch in self.batches():
            yield batch[self.rank * rows : (self.rank + 1) * rows]


def write_task(config: Config, folder: Path, *, count: int) -> None:
    """Draw parameters and batches with shardopt, and leave them where tasks read them."""
    import jax

    from shardopt import data

    windows, _ = data.split(data.open_corpus(), config.length)
    drawn = iter(data.batches(windows, config.batch, seed=0))
    np.save(folder / "tokens.npy", np.stack([next(drawn)["tokens"] for _ in range(count)]))
    from shardopt.models import gpt

    params = gpt.init(gpt_config(config), jax.random.key(0))
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    np.savez(folder / "params.npz", **leaves)
    (folder / "config.json").write_text(json.dumps(config._asdict()))


def read_task(folder: Path) -> Task:
    """Return the task of this process.

    The launchers of torch, jax and shardopt each name its place in their own way.
    """
    config = Config(**json.loads((folder / "config.json").read_text()))
    places = (("RANK", "WORLD_SIZE"), ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES"))
    rank, processes = next(
        ((os.environ[r], os.environ[n]) for r, n in places if r in os.environ), (0, 1)
    )
    return Task(config, folder, int(rank), int(processes))


def gpt_config(config: Config) -> Any:
    """Return the same as shardopt's own configuration."""
    import jax.numpy as jnp

    from shardopt.models import gpt

    fields = ("vocab_size", "dim", "num_layers", "num_heads", "mlp_multiple", "tied")
    chosen = {name: getattr(config, name) for name in fields}
    dtype = None if config.dtype == "float32" else jnp.dtype(config.dtype)
    return gpt.config(**chosen, max_length=config.length, dtype=dtype, logits_dtype=dtype)
