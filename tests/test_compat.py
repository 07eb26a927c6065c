"""Apex's names as its callers use them: Megatron's and NeMo's ways to build and call, dtypes mixed as Apex mixes them.

What each name computes in one dtype is test_apex_names' in tests/test_fusions.py.
"""

import inspect
import warnings

import pytest
import torch
import torch.nn.functional as F
from norm_cases import (
    bf16,
    fp16,
    fp32,
    fp64,
    on_devices,
    same_bits,
)

from fused_layernorm import compat, fused_rms_norm

FORWARD_ARGUMENTS = {  # of Apex's Functions, ctx left out
    "FusedLayerNormAffineFunction": ["input", "weight", "bias", "normalized_shape", "eps"],
    "FusedLayerNormFunction": ["input", "normalized_shape", "eps"],
    "FusedLayerNormAffineMixedDtypesFunction": ["input", "weight", "bias", "normalized_shape", "eps"],
    "FusedRMSNormAffineFunction": ["input", "weight", "normalized_shape", "eps"],
    "FusedRMSNormFunction": ["input", "normalized_shape", "eps"],
    "FusedRMSNormAffineMixedDtypesFunction": ["input", "weight", "normalized_shape", "eps"],
    "FastLayerNormFN": ["x", "gamma", "beta", "epsilon"],
}


@on_devices("name,memory_efficient", [(name, flag) for name in FORWARD_ARGUMENTS for flag in (False, True)])
def test_forward_is_inspected(device, name, memory_efficient):
    """`forward` has Apex's arguments, and computes what `apply` does"""
    function, names = getattr(compat, name), FORWARD_ARGUMENTS[name]
    found = inspect.getfullargspec(function.forward)
    assert found.args == ["ctx", *names, "memory_efficient"] and found.defaults == (False,)
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*shape, device=device) for shape in ((6, 32), (32,), (32,)))
    values = {"normalized_shape": torch.Size((32,)), "weight": weight, "gamma": weight, "bias": bias, "beta": bias}
    arguments = [values.get(of, 1e-5 if of.startswith("eps") else x) for of in names]
    y = function.apply(*arguments, memory_efficient)
    affine = [t for t in (weight, bias) if any(t is one for one in arguments)]
    norm = F.rms_norm if "RMS" in name else F.layer_norm
    torch.testing.assert_close(y, norm(x, (32,), *affine, eps=1e-5))
    assert same_bits(y, function.apply(*arguments)) and same_bits(y, function.forward(None, *arguments))


class AsMegatronCalls(torch.nn.Module):
    """A norm by one of Apex's Functions, which is asked for its arguments at each call."""

    def __init__(self, function, *after_parameters, memory_efficient, bias):
        super().__init__()
        self.function, self.after_parameters, self.memory_efficient = function, after_parameters, memory_efficient
        self.weight = torch.nn.Parameter(torch.zeros(32))  # of 1 less than it stands for
        self.bias = torch.nn.Parameter(torch.zeros(32)) if bias else None

    def forward(self, x):
        arguments = [x, self.weight + 1, *([] if self.bias is None else [self.bias]), *self.after_parameters]
        assert "memory_efficient" in inspect.getfullargspec(self.function.forward).args  # where not, it leaves it out
        return self.function.apply(*arguments, self.memory_efficient)


@on_devices("memory_efficient", [(False,), (True,)])
def test_as_megatron_calls(device, memory_efficient):
    """its three norms, with gradients"""
    x = torch.randn(6, 32, device=device, requires_grad=True)
    size = torch.Size((32,))
    for function, after_parameters, bias in (
        (compat.FastLayerNormFN, (1e-5,), True),
        (compat.FusedLayerNormAffineFunction, (size, 1e-5), True),
        (compat.FusedRMSNormAffineFunction, (size, 1e-5), False),
    ):
        module = AsMegatronCalls(function, *after_parameters, memory_efficient=memory_efficient, bias=bias).to(device)
        y = module(x)
        ones = torch.ones(32, device=device, requires_grad=True)
        truth = F.layer_norm(x, size, ones, module.bias) if bias else F.rms_norm(x, size, ones, 1e-5)
        torch.testing.assert_close(y, truth)
        gradient = torch.randn_like(y)
        for found, wanted in zip(torch.autograd.grad(y, (x, module.weight), gradient),
                                 torch.autograd.grad(truth, (x, ones), gradient), strict=True):  # fmt: skip
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


MIXED = {
    "MixedFusedLayerNorm": lambda x, weight, bias: F.layer_norm(x, (32,), weight, bias, 1e-5),
    "MixedFusedRMSNorm": lambda x, weight, bias: F.rms_norm(x, (32,), weight, 1e-5),
    "FastLayerNorm": lambda x, weight, bias: F.layer_norm(x, (32,), weight, bias, 1e-5),
}


