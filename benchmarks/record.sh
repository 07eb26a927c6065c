#!/usr/bin/env bash
# What is recorded about the library on a card, in one call on a machine with a GPU, torch, pytest and hypothesis. Builds
# for the card; then the parts, which leave their records in the folder given (default: benchmarks/output):
#   tests      those of the kernels (TESTS: others), in WORKERS processes beside one for those that fill the card
#              (default: all in one process; more need pytest-xdist, and a card with memory for so many)
#   pair       those that want two cards, on the first two
#   fuzz       FUZZ random cases in all (default 20000), in as many processes as there are cores. They find what the
#              tests' table of cases misses
#   sanitizer  benchmarks/sanitize.py, by the compute-sanitizer that PATH has first
#   racecheck  the same by racecheck, in a build of its own
#   training   STEPS steps (default 10000) of three seeds in bf16 and fp16, each run a process (TRAINING=--quick: tiny)
#   promises   tests/test_reliability.py, which wants the card for itself
#   warm       fills the compile caches for what follows, in as many processes as there are cores
#   benchmark  test_benchmark.py (SWEEP: its options), drawn, and the targets that it meets
#   residual   the norms with a residual at five shapes beside all others that are installed
#   peers      every cell of test_benchmark.py in bf16, fp16 and fp32 beside all others that are installed, with plots;
#              warm_peers fills the compile caches for it
#   fusions    benchmarks/fusions.py
#   gated      the same for the gated norm, from 64 columns on
#   quant      benchmarks/quant.py (QUANT: its options)
#   models     benchmarks/models.py (MODELS: its options)
# PARTS names them in their order (default: "tests fuzz:60 warm benchmark residual fusions"). A "/" begins another row of
# parts, which has the next card, and runs at the same time with its share of the cores; "fuzz:60" gives a part about 60
# seconds, and it records what it reached until then:
#   PARTS="tests:280 fuzz:60 / sanitizer:200 racecheck:150" WORKERS=14 benchmarks/record.sh FOLDER
# peers and models may be restricted, so that several cards share them:
#   PARTS="warm_peers=bf16 peers=bf16 / warm_peers=fp32 peers=fp32 / models=gpt_768,vit_1024" benchmarks/record.sh FOLDER
# CARDS=0,1: the processes of tests, fuzz, sanitizer and racecheck take turns with these cards, instead of their row's. On two
# H100 and 32 cores: tests of values 155 s by 28 workers, test_inductor.py 190 s by 24, test_reported_failures.py 75 s; sanitizer
# 200 s almost alone, more than 280 s beside fuzz and racecheck; racecheck 270 s alone, by 24 processes; 17,000 random cases 200 s.
# On one H200 and 16 cores racecheck made 205 of 396 calls in 500 s, 40 s a call for a process; two thirds of the elements took no less.
# The build's own record is build.json (benchmarks/build_record.py). BUILD=true builds nothing; BUILD="benchmarks/objects.sh
# link FOLDER" links CUDA objects that were compiled elsewhere.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-benchmarks/output}
mkdir -p "$out"
out=$(realpath "$out")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 FUZZ_DEVICE=${FUZZ_DEVICE:-cuda}
: "${FUZZ:=20000}" "${STEPS:=10000}" "${WORKERS:=0}" "${BUILD:=env FORCE_CUDA=1 python3 setup.py build_ext --inplace}"
: "${PARTS:=tests fuzz:60 warm benchmark residual fusions}"
: "${TESTS:=test_correctness.py tests/test_fusions.py tests/test_compat.py tests/test_pytorch.py tests/test_torch_own.py \
  tests/test_quant.py tests/test_replace.py test_benchmark.py tests/test_inductor.py}"
: "${SWEEP:=--shapes small,sweep,huge,narrow --dtype bf16,fp32 --op layer_norm,rms_norm \
  --direction forward,backward,call_no_grad,step --providers fused,torch,compile --rounds 10}"
RESIDUAL="--op add_layer_norm,add_rms_norm --dtype bf16 --shapes 131072x1024,65536x2048,32768x4096,16384x8192,4096x8192 \
  --direction forward,backward --providers all --rounds 4"
PEERS="--op layer_norm,rms_norm --shapes small,sweep,huge,narrow --direction forward,backward \
  --providers all --rounds 5"
FUSIONS="--hidden 1024 1152 1536 4096 8192 --dtype bf16 --compiled 4096"
GATED="--record gated --only gated_rms_norm --hidden 64 128 256 1024 1536 2048 4096 5120 8192 16384 --dtype bf16 --compiled 128 4096"
QUANT=${QUANT:-}
[[ -n ${TORCHINDUCTOR_CACHE_DIR:-} ]] || # fusions.py finds what test_benchmark.py --warm left
  export TORCHINDUCTOR_CACHE_DIR=$PWD/benchmarks/output/cache/inductor \
    TRITON_CACHE_DIR=$PWD/benchmarks/output/cache/triton QUACK_CACHE_DIR=$PWD/benchmarks/output/cache/quack

