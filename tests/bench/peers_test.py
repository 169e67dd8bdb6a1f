# SPDX-License-Identifier: Apache-2.0
"""peers.py without the libraries that it compares: its cases, reference, arithmetic, tables and errors, with small
stand-ins for a library and for attend-bench."""
import json
import math
import os
import pathlib
import subprocess
import sys
import types

import numpy as np
import pytest

import peer_cases
import peer_service
import peer_worker
import peers

HERE = pathlib.Path(__file__).parent
BIN = pathlib.Path(os.environ["ATTEND_BIN"])


def run(*words, **more):
    return subprocess.run([sys.executable, str(HERE / "peers.py"), *map(str, words)], capture_output=True, text=True,
                          timeout=60, check=False, **more)


# ---- Cases ----


def test_attend_bench_has_every_case():
    if not (BIN / "attend-bench").exists():
        pytest.skip("this build has no attend-bench")
    listed = subprocess.run([BIN / "attend-bench", "--list"], capture_output=True, text=True, check=True)
    wanted = {f"{shape}/{kind}" for shape in peer_cases.SHAPES for kind in ("f32", "bf16")}
    assert wanted <= set(listed.stdout.split())


def test_mixed_lengths_are_those_of_the_c_plus_plus_generator():
    lengths = peer_cases.mixed_lengths()
    assert lengths == [138, 141, 336, 474, 192, 268, 193, 306] and sum(lengths) == 2048


def test_names_and_shapes():
    case = peer_cases.find_case("decode/gqa-32-8/8x4096/bf16")
    assert case.decode and case.lengths == (1,) * 8 and case.cached == 4096 and case.types == "bf16"
    # 32 query heads, 8 of keys and 8 of values, 128 wide; 8 sequences of 4096 keys and values.
    assert case.stored_bytes() == 2 * (4096 * 48 * 128 + 4096 * 4096 + 8 * 4096 * 2 * 1024)
    assert case.sets() == math.ceil(600 * 2**20 / case.stored_bytes()) == 3
    layer = peer_cases.find_case("layer/bert-base/8x128/f32")
    assert layer.lengths == (128,) * 8 and not layer.decode and not layer.ragged and layer.sets() == 1
    assert peer_cases.find_case("mixed/bert-base/2048/f32").ragged


def test_select():
    everything = peer_cases.select([])
    assert len(everything) == 2 * len(peer_cases.SHAPES) and not [name for name in everything if name.endswith("i8")]
    assert peer_cases.select([], quick=True) == [f"{shape}/{kind}" for shape in peer_cases.QUICK_SHAPES
                                                 for kind in ("f32", "bf16")]
    assert set(peer_cases.select(["decode"])) == {f"{shape}/{kind}" for shape in peer_cases.SHAPES
                                                  for kind in peer_cases.TYPES if shape.startswith("decode/")}
    assert peer_cases.select(["bert-base/128/i8", "layer/bert-base/128/i8"]) == ["layer/bert-base/128/i8"]
    for wrong in ("bert", "layer/bert-base/128/f64", "/"):
        with pytest.raises(peer_cases.UnknownCase):
            peer_cases.select([wrong])


# ---- Reference ----


def tiny(kind="f32", causal=True, cached=0, lengths=(5, 3)):
    return peer_cases.Case("tiny", 12, 4, 2, 6, causal, lengths, cached, kind)


def by_loops(data, sequence):
    """The layer, one number after another."""
    case, x = data.case, data.rows[sequence].astype(np.float64)
    qkv = x @ data.wqkv.astype(np.float64).T
    heads = qkv.reshape(len(x), case.q_heads + 2 * case.kv_heads, case.head_dim)
    y = np.zeros((len(x), case.q_heads, case.head_dim))
    for head in range(case.q_heads):
        group = head // (case.q_heads // case.kv_heads)
        keys, values = heads[:, case.q_heads + group], heads[:, case.q_heads + case.kv_heads + group]
        if case.cached:
            keys = np.concatenate([data.cache(sequence, 0)[group], keys])
            values = np.concatenate([data.cache(sequence, 1)[group], values])
        for i in range(len(x)):
            seen = case.cached + i + 1 if case.causal else len(keys)
            scores = [math.exp(float(heads[i, head] @ keys[j]) / math.sqrt(case.head_dim)) for j in range(seen)]
            y[i, head] = sum(score * values[j] for j, score in enumerate(scores)) / sum(scores)
    return y.reshape(len(x), -1) @ data.wo.astype(np.float64).T


