"""Adapters of open models: files of peft go in and out, and a step is the step of peft with torch."""

import json
import re

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file
from support import oracle, peft_oracle

import shardopt as so
from shardopt.adapters import lora
from shardopt.core._types import leaves_with_paths
from shardopt.models import decoder, from_pretrained

TARGETS = ["attention/(q|v|out)$", "mlp/(gate|down)$"]


@pytest.fixture
def opened(tmp_path):
    config, shapes, _ = oracle.read_case(peft_oracle.CASE)
    return from_pretrained(oracle.write_folder(tmp_path / "base", config, shapes))


@pytest.fixture
def results():
    with np.load(peft_oracle.FIXTURE) as stored:
        return dict(stored)


def adapted_by(model, rank=peft_oracle.RANK, targets=TARGETS):
    return lora(
        model.model,
        rank=rank,
        alpha=peft_oracle.ALPHA,
        targets=targets,
        matrices=model.matrices,
        rules=model.rules,
        low_rank_products=True,
    )


def loaded(adapted, model, folder):
    start = adapted.init(model.load_params(progress=False), jax.random.key(0))
    return adapted.load(folder, start, model=model)


def test_the_logits_are_those_of_peft(opened, results, tmp_path):
    adapted = adapted_by(opened)
    params = loaded(adapted, opened, peft_oracle.write_adapters(tmp_path / "peft"))
    tokens = oracle.TOKENS[: oracle.SHOWN, :-1]
    logits = jax.jit(
        lambda params: decoder.logits_of(opened.config, adapted.merge(params), tokens)
    )(params)
    np.testing.assert_allclose(logits, results["logits"], rtol=0, atol=1e-5)


def test_a_step_of_adamw_is_that_of_peft_and_comes_out_in_its_files(
    opened, results, tmp_path, mesh_of
):
    adapted = adapted_by(opened)
    folder = peft_oracle.write_adapters(tmp_path / "peft")
    tx = optax.adamw(oracle.RATE, eps=oracle.EPSILON, weight_decay=oracle.DECAY)
    opt = so.fsdp(
        tx,
        mesh_of(data=2, tensor=2),
        adapted.model,
        rules=adapted.rules,
        min_shard_elements=1,
    )
    state = opt.init(loaded(adapted, opened, folder))
    adapted.save(tmp_path / "same", state.params, model=opened)
    ours, peft_tensors = (
        load_file(path / "adapter_model.safetensors") for path in (tmp_path / "same", folder)
    )
    assert ours.keys() == peft_tensors.keys()
    for name, numbers in peft_tensors.items():
        np.testing.assert_array_equal(ours[name], numbers, err_msg=name)
    state, metrics = opt.step(state, {"tokens": oracle.TOKENS.astype(np.int32)})
    np.testing.assert_allclose(metrics["loss"], results["loss"], rtol=1e-5)
    adapted.save(tmp_path / "stepped", state.params, model=opened)
    for name, numbers in load_file(tmp_path / "stepped" / "adapter_model.safetensors").items():
        np.testing.assert_allclose(
            oracle.sampled(numbers), results[f"step/{name}"], rtol=0, atol=1e-4, err_msg=name
        )


