"""Runs the command that builds the extension and records what it costs: `build_record.py FOLDER COMMAND...` writes
FOLDER/build.json. `benchmarks/record.sh` calls it.

    kernels           entry points of the device code (null: no cuobjdump here, or no CUDA)
    extension_bytes   size of the extension
    wall_seconds, cpu_seconds, cores   of the build
    slowest_file      [source file, seconds], from ninja's log
    first_call_ms     a process's first norm of a 4 x 64 tensor on the card, when CUDA has been initialized: loading and
                      decompressing the device code is most of it (null: no card)
    csrc_hash, arch_list, gpu, torch
"""

import json
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIRST_CALL = """
import json, time, torch, fused_layernorm
from fused_layernorm import _backend
found = {"extension": _backend.extension and _backend.extension.__file__, "torch": torch.__version__, "gpu": None,
         "arch_list": (_backend.build_info or {}).get("arch_list"), "first_call_ms": None}
if torch.cuda.is_available() and _backend.has_kernels_for("cuda"):
    found["gpu"] = torch.cuda.get_device_name()
    x = torch.ones(4, 64, device="cuda")
    torch.cuda.synchronize()
    start = time.perf_counter()
    fused_layernorm.fused_layer_norm(x, normalized_shape=64)
    torch.cuda.synchronize()
    found["first_call_ms"] = round((time.perf_counter() - start) * 1e3, 1)
print(json.dumps(found))
"""


def slowest_file(since: float) -> list | None:
    """[file, seconds] of the object that took longest, of the ninja logs under build/ written after `since`."""
    found = []
    for log in ROOT.glob("build/**/.ninja_log"):
        if log.stat().st_mtime < since:
            continue
        for line in log.read_text().splitlines()[1:]:
            start, end, _, target, *_ = line.split("\t")
            found.append((Path(target).stem, round((int(end) - int(start)) / 1000, 1)))
    return list(max(found, key=lambda entry: entry[1])) if found else None


def count_kernels(extension: str) -> int | None:
    from sanitize import find, output

    try:
        return len(re.findall(r"STO_ENTRY\s", output(find("cuobjdump"), "-symbols", extension)))
    except (SystemExit, subprocess.CalledProcessError):
        return None


def main(folder: str, *command: str) -> None:
    started, start = time.time(), time.perf_counter()
    subprocess.run(command, check=True, cwd=ROOT)
    wall, used = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    printed = subprocess.check_output([sys.executable, "-c", FIRST_CALL], cwd=ROOT, text=True)
    found = json.loads(printed.splitlines()[-1])
    extension = found.pop("extension")
    sys.path.insert(0, str(ROOT))
    from fused_layernorm._build.source_hash import source_hash

    record = {
        "kernels": extension and count_kernels(extension),
        "extension_bytes": extension and os.path.getsize(extension),
        "wall_seconds": round(wall, 1),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "cores": len(os.sched_getaffinity(0)),
        "slowest_file": slowest_file(started),
        "csrc_hash": source_hash(),
        **found,
    }
    Path(folder, "build.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))


if __name__ == "__main__":
    main(*sys.argv[1:])