# Each part is called with its seconds, 0: as long as it takes.
within() { # seconds, command; SIGINT: pytest still writes its report
  timeout --signal INT --kill-after 30 "$@"
}
seconds_or_inf() { if (($1)); then echo "$1"; else echo inf; fi; }

# For parts that take turns with CARDS.
chosen_cards() { echo "${CARDS:-$CUDA_VISIBLE_DEVICES}"; }

pytest_into() { # report, seconds, arguments
  local report=$work/$1.xml limit=$2
  shift 2
  within "$limit" python3 -m pytest -q -p no:cacheprovider --junitxml="$report" "$@"
}

part_tests() {
  local failed=0 filling
  read -ra files <<< "$TESTS"
  if ((WORKERS)); then
    export OMP_NUM_THREADS=1 TEST_CARDS=$(chosen_cards)
    pytest_into tests_filling "$1" tests/test_reported_failures.py > "$out/tests_filling.log" 2>&1 &
    filling=$!
    pytest_into tests_rest "$1" -n "$WORKERS" --dist worksteal "${files[@]}" || failed=1
    wait $filling || failed=1
    tail -n 3 "$out/tests_filling.log"
  else
    pytest_into tests_all "$1" "${files[@]}" tests/test_reported_failures.py || failed=1
  fi
  python3 benchmarks/record_tests.py "$work"/tests_*.xml "$out"
  return $failed
}

part_pair() {
  local failed=0
  unset CUDA_VISIBLE_DEVICES
  pytest_into pair "$1" test_correctness.py tests/test_pytorch.py tests/test_reported_failures.py \
    tests/test_distributed.py -k "second_device or another_device_than_the_current or nccl-2" || failed=1
  python3 benchmarks/record_tests.py "$work/pair.xml" "$out"
  return $failed
}

