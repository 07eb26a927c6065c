"""The norms inside PyTorch: operators, torch.compile, export, transforms, autocast, modes, graphs and streams.

That values are right is test_correctness.py's; here a result is compared with what plain eager mode gives.
"""

import copy
import gc
import io

import pytest
import torch
import torch.nn.functional as F
from norm_cases import (
    HAS_CUDA,
    OPS,
    Case,
    X,
    backward_arguments,
    bf16,
    fp16,
    fp32,
    fp64,
    fused,
    in_plain_operations,
    make_inputs,
    on_devices,
    opcheck,
    operator_arguments,
    run,
    same_bits,
    uses_kernels,
)
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode

import fused_layernorm
from fused_layernorm import (
    FusedAdaptiveRMSNorm,
    FusedAddLayerNorm,
    FusedLayerNorm,
    FusedRMSNorm,
    fused_layer_norm,
    replace_norms,
)

NEEDS_KERNELS = pytest.mark.skipif(fused_layernorm.backend() == "reference", reason="there are no operators")


def ours(op):
    return lambda x, weight, bias: OPS[op](x, weight, bias, 1e-5)


def definition(op):
    """As the tests of values define it. Not torch's norms: the mixed second derivative (forward over reverse) and the
    third derivative of F.layer_norm are wrong in the versions of torch that this was written with."""
    return lambda x, weight, bias: in_plain_operations(Case(tuple(x.shape), op=op), x, weight, bias)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


class Compiled:
    """A torch.compile backend that keeps the graphs it is given."""

    def __init__(self, backend):
        self.backend, self.graphs = backend, []

    def __call__(self, graph, inputs, **options):
        self.graphs.append(graph)
        return torch._dynamo.lookup_backend(self.backend)(graph, inputs, **options)

    def calls(self):
        """How often each graph calls our operator."""
        return [sum("fused_layernorm.norm" in str(node.target) for node in graph.graph.nodes) for graph in self.graphs]


