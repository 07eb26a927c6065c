"""The specification in plain PyTorch: what every kernel of this library must compute, in any dtype, differentiable.

It is the fallback where no kernel runs (no compiled extension, devices other than CPU and CUDA), the path in torch.func
transforms and forward-mode AD, and the double backward of the kernels.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

ROUNDINGS = ("torch", "llama", "gemma", "llama_exact", "gemma_exact")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Options(NamedTuple):
    """The options of both operators, in the order of csrc/torch/norm_call.h."""

    normalized_ndim: int
    eps: float
    weight_offset: float = 0.0
    is_rms_norm: bool = False
    stats_grad: bool = True
    activation: int = 0  # index into ACTIVATIONS; of y, or of the gate of a gated norm
    dropout_p: float = 0.0
    drops_y: bool = False
    out_dtype: torch.dtype | None = None
    residual_dtype: torch.dtype | None = None
    gates_y: bool = False  # a gated norm's gate multiplies y, not x
    per_head: bool = False  # weight and bias have x's last dimensions before the normalized ones too
    adds_y: bool = False  # residual is added to y, not to x
    rounds_x_hat: bool = False  # to z's dtype, before the product with weight (Llama)


class Wanted(NamedTuple):
    """The options of norm_backward after Options."""

    z_is_y: bool
    x_dtype: torch.dtype
    wants_x: bool
    wants_gate: bool
    grad_residual_dtype: torch.dtype | None
    grad_weight_dtype: torch.dtype | None
    grad_bias_dtype: torch.dtype | None


def _gelu_slope(u: Tensor) -> Tensor:
    density = torch.exp(-0.5 * u * u) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + torch.erf(u / math.sqrt(2))) + u * density


def _gelu_tanh_slope(u: Tensor) -> Tensor:
    k = 2 * math.sqrt(2 / math.pi)
    v = k * (u + 0.044715 * u**3)  # gelu is u * sigmoid(v). 1 - sigmoid(v) would cancel, also in the second derivative
    s = torch.sigmoid(v)
    return s + u * s * torch.sigmoid(-v) * k * (1 + 3 * 0.044715 * u * u)


def _silu_slope(u: Tensor) -> Tensor:
    s = torch.sigmoid(u)
    return s * (1 + u * (1 - s))


def _sigmoid_slope(u: Tensor) -> Tensor:
    return torch.sigmoid(u) * torch.sigmoid(-u)


# Name, function, derivative; the order is that of csrc/norm_params.h. The last is for gates only.
ACTIVATIONS: tuple[tuple[str, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]], ...] = (
    ("", lambda u: u, torch.ones_like),
    ("relu", F.relu, lambda u: (u > 0).to(u.dtype)),
    ("gelu", F.gelu, _gelu_slope),
    ("gelu_tanh", lambda u: F.gelu(u, approximate="tanh"), _gelu_tanh_slope),
    ("silu", F.silu, _silu_slope),
    ("sigmoid", torch.sigmoid, _sigmoid_slope),
)
ACTIVATION_NAMES = tuple(name for name, _, _ in ACTIVATIONS)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics and sums for inputs of `dtype`: fp64 for fp64, fp32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def as_shape(normalized_shape: Any) -> tuple[int, ...]:
    """normalized_shape as a tuple of Python ints: torch.compile treats numpy ints as tensors."""
    is_size = isinstance(normalized_shape, (int, torch.SymInt))
    if not is_size and hasattr(normalized_shape, "__index__"):  # a numpy number; an array may hold several sizes
        is_size = not getattr(normalized_shape, "ndim", 0)
    try:
        return tuple(map(_as_size, (normalized_shape,) if is_size else normalized_shape))
    except TypeError:
        raise TypeError(f"normalized_shape must be an int or a sequence of ints, got {normalized_shape!r}") from None


def _as_size(n: Any) -> Any:
    if isinstance(n, bool):
        raise TypeError
    return n if isinstance(n, (int, torch.SymInt)) else operator.index(n)  # index() of a SymInt is a constant


def check_norm_arguments(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_shape: int | Sequence[int] | None,
    eps: float,
    weight_offset: float,
    out_dtype: torch.dtype | None,
) -> tuple[int, ...]:
    """Raise for arguments that no norm can take, as csrc/torch/norm_ops.cpp does; return normalized_shape as a
    tuple."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a Tensor, got {type(x).__name__}")
    if x.dtype not in DTYPES:
        raise TypeError(f"x must be float16, bfloat16, float32 or float64, got {x.dtype}")
    if x.layout != torch.strided:
        raise TypeError(f"x must be a dense (strided) tensor, got layout {x.layout}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and not isinstance(parameter, Tensor):
            # torch.nn.functional's norms have normalized_shape in this position
            hint = "; normalized_shape is given by keyword" if isinstance(parameter, (int, tuple, list)) else ""
            raise TypeError(f"{name} must be a Tensor or None, got {type(parameter).__name__}{hint}")
    taken_from = None
    if normalized_shape is None:
        given = weight if weight is not None else bias
        if given is None:
            raise ValueError("normalized_shape is needed when neither weight nor bias is given")
        taken_from = "weight" if given is weight else "bias"
        normalized_shape = tuple(given.shape)  # its sizes are tensors under torch.jit.trace
    else:
        normalized_shape = as_shape(normalized_shape)
    if not normalized_shape:
        raise RuntimeError("normalized_shape must have at least one dimension, got ()")
    if tuple(x.shape[max(x.dim() - len(normalized_shape), 0) :]) != normalized_shape:
        if taken_from:
            raise RuntimeError(f"{taken_from} must have the shape of x's last dimensions, "
                               f"got [{_join(normalized_shape)}] beside x of [{_join(x.shape)}]")  # fmt: skip
        raise RuntimeError(f"x must have shape [*, {_join(normalized_shape)}] to match normalized_shape, "
                           f"got [{_join(x.shape)}]")  # fmt: skip
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is None:
            continue
        own = parameter.dim() if taken_from is None else 0  # more dimensions than normalized_shape: per head
        is_per_head = len(normalized_shape) < own <= x.dim() and tuple(parameter.shape) == tuple(x.shape[-own:])
        if not is_per_head and tuple(parameter.shape) != normalized_shape:
            raise RuntimeError(f"{name} must have the shape of normalized_shape, [{_join(normalized_shape)}], "
                               f"got [{_join(parameter.shape)}]")  # fmt: skip
        if parameter.device != x.device:
            raise RuntimeError(f"{name} must be on x's device, {x.device}, got {parameter.device}")
        if not goes_with(parameter.dtype, x.dtype):
            raise TypeError(f"{name} must be of x's dtype, {_dtypes_beside(x)}, got {parameter.dtype}")
        if parameter.layout != torch.strided:
            raise TypeError(f"{name} must be a dense (strided) tensor, got layout {parameter.layout}")
    if weight is not None and bias is not None and weight.dim() != bias.dim():
        raise RuntimeError(f"bias must have weight's shape, [{_join(weight.shape)}], got [{_join(bias.shape)}]")
    check_number("eps", eps)
    check_number("weight_offset", weight_offset)
    if weight is None and weight_offset != 0.0:
        raise ValueError(f"weight_offset needs a weight to be added to, got weight=None, weight_offset={weight_offset}")
    if out_dtype is not None and out_dtype not in DTYPES:
        raise TypeError(f"out_dtype must be torch.float16, torch.bfloat16, torch.float32 or torch.float64, or None, "
                        f"got {out_dtype!r}")  # fmt: skip
    return normalized_shape


def check_gate(x: Tensor, gate: Tensor) -> None:
    """Raise for an invalid gate of a valid x."""
    if not isinstance(gate, Tensor):
        raise TypeError(f"gate must be a Tensor, got {type(gate).__name__}")
    _check_like("gate", gate, x)
    if gate.dtype not in DTYPES:
        raise TypeError(f"gate must be float16, bfloat16, float32 or float64, got {gate.dtype}")


def _check_like(name: str, t: Tensor, x: Tensor) -> None:
    if t.shape != x.shape:
        raise RuntimeError(f"{name} must have x's shape, [{_join(x.shape)}], got [{_join(t.shape)}]")
    if t.device != x.device:
        raise RuntimeError(f"{name} must be on x's device, {x.device}, got {t.device}")
    if t.layout != torch.strided:
        raise TypeError(f"{name} must be a dense (strided) tensor, got layout {t.layout}")


def check_add_arguments(
    x: Tensor, residual: Tensor | None, residual_dtype: torch.dtype | None, dropout_p: float
) -> torch.dtype:
    """Raise for a residual that cannot be added to a valid x; return the dtype of z."""
    check_dropout_p(dropout_p)
    given = x.dtype
    if residual is not None:
        if not isinstance(residual, Tensor):
            raise TypeError(f"residual must be a Tensor or None, got {type(residual).__name__}")
        _check_like("residual", residual, x)
        given = residual.dtype
        if not goes_with(given, x.dtype):
            raise TypeError(f"residual must be of x's dtype, {_dtypes_beside(x)}, got {given}")
    if residual_dtype is None:
        return given
    if not goes_with(residual_dtype, x.dtype):
        raise TypeError(f"residual_dtype must be x's dtype, {_dtypes_beside(x)}, got {residual_dtype!r}")
    return residual_dtype


def as_modulation(name: str, t: Tensor, x: Tensor, normalized_ndim: int) -> Tensor:
    """scale, shift or gate with as many dimensions as x, for broadcasting; raise if it does not fit x."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a Tensor, got {type(t).__name__}")
    if t.device != x.device:
        raise RuntimeError(f"{name} must be on x's device, {x.device}, got {t.device}")
    if t.dtype != x.dtype and t.dtype in DTYPES and torch.promote_types(t.dtype, x.dtype) == x.dtype:
        t = t.to(x.dtype)  # such as from a projection under autocast; widening loses nothing
    if not goes_with(t.dtype, x.dtype):
        raise TypeError(f"{name} must be of x's dtype, {_dtypes_beside(x)}, or narrower, got {t.dtype}")
    if t.layout != torch.strided:
        raise TypeError(f"{name} must be a dense (strided) tensor, got layout {t.layout}")
    leading = x.dim() - normalized_ndim
    shape, row = tuple(t.shape), tuple(x.shape[leading:])
    if len(shape) == x.dim():
        if shape[leading:] == row and all(n in (1, of) for n, of in zip(shape[:leading], x.shape, strict=False)):
            return t
    elif len(shape) == len(row) and shape == row:  # lengths first: comparing symbolic sizes adds guards
        return t.reshape(*[1] * leading, *row)
    elif leading > 1 and len(shape) == 1 + len(row) and shape == (x.shape[0], *row):
        return t.reshape(x.shape[0], *[1] * (leading - 1), *row)
    raise RuntimeError(
        f"{name} must be of x's shape, [{_join(x.shape)}], with 1 for any of its first {leading} dimensions, or "
        f"[{_join((*x.shape[:1], *row))}], or [{_join(row)}], got [{_join(shape)}]"
    )


def check_number(name: str, value: Any) -> None:
    # float first, because it is found quickly; numpy's numbers are Real
    is_number = isinstance(value, (float, numbers.Real, torch.SymFloat, torch.SymInt))
    if not (is_number or (isinstance(value, Tensor) and value.numel() == 1)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")


def check_dropout_p(dropout_p: float) -> None:
    if not isinstance(dropout_p, (int, float)):
        raise TypeError(f"dropout_p must be a number, got {type(dropout_p).__name__}")
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p must be from 0 to 1, got {dropout_p}")


def goes_with(dtype: torch.dtype, x_dtype: torch.dtype) -> bool:
    return dtype == x_dtype or (dtype == torch.float32 and x_dtype != torch.float64)


def _dtypes_beside(x: Tensor) -> str:
    """The dtypes that `goes_with` allows, in words."""
    return f"{x.dtype}{'' if x.dtype in (torch.float32, torch.float64) else ', or float32'}"


def _join(shape: Sequence[int]) -> str:
    return ", ".join(str(size) for size in shape)


def dropout_mask(philox: Tensor, rows: int, hidden_size: int, dropout_p: float) -> Tensor:
    """The elements of [rows, hidden_size] that dropout keeps: csrc/philox.h in PyTorch operations.

    philox holds two int64, seed and offset. Word k of Philox4x32-7 with key seed and counter (octet, row, offset) is
    the number of column 8 * octet + k; with exchanged halves it is the number of column 8 * octet + 4 + k. An element
    is kept if its number is at least dropout_p * 2^32 (and, for a dropout_p above 0, at least 1).
    """
    low = 0xFFFFFFFF
    seed, offset = philox.unbind()
    row = torch.arange(rows, device=philox.device)[:, None]
    c0 = torch.arange((hidden_size + 7) // 8, device=philox.device)[None]
    offset = offset ^ (row >> 32)
    c1, c2, c3 = row & low, offset & low, (offset >> 32) & low
    key0, key1 = seed & low, (seed >> 32) & low
    for _ in range(7):
        product0, product1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2  # int64 wraps around with the right bits
        c0, c2 = ((product1 >> 32) & low) ^ c1 ^ key0, ((product0 >> 32) & low) ^ c3 ^ key1
        c1, c3 = product1 & low, product0 & low
        key0, key1 = (key0 + 0x9E3779B9) & low, (key1 + 0xBB67AE85) & low
    words = torch.stack((c0, c1, c2, c3), -1)  # all of [rows, octets] after four rounds
    exchanged = ((words << 16) & low) | (words >> 16)
    numbers = torch.cat((words, exchanged), -1).flatten(1)[:, :hidden_size]
    return numbers >= max(int(dropout_p * 2**32), 1 if dropout_p > 0 else 0)


def dropout(x: Tensor, mask: Tensor, dropout_p: float, dtype: torch.dtype) -> Tensor:
    """x / (1 - dropout_p) where mask is true, else 0, rounded to dtype once. mask has x's number of elements."""
    scale = 1 / (1 - dropout_p) if dropout_p < 1 else 0.0
    wide = x.to(torch.promote_types(accumulation_dtype(x.dtype), dtype))
    return torch.where(mask.view(x.shape), wide * scale, torch.zeros((), dtype=wide.dtype, device=x.device)).to(dtype)


def broadcast(parameter: Tensor, x: Tensor, options: Options) -> Tensor:
    """weight, bias or gate in a shape that broadcasts to x: [batch, *normalized] has x's first dimension."""
    own, leading = parameter.dim() - options.normalized_ndim, x.dim() - options.normalized_ndim
    if own in (0, leading) or options.per_head:
        return parameter
    return parameter.reshape(parameter.shape[0], *[1] * (leading - 1), *parameter.shape[1:])


def _sum_to(values: Tensor, parameter_shape: Sequence[int], options: Options) -> Tensor:
    """The sum over the rows that share a parameter of this shape, in that shape."""
    own, leading = len(parameter_shape) - options.normalized_ndim, values.dim() - options.normalized_ndim
    shape = tuple(parameter_shape)
    if own not in (0, leading) and not options.per_head:
        shape = (*shape[:1], *[1] * (leading - 1), *shape[1:])
    if shape == tuple(values.shape):
        return values.clone().reshape(tuple(parameter_shape))  # values may be a gradient that the caller holds
    return values.sum_to_size(shape).reshape(tuple(parameter_shape))


def _kept(x: Tensor, philox: Tensor | None, options: Options) -> Tensor | None:
    """The elements that dropout keeps, in x's shape; None without dropout."""
    if philox is None or not options.dropout_p:
        return None
    leading = x.dim() - options.normalized_ndim
    rows, hidden_size = math.prod(x.shape[:leading]), math.prod(x.shape[leading:])
    return dropout_mask(philox, rows, hidden_size, options.dropout_p).view(x.shape)


def _x_hat_and_rstd(
    x: Tensor, dims: tuple[int, ...], eps: float, is_rms_norm: bool, stats_grad: bool, has_exact_mean: bool = True
) -> tuple[Tensor, Tensor]:
    def source(z: Tensor) -> Tensor:  # the statistics are computed from this
        return z if stats_grad else z.detach()

    z = x.to(accumulation_dtype(x.dtype))
    if not is_rms_norm:
        z = z - source(z).mean(dims, keepdim=True)
        if has_exact_mean:  # the rounding error of the mean: matters if |mean| >> sigma
            z = z - source(z).mean(dims, keepdim=True)
    rstd = (source(z) * source(z)).mean(dims, keepdim=True).add(eps).rsqrt()
    return z * rstd, rstd


def norm_forward(
    x: Tensor,
    residual: Tensor | None,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    philox: Tensor | None,
    *given: Any,
    has_exact_mean: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """y and z (None without a load stage) of the operator norm_forward, from its arguments::

        z = residual + keep * dropout_scale * gate * x      (x itself without z_dtype)
        x_hat = (z - mean) * rstd                           u = x_hat * (weight + weight_offset) + bias
        y = keep * dropout_scale * activation(u)            (residual + u with adds_y, where z = x)

    A gate without a load stage makes a gated norm, whose activation is that of the gate::

        gates_y:   z = x                        y = u * activation(gate)
        otherwise: z = x * activation(gate)     y = u

    z is rounded to z_dtype before the statistics; z of a gated norm is not rounded. Without stats_grad, mean and rstd
    are constants in differentiation. With rounds_x_hat, x_hat is rounded to z's dtype before `llama_product`: RMSNorm
    then has the bits of transformers' LlamaRMSNorm, and without it those of GemmaRMSNorm. Without has_exact_mean the
    mean has the rounding error of one sum, as in torch.nn.functional.layer_norm.
    """
    options = Options(*given)
    ndim, wide = options.normalized_ndim, accumulation_dtype(x.dtype)
    keep = _kept(x, philox, options)
    z = x
    stored = z_dtype(residual, options)
    activate, factor = ACTIVATIONS[options.activation][1], None
    if gate is not None and stored is None:
        factor = activate(gate.to(wide))
        z = x if options.gates_y else x.to(wide) * factor
    if stored is not None:
        z = x.to(wide)
        if gate is not None:
            z = z * broadcast(gate, x, options)
        if keep is not None and not options.drops_y:
            z = dropout(z, keep, options.dropout_p, wide)
        if residual is not None:
            z = z + residual
        z = z.to(stored, copy=True, memory_format=torch.contiguous_format)

    dims = tuple(range(-ndim, 0))
    y, _ = _x_hat_and_rstd(z, dims, options.eps, options.is_rms_norm, options.stats_grad, has_exact_mean)
    if options.rounds_x_hat:
        y = llama_product(y.to(z.dtype), weight, bias, options.weight_offset)
    else:
        if weight is not None:
            y = y * (broadcast(weight, x, options).to(wide) + options.weight_offset)
        if bias is not None:
            y = y + broadcast(bias, x, options).to(wide)
    if factor is None:
        y = activate(y)
    elif options.gates_y:
        y = y * factor
    if keep is not None and options.drops_y:
        y = dropout(y, keep, options.dropout_p, y.dtype)
    if options.adds_y and residual is not None:
        y = residual + y
    return y.to(y_dtype(x, residual, options)).contiguous(), None if stored is None else z


def llama_product(x_hat: Tensor, weight: Tensor | None, bias: Tensor | None, offset: float) -> Tensor:
    """x_hat * (weight + offset) + bias in the wider of the dtypes of x_hat and weight, rounded after each operation."""
    y = x_hat
    if weight is not None and offset:
        wide, narrow = accumulation_dtype(y.dtype), torch.promote_types(y.dtype, weight.dtype)
        y = (y.to(wide) * (weight.to(wide) + offset)).to(narrow)
    elif weight is not None:  # adding 0 would lose the sign of -0
        y = y * weight
    return y if bias is None else y + bias


# The largest finite code of each dtype that a norm is quantized to; int8 is symmetric.
LARGEST_CODE = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
LEAST_AMAX = 1e-12  # as of a group of zeros


def quantize(
    y: Tensor,
    scale: Tensor | None,
    dtype: torch.dtype,
    normalized_ndim: int,
    group_size: int,
    column_major_scales: bool = False,
) -> tuple[Tensor, Tensor]:
    """Codes and scales of y, float32; in float32 operations::

        scale = max(max |y| of the group, LEAST_AMAX) * (1 / LARGEST_CODE)      if no scale is given
        q = saturate(round(y * (1 / scale)))

    rounded to the nearest code, ties to even. NaN stays NaN; as int8 it is 0. A group is group_size adjacent columns.
    The scales found are [*leading dimensions, groups], with column_major_scales [groups, *leading dimensions].
    """
    largest, hidden_size = LARGEST_CODE[dtype], math.prod(y.shape[y.dim() - normalized_ndim :])
    if scale is not None:
        quotient = y * (1 / scale.reshape(()))
    else:
        leading = y.shape[: y.dim() - normalized_ndim]
        groups = y.reshape(*leading, hidden_size // group_size if group_size else 1, group_size)
        amax = groups.abs().amax(-1) if group_size else y.new_zeros(groups.shape[:-1])
        scale = amax.clamp(min=LEAST_AMAX) * (1 / largest)
        quotient = (groups * (1 / scale).unsqueeze(-1)).reshape(y.shape)
        if column_major_scales:  # clone: strides of a new tensor, also of dimensions of size 1
            scale = scale.movedim(-1, 0).clone(memory_format=torch.contiguous_format)
    if dtype == torch.int8:
        return quotient.round().clamp(-largest, largest).nan_to_num(nan=0.0).to(dtype), scale
    return quotient.clamp(-largest, largest).to(dtype), scale


def check_quantization(
    x: Tensor, scale: Tensor | None, dtype: torch.dtype, granularity: str, group_size: int, hidden_size: int
) -> int:
    """Raise for arguments that no quantized norm of a valid x can take. Return the number of columns that share a
    scale."""
    if x.dtype == torch.float64:
        raise TypeError("x must be float16, bfloat16 or float32 for a quantized norm, got torch.float64")
    if dtype not in LARGEST_CODE:
        raise TypeError(f"dtype must be torch.float8_e4m3fn, torch.float8_e5m2 or torch.int8, got {dtype!r}")
    if granularity not in ("tensor", "token", "group"):
        raise ValueError(f'granularity must be "tensor", "token" or "group", got {granularity!r}')
    if granularity != "tensor":
        if scale is not None:
            raise ValueError(f'scale goes with granularity="tensor"; with "{granularity}" it is found')
        if granularity == "group":
            check_group_size(group_size, hidden_size)
        return group_size if granularity == "group" else hidden_size
    if scale is None:
        raise ValueError('scale is needed with granularity="tensor"; with "token" and "group" it is found')
    if not isinstance(scale, Tensor):
        raise TypeError(f"scale must be a Tensor, got {type(scale).__name__}")
    if scale.dtype != torch.float32:
        raise TypeError(f"scale must be float32, got {scale.dtype}")
    if scale.numel() != 1:
        raise RuntimeError(f"scale must have one element, got [{_join(scale.shape)}]")
    if scale.device != x.device:
        raise RuntimeError(f"scale must be on x's device, {x.device}, got {scale.device}")
    return hidden_size


def check_group_size(group_size: Any, hidden_size: int) -> None:
    if isinstance(group_size, bool) or not hasattr(group_size, "__index__"):
        raise TypeError(f"group_size must be an int, got {type(group_size).__name__}")
    if group_size < 1 or hidden_size % group_size:
        raise ValueError(f"group_size must divide the normalized dimension, {hidden_size}, got {group_size}")


def z_dtype(residual: Tensor | None, options: Options) -> torch.dtype | None:
    """The dtype of z in forward; None if there is no load stage, and z is x."""
    return options.residual_dtype or (None if residual is None or options.adds_y else residual.dtype)


def y_dtype(x: Tensor, residual: Tensor | None, options: Options) -> torch.dtype:
    return options.out_dtype or (residual.dtype if options.adds_y and residual is not None else x.dtype)


def stats(z: Tensor, *given: Any) -> Tensor:
    """The statistics that the operator norm_forward returns for RMSNorm, with the operations of norm_forward above."""
    options = Options(*given)
    dims = tuple(range(-options.normalized_ndim, 0))
    _, rstd = _x_hat_and_rstd(z, dims, options.eps, options.is_rms_norm, True)
    return rstd.reshape(1, *z.shape[: z.dim() - options.normalized_ndim])


def norm_backward(
    grad_output: Tensor | None,
    grad_residual_out: Tensor | None,
    z: Tensor,
    stats: Tensor,
    x: Tensor | None,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    philox: Tensor | None,
    *given: Any,
) -> tuple[Tensor | None, ...]:
    """Gradients of x, residual, gate, weight and bias, from the arguments of the operator norm_backward; None for
    unwanted ones. Differentiable in every tensor::

        grad_u = keep * dropout_scale * grad_output * activation'(u)      wdy = (weight + weight_offset) * grad_u
        c1 = mean(x_hat * wdy)    c2 = mean(wdy), 0 for RMSNorm           (c1 = c2 = 0 without stats_grad)
        grad_z = (wdy - x_hat * c1 - c2) * rstd + grad_residual_out
        grad_residual = grad_z      grad_x = keep * dropout_scale * gate * grad_z
        grad_gate = sum(keep * dropout_scale * x * grad_z)
        grad_weight = sum(grad_u * x_hat)      grad_bias = sum(grad_u)

    For a gated norm, whose x is the argument z::

        gates_y:   grad_u = grad_output * activation(gate)   grad_gate = grad_output * u * activation'(gate)
        otherwise: grad_x = grad_z * activation(gate)        grad_gate = grad_z * x * activation'(gate)
    """
    options, wanted = Options(*given[: len(Options._fields)]), Wanted(*given[len(Options._fields) :])
    ndim, wide = options.normalized_ndim, accumulation_dtype(z.dtype)
    dims = tuple(range(-ndim, 0))
    keep = _kept(z, philox, options)
    is_gated = gate is not None and options.residual_dtype is None
    _, activate, slope = ACTIVATIONS[options.activation]
    factor = None if gate is None else broadcast(gate, z, options)
    if gate is not None and is_gated:
        factor, x = activate(gate.to(wide)), z.to(wide)
        z = z if options.gates_y else x * factor
    grad_weight = grad_bias = grad_z = grad_factor = None
    if grad_output is not None:
        scale = None if weight is None else broadcast(weight, z, options).to(wide) + options.weight_offset
        shift = None if bias is None else broadcast(bias, z, options).to(wide)
        if wanted.z_is_y:
            x_hat = z.to(wide)
            x_hat = x_hat if shift is None else x_hat - shift
            x_hat = x_hat if scale is None else x_hat / scale
            rstd = stats[0].reshape(*z.shape[: z.dim() - ndim], *[1] * ndim)
        else:
            x_hat, rstd = _x_hat_and_rstd(z, dims, options.eps, options.is_rms_norm, options.stats_grad)
        grad_u = grad_output.to(wide)
        if keep is not None and options.drops_y:
            grad_u = dropout(grad_u, keep, options.dropout_p, wide)
        if options.gates_y or (options.activation and not is_gated):
            u = x_hat if scale is None else x_hat * scale
            u = u if shift is None else u + shift
            if options.gates_y and factor is not None:
                grad_factor, grad_u = grad_u * u, grad_u * factor
            else:
                grad_u = grad_u * slope(u)
        wdy = grad_u if scale is None else grad_u * scale
        grad_z = wdy
        if options.stats_grad:
            grad_z = grad_z - x_hat * (x_hat * wdy).mean(dims, keepdim=True)
        if options.stats_grad and not options.is_rms_norm:
            grad_z = grad_z - wdy.mean(dims, keepdim=True)
        grad_z = grad_z * rstd
        if wanted.grad_weight_dtype is not None and weight is not None:
            grad_weight = _sum_to(grad_u * x_hat, weight.shape, options).to(wanted.grad_weight_dtype)
        if wanted.grad_bias_dtype is not None:
            given_parameter = next((t for t in (bias, weight, None if is_gated else gate) if t is not None), None)
            shape = z.shape[z.dim() - ndim :] if given_parameter is None else given_parameter.shape
            grad_bias = _sum_to(grad_u, shape, options).to(wanted.grad_bias_dtype)
    if grad_residual_out is not None:
        grad_z = grad_residual_out.to(wide) if grad_z is None else grad_z + grad_residual_out
    if grad_z is None:  # neither y nor z has a gradient
        return (None,) * 5
    grad_x = grad_residual = grad_gate = None
    grad_gated = grad_z  # of gate * x
    if keep is not None and not options.drops_y:
        grad_gated = dropout(grad_gated, keep, options.dropout_p, wide)
    if wanted.wants_gate and gate is not None and x is not None:
        grad_factor = grad_gated * x if grad_factor is None else grad_factor
        grad_factor = grad_factor * slope(gate.to(wide)) if is_gated else grad_factor
        grad_gate = _sum_to(grad_factor, gate.shape, options).to(gate.dtype)
    if wanted.wants_x:
        product = grad_gated if factor is None or options.gates_y else grad_gated * factor
        grad_x = _own(product.to(wanted.x_dtype), grad_output, grad_residual_out)
    if wanted.grad_residual_dtype is not None:
        grad_residual = _own(grad_z.to(wanted.grad_residual_dtype), grad_output, grad_residual_out)
    return grad_x, grad_residual, grad_gate, grad_weight, grad_bias


def _own(gradient: Tensor, *given: Tensor | None) -> Tensor:
    """The gradient, or a copy if it is one of the caller's tensors."""
    return gradient.clone() if any(gradient is t for t in given) else gradient
