"""What every suite of this repository shares: a header that names the backend and the device, and why tests were
skipped."""

from collections import Counter

import torch


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
