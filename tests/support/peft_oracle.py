"""Adapters of a tiny Llama, and what peft computes from them.

A and B follow from the name and shape of each tensor, so the fixture holds results alone. To write
it again, with torch 2.13.0, transformers and peft installed: `python tests/support/peft_oracle.py`.
"""

import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import oracle

FIXTURE = oracle.FOLDER / "peft_llama3.npz"
CASE = "llama3"
RANK = 2
ALPHA = 6
MODULES = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]


def weights(shapes):
    """Return the numbers of A and B, which are not 0."""
    return {name: oracle.weight(name, tuple(shape)) for name, shape in shapes.items()}


def write_adapters(folder):
    """Write the adapters as peft writes them."""
    with np.load(FIXTURE) as results:
        shapes = json.loads(str(results["shapes"]))
        config = str(results["config"])
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(config)
    save_file(weights(shapes), folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def run(folder, adapters=None):
    """Return peft's model of the case, with adapters of a folder, or new ones."""
    import peft
    import torch
    import transformers

    config, shapes, _ = oracle.read_case(CASE)
    base = transformers.AutoModelForCausalLM.from_pretrained(
        oracle.write_folder(folder / "base", config, shapes),
        dtype=torch.float32,
        attn_implementation="eager",
    )
    if adapters is not None:
        return peft.PeftModel.from_pretrained(base, adapters, is_trainable=True).eval()
    lora = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=MODULES, task_type="CAUSAL_LM")
    return peft.get_peft_model(base, lora).eval()


def answer(model, folder):
    """Return logits, loss, and A and B after a step of AdamW."""
    import torch

    tokens = torch.as_tensor(oracle.TOKENS)
    logits = model(input_ids=tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1)
    )
    loss.backward()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    torch.optim.AdamW(trained, lr=oracle.RATE, weight_decay=oracle.DECAY, eps=oracle.EPSILON).step()
    model.save_pretrained(folder)
    results = {"logits": logits[: oracle.SHOWN].detach().numpy(), "loss": loss.detach().numpy()}
    stepped = load_file(folder / "adapter_model.safetensors")
    return results | {f"step/{name}": oracle.sampled(numbers) for name, numbers in stepped.items()}


def main(folder):
    """Write the fixture."""
    model = run(folder)
    model.save_pretrained(folder / "new")
    shapes = {
        name: list(x.shape)
        for name, x in load_file(folder / "new" / "adapter_model.safetensors").items()
    }
    config = (folder / "new" / "adapter_config.json").read_text()
    save_file(
        weights(shapes), folder / "new" / "adapter_model.safetensors", metadata={"format": "pt"}
    )
    results = answer(run(folder, folder / "new"), folder / "stepped")
    np.savez_compressed(FIXTURE, **results, shapes=json.dumps(shapes), config=config)
    print(len(shapes), "tensors, loss", float(results["loss"]))


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
