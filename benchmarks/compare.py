"""Two records, cell by cell: `python benchmarks/compare.py OLD.json NEW.json [--limit PERCENT [--floor-us US]]`.

Reads records of test_benchmark.py (benchmark_*.json, add_norms_*.json) and of benchmarks/fusions.py (fusions_*.json).
Prints new / old GPU time of this library for each op, direction, dtype and shape, the geometric mean for each op and
direction and of all cells, and the ten worst cells. A ratio above 1 is slower. A cell that only one record has is
listed and is in no mean; wall times (call_no_grad, step) are counted but not compared, as they measure the host.

Exits with 0. With --limit it exits with 1 if a cell is slower by more than PERCENT and by more than --floor-us (a
launch of 2 us repeats within some hundredths of a microsecond, which is more than any percentage worth limiting).
"""

import argparse
import json
import math
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

WORST = 10


class Cell(NamedTuple):
    op: str
    direction: str
    dtype: str
    weight_dtype: str
    residual_dtype: str
    rows: int
    hidden_size: int

    def __str__(self):
        dtypes = [self.dtype]
        dtypes += [f"w:{self.weight_dtype}"] if self.weight_dtype not in ("", self.dtype) else []
        dtypes += [f"residual:{self.residual_dtype}"] if self.residual_dtype not in ("", self.dtype) else []
        return f"{self.op:48} {self.direction:9} {' '.join(dtypes):16} {self.rows:>9} x {self.hidden_size:<9}"


def gpu_times(record, provider="fused"):
    """({cell: us}, number of wall times) of one provider in a record's results."""
    found, wall_times = {}, 0
    for result in record["results"]:
        if result["provider"] != provider:
            continue
        if result.get("timing", "graph") == "loop" or result.get("device", "cuda") != "cuda":
            wall_times += 1
            continue
        cell = Cell(
            result.get("op") or result["fusion"],
            result["direction"],
            result["dtype"],
            result.get("weight_dtype") or "",
            result.get("residual_dtype") or "",
            result["rows"],
            result["hidden_size"],
        )
        if cell in found:
            raise SystemExit(f"the record has two times of one cell: {cell}")
        found[cell] = result["us"]
    return found, wall_times


def geometric_mean(ratios):
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def is_slower(old_us, new_us, limit, floor_us):
    """Whether a cell is beyond the limit: by more than `limit` percent and by more than `floor_us` microseconds."""
    return new_us > old_us * (1 + limit / 100) and new_us - old_us > floor_us


def line_of(cell, old_us, new_us):
    return f"{cell} {old_us:10.3f} -> {new_us:10.3f} us   {new_us / old_us:6.3f}"


def compare(old_record, new_record, limit=None, floor_us=0.05):
    """Prints the comparison; returns the exit code."""
    (old, old_wall), (new, new_wall) = gpu_times(old_record), gpu_times(new_record)
    common = [cell for cell in old if cell in new]
    for name, record in (("old", old_record), ("new", new_record)):
        meta = record.get("meta", {})
        print(f"{name}: {meta.get('date')}, {meta.get('gpu')}, torch {meta.get('torch')}, csrc {meta.get('csrc_hash')}")
    print()
    for cell in common:
        print(line_of(cell, old[cell], new[cell]))

    for name, one, other in (("old", old, new), ("new", new, old)):
        only = [cell for cell in one if cell not in other]
        if only:
            print(f"\nonly in the {name} record, not compared: {len(only)}")
        for cell in only:
            print(f"{cell} {one[cell]:10.3f} us")
    if old_wall or new_wall:
        print(f"\nwall times and times of a CPU, not compared: {old_wall} in the old record, {new_wall} in the new")
    if not common:
        print("\nno cell is in both records")
        return 0

    ratios = {cell: new[cell] / old[cell] for cell in common}
    groups = defaultdict(list)
    for cell in common:
        groups[cell.op, cell.direction].append(ratios[cell])
    print("\nnew / old GPU time, geometric mean")
    for (op, direction), of_group in groups.items():
        print(f"{op:48} {direction:9} {geometric_mean(of_group):6.3f}   of {len(of_group)}")
    print(f"{'all':58} {geometric_mean(list(ratios.values())):6.3f}   of {len(ratios)}")

    print(f"\nthe worst {min(WORST, len(common))}")
    for cell in sorted(common, key=ratios.get, reverse=True)[:WORST]:
        print(line_of(cell, old[cell], new[cell]))
    if limit is None:
        return 0
    slower = [cell for cell in common if is_slower(old[cell], new[cell], limit, floor_us)]
    print(f"\nslower by more than {limit:g}% and {floor_us:g} us: {len(slower)} of {len(common)}")
    for cell in slower:
        print(line_of(cell, old[cell], new[cell]))
    return 1 if slower else 0


def read_record(path):
    """A record of a benchmark; ends the program with a sentence if `path` is none."""
    try:
        record = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path} cannot be read as a record: {error}") from None
    if not (isinstance(record, dict) and isinstance(record.get("meta"), dict) and "results" in record):
        raise SystemExit(f"{path} is no record of a benchmark: it has no meta and results")
    return record


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--limit", type=float, metavar="PERCENT", help="exit with 1 if a cell is slower by more")
    parser.add_argument("--floor-us", type=float, default=0.05, metavar="US", help="and by more than this (0.05)")
    args = parser.parse_args(arguments)
    return compare(read_record(args.old), read_record(args.new), args.limit, args.floor_us)


if __name__ == "__main__":
    sys.exit(main())
