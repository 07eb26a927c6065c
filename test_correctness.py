"""Is it right? Values, gradients, properties and error messages of fused_layernorm, on every device found.

    python test_correctness.py                                      all of it, with one summary line a group
    python test_correctness.py -k "values and bf16"                 pytest's options work here too
    pytest test_correctness.py -k cuda -x                           and so does pytest itself
    FUSED_LAYERNORM_BACKEND=reference python test_correctness.py    the same without compiled kernels

The table of cases, their inputs and the judge are tests/norm_cases.py's, which all tests share: truth is the definition
in fp64 on the same (already rounded) inputs, and how far from it a result may be is a formula, `expected`. Memory that
the library allocates is filled with NaN first, and a comparison with NaN in it fails.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import re
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck

import fused_layernorm
from fused_layernorm import FusedLayerNorm, FusedRMSNorm, fused_layer_norm, fused_rms_norm, reference

sys.path.insert(0, str(Path(__file__).resolve().parent / "tests"))  # for python test_correctness.py
from fork_server import run_code  # noqa: E402
from norm_cases import (  # noqa: E402
    CPU_ELEMENTS,
    CUDA_ELEMENTS,
    HAS_CUDA,
    NEEDS_EXTENSION,
    NODE,
    OPS,
    Case,
    Inputs,
    X,
    backward_arguments,
    bf16,
    cases,
    check,
    fp16,
    fp32,
    fp64,
    fused,
    in_plain_operations,
    make_inputs,
    on_devices,
    ones,
    operator_arguments,
    poisoned,
    run,
    same_bits,
    same_to_rounding,
    through,
    torch_result,
    uses_kernels,
    with_torch,
)


@pytest.fixture(params=("node", "function"))
def route(request):
    """Through the autograd node of plain eager mode (C++), and through NormFunction.

    On the reference backend both are the same PyTorch operations.
    """
    with through(request.param):
        yield request.param


# ---- values --------------------------------------------------------------------------------------------------------

CASES = cases()
A_FEW = [  # for properties that need not see the whole table
    Case((19, 769), op=op, dtype=dtype, weight=weight)
    for op in OPS
    for dtype in (fp16, bf16, fp32, fp64)
    for weight in ((X, fp32) if dtype in (fp16, bf16) else (X,))
]


@on_devices("case", CASES)
def test_values(device, case):
    """values and gradients against fp64"""
    inputs = make_inputs(case, device)
    with poisoned():
        found = run(fused, case, inputs)
    check(case, inputs, found)


@on_devices("case", [case for case in CASES if case.core])
def test_values_through_norm_function(device, case):
    """the same through NormFunction, for a part of the table"""
    with through("function"):
        test_values(device, case)


@on_devices("case", [case for case in CASES if case.core])
def test_values_of_reference_py(device, case):
    """reference.py, the specification, against fp64"""
    options = {"normalized_ndim": len(case.normalized_shape), "eps": case.eps, "weight_offset": case.weight_offset,
               "is_rms_norm": case.op == "rms_norm", "out_dtype": case.out_dtype,
               "per_head": case.heads_ndim > 0}  # fmt: skip
    inputs = make_inputs(case, device)

    def norm(case, x, weight, bias):
        return reference.norm_forward(*operator_arguments(x, weight=weight, bias=bias, **options))[0]

    found = run(norm, case, inputs)
    check(case, inputs, found)
    forward = operator_arguments(inputs.x, weight=inputs.weight, bias=inputs.bias, **options)
    x, residual, gate, *gradients = reference.norm_backward(
        *backward_arguments(forward, inputs.grad_output, (None, None, None))
    )
    assert residual is None and gate is None
    gradients = [x, *gradients]
    for name, gradient in zip(("x", "weight", "bias"), gradients, strict=True):
        assert (gradient is not None) == (name in found)
    gradients = [gradient for gradient in gradients if gradient is not None]
    check(case, inputs, {"y": found["y"], **dict(zip(inputs.present(), gradients, strict=True))})


@on_devices("case", [replace(case, weight=X, bias=X) for case in CASES if case.core and not case.out_dtype])
def test_the_truth(device, case):
    """the checker itself: its truth is torch's, both in fp64"""
    inputs = make_inputs(replace(case, dtype=fp64), device)
    truth, torchs = run(in_plain_operations, case, inputs), run(with_torch, case, inputs)
    for name, value in truth.items():
        torch.testing.assert_close(value, torchs[name], rtol=1e-9, atol=1e-9)


WRONG_NORMS = {
    "returns its input": lambda case, x, w, b: x.to(case.y_dtype) + 0 * add_all(x, w, b).to(case.y_dtype),
    "returns zeros": lambda case, x, w, b: 0 * add_all(x, w, b).to(case.y_dtype),
    "returns NaN": lambda case, x, w, b: float("nan") * add_all(x, w, b).to(case.y_dtype),
    "forgets the weight": lambda case, x, w, b: fused(case, x, w * 0 + 1, b),
    "forgets the bias": lambda case, x, w, b: fused(case, x, w, b * 0),
    "unbiased variance": lambda case, x, w, b: fused(case, x, w * (1 - 1 / case.hidden_size) ** 0.5, b),
    "is the other norm": lambda case, x, w, b: fused(replace(case, op=another_op(case)), x, w, b),
    "grad_input is NaN": lambda case, x, w, b: fused(case, Tampered.apply(x, float("nan")), w, b),
    "grad_input is grad_output": lambda case, x, w, b: PassedOn.apply(x, fused(case, x.detach(), w, b)),
    "grad_input is 1% off": lambda case, x, w, b: fused(case, Tampered.apply(x, 1.01), w, b),
    "grad_weight is zero": lambda case, x, w, b: fused(case, x, Tampered.apply(w, 0.0), b),
    "grad_weight is 2% off": lambda case, x, w, b: fused(case, x, Tampered.apply(w, 1.02), b),
    "grad_bias is NaN": lambda case, x, w, b: fused(case, x, w, Tampered.apply(b, float("nan"))),
    "grad_bias misses a row": lambda case, x, w, b: torch.cat(
        [fused(case, x[:1], w, b.detach()), fused(case, x[1:], w, b)]
    ),
}


def another_op(case):
    return "layer_norm" if case.op == "rms_norm" else "rms_norm"


def add_all(x, weight, bias):
    return x + weight.sum() + bias.sum()


class Tampered(torch.autograd.Function):
    """The identity, but its gradient is multiplied."""

    @staticmethod
    def forward(ctx, t, factor):
        ctx.factor = factor
        return t.view_as(t)

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output * ctx.factor, None


class PassedOn(torch.autograd.Function):
    """y, whose gradient goes to x as it is."""

    @staticmethod
    def forward(ctx, x, y):
        return y.clone()

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output, grad_output


TOO_SUBTLE_FOR_16_BITS = {"unbiased variance"}


@on_devices("case,wrong", [
    (case, wrong) for case in A_FEW if case.weight is X for wrong in WRONG_NORMS
    if case.dtype in (fp32, fp64) or wrong not in TOO_SUBTLE_FOR_16_BITS
])  # fmt: skip
def test_the_checker_rejects_wrong_norms(device, case, wrong):
    """the checker itself: norms that are wrong are rejected"""
    inputs = make_inputs(case, device)
    with pytest.raises(AssertionError, match="wrong; the worst"):
        check(case, inputs, run(WRONG_NORMS[wrong], case, inputs))


@on_devices("case", [Case((4, 4096), op="layer_norm", values=values) for values in ("mean_1e3", "first_is_outlier")])
def test_the_checker_rejects_a_cancelling_variance(device, case):
    """the checker itself: norms that are wrong are rejected"""

    def careless(case, x, weight, bias):  # E[x^2] - E[x]^2; with a shift by the first element, for the outlier
        shift = x[:, :1].detach() if case.values == "first_is_outlier" else 0.0
        mean = (x - shift).mean(1, keepdim=True)
        variance = (x - shift).square().mean(1, keepdim=True) - mean**2
        return (x - shift - mean) * (variance.clamp_min(0) + case.eps).rsqrt() * weight + bias

    inputs = make_inputs(case, device)
    with pytest.raises(AssertionError, match="wrong; the worst"):
        check(case, inputs, run(careless, case, inputs))


