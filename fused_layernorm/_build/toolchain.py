"""Compilers, CUDA toolkits and GPU architectures of a machine, and the recipe that compiles the extension: for
setup.py, build() and the diagnosis.

Imports neither torch, which is passed as an argument, nor the package: setup.py loads this file by path. A compute
capability is a pair such as (9, 0).
"""

import os
import pprint
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

# Compiled if no card is visible and TORCH_CUDA_ARCH_LIST is not set; the newest that nvcc supports also as PTX.
DEFAULT_ARCHS = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))


def flag(name: str) -> bool | None:
    """An on/off environment variable; None when it is not set."""
    value = os.environ.get(name, "").strip().lower()
    return None if not value else value not in ("0", "off", "false", "no")


def output_of(*command: str) -> str:
    """The output of a command, or "" if it cannot run or fails."""
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
        # nvcc on PATH may be a wrapper script outside the toolkit: its dry run prints the toolkit's folder.
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


def nvcc_options(home: Path) -> list[str]:
    """Options that not every nvcc has. Compressed device code takes a quarter of the bytes. --split-compile optimizes
    the kernels of a file in several threads: norm_any.cu, the longest file, takes 65 s for 92 on two cores. Eight, not
    0 for all cores: on one core that gives other machine code, while any number from two on gives the same."""
    known = output_of(str(home / "bin" / "nvcc"), "--help")
    return [option for option in ("--compress-mode=size", "--split-compile=8") if option.split("=")[0] + " " in known]


# ---- architectures ---------------------------------------------------------------------------------------------------


def choose_archs(cards: list[tuple[int, int]], supported: list[tuple[int, int]]) -> str:
    """A TORCH_CUDA_ARCH_LIST for these cards (none: DEFAULT_ARCHS), of what nvcc supports.

    A card that nvcc does not support gets the nearest older code that it can run: machine code of its major version,
    else PTX. Without cards, the newest architecture is also compiled as PTX, for future cards.
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


# ---- the recipe ------------------------------------------------------------------------------------------------------


class CannotBuild(Exception):
    """Why an extension, or its CUDA half, cannot be built here."""


def choose_toolkit(torch_cuda: str) -> tuple[Path, str]:
    """(CUDA home, nvcc version) of a toolkit of the same major version as torch's CUDA."""
    toolkits = find_toolkits()
    major = torch_cuda.split(".")[0]
    for home, version in toolkits:
        if version.split(".")[0] == major:
            return home, version
    if not toolkits:
        raise CannotBuild(
            f"no CUDA compiler (nvcc with the toolkit's headers) was found for torch's CUDA {torch_cuda}; install the "
            f"CUDA toolkit {major}.x and set CUDA_HOME to it"
        )
    home, version = toolkits[0]
    raise CannotBuild(
        f"nvcc is of CUDA {version} ({home}) but torch was built for CUDA {torch_cuda}; their major versions must be "
        f"equal: set CUDA_HOME to a CUDA {major}.x toolkit, or install a torch built for CUDA {version.split('.')[0]}"
    )


def visible_cards(torch) -> list[tuple[int, int]]:
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]


def set_arch_list(torch, home: Path) -> str:
    """Set TORCH_CUDA_ARCH_LIST, which torch's build reads; raise for architectures that nvcc does not support."""
    supported = nvcc_archs(home)
    given = os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip()
    if not given or given == "native":
        try:
            given = choose_archs(visible_cards(torch), supported)
        except ValueError as error:
            raise CannotBuild(str(error)) from None
    unsupported = [arch for arch, _, _ in parse_archs(given) if supported and arch not in supported]
    if unsupported:
        raise SystemExit(
            f"TORCH_CUDA_ARCH_LIST={given}: nvcc of {home} does not compile for "
            f"{', '.join(f'{major}.{minor}' for major, minor in unsupported)}; it knows "
            f"{', '.join(f'{major}.{minor}' for major, minor in supported)}"
        )
    os.environ["TORCH_CUDA_ARCH_LIST"] = given
    return given


def cuda_settings(torch) -> dict:
    """CUDA home, nvcc version and architectures to build with; raises CannotBuild."""
    if flag("USE_CUDA") is False:
        raise CannotBuild("USE_CUDA=0 was set when it was built")
    if torch.version.cuda is None:
        kind = "for ROCm" if torch.version.hip else "without CUDA"
        raise CannotBuild(f"torch {torch.__version__} is a build {kind}")
    home, version = choose_toolkit(torch.version.cuda)
    return {"home": home, "nvcc": version, "arch_list": set_arch_list(torch, home)}


