"""replace_norms gives the norms of an existing model this library's forward, in place; restore_norms undoes it.

Only the class of a module changes. Parameters, buffers, hooks, names, dtype, device and training flag stay the same. A
module is recognized by what it computes, never by `isinstance`: a subclass may compute anything.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import numbers
import re
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .functional import fused_gated_rms_norm, fused_layer_norm, fused_rms_norm
from .modules import FusedLayerNorm, FusedRMSNorm, _not_scriptable
from .reference import DTYPES, as_shape

_TORCH_CLASSES = {nn.LayerNorm: FusedLayerNorm, nn.RMSNorm: FusedRMSNorm}
_KNOWN_PACKAGES = ("transformers", "transformers_modules", "diffusers", "timm", "torchvision")
_OTHER_TORCH_NORMS = (
    nn.modules.batchnorm._NormBase,  # BatchNorm and InstanceNorm
    nn.GroupNorm,
    nn.LocalResponseNorm,
    nn.CrossMapLRN2d,
)


@dataclass(frozen=True)
class NormEntry:
    """One module of a report. `replaced_by` is its new class; None means that it was left, and `reason` says why."""

    name: str
    module_class: str
    replaced_by: str | None
    reason: str = ""


@dataclass(frozen=True)
class ReplaceReport:
    """The result of `replace_norms` or `restore_norms`. It prints as a table with one row for repeated layers."""

    entries: tuple[NormEntry, ...]  # one for each norm: name, module_class, replaced_by (or None), reason
    action: str = "replaced"  # "replaced" or "restored"
    notes: tuple[str, ...] = ()  # about the model as a whole

    @property
    def replaced(self) -> list[NormEntry]:
        """The norms that have another class now."""
        return [entry for entry in self.entries if entry.replaced_by]

    @property
    def left(self) -> list[NormEntry]:
        """The norms that were left, each with its reason."""
        return [entry for entry in self.entries if not entry.replaced_by]

    def __str__(self) -> str:
        title = f"{len(self.entries)} norm modules: {len(self.replaced)} {self.action}, {len(self.left)} left"
        if not self.entries:
            return "\n".join([title, *self.notes])
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
        return "\n".join([title, *lines, *self.notes])


def replace_norms(
    model: nn.Module,
    *,
    filter: Callable[[str, nn.Module], bool] | None = None,
    transformers: bool = True,
    rounding: Literal["torch", "model"] = "torch",
) -> ReplaceReport:
    """Replace the LayerNorms and RMSNorms of `model` by fused ones, in place.

    Replaces modules whose class is exactly `torch.nn.LayerNorm` or `torch.nn.RMSNorm`, and norms of Hugging Face
    transformers and diffusers, timm and torchvision whose forward is a known formula. The code of the forward is
    compared, not its name. Known are Llama, OLMo, Gemma, T5, Cohere and the many models that share their formulas, the
    gated norms of Mamba 2, Qwen3-Next, Kimi Linear and Falcon-H1, and LayerNorms over the channels of images. All other
    norms are left unchanged, and the report gives the reason: other subclasses, parametrized modules, instances
    with their own forward, sharded or quantized weights. docs/models.md lists the tested models.

    Only `module.__class__` changes, to a subclass of the original (and numpy ints in normalized_shape become Python
    ints). Parameters stay the same objects, so an existing optimizer keeps working. state_dict keys, hooks and names
    stay; deepcopy, pickle and `isinstance` work. A second call changes nothing; `restore_norms` undoes the first. Call
    it before sharding (FSDP, tensor parallel).

    Numerics: statistics and products in float32, one rounding at the end, as in torch, OLMo, GPT-OSS, Gemma and Cohere.
    Llama and T5 round the normalized value to 16 bits before they multiply by weight: 16-bit results differ by up to
    one unit in the last place, float32 results by float32 rounding. ``rounding="model"`` rounds where these classes
    round (`fused_rms_norm` with ``rounding="llama"``). Other norms round once more, before a gate or a
    bias: the report's note gives the difference. A norm of a package other than torch returns the dtype that the
    original returns (float32 for a Llama norm with float32 weight and bfloat16 input). It runs the original code for
    inputs that the kernels do not take, such as float64 or a gate that is broadcast. Under CUDA autocast the output has
    the input's dtype, whereas torch's LayerNorm returns float32.

    Under torch.compile the norms take in the additions beside them. Compiled models train as fast as with Inductor's
    own norms, or faster; docs/pytorch.md has the measurements, and the mode of inference that can be slower.

    Args:
        model: any module; it may be a norm itself.
        filter: called as ``filter(name, module)`` for every norm that can be replaced; False leaves the norm. A module
            with several names is replaced if all names pass.
        transformers: whether to replace the norms of transformers' models too.
        rounding: "torch", one rounding at the end; "model", the rounding of the norm's class, for RMSNorms without a
            gate (Llama, Mistral, Qwen, DeepSeek, T5 and classes with their formulas; diffusers). To change the rounding
            of a replaced model, call `restore_norms` first.

    Returns:
        A `ReplaceReport`: every norm of the model with its new class, or the reason why it was left.

    Raises:
        TypeError: a model that is not a module, or a filter that is not a function.
        ValueError: a `rounding` other than these.

    Example:
        >>> model = torch.nn.TransformerEncoderLayer(64, 4)
        >>> print(replace_norms(model, filter=lambda name, module: name != "norm2"))
        2 norm modules: 1 replaced, 1 left
        count  name   class      now             note
        1      norm1  LayerNorm  FusedLayerNorm
        1      norm2  LayerNorm  left            filtered out
    """
    if rounding not in ("torch", "model"):
        raise ValueError(f'rounding must be "torch" or "model", got {rounding!r}')
    names = _names_by_module(model)
    if filter is not None and not callable(filter):
        raise TypeError(f"filter must be a function of (name, module) or None, got {type(filter).__name__}")
    decisions = []  # decide on all before changing any: an exception in filter leaves the model unchanged
    for module, aliases in names.items():
        if not _is_norm(module):
            continue
        fused_class, note = _decide(module, transformers, rounding)
        if fused_class and filter and not all(filter(name, module) for name in aliases):
            fused_class, note = None, "filtered out"
        decisions.append((module, fused_class, ", ".join(aliases), note))
    entries = []
    for module, fused_class, name, note in decisions:
        entries.append(NormEntry(name, type(module).__name__, fused_class and fused_class.__name__, note))
        if fused_class:
            module.__class__ = fused_class
            sizes = getattr(module, "normalized_shape", None)
            if isinstance(sizes, tuple) and any(isinstance(n, numbers.Integral) and type(n) is not int for n in sizes):
                module.normalized_shape = as_shape(sizes)  # torch.compile takes numpy's ints for tensors
    return ReplaceReport(tuple(entries), notes=_notes(model))


def restore_norms(model: nn.Module) -> ReplaceReport:
    """Undo `replace_norms`: give each fused norm of `model` its original class back, in place.

    Modules created as `FusedLayerNorm` or `FusedRMSNorm` become `torch.nn.LayerNorm` and `torch.nn.RMSNorm` too. Other
    modules of this library, such as `FusedAddLayerNorm`, stay: torch.nn has no equivalent.

    Args:
        model: any module; it may be a norm itself.

    Returns:
        A `ReplaceReport`: every fused norm with its new class, or the reason why it was left.

    Raises:
        TypeError: a model that is not a module.
    """
    originals = {fused: original for original, fused in _TORCH_CLASSES.items()}
    entries = []
    for module, aliases in _names_by_module(model).items():
        cls = type(module)
        original = cls.original_class if _FusedKnownNorm in cls.__bases__ else originals.get(cls)
        if original is not None and "forward" in vars(module):  # such as accelerate's hooks, around the fused one
            entries.append(NormEntry(", ".join(aliases), cls.__name__, None, "this instance has its own forward"))
        elif original is not None:
            entries.append(NormEntry(", ".join(aliases), cls.__name__, original.__name__))
            module.__class__ = original
    return ReplaceReport(tuple(entries), "restored")


def _notes(model: nn.Module) -> tuple[str, ...]:
    if torch.backends.mha.get_fastpath_enabled() and any(
        isinstance(module, nn.TransformerEncoderLayer)
        and module.activation_relu_or_gelu
        and getattr(module.self_attn, "batch_first", False)
        for module in model.modules()
    ):
        return (
            "TransformerEncoderLayer in eval mode without gradients calls no norm module: PyTorch's fast path reads "
            "the weights; torch.backends.mha.set_fastpath_enabled(False) turns that path off",
        )
    return ()


def _names_by_module(model: nn.Module) -> dict[nn.Module, list[str]]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


def _is_norm(module: nn.Module) -> bool:
    """Whether the report lists this module: torch's norms, and modules without children whose class name has "norm"."""
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm, *_OTHER_TORCH_NORMS)):
        return True
    return "norm" in type(module).__name__.lower() and not module._modules


