# SPDX-License-Identifier: Apache-2.0
"""When attend_client.py tries again and what its errors carry: against a scripted server, and against a real one
whose answers get lost on the way."""
import concurrent.futures
import contextlib
import select
import socket
import threading
import time

import grpc
import numpy as np
import pytest

import attend_client
from attend_client import (AttendError, Client, DeadlineExceeded, InvalidRequest, Overloaded, PositionMismatch,
                           Reason, SessionLost, SessionMoved, TooLarge, Unavailable, UnknownName, Unsupported)
from support.servers import Server, golden_model

ROWS = np.ones((2, 4), np.float32)


# ---- A scripted server ----


class Scripted(grpc.GenericRpcHandler):
    """Answers like a server with nothing behind it; calls of a method fail as `failures` says, first one first."""

    def __init__(self):
        self.seen = []  # (method, body, metadata)
        self.failures = {}  # method -> list of (code, message, ErrorDetail or None, pushback or None)
        self.delay = 0

    def calls(self, method):
        return [(body, metadata) for name, body, metadata in self.seen if name == method]

    def fail(self, method, code, *, detail=None, pushback=None, times=1, message="scripted"):
        self.failures.setdefault(method, []).extend([(code, message, detail, pushback)] * times)

    def service(self, details):
        method = details.method.rpartition("/")[2]
        if method == "AttendStream":
            return grpc.stream_stream_rpc_method_handler(self.stream)
        return grpc.unary_unary_rpc_method_handler(lambda body, context: self.answer(method, body, context))

    def answer(self, method, body, context):
        self.seen.append((method, body, dict(context.invocation_metadata())))
        time.sleep(self.delay)
        if self.failures.get(method):
            self.abort(context, *self.failures[method].pop(0))
        answers = {
            "GetServerInfo": lambda: attend_client.ServerInfo(limits=attend_client.Limits(
                message_bytes=1 << 20, response_bytes=1 << 20, stream_items_in_flight=4)),
            "Attend": lambda: attended(body),
            "ListModels": attend_client.ListModelsResponse,
            "CloseSession": attend_client.CloseSessionResponse,
        }
        session = attend_client.SessionInfo(id="r.1.a", model="m", replica="r")
        return attend_client._encode(answers.get(method, lambda: session)())

    def stream(self, bodies, context):
        for body in bodies:
            self.seen.append(("AttendStream", body, {}))
            if self.failures.get("AttendStream"):
                failure = self.failures["AttendStream"].pop(0)
                if failure is not None:
                    self.abort(context, *failure)
            time.sleep(self.delay)
            yield attend_client._encode(attended(body))

    @staticmethod
    def abort(context, code, message, detail, pushback):
        trailers = []
        if detail is not None:
            any_ = attend_client.Any_("type.googleapis.com/attend.v1.ErrorDetail", attend_client._encode(detail))
            status = attend_client.Status(code.value[0], message, [any_])
            trailers.append(("grpc-status-details-bin", attend_client._encode(status)))
        if pushback is not None:
            trailers.append(("grpc-retry-pushback-ms", pushback))
        context.set_trailing_metadata(trailers)
        context.abort(code, message)


def attended(body):
    """The rows as they came, appended after `position`."""
    request = attend_client._decode(attend_client.AttendRequest, body)
    positions = [(one.position or 0) + (0 if one.no_append else one.length) for one in request.sequences] or [0]
    return attend_client.AttendResponse(request.request_id, positions, output=request.hidden_states)


@pytest.fixture
def scripted():
    handler = Scripted()
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(4), handlers=[handler])
    handler.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield handler
    server.stop(None).wait()


@pytest.fixture
def client(scripted):
    with Client(scripted.address, timeout=30, attempts=3) as connected:
        yield connected


def detail(reason, **fields):
    return attend_client.ErrorDetail(reason=reason, **fields)


CODE = grpc.StatusCode


