"""Builds fused_layernorm_cuda (CUDA and CPU kernels), or fused_layernorm_cpu where CUDA cannot be had, or no extension.

Environment variables:
  USE_CUDA=0                leave the CUDA kernels out
  FORCE_CUDA=1              fail, rather than build without the CUDA kernels
  DEBUG=1                   -O0 -g, device code with -G
  TORCH_CUDA_ARCH_LIST      such as "9.0" or "8.0;9.0+PTX"; default: the visible cards, or DEFAULT_ARCHS (_toolchain.py)
  CUDA_HOME                 the CUDA toolkit; default: found from nvcc on PATH, /usr/local/cuda, the nvidia packages
  MAX_JOBS                  compilers that run at once (with ninja; default: one a core)
  FUSED_LAYERNORM_PTXAS=1   print the registers and spills of every kernel

The torch that the extension is built for is the one in the environment that will use it: pyproject.toml names no torch
as a build requirement, or an isolated build would fetch another one and compile for that.
"""

import os
import pprint
import runpy
import shutil
import site
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
source_hash = runpy.run_path(str(ROOT / "fused_layernorm" / "_source_hash.py"))["source_hash"]
toolchain = SimpleNamespace(**runpy.run_path(str(ROOT / "fused_layernorm" / "_toolchain.py")))

DEBUG = bool(toolchain.flag("DEBUG"))
PTXAS = bool(toolchain.flag("FUSED_LAYERNORM_PTXAS"))
LICENSE = "BSD-3-Clause"
BUILDING_COMMANDS = {"build", "build_py", "build_ext", "bdist_wheel", "editable_wheel", "install", "develop"}


class CannotBuild(Exception):
    """Why an extension, or its CUDA half, cannot be built here."""


def shout(*lines: str) -> None:
    bar = "*" * 100
    print("\n".join([bar, *(f"** {line}" for line in lines), bar]), file=sys.stderr, flush=True)


# ---- the torch to build for ------------------------------------------------------------------------------------------


def target_site_packages() -> list[str]:
    """Where the packages of this interpreter's environment lie. An isolated build by pip runs the interpreter of the
    target environment with those folders taken off sys.path; this finds them again."""
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    config = Path(sys.prefix) / "pyvenv.cfg"
    in_venv = config.exists()
    if not in_venv or "include-system-site-packages = true" in config.read_text().lower():
        folders += [site.getusersitepackages(), *site.getsitepackages([sys.base_prefix])]
    return [folder for folder in dict.fromkeys(folders) if folder not in sys.path]


def import_torch():
    for folder in [None, *target_site_packages()]:
        if folder is not None:
            if not (Path(folder) / "torch" / "version.py").exists():
                continue
            sys.path.append(folder)
            # ninja may be installed there as well, with its command beside that environment's Python.
            os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), sysconfig.get_path("scripts")])
        try:
            import torch

            return torch
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
    raise CannotBuild("no torch was found when it was built; with torch installed, build it again")


# ---- what to build ---------------------------------------------------------------------------------------------------


def choose_toolkit(torch_cuda: str) -> tuple[Path, str]:
    """(CUDA home, nvcc version) of a toolkit of the same major version as torch's CUDA."""
    toolkits = toolchain.find_toolkits()
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
    """Fill in TORCH_CUDA_ARCH_LIST, which torch's build reads; complain of what nvcc does not support."""
    supported = toolchain.nvcc_archs(home)
    given = os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip()
    if not given or given == "native":
        try:
            given = toolchain.choose_archs(visible_cards(torch), supported)
        except ValueError as error:
            raise CannotBuild(str(error)) from None
    unsupported = [arch for arch, _, _ in toolchain.parse_archs(given) if supported and arch not in supported]
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
    if toolchain.flag("USE_CUDA") is False:
        raise CannotBuild("USE_CUDA=0 was set when it was built")
    if torch.version.cuda is None:
        kind = "for ROCm" if torch.version.hip else "without CUDA"
        raise CannotBuild(f"torch {torch.__version__} is a build {kind}")
    home, version = choose_toolkit(torch.version.cuda)
    return {"home": home, "nvcc": version, "arch_list": set_arch_list(torch, home)}


