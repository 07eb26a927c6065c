"""Failures that were reported of other norms, each under the name of its report.

Some are met in the table of test_correctness.py too, whose way of judging values is used here.
"""

import functools
import weakref
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from checks import needs_memory
from norm_cases import (
    ACTIVATIONS,
    ARGUMENTS,
    GRAD_LAYOUTS,
    GRADIENTS,
    LAYOUTS,
    OPS,
    Case,
    Fusion,
    Inputs,
    bf16,
    check,
    fp16,
    fp32,
    fp64,
    fused,
    leaves_of,
    make_inputs,
    on_devices,
    one_thread,
    run,
    same_bits,
)

import fused_layernorm
from fused_layernorm import (
    fused_adaptive_layer_norm,
    fused_adaptive_rms_norm,
    fused_add_layer_norm,
    fused_add_rms_norm,
    fused_layer_norm,
    fused_rms_norm,
    reference,
)


def passes(case, device):
    inputs = make_inputs(case, device)
    check(case, inputs, run(fused, case, inputs))


@on_devices("op", OPS, devices=("cuda",))
def test_pytorch_181555_more_than_2_to_the_32_elements(device, op):
    """indices of 32 bits wrap around: the last rows and their gradients are the same bits as alone"""
    needs_memory(48)
    rows, hidden_size = (1 << 20) + 3, 4099
    assert rows * hidden_size > 1 << 32
    case = Case((rows, hidden_size), op=op, dtype=bf16)
    x, dy = (torch.randn(rows, hidden_size, dtype=bf16, device=device) for _ in range(2))
    weight, bias = (torch.randn(hidden_size, dtype=bf16, device=device) for _ in range(2))
    found = run(fused, case, Inputs(x, weight, bias, dy))
    for part in (slice(0, 3), slice(rows - 3, rows)):
        alone = run(fused, case, Inputs(x[part], weight, bias, dy[part]))
        assert same_bits(found["y"][part], alone["y"]) and same_bits(found["x"][part], alone["x"])


@on_devices("op,absent", [(op, absent) for op in OPS for absent in ((), ("weight",), ("bias",), ("weight", "bias"))])
def test_pytorch_193016_192016_many_rows_of_several_normalized_dimensions(device, op, absent):
    """gradients of the parameters have their shape, above 65536 rows too, and with a bias but no weight"""
    passes(Case((65537, 2, 3), op=op, dtype=bf16, normalized_ndim=2, **dict.fromkeys(absent)), device)


@on_devices("op,rows", [(op, rows) for op in OPS for rows in (65535, 65536, 65537)])
def test_apex_411_65536_rows(device, op, rows):
    """a grid dimension ends at 65535"""
    passes(Case((rows, 8), op=op, dtype=bf16), device)


@on_devices("op", OPS, devices=("cuda",))
def test_pytorch_186800_a_row_of_2_to_the_28(device, op):
    """a counter of 32 bits in the loop over a row never reached its end"""
    needs_memory(24)
    x, dy = (torch.randn(1, 1 << 28, dtype=bf16, device=device) for _ in range(2))
    x.requires_grad_()
    y = OPS[op](x, normalized_shape=x.shape[1:], eps=1e-5)
    (grad_x,) = torch.autograd.grad(y, x, dy)
    centred = x.detach().float()
    if op == "layer_norm":
        centred -= centred.mean()
    rstd = (centred.square().mean() + 1e-5).rsqrt()
    x_hat = centred.mul_(rstd)
    wdy = dy.float() - (dy.float().mean() if op == "layer_norm" else 0.0)
    for result, expected in ((y, x_hat), (grad_x, (wdy - x_hat * (x_hat * wdy).mean()) * rstd)):
        # 1 unit of the 16-bit result, and the fp32 rounding of these sums of 2^28.
        assert bool(((result - expected).abs() <= torch.finfo(bf16).eps * expected.abs() + 1e-5).all())


