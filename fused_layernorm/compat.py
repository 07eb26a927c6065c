"""Apex's names and signatures for its norms, on this library's kernels, so that code written for them runs unchanged::

    from fused_layernorm.compat import FusedLayerNorm, MixedFusedRMSNorm, FusedLayerNormAffineFunction, FastLayerNormFN

What differs from Apex: any dtype and layout that `fused_layernorm.fused_layer_norm` takes; under autocast nothing is
cast; `memory_efficient` keeps to its rule there, so that a weight of 0 keeps its gradient; CPU tensors work.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .functional import fused_layer_norm as _layer_norm
from .functional import fused_rms_norm as _rms_norm

# ---- functions -------------------------------------------------------------------------------------------------------


def fused_layer_norm_affine(input, weight, bias, normalized_shape, eps=1e-6, memory_efficient=False) -> Tensor:
    return _layer_norm(input, weight, bias, eps, normalized_shape=normalized_shape, memory_efficient=memory_efficient)


def fused_layer_norm(input, normalized_shape, eps=1e-6, memory_efficient=False) -> Tensor:
    return fused_layer_norm_affine(input, None, None, normalized_shape, eps, memory_efficient)


def mixed_dtype_fused_layer_norm_affine(
    input, weight, bias, normalized_shape, eps=1e-6, memory_efficient=False
) -> Tensor:
    """The result has weight's dtype. memory_efficient has no effect where that is not input's."""
    return _layer_norm(input, weight, bias, eps, normalized_shape=normalized_shape, out_dtype=weight.dtype,
                       memory_efficient=memory_efficient and weight.dtype == input.dtype)  # fmt: skip


def fused_rms_norm_affine(input, weight, normalized_shape, eps=1e-6, memory_efficient=False) -> Tensor:
    return _rms_norm(input, weight, None, eps, normalized_shape=normalized_shape, memory_efficient=memory_efficient)


def fused_rms_norm(input, normalized_shape, eps=1e-6, memory_efficient=False) -> Tensor:
    return fused_rms_norm_affine(input, None, normalized_shape, eps, memory_efficient)


def mixed_dtype_fused_rms_norm_affine(input, weight, normalized_shape, eps=1e-6, memory_efficient=False) -> Tensor:
    """The result has weight's dtype. memory_efficient has no effect where that is not input's."""
    return _rms_norm(input, weight, None, eps, normalized_shape=normalized_shape, out_dtype=weight.dtype,
                     memory_efficient=memory_efficient and weight.dtype == input.dtype)  # fmt: skip


def _fast_layer_norm(x, weight, bias, epsilon, memory_efficient=False) -> Tensor:
    return _layer_norm(x, weight, bias, epsilon, out_dtype=weight.dtype,
                       memory_efficient=memory_efficient and weight.dtype == x.dtype)  # fmt: skip


# ---- classes of which callers use `apply` ----------------------------------------------------------------------------


class FusedLayerNormAffineFunction:
    apply = staticmethod(fused_layer_norm_affine)


class FusedLayerNormFunction:
    apply = staticmethod(fused_layer_norm)


class FusedLayerNormAffineMixedDtypesFunction:
    apply = staticmethod(mixed_dtype_fused_layer_norm_affine)


class FusedRMSNormAffineFunction:
    apply = staticmethod(fused_rms_norm_affine)


class FusedRMSNormFunction:
    apply = staticmethod(fused_rms_norm)


class FusedRMSNormAffineMixedDtypesFunction:
    apply = staticmethod(mixed_dtype_fused_rms_norm_affine)


class FastLayerNormFN:
    apply = staticmethod(_fast_layer_norm)


# ---- modules ---------------------------------------------------------------------------------------------------------


class FusedLayerNorm(nn.LayerNorm):
    def __init__(self, normalized_shape, eps=1e-5, elementwise_affine=True, memory_efficient=False) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)
        self.memory_efficient = memory_efficient

    def forward(self, input: Tensor) -> Tensor:
        return fused_layer_norm_affine(
            input, self.weight, self.bias, self.normalized_shape, self.eps, self.memory_efficient
        )


class FusedRMSNorm(nn.RMSNorm):
    def __init__(self, normalized_shape, eps=1e-5, elementwise_affine=True, memory_efficient=False) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)
        self.memory_efficient = memory_efficient

    def forward(self, input: Tensor) -> Tensor:
        return fused_rms_norm_affine(input, self.weight, self.normalized_shape, self.eps, self.memory_efficient)


def _only_affine(options: dict) -> None:
    if not options.pop("elementwise_affine", True):
        raise RuntimeError("the Mixed norms have a weight always: elementwise_affine must be True")
    if options:
        raise TypeError(f"unexpected keyword arguments: {', '.join(options)}")


class MixedFusedLayerNorm(FusedLayerNorm):
    def __init__(self, normalized_shape, eps=1e-5, *, memory_efficient=False, **options) -> None:
        _only_affine(options)
        super().__init__(normalized_shape, eps, True, memory_efficient)

    def forward(self, input: Tensor) -> Tensor:
        return mixed_dtype_fused_layer_norm_affine(
            input, self.weight, self.bias, self.normalized_shape, self.eps, self.memory_efficient
        )


class MixedFusedRMSNorm(FusedRMSNorm):
    def __init__(self, normalized_shape, eps=1e-5, *, memory_efficient=False, **options) -> None:
        _only_affine(options)
        super().__init__(normalized_shape, eps, True, memory_efficient)

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
