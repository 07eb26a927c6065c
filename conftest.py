"""What every suite of this repository shares: a header that names the backend and the device, and why tests were
skipped."""

import getpass
import os
import tempfile
from collections import Counter

import torch

CACHED_BYTES = 2 << 30

# TEST_CARDS=0,1: pytest-xdist's workers take turns with these cards (benchmarks/record.sh).
if (cards := os.environ.get("TEST_CARDS")) and (worker := os.environ.get("PYTEST_XDIST_WORKER")):
    chosen = cards.split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = chosen[int(worker.removeprefix("gw")) % len(chosen)]

# Inductor's cache does not distinguish instruction sets. Code compiled for one crashes, or is wrong, in a process that
# ATEN_CPU_CAPABILITY limits to another (torch 2.13, also without this library).
if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
    cache = os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}_{capability}")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)


def pytest_runtest_teardown():
    """Returns the memory that PyTorch keeps for later tensors: one GPU serves several processes of tests, and each kept
    up to 27 GiB."""
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > CACHED_BYTES:
        torch.cuda.empty_cache()


def pytest_report_header():
    import fused_layernorm

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"fused_layernorm {fused_layernorm.__version__}: backend {fused_layernorm.backend()}, {gpu}"


def pytest_terminal_summary(terminalreporter):
    skipped = terminalreporter.stats.get("skipped", ())
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped)
    if reasons:
        terminalreporter.section("skipped")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:6} {reason}")