@on_devices("rows", [(64,)])
def test_pytorch_40308_small_variance_about_a_large_mean(device, rows):
    """x = 100 + 0.01 * randn, fp32: the variance must not be lost to cancellation"""
    x = 100 + 0.01 * torch.randn(rows if device == "cpu" else 16 * rows, 32768, device=device)
    truth = F.layer_norm(x.double(), x.shape[1:])
    error = (fused_layer_norm(x, normalized_shape=32768).double() - truth).abs()
    assert bool((error <= 16 * torch.finfo(fp32).eps * (1 + truth.abs())).all())


@on_devices("op,dtype", [(op, dtype) for op in OPS for dtype in (bf16, fp32)])
def test_pytorch_149301_74033_a_row_depends_on_its_batch(device, op, dtype):
    """norm(x)[:k] and norm(x[:k]) are the same bits"""
    for hidden_size in (64, 769, 4096):
        inputs = make_inputs(Case((97, hidden_size), op=op, dtype=dtype), device)
        y = OPS[op](inputs.x, inputs.weight, inputs.bias, eps=1e-5)
        for k in (1, 2, 31, 64):
            assert same_bits(OPS[op](inputs.x[:k], inputs.weight, inputs.bias, eps=1e-5), y[:k])


@on_devices("op", OPS, devices=("cuda",))
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_apex_1022_1736_liger_21_another_device_than_the_current(device, op):
    """tensors on cuda:1 while cuda:0 is current"""
    with torch.cuda.device(0):
        passes(Case((64, 1000), op=op), "cuda:1")


@on_devices("op,dtype", [(op, dtype) for op in OPS for dtype in (bf16, fp32)])
def test_quack_88_expanded_gradient(device, op, dtype):
    """y.sum().backward() sends one number, expanded"""
    passes(Case((37, 256), op=op, dtype=dtype, grad_layout="expanded_scalar"), device)


@on_devices("op,dtype", [(op, dtype) for op in OPS for dtype in (bf16, fp32)])
def test_unsloth_10617_10675_lightllm_1467_layouts(device, op, dtype):
    """every layout of x with every layout of the gradient"""
    with one_thread():
        for hidden_size in (1, 17, 64, 127, 128):
            for layout in ("contiguous", *LAYOUTS):
                for grad_layout in ("contiguous", *GRAD_LAYOUTS):
                    passes(Case((5, hidden_size), op=op, dtype=dtype, layout=layout, grad_layout=grad_layout), device)


@on_devices("op,dtype", [(op, dtype) for op in OPS for dtype in (fp16, bf16, fp32, fp64)])
def test_torch_native_norms_misaligned_base_pointer(device, op, dtype):
    """buffer[1:]: no 16-byte access fits"""
    for hidden_size in (64, 4096):
        passes(Case((5, hidden_size), op=op, dtype=dtype, layout="offset_by_one", grad_layout="offset_by_one",
                    parameter_layout="offset_by_one"), device)  # fmt: skip


@on_devices("op,dtype", [(op, dtype) for op in OPS for dtype in (bf16, fp32)])
def test_liger_370_1305_gradient_that_is_used_elsewhere(device, op, dtype):
    """grad_output is not overwritten: here it also is the gradient of a branch beside the norm"""
    inputs = make_inputs(Case((9, 256), op=op, dtype=dtype), device)
    before = inputs.grad_output.clone()
    x = inputs.x.detach().requires_grad_()
    beside = torch.zeros_like(x, requires_grad=True)
    y = OPS[op](x, inputs.weight, inputs.bias, eps=1e-5) + beside
    grad_x, grad_beside = torch.autograd.grad(y, (x, beside), inputs.grad_output)
    assert same_bits(inputs.grad_output, before) and same_bits(grad_beside, before)
    assert not torch.equal(grad_x, before)


@on_devices("op", OPS)
def test_apex_1999_memory_under_no_grad(device, op):
    """without gradients the result keeps nothing alive"""
    x, weight = torch.randn(4, 64, device=device), torch.ones(64, device=device, requires_grad=True)
    alive = weakref.ref(x)
    with torch.no_grad():
        y = OPS[op](x, weight)
    del x
    assert alive() is None and y.grad_fn is None


