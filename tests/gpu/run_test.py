# SPDX-License-Identifier: Apache-2.0
"""run.sh on a machine without a GPU: what it packs, how it judges its steps (with a pack of small scripts in the
programs' places), and the programs it runs, on the emulated device."""
import json
import os
import pathlib
import shutil
import subprocess
import tarfile

import pytest

HERE = pathlib.Path(__file__).parent
RUN = HERE / "run.sh"
BIN = pathlib.Path(os.environ["ATTEND_BIN"])
EMULATED = BIN.parent / "simt" / "bin"


def sh(*words, **more):
    return subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=600,
                          check=False, **more)


# ---- The programs, emulated ----


def emulated(name):
    if not (EMULATED / name).exists():
        pytest.skip(f"this build has no simt/bin/{name}")
    return EMULATED / name


def test_the_wrappers_agree_with_themselves_and_a_changed_word_is_seen(tmp_path):
    program, file = emulated("attend-gpu-wrappers"), tmp_path / "expected"
    assert sh(program, "write", file).returncode == 0
    words = bytearray(file.read_bytes())
    assert words.count(b"\xef\xbe\xad\xde") == 0, "a kernel left a word of its output unwritten"
    done = sh(program, "check", file)
    assert done.returncode == 0 and "DIFFERENT" not in done.stdout, done.stdout
    # The middle is of a kernel that must agree bit for bit.
    words[len(words) // 3] ^= 1
    file.write_bytes(words)
    done = sh(program, "check", file)
    assert done.returncode == 1 and done.stdout.count("DIFFERENT") == 1, done.stdout
    assert "its operands:" in done.stdout


def test_a_file_of_another_version_is_refused(tmp_path):
    (tmp_path / "expected").write_bytes(b"something else")
    done = sh(emulated("attend-gpu-wrappers"), "check", tmp_path / "expected")
    assert done.returncode == 2 and "not written by this version" in done.stderr


def test_the_benchmark_runs_on_the_emulated_device(tmp_path):
    emulated("attend-engine-cuda.so")
    done = sh(emulated("attend-gpu-bench"), "--small", f"--json={tmp_path / 'bench.json'}")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "bench.json").read_text())
    assert {case["name"] for case in report["cases"]} >= {"layer", "decode, 4 heads share keys"}
    assert report["copy_bytes_per_second"] > 0 and report["matmul_flops_per_second"] > 0


@pytest.mark.parametrize("program", ["attend-gpu-wrappers", "attend-gpu-bench"])
def test_without_a_driver_the_programs_say_so(program, tmp_path):
    environment = dict(os.environ, ATTEND_EMULATED_DRIVER="none")
    sh(emulated("attend-gpu-wrappers"), "write", tmp_path / "expected")
    words = ["check", tmp_path / "expected"] if program == "attend-gpu-wrappers" else ["--small"]
    done = sh(emulated(program), *words, env=environment)
    assert done.returncode == 2 and "cudaErrorInsufficientDriver" in done.stderr


# ---- Packing ----


def test_the_pack_is_complete_and_small_and_without_a_gpu_the_reason_is_given(tmp_path):
    for file in ("attend-engine-cuda.so", "attend-gpu-wrappers", "engine_contract_test", "attend-server"):
        if not (BIN / file).exists():
            pytest.skip(f"this build has no {file}")
    emulated("attend-gpu-wrappers")
    pack = tmp_path / "pack.tar.gz"
    done = sh(RUN, "--pack", BIN.parent, pack)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    assert pack.stat().st_size < 64 << 20
    names = tarfile.open(pack).getnames()
    for wanted in ("run.sh", "wrappers.expected", "bin/attend-engine-cuda.so", "lib/libcudart.so.13",
                   "lib/libdnnl.so.2", "lib/fallback/libstdc++.so.6", "tests/golden/bert/cases.json"):
        assert f"attend-gpu/{wanted}" in names
    assert not [name for name in names if "libcublas" in name or "libcuda.so" in name or "libc.so" in name]
    if pathlib.Path("/dev/nvidia0").exists():
        return
    done = sh(RUN, pack, tmp_path / "out")
    assert done.returncode == 2 and "no CUDA device: cudaErrorInsufficientDriver" in done.stderr, done.stderr


# ---- Judging, with scripts as programs ----

SUITE = 'echo "[==========] Running 3 tests"; echo "[  PASSED  ] 3 tests."'
GOOD = {
    "attend-gpu-wrappers": 'echo "same Vectors"',
    "engine_contract_test": SUITE,
    "golden_test": SUITE,
    "bit_identity_test": SUITE,
    "attend-gpu-bench": 'for a; do case $a in --json=*) echo "{}" >"${a#--json=}";; esac; done; echo "a table"',
    "attend": 'case "$*" in *bench*) echo "{\\"p50\\": 1}";; esac',
    "attend-server": "trap 'exit 0' TERM; while sleep 0.1; do :; done",
}