@pytest.mark.parametrize("code, reason, kind", [
    (CODE.INVALID_ARGUMENT, Reason.INVALID_FIELD, InvalidRequest),
    (CODE.NOT_FOUND, Reason.UNKNOWN_MODEL, UnknownName),
    (CODE.NOT_FOUND, Reason.UNKNOWN_LAYER, UnknownName),
    (CODE.NOT_FOUND, Reason.SESSION_NOT_FOUND, SessionLost),
    (CODE.NOT_FOUND, Reason.SESSION_EXPIRED, SessionLost),
    (CODE.NOT_FOUND, Reason.SESSION_EVICTED, SessionLost),
    (CODE.NOT_FOUND, Reason.SESSION_CLOSED, SessionLost),
    (CODE.NOT_FOUND, Reason.SESSION_LOST_IN_RESTART, SessionLost),
    (CODE.FAILED_PRECONDITION, Reason.SESSION_MOVED, SessionMoved),
    (CODE.FAILED_PRECONDITION, Reason.POSITION_MISMATCH, PositionMismatch),
    (CODE.RESOURCE_EXHAUSTED, Reason.QUEUE_FULL, Overloaded),
    (CODE.RESOURCE_EXHAUSTED, Reason.KV_EXHAUSTED, Overloaded),
    (CODE.RESOURCE_EXHAUSTED, Reason.QUOTA, Overloaded),
    (CODE.INVALID_ARGUMENT, Reason.TOO_LARGE, TooLarge),
    (CODE.UNAVAILABLE, Reason.DRAINING, Unavailable),
    (CODE.UNAVAILABLE, Reason.STARTING, Unavailable),
    (CODE.DEADLINE_EXCEEDED, Reason.DEADLINE, DeadlineExceeded),
    (CODE.CANCELLED, Reason.CANCELLED, AttendError),
    (CODE.INTERNAL, Reason.ENGINE_FAULT, AttendError),
    (CODE.UNIMPLEMENTED, Reason.UNSUPPORTED, Unsupported),
    (CODE.FAILED_PRECONDITION, Reason.CONTEXT_CONFLICT, AttendError),
])
def test_every_reason_has_its_exception(scripted, code, reason, kind):
    scripted.fail("Attend", code, message="two\nlines", detail=detail(
        reason, field="f", got="g", wanted="w", sequences=[1, 300], cached=7, replica="owner"))
    with Client(scripted.address, attempts=1) as client, pytest.raises(AttendError) as failed:
        client.attend("0", ROWS)
    error = failed.value
    assert type(error) is kind
    assert (error.code, error.reason, error.message) == (code.name, reason.name, "two\nlines")
    assert str(error) == f"{code.name} {reason.name}: two lines"
    assert (error.field, error.got, error.wanted, error.sequences) == ("f", "g", "w", (1, 300))
    assert (error.cached, error.replica, error.attempts) == (7, "owner", 1)
    assert not error.outcome_unknown and error.retryable == (code in (CODE.UNAVAILABLE, CODE.CANCELLED))


def test_every_reason_is_in_the_list_above():
    marks = next(mark for mark in test_every_reason_has_its_exception.pytestmark if mark.name == "parametrize")
    assert [one[1] for one in marks.args[1]] == list(Reason)[1:]


def test_reasons_of_newer_servers_keep_their_number(scripted, client):
    scripted.fail("Attend", CODE.ABORTED, detail=detail(99))
    with pytest.raises(AttendError) as failed:
        client.attend("0", ROWS)
    assert (failed.value.reason, failed.value.code) == ("REASON_99", "ABORTED")


# ---- Which calls are tried again ----


