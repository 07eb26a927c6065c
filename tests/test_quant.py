"""Norms with a quantized result against the formula in float64.

A code is right if it is the code nearest to some quotient y / scale within the error of float32 arithmetic: so it may
differ from that of the exact quotient only beside a boundary between two codes, and only by one.
"""

import itertools
import math
import types

import pytest
import torch
from norm_cases import on_devices, poisoned, uses_kernels

from fused_layernorm import _ops, fused_adaptive_layer_norm, fused_layer_norm_quant, fused_rms_norm_quant

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
e4m3, e5m2, int8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
CODES = (e4m3, e5m2, int8)
LARGEST = {e4m3: 448.0, e5m2: 57344.0, int8: 127.0}
EPS = {True: 2.0**-23, False: 1e-5}  # RMSNorm, LayerNorm
# Of y, in units of float32's rounding of x_hat * weight, of weight and of bias: statistics of a few roundings each (the
# sum of a row is a tree), a product and a sum; then 1 / scale and the quotient.
ROUNDINGS = 16 * 2.0**-24


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def codes_of(dtype, device):
    """All finite codes, sorted, as float64."""
    if dtype == int8:
        return torch.arange(-127.0, 128, dtype=torch.float64, device=device)
    values = torch.arange(256, dtype=torch.uint8, device=device).view(dtype).double()
    return values[values.isfinite()].unique()


def nearest(quotient, dtype):
    codes = codes_of(dtype, quotient.device)
    return codes[torch.bucketize(quotient, (codes[1:] + codes[:-1]) / 2)]


class Exact:
    """y in float64, and the bound of its error in float32."""

    def __init__(self, x, weight, bias, is_rms, residual=None, residual_dtype=None, weight_offset=0.0):
        self.z = x
        if residual is not None:
            self.z = (residual.float() + x.float()).to(residual_dtype or residual.dtype)
        wide = self.z.double()
        centered = wide if is_rms else wide - wide.mean(-1, keepdim=True)
        rstd = (centered.square().mean(-1, keepdim=True) + EPS[is_rms]).rsqrt()
        factor = torch.ones_like(wide) if weight is None else weight.double() + weight_offset
        shift = torch.zeros_like(wide) if bias is None else bias.double()
        self.y = centered * rstd * factor + shift
        self.error = ROUNDINGS * ((centered * rstd).abs() * factor.abs() + shift.abs())
        if not is_rms:  # of the mean, relative to the spread
            self.error = self.error + ROUNDINGS * factor.abs()


def check(exact, q, scale, dtype, group_size=None):
    """group_size: of scales that were found."""
    assert q.shape == exact.y.shape and q.dtype == dtype and scale.dtype == fp32
    y, error, wide = exact.y, exact.error, scale.double()
    if group_size is not None:
        groups = (*y.shape[:-1], -1, group_size)
        amax = y.view(groups).abs().amax(-1)
        bound = error.view(groups).amax(-1) / LARGEST[dtype]
        wanted = amax.clamp(min=1e-12) / LARGEST[dtype]
        assert scale.shape == wanted.shape, (scale.shape, wanted.shape)
        off = (wide - wanted).abs() > bound + 2.0**-22 * wanted
        assert not off.any(), f"{off.sum()} of {off.numel()} scales are wrong"
        wide = wide.unsqueeze(-1).expand(*wide.shape, group_size).reshape(y.shape)
    quotient = y / wide
    slack = error / wide + 2.0**-22 * quotient.abs()
    found = q.double()
    off = ~((nearest(quotient - slack, dtype) <= found) & (found <= nearest(quotient + slack, dtype)))
    if off.any():
        at = off.nonzero()[0].tolist()
        raise AssertionError(f"{off.sum()} of {off.numel()} codes are wrong, the first at {at}: "
                             f"{found[tuple(at)]} for {quotient[tuple(at)]}")  # fmt: skip


def make(rows, hidden_size, dtype, device, weight_dtype=None, seed=0):
    generator = torch.Generator(device).manual_seed(seed)

    def randn(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator, device=device, dtype=fp32).to(dtype)

    weight_dtype = weight_dtype or dtype
    x = 3 * randn(*rows, hidden_size) + 1
    return x, randn(hidden_size, dtype=weight_dtype) + 1, randn(hidden_size, dtype=weight_dtype), randn(*x.shape)


def group_of(hidden_size, most=128):
    return math.gcd(hidden_size, most)


