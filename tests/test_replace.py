"""replace_norms and restore_norms: on plain torch models, on transformers' norm classes one by one, on whole models."""

import copy
import doctest
import functools
import importlib
import pickle
import subprocess
import sys
import types

import pytest
import torch
from torch import nn

from fused_layernorm import FusedLayerNorm, FusedRMSNorm, replace_norms, restore_norms

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")],
    ),
]
NEEDS_TRANSFORMERS = "needs the package transformers"


def randomize_norms(model, seed=0):
    """Give every norm parameter values of its own: a weight of ones would hide a weight that is not used."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if "norm" in type(module).__name__.lower():
                for parameter in module.parameters(recurse=False):
                    noise = 0.3 * torch.randn(parameter.shape, generator=generator)
                    parameter += noise.to(parameter)
    return model


def loss_and_gradients(model, run):
    """The output of run(model), and the gradients of all parameters for a loss that weighs every output differently."""
    model.zero_grad()
    output = run(model)
    direction = torch.linspace(-1, 1, output.numel(), device=output.device).view(output.shape)
    (output.float() * direction).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return output.detach(), gradients


def assert_no_worse(actual, original, reference, what, floor=0.0):
    """Against a more precise reference, at most twice the error of the original (in the 2-norm), and no NaN.

    The term added covers an original that happens to hit the reference: 4 machine epsilons of the tensor's size, or of
    `floor` for a tensor that is nothing but rounding (the gradient of an attention key's bias is 0 in theory).
    """
    assert actual.dtype == original.dtype and actual.shape == original.shape, what
    error, allowed = ((t.double() - reference.double()).norm().item() for t in (actual, original))
    rounding = 4 * torch.finfo(actual.dtype).eps * max(reference.double().norm().item(), floor)
    assert error <= 2 * allowed + rounding, f"{what}: {error:.3g}, original {allowed:.3g}, rounding {rounding:.3g}"


def check_model(model, run, dtype, device, is_replaced):
    """Outputs and gradients before and after replace_norms, and the exact original after restore_norms."""
    model = randomize_norms(model).to(device=device, dtype=dtype).eval()
    wider = torch.float64 if dtype == torch.float32 else torch.float32
    reference = loss_and_gradients(copy.deepcopy(model).to(wider), run)
    original = loss_and_gradients(model, run)
    classes = [type(m) for m in model.modules()]
    parameters = dict(model.named_parameters())
    state_keys = list(model.state_dict())

    report = replace_norms(model)
    assert not report.left, str(report)
    assert {entry.module_class for entry in report.replaced} == is_replaced
    assert dict(model.named_parameters()).keys() == parameters.keys()
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert list(model.state_dict()) == state_keys
    fused = loss_and_gradients(model, run)
    assert_no_worse(fused[0], original[0], reference[0], "output")
    assert fused[1].keys() == original[1].keys()
    floor = 0.1 * max(gradient.double().norm().item() for gradient in reference[1].values())
    for name, gradient in fused[1].items():
        assert_no_worse(gradient, original[1][name], reference[1][name], f"gradient of {name}", floor)

    assert len(restore_norms(model).replaced) == len(report.replaced)
    assert [type(m) for m in model.modules()] == classes
    assert torch.equal(run(model), original[0])


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
    check_model(PlainNet(), run, dtype, device, {"LayerNorm", "RMSNorm"})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_encoder(norm_first, device):
    """In training the module is called; in eval without gradients torch's fast path reads its weights instead."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(32), enable_nested_tensor=False)
    x = torch.randn(2, 5, 32)
    check_model(model, lambda m: m(x.to(m.norm.weight)), torch.float32, device, {"LayerNorm"})
    model.eval()
    with torch.no_grad():
        before = model(x.to(device))
        replace_norms(model)
        torch.testing.assert_close(model(x.to(device)), before)


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
        "patched": (patched, "a forward of its own"),
        "parametrized": (parametrized, "parametrized"),
        "reparametrized": (reparametrized, "not a Parameter of its own"),
        "complex": (complex_norm, "torch.complex64"),
        "sharded": (sharded, "its weight is a DTensor"),
        "batch": (nn.BatchNorm2d(8), "not a LayerNorm or RMSNorm"),
        "group": (nn.GroupNorm(2, 8), "not a LayerNorm or RMSNorm"),
        "instance": (nn.InstanceNorm1d(8), "not a LayerNorm or RMSNorm"),
        "fused": (FusedLayerNorm(8), "fused already"),
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


# ------------------------------------------------------------------------------------- transformers: single classes

# One class for each formula of replace._FORMULAS: family, class, arguments after the size, whether the result is the
# same but for float32 rounding ("exact") or rounds once where the original rounds twice ("1 ulp").
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
    ("llama4", "Llama4TextL2Norm", None, "exact"),
    ("cohere", "CohereLayerNorm", {}, "exact"),
]