@pytest.mark.parametrize("case", [tiny(), tiny(causal=False), tiny(cached=7, lengths=(1, 1))],
                         ids=["causal", "bidirectional", "decode"])
def test_the_reference_is_attention(case):
    data = peer_cases.Data(case)
    outputs = [by_loops(data, i) for i in range(2)]
    np.testing.assert_allclose(data.reference(1, range(case.lengths[1])), outputs[1], rtol=1e-12)
    assert peer_cases.relative_error(data, outputs) < 1e-14


def test_what_is_wrong_or_less_precise_is_seen():
    data = peer_cases.Data(tiny())
    exact = [by_loops(data, i) for i in range(2)]
    rounded = peer_cases.relative_error(data, [peer_cases.to_bf16(y) for y in exact])
    assert peer_cases.TOLERANCE["f32"] < rounded < peer_cases.TOLERANCE["bf16"]
    assert peer_cases.relative_error(data, [y.astype(np.float32) for y in exact]) < 1e-7
    broken = [y.copy() for y in exact]
    broken[1][2, 3] = np.nan
    assert peer_cases.relative_error(data, broken) == math.inf
    assert peer_cases.relative_error(data, [y[:-1] for y in exact]) == math.inf
    assert peer_cases.relative_error(data, [exact[0], 1.5 * exact[1]]) > 0.1


def test_bf16_rounds_to_nearest_even():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    values[:3] = 1.00390625, 1.01171875, -1.00390625  # halfway between two
    np.testing.assert_array_equal(peer_cases.to_bf16(values), values.astype(ml_dtypes.bfloat16).astype(np.float32))
    assert not np.any(peer_cases.Data(tiny("bf16")).rows[0].view(np.uint32) & 0xFFFF)


# ---- The worker ----


class Clock:
    """In the place of the worker's module time: moves with the steps only."""
    now = 0.0

    def perf_counter(self):
        return self.now


class StandIn:
    """A library whose variants take so many ms of the clock; None fails."""
    NAME = "stand-in"

    def __init__(self, clock, **ways):
        self.clock, self.ways = clock, ways

    def unsupported(self, case):
        return "no int8" if case.types == "i8" else ""

    def variants(self, _case):
        return tuple(self.ways)

    def Layer(self, case, data, variant, sets):  # pylint: disable=invalid-name
        if self.ways[variant] is None:
            raise RuntimeError("not built in")
        steps = []

        def step(which):
            steps.append(which)
            self.clock.now += self.ways[variant] / 1e3
        return types.SimpleNamespace(
            step=step, steps=steps, sets=sets, settle=lambda: None,
            outputs=lambda: [data.reference(i, range(n)) for i, n in enumerate(case.lengths)])


@pytest.fixture(name="clock")
def _clock(monkeypatch):
    """Small cases in the place of the real ones, too."""
    cases = {"tiny/f32": tiny(), "tiny/i8": tiny("i8"), "tiny/decode": tiny(cached=7, lengths=(1, 1))}
    monkeypatch.setattr(peer_cases, "find_case", cases.__getitem__)
    monkeypatch.setattr(peer_cases.Case, "sets", lambda case: 3 if case.decode else 1)
    clock = Clock()
    monkeypatch.setattr(peer_worker, "time", clock)
    return clock


def test_the_worker_keeps_the_fastest_way_and_names_failures(clock):
    worker = peer_worker.Worker(StandIn(clock, slow=12, fast=1, missing=None))
    answer = worker.prepare("tiny/f32")
    assert answer["variant"] == "fast" and answer["error"] < 1e-12
    assert answer["tried_ms"] == pytest.approx({"slow": 12, "fast": 1})
    assert answer["failures"] == ["missing: RuntimeError: not built in"]
    assert worker.run(0.0105)["times_ms"] == pytest.approx([1] * 11)
    assert worker.prepare("tiny/i8") == {"unsupported": "no int8"}
    assert "not built in" in peer_worker.Worker(StandIn(clock, missing=None)).prepare("tiny/f32")["unsupported"]


