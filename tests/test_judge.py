"""The judge of norm_cases.py itself: planted faults are judged wrong, the same formulas without a fault right.

A norm and its backward are written here as PyTorch operations in the accumulation type, rounded to the storage dtypes
as a kernel does. Into backward go the faults that a weak tolerance lets pass: c1 or c2 missing, doubled, or taken from
another row. A judge that passes one of them at any size, dtype or fusion is too weak.
"""

import math

import pytest
import torch
from norm_cases import (
    ACTIVATIONS,
    GATES,
    OPS,
    Case,
    Fusion,
    bf16,
    check,
    compare_with_limits,
    dropout_scale,
    expected_fusion,
    fp16,
    fp32,
    fp64,
    judge_fusion,
    on_devices,
    one_thread,
    reference_dtype,
    value_and_slope,
    z_of_fusion,
)

from fused_layernorm import _backend, _ops, reference

ROWS = (2, 2)  # samples, tokens
HIDDEN_SIZES = (64, 256, 1024, 4096, 16384)
BACKWARD_FAULTS = {
    f"{name} {what}": (name, change)
    for name in ("c1", "c2")
    for what, change in (
        ("missing", torch.zeros_like),
        ("doubled", lambda c: 2 * c),
        ("of another row", lambda c: c.roll(1, 0)),
    )
}


def modulations(n, dtype, *names, by):
    return {name: ((*({"sample": ROWS[:1], "token": ROWS}[by]), n), dtype) for name in names}


def adaptive(n, dtype, by, residual=None):
    names = ("scale", "shift", "gate") if residual else ("scale", "shift")
    fields = {"kind": "adaptive", "modulations": modulations(n, dtype, *names, by=by)}
    return fields | (both(residual) if residual else {})


def gated(gate, activation="silu", gates_y=True):
    return {"kind": "gated", "gate": gate, "activation": activation, "gates_y": gates_y}


def wide_beside(dtype):
    return fp64 if dtype == fp64 else fp32


def both(dtype):
    return {"residual": dtype, "uses": ("y", "z")}


# name: the fields of a Fusion beside its case, of x's dtype and the hidden size
FUSIONS = {
    "plain": lambda dtype, n: {},
    "residual": lambda dtype, n: {"kind": "add", **both(dtype)},
    "float32 residual": lambda dtype, n: {"kind": "add", **both(wide_beside(dtype))},
    "dropout of x": lambda dtype, n: {"kind": "add", **both(dtype), "dropout_p": 0.3},
    "relu": lambda dtype, n: {"activation": "relu"},
    "gelu": lambda dtype, n: {"activation": "gelu"},
    "gelu_tanh": lambda dtype, n: {"activation": "gelu_tanh"},
    "silu beside a residual": lambda dtype, n: {"kind": "add", **both(dtype), "activation": "silu"},
    "dropout of y": lambda dtype, n: {"dropout_p": 0.3},
    "gelu and dropout of y": lambda dtype, n: {"activation": "gelu", "dropout_p": 0.3},
    "modulation by sample": lambda dtype, n: adaptive(n, dtype, "sample"),
    "modulation by token": lambda dtype, n: adaptive(n, dtype, "token"),
    "gate by sample": lambda dtype, n: adaptive(n, dtype, "sample", dtype),
    "gate by token, float32 residual": lambda dtype, n: adaptive(n, dtype, "token", wide_beside(dtype)),
    "memory_efficient": lambda dtype, n: {"memory_efficient": True, "seed": 1},
    "llama": lambda dtype, n: {"rounding": "llama"},
    "llama_exact": lambda dtype, n: {"rounding": "llama_exact"},
    "gemma": lambda dtype, n: {"rounding": "gemma"},
    "gemma_exact": lambda dtype, n: {"rounding": "gemma_exact"},
    "gated norm": lambda dtype, n: gated(dtype),
    "gated norm, float32 sigmoid": lambda dtype, n: gated(wide_beside(dtype), "sigmoid"),
    "norm of a gated x": lambda dtype, n: gated(dtype, gates_y=False),
    "norm of a gated x, bfloat16 gelu_tanh": lambda dtype, n: gated(bf16, "gelu_tanh", gates_y=False),
    "a weight for each head": lambda dtype, n: {},
}