class Calls(TorchDispatchMode):
    """Lists what reaches the dispatcher."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


# ---- operators -----------------------------------------------------------------------------------------------------

OPERATOR_CASES = [
    Case((5, 3, 40), dtype=bf16, weight=fp32, bias=fp32),
    Case((5, 40), op="rms_norm", weight_offset=1.0, bias=None, out_dtype=fp64),
    Case((5, 4, 10), normalized_ndim=2, weight=None, bias=X),
    Case((0, 40), weight=None, bias=None),
    Case((4, 6, 10), op="rms_norm", layout="transposed", grad_layout="expanded_scalar"),
]


def forward_arguments(case, x, weight, bias):
    return operator_arguments(x, None, None, weight, bias, normalized_ndim=case.normalized_ndim, eps=case.eps,
                              weight_offset=case.weight_offset, is_rms_norm=case.op == "rms_norm",
                              out_dtype=case.out_dtype)  # fmt: skip


@NEEDS_KERNELS
@on_devices("case", OPERATOR_CASES)
def test_opcheck(device, case):
    """schema (nothing mutated or aliased), autograd registration, fake tensors, AOT dispatch with dynamic shapes"""
    inputs = make_inputs(case, device)
    for parameter in inputs.present():
        getattr(inputs, parameter).requires_grad_()
    forward = forward_arguments(case, inputs.x, inputs.weight, inputs.bias)
    opcheck(torch.ops.fused_layernorm.norm_forward.default, forward)
    with torch.no_grad():
        y, z, stats = results = torch.ops.fused_layernorm.norm_forward(*forward)
        assert z.numel() == 0
        assert same_bits(y, fused(case, inputs.x, inputs.weight, inputs.bias)) and y.is_contiguous()
        for wants in ("xwb", "xw", "w", "b", ""):
            backward = backward_arguments(forward, inputs.grad_output, results, wants=wants)
            traced = wants in ("xwb", "") or case is OPERATOR_CASES[0]
            opcheck(torch.ops.fused_layernorm.norm_backward.default, backward, traced)


@NEEDS_KERNELS
@on_devices("case", OPERATOR_CASES)
def test_operators_in_eager_mode(device, case):
    """called by hand: the bits and gradients of the public call"""
    inputs = make_inputs(case, device)

    def operator(case, x, weight, bias):
        return torch.ops.fused_layernorm.norm_forward(*forward_arguments(case, x, weight, bias))[0]

    if not inputs.present():
        return
    found, plain = (run(norm, case, inputs) for norm in (operator, fused))
    for name, value in plain.items():
        assert same_bits(found[name], value), name


@NEEDS_KERNELS
@on_devices()
def test_operators_refuse(device):
    """bad calls, and derivatives that the operators do not have, are errors"""
    forward, backward = torch.ops.fused_layernorm.norm_forward, torch.ops.fused_layernorm.norm_backward
    x, weight = torch.randn(3, 8, device=device), torch.ones(8, device=device)
    for ndim in (0, 3, -1):
        with pytest.raises(RuntimeError, match="normalized_ndim must be from 1 to 2"):
            forward(*operator_arguments(x, weight=weight, normalized_ndim=ndim))
    with pytest.raises(RuntimeError, match="weight must have the shape of normalized_shape"):
        forward(*operator_arguments(x, weight=weight[1:]))
    with torch._subclasses.FakeTensorMode(), pytest.raises(RuntimeError, match="weight must have the shape"):
        forward(*operator_arguments(torch.empty(3, 8, device=device), weight=torch.empty(7, device=device)))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(NotImplementedError, match="no forward-mode derivative; the functions"):
            forward(*operator_arguments(dual, weight=weight))
    arguments = operator_arguments(x.requires_grad_(), weight=weight)
    results = [t.detach() for t in forward(*arguments)]
    gradient, *_ = backward(x, *backward_arguments(arguments, x, results, wants="xw")[1:])
    with pytest.raises(RuntimeError, match="not implemented"):
        gradient.sum().backward()


@NEEDS_KERNELS
@on_devices()
def test_operators_check_backward_as_forward(device):
    """what backward cannot combine, or what is not forward's, is an error: no crash, no silently other result"""
    forward, backward = torch.ops.fused_layernorm.norm_forward, torch.ops.fused_layernorm.norm_backward
    x, residual, grad = (torch.randn(3, 8, device=device) for _ in range(3))
    per_row, weight = torch.randn(3, 8, device=device), torch.randn(8, device=device)
    philox = torch.tensor([5, 6], device=device)

    def refused(match, arguments, results, **changed):
        """backward of `arguments`, with some of them changed, is an error."""
        names = ("x", "residual", "gate", "weight", "bias", "philox", *fused_layernorm.reference.Options._fields)
        given = dict(zip(names, arguments, strict=True))
        more = {name: changed.pop(name) for name in ("grad_output", "z_is_y") if name in changed}
        arguments = tuple((given | changed).values())
        with pytest.raises((RuntimeError, TypeError, ValueError), match=match):
            backward(*backward_arguments(arguments, more.pop("grad_output", grad), results, **more))

    # A crash: a weight for each row and dropout; an activation that was ignored beside one
    summed = operator_arguments(x, residual, weight=per_row, residual_dtype=fp32)
    results = forward(*summed)
    refused("no dropout and no activation", summed, results, philox=philox, dropout_p=0.5)
    refused("no dropout and no activation", summed, results, activation=2)
    with pytest.raises(RuntimeError, match="no dropout and no activation"):
        forward(*operator_arguments(x, residual, weight=per_row, residual_dtype=fp32, activation=2))
    # A weight of a dtype that forward refuses, which was read as another
    for dtype in (fp16, torch.float64):
        refused("weight must be forward's", summed, results, weight=per_row.to(dtype))
    half = operator_arguments(x.to(bf16), residual, weight=weight, residual_dtype=fp32)
    refused("weight must be forward's", half, forward(*half), weight=weight.to(fp16))
    plain = operator_arguments(x, weight=weight)
    results = forward(*plain)
    refused("weight must be forward's", plain, results, weight=weight[1:])
    refused("stats must be what norm_forward returned", plain, (*results[:2], results[2][:, 1:]))
    refused("stats must be what norm_forward returned", plain, results, is_rms_norm=True)
    refused("grad_output must have x's shape", plain, results, grad_output=grad[1:])
    refused("activation must be the number", plain, results, activation=9)
    refused("dropout_p must be from 0 to 1", plain, results, dropout_p=1.5)
    refused("philox must hold two int64", plain, results, philox=philox[:1], drops_y=True)
    refused("need residual_dtype", plain, results, philox=philox, dropout_p=0.5)
    refused("z_is_y goes with the plain norm", plain, results, z_is_y=True, activation=1)
    refused("gate must be forward's", summed, forward(*summed), gate=weight)


@NEEDS_KERNELS
@on_devices("op", OPS)
def test_modes_see_one_operator(device, op):
    """a dispatch mode sees the operator of each direction, and nothing else of the norm"""
    x, weight, bias = (torch.randn(*shape, device=device, requires_grad=True) for shape in ((3, 8), (8,), (8,)))
    truth = torch.autograd.grad(ours(op)(x, weight, bias), (x, weight, bias), torch.ones(3, 8, device=device))
    grad_output = torch.ones(3, 8, device=device)
    with Calls() as calls:
        found = torch.autograd.grad(ours(op)(x, weight, bias), (x, weight, bias), grad_output)
    assert [name for name in calls.names if "detach" not in name] == [
        "fused_layernorm.norm_forward.default", "fused_layernorm.norm_backward.default"]  # fmt: skip
    assert all(same_bits(a, b) for a, b in zip(found, truth, strict=True))


@on_devices("op", OPS)
def test_fake_tensors(device, op):
    """a model is tried for its shapes alone"""
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(3, 5, 8, device=device, dtype=bf16, requires_grad=True)
        weight = torch.empty(8, device=device, requires_grad=True)
        y = OPS[op](x, weight, out_dtype=fp32)
        assert y.shape == x.shape and y.dtype == fp32 and y.device.type == device
        grad_x, grad_weight = torch.autograd.grad(y.sum(), (x, weight))
        assert (grad_x.dtype, grad_x.shape, grad_weight.dtype, grad_weight.shape) == (bf16, x.shape, fp32, weight.shape)


