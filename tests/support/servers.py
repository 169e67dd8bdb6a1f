# SPDX-License-Identifier: Apache-2.0
"""Programs the Python tests start: attend-server and, through Process, proxies and others.

Every process logs into a file, is waited for with a bound, and is killed when its `with` block ends. Ports are
free ones of loopback. ATTEND_BIN names the folder of the binaries (default: build/bin).
"""
import contextlib
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(os.environ.get("ATTEND_BIN", ROOT / "build" / "bin"))
GOLDEN = ROOT / "tests" / "golden"
PATIENCE = 60.0  # seconds; never reached by what works


def eventually(condition, patience=PATIENCE, what=None):
    """The first true value of condition(); AssertionError after `patience` seconds."""
    end = time.monotonic() + patience
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, f"not within {patience:g} s: {what or condition}"
        time.sleep(0.02)


def free_ports(count):
    """`count` TCP ports of 127.0.0.1 that nobody listens on now, below those that outgoing connections take: a
    server can come back to its port."""
    ports = []
    for port in random.sample(range(10000, 30000), 200):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise AssertionError(f"no {count} free ports from 10000 to 29999")


def cmake_version():
    """The version that CMakeLists.txt gives the project."""
    return re.search(r"project\(\s*attend\b.*?VERSION (\S+?)[\s)]", (ROOT / "CMakeLists.txt").read_text(),
                     re.DOTALL)[1]


def get(url, timeout=10):
    """Body of an HTTP GET; raises urllib.error.HTTPError for other answers than 200."""
    with urllib.request.urlopen(url, timeout=timeout) as answer:
        return answer.read().decode()


class Process:
    """A program with its output in a file; killed at the end of the `with` block."""

    def __init__(self, command, log_path, env=None, cwd=None):
        self.log_path = pathlib.Path(log_path)
        with open(self.log_path, "wb") as log:
            self.child = subprocess.Popen([str(word) for word in command], stdin=subprocess.DEVNULL, stdout=log,
                                          stderr=log, cwd=cwd, env={**os.environ, **(env or {})})

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait()

    def log(self):
        return self.log_path.read_text(errors="replace")

    def wait_for_log(self, pattern, patience=PATIENCE):
        """The match of a regular expression in the log; fails at once when the program has ended."""
        def look():
            ended = self.child.poll() is not None
            found = re.search(pattern, self.log(), re.MULTILINE)
            assert found or not ended, f"ended with {self.child.returncode} before '{pattern}':\n{self.log()[-3000:]}"
            return found
        return eventually(look, patience, f"'{pattern}' in {self.log_path}")

    def signal(self, number=signal.SIGTERM):
        self.child.send_signal(number)

    def wait(self, patience=PATIENCE):
        """The exit code."""
        return self.child.wait(patience)


class Server(Process):
    """attend-server on loopback; ready to answer when constructed unless wait=False.

    `flags` win over small defaults: free ports, 64 MiB of cache, two threads. `ports` (gRPC, HTTP) are for one
    that comes back at its address, `folder` for another build's, `env` for what is no flag.
    """

    def __init__(self, directory, *flags, replica="replica-0", ports=(0, 0), wait=True, folder=BIN, env=None):
        self.replica = replica
        log = pathlib.Path(directory) / f"server-{replica}-{time.monotonic_ns()}.log"
        super().__init__([folder / "attend-server", f"--listen=127.0.0.1:{ports[0]}",
                          f"--metrics_listen=127.0.0.1:{ports[1]}",
                          f"--replica_id={replica}", *flags], log,
                         env={"ATTEND_KV_BYTES": "64MiB", "ATTEND_THREADS": "2", **(env or {})})
        try:
            opened = self.wait_for_log(r" listening grpc=(\S+) .*http=(\S+)")
            self.address, self.http = opened[1].split(",")[0], opened[2]
            if wait:
                self.wait_for_log(r" serving ")
        except BaseException:
            self.__exit__()
            raise

    def page(self):
        """The text of /metrics."""
        return get(f"http://{self.http}/metrics")

    def metrics(self):
        """Values by the text before them, e.g. 'attend_sessions{state="idle"}'."""
        return {name: float(value) for name, _, value in
                (line.rpartition(" ") for line in self.page().splitlines() if not line.startswith("#"))}

    def total(self, name, **labels):
        """Sum of a series over all labels but those given."""
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(value for key, value in self.metrics().items()
                   if key.partition("{")[0] == name and all(label in key for label in wanted))


def golden_model(variant, name=None):
    """The flag that loads a checkpoint of tests/golden; its name is the folder's unless given."""
    return f"--model={name or variant}={GOLDEN / variant}"
