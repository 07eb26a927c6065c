"""fused_layernorm/integrations/inductor.py: what is folded and what must not be, the results, and what Inductor writes.

Most tests run the pass in a backend that ends in eager mode (`fold_backend`), with Inductor's decompositions and
partitioner: the graphs are the same, and no C++ is compiled.
"""

import functools
import operator
import sys
import types
import warnings
from collections import Counter

import pytest
import torch
from checks import DEVICES, assert_no_worse, run_package
from fork_server import run_code
from torch.utils.checkpoint import checkpoint

import fused_layernorm
from fused_layernorm import (
    FusedLayerNorm,
    FusedRMSNorm,
    _backend,
    fused_adaptive_layer_norm,
    fused_add_layer_norm,
    fused_gated_layer_norm,
    fused_gated_rms_norm,
    fused_layer_norm,
    fused_rms_norm,
    replace_norms,
)
from fused_layernorm.integrations import inductor

SIZE = 16
bf16, fp32, fp64 = torch.bfloat16, torch.float32, torch.float64

pytestmark = pytest.mark.skipif(fused_layernorm.backend() == "reference", reason="the operators are the extension's")


@pytest.fixture(autouse=True)
def fresh():
    import torch._inductor.config as config

    torch.compiler.reset()
    inductor.enable()
    inductor.counters.clear()
    torch.manual_seed(0)
    with config.patch(force_disable_caches=True, joint_custom_pre_pass=None):
        yield
    inductor.enable()
    torch.compiler.reset()


@pytest.fixture(params=DEVICES)
def device(request):
    if not _backend.has_kernels_for(request.param):
        pytest.skip("no kernels here")
    return request.param


def fold_backend(model, inputs, **options):
    """torch.compile's way through AOTAutograd with the pass that is in Inductor's configuration; then eager mode."""
    import torch._inductor.config as config
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    def passes(graph):
        for each in (
            config.joint_custom_pre_pass
            if isinstance(config.joint_custom_pre_pass, list)
            else [config.joint_custom_pre_pass]
        ):
            if each is not None:
                each(graph)
        graph.lint()

    def inference(module, example):
        passes(module.graph)
        module.recompile()
        return make_boxed_func(module)

    def partition(joint, *arguments, **options):
        passes(joint.graph)
        joint.recompile()
        return min_cut_rematerialization_partition(joint, *arguments, **options)

    return aot_autograd(
        fw_compiler=lambda module, example: make_boxed_func(module), inference_compiler=inference,
        partition_fn=partition, decompositions=select_decomp_table(),
    )(model, inputs)  # fmt: skip


def leaf(*shape, dtype=fp32, device="cpu"):
    return torch.randn(*shape, dtype=dtype, device=device, requires_grad=True)


def results_of(function, leaves):
    """Outputs, then gradients, for a loss that weighs every element differently."""
    outputs = function(*leaves)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    loss = sum(
        (y.to(fp64) * torch.linspace(-1, 2, y.numel(), device=y.device, dtype=fp64).view(y.shape)).sum()
        for y in outputs
    )
    return outputs + list(torch.autograd.grad(loss, leaves, allow_unused=True))


def check(function, leaves, training, inference, backend=fold_backend, **options):
    """Folds counted, and results no worse than those of eager mode by the measure of float64.

    The error allowed is twice that of eager mode and 4 machine epsilons of the tensor's size (assert_no_worse)."""
    wide = [t.detach().to(fp64).requires_grad_() if t.is_floating_point() else t for t in leaves]
    truth = results_of(function, wide)
    eager = results_of(function, leaves)
    compiled = torch.compile(function, backend=backend, fullgraph=True, **options)
    found = results_of(compiled, leaves)
    assert inductor.counters == Counter(training)
    for i, (actual, original, reference) in enumerate(zip(found, eager, truth, strict=True)):
        assert (actual is None) == (original is None)
        if original is not None:
            assert_no_worse(actual, original, reference, f"result {i}")
    inductor.counters.clear()
    with torch.no_grad():
        outputs = compiled(*leaves)
    assert inductor.counters == Counter(inference)
    for actual, original, reference in zip(
        [outputs] if isinstance(outputs, torch.Tensor) else outputs, eager, truth, strict=False
    ):
        assert_no_worse(actual, original.detach(), reference, "without gradients")


def norm(x, weight, bias):
    return fused_layer_norm(x, weight, bias)


# ---- what is folded --------------------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm1, self.norm2 = norm(SIZE), norm(SIZE)
        self.mix, self.up, self.down = (torch.nn.Linear(*s, bias=False) for s in ((SIZE, SIZE), (SIZE, 24), (24, SIZE)))

    def forward(self, x):
        x = x + self.mix(self.norm1(x))
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class Model(torch.nn.Module):
    def __init__(self, norm=torch.nn.LayerNorm, checkpointed=False, broken=False):
        super().__init__()
        self.blocks, self.last = torch.nn.ModuleList([Block(norm), Block(norm)]), norm(SIZE)
        self.checkpointed, self.broken = checkpointed, broken
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, 0.2, 0.3)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
            if self.broken:
                torch._dynamo.graph_break()
        return self.last(x)


def of_model(model):
    """A function of x and the parameters, for model's dtype or another."""
    modules = [*model.blocks, model.last]

    def function(x, *parameters):
        parameters = iter(parameters)
        for module in modules:
            own = {name: next(parameters) for name, _ in module.named_parameters()}

            def call(x, *values, module=module, names=tuple(own)):
                return torch.func.functional_call(module, dict(zip(names, values, strict=True)), (x,))

            is_recomputed = model.checkpointed and module is not model.last
            x = checkpoint(call, x, *own.values(), use_reentrant=False) if is_recomputed else call(x, *own.values())
        return x

    return function


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm", "bf16", "checkpointed"])
def test_models(device, kind):
    """two blocks: each sum but the first goes into a norm, each gradient of a sum into a backward"""
    model = Model(torch.nn.RMSNorm if kind == "rms_norm" else torch.nn.LayerNorm, kind == "checkpointed").to(device)
    replace_norms(model)
    dtype = bf16 if kind == "bf16" else fp32
    leaves = [leaf(2, 5, SIZE, dtype=dtype, device=device)]
    leaves += [p.detach().to(dtype).requires_grad_() for p in model.parameters()]
    if (
        kind == "checkpointed"
    ):  # two sums are in another region than their norms; torch 2.11 has regions in inference, too
        regions_last = torch.__version__ < (2, 13)
        check(of_model(model), leaves, {"residual": 2, "grad_residual": 4}, {"residual": 2 if regions_last else 4})
    else:
        check(of_model(model), leaves, {"residual": 4, "grad_residual": 4}, {"residual": 4})


def sizes():
    """What follows is called with these: x, the other term, a matrix, weight and bias."""
    return [(2, 5, SIZE), (2, 5, SIZE), (SIZE, SIZE), (SIZE,), (SIZE,)]


def one_sum(x, r, m, weight, bias):
    return norm(r + x @ m, weight, bias)


def used_elsewhere(x, r, m, weight, bias):
    z = x @ m + r
    return norm(z, weight, bias) @ m, z @ m, z.sin(), z


def two_norms_of_one_sum(x, r, m, weight, bias):
    z = x @ m + r
    return norm(z, weight, bias), fused_rms_norm(z, weight)


def chain(x, r, m, weight, bias):
    z = r + x @ m
    z2 = z + norm(z, weight, bias) @ m
    return norm(z2 + fused_rms_norm(z2, weight) @ m, bias, weight)


def flattened(x, r, m, weight, bias):
    z = r + x @ m
    y = norm(z.view(-1, SIZE), weight, bias)
    return z + (y @ m).view(z.shape)


def unflattened(x, r, m, weight, bias):
    z = x.view(-1, SIZE) @ m + r.view(-1, SIZE)
    return z + (norm(z.view(2, -1, SIZE), weight, bias) @ m).reshape(-1, SIZE)


def two_dimensions(x, r, m, weight, bias):
    z = r + x @ m
    return fused_layer_norm(z, weight.expand(5, -1) * 2, bias.expand(5, -1) + 1, normalized_shape=(5, SIZE))


def activated(x, r, m, weight, bias):
    return fused_layer_norm(r + x @ m, weight, bias, activation="gelu")


def modulated(x, r, m, weight, bias):
    scale, shift = ((t + x[:, 0]).unsqueeze(1) for t in (weight, bias))
    return fused_adaptive_layer_norm(r + x @ m, scale, shift)