@on_devices("name,dtype,memory_efficient", [
    (name, dtype, flag) for name in MIXED for dtype in (bf16, fp16) for flag in (False, True)
])  # fmt: skip
def test_16_bit_weights_beside_float32(device, name, dtype, memory_efficient):
    """Megatron's fp32 residual connection: the result has the weight's dtype, each gradient that of its tensor"""
    torch.manual_seed(0)
    module = getattr(compat, name)(32, memory_efficient=memory_efficient).to(device, dtype)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(6, 32, device=device, requires_grad=True)
    inputs = [x, *module.parameters()]
    y = module(x)
    assert y.dtype == dtype
    wide = [t.detach().double().requires_grad_() for t in inputs]
    truth = MIXED[name](*wide, *[None] * (3 - len(wide)))
    gradient = torch.randn_like(y)
    found = torch.autograd.grad(y, inputs, gradient)
    wanted = torch.autograd.grad(truth, wide, gradient.double())
    for of, one, right in zip([y, *inputs], [y, *found], [truth, *wanted], strict=True):
        assert one.dtype == of.dtype
        # Rounded once, by half of eps at most; float32 before, its error of the size of the terms
        torch.testing.assert_close(one.double(), right, rtol=torch.finfo(one.dtype).eps, atol=1e-5)


