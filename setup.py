"""Builds fused_layernorm_cuda (CUDA and CPU kernels), fused_layernorm_cpu if CUDA is missing, or no extension.

Environment variables:
  USE_CUDA=0                do not build the CUDA kernels
  FORCE_CUDA=1              fail if the CUDA kernels cannot be built
  DEBUG=1                   -O0 -g, device code with -G
  TORCH_CUDA_ARCH_LIST      such as "9.0" or "8.0;9.0+PTX"; default: the visible cards, or toolchain.DEFAULT_ARCHS
  CUDA_HOME                 the CUDA toolkit; default: found from nvcc on PATH, /usr/local/cuda, the nvidia packages
  MAX_JOBS                  number of parallel compilers (with ninja; default: one per core)
  FUSED_LAYERNORM_PTXAS=1   print the registers and spills of every kernel
  FUSED_LAYERNORM_LINEINFO=1  -lineinfo: profilers and sanitizers name source lines, the extension triples in size
  FUSED_LAYERNORM_WHEEL=1   a wheel for distribution (make wheel), for every torch from 2.11 on and every Python, with
                            libraries (fused_layernorm/_build/stable.py) instead of the extension

The extension is built for the torch of the environment that will use it. pyproject.toml requires no torch for the
build, because an isolated build would download another torch and compile for that.
"""

import os
import re
import runpy
import shutil
import site
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import setuptools
from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
source_hash = runpy.run_path(str(ROOT / "fused_layernorm" / "_build" / "source_hash.py"))["source_hash"]
toolchain = SimpleNamespace(**runpy.run_path(str(ROOT / "fused_layernorm" / "_build" / "toolchain.py")))
stable = SimpleNamespace(**runpy.run_path(str(ROOT / "fused_layernorm" / "_build" / "stable.py")))

CannotBuild = toolchain.CannotBuild
OLDEST_TORCH = (2, 11)
OLDEST_SETUPTOOLS = (70, 1)
COMMON = {"license": "BSD-3-Clause", "install_requires": ["torch>=" + ".".join(map(str, OLDEST_TORCH))]}
BUILDING_COMMANDS = {"build", "build_py", "build_ext", "bdist_wheel", "editable_wheel", "install", "develop"}


def shout(*lines: str) -> None:
    bar = "*" * 100
    print("\n".join([bar, *(f"** {line}" for line in lines), bar]), file=sys.stderr, flush=True)


# ---- the torch to build for ------------------------------------------------------------------------------------------


def target_site_packages() -> list[str]:
    """The package folders of this interpreter's environment. An isolated build by pip runs the interpreter of the
    target environment without these folders on sys.path."""
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    config = Path(sys.prefix) / "pyvenv.cfg"
    in_venv = config.exists()
    if not in_venv or "include-system-site-packages = true" in config.read_text().lower():
        folders += [site.getusersitepackages(), *site.getsitepackages([sys.base_prefix])]
    return [folder for folder in dict.fromkeys(folders) if folder not in sys.path]


def check_version(package: str, version: str, oldest: tuple[int, int]) -> None:
    """Stop below the oldest supported version: otherwise pip would compile first and then replace the package."""
    if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < oldest:
        wanted = ".".join(map(str, oldest))
        raise SystemExit(f"fused_layernorm needs {package} {wanted} or newer, and this is {package} {version}: "
                         f"install a newer one (pip install '{package}>={wanted}'), then build again")  # fmt: skip


def import_torch():
    for folder in [None, *target_site_packages()]:
        if folder is not None:
            if not (Path(folder) / "torch" / "version.py").exists():
                continue
            sys.path.append(folder)
            # ninja may be installed there too, with its command next to that environment's Python.
            os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), sysconfig.get_path("scripts")])
        try:
            import torch

            check_version("torch", torch.__version__, OLDEST_TORCH)
            return torch
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
    raise CannotBuild("no torch was found when it was built; with torch installed, build it again")


# ---- the extension ---------------------------------------------------------------------------------------------------


