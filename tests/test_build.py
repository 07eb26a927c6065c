"""The build and the choice of a backend, without compiling anything: fake extensions, fake build records."""

import ctypes
import importlib.util
import json
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import warnings
import zipfile
from pathlib import Path
from unittest import mock

import pytest
import torch
from checks import build_environment
from fork_server import run_code

import fused_layernorm
from fused_layernorm import _backend, _ops
from fused_layernorm._build import jit, stable, toolchain
from fused_layernorm._build.source_hash import source_hash

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("fused_layernorm_cuda", "fused_layernorm_cpu")
# What nvcc 13.0 supports, and nvcc 12.8.
NVCC_13 = [(7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)]
NVCC_12 = [(5, 0), (6, 0), (7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]


def record(name: str, version: str = torch.__version__, cuda: str | None = torch.version.cuda) -> dict:
    return {"extension": name, "torch": version, "torch_cuda": cuda, "no_cuda": None}


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """fake(name, record, content): put an extension into a folder that Python searches first; hide the real ones."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    real_find_spec = importlib.util.find_spec
    builds = {}

    def find_spec(name, package=None):
        spec = real_find_spec(name, package)
        hidden = name in NAMES and spec is not None and Path(spec.origin).parent != tmp_path
        return None if hidden else spec

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))  # what build() left for this user is not meant

    def make(name: str, build: dict | None, content: str | bytes = "norm_forward = norm_backward = len\n") -> None:
        if isinstance(content, bytes):
            path = tmp_path / (name + sysconfig.get_config_var("EXT_SUFFIX"))
            path.write_bytes(content)
        else:
            path = tmp_path / f"{name}.py"
            path.write_text(content)
        if build:
            builds[path.name] = build
        (tmp_path / "fused_layernorm").mkdir(exist_ok=True)
        (tmp_path / "fused_layernorm" / "_build_info.py").write_text(f"BUILDS = {builds!r}\nNOT_BUILT = None\n")
        importlib.invalidate_caches()

    make.folder = tmp_path
    yield make
    for name in NAMES:
        sys.modules.pop(name, None)


def load_silently(choice: str = "auto"):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return _backend._load(choice, strict=False)


# ---- which backend ---------------------------------------------------------------------------------------------------


def test_cuda_extension_comes_first(fake):
    fake("fused_layernorm_cuda", record("fused_layernorm_cuda"))
    fake("fused_layernorm_cpu", record("fused_layernorm_cpu"))
    loaded = load_silently()
    assert (loaded.backend, loaded.extension.__name__) == ("cuda", "fused_layernorm_cuda")
    assert loaded.build_info["extension"] == "fused_layernorm_cuda" and loaded.problem is None


def test_cpu_extension_alone(fake):
    fake("fused_layernorm_cpu", {**record("fused_layernorm_cpu"), "no_cuda": "no nvcc"})
    loaded = load_silently()
    assert loaded.backend == "cpu" and "no CUDA kernels: no nvcc" in loaded.reason


def test_no_extension_is_the_reference(fake):
    loaded = load_silently()
    assert loaded == _backend._Loaded(None, "reference", loaded.reason, None, None)
    assert loaded.reason


def test_extension_without_a_record_is_tried(fake):
    fake("fused_layernorm_cpu", None)
    assert load_silently().backend == "cpu"


def test_choice_by_hand(fake):
    fake("fused_layernorm_cuda", record("fused_layernorm_cuda"))
    fake("fused_layernorm_cpu", record("fused_layernorm_cpu"))
    assert load_silently("cuda").extension.__name__ == "fused_layernorm_cuda"
    assert load_silently("cpu").extension.__name__ == "fused_layernorm_cpu"
    assert load_silently("reference").extension is None
    with pytest.raises(ImportError, match="auto, cuda, cpu or reference, got 'gpu'"):
        _backend._load("gpu", strict=False)


def test_choice_of_cpu_is_content_with_the_cpu_kernels_of_the_cuda_extension(fake):
    fake("fused_layernorm_cuda", record("fused_layernorm_cuda"))
    loaded = load_silently("cpu")
    assert (loaded.backend, loaded.extension.__name__) == ("cpu", "fused_layernorm_cuda")


@pytest.mark.parametrize("choice", ["cuda", "cpu"])
def test_choice_that_cannot_be_had_raises(fake, choice):
    with pytest.raises(ImportError, match=f"FUSED_LAYERNORM_BACKEND={choice}, but"):
        _backend._load(choice, strict=False)


# ---- an extension that does not fit ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "version, cuda, told",
    [
        ("1.13.1+cu117", "11.7", "torch 1.13.1+cu117 (CUDA 11.7)"),
        ("2.999.0", torch.version.cuda, "torch 2.999.0"),
        (torch.__version__, "99.1" if torch.version.cuda else "13.0", torch.__version__),
        (torch.__version__, None if torch.version.cuda else "13.0", torch.__version__),
    ],
)
def test_built_for_another_torch(fake, version, cuda, told):
    fake("fused_layernorm_cpu", record("fused_layernorm_cpu", version, cuda), "raise SystemExit('it was loaded')")
    with pytest.warns(RuntimeWarning) as caught:
        loaded = _backend._load("auto", strict=False)
    assert len(caught) == 1
    message = str(caught[0].message)
    assert told in message and f"but this is torch {torch.__version__}" in message and _backend.MEND in message
    assert loaded.backend == "reference" and loaded.extension is None and told in loaded.problem
    with pytest.raises(ImportError, match="FUSED_LAYERNORM_STRICT=1"):
        _backend._load("auto", strict=True)


@pytest.mark.parametrize("version", ["{}.99", "{}.0.dev20260101", "{}.99+cu999"])
def test_another_patch_version_of_torch_fits(fake, version):
    version = version.format(".".join(torch.__version__.split(".")[:2]))
    fake("fused_layernorm_cpu", record("fused_layernorm_cpu", version))
    assert load_silently().backend == "cpu"


@pytest.mark.parametrize(
    "content", [b"not a library", "raise ImportError('undefined symbol: _ZN3c10')", "raise OSError('libx.so.13')"]
)
def test_broken_extension(fake, content):
    fake("fused_layernorm_cpu", record("fused_layernorm_cpu"), content)
    with pytest.warns(RuntimeWarning, match="fused_layernorm_cpu cannot be used: it does not load") as caught:
        loaded = _backend._load("auto", strict=False)
    assert len(caught) == 1 and _backend.MEND in str(caught[0].message)
    assert loaded.backend == "reference" and loaded.problem


def test_two_builds_in_one_source_folder(fake, monkeypatch):
    """A CUDA torch and a CPU torch may share a source folder: each takes its own build, and says nothing."""
    fake("fused_layernorm_cuda", record("fused_layernorm_cuda", cuda="13.0"))
    fake("fused_layernorm_cpu", record("fused_layernorm_cpu", cuda=None))
    monkeypatch.setattr(torch.version, "cuda", None)
    assert load_silently().backend == "cpu"
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    assert load_silently().backend == "cuda"


def test_cuda_kernels_lost_on_a_cuda_torch_are_told(fake, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    fake("fused_layernorm_cuda", record("fused_layernorm_cuda", cuda="12.8"))
    fake("fused_layernorm_cpu", record("fused_layernorm_cpu", cuda="13.0"))
    with pytest.warns(RuntimeWarning, match="CUDA 12.8.*CUDA 13.0.*CUDA tensors run on the slower"):
        loaded = _backend._load("auto", strict=False)
    assert loaded.backend == "cpu" and loaded.problem


def test_cpu_kernels_by_choice_on_a_cuda_torch_are_no_problem(fake, monkeypatch):
    """what build() made with USE_CUDA=0 beside an extension that does not fit: no warning at each import"""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    fake("fused_layernorm_cuda", record("fused_layernorm_cuda", cuda="12.8"))
    fake("fused_layernorm_cpu", {**record("fused_layernorm_cpu", cuda="13.0"), "no_cuda": "USE_CUDA=0 was set"})
    loaded = load_silently()
    assert loaded.backend == "cpu" and loaded.problem is None and "USE_CUDA=0 was set" in loaded.reason


def test_choice_of_cuda_where_only_the_cpu_kernels_were_built(fake):
    fake("fused_layernorm_cpu", {**record("fused_layernorm_cpu"), "no_cuda": "no nvcc"})
    with pytest.raises(ImportError, match="=cuda, but only the CPU kernels were built: no nvcc") as caught:
        _backend._load("cuda", strict=False)
    assert _backend.MEND not in str(caught.value)  # which would build the same again


def test_a_cache_that_may_not_be_read_is_no_cache(fake, monkeypatch):
    """torch's extension cache in the HOME of another user: as if nothing were there"""
    real = os.stat

    def stat(path, *arguments, **named):
        if "fused_layernorm_py" in str(path):
            raise PermissionError(13, "Permission denied", path)
        return real(path, *arguments, **named)

    monkeypatch.setattr(os, "stat", stat)
    assert load_silently().backend == "reference"


# ---- the loaded module -----------------------------------------------------------------------------------------------


def test_attributes_agree():
    assert _backend.backend in ("cuda", "cpu", "reference")
    assert (_backend.extension is None) == (_backend.backend == "reference") == (_ops.norm_forward is None)
    assert _backend.has_kernels_for("cpu") == (_backend.backend != "reference")
    assert _backend.has_kernels_for("cuda") == (_backend.backend == "cuda")
    assert not _backend.has_kernels_for("meta")


def test_reference_warning_comes_once(monkeypatch):
    monkeypatch.setattr(_backend, "_may_warn", True)
    with pytest.warns(RuntimeWarning, match="no compiled kernels for cuda tensors.*PyTorch reference") as caught:
        _backend.warn_reference("cuda")
        _backend.warn_reference("cuda")
    assert len(caught) == 1


def test_reference_warning_names_the_line_of_the_user(monkeypatch):
    monkeypatch.setattr(_ops, "norm", fused_layernorm.functional._norm)
    monkeypatch.setattr(_backend, "KERNEL_DEVICES", ())
    x = torch.randn(2, 4)
    for call in (
        lambda: fused_layernorm.fused_layer_norm(x, normalized_shape=4),
        lambda: fused_layernorm.FusedRMSNorm(4)(x),
        lambda: torch.nn.Sequential(fused_layernorm.FusedLayerNorm(4))(x),
        lambda: fused_layernorm.fused_add_rms_norm(x, x, torch.ones(4)),
    ):
        monkeypatch.setattr(_backend, "_may_warn", True)
        with pytest.warns(RuntimeWarning, match="no compiled kernels for cpu tensors") as caught:
            call()
        assert [warning.filename for warning in caught] == [__file__]


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, **environment}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


