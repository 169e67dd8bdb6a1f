# SPDX-License-Identifier: Apache-2.0
"""Load of plain gRPC clients: generated stubs, no retries of any kind, several threads and channels.

For tests of what stands between clients and servers. Every call is counted by the replica that answered; a call
that may not fail and did is a line of `failures`. What callers of sessions see is told apart by the replica.
"""
import collections
import contextlib
import threading
import time

import grpc

CALL_SECONDS = 20  # deadline of each call
# No transparent retries either: a balancer must not depend on them.
OPTIONS = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1),
           ("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


class Load:
    """Threads that call until stopped; `pb` and `stubs` are the generated modules."""

    def __init__(self, address, pb, stubs):
        self.address, self.pb, self.stubs = address, pb, stubs
        self.stateless = collections.Counter()  # answers by replica
        self.session_calls = collections.Counter()  # answers by replica
        self.opened = collections.Counter()  # sessions by replica
        self.lost = collections.Counter()  # SESSION_LOST_IN_RESTART by replica
        self.unreachable = collections.defaultdict(list)  # times of UNAVAILABLE for sessions, by replica
        self.streams_ended = 0
        self.slowest = 0.0
        self.failures = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = []
        self._channels = contextlib.ExitStack()

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._channels.close()

    def __enter__(self):
        return self

    def add(self, stateless=0, sessions=0, streams=0):
        """Starts threads; two of a kind share a channel."""
        for loop, count in ((self._call_stateless, stateless), (self._call_session, sessions),
                            (self._call_stream, streams)):
            for number in range(count):
                if number % 2 == 0:
                    channel = self._channels.enter_context(grpc.insecure_channel(self.address, options=OPTIONS))
                    stub = self.stubs.AttentionStub(channel)
                thread = threading.Thread(target=self._guard, args=(loop, stub, number))
                thread.start()
                self._threads.append(thread)

    def snapshot(self):
        """Stateless answers by replica so far."""
        with self._lock:
            return collections.Counter(self.stateless)

    def forget_unreachable(self):
        """Starts `unreachable` anew."""
        with self._lock:
            self.unreachable.clear()

    def _guard(self, loop, stub, number):
        try:
            loop(stub, number)
        except BaseException as error:  # a thread that died would be load that is missing
            self._fail("thread", repr(error))
            raise

    def _fail(self, kind, text):
        with self._lock:
            self.failures.append(f"{time.monotonic():.3f} {kind}: {text}")

    def raw(self, rows, heads=2, width=16):
        """Attention of `rows` rows over themselves, of the right sizes; the values do not matter."""
        pb = self.pb
        tensor = pb.Tensor(dtype=pb.DTYPE_F32, shape=[rows, heads, width], data=bytes(4 * rows * heads * width))
        return pb.AttendRequest(raw=pb.RawInput(q=tensor, k=tensor, v=tensor))

    def _call_stateless(self, stub, number):
        pb = self.pb
        calls = [(stub.Attend, self.raw(4)), (stub.Attend, self.raw(300)), (stub.Attend, self.raw(1)),
                 (stub.GetServerInfo, pb.GetServerInfoRequest()), (stub.Attend, self.raw(40)),
                 (stub.ListModels, pb.ListModelsRequest())]
        while not self._stop.is_set():
            number += 1
            method, request = calls[number % len(calls)]
            begun = time.monotonic()
            try:
                answer = method(request, timeout=CALL_SECONDS)
            except grpc.RpcError as error:
                self._fail("stateless", f"{error.code().name} {error.details()}")
                continue
            with self._lock:
                self.slowest = max(self.slowest, time.monotonic() - begun)
                if isinstance(answer, pb.AttendResponse):
                    self.stateless[answer.timing.replica] += 1

    def _call_session(self, stub, number):
        tokens = 1 << 30 if number % 2 else 100  # every other one lives until it is lost
        while not self._stop.is_set():
            try:
                session = stub.OpenSession(self.pb.OpenSessionRequest(raw=self.pb.RawLayout(
                    layers=1, q_heads=2, kv_heads=2, head_dim=16)), timeout=CALL_SECONDS)
            except grpc.RpcError as error:
                self._fail("OpenSession", f"{error.code().name} {error.details()}")
                continue
            with self._lock:
                self.opened[session.replica] += 1
            self._decode(stub, session, tokens)

    def _decode(self, stub, session, tokens):
        """Appends to one session until it is lost, or has `tokens` tokens and is closed."""
        owner = [("attend-replica", session.replica)]
        step = self.raw(1)
        step.layer = "0"
        step.raw.ClearField("options")
        item = step.sequences.add(length=1, session_id=session.id, position=0)
        while item.position < tokens and not self._stop.is_set():
            try:
                answer = stub.Attend(step, timeout=CALL_SECONDS, metadata=owner)
            except grpc.RpcError as error:
                reason = self.reason(error)
                with self._lock:
                    if reason == "SESSION_LOST_IN_RESTART":
                        self.lost[session.replica] += 1
                        return
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    self._fail("session", f"{session.replica} {error.code().name} {reason} {error.details()}")
                    return
                with self._lock:
                    self.unreachable[session.replica].append(time.monotonic())
                item.rewind = True
                time.sleep(0.05)  # a client's pause before it asks again
                continue
            if answer.timing.replica != session.replica:
                self._fail("session", f"of {session.replica} answered by {answer.timing.replica}")
            with self._lock:
                self.session_calls[answer.timing.replica] += 1
            item.position += 1
            time.sleep(0.002)
        self._close(stub, session, owner)

    def _close(self, stub, session, owner):
        """Also waits for a replica that is away, as its session may have been lost with it."""
        while True:
            try:
                stub.CloseSession(self.pb.CloseSessionRequest(session_id=session.id), timeout=CALL_SECONDS,
                                  metadata=owner)
                return
            except grpc.RpcError as error:
                reason = self.reason(error)
                with self._lock:
                    self.lost[session.replica] += reason == "SESSION_LOST_IN_RESTART"
                if error.code() == grpc.StatusCode.NOT_FOUND:
                    return
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    self._fail("CloseSession", f"{session.replica} {error.code().name} {reason} {error.details()}")
                    return
            if self._stop.wait(0.05):
                return

    def _call_stream(self, stub, _):
        """A stream without sessions: its end by a drain is agreed on, any other is a failure."""
        item = self.raw(8)
        while not self._stop.is_set():
            answered = threading.Semaphore(1)

            def items():
                while answered.acquire(timeout=CALL_SECONDS) and not self._stop.is_set():
                    yield item
            try:
                for answer in stub.AttendStream(items()):
                    if answer.error.code:  # refused by a replica that drains: the client goes elsewhere
                        if self.detail(answer.error) != "DRAINING":
                            self._fail("item", str(answer.error))
                        break
                    with self._lock:
                        self.stateless[answer.timing.replica] += 1
                    time.sleep(0.01)
                    answered.release()
            except grpc.RpcError as error:
                if self.reason(error) != "DRAINING":
                    self._fail("stream", f"{error.code().name} {error.details()}")
            with self._lock:
                self.streams_ended += 1

    def detail(self, status):
        """The reason in an attend.v1.Status, or ''."""
        for one in status.details:
            found = self.pb.ErrorDetail()
            if one.Unpack(found):
                return self.pb.Reason.Name(found.reason)
        return ""

    def reason(self, error):
        """The reason of a failed call, or ''."""
        for key, value in error.trailing_metadata() or ():
            if key == "grpc-status-details-bin":
                return self.detail(self.pb.Status.FromString(value))
        return ""