@on_devices("dtype", (fp16, bf16, fp32, fp64))
def test_the_poison_works(device, dtype):
    """the checker itself: memory not yet written holds NaN"""
    with poisoned():
        assert torch.empty(1000, dtype=dtype, device=device).isnan().all()
        assert torch.empty(1000, dtype=torch.uint8, device=device).min() == 255
    assert not torch.are_deterministic_algorithms_enabled()


@on_devices("values,hidden_size", [("mean_1e4", 1024), ("mean_1e4", 4099), ("mean_1e3", 65536)])
def test_large_mean_is_ten_times_more_exact_than_torch(device, values, hidden_size):
    """fp32, |mean| >> sigma: ten times closer to the truth than torch"""
    case = Case((64, hidden_size), values=values, weight=None, bias=None)
    inputs = make_inputs(case, device)
    truth = with_torch(case, inputs.x.double(), None, None)
    ours = (fused(case, inputs.x, None, None).double() - truth).abs().max().item()
    torchs = (with_torch(case, inputs.x, None, None).double() - truth).abs().max().item()
    assert ours <= 0.1 * torchs, f"error {ours:.3g}, torch's {torchs:.3g}"


@on_devices("dtype", [fp16, bf16, fp32, fp64])
@pytest.mark.parametrize("hidden_size", [7, 105, 769, 2008, 4097, 12345, 16384, 40000, 65536, 262144, 300000, 300001])
def test_equal_numbers_have_variance_0(device, dtype, hidden_size):
    """rows of equal numbers far from 0, eps of 1e-12: y is the bias, grad_x is 1e6 times the centered grad_output"""
    values = torch.tensor([-9984.0, 0.3, 1e6 if dtype in (fp32, fp64) else 1e3], dtype=dtype, device=device)
    x = values[:, None].expand(3, hidden_size).contiguous().requires_grad_()
    bias = torch.linspace(-1, 1, hidden_size, device=device).to(dtype)
    y = fused_layer_norm(x, None, bias, eps=1e-12)
    assert torch.equal(y, bias.expand_as(y))
    dy = 2.0**-20 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=fp64).to(device, dtype)
    wanted = 1e6 * (dy.double() - dy.double().mean(1, keepdim=True))
    (grad_x,) = torch.autograd.grad(y, x, dy)
    # The result's unit, and `few` units of the accumulation type for the sums and rstd, as in `expected`
    few = 4 + hidden_size.bit_length() / 2
    limit = torch.finfo(dtype).eps + few * (8 * torch.finfo(fp64).eps if dtype == fp64 else torch.finfo(fp32).eps)
    assert (grad_x.double() - wanted).abs().max() <= limit * wanted.abs().max()


@on_devices("case", [replace(case, shape=shape) for case in A_FEW for shape in ((5, 64), (131, 520))])
def test_each_input_alone_requires_grad(device, case, route):
    """each subset of inputs requiring grad: right, and nothing else computed"""
    inputs = make_inputs(case, device)
    everything = run(fused, case, inputs)
    for wants in (("x",), ("weight",), ("bias",), ("x", "weight"), ("x", "bias"), ("weight", "bias")):
        with poisoned():
            found = run(fused, case, inputs, wants)
        assert same_bits(found["y"], everything["y"])
        check(case, inputs, found, ("y", *wants))
        leaves = {name: getattr(inputs, name).detach().requires_grad_(name in wants) for name in inputs.present()}
        fused(case, *leaves.values()).backward(inputs.grad_output)
        for name, leaf in leaves.items():
            assert (leaf.grad is not None) == (name in wants)
            assert leaf.grad is None or same_bits(leaf.grad, found[name])


@on_devices("op,dtype", [(op, dtype) for op in OPS for dtype in (bf16, fp32)])
def test_inf_and_nan_rows(device, op, dtype):
    """rows with inf or NaN: non-finite where torch's are, other rows untouched"""
    case = Case((7, 100), op=op, dtype=dtype)
    inputs = make_inputs(case, device)
    clean = run(fused, case, inputs)
    bad_rows = {1: float("nan"), 3: float("inf"), 5: -float("inf")}
    for row, value in bad_rows.items():
        inputs.x[row, 17 * row] = value
    found, torchs = run(fused, case, inputs), torch_result(case, inputs)
    for name in ("y", "x"):
        for kind in (torch.isnan, torch.isposinf, torch.isneginf):
            assert torch.equal(kind(found[name]), kind(torchs[name])), f"{kind.__name__} of {name}"
        for row in set(range(7)) - set(bad_rows):
            assert same_bits(found[name][row], clean[name][row])
    assert found["weight"].isnan().all() and same_bits(found["bias"], clean["bias"])


# ---- autograd ------------------------------------------------------------------------------------------------------

GRADCHECK_CASES = [
    Case((3, 5), dtype=fp64, op=op, **options)
    for op in OPS
    for options in (
        {}, {"bias": None}, {"weight": None}, {"weight": None, "bias": None}, {"weight_offset": 1.0},
        {"normalized_ndim": 2}, {"layout": "columns"}, {"layout": "transposed"}, {"eps": 0.1},
    )
]  # fmt: skip


@on_devices("case", GRADCHECK_CASES)
def test_gradcheck(device, case, route):
    """gradcheck and gradgradcheck in fp64"""
    inputs = make_inputs(case, device)
    tensors = [getattr(inputs, name).detach().requires_grad_() for name in inputs.present()]

    def norm(*tensors):
        return fused(case, **{"weight": None, "bias": None, **dict(zip(inputs.present(), tensors, strict=True))})

    assert gradcheck(norm, tensors, fast_mode=False)
    assert gradgradcheck(norm, tensors, gen_non_contig_grad_outputs=True)


@on_devices("op,wants", [(op, wants) for op in OPS for wants in (("x", "weight", "bias"), ("x",), ("weight",))])
def test_second_order(device, op, wants, route):
    """second-order gradients (create_graph) in fp32 as torch's in fp64"""
    case = Case((6, 50), op=op)
    inputs = make_inputs(case, device)

    def second_order(norm, dtype):
        tensors = {name: getattr(inputs, name).detach().to(dtype).requires_grad_(name in wants)
                   for name in inputs.present()}  # fmt: skip
        leaves = [tensors[name] for name in wants]
        dy = inputs.grad_output.detach().to(dtype).requires_grad_()
        y = norm(case, tensors["x"], tensors["weight"], tensors["bias"])
        first = torch.autograd.grad(y, leaves, dy, create_graph=True)
        penalty = sum(gradient.square().sum() for gradient in first)
        return torch.autograd.grad(penalty, [*leaves, dy], allow_unused=True)

    for ours, truth in zip(second_order(fused, fp32), second_order(with_torch, fp64), strict=True):
        assert (ours is None) == (truth is None) or not ours.any()
        if truth is not None and ours is not None:
            assert ours.dtype == fp32
            torch.testing.assert_close(ours.double(), truth, rtol=1e-4, atol=1e-5 * truth.abs().max().item())


@on_devices("op", OPS)
def test_inside_a_graph(device, op, route):
    """inputs that are not leaves, accumulation into .grad, two uses of one weight"""
    case = Case((6, 50), op=op)
    inputs = make_inputs(case, device)

    def gradients(norm, dtype):
        x, weight, bias = (t.detach().to(dtype).requires_grad_() for t in (inputs.x, inputs.weight, inputs.bias))
        for _ in range(2):  # the second backward adds to .grad
            hidden = norm(case, x * 2, weight.exp(), bias)
            norm(case, hidden.sin(), weight.exp(), bias).square().sum().backward()
        return [x.grad, weight.grad, bias.grad]

    for ours, truth in zip(gradients(fused, fp32), gradients(with_torch, fp64), strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=1e-4, atol=1e-5 * truth.abs().max().item())


