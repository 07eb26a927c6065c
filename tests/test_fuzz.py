"""Random cases against fp64: shapes, strides, alignments, dtypes, options, what requires grad, values of every kind.

    pytest tests/test_fuzz.py                                    over a thousand cases, the same ones on every run
    FUZZ=20000 pytest tests/test_fuzz.py                         so many of each kind, new ones on every run
    FUZZ=20000 FUZZ_DEVICE=cuda pytest tests/test_fuzz.py        on the GPU

What is drawn of a norm is written in `OPTIONS` (fields of norm_cases.Case: a new option is a line there) and in the few
strategies below it; what is drawn of what is fused around one, in `fusions`. The inputs, and how far from the truth a
result may be, are norm_cases.py's, as in all tests. A failure ends with the smallest case that hypothesis finds; it
belongs into a list at the end of this file, under a name.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import replace

import pytest
import torch
from norm_cases import (
    ACTIVATIONS,
    ARGUMENTS,
    GRADIENTS,
    HAS_CUDA,
    Case,
    Fusion,
    Inputs,
    Memory,
    Sample,
    X,
    bf16,
    equal_bits,
    fp16,
    fp32,
    fp64,
    fused,
    gradients_of,
    in_plain_operations,
    judge,
    judge_fusion,
    poisoned,
    promised_rows,
    reference_dtype,
    rows_of,
    run,
    run_fusion,
    through,
    unit_of,
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
    "heads_ndim": st.sampled_from([0, 0, 0, 1, 2]),
}
DTYPES = st.sampled_from([fp16, bf16, fp32, fp64])
# Fusion the lengths at which a vector, a warp, a block or a plan of the kernels is full.
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
    if case.heads_ndim > len(leading):
        case = replace(case, heads_ndim=len(leading))
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


MEANS = (0.3, -0.7, -5.0, 1e3, 1e4, -1e6)  # none is 0, where a mean that is forgotten would not be missed
SIGMAS = (1.0, 1.0, 1e-4, 300.0, 1e-20, 1e-30, 0.0)
GRAD_SCALES = (1.0, 1.0, 1e-4, 1e3, 1e-30)


@st.composite
def fuzzed(draw, special=False, sigmas=SIGMAS, grad_scales=GRAD_SCALES, **fixed):
    case = draw(cases(**fixed))
    dims = {"x": len(case.shape), "grad_output": len(case.shape)}
    dims |= {name: len(case.parameter_shape) for name in ("weight", "bias")}
    present = ["x", *(name for name in ("weight", "bias") if getattr(case, name) is not None)]
    positions = st.tuples(st.sampled_from(["x", "grad_output", "weight", "bias"]), st.sampled_from(SPECIAL),
                          st.integers(0, MOST_ELEMENTS))  # fmt: skip
    mean, sigma = draw(st.sampled_from(MEANS)), draw(st.sampled_from(sigmas))
    if sigma == 0.0 and draw(st.booleans()):
        mean = 0.0  # rows of zeros
    return Sample(
        case,
        seed=draw(st.integers(0, 1 << 32)),
        mean=mean,
        sigma=sigma,
        grad_scale=draw(st.sampled_from(grad_scales)),
        special=tuple(draw(st.lists(positions, min_size=1, max_size=4))) if special else (),
        memory={name: draw(memories(n, name in ("x", "grad_output"))) for name, n in dims.items()},
        wants=tuple(name for name in present if draw(st.booleans())) or (draw(st.sampled_from(present)),),
        route=draw(st.sampled_from(["node", "function", "operator"])),
    )


# ---- how it is run and judged --------------------------------------------------------------------------------------


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
    if case.rows and not case.heads_ndim:
        row = drawn.seed % case.rows
        alone = replace(case, shape=(1, *case.normalized_shape))
        part = Inputs(plain.x.reshape(-1, *case.normalized_shape)[row : row + 1], plain.weight, plain.bias,
                      plain.grad_output.reshape(-1, *case.normalized_shape)[row : row + 1])  # fmt: skip
        single = run(fused, alone, part)
        for name in ("y", "x"):
            whole = rows_of(again[name], case)[row]
            assert equal_bits(whole, single[name].reshape(-1)), f"{name} of row {row} depends on the other rows"


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
        narrow.weight = torch.ones(case.parameter_shape, dtype=kept, device=DEVICE)
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


@st.composite
def fusions(draw, activations=tuple(ACTIVATIONS), only_first=True, **fixed):
    kind, more = draw(st.sampled_from(["plain", "add", "add", "after", "adaptive", "gated"])), {}
    fixed |= {"heads_ndim": 0} if kind == "adaptive" else {}
    base = draw(fuzzed(sigmas=(1.0, 1.0, 1e-4, 300.0), grad_scales=(1.0, 1e-4), **fixed))
    case = base.case
    of_x = st.sampled_from([case.dtype, fp64 if case.dtype == fp64 else fp32])

    def one_in(n):
        return draw(st.integers(1, n)) == n

    if kind == "plain" and only_first and not case.heads_ndim:  # with first derivatives only
        more["memory_efficient"] = one_in(3)
        more["accumulate_grad"] = case.dtype != fp64 and one_in(3)
    if more.get("memory_efficient"):
        case = replace(case, out_dtype=None, stats_grad=True)
    elif kind == "gated":
        case = replace(case, stats_grad=True)
        more["gate"], more["gates_y"] = draw(DTYPES), draw(st.booleans())
        more["activation"] = draw(st.sampled_from([None, *activations, "sigmoid"]))
        more["groups"] = case.heads_ndim == case.normalized_ndim == 1 and draw(st.booleans())
    elif kind == "after":
        more["residual"] = draw(of_x)
        more["accumulate_grad"] = only_first and not case.heads_ndim and case.dtype != fp64 and one_in(3)
        case = replace(case, out_dtype=more["residual"]) if one_in(2) else case
    elif kind != "adaptive":
        if not case.heads_ndim:
            more["dropout_p"] = draw(st.sampled_from([0.0, 0.0, 0.1, 0.5, 0.9, 1.0]))
            more["activation"] = draw(st.sampled_from([None, None, None, *activations]))
        if case.op == "rms_norm" and only_first:  # roundings have the gradients of "torch"
            more["rounding"] = draw(st.sampled_from(["torch", "torch", "llama", "llama_exact", "gemma", "gemma_exact"]))
    if kind in ("add", "adaptive") and not one_in(4):
        more["residual"] = draw(of_x)
    if kind == "add" or (kind == "adaptive" and more.get("residual")):
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
    shapes = dict.fromkeys(("grad_z", "residual", "gate"), case.shape) | {
        name: shape for name, (shape, _) in modulations.items()
    }
    memory = base.memory | {name: draw(memories(len(shape), False)) for name, shape in shapes.items()}
    present = ["x", *(name for name in ("residual", "gate") if more.get(name)),
               *(name for name in ("weight", "bias") if getattr(case, name) is not None), *modulations]  # fmt: skip
    wants = tuple(name for name in present if draw(st.booleans())) or (draw(st.sampled_from(present)),)
    route = draw(st.sampled_from(["node", "node", "function", "reference"]))
    return Fusion(**vars(base) | {"case": case, "memory": memory, "wants": wants, "route": route, "kind": kind} | more)


def check_drawn_fusion(drawn):
    """Values; then, of what kernels compute, what must not change a bit: layout, what else is wanted, other rows."""
    case, given = drawn.case, drawn.tensors(DEVICE)
    with through(drawn.route), poisoned():
        found = run_fusion(drawn, given, drawn.wants)
    judge_fusion(drawn, given, found)
    if not uses_kernels(DEVICE) or drawn.route == "reference" or drawn.rounding not in ("torch", "gemma"):
        return
    plain = {name: t.contiguous().clone() for name, t in given.items()}
    # With these, wanting residual's gradient decides which CUDA kernels are taken.
    wants = drawn.wants if drawn.residual not in (None, drawn.z_dtype) else tuple(n for n in ARGUMENTS if n in given)
    # memory_efficient saves y in the node alone
    with through(drawn.route if drawn.memory_efficient else "node"):
        again = run_fusion(drawn, plain, wants)
    for name, value in found.items():
        # torch's sums, and its activations, whose vectors and what is left of them round differently
        # The gradient of a residual that is added to y is y's, and takes no kernel
        of_rows = {"x"} if drawn.kind == "after" else {"x", "residual"}
        if name in ("weight", "bias") and DEVICE == "cuda" and not of_rows & set(drawn.wants):
            continue  # docs/reliability.md, "Not promised"
        if name in ("y", "z", "mask") or not (drawn.activation or name in drawn.modulations):
            assert equal_bits(value, again[name]), f"{name} depends on the layout, or on what else is wanted"
    if (
        case.rows and not (drawn.activation or case.heads_ndim) and drawn.kind != "adaptive"
    ):  # docs/reliability.md, "Not promised"
        row = 0 if drawn.dropout_p else drawn.seed % case.rows  # dropout asks for the row's number
        alone = replace(drawn, case=replace(case, shape=(1, *case.normalized_shape)))
        part = {
            name: t if name in ("weight", "bias") else t.reshape(-1, *case.normalized_shape)[row : row + 1]
            for name, t in plain.items()
        }
        with through(drawn.route if drawn.memory_efficient else "node"):
            single = run_fusion(alone, part, wants)
        for name in {"y", "z", "x", "residual"} & single.keys():
            whole = rows_of(again[name], case)[row]
            assert equal_bits(whole, single[name].reshape(-1)), f"{name} of row {row} depends on the other rows"


def check_second_order_fusion(drawn):
    """Second-order gradients, for wants and the gradients of the results. The limit, for a whole tensor: `few` units,
    of the coarsest dtype that is rounded to on the way, of its size; one unit of its own dtype; and the larger of twice
    the error of the definition in the accumulation type and `few` times what the truth moves by, at most of three
    times, when every input does by one unit of that coarsest dtype (unit_of)."""
    case, given, keeps = drawn.case, drawn.tensors(DEVICE), drawn.keeps(DEVICE)
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
    coarsest = max((kept, case.y_dtype, *(t.dtype for t in given.values())), key=lambda dtype: torch.finfo(dtype).eps)
    unit = unit_of(coarsest)
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


@pytest.mark.core
@pytest.mark.parametrize("dtype", [fp16, bf16, fp32, fp64], ids=str)
def test_fuzz_values(dtype, record_property):
    fuzz(fuzzed(dtype=dtype), check_case, record_property, usual=150)


@pytest.mark.core
def test_fuzz_values_with_inf_nan_and_extremes(record_property):
    fuzz(fuzzed(special=True), check_case, record_property, usual=300)


def test_fuzz_second_order(record_property):
    fuzz(second_orders(), check_second_order, record_property, usual=100)


@pytest.mark.core
@pytest.mark.parametrize("dtype", [fp16, bf16, fp32, fp64], ids=str)
def test_fuzz_fusions(dtype, record_property):
    fuzz(fusions(dtype=dtype), check_drawn_fusion, record_property, usual=75)


def test_fuzz_fusions_second_order(record_property):
    # relu has a kink
    fuzz(fusions(activations=("gelu", "gelu_tanh", "silu"), only_first=False), check_second_order_fusion,
         record_property, usual=75)  # fmt: skip


# ---- what was found --------------------------------------------------------------------------------------------------

FOUND = {
    # CUDA: grad_output * (x - mean) was less than any number of fp32 before rstd, 1e3, multiplied it: `expected` had
    # seen only that the product of all three is small.
    "a product that is nothing before rstd multiplies it": Sample(
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
    "an element beside the mean of a row with hot columns": Sample(
        Case((16, 92), dtype=fp64, bias=None, values="hot_columns"),
        special=(("x", math.inf, 0),),
        memory={"x": Memory(order=(1, 0))},
        wants=("x",),
    ),
    # Sum of squares 25 + 9 + 8189 of 1e-6: below half a unit of the 25 in their chain, so that they are lost.
    "many small squares beside a large one": Sample(
        Case((8191,), dtype=fp16, values="first_is_outlier", out_dtype=fp32),
        mean=-5.0,
        sigma=1e-4,
        special=(("x", 0.0, 1),),
        wants=("x",),
    ),
    # CUDA: var was what rounding the mean of equal numbers left, squared, and that is not small beside such an eps.
    "a constant row far from 0": Sample(
        Case((8, 7, 15), dtype=fp32, normalized_ndim=2, values="constant", eps=1e-12), mean=-1e6, wants=("x",)
    ),
    # CUDA: equal rows are rounded alike; `expected` took their errors for independent.
    "a gradient of many equal rows": Sample(
        Case((6, 2, 126, 205), op="rms_norm", dtype=fp32, weight=None, bias=fp32, values="first_is_outlier"),
        seed=1081780,
        mean=1000.0,
        sigma=0.0,
        memory={"grad_output": Memory(order=(0, 2, 1, 3), steps=(2, 2, 1, 1), expanded=(2,))},
        wants=("bias",),
    ),
    # CUDA: their sums, which are infinite, were multiplied by 0.
    "frozen statistics beside a large weight": Sample(
        Case((2, 28), op="rms_norm", dtype=fp16, stats_grad=False),
        grad_scale=1e3,
        special=(("weight", math.inf, 7),),
        wants=("x",),
    ),
    # CUDA, where weight gradients are wanted as well: lanes without elements of the row multiplied its first ones by 0.
    "an infinite gradient in a row of few columns": Sample(
        Case((1100, 8), op="rms_norm", dtype=fp16),
        grad_scale=1e-4,
        special=(("grad_output", math.inf, 3592),),
        wants=("x",),
    ),
}


FOUND_FUSIONS = {
    # The judge forgot that PyTorch operations differentiate x_hat as it was rounded: all of these elements are near 1,
    # and are rounded the same way.
    "Llama's rounding in PyTorch operations": Fusion(
        Case((160, 98, 14), dtype=bf16, weight=fp32, op="rms_norm", values="first_is_outlier", eps=0.01),
        seed=216,
        mean=10000.0,
        wants=("weight",),
        route="reference",
        rounding="llama",
    ),
    # residual_out had x's strides.
    "a gate and tensors that lie elsewhere": Fusion(
        Case((3, 2, 8)),
        memory={"x": Memory(order=(2, 0, 1)), "residual": Memory(order=(2, 0, 1)), "gate": Memory(order=(2, 0, 1))},
        wants=("x", "gate"),
        kind="adaptive",
        residual=fp32,
        uses=("y", "z"),
        modulations={"scale": ((8,), fp32), "shift": ((8,), fp32), "gate": ((3, 2, 8), fp32)},
    ),
    # Its gradient was multiplied in the accumulation type of y's dtype.
    "dropout of fp64 x and narrower y": Fusion(
        Case((4, 128), dtype=fp64, weight=None, bias=None, out_dtype=bf16), dropout_p=0.1, wants=("x",)
    ),
    # CUDA: statistics taken to fp64 were given back to the allocator before the kernel that reads them was launched,
    # and the copy of the gradient took their place (found by chance, as what is given out again varies).
    "an activation, fp64 y and a gradient that lies elsewhere": Fusion(
        Case((300, 3), dtype=fp32, weight=None, bias=None, out_dtype=fp64),
        memory={"grad_output": Memory(order=(1, 0))},
        wants=("x",),
        activation="gelu",
    ),
    # CUDA: the gradient of shift was rounded for each part of the rows, and then added up.
    "one shift for parts of rows that have a scale each": Fusion(
        Case((7, 3, 24), dtype=bf16, weight=None, bias=None, out_dtype=fp32),
        wants=("x", "scale", "shift"),
        kind="adaptive",
        modulations={"scale": ((7, 24), fp32), "shift": ((24,), bf16)},
    ),
    # CUDA: likewise.
    "one gate for parts of rows that have a scale each": Fusion(
        Case((7, 3, 24), dtype=bf16, weight=None, bias=None, out_dtype=fp32),
        wants=("x", "scale", "gate"),
        kind="adaptive",
        residual=bf16,
        uses=("y", "z"),
        modulations={"scale": ((7, 24), fp32), "gate": ((24,), bf16)},
    ),
    # y, computed in bfloat16 because of the rounding, was judged by the units of float16.
    "silu of a norm that is rounded as Llama's, and a finer y": Fusion(
        Case((540, 130), op="rms_norm", dtype=bf16, bias=None, out_dtype=fp16),
        wants=("x",), activation="silu", rounding="llama",
    ),
    # Compared with the bits of the node, which saves y; NormFunction saves x.
    "memory_efficient by NormFunction": Fusion(
        Case((5, 10), op="rms_norm", dtype=bf16, weight=None), seed=4151, mean=-0.7, sigma=300.0,
        wants=("x", "bias"), route="function", memory_efficient=True,
    ),
    # Gradients for main_grad are rounded to weight's dtype with rounding="llama".
    "main_grad of a norm that is rounded as Llama's": Fusion(
        Case((2, 7, 2), op="rms_norm", dtype=fp16, normalized_ndim=2, eps=1e-12, weight_offset=1.0),
        seed=64772, mean=1000.0, sigma=300.0, wants=("x", "weight", "bias"), route="reference", rounding="llama",
        accumulate_grad=True,
    ),
}  # fmt: skip

FOUND_SECOND_ORDER = {
    # 1 - tanh^2 cancelled in the derivative of gelu_tanh.
    "gelu_tanh in float32": Fusion(
        Case((6, 5, 1, 62), dtype=fp32, out_dtype=fp64),
        seed=131015,
        sigma=300.0,
        mean=0.3,
        memory={"grad_output": Memory(expanded=(1,))},
        wants=("weight", "bias"),
        kind="add",
        residual=fp32,
        dropout_p=0.9,
        activation="gelu_tanh",
        uses=("y", "z"),
    ),  # fmt: skip
    # Judged by one unit of float64, in which the truth is rounded as well.
    "gelu_tanh in float64": Fusion(
        Case((16,), op="rms_norm", dtype=fp64, weight=None, values="first_is_outlier", eps=0.0),
        seed=60,
        mean=-5.0,
        memory={"bias": Memory(steps=(3,))},
        wants=("bias",),
        kind="add",
        residual=fp64,
        residual_dtype=fp64,
        activation="gelu_tanh",
    ),  # fmt: skip
    # CUDA: RuntimeError, as residual_out, which is used, does not require grad.
    "a gate, x and residual that need no gradient": Fusion(
        Case((7, 24), dtype=fp64, weight=None, bias=None),
        wants=("scale",),
        kind="adaptive",
        residual=fp64,
        uses=("y", "z"),
        modulations={"scale": ((7, 24), fp64), "gate": ((7, 24), fp64)},
    ),
}


@pytest.mark.parametrize("name", [*FOUND, *FOUND_FUSIONS, *FOUND_SECOND_ORDER])
def test_found_by_fuzzing(name):
    if name in FOUND:
        check_case(FOUND[name])
    elif name in FOUND_FUSIONS:
        check_drawn_fusion(FOUND_FUSIONS[name])
    else:
        check_second_order_fusion(FOUND_SECOND_ORDER[name])


# ---- the fuzzing itself --------------------------------------------------------------------------------------------


class OffInBackward(torch.autograd.Function):
    """The identity, but one element of its gradient, the last, is off."""

    @staticmethod
    def forward(ctx, t):
        return t.view_as(t)

    @staticmethod
    def backward(ctx, grad_output):
        wrong = grad_output.clone(memory_format=torch.contiguous_format)
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
    right = Fusion.call

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

    monkeypatch.setattr(Fusion, "call", wrong)

    @settings(max_examples=200, derandomize=True, database=None, deadline=None, phases=[Phase.generate])
    @given(fusions())
    def each(drawn):
        check_drawn_fusion(drawn)

    with pytest.raises(AssertionError):
        each()
