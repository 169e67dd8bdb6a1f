# SPDX-License-Identifier: Apache-2.0
"""A library as a service: a plain Python gRPC server around one layer, beside attend-server, both called by the same
Python client on the same cores. Used by peers.py --service; run by itself it is that server or that client.

Both servers take float32 rows and return float32 rows. The plain server does the least that a service can do: bytes
in, the layer, bytes out; no batching, no names, no checks. Ours is called with messages made beforehand."""
from __future__ import annotations

import concurrent.futures
import contextlib
import importlib
import json
import os
import pathlib
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import grpc
import numpy as np

import peer_cases

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
METHOD = "/attend.v1.Attention/Attend"
WIDTH = 768
OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1),
           ("grpc.use_local_subchannel_pool", 1)]
LOADS = ("1 client", "16 clients", "16 clients, 16..512 rows")
PATIENCE = 60.0  # seconds until a server listens


# ---- The plain server ----


def serve(library, types, threads, how):
    """Prints its port and serves until it is killed."""
    module = importlib.import_module(f"peer_{library}")
    module.setup(threads)
    case = peer_cases.find_case(f"layer/bert-base/128/{types}")
    compute = module.service(case, peer_cases.Data(case), how == "parallel")
    turn = contextlib.nullcontext() if how == "parallel" else threading.Lock()

    def attend(request, _context):
        rows = np.frombuffer(request, np.float32).reshape(-1, WIDTH)
        with turn:
            return compute(rows).tobytes()
    handlers = grpc.method_handlers_generic_handler(
        "attend.v1.Attention", {"Attend": grpc.unary_unary_rpc_method_handler(attend)})
    workers = threads if how == "parallel" else 16
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(workers), handlers=[handlers], options=OPTIONS)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(f"listening 127.0.0.1:{port}", flush=True)
    server.wait_for_termination()


# ---- The client ----


def request_of(rows, ours):
    """What is sent for so many rows."""
    values = np.random.default_rng(rows).standard_normal((rows, WIDTH), dtype=np.float32)
    if not ours:
        return values.tobytes()
    sys.path.insert(0, str(ROOT / "client/python"))
    import attend_client as wire
    tensor = wire.Tensor(wire.DType.F32, [rows, WIDTH], values.tobytes())
    return bytes(wire._encode(wire.AttendRequest(layer="0", hidden_states=tensor)))  # pylint: disable=protected-access


