"""fused_layernorm.profile: the cost of a model's norms before and after replace_norms."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from . import _backend
from .reference import check_number
from .replace import ReplaceReport, _is_norm, replace_norms


@dataclass(frozen=True)
class ProfileReport:
    """The result of `profile`. It prints as a summary. Times are medians in milliseconds, (before, after)."""

    device: str  # name of the device
    train: bool  # whether a step has a backward
    norms: ReplaceReport  # what `replace_norms` did to the model
    calls: int  # calls of norm modules in one step
    step_ms: tuple[float, float]  # time of a step
    norms_ms: tuple[float, float]  # sum over these calls, each measured alone with the input that it had in the model
    noise_ms: float  # a saving below this is noise

    @property
    def saved_ms(self) -> float:
        """Saved time of a step; negative if the step takes longer."""
        return self.step_ms[0] - self.step_ms[1]

    @property
    def verdict(self) -> str:
        """One sentence: what replacing the norms of this model is worth."""
        before = self.step_ms[0]
        if not self.calls:
            return (
                "No norm module was called: there is nothing to replace. (PyTorch's fast path bypasses norm modules, "
                "and calls of functions are not recorded.)"
            )
        if not self.norms.replaced:
            return "No saving: none of these norms can be replaced."
        if abs(self.saved_ms) <= self.noise_ms:
            found = f"{self.saved_ms:+.3g} ms a step, noise {self.noise_ms:.2g} ms"
            share = self.norms_ms[0] / before  # a norm alone may take longer than in the step
            most = f"Norms take about {share:.0%} of the step, the most that could be saved." if share < 0.95 else ""
            return f"No measurable saving: {found}. {most}".rstrip()
        if self.saved_ms < 0:
            return f"Costs {-self.saved_ms:.3g} ms a step ({-self.saved_ms / before:.1%}): keep the original norms."
        return f"Saves {self.saved_ms:.3g} ms a step ({self.saved_ms / before:.1%})."

    def __str__(self) -> str:
        kind = "training step (forward and backward)" if self.train else "forward"
        rows = [
            ("", "before", "after", ""),
            (kind, *(f"{ms:.3f} ms" for ms in self.step_ms), ""),
            (
                f"its {self.calls} norm calls, each alone",
                *(f"{ms:.3f} ms" for ms in self.norms_ms),
                " -> ".join(f"{norms / step:.1%}" for norms, step in zip(self.norms_ms, self.step_ms, strict=True))
                + " of the step"
                if all(norms < step for norms, step in zip(self.norms_ms, self.step_ms, strict=True))
                else "(alone they take longer than in the step)",
            ),
        ]
        lines = [f"{name:<38}{before:>12}{after:>12}   {note}".rstrip() for name, before, after, note in rows]
        return "\n".join(
            [f"on {self.device}, backend {_backend.backend}", str(self.norms), "", *lines, "", self.verdict]
        )


def profile(model: nn.Module, batch, *, train: bool = False, seconds: float = 2.0) -> ProfileReport:
    """Measure steps of `model` on `batch`, in turn with its own norms and with fused norms.

    The model is unchanged afterwards: classes, mode, buffers, gradients, random state. To keep the fused norms, call
    `replace_norms(model)`.

    Args:
        model: any module, on the device and in the mode (train or eval) to be measured.
        batch: a dict of keyword arguments, a tuple or list of positional arguments, or the only argument.
        train: True measures forward and backward of the sum of the outputs; False forward without gradients.
        seconds: approximate time for measuring the steps, and again for measuring the norms alone.

    Returns:
        A `ProfileReport`. Times are wall time with the GPU synchronized, so they include host time. A norm measured
        alone may find its input in a cache, unlike in the model: rely on the time of the step.

    Raises:
        TypeError: a model that is not a module, or `seconds` that is not a number.
        ValueError: `train` with a model whose outputs require no gradient.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    check_number("seconds", seconds)
    tensors = [leaf for leaf in [*model.parameters(), *tree_leaves(batch)] if isinstance(leaf, Tensor)]
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), torch.device("cpu"))
    originals = {module: type(module) for module in model.modules()}
    fused_classes: dict[nn.Module, type] = {}

    def use(classes: dict[nn.Module, type]) -> None:
        for module, cls in classes.items():
            module.__class__ = cls

    def step() -> None:
        if isinstance(batch, dict):
            outputs = model(**batch)
        else:
            outputs = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
        if train:
            _backward(outputs, [p for p in model.parameters() if p.requires_grad])

    with _left_as_it_was(model, device), torch.set_grad_enabled(train):
        try:
            calls = _record_calls(model, step)
            norms = replace_norms(model)
            fused_classes.update((module, type(module)) for module in originals)
            both = [lambda: use(originals), lambda: use(fused_classes)]
            steps = _in_turn([(select, step) for select in both], device, seconds)
            norms_ms = [0.0, 0.0]
            for call in calls:
                alone = _in_turn([(select, call.run) for select in both], device, seconds / len(calls))
                norms_ms = [
                    total + call.count * statistics.median(times) for total, times in zip(norms_ms, alone, strict=True)
                ]
        finally:
            use(originals)

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return ProfileReport(
        device=name,
        train=train,
        norms=norms,
        calls=sum(call.count for call in calls),
        step_ms=(statistics.median(steps[0]), statistics.median(steps[1])),
        norms_ms=(norms_ms[0], norms_ms[1]),
        noise_ms=math.hypot(*map(_median_noise, steps)),
    )


