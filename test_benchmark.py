"""How fast is it? fused_layernorm against PyTorch (and other providers) on this machine's GPU, or on its CPU.

    python test_benchmark.py                                    the small shapes, then LLM shapes
    python test_benchmark.py --shapes sweep --dtype bf16,fp32   hidden sizes 256 to 262144, 256 MiB of x each
    python test_benchmark.py --shapes 8192x4096,1x16777216 --op rms_norm --providers fused,torch,compile
    python test_benchmark.py --shapes small --direction call_no_grad,step
    python test_benchmark.py --shapes sweep --record benchmarks/results/my_gpu

benchmarks/README.md says what the numbers mean and how to repeat a recorded run.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent
HAS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if HAS_CUDA else "cpu"

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
EPS = {"layer_norm": 1e-5, "rms_norm": 1e-6}  # the ops, with their usual eps
DIRECTIONS = {
    "forward": "the kernel under no_grad",
    "backward": "all gradients of one norm",
    "call_no_grad": "wall time of a call in a Python loop, no gradients",
    "step": "wall time of forward and backward in a Python loop",
}
SMALL_SHAPES = [(32, 512), (64, 1024), (128, 2048), (256, 4096)]
LLM_SHAPES = [(16384, 1024), (16384, 2048), (8192, 4096), (8192, 5120), (8192, 8192), (4096, 16384)]
SWEEP_BYTES = 256 << 20
SWEEP_HIDDEN_SIZES = sorted([*(1 << k for k in range(8, 19)), 769, 4097, 12345])


@dataclass(frozen=True)
class Cell:
    """One line of the results, without the provider."""

    op: str
    direction: str
    dtype: str
    weight_dtype: str
    rows: int
    hidden_size: int

    def __str__(self):
        return f"{self.op} {self.dtype} {self.rows}x{self.hidden_size} {self.direction}"


def bytes_moved(cell):
    """What must pass between the chip and memory: x and y forward; x, grad_output and grad_input backward.

    Parameters, their gradients and the rows' statistics are left out: the roofs move the same bytes as this.
    """
    streams = {"forward": 2, "backward": 3}[cell.direction]
    return streams * cell.rows * cell.hidden_size * DTYPES[cell.dtype].itemsize


# ---- providers -----------------------------------------------------------------------------------------------------
# To add one: a function that takes a Cell and returns norm(x, weight, bias) -> y with autograd, under @provider. It
# imports what it needs inside; an ImportError, or Unavailable with a reason, makes the benchmark skip it by name.

PROVIDERS = {}


class Unavailable(Exception):
    """Why a provider does not run here, or not this cell."""


def provider(function):
    PROVIDERS[function.__name__] = function
    return function


@provider
def fused(cell):
    from fused_layernorm import fused_layer_norm, fused_rms_norm

    norm = {"layer_norm": fused_layer_norm, "rms_norm": fused_rms_norm}[cell.op]
    eps = EPS[cell.op]
    return lambda x, weight, bias: norm(x, weight, bias, eps)


@provider
def torch_eager(cell):
    shape, eps = (cell.hidden_size,), EPS[cell.op]
    if cell.op == "layer_norm":
        return lambda x, weight, bias: F.layer_norm(x, shape, weight, bias, eps)
    return lambda x, weight, bias: F.rms_norm(x, shape, weight, eps)


PROVIDERS["torch"] = PROVIDERS.pop("torch_eager")


@provider
def compile(cell):
    if not HAS_CUDA:
        raise Unavailable("timed on a GPU only")
    torch.compiler.reset()  # every cell compiles for its own shape
    torch._functorch.config.donated_buffer = False  # backward is run many times from one forward
    return torch.compile(PROVIDERS["torch"](cell), dynamic=False)


# ---- what is timed -------------------------------------------------------------------------------------------------


@dataclass
class Inputs:
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    grad_output: torch.Tensor
    out: torch.Tensor  # where the roofs write

    def parameters(self, op):
        return self.weight, (self.bias if op == "layer_norm" else None)


def make_inputs(cell, sets):
    def randn(*shape, dtype):
        return torch.randn(shape, device=DEVICE, dtype=DTYPES[dtype])

    rows, hidden_size = cell.rows, cell.hidden_size
    return [
        Inputs(
            x=randn(rows, hidden_size, dtype=cell.dtype),
            weight=randn(hidden_size, dtype=cell.weight_dtype),
            bias=randn(hidden_size, dtype=cell.weight_dtype),
            grad_output=randn(rows, hidden_size, dtype=cell.dtype),
            out=torch.empty(rows, hidden_size, device=DEVICE, dtype=DTYPES[cell.dtype]),
        )
        for _ in range(sets)
    ]


def roof_call(cell, inputs):
    """The plain pass over the same bytes: a copy forward, two reads and one write backward."""
    if cell.direction == "forward":
        return lambda: inputs.out.copy_(inputs.x)
    return lambda: torch.add(inputs.x, inputs.grad_output, out=inputs.out)


def provider_call(norm, cell, inputs):
    """A function without arguments that does, once, what the cell's direction says."""
    x, (weight, bias) = inputs.x, inputs.parameters(cell.op)
    if cell.direction in ("forward", "call_no_grad"):

        def call():
            with torch.no_grad():
                return norm(x, weight, bias)

        return call

    leaves = [t.detach().requires_grad_() for t in (x, weight, bias) if t is not None]
    bias = leaves[2] if bias is not None else None
    grad_output = inputs.grad_output
    if cell.direction == "step":
        return lambda: torch.autograd.grad(norm(leaves[0], leaves[1], bias), leaves, grad_output)
    # Backward alone. In a CUDA graph nothing but its kernels is left of autograd.
    y = norm(leaves[0], leaves[1], bias)
    return lambda: torch.autograd.grad(y, leaves, grad_output, retain_graph=True)


