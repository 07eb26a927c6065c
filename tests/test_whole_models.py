"""benchmarks/models.py, on tiny models, and the tables that benchmarks/figures.py makes of its records."""

import json
import runpy
from pathlib import Path

import pytest
from fork_server import run_code

ROOT = Path(__file__).resolve().parents[1]


ALL = "gpt_768 gpt_1600 vit_1024 llama_2048 llama_4096 bert_1024 dit_1152 qwen3_2048 qwen3_next_2048".split()


# Without a card the models are compiled to a graph, but not by Inductor, which takes a minute: test_pytorch.py has a
# model that it compiles.
RECORD = """
import functools, runpy, sys, torch
if not torch.cuda.is_available():
    torch.compile = functools.partial(torch.compile, backend="aot_eager")
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("models,modes", [
    (ALL, ("eager", "eager-infer")), pytest.param(["gpt_768"], ("compile",), marks=pytest.mark.slow)
])  # fmt: skip
def test_record(tmp_path, models, modes):
    """every model and provider has its entry; the providers train alike"""
    options = ["--models", *models, "--modes", *modes, *"--quick --repeats 2 --steps 1 --loss-steps 6".split()]
    done = run_code(RECORD, ROOT / "benchmarks" / "models.py", tmp_path, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
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


def test_table_of_builds(tmp_path):
    figures = runpy.run_path(str(ROOT / "benchmarks" / "figures.py"))
    rows = lambda: list(figures["build_rows"](figures["read"](tmp_path, "build*.json")))  # noqa: E731
    assert rows() == [["not yet recorded", *"------"]]
    record = {"arch_list": "9.0", "cores": 16, "wall_seconds": 60.2, "cpu_seconds": 700.9, "extension_bytes": 7_400_000,
              "kernels": 600, "csrc_hash": "abc"}  # fmt: skip
    (tmp_path / "build.json").write_text(json.dumps(record))
    assert rows() == [["9.0", "16", "60", "701", "7.4 MB", "600", "abc"]]


def test_peers_of_several_runs(tmp_path):
    """a provider's own later run is compared with fused of that run, and fused is that of the first"""
    figures = runpy.run_path(str(ROOT / "benchmarks" / "figures.py"))
    cell = {"op": "layer_norm", "direction": "forward", "dtype": "fp16", "rows": 2, "hidden_size": 64}
    for date, times in (("2026-02", {"fused": 20.0, "quack": 30.0}), ("2026-01", {"fused": 10.0, "torch": 40.0})):
        results = [cell | {"provider": provider, "us": us} for provider, us in times.items()]
        record = {"meta": {"date": date, "roofs": {"copy": float(date[-1])}}, "results": results}
        (tmp_path / f"peers_{date}.json").write_text(json.dumps(record))
    found = figures["peers"](tmp_path, "peers_*.json")
    assert found["meta"]["roofs"] == {"copy": 1}
    assert {r["provider"]: r["us"] for r in found["results"]} == {"fused": 10, "torch": 40, "quack": 15}
    assert len(found["results"]) == 3


def test_tables(tmp_path):
    """noise is in brackets; what a run had no time for comes from an earlier run, perhaps on another card"""

    def record(date, gpu, *steps, mode="eager", tokens=1024):
        of_run = {"mode": mode, "tokens": tokens}
        results = [
            {"model": model, "provider": provider, "ms": ms, "spread": spread, "norm_us": ms, **of_run}
            for model, *of_providers in steps
            for provider, (ms, spread) in zip(("torch", "replaced", "fused"), of_providers, strict=False)
        ]
        meta = {"date": date, "gpu": gpu}
        (tmp_path / f"models_{date}.json").write_text(json.dumps({"meta": meta, "results": results}))

    none = (None, None)
    record("1", "NVIDIA old 80GB", ("vit_1024", (30.0, 0.01), (10.0, 0.01), (10.0, 0.01)))
    gpt_768, gpt_1600 = ((11.0, 0.04), (10.0, 0.01), (10.5, 0.05)), ((9.0, 0.01), (9.0, 0.01), none)
    record("2", "new", ("gpt_768", *gpt_768), ("gpt_1600", *gpt_1600))
    record("3", "new", ("dit_1152", (20.0, 0.01), (10.0, 0.2), (16.0, 0.09)), ("gpt_1600", (5.0, 0.01), none, none))
    record("4", "new", ("gpt_768", (4.0, 0.01), (2.0, 0.01), none), mode="graph-infer", tokens=1)
    record("5", "new", ("gpt_768", (9.0, 0.01), (6.0, 0.01), none), mode="graph-infer", tokens=256)
    figures = runpy.run_path(str(ROOT / "benchmarks" / "figures.py"))
    models = figures["whole_models"](tmp_path, "models_*.json")
    rows = {row[0]: row[1:] for row in figures["model_rows"](models)}
    assert rows["GPT 768"] == ["new/-", "1.10", "(1.05)", "-", "-"]  # 5% of spread
    assert rows["DiT 1152"] == ["new/-", "(2.00)", "1.25", "-", "-"]  # 20% of spread: the step waits for the host
    assert rows["GPT 1600"] == ["new/-", "(1.00)", "-", "-", "-"]
    assert rows["ViT 1024"] == ["old/-", "3.00", "3.00", "-", "-"]
    assert rows["BERT 1024, post-norm"] == ["-", "-", "-", "-", "-"]
    details = {row[0]: row[1:] for row in figures["model_details"](models)}
    assert details["GPT 768, eager"] == ["1.10 / 4.0% / 0.91", "(1.05) / 5.0% / 0.95", "-", "-"]
    assert details["GPT 768, compile"] == ["-"] * 4
    assert list(figures["inference_rows"](models)) == [["GPT 768", "-", "-", "-", "-", "2.00", "1.50"]]
    record("6", "another", ("gpt_768", (6.0, 0.01), (5.0, 0.01), none), mode="graph-infer", tokens=1)
    models = figures["whole_models"](tmp_path, "models_*.json")
    assert {row[0]: row[1:] for row in figures["model_rows"](models)} == rows
    assert list(figures["inference_rows"](models)) == [["GPT 768", "-", "-", "-", "-", "1.20", "1.50"]]


PLOT = """
import sys
sys.path.insert(0, sys.argv[1])
import plot_record
bars = lambda axes: [round(float(bar.get_width()), 3) for bar in axes.patches]
plot_record.plt.close = lambda figure: print([*map(bars, figure.axes)])
list(plot_record.plot_models(sys.argv[2]))
"""


def test_plot_of_models(tmp_path):
    """a bar for each provider that has figures, from 1 to torch's time / its own"""
    pytest.importorskip("matplotlib")
    times = {"torch": 2.0, "replaced": 1.0, "fused": 1.6, "liger": None, "quack": 4.0}
    of_run = {"model": "gpt_768", "mode": "eager", "tokens": 8, "spread": 0.1}
    results = [of_run | {"provider": provider, "ms": ms} for provider, ms in times.items()]
    record = {"meta": {"date": "1", "gpu": "NVIDIA new"}, "results": results}
    (tmp_path / "models_1.json").write_text(json.dumps(record))
    done = run_code(PLOT, ROOT / "benchmarks", tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[1.0, 0.25, -0.5], []]  # eager, compiled
    assert (tmp_path / "models.png").read_bytes().startswith(b"\x89PNG")
