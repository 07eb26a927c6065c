#!/usr/bin/env bash
# Builds the extension on a machine with a card from CUDA objects that were compiled elsewhere, so that only C++ is
# compiled there. The objects include no torch, so they serve every torch of their CUDA version.
#   benchmarks/objects.sh compile FOLDER   with the nvcc of PATH, JOBS at once (default: a process a core)
#   benchmarks/objects.sh link FOLDER      python3 setup.py build_ext --inplace, with the objects in FOLDER
# ARCH: the card (default sm_90). NVCC_APPEND_FLAGS=-DFLN_FOR_RACECHECK: for racecheck (benchmarks/sanitize.py). A file
# without an object in FOLDER is compiled.
set -euo pipefail
cd "$(dirname "$0")/.."
task=${1:-} folder=$(mkdir -p "${2:?a folder}" && realpath "$2")
home=${CUDA_HOME:-$(dirname "$(dirname "$(realpath "$(command -v nvcc)")")")}
[[ -f $home/include/cuda_runtime.h ]] || home=/usr/local/cuda

case $task in
  compile)
    # The build's flags, and -fPIC: without it the link fails, or the library needs static TLS and does not load
    flags=$(python3 -c "import pathlib, runpy, sys
print(*runpy.run_path('fused_layernorm/_build/toolchain.py')['compiler_flags'](pathlib.Path(sys.argv[1]))['nvcc'])" "$home")
    printf '%s\0' csrc/cuda/*.cu | xargs -0 -P "${JOBS:-$(nproc)}" -I{} bash -c '"$3/bin/nvcc" $4 -std=c++17 \
      -gencode "arch=compute_${1#sm_},code=$1" --expt-relaxed-constexpr -Xcompiler -fPIC -Icsrc \
      -c "$0" -o "$2/$(basename "$0").o"' {} "${ARCH:-sm_90}" "$folder" "$home" "$flags"
    ;;
  link)
    fake=$(mktemp -d) # a toolkit like this one, whose nvcc copies objects
    trap 'rm -rf "$fake"' EXIT
    mkdir "$fake/bin"
    for path in "$home"/*; do [[ $(basename "$path") == bin ]] || ln -s "$path" "$fake/"; done
    for path in "$home"/bin/*; do [[ $(basename "$path") == nvcc ]] || ln -s "$path" "$fake/bin/"; done
    cat > "$fake/bin/nvcc" << END
#!/usr/bin/env bash
before= source= target= depends=
for argument in "\$@"; do
  case \$argument in *.cu) source=\$argument ;; esac
  case \$before in -o | --output-file) target=\$argument ;; -MF | --dependency-output) depends=\$argument ;; esac
  before=\$argument
done
object=$folder/\$(basename "\$source").o
[[ -n \$source && -f \$object ]] || exec "$home/bin/nvcc" "\$@"
cp "\$object" "\$target"
[[ -z \$depends ]] || echo "\$target: \$source" > "\$depends"
END
    chmod +x "$fake/bin/nvcc"
    PATH=$fake/bin:$PATH CUDA_HOME=$fake FORCE_CUDA=1 TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-9.0} \
      python3 setup.py build_ext --inplace
    ;;
  *) sed -n '2,/^set/{/^set/!p}' "$0" | sed 's/^# \{0,1\}//' && exit 2 ;;
esac
