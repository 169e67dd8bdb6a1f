# SPDX-License-Identifier: Apache-2.0
"""attend_client.py against a real server: results, arrays, sessions, limits and errors."""
import concurrent.futures
import inspect
import json

import ml_dtypes
import numpy as np
import pytest

import attend_client
from attend_client import (AttendError, Client, InvalidRequest, Overloaded, PositionMismatch, RawLayout,
                           RawOptions, SessionLost, SessionMoved, TooLarge, Unavailable, UnknownName)
from sentence_encoder import read_safetensors
from support.servers import GOLDEN, Server, eventually, free_ports, golden_model

VARIANTS = ("bert", "roberta", "bert_decoder", "gpt2", "gpt2_cross", "llama", "llama_bf16", "llama_gqa4",
            "mistral_sliding", "qwen3", "torch_mha", "torch_mha_kdim", "torch_merged_qkv")
MIB = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("server"), *map(golden_model, VARIANTS)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with Client(server.address, timeout=60) as connected:
        yield connected


def rows_of(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def rows_for(client, model, count, layer=0, seed=1):
    layers = {one.name: one.layers for one in client.models()}
    return rows_of(count, layers[model][layer].d_model, seed=seed)


def same(a, b):
    return a.dtype == b.dtype and np.array_equal(a, b)


# ---- What the server is ----


def test_models_and_server_are_described(client, server):
    info = client.server_info()
    assert info.replica == server.replica and info.limits.message_bytes == 80 * MIB and not info.draining
    models = {model.name: model for model in client.models()}
    assert set(models) == set(VARIANTS)
    assert models["llama"].layers[0].name == "0" and models["llama"].layers[0].causal
    assert models["llama_bf16"].weight_dtype == attend_client.DType.BF16


# ---- Stateless, against outputs of the reference implementations ----


def golden_cases():
    for variant in VARIANTS:
        for case in json.loads((GOLDEN / variant / "cases.json").read_text())["cases"]:
            if case["kind"] == "full":
                yield pytest.param(variant, case, id=f"{variant}-{case['id']}")


@pytest.mark.parametrize("variant, case", golden_cases())
def test_outputs_are_those_of_the_reference(client, variant, case):
    tensors = read_safetensors(GOLDEN / variant / "cases.safetensors")
    padded, wanted = (tensors[f"{case['id']}.{name}"] for name in ("hidden_states", "output"))
    layer = next(one for model in client.models() if model.name == variant
                 for one in model.layers if one.name == case["layer"])
    options = {"model": variant}
    if layer.mask_selectable:
        options["mask"] = "causal" if case["causal"] else "bidirectional"
    cross = case["role"] == "cross"
    if cross:
        context = tensors[f"{case['id']}.context"]
        of_context = case["context_lengths"]
    lengths = case["lengths"]
    weights = f"{case['id']}.attention_weights" in tensors
    result = client.attend(layer.name, padded, lengths=lengths, weights=weights, **options, **(
        {"context": context, "context_lengths": of_context} if cross else {}))
    tolerance = case["tolerance"]["tf32_or_16bit_abs" if variant.endswith("16") else "float32_abs"]
    assert result.output.shape == wanted.shape and result.positions == [0] * len(lengths)
    for i, length in enumerate(lengths):
        assert np.abs(result.output[i, :length] - wanted[i, :length]).max() <= tolerance
        assert not result.output[i, length:].any()
        if weights:
            keys = of_context[i] if cross else length
            given = tensors[f"{case['id']}.attention_weights"][i, :, :length, :keys]
            assert np.abs(result.weights[i] - given).max() <= (2e-2 if variant.endswith("16") else 1e-5)

    # Packed, as a list and as one array: the same bits.
    pieces = [padded[i, :length] for i, length in enumerate(lengths)]
    more = {"context": [context[i, :length] for i, length in enumerate(of_context)]} if cross else {}
    listed = client.attend(layer.name, pieces, **options, **more).output
    if cross:
        more = {"context": np.concatenate(more["context"]), "context_lengths": of_context}
    packed = client.attend(layer.name, np.concatenate(pieces), lengths=lengths, **options, **more).output
    for i, length in enumerate(lengths):
        assert same(listed[i], result.output[i, :length])
    assert same(packed, np.concatenate(listed))


def test_one_sequence_needs_no_lengths(client):
    rows = rows_for(client, "bert", 9)
    alone = client.attend("0", rows, model="bert").output
    assert same(client.attend("0", rows[None], model="bert").output[0], alone)
    assert same(client.attend("0", [rows], model="bert").output[0], alone)
    context = rows_of(4, 36, seed=2)
    one = client.attend("0.cross", rows, context=context, model="gpt2_cross").output
    assert same(client.attend("0.cross", rows[None], context=context[None], model="gpt2_cross").output[0], one)
    both = client.attend("0.cross", [rows, rows], context=[rows[:0], context], model="gpt2_cross").output
    assert same(both[1], one) and not same(both[0], one)


def test_rows_past_a_length_are_never_read(client):
    padded = np.stack([rows_of(6, 36), rows_of(6, 36, seed=2)])
    padded[1, 4:] = np.nan
    output = client.attend("0", padded, lengths=[6, 4], model="bert").output
    assert same(output[1, :4], client.attend("0", padded[1, :4], model="bert").output)
    assert not output[1, 4:].any()
    assert client.attend("0", [padded[0], padded[0][:0]], model="bert").output[1].shape == (0, 36)


def test_weights_and_biases_of_single_heads_and_rows(client):
    rows = rows_of(7, 36)
    every = client.attend("0", rows, model="bert", weights=True).weights[0]
    heads = every.shape[0]
    assert every.shape[1:] == (7, 7) and np.abs(every.sum(-1) - 1).max() < 1e-5
    assert same(client.attend("0", rows, model="bert", weights=True, heads=[heads - 1, 0], weight_rows=(2, 5)
                              ).weights[0], every[[heads - 1, 0], 2:5])
    assert same(client.attend("0", rows, model="bert", heads=[1]).weights[0], every[[1]])
    assert same(client.attend("0", rows, model="bert", weight_rows=(3, None)).weights[0], every[:, 3:])
    assert client.attend("0", rows, model="bert").weights == []
    bias = np.zeros((1, 1, 7, 7), np.float32)
    bias[..., 3] = -np.inf
    biased = client.attend("0", rows, model="bert", attention_bias=bias, weights=True)
    assert not biased.weights[0][:, :, 3].any()


def test_raw_attention_needs_no_model(client):
    q, k, v = rows_of(5, 4, 8), rows_of(9, 2, 8, seed=2), rows_of(9, 2, 6, seed=3)
    options = RawOptions(causal=True, scale=0.5)
    output = client.attend_raw(q, k, v, options=options).output
    scores = np.einsum("qhd,khd->hqk", q.astype(float), k.repeat(2, 1).astype(float)) * 0.5
    scores[:, ~np.tri(5, 9, 4, dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v.repeat(2, 1))
    assert output.shape == (5, 4, 6) and np.abs(output - wanted).max() < 1e-5
    twice = client.attend_raw(*(np.concatenate([one, one]) for one in (q, k, v)), options=options,
                              lengths=[5, 5], key_lengths=[9, 9]).output
    assert same(twice, np.concatenate([output, output]))


def test_streams_answer_in_order_and_go_on_after_an_error(client):
    rows = rows_of(40, 36)
    calls = [{"layer": "0", "rows": rows[:n], "model": "bert", "request_id": str(n)} for n in range(1, 41)]
    calls[20] = {"layer": "absent", "rows": rows, "model": "bert"}
    answers = list(client.attend_stream(calls))
    assert len(answers) == 40
    error = answers.pop(20)
    assert isinstance(error, UnknownName) and error.reason == "UNKNOWN_LAYER" and error.field == "layer"
    del calls[20]
    for call, answer in zip(calls, answers):
        assert answer.request_id == call["request_id"]
        assert same(answer.output, client.attend(**call).output)


def test_streams_may_depend_on_their_own_answers(client):
    rows = rows_of(3, 36)
    seen = []

    def calls():
        for _ in range(3):
            yield {"layer": "0", "rows": seen[-1] if seen else rows, "model": "bert"}

    for answer in client.attend_stream(calls(), ahead=1):
        seen.append(answer.output)
    wanted = rows
    for output in seen:
        wanted = client.attend("0", wanted, model="bert").output
        assert same(output, wanted)
    left = client.attend_stream({"layer": "0", "rows": rows, "model": "bert"} for _ in range(100))
    next(left)
    left.close()  # what is unanswered is cancelled


# ---- Arrays ----


def test_any_strides_and_byte_order_are_sent_right(client):
    wide = rows_of(10, 72)
    for rows in (wide[::2, ::2], wide[::-1, :36], wide[:, 36:], wide.T[:36, :].T, np.asfortranarray(wide[:, :36]),
                 np.broadcast_to(wide[0, :36], (5, 36)), wide[:, :36].astype(">f4"), wide[3:3, :36]):
        before = rows.copy()
        rows.flags.writeable = False
        assert same(client.attend("0", rows, model="bert").output,
                    client.attend("0", before.astype(np.float32), model="bert").output)
        assert np.array_equal(rows, before)


def test_results_belong_to_the_caller(client):
    for dtype in (None, np.float16, "bfloat16"):
        output = client.attend("0", rows_of(3, 36), model="bert", output_dtype=dtype).output
        assert output.flags.writeable and output.flags.aligned and output.flags.c_contiguous
        assert output.dtype.isnative
        output += 1


def test_halves_go_both_ways(client):
    rows = rows_of(6, 36)
    exact = client.attend("0", rows, model="bert").output
    for dtype, name in ((np.float16, "float16"), (ml_dtypes.bfloat16, "bfloat16")):
        narrow = rows.astype(dtype)
        # The server widens exactly, so the same numbers as float32 give the same output.
        widened = client.attend("0", narrow.astype(np.float32), model="bert").output
        assert same(client.attend("0", narrow, model="bert", output_dtype=np.float32).output, widened)
        assert same(client.attend("0", narrow, model="bert").output, widened.astype(dtype))
        assert same(client.attend("0", rows, model="bert", output_dtype=name).output, exact.astype(dtype))
        assert same(client.attend("0", [narrow[:2], narrow[2:]], model="bert").output[0],
                    client.attend("0", narrow[:2], model="bert").output)


@pytest.mark.parametrize("rows, field, got", [
    (np.zeros((2, 36)), "rows", "float64"),
    ([[0.0] * 36] * 2, "rows[0]", "float64"),
    (np.zeros((2, 36), np.int32), "rows", "int32"),
    (np.zeros((2, 36), np.uint16), "rows", "uint16"),
    (np.zeros((2, 36), bool), "rows", "bool"),
    (np.zeros((2, 36), complex), "rows", "complex128"),
    (None, "rows", "object"),
    (np.float32(1), "rows", "0 dimensions"),
    (np.zeros(36, np.float32), "rows", "1 dimensions"),
    (np.zeros((1, 1, 2, 36), np.float32), "rows", "4 dimensions"),
    ([], "rows", "an empty list"),
    ([np.zeros((2, 36), np.float32), np.zeros((2, 35), np.float32)], "rows[1]", "float32 of width 35"),
    ([np.zeros((2, 36), np.float32), np.zeros((2, 36), np.float16)], "rows[1]", "float16 of width 36"),
])
def test_what_would_lose_digits_or_sense_is_refused_before_sending(client, rows, field, got):
    with pytest.raises(InvalidRequest) as refused:
        client.attend("0", rows, model="bert")
    error = refused.value
    assert (error.field, error.attempts, error.code) == (field, 0, "INVALID_ARGUMENT")
    assert got in error.got, error


def test_other_arguments_are_checked_too(client):
    rows = rows_of(4, 36)
    for arguments, field in (({"mask": "left"}, "mask"), ({"output_dtype": np.int8}, "output_dtype"),
                             ({"timeout": 0}, "timeout"), ({"context": [rows, rows]}, "context"),
                             ({"attention_bias": rows}, "attention_bias")):
        with pytest.raises(InvalidRequest) as refused:
            client.attend("0", rows, model="bert", **arguments)
        assert refused.value.field == field and refused.value.attempts == 0
    with pytest.raises(InvalidRequest) as refused:
        client.attend("0", [rows], lengths=[4], model="bert")
    assert refused.value.field == "lengths"


def test_bfloat16_without_ml_dtypes_names_the_package(client, monkeypatch):
    monkeypatch.setattr(attend_client, "ml_dtypes", None)
    with pytest.raises(ImportError, match="output_dtype bfloat16 needs the Python package ml_dtypes"):
        client.attend("0", rows_of(2, 36), model="bert", output_dtype="bfloat16")
    assert client.attend("0", rows_of(2, 36), model="bert", output_dtype="float16").output.dtype == np.float16


# ---- Limits ----


def test_messages_above_grpcs_default_limit_go_both_ways(client):
    keys, one = rows_of(20000, 1, 64), rows_of(1, 1, 64)  # 5 MB
    assert client.attend_raw(one, keys, keys).output.shape == (1, 1, 64)
    assert same(client.attend_raw(keys, one, one).output, np.broadcast_to(one, keys.shape))
    [answer] = client.attend_stream([{"layer": "0", "rows": rows_of(1, 36), "model": "bert"}])
    assert answer.output.shape == (1, 36)


def test_what_is_too_large_names_both_numbers(tmp_path):
    flags = ("--message_bytes=64KiB", "--response_bytes=16KiB", "--request_tokens=200")
    with Server(tmp_path, golden_model("bert"), *flags) as server, Client(server.address) as client:
        with pytest.raises(TooLarge, match=r"request: got 72\d{3} bytes, wanted at most message_bytes = 65536"
                           ) as refused:
            client.attend("0", rows_of(500, 36))
        assert refused.value.attempts == 0
        with pytest.raises(TooLarge, match="got an answer of 21600 bytes, wanted at most 16384") as refused:
            client.attend("0", rows_of(150, 36))
        assert refused.value.attempts == 1
        with pytest.raises(TooLarge, match="request_tokens") as refused:
            client.attend("0", rows_of(201, 36))
        assert client.attend("0", rows_of(100, 36)).output.shape == (100, 36)


# ---- Sessions ----


@pytest.mark.parametrize("model", ["llama", "llama_bf16", "llama_gqa4", "mistral_sliding", "gpt2", "qwen3"])
def test_pieces_in_a_session_have_the_bits_of_one_call(client, model):
    rows = rows_for(client, model, 23)
    whole = client.attend("0", rows, model=model).output
    with client.open_session(model) as session:
        assert session.model == model and session.length == 0
        at = 0
        for count in (5, 1, 1, 9, 0, 7):
            result = session.attend("0", rows[at:at + count])
            assert same(result.output, whole[at:at + count])
            at += count
            assert result.positions == [at] and session.position("0") == at == session.length
        assert session.position("1") == 0 and session.info().length == 23
    with pytest.raises(SessionLost):
        session.attend("0", rows)


def test_forks_and_cuts_go_their_own_ways(client):
    rows = rows_for(client, "llama", 12)
    whole = client.attend("0", rows, model="llama").output
    with client.open_session("llama") as session:
        session.attend("0", rows[:8])
        with session.fork(5) as fork:
            assert fork.id != session.id and fork.length == 5 and fork.replica == session.replica
            assert same(fork.attend("0", rows[5:]).output, whole[5:])
        assert session.length == 8
        session.truncate(3)
        assert session.length == 3 and session.info().length == 3
        session.attend("0", rows[3:10])
        calls = session.info()
        session.rewind_to(6)  # speculative tokens that were not accepted
        assert session.length == 6 and session.info().length == calls.length == 10
        for length in (-3, 2.5, None):
            with pytest.raises(InvalidRequest, match="length: got"):
                session.rewind_to(length)
        assert session.length == 6
        with session.fork() as fork:
            assert fork.length == 6 and same(fork.attend("0", rows[6:]).output, whole[6:])
        assert same(session.attend("0", rows[6:], no_append=True).output, whole[6:])
        assert session.length == 6
        assert same(session.attend("0", rows[6:]).output, whole[6:])
        assert session.info().length == 12


def test_a_step_of_many_sessions_is_one_call(client):
    rows = rows_for(client, "llama", 10)
    whole = client.attend("0", rows, model="llama").output
    with client.open_session("llama") as one, client.open_session("llama") as two:
        first = client.attend_sessions("0", [one, two], [rows[:3], rows[:6]])
        assert first.positions == [3, 6]
        assert same(first.output[0], whole[:3]) and same(first.output[1], whole[:6])
        step = client.attend_sessions("0", [two, one], rows[[6, 3]])
        assert step.positions == [7, 4] and same(step.output, whole[[6, 3]])
        client.attend_sessions("0", [one, two], np.concatenate([rows[4:6], rows[7:10]]), lengths=[2, 3])
        assert (one.length, two.length) == (6, 10)
        with pytest.raises(InvalidRequest, match="one for each of 2 sessions"):
            client.attend_sessions("0", [one, two], rows[:1])
        with pytest.raises(InvalidRequest, match="at least 1"):
            client.attend_sessions("0", [], rows[:0])


def test_a_context_is_brought_once(client):
    rows, context = rows_of(6, 36), rows_of(5, 36, seed=2)
    whole = client.attend("0.cross", rows, context=context, model="gpt2_cross").output
    with client.open_session("gpt2_cross") as session:
        with pytest.raises(AttendError) as missing:
            session.attend("0.cross", rows[:2])
        assert missing.value.reason == "CONTEXT_CONFLICT"
        assert same(session.attend("0.cross", rows[:2], context=context).output, whole[:2])
        result = session.attend("0.cross", rows[2:])
        assert same(result.output, whole[2:]) and result.positions == [5]
        assert session.length == 0
        with client.session(session.id) as attached:
            assert same(attached.attend("0.cross", rows).output, whole)
    # A plain module becomes a cross-attention layer by its context: whoever attaches later knows that.
    with client.open_session("torch_mha") as session:
        output = session.attend("0", rows, context=context).output
        with client.session(session.id) as attached:
            assert same(attached.attend("0", rows).output, output)


def test_raw_sessions(client):
    q, k, v = rows_of(7, 4, 16), rows_of(7, 2, 16, seed=2), rows_of(7, 2, 8, seed=3)
    options = RawOptions(causal=True, softcap=5.0)
    whole = client.attend_raw(q, k, v, options=options).output
    layout = RawLayout(layers=2, q_heads=4, kv_heads=2, head_dim=16, v_head_dim=8, options=options)
    with client.open_session(raw=layout) as session:
        assert session.model == "raw"
        assert same(session.attend_raw("1", q[:4], k[:4], v[:4]).output, whole[:4])
        appended = session.attend_raw("1", None, k[4:], v[4:])
        assert appended.output.shape == (0, 4, 8) and session.length == 7
        assert same(session.attend_raw("1", q[4:]).output, whole[4:])
        assert session.position("0") == 0


def test_threads_may_share_a_client(client):
    rows = rows_for(client, "llama", 6)
    whole = client.attend("0", rows, model="llama").output

    def work(_):
        with client.open_session("llama") as session:
            return np.concatenate([session.attend("0", rows[i:i + 1]).output for i in range(6)])

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(same(output, whole) for output in pool.map(work, range(24)))


def test_two_holders_of_a_session_notice_each_other(client):
    rows = rows_for(client, "llama", 8)
    with client.open_session("llama") as session:
        other = client.session(session.id)
        with other:
            other.attend("0", rows[:3])
        with pytest.raises(PositionMismatch) as mismatch:
            session.attend("0", rows[3:])
        assert (mismatch.value.cached, mismatch.value.field) == (3, "sequences[0].position")
        assert mismatch.value.sequences == (0,) and not mismatch.value.outcome_unknown
        assert session.refresh().length == session.length == 3
        session.attend("0", rows[3:])
        assert session.info().length == 8  # leaving `with other` did not close it
        session.detach()
    with client.session(session.id) as again:
        again.close()


# ---- Errors ----


def test_names_that_do_not_exist(client):
    rows = rows_of(2, 36)
    for arguments, reason in ((("0", rows, "absent"), "UNKNOWN_MODEL"), (("77", rows, "bert"), "UNKNOWN_LAYER")):
        with pytest.raises(UnknownName) as unknown:
            client.attend(*arguments[:2], model=arguments[2])
        assert (unknown.value.reason, unknown.value.code) == (reason, "NOT_FOUND")
        assert unknown.value.wanted and unknown.value.attempts == 1 and isinstance(unknown.value, LookupError)
    with pytest.raises(SessionLost) as lost:
        client.session("replica-0.1.00000000000000000000000000000000")
    assert lost.value.reason in ("SESSION_NOT_FOUND", "SESSION_LOST_IN_RESTART")
    with pytest.raises(SessionLost) as lost:
        client.session("nonsense")
    assert lost.value.code == "NOT_FOUND"


def test_a_wrong_width_names_the_numbers(client):
    with pytest.raises(InvalidRequest) as wrong:
        client.attend("0", rows_of(2, 35), model="bert")
    assert wrong.value.field.startswith("hidden_states") and "36" in wrong.value.wanted
    assert str(wrong.value).startswith("INVALID_ARGUMENT INVALID_FIELD: ") and "\n" not in str(wrong.value)


def test_a_full_session_is_over_its_quota(client):
    rows = rows_for(client, "llama", 5)
    with client.open_session("llama", max_tokens=4) as session:
        with pytest.raises(Overloaded) as full:
            session.attend("0", rows)
        assert full.value.reason == "QUOTA" and full.value.attempts == 1
        assert session.attend("0", rows[:4]).positions == [4]


def test_closed_sessions_and_clients_say_so(server):
    client = Client(server.address)
    session, other = client.open_session("llama"), client.open_session("llama")
    session.close()
    for call in (session.close, session.info, session.fork, session.refresh, lambda: session.truncate(0)):
        with pytest.raises(SessionLost) as closed:
            call()
        assert (closed.value.reason, closed.value.attempts) == ("SESSION_CLOSED", 0)
    with client.session(other.id) as twin:
        other.close()
        with pytest.raises(SessionLost) as closed:
            twin.info()
        assert (closed.value.reason, closed.value.attempts) == ("SESSION_CLOSED", 1)
    client.close()
    client.close()
    for call in (client.models, lambda: client.attend("0", rows_of(1, 36)),
                 lambda: list(client.attend_stream([{"layer": "0", "rows": rows_of(1, 36)}]))):
        with pytest.raises(AttendError, match="the client is closed"):
            call()


def test_an_idle_session_expires(client, server):
    ended = server.total("attend_sessions_ended_total", reason="expired")
    session = client.open_session("llama", ttl_seconds=1)
    eventually(lambda: server.total("attend_sessions_ended_total", reason="expired") > ended)
    with pytest.raises(SessionLost) as expired:
        session.attend("0", rows_for(client, "llama", 1))
    assert expired.value.reason == "SESSION_EXPIRED"


def test_a_restart_loses_sessions_and_nothing_else(tmp_path):
    address = f"127.0.0.1:{free_ports(1)[0]}"
    rows = rows_of(3, 30)
    with Server(tmp_path, golden_model("llama"), f"--listen={address}"):
        client = Client(address, timeout=60)
        session = client.open_session()
        output = session.attend("0", rows).output
    with client, Server(tmp_path, golden_model("llama"), f"--listen={address}"):
        with pytest.raises(SessionLost) as lost:
            session.attend("0", rows)
        assert (lost.value.reason, lost.value.code) == ("SESSION_LOST_IN_RESTART", "NOT_FOUND")
        with client.open_session() as session:  # the same connection serves on
            assert same(session.attend("0", rows).output, output)


def test_another_replica_names_the_owner(client, tmp_path):
    with Server(tmp_path, golden_model("llama"), replica="b.example") as b, Client(b.address) as other:
        with client.open_session("llama") as session, other.open_session() as theirs:
            with pytest.raises(SessionMoved) as moved:
                other.session(session.id)
            assert moved.value.replica == "replica-0" and moved.value.reason == "SESSION_MOVED"
            assert isinstance(moved.value, SessionLost) and theirs.replica == "b.example"
            with pytest.raises(InvalidRequest) as mixed:
                client.attend_sessions("0", [session, theirs], rows_of(2, 30))
            assert mixed.value.field == "sessions[1]" and mixed.value.attempts == 0


def test_a_wrong_address_is_a_clear_error():
    with pytest.raises(Unavailable, match="127.0.0.1:1: .*[Cc]onnection refused") as nobody:
        Client("127.0.0.1:1", attempts=3)
    assert nobody.value.attempts == 3 and nobody.value.retryable and nobody.value.reason == ""
    assert isinstance(nobody.value, ConnectionError)


@pytest.mark.parametrize("address", ["", None, "127.0.0.1", "127.0.0.1:0", "127.0.0.1:99999", "127.0.0.1:x", ":50051",
                                     "http://127.0.0.1:50051", "::1:50051"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(InvalidRequest, match="address: got .* wanted HOST:PORT") as refused:
        Client(address)
    assert refused.value.field == "address" and refused.value.attempts == 0


def test_a_timeout_without_end_is_a_long_one(client):
    assert client.attend("0", rows_of(2, 36), model="bert", timeout=float("inf")).positions == [0]


def test_a_proxy_in_the_environment_is_not_asked(server, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("grpc_proxy", "http://127.0.0.1:1")
    with Client(server.address, attempts=1) as client:
        assert client.attend("0", rows_of(1, 36), model="bert").output.shape == (1, 36)


# ---- The documentation ----


def test_everything_public_is_documented():
    for name in attend_client.__all__:
        thing = getattr(attend_client, name)
        assert inspect.getdoc(thing) and "_wire" not in thing.__doc__, name
        for method, function in vars(thing).items():
            if inspect.isfunction(function) and not method.startswith("_"):
                assert inspect.getdoc(function), f"{name}.{method}"
    for word in ("float64", "Threads", "Retries", "ml_dtypes", "SessionLost"):
        assert word in attend_client.__doc__
