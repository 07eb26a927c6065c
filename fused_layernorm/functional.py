"""LayerNorm and RMSNorm as functions: the public calls, the choice of path, and autograd where it is in Python.

Four paths, the first three on the same kernels. Plain eager mode: one call into the extension, which has its own
autograd nodes (csrc/autograd.cpp, add_autograd.cpp). What that call hands back, for an argument of a type it does not
read: NormFunction; with a residual, the operator. (What comes after the norm, and a gate, have nodes in Python:
_AfterNorm, _GatedNorm.) Where something must see a call that it can name (torch.compile,
torch.export, dispatch modes, fake tensors, DTensor): the operators torch.ops.fused_layernorm.norm_forward and
add_norm_forward. Where nothing of ours can run (torch.func, forward-mode AD, other subclasses, torch.jit.trace, no
kernels for the device): PyTorch operations.

What surrounds a norm is stages of the kernels where there are any (_ops.has_stages), else PyTorch operations around one
of the paths above, by the same formulas (reference.py).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.utils.weak import WeakIdKeyDictionary, WeakIdRef

from . import _ops, reference

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_ACTIVATIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    "silu": F.silu,
}


def _by_keyword(function):
    """What comes after eps is given by keyword, says the signature that users and tools see. In the definition it is
    not, as Python takes 10 to 20 ns for each default of a keyword-only parameter, and next to nothing for others."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    parameters[4:] = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters[4:]]
    function.__signature__ = signature.replace(parameters=parameters)
    return function


