#!/usr/bin/env bash
# Installs what a fresh Debian 12 needs to build, test or run attend. Idempotent, asks nothing, starts no service.
#
#   deploy/install-dependencies.sh            to build
#   deploy/install-dependencies.sh --tests    to build and to run every test
#   deploy/install-dependencies.sh --runtime  only the shared libraries the binaries need
set -euo pipefail

build_packages=(
  g++ cmake ninja-build ccache pkg-config ca-certificates
  libgrpc++-dev libprotobuf-dev protobuf-compiler protobuf-compiler-grpc grpc-proto libabsl-dev
  prometheus-cpp-dev
  libdnnl-dev libhwy-dev nlohmann-json3-dev libcli11-dev libxxhash-dev libpng-dev
  libgtest-dev libgmock-dev
  python3 python3-venv curl
)
# The formatter, and what the deploy files are tried with: a container builder, a balancer, a time series database.
test_packages=(
  clang-format shellcheck git
  buildah debootstrap nginx prometheus
)
# What `ldd build/bin/attend-server build/bin/attend` names first-hand; the rest comes with these.
runtime_packages=(
  libgrpc++1.51 libprotobuf32 libabsl20220623 libprometheus-cpp-core1.0
  libdnnl2 libgomp1 libhwy1 libxxhash0 libpng16-16
)

packages=("${build_packages[@]}")
case "${1:-}" in
  "") ;;
  --tests) packages=("${build_packages[@]}" "${test_packages[@]}") ;;
  --runtime) packages=("${runtime_packages[@]}") ;;
  *) echo "install-dependencies.sh: unknown argument '$1' (allowed: --tests, --runtime)" >&2; exit 2 ;;
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
# Debian starts the services of new packages; the tests run their own, on ports of their own.
policy=/usr/sbin/policy-rc.d own_policy=
if [ ! -e "$policy" ]; then
  own_policy=$policy
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod +x "$policy"
fi
trap 'rm -f "$log" $own_policy' EXIT
{
  apt-get update -qq &&
    apt-get install -y -qq --no-install-recommends -o Dpkg::Use-Pty=0 "${missing[@]}"
} >"$log" 2>&1 || {
  tail -n 20 "$log" >&2
  echo "install-dependencies: apt-get failed" >&2
  exit 1
}
echo "install-dependencies: done"
