"""The sole importer of the compiled extension, the one place that decides which backend runs and which path takes a
call, and the Python side of the operators: their fake implementations and DTensor's sharding rules.

`backend` is "cuda" (fused_layernorm_cuda: CUDA and CPU kernels), "cpu" (CPU kernels only) or "reference" (PyTorch
operations, reference.py). FUSED_LAYERNORM_BACKEND=cuda|cpu|reference chooses by hand. An extension that does not fit
the torch in this process is never loaded: one warning says what to do (FUSED_LAYERNORM_STRICT=1: an ImportError).
An extension that build() left in torch's cache is tried after one that is installed; FUSED_LAYERNORM_JIT=1 compiles it
there if neither fits (_jit.py).
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
from torch.autograd import forward_ad

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


def not_implemented(*arguments, **options):
    return NotImplemented


# norm(x, residual, gate, weight, bias, **options): the call of plain eager mode with its autograd node. A call that it
# does not take goes to the fallback (functional._norm); try_norm returns NotImplemented instead.
# Bound directly: a Python wrapper would cost host time on every call.
if extension:
    norm, try_norm, takes_kernel = extension.norm, extension.try_norm, extension.takes_kernel
    y_tells_x = extension.y_tells_x
    if "cuda" not in _KERNEL_DEVICES:
        extension.refuse_cuda_tensors()
else:
    norm = try_norm = not_implemented

    def takes_kernel(*tensors) -> bool:
        return False

    def y_tells_x(*arguments) -> bool:
        return False


def set_fallback(fallback) -> None:
    """fallback: called as norm(), where norm() does not take a call."""
    global norm
    if extension:
        extension.set_callbacks(fallback, reference.norm_backward, _watch_optimizers)
    else:
        norm = fallback


def _watch_optimizers() -> None:
    """Count the steps of optimizers: mixed precision writes new weights through .data, which no version shows."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(lambda *_: extension.count_optimizer_step())


# ---- which path takes a call -----------------------------------------------------------------------------------------


def is_torchs(x) -> bool:
    """Whether PyTorch's own norm computes a plain norm of x: for nested tensors, and in torch.jit.trace and
    torch.onnx.export, whose readers know no other."""
    if torch.compiler.is_dynamo_compiling():
        return False
    return x.is_nested or torch.jit.is_tracing() or torch.onnx.is_in_onnx_export()


def path_of(x, *tensors) -> str:
    """Which path takes a call on these tensors, if PyTorch's own norm does not (is_torchs); None is left out.

    "kernel": the extension's call with its node, or NormFunction. "operator": where something must see a call that it
    can name (torch.compile, export, dispatch modes, fake tensors, DTensor). "reference": torch.func, forward-mode AD,
    other subclasses, traces, devices without kernels.
    """
    compiling = torch.compiler.is_dynamo_compiling()
    if not compiling and torch.jit.is_tracing():
        return "reference"
    if x.device.type not in _KERNEL_DEVICES:
        if not compiling and type(x) in _PLAIN_TYPES and x.device.type in ("cpu", "cuda"):
            warn_reference(x.device.type)
        return "reference"
    # The operators have neither batching rules nor forward derivatives
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return "reference"
    given = (x, *(t for t in tensors if t is not None))
    if not torch.compiler.is_compiling() and takes_kernel(*given):
        return "kernel"
    return "operator" if all(_operator_takes_type(type(t)) for t in given) else "reference"


_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def _operator_takes_type(cls: type) -> bool:
    """Whether the operators take tensors of this class. The first DTensor registers the sharding rules."""
    if _is_dtensor_class(cls):
        _register_sharding_rules()
        return True
    return cls in (*_PLAIN_TYPES, FakeTensor, FunctionalTensor)


def _is_dtensor_class(cls: type) -> bool:
    distributed = sys.modules.get("torch.distributed.tensor")  # not imported here: that takes as long as torch itself
    return distributed is not None and issubclass(cls, distributed.DTensor)


def is_dtensor(x: torch.Tensor) -> bool:
    return _is_dtensor_class(type(x))


# What torch.compiler.assume_constant_result does, without its import of torch._dynamo, which takes seconds: Dynamo
# calls the function while it traces, instead of tracing into it.
_operator_takes_type._dynamo_marked_constant = is_dtensor._dynamo_marked_constant = True


