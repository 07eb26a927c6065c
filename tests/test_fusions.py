"""What is fused around a norm: residual and dropout, activation, modulation, frozen statistics, roundings, and how
gradients are saved and summed.

Values and gradients are judged by norm_cases.py's `judge_fusion`, against fp64. A case is a line of a table here too.
"""

import copy
import functools
import inspect
import math
import pickle
import re
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from fork_server import run_code
from norm_cases import (
    ACTIVATIONS,
    ADAPTIVE_OPS,
    ADD_OPS,
    AFTER_OPS,
    ARGUMENTS,
    CPU_ELEMENTS,
    CUDA_ELEMENTS,
    DTYPE_NAMES,
    GATED_OPS,
    GATES,
    HAS_CUDA,
    NEEDS_EXTENSION,
    NODE,
    OPERATOR_NODE,
    OPS,
    Case,
    Fusion,
    Memory,
    X,
    backward_arguments,
    bf16,
    check_fusion,
    fill,
    fp16,
    fp32,
    fp64,
    fused,
    gradient_like,
    judge_fusion,
    laid_out,
    make_inputs,
    on_devices,
    one_thread,
    ones,
    opcheck,
    operator_arguments,
    poisoned,
    run,
    run_fusion,
    same_bits,
    same_to_rounding,
    through,
    uses_kernels,
)
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

import fused_layernorm
from fused_layernorm import (
    FusedAdaptiveLayerNorm,
    FusedAdaptiveRMSNorm,
    FusedAddLayerNorm,
    FusedAddRMSNorm,
    FusedGatedLayerNorm,
    FusedGatedRMSNorm,
    FusedLayerNorm,
    FusedRMSNorm,
    _backend,
    _ops,
    compat,
    functional,
    fused_adaptive_layer_norm,
    fused_adaptive_rms_norm,
    fused_add_layer_norm,
    fused_add_rms_norm,
    fused_sandwich_rms_norm,
    reference,
)

ROOT = Path(__file__).parents[1]


# ---- residual --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Add:
    shape: tuple
    op: str = "layer_norm"
    dtype: torch.dtype = fp32  # of x, and so of y
    residual: torch.dtype | None = fp32  # None: no residual
    residual_dtype: torch.dtype | None = None
    parameters: torch.dtype | None = fp32
    dropout_p: float = 0.0
    layout: str = "contiguous"  # of x and residual
    grad_layout: str = "contiguous"
    uses: str = "both"  # which results get a gradient: "both", "y", "residual_out"
    normalized_ndim: int = 1

    def __str__(self):
        names = [DTYPE_NAMES.get(dtype, "none") for dtype in (self.dtype, self.residual, self.parameters)]
        more = [] if self.residual_dtype is None else [f"to_{DTYPE_NAMES[self.residual_dtype]}"]
        more += [f"p{self.dropout_p}"] if self.dropout_p else []
        more += [part for part in (self.layout, self.grad_layout) if part != "contiguous"]
        more += [] if self.uses == "both" else [self.uses]
        return "-".join([self.op, "x".join(map(str, self.shape)), *names, *more])

    @property
    def core(self):
        return self.shape == (11, 131)

    @property
    def cuda_only(self):  # too large for the CPU's time
        return math.prod(self.shape) > 300_000

    @property
    def z_dtype(self):
        return self.residual_dtype or self.residual or self.dtype

    @property
    def norm_case(self):
        """The norm of x; that of z is Fusion's."""
        return Case(self.shape, op=self.op, dtype=self.dtype, weight=self.parameters, bias=self.parameters,
                    normalized_ndim=self.normalized_ndim)  # fmt: skip


def add_cases():
    found = []

    def add(*arguments, **options):
        for op in OPS:
            found.append(Add(*arguments, op=op, **options))

    for dtype in (fp16, bf16):  # every mix of dtypes
        for residual in (None, dtype, fp32):
            for residual_dtype in (None, dtype, fp32):
                for parameters in (None, dtype, fp32):
                    add((11, 136), dtype=dtype, residual=residual, residual_dtype=residual_dtype,
                        parameters=parameters)  # fmt: skip
                add((11, 131), dtype=dtype, residual=residual, residual_dtype=residual_dtype, parameters=fp32,
                    dropout_p=0.3)  # fmt: skip
    for dtype in (fp32, fp64):
        for residual in (None, dtype):
            for parameters in (None, dtype):
                for dropout_p in (0.0, 0.3):
                    add((11, 131), dtype=dtype, residual=residual, parameters=parameters, dropout_p=dropout_p)
    for shape in ((0, 40), (1, 1), (3, 7), (199, 769), (64, 4096), (2, 20001)):  # sizes
        for dropout_p in (0.0, 0.1):
            add(shape, dtype=bf16, residual=bf16, dropout_p=dropout_p)
            add(shape, dropout_p=dropout_p)
    for layout in ("offset_by_one", "columns", "every_other_row", "stepped", "transposed", "expanded_rows"):
        add((37, 96), dtype=bf16, residual=fp32, layout=layout, grad_layout=layout, dropout_p=0.2)
        add((37, 96), layout=layout, grad_layout=layout)
    add((37, 96), grad_layout="expanded_scalar")
    add((2, 5, 4, 32), layout="qkv", grad_layout="qkv", normalized_ndim=2, dropout_p=0.5)
    for uses in ("y", "residual_out"):
        for dropout_p in (0.0, 0.3):
            add((11, 131), uses=uses, dropout_p=dropout_p)
            add((11, 131), dtype=bf16, residual=fp32, uses=uses, dropout_p=dropout_p)
    mixes = ((bf16, bf16, bf16), (bf16, fp32, bf16), (fp16, fp16, fp32), (fp16, fp32, fp32), (fp32, fp32, fp32))
    # each plan of the CUDA kernels with an add stage, and beyond the last
    sizes = (8, 256, 264, 512, 768, 1024, 1536, 2048, 3072, 4096, 5120, 6144, 8192, 8216, 12288, 16384, 40000)
    sizes = sizes if HAS_CUDA else (8, 264, 1024, 8216, 40000)  # the CPU has no plans
    for hidden_size in sizes:
        for dtype, residual, parameters in mixes:
            for dropout_p in (0.0, 0.1):
                add((5, hidden_size), dtype=dtype, residual=residual, parameters=parameters, dropout_p=dropout_p)
    for shape in ((20_000, 256), (9000, 1024), (3001, 4096), (1501, 8192), (399, 16384), (200, 40000)):  # many turns
        for dtype, residual, parameters in mixes:
            add(shape, dtype=dtype, residual=residual, parameters=parameters, dropout_p=0.1)
            add(shape, dtype=dtype, residual=residual, parameters=parameters)
    for dtype, residual, parameters in mixes:
        add((7, 260), dtype=dtype, residual=residual, parameters=parameters)  # whole rows of fp32, not of 16 bits
        add((2, 140_000), dtype=dtype, residual=residual, parameters=parameters, dropout_p=0.1)
        for uses in ("y", "residual_out"):
            add((37, 512), dtype=dtype, residual=residual, parameters=parameters, uses=uses)
        for residual_dtype in (None, fp32):
            add((37, 2048), dtype=dtype, residual=None, residual_dtype=residual_dtype, parameters=parameters)
    add((11, 131), dropout_p=1.0)
    add((11, 131), dtype=bf16, residual=None, dropout_p=1.0)
    return list(dict.fromkeys(found))


@one_thread()
def add_inputs(case, device):
    """x, residual, weight, bias and the gradients of both results; those not there are None."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(str(case).encode()))

    def tensor(dtype, shape=case.shape, layout="contiguous"):
        return None if dtype is None else laid_out(fill(shape, "normal", generator).to(dtype), layout)

    parameters_shape = case.shape[len(case.shape) - case.normalized_ndim :]
    tensors = {
        "x": tensor(case.dtype, layout=case.layout),
        "residual": tensor(case.residual, layout=case.layout),
        "weight": tensor(case.parameters, parameters_shape),
        "bias": tensor(case.parameters, parameters_shape),
    }
    z = tensors["x"].double() + (0.0 if tensors["residual"] is None else tensors["residual"].double())
    grad_y, grad_z = (
        laid_out(gradient_like(z, case.norm_case, generator).to(dtype), case.grad_layout)
        for dtype in (case.dtype, case.z_dtype)
    )
    return tensors, None if case.uses == "residual_out" else grad_y, None if case.uses == "y" else grad_z


def run_add(case, tensors, grad_y, grad_z, wants=("x", "residual", "weight", "bias")):
    leaves = {name: t.detach().requires_grad_(name in wants) for name, t in tensors.items() if t is not None}
    options = {} if case.parameters else {"normalized_shape": case.shape[-case.normalized_ndim :]}
    if case.dropout_p:
        options |= {"dropout_p": case.dropout_p, "return_dropout_mask": True}
    y, z, *mask = ADD_OPS[case.op](
        leaves["x"], leaves.get("residual"), leaves.get("weight"), leaves.get("bias"), 1e-5,
        residual_dtype=case.residual_dtype, **options,
    )  # fmt: skip
    mask = mask[0] if mask else torch.ones_like(z, dtype=torch.bool)
    assert z.requires_grad == ("x" in wants or ("residual" in wants and "residual" in leaves))
    outputs = [(out, dout) for out, dout in ((y, grad_y), (z, grad_z)) if dout is not None and out.requires_grad]
    asked = [name for name in leaves if name in wants]
    gradients = torch.autograd.grad(
        [out for out, _ in outputs], [leaves[name] for name in asked], [gradient for _, gradient in outputs],
        allow_unused=True,
    )  # fmt: skip
    return {"y": y.detach(), "z": z.detach(), "mask": mask, **dict(zip(asked, gradients, strict=True))}


def check_add(case, tensors, grad_y, grad_z, found, composed=False):
    """z to the last bit, y and all gradients against fp64, for the mask that was drawn."""
    fusion = Fusion(
        case.norm_case, kind="add", residual=case.residual, residual_dtype=case.residual_dtype,
        dropout_p=case.dropout_p, route="reference" if composed else "node",
        uses=tuple(name for name, gradient in (("y", grad_y), ("z", grad_z)) if gradient is not None),
    )  # fmt: skip
    given = {name: t for name, t in (*tensors.items(), ("grad_output", grad_y), ("grad_z", grad_z)) if t is not None}
    for name in ("weight", "bias") if grad_y is None else ():  # then torch's engine, or we, may say 0 by None
        assert found.get(name) is None or not found[name].any()
    found = {name: t for name, t in found.items() if t is not None}
    assert found["y"].is_contiguous()
    judge_fusion(fusion, given, found, keeps=found["mask"] if case.dropout_p else None)


@on_devices("case", add_cases())
def test_add_values(device, case):
    """z = residual + dropout(x) to the bit; y and all gradients against fp64"""
    tensors, grad_y, grad_z = add_inputs(case, device)
    with poisoned():
        found = run_add(case, tensors, grad_y, grad_z)
    check_add(case, tensors, grad_y, grad_z, found)


FEW_ADDS = [
    Add(shape, op=op, dtype=dtype, residual=residual, dropout_p=dropout_p)
    for shape in ((19, 77), (19, 512))
    for op in OPS
    for dtype, residual in ((fp32, fp32), (bf16, fp32), (bf16, bf16), (bf16, None))
    for dropout_p in (0.0, 0.3)
]


@on_devices("case", FEW_ADDS)
def test_add_by_reference(device, case):
    """reference.py, the specification: the same mask and the same bits in z; y and the gradients against fp64"""
    tensors, grad_y, grad_z = add_inputs(case, device)
    torch.manual_seed(3)
    fused = run_add(case, tensors, grad_y, grad_z)
    torch.manual_seed(3)
    with through("reference"):
        found = run_add(case, tensors, grad_y, grad_z)
    check_add(case, tensors, grad_y, grad_z, found, composed=True)
    for name in ("z", "mask"):
        assert same_bits(fused[name], found[name]), name


@on_devices("case", FEW_ADDS)
def test_add_checker_rejects(device, case):
    """the checker itself: a lost skip gradient, a forgotten mask and another norm are rejected"""
    tensors, grad_y, grad_z = add_inputs(case, device)
    found = run_add(case, tensors, grad_y, grad_z)
    no_skip = run_add(case, tensors, grad_y, torch.zeros_like(grad_z))
    wrong = [{**found, "x": no_skip["x"]}, {**found, "y": found["y"] * 1.02},
             {**found, "weight": found["weight"] * 1.02}]  # fmt: skip
    if case.residual:
        wrong.append({**found, "residual": no_skip["residual"]})
    if case.dropout_p:
        wrong += [{**found, "mask": ~found["mask"]}, {**found, "x": found["x"] * (1 - case.dropout_p)}]
    for each in wrong:
        with pytest.raises(AssertionError):
            check_add(case, tensors, grad_y, grad_z, each)


@on_devices("op,dtype,hidden_size", [(op, dtype, n) for op in ADD_OPS for dtype in (fp16, bf16, fp32)
                                      for n in (128, 768, 1280, 4096)])  # fmt: skip
def test_a_row_does_not_depend_on_the_batch(device, op, dtype, hidden_size):
    """y, and z of an add norm, of few rows and of more, which have kernels of their own, and of many: the same bits and
    signs of 0"""
    if not uses_kernels(device):
        pytest.skip("a promise of the compiled kernels: PyTorch's sums depend on the number of rows")
    rows = (CPU_ELEMENTS if device == "cpu" else CUDA_ELEMENTS) // hidden_size
    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(rows, hidden_size, generator=generator).to(device, dtype) for _ in range(2))
    some = torch.rand(hidden_size, generator=generator).to(device, dtype)
    x[1, ::3] = residual[1, ::3] = some[::5] = -0.0
    for weight in (some, None):
        for bias in (weight, None):

            def results(rows, weight=weight, bias=bias):
                options = {"weight": weight, "bias": bias, "eps": 1e-5, "normalized_shape": hidden_size}
                return OPS[op](x[:rows], **options), *ADD_OPS[op](x[:rows], residual[:rows], **options)

            many = results(rows)
            # few, and 1.5 times kAnyFewRows.vectors (launch_plan.h)
            for fewer in (3, min(rows, 3 * 2**20 // x.itemsize // hidden_size)):
                for a, b in zip(results(fewer), many, strict=True):
                    same = same_bits(a, b[:fewer]) and same_bits(a.signbit(), b[:fewer].signbit())
                    assert same, (fewer, weight is None, bias is None)


@on_devices("op,dtype,hidden_size", [(op, dtype, n) for op in ADD_OPS for dtype in (fp16, bf16, fp32)
                                      for n in (64, 768, 2560, 4096, 8192, 8193, 12288, 16384)])  # fmt: skip
def test_gradients_of_a_row_do_not_depend_on_the_batch(device, op, dtype, hidden_size):
    """gradients of x and of residual, for which few rows take one launch of blocks of rows and of columns, many rows
    persistent blocks and clusters: the same bits"""
    rows = (CPU_ELEMENTS if device == "cpu" else 5 * 2**20) // hidden_size
    generator = torch.Generator().manual_seed(0)
    x, residual, grad_y, grad_z = (
        torch.randn(rows, hidden_size, generator=generator).to(device, dtype) for _ in range(4)
    )
    weight, bias = (torch.rand(hidden_size, generator=generator).to(device, dtype).requires_grad_() for _ in "wb")

    def gradients(rows):
        options = {"weight": weight, "bias": bias, "eps": 1e-5, "normalized_shape": hidden_size}
        few_x, few_residual = (tensor[:rows].clone().requires_grad_() for tensor in (x, residual))
        few_grad_y, few_grad_z = grad_y[:rows], grad_z[:rows]
        found = list(torch.autograd.grad(OPS[op](few_x, **options), few_x, few_grad_y))
        for inputs in ((few_x, few_residual), (x[:rows], few_residual)):
            wanted = [tensor for tensor in inputs if tensor.requires_grad]
            found += torch.autograd.grad(ADD_OPS[op](*inputs, **options), wanted, (few_grad_y, few_grad_z))
        return found

    many = gradients(rows)
    assert all(gradient.isfinite().all() and gradient.any(-1).all() for gradient in many)
    for fewer in (1, 5, 60):
        for few, all_rows in zip(gradients(min(fewer, rows)), many, strict=True):
            assert same_bits(few, all_rows[:fewer]), fewer


@on_devices("case", FEW_ADDS)
def test_add_each_input_alone_requires_grad(device, case):
    """each input alone requiring grad: the same gradient"""
    tensors, grad_y, grad_z = add_inputs(case, device)
    torch.manual_seed(3)
    everything = run_add(case, tensors, grad_y, grad_z)
    for name in ("x", "residual", "weight", "bias"):
        if tensors[name] is None:
            continue
        torch.manual_seed(3)
        with poisoned():
            alone = run_add(case, tensors, grad_y, grad_z, wants=(name,))
        assert same_bits(alone[name], everything[name]), name
    with torch.no_grad():
        torch.manual_seed(3)
        y, z = ADD_OPS[case.op](*tensors.values(), 1e-5, dropout_p=case.dropout_p)
    assert same_bits(y, everything["y"]) and same_bits(z, everything["z"]) and y.grad_fn is None


@on_devices("case", FEW_ADDS)
def test_add_by_operator(device, case):
    """the operator has the bits of plain eager mode, results and gradients, of all inputs and of each alone"""
    tensors, grad_y, grad_z = add_inputs(case, device)
    for wants in (tuple(tensors), *((name,) for name, t in tensors.items() if t is not None)):
        torch.manual_seed(3)
        plain = run_add(case, tensors, grad_y, grad_z, wants=wants)
        with through("operator"):
            torch.manual_seed(3)
            found = run_add(case, tensors, grad_y, grad_z, wants=wants)
        assert found.keys() == plain.keys() and all(same_bits(found[name], plain[name]) for name in found)
        check_add(case, tensors, grad_y, grad_z, plain)


@on_devices("case", [case for case in FEW_ADDS if not case.dropout_p])
def test_mask_without_dropout(device, case):
    """return_dropout_mask where nothing is dropped: all True, and the same y and z"""
    tensors, *_ = add_inputs(case, device)
    y, z, mask = ADD_OPS[case.op](*tensors.values(), 1e-5, return_dropout_mask=True)
    assert mask.dtype == torch.bool and mask.shape == y.shape and mask.all()
    found = ADD_OPS[case.op](*tensors.values(), 1e-5)
    assert same_bits(found[0], y) and same_bits(found[1], z)


@on_devices("op,path", [(op, path) for op in OPS for path in ("node", "operator")])
def test_add_in_the_graph(device, op, path):
    """names, edges and hooks of the node; residual_out changed in place is an error, what is not saved may change"""
    if not _backend.has_kernels_for(device):
        pytest.skip("composed of PyTorch operations")
    x, residual = (torch.randn(6, 50, device=device, requires_grad=True) for _ in range(2))
    weight = torch.randn(50, device=device, requires_grad=True)
    with through(path):
        y, z = ADD_OPS[op](x, residual, weight)
    name = {"node": NODE, "operator": OPERATOR_NODE}[path]
    assert y.grad_fn is z.grad_fn and y.grad_fn.name() == type(y.grad_fn).__name__ == name
    edges = [False, False, True, False, True] if name == "FusedNormBackward" else [False, False, False]
    assert [edge[0] is None for edge in y.grad_fn.next_functions] == edges
    seen = []
    y.grad_fn.register_hook(lambda inputs, outputs: seen.append("after"))
    handle = z.register_hook(lambda gradient: seen.append("residual_out") or 2 * gradient)
    ones = torch.ones_like(x)
    with torch.no_grad():
        x.zero_(), residual.zero_()
    gradients = torch.autograd.grad((y, z), (x, residual), (ones, ones), retain_graph=True)
    assert seen == ["residual_out", "after"] and same_bits(*gradients)
    handle.remove()
    of_y = torch.autograd.grad(y, x, ones, retain_graph=True)[0]
    torch.testing.assert_close(gradients[0], of_y + 2 * ones)
    z.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    frozen = ADD_OPS[op](x.detach(), None, weight)
    assert frozen[0].requires_grad and not frozen[1].requires_grad
    frozen[0].sum().backward()
    assert weight.grad is not None


@on_devices("op,dropout_p", [("layer_norm", 0.3), ("rms_norm", 0.0)], devices=("cpu",))
def test_add_compiled_autograd(device, op, dropout_p):
    """compiled autograd (backend aot_eager), in one graph: the same gradients"""
    if not _backend.has_kernels_for(device):
        pytest.skip("composed of PyTorch operations")
    case = Add((6, 50), op=op, dtype=bf16, residual=bf16, dropout_p=dropout_p)
    tensors, grad_y, grad_z = add_inputs(case, device)
    torch.compiler.reset()
    both, of_y, of_z = (grad_y, grad_z), (grad_y, None), (None, grad_z)
    ways = [("all", both), ("all", of_y), ("all", of_z), ("x", both)]  # one graph each, found again by its key
    ways += [("x", of_y), ("rb", of_z)] if dropout_p else [("rb", both), ("rb", of_y), ("x", of_z)]
    for wanted, gradients in ways:
        wants = {"all": tuple(tensors), "x": ("x",), "rb": ("residual", "bias")}[wanted]
        torch.manual_seed(3)
        plain = run_add(case, tensors, *gradients, wants=wants)
        torch.manual_seed(3)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
            found = run_add(case, tensors, *gradients, wants=wants)
        assert found.keys() == plain.keys()
        for name, one in found.items():  # None: of weight, where y is not used
            assert one is plain[name] or same_bits(one, plain[name])
        check_add(case, tensors, *gradients, plain)


@NEEDS_EXTENSION
@on_devices("op", OPS, devices=("cpu",))
def test_add_profiler(device, op):
    """a profile shows the call and its backward"""
    if not _backend.has_kernels_for(device):
        pytest.skip("composed of PyTorch operations")
    x = torch.randn(3, 8, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        ADD_OPS[op](x, None, normalized_shape=8)[0].backward(torch.ones(3, 8))
    numbers = {event.name: event.sequence_nr for event in profile.events()}
    assert numbers[f"fused_add_{op}"] == numbers["FusedNormBackward"]


@on_devices("op", OPS)
def test_add_saves_z_alone(device, op):
    """neither x nor residual nor a mask is kept for backward"""
    if not _backend.has_kernels_for(device):
        pytest.skip("composed of operations that save what they save")
    x, residual = (torch.randn(64, 128, device=device, requires_grad=True) for _ in range(2))
    weight = torch.ones(128, device=device, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        _, z = ADD_OPS[op](x, residual, weight, dropout_p=0.5)
    assert sum(t.numel() for t in saved) < 1.2 * z.numel()
    assert any(t.data_ptr() == z.data_ptr() for t in saved)


@on_devices("op", OPS)
def test_a_stream_of_blocks(device, op):
    """pre-norm blocks chained by residual_out, from residual=None on: as torch's operations"""
    torch.manual_seed(0)
    x = torch.randn(6, 32, device=device, dtype=fp64, requires_grad=True)
    weights = torch.randn(3, 32, device=device, dtype=fp64, requires_grad=True)
    layer = {"layer_norm": lambda z, w: F.layer_norm(z, (32,), w, None, 1e-5),
             "rms_norm": lambda z, w: F.rms_norm(z, (32,), w, 1e-5)}[op]  # fmt: skip

    def ours():
        hidden, residual = x, None
        for weight in weights:
            y, residual = ADD_OPS[op](hidden, residual, weight, None, 1e-5)
            hidden = y.sin()
        return hidden + residual

    def torchs():
        hidden, residual = x, 0
        for weight in weights:
            residual = residual + hidden
            hidden = layer(residual, weight).sin()
        return hidden + residual

    torch.testing.assert_close(ours(), torchs())
    torch.testing.assert_close(
        torch.autograd.grad(ours().cos().sum(), (x, weights)), torch.autograd.grad(torchs().cos().sum(), (x, weights))
    )