@pytest.mark.parametrize("name", ["MixedFusedLayerNorm", "MixedFusedRMSNorm"])
def test_keywords_apex_ignores(name):
    """any keyword is taken; the mark for sequence parallelism reaches the parameters, as in apex.transformer"""
    cls = getattr(compat, name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for options in ({}, {"sequence_parallel_enabled": False}, {"sequence_parallel_enbaled": False},
                        {"elementwise_affine": True}):  # fmt: skip
            module = cls(32, 1e-5, **options)
            assert not any(getattr(p, "sequence_parallel_enabled", False) for p in module.parameters())
        module = cls(32, eps=1e-5, sequence_parallel_enabled=True, memory_efficient=True)
    assert module.memory_efficient and all(p.sequence_parallel_enabled for p in module.parameters())
    with pytest.warns(UserWarning, match=f"{name} ignores sequence_parallel_enbaled, as Apex's does") as warned:
        cls(32, sequence_parallel_enbaled=True)
    assert warned[0].filename == __file__


@on_devices("dtype,weight_dtype", [
    (fp32, None), (bf16, None), (fp64, None), (fp32, fp32), (bf16, fp32), (fp16, fp16), (fp32, bf16), (fp64, fp64)
])  # fmt: skip
def test_manual_rms_norm(device, dtype, weight_dtype):
    """Apex's arguments; its dtypes of results"""
    torch.manual_seed(0)
    x = torch.randn(3, 4, 8, device=device).to(dtype)
    weight = None if weight_dtype is None else torch.randn(4, 8, device=device).to(weight_dtype)
    y = compat.manual_rms_norm(x, (4, 8), weight, 1e-3)
    truth = fused_rms_norm(x.double(), None if weight is None else weight.double(), eps=1e-3, normalized_shape=(4, 8))
    assert y.dtype == (weight_dtype or (fp64 if dtype == fp64 else fp32))
    torch.testing.assert_close(y, truth.to(y.dtype))


UNDER_AUTOCAST = {  # name: (call with x, weight and bias, whether it casts them)
    "fused_layer_norm_affine": (lambda x, w, b: compat.fused_layer_norm_affine(x, w, b, (32,), 1e-5), True),
    "fused_layer_norm": (lambda x, w, b: compat.fused_layer_norm(x, (32,), 1e-5), True),
    "mixed_dtype_fused_layer_norm_affine": (
        lambda x, w, b: compat.mixed_dtype_fused_layer_norm_affine(x, w, b, (32,), 1e-5), True),
    "fused_rms_norm_affine": (lambda x, w, b: compat.fused_rms_norm_affine(x, w, (32,), 1e-5), True),
    "fused_rms_norm": (lambda x, w, b: compat.fused_rms_norm(x, (32,), 1e-5), True),
    "mixed_dtype_fused_rms_norm_affine": (
        lambda x, w, b: compat.mixed_dtype_fused_rms_norm_affine(x, w, (32,), 1e-5), True),
    "FusedLayerNorm": (lambda x, w, b: module("FusedLayerNorm", w, b)(x), True),
    "FusedRMSNorm": (lambda x, w, b: module("FusedRMSNorm", w)(x), True),
    "MixedFusedLayerNorm": (lambda x, w, b: module("MixedFusedLayerNorm", w, b)(x), True),
    "MixedFusedRMSNorm": (lambda x, w, b: module("MixedFusedRMSNorm", w)(x), True),
    "FastLayerNorm": (lambda x, w, b: module("FastLayerNorm", w, b)(x), True),
    "FusedLayerNormAffineFunction": (
        lambda x, w, b: compat.FusedLayerNormAffineFunction.apply(x, w, b, (32,), 1e-5), False),
    "FusedLayerNormFunction": (lambda x, w, b: compat.FusedLayerNormFunction.apply(x, (32,), 1e-5), False),
    "FusedLayerNormAffineMixedDtypesFunction": (
        lambda x, w, b: compat.FusedLayerNormAffineMixedDtypesFunction.apply(x, w, b, (32,), 1e-5), False),
    "FusedRMSNormAffineFunction": (lambda x, w, b: compat.FusedRMSNormAffineFunction.apply(x, w, (32,), 1e-5), False),
    "FusedRMSNormFunction": (lambda x, w, b: compat.FusedRMSNormFunction.apply(x, (32,), 1e-5), False),
    "FusedRMSNormAffineMixedDtypesFunction": (
        lambda x, w, b: compat.FusedRMSNormAffineMixedDtypesFunction.apply(x, w, (32,), 1e-5), False),
    "FastLayerNormFN": (lambda x, w, b: compat.FastLayerNormFN.apply(x, w, b, 1e-5), False),
    "manual_rms_norm": (lambda x, w, b: compat.manual_rms_norm(x, (32,), w, 1e-5), False),
}  # fmt: skip


def module(name, weight, bias=None):
    """One of compat's modules with these tensors for parameters, so that their gradients can be asked for."""
    made = getattr(compat, name)(32)
    del made.weight
    made.weight = weight
    if bias is not None:
        del made.bias
        made.bias = bias
    return made


def test_every_name_is_tried_under_autocast():
    names = {name for name, value in vars(compat).items() if getattr(value, "__module__", "") == compat.__name__}
    assert {name for name in names if not name.startswith("_")} == set(UNDER_AUTOCAST)


@on_devices("name,dtype", [(name, dtype) for name in UNDER_AUTOCAST for dtype in (bf16, fp16)])
def test_apex_autocast_leaves_float32(device, name, dtype):
    """functions and modules cast their tensors to the autocast dtype, as Apex's do; what is applied casts nothing"""
    call, casts = UNDER_AUTOCAST[name]
    torch.manual_seed(0)
    tensors = [0.3 + torch.randn(6, 32), 0.5 + torch.rand(32), torch.randn(32)]
    leaves, plain = ([t.to(device, copy=True).requires_grad_() for t in tensors] for _ in range(2))
    with torch.autocast(device, dtype=dtype):
        y = call(*leaves)
    wanted = call(*(t.to(dtype) if casts else t for t in plain))
    assert y.dtype == wanted.dtype == (dtype if casts else fp32) and same_bits(y, wanted)
    gradient = torch.randn_like(y)
    found = torch.autograd.grad(y, leaves, gradient, allow_unused=True)
    for one, other, leaf in zip(
        found, torch.autograd.grad(wanted, plain, gradient, allow_unused=True), leaves, strict=True
    ):
        assert (one is None) == (other is None)
        assert one is None or (one.dtype == leaf.dtype == fp32 and same_bits(one, other))
    with torch.autocast(device, dtype=dtype, enabled=False):
        assert call(*leaves).dtype == fp32


@on_devices()
def test_autocast_of_apex_names_leaves_what_it_should(device):
    """float64 stays float64; the core functions cast nothing; autocast of another device is not this one's"""
    x, weight = torch.randn(6, 32, device=device), torch.rand(32, device=device)
    with torch.autocast(device, dtype=bf16):
        assert compat.fused_rms_norm_affine(x.double(), weight.double(), (32,)).dtype == fp64
        assert fused_rms_norm(x, weight).dtype == fp32
        assert compat.fused_rms_norm_affine(x.to("meta"), weight.to("meta"), (32,)).dtype == fp32
    if device == "cpu":
        with torch.autocast("cuda", dtype=bf16, enabled=torch.cuda.is_available()):
            assert compat.fused_rms_norm_affine(x, weight, (32,)).dtype == fp32


@on_devices("memory_efficient", [(False,), (True,)])
def test_autocast_of_apex_names_compiled(device, memory_efficient):
    """torch.compile in one graph: the dtype and the bits of eager mode"""
    torch.compiler.reset()
    norm = compat.FusedLayerNorm(32, memory_efficient=memory_efficient).to(device)
    compiled = torch.compile(norm, backend="aot_eager", fullgraph=True)
    x = torch.randn(6, 32, device=device)
    with torch.autocast(device, dtype=bf16):
        assert compiled(x).dtype == bf16 and same_bits(compiled(x), norm(x))
