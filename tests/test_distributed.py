"""Several processes: DDP, FSDP2, DTensor and sequence parallel give the loss and the gradients of one process.

On gloo with 2 or 4 processes on the CPU; on NCCL with as many GPUs.
"""

import argparse
import copy
import datetime
import gc
import itertools
import multiprocessing
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fork_server import run_code
from norm_cases import OPERATOR_NODE
from torch import nn

import fused_layernorm
from fused_layernorm import (
    FusedLayerNorm,
    FusedRMSNorm,
    fused_adaptive_layer_norm,
    fused_add_layer_norm,
    fused_add_rms_norm,
    fused_gated_layer_norm,
    fused_gated_rms_norm,
    fused_layer_norm,
    fused_rms_norm,
)

ROOT = Path(__file__).parents[1]
IMPORTABLE = {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
OPS = {"layer_norm": fused_layer_norm, "rms_norm": fused_rms_norm}

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch was built without torch.distributed")


# ---- processes -----------------------------------------------------------------------------------------------------

# What takes seconds to import is imported once, in the process that those of all tests are forked from. Nothing of it
# asks for CUDA.
multiprocessing.set_forkserver_preload(
    ["torch.distributed.fsdp", "torch.distributed.tensor.debug", "torch.distributed.tensor.parallel", "torch._dynamo"]
)


def few_gpus(needed):
    return pytest.mark.skipif(torch.cuda.device_count() < needed, reason=f"needs {needed} CUDA devices")


def on_backends(world_size):
    return pytest.mark.parametrize(
        "run",
        [
            pytest.param(("cpu", "gloo", world_size), id=f"gloo-{world_size}"),
            pytest.param(
                ("cuda", "nccl", world_size), id=f"nccl-{world_size}", marks=[pytest.mark.gpu, few_gpus(world_size)]
            ),
        ],
        indirect=True,
    )


@pytest.fixture
def run(request, tmp_path):
    """run(function, *arguments) calls function(device, rank, world_size, *arguments) in each process."""
    device, backend, world_size = request.param

    def in_processes(function, *arguments):
        arguments = (device, backend, world_size, f"file://{tmp_path / 'meeting_point'}", function, arguments)
        torch.multiprocessing.start_processes(_process, arguments, nprocs=world_size, start_method="forkserver")

    return in_processes


def _process(rank, device, backend, world_size, meeting_point, function, arguments):
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, meeting_point, rank=rank, world_size=world_size, timeout=datetime.timedelta(seconds=120)
    )
    torch.manual_seed(0)  # everyone makes the same whole tensors
    try:
        function(device, rank, world_size, *arguments)
    finally:
        gc.collect()  # what holds the group, or its threads may abort the process at its end
        dist.destroy_process_group()


class Block(nn.Module):
    """Each norm once, and matrices around them."""

    def __init__(self, size=16):
        super().__init__()
        self.norm1, self.norm2 = FusedLayerNorm(size), FusedRMSNorm(size, eps=1e-6)
        self.up, self.down = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)
        with torch.no_grad():  # ones and zeros would hide a parameter that is not used
            for parameter in self.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))

    def forward(self, x):
        return self.norm2(x + self.down(torch.relu(self.up(self.norm1(x)))))


