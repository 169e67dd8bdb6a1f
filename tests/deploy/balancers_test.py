# SPDX-License-Identifier: Apache-2.0
"""deploy/nginx and deploy/envoy as they are, with other ports, in front of three real replicas.

The clients are plain: no retries, not even gRPC's own. Wanted: sessions land where they live, other calls are
spread and never fail, also while every replica is drained and restarted, one after the other.
"""
import getpass
import pathlib
import signal
import subprocess
import sys
import threading
import time

import grpc
import pytest

from attend_client import Client, SessionLost
from support.contract import generated_modules
from support.plain_load import Load, OPTIONS
from support.servers import PATIENCE, Process, ROOT, Server, eventually, free_ports, get, golden_model

NAMES = ("replica-0", "replica-1", "replica-2")
# Seconds; the delay is what the README advises.
DRAIN_DELAY = 5
DRAIN_LIMIT = 7
# The addresses in the files: replicas' gRPC and HTTP, nginx's gates, clients, Envoy's admin page.
PORTS = [50051, 50052, 50053, 9464, 9465, 9466, 9564, 9565, 9566, 50050, 9901]
VENV = pathlib.Path(sys.executable).parent


class Balanced:
    """Three replicas and a balancer in front of them."""

    def __init__(self, kind, directory):
        self.kind, self.directory = kind, directory
        self.ports = dict(zip(PORTS, free_ports(len(PORTS))))
        self.address = f"127.0.0.1:{self.ports[50050]}"
        self.replicas = {}
        self.balancer = None

    def __enter__(self):
        try:
            for name in NAMES:
                self.start(name)
            self.start_balancer()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        if self.kind == "nginx" and self.balancer:  # a killed master would leave its workers
            self.balancer.signal(signal.SIGTERM)
            self.balancer.wait()
        for process in (self.balancer, *self.replicas.values()):
            if process:
                process.__exit__()

    def start(self, name):
        """Starts a replica at its fixed address."""
        number = NAMES.index(name)
        ports = (self.ports[50051 + number], self.ports[9464 + number])
        self.replicas[name] = Server(self.directory, golden_model("llama_gqa4"), f"--drain_delay={DRAIN_DELAY}",
                                     f"--drain_limit={DRAIN_LIMIT}", replica=name, ports=ports)
        return self.replicas[name]

    def config(self, path):
        """A file of deploy/ with other ports, clients on loopback, and nginx's cache in the test's folder."""
        text = (ROOT / path).read_text()
        for port, free in self.ports.items():
            text = text.replace(f":{port}", f":{free}").replace(f"port_value: {port}", f"port_value: {free}")
            text = text.replace(f"listen {port} ", f"listen 127.0.0.1:{free} ")
        text = text.replace("/run/attend-ready", str(self.directory / "ready"))
        written = self.directory / pathlib.Path(path).name
        written.write_text(text)
        return written

    def start_balancer(self):
        log = self.directory / f"{self.kind}.log"
        if self.kind == "nginx":
            command = ["nginx", "-c", self.config("deploy/nginx/nginx.conf"),
                       "-g", f"user {getpass.getuser()}; daemon off; pid {self.directory}/nginx.pid;"]
        else:
            command = [VENV / "envoy", "-c", self.config("deploy/envoy/envoy.yaml"), "--concurrency", "2",
                       "--disable-hot-restart", "-l", "warning"]
        self.balancer = Process(command, log)
        with grpc.insecure_channel(self.address, options=OPTIONS) as channel:
            grpc.channel_ready_future(channel).result(PATIENCE)
        if self.kind == "envoy":  # the first health checks
            page = f"http://127.0.0.1:{self.ports[9901]}/clusters"
            eventually(lambda: get(page).count("health_flags::healthy") == 2 * len(NAMES), what="healthy replicas")


@pytest.fixture(scope="module", name="contract")
def modules(tmp_path_factory):
    """The generated modules (messages, stubs)."""
    return generated_modules(tmp_path_factory.mktemp("stubs"))


