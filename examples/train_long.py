"""10,000 steps of the character GPT, torch's norms against fused ones, for three seeds: do the curves stay together?

Rounding makes any two runs drift apart, so that after thousands of steps single losses say nothing. What must agree is
where training arrives: the mean loss of the last tenth, over the seeds, whose spread is the noise.

Each run, of one dtype, one seed and either norm, is a process; --processes many train at the same time, on one card or
on all there are. With --seconds each run ends in time, and what is compared is the steps that all have made; a run that
is killed leaves the losses up to then in FOLDER.

    python examples/train_long.py [--steps N] [--seeds 0,1,2] [--dtype bf16,fp16,fp32] [--norm layer|rms] [--out FOLDER]
"""

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from torch import nn
from train_char_gpt import GPT, Run, python_documentation

from fused_layernorm import replace_norms

sys.path.append(str(Path(__file__).parents[1]))
COLOURS = {"torch": "tab:orange", "fused": "tab:blue"}


def train(args, text: str, dtype: str, seed: int, name: str, number: int) -> list[float]:
    """The losses of one run. Both norms start from the same parameters and see the same text."""
    if args.processes > 1:
        torch.set_num_threads(1)
    device = torch.device(args.device)
    if args.device == "cuda":
        device = torch.device("cuda", number % torch.cuda.device_count())
        torch.cuda.set_device(device)
    index = {char: i for i, char in enumerate(sorted(set(text)))}
    data = torch.tensor([index[char] for char in text])
    torch.manual_seed(seed)
    norm = nn.LayerNorm if args.norm == "layer" else nn.RMSNorm
    model = GPT(len(index), args.context, args.hidden_size, args.layers, norm).to(device)
    if name == "fused":
        assert not replace_norms(model).left
    run = Run(model, dtype, lr=0.1 / args.hidden_size)
    generator = torch.Generator().manual_seed(seed)
    losses, pending, started = [], [], time.perf_counter()
    for step in range(1, args.steps + 1):
        starts = torch.randint(len(data) - args.context - 1, (args.batch, 1), generator=generator)
        pending.append(run.advance(data[starts + torch.arange(args.context + 1)].to(device)))
        if step % max(args.steps // 20, 1) == 0 or step == args.steps:
            losses += torch.stack(pending).tolist()  # waits for the device
            pending = []
            seconds = time.perf_counter() - started
            told = {"step": step, "seconds": round(seconds, 1), "losses": losses}
            (args.out / f"{file_name(args, dtype)}_{name}_{seed}.losses.json").write_text(json.dumps(told))
            print(f"{dtype} {name} seed {seed} step {step:5}: {losses[-1]:.4f}, {seconds:.0f} s", flush=True)
            if args.seconds and seconds > args.seconds:
                break
    return losses


def file_name(args, dtype: str) -> str:
    return f"long_training_{args.norm}_{dtype}"


def compare(args, losses: dict[str, dict[int, list[float]]]) -> dict:
    """Of {norm: {seed: losses}}: where training arrives, in the steps that all runs have made."""
    steps = min(len(curve) for curves in losses.values() for curve in curves.values())
    last = max(1, steps // 10)
    ends = {
        name: [statistics.fmean(c[steps - last : steps]) for c in curves.values()] for name, curves in losses.items()
    }
    difference = statistics.fmean(ends["fused"]) - statistics.fmean(ends["torch"])
    # The seeds of torch's own runs differ by their start and by their text: twice the error of their mean, and 0.1 %.
    noise = statistics.stdev(ends["torch"]) / math.sqrt(len(ends["torch"])) if len(ends["torch"]) > 1 else 0.0
    allowed = 2 * noise + 1e-3 * statistics.fmean(ends["torch"])
    finite = all(math.isfinite(loss) for curves in losses.values() for curve in curves.values() for loss in curve)
    return {
        "steps": steps, "steps_wanted": args.steps, "seeds": list(losses["torch"]), "norm": args.norm,
        "all_finite": finite, "mean_loss_of_the_last_tenth": ends, "difference": difference, "allowed": allowed,
        "agree": finite and abs(difference) <= allowed,
    }  # fmt: skip


def plot(losses, path, title) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for name, curves in losses.items():
        for seed, curve in curves.items():
            width = max(1, len(curve) // 200)
            smooth = [statistics.fmean(curve[i : i + width]) for i in range(0, len(curve), width)]
            axes.plot(
                range(0, len(curve), width), smooth, color=COLOURS[name], linewidth=1, label=f"{name}, seed {seed}"
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
    parser.add_argument("--dtype", default="bf16", help="fp32, bf16, fp16, or several of these: bf16,fp16")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--processes", type=int, default=1, help="runs at the same time")
    parser.add_argument("--seconds", type=float, default=0, help="for each run; 0: all steps")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "output")
    parser.add_argument("--quick", action="store_true", help="a tiny model and 40 steps, to see that all works")
    args = parser.parse_args()
    args.device = args.device.replace("auto", "cuda" if torch.cuda.is_available() else "cpu")
    args.context, args.batch, args.hidden_size, args.layers = (32, 4, 64, 2) if args.quick else (128, 32, 256, 4)
    args.steps = 40 if args.quick else args.steps
    args.out.mkdir(parents=True, exist_ok=True)

    runs = [
        (dtype, int(seed), name)
        for dtype in args.dtype.split(",") for seed in args.seeds.split(",") for name in COLOURS
    ]  # fmt: skip
    text = python_documentation(12 if args.quick else None)
    with ProcessPoolExecutor(args.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = {run: pool.submit(train, args, text, *run, number) for number, run in enumerate(runs)}
        found = {run: future.result() for run, future in found.items()}

    from test_benchmark import environment

    all_agree = True
    for dtype in args.dtype.split(","):
        losses = {name: {seed: found[d, seed, n] for d, seed, n in runs if (d, n) == (dtype, name)} for name in COLOURS}
        result = compare(args, losses)
        record = {"meta": environment(), "long_training": {"dtype": dtype} | result}
        (args.out / f"{file_name(args, dtype)}.json").write_text(json.dumps(record, indent=1) + "\n")
        title = f"Character GPT, {args.norm} norm, {dtype}, {result['steps']} steps"
        plot(losses, args.out / f"{file_name(args, dtype)}.png", title)
        print(f"{dtype}, {result['steps']} steps: {result['mean_loss_of_the_last_tenth']}")
        print(f"the runs {'agree' if result['agree'] else 'DISAGREE'}: {result['difference']:+.5f}, "
              f"allowed {result['allowed']:.5f}, all finite: {result['all_finite']}")  # fmt: skip
        all_agree &= result["agree"]
    raise SystemExit(0 if all_agree else 1)


if __name__ == "__main__":
    main()
