"""build() compiles the extension for this torch and the visible card into torch's extension cache, where the next
import finds it. FUSED_LAYERNORM_JIT=1 does the same at import if no extension of these sources works with this
torch."""

import contextlib
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

from . import progress, source_hash, toolchain

NAMES = ("fused_layernorm_cuda", "fused_layernorm_cpu")


def cache_folder() -> Path:
    """The folder for this Python and torch in torch's extension cache."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if not root:
        from torch._appdirs import user_cache_dir  # as torch.utils.cpp_extension does, whose import takes long

        root = user_cache_dir(appname="torch_extensions")
    return Path(root) / f"fused_layernorm_py{sysconfig.get_python_version()}_torch{torch.__version__}"


def library(name: str) -> Path:
    """Where build() leaves the extension of that name."""
    return cache_folder() / name / f"{name}.so"


def build(*, verbose: bool = False) -> str:
    """Compile the kernels for this torch and the visible cards; returns the path of the extension.

    Use it if the package was installed without a compiler, for another torch or for other cards, or if its sources have
    changed. It takes minutes with CUDA, less without, and needs a C++ compiler and ninja, and nvcc for CUDA. The
    environment variables of the build apply. Later processes load the result unless an installed extension works; the
    current process does not change. Files that are up to date are not compiled again.

    Args:
        verbose: print the compiler's commands and output.

    Raises:
        RuntimeError: the kernels cannot be compiled here; the message says why.
    """
    # In another process, because torch loads the extension it has compiled, and this process may have one loaded.
    code = f"from fused_layernorm._build import jit; jit.compile_extension({verbose})"
    package = str(Path(__file__).resolve().parent.parent.parent)
    environment = os.environ | {
        "FUSED_LAYERNORM_JIT": "0",
        "FUSED_LAYERNORM_BACKEND": "reference",
        "PYTHONPATH": os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])]),
        # Where pip installs ninja.
        "PATH": os.pathsep.join([os.environ.get("PATH", ""), sysconfig.get_path("scripts")]),
    }
    folder = cache_folder()
    with _alone(folder), progress.told(folder):
        print(f"fused_layernorm: compiling the kernels into {folder}; this is done once", file=sys.stderr, flush=True)
        result = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=None if verbose else subprocess.PIPE,
            text=True,
        )
    if result.returncode != 0:
        why = (result.stderr or "see above").strip()[-3000:]
        raise RuntimeError(f"fused_layernorm could not be compiled:\n{why}")
    print(f"fused_layernorm: compiled, {result.stdout}", file=sys.stderr, flush=True)
    return result.stdout


def compile_extension(verbose: bool) -> None:
    """The child process of build(); prints only the path of the extension to stdout."""
    stdout = os.dup(1)
    os.dup2(2, 1)  # torch and ninja write there
    try:
        recipe = toolchain.recipe(torch, source_hash.CSRC)
    except toolchain.CannotBuild as error:
        raise SystemExit(str(error)) from None
    if not recipe["sources"]:
        raise SystemExit(f"the sources are not in {source_hash.CSRC}")
    from torch.utils import cpp_extension

    if not cpp_extension.is_ninja_available():
        raise SystemExit("ninja is needed: pip install ninja")
    name, target = recipe["name"], library(recipe["name"])
    target.parent.mkdir(parents=True, exist_ok=True)
    link = list(recipe["link"])
    if recipe["cuda"]:
        cpp_extension.CUDA_HOME = str(recipe["cuda"]["home"])
        link += _link_runtime(recipe["cuda"]["home"], target.parent)
    # torch marks a running build by a file. A killed build leaves the file behind, and torch would wait for ever.
    (target.parent / "lock").unlink(missing_ok=True)
    cpp_extension.load(
        name=name,
        sources=[str(path) for path in recipe["sources"]],
        extra_cflags=recipe["flags"]["cxx"],
        extra_cuda_cflags=recipe["flags"].get("nvcc"),
        extra_ldflags=link,
        extra_include_paths=[str(source_hash.CSRC)],
        build_directory=str(target.parent),
        with_cuda=recipe["cuda"] is not None,
        verbose=verbose,
    )
    record = recipe["record"] | {"csrc_hash": source_hash.source_hash()}
    toolchain.write_build_info(target.parent, {target.name: record}, None)
    os.write(stdout, str(target).encode())


@contextlib.contextmanager
def _alone(folder: Path):
    """One process at a time compiles into this folder; the others say so and wait. A lock ends with its process."""
    try:
        import fcntl
    except ImportError:  # Windows, where nothing is compiled
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / "fused_layernorm.lock", "w")
    except OSError as error:
        raise RuntimeError(
            f"fused_layernorm could not be compiled: the cache cannot be written ({error.strerror}, {error.filename}); "
            "set TORCH_EXTENSIONS_DIR to a folder of yours"
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("fused_layernorm: another process compiles the kernels; waiting for it", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _link_runtime(home: Path, folder: Path) -> list[str]:
    """The CUDA runtime of the Python packages has only a versioned name, and torch links the unversioned one."""
    if any((home / lib / "libcudart.so").exists() for lib in ("lib64", "lib")):
        return []
    for versioned in sorted((home / "lib").glob("libcudart.so.*")):
        alias = folder / "libcudart.so"
        alias.unlink(missing_ok=True)
        alias.symlink_to(versioned)
        return [f"-L{folder}"]
    return []
