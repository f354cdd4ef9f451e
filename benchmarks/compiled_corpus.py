"""The compiled programs that are proved: every row of `same_programs`, and transformers with
positions and experts split. And patterns that compilers got wrong.

A program is the text that XLA was given, the text that it compiled, and where the arguments and
results live.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import same_programs as sp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from same_programs import Problem, Row, mesh_of

import shardopt as so
from shardopt.hlo._hlo_text import parse
from shardopt.hlo.proof._interpret import Interpreter
from shardopt.hlo.proof._lines import read_shape
from shardopt.hlo.proof._text import full_text, lowered_text, text_of
from shardopt.models import gpt, moe
from shardopt.planning import topology_devices

TOPOLOGIES = {"cpu": None, "v5p": "v5p:2x2x2", "v6e": "v6e:2x4", "h100": "h100:8"}
"""Eight devices of each platform."""
PATTERN = "scatters summed in a scan, openxla/xla 49143"
ON_CHIPS = (
    PATTERN,
    "ddp, adamw",
    "zero1, adamw",
    "zero2",
    "fsdp, adamw",
    "hybrid one_f_one_b",
    "hybrid zero_bubble, fsdp",
    "gpt",
    "moe",
)
"""The rows that are compiled for chips: how their names begin. cuDNN refuses the heads of four
numbers of the last two.
"""
ON_PLATFORM = {"cpu": "", "h100": ON_CHIPS[:-2]}
SHAPE = {"vocab_size": 32, "dim": 16, "num_layers": 2, "num_heads": 4}
GPT = gpt.config(**SHAPE, max_length=16)
MOE = moe.config(
    **SHAPE, num_kv_heads=2, num_experts=4, hidden=8, shared_hidden=4, balance_rate=0.01
)


class Program(NamedTuple):
    """A compiled program.

    Attributes:
      name: row and step.
      text: text of the partitioned module, with all constants.
      inputs: the sharding of each parameter, as HLO text.
      outputs: the sharding of each result.
      mesh: mesh axis to size.
      lowered: text of the program that XLA was given.
    """

    name: str
    text: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    mesh: dict[str, int]
    lowered: str


class Pattern(NamedTuple):
    """A program with the attributes of a strategy that `compiled_programs` reads."""

    mesh: Mesh
    step: Any

    def abstract_state(self, params: Any) -> Any:
        """Return the first argument of the step."""
        return params


def scatters_in_a_scan(mesh: Mesh) -> Any:
    """Return the step of openxla/xla 49143: a replicated sum of scatters of sharded rows."""
    rows = NamedSharding(mesh, P(None, "d"))
    replicated = NamedSharding(mesh, P())

    def sum_scatters(ids, values):
        def add(total, piece):
            total = total.at[piece[0]].add(piece[1])
            return jax.lax.with_sharding_constraint(total, replicated), None

        return jax.lax.scan(add, jnp.zeros((96, *values.shape[3:])), (ids, values))[0]

    return jax.jit(sum_scatters, in_shardings=rows, out_shardings=replicated)


def pattern_row(columns: tuple[int, ...] = (2, 16)) -> Row:
    """Return the row of the pattern, with small dims by default."""

    def make() -> Pattern:
        mesh = Mesh(np.array((sp.DEVICES or jax.devices())[:8]), "d")
        return Pattern(mesh, scatters_in_a_scan(mesh))

    ids = jax.ShapeDtypeStruct((2, 8, 8), jnp.int32)
    values = jax.ShapeDtypeStruct((2, 8, 8, *columns), jnp.float32)
    return Row(PATTERN, make, Problem(None, ids, values), evaluate=False)


def corpus_rows() -> Iterator[Row]:
    """Yield the pattern, the rows of all strategies, then those of transformers."""
    yield pattern_row()
    yield from sp.all_rows()
    yield from transformer_rows()


def transformer_rows() -> Iterator[Row]:
    """Yield transformers whose heads, vocabulary, positions, experts or matrices are split."""
    tokens = {name: jax.ShapeDtypeStruct((16, 16), jnp.int32) for name in ("tokens", "targets")}
    gpt_params = jax.eval_shape(lambda key: gpt.init(GPT, key), jax.random.key(0))
    gpt_problem = Problem(gpt.model(GPT), gpt_params, tokens)
    untied = gpt.config(**SHAPE, max_length=16, tied=False)
    problems = {
        "gpt": gpt_problem,
        "gpt remat": gpt_problem._replace(loss_fn=gpt.model(GPT, remat="full")),
        "gpt untied": Problem(
            gpt.model(untied),
            jax.eval_shape(lambda key: gpt.init(untied, key), jax.random.key(0)),
            tokens,
        ),
        "moe": Problem(
            moe.model(MOE),
            jax.eval_shape(lambda key: moe.init(MOE, key), jax.random.key(0)),
            tokens,
        ),
    }
    numbers = so.optimizers.muon_dimension_numbers(gpt.matrices)
    muon = lambda: optax.contrib.muon(0.01, muon_weight_dimension_numbers=numbers)
    soap = lambda: so.optimizers.soap(0.01, matrices=gpt.matrices)
    experts = {"rules": moe.rules}
    rows = [
        ("gpt", "ddp", {"data": 8}, {}),
        ("gpt", "ddp", {"data": 4, "tensor": 2}, {"rules": gpt.rules, "micro_batches": 2}),
        ("gpt", "zero1", {"data": 2, "tensor": 4}, {"rules": gpt.rules}),
        ("gpt", "zero2", {"data": 4, "tensor": 2}, {"rules": gpt.rules, "micro_batches": 2}),
        ("gpt", "fsdp", {"data": 4, "tensor": 2}, {"rules": gpt.rules}),
        ("gpt remat", "fsdp", {"data": 2, "tensor": 4}, {"rules": gpt.rules}),
        (
            "gpt",
            "fsdp",
            {"replica": 2, "data": 2, "tensor": 2},
            {"rules": gpt.rules, "gather_dtype": jnp.bfloat16},
        ),
        ("gpt", "fsdp", {"data": 2, "context": 4}, {}),
        (
            "gpt",
            "zero1",
            {"data": 2, "context": 2, "tensor": 2},
            {"rules": gpt.rules, "micro_batches": 2},
        ),
        ("gpt untied", "zero1", {"data": 4}, {"view": "global"}),
        (
            "gpt untied",
            "ddp",
            {"data": 4, "tensor": 2},
            {"rules": gpt.rules, "view": "global", "micro_batches": 2},
        ),
        ("gpt", "fsdp", {"data": 8}, {"tx": muon, "opt_state": "matrices"}),
        (
            "gpt",
            "zero1",
            {"data": 4, "tensor": 2},
            {"tx": muon, "rules": gpt.rules, "opt_state": "matrices"},
        ),
        ("gpt", "fsdp", {"data": 4}, {"tx": soap, "opt_state": "matrices"}),
        (
            "gpt",
            "hybrid",
            {"data": 2, "pipeline": 2, "tensor": 2},
            {"rules": gpt.rules, "micro_batches": 4},
        ),
        (
            "gpt",
            "hybrid",
            {"data": 4, "pipeline": 2},
            {"micro_batches": 4, "schedule": so.schedules.zero_bubble},
        ),
        ("moe", "fsdp", {"data": 2, "expert": 4}, experts),
        ("moe", "ddp", {"data": 4, "expert": 2}, experts | {"micro_batches": 2}),
        (
            "moe",
            "zero1",
            {"data": 2, "expert": 2, "tensor": 2},
            experts,
        ),
        (
            "moe",
            "hybrid",
            {"data": 2, "pipeline": 2, "expert": 2},
            experts | {"micro_batches": 2},
        ),
    ]
    for model, name, sizes, options in rows:
        options = {"tx": lambda: sp.OPTIMIZERS["adamw"], **options}
        words = [key for key in options if key not in ("tx", "rules")]
        mesh = " ".join(f"{axis}={size}" for axis, size in sizes.items())
        tx = options.pop("tx")
        label = (
            f"{model}"
            f" {name}{' soap' if tx is soap else ' muon' if tx is muon else ''}{', ' * bool(words)}{' '.join(words)},"
            f" {mesh}"
        )

        def make(name=name, sizes=sizes, options=options, tx=tx, problem=problems[model]):
            return sp.STRATEGIES[name](tx(), mesh_of(sizes), problem.loss_fn, **options)

        yield Row(label, make, problems[model], evaluate=name == "fsdp")


def programs(
    platform: str = "cpu", only: str = "", store: Path | None = None, every: int = 1
) -> Iterator[Program]:
    """Yield the programs of each so many rows of a platform, compiled or from the store.

    A row that the compiler refuses leaves a file with its error in the store, and is not compiled
    again.
    """
    names = ON_PLATFORM.get(platform, ON_CHIPS)
    rows = [row for row in corpus_rows() if only in row.name and row.name.startswith(names)]
    for row in rows[::every]:
        if store is None:
            yield from (program for program, _ in compiled_programs(row, platform))
            continue
        folder = store / platform
        folder.mkdir(parents=True, exist_ok=True)
        stem = _file_name(row.name)
        error = folder / f"{stem}.error"
        stored = sorted(folder.glob(f"{stem}__*.json"))
        if not stored and not error.exists():
            stored = _stored(row, platform, folder / stem)
        yield from (Program(**json.loads(path.read_text())) for path in stored)


def _stored(row: Row, platform: str, path: Path) -> list[Path]:
    """Store the programs of a row, or the error of the compiler; return the files of the programs.

    While the compiler works there is a file that names the row, for the case that it ends the
    process.
    """
    compiling = path.parent / f"{path.name}.compiling"
    compiling.write_text(json.dumps({"row": row.name, "message": "It ended the process."}))
    files = []
    try:
        for program, _ in list(compiled_programs(row, platform)):
            files.append(path.parent / f"{_file_name(program.name)}.json")
            files[-1].write_text(json.dumps(program._asdict()))
    except Exception as refusal:  # a compiler of another version may refuse a row
        message = f"{type(refusal).__name__}: {refusal}"
        print(f"compiled_corpus: {row.name} for {platform}: {message[:300]}")
        error = {"row": row.name, "message": message}
        compiling.with_suffix(".error").write_text(json.dumps(error))
    compiling.unlink(missing_ok=True)  # another run may have the same folder
    return files


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "=,._" else "_" for letter in name)


def compiled_programs(row: Row, platform: str = "cpu") -> Iterator[tuple[Program, Any]]:
    """Yield the programs of a row, each with the compiled object."""
    topology = TOPOLOGIES[platform]
    sp.DEVICES[:] = list(topology_devices(topology)) if topology else []
    opt = row.make()
    state = opt.abstract_state(row.problem.params)
    lowered = {}
    for step in row.steps or (None,):
        now = state if step is None else state._replace(step=np.int32(step))
        lowered["step" if step is None else f"step {step}"] = opt.step.lower(now, row.problem.batch)
    if row.evaluate and platform == "cpu":
        lowered["evaluate"] = opt.evaluate.lower(state, row.problem.batch)
    for label, program in lowered.items():
        compiled = program.compile()
        text = text_of(compiled, program)  # jaxlib cannot read some instructions of libtpu
        name = f"{row.name}: {label}"
        mesh = dict(opt.mesh.shape)
        yield program_of(name, compiled, mesh, lowered_text(program), text), compiled


def program_of(
    name: str, compiled: Any, mesh: dict[str, int], lowered: str, text: str | None = None
) -> Program:
    """Return what is proved of a compiled object."""
    text = full_text(compiled, text)
    ranks = [len(read_shape(line.shape).dims) for line in Interpreter(parse(text)).parameters]
    inputs = _texts(ranks, compiled.input_shardings)  # without the arguments that jax drops
    outputs = _texts(
        [leaf.ndim for leaf in jax.tree.leaves(compiled.out_info)], compiled.output_shardings
    )
    return Program(name, text, inputs, outputs, mesh, lowered)


def _texts(ranks: list[int], shardings: Any) -> tuple[str, ...]:
    """Return shardings as HLO text."""
    pairs = zip(ranks, jax.tree.leaves(shardings), strict=True)
    return tuple(str(sharding._to_xla_hlo_sharding(rank)) for rank, sharding in pairs)