# As `python -m fused_layernorm`.
DIAGNOSIS = "import runpy; runpy.run_module('fused_layernorm', run_name='__main__', alter_sys=True)"


def test_diagnosis():
    result = run_code(DIAGNOSIS, "--json")
    found = json.loads(result.stdout)
    assert result.returncode == (1 if found["problems"] else 0), result.stderr
    assert found["torch"] == torch.__version__ and found["backend"] == _backend.backend and found["reason"]
    assert found["csrc_hash_now"] == source_hash()
    printed = run_python("-m", "fused_layernorm")
    assert printed.returncode == result.returncode
    for word in ("torch:", "backend:", "card:", "C++ compiler:"):
        assert word in printed.stdout


def test_diagnosis_into_a_closed_pipe():
    # As a reader that has gone, such as `| true`: the first write fails.
    code = f"import os; reader, writer = os.pipe(); os.close(reader); os.dup2(writer, 1)\n{DIAGNOSIS}"
    assert run_code(code, "--json").stderr == ""


def test_version():
    printed = run_code(DIAGNOSIS, "--version").stdout
    assert printed.split() == ["fused_layernorm", fused_layernorm.__version__]


def test_diagnosis_of_a_broken_backend(tmp_path):
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text("raise ImportError('undefined symbol')")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{DIAGNOSIS}"
    result = run_code(code, environment={"FUSED_LAYERNORM_BACKEND": ""})
    assert result.returncode == 1
    assert "PROBLEM:" in result.stdout and "undefined symbol" in result.stdout and _backend.MEND in result.stdout
    assert result.stderr.count("RuntimeWarning") == 1 and "Traceback" not in result.stderr


