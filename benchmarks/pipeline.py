"""What a pipeline costs: memory against micro-batches, program size, work left for each pass, and
time.

Run: python benchmarks/pipeline.py [--rounds 10] [--part passes|memory|program|recomputing|keeping]

A part keeps what is known of the others.

Memory: temporary bytes of the compiled step at a fixed micro-batch, beside the activations that the
schedule predicts. Claim: flat within 5% in the number of micro-batches, but for gpipe that keeps
what its backward pass needs. Program: bytes of the compiled program and seconds to compile. Claim:
from 8 to 64 micro-batches within 15%. Passes: floating-point operations of a block's passes. Claim:
backward and weight pass repeat nothing, so zero-bubble schedules gain what their tables say; the
lockstep program's time is worked out from these operations. And the bytes that a block leaves for
its later passes: what the forward leaves, what of it a weight pass reads, and what the backward
leaves for that besides. Time: `so.hybrid` against (a) autodiff through a hand-written scanned gpipe
with rematerialised stages, (b) the same model, batch and micro-batch without a pipeline, `so.ddp`
on as many devices. Claim: at most 1.10 of (b), where both recompute the same, at both of two sizes.
Control and test are interleaved in one run. All fake devices share one core, and what is counted
are the seconds that it works for this process, so this compares the work that is done, not bubbles:
an idle stage costs nothing here, if it does no work. Memory is not given back between steps, so
fresh pages do not count.
"""

import argparse
import functools
import json
import time
from pathlib import Path

from common import fake_devices, interleave, keep_memory, median_ratio, one_core, write_json

fake_devices(8)
one_core()
keep_memory()

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

import shardopt as so
from shardopt.models import gpt
from shardopt.remat._split_backward import split_backward

STAGES = 4
ROWS = 2
SCHEDULES = {
    "gpipe": so.schedules.gpipe,
    "eager_one_f_one_b": so.schedules.eager_one_f_one_b,
    "one_f_one_b": so.schedules.one_f_one_b,
    "interleaved, 2 chunks": functools.partial(so.schedules.interleaved, num_chunks=2),
    "zero_bubble": so.schedules.zero_bubble,
    "zero_bubble_2": so.schedules.zero_bubble_2,
    "zero_bubble_v": so.schedules.zero_bubble_v,
    "dual_pipe_v": so.schedules.dual_pipe_v,
    "zero_bubble_lockstep": so.schedules.zero_bubble_lockstep,
    "interleaved zero bubble": functools.partial(so.schedules.zero_bubble, num_chunks=2),
    "looped_breadth_first, 2 chunks": functools.partial(
        so.schedules.looped_breadth_first, num_chunks=2
    ),
    "zero_bubble_v, sent ahead": so.schedules.send_ahead(so.schedules.zero_bubble_v),
}
SMALL = gpt.config(vocab_size=64, dim=64, num_layers=8, num_heads=4, max_length=64)
LARGE = gpt.config(vocab_size=256, dim=256, num_layers=8, num_heads=4, max_length=128)
CONSOLE = Console(width=150)


def strategy(schedule, micro_batches, *, remat, config):
    mesh = so.make_mesh(pipeline=STAGES, devices=jax.devices()[:STAGES])
    return so.hybrid(
        optax.sgd(0.01),
        mesh,
        gpt.model(config),
        schedule=schedule,
        micro_batches=micro_batches,
        placement="ddp",
        remat=remat,
    )


def compiled(schedule, micro_batches, *, remat, config=SMALL):
    opt = strategy(schedule, micro_batches, remat=remat, config=config)
    params = jax.eval_shape(lambda rng: gpt.init(config, rng), jax.random.key(0))
    batch = {
        "tokens": jax.ShapeDtypeStruct((ROWS * micro_batches, config.max_length + 1), jnp.int32)
    }
    start = time.perf_counter()
    program = opt.step.lower(opt.abstract_state(params), batch).compile()
    return program, time.perf_counter() - start, opt.config.schedule


def memory():
    """Temporary memory in units of one activation [rows, length, dim]."""
    counts = (4, 8, 16, 32)
    unit = ROWS * SMALL.max_length * SMALL.dim * 4
    table = Table(
        "schedule",
        "keeps",
        *(f"M={m}" for m in counts),
        "predicted peak activations",
        title="Temporary memory, activations",
    )
    results = {}
    for remat in (True, False):
        for name, schedule in SCHEDULES.items():
            found = []
            peaks = []
            for m in counts:
                program, _, built = compiled(schedule, m, remat=remat)
                found.append(program.memory_analysis().temp_size_in_bytes / unit)
                peaks.append(max(built.peak_activations))
            keeps = "inputs" if remat else "what B needs"
            table.add_row(name, keeps, *(f"{x:.0f}" for x in found), " ".join(map(str, peaks)))
            results[f"{name}, {keeps}"] = {
                "micro_batches": counts,
                "temporary": found,
                "peak_activations": peaks,
            }
    CONSOLE.print(table)
    return results


