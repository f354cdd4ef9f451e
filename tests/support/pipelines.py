"""The tests of pipelines share schedules by name, sizes that schedules take, and models whose
blocks can be cut.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardopt as so
from shardopt.models import gpt
from support.host import host_params
from support.mean_of import mean_of
from support.problems import Problem, reduce


def v_shaped(num_stages: int, num_micro_batches: int) -> so.schedules.Schedule:
    """A schedule of one's own: down the stages and up again, weight gradients last of all."""
    down, up = ([f"{{}}{m}.{chunk}" for m in range(num_micro_batches)] for chunk in (0, 1))
    words = [("F", down), ("F", up), ("B", up), ("B", down), ("W", up), ("W", down)]
    order = " ".join(word.format(letter) for letter, several in words for word in several)
    stages = range(num_stages)
    return so.schedules.from_order(
        [order] * num_stages, stage_of=[*stages, *reversed(stages)], name="v_shaped"
    )


SCHEDULES = {
    "gpipe": so.schedules.gpipe,
    "eager_one_f_one_b": so.schedules.eager_one_f_one_b,
    "one_f_one_b": so.schedules.one_f_one_b,
    "interleaved": functools.partial(so.schedules.interleaved, num_chunks=2),
    "zero_bubble": so.schedules.zero_bubble,
    "zero_bubble_lockstep": so.schedules.zero_bubble_lockstep,
    "zero_bubble_lockstep_2": functools.partial(so.schedules.zero_bubble_lockstep, num_chunks=2),
    "interleaved_zero_bubble": functools.partial(so.schedules.zero_bubble, num_chunks=2),
    "zero_bubble_2": so.schedules.zero_bubble_2,
    "zero_bubble_v": so.schedules.zero_bubble_v,
    "dual_pipe_v": so.schedules.dual_pipe_v,
    "looped_breadth_first": so.schedules.looped_breadth_first,
    "v_shaped": v_shaped,
    "zero_bubble_v_ahead": so.schedules.send_ahead(so.schedules.zero_bubble_v),
}
IN_GROUPS = ("interleaved", "zero_bubble_lockstep_2", "interleaved_zero_bubble")
"""Those that take multiples of the stages only."""
MICRO_BATCHES = {
    "one": lambda stages: 1,
    "fewer": lambda stages: stages - 1,
    "equal": lambda stages: stages,
    "many": lambda stages: 2 * stages,
    "odd": lambda stages: stages + 3,
}


def micro_batches(schedule: str, how_many: str, stages: int) -> int:
    """Return how many micro-batches; the nearest number that the schedule takes."""
    count = MICRO_BATCHES[how_many](stages)
    return max(round(count / stages), 1) * stages if schedule in IN_GROUPS else count


def block_problem(
    name: str, *, weighted: bool, num_blocks: int, rows: int, steps: int = 3
) -> Problem:
    """Build a `Problem`, in float64 where that is on, whose loss is a `BlockModel`.

    Rows differ in scale and weight.
    """
    params, model, rules, make_batch = BLOCK_MODELS[name](weighted, num_blocks)
    draw = np.random.default_rng(11)
    dtype = jnp.float64 if jax.config.jax_enable_x64 else jnp.float32

    def wide(x):
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    batches = [jax.tree.map(wide, make_batch(draw, rows)) for _ in range(steps)]

    def reference(params, batch):
        loss = model.loss_fn(params, batch)
        return mean_of(loss)

    return Problem(jax.tree.map(wide, jax.device_get(params)), model, reference, rules, batches)


def _rows(draw, rows, **widths):
    """Rows of growing scale, weights between 0 and 2 with whole rows of zero."""
    scale = np.linspace(0.2, 2.0, rows)[:, None]
    weights = np.maximum(0.0, draw.uniform(-0.5, 2.0, size=rows))
    weights[-1] = 1.0  # not all of them zero
    return {name: scale * draw.normal(size=(rows, width)) for name, width in widths.items()} | {
        "weights": weights
    }


def _gpt(weighted, num_blocks):
    config = gpt.config(
        vocab_size=16, dim=8, num_layers=num_blocks, num_heads=2, mlp_multiple=2, max_length=8
    )
    params = jax.tree.map(lambda x: x * 2, host_params(gpt.init, config, seed=1))

    def make(draw, rows):
        batch = {"tokens": draw.integers(0, 16, size=(rows, 5))}
        if weighted:
            batch["weights"] = np.maximum(0.0, draw.uniform(-0.5, 2.0, size=(rows, 4)))
            batch["weights"][-1] = 1.0
        return batch

    return params, gpt.model(config), gpt.rules, make