def of_heads(x, r, m, weight, bias):
    z = r + x @ m
    return z + fused_layer_norm(z, weight.expand(5, -1) * 2, bias.expand(5, -1) + 1, normalized_shape=SIZE) @ m


def late_weight(x, r, m, weight, bias):
    z = r + x @ m
    return fused_layer_norm(z, (weight @ m).sin(), bias)


def without_parameters(x, r, m, weight, bias):
    z = r + x @ m
    return z @ m + fused_rms_norm(z, normalized_shape=SIZE, stats_grad=False) + weight + bias


def gradient_of_graph_input(x, r, m, weight, bias):
    return norm(x, weight, bias) @ m + x * r


def wider_result(x, r, m, weight, bias):
    return fused_layer_norm(r + x @ m, weight, bias, out_dtype=fp64)


FOLDED = [
    (one_sum, 1, 0), (used_elsewhere, 1, 1), (two_norms_of_one_sum, 1, 1), (chain, 3, 2), (flattened, 1, 1),
    (unflattened, 1, 1), (two_dimensions, 1, 0), (activated, 1, 0), (modulated, 1, 0), (of_heads, 1, 1),
    (late_weight, 1, 0), (without_parameters, 1, 1), (gradient_of_graph_input, 0, 1), (wider_result, 1, 0),
]  # fmt: skip


@pytest.mark.parametrize("function, residual, grad_residual", FOLDED, ids=[f.__name__ for f, *_ in FOLDED])
def test_folded(device, function, residual, grad_residual):
    expected = {"residual": residual, "grad_residual": grad_residual}
    check(
        function,
        [leaf(*s, device=device) for s in sizes()],
        {k: v for k, v in expected.items() if v},
        {"residual": residual} if residual else {},
    )


def after_block(x, r, m, weight, bias):
    z = r + norm(x @ m, weight, bias)
    return z @ m, z


def sandwich(x, r, m, weight, bias):
    z = fused_rms_norm(x @ m, weight, weight_offset=1.0) + r
    return norm(z, bias, weight) @ m, z


def sandwich_of_rms(x, r, m, weight, bias):  # both norms are one operator
    z = r + fused_rms_norm(x @ m, weight, weight_offset=1.0)
    return fused_rms_norm(z, bias) @ m, z


def residual_of_later(x, r, m, weight, bias):  # the residual is computed after the norm
    y = norm(x, weight, bias)
    return y + (r + x) @ m


@pytest.mark.parametrize(
    "function, sandwich, grad_residual",
    [(after_block, 0, 0), (sandwich, 0, 1), (sandwich_of_rms, 1, 1), (residual_of_later, 0, 1)],
)
def test_added(device, function, sandwich, grad_residual):
    """the norm after the block: the sum goes into the norm before it, and not into the one behind; two RMSNorms around
    the sum are one operator"""
    expected = {"added": 1, "sandwich": sandwich, "grad_residual": grad_residual}
    leaves = [leaf(*s, device=device) for s in sizes()]
    without_gradients = {"added": 1, "sandwich": sandwich}
    check(function, leaves, *({k: v for k, v in each.items() if v} for each in (expected, without_gradients)))


def conditions(r, m):
    """scale and shift of each sample"""
    return (r[:, 0] @ m).unsqueeze(1), (r[:, 1] @ m).unsqueeze(1)


def plain(x):
    return fused_layer_norm(x, normalized_shape=SIZE)


def adaptive(x, r, m, weight, bias):
    scale, shift = conditions(r, m)
    return (plain(x) * (1 + scale) + shift).to(m.dtype) @ m


def adaptive_of_sum(x, r, m, weight, bias):
    scale, shift = conditions(r, m)
    z = x + x @ m
    return (shift + (scale + 1) * plain(z)) @ m, z


def adaptive_rms_norm(x, r, m, weight, bias):  # a factor that is not 1 + scale, and no sum
    return fused_rms_norm(x, normalized_shape=SIZE) * conditions(r, m)[0], m + 1


def adaptive_frames(x, r, m, weight, bias):
    scale, shift = (t[None] for t in conditions(r, m))
    return (plain((x @ m)[None]) * (1 + scale) + shift) @ m


def adaptive_unlearned_scale(x, r, m, weight, bias):
    scale, shift = conditions(r, m)
    return (plain(x) * (1 + scale.detach()) + shift) @ m


def adaptive_of_all_rows(x, r, m, weight, bias):
    return (plain(x) * (1 + weight[None, None]) + bias[None, None]) @ m


@pytest.mark.parametrize("dtype", [fp32, bf16])
@pytest.mark.parametrize(
    "function",
    [adaptive, adaptive_of_sum, adaptive_rms_norm, adaptive_frames, adaptive_unlearned_scale, adaptive_of_all_rows],
)
def test_modulation(device, function, dtype):
    leaves = [leaf(*s, device=device, dtype=dtype) for s in sizes()]
    of_sum = function is adaptive_of_sum
    training = {"modulation": 1} | ({"residual": 1, "grad_residual": 1} if of_sum else {})
    check(function, leaves, training, {"modulation": 1} | ({"residual": 1} if of_sum else {}))


@pytest.mark.parametrize("x_dtype, dtype, casts", [(fp32, bf16, 1), (bf16, fp32, 0)])
def test_modulation_in_two_dtypes(device, x_dtype, dtype, casts):
    """scale, shift and the product behind the norm are of another dtype than x"""
    leaves = [leaf(*s, device=device, dtype=dtype if i else x_dtype) for i, s in enumerate(sizes())]
    folded = {"modulation": 1} | ({"cast": casts} if casts else {})
    check(adaptive, leaves, folded, folded)


def gated_sum(x, r, m):
    """residual + gate * x, a gate for each sample"""
    return x + (r[:, 0] @ m).unsqueeze(1) * (r @ m)


def dit(x, r, m, weight, bias):
    for _ in range(2):
        shift, scale, gate = (r[:, 0] @ m.repeat(1, 3)).unsqueeze(1).chunk(3, -1)
        x = x + gate * ((plain(x) * (1 + scale) + shift).to(m.dtype) @ m)
    return (plain(x) * (1 + scale) + shift).to(m.dtype) @ m, x


def gated_alone(x, r, m, weight, bias):
    return plain(gated_sum(x, r, m)).to(m.dtype) @ m


def gated_rms_of_frames(x, r, m, weight, bias):
    x, gate = x[None], (r[:, 0] @ m).view(1, 2, 1, SIZE)
    z = (x @ m) * gate + x
    return fused_rms_norm(z, normalized_shape=SIZE) @ m, z


def gated_in_adaptive_norm(x, r, m, weight, bias):
    return fused_adaptive_layer_norm(gated_sum(x, r, m), *conditions(r, m), out_dtype=m.dtype) @ m


def gated_by_unlearned_values(x, r, m, weight, bias):  # backward would need what the gate multiplies
    return plain(x + conditions(r, m)[0].detach() * (r @ m)) @ m


def gated_unlearned_values(x, r, m, weight, bias):
    return plain(x + conditions(r, m)[0] * (r @ m).detach()) @ m


def gated_for_all_rows(x, r, m, weight, bias):
    return fused_adaptive_layer_norm(x + weight[None, None] * (r @ m), bias[None, None], None) @ m


def layer_scale(x, r, m, weight, bias):
    """LayerScale: a gate for each column, before a norm with weight and bias"""
    for _ in range(2):
        x = x + weight * (norm(x, weight, bias) @ m)
    return norm(x, weight, bias) @ m, x


def layer_scale_alone(x, r, m, weight, bias):
    return plain(x + bias * (r @ m)) @ m


GATED = [
    (dit, {"gate": 2, "modulation": 3, "grad_gate": 2, "grad_residual": 3}),
    (gated_alone, {"gate": 1, "grad_gate": 1}),
    (gated_rms_of_frames, {"gate": 1, "grad_gate": 1, "grad_residual": 1}),
    (gated_in_adaptive_norm, {"gate": 1, "grad_gate": 1}),
    (gated_by_unlearned_values, {"gate": 1}),
    (gated_unlearned_values, {"gate": 1, "grad_gate": 1}),
    (gated_for_all_rows, {"gate": 1, "grad_gate": 1}),
    (layer_scale, {"gate": 2, "grad_gate": 2, "grad_residual": 3}),
    (layer_scale_alone, {"gate": 1, "grad_gate": 1}),
]  # fmt: skip


