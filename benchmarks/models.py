"""Whole models with the norms of each provider, in eager mode and compiled:

    python benchmarks/models.py [FOLDER] [--models ...] [--modes ...] [--providers ...] [--warm N] [--quick]

A training step is forward, backward and AdamW on one fixed batch in bf16. The models are stacks of blocks (attention
and an MLP) without embedding. Providers of the norms: `torch` (nn.LayerNorm, nn.RMSNorm), `replaced` (the same model
after replace_norms()), `fused` (written with fused_add_* and fused_adaptive_layer_norm), `liger` and `quack` (their
norms, with the residual where they take one).

qwen3_next_* has the norms of transformers' own classes, which `torch` runs, `replaced` replaces and `fused` writes
with fused_add_rms_norm and fused_gated_rms_norm; it needs transformers. Of four blocks three have linear attention,
whose heads of 128 a gated RMSNorm follows, and one has attention with norms of q and k and a gate. Causal softmax
attention of the same heads stands in for the gated delta rule, without its convolution and decay: PyTorch has no
kernel of it, and transformers' own loop would take longer than all else. The MLP is dense, as wide as the experts
that one token uses. There are no rotary embeddings.

Writes models_DATE.json (--record: otherwise) into FOLDER (default: benchmarks/output). `results`: one entry a model,
mode and provider:

    ms, spread   median of the repeats, each the mean of --steps steps; (largest - smallest) / median
    peak_mib     most memory that one step allocates, beside parameters and the optimizer's state
    loss         after --loss-steps steps (training)
    gpu_ms       GPU time of one step in all kernels and copies: about what ms is where the GPU never waits for the host
    norm_us      GPU time of one step in kernels whose name has "norm", "add" or "GammaBeta": norms, residuals, sums of
                 gradients
    note         why a figure is null
"""

import argparse
import json
import multiprocessing
import re
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import fused_layernorm as fln  # noqa: E402
from test_benchmark import PROVIDERS, Cell, Unavailable, environment  # noqa: E402

EPS = 1e-6
TRAINING = ("eager", "compile")
INFERENCE = ("eager-infer", "compile-infer", "graph-infer")
NAMES = ("torch", "replaced", "fused", "liger", "quack")
OF_NORMS = re.compile("norm|add|GammaBeta", re.IGNORECASE)  # the last: PyTorch's gradients of weight and bias
OF_OTHERS = re.compile("multi_tensor|gemm|nvjet", re.IGNORECASE)  # optimizer, matrix products


@dataclass(frozen=True)
class Spec:
    width: int
    layers: int
    batch: int
    tokens: int
    op: str = "layer_norm"
    place: str = "pre"  # where the norm is: "pre", "post", "adaptive" (AdaLN)
    head: int = 64
    causal: bool = True
    norms_of_heads: bool = False  # of q and k
    is_hybrid: bool = False  # linear attention in three of four blocks, norms of transformers' Qwen3-Next

    def quick(self):
        return replace(self, width=32, layers=4 if self.is_hybrid else 2, batch=2, tokens=8, head=16)


MODELS = {
    "gpt_768": Spec(768, 8, 16, 1024),
    "gpt_1600": Spec(1600, 6, 8, 1024),
    "vit_1024": Spec(1024, 8, 32, 256, causal=False),
    "llama_2048": Spec(2048, 6, 4, 2048, "rms_norm"),
    "llama_4096": Spec(4096, 3, 2, 4096, "rms_norm", head=128),
    "bert_1024": Spec(1024, 8, 32, 256, place="post", causal=False),
    "dit_1152": Spec(1152, 8, 32, 256, place="adaptive", head=72, causal=False),
    "qwen3_2048": Spec(2048, 6, 4, 2048, "rms_norm", head=128, norms_of_heads=True),
    "qwen3_next_2048": Spec(2048, 4, 4, 2048, "rms_norm", head=128, norms_of_heads=True, is_hybrid=True),
}


def peer_norm(provider, op, width, with_residual):
    """norm(x, weight, bias[, residual]) of test_benchmark.py; None where the peer has no such norm."""
    name = f"add_{op}" if with_residual else op
    cell = Cell(name, "forward", "bf16", "bf16", 1, width, residual_dtype="bf16" if with_residual else None)
    try:
        return PROVIDERS[provider](cell)
    except Unavailable:
        if with_residual:
            return None
        raise


def of_qwen3_next():
    """The module with transformers' norms."""
    from transformers.models.qwen3_next import modeling_qwen3_next

    return modeling_qwen3_next


