# SPDX-License-Identifier: Apache-2.0
"""The Python client of attend: attention layers on a server, called with numpy arrays.

One file; copy it or put its folder on PYTHONPATH. It needs grpcio and numpy, for bfloat16 arrays also ml_dtypes:

    import numpy as np
    from attend_client import Client, SessionLost

    with Client("127.0.0.1:50051", timeout=30) as client:
        for model in client.models():
            print(model.name, [(layer.name, layer.d_model) for layer in model.layers])

        # Stateless: [tokens, d_model] in, [tokens, output_width] out.
        rows = np.zeros((5, 384), np.float32)
        output = client.attend("0", rows, model="minilm").output
        first, second = client.attend("0", [rows, rows[:2]], model="minilm").output  # two sequences, one call

        # A session keeps keys and values on the server: send new rows only.
        try:
            with client.open_session(model="gqa") as session:
                prompt = session.attend("0", np.zeros((24, 4096), np.float32))
                token = session.attend("0", np.zeros((1, 4096), np.float32)).output
                print(session.length)  # 25
        except SessionLost as error:
            print(error.reason)  # e.g. SESSION_LOST_IN_RESTART: open another and append its rows again

Arrays. float32, float16 and bfloat16 (ml_dtypes.bfloat16) are sent as they are, whatever their strides and byte
order. Everything else is refused, float64 too: it would lose digits unseen, so write `rows.astype(np.float32)`.
Results have the dtype of the rows unless `output_dtype` says otherwise, are in native byte order and belong to
the caller. Attention weights are float32. Asking for bfloat16 without ml_dtypes is an ImportError before anything
is sent.

Errors. Every failed call raises AttendError or one of its subclasses, with `code`, `reason`, `field`, `got`,
`wanted` and more; see there. What a call refuses before sending is the same InvalidRequest with `attempts` 0.

Retries. A call is tried again, at most `attempts` times and within `timeout` seconds, after UNAVAILABLE, after a
CANCELLED that came from elsewhere, and after RESOURCE_EXHAUSTED where the server says when. Waits are random in
[0, b), b growing from 0.1 to 2 seconds, or what the server asks for. Opening and forking a session are tried again
only where the server said that it did nothing, as a lost answer may have opened one. A session's rows are sent
again with `rewind`, so nothing is appended twice.

Threads. A Client may be used from any thread; a Session by one thread at a time. Calls block.
"""
from __future__ import annotations

import collections
import collections.abc
import dataclasses
import enum
import functools
import operator
import queue
import random
import re
import struct
import threading
import time
from typing import Any, Callable, Iterable, Iterator, Optional, Union

import grpc
import numpy as np

try:
    import ml_dtypes
except ImportError:  # only bfloat16 needs it
    ml_dtypes = None

__all__ = [
    "Client", "Session", "Result", "AttendError", "InvalidRequest", "TooLarge", "UnknownName", "SessionLost",
    "SessionMoved", "PositionMismatch", "Overloaded", "Unavailable", "DeadlineExceeded", "Unsupported",
    "RawLayout", "RawOptions", "ServerInfo", "Limits", "Model", "Layer", "SessionInfo", "LayerState", "Timing",
    "DType", "Reason",
]

# ---- Errors ----

_CODES = ("OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
          "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE",
          "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED")


class AttendError(Exception):
    """A call that failed. str() is one line: code, reason and message, which names field, got and wanted.

    code: gRPC status code, e.g. "UNAVAILABLE".
    reason: the server's, e.g. "DRAINING" (README, "Errors"); "" when the error did not come from an attend server,
        but from the network, a proxy or this client.
    message: the text alone.
    field, got, wanted: the offending field of the request and its values, in words; "" where none is to blame.
    sequences: indices of every offending sequence of the request.
    cached: tokens the layer has cached (POSITION_MISMATCH).
    retry_after: seconds after which a retry may succeed; 0 = not said.
    replica: the replica that owns the session (SESSION_MOVED).
    retryable: the same call may succeed later.
    outcome_unknown: an answer got lost: the call may have been carried out.
    attempts: calls made; 0 = refused by this client before sending.
    """

    def __init__(self, message: str = "", *, code: str = "UNKNOWN", reason: str = "", field: str = "",
                 got: str = "", wanted: str = "", sequences: tuple[int, ...] = (), cached: int = 0,
                 retry_after: float = 0.0, replica: str = "", outcome_unknown: bool = False):
        super().__init__(message)
        self.message = message
        self.code = code
        self.reason = reason
        self.field = field
        self.got = got
        self.wanted = wanted
        self.sequences = tuple(sequences)
        self.cached = cached
        self.retry_after = retry_after
        self.replica = replica
        self.retryable = False
        self.outcome_unknown = outcome_unknown
        self.attempts = 0

    def __str__(self) -> str:
        return " ".join(f"{self.code} {self.reason}".split()) + ": " + " ".join(self.message.split())


class InvalidRequest(AttendError, ValueError):
    """INVALID_ARGUMENT: a shape, dtype, size or option is wrong; `field`, `got` and `wanted` say which."""


class TooLarge(InvalidRequest):
    """TOO_LARGE: above message_bytes, response_bytes or request_tokens (Limits). Split the call."""


class UnknownName(AttendError, LookupError):
    """UNKNOWN_MODEL or UNKNOWN_LAYER: Client.models() lists what there is."""


class SessionLost(AttendError):
    """The session is gone: open one and append its rows again.

    `reason` is SESSION_EXPIRED (idle for longer than its ttl), SESSION_CLOSED, SESSION_EVICTED,
    SESSION_LOST_IN_RESTART (the server was started anew) or SESSION_NOT_FOUND (ended long ago, or never was).
    """


class SessionMoved(SessionLost):
    """SESSION_MOVED: this server does not have the session, the one named in `replica` does."""


class PositionMismatch(AttendError):
    """POSITION_MISMATCH: the layer has `cached` tokens, another number than this Session counted: another client
    appended or truncated. Nothing was changed. Session.refresh() takes over what the server has."""


class Overloaded(AttendError):
    """RESOURCE_EXHAUSTED: QUEUE_FULL, KV_EXHAUSTED (sessions fill the cache) or QUOTA (max_tokens, too many
    sessions). Where it helps to wait, `retry_after` says how long."""


class Unavailable(AttendError, ConnectionError):
    """UNAVAILABLE: no connection, or the server is DRAINING (about to stop) or STARTING."""


class DeadlineExceeded(AttendError, TimeoutError):
    """DEADLINE_EXCEEDED: no answer within the timeout."""


class Unsupported(AttendError):
    """UNIMPLEMENTED: valid, but not built into this server."""


_SESSION_REASONS = ("SESSION_NOT_FOUND", "SESSION_EXPIRED", "SESSION_EVICTED", "SESSION_CLOSED",
                    "SESSION_LOST_IN_RESTART")
_BY_REASON = {"TOO_LARGE": TooLarge, "UNKNOWN_MODEL": UnknownName, "UNKNOWN_LAYER": UnknownName,
              "SESSION_MOVED": SessionMoved, "POSITION_MISMATCH": PositionMismatch,
              **dict.fromkeys(_SESSION_REASONS, SessionLost)}
_BY_CODE = {"INVALID_ARGUMENT": InvalidRequest, "RESOURCE_EXHAUSTED": Overloaded, "UNAVAILABLE": Unavailable,
            "DEADLINE_EXCEEDED": DeadlineExceeded, "UNIMPLEMENTED": Unsupported}


def _make_error(message: str, code: str, reason: str = "", **fields: Any) -> AttendError:
    kind = _BY_REASON.get(reason) or _BY_CODE.get(code, AttendError)
    return kind(message, code=code, reason=reason, **fields)


def _local_error(field: str, got: Any, wanted: str, reason: str = "INVALID_FIELD") -> AttendError:
    """What this client refuses before sending."""
    return _make_error(f"{field}: got {got}, wanted {wanted}", "INVALID_ARGUMENT", reason, field=field,
                       got=str(got), wanted=wanted)


