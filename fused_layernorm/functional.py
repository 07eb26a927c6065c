"""LayerNorm and RMSNorm as functions: the public calls, the choice of path, and the one autograd.Function.

Four paths, the first three on the same kernels. Plain eager mode: one call into the extension, which has its own
autograd node (csrc/autograd.cpp). What that call hands back, for an argument of a type it does not read: NormFunction.
Where something must see a call that it can name (torch.compile, torch.export, dispatch modes, fake tensors, DTensor):
the operator torch.ops.fused_layernorm.norm_forward. Where nothing of ours can run (torch.func, forward-mode AD, other
subclasses, torch.jit.trace, no kernels for the device): PyTorch operations.

What surrounds a norm (residual, dropout, activation) is a stage of the kernels where they have it (_ops.has_stage), and
otherwise PyTorch operations around one of the paths above, by the same formulas (reference.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from . import _ops, reference

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_ACTIVATIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    "silu": F.silu,
}


def fused_layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    normalized_shape: int | Sequence[int] | None = None,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
    stats_grad: bool = True,
    activation: str | None = None,
    dropout_p: float = 0.0,
    training: bool = True,
) -> Tensor:
    r"""Layer normalization (Ba, Kiros and Hinton, 2016) in one pass over memory, forward and backward.

    .. math:: y = \frac{x - \mathrm{mean}(x)}{\sqrt{\mathrm{var}(x) + \epsilon}} \cdot (w + o) + b

    with mean and (biased) variance over the last dimensions, those of `normalized_shape`.

    Args:
        x: input of shape ``[*, *normalized_shape]``; float16, bfloat16, float32 or float64. Rows may be strided; they
            are read in place where the elements of one row are adjacent.
        weight: scale :math:`w` of shape ``normalized_shape``, of x's dtype or float32; None stands for 1.
        bias: shift :math:`b` of shape ``normalized_shape``, of x's dtype or float32; None stands for 0.
        eps: added to the variance.
        normalized_shape: an int or a sequence; taken from weight (or bias) when they are given.
        weight_offset: the constant :math:`o`, added to weight in the accumulation type (1.0 for weights stored as
            ``w - 1``, as in Gemma).
        out_dtype: dtype of the result; x's dtype when None.
        stats_grad: False makes mean and variance constants in backward, as in layer-wise relevance propagation:
            ``grad_x = (w + o) * grad_y / sqrt(var + eps)``.
        activation: "relu", "gelu", "gelu_tanh" (gelu by its tanh formula) or "silu", applied to y in the accumulation
            type.
        dropout_p: with `training`, the probability that an element of y (after the activation) becomes 0; the others
            are divided by ``1 - dropout_p``. See `fused_add_layer_norm`.

    Returns:
        y of x's shape, contiguous, of x's dtype or `out_dtype`, also under autocast.

    Statistics and sums are kept in float32 (float64 for float64 x) and do not cancel where ``|mean| >> sigma``.
    Results and gradients are the same bits on every run, and a row's result does not depend on the rows beside it.
    Gradients have the dtype of what they are the gradient of. Differentiable any number of times. Under
    ``torch.compile`` the call is one operator in the graph; in ``torch.func`` transforms and forward-mode AD the same
    formula runs as PyTorch operations. Activation and dropout are, so far, PyTorch operations behind the norm.

    Raises:
        TypeError: an argument that is not a tensor, or is of a dtype or layout listed nowhere above.
        RuntimeError: shapes or devices that do not match.
        ValueError: no `normalized_shape` to be had, `weight_offset` without weight, an `activation` not listed above,
            or `dropout_p` outside [0, 1].
    """
    if not (activation or dropout_p or is_dynamo_compiling()):
        y = _ops.norm(x, weight, bias, normalized_shape, eps, weight_offset, False, out_dtype, stats_grad)
        if y is not NotImplemented:
            return y
    return _norm_and_more(x, weight, bias, normalized_shape, eps, weight_offset, False, out_dtype, stats_grad,
                          activation, dropout_p, training)  # fmt: skip


def fused_rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = None,
    *,
    normalized_shape: int | Sequence[int] | None = None,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
    stats_grad: bool = True,
    activation: str | None = None,
    dropout_p: float = 0.0,
    training: bool = True,
) -> Tensor:
    r"""Root mean square normalization (Zhang and Sennrich, 2019) in one pass over memory, forward and backward.

    .. math:: y = \frac{x}{\sqrt{\mathrm{mean}(x^2) + \epsilon}} \cdot (w + o) + b

    Args:
        eps: added to the mean square. None means, as in `torch.nn.functional.rms_norm`, the machine epsilon of the
            type the statistics are kept in: float32's (1.19e-7), or float64's for float64 x.

    The other arguments, the result, the guarantees and the errors are those of `fused_layer_norm`.
    """
    if not (activation or dropout_p or is_dynamo_compiling()):
        y = _ops.norm(x, weight, bias, normalized_shape, eps, weight_offset, True, out_dtype, stats_grad)
        if y is not NotImplemented:
            return y
    return _norm_and_more(x, weight, bias, normalized_shape, _rms_eps(eps, x), weight_offset, True, out_dtype,
                          stats_grad, activation, dropout_p, training)  # fmt: skip


def fused_add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    dropout_p: float = 0.0,
    training: bool = True,
    residual_dtype: torch.dtype | None = None,
    normalized_shape: int | Sequence[int] | None = None,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
    stats_grad: bool = True,
    activation: str | None = None,
    return_dropout_mask: bool = False,
) -> tuple[Tensor, ...]:
    r"""Dropout, residual addition and layer normalization in one pass over memory, forward and backward.

    .. math:: z = \mathrm{residual} + \mathrm{dropout}(x), \qquad y = \mathrm{LayerNorm}(z)

    A pre-norm block chains its calls: ``residual_out`` of one is the residual of the next. A post-norm block uses y
    alone; what it does not use costs nothing in backward.

    Args:
        residual: of x's shape, of x's dtype or float32; None stands for 0 and starts a stream.
        dropout_p: with `training`, the probability that an element of x becomes 0; the others are divided by
            ``1 - dropout_p``. No mask is stored: which elements remain is a function of 128 bits, drawn from torch's
            generator of x's device, and of row and column, which backward asks again. So `torch.manual_seed` repeats
            a call, activation checkpointing recomputes it, and a CUDA graph draws anew at each replay.
        residual_dtype: the dtype of residual_out, x's or float32; that of residual (of x without one) when None. A
            float32 stream beside 16-bit x is never rounded to 16 bits.
        return_dropout_mask: also return which elements of x were kept.

    Returns:
        ``(y, residual_out)``: y as of `fused_layer_norm`; residual_out is z, rounded once to its dtype, before the
        statistics are taken: the norm is that of the tensor that is returned. Both contiguous new memory. With
        `return_dropout_mask` ``(y, residual_out, mask)``, mask bool of x's shape.

    The other arguments, the guarantees and the errors are those of `fused_layer_norm`; gradients flow to residual too.
    """
    return _add_norm(x, residual, weight, bias, eps, False, dropout_p, training, residual_dtype, normalized_shape,
                     weight_offset, out_dtype, stats_grad, activation, return_dropout_mask)  # fmt: skip


def fused_add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = None,
    *,
    dropout_p: float = 0.0,
    training: bool = True,
    residual_dtype: torch.dtype | None = None,
    normalized_shape: int | Sequence[int] | None = None,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
    stats_grad: bool = True,
    activation: str | None = None,
    return_dropout_mask: bool = False,
) -> tuple[Tensor, ...]:
    r"""Dropout, residual addition and root mean square normalization in one pass over memory, forward and backward.

    .. math:: z = \mathrm{residual} + \mathrm{dropout}(x), \qquad y = \mathrm{RMSNorm}(z)

    Arguments and result are those of `fused_add_layer_norm`, eps is that of `fused_rms_norm`.
    """
    return _add_norm(x, residual, weight, bias, _rms_eps(eps, x), True, dropout_p, training, residual_dtype,
                     normalized_shape, weight_offset, out_dtype, stats_grad, activation,
                     return_dropout_mask)  # fmt: skip


def _rms_eps(eps, x):
    if eps is None and isinstance(x, Tensor):
        return torch.finfo(reference.accumulation_dtype(x.dtype)).eps
    return eps


def _norm(x, weight, bias, normalized_shape, eps, weight_offset, is_rms_norm, out_dtype, stats_grad):
    """The calls that are not plain eager mode."""
    if isinstance(normalized_shape, int):
        normalized_shape = (normalized_shape,)
    has_stage = stats_grad or (isinstance(x, Tensor) and _ops.has_stage("frozen_stats", x.device.type))
    if has_stage and _takes_kernel(x, weight, bias):
        try:
            return NormFunction.apply(
                x, weight, bias, normalized_shape, eps, weight_offset, is_rms_norm, out_dtype, stats_grad
            )
        except TypeError:  # pybind11 lists every argument; say which one is wrong
            reference.check_norm_arguments(x, weight, bias, normalized_shape, weight_offset, out_dtype)
            raise
    shape = reference.check_norm_arguments(x, weight, bias, normalized_shape, weight_offset, out_dtype)
    options = (eps, weight_offset, is_rms_norm, out_dtype)
    if has_stage and _takes_operator(x, weight, bias):
        frozen = () if stats_grad else (False,)  # defaults are left out: graphs stay loadable by older versions
        return _ops.norm_operator(x, weight, bias, len(shape), *options, *frozen)[0]
    return reference.norm(x, weight, bias, shape, *options, stats_grad)


# ---- around the norm -------------------------------------------------------------------------------------------------


def _norm_and_more(
    x, weight, bias, normalized_shape, eps, weight_offset, is_rms_norm, out_dtype, stats_grad, activation, dropout_p,
    training,
):  # fmt: skip
    """A norm, and what is applied to its result."""
    if not activation and not dropout_p:
        return _norm(x, weight, bias, normalized_shape, eps, weight_offset, is_rms_norm, out_dtype, stats_grad)
    shape = reference.check_norm_arguments(x, weight, bias, _as_shape(normalized_shape), weight_offset, out_dtype)
    reference.check_dropout_p(dropout_p)
    wide = reference.accumulation_dtype(x.dtype)
    y = _norm(x, weight, bias, shape, eps, weight_offset, is_rms_norm, wide, stats_grad)
    y = _activate(y, activation)
    dtype = out_dtype or x.dtype
    if training and dropout_p:
        return _dropout(y, _draw_philox(x), len(shape), dropout_p, dtype)
    return y.to(dtype)


def _add_norm(
    x, residual, weight, bias, eps, is_rms_norm, dropout_p, training, residual_dtype, normalized_shape, weight_offset,
    out_dtype, stats_grad, activation, return_dropout_mask,
):  # fmt: skip
    shape = reference.check_norm_arguments(x, weight, bias, _as_shape(normalized_shape), weight_offset, out_dtype)
    z_dtype = reference.check_add_arguments(x, residual, residual_dtype, dropout_p)
    philox = _draw_philox(x) if training and dropout_p else None
    y_dtype = reference.accumulation_dtype(x.dtype) if activation else out_dtype or x.dtype
    if _ops.has_stage("add", x.device.type) and _takes_operator(x, weight, bias, residual, distributed=False):
        y, z, _ = _ops.add_norm_operator(x, residual, weight, bias, philox, len(shape), eps, weight_offset,
                                         is_rms_norm, y_dtype, stats_grad, dropout_p if training else 0.0,
                                         z_dtype)  # fmt: skip
    else:
        wide = reference.accumulation_dtype(x.dtype)
        dropped = x if philox is None else _dropout(x, philox, len(shape), dropout_p, wide)
        z = reference.add(dropped, residual, z_dtype)
        if z.dtype != x.dtype:  # of z's dtype or float32
            weight, bias = (None if t is None else t.to(z.dtype) for t in (weight, bias))
        y = _norm(z, weight, bias, shape, eps, weight_offset, is_rms_norm, y_dtype, stats_grad)
    if activation:
        y = _activate(y, activation).to(out_dtype or x.dtype)
    if not return_dropout_mask:
        return y, z
    if philox is None:
        return y, z, torch.ones_like(x, dtype=torch.bool, memory_format=torch.contiguous_format)
    return y, z, _dropout_mask(x, philox, len(shape), dropout_p)


def _as_shape(normalized_shape):
    return (normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape


def _activate(y, activation):
    if not activation:
        return y
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(_ACTIVATIONS)}, or None, got {activation!r}")
    return _ACTIVATIONS[activation](y)


def _draw_philox(x):
    """The bits that decide what a call drops: (seed, offset). torch's own operation draws them, so that seeds,
    checkpointing, CUDA graphs and torch.compile see the draw, and what they decide is a function of them."""
    return torch.randint(torch.iinfo(torch.int64).max, (2,), dtype=torch.int64, device=x.device)


def _dropout_mask(x, philox, normalized_ndim, dropout_p):
    leading = x.dim() - normalized_ndim
    rows, hidden_size = math.prod(x.shape[:leading]), math.prod(x.shape[leading:])
    return _ops.dropout_mask(philox, rows, hidden_size, dropout_p).view(x.shape)


def _dropout(x, philox, normalized_ndim, dropout_p, dtype):
    """Dropout as an operation of its own, result of `dtype`: where no kernel has it as a stage."""
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return reference.dropout(x, _dropout_mask(x, philox, normalized_ndim, dropout_p), dropout_p, dtype)
    return DropoutFunction.apply(x, philox, normalized_ndim, dropout_p, dtype)


class DropoutFunction(torch.autograd.Function):
    """Dropout that makes its mask again in backward. It is linear, and its own adjoint."""

    @staticmethod
    def forward(ctx, x, philox, normalized_ndim, dropout_p, dtype):
        ctx.save_for_backward(philox)
        ctx.set_materialize_grads(False)
        ctx.normalized_ndim, ctx.dropout_p, ctx.x_dtype = normalized_ndim, dropout_p, x.dtype
        return reference.dropout(x, _dropout_mask(x, philox, normalized_ndim, dropout_p), dropout_p, dtype)

    @staticmethod
    def backward(ctx, grad_output):
        if grad_output is None:
            return (None,) * 5
        (philox,) = ctx.saved_tensors
        return _dropout(grad_output, philox, ctx.normalized_ndim, ctx.dropout_p, ctx.x_dtype), None, None, None, None


# ---- the choice of path ----------------------------------------------------------------------------------------------


def _takes_kernel(x, weight, bias) -> bool:
    """Whether the kernels may be called directly."""
    if torch.compiler.is_compiling():
        return False
    if _ops.takes_kernel(x, weight, bias):
        return True
    if type(x) in _PLAIN_TYPES and x.device.type in ("cpu", "cuda") and not _ops.has_kernels_for(x.device.type):
        _ops.warn_reference(x.device.type)
    return False


def _takes_operator(x, *tensors, distributed=True) -> bool:
    """Whether an operator may be called, where the kernels may not; else the call is made of PyTorch operations.
    `distributed`: whether the operator has sharding rules for DTensor."""
    if _ops.norm_operator is None or not _ops.has_kernels_for(x.device.type):
        return False
    # The operator has neither a batching rule nor a forward derivative; a TorchScript trace holds no Python.
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0 or torch.jit.is_tracing():
        return False
    return all(tensor is None or _ops.operator_takes_type(type(tensor), distributed) for tensor in (x, *tensors))


def _differentiable_backward(
    grad_output, x, weight, normalized_ndim, eps, weight_offset, is_rms_norm, bias_dtype, stats_grad
):
    """Gradients of x, weight and bias by PyTorch operations, for both autograd nodes: under create_graph, and for
    tensors that the kernels cannot take."""
    shape = x.shape[x.dim() - normalized_ndim :]
    return reference.norm_backward(
        grad_output, x, weight, shape, eps, weight_offset, is_rms_norm, bias_dtype, stats_grad
    )


_ops.set_differentiable_backward(_differentiable_backward)


class NormFunction(torch.autograd.Function):
    """Autograd of both norms on the compiled kernels; x, weight and the rows' statistics are saved."""

    @staticmethod
    def forward(ctx, x, weight, bias, normalized_shape, eps, weight_offset, is_rms_norm, out_dtype, stats_grad):
        y, stats = _ops.norm_forward(
            x, weight, bias, normalized_shape, eps, weight_offset, is_rms_norm, out_dtype, True, stats_grad
        )
        ctx.save_for_backward(x, weight, stats)
        ctx.set_materialize_grads(False)
        ctx.normalized_ndim = len(normalized_shape or (bias if weight is None else weight).shape)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.eps, ctx.weight_offset, ctx.is_rms_norm, ctx.stats_grad = eps, weight_offset, is_rms_norm, stats_grad
        return y

    @staticmethod
    def backward(ctx, grad_output):
        if grad_output is None:
            return (None,) * 9
        x, weight, stats = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        bias_dtype = ctx.bias_dtype if wants_bias else None
        if torch.is_grad_enabled() or not _takes_kernel(grad_output, x, weight):
            grad_x, grad_weight, grad_bias = _differentiable_backward(
                grad_output, x, weight, ctx.normalized_ndim, ctx.eps, ctx.weight_offset, ctx.is_rms_norm, bias_dtype,
                ctx.stats_grad,
            )  # fmt: skip
            grad_x, grad_weight = grad_x if wants_x else None, grad_weight if wants_weight else None
        else:
            grad_x, grad_weight, grad_bias = _ops.norm_backward(
                grad_output, x, weight, stats, ctx.normalized_ndim, ctx.weight_offset, ctx.is_rms_norm,
                wants_x, wants_weight, bias_dtype, ctx.stats_grad,
            )  # fmt: skip
        return grad_x, grad_weight, grad_bias, None, None, None, None, None, None
