#!/usr/bin/env bash
# Tries the CUDA engine on a machine with a GPU and measures it, in under six minutes. That machine needs a driver,
# cuBLASLt and nothing else of CUDA or of this project: what runs is built elsewhere and carried there.
#
#   tests/gpu/run.sh --pack BUILD PACK   on the machine that has the build: writes PACK (.tar.gz, below 64 MiB)
#   tests/gpu/run.sh PACK [OUT]          on the machine with the GPU; OUT (default: gpu-results) gets logs and
#                                        bench.json, service_prefill.json, service_decode.json
#
# Steps, each with a time limit: every wrapper of engine/cuda/device.h compared with the emulation of the tests;
# the engine's contract, golden outputs and bit identity; compute-sanitizer, where there is one that works; the
# benchmark with the machine's ceilings; the service from end to end.
#
# Exit code 0: every step passed. 1: one failed. 2: there is no GPU or no cuBLASLt, or PACK can't be used.
set -uo pipefail

die() { printf 'tests/gpu/run.sh: %s\n' "$*" >&2; exit 2; }
usage() { die "usage: run.sh --pack BUILD PACK | run.sh PACK [OUT]"; }

# ---- Packing ----

programs=(attend attend-server attend-gpu-wrappers attend-gpu-bench engine_contract_test golden_test bit_identity_test)
plugin=attend-engine-cuda.so
pack_limit_bytes=$((64 * 1024 * 1024))

# The shared libraries that the files given need: the C library and the driver are every machine's own, cuBLASLt
# is too large to carry.
libraries_of() {
  ldd "$@" | awk '$2 == "=>" && $3 ~ /^\// { print $3 }' | sort -u |
    grep -Ev '/(libc|libm|libdl|librt|libpthread|libresolv|libcuda|libcublasLt)\.so'
}

pack() { # pack BUILD PACK
  local build=$1 to=$2 source work emulated
  source=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
  emulated=$build/simt/bin/attend-gpu-wrappers
  for file in "${programs[@]/#/$build/bin/}" "$build/bin/$plugin" "$emulated"; do
    [ -f "$file" ] || die "no $file: configure with -DATTEND_CUDA=ON and build everything first"
  done
  work=$(mktemp -d)
  # shellcheck disable=SC2064
  trap "rm -rf '$work'" EXIT
  mkdir -p "$work"/attend-gpu/{bin,lib,lib/fallback,tests}
  local root=$work/attend-gpu
  cp "${BASH_SOURCE[0]}" "$root/run.sh"
  cp "${programs[@]/#/$build/bin/}" "$build/bin/$plugin" "$root/bin/"
  strip "$root"/bin/*
  libraries_of "$root"/bin/* | while read -r library; do cp -L "$library" "$root/lib/"; done
  # Newer ones than the machine's, if it has any, would be wrong for the driver's libraries.
  mv "$root"/lib/lib{stdc++,gcc_s}.so* "$root/lib/fallback/"
  cp -r "$source/tests/golden" "$root/tests/"
  "$emulated" write "$root/wrappers.expected" || die "the emulated attend-gpu-wrappers failed"
  mkdir -p "$(dirname "$to")"
  tar -C "$work" -czf "$to" attend-gpu || die "can't write $to"
  local bytes
  bytes=$(stat -c %s "$to")
  [ "$bytes" -lt "$pack_limit_bytes" ] || die "$to has $bytes bytes, more than $pack_limit_bytes"
  printf '%s: %d bytes, %d files\n' "$to" "$bytes" "$(tar -tzf "$to" | grep -vc '/$')"
}

# ---- Finding what the machine has ----

# Prints the first folder with libcublasLt.so.N for the N that the plugin asks for.
find_cublas() {
  local wanted folder
  wanted=$(grep -aoE 'libcublasLt\.so\.[0-9]+' "$root/bin/$plugin" | head -n 1)
  {
    tr ':' '\n' <<<"${LD_LIBRARY_PATH:-}"
    ldconfig -p 2>/dev/null | awk -v name="$wanted" '$1 == name { sub("/[^/]*$", "", $NF); print $NF }'
    printf '%s\n' /usr/local/cuda/lib64 /usr/local/cuda/lib /usr/local/cuda-*/lib64
    # Frameworks bring it as a Python package.
    for python in python3 /usr/bin/python3; do
      "$python" -c 'import site, sys; print("\n".join([*sys.path, *site.getsitepackages()]))' 2>/dev/null |
        sed -n 's|$|/nvidia|p' | while read -r folder; do
        printf '%s\n' "$folder"/cu*/lib "$folder"/cublas/lib
      done
    done
  } | while read -r folder; do
    if [ -n "$folder" ] && [ -e "$folder/$wanted" ]; then
      printf '%s\n' "$folder"
      break
    fi
  done
}

