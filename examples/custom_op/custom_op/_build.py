"""How custom_op is compiled: the same sources and flags for `pip install` (setup.py) and for the first import of a
folder that was not installed. USE_CUDA=0 leaves the CUDA kernels out."""

import os
from pathlib import Path

import torch
from torch.utils import cpp_extension

import fused_layernorm

ROOT = Path(__file__).resolve().parent.parent


def with_cuda() -> bool:
    wanted = os.environ.get("USE_CUDA", "1") != "0"
    has_card = torch.cuda.is_available() or "TORCH_CUDA_ARCH_LIST" in os.environ  # else torch knows none to compile for
    return wanted and has_card and torch.version.cuda is not None and cpp_extension.CUDA_HOME is not None


def sources() -> list[str]:
    patterns = ["*.cpp", "*.cu"] if with_cuda() else ["*.cpp"]
    return [str(path) for pattern in patterns for path in sorted((ROOT / "csrc").glob(pattern))]


def include_dirs() -> list[str]:
    return [fused_layernorm.include_dir()]


def cxx_flags() -> list[str]:
    # -fopenmp: without it at::parallel_for runs on one thread. No -march: an installed build may move to another CPU.
    return ["-O3", "-g0", "-fopenmp", *(["-DCUSTOM_OP_WITH_CUDA"] if with_cuda() else [])]


def nvcc_flags() -> list[str]:
    return ["-O3", "-lineinfo"]


def load() -> None:
    """Register the operators: from the library that was installed, else from one compiled now, into torch's cache."""
    installed = sorted(Path(__file__).parent.glob("_C*.so"))
    if installed:
        torch.ops.load_library(str(installed[0]))
        return
    cpp_extension.load(
        name="custom_op",
        sources=sources(),
        extra_cflags=cxx_flags(),
        extra_cuda_cflags=nvcc_flags(),
        extra_include_paths=include_dirs(),
        with_cuda=with_cuda(),
        is_python_module=False,
    )
