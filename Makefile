# make help: this page.
# make test, make bench: set up a virtual environment with torch and the build (first time: minutes), then run.
# make test-models: replace_norms on models of other packages, which it installs.
#   PYTHON=python3.12   the Python that creates the environment
#   TORCH=torch==2.14.1 the torch to install if the environment has none
#   VENV=path           the environment
#   ARGS="-k gradcheck" more arguments for pytest or the benchmark
#   WORKERS=4           number of test processes with one thread each; 0: one process with all threads
# make fuzz: thousands of new random cases for each test (FUZZ=n: this many; FUZZ_DEVICE=cuda: on the GPU).
# make audit: known vulnerabilities and licences of the packages in the environment.
# make wheel: a wheel in dist/ for every torch from 2.11 on and every Python; with CUDA kernels if there is nvcc.
# make nvcc: install the CUDA compiler from Python packages, for a CUDA torch on a machine without a toolkit.
# make sdist: a source package in dist/.
# make newcomer: README's commands, the examples and the wheel in a fresh clone, with their seconds (up to an hour).
# make site: the documentation as HTML in build/site; warnings, such as a dead link, are errors.
# make new-op NAME=fast_gelu: an operator of your own in examples/ (DEST=folder: there), from examples/template.
# make record: tests and benchmark on this machine's card, into benchmarks/results/ (OUT=folder: there).
# make lint, make format: check or apply the formatters; make clean, make distclean: remove builds, and the environment.
# To use a Python that already has torch: pip install --no-build-isolation -e ".[test]", then make test-here.

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# Without a card: a version with a CPU build that pip can find; with a card: the newest.
TORCH ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo torch || echo torch==2.13.0)

# With a card: one process, because tests measure its memory, and some fill it.
WORKERS ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo 0 || echo 2)
# worksteal: most tests of a file stay in one process and share its fixtures.
PYTEST = $(if $(filter-out 0,$(WORKERS)),OMP_NUM_THREADS=1) $(BIN)/python -m pytest \
  $(if $(filter-out 0,$(WORKERS)),-n $(WORKERS) --dist worksteal)

BIN := $(VENV)/bin
TORCHED := $(VENV)/.torch
BUILT := $(VENV)/.built
TESTED := $(VENV)/.test
TOOLS := $(VENV)/.tools
BUILD_INPUTS := $(wildcard csrc/* csrc/*/*) setup.py pyproject.toml $(wildcard fused_layernorm/_build/*.py)
CXX_FILES = $(wildcard csrc/*.h csrc/*.inl csrc/*/*.* tests/*.cu tests/*.cpp examples/*/csrc/*)

MODEL_TESTS := tests/test_models.py tests/test_replace.py tests/test_hf_kernels.py

.PHONY: help test test-models fuzz audit tidy site bench build test-here test-models-here bench-here record wheel nvcc sdist \
  newcomer new-op lint format clean distclean

test: $(TESTED)
	$(PYTEST) --ignore=tests/test_models.py $(ARGS)

test-models: $(BUILT)
	$(BIN)/python -c "import torch; print('torch==' + torch.__version__.split('+')[0])" > $(VENV)/torch.txt
	vision=$$($(BIN)/python -c "import torch; print(',vision' if torch.version.cuda else '')") && \
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pip install --no-build-isolation --constraint $(VENV)/torch.txt \
	  -e ".[test,models$$vision]"
	$(PYTEST) $(MODEL_TESTS) $(ARGS)

fuzz: $(TESTED)
	FUZZ=$(or $(FUZZ),5000) $(PYTEST) -q tests/test_fuzz.py $(ARGS)

audit: $(BUILT)
	$(BIN)/python -m pip install pip-audit pip-licenses
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+.*//' > $(VENV)/installed.txt # torch==2.13.0+cpu: 2.13.0
	$(BIN)/pip-audit --strict --disable-pip --no-deps -r $(VENV)/installed.txt
	$(BIN)/pip-licenses --order=license

site: $(BUILT)
	$(BIN)/python -m pip install -r docs/site/requirements.txt
	$(BIN)/python docs/site/build.py

bench: $(BUILT)
	$(BIN)/python test_benchmark.py $(ARGS)

build: $(BUILT)

test-here:
	$(PYTHON) -m pytest $(ARGS)

test-models-here:
	$(PYTHON) -m pytest $(MODEL_TESTS) $(ARGS)

bench-here:
	$(PYTHON) test_benchmark.py $(ARGS)

# One folder for each card, named after it.
record:
	@out="$(OUT)"; card=$$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1); \
	if [ -z "$$card" ]; then echo "no NVIDIA card is here"; exit 1; fi; \
	name=$$(echo "$${card#NVIDIA }" | tr 'A-Z ' 'a-z_' | tr -cd 'a-z0-9_-'); \
	benchmarks/record.sh "$${out:-benchmarks/results/$$name}"