class Norm(nn.Module):
    """(y, z): y = norm(z) * (1 + scale) + shift, z = residual + gate * x, or x."""

    def __init__(self, op, width, provider, is_adaptive=False, is_zero_centered=False):
        super().__init__()
        self.options = {"weight_offset": 1.0} if is_zero_centered else {}
        if is_zero_centered:
            self.norm = of_qwen3_next().Qwen3NextRMSNorm(width, EPS)
        else:
            kind = nn.LayerNorm if op == "layer_norm" else nn.RMSNorm
            self.norm = kind(width, EPS, elementwise_affine=not is_adaptive)
        self.is_fused, self.peer, self.peer_add = provider == "fused", None, None
        self.add = fln.fused_add_layer_norm if op == "layer_norm" else fln.fused_add_rms_norm
        self.plain = fln.fused_layer_norm if op == "layer_norm" else fln.fused_rms_norm
        if provider in ("liger", "quack"):
            if is_adaptive:
                raise Unavailable("no norm without weight")
            self.peer, self.peer_add = (peer_norm(provider, op, width, adds) for adds in (False, True))

    def forward(self, x, residual=None, scale=None, shift=None, gate=None):
        weight, bias = self.norm.weight, getattr(self.norm, "bias", None)
        if self.is_fused:
            if scale is not None:
                found = fln.fused_adaptive_layer_norm(x, scale, shift, residual=residual, gate=gate, eps=EPS)
                return found if residual is not None else (found, x)
            if residual is not None:
                return self.add(x, residual, weight, bias, EPS, **self.options)
            return self.plain(x, weight, bias, EPS, **self.options), x
        if self.peer_add and residual is not None:
            rows = (x.reshape(-1, x.shape[-1]), weight, bias, residual.reshape(-1, x.shape[-1]))
            return tuple(t.view_as(x) for t in self.peer_add(*rows))
        z = x if residual is None else residual + (x if gate is None else gate * x)
        y = self.peer(z.reshape(-1, z.shape[-1]), weight, bias).view_as(z) if self.peer else self.norm(z)
        return (y if scale is None else y * (1 + scale) + shift), z


class Attention(nn.Module):
    def __init__(self, spec, provider):
        super().__init__()
        self.spec = spec
        self.qkv, self.out = nn.Linear(spec.width, 3 * spec.width), nn.Linear(spec.width, spec.width)
        self.of_heads = nn.ModuleList(Norm(spec.op, spec.head, provider) for _ in range(2 * spec.norms_of_heads))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (-1, self.spec.head)) for t in self.qkv(x).chunk(3, -1))
        if self.of_heads:
            q, k = (norm(t)[0] for norm, t in zip(self.of_heads, (q, k), strict=True))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=self.spec.causal).transpose(1, 2).flatten(2))