def train_step(model, x, target):
    loss = (model(x) - target).square().mean()
    loss.backward()
    return loss


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def assert_same_gradients(model, single):
    gradients = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
    for name, parameter in single.named_parameters():
        torch.testing.assert_close(
            gradients[name], parameter.grad, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


# ---- data parallel -------------------------------------------------------------------------------------------------


def check_ddp(device, rank, world_size):
    single = Block().to(device)
    model = nn.parallel.DistributedDataParallel(copy.deepcopy(single))
    x, target = torch.randn(2, 4 * world_size, 5, 16, device=device)
    train_step(single, x, target)
    for _ in range(2):  # the second step is by the buckets that the first one found
        model.zero_grad()
        train_step(model, x.chunk(world_size)[rank], target.chunk(world_size)[rank])
    assert_same_gradients(model.module, single)


@on_backends(2)
def test_ddp(run):
    run(check_ddp)


def check_ddp_of_long_rows(device, rank, world_size):
    size = 150528 if device == "cuda" else 1536
    single = nn.Sequential(*(FusedLayerNorm(size) for _ in range(4))).to(device)
    with torch.no_grad():
        for parameter in single.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    model = nn.parallel.DistributedDataParallel(copy.deepcopy(single), bucket_cap_mb=0.5)
    x, target = torch.randn(2, 8 * world_size, size, device=device)

    def step(model, x, target):
        model.zero_grad()
        ((model(x) - target).square().sum() / len(x)).backward()

    step(single, x, target)
    for _ in range(10):
        step(model, x.chunk(world_size)[rank], target.chunk(world_size)[rank])
    for mine, expected in zip(model.module.parameters(), single.parameters(), strict=True):
        # Sums of 16 rows, of terms of up to about 3, in another order: 16 * 16 * 3 * 2^-24 = 5e-5
        torch.testing.assert_close(mine.grad, expected.grad, rtol=1e-4, atol=1e-4)


@on_backends(2)
def test_ddp_of_long_rows(run):
    """On a card their backward needs every SM at once, while the gradients of the norm behind are reduced."""
    run(check_ddp_of_long_rows)


def check_fsdp(device, rank, world_size, compiled):
    from torch.distributed.fsdp import fully_shard

    def optimizer(model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    single = nn.Sequential(Block(), Block()).to(device)
    model = copy.deepcopy(single)
    mesh = dist.init_device_mesh(device, (world_size,))
    for block in model:
        fully_shard(block.norm1, mesh=mesh)  # alone; the other one together with its block
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert isinstance(model[0].norm1, FusedLayerNorm)
    if compiled:
        for block in model:
            block.compile(backend="aot_eager")
    x, target = torch.randn(2, 4 * world_size, 5, 16, device=device)
    steps = [optimizer(single), optimizer(model)]
    for _ in range(2):
        for step in steps:
            step.zero_grad()
        train_step(single, x, target)
        train_step(model, x.chunk(world_size)[rank], target.chunk(world_size)[rank])
        assert_same_gradients(model, single)
        for step in steps:
            step.step()


@on_backends(2)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_fsdp2(run, compiled):
    """fully_shard around blocks and around a norm alone"""
    run(check_fsdp, compiled)


def check_fsdp_mixed_precision(device, rank, world_size):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    norm = FusedLayerNorm(16).to(device)
    fully_shard(norm, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
                mesh=dist.init_device_mesh(device, (world_size,)))  # fmt: skip
    y = norm(torch.randn(4, 16, device=device))  # cast by the policy, as its weight is
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert norm.weight.dtype == norm.weight.grad.dtype == torch.float32
    torch.testing.assert_close(whole(norm.bias.grad), torch.full((16,), 4.0, device=device))


@on_backends(2)
def test_fsdp2_mixed_precision(run):
    run(check_fsdp_mixed_precision)


# ---- DTensor -------------------------------------------------------------------------------------------------------


def check_dtensor(device, rank, world_size, mesh_shape):
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = dist.init_device_mesh(device, mesh_shape)
    replicated = [Replicate()] * mesh.ndim
    kernels = fused_layernorm._backend.has_kernels_for(device)
    if mesh.ndim == 1:
        splits, parameters = [[Shard(0)], [Shard(1)], [Replicate()]], [(1, True), (2, True), (1, False)]
    else:
        splits, parameters = [[Shard(0), Shard(1)], [Shard(1), Replicate()], [Shard(0), Shard(0)]], [(1, True)]
    shape = (5, 6, 3, 8)  # 5: not the same number of rows everywhere

    def leaf(tensor, placements):
        return distribute_tensor(tensor, mesh, placements).requires_grad_()

    def full_leaves(ndim, has_weight):
        tensors = [torch.randn(*shape, device=device)]
        tensors += [torch.randn(*shape[-ndim:], device=device)] * 2 if has_weight else []
        return [t.clone().requires_grad_() for t in tensors]

    for norm, (ndim, has_weight) in itertools.product(OPS.values(), parameters):
        single = full_leaves(ndim, has_weight)
        options = {"eps": 1e-5, "normalized_shape": shape[-ndim:]}
        grad_output = torch.randn(*shape, device=device)
        truth = norm(*single, **options)
        truths = torch.autograd.grad(truth, single, grad_output)
        for split in splits:
            leaves = [leaf(single[0].detach(), split), *(leaf(t.detach(), replicated) for t in single[1:])]
            split_grad_output = distribute_tensor(grad_output, mesh, split)
            with CommDebugMode() as communication:
                y = norm(*leaves, **options)
                gradients = torch.autograd.grad(y, leaves, split_grad_output)
            assert list(y.placements) == split
            assert list(gradients[0].placements) == split
            if kernels:
                assert y.grad_fn.name() == OPERATOR_NODE
                assert communication.get_total_counts() == 0
                sums = [Partial() if part.is_shard() else Replicate() for part in split]
                assert all(list(gradient.placements) == sums for gradient in gradients[1:])
            for found, true in zip([y, *gradients], [truth, *truths], strict=True):
                torch.testing.assert_close(found.full_tensor(), true, rtol=1e-5, atol=1e-5)

    # What the rules do not name is brought into a form that they do: a split row, a sum not yet added up, a gradient
    # split otherwise than x.
    x, weight = torch.randn(4, 6, 8, device=device), torch.randn(8, device=device)
    truth = fused_layer_norm(x, weight)
    split_rows = distribute_tensor(x, mesh, [Shard(2)] * mesh.ndim)
    summands = DTensor.from_local(x / world_size, mesh, [Partial()] * mesh.ndim)
    for distributed_x in (split_rows, summands):
        found = fused_layer_norm(distributed_x, distribute_tensor(weight, mesh, replicated))
        torch.testing.assert_close(found.full_tensor(), truth, rtol=1e-5, atol=1e-5)
    x.requires_grad_(), weight.requires_grad_()
    grad_output = torch.randn_like(x)
    truths = torch.autograd.grad(fused_layer_norm(x, weight), (x, weight), grad_output)
    leaves = [leaf(x.detach(), [Shard(1)] * mesh.ndim), leaf(weight.detach(), replicated)]
    y = fused_layer_norm(*leaves)
    for split in ([Shard(0)] * mesh.ndim, [Shard(2)] * mesh.ndim, replicated):
        gradients = torch.autograd.grad(y, leaves, distribute_tensor(grad_output, mesh, split), retain_graph=True)
        for found, true in zip(gradients, truths, strict=True):
            torch.testing.assert_close(found.full_tensor(), true, rtol=1e-5, atol=1e-5)

    # Double backward, by PyTorch operations on DTensors.
    def penalty(x, weight, grad_output):
        (gradient,) = torch.autograd.grad(fused_rms_norm(x, weight), x, grad_output, create_graph=True)
        return gradient.square().sum()

    truths = torch.autograd.grad(penalty(x, weight, grad_output), (x, weight))
    found = torch.autograd.grad(penalty(*leaves, distribute_tensor(grad_output, mesh, leaves[0].placements)), leaves)
    for ours, true in zip(found, truths, strict=True):
        torch.testing.assert_close(ours.full_tensor(), true, rtol=1e-4, atol=1e-5)

    with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):  # as torch's own norms
        fused_layer_norm(leaves[0], weight)


def check_add_dtensor(device, rank, world_size):
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = dist.init_device_mesh(device, (world_size,))
    x, residual, grad_y, grad_z = torch.randn(4, 5, 6, 16, device=device)
    weight = torch.rand(16, device=device)
    for dtype, split, uses_z in itertools.product((torch.float32, torch.bfloat16), (0, 1, None), (True, False)):
        tensors = [x.to(dtype), residual, weight]
        single = [t.clone().requires_grad_() for t in tensors]
        truth = fused_add_rms_norm(*single)
        used = slice(2 if uses_z else 1)
        grad_outputs = [grad_y.to(dtype), grad_z][used]
        truths = torch.autograd.grad(truth[used], single, grad_outputs)
        placement = [Replicate() if split is None else Shard(split)]
        leaves = [
            distribute_tensor(t, mesh, part).requires_grad_()
            for t, part in zip(tensors, (placement, placement, [Replicate()]), strict=True)
        ]
        distributed = [distribute_tensor(t, mesh, placement) for t in grad_outputs]
        with CommDebugMode() as communication:
            results = fused_add_rms_norm(*leaves)
            gradients = torch.autograd.grad(results[used], leaves, distributed)
        if fused_layernorm._backend.has_kernels_for(device):
            assert all(list(t.placements) == placement for t in (*results, *gradients[:2]))
            assert list(gradients[2].placements) == [Replicate() if split is None else Partial()]
            assert communication.get_total_counts() == 0
        *of_rows, grad_weight = [*results, *gradients]
        *true_of_rows, true_grad_weight = [*truth, *truths]
        for found, true in zip(of_rows, true_of_rows, strict=True):  # a row does not depend on others
            assert torch.equal(found.full_tensor(), true)
        torch.testing.assert_close(grad_weight.full_tensor(), true_grad_weight, rtol=1e-5, atol=1e-5)


@on_backends(2)
def test_add_dtensor(run):
    """residual and x split alike: no communication"""
    run(check_add_dtensor)


def check_stages_dtensor(device, rank, world_size):
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = dist.init_device_mesh(device, (world_size,))
    x, residual, grad_y, per_token = torch.randn(4, 4, 6, 16, device=device)
    per_sample, gate, shift = torch.randn(3, 4, 1, 16, device=device)
    weight, bias = torch.randn(2, 16, device=device)
    of_heads = torch.randn(6, 16, device=device)
    calls = {
        "activation": (lambda x, w, b: fused_layer_norm(x, w, b, activation="gelu"), (x, weight, bias)),
        "activation beside a residual": (
            lambda x, r, w: fused_add_rms_norm(x, r, w, activation="silu")[0], (x, residual, weight)),
        "by sample": (lambda x, *of: fused_adaptive_layer_norm(x, *of), (x, per_sample, shift)),
        "by token": (lambda x, of: fused_adaptive_layer_norm(x, of, of), (x, per_token)),
        "gate": (lambda x, r, s, t, g: fused_adaptive_layer_norm(x, s, t, gate=g, residual=r)[0],
                 (x, residual, per_sample, shift, gate)),
        "gated": (lambda *of: fused_gated_rms_norm(*of), (x, per_token, weight, bias)),
        "gated, without a weight": (lambda x, g, b: fused_gated_layer_norm(x, g, None, b, norm_before_gate=False),
                                    (x, per_token, bias)),
        "gated, in groups": (lambda *of: fused_gated_rms_norm(*of, norm_before_gate=False, group_size=8),
                             (x, per_token, weight)),
        "of heads": (lambda *of: fused_layer_norm(*of, normalized_shape=16), (x, of_heads, of_heads)),
        "bias of heads": (lambda x, b: fused_rms_norm(x, None, b, normalized_shape=16), (x, of_heads)),
        "of heads, gated": (lambda *of: fused_gated_rms_norm(*of, normalized_shape=16), (x, per_token, of_heads)),
    }  # fmt: skip
    for (name, (call, tensors)), split in itertools.product(calls.items(), (0, 1, None)):
        single = [t.clone().requires_grad_() for t in tensors]
        truth = call(*single)
        truths = torch.autograd.grad(truth, single, grad_y)

        def placement(t, split=split):  # whole where a parameter has no values of its own along the split
            own = -1 if split is None else split - (x.dim() - t.dim())
            return [Shard(own) if own >= 0 and t.shape[own] == x.shape[split] else Replicate()]

        leaves = [distribute_tensor(t, mesh, placement(t)).requires_grad_() for t in tensors]
        distributed = distribute_tensor(grad_y, mesh, placement(grad_y))
        with CommDebugMode() as communication:
            y = call(*leaves)
            gradients = torch.autograd.grad(y, leaves, distributed)
        if fused_layernorm._backend.has_kernels_for(device):
            assert communication.get_total_counts() == 0, name
            for t, gradient in zip(leaves, gradients, strict=True):
                is_summed = split is not None and t.placements == (Replicate(),)
                assert list(gradient.placements) == [Partial() if is_summed else t.placements[0]], name
        torch.testing.assert_close(y.full_tensor(), truth, rtol=1e-5, atol=1e-5, msg=name)
        for gradient, true in zip(gradients, truths, strict=True):
            torch.testing.assert_close(gradient.full_tensor(), true, rtol=1e-5, atol=1e-5, msg=name)


@on_backends(2)
def test_stages_dtensor(run):
    """activation, modulation, gates and weights of heads of DTensors: no communication, sums over rows left to be added
    up"""
    run(check_stages_dtensor)


def check_dropout_dtensor(device, rank, world_size):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = dist.init_device_mesh(device, (world_size,))
    x = distribute_tensor(torch.randn(4, 500, 16, device=device), mesh, [Shard(0)]).requires_grad_()
    weight = distribute_tensor(torch.ones(16, device=device), mesh, [Replicate()]).requires_grad_()
    for kept, scale in (
        (fused_layer_norm(x, weight, dropout_p=0.5), fused_layer_norm(x, weight)),
        (fused_add_layer_norm(x, None, weight, dropout_p=0.5)[1], x),
    ):
        values = kept.full_tensor()
        assert kept.placements == x.placements and abs((values == 0).double().mean() - 0.5) < 0.02
        torch.testing.assert_close(values, torch.where(values == 0, 0, 2 * scale.full_tensor()))
        (gradient,) = torch.autograd.grad(kept.sum(), x)
        assert gradient.placements == x.placements and gradient.full_tensor().isfinite().all()
    with pytest.raises(TypeError, match="return_dropout_mask=True needs plain tensors"):
        fused_add_layer_norm(x, None, weight, dropout_p=0.5, return_dropout_mask=True)


@on_backends(2)
def test_dropout_dtensor(run):
    """dropout of x and of y: PyTorch's operation, which knows what each rank draws"""
    run(check_dropout_dtensor)


@on_backends(2)
def test_dtensor(run):
    """x split along a batch or sequence dimension: no communication, the weights' gradients partial sums"""
    run(check_dtensor, (2,))


@on_backends(4)
def test_dtensor_on_a_2d_mesh(run):
    run(check_dtensor, (2, 2))


def check_sequence_parallel(device, rank, world_size, compiled):
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = dist.init_device_mesh(device, (world_size,))
    single = Block().to(device)
    model = parallelize_module(copy.deepcopy(single), mesh, {
        "norm1": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "norm2": SequenceParallel(),
    })  # fmt: skip
    if compiled:
        model.compile(backend="aot_eager", fullgraph=True)
    for length in (8, 12):
        x, target = torch.randn(2, 3, length, 16, device=device)
        single.zero_grad(), model.zero_grad()
        truth = train_step(single, x, target)
        loss = train_step(model, *(distribute_tensor(whole_one, mesh, [Shard(1)]) for whole_one in (x, target)))
        torch.testing.assert_close(whole(loss), truth)
        assert_same_gradients(model, single)


@on_backends(2)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_sequence_parallel(run, compiled):
    """our modules in a SequenceParallel plan"""
    run(check_sequence_parallel, compiled)


def check_example(device, rank, world_size, parallel):
    train = runpy.run_path(str(ROOT / "examples" / "distributed_train.py"))["train"]
    assert train(argparse.Namespace(parallel=parallel, steps=10, hidden_size=32, layers=2), device)


@on_backends(2)
@pytest.mark.parametrize("parallel", ["ddp", "sequence"])
def test_example(run, parallel):
    """examples/distributed_train.py compares its losses with those of one process"""
    run(check_example, parallel)


@pytest.mark.parametrize("device", [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, few_gpus(2)]),
])  # fmt: skip
def test_example_by_torchrun(device):
    """the whole of it, as a user starts it"""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               "examples/distributed_train.py", "--quick", "--device", device, "--parallel", "fsdp"]  # fmt: skip
    environment = {**os.environ, **IMPORTABLE, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "they agree" in done.stdout, f"{done.stdout}\n{done.stderr}"


def test_the_import_stays_fast():
    """what takes seconds to import is left to who uses it; so is transformers"""
    code = "import sys, fused_layernorm; print(*sys.modules)"
    imported = run_code(code).stdout.split()
    assert "fused_layernorm.functional" in imported
    assert not {"torch.distributed.tensor", "torch._dynamo", "torch._inductor", "transformers"} & set(imported)