@_by_keyword
def fused_layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    normalized_shape: int | Sequence[int] | None = None,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
    stats_grad: bool = True,
    activation: str | None = None,
    dropout_p: float = 0.0,
    training: bool = True,
    memory_efficient: bool = False,
    accumulate_grad: bool = False,
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
        stats_grad: default True; False makes mean and variance constants in backward, as in layer-wise relevance
            propagation: ``grad_x = (w + o) * grad_y / sqrt(var + eps)``.
        activation: default None; "relu", "gelu", "gelu_tanh" (gelu by its tanh formula) or "silu", applied to y in the
            accumulation type.
        dropout_p: default 0; with `training` (default True), the probability that an element of y (after the
            activation) becomes 0; the others are divided by ``1 - dropout_p``. See `fused_add_layer_norm`.
        memory_efficient: default False; save y for backward instead of x, where y says as much about x: y is of x's
            dtype, and every column of N has ``1024 * torch.finfo(y.dtype).tiny <= |w + o| <= 2**125``,
            ``|b| <= |w + o|`` and ``sqrt(N) * |w + o| + |b| <= torch.finfo(y.dtype).max``. Backward then has x_hat to
            about the precision of y's dtype. Where a column fails, the call saves x, as it does without this option, so
            that a weight of 0 keeps its gradient. On the CPU each call looks at the weight. On CUDA, where a look waits
            for the device, it is repeated when weight or bias has changed, or an optimizer of `torch.optim` has made a
            step; a change that neither shows (a write through ``.data``, or into a buffer that weight is a view of)
            must not make a column fail. While a graph is captured there is no look, and x is saved. Saves memory where
            the next operation saves y too, and nothing else holds x. Without effect under `torch.compile`, which
            chooses itself what it saves.
        accumulate_grad: default False; backward adds the gradients of weight and bias to the float32 buffers
            ``weight.main_grad`` and ``bias.main_grad``, unrounded, and sets ``grad_added_to_main_grad = True`` on the
            parameter (Megatron's contract). What `.grad` receives is zeros, so that hooks still run. First derivatives
            in eager mode only; without effect where no gradients are recorded.

    Returns:
        y of x's shape, contiguous, of x's dtype or `out_dtype`, also under autocast.

    Statistics and sums are kept in float32 (float64 for float64 x) and do not cancel where ``|mean| >> sigma``.
    Results and gradients are the same bits on every run, and a row's result does not depend on the rows beside it.
    Gradients have the dtype of what they are the gradient of. Differentiable any number of times. Under
    ``torch.compile`` the call is one operator in the graph; in ``torch.func`` transforms and forward-mode AD the same
    formula runs as PyTorch operations. Activation and dropout are part of the kernel; on CUDA, where backward of them
    is a kernel of its own (docs/fusions.md), the gradient of the norm is rounded to the dtype of y's gradient in
    between, or to x's, if that is wider.

    Raises:
        TypeError: an argument of another type than listed above, or a tensor of another dtype or layout.
        RuntimeError: shapes or devices that do not match.
        ValueError: no `normalized_shape` to be had, `weight_offset` without weight, an `activation` not listed above,
            `dropout_p` outside [0, 1], `memory_efficient` with an `out_dtype` other than x's, activation or dropout, or
            `accumulate_grad` with a parameter that has no float32 ``main_grad``.
    """
    if not (activation or dropout_p or memory_efficient or accumulate_grad or is_dynamo_compiling()):
        y = _ops.norm(x, weight, bias, normalized_shape, eps, weight_offset, False, out_dtype, stats_grad, False)
        if y is not NotImplemented:
            return y
    return _norm_and_more(x, weight, bias, normalized_shape, eps, weight_offset, False, out_dtype, stats_grad,
                          activation, dropout_p, training, memory_efficient, accumulate_grad, "torch")  # fmt: skip


@_by_keyword
def fused_rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = None,
    normalized_shape: int | Sequence[int] | None = None,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
    stats_grad: bool = True,
    activation: str | None = None,
    dropout_p: float = 0.0,
    training: bool = True,
    memory_efficient: bool = False,
    accumulate_grad: bool = False,
    rounding: str = "torch",
) -> Tensor:
    r"""Root mean square normalization (Zhang and Sennrich, 2019) in one pass over memory, forward and backward.

    .. math:: y = \frac{x}{\sqrt{\mathrm{mean}(x^2) + \epsilon}} \cdot (w + o) + b

    Args:
        eps: added to the mean square. None means, as in `torch.nn.functional.rms_norm`, the machine epsilon of the
            type the statistics are kept in: float32's (1.19e-7), or float64's for float64 x.
        rounding: where results are rounded on the way, for y that is bit-equal, in eager mode, to the norm classes of
            transformers: "llama" rounds x_hat to x's dtype before it is multiplied by weight, "gemma" (with
            ``weight_offset=1``) once at the end; both take the statistics with the operations of those classes, as
            their last bits count. Not for float64 x, which is normalized in float64 here and in float32 there. "torch",
            the default, rounds once, and is one pass. Forward of the others is PyTorch operations; backward is the
            kernel, with the gradients of "torch". Where weight's dtype is wider than x's, transformers returns it: give
            that as `out_dtype`.

    The other arguments, the result, the guarantees and the errors are those of `fused_layer_norm`.
    """
    if not (
        activation or dropout_p or memory_efficient or accumulate_grad or rounding != "torch" or is_dynamo_compiling()
    ):
        y = _ops.norm(x, weight, bias, normalized_shape, eps, weight_offset, True, out_dtype, stats_grad, False)
        if y is not NotImplemented:
            return y
    return _norm_and_more(x, weight, bias, normalized_shape, _rms_eps(eps, x), weight_offset, True, out_dtype,
                          stats_grad, activation, dropout_p, training, memory_efficient, accumulate_grad,
                          rounding)  # fmt: skip


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
        statistics are taken: the norm is that of the tensor that is returned. Both contiguous new memory, and results
        of one node of autograd's graph: y is no function of residual_out there. With `return_dropout_mask`
        ``(y, residual_out, mask)``, mask bool of x's shape.

    The other arguments, the guarantees and the errors are those of `fused_layer_norm`; gradients flow to residual too.
    """
    if not (activation or dropout_p or return_dropout_mask or is_dynamo_compiling()):
        results = _ops.add_norm(x, weight, bias, normalized_shape, eps, weight_offset, False, out_dtype, stats_grad,
                                False, residual, residual_dtype, None, 0.0)  # fmt: skip
        if results is not NotImplemented:
            return results
    return _add_norm(x, residual, weight, bias, eps, False, dropout_p, training, residual_dtype, normalized_shape,
                     weight_offset, out_dtype, stats_grad, activation, "torch", return_dropout_mask)  # fmt: skip


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
    rounding: str = "torch",
    return_dropout_mask: bool = False,
) -> tuple[Tensor, ...]:
    r"""Dropout, residual addition and root mean square normalization in one pass over memory, forward and backward.

    .. math:: z = \mathrm{residual} + \mathrm{dropout}(x), \qquad y = \mathrm{RMSNorm}(z)

    Arguments and result are those of `fused_add_layer_norm`, eps and rounding those of `fused_rms_norm`.
    """
    if not (activation or dropout_p or return_dropout_mask or rounding != "torch" or is_dynamo_compiling()):
        results = _ops.add_norm(x, weight, bias, normalized_shape, eps, weight_offset, True, out_dtype, stats_grad,
                                False, residual, residual_dtype, None, 0.0)  # fmt: skip
        if results is not NotImplemented:
            return results
    return _add_norm(x, residual, weight, bias, _rms_eps(eps, x), True, dropout_p, training, residual_dtype,
                     normalized_shape, weight_offset, out_dtype, stats_grad, activation, rounding,
                     return_dropout_mask)  # fmt: skip


