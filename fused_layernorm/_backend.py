"""The only importer of the compiled extension: finds, checks and loads it, and warns if there is none.

`backend` is "cuda" (fused_layernorm_cuda: CUDA and CPU kernels), "cpu" (CPU kernels only) or "reference" (PyTorch
operations, reference.py). FUSED_LAYERNORM_BACKEND=cuda|cpu|reference requires one of them. An extension for another
torch is never loaded: one warning says what to do (FUSED_LAYERNORM_STRICT=1: an ImportError). An installed extension
goes before one that build() left in torch's extension cache; FUSED_LAYERNORM_JIT=1 compiles it there if neither fits
(_build/jit.py). Without an extension the libraries of the wheel (_build/stable.py) provide the operators and all
kernels, with the autograd node in Python.
"""

import importlib
import importlib.util
import os
import runpy
import sys
import sysconfig
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch  # before the extension, which is linked against torch's libraries

from ._build import jit, source_hash, stable, toolchain

LIBRARIES = Path(__file__).resolve().parent / "lib"

# In a source folder: in place, because an extension there goes before one in site-packages.
_IN_SOURCES = (Path(__file__).resolve().parent.parent / "setup.py").exists()
MEND = f"pip install --no-build-isolation --force-reinstall --no-deps {'-e ' if _IN_SOURCES else ''}."
_MEND_SENTENCE = f'To mend this, run "{MEND}" in the source folder of fused_layernorm, or call fused_layernorm.build().'


class _Loaded(NamedTuple):
    extension: Any  # the module, or None: then `library` provides the operators, if any
    backend: str  # "cuda", "cpu", "reference"
    reason: str  # why this backend
    build_info: dict | None  # what setup.py recorded about the extension
    problem: str | None  # an extension exists but does not work: which one, why, what to do
    library: Path | None = None
    library_module: Any = None  # the library as a Python module (from torch 2.14 on)


def _describe(version: str, cuda: str | None) -> str:
    return f"torch {version} (CUDA {cuda})" if cuda else f"torch {version} (CPU)"


def _mismatch(info: dict) -> str | None:
    """Why an extension with this build record cannot be loaded into this process, or None."""

    def key(version: str, cuda: str | None) -> tuple:
        return version.split("+")[0].split(".")[:2], cuda and cuda.split(".")[0]

    if key(info["torch"], info["torch_cuda"]) == key(torch.__version__, torch.version.cuda):
        return None
    return (
        f"it was built for {_describe(info['torch'], info['torch_cuda'])}, "
        f"but this is {_describe(torch.__version__, torch.version.cuda)}"
    )


def _build_record(folder: Path) -> dict:
    """The record that setup.py wrote in `folder`: BUILDS (by file name of an extension), NOT_BUILT (why none)."""
    path = folder / "fused_layernorm" / "_build_info.py"
    return runpy.run_path(str(path)) if path.exists() else {}


def _installed(name: str) -> Any:
    """The spec of an installed extension, or None."""
    spec = importlib.util.find_spec(name)
    return spec if spec is not None and spec.origin is not None else None


def _compiled_here(name: str) -> Any:
    """The spec of the extension that build() compiled from these sources into torch's extension cache, or None."""
    path = jit.library(name)
    if not os.path.exists(path):  # also false for a folder without read permission, such as another user's HOME
        return None
    spec = importlib.util.spec_from_file_location(name, path)
    info = _record_of(spec)
    return spec if info and info["csrc_hash"] == source_hash.source_hash() else None


def _record_of(spec) -> dict | None:
    # The record is next to the extension, not always next to this file: in a source folder that is not installed,
    # Python imports the package from there and the extension from site-packages.
    origin = Path(spec.origin)
    return _build_record(origin.parent).get("BUILDS", {}).get(origin.name)


