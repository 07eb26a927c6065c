"""my_op(x): differentiable, compilable, on CUDA and on the CPU."""

import torch
from torch import Tensor, nn

from . import _build

_build.load()


@torch.library.register_fake("my_op::forward")
def _(x):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake("my_op::backward")
def _(grad_output, x):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad_output):
    (x,) = ctx.saved_tensors
    if torch.is_grad_enabled():  # create_graph: by PyTorch operations, as the operator has no derivative of its own
        return grad_output * 2 * x
    return torch.ops.my_op.backward(grad_output, x)


torch.library.register_autograd("my_op::forward", _backward, setup_context=_setup_context)


def my_op(x: Tensor) -> Tensor:
    """y = x * x, of x's shape and dtype; computed in float32 (float64 for float64 x)."""
    return torch.ops.my_op.forward(x)


def reference(x: Tensor) -> Tensor:
    """The specification, in plain PyTorch."""
    return x * x


class MyOp(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return my_op(x)