def _median_noise(times: list[float]) -> float:
    """Half of the 95% confidence interval of the median: the notch of a box plot (McGill, Tukey and Larsen, 1978)."""
    low, _, high = statistics.quantiles(times, n=4)
    return 1.57 * (high - low) / math.sqrt(len(times))


def _backward(outputs, inputs: list[Tensor]) -> None:
    wanted = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not wanted:
        raise ValueError("train=True, but no output of the model requires a gradient")
    loss = sum(output.float().sum() for output in wanted)
    torch.autograd.grad(loss, inputs, allow_unused=True)  # no .grad is touched


@contextlib.contextmanager
def _left_as_it_was(model: nn.Module, device: torch.device):
    """Restore buffers (running statistics, caches) and the random state."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


class _Call:
    """A norm with the arguments of a call; `count` calls of a step had such arguments."""

    def __init__(self, module: nn.Module, arguments: tuple, train: bool):
        self.module, self.count = module, 1
        # Copies, because the model may change its tensors later.
        self.arguments = tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), arguments)
        self.inputs = [leaf for leaf in (*tree_leaves(self.arguments), *module.parameters()) if _wants_grad(leaf)]
        self.train = train

    def run(self) -> None:
        args, kwargs = self.arguments
        output = self.module(*args, **kwargs)
        if self.train and self.inputs:
            _backward(output, self.inputs)


def _wants_grad(leaf) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _record_calls(model: nn.Module, step: Callable[[], None]) -> list[_Call]:
    """The distinct calls of norms in one step."""
    calls: dict[tuple, _Call] = {}

    def describe(leaf):
        return (leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else None

    def recording(module, forward):
        def record(*args, **kwargs):
            leaves = [*tree_leaves((args, kwargs)), *module.parameters()]
            key = (type(module), *map(describe, leaves))
            if key in calls:
                calls[key].count += 1
            else:
                calls[key] = _Call(module, (args, kwargs), torch.is_grad_enabled())
            return forward(*args, **kwargs)

        return record

    # No hooks: with hooks TransformerEncoderLayer does not take its fast path.
    norms = {module: dict(vars(module)) for module in model.modules() if _is_norm(module)}
    try:
        for module in norms:
            vars(module)["forward"] = recording(module, module.forward)
        step()
    finally:
        for module, attributes in norms.items():
            del vars(module)["forward"]
            if "forward" in attributes:
                vars(module)["forward"] = attributes["forward"]
    return list(calls.values())


def _in_turn(runs: list[tuple[Callable, Callable]], device: torch.device, seconds: float) -> list[list[float]]:
    """Milliseconds of each (prepare, run), measured in turn so that drift affects all equally."""

    def measure(prepare: Callable, run: Callable, repeats: int = 1) -> float:
        prepare()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return 1e3 * (time.perf_counter() - start) / repeats

    for _ in range(3):
        slowest = max(measure(prepare, run) for prepare, run in runs)
    # A sample lasts at least a millisecond, so that clock and synchronization do not count.
    repeats = max(1, math.ceil(1.0 / max(slowest, 1e-3)))
    rounds = min(100, max(8, round(1e3 * seconds / (slowest * repeats * len(runs)))))
    times: list[list[float]] = [[] for _ in runs]
    for i in range(rounds):
        for index in range(len(runs)) if i % 2 else reversed(range(len(runs))):
            times[index].append(measure(*runs[index], repeats))
    return times
