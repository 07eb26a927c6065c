"""What a machine can build and run: compilers, CUDA toolkits, GPU architectures. Used by setup.py and the diagnosis.

Needs neither torch nor the package: setup.py loads this file by path. A compute capability is a pair such as (9, 0).
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

# Compiled when no card is visible and TORCH_CUDA_ARCH_LIST is not set; the newest that nvcc knows also as PTX.
DEFAULT_ARCHS = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))


def flag(name: str) -> bool | None:
    """An on/off environment variable; None when it is not set."""
    value = os.environ.get(name, "").strip().lower()
    return None if not value else value not in ("0", "off", "false", "no")


def output_of(*command: str) -> str:
    """What a command prints, or "" when it cannot run or fails."""
    try:
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout if result.returncode == 0 else ""


# ---- the C++ compiler ------------------------------------------------------------------------------------------------


def find_cxx() -> str | None:
    """The C++ compiler command: CXX, or the first usual name that is on PATH."""
    for command in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        words = shlex.split(command)
        if words and shutil.which(words[-1] if words[0].endswith("ccache") else words[0]):
            return command
    return None


def cxx_problem() -> str | None:
    """Why no C++ extension can be built here, or None."""
    if sys.platform == "win32":
        return "building the C++ extension is not supported on Windows"
    if find_cxx() is None:
        return "no C++ compiler was found (looked for $CXX, c++, g++, clang++)"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return f"the C headers of Python {sys.version_info[0]}.{sys.version_info[1]} (Python.h) were not found"
    return None


# ---- the CUDA toolkit ------------------------------------------------------------------------------------------------


def nvcc_version(home: Path) -> str | None:
    """The release of a toolkit's nvcc, such as "13.0"."""
    found = re.search(r"release (\d+\.\d+)", output_of(str(home / "bin" / "nvcc"), "--version"))
    return found.group(1) if found else None


def nvcc_archs(home: Path) -> list[tuple[int, int]]:
    """The capabilities that a toolkit's nvcc compiles for, ascending."""
    found = re.findall(r"compute_(\d+)(\d)\b", output_of(str(home / "bin" / "nvcc"), "--list-gpu-arch"))
    return sorted({(int(major), int(minor)) for major, minor in found})


def toolkit_candidates() -> list[Path]:
    """Folders that may hold a CUDA toolkit, most explicit first."""
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    on_path = shutil.which("nvcc")
    if on_path:
        homes.append(Path(on_path).resolve().parent.parent)
        # nvcc on PATH may be a wrapper script outside the toolkit: ask it where it lives.
        here = re.search(r"_HERE_=(\S+)", output_of(on_path, "--dryrun", "none.cu"))
        if here:
            homes.append(Path(here.group(1)).parent)
    homes.append(Path("/usr/local/cuda"))
    for packages in dict.fromkeys(sys.path):  # the toolkit as Python packages: nvidia-cuda-nvcc and its companions
        homes.extend(sorted(Path(packages).glob("nvidia/cu[0-9]*"), reverse=True) if packages else [])
    return list(dict.fromkeys(homes))


def find_toolkits() -> list[tuple[Path, str]]:
    """(home, nvcc version) of every complete toolkit found, most explicit first."""
    toolkits = {}
    for home in toolkit_candidates():
        if (home / "bin" / "nvcc").exists() and (home / "include" / "cuda_runtime.h").exists():
            version = nvcc_version(home)
            if version:
                toolkits.setdefault(home.resolve(), (home, version))
    return list(toolkits.values())


# ---- architectures ---------------------------------------------------------------------------------------------------


def choose_archs(cards: list[tuple[int, int]], supported: list[tuple[int, int]]) -> str:
    """A TORCH_CUDA_ARCH_LIST for these cards (none: DEFAULT_ARCHS), of what nvcc supports.

    A card that nvcc does not know gets the nearest older code that it runs: of its own major version as it is, else as
    PTX. Without cards, the newest architecture is also compiled as PTX, for cards to come.
    """
    if not supported:
        raise ValueError("nvcc names no architecture that it supports")
    if not cards:
        known = [arch for arch in DEFAULT_ARCHS if arch in supported] or [supported[-1]]
        return ";".join(f"{major}.{minor}" for major, minor in known) + "+PTX"
    chosen = {}
    for card in sorted(set(cards)):
        older = [arch for arch in supported if arch <= card]
        if not older:
            raise ValueError(
                f"nvcc no longer supports compute capability {card[0]}.{card[1]}: it begins at "
                f"{supported[0][0]}.{supported[0][1]}. Build with an older CUDA toolkit and torch"
            )
        chosen[older[-1]] = chosen.get(older[-1], False) or older[-1][0] != card[0]
    return ";".join(f"{major}.{minor}" + ("+PTX" if ptx else "") for (major, minor), ptx in sorted(chosen.items()))


def parse_archs(arch_list: str) -> list[tuple[tuple[int, int], str, bool]]:
    """(capability, suffix "" | "a" | "f", also PTX) of each number in a TORCH_CUDA_ARCH_LIST; names are left out."""
    found = []
    for word in re.split(r"[;\s]+", arch_list):
        match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", word)
        if match:
            found.append(((int(match[1]), int(match[2])), match[3], bool(match[4])))
    return found


def covers(arch_list: str, card: tuple[int, int]) -> bool:
    """Whether code compiled for `arch_list` runs on a card."""
    for arch, suffix, ptx in parse_archs(arch_list):
        if arch == card:
            return True
        if suffix != "a" and arch < card and (arch[0] == card[0] or (ptx and not suffix)):
            return True
    return False


if __name__ == "__main__":  # `python _toolchain.py 13`: is there a CUDA 13 toolkit? CI asks, before it installs one
    sys.exit(0 if any(version.split(".")[0] == sys.argv[1] for _, version in find_toolkits()) else 1)
