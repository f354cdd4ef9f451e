"""Mixtures of experts by the real TPU compiler, without a TPU: memory, bytes sent and flops beside
what is stated.

    python benchmarks/experts_pod.py [again] [WORDS ...] [--maxtext PYTHON]

Mixtral 8x7B on 64 chips, its experts sharded by fsdp alone and over an expert axis, and
DeepSeek-V3's blocks on 4096: a row of 4096 tokens on each chip, fp32 masters, AdamW with clipping
at 1, bfloat16 products, gathers and reduce-scatters, every block recomputed. `again` predicts again
what has been compiled. With PYTHON (see beside_maxtext.py) MaxText compiles Mixtral beside: the
same model, tokens and optimizer, its own mixture (`sparse_matmul`, megablox), dropless. WORDS
choose rows by parts of their names. A program takes minutes to compile, and is kept in
results/experts_pod.json as soon as it is there. "left_to_xla" there are the same steps before
strategies kept XLA from casting all blocks before its loops, and from scattering the gradients of
the head last.

Flops: of a chip and step. Dense products are counted in the compiled text, each kernel of experts
as the rows that come where loads are equal (its grid has as many tiles as there are such rows,
which the program reads when it runs; tiles that two experts share are `tile_overlap`), splash by
its tiles. Stated are those of `so.planning`: of the experts that a token goes through, remat
included, attention as splash computes it; active are the same with attention as it is defined.
"""

import argparse
import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from beside_maxtext import Row as MaxTextRow
from beside_maxtext import compile_maxtext, peak, read
from common import commit, write_json

RESULTS = Path(__file__).parent / "results" / "experts_pod.json"
LENGTH = 4096


class Row(NamedTuple):
    """What is compiled; a row of LENGTH tokens on each chip."""

    model: str
    topology: str
    expert: int = 1
    replica: int = 1

    @property
    def name(self) -> str:
        """Return it in words."""
        replica = f" replica={self.replica}" if self.replica > 1 else ""
        return f"{self.model} {self.topology} expert={self.expert}{replica}"

    @property
    def beside(self) -> MaxTextRow:
        """Return the row as beside_maxtext.py has it."""
        return MaxTextRow(self.topology, LENGTH, 1, model=self.model)


TABLE = (
    Row("mixtral-8x7b", "v5p:4x4x4"),
    Row("mixtral-8x7b", "v5p:4x4x4", 8),
    Row("mixtral-8x7b", "v6e:8x8"),
    Row("mixtral-8x7b", "v6e:8x8", 8),
    # 512 divides a dim of each of its weights, 4096 of few
    Row("deepseek-v3", "v5p:16x16x16", 64, 8),
)


def shape_of(row: Row):
    """Return the sizes, as the planner has them."""
    from shardopt.planning._models import find_model

    return dataclasses.replace(find_model(row.model), length=LENGTH)


def config_of(row: Row):
    """Return the model of that shape."""
    import jax.numpy as jnp

    from shardopt.models import decoder, moe

    shape = shape_of(row)
    sizes = {
        name: getattr(shape, name)
        for name in ("vocab_size", "dim", "num_layers", "num_heads", "num_experts")
    }
    sizes |= {
        "hidden": shape.hidden,
        "top_k": shape.top_k,
        "chunk": shape.expert_chunk,
        "dtype": jnp.bfloat16,
    }
    if shape.latent is None:
        return moe.config(**sizes, num_kv_heads=shape.kv_heads, balance=None)
    query, key, rope = shape.latent
    latent = decoder.LatentConfig(
        query=query, key=key, nope=shape.width, rope=rope, value=shape.width
    )
    router = {
        "score": "sigmoid",
        "groups": (8, 4),
        "scale": 2.5,
        "shared_hidden": shape.shared_experts * shape.hidden,
    }
    return moe.config(**sizes, **router, latent=latent, balance="bias")


def optimizer():
    """Return AdamW as in beside_maxtext.py."""
    import optax

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(3e-5, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1),
    )


def compile_row(row: Row) -> dict[str, Any]:
    """Return what the compiler says of the step."""
    import jax
    import jax.numpy as jnp
    from step_times import of_report

    import shardopt as so
    from shardopt.models import moe

    config = config_of(row)
    params = jax.eval_shape(lambda: moe.init(config, jax.random.key(0)))
    batch = {"tokens": jax.ShapeDtypeStruct((row.beside.chips, LENGTH + 1), jnp.int32)}
    half = {"gather_dtype": jnp.bfloat16, "reducer": so.reducers.exact(jnp.bfloat16)}
    report = so.planning.aot(
        lambda mesh: so.fsdp(
            optimizer(),
            mesh,
            moe.model(config, remat="full"),
            **half,
            rules=moe.rules,
        ),
        params,
        batch,
        topology=row.topology,
        expert=row.expert,
        replica=row.replica,
    )
    folder = os.environ.get("EXPERTS_POD_HLO")
    if folder:
        (Path(folder) / f"{row.name.replace(' ', '_')}.txt").write_text(report.text)
    step = of_report(report)
    return {
        "compile_seconds": report.compile_seconds,
        "memory": report.memory._asdict(),
        "hbm_bytes": report.hbm_bytes,
        "dense_flops": report.flops,
        "kernels": kernels(report.text, row),
        "sent": sent(report, row),
        "seconds": step.total,
        "compute": step.compute,
        "exposed": step.exposed,
        "dearest": [one._asdict() for one in step.operations[:12]],
        "mesh": report.mesh_shape,
    }


