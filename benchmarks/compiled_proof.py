"""Prove every compiled program of ours, and count the wrong programs that the proof finds.

Run: python benchmarks/compiled_proof.py --platform cpu v5p v6e  # with a new jaxlib or libtpu
     python benchmarks/compiled_proof.py --mutants 12 --json benchmarks/results/compiled_proof.json
     python benchmarks/compiled_proof.py --platform --models llama3-8b@v5p:4x4x4
     llama3.1-405b@v5p:8x8x8

Each program is compiled for eight devices, nothing runs on a chip. Every program should be
"proved", or at least "agrees". With `--mutants`, so many mutants of each program are interpreted in
numpy, and those that compute something else are given to the proof. It should call each of them
"wrong", and none of them "proved". `--every 5` takes each fifth row. `--store` keeps compiled
programs in a folder for the next run.
"""

import argparse
import re
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import compiled_corpus
from common import write_json
from compiled_corpus import Program, programs
from mutants import CHANGED, Judge, mutants, synchronous

from shardopt.cli._plan import AuditOptions, compile_model
from shardopt.hlo.proof import Proof, prove
from shardopt.hlo.proof._compare import Reference
from shardopt.hlo.proof._interpret import CannotInterpretError

VERDICTS = ("proved", "agrees", "derived", "unknown", "wrong", "errors")
SHOWN = 40
"""So many lines of each list are written."""


def main() -> None:
    """Prove the programs of some platforms."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--platform", nargs="*", default=["cpu"], choices=list(compiled_corpus.TOPOLOGIES)
    )
    parser.add_argument(
        "--models", nargs="*", default=[], help="steps of open models, such as llama3-8b@v5p:4x4x4"
    )
    parser.add_argument("--only", default="", help="a part of the names of the rows")
    parser.add_argument("--mutants", type=int, default=0, help="how many mutants of each program")
    parser.add_argument("--every", type=int, default=1, help="take each of so many rows")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", type=Path, help="a folder for compiled programs")
    parser.add_argument("--json", type=Path, help="where the results are written")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for name in options.models:
        results[name] = of_model(name)
        print(results[name])
        if options.json:
            write_json(__file__, results, options.json)
    results |= {platform: {} for platform in options.platform}
    for platform in options.platform:
        corpus = programs(platform, options.only, options.store, options.every)
        for results[platform] in of_platform(corpus, options.mutants, options.seed):
            if options.json:  # a run that is interrupted leaves the counts so far
                write_json(__file__, results, options.json)
    for platform, result in ((name, results[name]) for name in options.platform):
        print(f"\n{platform}\n{summary(result)}")
    programs_of = [results[platform] for platform in options.platform]
    if any(result["programs"]["wrong"] or result["missed"] for result in programs_of):
        raise SystemExit("compiled_proof: a program is wrong, or a wrong one is proved.")


def of_model(name: str) -> dict[str, Any]:
    """Return the verdict on the training step of a model with fsdp, and the CPU seconds of its
    proof.
    """
    model, _, topology = name.partition("@")
    report = compile_model(AuditOptions(model=model, topology=topology))
    start = time.process_time()
    proof = report.proof
    return {
        "mesh": {axis: size for axis, size in report.mesh_shape.items() if size > 1},
        "instructions": proof.num_instructions,
        "verdict": proof.verdict,
        "unknown": [unknown._asdict() for unknown in proof.unknown],
        "problem": None if proof.problem is None else proof.problem.missing,
        "not_compared": proof.not_compared,
        "proof_cpu_seconds": round(time.process_time() - start, 1),
        "compile_seconds": round(report.compile_seconds, 1),
    }


def of_platform(corpus: Iterable[Program], count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the counts of verdicts on programs and on their mutants after each program."""
    result: dict[str, Any] = {
        "programs": dict.fromkeys(VERDICTS, 0),
        "verdicts": {},
        "instructions": 0,
        "not_compared": [],
    }
    result |= {
        "unknown_instructions": 0,
        "seconds": 0.0,
        "not_interpreted": [],
        "not_proved": [],
        "missed": [],
    }
    result["not_found"] = []
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    opcodes: Counter[str] = Counter()
    for program in corpus:
        start = time.process_time()
        reference = Reference(program.lowered)
        verdict, proof = verdict_of(program, program.text, reference)
        result["seconds"] += time.process_time() - start
        result["programs"][verdict] += 1
        result["verdicts"][program.name] = verdict
        if proof is not None:
            result["instructions"] += proof.num_instructions
            result["unknown_instructions"] += len(proof.unknown)
            opcodes.update(unknown.opcode for unknown in proof.unknown)
            if proof.not_compared:
                result["not_compared"].append(f"{program.name}: {proof.not_compared}"[:300])
        if verdict != "proved":
            result["not_proved"].append(f"{program.name}: {verdict}, {reason_of(proof)}")
        if count:
            with_mutants(program, reference, count, seed, kinds, result)
        print(f"{verdict:8} {program.name}", flush=True)
        yield result | {
            "seconds": round(result["seconds"], 1),
            "unknown_opcodes": dict(opcodes.most_common()),
            "mutants": {kind: dict(kinds[kind]) for kind in sorted(kinds)},
        }