@on_devices("op,name", [(op, name) for op in OPS for name in ("x", "weight")])
def test_saved_tensor_changed_in_place(device, op, name, route):
    """an input changed in place before backward: an error as torch's, never a wrong gradient"""
    case = Case((6, 50), op=op)
    inputs = make_inputs(case, device)
    tensors = {name: getattr(inputs, name).clone().requires_grad_() for name in inputs.present()}
    y = fused(case, **tensors)
    with torch.no_grad():
        tensors[name].mul_(2)
    try:
        y.backward(inputs.grad_output)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:  # PyTorch operations keep copies of some inputs, and may answer
        assert not uses_kernels(device)
        check(case, inputs, {"y": y.detach(), **{name: t.grad for name, t in tensors.items()}})


@on_devices("op", OPS)
def test_backward_twice(device, op, route):
    """backward twice: right with retain_graph, an error without"""
    inputs = make_inputs(Case((6, 50), op=op), device)
    x = inputs.x.requires_grad_()
    y = OPS[op](x, inputs.weight, inputs.bias)
    first, second = (torch.autograd.grad(y, x, inputs.grad_output, retain_graph=True)[0] for _ in range(2))
    assert same_bits(first, second)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()


@on_devices("case", A_FEW)
def test_without_gradients(device, case, route):
    """no_grad, inference_mode and frozen inputs: the same bits, no graph"""
    inputs = make_inputs(case, device)
    y = run(fused, case, inputs)["y"]
    x = inputs.x.detach().requires_grad_()
    with poisoned():
        with torch.no_grad():
            without = fused(case, x, inputs.weight, inputs.bias)
        with torch.inference_mode():
            inference = fused(case, x, inputs.weight, inputs.bias)
            from_inference_tensor = fused(case, inputs.x.clone(), inputs.weight, inputs.bias)
        frozen = fused(case, x.detach(), inputs.weight, inputs.bias)
    for found in (without, inference, from_inference_tensor, frozen):
        assert same_bits(found, y) and not found.requires_grad and found.grad_fn is None
    assert inference.is_inference() and not without.is_inference()
    with torch.no_grad():  # an inference tensor outside inference_mode
        assert same_bits(fused(case, inference, None, None), fused(case, y, None, None))


@on_devices("op,what", [(op, what) for op in OPS for what in ("hooks", "save_on_cpu", "checkpoint", "reentrant")])
def test_saved_tensors_hooks(device, op, what, route):
    """saved-tensor hooks and activation checkpointing: the same gradients"""
    case = Case((9, 40), op=op)
    inputs = make_inputs(case, device)
    packed = []

    def through_hooks(case, *tensors):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t.clone(), lambda t: t.clone()):
            return fused(case, *tensors)

    def saved_on_cpu(case, *tensors):
        with torch.autograd.graph.save_on_cpu():
            return fused(case, *tensors)

    def checkpointed(case, *tensors):
        from torch.utils.checkpoint import checkpoint

        return checkpoint(fused, case, *tensors, use_reentrant=what == "reentrant")

    wrapped = {"hooks": through_hooks, "save_on_cpu": saved_on_cpu}.get(what, checkpointed)
    plain, found = run(fused, case, inputs), run_backward(wrapped, case, inputs)
    for name, value in plain.items():
        assert same_bits(value, found[name]), name
    assert not uses_kernels(device) or len(packed) == (3 if what == "hooks" else 0)  # x, weight, the statistics


def run_backward(norm, case, inputs):
    """As `run`, by .backward()."""
    tensors = {name: getattr(inputs, name).detach().requires_grad_() for name in inputs.present()}
    y = norm(case, tensors["x"], tensors.get("weight"), tensors.get("bias"))
    y.backward(inputs.grad_output)
    return {"y": y.detach(), **{name: t.grad for name, t in tensors.items()}}


@on_devices("op", OPS)
def test_hooks_on_the_graph(device, op, route):
    """hooks on tensors and on grad_fn, retain_grad, the name of the node"""
    inputs = make_inputs(Case((6, 50), op=op), device)
    x = inputs.x.requires_grad_()
    y = OPS[op](x, inputs.weight.requires_grad_(), inputs.bias)
    seen = []
    y.retain_grad()
    y.register_hook(lambda gradient: seen.append("tensor") or 2 * gradient)
    y.grad_fn.register_prehook(lambda outputs: seen.append("before"))
    y.grad_fn.register_hook(lambda inputs, outputs: seen.append("after"))
    y.backward(inputs.grad_output)
    assert seen == ["tensor", "before", "after"]
    assert same_bits(y.grad, 2 * inputs.grad_output)
    expected = torch.autograd.grad(OPS[op](x, inputs.weight, inputs.bias), x, 2 * inputs.grad_output)[0]
    assert same_bits(x.grad, expected)
    if uses_kernels(device):
        name = {"node": NODE, "function": "NormFunctionBackward"}[route]
        assert y.grad_fn.name() == type(y.grad_fn).__name__ == name
        edges = [False, True, True, False, True] if name == "FusedNormBackward" else [False, False, True]  # not all
        assert [edge[0] is None for edge in y.grad_fn.next_functions[: len(edges)]] == edges


@on_devices("op", OPS)
def test_anomaly_mode(device, op, route):
    """anomaly mode names the node that made a NaN and prints where its forward was called"""
    x = torch.randn(3, 8, device=device, requires_grad=True)
    with torch.autograd.set_detect_anomaly(True):
        y = OPS[op](x, normalized_shape=8)
        with pytest.warns(UserWarning, match="(?s)forward call.*test_correctness.py"):
            with pytest.raises(RuntimeError, match="returned nan values"):
                y.backward(torch.full_like(y, float("nan")))


class Silent(torch.autograd.Function):
    """The identity, but no gradient comes back."""

    @staticmethod
    def forward(ctx, t):
        return t.clone()

    @staticmethod
    def backward(ctx, grad_output):
        return None


@on_devices("op", OPS)
def test_no_gradient_arrives(device, op, route):
    """no gradient from above: none is passed on, as torch"""
    x = torch.randn(3, 8, device=device, requires_grad=True)
    Silent.apply(OPS[op](x, normalized_shape=8)).sum().backward()
    assert x.grad is None


@on_devices("op", OPS)
def test_inputs_and_result_in_place(device, op, route):
    """x a view, x and y changed in place before and after: gradients as torch's"""
    case = Case((6, 50), op=op)
    inputs = make_inputs(case, device)

    def gradients(norm, dtype):
        base, weight, bias = (t.detach().to(dtype).requires_grad_() for t in (inputs.x, inputs.weight, inputs.bias))
        hidden = torch.cat([base, base.sin()])
        hidden[2:4].mul_(3)
        x = hidden.view(2, 6, 50)[1]
        x.add_(1)
        y = norm(case, x, weight, bias)
        y.mul_(2)
        y[1].zero_()
        y.backward(inputs.grad_output.to(dtype))
        return [base.grad, weight.grad, bias.grad]

    for ours, truth in zip(gradients(fused, fp32), gradients(with_torch, fp64), strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=1e-4, atol=1e-5 * truth.abs().max().item())


