"""Random cases against fp64: shapes, strides, alignments, dtypes, options, what requires grad, values of every kind.

    pytest tests/test_fuzz.py                                    a few thousand cases, the same ones on every run
    FUZZ=20000 pytest tests/test_fuzz.py                         so many of each kind, new ones on every run
    FUZZ=20000 FUZZ_DEVICE=cuda pytest tests/test_fuzz.py        on the GPU

What is drawn is written in `OPTIONS` (fields of test_correctness.Case: a new option is a line there) and in the few
strategies below it. How far from the truth a result may be is the formula of test_correctness.expected. A failure ends
with the smallest case that hypothesis finds; it belongs into the list at the end of this file, under a name.
"""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass, field, replace
from unittest import mock

import pytest
import torch

from fused_layernorm import _ops
from test_correctness import (
    HAS_CUDA,
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
}
DTYPES = st.sampled_from([fp16, bf16, fp32, fp64])
# Around the lengths at which a vector, a warp, a block or a plan of the kernels is full.
EDGES = [power + off for power in (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192) for off in (-1, 0, 1, 8)]
LONG = [16384, 16392, 24576, 32769, 65536, 131072, 262144, 262147] if DEVICE == "cuda" else []
SPECIAL = [float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 1e-45, 1e-40, 6e-8, 65504.0, 1e18, 1e30]


@st.composite
def cases(draw, **fixed):
    options = {**OPTIONS, "dtype": DTYPES, **{name: st.just(value) for name, value in fixed.items()}}
    hidden_sizes = st.one_of(st.integers(1, 70), st.integers(1, 3000), st.sampled_from(EDGES + LONG))
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
    elif route == "function":
        with mock.patch.object(_ops, "norm", lambda *arguments: NotImplemented):
            yield
    else:  # what torch.compile calls

        def norm(x, weight, bias, normalized_shape, eps, weight_offset, is_rms_norm, out_dtype):
            dims = len(normalized_shape or (bias if weight is None else weight).shape)
            return _ops.norm_operator(x, weight, bias, dims, eps, weight_offset, is_rms_norm, out_dtype)[0]

        with mock.patch.object(_ops, "norm", norm):
            yield


def rows_of(t, case):
    return t.reshape(case.rows, case.hidden_size)


def promised_rows(case, inputs):
    """The rows in which values are promised: finite, with squares whose sum is within range, and var + eps > 0."""
    x, dy = rows_of(inputs.x.double(), case), rows_of(inputs.grad_output.double(), case)
    info = torch.finfo(reference_dtype(case))
    mean = x.mean(1, keepdim=True) if case.op == "layer_norm" else torch.zeros_like(x[:, :1])
    in_range = case.hidden_size * x.square().amax(1) < info.max / 4
    is_constant = (x - mean).abs().amax(1) <= info.eps * mean[:, 0].abs()  # what rounding the mean leaves
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


def second_orders(**fixed):
    return fuzzed(sigmas=(1.0, 1e-4, 300.0), grad_scales=(1.0, 1e-4), **fixed)


def fuzz(strategy, check, record_property, usual):
    """Calls check(case) for the cases of a run, `usual` many of them in CI."""
    count = 0

    @settings(
        max_examples=EXAMPLES or max(1, int(usual * PART)),
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    @given(strategy)
    def each(drawn):
        nonlocal count
        count += 1
        check(drawn)

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


# ---- what was found --------------------------------------------------------------------------------------------------

FOUND = {
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
}


@pytest.mark.parametrize("name", FOUND)
def test_found_by_fuzzing(name):
    check_case(FOUND[name])


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