def fused_adaptive_layer_norm(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    residual_dtype: torch.dtype | None = None,
    normalized_shape: int | Sequence[int] | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Layer normalization modulated by scale and shift (AdaLN, as in DiT and SD3).

    .. math:: y = \mathrm{LayerNorm}(z) \cdot (1 + \mathrm{scale}) + \mathrm{shift}, \qquad
        z = x \text{, or } \mathrm{residual} + \mathrm{gate} \cdot x

    Args:
        scale, shift: per token, of x's shape; per sample, ``[batch, *normalized_shape]`` with x's first dimension; for
            all, ``normalized_shape``; or of as many dimensions as x, those before normalized_shape 1 where values are
            shared. Of x's dtype, a narrower one, or float32.
        weight, bias: of the norm itself; DiT has none.
        normalized_shape: x's last dimension when neither this nor weight nor bias is given.
        gate: multiplies x before it is added to residual; of a shape as scale's. Needs a residual.
        residual, residual_dtype: as in `fused_add_layer_norm`.

    Returns:
        y, of x's dtype or `out_dtype`; with a residual ``(y, residual_out)``, residual_out being z.

    Products and sums are made in the accumulation type and rounded once. The gradients of scale, shift and gate are
    summed over the rows that share them, in the accumulation type and the same order on every run; that of a shift for
    each token is y's, and may be the same memory. Errors are those of `fused_add_layer_norm`; RuntimeError for a scale,
    shift or gate that does not broadcast, ValueError for a gate without residual.
    """
    return _adaptive_norm(x, scale, shift, weight, bias, eps, False, gate, residual, residual_dtype, normalized_shape,
                          out_dtype)  # fmt: skip


def fused_adaptive_rms_norm(
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    residual_dtype: torch.dtype | None = None,
    normalized_shape: int | Sequence[int] | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`fused_adaptive_layer_norm` with `fused_rms_norm` for its norm; shift None stands for 0."""
    return _adaptive_norm(x, scale, shift, weight, bias, _rms_eps(eps, x), True, gate, residual, residual_dtype,
                          normalized_shape, out_dtype)  # fmt: skip


def _rms_eps(eps, x):
    if eps is None and isinstance(x, Tensor):
        return torch.finfo(reference.accumulation_dtype(x.dtype)).eps
    return eps


def _norm(x, weight, bias, normalized_shape, eps, weight_offset, is_rms_norm, out_dtype, stats_grad, rounding="torch"):
    """The calls that are not plain eager mode."""
    if _is_torchs(x):
        is_plain = not weight_offset and out_dtype in (None, x.dtype) and stats_grad and rounding == "torch"
        if is_plain and all(t is None or t.dtype == x.dtype for t in (weight, bias)):
            return _torch_norm(x, weight, bias, normalized_shape, eps, is_rms_norm)
        if x.is_nested:
            raise TypeError("x must be a dense (strided) tensor for anything but the plain norm, got a nested one")
    has_stage = stats_grad or (isinstance(x, Tensor) and _ops.has_stages(x.device.type))
    if has_stage and _takes_kernel(x, weight, bias):
        if normalized_shape is not None:
            normalized_shape = reference.as_shape(normalized_shape)
        try:
            return NormFunction.apply(
                x, weight, bias, normalized_shape, eps, weight_offset, is_rms_norm, out_dtype, stats_grad, rounding
            )
        except TypeError:  # pybind11 lists every argument; say which one is wrong
            reference.check_norm_arguments(x, weight, bias, normalized_shape, eps, weight_offset, out_dtype)
            raise
    shape = reference.check_norm_arguments(x, weight, bias, normalized_shape, eps, weight_offset, out_dtype)
    options = (eps, weight_offset, is_rms_norm, out_dtype)
    if has_stage and rounding == "torch" and _takes_operator(x, weight, bias):
        frozen = () if stats_grad else (False,)  # defaults are left out: graphs stay loadable by older versions
        return _ops.norm_operator(x, weight, bias, len(shape), *options, *frozen)[0]
    return reference.norm(x, weight, bias, shape, *options, stats_grad, rounding)


def _is_torchs(x):
    """Whether a plain norm is PyTorch's own: of nested tensors, and where a call is written down for those who know
    that one only (torch.jit.trace, torch.onnx.export)."""
    if not isinstance(x, Tensor) or is_dynamo_compiling():
        return False
    return x.is_nested or torch.jit.is_tracing() or torch.onnx.is_in_onnx_export()


def _torch_norm(x, weight, bias, normalized_shape, eps, is_rms_norm):
    given = weight if bias is None else bias
    shape = reference.as_shape(given.shape if normalized_shape is None and given is not None else normalized_shape)
    if not is_rms_norm:
        return F.layer_norm(x, shape, weight, bias, eps)
    y = F.rms_norm(x, shape, weight, eps)
    return y if bias is None else y + bias


# ---- around the norm -------------------------------------------------------------------------------------------------


def _norm_and_more(
    x, weight, bias, normalized_shape, eps, weight_offset, is_rms_norm, out_dtype, stats_grad, activation, dropout_p,
    training, memory_efficient, accumulate_grad, rounding,
):  # fmt: skip
    """A norm, with what is applied to its result, and how its gradients are made."""
    if rounding not in reference.ROUNDINGS:
        raise ValueError(f"rounding must be one of {', '.join(reference.ROUNDINGS)}, got {rounding!r}")
    options = (eps, weight_offset, is_rms_norm)
    if not (activation or dropout_p or memory_efficient or accumulate_grad):
        return _norm(x, weight, bias, normalized_shape, *options, out_dtype, stats_grad, rounding)
    shape = reference.check_norm_arguments(x, weight, bias, normalized_shape, eps, weight_offset, out_dtype)
    reference.check_dropout_p(dropout_p)
    if memory_efficient:
        if activation or dropout_p or rounding != "torch" or not stats_grad or (out_dtype or x.dtype) != x.dtype:
            raise ValueError("memory_efficient goes with no activation, no dropout_p, no out_dtype but x's, "
                             'rounding="torch" and stats_grad=True')  # fmt: skip
        memory_efficient = _saves_y(x, weight, bias, weight_offset)
    accumulate_grad = accumulate_grad and torch.is_grad_enabled()
    if accumulate_grad:
        for name, parameter in (("weight", weight), ("bias", bias)):
            _check_main_grad(name, parameter)
    in_kernel = accumulate_grad and _takes_kernel(x, weight, bias)

    def norm(dtype):
        if in_kernel:
            return NormFunction.apply(x, weight, bias, shape, *options, dtype, stats_grad, rounding, True)
        return _norm(x, *parameters(), shape, *options, dtype, stats_grad, rounding)

    def parameters():
        if not accumulate_grad:
            return weight, bias
        return [_into_main_grad(name, t, rounding) for name, t in (("weight", weight), ("bias", bias))]

    if memory_efficient:
        return MemoryEfficientFunction.apply(x, *parameters(), shape, *options)
    _check_activation(activation)
    dropout_p = dropout_p if training else 0.0
    if not (activation or dropout_p):
        return norm(out_dtype)
    philox = _draw_philox(x) if dropout_p else None
    dtype = out_dtype or x.dtype
    has_stage = _ops.has_stages(x.device.type) and stats_grad and rounding == "torch"
    if has_stage and _takes_operator(x, weight, bias, distributed=False):
        kind = _ops.activations.index(activation or "")
        after = (philox, len(shape), *options, dtype, kind, dropout_p)
        return _call_operator(_ops.after_norm_operator, _AfterNorm, (x, *parameters(), *after))[0]
    y = _activate(norm(reference.accumulation_dtype(x.dtype)), activation)
    return y.to(dtype) if philox is None else _dropout(y, philox, len(shape), dropout_p, dtype)


def _add_norm(
    x, residual, weight, bias, eps, is_rms_norm, dropout_p, training, residual_dtype, normalized_shape, weight_offset,
    out_dtype, stats_grad, activation, rounding, return_dropout_mask,
):  # fmt: skip
    if rounding not in reference.ROUNDINGS:
        raise ValueError(f"rounding must be one of {', '.join(reference.ROUNDINGS)}, got {rounding!r}")
    shape = reference.check_norm_arguments(x, weight, bias, normalized_shape, eps, weight_offset, out_dtype)
    z_dtype = reference.check_add_arguments(x, residual, residual_dtype, dropout_p)
    _check_activation(activation)
    if return_dropout_mask and _ops.is_dtensor(x):
        raise TypeError("return_dropout_mask=True needs plain tensors, got a DTensor")
    philox = _draw_philox(x) if training and dropout_p else None
    y_dtype = reference.accumulation_dtype(x.dtype) if activation else out_dtype or x.dtype
    p = dropout_p if training else 0.0
    has_stage = rounding == "torch" and _ops.has_stages(x.device.type)
    results = NotImplemented
    if has_stage:
        results = _in_plain_eager_mode(_ops.add_norm, x, weight, bias, shape, eps, weight_offset, is_rms_norm, y_dtype,
                                       stats_grad, False, residual, z_dtype, philox, p)  # fmt: skip
    if results is not NotImplemented:
        y, z = results
    elif has_stage and _takes_operator(x, weight, bias, residual, distributed=philox is None):
        y, z, _ = _ops.add_norm_operator(x, residual, weight, bias, philox, len(shape), eps, weight_offset, is_rms_norm,
                                         y_dtype, stats_grad, p, z_dtype)  # fmt: skip
    else:
        wide = reference.accumulation_dtype(x.dtype)
        dropped = x if philox is None else _dropout(x, philox, len(shape), dropout_p, wide)
        z = reference.add(dropped, residual, z_dtype)
        if z.dtype != x.dtype:  # of z's dtype or float32
            weight, bias = (None if t is None else t.to(z.dtype) for t in (weight, bias))
        y = _norm(z, weight, bias, shape, eps, weight_offset, is_rms_norm, y_dtype, stats_grad, rounding)
    if activation:
        y = _activate(y, activation).to(out_dtype or x.dtype)
    if not return_dropout_mask:
        return y, z
    if philox is None:
        return y, z, torch.ones_like(x, dtype=torch.bool, memory_format=torch.contiguous_format)
    return y, z, _dropout_mask(x, philox, len(shape), dropout_p)


def _adaptive_norm(
    x, scale, shift, weight, bias, eps, is_rms_norm, gate, residual, residual_dtype, normalized_shape, out_dtype
):
    if isinstance(x, Tensor) and x.dim() and normalized_shape is None and weight is None and bias is None:
        normalized_shape = x.shape[-1:]
    shape = reference.check_norm_arguments(x, weight, bias, normalized_shape, eps, 0.0, out_dtype)
    if gate is not None and residual is None:
        raise ValueError("gate needs a residual that the product is added to, got residual=None")
    if residual_dtype is not None and residual is None:
        raise ValueError(f"residual_dtype needs a residual, got residual=None, residual_dtype={residual_dtype}")
    wide = reference.accumulation_dtype(x.dtype)
    scale, shift, gate = (
        None if t is None and name != "scale" else reference.as_modulation(name, t, x, len(shape))
        for name, t in (("scale", scale), ("shift", shift), ("gate", gate))
    )
    z_dtype = x.dtype if residual is None else reference.check_add_arguments(x, residual, residual_dtype, 0.0)
    y_dtype = out_dtype or x.dtype
    parts = _parts_of_rows(x, scale, shift, len(shape))
    if parts is not None and _takes_operator(x, scale, shift, weight, bias, gate, residual, distributed=False):
        # A norm whose weight is 1 + scale and whose bias is shift
        modulation_shape = scale.shape
        if shift is not None and shift.shape != scale.shape:  # unrounded, or each part's gradient would be rounded
            shift = shift.to(wide).expand_as(scale)
        scale, shift = (None if t is None else t.reshape(*parts, *shape) for t in (scale, shift))
        offset = 1.0
        if weight is not None or bias is not None:
            factor, offset = 1 + scale.to(wide), 0.0
            scale = factor if weight is None else factor * weight
            moved = None if bias is None else factor * bias
            shift = moved if shift is None else shift if moved is None else shift + moved
        options = (len(shape), eps, offset, is_rms_norm, y_dtype)
        plain = (shape, *options[1:], True, True)  # how the same is said to plain eager mode
        if gate is None and residual is not None:
            results = _in_plain_eager_mode(_ops.add_norm, x, scale, shift, *plain, residual, z_dtype, None, 0.0)
            if results is NotImplemented:
                results = _ops.add_norm_operator(x, residual, scale, shift, None, *options, True, 0.0, z_dtype)[:2]
            return results
        if gate is not None and _gate_is_stage(x, gate, modulation_shape):
            rows = (*(parts or (1,)), *shape)
            gate, scale, shift = (None if t is None else t.reshape(rows) for t in (gate, scale, shift))
            inputs = (x, residual, gate, scale, shift)
            return _call_operator(_ops.gated_norm_operator, _GatedNorm, (*inputs, *options, z_dtype))[:2]
        z = x if residual is None else _gated_sum(x, gate, residual, z_dtype)
        if z.dtype != x.dtype:
            scale, shift = (None if t is None else t.to(wide) for t in (scale, shift))
        y = _in_plain_eager_mode(_ops.norm, z, scale, shift, *plain)
        if y is NotImplemented:
            y = _ops.norm_operator(z, scale, shift, *options)[0]
    else:
        z = x if residual is None else _gated_sum(x, gate, residual, z_dtype)
        if z.dtype != x.dtype:
            weight, bias = (None if t is None else t.to(z.dtype) for t in (weight, bias))
        y = _norm(z, weight, bias, shape, eps, 0.0, is_rms_norm, wide, True) * (1 + scale.to(wide))
        y = (y if shift is None else y + shift.to(wide)).to(y_dtype)
    return y if residual is None else (y, z)


def _parts_of_rows(x, scale, shift, normalized_ndim):
    """(n,) where the rows of x are n equal parts, one after the other, that share a scale and shift each, () where all
    share one; None where it is otherwise. On CUDA up to _ops.max_segments parts of several rows."""
    leading = x.dim() - normalized_ndim
    sizes, found = x.shape[:leading], scale.shape[:leading]
    if shift is not None and shift.shape != scale.shape and math.prod(shift.shape[:leading]) != 1:
        return None
    split = leading  # so many dimensions tell the parts apart: along those after them the scale is one
    while split and found[split - 1] == 1:
        split -= 1
    if split == 0:
        return ()
    if found[:split] != sizes[:split] or any(n == 0 for n in sizes):
        return None
    parts = math.prod(sizes[:split])  # not numel(), which makes an int of a symbolic size
    # While tracing, sizes are not asked about what most have: it would be a guard
    if not torch.compiler.is_compiling():
        rows = math.prod(sizes)
        if rows >= 2**31 or (x.is_cuda and _ops.max_segments < parts < rows):
            return None
    return (parts,)


def _gate_is_stage(x, gate, modulation_shape):
    """Whether the kernel that modulates multiplies by the gate, too: one for the same rows as a scale."""
    return _ops.has_stages(x.device.type) and gate.dtype == x.dtype and gate.shape == modulation_shape


def _gated_sum(x, gate, residual, dtype):
    """residual + gate * x, rounded to dtype once."""
    if gate is None:
        return reference.add(x, residual, dtype)
    if x.dtype == residual.dtype == gate.dtype == dtype:
        return torch.addcmul(residual, x, gate).contiguous()  # in the accumulation type
    wide = reference.accumulation_dtype(x.dtype)
    return reference.add(x.to(wide) * gate.to(wide), residual, dtype)


def _check_activation(activation):
    if activation and not (isinstance(activation, str) and activation in _ACTIVATIONS):
        error = ValueError if isinstance(activation, str) else TypeError
        raise error(f"activation must be one of {', '.join(_ACTIVATIONS)}, or None, got {activation!r}")


def _activate(y, activation):
    return _ACTIVATIONS[activation](y) if activation else y


def _must_be_operations():
    """Whether a backward runs where no operator of ours may: under create_graph, in transforms, beside tangents."""
    return torch.is_grad_enabled() or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _setup_after_norm(ctx, inputs, output):
    x, weight, bias, philox, *ctx.options = inputs
    ctx.save_for_backward(x, weight, bias, philox, output[1])


def _after_norm_backward(ctx, grad_output, _=None):
    x, weight, bias, philox, stats = ctx.saved_tensors
    normalized_ndim, eps, weight_offset, is_rms_norm, _, kind, dropout_p = ctx.options
    wants = ctx.needs_input_grad[:3]
    if _must_be_operations():  # once more by those, of the same values as tensors of their own: what is a function of
        # another of them, or is it, counts once
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            x, weight, bias = (None if t is None else t.view_as(t) for t in (x, weight, bias))
            shape, wide = x.shape[x.dim() - normalized_ndim :], reference.accumulation_dtype(x.dtype)
            y = reference.norm(x, weight, bias, shape, eps, weight_offset, is_rms_norm, wide)
            y = _activate(y, _ops.activations[kind])
            if philox is not None:
                y = reference.dropout(y, _dropout_mask(x, philox, normalized_ndim, dropout_p), dropout_p, wide)
            wanted = [t for t, is_wanted in zip((x, weight, bias), wants, strict=True) if is_wanted]
            found = iter(torch.autograd.grad(y, wanted, grad_output.to(wide), create_graph=create_graph))
        return *(next(found) if is_wanted else None for is_wanted in wants), *[None] * 8
    norm = (normalized_ndim, weight_offset, is_rms_norm)
    found = _ops.after_norm_backward_operator(
        grad_output, x, weight, bias, stats, philox, *norm, *wants, kind, dropout_p
    )
    return *(g if is_wanted else None for g, is_wanted in zip(found, wants, strict=True)), *[None] * 8


def _setup_gated_norm(ctx, inputs, output):
    x, residual, gate, weight, bias, *ctx.options = inputs
    ctx.residual_dtype, ctx.bias_dtype = residual.dtype, None if bias is None else bias.dtype
    ctx.save_for_backward(x, gate, weight, *output[1:])
    ctx.set_materialize_grads(False)
    if not any(ctx.needs_input_grad[:3]):
        ctx.mark_non_differentiable(output[1])  # z


def _gated_norm_backward(ctx, grad_y, grad_z, _=None):
    x, gate, weight, z, stats = ctx.saved_tensors
    normalized_ndim, eps, weight_offset, is_rms_norm, *_ = ctx.options
    wants_x, wants_residual, _, wants_weight, wants_bias = wants = ctx.needs_input_grad[:5]
    bias_dtype = ctx.bias_dtype if wants_bias else None
    if grad_y is None and grad_z is None:
        return (None,) * 11
    # By operations also where y was not used: of its gradient, 0, an infinite rstd or a NaN would make more
    if grad_y is None or _must_be_operations():
        found, of_parameters = grad_z, (None, None)
        if grad_y is not None:
            found, *of_parameters = _differentiable_backward(
                grad_y, z, weight, normalized_ndim, eps, weight_offset, is_rms_norm, bias_dtype, True
            )
            found = found if grad_z is None else found + grad_z
        found, shape = found.to(reference.accumulation_dtype(x.dtype)), gate.shape[1:]
        of_x = (found * reference.of_each_row(gate, x, normalized_ndim)).to(x.dtype)
        of_gate = (found * x).reshape(gate.shape[0], -1, *shape).sum(1).to(gate.dtype)
        found = (of_x, found, of_gate, *of_parameters)
    else:
        is_there = wants_bias and weight.numel() == z.numel()  # of a bias for each row the gradient is y's
        *found, of_bias = _ops.gated_norm_backward_operator(
            grad_y, grad_z, z, x, gate, weight, stats, normalized_ndim, weight_offset, is_rms_norm, wants_x,
            wants_residual, wants_weight, None if is_there else bias_dtype,
        )  # fmt: skip
        found.append(grad_y.to(bias_dtype).reshape(weight.shape) if is_there else of_bias)
    found = [g if is_wanted else None for g, is_wanted in zip(found, wants, strict=True)]
    if wants_residual:
        found[1] = found[1].to(ctx.residual_dtype)
    return *found, *[None] * 6


def _below_autograd(operator, arguments):
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


def _node(name, operator, setup, backward, results):
    """The same for plain eager mode: what register_autograd() makes of the operator takes tens of microseconds more.
    `results`: how many of the operator's there are, as the last, the statistics, are none of the caller's."""

    def forward(ctx, *arguments):
        found = _below_autograd(operator, arguments)
        setup(ctx, arguments, found)
        return found[:results]

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), members)


