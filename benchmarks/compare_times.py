"""Compares two outputs of `check_kernels --time`: python benchmarks/compare_times.py OLD.csv NEW.csv

Prints, by name, direction and dtype: cells, geometric mean of new / old, the worst cell, and the geometric means of the
copy of the same bytes / time. Then the worst 20 cells of all.
"""

import csv
import math
import sys


def read(path):
    with open(path, newline="") as file:
        return {tuple(row[:5]): (float(row[5]), float(row[6])) for row in list(csv.reader(file))[1:]}


def geometric_mean(values):
    return math.exp(sum(map(math.log, values)) / len(values))


def main(old_path, new_path):
    old, new = read(old_path), read(new_path)
    groups = {}
    for key in old.keys() & new.keys():
        failed = old[key][0] <= 0 or new[key][0] <= 0
        if failed:
            print("not launched:", *key, "old" if old[key][0] <= 0 else "new")
            continue
        groups.setdefault(key[:3], []).append((new[key][0] / old[key][0], key))
    print("new/old  worst           of copy: old   new   cells")
    for group in sorted(groups):
        cells = groups[group]
        worst = max(cells)
        fractions = [geometric_mean([times[key][1] / times[key][0] for _, key in cells]) for times in (old, new)]
        print(
            f"{geometric_mean([ratio for ratio, _ in cells]):.3f}    {worst[0]:.3f} {worst[1][3]:>8} x {worst[1][4]:<7}"
            f"{fractions[0]:.3f} {fractions[1]:.3f}  {len(cells):3}  {' '.join(group)}"
        )
    everything = sorted((cell for cells in groups.values() for cell in cells), reverse=True)
    print(f"all: {len(everything)} cells, geometric mean {geometric_mean([ratio for ratio, _ in everything]):.4f}")
    for ratio, key in everything[:20]:
        print(f"{ratio:.3f}  {old[key][0]:9.2f} {new[key][0]:9.2f} us  {' '.join(key)}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
