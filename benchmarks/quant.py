"""Norms with a quantized result, against PyTorch operations, the same in torch.compile and behind our norm, and the
kernels of flashinfer and vLLM where these are installed and have it, in one run:
`python benchmarks/quant.py [FOLDER] [--hidden 1024 4096 8192 16384] [--rows N ...] [--norm rms_norm]
[--code float8_e4m3fn] [--cpu]`.

x has 256 MiB of bf16, or the given rows. layer_norm has a bias. GPU time of CUDA graphs. `fraction`, of x of 256 MiB:
of the rate of a copy of x, for the bytes that must be moved: x and the codes, with a residual also residual and
residual_out. flashinfer and vLLM write residual_out over residual. A provider whose first result is not the norm is
reported as WRONG and not timed. Writes quant_*.json into FOLDER (default: benchmarks/output) and prints a table. --cpu
and --warm are those of benchmarks/fusions.py.
"""

import argparse
import importlib
import importlib.util
import json
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from fusions import EPS, ROOT, copy_rate, timer_of, warm

sys.path.insert(0, str(ROOT))

import fused_layernorm as fln  # noqa: E402
from test_benchmark import environment, version_of  # noqa: E402

GROUP = 128
ROWS_CHECKED = 64
# name: (granularity, with a residual)
CASES = {"tensor": ("tensor", False), "token": ("token", False), "group": ("group", False),
         "tensor, residual": ("tensor", True), "token, residual": ("token", True)}  # fmt: skip
# The most that the mean of |decoded result - norm| may be of the mean of |norm|: about twice what rounding makes
OFF = {"float8_e4m3fn": 0.05, "float8_e5m2": 0.1, "int8": 0.05}


def quantize(y, scale, granularity, code):
    """What a model without a fused norm runs, on y of any dtype."""
    largest = 127.0 if code == torch.int8 else torch.finfo(code).max
    wide = y.float()
    if granularity == "tensor":
        return round_to(wide * (1 / scale), largest, code), scale
    groups = wide if granularity == "token" else wide.unflatten(-1, (-1, GROUP))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-12) * (1 / largest)
    return round_to(groups * (1 / scale), largest, code).view(y.shape), scale.squeeze(-1)


def round_to(quotient, largest, code):
    quotient = quotient.round() if code == torch.int8 else quotient
    return quotient.clamp(-largest, largest).to(code)


def decoded(codes, scale):
    """The first rows, in float."""
    rows = codes[:ROWS_CHECKED].float()
    if scale.numel() == 1:
        return rows * scale
    scale = scale.view(len(codes), -1)[:ROWS_CHECKED, :, None]
    return (rows.unflatten(-1, (scale.shape[1], -1)) * scale).flatten(1)


def norm_in_torch(norm, z, weight):
    if norm == "rms_norm":
        return F.rms_norm(z.float(), z.shape[-1:], weight.float(), EPS)
    return F.layer_norm(z.float(), z.shape[-1:], weight.float(), weight.float(), EPS)  # the bias is the weight, too


def off_by(function, x, residual, weight, adds, norm):
    codes, scale, *_ = function(x, residual.clone(), weight)
    y = norm_in_torch(norm, (residual + x if adds else x)[:ROWS_CHECKED], weight)
    return ((decoded(codes, scale) - y).abs().mean() / y.abs().mean()).item()


def flashinfer(granularity, adds, code, scale):
    if granularity != "tensor" or code == torch.int8 or not importlib.util.find_spec("flashinfer"):
        return None
    from flashinfer.norm import fused_add_rmsnorm_quant, rmsnorm_quant

    scale = scale.view(1)

    def call(x, residual, weight):
        codes = torch.empty_like(x, dtype=code)
        if adds:
            fused_add_rmsnorm_quant(codes, x, residual, weight, scale, EPS)
        else:
            rmsnorm_quant(codes, x, weight, scale, EPS)
        return codes, scale

    return call


def vllm(granularity, adds, code, scale):
    if (granularity == "tensor" and code == torch.int8) or not importlib.util.find_spec("vllm"):
        return None
    importlib.import_module("vllm._custom_ops")  # it loads the operators
    ops = torch.ops._C

    def of_tensor(x, residual, weight):
        codes = torch.empty_like(x, dtype=code)
        if adds:
            ops.fused_add_rms_norm_static_fp8_quant(codes, x, residual, weight, scale, EPS)
        else:
            ops.rms_norm_static_fp8_quant(codes, x, weight, scale, EPS)
        return codes, scale

    def of_parts(x, residual, weight):
        groups = x.shape[-1] // GROUP if granularity == "group" else 1
        codes, scales = torch.empty_like(x, dtype=code), x.new_empty(len(x), groups, dtype=torch.float32)
        given = (codes, x, weight, scales, EPS, None, residual if adds else None)
        if granularity == "group":
            ops.rms_norm_per_block_quant(*given, GROUP, False)
        else:
            ops.rms_norm_dynamic_per_token_quant(*given)
        return codes, scales

    return of_tensor if granularity == "tensor" else of_parts