def without_gradients(folds):
    return {name: count for name, count in folds.items() if not name.startswith("grad_")}


@pytest.mark.parametrize("dtype", [fp32, bf16])
@pytest.mark.parametrize("function, folds", GATED)
def test_gate(device, function, folds, dtype):
    leaves = [leaf(*s, device=device, dtype=dtype) for s in sizes()]
    check(function, leaves, folds, without_gradients(folds))


HEAD = 16
PROJECTION = ((3, 5, 2 * HEAD), (2 * HEAD, 8 * HEAD), (HEAD,), (HEAD,))


def of_projection(first=2 * HEAD, norm=fused_gated_rms_norm, gate_users=1, per_head=False):
    """A gated norm of heads, as in Qwen3-Next: the gate is a slice of a projection, which reshape() copies."""

    def function(x, m, weight, bias):
        left, gate, _ = (x @ m).split([first, 2 * HEAD, m.shape[1] - first - 2 * HEAD], -1)
        y = torch.sin(left[..., : 2 * HEAD])
        if per_head:
            gate = gate.unflatten(-1, (2, HEAD)).clone(memory_format=torch.contiguous_format).view(-1, 2, HEAD)
            y = norm(y.reshape(-1, 2, HEAD), gate, weight.expand(2, HEAD), bias.expand(2, HEAD), normalized_shape=HEAD)
        else:
            gate = gate.unflatten(-1, (2, HEAD)).reshape(-1, HEAD)
            y = norm(y.reshape(-1, HEAD), gate, weight, bias)
        y = y.reshape(*x.shape[:-1], -1) @ m
        return (y, gate) if gate_users > 1 else y

    return function


@pytest.mark.parametrize("dtype", [fp32, bf16])
@pytest.mark.parametrize(
    "function, folds",
    [
        (of_projection(), 1),
        (of_projection(norm=functools.partial(fused_gated_layer_norm, norm_before_gate=False)), 1),
        (of_projection(first=2 * HEAD + 1), 0),  # not by 16 bytes
        (of_projection(gate_users=2), 0),  # the copy is needed
        (of_projection(per_head=True), 0),
    ],
)
def test_copy_of_a_gate(device, function, folds, dtype):
    """without gradients the gate is read in place; for backward the copy is kept, smaller than the projection"""
    leaves = [leaf(*shape, device=device, dtype=dtype) for shape in PROJECTION]
    check(function, leaves, {}, {"copy": folds} if folds else {})


@pytest.mark.slow
def test_no_copy_of_a_gate_in_inductor(device):
    """one graph for every number of samples, and no kernel copies"""
    from torch._inductor.utils import run_and_get_code

    function = of_projection()
    with torch.no_grad():
        leaves = [leaf(*shape, device=device) for shape in PROJECTION]
        compiled = torch.compile(function, fullgraph=True)
        for samples in (3, 4):
            leaves[0] = leaf(samples, 5, 2 * HEAD, device=device)
            torch._dynamo.mark_dynamic(leaves[0], 0)
            wide = function(*(t.double() for t in leaves))
            if samples == 3:
                found, (code,) = run_and_get_code(compiled, *leaves)
            else:
                found = compiled(*leaves)
            assert_no_worse(found, function(*leaves), wide, f"{samples} samples")
    assert "norm_forward" in code and "clone" not in code
    assert inductor.counters == {"copy": 1}


def of_large_mean(x, weight, bias):  # of exact numbers, whose sum is rounded
    return fused_layer_norm(x.round() + 2**20, weight, bias)


def few(norm=norm, dtype=bf16, shape=(4, SIZE)):
    """A residual block, and its arguments."""

    def function(x, r, m, weight, bias):
        return norm(x @ m + r, weight, bias) @ m

    n = shape[-1]
    return function, [(shape, dtype), (shape, dtype), ((n, n), dtype), ((n,), dtype), ((n,), dtype)]


@pytest.mark.parametrize(
    "case,is_left",
    [
        (few(), True),
        (few(dtype=fp32), True),
        (few(norm=of_large_mean, dtype=fp32, shape=(4, 1000)), True),
        (few(norm=lambda x, weight, bias: fused_layer_norm(x, weight, bias, 0.1, weight_offset=1.0)), True),
        (few(norm=lambda x, weight, bias: fused_layer_norm(x, weight, bias, out_dtype=fp32).to(x.dtype)), True),
        (few(shape=(2, 3, 1024)), True),
        (few(shape=(2, 1040)), False),  # Inductor reads such rows twice
        (few(shape=(8192, 256)), False),  # 4 MiB
        (few(norm=lambda x, weight, bias: fused_rms_norm(x, weight)), False),
        (few(norm=lambda x, weight, bias: fused_layer_norm(x, normalized_shape=x.shape[-1])), False),  # DiT
        (few(norm=lambda x, weight, bias: fused_add_layer_norm(x, x * 2, weight, bias)[0]), False),
    ],
)
def test_few_rows_under_cuda_graphs(device, monkeypatch, case, is_left):
    """without gradients the formula takes the place of the operator; with gradients nothing changes"""
    function, given = case
    leaves = [leaf(*shape, device=device, dtype=dtype) for shape, dtype in given]
    compiled = torch.compile(function, backend=fold_backend, fullgraph=True)
    monkeypatch.setattr(inductor, "_has_cuda_graph", lambda node: True)
    with torch.no_grad():
        y, eager = compiled(*leaves), function(*leaves)
        assert inductor.counters["few_rows"] == is_left
        assert_no_worse(y, eager, function(*(t.to(fp64) for t in leaves)), "y")
    inductor.counters.clear()
    results_of(compiled, leaves)
    assert inductor.counters["few_rows"] == 0


def test_few_rows_of_symbolic_sizes(device, monkeypatch):
    """the number of rows is not known: the operator stays"""
    function, given = few()
    leaves = [leaf(*shape, device=device, dtype=dtype) for shape, dtype in given]
    monkeypatch.setattr(inductor, "_has_cuda_graph", lambda node: True)
    with torch.no_grad():
        y = torch.compile(function, backend=fold_backend, fullgraph=True, dynamic=True)(*leaves)
        assert inductor.counters == {"residual": 1}
        assert_no_worse(y, function(*leaves), function(*(t.to(fp64) for t in leaves)), "y")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: CUDA graphs")
def test_few_rows_in_modes():
    """in CUDA graphs the generated code does not call the operator; in the default mode it does"""
    from torch._inductor.utils import run_and_get_code

    function, given = few(shape=(8, 64))
    with torch.no_grad():
        leaves = [leaf(*shape, device="cuda", dtype=dtype) for shape, dtype in given]
        wide = function(*(t.to(fp64) for t in leaves))
        for mode, is_left in ((None, False), ("reduce-overhead", True)):
            torch.compiler.reset()
            y, (code,) = run_and_get_code(torch.compile(function, fullgraph=True, mode=mode), *leaves)
            assert ("norm_forward" not in code) == is_left
            assert_no_worse(y, function(*leaves), wide, str(mode))


def gated_cast(x, r, m, weight, bias):
    return plain(x + (conditions(r, m)[0] * (r @ m)).to(x.dtype)).to(m.dtype) @ m


def gated_cast_residual(x, r, m, weight, bias):
    """The gradient of the residual is rounded, too."""
    stream = r.to(x.dtype) + 0
    with torch.no_grad():
        y = plain(stream).to(m.dtype)
    z = stream + conditions(r, m)[0] * (y @ m)
    return plain(z).to(m.dtype) @ m, x + 1, z


def gated_cast_residual_alone(x, r, m, weight, bias):
    return gated_cast_residual(x, r, m, weight, bias)[:2]


GATED_STREAMS = [
    (dit, dict(GATED)[dit] | {"cast": 3}),
    (gated_alone, {"gate": 1, "grad_gate": 1, "cast": 1}),
    (gated_in_adaptive_norm, {"gate": 1, "grad_gate": 1}),
    (gated_cast, {"gate": 1, "grad_gate": 1, "cast": 1}),
    (gated_cast_residual, {"gate": 1, "grad_gate": 1, "cast": 2, "grad_residual": 1}),
    (gated_cast_residual_alone, {"gate": 1, "grad_gate": 1, "cast": 2}),
]


@pytest.mark.parametrize("function, folds", GATED_STREAMS)
def test_gate_of_float32_stream(device, function, folds):
    """the product is of 16 bits"""
    leaves = [leaf(*s, device=device, dtype=bf16 if i else fp32) for i, s in enumerate(sizes())]
    check(function, leaves, folds, without_gradients(folds))


