# SPDX-License-Identifier: Apache-2.0
"""attend-server on the CUDA engine, through real clients: how it starts, serves, falls back, refuses and fails. The
device is the emulated one of tests/simt, a plugin beside the server in a folder of its own (ATTEND_SIMT_BIN); it shows
neither a GPU's speed nor its rounding.
"""
import concurrent.futures
import os
import pathlib
import re
import subprocess
import urllib.error

import numpy as np
import pytest
from attend_client import AttendError, Client

from support.golden_cases import largest_difference, largest_difference_in_sessions
from support.servers import BIN, PATIENCE, Process, Server, eventually, get, golden_model

SIMT = pathlib.Path(os.environ.get("ATTEND_SIMT_BIN", BIN.parent / "simt" / "bin"))
PLUGIN = "attend-engine-cuda.so"
MIB = 1 << 20
# An emulated thread costs about as much as a GPU's warp: everything is kept small.
SMALL = ("--message_bytes=1MiB", "--response_bytes=1MiB", "--queue_bytes=4MiB", "--kv_bytes=4MiB", "--batch_tokens=64",
         "--request_tokens=512")
LLAMA = golden_model("llama_gqa4")


@pytest.fixture(autouse=True)
def _built():
    if not (SIMT / PLUGIN).exists():
        pytest.skip(f"no {SIMT / PLUGIN}: build the target attend_simt_server")


def small(*flags):
    """The flags, and those of SMALL that they leave out."""
    given = {flag.partition("=")[0] for flag in flags}
    return [*(flag for flag in SMALL if flag.partition("=")[0] not in given), *flags]


def emulated(directory, *flags, env=None):
    return Server(directory, *small(*flags), folder=SIMT, env=env)


def refused(directory, *flags, folder=SIMT, env=None):
    """The line of a server that must end with 2 before it opens a port."""
    command = [folder / "attend-server", "--listen=127.0.0.1:0", "--metrics_listen=127.0.0.1:0", *small(*flags)]
    with Process(command, directory / "refused.log", env=env) as server:
        assert server.wait() == 2, server.log()
        lines = server.log().splitlines()
        assert len(lines) == 1 and lines[0].startswith("attend-server: "), server.log()
        return lines[0]


def test_golden_outputs_and_sessions_on_the_device(tmp_path):
    with emulated(tmp_path, "--device=cuda", golden_model("bert"), LLAMA) as server:
        with Client(server.address, timeout=PATIENCE, attempts=1) as client:
            info = client.server_info()
            assert info.engine == "cuda" and re.fullmatch(r"sm_\d+", info.isa) and info.device, info
            assert "cuda" in info.numerics_id, info
            assert info.limits.batch_tokens == 64 and info.limits.kv_bytes == 4 * MIB
            for name in ("bert", "llama_gqa4"):
                assert largest_difference(client, name) <= 1, name
            assert largest_difference_in_sessions(client, "llama_gqa4") <= 1
        assert re.search(r'attend_build_info\{[^}]*engine="cuda"[^}]*isa="sm_\d+"', server.page())
        assert server.total("attend_batches_total") > 0
        printed = subprocess.run([BIN / "attend", "--server", server.address, "info"], capture_output=True, text=True,
                                 timeout=PATIENCE, check=True).stdout
        assert re.search(r"^engine +cuda, .+, sm_\d+$", printed, re.MULTILINE), printed
        log = server.log()
        assert re.search(r" memory .*device_total=.*device_free=", log) and " device asked=" not in log
        server.signal()
        assert server.wait() == 0, server.log()


def test_alone_in_a_batch_and_in_a_decode_step_with_others(tmp_path):
    """Decode steps of several sessions in one call give each what it gets alone."""
    rows = np.random.default_rng(5).standard_normal((3, 7, 64)).astype(np.float32)
    with emulated(tmp_path, "--device=cuda", LLAMA) as server, \
            Client(server.address, timeout=PATIENCE, attempts=1) as client:
        alone = []
        for one in rows:
            with client.open_session(model="llama_gqa4") as session:
                alone.append([session.attend("0", one[:5]).output, *(session.attend("0", one[i:i + 1]).output
                                                                     for i in (5, 6))])
        sessions = [client.open_session(model="llama_gqa4") for _ in rows]
        steps = [[session.attend("0", one[:5]).output for session, one in zip(sessions, rows)]]
        for i in (5, 6):
            result = client.attend_sessions("0", sessions, [one[i:i + 1] for one in rows])
            steps.append(list(result.output))
        for index, session in enumerate(sessions):
            for step, output in enumerate(alone[index]):
                assert np.array_equal(np.asarray(steps[step][index]).reshape(output.shape), output), (index, step)
            session.close()


def test_raw_attention_needs_no_checkpoint(tmp_path):
    q, k, v = np.random.default_rng(6).standard_normal((3, 4, 2, 8)).astype(np.float32)
    with emulated(tmp_path, "--device=cuda") as server, \
            Client(server.address, timeout=PATIENCE, attempts=1) as client:
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(8)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        wanted = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)
        np.testing.assert_allclose(client.attend_raw(q, k, v).output.reshape(wanted.shape), wanted, atol=1e-5)


