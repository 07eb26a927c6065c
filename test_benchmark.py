"""Times fused_layernorm against PyTorch and other providers on this machine's GPU, or on its CPU.

    python test_benchmark.py                                    the small shapes, then LLM shapes
    python test_benchmark.py --shapes sweep --dtype bf16,fp32   hidden sizes 256 to 262144, 256 MiB of x each
    python test_benchmark.py --shapes 8192x4096,1x16777216 --op rms_norm --providers fused,torch,compile
    python test_benchmark.py --shapes small --direction call_no_grad,step
    python test_benchmark.py --op add_rms_norm --shapes 4096x8192 --providers all --residual-dtype fp32
    python test_benchmark.py --shapes sweep --providers all --record benchmarks/results/my_gpu --plot
    python test_benchmark.py --plot benchmarks/results/my_gpu/benchmark_DATE.json

benchmarks/README.md explains the numbers and how to repeat a recorded run.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import datetime
import functools
import importlib.metadata
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent
OUTPUT = ROOT / "benchmarks" / "output"  # git ignores it
HAS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if HAS_CUDA else "cpu"

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
EPS = {"layer_norm": 1e-5, "rms_norm": 1e-6}  # the ops, with their usual eps
ADD_OPS = ("add_layer_norm", "add_rms_norm")  # of residual + x, which is a result too
DIRECTIONS = {
    "forward": "the kernel under no_grad",
    "backward": "all gradients of one norm",
    "call_no_grad": "wall time of a call in a Python loop, no gradients",
    "step": "wall time of forward and backward in a Python loop",
}
HOST_DIRECTIONS = ("call_no_grad", "step")
SMALL_SHAPES = [(32, 512), (64, 1024), (128, 2048), (256, 4096)]
LLM_SHAPES = [(16384, 1024), (16384, 2048), (8192, 4096), (8192, 5120), (8192, 8192), (4096, 16384)]
SWEEP_BYTES = 256 << 20
SWEEP_HIDDEN_SIZES = sorted([*(1 << k for k in range(8, 19)), 769, 4097, 12345])
HUGE_SHAPES = [(8, 1 << 22), (1, 1 << 24)]
NARROW_HIDDEN_SIZES = (64, 128)  # 256 MiB of x, and at least 2^20 rows
GROUPS = ("small", "llm", "sweep", "huge", "narrow")


@dataclass(frozen=True)
class Cell:
    """One line of the results, without the provider."""

    op: str
    direction: str
    dtype: str
    weight_dtype: str
    rows: int
    hidden_size: int
    residual_dtype: str | None = None  # of the ADD_OPS

    def __str__(self):
        residual = f"+{self.residual_dtype}" if self.residual_dtype else ""
        return f"{self.op} {self.dtype}{residual} {self.rows}x{self.hidden_size} {self.direction}"

    @property
    def norm(self):
        return self.op.removeprefix("add_")

    @property
    def elements(self):
        return self.rows * self.hidden_size


def bytes_moved(cell):
    """What must pass between the chip and memory: x and y forward; x, grad_output and grad_input backward. With a
    residual: x, residual, residual_out and y forward; grad_output, residual_out, its gradient and those of x and
    residual, which are one where they are of one dtype, backward.

    Parameters, their gradients and the rows' statistics are left out: the roofs move the same bytes as this.
    """
    of_x = DTYPES[cell.dtype].itemsize
    if not cell.residual_dtype:
        return {"forward": 2, "backward": 3}[cell.direction] * cell.elements * of_x
    of_residual = DTYPES[cell.residual_dtype].itemsize
    if cell.direction == "forward":
        return cell.elements * (2 * of_x + 2 * of_residual)
    gradients = of_x if cell.residual_dtype == cell.dtype else of_x + of_residual
    return cell.elements * (of_x + 2 * of_residual + gradients)


# ---- providers -----------------------------------------------------------------------------------------------------
# To add one: a function that takes a Cell and returns norm(x, weight, bias) -> y with autograd, under @provider; for
# the ADD_OPS norm(x, weight, bias, residual) -> (y, residual_out). It imports what it needs inside; any exception, or
# Unavailable with a reason, makes the benchmark skip it by name. Each is called the way that is best for it. Nothing
# may write to the inputs: all providers share them.

PROVIDERS = {}
COMPILED_WHEN_CALLED = ("compile", "liger", "quack", "flash_attn")  # what --warm is for
DISTRIBUTIONS = {"liger": "liger-kernel", "quack": "quack-kernels", "flash_attn": "flash-attn", "apex": "apex",
                 "cutlass-dsl": "nvidia-cutlass-dsl", "triton": "triton"}  # fmt: skip
AUTOTUNE_MS = 10  # for each configuration that flash_attn tries


class Unavailable(Exception):
    """Why a provider does not run here, or not this cell."""


def provider(function):
    PROVIDERS[function.__name__] = function
    return function


def on_gpu(function):
    @functools.wraps(function)
    def checked(cell):
        if not HAS_CUDA:
            raise Unavailable("timed on a GPU only")
        return function(cell)

    return checked


@provider
def fused(cell):
    import fused_layernorm

    norm, eps = getattr(fused_layernorm, f"fused_{cell.op}"), EPS[cell.norm]
    if cell.residual_dtype:
        return lambda x, weight, bias, residual: norm(x, residual, weight, bias, eps)
    return lambda x, weight, bias: norm(x, weight, bias, eps)


@provider
def torch_eager(cell):
    shape, eps = (cell.hidden_size,), EPS[cell.norm]
    if cell.norm == "layer_norm":

        def norm(x, weight, bias):
            return F.layer_norm(x, shape, weight, bias, eps)
    else:

        def norm(x, weight, bias):
            return F.rms_norm(x, shape, weight, eps)

    if not cell.residual_dtype:
        return norm

    def add_norm(x, weight, bias, residual):
        z = x + residual  # of the wider dtype
        return norm(z.to(x.dtype), weight, bias), z

    return add_norm


PROVIDERS["torch"] = PROVIDERS.pop("torch_eager")


@functools.cache
def compiled(cell):
    norm = PROVIDERS["torch"](cell)
    norm.__code__ = norm.__code__.replace()  # Dynamo keeps what it compiled by code object, and only a few of each
    return torch.compile(norm, dynamic=False)


@provider
@on_gpu
def compile(cell):
    import torch._functorch.config
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1  # no pool of processes beside what is timed
    torch._functorch.config.donated_buffer = False  # backward is run many times from one forward
    return compiled(replace(cell, direction=""))


@provider
@on_gpu
def liger(cell):
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    eps = EPS[cell.norm]
    if cell.hidden_size > 65536:
        raise Unavailable("hidden sizes up to 65536 only")
    if cell.residual_dtype:
        if cell.norm == "layer_norm" or cell.residual_dtype != cell.dtype:
            raise Unavailable("with a residual RMSNorm only, and of x's dtype")
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

        return lambda x, weight, bias, residual: LigerFusedAddRMSNormFunction.apply(x, residual, weight, eps)
    if cell.norm == "layer_norm":
        return lambda x, weight, bias: LigerLayerNormFunction.apply(x, weight, bias, eps)
    # in_place=True, its default, writes grad_input over grad_output. False costs it a pass of zeros in backward.
    return lambda x, weight, bias: LigerRMSNormFunction.apply(x, weight, eps, 0.0, "llama", False)


@provider
@on_gpu
def quack(cell):
    from quack.rmsnorm import _rmsnorm_fwd as any_norm_fwd
    from quack.rmsnorm import layernorm_bwd, rmsnorm

    eps, itemsize = EPS[cell.norm], DTYPES[cell.dtype].itemsize
    if math.gcd(cell.hidden_size, 16 // itemsize) * itemsize < 4:
        raise Unavailable("16-bit rows of odd length do not compile")
    if cell.hidden_size * itemsize > 16 * 224 * 1024:  # it would compile for minutes before the launch fails
        raise Unavailable("a row does not fit the shared memory of 16 blocks")
    if cell.op == "rms_norm":
        return lambda x, weight, bias: rmsnorm(x, weight, bias, eps=eps)
    if cell.op == "add_rms_norm":
        return lambda x, weight, bias, residual: rmsnorm(x, weight, bias, residual, eps=eps, prenorm=True)
    if cell.residual_dtype:
        raise Unavailable("with a residual RMSNorm only")

    class LayerNorm(torch.autograd.Function):
        """quack has no autograd for LayerNorm, and its layernorm_fwd wants fp32 weights, which its kernel does not."""

        @staticmethod
        def forward(ctx, x, weight, bias):
            y, rstd, mean = torch.empty_like(x), None, None
            if any(ctx.needs_input_grad):
                rstd, mean = (torch.empty(len(x), device=x.device, dtype=torch.float32) for _ in range(2))
            any_norm_fwd(x, weight, y, bias, rstd, mean, None, None, eps, True)
            ctx.save_for_backward(x, weight, rstd, mean)
            return y

        @staticmethod
        def backward(ctx, grad_output):
            x, weight, rstd, mean = ctx.saved_tensors
            return layernorm_bwd(x, weight, grad_output, rstd, mean)

    return LayerNorm.apply


def flash_attn_module(hidden_size):
    """flash-attention's Triton norms, which tune themselves at the next call."""
    import triton.testing
    from flash_attn.ops.triton import layer_norm as module

    for kernel in (module._layer_norm_fwd_1pass_kernel, module._layer_norm_bwd_kernel):
        # It tunes once a hidden size, whatever the rows: what suits a small cell would then serve a large one. Left out
        # are configurations of over 64 elements a thread, which only spill and take up to minutes to compile.
        kernel.cache.clear()
        kernel.configs = [c for c in module.triton_autotune_configs() if hidden_size <= 2048 * c.num_warps]
        kernel.do_bench = functools.partial(triton.testing.do_bench, warmup=AUTOTUNE_MS / 5, rep=AUTOTUNE_MS)
    return module


