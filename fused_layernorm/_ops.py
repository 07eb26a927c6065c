"""The sole importer of the compiled extension, the one place that decides which backend runs, and the Python side of
the operators: their fake implementations and DTensor's sharding rules.

`backend` is "cuda" (fused_layernorm_cuda: CUDA and CPU kernels), "cpu" (CPU kernels only) or "reference" (PyTorch
operations, reference.py). FUSED_LAYERNORM_BACKEND=cuda|cpu|reference chooses by hand. An extension that does not fit
the torch in this process is never loaded: one warning says what to do (FUSED_LAYERNORM_STRICT=1: an ImportError).
One that build() left in torch's cache is next to one that is installed; FUSED_LAYERNORM_JIT=1 compiles it there where
neither fits (_jit.py).
"""

import functools
import importlib
import importlib.util
import os
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch  # before the extension: its libraries are what the extension is linked against
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from . import _jit, _source_hash, _toolchain, reference

# In a source folder in place, as an extension there goes before one in site-packages.
_IN_SOURCES = (Path(__file__).resolve().parent.parent / "setup.py").exists()
MEND = f"pip install --no-build-isolation --force-reinstall --no-deps {'-e ' if _IN_SOURCES else ''}."
_MEND_SENTENCE = f'To mend this, run "{MEND}" in the source folder of fused_layernorm, or call fused_layernorm.build().'


class _Loaded(NamedTuple):
    extension: Any  # the module, or None
    backend: str  # "cuda", "cpu", "reference"
    reason: str  # why this backend
    build_info: dict | None  # what setup.py recorded about the extension
    problem: str | None  # an extension is there but does not work: which one, why, how to mend it


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
    """What setup.py wrote for the build in `folder`: BUILDS (by file name of an extension), NOT_BUILT (why none)."""
    path = folder / "fused_layernorm" / "_build_info.py"
    return runpy.run_path(str(path)) if path.exists() else {}


def _installed(name: str) -> Any:
    """The spec of an extension that was installed, or None."""
    spec = importlib.util.find_spec(name)
    return spec if spec is not None and spec.origin is not None else None


def _compiled_here(name: str) -> Any:
    """The spec of an extension that build() left in torch's cache, or None. One of other sources is no extension."""
    path = _jit.library(name)
    if not path.exists():
        return None
    spec = importlib.util.spec_from_file_location(name, path)
    info = _record_of(spec)
    return spec if info and info["csrc_hash"] == _source_hash.source_hash() else None


def _record_of(spec) -> dict | None:
    # The record lies beside the extension, which need not be beside this file: running from a source folder that is
    # not installed, Python takes the package from there and the extension from site-packages.
    origin = Path(spec.origin)
    return _build_record(origin.parent).get("BUILDS", {}).get(origin.name)


def _try_extension(spec, must_be_fresh: bool = False) -> tuple[Any, dict | None, str | None]:
    """(module, build record, why it does not work)."""
    info = _record_of(spec)
    failure = _mismatch(info) if info else None
    if failure is None and must_be_fresh and info and info.get("csrc_hash") != _source_hash.source_hash():
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
    """Whether FUSED_LAYERNORM_JIT=1 has something to do: nothing that is there was made of these sources for this
    torch, or what is there leaves out CUDA where build() was never asked."""
    for name in _jit.NAMES[1:] if choice == "cpu" else _jit.NAMES:
        if _compiled_here(name):
            return False
        spec = _installed(name)
        info = spec and _record_of(spec)
        fits = info and not _mismatch(info) and info["csrc_hash"] == _source_hash.source_hash()
        if fits and (name == _jit.NAMES[0] or choice == "cpu" or torch.version.cuda is None):
            return False
    return True


