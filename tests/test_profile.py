"""fused_layernorm.profile: it finds what is there, measures it, says so honestly, and leaves the model as it was."""

import copy
import time
from pathlib import Path

import pytest
import torch
from checks import DEVICES
from fork_server import run_code
from norm_cases import (
    one_thread,
)
from torch import nn

import fused_layernorm
from fused_layernorm import FusedAddLayerNorm, FusedLayerNorm, ProfileReport, ReplaceReport, profile, replace_norms
from fused_layernorm.__main__ import call_target
from fused_layernorm.replace import NormEntry

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def on_one_thread():
    """Threads that wait for a busy core would be most of the time of models so small."""
    with one_thread():
        yield


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.unused = nn.LayerNorm(32), nn.RMSNorm(32), nn.LayerNorm(32)
        self.batch_norm = nn.BatchNorm1d(32)
        self.linear, self.dropout = nn.Linear(32, 32), nn.Dropout(0.5)

    def forward(self, x, times=1):
        x = self.batch_norm(self.linear(self.first(x)))
        for _ in range(times):
            x = self.second(self.dropout(x))
        return {"y": x}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("kind", [tuple, dict])
def test_report(device, train, kind):
    model, x = Net().to(device).train(train), torch.randn(64, 32, device=device)
    report = profile(model, (x, 3) if kind is tuple else {"x": x, "times": 3}, train=train, seconds=0.05)
    assert report.calls == 5  # first, batch_norm, second three times
    assert {entry.name for entry in report.norms.replaced} == {"first", "second", "unused"}
    assert [entry.name for entry in report.norms.left] == ["batch_norm"]
    assert report.train == train and min(*report.norms_ms, *report.step_ms, report.noise_ms) > 0
    assert report.verdict in str(report) and "its 5 norm calls" in str(report) and "3 replaced, 1 left" in str(report)


@pytest.mark.parametrize("device", DEVICES)
def test_the_model_is_left_as_it_was(device):
    model, x = Net().to(device).train(), torch.randn(64, 32, device=device)
    replace_norms(model, filter=lambda name, module: name == "first")  # fused before: fused after
    before, classes = copy.deepcopy(model.state_dict()), [type(module) for module in model.modules()]
    torch.manual_seed(3)
    random = torch.rand(1, device=device)
    torch.manual_seed(3)
    profile(model, x, train=True, seconds=0.02)
    assert torch.equal(torch.rand(1, device=device), random)
    assert [type(module) for module in model.modules()] == classes and type(model.first) is FusedLayerNorm
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any("forward" in vars(module) for module in model.modules())


def test_the_model_is_left_as_it_was_after_an_error(monkeypatch):
    model = nn.Sequential(nn.LayerNorm(8))
    monkeypatch.setattr(FusedLayerNorm, "forward", lambda self, x: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        profile(model, torch.randn(2, 8))
    assert type(model[0]) is nn.LayerNorm


@pytest.mark.parametrize("slower", ["before", "after"])
def test_it_tells_faster_from_slower(monkeypatch, slower):
    """With a norm that sleeps, on one side or the other, the time is found, and the verdict is right."""
    cls = nn.LayerNorm if slower == "before" else FusedLayerNorm
    own = cls.forward

    def forward(self, x):
        time.sleep(0.005)
        return own(self, x)

    monkeypatch.setattr(cls, "forward", forward)
    report = profile(nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8)), torch.randn(2, 8), seconds=0.3)
    sleeping = report.norms_ms[slower == "after"]
    assert 10 <= sleeping and 10 <= report.step_ms[slower == "after"]
    assert report.verdict.startswith("Saves" if slower == "before" else "Costs")
    assert (report.saved_ms > 5) if slower == "before" else (report.saved_ms < -5)


def report_of(replaced=1, calls=4, saved=1.0, noise=0.1, norms=(0.2, 0.1)):
    entry = NormEntry("n", "LayerNorm", "FusedLayerNorm" if replaced else None)
    return ProfileReport("cpu", False, ReplaceReport((entry,)), calls, (10.0, 10.0 - saved), norms, noise)