def _decide(module: nn.Module, transformers: bool, rounding: str) -> tuple[type | None, str]:
    """The fused class for a module and a note on its numerics, or None and the reason to leave the module."""
    cls = type(module)
    package = cls.__module__.partition(".")[0]
    if package == __package__:
        return None, "fused already"
    if isinstance(module, _OTHER_TORCH_NORMS):
        return None, "not a LayerNorm or RMSNorm"
    if nn.utils.parametrize.is_parametrized(module):
        return None, "parametrized"
    if "forward" in vars(module):
        return None, "this instance has its own forward"
    for name, parameter in module._parameters.items():
        if parameter is not None and type(parameter) is not nn.Parameter:
            return None, f"its {name} is a {type(parameter).__name__}: replace before sharding or quantizing"
        if parameter is not None and parameter.dtype not in DTYPES:
            return None, f"its {name} is {parameter.dtype}"
    if cls in _TORCH_CLASSES:
        if "weight" not in module._parameters:
            return None, "its weight is not a Parameter of the module (sharded or reparametrized)"
        return _TORCH_CLASSES[cls], ""
    if package not in _KNOWN_PACKAGES:
        base = next((base.__name__ for base in _TORCH_CLASSES if issubclass(cls, base)), None)
        return None, f"a subclass of {base}" if base else "unknown numerics"
    if package.startswith("transformers") and not transformers:
        return None, "transformers=False"
    formula = formula_of(cls)
    if formula is None:
        return None, f"unknown numerics (fingerprint {_class_fingerprint(cls)})"
    reason = why_not(module, formula)
    if reason:
        return None, reason
    note = formula.note
    if rounding == "model" and formula.rounds_x_hat:
        note = _ROUNDS_AS_MODEL
    elif note and formula.has_bias and module._parameters.get("bias") is not None:
        note = _ROUNDS_BEFORE_BIAS
    return _fused_class(cls, rounding), note