def test_environment_variables_reach_the_loader():
    code = "from fused_layernorm import _ops, backend; print(backend(), _ops.norm_forward)"
    result = run_code(code, environment={"FUSED_LAYERNORM_BACKEND": "no"})
    assert result.returncode != 0 and "FUSED_LAYERNORM_BACKEND must be" in result.stderr
    assert run_code(code, environment={"FUSED_LAYERNORM_BACKEND": "reference"}).stdout.split() == ["reference", "None"]


# ---- architectures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cards, supported, chosen",
    [
        ([], NVCC_13, "8.0;8.6;8.9;9.0;10.0;12.0+PTX"),
        ([], [(7, 0), (7, 5), (8, 0), (8, 6)], "8.0;8.6+PTX"),
        ([], [(5, 0), (6, 0), (7, 0)], "7.0+PTX"),
        ([(9, 0)], NVCC_13, "9.0"),
        ([(9, 0), (8, 0), (9, 0)], NVCC_13, "8.0;9.0"),
        ([(10, 3)], NVCC_12, "10.0"),  # of the same major version: 10.0 code runs
        ([(13, 0)], NVCC_13, "12.1+PTX"),  # newer than nvcc
        ([(12, 0), (13, 0)], [(12, 0)], "12.0+PTX"),
    ],
)
def test_choice_of_architectures(cards, supported, chosen):
    assert toolchain.choose_archs(cards, supported) == chosen
    assert all(toolchain.covers(chosen, card) for card in cards)


def test_card_too_old_for_nvcc():
    with pytest.raises(ValueError, match=r"7\.0.*begins at 7\.5"):
        toolchain.choose_archs([(7, 0)], NVCC_13)


@pytest.mark.parametrize(
    "arch_list, card, covered",
    [
        ("9.0", (9, 0), True),
        ("9.0a", (9, 0), True),
        ("8.0", (8, 6), True),
        ("8.6", (8, 0), False),
        ("8.0", (9, 0), False),
        ("8.0+PTX", (9, 0), True),
        ("8.0 9.0+PTX", (12, 0), True),
        ("9.0a+PTX", (10, 0), False),
        ("10.0f", (10, 3), True),
        ("10.0a", (10, 3), False),
        ("Hopper", (9, 0), False),
        ("", (9, 0), False),
    ],
)
def test_covers(arch_list, card, covered):
    assert toolchain.covers(arch_list, card) is covered


# ---- setup.py --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def setup_py():
    return runpy.run_path(str(ROOT / "setup.py"), run_name="setup_py")


