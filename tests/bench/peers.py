# SPDX-License-Identifier: Apache-2.0
"""PyTorch, ONNX Runtime and OpenVINO on the layers of attend-bench, and each as a service, beside ours.

    python3 tests/bench/peers.py --make_environment           once: build/peers, 2.9 GB to fetch
    python3 tests/bench/peers.py                              every layer in fp32 and bf16
    python3 tests/bench/peers.py --quick                      five layers, below 5 minutes
    python3 tests/bench/peers.py --cases=decode --peers=openvino --json=FILE
    python3 tests/bench/peers.py --service --attend_server=build/bin/attend-server

Every library runs in a process of its own on the same cores with the same threads; ours and theirs take turns, so
that what else the machine does meets all. Each is given every sensible way to compute a case and judged by its
fastest. Outputs are compared with float64: what computes in less precision than asked for is named.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
REQUIREMENTS = HERE / "peers-requirements.txt"
PEERS = ("torch", "onnxruntime", "openvino")
DECODE_WANTED = 1.8  # times faster than any peer
MOST_OTHER_LOAD = 0.10  # of the machine's time in a turn; more is named beside the verdict

# glibc keeps what was freed, and asks for huge pages: without it each call of PyTorch maps its outputs anew.
WORKER_ENVIRONMENT = {
    "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 34), "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "OMP_DYNAMIC": "FALSE", "OPENVINO_TELEMETRY_OPT_OUT": "1", "PYTHONDONTWRITEBYTECODE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


class Failure(Exception):
    """What ends the program with one line and exit code 2."""


# ---- The environment ----


def requirements_hash():
    return hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()


def make_environment(folder):
    """A virtual environment with the pinned packages; nothing is done when it is there already."""
    if (folder / "made-from").is_file() and (folder / "made-from").read_text() == requirements_hash():
        print(f"{folder} is up to date")
        return
    print(f"making {folder}: some minutes", flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    steps = ([sys.executable, "-m", "venv", "--clear", folder],
             [folder / "bin/pip", "--disable-pip-version-check", "--no-input", "install", "--no-deps", "--only-binary",
              ":all:", "--no-cache-dir", "--quiet", "-r", REQUIREMENTS])
    for step in steps:
        done = subprocess.run([str(word) for word in step], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            lines = "\n".join((done.stdout + done.stderr).splitlines()[-5:])
            raise Failure(f"can't make {folder}: {step[0]} ended with {done.returncode}\n{lines}")
    (folder / "made-from").write_text(requirements_hash())


def python_of(folder):
    """The environment's Python; Failure that says how to make it."""
    python = folder / "bin/python"
    if not python.exists():
        raise Failure(f"no {python}: make it with python3 tests/bench/peers.py --make_environment --environment={folder}")
    if not (folder / "made-from").is_file() or (folder / "made-from").read_text() != requirements_hash():
        raise Failure(f"{folder} is not what {REQUIREMENTS.name} asks for: make it anew with "
                      f"python3 tests/bench/peers.py --make_environment --environment={folder}")
    return python


# ---- Who takes turns ----


def busy_seconds():
    """CPU seconds that the machine has spent on anything."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, pathlib.Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def process_seconds(pid):
    """CPU seconds of a process."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ended_children_seconds():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


class Watch:
    """Which part of the cores' time went to processes other than the one whose CPU seconds own() returns."""

    def __init__(self, own):
        self._own = own
        self._begin = self._now()

    def _now(self):
        return time.monotonic(), busy_seconds(), self._own()

    def others(self):
        elapsed, busy, own = (end - begin for begin, end in zip(self._begin, self._now()))
        return max(0.0, (busy - own) / (elapsed * (os.cpu_count() or 1)))