@provider
@on_gpu
def flash_attn(cell):
    if cell.hidden_size * DTYPES[cell.dtype].itemsize > 65536:
        raise Unavailable("rows up to 64 KB only")
    module = flash_attn_module(cell.hidden_size)
    norm, eps = {"layer_norm": module.layer_norm_fn, "rms_norm": module.rms_norm_fn}[cell.norm], EPS[cell.norm]
    if cell.residual_dtype:
        return lambda x, weight, bias, residual: norm(x, weight, bias, residual=residual, eps=eps, prenorm=True)
    return lambda x, weight, bias: norm(x, weight, bias, eps=eps)


@provider
@on_gpu
def apex(cell):
    import fused_layer_norm_cuda  # noqa: F401  Apex itself imports it at the first call
    from apex.normalization.fused_layer_norm import FusedLayerNormAffineFunction, FusedRMSNormAffineFunction

    if cell.residual_dtype:
        raise Unavailable("no residual")
    shape, eps = (cell.hidden_size,), EPS[cell.op]
    if cell.op == "layer_norm":
        return lambda x, weight, bias: FusedLayerNormAffineFunction.apply(x, weight, bias, shape, eps)
    return lambda x, weight, bias: FusedRMSNormAffineFunction.apply(x, weight, shape, eps)


@provider
@on_gpu
def apex_fast(cell):
    from apex.contrib.layer_norm.layer_norm import FastLayerNormFN

    if cell.op != "layer_norm":
        raise Unavailable("LayerNorm only")
    return lambda x, weight, bias: FastLayerNormFN.apply(x, weight, bias, EPS[cell.op])


def torch_rms_norm_override():
    """Whether torch's own RMSNorm is quack's kernel here: torch 2.13 and later, sm_90 or sm_100, a cutlass-dsl that
    this torch knows. "torch" then means that kernel wherever it takes the cell."""
    try:
        from torch._native.registry import get_dsl_operations
    except ImportError:
        return False
    on_card = HAS_CUDA and torch.cuda.get_device_capability()[0] in (9, 10)
    return on_card and "_fused_rms_norm" in get_dsl_operations("cutedsl")


# ---- what is timed -------------------------------------------------------------------------------------------------


@dataclass
class Inputs:
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    grad_output: torch.Tensor
    residual: torch.Tensor | None
    grad_residual_out: torch.Tensor | None
    out: torch.Tensor  # where the roofs write
    residual_out: torch.Tensor | None

    def parameters(self, cell):
        return self.weight, (self.bias if cell.norm == "layer_norm" else None)

    def leaves(self, cell):
        """What gets a gradient, or is None: x, weight, bias, residual."""
        return [self.x, *self.parameters(cell), self.residual]

    def normalized(self):
        return self.x if self.residual is None else self.x + self.residual


def make_inputs(cell, sets):
    generator = torch.Generator(DEVICE).manual_seed(0)  # torch's own one is unusable after a capture that failed

    def randn(*shape, dtype):
        return torch.randn(shape, generator=generator, device=DEVICE, dtype=DTYPES[dtype])

    rows, hidden_size = cell.rows, cell.hidden_size
    return [
        Inputs(
            x=randn(rows, hidden_size, dtype=cell.dtype),
            weight=randn(hidden_size, dtype=cell.weight_dtype),
            bias=randn(hidden_size, dtype=cell.weight_dtype),
            grad_output=randn(rows, hidden_size, dtype=cell.dtype),
            out=torch.empty(rows, hidden_size, device=DEVICE, dtype=DTYPES[cell.dtype]),
            **{
                name: randn(rows, hidden_size, dtype=cell.residual_dtype) if cell.residual_dtype else None
                for name in ("residual", "grad_residual_out", "residual_out")
            },
        )
        for _ in range(sets)
    ]


