"""What docs/reliability.md promises beyond right values: the same bits, any size, no leak, clear errors.

Whoever runs this on a GPU gets the figures of that page from the properties of pytest's report (--junitxml), which
benchmarks/record_tests.py turns into a record.
"""

import ast
import gc
import os
import runpy
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checks import needs_memory
from fork_server import run_code
from norm_cases import (
    OPS,
    Case,
    Inputs,
    bf16,
    check,
    fp16,
    fp32,
    fp64,
    fused,
    make_inputs,
    on_devices,
    one_thread,
    run,
    same_bits,
    with_torch,
)
from test_build import ROOT

import fused_layernorm
from test_correctness import MODULES

ON_KERNELS = pytest.mark.skipif(fused_layernorm.backend() == "reference", reason="a promise of the compiled kernels")


def test_the_figures_of_the_pages_are_those_of_the_records():
    """the tables that benchmarks/figures.py makes of benchmarks/results are on the pages"""
    pages = runpy.run_path(str(ROOT / "benchmarks" / "figures.py"))["pages"](ROOT / "benchmarks" / "results")
    for name, text in pages.items():
        assert (ROOT / name).read_text() == text, name


def assert_same(found, wanted, what):
    for name, value in wanted.items():
        assert same_bits(found[name], value), f"{name}: {what}"


# ---- the same bits -------------------------------------------------------------------------------------------------

# One or more shapes for each way that the CUDA kernels go: short, long and ragged rows, few and many of them, and rows
# that the blocks of the whole card share.
SHAPES = [(3, 64), (513, 769), (4096, 256), (40, 4096), (9, 150528), (6, 524288), (7, 20001), (2, 131072)]


@on_devices("op,dtype", [(op, dtype) for op in OPS for dtype in (fp16, bf16, fp32, fp64)])
def test_a_hundred_runs(device, op, dtype):
    """100 runs (on the CPU 20, with different numbers of threads): the same bits in y and every gradient"""
    threads = torch.get_num_threads()
    for shape in SHAPES if device == "cuda" else SHAPES[:2] + SHAPES[-2:-1]:
        case = Case(shape, op=op, dtype=dtype)
        inputs = make_inputs(case, device)
        first = run(fused, case, inputs)
        try:
            for turn in range(100 if device == "cuda" else 20):
                if device == "cpu":
                    torch.set_num_threads(1 + turn % 3)
                assert_same(run(fused, case, inputs), first, f"run {turn} of {case}")
        finally:
            torch.set_num_threads(threads)