def compiler_flags() -> dict[str, list[str]]:
    # No -march, in any spelling: a wheel must run on other machines, and an nvcc flag with "arch" in it makes torch
    # drop every -gencode. No -std: torch adds the one that its headers need. No fast math.
    return {
        "cxx": ["-O0", "-g"] if DEBUG else ["-O3", "-g0"],  # else: the -g that Python itself was built with
        "nvcc": [
            *(["-O0", "-g", "-G"] if DEBUG else ["-O3", "-lineinfo"]),
            *(["-Xptxas", "-v"] if PTXAS else []),
        ],
    }


def without_folders(torch) -> list[str]:
    """Flags that keep the folders of this machine out of the extension, so that a build in another folder is the same
    file: error messages hold the names of source files."""
    torch_home = Path(torch.__file__).resolve().parent.parent
    return [f"-ffile-prefix-map={folder}/=" for folder in (ROOT, torch_home)]


def openmp_flags(cxx: str) -> tuple[list[str], list[str]]:
    """(compile, link) flags without which at::parallel_for runs on one thread."""
    if not sys.platform.startswith("linux"):
        return [], []
    if "clang" in toolchain.output_of(*cxx.split(), "--version"):
        return ["-fopenmp"], ["-fopenmp"]
    # Not linked: the symbols are found in the libgomp that torch brings, so that both share one pool of threads.
    return ["-fopenmp"], []


def make_extension(torch) -> tuple[object, dict]:
    """(extension, its build record); raises CannotBuild."""
    problem = toolchain.cxx_problem()
    if problem:
        raise CannotBuild(f"{problem}; install a C++17 compiler (such as g++) and Python's development files")
    cxx = toolchain.find_cxx()
    os.environ.setdefault("CXX", cxx)
    if not shutil.which((os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]):
        os.environ["CC"] = cxx
    from torch.utils import cpp_extension

    try:
        cuda, no_cuda = cuda_settings(torch), None
    except CannotBuild as error:
        cuda, no_cuda = None, str(error)
        if toolchain.flag("FORCE_CUDA"):
            raise SystemExit(f"FORCE_CUDA=1, but the CUDA kernels cannot be built: {no_cuda}") from None
        shout("fused_layernorm: building the CPU kernels only.", no_cuda)

    def relative(pattern: str) -> list[str]:
        return sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern))

    flags = compiler_flags()
    openmp_compile, openmp_link = openmp_flags(cxx)
    flags["cxx"] += openmp_compile
    cxx_flags = flags["cxx"] + without_folders(torch)  # which the record of the build leaves out, for the same reason
    settings = {
        "sources": relative("csrc/*.cpp"),
        "include_dirs": [str(ROOT / "csrc")],
        "depends": relative("csrc/*"),
        "extra_link_args": openmp_link,
        "language": "c++",
    }
    if cuda:
        cpp_extension.CUDA_HOME = os.environ["CUDA_HOME"] = str(cuda["home"])
        settings["sources"] += relative("csrc/*.cu")
        settings["define_macros"] = [("FUSED_LAYERNORM_WITH_CUDA", "1")]
        extension = cpp_extension.CUDAExtension(
            "fused_layernorm_cuda", extra_compile_args={**flags, "cxx": cxx_flags}, **settings
        )
        link_runtime_by_version(extension, torch.version.cuda)
    else:
        extension = cpp_extension.CppExtension("fused_layernorm_cpu", extra_compile_args=cxx_flags, **settings)

    record = {
        "extension": extension.name,
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "python": sysconfig.get_python_version(),
        "cxx": (toolchain.output_of(*cxx.split(), "--version").splitlines() or [cxx])[0],
        "nvcc": cuda and cuda["nvcc"],
        "arch_list": cuda and cuda["arch_list"],
        "no_cuda": no_cuda,
        "flags": flags if cuda else {"cxx": flags["cxx"]},
        "debug": DEBUG,
        "csrc_hash": source_hash(ROOT / "csrc"),
    }
    return extension, record


