"""Drop-in: give the norms of an existing model this library's forward, in place, and back again.

Only the class of a module changes, so parameters, buffers, hooks, names, dtype, device and training flag are untouched.
A module is recognised by what it computes, never by `isinstance`: a subclass may compute anything.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .functional import fused_layer_norm, fused_rms_norm
from .modules import FusedLayerNorm, FusedRMSNorm
from .reference import DTYPES

_TORCH_CLASSES = {nn.LayerNorm: FusedLayerNorm, nn.RMSNorm: FusedRMSNorm}
_OTHER_TORCH_NORMS = (
    nn.modules.batchnorm._NormBase,  # BatchNorm and InstanceNorm
    nn.GroupNorm,
    nn.LocalResponseNorm,
    nn.CrossMapLRN2d,
)


@dataclass(frozen=True)
class NormEntry:
    """One module of a report: `replaced_by` is its new class, or None and `reason` says why it was left."""

    name: str
    module_class: str
    replaced_by: str | None
    reason: str = ""


@dataclass(frozen=True)
class ReplaceReport:
    """What `replace_norms` or `restore_norms` did; print it for a table with repeated layers folded together."""

    entries: tuple[NormEntry, ...]

    @property
    def replaced(self) -> list[NormEntry]:
        return [entry for entry in self.entries if entry.replaced_by]

    @property
    def left(self) -> list[NormEntry]:
        return [entry for entry in self.entries if not entry.replaced_by]

    def __str__(self) -> str:
        title = f"{len(self.entries)} norm modules: {len(self.replaced)} replaced, {len(self.left)} left"
        if not self.entries:
            return title
        folded: dict[tuple[str, ...], list[str]] = {}
        for entry in self.entries:
            pattern = re.sub(r"\b\d+\b", "*", entry.name)
            key = (pattern, entry.module_class, entry.replaced_by or "left", entry.reason)
            folded.setdefault(key, []).append(entry.name)
        rows = [("count", "name", "class", "now", "note")]
        for (pattern, *rest), names in folded.items():
            name = pattern if len(names) > 1 else names[0] or "(the model)"
            rows.append((str(len(names)), name, *rest))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([title, *lines])


def replace_norms(
    model: nn.Module, *, filter: Callable[[str, nn.Module], bool] | None = None, transformers: bool = True
) -> ReplaceReport:
    """Swap the LayerNorms and RMSNorms of `model` for fused ones, in place.

    Replaced are modules whose class is exactly `torch.nn.LayerNorm` or `torch.nn.RMSNorm`, and norms of Hugging Face
    transformers whose forward is one of the known formulas, compared as code, not by name (Llama, OLMo, Gemma, T5,
    Cohere and the many models that share their formulas). Anything else is left as it is, with the reason: subclasses,
    parametrized modules, instances with a forward of their own, weights that are sharded or quantized.

    Only `module.__class__` changes, to a subclass of the original. Parameters stay the same objects (an optimizer made
    before goes on working), state_dict keys, hooks and names stay; deepcopy, pickle and `isinstance` work. Calling it
    twice changes nothing more; `restore_norms` undoes it. Replace before sharding (FSDP, tensor parallel).

    Numerics: statistics and products in float32, one rounding at the end. That is what torch, OLMo, GPT-OSS, Gemma and
    Cohere do. Llama and T5 round the normalized value to 16 bits before they multiply by weight; there the result is up
    to one unit in the last place of the 16-bit dtype apart, and equal to within float32 rounding in float32. A
    transformers norm returns the dtype the original returns (float32 where a Llama norm with float32 weight is given
    bfloat16) and goes back to the original code for dtypes it cannot take in one pass, such as float64. Under CUDA
    autocast the output has the input's dtype, where torch's LayerNorm returns float32.

    Args:
        model: any module; it may be a norm itself.
        filter: called as ``filter(name, module)`` for every norm that could be replaced; False leaves it. A module
            that has several names is replaced if all of them pass.
        transformers: whether to replace the norms of transformers' models too.

    Returns:
        A `ReplaceReport`: every norm of the model, what it is now, or why it was left.

    Example:
        >>> model = torch.nn.TransformerEncoderLayer(64, 4)
        >>> print(replace_norms(model, filter=lambda name, module: name != "norm2"))
        2 norm modules: 1 replaced, 1 left
        count  name   class      now             note
        1      norm1  LayerNorm  FusedLayerNorm
        1      norm2  LayerNorm  left            filtered out
    """
    names = _names_by_module(model)
    decisions = []  # decide on all before changing any: an exception in filter leaves the model as it was
    for module, aliases in names.items():
        if not _is_norm(module):
            continue
        fused_class, note = _decide(module, transformers)
        if fused_class and filter and not all(filter(name, module) for name in aliases):
            fused_class, note = None, "filtered out"
        decisions.append((module, fused_class, ", ".join(aliases), note))
    entries = []
    for module, fused_class, name, note in decisions:
        entries.append(NormEntry(name, type(module).__name__, fused_class and fused_class.__name__, note))
        if fused_class:
            module.__class__ = fused_class
    return ReplaceReport(tuple(entries))


def restore_norms(model: nn.Module) -> ReplaceReport:
    """Undo `replace_norms`: give each fused norm of `model` its original class back, in place.

    Modules built as `FusedLayerNorm` or `FusedRMSNorm` become `torch.nn.LayerNorm` and `torch.nn.RMSNorm` too, which
    leaves a model that needs this library no more.
    """
    originals = {fused: original for original, fused in _TORCH_CLASSES.items()}
    entries = []
    for module, aliases in _names_by_module(model).items():
        cls = type(module)
        original = cls.original_class if _FusedTransformersNorm in cls.__bases__ else originals.get(cls)
        if original is not None:
            entries.append(NormEntry(", ".join(aliases), cls.__name__, original.__name__))
            module.__class__ = original
    return ReplaceReport(tuple(entries))


def _names_by_module(model: nn.Module) -> dict[nn.Module, list[str]]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


def _is_norm(module: nn.Module) -> bool:
    """Whether a reader of the report would look for this module: torch's norms and leaves that call themselves norm."""
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm, *_OTHER_TORCH_NORMS)):
        return True
    return "norm" in type(module).__name__.lower() and not module._modules


