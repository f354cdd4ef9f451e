"""How long `so.find_nan` takes for a small model: the claim is ten seconds.

    python benchmarks/find_nan.py

A GPT of 0.9 million parameters, 16 rows of 128 tokens, by ddp and fsdp on eight simulated devices.
One token stands in row 5 alone. In the forward pass its embedding is infinite. In the backward pass
the model takes the root of squares that are 0 at this token. Without that the search goes through
everything and finds nothing. Each search compiles all that it runs. Seconds are by the clock, and
those that cores worked.
"""

import time

from common import fake_devices, write_json

fake_devices(8)

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardopt as so
from shardopt.models import gpt

CONFIG = gpt.config(dim=128, num_layers=4, num_heads=4)
ROWS = 16
LENGTH = 128
BAD_ROW = 5
TOKEN = 255


def model_of(case):
    """Return the GPT; in the backward case with the root of a square that is 0 at the token."""
    model = gpt.model(CONFIG)

    def embed(outer, batch):
        is_other = (batch["tokens"][:, :-1] != TOKEN)[..., None]
        add_root = lambda x: (
            x + jnp.sqrt((x * is_other) ** 2) if jnp.issubdtype(x.dtype, jnp.floating) else x
        )
        return jax.tree.map(add_root, model.embed(outer, batch))

    return model._replace(embed=embed) if case == "backward" else model


def search(strategy, case):
    """Return the seconds of one search, and what it found."""
    jax.clear_caches()
    opt = strategy(optax.adamw(1e-3), so.make_mesh(data=8), model_of(case))
    params = jax.tree.map(np.array, jax.device_get(gpt.init(CONFIG, jax.random.key(0))))
    params["embedding"][TOKEN] = np.inf if case == "forward" else 1
    tokens = np.random.default_rng(0).integers(0, TOKEN, size=(ROWS, LENGTH + 1), dtype=np.int32)
    tokens[BAD_ROW, 7] = TOKEN
    state = opt.init(params)
    worked = time.process_time()
    start = time.perf_counter()
    found = so.find_nan(opt, state, {"tokens": tokens})
    seconds = {"seconds": time.perf_counter() - start, "core seconds": time.process_time() - worked}
    facts = {}
    if case != "nothing":
        assert found is not None
        assert (found.direction, found.rows) == (case, (BAD_ROW,))
        facts = {"operation": found.operation, "line": found.line.rpartition("/")[2]}
    assert (found is None) == (case == "nothing")
    return {name: round(value, 2) for name, value in seconds.items()} | facts


def main():
    """Search in each case with both strategies."""
    results = {"parameters": gpt.num_parameters(CONFIG), "searches": {}}
    for name, strategy in (("ddp", so.ddp), ("fsdp", so.fsdp)):
        for case in ("forward", "backward", "nothing"):
            results["searches"][f"{name}, {case}"] = row = search(strategy, case)
            print(name, case, row, flush=True)
    print("wrote", write_json(__file__, results))


if __name__ == "__main__":
    main()
