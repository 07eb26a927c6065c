"""python -m pytest test_my_op.py"""

import pytest
import torch
from my_op import MyOp, my_op, reference

DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
# Nothing, one element, no whole vector, whole vectors, several blocks.
SHAPES = [(0, 4), (1,), (3, 5), (4, 64), (7, 12345)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_value_and_gradient(shape, dtype, device):
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=dtype, device=device, requires_grad=True)
    grad_output = torch.randn_like(x)
    exact_x = x.detach().double().requires_grad_()
    y, exact = my_op(x), reference(exact_x)
    (grad,) = torch.autograd.grad(y, x, grad_output)
    (exact_grad,) = torch.autograd.grad(exact, exact_x, grad_output.double())
    assert y.dtype == grad.dtype == dtype and y.is_contiguous()
    eps = torch.finfo(dtype).eps  # a few roundings in float32 (float64), one to dtype
    torch.testing.assert_close(y.double(), exact, rtol=4 * eps, atol=eps)
    torch.testing.assert_close(grad.double(), exact_grad, rtol=4 * eps, atol=eps)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts(dtype, device):
    base = torch.randn(65, 48, dtype=dtype, device=device)
    for x in (base.t(), base[:, ::3], base.flatten()[1:], base[:1].expand(5, 48)):  # strided, misaligned, expanded
        torch.testing.assert_close(my_op(x), my_op(x.clone(memory_format=torch.contiguous_format)), rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_gradcheck(device):
    x = torch.randn(3, 7, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(my_op, x)
    assert torch.autograd.gradgradcheck(my_op, x)


@pytest.mark.parametrize("device", DEVICES)
def test_operator(device):
    x = torch.randn(3, 7, device=device, requires_grad=True)
    torch.library.opcheck(torch.ops.my_op.forward.default, (x,))
    torch.library.opcheck(torch.ops.my_op.backward.default, (torch.randn(3, 7, device=device), x.detach()))


@pytest.mark.parametrize("device", DEVICES)
def test_compile(device):
    # aot_eager: everything of torch.compile but the code generator, which has nothing to do in one operator.
    x = torch.randn(3, 7, device=device, requires_grad=True)
    compiled = torch.compile(MyOp(), fullgraph=True, backend="aot_eager")
    grads = [torch.autograd.grad(f(x).sum(), x) for f in (compiled, my_op)]
    torch.testing.assert_close(*grads, rtol=0, atol=0)


def test_bad_arguments():
    with pytest.raises(TypeError, match="x must be float16.*Int|x must be float16.*Long"):
        my_op(torch.ones(3, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="grad_output must have x's shape"):
        torch.ops.my_op.backward(torch.ones(2), torch.ones(3))
