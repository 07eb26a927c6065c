"""What tests share: models with norms worth looking at, how their results are judged, how a process compiles."""

import copy
import gc
import importlib
import inspect
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from fork_server import run_code

from fused_layernorm import replace_norms, restore_norms
from fused_layernorm._build import toolchain

ROOT = Path(__file__).resolve().parents[1]
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")],
    ),
]


def needs_memory(gib):
    """Skips the test where the GPU has less memory free; what torch only keeps for later is given back first. The other
    processes of pytest-xdist that share the GPU need 2 GiB each."""
    gc.collect()
    torch.cuda.empty_cache()
    gib += 2 * (int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)) - 1)
    if torch.cuda.mem_get_info()[0] < gib << 30:
        pytest.skip(f"needs {gib} GiB of free GPU memory")


def build_environment(device):
    """Environment variables for a process that compiles an extension for `device`; skips the test where none can."""
    # ninja may lie beside Python without being on PATH.
    environment = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])}
    if toolchain.cxx_problem() or not shutil.which("ninja", path=environment["PATH"]):
        pytest.skip(f"needs a compiler and ninja: {toolchain.cxx_problem() or 'no ninja'}")
    if device == "cpu":  # on a machine with a card, too
        return environment | {"USE_CUDA": "0", "CUDA_VISIBLE_DEVICES": ""}
    # torch takes the folder above the nvcc on PATH for the toolkit, which may be a script elsewhere.
    toolkits = toolchain.find_toolkits()
    return environment | ({"CUDA_HOME": str(toolkits[0][0])} if toolkits else {})


def package(name):
    """The imported package or module; without it the test is skipped, with the reason."""
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:  # RuntimeError: torchvision beside a torch of another build
        pytest.skip(f"needs {name}: {error}")


def skip_earlier_falcon(cls):
    """Skips the test for FalconH1RMSNormGated of transformers 5.17."""
    if cls.__name__ == "FalconH1RMSNormGated" and "if seq_len == 1" in inspect.getsource(cls.forward):
        pytest.skip("this FalconH1RMSNormGated returns another shape for one token, and is left as it is")


def randomize_norms(model, seed=0):
    """Give every norm parameter values of its own: a weight of ones would hide a weight that is not used."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if "norm" in type(module).__name__.lower():
                for parameter in module.parameters(recurse=False):
                    noise = 0.3 * torch.randn(parameter.shape, generator=generator)
                    parameter += noise.to(parameter)
    return model


def loss_and_gradients(model, run):
    """The output of run(model), and the gradients of all parameters for a loss that weighs every output differently."""
    model.zero_grad()
    output = run(model)
    direction = torch.linspace(-1, 1, output.numel(), device=output.device).view(output.shape)
    (output.float() * direction).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return output.detach(), gradients


def assert_no_worse(actual, original, reference, what, floor=0.0):
    """Against a more precise reference, at most twice the error of the original (in the 2-norm), and no NaN.

    The term added covers an original that happens to hit the reference: 4 machine epsilons of the tensor's size, or of
    `floor` for a tensor that is nothing but rounding (the gradient of an attention key's bias is 0 in theory).
    """
    assert actual.dtype == original.dtype and actual.shape == original.shape, what
    error, allowed = ((t.double() - reference.double()).norm().item() for t in (actual, original))
    rounding = 4 * torch.finfo(actual.dtype).eps * max(reference.double().norm().item(), floor)
    assert error <= 2 * allowed + rounding, f"{what}: {error:.3g}, original {allowed:.3g}, rounding {rounding:.3g}"


def check_model(model, run, dtype, device):
    """Outputs and gradients before and after replace_norms, and the exact original after restore_norms; the report."""
    model = randomize_norms(model).to(device=device, dtype=dtype).eval()
    wider = torch.float64 if dtype == torch.float32 else torch.float32
    reference = loss_and_gradients(copy.deepcopy(model).to(wider), run)
    original = loss_and_gradients(model, run)
    classes = [type(m) for m in model.modules()]
    parameters = dict(model.named_parameters())
    state_keys = list(model.state_dict())

    report = replace_norms(model)
    assert dict(model.named_parameters()).keys() == parameters.keys()
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert list(model.state_dict()) == state_keys
    fused = loss_and_gradients(model, run)
    assert_no_worse(fused[0], original[0], reference[0], "output")
    assert fused[1].keys() == original[1].keys()
    floor = 0.1 * max(gradient.double().norm().item() for gradient in reference[1].values())
    for name, gradient in fused[1].items():
        assert_no_worse(gradient, original[1][name], reference[1][name], f"gradient of {name}", floor)

    assert len(restore_norms(model).replaced) == len(report.replaced)
    assert [type(m) for m in model.modules()] == classes
    assert torch.equal(run(model), original[0])
    return report


LOAD_AND_RUN = """
import sys, torch, fused_layernorm
package, x, y = sys.argv[1:]
torch.save(torch._inductor.aoti_load_package(package)(torch.load(x)), y)
"""


def run_package(program, x, folder):
    """The result of an exported program that AOTInductor compiles, and a new process loads and runs. Skips the test
    where loading a package of PyTorch's own operations kills that process."""
    if toolchain.cxx_problem():
        pytest.skip(f"needs a C++ compiler: {toolchain.cxx_problem()}")

    def run(program):
        # The C++ around the kernels is compiled once, and not for speed
        options = {"aot_inductor.compile_wrapper_opt_level": "O0", "aot_inductor.precompile_headers": False}
        package = torch._inductor.aoti_compile_and_package(
            program, package_path=str(folder / "model.pt2"), inductor_configs=options
        )
        torch.save(x, folder / "x.pt")
        return run_code(LOAD_AND_RUN, package, folder / "x.pt", folder / "y.pt").returncode

    status = run(program)
    if status < 0:  # by a signal
        width = x.shape[-1]
        plain = torch.export.export(torch.nn.Linear(width, width, device=x.device), (x,))
        if run(plain) == status:
            pytest.skip(f"AOTInductor does not work here: a package of torch's own operations dies of signal {-status}")
    assert status == 0
    return torch.load(folder / "y.pt")
