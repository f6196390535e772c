#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Everything that needs a GPU, in one go, on a bare machine without network:
#
#     bash tests/gpu/run.sh            # all but the benchmark
#     bash tests/gpu/run.sh benchmark  # any steps by name; repage is built in any case
#
# Expects Python (PYTHON, default python3) with torch for the machine's CUDA, pytest, hypothesis
# and, to build repage there, nvcc, cmake, ninja, pybind11, scikit-build-core and apache-tvm-ffi (of
# the bundle, too). FlashInfer, its kernels and the code of vLLM that the benchmark compares with come from the bundle that tests/gpu/prepare.py leaves in BUNDLE (.cache/gpu-suite);
# without it an installed flashinfer is used, and without either those checks are not available.
#
# Results go to $OUT (./gpu-results): summary.json (steps, exit codes, seconds), versions.json,
# selftest.json with the timings, core.xml, sweeps.xml, sanitizer.log, benchmark.json, .png and
# -trace.json, and run.log. Each step has a time limit, a failing one does not stop the others, and
# the script fails if any did. The limits of the default steps add up to nine minutes, the
# benchmark's is five; REPAGE_GPU_TIME, a whole number, multiplies them.
set -uo pipefail
cd "$(dirname "$0")/../.."

PYTHON=${PYTHON:-python3}
OUT=${OUT:-$PWD/gpu-results}
BUNDLE=${BUNDLE:-$PWD/.cache/gpu-suite}
SCALE=${REPAGE_GPU_TIME:-1}
mkdir -p "$OUT"
LOG=$OUT/run.log
: > "$LOG"
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
STEPS=$WORK/steps
failed=0

# step NAME SECONDS COMMAND...: run with a limit, log, and note the outcome.
step() {
  local name=$1 limit=$(($2 * SCALE)) start=$SECONDS code
  shift 2
  echo "== $name (at most $limit s)" | tee -a "$LOG"
  timeout --kill-after=10 "$limit" "$@" >> "$LOG" 2>&1
  code=$?
  echo "$name $code $((SECONDS - start))" >> "$STEPS"
  echo "   exit code $code after $((SECONDS - start)) s" | tee -a "$LOG"
  if [ "$code" -ne 0 ]; then
    failed=1
    tail -n 15 "$LOG" | sed 's/^/   | /'
  fi
  return "$code"
}

version=$("$PYTHON" -c 'import sys; print(f"{sys.version_info[0]}{sys.version_info[1]}")')
export PYTHONPATH="$WORK/site:$BUNDLE/site:$BUNDLE/site-cp$version${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export FLASHINFER_WORKSPACE_BASE="$WORK" FLASHINFER_DISABLE_VERSION_CHECK=1
if [ -d "$BUNDLE/site" ]; then
  export FLASHINFER_DISABLE_JIT=1 # no headers in the bundle to build from
fi

install_repage() {
  local wheel arch pip=("$PYTHON" -m pip install --quiet --no-deps --no-index --target "$WORK/site")
  arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2> /dev/null | head -n 1 | tr -d .)
  if command -v nvcc > /dev/null; then
    REPAGE_CUDA=ON REPAGE_CUDA_ARCHITECTURES="${arch:-90}-real" CMAKE_BUILD_PARALLEL_LEVEL=8 \
      "${pip[@]}" --no-build-isolation -C "build-dir=$WORK/build" . && return
  fi
  for wheel in "$BUNDLE"/wheels/repage-*-"cp$version"-*.whl; do
    "${pip[@]}" "$wheel" && return
  done
  echo "repage was neither built (no nvcc?) nor bundled for Python $version"
  return 1
}
export -f install_repage
export PYTHON WORK BUNDLE version

sanitize() {
  local tool result=0
  PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin
  command -v compute-sanitizer > /dev/null || {
    echo "compute-sanitizer is not installed" | tee "$OUT/sanitizer.log"
    return 0
  }
  : > "$OUT/sanitizer.log"
  for tool in memcheck racecheck; do
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout 52 compute-sanitizer --tool "$tool" --error-exitcode 9 \
      "$PYTHON" tests/gpu/small_program.py >> "$OUT/sanitizer.log" 2>&1 || result=$?
  done
  tail -n 5 "$OUT/sanitizer.log"
  return "$result"
}
export -f sanitize
export OUT

benchmark() {
  local pieces=$BUNDLE/vllm_pieces.py
  if [ -f "$pieces" ]; then
    export REPAGE_BENCH_VLLM=$pieces
  fi
  "$PYTHON" benchmarks/page_tables.py --device cuda --budget 0.05 --strict \
    --out "$OUT/benchmark.json" --plot "$OUT/benchmark.png" --trace "$OUT/benchmark-trace.json"
}
export -f benchmark

step install 120 bash -c install_repage
# Its own processes, so that a kernel that breaks the context only takes its group along.
[ $# -gt 0 ] || set -- versions selftest core sweeps sanitizer
for name in "$@"; do
  case $name in
    versions) step versions 30 "$PYTHON" tests/gpu/versions.py "$OUT/versions.json" ;;
    selftest)
      step selftest 120 "$PYTHON" tests/gpu/selftest_groups.py "$OUT/selftest.json" \
        --limit $((90 * SCALE))
      ;;
    core)
      step core 60 "$PYTHON" -m pytest -q -p no:cacheprovider -W default -m gpu tests/core \
        --junitxml "$OUT/core.xml"
      ;;
    sweeps)
      step sweeps 100 "$PYTHON" -m pytest -q -p no:cacheprovider -W default -m gpu tests/gpu \
        tests/benchmarks/test_in_kernel.py --junitxml "$OUT/sweeps.xml"
      ;;
    sanitizer) step sanitizer 110 bash -c sanitize ;;
    benchmark) step benchmark 300 bash -c benchmark ;;
    *) step "$name" 5 bash -c 'echo "no such step" >&2; exit 2' ;;
  esac
done

"$PYTHON" - "$STEPS" "$OUT/summary.json" << 'END'
import json, sys
steps = [line.split() for line in open(sys.argv[1])]
summary = [{"step": n, "exit_code": int(c), "seconds": int(s)} for n, c, s in steps]
json.dump(summary, open(sys.argv[2], "w"), indent=2)
END
echo "results in $OUT"
exit "$failed"