def roof_call(cell, inputs):
    """The plain pass over the same bytes: a copy forward, two reads and one write backward. With a residual: two
    copies; backward, where there are two gradients, the residual's share as two reads and one write."""
    if cell.residual_dtype:
        two_gradients = cell.direction == "backward" and cell.residual_dtype != cell.dtype

        def copies():
            inputs.out.copy_(inputs.x)
            if two_gradients:
                return torch.add(inputs.residual, inputs.grad_residual_out, out=inputs.residual_out)
            return inputs.residual_out.copy_(inputs.residual)

        return copies
    if cell.direction == "forward":
        # But for the last bytes: a copy of a number of bytes that 16 does not divide takes half as long again.
        elements = max(inputs.x.numel() // 16 * 16, 1)
        source, target = inputs.x.view(-1)[:elements], inputs.out.view(-1)[:elements]
        return lambda: target.copy_(source)
    return lambda: torch.add(inputs.x, inputs.grad_output, out=inputs.out)


def provider_call(norm, cell, inputs):
    """A function without arguments that does, once, what the cell's direction says."""
    count = 4 if cell.residual_dtype else 3
    given = inputs.leaves(cell)[:count]
    if cell.direction in ("forward", "call_no_grad"):

        def call():
            with torch.no_grad():
                return norm(*given)

        return call

    given = [None if t is None else t.detach().requires_grad_() for t in given]
    leaves = [t for t in given if t is not None]
    gradients = (inputs.grad_output, inputs.grad_residual_out) if cell.residual_dtype else inputs.grad_output
    if cell.direction == "step":
        return lambda: torch.autograd.grad(norm(*given), leaves, gradients)
    # Backward alone. In a CUDA graph nothing but its kernels is left of autograd.
    results = norm(*given)
    return lambda: torch.autograd.grad(results, leaves, gradients, retain_graph=True)


# ---- nobody wins by being wrong ------------------------------------------------------------------------------------


class Wrong(Exception):
    """In what a provider's result is not the norm's."""


class Truth:
    """What a cell's first call must return, in fp64: some rows of y and grad_input, some columns of the parameters'
    gradients. It also remembers those rows of the inputs."""

    # ||error|| / ||truth||. Wide, as peers round statistics or partial sums to 16 bits; a wrong formula is off by more.
    TOLERANCE = {"fp16": 2e-2, "bf16": 5e-2, "fp32": 1e-3, "fp64": 1e-7}

    def __init__(self, cell, inputs):
        self.cell, self.inputs = cell, inputs

        def some(size, count):
            return torch.linspace(0, size - 1, min(size, count), dtype=torch.float64, device=DEVICE).round().long()

        self.rows = some(cell.rows, 16)
        self.kept = self.sample_of_inputs()
        normalized = inputs.normalized()
        z = normalized[self.rows].double().requires_grad_()
        weight, bias = (None if t is None else t.double() for t in inputs.parameters(cell))
        y = PROVIDERS["torch"](replace(cell, op=cell.norm, residual_dtype=None))(z, weight, bias)
        self.results = [("y", y.detach(), inputs.x)]
        if cell.residual_dtype:
            self.results.append(("residual_out", z.detach(), inputs.residual))
        self.gradients = []
        if cell.direction in ("backward", "step"):
            columns = self.columns = some(cell.hidden_size, 16)
            wide = normalized.to(torch.promote_types(normalized.dtype, torch.float32))
            mean = wide.mean(-1, keepdim=True) if cell.norm == "layer_norm" else torch.zeros_like(wide[:, :1])
            rstd = ((wide - mean).square().mean(-1, keepdim=True).double() + EPS[cell.norm]).rsqrt()
            grad_output = inputs.grad_output[:, columns].double()
            x_hat = (wide[:, columns].double() - mean) * rstd
            (grad_z,) = torch.autograd.grad(y, z, inputs.grad_output[self.rows].double())
            if cell.residual_dtype:
                grad_z += inputs.grad_residual_out[self.rows].double()
            self.gradients = [
                ("grad_input", grad_z, self.rows),
                ("grad_weight", (grad_output * x_hat).sum(0), columns),
                ("grad_bias", grad_output.sum(0), columns),
                ("grad_residual", grad_z, self.rows),
            ]

    def sample_of_inputs(self):
        inputs = self.inputs
        tensors = (inputs.x, inputs.grad_output, inputs.residual, inputs.grad_residual_out)
        return [t[self.rows] for t in tensors if t is not None]

    def inputs_are_intact(self):
        return all(map(torch.equal, self.sample_of_inputs(), self.kept))

    def check(self, result):
        if self.gradients:
            leaves = self.inputs.leaves(self.cell)
            wanted = [(*g, leaf) for g, leaf in zip(self.gradients, leaves, strict=True) if leaf is not None]
            for (name, truth, where, leaf), found in zip(wanted, result, strict=True):
                self.compare(name, found, where, truth, leaf)
        else:
            found = result if self.cell.residual_dtype else [result]
            for (name, truth, like), one in zip(self.results, found, strict=True):
                self.compare(name, one, self.rows, truth, like)

    def compare(self, name, found, where, truth, like):
        if found.shape != like.shape or found.dtype != like.dtype:
            raise Wrong(f"{name} is {found.dtype} of {tuple(found.shape)}")
        error = ((found[where].double() - truth).norm() / truth.norm()).item()
        if not error <= self.TOLERANCE[self.cell.dtype]:  # a NaN is wrong, too
            raise Wrong(f"{name} is off by {error:.0e} of its size")


# ---- timing --------------------------------------------------------------------------------------------------------


@dataclass
class Times:
    """Microseconds of one call: median, and the 20th and 80th percentile of the rounds."""

    us: float
    p20: float
    p80: float

    @classmethod
    def of(cls, samples):
        ordered = sorted(samples)
        at = lambda share: ordered[round(share * (len(ordered) - 1))]  # noqa: E731
        return cls(statistics.median(ordered), at(0.2), at(0.8))


def l2_bytes():
    return getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 0) or (64 << 20)


def is_l2_cold(cell):
    """Problems far smaller than the L2 cache are timed warm: in a model their input is fresh from the layer before."""
    return bytes_moved(cell) > l2_bytes() // 4


def sets_of_inputs(cell):
    """How many sets of inputs to rotate over, so that what a call finds in the L2 cache is not its own."""
    if not HAS_CUDA or cell.direction in HOST_DIRECTIONS or not is_l2_cold(cell):
        return 1
    forward = bytes_moved(replace(cell, direction="forward"))
    return 1 if forward > 2 * l2_bytes() else math.ceil(2 * l2_bytes() / forward) + 1


class GraphTimer:
    """GPU time: CUDA graphs of many launches each, replayed in turns, so that drifting clocks touch all alike."""

    WARM_UP = 2

    def __init__(self, rounds):
        self.rounds = rounds
        self.stream = torch.cuda.Stream()

    def time(self, cell, calls_of, failed):
        """{name: Times} for `calls_of`, {name: one call per set of inputs}; failed(name, error) for one that fails."""
        expected_us = bytes_moved(cell) / 4e6
        launches = min(100, max(4, math.ceil(1000 / expected_us)))
        launches = math.ceil(launches / max(map(len, calls_of.values()))) * max(map(len, calls_of.values()))
        graphs = {}
        for name, calls in calls_of.items():
            try:
                graphs[name] = self.capture(calls, launches)
            except Exception as error:
                failed(name, error)
        events = {name: [] for name in graphs}
        with torch.cuda.stream(self.stream):
            for _ in range(self.WARM_UP + self.rounds):
                for name, (graph, _) in graphs.items():
                    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    start.record()
                    graph.replay()
                    end.record()
                    events[name].append((start, end))
        torch.cuda.synchronize()
        return {
            name: Times.of([1000 * start.elapsed_time(end) / launches for start, end in pairs[self.WARM_UP :]])
            for name, pairs in events.items()
        }

    def capture(self, calls, launches):
        """A graph of `launches` calls, and its last outputs: one per set stays alive, so that writes rotate too."""
        outputs = [None] * len(calls)
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            for _ in range(2):
                for call in calls:
                    call()
        torch.cuda.synchronize()
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.stream(self.stream), torch.cuda.graph(graph, pool=pool, stream=self.stream):
                for launch in range(launches):
                    outputs[launch % len(calls)] = calls[launch % len(calls)]()
        except Exception:
            # Where CUDA gave up the capture, torch's allocator still waits for its end, and would fail all later cells.
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
                torch._C._cuda_releasePool(torch.cuda.current_device(), pool)
            raise
        return graph, outputs


