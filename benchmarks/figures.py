"""The table of figures in docs/reliability.md: `python benchmarks/figures.py [FOLDER]` prints what the newest records
in FOLDER say (default: benchmarks/results, with what lies in it); --docs writes it into the page."""

import argparse
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE, HEADING = ROOT / "docs" / "reliability.md", "## Figures of the last recorded run\n"


def newest(folder, pattern):
    records = [json.loads(path.read_text()) for path in Path(folder).rglob(pattern)]
    return max(records, key=lambda record: record["meta"]["date"], default=None)


def fuzzing(record):
    cases = sum(figures.get("fuzz_cases", 0) for figures in record["figures"].values())
    return f"{cases:,} cases, {record['tests']['failed']} tests of {record['tests']['processes']} processes failed"


def promises(record):
    tests, found = record["tests"], [item for figures in record["figures"].values() for item in figures.items()]
    elements = max((int(value) for name, value in found if name == "elements"), default=0)
    steps = max((int(value) for name, value in found if name == "steps_without_growth"), default=0)
    peaks = [(int(value), int(dict(found)[f"{name[:-5]}torch"])) for name, value in found if name.endswith(" fused")]
    peak = f", peak memory at most {max(a / b for a, b in peaks):.3f} of torch's" if peaks else ""
    return (
        f"{tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped; up to {elements:,} elements, "
        f"{steps:,} steps without growth{peak}"
    )


def sanitizer(record):
    tools = []
    for result in record["sanitizer"]:
        said = ", ".join(sorted({str(process["summary"]) for process in result["processes"]}))
        statuses = [process["exit_status"] for process in result["processes"]]
        ended = ", ".join(f"{statuses.count(status)} of {len(statuses)} processes ended with status {status}"
                          for status in sorted({*statuses} - {0, 99}))  # fmt: skip  # 99: the tool reported something
        tools.append(f"{result['tool']} in {result['calls']} of {result['of']} calls: {said}{ended and f' ({ended})'}")
    kernels = record["kernels"]
    if kernels and kernels["compiled"]:
        tools.append(f"{len(kernels['missed'])} of {kernels['compiled']} kernels not reached")
    return "; ".join(tools)


def training(record):
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
        record = newest(folder, pattern)
        meta = record and record["meta"]
        on = (
            f"{meta['device']}, torch {meta['torch']}, csrc/ {meta['csrc_hash']}, {meta['date'][:10]}" if record else ""
        )
        lines.append(f"| {what} | {on} | {figure(record) if record else 'not yet recorded'} |")
    return "\n".join(lines) + "\n"


def page(folder):
    """docs/reliability.md with the table, which is all that follows the heading."""
    text = PAGE.read_text()
    return f"{text[: text.index(HEADING)]}{HEADING}\n{table(folder)}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--docs", action="store_true", help="write it into docs/reliability.md")
    args = parser.parse_args()
    if args.docs:
        PAGE.write_text(page(args.folder))
    else:
        print(table(args.folder), end="")