@on_devices("op", OPS)
def test_inference_tensor_in_a_graph(device, op, route):
    """an inference tensor that backward would need: torch's error"""
    if not uses_kernels(device):
        pytest.skip("PyTorch operations save other tensors")
    with torch.inference_mode():
        x = torch.randn(3, 8, device=device)
    weight = torch.ones(8, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        OPS[op](x, weight)


@on_devices("op", OPS)
def test_batched_gradients(device, op, route):
    """is_grads_batched: as one gradient at a time"""
    inputs = make_inputs(Case((6, 50), op=op), device)
    leaves = [t.requires_grad_() for t in (inputs.x, inputs.weight, inputs.bias)]
    y = OPS[op](*leaves)
    batch = torch.randn(4, *y.shape, device=device)
    found = torch.autograd.grad(y, leaves, batch, retain_graph=True, is_grads_batched=True)
    for i, one in enumerate(batch):
        for ours, truth in zip(found, torch.autograd.grad(y, leaves, one, retain_graph=True), strict=True):
            torch.testing.assert_close(ours[i], truth, rtol=1e-4, atol=1e-4)


@on_devices("op", OPS)
@pytest.mark.filterwarnings("ignore:.*torch.jit")  # torch's own decompositions
def test_forward_mode_through_backward(device, op, route):
    """a tangent on grad_output comes out of backward"""
    inputs = make_inputs(Case((6, 50), op=op), device)
    x = inputs.x.requires_grad_()
    y = OPS[op](x, inputs.weight, inputs.bias)
    tangent = torch.randn_like(y)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(inputs.grad_output, tangent)
        gradient = torch.autograd.grad(y, x, dual, retain_graph=True)[0]
        found = torch.autograd.forward_ad.unpack_dual(gradient).tangent
    truth = torch.autograd.grad(y, x, tangent)[0]  # backward is linear in grad_output
    torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-5)


@on_devices("op", OPS)
def test_saved_tensors_are_released(device, op, route):
    """backward lets go of what it saved, and so does the end of the graph"""
    weight = torch.ones(8, device=device, requires_grad=True)

    def hidden_input():
        x = torch.randn(3, 8, device=device).requires_grad_() * 2
        return x, OPS[op](x, weight), weakref.ref(x)

    x, y, reference_to_x = hidden_input()
    del x
    gc.collect()
    kept = reference_to_x() is not None  # PyTorch operations may save x itself or not
    assert kept or not uses_kernels(device)
    y.sum().backward()
    gc.collect()
    assert reference_to_x() is None
    x, y, reference_to_x = hidden_input()
    del x, y
    gc.collect()
    assert reference_to_x() is None


@on_devices("op", ["layer_norm"], devices=("cpu",))  # the node is one for both
def test_a_deep_graph_is_freed(device, op, route):
    """a chain of 30,000 norms: freed without a stack overflow"""
    y = torch.randn(2, requires_grad=True)
    for _ in range(30_000):
        y = OPS[op](y, normalized_shape=2)
    del y


@on_devices("op", OPS)
def test_backward_in_many_threads(device, op, route):
    """one graph, backward from several threads at once: the same bits"""
    inputs = make_inputs(Case((6, 50), op=op), device)
    leaves = [t.requires_grad_() for t in (inputs.x, inputs.weight, inputs.bias)]
    y = OPS[op](*leaves)

    def gradients(_):
        return torch.autograd.grad(y, leaves, inputs.grad_output, retain_graph=True)

    expected = gradients(None)
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(gradients, range(200)):
            assert all(same_bits(ours, truth) for ours, truth in zip(found, expected, strict=True))


# ---- the same bits -------------------------------------------------------------------------------------------------

BITWISE_SHAPES = ((3, 64), (4096, 64), (199, 769), (512, 1024), (4097, 200), (61, 4096), (5, 150528), (2, 262144))


@on_devices("op,dtype,shape", [(op, dtype, s) for op in OPS for dtype in (bf16, fp32) for s in BITWISE_SHAPES])
def test_two_runs_give_the_same_bits(device, op, dtype, shape):
    """two runs: the same bits in y and every gradient"""
    case = Case(shape, op=op, dtype=dtype)
    inputs = make_inputs(case, device)
    first = run(fused, case, inputs)
    with poisoned():
        for _ in range(3):
            again = run(fused, case, inputs)
            for name, value in first.items():
                assert same_bits(value, again[name]), name


BATCHES = (1, 2, 31, 199, 4096, 20000)


@on_devices("op,dtype,hidden_size", [
    (op, dtype, n) for op in OPS for dtype in (bf16, fp32)
    for n in (1, 64, 96, 128, 160, 257, 384, 768, 1024, 1152, 4096, 6144, 12288, 12345, 24576, 65536, 150528, 262144,
              524288)
])  # fmt: skip
def test_a_row_does_not_depend_on_its_batch(device, op, dtype, hidden_size):
    """a row alone and in batches of many sizes: the same bits in y and grad_input"""
    if not uses_kernels(device):
        pytest.skip("a promise of the compiled kernels: PyTorch's sums depend on the number of rows")
    limit = CPU_ELEMENTS if device == "cpu" else CUDA_ELEMENTS
    case = Case((max(b for b in BATCHES if b == 1 or b * hidden_size <= limit), hidden_size), op=op, dtype=dtype)
    inputs = make_inputs(case, device)

    def part(rows):
        return Inputs(inputs.x[rows], inputs.weight, inputs.bias, inputs.grad_output[rows])

    alone = run(fused, case, part(slice(0, 1)))
    for batch in BATCHES:
        if batch > case.rows:
            break
        for wants in (("x", "weight", "bias"), ("x",)):
            found = run(fused, case, part(slice(0, batch)), wants)
            for name in ("y", "x"):
                assert same_bits(found[name][:1], alone[name]), f"{name} in a batch of {batch}, wanting {wants}"
    last = run(fused, case, part(slice(case.rows - 1, case.rows)))
    everything = run(fused, case, inputs)
    for name in ("y", "x"):
        assert same_bits(everything[name][-1:], last[name]), f"{name}, last row of {case.rows}"


@on_devices(
    "op,dtype,hidden_size",
    [(op, dtype, n) for op in OPS for dtype in (bf16, fp32) for n in (64, 1024, 1152, 2560, 4096, 6144, 16384)],
)
def test_options_do_not_depend_on_the_batch(device, op, dtype, hidden_size):
    """weight_offset, out_dtype, no bias, no weight: the same bits in few rows, of other kernels, and many"""
    if not uses_kernels(device):
        pytest.skip("a promise of the compiled kernels: PyTorch's sums depend on the number of rows")
    rows = (CPU_ELEMENTS if device == "cpu" else CUDA_ELEMENTS) // hidden_size
    for options in (
        {"weight_offset": 1.0},
        {"bias": None},
        {"bias": None, "layout": "aligned_columns"},
        {"out_dtype": fp32},
        {"out_dtype": fp32, "weight_offset": -0.5},
        {"weight": None},
    ):
        case = Case((rows, hidden_size), op=op, dtype=dtype, **options)
        inputs = make_inputs(case, device)
        first = Inputs(inputs.x[:3], inputs.weight, inputs.bias, inputs.grad_output[:3])
        many, few = run(fused, case, inputs), run(fused, case, first)
        check(replace(case, shape=(3, hidden_size)), first, few)
        for name in ("y", "x"):
            assert same_bits(few[name], many[name][:3]), f"{name}, {options}"


@on_devices("op,dtype,hidden_size", [
    (op, dtype, n) for op in OPS for dtype in (bf16, fp32) for n in (33, 34, 64, 258, 1026, 4097, 4098, 12346, 20001)
])  # fmt: skip
def test_a_row_does_not_depend_on_its_address(device, op, dtype, hidden_size):
    """rows as they are, one element further on, and each in memory of its own: right, and the same bits in y"""
    if not uses_kernels(device):
        pytest.skip("a promise of the compiled kernels")
    case = Case((7, hidden_size), op=op, dtype=dtype)
    inputs = make_inputs(case, device)
    found = run(fused, case, inputs)
    check(case, inputs, found)

    def norm(x):
        return fused(case, x, inputs.weight, inputs.bias)

    x = inputs.x
    shifted = torch.empty(x.numel() + 1, dtype=dtype, device=device)[1:].view_as(x).copy_(x)
    assert same_bits(norm(shifted), found["y"])
    assert same_bits(torch.cat([norm(row.clone()) for row in x.split(1)]), found["y"])


# ---- options and surroundings --------------------------------------------------------------------------------------