_AfterNorm = _node("_AfterNorm", _ops.after_norm_operator, _setup_after_norm, _after_norm_backward, 1)
_GatedNorm = _node("_GatedNorm", _ops.gated_norm_operator, _setup_gated_norm, _gated_norm_backward, 2)


def _call_operator(operator, function, arguments):
    """The operator's results, first of all y; in plain eager mode those of the function, without statistics."""
    if torch.compiler.is_compiling():
        return operator(*arguments)
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    if not all(_ops.takes_kernel(t, None, None) for t in tensors):
        return operator(*arguments)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return function.apply(*arguments)
    return _below_autograd(operator, arguments)


if _ops.after_norm_operator:
    for _name, _backward, _setup in (
        ("after_norm_forward", _after_norm_backward, _setup_after_norm),
        ("gated_norm_forward", _gated_norm_backward, _setup_gated_norm),
    ):
        torch.library.register_autograd(f"fused_layernorm::{_name}", _backward, setup_context=_setup)


def _draw_philox(x):
    """The bits that decide what a call drops: (seed, offset). torch's own operation draws them, so that seeds,
    checkpointing, CUDA graphs and torch.compile see the draw, and what they decide is a function of them."""
    return torch.randint(torch.iinfo(torch.int64).max, (2,), dtype=torch.int64, device=x.device)


