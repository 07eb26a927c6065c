"""Two kinds of transformer block, with torch's operations and with the fused residual: losses, time and peak memory.

BERT's block is post-norm with dropout, ``h = LayerNorm(h + dropout(f(h)))``; Llama's is pre-norm, a stream of residuals
with ``f(RMSNorm(h))`` added to it. Both learn to say what the token before was, from one seed and with the same dropout
masks, so that the two loss curves must be the same up to rounding.

    python examples/bert_block.py [--steps N] [--dtype fp32|bf16] [--device cpu|cuda|auto] [--quick]
"""

import argparse
import copy
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

from fused_layernorm import fused_add_layer_norm, fused_add_rms_norm

VOCABULARY = 32


class TorchNorms:
    """dropout, add and norm by torch's operations; `masks` are those that the fused call draws from the same seed."""

    same_masks = True

    def __call__(self, is_rms_norm, x, residual, norm, dropout_p):
        if dropout_p and self.same_masks:
            with torch.no_grad():
                mask = fused_add_layer_norm(x, None, normalized_shape=x.shape[-1], dropout_p=dropout_p,
                                            return_dropout_mask=True)[2]  # fmt: skip
            x = x * mask / (1 - dropout_p)
        else:
            x = F.dropout(x, dropout_p)
        z = x if residual is None else residual + x
        return norm(z), z


def fused_norms(is_rms_norm, x, residual, norm, dropout_p):
    if is_rms_norm:
        return fused_add_rms_norm(x, residual, norm.weight, None, norm.eps, dropout_p=dropout_p)
    return fused_add_layer_norm(x, residual, norm.weight, norm.bias, norm.eps, dropout_p=dropout_p)


class Model(nn.Module):
    def __init__(self, kind, width, layers, heads=4, dropout_p=0.1):
        super().__init__()
        self.is_llama, self.heads = kind == "llama", heads
        self.dropout_p = 0.0 if self.is_llama else dropout_p
        norm = (lambda: nn.RMSNorm(width, eps=1e-6)) if self.is_llama else (lambda: nn.LayerNorm(width, eps=1e-12))
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(512, width)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))
        self.norms = nn.ModuleList(norm() for _ in range(2 * layers + 1))
        self.head = nn.Linear(width, VOCABULARY)

    def attention(self, i, h):
        q, k, v = self.qkv[i](h).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out[i](F.scaled_dot_product_attention(q, k, v, is_causal=self.is_llama).transpose(1, 2).flatten(2))

    def forward(self, ids, add_norm):
        h = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        h, stream = add_norm(self.is_llama, h, None, self.norms[0], self.dropout_p)
        for i in range(len(self.qkv)):
            for norm, function in zip(
                self.norms[2 * i + 1 :],
                (self.attention, lambda i, h: self.down[i](F.gelu(self.up[i](h)))),
                strict=False,
            ):
                # pre-norm adds to the stream, post-norm to what was normalized
                h, stream = add_norm(
                    self.is_llama, function(i, h), stream if self.is_llama else h, norm, self.dropout_p
                )
        return self.head(h)


def train(model, add_norm, steps, shape, device):
    """Losses, median seconds a step, and peak memory on CUDA (else 0)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    losses, seconds, told = [], [], 1
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(1)
    for step in range(steps):
        if sum(seconds) > 5 * told:  # a sign of life, in seconds of work
            told += 1
            print(f"  step {step} of {steps}", file=sys.stderr, flush=True)
        ids = torch.randint(VOCABULARY, shape, generator=generator).to(device)
        started = time.perf_counter()
        logits = model(ids, add_norm)[:, 1:].float()
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, :-1].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())  # waits for the device
        seconds.append(time.perf_counter() - started)
    return losses, statistics.median(seconds), torch.cuda.max_memory_allocated() if device == "cuda" else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--device", choices=("cpu", "cuda", "auto"), default="auto")
    parser.add_argument("--quick", action="store_true", help="a small model and 40 steps")
    options = parser.parse_args()
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    steps, width, layers, shape = (40, 64, 2, (4, 16)) if options.quick else (options.steps, 256, 4, (16, 128))
    timed = 10 if options.quick else 50  # steps whose time is told
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype]

    all_agree = True
    print(f"{device}, {options.dtype}, {steps} steps, width {width}, {layers} layers, batch {shape[0]} x {shape[1]}")
    print(f"{'block':<6} {'norms':<6} {'first loss':>10} {'last loss':>10} {'ms a step':>10} {'peak MB':>8}")
    for kind in ("bert", "llama"):
        torch.manual_seed(0)
        model = Model(kind, width, layers).to(device, dtype)
        torchs = TorchNorms()
        losses = {}
        for name, add_norm in (("torch", torchs), ("fused", fused_norms)):
            torchs.same_masks = True
            losses[name], _, _ = train(copy.deepcopy(model), add_norm, steps, shape, device)
            torchs.same_masks = False  # how one would write it
            _, seconds, memory = train(copy.deepcopy(model), add_norm, min(steps, timed), shape, device)
            print(f"{kind:<6} {name:<6} {losses[name][0]:10.4f} {losses[name][-1]:10.4f} {1e3 * seconds:10.2f} "
                  f"{f'{memory / 1e6:.1f}' if memory else '-':>8}")  # fmt: skip
        # Rounding differs, and training amplifies it: a few units of the dtype at first, a hundredth in the end.
        first = abs(losses["fused"][0] - losses["torch"][0]) / losses["torch"][0]
        last = abs(sum(losses["fused"][-10:]) - sum(losses["torch"][-10:])) / sum(losses["torch"][:10])
        agree = first < 64 * torch.finfo(dtype).eps and last < 0.01
        all_agree &= agree
        print(f"{kind}: the loss curves agree: {agree} (first {first:.1e}, last ten {last:.1e} of the first)")
    if not all_agree:
        raise SystemExit("the loss curves do not agree")


if __name__ == "__main__":
    main()