def program_size():
    table = Table(
        "schedule", "M=8", "M=64", "ratio", "compile s, M=8", "M=64", title="Program, bytes of code"
    )
    results = {}
    for name, schedule in SCHEDULES.items():
        small, seconds_small, _ = compiled(schedule, 8, remat=False)
        large, seconds_large, _ = compiled(schedule, 64, remat=False)
        sizes = [
            one.memory_analysis().generated_code_size_in_bytes or len(one.as_text())
            for one in (small, large)
        ]
        ratio = sizes[1] / sizes[0]
        table.add_row(
            name,
            f"{sizes[0]:,}",
            f"{sizes[1]:,}",
            f"{ratio:.3f}",
            f"{seconds_small:.1f}",
            f"{seconds_large:.1f}",
        )
        results[name] = {"bytes": sizes, "ratio": ratio, "seconds": [seconds_small, seconds_large]}
    CONSOLE.print(table)
    return results


def passes():
    """Operations of each pass of a block, and what they make of each schedule's lockstep program."""
    model = gpt.model(LARGE)
    blocks = jax.eval_shape(lambda rng: gpt.init(LARGE, rng), jax.random.key(0))["blocks"]
    leaves, treedef = jax.tree.flatten(
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), blocks)
    )
    x = [jax.ShapeDtypeStruct((ROWS, LARGE.max_length, LARGE.dim), jnp.float32)]
    block = split_backward(
        lambda w, x: [model.block(treedef.unflatten(w), x[0])],
        leaves,
        x,
        trained=range(len(leaves)),
    )
    residuals = list(block.residuals)
    for_weight = [residuals[i] for i in block.weight_residuals]

    def operations(f, *args):
        return jax.jit(f).lower(*args).compile().cost_analysis()["flops"]

    found = {
        "forward": operations(block.forward, leaves, x),
        "backward": operations(block.backward, leaves, residuals, x),
        "weight": operations(block.weight, leaves, for_weight, list(block.deferred)),
        "backward and weight in one": operations(block.both, leaves, residuals, x),
    }
    found["repeated"] = (found["backward"] + found["weight"]) / found[
        "backward and weight in one"
    ] - 1
    table = Table(*found, title="Floating-point operations of a block's passes")
    table.add_row(
        *(f"{value:,.0f}" for value in list(found.values())[:-1]), f"{found['repeated']:.2%}"
    )
    CONSOLE.print(table)
    size = lambda leaves: sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    left = {
        "forward": size(residuals),
        "forward for weight": size(for_weight),
        "backward": size(block.deferred),
    }
    CONSOLE.print("bytes left for later passes:", left)

    f, b, w = (found[kind] / found["forward"] for kind in ("forward", "backward", "weight"))
    title = f"Lockstep time by these operations, in forwards, S={STAGES}"
    counts = (8, 32)
    table = Table(
        "schedule", *(f"M={m}" for m in counts), *(f"bubble, M={m}" for m in counts), title=title
    )
    times = {}
    for name, schedule in SCHEDULES.items():
        built = [schedule(STAGES, m) for m in counts]
        # a tick of two chunks is half a stage long
        spent = [
            one.program_time(forward=f, backward=b, weight=w) / one.num_chunks for one in built
        ]
        bubbles = [1 - m * (f + b + w) / t for m, t in zip(counts, spent, strict=True)]
        table.add_row(name, *(f"{t:.1f}" for t in spent), *(f"{bubble:.1%}" for bubble in bubbles))
        times[name] = {"micro_batches": counts, "time": spent, "bubble": bubbles}
    CONSOLE.print(table)
    return {"operations": found, "bytes": left, "lockstep": times}