def _try_extension(spec, must_be_fresh: bool = False) -> tuple[Any, dict | None, str | None]:
    """(module, build record, why it does not work)."""
    info = _record_of(spec)
    failure = _mismatch(info) if info else None
    if failure is None and must_be_fresh and info and info.get("csrc_hash") != source_hash.source_hash():
        failure = "its sources have changed since it was built"
    if failure is None:
        try:
            module = sys.modules.get(spec.name)
            if module is None:
                module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
            return module, info, None
        except (ImportError, OSError) as error:
            sys.modules.pop(spec.name, None)
            failure = f"it does not load ({error})"
    return None, info, f"{spec.name} cannot be used: {failure}"


def _needs_compiling(choice: str) -> bool:
    """Whether FUSED_LAYERNORM_JIT=1 must compile: no extension was built from these sources for this torch, or the
    installed one lacks CUDA and build() was never called."""
    for name in jit.NAMES[1:] if choice == "cpu" else jit.NAMES:
        if _compiled_here(name):
            return False
        spec = _installed(name)
        info = spec and _record_of(spec)
        fits = info and not _mismatch(info) and info["csrc_hash"] == source_hash.source_hash()
        if fits and (name == jit.NAMES[0] or choice == "cpu" or torch.version.cuda is None):
            return False
    return True


def _load_library(choice: str) -> _Loaded | None:
    """Load the operators of the wheel's libraries; None if there are none, or none for `choice`."""
    path = LIBRARIES / stable.OPERATORS
    info = _build_record(Path(__file__).resolve().parent.parent).get("BUILDS", {}).get(path.name)
    if info is None or not path.exists():
        return None
    cuda = [version and version.split(".")[0] for version in (info["torch_cuda"], torch.version.cuda)]
    has_cuda = info["no_cuda"] is None and cuda[0] == cuda[1]
    if choice == "cuda" and not has_cuda:
        return None
    module = None
    is_free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))  # the limited API does not support its objects
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14) and not is_free_threaded:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
    # One process cannot load two libraries that define the same operators
    elif not hasattr(torch.ops.fused_layernorm, "norm_forward"):
        torch.ops.load_library(str(path))
    reason = f"{path.name} loaded, for any torch"
    if not has_cuda and torch.version.cuda:
        reason += f"; no CUDA kernels: {info['no_cuda'] or f'they are of CUDA {cuda[0]}, and torch is of {cuda[1]}'}"
    return _Loaded(None, "cuda" if has_cuda and choice != "cpu" else "cpu", reason, info, None, path, module)