@on_devices("op", OPS)
def test_selective_checkpoint(device, op):
    """a policy that saves the operator's results: it runs once, not again in backward"""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    def policy(context, function, *args, **kwargs):
        saved = "fused_layernorm" in str(function)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    def function(x, weight, bias):
        return ours(op)(x.sin(), weight, bias).cos()

    leaves = [torch.randn(*shape, device=device, requires_grad=True) for shape in ((3, 8), (8,), (8,))]
    plain = torch.autograd.grad(function(*leaves).sum(), leaves)
    y = checkpoint(function, *leaves, use_reentrant=False,
                   context_fn=lambda: create_selective_checkpoint_contexts(policy))  # fmt: skip
    with Calls() as calls:
        found = torch.autograd.grad(y.sum(), leaves)
    torch.testing.assert_close(found, plain)
    assert "aten.sin.default" in calls.names and "fused_layernorm.norm_forward.default" not in calls.names


# ---- torch.compile -------------------------------------------------------------------------------------------------


@on_devices("op,backend,dtype", [
    (op, backend, dtype) for op in OPS for backend, dtype in (("eager", fp32), ("aot_eager", bf16), ("inductor", fp32))
])  # fmt: skip
def test_compile(device, op, backend, dtype):
    """fullgraph: one operator in the graph; the bits of eager mode, forward and backward"""
    case = Case((9, 96), op=op, dtype=dtype, weight=fp32, bias=fp32)
    inputs = make_inputs(case, device)
    compiled = Compiled(backend)
    function = torch.compile(lambda *tensors: fused(case, *tensors), backend=compiled, fullgraph=True)
    plain = run(fused, case, inputs)
    with_gradients = run(lambda case, *tensors: function(*tensors), case, inputs)
    with torch.no_grad():
        without = function(inputs.x, inputs.weight, inputs.bias)
    if not uses_kernels(device):
        assert compiled.calls() == [0, 0]
        torch.testing.assert_close(without, plain["y"])
        return
    assert compiled.calls() == [1, 1]
    assert same_bits(without, plain["y"])
    for name, value in plain.items():
        assert same_bits(with_gradients[name], value), name


MODES = [(op, mode) for op in OPS for mode in ("default", "reduce-overhead")]


# Without a card both modes are one, and test_compile_of_a_model has LayerNorm in it.
@on_devices("op,mode", MODES if HAS_CUDA else MODES[-1:])
def test_compile_modes(device, op, mode):
    """several steps of a small model in each mode: loss and gradients of eager mode"""
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU()).to(device)
    norm = (FusedLayerNorm if op == "layer_norm" else FusedRMSNorm)(16, device=device)
    model.append(norm)
    compiled = torch.compile(copy.deepcopy(model), mode=mode, fullgraph=True)
    for _ in range(4):  # CUDA graphs are recorded at the second
        x = torch.randn(6, 16, device=device)
        for each in (model, compiled):
            each.zero_grad()
            each(x).square().mul(x).sum().backward()
        for parameter, found in zip(model.parameters(), compiled.parameters(), strict=True):
            torch.testing.assert_close(found.grad, parameter.grad, rtol=1e-4, atol=1e-4)


@on_devices("op,dynamic", [(op, dynamic) for op in OPS for dynamic in (None, True)])
def test_compile_of_many_sizes(device, op, dynamic):
    """a batch of any size: two compilations, as of torch's own norms (the first takes the size, or eps, for fixed)"""
    compiled = Compiled("aot_eager")
    function = torch.compile(lambda x, *parameters: ours(op)(x * 2, *parameters), backend=compiled, fullgraph=True,
                             dynamic=dynamic)  # fmt: skip
    weight, bias = torch.randn(16, device=device, requires_grad=True), torch.randn(16, device=device)
    for rows in (2, 3, 7, 12, 31):
        x = torch.randn(rows, 5, 16, device=device, requires_grad=True)
        y, truth = function(x, weight, bias), ours(op)(x * 2, weight, bias)
        torch.testing.assert_close(y, truth)
        torch.testing.assert_close(torch.autograd.grad(y.sin().sum(), (x, weight)),
                                   torch.autograd.grad(truth.sin().sum(), (x, weight)))  # fmt: skip
    assert len(compiled.graphs) <= 2


@on_devices()
def test_compile_of_many_widths(device):
    """also the hidden size may be dynamic"""
    compiled = Compiled("aot_eager")
    function = torch.compile(ours("layer_norm"), backend=compiled, fullgraph=True, dynamic=True)
    for size in (8, 24, 33):
        tensors = [torch.randn(*shape, device=device) for shape in ((4, size), (size,), (size,))]
        torch.testing.assert_close(function(*tensors), ours("layer_norm")(*tensors))
    assert len(compiled.graphs) <= 2