@on_devices("op,compiled", [(op, compiled) for op in OPS for compiled in (False, True)])
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_pytorch_183604_the_same_tensor_twice(device, op, compiled):
    """one tensor as x, weight and bias: its gradient is the sum of the three, compiled too"""
    norm = torch.compile(OPS[op], backend="aot_eager", fullgraph=True) if compiled else OPS[op]
    t = torch.randn(24, dtype=fp64, device=device, requires_grad=True)
    grad_output = torch.randn_like(t)
    parts = [t.detach().requires_grad_() for _ in range(3)]
    expected = sum(torch.autograd.grad(OPS[op](*parts, 1e-5), parts, grad_output))
    torch.testing.assert_close(torch.autograd.grad(norm(t, t, t, 1e-5), t, grad_output)[0], expected)


@on_devices("op", OPS)
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_pytorch_193279_torch_func_in_compile(device, op):
    """torch.func.grad within torch.compile, of x and of weight"""
    x, weight, direction = (torch.randn(shape, dtype=fp64, device=device) for shape in ((6, 24), (24,), (6, 24)))

    def loss(x, weight):
        return (OPS[op](x, weight, eps=1e-5) * direction).sum()

    def gradients(x, weight):
        return torch.func.grad(loss, argnums=(0, 1))(x, weight)

    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    expected = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.compile(gradients, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, weight), expected)


@on_devices("op,shape", [(op, shape) for op in OPS for shape in ((0, 8), (2, 0, 8), (0, 0))])
def test_empty_inputs(device, op, shape):
    """no rows, or rows of nothing: empty results, and gradients of zero for the parameters"""
    x = torch.randn(shape, device=device, requires_grad=True)
    weight, bias = (torch.ones(shape[-1], device=device, requires_grad=True) for _ in range(2))
    y = OPS[op](x, weight, bias)
    assert y.shape == x.shape
    grad_x, *rest = torch.autograd.grad(y, (x, weight, bias), torch.ones_like(y))
    assert grad_x.shape == x.shape
    for gradient in rest:
        assert gradient.shape == weight.shape and not gradient.any()


# ---- reported of this library ----------------------------------------------------------------------------------------


@functools.cache
def options_with_gradients(op, dtype, shape):
    """{name: Fusion}: every public function with every option that has gradients."""
    plain = Case(shape, op=op, dtype=dtype)
    modulated = replace(plain, weight=None, bias=None)
    wide = fp64 if dtype == fp64 else fp32
    added = {"kind": "add", "residual": dtype, "uses": ("y", "z")}
    found = {
        "plain": Fusion(plain),
        "bias alone": Fusion(replace(plain, weight=None)),
        "neither weight nor bias": Fusion(modulated),
        "weight_offset": Fusion(replace(plain, weight_offset=1.0)),
        "out_dtype": Fusion(replace(plain, out_dtype=wide)),
        "stats_grad=False": Fusion(replace(plain, stats_grad=False)),
        "memory_efficient": Fusion(plain, memory_efficient=True, seed=1),
        "dropout of y": Fusion(plain, dropout_p=0.3),
        "activation and dropout of y": Fusion(plain, activation="gelu", dropout_p=0.3),
        "residual": Fusion(plain, **added),
        "residual, y alone": Fusion(plain, **added | {"uses": ("y",)}),
        "residual, residual_out alone": Fusion(plain, **added | {"uses": ("z",)}),
        "no residual": Fusion(plain, kind="add", uses=("y", "z")),
        "float32 residual": Fusion(plain, **added | {"residual": wide}),
        "residual, dropout of x": Fusion(plain, **added, dropout_p=0.3),
        "residual, activation": Fusion(plain, **added, activation="silu"),
        "residual, stats_grad=False": Fusion(replace(plain, stats_grad=False), **added),
    }
    found |= {activation: Fusion(plain, activation=activation) for activation in ACTIVATIONS}
    if op == "rms_norm":
        found |= {rounding: Fusion(plain, rounding=rounding) for rounding in reference.ROUNDINGS[1:]}
        found["residual, llama"] = Fusion(plain, **added, rounding="llama")
    each = {"sample": (shape[0], shape[-1]), "token": shape, "position": (1, *shape[1:]), "all": shape[-1:]}
    for kind, of in each.items():
        for gate in (False, True):
            names = ("scale", "shift", "gate") if gate else ("scale", "shift")
            fields = {"kind": "adaptive", "modulations": {name: (of, dtype) for name in names}}
            residual = {"residual": dtype, "uses": ("y", "z")}
            if not gate:
                found[f"by {kind}"] = Fusion(modulated, **fields)
                found[f"by {kind}, weight and bias"] = Fusion(plain, **fields)
            found[f"by {kind}, residual{', gate' if gate else ''}"] = Fusion(modulated, **fields, **residual)
            found[f"by {kind}, residual{', gate' if gate else ''}, residual_out alone"] = Fusion(
                modulated, **fields, **residual | {"uses": ("z",)}
            )
    return found