def gpipe_by_autodiff(params, micro_batches, config):
    """A scanned gpipe: fill and drain by ppermute, every stage rematerialised, jax.grad through it
    all.
    """
    model = gpt.model(config)
    mesh = so.make_mesh(pipeline=STAGES, devices=jax.devices()[:STAGES])
    specs = {name: P("pipeline") if name == "blocks" else P() for name in params}

    def local(params, batch):
        stage = jax.lax.axis_index("pipeline")
        cut = jax.tree.map(lambda x: x.reshape(micro_batches, ROWS, *x.shape[1:]), batch)

        @jax.checkpoint
        def run_stage(blocks, x):
            return jax.lax.scan(lambda x, block: (model.block(block, x), None), x, blocks)[0]

        def loss(params):
            outer = {name: leaf for name, leaf in params.items() if name != "blocks"}
            x = jax.vmap(lambda rows: model.embed(outer, rows))(cut)

            def tick(y, t):
                y = jax.lax.ppermute(y, "pipeline", [(s, s + 1) for s in range(STAGES - 1)])
                y = run_stage(
                    params["blocks"], jnp.where(stage == 0, x[jnp.minimum(t, micro_batches - 1)], y)
                )
                return y, y

            _, ys = jax.lax.scan(tick, jnp.zeros_like(x[0]), jnp.arange(micro_batches + STAGES - 1))
            losses = jax.vmap(lambda y, rows: model.loss(outer, y, rows))(ys[STAGES - 1 :], cut)
            return jnp.where(stage == STAGES - 1, losses.mean(), 0.0)

        value, grads = jax.value_and_grad(loss)(params)
        grads = {
            name: g if name == "blocks" else jax.lax.psum(g, "pipeline")
            for name, g in grads.items()
        }
        return jax.lax.psum(value, "pipeline"), grads

    differentiate = jax.shard_map(
        local, mesh=mesh, in_specs=(specs, P()), out_specs=(P(), specs), check_vma=False
    )

    def step(params, batch):
        value, grads = differentiate(params, batch)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), value

    on = {
        name: jax.tree.map(lambda _, name=name: NamedSharding(mesh, specs[name]), leaf)
        for name, leaf in params.items()
    }
    return jax.jit(step, donate_argnums=0, out_shardings=(on, None)), jax.device_put(params, on)


def timing(rounds, config, *, remat, micro_batches=8):
    params = jax.device_get(gpt.init(config, jax.random.key(0)))
    size = (ROWS * micro_batches, config.max_length + 1)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, size=size, dtype=np.int32)
    batch = {"tokens": tokens}
    runs = {}
    states = {}
    losses = {}

    def add(name, opt):
        states[name] = opt.init(params)

        def run():
            states[name], metrics = opt.step(states[name], batch)
            losses.setdefault(name, float(metrics["loss"]))
            return metrics, states[name]

        runs[name] = run

    plain = so.make_mesh(devices=jax.devices()[:STAGES])
    model = gpt.model(config)._replace(remat="full") if remat else gpt.model(config)
    add("plain", so.ddp(optax.sgd(0.01), plain, model, micro_batches=micro_batches // STAGES))
    for name, schedule in SCHEDULES.items():
        add(name, strategy(schedule, micro_batches, remat=remat, config=config))
    if remat:
        by_hand, hand_params = gpipe_by_autodiff(params, micro_batches, config)
        states["autodiff"] = hand_params

        def run_by_hand():
            states["autodiff"], value = by_hand(states["autodiff"], batch)
            losses.setdefault("autodiff", float(value))
            return value, states["autodiff"]

        runs["autodiff through gpipe"] = run_by_hand
    times = interleave(runs, rounds=rounds, warmup=1, clock=time.process_time)
    # they compute the same
    np.testing.assert_allclose(list(losses.values()), losses["plain"], rtol=1e-5)

    label = "recomputing" if remat else "keeping"
    title = (
        f"Seconds a step, {gpt.num_parameters(config):,} parameters, {micro_batches} micro-batches"
        f" of {ROWS} rows, {label}"
    )
    table = Table("", "median", "of plain", title=title)
    results = {}
    for name, seconds in times.items():
        of_plain = median_ratio(seconds, times["plain"])
        median = float(np.median(seconds))
        table.add_row(name, f"{median:.3f}", f"{of_plain:.3f}")
        results[name] = {"median_seconds": median, "of_plain": of_plain}
    CONSOLE.print(table)
    return {"parameters": gpt.num_parameters(config), "rounds": rounds, "runs": results}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--part", choices=("passes", "memory", "program", "recomputing", "keeping"))
    options = parser.parse_args()
    path = Path(__file__).parent / "results" / "pipeline.json"
    results = json.loads(path.read_text())["results"] if path.exists() else {}
    parts = {"passes": passes, "memory": memory, "program": program_size}
    for label, remat in (("recomputing", True), ("keeping", False)):
        parts[label] = lambda remat=remat: {
            size: timing(options.rounds, config, remat=remat)
            for size, config in (("small", SMALL), ("large", LARGE))
        }
    results.pop("time", None)
    for name, part in parts.items():
        if options.part in (None, name):
            results[name] = part()
            print("wrote", write_json(__file__, results))


if __name__ == "__main__":
    main()