def test_copies_of_a_decode_layer_take_turns(clock):
    worker = peer_worker.Worker(StandIn(clock, only=1))
    assert worker.prepare("tiny/decode")["variant"] == ""
    begin = len(worker.layer.steps)
    worker.run(0.02)
    steps = worker.layer.steps[1:]  # the first was to be checked
    assert worker.layer.sets == 3 and len(steps) > begin and steps == [i % 3 for i in range(len(steps))]


# ---- Turns ----


class PeerStandIn:
    """In the place of peers.Peer: the given medians, turn by turn."""
    version = "1"
    child = types.SimpleNamespace(pid=os.getpid())

    def __init__(self, name, answer, medians=()):
        self.name, self.answer, self.medians = name, answer, list(medians)

    def ask(self, prepare=None, run=None):
        if prepare:
            return dict(self.answer)
        assert run == 0.1
        middle = self.medians.pop(0)
        return {"times_ms": [middle / 2, middle, 10 * middle]}


def fake_bench(tmp_path, entry, code=0):
    program = tmp_path / "attend-bench"
    report = json.dumps({"cases": [entry]})
    program.write_text("#!/bin/bash\n[ \"$1\" = --list ] && { echo a/b/c/f32; exit; }\n"
                       "for word; do case $word in --json=*) "
                       f"[ {code} = 0 ] && echo '{report}' >\"${{word#--json=}}\";; esac; done\n"
                       f"echo \"$@\" >>{tmp_path}/calls; echo 'no luck' >&2; exit {code}\n")
    program.chmod(0o755)
    return peers.Ours(str(program), 2)


def test_turns_alternate_and_medians_count(tmp_path):
    ours = fake_bench(tmp_path, {"name": "a/b/c/f32", "median_ms": 2.0})
    good = PeerStandIn("A", {"variant": "way", "error": 1e-7}, [3.0, 9.0, 5.0])
    rows = peers.compare("a/b/c/f32", ours, [good, PeerStandIn("B", {"unsupported": "no such thing"})], 3, 0.1)
    assert rows[0]["peer_ms"] == 5.0 and rows[0]["attend_ms"] == 2.0 and rows[0]["ratio"] == 2.5
    assert rows[0]["turns_ms"] == [3.0, 9.0, 5.0] and "ratio" not in rows[1]
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 3 and "--cases=^a/b/c/f32$" in calls[0] and "--threads=2" in calls[0]


def test_what_attend_bench_can_not_do(tmp_path):
    peer = PeerStandIn("A", {"variant": "", "error": 0.0}, [1.0])
    ours = fake_bench(tmp_path, {"name": "a/b/c/f32", "failure": "failed: memory"})
    assert peers.compare("a/b/c/f32", ours, [peer], 1, 0.1)[0]["note"] == "attend: failed: memory"
    assert "no such case" in peers.compare("a/b/c/i8", ours, [peer], 1, 0.1)[0]["note"]
    with pytest.raises(peers.Failure, match="ended with 1: no luck"):
        fake_bench(tmp_path, {}, code=1).run("a/b/c/f32")


def test_a_peer_that_ends_is_a_failure(monkeypatch):
    monkeypatch.setattr(peers, "HERE", pathlib.Path("/nonexistent"))
    with pytest.raises(peers.Failure, match="torch ended with 2"):
        peers.Peer(sys.executable, "torch", 1)


def row(case, ratio, error=1e-7, peer="A", other_load=0.0):
    return {"case": case, "peer": peer, "variant": "way", "attend_ms": 2.0, "peer_ms": 2.0 * ratio, "ratio": ratio,
            "error": error, "turns_ms": [1.0, 1.1], "attend_turns_ms": [2.0, 2.0], "other_load": other_load}