# ---- timing --------------------------------------------------------------------------------------------------------


@dataclass
class Times:
    """Microseconds of one call: median, and the 20th and 80th percentile of the rounds."""

    us: float
    p20: float
    p80: float

    @classmethod
    def of(cls, samples):
        ordered = sorted(samples)
        at = lambda share: ordered[round(share * (len(ordered) - 1))]  # noqa: E731
        return cls(statistics.median(ordered), at(0.2), at(0.8))


def l2_bytes():
    return getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 0) or (64 << 20)


def is_l2_cold(cell):
    """Problems far smaller than the L2 cache are timed warm: in a model their input is fresh from the layer before."""
    return bytes_moved(cell) > l2_bytes() // 4


def sets_of_inputs(cell):
    """How many sets of inputs to rotate over, so that what a call finds in the L2 cache is not its own."""
    if not HAS_CUDA or cell.direction not in ("forward", "backward") or not is_l2_cold(cell):
        return 1
    forward = 2 * cell.rows * cell.hidden_size * DTYPES[cell.dtype].itemsize
    return 1 if forward > 2 * l2_bytes() else math.ceil(2 * l2_bytes() / forward) + 1


class GraphTimer:
    """GPU time: CUDA graphs of many launches each, replayed in turns, so that drifting clocks touch all alike."""

    WARM_UP, ROUNDS = 2, 20

    def __init__(self):
        self.stream = torch.cuda.Stream()

    def time(self, cell, calls_of):
        """{name: Times} for `calls_of`, {name: one call per set of inputs}."""
        expected_us = bytes_moved(cell) / 4e6
        launches = min(100, max(4, math.ceil(1000 / expected_us)))
        launches = math.ceil(launches / max(map(len, calls_of.values()))) * max(map(len, calls_of.values()))
        graphs = {name: self.capture(calls, launches) for name, calls in calls_of.items()}
        events = {name: [] for name in graphs}
        with torch.cuda.stream(self.stream):
            for _ in range(self.WARM_UP + self.ROUNDS):
                for name, (graph, _) in graphs.items():
                    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    start.record()
                    graph.replay()
                    end.record()
                    events[name].append((start, end))
        torch.cuda.synchronize()
        return {
            name: Times.of([1000 * start.elapsed_time(end) / launches for start, end in pairs[self.WARM_UP :]])
            for name, pairs in events.items()
        }

    def capture(self, calls, launches):
        """A graph of `launches` calls, and its last outputs: one per set stays alive, so that writes rotate too."""
        outputs = [None] * len(calls)
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            for _ in range(2):
                for call in calls:
                    call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            for launch in range(launches):
                outputs[launch % len(calls)] = calls[launch % len(calls)]()
        return graph, outputs