def options_of(granularity, hidden_size, device, scale=0.05, most=128):
    """The options of a granularity, and the number of columns that share a scale that is found."""
    if granularity == "tensor":
        return {"scale": torch.tensor([scale], device=device)}, None
    if granularity == "token":
        return {"granularity": "token"}, hidden_size
    return {"granularity": "group", "group_size": group_of(hidden_size, most)}, group_of(hidden_size, most)


def norm_of(is_rms):
    return fused_rms_norm_quant if is_rms else fused_layer_norm_quant


# Groups of columns that do not fill the lanes of a plan, row lengths of each number of threads and slots, ragged
# rows, the longest rows, and rows that are too long
SIZES = (1, 7, 8, 64, 96, 128, 192, 384, 512, 520, 769, 1024, 1032, 1152, 2048, 3072, 4096, 4097, 5120, 6144, 8192,
         12288, 16384, 16392, 20000, 32768, 65536, 65544)  # fmt: skip
GRANULARITIES = ("tensor", "token", "group")


@on_devices("hidden_size,granularity", list(itertools.product(SIZES, GRANULARITIES)))
def test_values(device, hidden_size, granularity):
    """of every dtype; no result keeps what its memory held"""
    rows = (3,) if hidden_size > 4096 or device == "cpu" else (2, 37)
    options, group_size = options_of(granularity, hidden_size, device)
    norms = [(True, False), (False, True), *([(True, True), (False, False)] if device == "cuda" else [])]
    codes = [(code, 0.0) for code in CODES] + [(int8, 1.0)]
    for dtype, (code, offset), (is_rms, has_bias) in itertools.product((bf16, fp16, fp32), codes, norms):
        x, weight, bias, _ = make(rows, hidden_size, dtype, device)
        bias = bias if has_bias else None
        with poisoned():
            q, scale = norm_of(is_rms)(x, weight, bias, EPS[is_rms], dtype=code, weight_offset=offset, **options)
        check(Exact(x, weight, bias, is_rms, weight_offset=offset), q, scale, code, group_size)
        assert granularity != "tensor" or scale is options["scale"]


@on_devices("exponent", (-127, -126, 126, 127))
def test_given_scales_at_the_ends_of_float32(device, exponent):
    """a scale that is subnormal, and one whose reciprocal is, with y of about its size, so that there are many codes"""
    for is_rms, code, hidden_size in itertools.product((True, False), (e4m3, int8), (1024, 4097)):
        x, weight, bias, _ = make((3,), hidden_size, bf16, device)
        times = 2.0 ** (exponent + (5 if exponent < 0 else -5))
        x = x / 64 if exponent > 0 else x  # x * weight stays within the normal numbers of float32
        weight, bias = weight * times, None if is_rms else bias * times
        scale = torch.tensor(1.25 * 2.0**exponent, device=device)
        with poisoned():
            q, _ = norm_of(is_rms)(x, weight, bias, EPS[is_rms], dtype=code, scale=scale)
        assert code == int8 and exponent > 0 or q.float().unique().numel() > 50
        check(Exact(x, weight, bias, is_rms), q, scale, code)


@on_devices("hidden_size,granularity", list(itertools.product((64, 1000, 1001, 4096, 8192, 20000), GRANULARITIES)))
def test_stages(device, hidden_size, granularity):
    """a residual of each dtype, optional parameters, y and z beside the codes"""
    options, group_size = options_of(granularity, hidden_size, device, most=32)
    residuals = [(None, None), (bf16, None), (fp32, None), (bf16, fp32), (fp32, bf16)]
    parameters = [(False, False, bf16), (True, False, fp32), (True, True, bf16), (False, True, fp32)]
    for count, ((given, stored), (has_weight, has_bias, weight_dtype)) in enumerate(
        itertools.product(residuals, parameters)
    ):
        is_rms, code, returns_y = count % 2 == 0, CODES[count % 3], count % 4 < 3
        x, weight, bias, residual = make((2, 3), hidden_size, bf16, device, weight_dtype, seed=count)
        weight, bias = weight if has_weight else None, bias if has_bias else None
        residual = None if given is None else residual.to(given)
        with poisoned():
            q, scale, *others = norm_of(is_rms)(
                x, weight, bias, EPS[is_rms], dtype=code, residual=residual, residual_dtype=stored,
                return_norm=returns_y, **options,
            )  # fmt: skip
        exact = Exact(x, weight, bias, is_rms, residual, stored)
        check(exact, q, scale, code, group_size)
        assert len(others) == returns_y + (residual is not None)
        if returns_y:
            y = others.pop(0)
            assert y.dtype == bf16 and y.shape == x.shape and y.is_contiguous()
            assert ((y.double() - exact.y).abs() <= 2.0**-8 * exact.y.abs() + exact.error).all()
        if residual is not None:
            assert others[0].dtype == (stored or given) and torch.equal(others[0], exact.z)