class LoopTimer:
    """Wall time of calls in a Python loop, all names in turns. On a GPU the loop ends with a synchronization."""

    def __init__(self, rounds=15, round_us=3000, with_events=False):
        self.rounds, self.round_us, self.with_events = rounds, round_us, with_events

    def time(self, cell, calls_of, failed):
        calls, repeats = {}, {}
        for name, of in calls_of.items():
            try:
                repeats[name] = self.repeats(of[0])
                calls[name] = of[0]
            except Exception as error:
                failed(name, error)
        samples = {name: [] for name in calls}
        for _ in range(self.rounds):
            for name, call in calls.items():
                samples[name].append(self.run(call, repeats[name]) / repeats[name])
        return {name: Times.of(of) for name, of in samples.items()}

    def repeats(self, call):
        for _ in range(3):
            call()
        once = self.run(call, 1)
        return max(1, min(100, round(self.round_us / max(once, 1e-3))))

    def run(self, call, repeats):
        """Microseconds of `repeats` calls: between two CUDA events, or by the clock."""
        if self.with_events:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(repeats):
                call()
            end.record()
            torch.cuda.synchronize()
            return 1000 * start.elapsed_time(end)
        if HAS_CUDA:
            torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(repeats):
            call()
        if HAS_CUDA:
            torch.cuda.synchronize()
        return 1e6 * (time.perf_counter() - started)


class Bench:
    """Measures cells and collects their records."""

    def __init__(self, providers, rounds=20):
        self.providers = providers
        self.results = []
        self.notes = {}  # why a provider was skipped: the cells
        self.failed = False  # ours is wrong, or the GPU is gone
        self.graph_timer = GraphTimer(rounds) if HAS_CUDA else None

    def measure(self, cell, timer=None, keep=True, without=()):
        """{name: Times} of the cell's providers, and of "roof" where there is one; kept in `results`."""
        on_graph = timer is None and HAS_CUDA and cell.direction not in HOST_DIRECTIONS
        calls_of, times, spoiler = {}, {}, None
        try:
            stream = self.graph_timer.stream if on_graph else None
            with torch.cuda.stream(stream):  # backward runs on the stream of its forward; None changes nothing
                sets = make_inputs(cell, sets_of_inputs(cell) if on_graph else 1)
                if on_graph:
                    calls_of["roof"] = [roof_call(cell, inputs) for inputs in sets]
                truth = Truth(cell, sets[0])
                for name in self.providers:
                    if name in without:
                        continue
                    try:
                        norm = PROVIDERS[name](cell)
                        calls = [provider_call(norm, cell, inputs) for inputs in sets]
                        truth.check(calls[0]())
                        calls_of[name] = calls
                    except Exception as error:
                        self.skip(name, cell, error)
                    if not truth.inputs_are_intact():
                        spoiler = name
                        break
            if not spoiler:
                chosen = timer or (self.graph_timer if on_graph else LoopTimer())
                times = chosen.time(cell, calls_of, lambda name, error: self.skip(name, cell, error))
        except torch.cuda.OutOfMemoryError:
            self.note("left out, not enough GPU memory", cell)
        finally:
            calls_of.clear()
            sets = truth = calls = norm = None
            if HAS_CUDA:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
        if spoiler:
            self.skip(spoiler, cell, Wrong("it writes to its inputs"))
            return self.measure(cell, timer, keep, (*without, spoiler))
        for name, t in times.items():
            if name != "roof" and keep:
                self.results.append(self.record(cell, name, t, times.get("roof"), on_graph))
        return times

    def skip(self, name, cell, error):
        reason = str(error).strip().split("\n")[0][:200] or type(error).__name__
        if isinstance(error, Wrong):
            self.failed |= name == "fused"
            reason = f"WRONG: {reason}"
        elif not isinstance(error, (Unavailable, ImportError)):
            reason = f"{type(error).__name__}: {reason}"
        self.note(f"{name}: skipped: {reason}", cell)

    def note(self, text, cell=None):
        self.notes.setdefault(text, []).append(cell)

    def lines_of_notes(self):
        for text, cells in self.notes.items():
            yield text + (f" ({len(cells)} cells, the first {cells[0]})" if cells[0] else "")

    @staticmethod
    def record(cell, name, times, roof, on_graph):
        return {
            "op": cell.op,
            "direction": cell.direction,
            "dtype": cell.dtype,
            "weight_dtype": cell.weight_dtype,
            "rows": cell.rows,
            "hidden_size": cell.hidden_size,
            "residual_dtype": cell.residual_dtype,
            "provider": name,
            "us": round(times.us, 3),
            "roof_us": round(roof.us, 3) if roof else None,
            "fraction": round(roof.us / times.us, 4) if roof else None,
            "p20_us": round(times.p20, 3),
            "p80_us": round(times.p80, 3),
            "gb_per_s": round(bytes_moved(cell) / times.us / 1e3, 1) if roof else None,
            "timing": ("graph, L2 cold" if is_l2_cold(cell) else "graph, L2 warm") if on_graph else "loop",
            "device": DEVICE,
        }


# ---- printing ------------------------------------------------------------------------------------------------------


GREEN, RED, BOLD = "\033[32m", "\033[31m", "\033[1m"


def paint(text, colour):
    """In colour on a terminal (NO_COLOR=1: not there either), plain in a file or a pipe."""
    return f"{colour}{text}\033[0m" if colour and sys.stdout.isatty() and not os.environ.get("NO_COLOR") else text


