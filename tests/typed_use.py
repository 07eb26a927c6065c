"""The public API as a program under `mypy --strict` uses it; `make lint` checks this file, nothing runs it."""

from typing import assert_type

import torch
from torch import Tensor, nn

from fused_layernorm import (
    FusedAddLayerNorm,
    FusedGatedRMSNorm,
    FusedLayerNorm,
    FusedRMSNorm,
    ReplaceReport,
    backend,
    fused_adaptive_layer_norm,
    fused_add_layer_norm,
    fused_add_rms_norm,
    fused_gated_layer_norm,
    fused_gated_rms_norm,
    fused_layer_norm,
    fused_rms_norm,
    replace_norms,
    restore_norms,
)


def use(x: Tensor, weight: nn.Parameter, bias: Tensor | None, model: nn.Module) -> None:
    assert_type(fused_layer_norm(x, weight, bias, 1e-5), Tensor)
    assert_type(fused_layer_norm(x, normalized_shape=(3, 4), out_dtype=torch.float32), Tensor)
    assert_type(fused_layer_norm(x, weight, weight_offset=1.0, normalized_shape=[4]), Tensor)
    assert_type(fused_rms_norm(x, weight, eps=None, normalized_shape=4), Tensor)
    assert_type(FusedLayerNorm(4, eps=1e-6, bias=False, dtype=torch.bfloat16).forward(x), Tensor)
    assert_type(FusedRMSNorm((3, 4), elementwise_affine=False).forward(x), Tensor)
    assert_type(fused_add_layer_norm(x, None, weight, dropout_p=0.1), tuple[Tensor, Tensor])
    assert_type(fused_add_rms_norm(x, x, weight, return_dropout_mask=True), tuple[Tensor, Tensor, Tensor])
    assert_type(fused_adaptive_layer_norm(x, x, x), Tensor)
    assert_type(fused_adaptive_layer_norm(x, x, x, residual=x), tuple[Tensor, Tensor])
    assert_type(FusedAddLayerNorm(4, dropout_p=0.1).forward(x, None), tuple[Tensor, Tensor])
    assert_type(fused_gated_rms_norm(x, x, weight, activation=None, group_size=4), Tensor)
    assert_type(fused_gated_layer_norm(x, x, weight, bias, norm_before_gate=False), Tensor)
    assert_type(FusedGatedRMSNorm(4, activation="sigmoid", group_size=2).forward(x, x), Tensor)
    assert_type(backend(), str)
    report = replace_norms(model)
    assert_type(report, ReplaceReport)
    assert_type([entry.reason for entry in report.left], list[str])
    assert_type(restore_norms(model), ReplaceReport)


def misuse(x: Tensor) -> None:  # each line is an error to mypy, and one that were none would be reported
    fused_layer_norm([1.0, 2.0])  # type: ignore[arg-type]
    fused_rms_norm(x, eps="small")  # type: ignore[arg-type]
    fused_layer_norm(x, None, None, 1e-5, (4,))  # type: ignore[call-arg]
