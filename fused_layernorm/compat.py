"""Apex's names and signatures for its norms, on this library's kernels. Code written for Apex runs unchanged::

    from fused_layernorm.compat import FusedLayerNorm, MixedFusedRMSNorm, FusedLayerNormAffineFunction, FastLayerNormFN

The Mixed norms, `FastLayerNorm` and their functions return the weight's dtype. They also take 16-bit weights with
float32 x, for a residual stream in float32 as in Megatron.

Under autocast the functions and modules cast input, weight and bias to the autocast dtype, so the result has that
dtype; float64 tensors are not cast. `manual_rms_norm` and the classes with `apply` (`FastLayerNormFN`, ...) cast
nothing. All this is as in Apex, but unlike the norms of `fused_layernorm`, which keep x's dtype.

Differences from Apex: every dtype and layout of `fused_layernorm.fused_layer_norm` is accepted; `memory_efficient`
tests the weight as described there, so a weight of 0 keeps its gradient; CPU tensors work, also under CPU autocast;
`manual_rms_norm` runs a kernel and rounds once.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from .functional import fused_layer_norm as _layer_norm
from .functional import fused_rms_norm as _rms_norm
from .reference import accumulation_dtype, as_shape

# ---- functions -------------------------------------------------------------------------------------------------------


def fused_layer_norm_affine(input, weight, bias, normalized_shape, eps=1e-6, memory_efficient=False) -> Tensor:
    tensors = _cast_under_autocast(input, weight, bias)
    return FusedLayerNormAffineFunction.apply(*tensors, normalized_shape, eps, memory_efficient)


def fused_layer_norm(input, normalized_shape, eps=1e-6, memory_efficient=False) -> Tensor:
    return fused_layer_norm_affine(input, None, None, normalized_shape, eps, memory_efficient)


def mixed_dtype_fused_layer_norm_affine(
    input, weight, bias, normalized_shape, eps=1e-6, memory_efficient=False
) -> Tensor:
    tensors = _cast_under_autocast(input, weight, bias)
    return FusedLayerNormAffineMixedDtypesFunction.apply(*tensors, normalized_shape, eps, memory_efficient)


def fused_rms_norm_affine(input, weight, normalized_shape, eps=1e-6, memory_efficient=False) -> Tensor:
    tensors = _cast_under_autocast(input, weight)
    return FusedRMSNormAffineFunction.apply(*tensors, normalized_shape, eps, memory_efficient)


def fused_rms_norm(input, normalized_shape, eps=1e-6, memory_efficient=False) -> Tensor:
    return fused_rms_norm_affine(input, None, normalized_shape, eps, memory_efficient)


def mixed_dtype_fused_rms_norm_affine(input, weight, normalized_shape, eps=1e-6, memory_efficient=False) -> Tensor:
    tensors = _cast_under_autocast(input, weight)
    return FusedRMSNormAffineMixedDtypesFunction.apply(*tensors, normalized_shape, eps, memory_efficient)


def manual_rms_norm(input, normalized_shape, weight, eps) -> Tensor:
    """The result has weight's dtype; without a weight, the dtype of the statistics."""
    if weight is None:
        dtype = accumulation_dtype(input.dtype)
        return _rms_norm(input, None, None, eps, normalized_shape=normalized_shape, out_dtype=dtype)
    return FusedRMSNormAffineMixedDtypesFunction.apply(input, weight, normalized_shape, eps)


def _fast_layer_norm(x, weight, bias, epsilon, memory_efficient=False) -> Tensor:
    return FastLayerNormFN.apply(*_cast_under_autocast(x, weight, bias), epsilon, memory_efficient)


def _cast_under_autocast(x, *parameters) -> list[Tensor | None]:
    """The tensors in the autocast dtype, if autocast is enabled for x's device; float64 is not cast."""
    tensors = [x, *parameters]
    if not isinstance(x, Tensor) or x.device.type not in ("cpu", "cuda", "xpu"):  # a meta tensor has no autocast
        return tensors
    if not torch.is_autocast_enabled(x.device.type):
        return tensors
    dtype = torch.get_autocast_dtype(x.device.type)
    return [
        t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64 else t
        for t in tensors
    ]


# ---- classes whose `apply` callers use, and whose `forward` they inspect for arguments -------------------------------


def _in_weights_dtype(norm, x, weight, bias, normalized_shape, eps, memory_efficient) -> Tensor:
    """The result has weight's dtype. memory_efficient has no effect if that is not x's dtype."""
    dtype = weight.dtype
    if x.dtype == torch.float32 and dtype in (torch.float16, torch.bfloat16):  # the norm takes float32 weights only
        weight, bias = weight.float(), None if bias is None else bias.float()
    return norm(x, weight, bias, eps, normalized_shape=normalized_shape, out_dtype=dtype,
                memory_efficient=memory_efficient and dtype == x.dtype)  # fmt: skip