class LoopTimer:
    """Wall time of calls in a Python loop, all names in turns. On a GPU the loop ends with a synchronization."""

    def __init__(self, rounds=15, round_us=3000, with_events=False):
        self.rounds, self.round_us, self.with_events = rounds, round_us, with_events

    def time(self, cell, calls_of):
        calls = {name: of[0] for name, of in calls_of.items()}
        repeats = {name: self.repeats(call) for name, call in calls.items()}
        samples = {name: [] for name in calls}
        for _ in range(self.rounds):
            for name, call in calls.items():
                samples[name].append(self.run(call, repeats[name]) / repeats[name])
        return {name: Times.of(of) for name, of in samples.items()}

    def repeats(self, call):
        for _ in range(3):
            call()
        once = self.run(call, 1)
        return max(1, min(100, round(self.round_us / max(once, 1e-3))))

    def run(self, call, repeats):
        """Microseconds of `repeats` calls: between two CUDA events, or by the clock."""
        if self.with_events:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(repeats):
                call()
            end.record()
            torch.cuda.synchronize()
            return 1000 * start.elapsed_time(end)
        if HAS_CUDA:
            torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(repeats):
            call()
        if HAS_CUDA:
            torch.cuda.synchronize()
        return 1e6 * (time.perf_counter() - started)


class Bench:
    """Measures cells and collects their records."""

    def __init__(self, providers):
        self.providers = providers
        self.results = []
        self.notes = {}  # why a provider was skipped
        self.graph_timer = GraphTimer() if HAS_CUDA else None

    def measure(self, cell, timer=None, keep=True):
        """{name: Times} of the cell's providers, and of "roof" where there is one; kept in `results`."""
        on_graph = timer is None and HAS_CUDA and cell.direction in ("forward", "backward")
        timer = timer or (self.graph_timer if on_graph else LoopTimer())
        calls_of = {}
        try:
            stream = self.graph_timer.stream if on_graph else None
            with torch.cuda.stream(stream):  # backward runs on the stream of its forward; None changes nothing
                sets = make_inputs(cell, sets_of_inputs(cell) if on_graph else 1)
                if on_graph:
                    calls_of["roof"] = [roof_call(cell, inputs) for inputs in sets]
                for name in self.providers:
                    try:
                        norm = PROVIDERS[name](cell)
                        calls_of[name] = [provider_call(norm, cell, inputs) for inputs in sets]
                        calls_of[name][0]()
                    except torch.cuda.OutOfMemoryError:
                        raise
                    except (Unavailable, ImportError, RuntimeError, TypeError, NotImplementedError) as error:
                        calls_of.pop(name, None)
                        self.skip(name, cell, error)
            times = timer.time(cell, calls_of)
        except torch.cuda.OutOfMemoryError:
            self.notes.setdefault(f"{cell}: left out, not enough GPU memory")
            times = {}
        finally:
            calls_of.clear()
            sets = None
            if HAS_CUDA:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
        for name, t in times.items():
            if name != "roof" and keep:
                self.results.append(self.record(cell, name, t, times.get("roof"), on_graph))
        return times

    def skip(self, name, cell, error):
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        where = "" if isinstance(error, (Unavailable, ImportError)) else f" for {cell}"
        self.notes.setdefault(f"{name}: skipped{where}: {reason}")

    @staticmethod
    def record(cell, name, times, roof, on_graph):
        return {
            "op": cell.op,
            "direction": cell.direction,
            "dtype": cell.dtype,
            "weight_dtype": cell.weight_dtype,
            "rows": cell.rows,
            "hidden_size": cell.hidden_size,
            "provider": name,
            "us": round(times.us, 3),
            "roof_us": round(roof.us, 3) if roof else None,
            "fraction": round(roof.us / times.us, 4) if roof else None,
            "p20_us": round(times.p20, 3),
            "p80_us": round(times.p80, 3),
            "gb_per_s": round(bytes_moved(cell) / times.us / 1e3, 1) if roof else None,
            "timing": ("graph, L2 cold" if is_l2_cold(cell) else "graph, L2 warm") if on_graph else "loop",
            "device": DEVICE,
        }


# ---- printing ------------------------------------------------------------------------------------------------------


