"""replace_norms and restore_norms: on plain torch models, and on the norm classes of other packages one by one.

Whole models are in test_models.py.
"""

import copy
import doctest
import functools
import inspect
import pickle
import types

import pytest
import torch
from checks import DEVICES, check_model, loss_and_gradients, package, randomize_norms, skip_earlier_falcon
from fork_server import run_code
from torch import nn

from fused_layernorm import (
    FusedAdaptiveLayerNorm,
    FusedAdaptiveRMSNorm,
    FusedAddLayerNorm,
    FusedAddRMSNorm,
    FusedLayerNorm,
    FusedRMSNorm,
    compat,
    replace_norms,
    restore_norms,
)

# ---------------------------------------------------------------------------------------------------- plain torch


class PlainNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(24, 24)
        self.ln = nn.LayerNorm(24)
        self.no_bias = nn.LayerNorm(24, bias=False)
        self.no_affine = nn.LayerNorm((4, 6), elementwise_affine=False)
        self.rms = nn.RMSNorm(24, eps=1e-3)
        self.rms_default_eps = nn.RMSNorm(6, elementwise_affine=False)

    def forward(self, x):
        x = self.no_bias(self.ln(self.linear(x)))
        x = self.no_affine(x.unflatten(-1, (4, 6)))
        return self.rms(self.rms_default_eps(x).flatten(-2))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_plain_model(dtype, device):
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(1))

    def run(model):
        return model(x.to(model.linear.weight))

    torch.manual_seed(0)
    report = check_model(PlainNet(), run, dtype, device)
    assert len(report.replaced) == 5 and not report.left


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_encoder(norm_first, device):
    """In training the module is called; in eval without gradients torch's fast path reads its weights instead."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(32), enable_nested_tensor=False)
    x = torch.randn(2, 5, 32)
    report = check_model(model, lambda m: m(x.to(m.norm.weight)), torch.float32, device)
    assert len(report.replaced) == 5 and not report.left
    model.eval()
    with torch.no_grad():
        before = model(x.to(device))
        replace_norms(model)
        torch.testing.assert_close(model(x.to(device)), before)


def test_the_report_names_torchs_fast_path():
    """a TransformerEncoderLayer in eval mode without gradients calls no norm: the report says so, where it is true"""
    fast = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    assert "fast path" in str(replace_norms(fast)) and not restore_norms(fast).notes
    assert not replace_norms(nn.TransformerEncoderLayer(32, 4, 64)).notes
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        assert not replace_norms(fast).notes
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_the_report_of_restore_norms_says_restored():
    model = nn.Sequential(nn.LayerNorm(8), nn.RMSNorm(8))
    replace_norms(model)
    assert str(restore_norms(model)).startswith("2 norm modules: 2 restored, 0 left")


def test_exact_classes_only_and_reasons():
    class Channels2d(nn.LayerNorm):  # as in timm and torchvision: the same class family, another forward
        def forward(self, x):
            return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    class MyRMSNorm(nn.Module):
        def forward(self, x):
            return x

    patched = nn.LayerNorm(8)
    patched.forward = types.MethodType(lambda self, x: x, patched)
    parametrized = nn.LayerNorm(8)
    nn.utils.parametrize.register_parametrization(parametrized, "weight", nn.Identity())
    reparametrized = nn.utils.weight_norm(nn.LayerNorm(8), "weight")
    complex_norm = nn.LayerNorm(8, dtype=torch.complex64)
    sharded = nn.LayerNorm(8)
    sharded.weight = type("DTensor", (nn.Parameter,), {})(torch.ones(8))
    modules = {
        "channels": (Channels2d(8), "a subclass of LayerNorm"),
        "mine": (MyRMSNorm(), "unknown numerics"),
        "patched": (patched, "its own forward"),
        "parametrized": (parametrized, "parametrized"),
        "reparametrized": (reparametrized, "not a Parameter of the module"),
        "complex": (complex_norm, "torch.complex64"),
        "sharded": (sharded, "its weight is a DTensor"),
        "batch": (nn.BatchNorm2d(8), "not a LayerNorm or RMSNorm"),
        "group": (nn.GroupNorm(2, 8), "not a LayerNorm or RMSNorm"),
        "instance": (nn.InstanceNorm1d(8), "not a LayerNorm or RMSNorm"),
        "fused": (FusedLayerNorm(8), "fused already"),
        "add": (FusedAddRMSNorm(8), "fused already"),
        "apex": (compat.FastLayerNorm(8), "fused already"),
        "excluded": (nn.LayerNorm(8), "filtered out"),
    }
    model = nn.ModuleDict({name: module for name, (module, _) in modules.items()})
    classes = {name: type(module) for name, module in model.items()}
    report = replace_norms(model, filter=lambda name, module: name != "excluded")
    assert not report.replaced
    reasons = {entry.name: entry.reason for entry in report.left}
    assert reasons.keys() == modules.keys()
    for name, (module, reason) in modules.items():
        assert reason in reasons[name], name
        assert type(module) is classes[name]


def test_sharded_by_fsdp_is_left_and_replaced_before_is_right():
    dist = pytest.importorskip("torch.distributed", reason="needs torch.distributed")
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("needs torch.distributed with gloo")
    fsdp = pytest.importorskip("torch.distributed.fsdp", reason="needs FSDP")
    mesh = pytest.importorskip("torch.distributed.device_mesh", reason="needs device meshes")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        plain = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        late, early = copy.deepcopy(plain), copy.deepcopy(plain)
        replace_norms(early)
        x = torch.randn(3, 8)
        for model in (late, early):
            fsdp.fully_shard(model, mesh=mesh.init_device_mesh("cpu", (1,)))
        report = replace_norms(late)
        assert "its weight is a DTensor" in report.left[0].reason and not report.replaced
        torch.testing.assert_close(early(x), plain(x))
    finally:
        dist.destroy_process_group()


def test_report_text():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(12)], nn.BatchNorm1d(4))
    text = str(replace_norms(model))
    lines = text.splitlines()
    assert lines[0] == "13 norm modules: 12 replaced, 1 left"
    assert lines[1].split() == ["count", "name", "class", "now", "note"]
    assert lines[2].split() == ["12", "*.*", "LayerNorm", "FusedLayerNorm"]
    assert lines[3].split(maxsplit=4) == ["1", "12", "BatchNorm1d", "left", "not a LayerNorm or RMSNorm"]
    assert str(replace_norms(nn.Linear(2, 2))) == "0 norm modules: 0 replaced, 0 left"


def test_model_is_a_norm_itself():
    norm = nn.RMSNorm(8)
    report = replace_norms(norm)
    assert type(norm) is FusedRMSNorm and report.replaced[0].name == "" and "(the model)" in str(report)
    restore_norms(norm)
    assert type(norm) is nn.RMSNorm


def test_idempotent():
    model = PlainNet()
    first, second = replace_norms(model), replace_norms(model)
    assert len(first.replaced) == 5
    assert not second.replaced and {entry.reason for entry in second.left} == {"fused already"}
    restore_norms(model)
    assert not restore_norms(model).entries


def test_attributes_hooks_and_flags_survive():
    norm = nn.LayerNorm(8, eps=1e-3, dtype=torch.bfloat16).eval()
    norm.register_buffer("extra", torch.ones(1))
    norm.weight.requires_grad_(False)
    norm.my_tag = "kept"
    calls = []
    norm.register_forward_pre_hook(lambda m, args: calls.append("pre"))
    norm.register_forward_hook(lambda m, args, out: calls.append("post"))
    norm.register_full_backward_hook(lambda m, grad_in, grad_out: calls.append("backward"))
    before = dict(vars(norm))
    replace_norms(norm)
    assert vars(norm).keys() == before.keys() and all(vars(norm)[key] is value for key, value in before.items())
    norm(torch.randn(2, 8, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    assert calls == ["pre", "post", "backward"]
    assert repr(norm) == repr(nn.LayerNorm(8, eps=1e-3)).replace("LayerNorm", "FusedLayerNorm")
    assert isinstance(norm, nn.LayerNorm) and not norm.training and norm.weight.dtype == torch.bfloat16
    restore_norms(norm)
    assert vars(norm).keys() == before.keys() and type(norm) is nn.LayerNorm


@pytest.mark.parametrize("cls", [nn.LayerNorm, nn.RMSNorm])
def test_numpys_sizes_become_pythons(cls):
    numpy = pytest.importorskip("numpy")
    model, x = nn.Sequential(cls(numpy.prod((2, 4)))), torch.randn(3, 8)
    before = model(x)
    replace_norms(model)
    assert type(model[0].normalized_shape[0]) is int
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), before)


def test_shared_module_and_tied_parameter():
    shared = nn.LayerNorm(8)
    tied = nn.LayerNorm(8)
    tied.weight = shared.weight
    model = nn.ModuleDict({"first": shared, "second": shared, "third": tied})
    report = replace_norms(model, filter=lambda name, module: name != "second")
    assert [(e.name, e.replaced_by) for e in report.entries] == [("first, second", None), ("third", "FusedLayerNorm")]
    assert type(shared) is nn.LayerNorm  # one of its names was excluded
    replace_norms(model)
    assert model["first"] is model["second"] and type(shared) is FusedLayerNorm
    assert tied.weight is shared.weight


def test_optimizer_made_before_goes_on():
    torch.manual_seed(0)
    model = PlainNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replace_norms(model)
    before = model.ln.weight.detach().clone()
    # Not a sum of squares: after an RMSNorm that is a constant, and its gradient is nothing but rounding.
    loss_and_gradients(model, lambda model: model(torch.randn(4, 24)))
    optimizer.step()
    assert not torch.equal(model.ln.weight, before)


def test_meta_module_is_replaced_and_materialized():
    model = nn.LayerNorm(8, device="meta")
    assert replace_norms(model).replaced
    model = model.to_empty(device="cpu")
    model.reset_parameters()
    x = torch.randn(3, 8)
    torch.testing.assert_close(model(x), nn.functional.layer_norm(x, (8,)))


def test_filter_that_raises_changes_nothing():
    model = PlainNet()

    def refuse(name, module):
        if name == "rms":
            raise RuntimeError("not this one")
        return True

    with pytest.raises(RuntimeError, match="not this one"):
        replace_norms(model, filter=refuse)
    assert type(model.ln) is nn.LayerNorm


@pytest.mark.parametrize("function", [replace_norms, restore_norms])
def test_wrong_argument(function):
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, got dict"):
        function({})


@pytest.mark.parametrize("make_copy", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_of_plain_model(make_copy):
    model = PlainNet()
    replace_norms(model)
    twin = make_copy(model)
    x = torch.randn(4, 24)
    assert type(twin.ln) is FusedLayerNorm and type(twin.rms) is FusedRMSNorm
    assert torch.equal(twin(x), model(x))
    restore_norms(twin)
    assert type(twin.ln) is nn.LayerNorm


# ------------------------------------------------------------------------------- classes of other packages, one by one

# One class for each formula of replace._FORMULAS: its module (or its family in transformers), class, arguments after
# the size (or with one), and how far the result is from the original's, as the report says it: "exact" is the same but
# for float32 rounding.
NORM_CLASSES = [
    ("llama", "LlamaRMSNorm", {}, "1 ulp"),
    ("qwen3", "Qwen3RMSNorm", {}, "1 ulp"),
    ("llama4", "Llama4TextRMSNorm", {}, "1 ulp"),
    ("t5", "T5LayerNorm", {}, "1 ulp"),
    ("olmo2", "Olmo2RMSNorm", {}, "exact"),
    ("gpt_oss", "GptOssRMSNorm", {}, "exact"),
    ("helium", "HeliumRMSNorm", {}, "exact"),
    ("moshi", "MoshiRMSNorm", {}, "exact"),
    ("gemma", "GemmaRMSNorm", {}, "exact"),
    ("gemma3", "Gemma3RMSNorm", {}, "exact"),
    ("gemma4", "Gemma4RMSNorm", {}, "exact"),
    ("gemma4", "Gemma4RMSNorm", {"with_scale": False}, "exact"),
    ("llama4", "Llama4TextL2Norm", {"size": None}, "exact"),
    ("qwen4_exp", "Qwen4ExpTextRMSNorm", {}, "exact"),
    ("qwen4_exp", "Qwen4ExpTextRMSNorm", {"group_size": 24}, "exact"),
    ("mamba2", "MambaRMSNormGated", {"group_size": 72}, "1 ulp"),
    ("bamba", "BambaRMSNormGated", {"group_size": 36}, "1 ulp"),
    ("zamba2", "Zamba2RMSNormGated", {"group_size": 24}, "1 ulp"),
    ("granitemoehybrid", "GraniteMoeHybridRMSNormGated", {"group_size": 24}, "1 ulp"),
    ("nemotron_h", "NemotronHRMSNormGated", {"group_size": 24}, "1 ulp"),
    ("qwen3_next", "Qwen3NextRMSNormGated", {}, "2 ulp"),
    ("qwen3_5", "Qwen3_5RMSNormGated", {}, "2 ulp"),
    ("kimi_linear", "KimiLinearRMSNormGated", {}, "exact"),
    ("falcon_h1", "FalconH1RMSNormGated", {}, "exact"),
    ("falcon_h1", "FalconH1RMSNormGated", {"n_groups": 3}, "exact"),
    ("falcon_h1", "FalconH1RMSNormGated", {"n_groups": 3, "norm_before_gate": False}, "exact"),
    ("cohere", "CohereLayerNorm", {}, "exact"),
    ("cohere", "CohereLayerNorm", {"size": (5, 72)}, "exact"),
    ("chameleon", "ChameleonLayerNorm", {"size": (5, 72), "eps": 0.1}, "2 ulp of what bias is added to"),
    ("deberta", "DebertaLayerNorm", {}, "2 ulp of what bias is added to"),
    ("convnext", "ConvNextLayerNorm", {"data_format": "channels_first"}, "exact"),
    ("convnext", "ConvNextLayerNorm", {"data_format": "channels_last"}, "exact"),
    ("eomt", "EomtLayerNorm2d", {}, "exact"),
    ("torchvision.models.convnext", "LayerNorm2d", {}, "exact"),
    ("timm.layers", "LayerNorm", {}, "exact"),
    ("timm.layers", "LayerNorm", {"affine": False}, "exact"),
    ("timm.layers", "LayerNormFp32", {}, "exact"),
    ("timm.layers", "LayerNorm2d", {}, "exact"),
    ("timm.layers", "LayerNorm2dFp32", {}, "exact"),
    ("timm.layers", "RmsNorm", {}, "exact"),
    ("timm.layers", "RmsNorm", {"affine": False}, "exact"),
    ("timm.layers", "RmsNormFp32", {}, "exact"),
    ("diffusers.models.normalization", "FP32LayerNorm", {}, "exact"),
    ("diffusers.models.normalization", "RMSNorm", {}, "1 ulp"),
    ("diffusers.models.normalization", "RMSNorm", {"elementwise_affine": False}, "1 ulp"),
    ("diffusers.models.normalization", "RMSNorm", {"bias": True}, "2 ulp of what bias is added to"),
]


def norm_class(family, name):
    module = package(family if "." in family else f"transformers.models.{family}.modeling_{family}")
    if not hasattr(module, name):
        pytest.skip(f"the {module.__name__} installed has no {name}")
    cls = getattr(module, name)
    skip_earlier_falcon(cls)
    return cls


def ulp(values, dtype):
    """Distance from a value to the next one in dtype."""
    _, exponent = torch.frexp(values.double())
    return torch.ldexp(torch.full_like(values.double(), torch.finfo(dtype).eps), exponent - 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("x_dtype, weight_dtype", [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),  # goes to the original
    (torch.float64, torch.float32),  # goes to the original
], ids=lambda dtype: str(dtype)[6:])  # fmt: skip
@pytest.mark.parametrize("family, name, options, agreement", NORM_CLASSES, ids=lambda value: str(value))
def test_known_norm(family, name, options, agreement, x_dtype, weight_dtype, device):
    cls = norm_class(family, name)
    options = {"size": 72, "eps": 1e-5} | options
    if "group_size" in options and "group_size" not in inspect.signature(cls).parameters:  # transformers 5.17
        del options["group_size"]
    size = options.pop("size")
    original = cls(*[size] if size else [], **options)
    original = randomize_norms(original).to(device=device, dtype=weight_dtype)
    fused = copy.deepcopy(original)
    report = replace_norms(fused)
    assert [entry.replaced_by for entry in report.entries] == [f"Fused{name}"]
    note = report.entries[0].reason
    assert f"up to {agreement} from the original" in note if agreement != "exact" else not note
    assert isinstance(fused, cls) and f"Fused{name}" in repr(fused)

    generator = torch.Generator().manual_seed(2)
    x = (3 * torch.randn(2, 5, 9, 72, generator=generator)).to(device=device, dtype=x_dtype)
    x = x.transpose(1, 2)  # strided, as query and key heads are
    x = x[0] if "Falcon" in name else x  # which takes three dimensions
    channels_first = "2d" in name or options.get("data_format") == "channels_first"
    if channels_first:
        x = x.permute(0, 3, 1, 2)
    inputs = [[x.detach().requires_grad_()] for _ in range(2)]
    if "Gated" in name:
        gate = (2 * torch.randn(*x.shape, 2, generator=generator))[..., 0].to(x)  # strided, part of a projection
        for each in inputs:
            each.append(gate.detach().requires_grad_())
    try:
        expected = original(*inputs[0])
    except RuntimeError as error:
        assert x_dtype != weight_dtype, "the original takes equal dtypes"
        pytest.skip(f"the original does not take this mix: {error}")
    actual = fused(*inputs[1])
    if channels_first:
        assert actual.stride() == expected.stride()
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    # What the original rounds to 16 bits on the way: the result, or that without bias.
    has_bias = agreement.endswith("added to")
    rounded = expected.double() - original.bias.double() if has_bias else expected.double()
    # Float32 rounding: the statistics of 72 values, four products, the mean's cancellation (hence the row's largest).
    # In 16 bits its only trace is a tie broken the other way: 1 ulp. With float32 output a double rounding (Llama,
    # 16-bit x) shows as half an ulp of x's dtype.
    rounding = (
        8 * torch.finfo(torch.float32).eps * expected.double().abs().amax(1 if channels_first else -1, keepdim=True)
    )
    if actual.dtype in (torch.bfloat16, torch.float16):
        rounding = rounding + ulp(torch.maximum(expected.abs(), actual.abs()), actual.dtype)
        if agreement[0] == "2":
            rounding = rounding + (2 if has_bias else 1) * ulp(rounded, actual.dtype)
    elif agreement != "exact" and x_dtype != expected.dtype:
        rounding = rounding + torch.finfo(x_dtype).eps / 2 * rounded.abs()
    assert bool(((actual.double() - expected.double()).abs() <= rounding).all())

    grad_output = torch.randn(expected.shape, generator=generator).to(expected)
    expected.backward(grad_output)
    actual.backward(grad_output)
    tolerance = 4 * max(torch.finfo(t).eps for t in (x_dtype, weight_dtype, torch.float32) if t.itemsize < 8)
    pairs = [*zip(*inputs[::-1], strict=True), *zip(fused.parameters(), original.parameters(), strict=True)]
    for ours, theirs in pairs:
        assert ours.grad.dtype == theirs.grad.dtype
        difference = (ours.grad.double() - theirs.grad.double()).norm()
        assert difference <= tolerance * theirs.grad.double().norm()

    restore_norms(fused)
    assert type(fused) is cls and torch.equal(fused(*inputs[1]), original(*inputs[0]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("x_dtype, weight_dtype", [
    (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
], ids=lambda dtype: str(dtype)[6:])  # fmt: skip
@pytest.mark.parametrize("family, name, options", [
    (family, name, options) for family, name, options, agreement in NORM_CLASSES
    if "Gated" not in name and agreement != "exact" and name.endswith("RMSNorm") or name == "T5LayerNorm"
], ids=lambda value: str(value))  # fmt: skip
def test_rounding_of_the_model(family, name, options, x_dtype, weight_dtype, device):
    """rounding="model": the roundings of the class, which only the last bits of the statistics change"""
    original = randomize_norms(norm_class(family, name)(72, eps=1e-5, **options)).to(device=device, dtype=weight_dtype)
    x = (3 * torch.randn(999, 72, generator=torch.Generator().manual_seed(2))).to(device=device, dtype=x_dtype)
    expected = original(x)
    differ = {}
    for rounding in ("torch", "model"):
        fused = copy.deepcopy(original)
        report = replace_norms(fused, rounding=rounding)
        assert ("rounds where the original does" in report.entries[0].reason) == (rounding == "model")
        y = fused(x)
        assert y.dtype == expected.dtype
        differ[rounding] = (y != expected).double().mean().item()
        for copied in (copy.copy(fused), copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
            assert torch.equal(copied(x), y)
        restore_norms(fused)
        assert torch.equal(fused(x), expected)
    if expected.dtype.itemsize == 2:
        assert differ["model"] < 1e-3 and (differ["torch"] > 0.05 or original.weight is None)


@pytest.mark.parametrize("device", DEVICES)
def test_logits_with_the_rounding_of_the_model(device):
    """of a small Llama in bfloat16: with its roundings most logits keep their bits, with one rounding few do"""
    transformers = package("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=500, num_key_value_heads=4, **sizes)
    model = randomize_norms(transformers.LlamaForCausalLM(config)).to(device, torch.bfloat16).eval()
    tokens = torch.randint(500, (2, 64), device=device)
    equal = {}
    with torch.no_grad():
        expected = model(tokens).logits
        for rounding in ("torch", "model"):
            replace_norms(model, rounding=rounding)
            equal[rounding] = (model(tokens).logits == expected).double().mean().item()
            restore_norms(model)
    # An element that rounds the other way changes its token and, a little, those behind it
    assert equal["model"] > 0.4 > 0.3 > equal["torch"], equal  # CPU, four seeds: 0.70 to 1, 0.19 to 0.21


def test_rounding_of_a_model_is_checked():
    with pytest.raises(ValueError, match='rounding must be "torch" or "model", got \'llama\''):
        replace_norms(torch.nn.LayerNorm(4), rounding="llama")


# Formulas of classes that the newest transformers no longer has in that form: {fingerprint: the version that has it}.
OLDER_FORMULAS = {"0980ad20fbe5": "5.17"}


def test_every_formula_has_a_test():
    """Each formula is tested, but those that only another version of transformers has."""
    from fused_layernorm.replace import _FORMULAS, _class_fingerprint

    tested = {_class_fingerprint(norm_class(family, name)) for family, name, _, _ in NORM_CLASSES}
    assert tested <= set(_FORMULAS)
    assert set(_FORMULAS) - tested <= set(OLDER_FORMULAS)


@pytest.mark.parametrize("make_copy", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_of_a_transformers_norm(make_copy):
    norm = randomize_norms(norm_class("llama", "LlamaRMSNorm")(16))
    replace_norms(norm)
    twin = make_copy(norm)
    x = torch.randn(3, 16)
    assert type(twin) is type(norm) and torch.equal(twin(x), norm(x))
    assert twin.state_dict().keys() == norm.state_dict().keys()


def test_pickle_loads_in_a_fresh_process(tmp_path):
    norm = randomize_norms(norm_class("llama", "LlamaRMSNorm")(16))
    replace_norms(norm)
    path = tmp_path / "norm.pt"
    x = torch.randn(3, 16)
    torch.save((norm, x, norm(x).detach()), path)
    code = (
        "import sys, torch; norm, x, y = torch.load(sys.argv[1], weights_only=False);"
        "assert type(norm).__name__ == 'FusedLlamaRMSNorm'; assert torch.equal(norm(x), y)"
    )
    done = run_code(code, path)
    assert done.returncode == 0, done.stderr


def test_compiles_in_one_graph():
    norm = randomize_norms(norm_class("llama", "LlamaRMSNorm")(16))
    x = torch.randn(3, 16)
    expected = norm(x)
    replace_norms(norm)
    compiled = torch.compile(norm, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), expected)


def test_restore_leaves_a_forward_of_its_own():
    """what was put around the fused forward (accelerate's hooks) would call it on the original class"""
    model = nn.Sequential(nn.LayerNorm(4), nn.LayerNorm(4))
    replace_norms(model)
    fused = model[0].forward
    model[0].forward = lambda x: fused(x)
    report = restore_norms(model)
    assert type(model[0]) is FusedLayerNorm and type(model[1]) is nn.LayerNorm
    assert report.entries[0].replaced_by is None and "its own forward" in str(report)
    model(torch.randn(2, 4))


def test_symbolic_trace_of_a_known_norm():
    """torch.fx sees the original's operations"""
    timm = pytest.importorskip("timm")
    model = nn.Sequential(timm.layers.LayerNorm2d(8))
    x = torch.randn(2, 8, 3, 3)
    wanted = model(x)
    assert replace_norms(model).replaced
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), wanted)


