"""Every row has a plan of the fused backward that holds it: `tests/check_plans.cpp`, compiled and run on the CPU."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_plans_of_backward_hold_every_row(tmp_path):
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if not compiler:
        pytest.skip("no C++ compiler")
    program = tmp_path / "check_plans"
    source = ROOT / "tests" / "check_plans.cpp"
    subprocess.run([compiler, "-std=c++17", "-O1", f"-I{ROOT / 'csrc'}", str(source), "-o", str(program)], check=True)
    run = subprocess.run([str(program)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout[-2000:]
    assert int(run.stdout.split()[-4]) > 100_000, run.stdout[-200:]  # plans checked
