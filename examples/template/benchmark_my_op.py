"""python benchmark_my_op.py [--quick]: my_op beside plain PyTorch and a copy, forward and backward."""

import argparse

import torch
from my_op import my_op, reference
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
    print(f"{'shape':>12}  {'':<8} {'copy':>10} {'my_op':>10} {'PyTorch':>10}")
    for shape in [(64, 256)] if quick else [(64, 1024), (4096, 4096)]:
        x = torch.randn(shape, device=device, requires_grad=True)
        grad = torch.randn_like(x)
        copy = median_us("y.copy_(x)", quick, x=x.detach(), y=torch.empty_like(grad))
        times = [median_us("f(x)", quick, f=f, x=x.detach()) for f in (my_op, reference)]
        print(f"{shape[0]:>5} x {shape[1]:>4}  {'forward':<8} {copy:>10.1f} {times[0]:>10.1f} {times[1]:>10.1f}")
        backward = "torch.autograd.grad(y, x, grad, retain_graph=True)"
        times = [median_us(backward, quick, torch=torch, y=f(x), x=x, grad=grad) for f in (my_op, reference)]
        print(f"{'':>12}  {'backward':<8} {'':>10} {times[0]:>10.1f} {times[1]:>10.1f}")


if __name__ == "__main__":
    main()
