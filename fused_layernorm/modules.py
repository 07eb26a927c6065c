"""LayerNorm and RMSNorm as modules. Constructor, initialization, repr and state_dict are torch.nn's own."""

from __future__ import annotations

from torch import Tensor, nn

from .functional import fused_layer_norm, fused_rms_norm


class FusedLayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm` computed by `fused_layernorm.fused_layer_norm`; checkpoints load both ways."""

    def forward(self, input: Tensor) -> Tensor:
        return fused_layer_norm(input, self.weight, self.bias, self.eps, normalized_shape=self.normalized_shape)


class FusedRMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` computed by `fused_layernorm.fused_rms_norm`; checkpoints load both ways."""

    def forward(self, input: Tensor) -> Tensor:
        return fused_rms_norm(input, self.weight, None, self.eps, normalized_shape=self.normalized_shape)