@pytest.mark.parametrize("failure, calls", [
    ({"code": CODE.UNAVAILABLE}, 3),
    ({"code": CODE.CANCELLED}, 3),
    ({"code": CODE.UNAVAILABLE, "detail": detail(Reason.DRAINING)}, 3),
    ({"code": CODE.RESOURCE_EXHAUSTED, "detail": detail(Reason.QUEUE_FULL, retry_after_ms=1)}, 3),
    ({"code": CODE.RESOURCE_EXHAUSTED, "pushback": "1"}, 3),
    ({"code": CODE.RESOURCE_EXHAUSTED}, 1),
    ({"code": CODE.RESOURCE_EXHAUSTED, "detail": detail(Reason.QUOTA)}, 1),
    ({"code": CODE.UNAVAILABLE, "pushback": "-1"}, 1),
    ({"code": CODE.UNAVAILABLE, "pushback": "soon"}, 1),
    ({"code": CODE.RESOURCE_EXHAUSTED, "detail": detail(Reason.QUOTA, retry_after_ms=1), "pushback": "-5"}, 1),
    ({"code": CODE.INVALID_ARGUMENT, "pushback": "1"}, 1),
    ({"code": CODE.INTERNAL}, 1),
    ({"code": CODE.UNKNOWN}, 1),
    ({"code": CODE.DEADLINE_EXCEEDED, "detail": detail(Reason.DEADLINE)}, 1),
    ({"code": CODE.FAILED_PRECONDITION}, 1),
], ids=str)
def test_stateless_calls_are_tried_again_where_it_helps(scripted, client, failure, calls):
    scripted.fail("Attend", times=2, **failure)
    if calls == 3:
        assert np.array_equal(client.attend("0", ROWS).output, ROWS)
    else:
        with pytest.raises(AttendError) as failed:
            client.attend("0", ROWS)
        assert failed.value.attempts == 1 and not failed.value.retryable
    assert len(scripted.calls("Attend")) == calls


def test_attempts_end(scripted, client):
    scripted.fail("Attend", CODE.UNAVAILABLE, times=9)
    with pytest.raises(Unavailable) as failed:
        client.attend("0", ROWS)
    assert failed.value.attempts == 3 == len(scripted.calls("Attend"))
    assert failed.value.retryable and failed.value.outcome_unknown
    with Client(scripted.address, attempts=1) as once, pytest.raises(Unavailable):
        once.attend("0", ROWS)
    assert len(scripted.calls("Attend")) == 4


def test_an_outcome_once_unknown_stays_unknown(scripted, client):
    scripted.fail("Attend", CODE.UNAVAILABLE)
    scripted.fail("Attend", CODE.UNAVAILABLE, detail=detail(Reason.DRAINING), times=2)
    with pytest.raises(Unavailable) as failed:
        client.attend("0", ROWS)
    assert failed.value.reason == "DRAINING" and failed.value.outcome_unknown


def test_the_servers_time_to_wait_is_kept(scripted, client):
    for wait_ms, pushback, seconds in ((150, None, 0.15), (9000, "120", 0.12)):
        scripted.fail("Attend", CODE.RESOURCE_EXHAUSTED, pushback=pushback,
                      detail=detail(Reason.QUEUE_FULL, retry_after_ms=wait_ms))
        start = time.monotonic()
        client.attend("0", ROWS)
        assert time.monotonic() - start >= seconds


def test_a_wait_beyond_the_timeout_is_not_begun(scripted, client):
    scripted.fail("Attend", CODE.RESOURCE_EXHAUSTED, detail=detail(Reason.KV_EXHAUSTED, retry_after_ms=3_600_000))
    with pytest.raises(Overloaded) as full:
        client.attend("0", ROWS)
    assert (full.value.retry_after, full.value.attempts, full.value.retryable) == (3600, 1, True)


@pytest.mark.parametrize("method, call", [
    ("OpenSession", lambda client: client.open_session()),
    ("ForkSession", lambda client: client.open_session().fork()),
])
def test_what_makes_a_session_is_not_made_twice(scripted, client, method, call):
    scripted.fail(method, CODE.UNAVAILABLE)  # the answer may have been lost: no detail of the server
    with pytest.raises(Unavailable) as failed:
        call(client)
    assert failed.value.attempts == 1 == len(scripted.calls(method)) and failed.value.outcome_unknown
    scripted.fail(method, CODE.UNAVAILABLE, detail=detail(Reason.DRAINING))  # the server says that it did nothing
    assert call(client).id == "r.1.a"
    assert len(scripted.calls(method)) == 3


@pytest.mark.parametrize("method, call", [
    ("GetServerInfo", lambda client: client.server_info()),
    ("ListModels", lambda client: client.models()),
    ("GetSession", lambda client: client.session("r.1.a")),
    ("TruncateSession", lambda client: client.session("r.1.a").truncate(0)),
    ("CloseSession", lambda client: client.session("r.1.a").close()),
])
def test_calls_that_may_run_twice_are_tried_again(scripted, client, method, call):
    before = len(scripted.calls(method))
    scripted.fail(method, CODE.UNAVAILABLE)
    call(client)
    assert len(scripted.calls(method)) - before == 2