# ---- The wire: protobuf messages as dataclasses whose fields carry number, type and label ----


class DType(enum.IntEnum):
    """Element types."""
    UNSPECIFIED = 0
    F32 = 1
    F16 = 2
    BF16 = 3
    I32 = 4
    I8 = 5


class Mask(enum.IntEnum):
    FROM_MODEL = 0
    CAUSAL = 1
    BIDIRECTIONAL = 2


class Mode(enum.IntEnum):
    NONE = 0
    FULL = 1


class Reason(enum.IntEnum):
    """Why the server refused a call; README, "Errors", says what to do. AttendError.reason holds the name."""
    REASON_UNSPECIFIED = 0
    INVALID_FIELD = 1
    UNKNOWN_MODEL = 2
    UNKNOWN_LAYER = 3
    SESSION_NOT_FOUND = 4
    SESSION_EXPIRED = 5
    SESSION_EVICTED = 6
    SESSION_CLOSED = 7
    SESSION_LOST_IN_RESTART = 8
    SESSION_MOVED = 9
    POSITION_MISMATCH = 10
    QUEUE_FULL = 11
    KV_EXHAUSTED = 12
    QUOTA = 13
    TOO_LARGE = 14
    DRAINING = 15
    STARTING = 16
    DEADLINE = 17
    CANCELLED = 18
    ENGINE_FAULT = 19
    UNSUPPORTED = 20
    CONTEXT_CONFLICT = 21


_DEFAULTS = {"int32": 0, "int64": 0, "bool": False, "float": 0.0, "string": "", "bytes": b""}


def _wire(number: int, kind: Any, label: str = "") -> Any:
    """A dataclass field. kind: a name of _DEFAULTS, an IntEnum or a message class. label: "repeated", "optional"
    (None = absent) or "" (the default is not sent; messages: None = absent)."""
    metadata = {"number": number, "kind": kind, "label": label}
    if label == "repeated":
        return dataclasses.field(default_factory=list, metadata=metadata)
    if label == "optional" or dataclasses.is_dataclass(kind):
        return dataclasses.field(default=None, metadata=metadata)
    return dataclasses.field(default=_DEFAULTS[kind] if isinstance(kind, str) else kind(0), metadata=metadata)


@dataclasses.dataclass
class Tensor:
    dtype: DType = _wire(1, DType)
    shape: list[int] = _wire(2, "int64", "repeated")
    data: Any = _wire(3, "bytes")  # bytes-like, or a list of such: sent one after another


@dataclasses.dataclass
class Sequence:
    length: int = _wire(1, "int64")
    session_id: str = _wire(2, "string")
    position: Optional[int] = _wire(3, "int64", "optional")
    rewind: bool = _wire(4, "bool")
    no_append: bool = _wire(5, "bool")
    context_length: Optional[int] = _wire(6, "int64", "optional")


@dataclasses.dataclass
class RawOptions:
    """How raw queries attend to raw keys.

    causal: bottom-right aligned: row i sees keys j <= i + key rows - rows
    scale: multiplies q.k; None = 1/sqrt(head_dim)
    window: last `window` keys, own token included, not causal: |j - p| < window; 0 = none
    softcap: cap x tanh(score / cap) after the scale; 0 = off
    alibi_slopes: q_heads values or none: adds slope x (j - p), not causal: -slope x |j - p|
    sinks: q_heads values or none: one more term exp(sink) in each softmax's denominator
    """
    causal: bool = _wire(1, "bool")
    scale: Optional[float] = _wire(2, "float", "optional")
    window: int = _wire(3, "int64")
    softcap: float = _wire(4, "float")
    alibi_slopes: list[float] = _wire(5, "float", "repeated")
    sinks: list[float] = _wire(6, "float", "repeated")


@dataclasses.dataclass
class RawInput:
    q: Optional[Tensor] = _wire(1, Tensor)
    k: Optional[Tensor] = _wire(2, Tensor)
    v: Optional[Tensor] = _wire(3, Tensor)
    options: Optional[RawOptions] = _wire(4, RawOptions)


@dataclasses.dataclass
class WeightsRequest:
    mode: Mode = _wire(1, Mode)
    heads: list[int] = _wire(2, "int32", "repeated")
    row_begin: int = _wire(3, "int64")
    row_end: Optional[int] = _wire(4, "int64", "optional")


@dataclasses.dataclass
class AttendRequest:
    model: str = _wire(1, "string")
    layer: str = _wire(2, "string")
    sequences: list[Sequence] = _wire(3, Sequence, "repeated")
    request_id: str = _wire(4, "string")
    output_dtype: DType = _wire(5, DType)
    mask: Mask = _wire(6, Mask)
    weights: Optional[WeightsRequest] = _wire(7, WeightsRequest)
    attention_bias: Optional[Tensor] = _wire(12, Tensor)
    context: Optional[Tensor] = _wire(13, Tensor)
    raw: Optional[RawInput] = _wire(14, RawInput)
    hidden_states: Optional[Tensor] = _wire(15, Tensor)
    timeout_us: int = _wire(17, "int64")


@dataclasses.dataclass
class AttentionWeights:
    weights: Optional[Tensor] = _wire(1, Tensor)


@dataclasses.dataclass
class Timing:
    """Where a call's time went on the server, and what shared its last batch.

    queue_us: received until the first batch started
    compute_us: time in batches
    total_us: received until answered
    batch_tokens: rows of the last batch, all clients together
    batch_sequences: sequences of the last batch
    """
    queue_us: int = _wire(1, "int64")
    compute_us: int = _wire(2, "int64")
    total_us: int = _wire(3, "int64")
    batch_tokens: int = _wire(4, "int64")
    batch_sequences: int = _wire(5, "int64")
    replica: str = _wire(6, "string")


@dataclasses.dataclass
class Any_:
    type_url: str = _wire(1, "string")
    value: bytes = _wire(2, "bytes")


@dataclasses.dataclass
class Status:
    code: int = _wire(1, "int32")
    message: str = _wire(2, "string")
    details: list[Any_] = _wire(3, Any_, "repeated")


@dataclasses.dataclass
class ErrorDetail:
    reason: Reason = _wire(1, Reason)
    field: str = _wire(2, "string")
    got: str = _wire(3, "string")
    wanted: str = _wire(4, "string")
    sequences: list[int] = _wire(5, "int32", "repeated")
    cached: int = _wire(6, "int64")
    retry_after_ms: int = _wire(7, "int64")
    replica: str = _wire(8, "string")


@dataclasses.dataclass
class AttendResponse:
    request_id: str = _wire(1, "string")
    positions: list[int] = _wire(2, "int64", "repeated")
    timing: Optional[Timing] = _wire(3, Timing)
    error: Optional[Status] = _wire(4, Status)
    weights: list[AttentionWeights] = _wire(5, AttentionWeights, "repeated")
    output: Optional[Tensor] = _wire(15, Tensor)


@dataclasses.dataclass
class RawLayout:
    """Shape and options of a raw session, the same for all its layers "0" .. "layers - 1".

    layers: 1 or more
    kv_heads: divides q_heads
    head_dim: 1..1024 (on a GPU 256)
    v_head_dim: 1..1024 (on a GPU 256); 0 = head_dim
    kv_dtype: F32 (default), BF16, F16 or I8 (CPU only)
    """
    layers: int = _wire(1, "int32")
    q_heads: int = _wire(2, "int32")
    kv_heads: int = _wire(3, "int32")
    head_dim: int = _wire(4, "int32")
    v_head_dim: int = _wire(5, "int32")
    kv_dtype: DType = _wire(6, DType)
    options: Optional[RawOptions] = _wire(7, RawOptions)


@dataclasses.dataclass
class OpenSessionRequest:
    model: str = _wire(1, "string")
    raw: Optional[RawLayout] = _wire(2, RawLayout)
    layers: list[str] = _wire(3, "string", "repeated")
    ttl_seconds: int = _wire(4, "int64")
    max_tokens: int = _wire(5, "int64")


@dataclasses.dataclass
class GetSessionRequest:
    session_id: str = _wire(1, "string")