def test_gate_under_autocast(device):
    """the stream is float32, gates and products of matrices are bf16"""

    def under_autocast(*leaves):
        with torch.autocast(torch.device(device).type, bf16):
            return dit(*leaves)

    leaves = [leaf(*s, device=device) for s in sizes()]
    truth = results_of(dit, [t.detach().double().requires_grad_() for t in leaves])
    eager = results_of(under_autocast, leaves)
    found = results_of(torch.compile(under_autocast, backend=fold_backend, fullgraph=True), leaves)
    assert inductor.counters == Counter(dict(GATED_STREAMS)[dit])
    for i, triple in enumerate(zip(found, eager, truth, strict=True)):
        if triple[1] is not None:
            assert_no_worse(*triple, f"result {i}")


def of_activation(activation, norm=norm):
    def function(x, r, m, weight, bias):
        return activation(norm(x @ m, weight, bias)) @ m

    return function


ACTIVATIONS = [name for name in fused_layernorm.reference.ACTIVATION_NAMES if name not in ("", "sigmoid")]


@pytest.mark.parametrize("dtype", [fp32, bf16, torch.float16])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation(device, name, dtype):
    """the activation of that name is folded: eager mode with activation=name has the same bits"""
    activation = fused_layernorm.reference.ACTIVATIONS[fused_layernorm.reference.ACTIVATION_NAMES.index(name)][1]
    leaves = [leaf(*s, device=device, dtype=dtype) for s in sizes()]
    function = of_activation(activation)
    check(function, leaves, {"activation": 1}, {"activation": 1})
    in_operator = of_activation(lambda y: y, lambda *given: fused_layer_norm(*given, activation=name))
    compiled = torch.compile(function, backend=fold_backend, fullgraph=True)
    assert torch.equal(compiled(*leaves), in_operator(*leaves))


def test_activation_of_other_norms(device):
    """RMSNorm, weight_offset, no weight; the caller reads the result"""
    leaves = [leaf(*s, device=device) for s in sizes()]

    def function(x, r, m, weight, bias):
        one = torch.nn.functional.silu(fused_rms_norm(x, weight, weight_offset=1.0))
        return one, torch.nn.functional.gelu(plain(r)) @ m, m + bias

    check(function, leaves, {"activation": 2}, {"activation": 2})


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("stage", ["modulation", "activation"])
def test_checkpointed_stage(device, stage, inside):
    """in the region of the norm it is folded, behind the region it is not"""
    scale, shift = leaf(2, 1, SIZE, device=device), leaf(2, 1, SIZE, device=device)

    def last(y, scale, shift):
        return y * (1 + scale) + shift if stage == "modulation" else torch.nn.functional.silu(y)

    def function(x, m, scale, shift):
        def region(x, m, scale, shift):
            y = plain(x @ m)
            return last(y, scale, shift) @ m if inside else y

        y = checkpoint(region, x, m, scale, shift, use_reentrant=False)
        return (y if inside else last(y, scale, shift) @ m) + 0 * (scale + shift)

    leaves = [leaf(2, 5, SIZE, device=device), leaf(SIZE, SIZE, device=device), scale, shift]
    folded = {stage: 1} if inside else {}
    regions_last = torch.__version__ < (2, 13)  # torch 2.11 has regions in inference, too
    check(function, leaves, folded, folded if regions_last else {stage: 1})


def activated_plain(x, r, m, weight, bias):
    return torch.nn.functional.gelu(plain(x @ m)) @ m


SYMBOLIC = [
    *((f, {"residual": n, "grad_residual": k}) for f, n, k in FOLDED if f in (used_elsewhere, chain, flattened)),
    (modulated, {"residual": 1}),
    (adaptive, {"modulation": 1}),
    (dit, dict(GATED)[dit]),
    (activated_plain, {"activation": 1}),
]


@pytest.mark.parametrize("function, folds", SYMBOLIC)
def test_symbolic_sizes(device, function, folds):
    """dynamic=True: the folds of fixed sizes, in one graph for every batch"""
    compilations = []

    def backend(model, inputs, **options):
        compilations.append(model)
        return fold_backend(model, inputs, **options)

    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=True)
    counts = []
    for rows in (5, 7):
        leaves = [
            leaf(2, rows, SIZE, device=device),
            leaf(2, rows, SIZE, device=device),
            *(leaf(*s, device=device) for s in sizes()[2:]),
        ]
        wide = [t.detach().to(fp64).requires_grad_() for t in leaves]
        for triple in zip(
            results_of(compiled, leaves), results_of(function, leaves), results_of(function, wide), strict=True
        ):
            if triple[1] is not None:
                assert_no_worse(*triple, "dynamic")
        counts.append(len(compilations))
    assert inductor.counters == Counter(folds)
    assert counts[0] == counts[1]


# ---- what is not -----------------------------------------------------------------------------------------------------


def broadcast(x, r, m, weight, bias):
    return norm(x @ m + r[:1, :1], weight, bias)


def alpha(x, r, m, weight, bias):
    return norm(torch.add(x @ m, r, alpha=2), weight, bias)


def number(x, r, m, weight, bias):
    return norm(x @ m + 1.0, weight, bias)


def permuted(x, r, m, weight, bias):  # the sum has the strides of its terms, z of the operator would be contiguous
    z = (x @ m).transpose(0, 1) + r.transpose(0, 1)
    return norm(z, weight, bias), z.transpose(0, 1).reshape(-1)


def twice(x, r, m, weight, bias):
    z = x @ m
    return norm(z + z, weight, bias)


def pointwise(x, r, m, weight, bias):  # Inductor adds where it computes sin
    return norm(r + (x @ m).sin(), weight, bias)


def weight_of_z(x, r, m, weight, bias):
    z = r + x @ m
    return fused_layer_norm(z, z.mean((0, 1)) + weight, bias)


def dropped(x, r, m, weight, bias):
    return fused_layer_norm(r + x @ m, weight, bias, dropout_p=0.0, training=True), r


def row_of_z(x, r, m, weight, bias):  # as weight; and the other gradient of z is made of that of the weight
    z = r + x @ m
    return fused_adaptive_layer_norm(z, z[:, :1], None)


def row_of_x(x, r, m, weight, bias):
    return fused_adaptive_layer_norm(x, x[:, :1], None) @ m + r


def gated(x, r, m, weight, bias):
    z = r + x @ m
    return z + fused_gated_rms_norm(z, x @ m, weight, bias, norm_before_gate=False) + fused_gated_rms_norm(z, r @ m) @ m


def view_of_heads(x, r, m, weight, bias):
    z = r + x @ m
    heads = (t[:5, None].expand(5, SIZE) for t in (weight, bias))
    return fused_layer_norm(z.view(1, 2, 5, SIZE), *heads, normalized_shape=SIZE)


def has_residual(x, r, m, weight, bias):
    return fused_add_layer_norm(x @ m + r, r, weight, bias)[0]


def other_columns(x, r, m, weight, bias):  # the view changes the rows
    return fused_layer_norm((r + x @ m).view(2, 5, 4, 4), weight[:4].clone(), bias[4:8].clone())


def whole_of_parts(x, r, m, weight, bias):  # a view of the sum whose rows have parameters of their own
    scale = (weight + x[:, 0]).unsqueeze(1)
    return fused_adaptive_layer_norm((r + x @ m).view(2, 5, 1, SIZE), scale[:, None], scale[:, None])


def norm_with_other_readers(x, r, m, weight, bias):
    y = norm(x @ m, weight, bias)
    return r + y, y @ m


def added_pointwise(x, r, m, weight, bias):  # Inductor adds where it computes sin
    return r.sin() + norm(x @ m, weight, bias)


def added_after_activation(x, r, m, weight, bias):
    return r + fused_layer_norm(x @ m, weight, bias, activation="silu")


def added_to_ragged_rows(x, r, m, weight, bias):  # on CUDA the sum would be a kernel of its own
    return r[..., :15] + fused_layer_norm(x[..., :15].sin() @ m[:15, :15], weight[:15], bias[:15])


def modulated_and_read(x, r, m, weight, bias):
    scale, shift = conditions(r, m)
    y = plain(x)
    return (y * (1 + scale) + shift) @ m, y


def modulated_by_token(x, r, m, weight, bias):
    return (plain(x) * (1 + r) + r @ m) @ m