def why_not(module: nn.Module, formula: _Formula) -> str | None:
    """Why this module cannot be replaced although the forward of its class is known; None if it can."""
    if getattr(module, "_fast_norm", False):
        return "timm's set_fast_norm is on"
    if formula.has_weight:
        weight = module._parameters.get("weight")
        if weight is None and getattr(module, "weight", None) is not None:
            return "its weight is not a Parameter of the module (sharded or reparametrized)"
    if formula.gates and getattr(module, "activation", "silu") not in _ACTIVATIONS:
        return f"its gate has the activation {module.activation!r}"
    return None


@dataclass(frozen=True)
class _Formula:
    """The forward of a norm that is not torch's, as arguments of our functions."""

    is_rms_norm: bool = True
    eps: str | float = "variance_epsilon"  # the attribute that holds it, or its value
    has_weight: bool = True
    has_bias: bool = False
    like_torch: bool = False  # over the last dimensions, as many as the attribute normalized_shape has; else the last
    channels: str = "channels_last"  # or "channels_first": dimension 1 of 4; or "data_format": as that attribute says
    weight_offset: float = 0.0
    # The sizes that the last dimension is cut into, groups and columns of a group with statistics of their own, as
    # numbers or attributes that hold them; -1 for what follows from the other.
    groups: tuple[str | int, str | int] | None = None
    gates: str = ""  # the operand of the argument `gate`: "x", "y", or "norm_before_gate": y if that attribute is true
    needs_gate: bool = False  # False: gate=None is the norm without a gate
    promotes: bool = False  # the output has weight's dtype if it is wider than x's
    # Whether x_hat is rounded to x's dtype before the product with weight: "always", or "with 16-bit weights".
    rounds_x_hat: str = ""
    note: str = ""


