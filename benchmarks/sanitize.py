"""compute-sanitizer over calls that reach every kernel and plan: `python benchmarks/sanitize.py [FOLDER]`, on a GPU.

Runs memcheck, racecheck, initcheck and synccheck, each over the same calls in a process of its own (`--calls`), and
writes sanitizer_*.json into FOLDER (default: benchmarks/output). The lengths of rows are read from csrc/launch_plan.h:
what a plan holds, one less (ragged), and so, for each dtype, forward and backward, few rows and many. A first process
(`--kernels`) holds the kernels that these calls launch against those in the extension. Exit status 1: a tool reported
something, did not run, a call failed, or a kernel was not reached.
"""

import argparse
import datetime
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
MOST_ELEMENTS = 1 << 21  # of x: under a tool a call takes a hundred times as long


def lengths():
    """What each plan of csrc/launch_plan.h holds in a row, and the lengths beside it."""
    text = (ROOT / "csrc" / "launch_plan.h").read_text()
    plans = re.findall(r"\b(?:Row|Stream|Backward)Plan<(\d+), (\d+), (\d+)(?:, \d+)*>", text)
    if len(plans) < 40:
        raise SystemExit("csrc/launch_plan.h is not written as it was: no plans were found in it")
    held = {int(threads) * int(vecs) * int(vec) for threads, vecs, vec in plans}
    longest = max(held)
    held |= {n * longest for n in (2, 4, 16)}  # clusters, and several turns
    return sorted(n for hidden in held for n in (hidden - 1, hidden, hidden + 8) if n > 0)


def calls():
    """Every (op, dtype of x, dtype of weight) with every length, few rows and many; prints the number of calls."""
    import torch

    from fused_layernorm import fused_layer_norm, fused_rms_norm

    half, brain, single, double = torch.float16, torch.bfloat16, torch.float32, torch.float64
    dtypes = [(half, half), (half, single), (brain, brain), (brain, single), (single, single), (double, double)]
    count = 0
    for norm, (dtype, weight_dtype), hidden_size in itertools.product(
        (fused_layer_norm, fused_rms_norm), dtypes, lengths()
    ):
        for rows in {3, min(1500, max(3, MOST_ELEMENTS // hidden_size))}:
            x = torch.randn(rows, hidden_size, device="cuda").to(dtype).requires_grad_()
            weight, bias = (torch.randn(hidden_size, device="cuda").to(weight_dtype).requires_grad_() for _ in "wb")
            y = norm(x, weight, bias)
            dy = torch.randn_like(y)
            for wanted in ((x, weight, bias), (x,), (weight,)):
                torch.autograd.grad(y, wanted, dy, retain_graph=True)
            count += 4
    torch.cuda.synchronize()
    print(f"calls: {count}")


def kernels():
    """Prints which kernels of the extension calls() launches on this card, and which it does not."""
    from torch.profiler import ProfilerActivity, profile

    from fused_layernorm import _ops

    def output(*command):
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    entries = re.findall(r"STO_ENTRY\s+(\S+)", output("cuobjdump", "-symbols", _ops.extension.__file__))
    compiled = {name for name in output("c++filt", *entries).splitlines() if "probe_kernel" not in name}
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        calls()
    launched = {event.name.replace(" ", "") for event in profiled.events()}  # demanglers differ in blanks
    missed = sorted(name for name in compiled if name.replace(" ", "") not in launched)
    print("kernels:", json.dumps({"compiled": len(compiled), "missed": missed}))


def run_kernels():
    done = subprocess.run([sys.executable, __file__, "--kernels"], capture_output=True, text=True)
    found = re.search(r"^kernels: (.*)", done.stdout, re.MULTILINE)
    return json.loads(found[1]) if found else {"compiled": None, "missed": [done.stderr[-2000:]]}


def run_tool(tool, folder):
    log = folder / f"sanitizer_{tool}.log"
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "99", "--log-file", str(log)]
    if tool == "memcheck":
        command += ["--padding", "64"]  # what lies just behind a tensor is nobody's
    started = time.perf_counter()
    done = subprocess.run(
        [*command, sys.executable, __file__, "--calls"],
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},  # each tensor an allocation that the tool knows
        capture_output=True,
        text=True,
    )
    told = log.read_text() if log.exists() else ""
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", told)
    ran = re.search(r"calls: (\d+)", done.stdout)
    return {
        "tool": tool,
        "calls": int(ran[1]) if ran else None,
        "summary": summary[-1] if summary else None,
        "clean": done.returncode == 0 and bool(ran) and bool(summary),
        "exit_status": done.returncode,
        "seconds": round(time.perf_counter() - started, 1),
        "said": None if done.returncode == 0 else (told + done.stderr)[-2000:],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "benchmarks" / "output")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--calls", action="store_true", help="only the calls, in this process")
    parser.add_argument("--kernels", action="store_true", help="only which kernels they launch, in this process")
    args = parser.parse_args()
    if args.calls or args.kernels:
        return kernels() if args.kernels else calls()
    if not shutil.which("compute-sanitizer"):
        raise SystemExit("compute-sanitizer is not on PATH: it comes with the CUDA toolkit")
    from test_benchmark import environment

    args.folder.mkdir(parents=True, exist_ok=True)
    reached = run_kernels()
    results = [run_tool(tool, args.folder) for tool in args.tools.split(",")]
    path = args.folder / f"sanitizer_{datetime.datetime.now():%Y%m%d_%H%M%S}.json"
    path.write_text(json.dumps({"meta": environment(), "kernels": reached, "sanitizer": results}, indent=1) + "\n")
    for result in results:
        print(f"{result['tool']}: {result['summary']}, {result['calls']} calls, {result['seconds']} s")
    print(f"kernels: {reached['compiled']}, not reached: {len(reached['missed'])}", *reached["missed"], sep="\n  ")
    print(f"wrote {path}")
    raise SystemExit(0 if all(result["clean"] for result in results) and not reached["missed"] else 1)


if __name__ == "__main__":
    main()