@dataclasses.dataclass
class ForkSessionRequest:
    session_id: str = _wire(1, "string")
    length: Optional[int] = _wire(2, "int64", "optional")


@dataclasses.dataclass
class TruncateSessionRequest:
    session_id: str = _wire(1, "string")
    length: int = _wire(2, "int64")


@dataclasses.dataclass
class CloseSessionRequest:
    session_id: str = _wire(1, "string")


@dataclasses.dataclass
class CloseSessionResponse:
    pass


@dataclasses.dataclass
class LayerState:
    """One layer of a session.

    length: cached tokens of a self-attention layer
    context_length: cached context of a cross-attention layer
    """
    layer: str = _wire(1, "string")
    length: int = _wire(2, "int64")
    context_length: int = _wire(3, "int64")


@dataclasses.dataclass
class SessionInfo:
    """A session as the server sees it.

    model: "raw" for raw sessions
    length: the longest self-attention layer, tokens
    kv_bytes: memory held, shared blocks counted in full
    bit_exact: the history is what the engine computed
    """
    id: str = _wire(1, "string")
    model: str = _wire(2, "string")
    replica: str = _wire(3, "string")
    length: int = _wire(4, "int64")
    layers: list[LayerState] = _wire(5, LayerState, "repeated")
    kv_bytes: int = _wire(6, "int64")
    ttl_seconds: int = _wire(7, "int64")
    idle_seconds: int = _wire(8, "int64")
    durable_length: int = _wire(9, "int64")
    bit_exact: bool = _wire(10, "bool")


@dataclasses.dataclass
class ListModelsRequest:
    pass


@dataclasses.dataclass
class Layer:
    """One attention layer of a model.

    name: what `layer` of attend takes
    module: the module in the checkpoint, e.g. model.layers.5.self_attn
    input_point: in words: which tensor of the model `rows` must be
    d_model: width of rows
    context_width: width of context; 0 without cross-attention
    mask_selectable: `mask` may be chosen
    window: keys a row sees, itself included; 0 = no window
    positions: "none", "rope", "alibi"
    sessions: keeps a history
    cross_attention: takes `context`
    """
    name: str = _wire(1, "string")
    module: str = _wire(2, "string")
    input_point: str = _wire(3, "string")
    d_model: int = _wire(4, "int32")
    context_width: int = _wire(5, "int32")
    output_width: int = _wire(6, "int32")
    q_heads: int = _wire(7, "int32")
    kv_heads: int = _wire(8, "int32")
    head_dim: int = _wire(9, "int32")
    v_head_dim: int = _wire(10, "int32")
    causal: bool = _wire(11, "bool")
    mask_selectable: bool = _wire(12, "bool")
    window: int = _wire(13, "int64")
    positions: str = _wire(14, "string")
    sessions: bool = _wire(15, "bool")
    cross_attention: bool = _wire(16, "bool")
    weight_bytes: int = _wire(17, "int64")
    kv_bytes_per_token: int = _wire(18, "int64")


@dataclasses.dataclass
class Model:
    """A loaded model.

    family: model_type of its config.json
    fingerprint: hash of configuration and attention weights
    max_positions: informs, never refuses; 0 = unknown
    numerics_id: equal ids give equal bits
    """
    name: str = _wire(1, "string")
    family: str = _wire(2, "string")
    weight_dtype: DType = _wire(3, DType)
    kv_dtype: DType = _wire(4, DType)
    compute_dtype: DType = _wire(5, DType)
    layers: list[Layer] = _wire(6, Layer, "repeated")
    fingerprint: str = _wire(7, "string")
    max_positions: int = _wire(8, "int64")
    numerics_id: str = _wire(9, "string")


@dataclasses.dataclass
class ListModelsResponse:
    models: list[Model] = _wire(1, Model, "repeated")


@dataclasses.dataclass
class GetServerInfoRequest:
    pass


@dataclasses.dataclass
class Limits:
    """The server's limits; each is its flag of that name.

    message_bytes: largest request message
    response_bytes: largest response message
    request_tokens: rows of one request
    kv_bytes: cache memory of all sessions
    deadline_ms: longest timeout granted
    """
    message_bytes: int = _wire(1, "int64")
    response_bytes: int = _wire(2, "int64")
    request_tokens: int = _wire(3, "int64")
    batch_tokens: int = _wire(4, "int64")
    queue_requests: int = _wire(5, "int64")
    queue_tokens: int = _wire(6, "int64")
    queue_bytes: int = _wire(7, "int64")
    kv_bytes: int = _wire(8, "int64")
    sessions: int = _wire(9, "int64")
    deadline_ms: int = _wire(10, "int64")
    session_ttl_seconds: int = _wire(11, "int64")
    stream_items_in_flight: int = _wire(12, "int64")


@dataclasses.dataclass
class ServerInfo:
    """What serves.

    engine: "cpu" or "cuda"
    """
    version: str = _wire(1, "string")
    replica: str = _wire(2, "string")
    engine: str = _wire(3, "string")
    device: str = _wire(4, "string")
    isa: str = _wire(5, "string")
    numerics_id: str = _wire(6, "string")
    threads: int = _wire(7, "int32")
    limits: Optional[Limits] = _wire(8, Limits)
    draining: bool = _wire(9, "bool")


@functools.lru_cache(maxsize=None)
def _table(message_type: type) -> tuple[tuple[int, str, Any, str], ...]:
    """(number, name, kind, label) of each field."""
    return tuple((field.metadata["number"], field.name, field.metadata["kind"], field.metadata["label"])
                 for field in dataclasses.fields(message_type))


@functools.lru_cache(maxsize=None)
def _by_number(message_type: type) -> dict[int, tuple[str, Any, str]]:
    return {number: (name, kind, label) for number, name, kind, label in _table(message_type)}


