"""Turns pytest's --junitxml reports into a record: `python benchmarks/record_tests.py REPORT... FOLDER`.

It is named after the first report, up to a "_": fuzz_1.xml becomes fuzz_DATE.json. Reports of several processes that
ran the same tests are added up.
"""

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


def failures(cases):
    """Of each failed test: the first line of its message."""
    found = {}
    for case in cases:
        for problem in (*case.iter("failure"), *case.iter("error")):
            lines = (problem.get("message") or problem.text or "").strip().splitlines()
            found[case.get("name")] = lines[0][:200] if lines else ""
    return found


def figures(cases):
    """What tests measured (pytest's record_property), by the test's name; a number of cases is the sum of all runs."""
    found = {}
    for case in cases:
        for item in case.iter("property"):
            of_test = found.setdefault(case.get("name"), {})
            name, value = item.get("name"), item.get("value")
            of_test[name] = of_test.get(name, 0) + int(value) if name == "fuzz_cases" else value
    return found


def main(*arguments):
    *reports, folder = map(Path, arguments)
    cases = [case for report in reports for case in ElementTree.parse(report).getroot().iter("testcase")]
    cases = [case for case in cases if case.get("name")]  # pytest leaves one without, where it was interrupted
    counts = collections.Counter(outcome(case) for case in cases)
    by_file = collections.Counter((case.get("classname"), outcome(case)) for case in cases)
    on_gpu = collections.Counter(outcome(case) for case in cases if "cuda" in case.get("name"))
    skips = collections.Counter(case.find("skipped").get("message") for case in cases if outcome(case) == "skipped")
    record = {
        "meta": environment(),
        "tests": {
            "processes": len(reports),
            **{name: counts[name] for name in ("passed", "failed", "skipped")},
            "with_cuda_in_name": dict(on_gpu),
            "by_file": {f"{name} {result}": count for (name, result), count in sorted(by_file.items())},
            "failures": failures(cases),
            "skip_reasons": dict(skips),
        },
        "figures": figures(cases),
    }
    path = folder / f"{reports[0].stem.split('_')[0]}_{datetime.datetime.now():%Y%m%d_%H%M%S}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {path.name}: {record['tests']['passed']} passed, {record['tests']['failed']} failed, "
          f"{record['tests']['skipped']} skipped")  # fmt: skip
    for message, count in collections.Counter(record["tests"]["failures"].values()).most_common(12):
        print(f"{count:6} {message}")


if __name__ == "__main__":
    main(*sys.argv[1:])
