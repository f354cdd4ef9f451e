"""Weights in mxfp4 and fp8: each number is the one that its code and scale stand for, however
leaves are sharded.
"""

import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file
from support import oracle
from support.tiers import tiered

from shardopt.models import _quantized_files as quantized_files
from shardopt.models import from_pretrained

pytestmark = pytest.mark.fast

SIZES = {"hidden_size": 64, "intermediate_size": 32}
EXPERTS = {"gate_up_proj": (4, 64, 64), "down_proj": (4, 64, 32)}  # [experts, outputs, inputs]
FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


@pytest.fixture
def mxfp4(tmp_path):
    """A folder of GPT-OSS as it is published, and the numbers of its experts in the layout
    [experts, inputs, outputs].
    """
    config, shapes, _ = oracle.read_case("gpt_oss")
    grown = {32: 64, 24: 32, 48: 64}
    shapes = {
        name: (
            [grown.get(size, size) for size in shape]
            if "experts" in name or "self_attn" not in name
            else shape
        )
        for name, shape in shapes.items()
    }
    for name, shape in shapes.items():
        if "self_attn" in name and len(shape) == 2:
            shapes[name] = [
                64 if size == config["hidden_size"] and dim == ("o_proj" not in name) else size
                for dim, size in enumerate(shape)
            ]
        if name.endswith("o_proj.bias"):
            shapes[name] = [64]
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    folder = oracle.write_folder(
        tmp_path / "in", config | SIZES | {"quantization_config": settings}, shapes
    )
    tensors, expected = load_file(folder / "model.safetensors"), {}
    draw = np.random.default_rng(0)
    for name in [name for name in tensors if name.endswith(tuple(EXPERTS))]:
        experts, outputs, inputs = EXPERTS[name.rpartition(".")[2]]
        codes = draw.integers(0, 16, (experts, outputs, inputs))
        scales = draw.integers(118, 134, (experts, outputs, inputs // 32)).astype(np.uint8)
        pairs = codes.reshape(experts, outputs, inputs // 32, 16, 2)
        tensors[f"{name}_blocks"] = (pairs[..., 0] | pairs[..., 1] << 4).astype(np.uint8)
        tensors[f"{name}_scales"] = scales
        numbers = np.empty((experts, inputs, outputs), np.float32)
        for e, o, i in np.ndindex(experts, outputs, inputs):
            numbers[e, i, o] = FP4[codes[e, o, i]] * 2.0 ** (int(scales[e, o, i // 32]) - 127)
        expected[name] = numbers
        del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    return folder, expected


@pytest.fixture
def fp8(tmp_path):
    """A folder of a Llama in blocks of fp8, some of them cut off, and the numbers of its weights."""
    config, shapes, _ = oracle.read_case("llama3")
    settings = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [10, 24],
    }
    folder = oracle.write_folder(
        tmp_path / "in", config | {"quantization_config": settings}, shapes
    )
    tensors, expected = load_file(folder / "model.safetensors"), {}
    draw = np.random.default_rng(0)
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        rows, columns = tensors[name].shape
        codes = draw.normal(size=(rows, columns)).astype(jnp.float8_e4m3fn)
        scales = draw.uniform(0.1, 2, (math.ceil(rows / 10), math.ceil(columns / 24))).astype(
            np.float32
        )
        numbers = np.empty((rows, columns), np.float32)
        for r, c in np.ndindex(rows, columns):
            numbers[r, c] = np.float32(codes[r, c]) * scales[r // 10, c // 24]
        expected[name] = numbers
        tensors[name], tensors[f"{name}_scale_inv"] = codes, scales
    save_file(tensors, folder / "model.safetensors")
    return folder, expected


def shardings_over(model, mesh, dim):
    """Each leaf with this dim, counted from the end, over data where that divides it."""

    def shard(leaf):
        at = leaf.ndim - dim
        is_divisible = at >= 0 and leaf.shape[at] % mesh.shape["data"] == 0
        return NamedSharding(
            mesh, PartitionSpec(*[None] * at, "data") if is_divisible else PartitionSpec()
        )

    return jax.tree.map(shard, model.abstract_params)


def saved(model, params, folder):
    """The tensors of a folder that the model saves, in float32."""
    model.save(folder, params, progress=False)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    return {
        name: np.asarray(x, np.float32)
        for name, x in load_file(folder / "model.safetensors").items()
    }


@pytest.mark.parametrize(
    ("most_numbers", "dim"),
    tiered(
        itertools.product([100, 2**24], [1, 2, 3]), lambda row: (row[0] == 100) == (row[1] != 2)
    ),
)
def test_every_number_of_mxfp4_is_read(dim, most_numbers, mxfp4, tmp_path, mesh_of, monkeypatch):
    monkeypatch.setattr(quantized_files, "_MOST_NUMBERS", most_numbers)
    folder, expected = mxfp4
    model = from_pretrained(folder)
    params = model.load_params(shardings_over(model, mesh_of(data=2), dim), progress=False)
    assert params["blocks"]["experts"]["up"].dtype == jnp.bfloat16
    tensors = saved(model, params, tmp_path / "out")
    assert len(expected) == 4
    for name, numbers in expected.items():
        np.testing.assert_array_equal(tensors[name], numbers, err_msg=name)
    assert from_pretrained(tmp_path / "out").tensors.keys() == tensors.keys()


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_every_number_of_fp8_is_read(dim, fp8, tmp_path, mesh_of):
    folder, expected = fp8
    model = from_pretrained(folder, param_dtype=jnp.float32)
    params = model.load_params(shardings_over(model, mesh_of(data=2), dim), progress=False)
    tensors = saved(model, params, tmp_path / "out")
    assert len(expected) == 14
    for name, numbers in expected.items():
        np.testing.assert_array_equal(tensors[name], numbers, err_msg=name)


def test_experts_on_other_devices_are_not_read(mxfp4, mesh_of, monkeypatch):
    num_bytes = []
    read = quantized_files._read

    def counted(*arguments):
        numbers = read(*arguments)
        num_bytes.append(numbers.nbytes)
        return numbers

    monkeypatch.setattr(quantized_files, "_read", counted)
    model = from_pretrained(mxfp4[0])
    mesh = mesh_of(data=4)

    def spec(leaf):
        return (
            PartitionSpec(None, "data")
            if leaf.ndim == 4 and leaf.shape[1] == 4
            else PartitionSpec()
        )

    model.load_params(
        jax.tree.map(lambda leaf: NamedSharding(mesh, spec(leaf)), model.abstract_params),
        progress=False,
    )
    # two blocks
    stored = sum(math.prod(shape) // 2 + math.prod(shape) // 32 for shape in EXPERTS.values()) * 2
    assert sum(num_bytes) == stored


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"quant_method": "gptq"},
            "quantization_config.quant_method is 'gptq', must be 'mxfp4' or 'fp8'",
        ),
        (
            {"activation_scheme": "static"},
            "quantization_config.activation_scheme is 'static', must be 'dynamic'",
        ),
        (
            {"weight_block_size": None},
            "quantization_config.weight_block_size is None, must be [rows, columns]",
        ),
        ({"bits": 3}, "quantization_config.bits is 3, which is not known"),
        ({"weight_block_size": [16, 24]}, "weight_scale_inv (4, 2), must be (2, 2)."),
    ],
)
def test_another_form_is_refused(change, message, fp8):
    config = json.loads((fp8[0] / "config.json").read_text())
    config["quantization_config"] |= change
    (fp8[0] / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="from_pretrained: ") as error:
        from_pretrained(fp8[0])
    assert message in str(error.value)


def test_blocks_that_predict_further_tokens_are_left_out(tmp_path):
    config, shapes, _ = oracle.read_case("deepseek_v3")
    further = {
        name.replace("layers.2.", "layers.3."): shape
        for name, shape in shapes.items()
        if "layers.2." in name
    }
    assert further
    folder = oracle.write_folder(tmp_path / "in", config, shapes | further)
    assert from_pretrained(folder).tensors.keys() == shapes.keys()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mxfp4_is_what_transformers_reads(mxfp4):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = load_file(mxfp4[0] / "model.safetensors")
    for name, numbers in mxfp4[1].items():
        pieces = (torch.as_tensor(tensors[f"{name}_{kind}"]) for kind in ("blocks", "scales"))
        np.testing.assert_array_equal(convert_moe_packed_tensors(*pieces).float().numpy(), numbers)