def test_closed_by_the_lost_first_attempt_is_closed(scripted, client):
    session = client.session("r.1.a")
    scripted.fail("CloseSession", CODE.UNAVAILABLE)
    scripted.fail("CloseSession", CODE.NOT_FOUND, detail=detail(Reason.SESSION_CLOSED))
    session.close()
    again = client.session("r.1.a")
    scripted.fail("CloseSession", CODE.NOT_FOUND, detail=detail(Reason.SESSION_CLOSED))
    with pytest.raises(SessionLost):
        again.close()


def test_leaving_a_session_never_raises(scripted, client):
    with client.open_session():
        scripted.fail("CloseSession", CODE.UNAVAILABLE, times=5)
    assert len(scripted.calls("CloseSession")) == 1
    with pytest.raises(KeyError), client.open_session():
        raise KeyError
    assert len(scripted.calls("CloseSession")) == 2


def test_waits_are_random_and_grow_to_a_bound():
    def wait(attempts, uniform, remaining=60.0, pushback=None):
        error = Unavailable(code="UNAVAILABLE")
        error.attempts = attempts
        return attend_client._retry_delay(error, pushback, True, remaining, 99, uniform)

    assert [wait(n, 1.0) for n in (1, 2, 3, 4, 5, 6, 90)] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    assert wait(3, 0.0) == 0 and wait(3, 0.25) == 0.1
    assert wait(6, 1.0, remaining=2.0) is None
    assert wait(1, 1.0, pushback="700") == 0.7 and wait(1, 1.0, pushback="-1") is None


def test_a_late_answer_is_a_deadline(scripted, client):
    scripted.delay = 0.5
    with pytest.raises(DeadlineExceeded) as late:
        client.attend("0", ROWS, timeout=0.05)
    assert late.value.outcome_unknown and isinstance(late.value, TimeoutError)


def test_an_answer_that_is_none_is_an_error(scripted, client, monkeypatch):
    for answer in (b"\xff\xff", attend_client._encode(attend_client.AttendResponse(output=attend_client.Tensor(
            attend_client.DType.F32, [9, 9], b"1234")))):
        monkeypatch.setattr(scripted, "answer", lambda *_: answer)
        with pytest.raises(AttendError, match="INTERNAL") as wrong:
            client.attend("0", ROWS)
        assert wrong.value.code == "INTERNAL" and wrong.value.outcome_unknown


def test_a_server_that_is_no_attend_server(scripted, client):
    scripted.fail("Attend", CODE.UNIMPLEMENTED, message="Method not found!")
    with pytest.raises(Unsupported, match=scripted.address):
        client.attend("0", ROWS)


# ---- Metadata ----


def test_sizes_and_replicas_are_announced(scripted, client):
    client.attend("0", ROWS)
    with client.open_session() as session:
        session.attend("0", ROWS)
        session.info()
    client.session("host.with.dots.1.a")
    for body, metadata in scripted.calls("Attend"):
        assert metadata["attend-bytes"] == str(len(body))
    for method, replicas in (("Attend", [None, "r"]), ("GetSession", ["r", "host.with.dots"])):
        assert [metadata.get("attend-replica") for _, metadata in scripted.calls(method)] == replicas
    assert scripted.calls("CloseSession")[0][1]["attend-replica"] == "r"
    assert "attend-bytes" not in scripted.calls("OpenSession")[0][1]


# ---- Sessions whose answers get lost ----


def requests(scripted, method="Attend"):
    return [attend_client._decode(attend_client.AttendRequest, body) for body, _ in scripted.calls(method)]


def sequences(scripted):
    return [request.sequences for request in requests(scripted)]


