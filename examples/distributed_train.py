"""Train with fused norms in several processes (DDP, FSDP2, sequence parallel): the losses must be those of one process.

    torchrun --nproc-per-node 2 examples/distributed_train.py [--parallel ddp|fsdp|sequence] [--device cpu|cuda|auto]

A residual network learns what another one with random weights computes. Beside the parallel run, every process trains
a copy on the whole batch by itself; at the end the two loss curves are compared.
"""

import argparse
import copy
import gc
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fused_layernorm
from fused_layernorm import FusedLayerNorm, FusedRMSNorm


class Block(nn.Module):
    def __init__(self, hidden_size: int):
        super().__init__()
        self.norm = FusedRMSNorm(hidden_size, eps=1e-6)
        self.up, self.down = nn.Linear(hidden_size, 4 * hidden_size), nn.Linear(4 * hidden_size, hidden_size)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Network(nn.Module):
    def __init__(self, hidden_size: int, layers: int):
        super().__init__()
        self.blocks = nn.Sequential(*[Block(hidden_size) for _ in range(layers)])
        self.norm = FusedLayerNorm(hidden_size)

    def forward(self, x):
        return self.norm(self.blocks(x))


def parallelize(model: Network, parallel: str, mesh: DeviceMesh) -> nn.Module:
    if parallel == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if parallel == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    # Between the matrices each process has a part of every sequence; inside them, a part of the columns.
    plan = {"norm": SequenceParallel()}
    for i in range(len(model.blocks)):
        plan[f"blocks.{i}.norm"] = SequenceParallel()
        plan[f"blocks.{i}.up"] = ColwiseParallel(input_layouts=Shard(1))
        plan[f"blocks.{i}.down"] = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    return parallelize_module(model, mesh, plan)


def my_part(tensor: torch.Tensor, parallel: str, mesh: DeviceMesh) -> torch.Tensor:
    """Of a batch: some of its sequences, or (as a DTensor) a part of every sequence."""
    if parallel != "sequence":
        return tensor.chunk(mesh.size())[mesh.get_local_rank()]
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(tensor, mesh, [Shard(1)])


def mean_over_processes(loss: torch.Tensor) -> float:
    if hasattr(loss, "full_tensor"):  # a DTensor knows how its parts make the whole
        return loss.full_tensor().item()
    dist.all_reduce(loss, op=dist.ReduceOp.SUM)
    return loss.item() / dist.get_world_size()


def train(args: argparse.Namespace, device: str) -> bool:
    """Whether the losses of all processes together are those of one."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    talks = dist.get_rank() == 0
    if talks:
        print(
            f"torch {torch.__version__}, kernels: {fused_layernorm.backend()}, {args.parallel}, {mesh.size()} {device}"
        )

    torch.manual_seed(0)  # every process makes the same networks and batches
    single, teacher = (Network(args.hidden_size, args.layers).to(device) for _ in range(2))
    model = parallelize(copy.deepcopy(single), args.parallel, mesh)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (single, model)]
    curves = [], []
    for step in range(args.steps):
        x = torch.randn(4 * mesh.size(), 4 * mesh.size(), args.hidden_size, device=device)
        with torch.no_grad():
            target = teacher(x)
        parts = [my_part(tensor, args.parallel, mesh) for tensor in (x, target)]
        for curve, optimizer, network, (its_x, its_target) in zip(
            curves, optimizers, (single, model), ((x, target), parts), strict=True
        ):
            loss = F.mse_loss(network(its_x), its_target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve.append(loss.item() if network is single else mean_over_processes(loss.detach()))
        if talks and (step % max(args.steps // 10, 1) == 0 or step == args.steps - 1):
            print(f"step {step:4}   loss of one process {curves[0][-1]:.6f}   of {mesh.size()} {curves[1][-1]:.6f}")

    difference = max(abs(a - b) for a, b in zip(*curves, strict=True))
    agree = difference <= 1e-3 * curves[0][0]  # sums in another order, amplified by training
    if talks:
        print(f"largest difference of the losses: {difference:.2e}: {'they agree' if agree else 'THEY DIFFER'}")
    return agree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parallel", default="fsdp", choices=["ddp", "fsdp", "sequence"])
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="a tiny model and 10 steps, to see that all works")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun, see the first lines of the file")
    if args.quick:
        args.steps, args.hidden_size, args.layers = 10, 32, 2
    has_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = args.device.replace("auto", "cuda" if has_gpus else "cpu")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    agree = train(args, device)
    # A group goes when nothing holds it, such as a model; if that is Python's end, its threads may abort the process.
    gc.collect()
    dist.destroy_process_group()
    raise SystemExit(not agree)


if __name__ == "__main__":
    main()
