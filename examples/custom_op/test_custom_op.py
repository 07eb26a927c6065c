"""python -m pytest test_custom_op.py"""

import copy
import gc

import pytest
import torch
from custom_op import (
    ScaleBiasReLU,
    reduce_sum,
    reference_reduce_sum,
    reference_scale_bias_relu,
    relu,
    scale_bias_relu,
)

DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
# Nothing, one element, no whole vector, whole vectors, several blocks of columns, several partial sums of rows, rows
# that a whole block adds up.
SHAPES = [(0, 4), (3, 0), (1,), (3, 5), (2, 3, 64), (7, 12345), (700, 40), (3, 4096)]
SCALE = 0.7

on_each_device = pytest.mark.parametrize("device", DEVICES)
on_each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def values(*shape, dtype=torch.float32, device="cpu", requires_grad=False):
    return torch.randn(shape, dtype=dtype, device=device, requires_grad=requires_grad)


def in_float64(*tensors):
    return [None if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in tensors]


@on_each_device
@on_each_dtype
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_bias", [True, False])
def test_scale_bias_relu(with_bias, shape, dtype, device):
    torch.manual_seed(0)
    x = values(*shape, dtype=dtype, device=device, requires_grad=True)
    bias = values(shape[-1], dtype=dtype, device=device, requires_grad=True) if with_bias else None
    grad_output = torch.randn_like(x)
    exact_x, exact_bias = in_float64(x, bias)
    y = scale_bias_relu(x, SCALE, bias) if with_bias else scale_bias_relu(x, SCALE)
    exact = reference_scale_bias_relu(exact_x, SCALE, exact_bias)
    # One rounding to dtype, and those of float32 (float64) before it, of terms that may cancel.
    eps, acc_eps = torch.finfo(dtype).eps, torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    largest = max(exact_x.abs().amax().item(), 1.0) if x.numel() else 1.0
    assert y.dtype == dtype and y.shape == x.shape
    torch.testing.assert_close(y.double(), exact, rtol=eps, atol=4 * acc_eps * largest)

    # Which elements pass is the same in both but where z is 0 up to rounding.
    sure = (exact_x * SCALE + (exact_bias if with_bias else 0)).abs() > 4 * acc_eps * largest
    assert torch.equal((y >= torch.finfo(dtype).tiny)[sure], (exact >= torch.finfo(dtype).tiny)[sure])
    inputs = [x, bias] if with_bias else [x]
    grads = torch.autograd.grad(y, inputs, grad_output)
    assert all(grad.dtype == dtype and grad.shape == t.shape for grad, t in zip(grads, inputs, strict=True))
    grad_z = grad_output.double() * (y > 0)
    torch.testing.assert_close(grads[0].double(), grad_z * SCALE, rtol=2 * eps, atol=torch.finfo(dtype).smallest_normal)
    if with_bias:
        sums, magnitude = (t.sum_to_size(shape[-1:]) for t in (grad_z, grad_z.abs()))
        rows = x.numel() // max(shape[-1], 1)
        assert ((grads[1].double() - sums).abs() <= eps * sums.abs() + rows * acc_eps * magnitude).all()


@on_each_device
@on_each_dtype
@pytest.mark.parametrize("shape", SHAPES)
def test_reduce_sum(shape, dtype, device):
    torch.manual_seed(0)
    x = values(*shape, dtype=dtype, device=device, requires_grad=True)
    y, (exact_x,) = reduce_sum(x), in_float64(x)
    exact = reference_reduce_sum(exact_x)
    assert y.dtype == dtype and y.shape == exact.shape
    eps, acc_eps = torch.finfo(dtype).eps, torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    bound = eps * exact.abs() + shape[-1] * acc_eps * exact_x.abs().sum(-1)
    assert ((y.double() - exact).abs() <= bound).all()
    grad_output = torch.randn_like(y)
    (grad,) = torch.autograd.grad(y, x, grad_output)
    torch.testing.assert_close(grad, grad_output.unsqueeze(-1).expand(shape), rtol=0, atol=0)


@on_each_device
def test_relu_is_torchs(device):
    x = torch.tensor([-1.0, -0.0, 0.0, 2.0, float("nan"), float("inf"), -float("inf")], device=device)
    torch.testing.assert_close(relu(x), torch.relu(x), rtol=0, atol=0, equal_nan=True)


@on_each_device
@on_each_dtype
def test_layouts(dtype, device):
    base = values(65, 48, dtype=dtype, device=device)
    for x in (base.t(), base[:, ::3], base.flatten()[1:], base[:1].expand(5, 48)):  # strided, misaligned, expanded
        dense, bias = x.clone(memory_format=torch.contiguous_format), values(x.shape[-1], dtype=dtype, device=device)
        for f in (lambda x, bias=bias: scale_bias_relu(x, SCALE, bias), reduce_sum):
            # Misaligned rows go element by element, where the order of a sum is another.
            torch.testing.assert_close(f(x), f(dense), rtol=4 * torch.finfo(dtype).eps, atol=1e-5)


