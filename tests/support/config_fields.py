"""Changes of the fields of a config.json, one at a time, and what transformers computes after each."""

import json

import numpy as np

from support import oracle

ABSENT = object()
"""The value of a field that is left out."""
SIZES = frozenset(
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "ffn_hidden_size",
        "num_hidden_layers",
        "max_position_embeddings",
        *("n_embd", "n_layer", "n_positions", "n_inner"),
    ]
)
"""Fields that are left out, but not changed: the shapes of the tensors follow from them."""
MOST_PARAMETERS = 300_000
"""Models with more are left out: the default of a size is that of a large model."""
ROPES = (
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "attention_factor": 1.3,
    },
    {"rope_type": "default", "partial_rotary_factor": 0.5},
)


def changes_of(config):
    """Return [(field, value), ...] for the fields of a config."""
    changes = []
    for name, value in config.items():
        if isinstance(value, bool):
            values = [not value]
        elif isinstance(value, str):
            values = [other for other in ("silu", "gelu", "relu") if "act" in name]
        elif isinstance(value, int):
            values = [] if name in SIZES else [2 * value, 0]
        elif isinstance(value, float):
            values = [1.7 * value + 0.1]
        elif value is None:
            values = [True, 2, 0.7]
        elif name == "layer_types":
            kinds = "full_attention", "sliding_attention", "chunked_attention"
            values = [
                value[::-1],
                [kinds[i % 2] for i in range(len(value))],
                [kinds[-1]] * len(value),
            ]
        elif name == "rope_parameters" and not any(
            isinstance(entry, dict) for entry in value.values()
        ):
            values = [{"rope_theta": 5e4} | rope for rope in ROPES]
        elif isinstance(value, list) and all(isinstance(entry, int) for entry in value):
            values = [[], [0], value[::-1], [1 - bool(entry) for entry in value]]
        else:
            values = []
        changes += [(name, other) for other in [ABSENT, *values] if other != value]
    return changes


def full_config(config):
    """Return a config.json with every field of transformers' class for it, and the fields of the
    case.
    """
    import transformers

    own_fields = set(transformers.PretrainedConfig().to_dict())
    every_field = transformers.AutoConfig.for_model(**config).to_dict()
    return {name: value for name, value in every_field.items() if name not in own_fields} | config


class Theirs:
    """Models of transformers with the weights of `oracle.weight`.

    Models of one form share a file.
    """

    def __init__(self, folder):
        self._folder = folder
        self._states = {}

    def logits(self, config):
        """Write a folder with this config.json.

        Return it and the logits, or None where transformers refuses.
        """
        import torch
        import transformers

        folder = self._folder / "folder"
        folder.mkdir(exist_ok=True)
        (folder / "model.safetensors").unlink(missing_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        tokens = torch.as_tensor(oracle.TOKENS[: oracle.SHOWN, :-1])
        try:
            loaded_config = transformers.AutoConfig.from_pretrained(folder)
            loaded_config._attn_implementation = "eager"
            with torch.device("meta"):
                weights = transformers.AutoModelForCausalLM.from_config(loaded_config).state_dict()
            if sum(weight.numel() for weight in weights.values()) > MOST_PARAMETERS:
                return folder, None
            form = (
                loaded_config.tie_word_embeddings,
                *((name, tuple(weight.shape)) for name, weight in weights.items()),
            )
            model = transformers.AutoModelForCausalLM.from_config(
                loaded_config, dtype=torch.float32
            )
            if form not in self._states:
                self._states[form] = self._load(model, config, str(len(self._states)))
            state, file = self._states[form]
            model.load_state_dict(state)
            (folder / "model.safetensors").symlink_to(file)
            with torch.no_grad():
                logits = model.eval()(input_ids=tokens).logits.numpy()
        except Exception:  # any refusal, on whatever line of a model
            return folder, None
        return folder, logits if np.isfinite(logits).all() else None

    def _load(self, model, config, name):
        import transformers
        from safetensors import safe_open

        model_folder = self._folder / f"made{name}"
        model.save_pretrained(model_folder)
        with safe_open(model_folder / "model.safetensors", "np") as file:
            shapes = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        folder = oracle.write_folder(self._folder / name, config, shapes)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype)
        return loaded.state_dict(), folder / "model.safetensors"
