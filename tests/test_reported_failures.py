"""Failures that were reported of other norms, each under the name of its report.

Some are met in the table of test_correctness.py too, whose way of judging values is used here.
"""

import weakref

import pytest
import torch
import torch.nn.functional as F
from checks import needs_memory

from fused_layernorm import fused_layer_norm
from test_correctness import (
    GRAD_LAYOUTS,
    LAYOUTS,
    OPS,
    Case,
    Inputs,
    bf16,
    check,
    fp16,
    fp32,
    fp64,
    fused,
    make_inputs,
    on_devices,
    one_thread,
    run,
    same_bits,
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
