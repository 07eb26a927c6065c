"""Copies examples/template/ under the name of a new operator.

make new-op NAME=fast_gelu [DEST=folder]        or: python examples/new_op.py fast_gelu [folder]
"""

import argparse
import importlib.util
import keyword
import re
import sys
from pathlib import Path

TEMPLATE = Path(__file__).resolve().parent / "template"
IMPORTED = {"fused_layernorm", "numpy", "pytest", "torch"}  # by the new operator: `make` may run a Python without them


def renamed(text: str, name: str) -> str:
    camel = "".join(part.capitalize() for part in name.split("_"))
    return text.replace("my_op", name).replace("MY_OP", name.upper()).replace("MyOp", camel)


def new_op(name: str, destination: Path) -> Path:
    """Make the folder `destination`/`name`; a name that cannot be a package's raises ValueError."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name):
        raise ValueError(f"the name must be like fast_gelu: small letters, digits, single underscores; got {name!r}")
    target = destination / name
    if target.exists():
        raise ValueError(f"{target} exists already")
    if name in IMPORTED or importlib.util.find_spec(name) is not None:
        raise ValueError(f"there is a Python module named {name} already, which would be hidden")
    for path in sorted(TEMPLATE.rglob("*")):
        if path.is_file() and not {"__pycache__", "build"} & set(path.parts) and path.suffix not in (".so", ".pyc"):
            copy = target / renamed(str(path.relative_to(TEMPLATE)), name)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(renamed(path.read_text(), name))
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help="such as fast_gelu")
    parser.add_argument("destination", nargs="?", type=Path, default=TEMPLATE.parent, help="default: examples/")
    arguments = parser.parse_args()
    try:
        target = new_op(arguments.name, arguments.destination)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{target}: write the formula into csrc/{arguments.name}.h and {arguments.name}/__init__.py, then there:")
    print(f"    python -m pytest test_{arguments.name}.py      (compiles it first)")
    print(f"    python benchmark_{arguments.name}.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
