# SPDX-License-Identifier: Apache-2.0
"""attend_client.py's own protobuf tables and codec, against the real proto and protobuf's own encoder."""
import dataclasses
import enum
import importlib
import pathlib
import random
import sys

import grpc_tools
import numpy as np
import pytest
from google.protobuf import any_pb2
from google.protobuf.descriptor import FieldDescriptor
from grpc_tools import protoc

import attend_client
from support.servers import ROOT

# Fields of the proto that the client neither sends nor reads.
LEFT_OUT = {
    "AttendRequest": {"return_lse", "return_head_outputs", "head_scale", "rope_positions", "max_response_bytes",
                      "input"},
    "AttendResponse": {"lse", "head_outputs"},
    "WeightsRequest": {"k"},
    "AttentionWeights": {"key_index", "entropy", "maximum", "key_mass"},
}
TYPES = {name: getattr(FieldDescriptor, f"TYPE_{name.upper()}") for name in attend_client._DEFAULTS}
MESSAGES = [one for one in vars(attend_client).values()
            if dataclasses.is_dataclass(one) and one.__module__ == "attend_client" and
            one.__name__ not in ("Result", "_Cursor")]


@pytest.fixture(scope="module")
def pb(tmp_path_factory):
    """The module that protoc generates from the real proto."""
    out = tmp_path_factory.mktemp("generated")
    includes = pathlib.Path(grpc_tools.__file__).parent / "_proto"
    assert protoc.main(["protoc", f"-I{ROOT / 'proto'}", f"-I{includes}", f"--python_out={out}",
                        "attend/v1/attend.proto"]) == 0
    sys.path.insert(0, str(out))
    try:
        yield importlib.import_module("attend.v1.attend_pb2")
    finally:
        sys.path.remove(str(out))


def proto_name(kind):
    return {"Any_": "Any", "SessionInfo": "Session"}.get(kind.__name__, kind.__name__)


def theirs(pb, kind):
    """protobuf's class of a message."""
    return any_pb2.Any if proto_name(kind) == "Any" else getattr(pb, proto_name(kind))


def test_every_message_of_the_proto_is_there(pb):
    assert {proto_name(kind) for kind in MESSAGES} - {"Any"} == set(pb.DESCRIPTOR.message_types_by_name)


@pytest.mark.parametrize("kind", MESSAGES, ids=proto_name)
def test_fields_are_those_of_the_proto(pb, kind):
    descriptor = theirs(pb, kind).DESCRIPTOR
    table = {name: (number, field, label) for number, name, field, label in attend_client._table(kind)}
    assert set(table) == set(descriptor.fields_by_name) - LEFT_OUT.get(proto_name(kind), set())
    for name, (number, field, label) in table.items():
        real = descriptor.fields_by_name[name]
        assert number == real.number, name
        assert (label == "repeated") == (real.label == FieldDescriptor.LABEL_REPEATED), name
        if isinstance(field, str):
            assert real.type == TYPES[field], name
            assert (label == "optional") == real.has_presence, name
        elif issubclass(field, enum.IntEnum):
            assert real.type == FieldDescriptor.TYPE_ENUM and real.enum_type.name == field.__name__, name
        else:
            assert real.type == FieldDescriptor.TYPE_MESSAGE and real.message_type.name == proto_name(field), name


def test_enums_are_those_of_the_proto(pb):
    prefixes = {"DType": "DTYPE_", "Mask": "MASK_", "Reason": ""}
    for name, prefix in prefixes.items():
        real = pb.DESCRIPTOR.enum_types_by_name[name].values_by_name
        assert {prefix + one.name: one.value for one in getattr(attend_client, name)} == \
            {key: value.number for key, value in real.items()}
    mode = pb.WeightsRequest.DESCRIPTOR.enum_types_by_name["Mode"].values_by_name
    for one in attend_client.Mode:
        assert mode[one.name].number == one.value


def random_value(source, kind, depth):
    if kind == "bool":
        return source.random() < 0.5
    if kind == "float":
        return float(np.float32(source.uniform(-1e3, 1e3)))
    if kind == "string":
        return "".join(source.choice("a.é雪🍮\0") for _ in range(source.randrange(200)))
    if kind == "bytes":
        return source.randbytes(source.choice((0, 1, 127, 128, 20000)))
    if isinstance(kind, str):
        top = (1 << (31 if kind == "int32" else 63)) - 1
        return source.choice((0, 1, -1, 127, 128, top, -top - 1, source.randint(-top, top)))
    if issubclass(kind, enum.IntEnum):
        return source.choice(list(kind))
    return random_message(source, kind, depth + 1)