def test_compiler_flags():
    flags = toolchain.compiler_flags()
    everything = " ".join(flags["cxx"] + flags["nvcc"])
    for unwanted in ("arch", "native", "fast_math", "fast-math", "-std", "-Ofast"):
        assert unwanted not in everything


def test_line_info_is_opt_in(monkeypatch):
    monkeypatch.delenv("FUSED_LAYERNORM_LINEINFO", raising=False)
    monkeypatch.delenv("DEBUG", raising=False)
    assert "-lineinfo" not in toolchain.compiler_flags()["nvcc"]
    monkeypatch.setenv("FUSED_LAYERNORM_LINEINFO", "1")
    assert "-lineinfo" in toolchain.compiler_flags()["nvcc"]
    monkeypatch.setenv("DEBUG", "1")  # -G, beside which nvcc ignores -lineinfo with a warning
    assert "-lineinfo" not in toolchain.compiler_flags()["nvcc"]


def test_options_that_not_every_nvcc_has(monkeypatch):
    monkeypatch.delenv("DEBUG", raising=False)
    new = {"--compress-mode=size", "--split-compile=8"}
    for nvcc_help, known in [
        ("--split-compile <number> ...\n--split-compile-extended <number>\n--compress-mode [default,size]", new),
        ("--split-compile <number> ...\n--split-compile-extended <number>", {"--split-compile=8"}),
        ("--split-compile-extended <number>", set()),
    ]:
        monkeypatch.setattr(toolchain, "output_of", lambda *command, text=nvcc_help: text)
        assert new & set(toolchain.compiler_flags(Path("/opt/cuda"))["nvcc"]) == known


def test_nvcc_of_another_major_version(monkeypatch):
    monkeypatch.setattr(toolchain, "find_toolkits", lambda: [(Path("/opt/cuda-12"), "12.8"), (Path("/c13"), "13.2")])
    assert toolchain.choose_toolkit("13.0") == (Path("/c13"), "13.2")
    with pytest.raises(
        toolchain.CannotBuild, match=r"nvcc is of CUDA 12\.8 \(/opt/cuda-12\).*for CUDA 11\.8.*set CUDA_HOME"
    ):
        toolchain.choose_toolkit("11.8")
    monkeypatch.setattr(toolchain, "find_toolkits", lambda: [])
    with pytest.raises(toolchain.CannotBuild, match=r"no CUDA compiler.*CUDA 13\.0.*CUDA_HOME"):
        toolchain.choose_toolkit("13.0")


def test_architecture_that_nvcc_does_not_know(monkeypatch):
    monkeypatch.setattr(toolchain, "nvcc_archs", lambda home: NVCC_13)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.0;9.0")
    with pytest.raises(SystemExit, match=r"does not compile for 7\.0; it knows 7\.5"):
        toolchain.set_arch_list(torch, Path("/c13"))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0+PTX")
    assert toolchain.set_arch_list(torch, Path("/c13")) == "9.0+PTX"


def test_platform_of_the_wheel(tmp_path):
    """manylinux by the newest glibc that a library asks for, and 2.28, torch's own, at least"""
    (tmp_path / "a.so").write_bytes(b"..GLIBC_2.2.5..GLIBC_2.14..")
    assert stable.platform_tag(tmp_path, "x86_64") == "manylinux_2_28_x86_64"
    (tmp_path / "b.so").write_bytes(b"..GLIBC_2.34..")
    assert stable.platform_tag(tmp_path, "x86_64") == "manylinux_2_34_x86_64"


def test_a_wheel_without_cuda_has_no_kernels_of_an_earlier_build(tmp_path, monkeypatch):
    """build/wheel is kept between builds: the CUDA kernels of one with nvcc went into one with USE_CUDA=0"""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / stable.KERNELS).touch()
    monkeypatch.setattr(stable, "run", lambda command: None)
    recipe = {"cxx": "c++", "flags": {"cxx": []}, "cuda": None}
    stable.compile_libraries(tmp_path, ROOT / "csrc", tmp_path / "lib", tmp_path / "objects", recipe, 1)
    assert not list((tmp_path / "lib").iterdir())


def test_architectures_of_the_wheel():
    assert stable.gencodes(toolchain.parse_archs("8.0;9.0a+PTX")) == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_90a,code=compute_90a",
    ]
    assert toolchain.covers(stable.ARCHS, (8, 9)) and toolchain.covers(stable.ARCHS, (12, 1))


@pytest.fixture
def wheel(tmp_path, monkeypatch, fake):
    """wheel(cuda, no_cuda): the libraries of a wheel are there; .loaded: those that were loaded."""

    def make(cuda: str | None, no_cuda: str | None = None) -> None:
        build = record(stable.OPERATORS, "2.11", cuda) | {"no_cuda": no_cuda, "arch_list": stable.ARCHS}
        toolchain.write_build_info(tmp_path, {stable.OPERATORS: build}, None)

    make.loaded = []
    monkeypatch.setattr(_backend, "__file__", str(tmp_path / "fused_layernorm" / "_backend.py"))
    monkeypatch.setattr(_backend, "LIBRARIES", tmp_path)
    monkeypatch.setattr(torch, "__version__", "2.13.0")  # from 2.14 on it is imported as a module
    monkeypatch.setattr(torch, "ops", mock.Mock(fused_layernorm=object(), load_library=make.loaded.append))
    (tmp_path / stable.OPERATORS).touch()
    return make


