"""`python -m fused_layernorm [--json]`: what is installed, which kernels run here, and why. Exit status 1: broken.

`python -m fused_layernorm profile FILE.py:FUNCTION`: the cost of a model's norms before and after replace_norms.
"""

import argparse
import importlib
import json
import os
import platform
import runpy
import shutil
import sys
from pathlib import Path

import torch

from . import __version__, _backend, profile
from ._build import toolchain
from ._build.source_hash import source_hash


def visible_cards() -> list[dict]:
    if not torch.cuda.is_available():
        return []
    archs = (_backend.build_info or {}).get("arch_list") or ""
    cards = []
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        cards.append(
            {
                "name": torch.cuda.get_device_name(index),
                "capability": f"{major}.{minor}",
                "covered": toolchain.covers(archs, (major, minor)) if toolchain.parse_archs(archs) else None,
            }
        )
    return cards


def driver_version() -> str | None:
    if not shutil.which("nvidia-smi"):
        return None
    printed = toolchain.output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return printed.splitlines()[0].strip() if printed.strip() else None


def diagnose() -> dict:
    build = _backend.build_info
    now = source_hash()
    cards = visible_cards()
    problems = [_backend.problem] if _backend.problem else []
    for card in cards:
        if card["covered"] is False:
            problems.append(
                f"the kernels were compiled for {build['arch_list']}, which does not run on {card['name']} "
                f"({card['capability']}): set TORCH_CUDA_ARCH_LIST={card['capability']} and run {_backend.MEND}"
            )
    # Not an error: whoever has the sources may be changing them.
    stale = bool(build and now and build["csrc_hash"] != now)
    return {
        "fused_layernorm": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "driver": driver_version(),
        "cards": cards,
        "backend": _backend.backend,
        "reason": _backend.reason,
        "extension": getattr(_backend.extension, "__file__", None),
        "build": build,
        "csrc_hash_now": now,
        "sources_changed_since_build": stale,
        "toolkits": [{"home": str(home), "nvcc": version} for home, version in toolchain.find_toolkits()],
        "compiler": toolchain.find_cxx(),
        "compiler_problem": toolchain.cxx_problem(),
        "problems": problems,
    }


def print_diagnosis(found: dict) -> None:
    lines = []

    def line(name: str, value) -> None:
        lines.append(f"{name + ':':<18}{value}")

    line("fused_layernorm", found["fused_layernorm"])
    line("python", f"{found['python']} on {found['platform']}")
    line("torch", f"{found['torch']}, CUDA {found['torch_cuda'] or '-'}")
    line("driver", found["driver"] or "-")
    for card in found["cards"]:
        runs = {True: "the kernels run on it", False: "NOT covered by the kernels", None: "architectures unknown"}
        line("card", f"{card['name']}, compute capability {card['capability']}, {runs[card['covered']]}")
    if not found["cards"]:
        line("card", "none visible")
    line("backend", f"{found['backend']} ({found['reason']})")
    line("extension", found["extension"] or "-")
    build = found["build"]
    if build:
        debug = ", DEBUG" if build["debug"] else ""
        line("built for", f"torch {build['torch']}, CUDA {build['torch_cuda'] or '-'}, Python {build['python']}{debug}")
        line("built with", build["cxx"] + (f"; nvcc {build['nvcc']}" if build["nvcc"] else ""))
        line("architectures", build["arch_list"] or "- (no CUDA kernels)")
        line("csrc at build", build["csrc_hash"])
    if found["csrc_hash_now"]:
        changed = " (changed since the build: build again)" if found["sources_changed_since_build"] else ""
        line("csrc now", found["csrc_hash_now"] + changed)
    for toolkit in found["toolkits"]:
        line("nvcc", f"{toolkit['nvcc']} in {toolkit['home']}")
    if not found["toolkits"]:
        line("nvcc", "not found")
    line("C++ compiler", found["compiler_problem"] or found["compiler"])
    for problem in found["problems"]:
        line("PROBLEM", problem)
    print("\n".join(lines))  # in one write, for a pipe to `head`


def call_target(target: str):
    """(model, batch) of the function named by "file.py:function" or "package.module:function"."""
    place, _, name = target.rpartition(":")
    found = None
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise SystemExit(f"{target}: no such file, {place}")
        found = runpy.run_path(place).get(name)
    elif place:
        try:
            found = getattr(importlib.import_module(place), name, None)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise  # a module that the target imports
    if not callable(found):
        raise SystemExit(f"{target}: no such function; wanted FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION")
    made = found()
    if not (isinstance(made, (tuple, list)) and len(made) == 2 and isinstance(made[0], torch.nn.Module)):
        raise SystemExit(f"{target} must return (model, batch), a torch.nn.Module and its input; "
                         f"it returned {type(made).__name__}")  # fmt: skip
    return made


def to_device(value, device: str | None):
    return value if device is None else torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), value)


def main() -> int:
    try:
        status = run()
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # such as `| head`: the interpreter must not flush into it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def run() -> int:
    parser = argparse.ArgumentParser(prog="python -m fused_layernorm", description=__doc__.splitlines()[0])
    parser.add_argument("--version", action="version", version=f"fused_layernorm {__version__}")
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    command = parser.add_subparsers(dest="command").add_parser("profile", help="the cost of a model's norms")
    command.add_argument("target", help="FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION that returns (model, batch)")
    command.add_argument("--train", action="store_true", help="forward and backward, of the model in train mode")
    command.add_argument("--device", help="move model and batch there first, such as cuda")
    command.add_argument("--seconds", type=float, default=2.0, help="about how long to measure (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.command == "profile":
        model, batch = call_target(arguments.target)
        model = (model if arguments.device is None else model.to(arguments.device)).train(arguments.train)
        batch = to_device(batch, arguments.device)
        print(profile(model, batch, train=arguments.train, seconds=arguments.seconds))
        return 0
    found = diagnose()
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        print_diagnosis(found)
    return 1 if found["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
