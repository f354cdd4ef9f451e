"""The strategies and meshes that the contract is checked on: one row a strategy."""

import shardopt as so

STRATEGIES = {
    "ddp": so.ddp,
    "zero1": lambda *args, **kw: so.zero(*args, stage=1, min_shard_elements=8, **kw),
    "zero2": lambda *args, **kw: so.zero(*args, stage=2, min_shard_elements=8, **kw),
    "fsdp": lambda *args, **kw: so.fsdp(*args, min_shard_elements=8, **kw),
}
MESHES = [
    {"data": 8},
    {"data": 4, "tensor": 2},
    {"data": 2, "tensor": 4},
    {"replica": 2, "data": 4},
    {"data": 1},
]