def _varint(value: int) -> bytes:
    """0 <= value < 2**64."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _scalar(kind: Any, value: Any, name: str) -> bytes:
    if kind == "float":
        try:
            return struct.pack("<f", value)
        except (struct.error, OverflowError, TypeError):
            raise _local_error(name, repr(value), "a number within float32") from None
    bits = 31 if kind == "int32" or isinstance(kind, type) else 63
    try:
        value = operator.index(value)
    except TypeError:
        raise _local_error(name, repr(value), "an integer") from None
    if not -1 << bits <= value < 1 << bits:
        raise _local_error(name, value, f"an integer of {bits + 1} bits")
    return _varint(value & (1 << 64) - 1)  # negative ones take ten bytes, sign-extended


def _is_scalar(kind: Any) -> bool:
    return kind in ("int32", "int64", "bool", "float") or isinstance(kind, type) and issubclass(kind, enum.IntEnum)


def _write_payload(kind: Any, value: Any, name: str, parts: list[Any]) -> int:
    if _is_scalar(kind):  # packed
        parts.append(b"".join(_scalar(kind, one, name) for one in value))
    elif kind == "string":
        parts.append(value.encode())
    elif kind == "bytes":
        chunks = value if isinstance(value, list) else [value]
        parts.extend(chunks)
        return sum(len(chunk) for chunk in chunks)
    else:
        return _write(value, parts)
    return len(parts[-1])


def _write(message: Any, parts: list[Any]) -> int:
    """Appends the encoding to `parts`, bytes fields without copying them; returns its size."""
    size = 0
    for number, name, kind, label in _table(type(message)):
        value = getattr(message, name)
        if label == "repeated":
            if len(value) == 0:
                continue
        elif value is None or (label == "" and not dataclasses.is_dataclass(kind) and not value):
            continue
        if _is_scalar(kind) and label != "repeated":
            parts.append(_varint(number << 3 | (5 if kind == "float" else 0)) + _scalar(kind, value, name))
            size += len(parts[-1])
            continue
        for item in value if label == "repeated" and not _is_scalar(kind) else (value,):
            head = len(parts)
            parts.append(b"")  # becomes tag and length
            length = _write_payload(kind, item, name, parts)
            parts[head] = _varint(number << 3 | 2) + _varint(length)
            size += len(parts[head]) + length
    return size


def _encode(message: Any) -> bytes:
    parts: list[Any] = []
    _write(message, parts)
    return b"".join(parts)


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]  # IndexError: cut off
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & (1 << 64) - 1, at
    raise ValueError("a varint of more than ten bytes")


def _from_varint(kind: Any, value: int) -> Any:
    if kind == "bool":
        return value != 0
    value -= (value >> 63) << 64
    if isinstance(kind, type):
        return kind(value) if value in kind._value2member_map_ else value  # a newer server's: stays a number
    return value


def _read_payload(kind: Any, data: memoryview) -> Any:
    if kind == "bytes":
        return data
    return str(data, "utf-8", "replace") if kind == "string" else _decode(kind, data)


_MALFORMED = (ValueError, IndexError, struct.error)


def _decode(message_type: type, data: Union[bytes, memoryview]) -> Any:
    """The message; its bytes fields are views of `data`. One of _MALFORMED when `data` is no such message."""
    data = memoryview(data)
    message = message_type()
    fields = _by_number(message_type)
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        wire_type = key & 7
        value: Any = None
        if wire_type == 0:
            value, at = _read_varint(data, at)
        else:
            if wire_type == 2:
                size, at = _read_varint(data, at)
            elif wire_type in (1, 5):
                size = 8 if wire_type == 1 else 4
            else:
                raise ValueError(f"wire type {wire_type}")
            if size > len(data) - at:
                raise ValueError("a field is cut off")
            value = data[at:at + size]
            at += size
        if key >> 3 not in fields:
            continue
        name, kind, label = fields[key >> 3]
        if not _is_scalar(kind):
            values = [_read_payload(kind, value)] if wire_type == 2 else []
        elif kind == "float":  # one, or packed ones
            values = [one for one, in struct.iter_unpack("<f", value)] if wire_type in (2, 5) else []
        elif wire_type == 2:
            values, inner = [], 0
            while inner < len(value):
                one, inner = _read_varint(value, inner)
                values.append(_from_varint(kind, one))
        else:
            values = [_from_varint(kind, value)] if wire_type == 0 else []
        if label == "repeated":
            getattr(message, name).extend(values)
        elif values:
            setattr(message, name, values[-1])
    return message


# ---- Arrays and tensors ----

_DTYPES = {"float32": DType.F32, "float16": DType.F16, "bfloat16": DType.BF16}
_WANTED_DTYPES = "float32, float16 or bfloat16"
Array = Any  # what numpy takes as an array


def _dtype_number(field: str, dtype: Any) -> DType:
    """A numpy dtype, its name, a DType, or None (unspecified)."""
    if dtype is None or isinstance(dtype, DType):
        number = dtype or DType.UNSPECIFIED
    else:
        name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
        if name not in _DTYPES:
            raise _local_error(field, name, _WANTED_DTYPES)
        number = _DTYPES[name]
    if number == DType.BF16 and ml_dtypes is None:
        raise ImportError(f"{field} bfloat16 needs the Python package ml_dtypes: pip install ml_dtypes")
    return number


def _array(field: str, values: Array, dimensions: tuple[int, ...]) -> np.ndarray:
    array = np.asarray(values)
    if array.dtype.name not in _DTYPES:
        hint = " (convert with .astype(np.float32))" if array.dtype.kind in "fiu" else ""
        raise _local_error(field, array.dtype.name, _WANTED_DTYPES + hint)
    if array.ndim not in dimensions:
        raise _local_error(field, f"{array.ndim} dimensions", " or ".join(map(str, dimensions)))
    return array


def _bytes_of(array: np.ndarray) -> memoryview:
    """The elements, little-endian and row-major; copies only what is not so already."""
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return array.reshape(-1).view(np.uint8).data


def _tensor(field: str, values: Array, dimensions: tuple[int, ...]) -> Tensor:
    array = _array(field, values, dimensions)
    return Tensor(_DTYPES[array.dtype.name], list(array.shape), _bytes_of(array))


def _packed(field: str, arrays: list[Array]) -> Tensor:
    """[rows of all, width] of 2-D arrays of one width and dtype; their bytes stay where they are."""
    checked = [_array(f"{field}[{i}]", one, (2,)) for i, one in enumerate(arrays)]
    if not checked:
        raise _local_error(field, "an empty list", "at least one array")
    first = checked[0]
    for i, one in enumerate(checked):
        if one.shape[1] != first.shape[1] or one.dtype.name != first.dtype.name:
            raise _local_error(f"{field}[{i}]", f"{one.dtype.name} of width {one.shape[1]}",
                               f"that of {field}[0], {first.dtype.name} of width {first.shape[1]}")
    return Tensor(_DTYPES[first.dtype.name], [sum(len(one) for one in checked), first.shape[1]],
                  [_bytes_of(one) for one in checked])


def _to_array(tensor: Optional[Tensor]) -> Optional[np.ndarray]:
    """A copy: aligned, writable, free of the response it came in. ValueError if the bytes don't fit the shape."""
    if tensor is None:
        return None
    if tensor.dtype == DType.BF16:
        if ml_dtypes is None:
            raise ImportError("a bfloat16 answer needs the Python package ml_dtypes: pip install ml_dtypes")
        flat = np.frombuffer(tensor.data, "<u2").astype(np.uint16).view(ml_dtypes.bfloat16)
    elif tensor.dtype in (DType.F32, DType.F16, DType.I32):
        wire = {DType.F32: "<f4", DType.F16: "<f2", DType.I32: "<i4"}[tensor.dtype]
        flat = np.frombuffer(tensor.data, wire).astype(np.dtype(wire).newbyteorder("="))
    else:
        raise ValueError(f"a tensor of dtype {tensor.dtype}")
    return flat.reshape(tensor.shape)


# ---- Calls: errors from the wire, and when to try again ----


def _error_from_status(code: str, message: str, status: Optional[Status]) -> AttendError:
    """`status` holds the ErrorDetail; only an attend server sends one, so without it the outcome is unknown."""
    for item in status.details if status else ():
        if not item.type_url.endswith("/attend.v1.ErrorDetail"):
            continue
        detail = _decode(ErrorDetail, item.value)
        reason = detail.reason.name if isinstance(detail.reason, Reason) else f"REASON_{detail.reason}"
        return _make_error(message, code, reason, field=detail.field, got=detail.got, wanted=detail.wanted,
                           sequences=tuple(detail.sequences), cached=detail.cached, replica=detail.replica,
                           retry_after=max(0, detail.retry_after_ms) / 1000)
    return _make_error(message, code, outcome_unknown=True)


def _error_from_rpc(rpc: Any, address: str) -> tuple[AttendError, Optional[str]]:
    """The error of a failed call, and its grpc-retry-pushback-ms."""
    trailers = dict(rpc.trailing_metadata() or ())
    code, message = rpc.code().name, rpc.details() or ""
    try:
        error = _error_from_status(code, message, _decode(Status, trailers.get("grpc-status-details-bin", b"")))
    except _MALFORMED:
        error = _error_from_status(code, message, None)
    if error.outcome_unknown:
        error.message = f"{address}: {error.message}"
    return error, trailers.get("grpc-retry-pushback-ms")


def _read_pushback(pushback: Optional[str]) -> tuple[bool, Optional[float]]:
    """(may be tried again, seconds to wait or None). Negative or no number forbids it."""
    if pushback is None:
        return True, None
    try:
        milliseconds = int(pushback)
    except ValueError:
        return False, None
    return milliseconds >= 0, milliseconds / 1000 if milliseconds >= 0 else None


def _retry_delay(error: AttendError, pushback: Optional[str], safe: bool, remaining: float, attempts: int,
                 uniform: float) -> Optional[float]:
    """Seconds to wait before the next attempt, None = give up; sets error.retryable.

    safe: twice is the same as once. uniform: random in [0, 1). The policy is that of client/retry.cc.
    """
    allowed, wait = _read_pushback(pushback)
    if wait is not None and not error.retry_after:
        error.retry_after = wait
    told = wait is not None or error.retry_after > 0
    error.retryable = allowed and (error.code in ("UNAVAILABLE", "CANCELLED") or
                                   error.code == "RESOURCE_EXHAUSTED" and told)
    if not error.retryable or error.attempts >= attempts or (error.outcome_unknown and not safe):
        return None
    if wait is None:
        # Full jitter: clients that failed together must not come back together.
        wait = error.retry_after or min(2.0, 0.1 * 2 ** min(error.attempts - 1, 20)) * uniform
    return wait if wait < remaining else None


