"""compute-sanitizer over calls that reach every kernel and plan: `python benchmarks/sanitize.py [FOLDER]`, on a GPU.

Runs memcheck, initcheck and synccheck, all at once, each over the same calls in processes of its own, and writes
sanitizer_*.json into FOLDER (default: benchmarks/output). The lengths of rows are read from csrc/cuda/launch_plan.h:
what a plan holds, one less (ragged) and eight more, for its dtypes, forward and backward, few rows and many; so are
those of the kernels with an add stage, and there are calls of the types and sizes that these leave to others. A first
process (`--kernels`), not under a tool, holds the kernels that the calls launch against those in the extension. With
--seconds each process stops in time, and the record says how many of its calls it made; as their order is shuffled,
these are of every kind. Exit status 1: a tool reported something, did not run, a call failed, or a kernel was not
reached.

`--tools racecheck` writes racecheck_*.json. That tool takes seconds for a call, so it gets those that launch a kernel
which none before did, and PyTorch's kernels are left out. What it does not follow, and so reports, is said otherwise in
a build of its own, NVCC_APPEND_FLAGS=-DFLN_FOR_RACECHECK (csrc/cuda/launch_plan.h); there few rows are many.
"""

import argparse
import datetime
import functools
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

TOOLS = ("memcheck", "initcheck", "synccheck")
# Rows: few, and enough that each place of backward's ring in shared memory is used again
FEW, MANY, MANY_ELEMENTS = 3, 60_000, 5 << 20
# The end of a struct template's specialization in csrc/cuda/launch_plan.h: which x it is for.
SPECIALIZED = {"": "16 bits", "scalar_t, float": "16 bits", "float": "fp32", "float, float": "fp32", "double": "fp64"}


def whole_card():
    """The most blocks that share a row: kWholeCard of csrc/cuda/launch_plan.h."""
    text = (ROOT / "csrc" / "cuda" / "launch_plan.h").read_text()
    return int(re.search(r"constexpr int kWholeCard = (\d+);", text).group(1))


def ladders():
    """[(kind of x, [(text of a plan, elements that a block holds, blocks that share a row at most)])], in order."""
    text = (ROOT / "csrc" / "cuda" / "launch_plan.h").read_text().replace("kWholeCard", str(whole_card()))
    found = []
    for of, body in re.findall(r"struct \w+Ladder(?:<([^>]*)>)? \{\s*using type\s*=\s*Ladder<(.*?)>;", text, re.DOTALL):
        plans = []
        for name, numbers in re.findall(r"(Row|Stream|Backward)Plan<([\d, ]+)", body):
            numbers = [int(number) for number in numbers.split(",")]
            cluster = dict(enumerate(numbers)).get(3 if name == "Row" else 5, 1)
            defaults = [1] * ({"Row": 4, "Stream": 7, "Backward": 6}[name] - len(numbers))
            written = ", ".join(map(str, numbers + defaults))
            plans.append((f"{name}Plan<{written}>", numbers[0] * numbers[1] * numbers[2], cluster))
        found.append((SPECIALIZED[of], plans))
    if sum(len(plans) for _, plans in found) < 100:
        raise SystemExit("csrc/cuda/launch_plan.h is not written as it was: few plans were found in it")
    return found


def lengths(kind, light=False):
    """The lengths of rows that tell the plans for such x apart; `light`: those that fill them."""
    held = set()
    for _, plans in (ladder for ladder in ladders() if ladder[0] == kind):
        for _, elements, cluster in plans:  # 64 blocks of the whole card, and not all, so that a row is not too long
            held |= {elements * blocks for blocks in (1, 2, min(cluster, 64))} if cluster > 1 else {elements}
    if kind != "fp64":  # sizes that have a kernel with an epilogue
        text = (ROOT / "csrc" / "cuda" / "norm_epilogue.cu").read_text()
        (sizes,) = re.findall(rf"using {'Float32' * (kind == 'fp32')}Sizes = .*?<int, ([\d, ]+)>", text)
        held |= set(map(int, sizes.split(",")))
    held |= {
        1 << 18,
        (1 << 18) + 2,
        (1 << 18) + 8,
    }  # with more than the first, rows are huge (csrc/cuda/norm_huge.cu) in every dtype
    return sorted(n for hidden in held for n in (hidden - 1, hidden, *([] if light else [hidden + 8])) if n > 0)