def modulated_with_weight(x, r, m, weight, bias):
    scale, shift = conditions(r, m)
    return (norm(x, weight, bias) * (1 + scale) + shift) @ m


def modulated_pointwise(x, r, m, weight, bias):  # Inductor multiplies where it computes sin
    scale, shift = conditions(r, m)
    return (plain(x) * (1 + scale) + shift).sin() @ m


def modulated_ragged_rows(x, r, m, weight, bias):
    scale, shift = conditions(r, m)
    y = fused_layer_norm(x[..., :15].sin(), normalized_shape=15)
    return (y * (1 + scale[..., :15]) + shift[..., :15]) @ m[:15]


def modulated_by_sum(x, r, m, weight, bias):  # scale is computed from the norm's other result
    z = x + x @ m
    return (plain(z) * (1 + z[:, :1] @ m)) @ m


def activated_and_read(x, r, m, weight, bias):
    y = norm(x, weight, bias)
    return torch.relu(y) @ m, y @ m


def activated_twice(x, r, m, weight, bias):
    y = norm(x, weight, bias)
    return torch.nn.functional.silu(y) @ m, torch.nn.functional.gelu(y) @ m


def activated_pointwise(x, r, m, weight, bias):  # Inductor computes gelu in the kernel of the product
    return (torch.nn.functional.gelu(norm(x, weight, bias)) * r) @ m


def activated_otherwise(x, r, m, weight, bias):
    y, y2 = norm(x, weight, bias), fused_rms_norm(r, weight)
    return (y * torch.sigmoid(1.702 * y)) @ m, torch.nn.functional.leaky_relu(y2) @ m


def activated_in_another_dtype(x, r, m, weight, bias):
    return torch.nn.functional.silu(norm(x, weight, bias).to(fp64)) @ m.to(fp64)


def activated_segments(x, r, m, weight, bias):
    return torch.relu(fused_adaptive_layer_norm(x, *conditions(r, m))) @ m


def activated_ragged_rows(x, r, m, weight, bias):
    return torch.relu(fused_layer_norm(x[..., :15].sin(), weight[:15], bias[:15])) @ m[:15]


def gated_by_token(x, r, m, weight, bias):
    return plain(x + r * (x @ m)) @ m


def gated_with_weight(x, r, m, weight, bias):  # of another shape than the gate
    return norm(gated_sum(x, r, m), weight, bias) @ m


def gated_and_read(x, r, m, weight, bias):
    product = conditions(r, m)[0] * (r @ m)
    return plain(x + product) @ m, product.sin()


def gated_pointwise(x, r, m, weight, bias):  # Inductor multiplies where it computes sin
    return plain(x + conditions(r, m)[0] * (r @ m).sin()) @ m


def gated_pointwise_residual(x, r, m, weight, bias):
    return plain(x.sin() + conditions(r, m)[0] * (r @ m)) @ m


def gated_by_number(x, r, m, weight, bias):
    return plain(x + 0.5 * (r @ m)) @ m


def gated_square(x, r, m, weight, bias):
    y = r @ m
    return plain(x + y * y) @ m


def gated_of_ragged_rows(x, r, m, weight, bias):  # on CUDA the load stage would be a kernel of its own
    z = gated_sum(x, r, m)[..., :15].contiguous() + conditions(r, m)[0][..., :15] * (x[..., :15] @ m[:15, :15])
    return fused_layer_norm(z, normalized_shape=15) @ m[:15]


def gated_to_wider_result(x, r, m, weight, bias):
    return fused_layer_norm(gated_sum(x, r, m), normalized_shape=SIZE, out_dtype=fp64).sin()


def gated_and_activated(x, r, m, weight, bias):
    return fused_layer_norm(gated_sum(x, r, m), normalized_shape=SIZE, activation="relu") @ m


LEFT = [
    gated_by_token,
    gated_with_weight,
    gated_and_read,
    gated_pointwise,
    gated_pointwise_residual,
    gated_by_number,
    gated_square,
    gated_of_ragged_rows,
    gated_to_wider_result,
    gated_and_activated,
    modulated_and_read,
    modulated_by_token,
    modulated_with_weight,
    modulated_pointwise,
    modulated_ragged_rows,
    activated_and_read,
    activated_twice,
    activated_pointwise,
    activated_otherwise,
    activated_in_another_dtype,
    activated_segments,
    activated_ragged_rows,
    norm_with_other_readers,
    added_pointwise,
    added_after_activation,
    added_to_ragged_rows,
    broadcast,
    alpha,
    number,
    permuted,
    twice,
    pointwise,
    weight_of_z,
    row_of_z,
    row_of_x,
    gated,
    view_of_heads,
    has_residual,
    other_columns,
    whole_of_parts,
]


@pytest.mark.parametrize("function", LEFT, ids=[f.__name__ for f in LEFT])
def test_left_alone(device, function):
    leaves = [leaf(*s, device=device) for s in sizes()]
    check(function, leaves, {}, {})


def test_left_in_training(device):
    """y has a reader in backward, but there is no norm_backward"""

    def first_norm(x, r, m, weight, bias):
        scale, shift = conditions(r, m)
        return (plain(x.detach()) * (1 + scale) + shift) @ m

    check(first_norm, [leaf(*s, device=device) for s in sizes()], {}, {"modulation": 1})


@pytest.mark.parametrize("x_dtype, dtype", [(fp32, fp32), (bf16, bf16), (fp32, bf16)])
def test_gate_of_another_dtype(device, x_dtype, dtype):
    """the operator takes a gate of x's dtype only, no float64, and y of x's dtype in one kernel"""

    def other_gate(x, r, m, weight, bias):
        return plain(x + conditions(r, m)[0].to(fp32 if dtype == bf16 else bf16) * (r @ m)).to(m.dtype) @ m

    leaves = [leaf(*s, device=device, dtype=dtype if i else x_dtype) for i, s in enumerate(sizes())]
    casts = {} if dtype == fp32 else {"cast": 1}
    check(other_gate, leaves, casts, casts)


def test_gate_of_float64(device):
    check(gated_alone, [leaf(*s, device=device, dtype=fp64) for s in sizes()], {}, {})


def test_gate_beside_a_wider_y(device):
    """a float32 stream, and y is read in float32"""

    def wider(x, r, m, weight, bias):
        return plain(gated_sum(x, r, m)).sin()

    check(wider, [leaf(*s, device=device, dtype=bf16 if i else fp32) for i, s in enumerate(sizes())], {}, {})


@pytest.mark.parametrize("function, folds, without", [
    # the gradients of the product are not where they are expected, but forward is folded
    ("flattened", {"gate": 1, "grad_residual": 1}, {"gate": 1}),
    ("one row", {"gate": 1}, {"gate": 1}),
    # the modulation or the activation has the norm, because its parameters are of another shape
    ("other scale", {"modulation": 1}, {"modulation": 1}),
    ("activation", {"activation": 1}, {"activation": 1}),
    ("product that is read", {"residual": 1}, {"residual": 1}),
])  # fmt: skip
def test_gate_in_part(device, function, folds, without):
    def call(x, r, m, weight, bias):
        if function == "flattened":
            z = gated_sum(x, r, m)
            return (plain(z.view(-1, SIZE)) @ m).view(z.shape) + z
        if function == "one row":
            return plain(gated_sum(x[:, :1], r[:, :1], m)) @ m
        if function == "other scale":
            return (plain(gated_sum(x, r, m)) * (1 + weight[None, None]) + bias[None, None]) @ m
        if function == "activation":
            return torch.relu(plain(gated_sum(x, r, m))) @ m
        product = conditions(r, m)[0] * (r @ m)
        return plain(x + product) @ m, product

    check(call, [leaf(*s, device=device) for s in sizes()], folds, without)


@pytest.mark.parametrize("inside", [True, False])
def test_checkpointed_gate(device, inside):
    """in the region of the norm it is folded; a product of another region is not"""

    def function(x, r, m, weight, bias):
        def region(x, r, m):
            if not inside:
                return conditions(r, m)[0] * (r @ m)
            z = gated_sum(x, r, m)
            return plain(z) @ m + z

        found = checkpoint(region, x, r, m, use_reentrant=False)
        return found if inside else plain(x + found) @ m

    folds = {"gate": 1, "grad_gate": 1, "grad_residual": 1} if inside else {}
    regions_last = torch.__version__ < (2, 13)  # torch 2.11 has regions in inference, too
    without = without_gradients(folds) if inside or regions_last else {"gate": 1}
    check(function, [leaf(*s, device=device) for s in sizes()], folds, without)


