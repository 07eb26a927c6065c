"""Which targets a record meets: `python benchmarks/check_targets.py RECORD.json`. Exits with 1 if one is missed.

The record: `--shapes small,sweep,huge,narrow --direction forward,backward,call_no_grad,step --providers all`. What is
not in it is not judged.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from compare import read_record  # noqa: E402

from test_benchmark import (  # noqa: E402
    DTYPES,
    HUGE_SHAPES,
    SMALL_SHAPES,
    SWEEP_BYTES,
    against_fastest_roof,
    print_table,
    print_verdict,
    times_by_cell,
)

# Of the roof at least: hidden sizes, forward, backward. From 4M on: the few long rows of `huge`.
FRACTIONS = (
    ((64, 128), 0.90, 0.85),
    ((256, 512, 1024), 0.97, 0.94),
    ((2048, 4096, 8192), 0.98, 0.95),
    ((16384, 32768, 65536), 0.97, 0.93),
    ((131072, 262144), 0.95, 0.90),
    ((769, 4097, 12345), 0.90, 0.85),
    ((1 << 22, 1 << 24), 0.70, 0.60),
)
# Of torch's time at most, on the small shapes; 1: below it.
SHARES = {"forward": 0.5, "backward": 0.6, "call_no_grad": 1, "step": 1}


class Scores:
    """What was found for each target, as table cells; counts what is met and what is missed."""

    def __init__(self):
        self.met = self.missed = 0

    def text(self, found, target, met):
        if found is None:
            return "-"
        if met:
            self.met += 1
            return f"{found:.3f}"
        self.missed += 1
        return f"{found:.3f} ({found - target:+.3f})"


def is_large(cell):
    """Whether the targets for fractions speak of this cell: x of 256 MiB and more, or few long rows."""
    of_x = cell.rows * cell.hidden_size * DTYPES[cell.dtype].itemsize
    return of_x > 0.99 * SWEEP_BYTES or (cell.rows, cell.hidden_size) in HUGE_SHAPES


def main(path):
    results = against_fastest_roof(read_record(path))
    kinds = sorted({(r["op"], r["dtype"]) for r in results})
    header = ["", "target", *(" ".join(kind) for kind in kinds)]
    scores = Scores()

    fractions = {}
    for cell, of in times_by_cell(results, "fraction").items():
        if is_large(cell) and "fused" in of:
            fractions[cell.op, cell.dtype, cell.direction, cell.hidden_size] = of["fused"]
    rows = []
    for column, direction in enumerate(("forward", "backward"), 1):
        for line in FRACTIONS:
            for hidden_size in line[0]:
                found = [fractions.get((*kind, direction, hidden_size)) for kind in kinds]
                texts = [scores.text(f, line[column], f is not None and f >= line[column]) for f in found]
                rows.append([f"{direction} {hidden_size}", f"{line[column]:.2f}", *texts])
    print_table("Fraction of the roof, at least; in brackets: what is missing", header, rows)

    shares = {}
    for cell, us_of in times_by_cell(results).items():
        if "fused" in us_of and "torch" in us_of:
            key = (cell.op, cell.dtype, cell.direction, cell.rows, cell.hidden_size)
            shares[key] = us_of["fused"] / us_of["torch"]
    rows = []
    for direction, target in SHARES.items():
        for shape in SMALL_SHAPES:
            found = [shares.get((*kind, direction, *shape)) for kind in kinds]
            texts = [scores.text(f, target, f is not None and (f < 1 if target == 1 else f <= target)) for f in found]
            rows.append([f"{direction} {shape[0]} x {shape[1]}", f"{target:.2f}", *texts])
    print_table("Small shapes: share of torch's time, at most; in brackets: what is too much", header, rows)

    print(f"{scores.met} of {scores.met + scores.missed} targets are met, {scores.missed} are missed.")
    print_verdict(results)
    return 1 if scores.missed else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python benchmarks/check_targets.py RECORD.json")
    sys.exit(main(sys.argv[1]))