def print_table(title, header, rows):
    """A box with a title, a header and rows of strings; the first column is flush left, the others right."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    inner = max(sum(widths) + 3 * (len(widths) - 1) + 2, len(title) + 2)
    widths[-1] += inner - (sum(widths) + 3 * (len(widths) - 1) + 2)

    def text(cells):
        parts = [cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(cells, widths))]  # noqa: B905
        return f"║ {' │ '.join(parts)} ║"

    print(f"╔{'═' * inner}╗")
    print(f"║ {title.ljust(inner - 2)} ║")
    print(f"╠{'═' * inner}╣")
    print(text(header))
    print(f"╠{'═' * inner}╣")
    for row in rows:
        print(text(row))
    print(f"╚{'═' * inner}╝\n", flush=True)


def number(value, digits=1):
    return "-" if value is None else f"{value:.{digits}f}"


class Progress:
    """A bar on stderr while cells are measured; silent where stderr is not a terminal."""

    def __init__(self, total):
        self.total, self.done, self.started = total, 0, time.perf_counter()

    def step(self, label):
        if sys.stderr.isatty():
            filled = round(30 * self.done / self.total)
            left = ""
            if self.done:
                left = f"{(time.perf_counter() - self.started) / self.done * (self.total - self.done):4.0f} s left"
            print(f"\r\033[K[{'█' * filled}{'·' * (30 - filled)}] {self.done}/{self.total} {label} {left}",
                  end="\r\033[K" if self.done == self.total else "", file=sys.stderr, flush=True)  # fmt: skip
        self.done += 1


def print_small_shapes(bench):
    """The first table: eager calls of LayerNorm in fp32 on small shapes."""
    rows = []
    progress = Progress(len(SMALL_SHAPES))
    eager = LoopTimer(rounds=9, with_events=HAS_CUDA)
    for shape in SMALL_SHAPES:
        progress.step(f"layer_norm fp32 {shape}")
        cell = Cell("layer_norm", "call_no_grad", "fp32", "fp32", *shape)
        call = bench.measure(cell, timer=eager, keep=False)
        row = [f"({shape[0]}, {shape[1]})", *versus(call)]
        if HAS_CUDA:
            row += versus(bench.measure(Cell("layer_norm", "forward", "fp32", "fp32", *shape)))
        rows.append(row)
    progress.step("")
    header = ["Shape", "PyTorch (µs)", "fused (µs)", "speedup"]
    title = "LayerNorm forward, fp32: a call, launch included"
    if HAS_CUDA:
        header += ["PyTorch, GPU (µs)", "fused, GPU (µs)", "speedup"]
        title += " (CUDA events) | GPU time alone (CUDA graph)"
    else:
        title = "LayerNorm forward, fp32, CPU kernels (no GPU here)"
    print_table(title, header, rows)


def versus(times):
    torchs, ours = times.get("torch"), times.get("fused")
    speedup = f"{torchs.us / ours.us:.2f}x" if torchs and ours else "-"
    return [number(torchs.us) if torchs else "-", number(ours.us) if ours else "-", speedup]


def print_cells(bench, cells):
    """Measure `cells`; one table for each op, dtype and kind of time."""
    progress = Progress(len(cells))
    groups = {}
    for cell in cells:
        progress.step(str(cell))
        groups.setdefault((cell.op, cell.dtype, cell.direction), []).append((cell, bench.measure(cell)))
    progress.step("")
    for (op, dtype, direction), measured in groups.items():
        names = [name for name in bench.providers if any(name in times for _, times in measured)]
        if not names:
            continue
        has_roof = any("roof" in times for _, times in measured)
        header = ["rows x hidden"]
        if has_roof:
            header += ["copy µs" if direction == "forward" else "2R1W µs", "GB/s"]
        for name in names:
            header += [f"{name} µs", "GB/s", "of roof"] if has_roof else [f"{name} µs"]
        compared = "fused" in names and "torch" in names
        if compared:
            header += ["vs torch"]
        rows = []
        for cell, times in measured:
            roof = times.get("roof")
            row = [f"{cell.rows} x {cell.hidden_size}" + ("" if not roof or is_l2_cold(cell) else " (L2 warm)")]
            if has_roof:
                row += [number(roof.us), number(bytes_moved(cell) / roof.us / 1e3, 0)] if roof else ["-", "-"]
            for name in names:
                t = times.get(name)
                row.append(number(t.us) if t else "-")
                if has_roof:
                    row += ["-", "-"] if not (t and roof) else [
                        number(bytes_moved(cell) / t.us / 1e3, 0), number(roof.us / t.us, 2)]  # fmt: skip
            if compared:
                row.append(versus(times)[2])
            rows.append(row)
        print_table(f"{op}, {dtype}, {direction}: {DIRECTIONS[direction]}", header, rows)


def print_verdict(bench):
    """In how many cells our GPU time (CPU: time) is longer than torch's, by name."""
    us = {}
    for result in bench.results:
        if result["direction"] in ("forward", "backward"):
            key = tuple(result[k] for k in ("op", "direction", "dtype", "rows", "hidden_size"))
            us.setdefault(key, {})[result["provider"]] = result["us"]
    both = {key: times for key, times in us.items() if "fused" in times and "torch" in times}
    slower = {key: times for key, times in both.items() if times["fused"] > times["torch"]}
    if both:
        print(f"fused is slower than torch in {len(slower)} of {len(both)} forward and backward cells.")
    for (op, direction, dtype, rows, hidden_size), times in slower.items():
        print(
            f"  {op} {dtype} {rows}x{hidden_size} {direction}: {times['fused']:.1f} µs, torch {times['torch']:.1f} µs"
        )
    for note in bench.notes:
        print(note)