def test_lost_rows_are_sent_again_with_rewind_and_refused_ones_without(scripted, client):
    session = client.open_session()
    scripted.fail("Attend", CODE.UNAVAILABLE, detail=detail(Reason.STARTING, retry_after_ms=1))
    scripted.fail("Attend", CODE.UNAVAILABLE)
    session.attend("0", ROWS)
    assert [one.rewind for one, in sequences(scripted)] == [False, False, True]
    body, metadata = scripted.calls("Attend")[-1]
    assert metadata["attend-bytes"] == str(len(body))
    session.attend("0", ROWS)
    last, = sequences(scripted)[-1]
    assert (last.rewind, last.position, session.length) == (False, 2, 4)


def test_the_next_attend_repairs_what_failed_for_good(scripted, client):
    session = client.open_session()
    session.attend("0", ROWS)
    scripted.fail("Attend", CODE.UNAVAILABLE, times=3)
    with pytest.raises(Unavailable):
        session.attend("0", ROWS)
    assert session.length == 2
    session.attend("1", ROWS)  # another layer has nothing to repair
    session.attend("0", ROWS, no_append=True)
    session.attend("0", ROWS)
    session.attend("0", ROWS)
    assert [(one.position, one.rewind) for one, in sequences(scripted)[4:]] == \
        [(0, False), (2, True), (2, True), (4, False)]


def test_errors_that_say_that_nothing_ran_leave_nothing_to_repair(scripted, client):
    session = client.open_session()
    scripted.fail("Attend", CODE.INVALID_ARGUMENT, detail=detail(Reason.INVALID_FIELD))
    for _ in range(2):
        with contextlib.suppress(InvalidRequest):
            session.attend("0", ROWS)
    with pytest.raises(InvalidRequest):
        session.attend("0", np.ones((1 << 18, 4), np.float32))  # above message_bytes: never sent
    session.attend("0", ROWS)
    assert [one.rewind for one, in sequences(scripted)] == [False] * 3


def test_a_cross_layer_carries_no_position(scripted, client):
    session = client.open_session()
    scripted.fail("Attend", CODE.UNAVAILABLE)
    session.attend("0.cross", ROWS, context=ROWS)
    session.attend("0", ROWS, context=ROWS)  # a plain module that was given a context
    session.attend("0", ROWS)
    for one, in sequences(scripted):
        assert one.position is None and not one.rewind
    assert [one.context_length for one, in sequences(scripted)] == [2, 2, 2, None] and session.length == 0


class Proxy:
    """Forwards TCP connections. cut_answer(): the next answer above 2 KiB is dropped with its connection."""

    def __init__(self, target):
        self.target = target
        self.cuts = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.armed = False
        self.closing = False
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def cut_answer(self):
        self.armed = True

    def close(self):
        self.closing = True
        self.thread.join()
        self.listener.close()

    def run(self):
        pairs = {}  # socket -> (the other end, whether it is the server's side)
        while not self.closing:
            ready, _, _ = select.select([self.listener, *pairs], [], [], 0.02)
            for one in ready:
                if one is self.listener:
                    near, far = one.accept()[0], socket.create_connection(self.target)
                    pairs[near], pairs[far] = (far, False), (near, True)
                elif one in pairs:
                    other, answers = pairs[one]
                    data = one.recv(1 << 20)
                    if answers and self.armed and len(data) > 2048:
                        self.armed, data = False, b""
                        self.cuts += 1
                    if data:
                        other.sendall(data)
                    else:
                        for end in (one, other):
                            del pairs[end]
                            end.close()
        for one in pairs:
            one.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("server"), golden_model("llama")) as running:
        yield running


@pytest.fixture
def proxy(server):
    host, port = server.address.rsplit(":", 1)
    one = Proxy((host, int(port)))
    yield one
    one.close()


def test_a_lost_answer_appends_nothing_twice(server, proxy):
    rows = np.random.default_rng(1).standard_normal((300, 30), np.float32)
    with Client(proxy.address, timeout=60) as client:
        whole = client.attend("0", rows, model="llama").output
        with client.open_session() as session:
            session.attend("0", rows[:100])
            for begin, end in ((100, 200), (200, 300)):
                ran = server.total("attend_requests_total", method="Attend", code="OK")
                proxy.cut_answer()
                assert np.array_equal(session.attend("0", rows[begin:end]).output, whole[begin:end])
                # It ran twice on the server.
                assert server.total("attend_requests_total", method="Attend", code="OK") - ran == 2
            assert session.length == session.info().length == 300
        assert proxy.cuts == 2


