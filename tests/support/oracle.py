"""Tiny models of each family of open weights, and what transformers computes from them.

The weights follow from the name and shape of each tensor, so fixtures hold configs, shapes and
results alone. To write the fixtures again, with torch 2.13.0 and transformers installed: `python
tests/support/oracle.py [case ...]`."""

import json
import sys
import zlib
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

FOLDER = Path(__file__).parents[1] / "rooms" / "models" / "open_weights"
RATE = 1e-2
DECAY = 0.1
EPSILON = 1e-3
"""AdamW: an epsilon near the size of gradients, since else the first step is a sign, and rounding
flips it.
"""
TOKENS = (np.arange(8 * 13).reshape(8, 13) ** 2 * 7 + 3 * np.arange(13)) % 61
SHOWN = 2
"""Rows whose logits a fixture holds."""

# a padding token that no row has: torch gives its embedding no gradient
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 63,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}

GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 4}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
SIGMOID_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "routed_scaling_factor": 1.5,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}

CASES = {
    "llama2": ("llama", {"num_key_value_heads": 4}),
    "llama3": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama_biases": (
        "llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        },
    ),
    "mistral": ("mistral", {"sliding_window": 4}),
    "qwen2": ("qwen2", {"rope_parameters": YARN}),
    "qwen2_windows": (
        "qwen2",
        {
            "num_hidden_layers": 4,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 2,
        },
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "olmo2": ("olmo2", {}),
    "gemma2": ("gemma2", GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": (
        "gemma3_text",
        GEMMA
        | {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3": (
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            },
            "sliding_window": 5,
        },
    ),
    "gpt2": ("gpt2", {"n_inner": 48, "num_key_value_heads": None, "intermediate_size": None}),
    "mixtral": ("mixtral", EXPERTS | {"intermediate_size": 24}),
    "qwen3_moe": (
        "qwen3_moe",
        EXPERTS | {"moe_intermediate_size": 24, "norm_topk_prob": True, "head_dim": 16},
    ),
    "gpt_oss": (
        "gpt_oss",
        EXPERTS
        | {
            "head_dim": 8,
            "sliding_window": 4,
            "rope_parameters": YARN | {"truncate": False},
            "intermediate_size": 24,
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        EXPERTS
        | {
            "num_local_experts": None,
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 16,
            "n_routed_experts": 8,
            "q_lora_rank": 12,
            "kv_lora_rank": 20,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
        },
    ),
    "phi3_longrope": (
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0, 1.1, 1.3, 1.2],
                "long_factor": [1.5, 2.0, 4.0, 6.0],
                "original_max_position_embeddings": 16,
            },
            "original_max_position_embeddings": 16,
        },
    ),
    "phi3_longrope_long": (
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0, 1.1, 1.3, 1.2],
                "long_factor": [1.5, 2.0, 4.0, 6.0],
                "original_max_position_embeddings": 8,
            },
            "original_max_position_embeddings": 8,
        },
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    "gemma": ("gemma", {"head_dim": 16}),
    "olmo3": ("olmo3", {"num_hidden_layers": 4, "sliding_window": 4}),
    "seed_oss": ("seed_oss", {"head_dim": 16, "attention_bias": True, "attention_out_bias": True}),
    "glm": ("glm", {"head_dim": 16}),
    "glm4": ("glm4", {"head_dim": 16}),
    "ernie4_5": ("ernie4_5", {"head_dim": 16, "use_bias": True}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24}),
    "qwen2_moe": (
        "qwen2_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
        },
    ),
    "glm4_moe": (
        "glm4_moe",
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "attention_bias": True,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "use_qk_norm": True,
            "num_mtp_layers": None,
        },
    ),
}


def weight(name, shape, plus_one=False):
    """Return the numbers of a tensor, from its name and shape alone."""
    draw = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    is_factor = "norm" in name or ".ln_" in name
    if is_factor and name.endswith("weight"):
        return (0.2 * draw + (not plus_one)).astype(np.float32)
    return ((0.1 if name.endswith("bias") else 0.2) * draw).astype(np.float32)


def read_case(name):
    """Return the config, the shapes of the tensors, and the results of a case."""
    case = json.loads((FOLDER / f"{name}.json").read_text())
    with np.load(FOLDER / f"{name}.npz") as results:
        return case["config"], case["shapes"], dict(results)


def write_folder(folder, config, shapes):
    """Write the folder of a case, as transformers would."""
    plus_one = config["model_type"].startswith("gemma")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {tensor: weight(tensor, tuple(shape), plus_one) for tensor, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def sampled(array):
    """Return about 24 numbers of an array, from all over it."""
    flat = np.asarray(array).reshape(-1)
    return flat[:: max(1, flat.size // 23)]


def answer(name, folder):
    """Write the folder of a case, and return its config, shapes and results of transformers."""
    import torch
    import transformers

    torch.manual_seed(0)
    model_type, changes = CASES[name]
    config = transformers.AutoConfig.for_model(
        model_type,
        **{name: value for name, value in (SMALL | changes).items() if value is not None},
    )
    model_folder = folder / "made"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(model_folder)
    from safetensors import safe_open

    with safe_open(model_folder / "model.safetensors", "np") as file:
        shapes = {tensor: list(file.get_slice(tensor).get_shape()) for tensor in file.keys()}  # noqa: SIM118
    written = json.loads((model_folder / "config.json").read_text())
    written.pop("transformers_version", None)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        write_folder(folder / "case", written, shapes),
        dtype=torch.float32,
        attn_implementation="eager",
    ).eval()
    tokens = torch.as_tensor(TOKENS)
    logits = model(input_ids=tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1)
    )
    loss.backward()
    torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY, eps=EPSILON).step()
    stepped = folder / "stepped"
    model.save_pretrained(stepped)
    results = {"logits": logits[:SHOWN].detach().numpy(), "loss": loss.detach().numpy()}
    with safe_open(stepped / "model.safetensors", "np") as file:
        results |= {f"step/{tensor}": sampled(file.get_tensor(tensor)) for tensor in shapes}
    return written, shapes, results


def main(names):
    import tempfile

    FOLDER.mkdir(exist_ok=True)
    for name in names or CASES:
        with tempfile.TemporaryDirectory() as folder:
            config, shapes, results = answer(name, Path(folder))
        (FOLDER / f"{name}.json").write_text(
            json.dumps({"config": config, "shapes": shapes}) + "\n"
        )
        np.savez_compressed(FOLDER / f"{name}.npz", **results)
        print(
            name,
            "loss",
            float(results["loss"]),
            "largest logit",
            float(np.abs(results["logits"]).max()),
        )


if __name__ == "__main__":
    main(sys.argv[1:])