@on_devices("hidden_size", (64, 1024, 8192, 20000))
@pytest.mark.parametrize("leading", ["tokens", "samples", "batch", "all"])
def test_modulation(device, hidden_size, leading):
    """weight and bias of each segment; with weight_offset=1 the norm is that of fused_adaptive_layer_norm"""
    x, *_ = make((2, 3, 4), hidden_size, bf16, device)
    shape = {"tokens": (2, 3, 4), "samples": (2, 3, 1), "batch": (2,), "all": ()}[leading]
    shift, scale = (0.3 * make(shape, hidden_size, bf16, device, seed=seed)[0] for seed in (1, 2))
    q, found, y = fused_layer_norm_quant(
        x, scale, shift, granularity="token", normalized_shape=hidden_size, weight_offset=1.0, return_norm=True
    )
    wide = [t.reshape(2, 1, 1, hidden_size) if leading == "batch" else t for t in (scale, shift)]
    exact = Exact(x, *wide, False, weight_offset=1.0)
    check(exact, q, found, e4m3, hidden_size)
    theirs = fused_adaptive_layer_norm(x, scale, shift)
    assert ((y - theirs).abs() <= 2.0**-7 * theirs.abs() + exact.error).all()


@on_devices("rows", [((1,),), ((5,),), ((2, 3),), ((),)])
def test_column_major_scales(device, rows):
    x, weight, bias, _ = make(rows, 1024, bf16, device)
    options = {"granularity": "group", "group_size": 128}
    q, scale = fused_rms_norm_quant(x, weight, bias, **options)
    other_q, other = fused_rms_norm_quant(x, weight, bias, column_major_scales=True, **options)
    assert torch.equal(q.view(torch.uint8), other_q.view(torch.uint8)) and torch.equal(scale, other)
    assert scale.is_contiguous() and other.stride()[-1] == math.prod(rows)
    assert other.movedim(-1, 0).is_contiguous() and (len(rows) != 1 or other.stride()[0] == 1)


