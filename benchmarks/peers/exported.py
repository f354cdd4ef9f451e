"""MaxText's train step as a file: exported by a Python that has MaxText, run by one that has a GPU
and jax.

Run, without a GPU: /path/to/maxtext/python -m benchmarks.peers.exported FOLDER --sizes 124M. It
lowers MaxText's own step for CUDA, with cuDNN's attention. Then, on the machine with the GPU:
python -m benchmarks.peers.gpu --maxtext FOLDER.

The exported program is what MaxText gives to XLA. XLA compiles it on the machine that runs it, with
the same version of jax as here.
"""

import argparse
import contextlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

from .contestants import maxtext
from .task import Config, Task, write_task

CUDNN_CALLS = ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward")
"""jax does not promise to keep their form. Here one version of jax writes and reads it."""

MOST_STORED = 1_000
"""Larger leaves are parameters, or begin as zeros."""


def export(config: Config, path: Path, platform: str, **chosen: Any) -> None:
    """Write a zip file of the step, from leaves of the state and a batch to new leaves, loss and
    norm.

    Raises:
      ValueError: if a large leaf of the state is neither a parameter nor zeros.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_task(config, Path(folder), count=1)
        task = Task(config, Path(folder), 0, 1)
        step, state, _, context = maxtext.prepare(task, **chosen)
        batch = maxtext.batch_of(next(task.batches()))
        stacked = maxtext.leaves_of(task.params())
        params = stacked | maxtext.with_unstacked_blocks(stacked)
    places, tree = jax.tree.flatten_with_path(state)
    is_key = [jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) for _, leaf in places]

    def numbers_of(leaves: Sequence[Any]) -> list[Any]:
        return [
            jax.random.key_data(leaf) if key else leaf
            for leaf, key in zip(leaves, is_key, strict=True)
        ]

    def flat_step(leaves: list[Any], batch: dict[str, Any]) -> tuple[list[Any], Any, Any]:
        leaves = [
            jax.random.wrap_key_data(leaf) if key else leaf
            for leaf, key in zip(leaves, is_key, strict=True)
        ]
        state, metrics = step(tree.unflatten(leaves), batch)
        return numbers_of(jax.tree.leaves(state)), *maxtext.figures(metrics)

    leaves = [np.asarray(leaf) for leaf in numbers_of([leaf for _, leaf in places])]
    names = [jax.tree_util.keystr(path) for path, _ in places]
    begins = [_beginning(name, leaf, params) for name, leaf in zip(names, leaves, strict=True)]
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in CUDNN_CALLS]
    jitted = jax.jit(flat_step, donate_argnums=0)
    with context(), _as_with_a_gpu():
        program = jax.export.export(jitted, platforms=[platform], disabled_checks=checks)(
            leaves, batch
        )
    np.savez_compressed(
        path,
        program=np.frombuffer(program.serialize(), np.uint8),
        leaves=json.dumps(
            [
                (begin, leaf.shape, leaf.dtype.name)
                for begin, leaf in zip(begins, leaves, strict=True)
            ]
        ),
        **{f"leaf{i}": leaf for i, leaf in enumerate(leaves) if begins[i] == "stored"},
    )


@contextlib.contextmanager
def _as_with_a_gpu() -> Iterator[None]:
    """Let jax lower cuDNN's attention without a GPU.

    What it is told of cuDNN is not part of the program.
    """
    module = "jax._src.cudnn.fused_attention_stablehlo"
    with (
        mock.patch(f"{module}.check_cudnn_version", return_value=91_002),
        mock.patch(f"{module}.check_compute_capability", return_value=True),
        mock.patch(f"{module}.is_cuda_compute_capability_equal", return_value=False),
    ):
        yield


def _beginning(name: str, leaf: np.ndarray, params: dict[str, np.ndarray]) -> str:
    """Return the name of a parameter, "zeros" or "stored"."""
    if leaf.size <= MOST_STORED:
        return "stored"
    if not leaf.any():
        return "zeros"
    equal = [
        param
        for param, value in params.items()
        if value.shape == leaf.shape and (value == leaf).all()
    ]
    if not equal:
        raise ValueError(
            f"peers: maxtext: leaf {name} {leaf.shape} is neither zeros nor one of the parameters."
        )
    return equal[0]


OPTIONS = {
    "attention": "cudnn_flash_jax",
    # the others do not divide the logits of a tied head by sqrt(D)
    "normalize_embedding_logits": False,
    # a product with one-hot rows; XLA:GPU adds gradients of looked-up rows one by one, in bfloat16
    "use_iota_embed": True,
    # keeps all products; MaxText 0.2.5 with "none" computes every block again
    "remat_policy": "minimal_with_context",
}
"""MaxText's options on a GPU."""

FORMS = {"stacked": {"scan_layers": True}, "unstacked": {"scan_layers": False}}


def main() -> None:
    from .gpu import SIZES, TINY

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
