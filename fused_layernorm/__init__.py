"""LayerNorm and RMSNorm for PyTorch, forward and backward, each fused into one pass over memory."""

__version__ = "0.2.0"

from . import _backend
from ._build import source_hash
from ._build.jit import build
from ._profile import ProfileReport, profile
from .functional import (
    fused_adaptive_layer_norm,
    fused_adaptive_rms_norm,
    fused_add_layer_norm,
    fused_add_rms_norm,
    fused_gated_layer_norm,
    fused_gated_rms_norm,
    fused_layer_norm,
    fused_layer_norm_add,
    fused_layer_norm_quant,
    fused_rms_norm,
    fused_rms_norm_add,
    fused_rms_norm_quant,
    fused_sandwich_rms_norm,
)
from .modules import (
    FusedAdaptiveLayerNorm,
    FusedAdaptiveRMSNorm,
    FusedAddLayerNorm,
    FusedAddRMSNorm,
    FusedGatedLayerNorm,
    FusedGatedRMSNorm,
    FusedLayerNorm,
    FusedLayerNormAdd,
    FusedRMSNorm,
    FusedRMSNormAdd,
    FusedSandwichRMSNorm,
)
from .replace import ReplaceReport, replace_norms, restore_norms

__all__ = [
    "FusedAdaptiveLayerNorm",
    "FusedAdaptiveRMSNorm",
    "FusedAddLayerNorm",
    "FusedAddRMSNorm",
    "FusedGatedLayerNorm",
    "FusedGatedRMSNorm",
    "FusedLayerNorm",
    "FusedLayerNormAdd",
    "FusedRMSNorm",
    "FusedRMSNormAdd",
    "FusedSandwichRMSNorm",
    "ProfileReport",
    "ReplaceReport",
    "backend",
    "build",
    "fused_adaptive_layer_norm",
    "fused_adaptive_rms_norm",
    "fused_add_layer_norm",
    "fused_add_rms_norm",
    "fused_gated_layer_norm",
    "fused_gated_rms_norm",
    "fused_layer_norm",
    "fused_layer_norm_add",
    "fused_layer_norm_quant",
    "fused_rms_norm",
    "fused_rms_norm_add",
    "fused_rms_norm_quant",
    "fused_sandwich_rms_norm",
    "include_dir",
    "profile",
    "replace_norms",
    "restore_norms",
]


def backend() -> str:
    """The kernels that this process has loaded: "cuda" (CUDA and CPU kernels), "cpu", or "reference" (PyTorch
    operations)."""
    return _backend.backend


def include_dir() -> str:
    """The include folder of cuda/vector_io.cuh, cuda/reduce.cuh and cuda/dispatch.cuh, for kernels of your own
    (docs/extending.md)."""
    return str(source_hash.CSRC)
