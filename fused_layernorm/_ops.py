"""The operators in Python: the path of a call, fake implementations, DTensor's sharding rules."""

import functools
import math
import sys

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad

from . import _backend, reference
from ._backend import extension


def not_implemented(*arguments, **options):
    return NotImplemented


# norm(x, residual, gate, weight, bias, **options) is the call of plain eager mode. It passes calls that it does not
# take to the fallback (functional._norm); try_norm returns NotImplemented instead. Both are bound directly, because a
# Python wrapper would cost host time on every call.
calls = extension or _backend.library_module
if calls:
    norm, try_norm, takes_kernel = calls.norm, calls.try_norm, calls.takes_kernel
else:
    norm = try_norm = not_implemented

    def takes_kernel(*tensors) -> bool:
        """Whether NormFunction takes these tensors; the dispatcher handles all other types."""
        return _backend.library is not None and all(t is None or type(t) in _PLAIN_TYPES for t in tensors)


if extension:
    y_tells_x = extension.y_tells_x
    if "cuda" not in _backend.KERNEL_DEVICES:
        extension.refuse_cuda_tensors()
else:

    def y_tells_x(*arguments) -> bool:
        return False


def set_callbacks(fallback, record) -> None:
    """fallback: has the signature of norm(), for calls that norm() does not take. record: calls NormFunction, the node
    without an extension."""
    global norm
    if extension:
        extension.set_callbacks(fallback, reference.norm_backward, _watch_optimizers)
    elif calls:
        operators = {op._opname: op for op in (norm_forward, norm_backward, sandwich_norm)}
        calls.setup(torch.Tensor, torch.nn.Parameter, torch.Tensor.is_neg, is_plain_eager, record, fallback, operators,
                    reference.DTYPES, "cuda" in _backend.KERNEL_DEVICES)  # fmt: skip
    else:
        norm = fallback