@on_devices("sizes", [(slice(-1, None),), (-1,)])
def test_compile_of_many_widths_without_weight(device, sizes):
    """normalized_shape of x's own sizes, which are symbols: one graph for all"""
    compiled = Compiled("aot_eager")
    function = torch.compile(
        lambda x: fused_layer_norm(x, normalized_shape=x.shape[sizes]), backend=compiled, fullgraph=True, dynamic=True
    )
    for size in (8, 24, 33):
        x = torch.randn(4, size, device=device)
        torch.testing.assert_close(function(x), fused_layer_norm(x, normalized_shape=size))
    assert len(compiled.graphs) <= 2


@on_devices("backend", ["eager", "aot_eager", "inductor"])
def test_compile_with_one_tensor_in_many_places(device, backend):
    """x as its own weight and bias, and used beside the norm"""

    def function(x):
        return fused_layer_norm(x, x, x, normalized_shape=(3, 8)) * x + OPS["rms_norm"](x[0], x[0])

    # float64, as these gradients cancel
    x = torch.randn(3, 8, device=device, dtype=fp64, requires_grad=True)
    found = torch.compile(function, backend=backend, fullgraph=True)(x)
    torch.testing.assert_close(found, function(x))
    torch.testing.assert_close(
        torch.autograd.grad(found.sin().sum(), x), torch.autograd.grad(function(x).sin().sum(), x)
    )


@on_devices("backend", ["aot_eager", "inductor"])
def test_compile_of_a_model(device, backend):
    """a transformer whose norms were replaced: one graph, every norm in it an operator, the gradients of eager mode"""
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, device=device)
    model = torch.nn.TransformerEncoder(layer, 1, torch.nn.LayerNorm(16, device=device), enable_nested_tensor=False)
    assert len(replace_norms(model).replaced) == 3
    compiled = Compiled(backend)
    function = torch.compile(model, backend=compiled, fullgraph=True)
    x = torch.randn(2, 5, 16, device=device)
    results = []
    for call in (model, function):
        model.zero_grad()
        y = call(x)
        y.square().mul(x).sum().backward()
        results.append({"y": y.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}})
    assert compiled.calls() == [3 if uses_kernels(device) else 0]
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-3, atol=1e-4, msg=f"{name}: {{}}".format)


@on_devices("op", OPS)
def test_compile_and_errors(device, op):
    """a bad call is told while compiling, with the words of eager mode"""
    function = torch.compile(lambda x, weight: OPS[op](x, weight), backend="eager")
    with pytest.raises(Exception, match="weight must be of x's dtype|weight must have the shape"):
        function(torch.ones(3, 8, device=device), torch.ones(9, device=device))


@on_devices("op", OPS)
def test_compile_and_second_order(device, op):
    """create_graph through a compiled call: right (backend eager), or torch's own error (AOTAutograd), never wrong"""
    leaves = [torch.randn(*shape, device=device, dtype=fp64, requires_grad=True) for shape in ((3, 8), (8,), (8,))]

    def penalty(function):
        first = torch.autograd.grad(function(*leaves).sin().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(gradient.square().sum() for gradient in first), leaves)

    truth = penalty(ours(op))
    torch.testing.assert_close(penalty(torch.compile(ours(op), backend="eager", fullgraph=True)), truth)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        penalty(torch.compile(ours(op), backend="aot_eager", fullgraph=True))


# ---- export --------------------------------------------------------------------------------------------------------


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.linear, self.last = FusedRMSNorm(8), torch.nn.Linear(8, 8), FusedLayerNorm(8)

    def forward(self, x):
        return self.last(self.linear(self.first(x)) + x)


def exported(device, strict):
    model = Model().to(device)
    batch = torch.export.Dim("batch", min=1, max=1000)
    program = torch.export.export(
        model, (torch.randn(4, 8, device=device),), dynamic_shapes=({0: batch},), strict=strict
    )
    return model, program