find_sanitizer() {
  local place
  for place in "$(command -v compute-sanitizer)" /usr/local/cuda/bin/compute-sanitizer \
    /opt/nvidia/nsight-compute/*/compute-sanitizer /usr/local/cuda*/compute-sanitizer/compute-sanitizer; do
    [ -x "$place" ] && printf '%s\n' "$place" && return
  done
}

# ---- Steps ----

failed=0
results=()
record() { # record passed|FAILED|"not run" SECONDS NAME [reason]
  local line
  line=$(printf '%-8s %4d s  %s%s' "$1" "$2" "$3" "${4:+: $4}")
  results+=("$line")
  printf '== %s\n' "$line"
  if [ "$1" = FAILED ]; then failed=1; fi
}

# step LIMIT NAME COMMAND...: runs it, output to OUT/NAME.log; a limit that ran out is a failure.
step() {
  local limit=$1 name=$2 begin=$SECONDS code
  shift 2
  printf '== %s (at most %d s)\n' "$name" "$limit"
  timeout --kill-after=5 "$limit" "$@" >"$out/$name.log" 2>&1
  code=$?
  if [ $code -eq 0 ]; then
    record passed $((SECONDS - begin)) "$name"
    return 0
  fi
  tail -n 25 "$out/$name.log"
  local reason="exit code $code"
  [ $code -eq 124 ] && reason="took longer than $limit s"
  record FAILED $((SECONDS - begin)) "$name" "$reason"
  return 1
}

# The CUDA cases of a suite. One that was skipped because no device was found, or no case at all, is a failure.
suite() {
  local log
  log=$("$root/bin/$1" "--gtest_filter=*/Cuda*" 2>&1)
  local code=$?
  printf '%s\n' "$log"
  [ $code -eq 0 ] || return "$code"
  ! grep -q 'wanted auto or cpu' <<<"$log" && grep -qE 'PASSED  \] [1-9]' <<<"$log"
}

# A service with one model, and load on it.
service() {
  local checkpoint=$out/checkpoint address=unix:$root/attend.sock server code=0
  "$root/bin/attend" make-checkpoint --preset=llama2-gqa --layers=1 --dtype=bf16 --out="$checkpoint" || return
  "$root/bin/attend-server" --device=cuda --listen="$address" --metrics_listen=127.0.0.1:0 \
    --model="gqa=$checkpoint" &
  server=$!
  for _ in $(seq 100); do
    "$root/bin/attend" --server="$address" models >/dev/null 2>&1 && break
    kill -0 "$server" 2>/dev/null || break
    sleep 0.2
  done
  "$root/bin/attend" --server="$address" info &&
    "$root/bin/attend" --server="$address" bench --tokens=512 --clients=4 --seconds=4 --dtype=bf16 --json \
      >"$out/service_prefill.json" &&
    "$root/bin/attend" --server="$address" bench --sessions=64 --clients=16 --tokens=128 --seconds=4 \
      --dtype=bf16 --json >"$out/service_decode.json" || code=1
  kill -TERM "$server" 2>/dev/null
  wait "$server" || code=1
  for kind in prefill decode; do
    printf 'service, %s, llama2-gqa layer: %s\n' "$kind" \
      "$(grep -E '"(per_second|tokens_per_second|p50|p99)"' "$out/service_$kind.json" | tr -d ' \n')"
  done
  rm -rf "$checkpoint"
  return $code
}