# ---- records -------------------------------------------------------------------------------------------------------


def output_of(*command):
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def environment():
    """What a record of anything needs to be repeated; benchmarks/record_tests.py uses it too. COMMIT in the environment
    names the commit where the sources were copied without their repository."""
    import fused_layernorm
    from fused_layernorm._source_hash import source_hash

    commit = os.environ.get("COMMIT")
    if (
        not commit
        and (commit := output_of("git", "rev-parse", "HEAD"))
        and output_of("git", "status", "--porcelain", "--", "csrc", "fused_layernorm", "test_benchmark.py")
    ):
        commit += " with changes"
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),  # noqa: UP017
        "device": torch.cuda.get_device_name() if HAS_CUDA else f"CPU, {torch.get_num_threads()} threads",
        "gpu": torch.cuda.get_device_name() if HAS_CUDA else None,
        "driver": driver_version() if HAS_CUDA else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "fused_layernorm": fused_layernorm.__version__,
        "backend": fused_layernorm.backend(),
        "commit": commit,
        "csrc_hash": source_hash(),
    }


def make_meta(bench, args):
    """The environment, and of this run: the fastest roofs in GB/s, the options, and what was skipped."""
    roofs = {}
    for result in bench.results:
        if result["roof_us"]:
            name = {"forward": "copy", "backward": "two_reads_one_write"}[result["direction"]]
            rate = result["gb_per_s"] / result["fraction"]
            if result["timing"] == "graph, L2 cold":
                key = f"{name}_{result['dtype']}_gb_per_s"
                roofs[key] = max(roofs.get(key, 0), round(rate, 1))
    return {
        **environment(),
        "l2_bytes": l2_bytes() if HAS_CUDA else None,
        "roofs": roofs,
        "options": {k: getattr(args, k) for k in ("op", "dtype", "weight_dtype", "shapes", "direction", "providers")},
        "skipped": list(bench.notes),
    }


def driver_version():
    found = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found.split("\n")[0] if found else None