def without_folders(torch) -> list[str]:
    """Flags that keep this machine's folders out of the extension, so that a build in another folder gives the same
    file. Error messages contain the names of source files."""
    torch_home = Path(torch.__file__).resolve().parent.parent
    return [f"-ffile-prefix-map={folder}/=" for folder in (ROOT, torch_home)]


def recipe_of(torch) -> dict:
    """toolchain.recipe() for these sources; reports missing CUDA kernels, or stops. Raises CannotBuild."""
    recipe = toolchain.recipe(torch, ROOT / "csrc")
    if recipe["no_cuda"]:
        if toolchain.flag("FORCE_CUDA"):
            raise SystemExit(f"FORCE_CUDA=1, but the CUDA kernels cannot be built: {recipe['no_cuda']}")
        shout("fused_layernorm: building the CPU kernels only.", recipe["no_cuda"])
    return recipe


def make_extension(torch) -> tuple[object, dict]:
    """(extension, its build record); raises CannotBuild."""
    recipe = recipe_of(torch)
    from torch.utils import cpp_extension

    # The build record omits the folders for the same reason.
    flags = recipe["flags"] | {"cxx": recipe["flags"]["cxx"] + without_folders(torch)}
    settings = {
        "sources": [path.relative_to(ROOT).as_posix() for path in recipe["sources"]],
        "include_dirs": [str(ROOT / "csrc")],
        "depends": sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("csrc/**/*") if path.is_file()),
        "extra_link_args": recipe["link"],
        "language": "c++",
    }
    if recipe["cuda"]:
        cpp_extension.CUDA_HOME = os.environ["CUDA_HOME"]
        extension = cpp_extension.CUDAExtension(recipe["name"], extra_compile_args=flags, **settings)
        link_runtime_by_version(extension, torch.version.cuda)
    else:
        extension = cpp_extension.CppExtension(recipe["name"], extra_compile_args=flags["cxx"], **settings)
    return extension, recipe["record"] | {"csrc_hash": source_hash(ROOT / "csrc")}


def link_runtime_by_version(extension, torch_cuda: str) -> None:
    """The CUDA runtime of the Python packages has no libcudart.so, only a versioned name: link that."""
    folders = [Path(folder) for folder in extension.library_dirs]
    versioned = f"libcudart.so.{torch_cuda.split('.')[0]}"
    if not any((folder / "libcudart.so").exists() for folder in folders) and "cudart" in extension.libraries:
        if any((folder / versioned).exists() for folder in folders):
            extension.libraries.remove("cudart")
            extension.extra_link_args.append(f"-l:{versioned}")


# ---- the build record, and the commands that write it ----------------------------------------------------------------


def earlier_builds(folder: Path) -> dict:
    """The recorded builds in a source folder whose extensions still exist (for another Python or torch)."""
    path = folder / "fused_layernorm" / "_build_info.py"
    try:
        builds = runpy.run_path(str(path))["BUILDS"]
    except (OSError, SyntaxError, KeyError):
        return {}
    return {name: record for name, record in builds.items() if (folder / name).exists()}


def make_build_py(not_built: str | None):
    class BuildPy(build_py):
        """Copies csrc/ into the package. Omits the record of an earlier build in this folder, and writes one if no
        extension is built."""

        def find_package_modules(self, package, package_dir):
            modules = super().find_package_modules(package, package_dir)
            return [module for module in modules if module[1] != "_build_info"]

        def run(self):
            super().run()
            if not getattr(self, "editable_mode", False):
                shutil.copytree(ROOT / "csrc", Path(self.build_lib) / "fused_layernorm" / "csrc", dirs_exist_ok=True)
            if not_built:
                if getattr(self, "editable_mode", False):
                    toolchain.write_build_info(ROOT, earlier_builds(ROOT), not_built)
                else:
                    toolchain.write_build_info(Path(self.build_lib), {}, not_built)

    return BuildPy