def compiler_flags(cuda_home: Path | None = None) -> dict[str, list[str]]:
    """Flags of cxx and nvcc. cuda_home is the toolkit whose nvcc is used."""
    # No -march in any spelling: a wheel must run on other machines, and torch drops every -gencode if an nvcc flag
    # contains "arch". No -std: torch adds the one that its headers need. No fast math.
    debug = flag("DEBUG")
    return {
        "cxx": ["-O0", "-g"] if debug else ["-O3", "-g0"],  # without -g0: the -g of Python's own build
        "nvcc": [
            *(["-O0", "-g", "-G"] if debug else ["-O3"]),
            *(["-lineinfo"] if flag("FUSED_LAYERNORM_LINEINFO") and not debug else []),
            *(nvcc_options(cuda_home) if cuda_home and not debug else []),
            *(["-Xptxas", "-v"] if flag("FUSED_LAYERNORM_PTXAS") else []),
        ],
    }


def openmp_flags(cxx: str) -> tuple[list[str], list[str]]:
    """(compile, link) flags; without them at::parallel_for runs on one thread."""
    if not sys.platform.startswith("linux"):
        return [], []
    if "clang" in output_of(*cxx.split(), "--version"):
        return ["-fopenmp"], ["-fopenmp"]
    # Not linked: the symbols come from torch's libgomp, so that both share one pool of threads.
    return ["-fopenmp"], []


def shipped_kernels(torch, csrc: Path) -> dict | None:
    """The CUDA kernels of an installed wheel (_build/stable.py), if they are for torch's CUDA: their build record, and
    the flags that compile and link the extension against them, without nvcc."""
    names = runpy.run_path(str(Path(__file__).with_name("stable.py")))
    lib, record = csrc.parent / "lib", csrc.parent / "_build_info.py"
    if flag("USE_CUDA") is False or not (lib / names["KERNELS"]).exists() or not record.exists():
        return None
    info = runpy.run_path(str(record))["BUILDS"].get(names["OPERATORS"])
    if not info or not torch.version.cuda or info["torch_cuda"].split(".")[0] != torch.version.cuda.split(".")[0]:
        return None
    headers = [home / "include" for home in toolkit_candidates() if (home / "include" / "cuda_runtime_api.h").exists()]
    if not headers:
        return None
    link = [f"-L{lib}", f"-l:{names['KERNELS']}", f"-Wl,-rpath,{lib}", "-lc10_cuda"]
    return {"nvcc": info["nvcc"], "arch_list": info["arch_list"], "cxx": [f"-isystem{headers[0]}"], "link": link}


def recipe(torch, csrc: Path) -> dict:
    """The recipe for this torch on this machine; raises CannotBuild. Sets the environment that torch's build reads.

    name; sources; flags of cxx and nvcc; link; cuda (home, nvcc and arch_list, or None if nvcc compiles nothing);
    no_cuda (why there are no CUDA kernels, or None); record: the build record without the hash of the sources.
    """
    problem = cxx_problem()
    if problem:
        raise CannotBuild(f"{problem}; install a C++17 compiler (such as g++) and Python's development files")
    cxx = find_cxx()
    os.environ.setdefault("CXX", cxx)
    if not shutil.which((os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]):
        os.environ["CC"] = cxx
    cuda = no_cuda = None
    shipped = shipped_kernels(torch, csrc)
    try:
        cuda = None if shipped else cuda_settings(torch)
    except CannotBuild as error:
        no_cuda = str(error)

    name = "fused_layernorm_cpu" if no_cuda else "fused_layernorm_cuda"
    sources = sorted(path for path in csrc.rglob("*.cpp") if path.parent.name != "stable")
    flags = compiler_flags(cuda["home"] if cuda else None)
    openmp_compile, link = openmp_flags(cxx)
    flags["cxx"] += openmp_compile
    if cuda:
        os.environ["CUDA_HOME"] = str(cuda["home"])
        sources += sorted(csrc.rglob("*.cu"))
    else:
        del flags["nvcc"]
    if not no_cuda:
        for language in flags:
            flags[language] = ["-DFUSED_LAYERNORM_WITH_CUDA=1", *flags[language]]
    if shipped:
        flags["cxx"] += shipped["cxx"]
        link = [*link, *shipped["link"]]
    record = {
        "extension": name,
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "python": sysconfig.get_python_version(),
        "cxx": (output_of(*cxx.split(), "--version").splitlines() or [cxx])[0],
        "nvcc": (cuda or shipped or {}).get("nvcc"),
        "arch_list": (cuda or shipped or {}).get("arch_list"),
        "no_cuda": no_cuda,
        "flags": flags,
        "debug": bool(flag("DEBUG")),
    }
    return {"name": name, "sources": sources, "flags": flags, "link": link, "cuda": cuda, "no_cuda": no_cuda,
            "record": record}  # fmt: skip


def write_build_info(folder: Path, builds: dict, not_built: str | None) -> None:
    """Write fused_layernorm/_build_info.py under `folder`; _backend.py checks it before it loads an extension."""
    path = folder / "fused_layernorm" / "_build_info.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "# Written by the build; not under version control.\n"
        f"BUILDS = {pprint.pformat(builds, width=110)}\n\nNOT_BUILT = {not_built!r}\n"
    )


if __name__ == "__main__":  # `python toolchain.py 13`: whether there is a CUDA 13 toolkit, for CI
    sys.exit(0 if any(version.split(".")[0] == sys.argv[1] for _, version in find_toolkits()) else 1)