def _decide(module: nn.Module, transformers: bool) -> tuple[type | None, str]:
    """The fused class for a module and a note on its numerics; or None and why the module has to be left."""
    cls = type(module)
    if cls in _TORCH_CLASSES.values() or _FusedTransformersNorm in cls.__bases__:
        return None, "fused already"
    if isinstance(module, _OTHER_TORCH_NORMS):
        return None, "not a LayerNorm or RMSNorm"
    if nn.utils.parametrize.is_parametrized(module):
        return None, "parametrized"
    if "forward" in vars(module):
        return None, "this instance has a forward of its own"
    for name, parameter in module._parameters.items():
        if parameter is not None and type(parameter) is not nn.Parameter:
            return None, f"its {name} is a {type(parameter).__name__}: replace before sharding or quantizing"
        if parameter is not None and parameter.dtype not in DTYPES:
            return None, f"its {name} is {parameter.dtype}"
    if cls in _TORCH_CLASSES:
        if "weight" not in module._parameters:
            return None, "its weight is not a Parameter of its own (sharded or reparametrized)"
        return _TORCH_CLASSES[cls], ""
    if cls.__module__.partition(".")[0] not in ("transformers", "transformers_modules"):
        base = next((base.__name__ for base in _TORCH_CLASSES if issubclass(cls, base)), None)
        return None, f"a subclass of {base}" if base else "unknown numerics"
    if not transformers:
        return None, "transformers=False"
    formula = _formula(cls)
    if formula is None:
        return None, f"unknown numerics (fingerprint {_class_fingerprint(cls)})"
    if formula.has_weight:
        weight = module._parameters.get("weight")
        if weight is None and getattr(module, "with_scale", True):
            return None, "its weight is not a Parameter of its own (sharded or reparametrized)"
        if weight is not None and weight.dim() != 1:
            return None, f"its weight has shape {tuple(weight.shape)}: not one value for each normalized element"
    return _fused_class(cls), formula.note


@dataclass(frozen=True)
class _Formula:
    """What the forward of a transformers norm computes, in the terms of our functions."""

    is_rms_norm: bool = True
    eps: str = "variance_epsilon"  # the attribute that holds it
    has_weight: bool = True
    weight_offset: float = 0.0
    promotes: bool = False  # the output has weight's dtype where that is wider than x's
    note: str = ""


_ROUNDS_TWICE = "rounds once in float32; up to 1 ulp from the original in 16-bit dtypes"