def fusion_of(name, op, dtype, hidden_size):
    fields = FUSIONS[name](dtype, hidden_size)
    offset = 1.0 if name.startswith("gemma") else 0.0
    parameters = dict.fromkeys(("weight", "bias")) if fields.get("kind") == "adaptive" else {}
    case = Case((*ROWS, hidden_size), op=op, dtype=dtype, weight_offset=offset, **parameters,
                heads_ndim=int(name == "a weight for each head"))  # fmt: skip
    return Fusion(case, **{"seed": 3, **fields})


def results(drawn, given, keeps, fault=None):
    """y, and every gradient: DESIGN's formulas in the accumulation type, each result rounded to its dtype once."""
    case, kept = drawn.case, reference_dtype(drawn.case)
    z = z_of_fusion(drawn, given, keeps)
    wide = {name: t.to(kept) for name, t in given.items()}
    for name in drawn.modulations:
        wide[name] = reference.as_modulation(name, given[name], given["x"], 1).to(kept)
    zw = z.to(kept)
    mean = zw.mean(-1, keepdim=True) if case.op == "layer_norm" else torch.zeros_like(zw[..., :1])
    rstd = ((zw - mean).square().mean(-1, keepdim=True) + case.eps).rsqrt()
    x_hat = (zw - mean) * rstd
    w = wide["weight"] + case.weight_offset if "weight" in wide else torch.ones_like(x_hat[0, 0])
    b = wide.get("bias", torch.zeros_like(w))
    n = (x_hat * w + b).requires_grad_()
    m = n * (1 + wide["scale"]) + wide["shift"] if drawn.modulations else n
    if drawn.gate:
        opened, slope_of_gate = value_and_slope(GATES[drawn.activation], wide["gate"])
        after = m * opened if drawn.gates_y else m
    else:
        after = ACTIVATIONS[drawn.activation](m) if drawn.activation else m
    if drawn.kind == "plain" and keeps is not None:
        after = torch.where(keeps, after * dropout_scale(drawn.dropout_p), 0.0)
    y = (x_hat.to(case.dtype).to(kept) * w + b if drawn.rounds_x_hat else after).to(case.y_dtype)

    (dn,) = torch.autograd.grad(after, n, wide["grad_output"])
    n = n.detach()
    if drawn.memory_efficient:
        assert _ops.y_tells_x(given["x"], given["weight"], given["bias"], case.weight_offset)
        x_hat = (y.to(kept).detach() - b) / w
    wdy = w * dn
    c = {"c1": (x_hat * wdy).mean(-1, keepdim=True), "c2": wdy.mean(-1, keepdim=True)}
    if case.op == "rms_norm":
        c["c2"] = torch.zeros_like(c["c2"])
    if fault:
        name, change = BACKWARD_FAULTS[fault]
        c[name] = change(c[name].flatten(0, -2)).view(c[name].shape)
    dz = (wdy - x_hat * c["c1"] - c["c2"]) * rstd
    if "z" in drawn.uses:
        dz = dz + wide["grad_z"]
    of_x = dz * wide["gate"] if "gate" in drawn.modulations else dz
    if drawn.kind == "add" and keeps is not None:
        of_x = torch.where(keeps, dz * dropout_scale(drawn.dropout_p), 0.0)

    gradients = {"x": of_x, "residual": dz, "weight": (dn * x_hat).sum_to_size(case.parameter_shape),
                 "bias": dn.sum_to_size(case.parameter_shape)}  # fmt: skip
    if drawn.gate:
        of_factor = wide["grad_output"] * n if drawn.gates_y else dz * wide["x"]
        gradients |= {"gate": of_factor * slope_of_gate, "x": dz if drawn.gates_y else dz * opened}
    summed = {"scale": wide["grad_output"] * n, "shift": wide["grad_output"], "gate": dz * wide["x"]}
    gradients |= {name: summed[name].sum_to_size(wide[name].shape) for name in drawn.modulations}
    found = {name: t.to(given[name].dtype).view(given[name].shape) for name, t in gradients.items() if name in given}
    return {"y": y.detach(), **({"z": z} if drawn.kind != "plain" and drawn.residual else {}), **found}


