# SPDX-License-Identifier: Apache-2.0
"""A sentence encoder whose attention layers run on an attend server; everything else is numpy on this side.

For checkpoints of BERT's shape with mean pooling, as all-MiniLM-L6-v2 is. Needs attend_client.py beside it,
grpcio, numpy and tokenizers. As a command it prints how similar sentences are:

    python sentence_encoder.py --server 127.0.0.1:50051 --model-dir DIR "A man eats bread." "Someone is eating."

As a library:

    with Client("127.0.0.1:50051") as client:
        encoder = SentenceEncoder(client, "DIR", model="minilm")
        embeddings = encoder.encode(["A man eats bread.", "Run!"])  # [2, 384]
        similarity = embeddings @ embeddings.T
"""
from __future__ import annotations

import argparse
import json
import math
import pathlib
import struct
import sys
from typing import Union

import numpy as np
from tokenizers import Tokenizer

from attend_client import AttendError, Client

# erf at points 1 / _POINTS apart from -6 to 6, beyond which it is +-1 to 2e-17, and the differences to the next.
# Lines between them are off by at most max |erf''| / 8 / _POINTS^2 = 5e-9.
_POINTS = 5000
_ERF = np.array([math.erf(i / _POINTS) for i in range(-6 * _POINTS, 6 * _POINTS + 1)])
_STEP = np.diff(_ERF, append=1.0)
# Tokens sent in one call: 12 MB of MiniLM's hidden states, below the server's default limits.
_BATCH_TOKENS = 8192


def gelu(x: np.ndarray) -> np.ndarray:
    """The exact GELU, x times the normal distribution function, within 1e-8 and a rounding; keeps the dtype."""
    # NaN, which has no index, becomes -6 here.
    at = np.fmin(np.fmax((x * math.sqrt(0.5)).astype(np.float64), -6), 6)
    at = at * _POINTS + 6 * _POINTS
    low = at.astype(np.int32)
    erf = _ERF[low] + (at - low) * _STEP[low]
    return x * (0.5 + 0.5 * erf).astype(x.dtype)


def read_safetensors(path: Union[str, pathlib.Path]) -> dict[str, np.ndarray]:
    """Every float32 tensor of a .safetensors file by its name; the arrays are views of a mapped file."""
    data = np.memmap(path, np.uint8, "r")
    header_bytes = struct.unpack("<Q", data[:8])[0]
    header = json.loads(bytes(data[8:8 + header_bytes]))
    body = data[8 + header_bytes:]
    return {name: body[slice(*entry["data_offsets"])].view("<f4").reshape(entry["shape"])
            for name, entry in header.items() if name != "__metadata__" and entry["dtype"] == "F32"}