@pytest.mark.parametrize(
    "report, verdict",
    [
        (report_of(calls=0), "No norm module was called: there is nothing to replace"),
        (report_of(replaced=0), "none of these norms can be replaced"),
        (
            report_of(saved=0.05),
            "No measurable saving: +0.05 ms a step, noise 0.1 ms. Norms take about 2%",
        ),
        (report_of(saved=-0.05), "No measurable saving: -0.05 ms"),
        (
            report_of(saved=0.05, norms=(11.0, 9.0)),
            "No measurable saving: +0.05 ms a step, noise 0.1 ms.",
        ),
        (report_of(saved=-1), "Costs 1 ms a step (10.0%): keep the original norms"),
        (report_of(saved=1), "Saves 1 ms a step (10.0%)"),
    ],
)
def test_verdict(report, verdict):
    assert verdict in report.verdict


def test_norms_that_take_longer_alone_than_in_the_step():
    """no share above 100%"""
    report = report_of(saved=0.05, norms=(11.0, 9.0))
    assert "%" not in str(report) and "alone they take longer than in the step" in str(report)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("train", [False, True])
def test_norms_with_a_residual(device, train):
    """They are called with two tensors or with None, and return two; they count, and are fused already."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = FusedAddLayerNorm(32, dropout_p=0.1), FusedAddLayerNorm(32, dropout_p=0.1)
            self.last = nn.LayerNorm(32)

        def forward(self, x):
            y, residual = self.first(x, None)
            y, residual = self.second(y, residual)
            return self.last(y + residual)

    report = profile(Block().to(device).train(train), torch.randn(64, 32, device=device), train=train, seconds=0.05)
    assert report.calls == 3
    assert [entry.name for entry in report.norms.replaced] == ["last"]
    assert [(entry.name, entry.reason) for entry in report.norms.left] == [
        ("first", "fused already"),
        ("second", "fused already"),
    ]


def test_nothing_to_save():
    assert profile(nn.Linear(4, 4), torch.randn(2, 4), seconds=0.02).calls == 0
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()  # a fast path of torch calls no norm
    assert "fast path" in profile(layer, torch.randn(2, 5, 32), seconds=0.02).verdict


def test_bad_arguments():
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, got function"):
        profile(lambda x: x, torch.randn(2))
    with pytest.raises(TypeError, match="seconds must be a number, got str"):
        profile(nn.LayerNorm(4), torch.randn(2, 4), seconds="2")
    with pytest.raises(ValueError, match="no output of the model requires a gradient"):
        profile(nn.LayerNorm(4, elementwise_affine=False), torch.randn(2, 4), train=True)


def test_command_line(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import torch\n\ndef make():\n    return torch.nn.Sequential(torch.nn.LayerNorm(16)), torch.randn(4, 16)\n"
    )
    code = "import runpy; runpy.run_module('fused_layernorm', run_name='__main__', alter_sys=True)"
    options = ["profile", "--seconds", "0.05", "--device", "cpu", "--train"]
    result = run_code(code, *options, "mine.py:make", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert f"on cpu, backend {fused_layernorm.backend()}" in result.stdout
    assert "1 norm modules: 1 replaced, 0 left" in result.stdout and "training step" in result.stdout

    monkeypatch.syspath_prepend(str(tmp_path))
    assert isinstance(call_target("mine:make")[0], nn.Sequential)
    for wrong in ("mine:nothing", f"{tmp_path}/mine.py:nothing", "mine", ""):
        with pytest.raises(SystemExit, match="no such function"):
            call_target(wrong)
    with pytest.raises(SystemExit, match="no such file, nofile.py"):
        call_target("nofile.py:make")
    (tmp_path / "alone.py").write_text("def make():\n    return 3\n")
    with pytest.raises(SystemExit, match=r"alone:make must return \(model, batch\).*it returned int"):
        call_target("alone:make")