@on_devices("op", OPS)
def test_normalized_shape(device, op, route):
    """normalized_shape: an int, a tuple, a list or a torch.Size, or that of the weight or bias"""
    inputs = make_inputs(Case((4, 6, 10), op=op, normalized_ndim=2), device)
    x, weight, bias = inputs.x, inputs.weight, inputs.bias
    y = OPS[op](x, weight, bias, 1e-5)
    for shape in ((6, 10), [6, 10], torch.Size((6, 10))):
        assert same_bits(OPS[op](x, weight, bias, 1e-5, normalized_shape=shape), y)
    # On CUDA a LayerNorm without weight has another kernel
    is_same = same_to_rounding if device == "cuda" and op == "layer_norm" else same_bits
    assert is_same(OPS[op](x, None, bias, 1e-5), OPS[op](x, torch.ones_like(bias), bias, 1e-5))
    last = OPS[op](x, eps=1e-5, normalized_shape=10)
    assert same_bits(last, OPS[op](x, eps=1e-5, normalized_shape=(10,)))
    assert same_bits(last, OPS[op](x.reshape(24, 10), eps=1e-5, normalized_shape=10).reshape(x.shape))


@on_devices("op", OPS)
def test_result_is_new_and_contiguous(device, op):
    """y is contiguous new memory, and the inputs are left alone"""
    case = Case((9, 40), op=op, layout="transposed", grad_layout="transposed")
    inputs = make_inputs(case, device)
    before = copy.deepcopy(inputs)
    found = run(fused, case, inputs)
    assert found["y"].is_contiguous() and found["y"].data_ptr() != inputs.x.data_ptr()
    for name, value in vars(inputs).items():
        assert torch.equal(value, getattr(before, name))


@on_devices("dtype", (fp16, bf16, fp32, fp64))
def test_rms_norm_without_eps(device, dtype, route):
    """rms_norm with eps=None: torch's eps, also for tiny inputs"""
    for scale in (1.0, 1e-3, 1e-4, 1e-5, 0.0):
        x = (scale * torch.randn(5, 96, generator=torch.Generator().manual_seed(0))).to(device, dtype)
        ours, torchs = fused_rms_norm(x, normalized_shape=96), F.rms_norm(x, (96,))
        torch.testing.assert_close(ours, torchs, rtol=2 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).tiny)


@on_devices("op,dtype", [(op, dtype) for op in OPS for dtype in (bf16, fp32)])
def test_autocast(device, op, dtype, route):
    """autocast changes neither the dtype nor the bits"""
    case = Case((9, 96), op=op, dtype=dtype, weight=fp32, bias=fp32)
    inputs = make_inputs(case, device)
    plain = run(fused, case, inputs)
    with torch.autocast(device, dtype=bf16):
        found = run(fused, case, inputs)
    for name, value in plain.items():
        assert same_bits(found[name], value), name
    with torch.autocast(device, dtype=bf16):  # the usual place: between two linear layers
        x = torch.nn.functional.linear(inputs.x, torch.eye(96, device=device, dtype=dtype))
        assert x.dtype == bf16
        assert fused(case, x, inputs.weight, inputs.bias).dtype == bf16


@on_devices("op", OPS)
def test_compile_smoke(device, op):
    """torch.compile (backend eager): the same values and gradients"""
    case = Case((9, 96), op=op)
    inputs = make_inputs(case, device)
    compiled = torch.compile(lambda x, weight, bias: fused(case, x, weight, bias) * 1, backend="eager", fullgraph=True)
    check(case, inputs, run(lambda case, *tensors: compiled(*tensors), case, inputs))


@on_devices("op", OPS)
def test_lazy_negation_and_zeros(device, op, route):
    """tensors that say negated or all zero without holding such data"""
    case = Case((9, 96), op=op)
    inputs = make_inputs(case, device)
    weight = torch._neg_view(inputs.weight)
    y = fused(case, torch._neg_view(inputs.x), weight, inputs.bias)
    assert same_bits(y, fused(case, -inputs.x, -inputs.weight, inputs.bias))
    zeros = torch._efficientzerotensor((9, 96), device=device)
    assert same_bits(fused(case, zeros, weight, inputs.bias), inputs.bias.expand(9, 96))


@on_devices("op", OPS, devices=("cpu",))
def test_unusual_types_of_arguments(device, op):
    """numbers and sizes that are not Python's own: as Python's"""
    numpy = pytest.importorskip("numpy")
    x, weight = torch.randn(3, 8), torch.randn(8, requires_grad=True)
    y = OPS[op](x, weight, None, 0.5, normalized_shape=8, weight_offset=1.0)
    for eps in (numpy.float64(0.5), numpy.float32(0.5), torch.tensor(0.5)):
        for shape in (
            [numpy.int64(8)],
            numpy.int64(8),
            numpy.array([8]),
            torch.tensor(8),
            (True * 8,),
            torch.Size([8]),
        ):
            for weight_offset in (1, numpy.float32(1)):
                found = OPS[op](x, weight, None, eps, normalized_shape=shape, weight_offset=weight_offset)
                torch.testing.assert_close(found, y, rtol=1e-6, atol=1e-6)
                assert found.requires_grad


class Logged(torch.Tensor):
    """A subclass without a __torch_dispatch__."""


@on_devices("op", OPS, devices=("cpu",))
def test_freed_memory(device, op):
    """a tensor whose storage was freed is an error, and neither a missing weight nor a crash"""
    if not uses_kernels(device):
        pytest.skip("PyTorch's operations")
    for freed in ("x", "weight", "grad_output"):
        given = {"x": torch.randn(3, 8, requires_grad=True), "weight": torch.ones(8), "grad_output": torch.randn(3, 8)}
        y = OPS[op](given["x"], given["weight"])
        with torch.no_grad():
            given[freed].untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match=f"{freed} has no memory"):
            if freed == "grad_output":
                y.backward(given[freed])
            else:
                OPS[op](given["x"], given["weight"])


@on_devices("op", OPS, devices=("cpu",))
@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:Converting a tensor to a Python bool")
def test_what_must_be_pytorch_operations(device, op):
    """subclasses, transforms, forward-mode AD and traces see PyTorch operations; dispatch modes see a call"""
    from torch.utils._python_dispatch import TorchDispatchMode

    x, weight = torch.randn(3, 8, dtype=fp64), torch.randn(8, dtype=fp64)
    norm, torchs = OPS[op], {"layer_norm": F.layer_norm, "rms_norm": F.rms_norm}[op]

    def same(ours, truth):
        torch.testing.assert_close(ours, truth, rtol=1e-9, atol=1e-9)

    y = torchs(x, (8,), weight, eps=1e-5)
    assert type(norm(x.as_subclass(Logged), weight)) is Logged
    assert type(norm(x, weight.as_subclass(Logged))) is Logged

    class Mode(TorchDispatchMode):
        operations = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.operations += 1
            return function(*args, **(kwargs or {}))

    with Mode() as mode:
        same(norm(x, weight, None, 1e-5), y)
    assert mode.operations

    def loss(function):
        return lambda x, weight: function(x, weight).sin().sum()

    ours = loss(lambda x, weight: norm(x, weight, None, 1e-5))
    truth = loss(lambda x, weight: torchs(x, (8,), weight, eps=1e-5))
    same(torch.func.grad(ours, argnums=(0, 1))(x, weight), torch.func.grad(truth, argnums=(0, 1))(x, weight))
    same(torch.func.vmap(lambda x: norm(x, weight, None, 1e-5))(x), y)
    same(torch.func.jvp(lambda x: norm(x, weight, None, 1e-5), (x,), (x.cos(),)),
         torch.func.jvp(lambda x: torchs(x, (8,), weight, eps=1e-5), (x,), (x.cos(),)))  # fmt: skip
    same(torch.func.hessian(ours)(x, weight), torch.func.hessian(truth)(x, weight))
    with torch.no_grad():  # a trace must hold the norm, not its result
        traced = torch.jit.trace(lambda x: norm(x, weight, None, 1e-5), x)
    same(traced(2 * x + 1), torchs(2 * x + 1, (8,), weight, eps=1e-5))