def test_auto_takes_the_device_and_says_so(tmp_path):
    with emulated(tmp_path, "--device=auto") as server, Client(server.address, timeout=PATIENCE) as client:
        assert client.server_info().engine == "cuda"
        assert len(re.findall(r" device asked=auto using=cuda name=", server.log())) == 1


def test_defaults_of_the_device_are_published(tmp_path):
    flags = [flag for flag in SMALL if not flag.startswith(("--kv_bytes", "--batch_tokens"))]
    with Server(tmp_path, "--device=cuda", *flags, folder=SIMT,
                env={"ATTEND_KV_BYTES": "", "ATTEND_EMULATED_MEMORY_BYTES": str(1024 * MIB)}) as server, \
            Client(server.address, timeout=PATIENCE) as client:
        limits = client.server_info().limits
        assert limits.batch_tokens == 8192 and limits.kv_bytes == 256 * MIB


def test_auto_without_a_driver_serves_on_the_cpu_and_logs_one_line(tmp_path):
    with emulated(tmp_path, "--device=auto", LLAMA, env={"ATTEND_EMULATED_DRIVER": "none"}) as server, \
            Client(server.address, timeout=PATIENCE, attempts=1) as client:
        assert client.server_info().engine == "cpu"
        assert largest_difference(client, "llama_gqa4") <= 1
        lines = re.findall(r"^.* device .*$", server.log(), re.MULTILINE)
        assert len(lines) == 1 and "asked=auto using=cpu why=" in lines[0] and "driver" in lines[0], lines


def test_cuda_without_a_driver_is_refused_with_its_reason(tmp_path):
    line = refused(tmp_path, "--device=cuda", LLAMA, env={"ATTEND_EMULATED_DRIVER": "none"})
    assert "device" in line and "driver" in line, line


def test_a_build_without_the_engine_says_so(tmp_path):
    bare = tmp_path / "bin"
    bare.mkdir()
    os.link(SIMT / "attend-server", bare / "attend-server")
    assert "no CUDA engine" in refused(tmp_path, "--device=cuda", folder=bare)
    with Server(tmp_path, *SMALL, folder=bare) as server:
        assert re.search(r" device asked=auto using=cpu why=.*no CUDA engine", server.log())


def test_tf32_is_for_cuda(tmp_path):
    line = refused(tmp_path, "--device=cpu", "--compute=tf32")
    assert "--compute" in line and "auto|fp32|bf16" in line, line
    with emulated(tmp_path, "--device=cuda", "--compute=tf32", LLAMA) as server, \
            Client(server.address, timeout=PATIENCE) as client:
        assert client.attend("0", np.ones((2, 64), np.float32), model="llama_gqa4").output.shape == (2, 64)


def test_too_little_device_memory_is_refused_with_numbers_and_the_flag(tmp_path):
    few = {"ATTEND_EMULATED_MEMORY_BYTES": str(384 * MIB)}
    line = refused(tmp_path, "--device=cuda", "--kv_bytes=372MiB", LLAMA, env=few)
    assert "kv 372 MiB" in line and re.search(r"= \d+ MiB do not fit into the free \d+ MiB of 384 MiB", line), line
    # What it advises works.
    advised = re.search(r"lower --kv_bytes to (\d+MiB) at most", line)[1]
    with emulated(tmp_path, "--device=cuda", f"--kv_bytes={advised}", LLAMA, env=few):
        pass


def ready(server):
    """Status of /readyz; 0 once the process no longer answers."""
    try:
        get(f"http://{server.http}/readyz", timeout=5)
        return 200
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def test_a_device_error_ends_the_process_and_everybody_is_told(tmp_path):
    rows = np.ones((3, 64), np.float32)
    clients = 4
    with emulated(tmp_path, "--device=cuda", LLAMA, env={"ATTEND_EMULATED_FAIL_LAUNCH": "100"}) as server:
        def call_until_it_fails():
            with Client(server.address, timeout=PATIENCE, attempts=1) as client:
                for _ in range(1000):
                    try:
                        client.attend("0", rows, model="llama_gqa4")
                    except AttendError as error:
                        return error
            return None

        assert ready(server) == 200
        with concurrent.futures.ThreadPoolExecutor(clients) as pool:
            errors = [future.result() for future in [pool.submit(call_until_it_fails) for _ in range(clients)]]
        assert all(errors), errors
        for error in errors:
            assert (error.code, error.reason) == ("INTERNAL", "ENGINE_FAULT") or error.code == "UNAVAILABLE", error
        assert any(error.reason == "ENGINE_FAULT" for error in errors), errors
        eventually(lambda: ready(server) != 200)
        assert server.wait() not in (0, 2), server.log()
        assert "engine_failed" in server.log()
