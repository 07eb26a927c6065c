"""The table of cases, their inputs, and the judge: what all tests of values and gradients share.

A `Case` is a norm: shapes, dtypes, options. A `Fusion` is a norm with what is fused around it. `expected` (of a `Case`)
and `expected_fusion` give, for y and for each gradient, the truth in fp64 on the same (already rounded) inputs, and for
each element the limit: |result - truth| <= limit. `check` and `judge_fusion` raise AssertionError where a result is
beyond it, or NaN, or of another dtype or shape. A new dtype, shape or option is a line in `cases`.

The limits come from rounding: the unit (eps) of every dtype that a value is stored in on the way, times the size of
that value, and `few` units of the accumulation type times the size of the terms that are added up; a plain norm may be
as far off as torch's in the same dtype. No limit is a percentage, so that a missing term of grad_input shows:

    grad_input = rstd * (wdy - x_hat * c1 - c2)        c1 = mean(x_hat * wdy), c2 = mean(wdy)

c1 and c2 are near 0 where grad_output is noise, and then nothing tells whether they were subtracted. So inputs and
gradients have means that are not 0, gradients have a part along x_hat, and both differ from row to row
(`gradient_like`). tests/test_judge.py plants such faults, at 64 to 16384 columns, and sees each judged wrong.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import zlib
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import fused_layernorm
from fused_layernorm import (
    _backend,
    _ops,
    functional,
    fused_adaptive_layer_norm,
    fused_adaptive_rms_norm,
    fused_add_layer_norm,
    fused_add_rms_norm,
    fused_gated_layer_norm,
    fused_gated_rms_norm,
    fused_layer_norm,
    fused_layer_norm_add,
    fused_rms_norm,
    fused_rms_norm_add,
    reference,
)

fp16, bf16, fp32, fp64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
DTYPE_NAMES = {fp16: "fp16", bf16: "bf16", fp32: "fp32", fp64: "fp64"}
OPS = {"layer_norm": fused_layer_norm, "rms_norm": fused_rms_norm}
HAS_CUDA = torch.cuda.is_available()
NO_CUDA = pytest.mark.skipif(not HAS_CUDA, reason="torch sees no CUDA device")
# For tests that run a second time, on the reference backend or on the wheel: of each table of tuples `every_pair`, of
# each table of cases its core.
FEW_CASES = bool(os.environ.get("FEW_CASES"))


# ---- the ways of a call ----------------------------------------------------------------------------------------------


@contextmanager
def through(route):
    """Calls of the library inside go this way: "node" (plain eager mode), "function" (NormFunction), "operator" or
    "reference" (_ops.path_of)."""
    if route == "node" or _ops.norm_forward is None:
        yield
        return
    ways = {"norm": functional._norm, "try_norm": _ops.not_implemented}
    if route != "function":
        ways["path_of"] = lambda *tensors: route
    with mock.patch.multiple(_ops, **ways):
        yield


def operator_arguments(x, residual=None, gate=None, weight=None, bias=None, philox=None, **options):
    """Those of torch.ops.fused_layernorm.norm_forward, and of reference.norm_forward."""
    return x, residual, gate, weight, bias, philox, *reference.Options(**{"normalized_ndim": 1, "eps": 1e-5} | options)


def backward_arguments(forward, grad_output, results, *, grad_residual_out=None, z_is_y=False, wants="xrgwb"):
    """Those of norm_backward for what norm_forward was given, and returned. `wants`: gradients, by first letter."""
    x, residual, gate, weight, bias, philox, *options = forward
    y, z, stats = results
    has_load_stage = reference.Options(*options).residual_dtype is not None
    of_residual, of_weight, of_bias = (
        t.dtype if letter in wants and t is not None else None
        for letter, t in (("r", residual), ("w", weight), ("b", bias))
    )
    wanted = (z_is_y, x.dtype, "x" in wants, "g" in wants and gate is not None, of_residual, of_weight, of_bias)
    saved = y if z_is_y else z if has_load_stage else x
    of_gate = x if gate is not None and has_load_stage else None  # in a gated norm that is `saved`
    tensors = (grad_output, grad_residual_out, saved, stats, of_gate, gate, weight, bias, philox)
    return *(None if t is None else t.detach() for t in tensors), *options, *reference.Wanted(*wanted)


# ---- devices -------------------------------------------------------------------------------------------------------


def every_pair(values):
    """Of a table of tuples a part in which each value meets every value of every other column that it meets in the
    table: where no three parameters interact, this finds what the whole table finds."""
    pairs = {row: set(itertools.combinations(enumerate(row), 2)) for row in values}
    missing, part = set().union(*pairs.values()), []
    while missing:
        part.append(max(pairs, key=lambda row: len(pairs[row] & missing)))
        missing -= pairs[part[-1]]
    return part


def on_devices(names="", values=((),), devices=("cpu", "cuda"), few_on_cpu=False):
    """Parametrize over the devices and, if `names` is given, over `values` (tuples, or pytest.param of them).

    Where there is no GPU, all of a test's CUDA cases appear as one skipped test. A case marked cuda_only is left out
    on the CPU. few_on_cpu: there, `every_pair` of the values. A CUDA kernel is chosen, and compiled, by many parameters
    at once, a loop of the CPU by few.
    """
    params = []
    few_on_cpu |= FEW_CASES and names.count(",") > 1
    if FEW_CASES:
        values = [value for value in values if getattr(value, "core", False)] or values
    for device in devices:
        marks = (pytest.mark.gpu, NO_CUDA) if device == "cuda" else ()
        for value in every_pair(values) if few_on_cpu and device == "cpu" else values:
            value = value if isinstance(value, tuple) else (value,)
            if device == "cpu" and any(getattr(part, "cuda_only", False) for part in value):
                continue
            core = [pytest.mark.core] if any(isinstance(part, Case) and part.core for part in value) else []
            name = "-".join([device] + [describe(part) for part in value])
            if device == "cuda" and not HAS_CUDA:
                params.append(pytest.param(device, *value, marks=marks, id="cuda"))
                break
            params.append(pytest.param(device, *value, marks=[*marks, *core], id=name))
    return pytest.mark.parametrize(",".join(["device", *names.split(",")] if names else ["device"]), params)


def describe(part):
    if isinstance(part, torch.dtype):
        return DTYPE_NAMES[part]
    if isinstance(part, tuple):
        return "x".join(map(str, part)) or "()"
    return part.__name__ if isinstance(part, type) else str(part)


QUICK_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


def opcheck(operator, arguments, traced=True):
    """torch.library.opcheck; without its tracing, which takes 50 times as long as all else, where `traced` is false:
    for numbers that the trace only hands on."""
    return torch.library.opcheck(operator, arguments, **({} if traced else {"test_utils": QUICK_CHECKS}))


# ---- the table -----------------------------------------------------------------------------------------------------

X = "x's dtype"  # the dtype of a weight or bias that follows x


@dataclass(frozen=True)
class Case:
    shape: tuple
    op: str = "layer_norm"
    dtype: torch.dtype = fp32
    weight: object = X  # a dtype, X, or None: absent
    bias: object = X
    normalized_ndim: int = 1
    heads_ndim: int = 0  # so many dimensions in front of those are of heads, each with a weight and bias of its own
    values: str = "normal"  # see `fill`
    layout: str = "contiguous"  # of x; see `laid_out`
    grad_layout: str = "contiguous"  # of grad_output
    parameter_layout: str = "contiguous"
    eps: float | None = 1e-5
    weight_offset: float = 0.0
    out_dtype: torch.dtype | None = None
    stats_grad: bool = True
    cuda_only: bool = False  # too large for the CPU's time
    core: bool = False  # also run on the reference backend

    def __str__(self):
        parts = [self.op, DTYPE_NAMES[self.dtype], "x".join(map(str, self.shape)) or "scalar"]
        for name, kind in (("w", self.weight), ("b", self.bias)):
            if kind is not X:
                parts.append(f"{name}:{DTYPE_NAMES.get(kind, 'none')}")
        for name in ("normalized_ndim", "heads_ndim", "values", "layout", "grad_layout", "parameter_layout", "eps",
                     "weight_offset", "stats_grad"):  # fmt: skip
            if getattr(self, name) != Case.__dataclass_fields__[name].default:
                parts.append(f"{name}:{getattr(self, name)}")
        return "-".join(parts + ([f"out:{DTYPE_NAMES[self.out_dtype]}"] if self.out_dtype else []))

    @property
    def normalized_shape(self):
        return self.shape[len(self.shape) - self.normalized_ndim :]

    @property
    def parameter_shape(self):
        return self.shape[len(self.shape) - self.normalized_ndim - self.heads_ndim :]

    @property
    def rows(self):
        return math.prod(self.shape[: len(self.shape) - self.normalized_ndim])

    @property
    def hidden_size(self):
        return math.prod(self.normalized_shape)

    @property
    def y_dtype(self):
        return self.out_dtype or self.dtype

    def parameter_dtype(self, name):
        kind = getattr(self, name)
        return self.dtype if kind is X else kind


HIDDEN_SIZES = (1, 7, 64, 192, 760, 769, 1000, 1024, 4096, 8192, 12345, 65536, 262144, 1048583)
ROWS = (0, 1, 3, 199, 4096)
CPU_ELEMENTS, CUDA_ELEMENTS = 600_000, 1 << 25  # of x; a single row may be longer

LAYOUTS = ("offset_by_one", "columns", "aligned_columns", "every_other_row", "stepped", "transposed", "expanded_rows")
GRAD_LAYOUTS = (*LAYOUTS, "expanded_scalar")
VALUES = (
    "mean_1e3",
    "mean_1e4",
    "constant",
    "tiny",
    "large",
    "first_is_outlier",
    "hot_columns",
    "seven_numbers",
    "mean_5",
    "far_rows",
)


def cases():
    found = []

    def add(shape, core=False, **options):
        for op in OPS:
            found.append(Case(tuple(shape), op=op, core=core, **options))

    # Sizes: every hidden size and number of rows, as far as time allows; all dtypes.
    for hidden_size in HIDDEN_SIZES:
        for rows in ROWS:
            elements = rows * hidden_size
            if elements > CUDA_ELEMENTS:
                continue
            for dtype in (fp32, bf16):
                core = hidden_size in (1, 64, 769, 4096) and rows in (0, 3, 199) and dtype == bf16
                add((rows, hidden_size), dtype=dtype, core=core, cuda_only=rows > 1 and elements > CPU_ELEMENTS)
        for dtype in (fp16, fp64):
            add((3, hidden_size), dtype=dtype, cuda_only=3 * hidden_size > CPU_ELEMENTS)
            if hidden_size <= 8192:
                add((199, hidden_size), dtype=dtype, cuda_only=199 * hidden_size > CPU_ELEMENTS)
    # The plans of the CUDA kernels (csrc/cuda/launch_plan.h), for few rows and for many: an odd number, so that where
    # rows share a warp some lanes have no last one
    for hidden_size in (1152, 1280, 1792, 2304, 2560, 3584, 6144, 7168):  # which plans of 16 bits are for
        for dtype in (fp16, bf16):
            for weight in (X, fp32):
                add((3, hidden_size), dtype=dtype, weight=weight, bias=weight, cuda_only=True)
                add((1201, hidden_size), dtype=dtype, weight=weight, bias=weight, cuda_only=True)
    for hidden_size in (24, 384, 1536, 2048, 2304, 3000, 4608, 5120, 10240, 24584):  # made of whole 16 bytes
        for dtype in (bf16, fp32):
            add((3, hidden_size), dtype=dtype, cuda_only=True)
            add((1201, hidden_size), dtype=dtype, cuda_only=True)
    # RMSNorm without bias has kernels of its own: each number of vectors a thread, few rows and many
    for hidden_size in (256, 264, 1024, 1152, 1536, 2560, 5120, 8192):
        for dtype in (fp16, bf16, fp32):
            add((3, hidden_size), dtype=dtype, bias=None, cuda_only=True)
            add(
                (1201, hidden_size), dtype=dtype, bias=None, weight_offset=1.0, layout="aligned_columns", cuda_only=True
            )
    for dtype in (bf16, fp32):
        add((40, 32768), dtype=dtype, bias=None, cuda_only=True)
    # Rows that are not whole 16-byte vectors: several in a warp, in a block, too long for shared memory
    for hidden_size in (33, 65, 130, 257, 385, 513, 1281, 1537, 2049, 3001, 4097, 6001, 8193, 24582):
        for dtype in (bf16, fp32):
            add((3, hidden_size), dtype=dtype, cuda_only=True)
            add((1201, hidden_size), dtype=dtype, cuda_only=True)
            add((37, hidden_size), dtype=dtype, layout="columns", grad_layout="offset_by_one", cuda_only=True)
    for hidden_size in (34, 258, 1026, 4098, 12346):  # of 16 bits, all rows begin at words of shared memory, or none
        add((1201, hidden_size), dtype=bf16, cuda_only=True)
        add((1201, hidden_size), dtype=fp16, layout="offset_by_one", cuda_only=True)
    for hidden_size in (70001, 120001):
        for dtype in (bf16, fp32):
            add((5, hidden_size), dtype=dtype, cuda_only=True)
            add((5, hidden_size), dtype=dtype, layout="offset_by_one", cuda_only=True)
    for dtype in (bf16, fp32):
        add((1 << 20, 64), dtype=dtype, cuda_only=True)
        add((8, 4_000_003), dtype=dtype, cuda_only=True)
        add((8, 4_000_000), dtype=dtype, cuda_only=True)
        # Rows that the blocks of the whole card share, few and many; the longest that fit, and longer ones
        for shape in ((5, 131080), (70, 150528), (100, 262152), (19, 540672), (17, 540680), (9, 1081344)):
            add(shape, dtype=dtype, cuda_only=True)
        add((40, 196608), dtype=dtype, bias=None, cuda_only=True)
        for shape in ((100, 262153), (28, 1_100_008)):  # so many huge rows are cut into groups
            add(shape, dtype=dtype, cuda_only=True)
        for hidden_size in (262152, 300_001, 4_000_000):  # one row, by several tiles a block
            add((1, hidden_size), dtype=dtype, weight=fp32, cuda_only=True)
        for hidden_size in (262152, 262153):
            add((2, hidden_size), dtype=dtype, weight=fp32, bias=None, cuda_only=True)
            add((2, hidden_size), dtype=dtype, weight=None, cuda_only=True)
            add((2, hidden_size), dtype=dtype, weight_offset=1.0, out_dtype=fp16, cuda_only=True)
            add((2, hidden_size), dtype=dtype, layout="offset_by_one", grad_layout="columns", cuda_only=True)
    add((3, 262146), dtype=fp64, cuda_only=True)
    add((3, 262146), dtype=fp64, layout="offset_by_one", grad_layout="offset_by_one", cuda_only=True)

    # Weight and bias: each absent, of x's dtype, or fp32 beside a 16-bit x.
    for dtype in (fp16, bf16, fp32, fp64):
        kinds = (None, X, fp32) if dtype in (fp16, bf16) else (None, X)
        for weight in kinds:
            for bias in kinds:
                for hidden_size in (200, 203):
                    add((23, hidden_size), dtype=dtype, weight=weight, bias=bias, core=hidden_size == 203)

    # Shapes: one to four dimensions, several of them normalized.
    for shape, normalized_ndim in (
        ((64,), 1), ((1,), 1), ((3, 5), 2), ((2, 3, 40), 1), ((2, 3, 40), 2), ((2, 3, 40), 3),
        ((2, 3, 5, 24), 1), ((2, 3, 5, 24), 2), ((2, 3, 5, 24), 3), ((2, 3, 5, 24), 4), ((0, 3, 8), 1), ((2, 0, 8), 1),
    ):  # fmt: skip
        for dtype in (bf16, fp32):
            add(shape, normalized_ndim=normalized_ndim, dtype=dtype, core=True)
    add((2, 3, 40), normalized_ndim=2, weight=None, bias=None)

    # A weight for each head.
    for dtype in (bf16, fp32):
        add((2, 5, 3, 24), heads_ndim=1, dtype=dtype, core=True)
        add((2, 5, 3, 24), heads_ndim=2, dtype=dtype, weight=fp32, bias=fp32, weight_offset=1.0, core=True)
        add((2, 5, 3, 24), heads_ndim=1, dtype=dtype, normalized_ndim=2, core=True)
        add((7, 2, 5, 33), heads_ndim=2, dtype=dtype, bias=None, parameter_layout="stepped")
        add((7, 5, 33), heads_ndim=1, dtype=dtype, weight=None, parameter_layout="offset_by_one")
        add((5, 64), heads_ndim=1, dtype=dtype)  # a row for each
        add((7, 1, 64), heads_ndim=1, dtype=dtype)
        add((0, 5, 64), heads_ndim=1, dtype=dtype)
        add((2, 5, 4, 64), heads_ndim=1, dtype=dtype, layout="qkv", grad_layout="qkv", core=True)
        for layout in ("heads_first", "transposed"):
            add((2, 3, 4, 32), heads_ndim=1, dtype=dtype, layout=layout, grad_layout=layout)
        for shape in ((512, 32, 64), (1025, 24, 128), (3, 8192, 64), (40_000, 3, 40), (64, 12, 769), (129, 8, 4096)):
            add(shape, heads_ndim=1, dtype=dtype, cuda_only=True)
    for dtype in (fp16, fp64):
        add((9, 5, 33), heads_ndim=1, dtype=dtype, stats_grad=False)
        add((9, 5, 33), heads_ndim=1, dtype=dtype, out_dtype=fp32)

    # Layouts of x, of grad_output and of the parameters.
    for dtype in (bf16, fp32):
        for hidden_size in (96, 1024, 1025):
            for layout in LAYOUTS:
                add((37, hidden_size), dtype=dtype, layout=layout, core=hidden_size == 96)
            for layout in GRAD_LAYOUTS:
                add((37, hidden_size), dtype=dtype, grad_layout=layout, core=hidden_size == 96)
            add((37, hidden_size), dtype=dtype, layout="columns", grad_layout="offset_by_one")
            for layout in ("offset_by_one", "stepped"):
                add((37, hidden_size), dtype=dtype, parameter_layout=layout)
        add((2, 5, 4, 64), dtype=dtype, layout="qkv", core=True)
        add((2, 5, 4, 64), dtype=dtype, layout="qkv", grad_layout="qkv", normalized_ndim=2)
        add((2, 5, 4, 63), dtype=dtype, layout="qkv", grad_layout="transposed")
        add((2, 3, 4, 32), dtype=dtype, layout="heads_first", grad_layout="heads_first")
        add((2, 3, 4, 32), dtype=dtype, grad_layout="expanded_scalar", normalized_ndim=3)
    add((37, 96), dtype=fp64, layout="columns", grad_layout="stepped")

    # Values: where a careless method loses its digits.
    for dtype in (fp16, bf16, fp32, fp64):
        for values in VALUES:
            for hidden_size in (64, 769, 4096):
                add((19, hidden_size), dtype=dtype, values=values, core=hidden_size == 769)
    for values in ("first_is_outlier", "hot_columns"):  # many rows: few of them lose digits
        for hidden_size in (46, 60, 256):
            add((2000, hidden_size), values=values)
    for hidden_size in (182, 184):  # rounding errors of equal squares have one sign
        add((4000, hidden_size), values="seven_numbers", stats_grad=False)
    for values in ("mean_1e3", "mean_1e4", "first_is_outlier"):
        add((2, 65536), values=values)
        add((2, 262144), values=values)
        add((2, 524292), values=values)

    # Options.
    for dtype in (fp16, bf16, fp32, fp64):
        add((11, 129), dtype=dtype, weight_offset=1.0, core=True)
        add((11, 129), dtype=dtype, weight_offset=1.0, bias=None, eps=1e-2)
        for out_dtype in (fp16, bf16, fp32, fp64):
            if out_dtype != dtype:
                add((11, 129), dtype=dtype, out_dtype=out_dtype, core=True)
        add((0, 129), dtype=dtype, out_dtype=fp32)
    for dtype in (fp16, bf16):
        add((11, 129), dtype=dtype, weight=fp32, bias=fp32, weight_offset=1.0, out_dtype=fp32)
        add((4096, 64), dtype=dtype, weight=fp32, bias=fp32, grad_layout="expanded_scalar")
    add((11, 129), values="tiny", eps=0.0)
    found.append(Case((11, 129), op="rms_norm", eps=None, values="tiny"))
    return list(dict.fromkeys(found))


# ---- inputs --------------------------------------------------------------------------------------------------------


def fill(shape, values, generator):
    """fp64 values to be rounded to a dtype; what each name means is written here and nowhere else."""
    noise = torch.randn(shape, dtype=fp64, generator=generator, device=generator.device)
    if values == "normal":
        return 0.3 + 1.7 * noise  # neither mean 0 nor sigma 1: returning the input must be wrong
    if values == "mean_1e3":
        return 1e3 + noise
    if values == "mean_1e4":
        return 1e4 + noise
    if values == "mean_5":  # CUDA: sums about 0 where all have 16 bits, else a second pass
        return 5 + noise
    if values == "constant":  # a different number in every row
        return (3.3 + noise[..., :1]).expand(shape)
    if values == "tiny":
        return 1e-4 * noise
    if values == "large":  # squares overflow fp16
        return 2e3 * noise
    if values == "first_is_outlier":  # a shift by the first element would cancel
        noise[..., 0] = 3e4
        return noise
    if values == "hot_columns":
        noise[..., ::17] *= 300
        return noise
    if values == "far_rows":  # beside others, whose sums CUDA repeats with theirs where they share a warp
        rows = noise.view(-1, shape[-1])
        rows[::3, 8:] += 1e3  # so that the first elements do not tell the mean
        rows[1::3] += 1e3
        return noise
    if values == "seven_numbers":  # of a row, each in adjacent columns
        columns = shape[-1]
        return 1e3 + noise[..., :7].repeat_interleave(-(-columns // 7), -1)[..., :columns]
    raise ValueError(values)


def gradient_like(x, case, generator):
    """fp64 values for the gradient of a norm of x: for each row noise, a mean and a part along x_hat.

    The mean makes c2 and the part along x_hat makes c1 larger than what rounding hides; both differ from row to row, so
    that those of another row are wrong. Rows of equal elements have no x_hat and get noise and a mean.
    """
    x = x.double().reshape(case.rows, case.hidden_size)
    noise = torch.randn(x.shape, dtype=fp64, generator=generator, device=generator.device).to(x.device)
    row = torch.arange(case.rows, dtype=fp64, device=x.device)[:, None]
    centred = x - x.mean(1, keepdim=True)
    sigma = centred.square().mean(1, keepdim=True).sqrt()
    x_hat = (centred / sigma).nan_to_num(0.0, 0.0, 0.0).clamp(-4, 4)
    gradient = noise + 0.4 + 0.2 * (2 * row).cos() + (0.5 + 0.25 * (2 * row + 1).sin()) * x_hat
    return gradient.reshape(case.shape)


def laid_out(t, layout):
    """A tensor of t's values whose memory is laid out in the named way, with NaN in whatever lies between."""
    nan = float("nan")
    if layout == "contiguous" or t.dim() == 0:
        return t.contiguous()
    if layout == "offset_by_one":
        view = t.new_full((t.numel() + 1,), nan)[1:].view(t.shape)
    elif layout == "columns":  # of a wider matrix, misaligned
        view = t.new_full((*t.shape[:-1], t.shape[-1] + 24), nan)[..., 1 : 1 + t.shape[-1]]
    elif layout == "aligned_columns":
        view = t.new_full((*t.shape[:-1], -(-t.shape[-1] // 16) * 16 + 32), nan)[..., 16 : 16 + t.shape[-1]]
    elif layout == "every_other_row":
        view = t.new_full((2 * t.shape[0], *t.shape[1:]), nan)[::2]
    elif layout == "stepped":  # the last dimension is not contiguous
        view = t.new_full((*t.shape[:-1], 2 * t.shape[-1]), nan)[..., ::2]
    elif layout == "transposed":
        return t.transpose(0, -1).contiguous().transpose(0, -1)
    elif layout == "qkv":  # [batch, tokens, 3, heads, head_dim]
        view = t.new_full((*t.shape[:-2], 3, *t.shape[-2:]), nan)[..., 1, :, :]
    elif layout == "heads_first":  # [batch, heads, tokens, head_dim] as attention leaves it
        return t.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "expanded_rows":
        return t[:1].expand(t.shape)
    elif layout == "expanded_scalar":  # what y.sum().backward() sends
        return t.reshape(-1)[:1].reshape([1] * t.dim()).expand(t.shape)
    else:
        raise ValueError(layout)
    view.copy_(t)
    return view


@contextmanager
def one_thread():
    """For the many small operations that make and judge values: threads cost them more than they bring."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass
class Inputs:
    x: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    grad_output: torch.Tensor

    def present(self):
        return [name for name in ("x", "weight", "bias") if getattr(self, name) is not None]


@one_thread()
def make_inputs(case, device):
    generator = torch.Generator(device).manual_seed(zlib.crc32(str(case).encode()))
    x = laid_out(fill(case.shape, case.values, generator).to(case.dtype), case.layout)
    parameters = {}
    for name, shift in (("weight", 0.7 - case.weight_offset), ("bias", 0.1)):
        dtype = case.parameter_dtype(name)
        if dtype is not None:
            noise = torch.randn(case.parameter_shape, dtype=fp64, generator=generator, device=device)
            parameters[name] = laid_out((shift + 0.5 * noise).to(dtype), case.parameter_layout)
    grad_output = laid_out(gradient_like(x, case, generator).to(case.y_dtype), case.grad_layout)
    return Inputs(x, parameters.get("weight"), parameters.get("bias"), grad_output)


def ones(*shape, dtype=fp32, device="cpu"):
    return torch.ones(shape, dtype=dtype, device=device)


# The nodes of plain eager mode and of the operator: one in C++, or with the wheel's library alone two in Python
NODE = "FusedNormBackward" if _backend.extension else "NormFunctionBackward"
OPERATOR_NODE = "FusedNormBackward" if _backend.extension else "OperatorFunctionBackward"
NEEDS_EXTENSION = pytest.mark.skipif(
    _backend.library is not None, reason="of the node in C++; the wheel's library alone has it in Python"
)


def uses_kernels(device):
    return fused_layernorm._backend.has_kernels_for(torch.device(device).type)


# ---- running a norm ------------------------------------------------------------------------------------------------


@contextmanager
def poisoned():
    """Inside, memory from torch.empty and at::empty holds NaN (integers: their largest value), on any device."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill_before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fill_before


def fused(case, x, weight, bias):
    """The library's function called as a user would; normalized_shape only where it is needed."""
    is_asked = case.heads_ndim or (weight is None and bias is None)
    options = {"normalized_shape": case.normalized_shape} if is_asked else {}
    if case.weight_offset and weight is not None:
        options["weight_offset"] = case.weight_offset
    if case.out_dtype is not None:
        options["out_dtype"] = case.out_dtype
    if not case.stats_grad:
        options["stats_grad"] = False
    return OPS[case.op](x, weight, bias, case.eps, **options)


def with_torch(case, x, weight, bias):
    """The same from torch.nn.functional, in the dtype of what it is given (bias and offset added around it)."""
    if not case.stats_grad:  # torch has no such norm
        return in_plain_operations(case, x, weight, bias)
    if case.weight_offset and weight is not None:
        weight = weight + case.weight_offset
    if case.heads_ndim:  # nor such a weight
        y = with_torch(replace(case, heads_ndim=0, weight_offset=0.0), x, None, None)
        y = y if weight is None else y * weight
        return y if bias is None else y + bias
    # As one normalized dimension: with several, backward of torch 2.11 fails above 65536 rows (pytorch 193016).
    shape, flat = x.shape, x.reshape(*x.shape[: x.dim() - case.normalized_ndim], case.hidden_size)
    weight, bias = (None if t is None else t.reshape(-1) for t in (weight, bias))
    if case.op == "layer_norm":
        if weight is None and bias is not None and x.is_cuda:  # torch's gradient of bias may then be empty (192016)
            wide = reference_dtype(case)
            y = F.layer_norm(flat.to(wide), flat.shape[-1:], eps=case.eps) + bias.to(wide)
            return y.to(x.dtype).reshape(shape)
        return F.layer_norm(flat, flat.shape[-1:], weight, bias, case.eps).reshape(shape)
    eps = torch.finfo(reference_dtype(case)).eps if case.eps is None else case.eps
    y = F.rms_norm(flat, flat.shape[-1:], weight, eps)
    return (y if bias is None else y + bias).reshape(shape)


def in_plain_operations(case, x, weight, bias):
    """The definition, for fp64 input: what is called the truth below."""
    dims = tuple(range(-case.normalized_ndim, 0))
    eps = torch.finfo(reference_dtype(case)).eps if case.eps is None else case.eps

    def source(x):  # what statistics are taken of
        return x if case.stats_grad else x.detach()

    if case.op == "layer_norm":
        x = x - source(x).mean(dims, keepdim=True)
        x = x - source(x).mean(dims, keepdim=True)  # the first mean was rounded
    y = x * (source(x).square().mean(dims, keepdim=True) + eps).rsqrt()
    if weight is not None:
        y = y * (weight + case.weight_offset)
    return y if bias is None else y + bias


def reference_dtype(case):
    """What statistics and sums are kept in."""
    return fp64 if case.dtype == fp64 else fp32


def run(norm, case, inputs, wants=("x", "weight", "bias")):
    """{"y": ..., "x": gradient of x, ...} from calling `norm(case, x, weight, bias)`; only present inputs appear."""
    tensors = {}
    for name in inputs.present():
        tensors[name] = getattr(inputs, name).detach().requires_grad_(name in wants)
    asked = [name for name in tensors if name in wants]
    y = norm(case, tensors["x"], tensors.get("weight"), tensors.get("bias"))
    gradients = torch.autograd.grad(y, [tensors[name] for name in asked], inputs.grad_output)
    return {"y": y.detach(), **dict(zip(asked, gradients, strict=True))}


# ---- judging -------------------------------------------------------------------------------------------------------


@one_thread()
def expected(case, inputs):
    """{name: (truth, limit)} in fp64, for y and for each gradient: |result - truth| <= limit must hold elementwise.

    limit is the larger of
      1. one unit in the last place of the result's dtype (half of it is rounding, the rest is for results beside a
         tie), plus `few` units of the accumulation type times the size of the terms that were added up:
           y            |x_hat * w| + |b|
           grad_input   rstd * (|wdy| + |x_hat| * mean|x_hat * wdy| + mean|wdy|); frozen statistics: rstd * |wdy|
           grad_weight  sqrt(rows) * rms over the rows of (grad_output * x_hat), + |the sum|; grad_bias likewise.
                        sqrt(rows), because the roundings of different rows are independent of each other; those of
                        `repeats` equal rows (dimensions of stride 0) are not: sqrt(rows * repeats)
         where few = 4 + log2(hidden_size) / 2: what sums by a tree, or by chains that are short, keep;
      2. 1.1 times torch's own error in that dtype, at its largest: in the row for y and grad_input, anywhere for the
         parameters.
    Below the smallest normal number, tiny, the spacing of numbers no longer shrinks with them: a term below it counts
    as that large, and squares below it (sigma < 1e-19 in fp32, with an eps as small) add tiny / (var + eps) to few.
    grad_weight's are products of grad_output and x - mean before rstd multiplies them, and count as tiny * rstd.
    All of x_hat shifts with the mean. The mean of x - mean, which corrects it, is rounded: as a sum of terms of both
    signs few / 2 * mean|x_hat| units; and where it is the mean of x - m, with m the mean of part of the row (16-bit x
    on CUDA: csrc/cuda/forward_rows.cuh, kSample), which lies at most 2.5 sigma from it, 2.5 more. Rounding the mean
    itself: |mean| * rstd units, in fp32 `few` units of these only, as x - mean is corrected; other dtypes are granted
    the whole (16-bit results hide it, fp64 has digits to spare). Without either, an element beside the mean would be
    held to fewer digits than its row has.
    """
    # fp64 has digits to spare: long plain chains are allowed there, and the truth is rounded like the result.
    unit = torch.finfo(fp32).eps if case.dtype != fp64 else 8 * torch.finfo(fp64).eps
    wide = Inputs(*(None if t is None else t.detach().double() for t in vars(inputs).values()))
    truth = run(in_plain_operations, case, wide)
    torchs = torch_result(case, inputs)

    def matrix(t):
        return t.reshape(case.rows, case.hidden_size)

    x, dy = matrix(wide.x), matrix(wide.grad_output)
    w = torch.ones((), dtype=fp64, device=x.device)
    if wide.weight is not None:
        w = beside_rows(wide.weight + case.weight_offset, case)
    mean = x.mean(1, keepdim=True) if case.op == "layer_norm" else torch.zeros_like(x[:, :1])
    eps = torch.finfo(reference_dtype(case)).eps if case.eps is None else case.eps
    rstd = ((x - mean).square().mean(1, keepdim=True) + eps).rsqrt()
    x_hat = (x - mean) * rstd
    tiny = torch.finfo(reference_dtype(case)).tiny
    few = 4 + case.hidden_size.bit_length() / 2
    few_of_row = few + tiny * rstd.square()
    shift = mean.abs() * rstd * (few * unit if case.dtype == fp32 else 1)
    if case.op == "layer_norm":
        shift = shift + few / 2 * x_hat.abs().mean(1, keepdim=True)
        if x.is_cuda and case.dtype in (fp16, bf16):
            shift = shift + 2.5
    wdy = (w * dy).abs() + tiny
    mean_wdy, mean_x_hat_wdy = wdy.mean(1, keepdim=True), (x_hat * wdy).abs().mean(1, keepdim=True)

    leading = inputs.grad_output.dim() - case.normalized_ndim
    repeats = math.prod(case.shape[dim] for dim in range(leading) if inputs.grad_output.stride(dim) == 0)

    def over_rows(terms):  # sqrt(rows) * rms
        return (repeats * sum_over_rows(terms.square(), case)).sqrt()

    b = 0.0 if wide.bias is None else beside_rows(wide.bias.abs(), case)
    terms = {
        "y": few_of_row * ((x_hat * w).abs() + b + tiny) + shift * w.abs(),
        "x": rstd * (few_of_row * (wdy + x_hat.abs() * mean_x_hat_wdy + mean_wdy)
                     + shift * (x_hat.abs() * mean_wdy + mean_x_hat_wdy)),
        "weight": over_rows(
            (dy * (few_of_row * x_hat.abs() + shift)).abs().clamp_min(few * tiny * rstd.clamp_min(1))
        ),
        "bias": few * over_rows(dy.abs().clamp_min(tiny)),
    }  # fmt: skip
    if not case.stats_grad:
        terms["x"] = rstd * few_of_row * wdy
    dtypes = {"y": case.y_dtype, "x": case.dtype}
    limits = {}
    for name, value in truth.items():
        dtype = dtypes.get(name) or case.parameter_dtype(name)
        info = torch.finfo(dtype)
        by_formula = info.eps * value.abs() + info.eps * info.tiny + unit * terms[name].reshape(value.shape)
        if name in ("weight", "bias"):
            by_formula += few * unit * value.abs()
        torchs_error = (torchs[name].double() - value).abs().nan_to_num(0.0)
        if name in ("y", "x"):
            torchs_error = matrix(torchs_error).amax(1, keepdim=True).expand(x.shape).reshape(value.shape)
        elif value.numel():
            torchs_error = torchs_error.amax()
        limits[name] = (value, torch.maximum(by_formula, 1.1 * torchs_error))
    return limits


def torch_result(case, inputs):
    """torch's own answer in x's dtype; where torch does not take the mix of dtypes, in fp32 and then rounded."""
    plain = not case.weight_offset and case.out_dtype is None and (case.op == "layer_norm" or inputs.bias is None)
    plain = plain and case.stats_grad and not case.heads_ndim
    present = [getattr(inputs, name) for name in inputs.present()]
    if plain and all(t.dtype == case.dtype for t in present):
        return run(with_torch, case, inputs)
    kept = reference_dtype(case)
    wide = Inputs(*(None if t is None else t.detach().to(kept) for t in vars(inputs).values()))
    found = run(with_torch, case, wide)
    dtypes = {"y": case.y_dtype, "x": case.dtype}
    return {name: t.to(dtypes.get(name) or case.parameter_dtype(name)) for name, t in found.items()}


def check(case, inputs, found, wants=("y", "x", "weight", "bias")):
    """Raise AssertionError unless `found` (as `run` returns it) is right in dtype, shape and every value."""
    names = [name for name in ("y", *inputs.present()) if name in wants]
    assert list(found) == names, f"results {list(found)}, wanted {names}"
    everything = expected(case, inputs)
    for name in names:
        result, (truth, limit) = found[name], everything[name]
        like = inputs.x if name == "y" else getattr(inputs, name)
        dtype = case.y_dtype if name == "y" else like.dtype
        title = "y" if name == "y" else f"gradient of {name}"
        assert result.dtype == dtype, f"{title}: {result.dtype}, wanted {dtype}"
        assert result.shape == like.shape, f"{title}: shape {tuple(result.shape)}, wanted {tuple(like.shape)}"
        assert result.device == like.device, f"{title}: on {result.device}, wanted {like.device}"
        assert torch.isfinite(truth).all(), f"{title}: the truth itself is not finite: a mistake in the table"
        error = (result.double() - truth).abs()
        good = error <= limit  # False where either is NaN
        if not good.all():
            at = (error / limit.clamp_min(1e-300)).nan_to_num(torch.inf).argmax()
            raise AssertionError(
                f"{title}: {int((~good).sum())} of {good.numel()} wrong; the worst, at {unravel(at, result.shape)}: "
                f"{result.reshape(-1)[at].item()!r}, wanted {truth.reshape(-1)[at].item()!r} "
                f"+- {limit.reshape(-1)[at].item():.3g}"
            )


def unravel(index, shape):
    return tuple(int(i) for i in torch.unravel_index(index.cpu(), shape))


def same_bits(a, b):
    """Whether two results have one dtype, one shape and the same values; 0 equals -0, and NaN equals nothing."""
    return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())


def same_to_rounding(a, b):
    """Whether two results of one formula agree up to the rounding of two kernels: 16 roundings of float32 in each, of
    terms as large as the row's largest value, and one of the dtype."""
    wide, off = b.double().abs(), (a.double() - b.double()).abs()
    bound = 2 * 16 * 2.0**-24 * wide.amax(-1, keepdim=True) + torch.finfo(b.dtype).eps * wide
    return a.dtype == b.dtype and a.shape == b.shape and bool((off <= bound).all())


def rows_of(t, case):
    return t.reshape(case.rows, case.hidden_size)


def beside_rows(parameter, case):
    """weight or bias as it broadcasts to rows_of(x)."""
    return rows_of(parameter.expand(case.shape), case) if case.heads_ndim else parameter.reshape(-1)


def sum_over_rows(terms, case):
    """Of rows, what becomes of a parameter's gradient."""
    return terms.view(case.shape).sum_to_size(case.parameter_shape) if case.heads_ndim else terms.sum(0)


def promised_rows(case, inputs):
    """The rows in which values are promised: finite, with squares whose sum is within range, and var + eps > 0."""
    x, dy = rows_of(inputs.x.double(), case), rows_of(inputs.grad_output.double(), case)
    info = torch.finfo(reference_dtype(case))
    in_range = case.hidden_size * x.square().amax(1) < info.max / 4
    if case.op == "layer_norm":  # not x - mean, which rounding the mean leaves
        is_constant = x.amax(1) - x.amin(1) <= info.eps * x.abs().amax(1)
    else:
        is_constant = ~x.any(1)
    return in_range & dy.isfinite().all(1) & ~(is_constant & (case.eps == 0))


def judge(case, inputs, found, wants):
    """AssertionError unless each promised value is within its limit, and what cannot be finite is not."""
    assert list(found) == ["y", *wants]
    limits = expected(case, inputs)
    torchs = torch_result(case, inputs)
    promised = promised_rows(case, inputs)
    parameters_finite = all(t is None or bool(t.isfinite().all()) for t in (inputs.weight, inputs.bias))
    for name, result in found.items():
        like = inputs.x if name == "y" else getattr(inputs, name)
        dtype = case.y_dtype if name == "y" else like.dtype
        assert (result.dtype, result.shape, result.device) == (dtype, like.shape, like.device), name
        truth, limit = limits[name]
        error = (result.double() - truth).abs()
        # Too large for the result's type: infinity is the rounding.
        overflows = (truth.abs() + limit >= torch.finfo(dtype).max) & (result.double() == truth.sign() * math.inf)
        good = (error <= limit) | overflows
        # Where a sum overflows on the way in torch too, it may here.
        good |= truth.isfinite() & ~torchs[name].isfinite() & ~result.isfinite()
        if name in ("y", "x"):
            matters = promised[:, None].expand(case.rows, case.hidden_size).reshape(like.shape)
            # No finite number where there is none: NaN and infinity in a row are not lost.
            lost = ~truth.isfinite() & result.isfinite() & rows_of(inputs.x, case).isfinite().logical_not().any(
                1, keepdim=True).expand(case.rows, case.hidden_size).reshape(like.shape)  # fmt: skip
            assert not lost.any(), f"{name}: {int(lost.sum())} finite numbers where the truth is none"
            good |= ~truth.isfinite() & ~result.isfinite()
        else:
            matters = torch.full_like(good, bool(promised.all()) and parameters_finite)
        wrong = matters & ~good
        assert_none_wrong(name, wrong, result, truth, error, limit, torchs[name])


def assert_none_wrong(name, wrong, result, truth, error, limit, torchs=None):
    """Where elements are wrong, name the worst."""
    if not wrong.any():
        return
    at = int((error / limit.clamp_min(1e-300)).nan_to_num(math.inf).where(wrong, 0.0).argmax())
    beside = "" if torchs is None else f", torch {torchs.reshape(-1)[at].item()!r}"
    raise AssertionError(
        f"{name}: {int(wrong.sum())} of {wrong.numel()} wrong; the worst, at {at}: "
        f"{result.reshape(-1)[at].item()!r}, wanted {truth.reshape(-1)[at].item()!r} "
        f"+- {limit.reshape(-1)[at].item():.3g}{beside}"
    )


def equal_bits(a, b):
    """same_bits, but here NaN equals NaN: some of the values drawn lead to one."""
    return same_bits(a.nan_to_num(7.0, math.inf, -math.inf), b.nan_to_num(7.0, math.inf, -math.inf)) and torch.equal(
        a.isnan(), b.isnan()
    )


# ---- norms with what is fused around them ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """Where the elements of a tensor lie: dimensions in this order, each with a step and a gap, the first at offset."""

    offset: int = 0
    order: tuple = ()  # of the dimensions, outermost first; (): as they come
    steps: tuple = ()
    gaps: tuple = ()
    expanded: tuple = ()  # dimensions of stride 0

    def place(self, t):
        """A tensor laid out so, of t's values (of those at index 0 along expanded dimensions), NaN in the gaps."""
        shape = t.shape
        for dim in self.expanded:
            t = t.narrow(dim, 0, min(1, t.shape[dim]))
        order = self.order or tuple(range(t.dim()))
        steps, gaps = self.steps or (1,) * t.dim(), self.gaps or (0,) * t.dim()
        room = [t.shape[dim] * steps[dim] + gaps[dim] for dim in order]
        memory = t.new_full((self.offset + math.prod(room),), float("nan"))[self.offset :].view(room)
        picked = tuple(slice(0, t.shape[dim] * steps[dim], steps[dim]) for dim in order)
        placed = memory[picked].permute([order.index(dim) for dim in range(t.dim())])
        placed.copy_(t)
        return placed.expand(shape) if t.numel() else placed.new_empty(shape)


@dataclass(frozen=True)
class Sample:
    """A case and the numbers its inputs are made from."""

    case: Case
    seed: int = 0
    mean: float = 0.0
    sigma: float = 1.0
    grad_scale: float = 1.0
    special: tuple = ()  # (name of a tensor, value, position) written over what was drawn
    memory: dict = field(default_factory=dict)  # name of a tensor: Memory, or a layout (see `laid_out`)
    wants: tuple = ("x", "weight", "bias")
    route: str = "node"

    @one_thread()
    def inputs(self, device, drawn_on="cpu"):
        """The tensors on the device, from a generator on the CPU: a failure on one device can be tried on the other.

        Tests of large tensors draw on the device itself.
        """
        generator = torch.Generator(drawn_on).manual_seed(self.seed)
        case, limit = self.case, torch.finfo(self.case.dtype).max

        def normal(shape):
            return torch.randn(shape, dtype=fp64, generator=generator, device=drawn_on)

        tensors = {"x": (self.mean + self.sigma * fill(case.shape, case.values, generator)).clamp(-limit, limit)}
        tensors["x"] = tensors["x"].to(case.dtype)
        for name, shift in (("weight", 0.7 - case.weight_offset), ("bias", 0.1)):
            dtype = case.parameter_dtype(name)
            tensors[name] = None if dtype is None else (shift + 0.5 * normal(case.parameter_shape)).to(dtype)
        tensors["grad_output"] = (self.grad_scale * gradient_like(tensors["x"], case, generator)).to(case.y_dtype)
        for name, value, position in self.special:
            if tensors[name] is not None and tensors[name].numel():
                tensors[name].view(-1)[position % tensors[name].numel()] = value
        for name, memory in self.memory.items():
            if tensors[name] is not None:
                tensors[name] = placed(tensors[name].to(device), memory)
        return Inputs(**{name: None if t is None else t.to(device) for name, t in tensors.items()})


def placed(t, memory):
    """t's values laid out as a Memory or the name of a layout says."""
    return laid_out(t, memory) if isinstance(memory, str) else memory.place(t)


ADD_OPS = {"layer_norm": fused_add_layer_norm, "rms_norm": fused_add_rms_norm}
ADAPTIVE_OPS = {"layer_norm": fused_adaptive_layer_norm, "rms_norm": fused_adaptive_rms_norm}
AFTER_OPS = {"layer_norm": fused_layer_norm_add, "rms_norm": fused_rms_norm_add}
GATED_OPS = {"layer_norm": fused_gated_layer_norm, "rms_norm": fused_gated_rms_norm}
# gelu without the sum 1 + erf or 1 + tanh, of which nothing is left for large negative numbers, in float64 too
ACTIVATIONS = {
    "relu": F.relu,
    "gelu": lambda y: 0.5 * y * torch.special.erfc(-math.sqrt(0.5) * y),
    "gelu_tanh": lambda y: y * torch.sigmoid(math.sqrt(8 / math.pi) * (y + 0.044715 * y**3)),
    "silu": F.silu,
}
GATES = ACTIVATIONS | {"sigmoid": torch.sigmoid, None: lambda gate: gate}
ARGUMENTS = ("x", "residual", "weight", "bias", "scale", "shift", "gate")
GRADIENTS = {"y": "grad_output", "z": "grad_z"}


@dataclass(frozen=True)
class Fusion(Sample):
    """A norm of z = residual + dropout(x), or residual + gate * x, and what is made of it; or a gated norm; or a norm
    to which residual is added ("after").

    Groups of a gated norm are heads of the case, whose last two dimensions are one to the call.
    """

    kind: str = "plain"  # of function: "plain", "add", "after", "adaptive" or "gated"
    residual: torch.dtype | None = None
    residual_dtype: torch.dtype | None = None
    dropout_p: float = 0.0  # of x (add), or of y (plain)
    activation: str | None = None  # gated: of the gate
    gate: torch.dtype | None = None  # of a gated norm
    gates_y: bool = True
    groups: bool = False
    rounding: str = "torch"
    memory_efficient: bool = False
    accumulate_grad: bool = False
    modulations: dict = field(default_factory=dict)  # "scale", "shift", "gate": (shape, dtype)
    uses: tuple = ("y",)  # the results that get a gradient

    @property
    def z_dtype(self):
        if self.gate and not self.gates_y:
            return reference_dtype(self.case)
        return self.residual_dtype or (self.residual if self.kind != "after" else None) or self.case.dtype

    @property
    def follows(self):
        """Whether something is made of the norm, which then is not rounded yet."""
        if self.gate:
            return self.gates_y
        return bool(
            self.kind == "after" or self.activation or self.modulations or (self.dropout_p and self.kind == "plain")
        )

    @property
    def rounds_x_hat(self):
        return self.rounding.startswith("llama")

    def is_composed(self, device):
        """Whether z and what becomes of its gradient are PyTorch operations."""
        of_stages = self.kind == "add" and self.route != "reference" and self.rounding in ("torch", "gemma")
        return not (of_stages and _backend.has_kernels_for(torch.device(device).type))

    @property
    def norm(self):
        """The norm inside, of z; its parameters have the dtype of their gradients."""
        dtypes = {name: self.case.parameter_dtype(name) for name in ("weight", "bias")}
        if self.accumulate_grad:
            dtypes = {name: dtype and fp32 for name, dtype in dtypes.items()}
        out_dtype = reference_dtype(self.case) if self.follows else self.case.y_dtype
        return replace(self.case, dtype=self.z_dtype, out_dtype=out_dtype, **dtypes)

    @one_thread()
    def tensors(self, device, drawn_on="cpu"):
        """{name: tensor}: the arguments that there are, and the gradients of y and z."""
        generator = torch.Generator(drawn_on).manual_seed(self.seed + 1)

        def normal(shape, dtype, scale=1.0):
            noise = torch.randn(shape, dtype=fp64, generator=generator, device=drawn_on)
            return (scale * (0.2 + noise)).to(dtype)

        case = self.case
        given = {n: t for n, t in vars(replace(self, memory={}).inputs(drawn_on, drawn_on)).items() if t is not None}
        if self.residual:
            given["residual"] = normal(case.shape, self.residual, self.sigma)
        for name, (shape, dtype) in self.modulations.items():
            given[name] = normal(shape, dtype)
        if self.gate:
            given["gate"] = normal(case.shape, self.gate, 2.0)
        if self.memory_efficient and self.seed % 2:  # y tells x: no weight near 0, and none smaller than its bias
            for name, make in (("weight", lambda w: 1 + w.abs() - case.weight_offset), ("bias", torch.tanh)):
                if name in given:
                    given[name] = make(given[name].double()).to(given[name].dtype)
        adds_x = self.residual and self.kind != "after"
        if adds_x or (self.gate and not self.gates_y):  # then the norm is of z, not of x
            z = given["x"].double()
            if self.gate:
                z = z * GATES[self.activation](given["gate"].double())
            elif "gate" in given:
                z = z * reference.as_modulation("gate", given["gate"], given["x"], case.normalized_ndim).double()
            z = z + given["residual"].double() if adds_x else z
            if all(name != "grad_output" for name, *_ in self.special):
                given["grad_output"] = (self.grad_scale * gradient_like(z, case, generator)).to(case.y_dtype)
        grad_z = self.grad_scale * gradient_like(given["x"], case, generator)
        given["grad_z"] = grad_z.to(self.z_dtype)
        return {name: placed(t.to(device), self.memory.get(name, Memory())) for name, t in given.items()}

    def keeps(self, device):
        """Which elements dropout keeps, or None."""
        if not self.dropout_p:
            return None
        torch.manual_seed(self.seed)
        philox = functional._draw_philox(torch.empty(0, device=device))
        mask = reference.dropout_mask(philox, self.case.rows, self.case.hidden_size, self.dropout_p)
        return mask.view(self.case.shape)

    def call(self, given):
        """{"y": ..., "z": ..., "mask": ...}: what the function returns."""
        case = self.case
        options = {"eps": case.eps, "normalized_shape": case.normalized_shape, "out_dtype": case.out_dtype}
        if self.kind == "gated":
            options |= {"activation": self.activation, "norm_before_gate": self.gates_y,
                        "weight_offset": case.weight_offset}  # fmt: skip
            tensors = [given.get(name) for name in ("x", "gate", "weight", "bias")]
            if self.groups:
                options |= {"group_size": case.hidden_size, "normalized_shape": None}
                tensors = [t if t is None else t.flatten(-2) for t in tensors]
            return {"y": GATED_OPS[case.op](*tensors, **options).view(case.shape)}
        if self.kind != "adaptive":
            options |= {"dropout_p": self.dropout_p, "activation": self.activation, "stats_grad": case.stats_grad,
                        "weight_offset": case.weight_offset}  # fmt: skip
            options |= {"rounding": self.rounding} if case.op == "rms_norm" else {}
        x, residual, weight, bias = (given.get(name) for name in ("x", "residual", "weight", "bias"))
        if self.kind == "after":  # residual's dtype is y's by default
            own = {"out_dtype": None if case.out_dtype == self.residual else case.y_dtype}
            names = ("eps", "normalized_shape", "weight_offset", "stats_grad")
            return {"y": AFTER_OPS[case.op](x, residual, weight, bias, accumulate_grad=self.accumulate_grad, **own,
                                            **{name: options[name] for name in names})}  # fmt: skip
        torch.manual_seed(self.seed)
        if self.kind == "plain":
            return {"y": OPS[case.op](x, weight, bias, memory_efficient=self.memory_efficient,
                                      accumulate_grad=self.accumulate_grad, **options)}  # fmt: skip
        options["residual_dtype"] = self.residual_dtype
        if self.kind == "add":
            found = ADD_OPS[case.op](x, residual, weight, bias, return_dropout_mask=True, **options)
            return dict(zip(("y", "z", "mask"), found, strict=True))
        modulations = {name: given[name] for name in self.modulations} | {"shift": given.get("shift")}
        found = ADAPTIVE_OPS[case.op](x, weight=weight, bias=bias, residual=residual, **modulations, **options)
        return {"y": found} if residual is None else dict(zip(("y", "z"), found, strict=True))

    # The definition, in fp64.

    def wide(self, given):
        """The arguments as fp64 leaves, modulations of x's number of dimensions."""
        found = {name: t.detach() for name, t in given.items() if name in ARGUMENTS}
        for name in self.modulations:
            found[name] = reference.as_modulation(name, found[name], given["x"], self.case.normalized_ndim)
        return {name: t.double().requires_grad_() for name, t in found.items()}

    def opened(self, given):
        """What a gated norm's x is multiplied by, before the norm."""
        return 1.0 if self.gates_y else GATES[self.activation](given["gate"])

    def after(self, n, given, keeps):
        """y, from the norm."""
        if self.gate:
            return n * GATES[self.activation](given["gate"]) if self.gates_y else n
        if self.kind == "after":
            return given["residual"] + n
        if self.modulations:
            n = n * (1 + given["scale"]) + given.get("shift", 0.0)
        if self.activation:
            n = ACTIVATIONS[self.activation](n)
        return dropped(n, keeps, self.dropout_p) if keeps is not None and self.kind == "plain" else n

    def definition(self, given, rounded_z, keeps):
        """(y, z, norm of z), in the dtype given; z has the value it was rounded to, and the derivative of what was; the
        z of a gated norm is not rounded."""
        z = given["x"] * (given.get("gate", 1.0) if not self.gate else self.opened(given))
        if keeps is not None and self.kind == "add":
            z = dropped(z, keeps, self.dropout_p)
        if self.kind != "after":
            z = z + given.get("residual", 0.0)
        if not self.gate:
            z = rounded_z.to(z.dtype) + (z - z.detach())
        n = in_plain_operations(self.norm, z, given.get("weight"), given.get("bias"))
        return self.after(n, given, keeps), z, n


def dropout_scale(p):
    return 1 / (1 - p) if p < 1 else 0.0


def dropped(t, keeps, p):
    return torch.where(keeps, t * dropout_scale(p), 0.0)


def gradients_of(outputs, leaves, gradients, **options):
    """torch.autograd.grad, with zeros for None, and for outputs that do not require grad."""
    pairs = [(out, gradient) for out, gradient in zip(outputs, gradients, strict=True) if out.requires_grad]
    found = [None] * len(leaves)
    if pairs:
        outputs, gradients = zip(*pairs, strict=True)
        found = torch.autograd.grad(outputs, leaves, gradients, allow_unused=True, **options)
    return [torch.zeros_like(leaf) if f is None else f for leaf, f in zip(leaves, found, strict=True)]


def value_and_slope(function, t):
    leaf = t.detach().requires_grad_()
    value = function(leaf)
    return value.detach(), torch.autograd.grad(value.sum(), leaf)[0]


def leaves_of(given, wants):
    return {name: t.detach().requires_grad_(name in wants) for name, t in given.items() if name in ARGUMENTS}


def run_fusion(drawn, given, wants):
    """What the call returns, and the gradients that are wanted; those that go to main_grad from there."""
    leaves = leaves_of(given, wants)
    accumulated = [name for name in ("weight", "bias") if drawn.accumulate_grad and name in wants]
    for name in accumulated:
        leaves[name].main_grad = torch.zeros(leaves[name].shape, dtype=fp32, device=leaves[name].device)
    found = drawn.call(leaves)
    gradients = gradients_of([found[name] for name in drawn.uses], [leaves[name] for name in wants],
                             [given[GRADIENTS[name]] for name in drawn.uses])  # fmt: skip
    found = {name: t.detach() for name, t in found.items()} | dict(zip(wants, gradients, strict=True))
    for name in accumulated:
        assert not found[name].any() and found[name].dtype == leaves[name].dtype
        found[name] = leaves[name].main_grad
    return found


def judge_fusion(drawn, given, found, keeps=None):
    """AssertionError unless the mask, z and every other result in `found` are right; keeps: of dropout, if not drawn's.

    z is right to the last bit, with a gate to the rounding of its product. y and the gradients: `expected_fusion`.
    """
    device = given["x"].device
    keeps = drawn.keeps(device) if keeps is None else keeps
    if "mask" in found:
        assert torch.equal(found["mask"], torch.ones_like(found["mask"]) if keeps is None else keeps), "mask"
    z = z_of_fusion(drawn, given, keeps)
    if "z" in found:
        assert (found["z"].dtype, found["z"].shape) == (drawn.z_dtype, drawn.case.shape), "z"
        if "gate" in given:  # the product may be rounded before it is added, or not
            kept = reference_dtype(drawn.case)
            gate = reference.as_modulation("gate", given["gate"], given["x"], drawn.case.normalized_ndim)
            product, wide_z = (given["x"].to(kept) * gate.to(kept)).double(), z.double()
            info = torch.finfo(z.dtype)
            close = (product.abs() + wide_z.abs()) * unit_of(kept) + info.eps * (wide_z.abs() + info.tiny)
            assert ((found["z"].double() - wide_z).abs() <= close)[z.isfinite()].all(), "z"
            z = found["z"]
        assert found["z"].is_contiguous() and equal_bits(found["z"], z), "z"
    compare_with_limits(drawn, given, found, expected_fusion(drawn, given, z, keeps))


@one_thread()
def z_of_fusion(drawn, given, keeps):
    """What is normalized, rounded to its dtype."""
    case, kept, z = drawn.case, reference_dtype(drawn.case), given["x"]
    if drawn.gate and not drawn.gates_y:  # not rounded by the norm, and here to the accumulation type
        return z.to(kept) * GATES[drawn.activation](given["gate"].to(kept))
    if drawn.kind in ("plain", "after", "gated"):
        return z
    if "gate" in given:
        z = z.to(kept) * reference.as_modulation("gate", given["gate"], z, case.normalized_ndim).to(kept)
    elif keeps is not None:
        z = reference.dropout(z, keeps, drawn.dropout_p, kept)
    z = z.to(kept)
    return (z if "residual" not in given else given["residual"].to(kept) + z).to(drawn.z_dtype).contiguous()


def unit_of(kept):
    """The unit of an accumulation type; of fp64 eight, as its digits are to spare and the truth is rounded likewise."""
    return torch.finfo(kept).eps * (8 if kept == fp64 else 1)


@one_thread()
def expected_fusion(drawn, given, z, keeps):
    """{name: (truth, limit, which elements matter, dtype)} of y and of each gradient, for the z that was normalized.

    The norm, and the gradients that come out of it, may be off by the limit of `expected`. What is made of the norm may
    be off by what it changes by where the norm is off by its limit, and 16 units of the accumulation type for each
    term; so may its derivative, and through the norm's backward goes an absolute bound of that. Sums over rows that
    share a modulation are judged as those of a weight. The activation of a gate may be off by 16 units of the gate's
    size (of 1, for sigmoid, and for its derivative), and a z that it is a factor of likewise. Beyond that, one unit of
    each dtype that a value is rounded to on the way: z's where gradients of z are added by autograd, x's for x_hat with
    rounding="llama" (and for its gradient, where that is autograd's) and the dtype of its product with weight for what
    follows, y's for memory_efficient.
    """
    case, norm = drawn.case, drawn.norm
    kept, device = reference_dtype(case), given["x"].device
    unit, scale_of_kept = unit_of(kept), dropout_scale(drawn.dropout_p)
    wide = drawn.wide(given)
    y, z_of, n = drawn.definition(wide, z, keeps)
    dy, dz = (given[GRADIENTS[r]].double() if r in drawn.uses else torch.zeros_like(y) for r in ("y", "z"))
    *truths, dn, dz_in_all = gradients_of([y, z_of], [*wide.values(), n, z_of], [dy, dz])
    truths = dict(zip(wide, truths, strict=True)) | {"y": y.detach()}
    wide = {name: t.detach() for name, t in wide.items()}
    inputs = Inputs(z, given.get("weight"), given.get("bias"), dn)
    limits = {name: limit for name, (_, limit) in expected(norm, inputs).items()}

    def by_row(t):
        return rows_of(t, case)

    x = by_row(z.double())
    mean = x.mean(1, keepdim=True) if case.op == "layer_norm" else torch.zeros_like(x[:, :1])
    rstd = ((x - mean).square().mean(1, keepdim=True) + case.eps).rsqrt()
    x_hat = ((x - mean) * rstd).abs()
    w = x_hat.new_ones(())
    if "weight" in wide:
        w = beside_rows((wide["weight"] + case.weight_offset).abs(), case)
    n = n.detach()
    if drawn.rounds_x_hat:
        coarse = torch.finfo(case.dtype)
        limits["y"] += 3 * coarse.eps * ((x_hat * w).view(n.shape) + n.abs() + coarse.tiny)
    terms, terms_of_slope = n.abs(), torch.ones_like(n)
    activated = wide["gate"] if drawn.gate else n
    if drawn.activation == "gelu_tanh":  # its slope has a term of that size times 1 - tanh², which cancels
        terms_of_slope = terms_of_slope + 0.4 * activated.abs() * (1 + 0.14 * activated.square())
    if drawn.gate:
        terms_of_gate_slope = terms_of_slope
        terms_of_gate = torch.ones_like(n) if drawn.activation == "sigmoid" else activated.abs()
        factor_of_gate, gate_slope = value_and_slope(GATES[drawn.activation], wide["gate"])
        terms, terms_of_slope = terms * terms_of_gate, terms_of_gate
    if drawn.modulations:
        factor = 1 + wide["scale"].abs()
        terms, terms_of_slope = terms * factor + wide.get("shift", n.new_zeros(())).abs(), terms_of_slope * factor
    if drawn.kind == "after":
        terms = terms + wide["residual"].abs()
    if drawn.kind == "plain" and keeps is not None:
        terms, terms_of_slope = terms * scale_of_kept, terms_of_slope * scale_of_kept
    off, off_norm = torch.zeros_like(n), limits["y"]  # of dn, of n
    if drawn.follows:
        values, slopes = [], []
        for sign in (0, 1, -1):
            at = (n + sign * off_norm).requires_grad_()
            values.append(drawn.after(at, wide, keeps))
            slopes += gradients_of([values[-1]], [at], [torch.ones_like(n)])

        def moved(of):
            return torch.maximum((of[1] - of[0]).abs(), (of[2] - of[0]).abs()).detach()

        info = torch.finfo(case.y_dtype)
        off = dy.abs() * (moved(slopes) + 16 * unit * terms_of_slope)
        size = y.detach().abs()
        limits["y"] = moved(values) + 16 * unit * terms + info.eps * (size + info.tiny)
        if drawn.rounds_x_hat:  # what follows is computed in the dtype that x_hat * weight was rounded to
            beside = [given[name].dtype for name in ("weight", "bias") if name in given]
            between = torch.finfo(functools.reduce(torch.promote_types, beside, drawn.z_dtype))
            limits["y"] = limits["y"] + between.eps * (size + between.tiny)
    if device.type == "cuda" and (
        (drawn.activation and not drawn.gate) or (drawn.kind == "plain" and keeps is not None)
    ):
        between = torch.finfo(torch.promote_types(drawn.z_dtype, case.y_dtype))  # to which dn is rounded
        off = off + between.eps * (dn.abs() + between.tiny)
    off, wdy = by_row(off), by_row(dn.abs()) * w
    off_x_hat = torch.zeros_like(off)
    if drawn.rounds_x_hat and (drawn.route == "reference" or not uses_kernels(device)):
        off, off_x_hat = off + 3 * coarse.eps * by_row(dn.abs()), coarse.eps * (x_hat + coarse.tiny)
    if drawn.memory_efficient and _ops.y_tells_x(given["x"], inputs.weight, inputs.bias, case.weight_offset):
        info, b = torch.finfo(case.dtype), wide["bias"].abs() if "bias" in wide else n.new_zeros(())
        off_x_hat = by_row(info.eps * (n.abs() + info.tiny) + off_norm + 4 * unit * (n.abs() + b)) / w
    off_z = w * off
    if drawn.gate and not drawn.gates_y:
        off_factor = by_row(16 * unit * wide["x"].abs() * terms_of_gate)
        off_rstd = rstd * (x_hat * off_factor).mean(1, keepdim=True)  # in proportion
        off_x_hat = rstd * (off_factor + off_factor.mean(1, keepdim=True)) + x_hat * off_rstd
        limits["y"] = limits["y"] + (w * off_x_hat).view(n.shape)
        off_z = off_z + off_rstd * (wdy + x_hat * (x_hat * wdy).mean(1, keepdim=True) + wdy.mean(1, keepdim=True))
    if case.stats_grad:
        off_z = off_z + x_hat * (x_hat * w * off + off_x_hat * wdy).mean(1, keepdim=True)
        off_z = off_z + (w * off).mean(1, keepdim=True) + off_x_hat * (x_hat * wdy).mean(1, keepdim=True)
    off_z = limits.pop("x") + (rstd * off_z).view(n.shape)
    for name, more in (("weight", off * x_hat + by_row(dn.abs()) * off_x_hat), ("bias", off)):
        if name in limits:
            limits[name] = limits[name] + sum_over_rows(more, case).view(case.parameter_shape)

    # From z to what it is made of; and sums over the rows that share a modulation.
    if drawn.kind not in ("plain", "after", "gated"):
        rounded = torch.finfo(drawn.z_dtype).eps if drawn.is_composed(device) else unit
        off_z = off_z + rounded * dz_in_all.abs() + unit * off_z
    factor = wide.get("gate", n.new_ones(())).abs()
    if drawn.kind == "add" and keeps is not None:
        factor = keeps * scale_of_kept
    if drawn.gate:
        factor = 1.0 if drawn.gates_y else factor_of_gate.abs()
        pairs = ((dy, 0.0), (n, off_norm)) if drawn.gates_y else ((dz_in_all, off_z), (wide["x"], 0.0))
        (one, off_one), (two, off_two) = ((t.abs(), off_t) for t, off_t in pairs)  # of whose product it is the factor
        limits["gate"] = (
            off_one * two + one * off_two
        ) * gate_slope.abs() + 16 * unit * one * two * terms_of_gate_slope
    limits |= {"x": off_z * factor, "residual": torch.zeros_like(off_z) if drawn.kind == "after" else off_z}
    if drawn.gate and not drawn.gates_y:
        limits["x"] = limits["x"] + 16 * unit * dz_in_all.abs() * terms_of_gate
    few = 4 + case.rows.bit_length() / 2
    summed = {
        "scale": (dy * n, dy.abs() * off_norm), "shift": (dy, torch.zeros_like(dy)),
        "gate": (dz_in_all * wide["x"], off_z * wide["x"].abs()),
    }  # fmt: skip
    for name in drawn.modulations:
        each, off_each = summed[name]
        like = wide[name].shape
        limits[name] = off_each.sum_to_size(like)
        limits[name] += few * unit * (each.square().sum_to_size(like).sqrt() + each.sum_to_size(like).abs())

    promised = promised_rows(norm, inputs) & by_row(dz).isfinite().all(1)
    if drawn.kind not in ("plain", "after"):  # the gradient of the norm is rounded to z's dtype, perhaps to infinity
        promised &= (by_row(off_z + dz.abs() + dz_in_all.abs()) < torch.finfo(drawn.z_dtype).max / 2).all(1)
    limits_of = {}
    for name, truth in truths.items():
        like = given["x" if name == "y" else name]
        dtype = case.y_dtype if name == "y" else getattr(norm, name) if name in ("weight", "bias") else like.dtype
        truth, limit, info = truth.view(like.shape), limits[name].view(like.shape), torch.finfo(dtype)
        is_node = drawn.rounding == "llama" and drawn.route == "node" and case.bias is None and _ops.extension
        if drawn.accumulate_grad and drawn.rounds_x_hat and not is_node and name in ("weight", "bias"):
            coarser = torch.finfo(like.dtype)  # main_grad gets a gradient of the parameter's dtype
            limit = limit + coarser.eps * (truth.abs() + coarser.tiny)
        if name not in ("y", "weight", "bias"):  # the rounding of others is in their limits
            limit = limit + info.eps * (truth.abs() + info.tiny) + 2 * unit * truth.abs()
        of_rows = name in ("y", "x", "residual") or (name == "gate" and drawn.gate)
        matters = promised[:, None].expand_as(x).reshape(case.shape) if of_rows else promised.all().expand_as(truth)
        limits_of[name] = (truth, limit, matters, dtype)
    return limits_of


def compare_with_limits(drawn, given, found, expected):
    """AssertionError unless each of `found` is of its dtype and shape, on its device, and within its limit."""
    for name, result in found.items():
        if name in ("z", "mask"):
            continue
        like = given["x" if name == "y" else name]
        truth, limit, matters, dtype = expected[name]
        assert (result.dtype, result.shape, result.device) == (dtype, like.shape, like.device), name
        error = (result.double() - truth).abs()
        good = error <= limit  # False where either is NaN
        good |= (truth.abs() + limit >= torch.finfo(dtype).max) & (result.double() == truth.sign() * math.inf)
        wrong = matters & ~good
        assert_none_wrong(name, wrong, result, truth, error, limit)


def check_fusion(drawn, device):
    """Runs a fusion on memory that is NaN where nothing was written, and judges it; (its tensors, its results)."""
    given = drawn.tensors(device, drawn_on=device)
    with poisoned():
        found = run_fusion(drawn, given, tuple(name for name in ARGUMENTS if name in given))
    judge_fusion(drawn, given, found)
    return given, found