def _watch_optimizers() -> None:
    """Count optimizer steps: mixed precision writes weights through .data, which no version counter shows."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(lambda *_: extension.count_optimizer_step())


# ---- the path of a call ----------------------------------------------------------------------------------------------


def is_torchs(x) -> bool:
    """Whether PyTorch's own norm computes a plain norm of x: for nested tensors, and in torch.jit.trace and
    torch.onnx.export, whose consumers support no other norm."""
    if torch.compiler.is_dynamo_compiling():
        return False
    return x.is_nested or torch.jit.is_tracing() or torch.onnx.is_in_onnx_export()


def path_of(x, *tensors) -> str:
    """The path of a call on these tensors, unless PyTorch's own norm computes it (is_torchs). None is ignored.

    "kernel": the extension's call with its node, or NormFunction. "operator": for torch.compile, export, dispatch
    modes, fake tensors and DTensor, which need a named operator. "reference": torch.func, forward-mode AD, other
    subclasses, traces, devices without kernels.
    """
    compiling = torch.compiler.is_dynamo_compiling()
    if not compiling and torch.jit.is_tracing():
        return "reference"
    if x.device.type not in _backend.KERNEL_DEVICES:
        if not compiling and type(x) in _PLAIN_TYPES and x.device.type in ("cpu", "cuda"):
            _backend.warn_reference(x.device.type)
        return "reference"
    # The operators have neither batching rules nor forward derivatives
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return "reference"
    if not torch.compiler.is_compiling() and takes_kernel(x, *tensors):
        return "kernel"
    return "operator" if _operator_takes(*map(type, (x, *tensors))) else "reference"


_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def _operator_takes(*classes: type) -> bool:
    """Whether the operators take tensors of these classes. The first DTensor registers the sharding rules."""
    others = {*classes} - {*_PLAIN_TYPES, FakeTensor, FunctionalTensor, type(None)}
    if any(map(_is_dtensor_class, others)):
        _register_sharding_rules()
    return all(map(_is_dtensor_class, others))


def _is_dtensor_class(cls: type) -> bool:
    distributed = sys.modules.get("torch.distributed.tensor")  # not imported here: that takes as long as torch itself
    return distributed is not None and issubclass(cls, distributed.DTensor)


def is_dtensor(x: torch.Tensor) -> bool:
    return _is_dtensor_class(type(x))


# As torch.compiler.assume_constant_result, without importing torch._dynamo, which takes seconds: Dynamo calls these
# functions during tracing instead of tracing into them.
_operator_takes._dynamo_marked_constant = is_dtensor._dynamo_marked_constant = True


def shape_of_segments(x, normalized_ndim: int, *parameters) -> tuple:
    """The smallest shape that the kernels take for weight, bias and gate and to which all parameters can be expanded:
    x's leading dimensions, with 1 for the last ones along which values are shared. Parameters have as many dimensions
    as x; None is ignored."""
    leading = x.dim() - normalized_ndim
    split = leading
    while split and all(t is None or t.shape[split - 1] == 1 for t in parameters):
        split -= 1
    return (*x.shape[:split], *[1] * (leading - split), *x.shape[leading:])


# ---- the operators (csrc/torch/library.cpp) ------------------------------------------------------------------------

if extension or _backend.library:
    norm_forward = torch.ops.fused_layernorm.norm_forward.default
    norm_backward = torch.ops.fused_layernorm.norm_backward.default

    @torch.library.register_fake(norm_forward)
    def _(x, residual, gate, weight, bias, philox, *given):
        if "torch._inductor.config" in sys.modules:
            from .integrations import inductor

            inductor.install()
        options = reference.Options(*given)
        z_dtype = reference.z_dtype(residual, options)
        shape = x.shape[x.dim() - options.normalized_ndim :]
        own = [t if t is not None and (options.per_head or t.dim() == len(shape)) else None for t in (weight, bias)]
        offset = options.weight_offset if own[0] is weight else 0.0
        reference.check_norm_arguments(x, *own, shape, options.eps, offset, options.out_dtype)
        if gate is not None and z_dtype is None:
            reference.check_gate(x, gate)
        rows = x.shape[: x.dim() - len(shape)]
        return (
            x.new_empty(x.shape, dtype=reference.y_dtype(x, residual, options)),
            x.new_empty(0 if z_dtype is None else x.shape, dtype=z_dtype or x.dtype),
            x.new_empty((1 if options.is_rms_norm else 3, *rows), dtype=reference.accumulation_dtype(x.dtype)),
        )

    @torch.library.register_fake(norm_backward)
    def _(grad_output, grad_residual_out, z, stats, x, gate, weight, bias, philox, *given):
        options, wanted = _split(given)
        likes = (bias, weight, gate if options.residual_dtype else None)  # the gate of a gated norm has x's shape
        of_bias = next((t.shape for t in likes if t is not None), z.shape[z.dim() - options.normalized_ndim :])

        def gradient(is_wanted, shape, dtype):
            return z.new_empty(shape if is_wanted else 0, dtype=dtype if is_wanted else z.dtype)

        return (
            gradient(wanted.wants_x, z.shape, wanted.x_dtype),
            gradient(_has_own_residual_gradient(given, philox, gate), z.shape, wanted.grad_residual_dtype),
            gradient(wanted.wants_gate, None if gate is None else gate.shape, None if gate is None else gate.dtype),
            gradient(wanted.grad_weight_dtype, None if weight is None else weight.shape, wanted.grad_weight_dtype),
            gradient(wanted.grad_bias_dtype, of_bias, wanted.grad_bias_dtype),
        )

    sandwich_norm = torch.ops.fused_layernorm.sandwich_norm.default

    @torch.library.register_fake(sandwich_norm)
    def _(x, residual, weight, next_weight, normalized_ndim, *given):
        stats = x.new_empty((1, *x.shape[: x.dim() - normalized_ndim]), dtype=reference.accumulation_dtype(x.dtype))
        return x.new_empty(x.shape), residual.new_empty(x.shape), stats, torch.empty_like(stats)

    norm_quant = torch.ops.fused_layernorm.norm_quant.default

    @torch.library.register_fake(norm_quant)
    def _(x, residual, weight, bias, scale, normalized_ndim, eps, weight_offset, is_rms_norm, residual_dtype, dtype,
          group_size, column_major_scales, return_norm):  # fmt: skip
        leading, row = x.shape[: x.dim() - normalized_ndim], x.shape[x.dim() - normalized_ndim :]
        groups = math.prod(row) // group_size if group_size else 1
        shape = (groups, *leading) if column_major_scales else (*leading, groups)
        has_z = residual is not None
        return (
            x.new_empty(x.shape, dtype=dtype),
            x.new_empty(0) if scale is not None else x.new_empty(shape, dtype=torch.float32),
            x.new_empty(x.shape if return_norm else 0),
            x.new_empty(x.shape if has_z else 0, dtype=(residual_dtype or residual.dtype) if has_z else x.dtype),
        )

    @torch.library.register_fake(torch.ops.fused_layernorm.dropout_mask.default)
    def _(philox, rows, hidden_size, dropout_p):
        return philox.new_empty((rows, hidden_size), dtype=torch.bool)

else:
    norm_forward = norm_backward = sandwich_norm = norm_quant = None


def _split(given):
    count = len(reference.Options._fields)
    return reference.Options(*given[:count]), reference.Wanted(*given[count:])


def _has_own_residual_gradient(given, philox, gate) -> bool:
    """Whether residual's gradient is wanted and differs from x's gradient."""
    options, wanted = _split(given)
    if wanted.grad_residual_dtype is None:
        return False
    drops_x = philox is not None and options.dropout_p > 0 and not options.drops_y
    return drops_x or gate is not None or not wanted.wants_x or wanted.grad_residual_dtype != wanted.x_dtype


def is_plain_eager() -> bool:
    """Whether no dispatch mode, transform or tracer is active."""
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and torch._C._get_tracing_state() is None
        and forward_ad._current_level < 0
        and not torch._C._are_functorch_transforms_active()
    )


def call_norm_forward(*arguments):
    """norm_forward without the operator's autograd."""
    if calls:
        return calls.call_norm_forward(*arguments, 0b111)
    with torch._C._AutoDispatchBelowAutograd():
        return norm_forward(*arguments)


