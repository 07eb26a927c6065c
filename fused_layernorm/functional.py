"""LayerNorm and RMSNorm as functions: the public functions, the choice of a path, and NormFunction.

A public function makes one call of the extension, which has its autograd node in C++ (csrc/torch/autograd.cpp). Under
Dynamo, and for calls that the extension does not take, it calls _norm below instead, where _ops.path_of selects the
path. All paths compute the formulas of reference.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from . import _backend, _ops, reference
from .reference import Options, Wanted

if TYPE_CHECKING:
    from typing_extensions import Unpack

# ---- what type checkers read: a result type that follows from the arguments ------------------------------------------


class _AddLayerNormOptions(TypedDict, total=False):
    dropout_p: float
    training: bool
    residual_dtype: torch.dtype | None
    normalized_shape: int | Sequence[int] | None
    weight_offset: float
    out_dtype: torch.dtype | None
    stats_grad: bool
    activation: str | None


class _AddRMSNormOptions(_AddLayerNormOptions, total=False):
    rounding: str


class _AdaptiveOptions(TypedDict, total=False):
    weight: Tensor | None
    bias: Tensor | None
    gate: Tensor | None
    residual_dtype: torch.dtype | None
    normalized_shape: int | Sequence[int] | None
    out_dtype: torch.dtype | None


# ---- the public functions --------------------------------------------------------------------------------------------


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
    memory_efficient: bool = False,
    accumulate_grad: bool = False,
) -> Tensor:
    r"""Layer normalization (Ba, Kiros and Hinton, 2016) in one pass over memory, forward and backward.

    .. math:: y = \frac{x - \mathrm{mean}(x)}{\sqrt{\mathrm{var}(x) + \epsilon}} \cdot (w + o) + b

    Mean and (biased) variance are taken over the last dimensions, those of `normalized_shape`.

    Args:
        x: input of shape ``[*, *normalized_shape]``; float16, bfloat16, float32 or float64. Strided rows are read in
            place if the elements of a row are adjacent in memory and, on CUDA, rows of whole 16-byte vectors begin at
            multiples of 16 bytes. Other layouts are copied first.
        weight: scale :math:`w` of shape ``normalized_shape``, of x's dtype or float32; None means 1. A weight for each
            head: with `normalized_shape` given, weight may have further leading dimensions of x, such as
            ``[heads, head_dim]`` for x of shape ``[*, heads, head_dim]``. It cannot be combined with activation,
            dropout, `memory_efficient` or `accumulate_grad`.
        bias: shift :math:`b` of weight's shape, of x's dtype or float32; None means 0.
        eps: added to the variance.
        normalized_shape: an int or a sequence of ints; default: the shape of weight, or else of bias.
        weight_offset: the constant :math:`o`, added to weight in the accumulation type (1.0 for weights stored as
            ``w - 1``, as in Gemma).
        out_dtype: dtype of the result; None means x's dtype.
        stats_grad: False treats mean and variance as constants in backward, as in layer-wise relevance propagation:
            ``grad_x = (w + o) * grad_y / sqrt(var + eps)``.
        activation: "relu", "gelu", "gelu_tanh" (the tanh approximation) or "silu", applied to y in the accumulation
            type; None means no activation.
        dropout_p: the probability that an element of y becomes 0, after the activation and if `training`; the other
            elements are divided by ``1 - dropout_p``. See `fused_add_layer_norm`.
        training: False disables dropout.
        memory_efficient: save y for backward instead of x, if x can be recovered from y: y has x's dtype, and for each
            of the N columns ``1024 * torch.finfo(y.dtype).tiny <= |w + o| <= 2**125``, ``|b| <= |w + o|`` and ``sqrt(N)
            * |w + o| + |b| <= torch.finfo(y.dtype).max``. Backward then computes x_hat to about the precision of y's
            dtype. If a column fails this test, the call saves x, so a weight of 0 keeps its gradient. On the CPU every
            call tests the weight. On CUDA the test synchronizes with the device, so it is repeated only if weight or
            bias has changed or an optimizer of `torch.optim` has made a step. Changes that neither shows (through
            ``.data``, or through a buffer that weight is a view of) must not make a column fail. During the capture of
            a CUDA graph nothing is tested, and x is saved. The option saves memory if the next operation saves y too
            and nothing else keeps x alive. It has no effect under `torch.compile`, which selects what is saved, and
            with a wheel without an extension.
        accumulate_grad: backward adds the gradients of weight and bias, unrounded, to the float32 buffers
            ``weight.main_grad`` and ``bias.main_grad``, and sets ``grad_added_to_main_grad = True`` on the parameter
            (Megatron's contract). `.grad` receives zeros, so that hooks still run. Supports first derivatives in eager
            mode only; has no effect if no gradients are recorded.

    Returns:
        y of x's shape, contiguous, of x's dtype or `out_dtype`, also under autocast.

    Statistics and sums are kept in float32 (float64 for float64 x) and do not cancel if ``|mean| >> sigma``. Results
    and gradients have the same bits on every run, and the result of a row does not depend on other rows. Each gradient
    has the dtype of its tensor. The function is differentiable any number of times. Under ``torch.compile`` the call is
    one operator in the graph; ``torch.func`` transforms and forward-mode AD run the same formula as PyTorch operations.
    Activation and dropout are part of the kernel. If their backward on CUDA needs a separate kernel (docs/fusions.md),
    that kernel rounds its result to x's dtype if the gradient of y has that dtype.

    Raises:
        TypeError: an argument of another type than listed above, or a tensor of another dtype or layout.
        RuntimeError: shapes or devices that do not match.
        ValueError: no `normalized_shape`, weight or bias; `weight_offset` without weight; an `activation` not listed
            above; `dropout_p` outside [0, 1]; `memory_efficient` with activation, dropout or an `out_dtype` other than
            x's; `accumulate_grad` with a parameter that has no float32 ``main_grad``; a weight for each head with an
            option that it cannot be combined with.
    """
    norm = _norm if is_dynamo_compiling() else _ops.norm
    return norm(
        x, None, None, weight, bias, eps=eps, is_rms_norm=False, normalized_shape=normalized_shape,
        weight_offset=weight_offset, out_dtype=out_dtype, stats_grad=stats_grad, activation=activation,
        dropout_p=dropout_p, training=training, memory_efficient=memory_efficient, accumulate_grad=accumulate_grad,
    )  # fmt: skip


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
    memory_efficient: bool = False,
    accumulate_grad: bool = False,
    rounding: str = "torch",
) -> Tensor:
    r"""Root mean square normalization (Zhang and Sennrich, 2019) in one pass over memory, forward and backward.

    .. math:: y = \frac{x}{\sqrt{\mathrm{mean}(x^2) + \epsilon}} \cdot (w + o) + b

    Args:
        eps: added to the mean square. None means the machine epsilon of the accumulation type, as in
            `torch.nn.functional.rms_norm`: float32's (1.19e-7), or float64's for float64 x.
        rounding: where intermediate results are rounded. "torch" rounds once, at the end. So does "gemma"
            (transformers' GemmaRMSNorm, with ``weight_offset=1``). "llama" (LlamaRMSNorm) rounds x_hat to x's dtype
            before the multiplication by weight. In 16-bit dtypes about 1 of 10,000 elements differs
            from transformers' result, because the sums of a row have another order; with "torch" instead of "llama"
            about 1 of 4 differs. "llama_exact" and "gemma_exact" give transformers' bits in eager mode (not for float64
            x, which transformers normalizes in float32); their forward runs PyTorch operations, as does that of "llama"
            with a bias. Backward is the kernel of "torch" for all. If weight's dtype is wider than x's, transformers
            returns weight's dtype: pass it as `out_dtype`. With "llama_exact", `accumulate_grad` adds gradients that
            were rounded to weight's dtype.

    The other arguments, the result, the guarantees and the errors are those of `fused_layer_norm`.
    """
    norm = _norm if is_dynamo_compiling() else _ops.norm
    return norm(
        x, None, None, weight, bias, eps=eps, is_rms_norm=True, normalized_shape=normalized_shape,
        weight_offset=weight_offset, out_dtype=out_dtype, stats_grad=stats_grad, activation=activation,
        dropout_p=dropout_p, training=training, memory_efficient=memory_efficient, accumulate_grad=accumulate_grad,
        rounding=rounding,
    )  # fmt: skip


@overload
def fused_add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    return_dropout_mask: Literal[False] = False,
    **options: Unpack[_AddLayerNormOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def fused_add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    return_dropout_mask: Literal[True],
    **options: Unpack[_AddLayerNormOptions],
) -> tuple[Tensor, Tensor, Tensor]: ...
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

    A pre-norm block chains its calls: ``residual_out`` of one call is the residual of the next. A post-norm block uses
    only y; an unused result costs nothing in backward.

    Args:
        residual: of x's shape, of x's dtype or float32; None means 0 and starts a residual stream.
        dropout_p: the probability that an element of x becomes 0, if `training`; the other elements are divided by
            ``1 - dropout_p``. No mask is stored: the kept elements are a function of row, column and 128 random bits
            from torch's generator of x's device, and backward recomputes them. So `torch.manual_seed` repeats a call,
            activation checkpointing recomputes it, and every replay of a CUDA graph draws new bits.
        residual_dtype: dtype of residual_out, x's or float32; None means residual's dtype (x's without a residual). A
            float32 stream with 16-bit x is never rounded to 16 bits.
        return_dropout_mask: also return which elements of x were kept.

    Returns:
        ``(y, residual_out)``. residual_out is z, rounded once to its dtype; the norm is computed from the rounded
        values. y is as in `fused_layer_norm`. Both are new contiguous tensors and outputs of one autograd node: in the
        graph y does not depend on residual_out. With `return_dropout_mask` ``(y, residual_out, mask)``, where mask is a
        bool tensor of x's shape.

    The other arguments, the guarantees and the errors are those of `fused_layer_norm`. residual has a gradient too.
    """
    norm = _norm if is_dynamo_compiling() else _ops.norm
    return norm(
        x, residual, None, weight, bias, eps=eps, is_rms_norm=False, normalized_shape=normalized_shape,
        weight_offset=weight_offset, out_dtype=out_dtype, stats_grad=stats_grad, activation=activation,
        dropout_p=dropout_p, training=training, adds=True, residual_dtype=residual_dtype,
        return_dropout_mask=return_dropout_mask,
    )  # fmt: skip


@overload
def fused_add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = None,
    *,
    return_dropout_mask: Literal[False] = False,
    **options: Unpack[_AddRMSNormOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def fused_add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = None,
    *,
    return_dropout_mask: Literal[True],
    **options: Unpack[_AddRMSNormOptions],
) -> tuple[Tensor, Tensor, Tensor]: ...
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

    Arguments, result and errors are those of `fused_add_layer_norm`; eps and rounding are those of `fused_rms_norm`.
    """
    norm = _norm if is_dynamo_compiling() else _ops.norm
    return norm(
        x, residual, None, weight, bias, eps=eps, is_rms_norm=True, normalized_shape=normalized_shape,
        weight_offset=weight_offset, out_dtype=out_dtype, stats_grad=stats_grad, activation=activation,
        dropout_p=dropout_p, training=training, rounding=rounding, adds=True, residual_dtype=residual_dtype,
        return_dropout_mask=return_dropout_mask,
    )  # fmt: skip


def fused_layer_norm_add(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    normalized_shape: int | Sequence[int] | None = None,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
    stats_grad: bool = True,
    accumulate_grad: bool = False,
) -> Tensor:
    r"""Layer normalization of a block's output and residual addition in one pass over memory: the norm after the block.

    .. math:: y = \mathrm{residual} + \mathrm{LayerNorm}(x)

    Args:
        residual: of x's shape, of x's dtype or float32. Rows may be strided like x's.
        out_dtype: dtype of the result; None means residual's dtype.

    Returns:
        y of x's shape, contiguous, of residual's dtype or `out_dtype`.

    The sum is computed in the accumulation type and rounded once; transformers' classes round the norm before the sum.
    residual's gradient is that of y, cast to residual's dtype: the same tensor if the dtypes are equal, as of ``x + y``
    in PyTorch. Backward is that of `fused_layer_norm`, and residual is not saved for it. On CUDA some calls take
    several kernels (docs/fusions.md). The other arguments, the guarantees and the errors are those of
    `fused_layer_norm`.
    """
    norm = _norm if is_dynamo_compiling() else _ops.norm
    return norm(
        x, residual, None, weight, bias, eps=eps, is_rms_norm=False, normalized_shape=normalized_shape,
        weight_offset=weight_offset, out_dtype=out_dtype, stats_grad=stats_grad, accumulate_grad=accumulate_grad,
        adds_y=True,
    )  # fmt: skip


def fused_rms_norm_add(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = None,
    *,
    normalized_shape: int | Sequence[int] | None = None,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
    stats_grad: bool = True,
    accumulate_grad: bool = False,
) -> Tensor:
    r"""Root mean square normalization of a block's output and residual addition in one pass over memory: the norm after
    the block, as in OLMo 2 and GLM-4.

    .. math:: y = \mathrm{residual} + \mathrm{RMSNorm}(x)

    Arguments, result and errors are those of `fused_layer_norm_add`; eps is that of `fused_rms_norm`.
    """
    norm = _norm if is_dynamo_compiling() else _ops.norm
    return norm(
        x, residual, None, weight, bias, eps=eps, is_rms_norm=True, normalized_shape=normalized_shape,
        weight_offset=weight_offset, out_dtype=out_dtype, stats_grad=stats_grad, accumulate_grad=accumulate_grad,
        adds_y=True,
    )  # fmt: skip


def fused_sandwich_rms_norm(
    x: Tensor,
    residual: Tensor,
    post_weight: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    post_eps: float | None = None,
    normalized_shape: int | Sequence[int] | None = None,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    r"""The norm after one block, the residual addition, and the norm before the next block, as in Gemma 2 and 3.

    .. math:: z = \mathrm{residual} + \mathrm{RMSNorm}(x) \text{ with } w_{\mathrm{post}}, \qquad
        y = \mathrm{RMSNorm}(z) \text{ with } w

    Args:
        residual: of x's shape, of x's dtype or float32.
        post_weight, weight: the scales of the two norms, of shape ``normalized_shape``; None means 1. `weight_offset`
            is added to both, except to None.
        eps, post_eps: added to the mean squares of z and of x; None for post_eps means eps.
        normalized_shape: an int or a sequence of ints; default: the shape of weight, or else of post_weight.

    Returns:
        ``(y, z)``, y of x's dtype and z of residual's; z is rounded once, and y is computed from the rounded values.

    Forward is one pass over memory, and backward two; backward adds the gradient that z has from elsewhere within the
    pass of its norm. The other guarantees and the errors are those of `fused_rms_norm_add`.
    """
    for name, t in (("post_weight", post_weight), ("weight", weight)):
        if t is not None and not isinstance(t, Tensor):
            raise TypeError(f"{name} must be a Tensor or None, got {type(t).__name__}")
    if post_weight is not None and weight is not None and post_weight.shape != weight.shape:
        raise RuntimeError(f"post_weight must have the shape of weight, {list(weight.shape)}, "
                           f"got {list(post_weight.shape)}")  # fmt: skip
    given = weight if weight is not None else post_weight
    if normalized_shape is None and given is not None:
        normalized_shape = given.shape
    of_x, of_z = (
        {"eps": each, "normalized_shape": normalized_shape, "weight_offset": 0.0 if t is None else weight_offset}
        for each, t in ((eps if post_eps is None else post_eps, post_weight), (eps, weight))
    )  # type: tuple[dict[str, Any], dict[str, Any]]
    found = None if is_dynamo_compiling() else _sandwich_at_once(x, residual, post_weight, weight, of_x, of_z)
    if found is not None:
        return found
    z = fused_rms_norm_add(x, residual, post_weight, **of_x)
    if isinstance(weight, Tensor) and z.dtype != x.dtype:
        weight = weight.to(z.dtype)
    return fused_rms_norm(z, weight, **of_z, out_dtype=x.dtype), z


@overload
def fused_adaptive_layer_norm(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    *,
    eps: float = 1e-5,
    residual: None = None,
    **options: Unpack[_AdaptiveOptions],
) -> Tensor: ...
@overload
def fused_adaptive_layer_norm(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    *,
    eps: float = 1e-5,
    residual: Tensor,
    **options: Unpack[_AdaptiveOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def fused_adaptive_layer_norm(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    *,
    eps: float = 1e-5,
    residual: Tensor | None,
    **options: Unpack[_AdaptiveOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
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
        scale, shift: one value per token: x's shape; per sample: ``[batch, *normalized_shape]`` with x's first
            dimension; for all rows: ``normalized_shape``. Or as many dimensions as x, with 1 for each dimension before
            normalized_shape along which values are shared. Of x's dtype, a narrower one, or float32.
        weight, bias: parameters of the norm itself; DiT has none.
        normalized_shape: an int or a sequence of ints; default: the shape of weight or bias, or else x's last
            dimension.
        gate: multiplies x before the addition to residual; has a shape that scale may have. Needs a residual.
        residual, residual_dtype: as in `fused_add_layer_norm`.

    Returns:
        y, of x's dtype or `out_dtype`. With a residual ``(y, residual_out)``, where residual_out is z.

    Products and sums are computed in the accumulation type and rounded once. The gradients of scale, shift and gate are
    summed over the rows that share them, in the accumulation type and in the same order on every run. The gradient of a
    per-token shift is a copy of y's gradient.

    Raises:
        TypeError, RuntimeError, ValueError: as in `fused_add_layer_norm`.
        RuntimeError: a scale, shift or gate that does not broadcast.
        ValueError: a gate without residual.
    """
    return _adaptive_norm(
        x, scale, shift, weight, bias, gate, residual, eps=eps, is_rms_norm=False, normalized_shape=normalized_shape,
        out_dtype=out_dtype, residual_dtype=residual_dtype,
    )  # fmt: skip


@overload
def fused_adaptive_rms_norm(
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None = None,
    *,
    eps: float | None = None,
    residual: None = None,
    **options: Unpack[_AdaptiveOptions],
) -> Tensor: ...
@overload
def fused_adaptive_rms_norm(
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None = None,
    *,
    eps: float | None = None,
    residual: Tensor,
    **options: Unpack[_AdaptiveOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def fused_adaptive_rms_norm(
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None = None,
    *,
    eps: float | None = None,
    residual: Tensor | None,
    **options: Unpack[_AdaptiveOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
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
    r"""Root mean square normalization modulated by scale and shift.

    .. math:: y = \mathrm{RMSNorm}(z) \cdot (1 + \mathrm{scale}) + \mathrm{shift}, \qquad
        z = x \text{, or } \mathrm{residual} + \mathrm{gate} \cdot x

    Arguments, result and errors are those of `fused_adaptive_layer_norm`; eps is that of `fused_rms_norm`. A shift of
    None means 0.
    """
    return _adaptive_norm(
        x, scale, shift, weight, bias, gate, residual, eps=eps, is_rms_norm=True, normalized_shape=normalized_shape,
        out_dtype=out_dtype, residual_dtype=residual_dtype,
    )  # fmt: skip


def fused_gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = None,
    *,
    activation: str | None = "silu",
    norm_before_gate: bool = True,
    group_size: int | None = None,
    normalized_shape: int | Sequence[int] | None = None,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    r"""Root mean square normalization with a gate for each element, as in Qwen3-Next (``norm_before_gate=True``) and
    Mamba 2 (Dao and Gu, 2024; ``norm_before_gate=False``), in one pass over memory, forward and backward.

    .. math:: y = \mathrm{RMSNorm}(x) \cdot f(\mathrm{gate}) \quad \text{or} \quad
        y = \mathrm{RMSNorm}(x \cdot f(\mathrm{gate}))

    Args:
        gate: of x's shape; float16, bfloat16, float32 or float64, independent of x's dtype. Rows may be strided like
            x's.
        activation: the function :math:`f`: "silu", "sigmoid", "gelu", "gelu_tanh" or "relu"; None means the gate
            itself.
        norm_before_gate: True: the gate multiplies the norm; False: it multiplies x.
        group_size: split the last dimension into groups of this many adjacent elements and normalize each group, as in
            Mamba 2 with several groups; None means one group. weight and bias have one value for each element of the
            whole last dimension.
        normalized_shape: an int or a sequence of ints; default: the shape of weight or bias, or else x's last
            dimension.

    Returns:
        y of x's shape, contiguous, of x's dtype or `out_dtype`.

    All products, that of x and the gate too, are computed in the accumulation type, and y is rounded once. The other
    arguments and the guarantees are those of `fused_rms_norm`.

    Raises:
        TypeError, RuntimeError, ValueError: as in `fused_rms_norm`.
        TypeError: a gate that is not a tensor of a dtype listed above; a `group_size` that is not an int.
        RuntimeError: a gate of another shape than x's, or on another device.
        ValueError: an `activation` not listed above; a `group_size` that does not divide the last dimension, or that is
            combined with a `normalized_shape` of several dimensions or a weight for each head.
    """
    return _gated_norm(
        x, gate, weight, bias, group_size, eps=eps, is_rms_norm=True, normalized_shape=normalized_shape,
        weight_offset=weight_offset, out_dtype=out_dtype, activation=activation, is_gated=True,
        gates_y=norm_before_gate,
    )  # fmt: skip


def fused_gated_layer_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | None = "silu",
    norm_before_gate: bool = True,
    group_size: int | None = None,
    normalized_shape: int | Sequence[int] | None = None,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    r"""Layer normalization with a gate for each element, in one pass over memory, forward and backward.

    .. math:: y = \mathrm{LayerNorm}(x) \cdot f(\mathrm{gate}) \quad \text{or} \quad
        y = \mathrm{LayerNorm}(x \cdot f(\mathrm{gate}))

    Arguments, result and errors are those of `fused_gated_rms_norm`; eps is that of `fused_layer_norm`.
    """
    return _gated_norm(
        x, gate, weight, bias, group_size, eps=eps, is_rms_norm=False, normalized_shape=normalized_shape,
        weight_offset=weight_offset, out_dtype=out_dtype, activation=activation, is_gated=True,
        gates_y=norm_before_gate,
    )  # fmt: skip


def fused_layer_norm_quant(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scale: Tensor | None = None,
    granularity: str = "tensor",
    group_size: int = 128,
    residual: Tensor | None = None,
    residual_dtype: torch.dtype | None = None,
    return_norm: bool = False,
    column_major_scales: bool = False,
    normalized_shape: int | Sequence[int] | None = None,
    weight_offset: float = 0.0,
) -> tuple[Tensor, ...]:
    r"""Layer normalization with a quantized result, for inference, in one pass over memory.

    .. math:: y = \mathrm{LayerNorm}(z), \qquad q = \mathrm{saturate}(\mathrm{round}(y \cdot (1 / s))), \qquad
        z = x \text{, or } \mathrm{residual} + x

    Args:
        x: input of shape ``[*, *normalized_shape]``; float16, bfloat16 or float32. Strided as in `fused_layer_norm`.
        weight, bias: of shape ``normalized_shape``, or, with `normalized_shape` given, of a shape that scale may have
            in `fused_adaptive_layer_norm`: ``weight=scale, weight_offset=1.0, bias=shift`` is that norm. Of x's dtype
            or float32; None means 1 and 0.
        dtype: of q: ``torch.float8_e4m3fn`` (up to 448), ``torch.float8_e5m2`` (57344) or ``torch.int8`` (127).
        scale: the number :math:`s` by which q is multiplied to recover y, a float32 tensor with one element on x's
            device. Needed with granularity "tensor"; otherwise it is found.
        granularity: which elements share a scale: all ("tensor"), a row ("token"), or `group_size` adjacent columns of
            a row ("group"). A scale that is found is ``max(amax, 1e-12) * (1 / largest code)``, where amax is the
            largest absolute value of y. So the scale of zeros is not 0.
        group_size: the number of columns that share a scale; divides the size of a row.
        residual, residual_dtype: as in `fused_add_layer_norm`, but without a residual there is no residual_out.
        return_norm: also return y.
        column_major_scales: scales of groups are contiguous along the rows, as block-scaled matrix products read them:
            strides ``(1, rows)`` for x with two dimensions.
        normalized_shape: an int or a sequence of ints; default: the shape of weight or bias, or else x's last
            dimension.

    Returns:
        ``(q, scale)``, then y rounded to x's dtype with `return_norm`, then residual_out with a residual. q has x's
        shape. scale is the given tensor, or float32 of shape ``[*, 1]`` for tokens and ``[*, groups]`` for groups.

    y, the scales and the quotients are float32. A quotient is rounded to the nearest code, ties to even, and saturates:
    int8 at -127 and 127, an infinity at the largest finite code. NaN stays NaN; int8 has none, and stores 0. The scale
    of a row or group with NaN is NaN. On CUDA, codes differ from those on the CPU only where a quotient is within the
    rounding error of y of a boundary between two codes. Some calls take several kernels (docs/fusions.md).

    Raises:
        TypeError: an argument of another type than listed above, or a tensor of another dtype or layout.
        RuntimeError: a call that would record gradients; shapes or devices that do not match.
        ValueError: a missing scale with granularity "tensor", or a given one with another; a granularity not listed
            above; a `group_size` that does not divide the size of a row; `residual_dtype` without residual;
            `weight_offset` without weight.
    """
    return _norm_quant(
        x, residual, weight, bias, scale, dtype, granularity, group_size, return_norm, column_major_scales, eps=eps,
        is_rms_norm=False, normalized_shape=normalized_shape, weight_offset=weight_offset,
        residual_dtype=residual_dtype,
    )  # fmt: skip


def fused_rms_norm_quant(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = None,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scale: Tensor | None = None,
    granularity: str = "tensor",
    group_size: int = 128,
    residual: Tensor | None = None,
    residual_dtype: torch.dtype | None = None,
    return_norm: bool = False,
    column_major_scales: bool = False,
    normalized_shape: int | Sequence[int] | None = None,
    weight_offset: float = 0.0,
) -> tuple[Tensor, ...]:
    r"""Root mean square normalization with a quantized result, for inference, in one pass over memory.

    .. math:: y = \mathrm{RMSNorm}(z), \qquad q = \mathrm{saturate}(\mathrm{round}(y \cdot (1 / s))), \qquad
        z = x \text{, or } \mathrm{residual} + x

    Arguments, result and errors are those of `fused_layer_norm_quant`; eps is that of `fused_rms_norm`.
    """
    return _norm_quant(
        x, residual, weight, bias, scale, dtype, granularity, group_size, return_norm, column_major_scales, eps=eps,
        is_rms_norm=True, normalized_shape=normalized_shape, weight_offset=weight_offset,
        residual_dtype=residual_dtype,
    )  # fmt: skip


# ---- the choice of a path --------------------------------------------------------------------------------------------

# The options of _norm and of the extension's call, in the order in which csrc/torch/python.cpp reads them.
_DEFAULTS: dict[str, Any] = {
    "eps": None,
    "is_rms_norm": False,
    "normalized_shape": None,
    "weight_offset": 0.0,
    "out_dtype": None,
    "stats_grad": True,
    "activation": None,
    "dropout_p": 0.0,
    "training": True,
    "memory_efficient": False,
    "accumulate_grad": False,
    "rounding": "torch",
    "adds": False,  # returns (y, residual_out); dropout is of x
    "residual_dtype": None,
    "return_dropout_mask": False,
    "is_modulated": False,  # weight, bias and gate may have x's leading dimensions
    "is_gated": False,  # gate has x's shape, and the activation is the gate's
    "gates_y": False,
    "adds_y": False,  # residual is added to y
}


def _norm(x, residual, gate, weight, bias, **given):
    """A norm on the path that path_of() selects: for every call that the extension does not take."""
    call = _DEFAULTS | given
    if isinstance(x, Tensor) and _ops.is_torchs(x):
        if _is_plain(x, weight, bias, call):
            return _torch_norm(x, weight, bias, call["normalized_shape"], call["eps"], call["is_rms_norm"])
        if x.is_nested:
            raise TypeError("x must be a dense (strided) tensor except for the plain norm, got a nested tensor")
    # Quickly where possible: under torch.compile, Dynamo traces these checks for each norm of a model
    shape = _check_quickly(x, residual, weight, bias, call) or _check(x, residual, gate, weight, bias, call)
    per_head = _is_per_head(call, weight, bias)
    path = _ops.path_of(x, residual, gate, weight, bias)
    is_traced = torch.compiler.is_compiling()  # then a comparison of sizes would add a guard
    has_segments = call["is_modulated"] or per_head
    if has_segments and not is_traced and math.prod(x.shape[: x.dim() - len(shape)]) >= 2**31:
        path = "reference"  # kernels count rows of segments in 32 bits
    rounding, adds = call["rounding"], call["adds"]
    is_exact = rounding.endswith("_exact") or (rounding == "llama" and bias is not None)
    if path == "kernel" and not is_exact:  # the arguments are now of the types that the extension reads
        found = _ops.try_norm(x, residual, gate, weight, bias, **call)
        if found is not NotImplemented:
            return found
    if call["accumulate_grad"] and torch.is_grad_enabled():
        weight = _into_main_grad("weight", weight, keeps_dtype=rounding.startswith("llama"))
        bias = _into_main_grad("bias", bias, keeps_dtype=rounding.startswith("llama"))

    dropout_p = call["dropout_p"] if call["training"] else 0.0
    # A DTensor takes PyTorch's dropout, which knows what each rank draws
    outside_p, dropout_p = (dropout_p, 0.0) if dropout_p and _ops.is_dtensor(x) else (0.0, dropout_p)
    if outside_p and adds:
        x = F.dropout(x, outside_p)
    philox = _draw_philox(x) if dropout_p else None
    out_dtype, z_dtype = call["out_dtype"], call["residual_dtype"]
    if path == "operator":  # None for defaults: AOTInductor of torch 2.11 passes other dtypes
        out_dtype = None if out_dtype == (residual.dtype if call["adds_y"] else x.dtype) else out_dtype
        z_dtype = None if residual is not None and z_dtype == residual.dtype else z_dtype
    options = (
        len(shape), call["eps"], call["weight_offset"], call["is_rms_norm"], call["stats_grad"],
        reference.ACTIVATION_NAMES.index(call["activation"] or ""), dropout_p, not adds, out_dtype, z_dtype,
        call["gates_y"], per_head, call["adds_y"], rounding.startswith("llama"),
    )  # fmt: skip
    tensors = (x, residual, gate, weight, bias, philox)
    if path == "reference" or (is_exact and path == "operator"):
        y, z = reference.norm_forward(*tensors, *options)
    elif path == "operator":
        y, z, _ = _ops.norm_forward(*tensors, *options)
    elif is_exact or _wants_gradients(tensors):
        y, z = NormFunction.apply(*tensors, Options(*options), is_exact)
    else:
        y, z, _ = _ops.call_norm_forward(*tensors, *options)
    if not adds:
        return F.dropout(y, outside_p) if outside_p else y
    if not call["return_dropout_mask"]:
        return y, z
    if philox is None:
        return y, z, torch.ones_like(x, dtype=torch.bool, memory_format=torch.contiguous_format)
    rows, hidden_size = math.prod(x.shape[: x.dim() - len(shape)]), math.prod(shape)
    return y, z, _ops.dropout_mask(philox, rows, hidden_size, dropout_p).view(x.shape)


def _default_eps(x) -> float:
    """RMSNorm's eps if it is None: PyTorch's."""
    return torch.finfo(reference.accumulation_dtype(x.dtype)).eps


def _check(x, residual, gate, weight, bias, call) -> tuple[int, ...]:
    """Raise for arguments that no norm can take. Replace derived options in `call` by their values, of the types that
    the extension reads. Return normalized_shape."""
    rounding, activation = call["rounding"], call["activation"]
    if rounding not in reference.ROUNDINGS:
        raise ValueError(f"rounding must be one of {', '.join(reference.ROUNDINGS)}, got {rounding!r}")
    if call["is_rms_norm"] and call["eps"] is None and isinstance(x, Tensor):
        call["eps"] = _default_eps(x)
    names = ("eps", "weight_offset", "out_dtype")
    if call["is_modulated"]:
        shape = reference.check_norm_arguments(
            x, None, None, call["normalized_shape"], call["eps"], 0.0, call["out_dtype"]
        )
    else:
        shape = reference.check_norm_arguments(x, weight, bias, call["normalized_shape"], *(call[n] for n in names))
    call["normalized_shape"] = shape
    reference.check_dropout_p(call["dropout_p"])
    known = reference.ACTIVATION_NAMES[1:] if call["is_gated"] else reference.ACTIVATION_NAMES[1:-1]
    if activation and not (isinstance(activation, str) and activation in known):
        error = ValueError if isinstance(activation, str) else TypeError
        raise error(f"activation must be one of {', '.join(known)}, or None, got {activation!r}")
    if call["is_gated"]:
        reference.check_gate(x, gate)
    if call["adds"]:
        call["residual_dtype"] = reference.check_add_arguments(x, residual, call["residual_dtype"], call["dropout_p"])
        if call["return_dropout_mask"] and _ops.is_dtensor(x):
            raise TypeError("return_dropout_mask=True needs plain tensors, got a DTensor")
    if call["adds_y"]:
        reference.check_add_arguments(x, residual, None, 0.0)
        if residual is None:
            raise TypeError("residual must be a Tensor, got NoneType")
    z_dtype = call["residual_dtype"] or x.dtype
    if rounding == "gemma" or (rounding == "llama" and z_dtype in (torch.float32, torch.float64) and bias is None):
        call["rounding"] = "torch"  # which rounds where these do
    dropout_p = call["dropout_p"] if call["training"] else 0.0
    if call["memory_efficient"] and (
        activation or dropout_p or rounding != "torch" or not call["stats_grad"]
        or (call["out_dtype"] or x.dtype) != x.dtype
    ):  # fmt: skip
        raise ValueError("memory_efficient cannot be combined with activation, dropout_p, an out_dtype other than x's, "
                         'a rounding other than "torch" or stats_grad=False')  # fmt: skip
    has_more = (activation and not call["is_gated"]) or dropout_p or call["memory_efficient"] or call["accumulate_grad"]
    if has_more and _is_per_head(call, weight, bias):
        raise ValueError("a weight for each head cannot be combined with activation, dropout_p, memory_efficient or "
                         "accumulate_grad")  # fmt: skip
    if call["accumulate_grad"] and torch.is_grad_enabled():
        for name, parameter in (("weight", weight), ("bias", bias)):
            _check_main_grad(name, parameter)
    if not is_dynamo_compiling():  # numbers may be symbolic there
        for name in ("eps", "weight_offset", "dropout_p"):
            call[name] = float(call[name])
    for name in ("stats_grad", "training", "memory_efficient", "accumulate_grad", "return_dropout_mask", "gates_y",
                 "adds_y"):  # fmt: skip
        call[name] = bool(call[name])
    return shape


def _check_quickly(x, residual, weight, bias, call) -> tuple[int, ...] | None:
    """What _check() does, in less than half of its time, for the usual call: plain tensors on one device, a weight of
    the last dimension, and no options but eps, weight_offset and a residual. None for other calls, also invalid
    ones."""
    if type(x) is not Tensor or type(weight) not in (Tensor, torch.nn.Parameter) or x.dtype not in reference.DTYPES:
        return None
    shape, eps, dtype, device = x.shape[-1:], call["eps"], x.dtype, x.device
    given = call["normalized_shape"]
    if eps is None and call["is_rms_norm"]:
        eps = _default_eps(x)
    if (
        not shape
        or x.layout != torch.strided
        or not (given is None or (isinstance(given, tuple) and given == shape))  # an array compares its elements
        or not isinstance(eps, float)  # not type(eps): Dynamo has no guard for the type of some numbers
        or not isinstance(call["weight_offset"], float)
        or not isinstance(call["dropout_p"], float)
        or call["dropout_p"] != 0.0
        or call["stats_grad"] is not True
        or call["rounding"] != "torch"
        or call["out_dtype"] is not None
        or call["residual_dtype"] is not None
        or call["activation"]
        or call["memory_efficient"]
        or call["accumulate_grad"]
        or call["return_dropout_mask"]
        or call["is_modulated"]
        or call["is_gated"]
        or weight.shape != shape
        or not _is_beside(weight, dtype, device)
        or (bias is not None and not (isinstance(bias, Tensor) and bias.shape == shape
                                      and _is_beside(bias, dtype, device)))
    ):  # fmt: skip
        return None
    if residual is not None:
        if not isinstance(residual, Tensor) or residual.shape != x.shape or not _is_beside(residual, dtype, device):
            return None
    elif call["adds_y"]:
        return None
    z_dtype = (dtype if residual is None else residual.dtype) if call["adds"] else None
    call |= {"eps": eps, "normalized_shape": shape, "residual_dtype": z_dtype}
    return shape


def _is_beside(t, dtype, device) -> bool:
    """Whether a weight, bias or residual goes with x of this dtype on this device."""
    return reference.goes_with(t.dtype, dtype) and t.device == device and t.layout == torch.strided


def _is_per_head(call, weight, bias) -> bool:
    """Whether weight or bias has values for each head."""
    shape = call["normalized_shape"]
    if call["is_modulated"] or shape is None:
        return False
    ndim = len(shape if isinstance(shape, tuple) else reference.as_shape(shape))
    return (weight is not None and weight.dim() > ndim) or (bias is not None and bias.dim() > ndim)


def _is_plain(x, weight, bias, call) -> bool:
    """Whether PyTorch's own norm computes this call."""
    takes_more = (call["adds"] or call["adds_y"] or call["weight_offset"] or call["activation"]
                  or call["rounding"] != "torch" or call["is_modulated"] or call["is_gated"]
                  or _is_per_head(call, weight, bias) or (call["dropout_p"] and call["training"]))  # fmt: skip
    if takes_more or not call["stats_grad"] or call["out_dtype"] not in (None, x.dtype):
        return False
    return all(t is None or t.dtype == x.dtype for t in (weight, bias))


def _torch_norm(x, weight, bias, normalized_shape, eps, is_rms_norm):
    given = weight if bias is None else bias
    shape = reference.as_shape(given.shape if normalized_shape is None and given is not None else normalized_shape)
    if not is_rms_norm:
        return F.layer_norm(x, shape, weight, bias, eps)
    y = F.rms_norm(x, shape, weight, eps)
    return y if bias is None else y + bias


def _adaptive_norm(x, scale, shift, weight, bias, gate, residual, **call):
    """A norm whose weight is 1 + scale and whose bias is shift, of z = residual + gate * x."""
    if weight is None and bias is None and not is_dynamo_compiling():
        found = _ops.try_norm(x, residual, gate, scale, shift, eps=call["eps"], is_rms_norm=call["is_rms_norm"],
                              normalized_shape=call["normalized_shape"], weight_offset=1.0, out_dtype=call["out_dtype"],
                              adds=residual is not None, residual_dtype=call["residual_dtype"],
                              is_modulated=True)  # fmt: skip
        if found is not NotImplemented:
            return found
    if isinstance(x, Tensor) and x.dim() and call["normalized_shape"] is None and weight is None and bias is None:
        call["normalized_shape"] = x.shape[-1:]
    if call["is_rms_norm"] and call["eps"] is None and isinstance(x, Tensor):
        call["eps"] = _default_eps(x)
    shape = reference.check_norm_arguments(
        x, weight, bias, call["normalized_shape"], call["eps"], 0.0, call["out_dtype"]
    )
    call["normalized_shape"] = shape
    if gate is not None and residual is None:
        raise ValueError("gate needs a residual to add the product to, got residual=None")
    if call["residual_dtype"] is not None and residual is None:
        raise ValueError(f"residual_dtype needs a residual, got residual=None, residual_dtype={call['residual_dtype']}")
    scale, shift, gate = (
        None if t is None and name != "scale" else reference.as_modulation(name, t, x, len(shape))
        for name, t in (("scale", scale), ("shift", shift), ("gate", gate))
    )
    if residual is not None:
        call["residual_dtype"] = reference.check_add_arguments(x, residual, call["residual_dtype"], 0.0)
    wide, offset = reference.accumulation_dtype(x.dtype), 1.0
    if weight is not None or bias is not None:
        factor, offset = 1 + scale.to(wide), 0.0
        scale = factor if weight is None else factor * weight
        moved = None if bias is None else factor * bias
        shift = moved if shift is None else shift if moved is None else shift + moved
    z, out_dtype = None, call["out_dtype"] or x.dtype
    segments = _ops.shape_of_segments(x, len(shape), scale, shift, gate)
    if gate is not None and (gate.dtype != x.dtype or gate.shape != segments):
        x = z = _gated_sum(x, gate, residual, call["residual_dtype"])
        gate = residual = call["residual_dtype"] = None
        segments = _ops.shape_of_segments(x, len(shape), scale, shift)

    def of_segments(t):  # in the accumulation type: otherwise each segment's gradient would be rounded before the sum
        if t is None or t.shape == segments:
            return t if t is None or x.dtype != wide else t.to(wide)
        return t.to(wide).expand(segments)

    call |= {"out_dtype": out_dtype, "weight_offset": offset, "is_modulated": True, "adds": residual is not None}
    y = _norm(x, residual, gate, of_segments(scale), of_segments(shift), **call)
    return y if z is None else (y, z)


def _gated_sum(x, gate, residual, dtype):
    """residual + gate * x, rounded to dtype once: for a gate that the kernels do not take."""
    if x.dtype == residual.dtype == gate.dtype == dtype:
        return torch.addcmul(residual, x, gate).contiguous()  # in the accumulation type
    wide = reference.accumulation_dtype(x.dtype)
    return (residual.to(wide) + x.to(wide) * gate.to(wide)).to(dtype).contiguous()


def _sandwich_at_once(x, residual, post_weight, weight, of_x, of_z):
    """(y, z) by the operator of both norms, or None for calls that it does not take: these are two norms, and under
    torch.compile the fold of integrations/inductor.py makes one operator of them."""
    tensors = (x, residual, post_weight, weight)
    is_dense = all(isinstance(t, Tensor) for t in (x, residual)) and not _ops.is_torchs(x)
    if not is_dense or _ops.path_of(*tensors) != "kernel":
        return None
    of_x, of_z = _DEFAULTS | of_x | {"is_rms_norm": True, "adds_y": True}, _DEFAULTS | of_z | {"is_rms_norm": True}
    shape = _check_quickly(x, residual, post_weight, None, of_x)
    if shape is None or _check_quickly(residual, None, weight, None, of_z) is None:
        shape = _check(x, residual, None, post_weight, None, of_x)
        if weight is not None and residual.dtype != x.dtype:
            weight = weight.to(residual.dtype)
        _check(residual, None, None, weight, None, of_z)
        if _is_per_head(of_x, post_weight, weight):
            return None
    if not _wants_gradients(tensors):
        given = (len(shape), of_x["eps"], of_z["eps"], of_x["weight_offset"], of_z["weight_offset"])
        return _ops.call_sandwich_norm(x, residual, post_weight, weight, *given, used=0b0011)[:2]
    options = [Options(len(shape), each["eps"], each["weight_offset"], True, drops_y=True) for each in (of_x, of_z)]
    return SandwichFunction.apply(x, residual, post_weight, weight, *options)


def _gated_norm(x, gate, weight, bias, group_size, **call):
    """A gated norm. A group_size becomes a dimension of groups in x, gate, weight and bias."""
    norm = _norm if is_dynamo_compiling() else _ops.norm
    is_dense = isinstance(x, Tensor) and not x.is_nested
    if is_dense and call["normalized_shape"] is None and weight is None and bias is None:
        call["normalized_shape"] = x.shape[-1:]
    if group_size is None or not is_dense:
        return norm(x, None, gate, weight, bias, **call)
    checked = _DEFAULTS | call
    hidden_size, *others = _check(x, None, gate, weight, bias, checked)
    if others or _is_per_head(checked, weight, bias):
        raise ValueError("group_size needs one normalized dimension and cannot be combined with a weight for each head")
    reference.check_group_size(group_size, hidden_size)
    groups = (hidden_size // group_size, group_size)
    x, gate, weight, bias = (t if t is None else t.unflatten(-1, groups) for t in (x, gate, weight, bias))
    return norm(x, None, gate, weight, bias, **call | {"normalized_shape": groups[1:]}).flatten(-2)


def _norm_quant(x, residual, weight, bias, scale, dtype, granularity, group_size, return_norm, column_major, **call):
    """A norm with a quantized result: one kernel, or the norm in float32 and PyTorch operations."""
    if _wants_gradients([t for t in (x, residual, weight, bias, scale) if isinstance(t, Tensor)]):
        raise RuntimeError("a quantized norm has no gradients: call it under torch.no_grad() or torch.inference_mode()")
    if isinstance(x, Tensor) and x.is_nested:
        raise TypeError("x must be a dense (strided) tensor, got a nested tensor")
    if isinstance(x, Tensor) and call["normalized_shape"] is None and weight is None and bias is None:
        call["normalized_shape"] = x.shape[-1:]
    shape = call["normalized_shape"]
    ndim = None if shape is None else len(reference.as_shape(shape))
    call["is_modulated"] = ndim is not None and any(isinstance(t, Tensor) and t.dim() > ndim for t in (weight, bias))
    checked = _DEFAULTS | call | {"adds": residual is not None}
    if residual is None and call["residual_dtype"] is not None:
        raise ValueError(f"residual_dtype needs a residual, got residual=None, residual_dtype={call['residual_dtype']}")
    shape = _check_quickly(x, residual, weight, bias, checked) or _check(x, residual, None, weight, bias, checked)
    hidden_size = math.prod(shape)
    count = reference.check_quantization(x, scale, dtype, granularity, group_size, hidden_size)
    if call["is_modulated"]:
        if weight is None and call["weight_offset"] != 0.0:
            raise ValueError(f"weight_offset needs a weight to be added to, got weight=None, "
                             f"weight_offset={call['weight_offset']}")  # fmt: skip
        weight, bias = (
            t if t is None else reference.as_modulation(name, t, x, len(shape))
            for name, t in (("weight", weight), ("bias", bias))
        )
        segments = _ops.shape_of_segments(x, len(shape), weight, bias)
        weight, bias = (
            t if t is None or t.shape == segments else t.to(torch.float32).expand(segments) for t in (weight, bias)
        )
    path, z_dtype = _ops.path_of(x, residual, weight, bias, scale), checked["residual_dtype"]
    if path != "reference" and _ops.takes_quantized(x, residual, z_dtype, hidden_size, count, checked["is_modulated"]):
        q, found, y, z = _ops.norm_quant(
            x, residual, weight, bias, scale, len(shape), checked["eps"], checked["weight_offset"],
            checked["is_rms_norm"], z_dtype, dtype, count, column_major, return_norm,
        )  # fmt: skip
    else:
        norm = _norm if is_dynamo_compiling() else _ops.norm
        call |= {"normalized_shape": shape, "eps": checked["eps"], "out_dtype": torch.float32}
        y = norm(x, residual, None, weight, bias, adds=residual is not None, **call)
        y, z = (y, None) if residual is None else y
        q, found = reference.quantize(y, scale, dtype, len(shape), count, column_major)
        y = y.to(x.dtype) if return_norm else y
    if scale is None:
        scale = found.movedim(0, -1) if column_major else found
    return q, scale, *([y] if return_norm else []), *([] if residual is None else [z])


def _wants_gradients(tensors) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _draw_philox(x):
    """The random bits of a call's dropout: (seed, offset). An operation of torch draws them, so that seeds,
    checkpointing, CUDA graphs and torch.compile see the draw. The mask is a function of these bits."""
    return torch.randint(torch.iinfo(torch.int64).max, (2,), dtype=torch.int64, device=x.device)


# ---- gradients that go to main_grad ----------------------------------------------------------------------------------


def _check_main_grad(name, parameter):
    if parameter is None or not parameter.requires_grad:
        return
    buffer = getattr(parameter, "main_grad", None)
    if not isinstance(buffer, Tensor) or buffer.dtype != torch.float32 or buffer.shape != parameter.shape:
        raise ValueError(f"accumulate_grad needs {name}.main_grad, a float32 tensor of {name}'s shape")


def _into_main_grad(name, parameter, keeps_dtype):
    """The parameter cast to float32, so that its gradient is not rounded before it is added to main_grad. It keeps its
    dtype if that is float64, and with `keeps_dtype`: the result of Llama's rounding depends on weight's dtype."""
    if parameter is None or not parameter.requires_grad:
        return parameter
    return MainGradFunction.apply(parameter, name, keeps_dtype)


class MainGradFunction(torch.autograd.Function):
    """parameter.to(float32), with a backward that adds to parameter.main_grad: accumulate_grad on all paths except the
    extension's."""

    @staticmethod
    def forward(ctx, parameter, name, keeps_dtype):
        ctx.parameter, ctx.name = parameter, name  # the object itself, for its attributes
        is_narrow = parameter.dtype in (torch.float16, torch.bfloat16)
        return parameter.float() if is_narrow and not keeps_dtype else parameter.view_as(parameter)

    @staticmethod
    def backward(ctx, grad_output):
        # Not once_differentiable, which is silent where grad_output does not require grad: terms would be missing
        if torch.is_grad_enabled():
            raise RuntimeError("accumulate_grad=True has first derivatives only: call the norm without it under "
                               "create_graph")  # fmt: skip
        if torch._C._functorch.is_legacy_batchedtensor(grad_output):  # of is_grads_batched
            raise RuntimeError("accumulate_grad=True adds one gradient of weight and bias to main_grad: call the norm "
                               "without it for a batch of gradients, or for tangents")  # fmt: skip
        _check_main_grad(ctx.name, ctx.parameter)
        ctx.parameter.main_grad.add_(grad_output)
        ctx.parameter.grad_added_to_main_grad = True
        return torch.zeros_like(ctx.parameter), None, None


# ---- autograd in Python ----------------------------------------------------------------------------------------------


class NormFunction(torch.autograd.Function):
    """The node of csrc/torch/autograd.cpp in Python. Used for exact roundings, whose forward is no kernel, and for the
    wheel's libraries, which have no other node."""

    @staticmethod
    def forward(ctx, x, residual, gate, weight, bias, philox, options, is_exact):
        tensors = (x, residual, gate, weight, bias, philox)
        if is_exact:
            y, z = reference.norm_forward(*tensors, *options)
            stats = reference.stats(x if z is None else z, *options)
        else:
            y, z, stats = _ops.call_norm_forward(*tensors, *options)
        z = None if options.residual_dtype is None else z
        _save(ctx, tensors, options, z, stats)
        return y, z

    @staticmethod
    def backward(ctx, grad_y, grad_z):
        return *_gradients(ctx, grad_y, grad_z), None, None, None


class SandwichFunction(torch.autograd.Function):
    """z = residual + RMSNorm(x) and y = RMSNorm(z) by one operator, with the backward of two norms."""

    @staticmethod
    def forward(ctx, x, residual, post_weight, weight, of_x, of_z):
        y, z, stats, next_stats = _ops.call_sandwich_norm(
            x, residual, post_weight, weight, of_x.normalized_ndim, of_x.eps, of_z.eps, of_x.weight_offset,
            of_z.weight_offset,
        )  # fmt: skip
        ctx.save_for_backward(x, stats, post_weight, z, next_stats, weight)
        ctx.set_materialize_grads(False)
        if not any(ctx.needs_input_grad[:3]):
            ctx.mark_non_differentiable(z)
        ctx.options = of_x._replace(adds_y=True), of_z._replace(residual_dtype=z.dtype)
        ctx.dtypes = [None if t is None else t.dtype for t in (x, residual, post_weight, weight)]
        return y, z

    @staticmethod
    def backward(ctx, grad_y, grad_z):
        x, stats, post_weight, z, next_stats, weight = ctx.saved_tensors
        x_dtype, residual_dtype, post_dtype, weight_dtype = ctx.dtypes
        wants_x, wants_residual, wants_post, wants_weight = ctx.needs_input_grad[:4]
        wants_z, grad_weight = wants_x or wants_residual or wants_post, None
        if grad_y is not None:
            grad_z, _, _, grad_weight, _ = _gradients_of(
                (z, next_stats, None, None, weight, None, None), ctx.options[1],
                (residual_dtype, None, None, weight_dtype, None), (wants_z, False, False, wants_weight, False),
                grad_y, grad_z,
            )  # fmt: skip
        grad_x, grad_residual, _, grad_post, _ = _gradients_of(
            (x, stats, None, None, post_weight, None, None), ctx.options[0],
            (x_dtype, residual_dtype, None, post_dtype, None), (wants_x, wants_residual, False, wants_post, False),
            grad_z, None,
        )  # fmt: skip
        return grad_x, grad_residual, grad_post, grad_weight, None, None


def _save(ctx, tensors, options, z, stats):
    """Save inputs and results for backward. z is None without a load stage."""
    x, residual, gate, weight, bias, philox = tensors
    is_gated = gate is not None and z is None
    # Backward needs its values, or, without a weight, its shape
    needs_bias = options.gates_y or options.per_head or (options.activation and not is_gated)
    ctx.save_for_backward(
        x if z is None else z, stats, None if gate is None or is_gated else x, gate, weight,
        bias if needs_bias else None, philox,
    )  # fmt: skip
    ctx.set_materialize_grads(False)
    if z is not None and not any(ctx.needs_input_grad[:3]):
        ctx.mark_non_differentiable(z)
    ctx.options = options
    ctx.dtypes = [None if t is None else t.dtype for t in tensors]


def _gradients(ctx, grad_y, grad_z):
    """The gradients of x, residual, gate, weight and bias."""
    return _gradients_of(ctx.saved_tensors, ctx.options, ctx.dtypes, ctx.needs_input_grad[:5], grad_y, grad_z)


def _gradients_of(saved, options, dtypes, wants, grad_y, grad_z):
    """The same from what _save() saves; `dtypes` and `wants` are in the order of the gradients."""
    if grad_y is None and grad_z is None:
        return (None,) * 5
    x_dtype, *dtypes = dtypes
    residual_dtype, _, weight_dtype, bias_dtype = (
        dtype if wanted else None for dtype, wanted in zip(dtypes, wants[1:], strict=False)
    )
    added = grad_y.to(residual_dtype) if options.adds_y and residual_dtype else None  # perhaps no copy, as of x + y
    residual_dtype = None if options.adds_y else residual_dtype
    wanted = Wanted(False, x_dtype, wants[0], wants[2], residual_dtype, weight_dtype, bias_dtype)
    arguments = (grad_y, grad_z, *saved, *options, *wanted)
    # The reference also if y was unused: a zero gradient times an infinite rstd is NaN
    is_kernels = grad_y is not None and not torch.is_grad_enabled()
    if is_kernels and (is_dynamo_compiling() or not _ops.is_plain_eager()):
        is_kernels = _ops.path_of(*(t for t in arguments[:8] if t is not None)) in ("kernel", "operator")
    grads = (_ops.call_norm_backward if is_kernels else reference.norm_backward)(*arguments)
    return grads if added is None else (grads[0], added, *grads[2:])


def _register_autograd() -> torch.library.Library:
    """Register autograd for the operators of the wheel's library, as csrc/torch/library.cpp does in the extension. The
    returned object must stay alive."""

    def redispatched(keys, arguments):
        with torch._C._AutoDispatchBelowAutograd():
            return _ops.norm_forward.redispatch(keys & torch._C._after_autograd_keyset, *arguments)

    class OperatorFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *arguments):
            *given, keys = arguments
            y, z, stats = redispatched(keys, given)
            tensors, options = given[:6], Options(*given[6:])
            options = options._replace(residual_dtype=reference.z_dtype(tensors[1], options))
            has_z = options.residual_dtype is not None
            _save(ctx, tensors, options, z if has_z else None, stats)
            ctx.mark_non_differentiable(stats, *([] if has_z and any(ctx.needs_input_grad[:3]) else [z]))
            return y, z, stats

        @staticmethod
        def backward(ctx, grad_y, grad_z, _):
            return *_gradients(ctx, grad_y, grad_z), *[None] * (2 + len(Options._fields))

    def forward(keys, *arguments):
        given = [t for t in arguments[:5] if t is not None]
        if any(torch.autograd.forward_ad.unpack_dual(t).tangent is not None for t in given):
            raise NotImplementedError("torch.ops.fused_layernorm.norm_forward has no forward-mode derivative; the "
                                      "functions of fused_layernorm have one")  # fmt: skip
        return OperatorFunction.apply(*arguments, keys) if _wants_gradients(given) else redispatched(keys, arguments)

    def refuse(name):
        def backward(ctx, *gradients):
            raise RuntimeError(f"the derivative of torch.ops.fused_layernorm.{name} is not implemented; the "
                               "functions of fused_layernorm have it")  # fmt: skip

        return backward

    library = torch.library.Library("fused_layernorm", "IMPL")
    library.impl(_ops.norm_forward, forward, "Autograd", with_keyset=True)
    for op in (_ops.norm_backward, _ops.sandwich_norm, _ops.norm_quant):
        torch.library.register_autograd(op, refuse(op._opname))
    return library


def _record(x, residual, gate, weight, bias, options):
    return NormFunction.apply(x, residual, gate, weight, bias, None, Options(*options), False)


if _ops.norm_forward is not None and not _backend.extension:
    _autograd = _register_autograd()
_ops.set_callbacks(_norm, _record)
