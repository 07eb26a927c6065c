"""The tables of figures in the documentation, made from the newest records. `python benchmarks/figures.py [FOLDER]`
prints the table of docs/reliability.md for the records in FOLDER (default: benchmarks/results). --docs writes all
tables into their pages."""

import argparse
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADING = "## Figures of the last recorded run\n"
OURS_AND_TORCH = ("fused", "torch", "compile")
MODELS = {"gpt_768": "GPT 768", "gpt_1600": "GPT 1600", "vit_1024": "ViT 1024", "bert_1024": "BERT 1024, post-norm",
          "dit_1152": "DiT 1152", "llama_2048": "Llama 2048", "llama_4096": "Llama 4096",
          "qwen3_2048": "Qwen3-like 2048", "qwen3_next_2048": "Qwen3-Next-like 2048"}  # fmt: skip
INFERENCE = [(mode, tokens) for mode in ("eager-infer", "compile-infer", "graph-infer") for tokens in (1, 256)]
DTYPES = ("bf16", "fp16", "fp32")  # of the peers' record
SWEEP = (64, 256, 1024, 2048, 4096, 4097, 8192, 16384, 65536, 131072, 262144)


def newest(folder, pattern):
    return max(read(folder, pattern), key=lambda record: record["meta"]["date"], default=None)


def newest_runs(folder, pattern):
    """The newest record and the others of its csrc/ and card, newest first."""
    records = sorted(read(folder, pattern), key=lambda record: record["meta"]["date"], reverse=True)
    return [r for r in records if all(r["meta"][key] == records[0]["meta"][key] for key in ("csrc_hash", "device"))]


def read(folder, pattern):
    return [json.loads(path.read_text()) for path in sorted(Path(folder).rglob(pattern))]


def whole_models(folder, pattern):
    """{(model, mode), or (model, mode, tokens) for inference: {provider: entry}}, each from the newest run that has its
    figures, for all providers, as they are compared within one run. entry["gpu"]: the card."""
    found = {}
    for record in sorted(read(folder, pattern), key=lambda record: record["meta"]["date"]):
        runs = {}
        for entry in record["results"]:
            is_training = entry["mode"] in ("eager", "compile")
            key = (entry["model"], entry["mode"], *(() if is_training else (entry["tokens"],)))
            runs.setdefault(key, {})[entry["provider"]] = entry | {"gpu": record["meta"]["gpu"]}
        found |= {key: run for key, run in runs.items() if run["torch"]["ms"] and run["replaced"]["ms"]}
    return found


def peers(folder, pattern):
    """The records of a card's dtypes as one. A provider may have a later run of its own: its times are multiplied by
    those of fused in the first run and divided by those in its own."""
    records = sorted(read(folder, pattern), key=lambda record: record["meta"]["date"])
    roofs, fused, results = {}, {}, []
    for record in records:
        roofs = record["meta"]["roofs"] | roofs
        names = ("op", "direction", "dtype", "rows", "hidden_size")
        timed = [(tuple(r[name] for name in names), r) for r in record["results"]]
        own = {cell: r["us"] for cell, r in timed if r["provider"] == "fused"}
        for cell, r in timed:
            if r["provider"] != "fused" or cell not in fused:
                results.append(r | {"us": r["us"] * fused.get(cell, own[cell]) / own[cell]})
        fused = own | fused
    return {"meta": {"roofs": roofs}, "results": results}


def fuzzing(*runs):
    cases = sum(figures.get("fuzz_cases", 0) for run in runs for figures in run["figures"].values())
    failed, processes = (sum(run["tests"][key] for run in runs) for key in ("failed", "processes"))
    return f"{cases:,} cases, {failed} tests of {processes} processes failed"


def promises(record, *_):
    tests, found = record["tests"], [item for figures in record["figures"].values() for item in figures.items()]
    elements = max((int(value) for name, value in found if name == "elements"), default=0)
    steps = max((int(value) for name, value in found if name == "steps_without_growth"), default=0)
    peaks = [(int(value), int(dict(found)[f"{name[:-5]}torch"])) for name, value in found if name.endswith(" fused")]
    peak = f", peak memory at most {max(a / b for a, b in peaks):.3f} of torch's" if peaks else ""
    return (
        f"{tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped; up to {elements:,} elements, "
        f"{steps:,} steps without growth{peak}"
    )