def _replica_of(session_id: str) -> str:
    """The replica in "<replica>.<start>.<random>", split from the right as host names have dots; else ""."""
    parts = session_id.rsplit(".", 2)
    return parts[0] if len(parts) == 3 else ""


# ---- Requests and results ----

_MASKS = {None: Mask.FROM_MODEL, "causal": Mask.CAUSAL, "bidirectional": Mask.BIDIRECTIONAL}


@dataclasses.dataclass
class Result:
    """What a call of attend returned.

    output: the rows' shape with the layer's output width; a list of arrays when rows was a list; padded rows are
        zeros. Raw: [rows, q_heads, v_head_dim].
    positions: per sequence, tokens the layer has cached after the call (a cross layer: its context); stateless 0.
    weights: per sequence, float32 [heads, rows, keys]; empty unless asked for.
    timing: queue_us, compute_us, total_us, batch_tokens, batch_sequences, replica.
    request_id: that of the call.
    """
    output: Any
    positions: list[int]
    weights: list[np.ndarray]
    timing: Timing
    request_id: str = ""


def _set_options(request: AttendRequest, mask: Optional[str] = None, output_dtype: Any = None,
                 weights: bool = False, heads: Iterable[int] = (),
                 weight_rows: Optional[tuple[int, Optional[int]]] = None, attention_bias: Array = None,
                 request_id: str = "") -> AttendRequest:
    """The options that every call of attend has; Client.attend describes them."""
    if mask not in _MASKS:
        raise _local_error("mask", repr(mask), "'causal', 'bidirectional' or None")
    request.mask = _MASKS[mask]
    request.output_dtype = _dtype_number("output_dtype", output_dtype)
    heads = list(heads)
    if weights or heads or weight_rows is not None:
        begin, end = weight_rows or (0, None)
        request.weights = WeightsRequest(Mode.FULL, heads, begin, end)
    if attention_bias is not None:
        request.attention_bias = _tensor("attention_bias", attention_bias, (4,))
    request.request_id = request_id
    return request


def _set_rows(request: AttendRequest, rows: Array, lengths: Optional[Iterable[int]]) -> Optional[list[int]]:
    """Sets hidden_states; returns the lengths of its sequences, None = one (2-D) or all of full length (3-D)."""
    if isinstance(rows, (list, tuple)) and all(np.ndim(one) > 0 for one in rows):
        if lengths is not None:
            raise _local_error("lengths", "lengths", "none with a list of arrays, which says them")
        request.hidden_states = _packed("rows", list(rows))
        return [len(one) for one in rows]
    request.hidden_states = _tensor("rows", rows, (2, 3))
    return None if lengths is None else list(lengths)


def _attend_request(layer: str, rows: Array, *, model: str = "", lengths: Optional[Iterable[int]] = None,
                    context: Array = None, context_lengths: Optional[Iterable[int]] = None,
                    **options: Any) -> tuple[AttendRequest, Optional[list[int]]]:
    """A stateless request, and where its output is to be cut: the lengths of a list of rows, else None."""
    request = _set_options(AttendRequest(model=model, layer=str(layer)), **options)
    row_lengths = _set_rows(request, rows, lengths)
    row_shape = request.hidden_states.shape
    count = len(row_lengths) if row_lengths is not None else (1 if len(row_shape) == 2 else row_shape[0])
    of_context = None if context_lengths is None else list(context_lengths)
    if isinstance(context, (list, tuple)):
        present = [one for one in context if one is not None]
        request.context = _packed("context", present) if present else None
        of_context = [None if one is None else len(one) for one in context]
    elif context is not None:
        request.context = _tensor("context", context, (2, 3))
        if of_context is None and row_lengths is not None:
            of_context = [request.context.shape[-2]] * count
    if of_context is not None and len(of_context) != count:
        raise _local_error("context", f"{len(of_context)} sequences", f"those of rows, {count}")
    if row_lengths is not None or of_context is not None:
        full = row_lengths or [row_shape[-2]] * count
        request.sequences = [Sequence(length=length, context_length=of_context[i] if of_context else None)
                             for i, length in enumerate(full)]
    return request, row_lengths if isinstance(rows, (list, tuple)) else None


def _raw_input(q: Array, k: Array, v: Array) -> RawInput:
    named = {"q": q, "k": k, "v": v}
    return RawInput(**{name: _tensor(name, array, (3,)) for name, array in named.items() if array is not None})


def _to_result(response: AttendResponse, cut: Optional[list[int]] = None) -> Result:
    try:
        output = _to_array(response.output)
        weights = [_to_array(one.weights) for one in response.weights]
    except ValueError as what:
        raise _make_error(f"malformed answer: {what}", "INTERNAL", outcome_unknown=True) from None
    if cut is not None:
        output = np.split(output, np.cumsum(cut)[:-1])
    return Result(output, response.positions, weights, response.timing or Timing(), response.request_id)


# ---- The client ----

_SERVICE = "/attend.v1.Attention/"
_SMALLEST_RECEIVE_BYTES = 4 << 20  # gRPC's own default
_RESPONSE_SLACK_BYTES = 64 << 10  # what a response carries around its tensors
_LONGEST_TIMEOUT_SECONDS = 86400.0  # gRPC takes much longer ones for passed; the server grants deadline_ms anyway


def _make_channel(address: str, receive_bytes: int) -> grpc.Channel:
    return grpc.insecure_channel(address, options=[
        ("grpc.enable_http_proxy", 0),  # http_proxy of the environment would take calls inside a cluster out of it
        ("grpc.use_local_subchannel_pool", 1),  # channels of equal options would share one connection
        ("grpc.enable_retries", 0),  # gRPC's own know nothing of sessions
        ("grpc.initial_reconnect_backoff_ms", 100),  # the default of up to 120 s is too long after a rollout
        ("grpc.max_reconnect_backoff_ms", 500),  # below what the attempts of a call wait together
        ("grpc.max_send_message_length", -1),  # checked against message_bytes before sending
        ("grpc.max_receive_message_length", receive_bytes)])


def _receive_bytes(limits: Limits) -> int:
    if limits.response_bytes <= 0:
        return -1
    wanted = max(limits.response_bytes, _SMALLEST_RECEIVE_BYTES) + _RESPONSE_SLACK_BYTES
    return wanted if wanted < 1 << 31 else -1