@ON_KERNELS
@on_devices("op,dtype,hidden_size", [
    (op, dtype, n) for op in OPS for dtype in (bf16, fp32) for n in (1, 64, 769, 1024, 4096, 8192, 8193, 12288, 16384)
])  # fmt: skip
def test_a_row_anywhere_in_any_batch(device, op, dtype, hidden_size):
    """a row alone, and at the start, in the middle and at the end of batches up to 100,000: the same bits"""
    batches = [1, 2, 3, 8, 31, 33, 127, 257, 1000, 4097, 20_000, 100_000]
    most = 1 << (19 if device == "cpu" else 29)
    one = make_inputs(Case((1, hidden_size), op=op, dtype=dtype), device)
    alone = run(fused, Case((1, hidden_size), op=op, dtype=dtype), one)
    for batch in (b for b in batches if b * hidden_size <= most):
        case = Case((batch, hidden_size), op=op, dtype=dtype)
        x, dy = (torch.randn(case.shape, device=device).to(dtype) for _ in range(2))
        rows = sorted({0, batch // 2, batch - 1})
        x[rows], dy[rows] = one.x, one.grad_output
        found = run(fused, case, Inputs(x, one.weight, one.bias, dy))
        for row in rows:
            for name in ("y", "x"):
                assert same_bits(found[name][row], alone[name][0]), f"{name} of row {row} in a batch of {batch}"


@on_devices("op,dtype", [(op, dtype) for op in OPS for dtype in (bf16, fp32)], devices=("cuda",))
def test_streams_under_load(device, op, dtype):
    """on eight streams, beside matrix products on others: the same bits"""
    busy = torch.randn(4096, 4096, device=device, dtype=bf16)
    streams, others = ([torch.cuda.Stream() for _ in range(8)] for _ in range(2))
    for shape in SHAPES:
        case = Case(shape, op=op, dtype=dtype)
        inputs = make_inputs(case, device)
        first = run(fused, case, inputs)
        torch.cuda.synchronize()
        found = []
        for _ in range(5):
            for stream, other in zip(streams, others, strict=True):
                with torch.cuda.stream(other):
                    torch.mm(busy, busy)
                with torch.cuda.stream(stream):
                    found.append(run(fused, case, inputs))
        torch.cuda.synchronize()
        for results in found:
            assert_same(results, first, f"on another stream, {case}")


@on_devices("op,dtype", [(op, dtype) for op in OPS for dtype in (bf16, fp32)], devices=("cuda",))
def test_cuda_graph_gives_the_same_bits(device, op, dtype):
    """forward and backward in a CUDA graph: the bits of eager mode, at every replay"""
    for shape in SHAPES:
        case = Case(shape, op=op, dtype=dtype)
        inputs = make_inputs(case, device)
        eager = run(fused, case, inputs)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run(fused, case, inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = run(fused, case, inputs)
        for _ in range(3):
            for value in captured.values():
                value.fill_(float("nan"))
            graph.replay()
            assert_same(captured, eager, f"in a graph, {case}")


# ---- size ----------------------------------------------------------------------------------------------------------


@on_devices("op,dtype,rows,hidden_size,gib", [
    (op, dtype, rows, hidden_size, gib)
    for op in OPS
    for dtype, rows, hidden_size, gib in (
        (fp32, (1 << 19) + 5, 4099, 60),  # more than 2^31 elements, ragged rows
        (bf16, (1 << 20) + 5, 4096, 60),  # more than 2^32
        (bf16, (1 << 31) + 5, 1, 80),  # more than 2^31 rows
        (fp32, 5, 1 << 28, 60),  # long rows, more than 2^30
    )
], devices=("cuda",))  # fmt: skip
def test_size(device, op, dtype, rows, hidden_size, gib, record_property):
    """more than 2^31 and 2^32 elements, 2^31 rows, rows of 2^28: far ends as torch computes them alone"""
    needs_memory(gib)
    case = Case((rows, hidden_size), op=op, dtype=dtype)
    x, dy = (torch.randn(rows, hidden_size, device=device, dtype=dtype) for _ in range(2))
    weight, bias = (torch.randn(hidden_size, device=device, dtype=dtype) for _ in range(2))
    found = run(fused, case, Inputs(x, weight, bias, dy))
    few = 3 if hidden_size < 1 << 28 else 1  # whose truth takes 2 GiB a tensor
    for part in (slice(0, few), slice(rows // 2, rows // 2 + few), slice(rows - few, rows)):
        check(
            replace(case, shape=(few, hidden_size)),
            Inputs(x[part], weight, bias, dy[part]),
            {"y": found["y"][part], "x": found["x"][part]},
            wants=("y", "x"),
        )
    # The sum over all rows in fp64, by pieces. Adding to a sum of k rows, of the size sqrt(k), rounds by half a unit of
    # that at most. So often as an SM gets rows, independent of each other, that is sqrt(rows_each / 8) units times
    # sqrt(rows): three times that, and at least 16.
    truth = sum(piece.sum(0, dtype=fp64) for piece in dy.split(max(1, (1 << 26) // hidden_size)))
    error = (found["bias"].double() - truth).abs()
    rows_each = rows / torch.cuda.get_device_properties(device).multi_processor_count
    units = max(16, 3 * (rows_each / 8) ** 0.5) * rows**0.5
    rounding = torch.finfo(dtype).eps * truth.abs() + units * torch.finfo(fp32).eps
    assert (error <= rounding).all()
    record_property("elements", rows * hidden_size)


def test_a_row_of_2_to_the_22_on_the_cpu():
    """one long row on the CPU, forward and backward"""
    case = Case((1, (1 << 22) + 3))
    inputs = make_inputs(case, "cpu")
    check(case, inputs, run(fused, case, inputs))


@ON_KERNELS
@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_more_than_2_to_the_31_elements_on_the_cpu(op):
    """offsets of more than 31 bits on the CPU: a row expanded, every result the same"""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if free < 6 << 30 or not os.environ.get("FUSED_LAYERNORM_LARGE"):
        pytest.skip("needs FUSED_LAYERNORM_LARGE=1 and 6 GiB of free memory")
    row = torch.randn(1, 4099).to(bf16)
    y = OPS[op](row.expand((1 << 19) + 3, 4099), normalized_shape=4099)
    assert y.numel() > 1 << 31
    alone = OPS[op](row, normalized_shape=4099)[0]
    for at in (0, len(y) // 2, len(y) - 1):
        assert same_bits(y[at], alone)


# ---- memory --------------------------------------------------------------------------------------------------------


@on_devices("op", OPS, devices=("cuda",))
def test_ten_thousand_steps_allocate_nothing_new(device, op, record_property):
    """10,000 training steps: allocated and reserved memory as after the first 100"""
    module = MODULES[op][0](1000, device=device)
    x = torch.randn(300, 1000, device=device, requires_grad=True)

    def steps(count):
        for step in range(count):
            module(x[: 200 + step % 50]).square().mean().backward()
            module.zero_grad(set_to_none=True)
            x.grad = None
        torch.cuda.synchronize()
        gc.collect()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    early = steps(100)
    assert steps(10_000) == early
    record_property("steps_without_growth", 10_000)


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize("op", OPS)
def test_steps_on_the_cpu_hold_no_memory(op):
    """500 training steps on the CPU hold on to less than a tenth of what they allocate"""
    module, x = MODULES[op][0](1000), torch.randn(100, 1000, requires_grad=True)

    @one_thread()
    def steps(count):
        for _ in range(count):
            module(x).square().mean().backward()
            module.zero_grad(set_to_none=True)
            x.grad = None
        gc.collect()
        return resident_bytes()

    before = steps(50)
    growth = steps(500) - before
    assert growth < 500 * x.nbytes / 10, f"{growth} bytes"


@on_devices("op,dtype", [(op, dtype) for op in OPS for dtype in (bf16, fp32)], devices=("cuda",))
def test_peak_memory_is_torchs(device, op, dtype, record_property):
    """peak memory of forward and backward: at most 1.02 times torch's, and 16 MiB for partial sums"""
    for shape in ((8192, 4096), (65536, 1024), (256, 131072), (128, 262144)):
        case = Case(shape, op=op, dtype=dtype, bias=None)
        inputs = make_inputs(case, device)
        held = torch.cuda.memory_allocated()
        peaks = {}
        for name, norm in (("torch", with_torch), ("fused", fused)):
            run(norm, case, inputs)
            torch.cuda.synchronize()
            # A gradient may be freed by autograd's thread after the call has returned. Counted as held, it would be
            # missing in the peak.
            until = time.monotonic() + 1
            while torch.cuda.memory_allocated() > held and time.monotonic() < until:
                time.sleep(0.001)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run(norm, case, inputs)
            peaks[name] = torch.cuda.max_memory_allocated() - before
            record_property(f"peak_bytes {op} {dtype} {shape} {name}", peaks[name])
        assert peaks["fused"] <= 1.02 * peaks["torch"] + (16 << 20), peaks


@on_devices("op", OPS, devices=("cuda",))
def test_out_of_memory_in_a_call(device, op):
    """memory runs out in forward, then in backward: torch's error, nothing held, the next call right"""
    case = Case((4096, 4096), op=op)
    inputs = make_inputs(case, device)
    wanted = run(fused, case, inputs)
    wanted = {name: value.cpu() for name, value in wanted.items()}
    x, weight, bias = (getattr(inputs, name).detach().requires_grad_() for name in ("x", "weight", "bias"))
    y = fused(case, x, weight, bias)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (1 << 20)) / total)
    filling = []  # the gaps between what other tests may hold
    try:
        with pytest.raises(torch.cuda.OutOfMemoryError):
            while True:
                filling.append(torch.empty(16 << 20, dtype=torch.uint8, device=device))
        held = torch.cuda.memory_allocated()
        with pytest.raises(torch.cuda.OutOfMemoryError):
            fused(case, x, weight, bias)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            torch.autograd.grad(y, (x, weight, bias), inputs.grad_output, retain_graph=True)
        assert torch.cuda.memory_allocated() == held
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        filling.clear()
    gradients = torch.autograd.grad(y, (x, weight, bias), inputs.grad_output)
    assert_same({n: g.cpu() for n, g in zip(("x", "weight", "bias"), gradients, strict=True)},
                {n: wanted[n] for n in ("x", "weight", "bias")}, "after memory ran out")  # fmt: skip
    again = run(fused, case, inputs)
    assert_same({name: value.cpu() for name, value in again.items()}, wanted, "after memory ran out")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="sets a limit that only Linux keeps")
@pytest.mark.skipif(
    fused_layernorm._backend.library is not None and torch.__version__ < (2, 13),
    reason="torch's stable interface has no messages before 2.13",
)
def test_out_of_memory_in_a_call_on_the_cpu():
    """memory runs out in forward and in backward on the CPU: torch's error, and the next call is right"""
    done = run_code("""
        import resource, torch
        from fused_layernorm import fused_layer_norm
        torch.set_num_threads(1)
        x = torch.randn(4096, 4096, requires_grad=True)
        weight, bias = (torch.randn(4096, requires_grad=True) for _ in range(2))
        y = fused_layer_norm(x, weight, bias)
        dy = torch.ones_like(y)
        torch.autograd.grad(y, x, dy, retain_graph=True)  # torch imports what it needs
        small = fused_layer_norm(x[:2].detach(), weight.detach(), bias.detach())
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20), resource.RLIM_INFINITY))
        def backward():
            torch.autograd.grad(y, x, dy, retain_graph=True)
        for call in (lambda: fused_layer_norm(x, weight, bias), backward):
            try:
                call()
                raise SystemExit("no error")
            except RuntimeError as error:
                assert "can't allocate memory" in str(error), error
        assert torch.equal(fused_layer_norm(x[:2].detach(), weight.detach(), bias.detach()), small)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        grad, = torch.autograd.grad(y, x, dy)
        assert torch.equal(grad[:2], torch.autograd.grad(fused_layer_norm(x[:2], weight, bias).sum(), x)[0][:2])
        print("usable")
    """)
    assert done.stdout.split()[-1:] == ["usable"], done.stdout + done.stderr


# ---- threads and processes -----------------------------------------------------------------------------------------


@on_devices("op", OPS)
def test_many_threads_with_work_of_their_own(device, op):
    """sixteen host threads, each with inputs (and a stream) of its own: the bits of one thread"""
    cases = [Case((17 + i, 64 * (1 + i % 5) + i % 2), op=op, dtype=(bf16, fp32)[i % 2]) for i in range(16)]
    work = [(case, inputs, run(fused, case, inputs)) for case in cases for inputs in [make_inputs(case, device)]]
    if device == "cuda":
        torch.cuda.synchronize()

    def repeat(part):
        case, inputs, wanted = part
        with torch.cuda.stream(torch.cuda.Stream() if device == "cuda" else None):
            for _ in range(50):
                assert_same(run(fused, case, inputs), wanted, f"in a thread, {case}")

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(repeat, work))


def run_script(code, **environment):
    """Runs lines of Python in a process of their own, from its start, with this repository on its path."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork_after_use_on_the_cpu():
    """a process forked after the CPU kernels ran, as a DataLoader's worker is: the same bits"""
    done = run_code("""
        import os, torch
        from fused_layernorm import fused_layer_norm
        x, weight = torch.randn(64, 1000), torch.randn(1000)
        y = fused_layer_norm(x, weight)
        child = os.fork()
        if not child:
            torch.set_num_threads(1)  # as a DataLoader's worker does: GNU's OpenMP threads do not survive a fork
            os._exit(0 if torch.equal(fused_layer_norm(x, weight), y) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        print("same")
    """)
    assert done.stdout.strip() == "same", done.stderr


@on_devices(devices=("cuda",))
def test_fork_after_use_on_cuda(device):
    """a process forked after CUDA was used: torch's error, no crash and no hang"""
    done = run_script("""
        import os, torch
        from fused_layernorm import fused_layer_norm
        x = torch.randn(8, 64, device="cuda")
        fused_layer_norm(x, normalized_shape=64)
        torch.cuda.synchronize()
        child = os.fork()
        if not child:
            try:
                fused_layer_norm(x, normalized_shape=64)
            except RuntimeError as error:
                print("told:", str(error).splitlines()[0], flush=True)
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """)
    assert done.returncode == 0 and "told:" in done.stdout and "CUDA" in done.stdout, done.stdout + done.stderr


@on_devices(devices=("cuda",))
def test_an_earlier_cuda_error_is_reported_with_its_cause(device):
    """a device-side assert of somebody else: our next call raises, and names it"""
    done = run_script("""
        import torch
        from fused_layernorm import fused_layer_norm
        x = torch.randn(8, 64, device="cuda")
        x[torch.tensor([1000], device="cuda")]  # out of bounds: known when the device comes to it
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            pass
        try:
            fused_layer_norm(x, normalized_shape=64)
        except RuntimeError as error:
            print("told:", str(error).splitlines()[0])
    """)
    assert "told:" in done.stdout and "device-side assert" in done.stdout, done.stdout + done.stderr


# ---- the surroundings of an import ---------------------------------------------------------------------------------

USE = """
    import torch
    from fused_layernorm import FusedLayerNorm, backend
    FusedLayerNorm(64)(torch.randn(3, 64)).sum().backward()
    print(backend())
"""


@pytest.mark.parametrize(
    "environment",
    [
        # No folder can be made under a file, not even by root.
        dict.fromkeys(("HOME", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR"),
                      "/dev/null/nowhere")
        | {"CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": "/dev/null/nowhere"},
        {"HOME": ""},
    ],
    ids=["no card, no cache folders, no bytecode", "no home"],
)  # fmt: skip
def test_import_and_use_where_something_is_missing(environment):
    """no card, no folder to write to: import and use say nothing and work"""
    done = run_script(USE, **environment)
    assert done.returncode == 0 and done.stdout.strip() == fused_layernorm.backend(), done.stderr
    assert not done.stderr


def test_import_opens_no_connection_and_starts_no_process():
    """what Python's audit hooks see of import and use: no socket, no process, no file written"""
    done = run_code("""
        import sys, torch
        seen = []
        def hook(event, arguments):
            writes = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wxa+")
            starts = event in ("os.system", "os.exec", "os.fork", "os.posix_spawn")
            if writes or starts or event.split(".")[0] in ("socket", "subprocess"):
                seen.append((event, str(arguments)[:200]))
        sys.dont_write_bytecode = True
        sys.addaudithook(hook)
        from fused_layernorm import FusedLayerNorm, replace_norms
        model = torch.nn.Sequential(torch.nn.LayerNorm(64))
        replace_norms(model)
        model(torch.randn(3, 64)).sum().backward()
        print(seen)
        open("/dev/null", "w")
        assert seen, "the hook sees nothing"
    """)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_nothing_runs_what_a_user_hands_over():
    """no eval, exec, pickle or shell in the package"""
    forbidden = {"eval", "exec", "compile", "system", "popen", "loads", "load", "getoutput"}
    for path in sorted((ROOT / "fused_layernorm").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = {getattr(node, "module", None), *(alias.name for alias in node.names)}
                assert not names & {"pickle", "marshal", "shelve", "socket", "urllib", "http", "requests"}, path
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", None))
                if ast.unparse(node.func) == "cpp_extension.load":  # build() compiles our own sources with it
                    continue
                assert name not in forbidden, f"{path}:{node.lineno} calls {name}"
                assert not any(keyword.arg == "shell" for keyword in node.keywords), f"{path}:{node.lineno}"