def sanitizer(record, *_):
    tools = []
    for result in record["sanitizer"]:
        said = ", ".join(sorted({process["summary"] for process in result["processes"] if process["summary"]}))
        statuses = [process["exit_status"] for process in result["processes"]]
        ended = ", ".join(f"{statuses.count(status)} of {len(statuses)} processes ended with status {status}"
                          for status in sorted({*statuses} - {0, 99}))  # fmt: skip  # 99: the tool reported something
        tools.append(f"{result['tool']} in {result['calls']} of {result['of']} calls: {said}{ended and f' ({ended})'}")
    kernels = record["kernels"]
    if kernels and kernels["compiled"]:
        tools.append(f"{len(kernels['missed'])} of {kernels['compiled']} kernels not reached")
    return "; ".join(tools)


def training(record, *_):
    found = record["long_training"]
    return (f"{found['steps']:,} steps, {len(found['seeds'])} seeds: {'agree' if found['agree'] else 'DISAGREE'}, "
            f"difference {found['difference']:+.5f} of {found['allowed']:.5f} allowed")  # fmt: skip


ROWS = (
    ("random cases", "fuzz_*.json", fuzzing),
    ("`tests/test_reliability.py`", "promises_*.json", promises),
    ("compute-sanitizer", "sanitizer_2*.json", sanitizer),
    ("racecheck, in its build", "racecheck_*.json", sanitizer),
    ("training, bf16", "long_training_layer_bf16.json", training),
    ("training, fp16", "long_training_layer_fp16.json", training),
)


def table(folder):
    lines = ["| what | on | figure |", "|---|---|---|"]
    for what, pattern, figure in ROWS:
        runs = newest_runs(folder, pattern)
        meta = runs and runs[0]["meta"]
        on = f"{meta['device']}, torch {meta['torch']}, csrc/ {meta['csrc_hash']}, {meta['date'][:10]}" if runs else ""
        lines.append(f"| {what} | {on} | {figure(*runs) if runs else 'not yet recorded'} |")
    return "\n".join(lines) + "\n"


# ---- speed -----------------------------------------------------------------------------------------------------------


def cell(results, providers, form, **wanted):
    """What `form` makes of each provider's result, where there is one."""
    found = []
    for provider in providers:
        matching = [r for r in results if r["provider"] == provider and wanted.items() <= r.items()]
        found.append(form(matching[0]) if matching else "-")
    return " / ".join(found)


def shapes(record, is_meant):
    """(rows, hidden_size) of the results that are meant, each once, in their order."""
    return dict.fromkeys((r["rows"], r["hidden_size"]) for r in record["results"] if is_meant(r))


def dtypes_of(record):
    return [dtype for dtype in DTYPES if any(r["dtype"] == dtype for r in record["results"])]


def us(digits):
    return lambda result: f"{result['us']:.{digits}f}"


def is_large(result):
    """One of the problems of a fixed size, not a small shape or a few huge rows."""
    nbytes = result["rows"] * result["hidden_size"] * (4 if result["dtype"] == "fp32" else 2)
    return nbytes >= 128 << 20 and result["hidden_size"] <= max(SWEEP)


def sweep_rows(record):
    fastest, large = record["meta"]["roofs"], [r for r in record["results"] if is_large(r)]

    def fraction(result):  # of the fastest copy of the run, where that of the cell was slow
        name = "copy" if result["direction"] == "forward" else "two_reads_one_write"
        most = fastest[f"{name}_{result['dtype']}_gb_per_s"]
        roof = result["gb_per_s"] / result["fraction"]
        return f"{result['fraction'] if roof >= 0.98 * most else result['gb_per_s'] / most:.2f}"

    for n in SWEEP:
        yield [str(n), *(
            cell(large, OURS_AND_TORCH, fraction, op="layer_norm", dtype=dtype, direction=direction, hidden_size=n)
            for dtype in dtypes_of(record) for direction in ("forward", "backward"))]  # fmt: skip


def huge_rows(record):
    for rows, n in shapes(record, lambda result: result["hidden_size"] >= 1 << 22):
        shape = {"op": "layer_norm", "rows": rows, "hidden_size": n}
        yield [f"{rows} x {n}", *(
            cell(record["results"], OURS_AND_TORCH, us(0), **shape, dtype=dtype, direction=direction)
            for dtype in dtypes_of(record) for direction in ("forward", "backward"))]  # fmt: skip


def small_rows(record):
    for rows, n in sorted(shapes(record, lambda _: True)):
        shape = {"rows": rows, "hidden_size": n, "direction": "backward"}
        yield [f"{rows} x {n}", *(cell(record["results"], OURS_AND_TORCH, us(1), **shape, op=op, dtype=dtype)
                                  for dtype in dtypes_of(record) for op in ("layer_norm", "rms_norm"))]  # fmt: skip


