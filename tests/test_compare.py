"""benchmarks/compare.py, on made-up records of the three kinds, and benchmarks/counters.py on made-up output of ncu."""

import json
import re
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import compare  # noqa: E402
import counters  # noqa: E402

import test_benchmark  # noqa: E402


def of_benchmark(us, op="layer_norm", rows=32, **more):
    return {"op": op, "direction": "forward", "dtype": "bf16", "weight_dtype": "bf16", "rows": rows,
            "hidden_size": 512, "residual_dtype": None, "provider": "fused", "us": us, "timing": "graph, L2 cold",
            "device": "cuda"} | more  # fmt: skip


def of_fusions(us, fusion="rms_norm, silu", rows=32, **more):
    return {"fusion": fusion, "direction": "backward", "dtype": "bf16", "rows": rows, "hidden_size": 512,
            "provider": "fused", "us": us} | more  # fmt: skip


KINDS = {
    "benchmark": of_benchmark,
    "add_norms": lambda us, **more: of_benchmark(us, op="add_rms_norm", residual_dtype="fp32", **more),
    "fusions": of_fusions,
}


@pytest.fixture
def run(tmp_path, capsys):
    """Runs compare.py on lists of results; returns (exit code, what it printed)."""

    def run(old, new, *options):
        paths = [tmp_path / name for name in ("old.json", "new.json")]
        for path, results in zip(paths, (old, new), strict=True):
            path.write_text(json.dumps({"meta": {}, "results": results}))
        code = compare.main([*map(str, paths), *options])
        return code, capsys.readouterr().out

    return run


def means(text):
    """{group: geometric mean} as printed."""
    lines = text.split("geometric mean\n")[1].split("\n\n")[0].splitlines()
    return {line[:58].strip(): float(line[58:].split()[0]) for line in lines}


@pytest.mark.parametrize("kind", KINDS)
def test_ratio_and_geometric_mean(kind, run):
    """new / old, not old / new; of 4 and 1/2 the mean is sqrt(2), not 2.25"""
    make = KINDS[kind]
    code, text = run([make(10.0), make(10.0, rows=64)], [make(40.0), make(5.0, rows=64)])
    assert code == 0
    assert re.search(r"32 x 512 .* 10.000 ->     40.000 us    4.000", text)
    assert re.search(r"64 x 512 .* 10.000 ->      5.000 us    0.500", text)
    assert set(means(text).values()) == {1.414} and len(means(text)) == 2
    worst = text.split("the worst 2\n")[1].splitlines()
    assert worst[0].endswith("4.000") and worst[1].endswith("0.500")


def test_groups_have_means_of_their_own(run):
    old = [of_benchmark(1.0), of_benchmark(1.0, op="rms_norm"), of_benchmark(1.0, direction="backward")]
    new = [of_benchmark(2.0), of_benchmark(8.0, op="rms_norm"), of_benchmark(0.5, direction="backward")]
    found = {" ".join(name.split()): mean for name, mean in means(run(old, new)[1]).items()}
    assert found == {"layer_norm forward": 2.0, "rms_norm forward": 8.0, "layer_norm backward": 0.5, "all": 2.0}


def test_cells_of_one_record_are_listed(run):
    """also where nothing is left to compare; wall times and other providers are not GPU time of this library"""
    others = [of_benchmark(1.0, provider="torch"), of_benchmark(1.0, timing="loop", direction="step")]
    old, new = [of_benchmark(3.0, rows=7), *others], [of_benchmark(4.0, rows=9), *others]
    code, text = run(old, new, "--limit", "0")
    assert code == 0 and "no cell is in both" in text
    for name, rows, us in (("old", 7, "3.000"), ("new", 9, "4.000")):
        assert re.search(rf"only in the {name} record, not compared: 1\n.* {rows} x 512 .* {us} us\n", text)
    assert "1 in the old record, 1 in the new" in text
    assert set(means(run([*old, of_benchmark(1.0)], [*new, of_benchmark(1.0)])[1]).values()) == {1.0}


