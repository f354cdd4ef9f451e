"""One of several processes with two devices each, which trains up to a step and saves:
`python worker_resume.py RANK PORT FOLDER/COUNT-STEPS-KIND`.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np
import optax

import shardopt as so

sys.path.insert(0, str(Path(__file__).parents[2]))
from support.rows import first_params, loss_fn, whole

rank = int(sys.argv[1])
port = sys.argv[2]
place = Path(sys.argv[3])
count, steps, kind = place.name.split("-")
count = int(count)
steps = int(steps)
jax.config.update("jax_num_cpu_devices", 2)
if count > 1:
    so.initialize(f"127.0.0.1:{port}", count, rank)


class Own:
    """The rows of this process, of one order for any number of processes."""

    def __init__(self):
        self.drawn = 0

    def __iter__(self):
        return self

    def __next__(self):
        batch = jax.tree.map(lambda leaf: leaf[rank::count], whole(self.drawn))
        self.drawn += 1
        return batch


class Stateful(Own):
    """The same rows; its state names the process, as the state of a grain loader does."""

    def get_state(self):
        return {"rank": rank, "drawn": self.drawn}

    def set_state(self, state):
        assert state["rank"] == rank, f"the state of process {state['rank']} came to {rank}"
        self.drawn = state["drawn"]


class Blocks(Own):
    """Rows whose global batch depends on the number of processes."""

    def __next__(self):
        batch = whole(self.drawn * count + rank, 16 // count)
        self.drawn += 1
        return batch


class FourEach(Own):
    """Four rows for each process, whatever their number, of one order."""

    def __next__(self):
        numbers = (4 * self.drawn + np.arange(4)) * count + rank
        self.drawn += 1
        return rows_of_numbers(numbers)


class BlocksOfFour(Own):
    """Four rows for each process, of a part of all rows that depends on the number of processes."""

    def __next__(self):
        numbers = 4 * self.drawn + np.arange(4) + 480 // count * rank
        self.drawn += 1
        return rows_of_numbers(numbers)


def rows_of_numbers(numbers):
    rows = [jax.tree.map(lambda leaf, n=n: leaf[n % 16], whole(n // 16)) for n in numbers]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)


batches = {
    "own": Own,
    "four each": FourEach,
    "blocks of four": BlocksOfFour,
    "stateful": Stateful,
    "blocks": Blocks,
    "global": lambda: so.GlobalRows(map(whole, range(99))),
}[kind]()
opt = so.fsdp(optax.adam(0.05), so.make_mesh(), loss_fn, min_shard_elements=1)
gather = jax.jit(lambda w: w, out_shardings=jax.NamedSharding(opt.mesh, jax.P()))
try:
    with so.Checkpoints(place.parent, every=4, keep=2, resume=True) as checkpoints:
        result = so.fit(
            opt,
            opt.init(first_params()),
            batches,
            num_steps=steps,
            checkpoints=checkpoints,
            progress=False,
        )
    print(json.dumps([result.step, np.asarray(gather(result.state.params["w"])).tolist()]))
except ValueError as error:
    print(json.dumps(["refused", str(error)]))
