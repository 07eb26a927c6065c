"""Random cases against fp64: shapes, strides, alignments, dtypes, options, what requires grad, values of every kind.

    pytest tests/test_fuzz.py                                    a few thousand cases, the same ones on every run
    FUZZ=20000 pytest tests/test_fuzz.py                         so many of each kind, new ones on every run
    FUZZ=20000 FUZZ_DEVICE=cuda pytest tests/test_fuzz.py        on the GPU

What is drawn of a norm is written in `OPTIONS` (fields of test_correctness.Case: a new option is a line there) and in
the few strategies below it; what is drawn of what is fused around one, in `Around` and `arounds`. How far from the
truth a result may be is the formula of test_correctness.expected, and what `judge_around` makes of it. A failure ends
with the smallest case that hypothesis finds; it belongs into a list at the end of this file, under a name.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from dataclasses import dataclass, field, replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from fused_layernorm import (
    _ops,
    functional,
    fused_adaptive_layer_norm,
    fused_adaptive_rms_norm,
    fused_add_layer_norm,
    fused_add_rms_norm,
    reference,
)
from test_correctness import (
    HAS_CUDA,
    OPS,
    Case,
    Inputs,
    X,
    bf16,
    expected,
    fill,
    fp16,
    fp32,
    fp64,
    fused,
    in_plain_operations,
    one_thread,
    poisoned,
    reference_dtype,
    run,
    same_bits,
    torch_result,
    uses_kernels,
    with_torch,
)

pytest.importorskip("hypothesis", reason="needs the package hypothesis")
from hypothesis import HealthCheck, Phase, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

DEVICE = os.environ.get("FUZZ_DEVICE", "cpu")
EXAMPLES = int(os.environ.get("FUZZ", "0"))
MOST_SECONDS = float(os.environ.get("FUZZ_SECONDS", "inf"))  # of each test; then failures are not made smaller
PART = float(os.environ.get("FUZZ_PART", "1"))  # of the usual number: where each case takes much longer
MOST_ELEMENTS = 1 << (13 if DEVICE == "cpu" else 21)  # of x: many small cases find more than a few large ones

pytestmark = [
    pytest.mark.skipif(DEVICE == "cuda" and not HAS_CUDA, reason="FUZZ_DEVICE=cuda, but torch sees no CUDA device"),
    *([pytest.mark.gpu] if DEVICE == "cuda" else []),
]


# ---- what is drawn -------------------------------------------------------------------------------------------------


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
class Fuzzed:
    case: Case
    seed: int = 0
    mean: float = 0.0
    sigma: float = 1.0
    grad_scale: float = 1.0
    special: tuple = ()  # (name of a tensor, value, position) written over what was drawn
    memory: dict = field(default_factory=dict)  # name of a tensor: Memory
    wants: tuple = ("x", "weight", "bias")
    route: str = "node"

    @one_thread()
    def inputs(self, device):
        """The tensors on the device, from a generator on the CPU: a failure on one device can be tried on the other."""
        generator = torch.Generator().manual_seed(self.seed)
        case, limit = self.case, torch.finfo(self.case.dtype).max

        def normal(shape):
            return torch.randn(shape, dtype=fp64, generator=generator)

        tensors = {"x": (self.mean + self.sigma * fill(case.shape, case.values, generator)).clamp(-limit, limit)}
        tensors["x"] = tensors["x"].to(case.dtype)
        for name, shift in (("weight", 0.7 - case.weight_offset), ("bias", 0.1)):
            dtype = case.parameter_dtype(name)
            tensors[name] = None if dtype is None else (shift + 0.5 * normal(case.normalized_shape)).to(dtype)
        tensors["grad_output"] = (self.grad_scale * (0.2 + normal(case.shape))).to(case.y_dtype)
        for name, value, position in self.special:
            if tensors[name] is not None and tensors[name].numel():
                tensors[name].view(-1)[position % tensors[name].numel()] = value
        for name, memory in self.memory.items():
            if tensors[name] is not None:
                tensors[name] = memory.place(tensors[name].to(device))
        return Inputs(**{name: None if t is None else t.to(device) for name, t in tensors.items()})


# Fields of Case, drawn independently of each other. A strategy for weight_offset sees no weight: `cases` mends that.
OPTIONS = {
    "op": st.sampled_from(["layer_norm", "rms_norm"]),
    "weight": st.sampled_from([X, fp32, None]),
    "bias": st.sampled_from([X, fp32, None]),
    "values": st.sampled_from(["normal", "hot_columns", "first_is_outlier", "constant"]),
    "eps": st.sampled_from([1e-5, 1e-6, 1e-12, 1e-2, 0.0]),
    "weight_offset": st.sampled_from([0.0, 1.0, -0.25]),
    "out_dtype": st.sampled_from([None, None, fp16, bf16, fp32, fp64]),
    "stats_grad": st.sampled_from([True, True, True, False]),
}
DTYPES = st.sampled_from([fp16, bf16, fp32, fp64])
# Around the lengths at which a vector, a warp, a block or a plan of the kernels is full.
EDGES = [power + off for power in (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192) for off in (-1, 0, 1, 8)]
LONG = [16384, 16392, 24576, 32769, 65536, 131072, 262144, 262147] if DEVICE == "cuda" else []
SPECIAL = [float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 1e-45, 1e-40, 6e-8, 65504.0, 1e18, 1e30]


@st.composite
def cases(draw, **fixed):
    options = {**OPTIONS, "dtype": DTYPES, **{name: st.just(value) for name, value in fixed.items()}}
    whole = st.integers(1, 375).map(lambda n: 8 * n)  # rows made of 16-byte vectors
    hidden_sizes = st.one_of(st.integers(1, 70), st.integers(1, 3000), whole, st.sampled_from(EDGES + LONG))
    normalized = draw(st.one_of(st.tuples(hidden_sizes), st.tuples(st.integers(1, 9), st.integers(1, 40))))
    most = max(1, MOST_ELEMENTS // math.prod(normalized))
    leading = []
    for _ in range(draw(st.integers(0, 3))):
        leading.append(draw(st.one_of(st.integers(1, min(most, 9)), st.integers(0, min(most, 300)))))
        most //= max(leading[-1], 1)
        if not most:
            break
    case = Case((*leading, *normalized), normalized_ndim=len(normalized), **{k: draw(s) for k, s in options.items()})
    if case.weight is None:
        case = replace(case, weight_offset=0.0)
    if case.dtype == fp64:
        case = replace(case, **{name: X for name in ("weight", "bias") if getattr(case, name) == fp32})
    return case


@st.composite
def memories(draw, dims, may_expand):
    if not dims or draw(st.integers(0, 2)) == 0:
        return Memory(draw(st.integers(0, 9)))
    numbers = st.one_of(st.just(0), st.integers(0, 17))
    return Memory(
        offset=draw(st.integers(0, 17)),
        order=draw(st.one_of(st.just(tuple(range(dims))), st.permutations(range(dims)).map(tuple))),
        steps=tuple(draw(st.sampled_from([1, 1, 1, 2, 3])) for _ in range(dims)),
        gaps=tuple(draw(numbers) for _ in range(dims)),
        expanded=tuple(d for d in range(dims) if may_expand and draw(st.integers(0, 7)) == 0),
    )


SIGMAS = (1.0, 1.0, 1e-4, 300.0, 1e-20, 1e-30, 0.0)
GRAD_SCALES = (1.0, 1.0, 1e-4, 1e3, 1e-30)


@st.composite
def fuzzed(draw, special=False, sigmas=SIGMAS, grad_scales=GRAD_SCALES, **fixed):
    case = draw(cases(**fixed))
    dims = {"x": len(case.shape), "grad_output": len(case.shape)}
    dims |= {name: len(case.normalized_shape) for name in ("weight", "bias")}
    present = ["x", *(name for name in ("weight", "bias") if getattr(case, name) is not None)]
    positions = st.tuples(st.sampled_from(["x", "grad_output", "weight", "bias"]), st.sampled_from(SPECIAL),
                          st.integers(0, MOST_ELEMENTS))  # fmt: skip
    return Fuzzed(
        case,
        seed=draw(st.integers(0, 1 << 32)),
        mean=draw(st.sampled_from([0.0, 0.3, -5.0, 1e3, 1e4, -1e6])),
        sigma=draw(st.sampled_from(sigmas)),
        grad_scale=draw(st.sampled_from(grad_scales)),
        special=tuple(draw(st.lists(positions, min_size=1, max_size=4))) if special else (),
        memory={name: draw(memories(n, name in ("x", "grad_output"))) for name, n in dims.items()},
        wants=tuple(name for name in present if draw(st.booleans())) or (draw(st.sampled_from(present)),),
        route=draw(st.sampled_from(["node", "function", "operator"])),
    )


# ---- how it is run and judged --------------------------------------------------------------------------------------


@contextlib.contextmanager
def through(route):
    """Calls of the library inside go through this one of its ways to the kernels."""
    if route == "node" or _ops.extension is None:
        yield
    elif route == "function":  # of a plain norm; with a residual the operator
        with mock.patch.multiple(_ops, norm=_ops.not_implemented, add_norm=_ops.not_implemented):
            yield
    elif route == "composed":  # as for a device whose kernels have no stages
        with mock.patch.multiple(_ops, has_stages=lambda device_type: False, add_norm=_ops.not_implemented):
            yield
    else:  # what torch.compile calls

        def norm(x, weight, bias, normalized_shape, *options):
            dims = len(normalized_shape or (bias if weight is None else weight).shape)
            *options, _ = options  # takes_segments: the operator does
            return _ops.norm_operator(x, weight, bias, dims, *options)[0]

        with mock.patch.object(_ops, "norm", norm):
            yield


def rows_of(t, case):
    return t.reshape(case.rows, case.hidden_size)


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
        if wrong.any():
            at = int((error / limit.clamp_min(1e-300)).nan_to_num(math.inf).where(wrong, 0.0).argmax())
            raise AssertionError(
                f"{name}: {int(wrong.sum())} of {good.numel()} wrong; the worst, at {at}: "
                f"{result.reshape(-1)[at].item()!r}, wanted {truth.reshape(-1)[at].item()!r} "
                f"+- {limit.reshape(-1)[at].item():.3g}, torch {torchs[name].reshape(-1)[at].item()!r}"
            )


def check_case(drawn):
    """Values; then what must not change a bit: the layout, what else is wanted, the rows beside a row."""
    case, inputs = drawn.case, drawn.inputs(DEVICE)
    with through(drawn.route), poisoned():
        found = run(fused, case, inputs, drawn.wants)
    judge(case, inputs, found, drawn.wants)
    if not uses_kernels(DEVICE):
        return
    plain = Inputs(*(None if t is None else t.detach().contiguous().clone() for t in vars(inputs).values()))
    again = run(fused, case, plain)
    for name, value in found.items():
        if name in ("weight", "bias") and DEVICE == "cuda" and "x" not in drawn.wants:
            continue  # docs/reliability.md, "Not promised"
        assert equal_bits(value, again[name]), f"{name} depends on the layout, the way, or what else is wanted"
    if case.rows:
        row = drawn.seed % case.rows
        alone = replace(case, shape=(1, *case.normalized_shape))
        part = Inputs(plain.x.reshape(-1, *case.normalized_shape)[row : row + 1], plain.weight, plain.bias,
                      plain.grad_output.reshape(-1, *case.normalized_shape)[row : row + 1])  # fmt: skip
        single = run(fused, alone, part)
        for name in ("y", "x"):
            whole = rows_of(again[name], case)[row]
            assert equal_bits(whole, single[name].reshape(-1)), f"{name} of row {row} depends on the other rows"


def equal_bits(a, b):
    """same_bits, but here NaN equals NaN: some of the values drawn lead to one."""
    return same_bits(a.nan_to_num(7.0, math.inf, -math.inf), b.nan_to_num(7.0, math.inf, -math.inf)) and torch.equal(
        a.isnan(), b.isnan()
    )


def second_order(norm, case, inputs, wants, directions):
    """Gradients of the first gradients times the directions, for `wants` and grad_output; 0 where torch says None."""
    tensors = {name: getattr(inputs, name).detach().requires_grad_(name in wants) for name in inputs.present()}
    leaves = [tensors[name] for name in wants]
    dy = inputs.grad_output.detach().requires_grad_()
    y = norm(case, tensors["x"], tensors.get("weight"), tensors.get("bias"))
    first = torch.autograd.grad(y, leaves, dy, create_graph=True)
    directions = [direction.to(gradient.dtype) for direction, gradient in zip(directions, first, strict=True)]
    leaves = [*leaves, dy]
    found = torch.autograd.grad(first, leaves, directions, allow_unused=True)
    return [torch.zeros_like(leaf) if f is None else f for leaf, f in zip(leaves, found, strict=True)]


def check_second_order(drawn):
    """Second-order gradients. The limit, for a whole tensor: one unit of the result's dtype; `few` units of the
    accumulation type times the size of the result and of the terms that it is made of, which may cancel; and the larger
    of twice torch's own error (in the accumulation type) and `few` times what the truth moves by when every input does
    by one unit of that type: the formulas of second derivatives are long, and are not written once more here."""
    case, inputs = drawn.case, drawn.inputs(DEVICE)
    if not (case.rows and bool(promised_rows(case, inputs).all())):
        return
    generator = torch.Generator().manual_seed(drawn.seed)

    def noise(like):
        return torch.randn(like.shape, dtype=fp64, generator=generator).to(like.device)

    directions = [noise(getattr(inputs, name)).to(getattr(inputs, name).dtype) for name in drawn.wants]
    with through(drawn.route):
        ours = second_order(fused, case, inputs, drawn.wants, directions)
    kept = reference_dtype(case)
    wide, narrow = (
        Inputs(*(None if t is None else t.to(dtype) for t in vars(inputs).values())) for dtype in (fp64, kept)
    )
    unit, tiny = torch.finfo(kept).eps, torch.finfo(kept).tiny
    truth = second_order(in_plain_operations, case, wide, drawn.wants, directions)
    if narrow.weight is None:  # torch.layer_norm with a bias alone raises an error in double backward
        narrow.weight = torch.ones(case.normalized_shape, dtype=kept, device=DEVICE)
    if drawn.wants == ("bias",):  # with many rows that alone raises an error in backward (torch 2.11, CUDA, fp64)
        torchs = second_order(
            with_torch, case, narrow, ("weight", "bias"), [torch.zeros_like(narrow.weight), *directions]
        )[1:]
    else:
        torchs = second_order(with_torch, case, narrow, drawn.wants, directions)
    moved = [torch.zeros((), dtype=fp64, device=DEVICE) for _ in truth]
    for _ in range(3):
        nudged = Inputs(*(None if t is None else t * (1 + unit * noise(t).sign()) for t in vars(wide).values()))
        for i, value in enumerate(second_order(in_plain_operations, case, nudged, drawn.wants, directions)):
            moved[i] = torch.maximum(moved[i], (value - truth[i]).abs().max())
    few = 4 + case.hidden_size.bit_length() / 2
    x = rows_of(wide.x, case)
    rstd = ((x.var(1, correction=0) if case.op == "layer_norm" else x.square().mean(1)) + case.eps).rsqrt().max()
    w = 1.0 if wide.weight is None else (wide.weight + case.weight_offset).abs().max()
    dy, over_rows = wide.grad_output.abs().max(), math.sqrt(case.rows)
    v = dict.fromkeys(("x", "weight", "bias"), 0.0)
    v |= {name: direction.abs().max().double() for name, direction in zip(drawn.wants, directions, strict=True)}
    terms = {
        "x": rstd * dy * (rstd * w * v["x"] + v["weight"]),
        "weight": over_rows * rstd * dy * v["x"],
        "bias": 0.0,
        "grad_output": rstd * w * v["x"] + v["weight"] + v["bias"],
    }
    for name, result, value, other, move in zip((*drawn.wants, "grad_output"), ours, truth, torchs, moved, strict=True):
        info = torch.finfo(result.dtype)
        limit = info.eps * (value.abs() + info.tiny) + tiny + few * unit * (terms[name] + value.abs().max())
        limit += torch.maximum(2 * (other.double() - value).abs().max(), few * move)
        good = (result.double() - value).abs() <= limit
        good |= (value.abs() + limit >= info.max) & (result.double() == value.sign() * math.inf)
        assert good.all(), (
            f"second order, {name}: off by {(result.double() - value).abs().max():.3g}, largest "
            f"{value.abs().max():.3g}, limit {limit.min():.3g}, torch off by {(other.double() - value).abs().max():.3g}"
        )


# ---- what is fused around a norm -----------------------------------------------------------------------------------

ADD_OPS = {"layer_norm": fused_add_layer_norm, "rms_norm": fused_add_rms_norm}
ADAPTIVE_OPS = {"layer_norm": fused_adaptive_layer_norm, "rms_norm": fused_adaptive_rms_norm}
ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu, "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"), "silu": F.silu}
ARGUMENTS = ("x", "residual", "weight", "bias", "scale", "shift", "gate")
GRADIENTS = {"y": "grad_output", "z": "grad_z"}


@dataclass(frozen=True)
class Around(Fuzzed):
    """A norm of z = residual + dropout(x), or residual + gate * x, and what is made of it."""

    kind: str = "plain"  # of function: "plain", "add" or "adaptive"
    residual: torch.dtype | None = None
    residual_dtype: torch.dtype | None = None
    dropout_p: float = 0.0  # of x (add), or of y (plain)
    activation: str | None = None
    rounding: str = "torch"
    memory_efficient: bool = False
    accumulate_grad: bool = False
    modulations: dict = field(default_factory=dict)  # "scale", "shift", "gate": (shape, dtype)
    uses: tuple = ("y",)  # the results that get a gradient

    @property
    def z_dtype(self):
        return self.residual_dtype or self.residual or self.case.dtype

    @property
    def follows(self):
        """Whether something is made of the norm, which then is not rounded yet."""
        return bool(self.activation or self.modulations or (self.dropout_p and self.kind == "plain"))

    @property
    def composed(self):
        """Whether z and what becomes of its gradient are PyTorch operations."""
        of_stages = self.kind == "add" and self.route != "composed" and self.rounding == "torch"
        return not (of_stages and _ops.has_stages(DEVICE))

    @property
    def norm(self):
        """The norm inside, of z; its parameters have the dtype of their gradients."""
        dtypes = {name: self.case.parameter_dtype(name) for name in ("weight", "bias")}
        if self.accumulate_grad:
            dtypes = {name: dtype and fp32 for name, dtype in dtypes.items()}
        out_dtype = reference_dtype(self.case) if self.follows else self.case.y_dtype
        return replace(self.case, dtype=self.z_dtype, out_dtype=out_dtype, **dtypes)

    @one_thread()
    def tensors(self, device):
        """{name: tensor}: the arguments that there are, and the gradients of y and z."""
        generator = torch.Generator().manual_seed(self.seed + 1)

        def normal(shape, dtype, scale=1.0):
            return (scale * (0.2 + torch.randn(shape, dtype=fp64, generator=generator))).to(dtype)

        case = self.case
        given = {name: t for name, t in vars(replace(self, memory={}).inputs("cpu")).items() if t is not None}
        if self.residual:
            given["residual"] = normal(case.shape, self.residual, self.sigma)
        for name, (shape, dtype) in self.modulations.items():
            given[name] = normal(shape, dtype)
        given["grad_z"] = normal(case.shape, self.z_dtype, self.grad_scale)
        if self.memory_efficient and self.seed % 2:  # y tells x: no weight near 0, and none smaller than its bias
            for name, make in (("weight", lambda w: 1 + w.abs() - case.weight_offset), ("bias", torch.tanh)):
                if name in given:
                    given[name] = make(given[name].double()).to(given[name].dtype)
        return {name: self.memory.get(name, Memory()).place(t.to(device)) for name, t in given.items()}

    def keeps(self):
        """Which elements dropout keeps, or None."""
        if not self.dropout_p:
            return None
        torch.manual_seed(self.seed)
        philox = functional._draw_philox(torch.empty(0, device=DEVICE))
        mask = reference.dropout_mask(philox, self.case.rows, self.case.hidden_size, self.dropout_p)
        return mask.view(self.case.shape)

    def call(self, given):
        """{"y": ..., "z": ..., "mask": ...}: what the function returns."""
        case = self.case
        options = {"eps": case.eps, "normalized_shape": case.normalized_shape, "out_dtype": case.out_dtype}
        if self.kind != "adaptive":
            options |= {"dropout_p": self.dropout_p, "activation": self.activation, "stats_grad": case.stats_grad,
                        "weight_offset": case.weight_offset}  # fmt: skip
            options |= {"rounding": self.rounding} if case.op == "rms_norm" else {}
        x, residual, weight, bias = (given.get(name) for name in ("x", "residual", "weight", "bias"))
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

    def after(self, n, given, keeps):
        """y, from the norm."""
        if self.modulations:
            n = n * (1 + given["scale"]) + given.get("shift", 0.0)
        if self.activation:
            n = ACTIVATIONS[self.activation](n)
        return dropped(n, keeps, self.dropout_p) if keeps is not None and self.kind == "plain" else n

    def definition(self, given, rounded_z, keeps):
        """(y, z, norm of z), in the dtype given; z has the value it was rounded to, and the derivative of what was."""
        z = given["x"] * given.get("gate", 1.0)
        if keeps is not None and self.kind == "add":
            z = dropped(z, keeps, self.dropout_p)
        z = z + given.get("residual", 0.0)
        z = rounded_z.to(z.dtype) + (z - z.detach())
        n = in_plain_operations(self.norm, z, given.get("weight"), given.get("bias"))
        return self.after(n, given, keeps), z, n


def dropout_scale(p):
    return 1 / (1 - p) if p < 1 else 0.0


def dropped(t, keeps, p):
    return torch.where(keeps, t * dropout_scale(p), 0.0)


@st.composite
def arounds(draw, activations=tuple(ACTIVATIONS), only_first=True, **fixed):
    base = draw(fuzzed(sigmas=(1.0, 1.0, 1e-4, 300.0), grad_scales=(1.0, 1e-4), **fixed))
    case, kind, more = base.case, draw(st.sampled_from(["plain", "add", "add", "adaptive"])), {}
    of_x = st.sampled_from([case.dtype, fp64 if case.dtype == fp64 else fp32])

    def one_in(n):
        return draw(st.integers(1, n)) == n

    if kind == "plain" and only_first:  # with first derivatives only
        more["memory_efficient"] = one_in(3)
        more["accumulate_grad"] = case.dtype != fp64 and one_in(3)
    if more.get("memory_efficient"):
        case = replace(case, out_dtype=None, stats_grad=True)
    elif kind != "adaptive":
        more["dropout_p"] = draw(st.sampled_from([0.0, 0.0, 0.1, 0.5, 0.9, 1.0]))
        more["activation"] = draw(st.sampled_from([None, None, None, *activations]))
        if case.op == "rms_norm" and only_first:  # roundings have the gradients of "torch"
            more["rounding"] = draw(st.sampled_from(["torch", "torch", "llama", "gemma"]))
    if kind != "plain" and not one_in(4):
        more["residual"] = draw(of_x)
    if kind == "add" or more.get("residual"):
        more["residual_dtype"] = draw(st.one_of(st.none(), of_x))
        more["uses"] = draw(st.sampled_from([("y", "z"), ("y", "z"), ("y",), ("z",)]))
    modulations = more["modulations"] = {}
    if kind == "adaptive":
        case = replace(case, weight_offset=0.0, stats_grad=True)
        leading = case.shape[: len(case.shape) - case.normalized_ndim]
        names = ["scale"] if case.op == "rms_norm" and one_in(3) else ["scale", "shift"]
        for name in names + (["gate"] if more.get("residual") else []):
            shapes = [case.shape, case.normalized_shape, tuple(draw(st.sampled_from([1, n])) for n in leading)]
            shapes[2] += case.normalized_shape
            shapes += [(leading[0], *case.normalized_shape)] if len(leading) > 1 else []
            modulations[name] = draw(st.sampled_from(shapes)), draw(of_x)
    shapes = {"grad_z": case.shape, "residual": case.shape} | {name: shape for name, (shape, _) in modulations.items()}
    memory = base.memory | {name: draw(memories(len(shape), False)) for name, shape in shapes.items()}
    present = ["x", *(["residual"] if more.get("residual") else []),
               *(name for name in ("weight", "bias") if getattr(case, name) is not None), *modulations]  # fmt: skip
    wants = tuple(name for name in present if draw(st.booleans())) or (draw(st.sampled_from(present)),)
    route = draw(st.sampled_from(["node", "node", "function", "composed"]))
    return Around(**vars(base) | {"case": case, "memory": memory, "wants": wants, "route": route, "kind": kind} | more)


def gradients_of(outputs, leaves, gradients, **options):
    """torch.autograd.grad, with zeros for None, and for outputs that do not require grad."""
    pairs = [(out, gradient) for out, gradient in zip(outputs, gradients, strict=True) if out.requires_grad]
    found = [None] * len(leaves)
    if pairs:
        outputs, gradients = zip(*pairs, strict=True)
        found = torch.autograd.grad(outputs, leaves, gradients, allow_unused=True, **options)
    return [torch.zeros_like(leaf) if f is None else f for leaf, f in zip(leaves, found, strict=True)]


def leaves_of(given, wants):
    return {name: t.detach().requires_grad_(name in wants) for name, t in given.items() if name in ARGUMENTS}


def run_around(drawn, given, wants):
    """What the call returns, and the gradients that are wanted; those that go to main_grad from there."""
    leaves = leaves_of(given, wants)
    accumulated = [name for name in ("weight", "bias") if drawn.accumulate_grad and name in wants]
    for name in accumulated:
        leaves[name].main_grad = torch.zeros(leaves[name].shape, dtype=fp32, device=DEVICE)
    found = drawn.call(leaves)
    gradients = gradients_of([found[name] for name in drawn.uses], [leaves[name] for name in wants],
                             [given[GRADIENTS[name]] for name in drawn.uses])  # fmt: skip
    found = {name: t.detach() for name, t in found.items()} | dict(zip(wants, gradients, strict=True))
    for name in accumulated:
        assert not found[name].any() and found[name].dtype == leaves[name].dtype
        found[name] = leaves[name].main_grad
    return found


@one_thread()
def judge_around(drawn, given, found):
    """z to the bit, with a gate to the rounding of its product.

    Then, in fp64 and for that z, y and each gradient. The norm, and the gradients that come out of it,
    may be off by the limit of `expected`. What is made of the norm may be off by what it changes by where the norm is
    off by its limit, and 16 units of the accumulation type for each term; so may its derivative, and through the norm's
    backward goes an absolute bound of that. Sums over rows that share a modulation are judged as those of a weight.
    Beyond that, one unit of each dtype that the definition rounds to on the way: z's where gradients of z are added by
    autograd, x's for x_hat with rounding="llama" (and for its gradient, where that is autograd's), y's for
    memory_efficient."""
    case, norm, keeps = drawn.case, drawn.norm, drawn.keeps()
    kept = reference_dtype(case)
    unit = torch.finfo(kept).eps * (8 if kept == fp64 else 1)  # as in `expected`
    scale_of_kept = dropout_scale(drawn.dropout_p)
    if "mask" in found:
        assert torch.equal(found["mask"], torch.ones_like(found["mask"]) if keeps is None else keeps), "mask"
    z = given["x"]
    if "z" in found:
        added = z if keeps is None else reference.dropout(z, keeps, drawn.dropout_p, kept)
        if "gate" in given:
            added = z.to(kept) * reference.as_modulation("gate", given["gate"], z, case.normalized_ndim).to(kept)
        z = reference.add(added.to(kept), given.get("residual"), drawn.z_dtype)
        if "gate" in given:  # the product may be rounded before it is added, or not
            close = (added.abs() + z.abs()).double() * unit + torch.finfo(z.dtype).eps * (
                z.double().abs() + torch.finfo(z.dtype).tiny
            )
            assert ((found["z"].double() - z.double()).abs() <= close)[z.isfinite()].all(), "z"
            z = found["z"]
        assert found["z"].is_contiguous() and equal_bits(found["z"], z), "z"

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
        w = (wide["weight"] + case.weight_offset).abs().reshape(-1)
    n = n.detach()
    if drawn.rounding == "llama":
        coarse = torch.finfo(case.dtype)
        limits["y"] += 3 * coarse.eps * ((x_hat * w).view(n.shape) + n.abs() + coarse.tiny)
    terms, terms_of_slope = n.abs(), torch.ones_like(n)
    if drawn.activation == "gelu_tanh":  # its slope has a term of that size times 1 - tanh², which cancels
        terms_of_slope = terms_of_slope + 0.4 * n.abs() * (1 + 0.14 * n.square())
    if drawn.modulations:
        factor = 1 + wide["scale"].abs()
        terms, terms_of_slope = terms * factor + wide.get("shift", n.new_zeros(())).abs(), terms_of_slope * factor
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
        limits["y"] = moved(values) + 16 * unit * terms + info.eps * (y.detach().abs() + info.tiny)
    if DEVICE == "cuda" and drawn.kind == "plain" and (drawn.activation or keeps is not None):
        between = torch.finfo(torch.promote_types(case.dtype, case.y_dtype))  # to which dn is rounded
        off = off + between.eps * (dn.abs() + between.tiny)
    off, wdy = by_row(off), by_row(dn.abs()) * w
    off_x_hat = torch.zeros_like(off)
    if drawn.rounding == "llama" and not (uses_kernels(DEVICE) and (case.stats_grad or drawn.route != "composed")):
        off, off_x_hat = off + 3 * coarse.eps * by_row(dn.abs()), coarse.eps * (x_hat + coarse.tiny)
    if drawn.memory_efficient and functional.y_tells_x(given["x"], inputs.weight, inputs.bias, case.weight_offset):
        info, b = torch.finfo(case.dtype), wide["bias"].abs() if "bias" in wide else n.new_zeros(())
        off_x_hat = by_row(info.eps * (n.abs() + info.tiny) + off_norm + 4 * unit * (n.abs() + b)) / w
    off_z = w * off
    if case.stats_grad:
        off_z = off_z + x_hat * (x_hat * w * off + off_x_hat * wdy).mean(1, keepdim=True)
        off_z = off_z + (w * off).mean(1, keepdim=True) + off_x_hat * (x_hat * wdy).mean(1, keepdim=True)
    off_z = limits.pop("x") + (rstd * off_z).view(n.shape)
    for name, more in (("weight", off * x_hat + by_row(dn.abs()) * off_x_hat), ("bias", off)):
        if name in limits:
            limits[name] = limits[name] + more.sum(0).view(case.normalized_shape)

    # From z to what it is made of; and sums over the rows that share a modulation.
    if drawn.kind != "plain":
        rounded = torch.finfo(drawn.z_dtype).eps if drawn.composed else unit
        off_z = off_z + rounded * dz_in_all.abs() + unit * off_z
    factor = wide.get("gate", n.new_ones(())).abs()
    if drawn.kind == "add" and keeps is not None:
        factor = keeps * scale_of_kept
    limits |= {"x": off_z * factor, "residual": off_z}
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
    if drawn.kind != "plain":  # the gradient of the norm is rounded to z's dtype, perhaps to infinity
        promised &= (by_row(off_z + dz.abs() + dz_in_all.abs()) < torch.finfo(drawn.z_dtype).max / 2).all(1)
    for name, result in found.items():
        if name in ("z", "mask"):
            continue
        like = given["x" if name == "y" else name]
        dtype = case.y_dtype if name == "y" else getattr(norm, name) if name in ("weight", "bias") else like.dtype
        assert (result.dtype, result.shape, result.device) == (dtype, like.shape, like.device), name
        truth, info = truths[name].view(like.shape), torch.finfo(dtype)
        limit = limits[name].view(like.shape)
        if name not in ("y", "weight", "bias"):  # the rounding of others is in their limits
            limit = limit + info.eps * (truth.abs() + info.tiny) + 2 * unit * truth.abs()
        good = (result.double() - truth).abs() <= limit
        good |= (truth.abs() + limit >= info.max) & (result.double() == truth.sign() * math.inf)
        of_rows = name in ("y", "x", "residual")
        matters = promised[:, None].expand_as(x).reshape(case.shape) if of_rows else promised.all().expand_as(good)
        wrong = matters & ~good
        if wrong.any():
            error = (result.double() - truth).abs()
            at = int((error / limit.clamp_min(1e-300)).nan_to_num(math.inf).where(wrong, 0.0).argmax())
            raise AssertionError(
                f"{name}: {int(wrong.sum())} of {good.numel()} wrong; the worst, at {at}: "
                f"{result.reshape(-1)[at].item()!r}, wanted {truth.reshape(-1)[at].item()!r} "
                f"+- {limit.reshape(-1)[at].item():.3g}"
            )


def check_around(drawn):
    """Values; then, of what kernels compute, what must not change a bit: layout, what else is wanted, other rows."""
    case, given = drawn.case, drawn.tensors(DEVICE)
    with through(drawn.route), poisoned():
        found = run_around(drawn, given, drawn.wants)
    judge_around(drawn, given, found)
    if not uses_kernels(DEVICE) or drawn.route == "composed" or drawn.rounding != "torch":
        return
    plain = {name: t.contiguous().clone() for name, t in given.items()}
    # With these, wanting residual's gradient decides which CUDA kernels are taken.
    wants = drawn.wants if drawn.residual not in (None, drawn.z_dtype) else tuple(n for n in ARGUMENTS if n in given)
    again = run_around(drawn, plain, wants)
    for name, value in found.items():
        # torch's sums, and its activations, whose vectors and what is left of them round differently
        if name in ("weight", "bias") and DEVICE == "cuda" and not {"x", "residual"} & set(drawn.wants):
            continue  # docs/reliability.md, "Not promised"
        if name in ("y", "z", "mask") or not (drawn.activation or name in drawn.modulations):
            assert equal_bits(value, again[name]), f"{name} depends on the layout, or on what else is wanted"
    if case.rows and not drawn.activation and drawn.kind != "adaptive":  # docs/reliability.md, "Not promised"
        row = 0 if drawn.dropout_p else drawn.seed % case.rows  # dropout asks for the row's number
        alone = replace(drawn, case=replace(case, shape=(1, *case.normalized_shape)))
        part = {
            name: t if name in ("weight", "bias") else t.reshape(-1, *case.normalized_shape)[row : row + 1]
            for name, t in plain.items()
        }
        single = run_around(alone, part, wants)
        for name in {"y", "z", "x", "residual"} & single.keys():
            whole = rows_of(again[name], case)[row]
            assert equal_bits(whole, single[name].reshape(-1)), f"{name} of row {row} depends on the other rows"


def check_second_order_around(drawn):
    """Second-order gradients, for wants and the gradients of the results. The limit, for a whole tensor: `few` units,
    of the coarsest dtype that is rounded to on the way, of its size; one unit of its own dtype; and the larger of twice
    the error of the definition in the accumulation type and `few` times what the truth moves by, at most of three
    times, when every input does by one unit of that coarsest dtype."""
    case, given, keeps = drawn.case, drawn.tensors(DEVICE), drawn.keeps()
    if not case.rows:
        return
    generator = torch.Generator().manual_seed(drawn.seed)

    def noise(like):
        return torch.randn(like.shape, dtype=fp64, generator=generator).to(like.device)

    directions = {name: noise(given[name]).to(given[name].dtype) for name in drawn.wants}
    grad_names = [GRADIENTS[name] for name in drawn.uses]

    def second(results, leaves, gradients):
        first = gradients_of(results(leaves), [leaves[name] for name in drawn.wants], gradients, create_graph=True)
        along = [directions[name].to(f.dtype).view(f.shape) for name, f in zip(drawn.wants, first, strict=True)]
        return gradients_of(first, [*(leaves[name] for name in drawn.wants), *gradients], along)

    def ours():
        leaves = {
            name: t.detach().requires_grad_(name in drawn.wants) for name, t in given.items() if name in ARGUMENTS
        }
        kept = {}

        def results(leaves):
            kept.update(drawn.call(leaves))
            return [kept[name] for name in drawn.uses]

        gradients = [given[name].detach().requires_grad_() for name in grad_names]
        return second(results, leaves, gradients), kept.get("z", leaves["x"]).detach()

    with through(drawn.route):
        found, z = ours()
    norm = drawn.norm
    if not bool(promised_rows(norm, Inputs(z, None, None, given["grad_output"])).all()):
        return

    def defined(nudge, dtype=fp64):
        def nudged(t):
            return (t.detach().double() * (1 + nudge * noise(t).sign())).to(dtype).requires_grad_()

        def results(leaves):
            y, z_of, _ = drawn.definition(leaves, rounded_z, keeps)
            return [{"y": y, "z": z_of}[name] for name in drawn.uses]

        leaves, rounded_z = {name: nudged(t) for name, t in drawn.wide(given).items()}, nudged(z).detach()
        return second(results, leaves, [nudged(given[name]) for name in grad_names])

    kept = reference_dtype(case)
    unit = max(torch.finfo(dtype).eps for dtype in (kept, case.y_dtype, *(t.dtype for t in given.values())))
    few = 4 + case.hidden_size.bit_length() / 2 + case.rows.bit_length() / 2
    right, rounded, samples = defined(0.0), defined(0.0, kept), [defined(unit) for _ in range(3)]
    sizes = [t.abs().max() for t in (given["x"].double(), *right) if t.numel()]
    if fp16 in (case.dtype, drawn.z_dtype, case.y_dtype) and max(sizes) ** 2 > torch.finfo(fp16).max:
        return  # gradients in between, products of such, may be infinite
    for name, result, value, coarse, *others in zip(
        (*drawn.wants, *grad_names), found, right, rounded, *samples, strict=True
    ):
        if not value.numel():
            continue
        info, most = torch.finfo(result.dtype), value.abs().max()
        moved = few * max((other - value).abs().max() for other in others)
        moved = torch.maximum(moved, 2 * (coarse.double() - value).abs().max())
        error = (result.double().view(value.shape) - value).abs().max()
        limit = few * unit * most + moved + info.eps * (most + info.tiny)
        assert error <= limit or most + limit >= info.max, (
            f"second order, {name}: off by {error:.3g}, largest {most:.3g}, limit {limit:.3g}"
        )


# ---- the runs --------------------------------------------------------------------------------------------------------


def second_orders(**fixed):
    return fuzzed(sigmas=(1.0, 1e-4, 300.0), grad_scales=(1.0, 1e-4), **fixed)


def fuzz(strategy, check, record_property, usual):
    """Calls check(case) for the cases of a run, `usual` many of them in CI."""
    count, failed, end = 0, False, time.monotonic() + MOST_SECONDS

    @settings(
        max_examples=EXAMPLES or max(1, int(usual * PART)),
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
        phases=[Phase.generate] if math.isfinite(MOST_SECONDS) else list(Phase),
    )
    @given(strategy)
    def each(drawn):
        nonlocal count, failed
        if time.monotonic() > end and not failed:
            return
        count += 1
        try:
            check(drawn)
        except BaseException:
            failed = True
            raise

    try:
        each()
    finally:
        record_property("fuzz_cases", count)
        record_property("fuzz_device", DEVICE)
    assert count


@pytest.mark.parametrize("dtype", [fp16, bf16, fp32, fp64], ids=str)
def test_fuzz_values(dtype, record_property):
    fuzz(fuzzed(dtype=dtype), check_case, record_property, usual=250)


def test_fuzz_values_with_inf_nan_and_extremes(record_property):
    fuzz(fuzzed(special=True), check_case, record_property, usual=500)


def test_fuzz_second_order(record_property):
    fuzz(second_orders(), check_second_order, record_property, usual=150)


@pytest.mark.parametrize("dtype", [fp16, bf16, fp32, fp64], ids=str)
def test_fuzz_fusions(dtype, record_property):
    fuzz(arounds(dtype=dtype), check_around, record_property, usual=100)


def test_fuzz_fusions_second_order(record_property):
    # relu has a kink
    fuzz(arounds(activations=("gelu", "gelu_tanh", "silu"), only_first=False), check_second_order_around,
         record_property, usual=100)  # fmt: skip


# ---- what was found --------------------------------------------------------------------------------------------------

FOUND = {
    # CUDA: grad_output * (x - mean) was less than any number of fp32 before rstd, 1e3, multiplied it: `expected` had
    # seen only that the product of all three is small.
    "a product that is nothing before rstd multiplies it": Fuzzed(
        Case(
            (9, 36),
            dtype=fp32,
            normalized_ndim=2,
            values="first_is_outlier",
            eps=1e-6,
            weight_offset=1.0,
            stats_grad=False,
        ),
        seed=544,
        sigma=1e-20,
        grad_scale=1e-30,
        memory={
            "x": Memory(offset=10, order=(0, 1), steps=(2, 1), gaps=(14, 0)),
            "grad_output": Memory(offset=14, order=(1, 0), steps=(3, 1), expanded=(0,)),
            "weight": Memory(offset=17, order=(1, 0), steps=(2, 1), gaps=(0, 8)),
            "bias": Memory(offset=4),
        },
        wants=("weight",),
    ),
    # A sum of x - mean over columns of very different size, rounded: the formula of `expected` had no term for it.
    "an element beside the mean of a row with hot columns": Fuzzed(
        Case((16, 92), dtype=fp64, bias=None, values="hot_columns"),
        special=(("x", math.inf, 0),),
        memory={"x": Memory(order=(1, 0))},
        wants=("x",),
    ),
    # Sum of squares 25 + 9 + 8189 of 1e-6: below half a unit of the 25 in their chain, so that they are lost.
    "many small squares beside a large one": Fuzzed(
        Case((8191,), dtype=fp16, values="first_is_outlier", out_dtype=fp32),
        mean=-5.0,
        sigma=1e-4,
        special=(("x", 0.0, 1),),
        wants=("x",),
    ),
    # CUDA: var was what rounding the mean of equal numbers left, squared, and that is not small beside such an eps.
    "a constant row far from 0": Fuzzed(
        Case((8, 7, 15), dtype=fp32, normalized_ndim=2, values="constant", eps=1e-12), mean=-1e6, wants=("x",)
    ),
    # CUDA: equal rows are rounded alike; `expected` took their errors for independent.
    "a gradient of many equal rows": Fuzzed(
        Case((6, 2, 126, 205), op="rms_norm", dtype=fp32, weight=None, bias=fp32, values="first_is_outlier"),
        seed=1081780,
        mean=1000.0,
        sigma=0.0,
        memory={"grad_output": Memory(order=(0, 2, 1, 3), steps=(2, 2, 1, 1), expanded=(2,))},
        wants=("bias",),
    ),
    # CUDA: their sums, which are infinite, were multiplied by 0.
    "frozen statistics beside a large weight": Fuzzed(
        Case((2, 28), op="rms_norm", dtype=fp16, stats_grad=False),
        grad_scale=1e3,
        special=(("weight", math.inf, 7),),
        wants=("x",),
    ),
    # CUDA, where weight gradients are wanted as well: lanes without elements of the row multiplied its first ones by 0.
    "an infinite gradient in a row of few columns": Fuzzed(
        Case((1100, 8), op="rms_norm", dtype=fp16),
        grad_scale=1e-4,
        special=(("grad_output", math.inf, 3592),),
        wants=("x",),
    ),
}


FOUND_AROUND = {
    # residual_out had x's strides.
    "a gate and tensors that lie elsewhere": Around(
        Case((3, 2, 8)),
        memory={"x": Memory(order=(2, 0, 1)), "residual": Memory(order=(2, 0, 1)), "gate": Memory(order=(2, 0, 1))},
        wants=("x", "gate"),
        kind="adaptive",
        residual=fp32,
        uses=("y", "z"),
        modulations={"scale": ((8,), fp32), "shift": ((8,), fp32), "gate": ((3, 2, 8), fp32)},
    ),
    # Its gradient was multiplied in the accumulation type of y's dtype.
    "dropout of fp64 x and narrower y": Around(
        Case((4, 128), dtype=fp64, weight=None, bias=None, out_dtype=bf16), dropout_p=0.1, wants=("x",)
    ),
    # CUDA: statistics taken to fp64 were given back to the allocator before the kernel that reads them was launched,
    # and the copy of the gradient took their place (found by chance, as what is given out again varies).
    "an activation, fp64 y and a gradient that lies elsewhere": Around(
        Case((300, 3), dtype=fp32, weight=None, bias=None, out_dtype=fp64),
        memory={"grad_output": Memory(order=(1, 0))},
        wants=("x",),
        activation="gelu",
    ),
    # CUDA: the gradient of shift was rounded for each part of the rows, and then added up.
    "one shift for parts of rows that have a scale each": Around(
        Case((7, 3, 24), dtype=bf16, weight=None, bias=None, out_dtype=fp32),
        wants=("x", "scale", "shift"),
        kind="adaptive",
        modulations={"scale": ((7, 24), fp32), "shift": ((24,), bf16)},
    ),
    # CUDA: likewise.
    "one gate for parts of rows that have a scale each": Around(
        Case((7, 3, 24), dtype=bf16, weight=None, bias=None, out_dtype=fp32),
        wants=("x", "scale", "gate"),
        kind="adaptive",
        residual=bf16,
        uses=("y", "z"),
        modulations={"scale": ((7, 24), fp32), "gate": ((24,), bf16)},
    ),
}

FOUND_SECOND_ORDER = {
    # CUDA: RuntimeError, as residual_out, which is used, does not require grad.
    "a gate, x and residual that need no gradient": Around(
        Case((7, 24), dtype=fp64, weight=None, bias=None),
        wants=("scale",),
        kind="adaptive",
        residual=fp64,
        uses=("y", "z"),
        modulations={"scale": ((7, 24), fp64), "gate": ((7, 24), fp64)},
    ),
}


@pytest.mark.parametrize("name", [*FOUND, *FOUND_AROUND, *FOUND_SECOND_ORDER])
def test_found_by_fuzzing(name):
    if name in FOUND:
        check_case(FOUND[name])
    elif name in FOUND_AROUND:
        check_around(FOUND_AROUND[name])
    else:
        check_second_order_around(FOUND_SECOND_ORDER[name])


# ---- the fuzzing itself --------------------------------------------------------------------------------------------


class OffInBackward(torch.autograd.Function):
    """The identity, but one element of its gradient, the last, is off."""

    @staticmethod
    def forward(ctx, t):
        return t.view_as(t)

    @staticmethod
    def backward(ctx, grad_output):
        wrong = grad_output.clone()
        wrong.view(-1)[-1:] *= 1.05
        return wrong


def eps_outside_the_root(case, x, weight, bias):
    return fused(replace(case, eps=case.eps * case.eps), x, weight, bias)


def last_element_off(case, x, weight, bias):
    y = fused(case, x, weight, bias)
    return torch.cat([y.reshape(-1)[:-1], y.reshape(-1)[-1:] * 1.02]).view(y.shape)


def last_row_is_the_first(case, x, weight, bias):
    y = fused(case, x, weight, bias)
    return torch.cat([y[:-1], y[:1]]) if y.dim() > case.normalized_ndim else y


WRONG = {
    "eps outside the root": eps_outside_the_root,
    "the last element is off": last_element_off,
    "a row is another's": last_row_is_the_first,
    "the offset is forgotten": lambda case, *tensors: fused(replace(case, weight_offset=0.0), *tensors),
    "NaN becomes 0": lambda case, *tensors: fused(case, *tensors).nan_to_num(nan=0.0),
    "one gradient of x is off": lambda case, x, w, b: fused(case, OffInBackward.apply(x), w, b),
    "one gradient of the weight is off": lambda case, x, w, b: fused(
        case, x, None if w is None else OffInBackward.apply(w), b
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_the_fuzzing_finds(name, monkeypatch):
    """The fuzzing itself: a norm that is wrong is found."""
    right, wrong = fused, WRONG[name]

    def tampered(*arguments):
        with monkeypatch.context() as inner:
            inner.setitem(globals(), "fused", right)
            return wrong(*arguments)

    monkeypatch.setitem(globals(), "fused", tampered)

    @settings(max_examples=200, derandomize=True, database=None, deadline=None, phases=[Phase.generate])
    @given(fuzzed(special=name.startswith("NaN")))
    def each(drawn):
        check_case(drawn)

    with pytest.raises(AssertionError):
        each()


@pytest.mark.parametrize("name", [*ARGUMENTS, "y", "z", "no gradient through z"])
def test_the_fuzzing_of_fusions_finds(name, monkeypatch):
    """One element of a gradient or of a result that is off is found, and z without its own gradient."""
    right = Around.call

    def wrong(drawn, given):
        if drawn.accumulate_grad:  # asks for the parameter itself
            return right(drawn, given)
        found = right(drawn, {n: OffInBackward.apply(t) if n == name else t for n, t in given.items()})
        if name in found:
            t = found[name].reshape(-1)
            found[name] = torch.cat([t[:-1], t[-1:] * 1.02]).view_as(found[name])
        elif "z" in found and name == "no gradient through z":
            found["z"] = found["z"].detach()
        return found

    monkeypatch.setattr(Around, "call", wrong)

    @settings(max_examples=200, derandomize=True, database=None, deadline=None, phases=[Phase.generate])
    @given(arounds())
    def each(drawn):
        check_around(drawn)

    with pytest.raises(AssertionError):
        each()