def make_build_ext(record: dict, temporary: Path):
    from torch.utils.cpp_extension import BuildExtension

    class BuildExt(BuildExtension):
        def finalize_options(self):
            super().finalize_options()
            # setuptools would keep a library that is newer than the sources, even for another torch or other flags.
            # ninja detects both if each torch has its own folder of objects.
            self.force = True
            self.build_temp = str(temporary)

        def run(self):
            Path(self.build_temp).mkdir(parents=True, exist_ok=True)
            super().run()
            file_name = Path(self.get_ext_filename(record["extension"])).name
            in_place = self.inplace or getattr(self, "editable_mode", False)
            folder = ROOT if in_place else Path(self.build_lib)
            others = earlier_builds(folder) if in_place else {}
            toolchain.write_build_info(folder, {**others, file_name: record}, None)

    return BuildExt


def make_wheel_commands(torch) -> dict:
    """Commands for FUSED_LAYERNORM_WHEEL=1: the libraries of _build/stable.py instead of an extension."""
    from setuptools.command.bdist_wheel import bdist_wheel
    from setuptools.command.build_ext import build_ext

    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", stable.ARCHS)
    recipe = recipe_of(torch)
    flags = recipe["flags"] | {"cxx": recipe["flags"]["cxx"] + without_folders(torch)}
    cuda = recipe["cuda"] and {"home": Path(recipe["cuda"]["home"]),
                               "archs": toolchain.parse_archs(recipe["cuda"]["arch_list"])}  # fmt: skip
    wanted = {"cxx": os.environ["CXX"], "flags": flags, "cuda": cuda}
    record = recipe["record"] | {"extension": stable.OPERATORS, "torch": "2.11", "python": "any", "flags": flags,
                                 "csrc_hash": source_hash(ROOT / "csrc")}  # fmt: skip

    class BuildLibraries(build_ext):
        def run(self):
            stable.compile_libraries(
                Path(torch.__file__).parent, ROOT / "csrc", Path(self.build_lib) / "fused_layernorm" / "lib",
                Path(self.build_temp), wanted, int(os.environ.get("MAX_JOBS", os.cpu_count() or 1)),
            )  # fmt: skip
            toolchain.write_build_info(Path(self.build_lib), {stable.OPERATORS: record}, None)

    class OneWheel(bdist_wheel):
        def get_tag(self):
            machine = super().get_tag()[2].removeprefix("linux_")
            return "py3", "none", stable.platform_tag(Path(self.bdist_dir) / "fused_layernorm" / "lib", machine)

    return {"build_ext": BuildLibraries, "bdist_wheel": OneWheel}


def main() -> None:
    # setuptools has bdist_wheel from this version on, and needs it also for metadata; before, package wheel had it.
    if {"bdist_wheel", "editable_wheel", "dist_info"} & set(sys.argv[1:]) and find_spec("wheel") is None:
        check_version("setuptools", setuptools.__version__, OLDEST_SETUPTOOLS)
    if not BUILDING_COMMANDS & set(sys.argv[1:]):  # metadata or an sdist need neither torch nor compilers
        setup(**COMMON, cmdclass={"build_py": make_build_py(None)})
        return
    try:
        torch = import_torch()
        if toolchain.flag("FUSED_LAYERNORM_WHEEL"):
            setup(
                **COMMON,
                ext_modules=[setuptools.Extension("fused_layernorm.lib", [])],
                cmdclass={"build_py": make_build_py(None), **make_wheel_commands(torch)},
                options={"build": {"build_base": "build/wheel"}},
            )
            return
        extension, record = make_extension(torch)
    except CannotBuild as error:
        for name in ("FORCE_CUDA", "FUSED_LAYERNORM_WHEEL"):
            if toolchain.flag(name):
                raise SystemExit(f"{name}=1, but no extension can be built: {error}") from None
        shout("fused_layernorm: installing WITHOUT compiled kernels; the slower PyTorch reference is used.", str(error))
        setup(
            **COMMON,
            cmdclass={"build_py": make_build_py(str(error))},
            options={"build": {"build_base": "build/none"}},
        )
        return
    build_base = Path("build") / f"{record['extension']}-torch{record['torch']}{'-debug' if record['debug'] else ''}"
    setup(
        **COMMON,
        ext_modules=[extension],
        cmdclass={
            "build_py": make_build_py(None),
            "build_ext": make_build_ext(record, build_base / "objects"),
        },
        options={"build": {"build_base": str(build_base)}},
    )


if __name__ == "__main__":
    main()