def test_modulated_by_sum(device):
    """scale is computed from the sum that the norm with a residual returns: the norm stays before it"""
    folded = {"residual": 1, "grad_residual": 1}
    check(modulated_by_sum, [leaf(*s, device=device) for s in sizes()], folded, {"residual": 1})


def test_dropout_of_y_is_left(device):
    """its backward has other numbers a call, so that only the count is compared"""
    x, r, m, weight, bias = [leaf(*s, device=device) for s in sizes()]
    call = torch.compile(
        lambda: fused_layer_norm(r + x @ m, weight, bias, dropout_p=0.5), backend=fold_backend, fullgraph=True
    )
    zeros = (call() == 0).float().mean().item()
    assert 0.2 < zeros < 0.8 and inductor.counters == Counter()  # 160 elements: 7 sigma


def test_aliased_inputs(device):
    """one tensor as several inputs, and two views of one"""
    m, weight, bias = [leaf(*s, device=device) for s in sizes()[2:]]
    base = leaf(2, 2, 5, SIZE, device=device)

    def same(x, m, weight, bias):
        return one_sum(x, x, m, weight, bias) + norm(x, weight, weight)

    def parts(base, m, weight, bias):
        return one_sum(base[0], base[1], m, weight, bias)

    folded = {"residual": 1, "added": 1}  # the sum of the two norms goes into one of them
    check(same, [leaf(2, 5, SIZE, device=device), m, weight, bias], folded, folded)
    inductor.counters.clear()
    check(parts, [base, m, weight, bias], {"residual": 1}, {"residual": 1})


@pytest.mark.parametrize("when", ["before", "after"])
def test_input_that_is_written(device, when):
    """the norm reads the residual as it was, though the graph writes to it"""
    x, r, m, weight, bias = [leaf(*s, device=device).detach() for s in sizes()]

    def function(x, r, m, weight, bias):
        z = r + x @ m
        if when == "before":
            r.mul_(2)
        y = norm(z, (weight @ m).sin(), bias)
        r.add_(1)
        return y

    states = [r.clone(), r.clone()]
    found = torch.compile(function, backend=fold_backend, fullgraph=True)(x, states[0], m, weight, bias)
    torch.testing.assert_close(found, function(x, states[1], m, weight, bias))
    assert torch.equal(*states) and inductor.counters == Counter(residual=1)


def graph_of(fold, *, writes):
    """A graph as the pass gets it: for "residual" a sum, perhaps a write to one of its terms, a weight, the norm; for
    "gate" the sum of a product, perhaps a write to its factor, the norm; for the others a norm, perhaps a write to its
    input, and what is folded into it."""
    from torch._subclasses import FakeTensorMode

    mode, graph = FakeTensorMode(), torch.fx.Graph()
    shapes = {"a": (2, 3, 8), "b": (2, 3, 8), "c": (2, 3, 8), "w": (8,), "scale": (2, 1, 8)}
    nodes = {name: graph.placeholder(name) for name in shapes}
    with mode:
        for name, node in nodes.items():
            node.meta["val"] = torch.empty(shapes[name])

    def call(target, *arguments):
        return inductor._call(graph, nodes["a"], target, arguments)

    def norm_of(z, weight):
        options = fused_layernorm.reference.Options(1, 1e-5)
        found = call(fused_layernorm._ops.norm_forward, z, None, None, weight, None, None, *options)
        return call(operator.getitem, found, 0)

    if fold in ("residual", "gate"):
        add, mul = torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor
        y = call(add, call(mul, nodes["scale"], nodes["a"]) if fold == "gate" else nodes["a"], nodes["b"])
    else:
        y = norm_of(nodes["a"], None)
    if writes:
        graph.call_function(torch.ops.aten.copy_.default, (nodes["b" if fold == "residual" else "a"], nodes["c"]))
    if fold == "residual":
        graph.output((norm_of(y, call(torch.ops.aten.sin.default, nodes["w"])), y))
    elif fold == "gate":
        graph.output((norm_of(y, None), y))
    elif fold == "modulation":
        graph.output(call(torch.ops.aten.mul.Tensor, y, call(torch.ops.aten.sin.default, nodes["scale"])))
    else:
        graph.output(call(torch.ops.aten.relu.default, y))
    return graph


@pytest.mark.parametrize("fold", ["residual", "gate", "modulation", "activation"])
def test_nothing_moves_across_a_write(fold):
    for writes in (False, True):
        inductor.counters.clear()
        graph = graph_of(fold, writes=writes)
        values = [torch.randn(node.meta["val"].shape) for node in graph.nodes if node.op == "placeholder"]
        expected = torch.fx.Interpreter(torch.fx.GraphModule({}, graph)).run(*[v.clone() for v in values])
        inductor.fold(graph)
        graph.lint()
        assert inductor.counters == Counter({} if writes else {fold: 1})
        found = torch.fx.Interpreter(torch.fx.GraphModule({}, graph)).run(*[v.clone() for v in values])
        torch.testing.assert_close(found, expected, rtol=0, atol=0 if fold == "residual" else 1e-6)


# ---- float32 streams -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("narrow", [bf16, torch.float16])
def test_float32_stream(device, narrow):
    """16-bit products added to a float32 stream, float32 weights: no cast is left around the norms"""

    def block(stream, m, weight, bias):
        for _ in range(2):
            stream = stream + (norm(stream, weight, bias).to(narrow) @ m).float()
        return norm(stream, weight, bias).to(narrow) @ m, stream

    leaves = [
        leaf(2, 5, SIZE, device=device),
        leaf(SIZE, SIZE, dtype=narrow, device=device),
        leaf(SIZE, device=device),
        leaf(SIZE, device=device),
    ]
    found = []

    def backend(model, inputs, **options):
        return fold_backend(model, inputs, **options)

    eager = results_of(block, leaves)
    truth = results_of(
        lambda s, m, w, b: block_in(fp64, s, m, w, b), [t.detach().double().requires_grad_() for t in leaves]
    )
    found = results_of(torch.compile(block, backend=backend, fullgraph=True), leaves)
    assert inductor.counters == Counter(residual=2, grad_residual=3, cast=3)
    for i, triple in enumerate(zip(found, eager, truth, strict=True)):
        assert_no_worse(*triple, f"result {i}")
    assert torch.equal(found[1], eager[1])  # the stream, to the bit


def block_in(dtype, stream, m, weight, bias):
    for _ in range(2):
        stream = stream + (norm(stream, weight, bias).to(dtype) @ m).to(stream.dtype)
    return norm(stream, weight, bias).to(dtype) @ m, stream


def test_autocast(device):
    """the stream is float32, linear layers are bf16"""
    model = Model().to(device)
    replace_norms(model)
    x = leaf(2, 5, SIZE, device=device)
    parameters = [p.detach().requires_grad_() for p in model.parameters()]

    def under_autocast(*leaves):
        with torch.autocast(torch.device(device).type, bf16):
            return of_model(model)(*leaves)

    truth = results_of(of_model(model), [t.detach().double().requires_grad_() for t in (x, *parameters)])
    eager = results_of(under_autocast, [x, *parameters])
    found = results_of(torch.compile(under_autocast, backend=fold_backend, fullgraph=True), [x, *parameters])
    assert inductor.counters == Counter(residual=4, grad_residual=4, cast=4)
    for i, triple in enumerate(zip(found, eager, truth, strict=True)):
        assert_no_worse(*triple, f"result {i}")


def test_cast_that_stays(device):
    """y is read in float32, too, or in two dtypes: it stays float32"""

    def both(x, r, m, weight, bias):
        y = norm(r + x @ m, weight, bias)
        return y.to(bf16), y.sin()

    def two(x, r, m, weight, bias):
        y = norm(r + x @ m, weight, bias)
        return y.to(bf16), y.to(torch.float16)

    for function in (both, two):
        inductor.counters.clear()
        leaves = [leaf(*s, device=device) for s in sizes()]
        with torch.no_grad():
            found = torch.compile(function, backend=fold_backend, fullgraph=True)(*leaves)
            for actual, expected in zip(found, function(*leaves), strict=True):
                assert actual.dtype == expected.dtype
                torch.testing.assert_close(actual, expected)
        assert inductor.counters == Counter(residual=1)


# ---- around the graph ------------------------------------------------------------------------------------------------