def link_runtime_by_version(extension, torch_cuda: str) -> None:
    """The CUDA runtime that comes as a Python package has no libcudart.so, only the versioned name: link that."""
    folders = [Path(folder) for folder in extension.library_dirs]
    versioned = f"libcudart.so.{torch_cuda.split('.')[0]}"
    if not any((folder / "libcudart.so").exists() for folder in folders) and "cudart" in extension.libraries:
        if any((folder / versioned).exists() for folder in folders):
            extension.libraries.remove("cudart")
            extension.extra_link_args.append(f"-l:{versioned}")


# ---- the record of the build, and the commands that write it ---------------------------------------------------------


def write_build_info(folder: Path, builds: dict, not_built: str | None) -> None:
    """fused_layernorm/_build_info.py under `folder`: what _ops.py checks before it loads an extension."""
    path = folder / "fused_layernorm" / "_build_info.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "# Written by setup.py; not under version control.\n"
        f"BUILDS = {pprint.pformat(builds, width=110)}\n\nNOT_BUILT = {not_built!r}\n"
    )


def earlier_builds(folder: Path) -> dict:
    """Builds recorded in a source folder for extensions that are still there (for another Python or torch)."""
    path = folder / "fused_layernorm" / "_build_info.py"
    try:
        builds = runpy.run_path(str(path))["BUILDS"]
    except (OSError, SyntaxError, KeyError):
        return {}
    return {name: record for name, record in builds.items() if (folder / name).exists()}


def make_build_py(not_built: str | None):
    class BuildPy(build_py):
        """Never ships the record of an earlier build in this folder; writes one where no extension is built."""

        def find_package_modules(self, package, package_dir):
            modules = super().find_package_modules(package, package_dir)
            return [module for module in modules if module[1] != "_build_info"]

        def run(self):
            super().run()
            if not_built:
                if getattr(self, "editable_mode", False):
                    write_build_info(ROOT, earlier_builds(ROOT), not_built)
                else:
                    write_build_info(Path(self.build_lib), {}, not_built)

    return BuildPy


def make_build_ext(record: dict, temporary: Path):
    from torch.utils.cpp_extension import BuildExtension

    class BuildExt(BuildExtension):
        def finalize_options(self):
            super().finalize_options()
            # setuptools would keep a library that is newer than the sources, also one built for another torch or with
            # other flags. ninja sees both, if objects of one torch are kept apart from those of another.
            self.force = True
            self.build_temp = str(temporary)

        def run(self):
            Path(self.build_temp).mkdir(parents=True, exist_ok=True)
            super().run()
            file_name = Path(self.get_ext_filename(record["extension"])).name
            in_place = self.inplace or getattr(self, "editable_mode", False)
            folder = ROOT if in_place else Path(self.build_lib)
            others = earlier_builds(folder) if in_place else {}
            write_build_info(folder, {**others, file_name: record}, None)

    return BuildExt


def main() -> None:
    if not BUILDING_COMMANDS & set(sys.argv[1:]):  # metadata or an sdist: no need to look at torch and compilers
        setup(license=LICENSE, cmdclass={"build_py": make_build_py(None)})
        return
    try:
        torch = import_torch()
        extension, record = make_extension(torch)
    except CannotBuild as error:
        if toolchain.flag("FORCE_CUDA"):
            raise SystemExit(f"FORCE_CUDA=1, but no extension can be built: {error}") from None
        shout("fused_layernorm: installing WITHOUT compiled kernels; the slower PyTorch reference is used.", str(error))
        setup(
            license=LICENSE,
            cmdclass={"build_py": make_build_py(str(error))},
            options={"build": {"build_base": "build/none"}},
        )
        return
    build_base = Path("build") / f"{record['extension']}-torch{record['torch']}{'-debug' if DEBUG else ''}"
    setup(
        license=LICENSE,
        ext_modules=[extension],
        cmdclass={"build_py": make_build_py(None), "build_ext": make_build_ext(record, build_base / "objects")},
        options={"build": {"build_base": str(build_base)}},
    )


if __name__ == "__main__":
    main()