def test_table():
    line = peers.table_row(row("layer/bert-base/128/f32", 1.5), 1e-5)
    assert line.split() == ["layer/bert-base/128/f32", "2.000", "A", "3.000", "1.50", "10%", "1e-07", "faster", "(way)"]
    assert "SLOWER" in peers.table_row(row("layer/bert-base/128/f32", 0.99), 1e-5)
    assert "LOWER PRECISION" in peers.table_row(row("layer/bert-base/128/f32", 1.5, error=4e-3), 1e-5)
    assert "had 30 % of the machine" in peers.table_row(row("layer/bert-base/128/f32", 1.5, other_load=0.3), 1e-5)
    missing = {"case": "layer/bert-base/128/bf16", "peer": "B", "attend_ms": 2.0, "unsupported": "no bf16"}
    assert peers.table_row(missing, 1e-5).endswith("no bf16")


def test_summary_names_what_is_not_good():
    text = peers.summary([row("layer/x/1/f32", 0.9), row("layer/x/1/bf16", 1.2), row("decode/x/1x1/f32", 1.5),
                          row("decode/y/1x1/f32", 1.9, error=1e-3), {"case": "c", "peer": "B", "note": "why"}],
                         peer_cases.TOLERANCE)
    lines = text.splitlines()
    assert lines[0].startswith("4 comparisons")
    assert lines[1] == "A peer is faster: layer/x/1/f32 (A 0.90)"
    assert lines[2] == "Decode below 1.8 x: decode/x/1x1/f32 (A 1.50)"
    assert lines[3] == "Lower precision than asked for: A in decode/y/1x1/f32 (1e-03)"
    assert lines[4] == "Not compared: c (why)"
    assert "A peer is faster: none" in peers.summary([row("layer/x/1/f32", 1.1)], peer_cases.TOLERANCE)


def test_work_of_others_is_seen():
    watch = peers.Watch(lambda: 0.0)  # so this process is one of the others
    end = peers.time.monotonic() + 0.3
    while peers.time.monotonic() < end:
        pass
    assert watch.others() > 0
    assert peers.process_seconds(os.getpid()) > 0


# ---- The command line ----


@pytest.mark.parametrize("words, message", [
    (["--peers=torch,jax"], "--peers: got jax, wanted some of torch, onnxruntime, openvino"),
    (["--peers="], "--peers: got none"),
    (["--threads=0"], "got 0, wanted 1 or more"),
    (["--threads=100000"], "wanted at most the"),
    (["--what"], "unrecognized arguments: --what"),
])
def test_wrong_usage(words, message):
    done = run(*words)
    assert done.returncode == 2 and message in done.stderr and done.stdout == ""


def test_a_missing_or_old_environment_is_told_with_the_command_that_makes_it(tmp_path):
    done = run(f"--environment={tmp_path / 'none'}")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (f"peers.py: no {tmp_path}/none/bin/python: make it with python3 tests/bench/peers.py "
                           f"--make_environment --environment={tmp_path}/none\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").touch()
    (tmp_path / "made-from").write_text("other packages")
    done = run(f"--environment={tmp_path}")
    assert done.returncode == 2 and "is not what peers-requirements.txt asks for" in done.stderr


def environment_of_this(tmp_path):
    """A folder that passes for the environment: this Python, so that no other is started."""
    (tmp_path / "made-from").write_text(peers.requirements_hash())
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").write_text(f"#!/bin/bash\nexec {sys.executable} -c \""
                                         f"import sys; sys.prefix = '{tmp_path}'; sys.argv = sys.argv[1:]; "
                                         f"sys.path.insert(0, '{HERE}'); import peers; "
                                         "sys.exit(peers.main(sys.argv[1:]))\" \"$@\"\n")
    (tmp_path / "bin/python").chmod(0o755)
    return f"--environment={tmp_path}"


def test_list_and_what_is_missing(tmp_path):
    environment = environment_of_this(tmp_path)
    done = run(environment, "--list", "--cases=mixed/bert-base")
    assert done.stdout.split() == [f"mixed/bert-base/2048/{kind}" for kind in peer_cases.TYPES], done.stderr
    done = run(environment, "--cases=layer/none")
    assert done.returncode == 2 and "--cases: no case 'layer/none'; there are layer/transformer-base/512" in done.stderr
    done = run(environment, f"--attend_bench={tmp_path}/gone")
    assert done.returncode == 2 and f"--attend_bench: no program {tmp_path}/gone" in done.stderr
    done = run(environment, "--service", f"--attend_server={tmp_path}/gone")
    assert done.returncode == 2 and f"--attend_server: no program {tmp_path}/gone" in done.stderr
    assert run(environment, "--make_environment").stdout == f"{tmp_path} is up to date\n"


