"""Counters of ncu for single calls: what bounds a norm, beside the same call of other providers.

    python benchmarks/counters.py FOLDER [--providers fused,compile] [--only TEXT]

Each call runs in a process of its own under ncu, which replays its kernels to read the counters, at the card's own
clocks. Prints for each call its kernels' time, the bytes moved to and from memory against those that must be moved, the
share of the memory's peak rate, the share of cycles in which a scheduler issues an instruction, the warps of an SM, and
what most warps wait for: warps of a scheduler in that state for each one that issues.
Calls that fit into the L2 cache find their tensors there; before others ncu empties it. Times of one kernel under ncu
are longer than those of test_benchmark.py. Writes counters_*.json into FOLDER.
"""

import argparse
import csv
import io
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import fusions  # noqa: E402
import quant  # noqa: E402

import test_benchmark  # noqa: E402
from test_benchmark import DTYPES, Cell, environment  # noqa: E402

CALLS = [  # of test_benchmark.py, fusions.py or quant.py: op, dtype, rows, columns, direction
    ("layer_norm", "bf16", 1 << 21, 64, "forward"),
    ("layer_norm", "bf16", 1 << 20, 128, "forward"),
    ("layer_norm", "bf16", 32768, 4096, "forward"),
    ("layer_norm", "bf16", 16384, 8192, "forward"),
    ("layer_norm", "fp32", 8192, 8192, "forward"),
    ("rms_norm", "fp32", 4096, 16384, "forward"),
    ("layer_norm", "bf16", 10872, 12345, "forward"),
    ("layer_norm", "bf16", 10872, 12345, "backward"),
    ("layer_norm", "bf16", 256, 4096, "forward"),
    ("rms_norm", "bf16", 8, 1 << 22, "forward"),
    ("layer_norm", "bf16", 1, 1 << 24, "backward"),
    ("layer_norm", "bf16", 512, 262144, "backward"),
    ("layer_norm", "bf16", 1 << 21, 64, "backward"),
    ("layer_norm, gelu", "bf16", 32768, 4096, "forward"),
    ("layer_norm, gelu", "bf16", 32768, 4096, "backward"),
    ("layer_norm, gelu", "bf16", 16384, 8192, "backward"),
    ("gated_rms_norm", "bf16", 1 << 21, 64, "backward"),
    ("gated_rms_norm", "bf16", 16384, 8192, "backward"),
    ("rms_norm, token", "bf16", 16384, 8192, "forward"),
    ("layer_norm, token", "bf16", 16384, 8192, "forward"),
    ("layer_norm", "bf16", 32760, 4097, "forward"),
    ("rms_norm", "bf16", 16384, 8192, "forward"),
    ("rms_norm", "bf16", 4096, 32768, "forward"),
    ("layer_norm", "bf16", 1024, 131072, "forward"),
    ("layer_norm", "fp32", 256, 262144, "forward"),
    ("rms_norm", "fp32", 87296, 769, "forward"),
    ("layer_norm", "bf16", 174528, 769, "backward"),
    ("layer_norm", "bf16", 1024, 131072, "backward"),
    ("rms_norm", "bf16", 8192, 16384, "backward"),
    ("layer_norm", "bf16", 524288, 256, "forward"),
    ("layer_norm", "bf16", 522247, 257, "forward"),
    ("layer_norm", "bf16", 2064888, 65, "backward"),
    ("layer_norm", "bf16", 522247, 257, "backward"),
    ("layer_norm, silu", "bf16", 16384, 8192, "backward"),
    ("layer_norm, dropout 0.1 of y", "bf16", 16384, 8192, "backward"),
    ("adaptive_layer_norm, 128 samples", "bf16", 16384, 8192, "forward"),
    ("adaptive_layer_norm, 128 samples", "bf16", 16384, 8192, "backward"),
]
COUNTERS = {
    "us": ("gpu__time_duration.sum", 1e-3),
    "read": ("dram__bytes_read.sum", 1),
    "written": ("dram__bytes_write.sum", 1),
    "peak": ("dram__throughput.avg.pct_of_peak_sustained_elapsed", 0.01),
    "issue": ("smsp__issue_active.avg.pct_of_peak_sustained_active", 0.01),
    "warps": ("sm__warps_active.avg.per_cycle_active", 1),
}
WAITS = {  # what a warp waits for: ncu's name of the state
    "memory": "long_scoreboard",
    "shared memory": "short_scoreboard",
    "barrier": "barrier",
    "instructions": "no_instruction",
    "arithmetic": "math_pipe_throttle",
    "load and store units": "lg_throttle",
    "shared memory units": "mio_throttle",
    "latency": "wait",
    "another warp": "not_selected",
    "sleep": "sleeping",
    "fence": "membar",
    "branch": "branch_resolving",
}
COUNTERS |= {
    wait: (f"smsp__average_warps_issue_stalled_{state}_per_issue_active.ratio", 1) for wait, state in WAITS.items()
}


QUANTIZED = {"rms_norm, token", "layer_norm, token"}  # to float8_e4m3fn, with a scale for each row