sanitize() { # sanitize TOOL SANITIZER
  local log=$out/sanitizer-$1.log begin=$SECONDS code
  printf '== sanitizer-%s (at most 30 s)\n' "$1"
  timeout --kill-after=5 30 "$2" --tool "$1" --error-exitcode 9 "$root/bin/attend-gpu-bench" --small >"$log" 2>&1
  code=$?
  case $code in
    0) record passed $((SECONDS - begin)) "sanitizer-$1" ;;
    9) tail -n 25 "$log"; record FAILED $((SECONDS - begin)) "sanitizer-$1" "see its log" ;;
    # It refuses some virtual machines' devices, and may be too slow on others.
    *) record "not run" $((SECONDS - begin)) "sanitizer-$1" "exit code $code, $(tail -n 1 "$log")" ;;
  esac
}

run() { # run PACK OUT
  local pack=$1 cublas sanitizer code begin=$SECONDS
  out=$2
  mkdir -p "$out" || die "can't make $out"
  out=$(cd "$out" && pwd)
  [ -r "$pack" ] || die "no $pack: make it with --pack"
  root=$(mktemp -d)
  # shellcheck disable=SC2064
  trap "rm -rf '$root'" EXIT
  tar -C "$root" -xzf "$pack" || die "can't unpack $pack"
  root=$root/attend-gpu
  [ -x "$root/bin/attend-gpu-wrappers" ] || die "$pack is not a pack of this script"

  export LD_LIBRARY_PATH=$root/lib:${LD_LIBRARY_PATH:-}
  if ! ldconfig -p | grep -q 'libstdc++\.so\.6'; then LD_LIBRARY_PATH=$LD_LIBRARY_PATH:$root/lib/fallback; fi
  export ATTEND_SOURCE_DIR=$root

  # First of all: is there a device? The check is also the first step.
  "$root/bin/attend-gpu-wrappers" check "$root/wrappers.expected" >"$out/wrappers.log" 2>&1
  code=$?
  if [ $code -ge 2 ]; then die "$(tail -n 1 "$out/wrappers.log")"; fi
  cublas=$(find_cublas)
  [ -n "$cublas" ] || die "no cuBLASLt: neither in the system's folders nor as a package of python3"
  printf 'cuBLASLt: %s\n' "$cublas"
  LD_LIBRARY_PATH=$LD_LIBRARY_PATH:$cublas
  cat "$out/wrappers.log"
  if [ $code -eq 0 ]; then
    record passed $((SECONDS - begin)) wrappers
  else
    record FAILED $((SECONDS - begin)) wrappers "the device differs from the emulation"
  fi

  export -f suite service
  export root out
  step 80 contract bash -c 'suite engine_contract_test'
  step 20 golden bash -c 'suite golden_test'
  step 30 bit-identity bash -c 'suite bit_identity_test'
  sanitizer=$(find_sanitizer)
  for tool in memcheck racecheck synccheck; do
    if [ -n "$sanitizer" ]; then
      sanitize "$tool" "$sanitizer"
    else
      record "not run" 0 "sanitizer-$tool" "no compute-sanitizer on this machine"
    fi
  done
  step 80 bench "$root/bin/attend-gpu-bench" "--json=$out/bench.json"
  step 40 service bash -c service

  printf '\n'
  cat "$out/bench.log"
  grep '^service, ' "$out/service.log"
  printf '\n'
  printf '%s\n' "${results[@]}" | tee "$out/summary.txt"
  printf '%s in %d s\n' "$([ $failed -eq 0 ] && echo "all passed" || echo "NOT all passed")" $((SECONDS - begin))
  exit $failed
}

case "${1:-}" in
  --pack) [ $# -eq 3 ] || usage; pack "$2" "$3" ;;
  "" | -*) usage ;;
  *) [ $# -le 2 ] || usage; run "$1" "${2:-gpu-results}" ;;
esac
