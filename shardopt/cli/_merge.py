"""`shardopt merge`: add adapters to the weights of their base."""

import re

import jax
import optax

import shardopt as so
from shardopt.adapters import lora
from shardopt.adapters._files import CONFIG, WEIGHTS, read_settings
from shardopt.adapters._peft import PREFIX
from shardopt.cli._options import MergeOptions
from shardopt.core import calling, plural, value_error
from shardopt.core._extras import require
from shardopt.models import from_pretrained
from shardopt.models._tensor_files import read_header


@calling("merge")
def merge(options: MergeOptions) -> None:
    """Write the folder of the merged weights."""
    require("safetensors", extra="huggingface")
    settings = read_settings(options.adapters, names=["r", "lora_alpha"])
    base = options.model or settings.get("base_model_name_or_path")
    if not base:
        problem = f"the {CONFIG} of {options.adapters} does not name their model."
        raise value_error(problem, fix="name the folder of their model with --model.")
    pretrained = from_pretrained(base)
    tensors = read_header(options.adapters / WEIGHTS)
    modules = {name.removeprefix(PREFIX).partition(".lora_")[0] for name in tensors}
    unknown = sorted(module for module in modules if f"{module}.weight" not in pretrained.places)
    if unknown:
        problem = f"{plural(len(unknown), 'weight')} with adapters are not in {pretrained.folder}."
        raise value_error(problem, unknown, "name the folder of their model with --model.")
    leaves = {place.leaf for module in modules for place in pretrained.places[f"{module}.weight"]}
    adapters = lora(
        pretrained.model,
        rank=settings["r"],
        alpha=settings["lora_alpha"],
        targets=[f"^{re.escape(leaf)}$" for leaf in sorted(leaves)],
        base=options.base,
        matrices=pretrained.matrices,
        rules=pretrained.rules,
    )
    opt = so.fsdp(optax.identity(), so.make_mesh(), adapters.model, rules=adapters.rules)
    params = adapters.start(pretrained, opt, jax.random.key(0)).params
    params = adapters.load(options.adapters, params, model=pretrained)
    pretrained.save(options.output, jax.jit(adapters.merge)(params))
    count = plural(len(modules), "weight")
    print(f"{options.output} has the weights of {pretrained.folder} with adapters on {count}.")