def memory_of(tensors):
    return {t.untyped_storage().data_ptr(): name for name, t in tensors.items() if t.numel()}


def uses_of(fusion, device, wants):
    """(leaves, gradients of the results, a call that gives results and gradients): of one fusion."""
    given = fusion.tensors(device)
    leaves = leaves_of(given, wants)
    gradients = {name: given[GRADIENTS[name]].clone() for name in fusion.uses}

    def call():
        found = fusion.call(leaves)
        names = [name for name in fusion.uses if found[name].requires_grad]
        return [found[name] for name in names], [gradients[name] for name in names]

    return leaves, gradients, call


def shared_memory(found, leaves, gradients):
    """What of `found` lies in the memory of an argument, or of a gradient that was handed in."""
    held = memory_of({**leaves, **{f"the gradient of {name}": t for name, t in gradients.items()}})
    return [f"{name} and {held[place]}" for place, name in memory_of(found).items() if place in held]


def grads_twice(fusion, device, wants):
    """Two backward passes with one gradient: it is unchanged; .grad is twice the single one, in memory of its own."""
    leaves, gradients, call = uses_of(fusion, device, wants)
    before = {name: t.clone() for name, t in gradients.items()}
    outputs, given = call()
    if not outputs:
        return
    once = torch.autograd.grad(outputs, [leaves[name] for name in wants], given, allow_unused=True)
    once = {name: t.clone() for name, t in zip(wants, once, strict=True) if t is not None}
    for times in (1, 2):
        torch.autograd.backward(*call())
        found = {name: leaves[name].grad for name in once}
        shared = shared_memory(found, leaves, gradients)
        assert not shared and len(memory_of(found)) == len(found), f"share memory: {shared or 'two .grad'}"
        assert all(same_bits(gradients[name], before[name]) for name in gradients), "a gradient was written to"
        assert all(same_bits(t, times * once[name]) for name, t in found.items()), f"after {times} backward passes"


def grad_once(fusion, device, wants):
    """torch.autograd.grad: each result in its own memory."""
    leaves, gradients, call = uses_of(fusion, device, wants)
    outputs, given = call()
    if outputs:
        found = torch.autograd.grad(outputs, [leaves[name] for name in wants], given, allow_unused=True)
        found = {name: t for name, t in zip(wants, found, strict=True) if t is not None}
        shared = shared_memory(found, leaves, gradients)
        assert not shared, f"share memory: {shared}"


def check_all(check, device, op, name):
    failed = []
    for shape in ((2, 3, 16), (1, 1, 16)):
        for dtype in (fp32, bf16, fp64):
            fusion = options_with_gradients(op, dtype, shape)[name]
            wants = tuple(n for n in ARGUMENTS if n in fusion.tensors("cpu"))
            for wanted in (wants, *((n,) for n in wants)):
                try:
                    check(fusion, device, wanted)
                except AssertionError as error:
                    failed.append(f"{shape}, {dtype}, {wanted}: {error}".split("\n")[0])
    assert not failed, failed


