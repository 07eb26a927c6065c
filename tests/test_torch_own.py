"""torch's own tests of its norms, run on ours.

torch ships the samples and the bad calls that it tests each operator with (OpInfo) and each module (ModuleInfo). Ours
must be as near to torch's result in fp64 as torch.testing.assert_close asks by default, or as torch's is in the same
dtype (which is farther, for a gradient that cancels); and fail where torch's fails.
"""

import copy
import io
import pickle

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

pytest.importorskip("expecttest", reason="torch's own test samples need the package expecttest")
pytest.importorskip("numpy", reason="torch's own test samples need numpy")
from norm_cases import (
    bf16,
    fp16,
    fp32,
    fp64,
    laid_out,
    on_devices,
    same_bits,
)
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402
from torch.testing._internal.common_modules import module_db  # noqa: E402

from fused_layernorm import FusedLayerNorm, FusedRMSNorm, fused_layer_norm, fused_rms_norm  # noqa: E402

DTYPES = (fp16, bf16, fp32, fp64)


def layer_norm(x, normalized_shape, weight=None, bias=None, eps=1e-5):
    return fused_layer_norm(x, weight, bias, eps, normalized_shape=normalized_shape)


def rms_norm(x, normalized_shape, weight=None, eps=None):
    return fused_rms_norm(x, weight, None, eps, normalized_shape=normalized_shape)


OURS = {
    "nn.functional.layer_norm": layer_norm,
    "nn.functional.rms_norm": rms_norm,
    "native_layer_norm": layer_norm,  # torch's returns the statistics too
}
OP_INFOS = {info.name: info for info in op_db if info.name in OURS and not info.variant_test_name}
OUR_MODULES = {torch.nn.LayerNorm: FusedLayerNorm, torch.nn.RMSNorm: FusedRMSNorm}
MODULE_INFOS = {info.module_cls: info for info in module_db if info.module_cls in OUR_MODULES}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_torch_has_what_is_tested_here():
    assert OP_INFOS.keys() == OURS.keys() and MODULE_INFOS.keys() == OUR_MODULES.keys()


def assert_as_good(result, torchs, truth):
    assert result.dtype == torchs.dtype and result.shape == torchs.shape
    rtol, atol = torch.testing._comparison.default_tolerances(result, torchs)
    torchs_error = (torchs.double() - truth).abs().nan_to_num(0.0)
    limit = atol + rtol * truth.abs()
    if truth.numel():
        limit = limit.clamp_min(torchs_error.max())
    good = (result.double() - truth).abs() <= limit
    good |= result.isnan() & truth.isnan()  # a sample has eps = -0.5
    assert good.all(), f"{result}, torch's {torchs}, in fp64 {truth}"


# ---- OpInfo --------------------------------------------------------------------------------------------------------


def samples(name, device, dtype, requires_grad=False):
    """Each sample, and its copy with every tensor non-contiguous."""
    found = [s for s in OP_INFOS[name].sample_inputs(device, dtype, requires_grad=requires_grad)]
    assert len(found) >= 6
    for sample in found:
        yield sample
        yield sample.noncontiguous()


def leaves(sample, dtype=None):
    """The sample's arguments, with tensors of their own to take gradients of."""

    def leaf(value):
        return value.detach().to(dtype or value.dtype).requires_grad_() if isinstance(value, torch.Tensor) else value

    return [leaf(value) for value in (sample.input, *sample.args)]


def tensors(arguments):
    return [value for value in arguments if isinstance(value, torch.Tensor)]


@on_devices("name,dtype", [(name, dtype) for name in OURS for dtype in DTYPES])
def test_samples(device, name, dtype):
    """OpInfo samples, contiguous or not: result and gradients are torch's"""
    for sample in samples(name, device, dtype):
        grad_output = torch.randn_like(sample.input)
        results = []
        for norm, used in ((OURS[name], dtype), (OP_INFOS[name].op, dtype), (OP_INFOS[name].op, fp64)):
            arguments = leaves(sample, used)
            y = norm(*arguments, **sample.kwargs)
            y = y[0] if isinstance(y, tuple) else y
            results.append([y, *torch.autograd.grad(y, tensors(arguments), grad_output.to(used))])
        for result, torchs, truth in zip(*results, strict=True):
            assert_as_good(result, torchs, truth)


@on_devices("name", OURS)
def test_samples_against_numpy(device, name):
    """OpInfo samples: the result is that of torch's own NumPy reference"""

    def plain(value):
        return value.cpu().numpy() if isinstance(value, torch.Tensor) else value

    for sample in samples(name, device, fp64):
        expected = OP_INFOS[name].ref(*map(plain, (sample.input, *sample.args)), **sample.kwargs)
        expected = torch.as_tensor(expected[0] if isinstance(expected, tuple) else expected)
        y = OURS[name](sample.input, *sample.args, **sample.kwargs)
        torch.testing.assert_close(y.cpu(), expected, equal_nan=True)