@pytest.mark.parametrize(
    "of_wheel, of_torch, choice, backend, told",
    [
        ("13.0", "13.2", "auto", "cuda", "loaded, for any torch"),
        ("13.0", "13.2", "cpu", "cpu", "loaded, for any torch"),
        ("13.0", None, "auto", "cpu", "loaded, for any torch"),
        ("13.0", "12.8", "auto", "cpu", "no CUDA kernels: they are of CUDA 13, and torch is of 12"),
        (None, "13.0", "auto", "cpu", "no CUDA kernels: USE_CUDA=0"),
    ],
)
def test_libraries_of_the_wheel(wheel, monkeypatch, tmp_path, of_wheel, of_torch, choice, backend, told):
    monkeypatch.setattr(torch.version, "cuda", of_torch)
    wheel(of_wheel, None if of_wheel else "USE_CUDA=0")
    loaded = load_silently(choice)
    assert (loaded.extension, loaded.backend, loaded.problem) == (None, backend, None) and told in loaded.reason
    assert wheel.loaded == [str(tmp_path / stable.OPERATORS)] == [str(loaded.library)]


def test_libraries_of_the_wheel_without_wanted_kernels(wheel, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    wheel("13.0")
    with pytest.raises(ImportError, match="FUSED_LAYERNORM_BACKEND=cuda, but no compiled extension is installed"):
        load_silently("cuda")
    assert not wheel.loaded


@pytest.mark.parametrize("version", ["2.13.0", "2.14.0"])
def test_libraries_of_the_wheel_that_do_not_load(wheel, monkeypatch, tmp_path, version):
    """such as on an older glibc: one warning, and PyTorch operations"""
    wheel(torch.version.cuda, None if torch.version.cuda else "USE_CUDA=0")
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.ops, "load_library", lambda path: ctypes.CDLL(path))
    with pytest.warns(RuntimeWarning, match="libfused_layernorm.so cannot be used: it does not load"):
        loaded = _backend._load("auto", strict=False)
    assert loaded.backend == "reference" and "does not load" in loaded.problem


def test_an_extension_goes_before_the_libraries_of_the_wheel(wheel, fake):
    wheel(torch.version.cuda)
    fake("fused_layernorm_cpu", record("fused_layernorm_cpu"))
    assert load_silently().extension.__name__ == "fused_layernorm_cpu" and not wheel.loaded


def test_build_on_kernels_of_the_wheel(tmp_path, monkeypatch):
    """build() compiles C++ alone, and links what the wheel brought"""
    package = tmp_path / "fused_layernorm"
    (tmp_path / "toolkit" / "include").mkdir(parents=True)
    (tmp_path / "toolkit" / "include" / "cuda_runtime_api.h").touch()
    monkeypatch.setattr(toolchain, "toolkit_candidates", lambda: [tmp_path / "toolkit"])
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.delenv("USE_CUDA", raising=False)
    assert toolchain.shipped_kernels(torch, package / "csrc") is None
    build = record(stable.OPERATORS, "2.11", "13.0") | {"nvcc": "13.0", "arch_list": stable.ARCHS}
    toolchain.write_build_info(tmp_path, {stable.OPERATORS: build}, None)
    (package / "lib").mkdir()
    (package / "lib" / stable.KERNELS).touch()
    (package / "csrc" / "stable").mkdir(parents=True)
    for name in ("one.cpp", "two.cu", "stable/library.cpp"):
        (package / "csrc" / name).touch()
    found = toolchain.recipe(torch, package / "csrc")
    assert found["name"] == "fused_layernorm_cuda" and [path.name for path in found["sources"]] == ["one.cpp"]
    assert f"-l:{stable.KERNELS}" in found["link"] and "-DFUSED_LAYERNORM_WITH_CUDA=1" in found["flags"]["cxx"]
    assert found["record"]["arch_list"] == stable.ARCHS and found["cuda"] is found["no_cuda"] is None
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert toolchain.shipped_kernels(torch, package / "csrc") is None


def test_record_of_a_build_keeps_its_neighbours(setup_py, tmp_path):
    (tmp_path / "a.so").touch()
    toolchain.write_build_info(tmp_path, {"a.so": {"torch": "1"}, "gone.so": {"torch": "2"}}, None)
    assert setup_py["earlier_builds"](tmp_path) == {"a.so": {"torch": "1"}}
    assert _backend._build_record(tmp_path).get("NOT_BUILT", 0) is None
    assert setup_py["earlier_builds"](tmp_path / "nowhere") == {}