class SentenceEncoder:
    """Sentences to vectors of length 1. As thread-safe as numpy and Client are: encode from any thread.

    client: connected to a server that has loaded the same checkpoint.
    model_dir: the checkpoint: config.json, model.safetensors, tokenizer.json, sentence_bert_config.json and
        1_Pooling/config.json. FileNotFoundError names what is missing, ValueError what is not as expected.
    model: the checkpoint's name on the server.
    """

    def __init__(self, client: Client, model_dir: Union[str, pathlib.Path], model: str = "minilm"):
        folder = pathlib.Path(model_dir)

        def read(name: str) -> dict:
            return json.loads((folder / name).read_text(encoding="utf-8"))

        self._client = client
        self._model = model
        self._config = read("config.json")
        if self._config["model_type"] != "bert" or self._config["hidden_act"] != "gelu":
            raise ValueError(f"{folder}: wanted model_type bert with hidden_act gelu, got "
                             f"{self._config['model_type']} with {self._config['hidden_act']}")
        if not read("1_Pooling/config.json")["pooling_mode_mean_tokens"]:
            raise ValueError(f"{folder}: wanted pooling_mode_mean_tokens")
        self._tokenizer = Tokenizer.from_str((folder / "tokenizer.json").read_text(encoding="utf-8"))
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(read("sentence_bert_config.json")["max_seq_length"])
        self._weights = read_safetensors(folder / "model.safetensors")
        self._check_server()

    def _check_server(self) -> None:
        """The server's model has this checkpoint's shape."""
        served = {one.name: [(layer.d_model, layer.q_heads) for layer in one.layers]
                  for one in self._client.models()}
        wanted = [(self._config["hidden_size"], self._config["num_attention_heads"])]
        wanted *= self._config["num_hidden_layers"]
        if served.get(self._model) != wanted:
            raise ValueError(f"the server has no model {self._model} of {len(wanted)} layers, {wanted[0][0]} wide "
                             f"with {wanted[0][1]} heads; it serves {', '.join(served) or 'none'}")

    def encode(self, sentences: list[str]) -> np.ndarray:
        """float32 [sentences, hidden_size], each row of length 1. Longer sentences than max_seq_length tokens are
        cut. AttendError when a call fails."""
        if isinstance(sentences, str):
            raise TypeError("sentences: got a str, wanted a list of them")
        ids = [one.ids for one in self._tokenizer.encode_batch(list(sentences))]
        pooled = np.empty((len(ids), self._config["hidden_size"]), np.float32)
        first = 0
        while first < len(ids):
            last, tokens = first, 0
            while last < len(ids) and (last == first or tokens + len(ids[last]) <= _BATCH_TOKENS):
                tokens += len(ids[last])
                last += 1
            pooled[first:last] = self._pool(ids[first:last])
            first = last
        return pooled / np.linalg.norm(pooled, axis=1, keepdims=True)

    def _pool(self, ids: list[list[int]]) -> np.ndarray:
        """The mean of each sentence's last hidden states: sentences packed one after another, without padding."""
        lengths = [len(one) for one in ids]
        weights = self._weights
        x = weights["embeddings.word_embeddings.weight"][np.concatenate(ids)]
        x = x + weights["embeddings.position_embeddings.weight"][np.concatenate([np.arange(n) for n in lengths])]
        x = self._norm(x + weights["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
        for layer in range(self._config["num_hidden_layers"]):
            attended = self._client.attend(str(layer), x, model=self._model, lengths=lengths).output
            name = f"encoder.layer.{layer}."
            x = self._norm(attended + x, name + "attention.output.LayerNorm")
            inner = gelu(self._linear(x, name + "intermediate.dense"))
            x = self._norm(self._linear(inner, name + "output.dense") + x, name + "output.LayerNorm")
        starts = np.cumsum([0] + lengths[:-1])
        return np.add.reduceat(x, starts, axis=0) / np.array(lengths, np.float32)[:, None]

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self._weights[name + ".weight"].T + self._weights[name + ".bias"]

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        x = x - x.mean(-1, keepdims=True)
        x /= np.sqrt(np.mean(x * x, -1, keepdims=True) + np.float32(self._config["layer_norm_eps"]))
        return x * self._weights[name + ".weight"] + self._weights[name + ".bias"]


def main() -> int:
    parser = argparse.ArgumentParser(description="Prints how similar sentences are: their embeddings' cosines.")
    parser.add_argument("--server", default="127.0.0.1:50051", help="its address (default: %(default)s)")
    parser.add_argument("--model", default="minilm", help="name of the model on the server (default: %(default)s)")
    parser.add_argument("--model-dir", required=True, help="the checkpoint's folder, with tokenizer.json")
    parser.add_argument("sentences", nargs="+", metavar="SENTENCE")
    arguments = parser.parse_args()
    try:
        with Client(arguments.server, timeout=30) as client:
            encoder = SentenceEncoder(client, arguments.model_dir, arguments.model)
            embeddings = encoder.encode(arguments.sentences)
    except (AttendError, OSError, ValueError) as error:
        print(f"sentence_encoder: {error}", file=sys.stderr)
        return 1
    print("      " + " ".join(f"{i + 1:5d}" for i in range(len(embeddings))))
    for i, row in enumerate(embeddings @ embeddings.T):
        print(f"{i + 1:5d} " + " ".join(f"{value:5.2f}" for value in row) + f"  {arguments.sentences[i]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