def random_message(source, kind, depth=0):
    message = kind()
    for _, name, field, label in attend_client._table(kind):
        if source.random() < 0.3:
            continue
        if label == "repeated":
            count = source.randrange(4) if depth else source.randrange(40)
            setattr(message, name, [random_value(source, field, depth) for _ in range(count)])
        else:
            setattr(message, name, random_value(source, field, depth))
    return message


def assert_same(ours, real):
    for _, name, field, label in attend_client._table(type(ours)):
        value, other = getattr(ours, name), getattr(real, name)
        if label == "repeated":
            assert len(value) == len(other), name
            pairs = list(zip(value, other))
        else:
            if label == "optional" or dataclasses.is_dataclass(field):
                assert (value is not None) == real.HasField(name), name
            pairs = [] if value is None else [(value, other)]
        for one, two in pairs:
            if dataclasses.is_dataclass(field):
                assert_same(one, two)
            else:
                assert one == two, name


@pytest.mark.parametrize("kind", MESSAGES, ids=proto_name)
def test_messages_go_through_protobuf_and_back(pb, kind):
    for seed in range(30):
        message = random_message(random.Random(f"{kind.__name__} {seed}"), kind)
        real = theirs(pb, kind).FromString(attend_client._encode(message))
        assert_same(message, real)
        assert attend_client._decode(kind, real.SerializeToString()) == message, seed


def test_data_in_pieces_is_sent_one_after_another(pb):
    pieces = [memoryview(b"ab"), b"", b"cde"]
    sent = attend_client._encode(attend_client.Tensor(attend_client.DType.F32, [5], pieces))
    assert pb.Tensor.FromString(sent).data == b"abcde"


def test_tensors_are_read_where_they_are(pb):
    answer = pb.AttendResponse(output=pb.Tensor(data=b"x" * 100)).SerializeToString()
    view = attend_client._decode(attend_client.AttendResponse, answer).output.data
    assert isinstance(view, memoryview) and view.obj is answer


def test_unknown_fields_and_values_do_no_harm(pb):
    full = pb.AttendResponse(request_id="a", output=pb.Tensor(shape=[1]), lse=pb.Tensor(data=b"12345678"))
    # Fields 100 to 103 of every wire type: varint, 64 bits, bytes, 32 bits.
    extra = b"\xa0\x06\x96\x01" + b"\xa9\x06" + b"8bytes!!" + b"\xb2\x06\x03abc" + b"\xbd\x06" + b"4byt"
    read = attend_client._decode(attend_client.AttendResponse, extra + full.SerializeToString() + extra)
    assert read.request_id == "a" and read.output.shape == [1]
    # Another wire type than the table's: skipped, as protobuf does.
    assert attend_client._decode(attend_client.CloseSessionRequest, b"\x08\x05").session_id == ""
    # A newer server's enum value stays a number.
    detail = attend_client._decode(attend_client.ErrorDetail, b"\x08\x63")
    assert detail.reason == 99 and not isinstance(detail.reason, attend_client.Reason)


def test_repeated_numbers_may_come_unpacked():
    assert attend_client._decode(attend_client.Tensor, b"\x10\x05\x12\x02\x06\x07\x10\x08").shape == [5, 6, 7, 8]


def test_what_is_no_message_is_an_error_of_three_kinds():
    source = random.Random(1)
    whole = attend_client._encode(random_message(source, attend_client.AttendResponse))
    inputs = [whole[:length] for length in range(0, min(len(whole), 600))]
    inputs += [source.randbytes(source.randrange(40)) for _ in range(3000)]
    inputs += [b"\x0b", b"\xff" * 11, b"\x12\xff\xff\xff\xff\x0f"]
    refused = 0
    for data in inputs:
        try:
            attend_client._decode(attend_client.AttendResponse, data)
        except attend_client._MALFORMED:
            refused += 1
    assert refused > 1000


def test_numbers_that_do_not_fit_are_refused_by_name():
    for message, field in ((attend_client.TruncateSessionRequest("a", 1 << 63), "length"),
                           (attend_client.TruncateSessionRequest("a", 1.5), "length"),
                           (attend_client.RawLayout(layers=1 << 31), "layers"),
                           (attend_client.RawOptions(softcap=1e39), "softcap")):
        with pytest.raises(attend_client.InvalidRequest) as refused:
            attend_client._encode(message)
        assert refused.value.field == field and refused.value.attempts == 0