def test_source_hash(tmp_path):
    assert source_hash(tmp_path) is None
    (tmp_path / "a.cu").write_text("a")
    (tmp_path / "b.h").write_text("b")
    first = source_hash(tmp_path)
    assert len(first) == 12 and source_hash(tmp_path) == first
    (tmp_path / ".swap").write_text("ignored")
    assert source_hash(tmp_path) == first
    (tmp_path / "b.h").rename(tmp_path / "c.h")
    assert source_hash(tmp_path) != first
    printed = run_python(str(ROOT / "fused_layernorm" / "_build" / "source_hash.py")).stdout.strip()
    assert printed == source_hash(ROOT / "csrc")


# ---- build() and FUSED_LAYERNORM_JIT=1 -------------------------------------------------------------------------------

# An extension that compiles in a second, in place of the real one: what the package takes from it, and nothing else.
# Its functions are Python's: the headers of torch alone take 10 s.
SMALL_EXTENSION = """
#include <Python.h>

static const char kContent[] =
    "import torch\\n"
    "names = 'norm try_norm takes_kernel y_tells_x set_callbacks count_optimizer_step refuse_cuda_tensors'\\n"
    "globals().update((name, lambda *arguments: None) for name in names.split())\\n"
    "library = torch.library.Library('fused_layernorm', 'DEF')\\n"
    "for name in ('norm_forward', 'norm_backward', 'norm_quant', 'sandwich_norm', 'dropout_mask'):\\n"
    "    library.define(f'{name}(Tensor x) -> Tensor')\\n";

static int fill(PyObject* module) {
  PyObject* scope = PyModule_GetDict(module);
  PyDict_SetItemString(scope, "__builtins__", PyEval_GetBuiltins());
  PyObject* result = PyRun_String(kContent, Py_file_input, scope, scope);
  Py_XDECREF(result);
  return result == nullptr ? -1 : 0;
}

#define NAME_OF(name) PyInit_##name
#define INIT(name) NAME_OF(name)
PyMODINIT_FUNC INIT(TORCH_EXTENSION_NAME)() {
  static PyModuleDef_Slot slots[] = {{Py_mod_exec, reinterpret_cast<void*>(&fill)}, {0, nullptr}};
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "small", nullptr, 0, nullptr, slots};
  return PyModuleDef_Init(&definition);
}
"""


@pytest.fixture(scope="module")
def not_built(tmp_path_factory):
    """not_built(code, **environment): run code where the package has no extension, but sources that compile."""
    environment_of_build = build_environment("cpu")
    folder = tmp_path_factory.mktemp("not_built")
    ignore = shutil.ignore_patterns("_build_info.py", "__pycache__", "csrc")
    shutil.copytree(ROOT / "fused_layernorm", folder / "fused_layernorm", ignore=ignore)
    (folder / "csrc").mkdir()
    (folder / "csrc" / "small.cpp").write_text(SMALL_EXTENSION)
    hide = "import importlib.util as u; real = u.find_spec\n"
    hide += f"u.find_spec = lambda name, package=None: None if name in {NAMES} else real(name, package)\n"

    def run(code: str, **environment: str) -> subprocess.CompletedProcess:
        clean = {name: None for name in os.environ if name.startswith("FUSED_LAYERNORM")}
        clean |= environment_of_build | {"PYTHONPATH": str(folder), "TORCH_EXTENSIONS_DIR": str(folder / "cache")}
        return run_code(hide + code, cwd=folder, environment=clean | environment)

    run.folder = folder
    return run


SHOW = "import fused_layernorm as f; print(f.backend(), getattr(f._backend.extension, '__file__', None))"


def test_jit(not_built):
    """The stations of one cache folder, in order: each is where the one before has left it."""
    library = not_built.folder / "cache" / jit.cache_folder().name / NAMES[1] / f"{NAMES[1]}.so"
    source = not_built.folder / "csrc" / "small.cpp"
    library.parent.mkdir(parents=True)
    (library.parent / "lock").touch()  # torch's, of a build that was killed: torch waits for ever while it is there

    compiled = not_built(SHOW, FUSED_LAYERNORM_JIT="1")
    assert compiled.stdout.split() == ["cpu", str(library)], compiled.stderr
    assert "fused_layernorm: compiling the kernels into" in compiled.stderr and "compiled, " in compiled.stderr
    made = library.stat().st_mtime_ns

    again = not_built(f"{SHOW}; import sys; print('later', file=sys.stderr); print(f.build())")
    assert again.stdout.split() == [*compiled.stdout.split(), str(library)]  # found without the variable, too
    assert again.stderr.startswith("later"), "it was compiled at import"
    assert library.stat().st_mtime_ns == made, "it was compiled though nothing had changed"

    source.write_text("#error not this way\n")  # what is in the cache is stale: not used
    broken = not_built(SHOW, FUSED_LAYERNORM_JIT="1")
    assert broken.stdout.split() == ["reference", "None"]
    assert "RuntimeWarning: FUSED_LAYERNORM_JIT=1" in broken.stderr and "not this way" in broken.stderr