@pytest.mark.parametrize("cls,inputs", [
    (FusedLayerNorm, 1), (FusedRMSNorm, 1), (FusedAddLayerNorm, 2), (FusedAddRMSNorm, 2), (FusedAdaptiveLayerNorm, 3),
    (FusedAdaptiveRMSNorm, 3),
])  # fmt: skip
def test_symbolic_trace(cls, inputs):
    """torch.fx: a norm is one call in the graph, and computes what it did"""
    given = torch.randn(inputs, 2, 3, 8).unbind()
    module = cls(8)
    traced = torch.fx.symbolic_trace(module)
    assert [node.op for node in traced.graph.nodes].count("call_function") == 1
    found, wanted = traced(*given), module(*given)
    for one, two in zip(*((r if isinstance(r, tuple) else (r,)) for r in (found, wanted)), strict=True):
        assert torch.equal(one, two)


def test_a_weight_that_is_broadcast_goes_to_the_original():
    """one head of x for all of weight's: Cohere's (heads, head_dim)"""
    norm = randomize_norms(norm_class("cohere", "CohereLayerNorm")((4, 8)))
    x = torch.randn(3, 1, 8)
    expected = norm(x)
    assert replace_norms(norm).replaced
    assert torch.equal(norm(x), expected)


@pytest.mark.parametrize("options", [{"n_groups": 2}, {"n_groups": 1, "norm_before_gate": False}], ids=str)
def test_without_a_gate(options):
    norm = randomize_norms(norm_class("falcon_h1", "FalconH1RMSNormGated")(16, **options))
    x, gate = torch.randn(2, 3, 5, 16).unbind()
    plain, gated = norm(x), norm(x, gate)
    assert replace_norms(norm).replaced
    torch.testing.assert_close(norm(x), plain)
    torch.testing.assert_close(norm(x, None), plain)
    torch.testing.assert_close(norm(gate=gate, hidden_states=x), gated)
    assert torch.equal(norm(x, gate[:1]), norm.original_class.forward(norm, x, gate[:1]))  # broadcast: the original