class _Stream:
    """One AttendStream call at a time, opened again with its unanswered items. One thread at a time."""

    def __init__(self, client: Client, timeout: float):
        self.unanswered: collections.deque = collections.deque()  # (body, cut)
        self._client = client
        self._timeout = timeout
        self._wire: Any = None  # None while not connected

    def send(self, request: AttendRequest, cut: Optional[list[int]]) -> None:
        request.timeout_us = int(self._timeout * 1e6)
        body = _encode(request)
        self._client._check_size(len(body))
        self.unanswered.append((body, cut))
        if self._wire is None:
            self._open()
        else:
            self._outgoing.put(body)

    def _open(self) -> None:
        self._client._check_open()
        self._outgoing: queue.SimpleQueue = queue.SimpleQueue()
        self._incoming: queue.SimpleQueue = queue.SimpleQueue()
        for body, _ in self.unanswered:
            self._outgoing.put(body)
        self._wire = self._client._data.stream_stream(_SERVICE + "AttendStream")(iter(self._outgoing.get, None))
        # grpcio can't wait for an answer with a time limit; a queue can.
        threading.Thread(target=self._pump, args=(self._wire, self._incoming), daemon=True).start()

    @staticmethod
    def _pump(wire: Any, incoming: queue.SimpleQueue) -> None:
        try:
            for answer in wire:
                incoming.put(answer)
            incoming.put(None)
        except grpc.RpcError as error:
            incoming.put(error)

    def receive(self) -> Union[Result, AttendError]:
        """Waits for the oldest unanswered item."""
        # The item's own deadline is the server's matter; the second lets its answer arrive.
        end = time.monotonic() + self._timeout + 1
        made = 0
        while True:
            made += 1
            pushback = None
            try:
                answer = self._incoming.get(timeout=max(0.0, end - time.monotonic()))
                if isinstance(answer, bytes):
                    response = _decode(AttendResponse, answer)
                    _, cut = self.unanswered.popleft()
                    if response.error is None:
                        return _to_result(response, cut)
                    code = response.error.code
                    error = _error_from_status(_CODES[code] if 0 <= code < len(_CODES) else f"CODE_{code}",
                                               response.error.message, response.error)
                    error.attempts = made
                    return error
                if answer is None:
                    error = _make_error("stream: ended by the server before it answered every item", "UNAVAILABLE",
                                        outcome_unknown=True)
                else:
                    error, pushback = _error_from_rpc(answer, self._client.address)
            except queue.Empty:
                error = _make_error("stream: no answer within the timeout", "DEADLINE_EXCEEDED", "DEADLINE",
                                    outcome_unknown=True)
            except _MALFORMED as what:
                error = _make_error(f"malformed answer: {what}", "INTERNAL", outcome_unknown=True)
            self.end()
            error.attempts = made
            wait = _retry_delay(error, pushback, True, end - time.monotonic(), self._client.attempts,
                                random.random())
            if wait is None:
                self.unanswered.clear()
                raise error
            time.sleep(wait)
            self._open()

    def end(self) -> None:
        if self._wire is not None:
            self._outgoing.put(None)  # ends the thread in which grpcio takes what is to be sent
            self._wire.cancel()
            self._wire = None


def _is_address(address: str) -> bool:
    """gRPC would take a missing port as 443 and one above 65535 modulo 65536: another server's."""
    if re.match(r"(dns|ipv4|ipv6|unix|unix-abstract|xds):.", address):
        return True
    found = re.fullmatch(r"(\[[^\]]+\]|[^:/ \[\]]+):(\d{1,5})", address)
    return found is not None and 1 <= int(found[2]) <= 65535


