"""python benchmark_custom_op.py [--quick]: custom_op beside plain PyTorch and a copy."""

import argparse

import torch
from custom_op import reduce_sum, reference_reduce_sum, reference_scale_bias_relu, relu, scale_bias_relu
from torch.utils.benchmark import Timer  # warms up, synchronizes with the GPU, repeats, takes the median


def median_us(statement: str, quick: bool, **variables) -> float:
    timer = Timer(statement, globals=variables, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=0.02 if quick else 0.5).median * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small shapes, few repeats")
    quick = parser.parse_args().quick
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"on {torch.cuda.get_device_name() if device == 'cuda' else 'the CPU'}, µs a call (median)")
    print(f"{'shape':>12}  {'':<24} {'custom_op':>10} {'PyTorch':>10}")
    for shape in [(64, 256)] if quick else [(64, 1024), (4096, 4096)]:
        x = torch.randn(shape, device=device, requires_grad=True)
        bias = torch.randn(shape[-1], device=device, requires_grad=True)
        plain_x, plain_bias, grad = x.detach(), bias.detach(), torch.randn_like(x)
        rows = {"a copy, one read one write": ("y.copy_(x)", {"x": plain_x, "y": torch.empty_like(grad)}, [None])}
        ours, torchs = scale_bias_relu, reference_scale_bias_relu
        rows["scale_bias_relu"] = ("f(x, 0.7, bias)", {"x": plain_x, "bias": plain_bias}, [ours, torchs])
        rows["    its backward"] = (
            "torch.autograd.grad(f, (x, bias), grad, retain_graph=True)",
            {"torch": torch, "x": x, "bias": bias, "grad": grad},
            [f(x, 0.7, bias) for f in (ours, torchs)],
        )
        rows["relu"] = ("f(x)", {"x": plain_x}, [relu, torch.relu])
        rows["reduce_sum"] = ("f(x)", {"x": plain_x}, [reduce_sum, reference_reduce_sum])
        for i, (name, (statement, variables, columns)) in enumerate(rows.items()):
            times = [f"{median_us(statement, quick, f=f, **variables):>10.1f}" for f in columns]
            print(f"{f'{shape[0]} x {shape[1]}' if i == 0 else '':>12}  {name:<26} {' '.join(times)}")


if __name__ == "__main__":
    main()