class LinearAttention(nn.Module):
    """Twice as many heads of v and z as of q and k; y = norm(attention) * silu(z)."""

    def __init__(self, spec, provider):
        super().__init__()
        self.head, self.is_fused = spec.head, provider == "fused"
        self.qkvz = nn.Linear(spec.width, 6 * spec.width, bias=False)
        self.norm = of_qwen3_next().Qwen3NextRMSNormGated(spec.head, EPS)
        self.out = nn.Linear(2 * spec.width, spec.width, bias=False)

    def forward(self, x):
        width = x.shape[-1]
        parts = self.qkvz(x).split([width, width, 2 * width, 2 * width], -1)
        q, k, v, z = (t.unflatten(-1, (-1, self.head)) for t in parts)
        q, k, v = (t.transpose(1, 2) for t in (q.repeat_interleave(2, 2), k.repeat_interleave(2, 2), v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        y, z = (t.reshape(-1, self.head) for t in (y, z))  # as transformers does
        y = fln.fused_gated_rms_norm(y, z, self.norm.weight, None, EPS) if self.is_fused else self.norm(y, z)
        return self.out(y.view(*x.shape[:-1], -1))


class GatedAttention(nn.Module):
    """Heads twice as wide, eight of q to one of k and v; norms of q and k; y * sigmoid(gate)."""

    def __init__(self, spec, provider):
        super().__init__()
        self.head = 2 * spec.head
        heads = spec.width // spec.head
        self.sizes = [heads * self.head] * 2 + [max(1, heads // 8) * self.head] * 2
        self.projections = nn.Linear(spec.width, sum(self.sizes), bias=False)
        self.of_heads = nn.ModuleList(Norm(spec.op, self.head, provider, is_zero_centered=True) for _ in range(2))
        self.out = nn.Linear(self.sizes[0], spec.width, bias=False)

    def forward(self, x):
        q, gate, k, v = self.projections(x).split(self.sizes, -1)
        q, k, v = (t.unflatten(-1, (-1, self.head)) for t in (q, k, v))
        q, k = (norm(t)[0] for norm, t in zip(self.of_heads, (q, k), strict=True))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
        return self.out(y * torch.sigmoid(gate))


class MLP(nn.Module):
    """GELU, or SwiGLU in models with RMSNorm."""

    def __init__(self, spec):
        super().__init__()
        self.is_gated = spec.op == "rms_norm"
        hidden = 8 * spec.width // 3 // 16 * 16 if self.is_gated else 4 * spec.width
        self.up, self.down = nn.Linear(spec.width, (1 + self.is_gated) * hidden), nn.Linear(hidden, spec.width)

    def forward(self, x):
        x = self.up(x)
        if self.is_gated:
            gate, x = x.chunk(2, -1)
            return self.down(F.silu(gate) * x)
        return self.down(F.gelu(x))


class Model(nn.Module):
    """Each norm is given the branch before it and the stream, so that it may add them."""

    def __init__(self, spec, provider):
        super().__init__()
        self.place = spec.place
        is_adaptive = spec.place == "adaptive"
        if spec.is_hybrid and provider in ("liger", "quack"):
            raise Unavailable("no gated norm")

        def attention(layer):
            if not spec.is_hybrid:
                return Attention(spec, provider)
            return GatedAttention(spec, provider) if layer % 4 == 3 else LinearAttention(spec, provider)

        self.branches = nn.ModuleList(
            branch for layer in range(spec.layers) for branch in (attention(layer), MLP(spec))
        )
        options = (spec.op, spec.width, provider, is_adaptive, spec.is_hybrid)
        self.norms = nn.ModuleList(Norm(*options) for _ in self.branches)
        self.last = Norm(*options) if spec.place == "pre" else None
        if is_adaptive:
            self.modulation = nn.ModuleList(nn.Linear(spec.width, 3 * spec.width) for _ in self.branches)

    def forward(self, x, condition):
        if self.place == "post":
            for branch, norm in zip(self.branches, self.norms, strict=True):
                x = norm(branch(x), x)[0]
            return x
        stream, gate = None, None
        for i, (branch, norm) in enumerate(zip(self.branches, self.norms, strict=True)):
            if self.place == "adaptive":
                scale, shift, next_gate = self.modulation[i](condition)[:, None].chunk(3, -1)
                y, stream = norm(x, stream, scale, shift, gate)
                gate = next_gate
            else:
                y, stream = norm(x, stream)
            x = branch(y)
        return self.last(x, stream)[0] if self.last else stream + gate * x


class Run:
    """A model with its batch: step() trains, or computes without gradients."""

    def __init__(self, spec, provider, mode, device):
        torch.manual_seed(0)
        self.trains, self.device, self.steps = mode in TRAINING, device, 0
        self.model = Model(spec, provider).to(device, torch.bfloat16).train(self.trains)
        if provider == "replaced":
            fln.replace_norms(self.model)
        shape = (spec.batch, spec.tokens, spec.width)
        self.x, self.target = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
        self.condition = torch.randn(spec.batch, spec.width, device=device, dtype=torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device == "cuda")
        self.call, self.loss = self.model, None
        if mode.startswith(("compile", "graph")):
            # fullgraph: a norm that breaks the graph raises. Otherwise Dynamo would skip Model.forward from then on,
            # for the other providers too
            self.call = torch.compile(
                self.model, fullgraph=True, dynamic=False, mode="reduce-overhead" if mode.startswith("graph") else None
            )

    def step(self):
        self.steps += 1
        if not self.trains:
            with torch.no_grad():
                return self.call(self.x, self.condition)
        self.loss = F.mse_loss(self.call(self.x, self.condition).float(), self.target.float())
        self.loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return None

    def synchronize(self):
        if self.device == "cuda":
            torch.cuda.synchronize()

    def ms(self, steps):
        self.synchronize()
        started = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.synchronize()
        return 1e3 * (time.perf_counter() - started) / steps

    def peak_mib(self):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.step()
        return round((torch.cuda.max_memory_allocated() - before) / 2**20)

    def gpu_times(self):
        """ms of all kernels of one step, and us of those of norms."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.step()
            self.synchronize()
        us = [(event.name, event.time_range.elapsed_us()) for event in profile.events()
              if event.device_type == torch.autograd.DeviceType.CUDA]  # fmt: skip
        of_norms = sum(t for name, t in us if OF_NORMS.search(name) and not OF_OTHERS.search(name))
        return round(sum(t for _, t in us) / 1e3, 4), round(of_norms, 1)


def measure(name, spec, mode, args, device, deadline):
    """The entries of one model and mode. Providers take turns, so that clocks and temperature touch all alike."""
    torch.compiler.reset()
    runs, entries = {}, {}
    for provider in args.providers:
        entry = {"model": name, "norm": spec.op, "mode": mode, "provider": provider}
        entry |= {"batch": spec.batch, "tokens": spec.tokens}
        entry |= dict.fromkeys(("ms", "spread", "peak_mib", "loss", "gpu_ms", "norm_us", "note"))
        entries[provider] = entry
        if time.monotonic() > deadline:
            entry["note"] = "no time left"
            continue
        try:
            run = Run(spec, provider, mode, device)
            run.ms(3)  # compiles, tunes, allocates
            runs[provider] = run
        except Exception as error:  # what one provider raises does not end the others
            entry["note"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    if not args.repeats:
        return []
    samples = {provider: [] for provider in runs}
    for _ in range(args.repeats):
        for provider, run in runs.items():
            samples[provider].append(run.ms(args.steps))
    for provider, run in runs.items():
        entry, ms = entries[provider], statistics.median(samples[provider])
        entry["ms"], entry["spread"] = round(ms, 4), round((max(samples[provider]) - min(samples[provider])) / ms, 4)
        if device == "cuda":
            entry["gpu_ms"], entry["norm_us"] = run.gpu_times()
            entry["peak_mib"] = run.peak_mib()
        else:
            entry["note"] = "no GPU: compare ms within this run only"
        if run.trains:
            while run.steps < args.loss_steps:
                run.step()
            entry["loss"] = round(run.loss.item(), 5)
    return list(entries.values())


def measure_apart(*of_run):
    """measure() in a process of its own: in a trace of CUDA graphs (H200, torch 2.11), those captured after the
    profiler had run waited about 0.4 us before each kernel, the one captured before 0.1."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, *of_run).result()


def warm(args):
    """Fills the compile caches: each model, mode and provider in a process of its own, args.warm at a time."""

    def one(model, mode, provider):
        options = ["--models", model, "--modes", mode, "--providers", provider, "--repeats", "0",
                   "--tokens", *map(str, args.tokens)]  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, folder, *options, *["--quick"] * args.quick]
            subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    with ThreadPoolExecutor(args.warm) as pool:
        for mode in args.modes:
            for model in args.models:
                for provider in args.providers:
                    pool.submit(one, model, mode, provider)


def table(results):
    print("| model | mode | torch ms |", *(f"{name} / torch |" for name in NAMES[1:]), "GPU ms | norm us |")
    print("|---|---|---|" + "---|" * (len(NAMES) + 1))
    for key in dict.fromkeys((r["model"], r["mode"], r["tokens"]) for r in results):
        row = {r["provider"]: r for r in results if (r["model"], r["mode"], r["tokens"]) == key}
        base = row.get("torch", {}).get("ms")

        def speed(name, row=row, base=base):
            ms = row.get(name, {}).get("ms")
            return f"{base / ms:.3f}" if base and ms else "-"

        gpu, norms = (" / ".join(str(row[name][of]) for name in NAMES if name in row) for of in ("gpu_ms", "norm_us"))
        speeds = " | ".join(map(speed, NAMES[1:]))
        print(f"| {key[0]}, {key[2]} tokens | {key[1]} | {base} | {speeds} | {gpu} | {norms} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default=ROOT / "benchmarks" / "output", type=Path)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--modes", nargs="*", default=list(TRAINING), choices=TRAINING + INFERENCE)
    parser.add_argument("--providers", nargs="*", default=list(NAMES), choices=NAMES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="of a repeat")
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 256], help="of each of 8 samples at inference")
    parser.add_argument("--loss-steps", type=int, default=200, help="steps before the loss is read")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no new model after that")
    parser.add_argument("--warm", type=int, metavar="N", help="first fill the compile caches, N processes at a time")
    parser.add_argument("--quick", action="store_true", help="tiny models")
    parser.add_argument("--record", default="models", help="how the file's name begins (models)")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.quick:
        raise SystemExit("needs a GPU, or --quick")
    started, results = time.monotonic(), []
    if args.warm:
        warm(args)
        print(f"caches filled, {time.monotonic() - started:.0f} s", flush=True)
    args.folder.mkdir(parents=True, exist_ok=True)
    path = args.folder / f"{args.record}_{time.strftime('%Y%m%d_%H%M%S')}.json"
    options = {key: value for key, value in vars(args).items() if key != "folder" and value != float("inf")}
    record = {"meta": environment() | {"options": options}, "results": results}
    run = measure_apart if device == "cuda" else measure
    for mode in args.modes:
        for name in args.models:
            spec = MODELS[name].quick() if args.quick else MODELS[name]
            sizes = [spec] if mode in TRAINING else [replace(spec, batch=8, tokens=tokens) for tokens in args.tokens]
            for size in sizes:
                results += run(name, size, mode, args, device, started + args.seconds)
                path.write_text(json.dumps(record, indent=1) + "\n")  # what is known, should the run be killed
    table(results)
    print(f"wrote {path.name}, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