@on_devices("strict", [True, False])
def test_export(device, strict):
    """the operators are in the program, before and after decomposition; saved, loaded and run with other sizes"""
    model, program = exported(device, strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for each in (program, program.run_decompositions(), torch.export.load(file)):
        assert each.graph_module.code.count("fused_layernorm.norm_forward") == (2 if uses_kernels(device) else 0)
        x = torch.randn(7, 8, device=device)
        torch.testing.assert_close(each.module()(x), model(x))


@on_devices("tracing_mode", ["real", "fake", "symbolic"])
def test_make_fx(device, tracing_mode):
    """make_fx of forward and backward holds both operators"""
    from torch.fx.experimental.proxy_tensor import make_fx

    def function(x, weight):
        return torch.autograd.grad(fused_layer_norm(x, weight).sin().sum(), (x, weight))

    tensors = [torch.randn(*shape, device=device, requires_grad=True) for shape in ((4, 8), (8,))]
    graph = make_fx(function, tracing_mode=tracing_mode)(*tensors)
    assert "fused_layernorm.norm_forward" in graph.code and "fused_layernorm.norm_backward" in graph.code
    torch.testing.assert_close(graph(*tensors), function(*tensors))


# ---- transforms ----------------------------------------------------------------------------------------------------


def leaves_fp64(device):
    return [torch.randn(*shape, dtype=fp64, device=device, requires_grad=True) for shape in ((3, 8), (8,), (8,))]


@on_devices("op", OPS)
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_gradcheck_of_all_modes(device, op):
    """forward mode, batched gradients and tangents, undefined gradients; second order forward over reverse"""
    leaves = leaves_fp64(device)
    assert gradcheck(ours(op), leaves, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True,
                     check_undefined_grad=True)  # fmt: skip
    assert gradgradcheck(ours(op), leaves, check_fwd_over_rev=True, check_rev_over_rev=True, check_batched_grad=True)


@on_devices("op", OPS)
def test_third_order(device, op):
    """the derivative of second-order gradients, against finite differences"""
    weight, bias = torch.randn(5, dtype=fp64, device=device), torch.randn(5, dtype=fp64, device=device)

    def second_order(x):
        (first,) = torch.autograd.grad(ours(op)(x, weight, bias).sin().sum(), x, create_graph=True)
        return torch.autograd.grad(first.cos().sum(), x, create_graph=True)[0]

    assert gradcheck(second_order, torch.randn(2, 5, dtype=fp64, device=device, requires_grad=True))


def loss(norm):
    return lambda x, weight, bias: norm(x, weight, bias).sin().sum()


def vjp(norm, x, weight, bias):
    y, pull_back = torch.func.vjp(norm, x, weight, bias)
    return y, pull_back(y.cos())


def jvp(norm, x, weight, bias):
    return torch.func.jvp(norm, (x, weight, bias), (x.cos(), weight.cos(), bias.cos()))


def linearize(norm, x, weight, bias):
    y, push_forward = torch.func.linearize(lambda x: norm(x, weight, bias), x)
    return y, push_forward(x.cos())


def per_sample_gradients(norm, x, weight, bias):
    return torch.func.vmap(torch.func.grad(loss(norm), argnums=(0, 1, 2)), (0, None, None))(x, weight, bias)


def ensemble(norm, x, weight, bias):
    weights, biases = torch.stack([weight, weight.sin()], 1), torch.stack([bias, bias.cos()], 1)
    return torch.func.vmap(norm, (None, 1, 1))(x, weights, biases)


def nested(norm, x, weight, bias):
    weights = torch.stack([weight, weight.sin()])
    return torch.func.vmap(torch.func.vmap(norm, (0, None, None)), (None, 0, None))(x, weights, bias)


TRANSFORMS = {
    "grad": lambda norm, *t: torch.func.grad(loss(norm), argnums=(0, 1, 2))(*t),
    "grad_of_grad": lambda norm, x, *t: torch.func.grad(lambda x: torch.func.grad(loss(norm))(x, *t).cos().sum())(x),
    "vjp": vjp,
    "jvp": jvp,
    "jacrev": lambda norm, *t: torch.func.jacrev(norm, argnums=(0, 1))(*t),
    "jacfwd": lambda norm, *t: torch.func.jacfwd(norm, argnums=(0, 1))(*t),
    "hessian": lambda norm, *t: torch.func.hessian(loss(norm), argnums=(0, 1))(*t),
    "linearize": linearize,
    "vmap": lambda norm, x, weight, bias: torch.func.vmap(norm, (1, None, None), 1)(x[:, None], weight, bias),
    "ensemble": ensemble,
    "nested": nested,
    "per_sample_gradients": per_sample_gradients,
}


@on_devices("op,transform", [(op, transform) for op in OPS for transform in TRANSFORMS])
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_transforms(device, op, transform):
    """torch.func: as for the definition"""
    tensors = [t.detach() for t in leaves_fp64(device)]
    function = TRANSFORMS[transform]
    torch.testing.assert_close(function(ours(op), *tensors), function(definition(op), *tensors), rtol=1e-9, atol=1e-9)


@on_devices("op,transform,backend", [
    # test_transforms has both norms
    *((list(OPS)[i % 2], name, "aot_eager") for i, name in enumerate(TRANSFORMS) if name != "linearize"),
    ("layer_norm", "per_sample_gradients", "inductor"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_transforms_inside_compile(device, op, transform, backend):
    """torch.func inside torch.compile: the same derivatives, in one graph"""
    if transform in ("jacfwd", "hessian") and torch.__version__.split(".")[:2] < ["2", "13"]:
        pytest.skip("torch 2.11 cannot compile jacfwd with several arguments, of any function")
    tensors = [t.detach() for t in leaves_fp64(device)]
    function = TRANSFORMS[transform]
    compiled = torch.compile(lambda *tensors: function(ours(op), *tensors), backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(*tensors), function(definition(op), *tensors), rtol=1e-9, atol=1e-9)


@on_devices()
def test_functional_call(device):
    """a module called with other parameters, differentiated with respect to these"""
    module = FusedLayerNorm(8, device=device)
    parameters = {name: torch.randn(8, device=device) for name in ("weight", "bias")}
    x = torch.randn(3, 8, device=device)
    torch.testing.assert_close(torch.func.functional_call(module, parameters, x), F.layer_norm(x, (8,), **parameters))
    gradients = torch.func.grad(lambda p: torch.func.functional_call(module, p, x).square().sum())(parameters)
    leaves = {name: t.clone().requires_grad_() for name, t in parameters.items()}
    F.layer_norm(x, (8,), **leaves).square().sum().backward()
    for name, leaf in leaves.items():
        torch.testing.assert_close(gradients[name], leaf.grad, rtol=1e-4, atol=1e-4)


# ---- autocast ------------------------------------------------------------------------------------------------------


@on_devices("op,dtype,compiled", [(op, dtype, c) for op in OPS for dtype in (fp16, bf16) for c in (False, True)])
def test_autocast(device, op, dtype, compiled):
    """the result and the gradients follow x's dtype, compiled or not; eager mode's bits"""
    linear = torch.nn.Linear(32, 32, device=device)
    weight = torch.randn(32, device=device, requires_grad=True)

    def function(x, weight):
        with torch.autocast(device, dtype=dtype):
            y = OPS[op](linear(x), weight, eps=1e-5)
            return y, OPS[op](x, weight, eps=1e-5)

    x = torch.randn(5, 32, device=device, requires_grad=True)
    call = torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function
    after_linear, of_x = call(x, weight)
    assert after_linear.dtype == dtype and of_x.dtype == fp32
    with torch.autocast(device, dtype=dtype):
        z = linear(x)
    torch.testing.assert_close(after_linear, OPS[op](z, weight, eps=1e-5))
    torch.testing.assert_close(of_x, OPS[op](x, weight, eps=1e-5))
    grad_x, grad_weight = torch.autograd.grad((after_linear.float().sin() + of_x.cos()).sum(), (x, weight))
    assert grad_x.dtype == grad_weight.dtype == fp32
    truth = OPS[op](z, weight, eps=1e-5).float().sin() + OPS[op](x, weight, eps=1e-5).cos()
    for found, true in zip((grad_x, grad_weight), torch.autograd.grad(truth.sum(), (x, weight)), strict=True):
        torch.testing.assert_close(found, true, rtol=1e-5, atol=1e-5)


@NEEDS_KERNELS
@on_devices("op", OPS)
def test_autocast_copies_nothing(device, op):
    """under autocast, too, only the norm's operator runs: no cast of x, weight or the result"""
    x, weight = torch.randn(5, 32, device=device, dtype=bf16), torch.randn(32, device=device)
    with torch.autocast(device, dtype=bf16), Calls() as calls:
        OPS[op](x, weight)
    assert calls.names == ["fused_layernorm.norm_forward.default"]


@on_devices("op", OPS)
def test_grad_scaler(device, op):
    """a step of fp16 training by GradScaler, and one that it must skip"""
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), (FusedLayerNorm if op == "layer_norm" else FusedRMSNorm)(16))
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device, init_scale=128.0)
    for loss_scale, is_skipped in ((1.0, False), (float("inf"), True)):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.zero_grad()
        with torch.autocast(device, dtype=fp16):
            y = model(torch.randn(4, 16, device=device))
            assert y.dtype == fp16
            value = (y.float().square() * torch.linspace(0, 1, 16, device=device)).mean() * loss_scale
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        same = [same_bits(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        assert all(same) if is_skipped else not any(same)


# ---- tensors and modules of all kinds ------------------------------------------------------------------------------


class Counted(torch.Tensor):
    """Sees every torch function that is called with it."""

    seen = 0

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen += 1
        return super().__torch_function__(function, types, args, kwargs or {})


@on_devices("op", OPS)
def test_torch_function_subclass(device, op):
    """a subclass with __torch_function__ is asked, and comes out"""
    x, weight, bias = (t.detach() for t in leaves_fp64(device))
    Counted.seen = 0
    y = ours(op)(x.as_subclass(Counted), weight, bias)
    assert type(y) is Counted and Counted.seen
    torch.testing.assert_close(y.as_subclass(torch.Tensor), ours(op)(x, weight, bias))


@on_devices("op", OPS)
def test_dispatch_subclass(device, op):
    """a wrapper subclass that knows torch's operations only gets these"""
    from torch.testing._internal.two_tensor import TwoTensor

    x, weight, bias = (t.detach() for t in leaves_fp64(device))
    pair = TwoTensor(x, 2 * x + 1)
    y = ours(op)(pair, weight, bias)
    assert type(y) is TwoTensor
    torch.testing.assert_close(y.a, ours(op)(pair.a, weight, bias))
    torch.testing.assert_close(y.b, ours(op)(pair.b, weight, bias))


@on_devices()
def test_swap_tensors(device):
    """torch.utils.swap_tensors of a module's parameters: the next call uses the new ones"""
    module, other = FusedLayerNorm(8, device=device), FusedLayerNorm(8, device=device)
    torch.nn.init.normal_(other.weight)
    x = torch.randn(3, 8, device=device)
    module(x)
    with torch.no_grad():  # a graph would hold the parameters
        expected = other(x)
    torch.utils.swap_tensors(module.weight, other.weight)
    assert same_bits(module(x), expected)
    future = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        assert module.to(bf16)(x.to(bf16)).dtype == bf16
    finally:
        torch.__future__.set_swap_module_params_on_conversion(future)


@on_devices("op", OPS)
def test_inference_mode(device, op):
    """inference tensors go in and come out, compiled or not"""
    with torch.inference_mode():
        x, weight, bias = torch.randn(3, 8, device=device), torch.ones(8, device=device), torch.zeros(8, device=device)
        y = ours(op)(x, weight, bias)
        assert y.is_inference() and y.grad_fn is None
        assert same_bits(torch.compile(ours(op), backend="aot_eager", fullgraph=True)(x, weight, bias), y)


def _in_another_process(rank, module, x, results):
    results.put(module(x).detach().numpy())


def test_multiprocessing():
    """a module and a tensor in shared memory, used by another process"""
    numpy = pytest.importorskip("numpy")
    module, x = FusedLayerNorm(8).share_memory(), torch.randn(3, 8).share_memory_()
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(_in_another_process, (module, x, results), nprocs=1)
    numpy.testing.assert_array_equal(results.get(), module(x).detach().numpy())


# ---- CUDA only -----------------------------------------------------------------------------------------------------


@on_devices("op", OPS, devices=("cuda",))
def test_cuda_graph_of_a_training_step(device, op):
    """forward, backward and optimizer in one graph, replayed: the parameters of eager steps"""
    torch.manual_seed(0)
    norm = FusedLayerNorm if op == "layer_norm" else FusedRMSNorm
    eager = torch.nn.Sequential(torch.nn.Linear(64, 64), norm(64), torch.nn.Linear(64, 1)).to(device)
    captured = copy.deepcopy(eager)
    batches = torch.randn(6, 32, 64, device=device)
    static_x = batches[0].clone()

    def step(model, optimizer, x):
        optimizer.zero_grad(set_to_none=True)
        (model(x) - x[:, :1]).square().mean().backward()
        optimizer.step()

    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (eager, captured)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for x in batches[:3]:
            static_x.copy_(x)
            step(captured, optimizers[1], static_x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(captured, optimizers[1], static_x)
    for x in batches[:3]:
        step(eager, optimizers[0], x)
    for x in batches[3:]:
        static_x.copy_(x)
        graph.replay()
        step(eager, optimizers[0], x)
    for name, parameter in eager.named_parameters():
        torch.testing.assert_close(dict(captured.named_parameters())[name], parameter, rtol=1e-4, atol=1e-5)


@on_devices("op", OPS, devices=("cuda",))
def test_graphed_callables(device, op):
    """torch.cuda.make_graphed_callables: the gradients of eager mode"""
    module = (FusedLayerNorm if op == "layer_norm" else FusedRMSNorm)(256, device=device)
    plain = copy.deepcopy(module)
    graphed = torch.cuda.make_graphed_callables(module, (torch.randn(64, 256, device=device, requires_grad=True),))
    for _ in range(2):
        for each in (module, plain):  # a graph writes its gradients into the same memory each time: no sums over calls
            each.zero_grad()
        x = torch.randn(64, 256, device=device)
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        graphed(leaves[0]).sin().sum().backward()
        plain(leaves[1]).sin().sum().backward()
        torch.testing.assert_close(leaves[0].grad, leaves[1].grad)
        torch.testing.assert_close(module.weight.grad, plain.weight.grad)


@on_devices("op", OPS, devices=("cuda",))
def test_graphs_and_streams_at_once(device, op):
    """graphs captured one after another and replayed at the same time on streams of their own, beside eager calls"""
    case = Case((2048, 1024), op=op)
    inputs = make_inputs(case, device)
    expected = run(fused, case, inputs)
    captures = []
    for _ in range(3):
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        static = copy.deepcopy(inputs)
        gc.collect()  # an earlier test's graph, collected during the capture, would free memory, which ends the capture
        with torch.cuda.graph(graph, stream=stream):
            captures.append((graph, stream, static, run(fused, case, static)))
    torch.cuda.synchronize()
    found = []
    for _ in range(20):
        for graph, stream, *_ in captures:
            with torch.cuda.stream(stream):
                graph.replay()
        found.append(run(fused, case, inputs))
    torch.cuda.synchronize()
    for result in (*found, *(capture[3] for capture in captures)):
        for name, value in expected.items():
            assert same_bits(result[name], value), name


@on_devices("op", OPS, devices=("cuda",))
def test_memory_of_a_side_stream_is_not_reused_early(device, op):
    """results that a side stream made outlive their Python objects until record_stream says so"""
    case = Case((4096, 1024), op=op)
    inputs = make_inputs(case, device)
    expected = run(fused, case, inputs)["y"]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # for the inputs
    kept = []
    for _ in range(30):
        with torch.cuda.stream(stream):
            y = fused(case, inputs.x, inputs.weight, inputs.bias)
        torch.cuda.current_stream().wait_stream(stream)
        y.record_stream(torch.cuda.current_stream())
        torch.cuda._sleep(200_000)
        kept.append((y == expected).all())
        del y
        with torch.cuda.stream(stream):  # takes freed memory, if it is given any too early
            torch.full_like(expected, float("nan"))
    assert all(kept)


@on_devices("op", OPS, devices=("cuda",))
def test_no_synchronization(device, op):
    """forward and backward never wait for the GPU"""
    case = Case((199, 1024), op=op, dtype=bf16, weight=fp32, bias=fp32)
    inputs = make_inputs(case, device)
    run(fused, case, inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(fused, case, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_devices("op", OPS, devices=("cuda",))
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_second_device_through_the_operator(device, op):
    """compiled, on a device that is not the current one"""
    case = Case((199, 1024), op=op, dtype=bf16)
    inputs = make_inputs(case, "cuda:1")
    function = torch.compile(lambda *tensors: fused(case, *tensors), fullgraph=True)
    with torch.cuda.device(0):
        plain = run(fused, case, inputs)
        found = run(lambda case, *tensors: function(*tensors), case, inputs)
    for name, value in plain.items():
        assert same_bits(found[name], value), name


@on_devices("op", OPS, devices=("cuda",))
def test_memory_under_autocast(device, op):
    """peak memory of a step under autocast: x, grad_output and grad_input as they are, and less than torch's norm"""
    x = torch.randn(4096, 4096, device=device, dtype=bf16, requires_grad=True)
    weight = torch.ones(4096, device=device, requires_grad=True)
    grad_output = torch.randn_like(x)

    def peak(norm):
        def step():
            with torch.autocast(device, dtype=bf16):
                y = norm(x, weight)
            torch.autograd.grad(y, (x, weight), grad_output.to(y.dtype))

        step()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return (torch.cuda.max_memory_allocated() - before) / x.nbytes

    torchs = {"layer_norm": F.layer_norm, "rms_norm": F.rms_norm}[op]
    fused_peak = peak(lambda x, weight: OPS[op](x, weight, eps=1e-5))
    assert fused_peak < 2.2  # y and grad_input, and a little
    assert fused_peak <= peak(lambda x, weight: torchs(x, (4096,), weight, eps=1e-5))


@pytest.mark.parametrize("op", OPS)
def test_where_torch_norms_are_taken(op):
    """PyTorch's own operation for nested tensors and traces; what it cannot say is operations, or an error"""
    cls, torchs = (FusedLayerNorm, F.layer_norm) if op == "layer_norm" else (FusedRMSNorm, F.rms_norm)
    module, x = cls(16, eps=1e-5), torch.randn(4, 16)
    with torch.no_grad():
        module.weight.normal_()
    traced = torch.jit.trace(module, x)
    assert op in str(traced.graph)
    torch.testing.assert_close(
        traced.bfloat16()(x.bfloat16()), torchs(x.bfloat16(), (16,), module.weight.bfloat16(), eps=1e-5)
    )
    weight = module.float().weight.detach()
    offset = torch.jit.trace(lambda x: OPS[op](x, weight, None, 1e-5, weight_offset=1.0), x)
    torch.testing.assert_close(offset(2 * x), OPS[op](2 * x, weight, None, 1e-5, weight_offset=1.0))

    rows = [torch.randn(n, 16) for n in (2, 5)]
    for layout in (torch.jagged, torch.strided) if op == "layer_norm" else (torch.jagged,):
        nested = torch.nested.nested_tensor(rows, layout=layout, requires_grad=True)
        for part, row in zip(module(nested).unbind(), rows, strict=True):
            torch.testing.assert_close(part, module(row))
        with pytest.raises(TypeError, match="got a nested tensor"):
            OPS[op](nested, module.weight, weight_offset=1.0)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("cls", [FusedLayerNorm, FusedRMSNorm, FusedAddLayerNorm, FusedAdaptiveRMSNorm])
def test_torch_jit_script(cls):
    """an error that names the module and what to use instead"""
    with pytest.raises(TypeError, match=f"{cls.__name__} cannot be compiled by torch.jit.script: use torch.compile"):
        torch.jit.script(torch.nn.Sequential(cls(16)))


@pytest.mark.parametrize("op", OPS)
def test_onnx_export(op):
    """torch.onnx.export(dynamo=True): PyTorch's operation, which it knows"""
    pytest.importorskip("onnxscript")
    onnx_reference = pytest.importorskip("onnx.reference")
    module, x = {"layer_norm": FusedLayerNorm, "rms_norm": FusedRMSNorm}[op](16, eps=1e-5), torch.randn(4, 16)
    with torch.no_grad():
        module.weight.normal_()
    program = torch.onnx.export(module.eval(), (x,), dynamo=True, verbose=False)
    evaluator = onnx_reference.ReferenceEvaluator(program.model_proto)
    (found,) = evaluator.run(None, {evaluator.input_names[0]: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), module(x), rtol=1e-4, atol=1e-5)