def print_table(title, header, rows):
    """A box with a title, a header and rows of strings; the first column is flush left, the others right. What ends
    in x is a speedup: above 1 in green, below in red."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    inner = max(sum(widths) + 3 * (len(widths) - 1) + 2, len(title) + 2)
    widths[-1] += inner - (sum(widths) + 3 * (len(widths) - 1) + 2)

    def colour(cell):
        return (GREEN if float(cell[:-1]) >= 1 else RED) if cell.endswith("x") and cell[0].isdigit() else None

    def text(cells, colour):
        parts = [cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(cells, widths))]  # noqa: B905
        return f"║ {' │ '.join(paint(p, colour(c)) for p, c in zip(parts, cells))} ║"  # noqa: B905

    print(f"╔{'═' * inner}╗")
    print(f"║ {paint(title.ljust(inner - 2), BOLD)} ║")
    print(f"╠{'═' * inner}╣")
    print(text(header, lambda cell: BOLD))
    print(f"╠{'═' * inner}╣")
    for row in rows:
        print(text(row, colour))
    print(f"╚{'═' * inner}╝\n", flush=True)


def number(value, digits=1):
    return "-" if value is None else f"{value:.{digits}f}"


class Progress:
    """A bar on stderr while cells are measured; silent where stderr is not a terminal. step() says what comes next."""

    def __init__(self, total):
        self.total, self.done, self.started = total, 0, time.perf_counter()

    def step(self, label):
        if sys.stderr.isatty():
            filled = round(30 * self.done / max(self.total, 1))
            left = ""
            if self.done:
                left = f"{(time.perf_counter() - self.started) / self.done * (self.total - self.done):4.0f} s left"
            line = f"[{'█' * filled}{'·' * (30 - filled)}] {self.done}/{self.total} {left} {label}"
            line = line[: shutil.get_terminal_size().columns - 1]  # a longer one would wrap, and stay
            print(f"\r\033[K{line}", end="\r\033[K" if self.done >= self.total else "", file=sys.stderr, flush=True)
        self.done += 1


def print_small_shapes(bench):
    """The first table: eager calls of LayerNorm in fp32 on small shapes. Returns the cells whose results are kept."""
    rows, kept = [], []
    progress = Progress(len(SMALL_SHAPES))
    eager = LoopTimer(rounds=9, with_events=HAS_CUDA)
    for shape in SMALL_SHAPES:
        progress.step(f"layer_norm fp32 {shape}")
        forward = Cell("layer_norm", "forward", "fp32", "fp32", *shape)
        kept.append(forward)
        row = [f"({shape[0]}, {shape[1]})"]
        if HAS_CUDA:
            cell = Cell("layer_norm", "call_no_grad", "fp32", "fp32", *shape)
            row += versus(bench.measure(cell, timer=eager, keep=False))
        rows.append(row + versus(bench.measure(forward)))
    progress.step("")
    header = ["Shape", "PyTorch (µs)", "fused (µs)", "speedup"]
    title = "LayerNorm forward, fp32: a call, launch included"
    if HAS_CUDA:
        header += ["PyTorch, GPU (µs)", "fused, GPU (µs)", "speedup"]
        title += " (CUDA events) | GPU time alone (CUDA graph)"
    else:
        title = "LayerNorm forward, fp32, CPU kernels (no GPU here)"
    print_table(title, header, rows)
    return kept


def busy_cores(seconds=0.5):
    """How many cores other programs keep busy now; 0 where the system does not say."""

    def ticks():
        try:
            fields = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        except (OSError, ValueError):
            return 0
        return sum(fields) - fields[3] - fields[4]  # idle, and waiting for a disk

    before = ticks()
    time.sleep(seconds)
    return (ticks() - before) / os.sysconf("SC_CLK_TCK") / seconds


def versus(times):
    torchs, ours = times.get("torch"), times.get("fused")
    speedup = f"{torchs.us / ours.us:.2f}x" if torchs and ours else "-"
    return [number(torchs.us) if torchs else "-", number(ours.us) if ours else "-", speedup]


def best_peer(us_of):
    """The fastest but us: (name, µs), or None."""
    peers = {name: us for name, us in us_of.items() if name not in ("fused", "roof")}
    return min(peers.items(), key=lambda item: item[1], default=None)


def print_cells(bench, cells):
    """Measure `cells`; one table for each op, dtype and kind of time."""
    progress = Progress(len(cells))
    groups = {}
    for cell in cells:
        progress.step(str(cell))
        try:
            key = (cell.op, cell.dtype, cell.residual_dtype, cell.direction)
            groups.setdefault(key, []).append((cell, bench.measure(cell)))
        except RuntimeError as error:  # a provider broke the CUDA context: keep what was measured
            bench.note(f"STOPPED at {cell}: {str(error).splitlines()[0]}")
            bench.failed = True
            break
    progress.step("")
    for (op, dtype, residual_dtype, direction), measured in groups.items():
        names = [name for name in bench.providers if any(name in times for _, times in measured)]
        if not names:
            continue
        has_roof = any("roof" in times for _, times in measured)
        in_detail = has_roof and len(names) <= 3  # more would not fit a screen
        versus_torch = "fused" in names and "torch" in names
        versus_best = "fused" in names and len(names) > 2
        header = ["rows x hidden"]
        if has_roof:
            header += ["copy µs" if direction == "forward" or residual_dtype else "2R1W µs", "GB/s"]
        for name in names:
            header += [f"{name} µs", "GB/s", "of roof"] if in_detail else [f"{name} µs"]
        header += ["fused of roof"] * (has_roof and not in_detail and "fused" in names)
        header += ["vs torch"] * versus_torch + ["best peer", "vs it"] * versus_best
        rows = []
        for cell, times in measured:
            roof, ours = times.get("roof"), times.get("fused")
            row = [f"{cell.rows} x {cell.hidden_size}" + ("" if not roof or is_l2_cold(cell) else " (L2 warm)")]
            if has_roof:
                row += [number(roof.us), number(bytes_moved(cell) / roof.us / 1e3, 0)] if roof else ["-", "-"]
            for name in names:
                t = times.get(name)
                row.append(number(t.us) if t else "-")
                if in_detail:
                    row += ["-", "-"] if not (t and roof) else [
                        number(bytes_moved(cell) / t.us / 1e3, 0), number(roof.us / t.us, 2)]  # fmt: skip
            if "fused of roof" in header:
                row.append(number(roof.us / ours.us, 2) if roof and ours else "-")
            if versus_torch:
                row.append(versus(times)[2])
            if versus_best:
                name, us = best_peer({name: t.us for name, t in times.items()}) or ("-", None)
                row += [name, f"{us / ours.us:.2f}x" if us and ours else "-"]
            rows.append(row)
        residual = f", residual {residual_dtype}" if residual_dtype else ""
        print_table(f"{op}, {dtype}{residual}, {direction}: {DIRECTIONS[direction]}", header, rows)


def times_by_cell(results, what="us"):
    """{Cell: {provider: µs, or another field}} of a record's results."""
    cells = {}
    for result in results:
        cell = Cell(**{field: result.get(field) for field in Cell.__dataclass_fields__})
        cells.setdefault(cell, {})[result["provider"]] = result[what]
    return cells


def print_verdict(results):
    """In how many cells another provider is faster, which one and by how much."""
    cells = {cell: us_of for cell, us_of in times_by_cell(results).items() if "fused" in us_of and len(us_of) > 1}
    ahead = {cell: best_peer(us_of) for cell, us_of in cells.items() if best_peer(us_of)[1] < us_of["fused"]}
    with_torch = [us_of for us_of in cells.values() if "torch" in us_of]
    if with_torch:
        slower = sum(us_of["fused"] > us_of["torch"] for us_of in with_torch)
        print(f"fused is slower than torch in {slower} of {len(with_torch)} cells.")
    if cells:
        print(f"Another provider than fused is the fastest in {len(ahead)} of {len(cells)} cells.")
    for cell, (name, us) in sorted(ahead.items(), key=lambda item: item[1][1] / cells[item[0]]["fused"]):
        ours = cells[cell]["fused"]
        print(f"  {cell}: {name} {us:.1f} µs, fused {ours:.1f} µs ({ours / us - 1:+.1%})")


# ---- records -------------------------------------------------------------------------------------------------------


def output_of(*command):
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def environment():
    """What a record of anything needs to be repeated; benchmarks/record_tests.py uses it too. COMMIT in the environment
    names the commit where the sources were copied without their repository."""
    import fused_layernorm
    from fused_layernorm._build.source_hash import source_hash

    commit = os.environ.get("COMMIT")
    if (
        not commit
        and (commit := output_of("git", "rev-parse", "HEAD"))
        and output_of("git", "status", "--porcelain", "--", "csrc", "fused_layernorm", "test_benchmark.py")
    ):
        commit += " with changes"
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),  # noqa: UP017
        "device": torch.cuda.get_device_name() if HAS_CUDA else f"CPU, {torch.get_num_threads()} threads",
        "gpu": torch.cuda.get_device_name() if HAS_CUDA else None,
        "driver": driver_version() if HAS_CUDA else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "fused_layernorm": fused_layernorm.__version__,
        "backend": fused_layernorm.backend(),
        "commit": commit,
        "csrc_hash": source_hash(),
    }


