"""Our norms for the `kernels` package of Hugging Face, without the Hub.

    from kernels import Mode, kernelize, use_kernel_mapping
    from fused_layernorm.integrations.hf_kernels import KERNEL_MAPPING

    with use_kernel_mapping(KERNEL_MAPPING):
        model = kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE)

`replace_norms` does the same for more norms, reports the result and can be undone. This module is for programs that
already select their kernels by `kernelize`.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from importlib.metadata import version

import torch
from torch import Tensor, nn

from ..replace import _LAYER_NORM, formula_of, fused_forward, takes_fused, why_not


class RMSNorm(nn.Module):
    """The forward that `kernelize` binds to a norm of a model: `self` is that norm, with its own weight and eps.

    Layers of the same name may compute different formulas, so the code of the norm's class decides, as in
    `replace_norms`. A norm with unknown code runs that code. `kernelize` allows no other members in such a class.
    """

    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        return _forward(self, hidden_states)


class LayerNorm(RMSNorm):
    """The same for torch.nn.LayerNorm, under its name in the documentation of `kernels`."""


class RMSNormGated(nn.Module):
    """The same for norms with a gate, such as Qwen3-Next's."""

    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        return _forward(self, hidden_states, gate)


def _forward(module: nn.Module, x: Tensor, *gate: Tensor | None) -> Tensor:
    formula = _formula_of(type(module))  # of the class: torch 2.11 takes no module for a constant
    if formula is None or why_not(module, formula) or not takes_fused(module, formula, x, *gate):
        return type(module).forward(module, x, *gate)
    return fused_forward(module, formula, x, *gate)


@torch.compiler.assume_constant_result
def _formula_of(cls: type[nn.Module]):
    return _LAYER_NORM if cls is nn.LayerNorm else formula_of(cls)


@dataclass(frozen=True)
class _InThisPackage:
    """A layer repository in the terms of `kernels`: a hashable object with the layer to load."""

    layer: type[nn.Module]

    def load(self) -> type[nn.Module]:
        return self.layer

    def __str__(self) -> str:
        return f"fused_layernorm, layer {self.layer.__name__}"


def _warn_of_versions() -> None:
    """Warn if transformers does not mark its norms for `kernelize`: it does so for certain versions of `kernels` only,
    without a message for the others."""
    try:
        from transformers.utils import import_utils

        oldest, newest = import_utils.KERNELS_MIN_VERSION, import_utils.KERNELS_MAX_VERSION
        installed, fits = version("kernels"), import_utils.is_kernels_available()
    except (ImportError, AttributeError):  # one of them is not installed, or this transformers checks no version
        return
    if not fits:
        warnings.warn(
            f"kernelize() will leave the norms of transformers' models as they are: transformers "
            f"{version('transformers')} wants kernels >= {oldest}, < {newest}, and this is kernels "
            f"{installed}. replace_norms(model) works with any version.",
            RuntimeWarning,
            stacklevel=3,
        )


_warn_of_versions()

_LAYERS = {
    "LayerNorm": LayerNorm,
    "RMSNorm": RMSNorm,
    "RMSNormGated": RMSNormGated,
    "RMSNormZeroCentered": RMSNorm,
}
# Not by mode: the layers support all modes.
KERNEL_MAPPING = {
    name: {device: _InThisPackage(layer) for device in ("cpu", "cuda")} for name, layer in _LAYERS.items()
}