part_fuzz() {
  local tests processes each i pids=() failed=0 cards
  processes=$(nproc)
  tests=$(python3 -m pytest -q -p no:cacheprovider --collect-only -k test_fuzz_ tests/test_fuzz.py | grep -c ::)
  each=$(((FUZZ - 1) / (processes * tests) + 1))
  IFS=, read -ra cards <<< "$(chosen_cards)"
  for ((i = 1; i <= processes; i++)); do
    CUDA_VISIBLE_DEVICES=${cards[i % ${#cards[@]}]} FUZZ=$each FUZZ_SECONDS=$(seconds_or_inf $(($1 / tests))) \
      OMP_NUM_THREADS=1 pytest_into "fuzz_$i" "$(($1 + $1 / 3))" \
      --hypothesis-seed="$((SEED + i))" tests/test_fuzz.py -k "test_fuzz_ or found" > "$work/fuzz_$i.log" 2>&1 &
    pids+=($!)
  done
  for i in "${pids[@]}"; do wait "$i" || failed=1; done
  grep -hE "^E +AssertionError" "$work"/fuzz_*.log | sort | uniq -c | sort -rn | head -n 20 || true
  (cd "$work" && tar -czf "$out/fuzz_logs.tar.gz" fuzz_*.log)
  python3 benchmarks/record_tests.py "$work"/fuzz_*.xml "$out"
  return $failed
}

part_sanitizer() {
  local cards
  cards=$(chosen_cards)
  unset CUDA_VISIBLE_DEVICES
  # A process of each tool for each card: the tools' memory grows
  python3 benchmarks/sanitize.py "$out" --cards "$cards" --processes "$(tr ',' '\n' <<< "$cards" | wc -l)" --restarts 8 \
    --seconds "$(seconds_or_inf "$1")"
}

part_racecheck() {
  while [[ ! -f $work/race.status ]]; do sleep 1; done
  if [[ $(cat "$work/race.status") != 0 ]]; then tail -n 30 "$out/racecheck_build.log"; return 1; fi
  local cards
  cards=$(chosen_cards)
  unset CUDA_VISIBLE_DEVICES
  cd "$work/race"
  PYTHONPATH="$work/race:$PYTHONPATH" python3 benchmarks/sanitize.py "$out" --tools racecheck --cards "$cards" \
    --processes "$(nproc)" --seconds "$(seconds_or_inf "$1")"
}

part_training() {
  # shellcheck disable=SC2086
  python3 examples/train_long.py --dtype bf16,fp16 --processes 12 --steps "$STEPS" --seconds "$1" --out "$out" \
    ${TRAINING:-}
}

part_promises() {
  local failed=0
  pytest_into promises "$1" -k "not cpu" tests/test_reliability.py || failed=1
  python3 benchmarks/record_tests.py "$work/promises.xml" "$out"
  return $failed
}

part_warm() { # a run itself says who fails
  local pids=()
  # shellcheck disable=SC2086
  within "$1" python3 test_benchmark.py $SWEEP --warm "$(nproc)" & pids+=($!)
  # shellcheck disable=SC2086
  within "$1" python3 test_benchmark.py $RESIDUAL --warm $((($(nproc) + 1) / 2)) & pids+=($!)
  wait "${pids[@]}" || true
}

part_warm_peers() {
  # shellcheck disable=SC2086
  within "$1" python3 test_benchmark.py $PEERS --dtype "${OF:-bf16,fp16,fp32}" --warm "$(nproc)"
}

part_peers() {
  local record
  record=$out/peers_${OF:+${OF//,/_}_}$(date +%Y%m%d_%H%M%S).json
  # shellcheck disable=SC2086
  within "$1" python3 test_benchmark.py $PEERS --dtype "${OF:-bf16,fp16,fp32}" --json "$record" || return 1
  python3 test_benchmark.py --plot "$record" || true # without matplotlib: elsewhere, later
}

part_benchmark() {
  # shellcheck disable=SC2086
  within "$1" python3 test_benchmark.py $SWEEP --record "$out" || return 1
  local record
  record=$(find "$out" -maxdepth 1 -name 'benchmark_*.json' | sort | tail -n 1)
  python3 test_benchmark.py --plot "$record" || true # without matplotlib: elsewhere, later
  python3 benchmarks/check_targets.py "$record" > "$out/targets_$(basename "$record" .json | cut -d_ -f2-).txt" || true
}

part_residual() {
  # shellcheck disable=SC2086
  within "$1" python3 test_benchmark.py $RESIDUAL --json "$out/add_norms_$(date +%Y%m%d_%H%M%S).json"
}

part_fusions() {
  # shellcheck disable=SC2086
  within "$1" python3 benchmarks/fusions.py "$out" $FUSIONS
}

part_gated() {
  # shellcheck disable=SC2086
  within "$1" python3 benchmarks/fusions.py "$out" $GATED --warm "$(nproc)"
}

part_quant() {
  # shellcheck disable=SC2086
  within "$1" python3 benchmarks/quant.py "$out" --warm "$(nproc)" $QUANT
}

part_models() {
  # shellcheck disable=SC2086
  within "$1" python3 benchmarks/models.py "$out" --seconds "$(seconds_or_inf $(($1 * 4 / 5)))" ${MODELS:-} \
    ${OF:+--models ${OF//,/ } --record "models_${OF//,/_}"}
}

build_for_racecheck() {
  cd "$work/race"
  NVCC_APPEND_FLAGS=-DFLN_FOR_RACECHECK $BUILD > "$out/racecheck_build.log" 2>&1
}

row() { # its number, the card, its cores, parts
  local number=$1 item name limit OF started status
  export CUDA_VISIBLE_DEVICES=$2
  if ((rows > 1)); then taskset -cp "$3" $BASHPID > /dev/null; fi
  shift 3
  for item; do
    name=${item%%[:=]*} limit=0 started=$SECONDS OF=
    if [[ $item == *:* ]]; then limit=${item#*:}; fi
    if [[ $item == *=* ]]; then OF=${item#*=} OF=${OF%%:*}; fi
    set +e # and not as a condition, in which bash goes on behind what fails
    (set -e; "part_$name" "$limit") > "$out/${item%%:*}.log" 2>&1
    status=$?
    set -e
    if ((status)); then echo "$name" >> "$work/failed"; fi
    echo "row $number, $name: $((SECONDS - started)) s"
  done
}

SEED=$(($(date +%s) % 1000000 * 100))
if [[ " $PARTS " =~ " racecheck"[:\ ] ]]; then
  mkdir "$work/race" # a copy, before anything is built
  tar --exclude=./build --exclude=./benchmarks/output --exclude=./.git --exclude='./.venv*' --exclude='*.so' -c . |
    tar -x -C "$work/race"
  (set +e; (set -e; build_for_racecheck); echo $? > "$work/status" && mv "$work/status" "$work/race.status") &
fi
if [[ $BUILD != true ]]; then BUILD="python3 benchmarks/build_record.py $out $BUILD"; fi
$BUILD > "$out/build.log" 2>&1 || { tail -n 30 "$out/build.log"; exit 1; }

mapfile -t parts < <(tr '/' '\n' <<< "$PARTS")
rows=${#parts[@]} cores=$(nproc)
IFS=, read -ra cards <<< "${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((rows - 1)))}"
pids=()
for ((i = 0; i < rows; i++)); do
  read -ra items <<< "${parts[i]}"
  row $((i + 1)) "${cards[i % ${#cards[@]}]}" "$((cores * i / rows))-$((cores * (i + 1) / rows - 1))" "${items[@]}" &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || echo "a row" >> "$work/failed"; done
for part in ${PARTS//\//}; do printf '\n==== %s\n' "$part"; tail -n 12 "$out/${part%%:*}.log"; done
printf '\n'
python3 benchmarks/figures.py "$out"
if [[ -f $work/failed ]]; then echo "FAILED, or cut off: $(tr '\n' ' ' < "$work/failed")"; exit 1; fi