def _load(choice: str, strict: bool, compile_missing: bool = False) -> _Loaded:
    """Pick a backend; `choice` is "auto" or a backend that must be had. Warns about an extension that is broken."""
    if choice not in ("auto", "cuda", "cpu", "reference"):
        raise ImportError(f"FUSED_LAYERNORM_BACKEND must be auto, cuda, cpu or reference, got {choice!r}")
    if choice == "reference":
        return _Loaded(None, "reference", "FUSED_LAYERNORM_BACKEND=reference", None, None)

    fresh = compile_missing  # then what is stale is used only if it cannot be compiled anew
    if compile_missing and _needs_compiling(choice):
        try:
            _jit.build()
        except RuntimeError as error:
            _complain(f"FUSED_LAYERNORM_JIT=1: {error}", "What there is without it is used.", strict)
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
        # One source folder may hold a build for a CUDA torch and one for a CPU torch: the one that does not fit is
        # then nobody's problem, unless this torch could have used it.
        problem = f"{failures[0]}. {_MEND_SENTENCE}" if failures and torch.version.cuda and backend == "cpu" else None
        if problem:
            reason += f"; {failures[0]}"
            _complain(problem, "CUDA tensors run on the slower PyTorch reference.", strict)
        return _Loaded(module, "cpu" if choice == "cpu" else backend, reason, info, problem)

    problem = f"{'; '.join(failures)}. {_MEND_SENTENCE}" if failures else None
    not_built = _build_record(Path(__file__).resolve().parent.parent).get("NOT_BUILT")
    reason = "; ".join(failures) or not_built or "no compiled extension is installed"
    if choice != "auto":
        raise ImportError(f"FUSED_LAYERNORM_BACKEND={choice}, but {reason}. {_MEND_SENTENCE}")
    if problem:
        _complain(problem, "Until then the slower PyTorch reference is used.", strict)
    return _Loaded(None, "reference", reason, None, problem)


def _complain(problem: str, consequence: str, strict: bool) -> None:
    if strict:
        raise ImportError(f"{problem} (FUSED_LAYERNORM_STRICT=1)")
    warnings.warn(f"{problem} {consequence}", RuntimeWarning, stacklevel=2)


_choice = os.environ.get("FUSED_LAYERNORM_BACKEND", "").strip().lower() or "auto"
extension, backend, reason, build_info, problem = _load(
    _choice, bool(_toolchain.flag("FUSED_LAYERNORM_STRICT")), bool(_toolchain.flag("FUSED_LAYERNORM_JIT"))
)

_KERNEL_DEVICES = {"cuda": ("cuda", "cpu"), "cpu": ("cpu",), "reference": ()}[backend]


def not_implemented(*arguments):
    return NotImplemented


# Bound directly: a Python wrapper would cost host time on every call.
if extension:
    norm, takes_kernel = extension.norm, extension.takes_kernel
    add_norm = getattr(extension, "add_norm", not_implemented)  # an older build has none
    norm_forward, norm_backward = extension.norm_forward, extension.norm_backward
    set_differentiable_backward = extension.set_differentiable_backward
    if "cuda" not in _KERNEL_DEVICES:
        extension.take_no_cuda_tensors()
else:
    norm_forward = norm_backward = None
    norm = add_norm = not_implemented

    def takes_kernel(x, weight, bias) -> bool:
        return False

    def set_differentiable_backward(function) -> None:
        pass


max_segments = getattr(extension, "max_segments", 0)  # of rows, each with a weight of its own
activations = getattr(extension, "activations", [])  # their names in the order of the operators' numbers; "": none


# ---- the operators (csrc/torch_library.cpp) ------------------------------------------------------------------------

