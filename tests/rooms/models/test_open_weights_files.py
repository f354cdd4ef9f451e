"""Files of open weights: the bytes that each process reads and writes, the files of an interrupted
save, and refusals.
"""

import dataclasses
import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file
from support import oracle
from support.host import host_params
from support.tiers import tiered

from shardopt.models import decoder, from_pretrained
from shardopt.models._tensor_files import Part

CASES = list(oracle.CASES)


def folder_of(tmp_path, name, dtype=None, **changes):
    """The folder of a case, with some fields of config.json changed."""
    config, shapes, _ = oracle.read_case(name)
    folder = oracle.write_folder(tmp_path / "folder", config | changes, shapes)
    if dtype is not None:
        tensors = load_file(folder / "model.safetensors")
        save_file(
            {name: array.astype(dtype) for name, array in tensors.items()},
            folder / "model.safetensors",
        )
    return folder


def shardings_of(model, mesh, axis="data"):
    """Each leaf sharded over its largest dim that the axis divides, as fsdp does."""

    def shard(leaf):
        sizes = [size if size % mesh.shape[axis] == 0 else 0 for size in leaf.shape]
        dim = int(np.argmax(sizes))
        spec = PartitionSpec(*[axis if i == dim and sizes[dim] else None for i in range(leaf.ndim)])
        return NamedSharding(mesh, spec)

    return jax.tree.map(shard, model.abstract_params)


@pytest.mark.parametrize(
    ("name", "dtype"),
    tiered(
        itertools.product(CASES, [None, jnp.bfloat16]),
        lambda row: row == ("llama3", jnp.bfloat16) or (row[1] is None and row[0] in CASES[::4]),
        ids=lambda row: f"{row[0]}-{row[1] and 'bfloat16'}",
    ),
)
def test_a_round_trip_keeps_every_byte(name, dtype, tmp_path, mesh_of, capsys):
    folder = folder_of(tmp_path, name, dtype)
    model = from_pretrained(folder)
    params = model.load_params(shardings_of(model, mesh_of(data=4)))
    model.save(tmp_path / "out", params, max_file_bytes=20_000)
    progress = capsys.readouterr().err
    assert "reading weights " in progress
    assert "step" not in progress
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    saved = {}
    for file in set(index["weight_map"].values()):
        saved |= load_file(tmp_path / "out" / file)
    tensors = load_file(folder / "model.safetensors")
    assert saved.keys() == index["weight_map"].keys() == tensors.keys()
    for tensor, numbers in tensors.items():
        assert saved[tensor].dtype == numbers.dtype
        assert saved[tensor].tobytes() == numbers.tobytes(), tensor
    assert from_pretrained(tmp_path / "out").config == model.config


def test_only_the_bytes_of_the_shards_are_read(tmp_path, mesh_of, monkeypatch):
    model = from_pretrained(folder_of(tmp_path, "llama3"))
    num_bytes = []
    read = Part.read

    def counted(part):
        num_bytes.append(part.view.nbytes)
        return read(part)

    monkeypatch.setattr(Part, "read", counted)
    total_bytes = sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(model.abstract_params)
    )
    model.load_params(shardings_of(model, mesh_of(data=8)), progress=False)
    assert sum(num_bytes) == total_bytes  # each device's shard once
    num_bytes.clear()
    model.load_params(progress=False)
    assert sum(num_bytes) == total_bytes
    num_bytes.clear()
    mesh = mesh_of(data=8)
    model.load_params(
        jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), model.abstract_params),
        progress=False,
    )
    assert sum(num_bytes) == total_bytes  # copies on several devices are read once


def test_a_read_takes_only_the_runs_of_its_part(tmp_path):
    """A column of blocks [in, out] is many runs in a file [out, in], and nothing between them is
    read.
    """
    path = tmp_path / "x.safetensors"
    array = np.arange(6 * 8, dtype=np.float32).reshape(6, 8)
    save_file({"x": array}, path)
    from shardopt.models._tensor_files import read_header

    tensor = read_header(path)["x"]
    view = tensor.view()
    start = view.__array_interface__["data"][0]
    part = Part(tensor, view.reshape(3, 2, 8).transpose(2, 0, 1)[2:4, 1:, :1], start)
    np.testing.assert_array_equal(
        part.read(), array.reshape(3, 2, 8).transpose(2, 0, 1)[2:4, 1:, :1]
    )
    order, length = part._runs()
    assert length == 2
    assert len(list(part._offsets(order, length))) == 2