def kernels(text: str, row: Row) -> dict[str, dict[str, float]]:
    """Return the Pallas kernels of the program by name: calls in a step, flops of all of them, and
    the most they could be.
    """
    from step_times._attention_kernels import kernel_flops

    from shardopt.hlo._hlo_text import operands, parse
    from shardopt.hlo._walk import callees, trip_count

    shape = shape_of(row)
    module = parse(text)
    found = {}
    tokens = min(LENGTH, shape.expert_chunk or LENGTH)

    def walk(name: str, times: int) -> None:
        lines = module.computations.get(name, ())
        shapes = {line.name: line.shape for line in lines}
        for line in lines:
            if (
                line.opcode == "custom-call"
                and 'custom_call_target="tpu_custom_call"' in line.arguments
            ):
                stem = re.sub(r"[.\d]+$", "", line.name)
                inputs = [shapes[one] for one in operands(line) if one in shapes]
                most = kernel_flops(line, inputs)
                # megablox and ragged_dot, whose names jax and XLA choose
                of_experts = most and not stem.startswith("splash")
                each = 2.0 * tokens * shape.top_k * shape.dim * shape.hidden if of_experts else most
                one = found.setdefault(stem, {"calls": 0, "flops": 0.0, "most": 0.0})
                one["calls"] += times
                one["flops"] += times * each
                one["most"] += times * most
            turns = (trip_count(module, name, line) or 1) if line.opcode == "while" else 1
            for callee in callees(line):
                walk(callee, times * turns)

    walk(module.entry, 1)
    return found


