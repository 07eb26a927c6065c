#!/usr/bin/env bash
# The records behind docs/reliability.md, in one call on a machine with a GPU, torch, pytest, hypothesis and
# compute-sanitizer: builds for its card, fuzzes (FUZZ: cases a test, by default 4000) and runs tests/test_reliability.py,
# runs the sanitizers, and trains for 10,000 steps (STEPS). Leaves tests_*.json, sanitizer_*.json and long_training_*.json
# in the folder given (default: benchmarks/output). PARTS="tests sanitizer training" chooses: together they take long.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-benchmarks/output}
mkdir -p "$out"
export FORCE_CUDA=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

python3 setup.py build_ext --inplace > "$out/build.log" 2>&1 || { tail -n 30 "$out/build.log"; exit 1; }
failed=0
wanted() { [[ " ${PARTS:-tests sanitizer training} " == *" $1 "* ]]; }
if wanted tests; then
  FUZZ=${FUZZ:-4000} FUZZ_DEVICE=cuda python3 -m pytest -q -p no:cacheprovider -k "not cpu" --junitxml="$out/reliability.xml" \
    tests/test_fuzz.py tests/test_reliability.py > "$out/reliability.log" 2>&1 || failed=1
  tail -n 12 "$out/reliability.log"
  python3 benchmarks/record_tests.py "$out/reliability.xml" "$out"
fi
if wanted sanitizer; then python3 benchmarks/sanitize.py "$out" || failed=1; fi
if wanted training; then
  for dtype in bf16 fp16; do
    python3 examples/train_long.py --device cuda --dtype "$dtype" --steps "${STEPS:-10000}" --out "$out" || failed=1
  done
fi
exit $failed