def call_sandwich_norm(*arguments, used=0b1111):
    """sandwich_norm, for which the dispatcher has no autograd. Bit i of `used` says whether result i is read."""
    if calls:
        return calls.call_sandwich_norm(*arguments, used)
    with torch._C._AutoDispatchBelowAutograd():
        return sandwich_norm(*arguments)


def call_norm_backward(*arguments):
    """The five gradients of norm_backward without the operator's autograd; None for unwanted ones."""
    if torch.compiler.is_dynamo_compiling():  # compiled autograd
        found = list(norm_backward(*arguments))
    elif calls:
        found = list(calls.call_norm_backward(*arguments, 0))
    else:
        with torch._C._AutoDispatchBelowAutograd():
            found = list(norm_backward(*arguments))
    wants_x, wants_gate, residual_dtype, weight_dtype, bias_dtype = arguments[-5:]
    if residual_dtype is not None and not _has_own_residual_gradient(arguments[9:], arguments[8], arguments[5]):
        found[1] = found[0]
    wants = (wants_x, residual_dtype, wants_gate, weight_dtype, bias_dtype)
    return tuple(t if wants_it else None for t, wants_it in zip(found, wants, strict=True))


def takes_quantized(x, residual, z_dtype, hidden_size: int, group_size: int, has_segments: bool) -> bool:
    """Whether norm_quant takes a call of path "kernel" or "operator" (NormQuantParams in csrc/norm_params.h)."""
    if x.device.type != "cuda" or is_dtensor(x):
        return False
    if hidden_size % (16 // x.dtype.itemsize) or (residual is not None and residual.dtype != z_dtype):
        return False
    if group_size != hidden_size and group_size not in (32, 64, 128):
        return False
    if has_segments and not torch.compiler.is_compiling() and x.numel() >= 2**31 * hidden_size:
        return False  # kernels count rows of segments in 32 bits
    return hidden_size * (z_dtype or x.dtype).itemsize <= 65536  # of z


def _has_clusters(device: torch.device) -> bool:
    return _capability(device) >= (9, 0)


_has_clusters._dynamo_marked_constant = True


@functools.cache
def _capability(device: torch.device) -> tuple:
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (0, 0)


def dropout_mask(philox, rows: int, hidden_size: int, dropout_p: float):
    """The elements that a call with this philox and dropout_p keeps: bool, [rows, hidden_size]."""
    if philox.device.type in _backend.KERNEL_DEVICES and not torch._C._are_functorch_transforms_active():
        return torch.ops.fused_layernorm.dropout_mask(philox, rows, hidden_size, dropout_p)
    return reference.dropout_mask(philox, rows, hidden_size, dropout_p)


@functools.cache
def _register_sharding_rules() -> None:
    """Register DTensor's sharding rules for the operators. Tensors with x's rows, such as the gate of a gated norm, are
    sharded along a leading dimension; so are parameters with separate values along it. Other tensors are replicated.
    With dropout all tensors are replicated, because the mask depends on the row's index in the whole tensor."""
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    def if_given(tensor, placement):
        return None if tensor is None else placement

    def of_parameter(parameter, z, dim, is_of_last_dims):
        if parameter is None or parameter.shape == ():
            return None
        if is_of_last_dims:  # of z, without 1 for any
            own = dim - (len(z.shape) - len(parameter.shape))
            return Shard(own) if own >= 0 else Replicate()
        has_own = len(parameter.shape) == len(z.shape) and parameter.shape[dim] == z.shape[dim] != 1
        return Shard(dim) if has_own else Replicate()

    def of_parameters(gate, weight, bias, z, dim, options, is_gated):
        return [of_parameter(t, z, dim, options.per_head or (is_gated and t is gate)) for t in (gate, weight, bias)]

    def dims_to_split(z, options, philox):
        return () if philox is not None else range(len(z.shape) - options.normalized_ndim)

    @register_sharding(norm_forward)
    def _(x, residual, gate, weight, bias, philox, *given):
        options, no_tensors = reference.Options(*given), [None] * len(given)
        whole = [Replicate(), *(if_given(t, Replicate()) for t in (residual, gate, weight, bias, philox)), *no_tensors]
        found = [([Replicate()] * 3, whole)]
        for dim in dims_to_split(x, options, philox):
            rows = Shard(dim)
            has_z = options.residual_dtype is not None or (residual is not None and not options.adds_y)
            is_gated = gate is not None and not has_z
            parameters = of_parameters(gate, weight, bias, x, dim, options, is_gated)
            found.append((
                [rows, rows if has_z else Replicate(), Shard(dim + 1)],
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
            is_gated = gate is not None and options.residual_dtype is None
            parameters = of_parameters(gate, weight, bias, z, dim, options, is_gated)
            of_bias = next((p for p in parameters[is_gated:][::-1] if p is not None), Replicate())
            sums = [Partial("sum") if p == Replicate() else p for p in (parameters[0], parameters[1], of_bias)]
            gradients = [placement if is_wanted else Replicate()  # else an empty tensor, the same everywhere
                         for placement, is_wanted in zip((rows, rows, *sums), wants, strict=True)]  # fmt: skip
            found.append((gradients, [
                rows, if_given(grad_residual_out, rows), rows, Shard(dim + 1), if_given(x, rows), *parameters, None,
                *no_tensors,
            ]))  # fmt: skip
        return found
