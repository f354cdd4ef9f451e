"""MaxText's train step as a file: exported by a Python that has MaxText, run by one that has a GPU and jax.

Run, without a GPU: /path/to/maxtext/python -m benchmarks.peers.exported FOLDER --sizes 124M. It lowers MaxText's own step
for CUDA, with cuDNN's attention. Then, on the machine with the GPU: python -m benchmarks.peers.gpu --maxtext FOLDER.

The exported program is what MaxText gives to XLA. XLA compiles it on the machine that runs it.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

from .contestants import maxtext
from .task import Config, Task, write_task

CUDNN_VERSION = 91_002
"""What jax is told while it lowers cuDNN's attention; it decides what jax refuses, and is not part of the program."""

MOST_STORED = 1_000
"""Larger leaves are parameters, or begin as zeros."""


def export(config: Config, path: Path, platform: str, **chosen: Any) -> None:
    """Write a zip file of the step, from leaves of the state and a batch to new leaves, loss and norm.

    Raises:
      ValueError: if a large leaf of the state is neither a parameter nor zeros.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_task(config, Path(folder), count=1)
        task = Task(config, Path(folder), 0, 1)
        step, state, _, context = maxtext.prepare(task, **chosen)
        batch = maxtext.batch_of(next(task.batches()))
        stacked = maxtext.leaves_of(task.params())
        named = stacked | maxtext.with_unstacked_blocks(stacked)
    paths, tree = jax.tree.flatten_with_path(state)
    keys = [jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) for _, leaf in paths]
    plain = lambda leaves: [jax.random.key_data(x) if key else x for x, key in zip(leaves, keys, strict=True)]

    def flat_step(leaves, batch):
        leaves = [jax.random.wrap_key_data(x) if key else x for x, key in zip(leaves, keys, strict=True)]
        state, metrics = step(tree.unflatten(leaves), batch)
        return plain(jax.tree.leaves(state)), *maxtext.figures(metrics)

    leaves = [np.asarray(leaf) for leaf in plain([leaf for _, leaf in paths])]
    begins = [
        _beginning(jax.tree_util.keystr(where), leaf, named) for (where, _), leaf in zip(paths, leaves, strict=True)
    ]
    cudnn = "jax._src.cudnn.fused_attention_stablehlo"
    with (
        context(),
        mock.patch(f"{cudnn}.check_cudnn_version", return_value=CUDNN_VERSION),
        mock.patch(f"{cudnn}.check_compute_capability", return_value=True),
        mock.patch(f"{cudnn}.is_cuda_compute_capability_equal", return_value=False),
    ):
        program = jax.export.export(
            jax.jit(flat_step, donate_argnums=0),
            platforms=[platform],
            disabled_checks=[
                jax.export.DisabledSafetyCheck.custom_call(name)
                for name in ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward")
            ],
        )(leaves, batch)
    stored = {f"leaf{i}": leaf for i, (leaf, begin) in enumerate(zip(leaves, begins, strict=True)) if begin == "stored"}
    np.savez_compressed(
        path,
        program=np.frombuffer(program.serialize(), np.uint8),
        leaves=json.dumps([(begin, leaf.shape, leaf.dtype.name) for begin, leaf in zip(begins, leaves, strict=True)]),
        **stored,
    )


def _beginning(where: str, leaf: np.ndarray, params: dict[str, np.ndarray]) -> str:
    """Return the name of a parameter, "zeros" or "stored"."""
    if leaf.size <= MOST_STORED:
        return "stored"
    if not leaf.any():
        return "zeros"
    names = [name for name, value in params.items() if value.shape == leaf.shape and (value == leaf).all()]
    if not names:
        raise ValueError(f"peers: maxtext: leaf {where} {leaf.shape} is neither zeros nor one of the parameters.")
    return names[0]


OPTIONS = {
    "attention": "cudnn_flash_jax",
    "normalize_embedding_logits": False,  # the others do not divide the logits of a tied head by sqrt(D)
    "use_iota_embed": True,  # a product with one-hot rows; XLA:GPU adds gradients of looked-up rows one by one, in bfloat16
    "remat_policy": "minimal_with_context",  # keeps all products; MaxText 0.2.5 with "none" computes every block again
}
"""MaxText's options on a GPU."""

FORMS = {"stacked": {"scan_layers": True}, "unstacked": {"scan_layers": False}}


def main() -> None:
    from .gpu import SIZES, TINY

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=[*SIZES, "tiny"])
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.sizes:
        config = (SIZES | {"tiny": TINY})[name]
        on_cpu = {"attention": "dot_product"} if name == "tiny" else {}
        for form, chosen in FORMS.items():
            path = maxtext.exported_file(options.folder, config, form)
            export(config, path, "cpu" if on_cpu else "cuda", **OPTIONS | chosen | on_cpu)
            print("wrote", path, f"{path.stat().st_size / 1e3:.0f} kB", flush=True)


if __name__ == "__main__":
    main()
