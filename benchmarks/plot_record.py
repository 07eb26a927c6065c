"""Draws a record: `python benchmarks/plot_record.py RECORD.json`, or `python test_benchmark.py --plot RECORD.json`.

Beside the record, for each op: the fraction of the roof against the hidden size (x of 256 MiB and more); for each op
and dtype: the launch-bound shapes, in GPU time and in time of the host. `plot_record.py FOLDER` draws the training
steps of the newest models_*.json in FOLDER as FOLDER/models.png.
"""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from compare import read_record  # noqa: E402
from figures import MODELS, cards, gain, whole_models  # noqa: E402

from test_benchmark import (  # noqa: E402
    DIRECTIONS,
    DTYPES,
    HOST_DIRECTIONS,
    PROVIDERS,
    SMALL_SHAPES,
    SWEEP_BYTES,
    against_fastest_roof,
)

# Okabe and Ito's colours, told apart by colour-blind eyes too; the markers tell the lines apart without any colour.
STYLES = {
    "fused": ("#0072B2", "o"),
    "replaced": ("#56B4E9", "*"),
    "torch": ("#000000", "s"),
    "compile": ("#E69F00", "^"),
    "liger": ("#009E73", "v"),
    "quack": ("#D55E00", "D"),
    "flash_attn": ("#CC79A7", "P"),
    "apex": ("#999999", "X"),
    "apex_fast": ("#F0E442", "<"),
}
OTHER = ("#444444", ".")  # a provider that was added since
ROOF = {"forward": "of a copy", "backward": "of 2 reads, 1 write"}


def plot_record(path):
    """Draws the record at `path`; yields the paths of the PNGs."""
    path = Path(path)
    record = read_record(path)
    results = against_fastest_roof(record)
    where = f"{record['meta']['device']}, torch {record['meta']['torch']}"
    with plt.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        for op in unique(results, "op"):
            of_op = [r for r in results if r["op"] == op]
            yield from save(fractions_figure(of_op), f"{op}: fraction of the roof, {where}", path, op)
            for dtype in unique(of_op, "dtype"):
                figure = small_figure([r for r in of_op if r["dtype"] == dtype])
                yield from save(figure, f"{op}, {dtype}: launch-bound shapes, {where}", path, f"small_{op}_{dtype}")


def unique(results, field):
    return list(dict.fromkeys(r[field] for r in results))


def providers_of(results):
    """Ours last, so that it is drawn on top."""
    names = unique(results, "provider")
    return [name for name in PROVIDERS if name in names and name != "fused"] + ["fused"] * ("fused" in names)


def save(figure, title, path, name):
    if figure is None:
        return
    figure.suptitle(title)
    handles = {}
    for axes in figure.axes:
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels())))  # noqa: B905
    names = ["fused"] * ("fused" in handles) + [name for name in PROVIDERS if name in handles and name != "fused"]
    figure.legend([handles[n] for n in names], names, loc="outside lower center", ncols=len(names), frameon=False)
    written = path.with_name(f"{path.stem}_{name}.png")
    figure.savefig(written, dpi=150)
    plt.close(figure)
    yield written