@on_devices("case", [Case((6, 50), op=op, weight=weight) for op in OPS for weight in (X, None)], devices=("cpu",))
def test_compiled_autograd(device, case, route):
    """compiled autograd (backend aot_eager), in one graph: the same gradients"""
    inputs = make_inputs(case, device)
    plain = run_backward(fused, case, inputs)
    torch.compiler.reset()
    # one graph each, found again by its key
    for wants in (("x", "weight", "bias"), ("x",) if case.weight else ("bias",)):
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
            found = run(lambda *arguments: fused(*arguments) * 1, case, inputs, wants)
        for name, value in found.items():
            torch.testing.assert_close(value, plain[name])


@NEEDS_EXTENSION
@on_devices("op", OPS, devices=("cpu",))
def test_profiler(device, op):
    """a profile shows the call and its backward"""
    if not uses_kernels(device):
        pytest.skip("PyTorch operations have names of their own")
    x = torch.randn(3, 8, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        OPS[op](x, normalized_shape=8).backward(torch.ones(3, 8))
    numbers = {event.name: event.sequence_nr for event in profile.events()}
    assert numbers[f"fused_{op}"] == numbers["FusedNormBackward"]


MODULES = {
    "layer_norm": (FusedLayerNorm, torch.nn.LayerNorm, [
        {}, {"bias": False}, {"elementwise_affine": False}, {"eps": 1e-3}, {"dtype": torch.bfloat16}]),
    "rms_norm": (FusedRMSNorm, torch.nn.RMSNorm, [
        {}, {"elementwise_affine": False}, {"eps": 1e-3}, {"dtype": torch.bfloat16}]),
}  # fmt: skip


@on_devices("op,shape", [(op, shape) for op in OPS for shape in (24, (4, 6))])
def test_modules(device, op, shape):
    """modules: constructor, init, repr, state_dict, deepcopy and pickle as torch.nn's"""
    ours_class, torch_class, variants = MODULES[op]
    assert issubclass(ours_class, torch_class)
    for options in variants:
        ours, torchs = ours_class(shape, device=device, **options), torch_class(shape, device=device, **options)
        assert repr(ours) == repr(torchs).replace(torch_class.__name__, ours_class.__name__)
        assert list(ours.state_dict()) == list(torchs.state_dict())
        for name, parameter in ours.state_dict().items():
            assert same_bits(parameter, torchs.state_dict()[name]), f"{name} is initialized otherwise"
            parameter.normal_()
        torchs.load_state_dict(ours.state_dict(), strict=True)
        x = torch.randn(5, 4, 6, device=device).to(options.get("dtype", fp32))
        x = x.flatten(1) if shape == 24 else x
        y = ours(x)
        eps = torch.finfo(y.dtype).eps
        torch.testing.assert_close(y, torchs(x), rtol=2 * eps, atol=16 * torch.finfo(fp32).eps)
        restored = ours_class(shape, device=device, **options)
        restored.load_state_dict(torchs.state_dict(), strict=True)
        for twin in (restored, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), through_a_file(ours)):
            assert type(twin) is ours_class and same_bits(twin(x), y)
        torchs.reset_parameters()
        ours.reset_parameters()
        assert all(same_bits(t, torchs.state_dict()[name]) for name, t in ours.state_dict().items())
        ours.to("meta")  # and back: the materialization of models built on the meta device
        assert ours.to_empty(device=device)(x).shape == x.shape


def through_a_file(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@on_devices("op", OPS, devices=("cpu",))
def test_meta_tensors(device, op):
    """meta and fake tensors: shape and dtype without data, forward and backward"""
    x = torch.empty(5, 8, dtype=bf16, device="meta", requires_grad=True)
    weight = torch.empty(8, dtype=fp32, device="meta", requires_grad=True)
    for out_dtype in (None, fp32):
        y = OPS[op](x, weight, out_dtype=out_dtype)
        assert y.device.type == "meta" and y.shape == (5, 8) and y.dtype == (out_dtype or bf16)
        gradients = torch.autograd.grad(y, (x, weight), torch.empty_like(y))
        for gradient, leaf in zip(gradients, (x, weight), strict=True):
            assert gradient.device.type == "meta" and gradient.shape == leaf.shape and gradient.dtype == leaf.dtype
    with torch._subclasses.FakeTensorMode():
        y = OPS[op](torch.empty(5, 8), torch.empty(8))
    assert type(y).__name__ == "FakeTensor" and y.shape == (5, 8)


@on_devices("op", OPS)
def test_hidden_size_zero(device, op, route):
    """a hidden size of 0: an empty result, as torch"""
    torch_function = {"layer_norm": F.layer_norm, "rms_norm": F.rms_norm}[op]
    x, weight = torch.randn(3, 0, device=device, requires_grad=True), torch.ones(0, device=device, requires_grad=True)
    y, torchs = OPS[op](x, weight), torch_function(x, (0,), weight)
    assert y.shape == torchs.shape == (3, 0) and y.dtype == torchs.dtype
    for gradient, leaf in zip(torch.autograd.grad(y, (x, weight), torch.ones_like(y)), (x, weight), strict=True):
        assert gradient.shape == leaf.shape


# ---- bad input -----------------------------------------------------------------------------------------------------


class NoData(torch.Tensor):
    """A tensor subclass without memory behind it, whose operations are not defined."""

    @staticmethod
    def __new__(cls, *shape):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=fp32)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return NotImplemented