def tile_overlap(
    tokens: float, *, num_experts: int, top_k: int, devices: int = 1, tile: int = 128
) -> float:
    """Return the expected flops of expert kernels over the flops of their rows.

    Kernels work on tiles of m rows. A tile that contains the border between two experts is
    multiplied with the weights of both. A device has N K / X rows of E / X experts, and their E / X
    - 1 borders are at random positions: 1 + (E / X - 1) (m - 1) X / (N K).
    """
    return 1 + (num_experts // devices - 1) * (tile - 1) * devices / (tokens * top_k)


def compared(row: Row, facts: dict[str, Any]) -> dict[str, Any]:
    """Return what is stated beside what was compiled."""
    import jax.numpy as jnp
    from step_times import step_flops

    from shardopt.planning import ParallelLayout, predict
    from shardopt.planning._layout import stored_bytes
    from shardopt.planning._topologies import parse_topology

    chips = row.beside.chips
    half = {"gather_dtype": jnp.bfloat16, "scatter_dtype": jnp.bfloat16}
    layout = ParallelLayout(
        row.replica, chips // row.expert // row.replica, expert=row.expert, remat=True, **half
    )
    work = shape_of(row).workload()
    chip = parse_topology(row.topology)[0]
    told = predict(work, layout, hardware=chip, batch_size=chips, tx=optimizer())
    arguments = told.memory.params + told.memory.opt_state + stored_bytes((1, LENGTH + 1), 4)
    splash = sum(one["flops"] for name, one in facts["kernels"].items() if "splash" in name)
    flops = facts["dense_flops"] + sum(one["flops"] for one in facts["kernels"].values())
    stated = step_flops(work, layout, batch_size=chips, on_tpu=shape_of(row))
    active = step_flops(work, layout, batch_size=chips)
    shape = shape_of(row)
    attention = 4 * work.num_blocks * work.attention.flops  # forwards twice and backwards
    tokens = row.expert * min(LENGTH, shape.expert_chunk or LENGTH)
    # of ragged_dot and of megablox
    tile = 128 if row.topology.startswith("v5p") else 512
    sizes = {"num_experts": shape.num_experts, "top_k": shape.top_k, "devices": row.expert}
    return {
        "arguments_ratio": arguments / facts["memory"]["arguments"],
        "memory_ratio": told.memory.total / peak(facts),
        "predicted_memory": told.memory._asdict(),
        "flops": flops,
        "flops_ratio": flops / stated,
        "active_ratio": flops / active,
        "weights_ratio": (flops - splash) / (active - attention),
        "tile_overlap": tile_overlap(tokens, **sizes, tile=tile),
        "predicted_seconds": told.time._asdict() | {"total": told.time.total},
        "stated": {
            f"{one.kind} of {one.what} over {' x '.join((one.axis, *one.also))}": one.wire_bytes(
                told.mesh
            )
            for one in told.transfers
        },
    }


def sent(report, row: Row) -> dict[str, dict[str, float]]:
    """Return calls and bytes that a chip sends, by kind and axes.

    Of ragged exchanges those of as many rows from all chips.
    """
    shape = shape_of(row)
    found = {}
    rows = min(LENGTH, shape.expert_chunk or LENGTH) * shape.top_k
    for one in report.collectives:
        axes = [axis for axis in one.axes or () if report.mesh_shape[axis] > 1]
        bytes_sent = one.wire_bytes
        if one.kind == "ragged-all-to-all":
            room = int(re.search(r"\[(\d+)", one.shapes[0])[1])
            bytes_sent = bytes_sent * rows / room
        into = found.setdefault(
            f"{one.kind} over {' x '.join(axes)}", {"calls": 0, "wire_bytes": 0.0}
        )
        into["calls"] += one.calls
        into["wire_bytes"] += bytes_sent * one.calls
    return found


def main() -> None:
    """Compile what is not there yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="again, or parts of the names of rows")
    parser.add_argument("--maxtext", help="the Python of an environment with MaxText")
    parser.add_argument("--anew", action="store_true", help="compile what is there already, too")
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    words = [word for word in options.words if word != "again"]
    results = json.loads(RESULTS.read_text())["results"] if RESULTS.exists() else {}
    for row in TABLE:
        if not all(word in row.name for word in words):
            continue
        found = results.setdefault(row.name, {})
        if "shardopt" not in found or options.anew:
            if "again" in options.words:
                continue
            found["shardopt"] = compile_row(row) | {"commit": commit()}
        if options.maxtext and "mixtral" in row.name and ("maxtext" not in found or options.anew):
            more = (
                [f"ici_expert_parallelism={row.expert}", "allow_split_physical_axes=true"]
                if row.expert > 1
                else []
            )
            facts, text = compile_maxtext(row.beside, options.maxtext, more=more)
            found["maxtext"] = facts | (read(text, facts["mesh"], row.beside) if text else {})
        found["shardopt"] |= compared(row, found["shardopt"])
        results[row.name] = found
        results = {one.name: results[one.name] for one in TABLE if one.name in results}
        write_json(__file__, results, RESULTS)
        print(told(row.name, found), flush=True)


def cells(name: str, one: dict[str, Any]) -> list[str]:
    """Return the line of the table in docs/notes/experts.md."""
    summed = lambda kinds: sum(
        to["wire_bytes"] for key, to in one["sent"].items() if key.startswith(kinds)
    )
    gathered = summed(("all-gather", "reduce-scatter", "all-reduce"))
    exchanged = summed("ragged-all-to-all")
    stated = sum(sent for key, sent in one["stated"].items() if "all-to-all" not in key)
    tokens = one["stated"].get("all-to-all of tokens over expert", 0.0)
    return [
        name,
        f"{peak(one) / 1e9:.2f} of {one['hbm_bytes'] / 1e9:.0f}",
        f"{one['memory_ratio']:.3f}",
        f"{one['flops'] / 1e12:.0f} ({1 / one['flops_ratio']:.3f})",
        f"{one['weights_ratio']:.3f}",
        f"{one['tile_overlap']:.2f}",
        f"{gathered / 1e9:.1f} ({stated / gathered:.3f})",
        f"{exchanged / 1e9:.2f} ({tokens / exchanged:.3f})" if exchanged else "",
        "" if exchanged else f"{one['seconds'] * 1e3:.0f}",
    ]


def told(name: str, found: dict[str, Any]) -> str:
    """Return a row in words."""
    one = found["shardopt"]
    lines = [
        f"{name}: {peak(one) / 1e9:.2f} GB (formula {one['memory_ratio']:.3f}, arguments"
        f" {one['arguments_ratio']:.4f}), {one['flops'] / 1e12:.1f} Tflop ({one['flops_ratio']:.3f}"
        f" of stated), {one['seconds']:.3f} s, {one['exposed']:.3f} exposed, compiled in"
        f" {one['compile_seconds']:.0f} s"
    ]
    if "seconds" in found.get("maxtext", {}):
        other = found["maxtext"]
        lines.append(
            f"  MaxText: {peak(other) / 1e9:.2f} GB, {other['seconds']:.3f} s,"
            f" {other['exposed']:.3f} exposed"
        )
    elif "maxtext" in found:
        lines.append(f"  MaxText: {found['maxtext'].get('error')}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