NEEDS_KERNELS = pytest.mark.skipif(
    fused_layernorm.backend() == "reference", reason="PyTorch operations: a view's gradient is a view of the caller's"
)
OPTIONS = [(op, name) for op in OPS for name in options_with_gradients(op, fp32, (2, 3, 16))]


@NEEDS_KERNELS
@on_devices("op,name", OPTIONS)
def test_backward_twice_doubles_the_callers_gradient(device, op, name):
    """y.backward(g) twice doubled g, where shift's gradient was g under another tensor"""
    check_all(grads_twice, device, op, name)


@NEEDS_KERNELS
@on_devices("op,name", OPTIONS)
def test_autograd_grad_returns_memory_of_the_caller(device, op, name):
    """a result of torch.autograd.grad that is changed in place must not change what the caller holds"""
    if name == "by position, residual, gate, residual_out alone":
        pytest.skip("a sum of PyTorch's own, whose gradient of residual is that of residual_out")
    check_all(grad_once, device, op, name)


PLAIN_CALLS = {  # what a user may write, each on the shortest way to the kernels and on a longer one
    "layer_norm": fused_layer_norm, "rms_norm": fused_rms_norm, "add_layer_norm": fused_add_layer_norm,
    "add_rms_norm": fused_add_rms_norm, "adaptive_layer_norm": fused_adaptive_layer_norm,
    "adaptive_rms_norm": fused_adaptive_rms_norm,
}  # fmt: skip
WAYS = ("eager", "requires grad", "activation", "memory_efficient", "vmap", "compiled")


def call_by(way, name, tensors, *arguments, **options):
    norm = PLAIN_CALLS[name]
    if way == "activation":
        options["activation"] = "relu"
    if way == "memory_efficient":
        options["memory_efficient"] = True
    if way == "requires grad":
        tensors = [t.requires_grad_() for t in tensors]
    if way == "vmap":
        dims = tuple(0 if t.dim() == 2 else None for t in tensors)
        return torch.func.vmap(lambda *tensors: norm(*tensors, *arguments, **options), dims)(*tensors)
    if way == "compiled":
        torch.compiler.reset()
        norm = torch.compile(norm, backend="eager")
    return norm(*tensors, *arguments, **options)


LEFT_OUT = {("adaptive", "activation"), ("adaptive", "memory_efficient"), ("add", "memory_efficient")}  # not options
CALLS = [(name, way) for name in PLAIN_CALLS for way in WAYS if (name.split("_")[0], way) not in LEFT_OUT]


@pytest.mark.parametrize("name,way", CALLS)
def test_normalized_shape_true_is_1(name, way):
    """plain eager mode took True for 1, every other way refused it"""
    tensors = [torch.ones(3, 1) for _ in range({"add": 2, "ada": 3}.get(name[:3], 1))]
    for wrong in (True, [True]):
        with pytest.raises(TypeError, match="normalized_shape must be an int or a sequence of ints, got .?True"):
            call_by(way, name, tensors, normalized_shape=wrong)


@pytest.mark.parametrize("name,way", CALLS)
def test_positional_arguments_behind_eps(name, way):
    """they are by keyword: plain eager mode took them by position, in the order of the operator"""
    x, weight = torch.ones(3, 4), torch.ones(4)
    arguments = {"add": (x, weight, weight, 1e-5), "ada": (weight, weight)}.get(name[:3], (weight, weight, 1e-5))
    count = {"add": 4, "ada": 2}.get(name[:3], 3)
    tensors = [x.clone(), *(t.clone() for t in arguments[:count] if isinstance(t, torch.Tensor))]
    eps = () if name.startswith("ada") else (1e-5,)
    call_by(way, name, list(tensors), *eps)
    with pytest.raises(TypeError, match="positional argument"):
        call_by(way, name, list(tensors), *eps, (4,))