def load(address, ours, clients, mixed, seconds):
    """Calls from `clients` threads; prints what came of it as JSON."""
    draw = random.Random(6)
    lengths = [draw.randint(16, 512) for _ in range(64)] if mixed else [128]
    requests = {rows: request_of(rows, ours) for rows in set(lengths)}
    times, tokens, failures = [], [0] * clients, []
    begin = threading.Barrier(clients + 1)
    end = [0.0]

    def call_all(number):
        with grpc.insecure_channel(address, options=OPTIONS) as channel:
            call = channel.unary_unary(METHOD)
            mine, which = [], number
            try:
                for _ in range(3):
                    call(requests[lengths[which % len(lengths)]], wait_for_ready=True, timeout=PATIENCE)
                begin.wait()
                while (begun := time.perf_counter()) < end[0]:
                    rows = lengths[which % len(lengths)]
                    answer = call(requests[rows], timeout=PATIENCE)
                    mine.append(time.perf_counter() - begun)
                    if len(answer) < rows * WIDTH * 4:
                        raise ValueError(f"{len(answer)} bytes for {rows} rows")
                    tokens[number] += rows
                    which += clients
            except (grpc.RpcError, ValueError) as error:
                failures.append(str(error)[:300])
                begin.abort()
            times.extend(mine)
    threads = [threading.Thread(target=call_all, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    end[0] = time.perf_counter() + PATIENCE
    with contextlib.suppress(threading.BrokenBarrierError):
        begin.wait()
    begun = time.perf_counter()
    end[0] = begun + seconds
    for thread in threads:
        thread.join()
    took = time.perf_counter() - begun
    print(json.dumps({"failures": failures} if failures else {
        "p50_ms": 1e3 * statistics.median(times), "requests_per_second": len(times) / took,
        "tokens_per_second": sum(tokens) / took}))


# ---- Both in turns ----


class Server:
    """A server in its process, and its address."""

    def __init__(self, command, pattern, environment, log):
        self.log = pathlib.Path(log)
        with open(self.log, "wb") as file:
            self.child = subprocess.Popen([str(word) for word in command], stdin=subprocess.DEVNULL, stdout=file,
                                          stderr=file, env={**os.environ, **environment})
        end = time.monotonic() + PATIENCE
        while not (found := re.search(pattern, self.log.read_text(errors="replace"), re.MULTILINE)):
            if self.child.poll() is not None or time.monotonic() > end:
                self.__exit__()
                from peers import Failure
                raise Failure(f"{command[0]} does not listen:\n{self.log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.05)
        self.address = found[1]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.child.kill()
        self.child.wait()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_ours(program, types, threads, folder):
    from peers import Failure
    attend = pathlib.Path(program).parent / "attend"
    for one in (program, attend):
        if not os.access(one, os.X_OK):
            raise Failure(f"--attend_server: no program {one}")
    checkpoint = pathlib.Path(folder) / f"bert-{types}"
    made = subprocess.run([attend, "make-checkpoint", "--preset", "bert-base", "--layers", "1", "--dtype", types,
                           "--out", checkpoint], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        raise Failure(f"{attend} make-checkpoint ended with {made.returncode}: {made.stderr.strip()}")
    address = f"127.0.0.1:{free_port()}"
    return Server([program, f"--listen={address}", "--metrics_listen=127.0.0.1:0", f"--threads={threads}",
                   f"--model=bert={checkpoint}", "--kv_bytes=64MiB"], " listening grpc=([^ ,]+)", {},
                  pathlib.Path(folder) / f"attend-{types}.log")


def call(address, ours, which, seconds):
    """One turn of a client in a process of its own."""
    from peers import Failure
    clients, mixed = (1 if which == LOADS[0] else 16), which == LOADS[2]
    done = subprocess.run([sys.executable, str(HERE / "peer_service.py"), "load", address, str(int(ours)),
                           str(clients), str(int(mixed)), str(seconds)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Failure(f"the client ended with {done.returncode}: {done.stderr[-2000:]}")
    answer = json.loads(done.stdout)
    if answer.get("failures"):
        raise Failure(f"{which}: calls failed: {answer['failures'][0]}")
    return answer


def median_of(turns):
    return {key: statistics.median(turn[key] for turn in turns) for key in turns[0]}


TABLE_HEAD = (f"{'types':7} {'load':26} {'server':32} {'p50 ms':>8} {'requests/s':>11} {'tokens/s':>9} "
              f"{'p50':>6} {'rate':>6}  verdict")


def table_row(row):
    start = (f"{row['types']:7} {row['load']:26} {row['server']:32} {row['p50_ms']:8.2f} "
             f"{row['requests_per_second']:11.0f} {row['tokens_per_second']:9.0f}")
    if "p50_ratio" not in row:
        return start
    better = row["p50_ratio"] if row["load"] == LOADS[0] else row["rate_ratio"]
    return f"{start} {row['p50_ratio']:6.2f} {row['rate_ratio']:6.2f}  {'faster' if better > 1 else 'SLOWER'}"


def compare(types, which, servers, turns, seconds):
    """Rows of a load: ours first, the peers' with ratios above 1 where ours is better."""
    seen = {name: [] for name in servers}
    for turn in range(turns + 1):
        for name, server in servers.items():
            answer = call(server.address, name == "attend", which, seconds)
            if turn > 0:  # in the first, libraries prepare for lengths that are new to them
                seen[name].append(answer)
    rows = [{"types": types, "load": which, "server": name, **median_of(of)} for name, of in seen.items()]
    ours = rows[0]
    for row in rows[1:]:
        row["p50_ratio"] = row["p50_ms"] / ours["p50_ms"]
        row["rate_ratio"] = ours["tokens_per_second"] / row["tokens_per_second"]
    return rows


def run(arguments, python, environment):
    """The whole comparison, by the arguments of peers.py."""
    turns, seconds = arguments.turns or (2 if arguments.quick else 3), 1.0 if arguments.quick else 2.0
    rows = []
    print(TABLE_HEAD, flush=True)
    for types in ("f32", "bf16"):
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            servers = {"attend": stack.enter_context(
                start_ours(arguments.attend_server, types, arguments.threads, folder))}
            for library in arguments.peers:
                module = importlib.import_module(f"peer_{library}")
                if module.unsupported(peer_cases.find_case(f"layer/bert-base/128/{types}")):
                    continue
                for how in ("in turn", "parallel") if arguments.threads > 1 else ("in turn",):
                    command = [python, HERE / "peer_service.py", "serve", library, types, arguments.threads, how]
                    log = pathlib.Path(folder) / f"{library}-{how}.log"
                    servers[f"{module.NAME}, calls {how}"] = stack.enter_context(Server(
                        command, "^listening (.*)$", {**environment, "OMP_NUM_THREADS": str(
                            1 if how == "parallel" else arguments.threads)}, log))
            for which in LOADS:
                for row in compare(types, which, servers, turns, seconds):
                    rows.append(row)
                    print(table_row(row), flush=True)
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps({"threads": arguments.threads, "rows": rows}, indent=1)
                                                + "\n")
    print("\n" + summary(rows))


def summary(rows):
    """Ours against the best peer of each load."""
    lines = ["Against the best peer of each load:"]
    for types, which in dict.fromkeys((row["types"], row["load"]) for row in rows):
        peers = [row for row in rows if (row["types"], row["load"]) == (types, which) and "rate_ratio" in row]
        if not peers:
            continue
        key = "p50_ratio" if which == LOADS[0] else "rate_ratio"
        best = min(peers, key=lambda row: row[key])
        lines.append(f"  {types}, {which}: {best[key]:.2f} x {'p50' if key == 'p50_ratio' else 'rate'} of "
                     f"{best['server']}")
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
    else:
        load(sys.argv[2], sys.argv[3] == "1", int(sys.argv[4]), sys.argv[5] == "1", float(sys.argv[6]))