def _dropout_mask(x, philox, normalized_ndim, dropout_p):
    leading = x.dim() - normalized_ndim
    rows, hidden_size = math.prod(x.shape[:leading]), math.prod(x.shape[leading:])
    return _ops.dropout_mask(philox, rows, hidden_size, dropout_p).view(x.shape)


def _dropout(x, philox, normalized_ndim, dropout_p, dtype):
    """Dropout as an operation of its own, result of `dtype`: where no kernel has it as a stage. That of a DTensor is
    PyTorch's, which knows what each rank draws."""
    if _ops.is_dtensor(x):
        return F.dropout(x.to(torch.promote_types(x.dtype, dtype)), dropout_p).to(dtype)
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return reference.dropout(x, _dropout_mask(x, philox, normalized_ndim, dropout_p), dropout_p, dtype)
    return DropoutFunction.apply(x, philox, normalized_ndim, dropout_p, dtype)


def _check_main_grad(name, parameter):
    if parameter is None or not parameter.requires_grad:
        return
    buffer = getattr(parameter, "main_grad", None)
    if not isinstance(buffer, Tensor) or buffer.dtype != torch.float32 or buffer.shape != parameter.shape:
        raise ValueError(f"accumulate_grad needs {name}.main_grad, a float32 tensor of {name}'s shape")


