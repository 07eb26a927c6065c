#!/usr/bin/env bash
# In one call on a machine with a GPU and torch: builds for its card, runs every test on it, benchmarks, and leaves the
# records (tests-*.json, benchmark JSON and CSV) in the folder given, by default benchmarks/output. TESTS or SWEEP
# replace what is run; extra processes for the tests: WORKERS (needs pytest-xdist).
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-benchmarks/output}
mkdir -p "$out"
export FORCE_CUDA=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

python3 setup.py build_ext --inplace > "$out/build.log" 2>&1 || { tail -n 30 "$out/build.log"; exit 1; }
failed=0
# shellcheck disable=SC2086
python3 -m pytest -q -p no:cacheprovider ${WORKERS:+-n "$WORKERS"} --junitxml="$out/tests.xml" \
  ${TESTS:-test_correctness.py tests/test_replace.py} > "$out/tests.log" 2>&1 || failed=1
tail -n 12 "$out/tests.log"
python3 benchmarks/record_tests.py "$out/tests.xml" "$out"
# shellcheck disable=SC2086
python3 test_benchmark.py ${SWEEP:---shapes small,llm,sweep --dtype bf16,fp32 --op layer_norm,rms_norm \
  --direction forward,backward --providers fused,torch} --record "$out" > "$out/benchmark.log" 2>&1 || failed=1
tail -n 20 "$out/benchmark.log"
exit $failed