SHAPE_ERROR, TYPE_ERROR, VALUE_ERROR = RuntimeError, TypeError, ValueError
BAD_CALLS = {  # name: (call(norm, device), exception, what its message must say)
    "x is a list": (lambda norm, d: norm([1.0], ones(1, device=d)), TYPE_ERROR, "x must be a Tensor.*list"),
    "x is None": (lambda norm, d: norm(None, ones(1, device=d)), TYPE_ERROR, "x must be a Tensor.*NoneType"),
    "x is int32": (lambda norm, d: norm(ones(3, 4, dtype=torch.int32, device=d), normalized_shape=4),
                   TYPE_ERROR, r"x must be .*float32.*, got .*[iI]nt"),
    "x is bool": (lambda norm, d: norm(ones(3, 4, dtype=torch.bool, device=d), normalized_shape=4),
                  TYPE_ERROR, r"x must be .*float32.*, got .*[bB]ool"),
    "x is complex": (lambda norm, d: norm(ones(3, 4, dtype=torch.complex64, device=d), normalized_shape=4),
                     TYPE_ERROR, r"x must be .*float32.*, got .*[cC]omplex"),
    "x is sparse": (lambda norm, d: norm(ones(3, 4, device=d).to_sparse(), ones(4, device=d)),
                    TYPE_ERROR, r"x must be a dense.*sparse_coo"),
    "x is sparse and requires grad": (
        lambda norm, d: norm(ones(3, 4, device=d).to_sparse().requires_grad_(), ones(4, device=d)),
        TYPE_ERROR, r"x must be a dense.*sparse_coo"),
    "x is sparse CSR": (lambda norm, d: norm(ones(3, 4, device=d).to_sparse_csr(), ones(4, device=d)),
                        TYPE_ERROR, r"x must be a dense"),
    "x is a scalar": (lambda norm, d: norm(ones(device=d), normalized_shape=1), SHAPE_ERROR, r"x must have shape"),
    "x is too short": (lambda norm, d: norm(ones(3, 4, device=d), ones(5, device=d)),
                       SHAPE_ERROR, r"weight must have the shape of x's last dim.*got \[5\] beside x of \[3, 4\]"),
    "x has too few dimensions": (lambda norm, d: norm(ones(4, device=d), ones(3, 4, device=d)),
                                 SHAPE_ERROR, r"weight must have the shape of x's.*got \[3, 4\] beside x of \[4\]"),
    "no data behind x": (lambda norm, d: norm(NoData(3, 4), normalized_shape=4), TYPE_ERROR, "NoData"),
    "normalized_shape is empty": (lambda norm, d: norm(ones(3, 4, device=d), normalized_shape=()),
                                  SHAPE_ERROR, r"normalized_shape.*at least one"),
    "weight is a scalar": (lambda norm, d: norm(ones(3, 4, device=d), ones(device=d)),
                           SHAPE_ERROR, r"(normalized_shape|weight).*"),
    "normalized_shape is missing": (lambda norm, d: norm(ones(3, 4, device=d)), VALUE_ERROR, "normalized_shape"),
    "normalized_shape does not match x": (lambda norm, d: norm(ones(3, 4, device=d), normalized_shape=(3, 5)),
                                          SHAPE_ERROR, r"x must have shape \[\*, 3, 5\].*normalized_shape"),
    "normalized_shape is a string": (lambda norm, d: norm(ones(3, 4, device=d), normalized_shape="4"),
                                     (TypeError, RuntimeError), "normalized_shape"),
    "normalized_shape is a float": (lambda norm, d: norm(ones(3, 4, device=d), normalized_shape=4.0),
                                    TYPE_ERROR, "normalized_shape must be an int or a sequence of ints, got 4.0"),
    "normalized_shape holds a float": (lambda norm, d: norm(ones(3, 4, device=d), normalized_shape=[4.0]),
                                       TYPE_ERROR, r"normalized_shape must be an int or a sequence.*\[4.0\]"),
    "normalized_shape is a bool": (  # with an activation, as plain eager mode takes True for 1
        lambda norm, d: norm(ones(3, 1, device=d), normalized_shape=True, activation="relu"),
        TYPE_ERROR, "normalized_shape must be an int or a sequence of ints, got True"),
    "arguments in the order of F.layer_norm": (
        lambda norm, d: norm(ones(3, 4, device=d), (4,), ones(4, device=d), ones(4, device=d)),
        TYPE_ERROR, "weight must be a Tensor or None, got tuple; normalized_shape is given by keyword"),
    "arguments in the order of F.layer_norm, with eps": (
        lambda norm, d: norm(ones(3, 4, device=d), (4,), ones(4, device=d), None, 1e-5),
        TYPE_ERROR, "takes from 1 to 4 positional arguments but 5 were given"),
    "arguments in the order of F.rms_norm": (
        lambda norm, d: norm(ones(3, 4, device=d), (4,), ones(4, device=d), 1e-5),
        TYPE_ERROR, "weight must be a Tensor or None, got tuple; normalized_shape is given by keyword"),
    "weight is a string": (lambda norm, d: norm(ones(3, 4, device=d), "w"),
                           TYPE_ERROR, "weight must be a Tensor or None, got str$"),
    "weight is a list": (lambda norm, d: norm(ones(3, 4, device=d), [1.0] * 4, normalized_shape=4),
                         TYPE_ERROR, "weight must be a Tensor.*list"),
    "bias is a list": (lambda norm, d: norm(ones(3, 4, device=d), None, [1.0] * 4, normalized_shape=4),
                       TYPE_ERROR, "bias must be a Tensor.*list"),
    "weight has another shape": (
        lambda norm, d: norm(ones(3, 4, device=d), ones(5, device=d), normalized_shape=4),
        SHAPE_ERROR, r"weight must have the shape.*\[4\].*got \[5\]"),
    "weight has another number of dimensions": (
        lambda norm, d: norm(ones(3, 4, device=d), ones(1, 4, device=d), normalized_shape=4),
        SHAPE_ERROR, r"weight must have the shape.*\[4\].*got \[1, 4\]"),
    "bias has another shape": (lambda norm, d: norm(ones(3, 4, device=d), ones(4, device=d), ones(5, device=d)),
                               SHAPE_ERROR, r"bias must have the shape.*\[4\].*got \[5\]"),
    "weight is fp64 beside fp32": (lambda norm, d: norm(ones(3, 4, device=d), ones(4, dtype=fp64, device=d)),
                                   TYPE_ERROR, r"weight must be of x's dtype"),
    "weight is fp32 beside fp64": (lambda norm, d: norm(ones(3, 4, dtype=fp64, device=d), ones(4, device=d)),
                                   TYPE_ERROR, r"weight must be of x's dtype"),
    "weight is fp16 beside bf16": (
        lambda norm, d: norm(ones(3, 4, dtype=bf16, device=d), ones(4, dtype=fp16, device=d)),
        TYPE_ERROR, r"weight must be of x's dtype"),
    "weight is int64": (lambda norm, d: norm(ones(3, 4, device=d), ones(4, dtype=torch.int64, device=d)),
                        TYPE_ERROR, r"weight must be of x's dtype, torch.float32, got torch.int64"),
    "weight is fp16 beside fp32": (  # where no kernel says it
        lambda norm, d: norm(ones(3, 4, device="meta"), ones(4, dtype=fp16, device="meta")),
        TYPE_ERROR, r"weight must be of x's dtype, torch.float32, got torch.float16"),
    "bias is fp16 beside fp32": (
        lambda norm, d: norm(ones(3, 4, device=d), ones(4, device=d), ones(4, dtype=fp16, device=d)),
        TYPE_ERROR, r"bias must be of x's dtype"),
    "weight is sparse": (lambda norm, d: norm(ones(3, 4, device=d), ones(4, device=d).to_sparse()),
                         TYPE_ERROR, r"weight must be a dense"),
    "weight is on another device": (lambda norm, d: norm(ones(3, 4, device=d), ones(4, device="meta")),
                                    SHAPE_ERROR, r"weight must be on x's device, (cpu|cuda).*got meta"),
    "bias is on another device": (
        lambda norm, d: norm(ones(3, 4, device=d), ones(4, device=d), ones(4, device="meta")),
        SHAPE_ERROR, r"bias must be on x's device, (cpu|cuda).*got meta"),
    "weight_offset without weight": (
        lambda norm, d: norm(ones(3, 4, device=d), weight_offset=1.0, normalized_shape=4),
        VALUE_ERROR, "weight_offset"),
    "out_dtype is int32": (lambda norm, d: norm(ones(3, 4, device=d), ones(4, device=d), out_dtype=torch.int32),
                           TYPE_ERROR, "out_dtype must be"),
    "out_dtype is a string": (lambda norm, d: norm(ones(3, 4, device=d), ones(4, device=d), out_dtype="float32"),
                              TYPE_ERROR, "out_dtype must be torch.float16.*got 'float32'"),
    "x is shorter than normalized_shape": (lambda norm, d: norm(ones(3, 4, device=d), normalized_shape=5),
                                           SHAPE_ERROR, r"x must have shape \[\*, 5\].*got \[3, 4\]"),
    "eps is a string": (lambda norm, d: norm(ones(3, 4, device=d), ones(4, device=d), eps="small"),
                        TYPE_ERROR, "eps must be a number, got str"),
    "eps is a string, with an activation": (
        lambda norm, d: norm(ones(3, 4, device=d), ones(4, device=d), eps="small", activation="relu"),
        TYPE_ERROR, "eps must be a number, got str"),
    "eps is a weight": (lambda norm, d: norm(ones(3, 4, device=d), ones(4, device=d), None, ones(4, device=d)),
                        TYPE_ERROR, "eps must be a number, got Tensor"),
    "bias is eps": (lambda norm, d: norm(ones(3, 4, device=d), ones(4, device=d), 1e-5),
                    TYPE_ERROR, "bias must be a Tensor or None, got float"),
    "weight_offset is None": (lambda norm, d: norm(ones(3, 4, device=d), ones(4, device=d), weight_offset=None),
                              TYPE_ERROR, "weight_offset must be a number, got NoneType"),
    "activation is a list": (lambda norm, d: norm(ones(3, 4, device=d), ones(4, device=d), activation=["relu"]),
                             TYPE_ERROR, "activation must be one of relu"),
    "activation is a function": (lambda norm, d: norm(ones(3, 4, device=d), ones(4, device=d), activation=torch.relu),
                                 TYPE_ERROR, "activation must be one of relu"),
}  # fmt: skip