def few_rows_vectors(light):
    """Up to so many vectors forward has few rows: kAnyFewRows of csrc/cuda/launch_plan.h, twice kUsualFewRows."""
    text = (ROOT / "csrc" / "cuda" / "launch_plan.h").read_text()
    (found,) = re.findall(r"kUsualFewRows\{\d+, \(kForRacecheck \? (\d+) : (\d+)\) \* 1024\}", text)
    return 2 * 1024 * int(found[not light])


# Kernels that a card with clusters of 16 never launches: it streams rows of more than 16384 columns, and has clusters
# where other cards have one block for a row of 4097 to 8192 columns.
FOR_OTHER_CARDS = re.compile(
    r"usual_norm_kernel<__(half|nv_bfloat16), 8, true, "
    r"|norm_backward_fused_kernel<__(half|nv_bfloat16), fused_layernorm::BackwardShape<64, 4, 8, 12, 1, true, false, "
)


def list_calls(light=False):
    """[(function, *arguments)], in an order that is the same every time. Options that are no template arguments of
    kernels (LayerNorm or RMSNorm, weights of float32, dropout, what is wanted) are drawn, not multiplied."""
    import torch

    from fused_layernorm import (
        fused_adaptive_layer_norm,
        fused_add_layer_norm,
        fused_add_rms_norm,
        fused_gated_layer_norm,
        fused_gated_rms_norm,
        fused_layer_norm,
        fused_layer_norm_quant,
        fused_rms_norm,
        fused_rms_norm_quant,
        fused_sandwich_rms_norm,
    )

    device = "cuda" if torch.cuda.is_available() else "cpu"
    half, brain, single, double = torch.float16, torch.bfloat16, torch.float32, torch.float64
    kinds = {half: "16 bits", brain: "16 bits", single: "fp32", double: "fp64"}
    draw = random.Random(0)
    calls = []

    def tensor(dtype, *shape, shift=0):
        numbers = torch.Size(shape).numel()
        return torch.randn(numbers + shift, dtype=dtype, device=device)[shift:].view(shape).requires_grad_()

    def backward(results, gradients, wanted, part):
        for leaves in wanted if part is None else wanted[part : part + 1]:
            torch.autograd.grad(results, leaves, gradients, retain_graph=True)

    def plain(rows, hidden_size, dtype, weight_dtype, norm, shift, options, part=None):
        x = tensor(dtype, rows, hidden_size, shift=shift)
        weight, bias = (tensor(weight_dtype, hidden_size) for _ in "wb")
        if "memory_efficient" in options:
            with torch.no_grad():  # for y to tell x
                weight.copy_(weight.abs() + 1)
                bias.clamp_(-1, 1)
        y = norm(x, weight, bias, **options)
        backward(y, torch.randn_like(y), ((x, weight, bias), (x,), (weight,)), part)

    def modulated(samples, tokens, hidden_size, dtype, residual_dtype, gated, scale_dtype, part=None):
        x = tensor(dtype, samples, tokens, hidden_size)
        residual = None if residual_dtype is None else tensor(residual_dtype, samples, tokens, hidden_size)
        gate = tensor(dtype, samples, hidden_size) if gated else None
        scale, shift = (tensor(scale_dtype, samples, hidden_size) for _ in "ss")
        results = fused_adaptive_layer_norm(x, scale, shift, gate=gate, residual=residual)
        results = results if residual is not None else (results,)
        leaves = tuple(t for t in (x, residual, scale, shift, gate) if t is not None)
        backward(results, tuple(torch.randn_like(t) for t in results), (leaves, (x,), leaves[-1:]), part)

    def add(rows, hidden_size, dtype, residual_dtype, z_dtype, weight_dtype, norm, p, out_dtype, activation, used,
            part=None):  # fmt: skip
        x, weight, bias = (tensor(dtype, rows, hidden_size), *(tensor(weight_dtype, hidden_size) for _ in "wb"))
        residual = None if residual_dtype is None else tensor(residual_dtype, rows, hidden_size)
        results = norm(x, residual, weight, bias, dropout_p=p, residual_dtype=z_dtype, out_dtype=out_dtype,
                       activation=activation, return_dropout_mask=True)[:2]  # fmt: skip
        leaves = (x,) if residual is None else (x, residual)
        wanted = ([(*leaves, weight, bias), (x,), (weight,)] if 0 in used else []) + [leaves, (x,), leaves[-1:]]
        results = tuple(results[i] for i in used)
        backward(results, tuple(torch.randn_like(t) for t in results), wanted, part)

    def gated_norm(rows, hidden_size, dtype, gate_dtype, weight_dtype, norm, heads, chosen, part=None):
        shape = (heads,) * (heads > 0) + (hidden_size,)
        x, gate = (tensor(of, -(-rows // max(heads, 1)), *shape) for of in (dtype, gate_dtype))
        weight, bias = (tensor(weight_dtype, *shape) for _ in "wb")
        y = norm(x, gate, weight, bias, normalized_shape=hidden_size, **chosen)
        backward(y, torch.randn_like(y), ((x, gate, weight, bias), (x,), (gate,)), part)

    def by_head(rows, hidden_size, dtype, heads, norm, part=None):
        x = tensor(dtype, -(-rows // heads), heads, hidden_size)
        weight, bias = (tensor(dtype, heads, hidden_size) for _ in "wb")
        y = norm(x, weight, bias, normalized_shape=hidden_size)
        backward(y, torch.randn_like(y), ((x, weight, bias), (x,), (weight,)), part)

    def sandwich(rows, hidden_size, dtype, residual_dtype, part=None):
        leaves = (*(tensor(of, rows, hidden_size) for of in (dtype, residual_dtype)),
                  *(tensor(dtype, hidden_size) for _ in "ww"))  # fmt: skip
        results = fused_sandwich_rms_norm(*leaves)
        backward(results, tuple(torch.randn_like(t) for t in results), (leaves, leaves[:1], leaves[3:]), part)

    def quantized(rows, hidden_size, dtype, residual_dtype, code, granularity, norm, is_usual, part=None):
        x, weight, bias = (tensor(dtype, rows, hidden_size), *(tensor(dtype, hidden_size) for _ in "wb"))
        residual = None if residual_dtype is None else tensor(residual_dtype, rows, hidden_size)
        scale = torch.ones(1, device=device) if granularity == "tensor" else None
        with torch.no_grad():
            norm(x, weight, None if is_usual else bias, dtype=code, scale=scale, granularity=granularity,
                 residual=residual, return_norm=not is_usual, group_size=math.gcd(hidden_size, 128))  # fmt: skip

    def usual(rows, hidden_size, dtype, norm, part=None):
        x, residual = (tensor(dtype, rows, hidden_size) for _ in "xr")
        with torch.no_grad():
            x[::3, 0] += 100  # LayerNorm computes the moments of such rows twice
        parameters = [tensor(dtype, hidden_size) for _ in ("wb" if "layer" in norm.__name__ else "w")]
        leaves = (x, residual, *parameters) if "add" in norm.__name__ else (x, *parameters)
        results = norm(*leaves)
        results = results if isinstance(results, tuple) else (results,)
        backward(results, tuple(torch.randn_like(t) for t in results), (leaves, leaves[:1], leaves[-1:]), part)

    after = ({"activation": "gelu"}, {"activation": "silu", "dropout_p": 0.1}, {"dropout_p": 0.1},
             {"activation": "relu"}, {"activation": "gelu_tanh"})  # fmt: skip
    options = ({}, {"out_dtype": single}, {"stats_grad": False}, {"memory_efficient": True}, *after[:3])

    def rows_for(hidden_size):
        if light:  # few rows are many there: with a residual, those of 4 * few_rows_vectors() * 8 elements
            most = max(max(36 * few_rows_vectors(light), 100 * min(hidden_size, 12288)) // hidden_size, 2 * FEW)
        else:  # more than few
            most = max(600 if hidden_size <= 12288 else FEW, min(MANY, MANY_ELEMENTS // hidden_size))
        return sorted({FEW, min(most, 1200) if light else most} | ({1} if hidden_size > 1 << 17 else set()))

    for dtype, weight_dtype in (
        (half, half), (half, single), (brain, brain), (brain, single), (single, single), (double, double)
    ):  # fmt: skip
        for hidden_size in lengths(kinds[dtype], light):
            for rows in rows_for(hidden_size):
                for shift, chosen in ((0, {}), (draw.choice((0, 0, 1)), draw.choice(options)))[
                    : 1 if light and rows != FEW else 2
                ]:
                    norm = draw.choice((fused_layer_norm, fused_rms_norm))
                    calls.append((plain, rows, hidden_size, dtype, weight_dtype, norm, shift, chosen))
            if dtype.itemsize == 2 and hidden_size % 8 == 7:  # ragged rows that begin at words of shared memory
                norm = draw.choice((fused_layer_norm, fused_rms_norm))
                calls.append((plain, rows_for(hidden_size)[-1], hidden_size - 1, dtype, weight_dtype, norm, 0, {}))
            if hidden_size * dtype.itemsize % 16 == 0:  # between few rows and many
                rows = 3 * few_rows_vectors(light) // 2 // (hidden_size * dtype.itemsize // 16)
                norm = draw.choice((fused_layer_norm, fused_rms_norm))
                calls.append((plain, max(rows, 1), hidden_size, dtype, weight_dtype, norm, 0, {}))

    def add_call(rows, hidden_size, dtype, residual_dtype, z_dtype, p, out_dtype=None,
                 activations=(None, None, "gelu", "silu")):  # fmt: skip
        weight_dtype = draw.choice((dtype, single if dtype != double else double))
        calls.append((add, rows, hidden_size, dtype, residual_dtype, z_dtype, weight_dtype,
                      draw.choice((fused_add_layer_norm, fused_add_rms_norm)), p, out_dtype,
                      draw.choice(activations), draw.choice(((0, 1), (0, 1), (0,), (1,)))))  # fmt: skip

    mixes = ((half, half), (half, single), (brain, brain), (brain, single), (single, single))
    for dtype, z in mixes:
        for hidden_size in lengths(kinds[z], light):
            if hidden_size % 8 == 0 and hidden_size <= 1 << 17:
                for rows in rows_for(hidden_size):
                    add_call(rows, hidden_size, dtype, draw.choice((z, z, None)), z, draw.choice((0.0, 0.1)))
    for dtype in (half, brain, single):
        for hidden_size in lengths(kinds[dtype], light):
            if hidden_size % 8 == 0 and hidden_size <= 1 << 16:
                for rows in rows_for(hidden_size):
                    norm = draw.choice((fused_layer_norm, fused_rms_norm))
                    for drops in (False, True):  # code of their own
                        chosen = draw.choice([each for each in after if ("dropout_p" in each) == drops])
                        calls.append((plain, rows, hidden_size, dtype, draw.choice((dtype, single)), norm, 0, chosen))
                    calls.append((plain, rows, hidden_size, dtype, draw.choice((dtype, single)), norm, 0,
                                  {"memory_efficient": True}))  # fmt: skip
    for dtype, z in mixes:
        for hidden_size in lengths(kinds[z], light):
            if hidden_size % 8 == 0 and hidden_size <= 1 << 16:
                for rows in rows_for(hidden_size):
                    calls.append((modulated, 3, (rows + 2) // 3, hidden_size, dtype, z, True, dtype))
                if dtype == z:  # without a residual short rows have plans of fewer threads
                    calls.append((modulated, 3, 1, hidden_size, dtype, None, False, dtype))
    # A scale for each token: of x's type, and of float32
    for dtype, z, of in (*((x, z, x) for x, z in mixes), (half, half, single), (brain, brain, single), (double,) * 3):
        for hidden_size in lengths(kinds[z], light=True):
            if hidden_size <= 1 << 16:
                rows = FEW if light else draw.choice(rows_for(hidden_size))
                residual_dtype = draw.choice((None, z)) if dtype == z else z
                gated = residual_dtype is not None and draw.random() < 0.5
                calls.append((modulated, rows, 1, hidden_size, dtype, residual_dtype, gated, of))
    gates = tuple({"activation": name, "norm_before_gate": first} for name in ("silu", "sigmoid", "gelu", None)
                  for first in (True, False))  # fmt: skip

    def gated_call(rows, hidden_size, dtype, gate_dtype):
        weight_dtype = draw.choice((dtype, single if dtype != double else double))
        calls.append((gated_norm, rows, hidden_size, dtype, gate_dtype, weight_dtype,
                      draw.choice((fused_gated_layer_norm, fused_gated_rms_norm)), draw.choice((0, 0, 5)),
                      draw.choice(gates)))  # fmt: skip

    for dtype in (half, brain, single):
        for hidden_size in lengths(kinds[dtype], light):
            if hidden_size % 8 == 0 and hidden_size <= 1 << 16:
                for rows in rows_for(hidden_size):
                    gated_call(rows, hidden_size, dtype, dtype)
    if light:  # a row of 1024 vectors, the most of few rows
        gated_call(1, 4096, single, single)
    for (dtype, of), hidden_size in itertools.product(
        ((half, single), (brain, double), (single, brain), (double, single), (single, single)), (7, 264, 4099)
    ):
        gated_call(37, hidden_size, dtype, of)
    for dtype, heads, hidden_size in itertools.product((half, brain, single, double), (3, 32, 700), (64, 131, 1024)):
        calls.append((by_head, 37 if light else draw.choice((37, 20_000)), hidden_size, dtype, heads,
                      draw.choice((fused_layer_norm, fused_rms_norm))))  # fmt: skip
    # Where every warp of backward's readers asks for rows, all 16 in turn, and every stage several times; an odd number
    for hidden_size, rows in ((4096, 161 if light else 10_561), (8192, 161 if light else 5281)):
        calls.append((plain, rows, hidden_size, brain, brain, fused_layer_norm, 0, {"activation": "gelu"}))
    rows_in_turns = ((half, 1152), (brain, 1024), (brain, 1792), (single, 512))
    for dtype, hidden_size in () if light else rows_in_turns:
        calls.append((modulated, 16, 2048, hidden_size, dtype, None, False, dtype))
    # What the stages leave to kernels of their own: ragged rows, mixtures of dtypes, fp64.
    for (dtype, z), p, hidden_size in itertools.product((*mixes, (double, double)), (0.0, 0.1), (1, 7, 131, 769, 4099)):
        add_call(draw.choice((FEW, 100)), hidden_size, dtype, draw.choice((z, None)), z, p)
    for dtype, p in itertools.product((half, brain), (0.0, 0.1)):
        add_call(37, 520, dtype, dtype, single, p)
        add_call(37, 520, dtype, single, dtype, p)
        add_call(37, 520, dtype, dtype, dtype, p, out_dtype=single)
    for (dtype, out_dtype), hidden_size in itertools.product(
        ((half, single), (brain, double), (single, double)), (7, 264, 4099)
    ):
        norm, chosen = draw.choice((fused_layer_norm, fused_rms_norm)), draw.choice(after) | {"out_dtype": out_dtype}
        calls.append((plain, 37, hidden_size, dtype, dtype, norm, 0, chosen))
    for dtype, hidden_size, gated in itertools.product(
        (half, brain, single, double), (131, 264, 1024, 4099, 20000), (False, True)
    ):
        tokens = 8 if light else draw.choice((8, 200))
        calls.append((modulated, 3, tokens, hidden_size, dtype, dtype, gated, dtype))
    for (dtype, z), granularity in itertools.product(mixes, ("tensor", "token", "group")):
        for hidden_size in lengths(kinds[z], light):
            if hidden_size % 8 == 0 and hidden_size <= 1 << 16:
                code = draw.choice((torch.float8_e4m3fn, torch.float8_e5m2, torch.int8))
                many = 8 * few_rows_vectors(light) // hidden_size + 37  # more than few
                calls.append((quantized, draw.choice((FEW, 37, many)), hidden_size, dtype, draw.choice((z, None)), code,
                              granularity, draw.choice((fused_layer_norm_quant, fused_rms_norm_quant)),
                              draw.random() < 0.5))  # fmt: skip
    norms = (fused_layer_norm, fused_rms_norm, fused_add_layer_norm, fused_add_rms_norm)
    for dtype, hidden_size, norm in itertools.product(
        (half, brain, single), (32, 64, 128, 256, 1536, 2560, 4096, 6144, 12288, 14336, 16384, 32768), norms
    ):
        for rows in {FEW, 8 * few_rows_vectors(light) // hidden_size + 37}:
            calls.append((usual, rows, hidden_size, dtype, norm))
    for dtype, hidden_size, is_usual in itertools.product((half, brain), (1536, 2560), (False, True)):
        calls.append((quantized, 600, hidden_size, dtype, None, torch.int8, "token", fused_rms_norm_quant, is_usual))
    for dtype, z in (*mixes, (double, double)):
        for hidden_size in {*lengths(kinds[dtype], light=True)} & {*lengths(kinds[z], light=True)}:
            if hidden_size <= 1 << 16:
                rows = draw.choice(rows_for(hidden_size) if light else (FEW, 37, 600))
                calls.append((sandwich, rows, hidden_size, dtype, z))
    # fp64 rows so many and narrow that their weight gradients have many partial sums; long rows without bias
    calls.append((plain, 5000 if light else MANY, 64, double, double, fused_layer_norm, 0, {}))
    calls.append((usual, FEW, 1 << 18, single, fused_rms_norm))
    # Many narrow rows, two vectors a thread; rows that not even the whole card holds
    for (dtype, z), hidden_size in itertools.product(() if light else mixes, (32, 64)):
        rows = 8 * few_rows_vectors(light) // hidden_size
        for activation in (None, "gelu"):
            add_call(rows, hidden_size, dtype, z, z, 0.1, activations=(activation,))
        calls.append((modulated, 4, rows // 4, hidden_size, dtype, z, True, dtype))
        for first in (True, False) if dtype == z else ():
            calls.append((gated_norm, rows, hidden_size, dtype, dtype, dtype, fused_gated_rms_norm, 0,
                          {"activation": "silu", "norm_before_gate": first}))  # fmt: skip
    pairs = ((half, half), (half, single), (brain, brain), (brain, single), (single, single))
    for (dtype, of), rows in itertools.product(() if light else pairs, (1, FEW)):
        calls.append((plain, rows, whole_card() * 32768 // dtype.itemsize + 8, dtype, of, fused_layer_norm, 0, {}))
    draw.shuffle(calls)
    if light:  # a call for each set of gradients; where a kernel is launched first, it has many rows
        calls.sort(key=lambda call: -math.prod(call[1 : 3 if call[0] is modulated else 2]))
        calls = [(*call, part) for call in calls for part in range(3)]
    return calls


@functools.cache
def crowded_columns():
    """Backward of ragged 16-bit rows of more columns takes clusters of 16 with two blocks an SM: the columns of eight
    such blocks."""
    crowded = r"BackwardPlan<\d+, \d+, 2, \d+, 2, 16>"
    return min(8 * elements for _, plans in ladders() for text, elements, _ in plans if re.match(crowded, text))


def is_followed(call, tool):
    """Whether the tool follows all that the call does. initcheck does not see what the copy engine writes, which is a
    ragged y of x's dtype: it reports any kernel that loads such a y, also PyTorch's. synccheck of version 2025.3 has
    two faults. It reports whole warps as divergent at a barrier of float64 rows that a cluster shares: in a build that
    traps there unless __activemask() has all lanes, check_kernels ran to its end. And where an SM has two blocks of
    clusters of 16, a kernel with any mbarrier ends with an illegal address under it: docs/reliability.md."""
    function, *arguments = call
    if tool == "synccheck" and sanitizer_version().startswith("2025.3"):
        if function.__name__ in ("plain", "add", "sandwich") and arguments[0] > FEW and arguments[2].itemsize == 2:
            hidden_size = arguments[1]
            if hidden_size % 8 and crowded_columns() < hidden_size <= 1 << 18:
                return False
        return all(str(argument) != "torch.float64" for argument in arguments)
    if tool != "initcheck" or function.__name__ not in ("plain", "sandwich", "gated_norm"):
        return True
    hidden_size, dtype = arguments[1:3]
    if dtype.itemsize == 8 or hidden_size * dtype.itemsize % 16 == 0:
        return True
    if function.__name__ == "plain":
        return "memory_efficient" not in arguments[6]
    is_last = function.__name__ == "gated_norm" and not arguments[7]["norm_before_gate"]
    return is_last or dtype.itemsize == 2  # else y of the plain norm is an intermediate result, in float32


def make_calls(calls, until):
    """Makes the calls in turn, till the clock says `until`; returns how many."""
    import torch

    made = 0
    for function, *arguments in calls:
        if time.time() > until:
            break
        print("call:", function.__name__, arguments, flush=True)
        try:
            function(*arguments)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        except Exception:
            print("failed:", function.__name__, arguments, file=sys.stderr)
            raise
        made += 1
    return made


def find(name):
    """A tool of the CUDA toolkit; triton brings some along."""
    from fused_layernorm._build import toolchain

    folders = [home / "bin" for home, _ in toolchain.find_toolkits()]
    folders += [Path(folder) / "triton" / "backends" / "nvidia" / "bin" for folder in sys.path]
    found = shutil.which(name) or next((str(f / name) for f in folders if (f / name).exists()), None)
    if not found:
        raise SystemExit(f"{name} was not found: it comes with the CUDA toolkit")
    return found


@functools.cache
def sanitizer_version():
    return re.search(r"Version (\S+)", output(find("compute-sanitizer"), "--version"))[1]


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def kernels(light):
    """Prints which kernels of the extension the calls launch on this card, which they do not, and, of the light calls,
    the numbers of those that launch one that none before did."""
    from torch.profiler import ProfilerActivity, profile

    from fused_layernorm import _backend
    from fused_layernorm._build import stable

    def plain(name):
        return name.replace(" ", "")  # demanglers differ in blanks

    compiled_file = _backend.extension.__file__ if _backend.extension else str(_backend.LIBRARIES / stable.KERNELS)
    entries = re.findall(r"STO_ENTRY\s+(\S+)", output(find("cuobjdump"), "-symbols", compiled_file))
    compiled = {name for name in output("c++filt", *entries).splitlines() if "probe_kernel" not in name}
    ours, launched, needed = {plain(name) for name in compiled}, set(), []
    calls = list_calls(light)
    step = 1 if light else len(calls)
    for first in range(0, len(calls), step):
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            make_calls(calls[first : first + step], math.inf)
        found = {plain(event.name) for event in profiled.events()} & ours
        if found - launched:
            needed.append(first)
        launched |= found
    missed = sorted(name for name in compiled if plain(name) not in launched)
    others = [name for name in missed if FOR_OTHER_CARDS.search(name)]
    print("kernels:", json.dumps({"compiled": len(compiled), "for_other_cards": len(others),
                                  "missed": [name for name in missed if name not in others],
                                  "calls": needed if light else None}))  # fmt: skip


def run(command, until, environment=None):
    """What it printed, and its exit status; killed with its children where it goes on half a minute after `until`."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, start_new_session=True, env={**os.environ, **(environment or {})}
    )
    try:
        out, err = process.communicate(timeout=None if until == math.inf else until - time.time() + 30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        err += "\nkilled: out of time"
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def run_kernels(until, light, card):
    done = run([sys.executable, __file__, "--kernels", *(["--light"] if light else [])], until, card)
    found = re.search(r"^kernels: (.*)", done.stdout, re.MULTILINE)
    return json.loads(found[1]) if found else {"compiled": None, "missed": [done.stderr[-2000:]]}


def run_tool(tool, shard, until, folder, card, only=None):
    if time.time() > until:
        return {"made": 0, "of": None, "summary": None, "clean": True, "exit_status": 0, "seconds": 0}
    log = folder / f"sanitizer_{tool}_{shard[0]}.log"
    command = [find("compute-sanitizer"), "--tool", tool, "--error-exitcode", "99", "--log-file", str(log)]
    if tool == "memcheck":
        command += ["--padding", "64"]  # what lies just behind a tensor is nobody's
    if tool in ("racecheck", "synccheck"):
        command += ["--num-cuda-barriers", "256"]  # in a block; its own count may be too low
    if tool == "racecheck":  # slow: PyTorch's kernels are left to others; and hazards by their threads, which say more
        command += ["--kernel-name", "kernel_substring=fused_layernorm", "--racecheck-report", "all"]
    started = time.perf_counter()
    calls = [sys.executable, __file__, "--calls", "--shard", "/".join(map(str, shard)), "--until", str(until)]
    if tool != "racecheck":
        calls += ["--followed-by", tool]
    else:
        calls += ["--light", "--only", ",".join(map(str, only))]
    done = run(
        [*command, *calls],
        until,
        {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", **card},  # each tensor an allocation that the tool knows
    )
    told = log.read_text() if log.exists() else ""
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", told)
    made, of = (re.search(rf"^{word}: (\d+)", done.stdout, re.MULTILINE) for word in ("made", "of"))
    begun = len(re.findall(r"^call: ", done.stdout, re.MULTILINE))
    return {
        "made": int(made[1]) if made else max(begun - 1, 0),  # by one that was killed: all but the last
        "of": int(of[1]) if of else None,
        "summary": summary[-1] if summary else None,
        "clean": done.returncode == 0 and bool(made) and bool(summary),
        "exit_status": done.returncode,
        "seconds": round(time.perf_counter() - started, 1),
        # The first report, and in which call Python stopped, say more than the last
        "said": None if done.returncode == 0 else told[:6000],
        "failed": re.findall(r"^failed: .*|^\S*Error: .*|^ +what\(\): .*", done.stderr, re.MULTILINE),
        "stderr": None if done.returncode == 0 else done.stderr[-1000:],
        "last": None if done.returncode == 0 else re.findall(r"^call: .*", done.stdout, re.MULTILINE)[-1:],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "benchmarks" / "output")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--processes", type=int, default=3, help="of each tool at once")
    parser.add_argument("--restarts", type=int, default=6, help="processes after each other, whose tool's memory grows")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="for all of it; without: till every call is made"
    )
    parser.add_argument("--cards", help="such as 1,2,3: their processes take turns with them; default: the first")
    parser.add_argument("--until", type=float, default=math.inf, help="the time when --calls ends")
    parser.add_argument("--calls", action="store_true", help="only the calls, in this process")
    parser.add_argument("--kernels", action="store_true", help="only which kernels they launch, in this process")
    parser.add_argument("--light", action="store_true", help="the calls for racecheck")
    parser.add_argument("--followed-by", metavar="TOOL", help="only the calls that this tool follows")
    parser.add_argument("--only", help="the numbers of the calls")
    parser.add_argument("--shard", default="0/1", help="first/step, of the calls")
    args = parser.parse_args()
    if args.kernels:
        return kernels(args.light)
    if args.calls:
        calls = list_calls(args.light)
        if args.followed_by:
            calls = [call for call in calls if is_followed(call, args.followed_by)]
        if args.only:
            calls = [calls[int(number)] for number in args.only.split(",")]
        first, of = map(int, args.shard.split("/"))
        calls = calls[first::of]
        print("of:", len(calls), flush=True)  # before them: known also of a process that is killed
        print("made:", make_calls(calls, args.until), flush=True)
        # Not the way out of Python, where one process of 14 was aborted ("terminate called without an active
        # exception") after all its calls
        os._exit(0)
    version = sanitizer_version()
    from test_benchmark import environment

    args.folder.mkdir(parents=True, exist_ok=True)
    record = {"meta": environment() | {"compute_sanitizer": version}, "kernels": None, "sanitizer": []}
    tools = args.tools.split(",")
    is_racecheck = tools == ["racecheck"]
    name = "racecheck" if is_racecheck else "sanitizer"
    path = args.folder / f"{name}_{datetime.datetime.now():%Y%m%d_%H%M%S}.json"
    shards = args.processes * (1 if is_racecheck else args.restarts)
    pools = {tool: ThreadPoolExecutor(args.processes) for tool in tools}
    with ThreadPoolExecutor(1) as pool:
        until = time.time() + args.seconds
        cards = itertools.cycle(
            [{"CUDA_VISIBLE_DEVICES": card} for card in (args.cards or "").split(",") if card] or [{}]
        )
        kernels_run = pool.submit(run_kernels, until, is_racecheck, next(cards))
        only = kernels_run.result().get("calls", []) if is_racecheck else None
        runs = {
            tool: [pools[tool].submit(run_tool, tool, (first, shards), until, args.folder, next(cards), only)
                   for first in range(shards)]
            for tool in tools
        }  # fmt: skip
        for tool, started in runs.items():
            parts: list[dict] = []
            record["sanitizer"].append({})
            for done in as_completed(started):
                parts.append(done.result())
                most = max(part["of"] or 0 for part in parts)  # of those that were not begun
                record["sanitizer"][-1] = {
                    "tool": tool,
                    "clean": len(parts) == shards and all(part["clean"] for part in parts),
                    "calls": sum(part["made"] for part in parts),
                    "of": sum(part["of"] or most for part in parts) + most * (shards - len(parts)),
                    "processes": parts,
                }
                path.write_text(json.dumps(record, indent=1) + "\n")  # what is known, should the run be killed
        record["kernels"] = kernels_run.result()
        path.write_text(json.dumps(record, indent=1) + "\n")
    for result in record["sanitizer"]:
        said = ", ".join(sorted({str(part["summary"]) for part in result["processes"]}))
        most = sum(part["seconds"] for part in result["processes"]) / args.processes
        verdict = "clean" if result["clean"] else "NOT CLEAN"
        print(f"{result['tool']:10} {verdict}, {result['calls']} of {result['of']} calls, {most:.0f} s: {said}")
    reached = record["kernels"]
    others, missed = reached.get("for_other_cards"), reached["missed"]
    print(f"kernels: {reached['compiled']}, {others} for other cards, {len(missed)} not reached")
    print(*(f"  {name}" for name in missed), sep="\n")
    print(f"wrote {path}")
    raise SystemExit(0 if all(result["clean"] for result in record["sanitizer"]) and not missed else 1)


if __name__ == "__main__":
    main()
