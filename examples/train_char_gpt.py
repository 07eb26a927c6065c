"""Train a small GPT on Python's own documentation, with torch's norms and with fused norms from the same seed.

The two loss curves must agree as well as two runs of torch do that differ by rounding alone. Prints what the model
writes and the time per step of both, and plots the curves.

    python examples/train_char_gpt.py [--steps N] [--norm layer|rms] [--dtype fp32|bf16|fp16] [--device cpu|cuda|auto]
"""

import argparse
import ast
import copy
import re
import statistics
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import fused_layernorm
from fused_layernorm import replace_norms

PLOT = Path(__file__).parent / "output" / "char_gpt_loss.png"


def python_documentation(modules: int | None = None) -> str:
    """The licence and the docstrings of the standard library's modules (or the first of them), read from their sources:
    some 0.9 MB."""
    folder = Path(sysconfig.get_path("stdlib"))
    texts = [path.read_text() for path in [folder / "LICENSE.txt"] if path.exists()]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in sorted(folder.glob("*.py"))[:modules]:
        nodes = [node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, documented)]
        texts += [ast.get_docstring(node) or "" for node in nodes]
    text = re.sub(" +", " ", "\n\n".join(text for text in texts if text))
    return "".join(char for char in text if char == "\n" or " " <= char <= "~")


class Block(nn.Module):
    def __init__(self, hidden_size: int, heads: int, norm: type[nn.Module]):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = norm(hidden_size), norm(hidden_size)
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.out = nn.Linear(hidden_size, hidden_size)
        self.mlp = nn.Sequential(
            nn.Linear(hidden_size, 4 * hidden_size), nn.GELU(), nn.Linear(4 * hidden_size, hidden_size)
        )

    def forward(self, x):
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, context: int, hidden_size: int, layers: int, norm: type[nn.Module]):
        super().__init__()
        self.context = context
        self.token = nn.Embedding(vocabulary, hidden_size)
        self.position = nn.Parameter(0.02 * torch.randn(context, hidden_size))
        self.blocks = nn.Sequential(*[Block(hidden_size, hidden_size // 32, norm) for _ in range(layers)])
        self.norm = norm(hidden_size)
        self.head = nn.Linear(hidden_size, vocabulary)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens):
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position[: tokens.shape[1]])))


class Run:
    """One model in training: its optimizer, its losses and the milliseconds of its steps."""

    def __init__(self, model: nn.Module, dtype: str, lr: float):
        self.model, self.dtype = model, dtype
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler(next(model.parameters()).device.type, enabled=dtype == "fp16")
        self.losses, self.times = [], []

    def step(self, tokens: torch.Tensor) -> None:
        start = time.perf_counter()
        self.losses.append(self.advance(tokens).item())  # also waits for the device
        self.times.append(1e3 * (time.perf_counter() - start))

    def advance(self, tokens: torch.Tensor) -> torch.Tensor:
        """One step of training; the loss."""
        autocast_dtype = torch.float16 if self.dtype == "fp16" else torch.bfloat16
        with torch.autocast(tokens.device.type, autocast_dtype, enabled=self.dtype != "fp32"):
            logits = self.model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()