_ROUNDS_TWICE = "rounds once in float32; up to 1 ulp from the original in 16-bit dtypes"
_ROUNDS_THRICE = "rounds once in float32; up to 2 ulp from the original in 16-bit dtypes"
_ROUNDS_AS_MODEL = "rounds where the original does; in 16-bit dtypes about 1 of 10,000 elements is 1 or 2 ulp from it"
# If the two cancel, that is more than 2 ulp of the result.
_ROUNDS_BEFORE_BIAS = "rounds once in float32; up to 2 ulp of what bias is added to from the original in 16-bit dtypes"

_LAYER_NORM = _Formula(is_rms_norm=False, eps="eps", has_bias=True, like_torch=True)
_LAYER_NORM_2D = replace(_LAYER_NORM, channels="channels_first")
_TIMM_RMS_NORM = _Formula(eps="eps", like_torch=True)

# Values of a gated norm's attribute `activation`, and our functions' names for them.
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}

# Fingerprints (see _fingerprint) of the forwards in the known packages, by family. To add a model's norm, read its
# forward, describe it by the fields of _Formula in one line here, and add a line in tests/test_replace.py. The report
# shows the fingerprint of an unknown norm.
_FORMULAS: dict[str, _Formula] = {
    # x_hat rounded to x's dtype, then multiplied by weight: Llama, Mistral, Qwen2, Qwen3, DeepSeek-V3, ...
    "3e93015547c4": _Formula(promotes=True, rounds_x_hat="always", note=_ROUNDS_TWICE),
    # the same, Llama 4
    "4ef4d2e73c3f": _Formula(eps="eps", promotes=True, rounds_x_hat="always", note=_ROUNDS_TWICE),
    # x_hat rounded to weight's dtype where that is 16-bit, then multiplied by it: T5, LongT5, Pix2Struct, ...
    "203df5a7d135": _Formula(promotes=True, rounds_x_hat="with 16-bit weights", note=_ROUNDS_TWICE),
    # weight * x_hat in float32, rounded once: OLMo 2, GPT-OSS, ...
    "47f6d854cc96": _Formula(),
    # the same, weight converted to float32 first: Helium, Nemotron-H
    "3ea4ebe76d5f": _Formula(),
    # the same: Moshi
    "d14f89a5dec4": _Formula(eps="eps"),
    # (1 + weight) * x_hat: Gemma, Gemma 2, Gemma 3, Qwen3-Next, ...
    "6710578659c8": _Formula(eps="eps", weight_offset=1.0),
    # the same, with groups: Qwen4-Exp
    "a5cd0ccf6e69": _Formula(eps="eps", weight_offset=1.0, groups=(-1, "group_size")),
    # weight only if with_scale, the root as pow(-0.5): Gemma 4
    "fff138559223": _Formula(eps="eps"),
    # no weight: Llama 4's query and key norm, NanoChat, ...
    "3f95bfb133fe": _Formula(eps="eps", has_weight=False),
    # x * silu(gate) in float32, normalized by groups, rounded to x's dtype, times weight: Mamba 2, Bamba, Zamba 2, ...
    "c9c442456549": _Formula(groups=(-1, "group_size"), gates="x", promotes=True, note=_ROUNDS_TWICE),
    # the same without groups: Mamba 2, Bamba in transformers 5.17
    "0980ad20fbe5": _Formula(gates="x", promotes=True, note=_ROUNDS_TWICE),
    # x_hat rounded, times weight, rounded where weight is 16-bit, times silu(gate): Qwen3-Next, Qwen3.5, OLMo Hybrid
    "087ef86e729e": _Formula(gates="y", needs_gate=True, note=_ROUNDS_THRICE),
    # the same in float32, rounded once, with a sigmoid: Kimi Linear, GLM-5-Next, ...
    "bca31cb17089": _Formula(gates="y", needs_gate=True),
    # silu(gate) before or after the norm of groups, rounded once: Falcon-H1
    "ac73f98a6f34": _Formula(groups=("n_groups", -1), gates="norm_before_gate"),
    # LayerNorm without bias; with a weight for each head for queries and keys: Cohere
    "6cec94f7e339": _Formula(is_rms_norm=False),
    # x_hat rounded to x's dtype, times weight, plus bias, each rounded where they are 16-bit: DeBERTa
    "f35d510d546f": _Formula(is_rms_norm=False, has_bias=True, promotes=True, note=_ROUNDS_TWICE),
    # the same, with a weight and bias for each head: Chameleon
    "9b814fe31f44": replace(_LAYER_NORM, eps=1e-5, promotes=True, note=_ROUNDS_TWICE),
    # LayerNorm of images, channels first or last: ConvNeXt, SAM, ...
    "20fec80cc1f5": replace(_LAYER_NORM, channels="data_format"),
    # the same, channels first only: torchvision's LayerNorm2d, EoMT
    "bb5b56067a3b": _LAYER_NORM_2D,
    # timm: LayerNorm, LayerNormFp32, LayerNorm2d, LayerNorm2dFp32, RmsNorm, RmsNormFp32
    "505c45dbe059": _LAYER_NORM,
    "7f8fc5af38ce": _LAYER_NORM,
    "844a3a5946bc": _LAYER_NORM_2D,
    "fe52997b8b2a": _LAYER_NORM_2D,
    "b09d10389c54": _TIMM_RMS_NORM,
    "40e064b4b0aa": _TIMM_RMS_NORM,
    # diffusers: FP32LayerNorm
    "3b84251245c5": _LAYER_NORM,
    # x_hat rounded to weight's dtype where that is 16-bit, then multiplied by it: diffusers' RMSNorm
    "6f6c98a46773": _Formula(
        eps="eps", has_bias=True, promotes=True, rounds_x_hat="with 16-bit weights", note=_ROUNDS_TWICE
    ),
}