@on_devices("op,given", [(op, given) for op in OPS for given in ("all", "no residual")])
def test_add_gradcheck(device, op, given):
    """gradcheck and gradgradcheck of both results, with and without dropout; forward mode and batched gradients"""
    tensors = [
        torch.randn(*shape, device=device, dtype=fp64, requires_grad=True) for shape in ((2, 4),) * 2 + ((4,),) * 2
    ]
    if given == "no residual":
        del tensors[1]
    for dropout_p in (0.0, 0.4):

        def norm(x, *others, dropout_p=dropout_p):
            residual = others[0] if given == "all" else None
            torch.manual_seed(7)
            return ADD_OPS[op](x, residual, *others[-2:], dropout_p=dropout_p)

        assert gradcheck(norm, tensors, check_batched_grad=not dropout_p, check_forward_ad=True)
        assert gradgradcheck(norm, tensors)


@on_devices("op", OPS)
def test_add_in_transforms(device, op):
    """torch.func: grad, vmap and jvp"""
    x, residual = (torch.randn(4, 8, device=device, dtype=fp64) for _ in range(2))
    weight = torch.randn(8, device=device, dtype=fp64)

    def loss(x, residual, weight):
        y, z = ADD_OPS[op](x, residual, weight, eps=1e-5)
        return (y.sin() * z).sum()

    leaves = [t.clone().requires_grad_() for t in (x, residual, weight)]
    truth = torch.autograd.grad(loss(*leaves), leaves)
    torch.testing.assert_close(torch.func.grad(loss, argnums=(0, 1, 2))(x, residual, weight), truth)
    per_row = torch.func.vmap(torch.func.grad(loss), (0, 0, None))(x, residual, weight)
    torch.testing.assert_close(per_row, truth[0])
    _, tangent = torch.func.jvp(lambda x: loss(x, residual, weight), (x,), (residual,))
    torch.testing.assert_close(tangent, (truth[0] * residual).sum())


BAD_ADDS = {
    "dropout_p above 1": (lambda add, x: add(x, x, ones(4), dropout_p=1.5), ValueError, "dropout_p must be from 0"),
    "dropout_p below 0": (lambda add, x: add(x, x, ones(4), dropout_p=-0.1), ValueError, r"dropout_p must be from 0"),
    "dropout_p is NaN": (lambda add, x: add(x, x, ones(4), dropout_p=math.nan), ValueError, "dropout_p must be"),
    "dropout_p is a string": (lambda add, x: add(x, x, ones(4), dropout_p="a"), TypeError, r"dropout_p must be a num"),
    "residual of another shape": (lambda add, x: add(x, x[:2], ones(4)), RuntimeError,
                                  r"residual must have x's shape, \[3, 4\], got \[2, 4\]"),
    "residual on another device": (lambda add, x: add(x, x.to("meta"), ones(4)), RuntimeError,
                                   "residual must be on x's device"),
    "residual of another dtype": (lambda add, x: add(x, x.half(), ones(4)), TypeError, "residual must be of x's dtype"),
    "residual is a list": (lambda add, x: add(x, [1.0], ones(4)), TypeError, "residual must be a Tensor or None.*list"),
    "residual is sparse": (lambda add, x: add(x, x.to_sparse(), ones(4)), TypeError, "residual must be a dense"),
    "residual_dtype": (lambda add, x: add(x, x, ones(4), residual_dtype=fp64), TypeError, "residual_dtype must be"),
    "x": (lambda add, x: add([1.0], x, ones(4)), TypeError, "x must be a Tensor"),
    "weight": (lambda add, x: add(x, x, ones(5)), RuntimeError, "weight must have the shape"),
    "activation": (lambda add, x: add(x, x, ones(4), activation="tanh"), ValueError, "activation must be one of relu"),
    "activation is a list": (lambda add, x: add(x, x, ones(4), activation=["relu"]), TypeError, "activation must be"),
    "weight is a shape": (lambda add, x: add(x, x, (4,), ones(4)), TypeError,
                          "weight must be a Tensor or None, got tuple; normalized_shape is given by keyword"),
    "weight is a string": (lambda add, x: add(x, x, "w"), TypeError, "weight must be a Tensor or None, got str$"),
    "normalized_shape": (lambda add, x: add(x, x, normalized_shape=4.0), TypeError, "normalized_shape must be an int"),
    "eps": (lambda add, x: add(x, x, ones(4), eps="a"), TypeError, "eps must be a number, got str"),
    "weight_offset": (lambda add, x: add(x, x, ones(4), weight_offset=None), TypeError, "weight_offset must be a num"),
    "residual is fp16 beside fp32": (  # where no kernel says it
        lambda add, x: add(x.to("meta"), x.half().to("meta"), normalized_shape=4), TypeError,
        "residual must be of x's dtype, torch.float32, got torch.float16"),
}  # fmt: skip


@on_devices("op,name", [(op, name) for op in OPS for name in BAD_ADDS], devices=("cpu",))
def test_bad_adds(device, op, name):
    """bad input: an error that names the argument"""
    call, exception, message = BAD_ADDS[name]
    with pytest.raises(exception, match=message):
        call(ADD_OPS[op], torch.randn(3, 4))


