# SPDX-License-Identifier: Apache-2.0
"""Load of every kind on attend-server, counted as its clients saw it: each method, each reason of refusal that a
healthy server gives, cancels and a full queue. Used where series must move (monitoring_test.py). Requests are made
of the contract's messages, as wrong ones are wanted too. Servers have the models `gqa` (llama_gqa4) and `bert`,
one thread, 1 MiB of cache, and request_tokens and queue_tokens of REQUEST_TOKENS.
"""
import collections
import concurrent.futures
import threading

import grpc
import numpy as np

from support.servers import PATIENCE, eventually

REQUEST_TOKENS = 65536  # of one request, and all that fits into the queue
# Series that are above 0 too shortly for every scrape to see it: Caller.overload() looks at the page itself.
MOMENTARY = ("attend_queue_requests", "attend_queue_tokens", "attend_running_requests", "attend_streams")


class Caller:
    """Calls one server and counts what it was told: by (method, code) and by reason."""

    def __init__(self, pb, server):
        self.pb = pb
        self.server = server
        self.channel = grpc.insecure_channel(server.address)
        self.lock = threading.Lock()  # of the two counters: streams are counted on a thread of their own
        self.answers = collections.Counter()
        self.reasons = collections.Counter()
        self.random = np.random.default_rng(7)

    def _count(self, method, code, status):
        detail = self.pb.ErrorDetail()
        with self.lock:
            self.answers[method, code] += 1
            for packed in status.details:
                if packed.Unpack(detail):
                    self.reasons[self.pb.Reason.Name(detail.reason)] += 1

    def start(self, method, request):
        """A call in the background; finish() counts it."""
        answers = {"OpenSession": "Session", "GetSession": "Session", "ForkSession": "Session",
                   "TruncateSession": "Session", "CloseSession": "CloseSessionResponse",
                   "ListModels": "ListModelsResponse", "GetServerInfo": "ServerInfo"}
        answer = getattr(self.pb, answers.get(method, "AttendResponse"))
        return self.channel.unary_unary(
            f"/attend.v1.Attention/{method}", request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString).future(request, timeout=PATIENCE)

    def finish(self, method, future, code="OK"):
        try:
            answer, status, got = future.result(), self.pb.Status(), "OK"
        except (grpc.RpcError, grpc.FutureCancelledError):
            trailers = dict(future.trailing_metadata() or ())
            answer, got = None, future.code().name
            status = self.pb.Status.FromString(trailers.get("grpc-status-details-bin", b""))
        assert got == code, f"{method}: {future.details()}"
        self._count(method, got, status)
        return answer

    def call(self, method, request, code="OK"):
        return self.finish(method, self.start(method, request), code)

    def tensor(self, *shape):
        data = self.random.standard_normal(shape, np.float32)
        return self.pb.Tensor(dtype=self.pb.DTYPE_F32, shape=shape, data=data.tobytes())

    def attend(self, rows, *sequences, model="gqa", layer="0", **fields):
        """A request of `rows` rows for the causal model."""
        return self.pb.AttendRequest(model=model, layer=layer, hidden_states=self.tensor(rows, 64),
                                     sequences=sequences, **fields)

    def append(self, session_id, rows, position):
        return self.attend(rows, self.pb.Sequence(length=rows, session_id=session_id, position=position))

    def heavy(self):
        """Raw work of 1.1e12 operations and a quarter of the queue, 5 s of a core: always given up."""
        def half(*shape):
            data = self.random.standard_normal(shape, np.float32).astype(np.float16)
            return self.pb.Tensor(dtype=self.pb.DTYPE_F16, shape=shape, data=data.tobytes())
        keys = half(REQUEST_TOKENS // 4, 1, 64)
        return self.pb.AttendRequest(raw=self.pb.RawInput(q=half(16384, 16, 64), k=keys, v=keys))

    def stream(self, requests):
        stream = self.channel.stream_stream(
            "/attend.v1.Attention/AttendStream", request_serializer=self.pb.AttendRequest.SerializeToString,
            response_deserializer=self.pb.AttendResponse.FromString)
        for answer in stream(requests, timeout=PATIENCE):
            code = [code for code in grpc.StatusCode if code.value[0] == answer.error.code][0]
            self._count("AttendStream", code.name, answer.error)

    def round(self):
        """One of every method, in a few milliseconds."""
        pb = self.pb
        self.call("ListModels", pb.ListModelsRequest())
        self.call("GetServerInfo", pb.GetServerInfoRequest())
        self.call("Attend", self.attend(24, *(pb.Sequence(length=8) for _ in range(3))))
        self.call("Attend", pb.AttendRequest(model="bert", layer="1", hidden_states=self.tensor(12, 36)))
        self.call("Attend", pb.AttendRequest(raw=pb.RawInput(
            q=self.tensor(6, 2, 16), k=self.tensor(6, 1, 16), v=self.tensor(6, 1, 16))))
        session = self.call("OpenSession", pb.OpenSessionRequest(model="gqa")).id
        self.call("Attend", self.append(session, 70, 0))
        for position in (70, 71):
            self.call("Attend", self.append(session, 1, position))
        fork = self.call("ForkSession", pb.ForkSessionRequest(session_id=session)).id
        self.call("TruncateSession", pb.TruncateSessionRequest(session_id=fork, length=10))
        self.call("GetSession", pb.GetSessionRequest(session_id=fork))
        self.stream(iter([self.attend(3), self.attend(3, layer="no such layer"), self.append(fork, 1, 72),
                          self.append(fork, 1, 10)]))
        for ended in (fork, session):
            self.call("CloseSession", pb.CloseSessionRequest(session_id=ended))

    def errors(self):
        """One of every reason that a healthy server gives."""
        pb = self.pb
        bad = "INVALID_ARGUMENT"
        self.call("Attend", self.attend(3, pb.Sequence(length=4)), bad)
        self.call("Attend", self.attend(REQUEST_TOKENS + 1), bad)  # TOO_LARGE
        self.call("Attend", self.attend(3, model="nobody"), "NOT_FOUND")
        self.call("Attend", self.attend(3, return_lse=True), "UNIMPLEMENTED")
        self.call("Attend", self.attend(3, timeout_us=1), "DEADLINE_EXCEEDED")
        self.call("NoMethod", self.attend(3), "UNIMPLEMENTED")

        small = self.call("OpenSession", pb.OpenSessionRequest(model="gqa", ttl_seconds=1, max_tokens=4)).id
        self.call("Attend", self.append(small, 5, 0), "RESOURCE_EXHAUSTED")  # QUOTA
        large = self.call("OpenSession", pb.OpenSessionRequest(model="gqa")).id
        self.call("Attend", self.append(large, 6000, 0), "RESOURCE_EXHAUSTED")  # KV_EXHAUSTED
        self.call("Attend", self.append(large, 3, 5), "FAILED_PRECONDITION")
        self.call("CloseSession", pb.CloseSessionRequest(session_id=large))
        self.call("Attend", self.append(large, 3, 0), "NOT_FOUND")  # SESSION_CLOSED
        replica, start, number = large.split(".")
        never = number[::-1]
        self.call("Attend", self.append(f"{replica}.{start}.{never}", 3, 0), "NOT_FOUND")
        self.call("Attend", self.append(f"{replica}.1{start}.{never}", 3, 0), "NOT_FOUND")  # LOST_IN_RESTART
        self.call("Attend", self.append(f"elsewhere.{start}.{never}", 3, 0), "FAILED_PRECONDITION")
        eventually(lambda: self.server.total("attend_sessions_ended_total", reason="expired") > 0)
        self.call("Attend", self.append(small, 3, 0), "NOT_FOUND")  # SESSION_EXPIRED

    def overload(self):
        """Two long requests take turns, short ones go between, with a stream open; what doesn't fit is refused; the
        long ones are given up."""
        stopped = threading.Event()

        def items():
            yield self.attend(3)
            stopped.wait(PATIENCE)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            streamed = pool.submit(self.stream, items())
            running = [self.start("Attend", request) for request in [self.heavy(), self.heavy()]]
            unseen, short = set(MOMENTARY), []

            def all_seen():  # none waits longer than a turn lasts
                short.append(self.start("Attend", self.attend(3)))
                unseen.difference_update([name for name in unseen if self.server.total(name) > 0])
                return not unseen
            eventually(all_seen, what=unseen)
            for future in short:
                self.finish("Attend", future)
            self.call("Attend", self.attend(REQUEST_TOKENS), "RESOURCE_EXHAUSTED")  # QUEUE_FULL
            for future in running:
                future.cancel()
                self.finish("Attend", future, "CANCELLED")
            stopped.set()
            streamed.result()
        eventually(lambda: self.server.total("attend_cancelled_total") == 2)  # the queue has room again


class Load:
    """Rounds of calls on every server until stop()."""

    def __init__(self, callers):
        self.callers = callers
        self.over = threading.Event()
        self.pool = concurrent.futures.ThreadPoolExecutor(len(callers))
        self.running = [self.pool.submit(self._run, caller) for caller in callers]

    def _run(self, caller):
        pb = caller.pb
        session = caller.call("OpenSession", pb.OpenSessionRequest(model="gqa")).id  # open until the end
        caller.call("Attend", caller.append(session, 5, 0))
        for provoke in (caller.overload, caller.errors):
            caller.round()
            provoke()
        while not self.over.wait(0.05):
            caller.round()
        caller.call("CloseSession", pb.CloseSessionRequest(session_id=session))

    def check(self):
        """Raises what a thread raised."""
        for thread in self.running:
            if thread.done():
                thread.result()

    def stop(self):
        self.over.set()
        for thread in self.running:
            thread.result()
        self.pool.shutdown()