def fusion_rows(record):
    results = record["results"]
    for name in dict.fromkeys(r["fusion"] for r in results):
        row = [name]
        for direction in ("forward", "backward"):
            of = [r for r in results if r["fusion"] == name and r["direction"] == direction]
            row.append(cell(of, OURS_AND_TORCH, us(0), hidden_size=4096))
            fractions = {r["hidden_size"]: r["fraction"] for r in of if r["provider"] == "fused"}
            others = [fractions[n] for n in (1024, 1536, 4096, 8192)]
            row.append(f"{fractions[4096]:.2f} ({min(others):.2f} to {max(others):.2f}; {fractions[1152]:.2f})")
        yield row


def add_rows(record):
    results = record["results"]
    everybody = (*OURS_AND_TORCH, "flash_attn", "liger", "quack")
    for rows, n in shapes(record, lambda _: True):
        yield [f"{rows} x {n}", *(
            cell(results, everybody[:4] if op == "add_layer_norm" else everybody, us(0), op=op, direction=direction,
                 rows=rows, hidden_size=n)
            for op in ("add_layer_norm", "add_rms_norm") for direction in ("forward", "backward"))]  # fmt: skip


def gated_rows(record):
    """us of each provider, and what ours are of the copy's rate; the gate after the norm, then before it."""
    results, providers = record["results"], ("fused", "fla", "mamba_ssm", "compile", "torch")
    for n in dict.fromkeys(r["hidden_size"] for r in results):
        row = [str(n)]
        for direction in ("forward", "backward"):
            of = [r for r in results if r["hidden_size"] == n and r["direction"] == direction]
            first = [r for r in of if r["fusion"] == "gated_rms_norm"]
            row.append(cell(first, providers, us(0)))
            ours = [f"{r['fraction']:.2f}" for r in of if r["provider"] == "fused"]
            row.append(", ".join(ours))
        yield row


def quant_rows(record):
    """us of ours / torch.compile / PyTorch operations, and ours as a fraction of the copy's rate."""
    results = record["results"]
    cases = tuple(dict.fromkeys(r["case"] for r in results))
    for n in dict.fromkeys(r["hidden_size"] for r in results):
        row = [str(n)]
        for case in cases:
            of = [r for r in results if r["hidden_size"] == n and r["case"] == case]
            (ours,) = (r["fraction"] for r in of if r["provider"] == "fused")
            row.append(f"{cell(of, ('fused', 'compile', 'torch'), us(0))} ({ours:.2f})")
        yield row


def gain(run, provider):
    """torch's time of a step / the provider's, and the larger spread of the two; None without figures."""
    torch, other = run.get("torch"), run.get(provider)
    if not (torch and other and torch["ms"] and other["ms"]):
        return None
    return torch["ms"] / other["ms"], max(torch["spread"], other["spread"])


def said(found):
    """`gain` as a cell: in brackets if the repeats differ by more than the two providers do, or by more than 10%."""
    if found is None:
        return "-"
    ratio, spread = found
    return f"{ratio:.2f}" if spread < min(abs(ratio - 1), 0.1) else f"({ratio:.2f})"


def cards(models, key):
    """The cards of a model's eager and compiled steps: H100, or H100/H200."""
    found = (models.get((key, mode), {}).get("torch", {}).get("gpu", "-") for mode in ("eager", "compile"))
    return "/".join(dict.fromkeys(name.removeprefix("NVIDIA ").split()[0] for name in found))


def model_rows(models):
    """The table of README.md."""
    for key, name in MODELS.items():
        said_of = [said(gain(models.get((key, mode), {}), provider)) for mode in ("eager", "compile")
                   for provider in ("replaced", "fused")]  # fmt: skip
        yield [name, cards(models, key), *said_of]


def model_details(models):
    """The table of benchmarks/records.md: also the spread, and GPU time of the kernels of norms and adds."""
    for key, name in MODELS.items():
        for mode in ("eager", "compile"):
            run, row = models.get((key, mode), {}), [f"{name}, {mode}"]
            for provider in ("replaced", "fused", "liger", "quack"):
                found = gain(run, provider)
                if found is None:
                    row.append("-")
                    continue
                on_gpu = run[provider]["norm_us"] / run["torch"]["norm_us"]
                row.append(f"{said(found)} / {100 * found[1]:.1f}% / {on_gpu:.2f}")
            yield row


def bound_rows(models):
    """The table of benchmarks/records.md of what norms can gain: torch's GPU time of a step / the same without the
    kernels of norms, and with the provider's."""
    for key, name in MODELS.items():
        row = [name]
        for mode in ("eager", "compile"):
            run = models.get((key, mode), {})
            torch = run.get("torch")
            if not torch or not torch["gpu_ms"]:
                row += ["-"] * 3
                continue
            others = torch["gpu_ms"] - torch["norm_us"] / 1e3
            norms = (0, *(run[provider]["norm_us"] / 1e3 for provider in ("replaced", "fused")))
            row += [f"{torch['gpu_ms'] / (others + ms):.3f}" for ms in norms]
        yield row