def with_mutants(
    program: Program,
    reference: Reference,
    count: int,
    seed: int,
    kinds: dict[str, Counter[str]],
    result: dict[str, Any],
) -> None:
    """Add the verdicts on mutants of a program to the counts of their kinds."""
    text = synchronous(program.text)
    try:
        judge = Judge(text, program.inputs)
    except CannotInterpretError as error:
        result["not_interpreted"].append(f"{program.name}: {error}"[:300])
        return
    for mutant in mutants(text, count, seed + zlib.crc32(program.name.encode())):
        change = judge.change(mutant.text)
        if change <= CHANGED:
            kinds[mutant.kind]["equivalent"] += 1
            continue
        verdict, proof = verdict_of(program, mutant.text, reference)
        kinds[mutant.kind][verdict] += 1
        about = (
            f"{program.name}: {mutant.kind}, {mutant.instruction}, change {change:.1e}, seed"
            f" {seed}, {verdict}"
        )
        if verdict in ("proved", "derived"):
            result["missed"].append(about)
        elif verdict != "wrong":
            result["not_found"].append(about)
        elif proof is not None and proof.problem is not None:
            problem = proof.problem
            kinds[mutant.kind]["near"] += is_near(problem.hlo, mutant.instruction)
            kinds[mutant.kind]["with groups"] += bool(problem.groups)


def is_near(hlo: str, instruction: str) -> bool:
    """Return whether the instruction that was changed is among the lines of a report."""
    return re.search(rf"[ %]{re.escape(instruction)}(?![\w.-]*\w)", hlo) is not None


def verdict_of(program: Program, text: str, reference: Reference) -> tuple[str, Proof | None]:
    """Return the verdict on a text with the program's shardings; "errors" if the proof raises."""
    try:
        proof = prove(
            text,
            inputs=program.inputs,
            outputs=program.outputs,
            mesh=program.mesh,
            lowered=reference,
        )
    except Exception as error:
        print(f"compiled_proof: {program.name}: {type(error).__name__}: {error}")
        return "errors", None
    return proof.verdict, proof


def reason_of(proof: Proof | None) -> str:
    """Return the first reason, short."""
    if proof is None:
        return "the proof raised an error"
    if proof.problem is not None:
        return f"{proof.problem.instruction}: {proof.problem.missing}"[:200]
    if not proof.unknown:
        return proof.not_compared[:200]
    first = proof.unknown[0]
    return f"{len(proof.unknown)} instructions, first {first.instruction} ({first.opcode}): {first.reason}"[
        :200
    ]


def summary(result: dict[str, Any]) -> str:
    """Return the counts as text, with the mutants as docs/notes/compiled_proof.md has them."""
    share = result["unknown_instructions"] / max(result["instructions"], 1)
    lines = [
        f"{result['programs']} in {result['seconds']} s of CPU; {share:.2%} of"
        f" {result['instructions']} instructions unknown"
    ]
    lines += ["  " + line for line in result["not_proved"][:SHOWN]]
    lines += ["  not compared: " + line for line in result["not_compared"][:SHOWN]]
    if result["mutants"]:
        columns = (
            "wrong",
            "near",
            "with groups",
            "agrees",
            "unknown",
            "errors",
            "derived",
            "proved",
            "equivalent",
        )
        lines += [
            f"| mutation | {' | '.join(columns)} |",
            "|---|" + "---:|" * len(columns),
        ]
        rows = {
            **result["mutants"],
            "all": dict(sum((Counter(row) for row in result["mutants"].values()), Counter())),
        }
        lines += [
            f"| {kind} | {' | '.join(str(row.get(column, 0)) for column in columns)} |"
            for kind, row in rows.items()
        ]
        lines += ["  missed: " + line for line in result["missed"][:SHOWN]]
        lines += ["  not found: " + line for line in result["not_found"][:SHOWN]]
        lines += ["  not interpreted: " + line for line in result["not_interpreted"][:SHOWN]]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
