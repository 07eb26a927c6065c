"""What every suite of this repository shares: a header that names the backend and the device."""

import torch


def pytest_report_header():
    import fused_layernorm

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"fused_layernorm {fused_layernorm.__version__}: backend {fused_layernorm.backend()}, {gpu}"