norm_operator = norm_backward_operator = add_norm_operator = after_norm_operator = gated_norm_operator = None
if extension and hasattr(torch.ops.fused_layernorm, "norm_forward"):  # an older build may have none
    norm_operator = torch.ops.fused_layernorm.norm_forward.default
    norm_backward_operator = torch.ops.fused_layernorm.norm_backward.default

    @torch.library.register_fake(norm_operator)
    def _(x, weight, bias, normalized_ndim, eps, weight_offset=0.0, is_rms_norm=False, out_dtype=None, stats_grad=True):
        _check_operator_arguments(x, weight, bias, normalized_ndim, eps, weight_offset, out_dtype)
        return x.new_empty(x.shape, dtype=out_dtype or x.dtype), _fake_stats(x, normalized_ndim, is_rms_norm)

    @torch.library.register_fake(norm_backward_operator)
    def _(
        grad_output, x, weight, stats, normalized_ndim, weight_offset, is_rms_norm, wants_x, wants_weight, bias_dtype,
        stats_grad=True,
    ):  # fmt: skip
        grad_x = x.new_empty(x.shape if wants_x else 0)
        return grad_x, *_fake_parameter_gradients(x, weight, normalized_ndim, wants_weight, bias_dtype)

    def _check_operator_arguments(x, weight, bias, normalized_ndim, eps, weight_offset, out_dtype):
        if weight is not None and weight.dim() > normalized_ndim:  # one for each of several parts of the rows
            weight, bias = weight[0], None if bias is None else bias[0]
        shape = x.shape[x.dim() - normalized_ndim :]
        reference.check_norm_arguments(x, weight, bias, shape, eps, weight_offset, out_dtype)

    def _fake_stats(z, normalized_ndim, is_rms_norm):
        shape = (1 if is_rms_norm else 3, *z.shape[: z.dim() - normalized_ndim])
        return z.new_empty(shape, dtype=reference.accumulation_dtype(z.dtype))

    def _fake_parameter_gradients(x, weight, normalized_ndim, wants_weight, bias_dtype):
        shape = x.shape[x.dim() - normalized_ndim :] if weight is None else weight.shape
        return (
            weight.new_empty(shape) if wants_weight and weight is not None else x.new_empty(0),
            x.new_empty(shape, dtype=bias_dtype) if bias_dtype else x.new_empty(0),
        )


if norm_operator and hasattr(torch.ops.fused_layernorm, "add_norm_forward"):
    add_norm_operator = torch.ops.fused_layernorm.add_norm_forward.default

    @torch.library.register_fake(add_norm_operator)
    def _(
        x, residual, weight, bias, philox, normalized_ndim, eps, weight_offset=0.0, is_rms_norm=False, out_dtype=None,
        stats_grad=True, dropout_p=0.0, residual_dtype=None,
    ):  # fmt: skip
        _check_operator_arguments(x, weight, bias, normalized_ndim, eps, weight_offset, out_dtype)
        z = x.new_empty(x.shape, dtype=reference.check_add_arguments(x, residual, residual_dtype, dropout_p))
        return x.new_empty(x.shape, dtype=out_dtype or x.dtype), z, _fake_stats(z, normalized_ndim, is_rms_norm)

    @torch.library.register_fake(torch.ops.fused_layernorm.add_norm_backward.default)
    def _(
        grad_output, grad_residual_out, z, weight, stats, philox, normalized_ndim, weight_offset, is_rms_norm, wants_x,
        wants_weight, bias_dtype, stats_grad, dropout_p, x_dtype, residual_dtype,
    ):  # fmt: skip
        drops = philox is not None and dropout_p > 0
        wants_residual = residual_dtype is not None and (drops or not wants_x or residual_dtype != x_dtype)
        return (
            z.new_empty(z.shape, dtype=x_dtype) if wants_x else z.new_empty(0),
            z.new_empty(z.shape, dtype=residual_dtype) if wants_residual else z.new_empty(0),
            *_fake_parameter_gradients(z, weight, normalized_ndim, wants_weight, bias_dtype),
        )

    @torch.library.register_fake(torch.ops.fused_layernorm.dropout_mask.default)
    def _(philox, rows, hidden_size, dropout_p):
        return philox.new_empty((rows, hidden_size), dtype=torch.bool)


