"""LayerNorm and RMSNorm as functions: the public calls, the choice of path, and the one autograd.Function.

Four paths, the first three on the same kernels. Plain eager mode: one call into the extension, which has its own
autograd node (csrc/autograd.cpp). What that call hands back, for an argument of a type it does not read: NormFunction.
Where something must see a call that it can name (torch.compile, torch.export, dispatch modes, fake tensors, DTensor):
the operator torch.ops.fused_layernorm.norm_forward. Where nothing of ours can run (torch.func, forward-mode AD, other
subclasses, torch.jit.trace, no kernels for the device): PyTorch operations.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from . import _ops, reference

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def fused_layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    normalized_shape: int | Sequence[int] | None = None,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    r"""Layer normalization (Ba, Kiros and Hinton, 2016) in one pass over memory, forward and backward.

    .. math:: y = \frac{x - \mathrm{mean}(x)}{\sqrt{\mathrm{var}(x) + \epsilon}} \cdot (w + o) + b

    with mean and (biased) variance over the last dimensions, those of `normalized_shape`.

    Args:
        x: input of shape ``[*, *normalized_shape]``; float16, bfloat16, float32 or float64. Rows may be strided; they
            are read in place where the elements of one row are adjacent (on CUDA, rows made of whole 16 bytes also must
            begin at multiples of 16 bytes), else copied first.
        weight: scale :math:`w` of shape ``normalized_shape``, of x's dtype or float32; None stands for 1.
        bias: shift :math:`b` of shape ``normalized_shape``, of x's dtype or float32; None stands for 0.
        eps: added to the variance.
        normalized_shape: an int or a sequence; taken from weight (or bias) when they are given.
        weight_offset: the constant :math:`o`, added to weight in the accumulation type (1.0 for weights stored as
            ``w - 1``, as in Gemma).
        out_dtype: dtype of the result; x's dtype when None.

    Returns:
        y of x's shape, contiguous, of x's dtype or `out_dtype`, also under autocast.

    Statistics and sums are kept in float32 (float64 for float64 x) and do not cancel where ``|mean| >> sigma``.
    Results and gradients are the same bits on every run, and a row's result does not depend on the rows beside it.
    Gradients have the dtype of what they are the gradient of. Differentiable any number of times. Under
    ``torch.compile`` the call is one operator in the graph; in ``torch.func`` transforms and forward-mode AD the same
    formula runs as PyTorch operations.

    Raises:
        TypeError: an argument that is not a tensor, or is of a dtype or layout listed nowhere above.
        RuntimeError: shapes or devices that do not match.
        ValueError: no `normalized_shape` to be had, or `weight_offset` without weight.
    """
    if not is_dynamo_compiling():
        y = _ops.norm(x, weight, bias, normalized_shape, eps, weight_offset, False, out_dtype)
        if y is not NotImplemented:
            return y
    return _norm(x, weight, bias, normalized_shape, eps, weight_offset, False, out_dtype)


def fused_rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = None,
    *,
    normalized_shape: int | Sequence[int] | None = None,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    r"""Root mean square normalization (Zhang and Sennrich, 2019) in one pass over memory, forward and backward.

    .. math:: y = \frac{x}{\sqrt{\mathrm{mean}(x^2) + \epsilon}} \cdot (w + o) + b

    Args:
        eps: added to the mean square. None means, as in `torch.nn.functional.rms_norm`, the machine epsilon of the
            type the statistics are kept in: float32's (1.19e-7), or float64's for float64 x.

    The other arguments, the result, the guarantees and the errors are those of `fused_layer_norm`.
    """
    if not is_dynamo_compiling():
        y = _ops.norm(x, weight, bias, normalized_shape, eps, weight_offset, True, out_dtype)
        if y is not NotImplemented:
            return y
    if eps is None and isinstance(x, Tensor):
        eps = torch.finfo(reference.accumulation_dtype(x.dtype)).eps
    return _norm(x, weight, bias, normalized_shape, eps, weight_offset, True, out_dtype)


def _norm(x, weight, bias, normalized_shape, eps, weight_offset, is_rms_norm, out_dtype):
    """The calls that are not plain eager mode."""
    if isinstance(normalized_shape, int):
        normalized_shape = (normalized_shape,)
    if _takes_kernel(x, weight, bias):
        try:
            return NormFunction.apply(x, weight, bias, normalized_shape, eps, weight_offset, is_rms_norm, out_dtype)
        except TypeError:  # pybind11 lists every argument; say which one is wrong
            reference.check_norm_arguments(x, weight, bias, normalized_shape, weight_offset, out_dtype)
            raise
    shape = reference.check_norm_arguments(x, weight, bias, normalized_shape, weight_offset, out_dtype)
    if _takes_operator(x, weight, bias):
        return _ops.norm_operator(x, weight, bias, len(shape), eps, weight_offset, is_rms_norm, out_dtype)[0]
    return reference.norm(x, weight, bias, shape, eps, weight_offset, is_rms_norm, out_dtype)


def _takes_kernel(x, weight, bias) -> bool:
    """Whether the kernels may be called directly."""
    if torch.compiler.is_compiling():
        return False
    if _ops.takes_kernel(x, weight, bias):
        return True
    if type(x) in _PLAIN_TYPES and x.device.type in ("cpu", "cuda") and not _ops.has_kernels_for(x.device.type):
        _ops.warn_reference(x.device.type)
    return False


def _takes_operator(x, weight, bias) -> bool:
    """Whether the operator may be called, where the kernels may not; else the call is made of PyTorch operations."""
    if _ops.norm_operator is None or not _ops.has_kernels_for(x.device.type):
        return False
    # The operator has neither a batching rule nor a forward derivative; a TorchScript trace holds no Python.
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0 or torch.jit.is_tracing():
        return False
    return all(tensor is None or _ops.operator_takes_type(type(tensor)) for tensor in (x, weight, bias))


def _differentiable_backward(grad_output, x, weight, normalized_ndim, eps, weight_offset, is_rms_norm, bias_dtype):
    """Gradients of x, weight and bias by PyTorch operations, for both autograd nodes: under create_graph, and for
    tensors that the kernels cannot take."""
    shape = x.shape[x.dim() - normalized_ndim :]
    return reference.norm_backward(grad_output, x, weight, shape, eps, weight_offset, is_rms_norm, bias_dtype)


_ops.set_differentiable_backward(_differentiable_backward)


class NormFunction(torch.autograd.Function):
    """Autograd of both norms on the compiled kernels; x, weight and the rows' statistics are saved."""

    @staticmethod
    def forward(ctx, x, weight, bias, normalized_shape, eps, weight_offset, is_rms_norm, out_dtype):
        y, stats = _ops.norm_forward(
            x, weight, bias, normalized_shape, eps, weight_offset, is_rms_norm, out_dtype, True
        )
        ctx.save_for_backward(x, weight, stats)
        ctx.set_materialize_grads(False)
        ctx.normalized_ndim = len(normalized_shape or (bias if weight is None else weight).shape)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.eps, ctx.weight_offset, ctx.is_rms_norm = eps, weight_offset, is_rms_norm
        return y

    @staticmethod
    def backward(ctx, grad_output):
        if grad_output is None:
            return (None,) * 8
        x, weight, stats = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        bias_dtype = ctx.bias_dtype if wants_bias else None
        if torch.is_grad_enabled() or not _takes_kernel(grad_output, x, weight):
            grad_x, grad_weight, grad_bias = _differentiable_backward(
                grad_output, x, weight, ctx.normalized_ndim, ctx.eps, ctx.weight_offset, ctx.is_rms_norm, bias_dtype
            )
            grad_x, grad_weight = grad_x if wants_x else None, grad_weight if wants_weight else None
        else:
            grad_x, grad_weight, grad_bias = _ops.norm_backward(
                grad_output, x, weight, stats, ctx.normalized_ndim, ctx.weight_offset, ctx.is_rms_norm,
                wants_x, wants_weight, bias_dtype,
            )  # fmt: skip
        return grad_x, grad_weight, grad_bias, None, None, None, None, None