# Fingerprints (see _fingerprint) of the forwards found in transformers, by family. A new model's norm joins by one line
# here, after its forward was read and put into the fields of _Formula, and one in tests/test_replace.py; the report
# shows the fingerprint of a norm it does not know.
_FORMULAS: dict[str, _Formula] = {
    # x_hat rounded to x's dtype, then multiplied by weight: Llama, Mistral, Qwen2, Qwen3, DeepSeek-V3, ...
    "3e93015547c4": _Formula(promotes=True, note=_ROUNDS_TWICE),
    # the same, Llama 4
    "4ef4d2e73c3f": _Formula(eps="eps", promotes=True, note=_ROUNDS_TWICE),
    # x_hat rounded to weight's dtype where that is 16-bit, then multiplied by it: T5, LongT5, Pix2Struct, ...
    "203df5a7d135": _Formula(promotes=True, note=_ROUNDS_TWICE),
    # weight * x_hat in float32, rounded once: OLMo 2, GPT-OSS, ...
    "47f6d854cc96": _Formula(),
    # the same, weight converted to float32 first: Helium, Nemotron-H
    "3ea4ebe76d5f": _Formula(),
    # the same: Moshi
    "d14f89a5dec4": _Formula(eps="eps"),
    # (1 + weight) * x_hat: Gemma, Gemma 2, Gemma 3, Qwen3-Next, ...
    "6710578659c8": _Formula(eps="eps", weight_offset=1.0),
    # weight only if with_scale, the root as pow(-0.5): Gemma 4
    "fff138559223": _Formula(eps="eps"),
    # no weight: Llama 4's query and key norm, NanoChat, ...
    "3f95bfb133fe": _Formula(eps="eps", has_weight=False),
    # LayerNorm without bias: Cohere
    "6cec94f7e339": _Formula(is_rms_norm=False),
}


def _formula(cls: type) -> _Formula | None:
    return _FORMULAS.get(_class_fingerprint(cls) or "")


def _class_fingerprint(cls: type) -> str | None:
    if cls.__call__ is not nn.Module.__call__:
        return None
    return _fingerprint(cls.forward, getattr(cls, "_norm", None))


@functools.cache
def _fingerprint(forward: Callable, helper: Callable | None) -> str | None:
    """Hash of the code of a forward and its helper, blind to comments, annotations and names of local variables.

    None where there is no source to read. Reading the code object, not the function, keeps inspect from looking through
    a wrapper that changes what is computed.
    """
    texts = []
    for function in (forward, helper):
        if function is None:
            continue
        try:
            source = textwrap.dedent(inspect.getsource(function.__code__))
            tree = ast.parse(source).body[0]
        except (AttributeError, OSError, TypeError, SyntaxError):
            return None
        if not isinstance(tree, ast.FunctionDef) or function.__globals__.get("torch", torch) is not torch:
            return None
        texts.append(_canonical(tree))
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]


def _canonical(function: ast.FunctionDef) -> str:
    """The statements of a function as text, its local names replaced by numbered ones in order of appearance."""
    local_names = {arg.arg: f"v{i}" for i, arg in enumerate(function.args.args)}
    for arg in function.args.args:
        arg.arg, arg.annotation = local_names[arg.arg], None
    function.returns = None
    if ast.get_docstring(function) is not None:
        del function.body[0]
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    for node in names:
        if isinstance(node.ctx, ast.Store):
            local_names.setdefault(node.id, f"v{len(local_names)}")
    for node in names:
        node.id = local_names.get(node.id, node.id)
    return ast.unparse(function)


class _FusedTransformersNorm:
    """Mixed in before a transformers norm class: its attributes, our forward."""

    original_class: type
    formula: _Formula

    def forward(self, hidden_states: Tensor) -> Tensor:
        formula = self.formula
        weight = getattr(self, "weight", None) if formula.has_weight else None
        dtype = hidden_states.dtype
        takes_x = dtype in (torch.float32, torch.bfloat16, torch.float16)
        if not takes_x or (weight is not None and weight.dtype not in (dtype, torch.float32)):
            return super().forward(hidden_states)
        norm = fused_rms_norm if formula.is_rms_norm else fused_layer_norm
        return norm(
            hidden_states,
            weight,
            eps=getattr(self, formula.eps),
            normalized_shape=hidden_states.shape[-1:],
            weight_offset=formula.weight_offset,
            out_dtype=weight.dtype if formula.promotes else None,
        )

    def __reduce_ex__(self, protocol):
        # Pickle finds classes by name, and this one is made at run time: it is made again from the original.
        return _new_module, (self.original_class,), self.__dict__


@functools.cache
def _fused_class(original: type) -> type:
    namespace = {"original_class": original, "formula": _formula(original), "__module__": __name__}
    return type(f"Fused{original.__name__}", (_FusedTransformersNorm, original), namespace)


def _new_module(original: type) -> nn.Module:
    # A model saved with one version of transformers may be loaded with another, whose norm is not known.
    cls = _fused_class(original) if _formula(original) else original
    return cls.__new__(cls)