class _Function:
    """A class with `forward(ctx, ...)` and `apply(...)`, like a torch.autograd.Function."""

    @classmethod
    def apply(cls, *arguments, **options) -> Tensor:
        return cls.forward(None, *arguments, **options)


class FusedLayerNormAffineFunction(_Function):
    @staticmethod
    def forward(ctx, input, weight, bias, normalized_shape, eps, memory_efficient=False):
        return _layer_norm(
            input, weight, bias, eps, normalized_shape=normalized_shape, memory_efficient=memory_efficient
        )


class FusedLayerNormFunction(_Function):
    @staticmethod
    def forward(ctx, input, normalized_shape, eps, memory_efficient=False):
        return _layer_norm(input, None, None, eps, normalized_shape=normalized_shape, memory_efficient=memory_efficient)


class FusedLayerNormAffineMixedDtypesFunction(_Function):
    @staticmethod
    def forward(ctx, input, weight, bias, normalized_shape, eps, memory_efficient=False):
        return _in_weights_dtype(_layer_norm, input, weight, bias, normalized_shape, eps, memory_efficient)


class FusedRMSNormAffineFunction(_Function):
    @staticmethod
    def forward(ctx, input, weight, normalized_shape, eps, memory_efficient=False):
        return _rms_norm(input, weight, None, eps, normalized_shape=normalized_shape, memory_efficient=memory_efficient)


class FusedRMSNormFunction(_Function):
    @staticmethod
    def forward(ctx, input, normalized_shape, eps, memory_efficient=False):
        return _rms_norm(input, None, None, eps, normalized_shape=normalized_shape, memory_efficient=memory_efficient)


class FusedRMSNormAffineMixedDtypesFunction(_Function):
    @staticmethod
    def forward(ctx, input, weight, normalized_shape, eps, memory_efficient=False):
        return _in_weights_dtype(_rms_norm, input, weight, None, normalized_shape, eps, memory_efficient)


class FastLayerNormFN(_Function):
    @staticmethod
    def forward(ctx, x, gamma, beta, epsilon, memory_efficient=False):
        return _in_weights_dtype(_layer_norm, x, gamma, beta, None, epsilon, memory_efficient)


# ---- modules ---------------------------------------------------------------------------------------------------------


class FusedLayerNorm(nn.LayerNorm):
    def __init__(self, normalized_shape, eps=1e-5, elementwise_affine=True, memory_efficient=False) -> None:
        super().__init__(as_shape(normalized_shape), eps, elementwise_affine)
        self.memory_efficient = memory_efficient

    def forward(self, input: Tensor) -> Tensor:
        return fused_layer_norm_affine(
            input, self.weight, self.bias, self.normalized_shape, self.eps, self.memory_efficient
        )


class FusedRMSNorm(nn.RMSNorm):
    def __init__(self, normalized_shape, eps=1e-5, elementwise_affine=True, memory_efficient=False) -> None:
        super().__init__(as_shape(normalized_shape), eps, elementwise_affine)
        self.memory_efficient = memory_efficient

    def forward(self, input: Tensor) -> Tensor:
        return fused_rms_norm_affine(input, self.weight, self.normalized_shape, self.eps, self.memory_efficient)


def _take_options(module: nn.Module, options: dict) -> None:
    """Further keywords of the Mixed norms: Apex accepts any keyword and ignores it."""
    if not options.pop("elementwise_affine", True):
        raise RuntimeError("the Mixed norms always have a weight: elementwise_affine must be True")
    if options.pop("sequence_parallel_enabled", False):  # apex.transformer marks parameters for trainers to reduce
        for parameter in module.parameters():
            parameter.sequence_parallel_enabled = True
    ignored = [name for name, value in options.items() if value]
    if ignored:
        warnings.warn(f"{type(module).__name__} ignores {', '.join(ignored)}, as Apex's does", stacklevel=3)


class MixedFusedLayerNorm(FusedLayerNorm):
    def __init__(self, normalized_shape, eps=1e-5, *, memory_efficient=False, **options) -> None:
        super().__init__(normalized_shape, eps, True, memory_efficient)
        _take_options(self, options)

    def forward(self, input: Tensor) -> Tensor:
        return mixed_dtype_fused_layer_norm_affine(
            input, self.weight, self.bias, self.normalized_shape, self.eps, self.memory_efficient
        )


class MixedFusedRMSNorm(FusedRMSNorm):
    def __init__(self, normalized_shape, eps=1e-5, *, memory_efficient=False, **options) -> None:
        super().__init__(normalized_shape, eps, True, memory_efficient)
        _take_options(self, options)

    def forward(self, input: Tensor) -> Tensor:
        return mixed_dtype_fused_rms_norm_affine(
            input, self.weight, self.normalized_shape, self.eps, self.memory_efficient
        )


class FastLayerNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-5, memory_efficient=False) -> None:
        super().__init__()
        self.epsilon = eps
        self.memory_efficient = memory_efficient
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return _fast_layer_norm(x, self.weight, self.bias, self.epsilon, self.memory_efficient)