def _load(choice: str, strict: bool, compile_missing: bool = False) -> _Loaded:
    """Select a backend; `choice` is "auto" or a required backend. Warns about a broken extension."""
    if choice not in ("auto", "cuda", "cpu", "reference"):
        raise ImportError(f"FUSED_LAYERNORM_BACKEND must be auto, cuda, cpu or reference, got {choice!r}")
    if choice == "reference":
        return _Loaded(None, "reference", "FUSED_LAYERNORM_BACKEND=reference", None, None)

    fresh = compile_missing  # then a stale extension is used only if compiling it again fails
    if compile_missing and _needs_compiling(choice):
        try:
            jit.build()
        except RuntimeError as error:
            _complain(f"FUSED_LAYERNORM_JIT=1: {error}", "Existing kernels are used instead, if there are any.", strict)
            fresh = False

    failures = []
    candidates = [("fused_layernorm_cuda", "cuda"), ("fused_layernorm_cpu", "cpu")]
    if choice == "cuda":
        del candidates[1]
    elif choice == "cpu":
        candidates.reverse()  # either has the CPU kernels
    specs = [
        (spec, backend) for name, backend in candidates for spec in (_installed(name), _compiled_here(name)) if spec
    ]
    for spec, backend in specs:
        module, info, failure = _try_extension(spec, fresh)
        if failure:
            failures.append(failure)
        if module is None:
            continue
        name = spec.name
        reason = f"{name} loaded" if choice == "auto" else f"{name} loaded, FUSED_LAYERNORM_BACKEND={choice}"
        if backend == "cpu" and info and info.get("no_cuda"):
            reason += f"; no CUDA kernels: {info['no_cuda']}"
        # One source folder may hold a build for a CUDA torch and one for a CPU torch. A build that does not fit is a
        # problem only if this torch could use it and the other build does not say why it has no CUDA kernels.
        lost_cuda = failures and torch.version.cuda and backend == "cpu" and not (info and info.get("no_cuda"))
        problem = f"{failures[0]}. {_MEND_SENTENCE}" if lost_cuda else None
        if problem:
            reason += f"; {failures[0]}"
            _complain(problem, "CUDA tensors run on the slower PyTorch reference.", strict)
        return _Loaded(module, "cpu" if choice == "cpu" else backend, reason, info, problem)

    try:
        found = _load_library(choice)
    except (ImportError, OSError) as error:  # such as an older glibc
        failures.append(f"{stable.OPERATORS} cannot be used: it does not load ({error})")
    else:
        if found:
            return found
    problem = f"{'; '.join(failures)}. {_MEND_SENTENCE}" if failures else None
    not_built = _build_record(Path(__file__).resolve().parent.parent).get("NOT_BUILT")
    reason = "; ".join(failures) or not_built or "no compiled extension is installed"
    if choice != "auto":
        without_cuda = _installed("fused_layernorm_cpu") or _compiled_here("fused_layernorm_cpu")
        if choice == "cuda" and not failures and without_cuda:
            why = (_record_of(without_cuda) or {}).get("no_cuda")
            if why:  # the same build would omit them again
                raise ImportError(f"FUSED_LAYERNORM_BACKEND=cuda, but only the CPU kernels were built: {why}. "
                                  "docs/install.md says what CUDA kernels need; then build again")  # fmt: skip
            reason = "only the CPU kernels were built"
        raise ImportError(f"FUSED_LAYERNORM_BACKEND={choice}, but {reason}. {_MEND_SENTENCE}")
    if problem:
        _complain(problem, "Until then the slower PyTorch reference is used.", strict)
    return _Loaded(None, "reference", reason, None, problem)


def _complain(problem: str, consequence: str, strict: bool) -> None:
    if strict:
        raise ImportError(f"{problem} (FUSED_LAYERNORM_STRICT=1)")
    warnings.warn(f"{problem} {consequence}", RuntimeWarning, stacklevel=2)


_choice = os.environ.get("FUSED_LAYERNORM_BACKEND", "").strip().lower() or "auto"
extension, backend, reason, build_info, problem, library, library_module = _load(
    _choice, bool(toolchain.flag("FUSED_LAYERNORM_STRICT")), bool(toolchain.flag("FUSED_LAYERNORM_JIT"))
)

KERNEL_DEVICES = {"cuda": ("cuda", "cpu"), "cpu": ("cpu",), "reference": ()}[backend]

_may_warn = problem is None and _choice == "auto"  # import warned of a problem; a required backend needs no warning


def has_kernels_for(device_type: str) -> bool:
    """Whether the extension has kernels for tensors on this type of device."""
    return device_type in KERNEL_DEVICES


def _levels_to_user() -> int:
    """stacklevel, in the caller's frame, of the first caller outside this package and torch.nn."""
    ours = (os.path.dirname(__file__), os.path.dirname(torch.nn.__file__))
    frame, levels = sys._getframe(1), 1
    while frame.f_back and frame.f_code.co_filename.startswith(ours):
        frame, levels = frame.f_back, levels + 1
    return levels


def warn_reference(device_type: str) -> None:
    """Warn, once per process, that tensors on `device_type` run on the PyTorch reference, why, and what to do."""
    global _may_warn
    if not _may_warn:
        return
    _may_warn = False
    warnings.warn(
        f"fused_layernorm has no compiled kernels for {device_type} tensors here and uses the slower PyTorch "
        f"reference: {reason}. {_MEND_SENTENCE} `python -m fused_layernorm` prints a diagnosis.",
        RuntimeWarning,
        stacklevel=_levels_to_user(),
    )