def _is_asked_for(ctx, parameters, which):
    """Whether this backward is to find the gradient of weight (0) or bias (1), and not that of x alone, for which
    needs_input_grad, as of forward, has no word."""
    at = 1 + sum(t is not None for t in parameters[:which])  # next_functions has x's, and those of tensors behind it
    try:
        return torch._C._will_engine_execute_node(ctx.next_functions[at][0])
    except RuntimeError:  # a leaf that torch.autograd.grad was asked for
        return True


def _into_main_grad(name, parameter, rounding):
    """The parameter in float32, whose gradient then is, unrounded, and goes to main_grad; float64 as it is, and where
    the result is rounded as weight's dtype says."""
    if parameter is None or not parameter.requires_grad:
        return parameter
    return MainGradFunction.apply(parameter, name, rounding == "llama")


def _only_first_derivatives(option):
    # Not once_differentiable, which says nothing where grad_output does not require grad: terms would then be missing.
    if torch.is_grad_enabled():
        raise RuntimeError(f"{option}=True has first derivatives only: call the norm without it under create_graph")


class MainGradFunction(torch.autograd.Function):
    """parameter.to(float32), with a backward that adds to parameter.main_grad."""

    @staticmethod
    def forward(ctx, parameter, name, keeps_dtype):
        ctx.parameter, ctx.name = parameter, name  # the object itself, whose attributes are meant
        is_narrow = parameter.dtype in (torch.float16, torch.bfloat16)
        return parameter.float() if is_narrow and not keeps_dtype else parameter.view_as(parameter)

    @staticmethod
    def backward(ctx, grad_output):
        _only_first_derivatives("accumulate_grad")
        _check_main_grad(ctx.name, ctx.parameter)
        ctx.parameter.main_grad.add_(grad_output)
        return _added_to_main_grad(ctx.parameter), None, None