def norm_class(family, name):
    pytest.importorskip("transformers", reason=NEEDS_TRANSFORMERS)
    try:
        return getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)
    except (ImportError, AttributeError):
        pytest.skip(f"the transformers installed has no {name}")


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
def test_transformers_norm(family, name, options, agreement, x_dtype, weight_dtype, device):
    cls = norm_class(family, name)
    original = cls(eps=1e-5) if options is None else cls(72, eps=1e-5, **options)
    original = randomize_norms(original).to(device=device, dtype=weight_dtype)
    fused = copy.deepcopy(original)
    report = replace_norms(fused)
    assert [entry.replaced_by for entry in report.entries] == [f"Fused{name}"]
    assert ("1 ulp" in report.entries[0].reason) == (agreement == "1 ulp")
    assert isinstance(fused, cls) and f"Fused{name}" in repr(fused)

    generator = torch.Generator().manual_seed(2)
    x = (3 * torch.randn(2, 5, 9, 72, generator=generator)).to(device=device, dtype=x_dtype)
    inputs = [x.transpose(1, 2).detach().requires_grad_() for _ in range(2)]  # strided, as query and key heads are
    expected, actual = original(inputs[0]), fused(inputs[1])
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    # Float32 rounding: the statistics of 72 values, four products, the mean's cancellation (hence the row's largest).
    # In 16 bits its only trace is a tie broken the other way: 1 ulp. With float32 output a double rounding (Llama,
    # 16-bit x) shows as half an ulp of x's dtype.
    rounding = 8 * torch.finfo(torch.float32).eps * expected.double().abs().amax(-1, keepdim=True)
    if actual.dtype in (torch.bfloat16, torch.float16):
        rounding = rounding + ulp(torch.maximum(expected.abs(), actual.abs()), actual.dtype)
    elif agreement == "1 ulp" and x_dtype != expected.dtype:
        rounding = rounding + torch.finfo(x_dtype).eps / 2 * expected.double().abs()
    assert bool(((actual.double() - expected.double()).abs() <= rounding).all())

    grad_output = torch.randn(expected.shape, generator=generator).to(expected)
    expected.backward(grad_output)
    actual.backward(grad_output)
    tolerance = 4 * max(torch.finfo(t).eps for t in (x_dtype, weight_dtype, torch.float32) if t.itemsize < 8)
    pairs = [(inputs[1], inputs[0]), *zip(fused.parameters(), original.parameters(), strict=True)]
    for ours, theirs in pairs:
        assert ours.grad.dtype == theirs.grad.dtype
        difference = (ours.grad.double() - theirs.grad.double()).norm()
        assert difference <= tolerance * theirs.grad.double().norm()

    restore_norms(fused)
    assert type(fused) is cls and torch.equal(fused(inputs[1]), original(inputs[0]))


def test_every_formula_has_a_test():
    pytest.importorskip("transformers", reason=NEEDS_TRANSFORMERS)
    from fused_layernorm.replace import _FORMULAS, _class_fingerprint

    tested = set()
    for family, name, _, _ in NORM_CLASSES:
        try:
            tested.add(_class_fingerprint(norm_class(family, name)))
        except pytest.skip.Exception:
            pytest.skip(f"this version of transformers has no {name}")
    assert tested == set(_FORMULAS)


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
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)


def test_compiles_in_one_graph():
    norm = randomize_norms(norm_class("llama", "LlamaRMSNorm")(16))
    x = torch.randn(3, 16)
    expected = norm(x)
    replace_norms(norm)
    compiled = torch.compile(norm, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), expected)


def test_two_dimensional_weight_is_left():
    """Cohere's query and key norms scale (heads, head_dim) but normalize head_dim only."""
    norm = norm_class("cohere", "CohereLayerNorm")((4, 8))
    assert "shape (4, 8)" in replace_norms(norm).left[0].reason


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


