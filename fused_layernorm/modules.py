"""The norms as modules. Constructor, initialization, repr and state_dict are those of torch.nn, with further
options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .functional import (
    fused_adaptive_layer_norm,
    fused_adaptive_rms_norm,
    fused_add_layer_norm,
    fused_add_rms_norm,
    fused_gated_layer_norm,
    fused_gated_rms_norm,
    fused_layer_norm,
    fused_layer_norm_add,
    fused_rms_norm,
    fused_rms_norm_add,
    fused_sandwich_rms_norm,
)
from .reference import as_shape, check_dropout_p

# torch.fx.symbolic_trace records a call of these functions instead of tracing into them.
for _function in ("fused_adaptive_layer_norm", "fused_adaptive_rms_norm", "fused_add_layer_norm", "fused_add_rms_norm",
                  "fused_gated_layer_norm", "fused_gated_rms_norm", "fused_layer_norm", "fused_rms_norm"):  # fmt: skip
    torch.fx.wrap(_function)


def _not_scriptable(module: nn.Module) -> nn.Module:
    """torch.jit.script calls this first. TorchScript cannot compile our functions."""
    raise TypeError(f"{type(module).__name__} cannot be compiled by torch.jit.script: use torch.compile, torch.export, "
                    "or torch.nn's norm (restore_norms(model))")  # fmt: skip


class FusedLayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm`, computed by `fused_layernorm.fused_layer_norm`. Checkpoints load in both directions."""

    __prepare_scriptable__ = _not_scriptable

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(as_shape(normalized_shape), eps, elementwise_affine, bias, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        return fused_layer_norm(input, self.weight, self.bias, self.eps, normalized_shape=self.normalized_shape)


class FusedRMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm`, computed by `fused_layernorm.fused_rms_norm`. Checkpoints load in both directions."""

    __prepare_scriptable__ = _not_scriptable

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(as_shape(normalized_shape), eps, elementwise_affine, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return fused_rms_norm(x, self.weight, None, self.eps, normalized_shape=self.normalized_shape)


class FusedLayerNormAdd(FusedLayerNorm):
    """`fused_layernorm.fused_layer_norm_add`: the norm after the block. ``module(x, residual)`` returns y."""

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:  # type: ignore[override]
        return fused_layer_norm_add(
            x, residual, self.weight, self.bias, self.eps, normalized_shape=self.normalized_shape
        )


class FusedRMSNormAdd(FusedRMSNorm):
    """`fused_layernorm.fused_rms_norm_add`: the norm after the block. ``module(x, residual)`` returns y."""

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:  # type: ignore[override]
        return fused_rms_norm_add(x, residual, self.weight, None, self.eps, normalized_shape=self.normalized_shape)


class FusedSandwichRMSNorm(nn.RMSNorm):
    """`fused_layernorm.fused_sandwich_rms_norm`, with the parameters `post_weight` and `weight`.

    ``module(x, residual)`` returns ``(y, z)``.
    """

    post_weight: nn.Parameter | None
    __prepare_scriptable__ = _not_scriptable

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        post_eps: float | None = None,
        weight_offset: float = 0.0,
    ) -> None:
        self.weight_offset = weight_offset  # before reset_parameters()
        super().__init__(as_shape(normalized_shape), eps, elementwise_affine, device, dtype)
        self.post_eps = post_eps
        self.post_weight = None if self.weight is None else nn.Parameter(self.weight.detach().clone())

    def reset_parameters(self) -> None:
        super().reset_parameters()
        _take_offset_from(self)
        post_weight = getattr(self, "post_weight", None)  # not yet there in __init__
        if post_weight is not None:
            nn.init.constant_(post_weight, 1 - self.weight_offset)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return fused_sandwich_rms_norm(
            x, residual, self.post_weight, self.weight, self.eps, post_eps=self.post_eps,
            normalized_shape=self.normalized_shape, weight_offset=self.weight_offset,
        )  # fmt: skip

    def extra_repr(self) -> str:
        names = [name for name in ("post_eps", "weight_offset") if getattr(self, name)]
        return super().extra_repr() + "".join(f", {name}={getattr(self, name)!r}" for name in names)


class FusedAddLayerNorm(nn.LayerNorm):
    """`fused_layernorm.fused_add_layer_norm` with the parameters of `torch.nn.LayerNorm`, whose checkpoints load.

    ``module(x, residual)`` returns ``(y, residual_out)``. Dropout of x is active in training mode.
    """

    __prepare_scriptable__ = _not_scriptable

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        dropout_p: float = 0.0,
        residual_dtype: torch.dtype | None = None,
    ) -> None:
        check_dropout_p(dropout_p)
        super().__init__(as_shape(normalized_shape), eps, elementwise_affine, bias, device, dtype)
        self.dropout_p, self.residual_dtype = dropout_p, residual_dtype

    def forward(  # type: ignore[override]
        self, input: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return fused_add_layer_norm(input, residual, self.weight, self.bias, self.eps, **_add_options(self))

    def extra_repr(self) -> str:
        return super().extra_repr() + _extra_repr_of_add(self)


class FusedAddRMSNorm(nn.RMSNorm):
    """`fused_layernorm.fused_add_rms_norm` with the parameters of `torch.nn.RMSNorm`, whose checkpoints load.

    ``module(x, residual)`` returns ``(y, residual_out)``. Dropout of x is active in training mode.
    """

    __prepare_scriptable__ = _not_scriptable

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        dropout_p: float = 0.0,
        residual_dtype: torch.dtype | None = None,
    ) -> None:
        check_dropout_p(dropout_p)
        super().__init__(as_shape(normalized_shape), eps, elementwise_affine, device, dtype)
        self.dropout_p, self.residual_dtype = dropout_p, residual_dtype

    def forward(  # type: ignore[override]
        self, input: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return fused_add_rms_norm(input, residual, self.weight, None, self.eps, **_add_options(self))

    def extra_repr(self) -> str:
        return super().extra_repr() + _extra_repr_of_add(self)


class FusedAdaptiveLayerNorm(nn.LayerNorm):
    """`fused_layernorm.fused_adaptive_layer_norm`. By default it has no parameters, as in DiT.

    ``module(x, scale, shift)`` returns y; ``module(x, scale, shift, gate=, residual=)`` returns ``(y, residual_out)``.
    """

    __prepare_scriptable__ = _not_scriptable

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-6,
        elementwise_affine: bool = False,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(as_shape(normalized_shape), eps, elementwise_affine, bias, device, dtype)

    def forward(  # type: ignore[override]
        self, input: Tensor, scale: Tensor, shift: Tensor, *, gate: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        return fused_adaptive_layer_norm(
            input, scale, shift, weight=self.weight, bias=self.bias, eps=self.eps, gate=gate, residual=residual,
            normalized_shape=self.normalized_shape,
        )  # fmt: skip


class FusedAdaptiveRMSNorm(nn.RMSNorm):
    """`fused_layernorm.fused_adaptive_rms_norm`. By default it has no parameters.

    ``module(x, scale, shift=None)`` returns y; ``module(x, scale, gate=, residual=)`` returns ``(y, residual_out)``.
    """

    __prepare_scriptable__ = _not_scriptable

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(as_shape(normalized_shape), eps, elementwise_affine, device, dtype)

    def forward(  # type: ignore[override]
        self,
        input: Tensor,
        scale: Tensor,
        shift: Tensor | None = None,
        *,
        gate: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        return fused_adaptive_rms_norm(
            input, scale, shift, weight=self.weight, eps=self.eps, gate=gate, residual=residual,
            normalized_shape=self.normalized_shape,
        )  # fmt: skip


class FusedGatedLayerNorm(nn.LayerNorm):
    """`fused_layernorm.fused_gated_layer_norm` with the parameters of `torch.nn.LayerNorm`, whose checkpoints load.

    ``module(x, gate)`` returns y.
    """

    __prepare_scriptable__ = _not_scriptable

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | None = "silu",
        norm_before_gate: bool = True,
        group_size: int | None = None,
        weight_offset: float = 0.0,
    ) -> None:
        self.weight_offset = weight_offset  # before reset_parameters()
        super().__init__(as_shape(normalized_shape), eps, elementwise_affine, bias, device, dtype)
        self.activation, self.norm_before_gate, self.group_size = activation, norm_before_gate, group_size

    def reset_parameters(self) -> None:
        super().reset_parameters()
        _take_offset_from(self)

    def forward(self, input: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        return fused_gated_layer_norm(input, gate, self.weight, self.bias, self.eps, **_gated_options(self))

    def extra_repr(self) -> str:
        return super().extra_repr() + _extra_repr_of_gated(self)


class FusedGatedRMSNorm(nn.RMSNorm):
    """`fused_layernorm.fused_gated_rms_norm` with the parameters of `torch.nn.RMSNorm`, whose checkpoints load.

    ``module(x, gate)`` returns y.
    """

    __prepare_scriptable__ = _not_scriptable

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | None = "silu",
        norm_before_gate: bool = True,
        group_size: int | None = None,
        weight_offset: float = 0.0,
    ) -> None:
        self.weight_offset = weight_offset  # before reset_parameters()
        super().__init__(as_shape(normalized_shape), eps, elementwise_affine, device, dtype)
        self.activation, self.norm_before_gate, self.group_size = activation, norm_before_gate, group_size

    def reset_parameters(self) -> None:
        super().reset_parameters()
        _take_offset_from(self)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        return fused_gated_rms_norm(x, gate, self.weight, None, self.eps, **_gated_options(self))

    def extra_repr(self) -> str:
        return super().extra_repr() + _extra_repr_of_gated(self)


def _add_options(module: FusedAddLayerNorm | FusedAddRMSNorm) -> dict[str, Any]:
    return {
        "dropout_p": module.dropout_p,
        "training": module.training,
        "residual_dtype": module.residual_dtype,
        "normalized_shape": module.normalized_shape,
    }


def _extra_repr_of_add(module: FusedAddLayerNorm | FusedAddRMSNorm) -> str:
    residual_dtype = "" if module.residual_dtype is None else f", residual_dtype={module.residual_dtype}"
    return f", dropout_p={module.dropout_p}{residual_dtype}"


def _take_offset_from(module: FusedGatedLayerNorm | FusedGatedRMSNorm | FusedSandwichRMSNorm) -> None:
    """Initialize weight so that weight + weight_offset is 1."""
    if module.elementwise_affine and module.weight_offset:
        nn.init.constant_(module.weight, 1 - module.weight_offset)


def _gated_options(module: FusedGatedLayerNorm | FusedGatedRMSNorm) -> dict[str, Any]:
    return {
        "activation": module.activation,
        "norm_before_gate": module.norm_before_gate,
        "group_size": module.group_size,
        "normalized_shape": module.normalized_shape,
        "weight_offset": module.weight_offset,
    }


def _extra_repr_of_gated(module: FusedGatedLayerNorm | FusedGatedRMSNorm) -> str:
    always, if_given = ("activation", "norm_before_gate"), ("group_size", "weight_offset")
    names = [*always, *(name for name in if_given if getattr(module, name))]
    return "".join(f", {name}={getattr(module, name)!r}" for name in names)