def test_an_interrupted_save_looks_unfinished_and_can_be_repeated(tmp_path, monkeypatch):
    model = from_pretrained(folder_of(tmp_path, "qwen2"))
    params = model.load_params(progress=False)
    write = Part.write
    writes = []

    def failing(part, values):
        writes.append(part)
        if len(writes) == 20:
            raise OSError("no space left on device")
        return write(part, values)

    monkeypatch.setattr(Part, "write", failing)
    with pytest.raises(OSError, match="no space left"):
        model.save(tmp_path / "out", params, progress=False)
    assert all(path.name.endswith(".unfinished") for path in (tmp_path / "out").iterdir())
    with pytest.raises(FileNotFoundError):
        from_pretrained(tmp_path / "out")
    monkeypatch.undo()
    model.save(tmp_path / "out", params, progress=False)
    assert not list((tmp_path / "out").glob("*.unfinished"))
    with pytest.raises(
        FileExistsError,
        match=f"^from_pretrained.save: {re.escape(str(tmp_path / 'out'))} has weights",
    ):
        model.save(tmp_path / "out", params, progress=False)


def test_another_dtype_is_written_and_read(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "tokenizer.json").write_text("{}")
    model = from_pretrained(folder_of(tmp_path, "llama2"))
    model.save(
        tmp_path / "out", model.load_params(progress=False), dtype=jnp.bfloat16, progress=False
    )
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert (tmp_path / "out" / "tokenizer.json").exists()
    half = from_pretrained(tmp_path / "out")
    assert half.config.param_dtype == jnp.bfloat16
    wide = from_pretrained(tmp_path / "out", param_dtype=jnp.float32, dtype=jnp.bfloat16)
    leaf = wide.load_params(progress=False)["head"]
    assert leaf.dtype == jnp.float32
    np.testing.assert_array_equal(
        leaf, half.load_params(progress=False)["head"].astype(jnp.float32)
    )