def test_build_into_a_folder_that_cannot_be_written(not_built, tmp_path):
    """a sentence, no traceback of the compiling process"""
    (tmp_path / "file").touch()
    code = "import fused_layernorm as f\ntry:\n  f.build()\nexcept RuntimeError as e:\n  print(e)"
    told = not_built(code, TORCH_EXTENSIONS_DIR=str(tmp_path / "file")).stdout
    assert "the cache cannot be written" in told and "TORCH_EXTENSIONS_DIR" in told and "Traceback" not in told


def test_progress_of_a_build(tmp_path):
    """files that are compiled are counted, those of an earlier build are not; the command's status is passed on"""
    (tmp_path / "old.o").touch()
    os.utime(tmp_path / "old.o", (0, 0))
    plan = "build a.o: compile a.cpp\nbuild b.o: compile b.cpp\nbuild x.so: link a.o b.o\n"
    program = f"printf '{plan}' > build.ninja; touch a.o; sleep 2.5; exit 3"
    script = str(ROOT / "fused_layernorm" / "_build" / "progress.py")
    command = [sys.executable, script, ".", "bash", "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 3 and "fused_layernorm: 1 of 2 files compiled" in done.stderr


def test_a_process_that_waits_says_so(tmp_path):
    code = "import sys, pathlib; from fused_layernorm._build import jit\n"
    code += "with jit._alone(pathlib.Path(sys.argv[1])): print('alone')"
    with jit._alone(tmp_path):
        waiting = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
        assert "another process compiles the kernels; waiting for it" in waiting.stderr.readline()
        assert waiting.poll() is None
    assert waiting.communicate(timeout=60)[0] == "alone\n"


def test_jit_that_fails(fake, monkeypatch):
    def build():
        raise RuntimeError("no ninja")

    monkeypatch.setattr(jit, "build", build)
    assert load_silently().backend == "reference"  # nobody asked for it to be compiled
    with pytest.warns(RuntimeWarning, match="FUSED_LAYERNORM_JIT=1: no ninja"):
        assert _backend._load("auto", strict=False, compile_missing=True).backend == "reference"
    with pytest.raises(ImportError, match="FUSED_LAYERNORM_JIT=1: no ninja"):
        _backend._load("auto", strict=True, compile_missing=True)
    fake("fused_layernorm_cpu", {**record("fused_layernorm_cpu"), "csrc_hash": "of others"})
    with pytest.warns(RuntimeWarning, match="Existing kernels are used instead"):
        assert _backend._load("auto", strict=False, compile_missing=True).backend == "cpu"  # better stale than none


def test_recipe_without_a_compiler(monkeypatch):
    monkeypatch.setattr(toolchain, "find_cxx", lambda: None)
    with pytest.raises(toolchain.CannotBuild, match=r"no C\+\+ compiler was found"):
        toolchain.recipe(torch, ROOT / "csrc")


def test_sources_come_with_the_package(tmp_path):
    """build() and include_dir() need them where there is no source folder."""
    # With no compiler to be found it installs what is there, and compiles nothing.
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    environment = {**os.environ, "PATH": "/nowhere", "CXX": ""}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    assert source_hash(tmp_path / "fused_layernorm" / "csrc") == source_hash(ROOT / "csrc")
    assert (tmp_path / "fused_layernorm" / "__init__.py").exists()
    assert not (tmp_path / "fused_layernorm" / "_build_info.py").read_text().count("fused_layernorm_c")


def test_stale_extension_is_compiled_anew(fake, monkeypatch):
    """With FUSED_LAYERNORM_JIT=1, an installed extension of other sources gives way to what build() makes."""
    built = []

    def build():
        built.append(True)
        path = jit.library("fused_layernorm_cpu")
        path.parent.mkdir(parents=True)
        path.write_text("norm_forward = norm_backward = len\n")
        name = {path.name: {**record("fused_layernorm_cpu"), "csrc_hash": source_hash()}}
        toolchain.write_build_info(path.parent, name, None)

    monkeypatch.setattr(jit, "build", build)
    monkeypatch.setattr(jit, "library", lambda name: fake.folder / "cache" / name / f"{name}.py")
    fake("fused_layernorm_cpu", {**record("fused_layernorm_cpu"), "csrc_hash": "of others"})
    assert Path(load_silently().extension.__file__).parent == fake.folder and not built  # not asked for: used as it is
    sys.modules.pop("fused_layernorm_cpu")
    loaded = _backend._load("auto", strict=True, compile_missing=True)
    assert Path(loaded.extension.__file__).parent == fake.folder / "cache" / "fused_layernorm_cpu" and len(built) == 1
    sys.modules.pop("fused_layernorm_cpu")
    _backend._load("auto", strict=True, compile_missing=True)
    assert len(built) == 1  # the next import finds it


def test_fresh_extension_is_not_compiled_anew(fake, monkeypatch):
    monkeypatch.setattr(jit, "build", lambda: pytest.fail("it was compiled"))
    name = NAMES[torch.version.cuda is None]
    fake(name, {**record(name), "csrc_hash": source_hash()})
    assert _backend._load("auto", strict=True, compile_missing=True).extension.__name__ == name


@pytest.mark.parametrize("package, version, command, told", [
    ("torch", "2.9.1+cpu", ["build_ext"], "needs torch 2.11 or newer, and this is torch 2.9.1+cpu"),
    ("setuptools", "65.5.0", ["bdist_wheel"], "needs setuptools 70.1 or newer, and this is setuptools 65.5.0"),
])  # fmt: skip
def test_setup_stops_where_a_package_is_too_old(tmp_path, package, version, command, told):
    """before it compiles anything, and before pip could put another torch in its place"""
    if package == "torch":
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "__init__.py").write_text(f"__version__ = {version!r}")
        prelude = ""
    else:
        prelude = f"import setuptools, importlib.util as u; setuptools.__version__ = {version!r}; real = u.find_spec; "
        prelude += "u.find_spec = lambda name, *rest: None if name == 'wheel' else real(name, *rest); "
    code = f"{prelude}import sys, runpy; sys.argv = ['setup.py', *{command}]; "
    code += "runpy.run_path('setup.py', run_name='__main__')"
    result = run_python("-c", code, PYTHONPATH=str(tmp_path))
    assert result.returncode != 0 and told in result.stderr and "Traceback" not in result.stderr