def formula_of(cls: type) -> _Formula | None:
    """The formula of this class's forward; None if its code is unknown."""
    return _FORMULAS.get(_class_fingerprint(cls) or "")


def _class_fingerprint(cls: type) -> str | None:
    if cls.__call__ is not nn.Module.__call__:
        return None
    code = getattr(cls.forward, "__code__", None)
    if code and "super" in code.co_names and cls.__mro__[1] is not nn.LayerNorm:
        return None  # its text does not show the code it calls
    return _fingerprint(cls.forward, getattr(cls, "_norm", None))


# The globals that the known forwards use must have these values.
_MEANT = {"torch": torch, "nn": nn, "F": F, "rms_norm": F.rms_norm}


@functools.cache
def _fingerprint(forward: Callable, helper: Callable | None) -> str | None:
    """Hash of the code of a forward and its helper, without comments, annotations and names of local variables.

    None if there is no source. Reading the code object, not the function, keeps inspect from looking through a wrapper
    that changes the computation.
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
        if not isinstance(tree, ast.FunctionDef):
            return None
        meant = {**_MEANT, "ACT2FN": getattr(sys.modules.get("transformers.activations"), "ACT2FN", None)}
        if any(function.__globals__.get(name, value) is not value for name, value in meant.items()):
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


class _FusedKnownNorm:
    """Mixin before a norm class that is not torch's: the attributes of that class, our forward."""

    original_class: type
    formula: _Formula
    rounding: str  # of replace_norms
    __prepare_scriptable__ = _not_scriptable

    def forward(self, *arguments: Any, **named: Any) -> Tensor:  # the original's name for x
        x = arguments[0] if arguments else next((named[name] for name in named if name != "gate"), None)
        gate = arguments[1] if len(arguments) > 1 else named.get("gate")
        if (
            isinstance(x, torch.fx.Proxy)
            or len(arguments) + len(named) > (2 if self.formula.gates else 1)
            or not takes_fused(self, self.formula, x, gate)
        ):
            return super().forward(*arguments, **named)
        return fused_forward(self, self.formula, x, gate, self.rounding)

    def __reduce_ex__(self, protocol):
        # Pickle finds classes by name. This class is made at run time, so loading makes it again from the original.
        return _new_module, (self.original_class, self.rounding), self.__dict__