def shape_of_segments(x, normalized_ndim: int, *parameters) -> tuple:
    """The smallest shape that the kernels take for weight, bias and gate and that all parameters can be expanded to:
    x's leading dimensions, with 1 for the last of them along which values are shared. Parameters have as many
    dimensions as x; None is ignored."""
    leading = x.dim() - normalized_ndim
    split = leading
    while split and all(t is None or t.shape[split - 1] == 1 for t in parameters):
        split -= 1
    return (*x.shape[:split], *[1] * (leading - split), *x.shape[leading:])


# ---- the operators (csrc/torch/library.cpp) ------------------------------------------------------------------------

if extension:
    norm_forward = torch.ops.fused_layernorm.norm_forward.default
    norm_backward = torch.ops.fused_layernorm.norm_backward.default

    @torch.library.register_fake(norm_forward)
    def _(x, residual, gate, weight, bias, philox, *given):
        options = reference.Options(*given)
        shape = x.shape[x.dim() - options.normalized_ndim :]
        own = [t if t is not None and t.dim() == len(shape) else None for t in (weight, bias)]
        offset = options.weight_offset if own[0] is weight else 0.0
        reference.check_norm_arguments(x, *own, shape, options.eps, offset, options.out_dtype)
        rows = x.shape[: x.dim() - len(shape)]
        return (
            x.new_empty(x.shape, dtype=options.out_dtype or x.dtype),
            x.new_empty(x.shape if options.residual_dtype else 0, dtype=options.residual_dtype or x.dtype),
            x.new_empty((1 if options.is_rms_norm else 3, *rows), dtype=reference.accumulation_dtype(x.dtype)),
        )

    @torch.library.register_fake(norm_backward)
    def _(grad_output, grad_residual_out, z, stats, x, gate, weight, bias, philox, *given):
        _, wanted = _split(given)
        of_bias = next((t.shape for t in (bias, weight, gate) if t is not None), z.shape[z.dim() - given[0] :])

        def gradient(is_wanted, shape, dtype):
            return z.new_empty(shape if is_wanted else 0, dtype=dtype if is_wanted else z.dtype)

        return (
            gradient(wanted.wants_x, z.shape, wanted.x_dtype),
            gradient(_has_own_residual_gradient(given, philox, gate), z.shape, wanted.grad_residual_dtype),
            gradient(wanted.wants_gate, None if gate is None else gate.shape, None if gate is None else gate.dtype),
            gradient(wanted.grad_weight_dtype, None if weight is None else weight.shape, wanted.grad_weight_dtype),
            gradient(wanted.grad_bias_dtype, of_bias, wanted.grad_bias_dtype),
        )

    @torch.library.register_fake(torch.ops.fused_layernorm.dropout_mask.default)
    def _(philox, rows, hidden_size, dropout_p):
        return philox.new_empty((rows, hidden_size), dtype=torch.bool)

else:
    norm_forward = norm_backward = None


def _split(given):
    count = len(reference.Options._fields)
    return reference.Options(*given[:count]), reference.Wanted(*given[count:])


def _has_own_residual_gradient(given, philox, gate) -> bool:
    """Whether the gradient of residual is wanted, and is not that of x as well."""
    options, wanted = _split(given)
    if wanted.grad_residual_dtype is None:
        return False
    drops_x = philox is not None and options.dropout_p > 0 and not options.drops_y
    return drops_x or gate is not None or not wanted.wants_x or wanted.grad_residual_dtype != wanted.x_dtype


def call_norm_backward(*arguments):
    """norm_backward's five gradients, None where not wanted."""
    found = list(norm_backward(*arguments))
    gate, philox, given = arguments[5], arguments[8], arguments[9:]
    _, wanted = _split(given)
    if wanted.grad_residual_dtype is not None and not _has_own_residual_gradient(given, philox, gate):
        found[1] = found[0]
    wants = (wanted.wants_x, wanted.grad_residual_dtype, wanted.wants_gate, wanted.grad_weight_dtype,
             wanted.grad_bias_dtype)  # fmt: skip
    return tuple(t if wants_it else None for t, wants_it in zip(found, wants, strict=True))


