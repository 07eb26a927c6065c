#!/usr/bin/env bash
# In one call on a machine with a GPU and torch: builds for its card, runs the tests of the kernels on it, benchmarks,
# draws, and leaves the records (tests_*.json, benchmark_*.json, .csv and .png) in the folder given, by default
# benchmarks/output. TESTS or SWEEP replace what is run, BUILD=true builds nothing. WARM: processes that fill the compile
# caches first, by default one a core; 0: none. WORKERS: processes for the tests (needs pytest-xdist, and a card with
# memory for so many), during which the caches are filled.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-benchmarks/output}
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

${BUILD:-env FORCE_CUDA=1 python3 setup.py build_ext --inplace} > "$out/build.log" 2>&1 ||
  { tail -n 30 "$out/build.log"; exit 1; }
sweep=${SWEEP:---shapes small,sweep,huge,narrow --dtype bf16,fp32 --op layer_norm,rms_norm \
  --direction forward,backward,call_no_grad,step --providers all --rounds 10}
warm() {
  # shellcheck disable=SC2086
  (($1 == 0)) || python3 test_benchmark.py $sweep --warm "$1" || true # the run itself says who fails
}
: "${WARM:=$(nproc)}"
failed=0 warming=
if [[ -n ${WORKERS:-} ]]; then
  OMP_NUM_THREADS=1 warm $(((WARM + 3) / 4)) > "$out/warm.log" 2>&1 &
  warming=$!
fi
# shellcheck disable=SC2086
${WORKERS:+env OMP_NUM_THREADS=1} python3 -m pytest -q -p no:cacheprovider \
  ${WORKERS:+-n "$WORKERS" --dist worksteal} --junitxml="$out/tests.xml" \
  ${TESTS:-test_correctness.py tests/test_fusions.py tests/test_compat.py tests/test_pytorch.py tests/test_torch_own.py \
  tests/test_reported_failures.py tests/test_replace.py test_benchmark.py} > "$out/tests.log" 2>&1 || failed=1
tail -n 12 "$out/tests.log"
python3 benchmarks/record_tests.py "$out/tests.xml" "$out"

if [[ -n $warming ]]; then wait "$warming"; else warm "$WARM"; fi
# shellcheck disable=SC2086
python3 test_benchmark.py $sweep --record "$out" > "$out/benchmark.log" 2>&1 || failed=1
tail -n 40 "$out/benchmark.log"
record=$(find "$out" -maxdepth 1 -name 'benchmark_*.json' | sort | tail -n 1)
python3 test_benchmark.py --plot "$record" || true # without matplotlib: elsewhere, later
python3 benchmarks/check_targets.py "$record" > "$out/targets.txt" || true
head -n 70 "$out/targets.txt"
exit $failed
