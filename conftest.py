"""What every suite of this repository shares: a marker, and a header that names the backend and the device."""

import torch


def pytest_configure(config):
    config.addinivalue_line("markers", "core: the part of the table that is run again on the reference backend")


def pytest_report_header():
    import fused_layernorm

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"fused_layernorm {fused_layernorm.__version__}: backend {fused_layernorm.backend()}, {gpu}"
