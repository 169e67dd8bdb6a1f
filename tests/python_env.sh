#!/usr/bin/env bash
# Makes build/venv, the Python of the tests (tests/requirements.txt). Idempotent: done again only when the
# list has changed.
set -euo pipefail
cd "$(dirname "$0")/.."

wanted=$(sha256sum tests/requirements.txt | cut -d' ' -f1)
if [ "$(cat build/venv/made-from 2>/dev/null)" = "$wanted" ]; then
  echo "python_env: build/venv is up to date"
  exit 0
fi
fail() { printf 'python_env.sh: %s\n' "$*" >&2; exit 1; }

echo "python_env: making build/venv"
mkdir -p build
rm -rf build/venv
log=build/venv.log
/usr/bin/python3 -m venv build/venv >"$log" 2>&1 || { tail -n 5 "$log" >&2; fail "no Python environment"; }
build/venv/bin/pip --disable-pip-version-check --no-input install --no-deps --only-binary :all: --quiet \
  -r tests/requirements.txt >"$log" 2>&1 || { tail -n 5 "$log" >&2; fail "pip can't install tests/requirements.txt"; }
echo "$wanted" >build/venv/made-from
echo "python_env: done"
