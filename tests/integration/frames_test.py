# SPDX-License-Identifier: Apache-2.0
"""What attend-server puts on the wire when a deadline passes, seen without a gRPC library: a call ends once. A second
end reaches nginx after it has given the connection to another client, whose call then fails.
"""
import socket
import struct

import pytest

from support.servers import PATIENCE, Server, golden_model

DATA, HEADERS, RST_STREAM, SETTINGS, WINDOW_UPDATE = 0, 1, 3, 4, 8
END_STREAM, END_HEADERS, ACK = 1, 4, 1


def frame(kind, flags, stream, payload=b""):
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def header(name, value):
    """HPACK: a literal without indexing, with a name of its own."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def varint(value):
    out = b""
    while value > 0x7F:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


def field(number, payload):
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def raw_attend(rows):
    """AttendRequest.raw with q, k, v of float32 [rows, 1, 64]."""
    tensor = b"\x08\x01" + field(2, varint(rows) + b"\x01\x40") + field(3, bytes(rows * 64 * 4))
    return field(14, b"".join(field(number, tensor) for number in (1, 2, 3)))


def frames(data):
    at = 0
    while at + 9 <= len(data):
        size = int.from_bytes(data[at:at + 3], "big")
        yield data[at + 3], data[at + 4], int.from_bytes(data[at + 5:at + 9], "big") & 0x7FFFFFFF
        at += 9 + size


def ends_of_a_call(address, timeout, body, complete):
    """How often the server ended stream 1, when it sent nothing more on it; a ping closes the trial."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as wire:
        wire.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0)
                     + frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1 << 24)))
        headers = [(":method", "POST"), (":scheme", "http"), (":path", "/attend.v1.Attention/Attend"),
                   (":authority", "test"), ("te", "trailers"), ("content-type", "application/grpc"),
                   ("grpc-timeout", timeout)]
        call = frame(HEADERS, END_HEADERS, 1, b"".join(header(*pair) for pair in headers))
        if body:
            message = b"\0" + struct.pack(">I", len(body)) + body
            call += frame(DATA, END_STREAM if complete else 0, 1, message)
        wire.sendall(call)
        data = b""
        while not any(kind == HEADERS and flags & END_STREAM or kind == RST_STREAM
                      for kind, flags, stream in frames(data) if stream == 1):
            got = wire.recv(65536)
            assert got, "the server closed the connection"
            data += got
        wire.sendall(frame(6, 0, 0, b"lastword"))  # PING: what was under way comes before its answer
        while b"lastword" not in data:
            data += wire.recv(65536)
    return sum(kind == HEADERS and bool(flags & END_STREAM) for kind, flags, stream in frames(data) if stream == 1)


@pytest.mark.parametrize("complete", [True, False])
def test_a_call_whose_deadline_passes_ends_once(tmp_path, complete):
    with Server(tmp_path, golden_model("llama_gqa4"), "--deadline_ms=300") as server:
        body = raw_attend(16)
        for _ in range(10):
            for timeout in ("1m", "2m", "5m", "20m"):
                assert ends_of_a_call(server.address, timeout, body, complete) == 1
        assert ends_of_a_call(server.address, "50m", b"", complete=False) == 1  # no body at all
        server.signal()
        assert server.wait() == 0