def test_graph_breaks(device):
    """each graph by itself (a block is one, compiled once): its first sum is in the graph before"""
    model = Model(broken=True).to(device)
    replace_norms(model)
    x = leaf(2, 5, SIZE, device=device)
    y = torch.compile(model, backend=fold_backend)(x)
    torch.testing.assert_close(y, model(x))
    assert inductor.counters == Counter(residual=1, grad_residual=2)


def test_activation_in_inference_mode(device):
    """the patterns of activations have gradients, though the graph that is compiled first has none"""
    leaves = [leaf(*s, device=device).detach() for s in sizes()]
    inductor._activation_pattern.cache_clear()
    with torch.inference_mode(), torch.autocast(torch.device(device).type, bf16):
        y = torch.compile(activated_plain, backend=fold_backend, fullgraph=True)(*leaves)
        torch.testing.assert_close(y, activated_plain(*leaves), rtol=0.05, atol=0.05)
    assert inductor.counters == Counter(activation=1)
    inductor.counters.clear()
    check(activated_plain, [t.requires_grad_() for t in leaves], {"activation": 1}, {"activation": 1})


def test_inference_mode(device):
    model = Model().to(device).eval()
    replace_norms(model)
    x = torch.randn(2, 5, SIZE, device=device)
    with torch.inference_mode():
        y = torch.compile(model, backend=fold_backend, fullgraph=True)(x)
        torch.testing.assert_close(y, model(x))
    assert inductor.counters == Counter(residual=4)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_data_parallel(kind, tmp_path):
    """compiled, on one process: the gradients of the model by itself, and folds"""
    import torch.distributed as dist

    single = Model()
    replace_norms(single)
    x = torch.randn(2, 5, SIZE)
    single(x).square().sum().backward()
    dist.init_process_group("gloo", f"file://{tmp_path / 'meeting_point'}", rank=0, world_size=1)
    try:
        model = Model()
        replace_norms(model)
        model.load_state_dict(single.state_dict())
        if kind == "ddp":
            model = torch.nn.parallel.DistributedDataParallel(model)
            compiled = torch.compile(model, backend=fold_backend)
        else:
            mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))  # the default: GPUs, where there are any
            for block in model.blocks:
                torch.distributed.fsdp.fully_shard(block, mesh=mesh)
                block.compile(backend=fold_backend)
            compiled = torch.distributed.fsdp.fully_shard(model, mesh=mesh)
        compiled(x).square().sum().backward()
        for one, two in zip(model.parameters(), single.parameters(), strict=True):
            grad = one.grad.full_tensor() if hasattr(one.grad, "full_tensor") else one.grad
            torch.testing.assert_close(grad, two.grad)
    finally:
        dist.destroy_process_group()
    assert inductor.counters["residual"] >= 2 and inductor.counters["grad_residual"] >= 2


# ---- Inductor's own code ---------------------------------------------------------------------------------------------


needs_direct_calls = pytest.mark.skipif(
    fused_layernorm._ops.calls is None, reason="the wheel's library has direct calls from torch 2.14 on"
)


def code_of(function, *arguments):
    from torch._inductor.utils import run_and_get_code

    result, code = run_and_get_code(function, *arguments)
    return result, "\n".join(code)


def stream_of(x, m, weight, bias):
    """Nothing but products, norms and their sums: Inductor has no kernel to compile."""
    z = x + fused_rms_norm(x, weight) @ m
    return fused_layer_norm(z, weight, bias) @ m


@pytest.mark.slow
@needs_direct_calls
def test_inductor(device):
    """direct calls, told which results are read; no operator is left; the results of eager mode"""
    leaves = [leaf(2, 5, SIZE, device=device), *(leaf(*s, device=device) for s in sizes()[2:])]
    compiled = torch.compile(stream_of, fullgraph=True)
    direction = torch.randn(2, 5, SIZE, device=device)

    def step():
        return torch.autograd.grad(compiled(*leaves), leaves, direction)

    found, code = code_of(step)
    assert inductor.counters == Counter(residual=1, grad_residual=1)
    assert code.count(".call_norm_forward(") == 2 and code.count(".call_norm_backward(") == 2
    assert "torch.ops.fused_layernorm" not in code
    for one, two in zip(found, torch.autograd.grad(stream_of(*leaves), leaves, direction), strict=True):
        torch.testing.assert_close(one, two)
    with torch.no_grad():
        y, code = code_of(compiled, *leaves)
        torch.testing.assert_close(y, stream_of(*leaves))
    reads = [line.rsplit(", ", 1)[1].strip(" )") for line in code.splitlines() if ".call_norm_forward(" in line]
    assert reads == ["1", "1"]  # y alone: no statistics


@pytest.mark.slow
def test_inductor_turned_off(device):
    """the operators, through the dispatcher"""
    torch.compile(fused_layer_norm)(*(torch.ones(s, device=device) for s in ((2, SIZE), SIZE)))  # installs the hooks
    inductor.disable()
    leaves = [torch.randn(2, 5, SIZE, device=device), *(leaf(*s, device=device).detach() for s in sizes()[2:])]
    y, code = code_of(torch.compile(stream_of, fullgraph=True), *leaves)
    assert code.count("= torch.ops.fused_layernorm.norm_forward") == 2 and "call_norm" not in code
    assert inductor.counters == Counter()
    torch.testing.assert_close(y, stream_of(*leaves))


@pytest.mark.slow
def test_cpp_wrapper_keeps_the_operator():
    import torch._inductor.config as config

    leaves = [torch.randn(2, 5, SIZE), *(leaf(*s).detach() for s in sizes()[2:])]
    with config.patch(cpp_wrapper=True):
        try:
            y, code = code_of(torch.compile(stream_of, fullgraph=True), *leaves)
        except Exception as error:
            if "compiler" in str(error).lower():
                pytest.skip(f"no C++ compiler: {error}")
            raise
    assert "norm_forward" in code and "call_norm" not in code
    assert inductor.counters == Counter(residual=1)
    torch.testing.assert_close(y, stream_of(*leaves))