NoSourceNorm = type("NoSourceNorm", (RenamedNorm,), {"forward": eval("lambda self, x: x")})

for _cls in (RenamedNorm, LlamaRMSNorm, WrappedNorm, CalledNorm, NoSourceNorm):
    _cls.__module__ = "transformers.models.invented.modeling_invented"


def test_code_decides_not_the_name():
    norm = RenamedNorm(8)
    x = torch.randn(3, 8)
    expected = norm(x)
    assert replace_norms(norm).replaced
    torch.testing.assert_close(norm(x), expected)


@pytest.mark.parametrize("cls", [LlamaRMSNorm, WrappedNorm, CalledNorm, NoSourceNorm])
def test_changed_code_is_left(cls):
    norm = cls(8)
    (entry,) = replace_norms(norm).entries
    assert entry.replaced_by is None and entry.reason.startswith("unknown numerics (fingerprint")
    assert type(norm) is cls


# --------------------------------------------------------------------------------------- transformers: whole models

SMALL = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "vocab_size": 50,
    "pad_token_id": 0,
}
ENCODER = {key: SMALL[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
# Without T5's ReLU: where a value near 0 changes sign by rounding, its gradient comes or goes as a whole.
T5 = {"d_model": 48, "d_kv": 12, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 50,
      "feed_forward_proj": "gated-gelu"}  # fmt: skip
WHISPER = {"d_model": 48, "num_mel_bins": 8, "vocab_size": 50, "max_source_positions": 10, "max_target_positions": 12,
           "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
           "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
           "decoder_start_token_id": 1}  # fmt: skip
MODELS = [
    ("Llama", "LlamaModel", SMALL, {"LlamaRMSNorm"}),
    ("Qwen3", "Qwen3Model", SMALL, {"Qwen3RMSNorm"}),  # query and key norms on strided heads
    ("Olmo2", "Olmo2Model", {k: v for k, v in SMALL.items() if k != "head_dim"}, {"Olmo2RMSNorm"}),
    ("Gemma", "GemmaModel", SMALL, {"GemmaRMSNorm"}),
    ("Cohere", "CohereModel", {k: v for k, v in SMALL.items() if k != "head_dim"}, {"CohereLayerNorm"}),
    ("T5", "T5EncoderModel", T5, {"T5LayerNorm"}),
    ("Bert", "BertModel", ENCODER | {"vocab_size": 50}, {"LayerNorm"}),
    ("ViT", "ViTModel", ENCODER | {"image_size": 16, "patch_size": 8}, {"LayerNorm"}),
    ("Whisper", "WhisperModel", WHISPER, {"LayerNorm"}),
]


def run_model(model):
    device, dtype = next((p.device, p.dtype) for p in model.parameters())
    ids = torch.arange(14, device=device).remainder(9).view(2, 7) + 3
    generator = torch.Generator().manual_seed(3)
    if "ViT" in type(model).__name__:
        inputs = {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator).to(device, dtype)}
    elif "Whisper" in type(model).__name__:
        features = torch.randn(2, 8, 20, generator=generator).to(device, dtype)
        inputs = {"input_features": features, "decoder_input_ids": ids}
    else:
        inputs = {"input_ids": ids}
    return model(**inputs).last_hidden_state


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family, name, config, classes", MODELS, ids=[name for _, name, _, _ in MODELS])
def test_transformers_model(family, name, config, classes, dtype, device):
    transformers = pytest.importorskip("transformers", reason=NEEDS_TRANSFORMERS)
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, f"{family}Config")(**config))
    check_model(model, run_model, dtype, device, classes)


def test_generation_is_the_same():
    transformers = pytest.importorskip("transformers", reason=NEEDS_TRANSFORMERS)
    torch.manual_seed(0)
    model = randomize_norms(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))).eval()
    ids = torch.tensor([[5, 6, 7]])
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "attention_mask": torch.ones_like(ids)}
    expected = model.generate(ids, **options)
    replace_norms(model)
    assert torch.equal(model.generate(ids, **options), expected)


def test_package_does_not_import_transformers():
    code = "import sys, fused_layernorm; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_docstring_example():
    from fused_layernorm import replace

    assert doctest.testmod(replace).failed == 0