@pytest.mark.parametrize("old,new,options,code", [
    (100.0, 103.0, (), 0),
    (100.0, 103.0, ("--limit", "2"), 1),
    (100.0, 101.0, ("--limit", "2"), 0),
    (1.0, 1.04, ("--limit", "2"), 0),  # 4%, but less than the floor
    (1.0, 1.04, ("--limit", "2", "--floor-us", "0.03"), 1),
    (1.0, 1.06, ("--limit", "2"), 1),
    (103.0, 100.0, ("--limit", "2"), 0),  # faster
])  # fmt: skip
def test_limit(old, new, options, code, run):
    assert run([of_benchmark(old)], [of_benchmark(new)], *options)[0] == code


def test_a_cell_that_is_there_twice(run):
    with pytest.raises(SystemExit, match="two times of one cell"):
        run([of_benchmark(1.0), of_benchmark(2.0)], [])


@pytest.mark.parametrize("text", [None, "no JSON", "[]", "{}"])
@pytest.mark.parametrize("program", ["compare.py", "check_targets.py", "plot"])
def test_what_is_no_record_ends_in_a_sentence(tmp_path, monkeypatch, program, text):
    path = tmp_path / "record.json"
    if text is not None:
        path.write_text(text)
    if program == "compare.py":
        call = partial(compare.main, [str(path), str(path)])
    elif program == "check_targets.py":
        call = partial(import_module("check_targets").main, path)
    else:
        pytest.importorskip("matplotlib")
        call = partial(test_benchmark.main, ["--plot", str(path)])
    if program == "plot" and text is None:
        with pytest.raises(SystemExit, match="2"):
            call()
    else:
        with pytest.raises(SystemExit, match=re.escape(str(path))):
            call()


@pytest.mark.parametrize("option", ["--json", "--record"])
def test_a_record_that_cannot_be_written_is_told_before_anything_is_timed(tmp_path, capsys, option):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="2"):
        test_benchmark.parse_arguments([option, str(tmp_path / "file" / "there" / "run.json")])
    assert f"{option}: " in capsys.readouterr().err


NCU = """==PROF== Connected to process 1
"ID","Process ID","Kernel Name",{names}
"","",""{units}
"0","1","first_kernel<float>(Params)","1,000.5","100","50","80","50","32",{first}
"1","1","second_kernel(Params)","3,001.5","0","50","40","10","16",{second}
"""


def test_counters_of_several_kernels():
    """benchmarks/counters.py: sums of times and bytes; shares and warps weighted by time"""
    names = ",".join(f'"{counter}"' for counter, _ in counters.COUNTERS.values())
    first, second = ([f'"{of_wait + k}"' for of_wait in range(len(counters.WAITS))] for k in (0, 5))
    found = counters.totals(
        NCU.format(names=names, units=',"x"' * len(counters.COUNTERS), first=",".join(first), second=",".join(second))
    )
    assert found["kernels"] == ["first_kernel<float>", "second_kernel"]
    assert (found["read"], found["written"], found["us"]) == (100, 100, pytest.approx(4.002))
    weight = 1000.5 / 4002
    assert found["peak"] == pytest.approx(weight * 0.8 + (1 - weight) * 0.4)
    assert found["issue"] == pytest.approx(weight * 0.5 + (1 - weight) * 0.1)
    assert found["warps"] == pytest.approx(weight * 32 + (1 - weight) * 16)
    expected = [of_wait + (1 - weight) * 5 for of_wait in range(len(counters.WAITS))]
    assert list(found["waits"]) == list(counters.WAITS) and list(found["waits"].values()) == pytest.approx(expected)
    with pytest.raises(ValueError, match="no counters"):
        counters.totals("==ERROR== no counters")
    rows, columns = 1 << 21, 64
    assert counters.bytes_of(("layer_norm", "bf16", rows, columns, "forward")) == 2 * 2 * rows * columns
    assert counters.bytes_of(("gated_rms_norm", "bf16", rows, columns, "backward")) == 5 * 2 * rows * columns