class Stream(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.linear, self.last = FusedRMSNorm(SIZE), torch.nn.Linear(SIZE, SIZE), FusedLayerNorm(SIZE)

    def forward(self, x):
        y, z = fused_add_layer_norm(self.linear(self.first(x)), x, self.last.weight, self.last.bias)
        return self.last(z + self.linear(y))


def test_export_is_untouched():
    program = torch.export.export(Stream(), (torch.randn(3, SIZE),))
    targets = [str(node.target) for node in program.run_decompositions({}).graph.nodes]
    assert targets.count("fused_layernorm.norm_forward.default") == 3
    assert any(target.startswith("aten.add") for target in targets) and inductor.counters == Counter()


@pytest.mark.slow
def test_aot_inductor(device, tmp_path):
    """compiled ahead of time, packaged; loaded in another process, run with another size. float32 y and z, whose dtypes
    are given as None (torch 2.11 hands others over)"""
    model = Stream().to(device)
    rows = torch.export.Dim("rows", min=1, max=1000)
    program = torch.export.export(model, (torch.randn(3, SIZE, device=device),), dynamic_shapes=({0: rows},))
    x = torch.randn(7, SIZE, device=device)
    y = run_package(program, x, tmp_path)
    assert inductor.counters["residual"] == 1
    torch.testing.assert_close(y, model(x))


# ---- hooks -----------------------------------------------------------------------------------------------------------


def user_pass(seen, uuid="theirs"):
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Users(CustomGraphPass):
        def __call__(self, graph):
            seen.append(sum("norm" in str(node.target) for node in graph.nodes))

        def uuid(self):
            return uuid

    return Users()


def run_once():
    leaves = [torch.randn(2, 5, SIZE), *(leaf(*s).detach() for s in sizes()[2:])]
    torch.compiler.reset()
    return torch.compile(stream_of, backend=fold_backend, fullgraph=True)(*leaves)


@pytest.mark.parametrize("form", ["pass", "callable", "list"])
def test_beside_a_pass_of_the_user(form, monkeypatch):
    """one that is there before, one that is set later, and it is there again when ours is turned off"""
    import torch._inductor.config as config

    if form == "list" and not hasattr(torch._inductor.custom_graph_pass, "get_custom_graph_passes"):
        pytest.skip("this torch takes one pass")
    for _ in range(2):  # the second time, it takes the place of our chain
        seen: list[int] = []
        theirs = user_pass(seen)
        theirs = {"pass": theirs, "callable": theirs.__call__, "list": [theirs]}[form]
        config.joint_custom_pre_pass = theirs
        inductor.counters.clear()
        run_once()
        assert len(seen) == 1 and inductor.counters == Counter(residual=1)
        assert (config.joint_custom_pre_pass.uuid() is None) == (form == "callable")
    inductor.disable()
    assert config.joint_custom_pre_pass is theirs
    run_once()
    assert len(seen) == 2 and inductor.counters == Counter(residual=1)  # none more
    inductor.enable()
    run_once()
    assert len(seen) == 3 and inductor.counters == Counter(residual=2)


def test_uuid(monkeypatch):
    """part of the cache's key: another pass of the user, or ours off, is another key"""
    import torch._inductor.config as config

    config.joint_custom_pre_pass = None
    inductor.install()
    ours = config.joint_custom_pre_pass
    assert ours.uuid() == ours.uuid() is not None
    config.joint_custom_pre_pass = user_pass([], "one")
    inductor.install()
    one = config.joint_custom_pre_pass.uuid()
    config.joint_custom_pre_pass = user_pass([], "two")
    inductor.install()
    two = config.joint_custom_pre_pass.uuid()
    assert len({repr(u) for u in (ours.uuid(), one, two)}) == 3
    monkeypatch.setattr(inductor, "_is_enabled", False)
    assert config.joint_custom_pre_pass.uuid() != two


@pytest.mark.parametrize("refusal", ["no configuration", "no pass", "no lowering"])
def test_hook_that_is_missing(refusal, monkeypatch):
    """one warning, the graph as it was, the right result"""
    import torch._inductor.config as config
    import torch._inductor.lowering as lowering

    def refuse(*arguments, **options):
        raise AttributeError("gone")

    config.joint_custom_pre_pass = None
    if refusal == "no configuration":
        monkeypatch.setitem(sys.modules, "torch._inductor.config", types.SimpleNamespace())
    elif refusal == "no pass":
        monkeypatch.setattr(inductor, "_pass_class", refuse)
    else:
        if fused_layernorm._ops.calls is None:
            pytest.skip("nothing is lowered to direct calls")
        monkeypatch.setattr(lowering, "register_lowering", refuse)
        inductor._lower_to_direct_calls.cache_clear()
    leaves = [torch.randn(2, 5, SIZE), *(leaf(*s).detach() for s in sizes()[2:])]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if refusal == "no configuration":
            inductor.install()
            inductor.install()
        else:
            found = [run_once(), run_once()]
            assert all(y.isfinite().all() for y in found)
    assert [str(w.message) for w in caught if "hooks into Inductor" in str(w.message)].__len__() == 1
    assert inductor.counters == Counter()
    if refusal != "no configuration":
        monkeypatch.undo()
        assert torch.compile(stream_of, backend=fold_backend)(*leaves).isfinite().all()


FRESH = """
import sys, torch, fused_layernorm
from fused_layernorm.integrations import inductor
assert "torch._inductor.config" not in sys.modules and "torch._dynamo" not in sys.modules
x = torch.randn(4, 16, requires_grad=True)
fused_layernorm.fused_layer_norm(x, normalized_shape=16).sum().backward()
assert "torch._inductor.config" not in sys.modules and "torch._dynamo" not in sys.modules
for switch in sys.argv[1:]:
    from torch._dynamo.utils import counters
    torch._dynamo.reset()
    counters.clear()
    if switch == "enable":
        inductor.enable()
    m = torch.randn(16, 16)
    call = torch.compile(lambda x, m: fused_layernorm.fused_layer_norm(x + x @ m, normalized_shape=16))
    with torch.no_grad():
        assert torch.allclose(call(x, m), fused_layernorm.fused_layer_norm(x + x @ m, normalized_shape=16), atol=1e-5)
    caches = counters["inductor"]
    print(inductor.counters["residual"], caches["fxgraph_cache_hit"], caches["fxgraph_cache_miss"])
"""


def run_fresh(*arguments, **environment):
    done = run_code(FRESH, *arguments, environment=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_eager_mode_imports_nothing():
    assert run_fresh() == []


@pytest.mark.slow
def test_caches(tmp_path):
    """a second process takes the folded graph from the cache; with the hooks off, it is another entry"""
    folder = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    assert run_fresh("as it is", FUSED_LAYERNORM_FOLD="1", **folder) == ["1", "0", "1"]
    off_and_on = run_fresh("as it is", "enable", FUSED_LAYERNORM_FOLD="0", **folder)
    assert off_and_on == ["0", "0", "1", "0", "1", "0"]


@needs_direct_calls
def test_direct_call(device):
    """call_norm_forward: the operator's results, or None; by the dispatcher where a mode must see it; bad arguments"""
    calls = fused_layernorm._ops.calls
    x, w = torch.randn(3, 8, device=device), torch.randn(8, device=device)
    options = fused_layernorm.reference.Options(1, 1e-5)
    arguments = (x, None, None, w, None, None, *options)
    # A z that is not read: one kernel, rows for which another launch adds, and one for an activation
    with_z = [
        (torch.randn(rows, n, device=device), torch.randn(rows, n, device=device), None, None, None, None,
         *options._replace(residual_dtype=torch.float32, activation=activation))
        for rows, n, activation in ((3, 8, 0), (3, 256, 0), (2000, 1024, 0), (3, 7, 0), (3, 256, 1), (3, 257, 1))
    ]  # fmt: skip
    for case in (arguments, *with_z):
        expected = fused_layernorm._ops.norm_forward(*case)
        for used in range(8):
            found = calls.call_norm_forward(*case, used)
            assert torch.equal(found[0], expected[0])
            if not used & 2 and (device == "cuda" or case is arguments):
                assert found[1] is None
            else:
                assert torch.equal(found[1], expected[1])
            assert torch.equal(found[2], expected[2]) if used & 4 else found[2] is None

    class Parameter(torch.nn.Parameter):  # a subclass that overrides nothing
        pass

    plain = fused_layernorm._ops.norm_forward(*arguments)
    assert torch.equal(calls.call_norm_forward(*arguments[:3], Parameter(w), *arguments[4:], 1)[0], plain[0])
    sandwich = (x, x + 1, w, w + 1, 1, 1e-5, 1e-6, 0.0, 1.0)
    both = (calls.call_sandwich_norm(*sandwich, 0b1111), fused_layernorm._ops.sandwich_norm(*sandwich))
    assert len(both[0]) == 4 and all(map(torch.equal, *both))

    from torch.utils._python_dispatch import TorchDispatchMode

    class Names(TorchDispatchMode):
        names = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.append(str(function))
            return function(*args, **(kwargs or {}))

    with Names() as mode:
        calls.call_norm_forward(*arguments, 1)
        calls.call_sandwich_norm(*sandwich, 1)
    assert {f"fused_layernorm.{name}.default" for name in ("norm_forward", "sandwich_norm")} <= set(mode.names)
    for bad in (arguments, (*arguments, 1, 1), (*arguments[:6], "1", *arguments[7:], 1)):
        if fused_layernorm._ops.extension:
            error, told = TypeError, "the operator's arguments"
        else:  # the wheel's library leaves mistakes to the dispatcher
            error, told = (TypeError, RuntimeError), "norm_forward"
        with pytest.raises(error, match=told):
            calls.call_norm_forward(*bad)


def test_residual_dtype_by_default(device):
    """norm_forward with a residual and no residual_dtype: z is of residual's dtype; opcheck, gradients"""
    for x_dtype, residual_dtype in ((bf16, fp32), (fp32, fp32)):
        x = torch.randn(3, 8, dtype=x_dtype, device=device, requires_grad=True)
        residual = torch.randn(3, 8, dtype=residual_dtype, device=device, requires_grad=True)
        options = fused_layernorm.reference.Options(1, 1e-5)
        arguments = (x, residual, None, None, None, None, *options)
        torch.library.opcheck(fused_layernorm._ops.norm_forward, arguments)
        y, z, _ = fused_layernorm._ops.norm_forward(*arguments)
        expected = fused_add_layer_norm(x, residual, normalized_shape=8)
        assert torch.equal(y, expected[0]) and torch.equal(z, expected[1])
        ours = torch.autograd.grad(y.sin().sum() + z.cos().sum(), (x, residual))
        theirs = torch.autograd.grad(expected[0].sin().sum() + expected[1].cos().sum(), (x, residual))
        assert all(map(torch.equal, ours, theirs))