def _added_to_main_grad(parameter):
    """Says so on the parameter; returns what autograd is given for its gradient."""
    parameter.grad_added_to_main_grad = True
    return torch.zeros_like(parameter)


def _saves_y(x, weight, bias, weight_offset):
    """Whether a memory_efficient call saves y for backward."""
    if not (torch.is_grad_enabled() and _takes_kernel(x, weight, bias)):
        return False
    if not any(t is not None and t.requires_grad for t in (x, weight, bias)):
        return False
    return y_tells_x(x, weight, bias, weight_offset)


_verdicts = WeakIdKeyDictionary()  # weight, or else bias -> (what it was found of, verdict)
_optimizer_steps = None  # how many there were: mixed precision writes new weights through .data, which no version shows


def _count_optimizer_steps():
    global _optimizer_steps

    def count(*_):
        global _optimizer_steps
        _optimizer_steps += 1

    if _optimizer_steps is None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        _optimizer_steps = 0
        register_optimizer_step_post_hook(count)


def y_tells_x(x: Tensor, weight: Tensor | None, bias: Tensor | None, weight_offset: float) -> bool:
    """Whether x_hat can be had from y about as exactly as from a rounded x: the rule of memory_efficient."""
    given = [t for t in (weight, bias) if t is not None]
    if not given:
        return True
    if not x.is_cuda:
        return _tells(x.dtype, weight, bias, weight_offset)
    state = None
    if not any(t.is_inference() for t in given):  # which have no versions
        _count_optimizer_steps()
        state = (x.dtype, weight_offset, _optimizer_steps, [(WeakIdRef(t), t._version, t.data_ptr()) for t in given])
        if given[0] in _verdicts and _verdicts[given[0]][0] == state:
            return _verdicts[given[0]][1]
    if torch.cuda.is_current_stream_capturing():
        return False  # the answer is not to be had without waiting
    verdict = _tells(x.dtype, weight, bias, weight_offset)
    if state:
        _verdicts[given[0]] = (state, verdict)
    return verdict