wheel: $(TORCHED)
	FUSED_LAYERNORM_WHEEL=1 PATH="$(abspath $(BIN)):$$PATH" \
	  $(BIN)/python -m pip wheel --no-build-isolation --no-deps --wheel-dir dist .

nvcc: $(TORCHED)
	cuda=$$($(BIN)/python -c "import torch; print(torch.version.cuda)") && $(BIN)/python -m pip install \
	  "nvidia-cuda-nvcc==$$cuda.*" "nvidia-cuda-crt==$$cuda.*" "nvidia-nvvm==$$cuda.*" "nvidia-cuda-cccl==$$cuda.*"

sdist: $(BUILT)
	$(BIN)/python setup.py -q sdist --dist-dir dist

newcomer:
	$(PYTHON) .ci/newcomer.py

new-op:
	@test -n "$(NAME)" || { echo "make new-op NAME=fast_gelu [DEST=folder]"; exit 1; }
	@$(PYTHON) examples/new_op.py $(NAME) $(DEST)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --upgrade pip setuptools wheel ninja

$(TORCHED): $(BIN)/python
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install "$(TORCH)"
	touch $@

$(BUILT): $(TORCHED) $(BUILD_INPUTS)
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python fused_layernorm/_build/progress.py build \
	  $(BIN)/python -m pip install --no-build-isolation -e .
	$(BIN)/python -m fused_layernorm
	touch $@

# The packages of the extra `test`, without another build.
$(TESTED): $(BUILT)
	$(BIN)/python -c "import importlib.metadata as m; print(*(r.split(';')[0].strip() for r in \
	  m.requires('fused_layernorm') if r.endswith('extra == \"test\"')), sep='\n')" > $(VENV)/test.txt
	$(BIN)/python -m pip install -r $(VENV)/test.txt
	touch $@

# .pre-commit-config.yaml has the versions of the formatters.
$(TOOLS): .pre-commit-config.yaml | $(BIN)/python
	$(BIN)/python -m pip install \
	  $$(grep -oE '(ruff|clang-format|clang-tidy|mypy)==[0-9.]+' .pre-commit-config.yaml | sort -u)
	touch $@

lint: $(TOOLS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(BIN)/mypy

# Warnings of the compiler and of clang-tidy (.clang-tidy) in the bindings and the CPU kernels; needs a torch.
TIDY_FLAGS = -std=c++20 -DTORCH_EXTENSION_NAME=x -Icsrc $(shell $(BIN)/python -c "import sysconfig; \
  import torch.utils.cpp_extension as e; \
  print(*('-isystem ' + path for path in [*e.include_paths(), sysconfig.get_path('include')]))")
tidy: $(BUILT) $(TOOLS)
	set -e; stable=$$($(BIN)/python -c "import runpy; \
	  print(*runpy.run_path('fused_layernorm/_build/stable.py')['DEFINES'])"); \
	for file in csrc/*/*.cpp; do flags="$(TIDY_FLAGS)"; \
	  case $$file in csrc/stable/*) flags="$$flags $$stable";; esac; \
	  $(CXX) -fsyntax-only -fopenmp -Wall -Wextra -Werror $$flags $$file; \
	  $(BIN)/clang-tidy --quiet --warnings-as-errors='*' $$file -- $$flags; done

format: $(TOOLS)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

clean:
	rm -rf build dist *.egg-info *.so fused_layernorm/_build_info.py $(BUILT) .pytest_cache .ruff_cache

distclean: clean
	rm -rf $(VENV)