@on_each_device
def test_gradcheck(device):
    torch.manual_seed(1)
    x, bias = (values(*shape, dtype=torch.float64, device=device, requires_grad=True) for shape in ((4, 7), (7,)))
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda x, bias: scale_bias_relu(x, SCALE, bias), (x, bias))
        assert check(relu, x)
        assert check(reduce_sum, x)


@on_each_device
@pytest.mark.parametrize("wanted", [(True, False), (False, True)])
def test_each_gradient_as_the_only_one(wanted, device):
    torch.manual_seed(0)
    tensors = [values(5, 8, device=device), values(8, device=device)]
    both = [t.clone().requires_grad_() for t in tensors]
    one = [t.clone().requires_grad_(w) for t, w in zip(tensors, wanted, strict=True)]
    for x, bias in (both, one):
        scale_bias_relu(x, SCALE, bias).square().sum().backward()
    for t, reference, w in zip(one, both, wanted, strict=True):
        assert torch.equal(t.grad, reference.grad) if w else t.grad is None


@on_each_device
def test_operators(device):
    x, bias = values(3, 7, device=device, requires_grad=True), values(7, device=device, requires_grad=True)
    ops = torch.ops.custom_op
    torch.library.opcheck(ops.scale_bias_relu.default, (x, SCALE, bias))
    torch.library.opcheck(ops.scale_bias_relu.default, (x, SCALE, None))
    torch.library.opcheck(ops.reduce_sum.default, (x,))
    y = relu(x.detach())
    for wants_bias in (True, False):
        torch.library.opcheck(ops.scale_bias_relu_backward.default, (y, y, SCALE, wants_bias))


@on_each_device
def test_compile(device):
    # aot_eager: everything of torch.compile but the code generator, which has nothing to do in one operator.
    module = ScaleBiasReLU(7, SCALE, device=device)
    x = values(3, 7, device=device, requires_grad=True)
    compiled = torch.compile(lambda x: reduce_sum(module(x)), fullgraph=True, backend="aot_eager")
    outputs = [compiled(x), reduce_sum(module(x))]
    torch.testing.assert_close(*outputs, rtol=0, atol=0)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), (x, module.bias)) for y in outputs), rtol=0, atol=0)


@on_each_device
def test_module_trains(device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), ScaleBiasReLU(16, 2.0), torch.nn.Linear(16, 1)).to(device)
    assert list(model.state_dict()) == ["0.weight", "0.bias", "1.bias", "2.weight", "2.bias"]
    assert torch.equal(copy.deepcopy(model)(values(2, 6, device=device) * 0), model(values(2, 6, device=device) * 0))
    x = values(64, 6, device=device)
    target = x[:, :2].prod(1, keepdim=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(100):
        loss = (model(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


@on_each_device
def test_same_bits_on_every_run(device):
    x, bias = (values(*shape, device=device, requires_grad=True) for shape in ((3000, 100), (100,)))
    grad = torch.randn_like(x)
    runs = [torch.autograd.grad(scale_bias_relu(x, SCALE, bias), (x, bias), grad) for _ in range(3)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


@on_each_device
def test_nothing_is_kept(device):
    """No tensor outlives a step: counted among Python's objects and, on a GPU, in its memory."""

    def step():
        x, bias = (values(*shape, device=device, requires_grad=True) for shape in ((64, 32), (32,)))
        reduce_sum(scale_bias_relu(x, SCALE, bias)).sum().backward()

    def held():
        gc.collect()
        tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
        return tensors, torch.cuda.memory_allocated() if device == "cuda" else 0

    for _ in range(3):
        step()
    before = held()
    for _ in range(50):
        step()
    assert held() == before


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_gpu():
    x, bias = values(33, 40), values(40)
    with torch.cuda.device(0):
        there = [t.to("cuda:1") for t in (x, bias)]
        y, total = scale_bias_relu(there[0], SCALE, there[1]), reduce_sum(there[0])
    assert y.device == total.device == torch.device("cuda:1")
    torch.testing.assert_close(y.cpu(), scale_bias_relu(x, SCALE, bias))
    torch.testing.assert_close(total.cpu(), reduce_sum(x))


@pytest.mark.parametrize(
    "error, message, call",
    [
        (TypeError, "x must be float16", lambda: relu(torch.ones(3, dtype=torch.int64))),
        (RuntimeError, "at least one dimension", lambda: reduce_sum(torch.tensor(1.0))),
        (RuntimeError, r"bias must have shape \[3\], got \[2\]", lambda: scale_bias_relu(values(4, 3), 1.0, values(2))),
        (TypeError, "bias must be of x's dtype", lambda: scale_bias_relu(values(3), 1.0, values(3).double())),
        (
            RuntimeError,
            r"grad_output must have shape \[4\]",
            lambda: torch.ops.custom_op.scale_bias_relu_backward(values(3), values(4), 1.0, False),
        ),
    ],
)
def test_bad_arguments(error, message, call):
    with pytest.raises(error, match=message):
        call()
