#!/usr/bin/env bash
# Installs what a fresh Debian 12 needs to build, test and run attend. Idempotent, asks nothing.
#
#   deploy/install-dependencies.sh            everything to build and test
#   deploy/install-dependencies.sh --runtime  only the shared libraries the binaries need
set -euo pipefail

build_packages=(
  g++ cmake ninja-build ccache pkg-config ca-certificates
  libgrpc++-dev libprotobuf-dev protobuf-compiler protobuf-compiler-grpc grpc-proto libabsl-dev
  prometheus-cpp-dev
  libdnnl-dev libhwy-dev nlohmann-json3-dev libcli11-dev libxxhash-dev
  libgtest-dev libgmock-dev
  python3 python3-venv curl clang-format
)
# What `ldd build/bin/attend-server build/bin/attend` names first-hand; the rest comes with these.
runtime_packages=(
  libgrpc++1.51 libprotobuf32 libabsl20220623 libprometheus-cpp-core1.0
  libdnnl2 libgomp1 libhwy1 libxxhash0
)

packages=("${build_packages[@]}")
case "${1:-}" in
  "") ;;
  --runtime) packages=("${runtime_packages[@]}") ;;
  *) echo "install-dependencies.sh: unknown argument '$1' (allowed: --runtime)" >&2; exit 2 ;;
esac

missing=()
for package in "${packages[@]}"; do
  state=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
  [ "$state" = installed ] || missing+=("$package")
done
if [ ${#missing[@]} -eq 0 ]; then
  echo "install-dependencies: all ${#packages[@]} packages are installed"
  exit 0
fi
if [ "$(id -u)" -ne 0 ]; then
  echo "install-dependencies: needs root to install: ${missing[*]}" >&2
  exit 1
fi
echo "install-dependencies: installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
{
  apt-get update -qq &&
    apt-get install -y -qq --no-install-recommends -o Dpkg::Use-Pty=0 "${missing[@]}"
} >"$log" 2>&1 || {
  tail -n 20 "$log" >&2
  echo "install-dependencies: apt-get failed" >&2
  exit 1
}
echo "install-dependencies: done"
