"""One of two processes with a device each: `python worker_refused.py RANK PORT PLACE`.

Process 1 alone is refused, fails or ends, at a place.
"""

import sys
from pathlib import Path

import jax
import optax

import shardopt as so

sys.path.insert(0, str(Path(__file__).parents[2]))
from support.rows import first_params, loss_fn, whole

rank = int(sys.argv[1])
port = sys.argv[2]
place = sys.argv[3]
so.initialize(f"127.0.0.1:{port}", 2, rank)
is_wrong = rank == 1


def fail(wrong_place, error):
    if is_wrong and place == wrong_place:
        raise error


def batches():
    for step in range(4):
        yield jax.tree.map(lambda leaf: leaf[rank::2], whole(step))


def evaluate(state):
    fail("evaluation", PermissionError("held_out.npz cannot be read"))
    fail("exit in an evaluation", SystemExit(3))
    return {"val_loss": 1.0}


tx = None if is_wrong and place == "strategy" else optax.adam(0.05)
opt = so.fsdp(tx, so.make_mesh(), loss_fn, min_shard_elements=1)
state = opt.init(first_params())
if place in ("own loop", "exit in an own loop", "own loop left", "own loop with fewer steps"):
    for step, batch in enumerate(batches()):
        if step == 2:
            fail("own loop", KeyError("run_name"))
            fail("exit in an own loop", SystemExit(3))
            if is_wrong and place == "own loop left":
                break
            if is_wrong and place == "own loop with fewer steps":
                continue
        state, _ = opt.step(state, batch)
else:
    num_steps = -1 if is_wrong and place == "fit" else 4
    so.fit(opt, state, batches(), num_steps=num_steps, evaluate=(evaluate, 2), progress=False)
