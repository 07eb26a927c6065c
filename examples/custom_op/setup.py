"""pip install --no-build-isolation .   (for the torch and the fused_layernorm that are installed)"""

import runpy
from pathlib import Path
from types import SimpleNamespace

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

ROOT = Path(__file__).resolve().parent
build = SimpleNamespace(**runpy.run_path(str(ROOT / "custom_op" / "_build.py")))

setup(
    name="custom_op",
    version="0.1.0",
    packages=["custom_op"],
    install_requires=["torch", "fused_layernorm"],
    ext_modules=[
        (CUDAExtension if build.with_cuda() else CppExtension)(
            "custom_op._C",
            sources=[str(Path(source).relative_to(ROOT)) for source in build.sources()],
            include_dirs=build.include_dirs(),
            extra_compile_args={"cxx": build.cxx_flags(), "nvcc": build.nvcc_flags()},
        )
    ],
    cmdclass={"build_ext": BuildExtension},
)