def run_with(tmp_path, cublas=True, sanitizer=None, **changes):
    """Runs run.sh on a pack of scripts; returns the exit code, what was printed and the folder of results."""
    root = tmp_path / "attend-gpu"
    for folder in ("bin", "lib/fallback", "tests", "cuda", "tools"):
        (root / folder).mkdir(parents=True)
    (root / "wrappers.expected").touch()
    (root / "bin/attend-engine-cuda.so").write_bytes(b"\x7fELF libcublasLt.so.13\0")
    programs = {f"bin/{name}": script for name, script in {**GOOD, **changes}.items()}
    programs["tools/compute-sanitizer"] = sanitizer or "exit 0"
    for name, script in programs.items():
        (root / name).write_text(f"#!/bin/bash\n{script}\n")
        (root / name).chmod(0o755)
    # The pack must not answer for the machine, and the sanitizer not for a real one.
    shutil.move(root / "cuda", tmp_path / "cuda")
    shutil.move(root / "tools", tmp_path / "tools")
    if cublas:
        (tmp_path / "cuda/libcublasLt.so.13").touch()
    with tarfile.open(tmp_path / "pack.tar.gz", "w:gz") as pack:
        pack.add(root, "attend-gpu")
    environment = dict(os.environ, LD_LIBRARY_PATH=str(tmp_path / "cuda"),
                       PATH=f"{tmp_path / 'tools'}:{os.environ['PATH']}")
    done = sh(RUN, tmp_path / "pack.tar.gz", tmp_path / "out", env=environment)
    return done.returncode, done.stdout + done.stderr, tmp_path / "out"


def test_all_good(tmp_path):
    code, text, out = run_with(tmp_path)
    assert code == 0, text
    assert "all passed" in text and "NOT" not in text
    steps = [line.split()[3] for line in (out / "summary.txt").read_text().splitlines()]
    assert steps == ["wrappers", "contract", "golden", "bit-identity", "sanitizer-memcheck", "sanitizer-racecheck",
                     "sanitizer-synccheck", "bench", "service"]
    assert (out / "bench.json").exists() and (out / "service_decode.json").exists()
    assert f"cuBLASLt: {tmp_path / 'cuda'}" in text and "a table" in text


@pytest.mark.parametrize("name, script, step", [
    ("attend-gpu-wrappers", "echo DIFFERENT; exit 1", "wrappers"),
    ("engine_contract_test", "echo '[  FAILED  ] 1 test'; exit 1", "contract"),
    ("golden_test", "echo 'device: got cuda, wanted auto or cpu'; " + SUITE, "golden"),
    ("bit_identity_test", "echo '[  PASSED  ] 0 tests.'", "bit-identity"),
    ("attend-gpu-bench", "echo 'prefill: wrong'; exit 1", "bench"),
    ("attend-server", "exit 2", "service"),
])
def test_each_failure_is_one_and_the_others_still_run(tmp_path, name, script, step):
    code, text, out = run_with(tmp_path, **{name: script})
    summary = (out / "summary.txt").read_text().splitlines()
    assert code == 1 and "NOT all passed" in text, text
    failed = [line.split()[3].rstrip(":") for line in summary if line.startswith("FAILED")]
    # The sanitizer's tools run the benchmark, too, but a broken one is not their finding.
    assert failed == [step] and len(summary) == 9, summary


def test_a_race_is_a_failure_and_a_sanitizer_that_can_not_run_is_none(tmp_path):
    code, text, out = run_with(tmp_path, sanitizer='case "$2" in racecheck) echo "ERROR: race"; exit 9;; '
                               'synccheck) echo "Device not supported"; exit 255;; esac')
    summary = (out / "summary.txt").read_text()
    assert code == 1, text
    assert "FAILED      0 s  sanitizer-racecheck" in summary
    assert "sanitizer-synccheck: exit code 255, Device not supported" in summary and "not run" in summary


def test_no_device_and_no_cublas_are_told_from_failures(tmp_path):
    code, text, _ = run_with(tmp_path / "a", **{"attend-gpu-wrappers": "echo 'no CUDA device: why' >&2; exit 2"})
    assert code == 2 and "no CUDA device: why" in text


def test_usage_and_a_missing_pack(tmp_path):
    for words in ([], ["--pack"], ["--pack", "a"], ["a", "b", "c"], ["--help"]):
        done = sh(RUN, *words)
        assert done.returncode == 2 and "usage: run.sh" in done.stderr
    done = sh(RUN, tmp_path / "none", tmp_path / "out")
    assert done.returncode == 2 and "make it with --pack" in done.stderr
    done = sh(RUN, "--pack", tmp_path, tmp_path / "pack")
    assert done.returncode == 2 and "build everything first" in done.stderr


def test_shellcheck_has_no_complaint():
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed: deploy/install-dependencies.sh --tests")
    done = sh("shellcheck", RUN)
    assert done.returncode == 0, done.stdout
