"""What the CUDA kernels cost for each architecture: `python benchmarks/build_archs.py FOLDER 8.0 9.0 10.0 12.0`.

Compiles csrc/cuda/*.cu for one architecture after the other (MAX_JOBS compilers at once, default: one per core), with
the wheel's flags and without torch, and links them. Writes FOLDER/build_8.0.json and so on, with the fields of
benchmarks/build_record.py; `spilling` is the number of kernels that keep registers in memory.
"""

import json
import os
import re
import resource
import runpy
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from build_record import ROOT, count_kernels

toolchain = runpy.run_path(str(ROOT / "fused_layernorm" / "_build" / "toolchain.py"))
source_hash = runpy.run_path(str(ROOT / "fused_layernorm" / "_build" / "source_hash.py"))["source_hash"]


def compile_file(nvcc, flags, source, target):
    started = time.perf_counter()
    command = [nvcc, *flags, f"-I{ROOT / 'csrc'}", "-c", str(source), "-o", str(target)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", printed)
    return source.stem, round(time.perf_counter() - started, 1), sum(pair != ("0", "0") for pair in spills)


def main(folder, *archs):
    Path(folder).mkdir(parents=True, exist_ok=True)
    home, version = toolchain["find_toolkits"]()[0]
    nvcc, jobs = f"{home}/bin/nvcc", int(os.environ.get("MAX_JOBS", len(os.sched_getaffinity(0))))
    optimizing = toolchain["compiler_flags"](home)["nvcc"]
    sources = sorted((ROOT / "csrc" / "cuda").glob("*.cu"), key=lambda path: -path.stat().st_size)
    for arch in archs:
        number = arch.replace(".", "")
        gencode = f"-gencode=arch=compute_{number},code=sm_{number}"
        flags = [gencode, *optimizing, "-std=c++17", "--expt-relaxed-constexpr", "-Xcompiler", "-fPIC", "-Xptxas", "-v"]
        used, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(jobs) as pool:
            targets = [Path(work, f"{source.stem}.o") for source in sources]
            compilations = [
                pool.submit(compile_file, nvcc, flags, *pair) for pair in zip(sources, targets, strict=True)
            ]
            files = [done.result() for done in compilations]
            library = Path(work, "kernels.so")
            subprocess.run([nvcc, "-shared", *map(str, targets), "-o", str(library)], check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            record = {
                "kernels": count_kernels(str(library)),
                "extension_bytes": library.stat().st_size,
                "wall_seconds": round(time.perf_counter() - started, 1),
                "cpu_seconds": round(after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime, 1),
                "cores": jobs,
                "slowest_file": list(max((file[:2] for file in files), key=lambda file: file[1])),
                "csrc_hash": source_hash(ROOT / "csrc"),
                "torch": None,
                "gpu": None,
                "arch_list": f"{arch}, kernels alone",
                "first_call_ms": None,
                "spilling": sum(file[2] for file in files),
                "nvcc": version,
            }
        Path(folder, f"build_{arch}.json").write_text(json.dumps(record, indent=1) + "\n")
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
