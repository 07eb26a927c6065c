"""10,000 steps of the character GPT, torch's norms against fused ones, for three seeds: do the curves stay together?

Rounding makes any two runs drift apart, so that after thousands of steps single losses say nothing. What must agree is
where training arrives: the mean loss of the last tenth, over the seeds, whose spread is the noise.

    python examples/train_long.py [--steps N] [--seeds 0,1,2] [--dtype bf16|fp16|fp32] [--norm layer|rms] [--out FOLDER]
"""

import argparse
import copy
import json
import math
import statistics
import sys
from pathlib import Path

import torch
from torch import nn
from train_char_gpt import GPT, Run, python_documentation

from fused_layernorm import replace_norms

sys.path.append(str(Path(__file__).parents[1]))


def train(args, device, data, vocabulary, seed) -> dict[str, list[float]]:
    """The losses of both models, which start from the same parameters and see the same text."""
    torch.manual_seed(seed)
    norm = nn.LayerNorm if args.norm == "layer" else nn.RMSNorm
    model = GPT(vocabulary, args.context, args.hidden_size, args.layers, norm).to(device)
    fused = copy.deepcopy(model)
    assert not replace_norms(fused).left
    runs = {name: Run(m, args.dtype, lr=0.1 / args.hidden_size) for name, m in (("torch", model), ("fused", fused))}
    generator = torch.Generator().manual_seed(seed)
    for step in range(args.steps):
        starts = torch.randint(len(data) - args.context - 1, (args.batch, 1), generator=generator)
        tokens = data[starts + torch.arange(args.context + 1)].to(device)
        for run in runs.values():
            run.step(tokens)
        if step % max(args.steps // 10, 1) == 0:
            print(f"seed {seed} step {step:5}  " + "  ".join(f"{n} {r.losses[-1]:.4f}" for n, r in runs.items()))
    return {name: run.losses for name, run in runs.items()}


def plot(losses, path, title) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for name, colour in (("torch", "tab:orange"), ("fused", "tab:blue")):
        for seed, curves in losses.items():
            width = max(1, len(curves[name]) // 200)
            smooth = [statistics.fmean(curves[name][i : i + width]) for i in range(0, len(curves[name]), width)]
            axes.plot(
                range(0, len(curves[name]), width), smooth, color=colour, linewidth=1, label=f"{name}, seed {seed}"
            )
    axes.set(xlabel="step", ylabel="training loss (nats per character)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--norm", default="layer", choices=["layer", "rms"])
    parser.add_argument("--dtype", default="bf16", choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "output")
    parser.add_argument("--quick", action="store_true", help="a tiny model and 40 steps, to see that all works")
    args = parser.parse_args()
    args.device = args.device.replace("auto", "cuda" if torch.cuda.is_available() else "cpu")
    args.context, args.batch, args.hidden_size, args.layers = (48, 8, 64, 2) if args.quick else (128, 32, 256, 4)
    args.steps = 40 if args.quick else args.steps
    seeds = [int(seed) for seed in args.seeds.split(",")]
    device = torch.device(args.device)

    text = python_documentation()
    index = {char: i for i, char in enumerate(sorted(set(text)))}
    data = torch.tensor([index[char] for char in text])
    losses = {seed: train(args, device, data, len(index), seed) for seed in seeds}

    last = max(1, args.steps // 10)
    ends = {name: [statistics.fmean(losses[seed][name][-last:]) for seed in seeds] for name in ("torch", "fused")}
    differences = [fused - torch_ for fused, torch_ in zip(ends["fused"], ends["torch"], strict=True)]
    difference = statistics.fmean(differences)
    # The seeds of torch's own runs differ by their start and by their text: twice the error of their mean, and 0.1 %.
    noise = statistics.stdev(ends["torch"]) / math.sqrt(len(seeds)) if len(seeds) > 1 else 0.0
    allowed = 2 * noise + 1e-3 * statistics.fmean(ends["torch"])
    finite = all(math.isfinite(loss) for curves in losses.values() for curve in curves.values() for loss in curve)
    agree = finite and abs(difference) <= allowed

    from test_benchmark import environment

    args.out.mkdir(parents=True, exist_ok=True)
    name = f"long_training_{args.norm}_{args.dtype}"
    record = {
        "meta": environment(),
        "long_training": {
            "steps": args.steps, "seeds": seeds, "dtype": args.dtype, "norm": args.norm, "all_finite": finite,
            "mean_loss_of_the_last_tenth": ends, "difference": difference, "allowed": allowed, "agree": agree,
        },
    }  # fmt: skip
    (args.out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    plot(losses, args.out / f"{name}.png", f"Character GPT, {args.norm} norm, {args.dtype}, {args.steps} steps")
    print(f"last {last} steps: torch {ends['torch']}, fused {ends['fused']}")
    print(
        f"the runs {'agree' if agree else 'DISAGREE'}: {difference:+.5f}, allowed {allowed:.5f}, all finite: {finite}"
    )
    raise SystemExit(0 if agree else 1)


if __name__ == "__main__":
    main()