if norm_operator and hasattr(torch.ops.fused_layernorm, "after_norm_backward"):
    after_norm_operator = torch.ops.fused_layernorm.after_norm_forward.default
    after_norm_backward_operator = torch.ops.fused_layernorm.after_norm_backward.default
    gated_norm_operator = torch.ops.fused_layernorm.gated_norm_forward.default
    gated_norm_backward_operator = torch.ops.fused_layernorm.gated_norm_backward.default
    backward_from_y = extension.backward_from_y

    @torch.library.register_fake(gated_norm_operator)
    def _(
        x, residual, gate, weight, bias, normalized_ndim, eps, weight_offset, is_rms_norm, out_dtype, residual_dtype
    ):  # fmt: skip
        _check_operator_arguments(x, weight, bias, normalized_ndim, eps, weight_offset, out_dtype)
        z = x.new_empty(x.shape, dtype=residual_dtype)
        return x.new_empty(x.shape, dtype=out_dtype), z, _fake_stats(z, normalized_ndim, is_rms_norm)

    @torch.library.register_fake(gated_norm_backward_operator)
    def _(
        grad_output, grad_residual_out, z, x, gate, weight, stats, normalized_ndim, weight_offset, is_rms_norm, wants_x,
        wants_residual, wants_weight, bias_dtype,
    ):  # fmt: skip
        return (
            x.new_empty(x.shape if wants_x else 0), z.new_empty(z.shape if wants_residual else 0),
            gate.new_empty(gate.shape),
            *_fake_parameter_gradients(z, weight, normalized_ndim, wants_weight, bias_dtype),
        )  # fmt: skip

    @torch.library.register_fake(after_norm_operator)
    def _(x, weight, bias, philox, normalized_ndim, eps, weight_offset, is_rms_norm, out_dtype, activation, dropout_p):
        _check_operator_arguments(x, weight, bias, normalized_ndim, eps, weight_offset, out_dtype)
        return x.new_empty(x.shape, dtype=out_dtype or x.dtype), _fake_stats(x, normalized_ndim, is_rms_norm)

    @torch.library.register_fake(after_norm_backward_operator)
    def _(
        grad_output, x, weight, bias, stats, philox, normalized_ndim, weight_offset, is_rms_norm, wants_x, wants_weight,
        wants_bias, activation, dropout_p,
    ):  # fmt: skip
        bias_dtype = bias.dtype if wants_bias and bias is not None else None
        grad_x = x.new_empty(x.shape if wants_x else 0)
        return grad_x, *_fake_parameter_gradients(x, weight, normalized_ndim, wants_weight, bias_dtype)


def has_stages(device_type: str) -> bool:
    """Whether there are kernels for this type of device that have what surrounds a norm. Where not, it is made of
    PyTorch operations."""
    return after_norm_operator is not None and device_type in _KERNEL_DEVICES


def dropout_mask(philox, rows: int, hidden_size: int, dropout_p: float):
    """Which elements a call with this philox and dropout_p keeps: [rows, hidden_size] bool."""
    if has_stages(philox.device.type) and not torch._C._are_functorch_transforms_active():
        return torch.ops.fused_layernorm.dropout_mask(philox, rows, hidden_size, dropout_p)
    return reference.dropout_mask(philox, rows, hidden_size, dropout_p)


def operator_takes_type(cls: type, has_sharding_rules: bool) -> bool:
    """Whether an operator knows what to do with tensors of this class. The first DTensor brings the sharding rules."""
    if _is_dtensor_class(cls):
        _register_sharding_rules()
        return has_sharding_rules
    return cls in (torch.Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor)


def _is_dtensor_class(cls: type) -> bool:
    distributed = sys.modules.get("torch.distributed.tensor")  # not imported here: that takes as long as torch itself
    return distributed is not None and issubclass(cls, distributed.DTensor)


def is_dtensor(x: torch.Tensor) -> bool:
    return _is_dtensor_class(type(x))


# What torch.compiler.assume_constant_result does, without its import of torch._dynamo, which takes seconds: Dynamo
# calls the function while it traces, instead of tracing into it.
operator_takes_type._dynamo_marked_constant = is_dtensor._dynamo_marked_constant = True