@on_devices("granularity", GRANULARITIES)
@pytest.mark.parametrize("hidden_size", [96, 1024, 1152, 3072, 4096, 20000])
@pytest.mark.parametrize("is_rms", [False, True])
def test_rows_are_alone_and_repeat(device, granularity, hidden_size, is_rms):
    """the same bits on every run and for a part of the rows, from strided rows too; on CUDA more rows than kernels of
    few rows take"""
    options, _ = options_of(granularity, hidden_size, device, most=32)
    rows = 300 + (2**20 // hidden_size if device == "cuda" else 0)
    wide = make((rows,), 2 * hidden_size, bf16, device)[0]
    x, weight = wide[:, hidden_size:], wide[0, :hidden_size].clone()
    norm = norm_of(is_rms)
    first = norm(x, weight, **options)
    for part in (slice(None), slice(17, 18), slice(100, 203)):
        for again in (x[part], x[part].contiguous()):
            q, scale = norm(again, weight, **options)
            assert torch.equal(q.view(torch.uint8), first[0][part].view(torch.uint8))
            assert torch.equal(scale, first[1] if granularity == "tensor" else first[1][part])


@on_devices()
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("hidden_size", [24, 1024])
def test_ties_saturation_and_nan(device, code, hidden_size):
    """y is exactly the bias: rounded to even between two codes, saturated, NaN kept or, as int8, 0"""
    codes = codes_of(code, device)
    positive = codes[codes >= 0]
    ties, inf = (positive[1:] + positive[:-1]) / 2, math.inf
    if code == int8:
        even = torch.where(positive[:-1] % 2 == 0, positive[:-1], positive[1:])
    else:
        is_even = positive.to(fp32).to(code).view(torch.uint8) % 2 == 0
        even = torch.where(is_even[:-1], positive[:-1], positive[1:])
    beyond = torch.tensor([LARGEST[code] * 1.0001, 3e38, inf], dtype=torch.float64, device=device)
    values = torch.cat([ties, -ties, beyond, -beyond])
    wanted = torch.cat([even, -even, *[sign * LARGEST[code] * torch.ones(3, device=device) for sign in (1, -1)]])
    # scale of a power of two: its quotient is exact
    for exponent in (0, -4):
        scale = torch.tensor(2.0**exponent, device=device)
        for start in range(0, len(values), hidden_size - 8):
            bias = torch.zeros(hidden_size, device=device)
            part = values[start : start + hidden_size - 8]
            bias[: len(part)] = (part * 2.0**exponent).float()
            bias[-1] = math.nan
            x = torch.randn(3, hidden_size, device=device)
            q, _ = fused_rms_norm_quant(x, torch.zeros_like(bias), bias, dtype=code, scale=scale)
            assert torch.equal(q[:, : len(part)].double(), wanted[start : start + len(part)].double().expand(3, -1))
            last = q[:, -1].float()
            assert (last == 0).all() if code == int8 else last.isnan().all()


@on_devices("hidden_size", (64, 1024, 20000))
def test_rows_of_zeros_and_of_nan(device, hidden_size):
    """the scale of zeros is positive, and that of a row with NaN or infinity is NaN, also if one element alone is"""
    x, weight, _, _ = make((6,), hidden_size, bf16, device)
    x[1] = 0
    x[2, 9] = math.inf  # times an rstd of 0
    x[3, 5] = math.nan
    bias = torch.zeros_like(weight)
    for granularity, code in itertools.product(("token", "group"), CODES):
        options, group_size = options_of(granularity, hidden_size, device, most=32)
        q, scale = fused_rms_norm_quant(x, weight, bias, EPS[True], dtype=code, **options)
        assert (q[1].float() == 0).all() and ((scale[1] * LARGEST[code] * 1e12 - 1).abs() < 1e-6).all()
        assert scale[2, 0].isnan() and scale[3].isnan().all()
        assert (q[3].float() == 0).all() if code == int8 else q[3].float().isnan().all()
        rest = [0, 1, 4, 5]
        check(Exact(x[rest], weight, bias, True), q[rest], scale[rest], code, group_size)
        nan_at_7 = bias.clone()
        nan_at_7[7] = math.nan
        q, scale = fused_rms_norm_quant(x[:1], weight, nan_at_7, EPS[True], dtype=code, **options)
        assert scale.isnan().sum() == 1 and scale.view(-1)[0].isnan()


@on_devices("granularity", GRANULARITIES)
def test_no_rows(device, granularity):
    x, weight, _, residual = make((2, 0), 256, bf16, device)
    options, _ = options_of(granularity, 256, device)
    q, scale, y, z = fused_rms_norm_quant(x, weight, residual=residual, return_norm=True, **options)
    assert q.shape == y.shape == z.shape == (2, 0, 256) and q.dtype == e4m3
    assert scale.shape == {"tensor": (1,), "token": (2, 0, 1), "group": (2, 0, 2)}[granularity]
    q, scale = fused_layer_norm_quant(torch.empty(3, 0, device=device), granularity="token")
    assert q.shape == (3, 0) and scale.shape == (3, 1)


@on_devices("granularity", GRANULARITIES)
def test_several_dimensions_are_a_row(device, granularity):
    x, weight, bias, _ = make((5,), 256, bf16, device)
    options, group_size = options_of(granularity, 256, device)
    q, scale = fused_layer_norm_quant(x.view(5, 4, 64), weight.view(4, 64), bias.view(4, 64), **options)
    assert q.shape == (5, 4, 64)
    check(Exact(x, weight, bias, False), q.view(5, 256), scale, e4m3, group_size)


@on_devices("granularity", GRANULARITIES)
@pytest.mark.parametrize("hidden_size", [1024, 1001])
def test_compiled(device, granularity, hidden_size):
    """one graph, with the codes of eager mode"""
    x, weight, bias, residual = make((2, 16), hidden_size, bf16, device)
    options, _ = options_of(granularity, hidden_size, device)

    def call(x, weight, bias, residual):
        return fused_layer_norm_quant(
            x, weight, bias, residual=residual, return_norm=True, column_major_scales=True, **options
        )

    torch.compiler.reset()
    eager = call(x, weight, bias, residual)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)(x, weight, bias, residual)
    for ours, theirs in zip(compiled, eager, strict=True):
        assert ours.dtype == theirs.dtype and ours.stride() == theirs.stride()
        assert torch.equal(ours.float(), theirs.float())


