"""The specification in plain PyTorch: what every kernel of this library must compute, in any dtype, differentiable.

It is the fallback where no kernel runs (no compiled extension, devices other than CPU and CUDA), the path in torch.func
transforms and forward-mode AD, and the double backward of the kernels.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

ROUNDINGS = ("torch", "llama", "gemma")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which statistics and sums of `dtype` are kept: fp64 for fp64, fp32 for the rest."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def as_shape(normalized_shape: Any) -> tuple[int, ...]:
    """normalized_shape as a tuple of Python's own ints: torch.compile takes numpy's for tensors."""
    is_size = isinstance(normalized_shape, (int, torch.SymInt))
    if not is_size and hasattr(normalized_shape, "__index__"):  # numpy's numbers; an array may be of sizes
        is_size = not getattr(normalized_shape, "ndim", 0)
    try:
        return tuple(map(_as_size, (normalized_shape,) if is_size else normalized_shape))
    except TypeError:
        raise TypeError(f"normalized_shape must be an int or a sequence of ints, got {normalized_shape!r}") from None


def _as_size(n: Any) -> Any:
    if isinstance(n, bool):
        raise TypeError
    return n if isinstance(n, (int, torch.SymInt)) else operator.index(n)  # of a SymInt that would be a constant


def check_norm_arguments(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_shape: int | Sequence[int] | None,
    eps: float,
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
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and not isinstance(parameter, Tensor):
            # Where torch.nn.functional's norms have normalized_shape
            hint = "; normalized_shape is given by keyword" if isinstance(parameter, (int, tuple, list)) else ""
            raise TypeError(f"{name} must be a Tensor or None, got {type(parameter).__name__}{hint}")
    if normalized_shape is None:
        given = weight if weight is not None else bias
        if given is None:
            raise ValueError("normalized_shape is needed when neither weight nor bias is given")
        normalized_shape = tuple(given.shape)  # its sizes are tensors under torch.jit.trace
    else:
        normalized_shape = as_shape(normalized_shape)
    if not normalized_shape:
        raise RuntimeError("normalized_shape must have at least one dimension, got ()")
    if tuple(x.shape[max(x.dim() - len(normalized_shape), 0) :]) != normalized_shape:
        raise RuntimeError(f"x must have shape [*, {_join(normalized_shape)}] to match normalized_shape, "
                           f"got [{_join(x.shape)}]")  # fmt: skip
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is None:
            continue
        if tuple(parameter.shape) != normalized_shape:
            raise RuntimeError(f"{name} must have the shape of normalized_shape, [{_join(normalized_shape)}], "
                               f"got [{_join(parameter.shape)}]")  # fmt: skip
        if parameter.device != x.device:
            raise RuntimeError(f"{name} must be on x's device, {x.device}, got {parameter.device}")
        if not _goes_with(parameter.dtype, x.dtype):
            raise TypeError(f"{name} must be of x's dtype, {_dtypes_beside(x)}, got {parameter.dtype}")
        if parameter.layout != torch.strided:
            raise TypeError(f"{name} must be a dense (strided) tensor, got layout {parameter.layout}")
    check_number("eps", eps)
    check_number("weight_offset", weight_offset)
    if weight is None and weight_offset != 0.0:
        raise ValueError(f"weight_offset needs a weight to be added to, got weight=None, weight_offset={weight_offset}")
    if out_dtype is not None and out_dtype not in DTYPES:
        raise TypeError(f"out_dtype must be float16, bfloat16, float32 or float64, got {out_dtype}")
    return normalized_shape


def check_add_arguments(
    x: Tensor, residual: Tensor | None, residual_dtype: torch.dtype | None, dropout_p: float
) -> torch.dtype:
    """Raise for what cannot be added to an x that is fine; return the dtype of z."""
    check_dropout_p(dropout_p)
    given = x.dtype
    if residual is not None:
        if not isinstance(residual, Tensor):
            raise TypeError(f"residual must be a Tensor or None, got {type(residual).__name__}")
        if residual.shape != x.shape:
            raise RuntimeError(f"residual must have x's shape, [{_join(x.shape)}], got [{_join(residual.shape)}]")
        if residual.device != x.device:
            raise RuntimeError(f"residual must be on x's device, {x.device}, got {residual.device}")
        given = residual.dtype
        if not _goes_with(given, x.dtype):
            raise TypeError(f"residual must be of x's dtype, {_dtypes_beside(x)}, got {given}")
        if residual.layout != torch.strided:
            raise TypeError(f"residual must be a dense (strided) tensor, got layout {residual.layout}")
    if residual_dtype is None:
        return given
    if not _goes_with(residual_dtype, x.dtype):
        raise TypeError(f"residual_dtype must be x's dtype, {_dtypes_beside(x)}, got {residual_dtype}")
    return residual_dtype


def as_modulation(name: str, t: Tensor, x: Tensor, normalized_ndim: int) -> Tensor:
    """scale, shift or gate with as many dimensions as x, to be broadcast; raise for what does not fit x."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a Tensor, got {type(t).__name__}")
    if t.device != x.device:
        raise RuntimeError(f"{name} must be on x's device, {x.device}, got {t.device}")
    if t.dtype != x.dtype and t.dtype in DTYPES and torch.promote_types(t.dtype, x.dtype) == x.dtype:
        t = t.to(x.dtype)  # of a projection under autocast, narrower than x: loses nothing
    if not _goes_with(t.dtype, x.dtype):
        raise TypeError(f"{name} must be of x's dtype, {_dtypes_beside(x)}, or narrower, got {t.dtype}")
    if t.layout != torch.strided:
        raise TypeError(f"{name} must be a dense (strided) tensor, got layout {t.layout}")
    leading = x.dim() - normalized_ndim
    shape, row = tuple(t.shape), tuple(x.shape[leading:])
    if len(shape) == x.dim():
        if shape[leading:] == row and all(n in (1, of) for n, of in zip(shape[:leading], x.shape, strict=False)):
            return t
    elif len(shape) == len(row) and shape == row:  # lengths first: symbolic sizes that are compared become guards
        return t.reshape(*[1] * leading, *row)
    elif leading > 1 and len(shape) == 1 + len(row) and shape == (x.shape[0], *row):
        return t.reshape(x.shape[0], *[1] * (leading - 1), *row)
    raise RuntimeError(
        f"{name} must be of x's shape, [{_join(x.shape)}], with 1 for any of its first {leading} dimensions, or "
        f"[{_join((*x.shape[:1], *row))}], or [{_join(row)}], got [{_join(shape)}]"
    )