ROOF_NAMES = {"forward": "copy", "backward": "two_reads_one_write"}


def against_fastest_roof(record):
    """A record's results; where a cell's own roof was slow, `fraction` is of the fastest of the run. On some cards a
    copy of more than 256 MiB is slow, and that must not make a fast norm."""

    def judged(result):
        fastest = (
            record["meta"].get("roofs", {}).get(f"{ROOF_NAMES.get(result['direction'])}_{result['dtype']}_gb_per_s")
        )
        if not (fastest and result["fraction"] and result["timing"] == "graph, L2 cold"):
            return result
        slow = result["gb_per_s"] / result["fraction"] < 0.9 * fastest
        return {**result, "fraction": round(result["gb_per_s"] / fastest, 4)} if slow else result

    return [judged(result) for result in record["results"]]


def make_meta(bench, args):
    """The environment, and of this run: the fastest roofs in GB/s, whose versions, the options, what was skipped."""
    roofs = {}
    for result in bench.results:
        if result["roof_us"] and not result["residual_dtype"]:
            rate = result["gb_per_s"] / result["fraction"]
            if result["timing"] == "graph, L2 cold":
                key = f"{ROOF_NAMES[result['direction']]}_{result['dtype']}_gb_per_s"
                roofs[key] = max(roofs.get(key, 0), round(rate, 1))
    options = ("op", "dtype", "weight_dtype", "residual_dtype", "shapes", "direction", "providers", "rounds")
    return {
        **environment(),
        "l2_bytes": l2_bytes() if HAS_CUDA else None,
        "torch_rms_norm_override": torch_rms_norm_override(),
        "versions": {name: version_of(distribution) for name, distribution in DISTRIBUTIONS.items()},
        "roofs": roofs,
        "options": {name: getattr(args, name) for name in options},
        "skipped": list(bench.lines_of_notes()),
    }


def version_of(distribution):
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def driver_version():
    found = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found.split("\n")[0] if found else None


