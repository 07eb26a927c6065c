"""The specification in plain PyTorch: what every kernel of this library must compute, in any dtype, differentiable.

It is the fallback where no kernel runs (no compiled extension, devices other than CPU and CUDA), the path in torch.func
transforms and forward-mode AD, and the double backward of the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which statistics and sums of `dtype` are kept: fp64 for fp64, fp32 for the rest."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_norm_arguments(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_shape: Sequence[int] | None,
    weight_offset: float,
    out_dtype: torch.dtype | None,
) -> tuple[int, ...]:
    """Raise as csrc/norm_ops.cpp does for arguments no norm can take; return normalized_shape as a tuple."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a Tensor, got {type(x).__name__}")
    if x.dtype not in DTYPES:
        raise TypeError(f"x must be float16, bfloat16, float32 or float64, got {x.dtype}")
    if x.layout != torch.strided:
        raise TypeError(f"x must be a dense (strided) tensor, got layout {x.layout}")
    if normalized_shape is None:
        given = weight if weight is not None else bias
        if given is None:
            raise ValueError("normalized_shape is needed when neither weight nor bias is given")
        normalized_shape = given.shape  # its sizes are tensors under torch.jit.trace
    elif isinstance(normalized_shape, str) or not all(isinstance(n, (int, torch.SymInt)) for n in normalized_shape):
        raise TypeError(f"normalized_shape must be an int or a sequence of ints, got {normalized_shape!r}")
    normalized_shape = tuple(normalized_shape)
    if not normalized_shape:
        raise RuntimeError("normalized_shape must have at least one dimension, got ()")
    if tuple(x.shape[max(x.dim() - len(normalized_shape), 0) :]) != normalized_shape:
        raise RuntimeError(f"x must have shape [*, {_join(normalized_shape)}] to match normalized_shape, "
                           f"got [{_join(x.shape)}]")  # fmt: skip
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is None:
            continue
        if not isinstance(parameter, Tensor):
            raise TypeError(f"{name} must be a Tensor or None, got {type(parameter).__name__}")
        if tuple(parameter.shape) != normalized_shape:
            raise RuntimeError(f"{name} must have the shape of normalized_shape, [{_join(normalized_shape)}], "
                               f"got [{_join(parameter.shape)}]")  # fmt: skip
        if parameter.device != x.device:
            raise RuntimeError(f"{name} must be on x's device, {x.device}, got {parameter.device}")
        if parameter.dtype != x.dtype and (parameter.dtype != torch.float32 or x.dtype == torch.float64):
            raise TypeError(f"{name} must be of x's dtype, {x.dtype}"
                            f"{'' if x.dtype == torch.float64 else ', or float32'}, got {parameter.dtype}")  # fmt: skip
        if parameter.layout != torch.strided:
            raise TypeError(f"{name} must be a dense (strided) tensor, got layout {parameter.layout}")
    if weight is None and weight_offset != 0.0:
        raise ValueError(f"weight_offset needs a weight to be added to, got weight=None, weight_offset={weight_offset}")
    if out_dtype is not None and out_dtype not in DTYPES:
        raise TypeError(f"out_dtype must be float16, bfloat16, float32 or float64, got {out_dtype}")
    return normalized_shape


def _join(shape: Sequence[int]) -> str:
    return ", ".join(str(size) for size in shape)


def _x_hat_and_rstd(x: Tensor, dims: tuple[int, ...], eps: float, is_rms_norm: bool) -> tuple[Tensor, Tensor]:
    z = x.to(accumulation_dtype(x.dtype))
    if not is_rms_norm:
        z = z - z.mean(dims, keepdim=True)
        z = z - z.mean(dims, keepdim=True)  # what rounding the mean left behind: matters where |mean| >> sigma
    rstd = (z * z).mean(dims, keepdim=True).add(eps).rsqrt()
    return z * rstd, rstd


def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_shape: Sequence[int],
    eps: float,
    weight_offset: float,
    is_rms_norm: bool,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """y = x_hat * (weight + weight_offset) + bias, with x_hat = (x - mean) * rstd over the last dims."""
    dims = tuple(range(-len(normalized_shape), 0))
    y, _ = _x_hat_and_rstd(x, dims, eps, is_rms_norm)
    if weight is not None:
        y = y * (weight.to(y.dtype) + weight_offset)
    if bias is not None:
        y = y + bias.to(y.dtype)
    return y.to(out_dtype or x.dtype).contiguous()


def norm_backward(
    grad_output: Tensor,
    x: Tensor,
    weight: Tensor | None,
    normalized_shape: Sequence[int],
    eps: float,
    weight_offset: float,
    is_rms_norm: bool,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of `norm` with respect to x, weight (None without weight) and bias (None without bias_dtype).

    wdy = (weight + weight_offset) * grad_output    c1 = mean(x_hat * wdy)    c2 = mean(wdy), 0 for RMSNorm
    grad_input = (wdy - x_hat * c1 - c2) * rstd
    grad_weight = sum(grad_output * x_hat)          grad_bias = sum(grad_output)
    """
    dims = tuple(range(-len(normalized_shape), 0))
    row_dims = tuple(range(x.dim() - len(normalized_shape)))
    x_hat, rstd = _x_hat_and_rstd(x, dims, eps, is_rms_norm)
    grad_output = grad_output.to(x_hat.dtype)
    wdy = grad_output if weight is None else grad_output * (weight.to(x_hat.dtype) + weight_offset)
    grad_input = wdy - x_hat * (x_hat * wdy).mean(dims, keepdim=True)
    if not is_rms_norm:
        grad_input = grad_input - wdy.mean(dims, keepdim=True)
    grad_input = (grad_input * rstd).to(x.dtype)
    grad_weight = grad_bias = None
    if weight is not None:
        grad_weight = _sum(grad_output * x_hat, row_dims).to(weight.dtype)
    if bias_dtype is not None:
        grad_bias = _sum(grad_output, row_dims).to(bias_dtype)
    return grad_input, grad_weight, grad_bias


def _sum(values: Tensor, dims: tuple[int, ...]) -> Tensor:
    return values.sum(dims) if dims else values  # sum(()) would sum over every dimension
