"""Four processes train adapters, save them for peft together, load them, and keep checkpoints
without the base.
"""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file
from support import oracle
from support.paths import ROOT
from support.processes import run_processes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the folder, and the reports of the processes."""
    folder = tmp_path_factory.mktemp("adapters")
    config, shapes, _ = oracle.read_case("llama3")
    oracle.write_folder(folder / "model", config, shapes)
    said = run_processes(
        ROOT / "tests" / "processes" / "worker_adapters.py", 4, folder, timeout=700
    )
    return folder, [json.loads(process.last) for process in said]


def test_adapters_of_four_processes_come_back(saved):
    folder, reports = saved
    assert all(report["same"] for report in reports)
    assert len({tuple(report["losses"]) for report in reports}) == 1
    first, second = reports[0]["losses"]
    assert second < first
    record = json.loads((folder / "checkpoints" / "2" / "shardopt.json").read_text())
    params = [path for path in record["leaves"] if path.startswith("params/")]
    assert len(params) == 8
    assert all(path.endswith(("/lora_a", "/lora_b")) for path in params)


@pytest.mark.filterwarnings("ignore")
def test_peft_computes_with_the_adapters_of_four_processes(saved):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    folder, reports = saved
    base = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float32, attn_implementation="eager"
    )
    model = peft.PeftModel.from_pretrained(base, folder / "peft").eval()
    tensors = load_file(folder / "peft" / "adapter_model.safetensors")
    assert len(tensors) == 2 * 4 * 2
    assert all(np.abs(numbers).max() > 0 for numbers in tensors.values())
    tokens = torch.as_tensor(np.arange(8 * 9).reshape(8, 9) % 61)
    with torch.no_grad():
        logits = model(input_ids=tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1)
    )
    # after two steps; the losses are those before each step
    assert float(loss) < reports[0]["losses"][1]