def test_requirements_are_complete_and_pinned():
    lines = [line for line in peers.REQUIREMENTS.read_text().splitlines() if not line.startswith("#")]
    assert all(line.count("==") == 1 for line in lines)
    assert {"torch", "onnxruntime", "openvino", "grpcio", "numpy"} <= {line.partition("==")[0] for line in lines}


# ---- Services ----

FAKE_LIBRARY = """
def setup(threads):
    assert threads == 1

def service(case, data, parallel):
    assert case.types == "f32" and not parallel
    return lambda rows: rows * 2
"""


@pytest.mark.parametrize("which", peer_service.LOADS)
def test_the_plain_server_and_the_client(tmp_path, which):
    (tmp_path / "peer_fake.py").write_text(FAKE_LIBRARY)
    command = [sys.executable, HERE / "peer_service.py", "serve", "fake", "f32", "1", "in turn"]
    with peer_service.Server(command, "^listening (.*)$", {"PYTHONPATH": str(tmp_path)}, tmp_path / "log") as server:
        answer = peer_service.call(server.address, False, which, 0.3)
        channel = peer_service.grpc.insecure_channel(server.address, options=peer_service.OPTIONS)
        request = peer_service.request_of(16, False)
        answered = channel.unary_unary(peer_service.METHOD)(request, timeout=10)
        channel.close()
    assert np.array_equal(np.frombuffer(answered, np.float32), 2 * np.frombuffer(request, np.float32))
    assert answer["p50_ms"] > 0
    if which != peer_service.LOADS[2]:
        assert answer["tokens_per_second"] == pytest.approx(128 * answer["requests_per_second"])


def test_a_server_that_does_not_start_is_a_failure(tmp_path):
    with pytest.raises(peers.Failure, match="does not listen:\nno way"):
        peer_service.Server(["sh", "-c", "echo no way; exit 3"], "^listening (.*)$", {}, tmp_path / "log")


def test_our_request_holds_the_same_rows():
    sys.path.insert(0, str(HERE.parents[1] / "client/python"))
    import attend_client
    request = attend_client._decode(attend_client.AttendRequest, peer_service.request_of(3, True))
    assert request.layer == "0" and list(request.hidden_states.shape) == [3, 768]
    assert bytes(request.hidden_states.data) == peer_service.request_of(3, False)


def test_services_are_compared_by_latency_at_one_client_and_by_rate_at_many(monkeypatch):
    seen = {"attend": [(1.0, 100), (2.0, 300)], "A": [(9.0, 1), (3.0, 150)], "B": [(9.0, 1), (1.5, 400)]}
    servers = {name: types.SimpleNamespace(address=name) for name in seen}
    turns = {name: iter(values * 3) for name, values in seen.items()}

    def call(address, ours, which, seconds):
        assert ours == (address == "attend") and which in peer_service.LOADS and seconds == 0.5
        p50, rate = next(turns[address])
        return {"p50_ms": p50, "requests_per_second": rate, "tokens_per_second": 128 * rate}
    monkeypatch.setattr(peer_service, "call", call)
    rows = [row for which in peer_service.LOADS for row in peer_service.compare("f32", which, servers, 1, 0.5)]
    assert [row.get("p50_ratio") for row in rows[:3]] == [None, 1.5, 0.75]  # the first turn does not count
    assert [row.get("rate_ratio") for row in rows[3:6]] == [None, 2.0, 0.75]
    assert "faster" in peer_service.table_row(rows[1]) and "SLOWER" in peer_service.table_row(rows[2])
    assert peer_service.summary(rows).splitlines()[1:] == [
        "  f32, 1 client: 0.75 x p50 of B", "  f32, 16 clients: 0.75 x rate of B",
        "  f32, 16 clients, 16..512 rows: 0.75 x rate of B"]
