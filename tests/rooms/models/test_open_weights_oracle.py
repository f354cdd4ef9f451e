"""transformers itself: the fixtures are its results, and it reads the files that the decoder saves.

Needs the extra `oracle`.
"""

import numpy as np
import pytest
from support import oracle

from shardopt.models import from_pretrained

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _needs_transformers():
    pytest.importorskip("torch")
    pytest.importorskip("transformers")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", oracle.CASES)
def test_the_fixture_is_what_transformers_computes(name, tmp_path):
    config, shapes, results = oracle.read_case(name)
    new_config, new_shapes, new_results = oracle.answer(name, tmp_path)
    assert (new_config, new_shapes) == (config, shapes)
    assert new_results.keys() == results.keys()
    for key, numbers in results.items():
        np.testing.assert_allclose(new_results[key], numbers, rtol=0, atol=1e-5, err_msg=key)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", oracle.CASES)
def test_transformers_reads_what_is_saved(name, tmp_path):
    import torch
    import transformers

    config, shapes, results = oracle.read_case(name)
    model = from_pretrained(oracle.write_folder(tmp_path / "in", config, shapes))
    out = model.save(
        tmp_path / "out", model.load_params(progress=False), max_file_bytes=20_000, progress=False
    )
    reference_model = transformers.AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, attn_implementation="eager"
    )
    tokens = torch.as_tensor(oracle.TOKENS[: oracle.SHOWN, :-1])
    with torch.no_grad():
        logits = reference_model.eval()(input_ids=tokens).logits
    np.testing.assert_allclose(logits.numpy(), results["logits"], rtol=0, atol=1e-5)
