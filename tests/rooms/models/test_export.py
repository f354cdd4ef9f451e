"""The example models as open weights: the decoder's logits from them, also from sharded parameters,
and refusals.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardopt as so
from shardopt.models import decoder, export_safetensors, from_pretrained, gpt, moe

SIZES = {"vocab_size": 32, "dim": 16, "num_layers": 2, "max_length": 64}
GPT = gpt.config(**SIZES, num_heads=2)
WITH_EXPERTS = SIZES | {
    "num_heads": 4,
    "num_kv_heads": 2,
    "num_experts": 4,
    "hidden": 12,
    "balance": None,
    "rope_base": 1e6,
    "norm_epsilon": 1e-5,
}
MOE = moe.config(**WITH_EXPERTS)
TOKENS = np.array([[3, 1, 4, 1, 5, 9, 2, 6]])
LOGITS = {
    "gpt": [[0.08940, -0.64880, 0.80971, -0.47328], [1.73748, -1.53819, 0.39412, 0.99201]],
    "moe": [[-1.06284, 0.31672, 0.62393, -1.18136], [-0.06524, -0.19968, 0.34196, -0.27420]],
}
"""Of positions 0 and 7, tokens 0, 8, 16 and 24: LlamaForCausalLM and MixtralForCausalLM of
transformers 5.24.0 for the file.
"""


def sines(module, config):
    """Parameters that a formula gives, the same everywhere; loads stay 0."""
    abstract = jax.eval_shape(lambda: module.init(config, jax.random.key(0)))
    leaves, tree = jax.tree.flatten_with_path(abstract)
    sizes = np.cumsum([0, *(leaf.size for _, leaf in leaves)])
    values = [
        np.sin(np.arange(begin, begin + leaf.size)).reshape(leaf.shape)
        * ("router_" not in str(path))
        for begin, (path, leaf) in zip(sizes, leaves, strict=False)
    ]
    return tree.unflatten(
        [jnp.asarray(value, leaf.dtype) for value, (_, leaf) in zip(values, leaves, strict=True)]
    )


@pytest.mark.parametrize(
    ("name", "module", "config"),
    [pytest.param("gpt", gpt, GPT, marks=pytest.mark.slow), ("moe", moe, MOE)],
)
def test_an_export_has_the_logits_that_transformers_computes(
    name, module, config, tmp_path, mesh_of
):
    options = {"min_shard_elements": 1} | (
        {"rules": [("router_load", "frozen")]} if module is moe else {}
    )
    opt = so.fsdp(optax.sgd(0.1), mesh_of(data=4), module.model(config), **options)
    params = sines(module, config)
    export_safetensors(tmp_path / "hf", opt.init(params).params, config)
    model = from_pretrained(tmp_path / "hf")
    loaded = model.load_params(progress=False)
    ours = np.asarray(
        jax.jit(lambda params: decoder.logits_of(model.config, params, TOKENS))(loaded)
    )[0]
    np.testing.assert_allclose(ours[::7, ::8], LOGITS[name], rtol=1e-3, atol=1e-4)
    expected = jax.jit(lambda params: module.logits_of(config, params, TOKENS))(params)[0]
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)


def test_a_tied_model_in_half_precision_keeps_its_numbers(tmp_path):
    config = gpt.config(**SIZES, num_heads=2, tied=True, param_dtype=jnp.bfloat16, rope_base=500.0)
    params = sines(gpt, config)
    model = from_pretrained(export_safetensors(tmp_path / "hf", params, config))
    assert (model.config.tied, model.config.param_dtype) == (True, jnp.bfloat16)
    assert model.config.kinds[0].rope.base == 500.0
    loaded = model.load_params(progress=False)
    np.testing.assert_array_equal(
        loaded["blocks"]["attention"]["v"], params["blocks"]["attention"]["qkv"][:, :, 2]
    )
    np.testing.assert_array_equal(
        loaded["blocks"]["mlp"]["up"], params["blocks"]["mlp"]["up"][:, :, 1]
    )


def test_a_decoder_without_fused_products_is_exported_too(tmp_path):
    config = decoder.DecoderConfig(**SIZES, num_heads=4, num_kv_heads=2, hidden=24, head_dim=6)
    params = sines(decoder, config)
    model = from_pretrained(export_safetensors(tmp_path / "hf", params, config))
    loaded = model.load_params(progress=False)
    for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("config", "family", "problems"),
    [
        (
            moe.config(
                **WITH_EXPERTS | {"score": "sigmoid", "shared_hidden": 4, "balance": "bias"}
            ),
            "mixtral",
            [
                "shared_hidden is 4, must be 0",
                "score is 'sigmoid', must be 'softmax'",
                "choice_bias is True, must be False",
            ],
        ),
        (
            decoder.DecoderConfig(**SIZES, norm="layer", qkv_bias=True, activation="relu"),
            "llama",
            [
                "norm is 'layer', must be 'rms'",
                "qkv_bias is True, must be False",
                "activation is 'relu', must be 'silu'",
            ],
        ),
    ],
    ids=["mixtral", "llama"],
)
def test_what_the_family_cannot_be_is_refused_with_every_reason(config, family, problems, tmp_path):
    message = "\n  ".join(
        [f"export_safetensors: the model is none that {family} can be.", *problems]
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        export_safetensors(tmp_path / "hf", sines(decoder, config), config)
    assert not (tmp_path / "hf").exists()
