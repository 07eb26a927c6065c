"""docs/extending.md: the template is copied, built and run, the worked example installed and run, as a reader would."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checks import DEVICES, build_environment
from fork_server import run_code

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"

spec = importlib.util.spec_from_file_location("new_op", EXAMPLES / "new_op.py")
new_op = importlib.util.module_from_spec(spec)
spec.loader.exec_module(new_op)


def run(*command, cwd, device="cpu"):
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | build_environment(device) | {"PYTHONPATH": os.pathsep.join(paths)}
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout


# As `python -m pytest -v test_NAME.py` and `python benchmark_NAME.py --quick`, in one process.
TEST_AND_BENCHMARK = """
import os, runpy, sys, pytest, torch
torch.set_num_threads(2)
name = sys.argv.pop(1)
status = pytest.main(["-v", "-p", "no:cacheprovider", "--rootdir=.", f"test_{name}.py"])
if status:
    sys.exit(int(status))
print("the benchmark:")
sys.argv = [f"benchmark_{name}.py", "--quick"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_its_tests(folder, name, device, path=(), **environment):
    """Its tests pass, and there are some of that device among them; its benchmark prints a time for it."""
    paths = [*map(str, path), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = build_environment(device) | {"PYTHONPATH": os.pathsep.join(paths)} | environment
    done = run_code(TEST_AND_BENCHMARK, name, cwd=folder, environment=environment)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    tests, benchmark = done.stdout.split("the benchmark:")
    assert len(re.findall(rf"{device}\S* PASSED", tests)) > 10
    assert ("on the CPU" in benchmark) == (device == "cpu")
    assert len(re.findall(r"\d\.\d", benchmark)) >= 5


@pytest.mark.parametrize("device", DEVICES)
def test_a_new_op_builds_and_runs(tmp_path, device):
    name = "fresh_op"
    if device == "cpu":
        if shutil.which("make"):
            run("make", "new-op", f"NAME={name}", f"DEST={tmp_path}", f"PYTHON={sys.executable}", cwd=ROOT)
        else:
            run(sys.executable, "examples/new_op.py", name, str(tmp_path), cwd=ROOT)
    else:
        new_op.new_op(name, tmp_path)
    folder = tmp_path / name
    texts = "".join(path.read_text() for path in folder.rglob("*") if path.is_file())
    assert "my_op" not in texts and "MY_OP" not in texts and "MyOp" not in texts and "class FreshOp" in texts
    run_its_tests(folder, name, device, TORCH_EXTENSIONS_DIR=str(tmp_path / "cache"))


@pytest.mark.parametrize("device", DEVICES)
def test_the_worked_example_installs_and_runs(tmp_path, device):
    """Installed with pip, and run from there: the folder that is tested holds no sources that could be loaded."""
    source, site, tests = tmp_path / "source", tmp_path / "site", tmp_path / "tests"
    ignore = shutil.ignore_patterns("build", "*.egg-info", "__pycache__", "*.so")
    shutil.copytree(EXAMPLES / "custom_op", source, ignore=ignore)
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps"]
    run(*install, "--target", str(site), ".", cwd=source, device=device)
    assert list((site / "custom_op").glob("_C*.so"))
    tests.mkdir()
    for name in ("test_custom_op.py", "benchmark_custom_op.py"):
        shutil.copy(source / name, tests)
    run_its_tests(tests, "custom_op", device, path=[site])


def test_template_and_example_share_their_scaffold():
    for path in ("my_op/_build.py", "setup.py"):
        template = (EXAMPLES / "template" / path).read_text()
        example = (EXAMPLES / "custom_op" / path.replace("my_op", "custom_op")).read_text()
        assert new_op.renamed(template, "custom_op").split() == example.split(), path


@pytest.mark.parametrize("name", ["", "2fast", "Fast", "fast-op", "fast__op", "class", "json", "../up"])
def test_names_that_cannot_be(tmp_path, name):
    with pytest.raises(ValueError):
        new_op.new_op(name, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["torch", "numpy", "pytest", "fused_layernorm"])
def test_names_of_what_an_operator_imports(tmp_path, monkeypatch, name):
    """also where `make new-op` runs a Python that does not have them"""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=f"a Python module named {name} already"):
        new_op.new_op(name, tmp_path)


def test_a_name_that_is_taken(tmp_path, monkeypatch):
    (tmp_path / "fresh_op").mkdir()  # importable from here: the folder is what the message names
    (tmp_path / "fresh_op" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match="exists already"):
        new_op.new_op("fresh_op", tmp_path)


def test_code_on_the_page_is_the_code():
    page = (ROOT / "docs" / "extending.md").read_text()
    blocks = re.findall(r"^From `([^`]+)`:\n\n```\w+\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == page.count("From `") >= 5
    for path, block in blocks:
        assert block in (ROOT / path).read_text(), f"{path} has no such lines:\n{block}"


@pytest.mark.parametrize("page", ["docs/checklist.md", "docs/extending.md", "CONTRIBUTING.md", "examples/README.md"])
def test_what_a_page_names_is_there(page):
    text = (ROOT / page).read_text()
    named = re.findall(r"`([\w./-]+/[\w./-]+|[\w-]+\.(?:py|md))(?:::(\w+))?`", text)
    named += [(str(Path(page).parent / path), "") for path in re.findall(r"\]\(([^)#:]+)\)", text)]
    # What a path may be relative to.
    here = (ROOT, ROOT / Path(page).parent, EXAMPLES, EXAMPLES / "custom_op", EXAMPLES / "custom_op/custom_op")
    checked = 0
    for path, test in named:
        if path.startswith(("torch/", "ATen/", "examples/output")) or "fast_gelu" in path:
            continue  # torch's own, what is written, what the reader makes
        found = [folder / path for folder in here if (folder / path).exists()]
        assert found, f"{page} names {path}, which is not there"
        assert not test or f"def {test}(" in found[0].read_text(), f"{page}: {path} has no {test}"
        checked += 1
    assert checked >= 5
