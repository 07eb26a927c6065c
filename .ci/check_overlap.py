"""Fails when a kernel touches memory before it waits for the kernel before it in the stream
(wait_for_previous_kernel() in csrc/cuda/dispatch.cuh): `python .ci/check_overlap.py fused_layernorm_cuda.*.so`. The
assembler may move loads of memory that is said to be read-only ahead of that wait."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
from sanitize import find, output  # noqa: E402

MEMORY = re.compile(r"\b(LDG|LD|STG|ST|RED|REDG|ATOM|ATOMG|LDGSTS|UBLKCP|UBLKRED|UTMALDG)\b")


def main():
    text = output(find("cuobjdump"), "-sass", sys.argv[1])
    waiting, early = 0, []
    for function in text.split("Function : ")[1:]:
        name = function.split("\n", 1)[0]
        instructions = re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(.*?);", function)
        wait = next((i for i, said in enumerate(instructions) if "ACQBULK" in said), None)
        if wait is None:
            continue
        waiting += 1
        early += [f"{name}: {said}" for said in instructions[:wait] if MEMORY.search(said)][:1]
    print(*early[:20], sep="\n", end="\n" if early else "")
    print(f"overlap: {waiting} kernels wait for the one before, {len(early)} touch memory before that")
    if not waiting or early:
        raise SystemExit(1)


main()