def providers_of(granularity, adds, code, scale, norm):
    """Functions of (x, residual, weight), or None."""
    is_rms = norm == "rms_norm"
    ours = fln.fused_rms_norm_quant if is_rms else fln.fused_layer_norm_quant
    plain = fln.fused_rms_norm if is_rms else fln.fused_layer_norm
    add = fln.fused_add_rms_norm if is_rms else fln.fused_add_layer_norm
    options = {"scale": scale} if granularity == "tensor" else {"granularity": granularity, "group_size": GROUP}

    def fused(x, residual, weight):
        given = {"residual": residual} if adds else {}
        return ours(x, weight, None if is_rms else weight, EPS, dtype=code, **options, **given)

    def norm_then_torch(x, residual, weight):
        bias = None if is_rms else weight
        y, *z = add(x, residual, weight, bias, EPS) if adds else (plain(x, weight, bias, EPS),)
        return *quantize(y, scale, granularity, code), *z

    def in_torch(x, residual, weight):
        z = residual + x if adds else x
        y = norm_in_torch(norm, z, weight)
        return *quantize(y, scale, granularity, code), *([z] if adds else [])

    torch.compiler.reset()
    found = {"fused": fused, "torch": in_torch, "compile": torch.compile(in_torch, dynamic=False)}
    found["norm, torch"] = norm_then_torch
    peers = (flashinfer, vllm) if is_rms else ()
    return found | {peer.__name__: peer(granularity, adds, code, scale) for peer in peers}


def bytes_of(elements, adds):
    """Bytes that must be moved for 16-bit x: x and the codes, with a residual also residual and residual_out."""
    return elements * (7 if adds else 3)


def measure(args, timer, copy, found, hidden_size, device, rows):
    """copy: bytes a microsecond; None: few rows, of which no fraction of a rate is told."""
    code = getattr(torch, args.code)
    x, residual = (torch.randn(rows, hidden_size, device=device, dtype=torch.bfloat16) for _ in range(2))
    weight = 1 + 0.1 * torch.randn(hidden_size, device=device, dtype=torch.bfloat16)
    scale = torch.tensor(0.02, device=device)
    for name, (granularity, adds) in CASES.items():
        must = bytes_of(x.numel(), adds)
        line = [f"{rows:6} {hidden_size:6} {name:16}" + (f" copy {must / copy:6.1f}" if copy else "")]
        for provider, function in providers_of(granularity, adds, code, scale, args.norm).items():
            if not function or (args.providers and provider not in args.providers):
                continue
            mine = residual.clone()
            try:
                off = off_by(function, x, residual, weight, adds, args.norm)
                if not off < OFF[args.code]:
                    print(f"{hidden_size} {name} {provider}: WRONG, off by {off:.3f}", flush=True)
                    continue
                us = timer.us(lambda function=function, mine=mine: function(x, mine, weight))
            except Exception as error:
                print(f"{name} {provider}: {type(error).__name__}: {error}"[:200], flush=True)
                continue
            if not timer.rounds:
                continue
            fraction = round(must / us / copy, 4) if copy else None
            line.append(f"{provider} {us:6.2f}" + (f" ({fraction:.2f})" if copy else ""))
            found.append({
                "norm": args.norm, "case": name, "code": args.code, "dtype": "bf16", "rows": rows,
                "hidden_size": hidden_size, "provider": provider, "us": round(us, 2),
                "fraction": fraction,
            })  # fmt: skip
        print("  ".join(line), flush=True)


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default=ROOT / "benchmarks" / "output", type=Path)
    parser.add_argument("--hidden", nargs="*", type=int, default=[1024, 4096, 8192, 16384])
    parser.add_argument("--rows", nargs="*", type=int, help="(as many as make 256 MiB)")
    parser.add_argument("--norm", default="rms_norm", choices=("rms_norm", "layer_norm"))
    parser.add_argument("--code", default="float8_e4m3fn", choices=("float8_e4m3fn", "float8_e5m2", "int8"))
    parser.add_argument("--providers", nargs="*", help='some of fused, torch, compile, "norm, torch", flashinfer, vllm')
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--rounds", type=int, default=9, help="of a time, each ten launches; 0 only calls (9)")
    parser.add_argument("--warm", type=int, metavar="N", help="first fill the compile caches, N processes at a time")
    args = parser.parse_args()
    if not args.cpu and not torch.cuda.is_available():
        raise SystemExit("needs a GPU, or --cpu")
    device, nbytes = ("cpu", 8 << 20) if args.cpu else ("cuda", 256 << 20)
    if args.warm:
        warm(args.warm, args.hidden)
    if args.cpu:
        torch.set_num_threads(1)
    timer, found, started = timer_of(device, args.rounds), [], time.monotonic()
    copy = copy_rate(timer, device, nbytes)
    print(f"copy {copy / 1e6:.3f} TB/s; us, and the fraction of the copy's rate", flush=True)
    try:
        for hidden_size in args.hidden:
            for rows in args.rows or [nbytes // 2 // hidden_size]:
                measure(args, timer, None if args.rows else copy, found, hidden_size, device, rows)
    except KeyboardInterrupt:
        print("interrupted: the record has what was measured")
    if args.cpu or not args.rounds:
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    meta = environment() | {"copy_gb_per_s": round(copy / 1e3, 1)}
    meta |= {name: version_of(name) for name in ("flashinfer-python", "vllm")}
    path = args.folder / f"quant_{time.strftime('%Y%m%d_%H%M%S')}.json"
    path.write_text(json.dumps({"meta": meta, "results": found}, indent=1) + "\n")
    print(f"wrote {path}, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
