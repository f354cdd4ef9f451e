"""Memory and traffic of fine-tuning Llama 3 with adapters, compiled for TPUs and GPUs that are not
here.

    python benchmarks/adapters_pod.py [--only WORDS] [--libtpu FOLDER] [--no-cudnn]

Each row is one `so.planning.aot`: a step of fsdp with AdamW over all weights of the blocks (rank
16), or over all parameters. A row that does not fit into the memory of a chip says so. It needs
libtpu (pip install 'shardopt[tpu]') for TPUs, and jax's CUDA plugin for GPUs; it needs no device.
For GPUs cuDNN must be installed, or `--no-cudnn` compiles attention by plain XLA. Each result is
kept in results/adapters_pod.json as soon as it is there.
"""

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path

from common import fake_devices, write_json

RESULTS = Path(__file__).parent / "results" / "adapters_pod.json"
RANK = 16
ROWS = {
    # name: (model, topology, tokens of a row, rows a device, base; None trains all parameters)
    "llama3-8b v5e:2x4, all parameters": ("llama3-8b", "v5e:2x4", 2048, 1, None),
    "llama3-8b v5e:2x4, lora on bf16": ("llama3-8b", "v5e:2x4", 2048, 1, "float"),
    "llama3-8b v5e:2x4, lora on int8": ("llama3-8b", "v5e:2x4", 2048, 1, "int8"),
    "llama3-8b v5e:2x4, lora on nf4": ("llama3-8b", "v5e:2x4", 2048, 1, "nf4"),
    "llama3-70b v5p:2x2x2, lora on nf4": ("llama3-70b", "v5p:2x2x2", 2048, 1, "nf4"),
    "llama3-70b h100:8, lora on bf16": ("llama3-70b", "h100:8", 2048, 1, "float"),
    "llama3-70b h100:8, lora on nf4": ("llama3-70b", "h100:8", 2048, 1, "nf4"),
}


def compiled(model_name, topology, length, rows, base):
    """Return what the compiled step of a row holds and sends."""
    import jax
    import jax.numpy as jnp
    import optax
    import transformer
    from step_times import of_report

    import shardopt as so
    from shardopt.adapters import lora
    from shardopt.optimizers import Matrix
    from shardopt.planning._models import find_model

    shape = dataclasses.replace(find_model(model_name), length=length, dtype=jnp.bfloat16)
    model = transformer.model(shape, remat="full", chunk=512, logits_dtype=jnp.bfloat16)
    dtype = jnp.float32 if base is None else jnp.bfloat16
    params = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), shape.abstract_params()
    )
    options = {}
    if base is not None:
        matrices = [
            ("blocks/q$", Matrix(rows=1, columns=(2, 3))),
            ("blocks/kv$", Matrix(rows=1, columns=(2, 3))),
            ("blocks/out$", Matrix(rows=(1, 2), columns=3)),
            ("blocks/up$", Matrix(rows=1, columns=3)),
            ("blocks/down$", Matrix(rows=1, columns=2)),
        ]
        adapted = lora(
            model,
            rank=RANK,
            targets=["blocks/(q|kv|out|up|down)$"],
            base=base,
            matrices=matrices,
            low_rank_products=True,
        )
        params = jax.eval_shape(adapted.init, params, jax.random.key(0))
        model = adapted.model
        options = {"rules": adapted.rules}
    devices = 8
    try:
        report = so.planning.aot(
            lambda mesh: so.fsdp(
                optax.adamw(1e-4),
                mesh,
                model,
                gather_dtype=jnp.bfloat16,
                view="per_device",
                **options,
            ),
            params,
            transformer.abstract_batch(shape, rows * devices),
            topology=topology,
        )
    except ValueError as error:
        if "does not fit" not in str(error):
            raise
        return {"fits": False, "message": str(error).splitlines()[0]}
    sent = report.audit.total_wire_bytes
    return {
        "fits": True,
        "devices": devices,
        "argument_bytes": report.memory.arguments,
        "peak_bytes": report.memory.peak,
        "hbm_bytes": report.hbm_bytes,
        "wire_bytes": sent() if callable(sent) else sent,
        "flops": report.flops,
        "step_seconds": of_report(report).total,
        "compile_seconds": round(report.compile_seconds, 1),
    }


def main(only, no_cudnn):
    if no_cudnn:
        from shardopt.nn import _attention

        _attention._default_implementation = lambda query: "xla"
    results = json.loads(RESULTS.read_text())["results"] if RESULTS.exists() else {}
    for name, row in ROWS.items():
        if only and only not in name:
            continue
        row_name = f"{name}, without cuDNN" if no_cudnn else name
        results[row_name] = compiled(*row)
        print(row_name, results[row_name], flush=True)
        write_json(__file__, results)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rows whose name has these words")
    parser.add_argument("--libtpu", help="the folder of a libtpu that is not installed")
    parser.add_argument("--no-cudnn", action="store_true", help="compile attention by plain XLA")
    options = parser.parse_args()
    if options.libtpu:
        sys.path.insert(0, options.libtpu)
    fake_devices(1)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main(options.only, options.no_cudnn))