def _nnx(weighted, num_blocks):
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.LayerNorm(8, rngs=rngs)
            self.up = nnx.Linear(8, 16, rngs=rngs)
            self.down = nnx.Linear(16, 8, rngs=rngs)

        def __call__(self, x):
            return x + self.down(nnx.gelu(self.up(self.norm(x)))) / 4

    draw = np.random.default_rng(5)

    def drawn(module, *stacked):
        """Return the graph of a module, and its parameters as they begin: drawn on the host,
        without a program for each.
        """

        def leaf(path, shape):
            if len(shape.shape) == 1:
                return np.full(
                    (*stacked, *shape.shape), "scale" in jax.tree_util.keystr(path), shape.dtype
                )
            return (draw.normal(size=(*stacked, *shape.shape)) / shape.shape[0] ** 0.5).astype(
                shape.dtype
            )

        graph, shapes = nnx.split(nnx.eval_shape(module))
        return graph, jax.tree.map_with_path(leaf, shapes)

    graph, stacked = drawn(lambda: Block(nnx.Rngs(0)), num_blocks)
    read, enter = drawn(lambda: nnx.Linear(6, 8, rngs=nnx.Rngs(0)))
    model = so.BlockModel(
        embed=lambda outer, batch: nnx.merge(read, outer["enter"])(batch["x"]),
        block=lambda state, x: nnx.merge(graph, state)(x),
        loss=lambda outer, x, batch: reduce(
            ((x @ outer["leave"] - batch["y"]) ** 2).mean(-1), batch, weighted
        ),
    )
    params = {
        "blocks": stacked,
        "enter": enter,
        "leave": (draw.normal(size=(8, 4)) / 2).astype(np.float32),
    }
    rules = [("^blocks/up/kernel", P(None, "tensor")), ("^blocks/down/kernel", P("tensor"))]
    return params, model, rules, functools.partial(_rows, x=6, y=4)


def _pytree(weighted, num_blocks):
    """Odd sizes, scalars, tied ends, an integer weight in every block, and a pytree that travels."""
    draw = np.random.default_rng(3)
    params = {
        "blocks": {
            "w": [
                draw.normal(size=(num_blocks, 5, 12)) * 0.4,
                draw.normal(size=(num_blocks, 12, 5)) * 0.3,
            ],
            "b": np.zeros((num_blocks, 12)),
            "gate": np.full((num_blocks,), 0.5),
            "shift": np.arange(num_blocks, dtype=np.int32) % 3,
        },
        "ends": (draw.normal(size=(7, 5)) * 0.4, np.zeros(())),
        "unused": np.ones((3,)),
        "table": draw.normal(size=(4, 5)),
    }

    def embed(outer, batch):
        x = batch["x"] @ outer["ends"][0]
        return {
            "h": x + outer["table"][batch["kind"]],
            "kind": batch["kind"],
            "sum": jnp.zeros(x.shape[:1]),
        }

    def block(w, x):
        hidden = jnp.tanh(x["h"] @ w["w"][0] + w["b"][None, :])
        h = x["h"] + w["gate"] * (hidden @ w["w"][1])
        return {
            "h": h,
            "kind": (x["kind"] + w["shift"]) % 4,
            "sum": x["sum"] + h[:, 0] * (x["kind"] == 1),
        }

    def loss(outer, x, batch):
        out = x["h"] @ outer["ends"][0].T + outer["ends"][1] + x["sum"][:, None] / 8
        return reduce(
            ((out - batch["x"]) ** 2).mean(-1) + outer["table"][x["kind"], 0] ** 2, batch, weighted
        )

    def make(draw, rows):
        return _rows(draw, rows, x=7) | {"kind": draw.integers(0, 4, size=(rows,)).astype(np.int32)}

    model = so.BlockModel(embed, block, loss)
    rules = [
        ("^blocks/w/0", P(None, "tensor")),
        ("^blocks/b", P("tensor")),
        ("^blocks/w/1", P("tensor")),
    ]
    return jax.tree.map(np.asarray, params), model, rules, make


BLOCK_MODELS = {"gpt": _gpt, "nnx": _nnx, "pytree": _pytree}