@functools.cache
def _register_sharding_rules() -> None:
    """Tell DTensor how the operators work on shards: x split along a dimension not normalized, weights whole."""
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    def rules(x, normalized_ndim, rule):
        """What `rule` returns, (results, arguments), where all is whole, and for each way to split the rows.

        Its arguments are the placements of a tensor like x, of stats, and of a sum over the rows.
        """
        found = [rule(Replicate(), Replicate(), Replicate())]
        for dim in range(len(x.shape) - normalized_ndim):  # stats has one dimension before those of x
            found.append(rule(Shard(dim), Shard(dim + 1), Partial("sum")))
        return found

    def whole(tensor):
        return None if tensor is None else Replicate()

    @register_sharding(norm_operator)
    def _(x, weight, bias, normalized_ndim, *options):
        no_tensors = [None] * (1 + len(options))
        return rules(x, normalized_ndim, lambda rows, stats, sum_of_rows: (
            [rows, stats], [rows, whole(weight), whole(bias), *no_tensors]))  # fmt: skip

    @register_sharding(norm_backward_operator)
    def _(grad_output, x, weight, stats, normalized_ndim, *options):
        no_tensors = [None] * (1 + len(options))
        wants = options[2:5]

        def gradients(*placements):  # what is not wanted is an empty tensor, the same everywhere
            return [part if wanted else Replicate() for part, wanted in zip(placements, wants, strict=True)]

        return rules(x, normalized_ndim, lambda rows, stats, sum_of_rows: (
            gradients(rows, sum_of_rows, sum_of_rows), [rows, rows, whole(weight), stats, *no_tensors]))  # fmt: skip

    # The operators with a residual: without dropout, whose mask follows from the row's number in the whole tensor.
    @register_sharding(add_norm_operator)
    def _(x, residual, weight, bias, philox, normalized_ndim, *options):
        no_tensors = [None] * (1 + len(options))
        found = rules(x, normalized_ndim, lambda rows, stats, sum_of_rows: (
            [rows, rows, stats],
            [rows, None if residual is None else rows, whole(weight), whole(bias), whole(philox), *no_tensors],
        ))  # fmt: skip
        return found if philox is None else found[:1]

    @register_sharding(torch.ops.fused_layernorm.add_norm_backward.default)
    def _(grad_output, grad_residual_out, z, weight, stats, philox, normalized_ndim, *options):
        no_tensors = [None] * (1 + len(options))
        wants_x, wants_weight, bias_dtype, x_dtype, residual_dtype = (*options[2:5], *options[7:9])
        wants_residual = residual_dtype is not None and not (wants_x and residual_dtype == x_dtype)  # else it is grad_x
        wants = (wants_x, wants_residual, wants_weight, bias_dtype)

        def gradients(*placements):
            return [part if wanted else Replicate() for part, wanted in zip(placements, wants, strict=True)]

        found = rules(z, normalized_ndim, lambda rows, stats, sum_of_rows: (
            gradients(rows, rows, sum_of_rows, sum_of_rows),
            [rows, None if grad_residual_out is None else rows, rows, whole(weight), stats, whole(philox), *no_tensors],
        ))  # fmt: skip
        return found if philox is None else found[:1]


# ---- the warning about the reference ---------------------------------------------------------------------------------

_may_warn = problem is None and _choice == "auto"  # a problem was told at import; a choice by hand is known


def has_kernels_for(device_type: str) -> bool:
    """Whether the extension has kernels for tensors on this type of device."""
    return device_type in _KERNEL_DEVICES


def _levels_to_user() -> int:
    """How many calls up from who asks the code lies that is neither this package's nor torch.nn's."""
    ours = (os.path.dirname(__file__), os.path.dirname(torch.nn.__file__))
    frame, levels = sys._getframe(1), 1
    while frame.f_back and frame.f_code.co_filename.startswith(ours):
        frame, levels = frame.f_back, levels + 1
    return levels


def warn_reference(device_type: str) -> None:
    """Say, once per process, that tensors on `device_type` run on the PyTorch reference, why, and what mends it."""
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
