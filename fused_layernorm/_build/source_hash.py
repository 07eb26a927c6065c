"""The hash of csrc/, which identifies the kernel sources of a build, a test run or a recorded benchmark.

Imports neither torch nor the package: setup.py loads it by path; `python fused_layernorm/_build/source_hash.py` prints it.
"""

import hashlib
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent
# An installed package contains the sources (setup.py copies them); in the source folder they are next to it.
CSRC = _PACKAGE / "csrc" if (_PACKAGE / "csrc").exists() else _PACKAGE.parent / "csrc"


def source_hash(csrc: Path = CSRC) -> str | None:
    """First 12 hex digits of a SHA-256 over the sorted paths and contents of the files in csrc; None without csrc."""
    csrc = Path(csrc)
    files = sorted(path for path in csrc.rglob("*") if path.is_file() and not path.name.startswith("."))
    if not files:
        return None
    digest = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(csrc).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:12]


if __name__ == "__main__":
    print(source_hash() or f"no sources in {CSRC}")
