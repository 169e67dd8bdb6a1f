#!/usr/bin/env bash
# Builds attend and runs every test: Release, then with address and undefined behaviour sanitizers, then the
# server and integration tests with the thread sanitizer.
#
#   tests/run.sh                      everything
#   tests/run.sh release|asan|tsan    one part
#
# Builds lie in build/, build/asan and build/tsan and are used again. ATTEND_TEST_SEED repeats a random test.
set -euo pipefail
cd "$(dirname "$0")/.."

parts=("$@")
[ $# -gt 0 ] || parts=(release asan tsan)
for part in "${parts[@]}"; do
  case "$part" in
    release | asan | tsan) ;;
    *) printf "tests/run.sh: unknown part '%s' (allowed: release, asan, tsan)\n" "$part" >&2; exit 2 ;;
  esac
done

# The container test compiles the server once more, in another folder: what ccache has serves there, too.
export CCACHE_BASEDIR=$PWD CCACHE_SLOPPINESS=locale

started=$SECONDS
say() { printf '\n== %s (%d s)\n' "$*" $((SECONDS - started)); }
fail() { printf 'tests/run.sh: %s\n' "$*" >&2; exit 1; }

build() { # build DIRECTORY [cmake arguments]
  local directory=$1 log=build/cmake.log
  shift
  cmake -S . -B "$directory" -G Ninja -DCMAKE_BUILD_TYPE=Release "$@" >"$log" 2>&1 ||
    { tail -n 30 "$log" >&2; fail "cmake failed in $directory"; }
}

run_part() {
  case "$1" in
    release)
      say "Release: build"
      build build
      ninja -C build
      say "Release: test"
      ctest --test-dir build --output-on-failure
      ;;
    asan)
      say "address and undefined behaviour sanitizers: build"
      build build/asan -DATTEND_SANITIZE=address,undefined
      ninja -C build/asan
      say "address and undefined behaviour sanitizers: test"
      ASAN_OPTIONS=detect_stack_use_after_return=1 UBSAN_OPTIONS=print_stacktrace=1 \
        ctest --test-dir build/asan --output-on-failure -LE 'install|deploy'
      ;;
    tsan)
      say "thread sanitizer: build"
      build build/tsan -DATTEND_SANITIZE=thread
      ninja -C build/tsan attend_thread_tests
      say "thread sanitizer: test"
      TSAN_OPTIONS="ignore_noninstrumented_modules=1 suppressions=$PWD/tests/tsan.supp" \
        ctest --test-dir build/tsan --output-on-failure -L 'server|integration|threads'
      ;;
  esac
}

deploy/install-dependencies.sh --tests
tests/python_env.sh
mkdir -p build
for part in "${parts[@]}"; do run_part "$part"; done
say "all tests passed: ${parts[*]}"
