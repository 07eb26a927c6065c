"""The documentation site: `make site` collects the repository's pages as they lie, and Sphinx makes HTML of them.

Every warning is an error: a link to a page, a heading or a file that is not there fails the build. Files that pages
link to are copied beside them; a link to a folder leads to its README, or becomes plain text.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES, SITE = ROOT / "build" / "pages", ROOT / "build" / "site"
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]*)(#[^)\s]*)?\)")
IMAGE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)")
HOME_ONLY = "\n\n" + "\n".join(
    f"```{{toctree}}\n:caption: {caption}\n:hidden:\n\n" + "\n".join(pages) + "\n```\n"
    for caption, pages in {
        "Use": [
            *("docs/install", "docs/migration", "docs/api", "docs/fusions", "docs/pytorch", "docs/models"),
            "docs/limits",
            "docs/troubleshooting",
        ],
        "Trust": [
            "benchmarks/README",
            "benchmarks/records",
            "benchmarks/tuning",
            "docs/reliability",
            "SECURITY",
            "CHANGELOG",
        ],
        "Build": ["docs/how_it_works", "docs/extending", "docs/checklist", "examples/README", "CONTRIBUTING"],
    }.items()
)


def page_name(path: Path) -> Path:
    """README.md is the site's first page."""
    return Path("index.md") if path == Path("README.md") else path


def collect(path: Path) -> None:
    """Copies a page, with its links as the site has them, and the files that it leads to."""
    text = (ROOT / path).read_text()

    def link(match):
        words, target, anchor = match.group(1), match.group(2), match.group(3) or ""
        if "://" in target or not target:
            return match.group(0)
        found = (ROOT / path.parent / target).resolve()
        if found.is_dir() and (found / "README.md").is_file():
            target, found = target.rstrip("/") + "/README.md", found / "README.md"
        elif found.is_dir():
            return words
        if not found.is_file():
            raise SystemExit(f"{path}: no such file: {target}")
        of_root = found.relative_to(ROOT)
        if found.suffix != ".md":
            copy(of_root)
        elif of_root == Path("README.md"):
            target = target.replace("README.md", "index.md")
        return f"[{words}]({target}{anchor})"

    text = LINK.sub(link, text)
    for image in IMAGE.findall(text):
        copy((ROOT / path.parent / image).resolve().relative_to(ROOT))
    target = PAGES / page_name(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text + (HOME_ONLY if path == Path("README.md") else ""))


def copy(path: Path) -> None:
    target = PAGES / path
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(ROOT / path, target)


def main() -> int:
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.rmtree(SITE, ignore_errors=True)
    pages = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        *ROOT.glob("benchmarks/*.md"),
        *ROOT.glob("examples/*.md"),
    ]
    for page in pages:
        collect(page.relative_to(ROOT))
    copy(Path("docs/site/conf.py"))
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", "docs/site", PAGES, SITE]
    status = subprocess.run(command, cwd=ROOT).returncode
    if status == 0:
        print(f"the site: {(SITE / 'index.html').relative_to(ROOT)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