_TAKEN = (torch.float32, torch.bfloat16, torch.float16)


def takes_fused(module: nn.Module, formula: _Formula, x: Tensor, gate: Tensor | None = None) -> bool:
    """Whether one pass can compute `formula` for x and gate with the weight of `module`."""
    if gate is None:
        if formula.needs_gate:
            return False
    elif isinstance(gate, torch.fx.Proxy) or gate.dtype not in _TAKEN or gate.shape != x.shape:
        return False
    weight = getattr(module, "weight", None) if formula.has_weight else None
    if weight is not None:
        bias = getattr(module, "bias", None) if formula.has_bias else None
        if weight.dtype not in (x.dtype, torch.float32) or (bias is not None and bias.dtype != weight.dtype):
            return False
        if weight.dim() != 1 and x.shape[x.dim() - weight.dim() :] != weight.shape:  # such as one head for all
            return False
    return x.dtype in _TAKEN


def fused_forward(
    module: nn.Module, formula: _Formula, x: Tensor, gate: Tensor | None = None, rounding: str = "torch"
) -> Tensor:
    """The forward of `module`, a norm that computes `formula`, on our kernels; rounding: that of replace_norms."""
    weight = getattr(module, "weight", None) if formula.has_weight else None
    bias = getattr(module, "bias", None) if formula.has_bias else None
    channels = module.data_format if formula.channels == "data_format" else formula.channels
    channels_first = channels == "channels_first"
    if channels_first:
        x = x.permute(0, 2, 3, 1)
    groups = _groups(module, formula, x)
    if groups:  # weight then has a value for each column of each group, as for heads
        x, gate, weight = (t if t is None else t.unflatten(-1, groups) for t in (x, gate, weight))
    eps = getattr(module, formula.eps) if isinstance(formula.eps, str) else formula.eps
    options = {
        "normalized_shape": module.normalized_shape if formula.like_torch else x.shape[-1:],
        "weight_offset": formula.weight_offset,
        "out_dtype": weight.dtype if formula.promotes and weight is not None else None,
    }
    if gate is None:
        norm = fused_rms_norm if formula.is_rms_norm else fused_layer_norm
        if rounding == "model" and _rounds_x_hat(formula, x, weight):
            options["rounding"] = "llama"  # such a formula is an RMSNorm's
        y = norm(x, weight, bias, eps, **options)
    else:
        activation = _ACTIVATIONS[getattr(module, "activation", "silu")]
        gates_y = module.norm_before_gate if formula.gates == "norm_before_gate" else formula.gates == "y"
        y = fused_gated_rms_norm(x, gate, weight, bias, eps, activation=activation, norm_before_gate=gates_y, **options)
    y = y.flatten(-2) if groups else y
    return y.permute(0, 3, 1, 2) if channels_first else y


def _groups(module: nn.Module, formula: _Formula, x: Tensor) -> list[int] | None:
    """The sizes into which x's last dimension is split; None for one group."""
    if formula.groups is None:
        return None
    sizes = [getattr(module, size) if isinstance(size, str) else size for size in formula.groups]
    return None if sizes[0] == 1 or sizes[1] in (None, x.shape[-1]) else sizes


def _rounds_x_hat(formula: _Formula, x: Tensor, weight: Tensor | None) -> bool:
    if formula.rounds_x_hat == "with 16-bit weights" and weight is not None and weight.dtype != x.dtype:
        return False
    return formula.rounds_x_hat != "" and x.dtype.itemsize == 2


@functools.cache
def _fused_class(original: type, rounding: str) -> type:
    namespace = {"original_class": original, "formula": formula_of(original), "rounding": rounding,
                 "__module__": __name__}  # fmt: skip
    return type(f"Fused{original.__name__}", (_FusedKnownNorm, original), namespace)


def _new_module(original: type, rounding: str) -> nn.Module:
    # A model saved with one version of transformers may be loaded with another, whose norm is unknown.
    cls = _fused_class(original, rounding) if formula_of(original) else original
    return cls.__new__(cls)