@pytest.mark.parametrize("base", ["float", pytest.param("nf4", marks=pytest.mark.slow)])
def test_a_state_starts_from_the_shards_of_an_open_model(base, opened, mesh_of):
    adapted = lora(
        opened.model,
        rank=2,
        targets=TARGETS,
        base=base,
        matrices=opened.matrices,
        rules=opened.rules,
        low_rank_products=True,
    )
    opt = so.fsdp(
        optax.sgd(0.1),
        mesh_of(data=2, tensor=2),
        adapted.model,
        rules=adapted.rules,
        min_shard_elements=1,
    )
    state = adapted.start(opened, opt, jax.random.key(0), progress=False)
    expected = adapted.init(
        opened.load_params(progress=False), jax.random.split(jax.random.key(0))[0]
    )
    for (path, leaf), other in zip(
        jax.tree.leaves_with_path(state.params), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_array_equal(leaf, other, err_msg=jax.tree_util.keystr(path))
    gate = state.params["blocks"]["mlp"]["gate"].base
    assert (gate if base == "float" else gate.codes).sharding.spec == P(None, "data", "tensor")


@pytest.mark.slow
def test_latent_attention_and_experts_take_low_rank_products(tmp_path):
    config, shapes, _ = oracle.read_case("deepseek_v3")
    model = from_pretrained(oracle.write_folder(tmp_path / "base", config, shapes))
    losses = []
    for low_rank_products in (False, True):
        adapted = lora(
            model.model,
            rank=2,
            targets=["attention/(q|kv|q_down|kv_down|out)$", "experts/", "shared/"],
            matrices=model.matrices,
            low_rank_products=low_rank_products,
        )
        params = adapted.init(model.load_params(progress=False), jax.random.key(0))
        params = jax.tree_util.tree_map_with_path(
            lambda path, leaf: leaf + 0.1 if "lora_b" in str(path[-1]) else leaf, params
        )
        losses.append(
            float(
                jax.jit(adapted.model.loss_fn)(params, {"tokens": oracle.TOKENS.astype(np.int32)})
            )
        )
    without = jax.jit(model.model.loss_fn)(
        adapted.without_adapters(params), {"tokens": oracle.TOKENS.astype(np.int32)}
    )
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert abs(losses[0] - float(without)) > 1e-2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_peft_loads_our_files(opened, tmp_path):
    pytest.importorskip("peft", reason="needs the extra oracle and peft")
    import torch

    adapted = adapted_by(opened)
    params = loaded(adapted, opened, peft_oracle.write_adapters(tmp_path / "peft"))
    adapted.save(tmp_path / "ours", params, model=opened)
    model = peft_oracle.run(tmp_path / "torch", tmp_path / "ours")
    with np.load(peft_oracle.FIXTURE) as stored, torch.no_grad():
        logits = model(input_ids=torch.as_tensor(oracle.TOKENS)[: oracle.SHOWN, :-1]).logits
        np.testing.assert_allclose(logits.numpy(), stored["logits"], rtol=0, atol=1e-5)


@pytest.mark.fast
def test_settings_of_peft_that_are_not_computed_are_refused(opened, tmp_path):
    folder = peft_oracle.write_adapters(tmp_path / "peft")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "use_dora": True, "r": 4}))
    message = (
        f"lora.load: {path} has settings that do not fit.\n  use_dora: True in the folder, False"
        " here\n  r: 4 in the folder, 2 here\nFix: make the adapters with the rank and alpha of"
        " the folder; other settings of peft are not supported."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        loaded(adapted_by(opened), opened, folder)


@pytest.mark.fast
def test_a_tensor_more_or_less_is_refused(opened, tmp_path):
    folder = peft_oracle.write_adapters(tmp_path / "peft")
    tensors = load_file(folder / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"
    tensors["base_model.model.lm_head.lora_A.weight"] = tensors.pop(name)
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(
        ValueError,
        match=r"^lora.load: 2 tensors of the folder do not fit[.]\n.*lm_head.*\n.*absent in the",
    ):
        loaded(adapted_by(opened), opened, folder)


JOINED_CASES = {
    "phi3": ["qkv_proj", "gate_up_proj", "down_proj"],
    "glm": ["q_proj", "k_proj", "v_proj", "gate_up_proj", "down_proj"],
    "gpt2": ["c_attn", "c_fc", "mlp.c_proj"],
}


def opened_case(name, folder):
    config, shapes, _ = oracle.read_case(name)
    return from_pretrained(oracle.write_folder(folder / "base", config, shapes))


def with_an_a_for_each(params):
    """Return parameters whose A of values differs from A of queries."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: (
            leaf + 0.1
            if "/v/lora_a" in jax.tree_util.keystr(path, simple=True, separator="/")
            else leaf
        ),
        params,
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", JOINED_CASES)
def test_peft_computes_the_same_with_adapters_of_joined_tensors(name, tmp_path):
    peft = pytest.importorskip("peft", reason="needs the extra oracle and peft")
    import torch
    import transformers

    model = opened_case(name, tmp_path)
    tokens = oracle.TOKENS[: oracle.SHOWN, :-1]

    def theirs(adapters):
        base = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "base", dtype=torch.float32, attn_implementation="eager"
        )
        if adapters is None:
            settings = peft.LoraConfig(
                r=2, lora_alpha=6, target_modules=JOINED_CASES[name], task_type="CAUSAL_LM"
            )
            return peft.get_peft_model(base, settings)
        return peft.PeftModel.from_pretrained(base, adapters)

    def logits_of_theirs(adapters):
        with torch.no_grad():
            return theirs(adapters).eval()(input_ids=torch.as_tensor(tokens)).logits.numpy()

    theirs(None).save_pretrained(tmp_path / "peft")
    path = tmp_path / "peft" / "adapter_model.safetensors"
    save_file(
        peft_oracle.weights({key: x.shape for key, x in load_file(path).items()}),
        path,
        metadata={"format": "pt"},
    )
    adapted = adapted_by(
        model, targets=["attention/(q|k|v)$", "mlp/(up|down)$"] + ["mlp/gate$"] * model.config.gated
    )
    params = loaded(adapted, model, tmp_path / "peft")
    logits = jax.jit(lambda params: decoder.logits_of(model.config, adapted.merge(params), tokens))
    np.testing.assert_allclose(
        logits(params), logits_of_theirs(tmp_path / "peft"), rtol=0, atol=1e-5
    )
    adapted.save(tmp_path / "same", params, model=model)
    ours = load_file(tmp_path / "same" / "adapter_model.safetensors")
    stored = load_file(path)
    assert ours.keys() == stored.keys()
    for key, numbers in stored.items():
        np.testing.assert_array_equal(ours[key], numbers, err_msg=key)
    params = with_an_a_for_each(params)
    adapted.save(tmp_path / "apart", params, model=model)
    assert (
        json.loads((tmp_path / "apart" / "adapter_config.json").read_text())["rank_pattern"]
        or name == "glm"
    )
    np.testing.assert_allclose(
        logits(params), logits_of_theirs(tmp_path / "apart"), rtol=0, atol=1e-5
    )
    reloaded_params = loaded(adapted, model, tmp_path / "apart")
    for (key, leaf), other in zip(
        jax.tree.leaves_with_path(params), jax.tree.leaves(reloaded_params), strict=True
    ):
        np.testing.assert_array_equal(leaf, other, err_msg=jax.tree_util.keystr(key))


@pytest.fixture
def joined(tmp_path):
    """Return Phi 3 with adapters on queries, keys and values, whose A differ, and the folder that
    they are saved in.
    """
    model = opened_case("phi3", tmp_path)
    adapted = adapted_by(model, targets=["attention/(q|k|v)$", "attention/out$"])
    shapes = jax.eval_shape(adapted.init, model.abstract_params, jax.random.key(0))
    numbers = peft_oracle.weights({path: leaf.shape for path, leaf in leaves_with_paths(shapes)})
    params = jax.tree.structure(shapes).unflatten(list(numbers.values()))
    adapted.save(tmp_path / "peft", params, model=model)
    return model, adapted, params, tmp_path / "peft"


@pytest.mark.fast
def test_an_a_for_each_joined_weight_is_a_module_of_higher_rank(joined):
    model, adapted, params, folder = joined
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["rank_pattern"], config["alpha_pattern"]) == ({"qkv_proj": 6}, {"qkv_proj": 18})
    name = "base_model.model.model.layers.1.self_attn.qkv_proj"
    tensors = load_file(folder / "adapter_model.safetensors")
    q, k, v = (params["blocks"]["attention"][letter] for letter in "qkv")
    update = tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
    expected = [
        np.einsum("dr,rhk->hkd", w.lora_a[1], w.lora_b[1]).reshape(-1, 32) for w in (q, k, v)
    ]
    np.testing.assert_allclose(update, np.concatenate(expected), rtol=1e-5, atol=1e-6)
    zeros = jax.tree.map(np.zeros_like, params)
    reloaded_params = adapted.load(folder, base_of(params, zeros), model=model)
    for leaf, other in zip(jax.tree.leaves(params), jax.tree.leaves(reloaded_params), strict=True):
        np.testing.assert_array_equal(leaf, other)


def base_of(params, zeros):
    """Return the parameters with factors of 0."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf, zero: zero if "lora_" in jax.tree_util.keystr(path) else leaf,
        params,
        zeros,
    )


@pytest.mark.fast
def test_a_b_that_changes_weights_without_adapters_is_refused(joined):
    model, _, params, folder = joined
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    name = "base_model.model.model.layers.1.self_attn.qkv_proj.lora_B.weight"
    tensors[name][0, 5] = 1  # queries with the A of values
    save_file(tensors, path)
    message = (
        f"lora.load: B of 1 module in {folder} changes more than the weights that have adapters"
        " here.\n  model.layers.1.self_attn.qkv_proj\nFix: name all weights that the modules join"
        " in targets; with an A for each, B must be block-diagonal."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        joined[1].load(folder, params, model=model)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"rank_pattern": {"o_proj": 4}},
            "rank_pattern: 4 for model.layers.0.self_attn.o_proj, 2 here",
        ),
        (
            {"rank_pattern": {"qkv_proj": 4}},
            "rank_pattern: 4 for model.layers.0.self_attn.qkv_proj, 2 or 6 here",
        ),
        ({"alpha_pattern": {}}, "alpha_pattern: 6 for model.layers.0.self_attn.qkv_proj, 18 here"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: 'pissa' in the folder, True here"),
        ({"lora_bias": True}, "lora_bias: True in the folder, False here"),
        ({"layer_replication": [[0, 2]]}, "layer_replication: [[0, 2]] in the folder, [] here"),
    ],
)
def test_other_ranks_and_settings_of_peft_are_refused(joined, settings, problem):
    model, adapted, params, folder = joined
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    with pytest.raises(ValueError, match=f"have settings that do not fit|{re.escape(problem)}\n"):
        adapted.load(folder, params, model=model)


@pytest.mark.fast
def test_experts_have_no_form_in_peft(tmp_path):
    model = opened_case("mixtral", tmp_path)
    adapted = adapted_by(model, targets=["experts/up$", "attention/out$"])
    params = jax.eval_shape(adapted.init, model.abstract_params, jax.random.key(0))
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), params)
    with pytest.raises(
        ValueError,
        match=(
            r"^lora.save: peft has no form for 8 weights[.]\n "
            r" model.layers.0.block_sparse_moe.experts"
        ),
    ):
        adapted.save(tmp_path / "out", params, model=model)