REFUSED = [
    (
        "llama2",
        {"quantization_config": {"quant_method": "awq"}},
        "quantization_config is {'quant_method': 'awq'}, which the decoder does not know",
    ),
    (
        "llama2",
        {"rope_scaling": {"rope_type": "axial", "factor": 2.0}},
        "rope_type is 'axial', must be one of",
    ),
    ("phi3_longrope", {"head_dim": 12}, "rope_scaling.short_factor has 4 numbers, must be 6"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2, must be None or 1"),
    ("llama2", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
    (
        "llama2",
        {"partial_rotary_factor": 0.5},
        "partial_rotary_factor is 0.5, and all dims of this family's heads rotate",
    ),
    ("llama2", {"hidden_act": "quick_gelu"}, "hidden_act is 'quick_gelu', must be one of"),
    (
        "llama2",
        {"residual_multiplier": 0.22},
        "residual_multiplier is 0.22, which the decoder does not know",
    ),
    ("llama2", {"is_causal": False}, "is_causal is False, must be None or True"),
    ("llama2", {"architectures": ["LlamaForSequenceClassification"]}, "architectures is"),
    (
        "llama2",
        {"num_hidden_layers": None},
        "num_hidden_layers is None, must be a positive integer",
    ),
    (
        "llama3",
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
        "rope_scaling has no 'low_freq_factor'",
    ),
    ("llama2", {"rope_scaling": "linear"}, "rope_scaling is 'linear', must be an object"),
    (
        "llama2",
        {"rope_scaling": {"type": "linear"}},
        "rope_scaling has no 'factor', which 'linear' needs",
    ),
    (
        "llama2",
        {"rope_scaling": {"rope_type": "linear", "factor": "two"}},
        (
            "rope_scaling is {'rope_type': 'linear', 'factor': 'two'}, and has no numbers where"
            " 'linear' needs them"
        ),
    ),
    ("llama2", {"rms_norm_eps": "small"}, "rms_norm_eps is 'small', must be a number"),
    ("llama2", {"rms_norm_eps": None}, "rms_norm_eps is None, must be a positive number"),
    ("llama2", {"hidden_act": ["silu"]}, "hidden_act is ['silu'], must be a text"),
    (
        "llama2",
        {"tie_word_embeddings": "yes"},
        "tie_word_embeddings is 'yes', must be true or false",
    ),
    (
        "llama2",
        {"num_key_value_heads": "2"},
        "num_key_value_heads is '2', must be a positive integer",
    ),
    (
        "qwen2_windows",
        {"layer_types": ["chunked_attention"] * 4},
        "layer_types has 'chunked_attention'",
    ),
]


@pytest.mark.parametrize(
    ("name", "changes", "message"), REFUSED, ids=[next(iter(row[1])) + row[0] for row in REFUSED]
)
def test_a_field_that_the_decoder_lacks_is_named(name, changes, message, tmp_path):
    folder = folder_of(tmp_path, name, **changes)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        from_pretrained(folder)
    assert str(error.value).startswith(
        f"from_pretrained: {folder} describes a model that the decoder cannot be."
    )


PUBLISHED = {
    "gpt2": {
        "n_ctx": 64,
        "n_special": 0,
        "predict_special_tokens": True,
        "output_past": True,
        "embd_pdrop": 0.1,
        "scale_attn_weights": True,
        "tokenizer_class": "GPT2Tokenizer",
    },
    "phi3": {
        "attention_bias": False,
        "lm_head_bias": False,
        "full_attn_mod": 1,
        "interpolate_factor": 1,
    },
    "smollm3": {"max_window_layers": 28},
    "llama2": {
        "max_sequence_length": 2048,
        "rope_interleaved": False,
        "is_causal": True,
        "clip_qkv": None,
        "model_max_length": 131072,
    },
}
"""Case -> fields of published config.json of its family that ask for nothing."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_fields_of_published_models_that_ask_for_nothing_are_no_problem(name, tmp_path):
    config = from_pretrained(folder_of(tmp_path / "plain", name)).config
    assert (
        from_pretrained(folder_of(tmp_path / "published", name, **PUBLISHED[name])).config == config
    )


def test_an_unknown_model_type_is_refused_and_can_be_named(tmp_path):
    """A type can have the fields and tensors of a Llama, and rotate other pairs: only the caller
    can know.
    """
    folder = folder_of(tmp_path, "llama2", model_type="xverse", architectures=["XverseForCausalLM"])
    with pytest.raises(ValueError, match="has model_type 'xverse', which is none of llama, "):
        from_pretrained(folder)
    assert from_pretrained(folder, family="llama").config.num_layers == 2


def test_a_model_type_that_the_decoder_cannot_be_is_refused_with_the_reason(tmp_path):
    folder = folder_of(tmp_path, "llama2", model_type="mpt")
    with pytest.raises(ValueError, match="from_pretrained: ") as error:
        from_pretrained(folder)
    assert (
        str(error.value)
        == f"from_pretrained: {folder} has model_type 'mpt', which the decoder cannot be: positions"
        " are added to the scores of attention (alibi).\nFix: take a model of a family that"
        " docs/howto/open_weights.md lists."
    )


def test_tensors_that_do_not_fit_are_named(tmp_path):
    folder = folder_of(tmp_path, "llama2")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.up_proj.bias"] = np.zeros(48, np.float32)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:30].copy()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    save_file(tensors, path)
    message = (
        f"from_pretrained: the tensors in {folder} do not fit its config.json.\n"
        "  model.norm.weight: missing\n"
        "  model.layers.0.mlp.up_proj.bias: not part of the decoder\n"
        "  lm_head.weight: shape (30, 32), must be (64, 32)"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        from_pretrained(folder)


@pytest.mark.parametrize("cut", [4, 400, -8])
def test_a_damaged_file_is_refused(cut, tmp_path):
    folder = folder_of(tmp_path, "llama2")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ValueError, match=r"download the file again"):
        from_pretrained(folder)


def test_missing_files_are_named_before_anything_is_read(tmp_path):
    folder = folder_of(tmp_path, "llama2")
    model = from_pretrained(folder)
    out = model.save(
        tmp_path / "out", model.load_params(progress=False), max_file_bytes=20_000, progress=False
    )
    files = sorted(out.glob("*.safetensors"))
    files[1].unlink()
    message = (
        f"from_pretrained: {out} lacks 1 file of weights.\n  {files[1].name}\nFix: download the"
        " folder again"
    )
    with pytest.raises(FileNotFoundError, match=f"^{re.escape(message)}"):
        from_pretrained(out)
    (folder / "config.json").unlink()
    with pytest.raises(
        FileNotFoundError, match=re.escape(f"from_pretrained: {folder} has no config.json.")
    ):
        from_pretrained(folder)


@pytest.mark.parametrize("content", ["{", "[1]", ""])
def test_a_config_that_is_no_object_is_refused(content, tmp_path):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(
        ValueError,
        match=re.escape(f"from_pretrained: {tmp_path / 'config.json'} holds no JSON obj"),
    ):
        from_pretrained(tmp_path)


def test_tensors_that_are_no_floats_are_refused_before_they_are_read(tmp_path):
    path = folder_of(tmp_path, "llama2") / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"model.norm.weight": np.ones(32, np.int32)}, path)
    with pytest.raises(
        ValueError, match=re.escape(f"from_pretrained: a tensor of {path} has dtype I32, which is")
    ):
        from_pretrained(path.parent)


def test_an_index_that_leaves_the_folder_is_refused(tmp_path):
    folder = folder_of(tmp_path, "llama2")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"x": "../../secret"}})
    )
    with pytest.raises(ValueError, match="names files outside of the folder"):
        from_pretrained(folder)


def test_parameters_of_another_model_are_not_saved(tmp_path):
    model = from_pretrained(folder_of(tmp_path, "llama2"))
    params = host_params(decoder.init, dataclasses.replace(model.config, hidden=32))
    with pytest.raises(
        ValueError, match=re.escape("blocks/mlp/down: (2, 32, 32), must be (2, 48, 32)")
    ):
        model.save(tmp_path / "out", params, progress=False)
    assert not (tmp_path / "out").exists()
