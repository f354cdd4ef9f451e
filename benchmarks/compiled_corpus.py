"""The compiled programs that are proved: every row of `same_programs`, and transformers with
positions and experts split.

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
from same_programs import Problem, Row, mesh_of

import shardopt as so
from shardopt.hlo._hlo_text import parse
from shardopt.hlo.proof._interpret import Interpreter
from shardopt.hlo.proof._lines import read_shape
from shardopt.hlo.proof._text import full_text, lowered_text
from shardopt.models import gpt, moe
from shardopt.planning import topology_devices

TOPOLOGIES = {"cpu": None, "v5p": "v5p:2x2x2", "v6e": "v6e:2x4", "h100": "h100:8"}
"""Eight devices of each platform."""
ON_CHIPS = (
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


def corpus_rows() -> Iterator[Row]:
    """Yield the rows of all strategies, then those of transformers."""
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


def programs(platform: str = "cpu", only: str = "", store: Path | None = None) -> Iterator[Program]:
    """Yield every program of a platform, compiled or from the store."""
    for row in corpus_rows():
        if only not in row.name or not row.name.startswith(ON_PLATFORM.get(platform, ON_CHIPS)):
            continue
        stored = (
            []
            if store is None
            else sorted((store / platform).glob(f"{_file_name(row.name)}__*.json"))
        )
        if stored:
            yield from (Program(**json.loads(path.read_text())) for path in stored)
            continue
        for program, _ in compiled_programs(row, platform):
            if store is not None:
                (store / platform).mkdir(parents=True, exist_ok=True)
                path = store / platform / f"{_file_name(program.name)}.json"
                path.write_text(json.dumps(program._asdict()))
            yield program


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
        try:
            compiled.as_text()
        except jax.errors.JaxRuntimeError as error:
            # jaxlib cannot read some instructions of libtpu
            print(
                f"compiled_corpus: no text of {row.name} for {platform}:"
                f" {str(error).splitlines()[0][:200]}"
            )
            continue
        yield (
            program_of(
                f"{row.name}: {label}", compiled, dict(opt.mesh.shape), lowered_text(program)
            ),
            compiled,
        )


def program_of(name: str, compiled: Any, mesh: dict[str, int], lowered: str) -> Program:
    """Return what is proved of a compiled object."""
    text = full_text(compiled)
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
