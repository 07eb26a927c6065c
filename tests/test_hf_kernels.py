"""fused_layernorm.integrations.hf_kernels: kernelize() of the `kernels` package on a tiny Llama, without the Hub."""

import copy
import warnings

import pytest
import torch
from checks import DEVICES, assert_no_worse, loss_and_gradients, package, randomize_norms
from torch import nn

from fused_layernorm import replace_norms

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of versions that do not fit, which has a test below
    from fused_layernorm.integrations import hf_kernels
    from fused_layernorm.integrations.hf_kernels import KERNEL_MAPPING, RMSNorm, RMSNormGated

SMALL = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 50, "pad_token_id": 0}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def kernels():
    return package("kernels")


@pytest.fixture
def model(monkeypatch):
    """A Llama whose norms kernelize() finds.

    transformers marks them itself, with the versions of `kernels` that it accepts; marking them again changes nothing.
    """
    transformers = package("transformers")
    norm = package("transformers.models.llama.modeling_llama").LlamaRMSNorm
    monkeypatch.setattr(norm, "kernel_layer_name", "RMSNorm", raising=False)
    torch.manual_seed(0)
    return randomize_norms(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)))


def run(model):
    ids = torch.arange(14, device=model.device).remainder(9).view(2, 7) + 3
    return model(input_ids=ids).logits


def is_ours(module):
    ours = (RMSNorm.forward, RMSNormGated.forward)
    return getattr(vars(module).get("forward"), "__func__", None) in ours


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode, dtype", [
    ("INFERENCE", torch.float32), ("TRAINING", torch.float32), ("INFERENCE", torch.bfloat16),
    ("TRAINING", torch.bfloat16), ("INFERENCE|TORCH_COMPILE", torch.float32), ("TRAINING|TORCH_COMPILE", torch.float32),
], ids=str)  # fmt: skip
def test_llama(kernels, model, mode, dtype, device):
    modes = [kernels.Mode[name] for name in mode.split("|")]
    model = model.to(device, dtype).train("TRAINING" in mode)
    reference = loss_and_gradients(
        copy.deepcopy(model).to(torch.float64 if dtype == torch.float32 else torch.float32), run
    )
    original = loss_and_gradients(model, run)
    replaced = copy.deepcopy(model)
    replace_norms(replaced)

    with kernels.use_kernel_mapping(KERNEL_MAPPING, inherit_mapping=False):
        kernels.kernelize(model, mode=modes[0] if len(modes) == 1 else modes[0] | modes[1])
    assert sum(map(is_ours, model.modules())) == 5
    assert torch.equal(run(model), run(replaced))
    if "TORCH_COMPILE" in mode:
        model.compile(backend="aot_eager", fullgraph=True)
    output, gradients = loss_and_gradients(model, run)
    assert_no_worse(output, original[0], reference[0], "logits")
    assert gradients.keys() == original[1].keys()
    floor = 0.1 * max(gradient.double().norm().item() for gradient in reference[1].values())
    for name, gradient in gradients.items():
        assert_no_worse(gradient, original[1][name], reference[1][name], f"gradient of {name}", floor)


def test_versions_that_do_not_fit_are_told(monkeypatch):
    """one warning that names both versions; none where they fit"""
    import_utils = package("transformers.utils.import_utils")
    monkeypatch.setattr(import_utils, "is_kernels_available", lambda: False)
    with pytest.warns(RuntimeWarning, match=r"transformers 5.* wants kernels >= .* and this is kernels 0\."):
        hf_kernels._warn_of_versions()
    monkeypatch.setattr(import_utils, "is_kernels_available", lambda: True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf_kernels._warn_of_versions()


def test_llama_as_transformers_marks_it(kernels):
    """no mark of this test's own: the norms are replaced with the versions that fit"""
    transformers = package("transformers")
    if not transformers.utils.is_kernels_available():
        pytest.skip("transformers marks no norm for this version of kernels")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    with kernels.use_kernel_mapping(KERNEL_MAPPING, inherit_mapping=False):
        kernels.kernelize(model, mode=kernels.Mode.TRAINING)
    assert sum(map(is_ours, model.modules())) == 5


class Halved(nn.Module):
    """A norm of the name RMSNorm whose formula is its own."""

    kernel_layer_name = "RMSNorm"

    def forward(self, x):
        return 0.5 * nn.functional.rms_norm(x, x.shape[-1:])


def test_a_norm_of_unknown_formula_computes_what_it_did(kernels):
    model = nn.Sequential(nn.Linear(8, 8), Halved())
    x = torch.randn(3, 8)
    expected = model(x)
    with kernels.use_kernel_mapping(KERNEL_MAPPING, inherit_mapping=False):
        kernels.kernelize(model, mode=kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE, use_fallback=False)
    assert is_ours(model[1]) and torch.equal(model(x), expected)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), expected)


@pytest.mark.parametrize("name, family, cls", [
    ("RMSNorm", "olmo2", "Olmo2RMSNorm"), ("RMSNormZeroCentered", "gemma", "GemmaRMSNorm"),
    ("RMSNormGated", "qwen3_next", "Qwen3NextRMSNormGated"), ("RMSNormGated", "kimi_linear", "KimiLinearRMSNormGated"),
    ("LayerNorm", None, "LayerNorm"),
])  # fmt: skip
def test_other_formulas_under_the_same_names(kernels, monkeypatch, name, family, cls):
    module = package(f"transformers.models.{family}.modeling_{family}") if family else nn
    norm_class = getattr(module, cls)
    monkeypatch.setattr(norm_class, "kernel_layer_name", name, raising=False)
    norm = randomize_norms(norm_class(24))
    inputs = torch.randn(2 if "Gated" in name else 1, 5, 24).unbind()
    expected = norm(*inputs)
    with kernels.use_kernel_mapping(KERNEL_MAPPING, inherit_mapping=False):
        kernels.kernelize(norm, mode=kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE, use_fallback=False)
    assert is_ours(norm)
    torch.testing.assert_close(norm(*inputs), expected)
    torch.testing.assert_close(torch.compile(norm, backend="aot_eager", fullgraph=True)(*inputs), expected)