def test_a_lost_answer_without_retries_is_repaired_by_the_next_call(proxy):
    rows = np.random.default_rng(1).standard_normal((200, 30), np.float32)
    with Client(proxy.address, timeout=60, attempts=1) as client, client.open_session() as session:
        whole = client.attend("0", rows, model="llama").output
        session.attend("0", rows[:100])
        proxy.cut_answer()
        with pytest.raises(Unavailable) as lost:
            session.attend("0", rows[100:])
        assert lost.value.outcome_unknown and session.length == 100 and session.info().length == 200
        with session.fork() as fork:  # of what this client knows of
            assert fork.length == 100
            assert np.array_equal(fork.attend("0", rows[100:]).output, whole[100:])
        assert np.array_equal(session.attend("0", rows[100:]).output, whole[100:])
        assert session.info().length == 200


def test_an_interrupt_while_waiting_is_repaired_too(server, monkeypatch):
    rows = np.random.default_rng(1).standard_normal((6, 30), np.float32)
    with Client(server.address, timeout=60) as client, client.open_session() as session:
        whole = client.attend("0", rows, model="llama").output
        session.attend("0", rows[:3])
        call = client._call

        def interrupted(*arguments, **more):
            call(*arguments, **more)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(client, "_call", interrupted)
            with pytest.raises(KeyboardInterrupt):
                session.attend("0", rows[3:])
        assert session.length == 3 and session.info().length == 6
        assert np.array_equal(session.attend("0", rows[3:]).output, whole[3:])


# ---- Streams ----


def stream_of(client, count, **more):
    calls = [{"layer": "0", "rows": ROWS * n, "request_id": str(n)} for n in range(count)]
    return client.attend_stream(calls, **more)


def test_a_stream_that_ends_early_is_taken_up_again(scripted, client):
    # After two answers, then at once, then after one.
    scripted.failures["AttendStream"] = [None, None, (CODE.UNAVAILABLE, "age", detail(Reason.DRAINING), None),
                                         (CODE.UNAVAILABLE, "lost", None, None), None,
                                         (CODE.UNAVAILABLE, "lost", None, "1")]
    answers = list(stream_of(client, 9))
    assert [one.request_id for one in answers] == [str(n) for n in range(9)]
    for n, one in enumerate(answers):
        assert np.array_equal(one.output, ROWS * n)
    assert {request.timeout_us for request in requests(scripted, "AttendStream")} == {30_000_000}


def test_a_stream_gives_up_like_a_call(scripted, client):
    for failure in ((CODE.INTERNAL, "broken", None, None), (CODE.UNAVAILABLE, "no", None, "-1")):
        scripted.failures["AttendStream"] = [None, failure]
        stream = stream_of(client, 3)
        assert next(stream).request_id == "0"
        with pytest.raises(AttendError) as failed:
            list(stream)
        assert failed.value.attempts == 1 and failed.value.code == failure[0].name
    scripted.fail("AttendStream", CODE.UNAVAILABLE, times=3)
    with pytest.raises(Unavailable) as failed:
        list(stream_of(client, 3))
    assert failed.value.attempts == 3


def test_a_stream_keeps_no_more_in_flight_than_allowed(scripted, client):
    taken = []

    def calls():
        for n in range(20):
            taken.append(n)
            yield {"layer": "0", "rows": ROWS}

    stream = client.attend_stream(calls())
    next(stream)
    assert len(taken) == 4  # stream_items_in_flight
    assert len(list(stream)) == 19
    taken.clear()
    stream = client.attend_stream(calls(), ahead=2)
    for count in range(2, 12):
        next(stream)
        assert len(taken) == count
    stream.close()


def test_a_silent_stream_is_a_deadline(scripted, client, monkeypatch):
    scripted.delay = 3
    with pytest.raises(DeadlineExceeded, match="no answer within the timeout"):
        list(stream_of(client, 1, timeout=0.05))