def bytes_of(call):
    """Bytes that must be moved."""
    op, dtype, rows, hidden_size, direction = call
    if op in test_benchmark.EPS:
        return test_benchmark.bytes_moved(Cell(op, direction, dtype, dtype, rows, hidden_size))
    if op in QUANTIZED:
        return quant.bytes_of(rows * hidden_size, False)
    passes = fusions.PASSES[fusions.FUSIONS[op][3]][direction == "backward"]
    return passes * rows * hidden_size * DTYPES[dtype].itemsize


def prepared(provider, call):
    """A function without arguments that makes the call once."""
    op, dtype, rows, hidden_size, direction = call
    if op in test_benchmark.EPS:
        cell = Cell(op, direction, dtype, dtype, rows, hidden_size)
        (inputs,) = test_benchmark.make_inputs(cell, 1)
        return test_benchmark.provider_call(test_benchmark.PROVIDERS[provider](cell), cell, inputs)
    if op in QUANTIZED:
        norm, granularity = op.split(", ")
        function = quant.providers_of(granularity, False, torch.float8_e4m3fn, None, norm)[provider]
        x = torch.randn(rows, hidden_size, device="cuda", dtype=DTYPES[dtype])
        weight = torch.ones(hidden_size, device="cuda", dtype=DTYPES[dtype])
        return torch.no_grad()(lambda: function(x, None, weight))
    ours, theirs, names, _ = fusions.FUSIONS[op]
    function = {"fused": ours, "torch": theirs, "compile": torch.compile(theirs, dynamic=False)}[provider]
    given = [fusions.tensors(rows, hidden_size, DTYPES[dtype], "cuda")[name] for name in names]
    if direction == "forward":
        return torch.no_grad()(lambda: function(*given))
    leaves = [t.detach().requires_grad_() for t in given]
    y = function(*leaves)
    grad_output = torch.randn_like(y)
    return lambda: torch.autograd.grad(y, leaves, grad_output, retain_graph=True)


def run(provider, call):
    once = prepared(provider, call)
    for _ in range(3):
        once()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    once()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def totals(text):
    """The counters of all kernels of a call, from ncu's CSV: sums; shares and warps as means over their times."""
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if first is None:
        raise ValueError("\n".join(lines[-3:]) or "ncu printed nothing")
    kernels = list(csv.DictReader(io.StringIO("\n".join([lines[first], *lines[first + 2 :]]))))  # line 2: units
    found = {
        name: [float(k[counter].replace(",", "")) * scale for k in kernels]
        for name, (counter, scale) in COUNTERS.items()
    }
    us = sum(found["us"])
    result = {"kernels": [k["Kernel Name"].split("(")[0] for k in kernels], "us": us}
    result |= {name: sum(found[name]) for name in ("read", "written")}

    def means(names):
        return {name: sum(map(float.__mul__, found[name], found["us"])) / us for name in names}

    return result | means(("peak", "issue", "warps")) | {"waits": means(WAITS)}


def measured(provider, call):
    fits = bytes_of(call) < test_benchmark.l2_bytes()
    command = [
        "ncu", "--csv", "--page", "raw", "--print-units", "base", "--profile-from-start", "off", "--clock-control",
        "none", "--cache-control", "none" if fits else "all", "--metrics", ",".join(c for c, _ in COUNTERS.values()),
        sys.executable, __file__, "--run", provider, json.dumps(call),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    return totals(done.stdout or done.stderr)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", nargs="?", default=str(test_benchmark.OUTPUT))
    parser.add_argument("--providers", default="fused,compile")
    parser.add_argument("--only", default="", help="calls whose description has this text")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        return run(args.run[0], tuple(json.loads(args.run[1])))
    if not test_benchmark.HAS_CUDA or not shutil.which("ncu"):
        parser.error("needs a GPU, and ncu in PATH")
    Path(args.folder).mkdir(parents=True, exist_ok=True)
    results, meta = [], environment()
    path = Path(args.folder) / f"counters_{time.strftime('%Y%m%d_%H%M%S')}.json"
    for call in CALLS:
        op, dtype, rows, hidden_size, direction = call
        name = f"{op} {dtype} {rows} x {hidden_size} {direction}"
        if args.only not in name:
            continue
        for provider in args.providers.split(","):
            try:
                found = measured(provider, call)
            except ValueError as error:
                print(f"{name} {provider}: {error}"[:300], flush=True)
                continue
            moved = (found["read"] + found["written"]) / bytes_of(call)
            results.append(
                dict(zip(("op", "dtype", "rows", "hidden_size", "direction"), call, strict=True))
                | {"provider": provider, "moved": moved, **found}
            )
            waits = sorted(found["waits"].items(), key=lambda wait: -wait[1])[:3]
            print(
                f"{name:48} {provider:10} {found['us']:7.1f} us, moved {moved:.2f}, memory {found['peak']:.2f}, "
                f"issue {found['issue']:.2f}, {found['warps']:.0f} warps, waits for "
                + ", ".join(f"{wait} {warps:.1f}" for wait, warps in waits)
                + f", {len(found['kernels'])} kernels",
                flush=True,
            )
            path.write_text(json.dumps({"meta": meta, "results": results}, indent=1) + "\n")  # so far
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