def write_records(bench, args):
    """What --json and --record ask for; returns the paths of the JSON files."""
    if not (args.json or args.record):
        return []
    written = [Path(args.json)] if args.json else []
    document = json.dumps({"meta": make_meta(bench, args), "results": bench.results}, indent=1) + "\n"
    if args.json:
        Path(args.json).write_text(document)
        print(f"wrote {args.json}")
    if args.record:
        path = Path(args.record) / f"benchmark_{datetime.datetime.now():%Y%m%d_%H%M%S}.json"
        path.write_text(document)
        written.append(path)
        with path.with_suffix(".csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(bench.results[0]) if bench.results else ["op"])
            writer.writeheader()
            writer.writerows(bench.results)
        print(f"wrote {path} and {path.with_suffix('.csv').name}")
    return written


def plot(paths):
    """PNGs beside the records at `paths`; 1 where that cannot be done."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from plot_record import plot_record
    except ImportError as error:
        print(f"no plots: {error} (pip install matplotlib)", file=sys.stderr)
        return 1
    for path in paths:
        for written in plot_record(path):
            print(f"wrote {written}")
    return 0


# ---- filling the caches before a timed run -------------------------------------------------------------------------


def use_caches_of_our_own():
    """On disk, and shared by processes: what --warm fills and a timed run reads."""
    if not os.access(OUTPUT.parent, os.W_OK):
        return
    for name, folder in (("TORCHINDUCTOR", "inductor"), ("TRITON", "triton"), ("QUACK", "quack")):
        os.environ.setdefault(f"{name}_CACHE_DIR", str(OUTPUT / "cache" / folder))


def warm(processes, arguments):
    """Call every provider that compiles when it is called, once in every cell, in parallel processes."""
    started, children = time.monotonic(), []
    OUTPUT.mkdir(parents=True, exist_ok=True)
    for part in range(processes):
        log = OUTPUT / f"warm_{part}.log"
        command = [sys.executable, __file__, *arguments, "--warm-part", f"{part}/{processes}"]
        with log.open("w") as file:
            children.append((log, subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)))
    for log, child in children:
        if child.wait():
            print(f"{log.name}: ended with {child.returncode}:\n{log.read_text()[-1000:]}")
    print(f"filled the caches in {time.monotonic() - started:.0f} s")
    return max(abs(child.returncode) for _, child in children)


def warm_part(part, cells, providers):
    """One process of warm(). Its failures are silent: the timed run meets them again and reports them."""
    global AUTOTUNE_MS
    import torch._inductor.config

    # Many processes use the GPU now: what they time while they tune must not decide what is used later.
    AUTOTUNE_MS, torch._inductor.config.autotune_local_cache = 0, False
    index, processes = map(int, part.split("/"))
    as_timed = {"call_no_grad": "forward", "step": "backward"}  # they compile the same
    cells = dict.fromkeys(replace(cell, direction=as_timed.get(cell.direction, cell.direction)) for cell in cells)
    for cell in list(cells)[index::processes]:
        for name in providers:
            if name in COMPILED_WHEN_CALLED:
                print(name, cell, flush=True)
                with contextlib.suppress(Exception):
                    provider_call(PROVIDERS[name](cell), cell, make_inputs(cell, 1)[0])()
        if HAS_CUDA:
            torch.cuda.empty_cache()
    return 0


# ---- the command line ----------------------------------------------------------------------------------------------


def parse_arguments(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="directions: " + "; ".join(f"{name}: {what}" for name, what in DIRECTIONS.items())
        + f". Providers: {', '.join(PROVIDERS)}. Without --shapes: the table of small shapes, then LLM shapes.",
    )  # fmt: skip

    def several(name, default, choices, what):
        def split(text):
            names = [part for part in text.split(",") if part]
            for part in names:
                if part not in choices:
                    raise argparse.ArgumentTypeError(f"{part!r} is none of {', '.join(choices)}")
            return names

        parser.add_argument(name, type=split, default=default, metavar="A,B", help=f"{what} ({', '.join(choices)})")

    several("--op", list(EPS), [*EPS, *ADD_OPS], f"which norms; default: {','.join(EPS)}")
    several("--dtype", None, list(DTYPES), "dtypes of x; default: bf16 on a GPU, fp32 on a CPU")
    parser.add_argument("--weight-dtype", choices=("x", "fp32"), default="x", help="x: that of x (default)")
    parser.add_argument("--residual-dtype", choices=("x", "fp32"), default="x", help="of the add ops; default: x")
    parser.add_argument(
        "--shapes",
        type=parse_shapes,
        metavar="LIST",
        default=None,
        help="small, llm, sweep (256 MiB of x at each hidden size), huge (few long rows), narrow (2^20 rows and more "
        "of 64 and 128), ROWSxHIDDEN; by commas. With small, the other groups have GPU times only",
    )
    several("--direction", ["forward", "backward"], list(DIRECTIONS), "what is timed; default: forward,backward")
    parser.add_argument(
        "--providers",
        type=lambda text: list(PROVIDERS) if text == "all" else text.split(","),
        default=["fused", "torch"],
        metavar="A,B",
        help="providers to time, or all; default: fused,torch; missing ones are skipped by name",
    )
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="of the GPU times; default: 20")
    parser.add_argument("--json", metavar="FILE", help="write meta and results as JSON")
    parser.add_argument("--record", metavar="DIR", help="write JSON and CSV, named by the date, into DIR")
    parser.add_argument(
        "--plot",
        nargs="?",
        const=True,
        metavar="FILE",
        help="draw PNGs next to this run's record; with FILE: measure nothing, draw that record",
    )
    parser.add_argument("--warm", type=int, metavar="N", help="only fill the compile caches, in N processes")
    parser.add_argument("--warm-part", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, metavar="N", help="threads of the CPU kernels; default: torch's choice")
    args = parser.parse_args(arguments)
    if args.plot is True and not (args.record or args.json):
        parser.error("--plot after a run needs --record or --json, for the folder of the PNGs")
    if isinstance(args.plot, str) and not Path(args.plot).is_file():
        parser.error(f"--plot: no such file, {args.plot}")
    if args.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {args.rounds}")
    for option, folder in (("--record", args.record), ("--json", args.json and Path(args.json).parent)):
        if folder is not None:  # before anything is timed
            try:
                Path(folder).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                parser.error(f"{option}: {folder} cannot be created ({error.strerror})")
            if not os.access(folder, os.W_OK):
                parser.error(f"{option}: {folder} cannot be written")
    args.dtype = args.dtype or (["bf16"] if HAS_CUDA else ["fp32"])
    return args


def parse_shapes(text):
    for part in text.split(","):
        if part not in GROUPS and not all(p.isdigit() and int(p) for p in part.split("x", 1)):
            raise argparse.ArgumentTypeError(f"{part!r} is neither {', '.join(GROUPS)} nor ROWSxHIDDEN")
        if part.isdigit():
            raise argparse.ArgumentTypeError(f"{part!r} lacks the number of rows: ROWSxHIDDEN")
    return text.split(",")


def shapes_of(name, dtype):
    """(rows, hidden size) of a group, or of ROWSxHIDDEN. A CPU gets a sixteenth of the large ones."""
    share = 1 if HAS_CUDA else 16
    size = SWEEP_BYTES // share // DTYPES[dtype].itemsize
    if name == "small":
        return SMALL_SHAPES
    if name == "llm":
        return [(rows // share, hidden_size) for rows, hidden_size in LLM_SHAPES]
    if name == "sweep":
        return [(max(1, size // hidden_size), hidden_size) for hidden_size in SWEEP_HIDDEN_SIZES]
    if name == "huge":
        return [(rows, hidden_size // share) for rows, hidden_size in HUGE_SHAPES]
    if name == "narrow":
        return [(max((1 << 20) // share, size // hidden_size), hidden_size) for hidden_size in NARROW_HIDDEN_SIZES]
    return [tuple(int(part) for part in name.split("x"))]


def cells_of(args, shapes, directions):
    """The cells asked for. Beside the small shapes, the host's cost is not timed on the large groups, which hide it."""

    def of(choice, dtype):
        return dtype if choice == "x" else choice

    return [
        Cell(
            op,
            direction,
            dtype,
            of(args.weight_dtype, dtype),
            rows,
            hidden_size,
            of(args.residual_dtype, dtype) if op in ADD_OPS else None,
        )
        for dtype in args.dtype
        for op in args.op
        for direction in directions
        for name in shapes
        if not (direction in HOST_DIRECTIONS and "small" in shapes and name in GROUPS and name != "small")
        for rows, hidden_size in shapes_of(name, dtype)
    ]


def main(arguments=None):
    args = parse_arguments(arguments)
    if isinstance(args.plot, str):
        return plot([args.plot])
    if args.threads:
        torch.set_num_threads(args.threads)
    use_caches_of_our_own()
    default = args.shapes is None
    cells = cells_of(args, args.shapes or (["llm"] if HAS_CUDA else ["small"]), args.direction)
    host_cells = cells_of(args, ["small"], HOST_DIRECTIONS) if default and HAS_CUDA else []
    if args.warm_part:
        return warm_part(args.warm_part, cells + host_cells, args.providers)
    if args.warm:
        return warm(args.warm, sys.argv[1:] if arguments is None else arguments)
    import fused_layernorm

    bench = Bench([name for name in args.providers if name in PROVIDERS], args.rounds)
    for name in args.providers:
        if name not in PROVIDERS:
            bench.note(f"{name}: skipped: no such provider; there are {', '.join(PROVIDERS)}")
    where = torch.cuda.get_device_name() if HAS_CUDA else f"CPU ({torch.get_num_threads()} threads), no GPU found"
    print(f"fused_layernorm {fused_layernorm.__version__}, backend {fused_layernorm.backend()}, "
          f"torch {torch.__version__}, on {where}\n")  # fmt: skip
    if not HAS_CUDA and busy_cores() > 0.25 * (os.cpu_count() or 1):
        print("Other programs use this CPU: the times are unreliable.\n")
    try:
        measured = print_small_shapes(bench) if default else []
        print_cells(bench, [cell for cell in cells if cell not in measured])
        if host_cells:
            print_cells(bench, host_cells)
    except KeyboardInterrupt:
        bench.failed = True
        bench.note("interrupted: the record has what was measured")
    print_verdict(bench.results)
    for line in bench.lines_of_notes():
        print(line)
    written = write_records(bench, args)
    not_drawn = args.plot is True and plot(written)
    return 1 if bench.failed or not_drawn else 0


def test_a_small_run_writes_its_records(tmp_path, capsys):
    shapes, directions = "3x64,5x100", "forward,backward,call_no_grad,step"
    arguments = ["--shapes", shapes, "--direction", directions, "--dtype", "fp32", "--providers", "fused,torch,nobody"]
    assert main([*arguments, "--json", str(tmp_path / "run.json"), "--record", str(tmp_path / "records")]) == 0
    document = json.loads((tmp_path / "run.json").read_text())
    assert len(document["results"]) == 2 * 4 * 2 * 2  # ops, directions, shapes, providers
    promised = "op direction dtype weight_dtype rows hidden_size provider us roof_us fraction".split()
    assert set(promised) <= set(document["results"][0])
    assert all(result["us"] > 0 for result in document["results"])
    assert document["meta"]["csrc_hash"] and any("nobody" in note for note in document["meta"]["skipped"])
    assert sorted(path.suffix for path in (tmp_path / "records").iterdir()) == [".csv", ".json"]
    printed = capsys.readouterr().out
    assert "layer_norm, fp32, forward" in printed and "\033" not in printed  # colours are for terminals


def test_an_interrupted_run_writes_what_it_measured(tmp_path, monkeypatch, capsys):
    measure, measured = Bench.measure, []

    def interrupted(bench, cell):
        if measured:
            raise KeyboardInterrupt
        measured.append(cell)
        return measure(bench, cell)

    monkeypatch.setattr(Bench, "measure", interrupted)
    path = tmp_path / "run.json"
    assert main(["--shapes", "3x64", "--dtype", "fp32", "--providers", "fused,torch", "--json", str(path)]) == 1
    document = json.loads(path.read_text())
    assert [r["provider"] for r in document["results"]] == ["fused", "torch"]
    assert any("interrupted" in note for note in document["meta"]["skipped"])


def test_a_build_that_has_ended_is_not_other_work(monkeypatch):
    """work is measured now: the load average remembers the build for minutes"""
    monkeypatch.setattr(os, "getloadavg", lambda: (16.0, 16.0, 16.0))
    idle = iter(["cpu  900 0 90 1000 10 0 0 0 0 0", "cpu  900 0 90 1050 10 0 0 0 0 0"])
    monkeypatch.setattr(Path, "read_text", lambda path: next(idle))
    assert busy_cores(0.01) == 0
    busy = iter(["cpu  900 0 90 1000 10 0 0 0 0 0", "cpu  950 0 90 1000 10 0 0 0 0 0"])
    monkeypatch.setattr(Path, "read_text", lambda path: next(busy))
    assert busy_cores(0.5) == 50 / os.sysconf("SC_CLK_TCK") / 0.5


def test_norms_of_a_sum(capsys):
    for residual in ("x", "fp32"):
        arguments = ["--op", "add_layer_norm,add_rms_norm", "--shapes", "3x64", "--dtype", "fp32,bf16"]
        arguments += ["--direction", "forward,backward,call_no_grad,step", "--residual-dtype", residual]
        assert main([*arguments, "--providers", "fused,torch"]) == 0
    printed = capsys.readouterr().out
    assert "add_rms_norm, bf16, residual fp32, backward" in printed and "WRONG" not in printed


def results_for_a_test(fraction, small):
    """Made-up results: fused and torch, `fraction` of the roof in the sweep, `small` µs against torch's 10."""
    sizes = [(direction, SWEEP_BYTES // 2 // n, n) for n in (256, 4096, 4097) for direction in ("forward", "backward")]
    sizes += [(direction, *shape) for shape in SMALL_SHAPES for direction in DIRECTIONS]
    results = []
    for op in EPS:
        for direction, rows, hidden_size in sizes:
            cell, roof = Cell(op, direction, "bf16", "bf16", rows, hidden_size), None
            us = {"fused": small, "torch": 10.0}
            if direction not in HOST_DIRECTIONS:
                roof = Times(2.0, 2.0, 2.0)
                us = {"fused": 2 / fraction, "torch": 4.0} if rows > 1000 else us
            for name in us:
                times = Times(us[name], us[name], us[name])
                results.append(Bench.record(cell, name, times, roof, on_graph=False))
    return {"meta": {"device": "a card", "torch": "2"}, "results": results}


def test_a_record_is_drawn(tmp_path):
    import pytest

    pytest.importorskip("matplotlib")
    record = tmp_path / "run.json"
    record.write_text(json.dumps(results_for_a_test(0.9, 5.0)))
    assert main(["--plot", str(record)]) == 0
    drawn = {path.name for path in tmp_path.glob("*.png")}
    assert drawn == {f"run_{name}{op}{dtype}.png" for op in EPS for name, dtype in (("", ""), ("small_", "_bf16"))}
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in drawn)


def test_a_slow_roof_makes_no_fast_norm():
    cold = {"direction": "forward", "dtype": "bf16", "timing": "graph, L2 cold"}
    results = [
        {**cold, "fraction": 1.5, "gb_per_s": 3000.0},  # its roof: 2000 GB/s
        {**cold, "fraction": 0.8, "gb_per_s": 3000.0},  # 3750
        {**cold, "fraction": 1.5, "gb_per_s": 3000.0, "timing": "graph, L2 warm"},
        {**cold, "fraction": None, "gb_per_s": None},
    ]
    judged = against_fastest_roof({"meta": {"roofs": {"copy_bf16_gb_per_s": 4000.0}}, "results": results})
    assert [result["fraction"] for result in judged] == [0.75, 0.8, 1.5, None]
    assert results[0]["fraction"] == 1.5


def test_targets_are_met_or_missed_by_how_much(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import check_targets

    record = tmp_path / "run.json"
    record.write_text(json.dumps(results_for_a_test(0.98, 5.0)))
    assert check_targets.main(record) == 0
    assert "44 of 44 targets are met" in capsys.readouterr().out
    record.write_text(json.dumps(results_for_a_test(0.95, 12.0)))
    assert check_targets.main(record) == 1
    printed = capsys.readouterr().out
    assert "0.950 (-0.020)" in printed and "1.200 (+0.200)" in printed
    assert "Another provider than fused is the fastest in 32 of 44 cells" in printed and "torch 10.0 µs" in printed


def write_over_x(x):
    x.zero_()
    return x


# What may be wrong with a norm, and where it shows.
FLAWS = {
    "broken": ("forward", lambda norm, x, weight, bias: x.no_such_method()),
    "identity": ("forward", lambda norm, x, weight, bias: x.clone()),
    "not_a_number": ("forward", lambda norm, x, weight, bias: norm(x, weight, bias) * math.nan),
    "wrong_dtype": ("forward", lambda norm, x, weight, bias: norm(x, weight, bias).double()),
    "spoiler": ("forward", lambda norm, x, weight, bias: norm(write_over_x(x), weight, bias)),
    "wrong_gradient": ("backward", lambda norm, x, weight, bias: norm(x, weight, bias) + weight - weight.detach()),
}


def test_a_provider_that_fails_or_is_wrong_is_left_out(tmp_path, monkeypatch):
    for name, (direction, flawed) in FLAWS.items():

        def provide(cell, flawed=flawed):
            norm = PROVIDERS["torch"](cell)
            return lambda x, weight, bias: flawed(norm, x, weight, bias)

        options = [
            "--shapes",
            "6x64",
            "--dtype",
            "fp32",
            "--direction",
            direction,
            "--json",
            str(tmp_path / "run.json"),
        ]
        with monkeypatch.context() as patch:
            patch.setitem(PROVIDERS, name, provide)
            assert main([*options, "--providers", f"fused,{name},torch"]) == 0
            document = json.loads((tmp_path / "run.json").read_text())
            assert [result["provider"] for result in document["results"]] == ["fused", "torch"] * len(EPS), name
            notes = document["meta"]["skipped"]
            assert notes and all(note.startswith(f"{name}: skipped: ") for note in notes), notes
            assert all("WRONG" in note for note in notes) == (name != "broken"), notes
            patch.setitem(PROVIDERS, "fused", provide)
            assert main([*options, "--providers", "fused"]) == (0 if name == "broken" else 1)


def test_a_provider_that_fails_under_capture_is_left_out(monkeypatch):
    import pytest

    if not HAS_CUDA:
        pytest.skip("needs a CUDA device")

    def synchronizes(cell):
        norm = PROVIDERS["torch"](cell)
        return lambda x, weight, bias: norm(x, weight, bias) if x.sum().item() else None

    monkeypatch.setitem(PROVIDERS, "synchronizes", synchronizes)
    bench = Bench(["synchronizes", "torch"], rounds=3)
    for direction in ("forward", "backward"):
        for shape in ((32, 512), (4096, 4096)):
            cell = Cell("layer_norm", direction, "fp32", "fp32", *shape)
            left = {"roof", "torch"} if direction == "forward" else {"roof", "torch", "synchronizes"}
            assert set(bench.measure(cell)) == left
    assert [note.split(":")[0] for note in bench.notes] == ["synchronizes"]


def test_warming_calls_what_compiles_once_for_each_graph(monkeypatch):
    monkeypatch.setitem(globals(), "AUTOTUNE_MS", AUTOTUNE_MS)
    called = []

    def counted(cell):
        called.append((cell.op, cell.direction))
        return PROVIDERS["torch"](cell)

    monkeypatch.setitem(PROVIDERS, "quack", counted)
    shapes = ["--shapes", "6x64", "--dtype", "fp32", "--direction", "forward,call_no_grad,backward,step"]
    assert main([*shapes, "--providers", "torch,quack", "--warm-part", "0/1"]) == 0
    assert sorted(called) == sorted((op, direction) for op in EPS for direction in ("forward", "backward"))


if __name__ == "__main__":
    sys.exit(main())