def fractions_figure(results):
    """A panel for each dtype and direction. Powers of two are joined; a lone marker is an odd hidden size."""
    large = [
        r
        for r in results
        if r["fraction"] and r["rows"] * r["hidden_size"] * DTYPES[r["dtype"]].itemsize > 0.99 * SWEEP_BYTES
    ]
    dtypes = unique(large, "dtype")
    directions = [d for d in DIRECTIONS if d in unique(large, "direction")]
    if not large:
        return None
    figure, grid = plt.subplots(
        len(dtypes), len(directions), figsize=(9, 1 + 2.8 * len(dtypes)), sharex=True, sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for dtype, line in zip(dtypes, grid):  # noqa: B905
        for direction, axes in zip(directions, line):  # noqa: B905
            panel = [r for r in large if r["dtype"] == dtype and r["direction"] == direction]
            for name in providers_of(panel):
                color, marker = STYLES.get(name, OTHER)
                ours = name == "fused"
                at = {r["hidden_size"]: r["fraction"] for r in panel if r["provider"] == name}
                joined = {n: at[n] for n in sorted(at) if n & (n - 1) == 0}
                style = {"color": color, "marker": marker, "markersize": 5 if ours else 4, "zorder": 3 if ours else 2}
                axes.plot(joined.keys(), joined.values(), linewidth=2.6 if ours else 1.1, label=name, **style)
                odd = {n: at[n] for n in at if n not in joined}
                axes.plot(odd.keys(), odd.values(), linestyle="none", markerfacecolor="none", **style)
            axes.axhline(1, color="#888888", linewidth=1, linestyle="--", zorder=1)
            axes.set_xscale("log", base=2)
            sizes = [n for n in unique(panel, "hidden_size") if n & (n - 1) == 0]
            ticks = sorted(sizes)[::2]
            axes.set_xticks(ticks, [f"{n // 1024}K" if n >= 1024 else str(n) for n in ticks])
            axes.set_ylim(bottom=0)
            axes.grid(axis="y", color="#eeeeee")
            axes.set_title(f"{direction}, {dtype}")
        line[0].set_ylabel("fraction of the roof")
    for axes, direction in zip(grid[-1], directions):  # noqa: B905
        axes.set_xlabel(f"hidden size (roof: the speed {ROOF[direction]})")
    return figure


def small_figure(results):
    """A panel for each direction: a group of bars for each of the small shapes, µs."""
    shapes = [shape for shape in SMALL_SHAPES if any((r["rows"], r["hidden_size"]) == shape for r in results)]
    small = {(r["direction"], r["provider"], r["rows"], r["hidden_size"]): r["us"] for r in results}
    directions = [d for d in DIRECTIONS if any(key[0] == d and key[2:] in shapes for key in small)]
    if not shapes:
        return None
    columns = min(2, len(directions))
    lines = -(-len(directions) // columns)
    figure, grid = plt.subplots(lines, columns, figsize=(9, 1 + 2.6 * lines), squeeze=False, layout="constrained")
    for direction, axes in zip(directions, grid.flat):  # noqa: B905
        names = [name for name in PROVIDERS if any((direction, name, *shape) in small for shape in shapes)]
        width = 0.8 / len(names)
        for k, name in enumerate(names):
            at = [(i, small.get((direction, name, *shape))) for i, shape in enumerate(shapes)]
            places, heights = zip(*[(i - 0.4 + (k + 0.5) * width, us) for i, us in at if us is not None])  # noqa: B905
            ours = {"edgecolor": "black", "linewidth": 1} if name == "fused" else {}
            axes.bar(places, heights, width, color=STYLES.get(name, OTHER)[0], label=name, **ours)
        axes.set_xticks(range(len(shapes)), [f"{rows} x {hidden_size}" for rows, hidden_size in shapes])
        axes.tick_params(axis="x", length=0)
        axes.grid(axis="y", color="#eeeeee")
        axes.set_axisbelow(True)
        axes.set_title(direction)
        axes.set_ylabel("µs, host" if direction in HOST_DIRECTIONS else "µs")
    for axes in grid.flat[len(directions) :]:
        axes.remove()
    return figure


def plot_models(folder):
    """A panel for each mode: torch's time of a step / the provider's, with half of the spread of the repeats on each
    side."""
    models, providers = whole_models(folder, "models_*.json"), ("replaced", "fused", "liger", "quack")
    names = [key for key in MODELS if (key, "eager") in models or (key, "compile") in models]
    figure, panels = plt.subplots(1, 2, figsize=(9, 1 + 0.6 * len(names)), sharey=True, layout="constrained")
    for mode, axes in zip(("eager", "compile"), panels):  # noqa: B905
        for k, provider in enumerate(providers):
            bars = {i: found for i, key in enumerate(names) if (found := gain(models.get((key, mode), {}), provider))}
            axes.barh(
                [i + 0.2 * (k - 1.5) for i in bars],
                [ratio - 1 for ratio, _ in bars.values()],
                0.2,
                left=1,
                xerr=[ratio * spread / 2 for ratio, spread in bars.values()],
                error_kw={"elinewidth": 0.8, "ecolor": "#555555"},
                color=STYLES[provider][0],
                label=provider,
            )
        axes.axvline(1, color="#888888", linewidth=1)
        axes.set_yticks(range(len(names)), [f"{MODELS[key]}\n{cards(models, key)}" for key in names])
        axes.grid(axis="x", color="#eeeeee")
        axes.set_axisbelow(True)
        axes.set_title(mode)
        axes.set_xlabel("torch's time / the provider's")
    panels[0].invert_yaxis()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle("training steps in bf16")
    written = Path(folder) / "models.png"
    figure.savefig(written, dpi=150)
    plt.close(figure)
    yield written


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        for written in (plot_models if Path(argument).is_dir() else plot_record)(argument):
            print(f"wrote {written}")