def check_number(name: str, value: Any) -> None:
    # float first, as it is quick to find; numpy's numbers are Real
    is_number = isinstance(value, (float, numbers.Real, torch.SymFloat, torch.SymInt))
    if not (is_number or (isinstance(value, Tensor) and value.numel() == 1)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")


def check_dropout_p(dropout_p: float) -> None:
    if not isinstance(dropout_p, (int, float)):
        raise TypeError(f"dropout_p must be a number, got {type(dropout_p).__name__}")
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p must be from 0 to 1, got {dropout_p}")


def _goes_with(dtype: torch.dtype, x_dtype: torch.dtype) -> bool:
    return dtype == x_dtype or (dtype == torch.float32 and x_dtype != torch.float64)


def _dtypes_beside(x: Tensor) -> str:
    """What `_goes_with` allows, in words."""
    return f"{x.dtype}{'' if x.dtype in (torch.float32, torch.float64) else ', or float32'}"


def _join(shape: Sequence[int]) -> str:
    return ", ".join(str(size) for size in shape)


def dropout_mask(philox: Tensor, rows: int, hidden_size: int, dropout_p: float) -> Tensor:
    """Which elements of [rows, hidden_size] dropout keeps: csrc/philox.h in PyTorch operations.

    philox holds two int64, seed and offset. Word k of Philox4x32-7 with key seed and counter (octet, row, offset) is
    the number of column 8 * octet + k, with its halves exchanged that of column 8 * octet + 4 + k; an element is kept
    where its number is at least dropout_p * 2^32 (and, with a dropout_p above 0, at least 1).
    """
    low = 0xFFFFFFFF
    seed, offset = philox.unbind()
    row = torch.arange(rows, device=philox.device)[:, None]
    c0 = torch.arange((hidden_size + 7) // 8, device=philox.device)[None]
    offset = offset ^ (row >> 32)
    c1, c2, c3 = row & low, offset & low, (offset >> 32) & low
    key0, key1 = seed & low, (seed >> 32) & low
    for _ in range(7):
        product0, product1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2  # int64 wraps around, which leaves their bits right
        c0, c2 = ((product1 >> 32) & low) ^ c1 ^ key0, ((product0 >> 32) & low) ^ c3 ^ key1
        c1, c3 = product1 & low, product0 & low
        key0, key1 = (key0 + 0x9E3779B9) & low, (key1 + 0xBB67AE85) & low
    words = torch.stack((c0, c1, c2, c3), -1)  # all of [rows, octets] after four rounds
    exchanged = ((words << 16) & low) | (words >> 16)
    numbers = torch.cat((words, exchanged), -1).flatten(1)[:, :hidden_size]
    return numbers >= max(int(dropout_p * 2**32), 1 if dropout_p > 0 else 0)


def dropout(x: Tensor, mask: Tensor, dropout_p: float, dtype: torch.dtype) -> Tensor:
    """x / (1 - dropout_p) where mask (of x's numbers of elements) says so, else 0, rounded to dtype once."""
    scale = 1 / (1 - dropout_p) if dropout_p < 1 else 0.0
    wide = x.to(torch.promote_types(accumulation_dtype(x.dtype), dtype))
    return torch.where(mask.view(x.shape), wide * scale, torch.zeros((), dtype=wide.dtype, device=x.device)).to(dtype)


def add(x: Tensor, residual: Tensor | None, dtype: torch.dtype) -> Tensor:
    """z = residual + x, rounded to dtype once; new memory."""
    if residual is None:
        return x.to(dtype, copy=True, memory_format=torch.contiguous_format)
    wide = torch.promote_types(torch.promote_types(x.dtype, residual.dtype), dtype)
    return (residual.to(wide) + x.to(wide)).to(dtype).contiguous()


def of_each_row(parameter: Tensor, x: Tensor, normalized_ndim: int) -> Tensor:
    """weight or bias as it is broadcast to x; [n, *normalized] belongs to n equal parts of x's rows."""
    if parameter.dim() <= normalized_ndim:
        return parameter
    rows = x.shape[: x.dim() - normalized_ndim].numel()
    each = rows // parameter.shape[0]
    return parameter.unsqueeze(1).expand(-1, each, *parameter.shape[1:]).reshape(x.shape)


def _x_hat_and_rstd(
    x: Tensor, dims: tuple[int, ...], eps: float, is_rms_norm: bool, stats_grad: bool
) -> tuple[Tensor, Tensor]:
    def source(z: Tensor) -> Tensor:  # what statistics are taken of
        return z if stats_grad else z.detach()

    z = x.to(accumulation_dtype(x.dtype))
    if not is_rms_norm:
        z = z - source(z).mean(dims, keepdim=True)
        z = z - source(z).mean(dims, keepdim=True)  # what rounding the mean left: matters where |mean| >> sigma
    rstd = (source(z) * source(z)).mean(dims, keepdim=True).add(eps).rsqrt()
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
    stats_grad: bool = True,
    rounding: str = "torch",
) -> Tensor:
    """y = x_hat * (weight + weight_offset) + bias, with x_hat = (x - mean) * rstd over the last dims.

    Without stats_grad, mean and rstd are constants to differentiation. With rounding "llama", x_hat is rounded to x's
    dtype, and what follows is in the wider of that and weight's dtype, as in transformers' LlamaRMSNorm; "gemma" is
    "torch" for this function: the operations, and so the bits, are those of GemmaRMSNorm.
    """
    dims = tuple(range(-len(normalized_shape), 0))
    y, _ = _x_hat_and_rstd(x, dims, eps, is_rms_norm, stats_grad)
    if rounding == "llama":
        if weight is not None:  # the product of 16-bit numbers is rounded once, also with an offset
            wide, narrow = y.dtype, torch.promote_types(x.dtype, weight.dtype)
            weight = weight.to(wide) + weight_offset if weight_offset else weight.to(wide)  # -0 stays it
            y = (y.to(x.dtype).to(wide) * weight).to(narrow)
        else:
            y = y.to(x.dtype)
    elif weight is not None:
        y = y * (of_each_row(weight, x, len(dims)).to(y.dtype) + weight_offset)
    if bias is not None:
        y = y + (bias if rounding == "llama" else of_each_row(bias, x, len(dims)).to(y.dtype))
    return y.to(out_dtype or x.dtype).contiguous()


def rms_stats(x: Tensor, normalized_shape: Sequence[int], eps: float) -> Tensor:
    """The stats that norm_forward of the kernels returns for RMSNorm, by the operations of `norm`."""
    _, rstd = _x_hat_and_rstd(x, tuple(range(-len(normalized_shape), 0)), eps, True, True)
    return rstd.reshape(1, -1)


def norm_backward(
    grad_output: Tensor,
    x: Tensor,
    weight: Tensor | None,
    normalized_shape: Sequence[int],
    eps: float,
    weight_offset: float,
    is_rms_norm: bool,
    bias_dtype: torch.dtype | None,
    stats_grad: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of `norm` with respect to x, weight (None without weight) and bias (None without bias_dtype)."""
    dims = tuple(range(-len(normalized_shape), 0))
    x_hat, rstd = _x_hat_and_rstd(x, dims, eps, is_rms_norm, stats_grad)
    return _gradients(
        grad_output, x_hat, rstd, weight, len(dims), weight_offset, is_rms_norm, x.dtype, bias_dtype, stats_grad
    )


def backward_from_y(
    grad_output: Tensor,
    y: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    rstd: Tensor,
    normalized_shape: Sequence[int],
    weight_offset: float,
    is_rms_norm: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The same from y and the rows' rstd: x_hat = (y - bias) / (weight + weight_offset)."""
    ndim = len(normalized_shape)
    x_hat = y.to(rstd.dtype)
    if bias is not None:
        x_hat = x_hat - bias
    if weight is not None:
        x_hat = x_hat / (weight.to(rstd.dtype) + weight_offset)
    rstd = rstd.view(*y.shape[: y.dim() - ndim], *[1] * ndim)
    bias_dtype = None if bias is None else bias.dtype
    return _gradients(grad_output, x_hat, rstd, weight, ndim, weight_offset, is_rms_norm, y.dtype, bias_dtype, True)


def _gradients(
    grad_output: Tensor,
    x_hat: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    normalized_ndim: int,
    weight_offset: float,
    is_rms_norm: bool,
    x_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    stats_grad: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """wdy = (weight + weight_offset) * grad_output    c1 = mean(x_hat * wdy)    c2 = mean(wdy), 0 for RMSNorm
    (c1 = c2 = 0 without stats_grad)
    grad_input = (wdy - x_hat * c1 - c2) * rstd
    grad_weight = sum(grad_output * x_hat)          grad_bias = sum(grad_output)
    """
    dims = tuple(range(-normalized_ndim, 0))

    def sum_of_rows(values: Tensor) -> Tensor:  # of x's shape
        if weight is not None and weight.dim() > normalized_ndim:
            return values.reshape(weight.shape[0], -1, *weight.shape[1:]).sum(1)
        row_dims = tuple(range(x_hat.dim() - normalized_ndim))
        return values.sum(row_dims) if row_dims else values  # sum(()) would sum over every dimension

    grad_output = grad_output.to(x_hat.dtype)
    wdy = grad_output
    if weight is not None:
        wdy = grad_output * (of_each_row(weight, x_hat, normalized_ndim).to(x_hat.dtype) + weight_offset)
    grad_input = wdy
    if stats_grad:
        grad_input = grad_input - x_hat * (x_hat * wdy).mean(dims, keepdim=True)
    if stats_grad and not is_rms_norm:
        grad_input = grad_input - wdy.mean(dims, keepdim=True)
    grad_input = (grad_input * rstd).to(x_dtype)
    grad_weight = grad_bias = None
    if weight is not None:
        grad_weight = sum_of_rows(grad_output * x_hat).to(weight.dtype)
    if bias_dtype is not None:
        grad_bias = sum_of_rows(grad_output).to(bias_dtype)
    return grad_input, grad_weight, grad_bias