def test_a_gate_that_is_needed_and_an_unknown_activation():
    norm = norm_class("qwen3_next", "Qwen3NextRMSNormGated")(16)
    norm.activation = "mish"
    assert "'mish'" in replace_norms(norm).left[0].reason
    norm.activation = "swish"
    assert replace_norms(norm).replaced
    for arguments in ((), (None,), (torch.ones(16), 0)):
        with pytest.raises((TypeError, AttributeError)):  # those of the original
            norm(torch.randn(3, 16), *arguments)


def test_several_normalized_dimensions():
    norm = randomize_norms(norm_class("diffusers.models.normalization", "FP32LayerNorm")((4, 6)))
    x = torch.randn(5, 3, 4, 6)
    expected = norm(x)
    assert replace_norms(norm).replaced
    torch.testing.assert_close(norm(x), expected)


def test_timm_fast_norm_is_left():
    norm = norm_class("timm.layers", "LayerNorm")(8)
    norm._fast_norm = True  # as after timm.layers.set_fast_norm()
    assert "set_fast_norm" in replace_norms(norm).left[0].reason


def test_transformers_can_be_left_out():
    model = nn.Sequential(norm_class("llama", "LlamaRMSNorm")(8), nn.LayerNorm(8))
    report = replace_norms(model, transformers=False)
    assert [entry.reason for entry in report.left] == ["transformers=False"]
    assert [entry.module_class for entry in report.replaced] == ["LayerNorm"]


