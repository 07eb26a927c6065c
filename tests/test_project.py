"""What surrounds the package: workflows, the newcomer's script, the citation."""

import re
import runpy
from pathlib import Path

import pytest

import fused_layernorm

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_targets_of_the_makefile(path):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = re.findall(r"run: (.*)", path.read_text())
    assert commands and all(re.fullmatch(r"make [a-z-]+( TORCH=\S+( \S+)* ?}?}?\S*)?", line) for line in commands)
    assert {line.split()[1] for line in commands} <= targets


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