def write_records(bench, args):
    if not (args.json or args.record):
        return
    document = json.dumps({"meta": make_meta(bench, args), "results": bench.results}, indent=1) + "\n"
    if args.json:
        Path(args.json).write_text(document)
        print(f"wrote {args.json}")
    if args.record:
        folder = Path(args.record)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"benchmark_{datetime.datetime.now():%Y%m%d_%H%M%S}.json"
        path.write_text(document)
        with path.with_suffix(".csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(bench.results[0]) if bench.results else ["op"])
            writer.writeheader()
            writer.writerows(bench.results)
        print(f"wrote {path} and {path.with_suffix('.csv').name}")


# ---- the command line ----------------------------------------------------------------------------------------------


def parse_arguments(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="directions: " + "; ".join(f"{name}: {what}" for name, what in DIRECTIONS.items())
        + f". Providers: {', '.join(PROVIDERS)}. Without --shapes: the table of small shapes, then LLM shapes.",
    )  # fmt: skip

    def several(name, default, choices, what):
        def split(text):
            names = [part for part in text.split(",") if part]
            for part in names:
                if part not in choices:
                    raise argparse.ArgumentTypeError(f"{part!r} is none of {', '.join(choices)}")
            return names

        parser.add_argument(name, type=split, default=default, metavar="A,B", help=f"{what} ({', '.join(choices)})")

    several("--op", list(EPS), list(EPS), "which norms; default: all")
    several("--dtype", None, list(DTYPES), "dtypes of x; default: bf16 on a GPU, fp32 on a CPU")
    parser.add_argument("--weight-dtype", choices=("x", "fp32"), default="x", help="x: that of x (default)")
    parser.add_argument(
        "--shapes",
        type=parse_shapes,
        metavar="LIST",
        default=None,
        help="small, llm, sweep (256 MiB of x at each hidden size), ROWSxHIDDEN; by commas",
    )
    several("--direction", ["forward", "backward"], list(DIRECTIONS), "what is timed; default: forward,backward")
    parser.add_argument(
        "--providers",
        type=lambda text: text.split(","),
        default=["fused", "torch"],
        metavar="A,B",
        help="who is timed; default: fused,torch; skipped by name where not to be had",
    )
    parser.add_argument("--json", metavar="FILE", help="write meta and results as JSON")
    parser.add_argument("--record", metavar="DIR", help="write JSON and CSV, named by the date, into DIR")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of the CPU kernels; default: torch's choice")
    args = parser.parse_args(arguments)
    args.dtype = args.dtype or (["bf16"] if HAS_CUDA else ["fp32"])
    return args


def parse_shapes(text):
    for part in text.split(","):
        if part not in ("small", "llm", "sweep") and not all(p.isdigit() and int(p) for p in part.split("x", 1)):
            raise argparse.ArgumentTypeError(f"{part!r} is neither small, llm, sweep nor ROWSxHIDDEN")
        if part.isdigit():
            raise argparse.ArgumentTypeError(f"{part!r} lacks the number of rows: ROWSxHIDDEN")
    return text.split(",")


def shapes_of(name, dtype):
    if name == "small":
        return SMALL_SHAPES
    if name == "llm":
        return LLM_SHAPES if HAS_CUDA else [(rows // 16, hidden_size) for rows, hidden_size in LLM_SHAPES]
    if name == "sweep":
        size = (SWEEP_BYTES if HAS_CUDA else SWEEP_BYTES // 16) // DTYPES[dtype].itemsize
        return [(max(1, size // hidden_size), hidden_size) for hidden_size in SWEEP_HIDDEN_SIZES]
    return [tuple(int(part) for part in name.split("x"))]


def cells_of(args, shapes, directions):
    return [
        Cell(op, direction, dtype, dtype if args.weight_dtype == "x" else args.weight_dtype, rows, hidden_size)
        for dtype in args.dtype
        for op in args.op
        for direction in directions
        for name in shapes
        for rows, hidden_size in shapes_of(name, dtype)
    ]


def main(arguments=None):
    args = parse_arguments(arguments)
    if args.threads:
        torch.set_num_threads(args.threads)
    import fused_layernorm

    bench = Bench([name for name in args.providers if name in PROVIDERS])
    for name in args.providers:
        if name not in PROVIDERS:
            bench.notes[f"{name}: skipped: no such provider; there are {', '.join(PROVIDERS)}"] = None
    where = torch.cuda.get_device_name() if HAS_CUDA else f"CPU ({torch.get_num_threads()} threads), for want of a GPU"
    print(f"fused_layernorm {fused_layernorm.__version__}, backend {fused_layernorm.backend()}, "
          f"torch {torch.__version__}, on {where}\n")  # fmt: skip
    if not HAS_CUDA and os.getloadavg()[0] > 0.5 * (os.cpu_count() or 1):
        print(f"Other programs are busy on this CPU (load {os.getloadavg()[0]:.1f}): read its times with care.\n")
    if args.shapes is None:
        print_small_shapes(bench)
    print_cells(bench, cells_of(args, args.shapes or (["llm"] if HAS_CUDA else ["small"]), args.direction))
    if args.shapes is None and HAS_CUDA:
        print_cells(bench, cells_of(args, ["small"], ["call_no_grad", "step"]))
    print_verdict(bench)
    write_records(bench, args)
    return 0


def test_a_small_run_writes_its_records(tmp_path, capsys):
    shapes, directions = "3x64,5x100", "forward,backward,call_no_grad,step"
    arguments = ["--shapes", shapes, "--direction", directions, "--dtype", "fp32", "--providers", "fused,torch,nobody"]
    assert main([*arguments, "--json", str(tmp_path / "run.json"), "--record", str(tmp_path / "records")]) == 0
    document = json.loads((tmp_path / "run.json").read_text())
    assert len(document["results"]) == 2 * 4 * 2 * 2  # ops, directions, shapes, providers
    promised = "op direction dtype weight_dtype rows hidden_size provider us roof_us fraction".split()
    assert set(promised) <= set(document["results"][0])
    assert all(result["us"] > 0 for result in document["results"])
    assert document["meta"]["csrc_hash"] and any("nobody" in note for note in document["meta"]["skipped"])
    assert sorted(path.suffix for path in (tmp_path / "records").iterdir()) == [".csv", ".json"]
    assert "layer_norm, fp32, forward" in capsys.readouterr().out


if __name__ == "__main__":
    sys.exit(main())
