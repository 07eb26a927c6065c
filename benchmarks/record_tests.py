"""Turns pytest's --junitxml report into a record: `python benchmarks/record_tests.py REPORT FOLDER`."""

import collections
import datetime
import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from test_benchmark import environment  # noqa: E402


def outcome(case):
    for name in ("failure", "error", "skipped"):
        if case.find(name) is not None:
            return {"failure": "failed", "error": "failed"}.get(name, name)
    return "passed"


def main(report, folder):
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    counts = collections.Counter(outcome(case) for case in cases)
    by_file = collections.Counter((case.get("classname"), outcome(case)) for case in cases)
    on_gpu = collections.Counter(outcome(case) for case in cases if "cuda" in case.get("name"))
    skips = collections.Counter(case.find("skipped").get("message") for case in cases if outcome(case) == "skipped")
    record = {
        "meta": environment(),
        "tests": {
            **{name: counts[name] for name in ("passed", "failed", "skipped")},
            "with_cuda_in_name": dict(on_gpu),
            "by_file": {f"{name} {result}": count for (name, result), count in sorted(by_file.items())},
            "failed_names": [case.get("name") for case in cases if outcome(case) == "failed"],
            "skip_reasons": dict(skips),
        },
        # What tests measured (pytest's record_property), by the test's name.
        "figures": {
            case.get("name"): {item.get("name"): item.get("value") for item in case.iter("property")}
            for case in cases
            if case.find("properties") is not None
        },
    }
    path = Path(folder) / f"tests_{datetime.datetime.now():%Y%m%d_%H%M%S}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {path.name}: {record['tests']['passed']} passed, {record['tests']['failed']} failed, "
          f"{record['tests']['skipped']} skipped")  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
