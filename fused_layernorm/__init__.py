"""LayerNorm and RMSNorm for PyTorch, forward and backward, each fused into one pass over memory."""

__version__ = "0.1.0"

from . import _ops
from .functional import (
    fused_adaptive_layer_norm,
    fused_adaptive_rms_norm,
    fused_add_layer_norm,
    fused_add_rms_norm,
    fused_layer_norm,
    fused_rms_norm,
)
from .modules import FusedAdaptiveLayerNorm, FusedAddLayerNorm, FusedAddRMSNorm, FusedLayerNorm, FusedRMSNorm
from .replace import ReplaceReport, replace_norms, restore_norms

__all__ = [
    "FusedAdaptiveLayerNorm",
    "FusedAddLayerNorm",
    "FusedAddRMSNorm",
    "FusedLayerNorm",
    "FusedRMSNorm",
    "ReplaceReport",
    "backend",
    "fused_adaptive_layer_norm",
    "fused_adaptive_rms_norm",
    "fused_add_layer_norm",
    "fused_add_rms_norm",
    "fused_layer_norm",
    "fused_rms_norm",
    "replace_norms",
    "restore_norms",
]


def backend() -> str:
    """Which kernels this process loaded: "cuda" (CUDA and CPU kernels), "cpu", or "reference" (PyTorch operations)."""
    return _ops.backend
