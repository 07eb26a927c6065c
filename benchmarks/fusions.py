"""What is fused around a norm, against the same in PyTorch operations, in torch.compile's, and in the Triton norms of
flash-attention, fla and mamba_ssm where these are installed and have it, in one run:
`python benchmarks/fusions.py [FOLDER] [--hidden 1024 4096 8192] [--dtype bf16] [--compiled 4096] [--cpu]`.

x has 256 MiB. GPU time of CUDA graphs, forward without gradients, and backward of everything that has a gradient.
`fraction`: of the rate of a copy of x, for the bytes that must be moved (reads and writes of tensors of x's size, as
PASSES says). Writes fusions_*.json (--record: otherwise) into FOLDER (default: benchmarks/output) and prints a table.
With --cpu x has 8 MiB, times are of a Python loop on one thread, the least of the rounds, and no record is written:
read them as ratios. --warm N first fills the compile caches, N processes at a time: fla compiles up to 18 kernels for a
hidden size, one after the other.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import fused_layernorm as fln  # noqa: E402
from test_benchmark import DTYPES, environment, flash_attn_module, version_of  # noqa: E402

SAMPLES, MANY_SAMPLES = 8, 128  # that have a scale and shift each
HEADS = 32  # that have a weight each
EPS = 1e-6
# Tensors of x's size that must be read or written, forward and backward
PASSES = {"norm": (2, 3), "add": (4, 4), "after": (3, 3), "sandwich": (4, 7), "add_dropout": (4, 5), "gated": (4, 6),
          "token": (4, 5), "gated_token": (7, 10), "row_gate": (3, 5)}  # fmt: skip


def tensors(rows, hidden_size, dtype, device):
    def randn(*shape):
        return torch.randn(*shape, device=device, dtype=dtype)

    found = {
        "x": randn(SAMPLES, rows // SAMPLES, hidden_size),
        "residual": randn(SAMPLES, rows // SAMPLES, hidden_size),
    }
    found |= {"weight": 1 + 0.1 * randn(hidden_size), "bias": randn(hidden_size)}
    found |= {"post_weight": 1 + 0.1 * randn(hidden_size)}
    modulation = (0.1 * randn(SAMPLES, 1, 3 * hidden_size)).chunk(3, -1)
    found |= dict(zip(("scale", "shift", "gate"), modulation, strict=True))
    found |= {f"{name} of tokens": 0.1 * randn(*found["x"].shape) for name in ("scale", "shift", "gate")}
    modulation = (0.1 * randn(MANY_SAMPLES, 1, 2 * hidden_size)).chunk(2, -1)
    found |= dict(zip(("scale of many", "shift of many"), modulation, strict=True))
    found |= {"row gate": randn(*found["x"].shape), "weight of heads": 1 + 0.1 * randn(HEADS, hidden_size)}
    found["x of heads"] = found["x"].view(-1, HEADS, hidden_size)
    return found | {"x of many": found["x"].view(MANY_SAMPLES, -1, hidden_size)}


def layer_norm(x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def with_residual(norm, p=0.0):
    def call(x, residual, *parameters):
        z = residual + (F.dropout(x, p) if p else x)
        return norm(z, *parameters), z

    return call


def rms_norm(x, weight):
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


def sandwich(x, residual, post_weight, weight):
    z = residual + rms_norm(x, post_weight)
    return rms_norm(z, weight), z


def llama_rms_norm(x, weight):
    wide = x.float()
    return weight * (wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt()).to(x.dtype)


def modulate(x, scale, shift):
    return F.layer_norm(x, x.shape[-1:], None, None, EPS) * (1 + scale) + shift


def gated(x, residual, scale, shift, gate):
    z = residual + gate * x
    return modulate(z, scale, shift), z


def rms_norm_then_gate(x, gate, weight):
    return rms_norm(x, weight) * F.silu(gate)


def gate_then_rms_norm(x, gate, weight):
    return rms_norm(x * F.silu(gate), weight)


PLAIN, GATED = ("x", "weight", "bias"), ("x", "row gate", "weight")
# name: (ours, in PyTorch operations or None, inputs, what is moved)
FUSIONS = {
    "layer_norm": (lambda *t: fln.fused_layer_norm(*t, EPS), layer_norm, PLAIN, "norm"),
    "add_layer_norm": (
        lambda *t: fln.fused_add_layer_norm(*t, EPS), with_residual(layer_norm),
        ("x", "residual", "weight", "bias"), "add"),
    "add_rms_norm": (
        lambda *t: fln.fused_add_rms_norm(*t, None, EPS), with_residual(rms_norm), ("x", "residual", "weight"), "add"),
    "add_layer_norm, dropout 0.1 of x": (
        lambda *t: fln.fused_add_layer_norm(*t, EPS, dropout_p=0.1), with_residual(layer_norm, 0.1),
        ("x", "residual", "weight", "bias"), "add_dropout"),
    "layer_norm, dropout 0.1 of y": (
        lambda *t: fln.fused_layer_norm(*t, EPS, dropout_p=0.1), lambda *t: F.dropout(layer_norm(*t), 0.1),
        PLAIN, "norm"),
    "layer_norm, gelu": (
        lambda *t: fln.fused_layer_norm(*t, EPS, activation="gelu"), lambda *t: F.gelu(layer_norm(*t)), PLAIN, "norm"),
    "layer_norm, silu": (
        lambda *t: fln.fused_layer_norm(*t, EPS, activation="silu"), lambda *t: F.silu(layer_norm(*t)), PLAIN, "norm"),
    "adaptive_layer_norm": (
        lambda *t: fln.fused_adaptive_layer_norm(*t, eps=EPS), modulate, ("x", "scale", "shift"), "norm"),
    f"adaptive_layer_norm, {MANY_SAMPLES} samples": (
        lambda *t: fln.fused_adaptive_layer_norm(*t, eps=EPS), modulate,
        ("x of many", "scale of many", "shift of many"), "norm"),
    "adaptive_layer_norm, each token": (
        lambda *t: fln.fused_adaptive_layer_norm(*t, eps=EPS), modulate, ("x", "scale of tokens", "shift of tokens"),
        "token"),
    "adaptive_layer_norm, residual": (
        lambda x, residual, scale, shift: fln.fused_adaptive_layer_norm(x, scale, shift, residual=residual, eps=EPS),
        lambda x, residual, scale, shift: (modulate(residual + x, scale, shift), residual + x),
        ("x", "residual", "scale", "shift"), "add"),
    "adaptive_layer_norm, gate, residual": (
        lambda x, residual, scale, shift, gate: fln.fused_adaptive_layer_norm(
            x, scale, shift, gate=gate, residual=residual, eps=EPS),
        gated, ("x", "residual", "scale", "shift", "gate"), "gated"),
    "adaptive_layer_norm, each token, gate, residual": (
        lambda x, residual, scale, shift, gate: fln.fused_adaptive_layer_norm(
            x, scale, shift, gate=gate, residual=residual, eps=EPS),
        gated, ("x", "residual", "scale of tokens", "shift of tokens", "gate of tokens"), "gated_token"),
    "layer_norm, frozen statistics": (
        lambda *t: fln.fused_layer_norm(*t, EPS, stats_grad=False), None, PLAIN, "norm"),
    "layer_norm, main_grad": (
        lambda *t: fln.fused_layer_norm(*t, EPS, accumulate_grad=True), layer_norm, PLAIN, "norm"),
    "rms_norm, memory_efficient": (
        lambda *t: fln.fused_rms_norm(*t, None, EPS, memory_efficient=True), rms_norm, ("x", "weight"), "norm"),
    "rms_norm, Llama rounding": (
        lambda *t: fln.fused_rms_norm(*t, None, EPS, rounding="llama"), llama_rms_norm, ("x", "weight"), "norm"),
    "add_rms_norm, Llama rounding": (
        lambda *t: fln.fused_add_rms_norm(*t, None, EPS, rounding="llama"), with_residual(llama_rms_norm),
        ("x", "residual", "weight"), "add"),
    "rms_norm_add": (
        lambda *t: fln.fused_rms_norm_add(*t, None, EPS), lambda x, residual, weight: residual + rms_norm(x, weight),
        ("x", "residual", "weight"), "after"),
    "sandwich_rms_norm": (
        lambda *t: fln.fused_sandwich_rms_norm(*t, EPS), sandwich, ("x", "residual", "post_weight", "weight"),
        "sandwich"),
    "gated_rms_norm": (lambda *t: fln.fused_gated_rms_norm(*t, None, EPS), rms_norm_then_gate, GATED, "row_gate"),
    "gated_rms_norm, gate first": (
        lambda *t: fln.fused_gated_rms_norm(*t, None, EPS, norm_before_gate=False), gate_then_rms_norm, GATED,
        "row_gate"),
    "rms_norm, a weight for each head": (
        lambda x, weight: fln.fused_rms_norm(x, weight, None, EPS, normalized_shape=x.shape[-1]),
        lambda x, weight: F.rms_norm(x, x.shape[-1:], None, EPS) * weight, ("x of heads", "weight of heads"), "norm"),
}  # fmt: skip


# What peers have: flash-attention's function and its dropout_p
FLASH_ATTN = {
    "add_layer_norm": ("layer_norm_fn", 0.0),
    "add_rms_norm": ("rms_norm_fn", 0.0),
    "add_layer_norm, dropout 0.1 of x": ("layer_norm_fn", 0.1),
}


def flash_attn(name, hidden_size):
    if name not in FLASH_ATTN or not importlib.util.find_spec("flash_attn"):
        return None
    function, p = FLASH_ATTN[name]
    norm = getattr(flash_attn_module(hidden_size), function)
    return lambda x, residual, weight, bias=None: norm(
        x, weight, bias, residual=residual, eps=EPS, dropout_p=p, prenorm=True
    )


def fla(name, _):
    if name != "gated_rms_norm" or not importlib.util.find_spec("fla"):
        return None
    from fla.modules.norm.fused_norm_gate import rms_norm_gated

    return lambda x, gate, weight: rms_norm_gated(x, gate, weight, None, eps=EPS)


def mamba_ssm(name, _):
    if name not in ("gated_rms_norm", "gated_rms_norm, gate first") or not importlib.util.find_spec("mamba_ssm"):
        return None
    from mamba_ssm.ops.triton.layernorm_gated import rmsnorm_fn

    before = name == "gated_rms_norm"
    return lambda x, gate, weight: rmsnorm_fn(x, weight, None, z=gate, eps=EPS, norm_before_gate=before)


class LoopTimer:
    """On the CPU."""

    stream = None

    def __init__(self, rounds=9):
        self.rounds = rounds

    def us(self, call):
        samples = []
        for _ in range(20 if self.rounds else 1):
            started = time.perf_counter()
            call()
            samples.append(time.perf_counter() - started)
        return 1e6 * min(samples)


class Timer:
    """Without rounds it only calls."""

    def __init__(self, launches=10, rounds=9):
        self.launches, self.rounds = launches, rounds
        self.stream = torch.cuda.Stream()  # of forward too: backward runs where that ran

    def us(self, call):
        with torch.cuda.stream(self.stream):
            for _ in range(2):
                call()
            torch.cuda.synchronize()
            if not self.rounds:
                return float("nan")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream):
                for _ in range(self.launches):
                    call()
            samples = []
            for _ in range(self.rounds + 2):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                torch.cuda.synchronize()
                samples.append(1000 * start.elapsed_time(end) / self.launches)
        return statistics.median(samples[2:])


def times(timer, function, inputs):
    """(forward, backward) in microseconds."""
    with torch.no_grad():
        forward = timer.us(lambda: function(*inputs))
    leaves = [t.detach().requires_grad_() for t in inputs]
    for leaf in leaves[1:]:
        leaf.main_grad = torch.zeros_like(leaf, dtype=torch.float32) if leaf.dim() == 1 else None
    with torch.cuda.stream(timer.stream):  # None: nothing
        results = function(*leaves)
        results = results if isinstance(results, tuple) else (results,)
        gradients = [torch.randn_like(t) for t in results]
    if timer.stream:
        torch.cuda.synchronize()
    return forward, timer.us(lambda: torch.autograd.grad(results, leaves, gradients, retain_graph=True))


def copy_rate(timer, device, nbytes):
    """Bytes a microsecond, read and written."""
    source = torch.randn(nbytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / timer.us(lambda: target.copy_(source))


def timer_of(device, rounds):
    if not rounds:  # one of many processes, which disturb each other: what they tune must not be used later
        import torch._inductor.config

        torch._inductor.config.autotune_local_cache = False
    return LoopTimer(rounds) if device == "cpu" else Timer(rounds=rounds)


def warm(processes, hidden_sizes):
    """Fill the compile caches: this program again for each hidden size, where it only calls. It says who fails later,
    when it times."""

    def one(hidden_size):
        command = [sys.executable, *sys.argv, "--warm", "0", "--rounds", "0", "--hidden", str(hidden_size)]
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    started = time.monotonic()
    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(one, sorted(hidden_sizes, reverse=True)))  # long rows compile longest
    print(f"caches filled, {time.monotonic() - started:.0f} s", flush=True)


def measure(args, timer, copy, found, dtype, hidden_size, device, nbytes):
    """Add the results of one dtype and hidden size to `found`, and print them."""
    rows = nbytes // (hidden_size * DTYPES[dtype].itemsize) // MANY_SAMPLES * MANY_SAMPLES
    inputs = tensors(rows, hidden_size, DTYPES[dtype], device)
    for name, (ours, theirs, names, moved) in FUSIONS.items():
        if args.only not in name:
            continue
        providers = {"fused": ours, "torch": theirs}
        providers |= {peer.__name__: peer(name, hidden_size) for peer in (flash_attn, fla, mamba_ssm)}
        if theirs and hidden_size in args.compiled:
            torch.compiler.reset()
            providers["compile"] = torch.compile(theirs, dynamic=False)
        line: dict[str, list[float]] = {}
        for provider, function in providers.items():
            if not function or (args.providers and provider not in args.providers):
                continue
            try:
                both = times(timer, function, [inputs[key] for key in names])
            except Exception as error:
                print(f"{name} {provider}: {type(error).__name__}: {error}"[:200], flush=True)
                continue
            if not timer.rounds:
                continue
            for direction, us, passes in zip(("forward", "backward"), both, PASSES[moved], strict=True):
                must = passes * rows * hidden_size * DTYPES[dtype].itemsize
                line.setdefault(provider, []).extend((us, must / us / copy))
                found.append({
                    "fusion": name, "direction": direction, "dtype": dtype, "rows": rows,
                    "hidden_size": hidden_size, "provider": provider, "us": round(us, 2),
                    "fraction": round(must / us / copy, 4),
                })  # fmt: skip
        print(f"{dtype} {hidden_size:6} {name:48}", *(
            f"{p} {r[0]:7.1f} ({r[1]:.2f}) {r[2]:7.1f} ({r[3]:.2f})" for p, r in line.items()
        ), flush=True)  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default=ROOT / "benchmarks" / "output", type=Path)
    parser.add_argument("--hidden", nargs="*", type=int, default=[1024, 4096, 8192])
    parser.add_argument("--dtype", nargs="*", default=["bf16"], choices=("bf16", "fp16", "fp32"))
    parser.add_argument("--compiled", nargs="*", type=int, default=[4096], help="hidden sizes of torch.compile too")
    parser.add_argument("--only", default="", help="part of the name of a fusion")
    parser.add_argument("--record", default="fusions", help="how the file's name begins (fusions)")
    parser.add_argument("--providers", nargs="*", help="some of fused, torch, compile, flash_attn, fla, mamba_ssm")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--rounds", type=int, default=9, help="of a time, each ten launches; 0 only calls (9)")
    parser.add_argument("--warm", type=int, metavar="N", help="first fill the compile caches, N processes at a time")
    args = parser.parse_args()
    if not args.cpu and not torch.cuda.is_available():
        raise SystemExit("needs a GPU, or --cpu")
    from torch._functorch import config

    config.donated_buffer = False  # backward is run many times from one forward
    device, nbytes = ("cpu", 8 << 20) if args.cpu else ("cuda", 256 << 20)
    os.environ.setdefault("FLA_CACHE_RESULTS", "0")  # fla keeps on disk what it tuned: it shall tune in this run
    if args.warm:
        warm(args.warm, args.hidden)
    if args.cpu:
        torch.set_num_threads(1)
    timer, found, started = timer_of(device, args.rounds), [], time.monotonic()
    copy = copy_rate(timer, device, nbytes)
    print(f"copy {copy / 1e6:.3f} TB/s", flush=True)
    try:
        for dtype in args.dtype:
            for hidden_size in args.hidden:
                measure(args, timer, copy, found, dtype, hidden_size, device, nbytes)
    except KeyboardInterrupt:
        print("interrupted: the record has what was measured")
    if args.cpu or not args.rounds:
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    meta = environment() | {"copy_gb_per_s": round(copy / 1e3, 1), "samples": SAMPLES}
    meta |= {name: version_of(name) for name in ("flash-attn", "fla-core", "mamba-ssm")}
    path = args.folder / f"{args.record}_{time.strftime('%Y%m%d_%H%M%S')}.json"
    path.write_text(json.dumps({"meta": meta, "results": found}, indent=1) + "\n")
    print(f"wrote {path}, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
