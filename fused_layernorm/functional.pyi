# What type checkers see: keyword-only arguments, and a result that follows from them. tests/test_docs.py compares it
# with functional.py.
from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

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
) -> Tensor: ...
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
) -> Tensor: ...
@overload
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
    return_dropout_mask: Literal[False] = False,
) -> tuple[Tensor, Tensor]: ...
@overload
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
    return_dropout_mask: Literal[True],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
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
    return_dropout_mask: Literal[False] = False,
) -> tuple[Tensor, Tensor]: ...
@overload
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
    return_dropout_mask: Literal[True],
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def fused_adaptive_layer_norm(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    gate: Tensor | None = None,
    residual: None = None,
    residual_dtype: torch.dtype | None = None,
    normalized_shape: int | Sequence[int] | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor: ...
@overload
def fused_adaptive_layer_norm(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    gate: Tensor | None = None,
    residual: Tensor,
    residual_dtype: torch.dtype | None = None,
    normalized_shape: int | Sequence[int] | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def fused_adaptive_layer_norm(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    gate: Tensor | None = None,
    residual: Tensor | None,
    residual_dtype: torch.dtype | None = None,
    normalized_shape: int | Sequence[int] | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
def fused_adaptive_rms_norm(
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = None,
    gate: Tensor | None = None,
    residual: None = None,
    residual_dtype: torch.dtype | None = None,
    normalized_shape: int | Sequence[int] | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor: ...
@overload
def fused_adaptive_rms_norm(
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = None,
    gate: Tensor | None = None,
    residual: Tensor,
    residual_dtype: torch.dtype | None = None,
    normalized_shape: int | Sequence[int] | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def fused_adaptive_rms_norm(
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None,
    residual_dtype: torch.dtype | None = None,
    normalized_shape: int | Sequence[int] | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...