class Peer:
    """A library in its process (peer_worker.py)."""

    def __init__(self, python, library, threads):
        self.child = subprocess.Popen(
            [str(python), str(HERE / "peer_worker.py"), library, str(threads)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True,
            env={**os.environ, **WORKER_ENVIRONMENT, "OMP_NUM_THREADS": str(threads),
                 "MKL_NUM_THREADS": str(threads)})
        self.name = library
        hello = self._read()
        self.name, self.version = hello["name"], hello["version"]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.child.kill()
        self.child.wait()

    def _read(self):
        line = self.child.stdout.readline()
        if not line:
            raise Failure(f"{self.name} ended with {self.child.wait()}: its messages are above")
        return json.loads(line)

    def ask(self, **command):
        print(json.dumps(command), file=self.child.stdin, flush=True)
        return self._read()


class Ours:
    """attend-bench, started anew for each turn."""
    name = "attend"

    def __init__(self, program, threads):
        self.program, self.threads = program, threads
        listed = subprocess.run([program, "--list"], capture_output=True, text=True, check=False)
        if listed.returncode != 0:
            raise Failure(f"{program} --list ended with {listed.returncode}: {listed.stderr.strip()}")
        self.cases = listed.stdout.split()

    def run(self, case):
        """attend-bench's entry of the case."""
        with tempfile.TemporaryDirectory() as folder:
            report = pathlib.Path(folder) / "report.json"
            done = subprocess.run([self.program, "--quick", f"--cases=^{case}$", f"--threads={self.threads}",
                                   f"--json={report}"], capture_output=True, text=True, check=False)
            if not report.exists():
                raise Failure(f"{self.program} ended with {done.returncode}: {(done.stderr or done.stdout).strip()}")
            return json.loads(report.read_text())["cases"][0]


def spread(values):
    """How far the turns lie apart, of their median."""
    return (max(values) - min(values)) / statistics.median(values)


def compare(case, ours, peers, turns, seconds):
    """One case: a dict per peer, with ours in it."""
    if case not in ours.cases:
        return [{"case": case, "peer": peer.name, "note": "attend-bench has no such case"} for peer in peers]
    rows, our_ms, ready = [], [], []
    for peer in peers:
        row = {"case": case, "peer": peer.name, "peer_version": peer.version, **peer.ask(prepare=case)}
        rows.append(row)
        if "unsupported" not in row:
            ready.append((peer, row))
            row["turns_ms"] = []
    for _ in range(turns if ready else 1):
        watch = Watch(ended_children_seconds)
        entry = ours.run(case)
        load = [watch.others()]
        if "failure" in entry:
            return [{**row, "note": f"attend: {entry['failure']}"} for row in rows]
        our_ms.append(entry["median_ms"])
        for peer, row in ready:
            watch = Watch(lambda pid=peer.child.pid: process_seconds(pid))
            row["turns_ms"].append(statistics.median(peer.ask(run=seconds)["times_ms"]))
            row["other_load"] = max(row.get("other_load", 0.0), watch.others(), *load)
    for row in rows:
        row["attend_ms"], row["attend_turns_ms"] = statistics.median(our_ms), our_ms
    for _, row in ready:
        row["peer_ms"] = statistics.median(row["turns_ms"])
        row["ratio"] = row["peer_ms"] / row["attend_ms"]
    return rows


# ---- What is shown ----


def verdict(row, tolerance):
    """In words, from the side of ours."""
    if "ratio" not in row:
        return row.get("note") or row["unsupported"]
    words = "faster" if row["ratio"] > 1 else "SLOWER"
    if row["error"] > tolerance:
        words += ", peer in LOWER PRECISION"
    if row["other_load"] > MOST_OTHER_LOAD:
        words += f", other programs had {100 * row['other_load']:.0f} % of the machine"
    return words


TABLE_HEAD = (f"{'case':33} {'attend ms':>10} {'peer':12} {'peer ms':>10} {'ratio':>6} {'turns':>6}  {'error':>7}  "
              "verdict")


def table_row(row, tolerance):
    attend = f"{row['attend_ms']:10.3f}" if "attend_ms" in row else f"{'-':>10}"
    start = f"{row['case']:33} {attend} {row['peer']:12} "
    if "ratio" not in row:
        return start + f"{'-':>10} {'-':>6} {'-':>6}  {'-':>7}  {verdict(row, tolerance)}"
    how = f" ({row['variant']})" if row["variant"] else ""
    apart = max(spread(row["turns_ms"]), spread(row["attend_turns_ms"]))
    return start + (f"{row['peer_ms']:10.3f} {row['ratio']:6.2f} {100 * apart:5.0f}%  {row['error']:7.0e}  "
                    f"{verdict(row, tolerance)}{how}")


def summary(rows, tolerances):
    """The closing lines: what is slower, what is not enough, who is not as precise as asked."""
    compared = [row for row in rows if "ratio" in row]
    slower = [row for row in compared if row["ratio"] <= 1]
    short = [row for row in compared if row["case"].startswith("decode/") and 1 < row["ratio"] < DECODE_WANTED]
    imprecise = [row for row in compared if row["error"] > tolerances[row["case"].rpartition("/")[2]]]
    missing = [row for row in rows if "ratio" not in row and "unsupported" not in row]

    def named(these):
        return ", ".join(f"{row['case']} ({row['peer']} {row['ratio']:.2f})" for row in these) or "none"
    lines = [f"{len(compared)} comparisons; ratio = peer's time over attend's.",
             f"A peer is faster: {named(slower)}",
             f"Decode below {DECODE_WANTED} x: {named(short)}"]
    if imprecise:
        lines.append("Lower precision than asked for: " + ", ".join(
            f"{row['peer']} in {row['case']} ({row['error']:.0e})" for row in imprecise))
    if missing:
        lines.append("Not compared: " + ", ".join(sorted({f"{row['case']} ({row['note']})" for row in missing})))
    return "\n".join(lines)


# ---- The command line ----


def positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, wanted 1 or more")
    return value


def parse(words):
    parser = argparse.ArgumentParser(prog="peers.py", description=__doc__.split("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--cases", default="", help="comma separated: names, or parts of them between slashes; default: all in fp32 "
                                    "and bf16")
    add("--list", action="store_true", help="print the names of the cases")
    add("--peers", default=",".join(PEERS), help="comma separated; default: %(default)s")
    add("--threads", type=positive, default=0, help="default: the cores allowed")
    add("--turns", type=positive, default=0, help="default: 5, with --quick 3")
    add("--quick", action="store_true", help="five layers and short turns, below 5 minutes")
    add("--json", default="", metavar="FILE", help="what was measured, turn by turn")
    add("--attend_bench", default=str(ROOT / "build/bin/attend-bench"), metavar="PATH")
    add("--service", action="store_true", help="compare services instead: BERT-base, one request a sequence")
    add("--attend_server", default=str(ROOT / "build/bin/attend-server"), metavar="PATH",
        help="for --service; `attend` is taken from its folder")
    add("--environment", type=pathlib.Path, default=ROOT / "build/peers", metavar="FOLDER")
    add("--make_environment", action="store_true", help="make it, with the packages of peers-requirements.txt")
    arguments = parser.parse_args(words)
    arguments.peers = [peer for peer in arguments.peers.split(",") if peer]
    unknown = [peer for peer in arguments.peers if peer not in PEERS]
    if unknown or not arguments.peers:
        parser.error(f"--peers: got {', '.join(unknown) or 'none'}, wanted some of {', '.join(PEERS)}")
    allowed = len(os.sched_getaffinity(0))
    arguments.threads = arguments.threads or allowed
    if arguments.threads > allowed:
        parser.error(f"--threads: got {arguments.threads}, wanted at most the {allowed} cores allowed")
    return arguments


def run_layers(arguments, python):
    import peer_cases  # needs numpy: with the environment's Python only
    try:
        names = peer_cases.select([one for one in arguments.cases.split(",") if one], arguments.quick)
    except peer_cases.UnknownCase as error:
        raise Failure(f"--cases: {error}") from None
    if arguments.list:
        print("\n".join(names))
        return
    if not os.access(arguments.attend_bench, os.X_OK):
        raise Failure(f"--attend_bench: no program {arguments.attend_bench}")
    turns, seconds = arguments.turns or (3 if arguments.quick else 5), 0.3 if arguments.quick else 0.5
    ours, peers = Ours(arguments.attend_bench, arguments.threads), []
    rows = []
    try:
        for library in arguments.peers:
            peers.append(Peer(python, library, arguments.threads))
        print(", ".join(f"{peer.name} {peer.version}" for peer in peers) + f"; {arguments.threads} threads, {turns} "
              f"turns\n{TABLE_HEAD}", flush=True)
        for case in names:
            for row in compare(case, ours, peers, turns, seconds):
                rows.append(row)
                print(table_row(row, peer_cases.TOLERANCE[case.rpartition("/")[2]]), flush=True)
    finally:
        for peer in peers:
            peer.__exit__()
        if arguments.json:
            pathlib.Path(arguments.json).write_text(json.dumps(
                {"threads": arguments.threads, "turns": turns, "rows": rows}, indent=1) + "\n")
    print("\n" + summary(rows, peer_cases.TOLERANCE))


def main(words):
    arguments = parse(words)
    try:
        if arguments.make_environment:
            make_environment(arguments.environment)
            return 0
        python = python_of(arguments.environment)
        if pathlib.Path(sys.prefix).resolve() != arguments.environment.resolve():
            os.execv(python, [str(python), str(HERE / "peers.py"), *words])
        # Children inherit it.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:arguments.threads])
        if arguments.service:
            import peer_service
            peer_service.run(arguments, python, WORKER_ENVIRONMENT)
        else:
            run_layers(arguments, python)
    except Failure as failure:
        print(f"peers.py: {failure}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