@pytest.fixture(scope="module", params=["nginx", "envoy"], name="balanced")
def three_replicas(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    with Balanced(request.param, directory) as balanced:
        yield balanced


@pytest.fixture(name="stub")
def plain_stub(balanced, contract):
    with grpc.insecure_channel(balanced.address, options=OPTIONS) as channel:
        yield contract[1].AttentionStub(channel)


def wait_for_all(balanced, contract):
    """Until the balancer sends work to every replica."""
    with Load(balanced.address, *contract) as load:
        load.add(stateless=1)
        eventually(lambda: len(load.snapshot()) == len(NAMES), what="work on all replicas")


def ratio(counts):
    """Largest over smallest; infinite when a replica had nothing."""
    values = [counts.get(name, 0) for name in NAMES]
    return max(values) / min(values) if min(values) else float("inf")


def test_shipped_files_are_valid_as_they_are(tmp_path):
    subprocess.run(["nginx", "-t", "-q", "-c", ROOT / "deploy/nginx/nginx.conf", "-g", f"pid {tmp_path}/pid;"],
                   check=True)
    subprocess.run([VENV / "envoy", "--mode", "validate", "-l", "error", "-c", ROOT / "deploy/envoy/envoy.yaml"],
                   check=True)


def attend_calls(balanced):
    """Answered Attend calls by replica, as the replicas count them."""
    return {name: server.total("attend_requests_total", method="Attend")
            for name, server in balanced.replicas.items()}


def test_stateless_calls_are_spread_evenly(balanced, contract):
    wait_for_all(balanced, contract)
    before = attend_calls(balanced)
    with Load(balanced.address, *contract) as load:
        load.add(stateless=6)
        eventually(lambda: load.snapshot().total() >= 600)
    assert not load.failures, load.failures[:5]
    assert ratio(load.stateless) <= 1.3, load.stateless
    counted = {name: count - before[name] for name, count in attend_calls(balanced).items()}
    assert ratio(counted) <= 1.3, counted
    assert sum(counted.values()) == load.stateless.total()


def test_sessions_land_on_their_replica_and_an_unknown_name_gets_a_clear_answer(balanced, contract, stub):
    pb = contract[0]
    load = Load(balanced.address, *contract)
    layout = pb.RawLayout(layers=1, q_heads=2, kv_heads=2, head_dim=16)
    sessions = [stub.OpenSession(pb.OpenSessionRequest(raw=layout), timeout=10) for _ in range(9)]
    assert {session.replica for session in sessions} == set(NAMES)
    for session in sessions:
        owner = [("attend-replica", session.replica)]
        for _ in range(4):
            assert stub.GetSession(pb.GetSessionRequest(session_id=session.id), timeout=10,
                                   metadata=owner).id == session.id
    stray = sessions[0]
    for name in ("replica-9", ""):
        answers = set()
        for _ in range(9):
            try:
                stub.GetSession(pb.GetSessionRequest(session_id=stray.id), timeout=10,
                                metadata=[("attend-replica", name)])
                answers.add("found")
            except grpc.RpcError as error:
                answers.add(load.reason(error))
        assert "SESSION_MOVED" in answers and answers <= {"SESSION_MOVED", "found"}, (name, answers)
    for session in sessions:
        stub.CloseSession(pb.CloseSessionRequest(session_id=session.id), timeout=10,
                          metadata=[("attend-replica", session.replica)])


@pytest.mark.parametrize("megabytes", [5, 75])
def test_large_tensors_pass(balanced, contract, stub, megabytes):
    pb = contract[0]
    rows, width = 64, 256  # few rows and many heads: all bytes count and little is computed
    heads = megabytes * 1_000_000 // (3 * 4 * width * rows)
    tensor = pb.Tensor(dtype=pb.DTYPE_F32, shape=[rows, heads, width], data=bytes(4 * rows * heads * width))
    request = pb.AttendRequest(raw=pb.RawInput(q=tensor, k=tensor, v=tensor))
    assert request.ByteSize() > (megabytes - 1) * 1_000_000
    for _ in range(2):
        assert len(stub.Attend(request, timeout=50).output.data) == len(tensor.data)


def test_a_stream_stays_open_while_nothing_is_said(balanced, contract, stub):
    """Longer than any time-out of a second or two that would be wrong here; the files' own are minutes."""
    more = threading.Semaphore(1)
    item = Load(balanced.address, *contract).raw(8)

    def items():
        for _ in range(3):
            more.acquire()
            yield item
    replicas = set()
    for number, answer in enumerate(stub.AttendStream(items())):
        assert not answer.error.code
        replicas.add(answer.timing.replica)
        if number == 0:
            time.sleep(4)
        more.release()
    assert number == 2 and len(replicas) == 1  # three answers


def open_session(stub, pb, name):
    """A session of the replica `name`."""
    layout = pb.RawLayout(layers=1, q_heads=1, kv_heads=1, head_dim=8)

    def attempt():
        session = stub.OpenSession(pb.OpenSessionRequest(raw=layout, ttl_seconds=60), timeout=10)
        return session if session.replica == name else None
    return eventually(attempt, what=f"a session of {name}")


def ask_until_the_end(stub, pb, server, session, asked):
    """Calls a session of a replica that drains until its process ends; no call fails before the drain limit."""
    served = 0
    while server.child.poll() is None:
        try:
            stub.GetSession(pb.GetSessionRequest(session_id=session.id), timeout=10,
                            metadata=[("attend-replica", session.replica)])
            served += time.monotonic() > asked + DRAIN_DELAY
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.UNAVAILABLE and time.monotonic() >= asked + DRAIN_LIMIT, error
    assert served > 0
    assert server.wait() == 0, server.log()[-2000:]


def restart(balanced, contract, load, name):
    """Drains and restarts one replica under load; checks what its sessions and the others' callers see."""
    pb = contract[0]
    old = balanced.replicas[name]
    load.forget_unreachable()
    lost_before = load.lost[name]
    with grpc.insecure_channel(balanced.address, options=OPTIONS) as channel:
        stub = contract[1].AttentionStub(channel)
        session = open_session(stub, pb, name)
        asked = time.monotonic()
        old.signal()
        eventually(lambda: time.monotonic() > asked + DRAIN_DELAY, what="the drain delay")
        before, opened = load.snapshot(), load.opened[name]
        ask_until_the_end(stub, pb, old, session, asked)
        # Of each thread that calls, one answer may be counted late.
        late = load.snapshot()[name] - before[name]
        assert late <= 8, f"{late} calls to {name} after the drain delay"
        late = load.opened[name] - opened
        assert late <= 6, f"{late} sessions of {name} opened after the drain delay"
        new = balanced.start(name)
        with pytest.raises(grpc.RpcError) as ended:
            stub.GetSession(pb.GetSessionRequest(session_id=session.id), timeout=10, wait_for_ready=True,
                            metadata=[("attend-replica", name)])
    assert load.reason(ended.value) == "SESSION_LOST_IN_RESTART", ended.value
    # The server's own count: of the load, of open_session's tries and this one.
    lost = int(old.log().rpartition("sessions_lost=")[2].split()[0])
    assert lost > 0
    eventually(lambda: new.total("attend_requests_total", method="Attend", code="OK") > 20 or load.failures,
               what="work on " + name)
    assert not load.failures, load.failures[:5]
    early = [moment - asked for moment in load.unreachable[name] if moment - asked < DRAIN_LIMIT]
    assert not early, f"sessions of {name} got UNAVAILABLE {early} s after the signal, limit {DRAIN_LIMIT}"
    others = [other for other in NAMES if other != name and load.unreachable[other]]
    assert not others, f"sessions of {others} were unreachable while {name} was restarted"
    return load.lost[name] - lost_before


def rolling_restart(balanced, contract, rounds=1):
    """Every replica once a round; the load that saw it."""
    with Load(balanced.address, *contract) as load:
        load.add(stateless=6, sessions=6, streams=2)
        for _ in range(rounds):
            for name in NAMES:
                restart(balanced, contract, load, name)
        connections = {name: server.total("attend_connections") for name, server in balanced.replicas.items()}
    assert not load.failures, load.failures[:5]
    assert load.lost.total() > 0
    # Some for each worker, in use and idle, about as many everywhere.
    assert max(connections.values()) <= 2 * min(connections.values()) + 16, connections
    load.connections = connections
    return load


def test_a_rolling_restart_fails_no_stateless_call_and_ends_sessions_as_agreed(balanced, contract):
    load = rolling_restart(balanced, contract)
    print(f"{load.stateless.total()} stateless and {load.session_calls.total()} session calls, "
          f"{load.lost.total()} sessions lost, slowest stateless call {load.slowest:.3f} s, {load.connections}")


def test_the_python_client_reports_a_lost_session(balanced):
    with Client(balanced.address, timeout=30, attempts=1) as client:
        session = client.open_session(model="llama_gqa4")
        name = session.replica
        old = balanced.replicas[name]
        old.signal()
        session.info()  # served while it drains
        assert old.wait() == 0
        balanced.start(name)

        def ask():
            try:
                session.info()
            except SessionLost as error:
                return error
        assert eventually(ask).reason == "SESSION_LOST_IN_RESTART"


def test_sigkill_of_a_replica_is_hidden_from_calls_that_begin_after_it(balanced, contract):
    """Not promised for calls in progress; later ones go to the others, also before any check has seen it."""
    wait_for_all(balanced, contract)
    victim = balanced.replicas[NAMES[1]]
    victim.signal(signal.SIGKILL)
    victim.wait()
    with Load(balanced.address, *contract) as load:
        load.add(stateless=4)
        eventually(lambda: load.snapshot().total() >= 200)
    balanced.start(NAMES[1])
    assert not load.failures, load.failures[:5]