@on_devices("op,name", [(op, name) for op in OPS for name in BAD_CALLS])
@pytest.mark.core
def test_bad_calls(device, op, name, route):
    """bad input: an error of the right type that names the argument"""
    call, exception, message = BAD_CALLS[name]
    with pytest.raises(exception, match=f"(?s){message}"):
        call(OPS[op], device)
    if name.startswith("x is sparse and"):
        return
    leaf = torch.ones(4, device=device, requires_grad=True)  # the library still works afterwards
    OPS[op](torch.ones(3, 4, device=device), leaf).sum().backward()


@on_devices(devices=("cpu",))
def test_bad_eps_of_layer_norm(device):
    """eps=None is RMSNorm's alone"""
    x, weight = ones(3, 4), ones(4)
    for options in ({}, {"activation": "relu"}, {"memory_efficient": True}, {"stats_grad": False}):
        with pytest.raises(TypeError, match="eps must be a number, got NoneType"):
            OPS["layer_norm"](x, weight, eps=None, **options)
        OPS["rms_norm"](x, weight, eps=None, **options)


@on_devices("op", OPS, devices=("cuda",))
def test_mixed_devices(device, op):
    """CPU and CUDA tensors mixed: an error that names the argument and both devices"""
    norm = OPS[op]
    for name, x, weight, bias in (
        ("weight", ones(3, 4, device=device), ones(4), ones(4, device=device)),
        ("bias", ones(3, 4, device=device), ones(4, device=device), ones(4)),
        ("weight", ones(3, 4), ones(4, device=device), None),
        ("bias", ones(3, 4), None, ones(4, device=device)),
    ):
        with pytest.raises(RuntimeError, match=f"{name} must be on x's device, {x.device.type}.*got"):
            norm(x, weight, bias)


# ---- CUDA only -----------------------------------------------------------------------------------------------------


@on_devices("op", OPS, devices=("cuda",))
def test_side_stream(device, op, route):
    """a side stream: the work runs there, and results are right"""
    case = Case((4096, 1024), op=op)
    inputs = make_inputs(case, device)
    stream = torch.cuda.Stream()
    staged = copy.deepcopy(inputs)
    staged.x.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # about 10 ms: a launch on another stream would see the zeros
        staged.x.copy_(inputs.x)
        found = run(fused, case, staged)
    torch.cuda.synchronize()
    check(case, inputs, found)


@on_devices("op", OPS, devices=("cuda",))
def test_cuda_graph(device, op, route):
    """CUDA graph capture and replay of forward and backward"""
    case = Case((256, 1024), op=op, dtype=bf16)
    inputs = make_inputs(case, device)
    static = copy.deepcopy(inputs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(fused, case, static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    static.x.fill_(1.0)
    with torch.cuda.graph(graph, stream=stream):
        found = run(fused, case, static)
    for name, value in vars(inputs).items():
        getattr(static, name).copy_(value)
    for _ in range(2):
        graph.replay()
        check(case, inputs, found)


@on_devices("op", OPS, devices=("cuda",))
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_second_device(device, op, route):
    """tensors on a device that is not the current one"""
    case = Case((199, 1024), op=op, dtype=bf16)
    inputs = make_inputs(case, "cuda:1")
    with torch.cuda.device(0):
        found = run(fused, case, inputs)
        assert torch.cuda.current_device() == 0
    check(case, inputs, found)


@on_devices("op", OPS, devices=("cuda",))
def test_no_memory_is_leaked(device, op, route):
    """200 training steps allocate and free the same memory"""
    module = MODULES[op][0](1000, device=device)
    x = torch.randn(300, 1000, device=device, requires_grad=True)

    def steps(count):
        for step in range(count):
            module(x[: 200 + step % 50]).square().mean().backward()
            module.zero_grad(set_to_none=True)
            x.grad = None
        torch.cuda.synchronize()
        gc.collect()
        return torch.cuda.memory_allocated()

    assert steps(200) == steps(50)


@on_devices("op", OPS, devices=("cuda",))
def test_more_than_2_to_the_31_elements(device, op):
    """more than 2^31 elements: the last rows are the same bits as alone"""
    rows, hidden_size = (1 << 19) + 5, 4099
    needed = 5 * 2 * rows * hidden_size
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed >> 30} GiB of free GPU memory")
    case = Case((rows, hidden_size), op=op, dtype=bf16)
    x = torch.randn(rows, hidden_size, dtype=bf16, device=device)
    dy = torch.randn(rows, hidden_size, dtype=bf16, device=device)
    weight, bias = (torch.randn(hidden_size, dtype=bf16, device=device) for _ in range(2))
    found = run(fused, case, Inputs(x, weight, bias, dy))
    for part in (slice(0, 3), slice(rows // 2, rows // 2 + 3), slice(rows - 3, rows)):
        alone = run(fused, case, Inputs(x[part], weight, bias, dy[part]))
        assert same_bits(found["y"][part], alone["y"]) and same_bits(found["x"][part], alone["x"])
    truth = sum(chunk.sum(0, dtype=fp64) for chunk in dy.split(1 << 16))
    error = (found["bias"].double() - truth).abs()
    assert (error <= torch.finfo(bf16).eps * (truth.abs() + 1)).all()


# ---- the reference backend -----------------------------------------------------------------------------------------


@pytest.mark.skipif(fused_layernorm.backend() == "reference", reason="this run is the reference backend's already")
def test_on_the_reference_backend():
    """the core of the table on FUSED_LAYERNORM_BACKEND=reference; NormFunction is the same there"""
    chosen = "cpu and not reference_py and not norm_function and not truth"
    arguments = ["-q", "-x", "-p", "no:cacheprovider", "-m", "core", "-k", chosen, __file__]
    environment = {"FUSED_LAYERNORM_BACKEND": "reference", "CUDA_VISIBLE_DEVICES": ""}
    done = run_code(f"import pytest, sys; sys.exit(pytest.main({arguments}))", environment=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert re.search(r"\d\d+ passed", done.stdout)


# ---- python test_correctness.py ------------------------------------------------------------------------------------


class Summary:
    """A pytest plugin that counts outcomes and seconds by group: a test's docstring and its device."""

    def __init__(self):
        self.title_of, self.groups = {}, {}

    def pytest_collection_modifyitems(self, items):
        for item in items:
            device = item.callspec.params.get("device", "") if hasattr(item, "callspec") else "cpu"
            self.title_of[item.nodeid] = ((item.function.__doc__ or item.name).split("\n")[0], device)

    def pytest_runtest_logreport(self, report):
        group = self.groups.setdefault(self.title_of[report.nodeid], {"passed": 0, "failed": 0, "skipped": 0, "s": 0})
        group["s"] += report.duration
        if report.when == "call" or report.outcome != "passed":
            group[report.outcome] += 1

    def print(self):
        devices = {"cpu": f"cpu ({torch.get_num_threads()} threads)"}
        if HAS_CUDA:
            devices["cuda"] = f"cuda ({torch.cuda.get_device_name()})"
        backend = fused_layernorm.backend()
        print(f"\nfused_layernorm {fused_layernorm.__version__}, backend {backend}, torch {torch.__version__}")
        for device in ("cpu", "cuda"):
            groups = {title: group for (title, of), group in self.groups.items() if of == device}
            ran = {title: group for title, group in groups.items() if group["passed"] + group["failed"]}
            if ran:
                print(f"\non {devices[device]}")
            for title, group in ran.items():
                verdict = f"{group['failed']} FAILED, {group['passed']} passed" if group["failed"] else (
                    f"{group['passed']} passed")  # fmt: skip
                print(f"  {'✗' if group['failed'] else '✓'} {title:<84} {verdict:>14} {group['s']:7.1f} s")
            if groups and not ran:
                print(f"\non {device}: nothing ran (-rs says why)" if HAS_CUDA else f"\non {device}: skipped, no GPU")


def main(arguments):
    summary = Summary()
    started = time.perf_counter()
    code = pytest.main([__file__, "-q", "--no-header", "-p", "no:cacheprovider", *arguments], plugins=[summary])
    summary.print()
    verdict = "All tests passed" if code == 0 else f"NOT all passed (pytest's exit code {int(code)})"
    print(f"\n{verdict} in {time.perf_counter() - started:.0f} s.")
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