@torch.no_grad()
def _tells(dtype, weight, bias, weight_offset):
    wide = reference.accumulation_dtype(dtype)
    scale = torch.ones_like(bias, dtype=wide) if weight is None else (weight.to(wide) + weight_offset).abs()
    if scale.numel() == 0:
        return True
    reach = scale * math.sqrt(scale.numel())  # of |y|, as |x_hat| <= sqrt(N)
    limits = [(-scale, -1024 * torch.finfo(dtype).tiny), (scale, 2.0**125)]  # 1 / scale is a normal float32
    if bias is not None:
        reach = reach + bias.abs()
        limits.append((bias.abs() - scale, 0.0))
    limits.append((reach, torch.finfo(dtype).max))
    found = torch.stack([values.amax() for values, _ in limits]).tolist()  # at once: CUDA is waited for
    return all(most <= limit for most, (_, limit) in zip(found, limits, strict=True))  # of NaN not


class MemoryEfficientFunction(torch.autograd.Function):
    """A norm that saves y for backward, from which x_hat is had."""

    @staticmethod
    def forward(ctx, x, weight, bias, shape, eps, weight_offset, is_rms_norm):
        y, stats = _ops.norm_forward(x, weight, bias, shape, eps, weight_offset, is_rms_norm, None, True, True)
        ctx.save_for_backward(y, weight, bias, stats)
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.weight_offset, ctx.is_rms_norm = shape, weight_offset, is_rms_norm
        return y

    @staticmethod
    def backward(ctx, grad_output):
        _only_first_derivatives("memory_efficient")
        if grad_output is None:
            return (None,) * 7
        y, weight, bias, stats = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        if not _takes_kernel(grad_output, y, weight):
            found = reference.backward_from_y(
                grad_output, y, weight, bias, stats[0], ctx.shape, ctx.weight_offset, ctx.is_rms_norm
            )
            return *(t if wants else None for t, wants in zip(found, ctx.needs_input_grad, strict=False)), *[None] * 4
        found = _ops.backward_from_y(
            grad_output, y, weight, bias, stats, len(ctx.shape), ctx.weight_offset, ctx.is_rms_norm, wants_x,
            wants_weight, wants_bias,
        )  # fmt: skip
        return *found, None, None, None, None


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


def _in_plain_eager_mode(call, *arguments):
    """What _ops.norm or _ops.add_norm returns, or NotImplemented."""
    return NotImplemented if is_dynamo_compiling() else call(*arguments)


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
    def forward(ctx, x, weight, bias, normalized_shape, eps, weight_offset, is_rms_norm, out_dtype, stats_grad,
                rounding, accumulate_grad=False):  # fmt: skip
        # The objects themselves, whose attributes are meant
        ctx.parameters = (weight, bias) if accumulate_grad else None
        options = (normalized_shape, eps, weight_offset, is_rms_norm, out_dtype)
        if rounding == "torch":
            y, stats = _ops.norm_forward(x, weight, bias, *options, True, stats_grad)
        else:
            shape = reference.check_norm_arguments(x, weight, bias, normalized_shape, eps, weight_offset, out_dtype)
            y = reference.norm(x, weight, bias, shape, *options[1:], stats_grad, rounding)
            stats = reference.rms_stats(x, shape, eps)
        ctx.save_for_backward(x, weight, stats)
        ctx.set_materialize_grads(False)
        ctx.normalized_ndim = len(normalized_shape or (bias if weight is None else weight).shape)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.eps, ctx.weight_offset, ctx.is_rms_norm, ctx.stats_grad = eps, weight_offset, is_rms_norm, stats_grad
        return y

    @staticmethod
    def backward(ctx, grad_output):
        if grad_output is None:
            return (None,) * 11
        x, weight, stats = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        bias_dtype = ctx.bias_dtype if wants_bias else None
        if ctx.parameters:
            _only_first_derivatives("accumulate_grad")
            if not _takes_kernel(grad_output, x, weight):
                raise RuntimeError("accumulate_grad=True adds one gradient of weight and bias to main_grad: call the "
                                   "norm without it for a batch of gradients, or for tangents")  # fmt: skip
            wants = (wants_weight and _is_asked_for(ctx, ctx.parameters, 0),
                     wants_bias and _is_asked_for(ctx, ctx.parameters, 1))  # fmt: skip
            wants_weight, bias_dtype = wants[0], bias_dtype if wants[1] else None
            wanted = [t if wants else None for t, wants in zip(ctx.parameters, wants, strict=True)]
            for name, parameter in zip(("weight", "bias"), wanted, strict=True):
                _check_main_grad(name, parameter)
            # Into main_grad itself, or a buffer beside it: where that is not contiguous, or is both of one parameter
            beside = [t is not None and (not t.main_grad.is_contiguous() or ctx.parameters[0] is ctx.parameters[1])
                      for t in wanted]  # fmt: skip
            sums = [None if t is None else torch.zeros_like(t.main_grad).contiguous() if apart else t.main_grad
                    for t, apart in zip(wanted, beside, strict=True)]  # fmt: skip
            grad_x, _, _ = _ops.norm_backward(
                grad_output, x, weight, stats, ctx.normalized_ndim, ctx.weight_offset, ctx.is_rms_norm,
                wants_x, wants_weight, bias_dtype, ctx.stats_grad, *sums,
            )  # fmt: skip
            for parameter, total, apart in zip(wanted, sums, beside, strict=True):
                if apart:
                    parameter.main_grad.add_(total)
            grad_weight, grad_bias = (None if t is None else _added_to_main_grad(t) for t in wanted)
        elif torch.is_grad_enabled() or not _takes_kernel(grad_output, x, weight):
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
        return grad_x, grad_weight, grad_bias, *[None] * 8
