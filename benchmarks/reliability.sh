#!/usr/bin/env bash
# The records behind docs/reliability.md, in one call on a machine with a GPU, torch, pytest, hypothesis and
# compute-sanitizer. Builds for its card; then the parts:
#   fuzz       FUZZ random cases in all (default 20000), in PROCESSES processes (default 15)
#   sanitizer  benchmarks/sanitize.py, with racecheck in a build of its own, four processes on each of RACECHECK_CARDS
#              (such as 0,1,2,3; default: the one of this part)
#   training   STEPS steps (default 10000) of three seeds in bf16 and fp16, each run a process (TRAINING=--quick: tiny)
#   promises   tests/test_reliability.py, which wants the card for itself
# With as many cards as parts, all run at the same time, a card each; else one after the other. PARTS="fuzz training"
# chooses; LIMIT=150 gives each part about so many seconds, and it records what it reached until then. Leaves
# fuzz_*.json, sanitizer_*.json, racecheck_*.json, long_training_*.json and promises_*.json in the folder given
# (default: benchmarks/output), and prints what they say.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-benchmarks/output}
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" FUZZ_DEVICE=${FUZZ_DEVICE:-cuda}
: "${FUZZ:=20000}" "${PROCESSES:=15}" "${STEPS:=10000}" "${LIMIT:=0}"
python3 -c "import hypothesis, pytest, torch"

limit_or_inf() { if (($1)); then echo "$1"; else echo inf; fi; }

part_fuzz() {
  local tests each i pids=() failed=0 logs
  logs=$(mktemp -d)
  tests=$(python3 -m pytest -q -p no:cacheprovider --collect-only -k test_fuzz_ tests/test_fuzz.py | grep -c ::)
  each=$(((FUZZ - 1) / (PROCESSES * tests) + 1))
  for ((i = 1; i <= PROCESSES; i++)); do
    FUZZ=$each FUZZ_SECONDS=$(limit_or_inf $((LIMIT / tests))) OMP_NUM_THREADS=1 python3 -m pytest -q \
      -p no:cacheprovider --hypothesis-seed="$i" --junitxml="$logs/fuzz_$i.xml" tests/test_fuzz.py \
      -k "test_fuzz_ or found" > "$logs/fuzz_$i.log" 2>&1 &
    pids+=($!)
  done
  for i in "${pids[@]}"; do wait "$i" || failed=1; done
  grep -hE "^E +AssertionError" "$logs"/*.log | sort | uniq -c | sort -rn | head -n 20 || true
  python3 benchmarks/record_tests.py "$logs"/fuzz_*.xml "$out"
  tar -czf "$out/fuzz_logs.tar.gz" -C "$logs" .
  return $failed
}

part_sanitizer() {
  local failed=0 tree cards=${RACECHECK_CARDS:-${CUDA_VISIBLE_DEVICES:-0}}
  tree=$(mktemp -d) # a copy, for racecheck's build
  python3 benchmarks/sanitize.py "$out" --seconds "$(limit_or_inf "$LIMIT")" || failed=1
  tar --exclude=./build --exclude=./benchmarks/output --exclude=./.git --exclude='*.so' -c . | tar -x -C "$tree"
  if (cd "$tree" && NVCC_APPEND_FLAGS=-DFLN_FOR_RACECHECK FORCE_CUDA=1 python3 setup.py build_ext --inplace) \
    > "$out/racecheck_build.log" 2>&1; then
    (cd "$tree" && PYTHONPATH="$tree:$PYTHONPATH" python3 benchmarks/sanitize.py "$tree/found" --tools racecheck \
      --cards "$cards" --processes $((4 * $(tr ',' '\n' <<< "$cards" | wc -l))) \
      --seconds "$(limit_or_inf "$LIMIT")") || failed=1
    mv "$tree"/found/* "$out"
  else
    tail -n 30 "$out/racecheck_build.log"
    failed=1
  fi
  rm -rf "$tree"
  (cd "$out" && tar --remove-files -czf sanitizer_logs.tar.gz sanitizer_*.log racecheck_build.log)
  return $failed
}

part_training() {
  # shellcheck disable=SC2086
  python3 examples/train_long.py --dtype bf16,fp16 --processes 12 --steps "$STEPS" --seconds "$LIMIT" --out "$out" \
    ${TRAINING:-}
}

part_promises() {
  local failed=0
  # SIGINT: pytest still writes its report
  timeout --signal INT --kill-after 30 "$LIMIT" python3 -m pytest -q -p no:cacheprovider -k "not cpu" \
    --junitxml="$out/promises.xml" tests/test_reliability.py || failed=1
  python3 benchmarks/record_tests.py "$out/promises.xml" "$out"
  return $failed
}

${BUILD:-env FORCE_CUDA=1 python3 setup.py build_ext --inplace} > "$out/build.log" 2>&1 ||
  { tail -n 30 "$out/build.log"; exit 1; }
rm -f "$out/promises.xml"
read -ra parts <<< "${PARTS:-fuzz sanitizer training promises}"
cards=$( (nvidia-smi -L 2> /dev/null || true) | wc -l)
pids=() failed=() given=${CUDA_VISIBLE_DEVICES:-}
for i in "${!parts[@]}"; do
  if ((cards >= ${#parts[@]})) && [[ -z $given ]]; then export CUDA_VISIBLE_DEVICES=$i; fi
  started=$SECONDS
  (set -e; "part_${parts[i]}" > "$out/${parts[i]}.log" 2>&1) &
  pids+=($!)
  if ((cards < ${#parts[@]})) || [[ -n $given ]]; then
    wait $! || true # its status is asked for again below
    echo "${parts[i]}: $((SECONDS - started)) s"
  fi
done
for i in "${!parts[@]}"; do wait "${pids[i]}" || failed+=("${parts[i]}"); done
if [[ -z $given ]]; then unset CUDA_VISIBLE_DEVICES; fi
for part in "${parts[@]}"; do printf '\n==== %s\n' "$part"; tail -n 8 "$out/$part.log"; done
printf '\n'
python3 benchmarks/figures.py "$out"
if ((${#failed[@]})); then echo "FAILED: ${failed[*]}"; exit 1; fi