# ---- what is shipped -------------------------------------------------------------------------------------------------


@pytest.fixture
def sources(tmp_path):
    """A copy of what is under version control, or is new here: no build of this folder is in it."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("needs a git checkout")
    for name in ("one", "two"):
        for file in filter(lambda file: (ROOT / file).is_file(), listed.stdout.splitlines()):
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, tmp_path / name / file)
    return tmp_path


def setup_in(folder: Path, *arguments: str, **environment: str) -> None:
    # A compiler that is not there: a wheel of Python files, in seconds.
    nowhere = {"SOURCE_DATE_EPOCH": "1700000000", "CXX": "/nowhere", "PATH": "/nowhere"}
    environment = {**os.environ, **nowhere, **environment}
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_wheel_without_extension_is_reproducible_and_complete(sources):
    wheels = []
    for name in ("one", "two"):
        setup_in(sources / name, "bdist_wheel", "--dist-dir", str(sources / f"dist-{name}"))
        wheels += (sources / f"dist-{name}").glob("*.whl")
    assert wheels[0].read_bytes() == wheels[1].read_bytes()
    names = zipfile.ZipFile(wheels[0]).namelist()
    (metadata,) = (name for name in names if name.endswith("/METADATA"))
    assert b"\nRequires-Dist: torch>=2.11\n" in zipfile.ZipFile(wheels[0]).read(metadata)
    shipped = {name for name in names if ".dist-info/" not in name}
    wanted = {path.relative_to(ROOT).as_posix() for path in (ROOT / "fused_layernorm").rglob("*.py")}
    wanted |= {
        f"fused_layernorm/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "csrc").rglob("*") if path.is_file()
    }  # for build()
    assert shipped == wanted | {"fused_layernorm/_build_info.py", "fused_layernorm/py.typed"}


def test_wheel_to_hand_on_is_not_made_without_an_extension(sources):
    with pytest.raises(AssertionError, match="FUSED_LAYERNORM_WHEEL=1, but no extension can be built"):
        setup_in(sources / "one", "bdist_wheel", FUSED_LAYERNORM_WHEEL="1")


def test_sdist_holds_what_a_build_and_the_tests_need(sources):
    setup_in(sources / "one", "sdist", "--dist-dir", str(sources / "dist"))
    (path,) = (sources / "dist").iterdir()
    names = {name.split("/", 1)[1] for name in tarfile.open(path).getnames() if "/" in name}
    needed = [*ROOT.glob("csrc/*/*"), *ROOT.glob("tests/*.py"), *ROOT.glob("examples/*.py"), *ROOT.glob("docs/*.md")]
    needed += [ROOT / name for name in ("setup.py", "pyproject.toml", "LICENSE", "SECURITY.md", "test_correctness.py")]
    needed += [ROOT / "fused_layernorm" / "py.typed", ROOT / "conftest.py", ROOT / "benchmarks" / "record.sh"]
    needed += [*ROOT.glob("benchmarks/*.py"), *ROOT.glob("benchmarks/results/**/*.json"), ROOT / ".ci" / "run"]
    assert {path.relative_to(ROOT).as_posix() for path in needed} <= names
    assert not [name for name in names if name.endswith((".so", ".pyc")) or "_build_info" in name]


@pytest.mark.skipif(_backend.extension is None, reason="no extension here")
def test_extension_names_no_folder_of_the_machine_that_built_it():
    if _backend.build_info is None or _backend.build_info["debug"]:
        pytest.skip("of a build for debugging, or one without a record")
    content = Path(_backend.extension.__file__).read_bytes()
    assert str(ROOT / "csrc").encode() not in content