class Client:
    """A connection to one server. Safe to use from any thread; calls block. Close it, or use it in `with`.

    address: as gRPC takes it: "127.0.0.1:50051", "dns:///attend:50051", "unix:/run/attend.sock".
    timeout: seconds one call may take, all its retries and waits included; every method takes another. The server
        grants at most its deadline_ms (60 s by default).
    attempts: calls made at most, the first included; 1 = never tried again.

    Connects at once and asks for the server's limits: Unavailable when nobody answers at the address,
    DeadlineExceeded when it takes longer than `timeout`. The connection comes back by itself when the server does.
    """

    def __init__(self, address: str, timeout: float = 30.0, attempts: int = 5):
        if attempts < 1:
            raise _local_error("attempts", attempts, "at least 1")
        if not isinstance(address, str) or not _is_address(address):
            raise _local_error("address", repr(address), "HOST:PORT with a port from 1 to 65535, unix:PATH, or a name "
                               "of gRPC with its scheme (dns:///HOST:PORT)")
        self.address = address
        self.timeout = timeout
        self.attempts = attempts
        self._closed = False
        self._limits = Limits()
        # Two connections, so that a small call never waits behind the bytes of a large one.
        self._control = _make_channel(address, _SMALLEST_RECEIVE_BYTES)
        self._data: Optional[grpc.Channel] = None
        try:
            self._limits = self.server_info().limits or Limits()
        except BaseException:
            self.close()
            raise
        self._data = _make_channel(address, _receive_bytes(self._limits))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection; running calls fail with CANCELLED. Open sessions stay on the server: until their
        ttl, or until another client closes them."""
        self._closed = True
        self._control.close()
        if self._data is not None:
            self._data.close()

    def server_info(self, timeout: Optional[float] = None) -> ServerInfo:
        """Version, replica, engine, device, limits and whether it drains, as of now."""
        return self._call(self._control, "GetServerInfo", GetServerInfoRequest(), ServerInfo, timeout)

    def models(self, timeout: Optional[float] = None) -> list[Model]:
        """The loaded models with their layers: names, widths, heads, and which tensor of the model each layer
        takes (Layer.input_point)."""
        return self._call(self._control, "ListModels", ListModelsRequest(), ListModelsResponse, timeout).models

    def attend(self, layer: str, rows: Array, *, model: str = "", lengths: Optional[Iterable[int]] = None,
               context: Array = None, context_lengths: Optional[Iterable[int]] = None, mask: Optional[str] = None,
               output_dtype: Any = None, weights: bool = False, heads: Iterable[int] = (),
               weight_rows: Optional[tuple[int, Optional[int]]] = None, attention_bias: Array = None,
               request_id: str = "", timeout: Optional[float] = None) -> Result:
        """Attention of one layer over sequences without a history. Returns a Result; `.output` is the array.

        layer: a Layer.name, e.g. "0" or "decoder.0.cross".
        rows: the hidden states that enter the attention module (Layer.input_point), one of
            [tokens, d_model]: one sequence, or with `lengths` several, one after another;
            a list of [tokens, d_model] of any lengths: several; the output is a list of arrays as well;
            [batch, tokens, d_model]: padded; with `lengths` the rows past a length are never read.
        model: a Model.name; "" = the only one.
        lengths: rows of each sequence.
        context: source states of cross-attention, in the form of rows: [rows, context_width] for one sequence; a
            list, None for a sequence without; or padded [batch, rows, context_width]. With `lengths`, a packed
            2-D one needs `context_lengths`.
        context_lengths: rows of context of each sequence.
        mask: "causal" or "bidirectional", where Layer.mask_selectable; None = as the model has it.
        output_dtype: "float32", "float16", "bfloat16" or the numpy dtype; None = that of the rows.
        weights: return the attention weights too, in Result.weights.
        heads: return the weights of these query heads; () = all.
        weight_rows: return the weights of rows (first, one past the last); None as the last = the end.
        attention_bias: float32 [sequences or 1, q_heads or 1, rows, keys], added to the scaled scores, -inf masks.
            rows = the longest length; keys are aligned to the right end of each sequence's keys.
        request_id: appears in the server's log; at most 1024 bytes.
        timeout: seconds for this call instead of the client's.
        """
        request, cut = _attend_request(
            layer, rows, model=model, lengths=lengths, context=context, context_lengths=context_lengths, mask=mask,
            output_dtype=output_dtype, weights=weights, heads=heads, weight_rows=weight_rows,
            attention_bias=attention_bias, request_id=request_id)
        return self._attend(request, timeout, cut=cut)

    def attend_raw(self, q: Array, k: Array, v: Array, *, options: Optional[RawOptions] = None,
                   lengths: Optional[Iterable[int]] = None, key_lengths: Optional[Iterable[int]] = None,
                   timeout: Optional[float] = None, **more: Any) -> Result:
        """Attention over projections the caller made (already rotated); no model is needed.

        q: [rows, q_heads, head_dim]. k: [key rows, kv_heads, head_dim], v: [key rows, kv_heads, v_head_dim];
            q_heads is a multiple of kv_heads. The output is [rows, q_heads, v_head_dim].
        options: RawOptions(causal=True, scale=..., window=..., softcap=..., alibi_slopes=[...], sinks=[...]).
        lengths: rows of q of each sequence, packed one after another; None = one sequence.
        key_lengths: rows of k and v of each sequence; None = lengths.
        more: output_dtype, weights, heads, weight_rows, attention_bias, request_id, as for attend.
        """
        request = _set_options(AttendRequest(raw=_raw_input(q, k, v)), **more)
        request.raw.options = options
        if lengths is not None:
            rows = list(lengths)
            keys: list[Optional[int]] = [None] * len(rows) if key_lengths is None else list(key_lengths)
            if len(keys) != len(rows):
                raise _local_error("key_lengths", f"{len(keys)} sequences", f"those of lengths, {len(rows)}")
            request.sequences = [Sequence(length=row, context_length=key) for row, key in zip(rows, keys)]
        elif key_lengths is not None:
            raise _local_error("key_lengths", "key_lengths alone", "lengths as well")
        return self._attend(request, timeout)

    def attend_stream(self, calls: Iterable[dict], *, ahead: Optional[int] = None,
                      timeout: Optional[float] = None) -> Iterator[Union[Result, AttendError]]:
        """Many stateless calls over one stream, answered in order: cheaper than attend for many small ones.

        calls: dicts of attend's arguments but timeout, e.g. {"layer": "0", "rows": rows, "model": "bert"}.
        ahead: calls taken from `calls` before the answer of the first is given out; None or more = as many as the
            server takes (stream_items_in_flight). 1 = one by one: a call may depend on the answer before it.
        timeout: seconds for each item.
        Yields one Result for each call, or the AttendError of an item that failed alone. Raised are errors of the
        stream itself, after retries, and what is refused before sending; both end it. When the server ends the
        stream (its age, a drain), unanswered items are sent again on a new one.
        """
        limit = max(1, self._limits.stream_items_in_flight or 16)
        ahead = limit if ahead is None else max(1, min(ahead, limit))
        stream = _Stream(self, self._checked_timeout(timeout))
        try:
            for call in calls:
                stream.send(*_attend_request(**call))
                while len(stream.unanswered) >= ahead:
                    yield stream.receive()
            while stream.unanswered:
                yield stream.receive()
        finally:
            stream.end()

    def open_session(self, model: str = "", *, raw: Optional[RawLayout] = None, layers: Iterable[str] = (),
                     ttl_seconds: int = 0, max_tokens: int = 0, timeout: Optional[float] = None) -> Session:
        """Starts a history of keys and values. Use the Session in `with`, which closes it.

        model: a Model.name; "" = the only one. Or raw: a RawLayout, for Session.attend_raw.
        layers: keep a history for these only; () = every layer that can. Memory is taken for all of them at once.
        ttl_seconds: idle time after which it expires; 0 = the server's default.
        max_tokens: refuse appends beyond; 0 = no limit.
        """
        if raw is not None:
            raw = dataclasses.replace(raw, kv_dtype=_dtype_number("kv_dtype", raw.kv_dtype))
        request = OpenSessionRequest(model, raw, [str(layer) for layer in layers], ttl_seconds, max_tokens)
        info = self._call(self._control, "OpenSession", request, SessionInfo, timeout, safe=False)
        return Session(self, info, owned=True)

    def session(self, session_id: str, timeout: Optional[float] = None) -> Session:
        """A session that exists already, with the positions it has now; leaving its `with` does not close it."""
        info = self._call(self._control, "GetSession", GetSessionRequest(session_id), SessionInfo, timeout,
                          replica=_replica_of(session_id))
        return Session(self, info, owned=False)

    def attend_sessions(self, layer: str, sessions: Iterable[Session], rows: Array, *,
                        lengths: Optional[Iterable[int]] = None, timeout: Optional[float] = None,
                        no_append: bool = False, **more: Any) -> Result:
        """One step of several sessions in one call: each appends its rows and attends.

        sessions: of one model and one replica, each at most once.
        rows: [sessions, d_model], one row each, as in decoding; or [tokens, d_model] with `lengths`; or a list
            with an array for each session, then the output is a list as well.
        more: mask, output_dtype, weights, heads, weight_rows, attention_bias, request_id, as for attend.
        Succeeds or fails as a whole; AttendError.sequences lists the sessions to blame by their index.
        """
        batch = list(sessions)
        request = _set_options(AttendRequest(layer=str(layer)), **more)
        row_lengths = _set_rows(request, rows, lengths)
        if row_lengths is None:
            shape = request.hidden_states.shape
            row_lengths = [1] * shape[0] if len(shape) == 2 else [shape[1]] * shape[0]
        if len(row_lengths) != len(batch):
            raise _local_error("rows", f"{len(row_lengths)} sequences", f"one for each of {len(batch)} sessions")
        request.sequences = [Sequence(length=length) for length in row_lengths]
        return self._attend_in(batch, request, no_append, timeout,
                               row_lengths if isinstance(rows, (list, tuple)) else None)

    # What sessions and streams use.

    def _checked_timeout(self, timeout: Optional[float]) -> float:
        timeout = self.timeout if timeout is None else timeout
        timeout = min(timeout, _LONGEST_TIMEOUT_SECONDS)
        if not timeout > 0:
            raise _local_error("timeout", timeout, "a positive number of seconds")
        return timeout

    def _check_open(self) -> None:
        if self._closed:
            raise _make_error("the client is closed", "CANCELLED")

    def _check_size(self, size: int) -> None:
        limit = self._limits.message_bytes or (1 << 31) - 1  # protobuf itself ends at 2 GiB
        if size > limit:
            raise _local_error("request", f"{size} bytes", f"at most message_bytes = {limit} bytes", "TOO_LARGE")

    def _call(self, channel: grpc.Channel, method: str, request: Any, response_type: type,
              timeout: Optional[float] = None, *, safe: bool = True, replica: str = "",
              attempts: Optional[int] = None, after_lost: Optional[Callable[[], None]] = None) -> Any:
        """One unary call with its retries. after_lost runs before an attempt that follows a lost answer."""
        end = time.monotonic() + self._checked_timeout(timeout)
        body = _encode(request)
        self._check_size(len(body))
        lost, made = False, 0
        while True:
            self._check_open()
            made += 1
            pushback = None
            metadata = [("attend-replica", replica)] if replica else []
            if channel is self._data:  # so that a full server refuses before the body is sent
                metadata.append(("attend-bytes", str(len(body))))
            try:
                answer = channel.unary_unary(_SERVICE + method)(
                    body, timeout=max(0.0, end - time.monotonic()), metadata=metadata)
                return _decode(response_type, answer)
            except grpc.RpcError as rpc:
                error, pushback = _error_from_rpc(rpc, self.address)
            except _MALFORMED as what:  # also grpcio's for a channel that is closed
                error = _make_error(f"{self.address}: {what}", "CANCELLED" if self._closed else "INTERNAL",
                                    outcome_unknown=True)
            error.attempts = made
            wait = _retry_delay(error, pushback, safe, end - time.monotonic(), attempts or self.attempts,
                                random.random())
            lost = lost or error.outcome_unknown
            if wait is None or self._closed:
                error.outcome_unknown = lost
                raise error
            time.sleep(wait)
            if error.outcome_unknown and after_lost:
                after_lost()
                body = _encode(request)

    def _attend(self, request: AttendRequest, timeout: Optional[float], *, cut: Optional[list[int]] = None,
                **how: Any) -> Result:
        return _to_result(self._call(self._data, "Attend", request, AttendResponse, timeout, **how), cut)

    def _attend_in(self, sessions: list[Session], request: AttendRequest, no_append: bool,
                   timeout: Optional[float], cut: Optional[list[int]] = None) -> Result:
        """Sends `request`, whose sequences have their lengths, for sessions in this order; moves positions."""
        if not sessions:
            raise _local_error("sessions", "0 sessions", "at least 1")
        for i, session in enumerate(sessions):
            session._check_open()
            if session.replica != sessions[0].replica:
                raise _local_error(f"sessions[{i}]", f"a session of replica {session.replica}",
                                   f"sessions of one replica, here {sessions[0].replica}")
        request.model = sessions[0]._request_model()
        cursors = [session._cursor(request.layer) for session in sessions]
        moving = []  # those whose history this call appends to
        for session, cursor, sequence in zip(sessions, cursors, request.sequences):
            sequence.session_id = session.id
            if cursor.cross or request.context is not None:
                continue
            sequence.no_append = no_append
            sequence.position = cursor.position
            sequence.rewind = cursor.rewind
            if not no_append:
                moving.append((cursor, sequence))

        def ask_again() -> None:  # the lost answer may have been an append
            for _, sequence in moving:
                sequence.rewind = True

        for cursor, _ in moving:
            cursor.rewind = True  # also when this thread is interrupted before it knows better
        try:
            response = self._call(self._data, "Attend", request, AttendResponse, timeout,
                                  replica=sessions[0].replica, after_lost=ask_again)
            if len(response.positions) != len(sessions):
                raise _make_error(f"positions: got {len(response.positions)}, wanted {len(sessions)}", "INTERNAL",
                                  outcome_unknown=True)
        except AttendError as error:
            for cursor, sequence in moving:
                cursor.rewind = sequence.rewind or error.outcome_unknown
            raise
        result = _to_result(response, cut)
        for cursor, sequence, position in zip(cursors, request.sequences, response.positions):
            if sequence.position is None:
                cursor.cross = True
            elif not no_append:
                cursor.position, cursor.rewind = position, False
        return result


@dataclasses.dataclass
class _Cursor:
    """Where one layer of a session stands."""
    position: int = 0
    rewind: bool = False  # the server may have more than `position`: the next call cuts it
    cross: bool = False  # cross-attention: its calls carry no position


class Session:
    """A history of keys and values on the server, one per layer; from Client.open_session, session or fork.

    Use it in `with`: leaving the block closes a session that this object opened or forked (one try of at most a
    second, errors ignored); otherwise call close(), or it takes memory until its ttl. One thread at a time.

    Keeps each layer's position, so that only new rows are sent. When an answer gets lost the same rows are sent
    again with `rewind`: the server cuts the layer to where it was before, so nothing is appended twice. When the
    call fails for good (timeout, attempts), the layer's next attend does that, so it may simply be called again.

    Every method raises SessionLost when the server does not have the session any more.
    """

    def __init__(self, client: Client, info: SessionInfo, owned: bool):
        self._client = client
        self._owned = owned
        self._closed = False
        self._cursors: dict[str, _Cursor] = {}
        self.id: str = info.id
        self.model: str = info.model
        self.replica: str = info.replica
        self._take(info)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._owned and not self._closed:
            try:
                self._close(min(self._client.timeout, 1.0), 1)
            except AttendError:
                pass  # it ends by its ttl

    def __repr__(self) -> str:
        return f"Session({self.id!r}, model={self.model!r}, length={self.length})"

    @property
    def length(self) -> int:
        """Tokens of the longest self-attention layer, as counted here."""
        return max((cursor.position for cursor in self._cursors.values() if not cursor.cross), default=0)

    def position(self, layer: str) -> int:
        """Tokens of `layer` that the next attend continues from."""
        return self._cursor(str(layer)).position

    def attend(self, layer: str, rows: Array, *, context: Array = None, no_append: bool = False,
               timeout: Optional[float] = None, **more: Any) -> Result:
        """Appends rows [tokens, d_model] to `layer` and attends to all of it; rows see what came before them.

        context: [rows, context_width], the source states of a cross-attention layer: with its first call only.
        no_append: attend as if appended and leave the history as it was.
        more: mask, output_dtype, weights, heads, weight_rows, attention_bias, request_id, as for Client.attend.
            (A layer that is mask_selectable keeps a history with mask="causal" only.)
        """
        request = _set_options(AttendRequest(layer=str(layer)), **more)
        request.hidden_states = _tensor("rows", rows, (2,))
        sequence = Sequence(length=request.hidden_states.shape[0])
        if context is not None:
            request.context = _tensor("context", context, (2,))
            sequence.context_length = request.context.shape[0]
        request.sequences = [sequence]
        return self._client._attend_in([self], request, no_append, timeout)

    def attend_raw(self, layer: str, q: Array = None, k: Array = None, v: Array = None, *, no_append: bool = False,
                   timeout: Optional[float] = None, **more: Any) -> Result:
        """The same in a session opened with a RawLayout. q: [rows, q_heads, head_dim]; k: [rows, kv_heads,
        head_dim], v: [rows, kv_heads, v_head_dim], appended. Without q: append only. Without k and v: attend only.
        more: output_dtype, weights, heads, weight_rows, attention_bias, request_id."""
        request = _set_options(AttendRequest(layer=str(layer)), **more)
        request.raw = _raw_input(q, k, v)
        keys = None if request.raw.k is None else request.raw.k.shape[0]
        rows = 0 if request.raw.q is None else request.raw.q.shape[0]
        request.sequences = [Sequence(length=rows, context_length=keys)]
        return self._client._attend_in([self], request, no_append, timeout)

    def rewind_to(self, length: int) -> None:
        """Drops what lies beyond `length` tokens with the next attend of each layer, without a call of its own:
        for speculative tokens that were not accepted. truncate() does it now."""
        if not isinstance(length, (int, np.integer)) or length < 0:
            raise _local_error("length", length, "an integer from 0")
        for cursor in self._cursors.values():
            if not cursor.cross and cursor.position > length:
                cursor.position, cursor.rewind = length, True

    def truncate(self, length: int, timeout: Optional[float] = None) -> None:
        """Cuts every self-attention layer to at most `length` tokens; at most those of the longest layer."""
        info = self._manage("TruncateSession", TruncateSessionRequest(self.id, length), timeout)
        self._take(info, self._unsure())

    def fork(self, length: Optional[int] = None, timeout: Optional[float] = None) -> Session:
        """A second session with the same history (cut to `length`); memory is shared until one of them writes."""
        info = self._manage("ForkSession", ForkSessionRequest(self.id, length), timeout, safe=False)
        forked = Session(self._client, info, owned=True)
        forked._take(info, self._unsure())
        return forked

    def info(self, timeout: Optional[float] = None) -> SessionInfo:
        """The session as the server sees it: length of each layer, memory, ttl. Changes nothing here."""
        return self._manage("GetSession", GetSessionRequest(self.id), timeout)

    def refresh(self, timeout: Optional[float] = None) -> SessionInfo:
        """Takes over the server's positions, after another client appended or truncated. Rows whose answer got
        lost count as appended then, if they were."""
        info = self.info(timeout)
        self._cursors.clear()
        self._take(info)
        return info

    def close(self, timeout: Optional[float] = None) -> None:
        """Ends the session on the server; further calls raise SessionLost."""
        self._close(timeout, None)

    def detach(self) -> None:
        """Leaving the `with` block will not close the session."""
        self._owned = False

    def _close(self, timeout: Optional[float], attempts: Optional[int]) -> None:
        try:
            self._manage("CloseSession", CloseSessionRequest(self.id), timeout, CloseSessionResponse,
                         attempts=attempts)
        except SessionLost as error:
            # After a lost answer, "closed" is what the first attempt did.
            if self._closed or error.attempts < 2 or error.reason != "SESSION_CLOSED":
                raise
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise _make_error(f"session {self.id}: closed by this client", "NOT_FOUND", "SESSION_CLOSED")

    def _manage(self, method: str, request: Any, timeout: Optional[float], response_type: type = SessionInfo,
                **how: Any) -> Any:
        self._check_open()
        return self._client._call(self._client._control, method, request, response_type, timeout,
                                  replica=self.replica, **how)

    def _request_model(self) -> str:
        """As AttendRequest.model takes it."""
        return "" if self.model == "raw" else self.model

    def _cursor(self, layer: str) -> _Cursor:
        # The contract's names of cross-attention layers: "decoder.0.cross", "0.cross".
        return self._cursors.setdefault(layer, _Cursor(cross=layer.endswith(".cross")))

    def _unsure(self) -> dict[str, int]:
        """Positions of layers of which the server may have more."""
        return {layer: cursor.position for layer, cursor in self._cursors.items() if cursor.rewind}

    def _take(self, info: SessionInfo, unsure: Optional[dict[str, int]] = None) -> None:
        """The server's positions; rows beyond those of `unsure` layers are still to be cut."""
        for state in info.layers:
            cursor = self._cursor(state.layer)
            cursor.cross = cursor.cross or state.context_length > 0
            cursor.position = min(state.length, (unsure or {}).get(state.layer, state.length))
            cursor.rewind = cursor.position < state.length