def inference_rows(models):
    """The table of benchmarks/records.md of inference after replace_norms."""
    for key, name in MODELS.items():
        if any((key, *of) in models for of in INFERENCE):
            yield [name, *(said(gain(models.get((key, *of), {}), "replaced")) for of in INFERENCE)]


def peer_rows(record):
    """The time of the fastest peer / ours, LayerNorm / RMSNorm; in brackets where it is faster by more than 0.5%."""
    found = {}  # label, column: {op: {provider: us}}
    for r in record["results"]:
        label = r["hidden_size"] if is_large(r) else f"{r['rows']} x {r['hidden_size']}"
        column = found.setdefault(label, {}).setdefault((r["direction"], r["dtype"]), {})
        column.setdefault(r["op"], {})[r["provider"]] = r["us"]

    def ratio(times):
        found = min(us for provider, us in times.items() if provider != "fused") / times["fused"]
        return f"{found:.2f}" if found >= 0.995 else f"({found:.2f})"

    for label in sorted(found, key=lambda label: (isinstance(label, str), label if isinstance(label, int) else 0)):
        columns = [(direction, dtype) for direction in ("forward", "backward") for dtype in dtypes_of(record)]
        yield [str(label), *(" / ".join(ratio(found[label][column][op]) for op in ("layer_norm", "rms_norm"))
                             for column in columns)]  # fmt: skip


def build_rows(records):
    for r in records:
        size = "-" if r["extension_bytes"] is None else f"{r['extension_bytes'] / 1e6:.1f} MB"
        yield [r["arch_list"] or "CPU kernels only", str(r["cores"]), f"{r['wall_seconds']:.0f}",
               f"{r['cpu_seconds']:.0f}", size, str(r["kernels"] or "-"), r["csrc_hash"]]  # fmt: skip
    if not records:
        yield ["not yet recorded", *["-"] * 6]


# page, how its table begins, the records, how they are read, the rows
TABLES = (
    ("README.md", "| training step", "models_*.json", whole_models, model_rows),
    ("benchmarks/records.md", "| model, mode |", "models_*.json", whole_models, model_details),
    ("benchmarks/records.md", "| step | eager: no norms", "models_*.json", whole_models, bound_rows),
    ("benchmarks/records.md", "| model | 1 token", "models_*.json", whole_models, inference_rows),
    ("benchmarks/records.md", "| hidden size | forward bf16", "h200/*/peers_*.json", peers, peer_rows),
    ("benchmarks/records.md", "| hidden size | bf16 forward", "h200/*/peers_*.json", peers, sweep_rows),
    ("benchmarks/records.md", "| rows x hidden size | bf16 forward", "h200/*/peers_*.json", peers, huge_rows),
    ("benchmarks/records.md", "| rows x columns | LayerNorm bf16", "small_backward_*.json", newest, small_rows),
    ("docs/install.md", "| architectures |", "build*.json", read, build_rows),
    ("docs/fusions.md", "| | forward | of the copy", "fusions_*.json", newest, fusion_rows),
    ("docs/fusions.md", "| columns | forward, us |", "gated_*.json", newest, gated_rows),
    ("docs/fusions.md", "| columns | one given scale |", "quant_*.json", newest, quant_rows),
    ("docs/fusions.md", "| columns, LayerNorm |", "layer_norm_quant_*.json", newest, quant_rows),
    ("docs/fusions.md", "| | add_layer_norm forward", "add_norms_*.json", newest, add_rows),
)


def pages(folder):
    """{name: the page with its tables}."""
    names = ("README.md", "benchmarks/records.md", "docs/fusions.md", "docs/install.md", "docs/reliability.md")
    found = {name: (ROOT / name).read_text() for name in names}
    for name, beginning, pattern, records, rows in TABLES:
        lines = found[name].split("\n")
        (start,) = (i for i, line in enumerate(lines) if line.startswith(beginning))
        end = start + 2
        while lines[end].startswith("|"):
            end += 1
        lines[start + 2 : end] = ["| " + " | ".join(row) + " |" for row in rows(records(folder, pattern))]
        found[name] = "\n".join(lines)
    text = found["docs/reliability.md"]
    found["docs/reliability.md"] = f"{text[: text.index(HEADING)]}{HEADING}\n{table(folder)}"
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--docs", action="store_true", help="write them into the pages")
    args = parser.parse_args()
    if args.docs:
        for name, text in pages(args.folder).items():
            (ROOT / name).write_text(text)
    else:
        print(table(args.folder), end="")