@on_devices("granularity", GRANULARITIES, devices=("cuda",))
def test_cuda_graph(device, granularity):
    """a replay reads the inputs and the given scale again"""
    x, weight, bias, _ = make((64,), 4096, bf16, device)
    options, group_size = options_of(granularity, 4096, device)
    fused_rms_norm_quant(x, weight, bias, EPS[True], **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q, scale = fused_rms_norm_quant(x, weight, bias, EPS[True], **options)
    for seed in (1, 2):
        x.copy_(make((64,), 4096, bf16, device, seed=seed)[0])
        if granularity == "tensor":
            scale.fill_(0.01 * (1 + seed))
        graph.replay()
        torch.cuda.synchronize()
        check(Exact(x, weight, bias, True), q, scale, e4m3, group_size)


@on_devices("hidden_size", (1024, 4096, 5120, 16384, 20000, 32768), devices=("cuda",))
@pytest.mark.parametrize("dtype", [bf16, fp16, fp32])
def test_kernels_take_whole_vectors(device, hidden_size, dtype):
    """and a call is one kernel"""
    if not uses_kernels(device):
        pytest.skip("no CUDA kernels")
    hidden_size = min(hidden_size, 65536 // dtype.itemsize)  # the longest rows
    x, weight, _, residual = make((8,), hidden_size, dtype, device)
    fused_rms_norm_quant(x, weight, granularity="token")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for granularity in ("token", "group"):
            fused_rms_norm_quant(x, weight, granularity=granularity, group_size=32, residual=residual)
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 2 and all("norm_quant_kernel" in name for name in kernels), kernels


def test_what_the_operator_takes():
    """by dtypes and size, not by the number of rows"""

    def takes(hidden_size, group_size=None, dtype=bf16, residual_dtype=None, z_dtype=None, device="cuda"):
        x = types.SimpleNamespace(device=torch.device(device), dtype=dtype)
        residual = None if residual_dtype is None else types.SimpleNamespace(dtype=residual_dtype)
        z_dtype = z_dtype or residual_dtype
        return _ops.takes_quantized(x, residual, z_dtype, hidden_size, group_size or hidden_size, False)

    assert takes(8) and takes(4096, 128) and takes(32768) and takes(4, dtype=fp32) and takes(96, 32)
    assert not any(
        (takes(4), takes(4097), takes(32776), takes(4096, 256), takes(4096, 16), takes(96, 96, device="cpu"))
    )
    assert takes(16384, dtype=fp32) and not takes(16388, dtype=fp32)
    assert takes(16384, residual_dtype=fp32) and not takes(16392, residual_dtype=fp32)
    assert takes(4096, residual_dtype=fp32) and not takes(4096, residual_dtype=fp32, z_dtype=bf16)


def test_under_vmap():
    """PyTorch operations alone"""
    x, weight, bias, _ = make((4, 3), 256, fp32, "cpu")
    q, scale = fused_rms_norm_quant(x, weight, bias, granularity="token")
    mapped, scales = torch.func.vmap(lambda x: fused_rms_norm_quant(x, weight, bias, granularity="token"))(x)
    exact = Exact(x, weight, bias, True)
    check(exact, q, scale, e4m3, 256)
    check(exact, mapped, scales, e4m3, 256)


def test_refused_where_gradients_would_be_recorded():
    x, weight, _, _ = make((2,), 64, fp32, "cpu")
    weight.requires_grad_()
    fused_rms_norm_quant(x, weight, granularity="token")
    with torch.enable_grad(), pytest.raises(RuntimeError, match="a quantized norm has no gradients"):
        fused_rms_norm_quant(x, weight, granularity="token")
    with torch.inference_mode():
        assert not fused_rms_norm_quant(x, weight, granularity="token")[1].requires_grad


X = torch.ones(2, 64)
S = torch.ones(1)
ERRORS = [
    ({}, ValueError, "scale is needed"),
    ({"scale": 1.0}, TypeError, "scale must be a Tensor"),
    ({"scale": S.double()}, TypeError, "scale must be float32"),
    ({"scale": torch.ones(2)}, RuntimeError, "scale must have one element"),
    ({"scale": S.to("meta")}, RuntimeError, "scale must be on x's device"),
    ({"scale": S, "granularity": "token"}, ValueError, "scale goes with granularity"),
    ({"scale": S, "granularity": "group"}, ValueError, "scale goes with granularity"),
    ({"granularity": "row"}, ValueError, "granularity must be"),
    ({"granularity": "group"}, ValueError, "group_size must divide the normalized dimension, 64, got 128"),
    ({"granularity": "group", "group_size": 0}, ValueError, "group_size must divide"),
    ({"granularity": "group", "group_size": 1.5}, TypeError, "group_size must be an int"),
    ({"scale": S, "dtype": torch.uint8}, TypeError, "dtype must be torch.float8_e4m3fn"),
    ({"scale": S, "dtype": torch.float16}, TypeError, "dtype must be torch.float8_e4m3fn"),
    ({"x": X.double(), "scale": S}, TypeError, "x must be float16, bfloat16 or float32 for a quantized norm"),
    ({"x": X.to(e4m3), "scale": S}, TypeError, "x must be float16"),
    ({"x": None, "scale": S}, TypeError, "x must be a Tensor"),
    ({"scale": S, "residual_dtype": fp32}, ValueError, "residual_dtype needs a residual"),
    ({"scale": S, "residual": X[:1]}, RuntimeError, "residual must have x's shape"),
    ({"scale": S, "residual": X.half()}, TypeError, "residual must be of x's dtype"),
    ({"scale": S, "weight": torch.ones(32)}, RuntimeError, "weight must have the shape of x's last dimensions"),
    ({"scale": S, "weight": torch.ones(64).half()}, TypeError, "weight must be of x's dtype"),
    ({"scale": S, "weight": torch.ones(3, 64), "normalized_shape": 64}, RuntimeError, "weight must be of x's shape"),
    ({"scale": S, "weight_offset": 1.0}, ValueError, "weight_offset needs a weight"),
    ({"scale": S, "bias": X, "normalized_shape": 64, "weight_offset": 1.0}, ValueError, "weight_offset needs a weight"),
    ({"scale": S, "eps": "1"}, TypeError, "eps must be a number"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), ERRORS)
@pytest.mark.parametrize("norm", [fused_rms_norm_quant, fused_layer_norm_quant], ids=lambda norm: norm.__name__)
def test_errors(norm, arguments, error, message):
    with pytest.raises(error, match=message):
        norm(**{"x": X} | arguments)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors(layout):
    x = torch.nested.nested_tensor([X, X[:1]], layout=layout)
    with pytest.raises(TypeError, match="x must be a dense .* tensor, got a nested tensor"):
        fused_rms_norm_quant(x, torch.ones(64), granularity="token")


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_the_judge_finds_faults(code, granularity):
    """a code one off, a scale off by 2^-16, that of another row, and codes that are not rounded to the nearest"""
    x, weight, bias, _ = make((8,), 256, fp32, "cpu")
    options, group_size = options_of(granularity, 256, "cpu", most=64)
    exact = Exact(x, weight, bias, False)
    q, scale = fused_layer_norm_quant(x, weight, bias, dtype=code, **options)
    check(exact, q, scale, code, group_size)
    codes = codes_of(code, "cpu")
    neighbour = q.clone()
    at = int((codes == q[3, 100].double()).nonzero())
    neighbour[3, 100] = codes[at + 1 if at + 1 < len(codes) else at - 1].to(fp32).to(code)
    with pytest.raises(AssertionError, match="1 of 2048 codes are wrong"):
        check(exact, neighbour, scale, code, group_size)
    with pytest.raises(AssertionError, match="are wrong"):
        check(exact, q, scale * 1.5, code, group_size)
    if group_size:
        with pytest.raises(AssertionError, match="scales are wrong"):
            check(exact, q, scale * (1 + 2.0**-16), code, group_size)
        with pytest.raises(AssertionError, match="scales are wrong"):
            check(exact, q, scale.roll(1, 0), code, group_size)
    down = codes[torch.searchsorted(codes, exact.y.contiguous(), right=True) - 1]
    with pytest.raises(AssertionError, match="codes are wrong"):
        check(exact, down.to(fp32).to(code), torch.ones(1), code)


def test_operator_has_no_gradient():
    """an error, not silence, where the operator itself is asked for one; meta tensors, as it has no CPU kernel"""
    if _ops.norm_quant is None:
        pytest.skip("no compiled operators")
    with torch.enable_grad():
        x = torch.empty(3, 64, device="meta", requires_grad=True)
        _, _, y, _ = _ops.norm_quant(x, None, None, None, None, 1, 1e-5, 0.0, True, None, int8, 64, False, True)
        with pytest.raises(RuntimeError, match="derivative .*norm_quant is not implemented"):
            y.sum().backward()
