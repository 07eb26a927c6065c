"""The two libraries of the wheel. One holds the operators, on torch's stable interface, and the CPU kernels, for every
torch from 2.11 on and every Python. The other holds the CUDA kernels and does not depend on torch.

Imports neither torch nor the package: setup.py loads this file by path.
"""

import re
import shlex
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

OPERATORS = "libfused_layernorm.so"
KERNELS = "libfused_layernorm_kernels.so"
# Code for 8.0 runs on 8.6 and 8.9 too. The newest also as PTX, for future cards.
ARCHS = "8.0;9.0;10.0;12.0+PTX"
# Defines of the sources. The target version hides everything newer than torch 2.11.
DEFINES = ("-DFUSED_LAYERNORM_STABLE_ABI", "-DTORCH_TARGET_VERSION=0x020b000000000000")
OPERATOR_SOURCES = ("torch/norm_ops.cpp", "cpu/norm_cpu.cpp", "stable/library.cpp", "stable/python.cpp")


def compile_libraries(torch_home: Path, csrc: Path, folder: Path, objects: Path, recipe: dict, jobs: int) -> None:
    """Compile the libraries into `folder`. recipe: cxx (a command), flags of cxx and nvcc, and cuda: home and archs
    (from toolchain.parse_archs()) for the CUDA kernels, or None for the CPU kernels only."""
    cuda = recipe["cuda"]
    shutil.rmtree(folder, ignore_errors=True)  # a wheel without CUDA must not contain the kernels of an earlier build
    folder.mkdir(parents=True)
    objects.mkdir(parents=True, exist_ok=True)
    hidden = ["-fPIC", "-fvisibility=hidden"]
    cxx = shlex.split(recipe["cxx"])
    host = [*cxx, "-std=c++17", *recipe["flags"]["cxx"], *hidden, "-fvisibility-inlines-hidden", f"-I{csrc}",
            *DEFINES, "-isystem", f"{torch_home}/include", "-isystem", sysconfig.get_path("include")]  # fmt: skip
    commands = {}
    if cuda:
        device = [f"{cuda['home']}/bin/nvcc", "-std=c++17", "--expt-relaxed-constexpr", *recipe["flags"]["nvcc"],
                  "-Xcompiler", ",".join(hidden), f"-I{csrc}", *gencodes(cuda["archs"])]  # fmt: skip
        for source in sorted(csrc.glob("cuda/*.cu"), key=lambda path: -path.stat().st_size):
            commands[objects / f"{source.stem}.cu.o"] = [*device, "-c", str(source)]
    for source in OPERATOR_SOURCES:
        commands[objects / f"{Path(source).stem}.o"] = [*host, "-c", str(csrc / source)]
    with ThreadPoolExecutor(jobs) as pool:
        for done in [pool.submit(run, [*command, "-o", str(target)]) for target, command in commands.items()]:
            done.result()

    link = [*cxx, "-shared", "-s"]
    kernels = [str(target) for target in commands if target.name.endswith(".cu.o")]
    others = [str(target) for target in commands if not target.name.endswith(".cu.o")]
    if cuda:  # the CUDA runtime is linked statically, so no other has to match
        runtimes = [cuda["home"] / name / "libcudart_static.a" for name in ("lib64", "lib")]
        runtime = next(str(path) for path in runtimes if path.exists())
        run([*link, *kernels, "-o", str(folder / KERNELS), runtime, "-Wl,--exclude-libs,libcudart_static.a",
             "-ldl", "-lrt", "-lpthread"])  # fmt: skip
    # libtorch itself, because in a CUDA torch it needs libtorch_cuda, which has the current stream
    run([*link, *others, "-o", str(folder / OPERATORS), f"-L{torch_home}/lib",
         "-Wl,--no-as-needed", "-ltorch", "-Wl,--as-needed", "-ltorch_cpu",
         *([f"-L{folder}", f"-l:{KERNELS}", "-Wl,-rpath,$ORIGIN"] if cuda else [])])  # fmt: skip


def gencodes(archs) -> list[str]:
    found = []
    for (major, minor), suffix, ptx in archs:
        number = f"{major}{minor}{suffix}"
        found += [f"-gencode=arch=compute_{number},code=sm_{number}"]
        found += [f"-gencode=arch=compute_{number},code=compute_{number}"] if ptx else []
    return found


def run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout, end="", flush=True)
    if done.returncode:
        raise SystemExit(f"failed: {shlex.join(command)}")


def platform_tag(folder: Path, machine: str) -> str:
    """The manylinux tag: the newest glibc that the libraries in `folder` need, and at least 2.28, which torch needs."""
    names = b"".join(path.read_bytes() for path in folder.glob("*.so"))
    newest = max([28, *(int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", names))])
    return f"manylinux_2_{newest}_{machine}"
