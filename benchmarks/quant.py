"""Norms with a quantized result, against torch.compile of PyTorch operations and against our norm followed by such
operations, in one run: `python benchmarks/quant.py [FOLDER] [--hidden 1024 4096 8192 16384] [--code float8_e4m3fn]`.

x has 256 MiB of bf16. GPU time of CUDA graphs. `fraction`: of the rate of a copy of x, for the bytes that must be
moved: x and the codes, with a residual also residual and residual_out. Writes quant_*.json into FOLDER (default:
benchmarks/output) and prints a table.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from fusions import EPS, ROOT, Timer, copy_rate

sys.path.insert(0, str(ROOT))

import fused_layernorm as fln  # noqa: E402
from test_benchmark import environment  # noqa: E402

NBYTES = 256 << 20
GROUP = 128
# name: (granularity, with a residual)
CASES = {"tensor": ("tensor", False), "token": ("token", False), "group": ("group", False),
         "token, residual": ("token", True)}  # fmt: skip


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


def providers_of(granularity, adds, code, scale):
    """Functions of (x, residual, weight)."""
    options = {"scale": scale} if granularity == "tensor" else {"granularity": granularity, "group_size": GROUP}

    def fused(x, residual, weight):
        given = {"residual": residual} if adds else {}
        return fln.fused_rms_norm_quant(x, weight, None, EPS, dtype=code, **options, **given)

    def norm_then_torch(x, residual, weight):
        y, *z = fln.fused_add_rms_norm(x, residual, weight, None, EPS) if adds else (
            fln.fused_rms_norm(x, weight, None, EPS),)  # fmt: skip
        return *quantize(y, scale, granularity, code), *z

    def in_torch(x, residual, weight):
        z = residual + x if adds else x
        y = F.rms_norm(z.float(), z.shape[-1:], weight.float(), EPS)
        return *quantize(y, scale, granularity, code), *([z] if adds else [])

    torch.compiler.reset()
    return {"fused": fused, "compile": torch.compile(in_torch, dynamic=False), "norm, torch": norm_then_torch}


def measure(timer, copy, hidden_size, code, found):
    rows = NBYTES // 2 // hidden_size
    x, residual = (torch.randn(rows, hidden_size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = 1 + 0.1 * torch.randn(hidden_size, device="cuda", dtype=torch.bfloat16)
    scale = torch.tensor(0.02, device="cuda")
    for name, (granularity, adds) in CASES.items():
        must = x.numel() * (7 if adds else 3)
        line = [f"{hidden_size:6} {name:16} copy {must / copy:6.1f}"]
        for provider, function in providers_of(granularity, adds, code, scale).items():
            try:
                us = timer.us(lambda function=function: function(x, residual, weight))
            except Exception as error:
                print(f"{name} {provider}: {type(error).__name__}: {error}"[:200], flush=True)
                continue
            line.append(f"{provider} {us:6.1f} ({must / us / copy:.2f})")
            found.append({
                "case": name, "code": str(code).removeprefix("torch."), "dtype": "bf16", "rows": rows,
                "hidden_size": hidden_size, "provider": provider, "us": round(us, 2),
                "fraction": round(must / us / copy, 4),
            })  # fmt: skip
        print("  ".join(line), flush=True)


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default=ROOT / "benchmarks" / "output", type=Path)
    parser.add_argument("--hidden", nargs="*", type=int, default=[1024, 4096, 8192, 16384])
    parser.add_argument("--code", default="float8_e4m3fn", choices=("float8_e4m3fn", "float8_e5m2", "int8"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a GPU")
    timer, found, started = Timer(), [], time.monotonic()
    copy = copy_rate(timer, "cuda", NBYTES)
    print(f"copy {copy / 1e6:.3f} TB/s; us, and the fraction of the copy's rate", flush=True)
    try:
        for hidden_size in args.hidden:
            measure(timer, copy, hidden_size, getattr(torch, args.code), found)
    except KeyboardInterrupt:
        print("interrupted: the record has what was measured")
    args.folder.mkdir(parents=True, exist_ok=True)
    meta = environment() | {"copy_gb_per_s": round(copy / 1e3, 1)}
    path = args.folder / f"quant_{time.strftime('%Y%m%d_%H%M%S')}.json"
    path.write_text(json.dumps({"meta": meta, "results": found}, indent=1) + "\n")
    print(f"wrote {path}, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
