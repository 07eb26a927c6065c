"""benchmarks/models.py, on tiny models."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


ALL = "gpt_768 gpt_1600 vit_1024 llama_2048 llama_4096 bert_1024 dit_1152 qwen3_2048".split()


@pytest.mark.parametrize("models,modes", [
    (ALL, ("eager", "eager-infer")), pytest.param(["gpt_768"], ("compile",), marks=pytest.mark.slow)
])  # fmt: skip
def test_record(tmp_path, models, modes):
    """every model and provider has its entry; the providers train alike"""
    options = ["--models", *models, "--modes", *modes, *"--quick --repeats 2 --steps 2 --loss-steps 8".split()]
    subprocess.run([sys.executable, ROOT / "benchmarks" / "models.py", tmp_path, *options], check=True, cwd=tmp_path)
    (path,) = tmp_path.glob("models_*.json")
    results = json.loads(path.read_text())["results"]
    losses: dict[tuple, dict[str, float]] = {}
    for entry in results:
        assert (entry["ms"] is None) == (entry["spread"] is None) and (entry["ms"] or entry["note"])
        if entry["loss"] is not None:
            losses.setdefault((entry["model"], entry["mode"]), {})[entry["provider"]] = entry["loss"]
    assert [model for model, _ in losses] == models
    for of_providers in losses.values():
        assert of_providers.keys() >= {"torch", "replaced", "fused"}
        assert all(loss == pytest.approx(of_providers["torch"], rel=2e-3) for loss in of_providers.values())