@on_devices("name", OURS)
@pytest.mark.filterwarnings("ignore:.*torch.jit")  # torch's own decompositions, for forward mode
def test_gradients_of_samples(device, name):
    """OpInfo samples: gradcheck (reverse, forward mode, batched) and gradgradcheck"""
    for sample in samples(name, device, fp64):
        if not sample.input.numel():
            continue
        arguments = leaves(sample)
        positions = [i for i, value in enumerate(arguments) if isinstance(value, torch.Tensor)]

        def norm(*values, arguments=arguments, positions=positions, kwargs=sample.kwargs):
            filled = list(arguments)
            for i, value in zip(positions, values, strict=True):
                filled[i] = value
            return OURS[name](*filled, **kwargs)

        assert gradcheck(norm, tensors(arguments), check_forward_ad=True, check_batched_grad=True)
        assert gradgradcheck(norm, tensors(arguments))


NAMED_BY = {"normalized_shape to be": "normalized_shape", "weight to be": "weight", "bias to be": "bias",
            "normalized_shape=": "normalized_shape"}  # fmt: skip


@on_devices("name", [name for name in OURS if name != "nn.functional.layer_norm"])
def test_error_inputs(device, name):
    """OpInfo bad calls: the same type of error, which names the same argument"""
    found = list(OP_INFOS[name].error_inputs(device))
    assert len(found) >= 3
    for error in found:
        sample = error.sample_input
        with pytest.raises(error.error_type, match=error.error_regex):
            OP_INFOS[name].op(sample.input, *sample.args, **sample.kwargs)
        (argument,) = {ours for torchs, ours in NAMED_BY.items() if torchs in error.error_regex}
        with pytest.raises(error.error_type, match=argument):
            OURS[name](sample.input, *sample.args, **sample.kwargs)


# ---- ModuleInfo ----------------------------------------------------------------------------------------------------


def module_inputs(cls, device, dtype):
    """(constructor's arguments, those of forward) of each of torch's own test modules."""
    info = MODULE_INFOS[cls]
    found = info.module_inputs_func(info, device=device, dtype=dtype, requires_grad=False, training=True)
    assert len(found) >= 5
    for module_input in found:
        yield module_input.constructor_input, module_input.forward_input


def make_pair(cls, constructor, device, dtype):
    """torch's module with random parameters, and ours with the same, loaded from its state_dict."""
    torchs, ours = (
        made(*constructor.args, **constructor.kwargs, device=device, dtype=dtype) for made in (cls, OUR_MODULES[cls])
    )
    for parameter in torchs.parameters():
        torch.nn.init.normal_(parameter)
    assert ours.load_state_dict(torchs.state_dict(), strict=True)
    return torchs, ours


@on_devices("cls,dtype", [(cls, dtype) for cls in OUR_MODULES for dtype in DTYPES])
def test_modules(device, cls, dtype):
    """ModuleInfo: forward, backward, non-contiguous input, repr, state_dict, pickle, torch.save, deepcopy"""
    for constructor, forward in module_inputs(cls, device, dtype):
        torchs, ours = make_pair(cls, constructor, device, dtype)
        assert repr(ours) == f"Fused{torchs!r}"
        (x,) = forward.args
        for layout in ("contiguous", "stepped", "transposed"):
            x = laid_out(x, layout)
            grad_output = torch.randn_like(x)
            results = []
            for module in (ours, torchs, copy.deepcopy(torchs).double()):
                leaf = x.detach().to(fp64 if len(results) == 2 else dtype).requires_grad_()
                y = module(leaf)
                results.append([y, *torch.autograd.grad(y, [leaf, *module.parameters()], grad_output.to(y))])
            for result, expected, truth in zip(*results, strict=True):
                assert_as_good(result, expected, truth)
        y = ours(x)
        saved = io.BytesIO()
        torch.save(ours, saved)
        saved.seek(0)
        copies = copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), torch.load(saved, weights_only=False)
        for twin in copies:
            assert type(twin) is type(ours) and torch.equal(twin(x), y)
            assert all(same_bits(t, ours.state_dict()[name]) for name, t in twin.state_dict().items())
        assert torchs.load_state_dict(ours.state_dict(), strict=True)


@on_devices("cls", OUR_MODULES)
def test_gradients_of_modules(device, cls):
    """ModuleInfo: gradcheck and gradgradcheck of input and parameters"""
    for constructor, forward in module_inputs(cls, device, fp64):
        _, module = make_pair(cls, constructor, device, fp64)
        names = [name for name, _ in module.named_parameters()]
        (x,) = forward.args
        if not x.numel() or len(x) > 4:
            continue

        def norm(x, *parameters, module=module, names=names):
            return torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), (x,))

        inputs = [x.detach().requires_grad_(), *module.parameters()]
        assert gradcheck(norm, inputs)
        assert gradgradcheck(norm, inputs, gen_non_contig_grad_outputs=True)
