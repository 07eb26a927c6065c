#!/usr/bin/env bash
# The records behind docs/reliability.md, in one call on a machine with a GPU, torch, pytest, hypothesis and
# compute-sanitizer: builds for its card, fuzzes (FUZZ: cases a test, by default 4000), runs tests/test_reliability.py,
# then the sanitizers, and leaves tests_*.json and sanitizer_*.json in the folder given (default: benchmarks/output).
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-benchmarks/output}
mkdir -p "$out"
export FORCE_CUDA=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

python3 setup.py build_ext --inplace > "$out/build.log" 2>&1 || { tail -n 30 "$out/build.log"; exit 1; }
failed=0
FUZZ=${FUZZ:-4000} FUZZ_DEVICE=cuda python3 -m pytest -q -p no:cacheprovider -k "not cpu" --junitxml="$out/reliability.xml" \
  tests/test_fuzz.py tests/test_reliability.py > "$out/reliability.log" 2>&1 || failed=1
tail -n 12 "$out/reliability.log"
python3 benchmarks/record_tests.py "$out/reliability.xml" "$out"
python3 benchmarks/sanitize.py "$out" || failed=1
exit $failed