def is_right(judge, *arguments):
    try:
        judge(*arguments)
    except AssertionError:
        return False
    return True


def wrong_outputs(drawn, given, found):
    """(what, results with one output that is wrong): y is x, an output not written, one element of it NaN."""
    yield "y is x", {"y": given["x"].to(found["y"].dtype)}
    for name, t in found.items():
        if name != "z":
            last = t.clone()
            last.view(-1)[-1] = float("nan")
            yield f"{name} not written", {name: torch.full_like(t, float("nan"))}
            yield f"{name} of zeros", {name: torch.zeros_like(t)}
            yield f"one element of {name} not written", {name: last}


@on_devices("name,dtype,hidden_size,op", [
    (name, dtype, hidden_size, op) for name in FUSIONS for dtype in (fp16, bf16, fp32, fp64)
    for hidden_size in HIDDEN_SIZES for op in (OPS if "rounding" not in FUSIONS[name](dtype, 64) else ("rms_norm",))
], few_on_cpu=True)  # fmt: skip
@one_thread()
def test_planted_faults_of_fusions(device, name, dtype, hidden_size, op):
    """each fault is judged wrong, and what has none right"""
    if name == "memory_efficient" and _backend.library:
        pytest.skip("the wheel's library alone saves x")
    drawn = fusion_of(name, op, dtype, hidden_size)
    given, keeps = drawn.tensors(device), drawn.keeps(device)
    right = results(drawn, given, keeps)
    judge_fusion(drawn, given, right)
    limits = expected_fusion(drawn, given, right.get("z", given["x"]), keeps)
    wrong = dict(wrong_outputs(drawn, given, right))
    for fault in BACKWARD_FAULTS:
        if not (fault.startswith("c2") and op == "rms_norm"):
            found = results(drawn, given, keeps, fault)
            of_z = ["x", "residual", *(["gate"] if drawn.gate and not drawn.gates_y else [])]
            wrong |= {f"{fault}, gradient of {n}": {n: found[n]} for n in of_z if n in found}
    assert not [what for what, found in wrong.items() if is_right(compare_with_limits, drawn, given, found, limits)]


@on_devices("dtype", [fp16, bf16, fp32, fp64])
@one_thread()
def test_planted_faults_of_plain_norms(device, dtype):
    """the same of `check`, whose limits may be torch's own error"""
    passed = []
    for op in OPS:
        for hidden_size in HIDDEN_SIZES:
            drawn = fusion_of("plain", op, dtype, hidden_size)
            inputs = drawn.inputs(device)
            given = {name: getattr(inputs, name) for name in vars(inputs)}
            right = results(drawn, given, None)
            check(drawn.case, inputs, right)
            wrong = dict(wrong_outputs(drawn, given, right))
            for fault in BACKWARD_FAULTS:
                if not (fault.startswith("c2") and op == "rms_norm"):
                    wrong[fault] = {"x": results(drawn, given, None, fault)["x"]}
            passed += [
                f"{op} {hidden_size}: {what}"
                for what, found in wrong.items()
                if is_right(check, drawn.case, inputs, found, tuple(found))
            ]
    assert not passed


def test_truth_of_gelu_far_from_zero():
    """the truth keeps its digits where 1 + erf and 1 + tanh have none left"""
    t = torch.tensor([-10.0, -14.0], dtype=torch.float64)
    tails = {
        "gelu": [0.5 * u * math.erfc(-u / math.sqrt(2)) for u in t.tolist()],
        "gelu_tanh": [u * math.exp(math.sqrt(8 / math.pi) * (u + 0.044715 * u**3)) for u in t.tolist()],
    }
    for activation, tail in tails.items():
        torch.testing.assert_close(ACTIVATIONS[activation](t), torch.tensor(tail, dtype=t.dtype), rtol=1e-12, atol=0)
