"""relu(x * scale + bias), relu and reduce_sum: the worked example of docs/extending.md."""

import torch
from torch import Tensor, nn

from . import _build

_build.load()


# ---- what torch.compile and export must know: the shapes of results, without computing them --------------------------


@torch.library.register_fake("custom_op::scale_bias_relu")
def _(x, scale, bias):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake("custom_op::scale_bias_relu_backward")
def _(grad_output, y, scale, wants_bias):
    return torch.empty_like(y, memory_format=torch.contiguous_format), y.new_empty(y.shape[-1] if wants_bias else 0)


@torch.library.register_fake("custom_op::reduce_sum")
def _(x):
    return x.new_empty(x.shape[:-1])


# ---- what autograd must know -----------------------------------------------------------------------------------------


def _setup_context(ctx, inputs, output):
    _, ctx.scale, _ = inputs
    ctx.save_for_backward(output)


def _backward(ctx, grad_output):
    (y,) = ctx.saved_tensors
    wants_bias = ctx.needs_input_grad[2]
    if torch.is_grad_enabled():  # create_graph: by PyTorch operations, as the operator has no derivative of its own
        grad_z = grad_output.masked_fill(y <= 0, 0)
        grad_x, grad_bias = grad_z * ctx.scale, grad_z.sum_to_size(y.shape[-1:])
    else:
        grad_x, grad_bias = torch.ops.custom_op.scale_bias_relu_backward(grad_output, y, ctx.scale, wants_bias)
    return grad_x, None, grad_bias if wants_bias else None


torch.library.register_autograd("custom_op::scale_bias_relu", _backward, setup_context=_setup_context)


def _setup_sum_context(ctx, inputs, output):
    ctx.shape = inputs[0].shape


def _sum_backward(ctx, grad_output):
    return grad_output.unsqueeze(-1).expand(ctx.shape)  # a view: no kernel, and differentiable


torch.library.register_autograd("custom_op::reduce_sum", _sum_backward, setup_context=_setup_sum_context)


# ---- what people call ------------------------------------------------------------------------------------------------


def scale_bias_relu(x: Tensor, scale: float, bias: Tensor | None = None) -> Tensor:
    """relu(x * scale + bias), bias over the last dimension; computed in float32 (float64 for float64 x)."""
    return torch.ops.custom_op.scale_bias_relu(x, scale, bias)


def relu(x: Tensor) -> Tensor:
    """The same kernel with scale 1 and no bias: what is absent takes its neutral value."""
    return scale_bias_relu(x, 1.0)


def reduce_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension, the same bits on every run; added up in float32 (float64 for float64 x)."""
    return torch.ops.custom_op.reduce_sum(x)


class ScaleBiasReLU(nn.Module):
    """relu(x * scale + bias) with a bias that is learned."""

    def __init__(self, features: int, scale: float = 1.0, device=None, dtype=None):
        super().__init__()
        self.scale = scale
        self.bias = nn.Parameter(torch.zeros(features, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return scale_bias_relu(x, self.scale, self.bias)

    def extra_repr(self) -> str:
        return f"{self.bias.numel()}, scale={self.scale}"


# ---- the specification -----------------------------------------------------------------------------------------------


def reference_scale_bias_relu(x: Tensor, scale: float, bias: Tensor | None = None) -> Tensor:
    z = x * scale
    return torch.relu(z if bias is None else z + bias)


def reference_reduce_sum(x: Tensor) -> Tensor:
    return x.sum(-1)