@pytest.mark.parametrize("name", OPS)
def test_signature(name):
    """what comes after eps is by keyword, says the signature, and every keyword is in it"""
    parameters = inspect.signature(getattr(fused_layernorm, f"fused_{name}")).parameters
    by_keyword = [p.name for p in parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    assert list(parameters)[:4] == ["x", "weight", "bias", "eps"] and len(by_keyword) == len(parameters) - 4
    assert {"stats_grad", "activation", "dropout_p", "memory_efficient", "out_dtype"} <= set(by_keyword)


# ---- operators, torch.compile ----------------------------------------------------------------------------------------


TRACED = [("xrwb", False), ("xrwb", True), ("x", True), ("r", False)]  # wants, and whether residual_out is not used


@pytest.mark.skipif(fused_layernorm.backend() == "reference", reason="there are no operators")
@on_devices("case", [case for case in FEW_ADDS if case.op == "layer_norm"])
def test_add_opcheck(device, case):
    """schema, autograd registration, fake tensors, AOT dispatch"""
    if not _backend.has_kernels_for(device):
        pytest.skip("no kernel has the stage")
    tensors, grad_y, grad_z = add_inputs(case, device)
    leaves = [None if t is None else t.requires_grad_() for t in tensors.values()]
    x, residual, weight, bias = leaves
    philox = functional._draw_philox(x) if case.dropout_p else None
    forward = operator_arguments(x, residual, None, weight, bias, philox, dropout_p=case.dropout_p,
                                 residual_dtype=case.z_dtype)  # fmt: skip
    is_traced = case.shape[1] < 100 and bool(case.dropout_p)  # to the trace, sizes and p are numbers that are handed on
    opcheck(_ops.norm_forward, forward, traced=is_traced)
    with torch.no_grad():
        results = _ops.norm_forward(*forward)
    for wants in ("xrwb", "x", "r"):
        for gradient in (grad_z, None):
            backward = backward_arguments(forward, grad_y, results, grad_residual_out=gradient, wants=wants)
            opcheck(_ops.norm_backward, backward, traced=is_traced and (wants, gradient is None) in TRACED)


@on_devices("op,backend,dropout_p", [
    (op, backend, p) for op in OPS for backend in ("eager", "aot_eager", "inductor") for p in (0.0, 0.3)
], few_on_cpu=True)  # fmt: skip
def test_add_compile(device, op, backend, dropout_p):
    """fullgraph: results and gradients of eager mode; with dropout, for the mask that was drawn"""
    torch.compiler.reset()
    case = Add((9, 96), op=op, dtype=bf16, dropout_p=dropout_p)
    tensors, grad_y, grad_z = add_inputs(case, device)

    def call(x, residual, weight, bias):
        return ADD_OPS[op](x, residual, weight, bias, 1e-5, dropout_p=dropout_p, return_dropout_mask=True)

    compiled = torch.compile(call, backend=backend, fullgraph=True)
    leaves = [t.detach().requires_grad_() for t in tensors.values()]
    y, z, mask = compiled(*leaves)
    gradients = torch.autograd.grad((y, z), leaves, (grad_y, grad_z))
    found = {"y": y.detach(), "z": z.detach(), "mask": mask, **dict(zip(tensors, gradients, strict=True))}
    check_add(case, tensors, grad_y, grad_z, found)
    assert dropout_p or mask.all()


@on_devices("rows,hidden_size,out_dtype", [(160, 8192, fp32), (20, 65544, None)], devices=("cuda",))
def test_nothing_is_written_beside_the_workspace(device, rows, hidden_size, out_dtype):
    """frozen parameters, a float32 stream, two kernels: sums for nobody went behind the memory between the two"""
    x = torch.randn(rows, hidden_size, dtype=bf16, device=device, requires_grad=True)
    residual = torch.randn(rows, hidden_size, device=device)
    weight = torch.ones(hidden_size, dtype=bf16, device=device)
    y, z = fused_add_layer_norm(x, residual, weight, torch.zeros_like(weight), out_dtype=out_dtype)
    gradients = torch.randn_like(y), torch.randn_like(z)
    torch.cuda.empty_cache()
    # Every other of a row of blocks as large as that memory is free, and so is taken for it
    kept = [torch.zeros(rows * hidden_size, device=device) for _ in range(15)]
    del kept[1::2]
    (gradient,) = torch.autograd.grad((y, z), x, gradients)
    assert gradient.isfinite().all() and gradient.any()
    assert not any(t.any() for t in kept)


# ---- dropout ---------------------------------------------------------------------------------------------------------


def drop(x, p, place, **options):
    """Dropout of x before, or of ones after a norm; the result is 0 where an element was dropped."""
    if place == "x":
        return fused_add_layer_norm(x, None, normalized_shape=x.shape[-1], dropout_p=p, **options)[1]
    bias = torch.ones(x.shape[-1], dtype=x.dtype, device=x.device)
    return OPS["layer_norm"](x, torch.zeros_like(bias), bias, dropout_p=p, **options)


PLACES = [(place,) for place in ("x", "y")]


@on_devices("place", PLACES)
def test_dropout_edges(device, place):
    """p = 0 and training=False: the bits of no dropout; p = 1: zeros, and zero gradients, also of what is not finite"""
    x = torch.randn(5, 33, device=device).requires_grad_()
    plain = drop(x, 0.0, place)
    state = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    assert same_bits(drop(x, 0.5, place, training=False), plain)
    assert torch.equal(state, torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state())
    gone = drop(x, 1.0, place)
    assert not gone.any()
    assert not torch.autograd.grad(gone.sum(), x)[0].any()
    infinite = torch.full_like(x, math.inf)
    if place == "x":
        assert not drop(infinite, 1.0, place).any()


@on_devices("place", PLACES)
def test_dropout_follows_the_seed(device, place):
    """torch.manual_seed repeats it; the next call draws anew"""
    x = torch.ones(64, 64, device=device)
    torch.manual_seed(5)
    first, second = drop(x, 0.5, place), drop(x, 0.5, place)
    torch.manual_seed(5)
    assert same_bits(drop(x, 0.5, place), first) and not torch.equal(first, second)


@on_devices("place", PLACES)
def test_dropout_backward_has_the_same_mask(device, place):
    """the gradient is scaled where the result was, and 0 where it was dropped"""
    x = torch.ones(64, 65, device=device, requires_grad=True)
    if place == "x":
        z = drop(x, 0.25, place)
        (gradient,) = torch.autograd.grad(z.sum(), x)
        assert torch.equal(gradient, z.detach())
    else:
        bias = torch.ones(65, device=device, requires_grad=True)
        y = OPS["rms_norm"](x, None, bias, dropout_p=0.25)
        (gradient,) = torch.autograd.grad(y.sum(), bias)
        torch.testing.assert_close(gradient, (y.detach() != 0).sum(0) / 0.75)


@on_devices("place,p", [(place, p) for place in ("x", "y") for p in (0.1, 0.5, 0.9)])
def test_dropout_statistics(device, place, p):
    """the dropped fraction in all, of every row and column, and of pairs of neighbours: within 5 standard deviations"""
    rows, cols = 1024, 512
    x = torch.ones(rows, cols, device=device)
    torch.manual_seed(11)
    masks = [(drop(x, p, place) != 0).double() for _ in range(2)]

    def within(found, expected, count, spread, what):
        deviation = ((found - expected).abs() / math.sqrt(spread / count)).max().item()
        assert deviation < 5.5, f"{what}: {deviation:.1f} standard deviations"

    keep, of_pairs = 1 - p, (1 - p) ** 2
    for mask in masks:
        within(mask.mean(), keep, rows * cols, keep * p, "all")
        within(mask.mean(1), keep, cols, keep * p, "rows")
        within(mask.mean(0), keep, rows, keep * p, "columns")
    spread = of_pairs * (1 - of_pairs)
    mask = masks[0]
    for step in (1, 2, 3, 4, 8, 32):  # independent of neighbours in a row, in a column, and of the other call
        within((mask[:, step:] * mask[:, :-step]).mean(), of_pairs, rows * (cols - step) / 3, spread, f"{step} columns")
        within((mask[step:] * mask[:-step]).mean(), of_pairs, (rows - step) * cols / 3, spread, f"{step} rows")
    within((masks[0] * masks[1]).mean(), of_pairs, rows * cols, spread, "two calls")
    assert len({tuple(row.tolist()) for row in mask}) == rows, "two rows have one mask"


def test_philox():
    """the function of csrc/philox.h: known answers of Philox4x32-7, and reference.py's and the kernel's are equal"""
    words = [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    zeros = torch.zeros(2, dtype=torch.int64)
    for k, number in enumerate(words + [(word & 0xFFFF) << 16 | word >> 16 for word in words]):
        at, above = number / 2**32, (number + 1) / 2**32  # the mask where p is exactly that number, and just above it
        for function in (reference.dropout_mask, _ops.dropout_mask):
            found = bool(function(zeros, 1, 8, at)[0, k]), bool(function(zeros, 1, 8, above)[0, k])
            assert found == (True, False), (function, k)
    for _ in range(4):
        philox = torch.randint(-(2**63), 2**63 - 1, (2,))
        for shape in ((1, 1), (7, 41), (300, 64), (5, 1003)):
            for p in (0.0, 1e-12, 0.4, 1.0):
                mask = _ops.dropout_mask(philox, *shape, p)
                assert torch.equal(mask, reference.dropout_mask(philox, *shape, p))
                assert p not in (0.0, 1.0) or torch.equal(mask, torch.full(shape, p == 0.0))


@pytest.mark.parametrize("p", [0.1, 0.5, 1 - 2**-10, 3 * 2**-18])
def test_two_elements_of_one_random_word(p):
    """columns k and k + 4 of an octet, which share a word: each is dropped as often as it should be, and both"""
    count = 1 << 22
    torch.manual_seed(3)
    philox = torch.randint(-(2**63), 2**63 - 1, (2,))
    drops = ~_ops.dropout_mask(philox, count // 8, 8, p)
    both = drops[:, :4] & drops[:, 4:]
    for found, chance in ((drops, p), (both, p * p)):
        deviation = (found.double().mean() - chance) / math.sqrt(chance * (1 - chance) / found.numel())
        assert abs(deviation) < 5, (chance, deviation)


@on_devices("place,reentrant", [(place, reentrant) for place in ("x", "y") for reentrant in (False, True)])
def test_dropout_and_checkpointing(device, place, reentrant):
    """recomputed in backward: the same mask"""
    x = torch.ones(32, 64, device=device, requires_grad=True)

    def function(x):
        if place == "x":
            y, z = fused_add_layer_norm(x, None, normalized_shape=64, dropout_p=0.5)
            return (z * z + y).sin()
        return OPS["layer_norm"](x + 1j.imag, None, x[0], dropout_p=0.5).sin()

    gradients = []
    for call in (function, lambda x: checkpoint(function, x, use_reentrant=reentrant)):
        torch.manual_seed(2)
        (gradient,) = torch.autograd.grad(call(x).sum(), x) if not reentrant else (None,)
        if reentrant:
            x.grad = None
            call(x).sum().backward()
            gradient = x.grad
        gradients.append(gradient)
    assert same_bits(*gradients) and gradients[0].any()


@on_devices("backend", [("aot_eager",), ("inductor",)])
def test_dropout_and_compiled_checkpointing(device, backend):
    """the same inside torch.compile: where z was dropped, so was the gradient"""
    torch.compiler.reset()

    def function(x):
        y, z = fused_add_layer_norm(x, None, normalized_shape=64, dropout_p=0.5)
        return z, (y.sin() * 0).sum() + z.exp().sum()

    def checkpointed(x):
        return checkpoint(function, x, use_reentrant=False)

    x = torch.ones(32, 64, device=device, requires_grad=True)
    z, loss = torch.compile(checkpointed, backend=backend, fullgraph=True)(x)
    (gradient,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(gradient, torch.where(z == 0, 0.0, 2 * z.exp()))
    assert (z == 0).any() and (z != 0).any()


@on_devices("place", PLACES, devices=("cuda",))
def test_dropout_in_a_cuda_graph(device, place):
    """each replay draws anew, and repeats with the seed"""
    x = torch.ones(64, 64, device=device)
    drop(x, 0.5, place)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = drop(x, 0.5, place)
    torch.cuda.synchronize()  # torch writes the seed on the capture's stream too, not ordered before the first replay's
    masks = []
    for _ in range(2):
        torch.cuda.manual_seed(4)
        for _ in range(2):
            graph.replay()
            masks.append(found.clone())
    assert not torch.equal(masks[0], masks[1]) and torch.equal(masks[0], masks[2]) and torch.equal(masks[1], masks[3])


@on_devices("place", PLACES)
def test_no_mask_is_saved(device, place):
    """what is saved for dropout is 16 bytes"""
    if not _backend.has_kernels_for(device):
        pytest.skip("PyTorch operations save a mask")
    x = torch.randn(64, 64, device=device, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        drop(x, 0.5, place)
    assert not any(t.dtype in (torch.bool, torch.uint8) for t in saved) and any(t.numel() == 2 for t in saved)


# ---- frozen statistics -----------------------------------------------------------------------------------------------


@on_devices("case", [Case(shape, op=op, dtype=dtype, weight_offset=o, cuda_only=shape[1] > 100_000)
                     for shape in ((19, 77), (7, 1), (40, 1024), (3, 20_000), (2, 140_000)) for op in OPS
                     for dtype in (fp16, bf16, fp32, fp64) for o in (0.0, 1.0)])  # fmt: skip
def test_frozen_statistics(device, case):
    """stats_grad=False: y and the parameters' gradients unchanged, grad_x = (w + o) * grad_y * rstd"""
    inputs = make_inputs(case, device)

    def frozen(case, x, weight, bias):
        return OPS[case.op](x, weight, bias, case.eps, weight_offset=case.weight_offset, stats_grad=False)

    plain, found = run(fused, case, inputs), run(frozen, case, inputs)
    for name in ("y", "weight", "bias"):
        if uses_kernels(device) or name == "y":
            torch.testing.assert_close(found[name], plain[name])
    x = inputs.x.double()
    centred = x - x.mean(-1, keepdim=True) if case.op == "layer_norm" else x
    rstd = (centred.square().mean(-1, keepdim=True) + case.eps).rsqrt()
    truth = (inputs.weight.double() + case.weight_offset) * inputs.grad_output.double() * rstd
    error = (found["x"].double() - truth).abs()
    stored, kept = torch.finfo(case.dtype), torch.finfo(fp32 if case.dtype != fp64 else fp64)
    assert (error <= (stored.eps + 16 * kept.eps) * truth.abs() + stored.eps * stored.tiny).all()
    assert not torch.allclose(found["x"].double(), plain["x"].double(), rtol=1e-2, atol=1e-3)


@on_devices("op", OPS)
def test_frozen_statistics_every_way(device, op):
    """NormFunction, the operator, compile, double backward, add: one gradient"""
    torch.compiler.reset()
    x, weight = torch.randn(5, 16, device=device, requires_grad=True), torch.randn(16, device=device)
    grad_output = torch.randn(5, 16, device=device)

    def gradient(function, **options):
        return torch.autograd.grad(function(x), x, grad_output, **options)[0]

    def frozen(x):
        return OPS[op](x, weight, eps=1e-5, stats_grad=False)

    def through_function(call, x):
        with through("function"):
            return call(x)

    wanted = gradient(frozen)
    compiled = torch.compile(frozen, backend="aot_eager", fullgraph=True)
    numpy = pytest.importorskip("numpy")
    ways = {
        "numpy's eps": gradient(lambda x: OPS[op](x, weight, eps=numpy.float64(1e-5), stats_grad=False)),
        "NormFunction": gradient(lambda x: through_function(frozen, x)),
        "compiled": gradient(compiled),
        "create_graph": gradient(frozen, create_graph=True).detach(),
        "add": gradient(lambda x: ADD_OPS[op](x, None, weight, eps=1e-5, stats_grad=False)[0]),
        "torch.func": torch.func.vjp(frozen, x.detach())[1](grad_output)[0],
        "reference": gradient(
            lambda x: reference.norm_forward(
                *operator_arguments(x, weight=weight, is_rms_norm=op == "rms_norm", stats_grad=False))[0]),
    }  # fmt: skip
    for way, found in ways.items():
        torch.testing.assert_close(found, wanted, msg=way)


# ---- activation ------------------------------------------------------------------------------------------------------


@on_devices("op,activation,dtype", [(op, a, dtype) for op in OPS for a in ACTIVATIONS for dtype in (bf16, fp32, fp64)])
def test_activation(device, op, activation, dtype):
    activates(device, op, activation, dtype, 77)


@on_devices("op,activation,dtype,hidden_size", [
    (op, a, dtype, n) for op in OPS for a in ACTIVATIONS for dtype in (bf16, fp16, fp32)
    for n in (8, 256, 512, 768, 1024, 1152, 1280, 1536, 1792, 2048, 2560, 3000, 3584, 4096, 5120, 6144, 7168, 8192,
              12288, 16384, 20000, 40000)
], devices=("cuda",))  # fmt: skip
def test_activation_of_many_sizes(device, op, activation, dtype, hidden_size):
    activates(device, op, activation, dtype, hidden_size)


def activates(device, op, activation, dtype, hidden_size):
    """activation of the unrounded norm, rounded once, plain and with a residual: against fp64"""
    case = Case((19, hidden_size), op=op, dtype=dtype)
    check_fusion(Fusion(case, activation=activation), device)
    check_fusion(Fusion(case, kind="add", activation=activation), device)
    check_fusion(Fusion(case, kind="add", activation=activation, residual=dtype, uses=("y", "z")), device)


@on_devices("op,dtype,activation,p,given,rows,hidden_size", [
    (op, dtype, activation, 0.3, given, 23, n) for op in OPS for dtype in (bf16, fp16, fp32)
    for activation in (None, *ACTIVATIONS) for given in ("nothing", "weight", "weight_offset", "fp32")
    for n in (8, 264, 520, 768, 1000, 1152, 1280, 1544, 1800, 2312, 2560, 2568, 3080, 3584, 4104, 5120, 6152, 8200,
              16384)
] + [  # many turns
    (op, dtype, activation, p, "weight_offset", rows, n) for op in OPS for dtype in (bf16, fp32)
    for activation, p in (("gelu", 0.0), ("silu", 0.3))
    for rows, n in ((20_000, 256), (9000, 512), (7000, 768), (9000, 1024), (12_000, 1056), (12_000, 1152), (5000, 1536),
                    (5000, 2048), (3001, 2560), (3001, 3072), (5001, 3592), (9001, 4096), (2001, 6144), (5001, 8192),
                    (2501, 12288), (2501, 16384), (601, 65536))
], devices=("cuda",))  # fmt: skip
def test_activation_and_dropout_of_many_sizes(device, op, dtype, activation, p, given, rows, hidden_size):
    activates_and_drops(device, op, dtype, activation, p, given, rows, hidden_size)


@on_devices("op,dtype,activation,given,rows,hidden_size", [
    (op, dtype, activation, given, rows, n) for op in OPS for dtype in (bf16, fp16, fp32, fp64)
    for activation in (None, *ACTIVATIONS) for given in ("nothing", "weight", "weight_offset", "fp32")
    for rows, n in ((23, 77), (5, 1000)) if dtype != fp64 or given != "fp32"
] + [
    ("layer_norm", bf16, "gelu", "weight_offset", *size) for size in ((3000, 40), (70, 9000), (2, 70_000), (9, 1))
], few_on_cpu=True)  # fmt: skip
def test_activation_and_dropout(device, op, dtype, activation, given, rows, hidden_size):
    activates_and_drops(device, op, dtype, activation, 0.3, given, rows, hidden_size)


def activates_and_drops(device, op, dtype, activation, p, given, rows, hidden_size):
    """what is kept of an activation of the norm, scaled, with and without weight, bias, weight_offset: against fp64"""
    parameters = {"nothing": (None, None), "weight": (X, None), "weight_offset": (X, X), "fp32": (fp32, fp32)}[given]
    case = Case((rows, hidden_size), op=op, dtype=dtype, weight=parameters[0], bias=parameters[1],
                weight_offset=1.0 if given == "weight_offset" else 0.0)  # fmt: skip
    fusion = Fusion(case, seed=rows + hidden_size, activation=activation, dropout_p=p)
    _, found = check_fusion(fusion, device)
    if p > 0:
        kept = fusion.keeps(device)
        assert not found["y"][~kept].any()
        assert abs(kept.double().mean() - (1 - p)) < 6 * math.sqrt(p * (1 - p) / kept.numel())


@on_devices("of,activation,dtype", [
    (of, a, dtype) for of, names in (("y", ACTIVATIONS), ("gate", filter(None, GATES))) for a in names
    for dtype in (bf16, fp16)
])  # fmt: skip
def test_activation_of_every_number(device, of, activation, dtype):
    """of every 16-bit number, as the bias of a norm whose weight is 0, or the gate of a norm that is 1: within half a
    unit of the result and 4e-7, its derivative and 5e-6"""
    if not _backend.has_kernels_for(device):
        pytest.skip("PyTorch's activations")
    t = torch.arange(-(1 << 15), 1 << 15, device=device).to(torch.int16).view(dtype)
    t = t[~t.isinf()]
    wide = t.double().requires_grad_()
    exact = GATES[activation](wide)
    (slope,) = torch.autograd.grad(exact.sum(), wide)
    found = []
    for part in t.split(8192):  # rows that kernels have a stage for, and the last
        given, x = part.clone().requires_grad_(), torch.ones(1, len(part), device=device, dtype=dtype)
        if of == "y":
            y = OPS["layer_norm"](x, torch.zeros_like(x[0]), given, activation=activation)
        else:
            y = GATED_OPS["rms_norm"](x, given[None], eps=0.0, activation=activation)
        found.append((y[0].detach(), torch.autograd.grad(y.sum(), given)[0]))

    def is_close(found, exact, off):
        rounded = exact.detach().to(dtype)
        assert torch.equal(found.isnan(), rounded.isnan()) and not found.isinf().any()
        unit = (rounded.abs().view(torch.int16) + 1).view(dtype).double() - rounded.abs().double()
        beyond = ((found.double() - exact).abs() - 0.501 * unit).nan_to_num(0) / (1 + exact.abs()).nan_to_num(1)
        assert beyond.max() <= off, (beyond.max().item(), t[beyond.argmax()].item(), found[beyond.argmax()].item())

    y, gradients = (torch.cat(parts) for parts in zip(*found, strict=True))
    is_close(y, exact, 4e-7)
    usual = ~(t.abs() > 1e4)  # beyond, derivatives overflow as PyTorch's do
    is_close(gradients[usual], slope[usual], 5e-6)


@on_devices("op", OPS)
def test_activation_gradcheck(device, op):
    """gradcheck and gradgradcheck"""
    tensors = [torch.randn(*shape, device=device, dtype=fp64, requires_grad=True) for shape in ((3, 5), (5,), (5,))]
    for activation in ("gelu", "gelu_tanh", "silu"):
        assert gradcheck(lambda *t, a=activation: OPS[op](*t, activation=a), tensors)
        assert gradgradcheck(lambda *t, a=activation: OPS[op](*t, activation=a), tensors)
    with pytest.raises(ValueError, match="activation must be one of relu, gelu, gelu_tanh, silu, or None, got 'tanh'"):
        OPS[op](*tensors, activation="tanh")
    with pytest.raises(ValueError, match="activation must be one of relu, gelu, gelu_tanh, silu, or None"):
        OPS[op](*tensors, activation="sigmoid")  # for gates


@on_devices("op,dtype", [(op, dtype) for op in OPS for dtype in (bf16, fp32)], devices=("cpu",))
def test_stages_and_threads(device, op, dtype):
    """what surrounds a norm on the CPU: the same bits whatever the number of threads, and of a row without others"""
    x, residual, grad_y = (torch.randn(6, 100, 136).to(dtype) for _ in range(3))
    weight, bias = torch.rand(136) + 0.5, torch.randn(136) / 4
    scale, shift, gate = torch.randn(6, 1, 3 * 136).to(dtype).chunk(3, -1)

    def activated(x, weight, bias):
        torch.manual_seed(3)
        return OPS[op](x, weight, bias, 1e-5, activation="silu", dropout_p=0.2)

    def efficient(x, weight, bias):
        return OPS[op](x, weight, bias, 1e-5, memory_efficient=True)

    def gated(x, residual, scale, shift, gate):
        return ADAPTIVE_OPS[op](x, scale, shift, gate=gate, residual=residual, eps=1e-5)[0]

    def gated_norm(x, gate, weight, bias):
        return GATED_OPS[op](x, gate, weight, bias, 1e-5)

    def norm_of_gated(x, gate, weight, bias):
        return GATED_OPS[op](x, gate, weight, bias, 1e-5, norm_before_gate=False, group_size=34)

    def for_each_head(x, weight, bias):
        heads = (t.expand(50, 136) * torch.linspace(1, 2, 50)[:, None] for t in (weight, bias))
        return OPS[op](x.unflatten(1, (2, 50)), *heads, 1e-5, normalized_shape=136).flatten(1, 2)

    def call(norm, tensors, samples):
        leaves = [(t[:samples] if t.dim() == 3 else t).detach().requires_grad_() for t in tensors]
        y = norm(*leaves)
        return y, *torch.autograd.grad(y, leaves, grad_y[:samples])

    threads = torch.get_num_threads()
    modulated_by, beside_gate = (x, residual, scale, shift, gate), (x, residual, weight, bias)
    for norm, tensors in (
        (activated, (x, weight, bias)), (efficient, (x, weight, bias)), (gated, modulated_by),
        (gated_norm, beside_gate), (norm_of_gated, beside_gate), (for_each_head, (x, weight, bias)),
    ):  # fmt: skip
        try:
            found = []
            for number in (1, 2, 3):
                torch.set_num_threads(number)
                found.append(call(norm, tensors, 6))
        finally:
            torch.set_num_threads(threads)
        assert all(same_bits(one, of) for other in found[1:] for one, of in zip(found[0], other, strict=True))
        fewer = call(norm, tensors, 2)
        assert same_bits(fewer[0], found[0][0][:2]) and same_bits(fewer[1], found[0][1][:2])


@pytest.mark.skipif(_backend.extension is None, reason="no extension")
def test_activations_of_the_extension():
    """the extension has the activations that the functions have"""
    assert tuple(_backend.extension.activations) == reference.ACTIVATION_NAMES
    assert tuple(_backend.extension.option_names) == reference.Options._fields


# ---- modulation ------------------------------------------------------------------------------------------------------

MODULATIONS = {"token": (2, 5, 48), "sample": (2, 48), "sample kept": (2, 1, 48), "all": (48,), "position": (1, 5, 48)}


def modulated(op, x, scale, shift, gate=None, residual=None):
    """The definition; scale, shift and gate of x's number of dimensions."""
    z = x if residual is None else residual + (x if gate is None else gate * x)
    norm = F.layer_norm(z, x.shape[-1:], eps=1e-5) if op == "layer_norm" else F.rms_norm(z, x.shape[-1:], eps=1e-5)
    return norm * (1 + scale) + shift, z


def adaptive(op, shape, shapes, dtype=bf16, modulation_dtype=None, residual=None, gate=False, of_one_projection=True):
    """A modulated norm whose scale, shift and gate have the shape `shapes`, as columns of one projection."""
    names = ("scale", "shift", "gate") if gate else ("scale", "shift")
    hidden_size, memory = shape[-1], {}
    if of_one_projection:
        gaps = (0,) * (len(shapes) - 1) + ((len(names) - 1) * hidden_size,)
        memory = {name: Memory(offset=i * hidden_size, gaps=gaps) for i, name in enumerate(names)}
    return Fusion(
        Case(shape, op=op, dtype=dtype, weight=None, bias=None), kind="adaptive", residual=residual, memory=memory,
        modulations={name: (shapes, modulation_dtype or dtype) for name in names},
        uses=("y", "z") if residual else ("y",),
    )  # fmt: skip


@on_devices("op,kind,dtype,residual", [
    (op, kind, dtype, residual) for op in OPS for kind in MODULATIONS
    for dtype, residual in ((fp32, None), (fp32, fp32), (fp64, fp64), (bf16, None), (bf16, bf16), (bf16, fp32))
])  # fmt: skip
def test_modulation(device, op, kind, dtype, residual):
    """adaptive norms against fp64: y, z and all gradients, twice the same bits"""
    fusion = adaptive(op, (2, 5, 48), MODULATIONS[kind], dtype, None, residual, bool(residual), of_one_projection=False)
    given, found = check_fusion(fusion, device)
    again = run_fusion(fusion, given, tuple(name for name in ARGUMENTS if name in given))
    assert all(same_bits(one, again[name]) for name, one in found.items())


PARTS = [(3, 37, 768), (3, 37, 77), (2, 9, 1), (300, 8, 16), (5, 16, 260), (2, 8, 12345), (2100, 1, 40)]
CUDA_PARTS = [(3, 37, n) for n in (8, 128, 256, 769, 1024, 1536, 2048, 2056, 3072, 4096, 4097, 5120, 8192, 16384)]
CUDA_PARTS += [(2, 8, n) for n in (24576, 65536, 131072, 262152)]
CUDA_PARTS += [(2, 3000, 1024), (600, 8, 512), (140, 64, 4096), (3, 700, 8192), (65535, 8, 8)]
# several rows a block (kSegmentIterations of launch_plan.h)
CUDA_PARTS += [(16, 1100, 1024), (37, 1000, 1152), (5, 7001, 512), (8, 2203, 1792), (9, 2000, 2304), (12, 731, 3584)]


@on_devices("op,dtype,residual,parts", [
    (op, dtype, residual, parts) for op in OPS for dtype, residual in ((bf16, None), (fp32, None), (bf16, fp32))
    for parts in PARTS
] + [(op, fp64, None, (3, 9, 40)) for op in OPS])  # fmt: skip
def test_modulated_parts(device, op, dtype, residual, parts):
    modulated_parts(device, op, dtype, residual, parts)


@on_devices("op,dtype,residual,parts", [
    (op, dtype, residual, parts) for op in OPS for dtype, residual in ((bf16, None), (fp32, None), (bf16, fp32))
    for parts in CUDA_PARTS
], devices=("cuda",))  # fmt: skip
def test_modulated_parts_of_many_sizes(device, op, dtype, residual, parts):
    modulated_parts(device, op, dtype, residual, parts)


def modulated_parts(device, op, dtype, residual_dtype, parts):
    """scale and shift for each sample, columns of one projection: the bits of a plain norm with weight 1 + scale for
    each sample, where there is one; gradients against fp64, twice the same bits"""
    n, tokens, hidden_size = parts
    fusion = adaptive(op, parts, (n, hidden_size), dtype, residual=residual_dtype)
    given, found = check_fusion(fusion, device)
    again = run_fusion(fusion, given, tuple(name for name in ARGUMENTS if name in given))
    assert all(same_bits(one, again[name]) for name, one in found.items())

    def one(x, scale, shift, residual):
        """Of one sample, by the norms that have no modulation."""
        if residual is None:
            return OPS[op](x, scale, shift, 1e-5, weight_offset=1.0), None
        return ADD_OPS[op](x, residual, scale, shift, 1e-5, weight_offset=1.0)

    for i in range(n) if n < 10 else (0, n // 2, n - 1):
        x = given["x"][i].detach().requires_grad_()
        residual = None if residual_dtype is None else given["residual"][i]
        y, z = one(x, given["scale"][i], given["shift"][i], residual)
        assert same_bits(found["y"][i], y) and (z is None or same_bits(found["z"][i], z))
        if device != "cuda" or tokens > 1:  # else by a kernel of its own, in another order
            outputs, gradients = ((y,), ("grad_output",)) if z is None else ((y, z), ("grad_output", "grad_z"))
            (grad_x,) = torch.autograd.grad(outputs, x, [given[name][i] for name in gradients])
            assert same_bits(found["x"][i], grad_x)


@on_devices("op,dtype,hidden_size", [
    (op, dtype, n) for op in OPS for dtype in (fp16, bf16, fp32) for n in (64, 768, 1152, 2048, 4096)
])  # fmt: skip
def test_modulation_does_not_depend_on_the_batch(device, op, dtype, hidden_size):
    """y and z of few tokens, which have kernels of their own, and of many: the same bits"""
    if not uses_kernels(device):
        pytest.skip("a promise of the compiled kernels: PyTorch's sums depend on the number of rows")
    tokens = (CPU_ELEMENTS if device == "cpu" else CUDA_ELEMENTS // 4) // (3 * hidden_size)
    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(3, tokens, hidden_size, generator=generator).to(device, dtype) for _ in range(2))
    scale, shift, gate = torch.randn(3, 1, 3 * hidden_size, generator=generator).to(device, dtype).chunk(3, -1)
    for stage in ({}, {"residual": residual}, {"residual": residual, "gate": gate}):
        many = ADAPTIVE_OPS[op](x, scale, shift, eps=1e-5, **stage)
        few_rows = {name: t[:, :2] if t is residual else t for name, t in stage.items()}
        few = ADAPTIVE_OPS[op](x[:, :2], scale, shift, eps=1e-5, **few_rows)
        for a, b in zip(few if stage else (few,), many if stage else (many,), strict=True):
            assert same_bits(a, b[:, :2]), list(stage)


@on_devices("dtype,hidden_size", [(dtype, n) for dtype in (bf16, fp32) for n in (768, 1152)], devices=("cuda",))
def test_stages_are_one_kernel(device, dtype, hidden_size):
    """load stage and epilogue, alone and together, also with a stream of float32 and Llama's rounding"""
    x, residual = (torch.randn(8, hidden_size, device=device, dtype=dtype) for _ in range(2))
    weight, stream = torch.ones(hidden_size, device=device, dtype=dtype), residual.float()
    wide = weight.float()
    calls = {
        "activation": lambda: OPS["layer_norm"](x, weight, activation="gelu"),
        "float32 weight": lambda: OPS["layer_norm"](x, wide, activation="gelu"),
        "residual": lambda: ADD_OPS["layer_norm"](x, residual, weight),
        "residual and activation": lambda: ADD_OPS["rms_norm"](x, residual, weight, activation="silu"),
        "float32 stream": lambda: ADD_OPS["rms_norm"](x, stream, weight, residual_dtype=fp32),
        "all of a float32 stream": lambda: ADD_OPS["layer_norm"](
            x, stream, wide, residual_dtype=fp32, activation="relu"
        ),
    }
    if dtype == bf16:
        calls["rounding"] = lambda: OPS["rms_norm"](x, weight, rounding="llama", activation="silu")
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
            call()
            torch.cuda.synchronize()
        kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        assert len(kernels) == 1, (name, kernels)


@on_devices("op,dtype,residual_dtype", [
    (op, *dtypes) for op in OPS for dtypes in ((bf16, None), (bf16, fp32), (fp32, fp32), (fp64, None))
], devices=("cpu",))  # fmt: skip
def test_modulation_of_each_token(device, op, dtype, residual_dtype):
    """on the CPU part of the kernel: the bits of as many samples of one token, whatever the number of threads"""
    if not _backend.has_kernels_for(device):
        pytest.skip("no kernels here")
    torch.manual_seed(0)
    x, scale, shift, grad_y = (torch.randn(2, 1100, 40).to(dtype) for _ in range(4))
    residual = None if residual_dtype is None else torch.randn(2, 1100, 40).to(residual_dtype)

    def call(*tensors):
        inputs = [t.detach().requires_grad_() for t in tensors]
        of = dict(zip(("x", "scale", "shift", "residual"), inputs, strict=False))
        found = ADAPTIVE_OPS[op](**of, eps=1e-5)
        y = found if residual is None else found[0]
        return y, *torch.autograd.grad(y, inputs, grad_y.view(y.shape))

    tensors = [t for t in (x, scale, shift, residual) if t is not None]
    samples = call(*(t.view(-1, 1, 40) for t in tensors))
    threads = torch.get_num_threads()
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            for one, of in zip(call(*tensors), samples, strict=True):
                assert same_bits(one, of.view(x.shape))
    finally:
        torch.set_num_threads(threads)


TOKEN_DTYPES = [  # of x, of scale, shift and gate, of residual
    (bf16, bf16, None), (fp16, fp16, fp16), (bf16, fp32, None), (bf16, fp32, bf16), (fp16, fp16, fp32),
    (fp32, fp32, fp32), (fp32, bf16, None), (fp32, fp16, fp32), (fp64, fp64, fp64)
]  # fmt: skip


@on_devices("op,x_dtype,dtype,residual_dtype,rows,hidden_size", [
    (op, *dtypes, *size) for op in OPS for dtypes in TOKEN_DTYPES for size in ((19, 77), (19, 1000), (3, 1), (2100, 8))
])  # fmt: skip
def test_tokens(device, op, x_dtype, dtype, residual_dtype, rows, hidden_size):
    modulated_tokens(device, op, x_dtype, dtype, residual_dtype, rows, hidden_size)


@on_devices("op,x_dtype,dtype,residual_dtype,rows,hidden_size", [
    (op, *dtypes, 37, n) for op in OPS for dtypes in TOKEN_DTYPES
    for n in (4, 20, 256, 260, 264, 512, 520, 768, 1024, 1032, 1280, 1536, 2048, 2056, 4096, 4104, 4097, 8192, 8200,
              12345, 16384, 20000, 40000)
] + [
    (op, *dtypes, rows, n) for op in OPS for dtypes in TOKEN_DTYPES
    for rows, n in ((70_001, 16), (70_001, 7), (5001, 512), (4001, 1152), (2001, 4096), (3, 131_080), (2, 262_152))
], devices=("cuda",))  # fmt: skip
def test_tokens_of_many_sizes(device, op, x_dtype, dtype, residual_dtype, rows, hidden_size):
    modulated_tokens(device, op, x_dtype, dtype, residual_dtype, rows, hidden_size)


def modulated_tokens(device, op, x_dtype, dtype, residual_dtype, rows, hidden_size):
    """scale, shift and gate for each token, columns of one projection: against fp64; twice, and whatever is wanted, the
    same bits; those of y are the plain norm's. What is not written is NaN"""
    shape = (1, rows, hidden_size)
    fusion = adaptive(op, shape, shape, x_dtype, dtype, residual_dtype, gate=bool(residual_dtype))
    given, found = check_fusion(fusion, device)
    wants = tuple(name for name in ARGUMENTS if name in given)
    for wanted in (wants, *((name,) for name in wants)):
        with poisoned():
            again = run_fusion(fusion, given, wanted)
        assert all(same_bits(found[name], one) for name, one in again.items()), wanted
    if not residual_dtype and hidden_size <= 16384:
        for row in (0, rows // 2, rows - 1):
            parameters = [given[name][0, row].to(torch.promote_types(dtype, x_dtype)) for name in ("scale", "shift")]
            plain = OPS[op](given["x"][:, row], *parameters, 1e-5, weight_offset=1.0)
            assert same_bits(found["y"][:, row], plain)


@on_devices("op", OPS)
def test_gradient_of_each_shift(device, op):
    """that of y to the bit, also of one that is expanded, and beside a residual"""
    x, scale, shift, residual = (torch.randn(5, 16, device=device, requires_grad=True) for _ in range(4))
    grad_y = torch.randn(5, 16, device=device)
    for options in ({}, {"residual": residual}, {"residual": residual, "gate": torch.ones_like(x)}):
        y = ADAPTIVE_OPS[op](x, scale, shift, **options, eps=1e-5)
        y = y[0] if options else y
        (found,) = torch.autograd.grad(y, shift, grad_y, retain_graph=True)
        assert same_bits(found, grad_y)
        assert torch.autograd.grad(y.sum(), shift, retain_graph=True)[0].eq(1).all()
        y.sum().backward()
    assert shift.grad.eq(3).all()


@on_devices("op,dtype,residual_dtype,hidden_size", [
    (op, *dtypes, n) for op in OPS for dtypes in ((bf16, bf16), (fp16, fp32), (fp32, fp32), (fp64, fp64))
    for n in (768, 77, 4096, 20000)
], few_on_cpu=True)  # fmt: skip
def test_gated_parts(device, op, dtype, residual_dtype, hidden_size):
    gated_parts(device, op, dtype, residual_dtype, 8, hidden_size)


@on_devices("op,dtype,residual_dtype,hidden_size", [
    (op, *dtypes, n) for op in OPS
    for dtypes in ((bf16, bf16), (fp16, fp16), (bf16, fp32), (fp16, fp32), (fp32, fp32))
    for n in (16, 256, 260, 264, 512, 1024, 1152, 1536, 2048, 3072, 5120, 8192, 32768, 65536)
], devices=("cuda",))  # fmt: skip
def test_gated_parts_of_many_sizes(device, op, dtype, residual_dtype, hidden_size):
    gated_parts(device, op, dtype, residual_dtype, 700 if hidden_size < 4096 else 100, hidden_size)


def gated_parts(device, op, dtype, residual_dtype, tokens, hidden_size):
    """z = residual + gate * x, rounded once, and what a call without gate makes of it; gradients against float64"""
    fusion = adaptive(op, (2, 3, tokens, hidden_size), (2, 1, 1, hidden_size), dtype, None, residual_dtype, gate=True)
    given, found = check_fusion(fusion, device)
    x, residual, gate = (given[name] for name in ("x", "residual", "gate"))
    wide = fp64 if dtype == fp64 else fp32
    if device == "cuda" or residual_dtype != wide:  # else perhaps by fma, whose product is not rounded
        composed = (residual.to(wide) + x.to(wide) * gate.to(wide)).to(residual_dtype)
        assert same_bits(found["z"], composed)
    of_z = ADAPTIVE_OPS[op](torch.zeros_like(x), given["scale"], given["shift"], residual=found["z"], eps=1e-5)[0]
    assert same_bits(found["y"], of_z)
    wants = tuple(name for name in ARGUMENTS if name in given)
    # Where no kernel of CUDA has the gate, sums over rows have another order if the gradient of x is not wanted
    # (docs/reliability.md, "Not promised")
    is_stage = hidden_size <= 32768 and hidden_size * x.element_size() % 16 == 0
    for name in wants:  # each alone, and all but it
        for wanted in ((name,), tuple(other for other in wants if other != name)):
            again = run_fusion(fusion, given, wanted)
            for other, one in again.items():
                if other not in ("y", "z") and "x" not in wanted and device == "cuda" and not is_stage:
                    judge_fusion(fusion, given, {"z": again["z"], other: one})
                else:
                    assert same_bits(one, found[other]), (other, wanted)
    fusion = replace(fusion, uses=("z",))
    judge_fusion(fusion, given, {**run_fusion(fusion, given, ("x", "residual", "gate"))})


@on_devices("op", OPS)
def test_operators_with_all_stages(device, op):
    """norm_forward and norm_backward with an activation, dropout of y, a gate: opcheck, compile, double backward"""
    if not _backend.has_kernels_for(device):
        pytest.skip("no kernels here")
    torch.compiler.reset()
    tensors = [torch.randn(2, 9, 16, device=device, requires_grad=True) for _ in range(2)]
    rows = [torch.randn(2, 1, 16, device=device, requires_grad=True) for _ in range(3)]
    is_rms_norm = op == "rms_norm"
    philox = torch.tensor([5, 6], device=device)
    weight, bias = (row[0, 0].detach().requires_grad_() for row in rows[:2])
    calls = [
        operator_arguments(tensors[0], residual, None, weight, bias, philox, is_rms_norm=is_rms_norm, activation=kind,
                           dropout_p=0.25, drops_y=True, residual_dtype=residual_dtype)
        for kind in range(5) for residual, residual_dtype in ((None, None), (tensors[1], fp32))
    ]  # fmt: skip
    scale, shift, gate = rows
    calls.append(operator_arguments(*tensors, gate, scale, shift, weight_offset=1.0, is_rms_norm=is_rms_norm,
                                    residual_dtype=fp32))  # fmt: skip
    for i, forward in enumerate(calls):
        traced = i >= len(calls) - 3  # one activation, with and without a residual, and the gate
        opcheck(_ops.norm_forward, forward, traced)
        with torch.no_grad():
            results = _ops.norm_forward(*forward)
        opcheck(_ops.norm_backward, backward_arguments(forward, torch.randn_like(results[0]), results), traced)

    def gated(x, residual, scale, shift, gate):
        return ADAPTIVE_OPS[op](x, scale, shift, gate=gate, residual=residual, eps=1e-5)

    def activated(x, weight, bias):
        return OPS[op](x, weight, bias, 1e-5, activation="gelu")

    for call, leaves in ((gated, (*tensors, *rows)), (activated, (tensors[0], weight, bias))):
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        for one, two in zip(compiled(*leaves), call(*leaves), strict=True):
            assert same_bits(one, two)
        few = [t.detach().double()[..., :4] for t in leaves]
        wide = [(t[:, :3] if t.dim() == 3 else t).clone().requires_grad_() for t in few]
        assert gradcheck(call, wide) and gradgradcheck(call, wide)


@on_devices("op", OPS)
def test_gradients_of_tensors_that_depend_on_each_other(device, op):
    """x a function of residual or of weight, one tensor as two arguments: the same gradients with create_graph"""
    r, wide = (torch.randn(*shape, device=device, dtype=fp64, requires_grad=True) for shape in ((2, 5, 8), (3, 2, 8)))
    scale, shift, gate = wide.unbind()
    weight = torch.randn(8, device=device, dtype=fp64, requires_grad=True)
    column = torch.arange(1.0, 6, device=device, dtype=fp64)[:, None].cos()

    def gated(r, wide):
        scale, shift, gate = wide.unbind()
        y, z = ADAPTIVE_OPS[op](r.sin(), scale, shift, gate=gate, residual=r, eps=1e-5)
        return y.sin() + z.cos()

    def twice(r, wide):
        y, z = ADAPTIVE_OPS[op](r, wide[0], wide[0], gate=wide[0], residual=r, eps=1e-5)
        return y.sin() + z.cos()

    def activated(weight):
        return OPS[op](weight * column, weight, weight, 1e-5, activation="gelu")

    def truth(call):
        """The same by PyTorch operations."""

        def norm(z):
            return (
                F.layer_norm(z, z.shape[-1:], eps=1e-5) if op == "layer_norm" else F.rms_norm(z, z.shape[-1:], eps=1e-5)
            )

        if call is activated:
            return lambda weight: F.gelu(norm(weight * column) * weight + weight)

        def composed(r, wide):
            scale, shift, gate = (wide[0],) * 3 if call is twice else wide.unbind()
            z = r + gate[:, None] * (r if call is twice else r.sin())
            return (norm(z) * (1 + scale[:, None]) + shift[:, None]).sin() + z.cos()

        return composed

    for call, leaves in ((gated, (r, wide)), (twice, (r, wide)), (activated, (weight,))):
        wanted = torch.autograd.grad(truth(call)(*leaves).cos().sum(), leaves)
        for create_graph in (False, True):
            found = torch.autograd.grad(call(*leaves).cos().sum(), leaves, create_graph=create_graph)
            for one, two in zip(found, wanted, strict=True):
                torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)
        assert gradgradcheck(call, leaves)


@on_devices("op", OPS)
def test_only_residual_out(device, op):
    """y is not used: the gradients of the sum alone, of rows that have no finite norm too"""
    weight = torch.ones(8, device=device, requires_grad=True)
    shift = torch.zeros(2, 8, device=device)
    for value in (math.inf, 0.0):
        x = torch.randn(2, 3, 8, device=device)
        x[0, 0] = value
        leaves = [t.requires_grad_() for t in (x, torch.zeros_like(x), torch.full((2, 8), 2.0, device=device))]
        _, z = ADD_OPS[op](*leaves[:2], weight, eps=0.0)
        found = torch.autograd.grad(z.sum(), (*leaves[:2], weight), allow_unused=True)
        assert same_bits(found[0], torch.ones_like(x)) and same_bits(found[1], torch.ones_like(x))
        assert found[2] is None
        torch.manual_seed(0)
        _, z, mask = ADD_OPS[op](*leaves[:2], weight, eps=0.0, dropout_p=0.5, return_dropout_mask=True)
        assert same_bits(torch.autograd.grad(z.sum(), x)[0], 2.0 * mask)
        _, z = ADAPTIVE_OPS[op](x, shift, shift, gate=leaves[2], residual=leaves[1], eps=0.0)
        found = torch.autograd.grad(z.sum(), leaves)
        assert same_bits(found[0], torch.full_like(x, 2.0)) and same_bits(found[1], torch.ones_like(x))
        torch.testing.assert_close(found[2], x.detach().sum(1))
    _, z = ADAPTIVE_OPS[op](
        *(t.detach() for t in (x, shift)), shift.clone().requires_grad_(), gate=shift, residual=x.detach()
    )
    assert not z.requires_grad


@on_devices("op", OPS)
def test_tangents_in_backward(device, op):
    """forward over reverse: a tangent on the gradient of y goes through activation, dropout of y and gate"""
    x, weight, tangent = torch.randn(3, 2, 8, device=device).double()
    weight = weight[0].abs() + 0.5
    rows = torch.randn(3, 2, 8, device=device).double()

    def activated(x, weight):
        torch.manual_seed(0)
        return OPS[op](x, weight, activation="gelu", dropout_p=0.3)

    def gated(x, weight):
        return ADAPTIVE_OPS[op](x[:, None], *rows[:2], gate=rows[2], residual=x[:, None] * weight)[0][:, 0]

    for call in (activated, gated):
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        y, grad_y = call(*leaves), torch.randn(2, 8, device=device).double()
        with torch.autograd.forward_ad.dual_level():
            along = torch.autograd.forward_ad.make_dual(grad_y, tangent)
            found = torch.autograd.grad(y, leaves, along, retain_graph=True)
            found = [torch.autograd.forward_ad.unpack_dual(t).tangent for t in found]
        wanted = torch.autograd.grad(y, leaves, tangent)  # it is linear
        for one, two in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, two)


@on_devices("op", OPS)
def test_what_a_gate_saves(device, op):
    """x and z of x's size, not residual, which may change before backward"""
    if not _backend.has_kernels_for(device):
        pytest.skip("PyTorch operations save what they save")
    x, residual = torch.randn(2, 2, 3, 8, device=device).unbind()
    rows = torch.randn(3, 2, 8, device=device).requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        y, z = ADAPTIVE_OPS[op](x.requires_grad_(), *rows[:2], gate=rows[2], residual=residual)
    assert x.data_ptr() in saved and z.data_ptr() in saved and residual.data_ptr() not in saved
    before = torch.autograd.grad(y.sum(), rows, retain_graph=True)[0]
    residual.add_(1)
    assert same_bits(torch.autograd.grad(y.sum(), rows)[0], before)


@on_devices("op", OPS)
def test_modulation_beside_autocast(device, op):
    """scale, shift and gate of 16 bits beside float32 x, as of a projection under autocast: as if they were widened"""
    x, residual = torch.randn(2, 2, 3, 8, device=device)
    rows = torch.randn(3, 2, 8, device=device).to(bf16).requires_grad_()
    wide = rows.float()
    found, wanted = (ADAPTIVE_OPS[op](x, t[0], t[1], gate=t[2], residual=residual, eps=1e-5) for t in (rows, wide))
    assert all(same_bits(one, two) for one, two in zip(found, wanted, strict=True))
    (gradient,) = torch.autograd.grad(found[0].sum(), rows)
    assert gradient.dtype == bf16


@on_devices("op", OPS, devices=("cpu",))
def test_dynamic_sizes(device, op):
    """one graph for every batch: export of modulated norms, compiled dropout, a double backward traced with symbols"""
    torch.compiler.reset()

    class Modulated(torch.nn.Module):
        def forward(self, x, scale, shift):
            return ADAPTIVE_OPS[op](x, scale, shift, eps=1e-5)

    class Dropped(torch.nn.Module):
        def forward(self, x):
            return ADD_OPS[op](x, None, eps=1e-5, normalized_shape=8, dropout_p=0.5, return_dropout_mask=True)

    def tensors(batch):
        return torch.randn(batch, 3, 8), torch.randn(batch, 8), torch.randn(batch, 8)

    for strict, size in ((False, torch.export.Dim("batch")), (True, torch.export.Dim.AUTO)):
        program = torch.export.export(Modulated(), tensors(4), dynamic_shapes=({0: size},) * 3, strict=strict)
        given = tensors(6)
        torch.testing.assert_close(program.module()(*given), Modulated()(*given))

    def drops(call, x):
        """Whether z is what is kept of x, twice, and y its norm."""
        y, z, mask = call(x)
        assert same_bits(z, 2 * x * mask) and mask.any() and not mask.all()
        torch.testing.assert_close(y, OPS[op](z, eps=1e-5, normalized_shape=8))

    program = torch.export.export(Dropped(), tensors(4)[:1], dynamic_shapes=({0: torch.export.Dim("batch")},))
    drops(program.module(), torch.randn(6, 3, 8))

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(Dropped(), backend=counter, fullgraph=True)
    for batch in range(2, 8):
        drops(compiled, torch.randn(batch, 3, 8))
    assert counter.frame_count <= 2

    def twice(x):
        _, z = ADD_OPS[op](x, None, eps=1e-5, normalized_shape=8, dropout_p=0.5)
        (once,) = torch.autograd.grad(z.square().sum(), x, create_graph=True)
        return torch.autograd.grad(once.square().sum(), x)[0]

    from torch.fx.experimental.proxy_tensor import make_fx

    x = torch.randn(4, 3, 8, requires_grad=True)
    traced, x = make_fx(twice, tracing_mode="symbolic")(x), torch.randn(4, 3, 8, requires_grad=True)
    factor = (traced(x) / x).detach()  # 2 of dropout four times, 2 of each square twice: 128 where kept
    kept = factor.abs() > 64
    assert kept.any() and not kept.all()
    torch.testing.assert_close(factor, 128.0 * kept)


@on_devices("op", OPS)
def test_modulated_parts_as_operator(device, op):
    """the operator with a weight for each part of the rows: opcheck, compile, double backward, what it refuses"""
    if not _backend.has_kernels_for(device):
        pytest.skip("no kernels here")
    torch.compiler.reset()
    x = torch.randn(2, 9, 16, device=device, requires_grad=True)
    weight, bias = (torch.randn(2, 16, device=device, requires_grad=True) for _ in range(2))
    options = {"weight_offset": 1.0, "is_rms_norm": op == "rms_norm"}
    compiled = torch.compile(ADAPTIVE_OPS[op], backend="aot_eager", fullgraph=True)
    for n in (2, 18):  # samples, or tokens
        modulation = [torch.randn(2, n // 2, 16, device=device, requires_grad=True) for _ in range(2)]
        opcheck(_ops.norm_forward, operator_arguments(x, None, None, *modulation, **options))
        eager, other = ADAPTIVE_OPS[op](x, *modulation), compiled(x, *modulation)
        assert same_bits(eager, other)
        found = (torch.autograd.grad(y.sin().sum(), (x, *modulation)) for y in (eager, other))
        assert all(same_bits(one, two) for one, two in zip(*found, strict=True))
    wide = [t.detach()[..., :4].double().requires_grad_() for t in (x[:, :3], weight, bias)]
    assert gradgradcheck(ADAPTIVE_OPS[op], wide)
    for bad in (
        torch.ones(4, 16, device=device),
        torch.ones(2, 2, 16, device=device),
        torch.ones(2, 15, device=device),
    ):
        with pytest.raises(RuntimeError, match="weight"):
            _ops.norm_forward(*operator_arguments(x.detach(), weight=bad, **options))
    with pytest.raises(RuntimeError, match="weight must have the shape of normalized_shape"):
        OPS[op](x, weight, normalized_shape=16)


@on_devices("op", OPS)
def test_modulation_options(device, op):
    """gradcheck, compile, weight and bias, no shift (RMSNorm), zero scale and shift: the plain norm"""
    torch.compiler.reset()
    norm = ADAPTIVE_OPS[op]
    x, residual = (torch.randn(2, 2, 4, device=device, dtype=fp64, requires_grad=True) for _ in range(2))
    scale, shift, gate = (torch.randn(2, 4, device=device, dtype=fp64, requires_grad=True) for _ in range(3))

    def call(x, scale, shift, gate, residual):
        return norm(x, scale, shift, gate=gate, residual=residual, eps=1e-5)

    tensors = (x, scale, shift, gate, residual)
    assert gradcheck(call, tensors) and gradgradcheck(call, tensors)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert [t.shape for t in compiled(*(t[:0] for t in tensors))] == [(0, 2, 4)] * 2
    torch.testing.assert_close(compiled(*tensors), call(*tensors))
    torch.testing.assert_close(torch.autograd.grad(compiled(*tensors)[0].sin().sum(), tensors),
                               torch.autograd.grad(call(*tensors)[0].sin().sum(), tensors))  # fmt: skip
    weight, bias = (torch.randn(4, device=device, dtype=fp64) for _ in range(2))
    zeros = torch.zeros(4, device=device, dtype=fp64)
    plain = OPS[op](x, weight, bias, 1e-5)
    torch.testing.assert_close(norm(x, zeros, zeros, weight=weight, bias=bias, eps=1e-5), plain)
    if op == "rms_norm":
        assert same_bits(norm(x, scale, eps=1e-5), norm(x, scale, torch.zeros_like(scale), eps=1e-5))


@on_devices("op", OPS)
def test_modulation_of_few_rows(device, op):
    """no samples, no tokens, one sample, one token: shapes, and the bits of the same sample among others"""
    torch.manual_seed(0)
    x, residual = (torch.randn(3, 4, 16, device=device) for _ in range(2))
    scale, shift, gate = torch.randn(3, 1, 48, device=device).chunk(3, -1)

    def call(x, residual, *rows):
        inputs = [t.detach().requires_grad_() for t in (x, residual, *rows)]
        y, z = ADAPTIVE_OPS[op](inputs[0], *inputs[2:4], gate=inputs[4], residual=inputs[1], eps=1e-5)
        return y, z, *torch.autograd.grad((y.sin() + z.sin()).sum(), inputs)

    everything = call(x, residual, scale, shift, gate)
    for part in (slice(0, 0), slice(1, 2), slice(0, 2)):
        found = call(*(t[part] for t in (x, residual, scale, shift, gate)))
        assert all(same_bits(one, of[part]) for one, of in zip(found[:4], everything, strict=False))
        for one, of in zip(found[4:], everything[4:], strict=True):
            torch.testing.assert_close(one, of[part])
    for tokens in (0, 1):
        found = call(x[:, :tokens], residual[:, :tokens], scale, shift, gate)
        assert all(same_bits(one, of[:, :tokens]) for one, of in zip(found[:2], everything, strict=False))
        for one, of in zip(found[2:4], everything[2:4], strict=True):
            if device == "cpu":
                assert same_bits(one, of[:, :tokens])
            torch.testing.assert_close(one, of[:, :tokens])
        assert [t.shape for t in found[4:]] == [scale.shape] * 3


@on_devices("op", OPS, devices=("cpu",))
def test_bad_modulations(device, op):
    """a scale that does not broadcast, a gate without residual: clear errors"""
    norm, x, row = ADAPTIVE_OPS[op], torch.randn(2, 3, 4), ones(4)
    for shape in ((3, 4), (2, 3), (2, 3, 1), (1,), (2, 2, 4), (2, 1, 1, 4)):
        for name in ("scale", "shift"):
            with pytest.raises(RuntimeError, match=rf"{name} must be of x's shape, \[2, 3, 4\].*got \[{shape[0]}"):
                norm(x, **{"scale": row, "shift": row, name: ones(*shape)})
    with pytest.raises(ValueError, match="gate needs a residual"):
        norm(x, row, row, gate=row)
    for scale, kind in ((1.0, "float"), (None, "NoneType")):
        with pytest.raises(TypeError, match=f"scale must be a Tensor, got {kind}"):
            norm(x, scale, row)
    for name, wrong, message in (
        ("weight", (4,), "weight must be a Tensor or None, got tuple"),
        ("normalized_shape", 4.0, "normalized_shape must be an int or a sequence of ints, got 4.0"),
        ("eps", "a", "eps must be a number, got str"),
    ):
        with pytest.raises(TypeError, match=message):
            norm(x, row, row, **{name: wrong})
    with pytest.raises(TypeError, match="shift must be of x's dtype"):
        norm(x, row, row.double())
    with pytest.raises(RuntimeError, match="scale must be on x's device"):
        norm(x, row.to("meta"), row)


# ---- gated norms -----------------------------------------------------------------------------------------------------


def gated(op, shape, dtype, gate, activation="silu", gates_y=True, groups=False, of_one_projection=False, **options):
    """A gated norm; x and gate may be columns of one projection."""
    case = Case(shape, op=op, dtype=dtype, heads_ndim=int(groups), **options)
    memory, width = {}, shape[-2] if groups else shape[-1]
    if of_one_projection:
        gaps = (0,) * (len(shape) - 1 - groups) + (width,) + (0,) * groups
        memory = {name: Memory(offset=i * math.prod(shape[-1 - groups :]), gaps=gaps)
                  for i, name in enumerate(("x", "gate"))}  # fmt: skip
    return Fusion(case, kind="gated", gate=gate, activation=activation, gates_y=gates_y, groups=groups, memory=memory)


GATED_DTYPES = [  # of x, of gate, of weight and bias
    (bf16, bf16, X), (bf16, fp32, fp32), (bf16, fp64, X), (fp16, fp16, fp32), (fp16, bf16, X), (fp32, fp32, X),
    (fp32, bf16, X), (fp64, fp64, X), (fp64, fp16, X)
]  # fmt: skip
PARAMETERS = [{}, {"bias": None}, {"weight": None}, {"weight": None, "bias": None}, {"weight_offset": 1.0},
              {"weight_offset": -0.5, "bias": None, "out_dtype": fp32}]  # fmt: skip


@on_devices("op,activation,gates_y,dtype,gate,parameters", [
    (op, a, gates_y, *dtypes) for op in OPS for a in GATES for gates_y in (True, False) for dtypes in GATED_DTYPES
], few_on_cpu=True)  # fmt: skip
def test_gated_norm(device, op, activation, gates_y, dtype, gate, parameters):
    """both orders, every activation of the gate, its dtype beside x's, groups, columns of a projection: against fp64"""
    given = {"weight": parameters, "bias": parameters}
    for shape, groups in (((19, 77), False), ((3, 5, 4, 16), True), ((7, 256), False), ((2, 9, 3, 7), True)):
        for of_one_projection in (False, True):
            check_fusion(gated(op, shape, dtype, gate, activation, gates_y, groups, of_one_projection, **given), device)


@on_devices("op,gates_y,dtype,gate,groups,options", [
    (op, gates_y, *dtypes, groups, i) for op in OPS for gates_y in (True, False)
    for dtypes in ((bf16, bf16), (fp16, fp32), (fp32, fp32), (fp64, fp64)) for groups in (False, True)
    for i in range(len(PARAMETERS))
], few_on_cpu=True)  # fmt: skip
def test_gated_norm_of_what_is_given(device, op, gates_y, dtype, gate, groups, options):
    """weight, bias, weight_offset, out_dtype; twice, and whatever is wanted, the same bits, by every way of a call"""
    fusion = gated(op, (5, 3, 4, 40), dtype, gate, "silu", gates_y, groups, True, **PARAMETERS[options])
    given, found = check_fusion(fusion, device)
    wants = tuple(name for name in ARGUMENTS if name in given)
    for wanted in (wants, *((name,) for name in wants), tuple(name for name in wants if name != "x")):
        with poisoned():
            again = run_fusion(fusion, given, wanted)
        judge_fusion(fusion, given, again)
        if device == "cpu" or "x" in wanted:  # docs/reliability.md, "Not promised"
            assert all(same_bits(found[name], one) for name, one in again.items()), wanted
    for route in ("function", "operator", "reference"):
        with through(route):
            again = run_fusion(fusion, given, wants)
        judge_fusion(fusion, given, again)
        if route != "reference" and _backend.has_kernels_for(device):
            assert all(same_bits(found[name], one) for name, one in again.items()), route


@on_devices("op,gates_y,dtype,gate,parameters,rows,hidden_size", [
    (op, gates_y, *dtypes, rows, n) for op in OPS for gates_y in (True, False) for dtypes in GATED_DTYPES
    for rows, n in (*((23, n) for n in (1, 8, 40, 128, 256, 264, 512, 768, 1024, 1152, 1536, 2048, 2560, 2568, 3072,
                                        4096, 4097, 5120, 6144, 8192, 8200, 12345, 16384, 32768, 65536)),
                    (2, 131_080), (2, 262_152), (70_001, 64), (9001, 1024), (3001, 4096), (1501, 8192))
], devices=("cuda",))  # fmt: skip
def test_gated_norm_of_many_sizes(device, op, gates_y, dtype, gate, parameters, rows, hidden_size):
    given = {"weight": parameters, "bias": parameters}
    check_fusion(gated(op, (rows, hidden_size), dtype, gate, "silu", gates_y, False, True, **given), device)


@on_devices("op,gates_y,dtype,gate,groups", [
    (op, gates_y, dtype, gate, groups) for op in OPS for gates_y in (True, False)
    for dtype, gate in ((bf16, bf16), (fp32, bf16))
    for groups in ((300, 8, 128), (40, 2, 4096), (3000, 4, 512), (9, 80, 96))
], devices=("cuda",))  # fmt: skip
def test_groups_of_many_sizes(device, op, gates_y, dtype, gate, groups):
    check_fusion(gated(op, groups, dtype, gate, "silu", gates_y, True, True), device)


@on_devices("op,dtype,hidden_size", [(op, dtype, n) for op in OPS for dtype in (fp16, bf16, fp32)
                                      for n in (64, 128, 640, 768, 1024, 4096)], few_on_cpu=True)  # fmt: skip
def test_stages_do_not_depend_on_the_batch(device, op, dtype, hidden_size):
    """gated norms, the norm before the residual's sum, and with the next norm, where few rows have kernels of their
    own; activations, alone and behind a residual"""
    if not uses_kernels(device):
        pytest.skip("a promise of the compiled kernels: PyTorch's sums depend on the number of rows")
    rows = (CPU_ELEMENTS if device == "cpu" else CUDA_ELEMENTS // 4) // hidden_size
    generator = torch.Generator().manual_seed(0)
    x, other = (torch.randn(rows, hidden_size, generator=generator).to(device, dtype) for _ in range(2))
    weight, bias = (torch.rand(hidden_size, generator=generator).to(device, dtype) for _ in "wb")
    gate = torch.cat((other, x), -1)[:, :hidden_size]
    calls = [lambda x, other, *_: AFTER_OPS[op](x, other, weight, bias, 1e-5)]
    for activation in GATES:
        for first in (True, False):
            calls.append(lambda x, _, gate, activation=activation, first=first: GATED_OPS[op](
                x, gate, weight, bias, 1e-5, activation=activation, norm_before_gate=first))  # fmt: skip
    if op == "rms_norm":
        calls.append(lambda x, other, _: fused_sandwich_rms_norm(x, other, weight, bias, 1e-5, weight_offset=1.0))
    for activation in ("relu", "gelu", "gelu_tanh", "silu"):
        options = {"eps": 1e-5, "activation": activation}
        calls.append(lambda x, *_, options=options: OPS[op](x, weight, bias, **options))
        calls.append(lambda x, other, _, options=options: ADD_OPS[op](x, other, weight, bias, **options))
    for i, call in enumerate(calls):
        many = call(x, other, gate)
        for whole in many if isinstance(many, tuple) else (many,):
            assert whole.isfinite().all() and whole.any(-1).all(), i
        for fewer in (3, min(rows, 2**19 // x.itemsize // hidden_size)):
            few = call(x[:fewer], other[:fewer], gate[:fewer])
            for a, b in zip(*((few, many) if isinstance(few, tuple) else ((few,), (many,))), strict=True):
                assert same_bits(a, b[:fewer]) and same_bits(a.signbit(), b[:fewer].signbit()), (i, fewer)


@on_devices("op,gates_y", [(op, gates_y) for op in OPS for gates_y in (True, False)])
def test_gated_gradcheck(device, op, gates_y):
    """gradcheck and gradgradcheck, forward mode and batched gradients, of each activation, and in groups"""
    tensors = [torch.randn(*s, device=device, dtype=fp64, requires_grad=True) for s in ((2, 6), (2, 6), (6,), (6,))]
    bias_alone = [*tensors[:2], None, tensors[3]]
    calls = [(tensors, {"activation": a}) for a in GATES if a != "relu"]  # which has a kink
    for given, options in (*calls, (tensors, {"group_size": 2}), (bias_alone, {"group_size": 3}), (bias_alone, {})):
        norm = functools.partial(GATED_OPS[op], eps=1e-5, norm_before_gate=gates_y, **options)
        assert gradcheck(norm, given, check_batched_grad=True, check_forward_ad=True)
        assert gradgradcheck(norm, given)


@on_devices("op,gates_y,group_size", [(op, gy, size) for op in OPS for gy in (True, False) for size in (None, 4)],
            few_on_cpu=True)  # fmt: skip
def test_gated_norm_in_pytorch(device, op, gates_y, group_size):
    """torch.func, torch.compile with any batch in one graph, export, checkpointing, meta tensors, torch.jit.trace"""
    torch.compiler.reset()

    def norm(x, gate, weight, bias):
        return GATED_OPS[op](x, gate, weight, bias, 1e-5, norm_before_gate=gates_y, group_size=group_size)

    def tensors(batch, dtype=fp64):
        return [torch.randn(*s, device=device, dtype=dtype) for s in ((batch, 3, 8), (batch, 3, 8), (8,), (8,))]

    def loss(*t):
        return norm(*t).sin().sum()

    given = tensors(4)
    leaves = [t.clone().requires_grad_() for t in given]
    truth = torch.autograd.grad(loss(*leaves), leaves)
    torch.testing.assert_close(torch.func.grad(loss, argnums=(0, 1, 2, 3))(*given), truth)
    per_sample = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), (0, 0, None, None))(*given)
    torch.testing.assert_close(per_sample, truth[:2])
    directions = tensors(4)
    _, tangent = torch.func.jvp(loss, tuple(given), tuple(directions))
    torch.testing.assert_close(tangent, sum((t * d).sum() for t, d in zip(truth, directions, strict=True)))
    recomputed = torch.autograd.grad(checkpoint(loss, *leaves, use_reentrant=False), leaves)
    assert all(same_bits(one, two) for one, two in zip(recomputed, truth, strict=True))
    assert norm(*(t.to("meta") for t in given)).shape == (4, 3, 8)
    torch.testing.assert_close(torch.jit.trace(norm, tensors(4))(*given), norm(*given))

    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(norm, backend=counter, fullgraph=True)
    for batch in range(2, 7):
        leaves = [t.requires_grad_() for t in tensors(batch, fp32)]
        results = [(y, *torch.autograd.grad(y.sin().sum(), leaves)) for y in (compiled(*leaves), norm(*leaves))]
        for one, two in zip(*results, strict=True):
            assert same_bits(one, two) if _backend.has_kernels_for(device) else torch.allclose(one, two, atol=1e-5)
    assert counter.frame_count <= 2

    class Module(torch.nn.Module):
        def forward(self, *tensors):
            return norm(*tensors)

    sizes = ({0: torch.export.Dim("batch")},) * 2 + (None,) * 2
    program = torch.export.export(Module(), tuple(given), dynamic_shapes=(sizes,))
    others = tensors(6)
    torch.testing.assert_close(program.module()(*others), norm(*others))


@on_devices("op,gates_y", [("layer_norm", True), ("rms_norm", False)])
def test_gated_norm_by_inductor(device, op, gates_y):
    torch.compiler.reset()
    fusion = gated(op, (6, 2, 48), bf16, fp32, gates_y=gates_y, groups=True)
    given = fusion.tensors(device)
    compiled = torch.compile(fusion.call, fullgraph=True)
    leaves = {name: t.requires_grad_() for name, t in given.items() if name in ARGUMENTS}
    y = compiled(leaves)["y"]
    gradients = torch.autograd.grad(y, list(leaves.values()), given["grad_output"])
    judge_fusion(fusion, given, {"y": y.detach(), **dict(zip(leaves, gradients, strict=True))})


@pytest.mark.skipif(fused_layernorm.backend() == "reference", reason="there are no operators")
@on_devices("op,gates_y", [(op, gates_y) for op in OPS for gates_y in (True, False)])
def test_gated_norm_as_operator(device, op, gates_y):
    """opcheck of both directions, of every activation and gradient; what the operators refuse"""
    if not _backend.has_kernels_for(device):
        pytest.skip("no kernels here")
    x, gate = (torch.randn(2, 9, 16, device=device, requires_grad=True) for _ in range(2))
    rows, heads = torch.randn(2, 16, device=device, requires_grad=True), torch.randn(9, 16, device=device)
    options = {"is_rms_norm": op == "rms_norm", "gates_y": gates_y}
    silu, given = reference.ACTIVATION_NAMES.index("silu"), (rows[0], rows[1])
    calls = [(activation, given, "xgwb") for activation in range(len(reference.ACTIVATIONS))]
    calls += [(silu, given, wants) for wants in "xgb"]
    calls += [(silu, pair, "xgwb") for pair in ((None, rows[0]), (None, None), (heads, None), (None, heads))]
    for activation, (weight, bias), wants in calls:
        # To the trace the norm, the order and the activation are numbers that are handed on
        traced = activation == silu and gates_y == (op == "layer_norm")
        per_head = weight is heads or bias is heads
        forward = operator_arguments(x, None, gate, weight, bias, activation=activation, per_head=per_head, **options)
        detached = [t.detach() if isinstance(t, torch.Tensor) else t for t in forward]
        opcheck(_ops.norm_forward, detached, traced and wants == "xgwb")
        with torch.no_grad():
            results = _ops.norm_forward(*forward)
        opcheck(_ops.norm_backward, backward_arguments(forward, torch.randn_like(x), results, wants=wants), traced)
    opcheck(_ops.norm_forward, operator_arguments(x, None, gate, rows[0], activation=4, **options))
    with pytest.raises(RuntimeError, match="activation must be"):  # "sigmoid" of y
        _ops.norm_forward(*operator_arguments(x, activation=5, is_rms_norm=op == "rms_norm"))
    with pytest.raises(RuntimeError, match="gate must have x's shape"):
        _ops.norm_forward(*operator_arguments(x, None, gate[:1], **options))


@on_devices("op,gates_y", [(op, gates_y) for op in OPS for gates_y in (True, False)])
def test_what_a_gated_norm_saves(device, op, gates_y):
    """of x's size x and gate alone"""
    if not _backend.has_kernels_for(device):
        pytest.skip("PyTorch operations save what they save")
    x, gate = torch.randn(2, 64, 128, device=device, requires_grad=True).unbind()
    weight = torch.ones(128, device=device, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = GATED_OPS[op](x, gate, weight, norm_before_gate=gates_y)
    assert y.grad_fn.name() == NODE
    assert {t.data_ptr() for t in saved if t.numel() == x.numel()} == {x.data_ptr(), gate.data_ptr()}


BAD_GATES = {
    "gate is a list": (lambda norm, x: norm(x, [1.0]), TypeError, "gate must be a Tensor, got list"),
    "gate is None": (lambda norm, x: norm(x, None), TypeError, "gate must be a Tensor, got NoneType"),
    "gate of another shape": (lambda norm, x: norm(x, x[:2]), RuntimeError,
                              r"gate must have x's shape, \[3, 4\], got \[2, 4\]"),
    "gate on another device": (lambda norm, x: norm(x, x.to("meta")), RuntimeError, "gate must be on x's device"),
    "gate of int": (lambda norm, x: norm(x, x.int()), TypeError, "gate must be float16, bfloat16, float32 or float64"),
    "gate is sparse": (lambda norm, x: norm(x, x.to_sparse()), TypeError, "gate must be a dense"),
    "x": (lambda norm, x: norm([1.0], x), TypeError, "x must be a Tensor"),
    "x is nested": (lambda norm, x: norm(torch.nested.nested_tensor([x, x[:2]]), x), TypeError, "x must be a dense"),
    "x is a scalar": (lambda norm, x: norm(x[0, 0], x[0, 0]), RuntimeError, "normalized_shape must have at least"),
    "weight": (lambda norm, x: norm(x, x, ones(5)), RuntimeError, "weight must have the shape"),
    "activation": (lambda norm, x: norm(x, x, activation="tanh"), ValueError,
                   "activation must be one of relu, gelu, gelu_tanh, silu, sigmoid, or None, got 'tanh'"),
    "weight_offset": (lambda norm, x: norm(x, x, weight_offset=1.0), ValueError, "weight_offset needs a weight"),
    "group_size": (lambda norm, x: norm(x, x, group_size=3), ValueError,
                   "group_size must divide the normalized dimension, 4, got 3"),
    "group_size is 0": (lambda norm, x: norm(x, x, group_size=0), ValueError, "group_size must divide"),
    "group_size is a float": (lambda norm, x: norm(x, x, group_size=2.0), TypeError, "group_size must be an int"),
    "group_size of two dimensions": (lambda norm, x: norm(x, x, normalized_shape=(3, 4), group_size=2), ValueError,
                                     "group_size needs one normalized dimension"),
    "group_size of heads": (lambda norm, x: norm(x, x, ones(3, 4), normalized_shape=4, group_size=2), ValueError,
                            "group_size needs one normalized dimension"),
    "gate with group_size": (lambda norm, x: norm(x, x[:2], group_size=2), RuntimeError,
                             r"gate must have x's shape, \[3, 4\], got \[2, 4\]"),
}  # fmt: skip


@on_devices("op,name", [(op, name) for op in OPS for name in BAD_GATES], devices=("cpu",))
def test_bad_gates(device, op, name):
    """bad input: an error that names the argument"""
    call, exception, message = BAD_GATES[name]
    with pytest.raises(exception, match=message):
        call(GATED_OPS[op], torch.randn(3, 4))


# ---- the norm after the block ----------------------------------------------------------------------------------------


def after(op, shape, dtype, residual, **options):
    return Fusion(Case(shape, op=op, dtype=dtype, **{"out_dtype": residual} | options), kind="after", residual=residual)


AFTER_DTYPES = [(bf16, bf16), (bf16, fp32), (fp16, fp16), (fp32, fp32), (fp64, fp64)]  # of x, of residual


@on_devices("op,dtype,residual,options", [
    (op, *dtypes, i) for op in OPS for dtypes in AFTER_DTYPES for i in range(len(PARAMETERS))
], few_on_cpu=True)  # fmt: skip
def test_norm_add(device, op, dtype, residual, options):
    """residual + norm(x) against fp64: strided and ragged rows, what is given, what is wanted, every way of a call"""
    strided = {"x": Memory(gaps=(0, 0, 8)), "residual": Memory(offset=8, gaps=(0, 0, 16))}
    for shape, memory in (((5, 3, 40), {}), ((7, 33), {}), ((4, 3, 64), strided)):
        fusion = replace(after(op, shape, dtype, residual, **PARAMETERS[options]), memory=memory)
        given, found = check_fusion(fusion, device)
        wants = tuple(name for name in ARGUMENTS if name in given)
        for wanted in ((name,) for name in wants):
            with poisoned():
                again = run_fusion(fusion, given, wanted)
            judge_fusion(fusion, given, again)
            assert same_bits(found["y"], again["y"])
        for route in ("function", "operator", "reference"):
            with through(route):
                again = run_fusion(fusion, given, wants)
            judge_fusion(fusion, given, again)
            if route != "reference" and _backend.has_kernels_for(device):
                assert all(same_bits(found[name], one) for name, one in again.items()), route


@on_devices("op,dtype,residual,rows,hidden_size", [
    (op, *dtypes, rows, n) for op in OPS for dtypes in AFTER_DTYPES
    for rows, n in (*((23, n) for n in (1, 8, 64, 128, 256, 264, 512, 768, 1024, 1152, 2048, 2568, 4096, 4097, 5120,
                                        8192, 12345, 16384, 32768, 65536)), (2, 262_152), (70_001, 64), (3001, 4096))
], devices=("cuda",))  # fmt: skip
def test_norm_add_of_many_sizes(device, op, dtype, residual, rows, hidden_size):
    check_fusion(after(op, (rows, hidden_size), dtype, residual), device)


@on_devices("op", OPS)
def test_norm_add_of_heads_and_main_grad(device, op):
    """a weight for each head; gradients that are added to main_grad"""
    check_fusion(after(op, (6, 3, 40), bf16, bf16, heads_ndim=1), device)
    check_fusion(replace(after(op, (37, 40), bf16, bf16), accumulate_grad=True), device)


@on_devices("op", OPS)
def test_norm_add_gradcheck(device, op):
    """gradcheck and gradgradcheck, forward mode and batched gradients"""
    tensors = [torch.randn(*s, device=device, dtype=fp64, requires_grad=True) for s in ((3, 5), (3, 5), (5,), (5,))]
    norm = functools.partial(AFTER_OPS[op], eps=1e-5)
    assert gradcheck(norm, tensors, check_batched_grad=True, check_forward_ad=True)
    assert gradgradcheck(norm, tensors)


@on_devices("op", OPS)
def test_norm_add_in_pytorch(device, op):
    """the node saves x and not residual; torch.func, torch.compile, export, meta tensors, opcheck, compiled autograd"""
    torch.compiler.reset()
    x, residual = torch.randn(2, 6, 3, 16, device=device).unbind()
    weight, bias = torch.randn(2, 16, device=device).unbind()
    given = [t.requires_grad_() for t in (x, residual, weight, bias)]

    def loss(*tensors):
        return AFTER_OPS[op](*tensors, 1e-5).sin().sum()

    truth = torch.autograd.grad(loss(*given), given)
    torch.testing.assert_close(torch.func.grad(loss, argnums=(0, 1, 2, 3))(*given), truth)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(*given), given), truth)
    assert AFTER_OPS[op](*(t.detach().to("meta") for t in given), 1e-5).shape == x.shape

    class Module(torch.nn.Module):
        def forward(self, *tensors):
            return AFTER_OPS[op](*tensors, 1e-5)

    plain = tuple(t.detach() for t in given)
    torch.testing.assert_close(torch.export.export(Module(), plain).module()(*plain), AFTER_OPS[op](*plain, 1e-5))
    if not _backend.has_kernels_for(device):
        return
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = AFTER_OPS[op](*given)
    assert y.grad_fn.name() == NODE and {t.data_ptr() for t in saved if t.numel() == x.numel()} == {x.data_ptr()}
    gradient = torch.randn_like(y)
    assert torch.autograd.grad(y, residual, gradient)[0].data_ptr() == gradient.data_ptr()  # as of x + y
    options = {"is_rms_norm": op == "rms_norm", "adds_y": True}
    opcheck(_ops.norm_forward, operator_arguments(x, residual, None, weight, bias, **options))
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        found = [t.detach().requires_grad_() for t in given]
        loss(*found).backward()
    torch.testing.assert_close([t.grad for t in found], list(truth))


BAD_AFTERS = {
    "residual is None": (lambda norm, x: norm(x, None, ones(4)), TypeError, "residual must be a Tensor, got NoneType"),
    "residual is a list": (lambda norm, x: norm(x, [1.0], ones(4)), TypeError, "residual must be a Tensor"),
    "residual of another shape": (lambda norm, x: norm(x, x[:2], ones(4)), RuntimeError,
                                  r"residual must have x's shape, \[3, 4\], got \[2, 4\]"),
    "residual of another dtype": (lambda norm, x: norm(x, x.half(), ones(4)), TypeError,
                                  "residual must be of x's dtype, torch.float32, got torch.float16"),
    "out_dtype": (lambda norm, x: norm(x, x, ones(4), out_dtype="bf16"), TypeError, "out_dtype must be"),
    "no shape": (lambda norm, x: norm(x, x), ValueError, "normalized_shape"),
    "x is nested": (lambda norm, x: norm(torch.nested.nested_tensor([x, x[:2]]), x, ones(4)), TypeError,
                    "x must be a dense"),
}  # fmt: skip


@on_devices("op,name", [(op, name) for op in OPS for name in BAD_AFTERS], devices=("cpu",))
def test_bad_norm_adds(device, op, name):
    """bad input: an error that names the argument; of the operator, too"""
    call, exception, message = BAD_AFTERS[name]
    with pytest.raises(exception, match=message):
        call(AFTER_OPS[op], torch.randn(3, 4))
    if _ops.norm_forward is not None:
        x = torch.randn(3, 4)
        for arguments in ({"adds_y": True}, {"adds_y": True, "residual": x, "gate": x}):
            with pytest.raises(RuntimeError, match="adds_y needs a residual"):
                _ops.norm_forward(*operator_arguments(x, **arguments))
        for arguments in ({"bias": ones(4)}, {"gate": x}, {"residual": x, "adds_y": True}):
            with pytest.raises(RuntimeError, match="rounds_x_hat goes without"):
                _ops.norm_forward(*operator_arguments(x, **arguments, rounds_x_hat=True))


QUICK_CALLS = {  # options, and whether _check_quickly() decides
    "sandwich": ({"adds_y": True, "normalized_shape": (8,)}, True),
    "quantized": ({"adds": True}, True),
    "bias": ({"adds": True, "bias": ones(8, dtype=bf16)}, True),
    "a wider bias": ({"bias": ones(8)}, True),
    "a wider residual": ({"adds": True, "residual": ones(4, 8)}, True),
    "a dense residual beside a sparse x": (
        {"adds": True, "x": ones(4, 8, dtype=bf16).to_sparse(), "residual": ones(4, 8, dtype=bf16)},
        False,
    ),
    "adds_y without residual": ({"adds_y": True, "residual": None}, False),
    "weight_offset": ({"weight_offset": 1.0}, True),
    "no eps": ({"eps": None}, True),
    "eps is an int": ({"eps": 0}, False),
    "eps is a str": ({"eps": "0"}, False),
    "another shape": ({"normalized_shape": (4, 8)}, False),
    "a list": ({"normalized_shape": [8]}, False),
    "an array": ({"normalized_shape": torch.tensor([4, 8])}, False),
    "residual_dtype": ({"adds": True, "residual_dtype": fp32}, False),
    "no weight": ({"weight": None, "normalized_shape": (8,)}, False),
    "a wider weight": ({"weight": ones(8)}, True),
    "a narrower weight": ({"x": ones(4, 8), "weight": ones(8, dtype=bf16)}, False),
    "float64 beside float32": ({"x": ones(4, 8, dtype=fp64)}, False),
    "out_dtype": ({"out_dtype": fp32}, False),
    "activation": ({"activation": "gelu"}, False),
    "rounding": ({"rounding": "llama"}, False),
    "dropout_p": ({"adds": True, "dropout_p": 0.5}, False),
    "dropout_p is an int": ({"dropout_p": 0}, False),
    "stats_grad": ({"stats_grad": False}, False),
    "memory_efficient": ({"memory_efficient": True}, False),
    "accumulate_grad": ({"accumulate_grad": True}, False),
    "is_modulated": ({"is_modulated": True}, False),
    "is_gated": ({"is_gated": True}, False),
    "a shorter weight": ({"weight": ones(4, dtype=bf16)}, False),
    "a longer residual": ({"adds": True, "residual": ones(4, 9, dtype=bf16)}, False),
    "x is a list": ({"x": [1.0]}, False),
    "bias is a list": ({"bias": [1.0]}, False),
    "x of no dimension": ({"x": torch.tensor(1.0)}, False),
    "x of ints": ({"x": torch.ones(4, 8, dtype=torch.int32), "weight": torch.ones(8, dtype=torch.int32)}, False),
    "a sparse residual": ({"adds": True, "residual": ones(4, 8, dtype=bf16).to_sparse()}, False),
}


@pytest.mark.parametrize("name", QUICK_CALLS)
def test_quick_checks(name):
    """what _check_quickly() takes, _check() takes with the same result"""
    from fused_layernorm import functional

    options, is_quick = QUICK_CALLS[name]
    given = {"x": ones(4, 8, dtype=bf16), "residual": None, "weight": ones(8, dtype=bf16), "bias": None}
    if options.get("adds") or options.get("adds_y"):
        given["residual"] = ones(4, 8, dtype=bf16)
    given |= {key: value for key, value in options.items() if key in given}
    call = functional._DEFAULTS | {"eps": 1e-5, "is_rms_norm": True}
    call |= {key: value for key, value in options.items() if key in call}
    same = dict(call)
    shape = functional._check_quickly(*given.values(), call)
    assert (shape is not None) == is_quick and (is_quick or call == same)
    if is_quick:
        x, residual, weight, bias = given.values()
        assert functional._check(x, residual, None, weight, bias, same) == shape and call == same


def sandwich_in_fp64(x, residual, post_weight, weight, eps, post_eps, offset, z=None):
    """(y, z) with the value of z that was rounded, if it is given."""

    def norm(t, weight, eps):
        x_hat = t * (t.square().mean(-1, keepdim=True) + eps).rsqrt()
        return x_hat if weight is None else x_hat * (weight + offset)

    truth = residual + norm(x, post_weight, post_eps)
    if z is not None:
        truth = z.double() + (truth - truth.detach())
    return norm(truth, weight, eps), truth


@on_devices("dtype,residual,weights,way", [
    (*dtypes, weights, way) for dtypes in AFTER_DTYPES for weights in ("both", "post", "none")
    for way in ("eager", "no grad", "aot_eager")
], few_on_cpu=True)  # fmt: skip
def test_sandwich(device, dtype, residual, weights, way):
    sandwich(device, dtype, residual, weights, way)


@on_devices("residual", [bf16, fp32])
def test_sandwich_by_inductor(device, residual):
    sandwich(device, bf16, residual, "both", "inductor")


def sandwich(device, dtype, residual, weights, way):
    """against fp64, with gradients of both results and of one"""
    torch.compiler.reset()
    generator = torch.Generator().manual_seed(3)

    def normal(*shape, dtype=dtype):
        return (0.3 + torch.randn(shape, generator=generator)).to(device, dtype)

    n, offset = 72, 1.0
    x, skip = normal(5, 7, n), normal(5, 7, n, dtype=residual)
    post_weight, weight = (normal(n) if weights in kinds else None for kinds in (("both", "post"), ("both",)))
    given = [t.requires_grad_(way != "no grad") if t is not None else None for t in (x, skip, post_weight, weight)]

    def call(*tensors):
        shape = None if tensors[2] is not None else n
        return fused_sandwich_rms_norm(*tensors, 1e-5, post_eps=1e-3, weight_offset=offset, normalized_shape=shape)

    run_it = call if way in ("eager", "no grad") else torch.compile(call, backend=way, fullgraph=True)
    y, z = run_it(*given)
    assert (y.dtype, z.dtype) == (dtype, residual) and y.is_contiguous() and z.is_contiguous()
    wide = [None if t is None else t.detach().double().requires_grad_() for t in given]
    true_y, true_z = sandwich_in_fp64(*wide, 1e-5, 1e-3, offset, z.detach())
    eps, eps_of_y = torch.finfo(residual).eps, torch.finfo(dtype).eps
    own_z = sandwich_in_fp64(*wide, 1e-5, 1e-3, offset)[1]
    assert ((z.double() - own_z).abs() <= eps * own_z.abs() + 64 * torch.finfo(fp32).eps * (1 + own_z.abs())).all()
    assert (
        (y.double() - true_y).abs() <= eps_of_y * true_y.abs() + 64 * torch.finfo(fp32).eps * (1 + true_y.abs())
    ).all()
    if way == "no grad":
        return
    leaves, wide_leaves = ([t for t in tensors if t is not None] for tensors in (given, wide))
    grads = {"y": normal(5, 7, n), "z": normal(5, 7, n, dtype=residual)}
    for uses in ("yz", "y", "z"):
        found = torch.autograd.grad([{"y": y, "z": z}[u] for u in uses], leaves, [grads[u] for u in uses],
                                    retain_graph=True, allow_unused=True)  # fmt: skip
        truth = torch.autograd.grad(
            [{"y": true_y, "z": true_z}[u] for u in uses], wide_leaves, [grads[u].double() for u in uses],
            retain_graph=True, allow_unused=True,
        )  # fmt: skip
        for one, two in zip(found, truth, strict=True):
            if two is None:
                assert one is None or not one.any()
                continue
            # The gradient of z is rounded to its dtype, and x's goes through it; sums over 35 rows
            scale = two.abs() + two.square().mean().sqrt() * (6 if one.dim() == 1 else 1)
            unit = max(eps, torch.finfo(one.dtype).eps)
            assert ((one.double() - two).abs() <= 4 * unit * scale + 256 * torch.finfo(fp32).eps * scale).all(), uses


@on_devices()
def test_sandwich_in_few_passes(device):
    """forward is one operator, z's two gradients are summed by the norm's backward, second derivatives are there"""
    tensors = [torch.randn(*s, device=device, dtype=fp64, requires_grad=True) for s in ((3, 6), (3, 6), (6,), (6,))]
    assert gradcheck(fused_sandwich_rms_norm, tensors) and gradgradcheck(fused_sandwich_rms_norm, tensors)
    if not _backend.has_kernels_for(device):
        return
    y, z = fused_sandwich_rms_norm(*tensors)
    assert y.grad_fn is z.grad_fn
    frozen = [t.detach() for t in tensors[:3]]  # z needs no gradient
    y, z = fused_sandwich_rms_norm(*frozen, tensors[3])
    assert not z.requires_grad
    x_hat = OPS["rms_norm"](z, normalized_shape=6)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), tensors[3])[0], x_hat.sum(0))
    numbers = (1, 1e-5, 1e-3, 0.0, 1.0)  # normalized_ndim, the two eps and offsets
    opcheck(_ops.sandwich_norm, [*(t.detach() for t in tensors), *numbers])
    with pytest.raises(RuntimeError, match="residual must have x's shape"):
        _ops.sandwich_norm(tensors[0], tensors[1][:1], *tensors[2:], *numbers)
    with pytest.raises(RuntimeError, match="derivative .*sandwich_norm is not implemented"):
        _ops.sandwich_norm(*tensors, *numbers)[0].sum().backward()
    with pytest.raises(TypeError, match="weight must be a Tensor or None, got list"):
        fused_sandwich_rms_norm(*frozen, [1.0] * 6)
    with pytest.raises(TypeError, match="residual must be a Tensor"):
        fused_sandwich_rms_norm(tensors[0], None, *tensors[2:])
    with pytest.raises(TypeError, match="post_weight must be a Tensor or None, got float"):
        fused_sandwich_rms_norm(*tensors[:2], 1.0, tensors[3])
    with pytest.raises(RuntimeError, match=r"post_weight must have the shape of weight, \[4\], got \[6\]"):
        fused_sandwich_rms_norm(*tensors[:3], tensors[3][:4], normalized_shape=6)


# ---- a weight for each head ------------------------------------------------------------------------------------------
# Plain norms: norm_cases.py's table.


@on_devices("op,dtype,residual,heads_ndim,options", [
    (op, dtype, residual, heads_ndim, i) for op in OPS
    for dtype, residual in ((bf16, None), (bf16, bf16), (fp16, fp32), (fp32, fp32), (fp64, fp64))
    for heads_ndim in (1, 2) for i in range(len(PARAMETERS))
], few_on_cpu=True)  # fmt: skip
def test_heads_beside_a_residual(device, op, dtype, residual, heads_ndim, options):
    """with and without a residual, of q of one projection, and gated: against fp64, twice the same bits"""
    case = Case((5, 7, 3, 40), op=op, dtype=dtype, heads_ndim=heads_ndim, **PARAMETERS[options])
    of_add = {"kind": "add", "residual": residual, "uses": ("y", "z") if residual else ("y",)}
    of_gate = {"kind": "gated", "gate": dtype, "activation": "sigmoid"}
    for fields in (of_add, of_gate, of_gate | {"gates_y": False}):
        fusion = Fusion(case, memory={"x": "qkv", "grad_output": "heads_first"}, **fields)
        given, found = check_fusion(fusion, device)
        again = run_fusion(fusion, given, tuple(name for name in ARGUMENTS if name in given))
        assert all(same_bits(one, again[name]) for name, one in found.items())


@on_devices("op,dtype", [(op, dtype) for op in OPS for dtype in (bf16, fp32)])
def test_each_head_is_a_norm(device, op, dtype):
    """y and the gradient of x have the bits of a norm of that head alone, LayerNorm on CUDA up to rounding; the
    operator has those of eager mode"""
    torch.compiler.reset()
    x, grad_y = (torch.randn(2, 9, 4, 64, device=device).to(dtype) for _ in range(2))
    parameters = torch.randn(2, 4, 64, device=device).to(dtype)

    def call(norm, grad_y, *tensors):
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        y = norm(*leaves)
        return y, *torch.autograd.grad(y, leaves, grad_y)

    def of_heads(x, weight, bias):
        return OPS[op](x, weight, bias, 1e-5, normalized_shape=64)

    found, is_same, is_same_norm = call(of_heads, grad_y, x, *parameters), same_bits, same_bits
    if not _backend.has_kernels_for(device):
        is_same = is_same_norm = functools.partial(torch.allclose, rtol=2e-2, atol=2e-2)
    elif device == "cuda" and op == "layer_norm":  # by another kernel
        is_same_norm = same_to_rounding
    for head in range(4):
        one = call(of_heads, grad_y[:, :, head], x[:, :, head], *parameters[:, head])
        assert all(is_same_norm(a, b[:, :, head]) for a, b in zip(one[:2], found[:2], strict=True))
        for a, b in zip(one[2:], found[2:], strict=True):
            torch.testing.assert_close(a, b[head], rtol=1e-2, atol=1e-2)
    compiled = call(torch.compile(of_heads, backend="aot_eager", fullgraph=True), grad_y, x, *parameters)
    with through("operator"):
        by_operator = call(of_heads, grad_y, x, *parameters)
    for way in (compiled, by_operator):
        assert all(is_same(a, b) for a, b in zip(way, found, strict=True))


@on_devices("op,heads_ndim", [(op, n) for op in OPS for n in (1, 2)])
def test_heads_in_pytorch(device, op, heads_ndim):
    """gradcheck, gradgradcheck, forward mode, vmap, opcheck, torch.jit.trace, beside modulation; what is refused"""
    x, residual = (torch.randn(2, 3, 2, 4, device=device, dtype=fp64, requires_grad=True) for _ in range(2))
    weight, bias = (
        torch.randn(x.shape[3 - heads_ndim :], device=device, dtype=fp64).requires_grad_() for _ in range(2)
    )
    options = {"eps": 1e-5, "normalized_shape": 4}

    def plain(x, weight, bias):
        return OPS[op](x, weight, bias, **options)

    def add(x, residual, weight, bias):
        return ADD_OPS[op](x, residual, weight, bias, **options)

    composed = OPS[op](x, **options) * weight + bias
    torch.testing.assert_close(plain(x, weight, bias), composed)
    for call, given in ((plain, (x, weight, bias)), (plain, (x, None, bias)), (add, (x, residual, weight, None))):
        assert gradcheck(call, given, check_batched_grad=True, check_forward_ad=True) and gradgradcheck(call, given)
    torch.testing.assert_close(torch.func.vmap(plain, (0, None, None))(x, weight, bias), composed)
    torch.testing.assert_close(torch.jit.trace(plain, (x, weight, bias))(x, weight, bias), composed)
    torch.testing.assert_close(
        ADAPTIVE_OPS[op](x, residual, residual, weight=weight, bias=bias, **options),
        composed * (1 + residual) + residual,
    )
    if _backend.has_kernels_for(device):
        for given in ((weight, bias), (None, bias), (weight, None)):
            forward = operator_arguments(x, None, None, *given, per_head=True, is_rms_norm=op == "rms_norm")
            traced = (op == "rms_norm") == (heads_ndim == 1)  # to the trace, one like the other
            opcheck(_ops.norm_forward, forward, traced)
            with torch.no_grad():
                results = _ops.norm_forward(*forward)
            for wants in ("xwb", "x", "w", "b"):
                backward = backward_arguments(forward, torch.randn_like(x), results, wants=wants)
                opcheck(_ops.norm_backward, backward, traced and (given[0] is weight or wants == "xwb"))
    x, weight, bias = (t.detach() for t in (x, weight, bias))
    weight.requires_grad_().main_grad = torch.zeros(weight.shape, device=device)
    for refused in ({"activation": "relu"}, {"dropout_p": 0.5}, {"memory_efficient": True}, {"accumulate_grad": True}):
        with pytest.raises(ValueError, match=f"a weight for each head cannot be combined with.*{next(iter(refused))}"):
            OPS[op](x, weight, **options, **refused)
    assert OPS[op](x, weight, **options, dropout_p=0.5, training=False).shape == x.shape
    for bad, message in (
        ((weight[..., :3], None), "weight must have the shape of normalized_shape"),
        ((weight[:1], None), "weight must have the shape of normalized_shape"),
        ((x[None], None), "weight must have the shape of normalized_shape"),
        ((weight, bias.flatten(0, -2)[0]), "bias must have weight's shape"),
        ((weight, bias[..., :3]), "bias must have the shape of normalized_shape"),
    ):
        with pytest.raises(RuntimeError, match=message):
            OPS[op](x, *bad, **options)
    with pytest.raises(RuntimeError, match="weight must have the shape of x's last dimensions|normalized_shape"):
        OPS[op](x, x[:, 0])  # without normalized_shape: no weight for each head


# ---- roundings -------------------------------------------------------------------------------------------------------


@on_devices("rounding,dtype,weight_dtype,hidden_size", [
    (r, d, w, n) for r in reference.ROUNDINGS[1:]
    for d, w in ((bf16, bf16), (fp16, fp16), (fp32, fp32), (bf16, fp32)) for n in (64, 769, 2048)
], few_on_cpu=True)  # fmt: skip
def test_rounding(device, rounding, dtype, weight_dtype, hidden_size):
    """LlamaRMSNorm and GemmaRMSNorm of transformers, alone and after a residual: their bits, or their roundings, which
    only the last bits of the statistics change; gradients against fp64"""
    family, _, exact = rounding.partition("_")
    name = {"llama": "LlamaRMSNorm", "gemma": "GemmaRMSNorm"}[family]
    models = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    module = getattr(models, name)(hidden_size, eps=1e-6).to(device, weight_dtype)
    out_dtype = module(torch.ones(1, hidden_size, dtype=dtype, device=device)).dtype
    case = Case((4, 37, hidden_size), op="rms_norm", dtype=dtype, weight=weight_dtype, bias=None, eps=1e-6,
                weight_offset=1.0 if family == "gemma" else 0.0, out_dtype=out_dtype)  # fmt: skip
    for fusion in (
        Fusion(case, rounding=rounding, sigma=3.0),
        Fusion(case, rounding=rounding, sigma=3.0, kind="add", residual=dtype, uses=("y", "z")),
    ):
        given, found = check_fusion(fusion, device)
        with torch.no_grad():
            module.weight.copy_(given["weight"])
        z = given["x"] + given["residual"] if fusion.residual else given["x"]
        assert not fusion.residual or same_bits(found["z"], z)
        expected = module(z)
        if exact:
            assert same_bits(found["y"], expected)
            continue
        # rstd differs by a few units of float32. That rounds x_hat to the next number where x_hat is so close to the
        # middle between two numbers of x's dtype: the share of these is at most the ratio of the units.
        eps, units = torch.finfo(dtype).eps, torch.finfo(fp32).eps * 8
        if dtype != fp32 and out_dtype == dtype:
            assert (found["y"] != expected).float().mean() <= units / eps
        error = (found["y"].double() - expected.double()).abs()
        tiny = torch.finfo(dtype).tiny * eps
        assert (
            error <= (2 * eps + units) * expected.double().abs() + 2 * tiny * (1 + module.weight.double().abs())
        ).all()


@on_devices()
def test_roundings_differ(device):
    """the orders are different in 16 bits, also without transformers; a wrong name is an error"""
    x, weight = torch.randn(64, 256, device=device).to(bf16), torch.randn(256, device=device).to(bf16)
    by_order = {r: OPS["rms_norm"](x, weight, eps=1e-6, rounding=r) for r in reference.ROUNDINGS}
    x_hat = (x.float() * (x.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt()).to(bf16)
    assert same_bits(by_order["llama_exact"], x_hat * weight)
    assert not torch.equal(by_order["llama"], by_order["torch"])
    assert same_bits(by_order["gemma"], by_order["torch"])
    for family in ("llama", "gemma"):
        assert (by_order[family] != by_order[f"{family}_exact"]).float().mean() < 0.01
    for call in (OPS["rms_norm"], lambda *a, **o: fused_add_rms_norm(a[0], None, *a[1:], **o)):
        with pytest.raises(ValueError, match="rounding must be one of torch, llama, .*, got 'bert'"):
            call(x, weight, rounding="bert")


@on_devices("rounding,options", [
    ("llama", {}), ("llama", {"weight_offset": 1.0}), ("llama", {"dtype": fp32}), ("gemma", {"weight_offset": 1.0}),
])  # fmt: skip
def test_roundings_by_kernels(device, rounding, options, monkeypatch):
    """forward is not that of the specification, by PyTorch operations; for the bits of transformers it is"""
    if not _backend.has_kernels_for(device):
        pytest.skip("PyTorch operations")

    def refuse(*arguments, **named):
        raise NotImplementedError("PyTorch operations")

    monkeypatch.setattr(reference, "norm_forward", refuse)
    dtype, options = options.get("dtype", bf16), {k: v for k, v in options.items() if k != "dtype"}
    x, weight = (torch.rand(*shape, device=device).to(dtype).requires_grad_() for shape in ((5, 16), (16,)))
    y, z = fused_add_rms_norm(x, x, weight, rounding=rounding, **options)
    (OPS["rms_norm"](x, weight, rounding=rounding, **options) + y + z).sum().backward()
    with pytest.raises(NotImplementedError):
        OPS["rms_norm"](x, weight, rounding=f"{rounding}_exact", **options)


# ---- memory_efficient ------------------------------------------------------------------------------------------------

WEIGHTS = {  # name: (weight and bias from noise, whether y tells x)
    "ones": (lambda n: (1 + 0 * n, 0.5 * n.tanh()), True),
    "spread": (lambda n: (n.sign() * (0.5 + n.abs()), 0.4 * n.tanh()), True),
    "a zero": (lambda n: (n.where(n > n.min(), 0 * n), 0 * n), False),
    "all zero": (lambda n: (0 * n, n), False),
    "tiny": (lambda n: (1e-36 + 0 * n, 0 * n), False),
    "large bias": (lambda n: (1 + 0 * n, 100 + n), False),
}


@NEEDS_EXTENSION
@on_devices("op,name,dtype", [(op, name, dtype) for op in OPS for name in WEIGHTS for dtype in (bf16, fp32)])
def test_memory_efficient(device, op, name, dtype):
    memory_efficient(device, op, name, dtype, dtype, (23, 130))


@NEEDS_EXTENSION
@on_devices("op,dtype,weight_dtype,shape", [
    (op, *dtypes, shape) for op in OPS
    for dtypes in ((bf16, bf16), (fp16, fp16), (bf16, fp32), (fp16, fp32), (fp32, fp32), (fp64, fp64))
    for shape in (
        (5, 8), (1, 128), (900, 128), (3000, 256), (1500, 512), (1500, 1024), (1000, 1152), (700, 1536), (700, 2048),
        (300, 3072), (300, 4096), (3, 8192), (300, 8192), (100, 16384), (40, 65536), (5, 131072), (9, 262152),
        (40, 1025),
    )
], devices=("cuda",))  # fmt: skip
def test_memory_efficient_of_many_sizes(device, op, dtype, weight_dtype, shape):
    memory_efficient(device, op, "spread", dtype, weight_dtype, shape)


def memory_efficient(device, op, name, dtype, weight_dtype, shape):
    """saves y, not x, where the rule allows; else x: right gradients, also for weight 0, tiny, large bias"""
    noise = torch.randn(shape[-1], generator=torch.Generator().manual_seed(1)).to(device)
    make, tells = WEIGHTS[name]
    case = Case(shape, op=op, dtype=dtype, weight=weight_dtype, bias=weight_dtype)
    inputs = make_inputs(case, device)
    inputs.weight, inputs.bias = (t.to(weight_dtype) for t in make(noise))
    saved = []

    def efficient(case, x, weight, bias):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
            y = OPS[case.op](x, weight, bias, case.eps, memory_efficient=True)
        saved.append(("y", y.data_ptr()))
        return y

    plain, found = run(fused, case, inputs), run(efficient, case, inputs)
    assert same_bits(plain["y"], found["y"])
    if uses_kernels(device):
        assert (inputs.x.data_ptr() in saved) != tells
        assert (saved[-1][1] in saved[:-1]) == tells
    if not tells:
        for key, value in plain.items():
            assert same_bits(value, found[key]), key
    given = {key: t for key, t in vars(inputs).items() if t is not None}
    judge_fusion(Fusion(case, memory_efficient=True), given, found)
    assert name != "all zero" or found["weight"].any()


@NEEDS_EXTENSION
@on_devices("op", OPS)
def test_memory_efficient_rule_follows_the_weight(device, op):
    """a weight changed in place is looked at again"""
    if not uses_kernels(device):
        pytest.skip("PyTorch operations save what they save")
    x = torch.randn(5, 16, device=device, requires_grad=True)
    weight = torch.ones(16, device=device, requires_grad=True)

    def saves_x():
        return saves_x_of(lambda: OPS[op](x, weight, memory_efficient=True), x)

    assert not saves_x()
    with torch.no_grad():
        weight[3] = 0
    assert saves_x()
    with torch.no_grad():
        weight.fill_(1)
    assert not saves_x()
    with pytest.raises(RuntimeError, match="memory_efficient=True has first derivatives only"):
        torch.autograd.grad(OPS[op](x, weight, memory_efficient=True).sum(), x, create_graph=True)


def saves_x_of(norm, x):
    """Whether what norm() saves for backward has x."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        norm()
    return x.data_ptr() in saved


@NEEDS_EXTENSION
@on_devices("op", OPS)
def test_memory_efficient_looks_again(device, op):
    """another bias where the one before lay, the step of an optimizer that writes through .data, an y that would
    overflow; on the CPU every change"""
    if not uses_kernels(device):
        pytest.skip("PyTorch operations save what they save")
    x = torch.randn(5, 16, device=device, requires_grad=True)
    weight = torch.ones(16, device=device, requires_grad=True)

    def saves_x(bias=None):
        return saves_x_of(lambda: OPS[op](x, weight, bias, memory_efficient=True), x)

    for _ in range(20):  # a bias that is made for each call: Python gives the next one its id
        assert not saves_x(torch.zeros(16, device=device))
        assert saves_x(torch.full((16,), 500.0, device=device))
    bias = torch.zeros(16, device=device)
    assert not saves_x(bias)
    bias.data = torch.full((16,), 500.0, device=device)
    assert saves_x(bias)

    assert not saves_x()
    other = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([other], lr=0.1)  # as of mixed precision: of copies in float32
    other.grad = torch.ones(1)
    optimizer.step()
    weight.data[3] = 0
    assert saves_x()
    if device == "cpu":
        weight.data[3] = 1
        assert not saves_x()

    weight = torch.full((16,), 0.1, device=device)  # of float32, in which 0.1 - 0.1 is 0
    x = torch.randn(5, 16, device=device, requires_grad=True)
    assert saves_x_of(lambda: OPS[op](x, weight, weight_offset=-0.1, memory_efficient=True), x)

    x = torch.randn(5, 64, device=device).to(fp16)
    x[:, 5] = 50
    x.requires_grad_()
    weight = torch.ones(64, device=device, dtype=fp16)
    weight[5] = 9000
    assert saves_x() and OPS[op](x, weight)[:, 5].isinf().any()


@on_devices("op", OPS)
def test_memory_efficient_without_gradients(device, op):
    """weights made in inference mode; gradients of several results at once, and along a tangent"""
    with torch.inference_mode():
        weight = torch.rand(16, device=device) + 0.5
    x = torch.randn(5, 16, device=device)
    assert same_bits(OPS[op](x, weight, memory_efficient=True), OPS[op](x, weight))
    empty = torch.ones(0, device=device, requires_grad=True)
    assert OPS[op](torch.randn(3, 0, device=device), empty, memory_efficient=True).shape == (3, 0)
    x, weight = x.requires_grad_(), weight.clone().requires_grad_()
    several, tangent = torch.randn(2, 3, 5, 16, device=device)
    found = []
    for options in ({"memory_efficient": True}, {}):
        y = OPS[op](x, weight, **options)
        found.append(torch.autograd.grad(y, (x, weight), several, is_grads_batched=True, retain_graph=True))
        with torch.autograd.forward_ad.dual_level():
            along = torch.autograd.forward_ad.make_dual(several[0], tangent[0])
            (of_x,) = torch.autograd.grad(y, x, along)
            found[-1] += (torch.autograd.forward_ad.unpack_dual(of_x).tangent,)
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


@on_devices("op", OPS, devices=("cpu",))
def test_memory_efficient_refuses(device, op):
    """together with what it cannot serve: an error"""
    x, weight = torch.randn(3, 4), ones(4)
    for options in ({"activation": "relu"}, {"dropout_p": 0.5}, {"out_dtype": fp64}, {"stats_grad": False}):
        with pytest.raises(ValueError, match="memory_efficient cannot be combined with"):
            OPS[op](x, weight, memory_efficient=True, **options)


# ---- gradients summed into a buffer ----------------------------------------------------------------------------------


@on_devices("op,dtype,shape", [(op, dtype, (40, 96)) for op in OPS for dtype in (bf16, fp16, fp32)])
def test_accumulate_grad(device, op, dtype, shape):
    accumulates(device, op, dtype, shape)


# By column blocks alone, with partial sums, by partial sums of persistent blocks and of clusters, by the whole card.
@on_devices("op,dtype,shape", [
    (op, dtype, shape) for op in OPS for dtype in (bf16, fp32)
    for shape in ((1000, 100), (3000, 1024), (3000, 77), (1500, 8192), (700, 40000), (1, 300000), (9, 300000))
], devices=("cuda",))  # fmt: skip
def test_accumulate_grad_of_many_sizes(device, op, dtype, shape):
    accumulates(device, op, dtype, shape)


def accumulates(device, op, dtype, shape):
    """main_grad receives the fp32 sum over micro-batches, unrounded"""
    rows, hidden_size = shape
    torch.manual_seed(0)
    weight, bias = (torch.nn.Parameter(torch.randn(hidden_size, device=device).to(dtype)) for _ in range(2))
    for parameter in (weight, bias):
        parameter.main_grad = torch.full((hidden_size,), 0.5, device=device)
    batches = [torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(4)]
    gradients = [torch.randn(shape, device=device).to(dtype) for _ in range(4)]
    for x, gradient in zip(batches, gradients, strict=True):
        OPS[op](x, weight, bias, accumulate_grad=True).backward(gradient)
    wide = [t.detach().double().requires_grad_() for t in (torch.cat(batches), weight, bias)]
    truth = torch.autograd.grad(OPS[op](*wide, eps=1e-5 if op == "layer_norm" else torch.finfo(fp32).eps), wide[1:],
                                torch.cat(gradients).double())  # fmt: skip
    for parameter, right in zip((weight, bias), truth, strict=True):
        # Of 4 * rows terms of about 1, whose roundings are independent of each other
        torch.testing.assert_close(parameter.main_grad.double(), right + 0.5, rtol=1e-5, atol=1e-5 * (4 * rows) ** 0.5)
        assert parameter.grad_added_to_main_grad and not parameter.grad.any() and parameter.grad.dtype == dtype
    # Without the extension's node the norm sees parameters in float32, for which long rows have another plan
    seen = (weight, bias) if _backend.extension else (weight.detach().float(), bias.detach().float())
    plain = OPS[op](batches[0].detach().requires_grad_(), *seen)
    assert same_bits(plain, OPS[op](batches[0], weight, bias, accumulate_grad=True))


@on_devices("op,options", [
    (op, options) for op in OPS
    for options in ({}, {"activation": "silu"}, {"memory_efficient": True}, {"dropout_p": 0.2})
])  # fmt: skip
def test_accumulate_grad_of_what_is_asked_for(device, op, options):
    """main_grad keeps what it has where another gradient is asked for; a weight of two norms; none where no gradients
    are recorded"""
    x = torch.randn(5, 16, device=device, requires_grad=True)
    weight, bias = (torch.rand(16, device=device).add(0.5).requires_grad_() for _ in range(2))

    def norm(*tensors):
        torch.manual_seed(0)
        return OPS[op](*tensors, accumulate_grad=True, **options)

    for t in (weight, bias):
        t.main_grad = torch.zeros(16, device=device)
    y = norm(x, weight, bias)
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    y.sum().backward(inputs=[x], retain_graph=True)
    assert not weight.main_grad.any() and not bias.main_grad.any() and not hasattr(weight, "grad_added_to_main_grad")
    y.sum().backward(inputs=[bias], retain_graph=True)
    assert not weight.main_grad.any() and bias.main_grad.any()
    torch.autograd.grad(y.sum(), weight, retain_graph=True)
    once = weight.main_grad.clone()
    assert once.any()
    y.sum().backward()
    torch.testing.assert_close(weight.main_grad, 2 * once)
    norm(norm(x.detach(), weight, None), weight, None).sum().backward()
    assert not torch.equal(weight.main_grad, 2 * once)
    before = weight.main_grad.clone()
    norm(x.detach(), weight, bias.detach()).sum().backward()  # x without a gradient
    torch.testing.assert_close(weight.main_grad - before, once, rtol=1e-3, atol=1e-4)
    del weight.main_grad
    with torch.no_grad():
        norm(x, weight, bias)
    torch.manual_seed(0)
    (both,) = torch.autograd.grad(OPS[op](x, weight, weight, **options).sum(), weight)
    for buffer in (torch.zeros(16, device=device), torch.zeros(16, 2, device=device)[:, 0]):
        weight.main_grad = buffer  # one parameter as weight and bias
        norm(x, weight, weight).sum().backward()
        torch.testing.assert_close(weight.main_grad, both, rtol=1e-3, atol=1e-3)


@on_devices("rounding,options", [
    (r, o) for r in reference.ROUNDINGS[1:] for o in ({}, {"activation": "silu"}, {"dropout_p": 0.3})
])  # fmt: skip
def test_accumulate_grad_keeps_roundings(device, rounding, options):
    """the bits of forward are those of a call without accumulate_grad; an offset is added unrounded"""
    x = torch.randn(64, 96, device=device).to(bf16).requires_grad_()
    weight = torch.rand(96, device=device).to(bf16).requires_grad_()
    weight.main_grad = torch.zeros(96, device=device)
    found = []
    for accumulates in (False, True):
        torch.manual_seed(0)
        y = OPS["rms_norm"](x, weight, rounding=rounding, accumulate_grad=accumulates, **options)
        found.append((y, *torch.autograd.grad(y.float().sum(), (x, weight))))
    assert all(same_bits(one, two) for one, two in zip(found[0][:2], found[1][:2], strict=True))
    torch.testing.assert_close(weight.main_grad, found[0][2].float(), rtol=0.01, atol=0.05)
    zeros = torch.full((96,), -0.0, device=device, dtype=bf16)
    if rounding.startswith("llama"):
        y = OPS["rms_norm"](x, zeros, rounding=rounding)
        assert torch.equal(y.signbit(), ~x.signbit())
    small = torch.full((96,), 0.003, device=device, dtype=bf16)
    y = OPS["rms_norm"](x, small, weight_offset=1.0, rounding=rounding)
    exact = OPS["rms_norm"](x.double(), small.double(), weight_offset=1.0)
    assert (y.double() - exact).abs().max() <= 1.01 * torch.finfo(bf16).eps * exact.abs().max()
    assert not same_bits(y, OPS["rms_norm"](x, None, normalized_shape=96, rounding=rounding))


@on_devices("op,options", [(op, o) for op in OPS for o in ({}, {"activation": "gelu"}, {"memory_efficient": True})])
def test_accumulate_grad_of_float64(device, op, options):
    """float64 parameters beside their float32 main_grad"""
    x, weight = (torch.rand(*shape, device=device, dtype=fp64).requires_grad_() for shape in ((5, 16), (16,)))
    wanted = torch.autograd.grad(OPS[op](x, weight, **options).sum(), weight)[0]
    weight.main_grad = torch.zeros(16, device=device)
    OPS[op](x, weight, accumulate_grad=True, **options).sum().backward()
    torch.testing.assert_close(weight.main_grad, wanted.float())


@on_devices("op", OPS, devices=("cpu",))
def test_accumulate_grad_refuses(device, op):
    """a parameter without a float32 main_grad: an error; a frozen one needs none"""
    x, weight = torch.randn(3, 4, requires_grad=True), torch.nn.Parameter(ones(4))
    with pytest.raises(ValueError, match="accumulate_grad needs weight.main_grad, a float32 tensor"):
        OPS[op](x, weight, accumulate_grad=True)
    weight.main_grad = ones(4, dtype=fp64)
    with pytest.raises(ValueError, match="accumulate_grad needs weight.main_grad"):
        OPS[op](x, weight, accumulate_grad=True)
    OPS[op](x, weight.detach(), accumulate_grad=True).sum().backward()
    weight.main_grad = ones(4)
    with pytest.raises(RuntimeError, match="accumulate_grad=True has first derivatives only"):
        torch.autograd.grad(OPS[op](x, weight, accumulate_grad=True).sum(), weight, create_graph=True)
    y = OPS[op](x, weight, accumulate_grad=True)
    if uses_kernels(device):
        with pytest.raises(RuntimeError, match="accumulate_grad=True adds one gradient of weight"):
            torch.autograd.grad(y, (x, weight), ones(3, *y.shape), is_grads_batched=True, retain_graph=True)
    weight.main_grad = None
    with pytest.raises(ValueError, match="accumulate_grad needs weight.main_grad"):
        y.sum().backward()


# ---- modules, Apex's names -------------------------------------------------------------------------------------------


@on_devices("cls,torch_cls", [(FusedAddLayerNorm, torch.nn.LayerNorm), (FusedAddRMSNorm, torch.nn.RMSNorm)])
def test_add_modules(device, cls, torch_cls):
    """constructor, state_dict, repr, copies, dropout in training only"""
    op = "layer_norm" if torch_cls is torch.nn.LayerNorm else "rms_norm"
    module = cls(24, dropout_p=0.5, residual_dtype=fp32, device=device)
    assert repr(module).endswith("elementwise_affine=True, dropout_p=0.5, residual_dtype=torch.float32)") or (
        "dropout_p=0.5, residual_dtype=torch.float32" in repr(module)
    )
    torch.nn.init.normal_(module.weight)
    assert list(module.state_dict()) == list(torch_cls(24).state_dict())
    torch_cls(24).load_state_dict(module.state_dict())
    x, residual = torch.randn(5, 24, device=device).to(bf16), torch.randn(5, 24, device=device)
    parameters = (module.weight, getattr(module, "bias", None), module.eps)
    torch.manual_seed(0)
    found = module(x, residual)
    torch.manual_seed(0)
    for one, two in zip(found, ADD_OPS[op](x, residual, *parameters, dropout_p=0.5), strict=True):
        assert same_bits(one, two)
    for twin in (module.eval(), copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        y, z = twin(x, None)
        assert z.dtype == fp32 and same_bits(y, ADD_OPS[op](x, None, *parameters, residual_dtype=fp32)[0])
    with pytest.raises(ValueError, match="dropout_p must be from 0 to 1"):
        cls(24, dropout_p=2)


@on_devices()
def test_adaptive_module(device):
    """no parameters unless asked for; y, or (y, residual_out)"""
    module = FusedAdaptiveLayerNorm(24, device=device)
    assert not module.state_dict() and repr(module) == f"FusedAdaptive{torch.nn.LayerNorm(24, 1e-6, False)}"
    x, scale, shift, gate = (torch.randn(*shape, device=device) for shape in ((2, 5, 24), (2, 24), (2, 24), (2, 24)))
    assert same_bits(module(x, scale, shift), fused_adaptive_layer_norm(x, scale, shift, eps=1e-6))
    y, z = FusedAdaptiveLayerNorm(24, eps=1e-5)(x, scale, shift, gate=gate, residual=x)
    torch.testing.assert_close((y, z), modulated("layer_norm", x, scale[:, None], shift[:, None], gate[:, None], x))
    assert list(FusedAdaptiveLayerNorm(24, elementwise_affine=True).state_dict()) == ["weight", "bias"]
    module = FusedAdaptiveRMSNorm(24, device=device)
    assert not module.state_dict() and repr(module).startswith("FusedAdaptiveRMSNorm((24,), eps=None")
    assert same_bits(module(x, scale), fused_adaptive_rms_norm(x, scale))
    y, z = FusedAdaptiveRMSNorm(24, eps=1e-5)(x, scale, shift, gate=gate, residual=x)
    torch.testing.assert_close((y, z), modulated("rms_norm", x, scale[:, None], shift[:, None], gate[:, None], x))
    assert list(FusedAdaptiveRMSNorm(24, elementwise_affine=True).state_dict()) == ["weight"]


@on_devices("cls,torch_cls", [(FusedGatedLayerNorm, torch.nn.LayerNorm), (FusedGatedRMSNorm, torch.nn.RMSNorm)])
def test_gated_modules(device, cls, torch_cls):
    """constructor, state_dict, repr, copies; a weight that has an offset begins so that the sum is 1"""
    op = "layer_norm" if torch_cls is torch.nn.LayerNorm else "rms_norm"
    module = cls(24, activation="sigmoid", norm_before_gate=False, group_size=8, weight_offset=1.0, device=device)
    assert not module.weight.any() and cls(24).weight.eq(1).all()
    assert repr(module).endswith(", activation='sigmoid', norm_before_gate=False, group_size=8, weight_offset=1.0)")
    assert repr(cls(24)) == repr(torch_cls(24)).replace(torch_cls.__name__, cls.__name__)[:-1] + (
        ", activation='silu', norm_before_gate=True)"
    )
    torch.nn.init.normal_(module.weight)
    assert list(module.state_dict()) == list(torch_cls(24).state_dict())
    torch_cls(24).load_state_dict(module.state_dict())
    x, gate = torch.randn(2, 5, 24, device=device).to(bf16)
    options = {"activation": "sigmoid", "norm_before_gate": False, "group_size": 8, "weight_offset": 1.0}
    y = GATED_OPS[op](x, gate, module.weight, getattr(module, "bias", None), module.eps, **options)
    for twin in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert same_bits(twin(x, gate), y)
    plain = cls(24, elementwise_affine=False, device=device)
    assert not plain.state_dict() and same_bits(plain(x, gate), GATED_OPS[op](x, gate, eps=plain.eps))


SIZED = [FusedLayerNorm, FusedRMSNorm, FusedAddLayerNorm, FusedAddRMSNorm, FusedAdaptiveLayerNorm, FusedAdaptiveRMSNorm,
         FusedGatedLayerNorm, FusedGatedRMSNorm,
         compat.FusedLayerNorm, compat.FusedRMSNorm, compat.MixedFusedLayerNorm, compat.MixedFusedRMSNorm]  # fmt: skip


@on_devices("cls", [(cls,) for cls in SIZED])
def test_modules_of_numpys_sizes(device, cls):
    """normalized_shape of numpy's ints, as torch.nn's norms take it: kept as Python's, and everything works"""
    numpy = pytest.importorskip("numpy")
    x = torch.randn(3, 16, device=device)
    takes = 3 if "Adaptive" in cls.__name__ else 2 if "Add" in cls.__name__ or "Gated" in cls.__name__ else 1
    arguments = (x, x, x)[:takes]
    for sizes in (numpy.prod((4, 4)), [numpy.int32(16)], numpy.array([16])):
        module = cls(sizes).to(device)
        assert module.normalized_shape == (16,) and type(module.normalized_shape[0]) is int
    truth = cls(16).to(device)(*arguments)
    torch.testing.assert_close(module(*arguments), truth)
    torch.testing.assert_close(torch.func.vmap(module)(*arguments), truth)
    torch.testing.assert_close(torch.compile(module, backend="eager", fullgraph=True)(*arguments), truth)
    torch.testing.assert_close(torch.export.export(module, arguments).module()(*arguments), truth)
    module.to("meta")(*(t.to("meta") for t in arguments))
    for wrong in (16.0, True, "16", [16.0], None):
        with pytest.raises(TypeError, match="normalized_shape must be an int or a sequence of ints"):
            cls(wrong)


@pytest.mark.parametrize("cls", [compat.FusedLayerNorm, compat.MixedFusedRMSNorm])
def test_memory_efficient_of_numpys_sizes(cls):
    numpy = pytest.importorskip("numpy")
    x = torch.randn(3, 16, requires_grad=True)
    cls(numpy.int64(16), memory_efficient=True)(x).sum().backward()


@on_devices("memory_efficient", [(False,), (True,)])
def test_apex_names(device, memory_efficient):
    """Apex's classes, functions and Functions, as Megatron and others call them"""
    torch.manual_seed(0)
    x = torch.randn(6, 32, device=device, requires_grad=True)
    truth = {"Layer": F.layer_norm(x, (32,)), "RMS": F.rms_norm(x, (32,), eps=1e-5)}
    options = {"memory_efficient": memory_efficient}
    for kind in ("Layer", "RMS"):
        for prefix in ("", "Mixed"):
            module = getattr(compat, f"{prefix}Fused{kind}Norm")(32, **options).to(device)
            torch.testing.assert_close(module(x), truth[kind])
            mixed = module.to(bf16) if not prefix else module
            assert mixed(x.bfloat16()).dtype == (bf16 if not prefix else fp32)
            assert list(module.state_dict()) == (["weight", "bias"] if kind == "Layer" else ["weight"])
    with pytest.raises(RuntimeError, match="elementwise_affine must be True"):
        compat.MixedFusedLayerNorm(32, elementwise_affine=False)
    fast = compat.FastLayerNorm(32, 1e-5, memory_efficient).to(device)
    torch.testing.assert_close(fast(x), truth["Layer"])
    weight, bias = torch.ones(32, device=device, requires_grad=True), torch.zeros(32, device=device, requires_grad=True)
    layer, rms = truth["Layer"], truth["RMS"]
    for found, wanted in (
        (compat.FastLayerNormFN.apply(x, weight, bias, 1e-5, memory_efficient), layer),
        (compat.FusedLayerNormAffineFunction.apply(x, weight, bias, (32,), 1e-5, memory_efficient), layer),
        (compat.FusedLayerNormFunction.apply(x, (32,), 1e-5), layer),
        (compat.FusedLayerNormAffineMixedDtypesFunction.apply(x, weight, bias, (32,), 1e-5), layer),
        (compat.FusedRMSNormAffineFunction.apply(x, weight, (32,), 1e-5, memory_efficient), rms),
        (compat.FusedRMSNormFunction.apply(x, (32,), 1e-5), rms),
        (compat.FusedRMSNormAffineMixedDtypesFunction.apply(x, weight, (32,), 1e-5), rms),
        (compat.fused_layer_norm_affine(x, weight, bias, 32, 1e-5), layer),
        (compat.fused_layer_norm(x, (32,), eps=1e-5), layer),
        (compat.fused_rms_norm_affine(x, weight, (32,), 1e-5), rms),
        (compat.fused_rms_norm(x, (32,), 1e-5), rms),
        (compat.mixed_dtype_fused_layer_norm_affine(x, weight, bias, (32,), 1e-5), layer),
        (compat.mixed_dtype_fused_rms_norm_affine(x, weight, (32,), 1e-5), rms),
    ):
        torch.testing.assert_close(found, wanted)
        gradient = torch.randn_like(found)
        (ours,), (theirs,) = (torch.autograd.grad(t, x, gradient, retain_graph=True) for t in (found, wanted))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


# ---- the reference backend -------------------------------------------------------------------------------------------


@pytest.mark.skipif(fused_layernorm.backend() == "reference", reason="this run is the reference backend's already")
def test_on_the_reference_backend():
    """this file on FUSED_LAYERNORM_BACKEND=reference, with every pair of the parameters of a test"""
    # Left out: what is of operators, of the kernels' sizes or of torch.compile; second derivatives, which are those of
    # reference.py with any backend; the judge, threads and the modules' sizes, which know none.
    others = "compile or inductor or dynamic_sizes or 20000 or 12345 or gradcheck or checker or numpys"
    others += " or stages_and_threads or gated_norm_in_pytorch or modulation_options"
    arguments = ["-q", "-x", "-p", "no:cacheprovider", "-k", f"cpu and not ({others})", __file__]
    code = f"import pytest, sys; sys.exit(pytest.main({arguments}))"
    environment = {"FUSED_LAYERNORM_BACKEND": "reference", "CUDA_VISIBLE_DEVICES": "", "FEW_CASES": "1"}
    done = run_code(code, environment=environment, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert re.search(r"\d\d+ passed", done.stdout)