def dropout_mask(philox, rows: int, hidden_size: int, dropout_p: float):
    """Which elements a call with this philox and dropout_p keeps: [rows, hidden_size] bool."""
    if philox.device.type in _KERNEL_DEVICES and not torch._C._are_functorch_transforms_active():
        return torch.ops.fused_layernorm.dropout_mask(philox, rows, hidden_size, dropout_p)
    return reference.dropout_mask(philox, rows, hidden_size, dropout_p)


@functools.cache
def _register_sharding_rules() -> None:
    """Tell DTensor how the operators work on shards. Tensors with the rows of x are split along a leading dimension,
    and so is a parameter that has values of its own along it; other parameters are replicated. With dropout all tensors
    are replicated: the mask follows from the row's index in the whole tensor."""
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    def if_given(tensor, placement):
        return None if tensor is None else placement

    def of_parameter(parameter, z, dim):
        if parameter is None or parameter.shape == ():
            return None
        has_own = len(parameter.shape) == len(z.shape) and parameter.shape[dim] == z.shape[dim] != 1
        return Shard(dim) if has_own else Replicate()

    def dims_to_split(z, options, philox):
        return () if philox is not None else range(len(z.shape) - options.normalized_ndim)

    @register_sharding(norm_forward)
    def _(x, residual, gate, weight, bias, philox, *given):
        options, no_tensors = reference.Options(*given), [None] * len(given)
        whole = [Replicate(), *(if_given(t, Replicate()) for t in (residual, gate, weight, bias, philox)), *no_tensors]
        found = [([Replicate()] * 3, whole)]
        for dim in dims_to_split(x, options, philox):
            rows = Shard(dim)
            parameters = [of_parameter(t, x, dim) for t in (gate, weight, bias)]
            found.append((
                [rows, rows if options.residual_dtype else Replicate(), Shard(dim + 1)],
                [rows, if_given(residual, rows), *parameters, None, *no_tensors],
            ))  # fmt: skip
        return found

    @register_sharding(norm_backward)
    def _(grad_output, grad_residual_out, z, stats, x, gate, weight, bias, philox, *given):
        (options, wanted), no_tensors = _split(given), [None] * len(given)
        tensors = (grad_output, grad_residual_out, z, stats, x, gate, weight, bias, philox)
        found = [([Replicate()] * 5, [*(if_given(t, Replicate()) for t in tensors), *no_tensors])]
        wants = (wanted.wants_x, _has_own_residual_gradient(given, philox, gate), wanted.wants_gate,
                 wanted.grad_weight_dtype, wanted.grad_bias_dtype)  # fmt: skip
        for dim in dims_to_split(z, options, philox):
            rows = Shard(dim)
            parameters = [of_parameter(t, z, dim) for t in (gate, weight, bias)]
            of_bias = next((p for p in parameters[::-1] if p is not None), Replicate())
            sums = [Partial("sum") if p == Replicate() else p for p in (parameters[0], parameters[1], of_bias)]
            gradients = [placement if is_wanted else Replicate()  # else an empty tensor, the same everywhere
                         for placement, is_wanted in zip((rows, rows, *sums), wants, strict=True)]  # fmt: skip
            found.append((gradients, [
                rows, if_given(grad_residual_out, rows), rows, Shard(dim + 1), if_given(x, rows), *parameters, None,
                *no_tensors,
            ]))  # fmt: skip
        return found


# ---- the warning about the reference ---------------------------------------------------------------------------------

_may_warn = problem is None and _choice == "auto"  # import has warned of a problem; a choice by hand needs no warning


def has_kernels_for(device_type: str) -> bool:
    """Whether the extension has kernels for tensors on this type of device."""
    return device_type in _KERNEL_DEVICES


def _levels_to_user() -> int:
    """stacklevel, in the caller's frame, of the first caller outside this package and torch.nn."""
    ours = (os.path.dirname(__file__), os.path.dirname(torch.nn.__file__))
    frame, levels = sys._getframe(1), 1
    while frame.f_back and frame.f_code.co_filename.startswith(ours):
        frame, levels = frame.f_back, levels + 1
    return levels


def warn_reference(device_type: str) -> None:
    """Warn, once per process, that tensors on `device_type` run on the PyTorch reference: why, and what mends it."""
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