# Classes written here that claim to come from transformers: code decides, neither module nor name.


class RenamedNorm(nn.Module):
    """The Llama formula with other names for everything local, a comment and annotations."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = x.dtype  # remembered
        x = x.to(torch.float32)
        mean_square = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(mean_square + self.variance_epsilon)
        return self.weight * x.to(kind)


class LlamaRMSNorm(RenamedNorm):
    """A well-known name on another formula: the last line."""

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return (1 + self.weight) * hidden_states.to(input_dtype)


class WrappedNorm(RenamedNorm):
    @functools.wraps(RenamedNorm.forward)
    def forward(self, x):
        return 2 * RenamedNorm.forward(self, x)


class CalledNorm(RenamedNorm):
    def __call__(self, x):
        return 2 * super().__call__(x)


class SuperNorm(RenamedNorm):
    """ConvNeXt's LayerNorm as text, but super() is not torch's LayerNorm."""

    def forward(self, features):
        if self.data_format == "channels_first":
            features = features.permute(0, 2, 3, 1)
            features = super().forward(features)
            features = features.permute(0, 3, 1, 2)
        else:
            features = super().forward(features)
        return features


NoSourceNorm = type("NoSourceNorm", (RenamedNorm,), {"forward": eval("lambda self, x: x")})

for _cls in (RenamedNorm, LlamaRMSNorm, WrappedNorm, CalledNorm, SuperNorm, NoSourceNorm):
    _cls.__module__ = "transformers.models.invented.modeling_invented"


def test_code_decides_not_the_name():
    norm = RenamedNorm(8)
    x = torch.randn(3, 8)
    expected = norm(x)
    assert replace_norms(norm).replaced
    torch.testing.assert_close(norm(x), expected)


@pytest.mark.parametrize("cls", [LlamaRMSNorm, WrappedNorm, CalledNorm, SuperNorm, NoSourceNorm])
def test_changed_code_is_left(cls):
    norm = cls(8)
    (entry,) = replace_norms(norm).entries
    assert entry.replaced_by is None and entry.reason.startswith("unknown numerics (fingerprint")
    assert type(norm) is cls


def test_docstring_example():
    from fused_layernorm import replace

    assert doctest.testmod(replace).failed == 0