def nudged(model: nn.Module) -> nn.Module:
    """A copy whose parameters are off by about one rounding of float32."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1 + 1.2e-7 * torch.randn_like(parameter).sign()
    return model


@torch.no_grad()
def sample(model: GPT, prompt: torch.Tensor, length: int, generator: torch.Generator) -> list[int]:
    tokens = prompt
    for _ in range(length):
        logits = model(tokens[None, -model.context :])[0, -1].float()
        choice = torch.multinomial((logits.cpu() / 0.7).softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, choice.to(tokens)])
    return tokens.tolist()


def plot(runs: dict[str, Run], title: str) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(8, 7), sharex=True, layout="constrained")
    top.plot(runs["torch"].losses, label="torch norms", linewidth=3, alpha=0.4)
    top.plot(runs["fused"].losses, label="fused norms", linewidth=1)
    top.set(ylabel="training loss (nats per character)", title=title)
    for name, label in (("fused", "fused norms"), ("nudged", "torch, parameters nudged by 1 rounding")):
        bottom.semilogy(differences(runs[name], runs["torch"]), label=label)
    bottom.set(xlabel="step", ylabel="|loss - loss of torch|")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
        axes.legend()
    PLOT.parent.mkdir(exist_ok=True)
    figure.savefig(PLOT, dpi=120)
    print(f"plot: {PLOT.relative_to(Path(__file__).parents[1])}")


def differences(one: Run, other: Run) -> list[float]:
    return [abs(a - b) for a, b in zip(one.losses, other.losses, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, help="default: 2000 on a GPU, 300 without")
    parser.add_argument("--norm", default="layer", choices=["layer", "rms"])
    parser.add_argument(
        "--dtype", default="fp32", choices=["fp32", "bf16", "fp16"], help="16 bits: autocast, float32 parameters"
    )
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--hidden-size", type=int, help="a multiple of 32; default: 512 on a GPU, 128 without")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a tiny model and 30 steps, to see that all works")
    args = parser.parse_args()
    has_cuda = torch.cuda.is_available()
    device = torch.device("cuda" if args.device == "auto" and has_cuda else args.device.replace("auto", "cpu"))
    context, batch, steps, hidden_size = (256, 64, 2000, 512) if device.type == "cuda" else (64, 24, 300, 128)
    args.steps, args.hidden_size = args.steps or steps, args.hidden_size or hidden_size
    if args.quick:
        args.steps, args.hidden_size, args.layers, context, batch = 30, 64, 2, 48, 8
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, kernels: {fused_layernorm.backend()}, on {where}\n")

    text = python_documentation(12 if args.quick else None)
    vocabulary = sorted(set(text))
    index = {char: i for i, char in enumerate(vocabulary)}
    data = torch.tensor([index[char] for char in text])
    print(f"text: {len(text):,} characters of Python's documentation, {len(vocabulary)} different ones")

    torch.manual_seed(args.seed)
    norm = nn.LayerNorm if args.norm == "layer" else nn.RMSNorm
    model = GPT(len(vocabulary), context, args.hidden_size, args.layers, norm).to(device)
    fused = copy.deepcopy(model)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"model: {args.layers} layers of {args.hidden_size}, {parameters:,} parameters, {args.dtype}")
    print(replace_norms(fused), "\n")
    models = {"torch": model, "fused": fused, "nudged": nudged(model)}
    runs = {name: Run(model, args.dtype, lr=0.2 / args.hidden_size) for name, model in models.items()}

    generator = torch.Generator().manual_seed(args.seed)
    for step in range(args.steps):
        starts = torch.randint(len(data) - context - 1, (batch, 1), generator=generator)
        tokens = data[starts + torch.arange(context + 1)].to(device)
        for run in runs.values():  # in turn, so that whatever slows the machine down slows them alike
            run.step(tokens)
        if step % max(args.steps // 10, 1) == 0 or step == args.steps - 1:
            print(f"step {step:4}   loss torch {runs['torch'].losses[-1]:.6f}   fused {runs['fused'].losses[-1]:.6f}")

    prompt = torch.tensor([index[char] for char in "Return "], device=device)
    written = sample(fused, prompt, 60 if args.quick else 400, generator)
    print(f"\n--- what the fused model writes\n{''.join(vocabulary[i] for i in written)}\n---\n")

    torch_ms, fused_ms = (statistics.median(runs[name].times[args.steps // 10 :]) for name in ("torch", "fused"))
    print(f"time per step (median): torch {torch_ms:.2f} ms, fused {fused_ms:.2f} ms, {torch_ms / fused_ms:.2f}x")
    plot(runs, f"Character GPT, {args.norm} norm, {args.dtype}, {where}")

    # Training amplifies any rounding, and how much is not known beforehand. The nudged run measures it: torch against
    # torch, apart by one rounding at the start. It is one draw of that noise, and the fused run another: hence four
    # times it, and no less than four times 1e-6: two steps of float32 at a loss of 4.
    difference, noise = (max(differences(runs[name], runs["torch"])) for name in ("fused", "nudged"))
    allowed = 4 * max(noise, 1e-6)
    agree = difference <= allowed
    print(f"largest difference of the losses: {difference:.2e}; torch nudged by one rounding: {noise:.2e}")
    print(f"the loss curves {'agree' if agree else 'DISAGREE'}: {difference:.2e} against {allowed:.2e} allowed")
    if not agree:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
